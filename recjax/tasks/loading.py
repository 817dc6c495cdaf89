"""Loads the task that a config describes: train problems, held-out problems and reward."""

import contextlib
import inspect
import json
import logging
import math
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from recjax.algorithms.options import require
from recjax.config import Config, GradingConfig, MixedTask, OneTask
from recjax.errors import UserError
from recjax.grading.graders import GRADERS
from recjax.rewards.custom import Answered, known_parts, needs_answers, with_columns
from recjax.rewards.reward import (
    LENGTH,
    OVERLONG,
    ROWS,
    TURNS,
    MixedReward,
    Reward,
    check_parts,
    load_reward,
    verdict_of,
)
from recjax.tasks import gym, mathematics, rewards, toolace
from recjax.tasks.arithmetic import arithmetic_problems
from recjax.tasks.files import file_problems, passed_files
from recjax.tasks.gymnasium_environments import gymnasium_problems
from recjax.tasks.problems import PLAYED_ROW, Problem, Task
from recjax.tasks.reading import read_split
from recjax.tasks.verifiers_environments import open_verifiers

logger = logging.getLogger(__name__)

Pool = Literal["train", "held_out", "all"]

MOST_HELD_OUT = 1024  # A task without an evaluation set holds out at most this number of problems.

# What data sets write where a problem has no answer to compare with.
_NO_ANSWERS = ("proof", "notfound", "not found", "nan", "none", "null", "n/a")

# Tasks with data on the Hugging Face hub: files of both splits, system prompt, and function from rows to problems.
_GURU = "train/math__combined_54.4k.parquet", "online_eval/math__math_500.parquet"
_HUB_TASKS = {
    "gsm8k": ("main/train-*.parquet", "main/test-*.parquet", mathematics.TAGGED_PROMPT, mathematics.gsm8k_problems),
    "math": ("data/train-*.parquet", "test.jsonl", mathematics.BOXED_PROMPT, mathematics.math_problems),
    "guru_math": (*_GURU, mathematics.BOXED_PROMPT, mathematics.guru_math_problems),
    "toolace": ("data.json", "data.json", toolace.SYSTEM_PROMPT, toolace.toolace_problems),
}


def load_task(config: Config, pool: Pool = "train", function: Callable | Sequence[Callable] | None = None) -> Task:
    """Loads the train problems, the first `evaluation.problems` held-out problems of each task, and the reward.

    If the task has no evaluation set, recjax holds out a third of the problems, at most 1,024. The choice depends only
    on the seed, so the train problems do not depend on `evaluation.problems`. Without `evaluation.problems`, a smaller
    number of held-out problems is logged.

    Args:
        pool: see `load_problems`.
        function: reward function that a program passed, if one did.
    Raises:
        UserError: the data is invalid, or there are too few problems.
    """
    rewards = load_rewards(config, function)
    train, evaluation = load_problems(config, rewards, pool)
    for name, reward in rewards.items():
        task_train = [problem for problem in train if problem.task == name]
        task_evaluation = [problem for problem in evaluation if problem.task == name]
        if pool == "train" and config.warm_start and not config.demonstrations and task_train:
            if not any(problem.answer for problem in task_train):
                raise UserError("warm_start", "trains on answers, and no problem has one", "remove it, or give answers")
        clash = reward.weights.keys() & rewards.keys()
        if clash:
            raise UserError(
                f"task.mixture.{min(clash)}", f"a part of the reward {reward.name} has the same name", "rename the task"
            )
        with _naming(name):
            rewards[name] = with_columns(reward, task_train, task_evaluation)
            _check_parts(config, name, rewards[name], task_train + task_evaluation)
    if config.task.mixture:
        return Task(train, evaluation, MixedReward(rewards))
    return Task(train, evaluation, rewards[""])


def load_rewards(config: Config, function: Callable | Sequence[Callable] | None = None) -> dict[str, Reward]:
    """The reward of each task by the task's name, still without the problems' columns; see `load_task`."""
    rewards = {}
    for name, task in config.task.tasks().items():
        with _naming(name):
            rewards[name] = _reward(config, task, function)
    used = ", ".join(dict.fromkeys(reward.name for reward in rewards.values()))
    uses_workers = config.task.agent == "tools"
    if any(reward.per_row or reward.remote for reward in rewards.values()):
        uses_workers = True
    remedy = f"does not apply to task.reward = {used}, which runs in the training process; remove the block"
    require(uses_workers or config.grading == GradingConfig(), "grading", config.grading.model_dump(), remedy)
    return rewards


@contextlib.contextmanager
def _naming(task: str) -> Iterator[None]:
    """Errors about keys of `task` name the keys of this task of a mixture; the name "" has no effect."""
    try:
        yield
    except UserError as error:
        if not task:
            raise
        keys = "|".join(key for key in MixedTask.model_fields if key != "weight")
        texts = (error.where, error.problem, error.remedy)
        named = [re.sub(rf"\btask\.(?={keys})", f"task.mixture.{task}.", text) for text in texts]
        raise UserError(*named, value=error.value) from error


