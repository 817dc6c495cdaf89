"""The built-in graders: the function that grades a completion, the parts of the reward, and their default weights.

Functions are given by name and not imported here, because they run in worker processes that import only them.
"""

import pkgutil
from collections.abc import Mapping
from typing import Any, NamedTuple


class Grader(NamedTuple):
    """A built-in reward; `grade` and `parse` are names of the form module:function.

    `grade` maps (completion, answer, columns) of one row to the reward's parts by name. `weights` holds the default
    weight of every part. `parse` maps a completion to its answer as text, for counting votes, or to None. Worker
    processes import `package` before they start, as its import would take most of a completion's time limit.
    """

    grade: str
    weights: dict[str, float]
    parse: str
    package: str | None = None


def grade_row(function: str, *row: Any) -> dict[str, float] | str | None:
    """Runs in a worker: calls `grade` or `parse` of a Grader; returns plain values."""
    result = pkgutil.resolve_name(function)(*row)
    if isinstance(result, Mapping):
        return {str(name): float(value) for name, value in result.items()}
    if result is None:
        return None
    return str(result)


_MATH = "recjax.grading.math_answers"
_TOOLS = "recjax.grading.tool_calls"
_GYM = "recjax.grading.gym"

GRADERS = {
    "gsm8k": Grader(f"{_MATH}:gsm8k", {"accuracy": 1.0, "format": 0.1}, f"{_MATH}:parse_tagged"),
    "math": Grader(f"{_MATH}:math", {"accuracy": 1.0}, f"{_MATH}:parse_boxed"),
    "guru_math": Grader(f"{_MATH}:guru_math", {"accuracy": 1.0}, f"{_MATH}:parse_boxed"),
    "math_dapo": Grader(f"{_MATH}:math_dapo", {"accuracy": 1.0}, f"{_MATH}:parse_line"),
    "tool_calls": Grader(f"{_TOOLS}:tool_calls", {"accuracy": 1.0}, f"{_TOOLS}:canonical_calls"),
    "reasoning_gym": Grader(f"{_GYM}:grade", {"accuracy": 1.0, "score": 0.0}, f"{_GYM}:parse", "reasoning_gym"),
}
