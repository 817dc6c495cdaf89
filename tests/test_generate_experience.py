"""Generated experience: what an offline run would draw, to the bit, however often it was stopped."""

import json
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax import generate_experience
from recjax.config import load_config
from recjax.generate_experience import generate, read_flags
from recjax.models.logprobs import Sampling, completion_logprobs
from recjax.runs.policies import open_policy
from recjax.runs.prepare import prepare
from recjax.store.store import Store
from recjax.store.tokenize import tokenized
from tests import commands
from tests.closeness import assert_same_logprobs
from tests.commands import Command
from tests.experience.rows import columns_of, read_columns, same
from tests.training.tiny_run import TINY, train

SETTINGS = ["rollout.temperature=0.7", "rollout.top_k=6", "rollout.min_p=0.05"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny config, its file, its run and the initial parameters."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.yaml"
    path.write_text(TINY)
    config = load_config(path, SETTINGS)
    return config, path, *prepare(config)


@pytest.fixture(scope="module")
def generated(tiny, tmp_path_factory):
    """Three batches of the initial policy."""
    folder = tmp_path_factory.mktemp("straight") / "s.db"
    assert generate(tiny[0], folder, 3, None, None, "initial") == 3
    return read_columns(folder)


def with_tokens(rows, policy):
    return list(map(columns_of, tokenized([row.record for row in rows], policy)))


def without_time(rows):
    return [row._replace(time=None) for row in rows]


def test_rows_say_what_was_drawn(tiny, generated):
    _config, _, prepared, _ = tiny
    assert len(generated) == 3 * 4 * 4 and len({row.group_id for row in generated}) == 12
    texts = [problem.prompt for problem in prepared.train.problems]
    for row in generated:
        assert row.prompt in texts and row.answer == str(eval(row.prompt[:-1]))
        assert row.reward == np.float32(sum(character.isdigit() for character in row.completion) / 3)
        ended = row.completion_tokens[-1] in prepared.policy.stop_ids
        assert ended != row.truncated
        assert (*row.sampling, row.policy_version) == (0.7, 6, 1.0, 0.05, 0)
    assert {row.prompt for row in generated[:16]} != {row.prompt for row in generated[16:32]}


def recomputed(policy, params, row, sampling):
    """log π of a row's tokens by a full forward pass."""
    prompt, completion = (jnp.array(tokens)[None] for tokens in (row.prompt_tokens, row.completion_tokens))
    ones = [jnp.ones(tokens.shape, bool) for tokens in (prompt, completion)]
    arguments = (policy.decoder, params, prompt, ones[0], completion, ones[1])
    logprobs = jax.jit(completion_logprobs, static_argnames=("decoder", "sampling", "chunk"))
    return logprobs(*arguments, sampling=sampling, chunk=64)[0][0]


def test_recorded_log_probs_are_those_of_the_policy(tiny, generated):
    prepared, params = tiny[2:]
    for row in generated[:3]:
        logprobs = recomputed(prepared.policy, params, row, Sampling(0.7, 6, min_p=0.05))
        assert_same_logprobs(logprobs, row.behavior_logprobs)


def test_texts_alone_become_the_same_tokens(tiny, generated):
    prepared = tiny[2]
    bare = [
        row._replace(
            tokenizer=None, prompt_tokens=None, completion_tokens=None, completion_mask=None, behavior_logprobs=None
        )
        for row in generated
        if row.completion or not row.truncated
    ]
    again = with_tokens(bare, prepared.policy)
    kept = [row for row in generated if row.completion or not row.truncated]
    assert {row.truncated for row in kept} == {True, False}
    for ours, theirs in zip(again, kept, strict=True):
        assert same(ours, theirs._replace(behavior_logprobs=None, recorded={}))
    untouched = with_tokens(kept, prepared.policy)
    assert all(map(same, untouched, kept))


def test_rows_of_another_vocabulary_are_refused(tiny, generated):
    with pytest.raises(
        ValueError, match=r"row '.*/00001' of source 'initial': has tokens of another vocabulary \(other\)"
    ):
        with_tokens([generated[0], generated[1]._replace(tokenizer="other")], tiny[2].policy)
    with pytest.raises(ValueError, match="outside the policy's vocabulary"):
        with_tokens([generated[0]._replace(completion="ж", completion_tokens=None)], tiny[2].policy)
    with pytest.raises(ValueError, match="of source 'initial': prompt 0, 'ж'.*outside the tokenizer's vocabulary"):
        with_tokens([generated[0]._replace(prompt="ж", prompt_tokens=None)], tiny[2].policy)


def test_a_larger_number_of_steps_goes_on(tiny, generated, tmp_path):
    config = tiny[0]
    tmp_path /= "s.db"
    assert [generate(config, tmp_path, steps, None, None, "initial") for steps in (1, 3, 2)] == [1, 2, 0]
    assert all(map(same, without_time(read_columns(tmp_path)), without_time(generated)))
    # Another temperature is other experience, and stands beside it.
    generate(load_config(tiny[1], ["rollout.temperature=0.5"]), tmp_path, 1, None, None, "cold")
    assert [row.source for row in read_columns(tmp_path)] == ["initial"] * 48 + ["cold"] * 16


def test_rows_of_changed_problems_do_not_join_older_rows(tiny, tmp_path):
    problems = tmp_path / "problems.jsonl"
    config = load_config(tiny[1], ["task.arithmetic=null", f"task.file.train={problems}", "evaluation.problems=2"])

    def write(shift):
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b + shift)} for a in range(1, 5) for b in range(1, 5)]
        problems.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(0)
    assert [generate(config, tmp_path / "s.db", steps, None, None, "initial") for steps in (1, 2)] == [1, 1]
    write(1)
    with pytest.raises(ValueError, match="s.db: the same command sampled rows there with other problems"):
        generate(config, tmp_path / "s.db", 3, None, None, "initial")
    write(0)
    assert generate(config, tmp_path / "s.db", 2, None, None, "initial") == 0


