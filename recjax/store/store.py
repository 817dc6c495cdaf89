"""The experience store: a database with completions and their rewards, from any source.

SQLite in one file is the default; a URL such as postgresql://host/name is the same code for several machines. Both
tables only grow, so a number orders the rows of each: a reader asks for the rows after the last number that it knows.
Every row has a checksum, which readers verify. docs/store_format.md describes the columns.
"""

import contextlib
import dataclasses
import logging
import os
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import sqlalchemy as sql
import xxhash
from filelock import Timeout

from recjax.errors import UserError
from recjax.experience.columns import COLUMNS, STORED
from recjax.experience.completion_checks import ID_IS_TAKEN, check_records
from recjax.experience.group import Grade
from recjax.experience.records import Record, from_json, record_of, row_of, signed_hash, to_json
from recjax.models.sampling import Sampling
from recjax.runtime.files import locked_file
from recjax.store.database import (
    MAKE,
    RESTORE,
    TEXT,
    Unavailable,
    escaped,
    explained,
    is_unavailable,
    lasts_of,
    open_database,
)

logger = logging.getLogger(__name__)

VERSION = 9
# Graders of rewards: GIVEN for rewards that arrived with their completions, or from recjax.feedback or a client; TURNS
# for turn rewards that arrived before the reward of their session.
GIVEN = "given"
TURNS = "turns"
_TOGETHER = 256  # completions to read at a time
_LONGEST_ID = 2600  # bytes of an id in an index of PostgreSQL
_PAGE = 500  # groups of `Store.groups` at a time


# The arrays that `Store.groups` and `Store.group_rewards` return.
GROUP_COLUMNS = np.dtype(
    [
        ("first", "i8"),
        ("size", "i4"),
        ("prompt", "i8"),
        ("other_prompt", "i8"),
        ("problem", "i8"),
        ("prompt_length", "i4"),
        ("completion_length", "i4"),
        ("row_length", "i4"),
        ("trajectories", "i4"),
        ("lack_logprobs", "i4"),
    ]
)
REWARD_COLUMNS = np.dtype(
    [
        ("first", "i8"),
        ("graded", "i4"),
        ("rewarded", "i4"),
        ("lowest", "f8"),
        ("highest", "f8"),
        ("total", "f8"),
    ]
)


def _number() -> sql.Column:
    int64 = sql.BigInteger().with_variant(sql.Integer, "sqlite")
    return sql.Column("number", int64, primary_key=True, autoincrement=False)


# SQL types by the kind of a column of completions.
KINDS = {
    "text": TEXT,
    "json": TEXT,
    "messages": TEXT,
    "bool": sql.Boolean,
    "int32": sql.Integer,
    "int64": sql.BigInteger,
    "float64": sql.Double,
    "time": sql.Double,
    "bytes": sql.LargeBinary,
    "int32[]": sql.LargeBinary,
    "bool[]": sql.LargeBinary,
    "float32[]": sql.LargeBinary,
}
_TABLES = sql.MetaData()
# The single row of this table has the numbers of the last rows, and how many rows there are.
_STORE = sql.Table(
    "store",
    _TABLES,
    sql.Column("version", sql.Integer),
    sql.Column("id", TEXT),
    sql.Column("last_completion", sql.BigInteger),
    sql.Column("last_reward", sql.BigInteger),
    sql.Column("last_turn", sql.BigInteger),
    sql.Column("completions", sql.BigInteger),
    sql.Column("rewards", sql.BigInteger),
    sql.Column("turns", sql.BigInteger),
    sql.Column("checksum", sql.LargeBinary),
)
COMPLETIONS = sql.Table(
    "completions",
    _TABLES,
    _number(),
    sql.Column("id", TEXT, nullable=False, unique=True),
    sql.Column("group_id", TEXT, nullable=False),
    *[sql.Column(name, KINDS[COLUMNS[name].kind]) for name in STORED[3:]],
    sql.Column("checksum", sql.LargeBinary),
    # `groups` compares the keys in the index with the rows. PostgreSQL takes ids of any length only as hashes.
    sql.Index("ix_completions_group_id", "group_id", "prompt_key", "problem_key").ddl_if(dialect="sqlite"),
    sql.Index("ix_completions_group_hash", "group_id", postgresql_using="hash").ddl_if(dialect="postgresql"),
)
_COLUMNS = COMPLETIONS.c.keys()
# Selects all completions of some groups; a condition on `_FIRST` selects the groups by their first completions.
_FIRST = COMPLETIONS.alias()
_GROUPS = sql.select(COMPLETIONS).join_from(_FIRST, COMPLETIONS, COMPLETIONS.c.group_id == _FIRST.c.group_id)
# The turns of a server's open sessions, which become completions when the sessions end.
_SESSION_TURNS = sql.Table(
    "session_turns",
    _TABLES,
    _number(),
    sql.Column("server", TEXT, nullable=False),
    sql.Column("session", TEXT, nullable=False),
    sql.Column("content", TEXT),
    sql.Column("checksum", sql.LargeBinary),
    sql.Index("open_sessions", "server", "session"),
)
REWARDS = sql.Table(
    "rewards",
    _TABLES,
    _number(),
    sql.Column("completion", sql.BigInteger, nullable=False),
    sql.Column("grader", TEXT, nullable=False),
    sql.Column("reward", sql.Double),
    sql.Column("parts", TEXT),
    sql.Column("accurate", sql.Boolean),
    sql.Column("failure", TEXT),
    sql.Column("comment", TEXT),
    sql.Column("turns", TEXT),
    sql.Column("time", sql.Double),
    sql.Column("checksum", sql.LargeBinary),
    sql.UniqueConstraint("completion", "grader"),
)


