"""What an asynchronous run listens on: nothing that another machine can reach, or another user without a token."""

import contextlib
import os
import socket
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from recjax.config import RegimeConfig
from recjax.errors import UserError
from recjax.sources import generators
from recjax.sources.generators import Generators

LISTENS = "0A"


def listening():
    """(address, port) on which this process and its descendants wait for connections."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(after[1])
    ours, inodes = {os.getpid()}, set()
    while more := {child for child, parent in parents.items() if parent in ours} - ours:
        ours |= more
    for process in ours:
        for descriptor in Path(f"/proc/{process}/fd").glob("*"):
            try:
                inodes.add(os.readlink(descriptor))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in inodes:
                raw, port = fields[1].split(":")
                packed = b"".join(struct.pack("=I", int(raw[i : i + 8], 16)) for i in range(0, len(raw), 8))
                family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
                found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


@pytest.mark.slow
def test_ray_listens_on_loopback_alone():
    if "ray" in sys.modules:
        pytest.skip("Ray was imported by another test, and reads what it listens on when it is imported")
    pytest.importorskip("recjax.sources.generators")
    before = listening()
    with Generators(RegimeConfig(mode="async", max_staleness=1, generators=1), contextlib.nullcontext):
        opened = listening() - before
        assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) >= 32
    assert opened, "Ray's own processes talk to one another"
    loopback = ("127.", "::1", "::ffff:127.")
    assert not [place for place in opened if not place[0].startswith(loopback)]


def test_ray_that_was_imported_too_early_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.delenv(generators._ONLY_LOOPBACK, raising=False)
    with pytest.raises(ValueError, match="ray was imported before recjax started it"):
        Generators(RegimeConfig(mode="async", max_staleness=1), contextlib.nullcontext)._connect()
    # A command sets the variables before it imports a user's module.
    monkeypatch.delitem(sys.modules, "ray")
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    generators.keep_ray_on_loopback()
    assert os.environ[generators._ONLY_LOOPBACK] == "0" and os.environ["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize(("late", "other"), [(2, ""), (3, ""), (1, "no room")])
def test_ray_that_starts_late_is_started_again(monkeypatch, late, other):
    tries = []

    def init(*_, **__):
        tries.append(len(tries))
        if len(tries) <= late:
            raise Exception(other or "The current node timed out during startup. This could …")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv(generators._ONLY_LOOPBACK, "0")
    opened = Generators(RegimeConfig(mode="async", max_staleness=1), contextlib.nullcontext)
    if late == 2:
        opened._connect()
        assert len(tries) == 3
        return
    with pytest.raises(Exception, match=other or "in 3 tries") as caught:
        opened._connect()
    assert isinstance(caught.value, UserError) == (not other) and len(tries) == late
