"""Converts completions in JSON Lines, CSV and Parquet files of other programs to records of a store."""

import contextlib
import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recjax.errors import UserError
from recjax.experience.completion_checks import GIVE_TOKENS, NO_TOKENS, check_records, check_value, to_array
from recjax.experience.group import Completion, Grade, Group, Row
from recjax.experience.records import CHAT_TEMPLATE, Record
from recjax.models.sampling import Sampling
from recjax.rewards.reward import check_part_names
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

    def by_schema(self) -> dict[str, str]:
        """The names of the file's columns by the names of `columns.COLUMNS`."""
        names = {name: column for name, column in self._asdict().items() if column is not None}
        return names | {"completion_tokens": self.tokens, "behavior_logprobs": self.logprobs}


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
        UserError: an unreadable file or an unusable row, with file, line or row, column, value, problem and remedy.
    """
    if source is not None and columns.source is not None:
        problem = f"has no effect with --source_column {columns.source!r}"
        raise UserError(f"--source {source!r}", problem, "remove one")
    named = {name: column for name, column in columns._asdict().items() if (name, column) != ("source", None)}
    listed = ", ".join(f"{name}={column!r}" for name, column in named.items())
    digest = hashlib.sha256(f"({source!r}, Columns({listed}))".encode())
    for file in map(Path, files):
        if not file.is_file():
            if file.is_dir():
                raise UserError(file, "is a folder", "give its files")
            raise UserError(file, "no such file", "correct --input")
        digest.update(file.read_bytes())
    name = digest.hexdigest()[:12]
    records = []
    places = []
    seen = {}
    fields = [(field, column) for field, column in columns._asdict().items() if column]
    for file in map(Path, files):
        is_csv = file.suffix.lower() == ".csv"
        if not (is_csv or ENDING.search(file.name)):
            raise UserError(file, f"give .jsonl, .csv or .parquet files {MORE_ENDINGS}")
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
        raise UserError(", ".join(map(str, files)), "has no rows", "give a file with at least one")
    for column, wanted in columns._asdict().items():
        if wanted not in (*seen, Columns._field_defaults[column]):
            raise UserError(f"--{column}_column {wanted!r}", "no row has this column", f"choose from {', '.join(seen)}")
    check_records(records, places.__getitem__, columns.by_schema())
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
                where = f"--input: {file}: line 1"
                raise UserError(where, f"the column {repeated[0]!r} is given twice", "remove one")
            for cells in reader:
                where = f"--input: {file}: line {reader.line_num}"
                if None in cells or None in cells.values():
                    raise UserError(where, f"more or fewer cells than the {len(reader.fieldnames or ())} columns")
                row = {name: cell if cell or name == columns.completion else None for name, cell in cells.items()}
                for name in structured & row.keys():
                    cell = row[name]
                    if cell is None:
                        continue
                    if cell.lower() in ("true", "false"):  # spreadsheets write TRUE and FALSE
                        cell = cell.lower()
                    with contextlib.suppress(ValueError, RecursionError):  # the column's check refuses other text
                        row[name] = json.loads(cell)
                yield FileRow(row, where)
        except csv.Error as error:
            raise UserError(f"--input: {file}: line {reader.line_num}", str(error)) from error
        except UnicodeDecodeError as error:
            where = f"--input: {file}: after line {reader.line_num}"
            raise UserError(where, f"is not UTF-8 ({error.reason})", "save the file as UTF-8") from error


class _Source(NamedTuple):
    """A row of a file, its values by field of `Columns`, the names of the columns, and its place for messages."""

    values: Mapping[str, Any]
    given: Mapping[str, Any]
    columns: Columns
    place: str

    def where(self, column: str) -> str:
        """The place and the name of a column."""
        return f"{self.place}: {getattr(self.columns, column)}"

    def checked(self, column: str, value: Any) -> Any:
        """Checks a value against the column of the same name in `columns.COLUMNS`, and returns it.

        Raises:
            UserError: the column does not take the value.
        """
        return check_value(column, value, self.where(column))

    def error(self, column: str, problem: str, remedy: str) -> UserError:
        """The error about the value in a column."""
        return UserError(self.where(column), problem, remedy, self.given.get(column))


def _record(
    row: _Source, name: str, number: int, source: str, time: datetime, tokenizer: str | None, sampling: Sampling | None
) -> Record:
    prompt, messages, completion = _texts(row)
    template = {} if messages is None else template_of(FileRow(row.values, row.place))
    prompt_text = prompt if messages is None else json.dumps([messages, template] if template else messages)
    if row.columns.group is None:
        group = hashlib.sha256(prompt_text.encode()).hexdigest()[:12]
    else:
        group = _label(row, "group")
    answer = row.given.get("answer")
    if answer is not None:
        text = as_text(answer)
        answer = row.checked("answer", answer if text is None else text)
        if not answer:
            raise row.error("answer", "is empty", "give the reference answer, or null")
    prompt_tokens, rows, distribution = _tokens(row, tokenizer, sampling)
    completion = Completion(
        id=f"{name}/{number:06d}" if row.columns.id is None else _label(row, "id"),
        source=source if row.columns.source is None else _label(row, "source"),
        text=completion,
        rows=rows,
        sampling=distribution,
        policy_version=None,
        truncated=_is_truncated(row),
        grade=_grade(row),
        metadata={CHAT_TEMPLATE: template} if template else {},
    )
    group = Group(f"{name}/{group}", prompt_tokens, (completion,), prompt if messages is None else messages, answer)
    return Record(group, time, tokenizer if rows or len(prompt_tokens) else None)


def _is_truncated(row: _Source) -> bool:
    truncated = row.given.get("truncated")
    reason = row.given.get("finish_reason")
    if truncated is not None:
        truncated = row.checked("truncated", truncated)
    if reason not in (None, "stop", "length"):
        problem = "takes stop (it ended) and length (it was cut off)"
        raise row.error("finish_reason", problem, "remove the row, as other replies are no completions")
    if None not in (truncated, reason) and truncated != (reason == "length"):
        problem = f"contradicts {row.columns.finish_reason} = {reason!r}"
        raise row.error("truncated", problem, "correct one of them, or remove it")
    return bool(truncated) or reason == "length"


def _grade(row: _Source) -> Grade | None:
    """The grade of a row; None while it is pending."""
    reward = row.given.get("reward")
    parts = row.given.get("reward_parts")
    if isinstance(parts, list) and all(isinstance(pair, dict) and pair.keys() == {"name", "value"} for pair in parts):
        parts = {pair["name"]: pair["value"] for pair in parts}
    if isinstance(parts, dict):
        # In Parquet files, every row has the part names of all rows, with null for parts that it lacks.
        parts = {name: value for name, value in parts.items() if value is not None} or None
    if parts is not None:
        parts = row.checked("reward_parts", parts)
        check_part_names(parts, row.where("reward_parts"))
    if reward is not None:
        reward = row.checked("reward", reward)
    if reward is None and parts is None:
        return None
    return Grade(reward, parts)


def _texts(row: _Source) -> tuple[Any, list | None, str]:
    """The prompt or the messages (one is None), and the completion."""
    prompt, messages = (messages_in(row.given.get(name)) for name in ("prompt", "messages"))
    completion = row.given.get("completion")
    column = "messages"
    if isinstance(prompt, list) and messages is None:
        column, prompt, messages = "prompt", None, prompt
    if (prompt is None) == (messages is None):
        given = "both" if prompt is not None else f"neither; the row has {', '.join(map(repr, row.values))}"
        names = f"{row.columns.prompt!r} and {row.columns.messages!r}"
        remedy = "--prompt_column and --messages_column set other names"
        raise UserError(row.place, f"give one of {names}; found {given}", remedy)
    if messages is not None:
        messages = _chat(row, column, messages)
        if completion is None:
            *messages, last = messages
            if not messages or last["role"] != "assistant":
                problem = "without a completion, takes at least two messages, the last one from the assistant"
                raise row.error(column, problem, "add the reply of the assistant")
            completion = last["content"]
        if row.given.get("prompt_tokens") is None:
            check_last_message(messages, row.where(column))
    else:
        prompt = row.checked("prompt", prompt)
    if isinstance(completion, list) and len(completion) == 1:
        completion = _chat(row, "completion", completion)[0]["content"]
    return prompt, messages, row.checked("completion", completion)


def _chat(row: _Source, column: str, messages: Any) -> list[dict[str, str]]:
    """Checks that messages have only role and content.

    Raises:
        UserError: a value that is not a chat, or messages with other fields, such as tool calls.
    """
    messages = checked_messages(messages, row.where(column))
    for message in messages:
        more = [repr(key) for key, value in message.items() if value and key not in ("role", "content")]
        if more:
            problem = f"a message has {', '.join(more)}, which a store cannot hold"
            raise row.error(column, problem, "move the value into the content")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _label(row: _Source, column: str) -> str:
    """A name, which may be a number in the file."""
    value = row.given.get(column)
    if as_text(value):
        value = str(value)
    return check_value("group_id" if column == "group" else column, value, row.where(column))


def _tokens(
    row: _Source, tokenizer: str | None, sampling: Sampling | None
) -> tuple[np.ndarray, tuple[Row, ...], Sampling | None]:
    """The prompt's tokens, empty if the record has none, the rows, and the distribution."""
    prompt = _token_ids(row, "prompt_tokens", "prompt_tokens", tokenizer)
    tokens = _token_ids(row, "tokens", "completion_tokens", tokenizer)
    logprobs = row.given.get("logprobs")
    if logprobs is not None:
        if tokens is None:
            remedy = (
                f"give them in the columns {row.columns.tokens!r} and {row.columns.prompt_tokens!r} (--tokens_column"
                " and --prompt_tokens_column name others), with --tokenizer, or remove the log-probabilities"
            )
            raise row.error("logprobs", "log-probabilities need the ids of their tokens", remedy)
        logprobs = to_array("behavior_logprobs", logprobs, row.where("logprobs"))
        if sampling is None:
            problem = "log-probabilities need the distribution that sampled the tokens"
            raise row.error("logprobs", problem, "give --temperature")
    if prompt is None:
        prompt = np.zeros(0, np.int32)
    rows = ()
    if tokens is not None:
        rows = (Row(prompt, tokens, np.ones(len(tokens), bool), logprobs),)
    return prompt, rows, sampling


def _token_ids(row: _Source, column: str, name: str, tokenizer: str | None) -> np.ndarray | None:
    """The tokens in a column, called `name` in the schema; None without any."""
    values = row.given.get(column)
    if values is None:
        return None
    tokens = to_array(name, values, row.where(column))
    if tokenizer is None:
        problem = "token ids need their vocabulary"
        raise row.error(column, problem, "give --tokenizer, the folder of the model's tokenizer")
    if not len(tokens):
        raise row.error(column, NO_TOKENS, GIVE_TOKENS)
    return tokens
