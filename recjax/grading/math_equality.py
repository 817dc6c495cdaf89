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
from recjax.grading.notation import depths, matrix_rows, plain, split_outside_brackets, squeezed
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
        verdict = "right" if self.right else "wrong"
        return f"{verdict}: {self.rule}\n  answer: {self.answer}\n  truth:  {self.truth}"


def is_equal(answer: str | None, truth: str, finished: bool) -> bool:
    """True if an answer equals the true answer.

    Args:
        finished: if the true answer is a number, accept only numbers and no computations.
    """
    if answer is None:
        return False
    return _same(_read(truth), _read(answer), finished)


def explanation(answer: str, truth: str) -> Explanation:
    """The verdict of `is_equal` on a finished answer, with its reasons."""
    right, rule = _compared(_read(truth), _read(answer), finished=True)
    truth_read, answer_read = _in_one_form(_read(truth), _read(answer))
    return Explanation(right, _described(answer_read), _described(truth_read), rule)


def _described(text: str) -> str:
    """A text, in the notation of `notation.plain`, with a few words for its kind; "none" for an empty text."""
    if not text:
        return "none"
    return f"{text} ({_kind_in_words(text)})"


def _kind_in_words(text: str) -> str:
    number = quantity(unnamed(text))
    if number is not None:
        suffix = " with a unit" if number.units else ""
        return f"the number {number.value}{suffix}"
    structured = _spread(unnamed(text))
    if structured is not None:
        return f"the items {'; '.join(structured.items)} in {structured.kind}"
    if literal.decided(text, text) is not None:
        return "text"
    tree = parse_math(text)
    if tree is None:
        return "text"
    unknowns = ", ".join(sorted(names(tree))) or "constants"
    if tree.kind == "relation":
        return f"a relation of {unknowns}"
    return f"an expression of {unknowns}"


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
    choice = _LABELED.fullmatch(truth)
    if choice and quantity(truth) is None:
        return _is_labeled_choice(choice, answer, finished), "compared as a choice with its text"
    decided = literal.decided(truth, answer)
    if decided is not None:
        return decided, "compared as written: choices, words, times, dates, chemical formulas, residues, bases"
    decided = _as_named(truth, answer, finished)
    if decided is not None:
        return decided, "compared as the value of a name, such as x = 5"
    number = quantity(truth)
    if number is not None:
        is_same = _is_number(truth, number, answer, finished)
        # The letters of 2mg, without a space, may be factors too.
        if not is_same and number.units and r"\text" not in truth and re.search(r"[\d}][A-Za-z]+", truth):
            is_same = expressions.same_expression(truth, answer, None)
        return is_same, "compared as numbers with their units"
    worded = _LAST_WORDS.fullmatch(truth)
    if worded and not expressions.names_its_unit(truth) and expressions.is_constant(worded["core"]):
        # An answer may omit, but not change, an unknown unit or other words after the truth's number.
        words = squeezed(TEXT.sub(r" \1", worded["words"]))
        answer = TEXT.sub(r" \1", answer)
        if answer.endswith(words):
            answer = answer.removesuffix(words).strip()
        return _compared(worded["core"], answer, finished)
    truth, answer = _as_vector(truth, answer), _as_vector(answer, truth)
    truth, answer = _without_indices(truth, answer), _without_indices(answer, truth)
    if r"{cases}" in truth + answer and expressions.same_expression(truth, answer, None):
        return True, "compared as expressions"
    decided = expressions.same_region(truth, answer)
    if decided is not None:
        return decided, "compared as regions of the number line"
    wanted = _spread(truth)
    got = _spread(unnamed(answer))
    if r"\pi" in truth or "°" in truth:
        true_solutions = _unordered_items(wanted, truth)
        if expressions.same_solutions(true_solutions, _unordered_items(got, unnamed(answer))):
            return True, "compared as general solutions"
    if wanted is not None:
        decided = _same_structure(wanted, got, answer, finished)
        if decided is not None:
            return decided, "compared item by item"
    return expressions.same_expression(truth, answer, quantity(unnamed(answer))), "compared as expressions"


def _is_labeled_choice(choice: re.Match, answer: str, finished: bool) -> bool:
    """Compares with a choice's letter and text, such as "(A) 5"; an answer may omit one of them."""
    letter = choice["marked"] or choice["label"]
    value = answer
    labeled = _LABELED.fullmatch(answer)
    if labeled is not None:
        if letter not in (labeled["marked"], labeled["label"]):
            return False
        value = labeled["value"]
    if literal.decided(f"({letter})", answer):
        return True
    return _same(choice["value"].strip(), value, finished)


