"""Topologies by name: what is known, what is refused, what the TPU's compiler says of them."""

import importlib.util
import re

import jax
import pytest

from recjax.planning.targets import (
    ACCELERATORS,
    CHIPS,
    COUNTS,
    GIB,
    GPUS,
    has_gpu_compiler,
    larger_slices,
    load_target,
    named_devices,
    named_slice,
)

LIBTPU = importlib.util.find_spec("libtpu") is not None


def test_host_means_the_devices_of_this_machine():
    target = load_target("host")
    assert list(target.devices) == jax.devices() and len(target.devices) == 4
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert abs(target.memory * 4 - total) < 8192


@pytest.mark.parametrize(
    "name",
    ["v5e", "v5e:3x4", "v5e:4x4x1", "v9:2x2", "V5E:4x4", "", "gpu", "v4:4x4", "h100", "h100:3", "a100:8", "h100-40:8"],
)
def test_an_unknown_topology_is_refused_with_the_names(name):
    with pytest.raises(
        ValueError, match=r"--topology .* unknown; give host, .*v5e: 1x1 2x2.*v4: 1x1x1.*h100-80 .*1 2 4 8"
    ):
        load_target(name)


@pytest.mark.skipif(LIBTPU, reason="libtpu is installed")
def test_without_libtpu_the_remedy_is_named():
    with pytest.raises(ValueError, match=r"v5e:4x4: libtpu.*needs no TPU: pip install -e \"\.\[tpu\]\""):
        load_target("v5e:4x4")


@pytest.mark.skipif(has_gpu_compiler(), reason="JAX's CUDA plugin is installed")
def test_without_the_cuda_plugin_the_remedy_is_named():
    with pytest.raises(ValueError, match=r"h100:8: JAX's CUDA plugin.*needs no GPU: pip install -e \"\.\[cuda\]\""):
        load_target("h100:8")


def test_every_gpu_has_a_data_sheet():
    assert [*GPUS] == [name for name in ACCELERATORS if not name.startswith("v")]


@pytest.mark.campaign
@pytest.mark.skipif(not has_gpu_compiler(), reason='needs JAX\'s CUDA plugin, of pip install -e ".[cuda]"; no GPU')
def test_programs_are_compiled_for_gpus_that_are_not_here():
    for kind in GPUS:
        for count in COUNTS:
            target = load_target(f"{kind}:{count}")
            assert len(target.devices) == count and target.memory == int(ACCELERATORS[kind].usable_bytes)
        mesh = jax.sharding.Mesh(load_target(f"{kind}:8").devices, "rows")
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
        given = jax.ShapeDtypeStruct((800, 40), "float32", sharding=where)
        program = jax.jit(lambda x: (x @ x.T).sum()).lower(given).compile(compiler_options=dict(target.options))
        assert program.memory_analysis().argument_size_in_bytes == 100 * 40 * 4
        assert "all-reduce" in program.as_text()


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("h100-80", "h100-80", 1),
        ("h100:8", "h100-80", 8),
        ("a100-40:2", "a100-40", 2),
        ("v5e-16", "v5e-16", 1),  # a chip with 16 GB
        ("v5e:4x4", "v5e-16", 16),
        ("v5litepod-16", "v5e-16", 16),
        ("v5p-16", "v5p-95", 8),  # Google counts cores, two a chip
        ("v4:2x2x2", "v4-32", 8),
        ("v6e-8", "v6e-32", 8),
    ],
)
def test_devices_by_name(name, kind, count):
    assert named_devices(name) == (name, count, ACCELERATORS[kind].usable_bytes, ACCELERATORS[kind])


@pytest.mark.parametrize("name", ["abacus", "h100:3", "a100:8", "v5e:3x3", "v5e-16:4", "v5p-7", "v5p", "v5e-3"])
def test_unknown_devices_are_refused_with_those_that_are_known(name):
    with pytest.raises(
        ValueError, match=f"--device = '{name}': is unknown; give host, one of t4-16.*v5p: 1x1x1.*1 2 4 8"
    ):
        named_devices(name)


def test_a_slice_may_have_googles_name():
    assert [named_slice(name) for name in ("v5p-16", "v5litepod-4", "v5e-16", "h100:8")] == [
        "v5p:2x2x2",
        "v5e:2x2",
        "v5e-16",
        "h100:8",
    ]
    assert larger_slices("v5p-512")[0] == "v5p:8x8x8"


def test_larger_slices_have_more_chips_of_the_generation():
    def chips(name):
        total = 1
        for length in name.split(":")[1].split("x"):
            total *= int(length)
        return total

    assert larger_slices("v5e:4x4") == ["v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16"]
    assert larger_slices("h100:16") == ["h100:32", "h100:64"]
    assert larger_slices("v5p:8x8x8") == larger_slices("host") == []
    for generation, chip in CHIPS.items():
        first = f"{generation}:{chip.slices[0]}"
        assert sorted(larger_slices(first), key=chips) == larger_slices(first) and chips(first) == 1


@pytest.mark.campaign
@pytest.mark.skipif(not LIBTPU, reason='needs libtpu, of pip install -e ".[tpu]"; no TPU')
def test_every_slice_has_the_tables_chips_and_memory():
    for generation, chip in CHIPS.items():
        for shape in chip.slices:
            lengths = [int(length) for length in shape.split("x")]
            devices = load_target(f"{generation}:{shape}").devices
            assert len(devices) == lengths[0] * lengths[1] * (lengths[2] if len(lengths) == 3 else 1)
        target = load_target(f"{generation}:{chip.slices[0]}")
        where = jax.sharding.SingleDeviceSharding(target.devices[0])
        large = jax.ShapeDtypeStruct((int(target.memory // 8 + GIB // 8), 8), "int8", sharding=where)
        with pytest.raises(jax.errors.JaxRuntimeError) as refused:
            jax.jit(lambda x: x + 1).lower(large).compile()
        stated = re.search(r"([\d.]+)G hbm|available HBM \(([\d.]+)G\)", str(refused.value))
        # Versions of libtpu differ by 0.01.
        assert float(stated[1] or stated[2]) == pytest.approx(ACCELERATORS[chip.accelerator].usable, abs=0.02)
