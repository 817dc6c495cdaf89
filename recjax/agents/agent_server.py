"""An OpenAI-compatible address for each agent, so that an agent's own client or framework samples from the policy."""

import asyncio
import contextlib
import importlib.util
import json
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from recjax.agents.tools import openai_calls
from recjax.errors import UserError

CHAT = "/v1/chat/completions"
# Keys of a request that reach the policy, keys that change nothing here, and the only values of keys that recjax does
# not sample by: an agent's replies have the run's own distribution.
_READ = ("messages", "tools", "max_tokens", "max_completion_tokens", "stop", "chat_template_kwargs")
_IGNORED = ("model", "user", "metadata", "store", "tool_choice", "parallel_tool_calls", "stream_options", "seed")
_FIXED = {"n": 1, "stream": False, "logprobs": False, "temperature": None, "top_p": None, "top_logprobs": None}
_FIXED |= {"frequency_penalty": 0, "presence_penalty": 0, "response_format": None}


@runtime_checkable
class Chatting(Protocol):
    """A policy whose `chat` answers requests, see `recjax.agents.agent_policy.AgentPolicy`.

    relayed: the failure that the last request got as an HTTP error; None: it got a reply.
    """

    relayed: Exception | None

    @property
    def chat(self) -> Callable[..., Awaitable[Any]]:
        """Asks for the reply to messages."""


class AgentServer(contextlib.AbstractAsyncContextManager):
    """Answers chat requests of agents in their event loop; a context that listens from the first address on.

    It listens on 127.0.0.1 only. Each agent has a key of its own, which ends with the agents of the batch.
    """

    def __init__(self) -> None:
        """Does not listen yet."""
        self._policies: dict[str, Chatting] = {}  # by key
        self._written: dict[Chatting, dict[str, str]] = {}  # texts of replies with calls, by `call_key`
        self._server: Any = None
        self._serving: asyncio.Task | None = None
        self._address = ""

    def address(self, policy: Chatting) -> tuple[str, str]:
        """The base URL for an OpenAI client, and a new key for a policy; starts the server if it does not run yet.

        Raises:
            UserError: the packages of the extra `serve` are not installed.
        """
        if self._serving is None:
            self._start()
        key = secrets.token_urlsafe(24)
        self._policies[key] = policy
        return self._address, key

    def _start(self) -> None:
        for package in ("starlette", "uvicorn"):
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    problem=f"policy.base_url needs the package {package}", remedy='pip install -e ".[serve]"'
                )
        # Not at module level: most agents need no server, and its packages are an extra.
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        app = Starlette(routes=[Route(CHAT, self._chat, methods=["POST"])])
        listening = socket.create_server(("127.0.0.1", 0))
        settings: dict[str, Any] = {"log_config": None, "lifespan": "off", "timeout_graceful_shutdown": 1}
        self._server = uvicorn.Server(uvicorn.Config(app, **settings))
        self._address = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listening]))

    async def __aexit__(self, *exception: object) -> None:
        """Ends the server and all its connections."""
        self._policies.clear()
        self._written.clear()
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving

    async def _chat(self, request: Any) -> Any:
        """Answers a chat request; the agent's failures and mistakes have OpenAI's form of errors."""
        from starlette.responses import JSONResponse

        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or key not in self._policies:
            key = request.headers.get("x-api-key", "")
        policy = self._policies.get(key)
        if policy is None:
            return JSONResponse(_error("the key is none of a running agent; use policy.api_key"), 401)
        try:
            body = json.loads(await request.body())
            arguments = chat_arguments(body)
            arguments["messages"] = with_sampled_text(arguments["messages"], self._written.get(policy, {}))
            reply = await policy.chat(**arguments)
            policy.relayed = None
        except asyncio.CancelledError:
            return JSONResponse(_error("this agent has ended"), 400)
        except Exception as error:
            failure = getattr(error, "failure", None)
            if failure is not None:
                policy.relayed = error
            code = failure
            if failure == "context":
                code = "context_length_exceeded"
            return JSONResponse(_error(str(error), code), 400)
        completion = chat_completion(reply, body.get("model", "policy"), bool(body.get("tools")))
        message = completion["choices"][0]["message"]
        if "tool_calls" in message:
            self._written.setdefault(policy, {})[call_key(message)] = reply.text
        return JSONResponse(completion)


def chat_arguments(body: Any) -> dict[str, Any]:
    """The arguments of `AgentPolicy.chat` in the body of a request.

    Raises:
        UserError: a key that recjax does not know or a value that an agent cannot choose; with the remedy.
    """
    if not isinstance(body, Mapping):
        raise UserError(problem=f"the body is {body!r:.80}: takes a JSON object with messages")
    for name, value in body.items():
        if name not in _READ and name not in _IGNORED and name not in _FIXED:
            raise UserError(name, f"policy.base_url takes {', '.join(_READ)}", "remove this key")
        if name in _FIXED and value is not None and value != _FIXED[name]:
            raise UserError(
                name,
                f"policy.base_url takes {_FIXED[name]!r}",
                "remove it; the agent samples from the run's distribution (rollout.temperature and its neighbors)",
                value=value,
            )
    max_tokens = body.get("max_completion_tokens")
    if max_tokens is None:
        max_tokens = body.get("max_tokens")
    return {
        "messages": body.get("messages"),
        "tools": body.get("tools"),
        "max_tokens": max_tokens,
        "stop": body.get("stop") or (),
        "chat_template_kwargs": body.get("chat_template_kwargs") or {},
    }


def with_sampled_text(messages: Any, written: Mapping[str, str]) -> Any:
    """Messages in which replies with calls that a client sends back unchanged have the text that the policy wrote.

    Rendered from its calls, such a reply could have other tokens than the sampled ones.

    Args:
        written: texts of earlier replies, by `call_key` of their messages.
    """
    if not written or not isinstance(messages, list):
        return messages
    texts = []
    for message in messages:
        if isinstance(message, Mapping) and message.get("role") == "assistant" and message.get("tool_calls"):
            text = written.get(call_key(message))
            if text is not None:
                message = {"role": "assistant", "content": text}
        texts.append(message)
    return texts


def call_key(message: Mapping[str, Any]) -> str:
    """What identifies a reply with calls: its content, and the calls with their ids, which occur once."""
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", {})
        calls.append([call.get("id"), function.get("name"), function.get("arguments")])
    return json.dumps([(message.get("content") or "").strip(), calls])


def chat_completion(reply: Any, model: str, has_tools: bool) -> dict[str, Any]:
    """A reply in the form of OpenAI's chat completions.

    Args:
        reply: `recjax.agents.agent_policy.Reply`.
        model: name of the model in the request.
        has_tools: True if the request has tools, so that calls in the reply are read.
    """
    name = f"chatcmpl-{secrets.token_hex(8)}"
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    finish = "stop"
    content = reply.text
    calls = []
    if has_tools:
        content, calls = openai_calls(reply.text, reply.answer)
    if calls:
        message["content"] = content
        message["tool_calls"] = [{"id": f"call_{name}_{index}", **call} for index, call in enumerate(calls)]
        finish = "tool_calls"
    if reply.truncated:
        finish = "length"
    counts = [len(reply.prompt_tokens), len(reply.tokens)]
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)},
    }


def _error(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
