"""Claims C1 to C4 with SmolLM2 on one GPU: makes missing runs for some minutes, then their table, figure and verdicts.

    python -m experiments.claims.accelerator --minutes 10 [--at_once 8] [--table FILE.parquet] [key=value ...]
    python -m experiments.claims.page                # writes the section of docs/claims.md from the table

accelerator.yaml has the runs. Several train on the GPU at the same time, each with its share of the memory. When the
minutes are over, active runs write a checkpoint and end; the same command resumes them, and makes no run that is in the
table. Checkpoints of finished runs are deleted: all of them would need 90 GB.
"""

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from absl import flags

from experiments.claims.map import collected
from experiments.claims.names import NAMES
from experiments.claims.real_model import claims_text, draw_bands
from experiments.claims.verdicts import NARROW, WIDE, Claim, compare, gain, mean_over_steps
from recjax.analysis.collect import axes_of, collect, without_other_metrics
from recjax.analysis.compare import final
from recjax.analysis.sweeps import SweepRun, read_sweep, run_all
from recjax.errors import UserError
from recjax.plots.style import finish, new_figure
from recjax.runs.folder import is_finished
from recjax.runs.stored_runs import starts
from recjax.runtime.console import command, start
from recjax.runtime.workers import cores

FLAGS = flags.FLAGS
HERE = Path(__file__).parent
TABLE = HERE / "accelerator.parquet"
REGIMES = ("on_policy", "interval_20", "offline")
OFF_POLICY = REGIMES[1:]
MEMORY = 0.9  # share of the GPU's memory for all processes
ENDING_SECONDS = 30  # a run's last step and checkpoint, the table and the figure
SECTION = """## On an accelerator

SmolLM2-135M-Instruct on the first task, on {devices}: {runs} runs of {steps} steps of 16 prompts × 8 completions, at
the rate that the runs on CPUs chose ([accelerator.yaml](../experiments/claims/accelerator.yaml)). Every 20 steps a run
is evaluated on 192 held-out problems × 4 samples. Checks and margins were fixed before the runs.

![Held-out accuracy of SmolLM2 in three regimes](claims/accelerator.png)

{verdicts}
{numbers}
"""


def claims(table: pd.DataFrame) -> dict[str, Claim]:
    """The claims that the runs can test, each once all its algorithms have two seeds in every regime that it needs."""
    mean, last = "mean accuracy over training", "final accuracy"

    def each(what, values, first, second, expected, regimes):
        return [compare(what, values, first, second, expected, (regime,)) for regime in regimes]

    means, ends = mean_over_steps(table), final(table)
    tested = {
        "C1": (
            "Dropping the importance weights changes next to nothing.",
            ("grpo", NARROW),
            REGIMES,
            lambda: each(mean, means, NARROW, "grpo", "alike", REGIMES),
        ),
        "C2": (
            "Without clipping, off-policy training collapses; with it, it does not.",
            ("reinforce", NARROW),
            OFF_POLICY,
            lambda: [
                *each(last, ends, "reinforce", NARROW, "lower", OFF_POLICY),
                *(gain(table, NARROW, (regime,)) for regime in OFF_POLICY),
            ],
        ),
        "C3": (
            "The wide range (0.6, 2.0) learns faster.",
            (NARROW, WIDE),
            REGIMES,
            lambda: each(mean, means, WIDE, NARROW, "higher", REGIMES),
        ),
        "C4": (
            "That is not just a larger learning rate: the narrow range with 5× the rate does not match the wide range.",
            ("grpo_5x_rate", WIDE),
            REGIMES,
            lambda: each(last, ends, "grpo_5x_rate", WIDE, "lower", REGIMES),
        ),
    }
    seeds = {cell: {*rows["seed"]} for cell, rows in table.groupby(["algorithm", "regime"])}

    def pairs(algorithms: tuple[str, ...], regime: str) -> int:
        return len(set.intersection(*(seeds.get((algorithm, regime), set()) for algorithm in algorithms)))

    return {
        name: Claim(text, algorithms, checks())
        for name, (text, algorithms, regimes, checks) in tested.items()
        if min(pairs(algorithms, regime) for regime in regimes) >= 2
    }


