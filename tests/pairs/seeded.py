"""Faults that reports from outside found, seeded back: python -m tests.pairs.seeded [--only NAME ...]

Each has been mended, and no relation was written for it. The command copies the tree, seeds one fault at a time, and
checks the rows of the array that have all the values that meet in the fault. It prints the relation and the row that
see the fault.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.faults.seeded import HERE, Fault, copy_of
from tests.faults.seeded import seeded as with_fault
from tests.pairs import covering

ARRAY_TESTS = "tests/pairs/test_array.py"


class Seeded(NamedTuple):
    """A fault, and the values of the table that meet in it."""

    fault: Fault
    values: tuple[str, ...]


def _seeded(breaks: str, file: str, old: str, new: str, *values: str) -> Seeded:
    return Seeded(Fault(breaks, f"recjax/{file}", old, new, (ARRAY_TESTS,)), values)


SEEDED = {
    "mixed-rows-grow-old": _seeded(
        "stored rows of the initial policy make every mixed group stale",
        "store/stored.py",
        "mix is None and completion.policy_version == 0",
        "completion.policy_version == 0",
        "mixed rows",
        "bounded replay",
    ),
    "turns-are-rewards": _seeded(
        "without an agent, the numbers of turns and rows of stored trajectories are reward parts",
        "runs/start.py",
        "            part_weights = setup.grading.reward.weights\n",
        "            weights = setup.grading.reward.weights\n"
        "            known = [name for name in weights if config.task.agent or name not in ('turns', 'rows')]\n"
        "            part_weights = {name: weights[name] for name in known}\n",
        "stored trajectories",
        "parts",
    ),
    "failed-agents-without-parts": _seeded(
        "an algorithm that reads parts accepts a reward for agents that fail, which it ignores",
        "config/schema.py",
        "if reads_parts and config.task.agent_failure_reward is not None:",
        "if not reads_parts and reads_parts:",
        "failing agent",
        "parts",
    ),
    "penalty-without-parts": _seeded(
        "an algorithm that reads parts accepts a penalty for cut completions, which it ignores",
        "config/schema.py",
        'if config.task.truncated == "penalize" and (reads_parts or reads_turns):',
        'if config.task.truncated == "penalize" and reads_parts and reads_turns:',
        "penalized",
        "parts",
    ),
    "single-completions-of-groups": _seeded(
        "some advantages of groups accept groups of one completion, from which they learn nothing",
        "config/schema.py",
        'if algorithm.baseline != "group" or algorithm.values_singletons:',
        'if algorithm.advantage.option("singleton") is None or algorithm.values_singletons:',
        "single",
        "parts",
    ),
    "replay-compares-in-groups": _seeded(
        "replay and refill drop groups from which an advantage over the batch learns",
        "config/schema.py",
        'if algorithm.baseline == "batch" or algorithm.observations is not None:',
        "if algorithm.observations is not None:",
        "batch baseline",
        "refill",
    ),
    "replay-drops-lessons": _seeded(
        "replay drops groups from which a teacher teaches",
        "config/schema.py",
        "if algorithm.needs_teacher and not task.shows_better():",
        "if algorithm.baseline is None and algorithm.needs_teacher and not task.shows_better():",
        "refill",
        "averaged teacher",
    ),
    "hybrid-teacher-shares-beginnings": _seeded(
        "a teacher with delta nets reads packed rows with shared beginnings",
        "experience/layout.py",
        "shares_beginnings = _shares_beginnings(decoder) and (teacher is None or _shares_beginnings(teacher))",
        "shares_beginnings = _shares_beginnings(decoder)",
        "hybrid teacher",
        "packed",
    ),
    "lessons-of-cut-completions": _seeded(
        "a teacher's prompt shows a cut completion as the better one, which the run masks or penalizes",
        "experience/teacher_prompts.py",
        "seen = self._judge.seen(group._replace(completions=tuple(graded))).completions",
        "seen = graded",
        "own lessons",
        "penalized",
    ),
    "first-teacher-of-the-parent": _seeded(
        "in a run that continues another, the constant teacher is the other run's average",
        "runs/start.py",
        "is_constant = config.model.average_rate == 0",
        "is_constant = False",
        "continued",
        "first teacher",
    ),
    "current-log-probs-of-an-older-policy": _seeded(
        "log-probs of the current policy are computed when a batch is sampled, and not when it is trained on",
        "sources/policy.py",
        "Arrival(self._with_stored_completions(groups, number), grades",
        "Arrival(self.completed(state, self._with_stored_completions(groups, number), step), grades",
        "foreign rows",
        "ahead",
    ),
    "weights-of-rows-alone": _seeded(
        "the metrics of weights are 1 for algorithms that weigh tokens",
        "algorithms/diagnostics.py",
        "if algorithm.token_weight is not None or algorithm.correction is not None:",
        "if algorithm.token_weight is not None and algorithm.token_weight is None:",
        "interval",
    ),
    "interval-beyond-the-bound": _seeded(
        "a sync interval above the replay's largest staleness is accepted, and no batch can be trained on",
        "config/experience.py",
        "batches = min(batches, regime.sync_interval)",
        "batches = 1",
        "interval",
        "bounded replay",
    ),
    "reference-with-the-policys-experts": _seeded(
        "the reference is scored with the experts that the policy chose",
        "training/update.py",
        "reference_logprobs = scored(context.reference_params, freely_routed(scored_part)).logprobs",
        "reference_logprobs = scored(context.reference_params, scored_part).logprobs",
        "experts",
        "reference",
    ),
    "priority-of-whole-rewards": _seeded(
        "replay by reward spread ignores reward parts and turn rewards",
        "experience/replay.py",
        "np.ptp(column) for column in self._compared(self.seen(group))",
        "np.ptp(column) for column in [rewards(self.seen(group))]",
        "ranked replay",
        "parts",
    ),
    "agents-ignore-a-mixtures-weights": _seeded(
        "in a mixture, the rewards of agents ignore the weights of their task",
        "agents/agent_grades.py",
        "weights = part_weights(task.reward_weights)",
        "weights = part_weights(self._config.task.reward_weights)",
        "mixture",
        "turns",
    ),
    "better-of-a-single-completion": _seeded(
        "lessons from a group's better completion are accepted where groups have one completion",
        "config/schema.py",
        "if rollout.group_size == 1 and config.task.shows_better():",
        "if rollout.group_size == 0 and config.task.shows_better():",
        "own lessons",
        "single",
    ),
    "record-keeps-the-first-version": _seeded(
        "a resumed run keeps the rows in its record that it samples again",
        "sources/recording.py",
        "if batch > issued or batch in in_flight:",
        "if batch in in_flight:",
        "recorded",
        "mesh",
    ),
    "frozen-seats-are-exact": _seeded(
        "a sampler that is wrong on purpose plays frozen seats with exact weights",
        "agents/agents.py",
        "frozen = [drifted(older) for older in frozen]",
        "pass",
        "frozen seat",
        "noise",
    ),
    "routing-of-the-sampler-is-lost": _seeded(
        "a teacher is scored with the experts that the policy chose",
        "training/update.py",
        "read = freely_routed(batch)",
        "read = batch",
        "experts",
        "distillation",
    ),
}


def rows_of(values: tuple[str, ...]) -> list[covering.Row]:
    """The rows of the array with all of these values, the shortest first."""
    rows = [row for row in covering.stored_array() if {*values} <= {*(covering.PLAIN | row).values()}]
    return sorted(rows, key=len)


def seen_by(tree: Path, name: str) -> str:
    """The first relation and row that see a fault; empty if none does."""
    fault, values = SEEDED[name]
    environment = os.environ | {"PYTHONPATH": str(tree), "RECJAX_TEST_PROGRAMS": str(tree.parent / "compiled")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    options = {"cwd": tree, "env": environment, "capture_output": True, "text": True}
    path = tree / fault.file
    clean = path.read_text()
    path.write_text(with_fault(clean, fault))
    try:
        tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", ARRAY_TESTS]
        if subprocess.run(tests, **options).returncode:
            return "a pair that was refused is accepted"
        for row in rows_of(values):
            command = [sys.executable, "-m", "tests.pairs", "--whole", "--row", covering.named(row)]
            command += ["--folder", str(tree.parent / "materials")]
            done = subprocess.run(command, **options)
            broken = [line for line in done.stdout.splitlines() if line.startswith("  ")]
            if done.returncode and broken:
                return f"{broken[0].strip()[:120]} ({covering.named(row)})"
    finally:
        path.write_text(clean)
    return ""


def main() -> None:
    """Reads the arguments, seeds the faults, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SEEDED, default=list(SEEDED), metavar="NAME")
    given = parser.parse_args()
    print("| fault | seen by | seconds |\n|---|---|---|", flush=True)
    count = 0
    with tempfile.TemporaryDirectory(prefix="recjax-seeded-") as folder:
        tree = Path(folder) / "tree"
        copy_of(HERE, tree)
        for name in given.only:
            began = time.monotonic()
            found = seen_by(tree, name)
            count += bool(found)
            print(
                f"| {SEEDED[name].fault.breaks} | {found or 'NOTHING'} | {time.monotonic() - began:.0f} |", flush=True
            )
    print(f"{count} of {len(given.only)} faults are seen")


if __name__ == "__main__":
    main()
