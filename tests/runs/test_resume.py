"""Kill and resume equals straight through: one table of every way that groups arrive and every moment of a kill.

A learner that computes nothing goes through most rows; the real one, with its weights, through those of REAL.
"""

import functools
import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from recjax.experience.group import Grade
from recjax.logs.metrics import read_metrics
from recjax.runs import checkpoint, provenance
from recjax.runs import folder as run_folder
from recjax.runs.spec import check_data, spec_of
from recjax.runs.stored_runs import ENVIRONMENT, starts
from tests.experience.rows import append_columns, read_columns
from tests.marks import slow_except
from tests.training.counting import CountingLearner, Grades, count, graded_batch, killed, prepared_batch
from tests.training.tiny_run import train, train_until_killed, without_times

LATE = "experience.late={shortest: 0, longest: 3, deadline: 2}"
REPLAY = "experience.replay={draw_every: 2, half_life: 3.0, priority: reward_spread}"
MIX = ["experience.mix.store={store}", "experience.missing_logprobs=unneeded", "algorithm.preset=red_weight"]
# Checkpoints of steps 3 and 6 are in the middle of a batch.
UPDATES = ["training.updates_per_batch=2", "training.minibatches=2"]
FOLLOW = ["experience.store={store}", "experience.follow=true", "rollout.max_context_tokens=16"]
AGENT = ["task.agent=tests.agents.some_agents:paid_by_answer", "rollout.max_context_tokens=16"]
TURNS = "algorithm.advantage={name: turn_returns, discount: 0.5}"
OF_AGENTS = "experience.mix.store={agents}"
SUMS = 'arithmetic: {problems: ["1..9 + 1..9"], template: "{a}{op}{b}="}'
TASKS = {"sums": f"{SUMS}, weight: 3", "more": SUMS.replace("1..9", "2..8"), "watched": f"{SUMS}, weight: 0"}
MIXTURE = [f"task.mixture.{name}={{{task}}}" for name, task in TASKS.items()]
MIXTURE += ["task.arithmetic=null", "task.reward=null"]
CURRICULUM = "task.curriculum={}"
TAUGHT = ["model.teacher=policy", "task.teacher_template={better}={prompt}", "task.teacher_tokens=8"]
TAUGHT += ["algorithm.teacher_divergence={coefficient: 0.5}"]
GRADED = "rewards from worker processes, interval"
FEEDS = {
    "on policy": [],
    "interval": ["regime.sync_interval=6"],  # after the checkpoint of step 3 the sampler still needs its copy
    "offset": ["regime.sync_offset=2"],
    "interval and offset": ["regime.sync_interval=3", "regime.sync_offset=2"],
    "offline": ["regime.offline=true"],
    "late": [LATE],
    "replay": [REPLAY],
    "replay, keeping groups without signal": ["experience.replay={max_reuse: 2, draw_every: 2, keep_no_signal: true}"],
    "refill": ["experience.refill={}"],
    "refill, replay": ["experience.refill={}", REPLAY.replace("draw_every: 2", "max_reuse: 3")],
    "record": ["experience.record=true"],
    "store": ["experience.store={store}"],
    "mix of rows": [*MIX],
    "mix of groups": [*MIX, "experience.mix.of=batch"],
    "updates": [*UPDATES],
    "updates, offset, interval": [*UPDATES, "regime.sync_offset=1", "regime.sync_interval=2"],
    "updates, a teacher's prompts": [*UPDATES, *TAUGHT],
    "updates, store": [*UPDATES, "experience.store={store}"],
    "updates, follow": [*UPDATES, *FOLLOW],
    "updates, late, replay, mix": [*UPDATES, "experience.late={longest: 1}", REPLAY, *MIX],
    "agents": [*AGENT, TURNS],
    "agents, late, replay, record": [*AGENT, TURNS, LATE, REPLAY, "experience.record=true"],
    "agents, a store of trajectories": [*AGENT, TURNS, "experience.store={agents}"],
    "agents, a store of single turns": [*AGENT, TURNS, "experience.store={store}"],
    "agents, mix of rows": [*AGENT, TURNS, OF_AGENTS],
    "agents, mix of groups, offset": [*AGENT, TURNS, OF_AGENTS, "experience.mix.of=batch", "regime.sync_offset=2"],
    "a store of trajectories": ["experience.store={agents}"],
    "mix of trajectories": [OF_AGENTS, "experience.mix.of=batch", TURNS],
    "mixture": [*MIXTURE],
    "mixture, curriculum, offset, late": [*MIXTURE, CURRICULUM, "regime.sync_offset=1", LATE],
    "mixture, agents, curriculum": [*MIXTURE, *AGENT, TURNS, CURRICULUM],
    "curriculum, replay": [CURRICULUM, REPLAY],
    "curriculum, refill, interval": [CURRICULUM, "experience.refill={}", "regime.sync_interval=3"],
    GRADED: ["task.reward=gsm8k", "task.reward_weights={length: 1.0}", "regime.sync_interval=4"],
    "late, replay, mix, record, interval": [LATE, REPLAY, *MIX, "experience.record=true", "regime.sync_interval=2"],
}

