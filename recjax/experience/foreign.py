"""Completions from elsewhere as rows of a store: JSON Lines, CSV and Parquet files."""

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from recjax.experience.store import Experience
from recjax.experience.store_checks import is_finite_number
from recjax.models.logprobs import Sampling


class Columns(NamedTuple):
    """Which columns hold what; those that a file lacks are null, but for the completion and its prompt.

    `messages` is a chat, whose last message is the completion where there is no column of that. `group` None: rows with
    equal prompts are a group. `id` None: rows are numbered.
    """

    prompt: str = "prompt"
    messages: str = "messages"
    completion: str = "completion"
    reward: str = "reward"
    reward_parts: str = "reward_parts"
    answer: str = "answer"
    prompt_tokens: str = "prompt_tokens"
    tokens: str = "tokens"
    logprobs: str = "logprobs"
    truncated: str = "truncated"
    finish_reason: str = "finish_reason"
    group: str | None = None
    id: str | None = None


class Imported(NamedTuple):
    """Rows, what each is called in error messages, and the columns that nothing was taken from."""

    rows: list[Experience]
    places: list[str]
    left_aside: list[str]


def imported(
    files: Sequence[str | Path],
    columns: Columns,
    time: datetime,
    *,
    source: str | None = None,
    tokenizer: str | None = None,
    sampling: Sampling | None = None,
) -> Imported:
    """Rows of files, in their order; rows of several files that share a prompt share a group.

    Args:
        columns: their names.
        time: of all rows.
        source: name of the rows; None: each file's name without its ending.
        tokenizer: `tokenise.tokenizer_name` of the vocabulary that columns of tokens are of.
        sampling: what drew them; needed where there are log-probabilities.
    Raises:
        ValueError: a file that cannot be read, or a row that cannot be used, with file, line or row, and reason.
    """
    digest = hashlib.sha256(repr((source, columns)).encode())
    for file in map(Path, files):
        if not file.is_file():
            raise ValueError(f"{file}: there is no such file")
        digest.update(file.read_bytes())
    origin = _Origin(digest.hexdigest()[:12], time, tokenizer, sampling)
    rows, places, seen = [], [], {}
    for file in map(Path, files):
        for place, values in _read(file, columns):
            place = f"{file}: {place}"
            if not isinstance(values, dict):
                raise ValueError(f"{place}: a row must be an object with named columns; got {values!r:.80}")
            seen |= dict.fromkeys(values)
            rows.append(_row(_Source(values, columns, place), len(rows), source or file.stem, origin))
            places.append(place)
    if not rows:
        raise ValueError(f"{', '.join(map(str, files))}: no rows")
    for column, wanted in columns._asdict().items():
        if wanted not in (*seen, Columns._field_defaults[column]):
            raise ValueError(f"--{column}_column {wanted!r}: no row has it; the columns are {', '.join(seen)}")
    return Imported(rows, places, [column for column in seen if column not in columns])


def _read(file: Path, columns: Columns) -> Iterator[tuple[str, Any]]:
    """Rows of a file and where they stand: by line from 1, in Parquet by row from 0."""
    if file.suffix == ".jsonl":
        # Not splitlines, which also splits at characters that JSON may hold as they are, such as U+2028.
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{file}: line {number}: not valid JSON ({error})") from error
    elif file.suffix == ".csv":
        yield from _csv_rows(file, columns)
    elif file.suffix == ".parquet":
        try:
            table = pq.read_table(file, partitioning=None)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{file}: {error}") from error
        for number, row in enumerate(table.to_pylist()):
            yield f"row {number}", row
    else:
        raise ValueError(f"{file}: give .jsonl, .csv or .parquet files")


def _csv_rows(file: Path, columns: Columns) -> Iterator[tuple[str, dict]]:
    """Cells of text, numbers and JSON; an empty cell is null, except that a completion may be empty."""
    structured = {columns.messages, columns.reward_parts, columns.prompt_tokens, columns.tokens, columns.logprobs}
    structured |= {columns.reward, columns.truncated}
    with file.open(encoding="utf-8", newline="") as text:
        reader = csv.DictReader(text, restkey="", strict=True)
        try:
            for cells in reader:
                place = f"line {reader.line_num}"
                if "" in cells or None in cells.values():
                    raise ValueError(f"{file}: {place}: more or fewer cells than the {len(reader.fieldnames)} columns")
                row = {name: cell if cell or name == columns.completion else None for name, cell in cells.items()}
                for name in structured & row.keys():
                    row[name] = _parsed(row[name], f"{file}: {place}: {name}")
                yield place, row
        except csv.Error as error:
            raise ValueError(f"{file}: line {reader.line_num}: {error}") from error


def _parsed(cell: str | None, place: str) -> Any:
    try:
        # Spreadsheets write truth values in capitals.
        return None if cell is None else json.loads(cell.lower() if cell.lower() in ("true", "false") else cell)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: {cell!r:.80} is neither a number nor JSON ({error})") from error


class _Source(NamedTuple):
    """A row of a file, how its columns are called, and where it stands."""

    values: Mapping[str, Any]
    columns: Columns
    place: str

    def get(self, column: str) -> Any:
        """The value of a column by what it holds; None where there is none."""
        return self.values.get(getattr(self.columns, column) or "")

    def refuse(self, column: str, reason: str) -> ValueError:
        """The error that says what is wrong with a column of this row."""
        name = getattr(self.columns, column)
        return ValueError(f"{self.place}: {name}: {self.values.get(name)!r:.80}: {reason}")


class _Origin(NamedTuple):
    """What all rows of an import share; `name` is its own, and ids begin with it."""

    name: str
    time: datetime
    tokenizer: str | None
    sampling: Sampling | None


