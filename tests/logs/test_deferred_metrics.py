"""Rows are read a step late, so that the device need not wait, and nothing else about them changes."""

import functools
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from recjax.logs.metrics import MetricsWriter, read_metrics
from recjax.runs import checkpoint
from recjax.runtime.clocks import DeviceClock
from recjax.store.store import Store
from recjax.training import learner, loop
from tests.experience.rows import read_columns
from tests.marks import slow
from tests.training.counting import Altered, CountingLearner, count
from tests.training.tiny_run import train, without_times

ALONE = ["training.checkpoint_every=100", "evaluation.every=0"]


# U: an update is dispatched; R: its numbers are read; W: its batch is recorded; E: an evaluation; S: a checkpoint.
@pytest.mark.parametrize(
    ("options", "order"),
    [
        pytest.param(ALONE, "ES U UR UR UR UR UR UR R ES", marks=pytest.mark.slow),
        ([], "ES U UR UR RES U UR UR RES U RES"),  # both every three steps
        pytest.param(
            ["training.checkpoint_every=1", "evaluation.every=0"],
            "ES URS URS URS URS URS URS U RES",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["training.checkpoint_every=100", "evaluation.every=2"],
            "ES U UR RE U UR RE U UR RE U RES",
            marks=pytest.mark.slow,
        ),
        ([*ALONE, "experience={record: true}"], "ES UW URW URW URW URW URW URW RES"),
    ],
    ids=["alone", "both", "checkpoints", "evaluations", "record"],
)
def test_updates_are_read_after_the_next_dispatch(tiny, monkeypatch, options, order):
    seen = []

    def are_metrics(tree):
        return isinstance(tree, dict) and "loss" in tree

    def watched(letter, function, counts=lambda *args: True):
        def calls(*args, **named):
            if counts(*args):
                seen.append(letter)
            return function(*args, **named)

        return calls

    for letter, name in (("U", "update"), ("E", "evaluate")):
        monkeypatch.setattr(CountingLearner, name, watched(letter, getattr(CountingLearner, name)))
    monkeypatch.setattr(checkpoint, "save", watched("S", checkpoint.save))
    monkeypatch.setattr(Store, "append", watched("W", Store.append))
    monkeypatch.setattr(jax, "device_get", watched("R", jax.device_get, are_metrics))
    rows = count(tiny("run", *options))
    assert "".join(seen) == order.replace(" ", "")
    assert [row["step"] for row in rows] == list(range(8))


def test_deferred_rows_equal_rows_read_at_once(tiny, monkeypatch):
    late = count(tiny("late", "evaluation.every=0"))
    hold = MetricsWriter.hold
    monkeypatch.setattr(MetricsWriter, "hold", lambda rows, row: (hold(rows, row), rows.settle()))
    at_once = count(tiny("at_once", "evaluation.every=0"))
    assert without_times(late) == without_times(at_once)
    assert [[*row] for row in late] == [[*row] for row in at_once]
    for rows in (late, at_once):
        assert all(np.diff([row["wall_seconds"] for row in rows[1:]]) > 0)


def dies_at(monkeypatch, at):
    """Has the batch of step `at` fail."""
    next_groups = loop.next_groups

    def fails(run, state, step, *stopping):
        if step == at:
            raise ValueError("no batch")
        return next_groups(run, state, step, *stopping)

    monkeypatch.setattr(loop, "next_groups", fails)


