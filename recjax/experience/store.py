"""The experience store: a folder of Parquet part files, one row a completion, whoever produced it.

`part-00000000.parquet`, `part-00000001.parquet` … are read in this order. A part appears whole or not at all, and one
that is damaged or lost since is noticed by the ledger beside it. The columns are described in docs/experience.md.
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
from filelock import FileLock

from recjax.experience import ledger
from recjax.experience.store_checks import check_rows, check_schema
from recjax.manifest import size_and_digest, sync_folder
from recjax.models.sampling import Sampling
from recjax.whole_files import writing

VERSION = "4"
# Columns by the versions that lack them.
_CAME_LATER = {"1": ("trajectory", "metadata", "min_p"), "2": ("metadata", "min_p"), "3": ("min_p",)}
_READABLE = (*_CAME_LATER, VERSION)
_VERSION_KEY = b"recjax.experience.version"
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_PART = pa.struct([("name", pa.string()), ("value", pa.float64())])
CHAT_TEMPLATE = "chat_template"  # in a row's metadata: variables that its messages give the chat template
PROMPT_LEFT_OUT = "(the prompt was not recorded)"  # the prompt of rows that do not say what was asked
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
    """One completion: a row of a store, its fields the columns. None is null: not known, or not there yet.

    Exactly one of `prompt` (text) and `messages` (a chat) is given. `tokenizer` names the vocabulary that the tokens
    are of. completion_mask is True at tokens that the behavior policy chose; behavior_logprobs are under the
    distribution that sampled them, which temperature, top_k, top_p and min_p describe. A row without a reward is
    pending.
    policy_version counts the optimizer updates of the weights that sampled the row; None: of another model.
    trajectory: of an agent's rows the id of the first one, whose prompt_tokens are each row's own; else None.
    metadata: a JSON object of what else is known, such as who asked; nothing here reads it.
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
        """The distribution that sampled the tokens; None: not known. Rows of before there was a min_p have none."""
        found = Sampling(self.temperature, self.top_k, self.top_p, self.min_p or 0.0)
        return None if None in found else found


_ARRAYS = ("prompt_tokens", "completion_tokens", "completion_mask", "behavior_logprobs")
_MISFITS = (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError)
_PLACE = "rows to append: row {}".format


def append(folder: str | Path, rows: Sequence[Experience], place: Callable[[int], str] = _PLACE) -> Path:
    """Adds rows to a store, which is made where there is none; returns the new part file.

    The part is written beside its place, forced to disk and renamed: a writer killed at any time leaves a store that
    reads as if it had never begun. Several processes may append at one time.

    Args:
        place: what error messages call each row, by its number.
    Raises:
        ValueError: a row that `read` would refuse, or an id that the store has; nothing is written.
    """
    table = to_table(rows, place)
    check_rows(table, place)
    part_files(folder)  # refuses a file, where the lock would make a folder
    with locked(folder):
        parts = part_files(folder)
        if taken := ids(folder).intersection(table["id"].to_pylist()):
            raise ValueError(f"{folder} has a row with id {min(taken)!r} already; ids are unique in a store")
        number = int(parts[-1].stem.removeprefix("part-")) + 1 if parts else 0
        path = Path(folder) / f"part-{number:08d}.parquet"
        write_part(table, path)
    return path


def keep_parts(folder: str | Path, wanted: Callable[[str], bool]) -> None:
    """Deletes the parts of a store that begin with the id of a row that is not wanted; no store is no error."""
    if Path(folder).is_dir():
        with locked(folder):
            for part in part_files(folder):
                if not wanted(read_columns(part, ["id"])["id"][0].as_py()):
                    with ledger.entered(part, None):
                        part.unlink()


def read(folder: str | Path) -> list[Experience]:
    """All rows of a store in the order they were appended, every one of them checked.

    Raises:
        ValueError: no store there, one of another version, or a bad row, with file, row, column and reason.
    """
    rows, seen = [], {}
    for part in existing_parts(folder):
        table = read_part(part)
        for index, name in enumerate(table["id"].to_pylist()):
            if name in seen:
                raise ValueError(f"{part}: row {index}: id {name!r} is also that of {seen[name]}; ids are unique")
            seen[name] = f"{part.name}, row {index}"
        rows.extend(to_rows(table))
    return rows


def existing_parts(folder: str | Path) -> list[Path]:
    """The part files of a store, in order.

    Raises:
        ValueError: there is none, or one was lost.
    """
    parts = part_files(folder)
    ledger.check_none_lost(Path(folder))
    if not parts:
        raise ValueError(
            f"{str(folder)!r} holds no experience (no part-*.parquet); python -m recjax.generate_experience and"
            " python -m recjax.import_experience make such a folder"
        )
    return parts


def part_files(folder: str | Path) -> list[Path]:
    """The part files of a folder, in order; none where it is empty or missing.

    Raises:
        ValueError: a file stands where the folder should.
    """
    if Path(folder).is_file():
        raise ValueError(f"{str(folder)!r} is a file; a store is a folder, so name another place")
    return sorted(Path(folder).glob("part-*.parquet"))