def recorded(path):
    """The number of batches in a store that another process writes."""
    try:
        with Store(path) as store:
            return store.last().completions // 16
    except ValueError:
        return 0  # not made yet


@pytest.mark.slow
def test_a_killed_command_continues_with_the_same_rows(tiny, generated, tmp_path):
    path = tmp_path / "s.db"
    command = ["-m", "recjax.generate_experience", "--config", tiny[1], *SETTINGS, "--output", path, "--steps"]
    process = Command([*command, "1000"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (path.exists() and recorded(path)) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait()
    before = recorded(path)
    steps = max(3, before + 1)
    done = commands.run([*command, steps])
    assert done.returncode == 0, done.stderr
    assert f"{steps - before} new batches, {before} already in the store; {16 * steps} rows in total" in done.stdout
    rows = read_columns(path)
    assert len(rows) == 16 * steps
    assert all(map(same, without_time(rows)[:48], without_time(generated)))


@pytest.mark.slow
def test_a_runs_policies_draw_what_they_drew_in_training(tiny, tmp_path):
    config = load_config(tiny[1], [f"output={tmp_path / 'run'}", "training.steps=2", "training.checkpoint_every=1"])
    first = train(config)[1]
    # Batch 1 of the initial policy is what the run trained on first.
    generate(config, tmp_path / "initial", 1, None, None, "initial")
    rows = read_columns(tmp_path / "initial")
    np.testing.assert_allclose(first["reward"], np.mean([row.reward for row in rows]), rtol=1e-5)
    assert first["completion_length"] == np.mean([len(row.completion_tokens) for row in rows])
    for step, version in ((1, 1), (None, 2)):
        generate(config, tmp_path / "s", 1, str(tmp_path / "run"), step, "run")
        rows = [row for row in read_columns(tmp_path / "s") if row.policy_version == version]
        assert len(rows) == 16
        _, policy, params, *_ = open_policy(tmp_path / "run", step=version)
        row = max(rows, key=lambda row: len(row.completion_tokens))
        logprobs = recomputed(policy, jax.tree.map(jnp.asarray, params), row, Sampling())
        assert_same_logprobs(logprobs, row.behavior_logprobs)


@pytest.mark.slow
def test_trajectories_of_agents_are_generated_in_any_portions(tiny, tmp_path):
    agent = ["task.agent=tests.agents.some_agents:paid_by_answer", "rollout.max_context_tokens=32"]
    config = load_config(tiny[1], [*SETTINGS, *agent])
    assert generate(config, tmp_path / "once.db", 2, None, None, "initial") == 2
    assert [generate(config, tmp_path / "twice.db", steps, None, None, "initial") for steps in (1, 2)] == [1, 1]
    rows, again = (without_time(read_columns(tmp_path / f"{name}.db")) for name in ("once", "twice"))
    assert len(rows) == 2 * 4 * 4 and all(same(*pair) for pair in zip(rows, again, strict=True))
    for row in rows:
        assert len(row.turns) == len(row.turn_rewards) == 3 and row.reward == np.float32(sum(row.turn_rewards))
        assert not row.completion_mask.all() and row.completion_mask[row.turns[0].end - 1]


@pytest.mark.slow
def test_agents_that_failed_without_a_reward_are_not_kept(tiny, tmp_path):
    """Training drops them too; as pending completions they would hold up their groups."""
    agent = ["task.agent=tests.agents.some_agents:fails_at_even_answers", "rollout.max_context_tokens=32"]
    generate(load_config(tiny[1], agent), tmp_path / "s.db", 1, None, None, "initial")
    rows = read_columns(tmp_path / "s.db")
    assert 0 < len(rows) < 4 * 4 and all(row.reward == 1 and int(row.answer) % 2 for row in rows)


def test_flags_that_contradict_each_other_are_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="exactly one of --config.*found neither"):
        read_flags(None, None, None, [])
    with pytest.raises(ValueError, match="found both"):
        read_flags("a", "b", None, [])
    with pytest.raises(ValueError, match="--step 3: has no effect with --config"):
        read_flags(str(tiny[1]), None, 3, [])
    with pytest.raises(ValueError, match="holds no config.yaml"):
        read_flags(None, str(tmp_path), None, [])
    (tmp_path / "file").write_text("x" * 999)
    with pytest.raises(ValueError, match="not an experience store"):
        generate_experience.generate(tiny[0], tmp_path / "file", 1, None, None, "x")
