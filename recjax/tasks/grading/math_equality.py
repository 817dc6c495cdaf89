"""Whether a mathematical answer is the true one. An answer is read whole: what cannot be read makes it wrong.

Numbers with units, sets, tuples, matrices, choices and words are read by this package. Everything else is given to
math-verify, after its words have been checked and its units taken off.
"""

import functools
import re

from recjax.tasks.grading import expressions
from recjax.tasks.grading.notation import plain, split, words_of
from recjax.tasks.grading.quantities import Quantity, quantity, same
from recjax.tasks.grading.structures import Structure, structure

_NAME = (
    r"(?:m? ?\\angle ?[A-Z]{1,3}|\\(?:overline|overrightarrow|vec|hat|mathbf|mathcal)\{[A-Za-z]{1,3}\}|\|[A-Z]{2}\|"
    r"|[A-Z]{1,3}|[A-Za-z](?:'|_(?:\{\w+\}|\w+))?(?: ?\([^()=,]*\))?|\\[a-z]+(?:_(?:\{\w+\}|\w+))?"
    r"|\([A-Za-z](?: ?, ?[A-Za-z]){1,3}\)"
    r"|\\text ?\{[A-Za-z ]{1,40}\}(?:_\w)?)"
)
_NAMED = re.compile(rf"(?P<name>{_NAME}) ?(?:=|:|\\approx|\\in\b|\bis\b) ?(?P<value>[^=]+(?:=[^=]+)*)")
_VALUE_FIRST = re.compile(rf"(?P<value>[^=]+?) ?= ?(?P<name>{_NAME})")
_SAID = re.compile(r"(?:(?:the )?(?:final )?answer(?: is|:| =)|=) ?(?![-+*/=])", re.I)
_ABOUT = re.compile(r"(?:\\approx|\\sim|~|\babout\b|\bapproximately\b|\broughly\b) ?", re.I)
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer):? ?)?(?:\((?P<held>[A-Za-z])\)|\\text ?\{ ?(?:\((?P<textheld>[A-Za-z])\)|(?P<text>[A-Z])) ?\}"
    r"|(?P<bare>[A-Z])(?P<half>\))?)",
    re.I,
)
_CLOCK = re.compile(r"(?:\\text ?\{)? ?(\d{1,2}):(\d\d) ?(?:\\text ?\{)? ?(?:([ap])\.? ?m\b\.?)? ?\}?", re.I)
_SHORT_WORDS = set("no on so is if or to up us we he me my by go at an as be do in it of hi ok".split())
_RELATION = re.compile(r"\\(?:neq|not|ge|le|gt|lt)(?![A-Za-z])|[<>]")
_NO_TEXT = re.compile(r"\\text ?\{ ?([^{}]*?) ?\}")
_CONGRUENCE = re.compile(
    r"(?:(?P<name>[^=,]*?) ?\\equiv ?)?(?P<values>[-\d, ]+?) ?\(?\\pmod ?\{?(?P<modulus>\d+)\}?\)?", re.A
)
_BUILDER = re.compile(
    r"\\\{ ?(?P<name>[A-Za-z](?:_\w)?) ?(?:\\in ?\\mathbb\{R\})? ?(?:\\mid|\\vert|\||:) ?(?P<condition>[^{}].*)\\\}"
)
_REAL = re.compile(r"^(?P<name>[A-Za-z]) ?\\in ?\\mathbb\{R\} ?, ?(?=(?P=name)\b)")
_COUNTING = re.compile(
    r"(?<=[klmn].) ?,? ?\(?[klmn] ?\\in ?\\mathbb\{Z\}\)?$|(?<=[klmn]) ?,? ?\(?[klmn] ?\\in ?\\mathbb\{Z\}\)?$"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,]*,\d{3}|\d)(?!,\d)", re.A)