def _check_parts(config: Config, name: str, reward: Reward, problems: Sequence[Problem]) -> None:
    """Refuses weights and verdicts of parts that the task's reward does not have, before the run samples anything."""
    task = config.task.of(name)
    weights = _strict_weights(config, task)
    reader = config.verdict_reader(name)
    if config.task.agent and not task.reward:
        return
    if reward.per_row:
        parts = GRADERS[reward.name].weights
    elif weights or task.verdict or reader:
        parts = known_parts(reward, Answered.to(problems[0], str(problems[0].prompt), "", 0, "empty"))
    else:
        return
    check_parts(reward.name, weights, [*parts, LENGTH, OVERLONG])
    verdict_of(f"the reward {reward.name}", parts, task, reader)


def _strict_weights(config: Config, task: OneTask) -> dict[str, float]:
    """The chosen weights that must name parts of the task's reward."""
    if not config.task.agent:
        return task.reward_weights
    if not task.reward:
        return {}
    # Weights of turns and rows belong to the agent.
    return {name: weight for name, weight in task.reward_weights.items() if name not in (TURNS, ROWS)}


def _reward(config: Config, task: OneTask, function: Callable | Sequence[Callable] | None) -> Reward:
    name = task.reward_name()
    weights = _strict_weights(config, task)
    reward = load_reward(name, weights, config.task.overlong_tokens is not None, function, task.reward_device)
    reward = reward._replace(weights={**reward.weights, **task.reward_weights})
    if reward.per_row or not inspect.iscoroutinefunction(reward.function):
        remedy = f"is read where task.reward is an async function, and {name} is none; remove it"
        require(task.reward_seconds is None, "task.reward_seconds", task.reward_seconds, remedy)
        require(task.reward_retries == 0, "task.reward_retries", task.reward_retries, remedy)
    answer = "answer"
    if task.file and task.file.answer_column:
        answer = task.file.answer_column
    return reward._replace(seconds=task.reward_seconds, retries=task.reward_retries, answer=answer)


def load_problems(
    config: Config, rewards: Mapping[str, Reward] = MappingProxyType({}), pool: Pool = "train"
) -> tuple[list[Problem], list[Problem]]:
    """Loads the train and held-out problems of `load_task`.

    Args:
        rewards: rewards that must be able to read the answers, by task; without one, any answer is accepted.
        pool: train: there must be enough train problems; held_out: train problems are not used and may be missing; all:
            every problem is held out.
    Raises:
        UserError: the data is invalid, or there are too few problems.
    """
    train = []
    evaluation = []
    held_out = set()
    everything = pool == "all"
    for name, task in config.task.tasks().items():
        with _naming(name):
            reads_answers = name in rewards and needs_answers(rewards[name])
            task_train, task_evaluation = _problems(config, task, pool, reads_answers)
            if name in rewards:
                _check_answers(rewards[name], [*task_train, *task_evaluation], by_agent=config.task.agent is not None)
        held_out.update(*map(_origins, task_evaluation))
        if name:
            task_train = [problem._replace(task=name) for problem in task_train]
            task_evaluation = [problem._replace(task=name) for problem in task_evaluation]
        if everything or config.task.shares()[name]:
            train += task_train
        if not everything:
            task_evaluation = task_evaluation[: config.evaluation.most_problems]
        evaluation += task_evaluation
    kept = [problem for problem in train if held_out.isdisjoint(_origins(problem))]
    if everything:
        return [], kept + evaluation
    if len(kept) < len(train):
        logger.info("%d train problems are left out, because they are held out for evaluation", len(train) - len(kept))
    if pool == "train":
        require_enough(kept, config, "add problems or lower it")
    return kept, evaluation


def require_enough(problems: Sequence[Problem], config: Config, remedy: str) -> None:
    """Refuses fewer train problems of a task than a batch may have.

    Raises:
        UserError: with the remedy.
    """
    seats = len(config.task.trained_seats)
    counts = Counter(problem.task for problem in problems)
    needed = config.rollout.prompts_per_step / seats
    divided = f" / {seats} seats" if seats > 1 else ""
    for name, share in config.task.shares().items():
        if counts[name] < math.ceil(share * needed - 1e-9):
            task = "task"
            share_words = ""
            if name:
                task = f"task {name}"
                share_words = f", times its share {share:.3g}"
            raise UserError(
                problem=(
                    f"the {task} has {counts[name]} train problems, fewer than rollout.prompts_per_step{divided} ="
                    f" {needed:g}{share_words}"
                ),
                remedy=remedy,
            )


