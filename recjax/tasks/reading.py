"""Reads rows of problems from users' files and from data sets of the Hugging Face hub."""

import codecs
import contextlib
import glob
import gzip
import itertools
import json
import logging
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from decimal import Context, Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recjax.config.fields import wrong_with_variables
from recjax.errors import UserError
from recjax.runtime.files import UNREADABLE, short_error

logger = logging.getLogger(__name__)

ENDING = re.compile(r"\.(?:(jsonl|ndjson|json)(?:\.gz)?|(parquet))$", re.IGNORECASE)
MORE_ENDINGS = "(.ndjson, .json, .jsonl.gz, .ndjson.gz and .json.gz are read as well)"
_LONGEST_LINE = 2**28  # bytes of a line in a gzip file
_CONVERTED = (
    "datasets.load_from_disk(FOLDER).to_parquet('train.parquet') converts a folder of save_to_disk (a DatasetDict has"
    " one such set for each split), and pandas.read_csv(FILE, dtype=str).to_parquet('train.parquet') a CSV file"
)
# The first bytes of files in other formats.
_FORMATS = {b"\x1f\x8b": "gzip", b"PAR1": "Parquet", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "Zstandard"}
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
_ROWS_AT_ONCE = 10_000  # rows of a Parquet file that are converted together


class FileRow(NamedTuple):
    """One row of a data set: its columns, and its location for error messages."""

    values: Mapping[str, Any]
    location: str

    def text(self, column: str) -> str:
        """The text of a column.

        Raises:
            UserError: the column is missing, blank or not text; the message names the row.
        """
        value = self.values.get(column)
        if not isinstance(value, str) or not value.strip():
            raise self.error(column, f"must hold text; got {value!r:.80}; the row has {', '.join(self.values)}")
        return value

    def answer(self, column: str, value: Any) -> str:
        """An answer as text.

        Args:
            value: text or number from the column, or from a part of the column.
        Raises:
            UserError: the value is neither text nor a finite number; the message names the row.
        """
        text = as_text(value)
        if text is None:
            remedy = ". Write true and false as text" if isinstance(value, bool) else ""
            raise self.error(column, f"must hold text or a number, which is finite; got {value!r:.80}{remedy}")
        return text

    def error(self, column: str, reason: str) -> UserError:
        """The exception for an invalid column of this row."""
        return UserError(f"{self.location}: column {column!r}", reason)