_LETTERS = re.compile(r"\(?([A-J])\)?(?:(?: ?[,;] ?| and | )?\(?([A-J])\)?)+")
_MONTH = re.compile(r"\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b", re.I)
_LAST_WORDS = re.compile(r"(?P<core>.*?[^ ]) ?(?P<words>\\text ?\{ ?[A-Za-z][A-Za-z .-]*\}(?:\^\{?-?\d\}?)?)")
_SUBSCRIPT = re.compile(r"([0-9A-Fa-f]+)_\{?(\d+)\}?")


def is_right(given: str | None, answer: str, finished: bool) -> bool:
    """Whether an answer equals the true one.

    Args:
        finished: where the true answer is a number, only a number will do, no computation.
    """
    if not given:
        return False
    return _same(_read(answer), _read(given), finished)


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> str:
    return plain(text)


def _same(truth: str, given: str, finished: bool) -> bool:
    if not given:
        return False
    if _squeezed(truth) == _squeezed(given):
        return True
    given = _SAID.sub("", given, count=1) if _SAID.match(given) else given
    truth, given = (_BUILDER.sub(r"\g<condition>", text.strip()) for text in (truth, given))
    truth, given = (_REAL.sub("", text) for text in (truth, given))
    if bool(_COUNTING.search(truth)) is not bool(_COUNTING.search(given)):
        truth, given = (_COUNTING.sub("", text) for text in (truth, given))
    truth, given = _without_thousands(truth, given)
    for decide in (_as_choice, _as_choices, _as_clock, _as_words, _in_a_base, _as_ratio, _as_congruence, _as_named):
        decided = decide(truth, given, finished)
        if decided is not None:
            return decided
    number = quantity(truth)
    if number is not None:
        return _is_number(truth, number, given, finished)
    if (match := _LAST_WORDS.fullmatch(truth)) and not expressions.names_its_unit(truth):
        # A unit that is in no table, or whatever else a number's truth ends with, may be left out but not changed.
        if expressions.is_constant(match["core"]):
            words = _squeezed(_NO_TEXT.sub(r" \1", match["words"]))
            given = _NO_TEXT.sub(r" \1", given)
            return _same(match["core"], given.removesuffix(words).strip() if given.endswith(words) else given, finished)
    if (decided := expressions.same_region(truth, given)) is not None:
        return decided
    taken, said = _spread(truth), _spread(unnamed(given))
    if taken is not None and (decided := _same_structure(taken, said, given, finished)) is not None:
        return decided
    if taken is None and said is not None and r"\begin" not in truth and not _may_be_a_region(truth, said):
        return False
    if _RELATION.match(given) and not _RELATION.match(truth):
        return False
    return expressions.same(truth, given, quantity(unnamed(given)))


def _without_thousands(truth: str, given: str) -> tuple[str, str]:
    """Both without the commas that separate thousands, where these are no list's.

    A comma without a space is one before three digits in a text that separates its items otherwise, or has no items.
    """
    texts = []
    for text in (truth, given):
        loose = re.search(r",(?! ?\d{3}(?!\d))|, |;|\\text ?\{ ?(?:and|or)|\b(?:and|or)\b", text)
        bracketed = re.search(r"(?:[(\[]|\\\{)[^()\[\]{}]*,", text)
        is_number = _THOUSANDS.sub("", text).strip() == ""
        if _THOUSANDS.search(text) and (loose or not bracketed) and not (is_number and not loose):
            text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
        texts.append(text)
    truth, given = texts
    if "," in given and "," not in truth and _THOUSANDS.sub("", given) == "":
        given = given.replace(",", "")
    return truth, given


def _squeezed(text: str) -> str:
    """Without the spaces that separate nothing: two letters or digits apart stay so."""
    return re.sub(r"(?<![\w.]) | (?![\w.])", "", text)


