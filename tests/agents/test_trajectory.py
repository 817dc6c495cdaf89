"""Turns become rows: what was sampled stays as it was, and is in one row once."""

import copy

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from recjax.agents.trajectory import Trajectory, thoughts_opening
from recjax.experience.batch import Shape, pad, row_places
from recjax.experience.group import Completion, Grade, Group, Row, Turn
from recjax.experience.packing import RowShape, pack
from recjax.experience.records import groups_from_bytes, groups_of, groups_to_bytes, records_of
from recjax.hub.tokenizers import character_tokenizer
from recjax.models.sampling import Sampling
from recjax.rollout.requests import Sampled
from tests.experience.rows import TIME, append, read
from tests.hub.test_tokenizers import SENTENCEPIECES


def tokenizer():
    """Characters, and "ab" as one token of its own, which encoding prefers."""
    vocabulary = {token: place for place, token in enumerate(["<pad>", "<eos>", *"abcd.", "ab"])}
    model = tokenizers.models.BPE(vocabulary, [("a", "b")])
    made = tokenizers.Tokenizer(model)
    made.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


PAD, EOS, A, B, C, D, DOT, AB = range(8)


def turn(*tokens, logprob=-1.0, truncated=False):
    ids = np.array(tokens, np.int32)
    return Sampled(ids, np.full(len(ids), logprob, np.float32), np.full(len(ids), 2, np.int32), truncated)


def whole(row: Row) -> list[int]:
    return [*row.prompt_tokens.tolist(), *row.tokens.tolist()]


def test_a_growing_row_keeps_its_sampled_tokens():
    made = Trajectory(tokenizer())
    prompt = made.tokens_of("c")
    assert made.add(prompt, turn(A, B, EOS), "c") == "ab<eos>"
    # As text "ab" would be one token: the two that were sampled stay.
    prompt = made.tokens_of("cab<eos>d.")
    assert prompt.tolist() == [C, A, B, EOS, D, DOT]
    made.add(prompt, turn(C, logprob=-2.0), "cab<eos>d.")
    (row,) = made.rows
    assert whole(row) == [C, A, B, EOS, D, DOT, C]
    assert row.mask.tolist() == [True, True, True, False, False, True]
    assert row.behavior_logprobs.tolist() == [-1, -1, -1, 0, 0, -2]
    assert made.oldest_version == 2 and not made.truncated


def test_a_copy_keeps_its_rows_while_turns_are_added():
    made = Trajectory(tokenizer())
    made.add(made.tokens_of("c"), turn(A, B, EOS), "c")
    before = copy.copy(made)
    made.add(made.tokens_of("cab<eos>d"), turn(C), "cab<eos>d")
    assert before.tokens_of("cab<eos>dcd").tolist() == [C, A, B, EOS, D, C, D]
    assert len(before.rows[0].tokens) == 3 and before._texts == ("cab<eos>",)


@pytest.mark.parametrize("name", SENTENCEPIECES)
def test_a_number_over_two_turns_stays_a_number(name):
    """Pieces begin with a space at the beginning of a text, and not where a text goes on."""
    tokenizer = SENTENCEPIECES[name]
    made, ids = Trajectory(tokenizer), tokenizer.convert_tokens_to_ids
    prompt = made.tokens_of("x=")
    assert made.add(prompt, turn(ids("4")), "x=") == "4"
    assert made.add(made.tokens_of("x=42"), turn(ids("▁42"), ids("</s>")), "x=42") == " 42</s>"
    made.add(made.tokens_of("x=42 42</s>Yes"), turn(ids("<0x0A>"), ids("▁Yes")), "x=42 42</s>Yes")
    (row,) = made.rows
    pieces = tokenizer.convert_ids_to_tokens(whole(row))
    after = "Yes" if name == "first" else "▁Yes"  # behind a special token, texts are what the tokenizer says they are
    assert pieces == ["<s>", "▁x", "=", "4", "2", "▁42", "</s>", after, "<0x0A>", "▁Yes"]
    assert row.mask.tolist() == [True, False, True, True, False, True, True]
    assert made.tokens_of("x=42 42</s>Yes\n Yes2").tolist() == [*whole(row), ids("2")]


def test_a_turn_that_continues_no_row_starts_one():
    made = Trajectory(tokenizer())
    made.add(made.tokens_of("c"), turn(A, B, EOS), "c")
    dropped = made.tokens_of("c.d")  # a template that drops what was said
    made.add(dropped, turn(D), "c.d")
    again = made.tokens_of("cab<eos>.")  # and goes on from the first row after all
    made.add(again, turn(A), "cab<eos>.")
    assert [whole(row) for row in made.rows] == [[C, A, B, EOS, DOT, A], [C, DOT, D, D]]
    assert made.tokens_of("cab").tolist() == [C, AB]  # the beginning of a row is no row


