"""A day's verdict on two algorithms, run small from the command line."""

import os
import re
from pathlib import Path

import pytest

from tests import commands

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.decoder={hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, intermediate_size: 32}",
    "warm_start={steps: 20, batch_size: 32}",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "training={steps: 4, checkpoint_every: 4}",
    "evaluation={every: 2, problems: 16}",
    "samples={every: 2, groups: 2}",
)


def test_two_algorithms_are_trained_and_compared(tmp_path):
    program = "import runpy; runpy.run_path('experiments/day/verdict.py', run_name='__main__')"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RECJAX_CACHE": str(tmp_path / "cache")}
    done = commands.run(["-c", program, str(tmp_path / "day"), *SMALL], timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"held-out accuracy, .* 6 seeds\), p [\d.]+\.", done.stdout), done.stdout
    assert "differs: algorithm.preset = reinforce and rec_one_side_nois\n" in done.stdout
    assert "differs: seed" not in done.stdout
    for name in ("verdict.png", "samples.html"):
        assert (tmp_path / "day" / name).stat().st_size > 10_000
    befores = {path.read_bytes() for path in (tmp_path / "day").glob("*/0/samples/before.jsonl")}
    assert len(befores) == 1  # one base policy
