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
        try:
            return await played(world, problem, policy)
        finally:
            try:
                closing = getattr(world, "close", lambda: None)()
                if inspect.isawaitable(closing):
                    await closing
            except Exception:
                logger.warning("an environment's close() failed", exc_info=True)

    async def played(world: Any, problem: Problem, policy: AgentPolicy) -> float | dict[str, float]:
        # The seed depends only on the problem, so that all agents of a group play the same game.
        digest = hashlib.sha256(f"{problem.prompt}\n{problem.answer}".encode()).digest()
        observation, info = world.reset(seed=int.from_bytes(digest[:4], "big"))
        begin = problem.prompt if isinstance(problem.prompt, str) else list(problem.prompt)
        told, steps = _told(begin, observation), []
        for _ in range(turns):
            ask = policy.complete if isinstance(told, str) else policy.chat
            reply = await ask(told)
            observation, reward, terminated, truncated, info = world.step(reply.text)
            steps.append((float(reward), reply))
            if terminated or truncated:
                break
            told = _told(told + reply.raw if isinstance(told, str) else [*told, reply.message], observation)
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
