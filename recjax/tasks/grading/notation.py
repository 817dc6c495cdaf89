r"""Normalization of an answer's notation: removes markup without meaning, and unifies alternative notations.

Text stays marked as `\text{…}`. A dollar sign in the result means money.
"""

import re
import unicodedata

from recjax.tasks.grading.braces import braced

_GREEK = "alpha beta gamma delta epsilon zeta eta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega"
_GREEK += " Gamma Delta Lambda Xi Pi Sigma Phi Psi"
_CHARACTERS = {
    **{"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∗": "*"},
    **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "→": r"\to "},
    **{"∞": r"\infty ", "π": r"\pi ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "°": r"^{\circ}"},
    **{"∠": r"\angle ", "θ": r"\theta ", "ℝ": r"\mathbb{R}", "…": r"\ldots ", "“": "", "”": "", "\u2009": " "},
    **{
        "\u202f": " ",
        "\u00a0": " ",
        "\u3000": " ",
        "\n": " ",
        "\t": " ",
        "。": ".",
        "、": ",",
        "′": "'",
        "″": "''",
        "’": "'",
    },
    **{"µ": "μ", "\u2126": "Ω", "∖": r"\setminus ", "∣": r"\mid ", "∥": r"\parallel ", "⊥": r"\perp ", "⟂": r"\perp "},
    **{"∫": r"\int ", "∑": r"\sum ", "∏": r"\prod ", "≡": r"\equiv ", "∨": r"\vee ", "∧": r"\wedge ", "∉": r"\notin "},
    **{
        "⊂": r"\subset ",
        "⊆": r"\subseteq ",
        "⟨": r"\langle ",
        "⟩": r"\rangle ",
        "ℤ": r"\mathbb{Z}",
        "ℕ": r"\mathbb{N}",
    },
    **{"ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "△": r"\triangle "},
    **{letter: rf"\{name} " for letter, name in zip("αβγδεζηικλμνξρστυφχψωΓΔΛΞΠΣΦΨ", _GREEK.split(), strict=True)},
}
_COMMANDS = {
    **{"varnothing": r"\emptyset ", "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "leqslant": r"\le "},
    **{
        "leq": r"\le ",
        "geqslant": r"\ge ",
        "geq": r"\ge ",
        "lt": "<",
        "gt": ">",
        "ne": r"\neq ",
        "degree": r"^{\circ}",
    },
    **{"degree": r"^{\circ}", "degrees": r"^{\circ}", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]"},
    **{
        "cdots": r"\ldots ",
        "vert": "|",
        "lvert": "|",
        "rvert": "|",
        "colon": ":",
        "land": r"\wedge ",
        "lor": r"\vee ",
        "dots": r"\ldots ",
        "dotsc": r"\ldots ",
        "backslash": r"\setminus ",
        "smallsetminus": r"\setminus ",
        "imath": "i",
        "jmath": "j",
        "mod": r"\pmod ",
        "bar": r"\overline",
    },
    **{"bar": r"\overline", "mp": r"\pm ", "euro": "€", "pounds": "£", "cents": "¢"},
    **dict.fromkeys("left right displaystyle textstyle scriptstyle limits nolimits bf rm it sf tt".split(), " "),
    **dict.fromkeys("tiny small normalsize large Large LARGE huge Huge".split(), " "),
    **dict.fromkeys("big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr".split(), " "),
    **dict.fromkeys("quad qquad hfill nobreak".split(), " "),
}
_WRAPPERS = "mathbf mathit mathsf mathtt boldsymbol bm underline boxed fbox mathnormal mathring ensuremath".split()
_TEXTS = "text textbf textit textrm textsf texttt textnormal mbox mathrm hbox emph".split()
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_INVERSE = re.compile(r"\\(sin|cos|tan)\s*\^\s*\{?\s*-\s*1\s*\}?")
_WIDE = re.compile("[\uff01-\uff5e\u3300-\u33ff]")  # full-width forms, and units that are one character
_BETWEEN_DIGITS = r"(?:\{,\}(?:\\!)?|,\\!|\\!,(?:\\!)?|\\,|\\ |~)\s*"
_MARKED_THOUSANDS = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_BETWEEN_DIGITS}\d{{3}})+(?!\d)", re.A)


