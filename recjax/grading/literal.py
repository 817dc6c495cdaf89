"""Comparison of choices, words, times of day, congruences, and digits in a named base, mostly as written.

Each function returns True or False, or None if the function does not read this kind of truth.
"""

import re
from fractions import Fraction

from recjax.grading.notation import lowercase_words, split_outside_brackets, squeezed
from recjax.grading.quantities import quantity, same_quantity

_CHOICE = re.compile(
    r"(?:(?:option|choice|answer):? ?)?(?P<text>\\text ?\{ ?)?"
    r"(?:\((?P<held>[A-Za-z])\)|(?P<bare>[A-Z])(?:(?(text)\.?|(?P<half>\))?)))(?(text) ?\})",
    re.I,
)
_CLOCK = re.compile(
    r"(?:\\text ?\{)? ?(?P<hour>\d{1,2})(?::(?P<minute>\d\d))? ?"
    r"(?:\\text ?\{)? ?(?:(?P<half>[ap])\.? ?m\b\.?)? ?\}?",
    re.I,
)
_SHORT_WORDS = set("no on so is if or to up us we he me my by go at an as be do in it of hi ok".split())
_SUBSCRIPT = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{?\(?(\d+)\)?\}?")
_BASE = re.compile(
    r"\(?(?P<digits>[0-9A-Fa-f]+)\)? ?(?:_ ?\{? ?\(?(?:base[ -]*)?|[,~(]* ?(?:in )?base[ -]*)(?P<base>\w+)[ )}]*"
)
_CIRCLED_ZERO = 0x245F
_SEPARATORS = re.compile(r"\\text|[{}\s,;]|\band\b|[和与]")
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
_FORMULA_MARKUP = re.compile(r"\\text ?|[{}_ ]|\\(?=[+-])")
_CASED = re.compile(r"[^A-Za-z]|[A-Z].*[A-Z].*[a-z]|[a-z].*[A-Z]")
_MONTH = re.compile(r"\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b", re.I)


def decided(truth: str, answer: str) -> bool | None:
    """True if an answer matches a choice, time, formula, word, congruence or based digits; None for other truths."""
    for compare in (_as_choices, _as_statements, _as_clock, _as_formula, _as_words, _as_congruence):
        verdict = compare(truth, answer)
        if verdict is not None:
            return verdict
    return _as_based_digits(truth, answer)


def _as_based_digits(truth: str, answer: str) -> bool | None:
    """Compares digits with a base as they are written; digits in base 10 also equal a plain number."""
    wanted = _SUBSCRIPT.fullmatch(_with_subscript(truth))
    got = _SUBSCRIPT.fullmatch(_with_subscript(answer))
    if wanted and got:
        return got[1].casefold() == wanted[1].casefold() and int(got[2]) == int(wanted[2])
    if wanted:
        return answer.casefold() == wanted[1].casefold()
    if got and quantity(truth):
        return int(got[2]) == 10 and _is_number(truth, got[1])
    return None


def _with_subscript(text: str) -> str:
    """Digits with a base in words, such as "1011 base 2" or 1011_{five}, as digits with a subscript."""
    match = _BASE.fullmatch(TEXT.sub(r" \1 ", text))
    if not match:
        return text
    base = quantity(match["base"])
    if not base:
        return text
    return f"{match['digits']}_{{{base.value}}}"


def _as_statements(truth: str, answer: str) -> bool | None:
    """Compares numbers of statements, such as ①③ or (1)(3), without order; an answer may also be 1, 3."""
    joined_truth = _SEPARATORS.sub("", truth)
    joined_answer = _SEPARATORS.sub("", answer)
    wanted = _with_circles(joined_truth)
    got = _with_circles(joined_answer)
    if not _STATEMENTS.fullmatch(wanted):
        return None
    if len(wanted) == 1 and wanted != joined_truth:
        return None  # The truth (1) may be a number in parentheses.
    if re.fullmatch(r"\d(?: ?[,;] ?\d)*", answer):
        got = "".join(chr(_CIRCLED_ZERO + int(digit)) for digit in joined_answer)
    return set(wanted) == set(got)


def _with_circles(text: str) -> str:
    """Writes digits in parentheses, such as (1), as circled digits, such as ①."""
    return re.sub(r"\((\d)\)", lambda digit: chr(_CIRCLED_ZERO + int(digit[1])), text)