def _check_answers(reward: Reward, problems: Sequence[Problem], by_agent: bool) -> None:
    """Refuses answers that no completion can match, and warns of answers such as "none", before the run samples."""
    placeholders = Counter(problem.answer for problem in problems if problem.answer.strip().lower() in _NO_ANSWERS)
    if placeholders and needs_answers(reward):
        logger.warning(
            "the answers of %d of %d problems are %s: a completion that says this word is right; remove such rows if"
            " they have no answer",
            placeholders.total(),
            len(problems),
            ", ".join(f"{answer!r} ({count})" for answer, count in placeholders.most_common(5)),
        )
    if reward.name in ("math", "guru_math", "math_dapo"):
        check = pkgutil.resolve_name("recjax.grading.math_answers:check_answer")
        for problem in problems:
            try:
                check(problem.answer)
            except ValueError as error:
                raise UserError(problem=str(error)) from error
    if getattr(reward.function, "__module__", None) == rewards.__name__ and not by_agent:
        answers = [problem.answer for problem in problems]
        try:
            reward.function([""] * len(answers), answers, answers)
        except UserError as error:
            remedy = "correct the answer, or name another task.reward"
            raise UserError("task.reward", f"{error!s:.300}", remedy, value=reward.name) from error


def _problems(config: Config, task: OneTask, pool: Pool, reads_answers: bool) -> tuple[list[Problem], list[Problem]]:
    """All train problems and all held-out problems; both may contain the same prompt."""
    name = task.chosen()
    block = getattr(task, name)
    system_prompt = task.system_prompt
    if name == "arithmetic":
        return _hold_out(arithmetic_problems(block, config.seed_of_base), config, pool)
    if name == "reasoning_gym":
        if system_prompt is None:
            system_prompt = gym.SYSTEM_PROMPT
        count = block.problems + min(block.problems // 2, MOST_HELD_OUT)  # `_hold_out` takes a third.
        return _hold_out(gym.gym_problems(block, count, config.seed_of_base, system_prompt), config, pool)
    if name == "gymnasium":
        count = block.problems + min(block.problems // 2, MOST_HELD_OUT)
        return _hold_out(gymnasium_problems(block, count, config.seed_of_base), config, pool)
    if name == "verifiers":
        train, evaluation = open_verifiers(block, config.task.agent_turns).problems()
    elif name == "file":
        passed = passed_files(config)

        def read(file: str | None, split: str) -> list[Problem]:
            if not file:
                return []
            return file_problems(passed.get(file, file), block, system_prompt, reads_answers, split)

        train = read(block.train, "train")
        evaluation = read(block.evaluation, "test")
    else:
        files, held_out_files, usual_prompt, read_problems = _HUB_TASKS[name]
        if system_prompt is None:
            system_prompt = usual_prompt
        rows = read_split(block.train, files, "train", f"task.{name}.train")
        held_out = []
        if block.evaluation:
            held_out = read_split(block.evaluation, held_out_files, "test", f"task.{name}.evaluation")
        train = read_problems(rows, system_prompt)
        evaluation = read_problems(held_out, system_prompt)
    if evaluation:
        return train, evaluation
    order = np.random.default_rng([config.seed_of_base, 0]).permutation(len(train))
    return _hold_out([train[index] for index in order], config, pool)


def _origins(problem: Problem) -> set[str]:
    """Keys that train and held-out problems must not share: the prompt, and the conversation that contains it."""
    conversation = problem.columns.get(toolace.CONVERSATION)
    origins = {_prompt_key(problem)}
    if conversation:
        origins.add(conversation)
    return origins


def _prompt_key(problem: Problem) -> str:
    content: Any = problem.prompt
    if problem.template:
        content = [problem.prompt, dict(problem.template)]
    if PLAYED_ROW in problem.columns:
        content = [content, problem.columns[PLAYED_ROW]]
    return json.dumps(content, sort_keys=True)


def _hold_out(problems: list[Problem], config: Config, pool: Pool) -> tuple[list[Problem], list[Problem]]:
    """Splits problems into (train, held out); problems with the same prompt or conversation stay together.

    Raises:
        UserError: there are fewer held-out problems than `evaluation.problems`, or none.
    """
    keys = [problem.columns.get(toolace.CONVERSATION) or _prompt_key(problem) for problem in problems]
    most = min(len(problems) // 3, MOST_HELD_OUT)
    chosen = set()
    count = 0
    for key, size in Counter(keys).items():
        if count + size <= most:
            chosen.add(key)
            count += size
    hint = ", or evaluate on all of them with recjax.evaluate --all" if pool == "held_out" else ""
    if pool != "all" and count < (config.evaluation.problems or 1):
        raise UserError(
            "evaluation.problems",
            f"of the task's {len(problems)} problems {count} are held out, a third and at most {MOST_HELD_OUT}",
            f"set at most that number, give the task evaluation data of its own{hint}, or add problems",
            value=config.evaluation.problems,
        )
    if pool != "all" and config.evaluation.problems is None and count < config.evaluation.most_problems:
        logger.info("evaluating on %d held-out problems, a third of the task's %d%s", count, len(problems), hint)
    train = []
    held_out = []
    for problem, key in zip(problems, keys, strict=True):
        if key in chosen:
            held_out.append(problem)
        else:
            train.append(problem)
    return train, held_out
