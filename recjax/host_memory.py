"""How the C library gives memory to a process that computes on the CPU."""

import ctypes
import sys

# Parameters of mallopt(3) in glibc.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> None:
    """Has glibc keep what is freed for what is asked for next; call it before threads start, so before JAX does.

    XLA on the CPU asks for its temporary arrays anew at every call. glibc would take them from the kernel and give them
    back each time, and every page be filled with zeros again: a good part of an update. Without glibc nothing is done.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    for parameter, value in {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: 64 << 20}.items():
        mallopt(parameter, value)
