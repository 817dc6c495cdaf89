"""Metrics of a run: metrics.jsonl, trackers and the progress bar."""

import contextlib
import json
import logging
import math
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import xxhash
from tqdm import tqdm

from recjax.algorithms.diagnostics import staleness
from recjax.errors import UserError
from recjax.experience.batch import FOREIGN, Batch
from recjax.experience.recorded import has_sets
from recjax.logs.tracking import Trackers
from recjax.runtime import console, hosts
from recjax.runtime.clocks import PhaseSeconds
from recjax.runtime.files import digest, json_text, write_whole, writing

Written = list  # size in bytes and checksum of a file's content

logger = logging.getLogger(__name__)


class BadStep(UserError, FloatingPointError):
    """A training step with a loss, gradient or update that is not finite, or with impossible tokens."""


class MetricsWriter(contextlib.AbstractContextManager):
    """Writes one row per step to metrics.jsonl, trackers and the progress bar; only the first process writes.

    The device may still be computing the numbers of a row. The log therefore holds the row of a step until the next
    step's update is dispatched, or until the row is needed. As a context manager it writes the held row and closes the
    file on exit, also after an exception.
    """

    def __init__(
        self,
        output: Path,
        keep_through: int,
        written: Written | None = None,
        trackers: Trackers | None = None,
        *,
        bar: tqdm | None = None,
        watch: Callable[[dict], None] | None = None,
        phases: PhaseSeconds | None = None,
        manager: ocp.CheckpointManager | None = None,
        refuses_impossible: bool = True,
        remedy: str = "Lower optimizer.learning_rate, or choose an algorithm that clips",
    ):
        """Opens the file; removes rows after `keep_through`, the step of the checkpoint that the run resumes from.

        Args:
            keep_through: last step to keep; -1 removes all rows.
            written: size and checksum of metrics.jsonl according to that checkpoint.
            watch: function that also gets the rows.
            manager: the run's checkpoints, which an error names.
            refuses_impossible: True if tokens of probability 0 are an error.
            remedy: remedy for numbers that are not finite.
        Raises:
            UserError: a line of metrics.jsonl is not a row, or the file cannot be written.
        """
        self._path = output / "metrics.jsonl"
        self._trackers = trackers
        self._bar = bar
        self._watch = watch
        self._phases = phases or PhaseSeconds()
        self._manager = manager
        self._refuses_impossible = refuses_impossible
        self._remedy = remedy
        self._held: dict[str, Any] | None = None
        self._file = None
        if hosts.is_first():
            kept = _kept(self._path, keep_through, written)
            write_whole(self._path, kept)
            self._size = len(kept)
            self._digest = xxhash.xxh3_128(kept)
            self._file = self._path.open("a", encoding="utf-8")

    def __exit__(self, *exception: object) -> None:
        """Writes the held row and closes the file."""
        try:
            self.settle()
        finally:
            if self._file is not None:
                # Writing the row has already raised this error.
                with contextlib.suppress(OSError):
                    self._file.close()

    @property
    def written(self) -> Written | None:
        """Size and checksum of the current metrics.jsonl; None in processes that do not write it."""
        if self._file is None:
            return None
        return [self._size, self._digest.hexdigest()]

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row, which has a "step"; dictionaries of counts go only to metrics.jsonl.

        metrics.jsonl has null for numbers that are not finite.
        """
        if self._file is None:
            return
        line = json_text(row) + "\n"
        with writing(self._path):
            self._file.write(line)
            self._file.flush()
        self._size += len(line.encode())
        self._digest.update(line.encode())
        if self._trackers:
            self._trackers.log(row)
        if self._watch:
            self._watch(dict(row))

    def hold(self, row: dict[str, Any]) -> None:
        """Takes the finished row of a step, which may contain device scalars; the previous row must be settled."""
        if self._held is not None:
            raise AssertionError(f"the row of step {self._held['step']} would be lost")
        self._held = row

    def settle(self) -> None:
        """Waits for the numbers of the held row, if there is one, then writes and shows the row.

        Raises:
            BadStep: see `read`; the row is not written.
        """
        if self._held is None:
            return
        # Drop the row before `read`, which may raise: the exit must not try the row again.
        row = self._held
        self._held = None
        row = self.read(row)
        self.write(row)
        if self._bar is not None:
            _show(self._bar, row)

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with device scalars converted to floats; waits for the device.

        Raises:
            BadStep: the step's loss, gradient or update is not finite, or it has tokens of probability 0 and
                they are an error.
        """
        with self._phases.phase("update"):
            # Every process holds complete scalars, so this needs no other process, which may already have failed.
            arrays = {name: value for name, value in row.items() if isinstance(value, jax.Array)}
            numbers = {name: float(value) for name, value in jax.device_get(arrays).items()}
        row = row | numbers
        bad = [name for name in ("loss", "gradient_norm", "update_norm") if not math.isfinite(row[name])]
        remedy = self._remedy
        if not bad and self._refuses_impossible:
            bad = [name for name in row if name.startswith("impossible_tokens/") and row[name]]
            remedy = (
                "It counts tokens whose log-probability under that policy is −inf: its logits are −inf there, or the"
                " log-probabilities come from another vocabulary, or other values of rollout.top_k, top_p or min_p;"
                " training.impossible_tokens=drop drops and counts such tokens"
            )
        if bad:
            assert self._manager is not None
            good = self._manager.latest_step()
            folder = self._manager.directory
            values = ", ".join(f"{name} = {row[name]:g}" for name in bad)
            raise BadStep(
                f"step {row['step']}",
                f"{values}. The run discards this step",
                f"its last good checkpoint is of step {good} in {folder}. {remedy}",
            )
        return row


