"""Starts llama.cpp's server on a GGUF file; needs only the package `xllamacpp`, in an environment of its own.

    python -m venv llama && llama/bin/pip install xllamacpp
    llama/bin/python experiments/llama_cpp_server.py MODEL.gguf --port 8080

It prints its URL, and serves until it is interrupted.
"""

import argparse
import threading

import xllamacpp


def serve(file: str, port: int, threads: int) -> xllamacpp.Server:
    """Loads the model and serves it on this machine; 8 completions at a time, of 1,024 tokens with their prompts."""
    options = xllamacpp.CommonParams()
    options.model.path, options.hostnames, options.port = file, ["127.0.0.1"], port
    options.n_parallel, options.n_ctx, options.verbosity = 8, 8 * 1024, 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="GGUF file of the model")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; more than free cores are slow")
    given = parser.parse_args()
    server = serve(given.file, given.port, given.threads)
    print(server.listening_address, flush=True)
    threading.Event().wait()
