"""Makes the runs of a method: compiled programs where a column allows them, the trainer in this process elsewhere."""

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from experiments.claims import map as compiled
from experiments.leaderboard import plan
from experiments.leaderboard.plan import Method
from recjax.analysis.collect import COLUMNS
from recjax.analysis.sweeps import SweepRun
from recjax.config import Config
from recjax.errors import UserError
from recjax.logs.metrics import read_metrics
from recjax.runtime.console import progress_bar
from recjax.runtime.files import locked_file, write_whole


class Row(NamedTuple):
    """A method's work: the columns in which it runs, and the number of seeds after the pilot seed."""

    method: Method
    columns: tuple[str, ...]
    seeds: int


def is_compiled(config: Config) -> bool:
    """True if two compiled programs make the whole run: sampling from the policy, and one update of each batch."""
    if config.experience is not None or config.algorithm.build().needs_reference:
        return False
    return config.regime.mode == "sync" and config.training.updates == 1


def write_base_policy(seed: int) -> None:
    """Writes the folder with the base policy of a seed if it does not exist.

    The folders are committed: a warm start gives other weights on another processor, and then the runs of a seed would
    not be comparable. Their weights are rounded to bfloat16, which halves the files.
    """
    output = plan.base_policy_of(seed)
    if output.exists():
        return
    from recjax.hub.export import export_model, write_base
    from recjax.runs.prepare import prepare

    run, params = prepare(plan.base_policy_run(seed))
    decoder = run.policy.decoder.config
    with tempfile.TemporaryDirectory() as made:
        base = Path(made)
        write_base(base, decoder, run.policy.tokenizer, run.policy.stop_ids)
        export_model(output, decoder, params, base, "bfloat16", stop_ids=run.policy.stop_ids)


def blocks(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row for each evaluation: its metrics, and means of the steps since the evaluation before it.

    Args:
        rows: those of metrics.jsonl.
    """
    found: list[dict[str, float]] = []
    steps: list[Mapping[str, Any]] = []
    for row in rows:
        if "reward" in row:
            steps.append(row)
        if "evaluation/accuracy" not in row:
            continue
        block = {"step": row["step"]}
        for name in COLUMNS:
            if name.startswith("evaluation/"):
                values = [row[name]] if name in row else []
            else:
                values = [step[name] for step in steps if step.get(name) is not None]
            if values:
                block[name] = sum(values) / len(values)
        found.append(block)
        steps = []
    return pd.DataFrame(found).astype(float)


def train(run: SweepRun, extra: Mapping[str, Any]) -> None:
    """Makes a run with the trainer, and the stores that it reads; its file gets the rows, or the error of its end."""
    from recjax import api

    for name in plan.store_names(run.settings["column"]):
        store = plan.store_run(name, run.config.seed, extra).config
        with locked_file(Path(f"{store.output}.lock")):  # the runs of other workers read it, too
            api.run(store)
    folder = Path(run.config.output)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        api.run(run.config)
        rows = blocks(read_metrics(folder / "metrics.jsonl")).to_dict("list")
    except UserError as error:
        rows = {"error": str(error)}
    write_file(run, rows)
    shutil.rmtree(folder, ignore_errors=True)


def write_file(run: SweepRun, content: Mapping[str, Any]) -> None:
    """Writes the file of a finished run; see `content_of`."""
    compiled.file_of(run).parent.mkdir(parents=True, exist_ok=True)
    write_whole(compiled.file_of(run), json.dumps(content))


def make(runs: Sequence[SweepRun], path: Path, extra: Mapping[str, Any]) -> None:
    """Makes the runs of one method that are missing.

    Args:
        path: table whose runs are finished.
    """
    waiting = compiled.missing(runs, path) if runs else []
    with_programs = [run for run in waiting if is_compiled(run.config)]
    # Programs whose sampler can drift run a little slower, so they are others.
    for drifts in (False, True):
        alike = [run for run in with_programs if (run.config.rollout.drift is not None) == drifts]
        try:
            compiled.make(alike, drifts)
        except UserError as error:  # such as that of a loss which reads what the batches lack
            for run in compiled.missing(alike, path) if alike else []:
                write_file(run, {"error": str(error)})
    for run in waiting:
        if not is_compiled(run.config):
            train(run, extra)


def pilots_of(row: Row, extra: Mapping[str, Any]) -> list[SweepRun]:
    """The runs of a row that choose its rates."""
    return plan.pilot_runs(plan.cells_of([row.method], row.columns), extra)


def runs_of(row: Row, pilots: pd.DataFrame, extra: Mapping[str, Any]) -> list[SweepRun]:
    """All runs of a row: the pilots, and the seeds of the cells whose pilots are in a table."""
    best = plan.best_rates(pilots)
    cells = [cell for cell in plan.cells_of([row.method], row.columns) if (row.method.name, cell[1]) in best]
    return pilots_of(row, extra) + plan.verdict_runs(cells, row.seeds, best, extra)


def table_of(runs: Sequence[SweepRun], path: Path) -> pd.DataFrame:
    """A row for each evaluation of each finished run; a run that an error ended has no rows.

    Args:
        path: table that has the runs without a file.
    """
    known = compiled.collected(list(runs), path) if runs else {}
    tables = []
    for run in runs:
        content = content_of(run)
        if content is None:
            if run.name in known:
                tables.append(known[run.name])
        elif "error" not in content:
            table = pd.DataFrame(content)
            tables.append(pd.concat([pd.DataFrame(run.settings, index=table.index), table], axis=1))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=[*plan.AXES, "step"])


def content_of(run: SweepRun) -> dict[str, Any] | None:
    """What the file of a finished run holds: columns of its rows, or the error that ended it; None without a file."""
    path = compiled.file_of(run)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def errors_of(runs: Iterable[SweepRun]) -> dict[tuple[str, str], str]:
    """The error that ended a run of a cell, by method and column."""
    found = {}
    for run in runs:
        content = content_of(run) or {}
        if "error" in content:
            found[run.settings["method"], run.settings["column"]] = content["error"]
    return found


def make_row(row: Row, path: Path, extra: Mapping[str, Any]) -> None:
    """Makes the missing runs of a row: the pilots, then each cell at its best rate."""
    pilots = pilots_of(row, extra)
    make(pilots, path, extra)
    make(runs_of(row, table_of(pilots, path), extra), path, extra)


def make_rows(rows: Sequence[Row], path: Path, workers: int, extra: Mapping[str, Any]) -> None:
    """Makes the runs of rows in worker processes, which each take every `workers`-th row.

    Raises:
        UserError: a worker failed.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ["PJRT_NPROC"] = str(max(1, cores // workers))  # for the workers, which import JAX
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=_make_share, args=(rows[first::workers], path, extra, plan.OUTPUT))
        for first in range(workers)
    ]
    for process in processes:
        process.start()
    total = sum(len(row.columns) * (len(plan.PLAN["rates"]) + row.seeds) for row in rows)
    try:
        with progress_bar("leaderboard", total, 0, unit="run") as bar:
            while any(process.is_alive() for process in processes):
                time.sleep(1)
                names = {row.method.name for row in rows}
                files = [path for path in plan.OUTPUT.glob("*.json") if path.name.split("__")[0] in names]
                bar.update(len(files) - bar.n)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    if any(process.exitcode for process in processes):
        raise UserError("", "a worker failed, see above; the same command resumes")


def _make_share(rows: Sequence[Row], path: Path, extra: Mapping[str, Any], output: Path) -> None:
    plan.OUTPUT = output  # a spawned process begins with the module's own value
    for row in rows:
        make_row(row, path, extra)
