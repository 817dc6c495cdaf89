"""The table of presets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_table_has_every_preset_and_leaves_no_file(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "recjax.objectives"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and "rec_one_side_nois" in done.stdout, done.stderr
    assert not [*tmp_path.iterdir()]
