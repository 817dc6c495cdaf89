"""Packing: every sequence whole and once, equal gradients, one compiled program, little padding."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.config import load_config
from recjax.experience import layout, packing
from recjax.experience.batch import Batch, Shape, pad
from recjax.experience.group import Completion, Grade, Group, Row
from recjax.experience.layout import Layout, padding_waste
from recjax.experience.packing import RowShape, pack, row_shape, sequence_lengths, shape_for
from recjax.models.decoder_config import DeltaNet
from recjax.runs.prepare import prepare
from recjax.training.update import update
from tests.agents.test_trajectory import GROUPS
from tests.closeness import assert_close
from tests.marks import campaign, slow
from tests.tiny import params_of
from tests.training import test_update
from tests.training.test_update import CASES, assert_same_step, make_batch, step
from tests.training.tiny_run import TINY, train

SHAPE = RowShape(3, 9)  # the longest sequence of make_batch is 4 + 5 - 1 tokens


def ragged(seed=0):
    """Unequal lengths, rows without a token, a prompt whose rows have none, and rows that begin alike."""
    batch = make_batch(seed)
    batch.completion_mask[[1, 6, 7, 8]] = False
    batch.completion_mask[0], batch.prompt_mask[0] = True, True
    batch.completions[2, :2], batch.completions[4] = batch.completions[0, :2], batch.completions[3]
    return batch


def shares_tokens(batch, packed):
    """True if the rows run fewer tokens than the sequences have."""
    return (packed.ends > 0).sum() < sequence_lengths(batch).sum()


@pytest.mark.parametrize(
    "preset",
    ["grpo", *slow("pairwise_consistency"), *campaign("opmd", "red_weight")],
)
def test_packing_changes_nothing(preset):
    batch, whole_prompts = ragged(), preset == "pairwise_consistency"
    expected = step(batch, preset, overrides=CASES[preset])
    for share in (True, False):
        packed = pack(batch, RowShape(2, 9), batch.group_ids if whole_prompts else None, share)
        assert packed.count > 1 and ((0 < packed.ends) & (packed.ends < 9)).any()
        assert share == shares_tokens(batch, packed)
        params, metrics = step(batch, preset, overrides=CASES[preset], packed=packed)
        assert_same_step((params, metrics), expected)
        assert metrics["gradient_norm"] > 1e-3


@pytest.mark.campaign
@pytest.mark.parametrize("layers", [(True, False), (True, False, False, True, True, False)])
def test_packing_changes_nothing_with_delta_nets(layers, monkeypatch):
    delta = DeltaNet(layers, key_heads=1, value_heads=2, key_dim=4, value_dim=6, kernel=4)
    config = dataclasses.replace(test_update.CONFIG, num_layers=len(layers), delta=delta, norm_epsilon=1e-3)
    monkeypatch.setattr(test_update, "CONFIG", config)
    monkeypatch.setattr(test_update, "initial", functools.cache(lambda: params_of(config)))
    batch = ragged()
    expected = step(batch)
    params, metrics = step(batch, packed=pack(batch, RowShape(2, 16), share=False))
    assert metrics["gradient_norm"] > 1e-3
    assert_same_step((params, metrics), expected)


@pytest.mark.parametrize("preset", ["grpo", *campaign("gspo", "pairwise_consistency")])
@pytest.mark.slow
def test_packing_changes_nothing_of_trajectories(preset):
    batch = pad(GROUPS, Shape(8, None, 5, 5))
    batch.completions[3:6, 0] += 1  # the rows of the last trajectory end otherwise than those of the first
    together = batch.group_ids if preset == "pairwise_consistency" else batch.trajectories
    expected = step(batch, preset)  # each row by itself, after its own prompt
    assert expected[1]["gradient_norm"] > 1e-3
    for share in (True, False):
        packed = pack(batch, RowShape(2, 7), together, share, grow=True)
        assert packed.count > 1
        assert_same_step(step(batch, preset, packed=packed), expected)


@pytest.mark.slow
def test_one_program_serves_batches_of_any_lengths():
    step(ragged(), packed=pack(ragged(), SHAPE))
    before, counts = update._cache_size(), set()
    for seed in range(4):
        batch = ragged(seed)
        batch.completion_mask[:, seed + 1 :] = False
        packed = pack(batch, SHAPE)
        assert_same_step(step(batch, packed=packed), step(batch))
        counts.add(int(packed.count))
    nothing = batch._replace(completion_mask=np.zeros_like(batch.completion_mask))
    params, metrics = step(nothing, packed=pack(nothing, SHAPE))
    assert_same_step((params, metrics), step(nothing))
    assert metrics["gradient_norm"] == 0 and len(counts) > 1
    # One more is the unpacked program, where no test before has compiled it.
    assert update._cache_size() <= before + 1


@st.composite
def batches(draw):
    prompts, group, time = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    batch = make_batch(draw(st.integers(0, 99)), prompts, group, time)
    lengths = draw(st.lists(st.integers(0, time), min_size=prompts * group, max_size=prompts * group))
    return batch._replace(completion_mask=np.arange(time) < np.array(lengths)[:, None])


@settings(deadline=None)
@given(batches(), st.integers(0, 40), st.integers(1, 3), st.booleans(), st.booleans())
def test_every_sequence_is_there_once_and_whole(batch, more, multiple, whole_prompts, share):
    longest = 4 + batch.completions.shape[1] - 1
    group = len(batch.completions) // len(batch.prompts)
    together = group if whole_prompts else 1
    shape = row_shape(longest * together * multiple + more, longest, together, multiple)
    assert shape.rows % multiple == 0 and shape.rows * shape.tokens <= longest * together * multiple + more
    packed = pack(batch, shape, batch.group_ids if whole_prompts else None, share)
    assert packed.tokens.shape[1:] == shape
    assert packed.count <= len(packed.tokens) and not packed.ends[packed.count :].any()
    rows = [x.reshape(-1, shape.tokens) for x in packed[:4]]
    held = {}  # the tokens before each token of a row, and the one that it predicts
    for index, length in enumerate(sequence_lengths(batch)):
        places, real = packed.places[index], batch.completion_mask[index]
        assert ((places >= 0) == real).all()
        if not length:
            continue
        prompt, completion = batch.prompts[index // group][batch.prompt_mask[index // group]], batch.completions[index]
        sequence = [*prompt.tolist(), *completion[real].tolist()]
        (row,) = {*(places[real] // shape.tokens).tolist()}
        tokens, positions, targets, ends = (x[row] for x in rows)
        for before, place in enumerate((places[real] - row * shape.tokens).tolist(), len(prompt)):
            # What a token may look at is the whole sequence up to it, in order.
            seen = (np.arange(shape.tokens) <= place) & (place < ends)
            assert tokens[seen].tolist() == sequence[:before] and targets[place] == sequence[before]
            assert positions[seen].tolist() == list(range(before))
        held.setdefault(row, []).append(sequence)
    # A row runs equal beginnings once, up to the last token before they part.
    expected = 0
    for sequences in held.values():
        beginnings = {tuple(sequence[:end]) for sequence in sequences for end in range(2, len(sequence) + 1)}
        expected += len(beginnings) if share else sum(len(sequence) - 1 for sequence in sequences)
    assert expected == (rows[3] > 0).sum()
    if whole_prompts:
        assert (micro_batches_of_prompts(packed, group) <= 1).all()


def rows_by_double_loop(batch, shape, together, share, most):
    """The row of each sequence, where each takes the fewest tokens; None if a micro-batch has no room for a unit."""
    lengths, group = sequence_lengths(batch), len(batch.completions) // len(batch.prompts)
    texts = [
        [*batch.prompts[index // group][batch.prompt_mask[index // group]].tolist(), *tokens[mask].tolist()]
        for index, (tokens, mask) in enumerate(zip(batch.completions, batch.completion_mask, strict=True))
    ]

    def shared(one, other):
        common = sum(itertools.takewhile(bool, (int(a == b) for a, b in zip(texts[one], texts[other], strict=False))))
        return max(common - 1, 0) if share else 0

    units = {}
    for index in sorted(np.flatnonzero(lengths).tolist(), key=lambda index: -lengths[index]):
        units.setdefault(index if together is None else int(together[index]), []).append(index)
    sizes = np.bincount(batch.group_ids, lengths)[batch.group_ids]
    order = (-sizes, batch.group_ids, lengths)
    ordered = sorted(units.values(), key=lambda of: (order[0][of[0]], order[1][of[0]], -sum(order[2][of])))
    rows = [[] for _ in range(most * shape.rows)]

    def free(row):
        text = {tuple(texts[index][:end]) for index in rows[row] for end in range(2, len(texts[index]) + 1)}
        used = len(text) if share else sum(lengths[rows[row]])
        return shape.tokens - used

    def needed(index, row):
        tokens = lengths[index] - max((shared(index, other) for other in rows[row]), default=0)
        return tokens if tokens <= free(row) else shape.tokens + 1

    for unit in ordered:
        starts = range(0, len(rows), shape.rows)
        least = [min(needed(unit[0], row) for row in range(start, start + shape.rows)) for start in starts]
        for start in sorted(starts, key=lambda start: least[start // shape.rows]):
            before = [[*row] for row in rows]
            for index in unit:
                row = min(range(start, start + shape.rows), key=lambda row: needed(index, row))
                if needed(index, row) > shape.tokens:
                    rows = before
                    break
                rows[row].append(index)
            else:
                break
        else:
            return None
    return {index: row for row, of in enumerate(rows) for index in of}


@settings(deadline=None, max_examples=60)
@given(batches(), st.integers(1, 3), st.integers(0, 30), st.booleans(), st.booleans(), st.integers(1, 3))
def test_each_sequence_goes_where_a_double_loop_puts_it(batch, rows, more, whole_prompts, share, vocabulary):
    tokens = batch.prompts % vocabulary
    batch = batch._replace(prompts=tokens, completions=batch.completions % vocabulary)
    shape = RowShape(rows, 4 + batch.completions.shape[1] - 1 + more)
    together = batch.group_ids if whole_prompts else None
    try:
        packed = pack(batch, shape, together, share)
    except ValueError:  # a micro-batch has no room for a group
        return
    found = {
        index: int(places.max()) // shape.tokens for index, places in enumerate(packed.places) if places.max() >= 0
    }
    assert found == rows_by_double_loop(batch, shape, together, share, len(packed.tokens))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_pad_writes_what_a_double_loop_writes(seed, of_rows, logprobs):
    random = np.random.default_rng(seed)
    groups = []
    for number in range(random.integers(1, 5)):
        prompt = random.integers(1, 9, random.integers(1, 5)).astype(np.int32)
        completions = []
        for name in range(random.integers(0, 4)):
            tokens = random.integers(1, 9, random.integers(0, 7)).astype(np.int32)
            mask = random.random(len(tokens)) < 0.7 if of_rows else np.ones(len(tokens), bool)
            known = np.where(mask, random.normal(size=len(tokens)), 0).astype(np.float32) if name else None
            grade = Grade(float(name), {"part": 0.5} if name == 1 else None, bool(name)) if name < 2 else None
            one = Completion(str(name), "test", "", (Row(prompt, tokens, mask, known),), None, name or None, name == 1)
            completions.append(one._replace(grade=grade))
        groups.append(Group(str(number), prompt, tuple(completions), "", None))
    shape = Shape(16, None, 12, 12) if of_rows else Shape(4, 3, 5, 7)
    batch = pad(groups, shape, logprobs)
    arrays = {name: np.zeros((shape.rows, shape.time)) for name in ("completions", "completion_mask", "logprobs")}
    prompts = np.zeros((shape.prompts, shape.prompt_time))
    expected = [
        (number, row, completion)
        for number, group in enumerate(groups)
        for row, completion in enumerate(group.completions)
    ]
    for count, (number, place, completion) in enumerate(expected):
        index = count if of_rows else 3 * number + place
        (row,) = completion.rows
        for time in range(len(row.tokens)):
            arrays["completions"][index, time] = row.tokens[time]
            arrays["completion_mask"][index, time] = row.mask[time]
            known = np.nan if row.behavior_logprobs is None else row.behavior_logprobs[time]
            arrays["logprobs"][index, time] = known if row.mask[time] else 0
        grade = completion.grade or Grade(np.nan)
        np.testing.assert_equal(batch.rewards[index], np.float32(grade.reward))
        part = (grade.reward_parts or {}).get("part", np.nan)
        np.testing.assert_equal(batch.reward_parts.get("part", np.full(index + 1, np.nan))[index], np.float32(part))
        version = -1 if completion.policy_version is None else completion.policy_version
        assert batch.policy_version[index] == version and batch.truncated[index] == completion.truncated
        np.testing.assert_equal(batch.accurate[index], np.float32(np.nan if grade.accurate is None else grade.accurate))
        if of_rows:
            prompts[index, : len(row.prompt_tokens)] = row.prompt_tokens
            assert batch.group_ids[index] == number
    for number, group in enumerate(() if of_rows else groups):
        prompts[number, : len(group.prompt_tokens)] = group.prompt_tokens
    np.testing.assert_array_equal(batch.prompts, prompts)
    np.testing.assert_array_equal(batch.completions, arrays["completions"])
    np.testing.assert_array_equal(batch.completion_mask, arrays["completion_mask"])
    assert (batch.behavior_logprobs is None) != logprobs
    if logprobs:
        np.testing.assert_array_equal(batch.behavior_logprobs, arrays["logprobs"].astype(np.float32))


def micro_batches_of_prompts(packed, group):
    """The number of micro-batches that hold completions of each prompt."""
    prompts = (packed.places // packed.tokens[0].size).reshape(-1, group * packed.places.shape[1])
    return np.array([len({*of_prompt[of_prompt >= 0].tolist()}) for of_prompt in prompts])


def test_compared_completions_stay_in_one_micro_batch():
    batch = make_batch()
    together, apart = (pack(batch, SHAPE, units) for units in (batch.group_ids, None))
    assert micro_batches_of_prompts(together, 3).max() == 1 < micro_batches_of_prompts(apart, 3).max()


def gsm8k_like(generator) -> Batch:
    """96 prompts of 110 tokens and 8 completions each of 190, both medians of log-normals, cut at 256 and 1024."""
    prompts = np.clip(generator.lognormal(np.log(110), 0.3, 96).astype(int), 50, 256)
    completions = np.clip(generator.lognormal(np.log(190), 0.5, 768).astype(int), 1, 1024)
    batch = make_batch(prompts=96, group=8, time=1024)
    return batch._replace(
        prompts=np.zeros((96, 256), np.int32),
        prompt_mask=np.arange(256) < prompts[:, None],
        completion_mask=np.arange(1024) < completions[:, None],
    )


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2048, 8192, 16384])
def test_little_padding_on_lengths_like_those_of_gsm8k(budget):
    for seed in range(3):
        batch = gsm8k_like(np.random.default_rng(seed))
        packed = pack(batch, row_shape(budget, 256 + 1024 - 1))
        assert padding_waste(batch, Layout(1, packed)) < 0.1
        assert padding_waste(batch, Layout(1, packed)) == pytest.approx(1 - (packed.ends[: packed.count] > 0).mean())
        assert padding_waste(batch, Layout()) > 0.7


def test_padding_waste_counts_every_computed_position():
    batch = make_batch(prompts=2, group=2, time=3)
    batch.prompt_mask[:] = [[1, 1, 1, 0], [1, 0, 0, 0]]
    batch.completion_mask[:] = [[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]]
    # 4 of 8 of the prompts; 2 + 1 + 0 + 0 of 8 of the completions, whose last tokens are not run.
    assert padding_waste(batch, Layout()) == pytest.approx(1 - 7 / 16)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((99, 100), ["training.tokens_per_micro_batch = 99", "room for 100 tokens", "raise it to 100"]),
        ((799, 100, 8), ["8 of the longest sequences, 100 tokens each", "raise it to 800"]),
        ((399, 100, 1, 4), ["100 tokens on each of 4 devices", "raise it to 400"]),
    ],
)
def test_a_budget_too_small_is_refused(arguments, words):
    with pytest.raises(ValueError) as error:
        row_shape(*arguments)
    assert all(word in str(error.value) for word in words)
    row_shape(arguments[0] + 1, *arguments[1:])


def test_no_batch_gets_more_rows_than_it_has_sequences(tiny):
    config = tiny("training.tokens_per_micro_batch=2048")
    assert shape_for(config, Shape(2, 3, 10, 91)) == (6, 102)
    assert shape_for(config, Shape(2, 3, 10, 91), multiple=4) == (8, 102)
    assert shape_for(config, Shape(20, 3, 10, 91)) == (20, 102)


@pytest.fixture
def tiny(tmp_path):
    """A function from overrides to a config of two steps of the tiny run."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    names = iter("abc")
    return lambda *overrides: load_config(path, [f"output={tmp_path / next(names)}", "training.steps=2", *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("asked", [True, *campaign(False)])
def test_a_packed_run_is_the_same_run(tiny, monkeypatch, asked):
    # Steps so small that the second begins with the same parameters: Adam turns rounding into steps.
    small = "optimizer.learning_rate=1e-6"
    whole = train(tiny(small))
    if not asked:
        monkeypatch.setattr(layout, "LEAST_SAVED", -1e15)
        monkeypatch.setattr(layout, "LEAST_SHARE", -9)
        monkeypatch.setattr(packing, "LEAST_TOKENS", 20)
    packed = train(tiny(small, *["training.tokens_per_micro_batch=20"] * asked))
    for one, other in zip(whole[1:], packed[1:], strict=True):
        assert_close(other["loss"], one["loss"], least=0.1)
        for name in ("gradient_norm", "update_norm"):
            assert_close(other[name], one[name], 1e-3)
        assert 0 <= other["padding_waste"] < 1 and 0 <= one["padding_waste"] < 1
        assert one["padding_waste"] != other["padding_waste"]
    assert any(row["padding_waste"] > 0 for row in whole[1:])


@pytest.mark.parametrize(("preset", "least"), [("grpo", 6), ("pairwise_consistency", 24)])
def test_a_budget_too_small_is_refused_before_work_starts(tiny, preset, least):
    words = f"training.tokens_per_micro_batch = 5: .* raise it to {least} or more"
    with pytest.raises(ValueError, match=words):
        prepare(tiny("training.tokens_per_micro_batch=5", f"algorithm.preset={preset}"))


def test_rows_fill_the_budget_and_whole_tiles():
    assert row_shape(16384, 1279) == (12, 1280)
    assert row_shape(16384, 1279, multiple=8) == (8, 2048)
    assert row_shape(300, 130) == (2, 150)
