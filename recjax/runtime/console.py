"""Console output of commands: log messages, errors and progress bars."""

import contextlib
import errno
import functools
import io
import logging
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, cast

import absl.logging
from absl import app, flags
from tqdm import tqdm

from recjax.errors import UserError
from recjax.runtime.memory import freeze_imports
from recjax.runtime.streams import outlast_readers

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)
flags.disclaim_key_flags()  # these flags belong to the command that defines them, also in --help

FAULT = "this is a fault of recjax; please report it with the traceback"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # disk full, quota exceeded, file too large
_BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_LEAST_BAR = 10  # characters of a bar that its fields must leave free
_LONGEST = 10  # with so many characters of a bar's description, 80 columns still show two fields
LINE_SECONDS = 10.0  # a bar without a terminal writes lines at this interval


def command(main: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """Decorates a command's main: a user error prints one line and exits with status 1, Ctrl-C exits with status 130.

    User errors are UserErrors, and OSErrors for files and folders that cannot be read or written. With --verbosity=1
    the traceback precedes the line. Any other exception ends the command with a traceback, and FAULT as the last line.
    """

    @functools.wraps(main)
    def run(argv: list[str]) -> None:
        configure_logging()
        try:
            main(argv)
        except KeyboardInterrupt:
            print("interrupted; the same command resumes from the files on disk", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        except UserError as error:
            _end(str(error))
        except (MemoryError, BrokenPipeError):
            raise
        except OSError as error:
            if error.errno in FULL:
                file = error.filename or "a file"
                _end(f"{file} cannot be written ({error.strerror}); free space, then give the same command to resume")
            if error.filename is None:
                _raise_as_fault(error)
            _end(f"{error.filename}: {error.strerror or error}; name another path, or allow access to this one")
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):  # a device has no memory left
                raise
            _raise_as_fault(error)

    return run


def start(main: Callable[[list[str]], None]) -> None:
    """Parses the flags and runs a command's main. A request for help exits with 0, which absl ends with 1.

    absl's flags are global, so a command defines its flags only when it runs as a program. A wrong flag is an error of
    one line with the command's usage, the first one in the docstring of its module.
    """

    def parsed(argv: list[str]) -> list[str]:
        try:
            return flags.FLAGS(argv)
        except flags.Error as error:
            lines = str(sys.modules[main.__module__].__doc__).splitlines()
            usage = next((line.strip() for line in lines if "python -m" in line), shlex.join(sys.orig_argv[:3]))
            missing = re.match(r"flag --(\w+)=None", str(error))
            problem = f"--{missing[1]} is missing" if missing else str(error).rstrip(".")
            _end(f"{problem}; the command is {usage}; --help shows all flags")

    freeze_imports()
    try:
        app.run(main, flags_parser=parsed)
    except SystemExit as end:
        if end.code == 1 and {"--help", "-help", "-h", "--helpshort", "--helpfull"}.intersection(sys.argv[1:]):
            sys.exit(0)
        raise


def define_process_flags() -> None:
    """Defines the flags with which several processes of one command find each other; see docs/devices.md."""
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, for several processes.")
    flags.DEFINE_integer("processes", None, "Number of processes; default for all three flags: from the environment.")
    flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")


def plain_console(**options: Any) -> "Console":
    """A rich console that prints text verbatim, without markup in brackets and without `:name:` emoji.

    Args:
        options: arguments of rich's Console.
    """
    from rich.console import Console  # not at module level: grader processes import this file and need no tables

    return Console(markup=False, emoji=False, **options)


def _raise_as_fault(error: Exception) -> NoReturn:
    """Raises an error with FAULT as the last line after its traceback; disables logging like `_end`."""
    logging.disable()
    error.add_note(FAULT)
    raise error


def _end(message: str) -> NoReturn:
    """Ends the command with status 1; disables logging, so no library thread writes after the message."""
    logging.getLogger("recjax").debug("", exc_info=True)
    logging.disable()
    sys.exit(f"error: {message}")


def configure_logging() -> None:
    """Shows the package's messages as plain lines on standard error.

    Libraries show only warnings, unless --verbosity sets another level: 0 is INFO, 1 is DEBUG.
    """
    if not flags.FLAGS["verbosity"].present:
        absl.logging.set_verbosity(absl.logging.WARNING)
    package = logging.getLogger("recjax")
    package.handlers[:] = [_OwnMessages()]
    package.setLevel(min(logging.INFO, logging.getLogger().level))
    package.propagate = False  # absl's handler would print each message again, with its prefix

    def unraisable(raised: "sys.UnraisableHookArgs") -> None:
        """Logs errors that Python cannot raise; errors in a library's thread only at DEBUG level."""
        if threading.current_thread() is threading.main_thread():
            sys.__unraisablehook__(raised)
        else:
            package.debug("in a library's thread: %r", raised.exc_value)

    sys.unraisablehook = unraisable
    outlast_readers()
    # Keeps the order of standard output and standard error in a log file.
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)


