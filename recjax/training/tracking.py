"""Experiment trackers in addition to the run's own files: W&B, trackio, and any module with wandb's interface."""

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
from recjax.files import write_whole

logger = logging.getLogger(__name__)

NAME = "tracking.json"
MOST_WAITING = 10_000  # rows that a tracker may be behind; a slower tracker gets no further rows
LAST_SECONDS = 60.0  # longest wait for a tracker at the end of a run
_ONE_AT_A_TIME = threading.Lock()  # the first tracker makes the id of the run for all trackers


def identity(output: Path) -> tuple[str, str]:
    """The id and name of a run in trackers; both stay when the run is resumed or its folder is moved.

    The first call stores them in tracking.json in the folder.

    Raises:
        ValueError: tracking.json cannot be written.
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


class Tracking:
    """The trackers of a run. Each has its own thread, so that a slow or failing tracker cannot stop the run.

    Only the first process has trackers.
    """

    def __init__(self, config: Config):
        """Imports the modules; each thread calls the `init` of its module when the first row arrives.

        Raises:
            ValueError: a module is not installed.
        """
        blocks = config.tracking.model_dump() if hosts.is_first() else {}
        modules = {name: _module(name) for name, options in blocks.items() if options is not None}
        self._feeds = [_Feed(name, module, config, blocks[name]) for name, module in modules.items()]

    def log(self, row: Mapping[str, Any]) -> None:
        """Sends a row of metrics to the trackers, at the row's "step"; skips dictionaries in the row."""
        numbers = {name: value for name, value in row.items() if name != "step" and not isinstance(value, dict)}
        for feed in self._feeds:
            feed.put(lambda module, run: run.log(numbers, step=row["step"]))

    def log_results(self, figures: Mapping[str, Path], samples: Path, step: int) -> None:
        """Sends figures and a table of samples, to modules that have the types `Image` and `Table`.

        Args:
            samples: JSON Lines file of samples.
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
        """Ends each tracker once it has logged all its rows, or after LAST_SECONDS."""
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
    """The thread of a tracker, which runs the jobs for the tracker in order."""

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
        """Starts the tracker and runs its jobs until a job is None."""
        try:
            with _ONE_AT_A_TIME:
                run_id, name = identity(Path(self._config.output))
            # trackio identifies a run only by its name.
            takes = inspect.signature(self._module.init).parameters.values()
            by_id = any(taken.name == "id" or taken.kind is taken.VAR_KEYWORD for taken in takes)
            own = {"id": run_id, "name": name} if by_id else {"name": f"{name}-{run_id[:8]}"}
            options = {"resume": "allow", **own, **self._options}
            run = self._module.init(config=self._config.model_dump(), **options)
            while (job := self._waiting.get()) is not None:
                job(self._module, run)
            run.finish()
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
            logger.warning(
                "tracking.%s gets no more rows of this run: %.500s; metrics.jsonl has all rows", self._name, reason
            )
