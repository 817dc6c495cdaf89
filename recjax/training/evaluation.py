"""Sampled accuracy on held-out problems."""

import json
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from recjax.config import Config
from recjax.experience.collect import draw, scored
from recjax.models.logprobs import Sampling
from recjax.models.policy import Policy
from recjax.rollout.prompts import Prompts
from recjax.tasks.problems import RewardFunction


class Evaluation(NamedTuple):
    """Share of accurate completions, their mean reward, and one row a completion."""

    accuracy: float
    reward: float
    samples: list[dict]


def evaluate(
    config: Config, policy: Policy, params: dict, prompts: Prompts, reward: RewardFunction, step: int
) -> Evaluation:
    """Draws `evaluation.samples` completions of every prompt, in rounds of `rollout.prompts_per_step` prompts."""
    settings, size = config.evaluation, config.rollout.prompts_per_step
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 2), step)
    samples = []
    for start in range(0, len(prompts.texts), size):
        # The last round is filled up with repeats, so that one compiled program serves all; they are not counted.
        places = np.arange(start, start + size)
        kept = settings.samples * int((places < len(prompts.texts)).sum())
        asked = prompts.take(places % len(prompts.texts))
        drawn = draw(
            policy,
            params,
            asked,
            jax.random.fold_in(key, start),
            settings.samples,
            config.rollout.max_completion_tokens,
            Sampling(settings.temperature, settings.top_k, settings.top_p),
        )
        collected = scored(policy, asked, drawn, reward, policy_version=step)
        for row, text in enumerate(collected.texts[:kept]):
            problem = row // settings.samples
            samples.append(
                {
                    "prompt": asked.texts[problem],
                    "completion": text,
                    "answer": asked.answers[problem],
                    "reward": float(collected.batch.rewards[row]),
                    "truncated": bool(collected.batch.truncated[row]),
                }
            )
    rewards = np.array([sample["reward"] for sample in samples])
    return Evaluation(float((rewards >= config.task.success).mean()), float(rewards.mean()), samples)


def write_samples(path: Path, evaluation: Evaluation) -> None:
    """One JSON line a completion."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(sample) + "\n" for sample in evaluation.samples), encoding="utf-8")