def as_text(value: Any) -> str | None:
    """Text unchanged, or a number in digits that keep its value: 1e-7 is "0.0000001", and 72.0 is "72".

    Returns:
        The text; None for other values, which include NaN, infinities and booleans.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, float | Decimal) or not math.isfinite(value):
        return None
    if isinstance(value, _Digits):
        value = value.digits
    if isinstance(value, float):
        value = Decimal(repr(value))
    digits = format(value, "f")
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    return "0" if digits == "-0" else digits


_NARROW = {"halffloat": np.float16, "float16": np.float16, "float": np.float32, "float32": np.float32}


def column_kinds(table: Any) -> dict[str, Any]:
    """Types of a table's columns: Arrow's types, or names of pandas' dtypes.

    Args:
        table: a pandas DataFrame, a datasets.Dataset or an Arrow schema; other objects have no types.
    """
    features = getattr(table, "features", None)
    if features:
        table = features.arrow_schema
    if hasattr(getattr(table, "dtypes", None), "items"):
        return {name: str(dtype).lower().partition("[")[0] for name, dtype in table.dtypes.items()}
    return dict(zip(getattr(table, "names", ()), getattr(table, "types", ()), strict=True))


def needs_conversion(kind: Any) -> bool:
    """True if `native` may change a column of this type: narrow numbers, JSON, and objects or lists of pandas."""
    return re.search(r"\b(half)?float(16|32)?\b|arrow\.json|^object$", str(kind)) is not None


def is_template_cell(column: str, value: Any) -> bool:
    """True if a chat template reads the cell: one of TEMPLATE_COLUMNS, or a list of messages."""
    if column in TEMPLATE_COLUMNS:
        return True
    is_list = isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim == 1)
    if not is_list or len(value) == 0:
        return False
    return all(isinstance(message, dict) and "role" in message for message in value)


def native(value: Any, kind: Any, drops_nulls: bool = False, is_decoded: bool = False) -> Any:
    """A table's value in Python's types: float32 has its shortest digits, 0.1, not 0.10000000149011612.

    Args:
        value: number, text, None, NumPy array, or a list or dict of such values.
        kind: Arrow's type of the value, or the name of a dtype.
        drops_nulls: flag to leave out the nulls that a table adds to objects for the keys of other rows.
        is_decoded: True if values of type JSON are decoded already, so that a text is a text.
    Raises:
        UserError: a text of type JSON is not valid.
    """
    if str(kind) == "extension<arrow.json>":
        if isinstance(value, str) and not is_decoded:
            return _decode(value)
        return value
    kind = getattr(kind, "storage_type", kind)
    if isinstance(value, np.ndarray):
        kind = value.dtype.name
        value = value.tolist()
    if isinstance(value, dict):
        is_struct = str(kind).startswith("struct<")
        item_kind = getattr(kind, "item_type", kind)
        values = {}
        for name, item in value.items():
            if item is None and drops_nulls:
                continue
            if is_struct:
                item_kind = kind.field(name).type
            values[name] = native(item, item_kind, drops_nulls, is_decoded)
        return values
    if isinstance(value, list):
        element_kind = getattr(kind, "value_type", kind)
        return [native(element, element_kind, drops_nulls, is_decoded) for element in value]
    narrow = _NARROW.get(str(kind))
    if narrow and isinstance(value, float):
        return float(str(narrow(value)))
    return value


def template_of(row: FileRow) -> dict[str, Any]:
    """Chat template variables of a row, from its columns `chat_template_kwargs` and `tools`.

    Both columns hold objects or JSON text.

    Raises:
        UserError: a column holds anything else; the message names the row.
    """
    cells = {name: row.values.get(name) for name in TEMPLATE_COLUMNS}
    for name, value in cells.items():
        if isinstance(value, str) and value.strip():
            try:
                cells[name] = json.loads(value)
            except ValueError as error:
                raise row.error(name, f"must hold JSON; got {value!r:.80} ({error})") from error
    tools = cells["tools"] or None
    variables = cells["chat_template_kwargs"] or {}
    is_list = isinstance(tools, list)
    if tools is not None and (not is_list or not all(isinstance(tool, dict) and tool for tool in tools)):
        reason = "must hold a list of JSON schemas of functions, which the chat template reads"
        raise row.error("tools", f"{reason}; got {tools!r:.80}. Name the column otherwise if it holds something else")
    reason = wrong_with_variables(variables)
    if reason:
        raise row.error("chat_template_kwargs", f"{reason}; got {variables!r:.80}")
    if not tools:
        return dict(variables)
    return {**variables, "tools": tools}


def read_file(file: Path, key: str, narrow_lists: bool = True) -> list[FileRow]:
    """The rows of a file, in file order.

    .jsonl and .ndjson have one row a line, .json has one row a line or one list of rows; each may end in .gz. Chats and
    tools have no nulls that a table added. A cell of Parquet that Python cannot hold is {UNREADABLE: reason}.

    Args:
        key: config key that names the file, for error messages.
        narrow_lists: flag to apply `native` to lists of numbers, which takes long for log-probs.
    Raises:
        UserError: the file is missing, empty or damaged, or a row is not an object; the message names file and line
            (JSON Lines, from 1) or row (from 0).
    """
    where = f"{key}: {file}"
    if not file.is_file():
        if file.is_dir():
            raise UserError(where, f"is a folder; name a file in it. {_CONVERTED}")
        raise UserError(where, "there is no such file")
    ending = ENDING.search(file.name)
    if not ending:
        raise UserError(where, f"give a .jsonl or .parquet file {MORE_ENDINGS}", _CONVERTED)
    if ending[2]:
        rows = list(_parquet_rows(file, where, narrow_lists))
    else:
        if file.suffix.lower() == ".gz":
            content = _unpacked(file, where)
        else:
            content = file.read_bytes()
        for first_bytes, kind in _FORMATS.items():
            if content.startswith(first_bytes):
                raise UserError(where, f"holds {kind} data", "give the file the ending of this format, or unpack it")
        content = content.removeprefix(codecs.BOM_UTF8)
        rows = _rows_of_text(content, where, may_be_a_list=ending[1].lower() == "json")
    if not rows:
        raise UserError(where, "the file holds no rows")
    for values, location in rows:
        if not isinstance(values, dict):
            raise UserError(location, "a row must be an object with named columns", f"got {values!r:.80}")
    if not ending[2]:
        _remove_added_nulls(rows, where)
    return rows


def _parquet_rows(file: Path, where: str, narrow_lists: bool) -> Iterator[FileRow]:
    """The rows of a Parquet file, from this file alone: its name is no pattern, and its metadata opens nothing."""
    import pyarrow.parquet as pq  # JSON Lines do not need it.

    number = 0
    # An open file: pyarrow reads some names as addresses.
    with file.open("rb") as opened:
        with _reading_parquet(where):
            table = pq.ParquetFile(opened)
            names = table.schema_arrow.names
        for name in names:
            if names.count(name) > 1:
                raise UserError(where, f"the column {name!r} is given twice", "remove one")
        kinds = column_kinds(table.schema_arrow)
        batches = table.iter_batches(_ROWS_AT_ONCE)
        while True:
            with _reading_parquet(where):
                batch = next(batches, None)
            if batch is None:
                return
            columns = [_cells(batch.column(name), name, kinds[name], narrow_lists) for name in names]
            for values in zip(*columns, strict=True):
                yield FileRow(dict(zip(names, values, strict=True)), f"{where}: row {number}")
                number += 1


@contextlib.contextmanager
def _reading_parquet(where: str) -> Iterator[None]:
    """Explains an error of Arrow, which raises many types for damaged or encrypted files."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        raise UserError(where, f"cannot be read as Parquet ({reason:.300})", "write the file again") from error


