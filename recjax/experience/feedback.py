"""Adds rewards that arrive late to the pending completions of a store."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from recjax.experience.group import Grade
from recjax.experience.store import Store
from recjax.experience.store_checks import MOST_REWARD, is_finite_number

_GIVEN = ("reward", "reward_parts", "accurate")
_KEYS = ("id", "group_id", *_GIVEN, "comment")


class Given(NamedTuple):
    """Number of completions that got their reward, and number of those that already had exactly this reward."""

    completed: int
    had_it: int


def give_rewards(
    store: Store,
    entries: Sequence[Mapping[str, Any]],
    place: Callable[[int], str] = "entry {}".format,
) -> Given:
    """Adds rewards to pending completions of a store, in one transaction.

    An entry has `id` or `group_id`, `reward`, and optionally `reward_parts` and `accurate`. For a group, each of the
    three is one value for all completions, or a list with one value for each in the store's order. A `comment` is added
    to the metadata of the completions. Completions that already have exactly the same reward stay unchanged.

    Args:
        place: function from an entry's number to its name in error messages.
    Raises:
        ValueError: an unusable entry, an unknown id, two rewards for one completion, or a completion with a different
            reward. The store stays unchanged.
    """
    for number, entry in enumerate(entries):
        if unknown := [key for key in entry if key not in _KEYS]:
            raise ValueError(f"{place(number)}: unknown key {unknown[0]!r}; an entry takes {', '.join(_KEYS)}")
        if (entry.get("id") is None) == (entry.get("group_id") is None):
            raise ValueError(f"{place(number)}: give exactly one of id and group_id; found {entry!r:.80}")
    known = {
        key: store.numbers(key, [str(entry[key]) for entry in entries if entry.get(key) is not None])
        for key in ("id", "group_id")
    }
    before = store.rewards([number for found in known.values() for numbers in found.values() for number in numbers])
    new: dict[int, tuple[Grade, str | None]] = {}
    had_it = set()
    for number, entry in enumerate(entries):
        comment = entry.get("comment")
        for name, own in _resolved(entry, known, place(number)):
            earlier = before.get(name) or new.get(name)
            if earlier is not None and earlier[0] != own:
                where = "the store" if name in before else "an earlier entry"
                (record,) = store.read([name], None)
                raise ValueError(
                    f"{place(number)}: row {record.completion.id!r} has another reward, {earlier[0].reward}, in"
                    f" {where}; rewards cannot be changed"
                )
            if name in before:
                had_it.add(name)
            else:
                new[name] = own, None if comment is None else str(comment)
    if new:
        store.add_rewards(new)
    return Given(len(new), len(had_it))


def _resolved(
    entry: Mapping[str, Any], known: Mapping[str, Mapping[str, list[int]]], place: str
) -> list[tuple[int, Grade]]:
    """The numbers of an entry's completions, each with its grade."""
    key = "id" if entry.get("group_id") is None else "group_id"
    if not isinstance(entry[key], str) or entry[key] not in known[key]:
        raise ValueError(f"{place}: {key} = {entry[key]!r}: the store has no such row; correct the {key}")
    names = known[key][entry[key]]
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
