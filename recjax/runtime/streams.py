"""Standard streams that outlast their readers. Imports only the standard library, for the grading workers."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any

_GONE = {errno.EPIPE, errno.EIO, errno.ENXIO}  # closed pipes and terminals


class _Lasting:
    """A standard stream that outlasts its reader: later output is lost, and the program continues."""

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
            # Child processes and the interpreter's shutdown also write to this descriptor.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def outlast_readers() -> None:
    """Lets the program continue after the reader of standard output or error is gone, as with `| head`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before the program started
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        setattr(sys, name, stream if isinstance(stream, _Lasting) else _Lasting(stream))
