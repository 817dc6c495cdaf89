"""Locks a run folder for one process, or one group of processes; `running.json` names the holder."""

import contextlib
import fcntl
import json
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from recjax import hosts
from recjax.files import writing

NAME = "running.json"
BEAT_SECONDS = 10.0  # interval between signs of life
STALE_SECONDS = 60.0  # without a sign of life for this long, a holder on another host counts as dead

logger = logging.getLogger(__name__)


class Holder(NamedTuple):
    """The process that holds a run folder."""

    host: str
    pid: int
    since: str

    def __str__(self) -> str:
        """The holder in words, for messages."""
        return f"process {self.pid} on host {self.host}, since {self.since}"


class RunLock:
    """The lock of a run folder; the first process holds it for all processes."""

    def __init__(self, output: Path, descriptor: int | None, holder: Holder | None):
        """Takes over an open and locked file; `descriptor` and `holder` are None in all processes but the first."""
        self._path, self._descriptor, self._holder = output / NAME, descriptor, holder

    def check(self) -> None:
        """Checks that the folder still exists and that this process still holds it.

        Raises:
            ValueError: the folder was deleted, or another process took it over.
        """
        if self._descriptor is None:
            return
        output = str(self._path.parent)
        try:
            is_ours = self._path.stat().st_ino == os.fstat(self._descriptor).st_ino
        except OSError as error:
            raise ValueError(
                f"output = {output!r}: the folder, or {NAME} in it, was deleted during the run ({error.strerror}); the"
                " run ends and writes nothing more. The same command continues from the remaining files"
            ) from error
        found = _read(self._descriptor)
        if not is_ours or found != self._holder:
            raise ValueError(
                f"output = {output!r}: another process has taken over the folder ({found or 'it left no name'}); this"
                " process ends and leaves the files of the other process alone"
            )


@contextlib.contextmanager
def held(output: Path) -> Iterator[RunLock]:
    """Holds a run folder for the duration of the block; creates the folder if it does not exist.

    The operating system releases the lock (`flock`) when the process ends, for any reason. If hosts share the folder
    but not the lock, the modification time of the file, which the holder updates, shows if the holder is alive.

    Raises:
        ValueError: another process holds the folder, or the folder cannot be created or written.
    """
    made, lock, refused = not output.exists(), RunLock(output, None, None), None
    if hosts.is_first():
        try:
            lock = _taken(output)
        except ValueError as error:
            refused = error
    if hosts.any_says(refused is not None):
        raise refused or ValueError(f"output = {str(output)!r}: see the log of process 0")
    if lock._descriptor is None:
        yield lock
        return
    ended = threading.Event()

    def show_life() -> None:
        while not ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(lock._descriptor)

    beats = threading.Thread(target=show_life, name="sign of life", daemon=True)
    beats.start()
    try:
        yield lock
    finally:
        ended.set()
        beats.join()
        with contextlib.suppress(OSError, ValueError):
            lock.check()
            lock._path.unlink()
        os.close(lock._descriptor)
        if made:
            with contextlib.suppress(OSError):  # the folder has a run
                output.rmdir()


def _taken(output: Path) -> RunLock:
    path = output / NAME
    with writing(f"output = {str(output)!r}: {path}"):
        output.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            locked = _lock(descriptor)
            # The previous holder may have removed the file between the two calls.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    break
            os.close(descriptor)
    try:
        found = _read(descriptor)
        if _is_alive(found, locked, output, descriptor):
            raise ValueError(
                f"output = {str(output)!r} is in use: {found or 'another process'} is writing a run there; wait for it,"
                f" stop it, or give another output=…. If you are sure that it is dead, delete {path}"
            )
        if found:
            logger.info("%s: took over the lock of %s, which has died", path, found)
        holder = Holder(socket.gethostname(), os.getpid(), datetime.now(UTC).isoformat(timespec="seconds"))
        with writing(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder._asdict()).encode(), 0)
            os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return RunLock(output, descriptor, holder)


def _lock(descriptor: int) -> bool | None:
    """Locks the file: True on success, False if another process has the lock, None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _is_alive(holder: Holder | None, locked: bool | None, output: Path, descriptor: int) -> bool:
    """True if another process holds the folder."""
    if locked is False:
        return True
    if holder is None:
        return False
    if holder.host != socket.gethostname():
        # Both times come from the file system, so this host's clock does not matter.
        with tempfile.TemporaryFile(dir=output) as now:
            return os.fstat(now.fileno()).st_mtime - os.fstat(descriptor).st_mtime < STALE_SECONDS
    if locked or holder.pid == os.getpid():
        return False
    try:
        os.kill(holder.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _read(descriptor: int) -> Holder | None:
    """The holder that the file names; None if it names no holder."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        return Holder(str(found["host"]), int(found["pid"]), str(found["since"]))
    except (ValueError, KeyError, TypeError, OSError):
        return None
