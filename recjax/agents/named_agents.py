"""Agents by name: a user's coroutine function, and the built-in agents for tools and for environments."""

import asyncio
import contextlib
import hashlib
import importlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from recjax.agents.agent_policy import AgentPolicy
from recjax.agents.tools import Tools, parsed_calls
from recjax.algorithms.options import described
from recjax.config import TaskConfig
from recjax.errors import UserError, shown
from recjax.hub.chat_rendering import reads_variable, render_chats
from recjax.tasks.gymnasium_environments import TextEnvironment
from recjax.tasks.problems import PLAYED_ROW, Problem, checked_messages
from recjax.tasks.verifiers_environments import VerifiersEnvironment, open_verifiers

logger = logging.getLogger(__name__)

Agent = Callable[[Problem, Any], Awaitable[float | Mapping[str, float] | None]]


def load_agent(task: TaskConfig, tools: Tools | None) -> Agent:
    """Returns the agent that the config names: a built-in one, or the user's own.

    Args:
        tools: tools in `task.tools`; None if it is empty.
    Raises:
        UserError: the agent cannot be imported, or is not `async def agent(problem, policy)`.
    """
    if task.agent == "tools":
        assert tools is not None
        return tool_agent(tools, task.agent_turns)
    if task.verifiers is not None:
        return VerifiersAgent(open_verifiers(task.verifiers, task.agent_turns))
    if task.gymnasium is not None:
        block = task.gymnasium

        def game(problem: Problem) -> TextEnvironment:
            return TextEnvironment(block, problem.columns[PLAYED_ROW])

        return environment_agent(game, task.agent_turns)
    if task.agent == "environment":
        assert task.environment is not None
        return environment_agent(named("task.environment", task.environment), task.agent_turns)
    assert task.agent is not None
    agent = named("task.agent", task.agent)
    key = f"task.agent = {task.agent!r}:"
    form = "write it as async def agent(problem, policy)"
    if not (inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None))):  # noqa: B004
        raise UserError(key, "must be a coroutine function", form)
    try:
        inspect.signature(agent).bind(None, None)
    except TypeError as error:
        raise UserError(key, f"must take a problem and a policy ({error})", form) from error
    return agent


def named(key: str, name: str) -> Any:
    """Imports the object that `name` gives as module:name.

    Raises:
        UserError: the module or the name does not exist.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise UserError(
            key, described(error), "the module must be importable from the folder you start in or installed", value=name
        ) from error


# --- Tools.


def tool_agent(tools: Tools, turns: int) -> Callable:
    """Returns an agent that lets the model call tools until a reply has no call; the task's reward grades that reply.

    A call inside the model's thoughts is a draft, which does not run.

    Args:
        tools: tools that stay open while the agent runs.
        turns: largest number of replies.
    """

    async def use_tools(problem: Problem, policy: AgentPolicy) -> None:
        if isinstance(problem.prompt, str):
            messages = [{"role": "user", "content": problem.prompt}]
        else:
            messages = list(problem.prompt)
        for turn in range(turns):
            reply = await policy.chat(messages, tools=tools.schemas)
            calls = parsed_calls(reply.answer)
            if not calls or turn == turns - 1:
                return
            results = await asyncio.gather(*(tools.answer(call) for call in calls))
            # The model's text stays unchanged, so that its tokens are kept.
            messages = [*messages, reply.message]
            for call, result in zip(calls, results, strict=True):
                messages.append({"role": "tool", "name": call.name, "content": result})

    return use_tools


def check_tool_template(tokenizer: PreTrainedTokenizerBase, tools: Tools) -> None:
    """Checks that the chat template can render the messages of the tools agent; warns if it shows no tools.

    Raises:
        UserError: the model has no chat template, or it refuses a tool's result after a reply that calls the tool.
    """
    name = tools.schemas[0]["function"]["name"]
    call = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
    chat = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": call},
        {"role": "tool", "name": name, "content": "a result"},
    ]
    try:
        render_chats(tokenizer, [chat], tools=tools.schemas)
    except UserError as error:
        raise UserError(
            "task.agent",
            str(error),
            "use a model whose template takes tool results, or write an agent of your own",
            value="tools",
        ) from error
    if not reads_variable(tokenizer, "tools"):
        logger.warning(
            "task.agent = 'tools': the chat template of %s shows no tools to the model, so the model knows only the"
            " tools that your prompts describe",
            tokenizer.name_or_path or "the tokenizer",
        )


# --- Environments.


class VerifiersAgent:
    """Plays rollouts of an environment of the package verifiers, whose client asks the policy's address."""

    def __init__(self, environment: VerifiersEnvironment):
        """Stores the environment."""
        self._environment = environment

    def serving(self) -> contextlib.AbstractAsyncContextManager:
        """A context that holds what the agents of a batch share."""
        return self._environment.serving()

    async def __call__(self, problem: Problem, policy: AgentPolicy) -> dict[str, float]:
        """Plays one rollout; returns the parts of its reward."""
        return await self._environment.play(problem, policy)