def section(table: pd.DataFrame, devices: str, names: dict[str, str]) -> str:
    """The section of docs/claims.md.

    Args:
        devices: the devices that made the runs.
        names: names of algorithms and regimes on the page.
    """
    verdicts, numbers = claims_text(claims(table), names)
    runs = len(table.drop_duplicates(axes_of(table)))
    values = {"devices": devices, "runs": runs, "steps": int(table["step"].max())}
    return SECTION.format(**values, verdicts=verdicts, numbers=numbers)


def draw(table: pd.DataFrame, names: dict[str, str], file: Path) -> None:
    """Held-out accuracy over steps in each regime, as a PNG file."""
    figure = new_figure(6.8, 7.5, "")
    for axes, regime in zip(figure.subplots(len(REGIMES), sharex=True, squeeze=False).flat, REGIMES, strict=True):
        of_regime = table[table["regime"] == regime]
        axes.set(title=names[regime], ylabel="held-out accuracy")
        lines = {names[key]: rows for key, rows in of_regime.groupby("algorithm", sort=False)}
        if lines:
            draw_bands(axes, lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    finish(figure).savefig(file, dpi=110)


def devices_of(table: Path) -> str:
    """The devices that made the runs of a table, from the file next to it."""
    return json.loads(table.with_suffix(".json").read_text(encoding="utf-8"))["devices"]


def write_table(runs: list[SweepRun], path: Path) -> pd.DataFrame:
    """Writes the table of finished runs, and the devices next to it; runs that were made elsewhere keep their rows.

    Raises:
        ValueError: no run is finished.
    """
    known = collected(runs, path)
    finished = [run for run in runs if run.name not in known and is_finished(run.config)]
    tables = [*known.values(), *(collect([run]) for run in finished)]
    if not tables:
        raise UserError("", f"none of the {len(runs)} runs is finished; the same command resumes them")
    table = without_other_metrics(pd.concat(tables, ignore_index=True))
    made_on = {starts(Path(run.config.output))[-1]["devices"] for run in finished}
    made_on |= {*devices_of(path).split(", ")} if known else set()
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(path, index=False, compression="zstd")
    path.with_suffix(".json").write_text(json.dumps({"devices": ", ".join(sorted(made_on))}) + "\n", encoding="utf-8")
    return table


@contextlib.contextmanager
def without_old_checkpoints(runs: list[SweepRun]) -> Iterator[None]:
    """Deletes the checkpoints of runs some time after they finish, as a run's last checkpoint is written until then."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(5):
            for folder in (Path(run.config.output) for run in runs if is_finished(run.config)):
                if time.time() - (folder / "summary.json").stat().st_mtime > ENDING_SECONDS:
                    shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@command
def main(argv: list[str]) -> None:
    """Makes runs until the minutes are over, then writes the table and the figure and prints the verdicts."""
    runs = read_sweep(HERE / "accelerator.yaml", extra=argv[1:])[1]
    base = read_sweep(HERE / "accelerator.yaml")[0]
    path = Path(FLAGS.table)
    known = collected(runs, path)
    missing = [run for run in runs if run.name not in known and not is_finished(run.config)]
    at_once = FLAGS.at_once or max(1, cores() // 2)
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{MEMORY / at_once:.3f}"
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are there; {at_once} at a time make the others", flush=True)
    failed = {}

    def over(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, over)
    signal.alarm(max(1, round(60 * FLAGS.minutes) - ENDING_SECONDS))
    try:
        with without_old_checkpoints(missing):
            failed = run_all(base, missing, at_once)
    except TimeoutError:
        print("the minutes are over; the same command resumes the other runs", flush=True)
    finally:
        signal.alarm(0)
    for name, reason in failed.items():
        print(f"FAILED {name}: {reason}")
    table = write_table(runs, path)
    draw(table, NAMES, path.with_suffix(".png"))
    print(f"{path}: {len(table.drop_duplicates(axes_of(table)))} of {len(runs)} runs, on {devices_of(path)}")
    for name, claim in claims(table).items():
        print(f"{name}: {claim.verdict}")


if __name__ == "__main__":
    flags.DEFINE_float("minutes", 10.0, "Minutes for everything.", lower_bound=0.1)
    flags.DEFINE_integer("at_once", None, "Runs at the same time; default: half the number of cores.", lower_bound=1)
    flags.DEFINE_string("table", str(TABLE), "Parquet file of the finished runs.")
    start(main)