def plain(text: str) -> str:
    """Normalizes an answer's notation; see the module."""
    text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    text = re.sub(r"[¼-¾⅐-⅞]", lambda match: _vulgar(match.group()), text)
    text = re.sub(r"[⁰¹²³⁴-⁹⁻⁺]+", lambda match: f"^{{{match.group().translate(_SUPERSCRIPTS)}}}", text)
    text = _WIDE.sub(lambda match: unicodedata.normalize("NFKC", match.group()), text)
    text = "".join(_CHARACTERS.get(character, character) for character in text)
    text = _MARKED_THOUSANDS.sub(lambda match: re.sub(r"\D", "", match.group()), text)
    text = text.replace("{,}", ",").replace(r"\!", "").replace("{:}", ":")
    # A double backslash ends a row of a matrix; it does not start a spacing command.
    text = re.sub(r"(\\\\)|\\[;:, >]|(?<=.)~", lambda match: match.group(1) or " ", text)
    text = re.sub(r"\\[hv]space\*?\s*\{[^{}]*\}", " ", text)
    text = re.sub(r"(\d*\.\d*)\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?", r"\1\\overline{\2\3\4}", text)
    if all("=" in part and re.fullmatch(r"[^,;]*[^,;\s]", part.strip()) for part in re.split(r"\\q?quad", text)):
        text = re.sub(r"\\q?quad", ",", text)  # x=5 \\quad y=3 is two statements
    text = re.sub(r"\\([A-Za-z]+)", lambda match: _COMMANDS.get(match.group(1), match.group()), text)
    text = re.sub(r"\\color\s*\{[^{}]*\}", "", text)
    text = re.sub(r"\\textcolor\s*\{[^{}]*\}", r"\\mathbf", text)
    for name in _TEXTS:
        text = re.sub(rf"\\{name}\s*(?=\{{)", r"\\text", text)
    for name in _WRAPPERS:
        text = _unwrapped(text, f"\\{name}")
    text = text.replace(r"\text{%}", "%").replace(r"\text{\%}", "%").replace(r"\%", "%")
    while (shorter := re.sub(r"(\\text\{[^{}]*\^)\{(-?\d)\}", r"\1\2", text)) != text:
        text = shorter
    text = re.sub(r"\(\s*(?:\\text\s*\{\s*mod\s*\}|mod)\s*(\w+)\s*\)", r"\\pmod{\1}", text)
    text = text.replace(r"\bmod", r"\pmod ") if r"\equiv" in text else text
    text = re.sub(r"\\text\{\s*\^\{\\circ\}\s*\}", r"^{\\circ}", text)
    text = _ends(text)
    text = _fractions(text)
    text = _INVERSE.sub(r"\\arc\1 ", text)
    text = re.sub(r"(?<![A-Za-z\\])log(2|10)\s*(?=\()", r"\\log_{\1}", text)
    text = re.sub(r"(?<=[)\]}])\s*U\s*(?=[(\[\\])", r"\\cup ", text)
    text = re.sub(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}", text)
    text = re.sub(
        r"\\\{\s*\\begin\{(array|aligned)\}(?:\{[clr| ]*\})?(.*?)\\end\{\1\}\s*\.?\s*$",
        r"\\begin{cases}\2\\end{cases}",
        text,
    )
    text = re.sub(r"√\s*(\w|\d+|\([^()]*\))", r"\\sqrt{\1}", text)
    text = re.sub(r"\\sqrt\s*([A-Za-z]|\d(?!\d))", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi ", text)
    text = re.sub(r"(?<![A-Za-z\\])(?:infinity|inf)(?![A-Za-z])", r"\\infty ", text)
    text = re.sub(r"(?<=[\w)}])\s*\*\*\s*(?=[\w({-])", "^", text)
    text = re.sub(r"\\log\s*_\s*\{?e\}?(?![A-Za-z])", r"\\ln ", text)
    text = re.sub(r"(?:(?<=[(\[,])|^)\s*\+\s*\\infty", r"\\infty", text)
    text = re.sub(r"(?<=\d)i\b", " i", text)
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ")
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "°", text)
    text = re.sub(r"\^\s*\{?\s*((?:\\prime\s*)+)\}?", lambda match: "'" * match[1].count("p"), text)
    text = re.sub(r"\\text\{d\}\s*(?=[A-Za-z])|\\text\{d\}(?=\s*[\\}^])", "d", text)
    text = re.sub(r"\s+", " ", text)
    return re.sub(r"(?<=[(\[]) | (?=[)\]])", "", text).strip()


