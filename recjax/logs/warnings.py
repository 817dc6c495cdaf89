"""Warnings if a run's metrics show that it learns nothing or collapses; a command gives each warning once."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]

STEPS_WITHOUT_SIGNAL = 3
ROUNDING = 1e-12  # a mean squared advantage up to this limit is a rounding error
STEPS_OFF_POLICY = 5
# Lowest mean effective sample size over STEPS_OFF_POLICY steps without a warning. Of the 345 runs in
# experiments/{claims,objectives}/metrics.parquet, 101 fall below it: 75 of them ended less accurate than they began,
# and 3 of the other 244. The limit 0.4 would warn of 160 runs, with the same 75 among them.
LOW_SAMPLE_SIZE = 0.2


class WarningState(NamedTuple):
    """Everything that a warning depends on; a command that resumes a run starts with an empty one.

    rows: metrics of the latest steps.
    given: names of the warnings that the command has given.
    """

    rows: tuple[Row, ...] = ()
    given: frozenset[str] = frozenset()


def new_warnings(state: WarningState, row: Row) -> tuple[WarningState, list[str]]:
    """Adds a row of metrics; returns the warnings that are due. Rows of evaluations have no loss and do not count."""
    if "loss" not in row:
        return state, []
    most_rows = max(STEPS_WITHOUT_SIGNAL, STEPS_OFF_POLICY)
    rows = (*state.rows, row)[-most_rows:]
    due = {}
    for check in CHECKS:
        text = None if check.__name__ in state.given else check(rows)
        if text:
            due[check.__name__] = text
    return WarningState(rows, state.given | due.keys()), list(due.values())


def warning_steps(rows: Sequence[Row]) -> dict[str, int]:
    """The step at which a run gives each warning first, by a few words about the warning."""
    state = WarningState()
    steps = {}
    for row in rows:
        given_before = state.given
        state, _ = new_warnings(state, row)
        for check, words in CHECKS.items():
            if check.__name__ in state.given - given_before:
                steps[words] = row["step"]
    return steps


def given_warnings(rows: Sequence[Row]) -> list[str]:
    """The texts of all warnings that a run gives, each once, in the order of its steps."""
    state = WarningState()
    texts = []
    for row in rows:
        state, warnings = new_warnings(state, row)
        texts += warnings
    return texts


def all_masked(rows: Sequence[Row]) -> str | None:
    """A warning if the latest step trains on no completion."""
    row = rows[-1]
    if row.get("kept_fraction") != 0:
        return None
    if row.get("truncated") == 1:
        reason = (
            "all its completions are truncated, and task.truncated = mask removes them. Raise"
            " rollout.max_completion_tokens, and the max_tokens of an agent, or set task.truncated to train"
            " (docs/debugging.md#samples-are-cut)"
        )
    else:
        reason = _failures(row) or "algorithm.selection drops all its completions; choose another (docs/objectives.md)"
    return f"step {row['step']} trains on nothing (kept_fraction = 0): {reason}"


def no_signal(rows: Sequence[Row]) -> str | None:
    """A warning if completions of the latest steps differ in reward in no group.

    It needs advantages of 0 too, because an algorithm may compare groups with each other. A teacher needs no rewards.
    """
    rows = rows[-STEPS_WITHOUT_SIGNAL:]
    if len(rows) < STEPS_WITHOUT_SIGNAL or not all(_has_no_signal(row) for row in rows):
        return None
    row = {"accuracy": math.nan, "reward": math.nan} | rows[-1]  # metrics.jsonl has no number for NaN
    if row["accuracy"] == 0:
        reason = "the problems are too hard, or the reward function finds no answer"
    elif row["accuracy"] == 1:
        reason = "the problems are too easy"
    else:
        reason = "the policy writes one text for each prompt, or the reward does not depend on the completion"
    failures = _failures(row)
    if failures:
        reason = f"{failures}, or {reason}"
    measured = f"reward = {row['reward']:g}"
    if not math.isnan(row["accuracy"]):
        measured += f", accuracy = {row['accuracy']:g}"
    return (
        f"steps {rows[0]['step']} to {row['step']} have no signal: all completions of a group have equal rewards"
        f" (frac_reward_zero_std = 1, {measured}). The most likely reason: {reason}. Read some completions with"
        " python -m recjax.samples (docs/debugging.md#rewards-are-equal)"
    )


def _has_no_signal(row: Row) -> bool:
    return (
        row.get("frac_reward_zero_std", 1) == 1
        and row.get("advantage/mean_square", 1) <= ROUNDING
        and row.get("kept_fraction") != 0
        and "teacher_kl" not in row
        and "teacher_divergence" not in row
    )


def far_off_policy(rows: Sequence[Row]) -> str | None:
    """A warning if the mean effective sample size of the latest steps is low, also if the loss reads no ratio.

    REINFORCE reads none, and collapses. Runs without behavior log-probs have no effective sample size.
    """
    sizes = [row.get("effective_sample_size", 0) for row in rows]
    # A step without completions has a size of 0, which tells nothing.
    if len(rows) < STEPS_OFF_POLICY or 0 in sizes:
        return None
    mean = sum(sizes) / len(rows)
    if not mean < LOW_SAMPLE_SIZE:
        return None
    ages = [row.get("staleness") for row in rows]
    page = "docs/debugging.md#one-run-that-holds-one-that-collapses"
    if None in ages:
        reason = f"another policy sampled these batches ({page})"
    elif not any(ages):
        reason = "trainer and sampler disagree (docs/debugging.md#the-ratio-is-far-from-1-at-staleness-0)"
    else:
        reason = (
            f"the policy is far from the weights that sampled the batch {ages[-1]:g} optimizer steps before, and often"
            " collapses next. Sync the sampler more often, lower optimizer.learning_rate, or choose an algorithm that"
            f" clips ({page})"
        )
    return (
        f"the mean effective_sample_size of steps {rows[0]['step']} to {rows[-1]['step']} is {mean:.3g}, below"
        f" {LOW_SAMPLE_SIZE}. The most likely reason: {reason}"
    )


def _failures(row: Row) -> str:
    """Counts of failed graders and agents, in words; "" if none failed."""
    counts = [f"{name} = {row[name]}" for name in row if name.startswith(("grading/", "agent/")) and row[name]]
    if not counts:
        return ""
    return f"failures of graders or agents ({', '.join(counts)})"


# Function that returns a warning → a few words about the warning, for figures.
CHECKS = {
    all_masked: "steps that train on nothing",
    no_signal: "all rewards of each group are equal",
    far_off_policy: f"effective sample size below {LOW_SAMPLE_SIZE}",
}