def unnamed(text: str) -> str:
    """What follows the name of an unknown: 5 of "x = 5", "5 = x" and "x is 5"."""
    if text.count("=") > 1 and not re.match(r"\([A-Za-z]", text):
        name, _, rest = text.partition("=")
        return rest.strip() if "," not in text and re.fullmatch(_NAME, name.strip()) else text
    match = _NAMED.fullmatch(text) or _VALUE_FIRST.fullmatch(text)
    return match["value"].strip() if match else text


# --- Answers of one letter or a few words. Each says True, False, or None where the truth is nothing of its kind.


def _as_choice(truth: str, given: str, finished: bool) -> bool | None:
    wanted = _CHOICE.fullmatch(truth)
    if not wanted or not _letter(wanted):
        return None
    said = _CHOICE.fullmatch(given) or _CHOICE.fullmatch(_NO_TEXT.sub(r"\1", given))
    if not said:
        return False if wanted["held"] or wanted["textheld"] or not re.search(r"[=\\+\-*/^\d]", given) else None
    if wanted["held"] or wanted["textheld"]:
        return _letter(wanted).casefold() == _letter(said).casefold()
    return _letter(wanted) == _letter(said)


def _as_choices(truth: str, given: str, finished: bool) -> bool | None:
    """Several choices: A,C and AC and "A and C"; where both sides run letters together, they may be points."""
    wanted, said = (re.sub(r" +", " ", _NO_TEXT.sub(r" \1 ", text)).strip() for text in (truth, given))
    if (wanted.isalpha() and said.isalpha()) or not (_LETTERS.fullmatch(wanted) and _LETTERS.fullmatch(said)):
        return None
    letters = [sorted(re.findall("[A-J]", text)) for text in (wanted, said)]
    return letters[0] == letters[1]


def _as_congruence(truth: str, given: str, finished: bool) -> bool | None:
    """3 (mod 7), with or without a name; the modulus may be left out where the truth is, or names, one number."""
    wanted, said = _CONGRUENCE.fullmatch(truth), _CONGRUENCE.fullmatch(given)
    if not wanted and not (said and quantity(truth) and not said["name"]):
        return None
    residues = [
        sorted(int(value) for value in match["values"].split(","))
        if match and re.fullmatch(r" ?-?\d+ ?(?:, ?-?\d+ ?)*", match["values"])
        else None
        for match in (wanted, said)
    ]
    if not wanted:
        return residues[1] is not None and _same(truth, said["values"], finished)
    if not said:
        return quantity(given) is not None and _same(wanted["values"], given, finished)
    if None in residues or int(wanted["modulus"]) != int(said["modulus"]) or not int(said["modulus"]):
        return False
    if said["name"] and wanted["name"] and _squeezed(said["name"]) != _squeezed(wanted["name"]):
        return False
    classes = [{value % int(said["modulus"]) for value in each} for each in residues]
    return classes[0] == classes[1]


def _letter(match: re.Match) -> str:
    letter = match["held"] or match["textheld"] or match["text"] or match["bare"]
    # The pattern ignores case for its words; a small letter that stands by itself is a variable.
    return letter if match["held"] or match["textheld"] or letter.isupper() or match["half"] else ""


def _as_clock(truth: str, given: str, finished: bool) -> bool | None:
    wanted, said = _CLOCK.fullmatch(truth), _CLOCK.fullmatch(given)
    if not wanted or int(wanted[2]) > 59 or int(wanted[1]) > 24:
        return None
    if not said:
        return False if wanted[3] else None
    if wanted[3] and said[3] and wanted[3].casefold() != said[3].casefold():
        return False
    return wanted[2] == said[2] and (int(wanted[1]) == int(said[1]) or bool(_hours(wanted) & _hours(said)))


def _hours(clock: re.Match) -> set[int]:
    """The hour of 24 that a time with its half of the day, or after 12, names."""
    hour = int(clock[1])
    if clock[3] and 0 < hour < 13:
        return {hour % 12 + 12 * (clock[3].casefold() == "p")}
    return {hour} if hour > 12 else set()


