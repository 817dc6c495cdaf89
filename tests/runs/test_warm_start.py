"""The warm start: what it shows the model, what it makes, and the cache."""

import functools
import json

import chex
import jax
import numpy as np
import pytest

from recjax.config import load_config
from recjax.hub.policy import Policy, load_params, policy_alone
from recjax.hub.tokenizers import character_tokenizer
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.runs import prepare, warm_start
from recjax.runs.warm_start import _demonstrations, _with_slips
from recjax.tasks.loading import load_task
from recjax.tasks.problems import characters
from recjax.training.evaluation import evaluate_policy
from tests.training.tiny_run import TINY

LENGTHS = np.arange(6000) % 3 + 2
MASK = np.arange(4) < LENGTHS[:, None]
TOKENS = np.where(MASK, np.random.default_rng(0).integers(2, 12, MASK.shape), 0).astype(np.int32)
TOKENS[np.arange(6000), LENGTHS - 1] = 1  # the token that ends an answer


@pytest.mark.parametrize("wrong_fraction", [0.0, 0.3, 1.0])
def test_the_chosen_share_of_answers_has_one_wrong_token(wrong_fraction):
    generator = np.random.default_rng(1)
    shown = _with_slips(TOKENS, MASK, generator.random(6000) < wrong_fraction, generator)
    changed = shown != TOKENS
    assert (changed.sum(-1) <= 1).all()
    np.testing.assert_allclose(changed.any(-1).mean(), wrong_fraction, atol=0.02)
    assert not changed[~MASK].any() and not changed[np.arange(6000), LENGTHS - 1].any()
    assert set(shown[changed]) <= set(range(2, 12))  # never padding or the end
    if wrong_fraction:
        shares = np.bincount(shown[changed], minlength=12)[2:] / changed.sum()
        np.testing.assert_allclose(shares, 0.1, atol=0.05)


def test_answers_with_nothing_to_turn_stay():
    for tokens, mask in [(np.array([[1]]), np.array([[True]])), (np.array([[5, 1]]), np.ones((1, 2), bool))]:
        np.testing.assert_array_equal(_with_slips(tokens, mask, np.array([True]), np.random.default_rng(0)), tokens)


def test_an_end_without_an_embedding_is_refused(monkeypatch):
    """As of a chat template whose turns end with a token that was added without a vector."""
    policy = Policy(Decoder(DecoderConfig(3, 8, 8, 1, 1, 1, 8)), character_tokenizer("12"), (0,))
    tokens, _ = _demonstrations(policy, ["1"], [False])
    assert tokens.tolist() == [[1, 0]]
    monkeypatch.setattr(warm_start, "turn_end", lambda _: 3)
    with pytest.raises(ValueError, match="warm_start: answer '1' with its end: token None has id 3, but the model"):
        _demonstrations(policy, ["1"], [True])


@pytest.mark.parametrize(
    ("stop_ids", "message"),
    [((0, 500), "the token 500 ends no completion, because"), ((500,), "no completion ends before its limit, because")],
)
def test_stop_tokens_without_an_embedding_are_named(tmp_path, monkeypatch, caplog, stop_ids, message):
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.setattr("recjax.hub.policy.stop_token_ids", lambda *_: stop_ids)
    policy_alone(load_config(tmp_path / "tiny.yaml"), "123+=")
    assert message in caplog.text


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache [ab]"))
    (tmp_path / "tiny.yaml").write_text(TINY)
    start = "warm_start={steps: 150, batch_size: 32, learning_rate: 1e-2, wrong_fraction: 0.0}"
    return load_config(tmp_path / "tiny.yaml", [start, "task.reward=recjax.tasks.rewards:number_match"])


@pytest.mark.slow
def test_warm_start_teaches_answers_and_is_cached(config, monkeypatch):
    made, params = prepare.prepare(config)
    # A random policy is right by chance, under 1 % of the time; a seventh of the answers are 9, 10 or 11.
    with made.grading as grading:
        result = evaluate_policy(config, made.policy, params, made.train, grading, 0)
    assert result.accuracy > 0.05, json.dumps(result.samples[:5])
    monkeypatch.setattr(warm_start, "supervise", None)  # from the cache now, or not at all
    # A teacher reads other prompts, and changes nothing in the base policy.
    taught = {"model.teacher": "policy", "task.teacher_template": "{answer}{prompt}", "task.teacher_tokens": 9}
    taught |= {"algorithm.teacher_divergence.coefficient": 0.1, "model.teacher_rate": 0.5}
    for same in (config, config.replace(**taught)):
        again = prepare.prepare(same)[1]
        chex.assert_trees_all_equal(jax.device_get(again), jax.device_get(params))


@pytest.mark.slow
def test_a_damaged_cache_is_made_anew(config, tmp_path, monkeypatch):
    short = config.model_copy(update={"warm_start": config.warm_start.model_copy(update={"steps": 2})})
    params, warned = prepare.prepare(short)[1], []
    (folder,) = (path for path in (tmp_path / "cache [ab]" / "warm_start").iterdir() if path.is_dir())
    monkeypatch.setattr(warm_start.logger, "warning", lambda *words: warned.append(words[0] % words[1:]))
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    again = prepare.prepare(short)[1]
    assert len(warned) == 1 and str(largest) in warned[0] and "makes it again" in warned[0]
    (folder / "manifest.json").unlink()
    anew = prepare.prepare(short)[1]
    assert len(warned) == 2
    whole = prepare.prepare(short)[1]
    assert len(warned) == 2
    for other in (again, anew, whole):
        chex.assert_trees_all_equal(jax.device_get(other), jax.device_get(params))


