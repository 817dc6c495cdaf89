"""The parts of `python -m benchmarks.accelerator` that compute with JAX, each in a process of its own.

    python -m benchmarks.accelerator_parts PART FILE.json [rehearsal]

A part writes what it has found after each finding, so that a part that is stopped leaves what it found before.
"""

import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from benchmarks.costs import PEAKS, Work, shares, work_of
from benchmarks.inputs import word_tokenizer
from benchmarks.shapes import SMALL, Shape, Sizes
from benchmarks.workers.protocol import Inputs
from benchmarks.workers.recjax_worker import read_config
from recjax.compile_check import compile_all
from recjax.config import Config
from recjax.config_loading import load_config
from recjax.experience.batch import Batch
from recjax.experience.batch import Shape as BatchShape
from recjax.hub.export import write_base
from recjax.hub.policy import attention_kernel
from recjax.models.attention import attend
from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.sampling import Sampling
from recjax.models.trainable import in_compute_dtype
from recjax.planning.ahead import plan
from recjax.planning.topology import load_target
from recjax.rollout.collecting import row_keys
from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request, Sampled
from recjax.training.layout import packed_batch
from recjax.training.packing import pack, row_shape
from recjax.training.scoring import batch_logprobs
from recjax.training.update import TrainState, recipe_of, update

REHEARSAL = "rehearsal" in sys.argv[3:]
TINY = Sizes(512, 64, 128, 2, 4, 2, 16)
# Sizes of Qwen2.5 of 0.5B and of 1.5B weights, without biases.
HALF = Shape(Sizes(151936, 896, 4864, 24, 14, 2, 64), 8, 8, 128, 257, ())
LARGE = Shape(Sizes(151936, 1536, 8960, 28, 12, 2, 128), 8, 8, 256, 257, ())
PARITY = Shape(SMALL, 4, 4, 64, 65, ())
if REHEARSAL:
    HALF = PARITY = Shape(TINY, 2, 4, 16, 33, ())
    LARGE = dataclasses.replace(HALF)
BRIEF = dataclasses.replace(HALF, completion_tokens=49)  # one length of the cache, and so one program of decoding
REPEATS = 2 if REHEARSAL else 3
BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")

found: dict[str, Any] = {}


def note(**values: Any) -> None:
    """Adds findings to the part's file."""
    found.update(values)
    Path(sys.argv[2]).write_text(json.dumps(found))
    for name, value in values.items():
        print(f"  {name}: {json.dumps(value)[:600]}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def attempt(name: str):
    """Notes the error of what is tried, and goes on."""
    try:
        yield
    except Exception as error:
        note(**{name: {"failed": f"{type(error).__name__}: {str(error).strip()[:600]}"}})


def seconds_of(call: Callable[[], Any], repeats: int = REPEATS) -> list[float]:
    """Seconds of each call, the device's work among it."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - started)
    return seconds


def peak_bytes() -> int | None:
    """Most bytes of the device that arrays of this process have had at one time."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def busiest(call: Callable[[], Any], most: int = 14) -> dict:
    """Milliseconds of one call and of its kernels on the device, those that take longest by name."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            started = time.perf_counter()
            jax.block_until_ready(call())
            wall = time.perf_counter() - started
        kernels, counts = Counter(), Counter()
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                if not plane.name.startswith("/device:"):
                    continue
                for line in plane.lines:
                    if line.name.startswith("Stream") or line.name == "XLA Ops":
                        for event in line.events:
                            kernels[event.name] += event.duration_ns / 1e6
                            counts[event.name] += 1
    longest = [[name[:90], round(ms, 4), counts[name]] for name, ms in kernels.most_common(most)]
    busy = sum(kernels.values())
    return {"wall_ms": wall * 1e3, "kernels_ms": busy, "kernels": sum(counts.values()), "name_ms_count": longest}


# --- Models, batches and configs.


def decoder_of(shape: Shape, dtype: jnp.dtype, **options: Any) -> Decoder:
    """The decoder of a shape, with the attention that a run takes here."""
    config = DecoderConfig(*dataclasses.astuple(shape.model))
    return Decoder(config, dtype, attention=attention_kernel("auto", config, dtype)).clone(**options)


def work(shape: Shape, precision: str, tokens: float) -> dict[str, Work]:
    """benchmarks.costs.work_of for random weights."""
    sizes = shape.model
    config = {
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "hidden_size": sizes.hidden,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate,
        "vocab_size": sizes.vocabulary,
    }
    return work_of(dataclasses.asdict(shape) | {"rows": shape.rows}, config, precision, tokens)


@functools.cache
def peak() -> dict:
    """The data sheet's peak of this device, or the measured one where benchmarks.costs has none."""
    kind = jax.local_devices()[0].device_kind
    return PEAKS.get(kind) or measured_peak(BFLOAT16)


def measured_peak(dtype: jnp.dtype) -> dict:
    """FLOP/s of a large product and bytes/s of a large copy, each over ten calls in a row."""
    size, length = (512, 1 << 22) if REHEARSAL else (8192, 1 << 30)
    random = jax.random.normal(jax.random.key(0), (size, size), jnp.float32) / size**0.5
    square, long = random.astype(dtype), jnp.ones(length, BFLOAT16)
    product, copied = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1)

    def ten(call: Callable[[], Any]) -> float:
        jax.block_until_ready(call())
        return min(seconds_of(lambda: [call() for _ in range(10)])) / 10

    flops = 2 * size**3 / ten(lambda: product(square, square))
    return {"flops": flops, "bytes": 2 * long.nbytes / ten(lambda: copied(long))}


