"""Offline training from a store equals an offline run, whoever wrote the store."""

import itertools
import json
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

from recjax.config import load_config
from recjax.experience.batch import Shape, pad
from recjax.experience.group import Completion, Group
from recjax.experience.records import groups_of
from recjax.generate_experience import generate
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import character_tokenizer
from recjax.import_experience import import_files
from recjax.logs.metrics import batch_metrics, read_metrics
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.planning.dry_run import dry_run, show_dry_run
from recjax.rewards.custom import with_columns
from recjax.rewards.pool import Grading
from recjax.rewards.reward import Reward, load_reward
from recjax.runs import checkpoint, regrading
from recjax.runs.prepare import prepare
from recjax.runtime.clocks import PhaseSeconds
from recjax.sources import completing
from recjax.sources.setup import Setup, batch_shape
from recjax.store.foreign import Columns
from recjax.store.store import Store
from recjax.store.stored import Stored, load_stored
from recjax.store.tokenize import tokenizer_name
from recjax.tasks.problems import Problem
from recjax.tasks.prompts import Prompts, encode_problems
from recjax.training.run import State
from tests.closeness import assert_close, assert_same_gradient
from tests.experience.rows import append, append_columns, columns_of, make_row, read, read_columns, text_row
from tests.training.counting import CountingLearner, count, killed
from tests.training.tiny_run import TINY, digit_share, train, without_times

STEPS = 7
LEFT_OUT = [f"experience/left_out/{name}" for name in ("pending_groups", "pending_rows", "rows_beside_pending")]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A store of every batch that an offline tiny run draws."""
    folder = tmp_path_factory.mktemp("drawn")
    (folder / "tiny.yaml").write_text(TINY)
    # The command works with the config of the training that is to read the store.
    config = load_config(folder / "tiny.yaml", [f"experience.store={folder / 'store'}"])
    assert generate(config, folder / "store", STEPS, None, None, "initial") == STEPS
    return folder / "store"


def bare(rows):
    """The rows as another program's: texts, rewards and groups."""
    tokens = dict(tokenizer=None, prompt_tokens=None, completion_tokens=None, completion_mask=None)
    drawn_by = dict(behavior_logprobs=None, policy_version=None, temperature=None, top_k=None, top_p=None)
    said = [row for row in rows if row.completion or not row.truncated]
    return [row._replace(**tokens, **drawn_by, accurate=None, source="other") for row in said]


@pytest.fixture
def texts(drawn, tmp_path):
    """A store of the same completions as texts alone, of groups that have lost different numbers of rows."""
    append_columns(tmp_path / "texts", bare(read_columns(drawn)[3:]))
    return tmp_path / "texts"


def without_store_keys(rows):
    beside = (*LEFT_OUT, "source_rows", "grading/no_reward")
    return [{name: row[name] for name in row if name not in beside} for row in without_times(rows)]


def test_a_store_in_sampling_order_equals_offline_training(tiny, monkeypatch):
    config = tiny("offline", "regime.offline=true", "experience.record=true")
    offline = count(config)
    monkeypatch.setattr(
        completing, "groups_at", lambda groups, count, batch, seed: [*groups[count * (batch - 1) :][:count]]
    )
    from_store = count(tiny("store", f"experience.store={config.output}/experience.db"))
    assert from_store[1]["loss"] != from_store[-1]["loss"] and from_store[-1]["staleness"] == STEPS - 1
    offline = [{name: row[name] for name in row if not name.startswith("experience/")} for row in offline]
    assert without_store_keys(from_store) == without_store_keys(offline)
    assert [from_store[0][name] for name in LEFT_OUT] == [0, 0, 0] and LEFT_OUT[0] not in from_store[1]


def test_unused_weights_of_stored_rewards_are_warned_of(tiny, drawn, caplog):
    prepare(tiny("same", f"experience.store={drawn}"))
    assert "do not change stored rewards" not in caplog.text
    prepare(tiny("other", f"experience.store={drawn}", "task.reward_weights={score: 2.0}"))
    assert "task.reward_weights, which do not change stored rewards; set experience.regrade" in caplog.text


