r"""MATH: competition problems.

Data: `DigitalLearningGmbH/MATH-lighteval` on the hub for training, files data/train-*.parquet (7,500 rows) with the
columns `problem`, `solution`, `level` ("Level 5") and `type` ("Algebra"); `HuggingFaceH4/MATH-500` for evaluation,
file test.jsonl (500 rows) with `problem`, `solution`, `answer`, `subject`, `level` (5) and `unique_id`.
Prompt: the problem as the user's message, after the system prompt below.
Answer: the column `answer`, text or a number, if present; otherwise the content of the solution's last \boxed.
Difficulty: the level. Columns: subject.
Reward: `math`, 1 if the completion's last \boxed equals the answer after normalization, 0 otherwise.
"""

import re
from collections.abc import Sequence

from recjax.tasks.grading.notation import braced
from recjax.tasks.problems import Problem, chat
from recjax.tasks.reading import FileRow, as_text

TRAIN, EVALUATION = "data/train-*.parquet", "test.jsonl"

SYSTEM_PROMPT = "Reason step by step about the user's problem, and end with the final answer inside \\boxed{}."

_BOXED = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def math_problems(rows: Sequence[FileRow], system_prompt: str = SYSTEM_PROMPT) -> list[Problem]:
    r"""One problem per row.

    Raises:
        ValueError: a row has no problem, or has neither an answer nor a solution with a \boxed.
    """
    return [_problem(row, system_prompt) for row in rows]


def _problem(row: FileRow, system_prompt: str) -> Problem:
    given = row.values.get("answer")
    is_given = given is not None and given == given and given != ""  # NaN also means no answer
    if is_given:
        answer = row.text("answer") if isinstance(given, str) else row.answer("answer", given)
    else:
        column = "solution" if row.values.get("solution") or "answer" not in row.values else "answer"
        answer = last_boxed(row.text(column))
    if answer is None:
        raise row.error("solution", f"holds no \\boxed answer; it ends in {row.values['solution'][-80:]!r}")
    level = as_text(row.values.get("level")) or ""
    subject = row.values.get("subject") or row.values.get("type")
    columns = {"subject": subject} if subject else {}
    difficulty = f"level {level.removeprefix('Level').strip()}" if level else None
    return Problem(chat(system_prompt, row.text("problem")), answer, columns=columns, difficulty=difficulty)


def last_boxed(text: str) -> str | None:
    r"""The content of a text's last non-empty \boxed or \fbox: text in braces, or the next word; None without one."""
    rests = [text[match.end() :] for match in _BOXED.finditer(text)]
    contents = [braced(rest) if rest.startswith("{") else re.match(r"[^\s$.]*", rest).group() for rest in rests]
    return next((content.strip() for content in reversed(contents) if content and content.strip()), None)
