"""Writes for people: a row of metrics for each step, kept completions, samples, figures and the summary."""

from collections import Counter
from pathlib import Path
from typing import Any

from recjax.experience.layout import padding_waste
from recjax.experience.queue import counts
from recjax.logs import kept_samples
from recjax.logs.metrics import MetricsWriter, batch_metrics, peak_memory_bytes, read_metrics, task_metrics
from recjax.logs.signs import steps_of_signs
from recjax.logs.tracking import Trackers
from recjax.plots.training import draw_experience, draw_training
from recjax.runtime import hosts
from recjax.runtime.files import json_text, write_whole, writing
from recjax.sources.setup import Setup
from recjax.training.evaluation import Evaluation, write_samples
from recjax.training.run import Source, State, Update


class RunLog:
    """Logs the steps and evaluations of a run. The row of a step is written one step later, see `MetricsWriter`."""

    def __init__(self, setup: Setup, source: Source, metrics: MetricsWriter, trackers: Trackers):
        """Takes an open writer of metrics.jsonl and open trackers."""
        self._setup = setup
        self._source = source
        self._metrics = metrics
        self._trackers = trackers
        self._output = Path(setup.config.output)
        self._idle_seconds = 0.0  # of the devices, in the rows so far

    def begin(self, state: State, measured: dict[str, float]) -> None:
        """Writes the row of step 0.

        Args:
            measured: metrics of the policy before the first step.
        """
        unusable = self._setup.stored.left_out if self._setup.stored else {}
        left_out = {f"experience/left_out/{reason}": count for reason, count in unusable.items()}
        self._metrics.write({"step": 0, **measured, **state.totals["warm_start"], **left_out})

    def row(self, update: Update, state: State) -> dict[str, Any]:
        """The row of a step, with numbers that the device may still compute; keeps completions if `samples` says so.

        Args:
            state: the state after the step.
        """
        config = self._setup.config
        if kept := kept_samples.keep(self._setup, update):
            self._trackers.log_samples("completions", kept_samples.summaries(kept), update.step)
        # With `truncated: mask`, `seen` would drop completions whose accuracy counts all the same.
        judged = update.groups if config.task.truncated == "mask" else map(self._setup.judge.seen, update.groups)
        graded = (
            (completion.metadata, completion.known_grade.accurate, completion.known_grade.reward)
            for group in judged
            for completion in group.completions
            if completion.rows
        )
        idle_seconds = self._setup.phases.device.idle_seconds - self._idle_seconds
        self._idle_seconds += idle_seconds
        filled = len(update.batch.prompts) - self._setup.shape.prompts  # rows that only fill the micro-batches
        return {
            "step": update.step,
            **batch_metrics(update.step, update.batch, update.learned_from, config.rollout.sampling().has_cuts),
            **task_metrics(graded),
            **queue_metrics(self._setup, self._source, update, state),
            "padding_waste": padding_waste(update.learned_from, update.layout, filled=filled),
            "device_idle_seconds": idle_seconds,
            **update.metrics,
        }

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Waits for the numbers of a row; see `MetricsWriter.read`."""
        return self._metrics.read(row)

    def evaluation(self, evaluation: Evaluation, step: int, name: str) -> dict[str, float]:
        """The metrics of an evaluation after a step; saves its completions in samples/`name`.jsonl."""
        if hosts.is_first():
            write_samples(self._output / "samples" / f"{name}.jsonl", evaluation, step)
            self._trackers.log_samples("samples", evaluation.samples, step)
        measured = {key: getattr(evaluation, key) for key in ("accuracy", "right_and_ended", "reward", "initial_kl")}
        measured |= task_metrics((row, row["accurate"], row["reward"]) for row in evaluation.samples)
        return {f"evaluation/{key}": value for key, value in measured.items() if value is not None}

    def hold(self, row: dict[str, Any], state: State) -> None:
        """Takes the finished row of a step, to write it when its numbers are there."""
        phases = self._setup.phases
        # If the row is not read yet, these include the dispatch of its own update and all earlier updates.
        row["tokens_per_second"] = state.totals["tokens"] / phases.loop_seconds
        row["wall_seconds"] = phases.wall_seconds
        self._metrics.hold(row)

    def settle(self) -> None:
        """Writes the row of the latest step, if it is not written yet."""
        self._metrics.settle()

    def finish(self) -> None:
        """Draws the figures, writes summary.json, and gives trackers the figures."""
        config = self._setup.config
        rows = read_metrics(self._output / "metrics.jsonl")
        title = f"{config.algorithm.preset}: {self._output.name}"
        figures = self._output / "figures"
        with writing(figures):
            draw_training(rows, title, figures / "training.png", steps_of_signs(rows))
            if config.experience or config.regime.mode == "async":
                draw_experience(rows, title, figures / "experience.png")
        # A row is missing if metrics.jsonl was damaged before the run resumed.
        by_step = {row["step"]: row for row in rows}
        before = by_step.get(0, {})
        after = by_step.get(config.training.steps, {})
        summary = {
            "accuracy_before": before.get("evaluation/accuracy"),
            "accuracy_after": after.get("evaluation/accuracy"),
            "reward_before": before.get("evaluation/reward"),
            "reward_after": after.get("evaluation/reward"),
            "steps": config.training.steps,
            "wall_seconds": self._setup.phases.wall_seconds,
            "tokens_per_second": after.get("tokens_per_second"),
            "peak_memory_bytes": peak_memory_bytes(),
            "seconds": dict(self._setup.phases.totals),
        }
        write_whole(self._output / "summary.json", json_text(summary, indent=2) + "\n")
        drawn = {f"figures/{path.stem}": path for path in sorted(figures.glob("*.png"))}
        self._trackers.log_figures(drawn, config.training.steps)


def queue_metrics(setup: Setup, source: Source, update: Update, state: State) -> dict[str, Any]:
    """Metrics of a step's groups, the queue and the source; none after the first update of a batch."""
    before = update.queue_before
    if before is None:
        return {}
    config = setup.config
    queue = state.queue
    logged: dict[str, Any] = {
        f"{family}/{reason}": queue.counts[f"ungraded/{reason}"] - before.counts[f"ungraded/{reason}"]
        for family, reasons in setup.failures.items()
        for reason in reasons
    }
    if config.experience or config.regime.mode == "async":
        rows = (completion.source for group in update.groups for completion in group.completions)
        logged["source_rows"] = dict(Counter(rows))
        logged |= counts(queue) if config.follows or not (config.experience and config.experience.store) else {}
    return logged | source.metrics(queue, update.groups, update.step)
