"""The golden runs: each kind of difference between two runs is noticed, and a commit equals itself."""

import copy
import math

import pytest
import yaml

from benchmarks import golden

ROWS = [
    {"step": 0, "evaluation/accuracy": 0.5, "wall_seconds": 1.0},
    {"step": 1, "loss": 0.25, "reward": 3.0, "staleness_rows": {"0": 16}, "wall_seconds": 2.0},
    {"step": 2, "loss": 0.5, "reward": -8.0, "staleness_rows": {"1": 16}, "wall_seconds": 3.0},
]


def changed(change):
    """The rows after a change that a function makes in them."""
    rows = copy.deepcopy(ROWS)
    change(rows)
    return rows


@pytest.mark.parametrize(
    ("change", "difference", "where"),
    [
        (lambda rows: None, 0, ""),
        (lambda rows: rows[1].update(wall_seconds=9.0), 0, ""),
        (lambda rows: rows[1].update(loss=0.25 + 2**-50), 2**-50, "step 1 loss"),
        (lambda rows: rows[2].update(reward=-8.5), 0.5 / 8, "step 2 reward"),
        (lambda rows: rows[2].update(loss=math.nan), math.inf, "step 2 loss"),
        (lambda rows: rows[2].update(loss=None), math.inf, "step 2 loss"),
        (lambda rows: rows[2].update(staleness_rows={"0": 16}), math.inf, "step 2 staleness_rows"),
        (lambda rows: rows.pop(), math.inf, "steps"),
        (lambda rows: rows.pop(1), math.inf, "steps"),
        (lambda rows: rows[1].pop("loss"), math.inf, "step 1 loss"),
        (lambda rows: [row.pop("reward", None) for row in rows], math.inf, "step 1 reward"),
        (lambda rows: rows[1].update(ratio=1.0), math.inf, "step 1 ratio"),
    ],
)
def test_every_difference_is_noticed_on_either_side(change, difference, where):
    for there, here in ((ROWS, changed(change)), (changed(change), ROWS)):
        found, place = golden.largest_difference(there, here)
        assert found == pytest.approx(difference, rel=0.1) and place.startswith(where)
        assert golden.verdict(found, 0.0) == ("DIFFERS" if difference else "bit-equal")


def test_the_largest_difference_is_compared_with_the_tolerance():
    here = changed(lambda rows: (rows[1].update(loss=0.26), rows[2].update(loss=0.6)))
    difference, where = golden.largest_difference(ROWS, here)
    assert difference == pytest.approx(0.1) and where == "step 2 loss: 0.5 there, 0.6 here"
    assert golden.verdict(difference, 0.2) == "within 0.2" and golden.verdict(difference, 0.05) == "DIFFERS"


def test_changed_metrics_are_those_of_the_tables(monkeypatch):
    here = [{"return" if name == "reward" else name: value for name, value in row.items()} for row in ROWS]
    here = [{name: value for name, value in row.items() if name != "loss"} | {"new": 1.0} for row in here]
    monkeypatch.setattr(golden, "RENAMED_METRICS", {"reward": "return", "loss": None})
    assert golden.largest_difference(ROWS, here)[0] == math.inf
    monkeypatch.setattr(golden, "ADDED_METRICS", {"new"})
    assert golden.largest_difference(ROWS, here) == (0, "")
    here[1]["return"] = 4.0
    assert golden.largest_difference(ROWS, here)[1].startswith("step 1 return")


def test_a_checkout_gets_the_key_names_that_it_has(tmp_path, monkeypatch):
    for name, key in (("old", "regime.sync_offset"), ("new", "regime.batches_ahead")):
        (tmp_path / name / "docs").mkdir(parents=True)
        (tmp_path / name / "docs" / "configuration.md").write_text(f"| `{key}` | an integer |")
    monkeypatch.setattr(golden, "OLDER_KEYS", {"regime.batches_ahead": "regime.sync_offset"})
    run = golden.Golden({"regime.batches_ahead": 2, "experience.store": "{store}"})
    for name, key in (("old", "sync_offset"), ("new", "batches_ahead")):
        side = golden.Side(tmp_path / name, tmp_path / "runs" / name)
        config = golden.config_of(run, side, side.folder / "run")
        assert config["regime"] == {key: 2} and config["output"] == str(side.folder / "run")
        assert config["experience"]["store"] == str(side.folder / golden.STORE)
        assert yaml.safe_load(yaml.safe_dump(config)) == config


def test_every_run_is_a_config_of_this_version(tmp_path):
    from recjax.config import load_config

    side = golden.Side(golden.HERE, tmp_path)
    assert len(golden.RUNS) == 12
    for name, run in golden.RUNS.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(golden.config_of(run, side, tmp_path / name)))
        load_config(path, [])


@pytest.mark.campaign
def test_a_commit_equals_itself():
    rows = golden.compare_all("HEAD", ["early"])
    assert [(row[0], row[1], row[4]) for row in rows] == [("early", "6", "bit-equal")]
