"""From the config's task block to a task."""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from recjax.config import Config
from recjax.tasks import competition_math, gsm8k, guru_math, gym, toolace
from recjax.tasks.arithmetic import arithmetic_problems
from recjax.tasks.files import file_problems
from recjax.tasks.grading.reward import answer_parser, load_reward
from recjax.tasks.problems import Problem, Task
from recjax.tasks.reading import Row, read_split

logger = logging.getLogger(__name__)


class _HubTask(NamedTuple):
    """A task whose data the Hugging Face hub has: how rows become problems, and where a repository has them."""

    problems: Callable[[Sequence[Row], str], list[Problem]]
    system_prompt: str
    train_files: str
    evaluation_files: str


_HUB_TASKS = {
    "gsm8k": _HubTask(gsm8k.gsm8k_problems, gsm8k.SYSTEM_PROMPT, gsm8k.TRAIN, gsm8k.EVALUATION),
    "math": _HubTask(
        competition_math.math_problems,
        competition_math.SYSTEM_PROMPT,
        competition_math.TRAIN,
        competition_math.EVALUATION,
    ),
    "guru_math": _HubTask(guru_math.guru_math_problems, guru_math.SYSTEM_PROMPT, guru_math.TRAIN, guru_math.EVALUATION),
    "toolace": _HubTask(toolace.toolace_problems, toolace.SYSTEM_PROMPT, toolace.TRAIN, toolace.EVALUATION),
}


def load_task(config: Config) -> Task:
    """Problems and reward; `evaluation.problems` are held out where the task has no evaluation set of its own.

    Raises:
        ValueError: bad data, or too little of it.
    """
    name = config.task.reward_name()
    reward = load_reward(name, config.task.reward_weights)
    train, evaluation = _problems(config)
    held_out = set().union(*map(_origins, evaluation))
    kept = [problem for problem in train if held_out.isdisjoint(_origins(problem))]
    if len(kept) < len(train):
        logger.info("%d train problems are left out: they are held-out ones as well", len(train) - len(kept))
    if len(kept) < config.rollout.prompts_per_step:
        raise ValueError(
            f"the task has {len(kept)} train problems, fewer than rollout.prompts_per_step ="
            f" {config.rollout.prompts_per_step}; add problems or lower it"
        )
    return Task(kept, evaluation, reward, answer_parser(name))


def _problems(config: Config) -> tuple[list[Problem], list[Problem]]:
    """Problems to train on and problems held out."""
    name, count = config.task.chosen(), config.evaluation.problems
    task, system_prompt = getattr(config.task, name), config.task.system_prompt
    if name == "arithmetic":
        return _hold_out(arithmetic_problems(task, config.seed), count)
    if name == "reasoning_gym":
        system_prompt = gym.SYSTEM_PROMPT if system_prompt is None else system_prompt
        return gym.gym_problems(task, count, config.seed, system_prompt)
    if name == "file":
        train = _from_file(task.train, task, system_prompt)
        evaluation = task.evaluation and _from_file(task.evaluation, task, system_prompt)
    else:
        train, evaluation = _from_hub(name, task, system_prompt)
    if evaluation:
        return train, evaluation[:count]
    order = np.random.default_rng([config.seed, 0]).permutation(len(train))
    return _hold_out([train[index] for index in order], count)


def _from_hub(name: str, task: Any, system_prompt: str | None) -> tuple[list[Problem], list[Problem]]:
    """Train and evaluation problems; of the latter none where they are to be held out."""
    hub = _HUB_TASKS[name]
    system_prompt = hub.system_prompt if system_prompt is None else system_prompt
    rows = read_split(task.train, hub.train_files, "train", f"task.{name}.train")
    held_out = []
    if task.evaluation is not None:
        held_out = read_split(task.evaluation, hub.evaluation_files, "test", f"task.{name}.evaluation")
    return hub.problems(rows, system_prompt), hub.problems(held_out, system_prompt)


def _from_file(path: str, task: Any, system_prompt: str | None) -> list[Problem]:
    problems = file_problems(path, task)
    if system_prompt is None:
        return problems
    return [_with_system_prompt(problem, system_prompt) for problem in problems]


def _with_system_prompt(problem: Problem, system_prompt: str) -> Problem:
    """The problem with a system message first; which of two would count is not for the program to choose."""
    if isinstance(problem.prompt, str):
        raise ValueError(
            f"task.system_prompt is not read by plain text such as {problem.prompt!r:.80}; remove it, or make the"
            " prompts chats: task.file.chat=true, or lists of messages in the file"
        )
    if problem.prompt[0]["role"] == "system":
        raise ValueError(
            f"task.system_prompt is given, but the messages {problem.prompt!r:.80}… begin with a system message of"
            " their own; remove one of the two"
        )
    return problem._replace(prompt=[{"role": "system", "content": system_prompt}, *problem.prompt])


def _origins(problem: Problem) -> set[str]:
    """What a train and a held-out problem must not share: the prompt, and a conversation whose later turns quote it."""
    conversation = problem.columns.get(toolace.CONVERSATION)
    return {json.dumps(problem.prompt, sort_keys=True), *([conversation] if conversation else [])}


def _hold_out(problems: list[Problem], count: int) -> tuple[list[Problem], list[Problem]]:
    if count >= len(problems):
        raise ValueError(f"evaluation.problems = {count}: the task has {len(problems)} problems in all; hold out fewer")
    return problems[count:], problems[:count]
