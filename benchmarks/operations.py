"""Where the time of a step goes on a CPU, by kind of operation, from XLA's own trace.

    python -m benchmarks.operations --shape a
    python -m benchmarks.operations --shape a --recjax model.dtype=bfloat16

recjax runs alone, once with one thread and once with all. With one thread one operation runs at a time, so the seconds
of the kinds add up. The comparison of both tells how much of a kind runs on one core.
"""

import collections
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
from absl import app, flags
from jax.profiler import ProfileData

from benchmarks.inputs import write_inputs
from benchmarks.run import REPOSITORY, Worker, machine
from benchmarks.shapes import SHAPES
from benchmarks.systems import SYSTEMS

FLAGS = flags.FLAGS
WARMUPS = 3
UPDATE = "jit_update"  # XLA's name of the update's program; all others are of the generation
# The kinds, and what tells one: XLA's operations in an instruction or in what it calls, or parts of its name in JAX.
# The first one that fits counts.
KINDS = {
    "products": ({"dot", "convolution"}, ()),
    "random numbers": (set(), ("random", "threefry", "gumbel", "uniform")),
    "gathers and slots": ({"gather", "scatter", "dynamic-slice", "dynamic-update-slice"}, ()),
    "softmax and exp": ({"exponential", "exponential-minus-one", "log", "log-plus-one"}, ()),
    "norms": ({"rsqrt", "sqrt"}, ()),
    "rotary": ({"sine", "cosine"}, ("rotary", "rotate", "rope")),
    "sorts": ({"sort", "topk"}, ()),
    "sums": ({"reduce", "reduce-window"}, ()),
    "copies": ({"copy", "transpose", "concatenate", "pad", "reverse"}, ()),
}
OTHER = "other element-wise work"
WAITING = "nothing: between operations"
CONTAINERS = {"while", "call", "conditional"}  # their events contain those of other operations
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (?:\([^=]*?\)|\S+) ([\w\-]+)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_NAME_IN_JAX = re.compile(r'op_name="([^"]*)"')


class Instruction(NamedTuple):
    """An instruction of a program: XLA's operation, its name in JAX, and the computations that it calls."""

    operation: str
    name: str
    called: tuple[str, ...]


class Event(NamedTuple):
    """An operation that ran: its program and instruction, when it began, and for how long, in seconds."""

    program: str
    instruction: str
    began: float
    seconds: float


