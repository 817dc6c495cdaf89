"""Whether two checkouts of recjax give the same numbers: short runs of eight regimes, compared step by step.

    python -m benchmarks.same_numbers --other /path/to/other/checkout --folder runs/same_numbers

Each run is `python -m recjax.train` with the quickstart's task and policy. Runs that are in the folder already are not
made again. Numbers agree to rounding; one token sampled otherwise shows as a difference of whole percents.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

from absl import app, flags

FLAGS = flags.FLAGS
HERE = Path(__file__).parent.parent
SHORT = ["training.steps=24", "training.checkpoint_every=8", "evaluation.every=12", "evaluation.problems=64"]
REGIMES = {
    "on_policy": ["regime.sync_interval=1"],
    "m = 20": ["regime.sync_interval=20"],
    "n = 10": ["regime.sync_interval=1", "regime.sync_offset=10"],
    "offline": ["regime.sync_interval=1", "regime.offline=true"],
    "store": ["regime.sync_interval=1", "experience.store={store}"],
    "late, replay, record": [
        "regime.sync_interval=4",
        "experience.late={shortest: 0, longest: 3, deadline: 2}",
        "experience.replay={draw_every: 2, max_reuse: 3, half_life: 4.0}",
        "experience.record=true",
    ],
    "mix": ["regime.sync_interval=4", "experience.mix={store: {store}, share: 0.5}"],
    "lora": ["regime.sync_interval=4", "model.lora={rank: 4, alpha: 8}", "optimizer.learning_rate=3e-3"],
}
NOT_COMPARED = ("wall_seconds", "tokens_per_second", "padding_waste")


def command(checkout: Path, *arguments: str) -> None:
    """Runs a module of a checkout's recjax.

    Raises:
        RuntimeError: it failed, with what it said.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=checkout, env=environment, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.decode()[-2000:]}")


def metrics(checkout: Path, folder: Path, regime: str) -> list[dict]:
    """The rows of metrics.jsonl of a regime's run, which is made where it is not there yet."""
    output, store = folder / regime.replace(" ", "").replace(",", "_"), folder.parent / "store"
    if not (output / "summary.json").is_file():
        settings = [setting.replace("{store}", str(store)) for setting in REGIMES[regime]]
        config = str(HERE / "experiments" / "quickstart.yaml")
        command(checkout, "recjax.train", "--config", config, f"output={output}", *SHORT, *settings)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def difference(ours: list[dict], theirs: list[dict]) -> tuple[float, str]:
    """The largest difference of two runs, relative to 1 or the number itself where that is larger, and where it is.

    Metrics that one of the checkouts does not have at all are left out.
    """
    worst, where = 0.0, "nowhere"
    shared = set().union(*ours) & set().union(*theirs)
    for one, other in zip(ours, theirs, strict=True):
        for name in sorted(((one.keys() | other.keys()) & shared) - {*NOT_COMPARED}):
            found, expected = one.get(name), other.get(name)
            if isinstance(found, dict) or found is None or expected is None:
                apart = 0.0 if found == expected else math.inf
            else:
                apart = abs(found - expected) / max(1.0, abs(expected))
            if not apart <= worst:
                worst, where = apart, f"{name} of step {one['step']}: {found} here, {expected} there"
    return worst, where


def main(argv: list[str]) -> None:
    """Makes the runs and prints, for each regime, how far apart they are."""
    folder = Path(FLAGS.folder).absolute()
    store = folder / "store"
    if not store.is_dir():
        config = str(Path(FLAGS.other) / "experiments" / "quickstart.yaml")
        to = ["--output", str(store), "--steps", "24"]
        command(Path(FLAGS.other), "recjax.generate_experience", "--config", config, *to)
    for regime in REGIMES:
        theirs = metrics(Path(FLAGS.other), folder / "there", regime)
        if FLAGS.there_only:
            continue
        ours = metrics(HERE, folder / "here", regime)
        print(f"{regime}: largest difference %.1e ({'%s'})" % difference(ours, theirs), flush=True)


if __name__ == "__main__":
    flags.DEFINE_string("other", None, "Another checkout of recjax.", required=True)
    flags.DEFINE_string("folder", None, "Where the runs go.", required=True)
    flags.DEFINE_bool("there_only", False, "Make the other checkout's runs and compare nothing.")
    app.run(main)
