"""Rewards that need no library: 1 for a right answer, 0 for any other. Named in `task.reward` as module:function."""

import re
from collections.abc import Sequence
from fractions import Fraction

_NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?", re.ASCII)


def exact_match(prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 where a completion is its answer to the letter, spaces around either left aside."""
    return [float(text.strip() == answer.strip()) for text, answer in zip(completions, answers, strict=True)]


def number_match(prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 where a completion is one number and nothing else, equal in value to its answer.

    Raises:
        ValueError: an answer is not a number.
    """
    rewards = []
    for text, answer in zip(completions, answers, strict=True):
        expected = _number(answer)
        if expected is None:
            raise ValueError(f"number_match needs answers that are numbers; got {answer!r}")
        rewards.append(float(_number(text) == expected))
    return rewards


def _number(text: str) -> Fraction | None:
    text = text.strip()
    return Fraction(text.replace(",", "")) if _NUMBER.fullmatch(text) else None
