"""From stores to batches: any groups, whole advantages, and no log-prob that nobody recorded or chose."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.algorithms.presets import PRESETS, build_algorithm
from recjax.experience.batch import FOREIGN, Shape, pad
from recjax.experience.group import Group
from recjax.experience.records import groups_of
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import character_tokenizer
from recjax.models.decoder import Decoder
from recjax.models.logprobs import completion_logprobs
from recjax.models.sampling import Sampling
from recjax.sources.drawing import groups_at, mixed
from recjax.store import missing_logprobs
from recjax.store.missing_logprobs import check_logprobs, with_logprobs
from recjax.store.stored import check_prompts
from recjax.store.stored_groups import ByPrompt, load_groups
from recjax.store.tokenize import tokenizer_name
from recjax.tasks.problems import Problem
from recjax.tasks.prompts import Prompts
from tests.algorithms.examples import first_of_each_set_of_axes
from tests.batch_shapes import shape_of
from tests.closeness import assert_same_change, assert_same_logprobs
from tests.experience.groups import same_groups, ungraded
from tests.experience.rows import append, make_row, text_row
from tests.marks import slow_except
from tests.training.test_update import CONFIG, initial, step

SAMPLING = Sampling(0.9)
# Vocabulary of 11, as CONFIG has.
TOKENIZER = character_tokenizer("012345678")
POLICY = Policy(Decoder(CONFIG), TOKENIZER, (1,))


def group_of(*rows):
    """The group of some completions."""
    (group,) = groups_of(rows)
    return group


# Of sizes 1 to 4, lengths 1 to 5, and two sources.
RAGGED = [
    group_of(
        *(make_row(10 * g + i, group=g, length=1 + (g + i) % 5, policy_version=None if i else 3) for i in range(size))
    )
    for g, size in enumerate((3, 1, 4, 2))
]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", slow_except([1, 3], 3))
def test_a_ragged_batch_updates_like_its_groups(micro_batches):
    # Two more prompts than groups, of which nothing but padding is in the batch.
    together, metrics = step(pad(RAGGED, shape_of(RAGGED, 6)), "grpo", micro_batches)
    total, count = jax.tree.map(jnp.zeros_like, initial()), 0
    for group in RAGGED:
        # One is without any padding; the others share a shape, which saves compilations.
        batch = pad([group], shape_of([group] if len(group.completions) == 3 else RAGGED, 1))
        tokens = batch.completion_mask.sum()
        after, _ = step(batch, "grpo")
        total = jax.tree.map(lambda total, new, old, n=tokens: total + n * (new - old), total, after, initial())
        count += tokens
    expected = jax.tree.map(lambda old, moved: old + moved / count, initial(), total)
    assert_same_change(initial(), together, expected)
    assert np.isfinite([float(value) for value in metrics.values()]).all()
    assert metrics["kept_fraction"] == 1 and metrics["gradient_norm"] > 1e-3


def test_a_batch_says_what_its_rows_say():
    shape = Shape(5, 6, 7, 8)
    batch = pad(RAGGED, shape)
    assert batch.prompts.shape == (5, 7) and batch.completions.shape == (30, 8)
    assert batch.prompt_mask.any(-1).all()
    real = batch.completion_mask.any(-1)
    assert real.tolist() == [i < n for n in (3, 1, 4, 2, 0) for i in range(6)]
    rows = ((group, row) for group in RAGGED for row in group.completions)
    for place, (group, row) in zip(np.flatnonzero(real), rows, strict=True):
        mask = batch.completion_mask[place]
        (sampled,) = row.rows
        assert np.array_equal(batch.completions[place][mask], sampled.tokens)
        assert np.array_equal(batch.behavior_logprobs[place][mask], sampled.behavior_logprobs)
        prompt = place // 6
        assert np.array_equal(batch.prompts[prompt][batch.prompt_mask[prompt]], group.prompt_tokens)
        version = FOREIGN if row.policy_version is None else row.policy_version
        assert (batch.rewards[place], batch.policy_version[place]) == (row.grade.reward, version)
        assert (batch.accurate[place], batch.truncated[place]) == (row.grade.accurate, row.truncated)
        assert {name: values[place] for name, values in batch.reward_parts.items()} == {
            name: np.float32(value) for name, value in row.grade.reward_parts.items()
        }
    assert pad(RAGGED, shape, logprobs=False).behavior_logprobs is None
    assert np.isnan(pad([ungraded(RAGGED[1])], Shape(1, 1, 7, 8)).rewards).all()


def test_what_does_not_fit_is_refused():
    for shape, message in [
        (Shape(3, 4, 9, 9), "4 groups do not fit in a batch of 3"),
        (Shape(4, 3, 9, 9), "group 'group 2' has 4 completions; the batch has room for 3"),
        (Shape(4, 4, 2, 9), "prompt of group 'group 1' has 3 tokens; the batch has room for 2"),
        (Shape(4, 4, 9, 4), "row 'row 22' has 5 tokens; the batch has room for 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            pad(RAGGED, shape)
    forced = make_row(0, completion_mask=np.array([True, False, True]))
    with pytest.raises(ValueError, match="row 'row 0' is a trajectory, which does not fit a batch of single turns"):
        pad([group_of(forced)], Shape(1, 1, 9, 9))


def test_missing_log_probs_are_nan_until_someone_chooses():
    group = group_of(make_row(0), make_row(1, behavior_logprobs=None))
    batch = pad([group], shape_of([group], 1))
    assert np.isnan(batch.behavior_logprobs).tolist() == [[False] * 3, [True] * 3]


def test_groups_with_equal_ids_get_their_own_log_probs(monkeypatch):
    known, lacking = group_of(make_row(0)), group_of(make_row(1, behavior_logprobs=None))
    lacking = lacking._replace(id=known.id)
    monkeypatch.setattr(missing_logprobs, "score", lambda decoder, params, batch, *options: np.full((1, 3), -2.0))
    own, filled = missing_logprobs.with_logprobs([known, lacking], shape_of([known], 1), POLICY, {}, SAMPLING, 64)
    assert own is known and filled.completions[0].id == lacking.completions[0].id
    assert filled.completions[0].rows[0].behavior_logprobs.tolist() == [-2.0] * 3


def stored(place, *rows):
    """The groups of a store of these rows."""
    append(place, [row._replace(tokenizer=row.tokenizer and tokenizer_name(TOKENIZER)) for row in rows])
    return load_groups(place, POLICY)


WITHOUT = ["reinforce", "asymre", "red_drop", "red_weight", "rloo", "opo", "gpg", "zcpo", "offline_grpo"]
WITHOUT += ["maxrl", "tba", "on_policy_distillation", "logit_distillation"]


@pytest.fixture(scope="module")
def one_of_two_without(tmp_path_factory):
    """A store of two rows, one of which has no log-probs."""
    return stored(tmp_path_factory.mktemp("one of two") / "s.db", make_row(0), text_row(1, group=1, prompt="12"))


@pytest.mark.parametrize("preset", slow_except(PRESETS, *first_of_each_set_of_axes(), *WITHOUT))
def test_only_algorithms_that_read_no_log_probs_do_without(preset, one_of_two_without):
    algorithm, groups = build_algorithm(preset, {}), one_of_two_without
    with pytest.raises(
        ValueError, match="1 of 2 rows have no behavior log-probs, the first is 'text 1' of source 'other'"
    ):
        check_logprobs(groups, algorithm, SAMPLING, "error")
    for choice in ("initial", "current"):
        check_logprobs(groups, algorithm, SAMPLING, choice)
    if preset in WITHOUT:
        check_logprobs(groups, algorithm, SAMPLING, "unneeded")
    else:
        with pytest.raises(ValueError, match=f"this algorithm reads.*none: {', '.join(WITHOUT)}"):
            check_logprobs(groups, algorithm, SAMPLING, "unneeded")


@pytest.mark.slow
def test_algorithms_without_log_probs_ignore_them():
    batch = pad(RAGGED, shape_of(RAGGED, 4), logprobs=False)
    with_them = pad(RAGGED, shape_of(RAGGED, 4))
    (without, metrics), (read, _) = step(batch, "red_weight"), step(with_them, "red_weight")
    # Two programs, whose sums XLA rounds in other orders.
    assert_same_change(initial(), without, read)
    assert "effective_sample_size" not in metrics


def test_log_probs_of_another_distribution_are_refused(tmp_path):
    algorithm = build_algorithm("grpo", {})
    for change in (dict(temperature=1.0), dict(top_k=5), dict(top_p=0.5), dict(min_p=0.1), dict(temperature=None)):
        groups = stored(tmp_path / str(change), make_row(0, **change))
        with pytest.raises(ValueError, match="row 'row 0' .* belong to another distribution"):
            check_logprobs(groups, algorithm, SAMPLING, "error")
    check_logprobs(stored(tmp_path / "same", make_row(0)), algorithm, SAMPLING, "error")
    cut = SAMPLING._replace(min_p=0.1)
    check_logprobs(stored(tmp_path / "min_p", make_row(0, min_p=0.1)), algorithm, cut, "error")
    with pytest.raises(ValueError, match=r"was sampled with .*, min_p 0.0, but rollout has .*, 0.1: its"):
        check_logprobs(stored(tmp_path / "of before", make_row(0)), algorithm, cut, "error")
    check_logprobs(groups, build_algorithm("red_drop", {}), SAMPLING, "unneeded")


def test_log_probs_of_other_cuts_need_recorded_sets(tmp_path, monkeypatch):
    monkeypatch.setattr(missing_logprobs, "_TOGETHER", 2)
    rows = [
        make_row(place, top_p=0.5, recorded={"kept_ids": np.int32([[3, 5], [2, -1], [1, -1]])}) for place in range(5)
    ]
    check_logprobs(stored(tmp_path / "known", *rows), build_algorithm("grpo", {}), SAMPLING, "error")
    rows[4] = make_row(4, top_p=0.5, recorded={"kept_ids": np.int32([[3, 5], [-1, -1], [1, -1]])})
    with pytest.raises(ValueError, match=r"row 'row 4' .* top_p 0.5, .* but rollout has"):
        check_logprobs(stored(tmp_path / "unknown", *rows), build_algorithm("grpo", {}), SAMPLING, "error")


def without_logprobs(completion):
    return completion._replace(rows=tuple(row._replace(behavior_logprobs=None) for row in completion.rows))


def same_completions(ours, theirs):
    return same_groups(*(Group("g", one.rows[0].prompt_tokens, (one,), "") for one in (ours, theirs)))


def test_only_missing_log_probs_are_recomputed():
    groups = [
        group._replace(
            completions=tuple(without_logprobs(row) if i % 2 else row for i, row in enumerate(group.completions))
        )
        for group in RAGGED
    ]
    groups[0] = ungraded(groups[0])
    filled = with_logprobs(groups, shape_of(groups, 2), POLICY, initial(), SAMPLING, chunk=16)
    lacking = [
        (row, old)
        for group, before in zip(filled, groups, strict=True)
        for row, old in zip(group.completions, before.completions, strict=True)
        if old.rows[0].behavior_logprobs is None or not same_completions(row, old)
    ]
    assert [old.id for _, old in lacking] == ["row 1", "row 21", "row 23", "row 31"]
    for row, old in lacking:
        assert same_completions(without_logprobs(row), old)
        assert row.rows[0].behavior_logprobs.shape == row.rows[0].tokens.shape
    # The second and the last, one in each of the two batches, without any padding.
    for row, group in ((lacking[1][0], filled[2]), (lacking[3][0], filled[3])):
        prompt, completion = (jnp.array(x)[None] for x in (group.prompt_tokens, row.rows[0].tokens))
        ones = [jnp.ones(x.shape, bool) for x in (prompt, completion)]
        arguments = (POLICY.decoder, initial(), prompt, ones[0], completion, ones[1])
        logprobs = jax.jit(completion_logprobs, static_argnames=("decoder", "sampling", "chunk"))
        expected = logprobs(*arguments, sampling=SAMPLING, chunk=16).logprobs
        assert_same_logprobs(row.rows[0].behavior_logprobs, expected[0])
    batch = pad(filled[1:], shape_of(filled, 4))
    assert np.isfinite(batch.behavior_logprobs).all()


def test_a_store_becomes_tokenized_groups(tmp_path):
    name = tokenizer_name(TOKENIZER)
    rows = [make_row(i, group=i // 2, tokenizer=name) for i in range(4)]
    asked = [text_row(i, group=2, prompt="12", completion="3", truncated=bool(i)) for i in range(2)]
    tmp_path /= "s.db"
    append(tmp_path, [*rows, *asked])
    append(tmp_path, [make_row(9, group=0, tokenizer=name, reward=None, reward_parts=None)])
    groups = load_groups(tmp_path, POLICY)
    assert [len(group.completions) for group in groups] == [3, 2, 2]
    ended, cut = groups[2].completions
    assert ended.rows[0].tokens.tolist() == [*TOKENIZER.encode("3"), 1]
    assert cut.rows[0].tokens.tolist() == TOKENIZER.encode("3")
    append(tmp_path, [text_row(7, group=2, prompt="21", completion="3")])
    with pytest.raises(ValueError, match="group 'group 2': rows 'text 0' and 'text 7' have different prompts"):
        load_groups(tmp_path, POLICY)


def test_tokens_without_an_embedding_are_refused_by_row(tmp_path):
    larger = copy.deepcopy(TOKENIZER)
    larger.add_tokens(["<extra_a>", "<extra_b>"])
    policy, size, name = POLICY._replace(tokenizer=larger), POLICY.vocabulary, tokenizer_name(larger)
    fine = [text_row(0, group=0, prompt="12", completion="3"), make_row(1, group=1, tokenizer=name)]
    append(tmp_path / "fine", fine)
    assert len(load_groups(tmp_path / "fine", policy)) == 2
    ids = np.array([3, 4, len(larger) - 1], np.int32)
    wrong = [
        ("prompt_tokens", text_row(2, group=2, prompt="12<extra_b>", completion="3")),
        ("completion_tokens", text_row(2, group=2, prompt="12", completion="3<extra_b>")),
        ("prompt_tokens", make_row(2, group=2, tokenizer=name, prompt_tokens=ids)),
        ("completion_tokens", make_row(2, group=2, tokenizer=name, completion_tokens=ids)),
    ]
    for number, (place, row) in enumerate(wrong):
        folder = tmp_path / str(number)
        append(folder, [*fine, row])
        message = (
            f"row '{row.completion.id}' of source .*: {place}: token '<extra_b>' has id {len(larger) - 1}, but the"
            f" model in memory has an embedding of {size} tokens and a tokenizer of {len(larger)};"
        )
        with pytest.raises(ValueError, match=message):
            load_groups(folder, policy)


def test_an_epoch_has_every_group_once():
    groups = [group_of(make_row(i, group=i)) for i in range(7)]
    order = [group.id for batch in range(1, 8) for group in groups_at(groups, 3, batch, seed=1)]
    for epoch in range(3):
        assert sorted(order[7 * epoch : 7 * epoch + 7]) == sorted(group.id for group in groups)
    assert order[:7] != order[7:14]
    with pytest.raises(ValueError, match="7 groups are fewer than the 8"):
        groups_at(groups, 8, 1, 0)


def test_other_rows_join_the_group_of_their_prompt(tmp_path):
    ours = groups_of([make_row(i, group=i // 2) for i in range(6)])
    asked = dict(tokenizer="t", prompt_tokens=ours[0].prompt_tokens)
    expert = [text_row(i, group=9 + i, **asked, reward=1.0) for i in range(4)]
    expert.append(text_row(5, group=9, **asked, id="pending", reward=None))
    others = ByPrompt(stored(tmp_path / "s.db", *expert))
    made = mixed(ours, others, 3, batch=1, seed=0)
    assert [len(group.completions) for group in made] == [5, 2, 2]
    assert made[0].completions[:2] == ours[0].completions and made[0].id == ours[0].id
    added = [row.id for row in made[0].completions[2:]]
    assert len({*added}) == 3 and "store/pending" not in added
    chosen = {tuple(row.id for row in mixed(ours, others, 3, batch, 0)[0].completions) for batch in range(1, 20)}
    assert len(chosen) == 4
    assert [row.id for row in mixed(ours, others, 3, 1, 0)[0].completions] == [row.id for row in made[0].completions]
    assert mixed(ours, others, 0, 1, 0) == ours


def test_agents_share_a_problem_whatever_prompts_they_make(tmp_path):
    """With agents, equal prompts of problems with other answers are no reason to compare completions."""
    ours = group_of(make_row(0, prompt="say", answer="7"))
    prompts = [np.array([place + 1], np.int32) for place in range(3)]
    known = dict(prompt="say", tokenizer="t")
    agents = [make_row(1 + place, 1 + place, answer="7", prompt_tokens=prompts[place], **known) for place in range(3)]
    other = make_row(4, 4, answer="8", prompt_tokens=ours.prompt_tokens, **known)
    groups = stored(tmp_path / "s.db", *agents, other)
    for by_problem, expected in ((True, ["row 1", "row 2", "row 3"]), (False, ["row 4"])):
        assert [one.id for one in ByPrompt(groups, by_problem).get(ours)] == expected


def test_the_seats_of_a_problem_do_not_join(tmp_path):
    known = dict(prompt="say", answer="7", tokenizer="t")
    ours, *rows = (make_row(place, place, **known, metadata={"seat": seat}) for place, seat in enumerate("abab"))
    groups = stored(tmp_path / "s.db", *rows)
    others = ByPrompt(groups, by_problem=True)
    assert [one.id for one in others.get(group_of(ours))] == ["row 2"]
    token = np.ones((1, 1), np.int32)
    prompts = Prompts(token, token > 0, ["say"], [Problem("say", "7")])
    check_prompts(groups, True, "s.db", prompts, ["c", "b"])  # raises no error
    with pytest.raises(ValueError, match="'s.db': has no completions of the task's 1 training prompts"):
        check_prompts(groups, True, "s.db", prompts._replace(problems=[Problem("say", "8")]), ["a"])
    with pytest.raises(ValueError, match="'s.db': has no completions of the seats c, d, and completions join"):
        check_prompts(groups, True, "s.db", prompts, ["c", "d"])
    with pytest.raises(ValueError, match="'s.db': has no completions without a seat"):
        check_prompts(groups, True, "s.db", prompts, [""])
