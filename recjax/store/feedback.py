"""Adds rewards that arrive late to the pending completions of a store."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from recjax.errors import UserError
from recjax.experience.columns import COLUMNS
from recjax.experience.completion_checks import check_value, wrong_turn_count
from recjax.experience.group import Grade
from recjax.rewards.reward import check_part_names
from recjax.store.store import TURNS, Store

_GIVEN = ("reward", "reward_parts", "accurate", "turn_rewards")
_KEYS = ("id", "group_id", *_GIVEN, "comment")


class _Values(NamedTuple):
    """The values that an entry gives to one completion, which `number` identifies in the store."""

    number: int
    reward: Any
    reward_parts: Any
    accurate: Any
    turn_rewards: Any


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
    for index, entry in enumerate(entries):
        unknown = [key for key in entry if key not in _KEYS]
        if unknown:
            raise UserError(place(index), f"unknown key {unknown[0]!r}", f"an entry takes {', '.join(_KEYS)}")
        if (entry.get("id") is None) == (entry.get("group_id") is None):
            raise UserError(place(index), "give exactly one of id and group_id", f"found {entry!r:.80}")
    store.check_indexes()
    numbers_by_key = {}
    for key in ("id", "group_id"):
        names = [str(entry[key]) for entry in entries if entry.get(key) is not None]
        numbers_by_key[key] = store.numbers(key, names)
    numbers = set()
    for numbers_by_name in numbers_by_key.values():
        numbers.update(*numbers_by_name.values())
    numbers = sorted(numbers)
    stored = store.rewards(numbers)
    earlier_turn_rewards = known_turns(store, numbers, stored)
    turns = {}
    if any(entry.get("turn_rewards") is not None for entry in entries):
        turns = {record.number: len(record.completion.turns) or 1 for record in store.read(numbers, None)}
    new: dict[int, tuple[Grade, str | None]] = {}
    had_it = set()
    for index, entry in enumerate(entries):
        comment = entry.get("comment")
        if comment is not None:
            comment = str(comment)
        for values in _resolved(entry, numbers_by_key, place(index)):
            number = values.number
            try:
                grade = whole_grade(
                    reward=values.reward,
                    parts=values.reward_parts,
                    accurate=values.accurate,
                    turn_rewards=values.turn_rewards,
                    turns=turns.get(number, 1),
                    known=earlier_turn_rewards.get(number, ()),
                )
            except UserError as error:
                raise error.within(place(index)) from error
            earlier = stored.get(number) or new.get(number)
            if earlier is not None and earlier[0] != grade:
                where = "the store" if number in stored else "an earlier entry"
                (record,) = store.read([number], None)
                problem = f"row {record.completion.id!r} has another reward, {earlier[0].reward}, in {where}"
                raise UserError(f"{place(index)}: reward", problem, "rewards cannot be changed", grade.reward)
            if number in stored:
                had_it.add(number)
            else:
                new[number] = grade, comment
    if new:
        store.add_rewards(new)
    return Given(len(new), len(had_it))


def known_turns(
    store: Store, numbers: Sequence[int], given: Mapping[int, tuple[Grade, str | None]]
) -> dict[int, tuple[float, ...]]:
    """The turn rewards that completions already have, by number.

    Args:
        given: the stored rewards of completions; other completions may have only turn rewards in the store.
    """
    known = store.rewards(numbers, TURNS) | dict(given)
    return {number: grade.turns for number, (grade, _) in known.items()}


def whole_grade(
    reward: Any, parts: Any, accurate: Any, turn_rewards: Any, turns: int, known: Sequence[float] = ()
) -> Grade:
    """Checks a client's values for a completion, and makes the completion's grade from these values.

    Args:
        reward: the total reward of all turns; None: the sum of the turn rewards.
        parts, accurate: see `Grade`.
        turn_rewards: reward of each turn; None: the turns keep the rewards in `known`.
        turns: number of turns.
        known: reward that each turn already has; empty if the turns have no rewards.
    Raises:
        UserError: an invalid value, or a turn already has a different reward.
    """
    if turn_rewards is not None:
        turn_rewards = tuple(check_value("turn_rewards", turn_rewards, "turn_rewards"))
        if len(turn_rewards) != turns:
            problem = wrong_turn_count(len(turn_rewards), turns or 1)
            raise UserError("turn_rewards", problem, COLUMNS["turn_rewards"].remedy, list(turn_rewards))
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
    entry: Mapping[str, Any], numbers_by_key: Mapping[str, Mapping[str, list[int]]], place: str
) -> list[_Values]:
    """The values that an entry gives to each of its completions.

    Args:
        numbers_by_key: numbers of the completions by `id` or `group_id` and its value.
        place: name of the entry for error messages.
    """
    key = "id"
    if entry.get("group_id") is not None:
        key = "group_id"
    numbers_by_name = numbers_by_key[key]
    name = entry[key]
    if not isinstance(name, str) or name not in numbers_by_name:
        raise UserError(f"{place}: {key}", "the store has no such row", f"correct the {key}", name)
    numbers = numbers_by_name[name]
    columns = []
    for column in _GIVEN:
        values = entry.get(column)
        is_list = key == "group_id" and isinstance(values, list)
        if not is_list:
            values = [values] * len(numbers)
        if len(values) != len(numbers):
            problem = f"has {len(values)} values for {len(numbers)} rows of the group"
            raise UserError(f"{place}: {column}", problem, "give one for each row", values)
        columns.append(values)
    return [_Values(number, *values) for number, *values in zip(numbers, *columns, strict=True)]
