"""Targets to compile for: absent TPU slices and GPUs, by name, and this host's own devices."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
from jax.experimental import topologies

from recjax.planning.devices import ACCELERATORS
from recjax.planning.gpus import COUNTS, GPU_OPTIONS, GPUS, gpu_devices

GIB = 2**30
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBIC = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")


class Chip(NamedTuple):
    """A generation of TPUs: the memory of a chip that its compiler lets a program use, in GiB, and its slices.

    `options` are compiler options that make one device of a chip with two cores.
    """

    memory: float
    slices: Sequence[str]
    options: dict[str, str]


# Memory as libtpu 0.0.42 states it when a program is too large; 16, 32, 32 and 95 GB are on the chips, of which the
# system keeps some. Slices: those of cloud.google.com/tpu/docs/v5e, v6e, v4 and v5p up to 512 chips.
CHIPS = {
    "v5e": Chip(15.75, FLAT, {}),
    "v6e": Chip(31.25, FLAT, {}),
    "v4": Chip(30.75, CUBIC, {"chip_config_name": "megacore"}),
    "v5p": Chip(95.74, CUBIC, {"chip_config_name": "megacore"}),
}


class Target(NamedTuple):
    """Devices to compile for, the bytes of memory that a program may use of each, and options of the compiler."""

    name: str
    devices: Sequence[jax.Device]
    memory: int
    options: Mapping[str, bool] = MappingProxyType({})


def load_target(name: str) -> Target:
    """The devices of a topology: "host", a TPU slice such as "v5e:4x4", or GPUs such as "h100-80:8".

    Slices and GPUs may be absent.

    Raises:
        ValueError: an unknown topology, or its compiler is not installed.
    """
    if name == "host":
        devices = jax.local_devices()
        # The allocator's limit for a GPU; an equal share of the memory for CPU devices.
        share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
        return Target(name, devices, (devices[0].memory_stats() or {}).get("bytes_limit", share))
    generation, _, shape = name.partition(":")
    if (kind := _gpu_kind(generation)) and shape in map(str, COUNTS):
        devices = gpu_devices(name, kind, int(shape))
        return Target(name, devices, int(ACCELERATORS[kind].usable_bytes), GPU_OPTIONS)
    chip = CHIPS.get(generation)
    if chip is None or shape not in chip.slices:
        known = "; ".join(f"{key}: {' '.join(chip.slices)}" for key, chip in CHIPS.items())
        raise ValueError(
            f"--topology {name!r} is not known; give host, GENERATION:SLICE out of {known}, or GPU:COUNT out of"
            f" {' '.join(GPUS)} and {' '.join(map(str, COUNTS))}"
        )
    return Target(name, _slice_devices(name, shape, chip), int(chip.memory * GIB))


def larger_slices(name: str) -> list[str]:
    """Topologies of the same generation with more chips, in ascending order."""
    generation, _, shape = name.partition(":")
    counts = tuple(map(str, COUNTS)) if _gpu_kind(generation) else ()
    slices = CHIPS[generation].slices if generation in CHIPS else counts
    return [f"{generation}:{other}" for other in slices[slices.index(shape) + 1 :]] if shape in slices else []


def _gpu_kind(name: str) -> str | None:
    """The entry of GPUS for a name, which may omit the memory size if only one kind has this name."""
    kinds = [kind for kind in GPUS if name in (kind, kind.partition("-")[0])]
    return kinds[0] if len(kinds) == 1 else None


def _slice_devices(name: str, shape: str, chip: Chip) -> Sequence[jax.Device]:
    # A machine without TPUs has no metadata server; this stops libtpu's warnings about it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # Compiling must not lock a TPU that other processes use.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options = chip.options | ({"chips_per_host_bounds": (1, 1, 1)} if set(shape.split("x")) == {"1"} else {})
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if importlib.util.find_spec("libtpu") is None:
            reason = 'libtpu, the TPU\'s compiler, is not installed; it needs no TPU: pip install -e ".[tpu]"'
        raise ValueError(f"--topology {name}: {reason}") from error
