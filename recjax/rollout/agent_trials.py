"""One agent at work: its time limit, how it ends, and its result."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from recjax.algorithms.options import described
from recjax.rollout.agent_policy import AgentPolicy, ContextFull, InvalidReward, TurnsSpent
from recjax.rollout.named_agents import Agent
from recjax.tasks.grading.reward import MOST_REWARD
from recjax.tasks.problems import Problem

# Kinds of failure and their remedies. "timeout": too much time other than waiting for the policy. "invalid": not a
# valid reward. "silent": never used the policy. "context", "turns": a request with a full context or beyond all turns.
FAILURES = {
    "raised": "correct the agent",
    "timeout": "raise task.agent_seconds, or let the agent do less",
    "invalid": "correct what the agent returns",
    "silent": "let the agent call the policy",
    "context": "raise rollout.max_context_tokens, or let the agent send shorter prompts",
    "turns": "raise task.agent_turns, or let the agent call the policy less often",
}
# The agent's own mistakes. A full context and spent turns are not: the policy can learn to avoid them.
MISTAKES = ("raised", "timeout", "invalid", "silent")


class Tried(NamedTuple):
    """The result of one agent: its policy, its return value, and the kind and words of its failure, or None and ""."""

    policy: AgentPolicy
    returned: Any
    failure: str | None = None
    words: str = ""


class Trial:
    """One agent at work; `done` holds its result, even if the agent itself keeps running."""

    def __init__(self, agent: Agent, problem: Problem, policy_of: Callable[..., AgentPolicy], seconds: float):
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future = self._loop.create_future()
        self._left, self._since, self._asking, self._timer = seconds, 0.0, 0, None
        self._seconds = seconds
        self._policy = policy_of(self._at_work)
        self._task = self._loop.create_task(self._tried(agent, problem))
        self._start_clock()

    async def _tried(self, agent: Agent, problem: Problem) -> None:
        found: dict[str, Any] = {}
        try:
            found["returned"] = await agent(problem, self._policy)
        except ContextFull as error:
            found |= {"failure": "context", "words": str(error)}
        except TurnsSpent as error:
            found |= {"failure": "turns", "words": str(error)}
        except InvalidReward as error:
            found |= {"failure": "invalid", "words": str(error)}
        except BaseException as error:  # an agent may raise SystemExit, which must not end the run
            found |= {"failure": "raised", "words": described(error)}
        finally:
            self._stop_clock()
        self._finish(**found)

    def _finish(self, returned: Any = None, failure: str | None = None, words: str = "") -> None:
        if self.done.done():
            return
        if failure is None and not self._policy.trajectory.turns:
            failure, words = "silent", "it returned without a call of the policy"
        if failure is None and returned is not None:
            failure, words = _wrong_with(returned)
        self.done.set_result(Tried(self._policy, returned, failure, words))
        self._policy.stop()

    # --- The clock counts the seconds in which the agent does not wait for the policy.

    def _at_work(self, waits: bool) -> None:
        if waits and self.done.done():
            raise asyncio.CancelledError("this agent has reached its time limit")
        if waits and self._asking == 0:
            self._stop_clock()
        self._asking += 1 if waits else -1
        if not waits and self._asking == 0:
            self._start_clock()

    def _start_clock(self) -> None:
        if not self.done.done():
            self._since = self._loop.time()
            words = f"it spent task.agent_seconds = {self._seconds} without waiting for the policy"
            self._timer = self._loop.call_later(max(self._left, 0), self.end, "timeout", words)

    def _stop_clock(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._left, self._timer = self._left - (self._loop.time() - self._since), None

    def end(self, failure: str = "raised", words: str = "the batch ended before the agent") -> None:
        """Ends the agent if it still runs."""
        self._finish(failure=failure, words=words)
        self._task.cancel()


def _wrong_with(returned: Any) -> tuple[str | None, str]:
    """Returns the failure and the words for a return value that is not a reward; (None, "") for a valid one."""
    values = list(returned.values()) if isinstance(returned, Mapping) else [returned]
    try:
        sound = bool(values) and all(abs(float(value)) <= MOST_REWARD for value in values)
    except (TypeError, ValueError, OverflowError):
        sound = False
    if sound and isinstance(returned, Mapping):
        sound = all(isinstance(name, str) for name in returned)
    form = f"finite numbers of at most {MOST_REWARD:g}, one or a dict of them by name, or None"
    return (None, "") if sound else ("invalid", f"it returned {returned!r:.200}; rewards are {form}")
