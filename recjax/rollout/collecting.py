"""Turns prompts into groups: the engine samples completions, and their grades may still be computed."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, UInt32

from recjax.experience.group import Completion, Grade, Group, Row, runs_of
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import decode_each_after
from recjax.models.placement import on_host
from recjax.models.sampling import Sampling
from recjax.models.unrolling import made_for_sampling
from recjax.rewards.custom import Answered
from recjax.rewards.pool import FAILURES, Grading, Scores
from recjax.rollout.engine import Engine
from recjax.rollout.plan import plan_for, sampling_mesh
from recjax.rollout.programs import ProgramCall, engine_programs, first_round, sampling_params
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
    engine = Engine(
        policy.decoder,
        policy.stop_ids,
        slots=policy.slots,
        prefix_time=prompts.tokens.shape[1],
        newer=newer,
        recording=policy.recording,
        clock=clock,
    )
    engine.replace_weights(params, version)
    prefixes = [tokens[real] for tokens, real in zip(prompts.tokens, prompts.mask, strict=True)]
    tickets = engine.admit(_requests(prefixes, keys, group_size, max_tokens, sampling), group_size)
    finished = engine.drain()
    sampled = [finished[ticket] for ticket in tickets]
    repeated = [prefixes[row // group_size] for row in range(len(sampled))]
    completions = sampled_completions(repeated, sampled, policy, sampling, source)
    by_prompt = [completions[start : start + group_size] for start in range(0, len(completions), group_size)]
    return problem_groups(name, prompts.problems, by_prompt)


def first_round_calls(
    policy: Policy, prompts: Prompts, group_size: int, max_tokens: int, sampling: Sampling
) -> list[ProgramCall]:
    """The programs of `sample_groups` up to a batch's first round of tokens, from shapes.

    Args:
        prompts: any prompts in the number and width of the batch's.
    """
    decoder = made_for_sampling(policy.decoder)
    mesh = sampling_mesh(decoder)
    count, prefix_time = prompts.tokens.shape
    plan = plan_for(decoder, count * group_size, max_tokens, group_size, prefix_time=prefix_time, slots=policy.slots)
    calls = engine_programs(
        decoder,
        plan,
        mesh,
        sampling_params(decoder, mesh),
        prompts=count,
        group_size=group_size,
        sampling=sampling,
        stop_ids=tuple(policy.stop_ids),
        recording=policy.recording,
    )
    if max_tokens == 1:  # the first two programs run the prompts and sample first tokens, which end the completions
        return calls[:2]
    return first_round(calls)


def _requests(
    prefixes: Sequence[np.ndarray], keys: np.ndarray, group_size: int, max_tokens: int, sampling: Sampling
) -> list[Request]:
    requests = []
    for row, key in enumerate(keys):
        prefix = prefixes[row // group_size]
        requests.append(Request(prefix, key, max_tokens, sampling))
    return requests


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
    text_tokens = []
    for each in sampled:
        tokens = each.tokens
        if not each.truncated:  # a text has no token that ended its completion
            tokens = tokens[:-1]
        text_tokens.append(tokens)
    texts = decode_each_after(policy.tokenizer, prefixes, text_tokens)
    # The versions of all completions end to end: two calls of NumPy, however many completions there are.
    versions = np.concatenate([each.versions for each in sampled])
    counts = np.array([len(each.tokens) for each in sampled])
    starts = counts.cumsum() - counts
    oldest_versions = np.minimum.reduceat(versions, starts).tolist()
    newest_versions = np.maximum.reduceat(versions, starts).tolist()
    columns = zip(prefixes, sampled, texts, oldest_versions, newest_versions, strict=True)
    completions = []
    for prefix, each, text, oldest, newest in columns:
        version_runs = ()
        if oldest != newest:
            version_runs = runs_of(each.versions)
        completions.append(
            Completion(
                id="",
                source=source,
                text=text,
                rows=(Row(prefix, *each.row_columns),),
                sampling=sampling,
                policy_version=oldest,
                truncated=each.truncated,
                version_runs=version_runs,
            )
        )
    return completions


def problem_groups(name: str, problems: Sequence[Problem], completions: Sequence[Sequence[Completion]]) -> list[Group]:
    """A group for each problem, with its completions; the group's tokens are the first prompt of a completion.

    Args:
        name: beginning of the ids that groups and completions get; of a mixture, they also get the task's name.
    """
    groups = []
    completion_numbers = itertools.count()
    for group_number, (problem, unnamed) in enumerate(zip(problems, completions, strict=True)):
        answers = []
        for answer in unnamed:
            answer = answer._replace(id=f"{name}/{next(completion_numbers):05d}")
            if problem.task:
                answer = answer._replace(metadata={**answer.metadata, "task": problem.task})
            answers.append(answer)
        rows = itertools.chain.from_iterable(answer.rows for answer in answers)
        first_row = next(rows, None)
        prompt_tokens = np.zeros(0, np.int32)
        if first_row is not None:
            prompt_tokens = first_row.prompt_tokens
        prompt = problem.prompt
        if not isinstance(prompt, str):
            prompt = list(prompt)
        group = Group(
            id=f"{name}/{group_number:05d}",
            prompt_tokens=prompt_tokens,
            completions=tuple(answers),
            prompt=prompt,
            answer=problem.answer,
        )
        groups.append(group)
    return groups


def row_keys(key: Key[Array, "*batches"], rows: int) -> UInt32[np.ndarray, "*batches rows words"]:
    """Key data of a batch's completions: fold_in(key, 0), fold_in(key, 1), …; several keys give several batches."""
    return on_host(_row_keys(key, rows))


