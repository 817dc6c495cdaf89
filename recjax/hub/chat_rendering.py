"""Renders chats with a model's chat template, which is untrusted code: a forked process with limits runs it."""

import contextlib
import functools
import json
import os
import pickle
import re
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

SECONDS = 30.0  # time limit of a whole request, which gets a hundredth of a second more for each chat
_MEMORY_BYTES = 2**30  # that the fork may allocate on top of this process's memory
_LONGEST = 10_000_000  # characters in one rendered chat
CHAT_DATE = "chat_date"  # key in a tokenizer's init_kwargs: the date, YYYY-MM-DD, that its template gets
_REPLY = "recjax-reply"  # assistant message that marks where to look for the text after a turn
TEMPLATE_KWARGS = "recjax_chat_template_kwargs"  # key in a tokenizer's init_kwargs: variables for all chats
Chat = Sequence[Mapping[str, Any]]


class ChatRenderer:
    """Renders chats in a fork of this process, from the first call of `render` to the end of the `with` block."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seconds: float = SECONDS):
        """Stores the arguments; the fork starts later.

        Args:
            tokenizer: tokenizer with the chat template.
            seconds: time limit of one request.
        """
        self._tokenizer, self._seconds, self._child, self._pipes = tokenizer, seconds, None, ()

    def __enter__(self) -> "ChatRenderer":
        """Returns the renderer; the fork starts later."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the fork."""
        if self._child is not None:
            for pipe in self._pipes:
                os.close(pipe)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            self._child, self._pipes = None, ()

    def render(
        self,
        chats: Sequence[Chat],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Sequence[Mapping[str, Any]] | None = None,
        asks: bool = True,
    ) -> list[str]:
        """Renders each chat as the text that asks the model for its next turn.

        Args:
            chats: lists of {"role": …, "content": …} messages. Arguments of tool calls may be objects or JSON text; the
                template gets the form that it reads.
            tools: JSON schemas of functions that the template shows to the model.
            variables: template variables for each chat, `tools` included; they override `set_template_kwargs`.
            asks: flag; if False, the text ends with the last message.
        Raises:
            ValueError: the tokenizer has no template, or the template refuses messages or exceeds a limit.
        """
        if self._tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template; use an instruct model's, or give prompts as plain text"
            )
        if self._child is None:
            self._start()
        limit, (reader, writer) = self._seconds + len(chats) / 100, self._pipes
        asked = [[dict(message) for message in chat] for chat in chats], tools and list(tools), asks, limit
        asked = *asked, list(map(dict, variables)) if variables else [{}] * len(chats)
        deadline = time.monotonic() + limit
        with contextlib.suppress(BrokenPipeError):  # the read below reports a dead fork
            _write(writer, pickle.dumps(asked))
        answer = _read(reader, deadline)
        name = f"the chat template of {self._tokenizer.name_or_path or 'this tokenizer'}"
        remedy = "correct the model's chat_template, or use another model"
        if answer is None:
            self.__exit__()
            if time.monotonic() >= deadline:
                raise ValueError(f"{name} has not rendered {len(chats)} chats in {limit:.0f} s; {remedy}")
            raise ValueError(f"{name} failed: it took all of its memory, or died; {remedy}")
        texts, refusal = pickle.loads(answer)  # safe: our own fork wrote it, and it holds only texts
        if texts is None:
            raise ValueError(f"{name} {refusal}")
        return texts

    def _start(self) -> None:
        asked, writer = os.pipe()
        reader, answers = os.pipe()
        with warnings.catch_warnings():
            # JAX warns about every fork, but this child only fills in templates and does not use JAX.
            warnings.simplefilter("ignore")
            self._child = os.fork()
        if self._child == 0:
            # The fork must close inherited connections, or their other ends would wait for this process to end.
            low, high = sorted((asked, answers))
            for first, last in ((3, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX"))):
                os.closerange(first, last)
            _serve(asked, answers, self._tokenizer)
        os.close(asked)
        os.close(answers)
        self._pipes = reader, writer


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
        with ChatRenderer(tokenizer) as renderer:
            (text,) = renderer.render([chat], asks=False)
    except ValueError:
        return None
    _, found, behind = text.rpartition(_REPLY)
    ids = tokenizer.encode(behind.lstrip(), add_special_tokens=False) if found else []
    is_special = ids and (ids[0] in tokenizer.added_tokens_decoder or ids[0] in tokenizer.all_special_ids)
    return ids[0] if is_special else None


def render_chats(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Chat],
    seconds: float = SECONDS,
    variables: Sequence[Mapping[str, Any]] | None = None,
) -> list[str]:
    """Renders a list of chats with a `ChatRenderer` that lives for this call only."""
    with ChatRenderer(tokenizer, seconds) as renderer:
        return renderer.render(chats, variables=variables)


def set_template_kwargs(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
    """Sets template variables for all chats of this tokenizer.

    Raises:
        ValueError: the template does not read one of the variables.
    """
    for name in variables:
        if not reads_variable(tokenizer, name):
            raise ValueError(
                f"model.chat_template_kwargs.{name}: the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
                " does not read it; correct the name, or remove it"
            )
    if variables:
        tokenizer.init_kwargs[TEMPLATE_KWARGS] = dict(variables)


def reads_variable(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """True if the chat template's text contains the name of the variable."""
    return re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)) is not None


def _serve(asked: int, answers: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Runs in the fork: answers requests until the pipe closes, then exits."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _limit_memory()
        _stop_clock(tokenizer.init_kwargs.get(CHAT_DATE))
        while (request := _read(asked, None)) is not None:
            chats, tools, asks, seconds, variables = pickle.loads(request)
            _limit_seconds(seconds)
            _write(answers, pickle.dumps(_rendered(tokenizer, chats, tools, asks, variables)))
    finally:
        os._exit(0)


def _stop_clock(date: str | None) -> None:
    """Makes midnight of `date` the current time; runs in the fork, where this affects only templates."""
    if date is None:
        return
    day = datetime.fromisoformat(date)

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return day

    chat_template_utils.datetime = Stopped


def _limit_seconds(seconds: float) -> None:
    """Limits the fork's CPU time, in case the parent process is gone and cannot end it."""
    most = int(time.process_time() + seconds) + 2
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _limit_memory() -> None:
    """Limits the fork's memory to its current size plus `_MEMORY_BYTES`."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY_BYTES, now + _MEMORY_BYTES))


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Chat],
    tools: Sequence[dict] | None,
    asks: bool,
    variables: Sequence[dict],
) -> tuple[list[str] | None, str]:
    """Runs in the fork: returns (texts, ""), or (None, reason) if the template fails."""
    texts, common = [], tokenizer.init_kwargs.get(TEMPLATE_KWARGS, {})
    for chat, own in zip(chats, variables, strict=True):
        options = common | own | ({} if tools is None else {"tools": tools})
        try:
            options |= {"tokenize": False, "add_generation_prompt": asks}
            texts.append(_applied(functools.partial(tokenizer.apply_chat_template, **options), chat))
        except MemoryError:
            return None, f"takes more than {_MEMORY_BYTES >> 20} MiB; correct the model's chat_template"
        except Exception as error:  # operations inside a template can raise any exception
            roles = [message.get("role") for message in chat]
            remedy = "; if it takes no system message, say it in the first user message" if "system" in roles else ""
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            return None, f"refuses messages with roles {roles}: {kind}{str(error)[:500]}{remedy}"
        if len(texts[-1]) > _LONGEST:
            return None, f"makes a prompt of {len(texts[-1])} characters; correct the model's chat_template"
    return texts, ""


def _applied(template: Callable[[Chat], str], chat: Chat) -> str:
    """Renders a chat; tool-call arguments are objects, or JSON text if the template prints them unencoded."""
    objects = []

    def as_object(arguments: Any) -> Any:
        with contextlib.suppress(ValueError, RecursionError):  # text that is not JSON stays unchanged
            found = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
            arguments = found if isinstance(found, dict) else arguments
        objects.append(arguments)
        return arguments

    def as_text(arguments: Any) -> Any:
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments

    with_objects = [_with_arguments(message, as_object) for message in chat]
    try:
        text = template(with_objects)
        # Python's notation of a dict in the text means that the template needed JSON text.
        printed = [str(one) for one in objects if str(one) != as_text(one) and str(one) in text]
    except MemoryError:
        raise
    except Exception:
        if not objects:
            raise
        text, printed = None, [None]
    if printed:
        other = template([_with_arguments(message, as_text) for message in chat])
        text = other if text is None or any(one not in other for one in printed) else text
    return text


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


def _write(pipe: int, content: bytes) -> None:
    left = memoryview(len(content).to_bytes(8, "big") + content)
    while left:
        left = left[os.write(pipe, left) :]


def _read(pipe: int, deadline: float | None) -> bytes | None:
    """Reads one message from the pipe; None if the writer is gone or the deadline passes."""
    size = _exactly(pipe, 8, deadline)
    return None if size is None else _exactly(pipe, int.from_bytes(size, "big"), deadline)


def _exactly(pipe: int, size: int, deadline: float | None) -> bytes | None:
    read = bytearray()
    while len(read) < size:
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        if not select.select([pipe], [], [], left)[0]:
            return None
        piece = os.read(pipe, min(size - len(read), 1 << 20))
        if not piece:
            return None
        read += piece
    return bytes(read)