def _as_words(truth: str, given: str, finished: bool) -> bool | None:
    marked = r"\text" in truth
    bare = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", truth).strip()
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9 ,.'/&-]*" if marked else r"[A-Za-z][A-Za-z ,.'-]*", bare):
        return None
    if quantity(truth) is not None:
        return None
    words = re.findall(r"[A-Za-z]+", bare)
    if not marked:
        if max(map(len, words)) < 2 or (len(words) > 1 and all(len(word) < 3 for word in words) and "," in bare):
            return None
        if len(words) == 1 and len(words[0]) == 2 and words[0].casefold() not in _SHORT_WORDS:
            return None
        if len(words) == 1 and not re.search(r"[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+", "", given)):
            return None  # abc may be a product, as a·b·c is; cat is not act
        if len(words) == 1 and set(words[0]) <= set("uvwxyz"):
            return None
    elif max(map(len, words)) < 2 and "-" not in bare:
        return None
    if _MONTH.search(bare) and re.search(r"\d", bare):  # 4 July 2020
        return sorted(re.findall(r"\w+", words_of(given))) == sorted(re.findall(r"\w+", words_of(truth)))
    return words_of(given) == words_of(truth)


def _in_a_base(truth: str, given: str, finished: bool) -> bool | None:
    """Digits of a base that a subscript names: they are compared as they are written."""
    wanted, said = _SUBSCRIPT.fullmatch(truth), _SUBSCRIPT.fullmatch(given)
    if wanted:
        digits = said[1] if said else given
        return digits.casefold() == wanted[1].casefold() and (not said or int(said[2]) == int(wanted[2]))
    if said and quantity(truth) is not None:
        return int(said[2]) == 10 and quantity(said[1]) is not None and same(quantity(truth), quantity(said[1]))
    return None


def _as_ratio(truth: str, given: str, finished: bool) -> bool | None:
    """1:2:3, three parts or more; a ratio of two is a number."""
    if not re.fullmatch(r"\d+(?: ?: ?\d+){2,}", truth):
        return None
    parts = [[quantity(part) for part in text.split(":")] for text in (truth, given)]
    if None in parts[1] or len(parts[0]) != len(parts[1]):
        return False
    wanted, said = ([part.value for part in each] for each in parts)
    return all(a * said[0] == b * wanted[0] for a, b in zip(wanted, said, strict=True)) and said[0] != 0


def _as_named(truth: str, given: str, finished: bool) -> bool | None:
    """x = 5: a number with its name, which may be left out, but not changed."""
    match = _NAMED.fullmatch(truth)
    if (
        not match
        or ("=" in match["value"])
        or (quantity(match["value"]) is None and not _spread(match["value"]))
        or r"\in" in truth
    ):
        return None
    said = _NAMED.fullmatch(given) or _VALUE_FIRST.fullmatch(given)
    if said and r"\text" not in said["name"] and _squeezed(said["name"]) != _squeezed(match["name"]):
        return False
    if said is None and "=" in given:
        return False
    return _same(match["value"].strip(), said["value"].strip() if said else given, finished)


# --- Numbers.


def _is_number(truth: str, number: Quantity, given: str, finished: bool) -> bool:
    given = _ABOUT.sub("", given, count=1).strip() if _ABOUT.match(given) else given
    given = unnamed(given)
    ratio = re.fullmatch(r"(\d+) to (\d+)", given)
    if ratio and ":" in truth:
        given = f"{ratio[1]}:{ratio[2]}"
    said = quantity(given)
    if said is not None:
        return same(number, said)
    if len(split(given, "=")) > 1:
        # 15/4 = 3.75: the same number, several times; a working is none.
        parts = [quantity(part) for part in split(given, "=")]
        return None not in parts and all(same(number, part) for part in parts)
    if number.units and (match := re.fullmatch(r"([\d.,]+) ([A-Za-z].*)", given)):
        said = quantity(rf"{match[1]}\text{{{match[2]}}}")  # 5 N, where the truth has a unit too
        return said is not None and same(number, said)
    if structure(given) or _RELATION.search(re.sub(r"\{[^{}]*\}", "", given)) or r"\pm" in given:
        return False
    if any(unit.dimensions == (("angle", 1),) for unit in number.units):
        return expressions.same_angle(truth, given)
    return not finished and expressions.same(truth, given, None)


