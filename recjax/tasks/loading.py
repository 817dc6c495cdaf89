"""From the config's task block to a task."""

import numpy as np

from recjax.config import Config
from recjax.tasks.arithmetic import arithmetic_problems
from recjax.tasks.files import file_problems
from recjax.tasks.problems import Problem, Task, load_reward


def load_task(config: Config) -> Task:
    """Problems and reward; `evaluation.problems` are held out where the task has no evaluation set of its own.

    Raises:
        ValueError: bad data, or too little of it.
    """
    reward = load_reward(config.task.reward)
    count = config.evaluation.problems
    if config.task.arithmetic:
        train, evaluation = _hold_out(arithmetic_problems(config.task.arithmetic, config.seed), count)
    else:
        train = file_problems(config.task.file.train, config.task.file)
        if config.task.file.evaluation:
            evaluation = file_problems(config.task.file.evaluation, config.task.file)[:count]
        else:
            order = np.random.default_rng([config.seed, 0]).permutation(len(train))
            train, evaluation = _hold_out([train[index] for index in order], count)
    if len(train) < config.rollout.prompts_per_step:
        raise ValueError(
            f"the task has {len(train)} train problems, fewer than rollout.prompts_per_step ="
            f" {config.rollout.prompts_per_step}; add problems or lower it"
        )
    return Task(train, evaluation, reward)


def _hold_out(problems: list[Problem], count: int) -> tuple[list[Problem], list[Problem]]:
    if count >= len(problems):
        raise ValueError(f"evaluation.problems = {count}: the task has {len(problems)} problems in all; hold out fewer")
    return problems[count:], problems[:count]
