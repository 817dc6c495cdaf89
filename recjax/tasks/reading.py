"""Reads rows of problems from users' files and from data sets of the Hugging Face hub."""

import codecs
import gzip
import json
import math
import re
import zlib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recjax.config.fields import wrong_with_variables

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


class FileRow(NamedTuple):
    """One row of a data set: its columns, and its location for error messages."""

    values: Mapping[str, Any]
    location: str

    def text(self, column: str) -> str:
        """The text of a column.

        Raises:
            ValueError: the column is missing, blank or not text; the message names the row.
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
            ValueError: the value is neither text nor a finite number; the message names the row.
        """
        text = as_text(value)
        if text is None:
            raise self.error(column, f"must hold text or a number, which is finite; got {value!r:.80}")
        return text

    def error(self, column: str, reason: str) -> ValueError:
        """The exception for an invalid column of this row."""
        return ValueError(f"{self.location}: column {column!r} {reason}")


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
    digits = format(Decimal(repr(value)) if isinstance(value, float) else value, "f")
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    return "0" if digits == "-0" else digits


_NARROW = {"halffloat": np.float16, "float16": np.float16, "float": np.float32, "float32": np.float32}


def narrow_columns(table: Any) -> dict[str, Any]:
    """Columns of a pandas DataFrame or a datasets.Dataset with float16 or float32 numbers, and their types."""
    kinds = {name: str(dtype).lower().partition("[")[0] for name, dtype in getattr(table, "dtypes", {}).items()}
    if features := getattr(table, "features", None):
        kinds = {field.name: field.type for field in features.arrow_schema}
    return {name: kind for name, kind in kinds.items() if re.search(r"\b(half)?float(16|32)?\b", str(kind))}


def own_digits(value: Any, kind: Any) -> Any:
    """The value with float16 and float32 numbers by the shortest digits of their type: 0.1, not 0.10000000149011612.

    Args:
        value: number, text, None, or a list or dict of such values, in Python's types.
        kind: Arrow's type of the value, or the name of a dtype.
    """
    if isinstance(value, dict):
        return {name: own_digits(each, kind.field(name).type) for name, each in value.items()}
    if isinstance(value, list):
        inner = getattr(kind, "value_type", kind)
        return [own_digits(each, inner) for each in value]
    narrow = _NARROW.get(str(kind))
    return float(str(narrow(value))) if narrow and isinstance(value, float) else value


def template_of(row: FileRow) -> dict[str, Any]:
    """Chat template variables of a row, from its columns `chat_template_kwargs` and `tools`.

    Both columns hold objects or JSON text.

    Raises:
        ValueError: a column holds anything else; the message names the row.
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
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) and tool for tool in tools)):
        reason = "must hold a list of JSON schemas of functions, which the chat template reads"
        raise row.error("tools", f"{reason}; got {tools!r:.80}. Name the column otherwise if it holds something else")
    if reason := wrong_with_variables(variables):
        raise row.error("chat_template_kwargs", f"{reason}; got {variables!r:.80}")
    return {**variables, **({"tools": tools} if tools else {})}


def _without_nulls(value: Any) -> Any:
    """The value without the nulls that Parquet adds to objects for the keys of other rows."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def read_file(file: Path, key: str, narrow_lists: bool = True) -> list[FileRow]:
    """The rows of a file, in file order.

    .jsonl and .ndjson have one row a line, .json has one row a line or one list of rows; each may end in .gz.

    Args:
        key: config key that names the file, for error messages.
        narrow_lists: flag to apply `own_digits` to lists, which takes long for log-probs.
    Raises:
        ValueError: the file is missing, empty or damaged, or a row is not an object; the message names file and line
            (JSON Lines, from 1) or row (from 0).
    """
    where = f"{key}: {file}"
    if not file.is_file():
        raise ValueError(
            f"{where}: {'is a folder; name a file in it. ' + _CONVERTED if file.is_dir() else 'there is no such file'}"
        )
    ending = ENDING.search(file.name)
    if not ending:
        raise ValueError(f"{where}: give a .jsonl or .parquet file {MORE_ENDINGS}; {_CONVERTED}")
    if ending[2]:
        import datasets  # takes a second, and JSON Lines do not need it

        try:
            table = datasets.load_dataset("parquet", data_files=str(file), split="train")
        except Exception as error:  # Arrow, datasets and fsspec raise many types for damaged or encrypted files
            reason = str(error.__cause__ or error).strip() or type(error).__name__
            raise ValueError(f"{where}: cannot be read as Parquet ({reason:.300}); write the file again") from error
        rows = []
        kinds = narrow_columns(table).items()
        narrow = {name: kind for name, kind in kinds if narrow_lists or not hasattr(kind, "value_type")}
        for index, values in enumerate(table):
            values |= {name: own_digits(values[name], kind) for name, kind in narrow.items()}
            objects = {name: _without_nulls(values[name]) for name in TEMPLATE_COLUMNS if name in values}
            rows.append(FileRow(values | objects, f"{where}: row {index}"))
    else:
        content = _unpacked(file, where) if file.suffix.lower() == ".gz" else file.read_bytes()
        if kind := next((name for first, name in _FORMATS.items() if content.startswith(first)), None):
            raise ValueError(f"{where}: holds {kind} data; give the file the ending of this format, or unpack it")
        content = content.removeprefix(codecs.BOM_UTF8)
        rows = _rows_of_text(content, where, may_be_a_list=ending[1].lower() == "json")
    if not rows:
        raise ValueError(f"{where}: the file holds no rows")
    for values, location in rows:
        if not isinstance(values, dict):
            raise ValueError(f"{location}: a row must be an object with named columns; got {values!r:.80}")
    return rows


