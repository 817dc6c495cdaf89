"""Rewards in a run: graded beside generation, in parts, and what becomes of truncated completions."""

import threading

import jax
import numpy as np
import pytest

from recjax.config import TaskConfig
from recjax.experience.batch import check_graded_parts, to_learn_from
from recjax.experience.group import Grade
from recjax.training import schedule
from tests.closeness import assert_close, assert_same_change
from tests.experience.groups import make_group
from tests.training.counting import count, graded_batch, prepared_batch
from tests.training.test_update import initial, make_batch, step
from tests.training.tiny_run import train, without_times

DRAWN = threading.Condition()
counts = {"drawn": 0, "graded": 0}


def waits_for_the_next_draw(prompts, completions, answers):
    """Grades batches 1, 2, 4 and 5 only once the next one is drawn."""
    with DRAWN:
        counts["graded"] += 1
        batch = counts["graded"]
        if batch in (1, 2, 4, 5):
            assert DRAWN.wait_for(lambda: counts["drawn"] > batch, timeout=20), f"batch {batch} was waited for first"
    return [text.count("1") for text in completions]


def counts_ones(prompts, completions, answers):
    """The same without waiting."""
    return [text.count("1") for text in completions]


@pytest.mark.parametrize(
    "regime",
    [
        ["regime.sync_interval=3"],
        pytest.param(["regime.offline=true"], marks=pytest.mark.slow),
        pytest.param(["regime.sync_interval=3", "experience.record=true"], marks=pytest.mark.slow),
        ["regime.sync_interval=3", "experience.replay={max_reuse: 1, keep_no_signal: true}"],
    ],
)
def test_next_batch_is_sampled_during_grading(tiny, monkeypatch, regime):
    def counted(*arguments):
        drawn = graded_batch(*arguments)
        with DRAWN:
            counts["drawn"] += 1
            DRAWN.notify_all()
        return drawn

    counts.update(drawn=0, graded=0)
    # A checkpoint would wait for the grades of all that is drawn.
    options = [*regime, "training.steps=6", "evaluation.every=0", "training.checkpoint_every=6"]
    waits = tiny("overlapped", *options, f"task.reward={__name__}:waits_for_the_next_draw")
    overlapped = count(waits, sample=counted)
    assert counts["drawn"] == 6
    monkeypatch.setattr(schedule, "samples_ahead", lambda step, steps, regime: False)
    in_turn = count(tiny("in_turn", *options, f"task.reward={__name__}:counts_ones"), sample=counted)
    assert without_times(overlapped) == without_times(in_turn)


def test_reward_parts_reach_the_metrics(tiny):
    options = ["task.reward=gsm8k", "task.reward_weights={length: 1.0}", "regime.sync_interval=4", "training.steps=3"]
    for row in count(tiny("run", *options), sample=graded_batch)[1:]:
        assert row["reward/accuracy"] == 0 and row["reward/format"] == -1
        np.testing.assert_allclose(row["reward"], row["reward/length"] - 0.1, rtol=1e-5)
        np.testing.assert_allclose(row["reward/length"], row["completion_length"] / 3, rtol=1e-5)
        assert {row[f"grading/{reason}"] for reason in ("timeout", "crash", "too_long", "error")} == {0}


def test_a_curriculum_draws_alike_with_more_steps_later(tiny):
    rates_by_batch = {}

    def sample(*arguments, rates):
        rates_by_batch.setdefault(arguments[-1], []).append(dict(rates))
        return graded_batch(*arguments)

    options = ["regime.sync_interval=3", "task.curriculum={}", f"task.reward={__name__}:counts_ones"]
    options += ["evaluation.every=0", "training.checkpoint_every=2"]
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        count(tiny(name, *options, f"training.steps={steps}"), sample=sample)
    assert [*rates_by_batch] == [1, 2, 3, 4] and rates_by_batch[3][0]
    assert all(whole == parts for whole, parts in rates_by_batch.values())


def test_truncated_completions_are_trained_on_masked_or_penalized(tiny):
    options = ["training.steps=2", "evaluation.every=0"]
    runs = {
        "train": count(tiny("train", *options)),
        "mask": count(tiny("mask", *options, "task.truncated=mask")),
        "penalize": count(tiny("penalize", *options, "task.truncated=penalize", "task.truncated_reward=-1")),
    }
    first = {name: rows[1] for name, rows in runs.items()}
    assert 0 < first["train"]["truncated"] < 1, "some of each kind, or there is nothing to see"
    for name in ("reward/score", "accuracy", "completion_length", "truncated"):
        assert len({row[name] for row in first.values()}) == 1, f"{name} is of what was drawn"
    assert len({row["loss"] for row in first.values()}) == 3, "a checksum of what the update gets"
    assert first["mask"]["reward"] == first["train"]["reward"] > first["penalize"]["reward"]


