"""Sampled accuracy on held-out problems."""

import json
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from recjax.config import Config
from recjax.experience.collect import draw, scored
from recjax.models.logprobs import Sampling, completion_logprobs
from recjax.models.policy import Policy
from recjax.rollout.prompts import Prompts
from recjax.tasks.grading import Grading

_initial_logprobs = jax.jit(completion_logprobs, static_argnames=("decoder", "sampling", "chunk"))


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
    """Draws `evaluation.samples` completions of every prompt, in rounds of `rollout.prompts_per_step` prompts.

    Args:
        grading: open.
        initial_params: π_0, for the KL to it; None leaves that out.
    """
    settings, size = config.evaluation, config.rollout.prompts_per_step
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
    divergence, tokens = 0.0, 0
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
            sampling,
        )
        if initial_params is not None:
            initial, _ = _initial_logprobs(
                policy.decoder,
                initial_params,
                asked.tokens,
                asked.mask,
                drawn.tokens,
                drawn.mask,
                sampling=sampling,
                chunk=config.model.logprob_chunk,
            )
            mask = drawn.mask[:kept]
            divergence += float((drawn.logprobs - np.asarray(initial))[:kept][mask].sum())
            tokens += int(mask.sum())
        collected = scored(policy, asked, drawn, grading, policy_version=step)
        for row, text in enumerate(collected.texts[:kept]):
            problem = row // settings.samples
            samples.append(
                {
                    "prompt": asked.texts[problem],
                    "completion": text,
                    "answer": asked.answers[problem],
                    "reward": float(collected.batch.rewards[row]),
                    "accurate": bool(collected.batch.accurate[row]),
                    "truncated": bool(collected.batch.truncated[row]),
                }
            )
    rewards = np.array([sample["reward"] for sample in samples])
    accuracy = float(np.mean([sample["accurate"] for sample in samples]))
    initial_kl = None if initial_params is None else divergence / tokens
    return Evaluation(accuracy, float(rewards.mean()), initial_kl, samples)


def write_samples(path: Path, evaluation: Evaluation) -> None:
    """One JSON line a completion."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(sample) + "\n" for sample in evaluation.samples), encoding="utf-8")
