"""The built-in agent for text environments with gymnasium's `reset` and `step`."""

import hashlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

from recjax.rollout.agent_policy import AgentPolicy
from recjax.tasks.problems import Problem

logger = logging.getLogger(__name__)


def environment_agent(environment: Callable[[Problem], Any], turns: int) -> Callable:
    """An agent that plays an environment to its end; each step's reward is that of the reply which it answers.

    The environment is made of the problem. `close()`, if it has one, is called at the end, also after an error and when
    the agent's time is over. `reset(seed=…)` returns (observation, info) and `step(action)` returns
    (observation, reward, terminated, truncated, info), both observations text. They run in the event loop, so they must
    not block. Its info at the end may have "parts", which are then the named parts of the whole reward, in place of the
    steps' rewards.

    Args:
        environment: a class, or a function; takes the problem.
        turns: most steps.
    """

    async def play(problem: Problem, policy: AgentPolicy) -> float | dict[str, float]:
        world = environment(problem)
        try:
            return await played(world, problem, policy)
        finally:
            await _close(world)

    async def played(world: Any, problem: Problem, policy: AgentPolicy) -> float | dict[str, float]:
        observation, info = world.reset(seed=_seed(problem))
        begin = problem.prompt if isinstance(problem.prompt, str) else list(problem.prompt)
        told, steps = _told(begin, observation), []
        for _ in range(turns):
            ask = policy.complete if isinstance(told, str) else policy.chat
            reply = await ask(told)
            observation, reward, terminated, truncated, info = world.step(reply.text)
            steps.append((float(reward), reply))
            if terminated or truncated:
                break
            told = _told(_said(told, reply), observation)
        if "parts" in info:
            return info["parts"]
        for reward, reply in steps:
            policy.reward(reward, reply)
        return 0.0

    return play


async def _close(world: Any) -> None:
    """Ends an environment that can be ended, whatever came of it; a failure to end costs the agent nothing."""
    try:
        closing = getattr(world, "close", lambda: None)()
        if inspect.isawaitable(closing):
            await closing
    except Exception:
        logger.warning("an environment could not be closed", exc_info=True)


def _seed(problem: Problem) -> int:
    """Of the problem alone, so that all agents of a group play the same."""
    return int.from_bytes(hashlib.sha256(f"{problem.prompt}\n{problem.answer}".encode()).digest()[:4], "big")


def _told(before: str | list, observation: str) -> str | list:
    if isinstance(before, str):
        return before + observation
    return [*before, {"role": "user", "content": observation}] if observation else before


def _said(told: str | list, reply: Any) -> str | list:
    """What was told, and the reply."""
    if isinstance(told, str):
        return told + reply.raw
    return [*told, reply.message]
