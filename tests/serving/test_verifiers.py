"""The package verifiers, in an environment of its own, plays sessions of a server."""

import os
import subprocess
import venv
from pathlib import Path

import pytest

from recjax.runtime.cache import cache_folder
from tests.experience.rows import read_columns
from tests.serving.some_server import LIMITS, TOKENIZER, listening

pytestmark = pytest.mark.campaign
PACKAGES = ("verifiers==0.4.0", "uv")
SCRIPT = Path("experiments/live/verifiers_sessions.py").absolute()
ROLLOUTS = 6


@pytest.fixture(scope="module")
def python():
    """The interpreter of an environment with the packages, which is kept; without an index there is none."""
    folder = cache_folder("clients") / "verifiers"
    interpreter, made = folder / "bin" / "python", folder / "made"  # written last
    if not made.is_file() or made.read_text() != " ".join(PACKAGES):
        venv.create(folder, clear=True, with_pip=True)
        command = [interpreter, "-m", "pip", "install", "--disable-pip-version-check", "-q", *PACKAGES]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"pip cannot install {PACKAGES}: {result.stderr.strip()[-300:]}")
        made.write_text(" ".join(PACKAGES))
    return interpreter


def test_rollouts_become_trajectories_with_the_packages_rewards(tmp_path, python):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with listening(tmp_path / "store", limits=LIMITS._replace(context=1000)) as (port, _):
        command = [python, SCRIPT, f"http://127.0.0.1:{port}", str(ROLLOUTS)]
        played = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert played.returncode == 0, played.stderr + played.stdout
    said = dict(line.split(": ") for line in played.stdout.splitlines())
    rows = read_columns(tmp_path / "store")
    assert len(said) == len(rows) == ROLLOUTS, "each is one row, however many turns it has"
    for row in rows:
        assert row.id.startswith("session/")
        turns, reward = said[row.id.removeprefix("session/")].split(" turns, reward ")
        assert row.reward == pytest.approx(float(reward)) and row.reward_parts.keys() == {"right", "further_turns"}
        assert row.reward_parts["further_turns"] == int(turns) - 1
        text = TOKENIZER.decode(row.completion_tokens)
        assert text.count("That is wrong. Try again.") == int(turns) - 1
        said_by_policy = row.completion_tokens[row.completion_mask]
        assert "wrong" not in TOKENIZER.decode(said_by_policy) and len(said_by_policy) <= 24 * int(turns)
    assert {"1"} < {line.split(" turns")[0] for line in said.values()}, "rollouts of one turn, and of several"
