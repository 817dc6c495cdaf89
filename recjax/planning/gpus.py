"""Descriptions of GPUs for XLA's compiler, so that it can compile for absent GPUs."""

import importlib.util
from types import MappingProxyType
from typing import NamedTuple

import jax
from jax.experimental import topologies

from recjax.planning.devices import ACCELERATORS

COUNTS = (1, 2, 4, 8, 16, 32, 64)  # numbers of GPUs in a topology; a host has up to 8
_A_HOST = 8
# Without a GPU to time them, XLA's own matmuls find no tile sizes for some shapes; NVIDIA's library covers all shapes.
GPU_OPTIONS = MappingProxyType({"xla_gpu_enable_triton_gemm": False})


class Gpu(NamedTuple):
    """Properties of a kind of GPU that XLA needs, from NVIDIA's data sheets and CUDA's programming guide.

    Attributes:
        capability: compute capability.
        multiprocessors: streaming multiprocessors, each with `lanes` float32 units and room for `threads` threads.
        shared: bytes of shared memory of a multiprocessor; a block may use 1,024 bytes fewer.
        cache: bytes of the level-2 cache.
        clock: in GHz.
    """

    capability: tuple[int, int]
    multiprocessors: int
    lanes: int
    threads: int
    shared: int
    cache: int
    clock: float


_MIB = 2**20
GPUS = {
    "t4-16": Gpu((7, 5), 40, 64, 1024, 65_536, 4 * _MIB, 1.59),
    "l4-24": Gpu((8, 9), 58, 128, 1536, 102_400, 48 * _MIB, 2.04),
    "rtx4090-24": Gpu((8, 9), 128, 128, 1536, 102_400, 72 * _MIB, 2.52),
    "a100-40": Gpu((8, 0), 108, 64, 2048, 167_936, 40 * _MIB, 1.41),
    "l40s-48": Gpu((8, 9), 142, 128, 1536, 102_400, 96 * _MIB, 2.52),
    "a100-80": Gpu((8, 0), 108, 64, 2048, 167_936, 40 * _MIB, 1.41),
    "h100-80": Gpu((9, 0), 132, 128, 2048, 233_472, 50 * _MIB, 1.98),
    "h200-141": Gpu((9, 0), 132, 128, 2048, 233_472, 50 * _MIB, 1.98),
    "b200-180": Gpu((10, 0), 148, 128, 2048, 233_472, 126 * _MIB, 1.97),
}


def has_compiler() -> bool:
    """Whether JAX's CUDA plugin is installed."""
    plugins = importlib.util.find_spec("jax_plugins")
    return bool(plugins) and any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))


def gpu_devices(name: str, kind: str, count: int) -> list[jax.Device]:
    """Devices to compile for, on as few hosts as possible.

    Args:
        name: name of the topology, for error messages.
        kind: one of GPUS.
    Raises:
        ValueError: JAX's CUDA plugin, which contains the compiler, is not installed.
    """
    if not has_compiler():
        remedy = 'is not installed; it needs no GPU: pip install -e ".[cuda]"'
        raise ValueError(f"--topology {name}: JAX's CUDA plugin, which compiles for GPUs, {remedy}")
    a_host = min(count, _A_HOST)
    shape = f"1x{count // a_host}x{a_host}"
    try:
        return list(
            topologies.get_topology_desc(platform="cuda", target_config=_described(kind), topology=shape).devices
        )
    except (RuntimeError, jax.errors.JaxRuntimeError) as error:
        raise ValueError(f"--topology {name}: {str(error).splitlines()[0]}") from error


def _described(kind: str) -> str:
    """The text of XLA's message GpuTargetConfigProto."""
    gpu, memory = GPUS[kind], ACCELERATORS[kind]
    major, minor = gpu.capability
    return f"""
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
            l2_cache_size: {gpu.cache} memory_bandwidth: {int(memory.bandwidth * 1e9)}
            device_memory_size: {int(memory.gigabytes * 1e9)}
        }}
    """
