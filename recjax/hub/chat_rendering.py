"""Renders chats with a model's chat template, which is untrusted code: a worker process with limits runs it."""

import atexit
import contextlib
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
_LONGEST = 10_000_000  # characters in one rendered chat
CHAT_DATE = "chat_date"  # key in a tokenizer's init_kwargs: the date, YYYY-MM-DD, that its template gets
_REPLY = "recjax-reply"  # assistant message that marks where to look for the text after a turn
TEMPLATE_KWARGS = "recjax_chat_template_kwargs"  # key in a tokenizer's init_kwargs: variables for all chats
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
        asks: flag; if False, the text ends with the last message.
    Raises:
        UserError: the tokenizer has no template, or the template does not read a variable, refuses messages or exceeds
            a limit.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            problem="the tokenizer has no chat template",
            remedy="use an instruct model's, or give prompts as plain text",
        )
    names = {name for chat_variables in variables or [] for name in chat_variables}
    check_variables(tokenizer, sorted(names), "chat_template_kwargs")
    common = tokenizer.special_tokens_map | tokenizer.init_kwargs.get(TEMPLATE_KWARGS, {})
    fixed = {"tokenize": False, "add_generation_prompt": asks} | ({} if tools is None else {"tools": list(tools)})
    requests = [
        ([dict(message) for message in chat], {**common, **chat_variables, **fixed})
        for chat, chat_variables in zip(chats, variables or [{}] * len(chats), strict=True)
    ]
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
    return _turn_end(tokenizer, str(tokenizer.chat_template)) if tokenizer.chat_template else None


@functools.lru_cache(maxsize=8)
def _turn_end(tokenizer: PreTrainedTokenizerBase, template: str) -> int | None:
    del template  # part of the cache key only, because a tokenizer's template can be replaced
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _REPLY}]
    try:
        (text,) = render_chats(tokenizer, [chat], asks=False)
    except UserError:
        return None
    _, reply, behind = text.rpartition(_REPLY)
    ids = tokenizer.encode(behind.lstrip(), add_special_tokens=False) if reply else []
    is_special = ids and (ids[0] in tokenizer.added_tokens_decoder or ids[0] in tokenizer.all_special_ids)
    return ids[0] if is_special else None


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
    """Runs in the worker: renders messages with their variables; returns the reason if the template refuses them.

    Args:
        date: date, YYYY-MM-DD, that is the template's current time; None: the clock's.
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
            remedy = "; if it takes no system message, say it in the first user message" if "system" in roles else ""
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            return f"refuses messages with roles {roles}: {kind}{str(error)[:500]}{remedy}"
        if len(texts[-1]) > _LONGEST:
            return f"makes a prompt of {len(texts[-1])} characters; correct the model's chat_template"
    return texts


def _applied(template: Callable[[Chat], str], chat: Chat) -> str:
    """Renders a chat; tool-call arguments are objects, or JSON text if the template prints them unencoded."""
    objects = []

    def as_object(arguments: Any) -> Any:
        with contextlib.suppress(ValueError, RecursionError):  # text that is not JSON stays unchanged
            parsed = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
            arguments = parsed if isinstance(parsed, dict) else arguments
        objects.append(arguments)
        return arguments

    def as_text(arguments: Any) -> Any:
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments

    with_objects = [_with_arguments(message, as_object) for message in chat]
    try:
        text = template(with_objects)
        # Python's notation of a dict in the text means that the template needed JSON text.
        printed = [
            str(arguments) for arguments in objects if str(arguments) != as_text(arguments) and str(arguments) in text
        ]
    except MemoryError:
        raise
    except Exception:
        if not objects:
            raise
        text = None
        printed: list[Any] = [None]
    if printed:
        text_of_json = template([_with_arguments(message, as_text) for message in chat])
        if text is None or any(notation not in text_of_json for notation in printed):
            text = text_of_json
    return str(text)


def _with_arguments(message: Mapping[str, Any], form: Callable[[Any], Any]) -> Mapping[str, Any]:
    """Copies the message and applies `form` to the arguments of tool calls."""

    def changed(call: Any) -> Any:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        function = {**function, "arguments": form(function["arguments"])}
        return {**call, "function": function} if "function" in call else function

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(changed, calls)]} if isinstance(calls, list) else message
