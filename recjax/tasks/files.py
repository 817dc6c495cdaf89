"""The user's own problems: rows of a file or of a program, with a prompt column and an answer column."""

import math
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd

from recjax.config import PASSED, Config, FileTask
from recjax.errors import UserError
from recjax.runtime.cache import cache_folder
from recjax.runtime.files import UNREADABLE, digest, json_text, short_error, write_whole, writing
from recjax.tasks.problems import Problem, check_last_message, checked_messages, messages_in
from recjax.tasks.reading import (
    FileRow,
    as_text,
    column_kinds,
    is_template_cell,
    native,
    needs_conversion,
    parsed,
    read_data,
    template_of,
)


def file_problems(
    path: str | Path,
    config: FileTask,
    system_prompt: str | None = None,
    needs_answers: bool = True,
    split: str = "train",
) -> list[Problem]:
    """Problems of a file, a folder or a pattern that `reading.read_data` reads, in their order, with other columns.

    Prompts are text or lists of {"role", "content"} messages, which may be JSON text; answers are text or numbers. The
    reward gets all other columns. The chat template also gets `tools` and `chat_template_kwargs`.

    Args:
        system_prompt: system message to put before every prompt; prompts must be chats without a system message.
        needs_answers: flag; if False, no row of the file may have an answer, and all answers are then empty.
        split: prefix of the files' names in a folder, "train" or "test".
    Raises:
        UserError: the file cannot be read, or a row cannot be used; the message has file, line (JSON Lines, from 1) or
            row (Parquet, from 0), and reason. Or a prompt does not take the system prompt.
    """
    rows = read_data(str(path), "task.file", split)
    if Path(path).parent == cache_folder("problems"):  # The program that passed them knows no file.
        rows = [row._replace(location=f"problems: row {number}") for number, row in enumerate(rows)]
    if not needs_answers and all(row.values.get(str(config.answer_column)) is None for row in rows):
        config = config.model_copy(update={"answer_column": None})
    return [_problem(row, config, system_prompt) for row in rows]


def _problem(row: FileRow, config: FileTask, system_prompt: str | None) -> Problem:
    names = {key: getattr(config, key) for key in ("prompt_column", "answer_column", "difficulty_column")}
    for key, column in names.items():
        if column is not None and row.values.get(column) is None:
            existing = ", ".join(repr(name) for name, value in row.values.items() if value is not None)
            hint = ""
            if key == "answer_column":
                hint = "; null: problems have no answers, for a reward that reads none"
            raise UserError(
                problem=f"{row.location}: no {column!r}; the row has {existing}."
                f" Add it, or name another column in task.file.{key}{hint}"
            )
    prompt = messages_in(row.values[config.prompt_column])
    location = f"{row.location}: column {config.prompt_column!r}"
    column = config.answer_column
    answer = ""
    if column is not None:
        answer = row.answer(column, row.values[column])
    if isinstance(prompt, str) and prompt.strip():
        if config.chat:
            prompt = [{"role": "user", "content": prompt}]
    elif not isinstance(prompt, list):
        reason = "must hold text that is not blank, or a list of messages with role and content"
        raise row.error(config.prompt_column, f"{reason}; got {prompt!r:.80}")
    else:
        prompt = checked_messages(prompt, location)
    check_last_message(prompt, location)
    if system_prompt is not None:
        # The user, not recjax, must choose between two system messages.
        if isinstance(prompt, str):
            raise UserError(
                problem=f"task.system_prompt is not read by plain text such as {prompt!r:.80}",
                remedy="remove it, or make the prompts chats: task.file.chat=true, or lists of messages in the file",
            )
        if prompt[0]["role"] == "system":
            raise UserError(
                problem=(
                    f"task.system_prompt is given, but the messages {prompt!r:.80}… begin with a system message of"
                    " their own"
                ),
                remedy="remove one of the two",
            )
        prompt = [{"role": "system", "content": system_prompt}, *prompt]
    columns = {name: value for name, value in row.values.items() if name not in (config.prompt_column, column)}
    for name, value in columns.items():
        if isinstance(value, dict) and value.keys() == {UNREADABLE}:
            columns[name] = {UNREADABLE: f"{row.location}: column {name!r}: {value[UNREADABLE]}"}
    difficulty = None
    if config.difficulty_column is not None:
        difficulty = row.answer(config.difficulty_column, row.values[config.difficulty_column])
    template = {}
    if not isinstance(prompt, str):
        template = template_of(row)
    return Problem(prompt, answer, columns=columns, difficulty=difficulty, template=template)


