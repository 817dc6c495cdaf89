"""Converts completions in JSON Lines, CSV and Parquet files of other programs to records of a store."""

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recjax.experience.group import Completion, Grade, Group, Row
from recjax.experience.records import CHAT_TEMPLATE, Record
from recjax.experience.store_checks import MOST_REWARD, is_finite_number
from recjax.models.sampling import Sampling
from recjax.tasks.grading.reward import check_part_names
from recjax.tasks.problems import check_last_message, checked_messages, messages_in
from recjax.tasks.reading import ENDING, MORE_ENDINGS, TEMPLATE_COLUMNS, FileRow, as_text, read_file, template_of


class Columns(NamedTuple):
    """Names of a file's columns. Columns that a file lacks are null, except for the completion and its prompt.

    `messages` is a chat; without a completion column, its last message is the completion. `group` None: rows with equal
    prompts form a group. `id` None: rows are numbered. `source` None: all rows of a file have the same source.
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
    source: str | None = None


class Imported(NamedTuple):
    """Imported completions, their names in error messages, and the names of unused columns."""

    records: list[Record]
    places: list[str]
    unused: list[str]


def import_rows(
    files: Sequence[str | Path],
    columns: Columns,
    time: datetime,
    *,
    source: str | None = None,
    tokenizer: str | None = None,
    sampling: Sampling | None = None,
) -> Imported:
    """Imports the rows of files, in order; rows with the same prompt form one group, also across files.

    Args:
        columns: names of the columns.
        time: time to record in all rows.
        source: source of all rows; None: the name of each file without its ending.
        tokenizer: name of the vocabulary for columns with tokens; see `tokenize.tokenizer_name`.
        sampling: distribution that sampled the tokens; required for rows with log-probs.
    Raises:
        ValueError: an unreadable file or an unusable row; the message contains file, line or row, and reason.
    """
    if source is not None and columns.source is not None:
        raise ValueError(f"--source {source!r}: has no effect with --source_column {columns.source!r}; remove one")
    named = {name: column for name, column in columns._asdict().items() if (name, column) != ("source", None)}
    listed = ", ".join(f"{name}={column!r}" for name, column in named.items())
    digest = hashlib.sha256(f"({source!r}, Columns({listed}))".encode())
    for file in map(Path, files):
        if not file.is_file():
            problem = "is a folder; give its files" if file.is_dir() else "no such file; correct --input"
            raise ValueError(f"{file}: {problem}")
        digest.update(file.read_bytes())
    name = digest.hexdigest()[:12]
    records = []
    places = []
    seen = {}
    fields = [(field, column) for field, column in columns._asdict().items() if column]
    for file in map(Path, files):
        is_csv = file.suffix.lower() == ".csv"
        if not (is_csv or ENDING.search(file.name)):
            raise ValueError(f"{file}: give .jsonl, .csv or .parquet files {MORE_ENDINGS}")
        named = source or (ENDING.sub("", file.name) if ENDING.search(file.name) else file.stem)
        # Places are line numbers from 1, or row numbers from 0 in Parquet files.
        for values, where in _csv_rows(file, columns) if is_csv else read_file(file, "--input", narrow_lists=False):
            by_field = {field: values[column] for field, column in fields if column in values}
            row = _Source(values, by_field, columns, where)
            number = len(records)
            records.append(_record(row, name, number, named, time, tokenizer=tokenizer, sampling=sampling))
            places.append(where)
            seen |= values
    if not records:
        raise ValueError(f"{', '.join(map(str, files))}: has no rows; give a file with at least one")
    for column, wanted in columns._asdict().items():
        if wanted not in (*seen, Columns._field_defaults[column]):
            raise ValueError(f"--{column}_column {wanted!r}: no row has this column; choose from {', '.join(seen)}")
    has_chats = any(not isinstance(record.group.prompt, str) for record in records)
    taken = {*columns, *(TEMPLATE_COLUMNS if has_chats else ())}
    return Imported(records, places, [column for column in seen if column not in taken])


def _csv_rows(file: Path, columns: Columns) -> Iterator[FileRow]:
    """Reads a CSV file with cells of text, numbers and JSON; an empty cell is null unless it is a completion."""
    structured = {columns.messages, columns.reward_parts, columns.prompt_tokens, columns.tokens, columns.logprobs}
    structured |= {columns.reward, columns.truncated}
    csv.field_size_limit(2**31 - 1)  # completions may be longer than the csv module's default limit
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, strict=True)  # surplus cells have the key None
        try:
            # pandas writes its index as columns without a name.
            if repeated := [name for name, count in Counter(reader.fieldnames or ()).items() if name and count > 1]:
                raise ValueError(f"--input: {file}: line 1: the column {repeated[0]!r} is given twice; remove one")
            for cells in reader:
                where = f"--input: {file}: line {reader.line_num}"
                if None in cells or None in cells.values():
                    raise ValueError(f"{where}: more or fewer cells than the {len(reader.fieldnames or ())} columns")
                row = {name: cell if cell or name == columns.completion else None for name, cell in cells.items()}
                for name in structured & row.keys():
                    if (cell := row[name]) is None:
                        continue
                    try:
                        # Spreadsheets write TRUE and FALSE.
                        row[name] = json.loads(cell.lower() if cell.lower() in ("true", "false") else cell)
                    except (ValueError, RecursionError) as error:
                        reason = f"is neither a number nor JSON ({error})"
                        raise ValueError(f"{where}: {name}: {cell!r:.80} {reason}") from error
                yield FileRow(row, where)
        except csv.Error as error:
            raise ValueError(f"--input: {file}: line {reader.line_num}: {error}") from error
        except UnicodeDecodeError as error:
            where = f"--input: {file}: after line {reader.line_num}"
            raise ValueError(f"{where}: is not UTF-8 ({error.reason}); save the file as UTF-8") from error


class _Source(NamedTuple):
    """A row of a file, its values by field of `Columns`, the names of the columns, and its place for messages."""

    values: Mapping[str, Any]
    given: Mapping[str, Any]
    columns: Columns
    place: str

    def require(self, fits: object, column: str, reason: str) -> None:
        """Raises an error about the value in a column unless `fits` is true."""
        if not fits:
            name = getattr(self.columns, column)
            raise ValueError(f"{self.place}: {name}: {self.given.get(column)!r:.80}: {reason}")


def _record(
    row: _Source, name: str, number: int, source: str, time: datetime, tokenizer: str | None, sampling: Sampling | None
) -> Record:
    prompt, messages, completion = _texts(row)
    template = {} if messages is None else template_of(FileRow(row.values, row.place))
    prompt_text = prompt if messages is None else json.dumps([messages, template] if template else messages)
    group = hashlib.sha256(prompt_text.encode()).hexdigest()[:12] if row.columns.group is None else _label(row, "group")
    parts = row.given.get("reward_parts")
    if isinstance(parts, list) and all(isinstance(pair, dict) and pair.keys() == {"name", "value"} for pair in parts):
        parts = {pair["name"]: pair["value"] for pair in parts}
    row.require(isinstance(parts, dict | None), "reward_parts", "takes names and numbers")
    # In Parquet files, every row has the part names of all rows, with null for parts that it lacks.
    parts = {name: value for name, value in (parts or {}).items() if value is not None}
    check_part_names(parts, f"{row.place}: {row.columns.reward_parts}")
    truncated = row.given.get("truncated")
    reason = row.given.get("finish_reason")
    row.require(isinstance(truncated, bool | None), "truncated", "takes true and false")
    endings = "takes stop (it ended) and length (it was cut off); other replies are no completions"
    row.require(reason in (None, "stop", "length"), "finish_reason", endings)
    agrees = None in (truncated, reason) or truncated == (reason == "length")
    row.require(agrees, "truncated", f"contradicts {row.columns.finish_reason} = {reason!r}")
    answer = as_text(row.given.get("answer"))
    row.require(answer or row.given.get("answer") is None, "answer", "takes text or a number")
    prompt_tokens, rows, distribution = _tokens(row, tokenizer, sampling)
    reward = None if (value := row.given.get("reward")) is None else _number(row, "reward", value)
    reward_parts = {name: _number(row, "reward_parts", value) for name, value in parts.items()} or None
    completion = Completion(
        id=f"{name}/{number:06d}" if row.columns.id is None else _label(row, "id"),
        source=source if row.columns.source is None else _label(row, "source"),
        text=completion,
        rows=rows,
        sampling=distribution,
        policy_version=None,
        truncated=bool(truncated) or reason == "length",
        grade=None if reward is None and not reward_parts else Grade(reward, reward_parts),
        metadata={CHAT_TEMPLATE: template} if template else {},
    )
    group = Group(f"{name}/{group}", prompt_tokens, (completion,), prompt if messages is None else messages, answer)
    return Record(group, time, tokenizer if rows or len(prompt_tokens) else None)


def _texts(row: _Source) -> tuple[Any, list | None, Any]:
    """The prompt or the messages (one is None), and the completion."""
    prompt, messages = (messages_in(row.given.get(name)) for name in ("prompt", "messages"))
    completion = row.given.get("completion")
    column = "messages"
    if isinstance(prompt, list) and messages is None:
        column, prompt, messages = "prompt", None, prompt
    if (prompt is None) == (messages is None):
        given = "both" if prompt is not None else f"neither; the row has {', '.join(map(repr, row.values))}"
        names = f"{row.columns.prompt!r} and {row.columns.messages!r}"
        raise ValueError(
            f"{row.place}: give one of {names}; found {given}. --prompt_column and --messages_column set other names"
        )
    if messages is not None:
        messages = _chat(row, column, messages)
        if completion is None:
            *messages, last = messages
            reason = "without a completion, give at least two messages, the last one from the assistant"
            row.require(messages and last["role"] == "assistant", column, reason)
            completion = last["content"]
        if row.given.get("prompt_tokens") is None:
            check_last_message(messages, f"{row.place}: {column}")
    else:
        row.require(prompt and isinstance(prompt, str), "prompt", "takes text that is not empty, or a list of messages")
    if isinstance(completion, list) and len(completion) == 1:
        completion = _chat(row, "completion", completion)[0]["content"]
    row.require(isinstance(completion, str), "completion", "takes text, or a list of one message")
    return prompt, messages, completion


def _chat(row: _Source, column: str, messages: Any) -> list[dict[str, str]]:
    """Checks that messages have only role and content.

    Raises:
        ValueError: a value that is not a chat, or messages with other fields, such as tool calls.
    """
    messages = checked_messages(messages, f"{row.place}: {getattr(row.columns, column)}")
    for message in messages:
        more = [repr(key) for key, value in message.items() if value and key not in ("role", "content")]
        problem = f"a message has {', '.join(more)}, which a store cannot hold; move the value into the content"
        row.require(not more, column, problem)
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _label(row: _Source, column: str) -> str:
    value = row.given.get(column)
    row.require(as_text(value), column, "takes text or a number")
    return str(value)


def _number(row: _Source, column: str, value: Any) -> float:
    row.require(is_finite_number(value), column, f"takes finite numbers of at most {MOST_REWARD:g}")
    return float(value)


def _tokens(
    row: _Source, tokenizer: str | None, sampling: Sampling | None
) -> tuple[np.ndarray, tuple[Row, ...], Sampling | None]:
    """The prompt's tokens, empty if the record has none, the rows, and the distribution."""
    prompt, tokens, logprobs = (row.given.get(name) for name in ("prompt_tokens", "tokens", "logprobs"))
    unnamed = "token ids need their vocabulary; give --tokenizer, the folder of the model's tokenizer"
    for column, value in (("prompt_tokens", prompt), ("tokens", tokens)):
        if value is not None:
            whole = isinstance(value, list) and all(type(token) is int for token in value)
            row.require(whole, column, "takes a list of token ids")
            row.require(tokenizer is not None, column, unnamed)
            row.require(value, column, "has no tokens; prompts and completions need at least one")
            row.require(0 <= min(value) <= max(value) < 2**31, column, "token ids are whole numbers, 0 or more")
    if logprobs is not None:
        row.require(
            tokens is not None,
            "logprobs",
            f"log-probabilities need the ids of their tokens: give them in the columns {row.columns.tokens!r} and"
            f" {row.columns.prompt_tokens!r} (--tokens_column and --prompt_tokens_column name others), with"
            " --tokenizer, or remove the log-probabilities",
        )
        row.require(isinstance(logprobs, list), "logprobs", "takes a list of numbers, one for each token")
        remedy = "log-probabilities need the distribution that sampled the tokens; give --temperature"
        row.require(sampling is not None, "logprobs", remedy)
        logprobs = np.array([_number(row, "logprobs", value) for value in logprobs], np.float32)
    prompt = np.array(prompt or [], np.int32)
    rows = () if tokens is None else (Row(prompt, np.array(tokens, np.int32), np.ones(len(tokens), bool), logprobs),)
    return prompt, rows, sampling
