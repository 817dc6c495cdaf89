r"""A parser of mathematical text in the notation of `notation.plain`; its tree keeps every digit and letter.

The parser rejects a text with any unknown command, letter or mark; it never drops or guesses a part. Letters keep their
case, primes and subscripts; f^{-1}(x), A^T and \angle ABC are not powers or products.
"""

import functools
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from recjax.grading.notation import matrix_rows, split_outside_brackets
from recjax.grading.quantities import quantity

CONSTANTS = {r"\pi", "e", "i", r"\infty"}


class Node(NamedTuple):
    """A node of an expression's tree.

    Kinds, with their args: number (Fraction); name (text); add, mul and pow (nodes); call (text, nodes); relation
    (operators, sides); matrix (rows of nodes); cases (pairs of a value and its condition); sum, product, integral and
    limit (name, lower, upper or None, body).
    """

    kind: str
    args: tuple


class Unreadable(ValueError):
    """A text that the parser cannot read."""


def number(value: int | Fraction) -> Node:
    """The node of a number."""
    return Node("number", (Fraction(value),))


def inverse(node: Node) -> Node:
    """One over a node."""
    return Node("pow", (node, number(-1)))


def difference(a: Node, b: Node) -> Node:
    """One node minus another."""
    return Node("add", (a, Node("mul", (number(-1), b))))


def signed(sign: str | None, node: Node) -> Node:
    """A node with a sign: plus, minus, ± or none."""
    if sign == r"\pm":
        return Node("mul", (Node("name", (r"\pm",)), node))
    if sign != "-":
        return node
    if node.kind == "number":
        return number(-node.args[0])
    return Node("mul", (number(-1), node))


def names(node: Any) -> set[str]:
    """The unknowns of a tree, constants excluded."""
    if not isinstance(node, tuple):
        return set()
    if not isinstance(node, Node):
        return set().union(*map(names, node))
    if node.kind == "name":
        return {node.args[0]} - CONSTANTS
    if node.kind in ("sum", "product", "integral", "limit"):
        return names(node.args[1:]) - {node.args[0]}
    return names(node.args)


def walk(tree: Any) -> Iterator[Node]:
    """All nodes of a tree, or of a tuple of trees."""
    if not isinstance(tree, tuple):
        return
    parts = tree
    if isinstance(tree, Node):
        yield tree
        parts = tree.args
    for part in parts:
        yield from walk(part)


def contains(tree: Any, *wanted: str) -> bool:
    """True if a tree contains one of the texts, as a kind, a name, or the name of a function."""
    for node in walk(tree):
        if node.kind in wanted or any(isinstance(part, str) and part in wanted for part in node.args):
            return True
    return False


# --- The parser.

RELATIONS = set(
    r"= < > \le \ge \neq \equiv \sim \cong \parallel \perp \mid \nmid \in \notin \subset \subseteq \supset \supseteq"
    r" \to \Rightarrow \Leftrightarrow \iff \implies \propto \ll \gg \mapsto".split()
)
SET_OPERATORS = set(r"\cup \cap \setminus \wedge \vee \circ \oplus \otimes \bmod".split())
TRIGONOMETRY = "sin cos tan sec csc cot sinh cosh tanh sech csch coth".split()
INVERSES = {f"a{name}": f"arc{name}" for name in TRIGONOMETRY}
INVERSES |= {f"arc{name}": f"arc{name}" for name in TRIGONOMETRY}
INVERSES |= {"arsinh": "arcsinh", "arcosh": "arccosh", "artanh": "arctanh", "tg": "tan", "ctg": "cot", "cosec": "csc"}
INVERSES |= {"arctg": "arctan", "sgn": "sign", "Re": "re", "Im": "im"}
# Names in _WORDS and _UNSLASHED are recognized without a backslash too.
_WORDS = {
    *(*TRIGONOMETRY, *INVERSES, *INVERSES.values()),
    *"exp log ln lg lb abs det deg dim max min gcd lcm arg cis floor ceil tr rank trace erf sign".split(),
} - {"re", "im", "Re", "Im"}
FUNCTIONS = _WORDS | set("re im Re Im ker sup inf Pr Var Cov".split())
# Letters that are functions before a parenthesis; other letters are factors.
APPLIED = {*"fghFGHPQ", r"\phi", r"\varphi", r"\psi", r"\Gamma", r"\zeta", r"\Phi"}
_UNSLASHED = set(
    "alpha beta gamma delta epsilon varepsilon zeta theta vartheta iota kappa lambda omicron varpi varrho sigma upsilon"
    " varsigma phi varphi omega Gamma Delta Theta Lambda Sigma Upsilon Phi Psi Omega"
    " infty hbar aleph imath jmath".split()
)
GREEK = _UNSLASHED | set("eta mu nu xi pi rho tau chi psi Xi Pi ell emptyset partial star dagger ldots top".split())
ACCENTS = set(
    "overline overrightarrow overleftarrow vec hat widehat tilde widetilde dot ddot check breve"
    " mathbb mathbf mathcal mathscr mathfrak".split()
)
FIGURES = set("angle measuredangle triangle square odot bigtriangleup overparen arc".split())
_TOKEN = re.compile(
    r"\\[A-Za-z]+|\\.|\d*\.\d*\\overline\{\d+\}|\d+ ?\\frac\{\d+\}\{\d+\}|\d+(?:\.\d+)?|\.\d+|[A-Za-z]+|\S", re.A
)

