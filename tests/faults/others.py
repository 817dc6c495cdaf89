"""A full disk, two processes at one folder, a clock that goes back, and places where no run can be."""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recjax.runs.lock import NAME, STALE_SECONDS
from tests.faults.outcomes import Outcome
from tests.faults.runs import OPTIONS, Place, differs, run, start, wait_for_rows

NO_ROOM = ("cannot be written", "cannot be opened: disk I/O error; free disk space")
RECORD = [*OPTIONS, "experience.replay={draw_every: 2, half_life: 2.0}", "experience.record=true"]


def straight(place: Place) -> Path:
    """A run that nothing happens to."""
    output = place.folder / "others" / "straight"
    status, said = run(place, RECORD, output)
    if status:
        raise RuntimeError(f"the run without a fault ended with {status}: {said}")
    return output


def full_disks(place: Place, expected: Path, count: int, seed: int) -> Iterator[Outcome]:
    """Runs whose files cannot grow beyond a limit, then the same command without it, again and again."""
    generator, fault = np.random.default_rng([seed, 5]), "full disk"
    largest = max(path.stat().st_size for path in expected.rglob("*") if path.is_file())
    output, tried = expected.with_name("full"), 0
    for limit in np.geomspace(200, largest, count).astype(int).tolist():
        if generator.random() < 0.5 and output.exists():
            shutil.rmtree(output)  # else it goes on from where the disk was full before
        status, said = run(place, RECORD, output, most_bytes=limit)
        is_named = status == 1 and any(words in said for words in NO_ROOM) and "Traceback" not in said
        tried += 1  # noqa: SIM113 – counts what was tried when the generator ends
        if status == 0:
            wrong = differs(output, expected)
            yield Outcome(fault, "NOT" if wrong else "as without", wrong)
        elif is_named and said.strip().splitlines()[-1].startswith("error: "):
            yield Outcome(fault, "noticed")
        else:
            yield Outcome(fault, "NOT", f"with {limit} bytes it ended with {status}: {said[-600:]}")
        if tried % 3 == 0:
            status, said = run(place, RECORD, output)
            wrong = differs(output, expected) if status == 0 else f"it ended with {status}: {said[-300:]}"
            if "contains a finished run" in said:
                wrong = differs(output, expected)
            yield Outcome("room again after a full disk", "NOT" if wrong else "as without", wrong)
            shutil.rmtree(output)


def two_processes(place: Place, expected: Path, count: int, seed: int) -> Iterator[Outcome]:
    """Two runs with one folder: one is refused by name, the other ends as if it were alone."""
    generator, fault = np.random.default_rng([seed, 6]), "two processes"
    for number in range(count):
        output = expected.with_name(f"two{number}")
        first = start(place, RECORD, output)
        if number % 3:
            wait_for_rows(first, output, int(generator.integers(0, 8)))
        second = start(place, RECORD, output)
        pids = [first.process.pid, second.process.pid]
        ends = [one.ended() for one in (first, second)]
        refused = [place for place, (status, said) in enumerate(ends) if status == 1 and "is in use" in said]
        finished = "contains a finished run" in ends[1][1]  # the second one came too late for a collision
        wrong = differs(output, expected) if ends[0][0] == 0 or ends[1][0] == 0 else f"none ended well: {ends}"
        if not finished and not wrong:
            names = f"process {pids[1 - refused[0]]} on host {socket.gethostname()}" if refused else "nobody"
            if len(refused) != 1 or names not in ends[refused[0]][1]:
                wrong = f"{output}: refused {refused}: {[said[-200:] for _, said in ends]}"
        yield Outcome(fault, "NOT" if wrong else "noticed", wrong)
        shutil.rmtree(output, ignore_errors=True)


def locks_left(place: Place, expected: Path) -> Iterator[Outcome]:
    """A lock that somebody left: on this host, on another one that may live, and on one that is silent."""
    dead = start(place, RECORD, expected.with_name("dead"))
    dead.process.kill()
    dead.ended()
    for fault, host, age, refused in (
        ("lock left by a dead process", socket.gethostname(), 0, False),
        ("lock of another host", "elsewhere", 5, True),
        ("lock of another host, clock set back", "elsewhere", -86_400, True),
        ("lock of a silent host", "elsewhere", STALE_SECONDS + 30, False),
    ):
        output = expected.with_name("left")
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
        record = {"host": host, "pid": dead.process.pid, "since": "2026-01-01T00:00:00+00:00"}
        (output / NAME).write_text(json.dumps(record))
        os.utime(output / NAME, (time.time() - age,) * 2)
        status, said = run(place, RECORD, output)
        if refused:
            right = (
                status == 1 and f"process {dead.process.pid} on host elsewhere" in said and f"delete {output}" in said
            )
            yield Outcome(fault, "noticed" if right else "NOT", said[-300:])
        else:
            wrong = differs(output, expected) if status == 0 else f"it ended with {status}: {said[-300:]}"
            yield Outcome(fault, "NOT" if wrong else "as without", wrong)


def clocks(place: Place, expected: Path, count: int) -> Iterator[Outcome]:
    """Runs whose clock goes back by a day again and again, killed on their way and not."""
    for number in range(count):
        output = expected.with_name(f"clock{number}")
        if number % 2:
            started = start(place, RECORD, output, clock_back=True)
            wait_for_rows(started, output, 5)
            started.process.kill()
            started.ended()
        status, said = run(place, RECORD, output, clock_back=True)
        wrong = differs(output, expected) if status == 0 else f"it ended with {status}: {said[-300:]}"
        yield Outcome("clock set back", "NOT" if wrong else "as without", wrong)


def places(place: Place) -> Iterator[Outcome]:
    """Outputs where no run can be, and a folder that goes away while the run is at work."""
    (place.folder / "file").write_text("")
    for output in ("file", "file/inner", "/proc/recjax", "/proc/1/recjax", "/sys/recjax"):
        status, said = run(place, OPTIONS, place.folder / output)
        right = status == 1 and "error: output" in said and "Traceback" not in said and "step" not in said
        yield Outcome(
            "output where no folder can be", "noticed" if right else "NOT", f"{output}: {status} {said[-300:]}"
        )
    for seconds in (0.5, 1.0, 2.0):
        output = place.folder / f"deleted{seconds}"
        started = start(place, [*OPTIONS, "training.steps=2000", "training.checkpoint_every=7"], output)
        wait_for_rows(started, output, 0)
        time.sleep(seconds)
        gone = output.with_name(f"{output.name}.gone")
        output.rename(gone)  # at once, as the deletion of a folder is not
        shutil.rmtree(gone)
        status, said = started.ended()
        right = status == 1 and "error: " in said and "Traceback" not in said
        yield Outcome("output deleted while running", "noticed" if right else "NOT", f"{status} {said[-600:]}")