# Rows for the real learner: options, and the updates of each call in whose place it is killed.
REAL = {
    "real weights, interval and offset": (["regime.sync_interval=3", "regime.sync_offset=2"], [5]),
    "real weights, adapters": (
        ["regime.sync_interval=2", "model.lora={rank: 2, alpha: 8, targets: [query, down]}"],
        [5],
    ),
    "real weights, a run that continues another": (
        [
            "model.run={first}",
            "model.decoder=null",
            "optimizer.schedule={name: linear_schedule, end_value: 0.0}",
            "algorithm.reference_kl={coefficient: 0.1}",
        ],
        [5],
    ),
    "real weights, score centering, replay": (
        ["rollout.recorded_top_k=4", "algorithm.score_centering={coefficient: 1.0}", REPLAY, "regime.sync_interval=2"],
        [5],
    ),
    "real weights, oversample, replay": (["rollout.oversample=2", REPLAY, "regime.sync_interval=2"], [5]),
    "real weights, headroom and drift, updates": (
        [*UPDATES, "experience.replay={draw_every: 2, priority: headroom, order: highest, max_drift: 1.0}"],
        [5],
    ),
    "real weights, a teacher with averaged weights, replay": (
        [*TAUGHT, "model.teacher_rate=0.3", REPLAY, "regime.sync_interval=2"],
        [5],
    ),
    "real weights, drift, interval": (["rollout.drift={weights: noise, scale: 0.1}", "regime.sync_interval=2"], [5]),
    # With log-probs of the policy as it is when a step takes the rows.
    "real weights, late, replay, mix of texts, interval": (
        [
            LATE,
            REPLAY,
            "experience.mix.store={texts}",
            "experience.missing_logprobs=current",
            "regime.sync_interval=2",
        ],
        [2, 5],
    ),
}

