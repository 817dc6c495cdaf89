"""Golden runs: the same twelve short runs with another commit and with the working tree, compared number by number.

    python -m benchmarks.golden [--commit 74abc26] [--only NAME,...]

The command checks the other commit out into a temporary folder, runs `python -m recjax.train` there and here on this
machine, compares every metric of every step, and prints a table. It exits with 1 if a run differs. Both sides share a
cache of compiled programs, so the side that runs second starts faster. The whole takes about six minutes on two cores.

A commit that renames a config key or a metric adds the name to the tables below. A commit that changes numbers on
purpose sets the tolerance of the runs that change, and says why.
"""

import io
import json
import math
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from absl import app, flags

FLAGS = flags.FLAGS
HERE = Path(__file__).parent.parent
BASE = "74abc26"

# Names that have changed since BASE. A checkout whose docs/configuration.md lacks the new key gets the old one.
OLDER_KEYS: dict[str, str] = {}  # new key: old key
RENAMED_METRICS: dict[str, str | None] = {}  # old metric: new metric, or None where the metric no longer exists
# Metrics that older commits do not write.
ADDED_METRICS = {
    f"impossible_tokens/{policy}" for policy in ("policy", "behavior", "reference", "teacher", "proximal", "anchor")
}
ADDED_METRICS |= {"right_and_ended", "evaluation/right_and_ended", "tokens_without_set", "frac_reward_zero_std"}
ADDED_METRICS |= {"experience/left_out/drift"}

# Metrics with the largest difference that rounding makes: a rate that is float32 and was a Python float, and a k3 that
# lost its digits near 0.
ROUNDED = {"learning_rate": 1e-7, "behavior_kl/k3": 3e-7}

# Metrics of the clock.
NOT_COMPARED = {
    "wall_seconds",
    "tokens_per_second",
    "device_idle_seconds",
    "generators/waited_seconds",
    "follow/waited_seconds",
}

FUNCTIONS = '''
def reward(prompts, completions, answers):
    """A reward that no policy reaches everywhere, so every step has a gradient."""
    return [sum(map(ord, text)) % 7 / 6 for text in completions]


async def agent(problem, policy):
    """Three turns, the last of them in a context of its own, so a trajectory has two rows."""
    reply = await policy.complete(problem.prompt)
    more = await policy.complete(problem.prompt + reply.raw + "12")
    last = await policy.complete("7" + problem.prompt, max_tokens=2)
    return sum(map(ord, reply.text + more.text + last.text)) % 7 / 6
'''
STORE = "store.db"  # a folder for commits whose stores are folders
STORE_STEPS = 8

COMMON = {
    "seed": 3,
    "model.decoder": {
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "intermediate_size": 32,
    },
    "task.arithmetic.problems": ["1..6 + 1..6"],
    "task.arithmetic.template": "{a}{op}{b}=",
    "task.reward": "golden_functions:reward",
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_completion_tokens": 4,
    "algorithm.preset": "rec_one_side_nois",
    "optimizer.learning_rate": 1e-2,
    "training.steps": 6,
    "training.checkpoint_every": 3,
    "evaluation.every": 3,
    "evaluation.problems": 8,
}


class Golden(NamedTuple):
    """One of the golden runs.

    keys: config keys that differ from COMMON; "{store}" stands for the side's own store.
    tolerance: largest accepted difference, relative to 1 or to the metric where that is larger; 0: bit for bit.
    devices: virtual CPU devices.
    skips: metrics that are not compared.
    """

    keys: dict[str, Any]
    tolerance: float = 0.0
    devices: int = 1
    skips: tuple[str, ...] = ()


# BASE ran each row by itself. Later commits pack the rows, and run beginnings that rows share once.
PACKED = {"tolerance": 1e-6, "skips": ("padding_waste",)}

