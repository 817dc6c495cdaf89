"""A user's own problems: JSON Lines or Parquet with a prompt and an answer column."""

import json
from pathlib import Path
from typing import Any

import datasets

from recjax.config import FileTask
from recjax.tasks.problems import Problem


def file_problems(path: str, config: FileTask) -> list[Problem]:
    """Problems of a `.jsonl` or `.parquet` file, in file order; other columns are left aside.

    Prompts are text or lists of {"role", "content"} messages; answers are text or numbers.

    Raises:
        ValueError: a file that cannot be read or a row that cannot be used, with file, line (JSON Lines, from 1) or
            row (Parquet, from 0), and reason.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"task.file: {path}: there is no such file")
    if file.suffix == ".jsonl":
        rows = _json_rows(file)
    elif file.suffix == ".parquet":
        rows = [(f"row {index}", row) for index, row in enumerate(_load("parquet", file))]
    else:
        raise ValueError(f"task.file: {path}: give a .jsonl or a .parquet file")
    if not rows:
        raise ValueError(f"task.file: {path}: the file holds no rows")
    return [_problem(row, f"{path}: {place}", config) for place, row in rows]


def _load(builder: str, file: Path) -> datasets.Dataset:
    try:
        return datasets.load_dataset(builder, data_files=str(file), split="train")
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        raise ValueError(f"task.file: {file}: {error.__cause__ or error}") from error


def _json_rows(file: Path) -> list[tuple[str, Any]]:
    # Read line by line and not through `datasets`, which reports neither the line of a syntax error nor a column
    # whose type changes from row to row.
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append((f"line {number}", json.loads(line)))
        except json.JSONDecodeError as error:
            raise ValueError(f"task.file: {file}: line {number}: not valid JSON ({error})") from error
    return rows


def _problem(row: Any, place: str, config: FileTask) -> Problem:
    if not isinstance(row, dict):
        raise ValueError(f"task.file: {place}: a row must be an object with named columns; got {row!r:.80}")
    for key, column in (("prompt_column", config.prompt_column), ("answer_column", config.answer_column)):
        if row.get(column) is None:
            raise ValueError(
                f"task.file: {place}: no {column!r}; the row has {', '.join(map(repr, row))}."
                f" Add it, or name another column in task.file.{key}"
            )
    prompt, answer = row[config.prompt_column], row[config.answer_column]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"task.file: {place}: {config.answer_column} must be text or a number; got {answer!r:.80}")
    if isinstance(prompt, str) and prompt.strip():
        prompt = [{"role": "user", "content": prompt}] if config.chat else prompt
    elif not _is_chat(prompt):
        raise ValueError(
            f"task.file: {place}: {config.prompt_column} must be text that is not blank, or a list of messages with"
            f" role and content; got {prompt!r:.80}"
        )
    return Problem(prompt, str(answer))


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in prompt)
        and all(isinstance(turn["role"], str) and isinstance(turn["content"], str) for turn in prompt)
    )
