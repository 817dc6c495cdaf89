"""The cost of an experience store by its size: seconds to write, open, import and regrade, seconds a batch, memory.

    python -m benchmarks.large_store [--rows 10000,200000,1000000] [--database URL] [--page benchmarks/RESULTS.md]
    python -m benchmarks.large_store --trees OTHER,. [--turns 3]

Each store is synthetic: groups of 8 rows, of 16 to 48 tokens with log-probs, written 10,000 rows at a time. A process
of its own does each work: it writes the store; opens it as `python -m recjax.train` does, and takes batches of 16
groups; opens it again; imports the same number of texts from JSON Lines into another store; grades the rows anew.
Memory is the peak of resident memory while the first process opens the store and takes batches, minus its memory
before. With --trees, each work runs with the package of each folder in turn, so that other load meets all of them.
With --database, the stores are tables of PostgreSQL, whose server should have no other work. Linux.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from benchmarks import tables
from benchmarks.run import machine
from recjax.config import Config, load_config
from recjax.experience.batch import pad
from recjax.experience.group import Completion, Grade, Group, Row
from recjax.hub.policy import Policy, policy_alone
from recjax.import_experience import import_files
from recjax.runs.regrading import known_problems, regraded
from recjax.runtime.console import progress_bar
from recjax.sources.drawing import groups_at
from recjax.store.foreign import Columns
from recjax.store.store import Record, Store  # both from here, as other checkouts have no file of records
from recjax.store.stored import load_stored
from recjax.store.tokenize import tokenizer_name
from recjax.training.mesh import make_mesh

try:
    from recjax.runs.prepare import prepare
except ImportError:  # where other checkouts have it
    from recjax.training.run import prepare

CONFIG = Path(__file__).parent.parent / "experiments" / "offline_from_file.yaml"
PART, GROUP, BATCHES = 10_000, 8, 200
WORKS = ("write", "open", "again", "import", "regrade")
HEADS = {
    "tree": "package",
    "rows": "rows",
    "size": "store (MB)",
    "write": "writing (s)",
    "open": "first opening (s)",
    "again": "opening again (s)",
    "batch": "a batch (ms)",
    "memory": "memory (MB)",
    "import": "import (s)",
    "import_memory": "its memory (MB)",
    "regrade": "regrading (s)",
}


def define_flags() -> None:
    """The command's flags, defined when it is run and not when it is imported."""
    flags.DEFINE_list("rows", ["10000", "200000", "1000000"], "Sizes of the stores.")
    flags.DEFINE_list("trees", ["."], "Folders of checkouts whose packages do each work in turn.")
    flags.DEFINE_list("works", list(WORKS), f"Works to measure, of {', '.join(WORKS)}; opening needs writing.")
    flags.DEFINE_integer("turns", 1, "Number of times; the table has the fastest.")
    flags.DEFINE_string("database", None, "URL of an empty database of PostgreSQL; default: files of SQLite.")
    flags.DEFINE_string("page", None, "Markdown page whose table to replace; default: the table is printed.")
    flags.DEFINE_string("does", None, "Used by the command itself: the work of this process.")
    flags.DEFINE_string("store", None, "Used by the command itself: the store of this process.")


def subject(place: str) -> tuple[Config, Policy]:
    """The config that reads the store, and its policy."""
    config = load_config(CONFIG, [f"experience.store={place}", "warm_start=null"])
    return config, policy_alone(config, "+0123456789=")


def make_store(path: str | Path, rows: int, logprobs: bool = True) -> None:
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


def open_store(place: str) -> dict[str, float]:
    """Opens a store and takes batches from it."""
    config, policy = subject(place)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM is from here on
    before = memory("VmRSS")
    began, used = time.perf_counter(), time.process_time()
    stored = load_stored(config, policy)
    opened, used_opening = time.perf_counter(), time.process_time()
    for batch in range(1, BATCHES + 1):
        pad(groups_at(stored.groups, config.rollout.prompts_per_step, batch, config.seed), stored.shape)
    return {
        "open": opened - began,
        "open_cpu": used_opening - used,
        "batch": (time.perf_counter() - opened) / BATCHES,
        "batch_cpu": (time.process_time() - used_opening) / BATCHES,
        "memory": memory("VmHWM") - before,
    }


