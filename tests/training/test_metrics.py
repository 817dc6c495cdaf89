"""metrics.jsonl and the other JSON of a run: standard JSON, whatever the numbers are, and readers that cope with it."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from recjax.analysis.collect import read_folders
from recjax.plots.training import draw_experience, draw_training
from recjax.samples import sample_page
from recjax.training.evaluation import Evaluation, write_samples
from recjax.training.metrics import MetricsWriter, read_metrics

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


def test_numbers_that_are_not_finite_are_null_and_their_readers_leave_them_out(tmp_path):
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


def test_samples_and_their_page_are_standard_json(tmp_path):
    samples = [{"reward": NAN, "parts": {"length": INF}, "question": "q", "completion": "c", "answer": "a"}]
    write_samples(tmp_path / "samples" / "after.jsonl", Evaluation(0.0, NAN, None, samples), 3)
    kept = strictly((tmp_path / "samples" / "after.jsonl").read_text())
    assert kept["reward"] is kept["parts"]["length"] is None and kept["step"] == 3
    page = sample_page([{"name": "run", "about": "about", "rows": [{"advantage": [NAN, 1.0]}]}])
    assert '"advantage": [null, 1.0]' in page
