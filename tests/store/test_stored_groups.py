"""A store that is read by group is what it is when all of it is read, and no more than an index of it is held."""

import gc
import os
import re
import sqlite3

import numpy as np
import pytest

from recjax.config import load_config
from recjax.experience.batch import Shape, pad
from recjax.experience.group import Completion, Grade, Group, is_whole
from recjax.experience.layout import score
from recjax.experience.records import Record, groups_of
from recjax.sources.drawing import groups_at
from recjax.store import missing_logprobs, stored_groups
from recjax.store.missing_logprobs import with_initial_logprobs, with_logprobs
from recjax.store.store import Store
from recjax.store.stored import load_stored, with_rewards
from recjax.store.stored_groups import ByPrompt, load_groups
from recjax.store.tokenize import tokenized, tokenizer_name
from tests.batch_shapes import shape_of
from tests.closeness import assert_same_logprobs
from tests.experience.groups import same_groups
from tests.experience.rows import append, make_row, read, text_row
from tests.marks import slow
from tests.store.test_missing_logprobs import POLICY, SAMPLING, TOKENIZER
from tests.training.test_update import initial
from tests.training.tiny_run import TINY

NAME = tokenizer_name(TOKENIZER)


@pytest.fixture(params=["memory", "file"])
def place(request, monkeypatch, tmp_path):
    """Where the copy of a store with tokens is; few groups are read at a time."""
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_groups, "_TOGETHER", 3)
    monkeypatch.setattr(stored_groups, "_TOKENIZE_TOGETHER", 5)
    if request.param == "file":
        monkeypatch.setattr(stored_groups, "SMALL", 0)
    return request.param


def scattered_rows(seed, agents=True):
    """Completions of groups that come in any order: with tokens, texts, pending ones, agents' with further rows."""
    generator = np.random.default_rng(seed)
    rows = []
    for number in range(40):
        group = int(generator.integers(9))
        kind = generator.integers(4)
        row = make_row(number, group=group, length=1 + number % 6, tokenizer=NAME)
        if kind == 0:
            prompt = row.group.prompt_tokens
            row = text_row(number, group=group, prompt_tokens=prompt, tokenizer=NAME, completion="12")
        elif kind == 1 and agents:
            (plain,) = row.completion.rows
            own = np.arange(1, 2 + number % 3, dtype=np.int32)
            more = [plain._replace(prompt_tokens=own + 1) for place in range(number % 3)]
            row = make_row(number, group=group, tokenizer=NAME, rows=(plain._replace(prompt_tokens=own), *more))
        elif kind == 1:
            continue
        elif kind == 2 and number % 3 == 0:
            row = make_row(number, group=group, tokenizer=NAME, reward=None, reward_parts=None)
        rows.append(row)
    return [rows[place] for place in generator.permutation(len(rows))]


def in_parts(path, rows, parts=4):
    for part in np.array_split(np.arange(len(rows)), parts):
        append(path, [rows[place] for place in part])


def reference(path):
    """The groups of a store, all of it read at once."""
    return groups_of(tokenized(read(path), POLICY))


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(map(same_groups, ours, theirs)) and [*map(str, ours)] == [*map(str, theirs)]


@pytest.mark.parametrize("seed", [0, 1, *slow(2, 3)])
def test_groups_and_batches_are_those_of_the_whole_store(place, tmp_path, seed):
    in_parts(tmp_path / "store", scattered_rows(seed))
    groups, expected = load_groups(tmp_path / "store", POLICY), reference(tmp_path / "store")
    assert equal(list(groups), expected)
    assert any(len(one.rows) > 1 for group in expected for one in group.completions)
    assert groups.sizes.tolist() == [len(group.completions) for group in expected]
    for batch in range(1, 9):
        assert equal(groups_at(groups, 4, batch, seed), groups_at(expected, 4, batch, seed))
    assert equal(list(groups[2:7][1:]), expected[3:7]) and equal([groups[-1]], expected[-1:])
    assert (tmp_path / "cache").exists() == (place == "file")


