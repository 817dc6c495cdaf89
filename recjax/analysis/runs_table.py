"""The runs in a folder and its sub-folders as a table: what differs between them, and how far each came."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from recjax.errors import UserError
from recjax.runs.folder import written_by_recjax
from recjax.runs.overview import NONE, Overview, default_text, read_overview
from recjax.runs.stored_runs import is_run_folder
from recjax.runtime.console import progress_bar

logger = logging.getLogger(__name__)

MOST_WITHOUT_BAR = 20  # reading more runs shows a progress bar
# Settings that name places, or that follow from the change of another setting.
_UNRELATED = ("output", "training.resume_with")


def runs_table(folder: str | Path) -> pd.DataFrame:
    """A row for each run in a folder and its sub-folders, in the natural order of their names.

    A warning names each folder that looks like a run and cannot be read.

    Returns:
        A column for each setting that differs between the runs, or that a resume changed, with texts such as
        "0.002 until step 40, then 0.0005"; and the columns `steps` (the last step with metrics), `planned_steps`,
        `state` (finished, running or stopped), `reward` of the last batch, `evaluation/accuracy` and
        `evaluation/reward` of the last evaluation, `hours` of work, and `base`, the initial policy's digest. The index
        `run` has the path of each run below the folder.
    Raises:
        UserError: the folder has no run.
    """
    runs, problems = read_runs_below(Path(folder))
    for problem in problems:
        logger.warning("%s", problem)
    return table_of(runs, Path(folder))


def table_of(runs: Sequence[Overview], folder: Path) -> pd.DataFrame:
    """The table of `runs_table` for runs that are read."""
    keys = differing_settings(runs)
    rows = []
    for run in runs:
        row: dict[str, Any] = {"run": name_below(run, folder)}
        for key in keys:
            row[key] = run.setting_text(key)
        row |= {
            "steps": run.steps,
            "planned_steps": run.planned_steps,
            "state": run.state,
            "reward": run.last("reward"),
            "evaluation/accuracy": run.last("evaluation/accuracy"),
            "evaluation/reward": run.last("evaluation/reward"),
            "hours": run.hours,
            "base": run.base,
        }
        rows.append(row)
    return pd.DataFrame(rows).set_index("run")


def name_below(run: Overview, folder: Path) -> str:
    """The run's path below a folder; the folder's own name if the run is the folder."""
    name = run.folder.relative_to(folder).as_posix()
    return folder.resolve().name if name == "." else name


def read_runs_below(folder: Path) -> tuple[list[Overview], list[str]]:
    """The runs in a folder and its sub-folders, and a line for each folder that looks like a run and is none.

    Raises:
        UserError: the folder does not exist, or has neither runs nor such folders.
    """
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r}", "no such folder", "name a folder with runs")
    found = sorted(_folders_like_runs(folder, set()), key=lambda path: _natural_key(path.relative_to(folder)))
    runs = []
    problems = []
    bar = progress_bar("reading runs", len(found), unit="run", shown=len(found) > MOST_WITHOUT_BAR)
    with bar:
        for path in found:
            try:
                runs.append(_read_run(path))
            except (UserError, OSError) as error:
                text = " ".join(str(error).split())
                problems.append(f"skipped: {text}")
            bar.update()
    if not runs:
        reasons = "; ".join(problems) or "neither it nor a folder in it has a run"
        raise UserError(f"{str(folder)!r}", reasons, "name the output folder of a run, or a folder above")
    return runs, problems


def _read_run(path: Path) -> Overview:
    """The run in a folder that has files of a run.

    Raises:
        UserError: the folder is no run, or its files are damaged.
    """
    if not (path / "config.yaml").is_file():
        raise UserError(path, "has metrics.jsonl and no config.yaml, so it is no run, or a damaged one")
    if not is_run_folder(path):
        raise UserError(path, "has a config.yaml and no run")
    return read_overview(path)


def _folders_like_runs(folder: Path, visited: set[Path]) -> Iterator[Path]:
    """The folder and all below it that have files of a run; enters no folder that a run wrote, and none twice."""
    real = folder.resolve()
    if real in visited:
        return
    visited.add(real)
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        logger.warning("%s: not read (%s)", folder, error.strerror)
        return
    names = {entry.name for entry in entries}
    is_evaluation = "results.json" in names or "samples.parquet" in names
    is_like_run = not is_evaluation and not names.isdisjoint(("config.yaml", "metrics.jsonl"))
    if is_like_run:
        yield folder
    for entry in entries:
        is_hidden = entry.name.startswith(".")
        if entry.is_dir() and not is_hidden and not (is_like_run and written_by_recjax(entry.name)):
            yield from _folders_like_runs(folder / entry.name, visited)


def _natural_key(path: Path) -> list[tuple[bool, int, str]]:
    """A key that sorts "seed 10" after "seed 9"."""
    key = []
    for part in re.split(r"(\d+)", path.as_posix()):
        is_number = part.isdecimal()
        key.append((is_number, int(part) if is_number else 0, part))
    return key


def differing_settings(runs: Sequence[Overview]) -> list[str]:
    """The settings that differ between runs, or that a resume changed, in the order of the config.

    A run without a key, because its version or its blocks have none, differs from a run with another value than the
    key's default.
    """
    names = dict.fromkeys(name for run in runs for name in (*run.settings, *run.earlier))
    differing = []
    for name in names:
        if name in _UNRELATED:
            continue
        texts = {run.setting_text(name) for run in runs}
        if NONE in texts and any(name not in run.settings for run in runs):
            texts.discard(NONE)
            texts.add(default_text(name))
        if len(texts) > 1 or any(name in run.earlier for run in runs):
            differing.append(name)
    return differing


def settings_in_words(run: Overview, keys: Sequence[str]) -> list[str]:
    """The run's values of some settings, a text each; settings that the run does not have are skipped."""
    return [f"{key} = {run.setting_text(key)}" for key in keys if key in run.settings or key in run.earlier]
