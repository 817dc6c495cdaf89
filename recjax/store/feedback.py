"""Adds rewards that arrive late to the pending completions of a store."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from recjax.errors import UserError
from recjax.experience.completion_schema import check_value, uneven
from recjax.experience.group import Grade
from recjax.rewards.reward import check_part_names
from recjax.store.store import TURNS, Store

_GIVEN = ("reward", "reward_parts", "accurate", "turn_rewards")
_KEYS = ("id", "group_id", *_GIVEN, "comment")


class Given(NamedTuple):
    """Number of completions that got their reward, and number of completions that already had exactly this reward."""

    completed: int
    had_it: int


def give_rewards(
    store: Store, entries: Sequence[Mapping[str, Any]], place: Callable[[int], str] = "entry {}".format
) -> Given:
    """Adds rewards to pending completions of a store, in one transaction.

    An entry has `id` or `group_id`, `reward`, and optionally `reward_parts`, `accurate` and `turn_rewards`; see
    `whole_grade`. For a group, each of the four is one value for all completions, or a list with one value for each in
    the store's order. A `comment` is added to the metadata of the completions. Completions that already have exactly
    the same reward stay unchanged.

    Args:
        place: function from an entry's number to its name in error messages.
    Raises:
        UserError: an unusable entry, an unknown id, two rewards for one completion, a completion with a different
            reward, or a damaged store. The store stays unchanged.
    """
    for number, entry in enumerate(entries):
        if unknown := [key for key in entry if key not in _KEYS]:
            raise UserError(place(number), f"unknown key {unknown[0]!r}", f"an entry takes {', '.join(_KEYS)}")
        if (entry.get("id") is None) == (entry.get("group_id") is None):
            raise UserError(place(number), "give exactly one of id and group_id", f"found {entry!r:.80}")
    store.check_indexes()
    known = {
        key: store.numbers(key, [str(entry[key]) for entry in entries if entry.get(key) is not None])
        for key in ("id", "group_id")
    }
    numbers = sorted({number for of_key in known.values() for numbers in of_key.values() for number in numbers})
    before = store.rewards(numbers)
    of_turns = known_turns(store, numbers, before)
    has_turns = any(entry.get("turn_rewards") is not None for entry in entries)
    records = store.read(numbers, None) if has_turns else []
    turns = {record.number: len(record.completion.turns) or 1 for record in records}
    new: dict[int, tuple[Grade, str | None]] = {}
    had_it = set()
    for number, entry in enumerate(entries):
        comment = entry.get("comment")
        for name, reward, parts, accurate, turn_rewards in _resolved(entry, known, place(number)):
            try:
                known_rewards = of_turns.get(name, ())
                grade = whole_grade(reward, parts, accurate, turn_rewards, turns.get(name, 1), known_rewards)
            except UserError as error:
                raise error.within(place(number)) from error
            earlier = before.get(name) or new.get(name)
            if earlier is not None and earlier[0] != grade:
                where = "the store" if name in before else "an earlier entry"
                (record,) = store.read([name], None)
                problem = f"row {record.completion.id!r} has another reward, {earlier[0].reward}, in {where}"
                raise UserError(f"{place(number)}: reward", problem, "rewards cannot be changed", grade.reward)
            if name in before:
                had_it.add(name)
            else:
                new[name] = grade, None if comment is None else str(comment)
    if new:
        store.add_rewards(new)
    return Given(len(new), len(had_it))


def known_turns(
    store: Store, numbers: Sequence[int], given: Mapping[int, tuple[Grade, str | None]]
) -> dict[int, tuple[float, ...]]:
    """The rewards that turns have, by number of the completion; `given` has the rewards of the completions."""
    return {number: grade.turns for number, (grade, _) in {**store.rewards(numbers, TURNS), **given}.items()}


def whole_grade(
    reward: Any, parts: Any, accurate: Any, turn_rewards: Any, turns: int, known: Sequence[float] = ()
) -> Grade:
    """Checks the values that a client gives a completion, and makes its grade from these values.

    Args:
        reward: the total reward of all turns; None: the sum of their rewards.
        parts, accurate: see `Grade`.
        turn_rewards: reward of each turn; None: the turns keep the rewards that they have.
        turns: number of turns.
        known: reward of each turn that the turns have; empty if they have none.
    Raises:
        UserError: an invalid value, or another reward for a turn.
    """
    if turn_rewards is not None:
        turn_rewards = tuple(check_value("turn_rewards", turn_rewards, "turn_rewards"))
        if len(turn_rewards) != turns:
            raise UserError("turn_rewards", *uneven(turn_rewards, turns), list(turn_rewards))
        if known and turn_rewards != tuple(known):
            listed = ", ".join(f"{value:g}" for value in known)
            problem = f"the turns already have the rewards {listed}"
            raise UserError("turn_rewards", problem, "remove it", list(turn_rewards))
    turn_rewards = turn_rewards or tuple(known)
    if reward is None and turn_rewards:
        reward = sum(turn_rewards)
    reward = check_value("reward", reward, "reward")
    if parts is not None:
        parts = check_value("reward_parts", parts, "reward_parts")
        check_part_names(parts, "reward_parts")
    if accurate is not None:
        accurate = check_value("accurate", accurate, "accurate")
    return Grade(reward, parts, accurate, turns=turn_rewards)


def _resolved(
    entry: Mapping[str, Any], known: Mapping[str, Mapping[str, list[int]]], place: str
) -> list[tuple[int, Any, Any, Any, Any]]:
    """The numbers of an entry's completions, each with its values of `_GIVEN`."""
    key = "id" if entry.get("group_id") is None else "group_id"
    if not isinstance(entry[key], str) or entry[key] not in known[key]:
        raise UserError(f"{place}: {key}", "the store has no such row", f"correct the {key}", entry[key])
    names = known[key][entry[key]]
    columns = []
    for column in _GIVEN:
        values = entry.get(column)
        if not (key == "group_id" and isinstance(values, list)):
            values = [values] * len(names)
        if len(values) != len(names):
            problem = f"has {len(values)} values for {len(names)} rows of the group"
            raise UserError(f"{place}: {column}", problem, "give one for each row", values)
        columns.append(values)
    return list(zip(names, *columns, strict=True))
