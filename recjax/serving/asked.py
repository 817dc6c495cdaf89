"""Parses and checks request bodies of OpenAI's API and vLLM's API."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from recjax.config.fields import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, wrong_with_variables
from recjax.models.sampling import Sampling
from recjax.serving.fields import Fields
from recjax.serving.refusals import Refused

MOST_CHOICES, MOST_STOPS, MOST_STOP_CHARACTERS, MOST_TOOLS = 128, 16, 256, 128
_COMMON = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
}
_CHAT = {
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "store": (True,),
}
_TEXT = {"echo": (False,), "suffix": ("",), "best_of": (1,)}
_GENERATE = {"detokenize": (True,), "skip_special_tokens": (True, False), "ignore_eos": (False,), "min_tokens": (0,)}


class Asked(NamedTuple):
    """A request for completions.

    Attributes:
        messages: messages of a chat; None: the request has prompts.
        prompts: texts, or token ids.
        n: number of completions of each prompt.
        stop: strings that end a completion.
        seed: random seed; None: the server's.
        max_tokens: limit on a completion; None: as many tokens as there is room for.
        usage: True if a stream ends with token counts.
        metadata: extra values that the client wants recorded.
        template: variables of the chat template.
    """

    messages: list[dict[str, Any]] | None
    prompts: list[str | np.ndarray]
    tools: list[dict[str, Any]] | None
    sampling: Sampling
    n: int
    stop: tuple[str, ...]
    seed: int | None
    max_tokens: int | None
    stream: bool
    usage: bool
    logprobs: bool
    token_ids: bool
    model: str | None
    metadata: dict[str, Any]
    template: dict[str, Any] = {}


def read_chat(body: Any) -> Asked:
    """Parses the body of /v1/chat/completions.

    Raises:
        Refused: with the invalid key.
    """
    fields = Fields(body)
    is_list = lambda value: isinstance(value, list) and bool(value)  # noqa: E731
    messages = fields.take("messages", None, is_list, "a list of messages")
    if messages is None:
        raise Refused(400, "messages is missing; give a list of messages", param="messages")
    takes = f"a list of at most {MOST_TOOLS} functions, {{'type': 'function', 'function': {{'name': …}}}}"

    def are_tools(value: Any) -> bool:
        if not isinstance(value, list) or len(value) > MOST_TOOLS:
            return False
        functions = [
            tool.get("function") for tool in value if isinstance(tool, dict) and tool.get("type") == "function"
        ]
        named = [one for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)]
        return len(named) == len(value)

    tools = fields.take("tools", None, are_tools, takes)
    variables = fields.take("chat_template_kwargs", {}, lambda value: True, "")
    if reason := wrong_with_variables(variables):
        raise Refused(400, f"chat_template_kwargs = {variables!r:.100}: {reason}", param="chat_template_kwargs")
    if fields.take("tool_choice", "auto", lambda value: value in ("auto", "none"), "'auto' or 'none'") == "none":
        tools = None
    limits = [fields.whole(key, None, 1, 2**31 - 1) for key in ("max_completion_tokens", "max_tokens")]
    most = next((limit for limit in limits if limit is not None), None)
    fields.neutral({name: values for name, values in _CHAT.items() if name != "tool_choice"})
    logprobs = fields.flag("logprobs")
    asked = _asked(fields, [_message(message) for message in messages], [], tools or None, most, logprobs)
    return asked._replace(template=dict(variables))


def read_text(body: Any) -> Asked:
    """Parses the body of /v1/completions.

    Raises:
        Refused: with the invalid key.
    """
    fields = Fields(body)
    takes = "text, token ids, or a list of texts or of lists of token ids"
    prompt = fields.take("prompt", None, lambda value: isinstance(value, str | list) and bool(value), takes)
    if prompt is None:
        raise Refused(400, f"prompt is missing; it takes {takes}", param="prompt")
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    if len(prompt) > MOST_CHOICES:
        raise Refused(400, f"prompt: has {len(prompt)} prompts; give {MOST_CHOICES} at most", param="prompt")
    prompts = [one if isinstance(one, str) and one else _token_ids(one, "prompt") for one in prompt]
    # The engine does not report the most likely tokens, so 1 gives the same reply as 0.
    logprobs = fields.whole("logprobs", None, 0, 1) is not None
    fields.neutral(_TEXT)
    return _asked(fields, None, prompts, None, fields.whole("max_tokens", 16, 1, 2**31 - 1), logprobs)


def read_generate(body: Any) -> Asked:
    """Parses the body of vLLM's /inference/v1/generate: tokens in, tokens out.

    Raises:
        Refused: with the invalid key.
    """
    fields = Fields(body)
    prompt = _token_ids(fields.take("token_ids", None, lambda value: True, ""), "token_ids")
    fields.neutral({"stream": (False,), "priority": (0,), "features": (), "cache_salt": (), "kv_transfer_params": ()})
    fields.text("request_id", 256)
    inner = Fields(fields.take("sampling_params", {}, lambda value: isinstance(value, dict), "an object"))
    logprobs = inner.whole("logprobs", None, 0, 1) is not None
    inner.neutral(_GENERATE)
    most = inner.whole("max_tokens", 16, 1, 2**31 - 1)
    asked = _asked(inner, None, [prompt], None, most, logprobs, outer=fields)
    return asked._replace(token_ids=True)


def _asked(
    fields: Fields,
    messages: list | None,
    prompts: list,
    tools: list | None,
    most: int | None,
    logprobs: bool,
    outer: Fields | None = None,
) -> Asked:
    """Builds the request, reading the keys that all three kinds share."""
    whole = outer or fields
    fields.neutral(_COMMON)
    options = whole.take("stream_options", {}, lambda value: isinstance(value, dict), "an object")
    usage = Fields(options)

    def fits(value: Any) -> bool:
        if not isinstance(value, dict) or len(value) > 16:
            return False
        return all(len(key) <= 64 and isinstance(one, str) and len(one) <= 512 for key, one in value.items())

    takes = "an object of at most 16 texts of at most 512 characters, with keys of at most 64"
    values = {"metadata": whole.take("metadata", {}, fits, takes), "user": whole.text("user", 512)}
    asked = Asked(
        messages=messages,
        prompts=prompts,
        tools=tools,
        sampling=_sampling(fields),
        n=fields.whole("n", 1, 1, MOST_CHOICES),
        stop=_stop(fields),
        seed=fields.whole("seed", None, -(2**63), 2**63 - 1),
        max_tokens=most,
        stream=whole.flag("stream"),
        usage=usage.flag("include_usage"),
        logprobs=logprobs,
        token_ids=whole.flag("return_token_ids"),
        model=whole.text("model", 1024),
        metadata={key: value for key, value in values.items() if value},
    )
    usage.flag("continuous_usage_stats")
    usage.finish()
    fields.finish()
    whole.finish()
    return asked


def _sampling(fields: Fields) -> Sampling:
    takes = f"0, for the most likely tokens, or {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"
    in_range = lambda value: value == 0 or LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE  # noqa: E731
    temperature = fields.number("temperature", 1.0, in_range, takes)
    top_p = fields.number("top_p", 1.0, lambda value: 0 < value <= 1, "a number above 0 and at most 1")
    top_k = fields.whole("top_k", 0, -1, 2**31 - 1)
    min_p = fields.number("min_p", 0.0, lambda value: 0 <= value <= 1, "a number from 0 to 1")
    if temperature == 0:
        return Sampling(0.0)  # top_k, top_p and min_p always keep the most likely token
    return Sampling(temperature, max(top_k, 0), top_p, min_p)


def _stop(fields: Fields) -> tuple[str, ...]:
    def fits(value: Any) -> bool:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or len(values) > MOST_STOPS:
            return False
        return all(isinstance(one, str) and 0 < len(one) <= MOST_STOP_CHARACTERS for one in values)

    takes = f"text, or a list of at most {MOST_STOPS}, of 1 to {MOST_STOP_CHARACTERS} characters each"
    stop = fields.take("stop", [], fits, takes)
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _message(message: Any) -> dict[str, Any]:
    """Converts a message for the template: joins its content into one text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
        raise Refused(400, f"messages: {message!r:.100}: takes an object with role and content", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise Refused(400, "messages: content takes text, or parts that all have type text", param="messages")
        content = "".join(parts)
    if not (isinstance(content, str) or (content is None and message.get("tool_calls"))):
        raise Refused(400, f"messages: content = {content!r:.100}: takes text", param="messages")
    made = {"role": message["role"], "content": content or ""}
    if calls := message.get("tool_calls"):
        are_calls = isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)
        if not (are_calls and all(isinstance(call.get("function"), Mapping) for call in calls)):
            raise Refused(400, f"messages: tool_calls = {calls!r:.100}: takes a list of calls", param="messages")
        made["tool_calls"] = calls
    return made | {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}


def _token_ids(value: Any, param: str) -> np.ndarray:
    fits = isinstance(value, list) and value and all(type(one) is int and 0 <= one < 2**31 for one in value)
    if not fits:
        raise Refused(400, f"{param} = {value!r:.100}: takes token ids, at least one", param=param)
    return np.array(value, np.int32)
