"""Completions that a run keeps to be looked at: those of its batches, with what the update made of their tokens."""

import json
from pathlib import Path

import numpy as np
import pytest

from recjax.config import load_config
from recjax.logs import kept_samples
from tests.training.counting import CountingLearner, count
from tests.training.tiny_run import TINY, train

STEPS = ["training.steps=6", "regime.sync_interval=3", "evaluation.every=0", "optimizer.learning_rate=0.05"]
CLIPPED = ["algorithm.preset=rec_one_side_nois", "algorithm.clip={epsilon_high: 0.01, epsilon_low: 0.01}"]


def kept(config) -> dict[int, list[dict]]:
    files = sorted(kept_samples.samples_folder(Path(config.output)).glob("*.jsonl"))
    return {int(file.stem): [json.loads(line) for line in file.read_text().splitlines()] for file in files}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    (folder / "tiny.yaml").write_text(TINY)
    overrides = [*STEPS, *CLIPPED, "samples={every: 3, groups: 2}", f"output={folder / 'run'}"]
    config = load_config(folder / "tiny.yaml", overrides)
    train(config)
    return config, kept(config)


@pytest.mark.slow
def test_first_groups_are_kept_every_third_step(rows):
    config, found = rows
    assert [*found] == [1, 3, 6]
    for step, lines in found.items():
        assert len(lines) == 2 * config.rollout.group_size and len({line["group"] for line in lines}) == 2
        for line in lines:
            assert line["step"] == step and "".join(line["tokens"]).startswith(line["text"])
            columns = ("chosen", "probability", "probability_now", "advantage", "kept", "coefficient")
            assert {len(line[column]) for column in columns} == {len(line["tokens"])}


@pytest.mark.slow
def test_kept_tokens_have_the_updates_ratio_and_clip(rows):
    _, found = rows
    for line in found[1]:  # sampled by these very weights
        np.testing.assert_allclose(line["probability_now"], line["probability"], rtol=2e-3)
        assert all(line["kept"])
    lines = found[3]
    ratio = np.concatenate([np.divide(line["probability_now"], line["probability"]) for line in lines])
    advantage, left = (np.concatenate([line[name] for line in lines]) for name in ("advantage", "kept"))
    outside = ((ratio > 1.01) & (advantage > 0)) | ((ratio < 0.99) & (advantage < 0))
    clear = np.abs(np.abs(ratio - 1) - 0.01) > 2e-3  # of what is written, four digits
    np.testing.assert_array_equal(left[clear] == 0, outside[clear])
    assert 0 < outside.sum() < len(outside)
    coefficient = np.concatenate([line["coefficient"] for line in lines])
    np.testing.assert_allclose(coefficient, advantage * left, rtol=2e-3)


@pytest.mark.slow
def test_rewards_of_a_group_make_its_advantages(rows):
    for lines in rows[1].values():
        for group in {line["group"] for line in lines}:
            own = [line for line in lines if line["group"] == group]
            rewards = np.array([line["reward"] for line in own])
            np.testing.assert_allclose([line["advantage"][0] for line in own], rewards - rewards.mean(), atol=1e-3)


def test_no_more_than_the_config_allows(tiny):
    for name, samples, steps in (("none", "{every: 0}", []), ("few", "{every: 1, megabytes: 0.001}", [1])):
        config = tiny(name, *STEPS, f"samples={samples}")
        count(config)
        assert [*kept(config)] == steps


def test_of_a_minibatch_its_own_groups_are_kept(tiny):
    options = ["training.updates_per_batch=2", "training.minibatches=2", "training.steps=5", "samples={every: 1}"]
    config, seen = tiny("run", *options), {}
    learner = CountingLearner()
    layout = learner.layout

    def watched(batch, rows, doublings):
        seen[len(seen) + 1] = rows.reshape(4, 4)
        return layout(batch, rows, doublings)

    learner.layout = watched
    learner.proximal_logprobs = lambda *arguments: None
    count(config, learner)
    for step, lines in kept(config).items():
        groups = list(dict.fromkeys(line["group"] for line in lines))
        batch = (step - 1) // 4 + 1
        assert groups == [f"{batch:06d}/{place:05d}" for place in range(4) if seen[step][place].all()]
        assert len(groups) == 2
    assert [*seen] == [*kept(config)] == [1, 2, 3, 4, 5]


def test_an_agents_turns_have_their_places_rewards_and_contexts(tiny):
    options = ["task.agent=tests.agents.some_agents:paid_by_answer", "rollout.max_context_tokens=32"]
    config = tiny("agent", *options, "samples={every: 1, groups: 1}", "training.steps=1", "evaluation.every=0")
    count(config)
    for line in kept(config)[1]:
        first, second, third = line["turns"]
        assert 0 < first < second < third == len(line["tokens"]) == second + 1
        assert [place for place, chosen in enumerate(line["chosen"]) if not chosen] == [first]  # read, not written
        assert [*line["contexts"]] == [str(second)] and line["turn_rewards"]


@pytest.mark.slow
def test_packed_batches_keep_the_same(tiny, rows):
    config = tiny("packed", *STEPS, *CLIPPED, "samples={every: 3, groups: 2}", "training.tokens_per_micro_batch=16")
    train(config)
    for step, lines in kept(config).items():
        for mine, theirs in zip(lines, rows[1][step], strict=True):
            assert mine["tokens"] == theirs["tokens"]
            np.testing.assert_allclose(mine["probability_now"], theirs["probability_now"], rtol=5e-3)