def keep_rows(rows: Any) -> str:
    """Keeps a program's rows in the cache, as JSON Lines; returns their name in a config, `rows:DIGEST`.

    Decimals, dates, times and UUIDs become text. A cell that JSON cannot hold becomes {UNREADABLE: reason}.

    Args:
        rows: dicts by column, a pandas DataFrame, or a datasets.Dataset.
    Raises:
        UserError: the list has no rows, or a row is not a dict with names of columns; the message numbers rows from 0.
    """
    if isinstance(rows, str | Path):
        raise UserError("problems", "takes rows", "name a file as task.file.train in the config", value=str(rows))
    if isinstance(rows, Mapping):
        names = ", ".join(map(repr, rows))
        raise UserError(
            "problems", f"takes rows, and this is a mapping of {names:.200}", "choose one: problems['train']"
        )
    lines = []
    kinds: Mapping[Any, Any] = column_kinds(rows)
    # A datasets.Dataset decodes its JSON when it is read.
    is_decoded = not isinstance(rows, pd.DataFrame)
    if isinstance(rows, pd.DataFrame):
        rows = rows.to_dict("records")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError("problems", f"row {number} must be a dict of columns", f"got {row!r:.80}")
        cells = {}
        for name, value in row.items():
            kind = kinds.get(name)
            comes_from_table = kind is not None or isinstance(value, np.ndarray)
            drops_nulls = comes_from_table and is_template_cell(str(name), value)
            if drops_nulls or isinstance(value, np.ndarray) or needs_conversion(kind):
                value = native(value, kind, drops_nulls, is_decoded)
            cells[name] = value
        try:
            line = json_text(cells, default=_plain)
        except (TypeError, ValueError, RecursionError):
            for name, value in cells.items():
                try:
                    json_text(value, default=_plain)
                except (TypeError, ValueError, RecursionError) as error:
                    cells[name] = {UNREADABLE: short_error(error)}
            line = json_text(cells, default=_plain)
        if "\\ud" in line.casefold():
            parsed(line.encode(), f"problems: row {number}")
        lines.append(line + "\n")
    if not lines:
        raise UserError("problems", "there are no rows", "pass at least one")
    content = "".join(lines).encode()
    name = f"{PASSED}:{digest(content)}"
    path = rows_file(name)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
    return name


def _plain(value: Any) -> Any:
    """A value that JSON holds, for one that it does not: NumPy's and pandas' values, and Python's exact ones."""
    if value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, np.datetime64):
        if np.isnat(value):
            return None
        return str(value)
    if isinstance(value, Decimal):
        return as_text(value)  # A number that is not finite becomes null.
    if isinstance(value, UUID):
        return str(value)
    if not hasattr(value, "tolist"):
        raise TypeError(f"a value of type {type(value).__name__}, which JSON cannot hold; give text instead")
    listed = native(value.tolist(), str(getattr(value, "dtype", "")).rpartition(".")[2])
    if isinstance(listed, float) and not math.isfinite(listed):
        return None
    return listed


def rows_file(name: str) -> Path:
    """The file of `keep_rows` in the cache, by the name of the rows in a config."""
    return cache_folder("problems") / f"{name.partition(':')[2]}.jsonl"


def passed_files(config: Config) -> dict[str, Path]:
    """The files of the problems that a program passed, by their names in the config: in the run folder or the cache.

    Raises:
        UserError: no file has the content of this name.
    """
    files = {}
    task = config.task.file
    for name in (task.train, task.evaluation) if task else ():
        if name is None or name.partition(":")[0] != PASSED:
            continue
        candidates = Path(config.output) / f"problems-{name.partition(':')[2]}.jsonl", rows_file(name)
        matching = [path for path in candidates if path.is_file() and f"{PASSED}:{digest(path.read_bytes())}" == name]
        if name == PASSED:
            raise UserError(
                problem="the config has no task", remedy="set one, or pass problems: recjax.run(config, problems=…)"
            )
        if not matching:
            raise UserError(
                "task.file",
                f"these problems are neither in {candidates[0]} nor in the cache",
                "pass them: recjax.run(config, problems=…), or restore the file",
                value=name,
            )
        files[name] = matching[0]
    return files
