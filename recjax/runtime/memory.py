"""Configures glibc's memory allocator and Python's garbage collector for commands."""

import contextlib
import ctypes
import gc
import mmap
import os
import resource
from collections.abc import Callable, Iterator

# glibc's settings, by their names in GLIBC_TUNABLES: the value, and the setting's number in mallopt, which has none for
# huge pages. One heap for all threads keeps freed memory, also holds large arrays, grows by 64 MiB and requests huge
# pages (if the kernel provides them on request; child processes need glibc 2.35 or later).
TUNABLES = {
    "glibc.malloc.arena_max": (1, -8),
    "glibc.malloc.mmap_max": (0, -4),
    "glibc.malloc.trim_threshold": (2**64 - 1, -1),
    "glibc.malloc.top_pad": (64 << 20, -2),
    "glibc.malloc.hugetlb": (1, None),
}
HEAP_SHARE = 0.75  # arrays beyond this share of the machine's memory get ordinary pages
LEAST_GAP = 8192  # gaps of fewer bytes stay available to small arrays
ROOM = 32 << 20  # bytes of the gap for arrays that stay
GUARD = 64 << 10  # bytes, more than any gap that `close_gaps` leaves
SETTLING_STEPS = 2  # the first training steps leave permanent allocations


def prepare_host_memory() -> None:
    """Lets glibc keep freed memory for reuse, in huge pages; this must come before libraries start threads.

    On CPUs, XLA allocates its temporary arrays in every call. By default glibc gets large arrays from the kernel and
    returns them each time, and the kernel fills every page with zeros again: a large part of an update's time. Child
    processes get the same settings as GLIBC_TUNABLES; settings that are already there stay. The function does nothing
    without glibc.
    """
    present = os.environ.get("GLIBC_TUNABLES", "")
    if with_tunables(present) == present or not has_glibc():
        return
    libc = ctypes.CDLL(None)
    for name, (value, number) in TUNABLES.items():
        if number and f"{name}=" not in present:
            libc.mallopt(number, ctypes.c_int(value))
    # The kernel makes huge pages only in space that the heap already has. Space without content takes no memory, but a
    # limit on addresses would count it.
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if "glibc.malloc.hugetlb=" not in present and not is_limited:
        libc.malloc.restype = ctypes.c_size_t
        size = int(HEAP_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        start = libc.malloc(ctypes.c_size_t(size))
        if start:
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(start + size - first), mmap.MADV_HUGEPAGE)
            libc.free(ctypes.c_void_p(start))
    os.environ["GLIBC_TUNABLES"] = with_tunables(present)


def with_tunables(present: str) -> str:
    """The value of GLIBC_TUNABLES with recjax's settings added to `present`."""
    settings = [present] if present else []
    for name, (value, _) in TUNABLES.items():
        if f"{name}=" not in present:
            settings.append(f"{name}={value}")
    return ":".join(settings)


def has_glibc() -> bool:
    """True if this process's malloc is that of glibc 2.33 or later, not of a library such as tcmalloc."""
    libc = ctypes.CDLL(None)
    names = ("malloc", "__libc_malloc", "mallinfo2")
    addresses = [ctypes.cast(getattr(libc, name), ctypes.c_void_p).value for name in names if hasattr(libc, name)]
    return len(addresses) == len(names) and addresses[0] == addresses[1]


def close_gaps() -> int:
    """Allocates the free gaps of the heap permanently, and returns their pages to the kernel.

    Compilation leaves tens of thousands of gaps of many sizes, and glibc searches them at every allocation: some models
    sample a quarter slower in a process that compiled. A closed gap only uses address space. Huge pages would fill the
    gaps with memory again, so the kernel makes no more huge pages between the first gap and the last. The function does
    nothing without the settings of `prepare_host_memory`.

    One new gap of ROOM bytes is for arrays that stay from now on. glibc takes the smallest gap that an array fits in.
    Without this one, it would be the gap that the update's temporary arrays have left, which would then be too small
    for them: the process would take their memory a second time. The gap takes no memory before it has content.

    Returns:
        Number of closed gaps.
    """
    present = os.environ.get("GLIBC_TUNABLES", "")
    if present != with_tunables(present) or not has_glibc():
        return 0
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _HeapInfo
    libc.sbrk.restype = ctypes.c_size_t
    libc.malloc.restype = ctypes.c_size_t
    top = libc.sbrk(0) - libc.mallinfo2().keepcost
    taken = []
    size = 1 << 30
    while size >= LEAST_GAP:
        start = libc.malloc(ctypes.c_size_t(size))
        if start == 0 or start + size > top:
            # No gap has this size: malloc used the free memory at the end of the heap.
            libc.free(ctypes.c_void_p(start))
            size //= 2
            continue
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        taken.append((first, last))
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
    if taken:
        first = min(taken)[0]
        last = max(taken)[1]
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_NOHUGEPAGE)
    room = libc.malloc(ctypes.c_size_t(ROOM))
    libc.malloc(ctypes.c_size_t(GUARD))  # keeps the new gap apart from the free memory at the end of the heap
    libc.free(ctypes.c_void_p(room))
    return len(taken)


@contextlib.contextmanager
def settling_memory() -> Iterator[Callable[[int], None]]:
    """A context that yields a function to call after each training step; it acts only in a command.

    After each of the first steps, whose number from 0 is the argument, the function closes the gaps that compiling left
    on the heap. It also freezes all objects until the context ends: a collection would look through all that JAX keeps
    of programs, which takes a second.
    """
    with contextlib.ExitStack() as stack:

        def settle(step: int) -> None:
            if step < SETTLING_STEPS and close_gaps():
                gc.collect()
                gc.freeze()
                stack.callback(gc.unfreeze)

        yield settle


def freeze_imports() -> None:
    """Hides all that was imported from later garbage collections, each of which would look through it."""
    gc.freeze()


def disable_collector() -> None:
    """Collects no garbage, for a command with millions of objects and hardly any cycles, which is a sixth faster."""
    gc.disable()


class _HeapInfo(ctypes.Structure):
    """Result of mallinfo2; `keepcost` is the number of free bytes at the end of the heap."""

    _fields_ = (("others", ctypes.c_size_t * 9), ("keepcost", ctypes.c_size_t))
