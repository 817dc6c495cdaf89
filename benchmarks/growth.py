"""Whether a step costs more the longer a run lasts: time, memory, open files and memory maps of a long run.

    python -m benchmarks.growth --page benchmarks/RESULTS.md [--steps 10000]

Trains the quickstart for that many steps in a process of its own, and looks at this process twice a second. A run's
tenths are compared: the table has the median step time and the maximum of each other column. Evaluations and
checkpoints are in the run; these steps are few and do not change medians. Linux.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
from absl import app, flags

from benchmarks.run import machine
from benchmarks.tables import show
from recjax.runtime.console import progress_bar

CONFIG = Path(__file__).parent.parent / "experiments" / "quickstart.yaml"
TENTHS = 10
LABELS = {
    "step_seconds": "step (s)",
    "memory": "memory (GiB)",
    "open_files": "open files",
    "maps": "memory maps",
    "threads": "threads",
}


def define_flags() -> None:
    """The command's flags, defined when it is run and not when it is imported."""
    flags.DEFINE_integer("steps", 10_000, "Optimizer steps.", lower_bound=2 * TENTHS)
    flags.DEFINE_string("page", None, "Markdown page whose table to replace; default: the table is printed.")


def look_at(process: psutil.Process) -> dict[str, float]:
    """Resources of a process and its children: memory in GiB, all others as counts."""
    family = [process, *process.children(recursive=True)]
    return {
        "memory": sum(each.memory_info().rss for each in family) / 2**30,
        "open_files": sum(each.num_fds() for each in family),
        "maps": sum(len(each.memory_maps(grouped=False)) for each in family),
        "threads": sum(each.num_threads() for each in family),
    }


def steps_of(metrics: Path) -> pd.Series:
    """Seconds of each step but the first, by its number."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    ends = pd.Series({row["step"]: row["wall_seconds"] for row in rows if "wall_seconds" in row})
    return ends.diff().dropna()


def follow(steps: int, output: Path) -> tuple[pd.Series, pd.DataFrame]:
    """Runs the quickstart for so many steps.

    Returns:
        Seconds by step, and the process's resources: a row for each look, with its step.
    """
    overrides = [f"output={output}", f"training.steps={steps}", f"training.checkpoint_every={steps // TENTHS}"]
    overrides += [f"evaluation.every={steps // TENTHS}"]
    metrics, log, looks = output / "metrics.jsonl", output.with_suffix(".log"), []
    read, lines = 0, 0
    with log.open("w") as printed, progress_bar("training", steps, unit="step") as bar:
        command = [sys.executable, "-m", "recjax.train", "--config", str(CONFIG), *overrides]
        run = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
        while run.poll() is None:
            time.sleep(0.5)
            if metrics.exists():  # only new lines, or each look would take longer
                with metrics.open("rb") as file:
                    file.seek(read)
                    new = file.read()
                read += len(new)
                lines += new.count(b"\n")
                bar.update(max(lines - 1, 0) - bar.n)  # the first line is of step 0
            try:
                looks.append({"step": bar.n, **look_at(psutil.Process(run.pid))})
            except psutil.Error:  # a child, or the run, has just ended
                continue
    if run.returncode:
        sys.exit(f"error: the run ended with status {run.returncode}:\n{log.read_text()[-2000:]}")
    return steps_of(metrics), pd.DataFrame(looks)


def tenths(seconds: pd.Series, looks: pd.DataFrame) -> pd.DataFrame:
    """A row for each tenth of the run: its median step time, and the maximum of each resource."""
    edges = np.linspace(0, seconds.index.max(), TENTHS + 1).astype(int)
    names = [f"to step {edge:,}" for edge in edges[1:]]
    held = looks.groupby(pd.cut(looks["step"], edges, labels=names), observed=False)[list(LABELS)[1:]].max()
    times = seconds.groupby(pd.cut(seconds.index, edges, labels=names), observed=False).median()
    return held.assign(step_seconds=times)[list(LABELS)]


def main(_) -> None:
    """Runs, then writes the table."""
    where, steps = machine(), flags.FLAGS.steps
    with tempfile.TemporaryDirectory() as folder:
        seconds, looks = follow(steps, Path(folder) / "run")
    found = tenths(seconds, looks)
    cells = [["", *LABELS.values()]]
    for name, row in found.iterrows():
        cells.append([str(name), f"{row['step_seconds']:.4f}", f"{row['memory']:.2f}"])
        cells[-1] += [f"{row[count]:.0f}" for count in ("open_files", "maps", "threads")]
    about = (
        f"The quickstart for {steps:,} steps, one run, with {TENTHS} evaluations and checkpoints; medians of step"
        f" times, maxima of all other columns; {where['cpu']}, {where['cores']} cores, {where['date'][:10]}."
    )
    show(flags.FLAGS.page, "growth", about, cells)


if __name__ == "__main__":
    define_flags()
    app.run(main)
