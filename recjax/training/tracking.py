"""Trackers beside the run's own files: W&B, trackio, and any module of wandb's shape."""

import importlib
import inspect
import json
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from recjax import hosts
from recjax.config import Config
from recjax.whole_files import write_whole

logger = logging.getLogger(__name__)

NAME = "tracking.json"
MOST_WAITING = 10_000  # rows that a tracker may be behind; then it gets no more
LAST_SECONDS = 60.0  # that the end of a run waits for a tracker
_ONE_AT_A_TIME = threading.Lock()  # of several trackers the first makes the run's id


def identity(output: Path) -> tuple[str, str]:
    """The id and name by which trackers know the run in a folder, however often it is started and wherever it lies.

    They are in the folder's tracking.json, which the first call makes.

    Raises:
        ValueError: it cannot be written.
    """
    path = output / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return str(content["id"]), str(content["name"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged (%s); trackers get this run as a new one", path, error)
    content = {"id": uuid.uuid4().hex, "name": output.resolve().name}
    write_whole(path, json.dumps(content, indent=2) + "\n")
    return content["id"], content["name"]


class Tracking:
    """The trackers of a run, each fed by a thread of its own; what one of them does, or fails to do, stops nothing.

    Of several processes the first one has them.
    """

    def __init__(self, config: Config):
        """Imports the modules; their `init` is called in their threads, with the first row.

        Raises:
            ValueError: a module that is not installed.
        """
        blocks = config.tracking.model_dump() if hosts.is_first() else {}
        modules = {name: _module(name) for name, options in blocks.items() if options is not None}
        self._feeds = [_Feed(name, module, config, blocks[name]) for name, module in modules.items()]

    def log(self, row: Mapping[str, Any]) -> None:
        """Takes a row of metrics, by its "step"; dictionaries in it are left out."""
        numbers = {name: value for name, value in row.items() if name != "step" and not isinstance(value, dict)}
        for feed in self._feeds:
            feed.put(lambda module, run: run.log(numbers, step=row["step"]))

    def log_results(self, figures: Mapping[str, Path], samples: Path, step: int) -> None:
        """Takes pictures and a table of samples, where the module has kinds of values for them.

        Args:
            samples: a file of JSON Lines.
        """

        def results(module: Any, run: Any) -> None:
            found = {name: module.Image(str(path)) for name, path in figures.items() if hasattr(module, "Image")}
            if samples.is_file() and hasattr(module, "Table"):
                table = pd.read_json(samples, lines=True, dtype=False).astype(str)
                found["samples"] = module.Table(dataframe=table)
            run.log(found, step=step)

        for feed in self._feeds:
            feed.put(results)

    def close(self) -> None:
        """Ends the trackers, once they have what they were given or have had their time."""
        begun = [feed for feed in self._feeds if feed.ident]
        for feed in begun:
            feed.put(None)
        for feed in begun:
            feed.join(LAST_SECONDS)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"tracking.{name}: {error}; pip install {name}, or remove the block") from error


class _Feed(threading.Thread):
    """What a tracker is given, in order."""

    def __init__(self, name: str, module: Any, config: Config, options: dict[str, Any]):
        super().__init__(name=f"tracking-{name}", daemon=True)
        self._module, self._config, self._options = module, config, options
        self._waiting: queue.Queue[Callable | None] = queue.Queue(MOST_WAITING)
        self._name, self._failed = name, False

    def put(self, job: Callable | None) -> None:
        if not self.ident:
            self.start()
        try:
            self._waiting.put_nowait(job)
        except queue.Full:
            self._fails(f"it is {MOST_WAITING} rows behind")

    def run(self) -> None:
        """In the thread."""
        try:
            with _ONE_AT_A_TIME:
                run_id, name = identity(Path(self._config.output))
            # trackio knows a run by its name alone.
            takes = inspect.signature(self._module.init).parameters.values()
            by_id = any(taken.name == "id" or taken.kind is taken.VAR_KEYWORD for taken in takes)
            own = {"id": run_id, "name": name} if by_id else {"name": f"{name}-{run_id[:8]}"}
            options = {"resume": "allow", **own, **self._options}
            run = self._module.init(config=self._config.model_dump(), **options)
            while (job := self._waiting.get()) is not None:
                job(self._module, run)
            run.finish()
        except BaseException as error:  # some of them end by SystemExit
            self._fails(f"{type(error).__name__}: {error}")

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread, and says so where that was not enough."""
        super().join(timeout)
        if self.is_alive():
            self._fails(f"it has not taken the rest in {timeout:g} s")

    def _fails(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("tracking.%s gets no more of this run: %.500s; metrics.jsonl has all", self._name, reason)
