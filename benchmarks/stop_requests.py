"""The cost of asking all processes of a run whether one must stop: median step, both ways.

    python -m benchmarks.stop_requests [--steps 400] [--rounds 3]

Two processes train from a store, a device each. They ask at every step, and read the answer one step later, as a run
does, or at once, for which the host waits until the step's update has ended. Both ways take turns. Prints JSON.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from absl import app, flags

from benchmarks.growth import steps_of
from benchmarks.large_store import CONFIG, make_store
from benchmarks.run import machine
from recjax.runtime.console import progress_bar
from recjax.runtime.memory import with_tunables

RUN = "import runpy; runpy.run_module('recjax.train', run_name='__main__')"
WAYS = {
    "late": RUN,
    "at_once": "from recjax.runtime import hosts; hosts.LateAnswers.any_says = lambda _, yes: hosts.any_says(yes); "
    + RUN,
}
ROWS = 10_000


def define_flags() -> None:
    """The command's flags, defined when it is run and not when it is imported."""
    flags.DEFINE_integer("steps", 400, "Optimizer steps of each run.", lower_bound=20)
    flags.DEFINE_integer("rounds", 3, "Runs of each way.", lower_bound=1)


def run(way: str, steps: int, store: Path, output: Path) -> float:
    """Median seconds of a step."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    overrides = ["warm_start=null", f"experience.store={store}", f"output={output}", f"training.steps={steps}"]
    overrides += [f"training.checkpoint_every={steps}", "evaluation.every=0", "evaluation.problems=16"]
    command = [sys.executable, "-c", WAYS[way], f"--config={CONFIG}", *overrides]
    command += [f"--coordinator=localhost:{port}", "--processes=2"]
    environment = os.environ | {"GLIBC_TUNABLES": with_tunables(os.environ.get("GLIBC_TUNABLES", ""))}
    with output.with_suffix(".log").open("w") as log:
        processes = [
            subprocess.Popen([*command, f"--process_id={number}"], env=environment, stdout=log, stderr=log)
            for number in range(2)
        ]
        failed = any([process.wait() for process in processes])
    if failed:
        raise RuntimeError(f"{way}: a process failed:\n{output.with_suffix('.log').read_text()[-2000:]}")
    return float(steps_of(output / "metrics.jsonl")[10:].median())


def main(_) -> None:
    """Times both ways."""
    seconds = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, progress_bar("runs", 2 * flags.FLAGS.rounds, unit="run") as bar:
        make_store(Path(folder) / "store", ROWS)
        for number in range(flags.FLAGS.rounds):
            for way in WAYS:
                output = Path(folder) / f"{way}-{number}"
                seconds[way].append(run(way, flags.FLAGS.steps, Path(folder) / "store", output))
                bar.update()
    found = {way: [round(value, 5) for value in values] for way, values in seconds.items()}
    ratio = float(np.median(np.divide(seconds["at_once"], seconds["late"])))
    print(json.dumps({"machine": machine(), "step_seconds": found, "at_once / late": round(ratio, 3)}, indent=2))


if __name__ == "__main__":
    define_flags()
    app.run(main)
