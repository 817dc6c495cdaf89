"""Asynchronous runs: nothing too stale, nothing lost and nothing double, whoever dies or hangs."""

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from recjax.config import RegimeConfig
from recjax.errors import UserError
from recjax.logs.metrics import read_metrics
from recjax.sources import generators
from recjax.sources.generators import Generators
from tests.commands import Command
from tests.experience.rows import read_columns, same
from tests.marks import campaign
from tests.training.tiny_run import train, without_times

pytestmark = pytest.mark.slow
ASYNC = ["regime.mode=async", "regime.max_staleness=2"]


@pytest.fixture(scope="module")
def ray(prompt_generators):
    """Ray with two CPUs, which every run of this file then finds."""
    ray = pytest.importorskip("ray")
    # So that generators which are given functions of this file do not import it, and all of the trainer with it.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def learned(rows):
    """What a run learned from and how."""
    told = ("experience/", "generators/", "source_rows")
    return [{name: row[name] for name in row if not name.startswith(told)} for row in without_times(rows)]


# --- Generators alone, which draw in no time.


@contextlib.contextmanager
def quick(folder):
    """A function that says who drew what, and is slow or wrong where a file in the folder says so."""

    def sample(params, version, number, newest):
        if (folder / f"wrong{number}").exists():
            raise ValueError(f"batch {number} is wrong")
        (folder / f"at{number}").touch()
        time.sleep(0.1)
        while (folder / f"slow{number}").exists():
            time.sleep(0.02)
        while (folder / f"swap{number}").exists():
            if (found := newest()) and found.version > version:
                return found.version, float(found.params["w"].sum()), os.getpid()
            time.sleep(0.02)
        return version, float(params["w"].sum()), os.getpid()

    yield sample


@pytest.fixture
def two(ray, tmp_path):
    """Two generators at work, and the folder that they look into."""
    with Generators(
        RegimeConfig(mode="async", max_staleness=9, generators=2), functools.partial(quick, tmp_path)
    ) as apart:
        apart.offer_weights(functools.partial(dict, w=np.ones(3)), 0)
        yield apart, tmp_path


def collected(apart, count):
    """What arrives next, by number."""
    found = []
    while len(found) < count:
        found += apart.receive(wait=True)
    assert len(dict(found)) == len(found) == count
    return dict(found)


def test_every_batch_arrives_once_whoever_dies_or_hangs(two, monkeypatch):
    apart, folder = two
    said = []
    monkeypatch.setattr(generators.logger, "warning", lambda text, *values: said.append(text % values))
    numbers = itertools.count(1)
    for _ in range(4):
        apart.issue(next(numbers))
    assert list(apart.in_flight) == [1, 2, 3, 4]
    first = collected(apart, 4)
    assert {(version, total) for version, total, _ in first.values()} == {(0, 3.0)} and apart.receive(False) == []
    pids = {pid for *_, pid in first.values()}
    assert len(pids) == 2
    for version, how in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
        apart.offer_weights(functools.partial(dict, w=np.full(3, version)), version)
        mine = [next(numbers) for _ in range(4)]
        for number in mine[:2]:
            (folder / f"slow{number}").touch()
        for number in mine:
            apart.issue(number)
        while not all((folder / f"at{number}").exists() for number in mine[:2]):
            time.sleep(0.02)
        apart.offer_weights(functools.partial(dict, w=np.full(3, version + 10)), version + 10)
        victim = min(pids)
        os.kill(victim, how)
        for number in mine[:2]:
            (folder / f"slow{number}").unlink()
        if how == signal.SIGSTOP:
            apart._answered = [began - 1000 for began in apart._answered]
        found = collected(apart, 4)
        assert sorted(found) == mine and apart.in_flight == {}
        # Two were drawn before, by the other one; two again, from the newest weights.
        assert Counter(drawn_by for drawn_by, *_ in found.values())[version + 10] >= 2
        pids = {pid for *_, pid in found.values()} - {victim}
    assert apart.restarts >= 2
    assert "died" in said[0] and "has not answered for regime.generator_seconds = 600" in said[-1]
    assert all(line.startswith(("generator 1 of 2", "generator 2 of 2")) for line in said)


