"""Locks a run folder for one process, or one group of processes; `running.json` names the holder."""

import contextlib
import errno
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import filelock

from recjax.errors import UserError
from recjax.runtime import hosts
from recjax.runtime.files import writing

NAME = "running.json"
BEAT_SECONDS = 10.0  # interval between signs of life
STALE_SECONDS = 60.0  # without a sign of life for this long, a holder whose lock cannot be seen counts as dead
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # File systems without locks raise these errors.

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

    def __init__(self, path: Path, holder: Holder | None):
        """Names the locked file and its holder; the holder is None in all processes but the first."""
        self._path = path
        self._holder = holder

    def check(self) -> None:
        """Checks that the folder still exists and that this process still holds it.

        Raises:
            UserError: the folder was deleted, or another process took it over.
        """
        if self._holder is None:
            return
        output = str(self._path.parent)
        try:
            holder = _holder_at(self._path)
        except OSError as error:
            raise UserError(
                "output",
                f"the folder, or {NAME} in it, was deleted during the run ({error.strerror})",
                "the run ends and writes nothing more. The same command continues from the remaining files",
                value=output,
            ) from error
        if holder != self._holder:
            raise UserError(
                "output",
                f"another process has taken over the folder ({holder or 'it left no name'})",
                "this process ends and leaves the files of the other process alone",
                value=output,
            )


@contextlib.contextmanager
def held(output: Path) -> Iterator[RunLock]:
    """Holds a run folder for the duration of the block; creates the folder if it does not exist.

    The operating system releases the lock (`flock`) when the process ends, for any reason. On file systems whose locks
    other hosts do not see, the modification time of the file, which the holder updates, shows if the holder is alive.

    Raises:
        UserError: another process holds the folder, or the folder cannot be created or written.
    """
    lock = RunLock(output / NAME, None)
    refused = None
    with contextlib.ExitStack() as stack:
        if hosts.is_first():
            try:
                lock = stack.enter_context(_held_by_first(output))
            except UserError as error:
                refused = error
        if hosts.any_says(refused is not None):
            raise refused or UserError("output", "see the log of process 0", value=str(output))
        yield lock


@contextlib.contextmanager
def _held_by_first(output: Path) -> Iterator[RunLock]:
    made = not output.exists()
    path = output / NAME
    ended = threading.Event()
    with contextlib.ExitStack() as stack:
        with writing(f"output = {str(output)!r}: {path}"):
            output.mkdir(parents=True, exist_ok=True)
            locked = _locked(path, stack)
            holder = None
            for _ in range(20):
                with contextlib.suppress(FileNotFoundError):  # another holder may end right now
                    holder = _holder_at(path)
                if holder or locked is not False:
                    break
                time.sleep(0.05)  # a holder that has just begun writes its name after it has the lock
        # If this process holds the lock, all earlier holders on this host are dead. A holder on another host has shown
        # life if the file is new; both times come from the file system, so this host's clock does not matter.
        is_alive = locked is False
        if not is_alive and holder and not (locked and holder.host == socket.gethostname()):
            with tempfile.TemporaryFile(dir=output) as now:
                is_alive = os.fstat(now.fileno()).st_mtime - path.stat().st_mtime < STALE_SECONDS
        if is_alive:
            raise UserError(
                "output",
                f"is in use: {holder or 'another process'} is writing a run there",
                f"wait for it, stop it, or give another output=…. If you are sure that it is dead, delete {path}",
                str(output),
            )
        if holder:
            logger.info("%s: took over the lock of %s, which has died", path, holder)
        holder = Holder(socket.gethostname(), os.getpid(), datetime.now(UTC).isoformat(timespec="seconds"))
        with writing(path), path.open("w", encoding="utf-8") as file:
            file.write(json.dumps(holder._asdict()))
            file.flush()
            os.fsync(file.fileno())
        lock = RunLock(path, holder)

        def show_life() -> None:
            while not ended.wait(BEAT_SECONDS):
                with contextlib.suppress(OSError, ValueError):
                    lock.check()
                    os.utime(path)

        beats = threading.Thread(target=show_life, name="sign of life", daemon=True)
        beats.start()
        try:
            yield lock
        finally:
            ended.set()
            beats.join()
            with contextlib.suppress(OSError, ValueError):
                lock.check()
                path.unlink()
                if made:
                    output.rmdir()  # fails if the folder has a run


def is_alive(output: Path) -> bool:
    """True if a process is writing a run in the folder, by the file that names it; takes no lock.

    A holder that was killed on another host counts as alive until STALE_SECONDS after its last sign of life.
    """
    path = output / NAME
    try:
        holder = _holder_at(path)
        quiet_seconds = time.time() - path.stat().st_mtime
    except OSError:
        return False
    if holder is None or quiet_seconds > STALE_SECONDS:
        return False
    return holder.host != socket.gethostname() or Path(f"/proc/{holder.pid}").exists()


def _locked(path: Path, stack: contextlib.ExitStack) -> bool | None:
    """Locks a file until the stack closes; False if another process has the lock, None if there are no locks there."""
    # A lock file without `flock` would stay after a kill on another host, so filelock may not use it instead.
    lock = filelock.FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        stack.enter_context(lock)
    except filelock.Timeout:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _holder_at(path: Path) -> Holder | None:
    """The process that the file names; None if it names none."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        return Holder(str(entry["host"]), int(entry["pid"]), str(entry["since"]))
    except (ValueError, KeyError, TypeError):
        return None
