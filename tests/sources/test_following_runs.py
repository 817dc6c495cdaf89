"""A run that follows a store: it waits for groups, trains on each once, and so it does when it is killed between."""

import signal
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from recjax.generate_experience import generate
from recjax.logs.metrics import read_metrics
from recjax.training import loop
from tests.experience.rows import append_columns, read_columns
from tests.store.test_feedback import give_rewards
from tests.training.counting import count
from tests.training.tiny_run import train, train_until_killed, without_times

pytestmark = pytest.mark.slow
OPTIONS = ["training.steps=6", "evaluation.every=0", "rollout.max_context_tokens=16", "experience.follow=true"]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """The rows of six batches of four groups, and a folder that no store is in."""
    from recjax.config import load_config
    from tests.training.tiny_run import TINY

    folder = tmp_path_factory.mktemp("sampled")
    (folder / "tiny.yaml").write_text(TINY)
    generate(load_config(folder / "tiny.yaml", []), folder / "store", 6, None, None, "initial")
    return read_columns(folder / "store")


def batch(rows, number, **changes):
    """The rows of a batch as if they had been sampled now."""
    return [row._replace(time=datetime.now(UTC), **changes) for row in rows[16 * number : 16 * (number + 1)]]


@pytest.fixture
def trained_on(monkeypatch):
    """Counts the ids of what every step trained on."""
    seen, next_groups = [], loop.next_groups

    def watched(run, state, step):
        state = next_groups(run, state, step)
        seen.append((step, [one.id for group in state.groups for one in group.completions]))
        return state

    monkeypatch.setattr(loop, "next_groups", watched)
    return seen


def test_it_trains_on_what_comes_once_also_when_killed(tiny, sampled, tmp_path, trained_on, monkeypatch):
    folder = tmp_path / "live"

    def write():
        for number in range(6):
            rows = batch(sampled, number)
            if number % 2:  # rewards come late
                append_columns(folder, [row._replace(reward=None, reward_parts=None, accurate=None) for row in rows])
                time.sleep(0.3)
                give_rewards(folder, [{"id": row.id, "reward": row.reward} for row in reversed(rows)])
            else:
                append_columns(folder, rows)

    writer = threading.Thread(target=write)
    writer.start()
    config = tiny("follows", *OPTIONS, f"experience.store={folder}")
    train_until_killed(config)
    writer.join()
    rows = train(config)
    assert [step for step, _ in trained_on] == [1, 2, 3, 4, 5, 4, 5, 6]
    kept = dict(trained_on)  # of steps 4 and 5 what the run that went on took
    counts = Counter(name for names in kept.values() for name in names)
    assert counts == Counter(row.id for row in sampled)
    assert rows[-1]["step"] == 6 and rows[-1]["follow/rewarded_groups"] == 4
    assert all(row["gradient_norm"] > 0 for row in rows[1:])


def test_a_signal_during_the_wait_writes_a_checkpoint(tiny, sampled, tmp_path, caplog, monkeypatch):
    import logging

    caplog.set_level(logging.INFO)
    folder = tmp_path / "live"
    append_columns(folder, batch(sampled, 0))
    pending = batch(sampled, 1, reward=None, reward_parts=None, accurate=None)
    append_columns(folder, pending)
    config = tiny("follows", *OPTIONS, f"experience.store={folder}", "training.steps=2")

    def stop():
        while "step 2 waits" not in caplog.text:
            time.sleep(0.05)
        signal.raise_signal(signal.SIGTERM)

    # Signals are the main thread's, so it is in this one that the run has to be.
    waiting = threading.Thread(target=stop)
    waiting.start()
    with pytest.raises(loop.Preempted, match="after step 1"):
        train(config)
    waiting.join()
    assert "0 of 4 groups are ready; 4 groups wait: 16 of their 16 completions have no reward yet" in caplog.text
    assert (Path(config.output) / "checkpoints" / "1").is_dir()
    give_rewards(folder, [{"id": row.id, "reward": 0.0} for row in pending])
    assert train(config)[-1]["step"] == 2
    assert [row["step"] for row in read_metrics(Path(config.output) / "metrics.jsonl")] == [0, 1, 2]


