"""Comparison of choices, words, times of day, congruences, and digits in a named base, mostly as written.

Each function returns True or False, or None if the function does not read this kind of truth.
"""

import re

from recjax.grading.notation import split_outside_brackets, squeezed, words_of
from recjax.grading.quantities import quantity, same_quantity

_CHOICE = re.compile(
    r"(?:(?:option|choice|answer):? ?)?(?P<text>\\text ?\{ ?)?"
    r"(?:\((?P<held>[A-Za-z])\)|(?P<bare>[A-Z])(?:(?(text)\.?|(?P<half>\))?)))(?(text) ?\})",
    re.I,
)
_CLOCK = re.compile(r"(?:\\text ?\{)? ?(\d{1,2})(?::(\d\d))? ?(?:\\text ?\{)? ?(?:([ap])\.? ?m\b\.?)? ?\}?", re.I)
_SHORT_WORDS = set("no on so is if or to up us we he me my by go at an as be do in it of hi ok".split())
_SUBSCRIPT = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{?\(?(\d+)\)?\}?")
_BASE = re.compile(
    r"\(?(?P<digits>[0-9A-Fa-f]+)\)? ?(?:_ ?\{? ?\(?(?:base[ -]*)?|[,~(]* ?(?:in )?base[ -]*)(?P<base>\w+)[ )}]*"
)
_CIRCLED_ZERO = 0x245F
_STATEMENTS = re.compile("[\u2460-\u2473]+")
TEXT = re.compile(r"\\text ?\{ ?([^{}]*?) ?\}")
_CONGRUENCE = re.compile(
    r"(?:(?P<name>[^=,]*?) ?\\equiv ?)?(?P<values>[-\d, ]+?) ?\(?\\pmod ?\{?(?P<modulus>\d+)\}?\)?", re.A
)
_PROGRESSION = re.compile(
    r"(?:(?P<name>[^=,]*?) ?= ?)?"
    r"(?:(?P<modulus>\d+)[klmnt](?: ?(?P<last>[-+] ?\d+))?|(?P<first>-?\d+) ?\+ ?(?P<step>\d+)[klmnt])"
)
_LETTERS = re.compile(r"\(?([A-J])\)?(?:(?: ?[,;] ?(?:and )?| and | )?\(?([A-J])\)?)+")
_ISO_DATE = re.compile(r"^(\d{4})-(\d\d)-(\d\d)$")
_MONTHS = {f"{n:02}": name for n, name in enumerate("jan feb mar apr may jun jul aug sep oct nov dec".split(), 1)}
_ELEMENTS = """
H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb Mo Tc
Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi
Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts Og
"""
_ATOM = "|".join(sorted(_ELEMENTS.split(), key=len, reverse=True))
_FORMULA = re.compile(rf"(?:(?:{_ATOM}|[(\[](?:(?:{_ATOM})\d*)+[)\]])\d*)+(?:\^\d*[+-])?")
_CASED = re.compile(r"[^A-Za-z]|[A-Z].*[A-Z].*[a-z]|[a-z].*[A-Z]")
_MONTH = re.compile(r"\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b", re.I)


def decided(truth: str, answer: str) -> bool | None:
    """True if an answer matches a choice, time, formula, word, congruence or based digits; None for other truths."""
    kinds = (_as_choices, _as_statements, _as_clock, _as_formula, _as_words, _as_congruence)
    if (verdict := next((verdict for kind in kinds if (verdict := kind(truth, answer)) is not None), None)) is not None:
        return verdict
    # Digits with a base, as written; base 10 also equals a plain number.
    wanted = _SUBSCRIPT.fullmatch(_with_subscript(truth))
    got = _SUBSCRIPT.fullmatch(_with_subscript(answer))
    if wanted:
        digits = got[1] if got else answer
        return digits.casefold() == wanted[1].casefold() and (not got or int(got[2]) == int(wanted[2]))
    return int(got[2]) == 10 and _is_number(truth, got[1]) if got and quantity(truth) else None


