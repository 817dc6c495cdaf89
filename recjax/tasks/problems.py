"""What a task is: problems to train on, problems held out, and a reward for completions."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from recjax.tasks.grading.reward import Reward


class Problem(NamedTuple):
    """One question: `prompt` is text or a list of chat messages, `answer` is what a completion is checked against.

    `mistakes` are wrong answers of a likely kind, which a warm start can show. `columns` are further columns of the
    data, for the reward function; `difficulty` is a label that evaluation breaks accuracy down by. `template` has
    variables of the chat template by name, `tools` among them.
    """

    prompt: str | list[dict[str, str]]
    answer: str
    mistakes: tuple[str, ...] = ()
    columns: Mapping[str, Any] = MappingProxyType({})
    difficulty: str | None = None
    template: Mapping[str, Any] = MappingProxyType({})


class Task(NamedTuple):
    """Problems and what completions of them are worth; no evaluation problem is among the train problems."""

    train: list[Problem]
    evaluation: list[Problem]
    reward: Reward


def chat(system_prompt: str, *turns: str) -> list[dict[str, str]]:
    """A system message, where it says something, and the turns of user and assistant, of whom the user begins."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return system + [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]


def question_of(prompt: str | list[dict[str, str]]) -> str:
    """What a reader is shown of a prompt: a chat's last user message, or a text's last line that says something."""
    if isinstance(prompt, str):
        return (prompt.strip().splitlines() or [""])[-1]
    return next((turn["content"] for turn in reversed(prompt) if turn["role"] == "user"), prompt[-1]["content"])


def is_chat(prompt: Any) -> bool:
    """Whether a value is a list of messages with role and content."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(turn, dict) for turn in prompt)
        and all(isinstance(turn.get(key), str) for turn in prompt for key in ("role", "content"))
    )
