"""The notebook's cells run, one after the other, as a program of fewer steps; its pictures are those of its own run."""

import json
import os
from pathlib import Path

import pytest

from tests import commands

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "tutorials" / "quickstart.ipynb"


def cells() -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_every_cell_was_run_in_order_and_none_failed():
    assert [cell["execution_count"] for cell in cells()] == list(range(1, len(cells()) + 1))
    outputs = [output for cell in cells() for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert [output for output in outputs if "image/png" in output.get("data", {})]


@pytest.mark.slow
def test_the_cells_are_a_program(tmp_path):
    lines = [line for cell in cells() for line in "".join(cell["source"]).splitlines() if not line.startswith("%")]
    program = "\n".join(lines).replace("training.steps=240", "training.steps=8").replace("every=40", "every=4")
    short = ["evaluation.problems=16", "warm_start.steps=5", "samples={every: 2}"]
    program = program.replace("evaluation.problems=256", '", "'.join(short))
    assert short[-1] in program and "training.steps=8" in program
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    done = commands.run(["-c", program], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
