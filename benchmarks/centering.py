"""Time and memory of one update with score centering next to the plain loss, side by side.

python -m benchmarks.centering [tokens of the vocabulary] [recorded tokens]
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from recjax.algorithms.presets import build_algorithm
from recjax.config import OptimizerConfig
from recjax.experience.batch import Batch
from recjax.experience.layout import Layout
from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.sampling import Sampling
from recjax.training.update import Recipe, UpdateContext, first_state, make_optimizer, update

ROWS = 16
TIME = 64
REPEATS = 5


def batch_of(vocabulary: int, recorded: int) -> Batch:
    """Random completions with the record of a sampler."""
    generator = np.random.default_rng(0)
    size = ROWS, TIME
    ids = np.argsort(generator.random((*size, vocabulary)), axis=-1)[..., :recorded].astype(np.int32)
    logprobs = np.log(generator.dirichlet(np.ones(recorded + 1), size))[..., :recorded].astype(np.float32)
    return Batch(
        prompts=generator.integers(0, vocabulary, (ROWS, 4)).astype(np.int32),
        prompt_mask=np.ones((ROWS, 4), bool),
        completions=generator.integers(0, vocabulary, size).astype(np.int32),
        completion_mask=np.ones(size, bool),
        behavior_logprobs=np.full(size, -np.log(vocabulary), np.float32),
        rewards=generator.integers(0, 2, ROWS).astype(np.float32),
        group_ids=np.repeat(np.arange(ROWS // 4, dtype=np.int32), 4),
        policy_version=np.zeros(ROWS, np.int32),
        truncated=np.zeros(ROWS, bool),
        accurate=np.zeros(ROWS, bool),
        reward_parts={},
        recorded={"top_ids": ids, "top_logprobs": logprobs},
    )


def main(vocabulary: int = 32_768, recorded: int = 128) -> None:
    """Prints the seconds of an update, the fastest of several, and the temporary memory of its program."""
    config = DecoderConfig(vocabulary, 256, 1024, 2, 4, 4, 64)
    batch = batch_of(vocabulary, recorded)
    optimizer = OptimizerConfig()
    rates = {"learning_rate": 1e-6, "clip_norm": 1.0}
    for name, blocks in {"plain": {}, "centered": {"score_centering": {"coefficient": 1.0}}}.items():
        arrays = batch if blocks else batch._replace(recorded={})
        recipe = Recipe(Decoder(config), build_algorithm("ipo", blocks), make_optimizer(optimizer), Sampling(), 1024)
        context = UpdateContext({}, jax.random.key(0), hyperparameters={"optimizer": rates})
        state = first_state(recipe.optimizer, init_params(config, jax.random.key(0)))
        program = update.lower(state, arrays, Layout(), context, recipe=recipe).compile()
        temporary = program.memory_analysis().temp_size_in_bytes / 2**20
        seconds = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            state, metrics, _ = program(state, jax.tree.map(jnp.asarray, arrays), Layout(), context)
            jax.block_until_ready((state, metrics))
            seconds.append(time.perf_counter() - started)
        print(f"{name}: {min(seconds):.3f} s, {temporary:.1f} MiB temporary, loss {float(metrics['loss']):.4f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
