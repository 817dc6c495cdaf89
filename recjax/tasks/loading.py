"""Loads the task that a config describes: train problems, held-out problems and reward."""

import inspect
import json
import logging
import pkgutil
from collections import Counter
from collections.abc import Sequence

import numpy as np

from recjax.algorithms.options import require
from recjax.config import Config
from recjax.tasks import competition_math, gsm8k, guru_math, gym, rewards, toolace
from recjax.tasks.arithmetic import arithmetic_problems
from recjax.tasks.files import file_problems
from recjax.tasks.grading.custom import check_weights
from recjax.tasks.grading.reward import ROWS, TURNS, Reward, load_reward
from recjax.tasks.problems import Problem, Task
from recjax.tasks.reading import read_split

logger = logging.getLogger(__name__)

MOST_HELD_OUT = 1024  # problems held out if the task has no evaluation set

# Tasks with data on the Hugging Face hub. Each module names the files and turns their rows into problems.
_HUB_TASKS = {"gsm8k": gsm8k, "math": competition_math, "guru_math": guru_math, "toolace": toolace}


def load_task(config: Config) -> Task:
    """Loads the train problems, the first `evaluation.problems` held-out problems, and the reward.

    If the task has no evaluation set, recjax holds out a third of the problems, at most 1,024. The choice depends only
    on the seed, so the train problems do not depend on `evaluation.problems`.

    Raises:
        ValueError: the data is invalid, or there are too few problems.
    """
    name = config.task.reward_name()
    weights = config.task.reward_weights
    if config.task.agent:
        # These weights belong to a named task.reward, all others to rewards that the agent returns and to its turns.
        weights = {part: weights[part] for part in weights if config.task.reward and part not in (TURNS, ROWS)}
    reward = load_reward(name, weights, config.task.overlong_tokens is not None)
    if reward.per_row or not inspect.iscoroutinefunction(reward.function):
        remedy = f"is read where task.reward is an async function, and {name} is none; remove it"
        require(config.task.reward_seconds is None, "task.reward_seconds", config.task.reward_seconds, remedy)
        require(config.task.reward_retries == 0, "task.reward_retries", config.task.reward_retries, remedy)
    reward = reward._replace(seconds=config.task.reward_seconds, retries=config.task.reward_retries)
    kept, evaluation = load_problems(config, reward)
    if weights and not reward.per_row:
        check_weights(reward, (str(kept[0].prompt), "", kept[0].answer, kept[0].columns))
    return Task(kept, evaluation, reward)


def load_problems(config: Config, reward: Reward | None = None) -> tuple[list[Problem], list[Problem]]:
    """Loads the train and held-out problems of `load_task`.

    Args:
        reward: reward that must be able to read the answers; None accepts any answer.
    Raises:
        ValueError: the data is invalid, or there are too few problems.
    """
    train, evaluation = _problems(config)
    if reward is not None:
        _check_answers(reward, [*train, *evaluation], by_agent=config.task.agent is not None)
    held_out = set().union(*map(_origins, evaluation))
    evaluation = evaluation[: config.evaluation.problems]
    kept = [problem for problem in train if held_out.isdisjoint(_origins(problem))]
    if len(kept) < len(train):
        logger.info("%d train problems are left out, because they are held out for evaluation", len(train) - len(kept))
    if len(kept) < config.rollout.prompts_per_step:
        raise ValueError(
            f"the task has {len(kept)} train problems, fewer than rollout.prompts_per_step ="
            f" {config.rollout.prompts_per_step}; add problems or lower it"
        )
    return kept, evaluation


def _check_answers(reward: Reward, problems: Sequence[Problem], by_agent: bool) -> None:
    """Refuses answers that no completion can match, before the run samples anything."""
    if reward.name in ("math", "guru_math", "math_dapo"):
        check = pkgutil.resolve_name("recjax.tasks.grading.math_answers:check_answer")
        for problem in problems:
            check(problem.answer)
    if reward.function.__module__ == rewards.__name__ and not by_agent:
        answers = [problem.answer for problem in problems]
        try:
            reward.function([""] * len(answers), answers, answers)
        except ValueError as error:
            remedy = "correct the answer, or name another task.reward"
            raise ValueError(f"task.reward = {reward.name!r}: {str(error):.300}; {remedy}") from error


def _problems(config: Config) -> tuple[list[Problem], list[Problem]]:
    """All train problems and all held-out problems; both may contain the same prompt."""
    name, asked = config.task.chosen(), config.evaluation.problems
    task, system_prompt = getattr(config.task, name), config.task.system_prompt
    if name == "arithmetic":
        return _hold_out(arithmetic_problems(task, config.seed_of_base), asked)
    if name == "reasoning_gym":
        system_prompt = gym.SYSTEM_PROMPT if system_prompt is None else system_prompt
        count = task.problems + min(task.problems // 2, MOST_HELD_OUT)  # _hold_out takes a third
        return _hold_out(gym.gym_problems(task, count, config.seed_of_base, system_prompt), asked)
    if name == "file":
        train = file_problems(task.train, task, system_prompt)
        evaluation = task.evaluation and file_problems(task.evaluation, task, system_prompt)
    else:
        hub = _HUB_TASKS[name]
        system_prompt = hub.SYSTEM_PROMPT if system_prompt is None else system_prompt
        rows = read_split(task.train, hub.TRAIN, "train", f"task.{name}.train")
        held_out = task.evaluation and read_split(task.evaluation, hub.EVALUATION, "test", f"task.{name}.evaluation")
        train, evaluation = hub.problems(rows, system_prompt), hub.problems(held_out or [], system_prompt)
    if evaluation:
        return train, evaluation
    order = np.random.default_rng([config.seed_of_base, 0]).permutation(len(train))
    return _hold_out([train[index] for index in order], asked)


def _origins(problem: Problem) -> set[str]:
    """Keys that train and held-out problems must not share: the prompt, and the conversation that contains it."""
    conversation = problem.columns.get(toolace.CONVERSATION)
    return {_prompt_of(problem), *([conversation] if conversation else [])}


def _prompt_of(problem: Problem) -> str:
    asked = [problem.prompt, dict(problem.template)] if problem.template else problem.prompt
    return json.dumps(asked, sort_keys=True)


def _hold_out(problems: list[Problem], asked: int) -> tuple[list[Problem], list[Problem]]:
    """Splits problems into (train, held out); problems with the same prompt or conversation stay together."""
    keys = [problem.columns.get(toolace.CONVERSATION) or _prompt_of(problem) for problem in problems]
    most, chosen, count = min(len(problems) // 3, MOST_HELD_OUT), set(), 0
    for key, size in Counter(keys).items():
        if count + size <= most:
            chosen.add(key)
            count += size
    if asked > count:
        raise ValueError(
            f"evaluation.problems = {asked}: of the task's {len(problems)} problems {count} are held out, a third and"
            f" at most {MOST_HELD_OUT}; evaluate on at most {count}, or give the task evaluation data of its own"
        )
    train, held_out = (
        [problem for problem, key in zip(problems, keys, strict=True) if (key in chosen) is side]
        for side in (False, True)
    )
    return train, held_out
