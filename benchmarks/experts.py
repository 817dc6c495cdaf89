"""Time and memory of a decode step and of an update: a mixture of experts next to a dense model of its active size.

python -m benchmarks.experts [--hidden 256] [--layers 4] [--width 256] [--experts 16] [--per_token 2]
"""

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from recjax.algorithms.presets import build_algorithm
from recjax.experience.batch import Batch
from recjax.experience.layout import Layout
from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig, ExpertOptions
from recjax.models.sampling import Sampling
from recjax.models.unrolling import made_for_sampling, unrolled_arrays, unrolled_for_training
from recjax.rollout.decoding import SlotState, decode
from recjax.rollout.keys_values import Memory
from recjax.training.learner import first_state
from recjax.training.update import Recipe, update

PROMPTS, GROUP, PROMPT_TIME, TIME, VOCABULARY, ROUND = 8, 8, 32, 64, 512, 16
OPTIMIZER = optax.adam(1e-4)


def decoding(config: DecoderConfig) -> tuple[float, int]:
    """Seconds of a decode step of all rows, and temporary bytes of its program."""
    decoder, params, rows = made_for_sampling(Decoder(config)), init_params(config, jax.random.key(0)), PROMPTS * GROUP
    params = unrolled_arrays(config, params) if decoder.unrolled else params
    shape = rows, config.num_kv_heads, PROMPT_TIME, config.head_dim

    def half(time: int):
        size = (*shape[:2], time, shape[3])
        if not decoder.unrolled:
            return jnp.zeros((config.num_layers, *size))
        return tuple(jnp.zeros(size) for _ in range(config.num_layers))

    def cache(time: int):
        return half(time), half(time)

    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), rows)))
    ones = np.ones(rows, np.int32)
    state = SlotState(ones > 0, PROMPT_TIME * ones, 0 * ones, ones, ones, 10_000 * ones, keys)
    options = {"decoder": decoder, "sampling": Sampling(), "stop_ids": (VOCABULARY,), "round_time": ROUND}
    arguments = lambda: (params, Memory(cache(PROMPT_TIME), cache(TIME)), state, jnp.array(0))  # noqa: E731
    compiled = decode.lower(*arguments(), **options).compile()
    seconds = []
    for _ in range(5):
        given = jax.block_until_ready(arguments())
        start = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        seconds.append((time.perf_counter() - start) / ROUND)
    return min(seconds), compiled.memory_analysis().temp_size_in_bytes


def updating(config: DecoderConfig) -> tuple[float, int]:
    """Seconds of an update, and temporary bytes of its program."""
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
    compiled = update.lower(state, {}, None, batch, jax.random.key(1), Layout(), recipe=recipe).compile()
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        state, *_ = jax.block_until_ready(compiled(state, {}, None, batch, jax.random.key(1), Layout()))
        seconds.append(time.perf_counter() - start)
    return min(seconds), compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"hidden": 256, "layers": 4, "width": 256, "experts": 16, "per_token": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args()
    heads, active = chosen.hidden // 32, chosen.per_token * chosen.width
    dense = DecoderConfig(VOCABULARY, chosen.hidden, active, chosen.layers, heads, heads, 32)
    experts = ExpertOptions(chosen.experts, chosen.per_token, True)
    mixture = dataclasses.replace(dense, intermediate_size=chosen.width, experts=experts)
    whole = dataclasses.replace(dense, intermediate_size=chosen.experts * chosen.width)
    print("| model | weights of layers | active | decode step, ms | temporary MiB | update, s | temporary MiB |")
    print("|---|---|---|---|---|---|---|")
    names = "dense, the active size", f"{chosen.per_token} of {chosen.experts} experts", "dense, the whole size"
    for name, config in zip(names, (dense, mixture, whole), strict=True):
        (step, of_step), (seconds, of_update) = decoding(config), updating(config)
        weights, used = (chosen.layers * size for size in (config.layer_weights, config.active_layer_weights))
        print(
            f"| {name} | {weights:,} | {used:,} | {1e3 * step:.2f} | {of_step / 2**20:.1f} | {seconds:.2f} |"
            f" {of_update / 2**20:.0f} |"
        )


if __name__ == "__main__":
    main()
