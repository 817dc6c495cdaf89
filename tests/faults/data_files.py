"""Hostile data files, for tasks and imports: each is refused with its name and a reason, or read as it is meant.

`python -m tests.faults.data_files [seed]` prints what was tried, what was as it should be, and what was not.
"""

import json
import random
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recjax.config import FileTask
from recjax.store.foreign import Columns, import_rows
from recjax.tasks.files import file_problems

ROW = {"prompt": "1+1=", "answer": "2", "completion": "2", "reward": 1}
SECONDS = 10.0


def line(**changes):
    """A row as JSON Lines has it; None takes a column away."""
    row = {key: value for key, value in {**ROW, **changes}.items() if value is not None}
    return json.dumps(row).encode()


def texts(seed):
    """(name, content of a .jsonl file, whether it is to be read)."""
    generator, good = random.Random(seed), line()
    yield "plain", good, True
    yield "BOM", b"\xef\xbb\xbf" + good, True
    yield "CRLF", good + b"\r\n" + good + b"\r\n", True
    yield "blank lines", b"\n\n" + good + b"\n\n", True
    yield "no final newline", good + b"\n" + good, True
    yield "line separator in text", line(prompt="a\u2028b"), True
    for name, bad in {
        "empty": b"",
        "blank": b"\n \n\t\n",
        "half a character": b'{"prompt": "\\ud800", "answer": "2", "completion": "2", "reward": 1}',
        "half a character in a key": b'{"\\udfff": 1, "prompt": "p", "answer": "2", "completion": "2"}',
        "bad UTF-8": good[:-1] + b', "x": "\xff\xfe"}',
        "UTF-16": good.decode().encode("utf-16"),
        "latin-1": good[:-1] + b', "x": "\xe9"}',
        "5,000 digits": b'{"prompt": "p", "answer": ' + b"9" * 5_000 + b', "completion": "c", "reward": 1}',
        "deep lists": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "NUL": good + b"\0",
        "a list": b"[1, 2]",
        "a number": b"5",
        "null": b"null",
        "two objects": good + good,
        "single quotes": b"{'prompt': 'p'}",
        "comment": b"// no\n" + good,
        "trailing comma": good[:-1] + b",}",
        "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
        "a Parquet file": b"PAR1" + bytes(range(256)),
        "HTML": b"<html><body>404</body></html>",
        "LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
    }.items():
        yield name, bad, False
        yield f"{name}, on line 3", good + b"\n\n" + bad, name in ("empty", "blank")
    for column, values in {
        "prompt": ["", "  ", 5, [], {}, [1], [{}], [{"role": 1, "content": "c"}], [{"role": "user"}], True],
        "answer": [[], {}, True, [1]],
        "completion": [5, [], {}, [1, 2], True],
        "reward": ["1", [], True, {}, 10**400],
    }.items():
        for value in values:
            yield f"{column} = {json.dumps(value)[:20]}", line(**{column: value}), None
    for number in range(30):
        damaged = bytearray(good + b"\n" + good)
        for _ in range(3):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        yield f"3 random bytes, {number}", bytes(damaged), None


def parquets(folder):
    """Paths of hostile .parquet files."""
    table = pa.Table.from_pylist([ROW])
    pq.write_table(table.slice(0, 0), folder / "zero_rows.parquet")
    pq.write_table(pa.table({"other": [1]}), folder / "other_columns.parquet")
    pq.write_table(pa.table({"prompt": [b"\xff"], "answer": ["2"]}), folder / "bytes.parquet")
    pq.write_table(table, folder / "whole.parquet")
    whole = (folder / "whole.parquet").read_bytes()
    for name, content in {
        "empty": b"",
        "truncated": whole[: len(whole) // 2],
        "no_footer": whole[:-8],
        "encrypted": b"PARE" + whole[4:-4] + b"PARE",
        "text": b"prompt,answer\n1,2\n",
        "flipped": whole[:40] + bytes([whole[40] ^ 255]) + whole[41:],
        "long_footer": whole[:-8] + (2**31 - 1).to_bytes(4, "little") + b"PAR1",
    }.items():
        (folder / f"{name}.parquet").write_bytes(content)
    (folder / "folder.parquet").mkdir()
    (folder / "folder.jsonl").mkdir()
    (folder / "missing.jsonl").unlink(missing_ok=True)
    return [*sorted(folder.glob("*.parquet")), folder / "folder.jsonl", folder / "missing.jsonl"]


def outcome(path, expected):
    """What is wrong with how a file is read: nothing, or a line."""
    readers = {
        "task": lambda: file_problems(str(path), FileTask(train=str(path))),
        "import": lambda: import_rows([path], Columns(), datetime(2026, 1, 1, tzinfo=UTC)),
    }
    wrong = []
    for name, read in readers.items():
        started = time.monotonic()
        try:
            read()
            if expected is False:
                wrong.append(f"{name}: was read")
        except ValueError as error:
            if expected:
                wrong.append(f"{name}: refused with {error}")
            if path.name not in str(error) or len(str(error)) > 2_000:
                wrong.append(f"{name}: {str(error)[:200]}")
        except Exception as error:  # what must not be
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        if time.monotonic() - started > SECONDS:
            wrong.append(f"{name}: took {time.monotonic() - started:.1f} s")
    return wrong


def campaign(seed=0):
    """(number tried, what was wrong by name)."""
    tried, wrong = 0, {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, content, expected) in enumerate(texts(seed)):
            path = Path(folder) / f"file{number:03d}.jsonl"
            path.write_bytes(content)
            tried += 1
            if found := outcome(path, expected):
                wrong[name] = found
        for path in parquets(Path(folder)):
            tried += 1
            if found := outcome(path, None if path.stem in ("whole", "flipped") else False):
                wrong[path.name] = found
    return tried, wrong


if __name__ == "__main__":
    count, bad = campaign(int(sys.argv[1]) if sys.argv[1:] else 0)
    print(f"data files: tried {count}, as it should be {count - len(bad)}, not {len(bad)}")
    for key, reasons in bad.items():
        print(f"  {key}: {'; '.join(reasons)}")
