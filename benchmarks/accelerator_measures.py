"""Shared code of the parts of benchmarks.accelerator: notes, times, kernels, models, batches and configs."""

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

from benchmarks.costs import PEAKS, Work, decode_bytes, shares, work_of
from benchmarks.inputs import word_tokenizer
from benchmarks.shapes import SMALL, Shape, Sizes
from benchmarks.workers.protocol import Inputs
from benchmarks.workers.recjax_worker import read_config
from recjax.config import Config, ModelConfig, load_config
from recjax.config.yaml_values import read_scalar
from recjax.experience.batch import Batch
from recjax.hub.export import write_base
from recjax.hub.policy import kernel_options
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.models.sampling import Sampling
from recjax.rollout.collecting import row_keys
from recjax.rollout.engine import Engine
from recjax.rollout.plan import ROUND
from recjax.rollout.requests import Request, Sampled

REHEARSAL = "rehearsal" in sys.argv[3:]
# Lines of the block `model` for all configs and decoders here.
MODEL_LINES = [line for line in sys.argv[3:] if line.startswith("model.")]
TINY = Sizes(512, 64, 128, 2, 4, 2, 16)
# Sizes of Qwen2.5 of 0.5B and of 1.5B weights, without biases.
HALF = Shape(Sizes(151936, 896, 4864, 24, 14, 2, 64), 8, 8, 128, 257, ())
LARGE = Shape(Sizes(151936, 1536, 8960, 28, 12, 2, 128), 8, 8, 256, 257, ())
PARITY = Shape(SMALL, 4, 4, 64, 65, ())
if REHEARSAL:
    HALF = PARITY = Shape(TINY, 2, 4, 16, 33, ())
    LARGE = dataclasses.replace(HALF)