def _show(bar: tqdm, row: dict[str, Any]) -> None:
    shown = {}
    if "reward" in row:
        shown["reward"] = f"{row['reward']:.2f}"
        if row.get("accuracy", row["reward"]) != row["reward"]:
            shown["accuracy"] = f"{row['accuracy']:.2f}"
        shown["tok/s"] = f"{row['tokens_per_second']:.0f}"
    else:
        shown["loss"] = f"{row['loss']:.3f}"
    if "staleness" in row:
        shown["stale"] = f"{row['staleness']:.0f}"
    if "ratio/q01" in row:
        shown["ratio"] = f"{row['ratio/q01']:.2f}–{row['ratio/q99']:.2f}"
        shown["clip"] = f"{row['clip_fraction/all']:.2f}"
    measure = "reward"
    if "evaluation/accuracy" in row:
        measure = "accuracy"
    held_out = row.get(f"evaluation/{measure}")
    if held_out is not None and hosts.is_first():
        bar.write(f"step {row['step']}: held-out {measure} {held_out:.3f}")
    bar.set_postfix(shown, refresh=False)
    bar.update()


def _kept(path: Path, keep_through: int, written: Written | None) -> bytes:
    """The content of metrics.jsonl that a resumed run keeps."""
    if keep_through < 0:
        return b""
    content = path.read_bytes() if path.exists() else b""
    if written and digest(content[: written[0]]) == written[1]:
        return content[: written[0]]
    rows = [row for row in read_metrics(path) if row["step"] <= keep_through]
    if written:
        logger.warning(
            "%s: the rows up to step %d differ from the rows that the run wrote. Training does not read them and"
            " continues; figures and summary use the rows that remain",
            path,
            keep_through,
        )
    return "".join(json_text(row) + "\n" for row in rows).encode()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl file, without numbers that are not finite (null in the file).

    An incomplete last line does not count: its write is not finished, or a kill cut it short.

    Raises:
        UserError: another line is not a row.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    return [_row(line, f"{path}: line {number}") for number, line in enumerate(lines[:-1], 1)]


def _row(line: bytes, location: str) -> dict[str, Any]:
    reason = None
    row: Any = None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = str(error)
    else:
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            reason = "its step is not a whole number"
    if reason:
        raise UserError(
            location,
            f"is not a row of metrics ({reason}): {line[:60]!r}",
            "restore the file from a copy, or remove the line; a run resumes without it",
        )
    return {name: value for name, value in row.items() if value is not None}


