"""A store that is read by group is what it is when all of it is read, and no more than an index of it is held."""

import gc
import hashlib

import numpy as np
import pytest

from recjax.config import load_config
from recjax.experience import prepared, sources, store, stored_groups
from recjax.experience.group import Completion, Group, is_whole
from recjax.experience.rows import groups_of
from recjax.experience.sources import groups_at, load_groups, with_initial_logprobs, with_logprobs
from recjax.experience.store import Experience
from recjax.experience.stored import load_stored
from recjax.experience.stored_groups import ByPrompt
from recjax.experience.tokenize import tokenized, tokenizer_name
from tests.batch_shapes import shape_of
from tests.experience.groups import same_groups
from tests.experience.rows import make_row, text_row
from tests.experience.test_sources import POLICY, SAMPLING, TOKENIZER
from tests.training.test_update import initial
from tests.training.tiny_run import TINY

NAME = tokenizer_name(TOKENIZER)


@pytest.fixture(params=["memory", "file"])
def place(request, monkeypatch, tmp_path):
    """Where the table of a store is; its pieces are of one row, or of a few, and few groups are read at a time."""
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepared, "_PIECE", 1 if request.param == "memory" else 2000)
    monkeypatch.setattr(prepared, "_TOGETHER", 5)
    monkeypatch.setattr(stored_groups, "_TOGETHER", 3)
    if request.param == "file":
        monkeypatch.setattr(prepared, "SMALL", 0)
    return request.param


def scattered_rows(seed):
    """Rows of groups that come in any order: with tokens, texts, pending ones, agents' with further rows."""
    generator = np.random.default_rng(seed)
    rows = []
    for number in range(40):
        group = int(generator.integers(9))
        kind = generator.integers(4)
        row = make_row(number, group=group, length=1 + number % 6, tokenizer=NAME)
        if kind == 0:
            row = text_row(number, group=group, prompt_tokens=row.prompt_tokens, tokenizer=NAME, completion="12")
        elif kind == 1:
            own = np.arange(1, 2 + number % 3, dtype=np.int32)
            row = row._replace(trajectory=row.id, prompt_tokens=own)
            rows += [row._replace(id=f"{row.id}+{place}", prompt_tokens=own + 1) for place in range(number % 3)]
        elif kind == 2 and number % 3 == 0:
            row = row._replace(reward=None, reward_parts=None)
        rows.append(row)
    # Any order in which an agent's first row is before its others, and a group's first row asks the group's question.
    order = generator.permutation(len(rows))
    rows = sorted((rows[place] for place in order), key=lambda row: row.trajectory is not None)
    return sorted(rows, key=lambda row: row.trajectory not in (None, row.id))


def in_parts(folder, rows, parts=4):
    for part in np.array_split(np.arange(len(rows)), parts):
        store.append(folder, [rows[place] for place in part])


def reference(folder):
    """The groups of a store, all of it read at once."""
    return groups_of(tokenized(store.read(folder), POLICY))


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(map(same_groups, ours, theirs)) and [*map(str, ours)] == [*map(str, theirs)]


@pytest.mark.parametrize("seed", range(4))
def test_groups_and_batches_are_those_of_the_whole_store(place, tmp_path, seed):
    in_parts(tmp_path / "store", scattered_rows(seed))
    groups, expected = load_groups(tmp_path / "store", POLICY), reference(tmp_path / "store")
    assert equal(list(groups), expected)
    assert any(len(one.rows) > 1 for group in expected for one in group.completions)
    assert groups.sizes.tolist() == [len(group.completions) for group in expected]
    assert [name for (name,) in groups.columns(["id"])] == [one.id for group in expected for one in group.completions]
    for batch in range(1, 9):
        assert equal(groups_at(groups, 4, batch, seed), groups_at(expected, 4, batch, seed))
    assert equal(list(groups[2:7][1:]), expected[3:7]) and equal([groups[-1]], expected[-1:])
    assert (tmp_path / "cache").exists() == (place == "file")


def test_what_is_trained_on_is_whole_and_counted(place, tmp_path):
    rows = [row for row in scattered_rows(0) if row.trajectory is None]
    longest = dict(prompt_tokens=np.arange(9, dtype=np.int32), length=30, tokenizer=NAME)
    rows.insert(7, make_row(98, group=98, **longest, reward=None, reward_parts=None))
    in_parts(tmp_path / "store", rows)
    (tmp_path / "tiny.yaml").write_text(TINY)
    options = [f"experience.store={tmp_path / 'store'}", "experience.missing_logprobs=current"]
    options += [f"output={tmp_path / 'run'}", "rollout.temperature=0.9", "rollout.prompts_per_step=2"]
    found = load_stored(load_config(tmp_path / "tiny.yaml", options), POLICY)
    everything = reference(tmp_path / "store")
    whole = [group for group in everything if is_whole(group)]
    assert 0 < len(whole) < len(everything) and [group.id for group in found.groups] == [group.id for group in whole]
    assert found.shape == shape_of(whole, 2)
    pending = [one.grade is None for group in everything if not is_whole(group) for one in group.completions]
    names = ("pending_groups", "pending_rows", "rows_beside_pending")
    counts = len(everything) - len(whole), sum(pending), len(pending) - sum(pending)
    assert found.left_out == dict(zip(names, counts, strict=True))
    worth = [(one.id, group.id, one.grade.reward) for group in whole for one in group.completions]
    assert found.digest == hashlib.sha256(repr(worth).encode()).hexdigest()[:16]


