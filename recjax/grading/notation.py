r"""Normalization of an answer's notation: removes markup without meaning, and unifies alternative notations.

Text stays marked as `\text{…}`. A dollar sign in the result means money.
"""

import itertools
import re
import unicodedata
from collections.abc import Iterator


def _table(rows: str) -> dict[str, str]:
    """Maps every other word to the word after it; a command gets a space after its name unless braces follow it."""
    words = rows.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    table = {}
    for old, new in pairs:
        if re.fullmatch(r"\\(?!frac|overline|vec)[A-Za-z]+", new):
            new += " "
        table[old] = new
    return table


_CHARACTERS = _table(r"""
− - – - ‒ - ‐ - × \times ✕ \times ⨯ \times • \cdot ∙ \cdot ‧ \cdot ⁄ / ∕ / ⩽ \le ⩾ \ge ≦ \le ≧ \ge º ^{\circ} ˚ ^{\circ}
∶ : ‖ \| ⌊ \lfloor ⌋ \rfloor ⌈ \lceil ⌉ \rceil ∂ \partial ∇ \nabla ⇒ \Rightarrow ⇔ \Leftrightarrow ∝ \propto ≅ \cong
× \times · \cdot ⋅ \cdot ÷ \div ∗ * ≤ \le ≥ \ge ≠ \neq ≈ \approx ± \pm ∓ \mp → \to ∞ \infty ∪ \cup ∩ \cap
∅ \emptyset ∈ \in ∉ \notin ° ^{\circ} ∠ \angle … \ldots 。 . 、 , ′ ' ″ '' ’ ' ∖ \setminus ∣ \mid ∥ \parallel ⊥ \perp
⟂ \perp ∫ \int ∑ \sum ∏ \prod ≡ \equiv ∨ \vee ∧ \wedge ⊂ \subset ⊆ \subseteq ⟨ \langle ⟩ \rangle ℝ \mathbb{R}
ℤ \mathbb{Z} ℕ \mathbb{N} ℚ \mathbb{Q} ℂ \mathbb{C} △ \triangle α \alpha β \beta γ \gamma δ \delta ε \epsilon ζ \zeta
η \eta θ \theta ι \iota κ \kappa λ \lambda μ \mu ν \nu ξ \xi π \pi ρ \rho σ \sigma τ \tau υ \upsilon φ \phi χ \chi
ψ \psi ω \omega Γ \Gamma Δ \Delta Λ \Lambda Ξ \Xi Π \Pi Σ \Sigma Φ \Phi Ψ \Psi
""")
_CHARACTERS |= {"\u00b5": "μ", "\u2126": "Ω", "“": "", "”": "", "ℓ": r"\ell ", **dict.fromkeys("\u3000\n\t", " ")}
_TRANSLATION = str.maketrans(_CHARACTERS)
_COMMANDS = _table(r"""
varnothing \emptyset dfrac \frac tfrac \frac cfrac \frac leqslant \le leq \le geqslant \ge geq \ge lt < gt > ne \neq
degree ^{\circ} degrees ^{\circ} lbrace \{ rbrace \} lbrack [ rbrack ] vert | lvert | rvert | colon : land \wedge
lor \vee cdots \ldots dots \ldots dotsc \ldots backslash \setminus smallsetminus \setminus mod \pmod
bigcup \cup sqcup \cup bigsqcup \cup bigcap \cap empty \emptyset nicefrac \frac sfrac \frac
varepsilon \epsilon varphi \phi vartheta \theta varrho \rho
bar \overline mp \pm overrightarrow \vec euro € pounds £ cents ¢
""")
_WITHOUT_MEANING = """
left right displaystyle textstyle scriptstyle limits nolimits bf rm it sf tt tiny small normalsize large Large LARGE
huge Huge big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr quad qquad hfill nobreak
"""
_COMMANDS |= {**dict.fromkeys(_WITHOUT_MEANING.split(), " "), "imath": " i", "jmath": " j"}
# Unicode's tags of compatibility characters: x², x₂, ½, full width, 𝑥, and units that are one character.
_FORMS: dict[str, str] = dict.fromkeys("<wide> <small> <font> <compat> <noBreak> <square>".split(), "%s")
_FORMS |= {"<super>": "^{%s}", "<sub>": "_{%s}", "<fraction>": r"\frac %s"}
_BETWEEN_DIGITS = r"(?:\{,\}(?:\\!)?|,\\!|\\!,(?:\\!)?|\\,|\\ |~|')\s*"
_GROUPS = rf"(?:{_BETWEEN_DIGITS}\d{{3}})+|(?:\\?_\d{{3}}){{2,}}"
_MARKED_THOUSANDS = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_GROUPS})(?!\d)", re.A)
_NOT_IN_A_WORD = r"(?<![A-Za-z\\])"