def _with_subscript(text: str) -> str:
    """Digits with a base in words, such as "1011 base 2" or 1011_{five}, as digits with a subscript."""
    match = _BASE.fullmatch(TEXT.sub(r" \1 ", text))
    base = quantity(match["base"]) if match else None
    return f"{match['digits']}_{{{base.value}}}" if match and base else text


def _as_statements(truth: str, answer: str) -> bool | None:
    """Compares numbers of statements, such as ①③ or (1)(3), without order; an answer may also be 1, 3."""
    flat = [re.sub(r"\\text|[{}\s,;]|\band\b|[和与]", "", text) for text in (truth, answer)]
    wanted, got = (re.sub(r"\((\d)\)", lambda digit: chr(_CIRCLED_ZERO + int(digit[1])), text) for text in flat)
    if not _STATEMENTS.fullmatch(wanted) or (len(wanted) == 1 and flat[0] != wanted):
        return None
    if re.fullmatch(r"\d(?: ?[,;] ?\d)*", answer):
        got = "".join(chr(_CIRCLED_ZERO + int(digit)) for digit in flat[1])
    return sorted({*wanted}) == sorted({*got})


def _as_choices(truth: str, answer: str) -> bool | None:
    """Compares one choice, or several: A,C or AC or "A and C".

    Returns None for several if both sides join letters, which may then name points.
    """
    if (wanted := _CHOICE.fullmatch(truth)) and _letter(wanted):
        if got := _CHOICE.fullmatch(answer) or _CHOICE.fullmatch(TEXT.sub(r"\1", answer)):
            letters = [_letter(wanted), _letter(got)]
            return letters[0] == letters[1] or bool(wanted["held"] and letters[0].casefold() == letters[1].casefold())
        if wanted["held"] or not re.search(r"[=\\+\-*/^\d]", answer):
            return False
    wanted, got = (re.sub(r" +", " ", TEXT.sub(r" \1 ", text)).strip() for text in (truth, answer))
    if re.fullmatch("[A-Z]( [A-Z])+", wanted) and re.fullmatch("[A-Z]( [A-Z])+", got):
        return wanted == got  # a product, or words of one letter
    if (wanted.isalpha() and got.isalpha()) or not (_LETTERS.fullmatch(wanted) and _LETTERS.fullmatch(got)):
        return None
    letters = [sorted(re.findall("[A-J]", text)) for text in (wanted, got)]
    return letters[0] == letters[1]


def _as_congruence(truth: str, answer: str) -> bool | None:
    """Compares congruences such as 3 (mod 7), named or not; one side may omit the modulus of a single number."""
    truth, answer = (re.sub(r"\\pm ?(\d+)", r"\1,-\1", text) for text in (truth, answer))
    if r"\pmod" in truth or r"\pmod" in answer:  # n=3k+1 is 1 (mod 3)
        truth, answer = map(_as_residue, (truth, answer))
    wanted = _CONGRUENCE.fullmatch(truth)
    got = _CONGRUENCE.fullmatch(answer)
    if not wanted and not (got and quantity(truth) and not got["name"]):
        return None
    if not wanted:
        assert got is not None
        return _is_number(truth, got["values"])
    if not got:
        return _is_number(wanted["values"], answer)
    modulus = int(got["modulus"])
    if modulus != int(wanted["modulus"]) or not modulus:
        return False
    if got["name"] and wanted["name"] and squeezed(got["name"]) != squeezed(wanted["name"]):
        return False
    residues = [[quantity(value) for value in split_outside_brackets(match["values"])] for match in (wanted, got)]
    if None in residues[0] + residues[1]:
        return False
    classes = [{number.value % modulus for number in each if number is not None} for each in residues]
    return classes[0] == classes[1]


def _as_residue(text: str) -> str:
    """The congruence that a progression such as n=3k+1 states; other texts unchanged."""
    match = _PROGRESSION.fullmatch(text)
    if match is None:
        return text
    name = rf"{match['name']}\equiv " if match["name"] else ""
    residue = (match["first"] or match["last"] or "0").replace("+", "").replace(" ", "")
    return rf"{name}{residue} \pmod{{{match['step'] or match['modulus']}}}"


