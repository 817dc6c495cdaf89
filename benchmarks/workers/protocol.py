"""A worker's side of the benchmark: requests come in as lines of JSON, answers go out. Standard library and NumPy."""

import contextlib
import importlib.metadata
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Inputs(NamedTuple):
    """Inputs of every system.

    shape: the fields of benchmarks.shapes.Shape, with `stop_ids` and `vocabulary`. prompts and completions
    [rows, time] are token ids, all real; rewards [rows] and noise [rows, time] belong to the completions, which are
    for comparing losses and are not of any model. options are the system's own, its `name` among them.
    """

    folder: Path
    shape: dict[str, Any]
    precision: str
    options: dict[str, Any]
    prompts: np.ndarray
    completions: np.ndarray
    rewards: np.ndarray
    noise: np.ndarray

    @property
    def scratch(self) -> Path:
        """A folder of the system's own, which the driver removes."""
        folder = self.folder / self.options["name"]
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def texts(self) -> list[str]:
        """The prompts as text."""
        return [json.loads(line)["prompt"] for line in (self.folder / "prompts.jsonl").read_text().splitlines()]


class System(NamedTuple):
    """Phases and checks of a worker.

    phases: name → the timed function, called with the round's number, returning further fields of the answer, such as
        `inside`, seconds of parts, and `tokens`, completion tokens drawn.
    checks: name → a function whose result is compared between systems, called with the request's arguments.
    peak_device_bytes: most memory of the accelerator since the last call; None without one.
    notes: remarks for a reader of the row.
    """

    phases: dict[str, Callable[[int], dict]]
    checks: dict[str, Callable[..., Any]]
    peak_device_bytes: Callable[[], int | None]
    packages: tuple[str, ...]
    notes: dict[str, Any]


class Stopwatch:
    """Seconds of the parts of one step."""

    def __init__(self):
        """Starts now."""
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def part(self, name: str) -> None:
        """Books the time since the last part ended to `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def read_inputs(folder: Path, precision: str, options: dict[str, Any]) -> Inputs:
    """The inputs that benchmarks.inputs wrote."""
    with np.load(folder / "batch.npz") as batch:
        arrays = dict(batch)
    return Inputs(folder, json.loads((folder / "inputs.json").read_text()), precision, options, **arrays)


def serve(prepare: Callable[[Inputs], System]) -> None:
    """Prepares the system and answers requests until standard input ends.

    Arguments of the program: folder of the inputs, precision, options as JSON. Whatever libraries print goes to
    standard error.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    folder, precision, options = sys.argv[1:]

    def answer(content: dict) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        started = time.perf_counter()
        system = prepare(read_inputs(Path(folder), precision, json.loads(options)))
        versions = {name: importlib.metadata.version(name) for name in system.packages}
        answer(
            {
                "phases": list(system.phases),
                "checks": list(system.checks),
                "versions": {"python": sys.version.split()[0], **versions},
                "notes": system.notes,
                "seconds": time.perf_counter() - started,
            }
        )
    except Exception as error:
        return answer({"error": _one_line(error)})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "phase" in request:
                answer(_timed(system, request["phase"], request["round"]))
            else:
                answer({"result": system.checks[request.pop("check")](**request)})
        except Exception as error:
            answer({"error": _one_line(error)})


def _timed(system: System, phase: str, number: int) -> dict:
    system.peak_device_bytes()
    _forget_peak()
    started = time.perf_counter()
    fields = system.phases[phase](number)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "peak_memory_bytes": _peak_resident_bytes(),
        "peak_device_bytes": system.peak_device_bytes(),
        **fields,
    }


def _one_line(error: Exception) -> str:
    traceback.print_exc()
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _forget_peak() -> None:
    """Resets the kernel's peak of resident memory, where possible."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_resident_bytes() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
