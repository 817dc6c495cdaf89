"""Time and memory of a decode step and an update: experts and delta nets next to a dense model of their active size.

    python -m benchmarks.experts [--hidden 256] [--layers 4] [--width 256] [--experts 16] [--per_token 2] [--rounds 9]

Each round runs each phase of every model once, in an order that rotates, so that other load falls on all of them.
Ratios are taken within a round; the table has their median, lowest and highest. Compiling is not measured.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from recjax.algorithms.presets import build_algorithm
from recjax.experience.batch import Batch
from recjax.experience.layout import Layout
from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig, DeltaNet, ExpertOptions
from recjax.models.layer import Cache
from recjax.models.sampling import Sampling
from recjax.models.unrolling import made_for_sampling, unrolled_arrays, unrolled_for_training
from recjax.rollout.decoding import RoundOptions, SlotState, decode
from recjax.rollout.keys_values import Memory
from recjax.training.update import Recipe, UpdateContext, first_state, update

PROMPTS, GROUP, PROMPT_TIME, TIME, VOCABULARY, ROUND = 4, 8, 32, 64, 512, 16
OPTIMIZER = optax.adam(1e-4)


def decoding(config: DecoderConfig) -> tuple[Callable[[], float], int]:
    """A function that times a decode step of all rows, in seconds, and temporary bytes of its program."""
    decoder, params, rows = made_for_sampling(Decoder(config)), init_params(config, jax.random.key(0)), PROMPTS * GROUP
    params = unrolled_arrays(config, params) if decoder.unrolled else params

    def kept(time: int) -> Cache:
        """Keys, values and states of `time` tokens of all rows."""
        tokens = jnp.zeros((rows, time), jnp.int32), jnp.arange(time) + jnp.zeros((rows, 1), int)
        forward = lambda params: decoder.apply({"params": params}, *tokens, jnp.ones((rows, time), bool))[1]  # noqa: E731
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(forward, params))

    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), rows)))
    ones = np.ones(rows, np.int32)
    state = SlotState(ones > 0, PROMPT_TIME * ones, 0 * ones, ones, ones, 10_000 * ones, keys)
    options = {"decoder": decoder, "options": RoundOptions(Sampling(), (VOCABULARY,), ROUND)}

    def arguments() -> tuple:
        cache = kept(PROMPT_TIME)
        return params, Memory(cache.keys_values, kept(TIME).keys_values, cache.states), state, jnp.array(0)

    compiled = decode.lower(*arguments(), **options).compile()

    def seconds() -> float:
        given = jax.block_until_ready(arguments())
        start = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        return (time.perf_counter() - start) / ROUND

    return seconds, compiled.memory_analysis().temp_size_in_bytes


def updating(config: DecoderConfig) -> tuple[Callable[[], float], int]:
    """A function that times an update, in seconds, and temporary bytes of its program."""
    random, rows = np.random.default_rng(0), PROMPTS * GROUP
    batch = Batch(
        prompts=random.integers(0, VOCABULARY, (PROMPTS, PROMPT_TIME)).astype(np.int32),
        prompt_mask=np.ones((PROMPTS, PROMPT_TIME), bool),
        completions=random.integers(0, VOCABULARY, (rows, TIME)).astype(np.int32),
        completion_mask=np.ones((rows, TIME), bool),
        behavior_logprobs=np.full((rows, TIME), -6.0, np.float32),
        rewards=random.random(rows).astype(np.float32),
        group_ids=np.repeat(np.arange(PROMPTS, dtype=np.int32), GROUP),
        policy_version=np.zeros(rows, np.int32),
        truncated=np.zeros(rows, bool),
        accurate=np.zeros(rows, bool),
        reward_parts={},
    )
    recipe = Recipe(unrolled_for_training(Decoder(config)), build_algorithm("grpo", {}), OPTIMIZER, Sampling(), 1024)
    state = first_state(OPTIMIZER, init_params(config, jax.random.key(0)))
    context = UpdateContext({}, jax.random.key(1))
    compiled = update.lower(state, batch, Layout(), context, recipe=recipe).compile()

    def seconds() -> float:
        nonlocal state
        start = time.perf_counter()
        state, *_ = jax.block_until_ready(compiled(state, batch, Layout(), context))
        return time.perf_counter() - start

    return seconds, compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"hidden": 256, "layers": 4, "width": 256, "experts": 16, "per_token": 2, "rounds": 9}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args()
    heads, active = chosen.hidden // 32, chosen.per_token * chosen.width
    dense = DecoderConfig(VOCABULARY, chosen.hidden, active, chosen.layers, heads, heads, 32)
    experts = ExpertOptions(chosen.experts, chosen.per_token, True)
    # Three delta nets for each attention, as in Qwen3.5.
    net = DeltaNet(tuple(number % 4 != 3 for number in range(chosen.layers)), heads // 2, heads, 32, 32, 4)
    models = {
        "dense, the active size": dense,
        f"{chosen.per_token} of {chosen.experts} experts": dataclasses.replace(
            dense, intermediate_size=chosen.width, experts=experts
        ),
        "hybrid": dataclasses.replace(dense, delta=net, gated_attention=True, qk_norm=True, rotary_dim=8),
    }
    phases = {name: (decoding(config), updating(config)) for name, config in models.items()}
    measured = {name: np.zeros((chosen.rounds + 1, 2)) for name in models}
    for number in tqdm(range(chosen.rounds + 1), unit="round"):  # the first round warms up
        names = [*models]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            measured[name][number] = [seconds() for seconds, _ in phases[name]]
    phase = "{0}, {1} | × dense | temporary MiB"
    heads = phase.format("decode step", "ms"), phase.format("update", "s")
    print(f"| model | weights of layers | active | {' | '.join(heads)} |\n|{'---|' * 9}")
    first = measured["dense, the active size"][1:]
    for name, config in models.items():
        weights, used = (chosen.layers * size for size in (config.layer_weights, config.active_layer_weights))
        seconds, cells = measured[name][1:], [name, f"{weights:,}", f"{used:,}"]
        for column, (scale, (_, temporary)) in enumerate(zip((1e3, 1), phases[name], strict=True)):
            ratio = (seconds / first)[:, column]
            cells.append(f"{scale * np.median(seconds[:, column]):.2f}")
            cells.append(f"{np.median(ratio):.2f} ({ratio.min():.2f}–{ratio.max():.2f})")
            cells.append(f"{temporary / 2**20:.1f}")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
