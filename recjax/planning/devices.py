"""Accelerators by name, for the question of which of them one run fits."""

from typing import NamedTuple

GPU_SHARE = 0.75  # of a GPU's memory that JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise


class Accelerator(NamedTuple):
    """One device, as its maker's data sheet has it.

    Attributes:
        gigabytes: memory, in 10^9 bytes.
        bandwidth: of that memory, in 10^9 bytes a second.
        teraflops: peak of dense bfloat16 products; of a device without bfloat16, of float16 ones.
        has_bfloat16: whether it computes with it.
        share: of the memory that JAX takes; all of a TPU's.
    """

    gigabytes: float
    bandwidth: float
    teraflops: float
    has_bfloat16: bool = True
    share: float = GPU_SHARE

    @property
    def usable_bytes(self) -> float:
        """What JAX takes of the memory."""
        return self.share * self.gigabytes * 1e9


# From the smallest to the largest.
ACCELERATORS = {
    "t4-16": Accelerator(16, 320, 65, has_bfloat16=False),
    "v5e-16": Accelerator(16, 819, 197, share=1.0),
    "l4-24": Accelerator(24, 300, 121),
    "rtx4090-24": Accelerator(24, 1008, 165),
    "v6e-32": Accelerator(32, 1640, 918, share=1.0),
    "a100-40": Accelerator(40, 1555, 312),
    "l40s-48": Accelerator(48, 864, 362),
    "a100-80": Accelerator(80, 2039, 312),
    "h100-80": Accelerator(80, 3350, 989),
    "v5p-95": Accelerator(95, 2765, 459, share=1.0),
    "h200-141": Accelerator(141, 4800, 989),
    "b200-180": Accelerator(180, 8000, 2250),
}


def accelerator(name: str) -> Accelerator:
    """The device of that name.

    Raises:
        ValueError: it is not known.
    """
    if name not in ACCELERATORS:
        raise ValueError(f"--device {name!r} is not known; give one of {', '.join(ACCELERATORS)}")
    return ACCELERATORS[name]


def fitting(needed: float) -> tuple[list[str], list[str]]:
    """The names of those that have so many bytes, and of those that do not."""
    fits = [name for name, device in ACCELERATORS.items() if needed <= device.usable_bytes]
    return fits, [name for name in ACCELERATORS if name not in fits]