def test_reward_shaping_changes_no_accuracy_or_pass_rate(tiny):
    def sample(*arguments, rates=None):
        return graded_batch(*arguments)

    options = ["training.steps=3", "evaluation.every=0", f"task.reward={__name__}:counts_ones", "task.curriculum={}"]
    settings = {
        "plain": [],
        "overlong": ["task.overlong_tokens=3"],
        "length": ["task.reward_weights={length: -0.5}"],
        "score": ["task.reward_weights={score: 0.5}"],
        "masked": ["task.truncated=mask"],
        "penalized": ["task.truncated=penalize", "task.truncated_reward=-1"],
    }
    runs = {name: count(tiny(name, *options, *each), sample=sample)[1:] for name, each in settings.items()}
    names = ("accuracy", "right_and_ended", "curriculum/pass_rate", "curriculum/problems")
    shown = {name: [[row[metric] for metric in names] for row in rows] for name, rows in runs.items()}
    # The first batch is the same for all; later ones follow from a checksum of the rewards.
    assert len({str(rows[0]) for rows in shown.values()}) == 1 and 0 < shown["plain"][0][0] < 1
    assert len({rows[0]["loss"] for rows in runs.values()}) == len(settings), "the updates got different rewards"


@pytest.mark.slow
def test_masked_rows_are_as_if_never_drawn():
    batch = make_batch()
    cut = np.arange(len(batch.rewards)) % 3 == 1
    masked = to_learn_from(batch._replace(truncated=cut), TaskConfig(truncated="mask"))
    without = jax.tree.map(lambda x: x if len(x) == 4 else x[~cut], batch)
    (params, metrics), (other_params, other_metrics) = step(masked), step(without)
    assert_same_change(initial(), params, other_params)
    assert_close(metrics["loss"], other_metrics["loss"], least=0.1)
    untouched = to_learn_from(batch._replace(truncated=cut), TaskConfig())
    assert not np.isclose(step(untouched)[1]["loss"], metrics["loss"])


def test_completions_with_a_reward_and_no_parts_are_refused():
    (group, *_) = [make_group(1)]
    graded = [Grade(5.0, parts) for parts in ({"right": 1.0}, {"right": 0.0, "turns": 2.0})]
    completions = [
        completion._replace(grade=grade) for completion, grade in zip(group.completions, graded, strict=True)
    ]
    check_graded_parts([group._replace(completions=tuple(completions))], {"turns": 0.0})
    for parts in (None, {}, {"turns": 2.0}):
        last = completions[1]._replace(grade=Grade(5.0, parts))
        with pytest.raises(ValueError, match="completion 'row 11' of source .* has the reward 5 and no reward part"):
            check_graded_parts([group._replace(completions=(completions[0], last))], {"turns": 0.0})
    other = completions[1]._replace(grade=Grade(5.0, {"score": 5.0, "turns": 2.0}), source="other")
    with pytest.raises(ValueError, match="'other' have no reward part in common .right; score"):
        check_graded_parts([group._replace(completions=(completions[0], other))], {"turns": 0.0})


def test_penalized_rows_get_the_reward_and_lose_their_own():
    batch = make_batch()
    batch = batch._replace(truncated=batch.rewards == 2)
    learned = to_learn_from(batch, TaskConfig(truncated="penalize", truncated_reward=-0.5))
    np.testing.assert_array_equal(learned.rewards, np.where(batch.truncated, np.float32(-0.5), batch.rewards))
    assert learned.rewards.dtype == np.float32 and learned.completion_mask is batch.completion_mask


@pytest.mark.slow
def test_batch_of_truncated_rows_moves_nothing(tiny, caplog):
    options = ["task.truncated=mask", "rollout.max_completion_tokens=1", "rollout.group_size=1", "training.steps=1"]
    options += ["algorithm.advantage={name: raw_reward}"]
    rows = train(tiny("run", *options, "rollout.prompts_per_step=1", "evaluation.every=0"))
    assert rows[1]["truncated"] == 1 and rows[1]["loss"] == rows[1]["gradient_norm"] == 0
    assert rows[1]["completion_length"] == 1 and rows[1]["reward"] == rows[1]["reward/score"]
    assert "step 1 trains on nothing (kept_fraction = 0): all its completions are truncated" in caplog.text


@pytest.mark.parametrize("truncated", ["mask", "penalize"])
def test_a_step_that_is_masked_whole_is_said_once(tiny, caplog, truncated):
    def sample(run, weights, version, number):  # all batches but the first reach the limit
        groups, grades = prepared_batch(run, weights, version, number)
        cut = [
            group._replace(completions=tuple(one._replace(truncated=number > 1) for one in group.completions))
            for group in groups
        ]
        return cut, grades

    rows = count(tiny("run", f"task.truncated={truncated}", "evaluation.every=0"), sample=sample)
    assert caplog.text.count("step 2 trains on nothing") == (truncated == "mask")
    assert caplog.text.count("trains on nothing") == (truncated == "mask")
    assert ["frac_reward_zero_std" in row for row in rows[1:3]] == [True, truncated != "mask"]
