"""Prepares a store for training: checks and tokenizes its rows and makes an Arrow table that is read on demand.

The table of a large store is a file in the cache. recjax writes the file part by part, once for each state of the store
and each tokenizer, and writes it again if it is damaged.
"""

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import tokenizers
import transformers
import xxhash

from recjax import __version__, hosts
from recjax.cache import cache_folder
from recjax.console import progress_bar
from recjax.experience import ledger
from recjax.experience.store import SCHEMA, VERSION, existing_parts, read_part, to_rows
from recjax.experience.tokenize import tokenized, tokenizer_name
from recjax.files import check_manifest, locked_file, size_and_digest, whole_file, write_manifest, writing
from recjax.hub.chat_rendering import turn_end
from recjax.hub.policy import Policy

SMALL = 2**24  # largest size of a store's parts, in bytes, for making the table in memory at every start
_TOGETHER = 4096  # rows converted to Python objects at a time
_PIECE = 2**16  # approximate bytes of the table that reading one row loads
_STATE_KEY = b"recjax.experience.made_of"
_FILE = "rows.arrow"

logger = logging.getLogger(__name__)


class Rows:
    """The rows of a table that is read piece by piece. Row numbers count in the order of the store."""

    def __init__(self, source: pa.Buffer | pa.NativeFile, columns: Sequence[str] | None = None):
        """Reads only the lengths of the pieces.

        Args:
            source: data of the table: bytes in memory, or an open file, which stays valid if its path is replaced.
            columns: names of the columns to read; None: all.
        """
        self._source = source
        self._reader = self._open(columns)
        self._starts = np.cumsum([0, *(len(piece) for piece in self._pieces([SCHEMA.names[0]]))])

    def __len__(self) -> int:
        """The number of rows."""
        return int(self._starts[-1])

    def select(self, columns: Sequence[str]) -> "Rows":
        """All rows with only some of the columns."""
        return Rows(self._source, columns)

    def at(self, numbers: np.ndarray) -> pa.Table:
        """Reads the rows with the given numbers."""
        pieces = np.searchsorted(self._starts, numbers, side="right") - 1
        # Consecutive rows of a piece are one slice.
        cuts = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(pieces) != 0)) + 1
        begins, ends = [0, *cuts.tolist()], [*cuts.tolist(), len(numbers)]
        slices, last = [], None
        for begin, end in zip(begins, ends, strict=True):
            if last != pieces[begin]:
                last = int(pieces[begin])
                piece = self._reader.get_batch(last)
            slices.append(piece.slice(int(numbers[begin] - self._starts[last]), end - begin))
        return pa.Table.from_batches(slices)

    def each(self, function: Callable[..., np.ndarray], *columns: str) -> np.ndarray:
        """Applies a function of columns, piece by piece; returns an array with one value per row."""
        found = None
        for start, piece in zip(self._starts.tolist(), self._pieces(columns), strict=False):
            made = function(*map(piece.column, columns))
            found = np.empty(len(self), made.dtype) if found is None else found
            found[start : start + len(piece)] = made
        return found

    def kinds(self, column: str) -> np.ndarray:
        """Numbers the distinct texts of a column, from 0 in order of first appearance; returns the number of each row.

        Compares 64-bit checksums of the texts: among ten million, the probability of a collision is 3 in a million.
        """
        # Consecutive rows often have equal texts; each run is hashed only once.
        found, sizes = [], []
        for piece in self._pieces([column]):
            runs = pc.run_end_encode(piece.column(column))
            found.append(checksums(runs.values.cast(pa.binary()).to_pylist()))
            sizes.append(np.diff(runs.run_ends.to_numpy(), prepend=np.int32(0)))
        _, firsts, inverse = np.unique(np.concatenate(found), return_index=True, return_inverse=True)
        numbers = np.empty(len(firsts), np.int32)
        numbers[np.argsort(firsts)] = np.arange(len(firsts), dtype=np.int32)
        return np.repeat(numbers[inverse], np.concatenate(sizes))

    def _pieces(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        reader = self._open(columns)
        return map(reader.get_batch, range(reader.num_record_batches))

    def _open(self, columns: Sequence[str] | None) -> pa.ipc.RecordBatchFileReader:
        fields = None if columns is None else sorted(map(SCHEMA.names.index, columns))
        return pa.ipc.open_file(self._source, options=pa.ipc.IpcReadOptions(included_fields=fields))


def checksums(values: Iterable[bytes | np.ndarray]) -> np.ndarray:
    """The 64-bit checksum of each value."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, values), np.uint64)


def prepared_rows(folder: str | Path, policy: Policy) -> Rows:
    """Checks the rows of a store and tokenizes them for the policy.

    Raises:
        ValueError: a store that cannot be read or tokenized, or a cache that cannot be written.
    """
    parts = existing_parts(folder)
    if sum(part.stat().st_size for part in parts) > SMALL:
        return _from_cache(Path(folder).absolute(), parts, policy)
    written = pa.BufferOutputStream()
    ends = _write(written, parts, policy)
    rows = Rows(written.getvalue())
    _check_ids(rows, parts, ends)
    return rows


def _from_cache(store: Path, parts: Sequence[Path], policy: Policy) -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        policy.tokenizer.save_pretrained(folder)
        files = {path.name: size_and_digest(path) for path in sorted(Path(folder).iterdir())}
    versions = [__version__, VERSION, transformers.__version__, tokenizers.__version__]
    # A digest of everything that determines how texts are tokenized.
    made_by = _digest([files, policy.stop_ids[:1], turn_end(policy.tokenizer), policy.vocabulary, versions])
    folder = cache_folder("experience") / _digest([str(store), made_by])
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    state = _state(parts, made_by)
    # If several processes open the same store, one prepares it and the rest wait.
    with locked_file(Path(f"{folder}.lock")):
        if not _is_current(folder, state):
            logger.info(
                "%s: reading and checking %d parts into %s, once for this and later starts", store, len(parts), folder
            )
            with whole_file(folder / _FILE) as file:
                ends = _write(file, parts, policy, state)
                file.flush()
                _check_ids(Rows(pa.OSFile(file.name)), parts, ends)
            if _state(parts, made_by) != state:
                raise ValueError(f"{store} changed while recjax read it; start again when no process writes to it")
            write_manifest(folder)
        return Rows(pa.OSFile(str(folder / _FILE)))


def _is_current(folder: Path, state: str) -> bool:
    """True if the cached file exists, is undamaged and was made from this state of the store."""
    if not (folder / _FILE).exists():
        return False
    try:
        check_manifest(folder)
        schema = pa.ipc.open_file(str(folder / _FILE)).schema
    except (ValueError, OSError) as error:
        logger.warning("the cached copy of a store: %s; recjax makes it again", error)
        return False
    return schema.metadata[_STATE_KEY] == state.encode()


def _state(parts: Sequence[Path], made_by: str) -> str:
    """A digest of the parts, after checking that they are undamaged, and of the tokenizer's digest `made_by`."""
    for part in parts:
        ledger.check_part(part)
    return _digest([[[part.name, *size_and_digest(part)] for part in parts], made_by])


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _write(sink: object, parts: Sequence[Path], policy: Policy, state: str = "") -> np.ndarray:
    """Writes the table of a store part by part; returns the cumulative number of rows at the end of each part."""
    name, counts, waiting = tokenizer_name(policy.tokenizer), [], []
    schema = SCHEMA.with_metadata({_STATE_KEY: state.encode()})
    bar = progress_bar("reading", len(parts), unit="part", shown=bool(state) and hosts.is_first())
    with pa.ipc.new_file(sink, schema) as file, bar:
        for part in parts:
            table = read_part(part)
            counts.append(len(table))
            for start in range(0, len(table), _TOGETHER):
                waiting.append(_with_tokens(table.slice(start, _TOGETHER), name, policy))
                if sum(map(len, waiting)) >= _TOGETHER:
                    _write_piece(file, waiting)
            bar.update()
        _write_piece(file, waiting)
    return np.cumsum(counts)


def _write_piece(file: pa.ipc.RecordBatchFileWriter, waiting: list[pa.Table]) -> None:
    if waiting:
        table = pa.concat_tables(waiting).combine_chunks()
        file.write_table(table, max_chunksize=max(1, _PIECE * len(table) // table.nbytes))
    waiting.clear()


def _with_tokens(table: pa.Table, name: str, policy: Policy) -> pa.Table:
    """Adds tokens to all rows that lack them; see `tokenized`."""
    named = set(table["tokenizer"].unique().to_pylist())
    lacking = table["prompt_tokens"].null_count or table["completion_tokens"].null_count
    if named <= {name} and not lacking:
        columns = table["prompt_tokens"], table["completion_tokens"]
        if max(pc.max(pc.list_flatten(column)).as_py() or 0 for column in columns) < policy.vocabulary:
            return table
    rows = tokenized(list(to_rows(table)), policy)
    for column in ("tokenizer", "prompt_tokens", "completion_tokens", "completion_mask"):
        values = pa.array([getattr(row, column) for row in rows], SCHEMA.field(column).type)
        table = table.set_column(SCHEMA.get_field_index(column), SCHEMA.field(column), values)
    return table


def _check_ids(rows: Rows, parts: Sequence[Path], ends: np.ndarray) -> None:
    """Raises an error if two rows have the same id."""
    names = rows.select(["id"])
    found = _checksums_of_ids(names)
    found.sort()  # in place, because the array is large
    repeated = found[1:][found[1:] == found[:-1]]
    if not len(repeated):
        return
    seen = {}
    suspects = np.flatnonzero(np.isin(_checksums_of_ids(names), repeated))
    for number, name in zip(suspects.tolist(), names.at(suspects)["id"].to_pylist(), strict=True):
        place = int(np.searchsorted(ends, number, side="right"))
        part, row = parts[place], number - (int(ends[place - 1]) if place else 0)
        if name in seen:
            raise ValueError(f"{part}: row {row}: id {name!r} is also the id of {seen[name]}; ids must be unique")
        seen[name] = f"{part.name}, row {row}"


def _checksums_of_ids(names: Rows) -> np.ndarray:
    return names.each(lambda column: checksums(column.cast(pa.binary()).to_pylist()), "id")
