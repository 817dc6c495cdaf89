"""The generators of the package reasoning_gym (`pip install recjax[reasoning_gym]`), each of which is a task.

Data: made by the generator `task.reasoning_gym.name` with its `options`, in a process of its own with fixed hashes, as
some generators walk through sets. The same seed gives the same problems; no question comes twice, so none that is
trained on is held out.
Prompt: `template` with the question, as the user's message after the system prompt below, solved examples as earlier
turns; with `chat` false as plain text, each example on the lines before with its answer after a space. All questions
have the same examples.
Answer: the generator's; empty where it has none and only its scorer knows.
Difficulty: what the generator says of the single problem, such as "num_terms 3"; None where it says nothing.
Reward: `reasoning_gym`, parts accuracy, 1 where the package's own scorer gives the full score and 0 otherwise, and
score, what it gives. A completion's answer is what follows its last <answer>, up to </answer> if that comes; without
the tag it is the whole completion, since a model shown plain examples answers as they do.
"""

import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recjax.config_tasks import ReasoningGymTask
from recjax.tasks.grading.gym_package import check_gym, generator
from recjax.tasks.problems import Problem, chat

logger = logging.getLogger(__name__)

SYSTEM_PROMPT = "Solve the user's problem. Write your final answer, and nothing else, between <answer> and </answer>."

_LIMIT = 1_000_000  # problems of one seed: the package numbers them on from the seed
_LABELS = 12  # difficulties of one task at most


def gym_problems(
    config: ReasoningGymTask, held_out: int, seed: int, system_prompt: str = SYSTEM_PROMPT
) -> tuple[list[Problem], list[Problem]]:
    """Problems to train on, fewer than asked for where the generator repeats itself, and `held_out` others.

    Raises:
        ValueError: the package is missing, has no such generator, or the generator refuses its options or has too few
            different questions.
    """
    check_gym(config.name, config.options, config.template)
    asked = held_out + config.examples + config.problems
    if asked > _LIMIT:
        raise ValueError(f"task.reasoning_gym.problems = {config.problems}: with those held out at most {_LIMIT}")
    entries = _generated(config, asked, seed * _LIMIT)
    if len(entries) <= held_out + config.examples:
        raise ValueError(
            f"evaluation.problems = {held_out}: task.reasoning_gym {config.name!r} gives {len(entries)} different"
            f" questions in {asked}; hold out fewer"
        )
    if len(entries) < asked:
        logger.info("reasoning_gym: %s gave %d different questions in %d", config.name, len(entries), asked)
    shots, entries = entries[: config.examples], entries[config.examples :]
    if any(shot["answer"] is None for shot in shots):
        raise ValueError(f"task.reasoning_gym.examples = {config.examples}: {config.name} has no answers to show")
    labels = _difficulties(entries)
    problems = [
        Problem(
            _prompt(config, shots, entry, system_prompt),
            entry["answer"] or "",
            columns={"generator": config.name, "options": dict(config.options), "entry": entry},
            difficulty=label,
        )
        for entry, label in zip(entries, labels, strict=True)
    ]
    return problems[held_out:], problems[:held_out]


def _generated(config: ReasoningGymTask, count: int, seed: int) -> list[dict[str, Any]]:
    """Up to `count` entries with different questions, in the order in which the generator first asks them.

    Frequent questions so stand early: among those held out, which are then as the generator asks and not what it rarely
    does.
    """
    with tempfile.TemporaryDirectory() as folder:
        order, made = Path(folder) / "order", Path(folder) / "made"
        order.write_text(json.dumps([config.name, config.options, count, seed]), encoding="utf-8")
        _in_a_process(str(order), str(made))
        entries = pickle.loads(made.read_bytes())
    different: dict[str, dict[str, Any]] = {}
    for entry in entries:
        different.setdefault(entry["question"], entry)
    return list(different.values())


def _in_a_process(order: str, made: str) -> None:
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "recjax.tasks.gym", order, made]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"task.reasoning_gym: the generator failed:\n{done.stderr[-2000:]}")


def _make(order: str, made: str) -> None:
    name, options, count, seed = json.loads(Path(order).read_text(encoding="utf-8"))
    data = generator(name, options, size=count, seed=seed)
    Path(made).write_bytes(pickle.dumps([data[index] for index in range(count)]))


def _difficulties(entries: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """What the entries say of their difficulty, where it differs from one to another."""
    metadata = [entry["metadata"] for entry in entries]
    names = dict.fromkeys(["source_dataset", "difficulty"])
    for each in metadata:
        if isinstance(each.get("difficulty"), Mapping):  # the ranges that each entry's own values are sampled from
            names |= dict.fromkeys(each["difficulty"])
    labels = [""] * len(entries)
    for name in names:
        values = [each.get(name) for each in metadata]
        if len(set(map(str, values))) > 1 and all(isinstance(value, int | float | str) for value in values):
            finer = [f"{label}, {name} {value}" for label, value in zip(labels, values, strict=True)]
            labels = finer if len(set(finer)) <= _LABELS else labels
    return [label.removeprefix(", ") or None for label in labels]


def _prompt(
    config: ReasoningGymTask, shots: Sequence[Mapping], entry: Mapping, system_prompt: str
) -> str | list[dict[str, str]]:
    asked = [config.template.replace("{question}", each["question"]) for each in (*shots, entry)]
    if not config.chat:
        return "".join(f"{text} {shot['answer']}\n" for text, shot in zip(asked[:-1], shots, strict=True)) + asked[-1]
    answers = [f"<answer>{shot['answer']}</answer>" for shot in shots]
    *system, question = chat(system_prompt, asked[-1])
    turns = [
        {"role": role, "content": text}
        for pair in zip(asked[:-1], answers, strict=True)
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return [*system, *turns, question]


if __name__ == "__main__":
    _make(*sys.argv[1:])
