"""Replay, mixing and late rewards in a run: each equals a run that needs none of it, or leaves the trace it must."""

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest

from recjax.config import load_config
from recjax.errors import UserError
from recjax.experience import queue
from recjax.experience.group import Grade
from recjax.planning.dry_run import dry_run, show_dry_run
from recjax.runs.prepare import prepare
from recjax.sources import completing
from recjax.store import missing_logprobs
from recjax.training import loop
from tests.experience.rows import append_columns, read_columns
from tests.marks import slow
from tests.training.counting import CountingLearner, Grades, count, prepared_batch
from tests.training.tiny_run import TINY, train, without_times

TRIVIAL = "experience.record=true"
AGENT = ["task.agent=tests.agents.some_agents:paid_by_answer", "rollout.max_context_tokens=16"]


@pytest.fixture(scope="module")
def expert(tmp_path_factory):
    """A store of three answers to most one-digit sums, all of them right."""
    folder = tmp_path_factory.mktemp("expert")
    (folder / "tiny.yaml").write_text(TINY)
    options = [f"output={folder / 'run'}", TRIVIAL, "training.steps=16", "evaluation.every=0"]
    config = load_config(folder / "tiny.yaml", [*options, "training.checkpoint_every=16"])
    count(config, sample=functools.partial(prepared_batch, prefix="recorded-"))
    drawn = read_columns(folder / "run" / "experience.db")
    kept = [row for place, row in enumerate(drawn) if place % 4 < 3]  # of each group of four
    none = dict(behavior_logprobs=None, policy_version=None, temperature=None, top_k=None, top_p=None)
    append_columns(folder / "store", [row._replace(source="expert", reward=1.0, **none) for row in kept])
    return folder / "store"


def learned(rows):
    """What a run learned from and how: without what only some ways of feeding it log."""
    return [
        {name: row[name] for name in row if not name.startswith("experience/") and name != "source_rows"}
        for row in without_times(rows)
    ]


@pytest.mark.slow
def test_groups_that_take_the_long_way_teach_the_same(tiny):
    ahead = ["regime.sync_offset=2", "regime.sync_interval=2"]
    straight = train(tiny("straight", *ahead))
    fed = train(tiny("fed", *ahead, TRIVIAL))
    assert learned(fed) == learned(straight)
    late = train(tiny("late", "regime.sync_interval=2", "experience.late={shortest: 2, longest: 2}"))
    # Only who draws first differs: rewards that are two rounds late are two batches drawn ahead.
    assert [row["staleness"] for row in late[1:]] == [row["staleness"] for row in straight[1:]]
    assert learned(late) == learned(straight)
    assert [row["experience/waiting_groups"] for row in late[1:]] == [8] * 7
    once = train(tiny("once", "regime.sync_interval=2", "experience.replay={max_reuse: 1, keep_no_signal: true}"))
    assert learned(once) == learned(train(tiny("plain", "regime.sync_interval=2")))


def test_sampled_batches_are_recorded_once(tiny, monkeypatch):
    config = tiny("run", TRIVIAL, "training.steps=5")
    next_groups, calls = loop.next_groups, itertools.count(1)

    def dies_at_five(*arguments):
        result = next_groups(*arguments)
        if next(calls) == 5:  # drawn and recorded, and after the checkpoint of step 3
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(loop, "next_groups", dies_at_five)
    with pytest.raises(KeyboardInterrupt):
        count(config)
    monkeypatch.setattr(loop, "next_groups", next_groups)
    rows = count(config)
    stored = read_columns(Path(config.output) / "experience.db")
    assert len(stored) == 5 * 16
    for row, own in zip(rows[1:], (stored[i : i + 16] for i in range(0, 80, 16)), strict=True):
        np.testing.assert_allclose(row["reward"], np.mean([one.reward for one in own]), rtol=1e-5)
        assert {one.policy_version for one in own} == {row["step"] - 1}


def test_replay_trains_on_each_group_the_configured_times(tiny, monkeypatch):
    seen, pad = [], loop.pad

    def watched(groups, *arguments, **named):
        seen.extend(group.id for group in groups)
        return pad(groups, *arguments, **named)

    monkeypatch.setattr(loop, "pad", watched)
    options = "experience.replay={draw_every: 3, max_reuse: 3, keep_no_signal: true, max_staleness: 8}"
    config = tiny("run", options, "training.steps=9")
    rows = count(config)
    uses = {name: seen.count(name) for name in seen}
    assert len(seen) == 9 * 4 and rows[-1]["experience/drawn_batches"] == 3
    assert uses == dict.fromkeys([f"{batch:06d}/{group:05d}" for batch in (1, 2, 3) for group in range(4)], 3)
    # Of version 0 at steps 1 to 3, then of those drawn at step 4, and so on.
    assert [row["staleness"] for row in rows[1:]] == [0, 1, 2] * 3
    assert (Path(config.output) / "figures" / "experience.png").is_file()


