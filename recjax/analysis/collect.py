"""The metrics of many runs as one table."""

import collections
import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from recjax.analysis.sweeps import SweepRun, read_sweep
from recjax.errors import UserError
from recjax.logs.metrics import read_metrics
from recjax.runs.stored_runs import base_policy

logger = logging.getLogger(__name__)

# Every table has these metrics, with NaN where a run has no value.
COLUMNS = (
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
# Keys of `model` that do not change the initial policy.
_TRAINING_KEYS = {
    "lora",
    "freeze",
    "teacher",
    "teacher_rate",
    "reference",
    "dtype",
    "attention",
    "remat",
    "logprob_chunk",
}
WINDOW = 5  # Each row of the table averages this number of optimizer steps.


def collect(runs: Sequence[SweepRun]) -> pd.DataFrame:
    """The table of several runs: for every WINDOW steps of a run, its settings, the last step, and all metrics' means.

    An evaluation keeps its own step; the evaluation before training has step 0. An evaluation within a window has a
    separate row, whose other columns are NaN.

    A warning names runs that should start from one policy and do not.

    Raises:
        UserError: none of the runs has metrics yet.
    """
    for words in mixed_bases(runs):
        logger.warning("%s", words)
    return metrics_of([(run.settings, Path(run.config.output)) for run in runs])


def mixed_bases(runs: Sequence[SweepRun]) -> list[str]:
    """Runs of a sweep that should start from one policy and started from several, in words; [] if the records agree.

    Runs should start from one policy if they have the same policy seed, model, warm start and task. Records of older
    versions have no digest of the policy.
    """
    groups = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in runs:
        config = run.config
        model = config.model.model_dump(exclude=_TRAINING_KEYS)
        task = config.task.model_dump() if config.warm_start else {}
        group = repr((config.seed_of_base, model, config.warm_start, task))
        digest = base_policy(Path(config.output))
        if digest is not None:
            groups[group][digest].append(run.name)
    warnings = []
    for bases in groups.values():
        if len(bases) > 1:
            policies = [f"{digest} ({', '.join(names)})" for digest, names in bases.items()]
            warnings.append(
                "runs with one seed, model and task began with several initial policies, so that their differences"
                f" include those of the policies: {' and '.join(policies)}; make the runs of all but one again"
            )
    return warnings


def differing_starts(
    table: pd.DataFrame, axes: Sequence[str] = ("seed",), metric: str = "evaluation/accuracy"
) -> list[str]:
    """Runs of a table that have different values of a metric at step 0, though they should start from one policy.

    It serves tables whose run folders are not at hand.

    Args:
        axes: settings that determine the policy.
    """
    first = table[table["step"] == 0].dropna(subset=[metric])
    values: Any = first.groupby(list(axes))[metric].unique()
    words = []
    for axis_values, metric_values in values.items():
        if len(metric_values) > 1:
            settings = zip(axes, np.atleast_1d(axis_values), strict=True)
            group = ", ".join(f"{axis} {value}" for axis, value in settings)
            numbers = ", ".join(f"{value:.4g}" for value in sorted(metric_values))
            words.append(f"{group}: {metric} at step 0 = {numbers}")
    return words


def metrics_of(folders: Sequence[tuple[dict[str, str], Path]]) -> pd.DataFrame:
    """The table of run or evaluation folders, each with the settings that name it; see `collect`."""
    tables = []
    for settings, folder in folders:
        rows = read_metrics(folder / "metrics.jsonl")
        results = folder / "results.json"
        if not rows and results.is_file():  # An evaluation has a single step.
            metrics = json.loads(results.read_text(encoding="utf-8"))["metrics"]
            row = {f"evaluation/{name}": metric["value"] for name, metric in metrics.items()}
            row["step"] = 1
            rows = [row]
        if rows:
            windows = _windows(pd.DataFrame(rows), settings)
            tables.append(pd.concat([pd.DataFrame(settings, index=windows.index), windows], axis=1))
    if not tables:
        raise UserError(folders[0][1], "no metrics yet", "start the run, or wait for its first evaluation")
    table = pd.concat(tables, ignore_index=True)
    return table.astype(dict.fromkeys(metrics_in(table), "float32"))


def _windows(rows: pd.DataFrame, settings: Mapping[str, str]) -> pd.DataFrame:
    """A run's rows of metrics averaged over WINDOW steps; evaluations keep their own step."""
    names = dict.fromkeys([*COLUMNS, *rows.select_dtypes("number")])
    # A metric that has the name of an axis, such as learning_rate, is not in the table.
    values = rows.reindex(columns=[name for name in names if name != "step" and name not in settings])
    evaluated = values.filter(like="evaluation/")
    window_ends = (rows["step"] + WINDOW - 1) // WINDOW * WINDOW
    means = values.drop(columns=evaluated.columns).groupby(window_ends).mean()
    evaluations = evaluated.dropna(how="all").groupby(rows["step"]).mean()
    return means.join(evaluations, how="outer").reset_index()


def read_folders(folders: Sequence[str | Path]) -> pd.DataFrame:
    """The table of runs given by their folders; its only axis, `run`, holds the folders' names.

    Raises:
        UserError: a folder is not a run folder, or no run has metrics yet.
    """
    for folder in folders:
        if not (Path(folder) / "metrics.jsonl").is_file():
            raise UserError(f"{str(folder)!r}", "has no metrics.jsonl", "name folders of runs that have started")
    return metrics_of([({"run": str(folder)}, Path(folder)) for folder in folders])


def read_runs(source: str | Path, smoke: bool = False) -> pd.DataFrame:
    """The table of a sweep file's runs, or a table read from Parquet.

    Raises:
        UserError: the source is neither, or has no metrics.
    """
    if Path(source).suffix == ".parquet":
        if not Path(source).is_file():
            raise UserError(f"{str(source)!r}", "no such table", "name a table that --table wrote")
        try:
            table = pd.read_parquet(source)
        except (OSError, ValueError) as error:
            raise UserError(source, f"not a Parquet file ({error})", "write it with --table again") from error
        has_metrics = any(name in table for name in COLUMNS)
        if "step" not in table or not axes_of(table) or not has_metrics:
            raise UserError(source, "not a table of runs with settings, steps and metrics", "write one with --table")
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
    others = [name for name in metrics_in(table) if name not in COLUMNS and name not in names]
    return table.drop(columns=others)


def check_metrics(table: pd.DataFrame, names: Sequence[str], flag: str) -> None:
    """Checks that all names are metrics of a table, or of COLUMNS.

    Raises:
        UserError: a name is neither.
    """
    metrics = list(dict.fromkeys([*COLUMNS, *metrics_in(table)]))
    for name in names:
        if name not in metrics:
            similar = difflib.get_close_matches(name, metrics, n=3)
            if not similar:
                similar = [metric for metric in metrics if name in metric]
            if not similar:
                similar = metrics
            raise UserError(f"{flag} {name!r}", "the runs have no such metric", f"name one of {', '.join(similar)}")
