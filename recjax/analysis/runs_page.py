"""The page of a folder of runs: their table, curves, verdicts, and each run's warnings and completions."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from recjax.analysis.collect import metrics_of
from recjax.analysis.compare import compare_folders
from recjax.analysis.runs_table import differing_settings, name_below, settings_in_words
from recjax.analysis.statistics import LEVEL, MIN_SEEDS, SEED, band, holm, sign_flip_p
from recjax.config import MAY_CHANGE
from recjax.errors import UserError
from recjax.plots.curves import draw_curves
from recjax.plots.page import inlined, page, png
from recjax.runs.overview import NONE, Overview, count_words
from recjax.runs.report import number_text, report_values
from recjax.runtime.console import progress_bar

CURVES = (
    "evaluation/accuracy",
    "reward",
    "evaluation/reward",
    "evaluation/initial_kl",
    "entropy",
    "effective_sample_size",
)
MOST_LINES = 14  # more lines in one panel cannot be told apart
_LONGEST_LABEL = 70


class CurveLine(NamedTuple):
    """Runs with equal settings apart from the seed: a line of the curves, and a side of the verdicts."""

    label: str
    runs: list[Overview]


def runs_page(folder: Path, runs: Sequence[Overview], problems: Sequence[str]) -> str:
    """The page as HTML, one file without links to others.

    Args:
        problems: lines about folders that could not be read.
    """
    keys = differing_settings(runs)
    lines = lines_of(runs, folder)
    drawn = lines[:MOST_LINES]
    states = [run.state for run in runs]
    counts = [f"{states.count(state)} {state}" for state in ("finished", "running", "stopped") if state in states]
    figures = []
    figure = _curves(drawn, folder)
    if figure:
        figures.append(inlined(png(figure)))
    return page(
        "runs.html",
        name=folder.resolve().name,
        about=f"{count_words(runs)}: {', '.join(counts)}",
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        problems=problems,
        rows=[_row(run, folder, keys) for run in runs],
        figures=figures,
        figure_note=_figure_note(lines),
        verdicts=verdicts(lines),
        runs=[report_values(run) | {"name": name_below(run, folder)} for run in runs],
    )


def _row(run: Overview, folder: Path, keys: Sequence[str]) -> dict[str, Any]:
    """The cells of a run in the page's table."""
    return {
        "name": name_below(run, folder),
        "settings": settings_in_words(run, keys),
        "steps": steps_text(run),
        "state": run.state,
        "reward": number_text(run.last("reward")),
        "held_out": held_out_text(run),
        "hours": number_text(run.hours, 2),
        "base": run.base or NONE,
    }


def steps_text(run: Overview) -> str:
    """Steps done and planned: "20/40"."""
    return f"{run.steps}/{run.planned_steps or NONE}"


def held_out_text(run: Overview) -> str:
    """The latest held-out accuracy, or reward if the run has no accuracy."""
    accuracy = run.last("evaluation/accuracy")
    if accuracy is not None:
        return number_text(accuracy)
    reward = run.last("evaluation/reward")
    if reward is not None:
        return f"reward {number_text(reward)}"
    return NONE


def lines_of(runs: Sequence[Overview], folder: Path) -> list[CurveLine]:
    """Groups runs whose settings are equal apart from the seed and settings that change no result.

    The label of a line has the settings that differ, with the last parts of their names where these are unique;
    `algorithm.objective.name` is "objective".
    """
    keys = [key for key in differing_settings(runs) if key == "training.steps" or key not in (SEED, *MAY_CHANGE)]
    last_parts = [key.removesuffix(".name").rpartition(".")[2] for key in keys]
    groups: dict[tuple[str, ...], list[Overview]] = {}
    for run in runs:
        groups.setdefault(tuple(run.setting_text(key) for key in keys), []).append(run)
    lines = []
    labels = set()
    for members in groups.values():
        words = []
        for key, last_part in zip(keys, last_parts, strict=True):
            if key in members[0].settings:
                name = last_part if last_parts.count(last_part) == 1 else key
                words.append(f"{name} = {members[0].setting_text(key)}")
        label = ", ".join(words)
        if not label or len(label) > _LONGEST_LABEL:
            label = name_below(members[0], folder)
            if len(members) > 1:
                label += f" and {len(members) - 1} more"
        if label in labels:
            label = f"{label} ({len(lines) + 1})"
        labels.add(label)
        lines.append(CurveLine(label, members))
    return lines


def _curves(lines: Sequence[CurveLine], folder: Path) -> Figure | None:
    """The curves of all lines; None if no run has metrics yet."""
    sources = []
    for line in lines:
        for run in line.runs:
            if run.rows:
                sources.append(({"line": line.label, "run": name_below(run, folder)}, run.folder))
    if not sources:
        return None
    table = metrics_of(sources)
    metrics = [name for name in CURVES if name in table and table[name].notna().any()]
    if "evaluation/reward" in metrics and table["evaluation/reward"].equals(table["evaluation/accuracy"]):
        metrics.remove("evaluation/reward")  # the reward is the accuracy
    if not metrics:
        return None
    return draw_curves(table.assign(panel=""), "line", "panel", metrics, band=band)


def _figure_note(lines: Sequence[CurveLine]) -> str:
    """How to read the curves."""
    note = ""
    if any(len(line.runs) > 1 for line in lines):
        note = (
            "A line is the mean over the runs with equal settings apart from the seed; its band is their range, or from"
            f" {MIN_SEEDS} runs on Student's 95 % interval of the mean."
        )
    if len(lines) > MOST_LINES:
        note += f" Only the first {MOST_LINES} of {len(lines)} lines are drawn and compared."
    return note.strip()


def verdicts(lines: Sequence[CurveLine]) -> list[str]:
    """Sentences that compare each line with the first one, as `recjax.compare` does; empty for a single line."""
    sentences = []
    p_values = {}
    base = lines[0]
    others = lines[1:MOST_LINES]
    with progress_bar("comparing", len(others), unit="line", shown=len(others) > 5) as bar:
        for line in others:
            bar.update()
            names = (base.label, line.label)
            try:
                comparison = compare_folders(names, _folders(base), _folders(line))
            except UserError as error:
                sentences.append(f"{line.label}: not compared with {base.label}: {error}")
                continue
            sentences += comparison.sentences
            if len(comparison.differences) >= MIN_SEEDS:
                p_values[line.label] = sign_flip_p(comparison.differences)
    if len(p_values) > 1:
        adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
        shown = [label for label, p in adjusted.items() if p <= LEVEL]
        sentences.append(
            f"Corrected for {len(p_values)} comparisons (Holm), these differ from {base.label}:"
            f" {'; '.join(shown) or 'none'}."
        )
    return sentences


def _folders(line: CurveLine) -> list[Path]:
    return [run.folder for run in line.runs]
