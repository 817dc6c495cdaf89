r"""GSM8K: grade-school word problems.

Data: `openai/gsm8k` on the hub, subset `main`: splits train (7,473 rows) and test (1,319 rows, evaluation) with the
columns `question` and `answer`, a worked solution whose last line is "#### 72".
Prompt: the question as the user's message, after the system prompt below.
Answer: the number after the last "####", without thousands separators.
Reward: `gsm8k`, 1 for an equal answer, else 0; plus 0.1 if the completion has the requested form, else minus 0.1.
"""

import re
from collections.abc import Sequence

from recjax.tasks.problems import Problem, chat
from recjax.tasks.reading import FileRow

TRAIN, EVALUATION = "main/train-*.parquet", "main/test-*.parquet"

SYSTEM_PROMPT = (
    "Solve the user's problem. First reason step by step between <think> and </think>. Then write the final result, a"
    " number without its unit, between <answer> and </answer>. Write nothing outside these two blocks:\n"
    "<think>your reasoning</think>\n<answer>the number</answer>"
)

_NUMBER = re.compile(r"-?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?|-?\.\d+", re.ASCII)


def gsm8k_problems(rows: Sequence[FileRow], system_prompt: str = SYSTEM_PROMPT) -> list[Problem]:
    """One problem per row.

    Raises:
        ValueError: a row has no question or answer, or its answer does not end in "####" and a number.
    """
    found = []
    for row in rows:
        prompt = chat(system_prompt, row.text("question"))
        _, mark, last = row.text("answer").rpartition("####")
        number = last.strip().removeprefix("$")
        if not mark or not _NUMBER.fullmatch(number):
            raise row.error("answer", f"must end in '####' and a number; got {row.values['answer'][-80:]!r}")
        found.append(Problem(prompt, number.replace(",", "")))
    return found
