"""Runs all agents of a batch concurrently; each trajectory becomes a completion in its problem's group."""

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, UInt32

from recjax.agents.agent_grades import AgentGrader
from recjax.agents.agent_policy import AgentPolicy, Script, Seats
from recjax.agents.agent_server import AgentServer
from recjax.agents.named_agents import VerifiersAgent, check_tool_template, load_agent, named
from recjax.agents.tools import Tools
from recjax.agents.trajectory import thoughts_opening
from recjax.agents.trials import AGENT_FAILURES, MISTAKES, Trial, try_agent
from recjax.config import Config
from recjax.config.tasks import POLICY
from recjax.errors import UserError
from recjax.experience.group import Completion, Group, Turn
from recjax.hub.policy import Policy
from recjax.models.sampling import Sampling
from recjax.rewards.custom import Answered
from recjax.rewards.pool import Grading
from recjax.rollout.collecting import Grades, problem_groups, row_keys
from recjax.rollout.engine import Engine
from recjax.rollout.live import LiveEngine
from recjax.rollout.requests import Weights
from recjax.runtime.event_loop import run_to_end
from recjax.tasks.problems import Problem
from recjax.tasks.prompts import Prompts

logger = logging.getLogger(__name__)

_LAST = 2**32 - 1  # turn k ≥ 1 folds the number _LAST − k into the key, which no agent's index reaches


