"""The table of presets; its figure is drawn where it is asked for."""

import os
from pathlib import Path

import pytest

from tests import commands

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "drawn"),
    [
        ([], []),
        pytest.param(["--figure"], ["figures/objectives.png"], marks=pytest.mark.slow),
        pytest.param(["--output=mine"], ["mine/objectives.png"], marks=pytest.mark.slow),
    ],
)
def test_a_figure_is_left_only_where_it_is_asked_for(tmp_path, arguments, drawn):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = commands.run(["-m", "recjax.objectives", *arguments], cwd=tmp_path, env=environment)
    assert done.returncode == 0 and "rec_one_side_nois" in done.stdout, done.stderr
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png")] == drawn
    assert ("figure: " in done.stdout) == bool(drawn) and [*tmp_path.iterdir()] == [
        tmp_path / Path(x).parts[0] for x in drawn
    ]