def _unordered_items(items: "Structure | None", text: str) -> list[str]:
    """The items of a set or list; the text itself if it is neither."""
    if items is not None and items.is_unordered:
        return items.items
    return [text]


def _as_vector(text: str, other_text: str) -> str:
    r"""A tuple or column as a sum of unit vectors if the second text is such a sum: (1,2) is \hat{i}+2\hat{j}."""
    if r"\hat{" not in other_text or not expressions.UNIT_VECTOR.search(other_text):
        return text
    column = structure(text)
    if column is None or column.kind not in ("<>", "()", "[]", f"{len(column.items)} rows") or len(column.items) > 3:
        return text
    return "+".join(rf"({item})\hat{{{axis}}}" for item, axis in zip(column.items, "ijk", strict=False))


def _without_indices(text: str, other_text: str) -> str:
    """The roots x_1=2, x_2=5 as x=2, x=5 if the second text names both x, or is a set."""
    letters = _INDEXED.findall(text)
    if len(letters) < 2 or len({*letters}) > 1:
        return text
    is_named = re.search(rf"(?<![A-Za-z\\]){letters[0]} ?(?:=|\\in(?![a-z]))", other_text)
    if is_named or other_text.startswith(r"\{"):
        return _INDEXED.sub(r"\1=", text)
    return text


def _in_one_form(truth: str, answer: str) -> tuple[str, str]:
    """Removes parts that one side may omit: "the answer is", set builders, domains, thousands separators."""
    answer = _TEXT_ANSWER_IS.sub(_in_text, answer)
    texts = [truth, _ANSWER_IS.sub("", answer.strip(), count=1).strip()]
    texts = _without_builders(texts)
    texts = [_MAPPED.sub(_function_name, text) for text in texts]
    texts = _without_domains([_LAST_CONDITION.sub(r",\1", text) for text in texts])
    if re.fullmatch(r"\d+(?: ?: ?\d+)+", truth):
        texts[1] = re.sub(r"(?<=\d) to (?=\d)", ":", texts[1])
    if "," in "".join(texts):  # a=b=2 is a=2, b=2
        texts = [_CHAIN.sub(_each_assigned, text) for text in texts]
    if "=" in texts[1] and _TUPLE.fullmatch(truth):  # (x,y)=(1,2) is x=1,y=2
        texts = [_TUPLE.sub(_assignments, text) for text in texts]
    truth, answer = texts
    if "," not in truth or not _THOUSANDS.fullmatch(answer):  # 1,234 may be two items if the truth has several
        answer = without_thousands(answer)
    return without_thousands(truth), answer


def _in_text(match: re.Match) -> str:
    words = match[1].strip(" .")
    return rf"\text{{{words}}}" if words else ""


def _without_builders(texts: list[str]) -> list[str]:
    """Reduces set builders to their condition: {x | x > 3} becomes x > 3."""
    builders = [_BUILDER.fullmatch(text) for text in texts]
    if not any(builders):
        return texts
    # {x | x = 3} equals {3}; any other set that lists its members keeps its braces.
    are_single = all(
        builder or re.fullmatch(r"\\\{[^{},]*\\\}", text) for builder, text in zip(builders, texts, strict=True)
    )
    reduced = []
    for builder, text in zip(builders, texts, strict=True):
        if builder:
            text = builder["condition"]
        elif are_single:
            text = re.sub(r"^\\\{|\\\}$", "", text)
        reduced.append(text)
    return reduced


def _function_name(match: re.Match) -> str:
    r"""Writes "f: x \mapsto" as "f(x)="."""
    return f"{match[1]}({match[2]})=" if match[1] else ""


def _assignments(match: re.Match) -> str:
    """Writes (x,y)=(1,2) as x=1,y=2."""
    letters = split_outside_brackets(match[1])
    values = split_outside_brackets(match[2])
    return ",".join(f"{letter}={value}" for letter, value in itertools.zip_longest(letters, values, fillvalue=""))