class Agents(contextlib.AbstractContextManager):
    """The agent that a run uses, with its tools; a context that holds their processes, which start when needed.

    An agent that raises, hangs or returns nonsense does not affect other agents. An agent that blocks, by computing or
    sleeping without `await`, holds up all agents, and recjax cannot end it.
    """

    def __init__(self, config: Config, policy: Policy, older_params: Callable[[int], dict] | None = None):
        """Loads the agent and its tools.

        Args:
            policy: policy before adapters are added.
            older_params: reads all parameters after an earlier step, in the compute dtype, for frozen seats.
        Raises:
            UserError: the agent or a tool cannot be loaded, or the run has several processes.
        """
        if jax.process_count() > 1:
            raise UserError(
                "task.agent",
                f"agents need a run with a single process, and this run has {jax.process_count()}",
                "start one process",
                value=config.task.agent,
            )
        task = config.task
        functions = {name: named("task.tools", name) for name in task.tools}
        self._config = config
        self.last_failure = ""
        self._grader = AgentGrader(config)
        self._tools = None
        if functions:
            self._tools = Tools(functions, config.grading.workers, task.tool_seconds)
        self._agent = load_agent(task, self._tools)
        if task.agent == "tools":
            assert self._tools is not None
            check_tool_template(policy.tokenizer, self._tools)
        self._scripts: dict[str, Any] = {}  # functions of scripted seats
        for name, player in task.seats.items():
            if ":" in str(player):
                self._scripts[name] = named(f"task.seats.{name}", str(player))
        self.older_params = older_params
        self._older: dict[int, dict] = {}

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
        drifted: Callable[[Weights], Weights] | None = None,
        fatal: bool = True,
    ) -> tuple[list[Group], Grades]:
        """Samples `group_size` trajectories for each problem; returns groups, and grades that may still be computed.

        With seats, each problem has a group for each trained seat, one after the other. A group lacks the seats that
        an agent did not use.

        Args:
            key: sampling key. Turn 0 of agent i, in the order of the problems, uses fold_in(key, i), like a single-turn
                completion; turn k uses fold_in(fold_in(key, 2^32 − 1 − k), i). Seat j of n has i · n + j instead of i.
            grading: pool that grades the last messages of agents that return None.
            drifted: changes the weights of frozen seats as `params` are changed; None: all weights are exact.
            fatal: True raises an error if all agents fail by their own mistakes without `task.agent_failure_reward`.
            (others): see `collecting.sample_groups`.
        Raises:
            UserError: all agents failed, see `fatal`; or the weights of a frozen seat cannot be read.
            RuntimeError: the engine failed.
        """
        task = self._config.task

        def engine_with(weights: Weights, newer: Callable[[], Weights | None] | None = None) -> LiveEngine:
            engine = Engine(
                policy.decoder,
                policy.stop_ids,
                slots=policy.slots,
                prefix_time=prompts.tokens.shape[1],
                context=self._config.rollout.max_context_tokens,
                newer=newer,
                recording=policy.recording,
            )
            engine.replace_weights(weights.params, weights.version)
            return LiveEngine(engine)

        # Engines by version of frozen weights; None: the policy's engine, which gets newer weights.
        own_weights = Weights(params, version)
        lives: dict[int | None, LiveEngine] = {None: engine_with(own_weights, newer)}
        for frozen in self._frozen_weights(own_weights, swaps=newer is not None, drifted=drifted):
            lives[frozen.version] = engine_with(frozen)
        agent_problems = []  # the problem of each agent
        for problem in prompts.problems:
            agent_problems += [problem] * group_size
        # Computed before any agent's clock starts, because the device may first have to finish an update.
        keys = turn_keys(key, task.agent_turns, len(agent_problems) * max(len(task.seats), 1))
        agent_trials = run_to_end(
            self._try_all(lives, version, policy, problems=agent_problems, keys=keys, sampling=sampling)
        )
        self._report_failures([seat_trials[0] for seat_trials in agent_trials], fatal)

        group_trials = []  # for each problem, its trained seats in order
        for start in range(0, len(agent_trials), group_size):
            problem_trials = agent_trials[start : start + group_size]
            for trials_of_seat in zip(*problem_trials, strict=True):
                used = [trial for trial in trials_of_seat if trial.failure or trial.policy.trajectory.turns]
                group_trials.append(used)
        seats = len(task.trained_seats)
        group_problems = []
        for problem in prompts.problems:
            group_problems += [problem] * seats
        sampled = []
        for trials in group_trials:
            sampled.append([completion_of(trial, source, sampling) for trial in trials])
        groups = problem_groups(name, group_problems, sampled)

        all_trials = []
        completions = []
        answered = []
        for index, group in enumerate(groups):
            text = prompts.texts[index // seats]
            for trial, completion in zip(group_trials[index], group.completions, strict=True):
                all_trials.append(trial)
                completions.append(completion)
                if trial.needs_reward:
                    answered.append(
                        Answered.to(
                            group_problems[index],
                            text,
                            completion=completion.text,
                            length=completion.sampled_tokens,
                            id=completion.id,
                            opening=thoughts_opening(completion, policy.tokenizer),
                        )
                    )
        scores = None
        if answered:
            scores = grading.submit(answered)
        grades_of = functools.partial(self._grader.grades, all_trials, completions, grading.reward.weights)
        return groups, Grades(scores, len(answered), grades_of)

    def _frozen_weights(
        self, weights: Weights, swaps: bool, drifted: Callable[[Weights], Weights] | None
    ) -> list[Weights]:
        """The weights of frozen seats, except the sampler's version if it stays the same in a batch.

        Args:
            weights: the sampler's weights.
            swaps: True if the sampler gets newer weights during a batch.
        """
        version = weights.version
        versions = self._config.task.older_versions([version])
        read = {}
        for older in sorted(versions - {version}):
            assert self.older_params is not None
            kept = self._older.get(older)
            if not kept:
                try:
                    kept = self.older_params(older)
                except Exception as error:  # Orbax has its own errors for missing files
                    raise UserError(
                        "task.seats",
                        f"the checkpoint of step {older} cannot be read ({type(error).__name__})",
                        "restore it, or play these seats by policy",
                        value=self._config.task.seats,
                    ) from error
            read[older] = kept
        self._older = read
        frozen = [Weights(params, older) for older, params in read.items()]
        if drifted is not None:
            frozen = [drifted(older) for older in frozen]
        if swaps and version in versions:
            frozen.append(weights)
        return frozen

    async def _try_all(
        self,
        lives: Mapping[int | None, LiveEngine],
        version: int,
        policy: Policy,
        problems: Sequence[Problem],
        keys: UInt32[np.ndarray, "turns seats words"],
        sampling: Sampling,
    ) -> list[list[Trial]]:
        """The results of each agent's trained seats, in order.

        Args:
            lives: engines by version of frozen weights; None: the policy's engine.
            keys: key data of each seat of each agent, agent by agent.
        """
        task = self._config.task
        names = list(task.seats)
        if not names:
            names = [""]  # the agent itself is the only seat
        running = []
        async with contextlib.AsyncExitStack() as stack:
            for live in lives.values():
                await stack.enter_async_context(live)
            server = await stack.enter_async_context(AgentServer())
            if isinstance(self._agent, VerifiersAgent):
                await stack.enter_async_context(self._agent.serving())
            for index, problem in enumerate(problems):
                seats = Seats(server)
                first_number = index * len(names)
                for number, name in enumerate(names, first_number):
                    if name in self._scripts:
                        seats.players[name] = Script(self._scripts[name], keys[:, number])
                        continue
                    live = lives[None]
                    if task.seats.get(name, POLICY) != POLICY:
                        live = lives.get(task.seat_version(name, version), live)
                    seats.players[name] = AgentPolicy(
                        live,
                        policy,
                        sampling,
                        config=self._config,
                        keys=keys[:, number],
                        template=problem.template,
                        seats=seats,
                    )
                running.append(try_agent(self._agent, problem, seats, task))
            trials = await asyncio.gather(*running)
            for live in lives.values():
                if live.error is not None:
                    raise RuntimeError("the engine has failed while agents ran") from live.error
        return trials

    def _report_failures(self, trials: Sequence[Trial], fatal: bool) -> None:
        """Logs the failures of a batch's agents.

        Args:
            trials: the first seat of each agent.
        Raises:
            UserError: all agents failed, see `sample_groups`.
        """
        failed = [trial for trial in trials if trial.failure]
        if not failed:
            return
        self.last_failure = f"{failed[0].failure}: {failed[0].words}"
        key = f"task.agent = {self._config.task.agent!r}:"
        are_mistakes = all(trial.failure in MISTAKES for trial in trials)
        if fatal and are_mistakes and self._config.task.agent_failure_reward is None:
            raise UserError(
                problem=f"{key} all {len(trials)} agents of a batch failed, the first with {self.last_failure}",
                remedy="correct the agent, or set task.agent_failure_reward",
            )
        kinds = []
        for trial in failed:
            error_type = ""
            if trial.failure == "raised":  # raised errors are the same failure if they have the same type
                error_type = trial.words.partition(":")[0]
            kinds.append((trial.failure, error_type))
        most_frequent, count = Counter(kinds).most_common(1)[0]
        level = logging.WARNING
        problem = "the most frequent failure"
        if count > max(1, len(trials) // 2):
            level = logging.ERROR
            problem = "most of the batch failed for the same reason, so the policy learns little from it"
        counter = Counter(trial.failure for trial in failed)
        counts = ", ".join(f"{failure} {number}" for failure, number in counter.items())
        first = failed[kinds.index(most_frequent)]
        summary = f"{key} {len(failed)} of {len(trials)} agents failed: {counts}; {problem}: {first.words};"
        assert first.failure is not None
        logger.log(level, "%s %s", summary, AGENT_FAILURES[first.failure])


def turn_keys(key: PRNGKeyArray, turns: int, count: int) -> UInt32[np.ndarray, "turns agents words"]:
    """Key data for each turn of each agent; turn 0 has the keys of single-turn completions."""
    later = jax.vmap(jax.random.fold_in, (None, 0))(key, np.uint32(_LAST - np.arange(1, turns)))
    return row_keys(jnp.concatenate([key[None], later]), count)


def completion_of(trial: Trial, source: str, sampling: Sampling) -> Completion:
    """Converts a trajectory to a completion without id and grade; without turns, the completion has no rows."""
    trajectory = trial.policy.trajectory
    metadata = {}
    if trial.seat:
        metadata["seat"] = trial.seat
    return Completion(
        id="",
        source=source,
        text=trial.policy.last_text,
        rows=trajectory.rows,
        sampling=sampling,
        policy_version=trajectory.oldest_version,
        truncated=trajectory.truncated,
        version_runs=trajectory.version_runs,
        turns=tuple(Turn(row, end) for row, end in trajectory.ends),
        metadata=metadata,
    )
