"""Samples and grades completions of an opened policy, one row each."""

import contextlib
import logging

import numpy as np
import pandas as pd

from recjax.agents.agents import Agents
from recjax.agents.trajectory import thoughts_opening
from recjax.config import Config
from recjax.rewards.pool import Grading
from recjax.runs.policies import OpenedPolicy
from recjax.runtime import hosts
from recjax.runtime.console import progress_bar
from recjax.tasks.problems import Task
from recjax.tasks.prompts import Prompts
from recjax.training.evaluation import answered, sample_rows

logger = logging.getLogger(__name__)


def sampled_rows(config: Config, evaluated: OpenedPolicy, prompts: Prompts, task: Task) -> pd.DataFrame:
    """Samples completions of all problems; returns a row for each, with the answer that its grader read."""
    rows = []
    openings = []
    unplayed = 0
    tokenizer = evaluated.policy.tokenizer
    with contextlib.ExitStack() as stack:
        grading = stack.enter_context(Grading(config, task.reward))
        bar = stack.enter_context(
            progress_bar(evaluated.name, len(prompts.texts), unit="problem", shown=hosts.is_first())
        )
        agents = None
        if config.task.agent:
            agents = stack.enter_context(Agents(config, evaluated.policy, evaluated.older_params))
        for part in answered(
            config,
            evaluated.policy,
            evaluated.params,
            prompts,
            grading,
            step=0,
            agents=agents,
            version=evaluated.version,
        ):
            rows += sample_rows(part)
            for group in part.groups:
                openings += [thoughts_opening(completion, tokenizer) for completion in group.completions]
                unplayed += not group.completions
            bar.update(len(part.groups) // part.seats)
        if unplayed:
            logger.warning("pairs of a problem and a seat without completions, as the seat never played: %d", unplayed)
        parsed: list[str | None] = [None] * len(rows)
        if hosts.is_first():
            task_names = np.array([row.get("task", "") for row in rows])
            for name in np.unique(task_names):
                indices = np.flatnonzero(task_names == name)
                texts = [rows[index]["completion"] for index in indices]
                answers = grading.parsed(texts, [openings[index] for index in indices], str(name))
                for index, answer in zip(indices, answers, strict=True):
                    parsed[index] = answer
    return pd.DataFrame(rows).assign(parsed=pd.Series(parsed, dtype=object))
