"""Rows of problems from files: the one place that reads them, whether a user's own or a hub data set's."""

import codecs
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import huggingface_hub


class Row(NamedTuple):
    """One row of a data set: its columns, and where it stands, for messages."""

    values: Mapping[str, Any]
    place: str

    def text(self, column: str) -> str:
        """A column that must hold text.

        Raises:
            ValueError: it is missing, blank or of another type; the message names the row.
        """
        value = self.values.get(column)
        if not isinstance(value, str) or not value.strip():
            raise self.error(column, f"must hold text; got {value!r:.80}; the row has {', '.join(self.values)}")
        return value

    def error(self, column: str, reason: str) -> ValueError:
        """What to raise about a column of this row."""
        return ValueError(f"{self.place}: column {column!r} {reason}")


def read_file(file: Path, key: str) -> list[Row]:
    """The rows of a .jsonl, .json (one list of rows) or .parquet file, in file order.

    Args:
        key: of the config, for messages.
    Raises:
        ValueError: the file is missing, empty or damaged, or a row has no named columns; the message names file and
            line (JSON Lines, from 1) or row (from 0).
    """
    where = f"{key}: {file}"
    if not file.is_file():
        raise ValueError(f"{where}: there is no such file")
    if file.suffix == ".jsonl":
        # By line and not by a library, which names neither the line of a syntax error nor a column whose type changes.
        lines = enumerate(file.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1)
        texts = {f"{where}: line {number}": line for number, line in lines if line.strip()}
        rows = [Row(_parsed(line, place), place) for place, line in texts.items()]
    elif file.suffix in (".json", ".parquet"):
        values = _json_list(file, where) if file.suffix == ".json" else _parquet(file, where)
        rows = [Row(value, f"{where}: row {index}") for index, value in enumerate(values)]
    else:
        raise ValueError(f"{where}: give a .jsonl or a .parquet file")
    if not rows:
        raise ValueError(f"{where}: the file holds no rows")
    for values, place in rows:
        if not isinstance(values, dict):
            raise ValueError(f"{place}: a row must be an object with named columns; got {values!r:.80}")
    return rows


def read_split(where: str, files: str, split: str, key: str) -> list[Row]:
    """The rows of one split of a data set that the Hugging Face hub has.

    Args:
        where: the data set's name on the hub; a folder with its files, laid out as there or with names that begin
            with `split` and end in .parquet or .jsonl; or one such file.
        files: pattern of the split's files in the hub's repository.
        split: "train" or "test".
        key: of the config, for messages.
    Raises:
        ValueError: nothing is there, the hub cannot be reached, or a file is damaged.
    """
    place = Path(where)
    if place.suffix in (".parquet", ".jsonl", ".json") or place.is_file():
        return read_file(place, key)
    folder = place if place.is_dir() else _from_hub(where, files, key)
    found = sorted(folder.glob(files))
    found = found or sorted(file for end in ("parquet", "jsonl") for file in folder.glob(f"{split}*.{end}"))
    if not found:
        raise ValueError(f"{key}: the folder {folder} holds neither {files} nor {split}*.parquet or {split}*.jsonl")
    return [row for file in found for row in read_file(file, key)]


def _from_hub(name: str, files: str, key: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=[files]))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key} = {name!r} is no local folder or file, and the Hugging Face hub did not serve the data set"
            f" ({str(error).splitlines()[0]}); where there is a network, `hf download {name} --repo-type dataset"
            f" --include '{files}' --local-dir FOLDER` fetches it: then give {key}=FOLDER"
        ) from error


def _parquet(file: Path, where: str) -> datasets.Dataset:
    try:
        return datasets.load_dataset("parquet", data_files=str(file), split="train")
    except Exception as error:  # Arrow, datasets and fsspec raise many kinds for a damaged or encrypted file
        reason = str(error.__cause__ or error).strip() or type(error).__name__
        raise ValueError(f"{where}: cannot be read as Parquet ({reason:.300}); write the file again") from error


def _json_list(file: Path, where: str) -> list[Any]:
    rows = _parsed(file.read_bytes().removeprefix(codecs.BOM_UTF8), where)
    if not isinstance(rows, list):
        raise ValueError(f"{where}: must hold one list of rows; got {rows!r:.80}")
    return rows


def _parsed(line: bytes, place: str) -> Any:
    try:
        text = line.decode("utf-8")
        values = json.loads(text)
        if "\\ud" in text.casefold():
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: byte {error.start} is not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: has half of a character, {error.object[error.start]!r}; remove it") from error
    except RecursionError as error:
        raise ValueError(f"{place}: is nested too deeply; give rows of plain columns") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not valid JSON ({error})") from error
    except ValueError as error:
        raise ValueError(f"{place}: has a number that is too long ({error})") from error
    return values
