"""Sweeps: a file with a base config and the settings that its runs cross, as `recjax.sweep` shows; and its runs."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from recjax.config import Config, make_config
from recjax.config.yaml_values import read_yaml_file, write_override
from recjax.errors import UserError
from recjax.runs.folder import is_finished
from recjax.runtime.console import progress_bar
from recjax.runtime.workers import cores, end_with_parent

LOGS = "logs"  # This folder lies next to the run folders.
LOOK_SECONDS = 1.0  # the bar shows the metrics of the active runs at this interval
_REQUIRED_KEYS = ("config", "grids", "output", "settings")
_OPTIONAL_KEYS = ("overrides", "smoke")


class SweepRun(NamedTuple):
    """One run: its settings in the grid, its overrides on the command line, and the resulting config."""

    settings: dict[str, str]
    overrides: list[str]
    config: Config

    @property
    def name(self) -> str:
        """The settings' names, in the order of the file's axes."""
        return "__".join(self.settings.values())

    def steps_done(self) -> int:
        """Number of optimizer steps in the run's metrics, which start with a row before the first step."""
        path = Path(self.config.output) / "metrics.jsonl"
        if not path.is_file():
            return 0
        rows = path.read_bytes().count(b"\n")
        return min(max(rows - 1, 0), self.config.training.steps)


def read_sweep(path: str | Path, smoke: bool = False, extra: Sequence[str] = ()) -> tuple[Path, list[SweepRun]]:
    """The base config's path and the runs of a sweep file; every run is checked.

    Args:
        smoke: take the file's smoke block.
        extra: `key=value` overrides for all runs; they come last.
    Raises:
        UserError: the file is unreadable, names a setting that it does not define, or makes a config that is refused.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{str(path)!r}", "no such sweep file", "name a YAML file")
    content = read_yaml_file(path)
    is_mapping = isinstance(content, dict)
    if not is_mapping or content.keys() - _REQUIRED_KEYS - set(_OPTIONAL_KEYS) or set(_REQUIRED_KEYS) - content.keys():
        required = ", ".join(_REQUIRED_KEYS)
        raise UserError(path, f"must have the keys {required}, and may have {' and '.join(_OPTIONAL_KEYS)}")
    section = content
    if smoke:
        section = content.get("smoke")
    if not isinstance(section, dict) or "grids" not in section:
        raise UserError(path, "--smoke needs a block 'smoke' with 'grids' and, optionally, 'overrides'")
    for key in ("config", "output"):
        if not isinstance(content[key], str):
            raise UserError(f"{path}: {key}", "must be text", "put it in quotes", value=content[key])
    output = content["output"]
    if smoke:
        output += "_smoke"
    settings: dict[str, dict[str, list[tuple[str, Any]]]] = {}  # Maps an axis and a name to changes of the config.
    for axis, block in _mapping(path, "settings", content["settings"]):
        names = _mapping(path, f"settings.{axis}", block)
        settings[axis] = {name: _mapping(path, f"settings.{axis}.{name}", changes) for name, changes in names}
    shared_changes = _mapping(path, "overrides", content.get("overrides"))
    smoke_changes = []
    if smoke:
        smoke_changes = _mapping(path, "smoke.overrides", section.get("overrides"))
    if not isinstance(section["grids"], list) or not section["grids"]:
        raise UserError(f"{path}: grids", "must be a list of at least one grid", value=section["grids"])
    base = path.parent / content["config"]
    values = read_yaml_file(base)
    runs: dict[str, SweepRun] = {}
    choices = itertools.chain.from_iterable(_cross(path, settings, grid) for grid in section["grids"])
    for chosen in choices:
        name = "__".join(chosen.values())
        if name == LOGS:
            raise UserError(path, f"the setting {name} has the name of the logs' folder", "rename it")
        if name not in runs:
            changes = list(shared_changes)
            for axis, setting in chosen.items():
                changes += settings[axis][setting]
            changes += smoke_changes
            overrides = [write_override(key, value) for key, value in changes]
            overrides += extra
            overrides.append(write_override("output", f"{output}/{name}"))
            try:
                runs[name] = SweepRun(chosen, overrides, make_config(values, overrides, str(base)))
            except UserError as error:
                raise error.within(f"{path}: run {name}") from error
        elif runs[name].settings != chosen:
            first_names = " and ".join(runs[name].settings.values())
            second_names = " and ".join(chosen.values())
            raise UserError(
                path, f"{first_names}, and {second_names}, would both be run {name}", "rename one of these settings"
            )
    return base, list(runs.values())


def _mapping(path: Path, block_name: str, block: Any) -> list[tuple[str, Any]]:
    """The keys, as text, and values of a block of the file; an empty list for an empty block."""
    if not isinstance(block, dict | None):
        raise UserError(f"{path}: {block_name}", "must be a block of keys and values", value=block)
    if not block:
        return []
    names = [str(key) for key in block]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                path, f"{block_name}: the name {name!r} occurs twice (1 and '1' are one name)", "rename one"
            )
    return list(zip(names, block.values(), strict=True))


def _cross(path: Path, settings: dict[str, dict], grid: Any) -> list[dict[str, str]]:
    """All combinations of a grid's names; the last axis changes fastest."""
    if not isinstance(grid, dict) or list(grid) != list(settings):
        raise UserError(path, f"a grid must name the axes {', '.join(settings)} in this order", f"got {grid!r}")
    choices = []
    for axis, defined in settings.items():
        if grid[axis] != "all" and not isinstance(grid[axis], list):
            raise UserError(f"{path}: {axis}", "must be a list of names, or all", value=grid[axis])
        if grid[axis] == "all":
            names = list(defined)
        else:
            names = [str(name) for name in grid[axis]]
        for name in names:
            if name not in defined:
                raise UserError(path, f"{axis}: {name!r} is not among settings.{axis}: {', '.join(defined)}")
        choices.append(names)
    return [dict(zip(settings, names, strict=True)) for names in itertools.product(*choices)]


