"""recjax and its peers on one shape, step by step in turn; writes a JSON file of rows.

    python -m benchmarks.run --shape a --out a.json [--repeats 7] [--systems recjax,torch:bfloat16] [--quiet 0.15]

Every system is a process in an environment of its own, made on demand under $RECJAX_CACHE/benchmarks from
benchmarks/requirements; a system whose environment or start fails is skipped, with the reason in the file. All get the
same weights, prompts and reward, warm up, and then make one call of each phase a round, in rotating order.
While one works, the processes of all others are stopped (SIGSTOP): the threads of a system that only waits take time
from the one that is measured. `--others wait` leaves them running, which shows how much. Shapes are in
benchmarks/shapes.py. The command prints the tables of its file, with the CPU's family and vector units;
`python -m benchmarks.pages` writes those of all files of benchmarks/results into the pages.

With `--checks none` the systems' answers are not compared, so a random model's weights need not be equal: each system
draws its own on its device, and no file of weights is written or read.
"""

import contextlib
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import psutil
from absl import app, flags

from benchmarks.costs import FORMULAS
from benchmarks.inputs import write_inputs
from benchmarks.rows import make_rows
from benchmarks.shapes import SHAPES
from benchmarks.systems import SYSTEMS, System, interpreter, named
from benchmarks.tables import section
from recjax.errors import UserError
from recjax.runtime.cache import cache_folder
from recjax.runtime.files import write_whole
from recjax.runtime.memory import with_tunables

FLAGS = flags.FLAGS
REPOSITORY = Path(__file__).parent.parent
# The last: several systems share the GPU's memory.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def define_flags() -> None:
    """The command's flags, defined when it is run and not when it is imported."""
    flags.DEFINE_enum("shape", None, list(SHAPES), "Shape to measure; see benchmarks/shapes.py.", required=True)
    flags.DEFINE_string("out", None, "JSON file to write.", required=True)
    flags.DEFINE_list("systems", None, f"Of {', '.join(SYSTEMS)}, with :bfloat16 or without; default: the shape's.")
    flags.DEFINE_list("phases", None, "Phases to time; default: all that a system has.")
    flags.DEFINE_enum("checks", "all", ["all", "none"], "Compare the systems' answers before the rounds, or do not.")
    flags.DEFINE_enum("others", "stop", ["stop", "wait"], "What the other systems do while one works.")
    flags.DEFINE_integer("repeats", 5, "Rounds.", lower_bound=1)
    flags.DEFINE_integer("warmups", 2, "Rounds before the measured rounds.", lower_bound=1)
    flags.DEFINE_list("recjax", None, "Lines of recjax's config, such as rollout.slots=32.")
    flags.DEFINE_list("python", [], "Interpreters to use instead of environments, such as torch=/usr/bin/python3.")
    flags.DEFINE_float("quiet", 0.15, "Other load, as a share of all cores, above which a round waits.", lower_bound=0)
    flags.DEFINE_float("patience", 60.0, "Seconds that a round waits at most; then it starts with a message.")
    flags.DEFINE_string(
        "logs", None, "Folder for the systems' output; default: only the output of a failed system is shown."
    )


# As Linux names them in /proc/cpuinfo; the last three are Arm's.
VECTOR_UNITS = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "sve",
    "bf16",
)
_installing = threading.Lock()  # several systems share an environment


class Failed(Exception):
    """A system's reason for not giving an answer."""