# --- Sets, lists, tuples, intervals, matrices.


def _spread(text: str) -> Structure | None:
    r"""A text's structure, with a single \pm as both of its values."""
    if text.count(r"\pm") == 1 and not structure(text):
        return Structure("list", [text.replace(r"\pm", sign).strip().removeprefix("+").strip() for sign in ("+", "-")])
    if re.fullmatch(r"[A-Z] ?\([^()]*,[^()]*\)", text):
        text = text[1:].strip()  # the point P(1,2)
    return structure(text)


def _may_be_a_region(truth: str, said: Structure) -> bool:
    return said.kind in ("()", "[]", "[)", "(]") or bool(re.search(r"\\cup|=|<|>|\\le|\\ge", truth))


def _same_structure(truth: Structure, said: Structure | None, given: str, finished: bool) -> bool | None:
    if said is None:
        # An interval may be given as an inequality.
        if truth.kind == "matrix" and re.search(r"\\begin|\^", given):
            return None
        is_region = truth.kind[:1] in "([" and re.search(r"<|>|\\le|\\ge", given)
        return None if is_region and len(truth.items) == 2 else False
    if truth.kind == "<>" and said.kind == "matrix" and all(len(row) == 1 for row in said.items):
        said = Structure("<>", sum(said.items, []))
    truth, said = (each._replace(kind="()") if each.kind == "<>" else each for each in (truth, said))
    if truth.kind == "matrix" or said.kind == "matrix":
        shapes = [[len(row) for row in each.items] if each.kind == "matrix" else None for each in (truth, said)]
        if shapes[0] != shapes[1]:
            return False
        pairs = zip(sum(truth.items, []), sum(said.items, []), strict=True)
        return all(_same(wanted, got, finished) for wanted, got in pairs)
    names = [[match["name"] for item in each.items if (match := _NAMED.fullmatch(item))] for each in (truth, said)]
    if names[0] and len(names[0]) == len(truth.items):
        return _same_assignments(truth, said, names, finished)
    if truth.is_unordered:
        return said.is_unordered and _same_items(truth, said, finished)
    if said.kind not in (truth.kind, "list") or (said.kind == "list" and truth.kind != "()"):
        return False
    return len(truth.items) == len(said.items) and all(
        _same(wanted, got, finished) for wanted, got in zip(truth.items, said.items, strict=True)
    )


def _same_items(truth: Structure, said: Structure, finished: bool) -> bool:
    matches = [[_same(wanted, got, finished) for got in said.items] for wanted in truth.items]
    if truth.kind == "list" and len(said.items) != len(truth.items):
        return False
    return all(map(any, matches)) and all(map(any, zip(*matches, strict=True))) if matches else not said.items


def _same_assignments(truth: Structure, said: Structure, names: list[list[str]], finished: bool) -> bool:
    """x=2, y=3: in any order where the answer names them too."""
    if len(truth.items) != len(said.items):
        return False
    values = [[unnamed(item) for item in each.items] for each in (truth, said)]
    if len({*names[0]}) == len(names[0]) and sorted(names[0]) == sorted(names[1]):
        values = [[value for _, value in sorted(zip(*each, strict=True))] for each in zip(names, values, strict=True)]
    elif names[1] and {*names[0]} != {*names[1]}:
        return False
    elif len({*names[0]}) == 1:
        return _same_items(truth._replace(items=values[0]), said._replace(items=values[1]), finished)
    return all(_same(wanted, got, finished) for wanted, got in zip(*values, strict=True))
