"""Writes for people: a row of metrics for each step, kept completions, samples, figures and the summary."""

from collections import Counter
from pathlib import Path
from typing import Any

from recjax.experience.layout import padding_waste
from recjax.experience.queue import counts
from recjax.logs import kept_samples
from recjax.logs.metrics import MetricsWriter, batch_metrics, peak_memory_bytes, read_metrics, task_metrics
from recjax.logs.tracking import Trackers
from recjax.logs.warnings import warning_steps
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
        self._idle_seconds = 0.0  # the rows so far contain so many idle seconds of the devices

    def begin(self, state: State, measured: dict[str, float]) -> None:
        """Writes the row of step 0.

        Args:
            measured: metrics of the policy before the first step.
        """
        row = {"step": 0} | measured | state.totals["warm_start"]
        if self._setup.stored:
            for reason, count in self._setup.stored.left_out.items():
                row[f"experience/left_out/{reason}"] = count
        self._metrics.write(row)

    def row(self, update: Update, state: State) -> dict[str, Any]:
        """The row of a step, with numbers that the device may still compute; keeps completions if `samples` says so.

        Args:
            state: the state after the step.
        """
        config = self._setup.config
        saved = kept_samples.save_samples(self._setup, update)
        if saved:
            self._trackers.log_samples("completions", kept_samples.summaries(saved), update.step)
        groups = update.groups
        if config.task.truncated != "mask":  # here, `seen` would drop completions whose accuracy counts all the same
            groups = [self._setup.judge.seen(group) for group in groups]
        grades = []
        for group in groups:
            for completion in group.completions:
                if completion.rows:
                    grade = completion.known_grade
                    grades.append((completion.metadata, grade.accurate, grade.reward))
        idle_seconds = self._setup.phases.device.idle_seconds - self._idle_seconds
        self._idle_seconds += idle_seconds
        row: dict[str, Any] = {"step": update.step}
        row |= batch_metrics(update.step, update.batch, update.learned_from, config.rollout.sampling().has_cuts)
        row |= task_metrics(grades)
        row |= queue_metrics(self._setup, self._source, update, state)
        # The other prompts only fill the micro-batches.
        filled = len(update.batch.prompts) - self._setup.shape.prompts
        row["padding_waste"] = padding_waste(update.learned_from, update.layout, filled=filled)
        row["device_idle_seconds"] = idle_seconds
        return row | update.metrics

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Waits for the numbers of a row; see `MetricsWriter.read`."""
        return self._metrics.read(row)

    def evaluation(self, evaluation: Evaluation, step: int, name: str) -> dict[str, float]:
        """The metrics of an evaluation after a step; saves its completions in samples/`name`.jsonl."""
        if hosts.is_first():
            write_samples(self._output / "samples" / f"{name}.jsonl", evaluation, step)
            self._trackers.log_samples("samples", evaluation.samples, step)
        measured = {
            "evaluation/accuracy": evaluation.accuracy,
            "evaluation/right_and_ended": evaluation.right_and_ended,
            "evaluation/reward": evaluation.reward,
            "evaluation/initial_kl": evaluation.initial_kl,
        }
        by_task = task_metrics((row, row["accurate"], row["reward"]) for row in evaluation.samples)
        for name, value in by_task.items():
            measured[f"evaluation/{name}"] = value
        return {name: value for name, value in measured.items() if value is not None}

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

    def draw(self) -> list[dict[str, Any]]:
        """Draws the figures of the steps so far; returns the rows of metrics.jsonl."""
        config = self._setup.config
        rows = read_metrics(self._output / "metrics.jsonl")
        title = f"{config.algorithm.preset}: {self._output.name}"
        figures = self._output / "figures"
        with writing(figures):
            draw_training(rows, title, figures / "training.png", warning_steps(rows))
            if config.experience or config.regime.mode == "async":
                draw_experience(rows, title, figures / "experience.png")
        return rows

    def finish(self) -> None:
        """Draws the figures, writes summary.json, and gives trackers the figures."""
        config = self._setup.config
        rows = self.draw()
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
        drawn = {f"figures/{path.stem}": path for path in sorted((self._output / "figures").glob("*.png"))}
        self._trackers.log_figures(drawn, config.training.steps)


def queue_metrics(setup: Setup, source: Source, update: Update, state: State) -> dict[str, Any]:
    """Metrics of a step's groups, the queue and the source; none after a batch's first update."""
    before = update.queue_before
    if before is None:
        return {}
    config = setup.config
    queue = state.queue
    metrics: dict[str, Any] = {}
    for family, reasons in setup.failures.items():
        for reason in reasons:
            name = f"ungraded/{reason}"
            metrics[f"{family}/{reason}"] = queue.counts[name] - before.counts[name]
    if config.experience or config.regime.mode == "async":
        sources = Counter(completion.source for group in update.groups for completion in group.completions)
        metrics["source_rows"] = dict(sources)
        trains_on_a_fixed_store = config.experience and config.experience.store and not config.follows
        if not trains_on_a_fixed_store:
            metrics |= counts(queue)
    return metrics | source.metrics(queue, update.groups, update.step)
