"""Writes files that appear complete or not at all, with clear errors if a path is not writable."""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Adds `path` to write errors of the block: disk full, missing permission, missing folder.

    Raises:
        ValueError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror or error}); make room or give the right to write there, and"
            " the same command goes on"
        ) from error


def partial_of(name: str) -> str:
    """Temporary name, in the same folder, of a file during writing."""
    return f".{name}.partial"


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write, which replaces `path` in one step if the block ends without an error.

    If the process is killed before that, the previous file remains.

    Raises:
        ValueError: the file cannot be written.
    """
    partial = path.with_name(partial_of(path.name))
    with writing(path):
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def json_text(value: Any, **options: Any) -> str:
    """Standard JSON text; NaN and infinity, which JSON lacks, become null.

    Args:
        options: arguments of `json.dumps`.

    Examples:
        >>> json_text({"reward": float("nan"), "ratios": [1.0, float("inf")]})
        '{"reward": null, "ratios": [1.0, null]}'
    """

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: finite(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [finite(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), allow_nan=False, **options)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes or replaces a file in one step; see `whole_file`.

    Raises:
        ValueError: the file cannot be written.
    """
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
