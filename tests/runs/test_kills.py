"""Runs that SIGKILL ends again and again, anywhere, go on and end as a run does that nothing happened to."""

import signal
from pathlib import Path

import numpy as np
import pytest

from recjax.config import load_config
from recjax.generate_experience import generate
from recjax.logs.metrics import read_metrics
from tests.commands import forks
from tests.experience.rows import read_columns
from tests.marks import campaign_except
from tests.training.counting import count
from tests.training.killed_run import trained
from tests.training.tiny_run import TINY, train, without_times

pytestmark = pytest.mark.slow
KILLS = 5
OPTIONS = ["training.steps=12", "training.checkpoint_every=2", "evaluation.every=4", "evaluation.problems=5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config, a store, and where runs and compiled programs go."""
    folder = tmp_path_factory.mktemp("kills")
    (folder / "tiny.yaml").write_text(TINY)
    generate(load_config(folder / "tiny.yaml", [f"output={folder}"]), folder / "store", 12, None, None, "initial")
    return folder


MODES = {
    "queue": ["regime.sync_interval=3", "regime.sync_offset=2"],  # with compiled programs
    "offline": ["experience.store={folder}/store"],
    "replay": ["experience.replay={draw_every: 2, half_life: 2.0}", "experience.record=true"],
    "late and mixed": [
        "experience.late={longest: 3, deadline: 2}",
        "experience.mix={store: {folder}/store, share: 0.25}",
        "experience.record=true",
    ],
}


@pytest.mark.parametrize("name", campaign_except(MODES, "queue", "late and mixed"))
def test_killed_anywhere_it_ends_as_if_nothing_had_happened(folder, name):
    options = [*OPTIONS, *(setting.replace("{folder}", str(folder)) for setting in MODES[name])]
    straight_output, output = folder / f"{name} straight", folder / name
    output.mkdir()
    generator = np.random.default_rng(sum(name.encode()))
    counts = name != "queue"
    straight = (count if counts else train)(load_config(folder / "tiny.yaml", [*options, f"output={straight_output}"]))

    def run(kill_at: int | None) -> int:
        arguments = (str(folder / "tiny.yaml"), [*options, f"output={output / 'run'}"], str(folder / "jax"), kill_at)
        process = forks().Process(target=trained, args=arguments, kwargs={"counts": counts})
        process.start()
        process.join(120)
        return process.exitcode

    # A checkpoint is some thirty events and a step three, so a whole run has about three hundred.
    for kill_at in generator.integers(1, 65, size=KILLS).tolist():
        assert run(kill_at) == -signal.SIGKILL
    assert run(None) == 0
    assert len((output / "run.killed").read_text().splitlines()) == KILLS
    rows = read_metrics(output / "run" / "metrics.jsonl")
    assert without_times(rows) == without_times(straight)
    if "experience.record=true" in options:
        ours, theirs = (read_columns(Path(place) / "experience.db") for place in (output / "run", straight_output))
        assert [row.id for row in ours] == [row.id for row in theirs]
        assert [row.reward for row in ours] == [row.reward for row in theirs]
