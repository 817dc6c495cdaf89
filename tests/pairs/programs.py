"""Rewards, agents, tools and an environment that the runs of the array name in their configs."""

import jax.numpy as jnp

from recjax.agents.agent_policy import AgentPolicy, Seats
from recjax.tasks.problems import Problem


def score(text: str) -> dict[str, float]:
    """Parts of a text's reward: a right answer begins with a digit."""
    digits = sum(character.isdigit() for character in text)
    return {"accuracy": float(text[:1].isdigit()), "digits": digits / 4}


def graded(prompts, completions, answers) -> dict[str, list[float]]:
    """Parts of the reward of each completion."""
    parts = [score(text) for text in completions]
    return {name: [part[name] for part in parts] for name in ("accuracy", "digits")}


def sometimes_graded(prompts, completions, answers) -> dict[str, list[float | None]]:
    """No reward for texts that begin with the largest digits."""
    parts = graded(prompts, completions, answers)
    lost = [text[:1] in ("8", "9") for text in completions]
    return {
        name: [None if is_lost else value for value, is_lost in zip(values, lost, strict=True)]
        for name, values in parts.items()
    }


def without_verdict(prompts, completions, answers) -> dict[str, list[float]]:
    """Parts that do not say which answers are right."""
    parts = graded(prompts, completions, answers)
    return {"digits": parts["digits"], "first": parts["accuracy"]}


async def several_turns(problem: Problem, policy: AgentPolicy) -> dict[str, float]:
    """Two or three turns in one context, each with a reward of its own."""
    text = problem.prompt
    for _ in range(2):
        reply = await policy.complete(text)
        policy.reward(score(reply.text)["digits"])
        text += reply.raw + "+"
        if reply.text[:1] in "01234":
            break
    return {"accuracy": score(reply.text)["accuracy"]}


async def cut_contexts(problem: Problem, policy: AgentPolicy) -> dict[str, float]:
    """One or two turns; the second one forgets the first, so that a completion has two rows."""
    first = await policy.complete(problem.prompt)
    policy.reward(score(first.text)["digits"])
    if first.text[:1] in ("5", "6", "7", "8", "9"):
        return {"accuracy": 0.0}
    second = await policy.complete("7" + problem.prompt, max_tokens=3)
    return {"accuracy": score(second.text)["accuracy"]}


async def either(problem: Problem, policy: AgentPolicy) -> dict[str, float]:
    """One context that goes on, or a second one, by the problem."""
    if int(problem.prompt[0]) % 2:
        return await several_turns(problem, policy)
    return await cut_contexts(problem, policy)


async def failing(problem: Problem, policy: AgentPolicy) -> dict[str, float]:
    """One turn; replies that begin with a small digit make the agent fail."""
    reply = await policy.complete(problem.prompt)
    if reply.text[:1] in ("0", "1", "2", "3"):
        raise RuntimeError("the tool is down")
    return score(reply.text)


async def duel(problem: Problem, policy: Seats) -> dict[str, dict[str, float]]:
    """Two seats answer one after the other; the one with more digits wins."""
    first = await policy.seat("first").complete(problem.prompt)
    second = await policy.seat("second").complete(problem.prompt + first.raw)
    ahead = score(first.text)["digits"] - score(second.text)["digits"]
    return {
        "first": {"accuracy": float(ahead > 0), "digits": ahead},
        "second": {"accuracy": float(ahead < 0), "digits": -ahead},
    }


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


class Countdown:
    """An environment of two steps that pays for digits."""

    def __init__(self, problem: Problem):
        self.left = 2

    def reset(self, *, seed=None, options=None):
        """The first observation."""
        self.left = 2
        return "9", {}

    def step(self, action):
        """Pays for the digits of a reply."""
        self.left -= 1
        return str(self.left), score(action)["digits"], self.left == 0, False, {}


def clipped_surrogate(ratio, advantages, *, epsilon: float = 0.2):
    """GRPO's loss of each token as a user writes it."""
    return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - epsilon, 1 + epsilon) * advantages)
