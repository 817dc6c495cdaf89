"""The update on uneven completions: padded, each prompt once for its group, against rows that repeat or share it.

    python -m benchmarks.packing --prompts 8 --group_size 8 --prompt_tokens 64 --max_tokens 256 --repeats 5

The decoder is small and random (hidden 256, 4 layers, vocabulary 4096). Lengths of prompts and of completions are
log-normal with the given medians, cut at the given limits; spread 0 makes every one the median. Every repeat draws a
batch and times each way once, in turn, so that other load falls on both; ratios compare times of one repeat. Compiling
and the first run are apart. Packing itself, on the host, is part of its time.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from recjax.algorithms.presets import build_algorithm
from recjax.experience.batch import Batch
from recjax.experience.layout import Layout, padding_waste
from recjax.experience.packing import pack, row_shape
from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.logprobs import Sampling
from recjax.training.update import Recipe, TrainState, UpdateContext, update

CONFIG = DecoderConfig(4096, 256, 1024, 4, 4, 4, 64)
OPTIMIZER = optax.adamw(1e-6)


def define_flags() -> None:
    """The command's flags, defined when it is run and not when it is imported."""
    flags.DEFINE_integer("prompts", 8, "Prompts.", lower_bound=1)
    flags.DEFINE_integer("group_size", 8, "Completions of each prompt.", lower_bound=1)
    flags.DEFINE_integer("prompt_tokens", 64, "Limit on a prompt.", lower_bound=1)
    flags.DEFINE_integer("max_tokens", 256, "Limit on a completion.", lower_bound=1)
    flags.DEFINE_float("prompt_median", 28.0, "Median length of prompts.", lower_bound=1)
    flags.DEFINE_float("median", 48.0, "Median length of completions.", lower_bound=1)
    flags.DEFINE_float("spread", 0.5, "Standard deviation of the logarithm of lengths.", lower_bound=0)
    flags.DEFINE_integer("micro_batch_prompts", 4, "Prompts of a padded micro-batch.", lower_bound=1)
    flags.DEFINE_integer("tokens_per_micro_batch", 2048, "Of a packed one.", lower_bound=1)
    flags.DEFINE_bool("reference_kl", False, "Log-probabilities of a reference too.")
    flags.DEFINE_integer("repeats", 5, "Timed repeats.", lower_bound=1)


def make_batch(shape: flags.FlagValues, random: np.random.Generator) -> Batch:
    """A batch of random tokens with log-normal lengths."""
    rows, time = shape.prompts * shape.group_size, shape.max_tokens

    def lengths(median: float, limit: int, count: int) -> np.ndarray:
        return np.clip(random.lognormal(np.log(median), shape.spread, (count, 1)).astype(int), 1, limit)

    prompts = random.integers(0, CONFIG.vocab_size, (shape.prompts, shape.prompt_tokens)).astype(np.int32)
    zeros = np.zeros(rows, np.int32)
    return Batch(
        prompts=prompts,
        prompt_mask=np.arange(shape.prompt_tokens) < lengths(shape.prompt_median, shape.prompt_tokens, len(prompts)),
        completions=random.integers(0, CONFIG.vocab_size, (rows, time)).astype(np.int32),
        completion_mask=np.arange(time) < lengths(shape.median, time, rows),
        behavior_logprobs=np.full((rows, time), -8.0, np.float32),
        rewards=random.integers(0, 2, rows).astype(np.float32),
        group_ids=np.repeat(np.arange(shape.prompts, dtype=np.int32), shape.group_size),
        policy_version=zeros,
        truncated=zeros == 1,
        accurate=zeros == 1,
        reward_parts={},
    )


def main(_) -> None:
    """Prints each way's seconds and padding, and their ratio."""
    shape, random = flags.FLAGS, np.random.default_rng(0)
    overrides = {"reference_kl": {"coefficient": 0.1}} if shape.reference_kl else {}
    algorithm, params = build_algorithm("grpo", overrides), init_params(CONFIG, jax.random.key(0))
    rows = row_shape(shape.tokens_per_micro_batch, shape.prompt_tokens + shape.max_tokens - 1)
    state = TrainState(jax.tree.map(jnp.copy, params), OPTIMIZER.init(params))
    micro_batches = shape.prompts // shape.micro_batch_prompts
    tall = f"{rows.rows} rows of {rows.tokens} tokens"
    names = f"padded, {micro_batches} micro-batches", f"packed, {tall}, prompts repeated", f"packed, {tall}, shared"
    batches = [make_batch(shape, random) for _ in range(shape.repeats)]

    def laid_out(batch: Batch, way: int) -> Layout:
        return Layout(1, pack(batch, rows, share=way == 2)) if way else Layout(micro_batches)

    def arguments(batch: Batch, layout: Layout) -> tuple:
        context = UpdateContext({}, jax.random.key(0), reference_params=params if shape.reference_kl else None)
        return state, batch, layout, context

    def compiled(layout: Layout) -> jax.stages.Compiled:
        recipe = Recipe(Decoder(CONFIG), algorithm, OPTIMIZER, Sampling(), 1024)
        return update.lower(*arguments(batches[0], layout), recipe=recipe).compile()

    def run(program: jax.stages.Compiled, batch: Batch, way: int) -> tuple[float, float]:
        """Seconds of an update, and the share of padding."""
        nonlocal state
        started = time.perf_counter()
        layout = laid_out(batch, way)
        state, *found = program(*arguments(batch, layout))
        jax.block_until_ready((state, found))
        return time.perf_counter() - started, padding_waste(batch, layout)

    programs = []
    for way, name in enumerate(names):
        started = time.perf_counter()
        programs.append(compiled(laid_out(batches[0], way)))
        seconds, memory = time.perf_counter() - started, programs[-1].memory_analysis().temp_size_in_bytes
        run(programs[-1], batches[0], way)
        print(f"{name}: compiled in {seconds:.1f} s; {memory / 2**20:.0f} MiB in addition to state and batch")
    measured = np.array([[run(program, batch, way) for way, program in enumerate(programs)] for batch in batches])
    print(f"completions: mean {np.mean([batch.completion_mask.sum(-1) for batch in batches]):.1f} tokens")
    for name, (seconds, waste) in zip(names, measured.transpose(1, 2, 0), strict=True):
        ratio = measured[:, 0, 0] / seconds
        print(
            f"{name}: median {np.median(seconds):.3f} s ({seconds.min():.3f} to {seconds.max():.3f}),"
            f" padding {waste.mean():.1%}, {np.median(ratio):.2f}× the first way"
            f" ({ratio.min():.2f} to {ratio.max():.2f})"
        )


if __name__ == "__main__":
    define_flags()
    app.run(main)