def test_what_is_trained_on_is_whole_and_counted(place, tmp_path):
    rows = scattered_rows(0, agents=False)
    longest = dict(prompt_tokens=np.arange(9, dtype=np.int32), length=30, tokenizer=NAME)
    rows.insert(7, make_row(98, group=98, **longest, reward=None, reward_parts=None))
    in_parts(tmp_path / "store", rows)
    (tmp_path / "tiny.yaml").write_text(TINY)
    options = [f"experience.store={tmp_path / 'store'}", "experience.missing_logprobs=current"]
    options += [f"output={tmp_path / 'run'}", "rollout.temperature=0.9", "rollout.prompts_per_step=2"]
    config = load_config(tmp_path / "tiny.yaml", options)
    found = load_stored(config, POLICY)
    everything = reference(tmp_path / "store")
    whole = [group for group in everything if is_whole(group)]
    assert 0 < len(whole) < len(everything) and [group.id for group in found.groups] == [group.id for group in whole]
    assert found.shape == shape_of(whole, 2)
    pending = [one.grade is None for group in everything if not is_whole(group) for one in group.completions]
    names = ("pending_groups", "pending_rows", "rows_beside_pending")
    counts = len(everything) - len(whole), sum(pending), len(pending) - sum(pending)
    assert found.left_out == dict(zip(names, counts, strict=True))
    assert found.digest == load_stored(config, POLICY).digest, "it is a digest of what is trained on"
    append(tmp_path / "store", [make_row(97, group=97, tokenizer=NAME, reward=None, reward_parts=None)])
    assert found.digest == load_stored(config, POLICY).digest
    append(tmp_path / "store", [make_row(96, group=96, tokenizer=NAME)])
    assert found.digest != load_stored(config, POLICY).digest


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_are_trained_on_with_their_own_prompts(tmp_path, rows):
    plain = make_row(0, tokenizer=NAME)
    (row,) = plain.completion.rows
    own = [row._replace(prompt_tokens=np.array([7, 8, 9, 10, place], np.int32)) for place in range(rows)]
    append(tmp_path / "store", [plain, make_row(1, tokenizer=NAME, rows=tuple(own))])
    (tmp_path / "tiny.yaml").write_text(TINY)
    options = [f"experience.store={tmp_path / 'store'}", f"output={tmp_path / 'run'}", "rollout.temperature=0.9"]
    found = load_stored(load_config(tmp_path / "tiny.yaml", [*options, "rollout.prompts_per_step=1"]), POLICY)
    batch = pad(list(found.groups), found.shape)
    prompts = [tokens[mask].tolist() for tokens, mask in zip(batch.prompts, batch.prompt_mask, strict=True)]
    assert prompts[: 1 + rows] == [plain.group.prompt_tokens.tolist(), *([7, 8, 9, 10, place] for place in range(rows))]
    assert batch.prompts.shape[1] == len(own[0].prompt_tokens) + len(row.tokens) - 1


def test_completions_of_a_prompt_are_found_in_all_groups(place, tmp_path):
    rows = scattered_rows(1)
    in_parts(tmp_path / "store", rows)
    found, expected = ByPrompt(load_groups(tmp_path / "store", POLICY)), {}
    groups = {group.prompt_tokens.tobytes(): group for group in reference(tmp_path / "store")}
    for group in reference(tmp_path / "store"):
        rewarded = [one.id for one in group.completions if one.grade]
        expected.setdefault(group.prompt_tokens.tobytes(), []).extend(rewarded)
    assert {prompt: [one.id for one in found.get(group)] for prompt, group in groups.items()} == expected
    other = reference(tmp_path / "store")[0]._replace(prompt_tokens=np.array([9], np.int32))
    assert len(expected) == 3 and found.get(other) == []