def read_split(where: str, files: str, split: str, key: str) -> list[FileRow]:
    """The rows of one split of a data set from the Hugging Face hub or a local copy.

    Args:
        where: name of the data set on the hub; a folder with its files, in the hub's layout or, in it or in data/, with
            names that begin with `split` and have an ending that `read_file` supports; or one such file.
        files: glob pattern of the split's files in the hub's repository.
        split: name of the split, "train" or "test".
        key: config key, for error messages.
    Raises:
        ValueError: the files are missing, the hub cannot be reached, or a file is damaged.
    """
    path = Path(where)
    if (ENDING.search(where) and not path.is_dir()) or path.is_file():
        return read_file(path, key)
    folder = path
    if not path.is_dir():
        import huggingface_hub

        try:
            folder = Path(huggingface_hub.snapshot_download(where, repo_type="dataset", allow_patterns=[files]))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{key} = {where!r} is no local folder or file, and the Hugging Face hub did not serve the data set"
                f" ({str(error).splitlines()[0]}); where there is a network, `hf download {where} --repo-type dataset"
                f" --include '{files}' --local-dir FOLDER` fetches it: then give {key}=FOLDER"
            ) from error
    # Read only the first kind found: a folder may hold the same rows in several formats, and .json files without rows.
    kinds = [("parquet", "jsonl"), ("ndjson",), ("jsonl.gz", "ndjson.gz"), ("json",), ("json.gz",)]
    patterns = [(files,), *(tuple(f"{at}{split}*.{end}" for end in kind) for at in ("", "data/") for kind in kinds)]
    globbed = (sorted(file for pattern in kind for file in folder.glob(pattern)) for kind in patterns)
    paths = next(filter(None, globbed), None)
    if not paths:
        raise ValueError(
            f"{key}: the folder {folder} holds neither {files} nor, in it or in data/, {split}*.parquet or"
            f" {split}*.jsonl {MORE_ENDINGS}; {_CONVERTED}"
        )
    return [row for file in paths for row in read_file(file, key)]


def _unpacked(file: Path, where: str) -> bytes:
    """The content of a gzip file, whose lines are limited, as a small file may unpack to more than the memory."""
    lines = []
    try:
        with gzip.open(file) as packed:
            while line := packed.readline(_LONGEST_LINE):
                lines.append(line)
                if len(line) == _LONGEST_LINE:
                    raise ValueError(f"{where}: line {len(lines)} has {_LONGEST_LINE} bytes or more; remove it")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{where}: cannot be read as gzip ({error}); write the file again") from error
    return b"".join(lines)


def _rows_of_text(content: bytes, where: str, may_be_a_list: bool) -> list[FileRow]:
    if may_be_a_list and not (content.lstrip().startswith(b"{") and b"\n{" in content):
        rows = _parsed(content, where) if content.strip() else []
        if not isinstance(rows, list):
            raise ValueError(f"{where}: must hold one list of rows, or several rows of one line each; got {rows!r:.80}")
        return [FileRow(value, f"{where}: row {index}") for index, value in enumerate(rows)]
    # Libraries name neither the line of a syntax error nor a column whose type changes, so parse each line here.
    lines = enumerate(content.split(b"\n"), start=1)
    texts = {f"{where}: line {number}": line for number, line in lines if line.strip()}
    return [FileRow(_parsed(line, location), location) for location, line in texts.items()]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(values := dict(pairs)) < len(pairs):
        raise KeyError(max(values, key=[name for name, _ in pairs].count))
    return values


_decode = json.JSONDecoder(object_pairs_hook=_unique).decode  # json.loads would make a decoder for every line


def _parsed(line: bytes, location: str) -> Any:
    try:
        text = line.decode("utf-8")
        values = _decode(text)
        if "\\ud" in text.casefold():
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{location}: byte {error.start} is not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{location}: has half of a character, {error.object[error.start]!r}; remove it") from error
    except RecursionError as error:
        raise ValueError(f"{location}: is nested too deeply; give rows of plain columns") from error
    except KeyError as error:
        raise ValueError(f"{location}: the key {error} is given twice; remove one") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{location}: not valid JSON ({error})") from error
    except ValueError as error:
        raise ValueError(f"{location}: has a number that is too long ({error})") from error
    return values
