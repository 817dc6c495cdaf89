"""Records completions: in a journal at once, in an experience store once they have rewards or have waited long enough.

A store's row is best written once: a session's row grows with its turns, and most rewards arrive soon. Until then the
journal holds the row, and a restarted recorder reads it from there.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from filelock import Timeout
from transformers import PreTrainedTokenizerBase

from recjax.experience import store
from recjax.experience.feedback import give_rewards
from recjax.files import locked_file
from recjax.models.sampling import Sampling
from recjax.serving.book import Book
from recjax.serving.journal import Journal
from recjax.serving.refusals import Refused
from recjax.serving.served import Feedback, Served
from recjax.serving.units import StoreUnit

logger = logging.getLogger(__name__)

_MOST_SHOWN = 20  # refused rewards that /health lists
_PART = "a part cannot be written"
_LEAST_REWRITE = 1 << 20  # smallest size in bytes of a journal that is rewritten


class Recording(NamedTuple):
    """Options for recording.

    folder: folder of the store.
    source: source of the rows.
    prompts: True to record prompts.
    reward_seconds: time that completions and sessions wait for rewards after their last change.
    part_seconds: time between two parts of the store.
    keep_days: age at which parts are deleted; None: never.
    sessions: most sessions that may be active together.
    """

    folder: Path
    source: str
    prompts: bool = True
    reward_seconds: float = 3600.0
    part_seconds: float = 30.0
    keep_days: float | None = None
    sessions: int = 1024


class Recorder:
    """Records completions and feedback; an asynchronous context for one event loop and one process."""

    def __init__(self, options: Recording, tokenizer: PreTrainedTokenizerBase):
        """Opens the store's folder, and reads the journal of an earlier recorder.

        Raises:
            ValueError: another server records there; a store or journal is damaged, or belongs to another model.
        """
        self.options, self.error = options, None
        self._ticking, self._flushing, self._looking = None, asyncio.Lock(), asyncio.Lock()
        self._failures: dict[str, str] = {}  # tasks whose last attempt failed, with the reasons
        self.refused: dict[str, str] = {}  # reasons why the store refuses late rewards, by row
        store.part_files(options.folder)  # raises an error if it is a file
        self._lock = contextlib.ExitStack()
        try:
            self._lock.enter_context(locked_file(options.folder / ".served.lock", seconds=0))
        except Timeout:
            message = f"{options.folder}: another server records there; give another folder with --record"
            raise ValueError(message) from None
        self.book = Book(options.folder, tokenizer, options.prompts, options.sessions)
        self._journal = Journal(options.folder / ".served.jsonl")
        for line, entry in self._journal.read():
            self.book.replay(line, entry)
        if options.keep_days is not None:  # missing rows were deleted on purpose
            self.book.late = {row: late for row, late in self.book.late.items() if row in self.book.stored}
        for row, (given, _) in self.book.late.items():
            if (before := self.book.stored.get(row)) not in (None, given):
                self.refused[row] = f"row {row!r} already has another reward, {before.reward}; rewards cannot change"

    async def __aenter__(self) -> "Recorder":
        """Starts writing parts."""

        async def write_parts() -> None:
            while True:
                await asyncio.sleep(self.options.part_seconds)
                await asyncio.shield(self.flush(self.options.reward_seconds))

        self._ticking = asyncio.get_running_loop().create_task(write_parts())
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Writes all waiting units to the store, which ends active sessions."""
        self._ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticking
        await self.flush(0.0)
        await self._journal.close()
        self._lock.close()

    @property
    def trouble(self) -> str | None:
        """The reason why some records do not reach the store despite retries; None if all do."""
        refused = f"{len(self.refused)} rewards are not in the store: " if self.refused else None
        return next(iter(self._failures.values()), refused and refused + next(iter(self.refused.values())))

    def waiting(self) -> dict[str, Any]:
        """The number of rewards that are only in the journal, and the reasons for those that the store refuses."""
        refused = dict(itertools.islice(self.refused.items(), _MOST_SHOWN))
        late = {"late_rewards": len(self.book.late)} if self.book.late else {}
        return late | ({"refused_rewards": refused} if refused else {})

    async def record(self, served: Sequence[Served]) -> None:
        """Returns when all completions are on disk, in one entry.

        Raises:
            Refused: the disk is not writable, or the session is over or has another distribution.
        """
        for one in served:
            if one.session is not None:
                check_sampling(self.book.session(one.session), one.session, one.sampling)
        kept = [one if self.options.prompts else one.without_prompt() for one in served]
        entry = {"served": [one.to_json() for one in kept]}
        with self.book.growing([one.session for one in served if one.session]):
            await self._write(entry, lambda line: self.book.add(line, served))

    async def reward(self, row: str, given: Feedback) -> bool:
        """Gives a row its reward; returns when the reward is on disk, with True if it is new.

        Args:
            row: id of a row or of a session's first row.
        Raises:
            Refused: the row does not exist or has another reward, or the disk is not writable.
        """
        if self.book.is_stored(row):
            # Other programs may have rewarded the row.
            async with self._looking:
                with self._trying("the store's rewards cannot be read"):
                    self.book.take_in(await asyncio.to_thread(self.book.new_in_store))
        is_new = self.book.is_new(row, given)
        # Set before writing, so that no other reward gets in between. An equal reward also waits for the disk.
        self.book.give(row, given, b"")
        try:
            entry = {"feedback": row, "given": given._asdict()}
            await self._write(entry, lambda line: self.book.give(row, given, line))
        except Refused:
            if is_new:
                self.book.take_back(row)
            raise
        return is_new

    @contextlib.contextmanager
    def _trying(self, failure: str) -> Iterator[None]:
        """A block that may fail and is tried again later; failures appear in the log and in `trouble`."""
        try:
            yield
            self._failures.pop(failure, None)
        except (ValueError, OSError) as error:
            self._failures[failure] = f"{self.options.folder}: {failure}; the server retries: {error}"
            logger.error("%s", self._failures[failure])

    async def _write(self, entry: dict[str, Any], apply: Callable[[bytes], None]) -> None:
        try:
            await self._journal.add(entry, apply)
        except OSError as error:
            self.error = f"{self.options.folder} cannot be written ({error.strerror or error})"
            logger.error("%s", self.error)
            raise Refused(503, f"{self.error}, and the server must record all replies; free disk space") from error
        self.error = None

    # --- Writing to the store.

    async def flush(self, seconds: float) -> None:
        """Writes a part with units that have rewards or have waited `seconds`, and adds late rewards to existing parts.

        Units and rewards that cannot be written stay in the journal and are tried again.
        """
        async with self._flushing:
            due = self.book.take_due(seconds)
            left = await asyncio.to_thread(self._append, due) if due else []
            if not left:
                self._failures.pop(_PART, None)
            self.book.put_back(left)
            self.book.forget_turns([unit for unit in due if unit not in left])
            await self._give_late()
            if self.options.keep_days is not None:
                before = datetime.now(UTC) - timedelta(days=self.options.keep_days)
                with self._trying("old parts cannot be deleted"):
                    for name in await asyncio.to_thread(delete_before, self.options.folder, before):
                        for known in (self.book.stored, self.book.late, self.refused):
                            known.pop(name, None)
            live, size = sum(map(len, self.book.lines())), self._journal.size
            forgetting = seconds == 0 or self.options.keep_days is not None
            if size > max(_LEAST_REWRITE, 2 * live) or (size > live and forgetting):
                self._journal.rewrite(self.book.lines)

    def _append(self, units: Sequence[StoreUnit]) -> Sequence[StoreUnit]:
        """Writes a part. Returns units that were not written: all of them, or only units that no store accepts."""
        try:
            store.append(self.options.folder, [row for unit in units for row in unit.rows(self.options.source)])
            return []
        except (ValueError, OSError) as error:
            if len(units) == 1 or isinstance(error.__cause__, OSError):
                self._failures[_PART] = f"{self.options.folder}: {_PART}; the server retries: {error}"
                logger.error("%s", self._failures[_PART])
                return units
        return [left for unit in units for left in self._append([unit])]

    async def _give_late(self) -> None:
        """Gives rows of the store their late rewards one by one; keeps rewards that the store refuses."""
        late = {row: kept for row, kept in self.book.late.items() if row not in self.refused}
        rows, refused = list(late), {}

        def refuse(number: int, why: str) -> None:
            refused[rows[number]] = why

        # A session's reward goes to all its rows.
        keys = ["group_id" if row.startswith("session/") else "id" for row in rows]
        entries = [{key: row, **late[row][0]._asdict()} for key, row in zip(keys, rows, strict=True)]
        with self._trying("late rewards cannot be written"):
            if entries:
                await asyncio.to_thread(give_rewards, self.options.folder, entries, "a late reward".format, refuse)
            for row in late.keys() - refused.keys():
                self.book.late.pop(row, None)
        for why in refused.values():
            logger.error("%s: %s; the reward stays in .served.jsonl", self.options.folder, why)
        self.refused |= refused


def check_sampling(unit: StoreUnit, session: str, sampling: Sampling) -> None:
    """Refuses a turn with another distribution than earlier turns, as a row's log-probs have one distribution."""
    if unit.served and unit.served[0].sampling != sampling:
        raise Refused(
            409,
            f"session {session!r} has {', '.join(Sampling._fields)} = {', '.join(map(str, unit.served[0].sampling))},"
            " and all turns of a session have the same values; send these values, or use another session",
            param="temperature",
        )


def delete_before(folder: Path, time: datetime) -> list[str]:
    """Deletes the parts of a store whose newest row is older than `time`; returns the ids of their rows."""
    old = []
    for part in store.part_files(folder):
        table = store.read_columns(part, ["id", "time"])
        if max(table["time"].to_pylist()) < time:
            old.append(table["id"].to_pylist())
    firsts = {names[0] for names in old}
    if firsts:
        store.keep_parts(folder, lambda first: first not in firsts)
    return [name for names in old for name in names]
