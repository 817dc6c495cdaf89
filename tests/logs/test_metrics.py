"""metrics.jsonl and the other JSON of a run: standard JSON, whatever the numbers are, and readers that cope with it."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.axes import Axes

from recjax.analysis.collect import read_folders
from recjax.logs.metrics import MetricsWriter, read_metrics
from recjax.logs.warnings import warning_steps
from recjax.plots.style import finish
from recjax.plots.training import draw_experience, draw_training
from recjax.samples import sample_page
from recjax.training.evaluation import Evaluation, write_samples

NAN, INF = math.nan, math.inf
ROWS = [
    {"step": 0, "evaluation/accuracy": 0.5, "evaluation/reward": NAN},
    {"step": 1, "loss": 0.1, "reward": NAN, "accuracy": INF, "ratio/q01": -INF, "ratio/q50": NAN, "entropy": 1.0},
    {"step": 2, "loss": 0.1, "reward": 0.5, "accuracy": 0.5, "evaluation/accuracy": NAN},
]
for row in ROWS[1:]:
    row |= {"staleness_rows": {"0": 4}, "source_rows": {"policy": 4}}


def strictly(text: str):
    """The value of a JSON text in which NaN and Infinity are errors, as other programs read it."""

    def refuse(constant):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def written(folder: Path) -> Path:
    with MetricsWriter(folder, -1) as log:
        for row in ROWS:
            log.write(row)
    return folder / "metrics.jsonl"


def finite(row: dict) -> dict:
    return {name: value for name, value in row.items() if isinstance(value, dict) or math.isfinite(value)}


def test_numbers_that_are_not_finite_become_null(tmp_path):
    path = written(tmp_path)
    rows = [strictly(line) for line in path.read_text().splitlines()]
    assert rows[1]["reward"] is rows[1]["accuracy"] is rows[1]["ratio/q01"] is None and rows[1]["entropy"] == 1.0
    assert read_metrics(path) == [finite(row) for row in ROWS]
    assert pd.read_json(path, lines=True)["reward"].isna().tolist() == [True, True, False]


@pytest.mark.slow
def test_figures_and_tables_are_made_of_rows_with_gaps(tmp_path):
    rows = read_metrics(written(tmp_path))
    draw_training(rows, "run $x$ $\\bad$ [/x]", tmp_path / "training.png")
    draw_experience(rows, "run", tmp_path / "experience.png")
    table = read_folders([tmp_path])
    assert table["reward"].dropna().tolist() == [0.5] and table["evaluation/accuracy"].dropna().tolist() == [0.5]


ON_POLICY = {"loss": 0.1, "accuracy": 0.5, "entropy": 1.0, "staleness": 0.0, "behavior_kl/k3": 4e-10}
ON_POLICY |= {"ratio/q01": 0.99998, "ratio/q50": 1.0, "ratio/q99": 1.00002, "effective_sample_size": 1.0}
ON_POLICY |= {"clip_fraction/negative": 0.0, "clip_fraction/positive": 0.0, "staleness_rows": {"0": 4}}
FAR = {"ratio/q01": 0.1, "ratio/q99": 3.0, "effective_sample_size": 0.2, "staleness": 9.0, "behavior_kl/k3": 0.5}


def drawn(monkeypatch, draw, changes: list[dict], path: Path, *signs) -> dict[str, Axes]:
    """The panels of a picture of on-policy steps with changes, by the first line of their y labels."""
    figures = []
    monkeypatch.setattr("recjax.plots.training.save_figure", lambda figure, path: figures.append(finish(figure)))
    rows = [{"step": 0}, *({"step": step} | ON_POLICY | change for step, change in enumerate(changes, 1))]
    draw(rows, "run", path, *signs)
    (figure,) = figures
    figure.canvas.draw()
    panels = {axes.get_ylabel().split("\n")[0]: axes for axes in figure.axes}
    return panels | {"title": figure.get_suptitle(), "note": figure.get_supxlabel()}


def test_staleness_is_drawn_as_it_is(monkeypatch, tmp_path):
    ages = [float(step % 20) for step in range(240)]
    panels = drawn(monkeypatch, draw_training, [FAR | {"staleness": age} for age in ages], tmp_path)
    (line,) = panels["staleness"].get_lines()
    assert list(line.get_ydata()) == ages
    assert "entropy of π: mean over 4 steps" in panels["note"]


def test_nearly_constant_values_are_below_the_frame(monkeypatch, tmp_path):
    panels = drawn(monkeypatch, draw_training, [{"entropy": 1.0}, {"entropy": 1.001}], tmp_path)
    low, high = panels["entropy of π"].get_ylim()
    assert low == 0 and high >= 1.03


def test_panels_without_content_are_left_out_and_named(monkeypatch, tmp_path):
    panels = drawn(monkeypatch, draw_training, [{"reward": 0.5}, {"reward": 0.75}], tmp_path)
    assert [*panels] == ["accuracy (share)", "reward", "ratio π/μ of tokens", "entropy of π", "title", "note"]
    note = "optimizer step\n0 in all steps: clipped tokens, staleness, KL(μ ‖ π)\n1 in all steps: effective sample size"
    assert panels["note"] == note
    ratio = panels["ratio π/μ of tokens"]
    assert ratio.texts[0].get_text().endswith("0.999980 to 1.000020") and not ratio.collections[1:]
    assert ratio.get_ylim() == (0.9, 1.1)
    panels = drawn(monkeypatch, draw_training, [FAR | {"reward": 0.5, "entropy": NAN}] * 3, tmp_path)
    shown = ["accuracy = reward", "ratio π/μ of tokens", "effective sample size", "staleness", "KL(μ ‖ π)"]
    assert [*panels] == [*shown, "title", "note"] and "unknown: entropy of π" in panels["note"]


@pytest.mark.parametrize(
    ("changes", "shown", "note"),
    [
        ({}, ["rows of the batch"], ["unknown: ", "staleness in all steps: 0"]),
        ({"source_rows": {"store": 4}}, [], ["source of all rows: store"]),
        ({"staleness_rows": {"0": 2, "3": 2}}, ["rows with a known", "rows of the batch"], ["unknown: "]),
        (FAR | {"ratio/q50": 1.0}, ["ratio π/μ of tokens", "effective sample size"], ["unknown: groups left out"]),
        ({"experience/left_out/stale": 3, "experience/left_out/no_signal_tokens": 90}, ["groups left out"], []),
        ({"experience/left_out/rewards_too_late": 3}, ["rows left out"], ["unknown: groups left out"]),
        ({"experience/left_out/stale": 0, "experience/left_out/capacity": 0}, [], ["0 in all steps: groups left out"]),
    ],
)
def test_the_picture_of_experience_has_only_panels_with_content(monkeypatch, tmp_path, changes, shown, note):
    unknown = dict.fromkeys(["ratio/q01", "ratio/q50", "ratio/q99", "effective_sample_size"], NAN)
    two = {"store": 1, "policy": 3}
    panels = drawn(monkeypatch, draw_experience, [{"source_rows": two} | unknown | changes] * 3, tmp_path)
    missing = [name for name in shown if name not in panels]
    assert not missing and not [words for words in note if words not in panels["note"]]
    assert ("rows of the batch" in panels) == ("source_rows" not in changes)
    if "groups left out" in shown:  # tokens are no groups
        assert [line.get_label() for line in panels["groups left out"].lines] == ["stale"]


def test_a_single_batch_of_two_sources_is_visible(monkeypatch, tmp_path):
    axes = drawn(monkeypatch, draw_experience, [{"source_rows": {"a": 1, "b": 3}}], tmp_path)["rows of the batch"]
    first, second = (area.get_paths()[0].get_extents() for area in axes.collections)
    assert [first.x0, first.x1, first.y1, second.y1] == [0.5, 1.5, 0.25, 1.0]


def test_the_picture_says_where_a_run_collapses(monkeypatch, tmp_path):
    changes = [{"effective_sample_size": size, "reward": 0.1 * size} for size in (0.9, *[0.1] * 9)]
    rows = [{"step": step} | ON_POLICY | change for step, change in enumerate(changes, 1)]
    signs = warning_steps(rows)
    assert signs == {"effective sample size below 0.2": 6} and warning_steps(rows[:5]) == {}
    panels = drawn(monkeypatch, draw_training, changes, tmp_path, signs)
    assert panels["title"] == "run\nfrom step 6 (dotted line): effective sample size below 0.2"
    for axes in (panels["reward"], panels["entropy of π"]):
        (mark,) = (line for line in axes.lines if line.get_linestyle() == ":")
        assert [*mark.get_xdata()] == [6, 6]


@pytest.mark.parametrize("rewards", [[-7.0, 2.75, 0.5], [1e9, 3e9, 2e9], [0.0, 0.0, 0.0], [-3.0]])
def test_a_runs_figure_shows_rewards_beside_its_legend(monkeypatch, tmp_path, rewards):
    changes = [{"reward": reward, "evaluation/reward": reward} for reward in rewards]
    axes = drawn(monkeypatch, draw_training, changes, tmp_path)["reward"]
    low, high = axes.get_ylim()
    assert low <= min(rewards) <= max(rewards) <= high
    assert [line.get_ydata().tolist() for line in axes.lines] == [rewards, rewards]
    assert axes.get_legend().get_window_extent().y0 >= axes.bbox.y1 - 1
    assert len(rewards) > 1 or axes.lines[0].get_marker() == "o"  # a single step is visible too


def test_samples_and_their_page_are_standard_json(tmp_path):
    samples = [{"reward": NAN, "parts": {"length": INF}, "question": "q", "completion": "c", "answer": "a"}]
    write_samples(tmp_path / "samples" / "after.jsonl", Evaluation(0.0, NAN, None, samples), 3)
    kept = strictly((tmp_path / "samples" / "after.jsonl").read_text())
    assert kept["reward"] is kept["parts"]["length"] is None and kept["step"] == 3
    page = sample_page([{"name": "run", "about": "about", "rows": [{"advantage": [NAN, 1.0]}]}])
    assert '"advantage": [null, 1.0]' in page
