"""Asynchronous runs whose trainer is several processes: all do what the first one's generators say."""

import contextlib
import pickle
import signal
import time
from collections import Counter

import numpy as np
import pytest

from recjax.logs.metrics import read_metrics
from recjax.runtime import hosts
from recjax.sources.generators import Assignment, Generators
from tests.commands import said, two_of
from tests.experience.rows import read_columns
from tests.sources.test_async_order import InAnyOrder
from tests.training.simulated_run import simulated
from tests.training.tiny_run import TINY

ASYNC = ["regime.mode=async", "regime.max_staleness=2", "regime.generators=2"]


class InTheFirstProcess(Generators):
    """Generators whose batches arrive in any order, without Ray."""

    def __init__(self, regime):
        super().__init__(regime, contextlib.nullcontext)
        self.drawn = InAnyOrder(regime, 0)

    def offer_weights(self, weights, version):
        self._version = self.drawn.version = version

    def _send(self, number, generator):
        self.drawn.issue(number)
        self._assigned[number] = Assignment(number, self._version, generator)

    def _collected(self, wait):
        found = self.drawn.receive(wait)
        for number, _ in found:
            del self._assigned[number]
        return found


def test_all_processes_issue_and_train_on_the_same(tiny, monkeypatch):
    config = tiny("run", *ASYNC, "training.steps=25")
    told = []

    def first(act):
        told.append(pickle.dumps(act()))
        return pickle.loads(told[-1])

    monkeypatch.setattr(hosts, "from_first", first)
    shared = InTheFirstProcess(config.regime)
    ours = list(simulated(config, shared))
    assert shared.drawn.issued == list(range(1, 26)) and shared.in_flight == {}

    words = iter(told)
    monkeypatch.setattr(hosts, "from_first", lambda act: pickle.loads(next(words)))
    monkeypatch.setattr(hosts, "is_first", lambda: False)
    theirs = list(simulated(config, Generators(config.regime, contextlib.nullcontext)))
    assert not list(words)
    for (step, groups, logged, _), (_, others, also, _) in zip(ours, theirs, strict=True):
        assert [group.id for group in groups] == [group.id for group in others], step
        waited = "generators/waited_seconds"
        assert logged | {waited: 0} == also | {waited: 0}, step


# One process of two that train: it notes what on and keeps its part of the weights; the first loses a generator.
TRAINS = """
import sys
import jax
import numpy as np
from recjax.runtime import hosts
from recjax.config import load_config
from recjax.sources.generators import require_ray
from recjax.runs import checkpoint, start; from recjax.training import loop

hosts.LOST_SECONDS = 15
folder, *options, coordinator, _, number = sys.argv[1:]
next_groups, save, steps = loop.next_groups, checkpoint.save, []

def watched(run, state, step):
    steps.append(step)
    if len(steps) == 3 and hosts.is_first():
        import ray
        ray.kill(run.source.sampler._actors[0], no_restart=True)
    state = next_groups(run, state, step)
    with open(f"{folder}/trained{number}.txt", "a") as file:
        print(step, *(group.id for group in state.groups), file=file)
    return state

def saved(manager, state, *options):
    save(manager, state, *options)
    own = [shard.data for leaf in jax.tree.leaves(state.trained.params) for shard in leaf.addressable_shards]
    np.savez(f"{folder}/weights{number}.npz", *own)

loop.next_groups, checkpoint.save = watched, saved
with hosts.connected(coordinator, 2, int(number)):
    config = load_config(f"{folder}/tiny.yaml", options)
    require_ray(config)
    start.train(config)
"""


def trained_on(folder, number):
    """The groups of each step, those of its last time, as a process noted them."""
    lines = (folder / f"trained{number}.txt").read_text().splitlines()
    return {int(step): groups for step, *groups in map(str.split, lines)}


@pytest.mark.slow
def test_two_asynchronous_trainer_processes_resume_after_a_kill(tmp_path, ended, prompt_generators):
    pytest.importorskip("ray")
    (tmp_path / "tiny.yaml").write_text(TINY)
    options = [
        *ASYNC,
        "experience.record=true",
        "evaluation.every=0",
        "training.steps=14",
        "mesh.data=2",
        "mesh.fsdp=2",
    ]
    arguments = ["-c", TRAINS, str(tmp_path), f"output={tmp_path / 'run'}", *options]
    ended += (started := two_of(tmp_path, arguments))
    notes, deadline = tmp_path / "trained1.txt", time.monotonic() + 200
    while not (notes.exists() and len(notes.read_text().splitlines()) >= 8) and time.monotonic() < deadline:
        time.sleep(0.002)
    started[1].send_signal(signal.SIGKILL)  # the last checkpoint being that of step 6
    assert started[0].wait(hosts.LOST_SECONDS + 30) != 0, said(tmp_path, 0)

    ended += (again := two_of(tmp_path, arguments))
    assert [process.wait(240) for process in again] == [0, 0], said(tmp_path, 0) + said(tmp_path, 1)
    steps = trained_on(tmp_path, 0)
    assert steps == trained_on(tmp_path, 1) and list(steps) == list(range(1, 15))
    everything = [f"{batch:06d}/{group:05d}" for batch in range(1, 15) for group in range(4)]
    assert sorted(sum(steps.values(), [])) == everything
    stored = read_columns(tmp_path / "run" / "experience.db")
    assert sorted({row.group_id for row in stored}) == everything and len({row.id for row in stored}) == len(stored)
    versions = {row.group_id: row.policy_version for row in stored}
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(15)) and rows[-1]["generators/restarts"] >= 1
    for row in rows[1:]:
        ages = Counter(str(row["step"] - 1 - versions[group]) for group in steps[row["step"]] for _ in range(4))
        assert ages == row["staleness_rows"] and max(map(int, ages)) <= 2
    # Each process has a whole copy of the weights, split over its two devices.
    ours, theirs = (np.load(tmp_path / f"weights{number}.npz") for number in range(2))
    assert len(ours.files) > 10
    for name in ours.files:
        np.testing.assert_array_equal(ours[name], theirs[name])
