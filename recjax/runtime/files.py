"""Files and folders that survive a killed process: written whole, with checksums that reveal damage, and locked.

A folder's manifest, manifest.json, lists the size and checksum of every file and is written last. The checksum is
128-bit XXH3: it reveals damage and is as fast as memory. It does not protect against an attacker, who could write a new
manifest as well.
"""

import contextlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import filelock
import xxhash

from recjax.errors import UserError

MANIFEST = "manifest.json"
# An object with only this key replaces a cell that recjax cannot store; its value is the reason.
UNREADABLE = "recjax.unreadable"
_BLOCK = 2**20  # a checksum reads so many bytes at a time
_THREADS = 8


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Adds `path` to write errors of the block: disk full, missing permission, missing folder.

    Raises:
        UserError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            path,
            f"cannot be written ({error.strerror or error})",
            "free disk space or grant write permission, and run the same command again to continue",
        ) from error


def short_error(error: Exception) -> str:
    """An error's type, and the message's first line without the middle, because the reason is often at the end."""
    name = type(error).__name__
    message = str(error).strip().partition("\n")[0]
    if not message:
        return name
    if len(message) > 300:
        message = f"{message[:100]} … {message[-200:]}"
    return f"{name}: {message}"


def partial_of(name: str, writer: str | None = None) -> str:
    """Temporary name, in the same folder, of a file or folder during writing; no two writers share a name.

    Args:
        writer: the name's part for this writer; "*" makes a pattern for all writers. None: a random part.
    """
    return f".{name}.{writer or uuid.uuid4().hex[:12]}.partial"


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write, which replaces `path` in one step if the block ends without an error.

    If the process is killed before that, the previous file remains.

    Raises:
        UserError: the file cannot be written.
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


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes or replaces a file in one step; see `whole_file`.

    Raises:
        UserError: the file cannot be written.
    """
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, which becomes `folder`, with a manifest, at the end; an error removes it.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = folder.absolute()
    partial = folder.with_name(partial_of(folder.name))
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    try:
        yield partial
        write_manifest(partial)
        with writing(folder):
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def locked_file(path: Path, seconds: float = -1) -> Iterator[None]:
    """Holds a lock file, and creates its folder; the operating system releases the lock if the process dies.

    Args:
        seconds: time to wait for another holder; -1: until the holder releases the lock.
    Raises:
        UserError: the file cannot be written.
        filelock.Timeout: another holder kept the lock.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path, timeout=seconds, thread_local=False):
        yield


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
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    return json.dumps(finite(value), allow_nan=False, **options)


def digest(content: bytes) -> str:
    """The checksum of bytes in memory."""
    return xxhash.xxh3_128_hexdigest(content)


def size_and_digest(path: Path) -> list[Any]:
    """A file's size in bytes and checksum."""
    checksum = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum.update(block)
            size += len(block)
    return [size, checksum.hexdigest()]


def write_manifest(folder: Path) -> None:
    """Writes the manifest of all files under a folder; call it after all files are written.

    Raises:
        UserError: it cannot be written.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if name != MANIFEST]
    files = dict(zip(names, _sizes_and_digests(folder, names), strict=True))
    write_sealed(folder / MANIFEST, files)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)  # this writes the folder's list of files
    finally:
        os.close(directory)


def check_manifest(folder: Path) -> None:
    """Compares all files of a folder with its manifest; ignores files that the manifest does not list.

    Raises:
        UserError: the manifest or a file is missing or damaged; the message names the file and the problem.
    """
    if not folder.is_dir():
        raise UserError(folder, "does not exist")
    if not (folder / MANIFEST).is_file():
        raise UserError(problem=f"{folder} has no {MANIFEST}: writing was interrupted, or the file got lost later")
    files = read_sealed(folder / MANIFEST)
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise UserError(folder / missing[0], "is missing")
    try:
        current = _sizes_and_digests(folder, list(files))
    except OSError as error:
        raise UserError(error.filename or folder, f"cannot be read ({error.strerror or error})") from error
    for name, (size, checksum) in zip(files, current, strict=True):
        expected_size = files[name][0]
        if size != expected_size:
            raise UserError(folder / name, f"is damaged: it has {size} bytes, not {expected_size}")
        if [size, checksum] != files[name]:
            raise UserError(folder / name, "is damaged: its content changed")


def _sizes_and_digests(folder: Path, names: list[str]) -> list[list[Any]]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda name: size_and_digest(folder / name), names))


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file with a checksum of the content in it."""
    write_whole(path, json.dumps({"content": content, "checksum": _json_digest(content)}, indent=1) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """The content of a file that `write_sealed` wrote.

    Raises:
        UserError: it is damaged.
    """
    try:
        sealed = json.loads(path.read_text(encoding="utf-8"))
        content = sealed["content"]
        checksum = sealed["checksum"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(path, f"is damaged: it cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict) or checksum != _json_digest(content):
        raise UserError(path, "is damaged: its content does not match its checksum")
    return content


def _json_digest(content: Any) -> str:
    return digest(json.dumps(content, sort_keys=True).encode())
