"""Loads the coroutine function that `task.agent` names, and checks it before work starts."""

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from recjax.config import TaskConfig
from recjax.rollout.agent_policy import AgentPolicy
from recjax.rollout.environments import environment_agent
from recjax.rollout.tool_agent import tool_agent
from recjax.rollout.tools import Tools
from recjax.tasks.grading.reward import described
from recjax.tasks.problems import Problem

Agent = Callable[[Problem, AgentPolicy], Awaitable[float | Mapping[str, float] | None]]


def load_agent(task: TaskConfig, tools: Tools | None) -> Agent:
    """Returns the agent that the config names: a built-in one, or the user's own.

    Args:
        tools: tools in `task.tools`; None if it is empty.
    Raises:
        ValueError: the agent cannot be imported, or is not `async def agent(problem, policy)`.
    """
    if task.agent == "tools":
        return tool_agent(tools, task.agent_turns)
    if task.agent == "environment":
        return environment_agent(named("task.environment", task.environment), task.agent_turns)
    agent = named("task.agent", task.agent)
    place, form = f"task.agent = {task.agent!r}:", "write it as async def agent(problem, policy)"
    if not (inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None))):  # noqa: B004
        raise ValueError(f"{place} must be a coroutine function; {form}")
    try:
        inspect.signature(agent).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{place} must take a problem and a policy ({error}); {form}") from error
    return agent


def named(key: str, name: str) -> Any:
    """Imports the object that `name` gives as module:name.

    Raises:
        ValueError: the module or the name does not exist.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        remedy = "the module must be importable from the folder you start in or installed"
        raise ValueError(f"{key} = {name!r}: {described(error)}; {remedy}") from error
