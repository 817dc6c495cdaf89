"""The ledger of a store: size and checksum of every part file, to detect lost and damaged parts.

A writer enters a part in the ledger before it writes the part, and confirms the entry afterwards. A writer that is
killed in between leaves an entry with the states before and after; the part is in either state.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recjax.files import read_sealed, size_and_digest, sync_folder, write_sealed

NAME = ".manifest.json"

State = list[Any] | None  # size and checksum of a part; None: the part does not exist
Ledger = dict[str, list[State]]  # a part's name → its possible states

logger = logging.getLogger(__name__)


def read_ledger(folder: Path) -> Ledger | None:
    """Reads a store's ledger; None if the store has none, for example because only its parts were copied.

    Raises:
        ValueError: the ledger is damaged.
    """
    path = folder / NAME
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _read(path, status.st_ino, status.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read(path: Path, inode: int, modified: int) -> Ledger:
    # Cached, because recjax looks up every part of a store in the ledger.
    try:
        return read_sealed(path)
    except ValueError as error:
        raise ValueError(f"{error}; restore it from a backup, or {_accept(path.parent)}") from error


def check_none_lost(folder: Path) -> None:
    """Raises an error if a part of the store is missing.

    Raises:
        ValueError: a part is missing; the message names it.
    """
    for name, states in (read_ledger(folder) or {}).items():
        if None not in states and not (folder / name).exists():
            raise ValueError(
                f"{folder / name} is missing, a part of the store; restore it from a backup, or {_accept(folder)}"
            )


def check_part(part: Path) -> None:
    """Raises an error if a part has changed since it was written; only warns if the ledger does not list the part.

    Raises:
        ValueError: the part is damaged.
    """
    ledger = read_ledger(part.parent)
    if ledger is None:
        _warn_once(f"{part.parent} has no checksums ({NAME} is missing), so recjax cannot detect damage in it")
    elif part.name not in ledger:
        _warn_once(f"{part} has no checksum in {NAME}, so recjax cannot detect damage in it")
    elif (found := size_and_digest(part)) not in ledger[part.name]:
        # A writer may have replaced the part after the ledger was read.
        if found not in (read_ledger(part.parent) or {}).get(part.name, [found]):
            raise ValueError(
                f"{part} is damaged: its checksum has changed since it was written; restore it from a backup or, if you"
                f" changed it on purpose, {_accept(part.parent)}"
            )


@contextlib.contextmanager
def entered(part: Path, state: State) -> Iterator[None]:
    """Updates the ledger around a block that writes or deletes a part; the caller holds the store's lock.

    A store without a ledger gets one, with the current state of its parts.

    Args:
        state: state of the part after the block; None if the block deletes the part.
    """
    folder = part.parent
    ledger = read_ledger(folder)
    if ledger is None:
        ledger = {known.name: [size_and_digest(known)] for known in folder.glob("part-*.parquet")}
    before = ledger.get(part.name, [None])
    write_sealed(folder / NAME, ledger | {part.name: [*before, state]})
    sync_folder(folder)
    yield
    after = {name: states for name, states in (ledger | {part.name: [state]}).items() if states != [None]}
    write_sealed(folder / NAME, after)


def settled(folder: Path) -> None:
    """Confirms the entries that a killed writer left unconfirmed; the caller holds the store's lock."""
    ledger = read_ledger(folder)
    if ledger is None or all(len(states) == 1 for states in ledger.values()):
        return
    for name, states in ledger.items():
        if len(states) > 1:
            part = folder / name
            found = size_and_digest(part) if part.exists() else None
            if found in states:
                ledger = ledger | {name: [found]}
    write_sealed(folder / NAME, {name: states for name, states in ledger.items() if states != [None]})


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _accept(folder: Path) -> str:
    return f"delete {folder / NAME} to accept the store's current files"