def prompts_of(shape: Shape) -> np.ndarray:
    """Random prompts."""
    size = shape.prompts, shape.prompt_tokens
    return np.random.default_rng(0).integers(1, shape.model.vocabulary, size).astype(np.int32)


def generate(decoder: Decoder, weights: dict, shape: Shape, slots: int | None = None, profile: int | None = None):
    """Samples the shape's completions: tokens and log-probs, [rows, time] each, seconds of each round, and a profile.

    Args:
        profile: the round to profile, which is then not among the seconds.
    """
    prompts, keys = prompts_of(shape), row_keys(jax.random.key(1), shape.rows)
    engine = Engine(decoder, (), slots=slots or shape.rows, prefix_time=shape.prompt_tokens)
    engine.replace_weights(weights, version=0)
    limit = shape.completion_tokens
    asked = [Request(prompts[row // shape.group_size], key, limit, Sampling()) for row, key in enumerate(keys)]
    tickets = engine.admit(asked, shape.group_size)
    finished: dict[int, Sampled] = {}
    seconds, kernels = [], None
    while len(finished) < len(tickets):
        if len(seconds) == profile and kernels is None:
            kernels = busiest(functools.partial(_round_into, engine, finished))
            continue
        started = time.perf_counter()
        finished |= engine.round()
        seconds.append(time.perf_counter() - started)
    drawn = [finished[ticket] for ticket in tickets]
    return np.stack([one.tokens for one in drawn]), np.stack([one.logprobs for one in drawn]), seconds, kernels


def _round_into(engine: Engine, finished: dict[int, Sampled]) -> None:
    finished.update(engine.round())


def decode_findings(shape: Shape, dtype: jnp.dtype, rounds: list[float]) -> dict:
    """Shares of the peak of the rounds after the first, which runs the prompts too."""
    first = 1 + min(16, shape.completion_tokens - 1)
    whole, begun = (work(shape, dtype.name, shape.rows * time)["decode"] for time in (shape.completion_tokens, first))
    seconds, tokens = sum(rounds[1:]), shape.completion_tokens - first
    rest = Work(whole.flops - begun.flops, whole.bytes - begun.bytes)
    return {
        "tokens_per_second": shape.rows * tokens / seconds,
        "ms_per_token": 1e3 * seconds / tokens,
        "bound_ms_per_token": 1e3 * rest.bytes / peak()["bytes"] / tokens,
        **shares(rest, seconds, peak()),
        "generation_tokens_per_second": shape.rows * shape.completion_tokens / sum(rounds),
        "round_ms": [round(1e3 * one, 3) for one in rounds],
    }


def batch_of(shape: Shape, tokens: np.ndarray, logprobs: np.ndarray) -> Batch:
    """A batch of the shape's prompts and of what was sampled, with random rewards."""
    prompts, zeros = prompts_of(shape), np.zeros(shape.rows, np.int32)
    return Batch(
        prompts=prompts,
        prompt_mask=np.ones(prompts.shape, bool),
        completions=tokens,
        completion_mask=np.ones(tokens.shape, bool),
        behavior_logprobs=logprobs,
        rewards=np.random.default_rng(1).integers(0, 2, shape.rows).astype(np.float32),
        group_ids=np.repeat(np.arange(shape.prompts, dtype=np.int32), shape.group_size),
        policy_version=zeros,
        truncated=zeros == 1,
        accurate=zeros == 1,
        reward_parts={},
    )


def config_of(shape: Shape, precision: str, folder: Path, *lines: str) -> Config:
    """The config of a run of the shape, as the other benchmarks have it; the model's folder has no weights."""
    tokenizer, config = word_tokenizer(shape.model.vocabulary), DecoderConfig(*dataclasses.astuple(shape.model))
    for name in ("prompts", "held_out"):
        row = json.dumps({"prompt": tokenizer.decode([1]), "answer": "-"})
        (folder / f"{name}.jsonl").write_text(f"{row}\n" * shape.prompts)
    (folder / "model").mkdir(exist_ok=True)
    write_base(folder / "model", config, tokenizer, (shape.model.vocabulary,))
    given = Inputs(folder, dataclasses.asdict(shape), precision, {"name": "run", "lines": []}, *(None,) * 4)
    read_config(given)
    lines = (f"rollout.max_prompt_tokens={shape.prompt_tokens}", f"rollout.slots={shape.rows}", *lines)
    return load_config(given.scratch / "config.yaml", list(lines))


def difference(ours: Any, theirs: np.ndarray) -> dict:
    """How far log-probs are apart, and the mean ratio, which is 1 where they are equal."""
    apart = np.asarray(ours, np.float64) - theirs
    rounded = {"largest": np.abs(apart).max(), "mean": np.abs(apart).mean(), "mean_ratio": np.exp(apart).mean()}
    return {name: float(value) for name, value in rounded.items()}


# --- Parts.


def device() -> None:
    """The device, and what it reaches."""
    one = jax.local_devices()[0]
    stats = one.memory_stats() or {}
    note(kind=one.device_kind, platform=one.platform, count=jax.local_device_count(), jax=jax.__version__)
    note(usable_bytes=stats.get("bytes_limit"), data_sheet=PEAKS.get(one.device_kind))
    for dtype in (BFLOAT16, FLOAT32):
        with attempt(f"measured_{dtype.name}"):
            note(**{f"measured_{dtype.name}": measured_peak(dtype)})


def parity() -> None:
    """Log-probs of the engine against those of the update, padded and packed, by precision."""
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
            packed = pack(batch, row_shape(2 * longest, longest))
            score = jax.jit(batch_logprobs, static_argnames=("decoder", "micro_batches", "sampling", "chunk"))
            rest = {"sampling": Sampling(), "chunk": 256}
            padded, _ = score(decoder, params, batch, None, micro_batches=1, **rest)
            in_rows, _ = score(decoder, params, batch, packed, micro_batches=None, **rest)
            apart = {"padded": difference(padded, sampled), f"packed_{decoder.attention}": difference(in_rows, sampled)}
            note(**{name: apart})


def model(shape: Shape) -> None:
    """Generation, then the update in a few ways, in bfloat16: shares of the peak, memory, compile times."""
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
    state, budget = None, 8 * (shape.prompt_tokens + shape.completion_tokens)
    for name, remat, lines in [
        ("update", "none", ()),
        ("update_packed", "none", (f"training.tokens_per_micro_batch={budget}",)),
        ("update_recomputed", "full", ("training.micro_batch_prompts=1",)),
    ][: 2 if shape is HALF else 3]:
        with attempt(name), tempfile.TemporaryDirectory() as folder:
            config = config_of(shape, "bfloat16", Path(folder), f"model.remat={remat}", *lines)
            recipe = recipe_of(config, decoder.clone(remat=remat))
            if state is None or any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
                state = None
                params = init_params(decoder.config, jax.random.key(0)) if name != "update" else params
                state, params = TrainState(params, recipe.optimizer.init(params)), None
            state = updates(name, shape, config, recipe, state, batch_of(shape, tokens, logprobs))


def updates(name: str, shape: Shape, config: Config, recipe, state: TrainState, batch: Batch) -> TrainState:
    """Compiles and makes a few updates; the state after them."""
    sized = BatchShape(shape.prompts, shape.group_size, shape.prompt_tokens, shape.completion_tokens)
    parts = config.micro_batches(sized.positions)
    packed = packed_batch(config, recipe, batch, parts)
    micro = None if packed else parts
    arguments = jax.device_put(batch), jax.random.key(0), packed
    started = time.perf_counter()
    lowered = update.lower(state, {}, None, *arguments, recipe=recipe, micro_batches=micro)
    compiled = lowered.compile()
    results = {
        "compile_seconds": time.perf_counter() - started,
        "micro_batches": int(packed.count) if packed else micro,
    }
    memory = compiled.memory_analysis()
    lasting = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    results["predicted_peak_bytes"] = lasting + memory.temp_size_in_bytes

    def once(_: int = 0):
        nonlocal state
        state, metrics, learned = compiled(state, {}, None, *arguments)
        return jax.block_until_ready((metrics, learned))

    metrics, learned = once()
    results["against_the_engine"] = difference(learned.logprobs, batch.behavior_logprobs)
    results["seconds"] = seconds_of(once)
    best = float(np.median(results["seconds"]))
    results |= shares(work(shape, "bfloat16", batch.completions.size)["update"], best, peak())
    results |= {
        "peak_bytes_so_far": peak_bytes(),
        "loss": float(metrics["loss"]),
        "attention": recipe.decoder.attention,
    }
    note(**{name: results})
    with attempt(f"{name}_kernels"):
        note(**{f"{name}_kernels": busiest(once)})
    return state


def decode_ways(unrolled: bool) -> None:
    """Decoding of the 0.5B shape with layers written out or scanned; what else differs is in XLA_FLAGS."""
    decoder = decoder_of(BRIEF, BFLOAT16, unrolled=unrolled)
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


def attention() -> None:
    """Milliseconds of each kernel that runs here, forward and with gradients, causal over whole rows."""
    heads, kv_heads, width, tokens = (4, 2, 16, 256) if REHEARSAL else (12, 2, 128, 16384)
    kernels = {"plain", attention_kernel("auto", decoder_of(LARGE, BFLOAT16).config, BFLOAT16)}
    for length in (64, 128) if REHEARSAL else (512, 1024, 2048):
        random = jax.random.split(jax.random.key(0), 3)
        rows = tokens // length
        arrays = [
            jax.random.normal(key, (rows, count, length, width), BFLOAT16)
            for key, count in zip(random, (heads, kv_heads, kv_heads), strict=True)
        ]
        ids = jnp.ones((rows, length), jnp.int32)
        for kernel in sorted(kernels):
            with attempt(f"{kernel}_{length}"):

                def mixed(queries, keys, values, kernel=kernel, ids=ids, length=length):
                    mask = (ids > 0)[:, None, None, None, None, :] & jnp.tril(jnp.ones((length, length), bool))
                    return attend(queries, [(keys, values, mask)], width**-0.5, ids=ids, kernel=kernel)

                forward = jax.jit(mixed)
                backward = jax.jit(jax.grad(lambda *given: mixed(*given).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
                timed = {}
                for name, call in (("forward", forward), ("gradients", backward)):
                    jax.block_until_ready(call(*arrays))
                    timed[f"{name}_ms"] = 1e3 * min(seconds_of(functools.partial(_five, call, arrays))) / 5
                note(**{f"{kernel}_{length}": timed | {"rows": rows}})


def _five(call: Callable, arrays: list) -> list:
    return [call(*arrays) for _ in range(5)]


def prediction() -> None:
    """Peaks that compile_check foresees on this device for a run of the 0.5B and of the 1.5B shape."""
    for name, shape in (("0.5B", HALF), ("1.5B", LARGE)):
        with attempt(name), tempfile.TemporaryDirectory() as folder:
            planned = plan(config_of(shape, "bfloat16", Path(folder)), load_target("host"))
            note(**{name: compile_all(Console(file=sys.stderr), planned, {}).peaks})


PARTS: dict[str, Callable[[], None]] = {
    "device": device,
    "parity": parity,
    "half_billion": functools.partial(model, HALF),
    "one_and_a_half_billion": functools.partial(model, LARGE),
    "decode_scanned": functools.partial(decode_ways, False),
    "decode_unrolled": functools.partial(decode_ways, True),
    "decode_graphs": functools.partial(decode_ways, False),
    "decode_unrolled_graphs": functools.partial(decode_ways, True),
    "slots": slots,
    "attention": attention,
    "prediction": prediction,
}

if __name__ == "__main__":
    PARTS[sys.argv[1]]()
