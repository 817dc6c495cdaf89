"""A store as a table that other programs read: Parquet or JSON Lines, with a row for each completion.

The columns are those of the store, with lists in place of bytes, and the completion's rewards. docs/store_format.md
describes them.
"""

import base64
import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recjax.errors import UserError
from recjax.experience.completion_schema import COLUMNS, DTYPES, EXPORTED, Check, check_records
from recjax.experience.group import Grade
from recjax.experience.records import Record, from_json, record_of, row_of
from recjax.runtime.files import whole_file
from recjax.store.store import Store

# metadata key of Parquet files, and its value
_VERSION = b"recjax.experience.version"
_CURRENT = b"8"
TOGETHER = 1024  # completions to convert or import at a time
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_PART = pa.struct([("name", pa.string()), ("value", pa.float64())])
# Types by the kind of a column.
KINDS = {
    "text": pa.string(),
    "json": pa.string(),
    "messages": pa.list_(_MESSAGE),
    "parts": pa.list_(_PART),
    "bool": pa.bool_(),
    "int32": pa.int32(),
    "float64": pa.float64(),
    "time": pa.timestamp("us", tz="UTC"),
    "bytes": pa.binary(),
    "int32[]": pa.list_(pa.int32()),
    "bool[]": pa.list_(pa.bool_()),
    "float32[]": pa.list_(pa.float32()),
    "float64[]": pa.list_(pa.float64()),
}
SCHEMA = pa.schema([(name, KINDS[COLUMNS[name].kind]) for name in EXPORTED], metadata={_VERSION: _CURRENT})
_LISTS = {name: DTYPES[COLUMNS[name].kind] for name in EXPORTED if COLUMNS[name].kind in DTYPES}  # bytes in the store
_JSON = tuple(name for name in EXPORTED if COLUMNS[name].kind == "json")
_PLAIN = tuple(name for name in EXPORTED if name not in (*_LISTS, *_JSON, "prompt", "messages", "recorded"))
_AGAIN = "export the store again"


def export_store(store: Store, path: Path) -> int:
    """Writes all completions of a store to a .parquet or .jsonl file; returns their number.

    Raises:
        ValueError: another ending, a damaged store, or a file that cannot be written; an existing file stays.
    """
    records = store.records(others=True)
    count = 0
    if path.suffix not in (".parquet", ".jsonl"):
        raise UserError(f"--output {str(path)!r}", "give a file that ends with .parquet or .jsonl")
    with whole_file(path) as file:
        writer = pq.ParquetWriter(file, SCHEMA, compression="zstd") if path.suffix == ".parquet" else None
        while rows := list(map(_exported, itertools.islice(records, TOGETHER))):
            count += len(rows)
            if writer:
                writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
            for row in () if writer else rows:
                recorded = row["recorded"] and base64.b64encode(row["recorded"]).decode()
                plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in row.items()}
                plain |= {"time": row["time"].isoformat(), "recorded": recorded}
                file.write(f"{json.dumps(plain, ensure_ascii=False)}\n".encode())
        if writer:
            writer.close()
    return count


def read_exported(path: Path) -> Iterator[Record] | None:
    """The completions of an exported file, read and checked on demand; None for other files.

    Raises:
        UserError: a file that is damaged or cannot be read, or a bad row, with file, row, column, value and remedy.
    """
    is_ours = False
    if path.suffix == ".parquet" and path.is_file():
        try:
            is_ours = _VERSION in (pq.read_schema(path).metadata or {})
        except (pa.ArrowException, OSError):
            return None
    elif path.suffix == ".jsonl" and path.is_file():
        with path.open(encoding="utf-8") as file:
            try:
                first = json.loads(file.readline())
            except (ValueError, RecursionError):  # `foreign.import_rows` reports the error
                return None
        is_ours = isinstance(first, dict) and first.keys() == set(SCHEMA.names)
    if not is_ours:
        return None
    if path.suffix == ".jsonl":
        return _records(_lines(path))
    return _records(_parquet_rows(path))