@pytest.fixture
def shown(monkeypatch):
    """The batches that a warm start shows; no step trains."""
    batches = []

    def step(decoder, optimizer, params, state, batch, learning_rate):
        batches.append(jax.device_get(batch))  # rows of an array on a device are slow to take
        return params, state, 0.0

    monkeypatch.setattr(warm_start, "_supervised_step", step)
    return batches


@pytest.mark.parametrize(("right_first", "shares"), [(0.0, [1, 1, 1, 1]), (0.6, [0, 0, 0, 1]), (1.0, [0, 0, 0, 0])])
def test_the_first_steps_show_only_right_answers(config, shown, tmp_path, right_first, shares):
    start = f"warm_start={{steps: 4, batch_size: 64, wrong_fraction: 1.0, right_first: {right_first}}}"
    made, _ = prepare.prepare(load_config(tmp_path / "tiny.yaml", [start]))
    answers, decode = {problem.prompt: problem.answer for problem in made.train.problems}, made.policy.tokenizer.decode

    def is_wrong(prompt, prompt_kept, answer, kept):
        return decode(answer[kept][:-1]) != answers[decode(prompt[prompt_kept])]

    assert [np.mean([*map(is_wrong, *batch)]) for batch in shown] == shares


def test_a_problem_without_mistakes_leaves_the_others_theirs(config, shown):
    made, params = prepare.prepare(config.model_copy(update={"warm_start": None}))
    first, *others = made.train.problems
    problems = [first, *[problem._replace(mistakes=("++++",)) for problem in others]]
    settings = config.warm_start.model_copy(update={"steps": 4, "batch_size": 64, "wrong_fraction": 1.0})
    warm_start.supervise(settings, made.policy, params, made.train._replace(problems=problems), 0)
    decode = made.policy.tokenizer.decode
    for prompts, prompt_mask, answers, mask in shown:
        for prompt, prompt_kept, answer, kept in zip(prompts, prompt_mask, answers, mask, strict=True):
            is_mistake = decode(answer[kept][:-1]) == "++++"
            assert is_mistake == (decode(prompt[prompt_kept]) != first.prompt)


@pytest.mark.parametrize("changed", ["answer", "mistake", "weights"])
def test_the_cache_knows_content_and_not_only_paths(config, shown, tmp_path, monkeypatch, changed):
    made, params = prepare.prepare(config)
    shown.clear()
    warm_start.warm_start(config, made.policy, params, made.train)
    assert not shown, "equal content is in the cache"
    first, *others = made.train.problems
    first = first._replace(**{"answer": {"answer": "77"}, "mistake": {"mistakes": ("5",)}}.get(changed, {}))
    if changed == "weights":
        params = jax.tree.map(lambda leaf: leaf + 1, params)
    warm_start.warm_start(config, made.policy, params, made.train._replace(problems=[first, *others]))
    assert shown, "the base policy of other content came from the cache"


WORKED = "task={arithmetic: {problems: ['1..9 + 1..9'], template: '{a}{op}{b}=', worked: true}, reward: 'math:floor'}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong_fraction", [0.4, pytest.param(0.0, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.slow)]
)
def test_wrong_answers_are_the_tasks_own_mistakes(config, shown, wrong_fraction, tmp_path):
    start = f"warm_start={{steps: 40, batch_size: 64, wrong_fraction: {wrong_fraction}}}"
    task = "task.reward=recjax.tasks.rewards:last_number_match"
    prepare.prepare(load_config(tmp_path / "tiny.yaml", [start, WORKED, task]))
    made = prepare.prepare(load_config(tmp_path / "tiny.yaml", [start, WORKED, task]))[0]
    known = {problem.prompt: (problem.answer, problem.mistakes) for problem in made.train.problems}
    decode = functools.cache(lambda tokens: made.policy.tokenizer.decode(list(tokens)))
    wrong = 0
    for prompts, prompt_mask, answers, mask in shown:
        for prompt, prompt_kept, answer, kept in zip(prompts, prompt_mask, answers, mask, strict=True):
            right, mistakes = known[decode(tuple(prompt[prompt_kept].tolist()))]
            text = decode(tuple(answer[kept].tolist())).removesuffix("<eos>")
            assert answer[kept][-1] == made.policy.stop_ids[0]
            assert text == right or text in mistakes
            wrong += text != right
    np.testing.assert_allclose(wrong / (64 * len(shown)), wrong_fraction, atol=0.03)


def test_another_seed_is_another_entry_of_the_cache(config, monkeypatch):
    seeds = []

    def supervise(config, policy, params, prompts, seed):
        seeds.append(seed)
        return params

    monkeypatch.setattr(warm_start, "supervise", supervise)
    for seed in (0, 1, 0):
        prepare.prepare(config.model_copy(update={"seed": seed}))
    prepare.prepare(config.model_copy(update={"seed": 2, "base_seed": 1}))
    assert seeds == [0, 1]


def test_base_seed_fixes_policy_and_problems(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)

    def base(*overrides):
        config = load_config(tmp_path / "tiny.yaml", [f"output={tmp_path}", *overrides])
        task = load_task(config)
        policy = policy_alone(config, characters([*task.train, *task.evaluation]))
        return load_params(config, policy.decoder.config), [problem.prompt for problem in task.train]

    held, same, other = base("seed=1", "base_seed=0"), base("seed=0"), base("seed=1")
    chex.assert_trees_all_equal(held[0], same[0])
    assert held[1] == same[1] != other[1]
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(held[0], other[0])