@pytest.mark.parametrize("key", ["store={}", "mix={{store: {}, of: group}}"])
def test_algorithms_of_parts_refuse_stored_rewards_alone(tiny, drawn, tmp_path, key):
    rows = read_columns(drawn)[:16]
    append_columns(tmp_path / "alone", [row._replace(reward_parts=None) for row in rows[:4]] + rows[4:])
    options = [f"experience.{key.format(tmp_path / 'alone')}", "algorithm.preset=gdpo", "rollout.prompts_per_step=1"]
    with pytest.raises(ValueError, match="4 completions have a reward without reward_parts.*'gdpo'"):
        prepare(tiny("alone", *options))
    setup, _ = prepare(tiny("with parts", f"experience.{key.format(drawn)}", *options[1:]))
    assert setup.judge.part_weights == {"length": 0, "turns": 0, "rows": 0}


@pytest.mark.slow
def test_a_regraded_store_trains_like_recorded_rewards(tiny, drawn, tmp_path, monkeypatch):
    rows = read_columns(drawn)
    # Some wait for rewards, and some have others' of another scale.
    strange = [row._replace(reward=(None, 7.0)[place % 2], reward_parts=None) for place, row in enumerate(rows)]
    append_columns(tmp_path / "strange", strange)
    assert len({row.reward for row in rows}) > 1
    expected = count(tiny("own", f"experience.store={drawn}"))
    options = [f"experience.store={tmp_path / 'strange'}", "experience.regrade=true"]
    assert without_store_keys(count(tiny("again", *options))) == without_store_keys(expected)
    # A run that goes on does not ask for rewards again, and takes no others.
    output = Path(tiny("again", *options).output)
    shutil.rmtree(output / "checkpoints" / str(STEPS))
    with monkeypatch.context() as without_grades:
        without_grades.setattr(Store, "add_rewards", None)
        assert without_store_keys(count(tiny("again", *options))) == without_store_keys(expected)
    assert [row.reward for row in read_columns(tmp_path / "strange")] == [row.reward for row in strange]
    # A run that was killed while it graded grades what is left.
    shutil.rmtree(output / "checkpoints" / str(STEPS))
    with sqlite3.connect(tmp_path / "strange") as database:
        database.execute("delete from rewards where grader like 'run %' and completion > 9")
        (kept,) = database.execute("select count(*) from rewards").fetchone()
    with Store(tmp_path / "strange") as store, store._transaction() as transaction:
        transaction.last = transaction.last._replace(rewards=kept)
    assert without_store_keys(count(tiny("again", *options))) == without_store_keys(expected)
    shutil.rmtree(output / "checkpoints" / str(STEPS))
    (output / "grader.json").write_text("{}")
    with pytest.raises(ValueError, match="grader.json: is damaged"):
        count(tiny("again", *options))


AGENT = ["task.agent=tests.agents.some_agents:paid_by_answer", "rollout.max_context_tokens=16"]


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory):
    """The store of trajectories that a run of seven steps records."""
    folder = tmp_path_factory.mktemp("trajectories")
    (folder / "tiny.yaml").write_text(TINY)
    count(load_config(folder / "tiny.yaml", [f"output={folder / 'run'}", "experience.record=true", *AGENT]))
    return folder / "run" / "experience.db"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["experience.store={}"],
        ["experience.store={}", *AGENT],
        ["experience.mix={store: {}, of: batch}"],
        ["experience.mix={store: {}, of: group}", *AGENT],
        ["experience.store={}", "experience.follow=true", "rollout.max_context_tokens=16"],
        ["experience.store={}", "experience.follow=true", *AGENT],
    ],
    ids=" ".join,
)
def test_stored_turns_reach_the_batch_with_their_rewards(tiny, trajectories, options):
    options = [option.replace("{}", str(trajectories)) for option in options]
    learner, turns = CountingLearner(), "algorithm.advantage={name: turn_returns}"
    count(tiny("run", *options, turns, "training.steps=7", "evaluation.every=0"), learner)
    stored = {}
    for record in read(trajectories):
        one = record.completion
        assert len(one.rows) == 2 and len(one.turns) == len(one.grade.turns) == 3
        for own, row in enumerate(one.rows):
            stored[row.tokens.tobytes(), row.behavior_logprobs.tobytes()] = one, own, row
    seen = 0
    for batch in learner.batches:
        for place, (tokens, real) in enumerate(zip(batch.completions, batch.token_mask, strict=True)):
            known = stored.get((tokens[real].tobytes(), batch.behavior_logprobs[place, real].tobytes()))
            if known is None:  # padding, or the policy's own
                continue
            one, own, row = known
            assert (batch.completion_mask[place, real] == row.mask).all()
            rewards = np.float32(one.grade.turns)
            np.testing.assert_allclose(batch.turn_rewards[place, :2], rewards[:2])
            np.testing.assert_allclose(np.nansum(batch.turn_rewards[place]), one.grade.reward, atol=1e-5)
            lengths = [one.turns[0].end, one.turns[1].end - one.turns[0].end - 1]
            expected = [2] if own else [0] * lengths[0] + [-1] + [1] * lengths[1]
            assert batch.token_turns[place, real].tolist() == expected
            seen += 1
    assert seen > 40


