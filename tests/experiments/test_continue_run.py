"""The example of a run that another run continues, small."""

import json

import pytest

from tests import commands

pytestmark = pytest.mark.campaign

SMALL = [
    "model.decoder={hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, intermediate_size: 32}",
    "task.arithmetic.problems=['1..9 + 1..9']",
    "warm_start={steps: 20, batch_size: 32}",
    "training={steps: 6, checkpoint_every: 2}",
    "evaluation={every: 2, problems: 16}",
    "regime.sync_interval=1",
]


def test_a_run_is_continued_and_resumed_with_other_rates(tmp_path):
    script = ["-m", "experiments.day.continue_run", "--output", str(tmp_path / "runs")]
    done = commands.run([*script, "--config", "experiments/quickstart.yaml", *SMALL])
    assert done.returncode == 0, done.stderr
    said = [line.split(":")[0] for line in done.stdout.splitlines() if "held-out accuracy" in line]
    said = [name for name in said if not name.startswith("step ")]
    assert said == ["first run", "continued", "resumed with another rate"]
    rows = [json.loads(line) for line in (tmp_path / "runs/second/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(10))
    assert len({row["learning_rate"] for row in rows[7:]}) == 1 and rows[7]["learning_rate"] == pytest.approx(5e-5)
    (_, second) = json.loads((tmp_path / "runs/second/environment.json").read_text())
    assert second["changed"]["after_step"] == 6 and "learning_rate: 0.0001 there" in second["changed"]["settings"]