def test_token_ids_go_on_where_text_is_none():
    made = Trajectory(tokenizer())
    made.add(np.array([C]), turn(A))
    made.add(np.array([C, A, B]), turn(D))
    made.add(np.array([C, A, B]), turn(A))  # the same prompt again
    assert [whole(row) for row in made.rows] == [[C, A, B, D], [C, A, B, A]]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(2, 6), max_size=3), st.integers(1, 3)), max_size=6))
def test_every_turn_is_in_one_row_behind_its_prompt(steps):
    made, turns, last = Trajectory(tokenizer()), [], [C]
    for number, (goes_on, between, length) in enumerate(steps):
        prompt = [*last, *between] if goes_on else [D, number % 5 + 2, *between]
        sampled = turn(*np.random.default_rng(number).integers(2, 7, length), logprob=-1.0 - number)
        made.add(np.array(prompt, np.int32), sampled)
        last = [*prompt, *sampled.tokens.tolist()]
        turns.append((prompt, sampled))
    assert sum(row.mask.sum() for row in made.rows) == sum(len(sampled.tokens) for _, sampled in turns)
    for prompt, sampled in turns:
        holding = [
            row
            for row in made.rows
            if whole(row)[: len(prompt) + len(sampled.tokens)] == [*prompt, *sampled.tokens.tolist()]
        ]
        start = [len(prompt) - len(row.prompt_tokens) for row in holding]
        assert any(
            np.array_equal(row.behavior_logprobs[at : at + len(sampled.tokens)], sampled.logprobs)
            and row.mask[at : at + len(sampled.tokens)].all()
            for row, at in zip(holding, start, strict=True)
        )


def completion(name, rows, reward=1.0):
    return Completion(name, "policy", "text", tuple(rows), Sampling(), 3, False, Grade(reward, {"turns": 2.0}, True))


def row(*prompt, then, mask):
    tokens = np.array(then, np.int32)
    logprobs = np.where(mask, -np.arange(1.0, len(tokens) + 1), 0).astype(np.float32)
    return Row(np.array(prompt, np.int32), tokens, np.array(mask, bool), logprobs)


LONG = row(C, D, then=[A, B, DOT, A], mask=[True, True, False, True])
SHORT = row(C, then=[B], mask=[True])
OTHER = row(D, D, D, then=[A, C], mask=[False, True])
GROUPS = [
    Group("g0", LONG.prompt_tokens, (completion("a", [LONG, OTHER], 1.0), completion("b", [SHORT], 0.0)), "c", "x"),
    Group("g1", SHORT.prompt_tokens, (completion("c", [SHORT, LONG, OTHER], 0.5),), "d", "x"),
]


def test_rows_of_a_store_are_the_same_trajectories_again(tmp_path):
    append(tmp_path / "s.db", records_of(GROUPS, "t", TIME))
    for found in (groups_of(read(tmp_path / "s.db")), groups_from_bytes(groups_to_bytes(GROUPS))):
        assert [str(group) for group in found] == [str(group) for group in GROUPS]


def test_trajectories_as_a_batch_by_a_loop():
    batch = pad(GROUPS, Shape(2, None, 5, 5))
    assert batch.completions.shape == (8, 5)  # two rows, doubled until all six are there
    expected = [(0, 0, LONG, 1.0), (0, 0, OTHER, 1.0), (2, 0, SHORT, 0.0)]
    expected += [(3, 1, row, 0.5) for row in (SHORT, LONG, OTHER)]
    for place, (first, group, (prompt, tokens, mask, logprobs, _), reward) in enumerate(expected):
        real, asked = batch.token_mask[place], batch.prompt_mask[place]
        assert (np.flatnonzero(real) == np.arange(len(tokens))).all()
        assert (np.flatnonzero(asked) == np.arange(len(prompt))).all()
        assert batch.prompts[place][asked].tolist() == prompt.tolist()
        assert batch.completions[place][real].tolist() == tokens.tolist()
        assert batch.completion_mask[place][real].tolist() == mask.tolist()
        assert batch.behavior_logprobs[place][real].tolist() == logprobs.tolist()
        assert (batch.trajectories[place], batch.group_ids[place], batch.rewards[place]) == (first, group, reward)
    assert not batch.completion_mask[6:].any() and batch.prompt_mask[6:].sum(-1).tolist() == [1, 1]
    assert batch.trajectories[6:].tolist() == [6, 7] and batch.group_ids[6:].tolist() == [2, 2]
    assert row_places(GROUPS, batch.shape) == list(range(6))
    with pytest.raises(ValueError, match="row 'a' has 6 tokens; the batch has room for 5"):
        pad(GROUPS, Shape(8, None, 4, 4))