def _letter(match: re.Match) -> str:
    # The pattern ignores case because it contains words, but a lowercase letter without parentheses is a variable.
    return match["held"] or (match["bare"] if match["bare"].isupper() or match["half"] else "")


def _as_clock(truth: str, answer: str) -> bool | None:
    wanted = _CLOCK.fullmatch(truth)
    got = _CLOCK.fullmatch(answer)
    if not wanted or not (wanted[2] or wanted[3]) or int(wanted[2] or 0) > 59 or int(wanted[1]) > 24:
        return None
    if not got or not (got[2] or got[3]):
        return False if wanted[3] else None
    if wanted[3] and got[3] and wanted[3].casefold() != got[3].casefold():
        return False
    return (wanted[2] or "00") == (got[2] or "00") and (
        int(wanted[1]) == int(got[1]) or bool(_hours(wanted) & _hours(got))
    )


def _hours(clock: re.Match) -> set[int]:
    """The hour from 0 to 23 of a time with am or pm, or of an hour above 12; empty for an ambiguous time."""
    hour = int(clock[1])
    if clock[3] and 0 < hour < 13:
        return {hour % 12 + 12 * (clock[3].casefold() == "p")}
    return {hour} if hour > 12 else set()


def _as_words(truth: str, answer: str) -> bool | None:
    marked = r"\text" in truth
    bare = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", truth).strip()
    fields = _date(bare)
    months = [field for field in fields if _MONTH.fullmatch(field)]
    numbers = [field for field in fields if field.isdigit()]
    if len(months) == 1 and len(numbers) in (1, 2) and len(fields) == 1 + len(numbers):  # 4 July 2020
        return _date(answer) == fields
    is_foreign = not bare.isascii()  # letters of other scripts and letters with accents are no unknowns
    pattern = r"[^\W\d_][\w ,.'/&-]*" if marked or is_foreign else r"[A-Za-z][A-Za-z ,.'-]*"
    if not re.fullmatch(pattern, bare) or quantity(truth) is not None:
        return None
    words = re.findall(r"[A-Za-z]+", bare)
    if not marked and not is_foreign:
        longest = max(map(len, words))
        if longest < 2 or (len(words) > 1 and longest < 3 and re.search("[,-]", bare)):
            return None
        if len(words) == 1 and ((longest == 2 and bare.casefold() not in _SHORT_WORDS) or set(bare) <= set("uvwxyz")):
            return None
        if len(words) == 1 and not re.search(r"[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+", "", answer)):
            return None  # abc may be the product a·b·c, but cat is not act
    if re.search(r"\band\b(?! then\b)", bare):  # Alice and Bob
        listed = [sorted(re.split(r",? and |, ", words_of(text))) for text in (answer, truth)]
        return listed[0] == listed[1]
    return words_of(answer) == words_of(truth)


def _date(text: str) -> list[str]:
    """The parts of a date in any order: 4 July 2020, July 4th, 2020, and 2020-07-04 are equal."""
    words = _ISO_DATE.sub(lambda date: f"{date[1]} {_MONTHS.get(date[2])} {date[3]}", words_of(text))
    fields = re.findall(r"\d+|[a-z]+|[^ ,.]", re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|\b(?:of|the)\b", "", words))
    return sorted(field[:3] if _MONTH.fullmatch(field) else field.lstrip("0") for field in fields)


def _as_formula(truth: str, answer: str) -> bool | None:
    r"""Compares chemical formulas, which keep case and order, if one side is upright: \text{CO}_2 is CO_2."""
    wanted, got = (re.sub(r"\\text ?|[{}_ ]|\\(?=[+-])", "", text) for text in (truth, answer))
    if not (_FORMULA.fullmatch(wanted) and (r"\text" in truth or r"\text" in answer)):
        return None
    is_short = len(wanted) == 2 and wanted.casefold() not in _SHORT_WORDS
    # HCl, CO2 and Co are no words, but NO and Yes are words in any case.
    return wanted == got if is_short or any(map(_CASED.search, (wanted, got))) else None


def _is_number(truth: str, answer: str) -> bool:
    wanted = quantity(truth)
    got = quantity(answer)
    return wanted is not None and got is not None and same_quantity(wanted, got)