_INFINITE = Node("name", (r"\infty",))
_ENCLOSED = {"|": "abs", r"\lfloor": "floor", r"\lceil": "ceil", r"\|": "norm"}
# names of vectors, of matrices
MARKED = re.compile(r"\\(?:vec|mathbf|hat)\{")
CAPITAL = re.compile(r"[A-Z](?:_.*)?$")
_CONNECTIVE = re.compile(r"(?i)\\text ?\{ ?(?:or|and|if|not) ?\}|\b(?:or|and|if|not)\b")  # These words are no factors.
BRACKETS = {"()", "(]", "[)", "[]", "set", r"\times"}
_LARGE = {r"\sum": "sum", r"\prod": "product", r"\int": "integral", r"\lim": "limit"}
_ENDS = RELATIONS | SET_OPERATORS | set(r"\pm \cdot \times \div \pmod \rfloor \rceil".split())
_MATRIX = re.compile(r"\\begin\{((?:p|b|B|v|V|small)?matrix|array)\}(?:\{[clr| ]*\})?(.*?)\\end\{\1\}")

_CASES = re.compile(r"\\begin\{(d?cases)\}(.*?)\\end\{\1\}")
_IF = re.compile(r"\\text ?\{ ?(?:if|for|when|where)? ?\}|\b(?:if|for|when)\b|[,;.] ?$", re.I)
_OTHERWISE = re.compile(r"\\text ?\{ ?(?:otherwise|else) ?\}|otherwise|else", re.I)
_COMPARISONS = {"=", "<", ">", r"\le", r"\ge", r"\neq"}


def tokens(text: str) -> list[str]:
    """Splits a text into commands, numbers, names of known functions, runs of three or more capitals, and letters."""
    pieces = []
    for match in _TOKEN.finditer(text):
        run = match.group()
        if run[0].isalpha():
            if pieces and pieces[-1] in ("^", "_"):
                # In A^TBC, only T is the exponent.
                pieces.append(run[0])
                run = run[1:]
            pieces += _letters(run, text[match.end() : match.end() + 1])
        else:
            pieces.append(run)
    return pieces


def _letters(run: str, following: str) -> list[str]:
    if not run:
        return []
    if run in ("oo", "inf", "infty", "infinity"):
        return [r"\infty"]
    if run in _WORDS or run in ("pi", "sqrt") or run in _UNSLASHED:
        return [f"\\{run}"]
    for size in range(len(run) - 1, 1, -1):
        # In 2Rsin(A), the name ends the run of letters; in sinx, it starts the run.
        if following == "(" and run[-size:] in _WORDS | {"sqrt"}:
            return [*_letters(run[:-size], ""), f"\\{run[-size:]}"]
        if run[:size] in _WORDS and run[size:] == "x":
            return [f"\\{run[:size]}", "x"]
    if len(run) > 2 and run.isupper():
        return [run]
    return list(run)


@functools.lru_cache(maxsize=1024)
def parse_math(text: str, marks: frozenset[tuple[str, str]] = frozenset()) -> Node | None:
    """Parses a complete text into a tree; None if any part of the text is unknown.

    Args:
        marks: letters of the text and the names that they stand for: a vector, such as i and \\hat{i}, or
            themselves for letters that are never functions.
    """
    try:
        reader = _Reader(text, marks)
        node = reader.statement()
    except (ValueError, RecursionError):
        return None
    if reader.token is not None:
        return None
    return node


