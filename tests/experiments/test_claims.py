"""The page of the claims: its verdicts follow from its numbers, and both from the committed metrics."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from experiments.claims import map as claims_map
from experiments.claims import page
from experiments.claims.staleness import survived
from experiments.claims.verdicts import Check, Claim
from recjax.analysis.statistics import Estimate
from recjax.analysis.sweeps import read_sweep

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2]
NOTES = ROOT / "experiments" / "claims"


@pytest.mark.parametrize(
    ("expected", "low", "high", "outcome"),
    [
        ("higher", 0.01, 0.2, "as claimed"),
        ("higher", -0.01, 0.2, "undecided"),
        ("higher", -0.2, -0.01, "contrary"),
        ("lower", 0.01, 0.2, "contrary"),
        ("lower", -0.01, 0.2, "undecided"),
        ("lower", -0.2, -0.01, "as claimed"),
        ("alike", -0.04, 0.04, "as claimed"),
        ("alike", 0.01, 0.04, "as claimed"),
        ("alike", -0.04, 0.06, "undecided"),
        ("alike", 0.06, 0.2, "contrary"),
        ("alike", -0.2, -0.06, "contrary"),
    ],
)
def test_an_outcome_is_where_the_interval_lies(expected, low, high, outcome):
    assert Check("", expected, 0.05, Estimate((low + high) / 2, low, high, 3)).outcome == outcome


@pytest.mark.parametrize(
    ("intervals", "verdict", "range_words"),
    [
        ([(0.1, 0.2), (0.1, 0.3)], "holds", "seen in every seed"),
        ([(0.1, 0.2), (-0.1, 0.3)], "not visible at this scale", "differs by seed"),
        ([(-0.1, 0.2), (-0.3, -0.1)], "does not hold here", "contrary in every seed"),
    ],
)
def test_a_verdict_needs_every_check_and_six_seeds(intervals, verdict, range_words):
    for seeds, words in ((6, verdict), (5, range_words)):
        checks = [Check("", "higher", 0.05, Estimate(0.0, low, high, seeds)) for low, high in intervals]
        assert Claim("", (), checks).verdict == words
    assert Check("", "higher", 0.05, Estimate(0.2, 0.1, 0.3, 5)).shown == "as claimed in each of 5 seeds"


def test_an_interval_survives_only_after_all_smaller_ones():
    columns = [0, 1, 5, 20, 50]
    ends = pd.DataFrame(
        [[0.4, 0.8, 0.7, 0.5, 0.7], [0.4, 0.8, 0.8, 0.8, 0.8], [0.4, 0.8, 0.3, 0.8, 0.8]], columns=columns
    )
    assert list(survived(ends)) == [5, 50, 1]


@pytest.fixture(scope="module")
def tables():
    return {name: page.read_runs(path) for name, path in page.TABLES.items()}


def test_page_and_verdicts_are_those_of_the_committed_metrics(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "draw_all", lambda *arguments: None)
    page.write_pages(tables, tmp_path, tmp_path)
    assert json.loads((tmp_path / "verdicts.json").read_text()) == json.loads((NOTES / "verdicts.json").read_text())
    assert (tmp_path / "claims.md").read_text() == (ROOT / "docs" / "claims.md").read_text()
    assert (tmp_path / "README.md").read_text() == (NOTES / "README.md").read_text()


def test_collecting_keeps_what_was_made_elsewhere(tables, tmp_path, monkeypatch):
    """One run is finished here; those of the table that are not stay as they are, and a lost table is said."""
    runs = read_sweep(page.HERE / "smollm2.yaml")[1]
    monkeypatch.setattr(claims_map, "is_finished", lambda config: config.output == runs[0].config.output)
    before = tables["smollm2"]
    own = (before[list(runs[0].settings)] == pd.Series(runs[0].settings)).all(axis=1)
    monkeypatch.setattr(claims_map, "collect_metrics", lambda chosen: before[own].assign(reward=np.float32(9)))
    after = page.collect_finished("smollm2")
    assert (after.loc[own.to_numpy(), "reward"] == 9).all()
    pd.testing.assert_frame_equal(after[~own.to_numpy()], before[~own])
    monkeypatch.setitem(page.TABLES, "smollm2", tmp_path / "none.parquet")
    monkeypatch.setattr(claims_map, "is_finished", lambda config: False)
    with pytest.raises(ValueError, match="none of the 24 runs is finished"):
        page.collect_finished("smollm2")


def test_pictures_are_those_of_the_committed_metrics(tables, tmp_path):
    pages = [ROOT / "docs" / name for name in ("claims.md", "debugging.md")]
    folders = {"docs": (ROOT / "docs" / "claims", pages), "notes": (NOTES, [NOTES / "README.md"])}
    for name in folders:
        (tmp_path / name).mkdir()
    page.draw_all(tables, tmp_path / "docs", tmp_path / "notes")
    for name, (folder, texts) in folders.items():
        drawn = {file.name for file in (tmp_path / name).glob("*.png")}
        assert drawn == {file.name for file in folder.glob("*.png")}
        for file in drawn:
            fresh, committed = imread(tmp_path / name / file), imread(folder / file)
            assert fresh.shape == committed.shape
            assert np.abs(fresh - committed).mean() < 0.02  # other fonts may be there, not other curves
            assert any(file in text.read_text() for text in texts)


def test_the_committed_metrics_are_the_whole_grid(tables):
    expected = {tuple(run.settings.values()) for run in read_sweep(ROOT / "experiments" / "claims" / "grid.yaml")[1]}
    table = tables["grid"]
    assert set(table[["algorithm", "regime", "seed"]].itertuples(index=False, name=None)) == expected
    assert (table.groupby(["algorithm", "regime", "seed"])["step"].max() == 300).all()


def test_only_whole_seeds_are_checked():
    cells = [("grpo", "3"), ("opmd", "3"), ("grpo", "4")]
    table = pd.DataFrame([{"algorithm": name, "regime": "offline", "seed": seed, "step": 0} for name, seed in cells])
    assert page.whole_seeds(table) == {}
    both = pd.concat([table, table.assign(seed="5")[:2]])
    assert set(page.whole_seeds(both)["checks"]["seed"]) == {"3", "5"}
