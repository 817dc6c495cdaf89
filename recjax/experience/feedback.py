"""Adds rewards that arrive late to the pending rows of a store."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from recjax.experience import store
from recjax.experience.group import Grade
from recjax.experience.store_checks import MOST_REWARD, check_rows, is_finite_number

_GIVEN = ("reward", "reward_parts", "accurate")
_COLUMNS = ("id", "group_id", *_GIVEN)
_KEYS = (*_COLUMNS, "comment")


class Given(NamedTuple):
    """Number of rows that got their reward, and number of rows that already had exactly this reward."""

    completed: int
    had_it: int


def give_rewards(
    folder: str | Path,
    entries: Sequence[Mapping[str, Any]],
    place: Callable[[int], str] = "entry {}".format,
    refuse: Callable[[int, str], None] | None = None,
) -> Given:
    """Adds rewards to pending rows of a store.

    An entry has `id` or `group_id`, `reward`, and optionally `reward_parts` and `accurate`. For a group, each of the
    three is one value for all rows, or a list with one value per row in the store's order. A `comment` is added to the
    metadata of the completed rows. Part files are replaced one by one, each whole or not at all. After an interruption,
    pass the same entries again: rows that already have exactly the same reward stay unchanged.

    Args:
        place: function from an entry's number to its name in error messages.
        refuse: function that receives the number of each unusable entry and the reason; the usable entries are still
            written. None: an unusable entry raises an error.
    Raises:
        ValueError: an unusable entry, an unknown id, two rewards for one row, or a row with a different reward. The
            store stays unchanged.
    """
    store.existing_parts(folder)  # before taking the lock, which would create a missing folder
    with store.locked(folder):
        rows, groups = {}, {}
        for part in store.existing_parts(folder):
            for row in store.read_columns(part, list(_COLUMNS)).to_pylist():
                grade = Grade(row["reward"], store.parts_of(row["reward_parts"]), row["accurate"])
                rows[row["id"]] = (part, None if row["reward"] is None else grade)
                groups.setdefault(row["group_id"], []).append(row["id"])
        late: dict[str, Grade] = {}
        comments: dict[str, str] = {}
        for number, entry in enumerate(entries):
            try:
                given = dict(_resolved(entry, rows, groups, place(number)))
                for name, own in given.items():
                    before = rows[name][1] or late.get(name)
                    if before is not None and before != own:
                        where = "the store" if rows[name][1] else "an earlier entry"
                        raise ValueError(
                            f"{place(number)}: row {name!r} has another reward, {before.reward}, in {where}; rewards"
                            " cannot be changed"
                        )
            except ValueError as error:
                if refuse is None:
                    raise
                refuse(number, str(error))
                continue
            late |= given
            if entry.get("comment") is not None:
                comments |= dict.fromkeys(given, str(entry["comment"]))
        new = {name: given for name, given in late.items() if rows[name][1] is None}
        # Build all tables before writing the first: after a bad row the store must be unchanged.
        tables = {part: _completed(part, new, comments) for part in sorted({rows[name][0] for name in new})}
        for part, table in tables.items():
            store.write_part(table, part)
    return Given(len(new), len(late) - len(new))


def _resolved(
    entry: Mapping[str, Any], rows: Mapping[str, Any], groups: Mapping[str, list[str]], place: str
) -> list[tuple[str, Grade]]:
    """The ids of an entry's rows, each with its grade."""
    if unknown := [key for key in entry if key not in _KEYS]:
        raise ValueError(f"{place}: unknown key {unknown[0]!r}; an entry takes {', '.join(_KEYS)}")
    if (entry.get("id") is None) == (entry.get("group_id") is None):
        raise ValueError(f"{place}: give exactly one of id and group_id; found {entry!r:.80}")
    key, known = ("id", rows) if entry.get("group_id") is None else ("group_id", groups)
    if entry[key] not in known:
        raise ValueError(f"{place}: {key} = {entry[key]!r}: the store has no such row; correct the {key}")
    names = [entry[key]] if key == "id" else groups[entry[key]]
    columns = []
    for column in _GIVEN:
        values = entry.get(column)
        if not (key == "group_id" and isinstance(values, list)):
            values = [values] * len(names)
        if len(values) != len(names):
            raise ValueError(f"{place}: {column} has {len(values)} values; give one for each of the {len(names)} rows")
        columns.append(values)
    resolved = []
    for name, reward, parts, accurate in zip(names, *columns, strict=True):
        if not is_finite_number(reward):
            raise ValueError(f"{place}: reward = {reward!r:.80}: takes finite numbers of at most {MOST_REWARD:g}")
        if parts is not None and not (isinstance(parts, dict) and parts and all(map(is_finite_number, parts.values()))):
            raise ValueError(f"{place}: reward_parts = {parts!r:.80}: takes names and finite numbers")
        if not isinstance(accurate, bool | None):
            raise ValueError(f"{place}: accurate = {accurate!r:.80}: takes true and false")
        parts = parts and {part: float(value) for part, value in parts.items()}
        resolved.append((name, Grade(float(reward), parts, accurate)))
    return resolved


def _completed(part: Path, late: Mapping[str, Grade], comments: Mapping[str, str]) -> pa.Table:
    """The table of a part file after adding rewards and comments."""
    rows = []
    for row in store.to_rows(store.read_part(part)):
        if row.id in late:
            row = row._replace(**{column: getattr(late[row.id], column) for column in _GIVEN})
            if row.id in comments:
                row = row._replace(
                    metadata=json.dumps(json.loads(row.metadata or "{}") | {"comment": comments[row.id]})
                )
        rows.append(row)
    table = store.to_table(rows)
    check_rows(table, lambda row: f"{part}: row {row}")
    return table
