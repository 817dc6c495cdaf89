"""Simple rewards: 1 for a right answer, 0 for a wrong one. Name one in `task.reward` as module:function.

The rewards read the text after a completion's thoughts; see `recjax.grading.thinking`.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from recjax.errors import UserError
from recjax.grading.thinking import after_thoughts, opening_tag, whole_reply

# Thousands separators belong to the number: the last number of "1,234" is not 234. Longer exponents do not match.
_NUMBER = re.compile(r"[-+]?(\d{1,3}(?:,\d{3})+(?!\d)|\d+)(\.\d+)?(?:[eE][-+]?\d{1,3}(?![\d.]))?", re.ASCII)
_MOST_CHARACTERS = 1000


def exact_match(prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 if the completion equals the answer exactly, except for surrounding whitespace."""
    rewards = []
    for completion, text, answer in zip(completions, _answer_texts(prompts, completions), answers, strict=True):
        if after_thoughts(answer) != answer:  # An answer with thinking tags needs the complete reply.
            text = completion
        rewards.append(float(text.strip() == answer.strip()))
    return rewards


def number_match(prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 if the completion is a single number with the value of the answer.

    Raises:
        UserError: an answer is not a number.
    """
    return _compared(
        _number, "number_match needs answers that are numbers", _answer_texts(prompts, completions), answers
    )


def last_number_match(prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 if the last number in the completion equals the last number in the answer.

    Raises:
        UserError: an answer contains no number.
    """
    need = "last_number_match needs answers that hold a number"

    def last(text: str) -> Fraction | None:
        numbers = [match.group() for match in _NUMBER.finditer(text)]
        if not numbers:
            return None
        return _number(numbers[-1])

    return _compared(last, need, _answer_texts(prompts, completions), answers)


def _answer_texts(prompts: Sequence[str], completions: Sequence[str]) -> list[str]:
    pairs = zip(prompts, completions, strict=True)
    return [after_thoughts(whole_reply(opening_tag(prompt), completion)) for prompt, completion in pairs]


def _compared(
    number_in: Callable[[str], Fraction | None], need: str, completions: Sequence[str], answers: Sequence[str]
) -> list[float]:
    expected = [number_in(answer) for answer in answers]
    if None in expected:
        raise UserError(problem=need, remedy=f"got {answers[expected.index(None)]!r}")
    return [float(number_in(text) == number) for text, number in zip(completions, expected, strict=True)]


def _number(text: str) -> Fraction | None:
    text = text.strip()
    if len(text) > _MOST_CHARACTERS or not _NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace(",", ""))
