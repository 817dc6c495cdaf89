"""Answers that are more than numbers, by math-verify: expressions, equations, inequalities, regions.

What is handed over is checked first, because the library takes letters for factors, drops the words that it takes for
units, and compares to six decimals whatever the size of a number.
"""

import functools
import logging
import re
from fractions import Fraction
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig

from recjax.tasks.grading.notation import plain
from recjax.tasks.grading.quantities import Quantity, is_rounding, named_unit
from recjax.tasks.grading.units import NOTHING, Unit

# math-verify warns once that its own time limits are off; those of the worker pool are on.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_NORMAL = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False
)
_EXTRACTION = (math_verify.LatexExtractionConfig(boxed_match_priority=0, normalization_config=_NORMAL),)
_FUNCTIONS = set(
    "sin cos tan sec csc cot arcsin arccos arctan sinh cosh tanh exp log ln lg"
    " max min gcd lcm mod det deg dim ker lim".split()
)
_OF_AN_ANGLE = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot)(?![a-z])")
_CIRCLE = (("angle", 1),)
_OR = re.compile(r" ?(?:\\text ?\{ ?or ?\}|\bor\b|\\vee|\\lor) ?")


def same(truth: str, given: str, number: Quantity | None) -> bool:
    """Whether an answer equals the true one, both in the notation of `notation.plain`.

    Args:
        number: the answer, where it is a number.
    """
    (wanted, unit), (said, other) = _without_unit(truth), _without_unit(given)
    if number is not None and number.units and not number.percent:
        return _degrees(truth, number)
    factor = _conversion(unit, other)
    if factor is None or not _letters_fit(wanted, said):
        return False
    parsed_wanted, parsed_said = _region(wanted), _region(said)
    if parsed_wanted is None or parsed_said is None:
        return False
    if factor != 1:
        parsed_said = sympy.Rational(factor.numerator, factor.denominator) * parsed_said
    if number is not None and number.last_place is not None and _is_constant(parsed_wanted):
        return _is_decimal_of(number, parsed_wanted)
    if not math_verify.verify(parsed_wanted, parsed_said, allow_set_relation_comp=True, timeout_seconds=None):
        return False
    return _are_near(parsed_wanted, parsed_said)


def same_angle(degrees: str, given: str) -> bool:
    r"""Whether an answer in radians, such as \frac{\pi}{2}, is so many degrees."""
    said, unit = _without_unit(given)
    if r"\pi" not in said or (unit and unit[0].dimensions != (("radian", 1),)) or not _letters_fit("", said):
        return False
    return _equal_angle(re.sub(r"°|\\text ?\{[^{}]*\}|[a-z ]+$", "", degrees).strip(), said)


def _equal_angle(degrees: str, radians: str) -> bool:
    wanted, said = _parsed(degrees), _parsed(radians)
    if not isinstance(wanted, sympy.Expr) or not isinstance(said, sympy.Expr) or said.free_symbols:
        return False
    return bool(sympy.simplify(wanted * sympy.pi / 180 - said) == 0)


def _degrees(truth: str, number: Quantity) -> bool:
    """Whether so many degrees are the truth, an angle in radians; other units are beside numbers alone."""
    if r"\pi" not in truth or all(unit.dimensions != _CIRCLE for unit in number.units):
        return False
    said, unit = _without_unit(truth)
    if unit and unit[0].dimensions != (("radian", 1),):
        return False
    return _equal_angle(f"\\frac{{{number.value.numerator}}}{{{number.value.denominator}}}", said)


def _without_unit(text: str) -> tuple[str, tuple[Unit, ...]]:
    """An expression and the unit that it ends with."""
    for match in re.finditer(r"(?<=[\w)}]) ?(?=\\text)|(?<=[\w)}]) (?=[a-z])|(?=°)", text):
        core, rest = text[: match.start()].strip(), text[match.end() :]
        if rest[:1] == "°" and _OF_AN_ANGLE.search(core):
            continue
        if core and core.count("{") == core.count("}") and (unit := named_unit(rest, beside_a_number=False)):
            return core, () if unit == (NOTHING,) else unit
    return text, ()


def _conversion(wanted: tuple[Unit, ...], said: tuple[Unit, ...]) -> Fraction | None:
    """What the answer's number is to be multiplied by; None where its unit is another one."""
    if not wanted or not said:
        # An expression in degrees is not one in radians.
        return Fraction(1)
    factors = (other.factor / unit.factor for unit in wanted for other in said if unit.dimensions == other.dimensions)
    return next(factors, None)


def _letters_fit(truth: str, given: str) -> bool:
    """Whether an answer has no words, and no digits after letters, that the truth does not have."""
    truth, given = (_OR.sub(" ", text) for text in (truth, given))
    if any(word not in truth for word in re.findall(r"\\text ?\{[^{}]*\}", given)):
        return False
    truth, given = (re.sub(r"\\(?:[A-Za-z]+|.)|_\{?\w+\}?", " ", text) for text in (truth, given))
    allowed = _FUNCTIONS | {*re.findall(r"[A-Za-z]{2,}", truth)}
    words = [word for word in re.findall(r"[A-Za-z]{2,}", given) if word not in allowed]
    # Two letters or so are a product, where the truth has these letters; more are a word.
    if any(len(word) > 3 or not set(word) <= set(truth) for word in words):
        return False
    letters, usual = ({*re.findall(r"[A-Za-z]", text)} for text in (given, truth))
    if any(letter.swapcase() in usual for letter in letters - usual):
        return False  # math-verify takes x and X for one
    return not re.search(r"[A-Za-z]\d", given) or bool(re.search(r"[A-Za-z]\d", truth))


def _region(text: str) -> Any:
    """A text as math-verify reads it; inequalities with "or" between them as the union of their solutions."""
    parts = _OR.split(text)
    if len(parts) == 1:
        return _parsed(text)
    sets = []
    for part in parts:
        parsed = _parsed(part)
        try:
            sets.append(parsed.as_set())
        except (AttributeError, NotImplementedError, TypeError, ValueError):
            return None
    return sympy.Union(*sets)


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> Any:
    text = re.sub(r"(\d+(?:\.\d+)?) ?°", r"{\\frac{\1\\pi}{180}}", text)
    found = math_verify.parse(f"\\boxed{{{text}}}", _EXTRACTION, fallback_mode="no_fallback", parsing_timeout=None)
    parsed = found[0] if found else None
    if not isinstance(parsed, sympy.Basic | sympy.MatrixBase):
        return None
    exact = {number: sympy.Rational(str(number)) for number in parsed.atoms(sympy.Float)}
    exact |= {symbol: sympy.I for symbol in parsed.free_symbols if symbol.name == "i"}
    return parsed.xreplace(exact) if exact else parsed


def _is_constant(parsed: Any) -> bool:
    return isinstance(parsed, sympy.Expr) and not parsed.free_symbols


def _is_decimal_of(number: Quantity, parsed: Any) -> bool:
    value = parsed.doit().evalf(40)
    return bool(value.is_real) and value.is_finite and is_rounding(number, Fraction(str(value)))


def _are_near(wanted: Any, said: Any) -> bool:
    """False where numbers were found equal only because both are small."""
    if not (_is_constant(wanted) and _is_constant(said)):
        return True
    try:
        a, b = (complex(each.doit().evalf(30)) for each in (wanted, said))
    except (TypeError, ValueError, OverflowError):
        return True
    return abs(a - b) <= 1e-9 * max(abs(a), abs(b))


# Workers are forked from a process that has imported this module; what the first answer sets up, they need not.
same(r"\frac{1}{2}x", plain("0.5x"), None)
