"""Chats through a model's template: somebody else's program, which gets a fork, its time, its memory, and no more."""

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

SECONDS = 30.0  # for all chats of a request together, and a hundredth more for each
_MEMORY_BYTES = 2**30  # beyond what this process has
_LONGEST = 10_000_000  # characters of one rendered chat
CHAT_DATE = "chat_date"  # among a tokenizer's init_kwargs: the date, YYYY-MM-DD, that its template is given
_REPLY = "recjax-reply"  # what an assistant says where the text behind it is looked for
TEMPLATE_KWARGS = "recjax_chat_template_kwargs"  # among a tokenizer's init_kwargs: variables of all its chats
Chat = Sequence[Mapping[str, Any]]


class ChatRenderer:
    """A chat template in a fork of this process; a context that ends the fork, which starts with the first chats."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seconds: float = SECONDS):
        """Starts nothing yet.

        Args:
            tokenizer: holds the chat template.
            seconds: for the chats of one request.
        """
        self._tokenizer, self._seconds, self._child, self._pipes = tokenizer, seconds, None, ()

    def __enter__(self) -> "ChatRenderer":
        """Starts nothing yet."""
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
        """Each list of messages as the text that asks the model for its next turn.

        Args:
            chats: {"role": …, "content": …} in order. Arguments of tool calls may be an object or its JSON text; the
                template gets what it takes.
            tools: JSON schemas of functions that the template tells the model of.
            variables: of the template, for each chat, before those of `set_template_kwargs`; `tools` may be among them.
            asks: False: the text ends with the last message.
        Raises:
            ValueError: there is no template; or it refuses messages, takes too long or too much memory.
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
        with contextlib.suppress(BrokenPipeError):  # an answer that does not come says so
            _write(writer, pickle.dumps(asked))
        answer = _read(reader, deadline)
        name = f"the chat template of {self._tokenizer.name_or_path or 'this tokenizer'}"
        remedy = "correct the model's chat_template, or use another model"
        if answer is None:
            self.__exit__()
            if time.monotonic() >= deadline:
                raise ValueError(f"{name} has not rendered {len(chats)} chats in {limit:.0f} s; {remedy}")
            raise ValueError(f"{name} failed: it took all of its memory, or died; {remedy}")
        texts, refusal = pickle.loads(answer)  # written by our own fork, of texts alone
        if texts is None:
            raise ValueError(f"{name} {refusal}")
        return texts

    def _start(self) -> None:
        asked, writer = os.pipe()
        reader, answers = os.pipe()
        with warnings.catch_warnings():
            # JAX warns of every fork; this one's child fills in a template and touches nothing of JAX.
            warnings.simplefilter("ignore")
            self._child = os.fork()
        if self._child == 0:
            # Connections among them: whoever waits for the end of one must not wait for this process.
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
        None where there is no template, where it refuses a chat of two turns, or writes no such token.
    """
    return _turn_end(tokenizer, str(tokenizer.chat_template)) if tokenizer.chat_template else None


@functools.lru_cache(maxsize=8)
def _turn_end(tokenizer: PreTrainedTokenizerBase, template: str) -> int | None:
    del template  # a part of the cache's key, as a tokenizer may get another
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
    """`ChatRenderer.render` of chats that are all there at once."""
    with ChatRenderer(tokenizer, seconds) as renderer:
        return renderer.render(chats, variables=variables)


def set_template_kwargs(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
    """Gives the chat template variables for all chats of this tokenizer.

    Raises:
        ValueError: a variable that the template does not read.
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
    """Whether the text of a chat template has a variable's name."""
    return re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)) is not None


def _serve(asked: int, answers: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """In the fork: answers until nobody asks any more; never returns."""
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
    """Gives templates the beginning of a day as the current time; in the fork, which renders and does nothing else."""
    if date is None:
        return
    day = datetime.fromisoformat(date)

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return day

    chat_template_utils.datetime = Stopped


def _limit_seconds(seconds: float) -> None:
    """Of computing, should the process that asked be gone."""
    most = int(time.process_time() + seconds) + 2
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _limit_memory() -> None:
    """Leaves this process, a fork, the memory of a template beside what it has."""
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
    """In the fork: the texts; or None, and what the template refuses."""
    texts, common = [], tokenizer.init_kwargs.get(TEMPLATE_KWARGS, {})
    for chat, own in zip(chats, variables, strict=True):
        options = common | own | ({} if tools is None else {"tools": tools})
        try:
            options |= {"tokenize": False, "add_generation_prompt": asks}
            texts.append(_applied(functools.partial(tokenizer.apply_chat_template, **options), chat))
        except MemoryError:
            return None, f"takes more than {_MEMORY_BYTES >> 20} MiB; correct the model's chat_template"
        except Exception as error:  # what a template's own operations raise is anything
            roles = [message.get("role") for message in chat]
            remedy = "; if it takes no system message, say it in the first user message" if "system" in roles else ""
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            return None, f"refuses messages with roles {roles}: {kind}{str(error)[:500]}{remedy}"
        if len(texts[-1]) > _LONGEST:
            return None, f"makes a prompt of {len(texts[-1])} characters; correct the model's chat_template"
    return texts, ""


def _applied(template: Callable[[Chat], str], chat: Chat) -> str:
    """The text of a chat. Most templates encode the arguments of calls, and need objects; some print JSON text."""
    objects = []

    def as_object(arguments: Any) -> Any:
        with contextlib.suppress(ValueError, RecursionError):  # what is no JSON stays as it is
            found = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
            arguments = found if isinstance(found, dict) else arguments
        objects.append(arguments)
        return arguments

    def as_text(arguments: Any) -> Any:
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments

    with_objects = [_with_arguments(message, as_object) for message in chat]
    try:
        text = template(with_objects)
        # As Python writes objects, which no model does.
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
    """A message with another form of its calls' arguments."""

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
    """What was written at once; None where the other side is gone, or it is too late."""
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
