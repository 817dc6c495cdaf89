"""What a command shows while it works: the package's own messages, and bars of progress."""

import contextlib
import errno
import functools
import io
import logging
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import absl.logging
from absl import flags
from tqdm import tqdm

from recjax.streams import outlast_readers

logger = logging.getLogger(__name__)
flags.disclaim_key_flags()  # those that are defined here belong to the command that asks for them, and to its --help

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # no room on the disk, in a user's share of it, or in a file
_BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_LEAST_BAR = 10  # characters of a bar that fields leave to it
_LONGEST = 10  # characters of a bar's first words, so that 80 columns have room for two fields
LINE_SECONDS = 10.0  # between two lines of a bar that is not shown on a terminal


def command(main: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """A command's main whose user errors are one line and status 1; Ctrl-C is 130.

    User errors are ValueErrors, and files and folders that cannot be read or written.

    With --verbosity=1 the line stands below the traceback.
    """

    @functools.wraps(main)
    def run(argv: list[str]) -> None:
        configure_logging()
        try:
            main(argv)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from what is on disk", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        except ValueError as error:
            _end(str(error))
        except OSError as error:
            if error.errno in FULL:
                place = error.filename or "a file"
                _end(f"{place} cannot be written ({error.strerror}); make room, and the same command goes on")
            if error.filename is None:
                raise
            _end(f"{error.filename}: {error.strerror or error}; name another place, or give the right to use this one")

    return run


def define_process_flags() -> None:
    """The flags by which several processes that get the same command find each other; see docs/devices.md."""
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, where several processes work together.")
    flags.DEFINE_integer("processes", None, "How many there are; left out, as the others: as the environment says.")
    flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.")


def plain_console(**options: Any) -> "rich.console.Console":
    """A console of rich that prints text as it is: brackets are no markup, and `:name:` is no emoji.

    Args:
        options: of rich's Console.
    """
    from rich.console import Console  # not at the top: graders' processes import this file, and print no tables

    return Console(markup=False, emoji=False, **options)


def _end(message: str) -> NoReturn:
    """Ends the command with status 1; the message is the last that it says, whatever threads of libraries still do."""
    logging.getLogger("recjax").debug("", exc_info=True)
    logging.disable()
    sys.exit(f"error: {message}")


def _unraisable(raised: "sys.UnraisableHookArgs") -> None:
    """The hook of errors that Python cannot raise: one in a thread of a library's C++ code is shown at DEBUG alone."""
    if threading.current_thread() is threading.main_thread():
        sys.__unraisablehook__(raised)
    else:
        logging.getLogger("recjax").debug("in a library's thread: %r", raised.exc_value)


def configure_logging() -> None:
    """Shows the package's messages as plain lines on standard error.

    Of libraries it lets warnings through, or what --verbosity asks for: 0 is INFO, 1 is DEBUG.
    """
    if not flags.FLAGS["verbosity"].present:
        absl.logging.set_verbosity(absl.logging.WARNING)
    package = logging.getLogger("recjax")
    package.handlers[:] = [_OwnMessages()]
    package.setLevel(min(logging.INFO, logging.getLogger().level))
    package.propagate = False  # absl's handler would show them a second time, with its prefix
    sys.unraisablehook = _unraisable
    outlast_readers()
    sys.stdout.reconfigure(line_buffering=True)  # in a log file it keeps its place among the lines of standard error


class _OwnMessages(logging.Handler):
    """Writes each message above the bar of a terminal; what is above INFO begins with its level."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one message."""
        prefix = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        tqdm.write(prefix + self.format(record), file=sys.stderr)


@contextlib.contextmanager
def under_way(what: str, shown: bool = True) -> Iterator[None]:
    """Says what goes on, for work that shows nothing else meanwhile, and how long it took where that was seconds.

    Args:
        what: such as "evaluating the initial policy: 64 problems".
        shown: False says nothing.
    """
    started = time.monotonic()
    if shown:
        logger.info("%s …", what)
    yield
    if shown and (seconds := time.monotonic() - started) >= 1:
        logger.info("%s: %.0f s", what, seconds)


def progress_bar(description: str, total: int, initial: int = 0, *, unit: str, shown: bool = True) -> tqdm:
    """A bar on standard error; where that is no terminal, a line about every ten seconds and one at the end.

    Args:
        description: what goes on, as the bar's first words.
        total: of how many units.
        initial: units that are done already.
        unit: what is counted, in the singular.
        shown: False for a bar that takes everything and shows nothing.
    """
    state = "{desc}: {unit} {n_fmt}/{total_fmt}, {elapsed_s:.0f} s{postfix}"
    lines = {"file": _Lines(), "bar_format": state, "mininterval": LINE_SECONDS, "miniters": 1}
    options = {"desc": description, "total": total, "initial": initial, "unit": unit, "disable": not shown}
    if not sys.stderr.isatty():
        return tqdm(**options, **lines)
    short = description if len(description) <= _LONGEST else f"{description[: _LONGEST - 1]}…"
    return _Bar(**options | {"desc": short}, mininterval=0.2, bar_format=_BAR)


class _Bar(tqdm):
    """A bar on a terminal, with as many fields as leave it some room.

    The time left is an estimate from the second unit on, as the first one compiles.
    """

    _began: tuple[int, float] | None = None  # units, and the time, when the first one was done

    def update(self, n: int = 1) -> bool | None:
        """Counts n units."""
        if not self.disable:
            self._began = self._began or (self.n + n, self._time())
        return super().update(n)

    @property
    def format_dict(self) -> dict[str, Any]:
        """What the bar's format is filled in with."""
        found = super().format_dict
        units, since = self._began or (self.n, self._time())
        found["rate"] = (self.n - units) / max(self._time() - since, 1e-9)
        columns = found["ncols"] or shutil.get_terminal_size().columns
        fields = (self.postfix or "").split(", ")
        room = columns - len(self.desc) - 2 * len(f"{self.total}") - _LEAST_BAR - len(" 100%|| / [00:00<00:00, ]")
        while fields and len(", ".join(fields)) > room:
            fields.pop()
        return found | {"postfix": ", ".join(fields)}


class _Lines(io.TextIOBase):
    """A file for tqdm that makes a line of each state of a bar, which tqdm would write over the one before."""

    _last = ""

    def write(self, text: str) -> None:
        """Writes a state to standard error, without what tqdm adds to overwrite it or to end it."""
        state = text.strip()
        if state and state != self._last:  # the end of a bar may be its last step, which has its line
            print(state, file=sys.stderr, flush=True)
            self._last = state
