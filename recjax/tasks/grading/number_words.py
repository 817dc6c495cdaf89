"""Numbers in English words."""

import re
from fractions import Fraction

_SMALL = {
    word: value
    for value, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
        " seventeen eighteen nineteen".split()
    )
}
_TENS = {word: 10 * n for n, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_ORDINALS = "third fourth fifth sixth seventh eighth ninth tenth".split()
PARTS = {name: 3 + place for place, name in enumerate(_ORDINALS)}
PARTS |= {"half": 2, "halve": 2, "quarter": 4, "twelfth": 12, "hundredth": 100, "thousandth": 1000}
PARTS |= {f"{name}s": value for name, value in PARTS.items()}
WORDS = {*_SMALL, *_TENS, *SCALES, *PARTS, "a", "an", "and", "minus", "negative", "positive"}


def number_in_words(text: str) -> Fraction | None:
    """Reads a number in words: "twenty-one", "one hundred and five", "two thirds", "minus four", "a dozen"."""
    words = re.sub(r"(?<=[a-z])-(?=[a-z])", " ", text.casefold()).replace(",", " ").split()
    sign = {"minus": -1, "negative": -1, "positive": 1}.get(words[0] if words else "", 0)
    words = words[1:] if sign else words
    if not words or not set(words) <= WORDS:
        return None
    value = _fraction(words)
    return None if value is None else (sign or 1) * value


def _fraction(words: list[str]) -> Fraction | None:
    *before, last = words
    if last in PARTS:
        if "and" in before:  # two and a half
            place = len(before) - 1 - before[::-1].index("and")
            whole, part = _cardinal(before[:place]), _fraction([*before[place + 1 :], last])
            return None if whole is None or part is None or part >= 1 else whole + part
        count = 1 if not before and PARTS[last] == 2 and last == "half" else _count(before)
        plural = last.endswith("s")
        return None if count is None or count == 0 or plural == (count == 1) else Fraction(count, PARTS[last])
    value = _cardinal(words)
    return None if value is None else Fraction(value)


def _count(words: list[str]) -> int | None:
    return 1 if words in (["a"], ["an"]) else _cardinal(words)


def _cardinal(words: list[str]) -> int | None:
    """Reads an integer: groups below 1,000, each with a smaller scale than the group before."""
    if words and words[0] in ("a", "an"):
        words = ["one", *words[1:]] if len(words) > 1 and words[1] in SCALES else []
    if words and words[0] in SCALES:
        words = ["one", *words]
    total, group, limit, last = 0, None, 10**15, ""
    for word in words:
        if word == "and":
            if last not in SCALES:
                return None
        elif word in _SMALL or word in _TENS:
            value = _SMALL.get(word, _TENS.get(word))
            room = group is None or (last in _TENS and 0 < value < 10) or (last in ("hundred", "and") and value < 100)
            if not room:
                return None
            group = (group or 0) + value
        elif word in SCALES and group is not None:
            if word == "hundred":
                if group >= 100:
                    return None
                group *= 100
            else:
                if SCALES[word] >= limit:
                    return None
                limit, total, group = SCALES[word], total + group * SCALES[word], None
        else:
            return None
        last = word
    if not words or last == "and" or (group is None and total == 0):
        return None
    return total + (group or 0)
