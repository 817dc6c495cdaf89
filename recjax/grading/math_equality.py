"""Comparison of a mathematical answer with the true answer; an answer with an unreadable part is wrong.

`literal` compares choices, words, times and similar answers, and `quantities` compares numbers with units.
`structure` splits sets, lists, tuples and matrices into items. `expressions` compares all other answers.
"""

import functools
import itertools
import re
from string import ascii_letters
from typing import NamedTuple

from recjax.grading import expressions, literal
from recjax.grading.literal import TEXT
from recjax.grading.notation import depths, plain, rows_of, split_outside_brackets, squeezed
from recjax.grading.quantities import Quantity, quantity, same_quantity
from recjax.grading.syntax import names, parse_math

_INDEX = r"_ ?(?:\{(?:[^{}=,]|\{[^{}]*\})+\}|\\m(?:in|ax)|\w+)"
_LETTER = rf"(?:[A-Za-z]|\\[a-z]+) ?'?(?:{_INDEX})?"
_NAME = (
    r"(?:m? ?\\angle ?[A-Z]{1,3}|\\(?:overline|overrightarrow|vec|hat|mathbf|mathcal)\{[A-Za-z]{1,3}\}|\|[A-Z]{2}\|"
    rf"|[A-Z]{{1,3}}|(?:\\m(?:in|ax) ?)?{_LETTER}(?: ?\([^()=,]*\)(?:{_INDEX})?)?"
    rf"|\({_LETTER}(?: ?, ?{_LETTER}){{1,3}}\)"
    r"|\\text ?\{[A-Za-z ]{1,40}\}(?:_\w)?)"
)
_NAMED = re.compile(rf"(?P<name>{_NAME}) ?(?:=|:|\\approx|\\in\b|\bis\b) ?(?P<value>[^=]+(?:=[^=]+)*)")
_VALUE_FIRST = re.compile(rf"(?P<value>[^=]+?) ?= ?(?P<name>{_NAME})")
_ANSWER_IS = re.compile(r"^(?:(?:the )?(?:final )?answer(?: is|:| =)|=) ?(?![-+*/=])", re.I)
_ABOUT = re.compile(r"^(?:\\approx|\\sim|~|\babout\b|\bapproximately\b|\broughly\b) ?", re.I)
_BUILDER = re.compile(
    r"\\\{ ?(?P<name>[A-Za-z](?:_\w)?) ?(?:\\in ?\\mathbb\{R\})? ?(?:\\mid|\\vert|\||:) ?(?P<condition>[^{}].*)\\\}"
)
_KIND = (
    r"(?:(?:an?|any|all|some|arbitrary|positive|natural|non-?negative|real) )*"
    r"(?:integers?|numbers?|reals?|constants?)"
)
_SET = r"\\in ?(?:\\math(?:bb|bf)\{)?(?P<set>[NZR])\}?(?: ?[_^] ?\{?(?P<part>[*+]|>0|\d)\}?)*"
_SEVERAL = r"(?:(?<=[,;(])|(?<=[,;(] )|(?<=[a-z][a-z] ))(?P<first>[a-z])(?:(?: ?, ?| and )(?!(?P=first))[a-z])+"
_DOMAIN = re.compile(
    r"(?P<before>(?:(?![<>]|\\[lg]e(?![a-z])).)+?)[ ,;]*\(?"
    r"(?:(?:where|with|when) |(?:for )?(?P<all>all|any|every|each|\\forall) ?|for )?"
    rf"(?:(?P<kind>{_KIND}) )?(?P<name>[a-z]|{_SEVERAL})"
    rf"(?: (?:is )?(?P<kinds>{_KIND})| ?{_SET}| ?(?P<least>\\ge ?[01]|> ?0|= ?1,.*\\ldots)"
    r"| ?(?P<signed>= ?0 ?, ?\\pm.*))?"
    r"[) ]*"
)
_BOLD = re.compile(r"\\mathbf\{\w\}")
_TUPLE = re.compile(rf"^\(({_LETTER}(?: ?, ?{_LETTER})+)\) ?= ?\(((?:[^()]|\([^()]*\))*)\)$")
_CHAIN = re.compile(rf"^{_LETTER}(?: ?= ?{_LETTER})+ ?= ?[^=,]*\d[^=,]*$")
_LAST_CONDITION = re.compile(r" ?\(([a-z] ?(?:[<>]|\\(?:[lg]e|neq)(?![a-z]))[^()]*)\)$")
_MAPPED = re.compile(r"^(?:([A-Za-z]) ?: ?)?([a-z]) ?\\mapsto ?")
_TEXT_ANSWER_IS = re.compile(r"^\\text ?\{ ?(?:the )?(?:final )?answer(?: is|:)? ?:? ?([^{}]*)\}", re.I)
_LABELED = re.compile(
    r"(?:\\text ?\{ ?(?=\(|.[.:])\(?(?P<marked>[A-J])\)?[.:]? ?\} ?|\((?P<label>[A-J])\) )(?P<value>.+)"
)
_INDEXED = re.compile(r"(?<![A-Za-z\\])([A-Za-z])_\{?\d\}? ?=")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,]*,\d{3}|\d)(?!,\d)", re.A)
_LAST_WORDS = re.compile(r"(?P<core>.*?[^ ]) ?(?P<words>\\text ?\{ ?[A-Za-z][A-Za-z .-]+\}(?:\^\{?-?\d\}?)?)")
_MATRIX = re.compile(r"\\begin\{((?:p|b|B|small)?matrix|array)\}(?:\{[clr| ]*\})?(.*)\\end\{\1\}")
_CASES = re.compile(r"\\begin\{(d?cases|aligned)\}(.*)\\end\{\1\}")
_CONDITION = re.compile(r"^(?:\\text ?\{ ?(?:if|for|when|where)? ?\}|if|for|when) ?|[,;.] ?$", re.I)
_AND = re.compile(r",? ?(?:\\text ?\{ ?and ?\}|\band\b) ?")
_OR = re.compile(r",? ?(?:\\text ?\{ ?or ?\}|\bor\b|\\vee(?![a-z])) ?")
_ENCLOSED = re.compile(r"(\\?[{(\[])(.*?)(\\?[})\]])")


