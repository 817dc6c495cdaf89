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

from recjax.errors import UserError
from recjax.experience.completion_checks import GIVE_TOKENS, NO_TOKENS, check_records, check_value, to_array
from recjax.experience.group import Completion, Grade, Group, Row
from recjax.experience.records import CHAT_TEMPLATE, Record
from recjax.models.sampling import Sampling
from recjax.rewards.reward import check_part_names
from recjax.tasks.problems import check_last_message, checked_messages, messages_in
from recjax.tasks.reading import ENDING, MORE_ENDINGS, TEMPLATE_COLUMNS, FileRow, as_text, read_file, template_of


class Columns(NamedTuple):
    """Names of a file's columns. Missing columns are null, except for the completion and its prompt.

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
    import_name = _import_name(files, columns, source)
    records = []
    places = []
    seen: dict[str, Any] = {}
    for file in map(Path, files):
        is_csv = file.suffix.lower() == ".csv"
        if not (is_csv or ENDING.search(file.name)):
            raise UserError(file, f"give .jsonl, .csv or .parquet files {MORE_ENDINGS}")
        if is_csv:
            rows = _csv_rows(file, columns)
        else:
            rows = read_file(file, "--input", narrow_lists=False)
        file_source = source or _without_ending(file)
        # Places are line numbers from 1, or row numbers from 0 in Parquet files.
        for values, place in rows:
            row = _Source(values, columns, place)
            record = _record(
                row,
                import_name=import_name,
                number=len(records),
                source=file_source,
                time=time,
                tokenizer=tokenizer,
                sampling=sampling,
            )
            records.append(record)
            places.append(place)
            seen.update(values)
    if not records:
        raise UserError(", ".join(map(str, files)), "has no rows", "give a file with at least one")
    for field, column in columns._asdict().items():
        is_default = column == Columns._field_defaults[field]
        if not is_default and column not in seen:
            raise UserError(f"--{field}_column {column!r}", "no row has this column", f"choose from {', '.join(seen)}")
    check_records(records, places.__getitem__, columns.by_schema())
    used = set(columns)
    if any(not isinstance(record.group.prompt, str) for record in records):
        used.update(TEMPLATE_COLUMNS)
    unused = [column for column in seen if column not in used]
    return Imported(records, places, unused)


def _import_name(files: Sequence[str | Path], columns: Columns, source: str | None) -> str:
    """The name with which the ids of imported rows begin: a digest of the files and of the columns' names."""
    named = columns._asdict()
    if columns.source is None:
        del named["source"]  # Imports without a column of sources keep the names that they always had.
    listed = ", ".join(f"{field}={column!r}" for field, column in named.items())
    digest = hashlib.sha256(f"({source!r}, Columns({listed}))".encode())
    for file in map(Path, files):
        if file.is_dir():
            raise UserError(file, "is a folder", "give its files")
        if not file.is_file():
            raise UserError(file, "no such file", "correct --input")
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _without_ending(file: Path) -> str:
    """The file's name without `.parquet`, or without a JSON ending that may be compressed."""
    if ENDING.search(file.name):
        return ENDING.sub("", file.name)
    return file.stem


def _csv_rows(file: Path, columns: Columns) -> Iterator[FileRow]:
    """Reads a CSV file with cells of text, numbers and JSON; an empty cell is null unless it is a completion."""
    json_columns = {
        columns.messages,
        columns.reward_parts,
        columns.prompt_tokens,
        columns.tokens,
        columns.logprobs,
        columns.reward,
        columns.truncated,
    }
    csv.field_size_limit(2**31 - 1)  # Completions may be longer than the csv module's default limit.
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, strict=True)
        try:
            names = reader.fieldnames or ()
            for name, count in Counter(names).items():
                # pandas writes its index as columns without a name.
                if name and count > 1:
                    where = f"--input: {file}: line 1"
                    raise UserError(where, f"the column {name!r} is given twice", "remove one")
            for cells in reader:
                where = f"--input: {file}: line {reader.line_num}"
                # The reader gives surplus cells the name None, and missing cells the value None.
                if None in cells or None in cells.values():
                    raise UserError(where, f"more or fewer cells than the {len(names)} columns")
                row: dict[str, Any] = {}
                for name, cell in cells.items():
                    if cell == "" and name != columns.completion:
                        row[name] = None
                    elif name in json_columns:
                        row[name] = _json_cell(cell)
                    else:
                        row[name] = cell
                yield FileRow(row, where)
        except csv.Error as error:
            raise UserError(f"--input: {file}: line {reader.line_num}", str(error)) from error
        except UnicodeDecodeError as error:
            where = f"--input: {file}: after line {reader.line_num}"
            raise UserError(where, f"is not UTF-8 ({error.reason})", "save the file as UTF-8") from error


def _json_cell(cell: str) -> Any:
    """The JSON value of a cell; text that is not JSON stays as it is, and the column's check refuses it."""
    if cell.lower() in ("true", "false"):  # Spreadsheets write TRUE and FALSE.
        cell = cell.lower()
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell


