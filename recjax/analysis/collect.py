"""The metrics of many runs as one table."""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from pandas.api.types import is_numeric_dtype

from recjax.analysis.sweeps import SweepRun, read_sweep
from recjax.training.metrics import read_metrics

COLUMNS = (  # every table has these metrics; NaN without a value
    "reward",
    "accuracy",
    "completion_length",
    "truncated",
    "staleness",
    "entropy",
    "gradient_norm",
    "kept_fraction",
    "clip_fraction/all",
    "ratio/q01",
    "ratio/q99",
    "ratio/max",
    "behavior_kl/k3",
    "effective_sample_size",
    "evaluation/accuracy",
    "evaluation/reward",
    "evaluation/initial_kl",
)
WINDOW = 5  # optimizer steps averaged in a row of the table


def collect(runs: Sequence[SweepRun]) -> pd.DataFrame:
    """One row for every WINDOW steps of every run: its settings, the window's last step, and means of all metrics.

    An evaluation keeps its own step; the evaluation before training has step 0. An evaluation within a window has a
    separate row, whose other columns are NaN.

    Raises:
        ValueError: none of the runs has metrics yet.
    """
    return metrics_of([(run.settings, Path(run.config.output)) for run in runs])


def metrics_of(folders: Sequence[tuple[dict[str, str], Path]]) -> pd.DataFrame:
    """`collect` for folders of runs, or of evaluations, with the settings that name them in the table."""
    tables = []
    for settings, folder in folders:
        rows = read_metrics(folder / "metrics.jsonl")
        if not rows and (folder / "results.json").is_file():  # an evaluation, which has a single step
            metrics = json.loads((folder / "results.json").read_text(encoding="utf-8"))["metrics"]
            rows = [{"step": 1} | {f"evaluation/{name}": each["value"] for name, each in metrics.items()}]
        if rows:
            table = pd.DataFrame(rows)
            ends = (table["step"] + WINDOW - 1) // WINDOW * WINDOW
            names = dict.fromkeys([*COLUMNS, *table.select_dtypes("number")])
            # A metric that has the name of an axis, such as learning_rate, is not in the table.
            values = table.reindex(columns=[name for name in names if name not in {"step", *settings}])
            evaluated = values.filter(like="evaluation/")
            windows = values.drop(columns=evaluated.columns).groupby(ends).mean()
            evaluated = evaluated.dropna(how="all").groupby(table["step"]).mean()
            table = windows.join(evaluated, how="outer").reset_index()
            tables.append(pd.concat([pd.DataFrame(settings, index=table.index), table], axis=1))
    if not tables:
        raise ValueError(f"{folders[0][1]}: no metrics yet; start the run, or wait for its first evaluation")
    table = pd.concat(tables, ignore_index=True)
    return table.astype(dict.fromkeys(metrics_in(table), "float32"))


def read_folders(folders: Sequence[str | Path]) -> pd.DataFrame:
    """The table of runs given by their folders; its only axis, `run`, holds the folders' names.

    Raises:
        ValueError: a folder is not a run folder, or no run has metrics yet.
    """
    for folder in folders:
        if not (Path(folder) / "metrics.jsonl").is_file():
            raise ValueError(f"{str(folder)!r} has no metrics.jsonl; name folders of runs that have started")
    return metrics_of([({"run": str(folder)}, Path(folder)) for folder in folders])


def read_runs(source: str | Path, smoke: bool = False) -> pd.DataFrame:
    """The table of a sweep file's runs, or a table read from Parquet.

    Raises:
        ValueError: the source is neither, or has no metrics.
    """
    if Path(source).suffix == ".parquet":
        if not Path(source).is_file():
            raise ValueError(f"{str(source)!r}: no such table; name a table that --table wrote")
        try:
            table = pd.read_parquet(source)
        except (OSError, ValueError) as error:
            raise ValueError(f"{source}: not a Parquet file ({error}); write it with --table again") from error
        if "step" not in table or not axes_of(table) or not set(COLUMNS) & set(table):
            raise ValueError(f"{source}: not a table of runs with settings, steps and metrics; write one with --table")
        return table
    return collect(read_sweep(source, smoke)[1])


def axes_of(table: pd.DataFrame) -> list[str]:
    """The settings that distinguish the runs of a table, in the order of the sweep file; their values are text."""
    return [name for name in table.columns if name != "step" and not is_numeric_dtype(table[name])]


def metrics_in(table: pd.DataFrame) -> list[str]:
    """The metrics of a table."""
    return [name for name in table.columns if name != "step" and is_numeric_dtype(table[name])]


def without_other_metrics(table: pd.DataFrame, names: Sequence[str] = ()) -> pd.DataFrame:
    """A table with only COLUMNS and `names`, small enough to commit with its figures."""
    return table.drop(columns={*metrics_in(table)} - {*COLUMNS, *names})


def check_metrics(table: pd.DataFrame, names: Sequence[str], flag: str) -> None:
    """Checks that all names are metrics of a table, or of COLUMNS.

    Raises:
        ValueError: a name is neither.
    """
    known = dict.fromkeys([*COLUMNS, *metrics_in(table)])
    for name in names:
        if name not in known:
            similar = (
                difflib.get_close_matches(name, known, n=3) or [other for other in known if name in other] or known
            )
            raise ValueError(f"{flag} {name!r}: the runs have no such metric; name one of {', '.join(similar)}")
