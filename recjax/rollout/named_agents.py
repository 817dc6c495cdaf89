"""Agents by name: a user's coroutine function, and the built-in agents for tools and for text environments."""

import asyncio
import hashlib
import importlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from recjax.algorithms.options import described
from recjax.config import TaskConfig
from recjax.rollout.agent_policy import AgentPolicy
from recjax.rollout.tools import Tools, parsed_calls
from recjax.tasks.problems import Problem

logger = logging.getLogger(__name__)

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
    key = f"task.agent = {task.agent!r}:"
    form = "write it as async def agent(problem, policy)"
    if not (inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None))):  # noqa: B004
        raise ValueError(f"{key} must be a coroutine function; {form}")
    try:
        inspect.signature(agent).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{key} must take a problem and a policy ({error}); {form}") from error
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


# --- Tools.


def tool_agent(tools: Tools, turns: int) -> Callable:
    """Returns an agent that lets the model call tools until a reply has no call; the task's reward grades that reply.

    Args:
        tools: tools that stay open while the agent runs.
        turns: largest number of replies.
    """

    async def use_tools(problem: Problem, policy: AgentPolicy) -> None:
        messages = problem.prompt
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        for turn in range(turns):
            reply = await policy.chat(messages, tools=tools.schemas)
            calls = parsed_calls(reply.text)
            if not calls or turn == turns - 1:
                return
            results = await asyncio.gather(*(tools.answer(call) for call in calls))
            # The model's text stays unchanged, so that its tokens are kept.
            messages = [*messages, reply.message]
            messages += [
                {"role": "tool", "name": call.name, "content": result}
                for call, result in zip(calls, results, strict=True)
            ]

    return use_tools


# --- Environments.


def environment_agent(environment: Callable[[Problem], Any], turns: int) -> Callable:
    """Returns an agent that plays an environment to its end; each reply gets the reward of the step that it caused.

    The agent creates the environment from the problem. If the environment has `close()`, the agent calls it at the end,
    also after an error or a timeout. `reset(seed=…)` returns (observation, info) and `step(action)` returns
    (observation, reward, terminated, truncated, info); observations are text. Both run in the event loop, so they must
    not block. If the final info contains "parts", these named parts are the whole reward instead of the steps' rewards.

    Args:
        environment: class or function that takes the problem.
        turns: largest number of steps.
    """

    async def play(problem: Problem, policy: AgentPolicy) -> float | dict[str, float]:
        world = environment(problem)
        steps = []
        try:
            # The seed depends only on the problem, so that all agents of a group play the same game.
            digest = hashlib.sha256(f"{problem.prompt}\n{problem.answer}".encode()).digest()
            observation, info = world.reset(seed=int.from_bytes(digest[:4], "big"))
            told = _told(problem.prompt if isinstance(problem.prompt, str) else list(problem.prompt), observation)
            for _ in range(turns):
                reply = await (policy.complete if isinstance(told, str) else policy.chat)(told)
                observation, reward, terminated, truncated, info = world.step(reply.text)
                steps.append((float(reward), reply))
                if terminated or truncated:
                    break
                told = _told(told + reply.raw if isinstance(told, str) else [*told, reply.message], observation)
        finally:
            try:
                closing = getattr(world, "close", lambda: None)()
                if inspect.isawaitable(closing):
                    await closing
            except Exception:
                logger.warning("an environment's close() failed", exc_info=True)
        if "parts" in info:
            return info["parts"]
        for reward, reply in steps:
            policy.reward(reward, reply)
        return 0.0

    return play


def _told(before: str | list, observation: str) -> str | list:
    if isinstance(before, str):
        return before + observation
    return [*before, {"role": "user", "content": observation}] if observation else before