class _Source(NamedTuple):
    """A row of a file: its values by column, the names of the columns, and its place for messages."""

    values: Mapping[str, Any]
    columns: Columns
    place: str

    def get(self, field: str) -> Any:
        """The value in the column for a field of `Columns`; None without it."""
        column = getattr(self.columns, field)
        if not column:
            return None
        return self.values.get(column)

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
        return UserError(self.where(column), problem, remedy, self.get(column))


def _record(
    row: _Source,
    *,
    import_name: str,
    number: int,
    source: str,
    time: datetime,
    tokenizer: str | None,
    sampling: Sampling | None,
) -> Record:
    """Makes the completion of a row; without a column for the id or the source, they come from the arguments."""
    prompt, messages, text = _texts(row)
    template: dict[str, Any] = {}
    group_name = prompt
    if messages is not None:
        template = template_of(FileRow(row.values, row.place))
        group_name = json.dumps([messages, template] if template else messages)
    if row.columns.group is not None:
        group_id = _label(row, "group")
    else:
        group_id = hashlib.sha256(group_name.encode()).hexdigest()[:12]
    answer = _answer(row)
    prompt_tokens, rows = _tokens(row, tokenizer, sampling)
    completion_id = f"{import_name}/{number:06d}"
    if row.columns.id is not None:
        completion_id = _label(row, "id")
    if row.columns.source is not None:
        source = _label(row, "source")
    completion = Completion(
        id=completion_id,
        source=source,
        text=text,
        rows=rows,
        sampling=sampling,
        policy_version=None,
        truncated=_is_truncated(row),
        grade=_grade(row),
        metadata={CHAT_TEMPLATE: template} if template else {},
    )
    group = Group(
        id=f"{import_name}/{group_id}",
        prompt_tokens=prompt_tokens,
        completions=(completion,),
        prompt=prompt if messages is None else messages,
        answer=answer,
    )
    has_tokens = len(rows) > 0 or len(prompt_tokens) > 0
    return Record(group, time, tokenizer if has_tokens else None)


def _answer(row: _Source) -> str | None:
    """The reference answer, which may be a number in the file."""
    answer = row.get("answer")
    if answer is None:
        return None
    text = as_text(answer)
    if text is None:
        text = answer
    answer = row.checked("answer", text)
    if not answer:
        raise row.error("answer", "is empty", "give the reference answer, or null")
    return answer


def _is_truncated(row: _Source) -> bool:
    truncated = row.get("truncated")
    reason = row.get("finish_reason")
    if truncated is not None:
        truncated = row.checked("truncated", truncated)
    if reason not in (None, "stop", "length"):
        problem = "takes stop (it ended) and length (it was cut off)"
        raise row.error("finish_reason", problem, "remove the row, as other replies are no completions")
    reached_limit = reason == "length"
    if truncated is None or reason is None:
        return bool(truncated) or reached_limit
    if truncated != reached_limit:
        problem = f"contradicts {row.columns.finish_reason} = {reason!r}"
        raise row.error("truncated", problem, "correct one of them, or remove it")
    return reached_limit


def _grade(row: _Source) -> Grade | None:
    """The grade of a row; None while it is pending."""
    reward = row.get("reward")
    parts = row.get("reward_parts")
    if isinstance(parts, list) and all(isinstance(pair, dict) and pair.keys() == {"name", "value"} for pair in parts):
        parts = {pair["name"]: pair["value"] for pair in parts}
    if isinstance(parts, dict):
        # In Parquet files, every row has the part names of all rows, with null for missing parts.
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
    prompt = messages_in(row.get("prompt"))
    messages = messages_in(row.get("messages"))
    completion = row.get("completion")
    column = "messages"
    if isinstance(prompt, list) and messages is None:
        column = "prompt"
        messages = prompt
        prompt = None
    if (prompt is None) == (messages is None):
        given = "both"
        if prompt is None:
            given = f"neither; the row has {', '.join(map(repr, row.values))}"
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
        if row.get("prompt_tokens") is None:
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
    value = row.get(column)
    if as_text(value):
        value = str(value)
    name = "group_id" if column == "group" else column
    return check_value(name, value, row.where(column))


def _tokens(row: _Source, tokenizer: str | None, sampling: Sampling | None) -> tuple[np.ndarray, tuple[Row, ...]]:
    """The prompt's tokens, empty if the file has none, and the rows."""
    prompt = _token_ids(row, "prompt_tokens", "prompt_tokens", tokenizer)
    tokens = _token_ids(row, "tokens", "completion_tokens", tokenizer)
    logprobs = row.get("logprobs")
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
    return prompt, rows


def _token_ids(row: _Source, column: str, name: str, tokenizer: str | None) -> np.ndarray | None:
    """The tokens in a column, whose name in `columns.COLUMNS` is `name`; None without tokens."""
    values = row.get(column)
    if values is None:
        return None
    tokens = to_array(name, values, row.where(column))
    if tokenizer is None:
        problem = "token ids need their vocabulary"
        raise row.error(column, problem, "give --tokenizer, the folder of the model's tokenizer")
    if not len(tokens):
        raise row.error(column, NO_TOKENS, GIVE_TOKENS)
    return tokens
