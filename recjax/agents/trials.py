"""Runs one agent on one problem, and reads its rewards or the kind of its failure."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

from recjax.agents.agent_policy import AgentPolicy, ContextFull, InvalidReward, Seats, TurnsSpent, is_reward
from recjax.agents.named_agents import Agent
from recjax.algorithms.options import described
from recjax.config import TaskConfig
from recjax.errors import shown
from recjax.rewards.reward import MOST_REWARD, SHAPING
from recjax.tasks.problems import Problem

# Kinds of failure and their remedies. "timeout": too much time other than waiting for the policy. "invalid": not a
# valid reward. "silent": never used the policy. "context", "turns": a request with a full context or beyond all turns.
AGENT_FAILURES = {
    "raised": "correct the agent",
    "timeout": "raise task.agent_seconds, or let the agent do less",
    "invalid": "correct what the agent returns",
    "silent": "let the agent call the policy",
    "context": "raise rollout.max_context_tokens, or let the agent send shorter prompts",
    "turns": "raise task.agent_turns, or let the agent call the policy less often",
}
# The agent's own mistakes. A full context and spent turns are not: the policy can learn to avoid them.
MISTAKES = ("raised", "timeout", "invalid", "silent")
NAMED_FAILURES = (ContextFull, TurnsSpent, InvalidReward)


class Trial(NamedTuple):
    """The result of one seat of an agent; an agent without seats has one, with the name "".

    policy: the seat's policy, with its trajectory.
    returned: the agent's return value for the seat.
    failure, words: the kind and words of the agent's failure, or None and "".
    """

    policy: AgentPolicy
    returned: Any
    failure: str | None
    words: str
    seat: str

    @property
    def needs_reward(self) -> bool:
        """True if the task's reward grades the agent, because it returned None."""
        return self.failure is None and self.returned is None


async def try_agent(agent: Agent, problem: Problem, seats: Seats, task: TaskConfig) -> list[Trial]:
    """Runs one agent to its end or its time limit, even if it keeps running; returns the results of trained seats."""
    trained = task.trained_seats
    running = asyncio.create_task(_outcome(agent, problem, seats, task))
    try:
        async with asyncio.timeout(task.agent_seconds) as seats.timeout:
            await asyncio.wait([running])
        returned, failure, words = running.result()
    except TimeoutError:
        returned = None
        failure = "timeout"
        words = f"it spent task.agent_seconds = {task.agent_seconds} without waiting for the policy"
    finally:
        seats.end()
        running.cancel()
        # Some agents do not end when canceled; asyncio itself also silences its message about them in this way.
        running._log_destroy_pending = False  # type: ignore  # asyncio has no public name for it
    players = cast("dict[str, AgentPolicy]", seats.players)  # a script plays no trained seat
    if failure is None and not any(players[name].trajectory.turns for name in trained):
        failure = "silent"
        words = "it returned without a call of the policy"
    rewards: list[dict[str, float] | float | None] = [None] * len(trained)
    if failure is None:
        try:
            rewards = seat_rewards(returned, task.seats, trained)
        except InvalidReward as error:
            failure = error.failure
            words = str(error)
        except Exception as error:  # an agent may return any object, and reading that object may raise anything
            failure = "raised"
            words = described(error)
    return [Trial(players[name], reward, failure, words, name) for name, reward in zip(trained, rewards, strict=True)]


async def _outcome(agent: Agent, problem: Problem, seats: Seats, task: TaskConfig) -> tuple[Any, str | None, str]:
    """The agent's return value, and the kind and words of its failure; None and "" if it did not fail."""
    policy = seats
    if not task.seats:
        policy = seats.players[""]
    try:
        return await agent(problem, policy), None, ""
    except BaseException as error:  # an agent may raise SystemExit, which must not end the run
        root = root_failure(error)
        relayed = [player.relayed for player in seats.players.values() if player.relayed]
        if relayed and not isinstance(root, NAMED_FAILURES):
            root = relayed[-1]  # the agent's own client raised an error of its own about it
        if isinstance(root, NAMED_FAILURES):
            return None, root.failure, str(root)
        return None, "raised", described(error)
    finally:
        seats.end()


def root_failure(error: BaseException, depth: int = 20) -> BaseException:
    """The full context, the spent turns or the invalid reward that an error stands for; otherwise the error itself.

    Frameworks wrap errors in errors of their own, and task groups in exception groups. A group that also has another
    error stands for itself.

    Args:
        depth: number of wrapped errors to look through.
    """
    if isinstance(error, NAMED_FAILURES) or depth == 0:
        return error
    if isinstance(error, BaseExceptionGroup):
        wrapped = list(error.exceptions)
    elif error.__cause__ is not None:
        wrapped = [error.__cause__]
    elif error.__context__ is not None and not error.__suppress_context__:
        wrapped = [error.__context__]
    else:
        return error
    roots = [root_failure(inner, depth - 1) for inner in wrapped]
    if all(isinstance(root, NAMED_FAILURES) for root in roots):
        return roots[0]
    return error


def seat_rewards(
    returned: Any, seats: Collection[str], trained: Sequence[str]
) -> list[dict[str, float] | float | None]:
    """The rewards of each trained seat, in order: a number, numbers by name, or None for the task's reward.

    Args:
        returned: the agent's return value: one reward, or with seats a dict of rewards by seat.
        seats: names of all seats; empty for an agent without seats.
        trained: names of the trained seats; [""] for an agent without seats.
    Raises:
        InvalidReward: the value has another form, or a number that is no reward.
    """
    form = f"finite numbers of at most {MOST_REWARD:g}, one or a dict of them by name, or None"
    if not seats:
        by_seat = {trained[0]: returned}
    else:
        form = f"{form} for each of the seats {', '.join(trained)}"
        by_seat = returned
        if returned is None:
            by_seat = dict.fromkeys(trained)
        if not isinstance(by_seat, Mapping) or not set(trained) <= by_seat.keys() <= set(seats):
            raise InvalidReward(f"it returned {shown(returned)}; rewards are {form}")
    rewards: list[dict[str, float] | float | None] = []
    for name in trained:
        value = by_seat[name]
        if value is None:
            rewards.append(None)
        elif isinstance(value, Mapping):
            parts = dict(value)
            are_valid = all(isinstance(part_name, str) and is_reward(number) for part_name, number in parts.items())
            if not parts or not are_valid:
                raise InvalidReward(f"it returned {shown(returned)}; rewards are {form}")
            reserved = [part_name for part_name in parts if part_name in SHAPING]
            if reserved:
                names = ", ".join(SHAPING)
                raise InvalidReward(
                    f"it returned a part {reserved[0]!r}; recjax itself adds {names}, so rename the part"
                )
            rewards.append({part_name: float(number) for part_name, number in parts.items()})
        elif is_reward(value):
            rewards.append(float(value))
        else:
            raise InvalidReward(f"it returned {shown(returned)}; rewards are {form}")
    return rewards
