"""The ledger of a store: lost and damaged parts are noticed, killed writers forgiven, older stores read."""

import os
import re

import pytest

from recjax.experience import ledger, store
from recjax.experience.feedback import give_rewards
from tests.experience.rows import make_row

PARTS = 3


@pytest.fixture
def folder(tmp_path):
    for number in range(PARTS):
        store.append(tmp_path, [make_row(2 * number, reward=None, reward_parts=None), make_row(2 * number + 1)])
    return tmp_path


@pytest.fixture
def warned(monkeypatch):
    """What is warned of, each message once."""
    said = []
    ledger._warn_once.cache_clear()
    monkeypatch.setattr(
        ledger.logger, "warning", lambda message, *args: said.append(message % args if args else message)
    )
    return said


def flipped(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("number", range(PARTS))
def test_a_part_that_is_gone_is_named(folder, number):
    part = store.part_files(folder)[number]
    part.unlink()
    for use in (store.read, store.ids, lambda place: store.append(place, [make_row(90)])):
        with pytest.raises(ValueError, match=f"{re.escape(str(part))} is missing"):
            use(folder)


def test_a_flipped_bit_is_noticed_wherever_a_part_is_read(folder):
    part = store.part_files(folder)[1]
    for place in range(0, part.stat().st_size, 211):
        flipped(part, place)
        for use in (store.read, store.ids, lambda place: give_rewards(place, [])):
            with pytest.raises(ValueError, match=f"{re.escape(str(part))} is damaged"):
                use(folder)
        flipped(part, place)
    assert len(store.read(folder)) == 2 * PARTS


def test_a_damaged_ledger_is_named_with_the_way_to_go_on(folder):
    flipped(folder / ledger.NAME, 30)
    with pytest.raises(ValueError, match=f"{re.escape(ledger.NAME)} is damaged.*delete {folder}"):
        store.read(folder)
    (folder / ledger.NAME).unlink()
    assert len(store.read(folder)) == len(store.read(folder)) == 2 * PARTS


def test_a_store_without_a_ledger_is_read_with_one_warning_and_gets_one(folder, warned):
    (folder / ledger.NAME).unlink()
    assert len(store.read(folder)) == 2 * PARTS and len(store.ids(folder)) == 2 * PARTS
    assert len([text for text in warned if "has no checksums" in text]) == 1
    store.append(folder, [make_row(50)])
    warned.clear()
    store.part_files(folder)[0].unlink()
    with pytest.raises(ValueError, match="part-00000000.parquet is missing"):
        store.read(folder)
    assert not warned


def test_a_part_that_the_ledger_does_not_know_is_warned_of(folder, warned):
    (folder / "part-00000009.parquet").write_bytes(store.part_files(folder)[0].read_bytes())
    with pytest.raises(ValueError, match="id 'row 0' is also the id of"):
        store.read(folder)
    assert [text for text in warned if "part-00000009.parquet has no checksum" in text]


class Killed(BaseException):
    """Stands for SIGKILL between two system calls."""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("work", ["append", "feedback", "deletion"])
def test_a_writer_killed_beside_the_change_leaves_a_store_that_reads_and_goes_on(folder, monkeypatch, work, moment):
    """Before the part changes, and after it with the ledger still open."""
    todo = {
        "append": lambda: store.append(folder, [make_row(50)]),
        "feedback": lambda: give_rewards(folder, [{"id": "row 2", "reward": 0.5}]),
        "deletion": lambda: store.keep_parts(folder, lambda row: row != "row 2"),
    }[work]
    replace, unlink = os.replace, type(folder).unlink

    def dies(change, is_part):
        def killed(*args, **named):
            if not is_part(args):
                return change(*args, **named)
            if moment == "after":
                change(*args, **named)
            raise Killed

        return killed

    with monkeypatch.context() as dying:
        dying.setattr(os, "replace", dies(replace, lambda paths: str(paths[1]).endswith(".parquet")))
        dying.setattr(type(folder), "unlink", dies(unlink, lambda paths: paths[0].name.startswith("part-")))
        with pytest.raises(Killed):
            todo()
    found = {row.id: row.reward for row in store.read(folder)}
    assert len(found) == {"append": 2 * PARTS + (moment == "after"), "feedback": 2 * PARTS}.get(
        work, 2 * PARTS - 2 * (moment == "after")
    )
    if work == "feedback":
        assert found["row 2"] == (0.5 if moment == "after" else None)
    store.append(folder, [make_row(60)])
    assert all(len(states) == 1 for states in ledger.read_ledger(folder).values())
    assert {part.name for part in store.part_files(folder)} == ledger.read_ledger(folder).keys()
    assert len(store.read(folder)) == len(found) + 1


def test_a_full_disk_is_named_and_leaves_the_store_as_it_was(folder, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as without_room:
        without_room.setattr(os, "fsync", full)
        with pytest.raises(ValueError, match="part-00000003.parquet cannot be written .No space left on device"):
            store.append(folder, [make_row(50)])
    assert len(store.read(folder)) == 2 * PARTS and not list(folder.glob(".part-*"))
