"""The server's record in memory: completions, and the reward of each row, as the journal's entries define them."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from recjax.experience import store
from recjax.experience.tokenize import tokenizer_name
from recjax.serving.refusals import Refused
from recjax.serving.served import Feedback, Served
from recjax.serving.units import Session, StoreUnit, feedback_of, session_row


class Book:
    """Units that wait, the feedback on every row, and feedback that the store does not have yet.

    Attributes:
        units: waiting units by name.
        stored: feedback on each row of the store; None: no feedback yet.
        late: feedback on stored rows that is only in the journal, with its line. The row may have another reward in the
            store, or be deleted.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, prompts: bool, sessions: int):
        """Reads the store.

        Args:
            prompts: True if rows include prompts.
            sessions: most sessions that may be active together.
        Raises:
            ValueError: the store is damaged.
        """
        self._tokenizer, self.tokenizer_name = tokenizer, tokenizer_name(tokenizer)
        self._prompts, self._sessions = prompts, sessions
        self.units: dict[str, StoreUnit] = {}
        self._unit_of: dict[str, StoreUnit] = {}  # by ids of rows that take feedback
        self._turns: dict[str, str] = {}  # names of sessions by reply
        self._growing: Counter[str] = Counter()  # for each session's unit, the number of turns being written
        self._folder, self._read = folder, {}  # inode and time of each part that was read
        self.stored = self.new_in_store()
        self.late: dict[str, tuple[Feedback, bytes]] = {}

    # --- The store, which other programs may also write.

    def new_in_store(self) -> dict[str, Feedback | None]:
        """The feedback on each row of parts written since the last call.

        Raises:
            ValueError: a part is damaged.
            OSError: a part is deleted during the call.
        """
        found = {}
        for part in store.part_files(self._folder):
            status = part.stat()
            state = status.st_ino, status.st_mtime_ns
            if self._read.get(part) != state:
                rows = store.to_rows(store.read_part(part))
                found |= {row.id: feedback_of(row) for row in rows if row.trajectory in (None, row.id)}
                self._read[part] = state
        return found

    def take_in(self, found: dict[str, Feedback | None]) -> None:
        """Takes over rewards of known rows that `new_in_store` found."""
        self.stored |= {row: given for row, given in found.items() if given is not None and row in self.stored}

    def is_stored(self, row: str) -> bool:
        """True if a row is in the store, where other programs may also reward it."""
        return row in self.stored and row not in self._unit_of

    # --- Queries.

    def session(self, name: str) -> Session:
        """An active session, or a new one, which is kept once its first turn is recorded.

        Raises:
            Refused: the session is over, or there are too many sessions.
        """
        row = session_row(name)
        unit = self.units.get(row)
        if row in self.stored or (unit and unit.given):
            raise Refused(
                409,
                f"session {name!r} is over: it has its reward, waited too long for one, or the server has stopped"
                " since; use another id",
                code="session_over",
            )
        if unit is None:
            if sum(isinstance(one, Session) for one in self.units.values()) >= self._sessions:
                raise Refused(429, f"{self._sessions} sessions are active; reward one, or try again later")
            return Session(name, self._prompts, self._tokenizer)
        return unit

    def row_of(self, reply: str, index: int | None) -> str:
        """The id of the row that feedback on a reply belongs to.

        Raises:
            Refused: the reply is a turn of a session, or it has several choices and `index` is missing.
        """
        if reply in self._turns:
            where = f"POST /sessions/{self._turns[reply]}/reward"
            raise Refused(409, f"{reply!r} is a turn of a session, which has a single reward; use {where}", param="id")
        if index is None and (f"{reply}/1" in self._unit_of or f"{reply}/1" in self.stored):
            raise Refused(400, f"{reply!r} has several choices; choose one with index", param="index")
        return f"{reply}/{index or 0}"

    def is_new(self, row: str, given: Feedback) -> bool:
        """True if a row has no reward yet; False if it already has exactly this reward.

        Raises:
            Refused: the row does not exist, or has another reward.
        """
        if row not in self._unit_of and row not in self.stored:
            raise Refused(404, f"id = {row!r}: unknown; give the id of a recorded reply", param="id")
        unit = self._unit_of.get(row)
        before = unit.given.get(row) if unit else self.stored[row]
        if before not in (None, given):
            raise Refused(
                409,
                f"{row!r} already has another reward, {before.reward:g}; rewards cannot change",
                code="reward_given",
            )
        return before is None

    def lines(self) -> Iterator[bytes]:
        """All journal lines with data that the store does not have."""
        lines = dict.fromkeys(line for unit in self.units.values() for line in unit.lines)
        yield from lines
        yield from (line for _, line in self.late.values())

    # --- Changes.

    @contextlib.contextmanager
    def growing(self, sessions: Sequence[str]) -> Iterator[None]:
        """A block in which turns of sessions are written; until it ends, these sessions are not moved to the store."""
        names = [session_row(name) for name in sessions]
        self._growing.update(names)
        try:
            yield
        finally:
            self._growing.subtract(names)
            self._growing += Counter()  # drops zero counts

    def add(self, line: bytes, served: Sequence[Served]) -> None:
        """Adds recorded completions."""
        for one in served:
            name = session_row(one.session) if one.session else one.id
            if name not in self.units:
                made = (
                    Session(one.session, self._prompts, self._tokenizer)
                    if one.session
                    else StoreUnit(name, self._prompts)
                )
                self.units[name] = made
            unit = self.units[name]
            unit.add(one)
            unit.lines.append(line)
            self._unit_of |= dict.fromkeys(unit.row_ids, unit)
            if one.session:
                self._turns[one.reply] = one.session

    def give(self, row: str, given: Feedback, line: bytes) -> None:
        """Gives a row its reward.

        Args:
            line: line of the journal; empty while it is being written.
        """
        if unit := self._unit_of.get(row):
            unit.given[row] = given
            unit.lines += [line] if line else []
        else:
            self.stored[row] = given
            # Otherwise the store has this reward, and a different one waits.
            if line and self.late.get(row, (given, b""))[0] == given:
                self.late[row] = given, line

    def take_back(self, row: str) -> None:
        """Removes a reward that could not be written."""
        if unit := self._unit_of.get(row):
            unit.given.pop(row, None)
        else:
            self.stored[row] = None

    def replay(self, line: bytes, entry: dict[str, Any]) -> None:
        """Applies an entry of the journal, except for data that the store has.

        Raises:
            ValueError: the entry belongs to another model.
        """
        if "feedback" in entry:
            row, given = entry["feedback"], Feedback(**entry["given"])
            if row in self._unit_of or self.stored.get(row, given) is None:
                self.give(row, given, line)
            elif self.stored.get(row) != given:  # the server has confirmed this reward to its client
                self.late[row] = given, line
            return
        served = [Served.from_json(one) for one in entry["served"]]
        if any(one.tokenizer != self.tokenizer_name for one in served):
            raise ValueError(
                "the journal has completions of another model's vocabulary; start the server with that model once, or"
                " give another folder with --record"
            )
        rows_of = [[session_row(one.session)] if one.session else one.rows for one in served]
        self.add(line, [one for one, rows in zip(served, rows_of, strict=True) if self.stored.keys().isdisjoint(rows)])

    # --- Moving units to the store.

    def take_due(self, seconds: float) -> list[StoreUnit]:
        """Removes and returns units that have all their rewards, or have not changed for `seconds`."""
        before = time.monotonic() - seconds
        still = [unit for unit in self.units.values() if not self._growing[unit.name]]
        due = [unit for unit in still if unit.is_rewarded or unit.changed <= before]
        for unit in due:
            del self.units[unit.name]
            for row in unit.row_ids:
                del self._unit_of[row]
                self.stored[row] = unit.given.get(row)
        return due

    def put_back(self, units: Sequence[StoreUnit]) -> None:
        """Restores units that could not be written, with the rewards that arrived during the attempt."""
        for unit in units:
            self.units[unit.name] = unit
            for row in unit.row_ids:
                self._unit_of[row] = unit
                given, (_, line) = self.stored.pop(row), self.late.pop(row, (None, b""))
                if given is not None:
                    self.give(row, given, line)

    def forget_turns(self, units: Sequence[StoreUnit]) -> None:
        """Forgets the turns of sessions that are over."""
        for served in (one for unit in units for one in unit.served):
            self._turns.pop(served.reply, None)
