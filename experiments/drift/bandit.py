"""The study on the bandit of experiments/bandit: training in every cell, and gradients by exact enumeration.

The sampler draws arms from `drifted` logits of the last sync, with the function that drifts a decoder's matrices.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
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
from experiments.claims.programs import DRIFT_KINDS
from experiments.drift import plan
from recjax.algorithms.algorithm import Algorithm
from recjax.config.schema import AlgorithmConfig
from recjax.models.drift import drifted

TASK = "bandit"
RATE = 1.0  # of gradient descent on the logits along `path`
STEPS = 400
START = BEHAVIORS[0].initial
AGES = (2, 5, 10, 20, 50, 100)  # of the enumeration
SCALES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # of its noise, relative to the logits
DRAWS = 32  # of the noise at each policy
LEARNED = 0.95  # expected reward at which the path of policies ends
SIZES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # scales of the noise at which a pilot measures it
ENUMERATED = (
    "reinforce",
    "weight",
    "capped_weight",
    "clip",
    "clip_and_weight",
    "distance_mask",
    "ipo",
    "opmd",
    "asymre",
)


def algorithm_of(method: str) -> Algorithm:
    """The algorithm of a method of the plan."""
    return AlgorithmConfig(**plan.METHODS[method]["algorithm"]).build()


class Cell(NamedTuple):
    """The sync_interval, the learning rate, and the sampler's error, as `rollout.drift` describes it."""

    age: int = 1
    rate: float = RATE
    int8: float = 0.0
    int4: float = 0.0
    float8: float = 0.0
    noise: float = 0.0
    fixed: bool = False
    exact_logprobs: bool = False


def cell_of(cause: str, rate: float, scales: Mapping[str, float]) -> Cell:
    """The cell of a cause of the plan.

    Args:
        scales: see `plan.drift_of`.
    """
    drift = plan.drift_of(cause, scales)
    age = plan.CAUSES[cause]["age"]
    if drift is None:
        return Cell(age, rate)
    size = {drift["weights"]: drift.get("scale", 1.0)}
    return Cell(age, rate, **size, fixed=drift.get("fixed", False), exact_logprobs=drift.get("logprobs") == "exact")


def sampler(logits: Float[Array, "3"], key, sizes: Mapping[str, ArrayLike]) -> Float[Array, "3"]:
    """Log-probs of the sampler: of logits that are a decoder's matrix with one output, and drift like one.

    Args:
        sizes: scales by kind of drift.
    """
    params = {"arms": {"kernel": (logits - logits.mean())[:, None]}}
    for kind, size in sizes.items():
        params = drifted(params, key, kind, size)
    return jax.nn.log_softmax(params["arms"]["kernel"][:, 0])


class Results(NamedTuple):
    """What runs give, [cells, seeds].

    reward: expected reward of the last policy.
    mean_reward: mean expected reward over the steps.
    kl: mean KL(μ ‖ π) over the steps, in nats.
    """

    reward: np.ndarray
    mean_reward: np.ndarray
    kl: np.ndarray


def train(algorithm: Algorithm, cells: Sequence[Cell], seeds: Sequence[int], steps: int = STEPS) -> Results:
    """Trains an algorithm in cells with seeds."""
    gradient = jax.grad(batch_loss(algorithm))
    start = jnp.log(jnp.array(START))
    rewards = jnp.asarray(REWARDS, jnp.float32)

    def run(cell, seed):
        def step(state, number):
            logits, synced = state
            syncs = number % cell["age"] == 0
            synced = jnp.where(syncs, logits, synced)
            key = jax.random.key(seed)
            key = jnp.where(cell["fixed"], key, jax.random.fold_in(key, number // cell["age"]))
            sampled = sampler(synced, key, {kind: cell[kind] for kind in DRIFT_KINDS})
            recorded = jnp.where(cell["exact_logprobs"], jax.nn.log_softmax(synced), sampled)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), number)
            groups = jax.random.choice(key, len(GROUPS), (GROUPS_PER_STEP,), p=group_probabilities(sampled))
            weights = jnp.bincount(groups, length=len(GROUPS)).astype(jnp.float32)
            kl = jnp.exp(sampled) @ (sampled - jax.nn.log_softmax(logits))
            measured = jax.nn.softmax(logits) @ rewards, kl
            return (logits - cell["rate"] * gradient(logits, recorded, weights), synced), measured

        (logits, _), (rewards_before, kls) = jax.lax.scan(step, (start, start), jnp.arange(steps))
        return Results(jax.nn.softmax(logits) @ rewards, rewards_before.mean(), kls.mean())

    fields = {field: jnp.array([getattr(cell, field) for cell in cells]) for field in Cell._fields}
    every = jax.jit(jax.vmap(jax.vmap(run, (None, 0)), (0, None)))
    return Results(*map(np.asarray, every(fields, jnp.asarray(seeds))))


