"""The scripts of experiments/day for a mixture of tasks and for users of TRL, run small."""

import json
import os

import pytest

from tests import commands
from tests.commands import ROOT

pytestmark = pytest.mark.campaign

SMALL = ["warm_start={steps: 30, batch_size: 32}", "training.steps=4", "training.checkpoint_every=2"]
SMALL += ["rollout.group_size=4"]
SMALL += ["task.mixture.sums.arithmetic.problems=['1..9 + 10..29']"]
SMALL += ["task.mixture.products.arithmetic.problems=['1..9 * 1..9']"]
SMALL += ["evaluation.every=2", "evaluation.problems=8", "task.keep.pass_rate=[0.0, 0.95]", "task.keep.samples=2"]


def python(folder, *arguments):
    """Runs Python in an empty folder and returns everything that it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RECJAX_CACHE": str(folder / "cache")}
    done = commands.run(arguments, cwd=folder, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_mixture_logs_and_evaluates_every_task(tmp_path):
    config = ["--config", str(ROOT / "experiments/day/mixture.yaml"), *SMALL]
    said = python(tmp_path, "-m", "recjax.train", *config)
    assert "task.keep: keeping" in said
    rows = rows_of(tmp_path / "runs/mixture")
    for name in ("sums", "products"):
        assert all(f"accuracy/{name}" in row and f"reward/{name}" in row for row in rows[1:])
        assert f"evaluation/accuracy/{name}" in rows[0] and f"evaluation/reward/{name}" in rows[-1]
    assert all(row["curriculum/problems"] > 0 for row in rows[2:])
    # Another run of the same policy and task samples no pass rates.
    again = python(tmp_path, "-m", "recjax.train", *config, "output=runs/again", "task.keep.pass_rate=[0.0, 1.0]")
    assert "pass rates:" not in again
    smaller = ["task.mixture.sums.arithmetic.problems=['1..2 + 1..9']", "task.mixture.products.weight=0"]
    smaller += ["task.mixture.products.arithmetic.problems=['1..2 * 1..3']"]
    said = python(tmp_path, "-m", "recjax.evaluate", *config, *smaller, "checkpoint=runs/mixture", "--all")
    results = json.loads(next((tmp_path / "runs/evaluations").glob("*-all/results.json")).read_text())
    assert results["problems"] == 18 + 6 and {*results["tasks"]} == {"sums", "products"}
    assert results["tasks"]["products"]["problems"] == 6 and "products" in said


def test_a_script_of_trl_trains_with_its_own_reward(tmp_path):
    (tmp_path / "coming_from_trl.py").write_text((ROOT / "experiments/day/coming_from_trl.py").read_text())
    program = "import runpy; runpy.run_path('coming_from_trl.py', run_name='__main__')"
    python(tmp_path, "-c", program, "training.steps=3", "training.checkpoint_every=3", "evaluation.every=0")
    rows = rows_of(tmp_path / "runs/coming_from_trl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and rows[-1]["reward/score"] == rows[-1]["reward"]
    assert "coefficient: 0.01" in (tmp_path / "runs/coming_from_trl/config.yaml").read_text()