class _Reader:
    """A recursive descent parser: each method reads the longest text of its kind at the current position."""

    def __init__(self, text: str, marks: frozenset[tuple[str, str]]):
        self.matrices = []
        self.marks = dict(marks)

        def set_apart(match: re.Match) -> str:
            rows = tuple(tuple(map(parse_math, row)) for row in matrix_rows(match[2]))
            if len(set(map(len, rows))) != 1 or any(None in row for row in rows):
                raise Unreadable(match.group())
            node = Node("matrix", rows)
            if match[1] == "vmatrix":
                node = Node("call", ("det", node))
            self.matrices.append(node)
            return rf" \matrix{{{len(self.matrices) - 1}}} "

        def cases_apart(match: re.Match) -> str:
            self.matrices.append(Node("cases", tuple(map(_case, matrix_rows(match[2])))))
            return rf" \matrix{{{len(self.matrices) - 1}}} "

        text = _MATRIX.sub(set_apart, _CASES.sub(cases_apart, text))
        if _CONNECTIVE.search(text):
            raise Unreadable(text)
        self.tokens = tokens(text)
        self.position = 0
        self.bars = ""  # This token closes the innermost |…| or \\|…\\|

    @property
    def token(self) -> str | None:
        if self.position >= len(self.tokens):
            return None
        return self.tokens[self.position]

    def next(self) -> str:
        if self.token is None:
            raise Unreadable("the text ends")
        self.position += 1
        return self.tokens[self.position - 1]

    def accept(self, *marks: str) -> str | None:
        if self.token in marks:
            return self.next()
        return None

    def expect(self, mark: str) -> None:
        if self.next() != mark:
            raise Unreadable(mark)

    def enclosed(self) -> str:
        """The text between braces, unparsed; without braces, the next token."""
        if not self.accept("{"):
            return self.next()
        depth = 1
        start = self.position
        while depth:
            depth += {"{": 1, "}": -1}.get(self.next(), 0)
        return "".join(self.tokens[start : self.position - 1])

    # --- From statements down to products.

    def statement(self) -> Node:
        sides = [self.sets()]
        operators = []
        while self.token in RELATIONS:
            operators.append(self.next())
            sides.append(self.sets())
        if any(map(_takes_anything, sides)):
            raise Unreadable("0 or infinity with more")
        node = sides[0]
        if operators:
            node = Node("relation", (tuple(operators), tuple(sides)))
        if self.accept(r"\pmod"):
            return Node("call", (r"\pmod", node, self.argument()))
        return node

    def sets(self) -> Node:
        node = self.ratio()
        while self.token in SET_OPERATORS:
            node = Node("call", (self.next(), node, self.ratio()))
        return node

    def ratio(self) -> Node:
        first = self.sum()
        ratios = []
        while self.accept(":"):
            ratios.append(Node("mul", (first, inverse(self.sum()))))
        if not ratios:
            return first
        if len(ratios) == 1:
            return ratios[0]
        return Node("call", ("ratio", *ratios))

    def sum(self) -> Node:
        sign = self.accept("+", "-", r"\pm")
        terms = [signed(sign, self.product())]
        while self.token in ("+", "-", r"\pm"):
            sign = self.next()
            terms.append(signed(sign, self.product()))
        if len(terms) == 1:
            return terms[0]
        return Node("add", tuple(terms))

    def product(self) -> Node:
        factors = [self.power()]
        while True:
            operator = self.accept("*", r"\cdot", r"\times")
            if operator:
                left = factors.pop()
                right = signed(self.accept("-"), self.power())
                kinds = {_order(left), _order(right)}
                if operator != r"\times" and kinds == {"vector"}:
                    factors.append(Node("call", ("dot", left, right)))
                elif operator == r"\times" and "" not in kinds:
                    name = r"\times" if "set" in kinds else "cross"
                    factors.append(Node("call", (name, left, right)))
                else:
                    factors += [left, right]
            elif self.accept("/", r"\div"):
                factors.append(inverse(signed(self.accept("-"), self.power())))
            elif self.starts_factor():
                factors.append(self.power())
            elif len(factors) == 1:
                return factors[0]
            elif factors[-1] == Node("name", (r"\ldots",)):
                raise Unreadable("0.333…")
            else:
                return Node("mul", tuple(factors))

    def starts_factor(self) -> bool:
        token = self.token
        if token is None or token in _ENDS:
            return False
        if token in ("|", r"\|"):
            return token != self.bars
        if token[0].isdigit():
            # x2 is not a product, but n2^n is one.
            before = self.tokens[self.position - 1]
            after = self.tokens[self.position + 1 : self.position + 2]
            return before in ("!", ")", "}") or after == ["^"]
        return token[-1].isalpha() or token in ("(", "[", "{")

    def power(self) -> Node:
        node = self.primary()
        raised = False
        while True:
            if self.token == "^" and not raised:
                self.next()
                node = self.raised(node)
                raised = True
            elif self.accept("!"):
                name = "factorial2" if self.accept("!") else "factorial"
                node = Node("call", (name, node))
                raised = False
            elif self.accept("%"):
                node = Node("mul", (node, number(Fraction(1, 100))))
            elif self.accept("°"):
                node = Node("mul", (node, Node("name", (r"\pi",)), number(Fraction(1, 180))))
            elif self.token == "^":  # The base is raised twice.
                raise Unreadable(self.token)
            else:
                return node

    def raised(self, base: Node) -> Node:
        start = self.position
        mark = self.enclosed()
        is_transposed = mark == r"\top" or (mark == "T" and _is_matrix_name(base))
        if is_transposed and base.kind == "call" and base.args[0] in ("()", "[]"):
            return Node("matrix", tuple((entry,) for entry in base.args[1:]))  # (1,2,3)^T
        if is_transposed:
            return Node("call", ("transpose", base))
        if mark in ("*", r"\star", r"\dagger", "+", "-"):
            return Node("call", (f"^{mark}", base))
        self.position = start
        power = signed(self.accept("-"), self.primary())
        if (power == number(0) and names(base)) or (base in (number(0), number(1)) and names(power)):
            raise Unreadable("0 and 1 as powers hide the other part")
        if power == number(-1) and _is_matrix_name(base) and all(map(CAPITAL.match, names(base))):
            return Node("call", ("^-1", base))  # The base may be a matrix; a denominator is a number.
        return Node("pow", (base, power))

    # --- Single operands.

    def primary(self) -> Node:
        token = self.next()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return self.numeral(token)
        if token in ("(", "[", "{", r"\{"):
            return self.group(token)
        if token in _ENCLOSED:
            closing = token.replace(r"\l", r"\r")
            bars = self.bars
            self.bars = closing
            inside = self.sum()
            self.expect(closing)
            self.bars = bars
            return Node("call", (_ENCLOSED[token], inside))
        if token[0].isalpha() and token.isascii():
            return self.named(token)
        return self.command(token)

    def numeral(self, token: str) -> Node:
        """A decimal, or a mixed number such as 3\\frac{1}{2}, which is no product."""
        if "\\" in token:
            amount = quantity(token)
            if amount is None:
                raise Unreadable("numbers apart")
            value = amount.value
        else:
            value = Fraction(token)
        following = self.token or ""
        if following.startswith(tuple("0123456789._")) or following == r"\overline":
            raise Unreadable("numbers apart")
        return number(value)

    def group(self, opening: str) -> Node:
        bars = self.bars
        self.bars = ""
        items = [self.statement()]
        while self.accept(",", ";"):
            items.append(self.statement())
        closing = self.next()
        self.bars = bars
        match opening, closing, len(items):
            case ("{", "}", 1) | ("(", ")", 1) | ("[", "]", 1):
                return items[0]
            case (r"\{", r"\}", _):
                return Node("call", ("set", *items))
            case ("(" | "[", ")" | "]", count) if count > 1:
                return Node("call", (opening + closing, *items))
        raise Unreadable(closing)

    def named(self, token: str) -> Node:
        token = self.marks.get(token, token)
        name = token
        if self.accept("_"):
            name += f"_{self.enclosed()}"
        while self.accept("'"):
            name += "'"
        start = self.position
        if self.accept("^"):
            power = self.enclosed()
            primes = re.fullmatch(r"(?:\\prime)+|\(\d\)|\(n\)", power)
            is_inverse = power == "-1" and self.token == "(" and token in APPLIED
            if primes or is_inverse:
                name += f"^{power}"
            else:
                self.position = start
        if name == "C" and self.token == "(":
            arguments = self.arguments()
            if len(arguments) == 2:
                return Node("call", ("binomial", *arguments))
            self.position = start
        # In v(t) = …, any letter is a function.
        defined = start == 1 and self.tokens[3:5] == [")", "="] and self.tokens[2].isalpha()
        is_applied = token in APPLIED and token not in self.marks
        if self.token == "(" and (is_applied or defined or name[-1] == "'" or "^" in name):
            return Node("call", (f"{name}()", *self.arguments()))
        return Node("name", (name,))

    def arguments(self) -> tuple[Node, ...]:
        self.next()
        group = self.group("(")
        if group.kind == "call" and group.args[0] == "()":
            return group.args[1:]
        return (group,)

    def argument(self, most: int = 1) -> Node:
        """A command's argument: braces, parentheses or a token; the first of a number's at most `most` digits."""
        token = self.token or ""
        if token.isdigit():
            if len(token) > most:
                raise Unreadable(r"\sqrt12")
            if len(token) > 1:
                self.tokens[self.position] = token[1:]
            else:
                del self.tokens[self.position]
            return number(int(token[0]))
        if token in (r"\sqrt", r"\frac") or token[1:] in GREEK or token in ("(", "{") or token.isalnum():
            return self.primary()
        raise Unreadable(token)

    def command(self, token: str) -> Node:
        name = ""
        if token[0] == "\\":
            name = token[1:]
        if name in GREEK:
            return self.named(token)
        if name in FUNCTIONS:
            return self.function(name)
        if name in ACCENTS:
            content = self.enclosed()
            if content.isdigit():
                raise Unreadable(content)
            return self.named(f"{token}{{{content}}}")
        if name in FIGURES:
            letters = ""
            if self.token == "{":
                letters = self.enclosed()
            while not letters or (self.token or "").isupper():
                letters += self.next()
            return self.named(f"{token} {min(letters, letters[::-1])}")
        if token in _LARGE:
            return self.large(_LARGE[token])
        match token:
            case r"\frac":
                return self.fraction()
            case r"\binom" | r"\dbinom" | r"\tbinom":
                return Node("call", ("binomial", self.argument(2), self.argument()))
            case r"\sqrt":
                order = number(2)
                if self.accept("["):
                    order = self.sum()
                    self.expect("]")
                return Node("pow", (self.argument(), inverse(order)))
            case r"\text" | r"\operatorname":
                return self.text()
            case r"\matrix":
                return self.matrices[int(self.enclosed())]
        raise Unreadable(token)

    def function(self, name: str) -> Node:
        name = INVERSES.get(name, name)
        base = None
        power = None
        if self.accept("_"):
            if name not in ("log", "max", "min", "sup", "inf"):
                raise Unreadable(name)
            is_short = (self.token or "").isdigit() and len(self.tokens) > self.position + 1
            if is_short:  # \log_2 3 and \log_10 x
                base = number(int(self.next()))
            else:
                base = self.argument(most=9)
        if self.accept("^"):
            power = signed(self.accept("-"), self.primary())
            if power == number(-1) and name in TRIGONOMETRY:
                name = f"arc{name}"
                power = None
        if self.token == "(":
            node = Node("call", (name, *self.arguments()))
        elif name in ("max", "min", "gcd", "lcm") and self.token == r"\{":
            node = Node("call", (name, *self.primary().args[1:]))
        else:
            node = Node("call", (name, self.bare_argument()))
        if base is not None:
            node = Node("call", (f"{name}_", *node.args[1:], base))
        if power is None:
            return node
        return Node("pow", (node, power))

    def bare_argument(self) -> Node:
        """A function's argument without parentheses: 2x of "sin 2x", but only x of "sin x cos y"."""
        factors = [self.power()]
        if self.tokens[self.position - 1] not in (")", "|"):
            while self.starts_factor() and self.token not in ("(", "[", "|"):
                if (self.token or "")[1:] in FUNCTIONS:
                    break
                factors.append(self.power())
        if len(factors) == 1:
            return factors[0]
        return Node("mul", tuple(factors))

    def fraction(self) -> Node:
        start = self.position
        over = self.enclosed()
        under = self.enclosed()
        for mark in ("d", r"\partial"):
            if over.startswith(mark) and re.match(rf"{re.escape(mark)}\^?\{{?\d?\}}?\\?[A-Za-z]", under):
                return Node("name", (f"{over}/{under}",))
        self.position = start
        return Node("mul", (self.argument(2), inverse(self.argument())))

    def text(self) -> Node:
        content = self.enclosed().replace("\\", "")
        if len(content) == 1 and content.isalpha():
            return self.named(content)
        if content in FUNCTIONS:
            return self.function(content)
        return Node("name", (f"\\text{{{content}}}",))

    def large(self, kind: str) -> Node:
        lower = upper = None
        for _ in range(2):
            if self.accept("_"):
                lower = self.argument()
            elif self.accept("^"):
                upper = self.argument()
        if kind == "integral":
            return self.integral(lower, upper)
        match lower:
            case Node("relation", ((operator,), (Node("name", (name,)), start))):
                is_limit = kind == "limit" and operator == r"\to" and upper is None
                is_finite = kind != "limit" and operator == "=" and upper is not None
                if is_limit or is_finite:
                    return Node(kind, (name, start, upper, self.product()))
        raise Unreadable(kind)

    def integral(self, lower: Node | None, upper: Node | None) -> Node:
        if lower is None or upper is None:
            raise Unreadable("integral")
        for index in range(self.position, len(self.tokens) - 4):
            if self.tokens[index : index + 3] == [r"\frac", "{", "d"] and self.tokens[index + 4] == "}":
                variable = self.tokens[index + 3]
                self.tokens[index + 2 : index + 4] = ["1"]
                return Node("integral", (variable, lower, upper, self.product()))
        ends = [index for index in range(self.position, len(self.tokens) - 1) if self.tokens[index] == "d"]
        if not ends:
            raise Unreadable("integral")
        variable = self.tokens[ends[-1] + 1]
        after = self.tokens[ends[-1] + 2 :]
        self.tokens = self.tokens[: ends[-1]]
        body = number(1)
        if self.token is not None:
            body = self.sum()
        if self.token is not None or not (variable.isalpha() or variable[1:] in GREEK):
            raise Unreadable("integral")
        self.tokens += after
        return Node("integral", (variable, lower, upper, body))