@pytest.mark.parametrize(
    ("agent", "stored", "of_batch", "of_group"),
    [
        # The tiny run samples 4 groups of 4 completions of 3 tokens, and its longest prompt has 6 tokens here.
        ([], Shape(4, 9, 10, 12), Shape(4, 9, 10, 12), Shape(4, 4, 10, 12)),
        ([], Shape(8, None, 5, 5), Shape(16, None, 8, 8), Shape(16, None, 8, 8)),
        ([], Shape(20, None, 9, 9), Shape(20, None, 9, 9), Shape(16, None, 9, 9)),
        (AGENT, Shape(4, 9, 10, 12), Shape(36, None, 21, 21), Shape(16, None, 21, 21)),
        (AGENT, Shape(20, None, 9, 9), Shape(20, None, 15, 15), Shape(16, None, 15, 15)),
    ],
)
def test_sampled_and_stored_groups_fit_one_shape(tiny, agent, stored, of_batch, of_group):
    prompts = Prompts(np.zeros((1, 6), np.int32), np.ones((1, 6), bool), [], [])
    for of, expected in (("batch", of_batch), ("group", of_group)):
        config = tiny("run", f"experience.mix={{store: x, of: {of}}}", *agent)
        assert batch_shape(config, prompts, Stored(None, stored, {}, "")) == expected


def test_the_last_message_of_a_trajectory_is_graded_again(tiny, trajectories):
    options = [f"experience.store={trajectories}", "experience.regrade=true", *AGENT]
    learner = CountingLearner()
    count(tiny("run", *options, "task.reward_weights={turns: -0.25}", "training.steps=7"), learner)
    expected = {}
    for record in read(trajectories):
        reward = np.float32(digit_share([""], [record.completion.text], [""])[0] - 0.25 * 3)
        for row in record.completion.rows:
            expected[row.tokens.tobytes(), row.behavior_logprobs.tobytes()] = reward
    found = {}
    for batch in learner.batches:
        for place, (tokens, real) in enumerate(zip(batch.completions, batch.token_mask, strict=True)):
            if real.any():
                found[tokens[real].tobytes(), batch.behavior_logprobs[place, real].tobytes()] = batch.rewards[place]
    assert found.keys() == expected.keys() and len({*expected.values()}) > 1
    np.testing.assert_allclose([found[key] for key in expected], [*expected.values()], atol=1e-6)


def test_single_token_algorithms_refuse_stored_trajectories(tiny, trajectories, drawn):
    options = ["algorithm.advantage={name: discounted}", "training.steps=1"]
    count(tiny("single", *options, f"experience.store={drawn}"))
    with pytest.raises(ValueError, match="has trajectories, and algorithm.preset = .* computes advantages of tokens"):
        count(tiny("turns", *options, f"experience.store={trajectories}"))


