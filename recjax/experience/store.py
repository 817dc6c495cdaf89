"""The experience store: a folder of Parquet part files with one row per completion, from any source.

`part-00000000.parquet`, `part-00000001.parquet` … are read in this order. A part appears whole or not at all, and the
ledger in the folder detects parts that are damaged or lost later. docs/experience.md describes the columns.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recjax.experience import ledger
from recjax.experience.store_checks import check_rows, check_schema
from recjax.files import locked_file, size_and_digest, sync_folder, writing
from recjax.models.sampling import Sampling

VERSION = "4"
_VERSION_KEY = b"recjax.experience.version"
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_PART = pa.struct([("name", pa.string()), ("value", pa.float64())])
CHAT_TEMPLATE = "chat_template"  # metadata key for the variables of the chat template
PROMPT_LEFT_OUT = "(the prompt was not recorded)"  # prompt of rows whose prompt was not recorded
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
        ("trajectory", pa.string()),
        ("metadata", pa.string()),
    ],
    metadata={_VERSION_KEY: VERSION.encode()},
)


class Experience(NamedTuple):
    """One completion: a row of a store with the columns as fields. None means not known, or not available yet.

    A row has exactly one of `prompt` (text) and `messages` (a chat). `tokenizer` names the vocabulary of the tokens.
    completion_mask is True at tokens that the behavior policy chose. behavior_logprobs are the log-probs under the
    distribution that sampled the tokens; temperature, top_k, top_p and min_p describe it. A row without a reward is
    pending.
    policy_version: optimizer updates of the weights that sampled the row; None for another model.
    trajectory: id of the first row of an agent's trajectory, whose rows each have their own prompt_tokens; else None.
    metadata: JSON object with additional information, such as the user; this module does not read it.
    """

    id: str
    group_id: str
    source: str
    completion: str
    time: datetime
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    answer: str | None = None
    tokenizer: str | None = None
    prompt_tokens: np.ndarray | None = None
    completion_tokens: np.ndarray | None = None
    completion_mask: np.ndarray | None = None
    behavior_logprobs: np.ndarray | None = None
    reward: float | None = None
    reward_parts: dict[str, float] | None = None
    accurate: bool | None = None
    truncated: bool = False
    policy_version: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    trajectory: str | None = None
    metadata: str | None = None

    @property
    def sampling(self) -> Sampling | None:
        """The distribution that sampled the tokens; None if not known. A missing min_p counts as 0."""
        found = Sampling(self.temperature, self.top_k, self.top_p, self.min_p or 0.0)
        return None if None in found else found


_ARRAYS = ("prompt_tokens", "completion_tokens", "completion_mask", "behavior_logprobs")
_MISFITS = (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError)
_PLACE = "rows to append: row {}".format


def append(folder: str | Path, rows: Sequence[Experience], place: Callable[[int], str] = _PLACE) -> Path:
    """Adds rows to a store, or to a new store if the folder does not exist; returns the new part file.

    Writes a temporary file, forces it to disk and renames it, so that a killed writer leaves the store unchanged.
    Several processes may append concurrently.

    Args:
        place: function from a row's number to its name in error messages.
    Raises:
        ValueError: a row that `read` would reject, or an id that the store already has; the store stays unchanged.
    """
    table = to_table(rows, place)
    check_rows(table, place)
    part_files(folder)  # raises an error for a file, before the lock creates a folder
    with locked(folder):
        parts = part_files(folder)
        if taken := ids(folder).intersection(table["id"].to_pylist()):
            raise ValueError(f"{folder}: already has a row with id {min(taken)!r}; give every row a new id")
        number = int(parts[-1].stem.removeprefix("part-")) + 1 if parts else 0
        path = Path(folder) / f"part-{number:08d}.parquet"
        write_part(table, path)
    return path


def keep_parts(folder: str | Path, wanted: Callable[[str], bool]) -> None:
    """Deletes the parts of a store whose first row has an unwanted id; does not require the store to exist."""
    if Path(folder).is_dir():
        with locked(folder):
            for part in part_files(folder):
                if not wanted(read_columns(part, ["id"])["id"][0].as_py()):
                    with ledger.entered(part, None):
                        part.unlink()


def read(folder: str | Path) -> list[Experience]:
    """Reads and checks all rows of a store, in the order they were appended.

    Raises:
        ValueError: no store, another version, or a bad row; the message names file, row, column and reason.
    """
    rows, seen = [], {}
    for part in existing_parts(folder):
        table = read_part(part)
        for index, name in enumerate(table["id"].to_pylist()):
            if name in seen:
                raise ValueError(f"{part}: row {index}: id {name!r} is also the id of {seen[name]}; ids must be unique")
            seen[name] = f"{part.name}, row {index}"
        rows.extend(to_rows(table))
    return rows


def existing_parts(folder: str | Path) -> list[Path]:
    """The part files of a store, in order.

    Raises:
        ValueError: the store has no part files, or a part was lost.
    """
    parts = part_files(folder)
    ledger.check_none_lost(Path(folder))
    if not parts:
        raise ValueError(
            f"{str(folder)!r} is not an experience store (no part-*.parquet); create one with"
            " python -m recjax.generate_experience or python -m recjax.import_experience"
        )
    return parts


def part_files(folder: str | Path) -> list[Path]:
    """The part files of a folder, in order; an empty list if the folder is empty or missing.

    Raises:
        ValueError: the path is a file.
    """
    if Path(folder).is_file():
        raise ValueError(f"{str(folder)!r} is a file, and a store is a folder; give another path")
    return sorted(Path(folder).glob("part-*.parquet"))


def ids(folder: str | Path) -> set[str]:
    """The ids of a store's rows; an empty set if the store does not exist yet.

    Raises:
        ValueError: the path is a file, or a part was lost, cannot be read or has another version.
    """
    ledger.check_none_lost(Path(folder))
    statuses = [(part, part.stat()) for part in part_files(folder)]
    return set().union(*(_part_ids(part, status.st_ino, status.st_mtime_ns) for part, status in statuses))


@functools.cache
def _part_ids(part: Path, inode: int, modified: int) -> list[str]:
    # Cached, because every append needs all ids; a part that was rewritten has another inode.
    return read_columns(part, ["id"])["id"].to_pylist()


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Holds the store's write lock, which the operating system releases if the process dies."""
    lock = Path(folder) / ".lock"
    if lock.exists() and not lock.is_file():
        raise ValueError(f"{lock} must be a file, as it is the store's lock; remove it, or give another folder")
    with locked_file(lock):
        # Every writer holds the lock, so these files are from killed writers.
        for unfinished in Path(folder).glob(".part-*"):
            unfinished.unlink()
        ledger.settled(Path(folder))
        yield


