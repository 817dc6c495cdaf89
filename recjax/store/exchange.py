"""Exports a store as a table that other programs read, and imports it: Parquet or JSON Lines, a row a completion.

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
from recjax.experience.columns import COLUMNS, DTYPES, EXPORTED
from recjax.experience.completion_checks import Check, check_records
from recjax.experience.group import Grade
from recjax.experience.records import Record, from_json, record_of, row_of
from recjax.runtime.files import whole_file
from recjax.store.store import Store

_VERSION = b"recjax.experience.version"  # This metadata key of Parquet files has the version of the export.
_CURRENT = b"8"
TOGETHER = 1024  # completions to convert or import at a time
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_PART = pa.struct([("name", pa.string()), ("value", pa.float64())])
# Arrow types by the kind of a column.
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
# Lists in an export, with the dtype of their bytes in a store.
_LISTS = {name: DTYPES[COLUMNS[name].kind] for name in EXPORTED if COLUMNS[name].kind in DTYPES}
_JSON = tuple(name for name in EXPORTED if COLUMNS[name].kind == "json")
# Columns that need a check of their own.
_CHECKED_APART = _LISTS.keys() | {"prompt", "messages", "recorded"} | set(_JSON)
_PLAIN = tuple(name for name in EXPORTED if name not in _CHECKED_APART)
_ROW_LISTS = ("completion_tokens", "completion_mask", "behavior_logprobs")
_PART_KEYS = {"name", "value"}
_AGAIN = "export the store again"


def export_store(store: Store, path: Path) -> int:
    """Writes all completions of a store to a .parquet or .jsonl file; returns their number.

    Raises:
        ValueError: the file has another ending or cannot be written, or the store is damaged. An existing file stays
            unchanged.
    """
    if path.suffix not in (".parquet", ".jsonl"):
        raise UserError(f"--output {str(path)!r}", "give a file that ends with .parquet or .jsonl")
    records = store.records(others=True)
    count = 0
    with whole_file(path) as file:
        writer = None
        if path.suffix == ".parquet":
            writer = pq.ParquetWriter(file, SCHEMA, compression="zstd")
        while rows := [_exported(record) for record in itertools.islice(records, TOGETHER)]:
            count += len(rows)
            if writer is None:
                for row in rows:
                    file.write(f"{_json_line(row)}\n".encode())
            else:
                writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
        if writer is not None:
            writer.close()
    return count


def _json_line(row: Mapping[str, Any]) -> str:
    """The JSON text of an exported row."""
    plain = dict(row)
    for name in _LISTS:
        if row[name] is not None:
            plain[name] = row[name].tolist()
    plain["time"] = row["time"].isoformat()
    if row["recorded"]:
        plain["recorded"] = base64.b64encode(row["recorded"]).decode()
    return json.dumps(plain, ensure_ascii=False)


def read_exported(path: Path) -> Iterator[Record] | None:
    """Reads and checks the completions of an exported file on demand; None for other files.

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
            except (ValueError, RecursionError):
                return None  # `foreign.import_rows` reports the error.
        is_ours = isinstance(first, dict) and first.keys() == set(SCHEMA.names)
    if not is_ours:
        return None
    if path.suffix == ".jsonl":
        return _records(_lines(path))
    return _records(_parquet_rows(path))


