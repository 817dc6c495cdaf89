"""Accuracy of sampled completions on held-out problems."""

import contextlib
import logging
from collections import Counter
from collections.abc import Container, Generator, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pandas as pd
from jaxtyping import Array, Key

from recjax.agents.agents import Agents
from recjax.agents.trials import AGENT_FAILURES, MISTAKES
from recjax.config import Config, EvaluationConfig
from recjax.errors import UserError
from recjax.experience.batch import answered_shape, pad
from recjax.experience.group import Group, with_grades
from recjax.experience.layout import freely_routed, score
from recjax.hub.policy import Policy
from recjax.models.sampling import NOTHING_RECORDED
from recjax.rewards.pool import FAILURES, NO_REWARD, Grading
from recjax.rewards.reward import MixedReward, Reward
from recjax.rollout.collecting import row_keys, sample_groups, submit
from recjax.runtime.files import json_text, write_whole, writing
from recjax.tasks.problems import question_of
from recjax.tasks.prompts import Prompts

logger = logging.getLogger(__name__)

_PASS_RATES = 2**31 - 1  # stands for the step in the random keys of pass rates


class HeldOut(NamedTuple):
    """What a run is evaluated on, and with.

    prompts: the held-out prompts.
    grading: open grading pool.
    agents: open agents; None if the config names none.
    """

    prompts: Prompts
    grading: Grading
    agents: Agents | None = None


class AnsweredPart(NamedTuple):
    """Consecutive problems with all of their graded completions; `first` is the index of the first problem.

    With `task.seats`, each problem occurs once for each trained seat, with the group of that seat.
    """

    first: int
    prompts: Prompts
    groups: list[Group]
    seats: int = 1


def answered(
    config: Config,
    policy: Policy,
    params: dict,
    prompts: Prompts,
    grading: Grading,
    step: int,
    agents: Agents | None = None,
    done: Container[int] = (),
    version: int | None = None,
) -> Iterator[AnsweredPart]:
    """Samples `evaluation.samples` completions of every prompt, `rollout.prompts_per_step` prompts at a time.

    The random numbers of each part depend only on the seed, `step` and the index of its first prompt.

    Args:
        grading: open grading pool.
        agents: open agents; None if the config names none.
        done: indices of first prompts of parts that are not sampled.
        version: optimizer updates of `params`; None: `step`.
    Raises:
        UserError: every agent of the whole evaluation failed through its own mistake.
    """
    settings = config.evaluation
    size = config.rollout.prompts_per_step
    count = len(prompts.texts)
    # no update reads the recorded arrays
    policy = policy._replace(recording=NOTHING_RECORDED)
    seats = len(config.task.trained_seats)
    held: list[AnsweredPart] | None = [] if agents else None  # parts in which all agents failed
    for start in (start for start in range(0, count, size) if start not in done):
        # Repeated prompts fill the last part, so that one compiled program serves every part.
        batch = prompts.take(np.arange(start, start + size) % count)
        problems = min(size, count - start)
        key = part_key(config.seed, step, start)
        sampling = settings.sampling()
        names = {"name": f"{start:06d}", "source": "policy", "version": step if version is None else version}
        if agents:
            batch = batch.take(np.arange(problems))
            groups, pending = agents.sample_groups(
                policy, params, batch, key, settings.samples, sampling, grading, **names, fatal=False
            )
            batch = batch.take(np.repeat(np.arange(problems), seats))
        else:
            longest = config.rollout.max_completion_tokens
            keys = row_keys(key, size * settings.samples)
            groups = sample_groups(policy, params, batch, keys, settings.samples, longest, sampling, **names)
            groups = groups[:problems]
            batch = batch.take(np.arange(problems))
            pending = submit(groups, batch, grading)
        answers = AnsweredPart(start, batch, with_grades(groups, pending.result()), seats)
        grades = [completion.known_grade for group in answers.groups for completion in group.completions]
        if held is not None and all(grade.failure in MISTAKES and grade.reward is None for grade in grades):
            held.append(answers)
        else:
            yield from held or ()
            held = None
            yield answers
    if held and sum(len(answers.groups) for answers in held) * settings.samples > 1:
        assert agents is not None
        raise UserError(
            "task.agent",
            f"all agents of the evaluation failed, the last with {agents.last_failure}",
            "correct the agent, or set task.agent_failure_reward",
            value=config.task.agent,
        )
    yield from held or ()


def part_key(seed: int, step: int, start: int) -> Key[Array, ""]:
    """The random key for the part of an evaluation that begins with prompt `start`."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2), step)
    return jax.random.fold_in(key, start)


def sample_rows(done: AnsweredPart) -> list[dict]:
    """One row per completion: the problem's index, the prompt, the completion and its grade."""
    return [
        {
            "problem": done.first * done.seats + index,
            "prompt": done.prompts.texts[index],
            **{name: completion.metadata[name] for name in ("task", "seat") if name in completion.metadata},
            "question": question_of(done.prompts.problems[index].prompt),
            "completion": completion.text,
            "answer": group.answer,
            "difficulty": done.prompts.problems[index].difficulty,
            "reward": completion.known_grade.reward,
            **{f"reward/{name}": value for name, value in (completion.known_grade.reward_parts or {}).items()},
            "accurate": completion.known_grade.accurate,
            "ungraded": completion.known_grade.failure
            if completion.known_grade.failure not in (None, FAILURES[0])
            else None,
            "truncated": completion.truncated,
            "tokens": completion.sampled_tokens,
        }
        for index, group in enumerate(done.groups)
        for completion in group.completions
    ]