class Explanation(NamedTuple):
    """A verdict, the readings of the answer and of the true answer, and the rule by which the two were compared."""

    right: bool
    answer: str
    truth: str
    rule: str

    def __str__(self) -> str:
        return f"{'right' if self.right else 'wrong'}: {self.rule}\n  answer: {self.answer}\n  truth:  {self.truth}"


def is_equal(answer: str | None, truth: str, finished: bool) -> bool:
    """True if an answer equals the true answer.

    Args:
        finished: if the true answer is a number, accept only numbers and no computations.
    """
    return answer is not None and _same(_read(truth), _read(answer), finished)


def explanation(answer: str, truth: str) -> Explanation:
    """The verdict of `is_equal` on a finished answer, with its reasons."""
    right, rule = _compared(_read(truth), _read(answer), finished=True)
    wanted, got = (_described(text) if text else "none" for text in _in_one_form(_read(truth), _read(answer)))
    return Explanation(right, got, wanted, rule)


def _described(text: str) -> str:
    """A text, in the notation of `notation.plain`, with a few words for its kind."""
    if (number := quantity(unnamed(text))) is not None:
        kind = f"the number {number.value}{' with a unit' if number.units else ''}"
    elif (structured := _spread(unnamed(text))) is not None:
        kind = f"the items {'; '.join(structured.items)} in {structured.kind}"
    elif literal.decided(text, text) is not None or (tree := parse_math(text)) is None:
        kind = "text"
    else:
        kind = {"relation": "a relation of "}.get(tree.kind, "an expression of ") + (
            ", ".join(sorted(names(tree))) or "constants"
        )
    return f"{text} ({kind})"


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> str:
    return plain(text)


def _same(truth: str, answer: str, finished: bool) -> bool:
    return _compared(truth, answer, finished)[0]


