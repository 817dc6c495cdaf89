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

import contextlib
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from recjax.config import ReasoningGymTask
from recjax.tasks.grading.gym_package import check_gym, generator
from recjax.tasks.problems import Problem, chat

logger = logging.getLogger(__name__)

SYSTEM_PROMPT = "Solve the user's problem. Write your final answer, and nothing else, between <answer> and </answer>."

_LIMIT = 1_000_000  # problems of one seed: the package numbers them on from the seed
_LABELS = 12  # difficulties of one task at most


def gym_problems(config: ReasoningGymTask, count: int, seed: int, system_prompt: str = SYSTEM_PROMPT) -> list[Problem]:
    """`count` problems; fewer where the generator repeats itself.

    Raises:
        ValueError: the package is missing, has no such generator, or the generator refuses its options or has too few
            different questions.
    """
    check_gym(config.name, config.options, config.template)
    asked = config.examples + count
    if asked > _LIMIT:
        raise ValueError(f"task.reasoning_gym.problems = {config.problems}: with those held out at most {_LIMIT}")
    entries = _generated(config, asked, seed * _LIMIT)
    if len(entries) <= config.examples:
        raise ValueError(
            f"task.reasoning_gym.examples = {config.examples}: {config.name!r} gives {len(entries)} different questions"
            f" in {asked}; show fewer"
        )
    if len(entries) < asked:
        logger.info("reasoning_gym: %s gave %d different questions in %d", config.name, len(entries), asked)
    shots, entries = entries[: config.examples], entries[config.examples :]
    if any(shot["answer"] is None for shot in shots):
        raise ValueError(f"task.reasoning_gym.examples = {config.examples}: {config.name} has no answers to show")
    problems = []
    for entry, label in zip(entries, _difficulties(entries), strict=True):
        columns = {"generator": config.name, "options": dict(config.options), "entry": entry}
        prompt = _prompt(config, shots, entry, system_prompt)
        problems.append(Problem(prompt, entry["answer"] or "", columns=columns, difficulty=label))
    return problems


def _generated(config: ReasoningGymTask, count: int, seed: int) -> list[dict[str, Any]]:
    """Up to `count` entries with different questions, in the order in which the generator first asks them.

    Frequent questions so stand early: among those held out, which are then as the generator asks and not what it rarely
    does.
    """
    different: dict[str, dict[str, Any]] = {}
    for entry in _in_a_process(config.name, config.options, count, seed):
        different.setdefault(entry["question"], entry)
    return list(different.values())


def _in_a_process(*order: Any) -> list[dict[str, Any]]:
    """What `_make` returns."""
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "recjax.tasks.gym", json.dumps(order)]
    done = subprocess.run(command, env=environment, capture_output=True)
    if done.returncode:
        raise ValueError(f"task.reasoning_gym: the generator failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
    return pickle.loads(done.stdout)


def _make(name: str, options: Mapping[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    data = generator(name, options, size=count, seed=seed)
    return [data[index] for index in range(count)]


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
    *asked, question = [config.template.replace("{question}", each["question"]) for each in (*shots, entry)]
    shown = [(text, shot["answer"]) for text, shot in zip(asked, shots, strict=True)]
    if not config.chat:
        return "".join(f"{text} {answer}\n" for text, answer in shown) + question
    turns = [turn for text, answer in shown for turn in (text, f"<answer>{answer}</answer>")]
    return chat(system_prompt, *turns, question)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # what a generator prints is not among what is asked for
        made = _make(*json.loads(sys.argv[1]))
    sys.stdout.buffer.write(pickle.dumps(made))
