"""Scores of completions for reasoning_gym's problems: the package's own, with safeguards that its scorers lack.

Unlike `recjax.tasks.grading.gym_package`, this module imports the package immediately. The grading process imports
this module before it forks workers, so that the import does not count toward a completion's time limit.
"""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import reasoning_gym  # noqa: F401  (see above)

from recjax.tasks.grading.gym_package import generator as make_generator
from recjax.tasks.grading.thinking import after_thoughts


def parse(completion: str) -> str | None:
    """The answer of a completion, or None."""
    text = after_thoughts(completion)
    _, tag, after = text.rpartition("<answer>")
    answer = (after.partition("</answer>")[0] if tag else text).strip()
    return answer or None


def grade(completion: str, answer: str, columns: Mapping[str, Any]) -> dict[str, float]:
    """The package's score of a completion, and its accuracy: 1 for the full score, else 0.

    Args:
        answer: the generator's answer.
        columns: a problem's columns, from `gym_problems`.
    """
    given, entry = parse(completion), columns["entry"]
    generator = entry["metadata"].get("source_dataset", columns["generator"])
    score = 0.0
    if given is not None and _may_be_run(given, generator):
        scorer = _cached_generator(columns["generator"], json.dumps(columns["options"]))
        # Some scorers raise for an answer that they cannot read.
        with contextlib.suppress(Exception):
            if generator not in _TOO_KIND or _TOO_KIND[generator](given, answer):
                score = float(scorer.score_answer(given, entry))
    return {"accuracy": float(score >= 1), "score": score}


# Generators with scorers that run an answer as Python: as a list, or as a formula.
_LISTS = set("binary_matrix n_queens spiral_matrix string_insertion".split())
_FORMULAS = set("countdown intermediate_integration polynomial_multiplication puzzle24 simple_integration".split())
_WORDS = set("sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt pi Abs Rational Integral".split())


def _may_be_run(answer: str, generator: str) -> bool:
    """False if the package would run the answer as Python and the answer is more than a list or a formula."""
    if generator in _LISTS:
        return "(" not in answer
    if generator in _FORMULAS:
        words = set(re.findall(r"[^\W\d]\w+", answer))
        return words <= _WORDS and not re.search(r"[\"'`_\[\]{}:;=@\\]|\.\s*[^\W\d]", answer)
    return True


# Scorers that give some wrong answers the full score, such as "0" for every coin_flip, and an additional condition.
_TOO_KIND: dict[str, Callable[[str, str], bool]] = {
    "coin_flip": lambda given, answer: abs(Fraction(given) - Fraction(answer)) <= 1e-4,
    "complex_arithmetic": lambda given, answer: "nan" not in given.lower(),
    "game_of_life_halting": lambda given, answer: given == answer,
}


@functools.cache
def _cached_generator(name: str, options: str) -> Any:
    return make_generator(name, json.loads(options))
