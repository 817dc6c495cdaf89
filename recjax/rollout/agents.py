"""Runs all agents of a batch concurrently; each trajectory becomes a completion in its problem's group."""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, UInt32

from recjax.config import Config
from recjax.experience.group import Completion, Group, Turn
from recjax.hub.policy import Policy
from recjax.models.sampling import Sampling
from recjax.rollout.agent_grades import AgentGrades
from recjax.rollout.agent_policy import AgentLimits, AgentPolicy
from recjax.rollout.agent_trials import FAILURES, MISTAKES, Trial, Tried
from recjax.rollout.collecting import row_keys
from recjax.rollout.engine import Engine
from recjax.rollout.live import LiveEngine
from recjax.rollout.named_agents import load_agent, named
from recjax.rollout.requests import Weights
from recjax.rollout.tools import Tools
from recjax.rollout.trajectory import thoughts_opening
from recjax.tasks.grading.event_loop import finished
from recjax.tasks.grading.pool import Grading
from recjax.tasks.problems import Problem
from recjax.tasks.prompts import Prompts

logger = logging.getLogger(__name__)

_LAST = 2**32 - 1


class Agents:
    """The agent that a run uses, with its tools; a context that holds their processes.

    An agent that raises, hangs or returns nonsense does not affect other agents. An agent that blocks, by computing or
    sleeping without `await`, holds up all agents, and recjax cannot end it.
    """

    def __init__(self, config: Config, policy: Policy):
        """Loads the agent and its tools.

        Args:
            policy: policy before adapters are added.
        Raises:
            ValueError: the agent or a tool cannot be loaded, or the run has several processes.
        """
        if jax.process_count() > 1:
            raise ValueError(
                f"task.agent = {config.task.agent!r}: agents need a run with a single process, and this run has"
                f" {jax.process_count()}; start one process"
            )
        task = config.task
        functions = {name: named("task.tools", name) for name in task.tools}
        self._config, self.last_failure = config, ""
        self._tools = Tools(functions, config.grading.workers, task.tool_seconds) if functions else None
        self._agent = load_agent(task, self._tools)

    def __enter__(self) -> "Agents":
        """Returns itself; processes start when they are first needed."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the processes."""
        if self._tools:
            self._tools.__exit__(*exception)

    def sample_groups(
        self,
        policy: Policy,
        params: dict,
        prompts: Prompts,
        key: PRNGKeyArray,
        group_size: int,
        sampling: Sampling,
        grading: Grading,
        *,
        name: str,
        source: str,
        version: int,
        newer: Callable[[], Weights | None] | None = None,
        fatal: bool = True,
    ) -> tuple[list[Group], "AgentGrades"]:
        """Samples `group_size` trajectories for each problem; returns groups, and grades that may still be computed.

        Args:
            key: sampling key. Turn 0 of agent i, in the order of the problems, uses fold_in(key, i), like a single-turn
                completion; turn k uses fold_in(fold_in(key, 2^32 − 1 − k), i).
            grading: pool that grades the last messages of agents that return None.
            fatal: True raises an error if all agents fail by their own mistakes without `task.agent_failure_reward`.
            (others): see `collecting.sample_groups`.
        Raises:
            ValueError: all agents failed, see `fatal`.
            RuntimeError: the engine failed.
        """
        engine = Engine(policy.decoder, policy.stop_ids, slots=policy.slots, prefix_time=prompts.tokens.shape[1])
        engine.replace_weights(params, version)
        problems = [problem for problem in prompts.problems for _ in range(group_size)]
        # Computed before any agent's clock starts, because the device may first have to finish an update.
        keys = turn_keys(key, self._config.task.agent_turns, len(problems))
        tried = finished(self._all_tried(LiveEngine(engine, newer=newer), policy, problems, keys, sampling))
        self._report_failures(tried, fatal)
        completions = [completion_of(one, f"{name}/{place:05d}", source, sampling) for place, one in enumerate(tried)]
        groups = []
        for place, problem in enumerate(prompts.problems):
            own = tuple(completions[place * group_size : (place + 1) * group_size])
            # The group's prompt is the first prompt that one of its agents made.
            prompts_made = (row.prompt_tokens for one in own for row in one.rows)
            prompt = next(prompts_made, np.zeros(0, np.int32))
            groups.append(Group(f"{name}/{place:05d}", prompt, own, problem.prompt, problem.answer))
        texts = [text for text in prompts.texts for _ in range(group_size)]
        openings = [thoughts_opening(completion, policy.tokenizer) for completion in completions]
        return groups, AgentGrades(self._config, tried, texts, openings, problems, grading)

    async def _all_tried(
        self, live: LiveEngine, policy: Policy, problems: Sequence[Problem], keys: np.ndarray, sampling: Sampling
    ) -> list[Tried]:
        rollout, task = self._config.rollout, self._config.task
        limits = AgentLimits(rollout.max_completion_tokens, rollout.max_context_tokens, task.agent_turns)
        async with live:

            def policy_of(place: int, at_work: Callable[[bool], None]) -> AgentPolicy:
                def key_of(turn: int) -> np.ndarray:
                    return keys[turn][place]

                return AgentPolicy(live, policy, sampling, limits, key_of, at_work, problems[place].template)

            trials = [
                Trial(self._agent, problem, functools.partial(policy_of, place), task.agent_seconds)
                for place, problem in enumerate(problems)
            ]
            try:
                tried = [await trial.done for trial in trials]
            finally:
                for trial in trials:
                    trial.end()
            if live.error is not None:
                raise RuntimeError("the engine has failed while agents ran") from live.error
        return tried

    def _report_failures(self, tried: Sequence[Tried], fatal: bool) -> None:
        failed = [one for one in tried if one.failure]
        if not failed:
            return
        self.last_failure = f"{failed[0].failure}: {failed[0].words}"
        mistakes = [one for one in failed if one.failure in MISTAKES]
        place = f"task.agent = {self._config.task.agent!r}:"
        if fatal and len(mistakes) == len(tried) and self._config.task.agent_failure_reward is None:
            raise ValueError(
                f"{place} all {len(tried)} agents of a batch failed, the first with {self.last_failure}; correct the"
                " agent, or set task.agent_failure_reward"
            )
        counts = ", ".join(f"{reason} {count}" for reason, count in Counter(one.failure for one in failed).items())
        said = f"{place} {len(failed)} of {len(tried)} agents failed: {counts}"
        (most, count), *_ = Counter(map(_reason, failed)).most_common(1)
        if 2 * count <= len(tried) or count == 1:
            logger.warning("%s; the first: %s", said, failed[0].words)
            return
        first = next(one for one in failed if _reason(one) == most)
        logger.error(
            "%s; most of the batch failed for the same reason, so the policy learns little from it: %s; %s",
            said,
            first.words,
            FAILURES[first.failure],
        )


def _reason(tried: Tried) -> tuple[str | None, str]:
    """A key that groups similar failures: their kind and, for raised errors, the error's type."""
    return tried.failure, tried.words.partition(":")[0] if tried.failure == "raised" else ""


def turn_keys(key: PRNGKeyArray, turns: int, count: int) -> UInt32[np.ndarray, "turns agents words"]:
    """Key data for each turn of each agent; turn 0 has the keys of single-turn completions."""
    later = jax.vmap(jax.random.fold_in, (None, 0))(key, np.uint32(_LAST - np.arange(1, turns)))
    return row_keys(jnp.concatenate([key[None], later]), count)


def completion_of(tried: Tried, name: str, source: str, sampling: Sampling) -> Completion:
    """Converts a trajectory to a completion without a grade; without turns, the completion has no rows."""
    trajectory = tried.policy.trajectory
    return Completion(
        id=name,
        source=source,
        text=tried.policy.last_text,
        rows=trajectory.rows,
        sampling=sampling,
        policy_version=trajectory.oldest_version if trajectory.turns else None,
        truncated=bool(trajectory.turns) and trajectory.truncated,
        version_runs=trajectory.version_runs,
        turns=tuple(Turn(*end) for end in trajectory.ends),
    )
