"""Trackers in addition to the files of the run: TensorBoard, W&B, trackio, and any module with wandb's interface."""

import functools
import importlib
import inspect
import json
import logging
import queue
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from recjax.config import Config
from recjax.errors import UserError
from recjax.runtime import hosts
from recjax.runtime.files import write_whole

# tensorboardX imports torch if it can, and no setting prevents that: 2.4 s and 190 MiB in each run, also in a thread.
# None stands for a module that cannot be imported, only while tensorboardX is being imported.
_modules: dict[str, Any] = sys.modules
_hides_torch = _modules.setdefault("torch", None) is None
from tensorboardX.event_file_writer import EventsWriter  # noqa: E402
from tensorboardX.proto.event_pb2 import Event, SessionLog  # noqa: E402
from tensorboardX.proto.summary_pb2 import Summary  # noqa: E402
from tensorboardX.summary import text  # noqa: E402

if _hides_torch:
    del sys.modules["torch"]

logger = logging.getLogger(__name__)

NAME = "tracking.json"
MOST_WAITING = 10_000  # a tracker with more waiting rows gets no further rows
LAST_SECONDS = 60.0  # longest wait for a tracker at the end of a run
MOST_ROWS = 64  # completions of one table
MOST_TEXTS = 8  # completions of one text of TensorBoard
_LONG = {"prompt", "question", "completion"}
_ONE_AT_A_TIME = threading.Lock()  # the first tracker makes the id of the run for all trackers