def _records(rows: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[Record]:
    """Checks and converts rows with their places, `TOGETHER` rows at a time."""
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
            if row["recorded"]:
                with contextlib.suppress(ValueError, TypeError):
                    row["recorded"] = base64.b64decode(row["recorded"], validate=True)
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
            kind = types[field.name]
            if kind != field.type:
                raise UserError(f"{path}: {field.name}", f"has type {kind}", f"convert it to {field.type}")
        number = 0
        for batch in file.iter_batches(TOGETHER):
            rows = batch.drop_columns(list(_LISTS)).to_pylist()
            lists = {name: _arrays(batch[name]) for name in _LISTS}
            for index, row in enumerate(rows):
                for name in _LISTS:
                    row[name] = lists[name][index]
                yield f"{path}: row {number}", row
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
    """The exported row of a completion."""
    row = row_of(record, 0)
    for name, dtype in _LISTS.items():
        row[name] = np.frombuffer(row[name], dtype) if row[name] else None
    if row["messages"] is not None:
        row["messages"] = json.loads(row["messages"])
    row["time"] = record.time
    grade = record.completion.grade or Grade(None)
    row["reward"] = grade.reward
    row["reward_parts"] = grade.reward_parts
    if grade.reward_parts:
        row["reward_parts"] = [{"name": name, "value": value} for name, value in grade.reward_parts.items()]
    row["accurate"] = grade.accurate
    row["turn_rewards"] = grade.turns or None
    row["other_rewards"] = None
    if record.others:
        others = {grader: [*grade, comment] for grader, (grade, comment) in record.others.items()}
        row["other_rewards"] = json.dumps(others)
    return {name: row[name] for name in SCHEMA.names}


def _check_columns(check: Check, rows: Sequence[dict[str, Any]]) -> None:
    """Checks each column of rows; converts nulls, lists and the parts of rewards to the form that `_record` reads."""
    for name in _JSON:
        _decode(check, name, rows)
    _check_forms(check, rows)
    for name in _PLAIN:
        check.plain(name, [row[name] for row in rows])
    texts = [index for index, row in enumerate(rows) if row["messages"] is None]
    check.plain("prompt", [rows[index]["prompt"] for index in texts], texts)
    chats = [index for index, row in enumerate(rows) if row["messages"] is not None]
    check.plain("messages", [rows[index]["messages"] for index in chats], chats)
    prompts = check.prompts(range(len(rows)), [_or_empty(row["prompt_tokens"]) for row in rows])
    for row, prompt in zip(rows, prompts, strict=False):
        row["prompt_tokens"] = prompt
    owners = []
    for index, row in enumerate(rows[: check.count]):
        if any(_has_values(row[name]) for name in _ROW_LISTS):
            owners.append(index)
    logprobs = []
    for index in owners:
        values = rows[index]["behavior_logprobs"]
        logprobs.append(values if _has_values(values) else None)
    arrays = check.rows(
        owners,
        tokens=[_or_empty(rows[index]["completion_tokens"]) for index in owners],
        masks=[_or_empty(rows[index]["completion_mask"]) for index in owners],
        logprobs=logprobs,
    )
    # Lists of a bad row, and of the rows after it, stay as they are: the check ends with an error.
    for index, tokens, mask, known_logprobs in zip(owners, arrays.tokens, arrays.masks, arrays.logprobs, strict=False):
        rows[index]["completion_tokens"] = tokens
        rows[index]["completion_mask"] = mask
        rows[index]["behavior_logprobs"] = known_logprobs


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
        text = row[name] or "null"
        try:
            value = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            check.refuse(index, name, row[name], "takes the text of JSON, or null", _AGAIN)
            break
        if value is None:
            row[name] = None
        values.append(value)
    check.plain(name, values)


def _check_forms(check: Check, rows: Sequence[dict[str, Any]]) -> None:
    """Checks the columns that have another form in exports than in completions."""
    for index, row in enumerate(rows[: check.count]):
        pairs = row["reward_parts"]
        # The column's own check refuses all other lists.
        if isinstance(pairs, list) and all(isinstance(pair, dict) and pair.keys() == _PART_KEYS for pair in pairs):
            with contextlib.suppress(TypeError):  # A name may be a list or an object.
                row["reward_parts"] = {pair["name"]: pair["value"] for pair in pairs} or None
        if row["prompt"] is not None and row["messages"] is not None:
            check.refuse(index, "prompt", row["prompt"], "stands next to messages", COLUMNS["prompt"].remedy)
            return
        if not isinstance(row["recorded"], bytes | None):
            check.refuse(index, "recorded", row["recorded"], "takes text in base64, or null", _AGAIN)
            return


def _record(place: str, row: Mapping[str, Any]) -> Record:
    """Makes the completion of a row whose columns are checked one by one."""
    stored = dict(row)
    stored["number"] = 0
    time = row["time"]
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    stored["time"] = time.timestamp()
    for name, dtype in _LISTS.items():
        stored[name] = np.asarray(_or_empty(row[name]), dtype).tobytes()
    if not stored["behavior_logprobs"]:
        stored["behavior_logprobs"] = None
    if row["messages"] is not None:
        stored["messages"] = json.dumps(row["messages"])
    grade = None
    if row["reward"] is not None or row["reward_parts"]:
        grade = Grade(row["reward"], row["reward_parts"], row["accurate"], turns=tuple(row["turn_rewards"] or ()))
    try:
        record = record_of(stored, grade)
    except ValueError as error:
        # Lengths contradict each other, or recorded arrays are damaged.
        raise UserError(place, str(error)) from error
    others = {}
    for grader, (*values, comment) in from_json(row["other_rewards"], {}).items():
        others[grader] = Grade.from_json(values), comment
    return record._replace(others=others)
