"""Turns prompts into groups: the engine samples completions, and their grades may still be computed."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, UInt32

from recjax.experience.group import Completion, Grade, Group, Row, runs_of
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import decode_each_after
from recjax.models.placement import laid_out_by_rules, on_host
from recjax.models.sampling import Sampling
from recjax.rewards.custom import Answered
from recjax.rewards.pool import FAILURES, Grading, Scores
from recjax.rollout.device import CompilingDevice
from recjax.rollout.engine import Engine
from recjax.rollout.plan import abstract_weights
from recjax.rollout.requests import Request, Sampled, Weights
from recjax.runtime import hosts
from recjax.runtime.clocks import DeviceClock
from recjax.tasks.problems import Problem
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
    clock: DeviceClock | None = None,
) -> list[Group]:
    """A group of `group_size` completions for each prompt, without grades, from an engine of its own.

    Args:
        params: all parameters, in the dtype that they compute in.
        prompts: each with at least one token.
        keys: key data of each completion, in the order of the prompts: `row_keys` of a fresh key. Token t is
            sampled with fold_in(its key, t), so equal keys give equal completions.
        max_tokens: limit on a completion's length, end-of-sequence token included.
        sampling: the distribution.
        name: unique name of this batch; ids of its groups and completions begin with it.
        source: name of the sampler.
        version: version of `params`, in optimizer updates.
        newer: returns weights that have arrived between rounds of tokens, see `Engine`.
        clock: see `Engine`.
    Reference: arXiv 2509.24203 §2 (behavior policy μ).
    """
    engine = _engine_for(policy, prompts, newer=newer, clock=clock)
    engine.replace_weights(params, version)
    prefixes = [tokens[real] for tokens, real in zip(prompts.tokens, prompts.mask, strict=True)]
    tickets = engine.admit(_requests(prefixes, keys, group_size, max_tokens, sampling), group_size)
    finished = engine.drain()
    sampled = [finished[ticket] for ticket in tickets]
    of_each = [prefix for prefix in prefixes for _ in range(group_size)]
    completions = sampled_completions(of_each, sampled, policy, sampling, source)
    of_groups = [completions[start : start + group_size] for start in range(0, len(completions), group_size)]
    return problem_groups(name, prompts.problems, of_groups)


def compile_first_round(
    policy: Policy, prompts: Prompts, group_size: int, max_tokens: int, sampling: Sampling, device: CompilingDevice
) -> None:
    """Compiles the programs of `sample_groups` up to a batch's first round of tokens.

    The later programs, for a longer cache or fewer slots, depend on the lengths of the completions.

    Args:
        prompts: any prompts in the number and width of the batch's.
    """
    engine = _engine_for(policy, prompts, device=device)
    engine.replace_weights(laid_out_by_rules(jax.sharding.get_mesh(), abstract_weights(policy.decoder)), 0)
    prefixes = [tokens[real] for tokens, real in zip(prompts.tokens, prompts.mask, strict=True)]
    keys = device.read(_row_keys.eval_shape(jax.random.key(0), group_size * len(prefixes)))
    engine.admit(_requests(prefixes, keys, group_size, max_tokens, sampling), group_size)
    engine.round()


def _engine_for(policy: Policy, prompts: Prompts, **options: Any) -> Engine:
    """A new engine for a batch of prompts."""
    sizes = {"slots": policy.slots, "prefix_time": prompts.tokens.shape[1], "recording": policy.recording}
    return Engine(policy.decoder, policy.stop_ids, **sizes, **options)


def _requests(
    prefixes: Sequence[np.ndarray], keys: np.ndarray, group_size: int, max_tokens: int, sampling: Sampling
) -> list[Request]:
    return [Request(prefixes[row // group_size], key, max_tokens, sampling) for row, key in enumerate(keys)]


def sampled_completions(
    prefixes: Sequence[np.ndarray],
    sampled: Sequence[Sampled],
    policy: Policy,
    sampling: Sampling,
    source: str,
) -> list[Completion]:
    """Completions of one turn, still without ids.

    Args:
        prefixes: the prompt of each completion.
    """
    if not sampled:
        return []
    # A text has no token that ended its completion.
    written = [each.tokens if each.truncated else each.tokens[:-1] for each in sampled]
    texts = decode_each_after(policy.tokenizer, prefixes, written)
    versions = np.concatenate([each.versions for each in sampled])
    counts = np.array([len(each.tokens) for each in sampled])
    starts = counts.cumsum() - counts
    oldest = np.minimum.reduceat(versions, starts).tolist()
    newest = np.maximum.reduceat(versions, starts).tolist()
    return [
        Completion(
            id="",
            source=source,
            text=text,
            rows=(Row(prefix, *each.row_columns),),
            sampling=sampling,
            policy_version=version,
            truncated=each.truncated,
            version_runs=() if version == last else runs_of(each.versions),
        )
        for prefix, each, text, version, last in zip(prefixes, sampled, texts, oldest, newest, strict=True)
    ]


def problem_groups(name: str, problems: Sequence[Problem], completions: Sequence[Sequence[Completion]]) -> list[Group]:
    """A group for each problem, with its completions; the group's tokens are the first prompt of a completion.

    Args:
        name: beginning of the ids that groups and completions get; of a mixture, they also get the task's name.
    """
    groups = []
    numbers = itertools.count()
    for number, (problem, answers) in enumerate(zip(problems, completions, strict=True)):
        answers = [answer._replace(id=f"{name}/{next(numbers):05d}") for answer in answers]
        if problem.task:
            answers = [answer._replace(metadata={**answer.metadata, "task": problem.task}) for answer in answers]
        tokens = next((row.prompt_tokens for answer in answers for row in answer.rows), np.zeros(0, np.int32))
        prompt = problem.prompt if isinstance(problem.prompt, str) else list(problem.prompt)
        groups.append(Group(f"{name}/{number:05d}", tokens, tuple(answers), prompt, problem.answer))
    return groups


def row_keys(key: Key[Array, "*batches"], rows: int) -> UInt32[np.ndarray, "*batches rows words"]:
    """Key data of a batch's completions: fold_in(key, 0), fold_in(key, 1), …; several keys give several batches."""
    return on_host(_row_keys(key, rows))


