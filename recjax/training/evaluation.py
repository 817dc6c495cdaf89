"""Accuracy of sampled completions on held-out problems."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key

from recjax.config import Config
from recjax.experience.batch import answered_shape, pad
from recjax.experience.group import Group, with_grades
from recjax.experience.layout import score
from recjax.files import json_text, write_whole, writing
from recjax.hub.policy import Policy
from recjax.rollout.agent_trials import MISTAKES
from recjax.rollout.agents import Agents
from recjax.rollout.collecting import row_keys, sample_groups, submit
from recjax.tasks.grading.pool import FAILURES, Grading
from recjax.tasks.problems import question_of
from recjax.tasks.prompts import Prompts

logger = logging.getLogger(__name__)


class AnsweredPart(NamedTuple):
    """Consecutive problems with all of their graded completions; `first` is the index of the first problem."""

    first: int
    prompts: Prompts
    groups: list[Group]


def answered(
    config: Config,
    policy: Policy,
    params: dict,
    prompts: Prompts,
    grading: Grading,
    step: int,
    agents: Agents | None = None,
) -> Iterator[AnsweredPart]:
    """Samples `evaluation.samples` completions of every prompt, `rollout.prompts_per_step` prompts at a time.

    The random numbers of each part depend only on the seed, `step` and the index of its first prompt.

    Args:
        grading: open grading pool.
        agents: open agents; None if the config names none.
    Raises:
        ValueError: every agent of the whole evaluation failed through its own mistake.
    """
    settings, size, count = config.evaluation, config.rollout.prompts_per_step, len(prompts.texts)
    held: list[AnsweredPart] | None = [] if agents else None  # parts in which all agents failed
    for start in range(0, count, size):
        # Repeated prompts fill the last part, so that one compiled program serves every part.
        asked, problems = prompts.take(np.arange(start, start + size) % count), min(size, count - start)
        key, sampling = part_key(config.seed, step, start), settings.sampling()
        names = {"name": f"{start:06d}", "source": "policy", "version": step}
        if agents:
            asked = asked.take(np.arange(problems))
            groups, pending = agents.sample_groups(
                policy, params, asked, key, settings.samples, sampling, grading, **names, fatal=False
            )
        else:
            longest = config.rollout.max_completion_tokens
            keys = row_keys(key, size * settings.samples)
            groups = sample_groups(policy, params, asked, keys, settings.samples, longest, sampling, **names)
            groups, asked = groups[:problems], asked.take(np.arange(problems))
            pending = submit(groups, asked, grading)
        done = AnsweredPart(start, asked, with_grades(groups, pending.result()))
        grades = [completion.grade for group in done.groups for completion in group.completions]
        if held is not None and all(grade.failure in MISTAKES and grade.reward is None for grade in grades):
            held.append(done)
        else:
            yield from held or ()
            held = None
            yield done
    if held and sum(len(done.groups) for done in held) * settings.samples > 1:
        raise ValueError(
            f"task.agent = {config.task.agent!r}: all agents of the evaluation failed, the last with"
            f" {agents.last_failure}; correct the agent, or set task.agent_failure_reward"
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
            "problem": done.first + place,
            "prompt": done.prompts.texts[place],
            "question": question_of(done.prompts.problems[place].prompt),
            "completion": completion.text,
            "answer": group.answer,
            "difficulty": done.prompts.problems[place].difficulty,
            "reward": completion.grade.reward,
            **{f"reward/{name}": value for name, value in (completion.grade.reward_parts or {}).items()},
            "accurate": completion.grade.accurate,
            "ungraded": completion.grade.failure if completion.grade.failure not in (None, FAILURES[0]) else None,
            "truncated": completion.truncated,
            "tokens": completion.sampled_tokens,
        }
        for place, group in enumerate(done.groups)
        for completion in group.completions
    ]


def warn_of_ungraded(reasons: Iterable[str | None]) -> None:
    """Logs how many completions could not be graded and so count as wrong, if there are any."""
    reasons = list(reasons)
    found = Counter(reason for reason in reasons if isinstance(reason, str))
    if found:
        counts = ", ".join(f"{reason} {count}" for reason, count in found.items())
        logger.warning(
            "%d of %d held-out completions could not be graded and count as wrong: %s; see grading.seconds and"
            " grading.max_characters",
            found.total(),
            len(reasons),
            counts,
        )


class Evaluation(NamedTuple):
    """Share of accurate completions, mean reward, KL(π ‖ π_0) in nats per token, and one row per completion.

    The KL to the initial policy π_0 is the mean of log π − log π_0 over sampled tokens; None if it was not requested.
    """

    accuracy: float
    reward: float
    initial_kl: float | None
    samples: list[dict]


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
    settings, divergence, tokens, samples = config.evaluation, 0.0, 0, []
    for done in answered(config, policy, params, prompts, grading, step, agents=agents):
        if initial_params is not None:
            shape = answered_shape(
                config.rollout, settings.samples, None if config.task.agent else done.prompts.tokens.shape[1]
            )
            batch = pad(done.groups, shape)
            initial = score(policy, initial_params, batch, settings.sampling(), config.model.logprob_chunk)
            mask = batch.completion_mask
            divergence += float((batch.behavior_logprobs - initial)[mask].sum())
            tokens += int(mask.sum())
        samples += sample_rows(done)
    warn_of_ungraded(sample["ungraded"] for sample in samples)
    rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
    accuracy = float(np.mean([sample["accurate"] for sample in samples]))
    initial_kl = None if initial_params is None else divergence / max(tokens, 1)
    return Evaluation(accuracy, float(np.mean(rewards)) if rewards else math.nan, initial_kl, samples)


def samples_as_markdown(evaluation: Evaluation, count: int = 8) -> str:
    """The first `count` completions as Markdown, with question, true answer and reward; texts are indented verbatim."""

    def indented(text: str) -> str:
        return "".join(f"    {line}\n" for line in text.splitlines() or [""])

    return "\n".join(
        f"**{place}. reward {sample['reward']}**, answer {sample['answer']}\n\n"
        f"{indented(sample['question'])}\n{indented(sample['completion'])}"
        for place, sample in enumerate(evaluation.samples[:count], 1)
    )


def write_samples(path: Path, evaluation: Evaluation) -> None:
    """Writes one JSON line per completion."""
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    write_whole(path, "".join(json_text(sample) + "\n" for sample in evaluation.samples))
