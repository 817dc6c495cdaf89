"""Costs of a compiled program: collectives and their bytes, from its HLO text, and matmul FLOPs, from its trace."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(
    r"(calls|body|condition|to_apply|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


class Traffic(NamedTuple):
    """Collectives of one kind in one run of a program: their number, and the bytes that each device sends."""

    count: int
    bytes: int


def collectives(text: str, unknown_trips: int = 1) -> dict[str, Traffic]:
    """The collectives in one run of a compiled program, by kind.

    Bytes are counted for a ring of n devices: (n−1)/n of the whole array for an all-gather, a reduce-scatter or an
    all-to-all, twice that for an all-reduce, the whole array for a permute. A collective in a loop counts once for each
    iteration.

    Args:
        text: `compiled.as_text()`, HLO.
        unknown_trips: number of iterations of loops for which the program states none.
    Raises:
        ValueError: the text has an unknown form, so that the count would be too low.
    """
    computations = _COMPUTATION.findall(text)
    if sum(len(_COLLECTIVE.findall(body)) for _, _, body in computations) != len(_COLLECTIVE.findall(text)):
        raise ValueError("the program's text has collectives outside of the computations that were read from it")
    bodies = {name: body.splitlines() for _, name, body in computations}
    runs = Counter()
    pending = [(name, 1) for is_entry, name, _ in computations if is_entry]
    while pending:
        name, times = pending.pop()
        runs[name] += times
        pending += [
            (inner, times * trips) for line in bodies[name] for inner, trips in _called(line, bodies, unknown_trips)
        ]
    found: dict[str, tuple[str, int, int]] = {}
    for name, times in runs.items():
        for kind, size, channel in _collectives_of(name, bodies[name]):
            # A TPU program shows the parts of one asynchronous collective, all with its channel. It is sent once
            # for each start, although a loop that overlaps with it contains a part of it in every iteration.
            key = channel or f"{name} {len(found)}"
            if key not in found or (times, -times * size) < (found[key][1], -found[key][2]):
                found[key] = (kind, times, times * size)
    counts = Counter()
    sent = Counter()
    for kind, times, size in found.values():
        counts[kind] += times
        sent[kind] += size
    return {kind: Traffic(counts[kind], sent[kind]) for kind in KINDS if counts[kind]}


def _called(line: str, bodies: dict[str, list[str]], unknown_trips: int) -> Iterator[tuple[str, int]]:
    """The computations that an instruction runs, and the number of times."""
    if " async-done(" in line or " async-update(" in line:
        return
    line = re.sub(r", metadata=.*?(?=, backend_config=|$)", "", line)
    trips = 1
    if " while(" in line:
        # TPU programs do not state the number: a scan's condition compares its counter, from zero, with a constant.
        condition = bodies[re.search(r"condition=%?([\w.\-]+)", line)[1]]
        root = next(instruction for instruction in condition if instruction.lstrip().startswith("ROOT"))
        bounds = re.findall(r" = [su]32\[\]\S* constant\((\d+)\)", "\n".join(condition))
        is_scan = " compare(" in root and "direction=LT" in root and len(bounds) == 1
        stated = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
        trips = int(stated[1]) if stated else int(bounds[0]) if is_scan else unknown_trips
    for _, names in _CALLED.findall(line):
        for name in names.strip("{}").split(","):
            if name.strip(" %") in bodies:
                yield name.strip(" %"), trips


def _collectives_of(name: str, lines: list[str]) -> Iterator[tuple[str, int, str]]:
    """Kind, bytes sent and channel of each collective of a computation."""
    for line in lines:
        if not (match := _COLLECTIVE.search(line)):
            continue
        shape, kind, started = match.groups()
        size = 0
        for dtype, dimensions in _ARRAY.findall(shape):
            if dimensions or dtype != "u32":  # the scalars of an asynchronous permute are not data
                digits = re.search(r"\d+", dtype)  # none in pred, which takes a byte
                bits = int(digits[0]) if digits else 8
                size += math.prod(int(length) for length in dimensions.split(",") if length) * bits // 8
        if kind == "collective-permute":
            sent = size // 2 if started else size
        elif (group := _group_size(line)) < 2:
            continue
        else:
            if kind == "all-gather" and started:
                size = size * group // (group + 1)  # the start instruction also holds the operand
            if kind == "reduce-scatter":
                size *= group  # the text shows the part that each device keeps
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # on a TPU: a sum and a slice of the sum
            sent = size * (group - 1) // group * (2 if kind == "all-reduce" else 1)
        channel = re.search(r"channel_id=(\d+)", line)
        yield kind, sent, channel[1] if channel else ""


def _group_size(line: str) -> int:
    """Number of devices in a replica group, which HLO writes as sets, as a reshaped range, or as axes of a mesh."""
    if sets := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(sets[1].split(","))
    if reshaped := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(reshaped[1])
    if axes := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{('[^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", axes[2]))
    raise ValueError(f"a collective names its devices in an unknown way: {line.strip()[:200]}")


def matmul_flops(jaxpr: Jaxpr | ClosedJaxpr, unknown_trips: int = 1) -> int:
    """Floating-point operations of a traced program's matmuls over all devices, with recomputed matmuls.

    Args:
        unknown_trips: number of iterations of a `while` loop.
    """
    total = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = equation.primitive.name
        options = equation.params
        if name == "dot_general":
            contracted = [equation.invars[0].aval.shape[axis] for axis in options["dimension_numbers"][0][0]]
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(contracted)
            continue
        parts = [part for part in jax.tree.leaves([*options.values()]) if isinstance(part, Jaxpr | ClosedJaxpr)]
        inner = [matmul_flops(part, unknown_trips) for part in parts]
        times = {"scan": options.get("length"), "while": unknown_trips}.get(name, 1)
        total += times * (max(inner, default=0) if name == "cond" else sum(inner))
    return total