def import_texts(place: str, rows: int) -> dict[str, float]:
    """Imports texts with rewards, as `python -m recjax.import_experience` does, into a store of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.jsonl"
        with file.open("w", encoding="utf-8") as lines:
            for row in range(rows):
                values = {
                    "prompt": f"{row // GROUP}+1=",
                    "completion": f"{row % 97} because it is so",
                    "reward": row % 2,
                }
                lines.write(json.dumps(values) + "\n")
        gc.disable()  # as the command does
        began, used, before = time.perf_counter(), time.process_time(), memory("VmRSS")
        import_files([file], place if "://" in place else Path(folder) / "imported.db", Columns())
        return {
            "import": time.perf_counter() - began,
            "import_cpu": time.process_time() - used,
            "import_memory": memory("VmHWM") - before,
        }


def regrade(place: str) -> dict[str, float]:
    """Grades all rows as a run with `experience.regrade` does before its first step."""
    with tempfile.TemporaryDirectory() as folder:
        config, _policy = subject(place)
        options = [f"experience.store={place}", "warm_start=null", "experience.regrade=true", f"output={folder}"]
        config = load_config(CONFIG, options)
        # A run without parameters, which only training needs.
        with jax.set_mesh(make_mesh(config.mesh)):
            run, _ = prepare(config, lambda _, policy, __: (policy, {}))
            began, used = time.perf_counter(), time.process_time()
            regraded(run, known_problems(run))
            return {"regrade": time.perf_counter() - began, "regrade_cpu": time.process_time() - used}


def measure(rows: int, trees: list[str], turns: int, works: list[str], database: str | None) -> list[dict[str, float]]:
    """The table's rows for a size, one for each tree."""
    best: dict[str, dict[str, float]] = {tree: {} for tree in trees}
    for turn in range(turns):
        with tempfile.TemporaryDirectory() as folder:
            for work in works:
                for tree in trees if turn % 2 == 0 else trees[::-1]:
                    name = f"s{trees.index(tree)}_{turn}_{rows}"
                    if database and work in ("write", "import"):
                        new = name if work == "write" else f"{name}_imported"
                        subprocess.run(["createdb", f"--maintenance-db={database}", new], check=True)
                    place = f"{database.rpartition('/')[0]}/{name}" if database else f"{folder}/{name}.db"
                    if database and work == "import":
                        place += "_imported"
                    command = [sys.executable, "-P", __file__, "--does", work, "--store", place, "--rows", str(rows)]
                    environment = {"PYTHONPATH": str(Path(tree).resolve()), "RECJAX_CACHE": f"{folder}/cache"}
                    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ | environment)
                    for key, value in json.loads(run.stdout.splitlines()[-1]).items():
                        best[tree][key] = min(value, best[tree].get(key, value))
                    if work == "write" and not database:
                        best[tree]["size"] = Path(place).stat().st_size
                    print(f"{rows} rows, {tree}: {work}: {run.stdout.decode().splitlines()[-1]}", file=sys.stderr)
    return [{"tree": tree, "rows": rows, **best[tree]} for tree in trees]


def done(work: str, place: str, rows: int) -> dict[str, float]:
    """Does a work in this process, and measures it."""
    if work in ("open", "again"):
        found = open_store(place)
        return found if work == "open" else {"again": found["open"], "again_cpu": found["open_cpu"]}
    if work == "import":
        return import_texts(place, rows)
    if work == "regrade":
        return regrade(place)
    began, used = time.perf_counter(), time.process_time()
    make_store(place, rows)
    return {"write": time.perf_counter() - began, "write_cpu": time.process_time() - used}


def cells_of(found: list[dict[str, float]]) -> list[list[str]]:
    """The table's rows, its head among them; seconds are those of the clock, then those of the processor."""
    heads = {key: head for key, head in HEADS.items() if any(key in row for row in found)}
    if len({row["tree"] for row in found}) == 1:
        del heads["tree"]
    cells = [list(heads.values())]
    for row in found:
        scales = {key: 1e3 if "(ms)" in head else 1 for key, head in heads.items() if "s)" in head}
        cells.append([])
        for key in heads:
            if key in scales:
                seconds = [row[name] * scales[key] for name in (key, f"{key}_cpu") if name in row]
                cells[-1].append(", ".join(f"{value:.1f}" for value in seconds))
            elif "(MB)" in heads[key]:
                cells[-1].append(f"{row[key] / 1e6:,.0f}" if key in row else "")
            else:
                cells[-1].append(f"{row[key]:,}" if key == "rows" else row[key])
    return cells


def main(_) -> None:
    """Measures, then writes the table."""
    rows = list(map(int, flags.FLAGS.rows))
    if flags.FLAGS.does:
        print(json.dumps(done(flags.FLAGS.does, flags.FLAGS.store, rows[0])))
        return
    where = machine()
    arguments = (flags.FLAGS.trees, flags.FLAGS.turns, flags.FLAGS.works, flags.FLAGS.database)
    found = [row for size in rows for row in measure(size, *arguments)]
    about = f"{where['cpu']}, {where['cores']} cores, {where['date'][:10]}. Seconds of the clock, of the processor."
    tables.show(flags.FLAGS.page, "large store", about, cells_of(found))


if __name__ == "__main__":
    define_flags()
    app.run(main)
