"""Starts llama.cpp's server on a GGUF file; needs only the package `xllamacpp`, in an environment of its own.

    python -m venv llama && llama/bin/pip install xllamacpp
    llama/bin/python experiments/llama_cpp_server.py MODEL.gguf --port 8080

It prints its URL, and serves until it is interrupted.
"""

import argparse
import threading

import xllamacpp


def serve(file: str, port: int, threads: int, float32_caches: bool) -> xllamacpp.Server:
    """Loads the model and serves it on this machine; 8 completions at a time, of 1,024 tokens with their prompts."""
    options = xllamacpp.CommonParams()
    options.model.path, options.hostnames, options.port = file, ["127.0.0.1"], port
    options.n_parallel, options.n_ctx, options.verbosity = 8, 8 * 1024, 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    if float32_caches:
        options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it takes float16
    return xllamacpp.Server(options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="GGUF file of the model")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; more than free cores are slow")
    parser.add_argument(
        "--float32_caches", action="store_true", help="exact log-probs, if the file's weights are float32 as well"
    )
    given = parser.parse_args()
    server = serve(given.file, given.port, given.threads, given.float32_caches)
    print(server.listening_address, flush=True)
    threading.Event().wait()
