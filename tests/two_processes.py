"""Two processes that a test starts, and what they say."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def two_of(tmp_path, arguments, names=()):
    """Two processes of Python with these arguments, and behind them how they meet, by the names of flags."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    processes = []
    for number in range(2):
        values = (f"127.0.0.1:{port}", "2", str(number))
        which = [word for pair in zip(names, values, strict=True) for word in pair] if names else values
        command = [sys.executable, *arguments, *which]
        with (tmp_path / f"{number}.log").open("w") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return processes


def said(tmp_path, number):
    return (tmp_path / f"{number}.log").read_text()