def _as_choices(truth: str, answer: str) -> bool | None:
    """Compares one choice, or several: A,C or AC or "A and C".

    Returns None for several if both sides join letters, which may then name points.
    """
    choice = _CHOICE.fullmatch(truth)
    if choice and _letter(choice):
        given = _CHOICE.fullmatch(answer)
        if not given:
            given = _CHOICE.fullmatch(TEXT.sub(r"\1", answer))
        if given:
            wanted_letter = _letter(choice)
            given_letter = _letter(given)
            if choice["held"]:
                return wanted_letter.casefold() == given_letter.casefold()
            return wanted_letter == given_letter
        if choice["held"] or not re.search(r"[=\\+\-*/^\d]", answer):
            return False
    wanted = _without_text_marks(truth)
    got = _without_text_marks(answer)
    if re.fullmatch("[A-Z]( [A-Z])+", wanted) and re.fullmatch("[A-Z]( [A-Z])+", got):
        return wanted == got  # The letters are a product, or words of one letter.
    if wanted.isalpha() and got.isalpha():
        return None
    if not _LETTERS.fullmatch(wanted) or not _LETTERS.fullmatch(got):
        return None
    return sorted(re.findall("[A-J]", wanted)) == sorted(re.findall("[A-J]", got))


def _without_text_marks(text: str) -> str:
    """Removes \\text around words, and repeated spaces."""
    return re.sub(r" +", " ", TEXT.sub(r" \1 ", text)).strip()


def _as_congruence(truth: str, answer: str) -> bool | None:
    """Compares congruences such as 3 (mod 7), named or not; one side may omit the modulus of a single number."""
    truth = re.sub(r"\\pm ?(\d+)", r"\1,-\1", truth)
    answer = re.sub(r"\\pm ?(\d+)", r"\1,-\1", answer)
    if r"\pmod" in truth or r"\pmod" in answer:  # n=3k+1 is 1 (mod 3)
        truth = _as_residue(truth)
        answer = _as_residue(answer)
    wanted = _CONGRUENCE.fullmatch(truth)
    got = _CONGRUENCE.fullmatch(answer)
    if not wanted:
        if got and quantity(truth) and not got["name"]:
            return _is_number(truth, got["values"])
        return None
    if not got:
        return _is_number(wanted["values"], answer)
    modulus = int(got["modulus"])
    if modulus != int(wanted["modulus"]) or not modulus:
        return False
    if got["name"] and wanted["name"] and squeezed(got["name"]) != squeezed(wanted["name"]):
        return False
    wanted_residues = _residues(wanted["values"], modulus)
    got_residues = _residues(got["values"], modulus)
    if wanted_residues is None or got_residues is None:
        return False
    return wanted_residues == got_residues


def _residues(values: str, modulus: int) -> set[Fraction] | None:
    """The listed values modulo a number, or None if one of them is no number."""
    residues = set()
    for value in split_outside_brackets(values):
        number = quantity(value)
        if number is None:
            return None
        residues.add(number.value % modulus)
    return residues


def _as_residue(text: str) -> str:
    """The congruence that a progression such as n=3k+1 states; other texts unchanged."""
    match = _PROGRESSION.fullmatch(text)
    if match is None:
        return text
    name = ""
    if match["name"]:
        name = rf"{match['name']}\equiv "
    residue = match["first"] or match["last"] or "0"
    residue = residue.replace("+", "").replace(" ", "")
    modulus = match["step"] or match["modulus"]
    return rf"{name}{residue} \pmod{{{modulus}}}"


def _letter(match: re.Match) -> str:
    if match["held"]:
        return match["held"]
    # The pattern ignores case because it contains words, but a lowercase letter without parentheses is a variable.
    if match["bare"].isupper() or match["half"]:
        return match["bare"]
    return ""


def _as_clock(truth: str, answer: str) -> bool | None:
    """Compares times such as 3:30 and 3 p.m.; a time without am or pm may be before or after noon."""
    wanted = _CLOCK.fullmatch(truth)
    got = _CLOCK.fullmatch(answer)
    if not wanted or not _is_time(wanted):
        return None
    wanted_minute = wanted["minute"] or "00"
    if int(wanted_minute) > 59 or int(wanted["hour"]) > 24:
        return None
    if not got or not _is_time(got):
        return False if wanted["half"] else None
    if wanted["half"] and got["half"] and wanted["half"].casefold() != got["half"].casefold():
        return False
    if wanted_minute != (got["minute"] or "00"):
        return False
    if int(wanted["hour"]) == int(got["hour"]):
        return True
    wanted_hour = _certain_hour(wanted)
    return wanted_hour is not None and wanted_hour == _certain_hour(got)


