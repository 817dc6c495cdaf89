"""A store as a table that other programs read: Parquet or JSON Lines, with a row for each completion.

The columns are those of the store, with lists in place of bytes, and the completion's rewards. docs/store_format.md
describes them.
"""

import base64
import itertools
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recjax.errors import UserError
from recjax.experience.group import Grade
from recjax.experience.records import Record, record_of, row_of
from recjax.experience.store import Store
from recjax.files import whole_file

# metadata key of Parquet files, and its value
_VERSION = b"recjax.experience.version"
_CURRENT = b"8"
TOGETHER = 1024  # completions to convert or import at a time
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_PART = pa.struct([("name", pa.string()), ("value", pa.float64())])
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("group_id", pa.string()),
        ("source", pa.string()),
        ("prompt", pa.string()),
        ("messages", pa.list_(_MESSAGE)),
        ("completion", pa.string()),
        ("answer", pa.string()),
        ("tokenizer", pa.string()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("completion_tokens", pa.list_(pa.int32())),
        ("completion_mask", pa.list_(pa.bool_())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("reward", pa.float64()),
        ("reward_parts", pa.list_(_PART)),
        ("accurate", pa.bool_()),
        ("truncated", pa.bool_()),
        ("policy_version", pa.int32()),
        ("temperature", pa.float64()),
        ("top_k", pa.int32()),
        ("top_p", pa.float64()),
        ("min_p", pa.float64()),
        ("time", pa.timestamp("us", tz="UTC")),
        ("metadata", pa.string()),
        ("token_versions", pa.string()),
        ("turns", pa.string()),
        ("turn_rewards", pa.list_(pa.float64())),
        ("row_lengths", pa.string()),
        ("other_rewards", pa.string()),
        ("recorded", pa.binary()),
    ],
    metadata={_VERSION: _CURRENT},
)
# Columns with lists of numbers, as bytes in the store, and columns with JSON.
_LISTS = {"prompt_tokens": "<i4", "completion_tokens": "<i4", "completion_mask": "bool", "behavior_logprobs": "<f4"}
_JSON = ("metadata", "token_versions", "turns", "row_lengths", "other_rewards")


def export_store(store: Store, path: Path) -> int:
    """Writes all completions of a store to a .parquet or .jsonl file; returns their number.

    Raises:
        ValueError: another ending, a damaged store, or a file that cannot be written; an existing file stays.
    """
    records = store.records(others=True)
    count = 0
    if path.suffix not in (".parquet", ".jsonl"):
        raise UserError("", f"--output {str(path)!r}: give a file that ends with .parquet or .jsonl")
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
    """The completions of an exported file, read on demand; None for other files.

    Raises:
        ValueError: a file that is damaged or cannot be read; the message names file, row and column.
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
    return itertools.starmap(_imported, _rows(path)) if is_ours else None


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                place = f"{path}: line {number}"
                try:
                    row = json.loads(line)
                    recorded = row["recorded"] and base64.b64decode(row["recorded"], validate=True)
                    row |= {"time": datetime.fromisoformat(row["time"]), "recorded": recorded}
                    yield place, {name: row[name] for name in SCHEMA.names}
                except (ValueError, TypeError, KeyError) as error:
                    raise UserError(
                        "", f"{place}: is not a line of an export ({error!r}); export the store again"
                    ) from error
        return
    try:
        file = pq.ParquetFile(path)
        version = file.schema_arrow.metadata[_VERSION]
        if version != _CURRENT:
            words = f"has store version {version.decode()!r}, and this recjax imports {_CURRENT.decode()}"
            raise UserError("", f"{path}: {words}; import it with the recjax that wrote it")
        types = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
        for field in SCHEMA:
            if field.name not in types:
                raise UserError("", f"{path}: column {field.name} is missing; export the store again")
            if (kind := types[field.name]) != field.type:
                raise UserError("", f"{path}: column {field.name} has type {kind}; convert it to {field.type}")
        rows = (row for batch in file.iter_batches(TOGETHER) for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"{path}: row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            "", f"{path} cannot be read ({error}); restore the file from a backup, or move it away"
        ) from error


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


def _imported(place: str, row: Mapping[str, Any]) -> Record:
    """The completion of a row; checks what `store_checks.check_records` cannot see in a completion."""
    try:
        if (row["prompt"] is None) == (row["messages"] is None):
            raise UserError("", f"column prompt: {row['prompt']!r:.80}: give one of prompt and messages")
        for name in _JSON:
            try:
                json.loads(row[name] or "null")
            except (ValueError, TypeError, RecursionError) as error:
                raise UserError("", f"column {name}: {row[name]!r:.80}: takes the text of JSON, or null") from error
        for name in _LISTS:
            if None in (row[name] or ()):
                raise UserError("", f"column {name}: {row[name]!r:.80}: has a null")
        if (time := row["time"]) is None:
            raise UserError("", "column time: None: must be given in every row")
        lists = {name: np.array(row[name] or [], dtype).tobytes() for name, dtype in _LISTS.items()}
        lists |= {} if row["behavior_logprobs"] else {"behavior_logprobs": None}
        time = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        messages = None if row["messages"] is None else json.dumps(row["messages"])
        parts = row["reward_parts"] and {pair["name"]: pair["value"] for pair in row["reward_parts"]}
        grade = Grade(row["reward"], parts, row["accurate"], turns=tuple(row["turn_rewards"] or ()))
        grade = None if row["reward"] is None and not parts else grade
        record = record_of({**row, **lists, "number": 0, "time": time, "messages": messages}, grade)
        others = json.loads(row["other_rewards"] or "{}")
        others = {name: (Grade.from_json(values), comment) for name, (*values, comment) in others.items()}
        return record._replace(others=others)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UserError("", f"{place}: {error}") from error
