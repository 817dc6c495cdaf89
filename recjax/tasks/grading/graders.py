"""The built-in rewards that need a library: which function grades a completion, of which parts, with which weights.

Their functions are named and not imported here: they run in worker processes, which import nothing else.
"""

from typing import NamedTuple


class Grader(NamedTuple):
    """A built-in reward, by names of the form module:function.

    `grade` takes (completion, answer, columns) of one row to its named parts; `weights` are those parts' default
    weights; `parse` takes a completion to the answer it gives, as text by which votes are counted, or None.
    """

    grade: str
    weights: dict[str, float]
    parse: str


class Failure(NamedTuple):
    """Why a worker process has no result for a completion: timeout, crash, error or too_long."""

    reason: str


_MATH, _TOOLS, _GYM = "recjax.tasks.grading.math_answers", "recjax.tasks.grading.tool_calls", "recjax.tasks.grading.gym"

GRADERS = {
    "gsm8k": Grader(f"{_MATH}:gsm8k", {"accuracy": 1.0, "format": 0.1}, f"{_MATH}:parse_tagged"),
    "math": Grader(f"{_MATH}:math", {"accuracy": 1.0}, f"{_MATH}:parse_boxed"),
    "guru_math": Grader(f"{_MATH}:guru_math", {"accuracy": 1.0}, f"{_MATH}:parse_boxed"),
    "math_dapo": Grader(f"{_MATH}:math_dapo", {"accuracy": 1.0}, f"{_MATH}:parse_line"),
    "tool_calls": Grader(f"{_TOOLS}:tool_calls", {"accuracy": 1.0}, f"{_TOOLS}:parse_calls"),
    "reasoning_gym": Grader(f"{_GYM}:grade", {"accuracy": 1.0, "score": 0.0}, f"{_GYM}:parse"),
}