def show_messages() -> None:
    """Shows the package's messages as a command does, unless the program has set up logging."""
    package = logging.getLogger("recjax")
    if not package.handlers and not logging.getLogger().handlers:
        package.addHandler(_OwnMessages())
        package.setLevel(logging.INFO)
        package.propagate = False


class _OwnMessages(logging.Handler):
    """Writes messages above the progress bar of a terminal; messages above INFO begin with their level."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one message."""
        prefix = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        tqdm.write(prefix + self.format(record), file=sys.stderr)


@contextlib.contextmanager
def under_way(what: str, shown: bool = True) -> Iterator[None]:
    """Logs the start of work that has no progress bar, and its duration if it takes a second or more.

    Args:
        what: description of the work, such as "evaluating the initial policy: 64 problems".
        shown: False disables the messages.
    """
    start = time.monotonic()
    if shown:
        logger.info("%s …", what)
    yield
    seconds = time.monotonic() - start
    if shown and seconds >= 1:
        logger.info("%s: %.0f s", what, seconds)


def progress_bar(description: str, total: int, initial: int = 0, *, unit: str, shown: bool = True) -> tqdm:
    """A progress bar on standard error; without a terminal, a line about every ten seconds and one at the end.

    Args:
        description: first words of the bar.
        total: number of units.
        initial: number of finished units.
        unit: name of a unit, in the singular.
        shown: False hides the bar.
    """
    options: dict[str, Any] = {"total": total, "initial": initial, "unit": unit, "disable": not shown}
    if not sys.stderr.isatty():
        return tqdm(
            desc=description,
            file=_Lines(),
            bar_format="{desc}: {unit} {n_fmt}/{total_fmt}, {elapsed_s:.0f} s{postfix}",
            mininterval=LINE_SECONDS,
            miniters=1,
            **options,
        )
    if len(description) > _LONGEST:
        description = f"{description[: _LONGEST - 1]}…"
    return _Bar(desc=description, mininterval=0.2, bar_format=_BAR, **options)


class _Bar(tqdm):
    """A bar on a terminal, which drops fields that do not fit next to it.

    The estimate of the remaining time ignores the first unit, because that one includes compilation.
    """

    _first_update: tuple[float, float] | None = None  # it has the finished units and the time
    if TYPE_CHECKING:
        _time: Callable[[], float]

    def update(self, n: float | None = 1) -> bool | None:
        """Adds n units."""
        if not self.disable and self._first_update is None:
            self._first_update = (self.n + (n or 0), self._time())
        return super().update(n)

    @property
    def format_dict(self) -> dict[str, Any]:
        """Values for the bar's format: tqdm's, with recjax's rate and only the fields that fit."""
        values: dict[str, Any] = dict(super().format_dict)
        units, since = self._first_update or (self.n, self._time())
        values["rate"] = (self.n - units) / max(self._time() - since, 1e-9)
        columns = values["ncols"] or shutil.get_terminal_size().columns
        numbers = 2 * len(f"{self.total}") + len(" 100%|| / [00:00<00:00, ]")
        capacity = columns - len(self.desc) - numbers - _LEAST_BAR
        fields = (self.postfix or "").split(", ")
        while fields and len(", ".join(fields)) > capacity:
            fields.pop()
        values["postfix"] = ", ".join(fields)
        return values


class _Lines(io.TextIOBase):
    """A file for tqdm that prints each state of a bar on its own line; tqdm would overwrite the previous state."""

    _last = ""

    def write(self, text: str, /) -> Any:
        """Writes a state to standard error, without tqdm's carriage returns and line ends."""
        state = text.strip()
        if state and state != self._last:  # the final state may equal the last step, which already has a line
            print(state, file=sys.stderr, flush=True)
            self._last = state