def _compared(truth: str, answer: str, finished: bool) -> tuple[bool, str]:
    """The verdict, and the rule that decided it."""
    if not answer:
        return False, "there is no answer, or it is too long or too deeply nested"
    if squeezed(truth) == squeezed(answer):
        return True, "the same text"
    truth, answer = _in_one_form(truth.strip(), answer.strip())
    if (label := _LABELED.fullmatch(truth)) and quantity(truth) is None:
        got = _LABELED.fullmatch(answer)  # the truth is a choice and its text; an answer may omit one of them
        letter = label["marked"] or label["label"]
        is_choice = literal.decided(f"({letter})", answer)
        if got is not None and letter not in (got["marked"], got["label"]):
            return False, "compared as a choice with its text"
        is_same = is_choice or _same(label["value"].strip(), got["value"] if got else answer, finished)
        return bool(is_same), "compared as a choice with its text"
    if (decided := literal.decided(truth, answer)) is not None:
        return decided, "compared as written: choices, words, times, dates, chemical formulas, residues, bases"
    if (decided := _as_named(truth, answer, finished)) is not None:
        return decided, "compared as the value of a name, such as x = 5"
    number = quantity(truth)
    if number is not None:
        # The letters of 2mg, without a space, may be factors too.
        are_factors = number.units and re.search(r"[\d}][A-Za-z]+", truth) and r"\text" not in truth
        is_same = _is_number(truth, number, answer, finished)
        is_same = is_same or (bool(are_factors) and expressions.same_expression(truth, answer, None))
        return is_same, "compared as numbers with their units"
    if (match := _LAST_WORDS.fullmatch(truth)) and not expressions.names_its_unit(truth):
        # An answer may omit, but not change, an unknown unit or other words after the truth's number.
        if expressions.is_constant(match["core"]):
            words = squeezed(TEXT.sub(r" \1", match["words"]))
            answer = TEXT.sub(r" \1", answer)
            return _compared(
                match["core"], answer.removesuffix(words).strip() if answer.endswith(words) else answer, finished
            )
    truth, answer = _as_vector(truth, answer), _as_vector(answer, truth)
    truth, answer = _without_indices(truth, answer), _without_indices(answer, truth)
    if r"{cases}" in truth + answer and expressions.same_expression(truth, answer, None):
        return True, "compared as expressions"
    if (decided := expressions.same_region(truth, answer)) is not None:
        return decided, "compared as regions of the number line"
    wanted = _spread(truth)
    got = _spread(unnamed(answer))
    if r"\pi" in truth or "°" in truth:
        items = [
            each.items if each is not None and each.is_unordered else [text]
            for each, text in ((wanted, truth), (got, unnamed(answer)))
        ]
        if expressions.same_solutions(*items):
            return True, "compared as general solutions"
    if wanted is not None and (decided := _same_structure(wanted, got, answer, finished)) is not None:
        return decided, "compared item by item"
    return expressions.same_expression(truth, answer, quantity(unnamed(answer))), "compared as expressions"


def _as_vector(text: str, other_text: str) -> str:
    r"""A tuple or column as a sum of unit vectors if the second text is such a sum: (1,2) is \hat{i}+2\hat{j}."""
    column = structure(text) if r"\hat{" in other_text and expressions.UNIT_VECTOR.search(other_text) else None
    if column is None or column.kind not in ("<>", "()", "[]", f"{len(column.items)} rows") or len(column.items) > 3:
        return text
    return "+".join(rf"({item})\hat{{{axis}}}" for item, axis in zip(column.items, "ijk", strict=False))


def _without_indices(text: str, other_text: str) -> str:
    """The roots x_1=2, x_2=5 as x=2, x=5 if the second text names both x, or is a set."""
    letters = _INDEXED.findall(text)
    if len(letters) < 2 or len({*letters}) > 1:
        return text
    is_named = re.search(rf"(?<![A-Za-z\\]){letters[0]} ?(?:=|\\in(?![a-z]))", other_text)
    return _INDEXED.sub(r"\1=", text) if is_named or other_text.startswith(r"\{") else text