def _ends(text: str) -> str:
    """Removes math delimiters, Markdown marks and quotation marks around the whole text, and a final period."""
    before = None
    while before != text:
        before, text = text, text.strip()
        for opening, closing in (
            (r"\(", r"\)"),
            (r"\[", r"\]"),
            ("$$", "$$"),
            ("**", "**"),
            ("__", "__"),
            ("$", "$"),
            ('"', '"'),
        ):
            inside = text[len(opening) : len(text) - len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inside.strip() and not inside.endswith("\\"):
                text = inside
        if text.startswith("{") and braced(text) == text[1:-1] and not _top_level_comma(text[1:-1]):
            text = text[1:-1]
        text = re.sub(r"(?<!\.)\.$|(?<!\\)\\$|^\*\*", "", text)
    return text.replace(r"\$", "$")


def _top_level_comma(text: str) -> bool:
    return len(split(text)) > 1


def split(text: str, separators: str = ",;") -> list[str]:
    """Splits a text at separators that are outside all brackets."""
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        character = text[place]
        if character == "\\" and text[place + 1 : place + 2] in ("{", "}"):
            place += 1
            character = text[place]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0 and character in separators:
            parts.append(text[start:place])
            start = place + 1
        place += 1
    return [*parts, text[start:]]


def _unwrapped(text: str, command: str) -> str:
    """Removes a command that only changes the typeface of its argument."""
    pattern = re.compile(re.escape(command) + r"\s*(?=\{)")
    while match := pattern.search(text):
        inside = braced(text[match.end() :])
        if inside is None:
            break
        text = text[: match.start()] + "{" + inside + "}" + text[match.end() + len(inside) + 2 :]
    return text


def _fractions(text: str) -> str:
    r"""Rewrites \frac12, \frac 1 2, \frac1{2} and {1 \over 2} as \frac{1}{2}."""
    text = re.sub(r"^\{?\s*([^{}\\]+?)\s*\\over\s*([^{}\\]+?)\s*\}?$", r"\\frac{\1}{\2}", text.strip())
    text = re.sub(r"\\frac\s*([A-Za-z\d])\s*([A-Za-z]|\d(?!\d))", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([A-Za-z\d])\s*(?=\{)", r"\\frac{\1}", text)
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*([A-Za-z]|\d(?!\d))", r"\\frac\1{\2}", text)
    return re.sub(r"\\frac\s*\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}", r"\\frac{\1}{\2}", text)


def _vulgar(character: str) -> str:
    over, _, under = unicodedata.normalize("NFKD", character).partition("⁄")
    return f"\\frac{{{over}}}{{{under}}}"


def squeezed(text: str) -> str:
    """Removes spaces, except a space between two letters or digits."""
    return re.sub(r"(?<![\w.]) | (?![\w.])", "", text)


def words_of(text: str) -> str:
    r"""Reduces a text to lowercase words, without \text, quotation marks and a leading article."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    text = " ".join(text.casefold().replace('"', "").strip(" .").split())
    return re.sub(r"^(?:an?|the) (?=\w{2})", "", text)
