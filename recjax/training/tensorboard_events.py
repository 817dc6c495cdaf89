"""Writes scalars and texts to TensorBoard files, in the caller's thread.

The SummaryWriter of tensorboardX writes in its own thread: a full disk ends that thread, and the run hangs forever.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import text

from recjax.files import writing

FLUSH_SECONDS = 30.0


class TensorBoardEvents:
    """One file of scalars and texts by step, in a folder with the files of earlier parts of the run."""

    def __init__(self, folder: Path, first_step: int):
        """Creates the file; it invalidates the values of earlier files from step `first_step` on.

        Raises:
            ValueError: the file cannot be written.
        """
        self._folder, self._flushed = folder, time.monotonic()
        with writing(folder):
            folder.mkdir(exist_ok=True)
            self._file = EventsWriter(str(folder / "events"))
            begins = SessionLog(status=SessionLog.START)
            self._file.write_event(Event(step=first_step, wall_time=time.time(), session_log=begins))
            self._file.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds the scalars of a step.

        Raises:
            ValueError: the file cannot be written.
        """
        summary = Summary()
        for name, value in scalars.items():
            # `add`, not separate Value objects: after 10,000 of them protobuf returns free heap pages to the kernel.
            summary.value.add(tag=name, simple_value=value)
        self._add(step, summary)

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Adds a text of a step.

        Raises:
            ValueError: the file cannot be written.
        """
        self._add(step, text(name, markdown))

    def _add(self, step: int, summary: Summary) -> None:
        with writing(self._folder):
            self._file.write_event(Event(step=step, wall_time=time.time(), summary=summary))
            if time.monotonic() > self._flushed + FLUSH_SECONDS:
                self._file.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        """Writes buffered events and closes the file.

        Raises:
            ValueError: the file cannot be written.
        """
        with writing(self._folder):
            self._file.close()