def _in_one_form(truth: str, answer: str) -> tuple[str, str]:
    """Removes parts that one side may omit: "the answer is", set builders, domains, thousands separators."""
    answer = _TEXT_ANSWER_IS.sub(lambda match: match[1].strip(" .") and rf"\text{{{match[1].strip(' .')}}}", answer)
    texts = [truth, _ANSWER_IS.sub("", answer.strip(), count=1).strip()]
    if any(map(_BUILDER.fullmatch, texts)):
        # {x | x = 3} equals {3}; any other set that lists its members keeps its braces.
        single = all(_BUILDER.fullmatch(text) or re.fullmatch(r"\\\{[^{},]*\\\}", text) for text in texts)
        braces = r"^\\\{|\\\}$" if single else "(?!)"
        texts = [
            match["condition"] if (match := _BUILDER.fullmatch(text)) else re.sub(braces, "", text) for text in texts
        ]
    texts = [_MAPPED.sub(lambda match: f"{match[1]}({match[2]})=" if match[1] else "", text) for text in texts]
    texts = _without_domains([_LAST_CONDITION.sub(r",\1", text) for text in texts])
    if re.fullmatch(r"\d+(?: ?: ?\d+)+", truth):
        texts[1] = re.sub(r"(?<=\d) to (?=\d)", ":", texts[1])

    def assigned(match: re.Match) -> str:
        sides = map(split_outside_brackets, match.groups())
        return ",".join(map("=".join, itertools.zip_longest(*sides, fillvalue="")))

    if "," in "".join(texts):  # a=b=2 is a=2, b=2
        texts = [_CHAIN.sub(_each_assigned, text) for text in texts]
    if "=" in texts[1] and _TUPLE.fullmatch(truth):  # (x,y)=(1,2) is x=1,y=2
        texts = [_TUPLE.sub(assigned, text) for text in texts]
    truth, answer = texts
    is_list = "," in truth and _THOUSANDS.fullmatch(answer)  # 1,234 may be two items if the truth has several
    return without_thousands(truth), answer if is_list else without_thousands(answer)


def _each_assigned(match: re.Match) -> str:
    *named, value = split_outside_brackets(match.group(), "=")
    return ",".join(f"{name}={value}" for name in named)


def _without_domains(texts: list[str]) -> list[str]:
    """Removes the domains of letters, such as "k is an integer", if they do not differ.

    One side may omit a domain. If the letter counts periods, the omitted domain is the set of all integers.
    """
    cores = []
    domains = []
    letters = []
    for text in texts:
        flat = TEXT.sub(lambda words: words[0] if words[1] in ("and", "or") else f" {words[1]} ", text)
        match = _DOMAIN.fullmatch(" ".join(flat.split()))
        fields = match.groupdict(default="") if match else dict.fromkeys(_DOMAIN.groupindex, "")
        kind = fields["kind"] + fields["kinds"]
        domain = fields["set"]
        if domain == "N" or fields["part"] or re.search("positive|natural|negative", kind):
            domain = "N"
        elif fields["least"]:
            domain = "N" if fields["name"] not in "xyz" else ""
        elif "integer" in kind or fields["signed"]:
            domain = "Z"
        elif kind:
            domain = "R"
        elif fields["all"] and not domain:
            domain = "all"
        core = fields["before"]
        is_whole = bool(core) and [*depths(core)][-1] == 0 and text.startswith(core)
        named = {*re.sub(r"\\[A-Za-z]+", "", core)}
        has_name = domain == "all" or named.issuperset(re.findall(r"\b[a-z]\b", fields["name"]))
        is_used = bool(domain) and is_whole and has_name
        cores.append(core if is_used else text)
        domains.append(domain if is_used else "")
        letters.append(fields["name"])
    is_periodic = any(re.search(r"\\pi(?![a-z])|°", core) for core in cores)
    wanted, got = letters
    is_renamed = all(domains) and wanted != got and len(wanted + got) == 2
    if is_renamed and _renamed(cores[0], got, "") == cores[0]:
        cores[1] = _renamed(cores[1], got, wanted)
    differ = all(domains) and domains[0] != domains[1]
    return texts if differ or (is_periodic and "" in domains and {"N", "R"} & {*domains}) else cores


def _renamed(text: str, old: str, new: str) -> str:
    """A text with a letter renamed, except inside commands and words."""
    kept = r"\\text ?\{[^{}]*\}|\\[A-Za-z]+|\b(?:and|or)\b"
    return re.sub(rf"({kept})|{old}", lambda match: match[1] or new, text)


def without_thousands(text: str) -> str:
    """Removes the commas that separate thousands, but not the commas of a list.

    A comma between digits separates thousands if the text separates its items in another way, or has no items.
    """
    has_items = re.search(r",(?! ?\d{3}(?!\d))|, |;|\\text ?\{ ?(?:and|or)|\b(?:and|or)\b", text)
    in_brackets = re.search(r"(?:[(\[]|\\\{)[^()\[\]{}]*,", text)
    if in_brackets and not has_items:
        return text
    return _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)


