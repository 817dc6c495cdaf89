"""The record of what is served: in a journal at once, and in an experience store when it is rewarded or has waited.

A row of a store is best written once, whole: a session's grows with its turns, and most rewards come soon. Until then
it is in the journal, from which a recorder that is started again reads it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
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
        self._ticking, self._flushing = None, asyncio.Lock()
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
            for name in await asyncio.to_thread(delete_before, self.options.folder, before):
                self.book.stored.pop(name, None)

    def _append(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Writes a part; returns what cannot be written, which is all of it or, alone, what no store takes."""
        try:
            store.append(self.options.folder, [row for unit in units for row in unit.rows(self.options.source)])
            return []
        except (ValueError, OSError) as error:
            if len(units) == 1 or isinstance(error.__cause__, OSError):
                logger.error("%s: a part cannot be written, and is tried again: %s", self.options.folder, error)
                return units
        return [left for unit in units for left in self._append([unit])]

    async def _give_late(self) -> None:
        late = dict(self.book.late)
        if not late:
            return
        try:
            await asyncio.to_thread(give_rewards, self.options.folder, [_entry(row, late[row][0]) for row in late])
        except (ValueError, OSError) as error:
            logger.error("%s: late rewards cannot be written, and are tried again: %s", self.options.folder, error)
            return
        for row in late:
            self.book.late.pop(row, None)


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
