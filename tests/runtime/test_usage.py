"""The help of commands is read from their sources: all their flags are in it, and nothing heavy is imported."""

import subprocess
import sys

import pytest

from recjax.__main__ import COMMANDS
from recjax.runtime.usage import command_file, flags_of, help_of


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_every_flag(name):
    source = command_file(name)
    assert source
    names = [flag.name for flag in flags_of(source)]
    text = source.read_text()
    of_processes = text.count("define_process_flags()\n")
    assert len(names) == text.count("flags.DEFINE_") + 3 * of_processes
    shown = help_of(source).split()
    assert all(f"--{each}" in shown or f"--[no]{each}" in shown for each in names)


def test_help_imports_no_heavy_package():
    command = [sys.executable, "-X", "importtime", "-m", "recjax.plot", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--metrics" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "recjax.runtime.usage" in imported
    assert imported.isdisjoint({"absl", "pandas", "numpy", "jax", "pydantic", "matplotlib"})