@pytest.mark.parametrize("share", [True, False])
def test_what_belongs_together_is_packed_into_one_micro_batch(share):
    batch = pad(GROUPS, Shape(8, None, 5, 5))
    for together in (None, batch.trajectories, batch.group_ids):
        packed = pack(batch, RowShape(1, 5), together, share, grow=True)
        size = packed.tokens[0].size
        places = packed.places.max(-1) // size  # the micro-batch of each row
        assert (places[6:] == -1).all() and packed.count == places.max() + 1
        assert ((packed.places >= 0) == batch.token_mask).all()
        assert all(len({*row[row >= 0] // size}) <= 1 for row in packed.places)
        if together is None:
            assert packed.count == (2 if share else 4)  # two of LONG, and SHORT and OTHER share rows
        else:
            assert all(len({*places[:6][together[:6] == each]}) == 1 for each in together[:6])
    words = "room for 1 rows of 5 tokens, but rows of 5, 4 tokens belong to one trajectory"
    with pytest.raises(ValueError, match=words):
        pack(batch, RowShape(1, 5), batch.trajectories, share)


@pytest.mark.parametrize(
    ("turns", "opening"),
    [
        # Prompt and reply, alternating; # is the token that ends a sequence.
        (["user:a#<think>\n", "x"], "<think>"),
        (["user:a#", "x"], ""),
        (["say <think> a#", "x"], ""),
        (["user:a#<think>\n", "so</think>b#", "user:c#<think>\n", "x"], "<think>"),
        (["user:a#<think>\n", "so</think>b#", "user:c#", "x"], ""),
        # A reply that is cut inside its thoughts, and then a new turn, or more of the same text.
        (["user:a#<think>\n", "so", "#user:c#", "x"], ""),
        (["user:a#<think>\n", "so#", "user:c", "x"], ""),
        (["user:a#<think>\n", "so", " wait,", "x"], "<think>"),
        (["user:a#", "<think>so", "", "more", " wait,", "x"], "<think>"),
        (["user:a#<think>\n", "so", " wait,", "then</think>", "b", "x"], ""),
        (["user:a#<think>\n", "so", "</think>", "x"], ""),
        (["user:a#[THINK]", "so", "", "x"], "[THINK]"),
        (["user:a#<think>\n", "so</think>", "say <think> or", "x"], ""),
    ],
)
def test_a_reply_starts_inside_thoughts_its_turn_opened(turns, opening):
    letters = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    made = Trajectory(letters)

    def ids(text):
        return [0 if character == "#" else letters.convert_tokens_to_ids(character) for character in text]

    text = []
    for prompt, reply in zip(turns[::2], turns[1::2], strict=True):
        text += ids(prompt)
        made.add(np.array(text, np.int32), turn(*ids(reply)))
        text += ids(reply)
    ends = tuple(Turn(*end) for end in made.ends)
    one = Completion("a", "p", "", made.rows, Sampling(), 0, False, turns=ends)
    assert thoughts_opening(one, letters) == opening
    recorded = one._replace(turns=())  # turns that others recorded without their ends
    assert "" in turns or thoughts_opening(recorded, letters) == opening


def test_of_a_trajectory_without_tokens_nothing_is_known():
    assert thoughts_opening(completion("a", []), tokenizer()) == ""


def sets(*ids):
    return {"kept_ids": np.array(ids, np.int32)}


def test_recorded_arrays_follow_their_tokens_through_turns_and_batches():
    made = Trajectory(tokenizer())
    made.add(np.array([C], np.int32), turn(A, B)._replace(recorded=sets([1], [2])))
    made.add(np.array([C, A, B, DOT], np.int32), turn(A, B)._replace(recorded=sets([3, 4], [5, 6])))
    recorded = made.rows[0].recorded["kept_ids"]
    assert made.turns[1].up_to(1).recorded["kept_ids"].tolist() == [[3, 4]]
    assert recorded.tolist() == [[1, -1], [2, -1], [-1, -1], [3, 4], [5, 6]]
    group = Group("g", made.rows[0].prompt_tokens, (completion("a", made.rows), completion("b", [SHORT])), "c")
    of_batch = pad([group], Shape(2, None, 6, 6)).recorded["kept_ids"]
    assert of_batch[0, :5].tolist() == recorded.tolist() and (of_batch[0, 5:] == -1).all() and (of_batch[1] == -1).all()


@pytest.mark.parametrize("other", [2, 3])
def test_packed_rows_share_tokens_that_recorded_the_same(other):
    begin = row(C, then=[A, B, A], mask=[True] * 3)
    rows = [begin._replace(recorded=sets([1], [last], [4])) for last in (2, other)]
    group = Group(
        "g", begin.prompt_tokens, tuple(completion(name, [one]) for name, one in zip("ab", rows, strict=True)), "c"
    )
    first, second = pack(pad([group], Shape(2, None, 6, 6)), RowShape(1, 8)).places[:2].tolist()
    assert first[0] == second[0] and (first[1] == second[1]) == (other == 2)