def run_all(base: Path, runs: list[SweepRun], workers: int) -> dict[str, str]:
    """Runs all unfinished runs, `workers` at a time; a bar shows the steps of all runs, and which run at the moment.

    Returns:
        Exit status and last log line of each failed run, by name.
    """
    waiting = [run for run in runs if not is_finished(run.config)]
    # Otherwise XLA would start one thread per core in every run.
    environment = os.environ | {"PJRT_NPROC": str(max(1, cores() // workers))}
    failed = {}
    alive = {}  # the run of each active process
    stopping = threading.Event()

    def start(run: SweepRun) -> None:
        log = Path(run.config.output).parent / LOGS / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "recjax.train", "--config", str(base), *run.overrides]
        with log.open("w") as file:
            if stopping.is_set():
                return
            options = {"stdout": file, "stderr": subprocess.STDOUT, "env": environment}
            # A killed sweep leaves no runs, whose folders the same command would find in use.
            process = subprocess.Popen(command, preexec_fn=end_with_parent, **options)
            alive[process] = run
            code = process.wait()
            del alive[process]
        # A reward function may end the process with status 0 before the run is finished.
        if code or not is_finished(run.config):
            lines = log.read_text(errors="replace").strip().splitlines()
            last_line = lines[-1] if lines else "no output"
            failed[run.name] = f"exit status {code}: {last_line} ({log})"

    done = {}
    for run in runs:
        done[run.name] = run.steps_done() if run in waiting else run.config.training.steps
    bar = progress_bar("sweep", sum(run.config.training.steps for run in runs), sum(done.values()), unit="step")
    with ThreadPoolExecutor(workers) as pool, bar:
        unfinished = {pool.submit(start, run) for run in waiting}
        try:
            while unfinished:
                finished, unfinished = wait(unfinished, LOOK_SECONDS, FIRST_COMPLETED)
                for future in finished:
                    future.result()
                active = list(alive.values())
                for run in active if unfinished else waiting:
                    done[run.name] = run.steps_done()
                shown = [f"{len(runs) - len(unfinished)} of {len(runs)} runs ended"]
                if failed:
                    shown.append(f"{len(failed)} failed")
                shown += [f"{run.name}: {done[run.name]}/{run.config.training.steps}" for run in active]
                bar.set_postfix_str(", ".join(shown), refresh=False)
                bar.update(sum(done.values()) - bar.n)
        except BaseException:
            stopping.set()
            for process in list(alive):
                process.terminate()
            raise
    return failed
