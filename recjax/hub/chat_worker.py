"""A chat template that is asked again and again: one fork of this process renders, under the limits of each chat."""

import contextlib
import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from recjax.hub.chat_rendering import limit_memory, rendered

SECONDS = 10.0  # for one chat


class ChatWorker:
    """Renders chats, one at a time; a context, which ends the fork. It starts with the first chat."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        """Starts nothing yet."""
        self._tokenizer, self._child, self._pipes = tokenizer, None, ()

    def __enter__(self) -> "ChatWorker":
        """Starts nothing yet."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the fork."""
        self._end()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The text that asks the model for its next turn.

        Args:
            tools: JSON schemas.
        Raises:
            ValueError: there is no template; or it refuses the messages, takes too long or too much memory.
        """
        if self._tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template; use an instruct model's, or policy.complete(text)")
        if self._child is None:
            self._start()
        reader, writer = self._pipes
        with contextlib.suppress(BrokenPipeError):  # an answer that does not come says so
            _write(writer, pickle.dumps(([dict(message) for message in messages], tools and list(tools))))
        answer = _read(reader, time.monotonic() + SECONDS)
        name = f"the chat template of {self._tokenizer.name_or_path or 'this tokenizer'}"
        if answer is None:
            self._end()
            raise ValueError(f"{name} has not rendered a chat in {SECONDS:.0f} s, or its process has died")
        texts, refusal = pickle.loads(answer)  # written by our own fork, of texts alone
        if texts is None:
            raise ValueError(f"{name} {refusal}")
        return texts[0]

    def _start(self) -> None:
        asked, writer = os.pipe()
        reader, answers = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of every fork; this one's child touches nothing of JAX
            self._child = os.fork()
        if self._child == 0:
            os.close(writer)
            os.close(reader)
            _serve(asked, answers, self._tokenizer)
        os.close(asked)
        os.close(answers)
        self._pipes = reader, writer

    def _end(self) -> None:
        if self._child is not None:
            for pipe in self._pipes:
                os.close(pipe)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            self._child, self._pipes = None, ()


def _serve(asked: int, answers: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """In the fork: answers until nobody asks any more; never returns."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        limit_memory()
        while (chat := _read(asked, None)) is not None:
            messages, tools = pickle.loads(chat)
            _write(answers, pickle.dumps(rendered(tokenizer, [messages], tools)))
    finally:
        os._exit(0)


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