@functools.partial(jax.jit, static_argnums=1)
def _row_keys(key: Key[Array, "*batches"], rows: int) -> UInt32[Array, "*batches rows words"]:
    fold_rows = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    fold_rows_of_batches = jax.vmap(fold_rows, in_axes=(0, None))
    folded = fold_rows_of_batches(key.ravel(), jnp.arange(rows))
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
        # The shares of the processes may have different tasks of a mixture, whose rewards have different parts.
        missing = np.full(len(scores.rewards), np.nan, np.float32)
        names = hosts.all_names(scores.parts)
        scores = scores._replace(parts={name: scores.parts.get(name, missing) for name in names})
        gathered: Scores = hosts.gathered(scores, self._count)
        part_columns = {name: values.tolist() for name, values in gathered.parts.items()}
        rewards = gathered.rewards.tolist()
        accurate = gathered.accurate.tolist()
        failures = gathered.failures.tolist()
        grades = []
        for index, (reward, is_right, failure) in enumerate(zip(rewards, accurate, failures, strict=True)):
            reward_parts = {}
            for name, values in part_columns.items():
                if not math.isnan(values[index]):
                    reward_parts[name] = values[index]
            known_right = _known(is_right)
            if known_right is not None:
                known_right = bool(known_right)
            grade = Grade(
                reward=_known(reward), reward_parts=reward_parts, accurate=known_right, failure=FAILURES[failure]
            )
            if grade.reward is None:
                # The length of a completion is known, but it is no part of a reward that does not exist.
                grade = grade._replace(reward_parts=None)
            grades.append(grade)
        return self._complete(grades)


def _known(value: float) -> float | None:
    """The value; None in the place of NaN."""
    if math.isnan(value):
        return None
    return value


def submit(groups: Sequence[Group], prompts: Prompts, grading: Grading) -> Grades:
    """Submits completions for grading in the background; the reward sees texts without the stop token.

    Args:
        groups: groups, one for each prompt.
        grading: grading pool that is open.
    """
    answered = []
    for number in hosts.share(len(groups)):
        problem = prompts.problems[number]
        text = prompts.texts[number]
        for answer in groups[number].completions:
            answered.append(Answered.to(problem, text, answer.text, length=answer.sampled_tokens, id=answer.id))
    count = sum(len(group.completions) for group in groups)
    return Grades(grading.submit(answered), count)
