"""Renders chats with a model's chat template, which is untrusted code: a worker process with limits runs it."""

import atexit
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from recjax.errors import UserError
from recjax.runtime.workers import CallFailed, Workers

SECONDS = 30.0  # time limit of a call, which gets a hundredth of a second more for each chat
TURN_SECONDS = 10.0  # time limit for a turn of an agent, or a request to the server
_MEMORY_BYTES = 2**30
_LONGEST = 10_000_000  # a rendered chat has at most so many characters
CHAT_DATE = "chat_date"  # this key in a tokenizer's init_kwargs has the template's current date, YYYY-MM-DD
_REPLY = "recjax-reply"  # the text after a turn follows this assistant message
TEMPLATE_KWARGS = "recjax_chat_template_kwargs"  # this key in a tokenizer's init_kwargs has variables for all chats
Chat = Sequence[Mapping[str, Any]]


def render_chats(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Chat],
    seconds: float = SECONDS,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Sequence[Mapping[str, Any]] | None = None,
    asks: bool = True,
) -> list[str]:
    """Renders each chat as the text that asks the model for its next turn.

    Args:
        tokenizer: tokenizer with the chat template.
        chats: lists of {"role": …, "content": …} messages. Arguments of tool calls may be objects or JSON text; the
            template gets the form that it reads.
        seconds: time limit for all chats together, see SECONDS.
        tools: JSON schemas of functions that the template shows to the model.
        variables: template variables for each chat, `tools` included; they override `set_template_kwargs`.
        asks: True: the text asks for the next turn; False: it ends with the last message.
    Raises:
        UserError: the tokenizer has no template, or the template does not read a variable, refuses messages or exceeds
            a limit.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            problem="the tokenizer has no chat template",
            remedy="use an instruct model's, or give prompts as plain text",
        )
    if not variables:
        variables = [{}] * len(chats)
    names = set().union(*variables)
    check_variables(tokenizer, sorted(names), "chat_template_kwargs")
    common = tokenizer.special_tokens_map | tokenizer.init_kwargs.get(TEMPLATE_KWARGS, {})
    fixed: dict[str, Any] = {"tokenize": False, "add_generation_prompt": asks}
    if tools is not None:
        fixed["tools"] = list(tools)
    requests = []
    for chat, chat_variables in zip(chats, variables, strict=True):
        messages = [dict(message) for message in chat]
        requests.append((messages, common | chat_variables | fixed))
    date = tokenizer.init_kwargs.get(CHAT_DATE)
    limit = seconds + len(chats) / 100
    name = f"the chat template of {tokenizer.name_or_path or 'this tokenizer'}"
    remedy = "correct the model's chat_template, or use another model"
    try:
        texts = _workers().call(_rendered, tokenizer.chat_template, requests, date, seconds=limit).result()
    except CallFailed as error:
        if error.reason == "timeout":
            raise UserError(name, f"has not rendered {len(chats)} chats in {limit:.0f} s", remedy) from None
        raise UserError(problem=f"{name} failed: it took all of its memory, or died", remedy=remedy) from None
    except RecursionError:
        raise UserError(
            name, "gets messages, tools or variables that are nested too deep", "give flatter ones"
        ) from None
    if isinstance(texts, str):
        raise UserError(problem=f"{name} {texts}")
    return texts


@functools.cache
def _workers() -> Workers:
    """The worker that renders all chats of this process; it stays until the end because it imports transformers."""
    workers = Workers(1, SECONDS, "recjax.hub.chat_rendering", memory=_MEMORY_BYTES)
    atexit.register(workers.__exit__)
    return workers


os.register_at_fork(after_in_child=_workers.cache_clear)  # a fork cannot use its parent's worker


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that the chat template writes after an assistant's turn.

    It may differ from the tokenizer's end-of-sequence token: Gemma's is <end_of_turn>, ChatML's <|im_end|>.

    Returns:
        None if the tokenizer has no template, or the template refuses a chat of two turns or writes no such token.
    """
    if not tokenizer.chat_template:
        return None
    return _turn_end(tokenizer, str(tokenizer.chat_template))


@functools.lru_cache(maxsize=8)
def _turn_end(tokenizer: PreTrainedTokenizerBase, template: str) -> int | None:
    del template  # the cache key needs it, because a tokenizer's template can be replaced
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _REPLY}]
    try:
        (text,) = render_chats(tokenizer, [chat], asks=False)
    except UserError:
        return None
    if _REPLY not in text:
        return None
    text_after = text.rpartition(_REPLY)[2]
    ids = tokenizer.encode(text_after.lstrip(), add_special_tokens=False)
    if ids and (ids[0] in tokenizer.added_tokens_decoder or ids[0] in tokenizer.all_special_ids):
        return ids[0]
    return None


