"""Warnings about runs that learn nothing or collapse: when they come, what they say, and that they come once."""

import math

import numpy as np
import pytest

from recjax.logs.metrics import batch_metrics, task_metrics
from recjax.logs.warnings import WarningState, new_warnings, warning_steps
from tests.training.counting import Altered, CountingLearner, count, prepared_batch
from tests.training.test_update import make_batch

# A row of a healthy on-policy step.
ROW = {"loss": 0.1, "kept_fraction": 1.0, "truncated": 0.0, "frac_reward_zero_std": 0.75, "advantage/mean_square": 0.2}
ROW |= {"reward": 0.4, "accuracy": 0.4, "effective_sample_size": 1.0, "staleness": 0.0}
SILENT = {"frac_reward_zero_std": 1.0, "advantage/mean_square": 0.0}
ZERO = SILENT | {"reward": 0.0, "accuracy": 0.0}
MASKED = {"kept_fraction": 0.0, "truncated": 1.0, "effective_sample_size": 0.0, "advantage/mean_square": 0.0}
FAR = {"effective_sample_size": 0.1, "staleness": 9.0}


def warnings(*changes: dict) -> list[tuple[int, str]]:
    """(step, warning) of all warnings about steps that differ from ROW in `changes`."""
    state = WarningState()
    said = []
    for step, change in enumerate(changes, 1):
        row = {name: value for name, value in (ROW | change).items() if value is not None}
        state, texts = new_warnings(state, row | {"step": step})
        said += [(step, text) for text in texts]
    return said


@pytest.mark.parametrize(
    ("changes", "step", "words"),
    [
        ([ZERO] * 9, 3, ["steps 1 to 3 have no signal", "reward = 0, accuracy = 0", "too hard", "#rewards-are-equal"]),
        ([{}, ZERO, ZERO, {}, *[ZERO] * 9], 7, ["steps 5 to 7 have no signal"]),
        ([SILENT | {"accuracy": 1.0}] * 3, 3, ["too easy"]),
        ([SILENT] * 3, 3, ["one text for each prompt"]),
        (
            [ZERO | {"grading/error": 0, "agent/raised": 16}] * 3,
            3,
            ["agents (agent/raised = 16), or the problems are too hard"],
        ),
        ([SILENT | {"frac_reward_zero_std": None}] * 3, 3, ["have no signal"]),  # groups of one completion
        ([{}, MASKED, MASKED, MASKED], 2, ["step 2 trains on nothing (kept_fraction = 0)", "truncated = mask"]),
        ([MASKED | {"truncated": 0.5}], 1, ["algorithm.selection drops all"]),
        ([MASKED | {"truncated": math.nan, "agent/raised": 16}], 1, ["agent/raised = 16"]),
        ([{}, *[FAR] * 9], 6, ["effective_sample_size of steps 2 to 6 is 0.1, below 0.2", "9 optimizer steps"]),
        ([FAR | {"staleness": 0.0}] * 5, 5, ["trainer and sampler disagree"]),
        ([FAR | {"staleness": None}] * 5, 5, ["another policy sampled"]),
    ],
)
def test_a_sign_is_said_once_with_its_reason(changes, step, words):
    ((at, text),) = warnings(*changes)
    assert at == step and not [each for each in words if each not in text]


@pytest.mark.parametrize(
    "change",
    [
        {},
        ZERO | {"loss": None},  # an evaluation
        {"advantage/mean_square": 0.0},  # advantages that do not follow from rewards
        {"frac_reward_zero_std": 1.0},  # groups that an algorithm compares with each other
        ZERO | {"teacher_kl": 0.3},  # a teacher's run without rewards
        {"advantage/mean_square": None, "effective_sample_size": None, "kept_fraction": None},
        {"effective_sample_size": math.nan, "advantage/mean_square": math.nan},
        {"effective_sample_size": 0.3},
    ],
)
def test_a_healthy_run_is_not_warned_of(change):
    assert warnings(*[change] * 9) == []


def test_all_signs_of_a_run_are_said():
    texts = [text for _, text in warnings(*[ZERO | FAR] * 6, MASKED)]
    assert [text.split()[0] for text in texts] == ["steps", "the", "step"]


def test_each_command_gives_a_warning_once(tiny, caplog):
    def sample(*arguments):
        return prepared_batch(*arguments, reward=0.0)

    class Silent(CountingLearner):
        def update(self, *arguments):
            trained, measured, learned = super().update(*arguments)
            return trained, measured | {"advantage/mean_square": 0.0}, learned

    options = ["evaluation.every=2", "training.checkpoint_every=7"]
    for steps, said in ((7, 1), (14, 2)):
        rows = count(tiny("run", *options, f"training.steps={steps}"), Silent(), sample)
        assert caplog.text.count("have no signal") == said
    assert {row["frac_reward_zero_std"] for row in rows[1:]} == {1.0}
    caplog.clear()
    count(tiny("healthy", *options), Altered(3, **{"advantage/mean_square": 0.0}))
    assert not [each for each in caplog.records if each.name.endswith("start")]


def test_the_share_of_groups_with_equal_rewards():
    batch = make_batch()
    groups = np.unique(batch.group_ids)
    batch = batch._replace(rewards=np.where(batch.group_ids == groups[0], np.float32(1), batch.rewards))
    assert np.ptp(batch.rewards[batch.group_ids == groups[1]]) > 0
    name, rows = "frac_reward_zero_std", batch.completion_mask.any(-1)
    spreads = [np.ptp(batch.rewards[rows & (batch.group_ids == group)]) == 0 for group in groups]
    assert batch_metrics(1, batch, batch)[name] == np.mean(spreads) > 0
    hidden = batch._replace(completion_mask=batch.completion_mask & (batch.group_ids == groups[0])[:, None])
    assert batch_metrics(1, batch, hidden)[name] == 1
    assert name not in batch_metrics(1, batch, batch._replace(group_ids=np.arange(len(rows))))


def test_rows_without_a_verdict_have_no_accuracy():
    batch = make_batch()
    rows = batch.completion_mask.any(-1)
    unknown = batch._replace(accurate=np.full(len(rows), np.nan, np.float32))
    metrics = batch_metrics(1, unknown, unknown)
    assert not {"accuracy", "right_and_ended"} & metrics.keys() and "reward" in metrics
    place = np.argmax(rows)
    known = unknown._replace(accurate=np.where(np.arange(len(rows)) == place, np.float32(1), unknown.accurate))
    assert "accuracy" not in batch_metrics(1, known, known), "that of one row is no mean over the batch"
    graded = [({"task": "a"}, None, 0.5), ({"task": "a"}, True, 1.0), ({"task": "b"}, True, None)]
    assert task_metrics(graded) == {"reward/a": 0.75, "accuracy/b": 1.0}
    ((_, warning),) = warnings(*[SILENT | {"accuracy": None}] * 3)
    assert "accuracy =" not in warning and "reward = 0.4)" in warning


def test_rows_without_numbers_have_their_signs_too():
    """metrics.jsonl has no reward, accuracy or share of truncated completions where these are NaN."""
    unknown = {"reward", "accuracy", "truncated"}
    rows = [ROW | SILENT, ROW | SILENT, ROW | SILENT, ROW | MASKED]
    rows = [{name: row[name] for name in row.keys() - unknown} | {"step": step} for step, row in enumerate(rows, 1)]
    assert sorted(warning_steps(rows).values()) == [3, 4]