def _row(row: _Source, number: int, source: str, origin: _Origin) -> Experience:
    prompt, messages, completion = _texts(row)
    asked = prompt if messages is None else json.dumps(messages)
    group = hashlib.sha256(asked.encode()).hexdigest()[:12] if row.columns.group is None else _label(row, "group")
    return Experience(
        id=f"{origin.name}/{number:06d}" if row.columns.id is None else _label(row, "id"),
        group_id=f"{origin.name}/{group}",
        source=source,
        completion=completion,
        time=origin.time,
        prompt=prompt,
        messages=messages,
        answer=None if row.get("answer") is None else _label(row, "answer"),
        reward=None if row.get("reward") is None else _number(row, "reward", row.get("reward")),
        reward_parts=_reward_parts(row),
        truncated=_truncated(row),
        **_token_columns(row, origin.tokenizer, origin.sampling),
    )


def _texts(row: _Source) -> tuple[str | None, list | None, str]:
    """Prompt or messages, and the completion."""
    prompt, messages, completion = (row.get(name) for name in ("prompt", "messages", "completion"))
    if isinstance(prompt, list) and messages is None:
        column, prompt, messages = "prompt", None, prompt
    else:
        column = "messages"
    if (prompt is None) == (messages is None):
        found = "both" if prompt is not None else f"neither; the row has {', '.join(map(repr, row.values))}"
        names = f"{row.columns.prompt!r} and {row.columns.messages!r}"
        raise ValueError(f"{row.place}: a row has one of {names}; found {found}. Other names are flags")
    if messages is not None:
        messages = _chat(row, column, messages)
        if completion is None:
            *messages, last = messages
            if last["role"] != "assistant" or not messages:
                raise row.refuse(column, "without a completion, the last of two messages or more is the assistant's")
            completion = last["content"]
    elif not isinstance(prompt, str) or not prompt:
        raise row.refuse("prompt", "takes text that is not empty, or a list of messages")
    if isinstance(completion, list) and len(completion) == 1:
        completion = _chat(row, "completion", completion)[0]["content"]
    if not isinstance(completion, str):
        raise row.refuse("completion", "takes text, or a list of one message")
    return prompt, messages, completion


def _chat(row: _Source, column: str, messages: Any) -> list[dict[str, str]]:
    """Messages with role and content alone.

    Raises:
        ValueError: something else, or messages that say more than that, such as calls of tools.
    """
    for message in messages if isinstance(messages, list) and messages else [None]:
        if not isinstance(message, dict) or not all(isinstance(message.get(x), str) for x in ("role", "content")):
            raise row.refuse(column, "takes a list of messages, each with role and content, both text")
        if more := [name for name, value in message.items() if value and name not in ("role", "content")]:
            raise row.refuse(column, f"a message has {more[0]!r}, which a store cannot hold; put it into the content")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _label(row: _Source, column: str) -> str:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise row.refuse(column, "takes text or a number")
    return str(value)


def _number(row: _Source, column: str, value: Any) -> float:
    if not is_finite_number(value):
        raise row.refuse(column, "takes finite numbers")
    return float(value)


def _reward_parts(row: _Source) -> dict[str, float] | None:
    parts = row.get("reward_parts")
    if isinstance(parts, list) and all(isinstance(pair, dict) and pair.keys() == {"name", "value"} for pair in parts):
        parts = {pair["name"]: pair["value"] for pair in parts}
    if parts is None:
        return None
    if not isinstance(parts, dict):
        raise row.refuse("reward_parts", "takes names and numbers")
    # In Parquet a row has the names of all others too, with nothing under them.
    return {name: _number(row, "reward_parts", value) for name, value in parts.items() if value is not None} or None


def _truncated(row: _Source) -> bool:
    truncated, reason = row.get("truncated"), row.get("finish_reason")
    if truncated is not None and not isinstance(truncated, bool):
        raise row.refuse("truncated", "takes true and false")
    if reason not in (None, "stop", "length"):
        raise row.refuse(
            "finish_reason", "takes stop (it ended) and length (it was cut off); others are no completions"
        )
    if None not in (truncated, reason) and truncated != (reason == "length"):
        raise row.refuse("truncated", f"contradicts {row.columns.finish_reason} = {reason!r}")
    return bool(truncated) or reason == "length"


def _token_columns(row: _Source, tokenizer: str | None, sampling: Sampling | None) -> dict[str, Any]:
    prompt, tokens, logprobs = (row.get(name) for name in ("prompt_tokens", "tokens", "logprobs"))
    for column, value in (("prompt_tokens", prompt), ("tokens", tokens)):
        if value is None:
            continue
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise row.refuse(column, "takes a list of token ids")
        if tokenizer is None:
            raise row.refuse(column, "token ids mean nothing without their vocabulary; give --tokenizer, its folder")
    if logprobs is not None:
        if tokens is None:
            raise row.refuse(
                "logprobs", "log-probabilities need the ids of their tokens; give them, or leave these out"
            )
        if not isinstance(logprobs, list):
            raise row.refuse("logprobs", "takes a list of numbers, one a token")
        if sampling is None:
            raise row.refuse("logprobs", "they are under the distribution that drew the tokens; give its --temperature")
        logprobs = [_number(row, "logprobs", value) for value in logprobs]
    drawn_by = sampling or (None, None, None)
    return {
        "tokenizer": None if prompt is None and tokens is None else tokenizer,
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "completion_mask": None if tokens is None else [True] * len(tokens),
        "behaviour_logprobs": logprobs,
        **dict(zip(("temperature", "top_k", "top_p"), drawn_by, strict=True)),
    }
