"""The built-in agent that calls tools, and the parser of models' calls."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from recjax.rollout.agent_policy import AgentPolicy
from recjax.rollout.tools import Tools
from recjax.tasks.problems import Problem

# The format of Hermes, Qwen and SmolLM models: JSON between tags, one call or a list of calls.
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class Call(NamedTuple):
    """A call that a model has written; `error` explains an invalid call."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


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
            results = await asyncio.gather(*(answered(tools, call) for call in calls))
            # The model's text stays unchanged, so that its tokens are kept.
            messages = [*messages, reply.message]
            messages += [
                {"role": "tool", "name": call.name, "content": result}
                for call, result in zip(calls, results, strict=True)
            ]

    return use_tools


def parsed_calls(text: str) -> list[Call]:
    """The calls in a reply, in order; text between the tags that is not a valid call gives a call with an error."""
    calls = []
    for written in CALL.findall(text):
        try:
            parsed = json.loads(written)
        except (ValueError, RecursionError) as error:
            calls.append(Call("", {}, f"this is not JSON: {error}"))
            continue
        for call in parsed if isinstance(parsed, list) else [parsed]:
            if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
                calls.append(Call("", {}, 'a call is {"name": …, "arguments": {…}}'))
                continue
            arguments = call.get("arguments", call.get("parameters", {}))
            is_object = isinstance(arguments, dict)
            problem = None if is_object else "arguments must be an object"
            calls.append(Call(call["name"], arguments if is_object else {}, problem))
    return calls


async def answered(tools: Tools, call: Call) -> str:
    """The text that the model gets for its call: the result or the error."""
    if call.error is not None:
        return f"error: {call.error}"
    return await tools.call(call.name, call.arguments)
