"""Runs all agents of a batch concurrently; each trajectory becomes a completion in its problem's group."""

import asyncio
import contextlib
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, UInt32

from recjax.agents.agent_policy import (
    AgentPolicy,
    ContextFull,
    InvalidReward,
    Script,
    Seats,
    TurnsSpent,
    is_reward,
)
from recjax.agents.agent_server import AgentServer
from recjax.agents.named_agents import Agent, check_tool_template, load_agent, named
from recjax.agents.tools import Tools
from recjax.agents.trajectory import thoughts_opening
from recjax.algorithms.options import described
from recjax.config import Config, TaskConfig
from recjax.config.tasks import POLICY
from recjax.errors import UserError, shown
from recjax.experience.group import Completion, Grade, Group, Turn
from recjax.hub.policy import Policy
from recjax.models.sampling import Sampling
from recjax.rewards.custom import Answered
from recjax.rewards.pool import FAILURES, Grading
from recjax.rewards.reward import (
    LENGTH,
    MOST_REWARD,
    ROWS,
    SCORE,
    SHAPING,
    TURNS,
    is_accurate,
    part_weights,
    verdict_of,
)
from recjax.rollout.collecting import Grades, problem_groups, row_keys
from recjax.rollout.engine import Engine
from recjax.rollout.live import LiveEngine
from recjax.rollout.requests import Weights
from recjax.runtime.event_loop import run_to_end
from recjax.tasks.problems import Problem
from recjax.tasks.prompts import Prompts

logger = logging.getLogger(__name__)

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
_LAST = 2**32 - 1


