"""What the loop checks between sampling and update: the reasons for missing groups, and the staleness of a batch."""

from collections import Counter

import numpy as np

from recjax.algorithms.diagnostics import staleness
from recjax.config.fields import value_of
from recjax.errors import UserError
from recjax.experience.batch import Batch
from recjax.experience.queue import LEFT, LOST, Queue
from recjax.training import schedule
from recjax.training.run import Run

# Remedies, by the first part of a metric that counts removed groups.
_REMEDIES = {
    "grading/": "let the reward function return numbers, or leave out problems that it cannot grade",
    "agent/": "correct the agent, or set task.agent_failure_reward",
    "experience/left_out/no_signal": "choose problems whose completions differ in reward",
}
# Settings that remove groups, or that make the run wait for more of them.
_LIMITS = ("experience.replay", "experience.refill", "experience.late.deadline")
_LIMITS += ("regime.max_staleness", "regime.max_mean_staleness")


def too_few_groups(run: Run, step: int, removed: Counter[str]) -> UserError:
    """The error for a step that found too few groups, with the reasons by their metrics and the remedies that apply.

    Args:
        removed: the queue's counts since the last step.
    """
    metric_names = {reason: f"experience/left_out/{reason}" for reason in (*LOST, *LEFT)}
    for family, kinds in run.failures.items():
        for kind in kinds:
            metric_names[f"ungraded/{kind}"] = f"{family}/{kind}"
    counted = {metric: removed[reason] for reason, metric in metric_names.items() if removed[reason]}
    remedies = []
    for prefix, remedy in _REMEDIES.items():
        if any(metric.startswith(prefix) for metric in counted):
            remedies.append(remedy)
    remedies += [f"relax {name}" for name in _LIMITS if value_of(run.config, name) is not None]
    reasons = ", ".join(f"{metric} {count}" for metric, count in counted.items())
    return UserError(
        f"step {step}",
        f"{removed['batches']} batches were sampled, but too few groups remain ({reasons})",
        "; ".join(remedies),
    )


def check_staleness(run: Run, queue: Queue, batch: Batch, step: int) -> None:
    """Checks that a synchronous run trains on a batch of the staleness that its regime promises.

    Raises:
        AssertionError: the staleness differs.
    """
    if run.config.experience is not None or run.config.regime.mode != "sync":
        return
    # A group of the next batch replaces a group without any reward, and the run trains on the rest of that batch later.
    if queue.counts["groups_without_reward"] > 0:
        return
    measured = staleness(step, batch.policy_version[batch.completion_mask.any(-1)])
    sampler = step - 1 - schedule.expected_staleness(step, run.config.regime, run.config.training.updates)
    task = run.config.task
    expected = sorted({step - 1 - task.seat_version(seat, sampler) for seat in task.trained_seats})
    if not np.isin(measured, expected).all():
        raise AssertionError(f"step {step}: staleness is {np.unique(measured)}, but the regime gives {expected}")
