r"""Parsing and comparison of numbers with units; a text is read as a whole or not at all.

A number is digits, a fraction, a mixed number, a repeating decimal, a power of ten or a multiple of one, a ratio of two
numbers, or words. A computation such as 2+3 or \sqrt{25} is not a number.
"""

import itertools
import re
from fractions import Fraction
from typing import NamedTuple

from recjax.tasks.grading.number_words import SCALES, number_in_words
from recjax.tasks.grading.units import BARE_LETTERS, NOTHING, Unit, units

PERCENT = (Unit(Fraction(1), (("percent", 1),)),)
_MOST_DIGITS, _LARGEST_POWER = 1000, 1000
_EXACT_DIGITS = 6  # a decimal with fewer significant digits is never a rounding of another number
_NOISE = Fraction(1, 10**15)  # relative error of a number that a program printed


class Quantity(NamedTuple):
    """A number, the place value of its last decimal (None: exact), its number of significant digits, and its units.

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


_WHOLE = r"\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?! ?\d)|\d+"
_DECIMAL = rf"(?P<whole>{_WHOLE})?(?:\.(?P<decimals>\d*)(?:\\overline\{{(?P<bar>\d+)\}}|\((?P<cycle>\d+)\))?)?"
_FRACTION = r"\\frac\{ ?(?P<over>-?[\d,]+) ?\}\{ ?(?P<under>-?[\d,]+) ?\}"
_NUMBER = re.compile(
    rf"(?:(?:(?P<mixed>\d+) ?)?{_FRACTION}"
    r"|(?P<mixed2>\d+) (?P<over2>\d+) ?/ ?(?P<under2>\d+)"
    r"|\{?(?P<over3>-?\d+(?:,\d{{3}})*)\}? ?(?:/|:) ?\{?(?P<under3>-?\d+(?:,\d{{3}})*)\}?"
    rf"|{_DECIMAL})",
    re.A,
)
_TIMES = r"(?:\\times|\\cdot|\*|x)"
_POWER = re.compile(rf" ?{_TIMES} ?10 ?\^ ?(?:\{{ ?([-+]?\d+) ?\}}|([-+]?\d+))|[eE]([-+]?\d+)(?![\d.A-Za-z])", re.A)
_BARE_POWER = re.compile(
    rf"10 ?\^ ?(?:\{{ ?([-+]?\d+) ?\}}|([-+]?\d+))(?: ?{_TIMES} ?(?P<times>[-+]?\d+(?:\.\d+)?))?(?!\d)", re.A
)
_SIGN = re.compile(r"(?:(?P<sign>[-+])|(?P<word>negative|minus|positive)\b) ?", re.I)
_CURRENCY = re.compile(r"(?:(?P<mark>[$€£¥₹])|(?P<code>USD|EUR|GBP)\b) ?")
_SCALE = re.compile(rf" ?(?:\\text\{{ ?)?({'|'.join(SCALES)})s?\b(?: (thousand|million|billion))?\}}?", re.I)
_PART = re.compile(
    r"(\d+)[ -](half|halves|thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?"
    r"|thousandths?)"
)
_ARC = re.compile(r"(\d{1,9})° ?(\d{1,2})'(?: ?(\d{1,2}(?:\.\d{1,20})?)(?:''|\"))?", re.A)
_SECOND = re.compile(r"^(?P<first>.*?[A-Za-z}]\.?),? (?:and )?(?P<second>\d.*)$")


def quantity(text: str) -> Quantity | None:
    """Reads a whole text, in the notation of `notation.plain`, as a number; None if it is anything else."""
    if len(text) > 2 * _MOST_DIGITS:
        return None
    found = _quantity(text.strip())
    if found is None and (match := _ARC.fullmatch(text)):
        degrees = int(match[1]) + Fraction(int(match[2]), 60) + Fraction(match[3] or 0) / 3600
        found = Quantity(degrees, units=units("°"))
    if found is None and (match := _SECOND.match(_without_text(text))):
        found = _sum(match["first"], match["second"])
    return found


def _sum(first: str, second: str) -> Quantity | None:
    """Adds a quantity and a smaller one with a smaller unit: 2 hours and 30 minutes."""
    large, small = _quantity(first.strip()), _quantity(second.strip())
    if large is None or small is None:
        return None
    for unit in large.units:
        for other in small.units:
            if unit.dimensions == other.dimensions != () and unit.factor > other.factor and not large.last_place:
                rest = small.value * other.factor / unit.factor
                return large._replace(value=large.value + rest, units=(unit,)) if 0 < rest < 1 else None
    return None


def _quantity(text: str) -> Quantity | None:
    text = _without_parentheses(text)
    if re.match(r"\\text ?\{ ?(?:[-+]|minus\b|negative\b)", text):
        text = _without_text(text)  # the sign is inside \text
    sign, money = 1, ""
    for _ in range(2):
        if (match := _SIGN.match(text)) and sign == 1:
            sign = -1 if (match["sign"] or match["word"].casefold()) in ("-", "negative", "minus") else 1
            signed = match.group()
            text = _without_parentheses(text[match.end() :])
            if signed.strip() in "+-" and _SIGN.match(text):
                return None
        if (match := _CURRENCY.match(text)) and not money:
            money = match.group().strip()
            text = text[match.end() :]
    if text[:2] == r"\t":
        text = _without_text(text)
    number, rest = _leading_number(text)
    if number is None:
        return _of_words(text, sign) if not money else None
    if rest[:5] == " and ":
        return _of_words(text, sign)
    rest, scaled = _scaled(number, rest)
    number = scaled._replace(value=sign * scaled.value)
    if rest[:1] == "_":
        return None
    return _with_unit(number, f"{money} {rest}" if money and rest.strip() else money or rest)


def _without_parentheses(text: str) -> str:
    while len(text) > 2 and text[0] in "({" and text[-1] in ")}":
        depths = itertools.accumulate((each in "({") - (each in ")}") for each in text)
        if "," in text or "\\{" in text or "\\}" in text or 0 in list(depths)[:-1]:
            break
        text = text[1:-1].strip()
    return text


def _without_text(text: str) -> str:
    return " ".join(re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", text).split())


def _leading_number(text: str) -> tuple[Quantity | None, str]:
    """The number at the start of a text, and the text after it."""
    if power := _BARE_POWER.match(text):
        value = _ten_to(power[1] or power[2])
        times = Fraction(power["times"] or 1)
        return (None, text) if value is None else (Quantity(times * value), text[power.end() :])
    if (part := _PART.match(text)) and (value := _part(int(part[1][:_MOST_DIGITS]), part[2])) is not None:
        return Quantity(value), text[part.end() :]
    match = _NUMBER.match(text)
    if not match or not match.group() or match.group() == "." or len(match.group()) > _MOST_DIGITS:
        return None, text
    number, rest = _read(match), text[match.end() :]
    if number is None or re.match(r"[\d(]|\.\d|\.\.|,\d|\\ldots|:\d", rest):
        return None, text
    if power := _POWER.match(rest):
        value = _ten_to(power[1] or power[2] or power[3])
        if value is None:
            return None, text
        last = None if number.last_place is None else number.last_place * value
        number, rest = number._replace(value=number.value * value, last_place=last), rest[power.end() :]
    return number, rest


def _read(match: re.Match) -> Quantity | None:
    found = match.groupdict()
    for mixed, over, under in (("mixed", "over", "under"), ("mixed2", "over2", "under2"), (None, "over3", "under3")):
        if found[under] is not None:
            whole = int(found[mixed]) if mixed and found[mixed] else 0
            below, above = (int(found[name].replace(",", "") or 0) for name in (under, over))
            return None if below == 0 or (whole and above * below < 0) else Quantity(whole + Fraction(above, below))
    whole, decimals = re.sub(r"\D", "", found["whole"] or ""), found["decimals"]
    repeated = found["bar"] or found["cycle"]
    if not whole and not decimals and not repeated:
        return None
    value = Fraction(int((whole or "0") + (decimals or "")), 10 ** len(decimals or ""))
    if repeated:
        shift = 10 ** len(decimals or "")
        return Quantity(value + Fraction(int(repeated), (10 ** len(repeated) - 1) * shift))
    if not decimals:
        return Quantity(value)
    return Quantity(value, Fraction(1, 10 ** len(decimals)), len((whole + decimals).lstrip("0")))


def _ten_to(power: str) -> Fraction | None:
    return Fraction(10) ** int(power) if len(power) < 6 and abs(int(power)) <= _LARGEST_POWER else None


def _part(count: int, name: str) -> Fraction | None:
    one = number_in_words(f"one {name.removesuffix('s')}" if not name.startswith("hal") else "one half")
    return None if one is None or count == 0 else count * one


def _scaled(number: Quantity, rest: str) -> tuple[str, Quantity]:
    if match := _SCALE.match(rest):
        factor = SCALES[match[1].casefold()] * (SCALES[match[2].casefold()] if match[2] else 1)
        last = None if number.last_place is None else number.last_place * factor
        return rest[match.end() :], number._replace(value=number.value * factor, last_place=last)
    return rest, number


def _of_words(text: str, sign: int) -> Quantity | None:
    """Reads a number in words, with or without a unit: five, two thirds, five apples, ten per cent."""
    said = _without_text(text).strip()
    if (value := number_in_words(said)) is not None:
        return Quantity(sign * value)
    if match := re.fullmatch(r"(\d{1,50}) and ((?:an? |one |two |three )\w+)", said):
        part = number_in_words(match[2])
        return Quantity(sign * (int(match[1]) + part)) if part and part < 1 else None
    words = said.split()
    for count in range(len(words) - 1, max(0, len(words) - 5), -1):
        if (value := number_in_words(" ".join(words[:count]))) is not None:
            return _with_unit(Quantity(sign * value), " " + " ".join(words[count:]))
    return None


def _with_unit(number: Quantity, rest: str) -> Quantity | None:
    """The number with the unit named by the rest of the text; None if the unit is unknown."""
    if not rest.strip():
        return number
    if rest[0] in "%":
        return number._replace(units=PERCENT) if not rest[1:].strip() else None
    named = named_unit(rest)
    if not named:
        return None
    if named[0].dimensions == (("percent", 1),):
        return number._replace(units=PERCENT)
    return number._replace(units=() if named == (NOTHING,) else named)


def named_unit(text: str, beside_a_number: bool = True) -> tuple[Unit, ...]:
    r"""The readings of a text after a number as a unit; empty if the text is not a known unit.

    A letter outside of \text is a unit only in a rate, or next to a number, after a space, and if in BARE_LETTERS.
    """
    said = re.sub(
        r"\\text ?\{ ?([nμmkMG]) ?\} ?(?=\\Omega)|\\mu ?(?=\\text|[A-Za-z])", lambda match: match[1] or "μ", text
    )
    said = _unit_fraction(said.replace(r"\Omega", "Ω").replace("μ\\text{", r"\text{μ"))
    bare = re.sub(r"\\text ?\{[^{}]*\}|\\cdot ?", "", said)
    for letters in re.findall(r"(?<![A-Za-zμ])[A-Za-z](?![A-Za-zΩ])", bare):
        rate = re.search(rf"/ ?{letters}|{letters} ?/", bare)
        if not (rate or (beside_a_number and letters in BARE_LETTERS and bare[:1] == " ")) and "°" not in bare:
            return ()
    if "\\" in bare:
        return ()
    return units(_without_text(said))


def _unit_fraction(text: str) -> str:
    r"""Rewrites \frac{\text{m}}{\text{s}} as \text{m}/\text{s}."""
    part = r"\{((?:\\text ?\{[^{}]*\}(?:\^\{?\d\}?)?|[A-Za-z ])+)\}"
    return re.sub(rf"\\frac{part}{part}", r"\1/\2", text)


def same(truth: Quantity, given: Quantity) -> bool:
    """True if a quantity equals the true one; see docs/rewards.md."""
    if truth.percent or given.percent:
        return _same_percent(truth, given)
    if not truth.units or not given.units:
        return same_number(truth, given)
    for unit in truth.units:
        for other in given.units:
            if unit.dimensions == other.dimensions and _same_in(truth, unit, given, other):
                return True
            if _is_plain_degree(unit, other) and same_number(truth, given):
                return True
    return False


def _is_plain_degree(unit: Unit, other: Unit) -> bool:
    """True if one unit is plain degrees and the other is degrees of temperature."""
    kinds = {unit.dimensions, other.dimensions}
    return kinds == {(("degree", 1),), (("temperature", 1),)}


def _same_in(truth: Quantity, unit: Unit, given: Quantity, other: Unit) -> bool:
    factor = other.factor / unit.factor
    value = (given.value + other.offset) * factor - unit.offset
    last = None if given.last_place is None else given.last_place * abs(factor)
    return same_number(truth, given._replace(value=value, last_place=last))


def _same_percent(truth: Quantity, given: Quantity) -> bool:
    if truth.percent and given.percent:
        return same_number(truth, given)
    if truth.units and given.units:
        return False
    if same_number(truth, given):
        return True
    hundredth = Fraction(1, 100)
    if truth.percent:
        return same_number(_times(truth, hundredth), given)
    return same_number(truth, _times(given, hundredth))


def _times(number: Quantity, factor: Fraction) -> Quantity:
    last = None if number.last_place is None else number.last_place * factor
    return number._replace(value=number.value * factor, last_place=last)


def same_number(truth: Quantity, given: Quantity) -> bool:
    """True for equal numbers or a rounding to six or more digits; docs/rewards.md says which side may be rounded."""
    difference = abs(truth.value - given.value)
    if difference == 0:
        return True
    if truth.last_place is not None and truth.value.denominator != 1:  # 510000.00 is a whole number
        finer = given.last_place is None or given.last_place < truth.last_place
        return truth.digits >= _EXACT_DIGITS and finer and difference <= truth.last_place / 2
    return not _terminates(truth.value) and is_rounding(given, truth.value)


def is_rounding(given: Quantity, value: Fraction) -> bool:
    """True if a decimal has six or more significant digits and is a correct rounding of the number."""
    if given.last_place is None or given.digits < _EXACT_DIGITS:
        return False
    return abs(given.value - value) <= max(given.last_place / 2, _NOISE * abs(value) if given.digits > 15 else 0)


def _terminates(value: Fraction) -> bool:
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    return below == 1
