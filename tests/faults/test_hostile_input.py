"""The campaigns of hostile data files, model folders and completions; each prints a table when it is run by itself."""

import pytest

from tests import commands

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(("name", "least"), [("data_files", 100), ("model_folders", 60), ("completions", 82)])
def test_nothing_hostile_is_taken(name, least):
    done = commands.run(["-m", f"tests.faults.{name}"], timeout=900)
    table = done.stdout[done.stdout.rindex(f"{name.replace('_', ' ')}: tried") :]
    assert table.strip().endswith("not 0"), table + done.stderr[-2_000:]
    assert int(table.split("tried ")[1].split(",")[0]) >= least
