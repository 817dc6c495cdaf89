"""The parts of `python -m benchmarks.accelerator` that compute with JAX, each in a process of its own.

    python -m benchmarks.accelerator_parts PART FILE.json [rehearsal] [model.KEY=VALUE …]

A part writes its findings after each one, so that a stopped part leaves its earlier findings.
"""

import contextlib
import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator_measures import (
    BFLOAT16,
    BRIEF,
    FLOAT32,
    HALF,
    LARGE,
    LONG,
    PARITY,
    REHEARSAL,
    UNEVEN,
    WIDE,
    attempt,
    batch_of,
    busiest,
    config_of,
    decode_findings,
    decoder_of,
    generate,
    measured_peak,
    note,
    peak,
    peak_bytes,
    seconds_of,
    uneven,
    work,
)
from benchmarks.costs import PEAKS, shares
from benchmarks.numerics import logprob_difference
from benchmarks.shapes import Shape
from recjax.compile_check import compiled_items
from recjax.config import Config
from recjax.experience.batch import Batch
from recjax.experience.layout import Layout, batch_logprobs, choose_layout
from recjax.experience.packing import TILE, RowShape, pack, row_shape
from recjax.hub.policy import attention_kernel, kernel_options
from recjax.models import unrolling
from recjax.models.attention import KERNELS, attend, self_attention_mask
from recjax.models.decoder import init_params
from recjax.models.sampling import Sampling
from recjax.models.trainable import in_compute_dtype
from recjax.planning.dry_run import phase_bytes
from recjax.planning.programs import compiled, plan, programs_of
from recjax.planning.targets import load_target
from recjax.training.update import Recipe, TrainState, UpdateContext, hyperparameters_of, recipe_of, update


def device() -> None:
    """The device and its measured peaks."""
    one = jax.local_devices()[0]
    stats = one.memory_stats() or {}
    note(kind=one.device_kind, platform=one.platform, count=jax.local_device_count(), jax=jax.__version__)
    note(usable_bytes=stats.get("bytes_limit"), data_sheet=PEAKS.get(one.device_kind))
    for dtype in (BFLOAT16, FLOAT32):
        with attempt(f"measured_{dtype.name}"):
            note(**{f"measured_{dtype.name}": measured_peak(dtype)})


def parity() -> None:
    """Log-probs of the engine against log-probs of the update, padded and packed, by precision."""
    params = init_params(decoder_of(PARITY, FLOAT32).config, jax.random.key(0))
    longest = PARITY.prompt_tokens + PARITY.completion_tokens - 1
    for name, dtype, precision in [
        ("float32", FLOAT32, None),
        ("float32_highest", FLOAT32, "highest"),
        ("bfloat16", BFLOAT16, None),
    ]:
        with attempt(name), jax.default_matmul_precision(precision):
            decoder = decoder_of(PARITY, dtype)
            tokens, sampled, *_ = generate(decoder, in_compute_dtype(decoder, params, copy=False), PARITY)
            batch = batch_of(PARITY, tokens, sampled)
            packed = Layout(1, pack(batch, row_shape(2 * longest, longest)))
            score = jax.jit(batch_logprobs, static_argnames=("decoder", "sampling", "chunk"))
            rest = {"sampling": Sampling(), "chunk": 256}
            padded = score(Layout(), decoder, params, batch, **rest).logprobs
            in_rows = score(packed, decoder, params, batch, **rest).logprobs
            scores = {"padded": padded, f"packed_{decoder.attention}": in_rows}
            note(**{name: {layout: logprob_difference(found, sampled) for layout, found in scores.items()}})


def model(shape: Shape) -> None:
    """Generation, then the update as a run makes it, in bfloat16: shares of the peak, memory, compile times."""
    decoder = decoder_of(shape, BFLOAT16)
    params = init_params(decoder.config, jax.random.key(0))
    weights = in_compute_dtype(decoder, params, copy=True)
    note(weights=sum(leaf.size for leaf in jax.tree.leaves(params)), shape=dataclasses.asdict(shape))
    started = time.perf_counter()
    generate(decoder, weights, shape)
    first = time.perf_counter() - started
    tokens, logprobs, rounds, _ = generate(decoder, weights, shape)
    note(decode=decode_findings(shape, BFLOAT16, rounds), sampling_compile_seconds=first - sum(rounds))
    note(sampling_peak_bytes=peak_bytes())
    with attempt("decode_kernels"):
        note(decode_kernels=generate(decoder, weights, shape, profile=len(rounds) - 1)[3])
    del weights
    ways_of(shape, params, batch_of(shape, tokens, logprobs), {"update": Way()})


