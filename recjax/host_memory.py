"""How the C library gives memory to a process that computes on the CPU."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

# Parameters of mallopt(3) in glibc.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8
_LARGEST_IN_HEAP = 32 << 20  # the most that glibc takes for a threshold
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE = "glibc.malloc.hugetlb"


def prepare_host_memory() -> None:
    """Makes large arrays cheap to get from glibc; call it first, before threads start, so before JAX does.

    XLA on the CPU asks for its temporary arrays anew at every call, and the kernel fills every page that it gives with
    zeros: a good part of an update. With huge pages that is cheap, and what is freed goes back at once. Where the
    kernel gives them only to those who ask, glibc does so from 2.35 on if an environment variable says it as the
    process starts: a command of ours, which has done nothing yet, begins anew with it.
    GLIBC_TUNABLES=glibc.malloc.hugetlb=0 forbids it. Without huge pages glibc keeps what is freed for what is asked for
    next; the heap is larger then, and grows for some steps. Without glibc nothing is done.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    pages, given = _huge_pages(), os.environ.get("GLIBC_TUNABLES", "")
    tunables = tunables_for(pages, os.confstr("CS_GNU_LIBC_VERSION") or "", given)
    if tunables != given and _is_command():
        os.environ["GLIBC_TUNABLES"] = tunables
        with contextlib.suppress(OSError):
            os.execv(sys.executable, sys.orig_argv)
        os.environ["GLIBC_TUNABLES"] = given
    huge = pages == "always" or (pages == "madvise" and f"{_HUGE}=1" in os.environ.get("GLIBC_TUNABLES", ""))
    large = {_MMAP_THRESHOLD: _LARGEST_IN_HEAP} if huge else {_MMAP_MAX: 0}
    for parameter, value in {_ARENA_MAX: 1, _TRIM_THRESHOLD: -1, _TOP_PAD: 64 << 20, **large}.items():
        mallopt(parameter, value)


def tunables_for(pages: str, version: str, given: str) -> str:
    """What GLIBC_TUNABLES should be.

    Args:
        pages: "always", "madvise" or "never", or empty where the kernel has no huge pages.
        version: such as "glibc 2.36".
        given: what it is.
    """
    *_, number = ["", *version.split()]
    parts = [int(part) for part in number.split(".") if part.isdigit()]
    if pages != "madvise" or parts < [2, 35] or _HUGE in given:
        return given
    return ":".join(filter(None, [given, f"{_HUGE}=1"]))


def _huge_pages() -> str:
    """Who gets huge pages, the word in brackets; empty where the kernel has none."""
    try:
        words = _HUGE_PAGES.read_text().split()
    except OSError:
        return ""
    return next((word.strip("[]") for word in words if word.startswith("[")), "")


def _is_command() -> bool:
    """Whether this process was started as `python -m` and a module of ours, and not by a notebook or a test."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.split(".")[0] in ("recjax", "benchmarks")