@functools.partial(jax.jit, static_argnums=1)
def _row_keys(key: Key[Array, "*batches"], rows: int) -> UInt32[Array, "*batches rows words"]:
    folded = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(key.ravel(), jnp.arange(rows))
    return jax.random.key_data(folded.reshape(*key.shape, rows))


class Grades:
    """The grades of a batch, which may still be computed; each process grades its share of the completions."""

    def __init__(
        self, scores: "Future[Scores] | None", count: int, complete: Callable[[list[Grade]], list[Grade]] = list
    ):
        """Takes the scores of this process's share of the completions that a reward grades.

        Args:
            scores: None if no such completions exist.
            count: their number in all processes.
            complete: function from their grades to the grades of the whole batch.
        """
        self._scores = scores
        self._count = count
        self._complete = complete

    def result(self) -> list[Grade]:
        """Waits and returns one grade per completion. Every process gets all grades, and all processes must call this.

        Raises:
            UserError: the reward function is at fault, see `recjax.rewards.custom.custom_parts`; or an agent's
                rewards are.
        """
        if self._scores is None:
            return self._complete([])
        scores = self._scores.result()
        missing = np.full(len(scores.rewards), np.nan, np.float32)
        # The shares of the processes may have different tasks of a mixture, whose rewards have different parts.
        names = hosts.all_names(scores.parts)
        scores = scores._replace(parts={name: scores.parts.get(name, missing) for name in names})
        rewards, parts, accurate, failures = hosts.gathered(scores, self._count)
        columns = [values.tolist() for values in (rewards, accurate, failures, *parts.values())]
        grades = [
            Grade(
                reward=None if math.isnan(reward) else reward,
                reward_parts={name: part for name, part in zip(parts, values, strict=True) if not math.isnan(part)},
                accurate=None if math.isnan(is_right) else bool(is_right),
                failure=FAILURES[failure],
            )
            for reward, is_right, failure, *values in zip(*columns, strict=True)
        ]
        return self._complete(grades)


def submit(groups: Sequence[Group], prompts: Prompts, grading: Grading) -> Grades:
    """Submits completions for grading in the background; the reward sees texts without the stop token.

    Args:
        groups: groups, one for each prompt.
        grading: grading pool that is open.
    """
    answered = [
        Answered.to(prompts.problems[number], prompts.texts[number], answer.text, answer.sampled_tokens, answer.id)
        for number in hosts.share(len(groups))
        for answer in groups[number].completions
    ]
    return Grades(grading.submit(answered), sum(len(group.completions) for group in groups))