def _each_assigned(match: re.Match) -> str:
    *letters, value = split_outside_brackets(match.group(), "=")
    return ",".join(f"{letter}={value}" for letter in letters)


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
        fields = dict.fromkeys(_DOMAIN.groupindex, "")
        if match:
            fields = match.groupdict(default="")
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
        is_whole = bool(core) and list(depths(core))[-1] == 0 and text.startswith(core)
        named = {*re.sub(r"\\[A-Za-z]+", "", core)}
        has_name = domain == "all" or named.issuperset(re.findall(r"\b[a-z]\b", fields["name"]))
        is_used = bool(domain) and is_whole and has_name
        if is_used:
            cores.append(core)
            domains.append(domain)
        else:
            cores.append(text)
            domains.append("")
        letters.append(fields["name"])
    is_periodic = any(re.search(r"\\pi(?![a-z])|°", core) for core in cores)
    wanted, got = letters
    is_renamed = all(domains) and wanted != got and len(wanted + got) == 2
    if is_renamed and _renamed(cores[0], got, "") == cores[0]:
        cores[1] = _renamed(cores[1], got, wanted)
    if all(domains) and domains[0] != domains[1]:
        return texts
    if is_periodic and "" in domains and ("N" in domains or "R" in domains):
        return texts
    return cores


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
        if "," not in text and re.fullmatch(_NAME, name.strip()):
            return values.strip()
        return text
    match = _NAMED.fullmatch(text) or _VALUE_FIRST.fullmatch(text)
    if match:
        return match["value"].strip()
    return text


def _as_named(truth: str, answer: str, finished: bool) -> bool | None:
    """Compares with a truth such as x = 5; the answer may omit the name x, but not change it."""
    wanted = _NAMED.fullmatch(truth)
    is_piecewise = wanted and wanted["value"].startswith(r"\begin{cases}")
    if not wanted or ("=" in wanted["value"] and not is_piecewise) or r"\in" in truth:
        return None
    if quantity(wanted["value"]) is None and not _spread(wanted["value"]):
        return None
    got = _NAMED.fullmatch(answer) or _VALUE_FIRST.fullmatch(answer)
    true_value = wanted["value"].strip()
    if got is None:
        if "=" in answer:
            return False
        return _same(true_value, answer, finished)
    true_name = squeezed(wanted["name"])
    name = squeezed(got["name"])
    if _BOLD.fullmatch(true_name) or _BOLD.fullmatch(name):  # v and \vec{v} may be bold instead
        true_name = expressions.MARKED_LETTER.sub(r"\2", true_name)
        name = expressions.MARKED_LETTER.sub(r"\2", name)
    if r"\text" not in got["name"] and true_name != name:
        return False
    return _same(true_value, got["value"].strip(), finished)


# --- Numbers.


def _is_number(truth: str, number: Quantity, answer: str, finished: bool) -> bool:
    answer = unnamed(_ABOUT.sub("", answer, count=1).strip())
    got = quantity(answer)
    if got is not None:
        return same_quantity(number, got)
    chain = split_outside_brackets(answer, "=")
    if len(chain) > 1:
        # 15/4 = 3.75 states one number several times; all other chains are workings and not answers.
        values = [quantity(value) for value in chain]
        return all(value is not None and same_quantity(number, value) for value in values)
    if number.units:
        got = quantity(answer, ascii_letters)  # 5 N is a quantity if the truth has a unit too
        if got is not None:
            return same_quantity(number, got)
    if any(unit.dimensions == (("degree", 1),) for unit in number.units):
        return expressions.same_expression(truth, answer, None)
    if finished or r"\pm" in answer:
        return False
    return expressions.same_expression(truth, answer, None)


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
    r"""A text's structure, in which an item with one \pm is two items: ±3 is the list 3, −3."""
    whole = structure(text)
    kind = "list"
    if whole is not None and whole.is_unordered:
        kind = whole.kind
    items = _unordered_items(whole, text)
    signed = []
    for item in items:
        parts = re.split(r"\\pm(?!od)", item)
        positive = re.sub(r"(^|[(\[{,=] ?)\+", r"\1", "+".join(parts).strip())
        negative = "-".join(parts).strip()
        if re.fullmatch(r"-\([^()]*,[^()]*\)", negative):  # The item is minus a tuple.
            entries = split_outside_brackets(negative[2:-1])
            negative = f"({','.join(f'-({entry})' for entry in entries)})"
        if len(parts) == 2:
            signed += [positive.strip(), negative]
        else:
            signed.append(item)
    if len(signed) > len(items) and len(set(_item_names(items))) < 2:
        return Structure(kind, signed)
    if re.fullmatch(r"[A-Z] ?\([^()]*,[^()]*\)", text):
        text = text[1:].strip()  # the point P(1,2) is the pair (1,2)
    return structure(text)