_NESTED = r"((?:[^{}]|\{[^{}]*\})*?)"
_MARKUP = [
    (r"\\frac (\d+)/(\d+)", r"\\frac{\1}{\2}"),
    (r"\\color\s*\{[^{}]*\}", ""),
    (r"\\textcolor\s*\{[^{}]*\}", ""),
    (r"\\mathrm\s+([A-Za-z])(?![A-Za-z])", r"\\text{\1}"),
    (r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|mathrm|hbox|emph|ce)\s*(?=\{)", r"\\text"),
    # Letters of vectors keep their mark, and unit vectors have one mark; other text may be bold.
    (r"\\(?:mathbf|boldsymbol|bm|pmb)(?![A-Za-z])\s*", r"\\mathbf"),
    (r"\\(mathbf|hat|vec)\s*(?:\{\s*([A-Za-z])\s*\}| ?([A-Za-z]))", r"\\\1{\2\3}"),
    (r"\\mathbf\{\s*([A-Z])([A-Z])\s*\}", r"\\mathbf{\1}\\mathbf{\2}"),
    (r"\\(hat|vec)\{\s*\\mathbf\{(\w)\}\s*\}|\\mathbf\{\s*\\(hat|vec)\{(\w)\}\s*\}", r"\\\1\3{\2\4}"),
    (r"\\(?:hat|vec|mathbf)\{([ijk])\}", r"\\hat{\1}"),
    (r"^\\mathbf\{(\w)\}$|\\mathbf(?!\{\w\})", r"\1"),
    (r"\\(?:math(?:it|sf|tt|normal|ring)|underline|f?boxed|ensuremath)\s*(?=\{)", ""),
    (r"^([^{}]*\\(?:over|choose)(?![A-Za-z])[^{}]*)$", r"{\1}"),
    (rf"\{{\s*{_NESTED}\s*\\over(?![A-Za-z])\s*{_NESTED}\s*\}}", r"{\\frac{\1}{\2}}"),
    (rf"\{{\s*{_NESTED}\s*\\choose(?![A-Za-z])\s*{_NESTED}\s*\}}", r"{\\binom{\1}{\2}}"),
    (r"^\\text\{([^{}A-Za-z]*\d[^{}A-Za-z]*\b(?:and|or)\b[^{}A-Za-z]*|[\d.]+(?:, ?[\d.]+)+)\}$", r"\1"),
    (r"\\text\{\\?%\}|\\%", "%"),
    (r"(?:\\text\{ ?)?(?<![\u4e00-\u9fff])或(?![\u4e00-\u9fff])(?: ?\})?", r"\\text{ or }"),
    (r"(?:\\text\{ ?)?(?<![\u4e00-\u9fff])[且和](?![\u4e00-\u9fff])(?: ?\})?", r"\\text{ and }"),
    *[(r"(\\text\{[^{}]*\^)\{(-?\d)\}", r"\1\2")] * 3,  # \text{kg m^{2} s^{-2}}
    (r"\(\s*(?:\\text\s*\{\s*mod\s*\}|mod)\s*(\w+)\s*\)", r"\\pmod{\1}"),
    (r"\\text\{\s*\^\{\\circ\}\s*\}", r"^{\\circ}"),
]
_NOTATION = [
    (r"\\frac\s*([A-Za-z\d])\s*([A-Za-z]|\d(?!\d))", r"\\frac{\1}{\2}"),
    (r"\\frac\s*([A-Za-z\d])\s*(?=\{)", r"\\frac{\1}"),
    (r"\\frac\s*(\{[^{}]*\})\s*([A-Za-z]|\d(?!\d))", r"\\frac\1{\2}"),
    (r"\\frac\s*\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}", r"\\frac{\1}{\2}"),
    (r"\\(sin|cos|tan)\s*\^\s*\{?\s*-\s*1\s*\}?", r"\\arc\1 "),
    (rf"{_NOT_IN_A_WORD}log(2|10)\s*(?=\()", r"\\log_{\1}"),
    (r"(?<=[)\]}])\s*U\s*(?=[(\[\\])", r"\\cup "),
    (r"(?:\{ ?\}|(?<![\w)\]}'|]))[_^](?:\{(\w+)\}|(\w)) ?(?:C|\\text\{C\})_(?:\{(\w+)\}|(\w))", r"\\binom{\1\2}{\3\4}"),
    (r"\\\{\s*\\begin\{(array|aligned)\}(?:\{[clr| ]*\})?(.*?)\\end\{\1\}\s*\.?\s*$", r"\\begin{cases}\2\\end{cases}"),
    (r"∛", "√[3]"),
    (r"∜", "√[4]"),
    (r"√(\[\d\])?\s*(\d+|\w|\([^()]*\))", r"\\sqrt\1{\2}"),
    (r"\\sqrt\s*([A-Za-z]|\d(?!\d))", r"\\sqrt{\1}"),
    (rf"{_NOT_IN_A_WORD}sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (rf"{_NOT_IN_A_WORD}pi(?![A-Za-z])", r"\\pi "),
    (r"\\text\{\s*(?:positive )?infinity\s*\}", r"\\infty"),
    (r"\\text\{\s*(?:negative|minus) infinity\s*\}", r"-\\infty"),
    (rf"{_NOT_IN_A_WORD}(?:infinity|inf)(?![A-Za-z])", r"\\infty "),
    (r"(?<=[\w)}])\s*\*\*\s*(?=[\w({-])", "^"),
    (r"\\log\s*_\s*\{?e\}?(?![A-Za-z])", r"\\ln "),
    (r"(?:(?<=[(\[\],;])|^)\s*\+\s*\\infty", r"\\infty"),
    (r"(?i)^(?:\\text\{)?\s*(?:all|the set of(?: all)?) real(?:s| numbers)\s*\}?$", r"\\mathbb{R}"),
    (r"(?i)^(?:\\text\{)?\s*(?:all|the set of(?: all)?) integers\s*\}?$", r"\\mathbb{Z}"),
    (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    (r"\\\{ ?(\w) ?\\in ?(\\mathbb\{[ZN]\}) ?(?:\\mid|\\vert|\||:) ?(.*)\\\}", r"\\{\1 \\mid \3,\1\\in \2\\}"),
    (r"(?<=\d) ?\\text\{ ?to ?\} ?(?=\d)", " to "),
    (r"P ?\(([^()|]*)\|([^()|]*)\)", r"P(\1\\mid \2)"),
    (r"\\mathcal\s*\{?O\}?\s*(?=\()", "O"),
    (r"_\{(\w)\}(?![\d.])", r"_\1"),
    (r"(?<=\d)i\b", " i"),
    ("<=", r"\\le "),
    (">=", r"\\ge "),
    (r"\^\s*\{?\s*\\circ\s*\}?", "°"),
    (r"\^\s*\{?\s*((?:\\prime\s*)+)\}?", lambda match: "'" * match[1].count("p")),
    (r"\\text\{d\}\s*(?=[A-Za-z])|\\text\{d\}(?=\s*[\\}^])", "d"),
    (r"\s+", " "),
    # In the French notation, ]1,2[ is an open interval.
    (r"(^|[ =]|\\(?:cup|cap|setminus|in))\]([^\[\]()]*[,;][^\[\]()]*)([\[\])])(?=$| ?\\)", r"\1(\2\3"),
    (r"(^|[ =]|\\(?:cup|cap|setminus|in))([(\[][^\[\]()]*[,;][^\[\]()]*)\[(?=$| ?\\)", r"\1\2)"),
    (r"(?<=[(\[]) | (?=[)\]])", ""),
]
_MARKUP = [(re.compile(old), new) for old, new in _MARKUP]
_NOTATION = [(re.compile(old), new) for old, new in _NOTATION]
_ARGUMENT = r" ?(?:\{([^{}]*)\}|(\w))"
_CHOSEN = re.compile(
    rf"(?<![\w'|^\\])(?:\\text ?\{{([CA])\}}|([CA])) ?(?:_{_ARGUMENT} ?\^{_ARGUMENT}|\^{_ARGUMENT} ?_{_ARGUMENT})"
)
_COUNT = re.compile(r"\d*[A-Za-z]?(?: ?[-+] ?\w)*")
_LISTED_MATRIX = re.compile(r"\[(\[[^\[\]]*\](?: ?, ?\[[^\[\]]*\])*)\]")  # [[1,2],[3,4]]
_PLAIN = re.compile(r"-?\d+(?:\.\d+)?", re.A)  # Most answers match this pattern.
_ENCLOSING = [(r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("**", "**"), ("__", "__"), ("$", "$"), ('"', '"')]


def plain(text: str) -> str:
    """Normalizes an answer's notation; see the module."""
    if _PLAIN.fullmatch(text):
        return text
    if not text.isascii():
        visible = (character for character in text if unicodedata.category(character) != "Cf")
        text = ""
        for tag, characters in itertools.groupby(visible, _tag):
            run = "".join(characters)
            if tag:
                run = _FORMS[tag] % unicodedata.normalize("NFKC", run)
            text += run
        text = "".join(str(unicodedata.decimal(character, character)) for character in text)
    text = text.translate(_TRANSLATION)
    text = _MARKED_THOUSANDS.sub(lambda match: re.sub(r"\D", "", match.group()), text)
    text = text.replace("{,}", ",").replace(r"\!", "").replace("{:}", ":")
    text = re.sub(r"\\left ?<(.*?)\\right ?>", r"\\langle \1\\rangle ", text)
    # A double backslash ends a row of a matrix; it does not start a spacing command.
    text = re.sub(r"(\\\\)|\\[;:, >]|(?<=.)~", lambda match: match.group(1) or " ", text)
    text = re.sub(r"\\[hv]space\*?\s*\{[^{}]*\}", " ", text)
    text = re.sub(r"(\d*\.\d*)\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?", r"\1\\overline{\2\3\4}", text)
    statements = [statement.strip() for statement in re.split(r"\\q?quad", text)]
    if all("=" in statement and re.fullmatch(r"[^,;]*[^,;\s]", statement) for statement in statements):
        text = re.sub(r"\\q?quad", ",", text)  # x=5 \\quad y=3 is two statements
    text = re.sub(r"\\([A-Za-z]+)", lambda match: _COMMANDS.get(match.group(1), match.group()), text)
    text = _rewritten(text, _MARKUP)
    if r"\bmod" in text and r"\equiv" in text:
        text = text.replace(r"\bmod", r"\pmod ")
    elif r"\pmod" not in text:
        text = re.sub(r"\) ?\\equiv(?![a-z])", ")=", text)  # Such functions are equal everywhere.
    text = _CHOSEN.sub(_binomial, _rewritten(_inner(text), _NOTATION))

    def matrix(listed: re.Match) -> str:
        rows = r"\\".join(re.split(r"\] ?, ?\[", listed[1][1:-1])).replace(",", "&")
        return rf"\begin{{matrix}}{rows}\end{{matrix}}"

    return _LISTED_MATRIX.sub(matrix, text).strip()


def _binomial(match: re.Match) -> str:
    """Writes C_n^k and A_n^k, counts of combinations and arrangements, as formulas; keeps a power such as C_1^2."""
    kind, lower, upper = filter(None, match.groups())
    if match.group().find("^") < match.group().find("_"):
        lower, upper = upper, lower
    if not _COUNT.fullmatch(lower) or not _COUNT.fullmatch(upper) or upper == "T":
        return match.group()
    if lower.isdigit() and (not upper.isdigit() or int(lower) < int(upper)):
        return match.group()
    if kind == "C":
        return rf"\binom{{{lower}}}{{{upper}}}"
    return rf"\frac{{({lower})!}}{{({lower}-({upper}))!}}"


def _tag(character: str) -> str:
    """Unicode's tag of a compatibility character, such as "<super>"; empty for other characters."""
    tag = unicodedata.decomposition(character).partition(" ")[0]
    if tag not in _FORMS or character in _CHARACTERS:
        return ""
    return tag


def _rewritten(text: str, rewrites: list) -> str:
    for old, new in rewrites:
        text = old.sub(new, text)
    return text


def _inner(text: str) -> str:
    """Removes math delimiters, Markdown marks and quotation marks around the text, and a final period."""
    before = None
    while before != text:
        before = text
        text = text.strip()
        for opening, closing in _ENCLOSING:
            inside = text[len(opening) : len(text) - len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inside.strip() and not inside.endswith("\\"):
                text = inside
        if text.startswith("{") and braced(text) == text[1:-1] and len(split_outside_brackets(text[1:-1])) == 1:
            text = text[1:-1]
        text = re.sub(r"(?<!\.)\.$|(?<!\\)\\$|^\*\*", "", text)
    return text.replace(r"\$", "$")


def braced(text: str) -> str | None:
    """The text inside the pair of braces that a text starts with; None if it starts with none or never closes it."""
    if not text.startswith("{"):
        return None
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[1 : match.start()]
    return None


def depths(text: str) -> Iterator[int]:
    """The number of open brackets after each character."""
    return itertools.accumulate((character in "([{") - (character in ")]}") for character in text)


def split_outside_brackets(text: str, separators: str = ",;") -> list[str]:
    """Splits a text at separators that are outside all brackets, and strips the parts."""
    parts = []
    start = 0
    for index, depth in enumerate(depths(text)):
        if depth == 0 and text[index] in separators:
            parts.append(text[start:index].strip())
            start = index + 1
    parts.append(text[start:].strip())
    return parts


def matrix_rows(text: str) -> list[list[str]]:
    r"""The entries of each row of a matrix or of cases, from the text between \begin and \end."""
    rows = []
    for row in re.split(r"\\\\(?:\[[^\]]*\])?", text):
        if row.strip():
            rows.append([entry.strip() for entry in row.split("&")])
    return rows


def squeezed(text: str) -> str:
    """Removes spaces, except a space between two letters or digits."""
    return re.sub(r"(?<![\w.]) | (?![\w.])", "", text)


def lowercase_words(text: str) -> str:
    r"""Reduces a text to lowercase words, without \text, quotation marks and a leading article."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    text = " ".join(text.casefold().replace('"', "").strip(" .").split())
    return re.sub(r"^(?:an?|the) (?=\w{2})", "", text)
