r"""Data sets of mathematics on the Hugging Face hub: GSM8K, MATH and Guru-Math.

GSM8K: grade-school word problems.

Data: `openai/gsm8k` on the hub, subset `main`: splits train (7,473 rows) and test (1,319 rows, evaluation) with the
columns `question` and `answer`, a worked solution whose last line is "#### 72".
Prompt: the question as the user's message, after the system prompt below.
Answer: the number after the last "####", without thousands separators.
Reward: `gsm8k`, 1 for an equal answer, else 0; plus 0.1 if the completion has the requested form, else minus 0.1.

MATH: competition problems.

Data: `DigitalLearningGmbH/MATH-lighteval` on the hub for training, files data/train-*.parquet (7,500 rows) with the
columns `problem`, `solution`, `level` ("Level 5") and `type` ("Algebra"); `HuggingFaceH4/MATH-500` for evaluation,
file test.jsonl (500 rows) with `problem`, `solution`, `answer`, `subject`, `level` (5) and `unique_id`.
Prompt: the problem as the user's message, after the system prompt below.
Answer: the column `answer`, text or a number, if present; otherwise the content of the solution's last \boxed.
Difficulty: the level. Columns: subject.
Reward: `math`, 1 if the completion's last \boxed equals the answer after normalization, 0 otherwise.

Guru-Math: the mathematics part of Guru.

Data: `LLM360/guru-RL-92k` on the hub, files train/math__combined_54.4k.parquet for training and
online_eval/math__math_500.parquet for evaluation, with the columns `prompt` (a list of messages with role and content;
the question ends in a request for \boxed), `reward_model` (a struct with `ground_truth`), `data_source`, `ability` and
`qwen2.5_7b_pass_rate`, among others.
Prompt: the row's messages, after the system prompt below if they have no system message.
Answer: reward_model.ground_truth.
Difficulty: the pass rate in the column qwen2.5_7b_pass_rate, if present, in steps of 0.2. Columns: data_source.
Reward: `guru_math`, 1 if the answers are symbolically equal, 0 otherwise.
"""

import re
from collections.abc import Sequence

from recjax.grading.notation import braced
from recjax.tasks.problems import Problem, chat, check_last_message, checked_messages, messages_in
from recjax.tasks.reading import FileRow, as_text

TAGGED_PROMPT = (
    "Solve the user's problem. First reason step by step between <think> and </think>. Then write the final result, a"
    " number without its unit, between <answer> and </answer>. Write nothing outside these two blocks:\n"
    "<think>your reasoning</think>\n<answer>the number</answer>"
)
BOXED_PROMPT = "Reason step by step about the user's problem, and end with the final answer inside \\boxed{}."

_NUMBER = re.compile(r"-?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?|-?\.\d+", re.ASCII)
_BOXED = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def gsm8k_problems(rows: Sequence[FileRow], system_prompt: str = TAGGED_PROMPT) -> list[Problem]:
    """One problem per row.

    Raises:
        UserError: a row has no question or answer, or its answer does not end in "####" and a number.
    """
    problems = []
    for row in rows:
        prompt = chat(system_prompt, row.text("question"))
        _, mark, last = row.text("answer").rpartition("####")
        number = last.strip().removeprefix("$")
        if not mark or not _NUMBER.fullmatch(number):
            raise row.error("answer", f"must end in '####' and a number; got {row.values['answer'][-80:]!r}")
        problems.append(Problem(prompt, number.replace(",", "")))
    return problems


def math_problems(rows: Sequence[FileRow], system_prompt: str = BOXED_PROMPT) -> list[Problem]:
    r"""One problem per row.

    Raises:
        UserError: a row has no problem, or has neither an answer nor a solution with a \boxed.
    """
    return [_math_problem(row, system_prompt) for row in rows]


def _math_problem(row: FileRow, system_prompt: str) -> Problem:
    stated = row.values.get("answer")
    is_stated = stated is not None and stated == stated and stated != ""  # NaN also means no answer.
    if is_stated:
        answer = row.text("answer") if isinstance(stated, str) else row.answer("answer", stated)
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
    for match in reversed(list(_BOXED.finditer(text))):
        ending = text[match.end() :]
        if ending.startswith("{"):
            content = braced(ending) or ""
        else:
            content = re.split(r"[\s$.]", ending, maxsplit=1)[0]
        if content.strip():
            return content.strip()
    return None


def guru_math_problems(rows: Sequence[FileRow], system_prompt: str = BOXED_PROMPT) -> list[Problem]:
    """One problem per row.

    Raises:
        UserError: a row has no messages or no answer, or its pass rate is not a number from 0 to 1.
    """
    return [_guru_problem(row, system_prompt) for row in rows]


def _guru_problem(row: FileRow, system_prompt: str) -> Problem:
    prompt = checked_messages(messages_in(row.values.get("prompt")), f"{row.location}: column 'prompt'")
    reward_model = row.values.get("reward_model")
    check_last_message(prompt, f"{row.location}: column 'prompt'")
    answer = None
    if isinstance(reward_model, dict):
        answer = as_text(reward_model.get("ground_truth"))
    if answer is None or not answer.strip():
        reason = "must hold an object with the answer as ground_truth"
        raise row.error("reward_model", f"{reason}; got {reward_model!r:.80}")
    if prompt[0]["role"] == "system" and system_prompt != BOXED_PROMPT:
        raise row.error("prompt", "begins with a system message of its own; remove it or task.system_prompt")
    if prompt[0]["role"] != "system" and system_prompt:
        prompt = [{"role": "system", "content": system_prompt}, *prompt]
    rate = row.values.get("qwen2.5_7b_pass_rate")
    columns = {"data_source": row.values.get("data_source")}
    difficulty = None
    if rate is not None:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise row.error("qwen2.5_7b_pass_rate", f"must hold a number from 0 to 1, or null; got {rate!r:.80}")
        fifth = min(int(rate * 5), 4)
        difficulty = f"pass rate {fifth / 5:.1f} to {(fifth + 1) / 5:.1f}"
    return Problem(prompt, answer, columns=columns, difficulty=difficulty)
