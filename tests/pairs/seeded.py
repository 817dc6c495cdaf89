"""Faults seeded into the code: python -m tests.pairs.seeded [--only NAME ...] [--reported] [--every]

SEEDED has faults that reports from outside found. Each has been mended, and no relation was written for it.
OF_RELATIONS has a fault for each other relation. The command copies the tree and seeds one fault at a time. It checks
the relation that the table names on rows of the array in which all values meet that meet in the fault, or on the
smallest such row if the fault is a relation's own. It prints the row that sees the fault.
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
from tests.pairs.features import AXES

ARRAY_TESTS = "tests/pairs/test_array.py"


PAIRS = "pairs"  # stands for the test that every pair is covered or refused
MOST_ROWS = 2  # of the array, for each fault


class Seeded(NamedTuple):
    """A fault.

    values: the values of the table that meet in it.
    relation: the relation that sees it, or PAIRS; None if none does.
    """

    fault: Fault
    values: tuple[str, ...]
    relation: str | None


def _seeded(breaks: str, file: str, old: str, new: str, *values: str, relation: str | None) -> Seeded:
    return Seeded(Fault(breaks, f"recjax/{file}", old, new, (ARRAY_TESTS,)), values, relation)


SEEDED = {
    "mixed-rows-grow-old": _seeded(
        "stored rows of the initial policy make every mixed group stale",
        "store/stored.py",
        "mix is None and completion.policy_version == 0",
        "completion.policy_version == 0",
        "mixed rows",
        "bounded replay",
        relation="mix_is_mixed",
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
        "one turn",
        relation="rewards_are_compared",
    ),
    "failed-agents-without-parts": _seeded(
        "an algorithm that reads parts accepts a reward for agents that fail, which it ignores",
        "config/schema.py",
        "if reads_parts and config.task.agent_failure_reward is not None:",
        "if not reads_parts and reads_parts:",
        "failing agent",
        "parts",
        relation=PAIRS,
    ),
    "penalty-without-parts": _seeded(
        "an algorithm that reads parts accepts a penalty for cut completions, which it ignores",
        "config/schema.py",
        'if config.task.truncated == "penalize" and (reads_parts or reads_turns):',
        'if config.task.truncated == "penalize" and reads_parts and reads_turns:',
        "penalized",
        "parts",
        relation=PAIRS,
    ),
    "single-completions-of-groups": _seeded(
        "some advantages of groups accept groups of one completion, from which they learn nothing",
        "config/schema.py",
        'if algorithm.baseline != "group" or algorithm.values_singletons or algorithm.has_bonus:',
        'if algorithm.advantage.option("singleton") is None or algorithm.values_singletons:',
        "single",
        "parts",
        relation=PAIRS,
    ),
    "replay-compares-in-groups": _seeded(
        "replay and refill drop groups from which an advantage over the batch learns",
        "config/schema.py",
        'if algorithm.baseline == "batch" or algorithm.observations is not None:',
        "if algorithm.observations is not None:",
        "batch baseline",
        "refill",
        relation=PAIRS,
    ),
    "replay-drops-lessons": _seeded(
        "replay drops groups from which a teacher teaches",
        "config/schema.py",
        "if algorithm.needs_teacher and not task.shows_better():",
        "if algorithm.baseline is None and algorithm.needs_teacher and not task.shows_better():",
        "refill",
        "averaged teacher",
        relation=PAIRS,
    ),
    "hybrid-teacher-shares-beginnings": _seeded(
        "a teacher with delta nets reads packed rows with shared beginnings",
        "experience/layout.py",
        "shares_beginnings = _shares_beginnings(decoder) and (teacher is None or _shares_beginnings(teacher))",
        "shares_beginnings = _shares_beginnings(decoder)",
        "hybrid teacher",
        "packed",
        relation="layouts_agree",
    ),
    "lessons-of-cut-completions": _seeded(
        "a teacher's prompt shows a cut completion as the better one, which the run masks or penalizes",
        "experience/teacher_prompts.py",
        "seen = self._judge.seen(group._replace(completions=tuple(graded))).completions",
        "seen = graded",
        "own lessons",
        "penalized",
        relation=None,
    ),
    "first-teacher-of-the-parent": _seeded(
        "in a run that continues another, the constant teacher is the other run's average",
        "runs/start.py",
        "is_constant = config.model.average_rate == 0",
        "is_constant = False",
        "continued",
        "first teacher",
        relation="other_models_are_those_of_the_page",
    ),
    "current-log-probs-of-an-older-policy": _seeded(
        "log-probs of the current policy are computed when a batch is sampled, and not when it is trained on",
        "sources/policy.py",
        "Arrival(self._with_stored_completions(groups, number), grades",
        "Arrival(self.completed(state, self._with_stored_completions(groups, number), step), grades",
        "foreign rows",
        "ahead",
        relation="fresh_ratios_are_one",
    ),
    "weights-of-rows-alone": _seeded(
        "the metrics of weights are 1 for algorithms that weigh tokens",
        "algorithms/diagnostics.py",
        "if algorithm.token_weight is not None or algorithm.correction is not None:",
        "if algorithm.token_weight is not None and algorithm.token_weight is None:",
        "interval",
        relation=None,
    ),
    "interval-beyond-the-bound": _seeded(
        "a sync interval above the replay's largest staleness is accepted, and no batch can be trained on",
        "config/experience.py",
        "batches = min(batches, regime.sync_interval)",
        "batches = 1",
        "interval",
        "bounded replay",
        relation=PAIRS,
    ),
    "reference-with-the-policys-experts": _seeded(
        "the reference is scored with the experts that the policy chose",
        "training/update.py",
        "reference_logprobs = scored(context.reference_params, freely_routed(scored_part)).logprobs",
        "reference_logprobs = scored(context.reference_params, scored_part).logprobs",
        "experts",
        "reference",
        relation="other_models_are_those_of_the_page",
    ),
    "priority-of-whole-rewards": _seeded(
        "replay by reward spread ignores reward parts and turn rewards",
        "experience/replay.py",
        "np.ptp(column) for column in self._compared(self.seen(group))",
        "np.ptp(column) for column in [rewards(self.seen(group))]",
        "ranked replay",
        "parts",
        relation=None,
    ),
    "agents-ignore-a-mixtures-weights": _seeded(
        "in a mixture, the rewards of agents ignore the weights of their task",
        "agents/agent_grades.py",
        "weights = part_weights(task.reward_weights)",
        "weights = part_weights(self._config.task.reward_weights)",
        "mixture",
        "turns",
        relation="has_an_effect",
    ),
    "better-of-a-single-completion": _seeded(
        "lessons from a group's better completion are accepted where groups have one completion",
        "config/schema.py",
        "if rollout.group_size == 1 and config.task.shows_better():",
        "if rollout.group_size == 0 and config.task.shows_better():",
        "own lessons",
        "single",
        relation=PAIRS,
    ),
    "record-keeps-the-first-version": _seeded(
        "a resumed run keeps the rows in its record that it samples again",
        "sources/recording.py",
        "if batch > issued or batch in in_flight:",
        "if batch in in_flight:",
        "recorded",
        "mesh",
        relation="resumed_elsewhere",
    ),
    "frozen-seats-are-exact": _seeded(
        "a sampler that is wrong on purpose plays frozen seats with exact weights",
        "agents/agents.py",
        "frozen = [drifted(older) for older in frozen]",
        "pass",
        "frozen seat",
        "noise",
        relation=None,
    ),
    "routing-of-the-sampler-is-lost": _seeded(
        "a teacher is scored with the experts that the policy chose",
        "training/update.py",
        "read = freely_routed(batch)",
        "read = batch",
        "experts",
        "distillation",
        relation=None,
    ),
}
# One small fault for each relation that sees none of these, so that no relation is trusted that never fails.
OF_RELATIONS = {
    "rows-of-a-completion-count": _seeded(
        "the metric of staleness counts each row of a completion",
        "logs/metrics.py",
        "versions = batch.policy_version[completions & (batch.policy_version != FOREIGN)]",
        "versions = batch.policy_version[batch.completion_mask.any(-1) & (batch.policy_version != FOREIGN)]",
        "cut contexts",
        relation="metrics_add_up",
    ),
    "late-completions-are-not-counted": _seeded(
        "completions that miss their deadline are counted nowhere",
        "experience/queue.py",
        'counts["rows_without_reward"] += len(late.due)',
        "pass",
        "deadline",
        relation="nothing_is_lost",
    ),
    "record-lacks-a-group": _seeded(
        "the last group of a batch is not recorded",
        "sources/recording.py",
        "records = self._setup.sampler.records(groups)",
        "records = self._setup.sampler.records(groups[:-1])",
        "recorded",
        relation="record_is_what_was_trained_on",
    ),
    "record-ends-every-completion": _seeded(
        "the record takes completions that were cut off for whole ones",
        "sources/sampling.py",
        "        records = records_of(groups, tokenizer_name(",
        "        whole = lambda group: tuple(one._replace(truncated=False) for one in group.completions)\n"
        "        groups = [group._replace(completions=whole(group)) for group in groups]\n"
        "        records = records_of(groups, tokenizer_name(",
        "recorded",
        "masked",
        relation="record_gives_the_same_gradient",
    ),
    "no-learning-rate": _seeded(
        "the learning rate is 0",
        "training/learner.py",
        "return latest, following",
        "return latest, 0 * following",
        "on policy",
        relation="something_is_learned",
    ),
    "update-forgets-the-temperature": _seeded(
        "the update scores tokens as if they had been sampled at temperature 1",
        "training/update.py",
        "sampling=config.rollout.sampling(),",
        "sampling=config.rollout.sampling()._replace(temperature=1.0),",
        "cool",
        relation="fresh_ratios_are_one",
    ),
    "sampler-names-an-older-version": _seeded(
        "the sampler names the version before that of its weights",
        "sources/local.py",
        "self._version = version",
        "self._version = max(version - 1, 0)",
        "replay",
        relation="rows_are_of_the_weights_that_they_name",
    ),
    "stored-rows-keep-versions": _seeded(
        "stored rows keep the policy versions of the run that recorded them",
        "store/stored.py",
        "0 if is_initial else None",
        "completion.policy_version",
        "stored",
        relation="versions_are_those_promised",
    ),
    "keys-of-the-clock": _seeded(
        "the clock decides what agents sample",
        "sources/sampling.py",
        "key = batch_key(config.seed, number)",
        'key = batch_key(config.seed + __import__("time").time_ns() % 997, number)',
        "turns",
        relation="same_seed_twice",
    ),
    "uses-are-not-restored": _seeded(
        "a resumed run forgets how often replay has used each group",
        "experience/queue.py",
        "ready.append(Entry(group, *values))",
        "ready.append(Entry(group, values[0], 0))",
        "replay",
        relation="killed_and_resumed",
    ),
    "rows-of-the-first-process": _seeded(
        "only the first of several processes has the rows of its devices",
        "models/placement.py",
        "return jax.tree.map(lambda x: put_array(np.asarray(x), ROWS), tree)",
        "return jax.tree.map(lambda x: put_array(np.asarray(x) * (jax.process_index() == 0), ROWS), tree)",
        "interval",
        "mesh",
        relation="two_processes_agree",
    ),
    "staleness-of-one-update": _seeded(
        "the dry run foretells the staleness of one update of each batch",
        "planning/dry_run.py",
        "expected_staleness(step, regime, config.training.updates)",
        "expected_staleness(step, regime)",
        "two passes",
        relation="dry_run_agrees",
    ),
    "first-row-does-not-count": _seeded(
        "the first row of a batch does not count in the sums of its group",
        "algorithms/groups.py",
        "jax.ops.segment_sum(values, index, num_segments=index.shape[0])[index]",
        "jax.ops.segment_sum(values.at[0].set(0), index, num_segments=index.shape[0])[index]",
        "sequence ratio",
        relation="order_of_rows_is_nothing",
    ),
}
ALL = SEEDED | OF_RELATIONS


def rows_of(values: tuple[str, ...]) -> list[covering.Row]:
    """The rows of the array with all of these values, the shortest first."""
    rows = [row for row in covering.stored_array() if {*values} <= {*(covering.PLAIN | row).values()}]
    return sorted(rows, key=len)


def smallest_row(values: tuple[str, ...]) -> covering.Row:
    """The smallest row with all of these values."""
    axes = {value: axis for axis, names in AXES.items() for value in names}
    return covering.row_with((axes[value], value) for value in values)


def seen_by(tree: Path, name: str, every: bool) -> str:
    """The relation and row that see a fault; empty if none does.

    Args:
        every: check all relations on all rows of the array that have the fault's values.
    """
    fault, values, relation = ALL[name]
    environment = os.environ | {"PYTHONPATH": str(tree), "RECJAX_TEST_PROGRAMS": str(tree.parent / "compiled")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    options = {"cwd": tree, "env": environment, "capture_output": True, "text": True}
    path = tree / fault.file
    clean = path.read_text()
    path.write_text(with_fault(clean, fault))
    try:
        if every or relation == PAIRS:
            tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", ARRAY_TESTS]
            if subprocess.run(tests, **options).returncode:
                return "a pair that was refused is accepted"
        rows = rows_of(values)
        if not every:
            rows = [smallest_row(values)] if name in OF_RELATIONS else rows[:MOST_ROWS]
        command = [sys.executable, "-m", "tests.pairs", "--whole", "--folder", str(tree.parent / "materials")]
        if not every:
            command += ["--only", relation]
        for row in rows:
            done = subprocess.run([*command, "--row", covering.named(row)], **options)
            broken = [line for line in done.stdout.splitlines() if line.startswith("  ")]
            if done.returncode and broken:
                return f"{broken[0].strip()[:120]} ({covering.named(row)})"
    finally:
        path.write_text(clean)
    return ""


def main() -> None:
    """Reads the arguments, seeds the faults, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(ALL), metavar="NAME")
    parser.add_argument("--reported", action="store_true", help="only faults that reports found")
    parser.add_argument("--every", action="store_true", help="check all relations, on all rows with the fault's values")
    given = parser.parse_args()
    print("| fault | seen by | seconds |\n|---|---|---|", flush=True)
    count = 0
    names = [name for name in given.only if name in SEEDED or not given.reported]
    with tempfile.TemporaryDirectory(prefix="recjax-seeded-") as folder:
        tree = Path(folder) / "tree"
        copy_of(HERE, tree)
        for name in names:
            began = time.monotonic()
            found = ""
            if given.every or ALL[name].relation is not None:
                found = seen_by(tree, name, given.every)
            count += bool(found)
            print(f"| {ALL[name].fault.breaks} | {found or 'NOTHING'} | {time.monotonic() - began:.0f} |", flush=True)
    print(f"{count} of {len(names)} faults are seen")


if __name__ == "__main__":
    main()
