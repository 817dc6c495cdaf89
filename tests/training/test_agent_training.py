"""Runs with an agent: on-policy ratios, the numbers of a run without one, exact resume, what is logged and refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from recjax.config import load_config
from recjax.runs import checkpoint
from tests.closeness import assert_close
from tests.experience.rows import read_columns
from tests.training.tiny_run import TINY, train, without_times

AGENT = ["rollout.max_context_tokens=32", "evaluation.problems=4"]
SEVERAL = ["task.agent=tests.agents.some_agents:several_turns", *AGENT]
ONE = ["task.agent=tests.agents.some_agents:one_turn", *AGENT]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The rows of a whole run with trajectories of two rows, and its config."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "tiny.yaml").write_text(TINY)

    def make(name, *overrides):
        options = ["experience.record=true", "samples={every: 3, groups: 2}"]
        return load_config(folder / "tiny.yaml", [f"output={folder / name}", *options, *overrides])

    config = make("straight", *SEVERAL)
    return make, config, train(config)


@pytest.mark.slow
def test_at_staleness_zero_the_ratio_is_one(straight):
    *_, rows = straight
    for row in rows[1:]:
        assert row["staleness"] == 0 and row["reward/turns"] == 4 and row["reward/rows"] == 2
        for quantile in ("ratio/q01", "ratio/q50", "ratio/q99", "ratio/max"):
            np.testing.assert_allclose(row[quantile], 1.0, atol=1e-4)
        assert sum(row["staleness_rows"].values()) == 16 and row["agent/raised"] == 0
    assert any(row["gradient_norm"] > 0 for row in rows[1:])


@pytest.mark.slow
def test_kill_and_resume_equals_straight_through(straight, monkeypatch):
    make, _, rows = straight
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.ocp.CheckpointManager, "close", lambda self: None)
        train(make("resumed", *SEVERAL, "training.steps=4"))
    resumed = without_times(train(make("resumed", *SEVERAL)))
    for ours, theirs in zip(resumed, without_times(rows), strict=True):
        shared = ours.keys() & theirs.keys()
        assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


@pytest.mark.slow
def test_the_record_has_every_trajectory(straight):
    _, config, _ = straight
    rows = read_columns(Path(config.output) / "experience.db")
    assert len(rows) >= 7 * 16 and {len(row.rows) for row in rows} == {2}
    samples = (Path(config.output) / "samples" / "after.jsonl").read_text().splitlines()
    assert len(samples) == 4 and json.loads(samples[0])["reward/turns"] == 4


@pytest.mark.slow
def test_saved_completions_have_the_updates_numbers_of_every_row(straight):
    _, config, _ = straight
    lines = (Path(config.output) / "samples" / "training" / "00000001.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 4
    for line in map(json.loads, lines):
        chosen = np.array(line["chosen"], bool)
        assert 0 < chosen.sum() < len(chosen) == len(line["tokens"]) == len(line["coefficient"])
        np.testing.assert_allclose(
            np.array(line["probability_now"])[chosen], np.array(line["probability"])[chosen], rtol=1e-3
        )


@pytest.mark.campaign
def test_one_turn_agent_trains_like_no_agent(straight):
    make, *_ = straight
    # Steps so small that the second begins with the same parameters.
    short = ["training.steps=2", "evaluation.problems=4", "optimizer.learning_rate=1e-6"]
    plain, agents = train(make("plain", *short)), train(make("one", *short, *ONE))
    for ours, theirs in zip(agents, plain, strict=True):
        for name in ("reward", "accuracy", "completion_length", "evaluation/accuracy", "truncated"):
            assert ours.get(name) == theirs.get(name), name
        for name in ("loss", "gradient_norm", "entropy", "ratio/q50", "effective_sample_size"):
            assert_close(ours.get(name, 0), theirs.get(name, 0), 1e-3, least=0.01, err_msg=name)


@pytest.mark.campaign
@pytest.mark.parametrize(("preset", "least"), [("rec_one_side_nois", 64), ("pairwise_consistency", 256)])
def test_packing_and_micro_batches_change_nothing(straight, preset, least):
    make, *_ = straight
    short = [*SEVERAL, "training.steps=1", "evaluation.every=0", f"algorithm.preset={preset}"]
    expected = train(make(f"{preset} whole", *short))[1]
    assert expected["gradient_norm"] > 0
    for name, override in {"packed": f"tokens_per_micro_batch={least}", "parts": "micro_batch_prompts=2"}.items():
        found = train(make(f"{preset} {name}", *short, f"training.{override}"))[1]
        for key in ("loss", "gradient_norm", "entropy"):
            assert_close(found[key], expected[key], 2e-3, least=0.01, err_msg=f"{name}: {key}")


@pytest.mark.slow
def test_micro_batch_smaller_than_a_group_is_refused(straight):
    make, *_ = straight
    config = make("small", *SEVERAL, "algorithm.preset=pairwise_consistency", "training.tokens_per_micro_batch=40")
    with pytest.raises(ValueError, match="tokens_per_micro_batch: .* belong to one group, which this .* raise it"):
        train(config)


TURNS = ["task.agent=tests.agents.some_agents:paid_by_answer", "training.steps=3", *AGENT]


@pytest.mark.campaign
def test_undiscounted_turns_train_as_whole_trajectories(straight):
    make, _, rows = straight
    short = [*SEVERAL, "training.steps=2"]
    same = train(make("whole", *short, "algorithm.advantage={name: turn_returns}"))
    other = train(make("less", *short, "algorithm.advantage={name: turn_returns, discount: 0.5}"))
    for name in ("loss", "gradient_norm"):
        assert_close(same[1][name], rows[1][name], least=0.1, err_msg=name)
    assert not np.allclose(other[1]["loss"], rows[1]["loss"], rtol=1e-3)


@pytest.mark.campaign
@pytest.mark.parametrize("queued", ["regime.sync_offset=1", "experience.replay={max_reuse: 2, draw_every: 2}"])
def test_rewards_of_turns_go_through_a_kill(straight, monkeypatch, queued):
    make, *_ = straight
    name, queued = queued.partition("=")[0], [queued, "training.checkpoint_every=1"]
    advantage = ["algorithm.advantage={name: turn_returns, discount: 0.5}", "evaluation.every=0"]
    options = [*TURNS, *queued, *advantage]
    expected = without_times(train(make(f"unbroken {name}", *options)))
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.ocp.CheckpointManager, "close", lambda self: None)
        train(make(f"killed {name}", *options, "training.steps=1"))
    assert without_times(train(make(f"killed {name}", *options)))[2:] == expected[2:]
    assert all(row["gradient_norm"] > 0 for row in expected[1:])
