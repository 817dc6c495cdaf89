"""Standard streams that outlast their readers; imports nothing, as grading workers import it."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any

_GONE = {errno.EPIPE, errno.EIO, errno.ENXIO}  # a pipe that nobody reads any more, a terminal that was closed


class _Lasting:
    """A standard stream that outlasts its reader: what is written after that is lost, and the program continues."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._outlasting():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._outlasting():
            self._stream.flush()

    @contextlib.contextmanager
    def _outlasting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _GONE:
                raise
            # Programs that are started later, and the end of this one, write there as well.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def outlast_readers() -> None:
    """Lets the program continue when nobody reads its standard output or error any more, as after `| head`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before the program began
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        setattr(sys, name, stream if isinstance(stream, _Lasting) else _Lasting(stream))