def batch_metrics(step: int, batch: Batch, learned: Batch, has_cuts: bool = False) -> dict[str, Any]:
    """Metrics of the completions in a batch; padding rows, which have no tokens, do not count.

    Args:
        step: training step of the batch, from 1.
        batch: the sampled batch, unchanged.
        learned: batch as the update gets it; its rewards give the mean reward.
        has_cuts: True to count tokens whose set of possible tokens was not recorded, see `rollout.kept_ids`.
    Returns:
        Means over rows; the mean of a reward part covers the rows that have it. `accuracy` is missing if a row has no
        verdict. `frac_reward_zero_std`, TRL's name, is the share of groups with equal rewards, and is missing without
        groups of several completions. `staleness` covers rows with a policy version and is missing without such rows;
        `staleness_rows` counts rows by staleness.
    """
    completions = batch.completion_mask.any(-1)
    if batch.trajectories is not None:  # a trajectory counts once, at its first row
        first_rows = np.unique(batch.trajectories, return_index=True)[1]
        completions = completions & np.isin(np.arange(len(completions)), first_rows)
    metrics: dict[str, Any] = {"reward": float(learned.rewards[completions].mean())}
    for name, values in batch.reward_parts.items():
        metrics[f"reward/{name}"] = float(np.nanmean(values[completions]))
    has_equal_rewards = _groups_with_equal_rewards(learned, completions & learned.completion_mask.any(-1))
    if has_equal_rewards.size:
        metrics["frac_reward_zero_std"] = float(np.mean(has_equal_rewards))
    if not np.isnan(batch.accurate[completions]).any():
        ended = ~batch.truncated
        metrics["accuracy"] = float(batch.accurate[completions].mean(dtype=float))
        metrics["right_and_ended"] = float((batch.accurate * ended)[completions].mean(dtype=float))
    metrics["completion_length"] = float(batch.completion_mask.sum() / completions.sum())
    metrics["truncated"] = float(batch.truncated[completions].mean())
    versions = batch.policy_version[completions & (batch.policy_version != FOREIGN)]
    ages = staleness(step, versions)
    if len(versions):
        metrics["staleness"] = float(ages.mean())
    if has_cuts:
        recorded = has_sets(batch.recorded, batch.completion_mask).sum()
        metrics["tokens_without_set"] = float(1 - recorded / batch.completion_mask.sum())
    values, counts = np.unique(ages, return_counts=True)
    metrics["staleness_rows"] = {str(age): int(count) for age, count in zip(values, counts, strict=True)}
    return metrics


def _groups_with_equal_rewards(batch: Batch, completions: np.ndarray) -> np.ndarray:
    """A flag for each group of several completions: True if their rewards are equal."""
    groups, group_index, sizes = np.unique(batch.group_ids[completions], return_inverse=True, return_counts=True)
    lowest = np.full(len(groups), np.inf)
    highest = np.full(len(groups), -np.inf)
    np.minimum.at(lowest, group_index, batch.rewards[completions])
    np.maximum.at(highest, group_index, batch.rewards[completions])
    return (lowest == highest)[sizes > 1]


def task_metrics(rows: Iterable[tuple[Mapping[str, Any], bool | None, float | None]]) -> dict[str, float]:
    """The mean accuracy and reward of each task in a mixture, and of each agent seat.

    A task or seat has no accuracy if one of its completions has no verdict, and no reward if none of its completions
    has a reward.

    Args:
        rows: of each completion, a mapping with its `task` and `seat`, if it has them; its accuracy, or None; and its
            reward, or None.
    """
    accuracies: dict[str, list] = defaultdict(list)
    rewards: dict[str, list] = defaultdict(list)
    for names, accurate, reward in rows:
        labels = []
        if names.get("task"):
            labels.append(str(names["task"]))
        if "seat" in names:
            labels.append(f"seat/{names['seat']}")
        for label in labels:
            accuracies[label].append(accurate)
            rewards[label].append(reward)
    metrics = {}
    for label in sorted(accuracies):
        values = np.array(accuracies[label], float)
        if not np.isnan(values).any():
            metrics[f"accuracy/{label}"] = float(values.mean())
    for label in sorted(rewards):
        values = np.array(rewards[label], float)
        graded = values[~np.isnan(values)]
        if len(graded):
            metrics[f"reward/{label}"] = float(graded.mean())
    return metrics


def step_bar(description: str, total: int, initial: int = 0) -> tqdm:
    """A progress bar of steps, shown only by the first process."""
    return console.progress_bar(description, total, initial, unit="step", shown=hosts.is_first())


def peak_memory_bytes() -> int:
    """Peak memory so far: the accelerator's if it reports that, otherwise this process's resident set."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        return statistics["peak_bytes_in_use"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
