"""The covering array: rows of values, one an axis, in which every pair of values that recjax accepts occurs.

A greedy algorithm: each row begins with a pair that no row has yet, and takes from each other axis, in an order that
the seed shuffles, the value that adds the most uncovered pairs and is still accepted. The schema's own refusals decide
which values exclude each other.
"""

import functools
import itertools
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from recjax.config import Config, make_config
from recjax.errors import UserError
from tests.pairs.features import ALONE, AXES, BASE, COSTLY, NEEDS, REFUSED_AT_START, WITHOUT_AGENT

Row = dict[str, str]  # axis → value, without plain values
Pair = frozenset[tuple[str, str]]  # of (axis, value)

ARRAY = Path(__file__).parent / "array.json"
PLAIN = {axis: next(iter(values)) for axis, values in AXES.items()}


def named(row: Row) -> str:
    """A row as the command takes it: its values that are not plain."""
    return ", ".join(row.values()) or "plain"


def row_of(text: str) -> Row:
    """The row of such a text.

    Raises:
        KeyError: no axis has a value of this name.
    """
    axes = {value: axis for axis, values in AXES.items() for value in values}
    values = [value.strip() for value in text.split(",")]
    return {axes[value]: value for value in values if value != "plain" and PLAIN[axes[value]] != value}


def options_of(row: Row) -> list[str]:
    """The config keys of a row; a null gives way to another value of the same key."""
    options = [option for axis in AXES for option in AXES[axis][row.get(axis, PLAIN[axis])]]
    return sorted(options, key=lambda option: not option.endswith("=null"))


def config_of(row: Row, options: Sequence[str] = ()) -> Config:
    """The config of a row, in which paths of materials are only names.

    Raises:
        UserError: the schema refuses the row.
    """
    return make_config(BASE, [*options_of(row), *options])


def refusal(row: Row) -> str | None:
    """The reason for which recjax refuses a row; None if it accepts the row."""
    return _refusal(tuple(sorted(row.items())))


@functools.cache
def _refusal(items: tuple[tuple[str, str], ...]) -> str | None:
    row = dict(items)
    try:
        config_of(row)
    except UserError as error:
        return str(error)
    values = {*row.values()}
    for some, reason in REFUSED_AT_START.items():
        if all(values & ({names} if isinstance(names, str) else names) for names in some):
            return reason
    return None


def refused(row: Row) -> str | None:
    """The reason for which a row is refused, looked for in its pairs first, which are fewer and known."""
    for pair in itertools.combinations(row.items(), 2):
        if reason := refusal(row_with(pair)):
            return reason
    return refusal(row)


def pairs_of(row: Row) -> set[Pair]:
    """The pairs of a row, with its plain values."""
    return {frozenset(pair) for pair in itertools.combinations((PLAIN | row).items(), 2)}


def all_pairs() -> list[Pair]:
    """Every pair of values of two axes, in the order of the table."""
    items = [[(axis, value) for value in values] for axis, values in AXES.items()]
    return [
        frozenset(pair) for one, other in itertools.combinations(items, 2) for pair in itertools.product(one, other)
    ]


def costly_triples() -> list[frozenset[tuple[str, str]]]:
    """Every triple of the values that cost most faults, of three axes."""
    axes = {value: axis for axis, values in AXES.items() for value in values}
    triples = itertools.combinations([(axes[value], value) for value in COSTLY], 3)
    return [frozenset(triple) for triple in triples if len({axis for axis, _ in triple}) == 3]


def triples_without_agent() -> list[frozenset[tuple[str, str]]]:
    """Every triple of a value whose documented form has no agent, an objective, and no agent."""
    alone = ("completions", PLAIN["completions"])
    objectives = [("objective", value) for value in AXES["objective"]]
    values = [("experience", value) for value in WITHOUT_AGENT]
    return [frozenset({value, objective, alone}) for value, objective in itertools.product(values, objectives)]


def row_with(items: Iterable[tuple[str, str]]) -> Row:
    """The smallest row with these values, and with those that they need if no value of that axis is given."""
    chosen = dict(items)
    for value in [*chosen.values()]:
        if value in NEEDS:
            chosen.setdefault(*NEEDS[value])
    return {axis: value for axis, value in chosen.items() if PLAIN[axis] != value}


def covering_array(seed: int = 0, known: Sequence[Row] = ()) -> list[Row]:
    """Rows that cover all accepted pairs, and all accepted triples of the costly values.

    Args:
        known: rows that the array begins with.
    """
    chance = random.Random(seed)
    wanted = [target for target in [*costly_triples(), *all_pairs()] if refused(row_with(target)) is None]
    uncovered = {target for target in wanted if len(target) == 2}
    rows = list(known)
    for row in known:
        uncovered -= pairs_of(row)
    for target in wanted:
        if len(target) == 2 and target not in uncovered:
            continue
        if len(target) == 3 and any(target <= {*(PLAIN | row).items()} for row in rows):
            continue
        chosen = dict(target) | row_with(target)
        others = [axis for axis in AXES if axis not in chosen]
        chance.shuffle(others)
        for axis in others:
            gains = {
                value: sum(frozenset({(axis, value), item}) in uncovered for item in chosen.items())
                for value in AXES[axis]
            }
            ordered = sorted(AXES[axis], key=lambda value: (-gains[value], chance.random()))
            # A value that covers nothing new only makes a run slower and a fault harder to find.
            ordered = [value for value in ordered if gains[value]] + [PLAIN[axis]]
            for value in ordered:
                if refused(row_with({**chosen, axis: value}.items())) is None:
                    chosen[axis] = value
                    break
        row = row_with(chosen.items())
        rows.append(row)
        uncovered -= pairs_of(row)
    return [*rows, *smallest_rows(rows)]


def smallest_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows that must occur without other values, and that no given row has: without an agent, or alone."""
    have = [{*(PLAIN | row).items()} for row in rows]
    missing = [triple for triple in triples_without_agent() if not any(triple <= row for row in have)]
    smallest = [row for row in map(row_with, missing) if refused(row) is None]
    axes = {value: axis for axis, values in AXES.items() for value in values}
    alone = [row_with((axes[value], value) for value in pair) for pair in ALONE]
    return [*smallest, *(row for row in alone if row not in rows)]


def stored_array() -> list[Row]:
    """The array in the repository."""
    return [row_of(text) for text in json.loads(ARRAY.read_text())]


def write_array(grow: bool, seed: int = 0) -> list[Row]:
    """Writes an array into the repository, after a change of the table.

    Args:
        grow: add rows to the array that is there, so that only new rows are to be run; a new array is shorter.
    """
    known = [row for row in stored_array() if refused(row) is None] if grow else []
    rows = covering_array(seed, known)
    ARRAY.write_text(json.dumps([named(row) for row in rows], indent=1, ensure_ascii=False) + "\n")
    return rows
