"""Costs of programs: matmuls, collectives and least times, compared with their shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.costs import SPEEDS
from benchmarks.program_costs import Traffic, collectives, costs_of, least_seconds, matmul_flops
from recjax.config import load_config
from recjax.planning import dry_run as planning
from recjax.planning.dry_run import dry_run
from recjax.planning.programs import plan
from recjax.planning.targets import ACCELERATORS, load_target, named_devices
from tests.training.tiny_run import TINY

LAYERS, WIDTH, ROWS = 6, 32, 16


def stack(params, rows):
    """Gradients of a scan over layers, each of them recomputed in the backward pass."""

    def loss(params):
        hidden, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), rows, params)
        return jnp.sum(hidden**2)

    return jax.grad(loss)(params)


def test_products_count_once_per_loop_and_recomputation():
    shapes = jnp.zeros((LAYERS, WIDTH, WIDTH)), jnp.zeros((ROWS, WIDTH))
    once = 2 * ROWS * WIDTH * WIDTH
    forward = jax.make_jaxpr(lambda params, x: jax.lax.scan(lambda x, w: (x @ w, None), x, params)[0])(*shapes)
    assert matmul_flops(forward) == LAYERS * once
    # Forward, again, and twice backward.
    assert matmul_flops(jax.make_jaxpr(stack)(*shapes)) == 4 * LAYERS * once


def test_unknown_loops_count_as_told_branches_as_costliest():
    def loop(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ w, x)

    def branch(x, w):
        return jax.lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x)

    shapes, once = (jnp.zeros((ROWS, WIDTH)), jnp.zeros((WIDTH, WIDTH))), 2 * ROWS * WIDTH * WIDTH
    assert matmul_flops(jax.make_jaxpr(loop)(*shapes), unknown_trips=7) == 7 * once
    assert matmul_flops(jax.make_jaxpr(branch)(*shapes)) == 2 * once
    batched = jax.make_jaxpr(lambda a, b: jnp.einsum("nij,njk->nik", a, b))(jnp.zeros((3, 4, 5)), jnp.zeros((3, 5, 6)))
    assert matmul_flops(batched) == 2 * 3 * 4 * 5 * 6


@pytest.mark.campaign
def test_collectives_of_a_loop_follow_the_layout():
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    split, rows = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((None, "fsdp"), ("fsdp",)))
    params = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32, sharding=split)
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=rows)
    text = jax.jit(stack, out_shardings=split).lower(params, batch).compile().as_text()
    found = collectives(text)
    layer = 4 * WIDTH * WIDTH
    # Weights come together for a layer's forward pass and again for its backward pass, gradients are summed once.
    assert found["all-gather"] == Traffic(2 * LAYERS, 2 * LAYERS * layer * 3 // 4)
    assert found["all-reduce"] == Traffic(LAYERS, LAYERS * layer * 2 * 3 // 4)
    assert {*found} == {"all-gather", "all-reduce"}


def program(*instructions, **computations):
    """A module's text: an entry with these instructions, and other computations."""
    blocks = [f"%{name} (x: f32[8]) -> f32[8] {{\n{body}\n}}" for name, body in computations.items()]
    return "\n".join([*blocks, "ENTRY %main (x: f32[8]) -> f32[8] {", *("  " + line for line in instructions), "}"])


@pytest.mark.parametrize(
    ("instruction", "kind", "sent"),
    [
        ("%a = f32[8,16]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}", "all-gather", 384),
        ("%a = bf16[8,16]{1,0:T(8,128)(2,1)} all-gather(%x), replica_groups=[2,8]<=[16]", "all-gather", 224),
        ("%a = f32[8] all-reduce(%x), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add", "all-reduce", 32),
        (
            "%a = f32[8] all-reduce(%x), replica_groups=mesh['a'=2,'b'=4,'c'=2], device_ids=([2,8]T(1,0)) {'a','b'}",
            "all-reduce",
            56,
        ),
        ("%a = (f32[8], bf16[8]) all-reduce(%x, %y), replica_groups={{0,1}}", "all-reduce", 48),
        ("%a = f32[2] reduce-scatter(%x), replica_groups={{0,1,2,3}}", "reduce-scatter", 24),
        ("%a = f32[8] all-to-all(%x), replica_groups={{0,1,2,3}}", "all-to-all", 24),
        ("%a = f32[8] collective-permute(%x), source_target_pairs={{0,1},{1,0}}", "collective-permute", 32),
        ("%a = (f32[2], f32[8]) all-gather-start(%x), replica_groups={{0,1,2,3}}", "all-gather", 24),
        ("%a = (f32[8], f32[8], u32[], u32[]) collective-permute-start(%x)", "collective-permute", 32),
        ("%a = f32[8] all-reduce-start(%x), replica_groups={{0,1}}", "all-reduce", 32),
    ],
)
def test_bytes_sent_by_kind_group_and_way_of_writing(instruction, kind, sent):
    assert collectives(program(instruction)) == {kind: Traffic(1, sent)}


def test_ends_and_single_devices_are_no_collectives():
    assert collectives(program("%a = f32[8] all-reduce-done(%x)", "%b = f32[8] add(%x, %all-reduce.1)")) == {}
    assert collectives(program("%a = f32[8] all-reduce(%x), replica_groups={{0},{1}}")) == {}


def test_unknown_forms_are_an_error():
    with pytest.raises(ValueError, match="names its devices in an unknown way"):
        collectives(program("%a = f32[8] all-reduce(%x), replica_groups=everyone"))
    with pytest.raises(ValueError, match="outside of the computations"):
        collectives(program("%a = f32[8] add(%x, %x)") + "\n" + GATHER)