def read_part(part: Path) -> pa.Table:
    """Reads and checks the table of a part file.

    Raises:
        ValueError: see `read`.
    """
    table = read_columns(part)
    check_schema(table.schema, SCHEMA, str(part))
    table = table.select(SCHEMA.names).cast(SCHEMA)
    check_rows(table, lambda row: f"{part}: row {row}")
    return table


def read_columns(part: Path, columns: list[str] | None = None) -> pa.Table:
    """Reads some or all columns of a part file; checks the file's checksum and version but not its rows.

    Raises:
        ValueError: the file is damaged, cannot be read, has no rows, or has another version.
    """
    ledger.check_part(part)
    try:
        table = pq.read_table(part, columns=columns, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{part} cannot be read ({error}); restore the file from a backup, or move it away") from error
    found = (table.schema.metadata or {}).get(_VERSION_KEY)
    if found != VERSION.encode():
        problem = f"the file has store version {found.decode()!r}" if found else "the file was not written by a store"
        raise ValueError(
            f"{part}: {problem}, and this recjax reads version {VERSION}; import the file with"
            " python -m recjax.import_experience"
        )
    if not table.num_rows:
        raise ValueError(f"{part}: has no rows, and every part of a store has at least one; remove the file")
    return table


def write_part(table: pa.Table, path: Path) -> None:
    """Writes or replaces a part file atomically, safe against power loss; the caller holds the store's lock.

    Raises:
        ValueError: the file cannot be written; the store stays unchanged.
    """
    temporary = path.with_name(f".{path.name}")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                pq.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            with ledger.entered(path, size_and_digest(temporary)):
                os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def to_table(rows: Sequence[Experience], place: Callable[[int], str] = _PLACE) -> pa.Table:
    """Converts rows to an Arrow table with the store's schema.

    Raises:
        ValueError: no rows, or a value with the wrong type for its column.
    """
    if not rows:
        raise ValueError("there are no rows to append; give at least one")
    records = [row._replace(reward_parts=reward_pairs(row.reward_parts))._asdict() for row in rows]
    try:
        return pa.Table.from_pylist(records, SCHEMA)
    except _MISFITS:
        for index, record in enumerate(records):
            for field in SCHEMA:
                value = record[field.name]
                try:
                    pa.array([value], field.type)
                except _MISFITS as error:
                    reason = f"{value!r:.80} is not {field.type} ({error})"
                    raise ValueError(f"{place(index)}: column {field.name}: {reason}") from error
        raise


def to_bytes(rows: Sequence[Experience]) -> bytes:
    """Converts rows to a Parquet file in memory; `from_bytes` is the inverse."""
    file = pa.BufferOutputStream()
    pq.write_table(to_table(rows), file, compression="zstd")
    return file.getvalue().to_pybytes()


def from_bytes(parquet: bytes) -> list[Experience]:
    """Converts the bytes of `to_bytes` back to rows."""
    return list(to_rows(pq.read_table(pa.BufferReader(parquet))))


def reward_pairs(parts: dict[str, float] | None) -> list[dict[str, Any]] | None:
    """Converts reward parts to pairs, their format in the store, because `datasets` does not support maps."""
    return None if parts is None else [{"name": name, "value": value} for name, value in parts.items()]


def parts_of(pairs: list[dict[str, Any]] | None) -> dict[str, float] | None:
    """Converts the pairs of `reward_pairs` back to reward parts."""
    return None if pairs is None else {pair["name"]: pair["value"] for pair in pairs}


def to_rows(table: pa.Table) -> Iterator[Experience]:
    """Converts a checked table to rows, with token columns as NumPy arrays."""
    columns = {
        name: table[name].to_pandas().tolist() if name in _ARRAYS else table[name].to_pylist()
        for name in Experience._fields
    }
    columns["reward_parts"] = map(parts_of, columns["reward_parts"])
    return map(Experience, *columns.values())