def identity(output: Path) -> tuple[str, str]:
    """The id and name of a run in trackers; both stay when the run is resumed or its folder is moved.

    The first call stores them in tracking.json in the folder.

    Raises:
        UserError: tracking.json cannot be written.
    """
    path = output / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return str(content["id"]), str(content["name"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged (%s); trackers show this run as a new run", path, error)
    content = {"id": uuid.uuid4().hex, "name": output.resolve().name}
    write_whole(path, json.dumps(content, indent=2) + "\n")
    return content["id"], content["name"]


class Trackers:
    """A run's trackers. Each has its own thread, so that a slow or failing tracker cannot stop the run.

    Only the first process has trackers.
    """

    def __init__(self, config: Config):
        """Imports the modules; each thread starts its tracker when the first row arrives.

        Raises:
            UserError: a module is not installed.
        """
        self._boards = []
        self._modules = []
        if hosts.is_first():
            board = functools.partial(TensorBoard, Path(config.output) / "tensorboard")
            self._boards = [_Feed("TensorBoard", board)]
            for name, options in config.tracking.model_dump().items():
                if options is not None:
                    start = functools.partial(_ModuleRun, _module(name), config, options)
                    self._modules.append(_Feed(f"tracking.{name}", start))

    def log(self, row: Mapping[str, Any]) -> None:
        """Sends a row of metrics to the trackers, at the row's "step"; skips dictionaries in the row."""
        numbers = {name: value for name, value in row.items() if name != "step" and not isinstance(value, dict)}
        for feed in self._boards + self._modules:
            feed.put("log", numbers, row["step"])

    def log_text(self, name: str, markdown: str, step: int) -> None:
        """Sends a text to TensorBoard."""
        for feed in self._boards:
            feed.put("log_text", name, markdown, step)

    def log_samples(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Sends the first completions: a text to TensorBoard, and a table to modules that have the type `Table`.

        Args:
            rows: one for each completion, with `question`, `completion`, and numbers or short texts such as `reward`.
        """
        self.log_text(name, _as_markdown(rows[:MOST_TEXTS]), step)
        for feed in self._modules:
            feed.put("log_samples", name, rows[:MOST_ROWS], step)

    def log_figures(self, figures: Mapping[str, Path], step: int) -> None:
        """Sends figures to modules that have the type `Image`."""
        for feed in self._modules:
            feed.put("log_figures", figures, step)

    def close(self) -> None:
        """Ends each tracker once it has logged all its rows, or after LAST_SECONDS."""
        started = [feed for feed in self._boards + self._modules if feed.ident]
        for feed in started:
            feed.put("finish")
        for feed in started:
            feed.join(LAST_SECONDS)


class TensorBoard:
    """One file of scalars and texts by step, in a folder with the files of earlier parts of the run.

    It writes in the caller's thread. The SummaryWriter of tensorboardX has its own, which a full disk ends unnoticed.
    """

    def __init__(self, folder: Path):
        """Creates the file."""
        folder.mkdir(exist_ok=True)
        self._file = EventsWriter(str(folder / "events"))
        self._is_empty = True

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Adds a step's scalars."""
        summary = Summary()
        for name, value in numbers.items():
            # `add`, not separate Value objects: after 10,000 objects protobuf returns free heap pages to the kernel.
            summary.value.add(tag=name, simple_value=value)
        self._add(step, summary=summary)

    def log_text(self, name: str, markdown: str, step: int) -> None:
        """Adds a step's text."""
        self._add(step, summary=text(name, markdown))

    def _add(self, step: int, **event: Any) -> None:
        if self._is_empty:  # TensorBoard then ignores the earlier files' values from this step on
            self._is_empty = False
            self._add(step, session_log=SessionLog(status=SessionLog.START))
        self._file.write_event(Event(step=step, wall_time=time.time(), **event))
        self._file.flush()

    def finish(self) -> None:
        """Closes the file."""
        self._file.close()


class _ModuleRun:
    """A run in a tracker with wandb's interface."""

    def __init__(self, module: Any, config: Config, options: Mapping[str, Any]):
        with _ONE_AT_A_TIME:
            run_id, name = identity(Path(config.output))
        parameters = inspect.signature(module.init).parameters.values()
        if any(parameter.name == "id" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            run = {"id": run_id, "name": name}
        else:  # trackio identifies a run only by its name
            run = {"name": f"{name}-{run_id[:8]}"}
        settings = {"resume": "allow"} | run | dict(options)
        self._module = module
        self._run = module.init(config=config.model_dump(), **settings)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def log_samples(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        if hasattr(self._module, "Table"):
            self._run.log({name: self._module.Table(dataframe=pd.DataFrame(rows).astype(str))}, step=step)

    def log_figures(self, figures: Mapping[str, Path], step: int) -> None:
        if hasattr(self._module, "Image"):
            self._run.log({name: self._module.Image(str(path)) for name, path in figures.items()}, step=step)

    def finish(self) -> None:
        self._run.finish()


def _as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Completions as Markdown, each with its numbers and short texts; the questions come once, and texts verbatim."""
    parts = []
    question = None
    for number, row in enumerate(rows, 1):
        if row["question"] != question:
            question = row["question"]
            parts.append(textwrap.indent(question, "    ", lambda line: True))
        facts = [f"{name} {value}" for name, value in row.items() if name not in _LONG and value is not None]
        completion = textwrap.indent(row["completion"] or " ", "    ", lambda line: True)
        parts.append(f"**{number}.** {', '.join(facts)}\n\n{completion}")
    return "\n\n".join(parts)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"tracking.{name}", str(error), f"pip install {name}, or remove the block") from error


class _Feed(threading.Thread):
    """The thread of a tracker, which starts it and calls its methods in order."""

    def __init__(self, name: str, start: Callable[[], TensorBoard | _ModuleRun]):
        super().__init__(name=name, daemon=True)
        self._start_tracker = start
        self._failed = False
        self._waiting: queue.Queue[tuple[str, tuple]] = queue.Queue(MOST_WAITING)

    def put(self, method: str, *arguments: Any) -> None:
        if not self.ident:
            self.start()
        try:
            self._waiting.put_nowait((method, arguments))
        except queue.Full:
            self._fails(f"it is {MOST_WAITING} rows behind")

    def run(self) -> None:
        """Starts the tracker and calls its methods, up to `finish`."""
        try:
            tracker = self._start_tracker()
            method = None
            while method != "finish":
                method, arguments = self._waiting.get()
                getattr(tracker, method)(*arguments)
        except BaseException as error:  # some trackers raise SystemExit
            self._fails(f"{type(error).__name__}: {error}")

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread; warns if the tracker is not done after `timeout`."""
        super().join(timeout)
        if self.is_alive():
            self._fails(f"it did not log its remaining rows within {timeout:g} s")

    def _fails(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("%s gets no more rows of this run: %.500s; metrics.jsonl has all rows", self.name, reason)