def without_some(record):
    """The record without log-probs if its number is even; of several rows, others chose the second token."""
    (number,), one = re.findall(r"\d+", record.completion.id), record.completion
    rows = [row._replace(behavior_logprobs=None) if int(number) % 2 == 0 else row for row in one.rows]
    rows = [row._replace(mask=np.arange(len(row.tokens)) != 1) if len(rows) > 1 else row for row in rows]
    return record._replace(group=record.group._replace(completions=(one._replace(rows=tuple(rows)),)))


@pytest.mark.parametrize("has_agents", [False, True])
@pytest.mark.slow
def test_initial_log_probs_are_stored_exactly(place, tmp_path, monkeypatch, has_agents):
    if place == "file":
        monkeypatch.setattr(missing_logprobs, "_SMALL", 1)
    in_parts(tmp_path / "store", [without_some(record) for record in scattered_rows(2, agents=has_agents)])
    groups, expected = load_groups(tmp_path / "store", POLICY), reference(tmp_path / "store")
    shape = Shape(2, None, 40, 40) if has_agents else shape_of(expected, 2)
    filled = with_initial_logprobs(groups, shape, POLICY, initial(), SAMPLING, 16)
    listed = with_logprobs(expected, shape, POLICY, initial(), SAMPLING, 16)
    assert equal(list(filled), listed) and equal([filled[5]], [listed[5]]) and not equal(list(filled), expected)
    numbers = [one.id for group in listed for one in group.completions]
    rows = [row for group in listed for one in group.completions for row in one.rows]
    batch = pad(listed, Shape(len(rows), None, 40, 40))
    found = score(POLICY.decoder, initial(), batch, SAMPLING, 16)
    were_there = [row.behavior_logprobs for group in expected for one in group.completions for row in one.rows]
    lacking = [place for place, known in enumerate(were_there) if known is None]
    assert not has_agents or any(not rows[place].mask.all() for place in lacking)
    assert len(lacking) > 9 and (not has_agents or len(rows) > len(numbers))
    for place in lacking:
        row, now = rows[place], np.minimum(found[place], 0)[: len(rows[place].tokens)]
        assert_same_logprobs(row.behavior_logprobs, np.where(row.mask, now, 0))


def test_rewards_of_another_grader_replace_the_given_ones(place, tmp_path):
    rows = scattered_rows(3, agents=False)
    in_parts(tmp_path / "store", rows)
    (tmp_path / "tiny.yaml").write_text(TINY)
    options = [
        f"experience.store={tmp_path / 'store'}",
        "experience.missing_logprobs=current",
        "experience.regrade=true",
    ]
    options += [f"output={tmp_path / 'run'}", "rollout.temperature=0.9", "rollout.prompts_per_step=2"]
    config = load_config(tmp_path / "tiny.yaml", options)
    found = load_stored(config, POLICY)
    everything = reference(tmp_path / "store")
    assert {one.grade.reward for group in found.groups for one in group.completions} == {0.0}
    assert len(found.groups) == len(everything)
    grades = {number: Grade(None if number % 4 == 0 else number / 8) for number in range(1, len(rows) + 1)}
    with Store(tmp_path / "store") as store:
        store.add_rewards({number: (grade, None) for number, grade in grades.items()}, "another")
        numbers = {record.completion.id: record.number for record in store.records()}
    expected = [
        [(one.id, numbers[one.id] / 8) for one in group.completions if numbers[one.id] % 4] for group in everything
    ]
    graded = with_rewards(found, "another", config)
    assert [[(one.id, one.grade.reward) for one in group.completions] for group in graded.groups] == [
        group for group in expected if group
    ]
    assert graded.digest != found.digest and equal(reference(tmp_path / "store"), everything)


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_store_is_tokenized_once_as_it_grows(place, tmp_path, monkeypatch, caplog):
    path, calls = tmp_path / "store", []
    tokenize = stored_groups.tokenized
    monkeypatch.setattr(stored_groups, "tokenized", lambda *given: calls.extend(given[0]) or tokenize(*given))

    def opened(read_again):
        calls.clear()
        assert equal(list(load_groups(path, POLICY)), reference(path))
        assert len(calls) == read_again

    rows = scattered_rows(0)
    in_parts(path, rows)
    opened(len(rows))
    opened(0)
    before, expected = load_groups(path, POLICY), reference(path)
    append(path, [make_row(99, group=1, tokenizer=NAME)])
    opened(1)
    assert equal(list(before), expected), "whoever reads on"
    opened(0)
    (file,) = (tmp_path / "cache").rglob("*.db")
    with sqlite3.connect(file) as database:
        database.execute("update store set completions = 1")
    opened(len(rows) + 1)
    assert f"{file}: is damaged" in caplog.text and "makes it again" in caplog.text
    opened(0)
    longer = POLICY._replace(stop_ids=(2,))
    assert [group.completions[0].rows[0].tokens[-1] for group in load_groups(path, longer)].count(2) > 0
    assert len(calls) == len(rows) + 1, "another policy has a file of its own"
    opened(0)
    with Store(path) as store:
        store.delete([3])
    with sqlite3.connect(path) as database, sqlite3.connect(tmp_path / "backup") as copy:
        database.backup(copy)
    opened(len(rows))
    append(path, [make_row(100, group=1, tokenizer=NAME)])
    opened(1)
    for old in tmp_path.glob("store-*"):
        old.unlink()
    os.replace(tmp_path / "backup", path)
    append(path, [make_row(101, group=1, tokenizer=NAME)])  # has the number of the row that the backup lacks
    opened(len(rows) + 1)


