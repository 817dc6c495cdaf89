"""Data types of tasks: problems, chats, and the task with its train problems, held-out problems and reward."""

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import xxhash

from recjax.errors import UserError
from recjax.rewards.reward import MixedReward, Reward

PLAYED_ROW = "environment_row"  # column that identifies the problem of an environment, whose prompts may be equal
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # keys of an assistant's message, by chat template


class Problem(NamedTuple):
    """One question with its answer.

    prompt: text, or a list of chat messages.
    answer: the reference answer.
    mistakes: plausible wrong answers, which a warm start can show.
    columns: additional columns of the data, for the reward function.
    difficulty: label for which evaluation reports the accuracy.
    template: variables of the chat template by name, including `tools`.
    task: name of the problem's task in a mixture.
    """

    prompt: str | list[dict[str, str]]
    answer: str
    mistakes: tuple[str, ...] = ()
    columns: Mapping[str, Any] = MappingProxyType({})
    difficulty: str | None = None
    template: Mapping[str, Any] = MappingProxyType({})
    task: str = ""


class Task(NamedTuple):
    """Train problems, evaluation problems and their reward; no problem is in both lists.

    The problems of a mixture are in the order of their tasks' names.
    """

    train: list[Problem]
    evaluation: list[Problem]
    reward: Reward | MixedReward


def chat(system_prompt: str, *turns: str) -> list[dict[str, str]]:
    """A chat: a system message unless `system_prompt` is empty, then turns of user and assistant, user first."""
    messages = []
    if system_prompt:
        messages.append({"role": "system", "content": system_prompt})
    for role, turn in zip(itertools.cycle(("user", "assistant")), turns, strict=False):
        messages.append({"role": role, "content": turn})
    return messages


_encode = json.JSONEncoder(sort_keys=True).encode  # json.dumps would make an encoder for every problem.


def problem_text(prompt: str | list[dict[str, str]], answer: str | None) -> str:
    """Prompt and answer as a text that is equal for equal problems."""
    return _encode([prompt, answer])


def problem_key(prompt: str | list[dict[str, str]], answer: str | None) -> str:
    """A digest of a problem that is equal for equal prompts and answers."""
    return f"{xxhash.xxh3_64_intdigest(problem_text(prompt, answer).encode()):016x}"


def question_of(prompt: str | list[dict[str, str]]) -> str:
    """The part of a prompt to show to readers: the last user message of a chat, or the last line of a text."""
    if isinstance(prompt, str):
        lines = prompt.strip().splitlines()
        return lines[-1] if lines else ""
    for message in reversed(prompt):
        if message["role"] == "user":
            return message["content"]
    return prompt[-1]["content"]


def check_last_message(prompt: str | Sequence[Mapping[str, Any]], location: str) -> None:
    """Refuses a chat that ends with an assistant's message, which some libraries continue and other libraries do not.

    Args:
        location: beginning of the message.
    Raises:
        UserError: with the remedy.
    """
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        raise UserError(
            location,
            "the last message is an assistant's, which recjax does not continue",
            "remove it, or give the text to continue as a plain prompt, rendered with the chat template",
        )


def messages_in(text: Any) -> Any:
    """The messages in a JSON text; other values unchanged."""
    with contextlib.suppress(ValueError, RecursionError, TypeError):
        messages = json.loads(text)
        is_list = isinstance(messages, list) and bool(messages)
        if is_list and all(isinstance(message, dict) and "role" in message for message in messages):
            return messages
    return text


def checked_messages(messages: Any, location: str) -> list[dict[str, Any]]:
    """The messages of a chat, each read by `checked_message`.

    Args:
        location: beginning of error messages.
    Raises:
        UserError: the value is no list of messages; error messages number the messages from 0.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError(location, "must hold a list of messages with role and content", f"got {messages!r:.80}")
    return [checked_message(message, f"{location}: message {number}") for number, message in enumerate(messages)]


def checked_message(message: Any, location: str) -> dict[str, Any]:
    """A message in OpenAI's format, with its content as one text and without keys of value null.

    Parts of type text are joined. Null or missing content next to an assistant's tool calls is an empty text.

    Raises:
        UserError: with the place, the wrong key and its value.
    """
    role = None
    if isinstance(message, Mapping):
        role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UserError(location, f"{message!r:.80} is no message", "it has a role, and content")
    content = message.get("content")
    if isinstance(content, list):
        for content_part in content:
            if not (
                isinstance(content_part, Mapping)
                and content_part.get("type") == "text"
                and isinstance(content_part.get("text"), str)
            ):
                raise UserError(location, f"content has {content_part!r:.80}: takes text, or only parts of type text")
        content = "".join(content_part["text"] for content_part in content)
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise UserError(f"{location}: content", "takes text, or null next to an assistant's tool_calls", value=content)
    return {name: value for name, value in message.items() if value is not None} | {"content": content}


def characters(problems: Sequence[Problem]) -> str:
    """Every character of the problems, sorted: the alphabet of the built-in tokenizer."""
    alphabet = set()
    for problem in problems:
        alphabet.update(str(problem.prompt), problem.answer)
    return "".join(sorted(alphabet))
