"""A user's own problems: JSON Lines, JSON or Parquet with a prompt and an answer column."""

from pathlib import Path

from recjax.config import FileTask
from recjax.tasks.problems import Problem, is_chat
from recjax.tasks.reading import Row, read_file, template_of


def file_problems(path: str, config: FileTask, system_prompt: str | None = None) -> list[Problem]:
    """Problems of a file that `reading.read_file` reads, in file order, with their other columns.

    Prompts are text or lists of {"role", "content"} messages; answers are text or numbers. The columns `tools` and
    `chat_template_kwargs` go to the chat template, and to the reward as all others do.

    Args:
        system_prompt: goes before every prompt, each of which must then be a chat without a system message.
    Raises:
        ValueError: a file that cannot be read or a row that cannot be used, with file, line (JSON Lines, from 1) or
            row (Parquet, from 0), and reason; a prompt before which the system prompt cannot go.
    """
    return [_problem(row, config, system_prompt) for row in read_file(Path(path), "task.file")]


def _problem(row: Row, config: FileTask, system_prompt: str | None) -> Problem:
    names = {key: getattr(config, key) for key in ("prompt_column", "answer_column", "difficulty_column")}
    for key, column in names.items():
        if column is not None and row.values.get(column) is None:
            raise ValueError(
                f"{row.place}: no {column!r}; the row has {', '.join(map(repr, row.values))}."
                f" Add it, or name another column in task.file.{key}"
            )
    prompt, answer = (
        row.values[config.prompt_column],
        row.answer(config.answer_column, row.values[config.answer_column]),
    )
    if isinstance(prompt, str) and prompt.strip():
        prompt = [{"role": "user", "content": prompt}] if config.chat else prompt
    elif not is_chat(prompt):
        reason = "must hold text that is not blank, or a list of messages with role and content"
        raise row.error(config.prompt_column, f"{reason}; got {prompt!r:.80}")
    if system_prompt is not None:
        # Which of two system messages would count is not for the program to choose.
        if isinstance(prompt, str):
            raise ValueError(
                f"task.system_prompt is not read by plain text such as {prompt!r:.80}; remove it, or make the prompts"
                " chats: task.file.chat=true, or lists of messages in the file"
            )
        if prompt[0]["role"] == "system":
            raise ValueError(
                f"task.system_prompt is given, but the messages {prompt!r:.80}… begin with a system message of their"
                " own; remove one of the two"
            )
        prompt = [{"role": "system", "content": system_prompt}, *prompt]
    columns = {name: value for name, value in row.values.items() if name not in names.values()}
    label = config.difficulty_column and row.values[config.difficulty_column]
    difficulty = None if label is None else row.answer(config.difficulty_column, label)
    template = {} if isinstance(prompt, str) else template_of(row)
    return Problem(prompt, answer, columns=columns, difficulty=difficulty, template=template)
