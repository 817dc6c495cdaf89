"""Grade rewards: completes the pending rows of a store."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from recjax.experience.group import Grade
from recjax.experience.store import SCHEMA, existing_parts, locked, read_columns, read_part, reward_pairs, write_part
from recjax.experience.store_checks import check_rows

_GIVEN = ("reward", "reward_parts", "accurate")
_KEYS = ("id", "group_id", *_GIVEN)


class Given(NamedTuple):
    """Rows that were completed, and rows that had the very same reward before."""

    completed: int
    had_it: int


def _place(entry: int) -> str:
    return f"entry {entry}"


def give_rewards(
    folder: str | Path, entries: Sequence[Mapping[str, Any]], place: Callable[[int], str] = _place
) -> Given:
    """Completes pending rows of a store.

    An entry has `id` or `group_id`, `reward`, and, if they are known, `reward_parts` and `accurate`. For a group, each
    of the three is one value for all its rows, or a list with one value a row in the store's order. Part files that
    change are replaced one after the other, each whole or not at all. If that is cut short, the same entries given
    again complete the rest: a row that has the very same reward already is left as it is.

    Args:
        place: what error messages call each entry, by its number.
    Raises:
        ValueError: an entry that cannot be used, an unknown id, two rewards for a row, or a row that has another
            reward already; nothing is written.
    """
    existing_parts(folder)  # before the lock, which would make a folder where there is none
    with locked(folder):
        parts = existing_parts(folder)
        rows, groups = {}, {}
        for part in parts:
            for row in read_columns(part, list(_KEYS)).to_pylist():
                rows[row["id"]] = (part, _stored(row))
                groups.setdefault(row["group_id"], []).append(row["id"])
        late: dict[str, Grade] = {}
        for number, entry in enumerate(entries):
            for name, given in _resolved(entry, rows, groups, place(number)):
                before = rows[name][1] or late.get(name)
                if before is not None and before != given:
                    which = "has another reward" if rows[name][1] else "has another reward above"
                    raise ValueError(f"{place(number)}: row {name!r} {which}, {before.reward}; a reward is given once")
                late[name] = given
        new = {name: given for name, given in late.items() if rows[name][1] is None}
        changed = {rows[name][0] for name in new}
        tables = {part: _completed(read_part(part), new, str(part)) for part in parts if part in changed}
        for part, table in tables.items():
            write_part(table, part)
    return Given(len(new), len(late) - len(new))


def _stored(row: dict[str, Any]) -> Grade | None:
    if row["reward"] is None:
        return None
    pairs = row["reward_parts"]
    return Grade(row["reward"], pairs and {pair["name"]: pair["value"] for pair in pairs}, row["accurate"])


def _resolved(
    entry: Mapping[str, Any], rows: Mapping[str, Any], groups: Mapping[str, list[str]], place: str
) -> list[tuple[str, Grade]]:
    """The rows that an entry is about, and what it gives each of them."""
    if unknown := [key for key in entry if key not in _KEYS]:
        raise ValueError(f"{place}: {unknown[0]!r} is not read; an entry takes {', '.join(_KEYS)}")
    if (entry.get("id") is None) == (entry.get("group_id") is None):
        raise ValueError(f"{place}: give one of id and group_id; got {entry!r:.80}")
    key, known = ("id", rows) if entry.get("group_id") is None else ("group_id", groups)
    if entry[key] not in known:
        raise ValueError(f"{place}: no row of the store has the {key} {entry[key]!r}")
    names = [entry[key]] if key == "id" else groups[entry[key]]
    columns = []
    for column in _GIVEN:
        values = entry.get(column)
        if not (key == "group_id" and isinstance(values, list)):
            values = [values] * len(names)
        if len(values) != len(names):
            raise ValueError(f"{place}: {column} has {len(values)} values, but the group has {len(names)} rows")
        columns.append(values)
    return [(name, _checked(Grade(*given), place)) for name, *given in zip(names, *columns, strict=True)]


def _checked(late: Grade, place: str) -> Grade:
    if not _is_number(late.reward):
        raise ValueError(f"{place}: reward = {late.reward!r:.80}: takes finite numbers")
    parts, accurate = late.reward_parts, late.accurate
    if parts is not None and not (isinstance(parts, dict) and parts and all(map(_is_number, parts.values()))):
        raise ValueError(f"{place}: reward_parts = {parts!r:.80}: takes names and finite numbers")
    if not isinstance(accurate, bool | None):
        raise ValueError(f"{place}: accurate = {accurate!r:.80}: takes true and false")
    return Grade(float(late.reward), parts and {name: float(value) for name, value in parts.items()}, accurate)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _completed(table: pa.Table, late: Mapping[str, Grade], place: str) -> pa.Table:
    """A part's table with rewards in it."""
    names = table["id"].to_pylist()
    for column in _GIVEN:
        values = table[column].to_pylist()
        for row, name in enumerate(names):
            if name in late:
                given = getattr(late[name], column)
                values[row] = reward_pairs(given) if column == "reward_parts" else given
        field = SCHEMA.field(column)
        table = table.set_column(SCHEMA.get_field_index(column), field, pa.array(values, field.type, from_pandas=False))
    check_rows(table, lambda row: f"{place}: row {row}")
    return table
