"""How the C library gives memory to a process that computes on the CPU."""

import contextlib
import ctypes
import mmap
import os
import sys

# What glibc reads from GLIBC_TUNABLES as a process starts, by name: one heap for all threads, which keeps what is
# freed, has large arrays too, grows by 64 MiB, and asks for huge pages (from glibc 2.35 on, where the kernel gives
# them to those who ask).
TUNABLES = {
    "glibc.malloc.arena_max": 1,
    "glibc.malloc.mmap_max": 0,
    "glibc.malloc.trim_threshold": 2**64 - 1,
    "glibc.malloc.top_pad": 64 << 20,
    "glibc.malloc.hugetlb": 1,
}
LEAST_GAP = 8192  # bytes; smaller gaps of the heap are left, for small arrays
SETTLING_STEPS = 2  # of training: after each gaps are closed, around what it leaves for good


def prepare_host_memory() -> None:
    """Has glibc keep what is freed for what is asked for next; the first thing that a command does.

    XLA on the CPU asks for its temporary arrays anew at every call. glibc would take large ones from the kernel and
    give them back each time, and every page be filled with zeros again: a good part of an update. Only an environment
    variable makes all of glibc do otherwise, so a command of ours, which has done nothing yet, begins anew with it,
    once. What GLIBC_TUNABLES says already stays as it is. Without glibc, or in a process that is no command of ours,
    nothing is done.
    """
    given = os.environ.get("GLIBC_TUNABLES", "")
    tunables = with_tunables(given)
    if tunables == given or not _has_glibc() or not _is_command():
        return
    os.environ["GLIBC_TUNABLES"] = tunables
    with contextlib.suppress(OSError):
        os.execv(sys.executable, sys.orig_argv)
    os.environ["GLIBC_TUNABLES"] = given


def with_tunables(given: str) -> str:
    """What GLIBC_TUNABLES should be, where it is `given`."""
    ours = [f"{name}={value}" for name, value in TUNABLES.items() if f"{name}=" not in given]
    return ":".join(filter(None, [given, *ours]))


def close_gaps() -> int:
    """Takes the free pieces that lie between others on the heap, for good, and gives their pages back to the kernel.

    Compiling leaves tens of thousands of them, of many sizes, and glibc looks through them whenever an array is asked
    for: of some models sampling takes a quarter longer in the process that compiled it. Address space is all that
    they take from now on: from the first to the last of them the kernel makes no more huge pages, which would fill
    them again. Nothing is done without glibc 2.33, or where the heap is not that of `prepare_host_memory`.

    Returns:
        How many pieces were taken.
    """
    given = os.environ.get("GLIBC_TUNABLES", "")
    if given != with_tunables(given) or not _has_glibc():
        return 0
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.mallinfo2.restype, libc.sbrk.restype, libc.malloc.restype = _HeapInfo, ctypes.c_size_t, ctypes.c_size_t
    top, taken, size = libc.sbrk(0) - libc.mallinfo2().keepcost, [], 1 << 30
    while size >= LEAST_GAP:
        start = libc.malloc(ctypes.c_size_t(size))
        if start == 0 or start + size > top:
            # No gap is as large: what came is of the end of the heap, which is not a gap.
            libc.free(ctypes.c_void_p(start))
            size //= 2
            continue
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        taken.append((first, last))
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
    if taken:
        first, last = min(taken)[0], max(taken)[1]
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_NOHUGEPAGE)
    return len(taken)


class _HeapInfo(ctypes.Structure):
    """What mallinfo2 returns; the last number is the bytes at the end of the heap that are free."""

    _fields_ = (("others", ctypes.c_size_t * 9), ("keepcost", ctypes.c_size_t))


def _has_glibc() -> bool:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION").startswith("glibc")
    except (AttributeError, ValueError, OSError):
        return False


def _is_command() -> bool:
    """Whether this process was started as `python -m` and a module of ours, and not by a notebook or a test."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.split(".")[0] in ("recjax", "benchmarks")
