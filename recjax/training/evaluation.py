"""Accuracy of sampled completions on held-out problems."""

import contextlib
import logging
from collections import Counter
from collections.abc import Container, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
    """The held-out problems of a run, with the workers that grade the answers to them.

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
    # Parts are held back as long as all agents have failed in all of them: if that stays so, none counts.
    held_back: list[AnsweredPart] = []
    may_hold_back = agents is not None
    for start in range(0, count, size):
        if start in done:
            continue
        # Repeated prompts fill the last part, so that one compiled program serves every part.
        batch = prompts.take(np.arange(start, start + size) % count)
        problems = min(size, count - start)
        key = part_key(config.seed, step, start)
        sampling = settings.sampling()
        name = f"{start:06d}"
        policy_version = step if version is None else version
        if agents:
            batch = batch.take(np.arange(problems))
            groups, pending = agents.sample_groups(
                policy,
                params,
                batch,
                key,
                settings.samples,
                sampling=sampling,
                grading=grading,
                name=name,
                source="policy",
                version=policy_version,
                fatal=False,
            )
            batch = batch.take(np.repeat(np.arange(problems), seats))
        else:
            longest = config.rollout.max_completion_tokens
            keys = row_keys(key, size * settings.samples)
            groups = sample_groups(
                policy,
                params,
                batch,
                keys,
                settings.samples,
                max_tokens=longest,
                sampling=sampling,
                name=name,
                source="policy",
                version=policy_version,
            )
            groups = groups[:problems]
            batch = batch.take(np.arange(problems))
            pending = submit(groups, batch, grading)
        answers = AnsweredPart(start, batch, with_grades(groups, pending.result()), seats)
        if may_hold_back and _all_agents_failed(answers.groups):
            held_back.append(answers)
        else:
            yield from held_back
            held_back = []
            may_hold_back = False
            yield answers
    if sum(len(answers.groups) for answers in held_back) * settings.samples > 1:
        assert agents is not None
        raise UserError(
            "task.agent",
            f"all agents of the evaluation failed, the last with {agents.last_failure}",
            "correct the agent, or set task.agent_failure_reward",
            value=config.task.agent,
        )
    yield from held_back


def _all_agents_failed(groups: Iterable[Group]) -> bool:
    """True if no completion has a reward, because the agents made mistakes."""
    for group in groups:
        for completion in group.completions:
            grade = completion.known_grade
            if grade.failure not in MISTAKES or grade.reward is not None:
                return False
    return True


def part_key(seed: int, step: int, start: int) -> Key[Array, ""]:
    """The random key for the part of an evaluation that begins with prompt `start`."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2), step)
    return jax.random.fold_in(key, start)


def sample_rows(done: AnsweredPart) -> list[dict]:
    """One row per completion: the problem's index, the prompt, the completion and its grade."""
    rows = []
    for index, group in enumerate(done.groups):
        problem = done.prompts.problems[index]
        for completion in group.completions:
            grade = completion.known_grade
            row: dict[str, Any] = {"problem": done.first * done.seats + index, "prompt": done.prompts.texts[index]}
            for name in ("task", "seat"):
                if name in completion.metadata:
                    row[name] = completion.metadata[name]
            row["question"] = question_of(problem.prompt)
            row["completion"] = completion.text
            row["answer"] = group.answer
            row["difficulty"] = problem.difficulty
            row["reward"] = grade.reward
            for name, value in (grade.reward_parts or {}).items():
                row[f"reward/{name}"] = value
            row["accurate"] = grade.accurate
            row["ungraded"] = None if grade.failure == FAILURES[0] else grade.failure
            row["truncated"] = completion.truncated
            row["tokens"] = completion.sampled_tokens
            rows.append(row)
    return rows


def warn_of_ungraded(reasons: Iterable[str | None], by_agents: bool) -> None:
    """Logs how many completions could not be graded and so count as wrong, with remedies, if there are any.

    Args:
        by_agents: True if agents made the completions; a reason that agents and graders share is then the agents'.
    """
    reasons = list(reasons)
    failures = Counter(reason for reason in reasons if isinstance(reason, str))
    if not failures:
        return
    agent_failures = []
    if by_agents:
        agent_failures = [reason for reason in failures if reason in AGENT_FAILURES]
    remedies = [AGENT_FAILURES[reason] for reason in agent_failures]
    if failures.keys() - {*agent_failures, FAILURES[NO_REWARD]}:
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
        if self.accuracy is None:
            return None
        rows = pd.DataFrame(self.samples)
        ended = rows["accurate"].astype(float) * ~rows["truncated"].astype(bool)
        return mean_over_problems(rows.assign(ended=ended), "ended")


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
    for done in answered(config, policy, params, prompts, grading, step=step, agents=agents):
        if initial_params is not None:
            longest_prompt = None
            if not config.task.agent:
                longest_prompt = done.prompts.tokens.shape[1]
            shape = answered_shape(config.rollout, settings.samples, longest_prompt)
            batch = freely_routed(pad(done.groups, shape))
            initial = score(policy.decoder, initial_params, batch, settings.sampling(), config.model.logprob_chunk)
            mask = batch.completion_mask
            divergence += float((batch.behavior_logprobs - initial)[mask].sum())
            tokens += int(mask.sum())
        samples += sample_rows(done)
    warn_of_ungraded((sample["ungraded"] for sample in samples), agents is not None)
    rows = pd.DataFrame(samples)
    accuracy = None
    if all(sample["accurate"] is not None for sample in samples):
        accuracy = mean_over_problems(rows, "accurate")
    initial_kl = None
    if initial_params is not None:
        initial_kl = divergence / max(tokens, 1)
    return Evaluation(accuracy, mean_over_problems(rows, "reward"), initial_kl, samples)


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
        agents = None
        if config.task.agent:
            agents = stack.enter_context(Agents(config, policy))
        parts = answered(config, policy, params, train, grading, step=_PASS_RATES, agents=agents, done=done)
        for part in parts:
            counts = []
            for group in part.groups:
                counts.append(sum(bool(completion.known_grade.accurate) for completion in group.completions))
            yield part.first, counts


def write_samples(path: Path, evaluation: Evaluation, step: int) -> None:
    """Writes one JSON line per completion, with the step of the evaluation."""
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    write_whole(path, "".join(json_text({"step": step, **sample}) + "\n" for sample in evaluation.samples))
