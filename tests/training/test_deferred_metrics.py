"""Rows are read a step late, so that the device need not wait, and nothing else about them changes."""

from pathlib import Path

import jax
import numpy as np
import pytest

from recjax.experience import store
from recjax.training import learner, loop
from recjax.training.deferred_metrics import DeferredMetrics
from recjax.training.metrics import read_metrics
from tests.training.tiny_run import train, without_times

ALONE = ["training.checkpoint_every=100", "evaluation.every=0"]


@pytest.fixture
def poisoned(monkeypatch):
    """A function that makes the parameters not finite before update number `at`."""

    def poison(at: int) -> None:
        update, calls = learner.update, []

        def sometimes(state, *args, **options):
            calls.append(1)
            if len(calls) == at:
                state = state._replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
            return update(state, *args, **options)

        monkeypatch.setattr(learner, "update", sometimes)

    return poison


# U: an update is dispatched; R: its numbers are read; E: an evaluation; S: a checkpoint.
@pytest.mark.parametrize(
    ("options", "order"),
    [
        (ALONE, "ES U UR UR UR UR UR UR R ES"),
        ([], "ES U UR UR RES U UR UR RES U RES"),  # both every three steps
        (["training.checkpoint_every=1", "evaluation.every=0"], "ES URS URS URS URS URS URS U RES"),
        (["training.checkpoint_every=100", "evaluation.every=2"], "ES U UR RE U UR RE U UR RE U RES"),
        ([*ALONE, "experience={record: true}"], "ES UR UR UR UR UR UR U RES"),
    ],
    ids=["alone", "both", "checkpoints", "evaluations", "record"],
)
def test_an_update_is_read_once_the_next_is_dispatched_or_where_somebody_needs_it(tiny, monkeypatch, options, order):
    seen = []

    def are_metrics(tree):
        return isinstance(tree, dict) and "loss" in tree

    def watched(letter, function, counts=lambda *args: True):
        def calls(*args, **named):
            if counts(*args):
                seen.append(letter)
            return function(*args, **named)

        return calls

    monkeypatch.setattr(learner, "update", watched("U", learner.update))
    monkeypatch.setattr(learner, "evaluate", watched("E", learner.evaluate))
    monkeypatch.setattr(loop.checkpoint, "save", watched("S", loop.checkpoint.save))
    monkeypatch.setattr(jax, "device_get", watched("R", jax.device_get, are_metrics))
    rows = train(tiny("run", *options))
    assert "".join(seen) == order.replace(" ", "")
    assert [row["step"] for row in rows] == list(range(8))


def test_rows_are_those_of_a_run_that_reads_each_at_once(tiny, monkeypatch):
    options = ["evaluation.every=0", "optimizer.schedule=cosine", "optimizer.warmup_steps=2"]
    late = train(tiny("late", *options))
    hold = DeferredMetrics.hold
    monkeypatch.setattr(DeferredMetrics, "hold", lambda rows, row: (hold(rows, row), rows.settle()))
    at_once = train(tiny("at_once", *options))
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


def test_a_row_that_waits_is_written_when_the_next_step_fails(tiny, monkeypatch):
    config = tiny("run", *ALONE)
    dies_at(monkeypatch, 5)
    with pytest.raises(ValueError, match="no batch"):
        train(config)
    assert [row["step"] for row in read_metrics(Path(config.output) / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_a_step_that_is_not_finite_is_named_though_the_next_one_fails(tiny, monkeypatch, poisoned):
    config = tiny("run", *ALONE)
    poisoned(4)
    dies_at(monkeypatch, 5)
    with pytest.raises(FloatingPointError, match=r"step 4: .*checkpoint is of step 0") as failure:
        train(config)
    assert str(failure.value.__context__) == "no batch"
    assert read_metrics(Path(config.output) / "metrics.jsonl")[-1]["step"] == 3


@pytest.mark.parametrize("at", [4, 5, 6, 7])
def test_nothing_of_a_step_that_is_not_finite_is_kept(tiny, poisoned, at):
    """Of steps 3 and 6 there are checkpoints, of 5 and 7 evaluations, and of 4 neither."""
    config = tiny("run", "evaluation.every=5")
    poisoned(at)
    with pytest.raises(FloatingPointError, match=rf"step {at}: "):
        train(config)
    output = Path(config.output)
    rows = read_metrics(output / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(at))
    assert max(int(folder.name) for folder in (output / "checkpoints").iterdir()) == 3 * ((at - 1) // 3)
    assert (output / "samples" / "latest.jsonl").exists() == (at > 5) and not (output / "samples/after.jsonl").exists()


@pytest.mark.parametrize("how", ["error", "drop"])
def test_tokens_of_probability_zero_end_the_run_or_are_counted(tiny, monkeypatch, how):
    config, update = tiny("run", *ALONE, f"training.impossible_tokens={how}"), learner.update

    def with_impossible(state, frozen, initial, batch, *args, **options):
        logprobs = np.array(batch.behavior_logprobs)
        logprobs[1, 0] = -np.inf
        return update(state, frozen, initial, batch._replace(behavior_logprobs=logprobs), *args, **options)

    monkeypatch.setattr(learner, "update", with_impossible)
    if how == "error":
        words = r"step 1: impossible_tokens/behavior = 1\. .*step 0 in .*training.impossible_tokens=drop drops"
        with pytest.raises(FloatingPointError, match=words):
            train(config)
        return
    for row in train(config)[1:]:
        assert row["impossible_tokens/behavior"] == 1 and row["impossible_tokens/policy"] == 0
        assert all(np.isfinite(value) for value in row.values() if isinstance(value, float))


def test_an_update_that_is_refused_draws_nothing_into_a_record(tiny, monkeypatch):
    config = tiny("run", *ALONE, "experience={record: true}")
    update = learner.update

    # Weights so large need not draw numbers that the store would refuse.
    def overflows(*args, **options):
        state, metrics, learned = update(*args, **options)
        return state, metrics | {"update_norm": metrics["update_norm"] + np.inf}, learned

    monkeypatch.setattr(learner, "update", overflows)
    with pytest.raises(FloatingPointError, match="step 1: update_norm = inf"):
        train(config)
    assert {row.policy_version for row in store.read(Path(config.output) / "experience")} == {0}