def test_a_held_row_survives_a_failing_step(tiny, monkeypatch):
    config = tiny("run", *ALONE)
    dies_at(monkeypatch, 5)
    with pytest.raises(ValueError, match="no batch"):
        count(config)
    assert [row["step"] for row in read_metrics(Path(config.output) / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_a_step_without_finite_numbers_is_named(tiny, monkeypatch):
    config = tiny("run", *ALONE)
    dies_at(monkeypatch, 5)
    with pytest.raises(FloatingPointError, match=r"step 4: .*checkpoint is of step 0") as failure:
        count(config, Altered(4, loss=np.nan))
    assert str(failure.value.__context__) == "no batch"
    assert read_metrics(Path(config.output) / "metrics.jsonl")[-1]["step"] == 3


@pytest.mark.parametrize("at", [6, *slow(4, 5, 7)])
def test_a_step_without_finite_numbers_leaves_nothing(tiny, at):
    """Of steps 3 and 6 there are checkpoints, of 5 and 7 evaluations, and of 4 neither."""
    config = tiny("run", "evaluation.every=5")
    with pytest.raises(FloatingPointError, match=rf"step {at}: "):
        count(config, Altered(at, gradient_norm=np.nan))
    output = Path(config.output)
    rows = read_metrics(output / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(at))
    assert max(int(folder.name) for folder in (output / "checkpoints").iterdir()) == 3 * ((at - 1) // 3)
    assert (output / "samples" / "latest.jsonl").exists() == (at > 5) and not (output / "samples/after.jsonl").exists()
    assert without_times(count(config)) == without_times(count(tiny("straight", "evaluation.every=5")))


def test_tokens_of_probability_zero_end_the_run(tiny):
    words = r"step 2: impossible_tokens/behavior = 1\. .*step 0 in .*training.impossible_tokens=drop drops"
    with pytest.raises(FloatingPointError, match=words):
        count(tiny("run", *ALONE), Altered(2, **{"impossible_tokens/behavior": 1.0}))


@pytest.mark.slow
def test_dropped_tokens_of_probability_zero_are_counted(tiny, monkeypatch):
    config, update = tiny("run", *ALONE, "training.impossible_tokens=drop", "training.steps=2"), learner.update

    def with_impossible(state, batch, *args, **options):
        logprobs = np.array(batch.behavior_logprobs)
        logprobs[1, 0] = -np.inf
        return update(state, batch._replace(behavior_logprobs=logprobs), *args, **options)

    monkeypatch.setattr(learner, "update", with_impossible)
    rows = train(config)[1:]
    assert len(rows) == 2
    for row in rows:
        assert row["impossible_tokens/behavior"] == 1 and row["impossible_tokens/policy"] == 0
        assert all(np.isfinite(value) for value in row.values() if isinstance(value, float))


def test_a_refused_update_draws_nothing_into_a_record(tiny):
    config = tiny("run", *ALONE, "experience={record: true}")
    # Weights so large need not draw numbers that the store would refuse.
    with pytest.raises(FloatingPointError, match="step 1: update_norm = inf"):
        count(config, Altered(1, update_norm=np.inf))
    assert {row.policy_version for row in read_columns(Path(config.output) / "experience.db")} == {0}


def test_a_device_is_idle_between_its_programs():
    now = [0.0]
    clock = DeviceClock(lambda: now[0])

    def at(seconds, happens, *arguments):
        now[0] = seconds
        return happens(*arguments)

    at(1, clock.call)  # the first program: nothing is known of before
    assert clock.idle_seconds == 0
    at(3, clock.end)
    at(7, clock.call)
    assert clock.idle_seconds == 4
    ends = Scripted()
    ended = clock.wait_for(ends)
    at(8, clock.call)  # while the device computes
    assert clock.idle_seconds == 4
    now[0] = 20
    ends.now.set()
    ended.result()
    at(30, clock.call)  # after a later call, the end of an earlier program says nothing
    assert clock.idle_seconds == 4
    ends = Scripted()
    ended = clock.wait_for({"loss": ends})
    now[0] = 40
    ends.now.set()
    ended.result()
    at(45, clock.call)
    assert clock.idle_seconds == 9


class Scripted:
    """An array that the device has computed once an event is set."""

    def __init__(self):
        self.now = threading.Event()

    def block_until_ready(self):
        self.now.wait()
        return self


def test_rows_have_the_devices_idle_seconds(tiny, monkeypatch):
    """A host that takes a second between the update's end and the next call, by a clock that nothing else moves."""
    now = [0.0]
    monkeypatch.setattr(DeviceClock, "__init__", functools.partialmethod(DeviceClock.__init__, lambda: now[0]))
    wait_for = DeviceClock.wait_for
    monkeypatch.setattr(DeviceClock, "wait_for", lambda clock, result: wait_for(clock, result).result())
    padded = loop.padded

    def slowly(run, groups):
        now[0] += 1
        return padded(run, groups)

    monkeypatch.setattr(loop, "padded", slowly)
    rows = count(tiny("run", *ALONE))
    assert [row["device_idle_seconds"] for row in rows[1:]] == [1] * 7
