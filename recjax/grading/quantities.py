r"""Parsing and comparison of numbers with units; a text is read completely or not at all.

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
_EXACT_DIGITS = 6  # A decimal with fewer significant digits is never a rounding.
_DEGREES = {(("degree", 1),), (("temperature", 1),)}  # A truth in plain degrees may be a temperature.
_NOISE = Fraction(1, 10**15)  # relative error of a number that a program printed


class Quantity(NamedTuple):
    """A number with its unit.

    value: the number.
    last_place: value of the last decimal place; None for an exact number.
    digits: number of significant digits of a decimal.
    units: all readings of an ambiguous unit; empty for a number without a unit.
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
        last_place = None
        if self.last_place is not None:
            last_place = self.last_place * abs(factor)
        return self._replace(value=self.value * factor, last_place=last_place)


_WHOLE = r"\d{1,3}(?: \d{3})+(?! ?\d)|\d+"
_DECIMAL = re.compile(
    rf"(?P<whole>{_WHOLE})?(?:\.(?P<decimals>\d*)(?:\\overline\{{(?P<bar>\d+)\}}|\((?P<cycle>\d+)\))?)?", re.A
)
_INTEGER = r"\{?(-?\d+)\}?"
_FRACTIONS = [  # Each pattern has the groups whole number, numerator and denominator.
    re.compile(r"(?:(\d+) ?)?\\frac\{ ?(-?\d+) ?\}\{ ?(-?\d+) ?\}", re.A),
    re.compile(r"(\d+) (\d+) ?/ ?(\d+)", re.A),
    re.compile(rf"(){_INTEGER} ?(?:/|:(?=[^A-Za-z%°]*$)) ?{_INTEGER}", re.A),  # A ratio has no unit.
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
    r"""Reads a complete text, in the notation of `notation.plain`, as a number; None if it is anything else.

    Args:
        letters: the single letters that are units after a space, outside of \text too.
    """
    if len(text) > 2 * _MOST_DIGITS:
        return None
    amount = _quantity(text.strip(), letters)
    if amount is not None:
        return amount
    arc = _ARC.fullmatch(text)
    if arc:
        minutes = Fraction(int(arc[2]), 60)
        seconds = Fraction(arc[3] or 0) / 3600
        return Quantity(int(arc[1]) + minutes + seconds, units=units("°"))
    two = _SECOND.match(_without_text(text))
    if two:
        return _sum(two["first"], two["second"], letters)
    return None


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
                if not 0 < added < 1:
                    return None
                return large._replace(value=large.value + added, units=(unit,))
    return None


def _quantity(text: str, letters: Collection[str]) -> Quantity | None:
    text = _without_parentheses(text)
    if re.match(r"\\text ?\{ ?(?:[-+]|minus\b|negative\b)", text):
        text = _without_text(text)  # The sign is inside \text.
    match = _PREFIX.match(text)
    assert match is not None
    if match["sign"] and match["other"]:
        return None
    sign_text = match["sign"] or match["other"] or ""
    is_negative = sign_text.casefold() in ("-", "negative", "minus")
    sign = -1 if is_negative else 1
    money = match["money"] or ""
    text = _without_parentheses(text[match.end() :])
    if text[:2] == r"\t":
        text = _without_text(text)
    number, after = _leading_number(text)
    if number is None or _IN_WORDS.match(after):
        if money:
            return None
        return _quantity_in_words(_without_text(text).split(), sign, letters)
    scale = _SCALE.match(after)
    if scale:
        factor = _SCALES[scale[1].casefold()]
        if scale[2]:
            factor *= _SCALES[scale[2].casefold()]
        number = number.times(Fraction(factor))
        after = after[scale.end() :]
    unit_text = after
    if money:
        unit_text = f"{money} {after}" if after.strip() else money
    return _with_unit(number.times(Fraction(sign)), unit_text, letters)


def _quantity_in_words(words: list[str], sign: int, letters: Collection[str]) -> Quantity | None:
    """Reads a number in words, with or without a unit: five, two thirds, five apples, ten per cent."""
    for count in range(len(words), max(0, len(words) - 5), -1):
        spelled = " ".join(words[:count]).casefold()
        spelled = re.sub(r"(?<=[a-z\d])-(?=[a-z])|(?<=[a-z]),+", " ", spelled)
        value = _fraction(spelled.split())
        if value is not None:
            return _with_unit(Quantity(sign * value), " " + " ".join(words[count:]), letters)
    return None


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
    bare_power = _BARE_POWER.match(text)
    if bare_power:
        value = _ten_to(bare_power[2])
        if value is None:
            return None, text
        return Quantity(Fraction(bare_power[3] or 1) * value), text[bare_power.end() :]
    match = None
    for pattern in _FRACTIONS:
        match = pattern.match(text)
        if match:
            break
    is_fraction = match is not None
    if match is None:
        match = _DECIMAL.match(text)
        assert match is not None
    if match.group() in ("", ".") or len(match.group()) > _MOST_DIGITS:
        return None, text
    if is_fraction:
        number = _written_fraction(match)
    else:
        number = _written_decimal(match)
    after = text[match.end() :]
    if number is None or re.match(r"[\d(]|\.\d|\.\.|,\d|\\ldots|:\d", after):
        return None, text
    power = _POWER.match(after)
    if power:
        value = _ten_to(power[2] or power[3])
        if value is None:
            return None, text
        return number.times(value), after[power.end() :]
    return number, after


def _written_fraction(match: re.Match) -> Quantity | None:
    whole, over, under = (int(digits or 0) for digits in match.groups())
    if not under:
        return None
    if whole and over * under < 0:
        return None
    return Quantity(whole + Fraction(over, under))


def _written_decimal(match: re.Match) -> Quantity:
    parts = match.groupdict(default="")
    whole = re.sub(r"\D", "", parts["whole"])
    decimals = parts["decimals"]
    cycle = parts["bar"] or parts["cycle"]
    last_place = Fraction(1, 10 ** len(decimals))
    value = int(whole + decimals or 0) * last_place
    if cycle:
        return Quantity(value + int(cycle) * last_place / (10 ** len(cycle) - 1))
    if decimals:
        return Quantity(value, last_place, len((whole + decimals).lstrip("0")))
    return Quantity(value)


def _ten_to(power: str) -> Fraction | None:
    if len(power) > 5 or abs(int(power)) > _LARGEST_POWER:
        return None
    return Fraction(10) ** int(power)


def _with_unit(number: Quantity, unit_text: str, letters: Collection[str]) -> Quantity | None:
    """The number with the unit that `unit_text` names; None if the unit is unknown."""
    if not unit_text.strip():
        return number
    if unit_text[0] == "%":
        if unit_text[1:].strip():
            return None
        return number._replace(units=PERCENT)
    named = named_unit(unit_text, letters)
    if not named:
        return None
    if named == (NOTHING,):
        return number._replace(units=())
    return number._replace(units=named)


def named_unit(text: str, letters: Collection[str] = ()) -> tuple[Unit, ...]:
    r"""The readings of a text after a number as a unit; empty if the text is not a known unit.

    A letter outside of \text is a unit only in a rate, or after a space and if in `letters`.
    """
    written = re.sub(
        r"\\text ?\{ ?([nμmkMG]) ?\} ?(?=\\Omega)|\\mu ?(?=\\text|[A-Za-z])", lambda match: match[1] or "μ", text
    )
    written = written.replace(r"\Omega", "Ω").replace("μ\\text{", r"\text{μ")
    in_braces = r"\{((?:\\text ?\{[^{}]*\}(?:\^\{?\d\}?)?|[A-Za-z ])+)\}"
    written = re.sub(rf"\\frac{in_braces}{in_braces}", r"\1/\2", written)
    bare = re.sub(r"\\text ?\{[^{}]*\}|\\cdot ?", "", written)
    for letter in re.findall(r"(?<![A-Za-zμ])[A-Za-z](?![A-Za-zΩ])", bare):
        is_in_rate = re.search(rf"/ ?{letter}|{letter} ?/", bare)
        is_after_space = bare[:1] == " " and letter in letters
        if not is_in_rate and not is_after_space and "°" not in bare:
            return ()
    if "\\" in bare:
        return ()
    return units(_without_text(written))


def same_quantity(truth: Quantity, answer: Quantity) -> bool:
    """True if a quantity equals the true one; see experiments/math/README.md."""
    if truth.percent is not answer.percent:
        if truth.units and answer.units:
            return False
        hundredth = Fraction(1, 100)
        if truth.percent:
            return same_number(truth, answer) or same_number(truth.times(hundredth), answer)
        if same_number(truth, answer.times(hundredth)):
            return True
        is_fraction = truth.last_place is None and truth.value.denominator != 1  # 1/2 is 50% and not 0.5%
        return not is_fraction and same_number(truth, answer)
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
        if truth.digits < _EXACT_DIGITS:
            return False
        is_finer = answer.last_place is None or answer.last_place < truth.last_place
        return is_finer and difference <= truth.last_place / 2
    terminates = pow(10, denominator.bit_length(), denominator) == 0
    if terminates:
        return False
    return is_rounding(answer, truth.value)


def is_rounding(decimal: Quantity, value: Fraction) -> bool:
    """True if a decimal has six or more significant digits and is a correct rounding of the number."""
    if decimal.last_place is None or decimal.digits < _EXACT_DIGITS:
        return False
    tolerance = decimal.last_place / 2
    if decimal.digits > 15:
        tolerance = max(tolerance, _NOISE * abs(value))
    return abs(decimal.value - value) <= tolerance


# --- Numbers in English words.


def _fraction(words: list[str]) -> Fraction | None:
    """Reads a number in words: "twenty one", "one hundred and five", "two thirds", "a dozen"."""
    if not words:
        return None
    if words[-1] not in _PARTS:
        if words[-1].isdigit():
            return None
        integer = _cardinal(words)
        return None if integer is None else Fraction(integer)
    *before, last = words
    if "and" in before:  # two and a half
        and_index = len(before) - 1 - before[::-1].index("and")
        whole = _cardinal(before[:and_index])
        fraction = _fraction(words[and_index + 1 :])
        if whole is None or fraction is None or fraction >= 1:
            return None
        return whole + fraction
    if before in (["a"], ["an"]) or words == ["half"]:
        count = 1
    else:
        count = _cardinal(before)
    if not count or last.endswith("s") is not (count > 1):
        return None
    return Fraction(count, _PARTS[last])


def _cardinal(words: list[str]) -> int | None:
    """Reads an integer: the number before its largest scale times that scale, plus the number after it."""
    if len(words) == 1 and re.fullmatch(r"\d{1,50}", words[0], re.A):
        return int(words[0])
    scale = next((name for name in reversed(_SCALES) if name in words), None)
    if scale is None:
        return _below_hundred(words)
    before = words[: words.index(scale)]
    after = words[words.index(scale) + 1 :]
    if before in ([], ["a"], ["an"]):
        count = 1
    else:
        count = _cardinal(before)
    added = 0
    if after:
        if after[0] in _SCALES:
            return None
        if after[0] == "and":
            after = after[1:]
        added = _cardinal(after)
    if count is None or added is None:
        return None
    limit = 100 if scale == "hundred" else 10_000
    if count >= limit or added >= _SCALES[scale]:
        return None
    return count * _SCALES[scale] + added


def _below_hundred(words: list[str]) -> int | None:
    """Reads one word, such as "twelve", or a pair, such as "twenty one"."""
    if len(words) == 1:
        return _SMALL.get(words[0], _TENS.get(words[0]))
    if len(words) == 2 and words[0] in _TENS and 0 < _SMALL.get(words[1], 0) < 10:
        return _TENS[words[0]] + _SMALL[words[1]]
    return None
