"""The study on the bandit of experiments/bandit: training in every cell, and gradients by exact enumeration.

The sampler draws arms from `drifted` logits of the last sync, with the function that drifts a decoder's matrices.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments.bandit.bandit import (
    BEHAVIORS,
    GROUPS,
    GROUPS_PER_STEP,
    REWARDS,
    batch_loss,
    group_losses,
    group_probabilities,
)
from experiments.drift.page import BANDIT_SEEDS
from recjax.algorithms.algorithm import Algorithm
from recjax.algorithms.presets import build_algorithm
from recjax.models.drift import drifted

RATE = 1.0  # of gradient descent on the logits: five times that of experiments/bandit, for ages of at most 50
STEPS = 400
SEEDS = BANDIT_SEEDS
START = BEHAVIORS[0].initial
TRAINED_AGES = (1, 5, 20, 50)
ENGINES = {
    "exact": {},
    "int8": {"int8": 1.0},
    "int8_wrong": {"int8": 1.0, "exact_logprobs": True},
    "noise_small": {"noise": 0.2},
    "noise_small_wrong": {"noise": 0.2, "exact_logprobs": True},
    "noise_large": {"noise": 1.0},
    "noise_large_wrong": {"noise": 1.0, "exact_logprobs": True},
}
AGES = (2, 5, 10, 20, 50, 100)  # of the enumeration
SCALES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # of its noise, relative to the logits
DRAWS = 32  # of the noise at each policy
LEARNED = 0.95  # expected reward at which the path of policies ends


# A clip depends on the sign of the advantage, so a group's mean baseline does not center it.
CENTERED_CLIP = "rec_one_side_nois_centered"


def algorithm_of(name: str) -> Algorithm:
    """The algorithm of a row: a preset, or the clip with score centering."""
    if name == CENTERED_CLIP:
        return build_algorithm("rec_one_side_nois", {"score_centering": {"coefficient": 1.0}})
    return build_algorithm(name, {})


class Cell(NamedTuple):
    """The sync_interval, and the sampler's error, as `rollout.drift` describes it."""

    age: int
    int8: float = 0.0
    noise: float = 0.0
    exact_logprobs: bool = False


def sampler(logits: Float[Array, "3"], key, int8, noise) -> Float[Array, "3"]:
    """Log-probs of the sampler: of logits that are a decoder's matrix with one output, and drift like one."""
    params = {"arms": {"kernel": (logits - logits.mean())[:, None]}}
    params = drifted(drifted(params, key, "int8", int8), key, "noise", noise)
    return jax.nn.log_softmax(params["arms"]["kernel"][:, 0])


def train(algorithm: Algorithm, cells: Mapping[str, Array], steps: int = STEPS, seeds: int = SEEDS) -> np.ndarray:
    """Expected rewards of the last policies, [cells, seeds].

    Args:
        cells: arrays of the fields of `Cell`, by name.
    """
    gradient = jax.grad(batch_loss(algorithm))
    start = jnp.log(jnp.array(START))

    def run(cell, seed):
        def step(state, number):
            logits, synced = state
            syncs = number % cell["age"] == 0
            synced = jnp.where(syncs, logits, synced)
            key = jax.random.fold_in(jax.random.key(seed), number // cell["age"])
            sampled = sampler(synced, key, cell["int8"], cell["noise"])
            recorded = jnp.where(cell["exact_logprobs"], jax.nn.log_softmax(synced), sampled)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), number)
            groups = jax.random.choice(key, len(GROUPS), (GROUPS_PER_STEP,), p=group_probabilities(sampled))
            weights = jnp.bincount(groups, length=len(GROUPS)).astype(jnp.float32)
            return (logits - RATE * gradient(logits, recorded, weights), synced), None

        (logits, _), _ = jax.lax.scan(step, (start, start), jnp.arange(steps))
        return jax.nn.softmax(logits) @ jnp.asarray(REWARDS)

    every = jax.jit(jax.vmap(jax.vmap(run, (None, 0)), (0, None)))
    return np.asarray(every(cells, jnp.arange(seeds)))


