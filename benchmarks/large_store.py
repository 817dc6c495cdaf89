"""The cost of an experience store by its size: seconds to open it, seconds a batch, and memory.

    python -m benchmarks.large_store [--rows 10000,100000,1000000] [--page benchmarks/RESULTS.md]

Each store is synthetic: groups of 8 rows, of 16 to 48 tokens with log-probs, written 10,000 rows at a time. A process
of its own opens it as `python -m recjax.train` does, and takes batches of 16 groups; then another one opens it again.
Memory is the first process's peak of resident memory, minus its memory before. Linux.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from absl import app, flags

from benchmarks import tables
from benchmarks.run import machine
from recjax.config import Config, load_config
from recjax.console import progress_bar
from recjax.experience.batch import pad
from recjax.experience.group import Completion, Grade, Group, Row
from recjax.experience.sources import groups_at
from recjax.experience.store import Record, Store
from recjax.experience.stored import load_stored
from recjax.experience.tokenize import tokenizer_name
from recjax.hub.policy import Policy, policy_alone

CONFIG = Path(__file__).parent.parent / "experiments" / "offline_from_file.yaml"
PART, GROUP, BATCHES = 10_000, 8, 200
HEADS = {
    "rows": "rows",
    "store": "store (MB)",
    "written": "writing (s)",
    "first": "first opening (s)",
    "again": "opening again (s)",
    "batch": "a batch (ms)",
    "memory": "memory (MB)",
}


def define_flags() -> None:
    """The command's flags, defined when it is run and not when it is imported."""
    flags.DEFINE_list("rows", ["10000", "100000", "1000000"], "Sizes of the stores.")
    flags.DEFINE_string("page", None, "Markdown page whose table to replace; default: the table is printed.")
    flags.DEFINE_string("opens", None, "Used by the command itself: the store that this process opens.")


def subject(folder: str) -> tuple[Config, Policy]:
    """The config that reads the store, and its policy."""
    config = load_config(CONFIG, [f"experience.store={folder}", "warm_start=null"])
    return config, policy_alone(config, "+0123456789=")


def make_store(path: Path, rows: int, logprobs: bool = True) -> None:
    """Writes a store of so many rows, with log-probs or without."""
    config, policy = subject(str(path))
    name, generator = tokenizer_name(policy.tokenizer), np.random.default_rng(0)
    made, prompts, now = [], [], datetime.now(UTC)
    for row in range(min(PART, rows)):
        length, (first, second) = int(generator.integers(16, 49)), np.add(divmod(row // GROUP, 90), 10).tolist()
        prompt = f"{first}+{second}="
        made.append(
            Completion(
                id="",
                source="made",
                text=f"{generator.integers(20, 200)}",
                rows=(
                    Row(
                        np.array(policy.tokenizer.encode(prompt), np.int32),
                        generator.integers(1, 13, length, np.int32),
                        np.ones(length, bool),
                        -generator.random(length, np.float32) if logprobs else None,
                    ),
                ),
                sampling=config.rollout.sampling(),
                policy_version=0,
                truncated=False,
                grade=Grade(float(generator.integers(2))),
            )
        )
        prompts.append((prompt, str(first + second)))
    with progress_bar("writing", rows, unit="row") as bar, Store(path, create=True) as store:
        for start in range(0, rows, PART):
            here = range(start, min(start + PART, rows))
            records = []
            for row, one, (prompt, answer) in zip(here, made, prompts, strict=False):
                one = one._replace(id=f"made/{row:09d}")
                group = Group(f"made/group/{row // GROUP:09d}", one.rows[0].prompt_tokens, (one,), prompt, answer)
                records.append(Record(group, now, name))
            store.append(records)
            bar.update(len(here))


def memory(name: str) -> int:
    """Bytes of this process: VmRSS, its resident memory, or VmHWM, the peak of it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def open_store(folder: str) -> dict[str, float]:
    """Opens a store and takes batches from it: seconds to open it, seconds a batch, peak memory."""
    config, policy = subject(folder)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM is from here on
    before, began = memory("VmRSS"), time.perf_counter()
    stored = load_stored(config, policy)
    opened = time.perf_counter()
    for batch in range(1, BATCHES + 1):
        pad(groups_at(stored.groups, config.rollout.prompts_per_step, batch, config.seed), stored.shape)
    seconds = (time.perf_counter() - opened) / BATCHES
    return {"open": opened - began, "batch": seconds, "memory": memory("VmHWM") - before}


def measure(rows: int) -> dict[str, float]:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        made, began = Path(folder) / "store.db", time.perf_counter()
        make_store(made, rows)
        written = time.perf_counter() - began
        command = [sys.executable, "-m", "benchmarks.large_store", "--opens", str(made)]
        environment = os.environ | {"RECJAX_CACHE": str(Path(folder) / "cache")}
        first, again = (
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)
            for _ in range(2)
        )
        size = made.stat().st_size
    return first | {"rows": rows, "store": size, "written": written, "first": first["open"], "again": again["open"]}


def cells_of(found: list[dict[str, float]]) -> list[list[str]]:
    """The table's rows, its head among them."""
    cells = [list(HEADS.values())]
    for row in found:
        store_size, held = (f"{row[name] / 1e6:,.0f}" for name in ("store", "memory"))
        seconds = [f"{row[name]:.1f}" for name in ("written", "first", "again")]
        cells.append([f"{row['rows']:,}", store_size, *seconds, f"{row['batch'] * 1e3:.1f}", held])
    return cells


def main(_) -> None:
    """Measures, then writes the table."""
    if flags.FLAGS.opens:
        print(json.dumps(open_store(flags.FLAGS.opens)))
        return
    where = machine()
    found = [measure(int(rows)) for rows in flags.FLAGS.rows]
    about = f"{where['cpu']}, {where['cores']} cores, {where['date'][:10]}."
    tables.show(flags.FLAGS.page, "large store", about, cells_of(found))


if __name__ == "__main__":
    define_flags()
    app.run(main)
