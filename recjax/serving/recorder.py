"""The record of what is served: in a journal at once, and in an experience store when it is rewarded or has waited.

A row of a store is best written once, whole: a session's grows with its turns, and most rewards come soon. Until then
it is in the journal, from which a recorder that is started again reads it.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from recjax.experience import store
from recjax.experience.feedback import give_rewards
from recjax.models.sampling import Sampling
from recjax.serving.book import Book
from recjax.serving.journal import Journal
from recjax.serving.refusals import Refused
from recjax.serving.served import Feedback, Served
from recjax.serving.units import Unit

logger = logging.getLogger(__name__)

_MOST_SHOWN = 20  # refused rewards, in /health
_PART = "a part cannot be written"
_LEAST_REWRITE = 1 << 20  # bytes that a journal has before it is written anew


class Recording(NamedTuple):
    """How a server records.

    folder: of the store.
    source: of its rows.
    prompts: whether what was asked is recorded.
    reward_seconds: that completions and sessions wait for rewards, from when something came last.
    part_seconds: between two parts of the store.
    keep_days: after which parts are deleted; None: never.
    sessions: that may be under way at one time.
    """

    folder: Path
    source: str
    prompts: bool = True
    reward_seconds: float = 3600.0
    part_seconds: float = 30.0
    keep_days: float | None = None
    sessions: int = 1024


class Recorder:
    """Takes what was served, and feedback; an asynchronous context, of one event loop and one process."""

    def __init__(self, options: Recording, tokenizer: PreTrainedTokenizerBase):
        """Takes the store's folder, and what an earlier recorder left in its journal.

        Raises:
            ValueError: another server records there; a store or journal is damaged, or of another model.
        """
        self.options, self.error = options, None
        self._ticking, self._flushing, self._looking = None, asyncio.Lock(), asyncio.Lock()
        self._failures: dict[str, str] = {}  # what could not be done when it was last tried, and why
        self.refused: dict[str, str] = {}  # late rewards that the store does not take, by row, and why
        store.part_files(options.folder)  # refuses a file
        options.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(options.folder / ".served.lock", thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            message = f"{options.folder}: another server records there; name another folder with --record"
            raise ValueError(message) from None
        self.book = Book(options.folder, tokenizer, options.prompts, options.sessions)
        self._journal = Journal(options.folder / ".served.jsonl")
        for line, entry in self._journal.read():
            self.book.replay(line, entry)
        if options.keep_days is not None:  # rows that are gone were deleted on purpose
            self.book.late = {row: late for row, late in self.book.late.items() if row in self.book.stored}
        for row, (given, _) in self.book.late.items():
            if (before := self.book.stored.get(row)) not in (None, given):
                self.refused[row] = f"row {row!r} has another reward, {before.reward}; a reward is given once"

    async def __aenter__(self) -> "Recorder":
        """Begins to write parts."""
        self._ticking = asyncio.get_running_loop().create_task(self._tick())
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Writes all that waits to the store; sessions that are under way end with that."""
        self._ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticking
        await self.flush(0.0)
        await self._journal.close()
        self._lock.release()

    @property
    def trouble(self) -> str | None:
        """Why something that was recorded does not reach the store, though it is tried; None: all does."""
        refused = f"{len(self.refused)} rewards are not in the store: " if self.refused else None
        return next(iter(self._failures.values()), refused and refused + next(iter(self.refused.values())))

    def waiting(self) -> dict[str, Any]:
        """Rewards that are in the journal and not in the store: how many, and of those that it does not take, why."""
        refused = dict(itertools.islice(self.refused.items(), _MOST_SHOWN))
        late = {"late_rewards": len(self.book.late)} if self.book.late else {}
        return late | ({"refused_rewards": refused} if refused else {})

    async def record(self, served: Sequence[Served]) -> None:
        """Returns when all of it is on disk, in one piece.

        Raises:
            Refused: it cannot be written, or its session is over by now or has another distribution.
        """
        for one in served:
            if one.session is not None:
                check_sampling(self.book.session(one.session), one.session, one.sampling)
        kept = [one if self.options.prompts else one.without_prompt() for one in served]
        entry = {"served": [one.to_json() for one in kept]}
        with self.book.growing([one.session for one in served if one.session]):
            await self._write(entry, lambda line: self.book.add(line, served))

    async def reward(self, row: str, given: Feedback) -> bool:
        """Gives a row its reward, and returns when that is on disk: whether it is new.

        Args:
            row: the id of a row, or of a session's.
        Raises:
            Refused: there is no such row, it has another reward, or this one cannot be written.
        """
        if self.book.is_stored(row):
            await self._look()
        is_new = self.book.is_new(row, given)
        # At once, so that no other one comes between. The very same one waits for the disk as well.
        self.book.give(row, given, b"")
        try:
            entry = {"feedback": row, "given": given._asdict()}
            await self._write(entry, lambda line: self.book.give(row, given, line))
        except Refused:
            if is_new:
                self.book.take_back(row)
            raise
        return is_new

    async def _look(self) -> None:
        """Takes in rewards that others have given to rows of the store."""
        async with self._looking:
            with self._trying("the store's rewards cannot be read"):
                self.book.take_in(await asyncio.to_thread(self.book.new_in_store))

    @contextlib.contextmanager
    def _trying(self, failure: str) -> Iterator[None]:
        """A block that may fail and is tried again; what it is that fails is in the log and in `trouble`."""
        try:
            yield
            self._failures.pop(failure, None)
        except (ValueError, OSError) as error:
            self._failures[failure] = f"{self.options.folder}: {failure}, and it is tried again: {error}"
            logger.error("%s", self._failures[failure])

    async def _write(self, entry: dict[str, Any], apply: Callable[[bytes], None]) -> None:
        try:
            await self._journal.add(entry, apply)
        except OSError as error:
            self.error = f"{self.options.folder} cannot be written ({error.strerror or error})"
            logger.error("%s", self.error)
            raise Refused(503, f"{self.error}, and nothing is served that is not recorded; make room there") from error
        self.error = None

    # --- What goes to the store.

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.options.part_seconds)
            await asyncio.shield(self.flush(self.options.reward_seconds))

    async def flush(self, seconds: float) -> None:
        """Writes a part of what is rewarded or has waited for so long, and late rewards to the parts that they are of.

        What cannot be written stays in the journal, and is tried again.
        """
        async with self._flushing:
            due = self.book.take_due(seconds)
            left = await asyncio.to_thread(self._append, due) if due else []
            if not left:
                self._failures.pop(_PART, None)
            self.book.put_back(left)
            self.book.forget_turns([unit for unit in due if unit not in left])
            await self._give_late()
            await self._delete_old()
            live, size = sum(map(len, self.book.lines())), self._journal.size
            forgetting = seconds == 0 or self.options.keep_days is not None
            if size > max(_LEAST_REWRITE, 2 * live) or (size > live and forgetting):
                self._journal.rewrite(self.book.lines)

    async def _delete_old(self) -> None:
        if self.options.keep_days is not None:
            before = datetime.now(UTC) - timedelta(days=self.options.keep_days)
            with self._trying("old parts cannot be deleted"):
                for name in await asyncio.to_thread(delete_before, self.options.folder, before):
                    for known in (self.book.stored, self.book.late, self.refused):
                        known.pop(name, None)

    def _append(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Writes a part; returns what cannot be written, which is all of it or, alone, what no store takes."""
        try:
            store.append(self.options.folder, [row for unit in units for row in unit.rows(self.options.source)])
            return []
        except (ValueError, OSError) as error:
            if len(units) == 1 or isinstance(error.__cause__, OSError):
                self._failures[_PART] = f"{self.options.folder}: {_PART}, and it is tried again: {error}"
                logger.error("%s", self._failures[_PART])
                return units
        return [left for unit in units for left in self._append([unit])]

    async def _give_late(self) -> None:
        """Gives rows of the store their late rewards, each by itself; one that the store does not take is kept."""
        late = {row: kept for row, kept in self.book.late.items() if row not in self.refused}
        rows, refused = list(late), {}

        def refuse(number: int, why: str) -> None:
            refused[rows[number]] = why

        entries = [_entry(row, given) for row, (given, _) in late.items()]
        with self._trying("late rewards cannot be written"):
            if entries:
                await asyncio.to_thread(give_rewards, self.options.folder, entries, "a late reward".format, refuse)
            for row in late.keys() - refused.keys():
                self.book.late.pop(row, None)
        for why in refused.values():
            logger.error("%s: %s; it stays in .served.jsonl", self.options.folder, why)
        self.refused |= refused


def check_sampling(unit: Unit, session: str, sampling: Sampling) -> None:
    """Refuses a turn of another distribution than those before it, as a row's log-probs are of one."""
    if unit.served and unit.served[0].sampling != sampling:
        raise Refused(
            409,
            f"session {session!r} was begun with {', '.join(Sampling._fields)} ="
            f" {', '.join(map(str, unit.served[0].sampling))}; its turns are one trajectory, of one distribution: ask"
            " with these, or take another session",
            param="temperature",
        )


def delete_before(folder: Path, time: datetime) -> list[str]:
    """Deletes the parts of a store whose newest row is older; returns the ids of their rows."""
    old = []
    for part in store.part_files(folder):
        table = store.read_columns(part, ["id", "time"])
        if max(table["time"].to_pylist()) < time:
            old.append(table["id"].to_pylist())
    firsts = {names[0] for names in old}
    if firsts:
        store.keep_parts(folder, lambda first: first not in firsts)
    return [name for names in old for name in names]


def _entry(row: str, given: Feedback) -> dict[str, Any]:
    """As `give_rewards` takes it; the rows of a session have it all."""
    key = "group_id" if row.startswith("session/") else "id"
    return {key: row, **given._asdict()}