@pytest.mark.campaign
def test_busy_generators_get_new_weights_and_pass_on_errors(ray, tmp_path):
    numbers = range(1, 5)
    for number in numbers:
        (tmp_path / f"swap{number}").touch()
    with Generators(
        RegimeConfig(mode="async", max_staleness=9, generators=2, swap_within=True), functools.partial(quick, tmp_path)
    ) as apart:
        apart.offer_weights(functools.partial(dict, w=np.zeros(3)), 0)
        for number in numbers:
            apart.issue(number)
        while not all((tmp_path / f"at{number}").exists() for number in numbers):
            time.sleep(0.02)
        apart.offer_weights(functools.partial(dict, w=np.full(3, 4)), 4)
        found = collected(apart, len(numbers))
        assert {(version, total) for version, total, _ in found.values()} == {(4, 12.0)}
        (tmp_path / "wrong5").touch()
        apart.issue(5)
        with pytest.raises(ValueError, match="^batch 5 is wrong$"):
            collected(apart, 1)


@pytest.mark.slow
def test_generators_without_a_free_cpu_get_no_batches(ray, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(generators.logger, "warning", lambda text, *values: said.append(text % values))
    taken = [ray.util.placement_group([{"CPU": 1}]) for _ in range(2)]
    assert all(place.wait(30) for place in taken)
    with Generators(
        RegimeConfig(mode="async", max_staleness=9, generators=2), functools.partial(quick, tmp_path)
    ) as apart:
        apart.offer_weights(functools.partial(dict, w=np.ones(3)), 0)
        (line,) = said
        assert "room for 0 of 2 generators" in line and "a CPU and 0 GPUs each; it has 0 CPUs" in line
        for number in (1, 2):
            apart.issue(number)
        apart._answered = [began - 1000 for began in apart._answered]
        assert apart.receive(wait=False) == []
        apart._answered = [time.monotonic()] * 2
        assert apart.restarts == 0 and "room for 0 of 2" in said.pop()
        ray.util.remove_placement_group(taken.pop())
        assert len({pid for *_, pid in collected(apart, 2).values()}) == 1
        for number in range(3, 7):
            apart.issue(number)
        assert len({pid for *_, pid in collected(apart, 4).values()}) == 1
        ray.util.remove_placement_group(taken.pop())
        assert all(place.wait(30) for place in apart._placements)
        for number in range(7, 11):
            apart.issue(number)
        assert len({pid for *_, pid in collected(apart, 4).values()}) == 2
        assert apart.restarts == 0
    taken = [ray.util.placement_group([{"CPU": 1}]) for _ in range(2)]
    assert all(place.wait(30) for place in taken)  # nothing of the generators is left
    for place in taken:
        ray.util.remove_placement_group(place)


def dies(folder):
    """Something that never comes up."""
    raise OSError("no room")


def test_a_generator_that_keeps_dying_ends_the_run(ray, tmp_path, monkeypatch):
    monkeypatch.setattr(generators, "RESTARTS", 1)
    with Generators(RegimeConfig(mode="async", max_staleness=0), functools.partial(dies, tmp_path)) as apart:
        apart.offer_weights(dict, 0)
        apart.issue(7)
        with pytest.raises(UserError, match=r"generator 1 of 1: it died .*2th time in a row, at batch 7"):
            apart.receive(wait=True)


# --- Whole runs.


def recorded(config):
    """The rows of a run's store, without their times."""
    rows = read_columns(Path(config.output) / "experience.db")
    return [row._replace(time=None) for row in rows]


def _runs(row):
    """The versions of a stored row's tokens, one after the other, and the row."""
    return [version for version, _ in row.version_runs or ((row.policy_version, 1),)], row


AGENT = ["task.agent=tests.agents.some_agents:paid_by_answer", "rollout.max_context_tokens=32"]


@pytest.mark.parametrize(
    "more",
    [[], *campaign([*AGENT, "algorithm.advantage={name: turn_returns}"], ["rollout.top_p=0.8"])],
    ids=["", "agent", "kept_sets"],
)
def test_with_no_staleness_it_is_the_synchronous_run(ray, tiny, more):
    options = ["experience.record=true", "evaluation.every=0", *more]
    config, synchronous = tiny("async", *ASYNC, "regime.max_staleness=0", *options), tiny("sync", *options)
    assert learned(train(config)) == learned(train(synchronous))
    ours, theirs = recorded(config), recorded(synchronous)
    assert ours and all(map(same, ours, theirs)) and len(ours) == len(theirs)
    assert all(bool(row.recorded) == (config.rollout.top_p < 1) for row in ours)


# Trains, noting what on, and loses a generator at its third step.
DANGEROUS = """
import sys
from recjax.config import load_config
from recjax.training import loop
from tests.training.tiny_run import train

next_groups, pad, steps = loop.next_groups, loop.pad, []

def numbered(run, state, step):
    steps.append(step)
    if len(steps) == 3:
        import ray  # later than Ray's start: recjax refuses one that listened on all interfaces
        ray.kill(run.source.sampler._actors[0], no_restart=True)
    return next_groups(run, state, step)

def watched(groups, *arguments, **named):
    with open(sys.argv[1] + "/trained.txt", "a") as file:
        print(steps[-1], *(group.id for group in groups), file=file)
    return pad(groups, *arguments, **named)

loop.next_groups, loop.pad = numbered, watched
train(load_config(sys.argv[1] + "/tiny.yaml", sys.argv[2:]))
"""


def descendants(pid):
    """The processes that a process has started, and those that they have."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    for _ in range(5):
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}


def generators_of_clusters():
    """The processes of generators among this process's descendants."""
    found = set()
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            found |= {pid} if b"Generator" in Path(f"/proc/{pid}/cmdline").read_bytes() else set()
    return found


def is_running(pid):
    """Whether a process is more than an entry that nobody has asked after."""
    try:
        return bool(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


@pytest.mark.parametrize("swaps", [False, *campaign(True)], ids=["whole batches", "swap_within, a cluster"])
def test_killed_generators_and_trainers_lose_and_repeat_nothing(ray, tiny, tmp_path, ended, swaps):
    options = [*ASYNC, "regime.generators=2", "experience.record=true", "evaluation.every=0", "training.steps=14"]
    # Completions of several rounds, between which there may be new weights; and generators of a cluster that lives on.
    if swaps:
        options += ["regime.swap_within=true", "rollout.max_completion_tokens=100"]
        options.append(f"regime.address={ray.get_runtime_context().gcs_address}")
    config, trained = tiny("run", *options), tmp_path / "trained.txt"
    trained.touch()
    command = ["-c", DANGEROUS, tmp_path, f"output={config.output}", *options]
    left_over = set()
    for kill_at in (5, None):  # the last checkpoint being that of step 3
        before = len(trained.read_text().splitlines())
        process = Command(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        ended.append(process)
        while kill_at and process.poll() is None:
            if len(trained.read_text().splitlines()) - before >= kill_at:
                left_over |= descendants(process.pid) | (generators_of_clusters() if swaps else set())
                process.kill()
            time.sleep(0.002)
        _, said = process.communicate()
        assert process.returncode == (-signal.SIGKILL if kill_at else 0), said
    # What was trained on between a checkpoint and a kill is forgotten with it.
    steps = {int(step): groups for step, *groups in map(str.split, trained.read_text().splitlines())}
    everything = [f"{batch:06d}/{group:05d}" for batch in range(1, 15) for group in range(4)]
    assert sorted(itertools.chain(*steps.values())) == everything
    stored = read_columns(Path(config.output) / "experience.db")
    assert sorted({row.group_id for row in stored}) == everything and len({row.id for row in stored}) == 14 * 16
    rows = read_metrics(Path(config.output) / "metrics.jsonl")
    assert rows[-1]["generators/restarts"] == 1 and len(stored) == 14 * 16
    # The staleness that is logged is that of the rows.
    versions = {row.group_id: row.policy_version for row in stored}
    for row in rows[1:]:
        ages = Counter(str(row["step"] - 1 - versions[group]) for group in steps[row["step"]] for _ in range(4))
        assert ages == row["staleness_rows"] and max(map(int, ages)) <= 2
        assert row["experience/left_out/stale"] == row["experience/left_out/stale_tokens"] == 0
        assert row["generators/token_staleness"] <= row["staleness"] + 1e-6 if swaps else True
    runs = [_runs(row) for row in stored]
    assert all(versions == sorted({*versions}) and versions[0] == row.policy_version for versions, row in runs)
    assert swaps == any(len(versions) > 1 for versions, _ in runs)
    # Ray notices by itself that its driver is gone, the last of it after some seconds.
    deadline = time.monotonic() + 60
    while any(map(is_running, left_over)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_over and not any(map(is_running, left_over))
