"""Whole short runs on stores of two sizes, by their use of the store: seconds and memory.

    python -m benchmarks.large_store_runs [--rows 10000,1000000] [--page benchmarks/RESULTS.md]

The stores come from `benchmarks.large_store`; the store of `initial` has no log-probs. Each run is `python -m
recjax.train` for three steps of 16 groups, with nothing compiled before. Memory is the most that was resident. Linux.
"""

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags

from benchmarks import tables
from benchmarks.large_store import CONFIG, make_store
from benchmarks.run import machine
from recjax.runtime.console import progress_bar

STEPS = 3
SHORT = ["warm_start=null", f"training.steps={STEPS}", "evaluation.problems=16", "rollout.max_completion_tokens=48"]
USES = {  # of a store, whose file is filled in
    "`experience.store`": ["experience.store={store}"],
    "`missing_logprobs: initial`": ["experience.store={store}", "experience.missing_logprobs=initial"],
    "`regrade: true`": ["experience.store={store}", "experience.regrade=true"],
    "`mix`, `of: batch`": ["experience.store=null", "experience.mix.store={store}", "experience.mix.of=batch"],
    "`mix`, `of: group`": ["experience.store=null", "experience.mix.store={store}", "experience.mix.of=group"],
}


def define_flags() -> None:
    """The command's flags, defined when it is run and not when it is imported."""
    flags.DEFINE_list("rows", ["10000", "1000000"], "Sizes of the two stores.")
    flags.DEFINE_string("page", None, "Markdown page whose table to replace; default: the table is printed.")


def run(overrides: list[str], folder: Path) -> tuple[float, float]:
    """Seconds of a run, and the most bytes that it had."""
    command = [sys.executable, "-m", "recjax.train", "--config", str(CONFIG), *SHORT, f"output={folder}/run"]
    log, began = folder / "log", time.perf_counter()
    with log.open("w") as printed:
        process = subprocess.Popen(
            [*command, *overrides],
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=os.environ | {"RECJAX_CACHE": f"{folder}/cache"},
        )
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{overrides}: the run failed:\n{log.read_text()[-2000:]}")
    return time.perf_counter() - began, 1024 * used.ru_maxrss


def measure(sizes: list[int]) -> list[list[str]]:
    """The table's rows."""
    measured = {use: [] for use in USES}
    with tempfile.TemporaryDirectory() as parent, progress_bar("runs", len(USES) * len(sizes), unit="run") as bar:
        for rows, logprobs in itertools.product(sizes, (True, False)):
            made = Path(parent) / f"{rows}-{logprobs}"
            make_store(made, rows, logprobs)
            for number, (use, overrides) in enumerate(USES.items()):
                if ("initial" in use) == logprobs:
                    continue
                folder = Path(parent) / f"{number}-{rows}"
                folder.mkdir()
                shutil.copy(made, folder / "store")  # a run adds rewards
                measured[use].append(run([override.format(store=folder / "store") for override in overrides], folder))
                shutil.rmtree(folder)
                bar.update()
            made.unlink()
    return [
        [use, *(f"{taken:.0f}" for taken, _ in found), *(f"{used / 1e6:,.0f}" for _, used in found)]
        for use, found in measured.items()
    ]


def main(_) -> None:
    """Measures, then writes the table."""
    where, sizes = machine(), [int(rows) for rows in flags.FLAGS.rows]
    small, large = (f"{rows:,} rows" for rows in sizes)
    head = ["a store in", f"{small} (s)", f"{large} (s)", f"{small} (MB)", f"{large} (MB)"]
    about = f"{where['cpu']}, {where['cores']} cores, {where['date'][:10]}. Runs of {STEPS} steps."
    tables.show(flags.FLAGS.page, "large store runs", about, [head, *measure(sizes)])


if __name__ == "__main__":
    define_flags()
    app.run(main)
