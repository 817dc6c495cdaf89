"""The committed plan of the study of drift: every run in it is possible, and compared methods differ in one thing."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from experiments.claims.verdicts import MARGIN, Check
from recjax.analysis.statistics import MIN_SEEDS, estimate
from recjax.config import make_config
from recjax.config.schema import AlgorithmConfig
from recjax.config.yaml_values import read_yaml_file

STUDY = Path(__file__).parents[2] / "experiments" / "drift"
PLAN = read_yaml_file(STUDY / "plan.yaml")
METHODS = PLAN["methods"]
QUICKSTART = read_yaml_file(STUDY.parent / "quickstart.yaml")


def axes_of(method):
    """What an algorithm computes, by axis: functions with their options."""
    algorithm = AlgorithmConfig(**METHODS[method]["algorithm"]).build()
    return {field.name: repr(getattr(algorithm, field.name)) for field in dataclasses.fields(algorithm)}


def causes_of(task):
    """Names of the causes that a task has."""
    cells = PLAN["cells"][task]
    cells = cells["causes"] if isinstance(cells, dict) else cells
    return [*PLAN["causes"]] if cells == "all" else cells


def methods_of(task):
    """Names of the methods that a task has."""
    cells = PLAN["cells"][task]
    return cells["methods"] if isinstance(cells, dict) else [*METHODS]


@pytest.mark.parametrize("check", PLAN["checks"], ids=lambda check: f"{check['first']}-{check['second']}")
def test_compared_methods_differ_in_one_thing(check):
    assert METHODS[check["first"]]["differs_from"] == check["second"] and METHODS[check["first"]]["in"]
    first, second = axes_of(check["first"]), axes_of(check["second"])
    assert len([name for name in first if first[name] != second[name]]) == 1
    assert PLAN["margin"] == MARGIN and Check("", check["expected"], MARGIN, estimate(np.zeros(6))).outcome


def test_every_method_is_in_a_check():
    compared = {name for check in PLAN["checks"] for name in (check["first"], check["second"])}
    assert compared == set(METHODS)


@pytest.mark.parametrize("cause", PLAN["causes"])
def test_every_planned_run_has_a_valid_config(cause):
    planned = PLAN["causes"][cause]
    drift = planned.get("drift")
    for method, chosen in METHODS.items():
        centers = chosen["algorithm"]["preset"] == "score_centering"
        if centers and drift is not None and drift.get("logprobs") == "exact":
            continue
        rollout = dict(QUICKSTART["rollout"]) | ({"drift": drift} if drift else {})
        rollout |= {"recorded_top_k": 128} if centers else {}
        values = QUICKSTART | {"output": f"runs/{method}", "algorithm": chosen["algorithm"], "rollout": rollout}
        make_config(values | {"regime": {"sync_interval": planned["age"]}})


def test_every_verdict_has_its_seeds_and_the_runs_fit_a_day():
    hours = {}
    for task, size in PLAN["tasks"].items():
        assert size["seeds"] >= MIN_SEEDS and PLAN["common_rate"][task] in size["rates"]
        cells = [*itertools.product(methods_of(task), causes_of(task))]
        runs = len(cells) * (size["seeds"] + size["pilot_seeds"] * len(size["rates"]))
        hours[task] = runs * size["seconds_a_run"] / 3600
    assert hours["sums"] < 5 and hours["smollm2"] < 8 and hours["bandit"] < 1
