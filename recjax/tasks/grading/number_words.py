"""Numbers in English words."""

import re
from fractions import Fraction

_NAMES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_SMALL = {word: value for value, word in enumerate(f"{_NAMES} seventeen eighteen nineteen".split())}
_TENS = {word: 10 * n for n, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
PARTS = {name: 3 + n for n, name in enumerate("third fourth fifth sixth seventh eighth ninth tenth".split())}
PARTS |= {"half": 2, "halve": 2, "quarter": 4, "twelfth": 12, "hundredth": 100, "thousandth": 1000}
PARTS |= {f"{name}s": value for name, value in PARTS.items()}


def number_in_words(text: str) -> Fraction | None:
    """Reads a number in words: "twenty-one", "one hundred and five", "two thirds", "minus four", "a dozen"."""
    words = re.sub(r"(?<=[a-z])-(?=[a-z])", " ", text.casefold()).replace(",", " ").split()
    if words and words[0] in ("minus", "negative", "positive"):
        value = _fraction(words[1:])
        return None if value is None else value * (1 if words[0] == "positive" else -1)
    return _fraction(words)


def _fraction(words: list[str]) -> Fraction | None:
    if not words or words[-1] not in PARTS:
        value = _cardinal(words)
        return None if value is None else Fraction(value)
    *before, last = words
    if "and" in before:  # two and a half
        place = len(before) - 1 - before[::-1].index("and")
        whole, part = _cardinal(before[:place]), _fraction(words[place + 1 :])
        return None if whole is None or part is None or part >= 1 else whole + part
    count = 1 if before in (["a"], ["an"]) or words == ["half"] else _cardinal(before)
    return Fraction(count, PARTS[last]) if count and last.endswith("s") is (count > 1) else None


def _cardinal(words: list[str]) -> int | None:
    """Reads an integer: the number before its largest scale times that scale, plus the number after it."""
    scale = next((name for name in reversed(SCALES) if name in words), None)
    if scale is None:
        value = sum(_SMALL.get(word, _TENS.get(word, 0)) for word in words)
        is_pair = len(words) == 2 and words[0] in _TENS and 0 < _SMALL.get(words[1], 0) < 10
        return value if is_pair or (len(words) == 1 and words[0] in _SMALL | _TENS) else None
    before, after = words[: words.index(scale)], words[words.index(scale) + 1 :]
    count = 1 if before in ([], ["a"], ["an"]) else _cardinal(before)
    rest = _cardinal(after[after[0] == "and" :]) if after else 0
    is_read = count is not None and rest is not None and not (after and after[0] in SCALES)
    limit = 100 if scale == "hundred" else 10_000
    return count * SCALES[scale] + rest if is_read and count < limit and rest < SCALES[scale] else None