def _cells(column: Any, name: str, kind: Any, narrow_lists: bool) -> list[Any]:
    """The values of an Arrow column in Python's types."""

    def cell_value(cell: Any) -> Any:
        try:
            return converted(cell.as_py(maps_as_pydicts="strict"))
        except Exception as error:  # Each type has its own: text that is not UTF-8, times out of range, maps.
            return {UNREADABLE: short_error(error)}

    def converted(value: Any) -> Any:
        drops_nulls = is_template_cell(name, value)
        if is_converted or drops_nulls:
            return native(value, kind, drops_nulls)
        return value

    is_converted = needs_conversion(kind) and (narrow_lists or not hasattr(kind, "value_type"))
    try:
        return [converted(value) for value in column.to_pylist(maps_as_pydicts="strict")]
    except Exception:
        return [cell_value(cell) for cell in column]


def _remove_added_nulls(rows: Sequence[FileRow], where: str) -> None:
    """Removes the nulls that a table, written as JSON, has in chats and tools for the keys of other rows.

    A table gives all objects in one place the same keys. So a null stays if objects in its place have different keys,
    or if its key is null everywhere; so does a null inside JSON text.
    """
    objects = {}

    def collect(value: Any, path: str) -> None:
        if isinstance(value, dict):
            objects.setdefault(path, []).append(value)
            for name, each in value.items():
                collect(each, f"{path}.{name}")
        elif isinstance(value, list):
            for each in value:
                collect(each, path)

    for values, _ in rows:
        for column, value in values.items():
            if is_template_cell(column, value):
                collect(value, column)
    removed = []
    for path, siblings in objects.items():
        if any(each.keys() != siblings[0].keys() for each in siblings):
            continue
        for name in list(siblings[0]):
            nulls = [each for each in siblings if each[name] is None]
            if 0 < len(nulls) < len(siblings):
                removed.append(f"{path}.{name}")
                for each in nulls:
                    del each[name]
    # A message may lack its keys in any case; only what is inside of calls and tools changes a chat.
    told = [path for path in removed if path.count(".") > 1 or path.partition(".")[0] in TEMPLATE_COLUMNS]
    if told:
        logger.info(
            "%s: left out the nulls of %s, which a table adds for other rows; to keep nulls, give arguments and tools"
            " as JSON text",
            where,
            ", ".join(told[:5]) + ", …" * (len(told) > 5),
        )


def read_data(where: str, key: str, split: str) -> list[FileRow]:
    """The rows of a file, or of a data set in several files, in the order of their names.

    Args:
        where: a file; a folder as in `read_split`; or a glob pattern of files, unless a file has this name.
        key: config key, for error messages.
        split: beginning of the files' names in a folder, "train" or "test".
    Raises:
        UserError: see `read_file`; or the folder has no such file, or no file has a name of the pattern.
    """
    path = Path(where)
    if path.is_dir():
        return read_split(where, f"{split}*.parquet", split, key)
    if path.exists() or not glob.has_magic(where):
        return read_file(path, key)
    matches = map(Path, glob.glob(where, recursive=True))
    paths = sorted(match for match in matches if match.is_file())
    if not paths:
        raise UserError(key, f"{where}: no file has a name of this pattern", "correct it")
    return list(itertools.chain.from_iterable(read_file(path, key) for path in paths))


