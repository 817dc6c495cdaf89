"""Mathematical answers: where a completion gives one, and whether math-verify takes it for the true one.

An answer is read strictly, so that what is rewarded is an answer: of the text after the think block, and only where
it is marked as the answer; see `boxed` and `tagged`.
"""

import functools
import logging
import re
import unicodedata
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import math_verify
from sympy import Equality, Integer, Mul, Number, Pow, Rational, Symbol, UnevaluatedExpr
from sympy.core.function import AppliedUndef

from recjax.tasks.grading.braces import braced

_TAGGED = re.compile(
    r"\s*<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>[^<>]*[^<>\s][^<>]*</answer>\s*", re.S
)
_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.S)
_NUMBER = re.compile(r"[-+]?(\d{1,50}(\.\d{1,50})?|\.\d{1,50}|\d{1,50}/0*[1-9]\d{0,49})", re.A)
_HASHES = re.compile(r"^#### *(.+)$", re.M)

# math-verify warns once that its own time limits are off; those of the worker pool are on.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_EXTRACTION = (math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig())


def gsm8k(completion: str, answer: str, columns: Mapping[str, Any]) -> dict[str, float]:
    """accuracy: 1 where the marked answer is the true number, else 0.

    format: 1 where all is `<think>your reasoning</think> <answer>the number</answer>`, else −1.
    """
    accuracy = _is_right(tagged(completion), answer, finished=True)
    return {"accuracy": float(accuracy), "format": 1.0 if _TAGGED.fullmatch(completion) else -1.0}


def math(completion: str, answer: str, columns: Mapping[str, Any]) -> dict[str, float]:
    r"""accuracy: 1 where the last \boxed equals the true answer, else 0.

    Where that is a number, so must the box be: a number in any notation, but not a computation such as 2+3 or 5^2,
    by which a policy could repeat the question instead of answering it.
    """
    return {"accuracy": float(_is_right(boxed(completion), answer, finished=True))}


def guru_math(completion: str, answer: str, columns: Mapping[str, Any]) -> dict[str, float]:
    r"""accuracy: 1 where the last \boxed is symbolically equal to the true answer, computed to the end or not."""
    return {"accuracy": float(_is_right(boxed(completion), answer, finished=False))}


def parse_boxed(completion: str) -> str | None:
    r"""The last \boxed in one spelling; numbers of equal value are the same text."""
    return _spelling(boxed(completion))


def parse_tagged(completion: str) -> str | None:
    """The marked answer in one spelling; numbers of equal value are the same text."""
    return _spelling(tagged(completion))


def boxed(completion: str) -> str | None:
    r"""What the last \boxed{…} holds; None where there is none, or it is empty or never closed.

    The text up to `</think>` is no answer, nor is anything after a `<think>` that is never closed.
    """
    _, mark, rest = _after_thinking(completion).rpartition("\\boxed")
    return (braced(rest.lstrip()) or "").strip() or None if mark else None


def tagged(completion: str) -> str | None:
    r"""What the last `<answer>…</answer>` holds, without a \boxed around it; else the last \boxed, or line `#### …`."""
    text = _after_thinking(completion)
    answers = _ANSWER.findall(text)
    if answers:
        return boxed(answers[-1]) or answers[-1].strip() or None
    if "\\boxed" in text:
        return boxed(text)
    hashes = _HASHES.findall(text)
    return hashes[-1].strip() if hashes else None


def _after_thinking(completion: str) -> str:
    text = completion.rpartition("</think>")[2]
    return text.partition("<think>")[0]


def _spelling(given: str | None) -> str | None:
    if given is None:
        return None
    text = re.sub(r"\s", "", _plain(given)).replace("\\left", "").replace("\\right", "")
    text = re.sub(r"^[A-Za-z]=", "", text)
    number = re.sub(r"^(-?)\\frac\{(\d{1,50})\}\{(\d{1,50})\}$", r"\1\2/\3", text)
    number = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", number)
    return str(Fraction(number)) if _NUMBER.fullmatch(number) else text


# --- Whether an answer is right.

_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(rf"([-+]?\d[\d,]*(?:\.\d+)?)\s*(?:\\text\{{\s*)?({'|'.join(_SCALES)})\b\}}?", re.I)
# Words after a number that are no unit of it.
_NO_UNITS = set(
    "and are but by correct divided dozen equals half if incorrect is less minus more no nor not or over"
    " factorial pairs percent plus points score squared cubed than thirds times to true false wrong".split()
)
_WITH_UNIT = re.compile(
    r"([-+]?[$€£¥]?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+))\s*([A-Za-z]+(?:[ ./][A-Za-z]+){0,2})\.?(?:\^\{?\d\}?)?"
)
_SEPARATED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,;: ]|[ ~\u00a0\u2009\u202f])\d{3})+(?!\d)")
_SUBSCRIPT = re.compile(r"_\{?(\d+)\}?$")
_RELATIONS = re.compile(r"\\(?:neq?|not|geq?|leq?|gt|lt)(?![A-Za-z])")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