def test_stored_completions_cut_inside_thoughts_earn_nothing(tmp_path):
    said = ["so \\boxed{5}", "so</think>\\boxed{5}", "<think>\\boxed{5}"]
    texts = [(prompt, text) for prompt in ("2+3<think>", "2+3=") for text in said]
    rows = [
        columns_of(text_row(place, group_id=prompt, prompt=prompt, completion=text, answer="5", reward=None))
        for place, (prompt, text) in enumerate(texts)
    ]
    append_columns(tmp_path / "store", rows)
    options = ["experience.regrade=true", "experience.missing_logprobs=initial", "rollout.prompts_per_step=1"]
    options += [f"experience.store={tmp_path / 'store'}", "task.reward=math", "grading.seconds=20"]
    (tmp_path / "tiny.yaml").write_text(TINY)
    config = load_config(tmp_path / "tiny.yaml", [*options, "rollout.max_completion_tokens=64"])
    letters = character_tokenizer("".join(map(chr, range(32, 127))))
    policy = Policy(Decoder(DecoderConfig(len(letters), 16, 32, 1, 2, 1, 8)), letters, (0,))
    prompts, grading = encode_problems([Problem("1+1=", "2")], letters, None), Grading(config, load_reward("math"))
    setup = Setup(config, policy, prompts, prompts, grading, PhaseSeconds(), load_stored(config, policy))
    regrading._grade(setup, {}, "another")
    with Store(tmp_path / "store") as store:
        rewards = store.rewards(range(1, store.last().completion + 1), "another")
        assert [rewards[number][0].reward for number in sorted(rewards)] == [0, 1, 0, 1, 1, 0]


def test_regrading_questions_outside_the_task_needs_answers(tiny, drawn, tmp_path):
    rows = [
        row._replace(prompt="11+1=", answer=None, prompt_tokens=None, tokenizer=None)
        for row in bare(read_columns(drawn))
    ]
    append_columns(tmp_path / "others", [row._replace(group_id="g") for row in rows[:4]])
    options = [f"experience.store={tmp_path / 'others'}", "experience.regrade=true", "rollout.prompts_per_step=1"]
    with pytest.raises(ValueError, match=r"experience.regrade: group 'g' asks '11\+1='.*nor the store has an answer"):
        count(tiny("unknown", *options, "experience.missing_logprobs=unneeded", "algorithm.preset=red_weight"))


def by_name(completions, **columns):
    return [1.0] * len(completions)


def by_level(completions, level):
    return [1.0] * len(completions)


def test_stored_prompts_need_the_columns_that_the_reward_requires():
    """A store that has no answers is graded by a reward that reads none, and none takes None for a column."""
    stored = [Group("g", np.zeros(1, np.int32), (Completion("", "", "", (), None, None, False),), "other")]
    groups = SimpleNamespace(contents=lambda _: np.zeros(1), chosen=lambda _: stored)

    nothing = Prompts(*[()] * 4)

    def known(function):
        reward = with_columns(Reward("mine", function, False, {}), [Problem("", "2", columns={"level": 1})])
        graded, stored_groups = SimpleNamespace(reward=reward), SimpleNamespace(groups=groups)
        setup = Setup(None, None, nothing, nothing, graded, None, stored_groups)
        return regrading.known_problems(setup)

    assert known(by_name) == {}
    with pytest.raises(ValueError, match="regrade, group 'g' of the store, which is no .* a column 'level'"):
        known(by_level)


@pytest.mark.slow
def test_one_batch_in_any_order_is_the_same_step(tiny, drawn, tmp_path, monkeypatch):
    append_columns(tmp_path / "one", read_columns(drawn)[:16])
    saved, save = [], checkpoint.save

    def kept(manager, state: State, *options):
        moments = optax.tree.get(state.trained.optimizer_state, "mu")
        saved.append((np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.trained.params)]), moments))
        save(manager, state, *options)

    monkeypatch.setattr(checkpoint, "save", kept)
    options = ["training.steps=1", "evaluation.every=0"]
    rows = train(tiny("store", f"experience.store={tmp_path / 'one'}", *options))
    offline = train(tiny("offline", "regime.offline=true", *options))
    (start, _), (after, gradient), (other_start, _), (_, other_gradient) = saved
    assert np.array_equal(start, other_start) and not np.array_equal(after, start)
    # Only the order of sums differs. Adam's first moment is a share of the gradient; its step is the gradient's sign.
    assert_same_gradient(gradient, other_gradient)
    for name in ("loss", "gradient_norm", "reward", "accuracy", "truncated", "completion_length", "ratio/q99"):
        assert_close(rows[1][name], offline[1][name], least=0.1)