def trained(name: str, steps: int = STEPS, seeds: int = SEEDS) -> list[dict]:
    """Rows of an algorithm's runs: age, engine, seed and the expected reward of the last policy."""
    places = [(age, engine) for age in TRAINED_AGES for engine in ENGINES]
    cells = [Cell(age, **ENGINES[engine]) for age, engine in places]
    fields = {field: jnp.array([getattr(cell, field) for cell in cells]) for field in Cell._fields}
    rewards = train(algorithm_of(name), fields, steps, seeds)
    return [
        {"age": str(age), "engine": engine, "seed": str(seed), "reward": float(rewards[place, seed])}
        for place, (age, engine) in enumerate(places)
        for seed in range(seeds)
    ]


class Expected(NamedTuple):
    """The ascent direction of a group of eight, over all groups: its mean, and the trace of its covariance."""

    mean: Float[Array, "3"]
    variance: Float[Array, ""]


def enumerated(algorithm: Algorithm) -> Callable[..., Expected]:
    """`Expected` as a function of logits, log-probs of the sampler, and recorded log-probs."""
    by_group = group_losses(algorithm)

    def of(logits, sampled, recorded) -> Expected:
        probabilities = group_probabilities(sampled)
        slopes = -jax.jacobian(lambda logits: by_group(logits, recorded)[0])(logits)
        each = slopes / by_group(logits, recorded)[1][:, None]
        mean = probabilities @ each
        return Expected(mean, probabilities @ jnp.square(each - mean).sum(1))

    return of


def policy_gradient(logits: Float[Array, "3"]) -> Float[Array, "3"]:
    """The gradient of the expected reward."""
    return jax.grad(lambda logits: jax.nn.softmax(logits) @ jnp.asarray(REWARDS, jnp.float32))(logits)


def path(steps: int = STEPS) -> Float[Array, "steps 3"]:
    """Logits of on-policy REINFORCE without sampling, from START until LEARNED."""

    def step(logits, _):
        return logits + RATE * 7 / 8 * policy_gradient(logits), logits

    logits = jax.lax.scan(step, jnp.log(jnp.array(START)), None, steps)[1]
    rewards = jax.nn.softmax(logits) @ jnp.asarray(REWARDS, jnp.float32)
    return logits[: int(jnp.argmax(rewards > LEARNED))]


def losses_of(name: str, ages: Sequence[int] = AGES, scales: Sequence[float] = SCALES) -> list[dict]:
    """Gradients of an algorithm by cause (age, noise, noise_wrong) and size: means over `path` and draws of the noise.

    kl: KL(μ ‖ π).
    cosine: of the mean ascent direction and the policy gradient.
    noise: standard deviation of the ascent direction of GROUPS_PER_STEP groups, relative to the length of its mean.
    """
    of, policies = enumerated(algorithm_of(name)), path()

    def compared(logits, sampled, recorded):
        found, exact = of(logits, sampled, recorded), policy_gradient(logits)
        length = jnp.linalg.norm(found.mean)
        cosine = found.mean @ exact / (length * jnp.linalg.norm(exact) + 1e-20)
        kl = jnp.exp(sampled) @ (sampled - jax.nn.log_softmax(logits))
        return kl, cosine, jnp.square(length), found.variance / GROUPS_PER_STEP

    every = jax.jit(jax.vmap(compared))

    def row(cause, size, *log_probs):
        values = (np.asarray(x, np.float64).mean() for x in every(*log_probs))
        kl, cosine, squared, variance = values
        return {"cause": cause, "size": size, "kl": kl, "cosine": cosine, "noise": np.sqrt(variance / squared)}

    rows = []
    for age in ages:
        # Every sample is age − 1 steps old: with sync_interval = age, the oldest ones.
        old = jnp.concatenate([jnp.repeat(policies[:1], age, 0), policies])[1 : 1 + len(policies)]
        sampled = jax.nn.log_softmax(old)
        rows.append(row("age", age, policies, sampled, sampled))
    keys = jax.random.split(jax.random.key(0), DRAWS)
    draw = jax.jit(jax.vmap(jax.vmap(sampler, (None, 0, None, None)), (0, None, None, None)))
    repeated = jnp.repeat(policies, DRAWS, 0)
    for scale in scales:
        sampled = draw(policies, keys, 0.0, scale).reshape(-1, 3)
        rows.append(row("noise", scale, repeated, sampled, sampled))
        rows.append(row("noise_wrong", scale, repeated, sampled, jax.nn.log_softmax(repeated)))
    return rows
