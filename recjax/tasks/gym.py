"""Tasks from the generators of the package reasoning_gym (`pip install -e ".[reasoning_gym]"`).

Data: the generator `task.reasoning_gym.name` makes the problems with its `options`, in a worker process with fixed
hashes, because some generators iterate over sets. A seed always gives the same problems. Questions are distinct, so
train and held-out problems never overlap.
Prompt: `template` with the question, as the user's message after the system prompt below; solved examples are earlier
turns. With `chat` false the prompt is plain text, and each example is on the lines before with its answer after a
space. All questions have the same examples.
Answer: the generator's answer; empty if the generator gives none and only its scorer can judge answers.
Difficulty: settings of the problem that the generator reports, such as "num_terms 3"; None if it reports none.
Reward: `reasoning_gym`, with the parts accuracy (1 if the package's scorer gives the full score, 0 otherwise) and score
(the scorer's value). A completion's answer is the text after its last <answer>, up to </answer> if present. Without the
tag it is the whole completion, because a model imitates plain examples.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from recjax.config import ReasoningGymTask
from recjax.config.gym import check_gym
from recjax.errors import UserError
from recjax.grading.gym import generated_entries
from recjax.runtime.workers import CallFailed, Workers
from recjax.tasks.problems import Problem, chat

logger = logging.getLogger(__name__)

SYSTEM_PROMPT = "Solve the user's problem. Write your final answer, and nothing else, between <answer> and </answer>."

_LIMIT = 1_000_000  # problems per seed: the package seeds problem i with seed + i
_LABELS = 12  # most difficulty labels of a task


def gym_problems(config: ReasoningGymTask, count: int, seed: int, system_prompt: str = SYSTEM_PROMPT) -> list[Problem]:
    """Makes `count` problems, or fewer if the generator repeats questions.

    Raises:
        UserError: the package or the generator is missing, or the generator refuses its options or has too few
            different questions.
    """
    check_gym(config.name, config.options, config.template)
    needed = config.examples + count
    if needed > _LIMIT:
        raise UserError("task.reasoning_gym.problems", f"with those held out at most {_LIMIT}", value=config.problems)
    entries = _generated(config, needed, seed * _LIMIT)
    if len(entries) <= config.examples:
        raise UserError(
            "task.reasoning_gym.examples",
            f"{config.name!r} gives {len(entries)} different questions in {needed}",
            "show fewer",
            value=config.examples,
        )
    if len(entries) < needed:
        logger.info("reasoning_gym: %s gave %d different questions in %d", config.name, len(entries), needed)
    shots = entries[: config.examples]
    entries = entries[config.examples :]
    if any(shot["answer"] is None for shot in shots):
        raise UserError("task.reasoning_gym.examples", f"{config.name} has no answers to show", value=config.examples)
    examples = [(config.template.replace("{question}", shot["question"]), shot["answer"]) for shot in shots]
    problems = []
    for entry, label in zip(entries, _difficulties(entries), strict=True):
        columns = {"generator": config.name, "options": dict(config.options), "entry": entry}
        question = config.template.replace("{question}", entry["question"])
        if config.chat:
            turns = [turn for text, answer in examples for turn in (text, f"<answer>{answer}</answer>")]
            prompt = chat(system_prompt, *turns, question)
        else:
            prompt = "".join(f"{text} {answer}\n" for text, answer in examples) + question
        problems.append(Problem(prompt, entry["answer"] or "", columns=columns, difficulty=label))
    return problems


def _generated(config: ReasoningGymTask, count: int, seed: int) -> list[dict[str, Any]]:
    """Up to `count` entries with different questions, in the order in which the generator first asks them.

    Frequent questions therefore come early, where problems are held out. The held-out problems are then typical
    questions, not rare ones.
    """
    different: dict[str, dict[str, Any]] = {}
    with Workers(1, seconds=None, memory=None) as workers:
        try:
            entries = workers.call(generated_entries, config.name, dict(config.options), count, seed).result()
        except CallFailed as error:
            raise UserError("task.reasoning_gym", f"the generator {config.name} failed: {error}") from None
    for entry in entries:
        different.setdefault(entry["question"], entry)
    return list(different.values())


def _difficulties(entries: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Difficulty labels from the entries' metadata; uses only values that differ between entries."""
    metadata = [entry["metadata"] for entry in entries]
    names = dict.fromkeys(["source_dataset", "difficulty"])
    for each in metadata:
        if isinstance(each.get("difficulty"), Mapping):  # The generator samples each entry's values from these ranges.
            names |= dict.fromkeys(each["difficulty"])
    labels = [""] * len(entries)
    for name in names:
        values = [each.get(name) for each in metadata]
        if len(set(map(str, values))) > 1 and all(isinstance(value, int | float | str) for value in values):
            finer = [f"{label}, {name} {value}" for label, value in zip(labels, values, strict=True)]
            labels = finer if len(set(finer)) <= _LABELS else labels
    return [label.removeprefix(", ") or None for label in labels]
