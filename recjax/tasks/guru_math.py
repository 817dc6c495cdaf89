r"""Guru-Math: the mathematics part of Guru.

Data: `LLM360/guru-RL-92k` on the hub, files train/math__combined_54.4k.parquet for training and
online_eval/math__math_500.parquet for evaluation, with the columns `prompt` (a list of messages with role and content;
the question ends in a request for \boxed), `reward_model` (a struct with `ground_truth`), `data_source`, `ability` and
`qwen2.5_7b_pass_rate`, among others.
Prompt: the row's messages, after the system prompt below if they have no system message.
Answer: reward_model.ground_truth.
Difficulty: the pass rate in the column qwen2.5_7b_pass_rate, if present, in steps of 0.2. Columns: data_source.
Reward: `guru_math`, 1 if the answers are symbolically equal, 0 otherwise.
"""

from collections.abc import Sequence

from recjax.tasks.problems import Problem, is_chat
from recjax.tasks.reading import FileRow, as_text

TRAIN, EVALUATION = "train/math__combined_54.4k.parquet", "online_eval/math__math_500.parquet"

SYSTEM_PROMPT = "Reason step by step about the user's problem, and end with the final answer inside \\boxed{}."


def guru_math_problems(rows: Sequence[FileRow], system_prompt: str = SYSTEM_PROMPT) -> list[Problem]:
    """One problem per row.

    Raises:
        ValueError: a row has no messages or no answer, or its pass rate is not a number from 0 to 1.
    """
    return [_problem(row, system_prompt) for row in rows]


def _problem(row: FileRow, system_prompt: str) -> Problem:
    prompt, reward_model = row.values.get("prompt"), row.values.get("reward_model")
    if not is_chat(prompt):
        raise row.error("prompt", f"must hold a list of messages with role and content; got {prompt!r:.80}")
    answer = as_text(reward_model.get("ground_truth")) if isinstance(reward_model, dict) else None
    if not (answer or "").strip():
        reason = "must hold an object with the answer as ground_truth"
        raise row.error("reward_model", f"{reason}; got {reward_model!r:.80}")
    if prompt[0]["role"] == "system" and system_prompt != SYSTEM_PROMPT:
        raise row.error("prompt", "begins with a system message of its own; remove it or task.system_prompt")
    if prompt[0]["role"] != "system" and system_prompt:
        prompt = [{"role": "system", "content": system_prompt}, *prompt]
    rate, columns = row.values.get("qwen2.5_7b_pass_rate"), {"data_source": row.values.get("data_source")}
    difficulty = None
    if rate is not None:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise row.error("qwen2.5_7b_pass_rate", f"must hold a number from 0 to 1, or null; got {rate!r:.80}")
        fifth = min(int(rate * 5), 4)
        difficulty = f"pass rate {fifth / 5:.1f} to {(fifth + 1) / 5:.1f}"
    return Problem(prompt, answer, columns=columns, difficulty=difficulty)
