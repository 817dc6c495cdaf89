"""The embedded task: whole-number sums, differences and products over chosen ranges, every question once."""

import itertools
import operator
import re

import numpy as np

from recjax.config import ArithmeticTask
from recjax.tasks.problems import Problem

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_KIND = re.compile(r"(\d+)\.\.(\d+) ([-+*]) (\d+)\.\.(\d+)")
_LIMIT = 1_000_000


def arithmetic_problems(config: ArithmeticTask, seed: int) -> list[Problem]:
    """All distinct questions of the configured kinds, in an order drawn from the seed.

    Examples ahead of a question are of the same kinds and never the question itself.

    Raises:
        ValueError: a template without the question, or a kind that is not like "10..99 + 10..99", is empty, or spans
            over a million questions.
    """
    _check_template(config.template)
    questions = list(dict.fromkeys(itertools.chain.from_iterable(_questions(kind) for kind in config.problems)))
    if len(questions) <= config.examples + 1:
        raise ValueError(f"task.arithmetic.problems = {config.problems!r} gives only {len(questions)} questions")
    generator = np.random.default_rng([seed, 0])
    order = generator.permutation(len(questions))
    problems = []
    for index in order:
        others = generator.choice(len(questions) - 1, config.examples, replace=False)
        shots = [questions[other + (other >= index)] for other in others]
        lines = [f"{_ask(config, shot)} {_solve(shot)}\n" for shot in shots]
        problems.append(Problem("".join(lines) + _ask(config, questions[index]), str(_solve(questions[index]))))
    return problems


def _check_template(template: str) -> None:
    try:
        texts = {template.format(a=a, op=op, b=b) for a, op, b in [(1, "+", 2), (3, "+", 2), (1, "-", 2), (1, "+", 3)]}
    except (KeyError, IndexError, ValueError) as error:
        remedy = "it takes {a}, {op} and {b}"
        raise ValueError(f"task.arithmetic.template = {template!r}: {error!r}; {remedy}") from error
    if len(texts) < 4:
        raise ValueError(f"task.arithmetic.template = {template!r} must hold {{a}}, {{op}} and {{b}}")


def _questions(kind: str) -> list[tuple[int, str, int]]:
    match = _KIND.fullmatch(kind)
    if not match:
        raise ValueError(f"task.arithmetic.problems: {kind!r} is not of the form 'A..B op C..D' with op one of + - *")
    first, last, symbol, other_first, other_last = match.groups()
    left, right = range(int(first), int(last) + 1), range(int(other_first), int(other_last) + 1)
    if not 0 < len(left) * len(right) <= _LIMIT:
        raise ValueError(f"task.arithmetic.problems: {kind!r} spans {len(left) * len(right)} questions; 1 to {_LIMIT}")
    return [(a, symbol, b) for a in left for b in right]


def _ask(config: ArithmeticTask, question: tuple[int, str, int]) -> str:
    a, symbol, b = question
    return config.template.format(a=a, op=symbol, b=b)


def _solve(question: tuple[int, str, int]) -> int:
    a, symbol, b = question
    return _OPERATIONS[symbol](a, b)