def instructions_of(text: str) -> dict[str, dict[str, Instruction]]:
    """The instructions of a program's text by computation and name."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            name = _NAME_IN_JAX.search(line)
            current[found[1]] = Instruction(found[2], name[1] if name else "", tuple(_CALLED.findall(line)))
        elif found := _COMPUTATION.match(line):
            current = computations.setdefault(found[1], {})
    return computations


def kind_of(instruction: Instruction, computations: Mapping[str, Mapping[str, Instruction]]) -> str:
    """The kind of an instruction, with all that it calls.

    Examples:
        >>> inner = {"a": Instruction("multiply", "", ()), "b": Instruction("dot", "", ())}
        >>> kind_of(Instruction("fusion", "", ("inner",)), {"inner": inner})
        'products'
    """
    within = [instruction]
    for each in within:
        for called in each.called:
            within += computations.get(called, {}).values()
    operations = {each.operation for each in within}
    for kind, (theirs, parts) in KINDS.items():
        if operations & theirs or any(part in each.name.lower() for each in within for part in parts):
            return kind
    return OTHER


def kinds_of(texts: Iterable[str]) -> dict[str, str]:
    """The kind of each instruction of the programs, by its name; containers have none."""
    kinds = {}
    for text in texts:
        computations = instructions_of(text)
        for computation in computations.values():
            for name, instruction in computation.items():
                if instruction.operation not in CONTAINERS:
                    kinds[name] = kind_of(instruction, computations)
    return kinds


def events_of(folder: Path) -> list[Event]:
    """The operations of a trace, in the order of their beginnings."""
    file = max(folder.rglob("*.xplane.pb"))
    found = []
    for plane in ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    seconds = event.duration_ns / 1e9
                    found.append(Event(stats["hlo_module"], stats["hlo_op"], event.start_ns / 1e9, seconds))
    return sorted(found, key=lambda event: event.began)


def seconds_by_kind(events: Iterable[Event], kinds: Mapping[str, str]) -> dict[str, float]:
    """Seconds of the clock of each kind; operations that run at the same time share them.

    Examples:
        >>> events = [Event("p", "a", 0.0, 2.0), Event("p", "b", 1.0, 1.0), Event("p", "a", 3.0, 1.0)]
        >>> seconds_by_kind(events, {"a": "products", "b": "norms"})
        {'products': 2.5, 'nothing: between operations': 1.0, 'norms': 0.5}
    """
    edges = []
    for event in events:
        if event.instruction in kinds:
            edges.append((event.began, 1, kinds[event.instruction]))
            edges.append((event.began + event.seconds, -1, kinds[event.instruction]))
    edges.sort()
    running: collections.Counter[str] = collections.Counter()
    seconds: collections.Counter[str] = collections.Counter()
    before = edges[0][0] if edges else 0.0
    for time, change, kind in edges:
        number = running.total()
        for each, count in running.items():
            seconds[each] += (time - before) * count / max(number, 1)
        if not number:
            seconds[WAITING] += time - before
        running[kind] += change
        before = time
    return {kind: spent for kind, spent in sorted(seconds.items(), key=lambda item: -item[1]) if spent > 0}


def on_one_core(alone: float, together: float, cores: int) -> float:
    """The share of an operation's work that runs on one core, by Amdahl's law.

    Args:
        alone: seconds with one thread.
        together: seconds with a thread for each core.

    Examples:
        >>> on_one_core(2.0, 1.0, 2), on_one_core(2.0, 2.0, 2), on_one_core(2.0, 1.5, 2)
        (0.0, 1.0, 0.5)
    """
    if cores == 1 or not alone:
        return 1.0
    return min(max((together / alone - 1 / cores) / (1 - 1 / cores), 0.0), 1.0)


def traced(inputs: Path, threads: int, precision: str, lines: list[str]) -> tuple[dict[str, dict[str, float]], dict]:
    """Seconds by kind of the update and of the generation of a step, and the step's own times."""
    dumped = inputs / f"programs_{threads}"
    environment = {
        "PJRT_NPROC": str(threads),
        "RECJAX_CACHE": str(inputs / f"cache_{threads}"),  # a program from a cache is not written
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dumped} --xla_dump_hlo_as_text",
    }
    system = SYSTEMS["recjax"]._replace(environment=environment)
    options = {"name": f"recjax_{threads}", **system.options, "lines": lines}
    worker = Worker(sys.executable, system, inputs, precision, options, inputs / f"recjax_{threads}.log")
    try:
        for number in range(WARMUPS):
            worker.ask(phase="step", round=number)
        trace = inputs / f"trace_{threads}"
        step = worker.ask(check="trace", folder=str(trace), round=WARMUPS)["result"]
    finally:
        worker.close()
    texts: dict[bool, list[str]] = {True: [], False: []}
    for file in dumped.glob("*.cpu_after_optimizations.txt"):
        texts[f".{UPDATE}." in file.name].append(file.read_text())
    events = events_of(trace)
    seconds = {}
    for phase, is_update in (("update", True), ("generate", False)):
        own = [event for event in events if (event.program == UPDATE) == is_update]
        seconds[phase] = seconds_by_kind(own, kinds_of(texts[is_update]))
    return seconds, step


def main(_) -> None:
    """Traces with one thread and with all, and prints a table for each phase."""
    shape = SHAPES[FLAGS.shape]
    cores = len(os.sched_getaffinity(0))
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory(prefix="recjax_operations_") as place:
        inputs = Path(place)
        write_inputs(inputs, shape, (REPOSITORY / "LICENSE").read_text())
        alone, _ = traced(inputs, 1, FLAGS.precision, FLAGS.recjax)
        together, step = traced(inputs, cores, FLAGS.precision, FLAGS.recjax)
    print(f"{json.dumps(machine())}\nshape {FLAGS.shape}, {FLAGS.precision}")
    for phase, seconds in alone.items():
        inside = step["inside"][phase]
        rounds = f", {shape.completion_tokens} decode rounds" if phase == "generate" else ""
        print(f"\n{phase}: {inside:.3f} s with {cores} threads{rounds}")
        print(f"| kind | s, 1 thread | s, {cores} threads | share of the work on one core |\n|---|---|---|---|")
        for kind, first in seconds.items():
            second = together[phase].get(kind, 0.0)
            print(f"| {kind} | {first:.3f} | {second:.3f} | {on_one_core(first, second, cores):.0%} |")
        print(f"| all | {sum(seconds.values()):.3f} | {sum(together[phase].values()):.3f} | |")


if __name__ == "__main__":
    flags.DEFINE_enum("shape", "a", [name for name, shape in SHAPES.items() if not shape.gpu], "Shape to trace.")
    flags.DEFINE_enum("precision", "float32", ["float32", "bfloat16"], "Compute dtype.")
    flags.DEFINE_list("recjax", [], "Lines of recjax's config, such as rollout.slots=32.")
    app.run(main)
