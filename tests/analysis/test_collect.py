"""From runs to a table, and from a table to curves."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import yaml

from recjax.analysis.collect import (
    COLUMNS,
    axes_of,
    check_metrics,
    collect,
    differing_starts,
    metrics_in,
    metrics_of,
    read_folders,
    read_runs,
    without_other_metrics,
)
from recjax.analysis.statistics import band
from recjax.analysis.sweeps import read_sweep
from recjax.plot import chosen_runs, titled, unfinished
from recjax.plots.curves import draw_curves
from tests.test_sweep import FILE
from tests.training.tiny_run import TINY


@pytest.fixture
def path(tmp_path):
    """A sweep file of which two runs have metrics: the reward is the step, for one run ten times as much."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({**FILE, "output": str(tmp_path / "runs")}))
    for factor, name in ((1, "grpo__0"), (10, "wide__1")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        rows = [{"step": 0, "evaluation/accuracy": 0.25}]
        for step in range(1, 13):
            rows.append({"step": step, "reward": factor * step, "unknown": 1.0})
            if step % 5 == 0:
                rows[-1]["evaluation/accuracy"] = step / 20
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_windows_are_averaged_and_evaluations_keep_their_step(path):
    table = collect(read_sweep(path)[1])
    assert axes_of(table) == ["algorithm", "seed"]
    assert {*COLUMNS, "unknown"} == {*metrics_in(table)} and "unknown" not in without_other_metrics(table)
    assert without_other_metrics(table, ["unknown"]).columns.equals(table.columns)
    first = table[table["algorithm"] == "grpo"].set_index("step")
    assert list(first.index) == [0, 5, 10, 15]
    np.testing.assert_allclose(first["reward"], [np.nan, 3.0, 8.0, 11.5])
    np.testing.assert_allclose(first["evaluation/accuracy"], [0.25, 0.25, 0.5, np.nan])
    second = table[(table["algorithm"] == "wide") & (table["seed"] == "1")].set_index("step")
    np.testing.assert_allclose(second["reward"], 10 * first["reward"])


def test_runs_with_several_initial_policies_are_named(path, caplog):
    runs = read_sweep(path)[1]
    for name, digest in (("grpo__0", "x"), ("wide__0", "y"), ("wide__1", "z")):
        folder = path.parent / "runs" / name
        folder.mkdir(exist_ok=True)
        (folder / "environment.json").write_text(json.dumps([{"weights": {"initial policy": digest}}]))
    collect(runs)
    assert "several initial policies, so that" in caplog.text and "x (grpo__0) and y (wide__0)" in caplog.text
    assert "wide__1" not in caplog.text, "another seed has another policy"


def test_a_table_says_where_its_runs_begin_apart():
    table = pd.DataFrame({"seed": ["0", "0", "1"], "step": 0, "evaluation/accuracy": [0.4492, 0.4766, 0.5]})
    assert differing_starts(table) == ["seed 0: evaluation/accuracy at step 0 = 0.4492, 0.4766"]


def test_an_evaluation_within_a_window_keeps_its_step_too(path, tmp_path):
    file = tmp_path / "runs" / "grpo__0" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[12]["evaluation/accuracy"] = 0.9
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = collect(read_sweep(path)[1])
    first = table[table["algorithm"] == "grpo"].set_index("step")
    assert list(first.index) == [0, 5, 10, 12, 15]
    np.testing.assert_allclose(first["reward"], [np.nan, 3.0, 8.0, np.nan, 11.5])
    np.testing.assert_allclose(first["evaluation/accuracy"], [0.25, 0.25, 0.5, 0.9, np.nan])


def test_runs_are_read_by_their_folders(path, tmp_path):
    folders = [str(tmp_path / "runs" / name) for name in ("wide__1", "grpo__0")]
    table = read_folders(folders)
    assert axes_of(table) == ["run"] and list(dict.fromkeys(table["run"])) == folders
    expected = collect(read_sweep(path)[1])
    own = expected[expected["algorithm"] == "grpo"]["reward"].to_numpy()
    np.testing.assert_array_equal(table[table["run"] == folders[1]]["reward"], own)
    with pytest.raises(ValueError, match="nowhere': has no metrics.jsonl"):
        read_folders([*folders, "nowhere"])


def test_numbers_are_metrics_unless_an_axis_has_their_name(tmp_path):
    row = {"step": 1, "loss": -2.5, "learning_rate": 0.5, "agent/raised": 3, "reward/x": 1e12, "source_rows": {"a": 1}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    table = metrics_of([({"learning_rate": "0.5"}, tmp_path)])
    assert axes_of(table) == ["learning_rate"] and table["learning_rate"].tolist() == ["0.5"]
    assert {*metrics_in(table)} == {*COLUMNS, "loss", "agent/raised", "reward/x"}
    check_metrics(table, ["loss", "entropy", "agent/raised"], "--metrics")
    for name, near in (("los", "loss$"), ("rewards/x", "reward/x"), ("raised", "agent/raised$"), ("?", "reward, accu")):
        with pytest.raises(ValueError, match=f"--metrics '{re.escape(name)}': .* name one of {near}"):
            check_metrics(table, [name], "--metrics")


def test_partial_sweeps_name_their_unfinished_runs(path):
    _, runs = read_sweep(path, extra=["training.steps=12"])
    assert unfinished(runs) == ["wide__0 (0 of 12 steps)"]
    _, runs = read_sweep(path, extra=["training.steps=20"])
    assert unfinished(runs) == ["grpo__0 (12 of 20 steps)", "wide__0 (0 of 20 steps)", "wide__1 (12 of 20 steps)"]


def test_a_table_survives_parquet(path, tmp_path):
    table = read_runs(path)
    table.to_parquet(tmp_path / "table.parquet", index=False)
    again = read_runs(tmp_path / "table.parquet")
    assert axes_of(again) == axes_of(table)
    np.testing.assert_array_equal(again["reward"], table["reward"])


def test_missing_sources_are_named(path, tmp_path):
    with pytest.raises(ValueError, match="none.parquet.*no such table"):
        read_runs(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="no metrics yet; start the run"):
        read_runs(path, smoke=True)
    table = read_runs(path)
    assert set(chosen_runs(table, ["algorithm=wide"])["algorithm"]) == {"wide"}
    for only in ("algorthm=wide", "algorithm=opmd"):
        with pytest.raises(ValueError, match=only):
            chosen_runs(table, [only])


def test_curves_show_the_mean_and_the_band_of_runs(path):
    table = read_runs(path).assign(panel="all", line="both")
    figure = draw_curves(table, "line", "panel", ["reward", "entropy"], band=band, names={"both": "Both"})
    rewards = figure.axes[0]
    (line,) = rewards.get_lines()
    np.testing.assert_allclose(line.get_xydata(), [[5, 16.5], [10, 44], [15, 63.25]])
    corners = rewards.collections[0].get_paths()[0].vertices
    assert [3, 30] == [corners[corners[:, 0] == 5, 1].min(), corners[corners[:, 0] == 5, 1].max()]
    assert not figure.axes[1].get_lines()  # a metric that no run has leaves its panel empty
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["Both"]


@pytest.mark.parametrize(
    ("metric", "values", "shown"),
    [
        ("reward", [0.2, 0.9], (0, 1.02)),
        ("reward", [1.5, 2.75], (0, 2.75)),
        ("reward", [-7.0, -0.1], (-7.0, -0.1)),
        ("reward", [-0.5, 1.0], (-0.5, 1.0)),
        ("loss", [-2.5, 1e9], (-2.5, 1e9)),
        ("gradient_norm", [0.0, 3.0], (0, 3.0)),  # logarithmic where all values are positive
        ("evaluation/initial_kl", [-0.01, 2.0], (-0.01, 2.0)),
    ],
)
def test_no_panel_cuts_a_curve_off(metric, values, shown):
    table = pd.DataFrame({"line": "a", "panel": ["low", "high"], "run": "0", "step": 5, metric: values})
    for panels in (["low", "high"], ["one", "one"]):  # in a row with one scale, and one panel
        steps = [5, 5] if panels[0] == "low" else [5, 10]
        figure = draw_curves(table.assign(panel=panels, step=steps), "line", "panel", [metric], band=band)
        low, high = figure.axes[0].get_ylim()
        assert low <= shown[0] and shown[1] <= high
        assert (low == 0) == (min(values) >= 0) and (high == 1.02) == (shown == (0, 1.02))


def test_a_nearly_constant_curve_is_below_the_frame():
    table = pd.DataFrame({"line": "a", "panel": "one", "run": "0", "step": [5, 10], "entropy": [1.51, 1.52]})
    low, high = draw_curves(table, "line", "panel", ["entropy"], band=band).axes[0].get_ylim()
    assert low == 0 and high >= 1.03 * 1.52


@pytest.mark.parametrize(
    ("metric", "values", "limits", "words"),
    [
        ("ratio/q01", [0.99998, 1.00002], (0.9, 1.1), ["0.999980 to 1.000020"]),
        ("behavior_kl/k3", [0.0, 4e-10], (0, 1.02), []),
        ("clip_fraction/all", [0.0, 0.0], (0, 1.02), []),
    ],
)
def test_rounding_errors_are_no_curves(metric, values, limits, words):
    table = pd.DataFrame({"line": "a", "panel": "one", "run": "0", "step": [5, 10], metric: values})
    axes = draw_curves(table, "line", "panel", [metric], band=band).axes[0]
    assert axes.get_ylim() == limits and [text.get_text() for text in axes.texts] == words


@pytest.mark.parametrize("ratios", [(0.97, 1.02), (0.3, 1.9), (1e-5, 3.0)])
def test_a_logarithmic_panel_has_several_ticks(ratios):
    table = pd.DataFrame({"line": "a", "panel": "one", "run": "0", "step": [5, 10], "ratio/q01": ratios})
    axes = draw_curves(table, "line", "panel", ["ratio/q01"], band=band).axes[0]
    low, high = axes.get_ylim()
    labels = [text for text in axes.yaxis.get_ticklabels() if low <= text.get_position()[1] <= high]
    assert len({text.get_text() for text in labels}) >= 2


def test_sweep_panels_and_lines_are_named_by_axes(path):
    table = read_runs(path).assign(learning_rate="0.0001")
    names = titled(table)
    assert [*dict.fromkeys(names["learning_rate"])] == ["learning rate 0.0001"]
    assert [*dict.fromkeys(names["algorithm"])] == ["grpo", "wide"]
    table["reward − grpo"] = 0.0
    labels = dict(zip(table["algorithm"], names["algorithm"], strict=True))
    figure = draw_curves(table, "algorithm", "learning_rate", ["reward", "reward − grpo"], band=band, names=labels)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["grpo", "wide"]
    assert figure.axes[1].get_ylabel().endswith("minus grpo")
    switched = titled(table.assign(algorithm=["true", "null", *["grpo"] * (len(table) - 2)]))
    assert [*dict.fromkeys(switched["algorithm"])] == ["algorithm true", "algorithm null", "algorithm grpo"]


def test_sources_without_a_run_table_are_named(tmp_path):
    table = tmp_path / "table.parquet"
    table.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ValueError, match="table.parquet: not a Parquet file"):
        read_runs(table)
    pd.DataFrame({"prompt": ["1+1="]}).to_parquet(table)
    with pytest.raises(ValueError, match="table.parquet: not a table of runs"):
        read_runs(table)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no metrics yet; start the run"):
        read_folders([tmp_path])