def set_template_kwargs(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
    """Sets template variables for all chats of this tokenizer.

    Raises:
        UserError: the template does not read one of the variables.
    """
    check_variables(tokenizer, variables, "model.chat_template_kwargs")
    if variables:
        tokenizer.init_kwargs[TEMPLATE_KWARGS] = dict(variables)


def check_variables(tokenizer: PreTrainedTokenizerBase, variables: Iterable[str], location: str) -> None:
    """Refuses template variables that the chat template does not read, apart from `tools`, which has its own checks.

    Args:
        variables: names.
        location: key or argument of the variables, for the error message.
    Raises:
        UserError: with the variable and the remedy.
    """
    for name in variables:
        if name != "tools" and not reads_variable(tokenizer, name):
            raise UserError(
                f"{location}.{name}",
                f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} does not read it",
                "correct the name, or remove it",
            )


def reads_variable(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """True if the chat template's text contains the name of the variable."""
    return re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)) is not None


def _rendered(
    template: str | dict[str, str], requests: Sequence[tuple[list[dict], dict[str, Any]]], date: str | None
) -> list[str] | str:
    """Renders messages with their variables, in the worker; returns the reason if the template refuses them.

    Args:
        date: the template's current date, YYYY-MM-DD; None: the clock's.
    """

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            assert date is not None
            return datetime.fromisoformat(date)

    # transformers reads the clock itself; the replacement exists only in this worker process.
    chat_template_utils.datetime = datetime if date is None else Stopped
    tokenizer: Any = PreTrainedTokenizerBase(chat_template=template)
    texts = []
    for chat, options in requests:
        try:
            texts.append(_applied(functools.partial(tokenizer.apply_chat_template, **options), chat))
        except MemoryError:
            return f"takes more than {_MEMORY_BYTES >> 20} MiB; correct the model's chat_template"
        except Exception as error:  # operations inside a template can raise any exception
            roles = [message.get("role") for message in chat]
            reason = str(error)[:500]
            if not isinstance(error, jinja2.TemplateError):
                reason = f"{type(error).__name__}: {reason}"
            if "system" in roles:
                reason += "; if it takes no system message, say it in the first user message"
            return f"refuses messages with roles {roles}: {reason}"
        if len(texts[-1]) > _LONGEST:
            return f"makes a prompt of {len(texts[-1])} characters; correct the model's chat_template"
    return texts


def _applied(template: Callable[[Chat], str], chat: Chat) -> str:
    """Renders a chat; tool-call arguments are objects, or JSON text if the template prints them unencoded."""
    objects: list[Any] = []

    def as_object(arguments: Any) -> Any:
        parsed = _as_object(arguments)
        objects.append(parsed)
        return parsed

    with_objects = [_with_arguments(message, as_object) for message in chat]
    try:
        text = template(with_objects)
        # Python's notation of a dict in the text means that the template needed JSON text.
        notations = [str(arguments) for arguments in objects if str(arguments) != _as_text(arguments)]
        printed = [notation for notation in notations if notation in text]
    except MemoryError:
        raise
    except Exception:
        if not objects:
            raise
        return template([_with_arguments(message, _as_text) for message in chat])
    if not printed:
        return text
    text_of_json = template([_with_arguments(message, _as_text) for message in chat])
    if all(notation in text_of_json for notation in printed):
        return text  # the messages themselves contain the notation
    return text_of_json


def _as_object(arguments: Any) -> Any:
    """The object in JSON text; other arguments stay unchanged."""
    parsed = arguments
    if arguments is None or isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _as_text(arguments: Any) -> Any:
    """The JSON text of an object; other arguments stay unchanged."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _with_arguments(message: Mapping[str, Any], form: Callable[[Any], Any]) -> Mapping[str, Any]:
    """Copies the message and applies `form` to the arguments of tool calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed_calls = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "arguments" not in function:
            changed_calls.append(call)
            continue
        changed_function = {**function, "arguments": form(function["arguments"])}
        if "function" in call:
            changed_calls.append({**call, "function": changed_function})
        else:
            changed_calls.append(changed_function)
    return {**message, "tool_calls": changed_calls}
