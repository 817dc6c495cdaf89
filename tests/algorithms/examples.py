"""Inputs that the tests share, and the paper's sums written as loops."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from recjax.algorithms import losses, regularizers
from recjax.algorithms.presets import PRESETS
from recjax.algorithms.reading import names_read

# Uneven, interleaved, negative ids; one group of one.
GROUP_IDS = np.array([7, -3, 7, 2, -3, 7, -3, 40, -3, 2, 11, 5, 2, 11, 7, 5], np.int32)
REWARDS = np.array([0, 1, 1, 0.5, 0, 0.25, 0, 1, 0.1, 0.75, 0, 0, 0.25, 0.6, 0.25, 0.2], np.float32)
ROWS = len(REWARDS)
# XLA's options for programs that are compiled once and run seldom.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Four parts of four rows that hold whole groups: −3; 7; 2 and 40; 5 and 11.
WHOLE_GROUPS = np.array([1, 4, 6, 8, 0, 2, 5, 14, 3, 9, 12, 7, 11, 15, 10, 13])


class Example(NamedTuple):
    """A batch as losses see it."""

    logprobs: np.ndarray
    behavior_logprobs: np.ndarray
    completion_mask: np.ndarray
    rewards: np.ndarray
    group_ids: np.ndarray
    reference_logprobs: np.ndarray
    entropy: np.ndarray


def first_of_each_set_of_axes(names=tuple(PRESETS)) -> list[str]:
    """The first preset, among the names, of each set of axes that a preset sets."""
    return [*{frozenset(PRESETS[name]): name for name in reversed(names)}.values()]


def make_example(seed=0, time=4, spread=0.8) -> Example:
    """Rows in six groups, of every length from 0 (row 4, padding) to `time`; ratios on both sides of every bound."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, time + 1, ROWS)
    lengths[4] = 0
    behavior = -generator.uniform(0.1, 3.0, (ROWS, time))
    return Example(
        logprobs=(behavior + spread * generator.normal(size=(ROWS, time))).astype(np.float32),
        behavior_logprobs=behavior.astype(np.float32),
        completion_mask=np.arange(time) < lengths[:, None],
        rewards=REWARDS,
        group_ids=GROUP_IDS,
        reference_logprobs=(behavior + generator.normal(size=(ROWS, time))).astype(np.float32),
        entropy=generator.uniform(0, 2, (ROWS, time)).astype(np.float32),
    )


def observed(x: Example):
    """Tokens of the environment: those of real rows that the policy did not choose, unless they are junk."""
    return ~x.completion_mask & x.completion_mask.any(-1, keepdims=True) & jnp.isfinite(x.logprobs)


def logits_of(logprobs, fixed):
    """Scores over a vocabulary of three tokens, the last two of which are fixed."""
    return jnp.stack([logprobs, *jnp.broadcast_to(jnp.array(fixed)[:, None, None], (2, *logprobs.shape))], axis=-1)


def top_of(x, logprobs):
    """log π and log μ of the last two of the three tokens, and of a third that no policy has; the first is the rest."""
    scores = logits_of(logprobs, OWN), logits_of(x.behavior_logprobs, THEIRS)
    tops = [jax.nn.log_softmax(jnp.where(x.completion_mask[..., None], one, 0.0))[..., 1:] for one in scores]
    return [jnp.concatenate([top, jnp.full((*top.shape[:-1], 1), jnp.nan)], axis=-1) for top in tops]


OWN, THEIRS = (0.0, 0.5), (-0.5, 0.3)  # scores of the policy's and of the teacher's other tokens


def rows_of(algorithm, example: Example, key=None, proximal_logprobs=None) -> losses.RowTerms:
    """Row terms of the whole example; what it has no field for follows from its rows."""
    x = Example(*(jnp.asarray(array) for array in example))
    key = jax.random.key(0) if key is None else key
    parts = {"first": x.rewards, "second": jnp.where(x.rewards > 0.9, jnp.nan, x.completion_mask.sum(-1) / 4)}
    scored = losses.Scored(x.logprobs, x.entropy, x.behavior_logprobs) if algorithm.needs_scoring else None
    if algorithm.reads("scored_reference_kl"):
        scored = scored._replace(reference_kl=regularizers.reverse_kl(*compared_logits(x, x.logprobs)))
    return losses.row_terms(
        algorithm,
        losses.BatchValues(
            x.rewards,
            x.group_ids,
            x.completion_mask.any(-1),
            key,
            completion_mask=x.completion_mask,
            foreign=x.rewards > 0.5,
            reward_parts=parts,
            part_weights={"first": jnp.ones(len(x.rewards)), "second": jnp.full(len(x.rewards), 0.5)},
            scored=scored,
            proximal_logprobs=proximal_logprobs if algorithm.needs_proximal else None,
            turn_rewards=jnp.stack([x.rewards, x.rewards**2 + 0.3], axis=1),
            token_turns=jnp.arange(x.completion_mask.shape[1])[None].repeat(len(x.rewards), 0) // 2,
            teacher_logprobs=x.reference_logprobs if algorithm.needs_teacher else None,
            observation_mask=observed(x),
        ),
    )


def compared_logits(x, logprobs):
    """Scores of the policy's and the teacher's three tokens; 0 where masked."""
    scores = logits_of(logprobs, OWN), logits_of(x.reference_logprobs, THEIRS)
    return [jnp.where(x.completion_mask[..., None], one, 0.0) for one in scores]


def loss_and_gradient(algorithm, example: Example, rows: losses.RowTerms | None = None):
    """((sum, count), (d sum / d logprobs, d sum / d entropy)) of an example."""
    rows = rows_of(algorithm, example) if rows is None else rows
    x = Example(*(jnp.asarray(array) for array in example))

    def total(logprobs, entropy):
        divergence = algorithm.teacher_divergence and algorithm.teacher_divergence.bound()(
            *compared_logits(x, logprobs)
        )
        value, count = losses.loss(
            algorithm,
            logprobs,
            x.behavior_logprobs,
            rows,
            x.completion_mask,
            losses.TermScores(x.reference_logprobs, entropy, divergence, *top_of(x, logprobs)),
        )
        return value, (value, count)

    gradient, value = jax.grad(total, argnums=(0, 1), has_aux=True)(x.logprobs, x.entropy)
    return value, gradient


def called(function, values, **options):
    """The result of a function, which reads the values that its positional parameters name."""
    return function(*(values.get(name) for name in names_read(function)), **options)


def members(group_ids, kept, row):
    """Indices of the kept rows of a row's group."""
    return [j for j in range(len(group_ids)) if group_ids[j] == group_ids[row] and kept[j]]


def group_mean_loop(rewards, group_ids, kept):
    """r − r̄ by a double loop in float64."""
    advantages = np.zeros(len(rewards))
    for i in range(len(rewards)):
        if kept[i]:
            group = members(group_ids, kept, i)
            advantages[i] = float(rewards[i]) - sum(float(rewards[j]) for j in group) / len(group)
    return advantages