class Worker:
    """A system's process: one request, one answer."""

    def __init__(self, python: str, system: System, inputs: Path, precision: str, options: dict, log: Path):
        """Starts the worker and waits until it has prepared; `about` is its description of itself."""
        self._log = log
        command = [python, "-m", f"benchmarks.workers.{system.worker}", str(inputs), precision, json.dumps(options)]
        environment = {**os.environ, **ENVIRONMENT, **system.environment}
        if system.worker in ("recjax_worker", "torch_worker"):  # faster in torch, too
            environment["GLIBC_TUNABLES"] = with_tunables(environment.get("GLIBC_TUNABLES", ""))
        try:
            with log.open("w") as errors:
                self._process = subprocess.Popen(
                    command,
                    cwd=REPOSITORY,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=environment,
                )
        except OSError as error:
            raise Failed(str(error)) from error
        try:
            self.about = self._answer()
        except Failed:
            self.close()
            raise

    def ask(self, **request) -> dict:
        """The answer to a request.

        Raises:
            Failed: it could not be answered.
        """
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise Failed(f"ended with status {self._process.wait()}; its last words: {last}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def send(self, number: int) -> None:
        """Sends a signal to the process and to all that it started; those that have ended are none of it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.send_signal(number)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def start(label: str, inputs: Path, logs: Path, recjax: list[str] | None) -> Worker:
    """The worker of a label.

    Raises:
        Failed: it has no environment, or does not start.
    """
    system, precision = named(label)
    given = dict(text.split("=", 1) for text in FLAGS.python)
    lines = {"lines": recjax or []} if system.worker == "recjax_worker" else {}
    try:
        with _installing:
            python = interpreter(system, cache_folder("benchmarks"), given)
    except (RuntimeError, OSError) as error:
        raise Failed(str(error)) from error
    name = label.replace(":", "_")
    return Worker(python, system, inputs, precision, {"name": name, **system.options, **lines}, logs / f"{name}.log")


def start_all(
    labels: list[str], inputs: Path, logs: Path, recjax: list[str] | None, at_once: int
) -> tuple[dict[str, Worker], dict[str, str]]:
    """The workers of labels, and the reasons of those that did not start.

    Args:
        at_once: number of workers that start at the same time.
    """
    workers: dict[str, Worker] = {}
    failed: dict[str, str] = {}

    def begin(label: str) -> None:
        say(f"{label}: starting; {psutil.virtual_memory().available / 2**30:.1f} GiB of memory are free")
        try:
            workers[label] = start(label, inputs, logs, recjax)
            say(f"{label}: ready after {workers[label].about['seconds']:.1f} s")
        except Failed as error:
            failed[label] = str(error)
            say(f"{label} is skipped: {error}")

    with ThreadPoolExecutor(at_once) as pool:
        for begun in [pool.submit(begin, label) for label in labels]:
            begun.result()
    return {label: workers[label] for label in labels if label in workers}, failed


def other_load(quiet: float, patience: float) -> float:
    """Share of all cores that is busy while the systems wait; waits until it is low, for `patience` seconds at most."""
    until = time.monotonic() + patience
    while (load := psutil.cpu_percent(interval=0.5) / 100) > quiet and time.monotonic() < until:
        say(f"other load: {load:.0%} of the cores; waiting")
        time.sleep(2)
    return load


def compare(workers: dict[str, Worker], folder: Path) -> dict[str, dict]:
    """Values on which the systems must agree: greedy tokens, log-probabilities, loss and gradient norm."""
    found: dict[str, dict] = {label: {} for label in workers}

    def each(check: str, **arguments) -> None:
        for label, worker in workers.items():
            if check in worker.about["checks"]:
                own = {name: str(value).format(label.replace(":", "_")) for name, value in arguments.items()}
                try:
                    found[label][check] = worker.ask(check=check, **own)["result"]
                except Failed as error:
                    found[label][check] = {"failed": str(error)}

    each("greedy")
    each("logprobs", file=folder / "logprobs_{}.npy")
    files = {label: folder / f"logprobs_{label.replace(':', '_')}.npy" for label in workers}
    files = {label: file for label, file in files.items() if file.exists()}
    if files:
        first = np.load(next(iter(files.values())))
        with np.load(folder / "batch.npz") as batch:
            np.save(folder / "behavior.npy", (first + batch["noise"]).astype(np.float32))
        for label, file in files.items():
            found[label]["logprobs"] = {"largest_difference": float(np.abs(np.load(file) - first).max())}
        each("loss", file=folder / "behavior.npy")
    tokens = [found[label]["greedy"] for label in found if isinstance(found[label].get("greedy"), list)]
    for answers in found.values():
        if isinstance(answers.get("greedy"), list):
            equal = np.array(answers["greedy"]) == np.array(tokens[0])
            answers["greedy"] = {"equal_tokens": float(equal.mean()), "tokens": equal.size}
    return found


@contextlib.contextmanager
def alone(workers: dict[str, Worker], label: str | None) -> Iterator[None]:
    """Within it only the worker of a label runs, or none; all others are stopped."""
    others = [worker for other, worker in workers.items() if other != label]
    if FLAGS.others == "wait":
        others = []
    for worker in others:
        worker.send(signal.SIGSTOP)
    try:
        yield
    finally:
        for worker in others:
            worker.send(signal.SIGCONT)


def measure(workers: dict[str, Worker], failed: dict[str, str]) -> tuple[dict, list[float]]:
    """Answers by label, phase and round (warm-ups: below 0), and the load of other programs before each round.

    The n-th warm-up and the n-th round that counts draw with the same key: with uneven lengths another key may need a
    program of another size. A system that fails is skipped in all later phases.
    """
    answers: dict[str, dict[str, dict[int, dict]]] = {label: {} for label in workers}
    loads = []
    phases = list(dict.fromkeys(phase for worker in workers.values() for phase in worker.about["phases"]))
    for number in range(-FLAGS.warmups, FLAGS.repeats):
        os.sync()  # or a system would wait for the writes of another's checkpoint
        with alone(workers, None):
            loads.append(other_load(FLAGS.quiet, FLAGS.patience))
        for phase in phases if FLAGS.phases is None else [phase for phase in phases if phase in FLAGS.phases]:
            order = [label for label in workers if phase in workers[label].about["phases"] and label not in failed]
            turn = number % max(len(order), 1)
            key = number + (FLAGS.warmups if number < 0 else 0)
            for label in order[turn:] + order[:turn]:
                try:
                    with alone(workers, label):
                        answer = workers[label].ask(phase=phase, round=key)
                except Failed as error:
                    failed[label] = f"{phase}: {error}"
                    say(f"{label} is skipped: {failed[label]}")
                    continue
                answers[label].setdefault(phase, {})[number] = answer
                workers[label].about["notes"] |= answer.pop("notes", {})
                name = "warm-up" if number < 0 else f"round {number + 1} of {FLAGS.repeats}"
                say(f"{name}: {label} {phase} {answer['seconds']:.3f} s")
    return answers, loads


def machine() -> dict:
    """Where this was measured."""
    found = {}  # of the first core
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    flags_of_cpu = found.get("flags", found.get("Features", "")).split()
    return {
        "cpu": found.get("model name") or platform.processor(),
        "family": " ".join(found[name] for name in ("cpu family", "model") if name in found),
        "vector_units": [unit for unit in VECTOR_UNITS if unit in flags_of_cpu],
        "cores": psutil.cpu_count(),
        "physical_cores": psutil.cpu_count(logical=False),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def without_folders(arguments: list[str]) -> list[str]:
    """The command's arguments without the folders of absolute paths, which other machines do not have."""
    return [re.sub(r"(^|[=,])/[^=,]*/", r"\1", argument) for argument in arguments]


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except OSError:
        return []


def has_gpu() -> bool:
    """Whether JAX sees a GPU, in a separate process: JAX would keep the GPU's memory from the systems."""
    code = "import jax, sys; sys.exit(jax.default_backend() != 'gpu')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def main(_) -> None:
    """Prepares, compares, measures, writes."""
    shape = SHAPES[FLAGS.shape]
    labels = FLAGS.systems or list(shape.systems)
    try:
        for label in labels:
            named(label)
    except UserError as error:
        sys.exit(f"error: {error}")
    header = {
        "shape": FLAGS.shape,
        "repeats": FLAGS.repeats,
        "others": FLAGS.others,
        "command": without_folders(sys.argv[1:]),
        "machine": machine(),
    }
    if shape.gpu and not has_gpu():
        say(f"shape {FLAGS.shape} is for a GPU and this machine has none; nothing is measured")
        return write(header | {"skipped": dict.fromkeys(labels, "no GPU"), "rows": []})

    with tempfile.TemporaryDirectory(prefix="recjax_benchmark_") as place, contextlib.ExitStack() as stack:
        inputs, logs = Path(place) / "inputs", Path(FLAGS.logs or place)
        inputs.mkdir()
        logs.mkdir(parents=True, exist_ok=True)
        os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or ("cuda" if shape.gpu else "cpu")
        jax.config.update("jax_platforms", "cpu")  # here JAX would keep the GPU's memory from the systems
        write_inputs(inputs, shape, (REPOSITORY / "LICENSE").read_text(), FLAGS.checks == "none")
        # A CPU has no room for several that start; a GPU's host does.
        workers, failed = start_all(labels, inputs, logs, FLAGS.recjax, len(labels) if shape.gpu else 1)
        for worker in workers.values():
            stack.callback(worker.close)
        checks = compare(workers, inputs) if FLAGS.checks == "all" else {}
        answers, loads = measure(workers, failed)
        # Last, for it takes memory that the system itself does not.
        asked = [label for label in workers if "peaks" in workers[label].about["checks"] and label not in failed]
        measured = {label: workers[label].ask(check="peaks")["result"] for label in asked}
        config = json.loads((inputs / "model" / "config.json").read_text())
        described = json.loads((inputs / "inputs.json").read_text())
        about = {label: worker.about for label, worker in workers.items()}
    del described["stop_ids"]
    rows, peaks = make_rows(FLAGS.shape, described, config, about, measured, answers)
    write(
        header
        | {
            "given": described,
            "skipped": failed,
            "other_load": loads,
            "peaks": peaks,
            "formulas": FORMULAS,
            "checks": checks,
            "notes": {label: worker["notes"] for label, worker in about.items()},
            "rows": rows,
        }
    )


def write(content: dict) -> None:
    """Writes the file, whole or not at all."""
    out = Path(FLAGS.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, json.dumps(content, indent=1) + "\n")
    print(section(content))
    say(f"written: {out}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
