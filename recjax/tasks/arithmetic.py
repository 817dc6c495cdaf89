"""The built-in task: whole-number sums, differences and products over configured ranges, each question once."""

import itertools
import operator
import re
import string

import numpy as np

from recjax.config import ArithmeticTask
from recjax.errors import UserError
from recjax.tasks.problems import Problem

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_KIND = re.compile(r"(\d+)\.\.(\d+) ([-+*]) (\d+)\.\.(\d+)")
_LIMIT = 1_000_000


def arithmetic_problems(config: ArithmeticTask, seed: int) -> list[Problem]:
    """All distinct questions of the configured kinds, shuffled by the seed; each kind is a difficulty.

    The examples before a question have the same kinds and never include the question itself.

    Raises:
        UserError: the template lacks the question; a kind is not like "10..99 + 10..99", is empty, or has over a
            million questions; or `worked` is set with kinds other than sums.
    """
    remedy = "must hold {a}, {op} and {b}, without a width or a conversion, and no other names; {op} may be missing if"
    remedy += " all problems have one operation"
    try:
        fields = {tuple(field) for _, *field in string.Formatter().parse(config.template) if field[0] is not None}
    except ValueError as error:
        raise UserError(problem=f"task.arithmetic.template = {config.template!r} {remedy} ({error})") from error
    # A width such as {a:>999999999} would make a huge prompt; {a.real} and {a!r} equal {a}.
    kinds_text = "\n".join(config.problems)
    operations = [symbol for symbol in _OPERATIONS if f" {symbol} " in kinds_text]
    names = ("a", "b") if len(operations) == 1 else ("a", "op", "b")
    if fields | {("op", "", None)} != {(name, "", None) for name in ("a", "op", "b")} or len(fields) < len(names):
        raise UserError(problem=f"task.arithmetic.template = {config.template!r} {remedy}")
    for kind in config.problems:
        if config.worked and " + " not in kind:
            raise UserError(
                "task.arithmetic.problems", f"{kind!r}: task.arithmetic.worked shows sums only", "remove it"
            )
    kinds: dict[tuple[int, str, int], str] = {}
    for kind in config.problems:
        match = _KIND.fullmatch(kind)
        if not match:
            raise UserError(
                "task.arithmetic.problems", f"{kind!r} is not of the form 'A..B op C..D' with op one of + - *"
            )
        first, last, symbol, other_first, other_last = match.groups()
        first_numbers = range(int(first), int(last) + 1)
        second_numbers = range(int(other_first), int(other_last) + 1)
        count = len(first_numbers) * len(second_numbers)
        if not 0 < count <= _LIMIT:
            raise UserError("task.arithmetic.problems", f"{kind!r} spans {count} questions", f"1 to {_LIMIT}")
        for question in itertools.product(first_numbers, symbol, second_numbers):
            kinds.setdefault(question, kind)
    questions = list(kinds)
    if len(questions) <= config.examples + 1:
        raise UserError("task.arithmetic.problems", f"gives only {len(questions)} questions", value=config.problems)
    generator = np.random.default_rng([seed, 0])
    question_texts = [config.template.format(a=a, op=symbol, b=b) for a, symbol, b in questions]
    if config.worked:
        answers = [worked_sum(a, b) for a, _, b in questions]
    else:
        answers = [str(_OPERATIONS[symbol](a, b)) for a, symbol, b in questions]
    problems = []
    for index in generator.permutation(len(questions)):
        drawn = generator.choice(len(questions) - 1, config.examples, replace=False)
        shots = [draw + (draw >= index) for draw in drawn]
        prompt = "".join(f"{question_texts[shot]} {answers[shot]}\n" for shot in shots) + question_texts[index]
        a, _, b = questions[index]
        mistakes = ()
        if config.worked:
            mistakes = _worked_mistakes(a, b)
        problems.append(Problem(prompt, answers[index], mistakes, difficulty=kinds[questions[index]]))
    return problems


def _worked_mistakes(a: int, b: int) -> tuple[str, ...]:
    """Worked sums in which one column is off by one or two."""
    columns = range(len(str(max(a, b))))
    answer = worked_sum(a, b)
    mistakes = []
    for column, slip in itertools.product(columns, (-2, -1, 1, 2)):
        text = worked_sum(a, b, column, slip)
        # A negative column sum would not be a plausible mistake.
        if "-" not in text and text != answer:
            mistakes.append(text)
    return tuple(mistakes)


def worked_sum(a: int, b: int, slip_column: int = 0, slip: int = 0) -> str:
    """A worked sum: each column from the right with its carry, then the result, as in "7+5+0=12;4+8+1=13;132".

    Args:
        slip_column: column, counted from the right, whose sum is wrong by `slip`; later columns are consistent with the
            wrong sum.
    """
    steps = []
    digits = ""
    carry = 0
    for column in range(len(str(max(a, b)))):
        digit_a = a // 10**column % 10
        digit_b = b // 10**column % 10
        total = digit_a + digit_b + carry
        if column == slip_column:
            total += slip
        steps.append(f"{digit_a}+{digit_b}+{carry}={total}")
        carry, digit = divmod(total, 10)
        digits = f"{digit}{digits}"
    steps.append(str(int(f"{carry}{digits}")))
    return ";".join(steps)
