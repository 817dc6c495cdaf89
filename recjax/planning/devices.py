"""Accelerators by name, to find those that a run fits."""

from typing import NamedTuple

GPU_SHARE = 0.75  # share of a GPU's memory that JAX takes by default (XLA_PYTHON_CLIENT_MEM_FRACTION)


class Accelerator(NamedTuple):
    """One device, from its maker's data sheet.

    Attributes:
        gigabytes: memory, in 10^9 bytes.
        bandwidth: memory bandwidth, in 10^9 bytes a second.
        teraflops: peak of dense bfloat16 matmuls; float16 for a device without bfloat16.
        has_bfloat16: whether the device computes in bfloat16.
        share: share of the memory that JAX takes; 1 for a TPU.
    """

    gigabytes: float
    bandwidth: float
    teraflops: float
    has_bfloat16: bool = True
    share: float = GPU_SHARE

    @property
    def usable_bytes(self) -> float:
        """Bytes of the memory that JAX takes."""
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
    """The device with a name.

    Raises:
        ValueError: an unknown name.
    """
    if name not in ACCELERATORS:
        raise ValueError(f"--device {name!r} is not known; give one of {', '.join(ACCELERATORS)}")
    return ACCELERATORS[name]


def fitting(needed: float) -> tuple[list[str], list[str]]:
    """Names of the devices with enough memory, and of the devices without."""
    fits = [name for name, device in ACCELERATORS.items() if needed <= device.usable_bytes]
    return fits, [name for name in ACCELERATORS if name not in fits]
