"""The package reasoning_gym: its generators by name, and its scores with safeguards.

The package makes problems and scores completions. This module imports it on first use. Grading workers import it before
they start, so that the import does not count toward a completion's time limit.
"""

import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from recjax.grading.thinking import after_thoughts


def generator(name: str, options: Mapping[str, Any], **size_and_seed: int) -> Any:
    """Makes a generator of the package with its options: a data set of problems."""
    import reasoning_gym

    if name == "composite" and isinstance(options.get("datasets"), list):
        specification = sys.modules[reasoning_gym.factory.DATASETS[name][1].__module__].DatasetSpec
        options = {"datasets": [specification(**member) for member in options["datasets"]]}
    return reasoning_gym.create_dataset(name, **options, **size_and_seed)


def generated_entries(name: str, options: Mapping[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    """The first `count` problems of a generator."""
    data = generator(name, options, size=count, seed=seed)
    return [data[index] for index in range(count)]


def parse(completion: str) -> str | None:
    """The answer of a completion, or None."""
    text = after_thoughts(completion)
    _, tag, after = text.rpartition("<answer>")
    if tag:
        text, _, _ = after.partition("</answer>")
    return text.strip() or None


def grade(completion: str, answer: str, columns: Mapping[str, Any]) -> dict[str, float]:
    """The package's score of a completion, and its accuracy: 1 for the full score, else 0.

    Args:
        answer: the generator's answer.
        columns: a problem's columns, from `gym_problems`.
    """
    parsed = parse(completion)
    entry = columns["entry"]
    source = entry["metadata"].get("source_dataset", columns["generator"])
    if parsed is None:
        return {"accuracy": 0.0, "score": 0.0}
    score = 0.0
    words = set(re.findall(r"[^\W\d]\w+", parsed))
    is_list = source not in _LISTS or "(" not in parsed
    is_formula = words <= _WORDS and not re.search(r"[\"'`_\[\]{}:;=@\\]|\.\s*[^\W\d]", parsed)
    if is_list and (is_formula or source not in _FORMULAS):
        scorer = _scorer(columns["generator"], json.dumps(columns["options"]))
        # Some scorers raise for an answer that they cannot read.
        with contextlib.suppress(Exception):
            if source not in _TOO_KIND or _TOO_KIND[source](parsed, answer):
                score = float(scorer.score_answer(parsed, entry))
    return {"accuracy": float(score >= 1), "score": score}


# Generators with scorers that run an answer as Python: as a list, or as a formula. Other answers get no score.
_LISTS = set("binary_matrix n_queens spiral_matrix string_insertion".split())
_FORMULAS = set("countdown intermediate_integration polynomial_multiplication puzzle24 simple_integration".split())
_WORDS = set("sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt pi Abs Rational Integral".split())


# Extra condition for each scorer that gives wrong answers the full score, such as "0" for every coin_flip.
_TOO_KIND: dict[str, Callable[[str, str], bool]] = {
    "coin_flip": lambda parsed, answer: abs(Fraction(parsed) - Fraction(answer)) <= 1e-4,
    "complex_arithmetic": lambda parsed, answer: "nan" not in parsed.lower(),
    "game_of_life_halting": lambda parsed, answer: parsed == answer,
}


@functools.cache
def _scorer(name: str, options: str) -> Any:
    return generator(name, json.loads(options))
