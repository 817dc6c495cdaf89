"""Chats through a model's template: somebody else's program, which gets its time, its memory, and no more."""

import contextlib
import os
import pickle
import resource
import select
import signal
import time
import warnings
from collections.abc import Sequence

import jinja2
from transformers import PreTrainedTokenizerBase

SECONDS = 30.0  # for all chats together, and a hundredth more for each
_MEMORY_BYTES = 2**30  # beyond what this process has
_LONGEST = 10_000_000  # characters of one rendered chat
Chat = Sequence[dict[str, str]]


def render_chats(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], seconds: float = SECONDS) -> list[str]:
    """Each list of messages as the text that asks the model for its next turn.

    The template runs in a fork of this process, which ends with it.

    Args:
        tokenizer: holds the chat template.
        chats: {"role": …, "content": …} in order.
    Raises:
        ValueError: the tokenizer has no chat template; or it refuses messages, takes too long or too much memory.
    """
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template; use an instruct model's, or give prompts as plain text")
    limit = seconds + len(chats) / 100
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # JAX warns of every fork; this one's child fills in a template and touches nothing of JAX.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        os.close(reader)
        _answer(writer, tokenizer, chats, limit)
    os.close(writer)
    try:
        answer = _read(reader, limit)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    name = f"the chat template of {tokenizer.name_or_path or 'this tokenizer'}"
    remedy = "correct the model's chat_template, or use another model"
    if answer is None:
        raise ValueError(f"{name} has not rendered {len(chats)} chats in {limit:.0f} s; {remedy}")
    texts, refusal = answer
    if texts is None:
        raise ValueError(f"{name} {refusal or f'failed: it took all of its memory, or died; {remedy}'}")
    return texts


def _answer(writer: int, tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], limit: float) -> None:
    """In the fork: what becomes of the chats, written to the pipe; never returns."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _limit(limit)
        answer = rendered(tokenizer, chats)
        with os.fdopen(writer, "wb") as file:
            pickle.dump(answer, file)
    finally:
        os._exit(0)


def _limit(seconds: float) -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 2, int(seconds) + 2))
    limit_memory()


def limit_memory() -> None:
    """Leaves this process, a fork, the memory of a template beside what it has."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY_BYTES, now + _MEMORY_BYTES))


def rendered(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], tools: Sequence[dict] | None = None
) -> tuple[list[str] | None, str]:
    """In a fork: the texts; or None, and what the template refuses.

    Args:
        tools: JSON schemas of functions that the template tells the model of.
    """
    texts = []
    for chat in chats:
        try:
            texts.append(
                tokenizer.apply_chat_template(list(chat), tools=tools, tokenize=False, add_generation_prompt=True)
            )
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


def _read(reader: int, seconds: float) -> tuple[list[str] | None, str] | None:
    """What the fork wrote; None where it is too late."""
    deadline, read = time.monotonic() + seconds, bytearray()
    while (left := deadline - time.monotonic()) > 0:
        if select.select([reader], [], [], left)[0]:
            piece = os.read(reader, 1 << 20)
            if not piece:
                try:
                    return pickle.loads(bytes(read))  # written by our own fork, of texts alone
                except (EOFError, pickle.UnpicklingError):  # it was killed while it wrote, or before
                    return None, ""
            read += piece
    return None
