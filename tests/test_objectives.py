"""The table of presets; its figure is drawn where it is asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import commands

ROOT = Path(__file__).parents[1]
# The command with an empty figure.
EMPTY = """
import runpy
from matplotlib.figure import Figure
from recjax.plots import objectives

objectives.draw_coefficients = Figure
runpy.run_module("recjax.objectives", run_name="__main__", alter_sys=True)
"""


def command(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, **options)


def forked(*arguments, **options):
    return commands.run(arguments, **options)


@pytest.mark.parametrize(
    ("start", "arguments", "drawn"),
    [
        pytest.param(command, ["-m", "recjax.objectives"], [], marks=pytest.mark.slow),
        pytest.param(
            forked, ["-m", "recjax.objectives", "--figure"], ["figures/objectives.png"], marks=pytest.mark.slow
        ),
        pytest.param(forked, ["-c", EMPTY, "--output=mine"], ["mine/objectives.png"], marks=pytest.mark.slow),
    ],
    ids=["", "--figure", "--output"],
)
def test_a_figure_is_left_only_where_it_is_asked_for(tmp_path, start, arguments, drawn):
    done = start(*arguments, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"})
    assert done.returncode == 0 and "rec_one_side_nois" in done.stdout, done.stderr
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png")] == drawn
    assert ("figure: " in done.stdout) == bool(drawn) and [*tmp_path.iterdir()] == [
        tmp_path / Path(x).parts[0] for x in drawn
    ]
