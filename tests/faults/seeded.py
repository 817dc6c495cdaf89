"""Seeded faults, and which tests see each: python -m tests.faults.seeded [--only NAME ...] [--every]

The command copies the tree into a temporary folder, seeds one fault at a time there, runs the tests that the table
names for it, and prints which test failed. At the end it runs those tests without a fault. It exits with 1 if no test
sees a fault, if one of the tests fails without it, or if the text to change is not in its file exactly once.

A fault is a change of behavior. `breaks` describes it without the names of the code: whoever rewrites that code states
the same fault again in `file`, `old` and `new`, and the tests that take the place of today's in `tests`.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parents[2]
COPIED = ("recjax", "tests", "experiments", "benchmarks", "docs", "launch", "pyproject.toml", "README.md", "setup.py")


class Fault(NamedTuple):
    """A small change of the source.

    breaks: what goes wrong, without the names of today's code.
    file: under the repository's root.
    old: text that is in the file exactly once.
    new: the text in its place.
    tests: files or node ids for pytest, those most likely to see the fault first.
    """

    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_QUEUE, _REPLAY = "tests/experience/test_queue.py", "tests/experience/test_replay.py"
_LOOP, _FED = "tests/training/test_loop.py", "tests/training/test_fed_training.py"
_RESUME = "tests/training/test_resume.py::test_kill_and_resume_equals_straight_through"
_KEYS = f"{_LOOP}::test_runs_of_other_seeds_differ_and_no_random_key_is_used_twice"
_ENGINE, _SAMPLER = "tests/rollout/test_engine.py", "tests/rollout/test_sampler.py"

FAULTS = {
    # --- Loop.
    "loop-stop-without-checkpoint": Fault(
        "a stop request ends the run without a checkpoint of its step",
        "recjax/training/loop.py",
        "if run.manager.latest_step() != state.step:",
        "if False:",
        (f"{_LOOP}::test_a_run_that_is_asked_to_stop_finishes_its_step_and_goes_on_from_its_checkpoint",),
    ),
    "loop-last-step-not-evaluated": Fault(
        "the last step is evaluated only where evaluation.every divides it",
        "recjax/training/loop.py",
        "evaluates = step == last or (",
        "evaluates = bool(",
        (f"{_LOOP}::test_the_run_folder_holds_what_the_readme_says",),
    ),
    "loop-same-drops-every-step": Fault(
        "an algorithm that drops completions at random makes the same choice in every step",
        "recjax/training/learner.py",
        "jax.random.fold_in(self._drop_key, run.batch_of(step))",
        "jax.random.fold_in(self._drop_key, 1)",
        (_KEYS,),
    ),
    # --- Rounds.
    "rounds-version-off-by-one": Fault(
        "the sampler's weights are labeled one optimizer step newer than they are",
        "recjax/training/loop.py",
        "_replace(behavior_params=None, version=step - 1)",
        "_replace(behavior_params=None, version=step)",
        (f"{_LOOP}::test_at_staleness_zero_the_ratio_is_one",),
    ),
    "rounds-sampler-not-frozen": Fault(
        "between two syncs the sampler uses the trained weights instead of its copy",
        "recjax/training/loop.py",
        "schedule.is_sync(run.batch_of(step) + 1, run.config.regime)",
        "schedule.is_sync(run.batch_of(step), run.config.regime)",
        (f"{_LOOP}::test_the_sampler_uses_the_weights_of_its_version",),
    ),
    "rounds-batches-share-keys": Fault(
        "consecutive batches sample their completions with the same random keys",
        "recjax/training/sources.py",
        "[number % _TOGETHER]",
        "[0]",
        (_KEYS,),
    ),
    "rounds-recorded-twice": Fault(
        "a resumed run records a batch that the record already holds",
        "recjax/training/loop.py",
        'if records and not store.numbers("id", [records[0].completion.id]):',
        "if records:",
        (f"{_FED}::test_what_is_drawn_is_recorded_once_and_reads_as_a_store",),
    ),
    # --- Queue.
    "queue-deadline-off-by-one": Fault(
        "a group waits one round longer than its deadline",
        "recjax/experience/queue.py",
        "waited >= settings.late.deadline",
        "waited > settings.late.deadline",
        (_QUEUE,),
    ),
    "queue-reward-to-wrong-completion": Fault(
        "the rewards of a batch are given to its completions in reverse order",
        "recjax/experience/group.py",
        "zip(lacking, grades, strict=True)",
        "zip(lacking, grades[::-1], strict=True)",
        (_QUEUE,),
    ),
    "queue-newest-first": Fault(
        "where the oldest weights go first, a step takes the newest",
        "recjax/experience/queue.py",
        "or 0)[:count]",
        "or 0)[-count:]",
        (_QUEUE,),
    ),
    "queue-late-rewards-not-counted": Fault(
        "rewards that arrive after their group has left are not counted",
        "recjax/experience/queue.py",
        '"rewards_too_late" if entry.round is None else "rows_without_reward"',
        '"rows_without_reward"',
        (_QUEUE,),
    ),
    # --- Replay.
    "replay-counts-every-use": Fault(
        "each step counts as a use of every group in the buffer, also of groups it did not take",
        "recjax/experience/queue.py",
        "used=entry.used + (index in chosen)",
        "used=entry.used + 1",
        (_REPLAY,),
    ),
    "replay-staleness-off-by-one": Fault(
        "a group is trained on one optimizer step after the limit of staleness",
        "recjax/experience/replay.py",
        "staleness(entry.group, step) <= limits.max_staleness",
        "staleness(entry.group, step) <= limits.max_staleness + 1",
        (_REPLAY,),
    ),
    "replay-half-life": Fault(
        "a group's chance falls to 1/e, not to a half, in one half-life",
        "recjax/experience/replay.py",
        "-np.log(2.0) * (step - entry.added)",
        "-1.0 * (step - entry.added)",
        (_REPLAY,),
    ),
    # --- Checkpoint and resume.
    "checkpoint-drops-sampler": Fault(
        "a checkpoint lacks the sampler's own copy of the weights",
        "recjax/training/checkpoint.py",
        "if state.behavior_params is not None:",
        "if False:",
        (f"{_RESUME}[interval]",),
    ),
    "checkpoint-drops-uses": Fault(
        "a checkpoint forgets how often each group in the buffer was trained on",
        "recjax/experience/queue.py",
        "[entry.added, entry.used]",
        "[entry.added, 0]",
        (_REPLAY,),
    ),
    "checkpoint-repeats-batch": Fault(
        "a resumed run samples the last batch before the checkpoint again",
        "recjax/experience/queue.py",
        'Counter(plain["counts"]), plain',
        'Counter(plain["counts"]) - Counter(batches=1), plain',
        (f"{_RESUME}[on policy]",),
    ),
    "checkpoint-keeps-oldest": Fault(
        "training.keep_checkpoints keeps the oldest checkpoints and deletes the newest",
        "recjax/training/checkpoint.py",
        "sorted(manager.all_steps())[: -training.keep_checkpoints]",
        "sorted(manager.all_steps())[training.keep_checkpoints :]",
        ("tests/training/test_resume.py::test_the_newest_checkpoints_are_kept",),
    ),
    # --- Store.
    "store-loses-mask": Fault(
        "the store marks every token of a completion as sampled, also those of tools and of users",
        "recjax/experience/store.py",
        "joined((row.mask for row in rows)",
        "joined((row.mask | True for row in rows)",
        ("tests/rollout/test_trajectory.py", "tests/experience/test_queue.py"),
    ),
    "store-accepts-double-ids": Fault(
        "the store accepts a completion whose id it already holds",
        "recjax/experience/store.py",
        'sql.Column("id", sql.Text, nullable=False, unique=True)',
        'sql.Column("id", sql.Text, nullable=False)',
        ("tests/experience/test_store.py",),
    ),
    # --- Following.
    "following-takes-again": Fault(
        "a resumed run trains again on a completion of a followed store",
        "recjax/experience/following.py",
        'else self._resumed.get("read", 0)',
        "else 0",
        ("tests/experience/test_following.py",),
    ),
    # --- Engine.
    "engine-reuses-key": Fault(
        "all tokens of one decoding round of a completion are sampled with the same random key",
        "recjax/rollout/decoding.py",
        "_step_keys(rows.keys, rows.counts + time)",
        "_step_keys(rows.keys, rows.counts)",
        (_SAMPLER, _ENGINE),
    ),
    "engine-stale-cache": Fault(
        "after new weights a request continues from keys and values of the old weights",
        "recjax/rollout/engine.py",
        "self._slots.columns.current[:] = False",
        "self._slots.columns.current[:] = True",
        (f"{_ENGINE}::test_what_a_slot_holds_of_other_weights_is_not_gone_on_from", _ENGINE),
    ),
    # --- Batch and layout.
    "batch-mask-off-by-one": Fault(
        "the mask of sampled tokens begins one token too late in each row",
        "recjax/experience/batch.py",
        "*(row.mask for *_, row in rows)",
        "*(np.roll(row.mask, 1) for *_, row in rows)",
        ("tests/rollout/test_trajectory.py",),
    ),
    "layout-shares-another-prefix": Fault(
        "packed sequences share a prefix of which only the first half is common to them",
        "recjax/experience/packing.py",
        "(len(common) if common.all() else common.argmin()) - 1",
        "(len(common) if common.all() else min(2 * common.argmin(), len(common))) - 1",
        ("tests/training/test_packing.py",),
    ),
    # --- Update.
    "update-last-micro-batch-only": Fault(
        "the gradient is that of the last micro-batch, not the sum over all",
        "recjax/experience/layout.py",
        "return jax.tree.map(jnp.add, sums, more), jax.tree.map(with_part, seen, values)",
        "return more, jax.tree.map(with_part, seen, values)",
        ("tests/training/test_update.py",),
    ),
    "update-reference-is-policy": Fault(
        "the KL to the initial policy is taken to the policy being trained, so it is always zero",
        "recjax/training/update.py",
        "scored(reference_params)[0]",
        "scored(params)[0]",
        (f"{_LOOP}::test_reference_kl_is_zero_at_the_start_and_read_later",),
    ),
}


def seeded(text: str, fault: Fault) -> str:
    """The text of the fault's file with the fault in it.

    Raises:
        ValueError: the text to change is not there exactly once, or the fault leaves no valid Python.
    """
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.file} holds {count} times, not once: {fault.old!r}; state the fault again")
    text = text.replace(fault.old, fault.new)
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{fault.file} is no valid Python with {fault.new!r}: {error}") from error
    return text


def failures(tree: Path, tests: Sequence[str], every: bool = False) -> list[str]:
    """Ids of the tests that fail.

    Args:
        every: continue after the first failure.
    Raises:
        RuntimeError: pytest could not run the tests.
    """
    environment = os.environ | {"PYTHONPATH": str(tree), "RECJAX_TEST_PROGRAMS": str(tree.parent / "compiled")}
    # Python would take the bytecode of a fault of equal length that was put in within the same second.
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-p", "no:cacheprovider", "-rfE", "--no-header", "--tb=no", *([] if every else ["-x"])]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) and not failed:
        output = done.stdout[-2000:] + done.stderr
        raise RuntimeError(f"pytest {' '.join(tests)}: exit status {done.returncode}\n{output}")
    return failed


def copy_of(root: Path, tree: Path) -> None:
    """Copies the parts of the repository that tests read."""
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "site"))
        elif (root / name).exists():
            tree.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name)


def seen_by(tree: Path, faults: Iterable[str], every: bool) -> Iterable[tuple[str, list[str], float]]:
    """Seeds one fault after the other; yields its name, the tests that see it, and the seconds they took."""
    for name in faults:
        fault, began = FAULTS[name], time.monotonic()
        path = tree / fault.file
        clean = path.read_text()
        path.write_text(seeded(clean, fault))
        try:
            yield name, failures(tree, fault.tests, every), time.monotonic() - began
        finally:
            path.write_text(clean)


def main() -> None:
    """Reads the arguments, seeds the faults, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME")
    parser.add_argument("--every", action="store_true", help="list every test that sees a fault, not the first one")
    given = parser.parse_args()
    for name in given.only:
        seeded((HERE / FAULTS[name].file).read_text(), FAULTS[name])
    with tempfile.TemporaryDirectory(prefix="recjax-seeded-") as folder:
        tree = Path(folder) / "tree"
        copy_of(HERE, tree)
        print("| fault | breaks | seen by | seconds |\n|---|---|---|---|", flush=True)
        seen: dict[str, list[str]] = {}
        for name, found, seconds in seen_by(tree, given.only, given.every):
            seen[name] = found
            print(f"| {name} | {FAULTS[name].breaks} | {', '.join(found) or 'NO TEST'} | {seconds:.0f} |", flush=True)
        tests = list(dict.fromkeys(test for found in seen.values() for test in found))
        broken = failures(tree, tests, every=True) if tests else []
    for test in broken:
        print(f"fails without a fault: {test}")
    sys.exit(bool(broken) or not all(seen.values()))


if __name__ == "__main__":
    main()