class Tried(NamedTuple):
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
        self._without_verdict: set[str | None] = set()  # names of tasks
        self._reads_parts = config.algorithm.build().reads("reward_parts")
        self._tools = Tools(functions, config.grading.workers, task.tool_seconds) if functions else None
        self._agent = load_agent(task, self._tools)
        if task.agent == "tools":
            assert self._tools is not None
            check_tool_template(policy.tokenizer, self._tools)
        scripted = {name: player for name, player in task.seats.items() if ":" in str(player)}
        self._scripts = {name: named(f"task.seats.{name}", str(player)) for name, player in scripted.items()}
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
        sizes = {"slots": policy.slots, "prefix_time": prompts.tokens.shape[1]}
        lives: dict[int | None, LiveEngine] = {}  # by version; None: the policy's, which gets newer weights
        for at, weights in [(None, params), *self._older_weights(params, version, newer is not None, drifted)]:
            options = {"recording": policy.recording, "newer": newer if at is None else None}
            engine = Engine(policy.decoder, policy.stop_ids, **sizes, **options)
            engine.replace_weights(weights, version if at is None else at)
            lives[at] = LiveEngine(engine)
        problems = [problem for problem in prompts.problems for _ in range(group_size)]
        # Computed before any agent's clock starts, because the device may first have to finish an update.
        keys = turn_keys(key, task.agent_turns, len(problems) * max(len(task.seats), 1))
        tried_seats = run_to_end(self._all_tried(lives, version, policy, problems, keys, sampling))
        self._report_failures([agent[0] for agent in tried_seats], fatal)
        by_group = [
            [agent for agent in seat if agent.failure or agent.policy.trajectory.turns]
            for at in range(0, len(tried_seats), group_size)
            for seat in zip(*tried_seats[at : at + group_size], strict=True)
        ]
        seats = len(task.trained_seats)
        played = [problem for problem in prompts.problems for _ in range(seats)]
        sampled = [[completion_of(agent, source, sampling) for agent in group] for group in by_group]
        groups = problem_groups(name, played, sampled)
        tried = list(itertools.chain(*by_group))
        completions = [completion for group in groups for completion in group.completions]
        indices = [index // seats for index, group in enumerate(by_group) for _ in group]
        problems = [prompts.problems[index] for index in indices]
        texts = [prompts.texts[index] for index in indices]
        opening_of = functools.partial(thoughts_opening, tokenizer=policy.tokenizer)
        answered = [
            Answered.to(problem, text, done.text, done.sampled_tokens, done.id, opening_of(done))
            for agent, text, problem, done in zip(tried, texts, problems, completions, strict=True)
            if agent.needs_reward
        ]
        grades_of = functools.partial(self._grades, tried, completions, grading.reward.weights)
        return groups, Grades(grading.submit(answered) if answered else None, len(answered), grades_of)

    def _older_weights(
        self, params: dict, version: int, swaps: bool, drifted: Callable[[Weights], Weights] | None
    ) -> list[tuple[int, dict]]:
        """Versions and weights of frozen seats, without the sampler's version if it stays the same in a batch."""
        older = self._config.task.older_versions([version])
        try:
            read = {}
            for each in sorted(older - {version}):
                assert self.older_params is not None
                read[each] = self._older.get(each) or self.older_params(each)
        except Exception as error:  # Orbax has its own errors for missing files
            raise UserError(
                "task.seats",
                f"the checkpoint of step {min(older)} cannot be read ({type(error).__name__})",
                "restore it, or play these seats by policy",
                value=self._config.task.seats,
            ) from error
        self._older = read
        played = read
        if drifted is not None:
            played = {each: drifted(Weights(weights, each)).params for each, weights in read.items()}
        return [*played.items(), *([(version, params)] if swaps and version in older else [])]

    async def _all_tried(
        self,
        lives: Mapping[int | None, LiveEngine],
        version: int,
        policy: Policy,
        problems: Sequence[Problem],
        keys: UInt32[np.ndarray, "turns seats words"],
        sampling: Sampling,
    ) -> list[list[Tried]]:
        """The results of each agent's trained seats, in order.

        Args:
            lives: engines by version of frozen weights; None: the policy's engine.
            keys: key data of each seat of each agent, agent by agent.
        """
        task = self._config.task
        names = [*self._config.task.seats] or [""]
        trials = []
        async with contextlib.AsyncExitStack() as stack:
            for live in lives.values():
                await stack.enter_async_context(live)
            server = await stack.enter_async_context(AgentServer())
            for index, problem in enumerate(problems):
                seats = Seats(server)
                for number, name in enumerate(names, index * len(names)):
                    if name in self._scripts:
                        seats.players[name] = Script(self._scripts[name], keys[:, number])
                        continue
                    is_frozen = task.seats.get(name, POLICY) != POLICY
                    live = lives.get(task.seat_version(name, version) if is_frozen else None, lives[None])
                    options = self._config, keys[:, number], problem.template, seats
                    seats.players[name] = AgentPolicy(live, policy, sampling, *options)
                trials.append(_tried(self._agent, problem, seats, task))
            tried = await asyncio.gather(*trials)
            for live in lives.values():
                if live.error is not None:
                    raise RuntimeError("the engine has failed while agents ran") from live.error
        return tried

    def _report_failures(self, tried: Sequence[Tried], fatal: bool) -> None:
        failed = [agent for agent in tried if agent.failure]
        if not failed:
            return
        self.last_failure = f"{failed[0].failure}: {failed[0].words}"
        key = f"task.agent = {self._config.task.agent!r}:"
        is_lost = all(agent.failure in MISTAKES for agent in tried) and self._config.task.agent_failure_reward is None
        if fatal and is_lost:
            raise UserError(
                problem=f"{key} all {len(tried)} agents of a batch failed, the first with {self.last_failure}",
                remedy="correct the agent, or set task.agent_failure_reward",
            )
        # Raised errors are the same failure if they have the same type.
        kinds = [
            (agent.failure, agent.words.partition(":")[0] if agent.failure == "raised" else "") for agent in failed
        ]
        (most, count), *_ = Counter(kinds).most_common(1)
        level = logging.WARNING
        problem = "the most frequent failure"
        if count > max(1, len(tried) // 2):
            level = logging.ERROR
            problem = "most of the batch failed for the same reason, so the policy learns little from it"
        counts = ", ".join(f"{reason} {number}" for reason, number in Counter(kind for kind, _ in kinds).items())
        first = failed[kinds.index(most)]
        summary = f"{key} {len(failed)} of {len(tried)} agents failed: {counts}; {problem}: {first.words};"
        assert first.failure is not None
        logger.log(level, "%s %s", summary, AGENT_FAILURES[first.failure])

    def _grades(
        self,
        tried: Sequence[Tried],
        completions: Sequence[Completion],
        reward_weights: Mapping[str, float],
        of_reward: Sequence[Grade],
    ) -> list[Grade]:
        """Grades agents by their return values, their failures, or the grades that the task's reward gave the rest.

        Args:
            reward_weights: weights of the parts that the task's reward gives.
            of_reward: grades that the task's reward gave.
        Raises:
            UserError: an agent's rewards lack a part that has a weight, or have one with two weights.
        """
        remaining = iter(of_reward)
        grades = []
        for agent, completion in zip(tried, completions, strict=True):
            task_name = completion.metadata.get("task")
            task = self._config.task.of(task_name)
            weights = part_weights(task.reward_weights)
            if agent.failure:
                accurate = None if task_name in self._without_verdict else False
                grades.append(Grade(self._config.task.agent_failure_reward, None, accurate, agent.failure))
                continue
            returned = {}
            if not agent.needs_reward:
                items = agent.returned if isinstance(agent.returned, Mapping) else {SCORE: agent.returned}
                returned = {name: float(value) for name, value in items.items()}
            of_turns = agent.policy.rewarded
            grade = next(remaining) if agent.needs_reward else Grade(None, returned, failure=FAILURES[0])
            reward = grade.reward
            assert grade.reward_parts is not None
            parts = dict(grade.reward_parts)
            if of_turns is not None:
                parts[SCORE] = parts.get(SCORE, 0.0) + of_turns
            self._check_parts({**returned, **({} if of_turns is None else {SCORE: of_turns})}, weights, reward_weights)
            if not agent.needs_reward:
                parts[LENGTH] = completion.sampled_tokens / self._config.rollout.max_completion_tokens
                unknown = [name for name in task.reward_weights if name not in {*parts, TURNS, ROWS}]
                if unknown and not self._config.task.seats:  # a part may be of another seat
                    block_key = f"task.mixture.{task_name}" if self._config.task.mixture else "task"
                    raise UserError(
                        f"{block_key}.reward_weights.{unknown[0]}",
                        "unknown part",
                        f"choose one that the agent returns: {', '.join(parts)}",
                    )
                reward = sum(weights.get(name, 1.0) * value for name, value in parts.items())
            elif reward is not None and of_turns is not None:
                reward += weights.get(SCORE, 1.0) * of_turns
            turn_rewards = agent.policy.rewards
            count = len(completion.turns)
            turns = (
                tuple(weights.get(SCORE, 1.0) * turn_rewards.get(turn, 0.0) for turn in range(count))
                if turn_rewards
                else ()
            )
            grade = grade._replace(reward=reward, reward_parts=parts, turns=turns)
            grade = with_counts(grade, completion, weights)
            if not agent.needs_reward:
                if of_turns is not None and SCORE not in returned:  # the rewards of turns are not the whole score
                    total = {SCORE: of_turns + sum(returned.values())}
                    has_one = len(returned) == 1 or task.verdict == SCORE
                    parts = {LENGTH: parts[LENGTH], **returned, **(total if has_one else {})}
                reader = self._config.verdict_reader(task_name or "")
                if self._config.task.seats:  # the verdict may be a part of another seat
                    accurate = is_accurate(parts, None, task.success, task.verdict)
                else:
                    accurate = verdict_of("the agent's reward", parts, task, reader)
                assert not isinstance(accurate, np.ndarray)
                grade = grade._replace(accurate=accurate)
            if grade.accurate is None:
                self._without_verdict.add(task_name)
            grades.append(grade)
        return grades

    def _check_parts(
        self, returned: Iterable[str], weights: Mapping[str, float], reward_weights: Mapping[str, float]
    ) -> None:
        """Refuses parts of an agent that clash with a task's name or with a weight of the task's reward."""
        for name in returned:
            if name in (self._config.task.mixture or ()):
                raise UserError(
                    f"task.mixture.{name}",
                    f"the agent returns a part {name!r}, so that both would be the metric reward/NAME",
                    "rename the task",
                )
            task_weight = reward_weights.get(name, 1.0)
            if self._reads_parts and weights.get(name, 1.0) != task_weight:
                raise UserError(
                    f"task.reward_weights.{name}",
                    f"the agent gives the part {name!r}, which has weight 1, and the task's reward gives it weight"
                    f" {task_weight:g}",
                    "the advantage reads parts, so set one weight for both",
                )


def with_counts(grade: Grade, completion: Completion, weights: Mapping[str, float]) -> Grade:
    """Adds the parts that count turns and rows to a grade, and their weighted values to its reward."""
    counts = {TURNS: float(len(completion.turns)), ROWS: float(len(completion.rows))}
    reward = grade.reward
    if reward is not None:
        reward = float(np.float32(reward + sum(weights[name] * value for name, value in counts.items())))
    return grade._replace(reward=reward, reward_parts=(grade.reward_parts or {}) | counts)


async def _tried(agent: Agent, problem: Problem, seats: Seats, task: TaskConfig) -> list[Tried]:
    """Runs one agent to its end or its time limit, even if it keeps running; returns the results of trained seats."""
    policy = seats if task.seats else seats.players[""]
    trained = task.trained_seats

    async def outcome() -> tuple[Any, str | None, str]:
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

    running = asyncio.create_task(outcome())
    try:
        async with asyncio.timeout(task.agent_seconds) as seats.timeout:
            await asyncio.wait([running])
        returned, failure, words = running.result()
    except TimeoutError:
        words = f"it spent task.agent_seconds = {task.agent_seconds} without waiting for the policy"
        returned = None
        failure = "timeout"
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
    return [Tried(players[name], reward, failure, words, name) for name, reward in zip(trained, rewards, strict=True)]


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
    by_seat = {trained[0]: returned}
    if seats:
        form = f"{form} for each of the seats {', '.join(trained)}"
        by_seat = dict.fromkeys(trained) if returned is None else returned
        if not (isinstance(by_seat, Mapping) and {*trained} <= by_seat.keys() <= {*seats}):
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


def turn_keys(key: PRNGKeyArray, turns: int, count: int) -> UInt32[np.ndarray, "turns agents words"]:
    """Key data for each turn of each agent; turn 0 has the keys of single-turn completions."""
    later = jax.vmap(jax.random.fold_in, (None, 0))(key, np.uint32(_LAST - np.arange(1, turns)))
    return row_keys(jnp.concatenate([key[None], later]), count)


def completion_of(tried: Tried, source: str, sampling: Sampling) -> Completion:
    """Converts a trajectory to a completion without id and grade; without turns, the completion has no rows."""
    trajectory = tried.policy.trajectory
    return Completion(
        id="",
        source=source,
        text=tried.policy.last_text,
        rows=trajectory.rows,
        sampling=sampling,
        policy_version=trajectory.oldest_version,
        truncated=trajectory.truncated,
        version_runs=trajectory.version_runs,
        turns=tuple(Turn(*end) for end in trajectory.ends),
        metadata={"seat": tried.seat} if tried.seat else {},
    )