def test_completions_of_a_prompt_are_found_in_all_groups(place, tmp_path):
    rows = scattered_rows(1)
    in_parts(tmp_path / "store", rows)
    found, expected = ByPrompt(load_groups(tmp_path / "store", POLICY)), {}
    for group in reference(tmp_path / "store"):
        rewarded = [one.id for one in group.completions if one.grade]
        expected.setdefault(group.prompt_tokens.tobytes(), []).extend(rewarded)
    assert {prompt: [one.id for one in found[prompt]] for prompt in found} == expected
    assert len(expected) == 3 and all(prompt in found for prompt in expected) and b"other" not in found


def test_log_probs_of_the_initial_policy_are_kept_as_computed(place, tmp_path, monkeypatch):
    if place == "file":
        monkeypatch.setattr(sources, "SMALL", 1)
    rows = [row for row in scattered_rows(2) if row.trajectory is None]
    in_parts(tmp_path / "store", rows)
    groups, expected = load_groups(tmp_path / "store", POLICY), reference(tmp_path / "store")
    shape = shape_of(expected, 2)
    filled = with_initial_logprobs(groups, shape, POLICY, initial(), SAMPLING, 16)
    listed = with_logprobs(expected, shape, POLICY, initial(), SAMPLING, 16)
    assert equal(list(filled), listed) and equal([filled[5]], [listed[5]]) and not equal(list(filled), expected)


def test_an_id_in_two_parts_is_refused(place, tmp_path):
    in_parts(tmp_path, [make_row(number, group=number, tokenizer=NAME) for number in range(12)], parts=3)
    table = store.to_table([make_row(20, tokenizer=NAME), make_row(6, tokenizer=NAME), make_row(9, tokenizer=NAME)])
    with store.locked(tmp_path):
        store.write_part(table, tmp_path / "part-00000003.parquet")
    found = "part-00000003.parquet: row 1: id 'row 6' is also the id of part-00000001.parquet, row 2; ids must be"
    for read in (store.read, lambda folder: load_groups(folder, POLICY)):
        with pytest.raises(ValueError, match=found):
            read(tmp_path)


def test_a_trajectory_that_lost_its_first_row_is_refused(place, tmp_path):
    rows = [row for row in scattered_rows(0) if row.trajectory != row.id]
    in_parts(tmp_path, rows)
    with pytest.raises(ValueError, match="the first row of its trajectory .* is not before it"):
        load_groups(tmp_path, POLICY)


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_store_is_prepared_once_for_each_of_its_states(place, tmp_path, monkeypatch, caplog):
    folder, write, calls = tmp_path / "store", prepared._write, []
    monkeypatch.setattr(prepared, "_write", lambda *given: calls.append(1) or write(*given))

    def opened(prepared_again):
        calls.clear()
        assert equal(list(load_groups(folder, POLICY)), reference(folder))
        assert len(calls) == prepared_again

    in_parts(folder, scattered_rows(0))
    opened(True)
    opened(False)
    before, expected = load_groups(folder, POLICY), reference(folder)
    store.append(folder, [make_row(99, group=1, tokenizer=NAME)])
    opened(True)
    assert equal(list(before), expected) and len(list(before.columns(["id"]))) == sum(before.sizes), "whoever reads on"
    assert before.rows.each(stored_groups.is_missing, "id").shape == (len(before.rows),)
    opened(False)
    (file,) = (tmp_path / "cache").rglob("rows.arrow")
    for damage in (lambda content: content[:-100], lambda content: content.replace(b"row 3", b"row X")):
        file.write_bytes(damage(file.read_bytes()))
        opened(True)
        assert "rows.arrow is damaged" in caplog.text and "makes it again" in caplog.text
        opened(False)
    longer = POLICY._replace(stop_ids=(2,))
    assert [group.completions[0].rows[0].tokens[-1] for group in load_groups(folder, longer)].count(2) > 0
    assert len(calls) == 1, "another policy has a file of its own"
    opened(False)
    # A part that is damaged is noticed, prepared or not.
    part = folder / "part-00000002.parquet"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="part-00000002.parquet is damaged"):
        load_groups(folder, POLICY)


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_file_that_cannot_be_written_leaves_none(place, tmp_path, monkeypatch):
    in_parts(tmp_path / "store", scattered_rows(0))
    with_tokens, calls = prepared._with_tokens, []

    def stops(*given):
        calls.append(1)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return with_tokens(*given)

    monkeypatch.setattr(prepared, "_with_tokens", stops)
    with pytest.raises(ValueError, match=r"rows.arrow cannot be written \(No space left on device\); free disk space"):
        load_groups(tmp_path / "store", POLICY)
    assert not list((tmp_path / "cache").rglob("*arrow*"))
    monkeypatch.setattr(prepared, "_with_tokens", with_tokens)
    assert len(load_groups(tmp_path / "store", POLICY)) == len(reference(tmp_path / "store"))


def test_what_is_held_is_an_index(place, tmp_path):
    in_parts(tmp_path / "store", scattered_rows(0))
    expected = len(reference(tmp_path / "store"))

    def alive():
        """How many there are of those made after everything before was frozen."""
        gc.collect()
        return sum(type(one) in (Group, Completion, Experience) for one in gc.get_objects())

    gc.collect()
    gc.freeze()
    before = alive()
    groups = load_groups(tmp_path / "store", POLICY)
    others = ByPrompt(groups)
    assert len(groups) == expected and len(others) == 3 and alive() == before
    batch = groups_at(groups, 2, 1, seed=0)
    assert alive() == before + 2 + sum(len(group.completions) for group in batch)
    most = []
    for _ in groups:
        most.append(alive() - before)
    assert max(most) < 40 < len(store.read(tmp_path / "store")), "a few groups at a time"