def measure_scales() -> dict:
    """The scales of the causes that have none, and what they come from; with REINFORCE at the common rate.

    kl: mean KL(μ ‖ π) over runs, in nats, by age; and by scale of noise that is fixed, or drawn anew.
    gap: mean |Δ log π| over draws of the noise at the first policy, weighted by the sampler's probabilities.
    """
    planned = plan.PLAN["tasks"][TASK]
    rate = planned["setups"]["sgd"]["common_rate"]
    seeds = range(plan.FIRST_PILOT_SEED, plan.FIRST_PILOT_SEED + planned["pilot_seeds"])
    ages = sorted({cause["age"] for cause in plan.CAUSES.values()})
    cells = [Cell(age, rate) for age in ages]
    cells += [Cell(1, rate, noise=size, fixed=fixed) for fixed in (True, False) for size in SIZES]
    kls = train(algorithm_of("reinforce"), cells, seeds).kl.mean(1)
    by_age = dict(zip(ages, kls[: len(ages)].tolist(), strict=True))
    fixed, fresh = kls[len(ages) :].reshape(2, len(SIZES))
    by_size = {"fixed": fixed.tolist(), "fresh": fresh.tolist(), "gap": [_gap(size) for size in SIZES]}
    measured = {"age": by_age} | {kind: dict(zip(SIZES, values, strict=True)) for kind, values in by_size.items()}
    scales = {name: plan.scale_of(name, measured) for name, cause in plan.CAUSES.items() if "scale" in cause}
    return {"scales": scales, "measured": measured}


def _gap(size: float) -> float:
    logits = jnp.log(jnp.array(START))
    keys = jax.random.split(jax.random.key(plan.FIRST_PILOT_SEED), DRAWS)
    sampled = jax.vmap(lambda key: sampler(logits, key, {"noise": size}))(keys)
    gaps = jnp.abs(sampled - jax.nn.log_softmax(logits))
    return float((jnp.exp(sampled) * gaps).sum(1).mean())


def trained(method: str, scales: Mapping[str, float], steps: int = STEPS) -> list[dict]:
    """Rows of a method's runs, of pilots and checks: a row for each cause, rate and seed."""
    planned = plan.PLAN["tasks"][TASK]
    (setup,) = planned["setups"]
    rates = planned["setups"][setup]["rates"]
    causes = [cell.cause for cell in plan.cells_of(TASK) if cell.algorithm == method]
    places = [(cause, rate) for cause in causes for rate in rates]
    pilots = range(plan.FIRST_PILOT_SEED, plan.FIRST_PILOT_SEED + planned["pilot_seeds"])
    seeds = [*range(planned["seeds"]), *pilots]
    results = train(algorithm_of(method), [cell_of(*place, scales) for place in places], seeds, steps)
    return [
        {
            "setup": setup,
            "algorithm": method,
            "cause": cause,
            "rate": f"{rate:g}",
            "seed": str(seed),
            **{name: float(values[row, column]) for name, values in results._asdict().items()},
        }
        for row, (cause, rate) in enumerate(places)
        for column, seed in enumerate(seeds)
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
    draw = jax.jit(jax.vmap(jax.vmap(sampler, (None, 0, None)), (0, None, None)))
    repeated = jnp.repeat(policies, DRAWS, 0)
    for scale in scales:
        sampled = draw(policies, keys, {"noise": scale}).reshape(-1, 3)
        rows.append(row("noise", scale, repeated, sampled, sampled))
        rows.append(row("noise_wrong", scale, repeated, sampled, jax.nn.log_softmax(repeated)))
    return rows