def test_late_rewards_arrive_unless_the_deadline_has_passed(tiny):
    rows = count(tiny("late", "experience.late={shortest: 0, longest: 4}", "training.steps=12", "evaluation.every=0"))
    ages = {int(age) for row in rows[1:] for age in row["staleness_rows"]}
    assert len(ages) > 1 and max(ages) <= 4 + 1
    assert all(value == 0 for name, value in rows[-1].items() if "left_out" in name)
    late = ["experience.late={shortest: 0, longest: 4, deadline: 2}", "training.steps=12", "evaluation.every=0"]
    rows = count(tiny("deadline", *late))
    lost = {name.split("/")[-1]: rows[-1][name] for name in rows[-1] if "left_out" in name}
    assert lost["rows_without_reward"] > 0 and lost["rewards_too_late"] > 0
    sizes = {sum(row["source_rows"].values()) for row in rows[1:]}
    assert len(sizes) > 1 and max(sizes) <= 16  # groups are ragged


@pytest.mark.slow
@pytest.mark.parametrize("missing", [*slow("initial"), "current"])
def test_half_of_every_group_is_the_experts(tiny, expert, missing, monkeypatch):
    seen, pad = [], loop.pad

    def watched(groups, *arguments, **named):
        seen.append(groups)
        return pad(groups, *arguments, **named)

    monkeypatch.setattr(loop, "pad", watched)
    mix = ["experience.mix.store=" + str(expert), f"experience.missing_logprobs={missing}", "evaluation.every=0"]
    rows = train(tiny("run", *mix, "training.steps=4"))
    for row, groups in zip(rows[1:], seen, strict=True):
        own = row["source_rows"]["policy"]
        assert own == 8 and row["source_rows"].get("expert", 0) + own == sum(len(group.completions) for group in groups)
        for group in groups:
            assert [one.source for one in group.completions[:2]] == ["policy"] * 2 and len(group.completions) <= 4
    assert sum(row["source_rows"].get("expert", 0) for row in rows[1:]) > 16
    # Log-probs of the policy as it is make every ratio one at the first, fresh use; those of the initial one do not.
    last = rows[-1]["ratio/max"]
    assert last > 1.001 if missing == "initial" else abs(last - 1) < 1e-5


def test_a_share_of_every_batch_is_the_experts(tiny, expert):
    options = [f"experience.mix={{store: {expert}, share: 0.25, of: batch}}", "experience.missing_logprobs=unneeded"]
    options += ["algorithm.preset=red_weight"]
    rows = count(tiny("run", *options, "regime.sync_offset=1", "evaluation.every=0"))
    assert {tuple(sorted(row["source_rows"].items())) for row in rows[1:]} == {(("expert", 3), ("policy", 12))}
    # The expert's rows have no version, and do not wait for batches that are drawn ahead.
    assert [row["staleness_rows"] for row in rows[1:]] == [{"0": 12}] + [{"1": 12}] * 6


@pytest.mark.parametrize(
    "waits",
    ["regime.sync_offset=3", "experience.replay={draw_every: 2}", *slow("experience.late={shortest: 2, longest: 2}")],
)
def test_current_log_probs_are_those_before_the_first_update(tiny, expert, monkeypatch, waits):
    seen, pad, learner = [], loop.pad, CountingLearner()
    before = []  # the only parameter before each update

    def scored(groups, shape, policy, params, **options):
        of_now = np.float32([-params["checksum"][0]] * 16)
        return [
            group._replace(
                completions=tuple(
                    missing_logprobs._with_logprobs(one, of_now[: len(one.rows[0].tokens)])
                    if one.rows[0].behavior_logprobs is None
                    else one
                    for one in group.completions
                )
            )
            for group in groups
        ]

    def watched(groups, *arguments, **named):
        experts = [one for group in groups for one in group.completions if one.source == "expert"]
        seen.append({one.id: one.rows[0].behavior_logprobs[0] for one in experts})
        return pad(groups, *arguments, **named)

    def updates(trained, *arguments):
        before.append(trained.params["checksum"][0])
        return CountingLearner.update(learner, trained, *arguments)

    monkeypatch.setattr(completing, "with_logprobs", scored)
    monkeypatch.setattr(loop, "pad", watched)
    monkeypatch.setattr(learner, "update", updates)
    mix = [f"experience.mix.store={expert}", "experience.missing_logprobs=current", "evaluation.every=0"]
    count(tiny("run", *mix, waits), learner)
    first = {}
    for checksum, values in zip(before, seen, strict=True):
        assert values
        for name, value in values.items():
            assert value == -first.setdefault(name, checksum)
    assert (len(first) < sum(map(len, seen))) == ("replay" in waits)