def _is_right(given: str | None, answer: str, finished: bool) -> bool:
    """Whether an answer equals the true one.

    Args:
        finished: where the true answer is a number, only a number will do.
    """
    gold, given = _plain(boxed(answer) or answer), _plain(given or "")
    if not given:
        return False
    if re.fullmatch(r"(?=.*[A-Za-z]{4})[A-Za-z]+(?: [A-Za-z]+)*", _words(gold)):
        # math-verify takes letters for factors, of which the order is free.
        return _words(given) == _words(gold)
    bases = [match.group(1) for match in map(_SUBSCRIPT.search, (gold, given)) if match]
    if len(bases) == 2 and bases[0] != bases[1]:
        return False
    # math-verify takes the set {1, 2} and the pair or interval (1, 2) for the same.
    if (gold[:2] == "\\{" and given[0] in "([") or (given[:2] == "\\{" and gold[0] in "(["):
        return False
    if _RELATIONS.match(given) and not _RELATIONS.match(gold):
        return False
    parsed_gold, parsed = _parsed(gold), _parsed(given)
    if not parsed_gold or not parsed:
        return False
    if _is_number(parsed_gold[0]):
        parsed = _parsed(_without_unit(given))
        if isinstance(parsed[0], Equality):
            if not isinstance(parsed[0].lhs, Symbol | AppliedUndef):
                return False
            parsed = [parsed[0].rhs]
        if finished and not _is_number(parsed[0]):
            return False
    return math_verify.verify(parsed_gold, parsed, allow_set_relation_comp=True, timeout_seconds=None)


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> list:
    return math_verify.parse(f"\\boxed{{{text}}}", _EXTRACTION, parsing_timeout=None)


def _is_number(parsed: Any) -> bool:
    """A number as it is written down: digits, a fraction, a percentage, a power of ten or a multiple of one."""
    match parsed:
        case Mul(args=factors):
            powers = any(isinstance(factor, UnevaluatedExpr | Pow) for factor in factors)
            return powers and all(map(_is_number, factors))
        case UnevaluatedExpr(args=(inner,)):
            return inner == Rational(1, 100)
        case Pow(base=base, exp=exponent):
            return base == 10 and isinstance(exponent, Integer)
        case Symbol(name=name):
            return bool(re.fullmatch(r"-?\d+(\.\d+)?", name))
    return isinstance(parsed, Number)


def _plain(text: str) -> str:
    """An answer without what changes nothing, and with notations that math-verify does not know in one that it does."""
    text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    text = text.replace("−", "-").replace("\\varnothing", "\\emptyset").replace("\\dfrac", "\\frac")
    text = re.sub(r"[¼-¾⅐-⅞]", lambda match: _vulgar(match.group()), text)
    text = re.sub(r"[⁰¹²³⁴-⁹⁻]+", lambda match: f"^{{{match.group().translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub(r"√\s*(\w|\d+|\([^()]*\))", r"\\sqrt{\1}", text)
    text = re.sub(r"^[\s*$]+|[\s*$.]+$|\\+$", "", re.sub(r"^\\[\[(]|\\[\])]$", "", text.strip()))
    text = re.sub(r"^\{([^{}]*)\}$", r"\1", text)
    text = re.sub(r"^\\(?:text|mathrm|underline)\{([^{}]*\d[^{}]*)\}$", r"\1", text).strip()
    text = _SEPARATED.sub(lambda match: re.sub(r"\D", "", match.group()), text)
    text = re.sub(r"(?<=\d)[eE]([-+]?\d+)(?![\d.])", lambda match: f"\\times 10^{{{int(match.group(1))}}}", text)
    text = re.sub(r"^([-+]?\d+)(?:\s|\\ )+(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(?<=\d)i\b", " i", text)
    text = re.sub(r"(\d*)\.(\d*)\\overline\{(\d+)\}", _repeating, text)
    return _SCALED.sub(_scaled, text)


def _vulgar(character: str) -> str:
    over, _, under = unicodedata.normalize("NFKD", character).partition("⁄")
    return f"\\frac{{{over}}}{{{under}}}"


def _repeating(match: re.Match) -> str:
    """0.1\\overline{6} as a fraction."""
    whole, fixed, repeated = (group or "" for group in match.groups())
    nines = 10 ** len(fixed) * (10 ** len(repeated) - 1)
    over = int((whole or "0") + fixed + repeated) - int((whole or "0") + fixed)
    return f"\\frac{{{over}}}{{{nines}}}"


def _scaled(match: re.Match) -> str:
    """5 million as digits."""
    value = Fraction(match.group(1).replace(",", "")) * 10 ** _SCALES[match.group(2).lower()]
    return str(value.numerator) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _words(text: str) -> str:
    text = re.sub(r"\\(?:text|textbf|textit|mathrm|mbox)\{([^{}]*)\}", r"\1", text)
    return " ".join(re.sub(r"\\ |~", " ", text).casefold().strip(" .").split())


def _without_unit(text: str) -> str:
    """A number without the plain words after it, where they may be its unit."""
    match = _WITH_UNIT.fullmatch(text)
    if match and not _NO_UNITS & set(re.split(r"[ ./]", match.group(2).casefold())):
        return match.group(1)
    return text


# Workers are forked from a process that has imported this module; what the first answer sets up, they need not.
_is_right(r"\frac{1}{2}", "0.5", finished=True)
