"""A user's own problems: JSON Lines or Parquet with a prompt and an answer column."""

from pathlib import Path

from recjax.config import FileTask
from recjax.tasks.problems import Problem, is_chat
from recjax.tasks.reading import Row, read_file


def file_problems(path: str, config: FileTask, system_prompt: str | None = None) -> list[Problem]:
    """Problems of a `.jsonl` or `.parquet` file, in file order, with their other columns.

    Prompts are text or lists of {"role", "content"} messages; answers are text or numbers.

    Args:
        system_prompt: a system message to put before every prompt, all of which are then chats without one.
    Raises:
        ValueError: a file that cannot be read or a row that cannot be used, with file, line (JSON Lines, from 1) or
            row (Parquet, from 0), and reason; a prompt before which the system prompt cannot go.
    """
    problems = [_problem(row, config) for row in read_file(Path(path), "task.file")]
    return problems if system_prompt is None else [_with_system_prompt(each, system_prompt) for each in problems]


def _problem(row: Row, config: FileTask) -> Problem:
    names = {key: getattr(config, key) for key in ("prompt_column", "answer_column", "difficulty_column")}
    for key, column in names.items():
        if column is not None and row.values.get(column) is None:
            raise ValueError(
                f"{row.place}: no {column!r}; the row has {', '.join(map(repr, row.values))}."
                f" Add it, or name another column in task.file.{key}"
            )
    prompt, answer = row.values[config.prompt_column], row.values[config.answer_column]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise row.error(config.answer_column, f"must hold text or a number; got {answer!r:.80}")
    if isinstance(prompt, str) and prompt.strip():
        prompt = [{"role": "user", "content": prompt}] if config.chat else prompt
    elif not is_chat(prompt):
        reason = "must hold text that is not blank, or a list of messages with role and content"
        raise row.error(config.prompt_column, f"{reason}; got {prompt!r:.80}")
    columns = {name: value for name, value in row.values.items() if name not in names.values()}
    difficulty = None if config.difficulty_column is None else str(row.values[config.difficulty_column])
    return Problem(prompt, str(answer), columns=columns, difficulty=difficulty)


def _with_system_prompt(problem: Problem, system_prompt: str) -> Problem:
    """The problem with a system message first; which of two would count is not for the program to choose."""
    if isinstance(problem.prompt, str):
        raise ValueError(
            f"task.system_prompt is not read by plain text such as {problem.prompt!r:.80}; remove it, or make the"
            " prompts chats: task.file.chat=true, or lists of messages in the file"
        )
    if problem.prompt[0]["role"] == "system":
        raise ValueError(
            f"task.system_prompt is given, but the messages {problem.prompt!r:.80}… begin with a system message of"
            " their own; remove one of the two"
        )
    return problem._replace(prompt=[{"role": "system", "content": system_prompt}, *problem.prompt])
