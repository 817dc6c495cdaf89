"""Seconds from a command to its first optimizer step, with an empty cache of compiled programs and with a full one.

    python -m benchmarks.first_step [--config FILE] [--trees BEFORE,AFTER] [--pairs 3] [--out FILE.json] [key=value ...]

Each tree is a checkout of this repository, and trees take turns. A run makes one step; it has an empty cache first, and
then the cache of that run. Seconds end when the first step's metrics are in the run's folder; processor seconds are
those of the run and of its workers until then. Prints one JSON object.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from absl import app, flags

from benchmarks.run import machine, say
from recjax.runtime.files import write_whole

FLAGS = flags.FLAGS
REPOSITORY = Path(__file__).parents[1]


def define_flags() -> None:
    """The command's flags, defined when it is run and not when it is imported."""
    flags.DEFINE_string("config", str(REPOSITORY / "experiments" / "quickstart.yaml"), "Config of the run.")
    flags.DEFINE_list("trees", [str(REPOSITORY)], "Checkouts whose runs take turns.")
    flags.DEFINE_integer("pairs", 1, "Turns.", lower_bound=1)
    flags.DEFINE_string("out", None, "JSON file to write.")


def first_step(tree: Path, config: Path, lines: Sequence[str], folder: Path, cache: Path) -> dict[str, float]:
    """Seconds of a run until its first step.

    Args:
        folder: new folder of the run.
        cache: folder of compiled programs.
    Raises:
        RuntimeError: the run ends without a step; the message has the end of its log.
    """
    command = [sys.executable, "-m", "recjax.train", "--config", str(config), f"output={folder}", *lines]
    environment = os.environ | {"PYTHONPATH": str(tree), "RECJAX_CACHE": str(cache)}
    log = folder.with_suffix(".log")
    with log.open("w") as file:
        started = time.monotonic()
        process = psutil.Popen(
            [*command, "training.steps=1"], cwd=tree, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    seconds = None
    while seconds is None and process.poll() is None:
        time.sleep(0.05)
        if has_step(folder / "metrics.jsonl"):
            seconds = time.monotonic() - started
            processor = processor_seconds(process)
    if process.wait() or seconds is None:
        raise RuntimeError(f"{tree}: the run ended without a step: {log.read_text(errors='replace')[-2000:]}")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {
        "first_step_seconds": round(seconds, 2),
        "processor_seconds": round(processor, 2),
        "prepare_seconds": round(summary["seconds"]["prepare"], 2),
    }


def has_step(file: Path) -> bool:
    """True if a file of metrics has the row of an optimizer step."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    with contextlib.suppress(ValueError):  # half a line
        return any(json.loads(line)["step"] > 0 for line in lines)
    return False


def processor_seconds(process: psutil.Process) -> float:
    """Processor seconds of a process and of all that it started, so far."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = each.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def main(argv: list[str]) -> None:
    """Runs all turns."""
    measured = {tree: {"empty": [], "full": []} for tree in FLAGS.trees}
    content = {"machine": machine(), "command": sys.argv[1:], "runs": measured}
    with tempfile.TemporaryDirectory(prefix="recjax_first_step_", ignore_cleanup_errors=True) as place:
        turns = [FLAGS.trees if turn % 2 == 0 else FLAGS.trees[::-1] for turn in range(FLAGS.pairs)]
        for turn, tree in [(turn, tree) for turn, trees in enumerate(turns) for tree in trees]:
            cache = Path(place) / f"cache_{turn}_{FLAGS.trees.index(tree)}"
            for kind in ("empty", "full"):
                folder = cache.with_name(f"{cache.name}_{kind}")
                seconds = first_step(Path(tree).absolute(), Path(FLAGS.config).absolute(), argv[1:], folder, cache)
                measured[tree][kind].append(seconds)
                say(f"{tree}, {kind} cache: {seconds}")
                if FLAGS.out:
                    write_whole(Path(FLAGS.out), json.dumps(content, indent=1) + "\n")
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    define_flags()
    app.run(main)