@pytest.mark.slow
def test_texts_train_what_reads_no_log_probs(tiny, texts):
    options = [f"experience.store={texts}", "experience.missing_logprobs=unneeded", "algorithm.preset=red_weight"]
    config = tiny("run", *options, "training.steps=3", "evaluation.every=0")
    rows = train(config)
    assert all(row["gradient_norm"] > 0 for row in rows[1:])
    for name in ("ratio/q01", "behavior_kl/k3", "effective_sample_size", "clip_fraction/all", "staleness"):
        assert name not in rows[1]
    assert (Path(config.output) / "figures" / "training.png").is_file()
    # Groups are ragged; means are of the rows that are there.
    found = prepare(config)[0].stored
    assert len({len(group.completions) for group in found.groups}) > 1
    groups = completing.groups_at(found.groups, 4, 1, config.seed)
    rewards = [row.grade.reward for group in groups for row in group.completions]
    np.testing.assert_allclose(rows[1]["reward"], np.mean(rewards), rtol=1e-5)
    np.testing.assert_allclose(rows[1]["accuracy"], np.mean(np.array(rewards) >= 1))


@pytest.mark.slow
def test_texts_get_log_probs_of_the_chosen_policy(tiny, texts):
    options = [f"experience.store={texts}", "training.steps=4", "evaluation.every=0"]
    initial = train(tiny("initial", *options, "experience.missing_logprobs=initial"))[1:]
    current = train(tiny("current", *options, "experience.missing_logprobs=current"))[1:]
    for rows in (initial[:1], current):
        for row in rows:
            np.testing.assert_allclose([row["ratio/q01"], row["ratio/max"]], 1, atol=1e-4)
    assert initial[-1]["ratio/max"] > 1.001
    assert_close(initial[0]["loss"], current[0]["loss"], least=0.1)


@pytest.mark.slow
def test_following_a_store_resumes_exactly_after_a_kill(tiny, texts, monkeypatch, tmp_path):
    options = [f"experience.store={texts}", "experience.missing_logprobs=unneeded", "algorithm.preset=red_weight"]
    straight = count(tiny("straight", *options))
    config = tiny("stopped", *options)
    with pytest.raises(KeyboardInterrupt):
        count(config, killed(at=5))
    assert read_metrics(Path(config.output) / "metrics.jsonl")[-1]["step"] == 4
    shutil.copy(texts, tmp_path / "copy")
    append(texts, [text_row(1, group=99, prompt="1+1=", completion="2")])
    with pytest.raises(ValueError, match=r"changed since this run began.*store '.*texts' "):
        count(config)
    for file in texts.parent.glob("texts*"):
        file.unlink()
    shutil.copy(tmp_path / "copy", texts)
    assert without_times(count(config)) == without_times(straight)


