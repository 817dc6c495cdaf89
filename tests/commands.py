"""Commands in processes that a server forks once JAX and the package are imported.

A command imports for six seconds, and a tiny run lasts one. A forked command differs from `python -m` in two ways: its
imports are done, and its memory allocator got its settings from the environment.
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from recjax.runtime.memory import with_tunables

ROOT = Path(__file__).parents[1]
# Everything that commands import, and no command: it defines its flags when it starts.
_IMPORTS = ("recjax.planning.dry_run", "recjax.serving.app", "recjax.hub.export", "recjax.hub.model_card")
_IMPORTS += ("recjax.analysis.samples", "recjax.plots.samples", "recjax.plots.store", "recjax.plots.training")


@functools.cache
def forks() -> multiprocessing.context.BaseContext:
    """The context of the server, which this starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTS, "tests.faults.runs", "tests.training.killed_run"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GLIBC_TUNABLES", with_tunables(""))
        forkserver.ensure_running()
    return context


class Command:
    """A command that runs: the part of `subprocess.Popen` that tests use, with text.

    Args:
        arguments: after `python`, beginning with -m or -c.
        cwd: the folder; default: the repository.
        env: the environment; default: this process's.
        stdout, stderr: as for Popen; None: pytest's.
        start_new_session: as for Popen.
    """

    def __init__(self, arguments: Sequence, *, cwd=ROOT, env=None, stdout=None, stderr=None, start_new_session=False):
        environment = {"GLIBC_TUNABLES": with_tunables(""), **(os.environ if env is None else env)}
        self.args = [str(argument) for argument in arguments]
        with contextlib.ExitStack() as sent:
            out, self.stdout = _stream(stdout, sent)
            error, self.stderr = (out, None) if stderr == subprocess.STDOUT else _stream(stderr, sent)
            about = self.args, str(cwd), environment, out, error, start_new_session
            self._process = forks().Process(target=_become, args=about)
            self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        texts = {}

        def read(name: str, stream) -> None:
            texts[name] = stream.read()

        streams = {name: stream for name in ("stdout", "stderr") if (stream := getattr(self, name))}
        readers = [threading.Thread(target=read, args=item, daemon=True) for item in streams.items()]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return texts.get("stdout"), texts.get("stderr")

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(arguments: Sequence, *, timeout: float = 300, **options) -> subprocess.CompletedProcess:
    """A command that has ended, with its standard output and error, unless `options` send these elsewhere."""
    command = Command(arguments, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})
    try:
        texts = command.communicate(timeout)
    finally:
        command.kill()
    return subprocess.CompletedProcess(command.args, command.returncode, *texts)


def _stream(where, sent: contextlib.ExitStack) -> tuple[Connection | None, object]:
    """A stream of the command, which `sent` closes here, and the end from which the test reads."""
    if where is None:
        return None, None
    reader = None
    if where == subprocess.PIPE:
        read, write = os.pipe()
        reader = open(read, encoding="utf-8", errors="replace", newline="")
    else:
        write = os.open(os.devnull, os.O_WRONLY) if where == subprocess.DEVNULL else os.dup(where.fileno())
    return sent.enter_context(Connection(write, readable=False)), reader


def _become(
    arguments: list[str],
    folder: str,
    environment: dict,
    out: Connection | None,
    error: Connection | None,
    start_new_session: bool,
):
    """Runs the command in a process that the server has forked."""
    if start_new_session:
        os.setsid()
    for number, stream in ((1, out), (2, error)):
        if stream is not None:
            os.dup2(stream.fileno(), number)
    for stream in {out, error} - {None}:
        stream.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    kind, program, *rest = arguments
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        if kind == "-m":
            sys.argv = [program, *rest]
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [kind, *rest]
            main = sys.modules["__main__"] = types.ModuleType("__main__")  # the program may name its own functions
            exec(compile(program, "<string>", "exec"), main.__dict__)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves these to the end of the server


# --- Two commands that meet.


def two_of(tmp_path, arguments, names=(), own=((), ()), folders=(ROOT, ROOT)):
    """Two commands with these arguments, those of each, and behind them how they meet, by the names of flags."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count=2 {os.environ.get('XLA_FLAGS', '')}"
    commands = []
    for number in range(2):
        values = (f"127.0.0.1:{port}", "2", str(number))
        which = [word for pair in zip(names, values, strict=True) for word in pair] if names else values
        with (tmp_path / f"{number}.log").open("w") as log:
            options = {"env": os.environ | {"XLA_FLAGS": flags}, "stdout": log, "stderr": subprocess.STDOUT}
            commands.append(Command([*arguments, *own[number], *which], cwd=folders[number], **options))
    return commands


def said(tmp_path, number):
    return (tmp_path / f"{number}.log").read_text()
