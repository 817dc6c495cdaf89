"""Tiny runs in processes that a server forks, with JAX imported and no device yet: started, waited for, compared."""

import datetime as clock
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import jax
from absl import flags

from recjax.config import load_config
from recjax.generate_experience import generate
from recjax.logs.metrics import read_metrics
from recjax.runs.start import train
from recjax.runtime.console import command
from recjax.sources import sampling
from tests.commands import forks
from tests.experience.rows import read_columns
from tests.training.counting import CountingLearner, prepared_batch, sampled_by
from tests.training.tiny_run import TINY, without_times

OPTIONS = ["training.steps=12", "training.checkpoint_every=2", "evaluation.every=4", "evaluation.problems=5"]
SECONDS = 300  # after so long a run is taken for one that hangs


class Place(NamedTuple):
    """Where a campaign works: a folder with a config, a store, and what was compiled; and the server of processes.

    counts: runs have a learner that counts, which computes nothing, and prepared groups.
    """

    folder: Path
    forks: multiprocessing.context.BaseContext
    counts: bool = False

    @property
    def config(self) -> str:
        """The config's file."""
        return str(self.folder / "tiny.yaml")


def place_in(folder: Path, counts: bool = False) -> Place:
    """A place for a campaign."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.yaml").write_text(TINY)
    if not (counts or (folder / "store").exists()):
        config = load_config(folder / "tiny.yaml", [f"output={folder}"])
        generate(config, folder / "store", 12, None, None, "initial")
    return Place(folder, forks(), counts)


def keep_programs(folder: str) -> None:
    """Shares compiled programs with whatever started the campaign, or with its other runs."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", f"{folder}/jax")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


class Started(NamedTuple):
    """A process that trains, and all that it says, a list of pieces until it has ended."""

    process: multiprocessing.process.BaseProcess
    pieces: list[str]
    reader: threading.Thread

    def ended(self) -> tuple[int, str]:
        """Its status and what it said, when it has ended."""
        self.process.join(SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            return -1000, "it hangs"
        self.reader.join()
        return self.process.exitcode, "".join(self.pieces)


def start(place: Place, options: Sequence[str], output: Path, **faults) -> Started:
    """Starts a run; faults are keyword arguments of `_train`."""
    ours, theirs = place.forks.Pipe(duplex=False)
    overrides = [*options, f"output={output}"]
    arguments = (place.config, overrides, str(place.folder), theirs)
    process = place.forks.Process(target=_train, args=arguments, kwargs={"counts": place.counts, **faults})
    process.start()
    theirs.close()
    pieces: list[str] = []

    def read() -> None:
        with os.fdopen(os.dup(ours.fileno()), "r", errors="replace") as stream:
            pieces.extend(stream)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return Started(process, pieces, reader)


def run(place: Place, options: Sequence[str], output: Path, **faults) -> tuple[int, str]:
    """Status and words of a run that was started and waited for."""
    return start(place, options, output, **faults).ended()


def wait_for_rows(started: Started, output: Path, count: int) -> None:
    """Returns when a run's metrics.jsonl is there and has `count` rows, or when the run has ended."""
    metrics = output / "metrics.jsonl"
    while started.process.is_alive() and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= count):
        time.sleep(0.005)


def differs(output: Path, straight: Path) -> str:
    """What a run's rows and record have otherwise than those of one that nothing happened to; empty where nothing."""
    ours, theirs = (_comparable(read_metrics(path / "metrics.jsonl")) for path in (output, straight))
    if ours != theirs:
        steps = [row["step"] for row in ours]
        first = next(((a, b) for a, b in zip(ours, theirs, strict=False) if a != b), ({}, {}))
        names = [name for name in first[0] if first[0][name] != first[1].get(name)]
        return f"{output}: rows of steps {steps}; the first that differs is {first[0].get('step')}, in {names}"
    if (straight / "experience.db").exists():
        ours, theirs = (
            [(row.id, row.reward) for row in read_columns(path / "experience.db")] for path in (output, straight)
        )
        if ours != theirs:
            return f"{output}: the record has {len(ours)} rows and not the {len(theirs)} of the other"
    return ""


def _comparable(rows: list[dict]) -> list[dict]:
    """Rows without what the clock decides: times, and what asynchronous generators were at when a step began."""
    told = ("generators/", "experience/")
    asynchronous = any("generators/in_flight" in row for row in rows)
    rows = without_times(rows)
    return [{name: row[name] for name in row if not (asynchronous and name.startswith(told))} for row in rows]


def _train(
    config: str,
    overrides: list[str],
    folder: str,
    said: Connection,
    *,
    counts: bool,
    cache: str | None = None,
    most_bytes: int | None = None,
    clock_back: bool = False,
) -> None:
    """Trains as the command does, in a process of its own.

    Args:
        said: what becomes standard error and output.
        counts: as for Place; a step then takes a tenth of a second.
        cache: for base policies.
        most_bytes: no file may grow beyond; stands for a full disk.
        clock_back: the clock goes back a day at its hundredth look, and an hour after every tenth beyond.
    """
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    said.close()
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    os.environ["RECJAX_CACHE"] = cache or f"{folder}/cache"
    keep_programs(folder)
    if most_bytes is not None:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))  # programs are read, not written
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if clock_back:
        _set_clock_back()
    flags.FLAGS(["train"])
    replaced = {"learner": _SlowlyCounting(), "sources": sampled_by(prepared_batch)} if counts else {}
    command(lambda argv: train(load_config(config, overrides), **replaced))([])


class _SlowlyCounting(CountingLearner):
    def update(self, *arguments):
        time.sleep(0.1)
        return super().update(*arguments)


def _set_clock_back() -> None:
    looks, now = [], time.time

    def back() -> float:
        looks.append(1)
        return now() - 86_400 * (len(looks) > 100) - 3_600 * (min(len(looks), 1000) // 10)

    class Clock(clock.datetime):
        @classmethod
        def now(cls, zone=None):
            return clock.datetime.fromtimestamp(back(), zone)

    time.time, sampling.datetime = back, Clock