def _is_time(clock: re.Match) -> bool:
    """True if an hour has minutes, am or pm; otherwise it may be any number."""
    return bool(clock["minute"] or clock["half"])


def _certain_hour(clock: re.Match) -> int | None:
    """The hour from 0 to 24 of a time with am or pm, or of an hour above 12; None for an ambiguous time."""
    hour = int(clock["hour"])
    if clock["half"] and 0 < hour < 13:
        is_afternoon = clock["half"].casefold() == "p"
        return hour % 12 + 12 * is_afternoon
    if hour > 12:
        return hour
    return None


def _as_words(truth: str, answer: str) -> bool | None:
    """Compares dates, names and other words; None if the truth may be a formula of letters."""
    marked = r"\text" in truth
    bare = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", truth).strip()
    fields = _date(bare)
    months = [field for field in fields if _MONTH.fullmatch(field)]
    numbers = [field for field in fields if field.isdigit()]
    if (
        len(months) == 1 and len(numbers) in (1, 2) and len(fields) == 1 + len(numbers)
    ):  # The truth is a date, such as 4 July 2020.
        return _date(answer) == fields
    is_certain = marked or not bare.isascii()  # Letters with accents or of other scripts are no unknowns.
    pattern = r"[^\W\d_][\w ,.'/&-]*" if is_certain else r"[A-Za-z][A-Za-z ,.'-]*"
    if not re.fullmatch(pattern, bare) or quantity(truth) is not None:
        return None
    if not is_certain and _may_be_a_product(bare, answer):
        return None
    if re.search(r"\band\b(?! then\b)", bare):  # The truth is a list, such as Alice and Bob.
        return _listed_words(answer) == _listed_words(truth)
    return lowercase_words(answer) == lowercase_words(truth)


def _may_be_a_product(letters: str, answer: str) -> bool:
    """True if words may be products of unknowns: abc may be a·b·c. But cat, for which an answer has act, is a word."""
    words = re.findall(r"[A-Za-z]+", letters)
    longest = max(map(len, words))
    if longest < 2:
        return True
    if len(words) > 1:
        return longest < 3 and bool(re.search("[,-]", letters))
    if longest == 2 and letters.casefold() not in _SHORT_WORDS:
        return True
    if set(letters) <= set("uvwxyz"):
        return True
    answer_without_commands = re.sub(r"\\[A-Za-z]+", "", answer)
    return not re.search(r"[A-Za-z]{2}", answer_without_commands)


def _listed_words(text: str) -> list[str]:
    """The items of a list such as "Alice, Bob and Carol", in alphabetical order."""
    return sorted(re.split(r",? and |, ", lowercase_words(text)))


def _date(text: str) -> list[str]:
    """The parts of a date in any order: 4 July 2020, July 4th, 2020, and 2020-07-04 are equal."""
    words = _ISO_DATE.sub(lambda date: f"{date[1]} {_MONTHS.get(date[2])} {date[3]}", lowercase_words(text))
    words = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|\b(?:of|the)\b", "", words)
    fields = []
    for field in re.findall(r"\d+|[a-z]+|[^ ,.]", words):
        fields.append(field[:3] if _MONTH.fullmatch(field) else field.lstrip("0"))
    return sorted(fields)


def _as_formula(truth: str, answer: str) -> bool | None:
    r"""Compares chemical formulas, which keep case and order, if one side is upright: \text{CO}_2 is CO_2."""
    if r"\text" not in truth and r"\text" not in answer:
        return None
    wanted = _FORMULA_MARKUP.sub("", truth)
    got = _FORMULA_MARKUP.sub("", answer)
    if not _FORMULA.fullmatch(wanted):
        return None
    # HCl, CO2 and Co are no words, but NO and Yes are words in any case.
    is_short = len(wanted) == 2 and wanted.casefold() not in _SHORT_WORDS
    if is_short or _CASED.search(wanted) or _CASED.search(got):
        return wanted == got
    return None


def _is_number(truth: str, answer: str) -> bool:
    wanted = quantity(truth)
    got = quantity(answer)
    if wanted is None or got is None:
        return False
    return same_quantity(wanted, got)
