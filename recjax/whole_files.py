"""Files that appear whole or not at all, and what is said where one cannot be written."""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Names `path` where the block under it cannot write: no room, no right, no such place.

    Raises:
        ValueError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror or error}); make room or give the right to write there, and"
            " the same command goes on"
        ) from error


def partial_of(name: str) -> str:
    """The name beside it of a file that is being written."""
    return f".{name}.partial"


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` in one step when the block under it ends without an error.

    Killed at any time, it leaves what was there before.

    Raises:
        ValueError: it cannot be written.
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
    """Standard JSON, which has no NaN and no infinity: null stands for both.

    Args:
        options: of `json.dumps`.

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
    """Writes a file, or replaces it, in one step, as `whole_file` does.

    Raises:
        ValueError: it cannot be written.
    """
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