@pytest.mark.parametrize("of", ["group", "batch"])
def test_rows_of_an_initial_policy_never_are_stale(tiny, expert, tmp_path, of):
    append_columns(tmp_path / "initial", [row._replace(policy_version=0) for row in read_columns(expert)])
    options = [f"experience.mix={{store: {tmp_path / 'initial'}, share: 0.5, of: {of}}}", "algorithm.preset=red_weight"]
    options += ["experience.missing_logprobs=unneeded", "evaluation.every=0"]
    replay = "experience.replay={max_staleness: 2, max_reuse: 1, keep_no_signal: true}"
    rows = count(tiny("run", *options, replay))[1:]
    assert all(row["source_rows"]["expert"] >= 4 for row in rows)
    # Only the rows that the run samples have an age, so that none is too old and no batch is sampled in its place.
    assert [row["staleness_rows"] for row in rows] == [{"0": 8}] * 7
    assert rows[-1]["experience/drawn_batches"] == 7 and rows[-1]["experience/left_out/stale"] == 0


def test_replay_keeps_single_completions_with_a_batch_baseline(tiny):
    options = ["algorithm.preset=reinforce_pp", "rollout.group_size=1", "evaluation.every=0"]
    rows = count(tiny("run", *options, "experience.replay={draw_every: 2, max_reuse: 2}"))
    assert rows[-1]["experience/drawn_batches"] == 4 and rows[-1]["experience/left_out/no_signal"] == 0


def test_a_run_without_usable_groups_reports_the_reasons(tiny, monkeypatch):
    monkeypatch.setattr(queue, "IDLE_ROUNDS", 3)
    config = tiny("run", "experience.replay.max_reuse=1")
    with pytest.raises(
        UserError, match=r"step 1: 4 batches were sampled, .*left_out/no_signal 16,.*; relax experience.replay$"
    ):
        count(config, sample=functools.partial(prepared_batch, reward=0.0))


@pytest.mark.parametrize(
    ("options", "failure", "words"),
    [
        (
            [],
            "no_reward",
            r"left_out/groups_without_reward 16, grading/no_reward 64\); let the reward function .* grade$",
        ),
        (AGENT, "timeout", r"agent/timeout 64\); correct the agent, or set task.agent_failure_reward$"),
    ],
)
def test_a_run_whose_completions_get_no_reward_says_why(tiny, monkeypatch, options, failure, words):
    monkeypatch.setattr(queue, "IDLE_ROUNDS", 3)

    def sample(*arguments):
        groups, grades = prepared_batch(*arguments)
        return groups, Grades([Grade(None, None, False, failure) for _ in grades.result()])

    with pytest.raises(
        UserError, match=f"step 1: 4 batches were sampled, .*left_out/rows_without_reward 64, .*{words}"
    ):
        count(tiny("run", *options), sample=sample)


def test_a_store_with_different_questions_is_refused_early(tiny, expert):
    mix = [f"experience.mix.store={expert}", "experience.missing_logprobs=current"]
    config = tiny("run", *mix, 'task.arithmetic.template="{a} {op} {b} ="')
    with pytest.raises(ValueError, match="vocabulary|has no completions of the task's"):
        prepare(config)
    subtraction = tiny("run", *mix, "task.arithmetic.problems=[1..9 + 20..29]")
    with pytest.raises(ValueError, match="vocabulary|has no completions of the task's"):
        prepare(subtraction)


@pytest.mark.campaign
def test_a_dry_run_lists_unknown_numbers(tiny, expert, capsys):
    config = tiny("run", "experience.replay.max_reuse=2")
    show_dry_run(config, dry_run(config))
    assert "not known: staleness" in capsys.readouterr().out
    config = tiny("run", f"experience.mix.store={expert}", "experience.missing_logprobs=current")
    assert dry_run(config).staleness == [0] * 7