RUNS = {
    "on_policy": Golden({}),
    "early": Golden({"regime.sync_interval": 2, "regime.sync_offset": 2}),
    "late": Golden(
        {"regime.sync_interval": 4, "experience.late": {"shortest": 0, "longest": 3, "deadline": 2}},
    ),
    # BASE counted the store's rows of version 0 as the run's own old samples.
    "mix": Golden(
        {"regime.sync_interval": 2, "experience.mix": {"store": "{store}", "share": 0.5}},
        skips=("staleness", "staleness_rows"),
    ),
    "store": Golden({"experience.store": "{store}"}),
    "followed_store": Golden(
        {"experience.store": "{store}", "experience.follow": True, "rollout.max_context_tokens": 16}, **PACKED
    ),
    # Only without staleness does the order of batches not depend on which process is faster.
    "asynchronous": Golden({"regime.mode": "async", "regime.max_staleness": 0, "experience.record": True}),
    "replay": Golden(
        {
            "regime.sync_interval": 2,
            "experience.replay": {"draw_every": 2, "max_reuse": 3, "half_life": 4.0, "priority": "reward_spread"},
            "experience.record": True,
        }
    ),
    "agent": Golden({"task.agent": "golden_functions:agent", "rollout.max_context_tokens": 32}, **PACKED),
    "scoring_pass": Golden(
        {
            "regime.sync_interval": 3,
            "algorithm.anchor": {"name": "proximal"},
            "algorithm.reference_kl": {"coefficient": 0.1, "estimator": "k3"},
            "algorithm.entropy": {"coefficient": 0.01},
        },
        tolerance=1e-4,  # its k3 near 0 has more digits than before
    ),
    "packed": Golden({"regime.sync_interval": 2, "training.tokens_per_micro_batch": 24}, **PACKED),
    "mesh_2x2": Golden({"mesh.data": 2, "mesh.tensor": 2}, devices=4),
}


class Side(NamedTuple):
    """One of the two checkouts.

    folder: for its runs and its store.
    """

    checkout: Path
    folder: Path


def config_of(golden: Golden, side: Side, output: Path) -> dict[str, Any]:
    """The nested config of a run, with the key names that the side's checkout has."""
    known = {*re.findall(r"`([a-z_.]+)`", (side.checkout / "docs" / "configuration.md").read_text())}
    older = {new: old for new, old in OLDER_KEYS.items() if new not in known}
    config: dict[str, Any] = {"output": str(output)}
    for key, value in _dotted({**COMMON, **golden.keys}).items():
        *blocks, name = older.get(key, key).split(".")
        place = config
        for block in blocks:
            place = place.setdefault(block, {})
        place[name] = str(side.folder / STORE) if value == "{store}" else value
    return config


def _dotted(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in nested.items():
        found |= _dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def command(side: Side, devices: int, *arguments: str) -> None:
    """Runs a module of a checkout's recjax.

    Raises:
        RuntimeError: the command failed; the message has the end of its output.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (side.checkout, side.folder.parent))),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        # Compiling takes most of a short run.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(side.folder.parent / "compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "RECJAX_CACHE": str(side.folder / "cache"),
    }
    whole = [sys.executable, "-m", *arguments]
    done = subprocess.run(whole, cwd=side.checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{side.checkout}: {' '.join(arguments)}: exit status {done.returncode}\n{done.stderr[-3000:]}"
        )


def make_store(side: Side) -> None:
    """Fills the side's store with completions of the initial policy."""
    path = side.folder / "store.yaml"
    path.write_text(yaml.safe_dump(config_of(Golden({}), side, side.folder / "unused")))
    to = ["--output", str(side.folder / STORE), "--steps", str(STORE_STEPS)]
    command(side, 1, "recjax.generate_experience", "--config", str(path), *to)


def run_rows(side: Side, name: str) -> tuple[list[dict], float]:
    """The rows of metrics.jsonl of a golden run, and how many seconds the command took."""
    output, path = side.folder / name, side.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config_of(RUNS[name], side, output)))
    began = time.monotonic()
    command(side, RUNS[name].devices, "recjax.train", "--config", str(path))
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], time.monotonic() - began


def largest_difference(there: Sequence[dict], here: Sequence[dict]) -> tuple[float, str]:
    """The largest difference between the rows of two runs, relative to 1 or to the metric where that is larger.

    Steps or metrics that only one of the runs has differ by infinity.

    Args:
        there: rows of the other commit, whose metrics may have older names.
        here: rows of the working tree.
    Returns:
        The difference, and the step and metric of it; 0 and an empty text if the runs are equal.
    """
    there = [{RENAMED_METRICS.get(name, american(name)): value for name, value in row.items()} for row in there]
    steps = [[row["step"] for row in rows] for rows in (there, here)]
    if steps[0] != steps[1]:
        return math.inf, f"steps {steps[0]} there, {steps[1]} here"
    worst, where = 0.0, ""
    for expected, found in zip(there, here, strict=True):
        for name in sorted(expected.keys() | found.keys(), key=str):
            if name in NOT_COMPARED or name is None or (name in ADDED_METRICS and name not in expected):
                continue
            if name not in expected or name not in found:
                apart, values = math.inf, f"only {'here' if name in found else 'there'}"
            else:
                apart, values = _apart(expected[name], found[name]), f"{expected[name]} there, {found[name]} here"
                apart = 0.0 if apart <= ROUNDED.get(name, 0.0) else apart
            if apart > worst:
                worst, where = apart, f"step {found['step']} {name}: {values}"
    return worst, where


