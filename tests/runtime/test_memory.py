"""Commands set glibc's allocator before other libraries start threads."""

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import recjax
from recjax.runtime import cache
from recjax.runtime import memory as host_memory
from recjax.runtime.memory import with_tunables
from tests.marks import slow


def test_what_the_user_says_stays():
    all_of_them = with_tunables("")
    assert all_of_them.count(":") == len(host_memory.TUNABLES) - 1 and "glibc.malloc.hugetlb=1" in all_of_them
    assert with_tunables(all_of_them) == all_of_them
    own = with_tunables("glibc.malloc.check=3:glibc.malloc.hugetlb=0")
    assert own.startswith("glibc.malloc.check=3:glibc.malloc.hugetlb=0:glibc.malloc.arena_max=1:")
    assert own.count("hugetlb") == 1


def test_a_command_starts_once(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    command = [sys.executable, "-X", "importtime", "-m", "recjax.train", f"--config={tmp_path / 'none.yaml'}"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.count("none.yaml") == 1
    assert sum(line.endswith(" recjax.runtime.memory") for line in ended.stderr.splitlines()) == 1


AS_COMMAND = """
import sys
sys.orig_argv = ["python", "-m", "recjax.train", "--config=none.yaml"]
import recjax
"""
REUSED = """
import ctypes, os, resource

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for start in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        piece = libc.malloc(ctypes.c_size_t(64 << 20))
        ctypes.memset(piece, 1, 64 << 20)
        libc.free(ctypes.c_void_p(piece))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, "arena_max" in os.environ.get("GLIBC_TUNABLES", ""))
"""


@pytest.mark.skipif(not host_memory.has_glibc(), reason="needs glibc")
def test_only_commands_change_how_memory_is_freed():
    environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    for program, is_command in ((AS_COMMAND, True), ("import recjax", False)):
        command = [sys.executable, "-c", f"{program}\n{REUSED}"]
        faults, are_passed_on = subprocess.run(command, env=environment, capture_output=True, text=True).stdout.split()
        assert (int(faults) < 100, are_passed_on) == (is_command, str(is_command))


def test_a_test_is_no_command(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    importlib.reload(recjax)
    assert "GLIBC_TUNABLES" not in os.environ


GAPS = """
import ctypes, re
from pathlib import Path
from recjax.runtime.memory import close_gaps

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
sizes = [5000 + 16 * number for number in range(20_000)]
pieces = [libc.malloc(ctypes.c_size_t(size)) for size in sizes]
for piece, size in zip(pieces, sizes):
    ctypes.memset(piece, 1, size)
for piece in pieces[::2]:
    libc.free(ctypes.c_void_p(piece))

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def without_huge_pages(place):
    areas = re.findall(r"^(\\w+)-(\\w+) .*?^VmFlags:([^\\n]*)", Path("/proc/self/smaps").read_text(), re.M | re.S)
    return next("nh" in flags.split() for first, last, flags in areas if int(first, 16) <= place < int(last, 16))

before = resident()
changed = sum(ctypes.string_at(piece, 1) != b"\\1" for piece in pieces[1::2])
print(close_gaps(), before - resident(), close_gaps(), changed)
print(without_huge_pages(pieces[10_001]), without_huge_pages(libc.malloc(ctypes.c_size_t(1 << 26)) + (1 << 25)))
"""


@pytest.mark.skipif(not host_memory.has_glibc(), reason="of glibc alone")
@pytest.mark.slow
@pytest.mark.parametrize("prepared", ["environment", "command", None])
def test_gaps_are_taken_and_their_pages_given_back(prepared):
    given = with_tunables("") if prepared == "environment" else ""
    ended = subprocess.run(
        [sys.executable, "-c", f"{AS_COMMAND if prepared == 'command' else ''}{GAPS}"],
        env=os.environ | {"GLIBC_TUNABLES": given},
        capture_output=True,
        text=True,
        check=True,
    )
    counts, huge = ended.stdout.splitlines()
    taken, given_back, taken_again, changed = map(int, counts.split())
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert huge == f"{prepared is not None} False"  # around the gaps, and in what is asked for later
    if prepared:
        assert taken >= 10_000 and given_back > 0.5e9 and taken_again < 100
    else:
        assert taken == taken_again == 0
    assert changed == 0


STEPS = """
import ctypes, sys
from recjax.runtime import memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_size_t

def allocated(size):
    return libc.malloc(ctypes.c_size_t(size))

def step(number):
    temporary = allocated(900 << 20)
    allocated(20_000 + number)  # stays, and is behind the temporary arrays in the first step
    libc.free(ctypes.c_void_p(temporary))
    allocated(1 << 20)  # stays
    return temporary

if "room" not in sys.argv:
    memory.ROOM = 0
memory.close_gaps()
places = {step(number) for number in range(4)}
print(max(places) - min(places))
"""


@pytest.mark.skipif(not host_memory.has_glibc(), reason="of glibc alone")
@pytest.mark.slow
@pytest.mark.parametrize("is_left", [True, False])
def test_arrays_that_stay_leave_temporary_ones_their_place(is_left):
    command = [sys.executable, "-c", AS_COMMAND + STEPS, *["room"] * is_left]
    moved = int(subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True).stdout)
    assert (moved < 100 << 20) == is_left, moved


def test_gaps_are_closed_after_a_long_compilation_alone(monkeypatch):
    closed = []
    monkeypatch.setattr(cache, "close_gaps", lambda: closed.append(1))
    for _ in range(2):
        cache.close_gaps_after_compiling()
    for event, seconds in [("backend_compile", 0.7), ("backend_compile", 0.3), ("jaxpr_trace", 0.7)]:
        jax.monitoring.record_event_duration_secs(f"/jax/core/compile/{event}_duration", seconds)
    assert closed == [1]


@pytest.mark.parametrize("closed", [0, *slow(1)])  # in a library, and in a command
def test_the_first_steps_freeze_objects_until_the_context_ends(monkeypatch, closed):
    gc.unfreeze()
    monkeypatch.setattr(host_memory, "close_gaps", lambda: closed)
    with host_memory.settling_memory() as settle:
        for step in range(3):
            settle(step)
            assert (gc.get_freeze_count() > 0) == bool(closed)
        gc.unfreeze()
        settle(host_memory.SETTLING_STEPS)  # a later step, which changes nothing
        assert gc.get_freeze_count() == 0
        settle(0)
    assert gc.get_freeze_count() == 0
    gc.freeze()  # what the tests import
