r"""Parsing and comparison of numbers with units; a text is read as a whole or not at all.

A number is digits, a fraction, a mixed number, a repeating decimal, a power of ten or a multiple of one, a ratio of two
numbers, or words. A computation such as 2+3 or \sqrt{25} is not a number.
"""

import re
from collections.abc import Collection
from fractions import Fraction
from typing import NamedTuple

from recjax.grading.notation import depths
from recjax.grading.units import BARE_LETTERS, NOTHING, Unit, units

_NAMES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_SMALL = {word: value for value, word in enumerate(f"{_NAMES} seventeen eighteen nineteen".split())}
_SMALL |= {digit: value for value, digit in enumerate("零一二三四五六七八九十")}
_TENS = {word: 10 * n for n, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_PARTS = {name: 3 + n for n, name in enumerate("third fourth fifth sixth seventh eighth ninth tenth".split())}
_PARTS |= {"half": 2, "halve": 2, "quarter": 4, "twelfth": 12, "hundredth": 100, "thousandth": 1000}
_PARTS |= {f"{name}s": value for name, value in _PARTS.items()}
PERCENT = (Unit(Fraction(1), (("percent", 1),)),)
_MOST_DIGITS = 1000
_LARGEST_POWER = 1000
_EXACT_DIGITS = 6  # a decimal with fewer significant digits is never a rounding of another number
_DEGREES = {(("degree", 1),), (("temperature", 1),)}  # a truth in plain degrees may be a temperature
_NOISE = Fraction(1, 10**15)  # relative error of a number that a program printed


class Quantity(NamedTuple):
    """A number with the value of the last decimal place (None: exact), the number of significant digits, and units.

    `units` holds all readings of an ambiguous unit; it is empty for a number without a unit.
    """

    value: Fraction
    last_place: Fraction | None = None
    digits: int = 0
    units: tuple[Unit, ...] = ()

    @property
    def percent(self) -> bool:
        """True for a percentage."""
        return self.units == PERCENT

    def times(self, factor: Fraction) -> "Quantity":
        """The number times a factor, with the same unit."""
        last = None if self.last_place is None else self.last_place * abs(factor)
        return self._replace(value=self.value * factor, last_place=last)


_WHOLE = r"\d{1,3}(?: \d{3})+(?! ?\d)|\d+"
_DECIMAL = re.compile(
    rf"(?P<whole>{_WHOLE})?(?:\.(?P<decimals>\d*)(?:\\overline\{{(?P<bar>\d+)\}}|\((?P<cycle>\d+)\))?)?", re.A
)
_INTEGER = r"\{?(-?\d+)\}?"
_FRACTIONS = [  # each with the groups whole number, numerator and denominator
    re.compile(r"(?:(\d+) ?)?\\frac\{ ?(-?\d+) ?\}\{ ?(-?\d+) ?\}", re.A),
    re.compile(r"(\d+) (\d+) ?/ ?(\d+)", re.A),
    re.compile(rf"(){_INTEGER} ?(?:/|:(?=[^A-Za-z%°]*$)) ?{_INTEGER}", re.A),  # a ratio has no unit
]
_TIMES = r"(?:\\times|\\cdot|\*|x)"
_EXPONENT = r"\^ ?(\{ ?)?([-+]?\d+)(?(1) ?\})"
_POWER = re.compile(rf" ?{_TIMES} ?10 ?{_EXPONENT}|[eE]([-+]?\d+)(?![\d.A-Za-z])", re.A)
_BARE_POWER = re.compile(rf"10 ?{_EXPONENT}(?: ?{_TIMES} ?([-+]?\d+(?:\.\d+)?))?(?!\d)", re.A)
_SIGN = r"[-+]|(?i:negative|minus|positive)\b"
_PREFIX = re.compile(rf"(?:(?P<sign>{_SIGN}) ?)?(?:(?P<money>[$€£¥₹]|(?:USD|EUR|GBP)\b) ?)?(?:(?P<other>{_SIGN}) ?)?")
_SCALE = re.compile(rf" ?(?:\\text\{{ ?)?({'|'.join(_SCALES)})s?\b(?: (thousand|million|billion))?\}}?", re.I)
_IN_WORDS = re.compile(rf" and |[ -](?:{'|'.join(_PARTS)})\b")  # after digits: 3 and a half, 2 thirds
_ARC = re.compile(r"(\d{1,9})° ?(\d{1,2})'(?: ?(\d{1,2}(?:\.\d{1,20})?)(?:''|\"))?", re.A)
_SECOND = re.compile(r"^(?P<first>.*?[A-Za-z}]\.?),? (?:and )?(?P<second>\d.*)$")


def quantity(text: str, letters: Collection[str] = BARE_LETTERS) -> Quantity | None:
    r"""Reads a whole text, in the notation of `notation.plain`, as a number; None if it is anything else.

    Args:
        letters: the single letters that are units after a space, outside of \text too.
    """
    if len(text) > 2 * _MOST_DIGITS:
        return None
    amount = _quantity(text.strip(), letters)
    if amount is None and (match := _ARC.fullmatch(text)):
        degrees = int(match[1]) + Fraction(int(match[2]), 60) + Fraction(match[3] or 0) / 3600
        amount = Quantity(degrees, units=units("°"))
    if amount is None and (match := _SECOND.match(_without_text(text))):
        amount = _sum(match["first"], match["second"], letters)
    return amount


def _sum(first: str, second: str, letters: Collection[str]) -> Quantity | None:
    """Adds a quantity and a smaller one with a smaller unit: 2 hours and 30 minutes."""
    large = _quantity(first.strip(), letters)
    small = _quantity(second.strip(), letters)
    if large is None or small is None:
        return None
    for unit in large.units:
        for other in small.units:
            if unit.dimensions == other.dimensions != () and unit.factor > other.factor and not large.last_place:
                added = small.value * other.factor / unit.factor
                return large._replace(value=large.value + added, units=(unit,)) if 0 < added < 1 else None
    return None


def _quantity(text: str, letters: Collection[str]) -> Quantity | None:
    text = _without_parentheses(text)
    if re.match(r"\\text ?\{ ?(?:[-+]|minus\b|negative\b)", text):
        text = _without_text(text)  # the sign is inside \text
    match = _PREFIX.match(text)
    assert match is not None
    if match["sign"] and match["other"]:
        return None
    sign = -1 if (match["sign"] or match["other"] or "").casefold() in ("-", "negative", "minus") else 1
    money = match["money"] or ""
    text = _without_parentheses(text[match.end() :])
    if text[:2] == r"\t":
        text = _without_text(text)
    number, after = _leading_number(text)
    if number is None or _IN_WORDS.match(after):
        # A number in words, with or without a unit: five, two thirds, five apples, ten per cent.
        words = [] if money else _without_text(text).split()
        for count in range(len(words), max(0, len(words) - 5), -1):
            spelled = re.sub(r"(?<=[a-z\d])-(?=[a-z])|(?<=[a-z]),+", " ", " ".join(words[:count]).casefold())
            if (value := _fraction(spelled.split())) is not None:
                return _with_unit(Quantity(sign * value), " " + " ".join(words[count:]), letters)
        return None
    if scale := _SCALE.match(after):
        number = number.times(Fraction(_SCALES[scale[1].casefold()] * _SCALES.get((scale[2] or "").casefold(), 1)))
        after = after[scale.end() :]
    number = number.times(Fraction(sign))
    return _with_unit(number, f"{money} {after}" if money and after.strip() else money or after, letters)


def _without_parentheses(text: str) -> str:
    while len(text) > 2 and text[0] in "({" and text[-1] in ")}":
        if re.search(r",|\\[{}]", text) or 0 in list(depths(text))[:-1]:
            break
        text = text[1:-1].strip()
    return text


def _without_text(text: str) -> str:
    return " ".join(re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", text).split())


def _leading_number(text: str) -> tuple[Quantity | None, str]:
    """The number at the start of a text, and the text after it."""
    if power := _BARE_POWER.match(text):
        value = _ten_to(power[2])
        return (None, text) if value is None else (Quantity(Fraction(power[3] or 1) * value), text[power.end() :])
    fraction = next(filter(None, (pattern.match(text) for pattern in _FRACTIONS)), None)
    match = fraction or _DECIMAL.match(text)
    assert match is not None
    if match.group() in ("", ".") or len(match.group()) > _MOST_DIGITS:
        return None, text
    if fraction:
        whole, over, under = (int(each or 0) for each in fraction.groups())
        number = Quantity(whole + Fraction(over, under)) if under and (not whole or over * under >= 0) else None
    else:
        parts = match.groupdict(default="")
        whole = re.sub(r"\D", "", parts["whole"])
        decimals = parts["decimals"]
        cycle = parts["bar"] or parts["cycle"]
        last_place = Fraction(1, 10 ** len(decimals))
        number = Quantity(int(whole + decimals or 0) * last_place)
        if cycle:
            number = Quantity(number.value + int(cycle) * last_place / (10 ** len(cycle) - 1))
        elif decimals:
            number = Quantity(number.value, last_place, len((whole + decimals).lstrip("0")))
    after = text[match.end() :]
    if number is None or re.match(r"[\d(]|\.\d|\.\.|,\d|\\ldots|:\d", after):
        return None, text
    if power := _POWER.match(after):
        value = _ten_to(power[2] or power[3])
        return (None, text) if value is None else (number.times(value), after[power.end() :])
    return number, after


def _ten_to(power: str) -> Fraction | None:
    return Fraction(10) ** int(power) if len(power) < 6 and abs(int(power)) <= _LARGEST_POWER else None


def _with_unit(number: Quantity, unit_text: str, letters: Collection[str]) -> Quantity | None:
    """The number with the unit that `unit_text` names; None if the unit is unknown."""
    if not unit_text.strip():
        return number
    if unit_text[0] == "%":
        return None if unit_text[1:].strip() else number._replace(units=PERCENT)
    named = named_unit(unit_text, letters)
    return number._replace(units=() if named == (NOTHING,) else named) if named else None


def named_unit(text: str, letters: Collection[str] = ()) -> tuple[Unit, ...]:
    r"""The readings of a text after a number as a unit; empty if the text is not a known unit.

    A letter outside of \text is a unit only in a rate, or after a space and if in `letters`.
    """
    written = re.sub(
        r"\\text ?\{ ?([nμmkMG]) ?\} ?(?=\\Omega)|\\mu ?(?=\\text|[A-Za-z])", lambda match: match[1] or "μ", text
    )
    in_braces = r"\{((?:\\text ?\{[^{}]*\}(?:\^\{?\d\}?)?|[A-Za-z ])+)\}"
    written = re.sub(
        rf"\\frac{in_braces}{in_braces}", r"\1/\2", written.replace(r"\Omega", "Ω").replace("μ\\text{", r"\text{μ")
    )
    bare = re.sub(r"\\text ?\{[^{}]*\}|\\cdot ?", "", written)
    for letter in re.findall(r"(?<![A-Za-zμ])[A-Za-z](?![A-Za-zΩ])", bare):
        rate = re.search(rf"/ ?{letter}|{letter} ?/", bare)
        if not (rate or (letter in letters and bare[:1] == " ")) and "°" not in bare:
            return ()
    return () if "\\" in bare else units(_without_text(written))


def same_quantity(truth: Quantity, answer: Quantity) -> bool:
    """True if a quantity equals the true one; see experiments/math/README.md."""
    if truth.percent is not answer.percent:
        if truth.units and answer.units:
            return False
        hundredth = Fraction(1, 100)
        one_in_hundredths = (truth.times(hundredth), answer) if truth.percent else (truth, answer.times(hundredth))
        is_fraction = truth.last_place is None and truth.value.denominator != 1 and answer.percent  # 1/2 is only 50%
        return (same_number(truth, answer) and not is_fraction) or same_number(*one_in_hundredths)
    if not truth.units or not answer.units or truth.percent:
        return same_number(truth, answer)
    for unit in truth.units:
        for other in answer.units:
            factor = other.factor / unit.factor
            converted = answer._replace(value=answer.value + other.offset).times(factor)
            converted = converted._replace(value=converted.value - unit.offset)
            if unit.dimensions == other.dimensions and same_number(truth, converted):
                return True
            if {unit.dimensions, other.dimensions} == _DEGREES and same_number(truth, answer):
                return True
    return False


def same_number(truth: Quantity, answer: Quantity) -> bool:
    """True for equal numbers or a rounding to six or more digits; see experiments/math/README.md."""
    difference = abs(truth.value - answer.value)
    if difference == 0:
        return True
    denominator = truth.value.denominator
    if truth.last_place is not None and denominator != 1:  # 510000.00 is a whole number
        finer = answer.last_place is None or answer.last_place < truth.last_place
        return truth.digits >= _EXACT_DIGITS and finer and difference <= truth.last_place / 2
    terminates = pow(10, denominator.bit_length(), denominator) == 0
    return not terminates and is_rounding(answer, truth.value)


def is_rounding(decimal: Quantity, value: Fraction) -> bool:
    """True if a decimal has six or more significant digits and is a correct rounding of the number."""
    if decimal.last_place is None or decimal.digits < _EXACT_DIGITS:
        return False
    return abs(decimal.value - value) <= max(decimal.last_place / 2, _NOISE * abs(value) if decimal.digits > 15 else 0)


# --- Numbers in English words.


def _fraction(words: list[str]) -> Fraction | None:
    """Reads a number in words: "twenty one", "one hundred and five", "two thirds", "a dozen"."""
    if not words or words[-1] not in _PARTS:
        value = _cardinal(words) if words and not words[-1].isdigit() else None
        return None if value is None else Fraction(value)
    *before, last = words
    if "and" in before:  # two and a half
        and_index = len(before) - 1 - before[::-1].index("and")
        whole = _cardinal(before[:and_index])
        fraction = _fraction(words[and_index + 1 :])
        return None if whole is None or fraction is None or fraction >= 1 else whole + fraction
    count = 1 if before in (["a"], ["an"]) or words == ["half"] else _cardinal(before)
    return Fraction(count, _PARTS[last]) if count and last.endswith("s") is (count > 1) else None


def _cardinal(words: list[str]) -> int | None:
    """Reads an integer: the number before its largest scale times that scale, plus the number after it."""
    if len(words) == 1 and re.fullmatch(r"\d{1,50}", words[0], re.A):
        return int(words[0])
    scale = next((name for name in reversed(_SCALES) if name in words), None)
    if scale is None:
        value = sum(_SMALL.get(word, _TENS.get(word, 0)) for word in words)
        is_pair = len(words) == 2 and words[0] in _TENS and 0 < _SMALL.get(words[1], 0) < 10
        return value if is_pair or (len(words) == 1 and words[0] in _SMALL | _TENS) else None
    before = words[: words.index(scale)]
    after = words[words.index(scale) + 1 :]
    count = 1 if before in ([], ["a"], ["an"]) else _cardinal(before)
    added = _cardinal(after[after[0] == "and" :]) if after else 0
    is_read = count is not None and added is not None and not (after and after[0] in _SCALES)
    limit = 100 if scale == "hundred" else 10_000
    return count * _SCALES[scale] + added if is_read and count < limit and added < _SCALES[scale] else None
