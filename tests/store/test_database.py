"""The database of a store: what others did to its files, its server or its connections is noticed or waited for."""

import contextlib
import io
import os
import shutil
import signal
import sqlite3
import threading
import zlib

import numpy as np
import pytest
import sqlalchemy as sql

from recjax.experience import recorded
from recjax.experience.group import Grade
from recjax.store import database, store
from recjax.store.feedback import give_rewards
from recjax.store.store import Change, Store
from tests import commands
from tests.experience.rows import append, flipped_bits, grouped, make_every_kind_of_page, make_row, read, same
from tests.store.test_store import ROWS, ids

PENDING = [make_row(number, group=number // 3, reward=None, reward_parts=None, accurate=None) for number in range(9)]
URL = pytest.mark.parametrize("place", [pytest.param("PostgreSQL", marks=pytest.mark.slow)], indirect=True)


# --- Indexes.


def take_index_from_elsewhere(path, index, changes):
    """Puts the page of an index as it would be after some changes into a store that does not have them."""
    other = path.with_name("other.db")
    shutil.copy(path, other)
    with contextlib.closing(sqlite3.connect(other, isolation_level=None)) as changed:
        for change in changes:
            changed.execute(change)
        (page,) = changed.execute("select rootpage from sqlite_master where name = ?", (index,)).fetchone()
        changed.execute("pragma wal_checkpoint(truncate)")
    here, content = slice(4096 * (page - 1), 4096 * page), bytearray(path.read_bytes())
    content[here] = other.read_bytes()[here]
    path.write_bytes(content)


SWAPPED = [
    f"update completions set id = '{name}' where number = {number}"
    for name, number in (("x", 1), ("row 0", 2), ("row 1", 1))
]
INDEXES = {
    "an id names another row": ("sqlite_autoindex_completions_1", SWAPPED, {"id": "row 0"}),
    "an id is lost": ("sqlite_autoindex_completions_1", ["delete from completions where number = 9"], {"id": "row 8"}),
    "a row is in another group": (
        "ix_completions_group_id",
        ["update completions set group_id = 'group 1' where number = 1"],
        {"group_id": "group 1"},
    ),
    "a group has lost a row": (
        "ix_completions_group_id",
        ["update completions set group_id = 'z' where number = 1"],
        {"group_id": "group 0"},
    ),
    "a row has another prompt": (
        "ix_completions_group_id",
        ["update completions set prompt_key = 7 where number = 1"],
        {"group_id": "group 0"},
    ),
    "a reward is lost": ("sqlite_autoindex_rewards_1", ["delete from rewards"], {"id": "row 8"}),
    "a turn is lost": ("open_sessions", ["delete from session_turns"], {"id": "row 8"}),
}


@pytest.mark.parametrize("name", INDEXES)
def test_a_damaged_index_is_refused_and_rebuilt(db, name):
    index, changes, entry = INDEXES[name]
    ((column, value),) = entry.items()
    append(db, PENDING)
    with Store(db) as opened:
        opened.change([Change(turns=[("s", "one")], rewards={3: (Grade(1.0), None)})])
    take_index_from_elsewhere(db, index, changes)
    with Store(db) as opened:
        with pytest.raises(ValueError, match="is damaged: .* --rebuild, which makes the indexes again"):
            give_rewards(opened, [{**entry, "reward": 1.0}])
        if name in ("an id names another row", "a row is in another group"):  # by the lookup alone
            with pytest.raises(ValueError, match=f"completion . does not have the {column} '{value}'"):
                opened.numbers(column, [value])
        if index in ("ix_completions_group_id", "sqlite_autoindex_rewards_1"):  # a run reads groups by these
            with pytest.raises(ValueError, match="is damaged"):
                grouped(opened)
        assert opened.last().rewards == 1
        opened.rebuild_indexes()
        assert grouped(opened)
        give_rewards(opened, [{**entry, "reward": 1.0}])
        rewarded = {number for number, record in enumerate(opened.records(), 1) if record.completion.grade}
        assert (
            rewarded
            == {3} | {"row 0": {1}, "row 8": {9}, "group 0": {1, 2}, "group 1": {4, 5, 6}}[next(iter(entry.values()))]
        )


@pytest.mark.slow
def test_the_command_checks_the_indexes_and_makes_them_again(db):
    append(db, PENDING)
    take_index_from_elsewhere(db, *INDEXES["an id is lost"][:2])
    command = ["-m", "recjax.inspect_experience", db]
    assert "run python -m recjax.inspect_experience" in commands.run(command).stderr
    for arguments in ([*command, "--rebuild"], command):
        done = commands.run(arguments)
        assert done.returncode == 0 and "pending rows" in done.stdout, done.stderr


def test_lost_turns_and_changed_servers_are_detected(db):
    with Store(db, create=True) as opened:
        opened.change([Change(turns=[("s", "one"), ("s", "two")])])
    for change in ("delete from session_turns where number = 2", "update session_turns set server = 'b'"):
        with contextlib.closing(sqlite3.connect(db, isolation_level=None)) as other:
            other.execute(change)
        with Store(db) as opened, pytest.raises(ValueError, match="it has 1 of 2 turns|turn 1 .* match its checksum"):
            opened.turns()


@pytest.mark.slow
def test_flipped_bits_in_any_page_are_detected_or_harmless(db):
    make_every_kind_of_page(db)
    with contextlib.closing(sqlite3.connect(db)) as opened:
        roots = [[page] for (page,) in opened.execute("select rootpage from sqlite_master where rootpage > 0")]
        pages = range(1, opened.execute("pragma page_count").fetchone()[0] + 1)
    outcomes = list(flipped_bits(db, 4 * [*roots, [*pages], [*pages]], seed=0))
    assert {outcome for _, outcome in outcomes} == {"reported", "harmless"}


# --- Files that others made, replaced or protect.


def copy_of_all(path, to, *endings):
    to.mkdir()
    for ending in endings:
        shutil.copy(f"{path}{ending}", to / f"{path.name}{ending}")
    return to / path.name


@pytest.mark.parametrize("endings", [("", "-wal", "-shm"), ("", "-wal", "-shm", "-last")])
def test_a_copy_on_read_only_media_is_read_whole(db, tmp_path, monkeypatch, endings):
    with Store(db, create=True) as opened:
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # a read-only folder, for the superuser
        opened.append(ROWS[:4])
        with opened._engine.connect() as connection:
            connection.exec_driver_sql("pragma wal_checkpoint(truncate)")
        opened.append(ROWS[4:])
        assert len(ids(copy_of_all(db, tmp_path / "copy", *endings))) == len(ROWS)
        with pytest.raises(ValueError, match="its newest rows are in .*-wal, .*copy all files of the store to another"):
            Store(copy_of_all(db, tmp_path / "less", "", "-wal"))
        with Store(db, follows=True) as reader:
            opened.append([make_row(50)])
            assert reader.last().completion == len(ROWS) + 1  # nothing is immutable while somebody writes
    assert len(ids(db)) == len(ROWS) + 1
    with pytest.raises(ValueError, match="SQLite does not see changes in a folder without write permission unless"):
        Store(db, follows=True)


FOREIGN = {
    "another program's": ["create table t (x)"],
    "one in WAL mode": ["pragma journal_mode=wal", "create table t (x)"],
    "a table of the same name": ["create table store (name text)", "create table completions (text)"],
    "a view": ["create view store as with recursive t(version) as (select 1 union all select 2 from t) select 1 x"],
    "a virtual table": ["create virtual table store using fts4(version)"],
}  # fmt: skip


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_database_is_refused_and_unchanged(db, name, create):
    with contextlib.closing(sqlite3.connect(db, isolation_level=None)) as other:
        for statement in FOREIGN[name]:
            other.execute(statement)
    before, files = db.read_bytes(), sorted(db.parent.iterdir())
    with pytest.raises(ValueError, match="is not an experience store"):
        Store(db, create)
    assert database.exists(db) and db.read_bytes() == before and sorted(db.parent.iterdir()) == files


STORES = {
    "version 10, lacks a column": (
        ["alter table store drop column turns", "update store set version = 10"],
        "version 10",
    ),
    "no column": (["alter table completions drop column time"], "its table `completions` has no column `time`"),
    "a trigger": (["create trigger t before update on store begin select 1; end"], "is not an experience store"),
}


@pytest.mark.parametrize("name", STORES)
def test_a_store_of_another_shape_is_refused_by_name(db, name):
    changes, message = STORES[name]
    append(db, ROWS)
    with contextlib.closing(sqlite3.connect(db, isolation_level=None)) as other:
        for change in changes:
            other.execute(change)
    with pytest.raises(ValueError, match=message) as caught:
        Store(db)
    assert "URL" not in str(caught.value)


def test_a_file_replaced_while_open_takes_no_rows(db):
    with Store(db, create=True) as opened:
        opened.append(ROWS[:1])
        shutil.copy(db, db.with_name("backup"))
        os.replace(db.with_name("backup"), db)
        with pytest.raises(database.Unavailable, match="was replaced or deleted while it was open; start this process"):
            opened.append(ROWS[1:2])


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    append("~/s.db", ROWS[:1])
    assert ids(tmp_path / "s.db") == ids("~/s.db") == ["row 0"] and database.exists("~/s.db")
    with pytest.raises(ValueError, match="is no path of a file .File name too long.; give another file"):
        Store("x" * 303, create=True)


# --- Servers' names, locks and time limits.


def test_a_servers_name_is_reserved_once(place, tmp_path):
    with Store(place, create=True) as ours, Store(place) as theirs:
        ours.reserve("a")
        alias = tmp_path / "alias.db"
        alias.symlink_to(place) if "://" not in str(place) else None
        for other in (theirs, *([Store(alias)] if alias.exists() else [])):
            with pytest.raises(ValueError, match="another server .*records there"):
                other.reserve("a")
        ours.change([Change(turns=[("s", "one")])], "a")
    with Store(place) as next_one:
        next_one.reserve("a")
        assert next_one.turns("a") == [("s", "one")]


@URL
def test_a_server_that_loses_its_name_notices(place):
    def end_connections():
        with Store(place) as other, other._engine.connect() as connection:
            which = "from pg_stat_activity where pid != pg_backend_pid() and datname = current_database()"
            connection.exec_driver_sql(f"select pg_terminate_backend(pid) {which}")

    with Store(place, create=True) as ours:
        ours.reserve("")
        ours.append(ROWS[:1])
        end_connections()
        ours.append(ROWS[1:2])  # it has got the name again
        end_connections()
        with Store(place) as theirs:
            theirs.reserve("")
            theirs.append(ROWS[2:3])
            with pytest.raises(database.Unavailable, match="another server of the name '' records there"):
                ours.append(ROWS[3:4])
        ours.append(ROWS[3:4])
        assert ids(place) == ["row 0", "row 1", "row 2", "row 3"]


@URL
def test_waiting_for_a_locked_or_stopped_database_ends(place, monkeypatch):
    monkeypatch.setitem(database._LIMITS, "lock_timeout", "100ms")
    monkeypatch.setattr(database, "_STATEMENT_SECONDS", 1)
    append(place, ROWS[:1])
    with Store(place) as holder, Store(place) as opened:
        with holder._engine.connect() as connection:
            limits = {name: connection.exec_driver_sql(f"show {name}").scalar() for name in database._LIMITS}
            assert "0" not in limits.values() and limits["statement_timeout"] == "2min"
            connection.execute(sql.select(store._STORE).with_for_update())
            with pytest.raises(database.Unavailable, match="lock timeout; another process writes for more than"):
                opened.append(ROWS[1:2])
            backend = opened._engine.connect()
            pid = backend.exec_driver_sql("select pg_backend_pid()").scalar()
            os.kill(pid, signal.SIGSTOP)
            try:
                with pytest.raises(sql.exc.OperationalError, match="the server does not answer"):
                    backend.exec_driver_sql("select 1")
            finally:
                os.kill(pid, signal.SIGCONT)
        opened.append(ROWS[1:2])


def test_many_threads_wait_for_a_writer_each_for_itself(db, monkeypatch):
    monkeypatch.setattr(database, "LOCKED_SECONDS", 0.5)
    append(db, ROWS[:1])
    errors = []
    with contextlib.closing(sqlite3.connect(db, isolation_level=None)) as other, Store(db) as opened:
        other.execute("begin immediate")

        def write():
            try:
                opened.append(ROWS[1:2])
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=write) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(errors) == 20 and all(isinstance(error, database.Unavailable) for error in errors), errors
    assert "another process writes for more than 0.5 seconds" in str(errors[0])


# --- Values.


def test_characters_and_lengths_are_those_of_every_database(place):
    nul, limit = "a\0b\x1a0\x1a", 2**31 - 1
    long = "".join(np.random.default_rng(0).choice([*"0123456789abcdefghijklmnopqrstuvwxyz"], 9000))
    row = make_row(0, id=nul, group_id=long, prompt=nul, completion=nul, answer=nul, policy_version=limit)
    append(place, [row])
    with Store(place) as opened:
        assert same(read(place)[0], row) and opened.numbers("id", [nul, "\0"]) == {nul: [1]}
        assert opened.numbers("group_id", [long]) == {long: [1]}
        opened.add_rewards({1: (Grade(1.0, {nul: 1.0}), nul)}, nul)
        assert opened.rewards([1], nul) == {1: (Grade(1.0, {nul: 1.0}), nul)}
        if "://" in str(place):
            with pytest.raises(ValueError, match="id = 'ggg.*more than the 2600 bytes that PostgreSQL can look"):
                opened.append([make_row(1, id="g" * 9000)])


@pytest.mark.parametrize("column", ["policy_version", "top_k"])
def test_too_large_numbers_are_refused_by_column(place, column):
    for value in (2**31, 2**63, 2**64):
        with pytest.raises(ValueError, match=f"record 0: {column} = {value}: takes a whole number .*to 2147483647"):
            append(place, [make_row(0, **{column: value})])


@pytest.mark.parametrize("bomb", ["packed", "packed twice", "claimed"])
def test_recorded_arrays_that_unpack_to_far_more_are_refused(monkeypatch, bomb):
    monkeypatch.setattr(recorded, "RECORDED_BYTES", 1000)
    savez = np.savez_compressed if bomb == "packed twice" else np.savez
    savez(file := io.BytesIO(), **{"0/a": np.zeros(3 if bomb == "claimed" else 10**6)})
    content = file.getvalue()
    if bomb == "claimed":  # without the checksums of the archive, which would notice it
        assert recorded.recorded_from_bytes(zlib.compress(content), [3])[0]["a"].tolist() == [0, 0, 0]
        content = content.replace(b"'shape': (3,), }            ", b"'shape': (3000000000000,), }")
    with pytest.raises(ValueError, match="recorded arrays cannot be read .*(more than 4000 bytes, 1000 for|CRC|all)"):
        recorded.recorded_from_bytes(zlib.compress(content), [3])


def test_a_row_that_nobody_asked_for_is_no_answer(tmp_path, monkeypatch):
    """As of PostgreSQL, which takes a found row's values from the row and not from the index."""
    select = Store._select
    with Store(tmp_path / "s.db", create=True) as store:
        store.append([make_row(number) for number in range(3)])
        names = [*store.numbers("id")]
        monkeypatch.setattr(Store, "_select", lambda self, *query: select(self, *query[:2], names[1:2], *query[3:]))
        with pytest.raises(ValueError, match="a search for another id finds completion 2"):
            store.numbers("id", names[:1])


@pytest.mark.slow
def test_a_database_without_checksums_is_named(database_url, caplog):
    with Store(database_url(), create=True) as store:
        for _ in range(2):
            store.check_indexes()
    assert caplog.text.count("PostgreSQL's data_checksums is off") == 1


def test_a_new_store_without_its_journal_is_refused(tmp_path):
    path = tmp_path / "s.db"
    path.touch()
    (tmp_path / "s.db-last").write_text("identity 40 12 0")
    for create in (False, True):
        with pytest.raises(ValueError, match="s.db: the last 40 completions are gone, perhaps with .*s.db-wal"):
            Store(path, create=create)
