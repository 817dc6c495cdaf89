"""What became of each fault, and the table of all of them."""

from collections.abc import Iterable
from typing import NamedTuple


class Outcome(NamedTuple):
    """One fault that was tried.

    fault: its class, a line of the table.
    result: "noticed", "harmless" (nothing that anybody reads is another), "as without" (a run that ended with the
        numbers of one that nothing happened to); or "NOT", where it is not as it should be.
    note: what happened, where it is not.
    """

    fault: str
    result: str
    note: str = ""


def table(outcomes: Iterable[Outcome]) -> str:
    """A line a class of faults: how many were tried, how they ended, how many not as they should."""
    lines: dict[str, dict[str, int]] = {}
    notes = []
    for fault, result, note in outcomes:
        counts = lines.setdefault(fault, {})
        counts[result] = counts.get(result, 0) + 1
        if result == "NOT":
            notes.append(f"NOT as it should be: {fault}: {note}")
    results = ("noticed", "harmless", "as without", "NOT")
    width = max(map(len, lines), default=5)
    rows = [f"{'fault':<{width}} {'tried':>6} " + " ".join(f"{name:>10}" for name in results)]
    total: dict[str, int] = {}
    for fault, counts in lines.items():
        rows.append(_row(fault, width, counts, results))
        total = {name: total.get(name, 0) + counts.get(name, 0) for name in results}
    return "\n".join([*rows, _row("all", width, total, results), *notes])


def _row(name: str, width: int, counts: dict[str, int], results: tuple[str, ...]) -> str:
    numbers = " ".join(f"{counts.get(result, 0):>10}" for result in results)
    return f"{name:<{width}} {sum(counts.values()):>6} {numbers}"