def warn_of_ungraded(reasons: Iterable[str | None], by_agents: bool) -> None:
    """Logs how many completions could not be graded and so count as wrong, with remedies, if there are any.

    Args:
        by_agents: True if agents made the completions; a reason that agents and graders share is then the agents'.
    """
    reasons = list(reasons)
    failures = Counter(reason for reason in reasons if isinstance(reason, str))
    if not failures:
        return
    of_agents = [reason for reason in failures if by_agents and reason in AGENT_FAILURES]
    remedies = [AGENT_FAILURES[reason] for reason in of_agents]
    if failures.keys() - {*of_agents, FAILURES[NO_REWARD]}:
        remedies.append("see grading.seconds and grading.max_characters")
    logger.warning(
        "%d of %d held-out completions could not be graded and count as wrong: %s%s",
        failures.total(),
        len(reasons),
        ", ".join(f"{reason} {count}" for reason, count in failures.items()),
        "".join(f"; {remedy}" for remedy in remedies),
    )


class Evaluation(NamedTuple):
    """Share of accurate completions, mean reward, KL(π ‖ π_0) in nats per token, and one row per completion.

    The share is None if a completion has no verdict.
    Share and reward are means over problems; with `task.seats`, over pairs of a problem and a seat that plays.
    The KL to the initial policy π_0 is the mean of log π − log π_0 over sampled tokens; None if it was not requested.
    """

    accuracy: float | None
    reward: float
    initial_kl: float | None
    samples: list[dict]

    @property
    def right_and_ended(self) -> float | None:
        """Share of completions that are accurate and ended before the token limit, as a mean over problems."""
        rows = pd.DataFrame(self.samples)
        ended = rows["accurate"].astype(float) * ~rows["truncated"].astype(bool)
        return None if self.accuracy is None else mean_over_problems(rows.assign(ended=ended), "ended")


def mean_over_problems(rows: pd.DataFrame, column: str) -> float:
    """The mean over problems of a column's mean over the problem's completions that have a value; NaN without any."""
    return float(rows[column].astype(float).groupby(rows["problem"]).mean().mean())


def evaluate_policy(
    config: Config,
    policy: Policy,
    params: dict,
    prompts: Prompts,
    grading: Grading,
    step: int,
    initial_params: dict | None = None,
    agents: Agents | None = None,
) -> Evaluation:
    """Evaluates the policy of a training run after `step` updates.

    Args:
        grading: open grading pool.
        initial_params: parameters of π_0, for the KL; None skips the KL.
        agents: see `answered`.
    """
    settings = config.evaluation
    divergence = 0.0
    tokens = 0
    samples = []
    for done in answered(config, policy, params, prompts, grading, step, agents=agents):
        if initial_params is not None:
            shape = answered_shape(
                config.rollout, settings.samples, None if config.task.agent else done.prompts.tokens.shape[1]
            )
            batch = freely_routed(pad(done.groups, shape))
            initial = score(policy.decoder, initial_params, batch, settings.sampling(), config.model.logprob_chunk)
            mask = batch.completion_mask
            divergence += float((batch.behavior_logprobs - initial)[mask].sum())
            tokens += int(mask.sum())
        samples += sample_rows(done)
    warn_of_ungraded((sample["ungraded"] for sample in samples), agents is not None)
    accuracy, reward = (mean_over_problems(pd.DataFrame(samples), column) for column in ("accurate", "reward"))
    if any(sample["accurate"] is None for sample in samples):
        accuracy = None
    initial_kl = None if initial_params is None else divergence / max(tokens, 1)
    return Evaluation(accuracy, reward, initial_kl, samples)


def accurate_counts(
    config: Config, policy: Policy, params: dict, train: Prompts, reward: Reward | MixedReward, done: Container[int]
) -> Generator[tuple[int, list[int]], None, None]:
    """Samples `task.keep.samples` completions of every train prompt, for `task.keep`.

    Args:
        params: all parameters in the dtype that they compute in.
        done: indices of first prompts of parts that are not sampled.
    Returns:
        For each part, the index of its first prompt and each prompt's number of accurate completions.
    """
    keep = config.task.keep
    assert keep is not None
    settings = EvaluationConfig(samples=keep.samples, **config.rollout.sampling()._asdict())
    config = config.model_copy(update={"evaluation": settings})
    with contextlib.ExitStack() as stack:
        grading = stack.enter_context(Grading(config, reward))
        agents = stack.enter_context(Agents(config, policy)) if config.task.agent else None
        for part in answered(config, policy, params, train, grading, _PASS_RATES, agents=agents, done=done):
            counts = [
                sum(bool(completion.known_grade.accurate) for completion in group.completions) for group in part.groups
            ]
            yield part.first, counts


def write_samples(path: Path, evaluation: Evaluation, step: int) -> None:
    """Writes one JSON line per completion, with the step of the evaluation."""
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    write_whole(path, "".join(json_text({"step": step, **sample}) + "\n" for sample in evaluation.samples))
