"""An append-only file whose entries are on disk before any client hears of them.

Each line is an entry: a checksum and the entry's JSON. Entries that arrive during a sync to disk are written together
in the next one. A writer killed at any time leaves at most an incomplete last line, which counts as not written.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from recjax.files import digest, sync_folder, write_whole

logger = logging.getLogger(__name__)


class _Entry(NamedTuple):
    line: bytes
    apply: Callable[[bytes], None]
    done: asyncio.Future


class Journal:
    """A journal for one process and one event loop; only `read` may run outside the loop."""

    def __init__(self, path: Path):
        """Takes the file, which need not exist."""
        self._path, self._entries = path, []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._writing: asyncio.Task | None = None
        self._kept: Callable[[], Iterable[bytes]] | None = None
        self.size = path.stat().st_size if path.exists() else 0

    def read(self) -> list[tuple[bytes, dict[str, Any]]]:
        """Returns the lines and their entries, and removes an incomplete last line.

        Raises:
            ValueError: any other line is damaged.
        """
        content = self._path.read_bytes() if self._path.exists() else b""
        lines = content.splitlines(keepends=True)
        found = []
        for number, line in enumerate(lines, 1):
            checksum, _, said = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or digest(said).encode() != checksum:
                if number < len(lines):
                    raise ValueError(
                        f"{self._path}: line {number} is damaged; restore the file from a backup, or remove it and lose"
                        " the completions and rewards that are not in the store yet"
                    )
                logger.warning("%s: removed an incomplete last line, which no client relies on", self._path)
                self.size -= len(line)
                os.truncate(self._path, self.size)
            else:
                found.append((line, json.loads(said)))
        return found

    async def add(self, entry: dict[str, Any], apply: Callable[[bytes], None]) -> None:
        """Writes an entry; returns when it is on disk and applied.

        Args:
            apply: function that gets the line as soon as it is on disk, in the order of the lines.
        Raises:
            OSError: the entry could not be written, and is not in the file.
        """
        said = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass")
        future = asyncio.get_running_loop().create_future()
        self._entries.append(_Entry(line_of(said), apply, future))
        self._wake()
        await asyncio.shield(future)

    def rewrite(self, kept: Callable[[], Iterable[bytes]]) -> None:
        """Schedules a rewrite of the file with the lines that `kept` returns when the rewrite starts."""
        self._kept = kept
        self._wake()

    async def close(self) -> None:
        """Waits for current writes, then ends."""
        while self._writing:
            await asyncio.wait([self._writing])
        self._thread.shutdown(wait=True)

    def _wake(self) -> None:
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._entries or self._kept:
                if self._kept:
                    kept, self._kept = b"".join(self._kept()), None
                    try:
                        await loop.run_in_executor(self._thread, write_whole, self._path, kept)
                        await loop.run_in_executor(self._thread, sync_folder, self._path.parent)
                        self.size = len(kept)
                    except ValueError as error:  # the old file is still valid
                        logger.warning("%s", error)
                entries, self._entries = self._entries, []
                error = None
                try:
                    await loop.run_in_executor(self._thread, self._append, b"".join(entry.line for entry in entries))
                except OSError as caught:
                    error = caught
                for entry in entries:
                    failure = error
                    try:
                        if failure is None:
                            entry.apply(entry.line)
                    except Exception as caught:  # fails only this entry's task; other entries continue
                        failure = caught
                    if not entry.done.done():
                        entry.done.set_result(None) if failure is None else entry.done.set_exception(failure)
        finally:
            self._writing = None

    # --- In the journal's thread.

    def _append(self, content: bytes) -> None:
        if not content:
            return
        is_new = not self._path.exists()
        with self._path.open("ab") as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self._path, self.size)  # half a line would damage the next entry
                raise
        if is_new:
            sync_folder(self._path.parent)
        self.size += len(content)


def line_of(said: bytes) -> bytes:
    """The journal's line for an entry."""
    return digest(said).encode() + b" " + said + b"\n"
