"""Accelerators and topologies by name: their memory, and devices to compile for, which may be absent."""

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from recjax.errors import UserError

GIB = 2**30
GPU_SHARE = 0.75  # JAX takes this share of a GPU's memory by default
MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX's environment variable for a different share
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBIC = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
COUNTS = (1, 2, 4, 8, 16, 32, 64)  # a topology has so many GPUs; a host has up to 8
_COUNT_NAMES = tuple(str(count) for count in COUNTS)
# Without a GPU to time them, XLA's own matmuls find no tile sizes for some shapes; NVIDIA's library covers all shapes.
GPU_OPTIONS = MappingProxyType({"xla_gpu_enable_triton_gemm": False})


class Gpu(NamedTuple):
    """Properties of a GPU that XLA needs, from NVIDIA's data sheets and CUDA's programming guide.

    Attributes:
        capability: compute capability.
        multiprocessors: number of streaming multiprocessors.
        lanes: float32 units in a multiprocessor.
        threads: capacity of a multiprocessor in threads.
        shared: a multiprocessor's shared memory in bytes; a block may use 1,024 bytes fewer.
        cache: level-2 cache in MiB.
        clock: clock rate in GHz.
        bandwidth: memory bandwidth in 10^9 bytes a second.
    """

    capability: tuple[int, int]
    multiprocessors: int
    lanes: int
    threads: int
    shared: int
    cache: int
    clock: float
    bandwidth: int


class Accelerator(NamedTuple):
    """One device: a GPU, from NVIDIA's data sheet, or a TPU without `gpu`, from cloud.google.com/tpu/docs/v4 to /v6e.

    Attributes:
        gigabytes: memory in 10^9 bytes.
        usable: GiB that a TPU's compiler lets a program use.
    """

    gigabytes: float
    gpu: Gpu | None = None
    usable: float | None = None

    @property
    def has_bfloat16(self) -> bool:
        """True if the device computes in bfloat16."""
        return self.gpu is None or self.gpu.capability >= (8, 0)

    @property
    def usable_bytes(self) -> float:
        """Bytes of the memory that JAX takes."""
        share = float(os.environ.get(MEMORY_FRACTION, GPU_SHARE))
        return self.usable * GIB if self.usable else share * self.gigabytes * 1e9


# From the smallest to the largest. libtpu 0.0.42 states the usable memory of a TPU when a program is too large; the
# system keeps some of the chips' memory.
ACCELERATORS = {
    "t4-16": Accelerator(
        16,
        Gpu(
            capability=(7, 5),
            multiprocessors=40,
            lanes=64,
            threads=1024,
            shared=65_536,
            cache=4,
            clock=1.59,
            bandwidth=320,
        ),
    ),
    "v5e-16": Accelerator(16, usable=15.75),
    "l4-24": Accelerator(
        24,
        Gpu(
            capability=(8, 9),
            multiprocessors=58,
            lanes=128,
            threads=1536,
            shared=102_400,
            cache=48,
            clock=2.04,
            bandwidth=300,
        ),
    ),
    "rtx4090-24": Accelerator(
        24,
        Gpu(
            capability=(8, 9),
            multiprocessors=128,
            lanes=128,
            threads=1536,
            shared=102_400,
            cache=72,
            clock=2.52,
            bandwidth=1008,
        ),
    ),
    "v4-32": Accelerator(32, usable=30.75),
    "v6e-32": Accelerator(32, usable=31.25),
    "a100-40": Accelerator(
        40,
        Gpu(
            capability=(8, 0),
            multiprocessors=108,
            lanes=64,
            threads=2048,
            shared=167_936,
            cache=40,
            clock=1.41,
            bandwidth=1555,
        ),
    ),
    "l40s-48": Accelerator(
        48,
        Gpu(
            capability=(8, 9),
            multiprocessors=142,
            lanes=128,
            threads=1536,
            shared=102_400,
            cache=96,
            clock=2.52,
            bandwidth=864,
        ),
    ),
    "a100-80": Accelerator(
        80,
        Gpu(
            capability=(8, 0),
            multiprocessors=108,
            lanes=64,
            threads=2048,
            shared=167_936,
            cache=40,
            clock=1.41,
            bandwidth=2039,
        ),
    ),
    "h100-80": Accelerator(
        80,
        Gpu(
            capability=(9, 0),
            multiprocessors=132,
            lanes=128,
            threads=2048,
            shared=233_472,
            cache=50,
            clock=1.98,
            bandwidth=3350,
        ),
    ),
    "v5p-95": Accelerator(95, usable=95.74),
    "h200-141": Accelerator(
        141,
        Gpu(
            capability=(9, 0),
            multiprocessors=132,
            lanes=128,
            threads=2048,
            shared=233_472,
            cache=50,
            clock=1.98,
            bandwidth=4800,
        ),
    ),
    "b200-180": Accelerator(
        180,
        Gpu(
            capability=(10, 0),
            multiprocessors=148,
            lanes=128,
            threads=2048,
            shared=233_472,
            cache=126,
            clock=1.97,
            bandwidth=8000,
        ),
    ),
}
GPUS = tuple(name for name, device in ACCELERATORS.items() if device.gpu)