def ids(folder: str | Path) -> set[str]:
    """The ids of a store's rows; none where there is no store yet.

    Raises:
        ValueError: a file stands where the folder should, a part was lost, or one cannot be read or is of another
            version.
    """
    ledger.check_none_lost(Path(folder))
    statuses = [(part, part.stat()) for part in part_files(folder)]
    return set().union(*(_part_ids(part, status.st_ino, status.st_mtime_ns) for part, status in statuses))


@functools.cache
def _part_ids(part: Path, inode: int, modified: int) -> list[str]:
    # Kept, because every append asks for them; a part that was rewritten has another inode.
    return read_columns(part, ["id"])["id"].to_pylist()


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Holds the lock that every writer of the store takes; it falls open when its holder dies."""
    lock = Path(folder) / ".lock"
    if lock.exists() and not lock.is_file():
        raise ValueError(f"{lock} is no file, and a store's lock is one; remove it, or name another folder")
    with FileLock(lock):
        # Whoever was writing these is dead.
        for unfinished in Path(folder).glob(".part-*"):
            unfinished.unlink()
        ledger.settled(Path(folder))
        yield


def read_part(part: Path) -> pa.Table:
    """A part file's table, checked.

    Raises:
        ValueError: as `read`.
    """
    table = _as_now(read_columns(part))
    check_schema(table.schema, SCHEMA, str(part))
    table = table.select(SCHEMA.names).cast(SCHEMA)
    check_rows(table, lambda row: f"{part}: row {row}")
    return table


def _as_now(table: pa.Table) -> pa.Table:
    """A table of an earlier version as one of this: columns that came later are null."""
    found = (table.schema.metadata or {}).get(_VERSION_KEY, b"").decode()
    for name in _CAME_LATER.get(found, ()):
        if name not in table.schema.names:
            table = table.append_column(SCHEMA.field(name), pa.nulls(len(table), SCHEMA.field(name).type))
    return table


def read_columns(part: Path, columns: list[str] | None = None) -> pa.Table:
    """Columns of a part file, or all of them, of which nothing is checked but the version.

    Raises:
        ValueError: the file is damaged, cannot be read, or is of another version.
    """
    ledger.check_part(part)
    try:
        table = pq.read_table(part, columns=columns, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{part} cannot be read ({error}); move it away, or bring it back from a copy") from error
    found = (table.schema.metadata or {}).get(_VERSION_KEY)
    if found not in [version.encode() for version in _READABLE]:
        was = f"of version {found.decode()!r}" if found else "not marked as one"
        raise ValueError(
            f"{part}: this recjax reads experience of versions {', '.join(_READABLE)}, and the file is {was}; read"
            " it with the recjax that wrote it, or bring it in anew with python -m recjax.import_experience"
        )
    if not table.num_rows:
        raise ValueError(f"{part} holds no rows; a part of a store has at least one, so remove the file")
    return table


def write_part(table: pa.Table, path: Path) -> None:
    """Writes a part file, or replaces it, in one indivisible step that survives a loss of power; the lock is held.

    Raises:
        ValueError: it cannot be written; the store is as it was.
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
    """Rows as an Arrow table of the store's schema.

    Raises:
        ValueError: no rows, or a value that is not of its column's type.
    """
    if not rows:
        raise ValueError("there are no rows to append; a part of a store has at least one")
    records = [row._replace(reward_parts=reward_pairs(row.reward_parts))._asdict() for row in rows]
    try:
        return pa.Table.from_pylist(records, SCHEMA)
    except _MISFITS:
        for index, record in enumerate(records):
            for field in SCHEMA:
                _check_fits(record[field.name], field, place(index))
        raise


def _check_fits(value: Any, field: pa.Field, place: str) -> None:
    try:
        pa.array([value], field.type)
    except _MISFITS as error:
        raise ValueError(f"{place}: column {field.name}: {value!r:.80} is not {field.type} ({error})") from error


def to_bytes(rows: Sequence[Experience]) -> bytes:
    """Rows as one Parquet file in memory; `from_bytes` makes them again."""
    file = pa.BufferOutputStream()
    pq.write_table(to_table(rows), file, compression="zstd")
    return file.getvalue().to_pybytes()


def from_bytes(parquet: bytes) -> list[Experience]:
    """The rows that `to_bytes` wrote."""
    return list(to_rows(_as_now(pq.read_table(pa.BufferReader(parquet)))))


def reward_pairs(parts: dict[str, float] | None) -> list[dict[str, Any]] | None:
    """Reward parts as the store holds them: pairs and not a map, because `datasets` has no maps."""
    return None if parts is None else [{"name": name, "value": value} for name, value in parts.items()]


def parts_of(pairs: list[dict[str, Any]] | None) -> dict[str, float] | None:
    """Reward parts from the pairs that `reward_pairs` made of them."""
    return None if pairs is None else {pair["name"]: pair["value"] for pair in pairs}


def to_rows(table: pa.Table) -> Iterator[Experience]:
    """The rows of a checked table; token columns as NumPy arrays."""
    columns = {
        name: table[name].to_pandas().tolist() if name in _ARRAYS else table[name].to_pylist()
        for name in Experience._fields
    }
    columns["reward_parts"] = map(parts_of, columns["reward_parts"])
    return map(Experience, *columns.values())