def _case(row: list[str]) -> tuple[Node, Node]:
    """The value and the condition in a row of cases.

    Raises:
        ValueError: the row is no value with a comparison, or with "otherwise".
    """
    cells = row
    if len(row) == 1:
        cells = split_outside_brackets(row[0])
    value, condition = (_IF.sub("", cell.strip()).strip() for cell in cells)
    tree = parse_math(value)
    if _OTHERWISE.fullmatch(condition):
        condition_tree = number(1)
    else:
        condition_tree = parse_math(condition)
    if tree is None or condition_tree is None or tree.kind == "relation":
        raise Unreadable("cases")
    has_comparison = condition_tree.kind == "relation" and _COMPARISONS.issuperset(condition_tree.args[0])
    if condition_tree != number(1) and not has_comparison:
        raise Unreadable("cases")
    return tree, condition_tree


def _order(node: Node) -> str:
    """The kind of factors that keep their order: "vector", "set", or "capital", a letter that may be either."""
    name = node.args[0]
    if node.kind == "name":
        if MARKED.match(name):
            return "vector"
        if "bb{" in name:
            return "set"
        if name[0].isupper():
            return "capital"
        return ""
    if node.kind == "call":
        if name == "cross":
            return "vector"
        if name in BRACKETS or name in SET_OPERATORS:
            return "set"
        return ""
    if node.kind in ("add", "mul") and any(_order(operand) == "vector" for operand in node.args):
        return "vector"
    return ""


def _takes_anything(node: Node) -> bool:
    """True for a product with the factor 0, or a product or sum with infinity: they hide their other parts."""
    if node.kind not in ("mul", "add"):
        return False
    operands = [operand for operand in node.args if operand not in (number(-1), Node("name", (r"\pm",)))]
    if len(operands) > 1:
        if _INFINITE in operands or signed("-", _INFINITE) in operands:
            return True
        if node.kind == "mul" and number(0) in operands:
            return True
    return node.kind == "mul" and any(map(_takes_anything, operands))


def _is_matrix_name(node: Node) -> bool:
    """True if a superscript T transposes the node: a name, a matrix, or a sum or product of matrices such as (AB)."""
    if node.kind in ("mul", "add"):
        return all(map(_is_matrix_name, node.args))
    if node.kind == "call":
        return node.args[0] in ("()", "[]")
    return node.kind in ("name", "matrix")