QUICK = ("on policy", "interval", "updates, late, replay, mix", "agents, late, replay, record")
QUICK += ("real weights, interval and offset",)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Name → path of a store that a run of seven steps records, which is made when it is first asked for.

    `store` has single turns, `agents` trajectories, and `texts` the turns of `store` without log-probs.
    """
    from recjax.config import load_config
    from tests.training.tiny_run import TINY

    folder = tmp_path_factory.mktemp("recorded")
    (folder / "tiny.yaml").write_text(TINY)

    @functools.cache
    def path(name):
        if name == "texts":
            none = dict(behavior_logprobs=None, policy_version=None, temperature=None, top_k=None, top_p=None)
            rows = [row._replace(source="expert", **none) for row in read_columns(path("store"))]
            append_columns(folder / "texts.db", rows)
            return f"{folder}/texts.db"
        options = [f"output={folder / name}", "experience.record=true", "evaluation.every=0"]
        options += AGENT if name == "agents" else []
        sample = functools.partial(prepared_batch, prefix="recorded-")
        count(load_config(folder / "tiny.yaml", options), sample=sample)
        return f"{folder / name}/experience.db"

    return path


def killed_in_batch(sample, at: int):
    """A source that raises KeyboardInterrupt in place of its batch number `at`, and else is `sample`."""
    calls = []

    def killed_sample(*arguments, **named):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return sample(*arguments, **named)

    return killed_sample


def resumes_with_real_weights(tiny, options, kills):
    """Trains straight through, and in calls of which each is killed some updates after it began."""
    if "model.run={first}" in options:
        train(tiny("first", "training.steps=4"))
        options = [option.replace("{first}", tiny("first").output) for option in options]
    straight, config, updates = train(tiny("straight", *options)), tiny("stopped", *options), 0
    for kill in kills:
        train_until_killed(config, at=kill)
        updates += kill - 1
        assert read_metrics(Path(config.output) / "metrics.jsonl")[-1]["step"] == updates
        updates -= updates % 3  # the step of the newest checkpoint
    assert updates == 3
    assert without_times(train(config)) == without_times(straight)
    figures = {path.name for path in (Path(config.output) / "figures").iterdir()}
    assert ("experience.png" in figures) == any(option.startswith("experience.") for option in options)


@pytest.mark.parametrize("feed", slow_except({**FEEDS, **REAL}, *QUICK))
def test_kill_and_resume_equals_straight_through(tiny, stores, feed, monkeypatch):
    options, kills = REAL.get(feed) or (FEEDS[feed], [])
    options = [re.sub(r"\{(store|agents|texts)\}", lambda name: stores(name[1]), option) for option in options]
    if kills:
        resumes_with_real_weights(tiny, options, kills)
        return
    sample = graded_batch if feed == GRADED else prepared_batch
    straight = count(tiny("straight", *options), sample=sample)
    assert [row["step"] for row in straight] == list(range(8))
    assert len({row["loss"] for row in straight[1:]}) == 7

    config, save = tiny("stopped", *options), checkpoint.save
    with pytest.raises(KeyboardInterrupt):  # in an update, before the first checkpoint after that of step 0
        count(config, killed(at=2), sample)
    # With updates, the second batch comes after that checkpoint.
    if "updates" not in feed and not any(option.startswith("experience.store") for option in options):
        with pytest.raises(KeyboardInterrupt):
            count(config, sample=killed_in_batch(sample, at=2))

    def killed_at(step, is_saved):
        def kills(manager, state, *options):
            if is_saved or state.step != step:
                save(manager, state, *options)
            if state.step == step:
                raise KeyboardInterrupt

        return kills

    for step, is_saved in ((3, False), (3, True), (6, True)):
        monkeypatch.setattr(checkpoint, "save", killed_at(step, is_saved))
        with pytest.raises(KeyboardInterrupt):
            count(config, sample=sample)
    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(KeyboardInterrupt):  # after the checkpoint of step 6
        count(config, killed(at=1), sample)
    assert without_times(count(config, sample=sample)) == without_times(straight)
    summaries = [(Path(tiny(name, *options).output) / "summary.json").is_file() for name in ("straight", "stopped")]
    assert summaries == [True, True]


def test_a_curriculum_avoids_problems_without_a_reward_and_resumes(tiny, caplog):
    """Of 54 problems, 9 never get a reward, and the policy solves the others."""
    shares = []

    def sample(sampler, *arguments, **named):
        lost = {problem.prompt for problem in sampler.prompts.problems[:9]}
        groups, grades = prepared_batch(sampler, *arguments, reward=1.0, **named)
        are_lost = [group.prompt in lost for group in groups for _ in group.completions]
        shares.append(sum(are_lost) / len(are_lost))
        failed = Grade(None, None, False, "no_reward")
        return groups, Grades(
            [failed if is_lost else one for one, is_lost in zip(grades.result(), are_lost, strict=True)]
        )

    options = [CURRICULUM, "training.steps=30", "training.checkpoint_every=15"]
    straight = count(tiny("straight", *options), sample=sample)
    assert np.mean(shares[10:]) == pytest.approx(9 / 54, abs=0.1)
    assert sum("task.curriculum: no completion of " in line and "by its share" in line for line in caplog.messages) == 1
    assert 0 < straight[-1]["curriculum/problems"] <= 45 and straight[-1]["curriculum/pass_rate"] == 1
    config = tiny("stopped", *options)
    with pytest.raises(KeyboardInterrupt):
        count(config, killed(at=20), sample=sample)
    assert without_times(count(config, sample=sample)) == without_times(straight)


def test_run_resumes_only_with_its_own_problems(tiny, tmp_path):
    sums = [(a, b) for a in range(1, 7) for b in range(1, 7)]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "level": a} for a, b in sums]
    train, other = tmp_path / "train.jsonl", [row | {"prompt": f"{row['prompt']}="} for row in rows]

    def write(rows):
        train.write_text("".join(json.dumps(row) + "\n" for row in rows))

    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    tasks = {name: f"{{file: {{train: {tmp_path / name}.jsonl}}}}" for name in ("train", "other")}
    mixture = f"task={{mixture: {{a: {tasks['train']}, b: {tasks['other']}}}}}"
    options = [mixture, "task.arithmetic=null", "task.reward=null", CURRICULUM, "evaluation.problems=6"]
    write(rows)
    straight = count(tiny("straight", *options))
    config = tiny("stopped", *options)
    with pytest.raises(KeyboardInterrupt):
        count(config, killed(at=5))
    more = {"prompt": "1+1+1=", "answer": "3", "level": 1}
    for changed in ([row | {"answer": "7"} for row in rows], [row | {"level": 0} for row in rows], [*rows, more]):
        write(changed)
        with pytest.raises(ValueError, match="data changed since this run began") as refused:
            count(config)
        for kind in ("train", "first 6 held-out"):
            assert f"the {kind} problems of task.mixture.a.file = '{train}'" in str(refused.value)
        assert "mixture.b" not in str(refused.value) and f"with model.run={config.output!r}" in str(refused.value)
    write(rows)
    assert without_times(count(config)) == without_times(straight)


def test_number_of_held_out_problems_may_change(tiny):
    with pytest.raises(KeyboardInterrupt):
        count(tiny("run"), killed(at=5))
    data = checkpoint.progress(Path(tiny("run").output) / "checkpoints", 3)["totals"]["data"]
    assert [*data] == ["the train problems of task.arithmetic", "the first 10 held-out problems of task.arithmetic"]
    check_data(
        tiny("run", "evaluation.problems=9"),
        data,
        {next(iter(data)): data[next(iter(data))], "the first 9 held-out problems": "x"},
    )
    with pytest.raises(
        ValueError, match="changed since .*train problems.* then, x now.*and the pass rates in .*pass_rates"
    ):
        check_data(tiny("run", "task.keep={}"), data, dict.fromkeys(data, "x"))
    check_data(tiny("run"), {}, dict.fromkeys(data, "x"))


def test_changed_reward_code_is_named_at_a_resume(tiny, tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(tmp_path)
    source = "def score(prompts, completions, answers):\n    return [0.0 for _ in answers]\n"
    (tmp_path / "resumed_reward.py").write_text(source)
    config = tiny("run", "task.reward=resumed_reward:score")
    for changed in ("", "", "# another\n"):
        (tmp_path / "resumed_reward.py").write_text(source + changed)
        assert "changed code" not in caplog.text
        with pytest.raises(KeyboardInterrupt):
            count(config, killed(at=1))
    assert "resumes with changed code in resumed_reward" in caplog.text
    first, second, third = (entry["code"] for entry in starts(Path(config.output)))
    assert first == second and [*third] == ["resumed_reward"] and first != third


def test_changed_code_that_a_reward_calls_is_named(tiny, tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "called_score.py").write_text("def half():\n    return 0.5\n")
    (tmp_path / "calling_reward.py").write_text(
        "from called_score import half\ndef score(p, c, a):\n    return half()\n"
    )
    score = importlib.import_module("calling_reward").score
    config = tiny("run", "task.reward=calling_reward:score")
    run_folder.open_run_folder(spec_of(config), overwrite=False)
    (tmp_path / "called_score.py").write_text("def half():\n    return 0.6\n")
    run_folder.open_run_folder(spec_of(config), overwrite=False)
    assert "resumes with changed code in called_score;" in caplog.text
    named = provenance.code_digests(config)
    assert {*named} == {"calling_reward", "called_score"}
    assert {*provenance.code_digests(tiny("passed"), [score])} >= {"calling_reward", "called_score"}


def test_record_has_the_batches_of_a_resumed_run(tiny, caplog):
    config = tiny("run", "experience.record=true", "evaluation.every=0")
    first, second = (functools.partial(prepared_batch, reward=reward) for reward in (0.25, 0.75))
    with pytest.raises(KeyboardInterrupt):
        count(config, killed(at=6), sample=first)  # in step 6, after the checkpoint of step 3
    record = Path(config.output) / "experience.db"
    assert {row.group_id.split("/")[0] for row in read_columns(record)} >= {"000004", "000005"}
    count(config, sample=second)
    rewards = {row.group_id.split("/")[0]: row.reward for row in read_columns(record)}
    assert rewards == {f"{batch:06d}": 0.25 if batch <= 3 else 0.75 for batch in range(1, 8)}
    record.unlink()
    count(tiny("run", "experience.record=true", "evaluation.every=0", "training.steps=8"), sample=second)
    assert "experience.db is gone; the record has only batches after number 7" in caplog.text


def test_other_versions_are_named_when_a_run_resumes(tiny, caplog):
    config = tiny("run")
    file = run_folder.open_run_folder(spec_of(config), overwrite=False) / ENVIRONMENT
    run_folder.open_run_folder(spec_of(config), overwrite=False)
    assert "other versions" not in caplog.text
    entries = json.loads(file.read_text())
    entries[-1]["packages"]["jax"] = "0.9.9"
    file.write_text(json.dumps(entries))
    run_folder.open_run_folder(spec_of(config), overwrite=False)
    assert "resumes with other versions" in caplog.text and "packages.jax: '0.9.9' there" in caplog.text


@pytest.mark.parametrize("content", ["[1]", '[{"code": 1}]', '{"a": 1}', "null"])
def test_damaged_record_of_starts_is_replaced(tiny, content):
    file = run_folder.open_run_folder(spec_of(tiny("run")), overwrite=False) / ENVIRONMENT
    file.write_text(content)
    run_folder.open_run_folder(spec_of(tiny("run")), overwrite=False)
    assert len(starts(file.parent)) == 1


def test_the_newest_checkpoints_are_kept(tiny):
    config = tiny("run", "training.checkpoint_every=2", "training.keep_checkpoints=2")
    with pytest.raises(KeyboardInterrupt):
        count(config, killed(at=6))
    folder = Path(config.output) / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"2", "4"}
    count(config)
    assert {path.name for path in folder.iterdir()} == {"6", "7"}


def test_another_order_of_batches_gives_other_metrics(tiny):
    first, second = CountingLearner(), CountingLearner()
    rows = count(tiny("run"), first)
    count(tiny("other", "seed=1"), second)
    assert len(first.batches) == 7 and rows[1]["loss"] != count(tiny("third", "seed=2"))[1]["loss"]
