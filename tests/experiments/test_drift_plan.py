"""The committed plan of the study of drift: every run in it is possible, and compared methods differ in one thing."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

from experiments.claims.verdicts import LEVEL, MARGIN, Check
from experiments.drift import __main__ as main
from experiments.drift import page, plan
from recjax.analysis.statistics import MIN_SEEDS, estimate
from recjax.analysis.sweeps import read_sweep
from recjax.config.schema import AlgorithmConfig

PLAN, METHODS, CHECKS = plan.PLAN, plan.METHODS, plan.CHECKS
SCALES = dict.fromkeys(plan.CAUSES, 0.1)
PAIRS = [check for check in CHECKS if check["second"] != "none"]


def axes_of(method):
    """What an algorithm computes, by axis: functions with their options."""
    algorithm = AlgorithmConfig(**METHODS[method]["algorithm"]).build()
    return {field.name: repr(getattr(algorithm, field.name)) for field in dataclasses.fields(algorithm)}


@pytest.mark.parametrize("check", PAIRS, ids=lambda check: f"{check['first']}-{check['second']}")
def test_compared_methods_differ_in_one_thing(check):
    assert METHODS[check["first"]]["differs_from"] == check["second"] and METHODS[check["first"]]["in"]
    first, second = axes_of(check["first"]), axes_of(check["second"])
    assert len([name for name in first if first[name] != second[name]]) == 1
    assert (PLAN["margin"], PLAN["level"]) == (MARGIN, LEVEL) and Check(
        "", check["expected"], MARGIN, estimate(np.zeros(6))
    ).outcome


def test_every_method_and_cause_is_planned_and_named():
    compared = {name for check in PAIRS for name in (check["first"], check["second"])}
    assert compared == set(METHODS) == set(page.NAMES)
    assert set(page.CAUSES) == set(plan.CAUSES)
    planned = {cell.cause for task in PLAN["tasks"] for cell in plan.cells_of(task)}
    assert planned == set(plan.CAUSES)


@pytest.mark.parametrize("task", ["sums"])
def test_every_planned_run_has_a_valid_config(task):
    cells = plan.cells_of(task)
    assert len({cell[:3] for cell in cells}) == len(cells) > 100
    # One cell of each setup and method, and one of each setup and cause: their settings do not touch.
    chosen = {(cell.setup, cell.algorithm): cell for cell in cells} | {(cell.setup, cell.cause): cell for cell in cells}
    for cell in chosen.values():
        run = plan.run_of(task, cell, 1e-3, 7, SCALES)
        config = run.config
        assert list(run.settings.values()) == [cell.setup, cell.algorithm, cell.cause, "0.001", "7"]
        assert config.seed == 7 and config.optimizer.learning_rate == 1e-3
        drift = plan.CAUSES[cell.cause].get("drift")
        assert (config.rollout.drift is None) == (drift is None)
        if drift is not None:
            assert config.rollout.drift.fixed == drift.get("fixed", False)
            wanted = SCALES[cell.cause] if "scale" in plan.CAUSES[cell.cause] else drift.get("scale", 1.0)
            assert config.rollout.drift.scale == wanted
        updates = config.training.updates_per_batch
        assert updates == (4 if cell.setup == "adamw_4_updates" else 1)
        assert config.optimizer.name == ("sgd" if cell.setup == "sgd" else "adamw")
        age = plan.CAUSES[cell.cause]["age"]
        assert config.regime.sync_interval * updates == age or age == 1 == config.regime.sync_interval


def test_the_smollm2_sweep_has_the_plans_runs():
    runs = read_sweep(plan.HERE / "smollm2.yaml")[1]
    planned = PLAN["tasks"]["smollm2"]
    cells = {cell[:3] for cell in plan.cells_of("smollm2")}
    assert {(run.settings["setup"], run.settings["algorithm"], run.settings["cause"]) for run in runs} == cells
    assert len(runs) == len(cells) * planned["seeds"]
    for run in runs:
        assert list(run.settings) == plan.AXES and run.config.optimizer.learning_rate == float(run.settings["rate"])
        assert run.config.regime.sync_interval == plan.CAUSES[run.settings["cause"]]["age"]
        wanted = AlgorithmConfig(**METHODS[run.settings["algorithm"]]["algorithm"]).build()
        assert repr(run.config.algorithm.build()) == repr(wanted)


def test_verdicts_and_pilots_have_different_seeds():
    for task, size in PLAN["tasks"].items():
        assert MIN_SEEDS <= size["seeds"] < plan.FIRST_PILOT_SEED
        for setup in size["setups"].values():
            assert setup["common_rate"] in setup["rates"]
        hours = page.planned_runs(task, None) * size["seconds_a_run"] / 3600
        assert hours < 8


def test_every_scale_is_measured():
    scales = json.loads(main.SCALES.read_text(encoding="utf-8"))
    for task in ("bandit", "sums"):
        causes = {cell.cause for cell in plan.cells_of(task) if "scale" in plan.CAUSES[cell.cause]}
        assert set(scales[task]["scales"]) == causes
    for name, scale in scales["bandit"]["scales"].items():
        assert scale == plan.scale_of(name, by_number(scales["bandit"]["measured"]))
    for name, scale in scales["sums"]["scales"].items():
        of_seeds = [plan.scale_of(name, by_number(measured)) for measured in scales["sums"]["measured"]]
        assert scale == pytest.approx(np.exp(np.mean(np.log(of_seeds))), rel=0.05)


def by_number(measured):
    """Measurements as they were before JSON made text of their numbers."""
    return {kind: {float(size): value for size, value in values.items()} for kind, values in measured.items()}


def test_the_best_rate_is_that_of_the_pilot_seeds():
    rows = [
        ("adamw", "clip", "age20", rate, seed, end)
        for rate, ends in (("0.0002", (0.5, 0.6, 0.1)), ("0.0004", (0.7, 0.4, 0.9)), ("0.0008", (0.2, 0.2, 1.0)))
        for seed, end in zip(("100", "101", "0"), ends, strict=True)
    ]
    ends = pd.DataFrame(rows, columns=[*plan.AXES, "end"]).set_index(plan.AXES)["end"]
    assert plan.best_rates(ends) == {("adamw", "clip", "age20"): 2e-4}  # equal means, and the lower rate


def test_runs_of_pilots_and_checks_share_no_seed(monkeypatch):
    monkeypatch.setattr(plan, "make_config", lambda *_: None)  # 3,000 configs take 15 seconds
    monkeypatch.setattr(plan, "read_yaml_file", lambda _: None)
    best = {cell[:3]: 8e-4 for cell in plan.cells_of("sums") if cell.has_pilot}
    pilots = plan.pilot_runs("sums", SCALES)
    made = plan.verdict_runs("sums", SCALES, best)
    assert {run.settings["seed"] for run in pilots} == {"100"}
    assert {run.settings["seed"] for run in made} == {str(seed) for seed in range(8)}
    names = [run.name for run in pilots + made]
    assert len(set(names)) == len(names)
    rates = {
        run.settings["rate"] for run in made if run.settings["cause"] == "age20" and run.settings["setup"] == "adamw"
    }
    assert rates == {"0.0002", "0.0008"}
