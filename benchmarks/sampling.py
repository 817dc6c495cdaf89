"""Uneven completions: the reference, which waits for the slowest row, against slots that are filled again.

    python -m benchmarks.sampling --prompts 8 --group_size 8 --slots 64 --repeats 5

The decoder is small and random (hidden 256, 4 layers, vocabulary 4096), and the tokens that end a completion are 5% of
the vocabulary. Every repeat times each way once, in turn, on the same key, so that other load falls on all of them;
ratios compare times of one repeat, without compilation and the first run.
"""

import time
from collections.abc import Callable

import jax
import numpy as np
from absl import app, flags

from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.logprobs import Sampling
from recjax.rollout.collecting import row_keys
from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request
from tests.rollout.reference_sampler import sample

STOP_SHARE = 0.05


def define_flags() -> None:
    """The command's flags, defined when it is run and not when it is imported."""
    flags.DEFINE_integer("prompts", 8, "Prompts.", lower_bound=1)
    flags.DEFINE_integer("group_size", 8, "Completions of each prompt.", lower_bound=1)
    flags.DEFINE_integer("prompt_tokens", 64, "Tokens of each prompt.", lower_bound=1)
    flags.DEFINE_integer("max_tokens", 256, "Limit on a completion.", lower_bound=1)
    flags.DEFINE_integer("slots", 64, "Rows decoded together where slots are filled again.", lower_bound=1)
    flags.DEFINE_integer("repeats", 5, "Timed repeats.", lower_bound=1)


def timed(lengths_of: Callable, key: jax.Array) -> tuple[float, np.ndarray]:
    """Seconds of one call, and the lengths of the completions."""
    started = time.perf_counter()
    lengths = lengths_of(key)
    return time.perf_counter() - started, lengths


def main(_) -> None:
    """Prints each way's seconds and tokens per second, and the ratios."""
    shape = flags.FLAGS
    config = DecoderConfig(4096, 256, 1024, 4, 4, 4, 64)
    random = np.random.default_rng(0)
    prompts = random.integers(0, config.vocab_size, (shape.prompts, shape.prompt_tokens)).astype(np.int32)
    decoder, params, mask = Decoder(config), init_params(config, jax.random.key(0)), np.ones(prompts.shape, bool)
    stop_ids = tuple(int(i) for i in random.permutation(config.vocab_size)[: int(STOP_SHARE * config.vocab_size)])
    size, limits = shape.group_size, {"max_tokens": shape.max_tokens, "sampling": Sampling()}

    def reference(key: jax.Array) -> np.ndarray:
        return jax.device_get(
            sample(decoder, params, prompts, mask, key, group_size=size, **limits, stop_ids=stop_ids)
        ).mask.sum(-1)

    def in_slots(key: jax.Array) -> np.ndarray:
        engine = Engine(decoder, stop_ids, slots=shape.slots, prefix_time=shape.prompt_tokens)
        engine.replace_weights(params, version=0)
        keys = row_keys(key, len(prompts) * size)
        requests = [Request(prompts[row // size], own, *limits.values()) for row, own in enumerate(keys)]
        tickets, finished = engine.admit(requests, size), engine.drain()
        return np.array([len(finished[ticket].tokens) for ticket in tickets])

    ways = {"all rows, until the slowest ends": reference, f"{shape.slots} slots, filled again": in_slots}
    keys = [jax.random.key(seed) for seed in range(shape.repeats)]
    for name, draw in ways.items():
        # Each key once: another key may need a program of another size.
        print(f"{name}: first runs, compiling among them, {sum(timed(draw, key)[0] for key in keys):.1f} s")
    seconds = {name: [] for name in ways}
    lengths = []
    for key in keys:
        for name, draw in ways.items():
            took, drawn = timed(draw, key)
            seconds[name].append(took)
        lengths.append(drawn)
    tokens = np.array([drawn.sum() for drawn in lengths])
    print(
        f"{shape.prompts} × {shape.group_size} rows; completions: mean {np.mean(lengths):.1f} tokens,"
        f" longest {np.mean([drawn.max() for drawn in lengths]):.0f} on average, {np.max(lengths)} at most"
    )
    first = np.array(next(iter(seconds.values())))
    for name, took in seconds.items():
        ratio = first / took
        print(
            f"{name}: median {np.median(took):.3f} s ({min(took):.3f} to {max(took):.3f}),"
            f" {np.median(tokens / took):.0f} tokens/s, {np.median(ratio):.2f}× the first way"
            f" ({ratio.min():.2f} to {ratio.max():.2f})"
        )


if __name__ == "__main__":
    define_flags()
    app.run(main)
