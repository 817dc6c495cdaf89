"""Turns prompts into groups: the engine samples completions, and their grades may still be computed."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key, UInt32

from recjax import hosts
from recjax.experience.group import Completion, Grade, Group, Row, runs_of
from recjax.hub.policy import Policy
from recjax.models.placement import on_host
from recjax.models.sampling import Sampling
from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request, Sampled, Weights
from recjax.rollout.stops import said
from recjax.tasks.grading.pool import FAILURES, Answered, Grading, Scores
from recjax.tasks.prompts import Prompts


def sample_groups(
    policy: Policy,
    params: dict,
    prompts: Prompts,
    keys: UInt32[np.ndarray, "batch words"],
    group_size: int,
    max_tokens: int,
    sampling: Sampling,
    *,
    name: str,
    source: str,
    version: int,
    newer: Callable[[], Weights | None] | None = None,
) -> list[Group]:
    """A group of `group_size` completions for each prompt, without grades.

    Args:
        params: all parameters, in the dtype that they compute in.
        name: unique name of this batch; ids of its groups and completions begin with it.
        source: name of the sampler.
        version: version of `params`, in optimizer updates.
        newer: function called between rounds of tokens; returns weights that have arrived, or None. None: no updates.
        (others): see `sample_completions`.
    """
    engine = Engine(policy.decoder, policy.stop_ids, slots=policy.slots, prefix_time=prompts.tokens.shape[1])
    engine.replace_weights(params, version)
    asked = prompts.tokens, prompts.mask, keys, group_size, max_tokens, sampling
    sampled = sample_completions(engine, *asked, newer)
    prefixes = _prefixes(prompts.tokens, prompts.mask)
    texts = [said(one, policy.tokenizer, prefixes[row // group_size]) for row, one in enumerate(sampled)]
    completions = [
        Completion(
            id=f"{name}/{row:05d}",
            source=source,
            text=text,
            rows=(Row(prefixes[row // group_size], one.tokens, np.ones(len(one.tokens), bool), one.logprobs),),
            sampling=sampling,
            policy_version=int(one.versions.min()),
            truncated=one.truncated,
            version_runs=runs_of(one.versions),
        )
        for row, (one, text) in enumerate(zip(sampled, texts, strict=True))
    ]
    groups = []
    for place, problem in enumerate(prompts.problems):
        own = tuple(completions[place * group_size : (place + 1) * group_size])
        groups.append(Group(f"{name}/{place:05d}", prefixes[place], own, problem.prompt, problem.answer))
    return groups


def sample_completions(
    engine: Engine,
    prompts: Int[np.ndarray, "prompts prompt_time"],
    prompt_mask: Bool[np.ndarray, "prompts prompt_time"],
    keys: UInt32[np.ndarray, "batch words"],
    group_size: int,
    max_tokens: int,
    sampling: Sampling,
    newer: Callable[[], Weights | None] | None = None,
) -> list[Sampled]:
    """`group_size` completions of each prompt, from an engine without other requests.

    Args:
        prompts: right-padded, each row with at least one token.
        keys: key data of each completion, in the order of the prompts: `row_keys` of a fresh key. Token t is
            sampled with fold_in(its key, t), so equal keys give equal completions.
        max_tokens: limit on a completion's length, end-of-sequence token included.
        sampling: the distribution.
        newer: function that returns new weights, see `sample_groups`.
    Reference: arXiv 2509.24203 §2 (behavior policy μ).
    """
    prefixes = _prefixes(prompts, prompt_mask)
    requests = [Request(prefixes[row // group_size], key, max_tokens, sampling) for row, key in enumerate(keys)]
    tickets = engine.admit(requests, group_size)
    finished = engine.drain(newer)
    return [finished[ticket] for ticket in tickets]


def _prefixes(prompts: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    return [tokens[real] for tokens, real in zip(prompts, mask, strict=True)]


def row_keys(key: Key[Array, "*batches"], rows: int) -> UInt32[np.ndarray, "*batches rows words"]:
    """Key data of a batch's completions: fold_in(key, 0), fold_in(key, 1), …; several keys give several batches."""
    return on_host(_row_keys(key, rows))


_fold_rows = jax.vmap(jax.random.fold_in, (None, 0))
_fold_batches = jax.vmap(_fold_rows, (0, None))
_row_keys = jax.jit(
    lambda key, rows: jax.random.key_data((_fold_batches if key.ndim else _fold_rows)(key, jnp.arange(rows))),
    static_argnums=1,
)


class Grades:
    """The grades of a batch, which may still be computed; each process grades its share of the prompts."""

    def __init__(self, scores: "Future[Scores]", count: int):
        """Takes the scores of this process's share of `count` completions."""
        self._scores, self._count = scores, count

    def result(self) -> list[Grade]:
        """Waits and returns one grade per completion. Every process gets all grades, and all processes must call this.

        Raises:
            ValueError: the reward function is at fault; see `recjax.tasks.grading.custom.custom_parts`.
        """
        rewards, parts, accurate, failures = hosts.gathered(self._scores.result(), self._count)
        return [
            Grade(
                reward=None if np.isnan(rewards[row]) else float(rewards[row]),
                reward_parts={name: float(values[row]) for name, values in parts.items() if not np.isnan(values[row])},
                accurate=bool(accurate[row]),
                failure=FAILURES[failures[row]],
            )
            for row in range(self._count)
        ]


def submit(groups: Sequence[Group], prompts: Prompts, grading: Grading) -> Grades:
    """Submits completions for grading in the background; the reward sees texts without the stop token.

    Args:
        groups: groups of equal size, one for each prompt.
        grading: grading pool that is open.
    """
    own = [
        Answered(prompts.texts[place], completion.text, problem.answer, problem.columns, completion.sampled_tokens)
        for place, problem in ((place, prompts.problems[place]) for place in hosts.share(len(groups)))
        for completion in groups[place].completions
    ]
    return Grades(grading.submit(own), sum(len(group.completions) for group in groups))