def test_damage_is_noticed_when_a_store_is_opened(place, tmp_path):
    in_parts(tmp_path / "store", scattered_rows(0))
    for change in (
        "update completions set row_length = 1",
        "update rewards set reward = null",
        "delete from rewards",
    ):
        with sqlite3.connect(tmp_path / "store") as database:
            copy = sqlite3.connect(tmp_path / change)
            database.backup(copy)
        copy.execute(f"{change} where number = 7")
        copy.commit()
        copy.close()
        with pytest.raises(ValueError, match="is damaged"):
            load_groups(tmp_path / change, POLICY)


def test_reading_a_completion_detects_a_wrong_length(tmp_path):
    append(tmp_path / "store", [make_row(number, group=number // 2, tokenizer=NAME) for number in range(4)])
    with sqlite3.connect(tmp_path / "store") as database:
        database.execute("update completions set row_length = 1 where number = 3")
    with pytest.raises(ValueError, match="is damaged: completion 3 .* does not match its checksum"):
        groups = load_groups(tmp_path / "store", POLICY)  # the tests' check of types may read any group
        assert len(groups[0].completions) == 2
        groups[1]


def test_completions_deleted_during_reading_are_an_error(tmp_path):
    append(tmp_path / "store", [make_row(number, group=number // 2, tokenizer=NAME) for number in range(4)])
    groups = load_groups(tmp_path / "store", POLICY)
    with Store(tmp_path / "store") as store:
        store.delete([2])
    assert len(groups[1].completions) == 2
    with pytest.raises(ValueError, match="completions of the group of number 1 are gone"):
        groups[0]


def test_stored_groups_keep_only_an_index(place, tmp_path):
    in_parts(tmp_path / "store", scattered_rows(0))
    expected = len(reference(tmp_path / "store"))
    asked = reference(tmp_path / "store")

    def alive():
        """How many there are of those made after everything before was frozen."""
        gc.collect()
        return sum(type(one) in (Group, Completion, Record) for one in gc.get_objects())

    gc.collect()
    gc.freeze()
    before = alive()
    groups = load_groups(tmp_path / "store", POLICY)
    others = ByPrompt(groups)
    assert len(groups) == expected and all(map(others.get, asked)) and alive() == before
    batch = groups_at(groups, 2, 1, seed=0)
    assert alive() == before + 2 + sum(len(group.completions) for group in batch)
    del batch
    most = []
    for _ in groups:
        most.append(alive() - before)
    assert max(most) < 30 < len(read(tmp_path / "store")), "a few groups at a time"
