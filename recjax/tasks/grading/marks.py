"""The tokens of mathematical text: commands, letters and words that the reader knows."""

import re

RELATIONS = set(r"= < > \le \ge \neq \equiv \sim \cong \parallel \perp \mid \nmid \in \notin \subset \subseteq".split())
RELATIONS |= set(r"\supset \supseteq \to \Rightarrow \Leftrightarrow \iff \implies \propto \ll \gg \mapsto".split())
SET_OPERATORS = set(r"\cup \cap \setminus \wedge \vee \circ \oplus \otimes \bmod".split())
TRIGONOMETRY = "sin cos tan sec csc cot sinh cosh tanh sech csch coth".split()
INVERSES = {
    **{f"a{name}": f"arc{name}" for name in TRIGONOMETRY},
    **{f"arc{name}": f"arc{name}" for name in TRIGONOMETRY},
}
INVERSES |= {"arsinh": "arcsinh", "arcosh": "arccosh", "artanh": "arctanh", "tg": "tan", "ctg": "cot", "cosec": "csc"}
INVERSES |= {"arctg": "arctan", "sgn": "sign", "Re": "re", "Im": "im"}
FUNCTIONS = {
    *TRIGONOMETRY,
    *INVERSES,
    *INVERSES.values(),
    *"exp log ln lg lb abs det deg dim ker max min gcd".split(),
}
FUNCTIONS |= set("lcm sup inf arg cis floor ceil tr rank trace erf re im sign Pr Var Cov".split())
_WORDS = FUNCTIONS - {"inf", "sup", "ker", "re", "im", "Re", "Im", "Pr", "Var", "Cov"}  # recognized without a backslash
# Letters that are functions before a parenthesis; other letters are factors.
APPLIED = {*"fghFGHPQ", r"\phi", r"\varphi", r"\psi", r"\Gamma", r"\zeta", r"\Phi"}
GREEK = set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi omicron pi varpi rho"
    " varrho sigma varsigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi"
    " Omega infty ell hbar aleph emptyset partial nabla imath jmath star dagger ldots top".split()
)
_LATIN = {"star", "dagger", "top", "ell", "partial", "nabla", "ldots", "emptyset", "eta", "psi", "chi", "tau", "rho"}
ACCENTS = set("overline overrightarrow overleftarrow vec hat widehat tilde widetilde dot ddot check breve".split())
FIGURES = set("angle measuredangle triangle square odot bigtriangleup overparen arc".split())
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d*\.\d*\\overline\{\d+\}|\d+(?:\.\d+)?|\.\d+|[A-Za-z]+|\S", re.A)


def tokens(text: str) -> list[str]:
    """Splits a text into commands, numbers, names of known functions, runs of three or more capitals, and letters."""
    found = []
    for match in _TOKEN.finditer(text):
        run = match.group()
        if run[0].isalpha():
            if found and found[-1] in ("^", "_"):
                found, run = [*found, run[0]], run[1:]  # A^TBC
            found += _letters(run, text[match.end() : match.end() + 1])
        else:
            found.append(run)
    return found


def _letters(run: str, following: str) -> list[str]:
    if not run:
        return []
    if run in ("oo", "inf", "infty", "infinity"):
        return [r"\infty"]
    if run in _WORDS or run in ("pi", "sqrt") or (len(run) > 2 and run in GREEK and run not in _LATIN):
        return [f"\\{run}"]
    for size in range(len(run) - 1, 1, -1):
        # 2Rsin(A): the name ends the run of letters; sinx: the name begins it
        if following == "(" and run[-size:] in _WORDS | {"sqrt"}:
            return [*_letters(run[:-size], ""), f"\\{run[-size:]}"]
        if run[:size] in _WORDS and run[size:] == "x":
            return [f"\\{run[:size]}", "x"]
    return [run] if len(run) > 2 and run.isupper() else list(run)
