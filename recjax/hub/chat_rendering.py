"""Chats through a model's template: somebody else's program, which gets a fork, its time, its memory, and no more."""

import contextlib
import os
import pickle
import resource
import select
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

SECONDS = 30.0  # for all chats of a request together, and a hundredth more for each
_MEMORY_BYTES = 2**30  # beyond what this process has
_LONGEST = 10_000_000  # characters of one rendered chat
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

    def render(self, chats: Sequence[Chat], tools: Sequence[Mapping[str, Any]] | None = None) -> list[str]:
        """Each list of messages as the text that asks the model for its next turn.

        Args:
            chats: {"role": …, "content": …} in order.
            tools: JSON schemas of functions that the template tells the model of.
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
        asked = [[dict(message) for message in chat] for chat in chats], tools and list(tools), limit
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


def render_chats(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], seconds: float = SECONDS) -> list[str]:
    """`ChatRenderer.render` of chats that are all there at once."""
    with ChatRenderer(tokenizer, seconds) as renderer:
        return renderer.render(chats)


def _serve(asked: int, answers: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """In the fork: answers until nobody asks any more; never returns."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _limit_memory()
        while (request := _read(asked, None)) is not None:
            chats, tools, seconds = pickle.loads(request)
            _limit_seconds(seconds)
            _write(answers, pickle.dumps(_rendered(tokenizer, chats, tools)))
    finally:
        os._exit(0)


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
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], tools: Sequence[dict] | None
) -> tuple[list[str] | None, str]:
    """In the fork: the texts; or None, and what the template refuses."""
    texts = []
    for chat in chats:
        try:
            texts.append(tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True))
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
