"""experiments/day/from_python.py: small, from its first run to the exported folder."""

import os

import pytest

from tests import commands

pytestmark = pytest.mark.campaign

SCRIPT = commands.ROOT / "experiments" / "day" / "from_python.py"


def test_a_day_in_python(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(commands.ROOT), "RECJAX_CACHE": str(tmp_path / "cache")}
    done = commands.run(["-c", SCRIPT.read_text(), "8"], cwd=tmp_path, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    for part in ("of 8 steps) after", "8 of 8 steps) after", "abc>", "95 % interval", "exported to models/reversed"):
        assert part in done.stdout, done.stdout
    assert (tmp_path / "models" / "reversed" / "model.safetensors").is_file()