class Chip(NamedTuple):
    """A TPU generation: its entry in ACCELERATORS, slices, and options of the topology.

    The options make one device of a chip with two cores.
    """

    accelerator: str
    slices: Sequence[str]
    options: dict[str, str]


# Slices: the ones in cloud.google.com/tpu/docs/v5e, v6e, v4 and v5p up to 512 chips.
CHIPS = {
    "v5e": Chip("v5e-16", FLAT, {}),
    "v6e": Chip("v6e-32", FLAT, {}),
    "v4": Chip("v4-32", CUBIC, {"chip_config_name": "megacore"}),
    "v5p": Chip("v5p-95", CUBIC, {"chip_config_name": "megacore"}),
}


class Target(NamedTuple):
    """Devices to compile for.

    memory: bytes of each device that a program may use.
    options: options of the compiler.
    """

    name: str
    devices: Sequence[jax.Device]
    memory: int
    options: Mapping[str, bool] = MappingProxyType({})


class Devices(NamedTuple):
    """Equal devices.

    usable: bytes of each device that JAX takes.
    kind: None for this machine's devices.
    """

    name: str
    count: int
    usable: float
    kind: Accelerator | None

    @property
    def platform(self) -> str:
        """JAX's name of the platform."""
        if self.kind is None:
            return jax.default_backend()
        return "gpu" if self.kind.gpu else "tpu"


def named_slice(name: str) -> str:
    """The slice, such as "v5p:2x2x2", that Google calls, for example, "v5p-16"; a different name unchanged.

    Google counts the two cores of each v4 and v5p chip. Names in ACCELERATORS are single chips.
    """
    generation, _, number = name.replace("v5litepod-", "v5e-").partition("-")
    if name in ACCELERATORS or generation not in CHIPS or not number.isdecimal():
        return name
    slices = CHIPS[generation].slices
    cores_per_chip = 2 if slices is CUBIC else 1
    for shape in slices:
        if _chips(shape) * cores_per_chip == int(number):
            return f"{generation}:{shape}"
    return name


def _chips(shape: str) -> int:
    """Number of chips in a slice such as "2x2x2"."""
    return math.prod(int(size) for size in shape.split("x"))


def named_devices(name: str) -> Devices:
    """The devices for "host", a name in ACCELERATORS, or a topology's name (see `load_target`).

    Raises:
        UserError: an unknown name.
    """
    if name == "host":
        return Devices(name, jax.local_device_count(), device_memory(), None)
    generation, _, shape = named_slice(name).partition(":")
    kind = name if name in ACCELERATORS else _gpu_kind(generation)
    if generation in CHIPS and shape in CHIPS[generation].slices:
        kind = CHIPS[generation].accelerator
        count = _chips(shape)
    elif kind is not None and (not shape or shape in _COUNT_NAMES):
        count = int(shape or "1")
    else:
        raise UserError(
            "--device", "is unknown", f"give host, one of {', '.join(ACCELERATORS)}, {_topologies()}", value=name
        )
    return Devices(name, count, ACCELERATORS[kind].usable_bytes, ACCELERATORS[kind])


def _topologies() -> str:
    slices = "; ".join(f"{generation}: {' '.join(chip.slices)}" for generation, chip in CHIPS.items())
    return f"GENERATION:SLICE out of {slices}, or GPU:COUNT out of {' '.join(GPUS)} and {' '.join(_COUNT_NAMES)}"