BRIEF = dataclasses.replace(HALF, completion_tokens=49)  # one length of the cache, and so one program of decoding
UNEVEN = {
    "half_billion": dataclasses.replace(HALF, prompt_tokens=128, completion_tokens=40 if REHEARSAL else 1024),
    "one_and_a_half_billion": dataclasses.replace(LARGE, completion_tokens=40 if REHEARSAL else 1024),
}
# The updates that have to reach half of the peak: 512 rows, and 64 long ones.
WIDE = LARGE if REHEARSAL else dataclasses.replace(LARGE, prompts=64, completion_tokens=256)
LONG = LARGE if REHEARSAL else dataclasses.replace(LARGE, completion_tokens=2048)
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
    """Notes the error of the block, and continues after it."""
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
    """Most bytes of the device that arrays of this process have had at the same time."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def busiest(call: Callable[[], Any], most: int = 14) -> dict:
    """Milliseconds of one call and of its kernels on the device; the slowest kernels by name."""
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
                for line in plane.lines:
                    if line.name.startswith(("Stream", "XLA Ops", "tf_XLA")):  # on a GPU, a TPU, a CPU
                        for event in line.events:
                            kernels[event.name] += event.duration_ns / 1e6
                            counts[event.name] += 1
    longest = [[name[:90], round(ms, 4), counts[name]] for name, ms in kernels.most_common(most)]
    busy = sum(kernels.values())
    return {"wall_ms": wall * 1e3, "kernels_ms": busy, "kernels": sum(counts.values()), "name_ms_count": longest}


# --- Models, batches and configs.


def decoder_of(shape: Shape, dtype: jnp.dtype) -> Decoder:
    """The decoder of a shape, with the kernels that a run with MODEL_LINES takes here."""
    config = DecoderConfig(*dataclasses.astuple(shape.model))
    pairs = [line.removeprefix("model.").split("=") for line in MODEL_LINES]
    model = ModelConfig(**{key: read_scalar(value) for key, value in pairs})
    return Decoder(config, dtype, **kernel_options(model, config, dtype))


def work(shape: Shape, precision: str, tokens: float) -> dict[str, Work]:
    """benchmarks.costs.work_of for random weights."""
    return work_of(dataclasses.asdict(shape) | {"rows": shape.rows}, _config_json(shape.model), precision, tokens)


def _config_json(sizes: Sizes) -> dict[str, int]:
    return {
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "hidden_size": sizes.hidden,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate,
        "vocab_size": sizes.vocabulary,
    }


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


def _admitted(decoder: Decoder, weights: dict, shape: Shape, slots: int | None, limits: np.ndarray):
    """An engine with the shape's requests, and their tickets."""
    prompts, keys = prompts_of(shape), row_keys(jax.random.key(1), shape.rows)
    engine = Engine(decoder, (), slots=slots, prefix_time=shape.prompt_tokens)
    engine.replace_weights(weights, version=0)
    asked = [
        Request(prompts[row // shape.group_size], key, limit, Sampling())
        for row, (key, limit) in enumerate(zip(keys, limits.tolist(), strict=True))
    ]
    return engine, engine.admit(asked, shape.group_size)


def generate(decoder: Decoder, weights: dict, shape: Shape, slots: int | None = None, profile: int | None = None):
    """Samples the shape's completions: tokens and log-probs, [rows, time] each, seconds of each round, and a profile.

    Args:
        profile: the round to profile, which is then not among the seconds.
    """
    limits = np.full(shape.rows, shape.completion_tokens)
    engine, tickets = _admitted(decoder, weights, shape, slots or shape.rows, limits)
    finished: dict[int, Sampled] = {}
    seconds, kernels = [], None
    while len(finished) < len(tickets):
        if len(seconds) == profile and kernels is None:
            kernels = busiest(functools.partial(_round_into, engine, finished))
            continue
        started = time.perf_counter()
        finished |= engine.step()
        seconds.append(time.perf_counter() - started)
    drawn = [finished[ticket] for ticket in tickets]
    return np.stack([one.tokens for one in drawn]), np.stack([one.logprobs for one in drawn]), seconds, kernels


def _round_into(engine: Engine, finished: dict[int, Sampled]) -> None:
    finished.update(engine.step())


def uneven(decoder: Decoder, weights: dict, shape: Shape, shortest: int) -> dict:
    """Samples completions of which each has its own limit, and compares their seconds with the least bytes to read.

    Seconds are those of the rounds after the first one, which runs the prompts, without compilation. Slots are as many
    as memory holds.
    """
    random = np.random.default_rng(2)
    limits = random.integers(shortest, shape.completion_tokens, (shape.prompts, shape.group_size), endpoint=True)
    engine, tickets = _admitted(decoder, weights, shape, None, limits.ravel())
    compiling: list[float] = []

    def heard(event: str, seconds: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiling.append(seconds)

    finished: dict[int, Sampled] = {}
    seconds = []
    slots = 0
    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        while len(finished) < len(tickets):
            compiling.clear()
            started = time.perf_counter()
            finished |= engine.step()
            seconds.append(time.perf_counter() - started - sum(compiling))
            slots = max(slots, engine._slots.count)
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    if any(len(finished[ticket].tokens) != limit for ticket, limit in zip(tickets, limits.flat, strict=True)):
        raise ValueError("a completion did not end at its limit")
    begun = np.minimum(limits, 1 + ROUND)  # tokens of the first round
    tokens = int((limits - begun).sum())
    every, first = (
        np.array(decode_bytes(dataclasses.asdict(shape), _config_json(shape.model), "bfloat16", lengths))
        for lengths in (limits, begun)
    )
    weight_bytes, cache_bytes = (every - first).tolist()
    decoding = sum(seconds[1:])
    limit = (weight_bytes + cache_bytes) / peak()["bytes"]
    return {
        "sequences": shape.rows,
        "slots": slots,
        "tokens": tokens,
        "seconds": decoding,
        "tokens_per_second": tokens / decoding,
        "limit_tokens_per_second": tokens / limit,
        "uneven_bytes_share": limit / decoding,
        "cache_share_of_bytes": cache_bytes / (weight_bytes + cache_bytes),
        "prefill_seconds": seconds[0],
        "peak_bytes_so_far": peak_bytes(),
    }


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
    """A batch of the shape's prompts and the sampled completions, with random rewards."""
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
    for name, first in (("prompts", 1), ("held_out", 1 + shape.prompts)):
        texts = [
            tokenizer.decode([place, *[1] * (shape.prompt_tokens - 1)]) for place in range(first, first + shape.prompts)
        ]
        rows = [json.dumps({"prompt": text, "answer": "-"}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "model").mkdir(exist_ok=True)
    write_base(folder / "model", config, tokenizer, (shape.model.vocabulary,))
    given = Inputs(folder, dataclasses.asdict(shape), precision, {"name": "run", "lines": []}, *(None,) * 4)
    read_config(given)
    lines = (f"rollout.max_prompt_tokens={shape.prompt_tokens}", f"rollout.slots={shape.rows}", *MODEL_LINES, *lines)
    return load_config(given.scratch / "config.yaml", list(lines))