def _item_names(items: list[str]) -> list[str]:
    """The names of the items that are assignments, such as x of x = 5."""
    names = []
    for item in items:
        match = _NAMED.fullmatch(item)
        if match:
            names.append(match["name"])
    return names


def _same_structure(truth: Structure, got: Structure | None, answer: str, finished: bool) -> bool | None:
    """Compares items; None if the answer has no items but may be an expression with the same value."""
    if got is None:
        return None if re.search(r"\\begin|\^", answer) else False
    true_names = _item_names(truth.items)
    if true_names and len(true_names) == len(truth.items):  # The items are assignments such as x=2, y=3, or x=2, x=3.
        if len(set(true_names)) == 1:
            return _same_items(truth, got, finished)
        if (truth.kind == "or") is not (got.kind == "or"):
            return False  # x=1 or y=2 is not x=1, y=2
        true_items = truth.items
        items = got.items
        item_names = _item_names(items)
        if len(set(true_names)) == len(items) and sorted(true_names) == sorted(item_names):
            true_items = _sorted_by_name(true_items, true_names)
            items = _sorted_by_name(items, item_names)
        return _all_same(true_items, items, finished)
    if truth.is_unordered:
        return got.is_unordered and _same_items(truth, got, finished)
    column = f"{len(truth.items)} rows"
    equal_kinds = {"()": {"<>", "list"}, "<>": {"()", "[]", "list", column}, column: {"<>"}}
    if got.kind != truth.kind and got.kind not in equal_kinds.get(truth.kind, ()):
        return False
    return _all_same(truth.items, got.items, finished)


def _sorted_by_name(items: list[str], names: list[str]) -> list[str]:
    return [item for _, item in sorted(zip(names, items, strict=True))]


def _all_same(truths: list[str], answers: list[str], finished: bool) -> bool:
    if len(truths) != len(answers):
        return False
    return all(_same(truth, answer, finished) for truth, answer in zip(truths, answers, strict=True))


def _same_items(truth: Structure, got: Structure, finished: bool) -> bool:
    def are_same(true_item: str, item: str) -> bool:
        return _same(true_item, item, finished)

    if truth.kind != "{}":
        return expressions.matched(truth.items, got.items, are_same)
    # Sets may repeat members, so each member needs an equal member on the other side, and no more.
    are_found = [False] * len(got.items)
    has_all = True
    for true_item in truth.items:
        matches = [are_same(true_item, item) for item in got.items]
        has_all = has_all and any(matches)
        are_found = [is_found or matches for is_found, matches in zip(are_found, matches, strict=True)]
    return has_all and all(are_found)


def structure(text: str) -> Structure | None:
    """The structure of a complete text in the notation of `notation.plain`; None if the text is a single item."""
    cases = _CASES.fullmatch(text)
    if cases:
        return Structure("list", [_case(row) for row in matrix_rows(cases[2])])
    vector = re.fullmatch(r"\\langle ?(.*)\\rangle", text)
    if vector:
        return Structure("<>", split_outside_brackets(vector[1]))
    matrix = _MATRIX.fullmatch(text)
    if matrix and r"\begin" not in matrix[2]:
        rows = matrix_rows(matrix[2])
        return Structure(f"{len(rows)} rows", list(itertools.chain.from_iterable(rows)))
    if text.replace(" ", "") in ("\\emptyset", "\\{\\}"):
        return Structure("{}", [])
    # "x<1 or x>2" is one region and not a list.
    separated = text
    if not re.search(r"[<>]|\\(?:le|ge)(?![a-z])", text):
        separated = _OR.sub(",", _AND.sub(",", text))
    items = split_outside_brackets(separated)
    if len(items) > 1 and all(items):
        kind = "or" if _OR.search(text) else "list"
        return Structure(kind, items)
    match = _ENCLOSED.fullmatch(text)
    if not match:
        return None
    opening, inside, closing = match.groups()
    levels = [0, *depths(inside)]
    if min(levels) != 0 or levels[-1] != 0:  # The last bracket does not close the first one.
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


def _case(cells: list[str]) -> str:
    """A row of cases as one text: a statement, or the pair of a value and its condition."""
    cells = [_CONDITION.sub("", _CONDITION.sub("", cell)).strip() for cell in cells]
    cells[1:] = [re.sub(r"^\(([^()]*)\)$", r"\1", cell) for cell in cells[1:]]
    if len(cells) == 1:
        return cells[0]
    if cells[1][:1] in ("=", "<", ">"):  # The row is a relation with an alignment mark.
        return "".join(cells)
    return f"({','.join(cells)})"