def test_newer_groups_take_the_places_of_too_stale_ones(tiny, sampled, tmp_path):
    others = batch(sampled, 2, policy_version=None)  # completions of other models have no staleness
    append_columns(tmp_path / "live", [*batch(sampled, 0), *batch(sampled, 1), *others])
    options = [f"experience.store={tmp_path / 'live'}", "regime.max_mean_staleness=0.5"]
    options += ["training.steps=2", "training.checkpoint_every=1"]
    too_long = threading.Timer(120, signal.raise_signal, [signal.SIGTERM])
    too_long.start()
    rows = count(tiny("follows", *OPTIONS, *options))
    too_long.cancel()
    assert rows[-1]["step"] == 2 and rows[-1]["experience/left_out/stale"] == 4


def test_a_waiting_step_says_which_groups_were_left_out(tiny, sampled, tmp_path, caplog):
    append_columns(tmp_path / "live", batch(sampled, 0, reward=1.0))
    options = [f"experience.store={tmp_path / 'live'}", "experience.replay={max_reuse: 2}"]

    def stop():
        while "step 1 waits" not in caplog.text:
            time.sleep(0.05)
        signal.raise_signal(signal.SIGTERM)

    waiting = threading.Thread(target=stop)
    waiting.start()
    with pytest.raises(loop.Preempted, match="after step 0"):
        count(tiny("follows", *OPTIONS, *options))
    waiting.join()
    (line,) = [each.getMessage() for each in caplog.records if "step 1 waits" in each.getMessage()]
    assert "0 of 4 groups are ready" in line and "experience/left_out/no_signal 4" in line


@pytest.mark.campaign
def test_followed_rows_train_like_a_store_at_rest(tiny, sampled, tmp_path):
    folder = tmp_path / "live"
    append_columns(folder, batch(sampled, 0))
    options = ["training.steps=1", f"experience.store={folder}"]
    at_rest = train(tiny("at rest", *options))
    follows = train(tiny("follows", *OPTIONS, *options))
    for name in ("loss", "gradient_norm", "reward", "accuracy", "ratio/max", "completion_length", "staleness"):
        assert without_times(follows)[1][name] == pytest.approx(at_rest[1][name], rel=1e-4, abs=1e-5), name


@pytest.mark.campaign
def test_sessions_with_several_rows_are_trained_on(tiny, sampled, tmp_path):
    rows = batch(sampled, 0)
    sessions = []
    for row in rows[:8]:
        (first,) = row.record.completion.rows
        sessions.append(row._replace(rows=(first, first._replace(mask=np.arange(len(first.tokens)) != 1))))
    none = dict(tokenizer=None, prompt_tokens=None, completion_tokens=None, completion_mask=None)
    unknown = dict(behavior_logprobs=None, policy_version=None, temperature=None, top_k=None, top_p=None)
    texts = [row._replace(**none, **unknown) for row in rows[8:]]
    folder = tmp_path / "live"
    append_columns(folder, sessions)
    append_columns(folder, [row for row in texts if row.completion or not row.truncated])
    options = ["training.steps=1", f"experience.store={folder}", "experience.missing_logprobs=current"]
    metrics = train(tiny("follows", *OPTIONS, *options))[1]
    sampled_tokens = sum(row.record.completion.sampled_tokens for row in sessions)
    sampled_tokens += sum(len(row.completion_tokens) for row in rows[8:])
    assert metrics["gradient_norm"] > 0 and metrics["completion_length"] == pytest.approx(sampled_tokens / 16)
    assert metrics["ratio/max"] == pytest.approx(1, abs=1e-3)
    assert metrics["staleness_rows"] == {"0": 8}