def environment_agent(environment: Callable[[Problem], Any], turns: int) -> Callable:
    """Returns an agent that plays an environment to its end; each reply gets the reward of the step that it caused.

    The agent creates the environment from the problem. If the environment has `close()`, the agent calls it at the end,
    also after an error or a timeout. `reset(seed=…)` returns (observation, info) and `step(action)` returns
    (observation, reward, terminated, truncated, info). All of them may be coroutine functions; others must not block.
    An observation is a text, None, or, after a prompt of messages, a list of messages. If the final info contains
    "parts", these named parts are the whole reward instead of the steps' rewards.

    Args:
        environment: class or function that takes the problem.
        turns: largest number of steps.
    """

    async def play(problem: Problem, policy: AgentPolicy) -> float | dict[str, float]:
        world = await _awaited(environment(problem))
        steps = []  # rewards, with the replies that caused them
        try:
            # The seed depends only on the problem, so that all agents of a group play the same game.
            digest = hashlib.sha256(f"{problem.prompt}\n{problem.answer}".encode()).digest()
            try:
                inspect.signature(world.reset).bind(seed=0)
            except TypeError as error:
                raise UserError(
                    "task.environment",
                    f"reset() must take a seed ({error})",
                    "write it as reset(self, *, seed=None, options=None)",
                ) from error
            started = await _awaited(world.reset(seed=int.from_bytes(digest[:4], "big")))
            observation, info = _checked_result("reset", started, ("observation", "info"))
            prompt = problem.prompt
            if not isinstance(prompt, str):
                prompt = list(prompt)
            prompt = _with_observation(prompt, observation)
            for _ in range(turns):
                if isinstance(prompt, str):
                    reply = await policy.complete(prompt)
                    dialog = prompt + reply.raw
                else:
                    reply = await policy.chat(prompt)
                    dialog = [*prompt, reply.message]
                stepped = await _awaited(world.step(reply.text))
                observation, reward, terminated, truncated, info = _checked_result("step", stepped, _STEP)
                steps.append((float(reward), reply))
                if terminated or truncated:
                    break
                prompt = _with_observation(dialog, observation)
        finally:
            try:
                await _awaited(getattr(world, "close", lambda: None)())
            except Exception:
                logger.warning("an environment's close() failed", exc_info=True)
        if "parts" in info:
            return info["parts"]
        for reward, reply in steps:
            policy.reward(reward, reply)
        return 0.0

    return play


_STEP = ("observation", "reward", "terminated", "truncated", "info")


async def _awaited(result: Any) -> Any:
    if inspect.isawaitable(result):
        return await result
    return result


def _checked_result(method: str, result: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """What a method of an environment returned, if it has the right number of values."""
    if not isinstance(result, tuple) or len(result) != len(names):
        raise UserError("task.environment", f"{method}() returned {shown(result, 80)}", f"return ({', '.join(names)})")
    return result


def _with_observation(before: str | list[dict[str, Any]], observation: Any) -> str | list[dict[str, Any]]:
    """The next prompt: the text or the messages before, and the observation.

    Raises:
        UserError: the observation is neither a text nor messages, or there are messages after a text.
    """
    if observation is None or (isinstance(observation, str) and not observation):
        return before
    if isinstance(before, str):
        if not isinstance(observation, str):
            remedy = "after a prompt that is a text, return a text or None"
            raise UserError("task.environment", f"the observation is {shown(observation, 80)}", remedy)
        return before + observation
    if isinstance(observation, str):
        return [*before, {"role": "user", "content": observation}]
    if not isinstance(observation, list):
        remedy = "return a text, a list of messages or None"
        raise UserError("task.environment", f"the observation is {shown(observation, 80)}", remedy)
    return [*before, *checked_messages(observation, "task.environment: the observation")]