def read_split(where: str, files: str, split: str, key: str) -> list[FileRow]:
    """The rows of one split of a data set from the Hugging Face hub or a local copy.

    Args:
        where: name of the data set on the hub; a folder with its files, in the hub's layout or, in it or in data/, with
            names that begin with `split` and have an ending that `read_file` supports; or as in `read_data`.
        files: glob pattern of the split's files in the hub's repository.
        split: name of the split, "train" or "test".
        key: config key, for error messages.
    Raises:
        UserError: the files are missing, the hub cannot be reached, or a file is damaged.
    """
    path = Path(where)
    folder = path
    if not path.is_dir():
        if ENDING.search(where) or path.is_file():
            return read_data(where, key, split)
        import huggingface_hub

        try:
            folder = Path(huggingface_hub.snapshot_download(where, repo_type="dataset", allow_patterns=[files]))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{key}",
                "is no local folder or file, and the Hugging Face hub did not serve the data set"
                f" ({str(error).splitlines()[0]})",
                f"where there is a network, `hf download {where} --repo-type dataset --include '{files}'"
                f" --local-dir FOLDER` fetches it: then give {key}=FOLDER",
                value=where,
            ) from error
    # Read only the first kind found: a folder may hold the same rows in several formats, and .json files without rows.
    kinds = [("parquet", "jsonl"), ("ndjson",), ("jsonl.gz", "ndjson.gz"), ("json",), ("json.gz",)]
    paths = sorted(folder.glob(files))
    for subfolder, kind in itertools.product(("", "data/"), kinds):
        if not paths:
            matches = [folder.glob(f"{subfolder}{split}*.{ending}") for ending in kind]
            paths = sorted(itertools.chain.from_iterable(matches))
    if not paths:
        sought = dict.fromkeys((files, f"{split}*.parquet", f"{split}*.jsonl"))
        raise UserError(
            key,
            f"the folder {folder} holds, in it or in data/, no {', no '.join(sought)} {MORE_ENDINGS}",
            f"name a file, or a pattern such as {folder}/*.parquet; {_CONVERTED}",
        )
    return list(itertools.chain.from_iterable(read_file(path, key) for path in paths))


def _unpacked(file: Path, where: str) -> bytes:
    """The content of a gzip file, whose lines are limited, as a small file may unpack to more than the memory."""
    lines = []
    try:
        with gzip.open(file) as packed:
            line = packed.readline(_LONGEST_LINE)
            while line:
                lines.append(line)
                if len(line) == _LONGEST_LINE:
                    raise UserError(where, f"line {len(lines)} has {_LONGEST_LINE} bytes or more", "remove it")
                line = packed.readline(_LONGEST_LINE)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(where, f"cannot be read as gzip ({error})", "write the file again") from error
    return b"".join(lines)


def _rows_of_text(content: bytes, where: str, may_be_a_list: bool) -> list[FileRow]:
    if may_be_a_list and not (content.lstrip().startswith(b"{") and b"\n{" in content):
        rows = []
        if content.strip():
            rows = parsed(content, where)
        if not isinstance(rows, list):
            raise UserError(where, "must hold one list of rows, or several rows of one line each", f"got {rows!r:.80}")
        return [FileRow(value, f"{where}: row {index}") for index, value in enumerate(rows)]
    # Libraries name neither the line of a syntax error nor a column whose type changes, so parse each line here.
    rows = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            location = f"{where}: line {number}"
            rows.append(FileRow(parsed(line, location), location))
    return rows


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise KeyError(max(values, key=[name for name, _ in pairs].count))
    return values


class _Digits(float):
    """A number of JSON with more digits than its float has; `as_text` returns them."""

    digits: Decimal


def _number(text: str) -> float:
    value = float(text)
    if len(text) < 18 or not math.isfinite(value):
        return value
    digits = Decimal(text)
    # Programs print a float with up to 20 digits, which stand for its shortest text.
    if Context(prec=len(digits.as_tuple().digits)).create_decimal(value) == digits:
        return value
    value = _Digits(value)
    value.digits = digits
    return value


# json.loads would make a decoder for every line.
_decode = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_number).decode


def parsed(line: bytes, location: str) -> Any:
    """The value of JSON text.

    Raises:
        UserError: it is no JSON, is not UTF-8, repeats a key or has half of a character; the message has `location`.
    """
    try:
        text = line.decode("utf-8")
        values = _decode(text)
        if "\\ud" in text.casefold():
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            location, f"byte {error.start} is not UTF-8 ({error.reason})", "save the file as UTF-8"
        ) from error
    except UnicodeEncodeError as error:
        raise UserError(location, f"has half of a character, {error.object[error.start]!r}", "remove it") from error
    except RecursionError as error:
        raise UserError(location, "is nested too deeply", "give rows of plain columns") from error
    except KeyError as error:
        raise UserError(location, f"the key {error} is given twice", "remove one") from error
    except json.JSONDecodeError as error:
        raise UserError(location, f"not valid JSON ({error})") from error
    except ValueError as error:
        raise UserError(location, f"has a number that is too long ({error})") from error
    return values