def _records(rows: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[Record]:
    """The completions of rows with their places, checked as many together as are converted together."""
    while batch := list(itertools.islice(rows, TOGETHER)):
        places = [place for place, _ in batch]
        check = Check(len(batch), places.__getitem__)
        _check_columns(check, [row for _, row in batch])
        check.finish()
        records = [_record(place, row) for place, row in batch]
        check_records(records, places.__getitem__)
        yield from records


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file with JSON Lines, each with its place."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}: line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(place, f"is not a line of an export ({error})", _AGAIN) from error
            if not isinstance(row, dict):
                raise UserError(place, "is not a line of an export", _AGAIN, row)
            for name in SCHEMA.names:
                if name not in row:
                    raise UserError(f"{place}: {name}", "is missing", _AGAIN)
            # The check of the columns refuses values that stay as they are.
            with contextlib.suppress(ValueError, TypeError):
                row["time"] = datetime.fromisoformat(row["time"])
            with contextlib.suppress(ValueError, TypeError):
                row["recorded"] = row["recorded"] and base64.b64decode(row["recorded"], validate=True)
            yield place, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a Parquet file, each with its place; lists of numbers are arrays."""
    try:
        file = pq.ParquetFile(path)
        version = file.schema_arrow.metadata[_VERSION]
        if version != _CURRENT:
            problem = f"has store version {version.decode()!r}, and this recjax imports {_CURRENT.decode()}"
            raise UserError(path, problem, "import it with the recjax that wrote it")
        types = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
        for field in SCHEMA:
            if field.name not in types:
                raise UserError(f"{path}: {field.name}", "is missing", _AGAIN)
            if (kind := types[field.name]) != field.type:
                raise UserError(f"{path}: {field.name}", f"has type {kind}", f"convert it to {field.type}")
        number = 0
        for batch in file.iter_batches(TOGETHER):
            arrays = [_arrays(batch[name]) for name in _LISTS]
            for row, *of_row in zip(batch.drop_columns([*_LISTS]).to_pylist(), *arrays, strict=True):
                yield f"{path}: row {number}", row | dict(zip(_LISTS, of_row, strict=True))
                number += 1
    except (pa.ArrowException, OSError) as error:
        remedy = "restore the file from a backup, or move it away"
        raise UserError(path, f"cannot be read ({error})", remedy) from error


def _arrays(column: pa.ListArray) -> list[Any]:
    """The lists of a column: arrays, or Python's lists if one has a null; None for null."""
    elements = column.flatten()
    if elements.null_count:
        return column.to_pylist()
    ends = np.cumsum(column.value_lengths().fill_null(0).to_numpy())
    arrays = np.split(elements.to_numpy(zero_copy_only=False), ends[:-1])
    lists: list[Any] = []
    for array, is_known in zip(arrays, column.is_valid().to_pylist(), strict=True):
        lists.append(array if is_known else None)
    return lists


def _exported(record: Record) -> dict[str, Any]:
    """The row of a completion."""
    row = row_of(record, 0)
    grade = record.completion.grade or Grade(None)
    others = {name: [*grade_and_failure, comment] for name, (grade_and_failure, comment) in record.others.items()}
    row |= {name: np.frombuffer(row[name], dtype) if row[name] else None for name, dtype in _LISTS.items()}
    row |= {
        "messages": row["messages"] and json.loads(row["messages"]),
        "reward": grade.reward,
        "reward_parts": grade.reward_parts
        and [{"name": name, "value": value} for name, value in grade.reward_parts.items()],
        "accurate": grade.accurate,
        "time": record.time,
        "turn_rewards": grade.turns or None,
        "other_rewards": json.dumps(others) if others else None,
    }
    return {name: row[name] for name in SCHEMA.names}


def _check_columns(check: Check, rows: Sequence[dict[str, Any]]) -> None:
    """Checks each column of rows; brings nulls and the parts of rewards into the form of `record_of`."""
    for name in _JSON:
        _decode(check, name, rows)
    _check_forms(check, rows)
    for name in _PLAIN:
        check.plain(name, [row[name] for row in rows])
    texts = [index for index, row in enumerate(rows) if row["messages"] is None]
    check.plain("prompt", [rows[index]["prompt"] for index in texts], texts)
    chats = [index for index, row in enumerate(rows) if row["messages"] is not None]
    check.plain("messages", [rows[index]["messages"] for index in chats], chats)
    check.prompts(range(len(rows)), [_or_empty(row["prompt_tokens"]) for row in rows])
    has_tokens = [any(_has_values(row[name]) for name in _OF_TOKENS) for row in rows[: check.count]]
    owners = list(itertools.compress(range(check.count), has_tokens))
    tokens, masks, logprobs = [[rows[index][name] for index in owners] for name in _OF_TOKENS]
    logprobs = [values if _has_values(values) else None for values in logprobs]
    check.rows(owners, list(map(_or_empty, tokens)), list(map(_or_empty, masks)), logprobs)


_OF_TOKENS = ("completion_tokens", "completion_mask", "behavior_logprobs")


def _has_values(values: Any) -> bool:
    """True for all values except null and an empty list."""
    if isinstance(values, list | np.ndarray):
        return len(values) > 0
    return values is not None


def _or_empty(values: Any) -> Any:
    """An empty list for null."""
    return [] if values is None else values


def _decode(check: Check, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Checks a column with texts of JSON; JSON's null and the empty text become null."""
    values = []
    for index, row in enumerate(rows[: check.count]):
        try:
            values.append(json.loads(row[name] or "null"))
        except (ValueError, TypeError, RecursionError):
            check.refuse(index, name, row[name], "takes the text of JSON, or null", _AGAIN)
            break
        if values[-1] is None:
            row[name] = None
    check.plain(name, values)


def _check_forms(check: Check, rows: Sequence[dict[str, Any]]) -> None:
    """Checks columns that have another form in exports than in completions."""
    for index, row in enumerate(rows[: check.count]):
        pairs = row["reward_parts"]
        # The column's check refuses lists of anything else.
        if isinstance(pairs, list) and all(isinstance(pair, dict) and pair.keys() == _PAIR for pair in pairs):
            with contextlib.suppress(TypeError):  # a name that is no text
                row["reward_parts"] = {pair["name"]: pair["value"] for pair in pairs} or None
        if row["prompt"] is not None and row["messages"] is not None:
            check.refuse(index, "prompt", row["prompt"], "stands next to messages", COLUMNS["prompt"].remedy)
            return
        if not isinstance(row["recorded"], bytes | None):
            check.refuse(index, "recorded", row["recorded"], "takes text in base64, or null", _AGAIN)
            return


_PAIR = {"name", "value"}


def _record(place: str, row: Mapping[str, Any]) -> Record:
    """The completion of a row whose columns are checked one by one."""
    lists: dict[str, bytes | None] = {
        name: np.array(_or_empty(row[name]), dtype).tobytes() for name, dtype in _LISTS.items()
    }
    if not lists["behavior_logprobs"]:
        lists["behavior_logprobs"] = None
    time = row["time"]
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    stored = {**row, **lists, "number": 0, "time": time.timestamp()}
    if row["messages"] is not None:
        stored["messages"] = json.dumps(row["messages"])
    grade = None
    if row["reward"] is not None or row["reward_parts"]:
        grade = Grade(row["reward"], row["reward_parts"], row["accurate"], turns=tuple(row["turn_rewards"] or ()))
    try:
        record = record_of(stored, grade)
    except ValueError as error:  # lengths that contradict each other, or damaged arrays
        raise UserError(place, str(error)) from error
    others = from_json(row["other_rewards"], {})
    return record._replace(
        others={name: (Grade.from_json(values), comment) for name, (*values, comment) in others.items()}
    )
