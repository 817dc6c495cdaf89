"""Records completions and rewards in an experience store, each before its client gets a reply.

A session's turns are in the store at once, and become one completion when the session ends.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from recjax.errors import UserError
from recjax.experience.completion_checks import check_records
from recjax.experience.group import Grade
from recjax.experience.records import Record, record_from_plain, record_to_plain
from recjax.models.sampling import Sampling
from recjax.serving.bodies import RewardBody
from recjax.serving.refusals import Refused
from recjax.serving.units import Session, session_row, without_prompt
from recjax.store.database import Unavailable
from recjax.store.feedback import known_turns
from recjax.store.store import Change, Conflict, Store
from recjax.store.tokenize import tokenizer_name

logger = logging.getLogger(__name__)

_CHANGED = "completion_changed"  # code of a refusal: another client was first, or the completion is gone
_AWAY = "store_unavailable"
_TICK_SECONDS = 5.0  # time between two looks for sessions that have waited long enough


class Recording(NamedTuple):
    """Options for recording.

    store: file or URL of the store.
    source: source of the completions.
    prompts: True to record prompts.
    reward_seconds: time that a session waits for its reward after its last turn.
    keep_days: age at which completions are deleted; None: never.
    sessions: most sessions that may be active together.
    server: name that the server keeps at its next start, among all that record into the same database.
    """

    store: str
    source: str
    prompts: bool = True
    reward_seconds: float = 3600.0
    keep_days: float | None = None
    sessions: int = 1024
    server: str = ""


class Recorder:
    """Records completions and feedback; an asynchronous context for one event loop.

    Attributes:
        sessions: open sessions by the id of their completion.
        error: reason why the store cannot be written; None if the last attempt has succeeded.
        tokenizer_name: name of the completions' vocabulary.
    """

    def __init__(self, options: Recording, tokenizer: PreTrainedTokenizerBase):
        """Opens the store, and continues the sessions that an earlier recorder has left.

        Raises:
            UserError: another server records there; the store is damaged, or has sessions of another model.
        """
        self.options = options
        self.error = None
        self._tokenizer = tokenizer
        self.tokenizer_name = tokenizer_name(tokenizer)
        self.sessions: dict[str, Session] = {}
        self._turns: dict[str, Session] = {}  # open sessions by the ids of their turns
        self._locks: dict[str, asyncio.Lock] = {}  # a session does not end while its turn is written
        self._changes: list[tuple[Change, asyncio.Future]] = []
        self._writing: asyncio.Task | None = None
        self._ticking: asyncio.Task | None = None
        # A database that does not answer holds these threads, and the threads of prompts stay free.
        self._threads = ThreadPoolExecutor(8, "recorder")
        with contextlib.ExitStack() as opened:
            self._store = opened.enter_context(Store(options.store, create=True))
            opened.callback(self._threads.shutdown, wait=False)
            self._store.reserve(options.server)
            self._store.check_indexes()
            for name, content in self._store.turns(options.server):
                plain = json.loads(content)
                if "reward" in plain:
                    self.sessions[session_row(name)].rewards[plain["turn"]] = plain["reward"]
                    continue
                turn = record_from_plain(plain["turn"])
                if turn.tokenizer != self.tokenizer_name:
                    raise UserError(
                        options.store,
                        f"session {name!r} is of another model's vocabulary",
                        "start the server with that model once, or give another store with --record",
                    )
                self._add(name, turn, plain["prompt"])
            self._held = opened.pop_all()

    async def __aenter__(self) -> "Recorder":
        """Starts to look for sessions that have waited long enough."""

        async def tick() -> None:
            while True:
                await asyncio.sleep(_TICK_SECONDS)
                if self.error:
                    with contextlib.suppress(Refused):
                        await self._write(Change())  # an empty change; clears the error if a write succeeds
                await asyncio.shield(self.end_sessions(self.options.reward_seconds))

        self._ticking = asyncio.get_running_loop().create_task(tick())
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Ends all sessions."""
        assert self._ticking is not None
        self._ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticking
        await self.end_sessions(0.0)
        while self._writing:
            await asyncio.wait([self._writing])
        self._held.close()

    # --- Queries.

    async def session(self, name: str) -> Session:
        """An open session, or a new one, which is kept once its first turn is recorded.

        Raises:
            Refused: the session is over, or there are too many sessions.
        """
        row = session_row(name)
        if row in self.sessions:
            return self.sessions[row]
        if await self._number(row) is not None:
            raise Refused(
                409,
                f"session {name!r} is over: it has its reward, waited too long for one, or the server has stopped"
                " since; use another id",
                code="session_over",
            )
        if len(self.sessions) >= self.options.sessions:
            raise Refused(429, f"{len(self.sessions)} sessions are active; reward one, or try again later")
        return Session(name, self._tokenizer)

    async def place_of(self, reply: str, index: int | None) -> tuple[str, int | None]:
        """The id of the completion that feedback on a reply belongs to, and the number of the turn in a session.

        Raises:
            Refused: the reply has several choices and `index` is missing, or a turn's reply has no such choice.
        """
        session = self._turns.get(f"{reply}/0")
        row = f"{reply}/{index or 0}"
        second_row = f"{reply}/1"
        if session is not None:
            has_more = second_row in self._turns
        else:
            has_more = await self._number(second_row) is not None
        if index is None and has_more:
            raise Refused(400, f"{reply!r} has several choices; choose one with index", param="index")
        if session is None:
            return row, None
        turn = session.turn_of(row)
        if turn is None:
            raise Refused(404, f"index = {index}: {reply!r} has no such choice", param="index")
        return session.name, turn

    async def _number(self, row: str) -> int | None:
        numbers = await self._read(self._store.numbers, "id", [row])
        if row not in numbers:
            return None
        return numbers[row][0]

    async def _open_session(self, row: str) -> Session | None:
        """An open session by the id of its completion; None if it is over.

        If the database did not say whether the session has ended, its completion in the store does.
        """
        session = self.sessions.get(row)
        if session is None or not session.may_have_ended:
            return session
        number = await self._number(row)
        if number is not None:
            (stored,) = await self._read(self._store.read, [number], None)
            ours = session.record(self.options.prompts, None, None).completion
            if (stored.completion.text, len(stored.completion.turns)) == (ours.text, len(ours.turns)):
                self._forget(session)
                return None
        session.may_have_ended = False
        return session

    async def _read(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of the store in a thread, as a database may block for minutes."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read, *arguments)
        except Conflict as error:
            raise Refused(409, str(error), code=_CHANGED) from error
        except UserError as error:
            raise self._failed(error, isinstance(error, Unavailable)) from error

    def _failed(self, error: Exception, for_all: bool = True) -> Refused:
        """The refusal of a request that has to be recorded; `for_all` if other requests would fail, too."""
        if for_all:
            self.error = str(error)
        logger.error("%s", error, exc_info=not isinstance(error, UserError))
        code = None
        if isinstance(error, Unavailable):
            code = _AWAY
        return Refused(503, f"{error}; the server must record all replies", code=code)

    # --- Changes; each returns when it is on disk.

    async def record(self, records: Sequence[Record], texts: Sequence[str], session: str | None) -> None:
        """Records completions of one request.

        Args:
            texts: text of each completion's prompt as the model read it.
            session: name of the session whose turns they are; None: independent completions.
        Raises:
            Refused: the store cannot be written, or the session is over or has another distribution.
            UserError: a completion cannot be recorded, for example because its log-probs are not finite.
        """
        has_prompts = self.options.prompts
        kept = records
        if not has_prompts:
            kept = [without_prompt(record) for record in records]
        check_records(kept, "completion {}".format)
        if session is None:
            await self._write(Change(kept))
            return
        async with self._lock(session):
            await self._open_session(session_row(session))
            check_sampling(await self.session(session), session, records[0].completion.sampling)
            written = []
            for turn, text in zip(kept, texts, strict=True):
                plain: dict[str, Any] = {"prompt": None, "turn": record_to_plain(turn)}
                if has_prompts:
                    plain["prompt"] = text
                written.append((session, _json(plain)))
            await self._write(Change(turns=written))
            for turn, text in zip(records, texts, strict=True):
                self._add(session, turn, text)

    async def reward_turn(self, row: str, turn: int, reward: float) -> bool:
        """Gives a turn of an open session its reward; returns True if the reward is new.

        Args:
            row: id of the session's completion.
            turn: number of the turn, from 0.
        Raises:
            Refused: the session is over or unknown, the turn does not exist or has another reward, or the store cannot
                be written.
        """
        name = row.removeprefix("session/")
        async with self._open_session_lock(row):
            session = await self._open_session(row)
            if session is None:
                status = 409
                problem = "is over"
                if await self._number(row) is None:
                    status = 404
                    problem = "is unknown"
                remedy = "send the rewards of its turns as turn_rewards, with its reward"
                raise Refused(status, f"session {name!r} {problem}; {remedy}", code="session_over")
            count = len(session.turns)
            if turn >= count:
                raise Refused(404, f"turn = {turn}: session {name!r} has {count} turns, from 0", param="turn")
            before = session.rewards.get(turn)
            if before not in (None, reward):
                problem = f"turn {turn} already has another reward, {before:g}; rewards cannot change"
                raise Refused(409, problem, code="reward_given")
            if before is None:
                await self._write(Change(turns=[(name, _json({"turn": turn, "reward": reward}))]))
                session.rewards[turn] = reward
                session.changed = time.monotonic()
            return before is None

    async def reward(self, row: str, body: RewardBody) -> tuple[float | None, bool]:
        """Gives a completion its reward, which ends a session; returns the reward, and True if it is new.

        Args:
            row: id of a completion.
        Raises:
            Refused: the completion does not exist or has another reward, or the store cannot be written.
        """
        async with self._open_session_lock(row):
            session = await self._open_session(row)
            if session is not None:
                grade = body.grade(len(session.turns), session.turn_rewards)
                try:
                    await self._end(session, grade, body.comment)
                    return grade.reward, True
                except Refused as error:
                    if error.status != 409 or await self._open_session(row):
                        raise
        for tries in (1, 0):  # another client may give the reward first, or the completion may be deleted
            number = await self._number(row)
            if number is None:
                raise Refused(404, f"id = {row!r}: unknown; give the id of a recorded reply", param="id")
            try:
                return await self._reward(row, number, body)
            except Refused as error:
                if error.code != _CHANGED or not tries:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _reward(self, row: str, number: int, body: RewardBody) -> tuple[float | None, bool]:
        def known() -> tuple[Any, tuple[float, ...], int]:
            rewards = self._store.rewards([number])
            (record,) = self._store.read([number], None)
            turns = known_turns(self._store, [number], rewards).get(number, ())
            return rewards.get(number), turns, len(record.completion.turns) or 1

        before, turn_rewards, count = await self._read(known)
        grade = body.grade(count, turn_rewards)
        if before == (grade, body.comment):
            return grade.reward, False
        if before is not None:
            raise Refused(
                409,
                f"{row!r} already has another reward, {before[0].reward:g}; rewards cannot change",
                code="reward_given",
            )
        await self._write(Change(rewards={number: (grade, body.comment)}))
        return grade.reward, True

    async def end_sessions(self, seconds: float) -> None:
        """Ends the sessions without a turn for `seconds`, without rewards; deletes old completions."""
        before = time.monotonic() - seconds
        for session in [session for session in self.sessions.values() if session.changed <= before]:
            async with self._lock(session.name.removeprefix("session/")):
                if session.name in self.sessions and session.changed <= before:
                    with contextlib.suppress(Refused):  # said in the log, and tried again
                        if await self._open_session(session.name):
                            await self._end(session)
        if self.options.keep_days is not None:
            oldest = datetime.now(UTC) - timedelta(days=self.options.keep_days)
            with contextlib.suppress(Refused):
                await self._read(lambda: self._store.delete(self._store.older_than(oldest)))

    async def _end(self, session: Session, grade: Grade | None = None, comment: str | None = None) -> None:
        record = session.record(self.options.prompts, grade, comment)
        name = session.name.removeprefix("session/")
        try:
            await self._write(Change([record], ended=[name]))
        except Refused:
            session.may_have_ended = True  # a database may lose the answer to a commit
            raise
        self._forget(session)

    def _forget(self, session: Session) -> None:
        del self.sessions[session.name]
        self._locks.pop(session.name.removeprefix("session/"), None)
        for turn in session.turns:
            del self._turns[turn.completion.id]

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _open_session_lock(self, row: str) -> contextlib.AbstractAsyncContextManager:
        """The lock of an open session, by the id of its completion; for other sessions, a context that does nothing."""
        if row not in self.sessions:
            return contextlib.nullcontext()
        return self._lock(row.removeprefix("session/"))

    def _add(self, name: str, turn: Record, text: str | None) -> None:
        session = self.sessions.setdefault(session_row(name), Session(name, self._tokenizer))
        session.add(turn, text)
        self._turns[turn.completion.id] = session

    # --- Changes that arrive during a write are written together in the next one.

    async def _write(self, change: Change) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._changes.append((change, future))
        if self._writing is None:
            self._writing = loop.create_task(self._write_changes())
        await asyncio.shield(future)

    async def _write_changes(self) -> None:
        try:
            while self._changes:
                changes = self._changes
                self._changes = []
                error = await self._try(changes)
                errors = [error] * len(changes)
                if error and error.code != _AWAY and len(changes) > 1:
                    # If one cannot be made, none is; so each gets its own error.
                    errors = [await self._try([change]) for change in changes]
                for (_, future), error in zip(changes, errors, strict=True):
                    if future.done():
                        continue
                    if error is None:
                        future.set_result(None)
                    else:
                        future.set_exception(error)
        finally:
            self._writing = None

    async def _try(self, changes: Sequence[tuple[Change, asyncio.Future]]) -> Refused | None:
        together = [change for change, _ in changes]
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, self._store.change, together, self.options.server, True)
        except Conflict as error:
            code = _CHANGED
            if together[0].ended:
                code = "session_over"
            return Refused(409, str(error), code=code)
        except Exception as error:  # clients wait for this change, whatever the error is
            return self._failed(error)
        self.error = None
        return None


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def check_sampling(open_session: Session, session: str, sampling: Sampling | None) -> None:
    """Refuses a turn with another distribution than earlier turns, as a row's log-probs have one distribution."""
    if open_session.sampling not in (None, sampling):
        raise Refused(
            409,
            f"session {session!r} has {', '.join(Sampling._fields)} ="
            f" {', '.join(map(str, open_session.sampling or ()))},"
            " and all turns of a session have the same values; send these values, or use another session",
            param="temperature",
        )