class Conflict(UserError):
    """A completion that a change adds is there already, or one that it reads or grades is gone or has a reward."""


class Last(NamedTuple):
    """The extent of a store: the numbers of its last completion, reward and turn, and how many of each it has."""

    completion: int = 0
    reward: int = 0
    turn: int = 0
    completions: int = 0
    rewards: int = 0
    turns: int = 0


@dataclasses.dataclass
class _Transaction:
    """A transaction that writes: its connection, and the extent of the store, which the block keeps up to date."""

    connection: sql.Connection
    last: Last


class Change(NamedTuple):
    """Rows that a store gets in one transaction.

    records: completions, with the rewards that they have.
    rewards: rewards by number of the completion, each with a comment or None.
    turns: turns of open sessions, each with its session's name.
    ended: names of sessions whose turns are deleted, because `records` has their completions.
    grader: name of the reward function of `rewards`; each gives a completion one reward.
    """

    records: Sequence[Record] = ()
    rewards: Mapping[int, tuple[Grade, str | None]] = {}
    turns: Sequence[tuple[str, str]] = ()
    ended: Sequence[str] = ()
    grader: str = GIVEN


class Store:
    """A store that several processes and threads may read and write at the same time.

    Attributes:
        name: the file or URL, for messages.
        id: identity of the store, the same for all who open it.
        contents: the store that completions are read from: this store, or a copy of it with tokens.
    """

    def __init__(self, place: str | Path | None, create: bool = False, follows: bool = False):
        """Opens a store.

        Args:
            place: file, or URL of a database; None: a new store in memory.
            create: True to make a new store if none exists.
            follows: True to see the rows that others add later, which not every file allows.
        Raises:
            UserError: no store, a store of another version, or one that cannot be read; the message has the remedy.
        """
        self._engine, self.name, self._file, columns = open_database(place, create, follows)
        self._opened = self._file and os.stat(self._file)
        self._reserved = contextlib.ExitStack()
        # In PostgreSQL, the name of the server that this store has reserved, and the connection that holds the name.
        self._server: str | None = None
        self._connection: sql.Connection | None = None
        self._lock = threading.Lock()  # The lock serializes the use of this connection.
        self._writing = self._engine.execution_options(writes=True)
        dialect = self._engine.dialect
        self._insertions = {table.name: table.insert().compile(dialect=dialect) for table in (COMPLETIONS, REWARDS)}
        with self._trying("opened"):
            if create:
                with self._writing.begin() as connection:
                    if connection.dialect.name == "postgresql":
                        # The lock keeps two processes from creating the tables at the same time.
                        connection.execute(sql.text("select pg_advisory_xact_lock(7263871)"))
                    if not sql.inspect(connection).has_table(_STORE.name):
                        _TABLES.create_all(connection)
                        store_columns = _store_columns(uuid.uuid4().hex, Last())
                        connection.execute(_STORE.insert(), store_columns)
            if not sql.inspect(self._engine).has_table(_STORE.name):
                raise UserError(self.name, "is not an experience store", MAKE)
            with self._engine.connect() as connection:
                # The version comes first, because other versions may have other columns.
                self._check_version(connection.execute(sql.select(_STORE.c.version)).all())
                if columns:
                    self._check_tables(columns)
                self.id = self._row(connection).id
        self._check_lasts()
        self.contents = self

    def _check_tables(self, columns: Mapping[str, Sequence[str]]) -> None:
        """Checks that a file has all columns.

        Args:
            columns: names of the file's columns by table.
        """
        for table in _TABLES.tables.values():
            for name in table.c.keys():
                if name not in columns.get(table.name, ()):
                    problem = f"its table `{table.name}` has no column `{name}`"
                    raise UserError(self.name, f"is damaged: {problem}", RESTORE)

    def __enter__(self) -> "Store":
        """The store."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the store."""
        self.close()

    def close(self) -> None:
        """Closes all connections, and frees a reserved name."""
        if self._connection is not None:
            self._connection.close()
        self._reserved.close()
        self._engine.dispose()

    def is_replaced(self) -> bool:
        """True if the store's file was deleted or replaced; SQLite would continue to write to the old file."""
        if self._file is None:
            return False
        if not self._file.exists():
            return True
        return not os.path.samestat(cast(os.stat_result, self._opened), self._file.stat())

    def reserve(self, server: str) -> None:
        """Reserves the name of a server, whose turns only this process may write until it closes the store.

        In PostgreSQL, the writing connection holds the name. A server that loses the connection must get the name again
        before it writes.

        Raises:
            UserError: the name belongs to a different process.
        """
        if self._engine.dialect.name == "postgresql":
            self._server = server
            with self._trying("written"):
                self._connection_of_server()
        elif self._file:
            try:
                lock = self._file.with_name(f"{self._file.name}-server.lock")
                self._reserved.enter_context(locked_file(lock, seconds=0))
            except Timeout:
                raise UserError(self.name, "another server records there", "give another file with --record") from None

    _has_warned_of_checksums = False

    def check_indexes(self) -> None:
        """Compares the indexes of a file with its rows, which takes about a second for each 200,000 rows.

        A lookup compares the rows that an index finds. Only this check notices rows that are missing in an index.
        PostgreSQL checks its pages itself if its setting data_checksums is on; if it is off, recjax warns about it.

        Raises:
            UserError: an index or a page is damaged.
        """
        if self._file:
            with self._trying("read"), self._engine.connect() as connection:
                problem = connection.exec_driver_sql("pragma integrity_check(1)").scalar()
            if problem != "ok":
                raise self._damaged_index(str(problem))
            return
        (row,) = self._select(sql.select(sql.func.current_setting("data_checksums")))
        if not self._has_warned_of_checksums and row[0] != "on":
            self._has_warned_of_checksums = True
            logger.warning(
                "%s: PostgreSQL's data_checksums is off, so damage of an index may hide rows; stop the database and run"
                " pg_checksums --enable",
                self.name,
            )

    def rebuild_indexes(self) -> None:
        """Makes all indexes of a file again from the rows.

        Raises:
            UserError: the rows themselves are damaged, or the store is no file.
        """
        if not self._file:
            raise UserError(self.name, "recjax rebuilds only the indexes of files", "use the database's own REINDEX")
        with self._trying("written"), self._writing.begin() as connection:
            connection.exec_driver_sql("reindex")
        self.check_indexes()

    # --- Writing: each method is one transaction, and durable when it returns.

    def append(self, records: Sequence[Record], numbers: Sequence[int] | None = None) -> None:
        """Adds completions, with the rewards that they have.

        Args:
            numbers: numbers for a copy of another store, in ascending order; None: the next numbers.
        Raises:
            UserError: a value outside its column's limits, or an id that the store already has; the store stays
                unchanged.
        """
        check_records(records, self._place)
        with self._transaction() as transaction:
            transaction.last = self._append(transaction.connection, transaction.last, records, numbers)

    def change(self, changes: Iterable[Change], server: str = "", are_checked: bool = False) -> int:
        """Makes all changes, or none if one change cannot be made; returns the number of new completions.

        Args:
            server: name of the server whose sessions have the turns.
            are_checked: True if `check_records` has accepted the records.
        Raises:
            UserError: see `append`; or a completion is gone, or has a reward of this grader.
        """
        with self._transaction() as transaction:
            connection = transaction.connection
            last = transaction.last
            before = last.completions
            for records, rewards, turns, ended, grader in changes:
                if records:
                    if not are_checked:
                        check_records(records, self._place)
                    last = self._append(connection, last, records)
                gone = sorted(set(rewards) - set(self.numbers("number", list(rewards), connection)))
                if gone:
                    raise Conflict(self.name, f"completion {gone[0]}, which gets a reward, was deleted")
                last = self._add_rewards(connection, last, rewards, grader)
                for session, content in turns:
                    last = last._replace(turn=last.turn + 1, turns=last.turns + 1)
                    columns = _with_checksum(_SESSION_TURNS, (last.turn, server, session, content))
                    connection.execute(_SESSION_TURNS.insert(), columns)
                for session in ended:
                    ending = _SESSION_TURNS.delete()
                    ending = ending.where(_SESSION_TURNS.c.server == server, _SESSION_TURNS.c.session == session)
                    deleted = connection.execute(ending).rowcount
                    last = last._replace(turns=last.turns - deleted)
            transaction.last = last
        return last.completions - before

    def add_rewards(self, grades: Mapping[int, tuple[Grade, str | None]], grader: str = GIVEN) -> None:
        """Adds the rewards of a grader, each with a comment or None, by number of the completion; see `change`."""
        self.change([Change(rewards=grades, grader=grader)])

    def delete(self, numbers: Sequence[int]) -> None:
        """Deletes completions and their rewards."""
        with self._transaction() as transaction:
            connection = transaction.connection
            last = transaction.last
            for batch in _parts(numbers):
                rewards = connection.execute(REWARDS.delete().where(REWARDS.c.completion.in_(batch))).rowcount
                rows = connection.execute(COMPLETIONS.delete().where(COMPLETIONS.c.number.in_(batch))).rowcount
                last = last._replace(completions=last.completions - rows, rewards=last.rewards - rewards)
            transaction.last = last

    # --- Reading.

    def turns(self, server: str = "") -> list[tuple[str, str]]:
        """The turns of a server's open sessions in order, each with its session's name.

        Raises:
            UserError: a turn is damaged or lost.
        """
        began = self.last()
        # The query reads the table and not an index, which may be damaged.
        rows = self._select(sql.select(_SESSION_TURNS).order_by(_SESSION_TURNS.c.number))
        for row in rows:
            self._verify(row, "turn {0.number} of session {0.session!r}")
        self._check_count(began, len(rows), began.turns, "turns")
        return [(row.session, row.content) for row in rows if row.server == server]

    def last(self) -> Last:
        """The extent of the store."""
        with self._trying("read"), self._engine.connect() as connection:
            return _last(self._row(connection))

    def read(self, numbers: Sequence[int] | np.ndarray, grader: str | None = GIVEN) -> list[Record]:
        """Reads completions by their numbers, in the order of the numbers, with the rewards of a grader.

        Raises:
            UserError: a completion is gone or damaged.
        """
        numbers = list(map(int, numbers))
        rows = {row[0]: row for row in self.contents._select(sql.select(COMPLETIONS), COMPLETIONS.c.number, numbers)}
        gone = [number for number in numbers if number not in rows]
        if gone:
            raise Conflict(self.contents.name, f"completion {gone[0]} is gone", RESTORE)
        rewards = self.rewards(numbers, grader) if grader else {}
        return [self.contents._record(rows[number], rewards.get(number)) for number in numbers]

    def read_groups(self, firsts: np.ndarray, last: Last, grader: str | None = GIVEN) -> list[list[Record]]:
        """Reads the completions of groups up to an extent, in order, with the rewards of a grader.

        Args:
            firsts: numbers of the groups' first completions.
        Raises:
            UserError: a completion is damaged.
        """
        wanted = _GROUPS.where(COMPLETIONS.c.number <= last.completion)
        rows = sorted(self.contents._select(wanted, _FIRST.c.number, firsts.tolist()), key=lambda row: row[0])
        rewards = self.rewards([row[0] for row in rows], grader) if grader else {}
        groups: dict[str, list[Record]] = {}
        for row in rows:
            groups.setdefault(row[2], []).append(self.contents._record(row, rewards.get(row[0])))
        by_first = {records[0].number: records for records in groups.values()}
        return [by_first.get(number, []) for number in firsts.tolist()]

    def rewards(self, numbers: Sequence[int], grader: str = GIVEN) -> dict[int, tuple[Grade, str | None]]:
        """The rewards of a grader, each with its comment, by number of the completion.

        Raises:
            UserError: a reward is damaged.
        """
        wanted = sql.select(REWARDS).where(REWARDS.c.grader == grader)
        return {row.completion: self._grade(row) for row in self._select(wanted, REWARDS.c.completion, numbers)}

    def records(
        self, after: int = 0, last: int | None = None, grader: str | None = GIVEN, others: bool = False
    ) -> Iterator[Record]:
        """Reads the completions after one number up to another, in order.

        Args:
            others: True to read the rewards of other graders, too.
        Raises:
            UserError: a completion is damaged or lost.
        """
        began = self.last()
        seen = 0
        graded = 0
        start = after
        end = began.completion if last is None else last
        wanted = sql.select(COMPLETIONS).where(COMPLETIONS.c.number <= end)
        wanted = wanted.order_by(COMPLETIONS.c.number).limit(_TOGETHER)
        wanted_rewards = sql.select(REWARDS).order_by(REWARDS.c.number)
        if not others:
            wanted_rewards = wanted_rewards.where(REWARDS.c.grader == grader)
        while True:
            rows = self._select(wanted.where(COMPLETIONS.c.number > after))
            grades_by_number: dict[int, dict[str, tuple[Grade, str | None]]] = {}
            if grader:
                numbers = [row.number for row in rows]
                for reward in self._select(wanted_rewards, REWARDS.c.completion, numbers):
                    grades_by_number.setdefault(reward.completion, {})[reward.grader] = self._grade(reward)
            for row in rows:
                grades = grades_by_number.get(row.number, {})
                grade = None if grader is None else grades.pop(grader, None)
                graded += grade is not None
                yield self._record(row, grade)._replace(others=grades)
            seen += len(rows)
            if len(rows) < _TOGETHER:
                break
            after = rows[-1].number
        if grader:
            # The index that found the rewards may be damaged; `+ 0` keeps the database from counting with it.
            completion = REWARDS.c.completion + 0
            count = sql.select(sql.func.count()).select_from(REWARDS)
            count = count.where(REWARDS.c.grader == grader, completion > start, completion <= end, REWARDS.c.time >= 0)
            self._check_count(began, graded, self._select(count)[0][0], "rewards")
        if began.completion == began.completions:  # If the numbers differ, completions were deleted.
            self._check_count(began, seen, end - start, "completions")

    def groups(self, last: Last, tokenizer: str, vocabulary: int) -> tuple[np.ndarray, bool]:
        """The columns of all groups up to an extent, in order of their first completions.

        The index of the groups must agree with the rows: a wrong value in one of them moves a completion to another
        group, or another prompt.

        Args:
            tokenizer: name of a vocabulary.
            vocabulary: number of tokens for which a policy has embeddings.
        Returns:
            `GROUP_COLUMNS`: number of the first completion; number of completions; smallest and largest checksum of the
            prompt tokens; checksum of prompt and answer; most tokens of a prompt, of a completion and of a row with its
            prompt; number of completions that are not plain; number of completions without log-probs. And True if all
            completions have tokens of the vocabulary.
        Raises:
            UserError: the index and the rows differ, or a completion is lost.
        """
        index = COMPLETIONS.alias()
        row = COMPLETIONS.alias()
        differs = [row.c[name].is_distinct_from(index.c[name]) for name in ("group_id", "prompt_key", "problem_key")]
        other_tokens = row.c.tokenizer.is_distinct_from(tokenizer) | (row.c.largest_token >= vocabulary)
        lacks_tokens = (row.c.prompt_length == 0) | (row.c.completion_length == 0)
        columns = [
            sql.func.min(index.c.number),
            sql.func.count(),
            sql.func.min(index.c.prompt_key),
            sql.func.max(index.c.prompt_key),
            sql.func.min(index.c.problem_key),
            sql.func.max(row.c.prompt_length),
            sql.func.max(row.c.completion_length),
            sql.func.max(row.c.row_length),
            sql.func.count().filter(sql.not_(row.c.is_plain)),
            sql.func.count().filter(sql.not_(row.c.has_logprobs)),
            # GROUP_COLUMNS ends here; `_by_group` returns the sums of the next two columns.
            sql.func.count().filter(sql.or_(*differs)),
            sql.func.count().filter(other_tokens | lacks_tokens),
        ]
        joined = index.outerjoin(row, row.c.number == index.c.number)
        wanted = sql.select(*columns).select_from(joined)
        groups, (damaged, unready) = self._by_group(wanted, index, last, GROUP_COLUMNS)
        if damaged:
            raise self._damaged_index("completions have other groups or prompts than in the index")
        self._check_count(last, int(groups["size"].sum()), last.completions, "completions")
        return groups, not unready

    def group_rewards(self, last: Last, grader: str = GIVEN) -> np.ndarray:
        """The rewards of a grader by group, in the order of `groups`.

        Returns:
            `REWARD_COLUMNS`: number of the first completion; number of completions with a row in the table `rewards`;
            number of completions with a reward; lowest and highest reward; 2^20 times the sum of the rewards.
        Raises:
            UserError: a reward is damaged or lost.
        """
        began = self.last()
        index = COMPLETIONS.alias()
        # The database finds the rows of `entry` by the index of the rewards, and the rows of `row` by their numbers.
        entry = REWARDS.alias()
        row = REWARDS.alias()
        differs = row.c.completion.is_distinct_from(index.c.number) | row.c.grader.is_distinct_from(grader)
        columns = [
            sql.func.min(index.c.number),
            sql.func.count(entry.c.number),
            sql.func.count(row.c.reward),
            sql.func.min(row.c.reward),
            sql.func.max(row.c.reward),
            sql.func.sum(sql.cast(row.c.reward * 2**20, sql.BigInteger)),  # Integers have the same sum in any order.
            # REWARD_COLUMNS ends here; `_by_group` returns the sum of the next column.
            sql.func.count(entry.c.number).filter(differs),
        ]
        joined = index.outerjoin(entry, (entry.c.completion == index.c.number) & (entry.c.grader == grader))
        joined = joined.outerjoin(row, row.c.number == entry.c.number)
        rewards, (damaged,) = self._by_group(sql.select(*columns).select_from(joined), index, last, REWARD_COLUMNS)
        if damaged:
            raise self._damaged_index("rewards have other completions or graders than in the index")
        # Reads the table, because the index may be damaged. Rewards up to the extent belong to its completions.
        is_in = (REWARDS.c.completion + 0 <= last.completion) | (REWARDS.c.number <= last.reward)
        has_grader = (REWARDS.c.grader == grader) & is_in
        counts = sql.select(sql.func.count(), sql.func.count().filter(has_grader)).where(REWARDS.c.time >= 0)
        ((all_rewards, graded),) = self._select(counts)
        self._check_count(began, all_rewards, began.rewards, "rewards")
        self._check_count(began, int(rewards["graded"].sum()), graded, f"rewards of {grader!r}")
        unrewarded = sql.select(REWARDS).where(REWARDS.c.grader == grader, REWARDS.c.reward.is_(None))
        for row in self._select(unrewarded):
            self._grade(row)
        return rewards

    def _by_group(
        self, wanted: sql.Select, index: sql.FromClause, last: Last, columns: np.dtype
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rows of a query by group, ordered by their first column, and the sums of its columns beyond `columns`."""
        # `+ 0` keeps the database from reading by number: the index of the groups has their order.
        wanted = wanted.where(index.c.number + 0 <= last.completion)
        size = len(columns.names or ())
        groups = [np.zeros(0, columns)]
        sums = np.zeros(len(wanted.selected_columns) - size, int)
        with self._trying("read"), self._engine.connect() as connection:
            rows = connection.execution_options(yield_per=_PAGE).execute(wanted.group_by(index.c.group_id))
            for page in map(list, rows.partitions()):
                try:
                    groups.append(np.array([tuple(row[:size]) for row in page], columns))
                except (ValueError, OverflowError) as error:
                    # A column of numbers has a text.
                    raise UserError(self.name, f"is damaged: {error}", RESTORE) from error
                sums = sums + np.array([row[size:] for row in page]).sum(axis=0)
        table = np.concatenate(groups)
        return table[np.argsort(table["first"])], sums

    def sampled_otherwise(self, sampling: Sampling, last: Last) -> Iterator[tuple[int, int]]:
        """Completions with log-probs of another distribution: the group's first number, and the completion's number."""
        is_same = sql.and_(*[COMPLETIONS.c[name] == value for name, value in sampling._asdict().items()])
        index = COMPLETIONS.alias()
        first = sql.select(sql.func.min(index.c.number)).where(index.c.group_id == COMPLETIONS.c.group_id)
        wanted = sql.select(first.scalar_subquery(), COMPLETIONS.c.number).order_by(COMPLETIONS.c.number)
        wanted = wanted.where(COMPLETIONS.c.has_logprobs, sql.func.coalesce(is_same, sql.false()).is_(sql.false()))
        after = 0
        while rows := self._select(wanted.where(COMPLETIONS.c.number > after).limit(_TOGETHER)):
            after = rows[-1][1]
            for first_number, number in rows:
                if number <= last.completion:
                    yield first_number, number

    def reward_ranges(self, grader: str = GIVEN) -> dict[str, tuple[float, float]]:
        """The lowest and the highest reward of each source; empty if there is only one source."""
        if len(self._select(sql.select(COMPLETIONS.c.source).distinct().limit(2))) < 2:
            return {}
        lowest = sql.func.min(REWARDS.c.reward)
        highest = sql.func.max(REWARDS.c.reward)
        wanted = sql.select(COMPLETIONS.c.source, lowest, highest).group_by(COMPLETIONS.c.source)
        wanted = wanted.join_from(COMPLETIONS, REWARDS, REWARDS.c.completion == COMPLETIONS.c.number)
        wanted = wanted.where(REWARDS.c.grader == grader, REWARDS.c.reward.is_not(None))
        return {source: (low, high) for source, low, high in self._select(wanted)}

    def rewards_without_parts(self, grader: str = GIVEN) -> int:
        """The number of rewards of a grader that have no parts."""
        wanted = sql.select(sql.func.count()).select_from(REWARDS).where(REWARDS.c.grader == grader)
        wanted = wanted.where(REWARDS.c.reward.is_not(None), REWARDS.c.parts.is_(None))
        ((count,),) = self._select(wanted)
        return count

    def older_than(self, time: datetime) -> list[int]:
        """The numbers of the completions with an earlier time.

        Raises:
            UserError: one of the completions is damaged.
        """
        wanted = sql.select(COMPLETIONS.c.number).where(COMPLETIONS.c.time < time.timestamp())
        numbers = [number for (number,) in self._select(wanted)]
        for batch in _parts(numbers):
            self.read(batch, None)
        return numbers

    def numbers(
        self, column: str, values: Sequence | None = None, connection: sql.Connection | None = None
    ) -> dict[Any, list[int]]:
        """The numbers of the completions with each value of `id`, `group_id` or `number`, in order.

        Args:
            values: values to look for, see `check_indexes`; None: all values.
            connection: connection of a transaction; None: a new one.
        Raises:
            UserError: an index is damaged.
        """
        searched = None
        if values is None:
            self.check_indexes()
        else:
            searched = set(values)
        row = COMPLETIONS.alias()
        numbers = {}
        # The index answers for the first two columns, and the row itself for the third.
        wanted = sql.select(COMPLETIONS.c[column], COMPLETIONS.c.number, row.c[column])
        wanted = wanted.outerjoin_from(COMPLETIONS, row, row.c.number == COMPLETIONS.c.number)
        wanted = wanted.order_by(COMPLETIONS.c.number)
        for value, number, row_value in self._select(wanted, COMPLETIONS.c[column], values, connection):
            # PostgreSQL also takes the first value from the row, so a wrong index leads to a row with another value.
            if searched is not None and value not in searched:
                raise self._damaged_index(f"a search for another {column} finds completion {number}")
            if row_value != value:
                raise self._damaged_index(f"completion {number} does not have the {column} {value!r:.60}")
            numbers.setdefault(value, []).append(number)
        return numbers

    def identities(self, last: Last) -> tuple[str | None, str | None]:
        """Checksums of the last completion and the last reward of an extent; None for a row that does not exist.

        If they differ from earlier ones, the store was restored from an older copy and has grown since.
        """
        completion = self._identity(COMPLETIONS, last.completion)
        reward = self._identity(REWARDS, last.reward)
        return completion, reward

    def _identity(self, table: sql.Table, number: int) -> str | None:
        rows = self._select(sql.select(table.c.checksum).where(table.c.number == number))
        if not rows:
            return None
        return rows[0].checksum.hex()

    def new_rewards(self, after: int, last: Last) -> dict[int, tuple[Grade, str | None]]:
        """The rewards of the grader `GIVEN` after a number, each with its comment, by number of the completion.

        Args:
            last: a result of `last`.
        Raises:
            UserError: a reward is damaged or lost.
        """
        wanted = sql.select(REWARDS).where(REWARDS.c.number > after, REWARDS.c.number <= last.reward)
        rows = self._select(wanted.order_by(REWARDS.c.number))
        if last.reward == last.rewards:  # If the numbers differ, rewards were deleted.
            self._check_count(last, len(rows), last.reward - after, "rewards")
        return {row.completion: self._grade(row) for row in rows if row.grader == GIVEN}

    def _place(self, index: int) -> str:
        """The name of a new completion in error messages."""
        return f"{self.name}: record {index}"

    # --- Inside a transaction.

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[_Transaction]:
        """Holds the write lock; the rows and the transaction's extent are durable once the block ends."""
        with self._trying("written"):
            if self.is_replaced():
                raise Unavailable(self.name, "was replaced or deleted while it was open", "start this process again")
            with self._begun() as connection:
                transaction = _Transaction(connection, _last(self._row(connection, lock=True)))
                yield transaction
                last = transaction.last
                self._save(connection, last)
            if self._file:
                numbers = f"{last.completion} {last.reward} {last.turn}"
                with contextlib.suppress(OSError):
                    file = os.open(lasts_of(self._file), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                    os.write(file, f"{self.id} {numbers}\n".encode())
                    os.close(file)

    @contextlib.contextmanager
    def _begun(self) -> Iterator[sql.Connection]:
        if self._server is None:
            with self._writing.begin() as connection:
                yield connection
            return
        with self._lock:
            connection = self._connection_of_server()
            with connection.begin():
                yield connection

    def _connection_of_server(self) -> sql.Connection:
        """The connection that holds the server's name; if it is lost, a new connection that has got the name."""
        dialect = self._engine.dialect
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(sql.exc.DBAPIError, dialect.loaded_dbapi.Error):
                if not connection.invalidated and dialect.do_ping(cast(Any, connection.connection.dbapi_connection)):
                    return connection
            self._connection = None
            connection.invalidate()
            connection.close()
        connection = self._writing.connect()
        connection.detach()  # A pool would keep the connection, and with it the name.
        key = signed_hash(f"recjax server {self._server}".encode())
        if not connection.scalar(sql.select(sql.func.pg_try_advisory_lock(key))):
            connection.close()
            raise Unavailable(
                f"{self.name}: another server of the name {self._server!r} records there; give this one a name of its"
                " own with --server_name, or end the other one. If its machine has failed, wait two minutes"
            )
        connection.commit()
        self._connection = connection
        return connection

    def _check_version(self, rows: Sequence[Any]) -> None:
        if len(rows) != 1:
            raise UserError(self.name, f"is damaged: its table `store` has {len(rows)} rows, not one", RESTORE)
        if rows[0].version != VERSION:
            raise UserError(
                self.name,
                f"has store version {rows[0].version!r:.20}, and this recjax reads version {VERSION}",
                "export it with the recjax that wrote it, and import it with python -m recjax.import_experience",
            )

    def _row(self, connection: sql.Connection, lock: bool = False) -> Any:
        wanted = sql.select(_STORE)
        if lock:
            wanted = wanted.with_for_update()
        rows = connection.execute(wanted).all()
        self._check_version(rows)
        self._verify(rows[0], "the row of its table `store`")
        return rows[0]

    def _save(self, connection: sql.Connection, last: Last) -> None:
        connection.execute(_STORE.update().values(_store_columns(self.id, last)))

    def _append(
        self, connection: sql.Connection, last: Last, records: Sequence[Record], numbers: Sequence[int] | None = None
    ) -> Last:
        if not numbers:
            numbers = range(last.completion + 1, last.completion + 1 + len(records))
        shared: dict = {}
        rows = []
        for record, number in zip(records, numbers, strict=True):
            values = tuple(row_of(record, number, shared).values())
            rows.append((*values, _checksum(values)))
        if connection.dialect.name == "postgresql":
            for record in records:
                if len(record.completion.id.encode()) > _LONGEST_ID:
                    problem = f"has more than the {_LONGEST_ID} bytes that PostgreSQL can look up"
                    raise UserError(f"{self.name}: id", problem, "give shorter ids", record.completion.id)
        try:
            self._insert(connection, COMPLETIONS, rows)
        except sql.exc.IntegrityError as error:
            known = self.numbers("id", [record.completion.id for record in records])
            if not known:
                raise Conflict(self.name, str(error.orig)) from error
            raise Conflict(f"{self.name}: id", ID_IS_TAKEN, COLUMNS["id"].remedy, min(known)) from error
        last = last._replace(completion=numbers[-1], completions=last.completions + len(records))
        graders: dict[str, dict[int, tuple[Grade, str | None]]] = {GIVEN: {}}
        for number, record in zip(numbers, records, strict=True):
            if record.completion.grade and record.completion.grade.reward is not None:
                graders[GIVEN][number] = record.completion.grade, record.completion.metadata.get("comment")
            for grader, grade_and_comment in record.others.items():
                graders.setdefault(grader, {})[number] = grade_and_comment
        for grader, grades in graders.items():
            last = self._add_rewards(connection, last, grades, grader)
        return last

    def _add_rewards(
        self, connection: sql.Connection, last: Last, grades: Mapping[int, tuple[Grade, str | None]], grader: str
    ) -> Last:
        now = datetime.now(UTC).timestamp()
        rows = []
        for number, (completion, (grade, comment)) in enumerate(grades.items(), start=last.reward + 1):
            reward = grade.reward
            if reward is not None:
                reward = float(reward) + 0.0  # SQLite does not keep the sign of -0.0.
            accurate = grade.accurate
            if accurate is not None:
                accurate = bool(accurate)
            parts = to_json(grade.reward_parts)
            turns = to_json(grade.turns)
            # In the order of the columns.
            values = (number, completion, grader, reward, parts, accurate, grade.failure, comment, turns, now)
            rows.append((*values, _checksum(values)))
        if rows:
            try:
                self._insert(connection, REWARDS, rows)
            except sql.exc.IntegrityError as error:
                raise Conflict(
                    self.name, f"a completion already has a reward of {grader!r}; rewards cannot change"
                ) from error
        return last._replace(reward=last.reward + len(rows), rewards=last.rewards + len(rows))

    def _insert(self, connection: sql.Connection, table: sql.Table, rows: Sequence[Any]) -> None:
        # The driver gets the values unchanged; SQLAlchemy would take longer to bind them than SQLite to write them.
        statement = self._insertions[table.name]
        if not statement.positional:
            names = table.c.keys()
            rows = [dict(zip(names, map(escaped, row), strict=True)) for row in rows]
        connection.exec_driver_sql(str(statement), rows)

    def _select(
        self,
        wanted: sql.Select,
        column: sql.Column | None = None,
        values: Sequence | None = None,
        connection: sql.Connection | None = None,
    ) -> list[Any]:
        """The rows of a query; with values, the rows whose column has one of the values."""
        with self._trying("read"), contextlib.ExitStack() as stack:
            if connection is None:
                connection = stack.enter_context(self._engine.connect())
            if values is None:
                return list(connection.execute(wanted).all())
            assert column is not None
            rows = []
            for batch in _parts(values):
                rows += connection.execute(wanted.where(column.in_(batch))).all()
            return rows

    # --- From rows to records.

    def _record(self, row: Any, given: tuple[Grade, str | None] | None) -> Record:
        self._verify(row, "completion {0.number} ({0.id!r:.60})")
        # A dictionary of all columns takes less time than the row's attributes.
        columns = dict(zip(_COLUMNS, row, strict=True))
        if given is None:
            return record_of(columns, None)
        grade, comment = given
        return record_of(columns, grade, comment)

    def _grade(self, row: Any) -> tuple[Grade, str | None]:
        self._verify(row, "reward {0.number} of completion {0.completion}")
        grade = Grade(
            reward=row.reward,
            reward_parts=from_json(row.parts, None),
            accurate=row.accurate,
            failure=row.failure,
            turns=tuple(from_json(row.turns, ())),
        )
        return grade, row.comment

    def _verify(self, row: Any, name: str) -> None:
        if _checksum(row[:-1]) != row[-1]:
            raise UserError(self.name, f"is damaged: {name.format(row)} does not match its checksum", RESTORE)

    def _damaged_index(self, problem: str) -> UserError:
        if self._file:
            remedy = f"run python -m recjax.inspect_experience {self.name} --rebuild, which makes the indexes again"
        else:
            remedy = "run the database's REINDEX"
        return UserError(self.name, f"is damaged: {problem}", f"{remedy}, or {RESTORE}")

    def _check_count(self, began: Last, seen: int, expected: int, name: str) -> None:
        """Raises an error if rows are lost, unless a writer has changed the store during the read."""
        if seen != expected and self.last() == began:
            raise UserError(self.name, f"is damaged: it has {seen} of {expected} {name}", RESTORE)

    @contextlib.contextmanager
    def _trying(self, verb: str) -> Iterator[None]:
        """Explains the errors of the database without the values of its statements."""
        try:
            yield
        except (sql.exc.DBAPIError, sql.exc.TimeoutError, UnicodeDecodeError, TypeError, OverflowError) as error:
            if not isinstance(error, sql.exc.SQLAlchemyError):
                if verb == "written":
                    raise
                raise UserError(self.name, f"is damaged: {error}", RESTORE) from error
            kind = Unavailable if is_unavailable(error) else UserError
            raise kind(self.name, f"cannot be {verb}: {explained(error, self.name)}") from error

    def _check_lasts(self) -> None:
        """Compares a small file next to SQLite's, with the numbers of the last rows, with the rows that are there.

        SQLite keeps the newest rows in a second file until it copies them into the first one, and does not notice if
        somebody deletes the second file.
        """
        if not self._file:
            return
        path = lasts_of(self._file)
        try:
            identity, *texts = path.read_text(encoding="ascii").split()
            completions, rewards, turns = map(int, texts)
        except (OSError, ValueError):
            return
        # The order matters: a writer first writes rows, then the file.
        last = self.last()
        lost_completions = max(completions - last.completion, 0)
        lost_rewards = max(rewards - last.reward, 0)
        lost_turns = max(turns - last.turn, 0)
        if identity == self.id and (lost_completions or lost_rewards or lost_turns):
            raise UserError(
                self.name,
                f"the last {lost_completions} completions, {lost_rewards} rewards and {lost_turns} turns are gone,"
                f" perhaps with the file {self._file}-wal",
                f"restore the files from a backup, or delete {path} to accept the loss",
            )


def _parts(values: Sequence) -> Iterator[list]:
    """Splits values into lists of at most `_TOGETHER`."""
    for start in range(0, len(values), _TOGETHER):
        yield list(values[start : start + _TOGETHER])


def _last(row: Any) -> Last:
    """The extent of a store from the row of its table `store`."""
    return Last(
        completion=row.last_completion,
        reward=row.last_reward,
        turn=row.last_turn,
        completions=row.completions,
        rewards=row.rewards,
        turns=row.turns,
    )


def _store_columns(identity: str, last: Last) -> dict[str, Any]:
    """The row of the table `store`, by column."""
    return _with_checksum(_STORE, (VERSION, identity, *last))


def _with_checksum(table: sql.Table, values: tuple) -> dict[str, Any]:
    """A row by column: the values and, in the last column, their checksum."""
    return dict(zip(table.c.keys(), (*values, _checksum(values)), strict=True))


def _checksum(values: Iterable[Any]) -> bytes:
    """The checksum of a row: it covers the values, with the length of each blob in its place, and then the blobs."""
    plain = []
    blobs = []
    for value in values:
        if type(value) is bytes:
            plain.append(len(value))
            blobs.append(value)
        else:
            plain.append(value)
    checksum = xxhash.xxh3_128(repr(plain).encode("utf-8", "surrogatepass"))
    for blob in blobs:
        checksum.update(blob)
    return checksum.digest()