def packed(shape: Shape) -> None:
    """The update of packed rows: a prompt with all of its completions in a row, and each with its own."""
    longest = shape.prompt_tokens + shape.completion_tokens - 1
    group = shape.prompt_tokens - 1 + shape.group_size * shape.completion_tokens
    ways = {
        "update_packed_groups": Way(RowShape(2, -(-group // TILE) * TILE)),
        "update_packed": Way(row_shape(8 * longest, longest)),
    }
    ways_of(shape, None, random_batch(shape), ways)


def update_sizes(shape: Shape) -> None:
    """The update by micro-batch and by what the forward pass saves, from what a run takes to the largest."""
    ways = {"default": Way()}
    for remat, prompts in (
        ("attention", 4),
        ("dots", 4),
        ("none", 4),
        ("attention", 8),
        ("full", 4),
        ("dots", 8),
        ("dots", 2),
    ):
        ways[f"{remat}_{prompts}"] = Way(None, (f"training.micro_batch_prompts={prompts}", f"model.remat={remat}"))
    ways_of(shape, None, random_batch(shape), {"default": Way()} if REHEARSAL else ways)


def update_alone(shape: Shape) -> None:
    """The update as a run makes it, with XLA_FLAGS from the command."""
    ways_of(shape, None, random_batch(shape), {"default": Way()})


def update_scanned(shape: Shape) -> None:
    """The update as a scan over layers, which compiles sooner than layers that are written out."""
    unrolling.MOST_TRAINED_LOW = 8
    update_alone(shape)


def update_kernels(shape: Shape) -> None:
    """The update by the kernels that a run takes, and by those that a run takes only if its config asks for them."""
    ways = {"default": Way()}
    for kernel in {} if REHEARSAL else fitting_kernels(shape):
        ways[kernel] = Way(None, (f"model.attention={kernel}",))
    if jax.default_backend() == "gpu":
        ways["joined"] = Way(None, ("model.joined_projections=true",))
    ways_of(shape, None, random_batch(shape), ways)


def fitting_kernels(shape: Shape) -> list[str]:
    """Attention kernels that run here with a shape's decoder."""
    config = decoder_of(shape, BFLOAT16).config
    fitting = []
    for kernel in KERNELS:
        with contextlib.suppress(ValueError):
            fitting.append(attention_kernel(kernel, config, BFLOAT16))
    return fitting


def random_batch(shape: Shape) -> Batch:
    """A batch of random tokens, of which the policy samples each with equal probability."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, shape.model.vocabulary, (shape.rows, shape.completion_tokens)).astype(np.int32)
    return batch_of(shape, tokens, np.full(tokens.shape, -np.log(shape.model.vocabulary), np.float32))


class Way(NamedTuple):
    """A way to make an update.

    Attributes:
        rows: rows to pack; None: as a run chooses them.
        lines: lines of the run's config.
    """

    rows: RowShape | None = None
    lines: tuple[str, ...] = ()


def ways_of(shape: Shape, params: dict | None, batch: Batch, ways: dict[str, Way]) -> None:
    """Updates of a batch in several ways, by name.

    Args:
        params: first parameters; None: random ones.
    """
    state = None
    for name, way in ways.items():
        with attempt(name):
            with tempfile.TemporaryDirectory() as folder:
                config = config_of(shape, "bfloat16", Path(folder), *way.lines)
            decoder = decoder_of(shape, BFLOAT16)
            options = kernel_options(config.model, decoder.config, BFLOAT16)
            decoder = decoder.clone(remat=config.model.remat, **options)
            recipe = recipe_of(config, decoder)
            if state is None or any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
                state = None
                params = init_params(decoder.config, jax.random.key(0)) if params is None else params
                state, params = TrainState(params, recipe.optimizer.init(params)), None
            state = updates(name, shape, config, recipe, state, batch, way.rows)


def updates(
    name: str,
    shape: Shape,
    config: Config,
    recipe: Recipe,
    state: TrainState,
    batch: Batch,
    rows: RowShape | None,
) -> TrainState:
    """Compiles and makes a few updates; the state after them."""
    layout = Layout(1, pack(batch, rows)) if rows else choose_layout(config, recipe.algorithm, recipe.decoder, batch)
    context = UpdateContext(
        {}, jax.random.key(0), hyperparameters=hyperparameters_of(config, config.optimizer.learning_rate)
    )
    arguments = jax.device_put(batch), layout, context
    started = time.perf_counter()
    lowered = update.lower(state, *arguments, recipe=recipe)
    compiled = lowered.compile()
    results = {
        "compile_seconds": time.perf_counter() - started,
        "micro_batches": int(layout.count),
    }
    memory = compiled.memory_analysis()
    lasting = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    results["predicted_peak_bytes"] = lasting + memory.temp_size_in_bytes

    def once(_: int = 0):
        nonlocal state
        state, metrics, learned = compiled(state, *arguments)
        return jax.block_until_ready((metrics, learned))

    metrics, learned = once()
    if name == "update":  # from the weights that sampled
        results["against_the_engine"] = logprob_difference(learned.logprobs, batch.behavior_logprobs)
    results["seconds"] = seconds_of(once)
    best = float(np.median(results["seconds"]))
    results |= shares(work(shape, "bfloat16", batch.completions.size)["update"], best, peak())
    results |= {
        "peak_bytes_so_far": peak_bytes(),
        "loss": float(metrics["loss"]),
        "attention": recipe.decoder.attention,
        "joined_projections": recipe.decoder.joined_projections,
    }
    note(**{name: results})
    with attempt(f"{name}_kernels"):
        note(**{f"{name}_kernels": busiest(once)})
    return state


def decode_graphs() -> None:
    """Decoding of the 0.5B shape, with XLA_FLAGS from the command."""
    decoder = decoder_of(BRIEF, BFLOAT16)
    weights = in_compute_dtype(decoder, init_params(decoder.config, jax.random.key(0)), copy=False)
    started = time.perf_counter()
    generate(decoder, weights, BRIEF)
    first = time.perf_counter() - started
    _, _, rounds, _ = generate(decoder, weights, BRIEF)
    note(decode=decode_findings(BRIEF, BFLOAT16, rounds), compile_seconds=first - sum(rounds))
    note(decode_kernels=generate(decoder, weights, BRIEF, profile=len(rounds) - 1)[3])


def slots() -> None:
    """Tokens a second and memory by the number of slots."""
    decoder = decoder_of(BRIEF, BFLOAT16)
    weights = in_compute_dtype(decoder, init_params(decoder.config, jax.random.key(0)), copy=False)
    for count in (4, 8) if REHEARSAL else (16, 64, 256, 1024):
        with attempt(f"slots_{count}"):
            shape = dataclasses.replace(BRIEF, prompts=count // BRIEF.group_size)
            generate(decoder, weights, shape)
            rounds = generate(decoder, weights, shape)[2]
            note(**{f"slots_{count}": decode_findings(shape, BFLOAT16, rounds) | {"peak_bytes_so_far": peak_bytes()}})


def decoding() -> None:
    """Tokens a second for 256 to 2,048 sequences of uneven lengths, and the limit of the bandwidth next to them.

    The first pass compiles. It takes compilation off the seconds; the second pass, if there is time, replaces it.
    """
    held = {}
    for measured_pass in ("first", "second"):
        for name, shape in UNEVEN.items():
            decoder = decoder_of(shape, BFLOAT16)
            if name not in held:
                held[name] = in_compute_dtype(decoder, init_params(decoder.config, jax.random.key(0)), copy=False)
            for count in (8, 16) if REHEARSAL else (256, 1024, 2048, 512):
                of_count = dataclasses.replace(shape, prompts=count // shape.group_size)
                with attempt(f"{name}_{count}"):
                    measured = uneven(decoder, held[name], of_count, 2 if REHEARSAL else 64)
                    note(**{f"{name}_{count}": measured | {"pass": measured_pass}})


def attention() -> None:
    """Milliseconds of each kernel that runs here, forward and with gradients, causal over whole rows."""
    heads, kv_heads, width, tokens = (4, 2, 16, 256) if REHEARSAL else (12, 2, 128, 16384)
    kernels = fitting_kernels(LARGE)
    over_prompts = next((kernel for kernel in ("cudnn_lengths", "splash") if kernel in kernels), "plain")
    for length in (64, 128) if REHEARSAL else (512, 1024, 2048):
        random = jax.random.split(jax.random.key(0), 3)
        rows = tokens // length
        arrays = [
            jax.random.normal(key, (rows, count, length, width), BFLOAT16)
            for key, count in zip(random, (heads, kv_heads, kv_heads), strict=True)
        ]
        ids = jnp.ones((rows, length), bool)
        for kernel in kernels:
            with attempt(f"{kernel}_{length}"):

                def mixed(queries, keys, values, kernel=kernel, ids=ids, length=length):
                    mask = ids[:, None, None, None, None, :] & jnp.tril(jnp.ones((length, length), bool))
                    return attend(queries, [(keys, values, mask)], width**-0.5, ids=(ids,), kernel=kernel)

                forward = jax.jit(mixed)
                backward = jax.jit(jax.grad(lambda *given: mixed(*given).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
                note(**{f"{kernel}_{length}": kernel_times(forward, backward, arrays) | {"rows": rows}})
        with attempt(f"shared_{length}"):
            through_xla = functools.partial(_through_xla, jax.nn.dot_product_attention)
            stand_in = mock.patch.object(jax.nn, "dot_product_attention", through_xla)
            with stand_in if REHEARSAL else contextlib.nullcontext():
                shared_prompts(length, "cudnn_lengths" if REHEARSAL else over_prompts, heads, kv_heads, width)


def _through_xla(dot_product_attention: Callable, *arrays: jax.Array, implementation: str, **options) -> jax.Array:
    """The call for cuDNN, for a rehearsal without a GPU."""
    return dot_product_attention(*arrays, implementation="xla", **options)


def shared_prompts(length: int, kernel: str, heads: int, kv_heads: int, width: int) -> None:
    """Completions of half the length after prompts that eight share: by plain attention, and by a kernel.

    The difference of their gradients is noted.
    """
    rows = (256 if REHEARSAL else 16384) // length
    half = length // 2
    prompts = max(rows // 8, 1)
    rows = 8 * prompts
    random = jax.random.split(jax.random.key(0), 5)
    shapes = [(rows, heads, half, width)] + 2 * [(prompts, kv_heads, half, width)] + 2 * [(rows, kv_heads, half, width)]
    arrays = [jax.random.normal(key, shape, BFLOAT16) for key, shape in zip(random, shapes, strict=True)]
    ids = tuple(jnp.ones((count, half), bool) for count in (prompts, rows))
    masks = ids[0][:, None, None, None, None, :], self_attention_mask(ids[1])

    def mixed(queries, prompt_keys, prompt_values, keys, values, *, kernel):
        segments = [(prompt_keys, prompt_values, masks[0]), (keys, values, masks[1])]
        return attend(queries, segments, width**-0.5, ids=ids, kernel=kernel)

    gradients = {}
    for name in ("plain", kernel):
        with attempt(f"shared_{name}_{length}"):
            of_kernel = functools.partial(mixed, kernel=name)
            backward = jax.jit(
                jax.grad(lambda *given, call=of_kernel: jnp.square(call(*given)).sum(dtype=jnp.float32), range(5))
            )
            found = kernel_times(jax.jit(of_kernel), backward, arrays)
            gradients[name] = [np.asarray(gradient, np.float32) for gradient in backward(*arrays)]
            note(**{f"shared_{name}_{length}": found | {"rows": rows}})
    both = zip(gradients["plain"], gradients[kernel], strict=True)
    apart = [float(np.abs(a - b).max() / np.abs(a).max()) for a, b in both]
    note(**{f"shared_largest_difference_{length}": apart})


def kernel_times(forward: Callable, backward: Callable, arrays: list) -> dict[str, float]:
    """Milliseconds of a call forward and of its gradients."""
    timed = {}
    for name, call in (("forward", forward), ("gradients", backward)):
        jax.block_until_ready(call(*arrays))
        timed[f"{name}_ms"] = 1e3 * min(seconds_of(functools.partial(_five, call, arrays))) / 5
    return timed


def _five(call: Callable, arrays: list) -> list:
    return [call(*arrays) for _ in range(5)]


def prediction() -> None:
    """Peaks that compile_check foresees on this device for a run of the 0.5B and of the 1.5B shape."""
    for name, shape in (("0.5B", HALF), ("1.5B", LARGE)):
        with attempt(name), tempfile.TemporaryDirectory() as folder:
            planned = plan(config_of(shape, "bfloat16", Path(folder)), load_target("host"))
            programs = {program: compiled(planned, program) for program in programs_of(planned.config)}
            note(**{name: phase_bytes(compiled_items(planned, programs))})


PARTS: dict[str, Callable[[], None]] = {
    "device": device,
    "parity": parity,
    "half_billion": functools.partial(model, HALF),
    "one_and_a_half_billion": functools.partial(model, LARGE),
    "half_billion_packed": functools.partial(packed, HALF),
    "one_and_a_half_billion_packed": functools.partial(packed, LARGE),
    "decode_graphs": decode_graphs,
    "slots": slots,
    "decoding": decoding,
    "attention": attention,
    "prediction": prediction,
    "update_wide": functools.partial(update_sizes, WIDE),
    "update_long": functools.partial(update_sizes, LONG),
    "update_scanned": functools.partial(update_scanned, WIDE),
    "update_kernels": functools.partial(update_kernels, WIDE),
    "update_alone": functools.partial(update_alone, WIDE),
}

if __name__ == "__main__":
    PARTS[sys.argv[1]]()