def unnamed(text: str) -> str:
    """Removes the name of an unknown: "x = 5", "5 = x" and "x is 5" become "5"."""
    if text.count("=") > 1 and not re.match(r"\([A-Za-z]", text):
        name, _, values = text.partition("=")
        return values.strip() if "," not in text and re.fullmatch(_NAME, name.strip()) else text
    match = _NAMED.fullmatch(text) or _VALUE_FIRST.fullmatch(text)
    return match["value"].strip() if match else text


def _as_named(truth: str, answer: str, finished: bool) -> bool | None:
    """Compares with a truth such as x = 5; the answer may omit the name x, but not change it."""
    wanted = _NAMED.fullmatch(truth)
    is_piecewise = wanted and wanted["value"].startswith(r"\begin{cases}")
    if not wanted or ("=" in wanted["value"] and not is_piecewise) or r"\in" in truth:
        return None
    if quantity(wanted["value"]) is None and not _spread(wanted["value"]):
        return None
    got = _NAMED.fullmatch(answer) or _VALUE_FIRST.fullmatch(answer)
    names = [squeezed(each["name"]) for each in (wanted, got) if each]
    if any(map(_BOLD.fullmatch, names)):  # v and \vec{v} may be bold instead
        names = [expressions.MARKED_LETTER.sub(r"\2", name) for name in names]
    if got and r"\text" not in got["name"] and names[0] != names[1]:
        return False
    if got is None and "=" in answer:
        return False
    return _same(wanted["value"].strip(), got["value"].strip() if got else answer, finished)


# --- Numbers.


def _is_number(truth: str, number: Quantity, answer: str, finished: bool) -> bool:
    answer = unnamed(_ABOUT.sub("", answer, count=1).strip())
    if (got := quantity(answer)) is not None:
        return same_quantity(number, got)
    if len(split_outside_brackets(answer, "=")) > 1:
        # 15/4 = 3.75 states one number several times; other chains are workings and not answers.
        values = [quantity(value) for value in split_outside_brackets(answer, "=")]
        return all(value is not None and same_quantity(number, value) for value in values)
    if number.units and (got := quantity(answer, ascii_letters)) is not None:
        return same_quantity(number, got)  # 5 N is a quantity if the truth has a unit too
    if any(unit.dimensions == (("degree", 1),) for unit in number.units):
        return expressions.same_expression(truth, answer, None)
    return not finished and r"\pm" not in answer and expressions.same_expression(truth, answer, None)


# --- Sets, lists, tuples, intervals, matrices.


class Structure(NamedTuple):
    """Items and their brackets.

    `kind` is "list" or "or" for items without brackets, "2 rows", "{}", or another pair such as "[)" or "<>".
    """

    kind: str
    items: list

    @property
    def is_unordered(self) -> bool:
        """True for a set, and for a list without brackets."""
        return self.kind in ("{}", "list", "or")


def _spread(text: str) -> Structure | None:
    r"""A text's structure; a single \pm in an item of a list, or in a whole text, makes two of it."""
    whole = structure(text)
    is_list = whole is not None and whole.is_unordered
    items = whole.items if whole is not None and is_list else [text]
    signed = []
    for item in items:
        parts = re.split(r"\\pm(?!od)", item)
        positive = re.sub(r"(^|[(\[{,=] ?)\+", r"\1", "+".join(parts).strip())
        negative = "-".join(parts).strip()
        if re.fullmatch(r"-\([^()]*,[^()]*\)", negative):  # minus a tuple
            negative = f"({','.join(f'-({each})' for each in split_outside_brackets(negative[2:-1]))})"
        signed += [positive.strip(), negative] if len(parts) == 2 else [item]
    names = {match["name"] for item in items if (match := _NAMED.fullmatch(item))}
    if len(signed) > len(items) and len(names) < 2:
        return Structure(whole.kind if whole is not None and is_list else "list", signed)
    if re.fullmatch(r"[A-Z] ?\([^()]*,[^()]*\)", text):
        text = text[1:].strip()  # the point P(1,2) is the pair (1,2)
    return structure(text)