def device_memory() -> int:
    """Bytes that JAX may use on each device of this process: a GPU's or TPU's, or an equal share of a CPU's memory."""
    devices = jax.local_devices()
    statistics = devices[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return statistics["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)


def load_target(name: str) -> Target:
    """The devices of a topology: "host", a TPU slice such as "v5e:4x4" or "v5p-16", or GPUs such as "h100-80:8".

    Slices and GPUs may be absent.

    Raises:
        UserError: an unknown topology, or its compiler is not installed.
    """
    if name == "host":
        return Target(name, jax.local_devices(), device_memory())
    name = named_slice(name)
    generation, _, shape = name.partition(":")
    kind = _gpu_kind(generation)
    if kind is not None and shape in _COUNT_NAMES:
        devices = _gpu_devices(name, kind, int(shape))
        return Target(name, devices, int(ACCELERATORS[kind].usable_bytes), GPU_OPTIONS)
    chip = CHIPS.get(generation)
    if chip is None or shape not in chip.slices:
        raise UserError("--topology", "is unknown", f"give host, {_topologies()}", value=name)
    # A machine without TPUs has no metadata server: the first three variables stop libtpu's warnings about it. The last
    # one keeps the compiler from locking a TPU that other processes use.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if not importlib.util.find_spec("libtpu"):
        raise UserError(
            f"--topology {name}",
            'libtpu, the TPU\'s compiler, is not installed; it needs no TPU: pip install -e ".[tpu]"',
        )
    options: dict[str, Any] = dict(chip.options)
    if _chips(shape) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    devices = _described(name, platform="tpu", topology_name=name, **options)
    return Target(name, devices, int(ACCELERATORS[chip.accelerator].usable_bytes))


def larger_slices(name: str) -> list[str]:
    """Topologies of the same generation with more chips, in ascending order."""
    generation, _, shape = named_slice(name).partition(":")
    shapes: list[str] = []
    if generation in CHIPS:
        shapes += CHIPS[generation].slices
    elif _gpu_kind(generation):
        shapes += _COUNT_NAMES
    if shape not in shapes:
        return []
    return [f"{generation}:{larger}" for larger in shapes[shapes.index(shape) + 1 :]]


def has_gpu_compiler() -> bool:
    """True if JAX's CUDA plugin is installed."""
    if not importlib.util.find_spec("jax_plugins"):
        return False
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))


def _gpu_kind(name: str) -> str | None:
    """The entry in GPUS for a name, which may omit the memory size if only one kind has this name."""
    kinds = [kind for kind in GPUS if name in (kind, kind.partition("-")[0])]
    return kinds[0] if len(kinds) == 1 else None


def _gpu_devices(name: str, kind: str, count: int) -> Sequence[jax.Device]:
    """The GPUs of a topology, on as few hosts as possible, from XLA's message GpuTargetConfigProto."""
    if not has_gpu_compiler():
        raise UserError(
            f"--topology {name}",
            'JAX\'s CUDA plugin, which compiles for GPUs, is not installed; it needs no GPU: pip install -e ".[cuda]"',
        )
    gigabytes = ACCELERATORS[kind].gigabytes
    gpu = ACCELERATORS[kind].gpu
    assert gpu is not None
    major, minor = gpu.capability
    message = f"""
        platform_name: "CUDA"
        device_description_str: "NVIDIA {kind}"
        dnn_version_info {{ major: 9 minor: 8 }}
        runtime_version {{ major: 12 minor: 8 }}
        gpu_device_info {{
            cuda_compute_capability {{ major: {major} minor: {minor} }}
            threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {gpu.threads}
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            registers_per_core_limit: 65536 registers_per_block_limit: 65536
            shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared - 1024}
            shared_memory_per_core: {gpu.shared}
            core_count: {gpu.multiprocessors} fpus_per_core: {gpu.lanes} clock_rate_ghz: {gpu.clock}
            l2_cache_size: {gpu.cache * 2**20} memory_bandwidth: {gpu.bandwidth * 10**9}
            device_memory_size: {int(gigabytes * 1e9)}
        }}
    """
    gpus_per_host = min(count, 8)
    hosts = count // gpus_per_host
    return _described(name, platform="cuda", target_config=message, topology=f"1x{hosts}x{gpus_per_host}")


def _described(name: str, **description: Any) -> Sequence[jax.Device]:
    """The devices that JAX makes of a topology's description.

    Raises:
        UserError: their compiler refuses the description.
    """
    try:
        return list(topologies.get_topology_desc(**description).devices)
    except (RuntimeError, jax.errors.JaxRuntimeError) as error:
        raise UserError(f"--topology {name}", str(error).splitlines()[0]) from error