def american(name: str) -> str:
    """A metric's name in US spelling, which older commits do not use."""
    return name.replace("behaviour", "behavior")


def _apart(expected: Any, found: Any) -> float:
    """The relative difference of two values; infinity where they are no numbers and differ."""
    numbers = all(isinstance(value, int | float) and math.isfinite(value) for value in (expected, found))
    if not numbers:
        return 0.0 if expected == found or repr(expected) == repr(found) else math.inf
    return abs(found - expected) / max(1.0, abs(expected))


def verdict(difference: float, tolerance: float) -> str:
    """How a run compares: "bit-equal", "within …" or "DIFFERS"."""
    if difference == 0:
        return "bit-equal"
    return f"within {tolerance:g}" if difference <= tolerance else "DIFFERS"


def compared(rows: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """The rows without the metrics that this run skips."""
    return [{key: value for key, value in row.items() if key not in RUNS[name].skips} for row in rows]


def compare(there: Side, here: Side, name: str) -> list[str]:
    """Runs one config on both sides; the table's cells."""
    try:
        (expected, seconds_there), (found, seconds_here) = run_rows(there, name), run_rows(here, name)
    except RuntimeError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return [name, "–", "–", "a command failed", "DIFFERS", "–", "–"]
    skips = RUNS[name].skips
    expected, found = (
        [{key: row[key] for key in row if key not in skips} for row in rows] for rows in (expected, found)
    )
    difference, where = largest_difference(expected, found)
    result = verdict(difference, RUNS[name].tolerance)
    print(f"{name}: {result}", file=sys.stderr, flush=True)
    cells = [name, str(len(found) - 1), f"{difference:.1e}", where or "nowhere", result]
    return [*cells, f"{seconds_there:.0f}", f"{seconds_here:.0f}"]


def compare_all(commit: str, names: Sequence[str]) -> list[list[str]]:
    """Checks the commit out into a temporary folder and compares the runs of these names.

    Returns:
        The table's rows.
    """
    with tempfile.TemporaryDirectory(prefix="recjax-golden-") as temporary:
        folder = Path(temporary)
        checkout = folder / "checkout"
        # Not a git worktree, which a killed command would leave in the repository's list.
        packed = subprocess.run(["git", "archive", commit], cwd=HERE, stdout=subprocess.PIPE, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(checkout, filter="data")
        (folder / "golden_functions.py").write_text(FUNCTIONS)
        sides = Side(checkout, folder / "there"), Side(HERE, folder / "here")
        with ThreadPoolExecutor(2) as pool:
            for side in sides:
                side.folder.mkdir()
            if any("{store}" in str(RUNS[name].keys) for name in names):
                list(pool.map(make_store, sides))
            return list(pool.map(lambda name: compare(*sides, name), names))


def main(argv: list[str]) -> None:
    """Compares, prints the table, and exits with 1 if a run differs."""
    names = FLAGS.only or list(RUNS)
    if unknown := [name for name in names if name not in RUNS]:
        raise app.UsageError(f"--only {unknown[0]!r}: no golden run; choose from {', '.join(RUNS)}")
    began, rows = time.monotonic(), compare_all(FLAGS.commit, names)
    print("| run | steps | largest difference | where | verdict | seconds there | seconds here |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(f"{FLAGS.commit} and the working tree, {time.monotonic() - began:.0f} s")
    sys.exit(any(row[4] == "DIFFERS" for row in rows))


if __name__ == "__main__":
    flags.DEFINE_string("commit", BASE, "The other commit.")
    flags.DEFINE_list("only", None, "Names of runs, separated by commas; all runs if not given.")
    app.run(main)