def _same_structure(truth: Structure, got: Structure | None, answer: str, finished: bool) -> bool | None:
    if got is None:
        return None if re.search(r"\\begin|\^", answer) else False
    names = [[match["name"] for item in each.items if (match := _NAMED.fullmatch(item))] for each in (truth, got)]
    if names[0] and len(names[0]) == len(truth.items):  # assignments such as x=2, y=3, or x=2, x=3
        if len({*names[0]}) == 1:
            return _same_items(truth, got, finished)
        if (truth.kind == "or") is not (got.kind == "or"):
            return False  # x=1 or y=2 is not x=1, y=2
        if len({*names[0]}) == len(names[0]) == len(got.items) and sorted(names[0]) == sorted(names[1]):
            orders = [sorted(range(len(each)), key=each.__getitem__) for each in names]
            truth, got = (
                each._replace(items=[each.items[index] for index in order])
                for each, order in zip((truth, got), orders, strict=True)
            )
        return _all_same(truth.items, got.items, finished)
    if truth.is_unordered:
        return got.is_unordered and _same_items(truth, got, finished)
    column = f"{len(truth.items)} rows"
    others = {"()": ("<>", "list"), "<>": ("()", "[]", "list", column), column: ("<>",)}.get(truth.kind, ())
    return got.kind in (truth.kind, *others) and _all_same(truth.items, got.items, finished)


def _all_same(truths: list[str], answers: list[str], finished: bool) -> bool:
    return len(truths) == len(answers) and all(map(_same, truths, answers, itertools.repeat(finished)))


def _same_items(truth: Structure, got: Structure, finished: bool) -> bool:
    def are_same(true_item: str, item: str) -> bool:
        return _same(true_item, item, finished)

    if truth.kind != "{}":
        return expressions.matched(truth.items, got.items, are_same)
    matches = [[are_same(true_item, item) for item in got.items] for true_item in truth.items]
    return all(map(any, matches)) and all(map(any, zip(*matches, strict=True))) if matches else not got.items


def structure(text: str) -> Structure | None:
    """The structure of a whole text in the notation of `notation.plain`; None if the text is a single item."""
    if match := _CASES.fullmatch(text):
        cases = []
        for row in rows_of(match[2]):  # a statement, or a pair of a value and its condition
            cells = [_CONDITION.sub("", _CONDITION.sub("", cell)).strip() for cell in row]
            cells[1:] = [re.sub(r"^\(([^()]*)\)$", r"\1", cell) for cell in cells[1:]]
            is_aligned = len(cells) > 1 and cells[1][:1] in ("=", "<", ">")  # a relation with an alignment mark
            cases.append("".join(cells) if is_aligned or len(cells) == 1 else f"({','.join(cells)})")
        return Structure("list", cases)
    if match := re.fullmatch(r"\\langle ?(.*)\\rangle", text):
        return Structure("<>", split_outside_brackets(match[1]))
    if (match := _MATRIX.fullmatch(text)) and r"\begin" not in match[2]:
        rows = rows_of(match[2])
        return Structure(f"{len(rows)} rows", sum(rows, []))
    if text.replace(" ", "") in ("\\emptyset", "\\{\\}"):
        return Structure("{}", [])
    # "x<1 or x>2" is one region and not a list.
    is_region = re.search(r"[<>]|\\(?:le|ge)(?![a-z])", text)
    items = split_outside_brackets(text if is_region else _OR.sub(",", _AND.sub(",", text)))
    if len(items) > 1 and all(items):
        return Structure("or" if _OR.search(text) else "list", items)
    if not (match := _ENCLOSED.fullmatch(text)):
        return None
    opening, inside, closing = match.groups()
    levels = [0, *depths(inside)]
    if min(levels) != 0 or levels[-1] != 0:  # the last bracket does not close the first one
        return None
    if opening != "{":
        inside = _AND.sub(",", inside)
    if opening == r"\{":
        inside = _OR.sub(",", inside)
    items = split_outside_brackets(inside)
    match opening, closing, len(items):
        case (r"\{", r"\}", _):
            return Structure("{}", items)
        case ("(", ")", 1):
            return structure(items[0])
        case ("{", "}", count) | ("(" | "[", ")" | "]", count) if count > 1:
            return Structure(opening + closing, items)
    return None
