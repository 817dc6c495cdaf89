"""A folder's manifest: size and checksum of every file, written last, to detect damage.

The checksum is 128-bit XXH3: it detects damage and is as fast as memory. It does not protect against an attacker, who
could write a new manifest as well.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from recjax.whole_files import write_whole

NAME = "manifest.json"
_BLOCK = 2**20  # bytes read at a time
_THREADS = 8


def digest(content: bytes) -> str:
    """The checksum of bytes in memory."""
    return xxhash.xxh3_128_hexdigest(content)


def size_and_digest(path: Path) -> list[Any]:
    """A file's size in bytes and the checksum of its content."""
    found, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
            size += len(block)
    return [size, found.hexdigest()]


def write_manifest(folder: Path) -> None:
    """Writes the manifest of all files under a folder; call it after all files are written.

    Raises:
        ValueError: it cannot be written.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if name != NAME]
    write_sealed(folder / NAME, dict(zip(names, _digests(folder, names), strict=True)))
    sync_folder(folder)


def check_manifest(folder: Path) -> None:
    """Compares all files of a folder with its manifest; ignores files that the manifest does not list.

    Raises:
        ValueError: the manifest or a file is missing or damaged; the message names the file and the problem.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not there")
    if not (folder / NAME).is_file():
        raise ValueError(f"{folder} has no {NAME}, which is written last: it was cut short, or lost files since")
    files = read_sealed(folder / NAME)
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder / missing[0]} is missing")
    try:
        found = _digests(folder, list(files))
    except OSError as error:
        raise ValueError(f"{error.filename or folder} cannot be read ({error.strerror or error})") from error
    for name, (size, checksum) in zip(files, found, strict=True):
        if [size, checksum] != files[name]:
            much = f"has {size} bytes and not {files[name][0]}" if size != files[name][0] else "was changed"
            raise ValueError(f"{folder / name} is damaged: it {much} since it was written")


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file that contains the checksum of its own content."""
    write_whole(path, json.dumps({"content": content, "checksum": _own(content)}, indent=1) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """The content of a file that `write_sealed` wrote.

    Raises:
        ValueError: it is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        content, checksum = found["content"], found["checksum"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict) or checksum != _own(content):
        raise ValueError(f"{path} is damaged: its content is not that of its checksum")
    return content


def sync_folder(folder: Path) -> None:
    """Forces a folder's list of files to disk."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _digests(folder: Path, names: list[str]) -> list[list[Any]]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda name: size_and_digest(folder / name), names))


def _own(content: Any) -> str:
    return digest(json.dumps(content, sort_keys=True).encode())
