"""Sampled accuracy on held-out problems."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from absl import logging

from recjax.config import Config
from recjax.hub.policy import Policy
from recjax.models.logprobs import Sampling, completion_logprobs
from recjax.models.placement import on_host, put_rows
from recjax.rollout.collecting import Collected, Completions, draw, scored
from recjax.tasks.grading.pool import FAILURES, Grading
from recjax.tasks.prompts import Prompts

_initial_logprobs = jax.jit(completion_logprobs, static_argnames=("decoder", "sampling", "chunk"))


class Round(NamedTuple):
    """Some problems with all of their completions, scored.

    `asked` and `drawn` are filled up with repeats of problems, so that one compiled program serves every round;
    `collected` holds the rows that count: those of the first `problems`, the first of which stands at place `first`.
    """

    first: int
    problems: int
    asked: Prompts
    drawn: Completions
    collected: Collected


def evaluated_rounds(
    config: Config, policy: Policy, params: dict, prompts: Prompts, grading: Grading, step: int, first: int = 0
) -> Iterator[Round]:
    """Draws `evaluation.samples` completions of every prompt, in rounds of `rollout.prompts_per_step` prompts.

    A round's random numbers depend on nothing but the seed, `step` and its place.

    Args:
        grading: open.
        first: where to begin, a multiple of `rollout.prompts_per_step`: the rounds before it are done.
    """
    settings, size, count = config.evaluation, config.rollout.prompts_per_step, len(prompts.texts)
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 2), step)
    for start in range(first, count, size):
        asked = prompts.take(np.arange(start, start + size) % count)
        drawn = draw(
            policy,
            params,
            asked,
            jax.random.fold_in(key, start),
            settings.samples,
            config.rollout.max_completion_tokens,
            sampling,
        )
        problems = min(size, count - start)
        counted = jax.tree.map(lambda rows, kept=problems * settings.samples: rows[:kept], drawn)
        places = np.arange(problems)
        collected = scored(policy, asked.take(places), counted, grading, policy_version=step)
        yield Round(start, problems, asked, drawn, collected)


def sample_rows(done: Round) -> list[dict]:
    """One row a completion of a round: the problem's place, what was asked and said, and how it was scored."""
    batch, texts = done.collected
    group = len(texts) // done.problems
    lengths = batch.completion_mask.sum(-1)
    failures = np.zeros(len(texts), int) if batch.failures is None else batch.failures
    rows = []
    for row, text in enumerate(texts):
        problem = done.asked.problems[row // group]
        rows.append(
            {
                "problem": done.first + row // group,
                "prompt": done.asked.texts[row // group],
                "completion": text,
                "answer": problem.answer,
                "difficulty": problem.difficulty,
                "reward": float(batch.rewards[row]),
                **{f"reward/{name}": float(values[row]) for name, values in batch.reward_parts.items()},
                "accurate": bool(batch.accurate[row]),
                "ungraded": FAILURES[failures[row]] if failures[row] else None,
                "truncated": bool(batch.truncated[row]),
                "tokens": int(lengths[row]),
            }
        )
    return rows


def warn_of_ungraded(reasons: Iterable[str | None]) -> None:
    """Says how many completions could not be graded and so count as wrong, if any."""
    reasons = list(reasons)
    found = Counter(reason for reason in reasons if isinstance(reason, str))
    if found:
        counts = ", ".join(f"{reason} {count}" for reason, count in found.items())
        logging.warning(
            "%d of %d held-out completions could not be graded and count as wrong: %s; see grading.seconds and"
            " grading.max_characters",
            found.total(),
            len(reasons),
            counts,
        )


class Evaluation(NamedTuple):
    """Share of accurate completions, their mean reward, KL(π ‖ π_0) in nats per token, and one row a completion.

    The KL is to the initial policy π_0, by Σ (log π − log π_0) over the drawn tokens; None where it was not asked for.
    """

    accuracy: float
    reward: float
    initial_kl: float | None
    samples: list[dict]


def evaluate(
    config: Config,
    policy: Policy,
    params: dict,
    prompts: Prompts,
    grading: Grading,
    step: int,
    initial_params: dict | None = None,
) -> Evaluation:
    """The evaluation of a training run after `step` updates.

    Args:
        grading: open.
        initial_params: π_0, for the KL to it; None leaves that out.
    """
    divergence, tokens, samples = 0.0, 0, []
    for done in evaluated_rounds(config, policy, params, prompts, grading, step):
        if initial_params is not None:
            initial, _ = _initial_logprobs(
                policy.decoder,
                initial_params,
                *put_rows((done.asked.tokens, done.asked.mask, done.drawn.tokens, done.drawn.mask)),
                sampling=Sampling(config.evaluation.temperature, config.evaluation.top_k, config.evaluation.top_p),
                chunk=config.model.logprob_chunk,
            )
            batch = done.collected.batch
            kept = len(batch.rewards)
            divergence += float((batch.behaviour_logprobs - on_host(initial)[:kept])[batch.completion_mask].sum())
            tokens += int(batch.completion_mask.sum())
        samples += sample_rows(done)
    warn_of_ungraded(sample["ungraded"] for sample in samples)
    rewards = np.array([sample["reward"] for sample in samples])
    accuracy = float(np.mean([sample["accurate"] for sample in samples]))
    initial_kl = None if initial_params is None else divergence / tokens
    return Evaluation(accuracy, float(rewards.mean()), initial_kl, samples)


def write_samples(path: Path, evaluation: Evaluation) -> None:
    """One JSON line a completion."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(sample) + "\n" for sample in evaluation.samples), encoding="utf-8")