def test_what_follows_an_attribute_of_several_lines_counts_too():
    kernel = '%k = f32[8] custom-call(%x), frontend_attributes={kernel_metadata={\n"block": 512\n}}, metadata={}'
    assert collectives(program(kernel, GATHER.strip())) == {"all-gather": Traffic(1, 16)}


GATHER = "  %g = f32[8] all-gather(%x), channel_id=7, replica_groups={{0,1}}"
LOOP = "%w = f32[8] while(%x), condition=%condition, body=%body"


def test_nested_loops_have_read_or_told_lengths():
    below = "  %c = s32[] constant(5)\n  ROOT %l = pred[] compare(%i, %c), direction=LT"
    both = below.replace("ROOT %l", "%l") + "\n  ROOT %a = pred[] and(%l, %m)"
    stated = LOOP + ', backend_config={"known_trip_count":{"n":"3"}}'
    assert collectives(program(LOOP, condition=below, body=GATHER))["all-gather"].count == 5
    assert collectives(program(LOOP, condition=both, body=GATHER), unknown_trips=9)["all-gather"].count == 9
    assert collectives(program(stated, condition=both, body=GATHER), unknown_trips=9)["all-gather"].count == 3
    nested = {"outer": "  " + LOOP, "condition": below, "body": GATHER, "four": below.replace("(5)", "(4)")}
    outer = "%v = f32[8] while(%x), condition=%four, body=%outer"
    assert collectives(program(outer, **nested))["all-gather"] == Traffic(20, 20 * 16)


def test_parts_of_one_collective_count_once():
    calls = ["%a = f32[8] fusion(%x), calls=%first", "%b = f32[8] fusion(%x), calls=%second"]
    assert collectives(program(*calls, first=GATHER, second=GATHER)) == {"all-gather": Traffic(1, 16)}
    below = "  %c = s32[] constant(5)\n  ROOT %l = pred[] compare(%i, %c), direction=LT"
    meanwhile = {"condition": below, "body": "  %b = f32[8] fusion(%x), calls=%second", "second": GATHER}
    assert collectives(program(calls[0], LOOP, first=GATHER, **meanwhile)) == {"all-gather": Traffic(1, 16)}


def test_a_tpus_sum_and_slice_is_a_reduce_scatter():
    text = program("%a = f32[4] fusion(%x), calls=%scatter").replace("%scatter", "%all-reduce-scatter.1")
    body = "  %r = f32[8] all-reduce(%x), replica_groups={{0,1}}"
    text = f"%all-reduce-scatter.1 (x: f32[8]) -> f32[4] {{\n{body}\n}}\n{text}"
    assert collectives(text) == {"reduce-scatter": Traffic(1, 16)}


@pytest.fixture
def tiny(tmp_path):
    """A function from overrides to a config of the tiny run."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    return lambda *overrides: load_config(tmp_path / "tiny.yaml", [f"output={tmp_path / 'run'}", *overrides])


def test_least_step_time_is_work_over_peak_speed(tiny, monkeypatch):
    monkeypatch.setattr(planning, "_activations", lambda *_: 1000)
    config = tiny("model.dtype=float32")
    result, layer = (
        dry_run(config, named_devices("v5e-16")),
        16 * (2 * (2 + 1) * 8 + 3 * 32),
    )  # weights of the only layer
    vocabulary, prompt = result.model.decoder.config.vocab_size, result.prompt_tokens
    head, tokens, pairs = 16 * vocabulary, prompt + 4 * 3, prompt**2 / 2 + 4 * 3 * (prompt + 1.5)
    forward = 2 * (layer * tokens + head * 4 * 3) + 4 * 2 * 8 * pairs  # one prompt, four completions of three tokens
    seconds = least_seconds(config, result, named_devices("v5e-16"))
    np.testing.assert_allclose(seconds["an update"], 3 * 4 * forward / 197e12, rtol=1e-6)
    read = 3 * (4 * (layer + head) + 4 * 2 * 1 * 8 * 4 * (prompt + 4 * 1.5))  # for each token, weights and four caches
    np.testing.assert_allclose(seconds["sampling a batch"], read / 819e9, rtol=1e-6)
    eight = dry_run(tiny("model.dtype=float32", "rollout.prompts_per_step=8"), named_devices("v5e:2x4"))
    assert least_seconds(config, eight, named_devices("v5e:2x4"))["an update"] == pytest.approx(
        seconds["an update"] / 8
    )
    assert (
        least_seconds(tiny("training.minibatches=2"), result, named_devices("v5e-16"))["an update"]
        < seconds["an update"]
    )


def test_every_accelerator_has_its_speed():
    assert SPEEDS.keys() == ACCELERATORS.keys()
    for name, kind in ACCELERATORS.items():
        assert kind.gpu is None or SPEEDS[name]["bytes"] == pytest.approx(1e9 * kind.gpu.bandwidth)


@pytest.mark.campaign
def test_sampling_moves_weights_and_updates_gather_them(tiny):
    options = ["mesh.data=1", "mesh.fsdp=4", "rollout.max_completion_tokens=32", "rollout.prompts_per_step=8"]
    planned = plan(tiny(*options), load_target("host"))
    sample, update = (costs_of(planned, program) for program in ("sample", "update"))
    assert {"all-gather", "all-reduce"} <= update.collectives.keys() and update.flops > 0
    # Sampling sends the weights once, and next to nothing for its tokens.
    moved = planned.sampling_plan.moved
    assert 0.75 * moved <= sum(traffic.bytes for traffic in sample.collectives.values()) < 1.2 * moved
    longer = plan(tiny(*options, "rollout.max_completion_tokens=64"), load_target("host"))
    assert 1.5 * sample.flops < costs_of(longer, "sample").flops < 3 * sample.flops