def test_single_groups_and_differing_reward_scales_are_warned_of(tiny, tmp_path, caplog, monkeypatch):
    rows = [
        {"prompt": f"{a}+1=", "completion": str(a), "reward": reward, "model": model}
        for model, most in (("one", 1), ("two", 2))
        for a in range(2, 8)
        for reward in (0, most)
    ]
    rows += [{"prompt": f"{a}+2=", "completion": str(a), "reward": 0, "model": "one"} for a in range(2, 5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    import_files([tmp_path / "a.jsonl"], tmp_path / "store", Columns(source="model"))
    options = ["training.steps=1", f"experience.store={tmp_path / 'store'}", "algorithm.preset=reinforce"]
    count(tiny("run", *options, "experience.missing_logprobs=unneeded"))
    assert "3 of 9 groups have a single completion, from which reinforce learns nothing" in caplog.text
    assert "which recjax does not rescale: one 0 to 1, two 0 to 2" in caplog.text


def test_groups_that_wait_are_left_out_and_counted(tiny, drawn, tmp_path):
    rows = read_columns(drawn)
    waiting = [row._replace(reward=None, reward_parts=None) if i in (0, 1, 6) else row for i, row in enumerate(rows)]
    append_columns(tmp_path / "late", waiting)
    config = tiny("run", f"experience.store={tmp_path / 'late'}", "training.steps=1", "evaluation.every=0")
    found = prepare(config, CountingLearner().initial_policy)[0].stored
    assert len(found.groups) == 4 * STEPS - 2
    assert {row.group_id for row in rows[:8]}.isdisjoint(group.id for group in found.groups)
    first = count(config)[0]
    assert [first[name] for name in LEFT_OUT] == [2, 3, 5]


def test_unusable_stores_are_refused_before_work_starts(tiny, drawn, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "recjax.store.missing_logprobs._presets_without", lambda: ["red_weight"]
    )  # it builds all presets
    rows = read_columns(drawn)
    numbers = itertools.count()

    def refused(message, *options, of=None):
        folder = tmp_path / f"store {next(numbers)}"
        if of is not None:
            append_columns(folder, of)
        # Later overrides win.
        config = tiny("run", f"experience.store={folder}", *options)
        with pytest.raises(ValueError, match=message):
            prepare(config, CountingLearner().initial_policy)
        assert not Path(config.output).exists()

    pending = [row._replace(reward=None, reward_parts=None) for row in rows]
    refused("experience.store = '.*': .* is not an experience store .no such file.")
    refused(
        "experience.store = .*: all 28 groups wait for rewards; add rewards with python -m recjax.feedback", of=pending
    )
    some = [*rows[:12], *pending[12:]]
    few = r"3 groups have all their rewards \(25 wait for some\), fewer than the 4 that each batch takes"
    refused(few, of=some)
    lacking = "rows have no behavior log-probs, the first is .* of source 'other'; set experience.missing_logprobs"
    refused(lacking, f"experience.store={texts}")
    unneeded = "experience.missing_logprobs = 'unneeded': this algorithm reads behavior log-probs"
    refused(unneeded, f"experience.store={texts}", "experience.missing_logprobs=unneeded")
    centering = "rollout.recorded_top_k=4", "algorithm.score_centering={coefficient: 1.0}"
    refused("has no recorded most likely tokens.*record the store with", f"experience.store={drawn}", *centering)
    refused("tokens of another vocabulary", of=[row._replace(tokenizer="other") for row in rows])
    refused(r"temperature 1.0, .*but rollout has 0.5", f"experience.store={drawn}", "rollout.temperature=0.5")


@pytest.mark.campaign
def test_a_dry_run_foretells_no_staleness_of_a_store(tiny, capsys):
    config = tiny("run", "experience.store=somewhere")
    show_dry_run(config, dry_run(config))
    printed = capsys.readouterr().out
    assert "not known: sizes of the groups in somewhere" in printed and "not known: staleness" in printed


def test_padding_rows_are_in_no_mean():
    parts, versions = [{"correct": 1.0}, {"correct": 3.0}, None], (0, 2, None)
    rows = [
        make_row(
            i,
            length=2 + i,
            reward=1.0 + i,
            reward_parts=parts[i],
            accurate=True,
            truncated=True,
            policy_version=versions[i],
        )
        for i in range(3)
    ]
    batch = pad(groups_of(rows), Shape(2, 5, 4, 6))
    assert len(batch.rewards) == 10
    assert batch_metrics(6, batch, batch) == {
        "reward": 2,
        "reward/correct": 2,
        "frac_reward_zero_std": 0,
        "accuracy": 1,
        "right_and_ended": 0,
        "completion_length": 3,
        "truncated": 1,
        "staleness": 4,
        "staleness_rows": {"3": 1, "5": 1},
    }
    foreign = batch._replace(policy_version=np.full(10, -1, np.int32))
    assert "staleness" not in batch_metrics(6, foreign, foreign)


def test_versions_of_another_run_are_no_staleness(tiny, drawn, tmp_path):
    rows = [row._replace(policy_version=200) for row in read_columns(drawn)]
    append_columns(tmp_path / "later", rows)
    config = tiny("run", f"experience.store={tmp_path / 'later'}")
    policy = prepare(tiny("plain"), CountingLearner().initial_policy)[0].policy
    assert rows[0].tokenizer == tokenizer_name(policy.tokenizer)
    assert {row.policy_version for group in load_stored(config, policy).groups for row in group.completions} == {None}
