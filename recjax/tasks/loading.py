"""From the config's task block to a task."""

import numpy as np

from recjax.config import Config
from recjax.tasks.arithmetic import arithmetic_problems
from recjax.tasks.files import file_problems
from recjax.tasks.problems import Problem, Task, answer_parser, load_reward


def load_task(config: Config) -> Task:
    """Problems and reward; `evaluation.problems` are held out where the task has no evaluation set of its own.

    Raises:
        ValueError: bad data, or too little of it.
    """
    reward = load_reward(config.task.reward, config.task.reward_weights)
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
    if config.task.system_prompt is not None:
        train, evaluation = (
            [_with_system_prompt(problem, config.task.system_prompt) for problem in problems]
            for problems in (train, evaluation)
        )
    return Task(train, evaluation, reward, answer_parser(config.task.reward))


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


def _hold_out(problems: list[Problem], count: int) -> tuple[list[Problem], list[Problem]]:
    if count >= len(problems):
        raise ValueError(f"evaluation.problems = {count}: the task has {len(problems)} problems in all; hold out fewer")
    return problems[count:], problems[:count]
