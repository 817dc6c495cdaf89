"""Adds rewards that arrive late to the pending completions of a store."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from recjax.experience.group import Grade
from recjax.experience.store import TURNS, Store
from recjax.experience.store_checks import MOST_REWARD, are_parts, is_finite_number
from recjax.tasks.grading.reward import check_part_names

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
        ValueError: an unusable entry, an unknown id, two rewards for one completion, a completion with a different
            reward, or a damaged store. The store stays unchanged.
    """
    for number, entry in enumerate(entries):
        if unknown := [key for key in entry if key not in _KEYS]:
            raise ValueError(f"{place(number)}: unknown key {unknown[0]!r}; an entry takes {', '.join(_KEYS)}")
        if (entry.get("id") is None) == (entry.get("group_id") is None):
            raise ValueError(f"{place(number)}: give exactly one of id and group_id; found {entry!r:.80}")
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
            except ValueError as error:
                raise ValueError(f"{place(number)}: {error}") from error
            earlier = before.get(name) or new.get(name)
            if earlier is not None and earlier[0] != grade:
                where = "the store" if name in before else "an earlier entry"
                (record,) = store.read([name], None)
                raise ValueError(
                    f"{place(number)}: row {record.completion.id!r} has another reward, {earlier[0].reward}, in"
                    f" {where}; rewards cannot be changed"
                )
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
        ValueError: an invalid value, or another reward for a turn.
    """
    takes = f"finite numbers of at most {MOST_REWARD:g}"
    if turn_rewards is not None:
        are_rewards = isinstance(turn_rewards, list | tuple) and all(map(is_finite_number, turn_rewards))
        if not are_rewards or len(turn_rewards) != turns:
            raise ValueError(
                f"turn_rewards = {turn_rewards!r:.80}: takes a list of {takes}, one for each of {turns} turns"
            )
        turn_rewards = tuple(map(float, turn_rewards))
        if known and turn_rewards != tuple(known):
            listed = ", ".join(f"{value:g}" for value in known)
            raise ValueError(
                f"turn_rewards = {turn_rewards!r:.80}: the turns already have the rewards {listed}; remove it"
            )
    turn_rewards = turn_rewards or tuple(known)
    reward = sum(turn_rewards) if reward is None and turn_rewards else reward
    if not is_finite_number(reward):
        raise ValueError(f"reward = {reward!r:.80}: takes {takes}")
    if parts is not None and not (parts and are_parts(parts)):
        raise ValueError(f"reward_parts = {parts!r:.80}: takes names and finite numbers")
    check_part_names(parts or (), "reward_parts")
    if not isinstance(accurate, bool | None):
        raise ValueError(f"accurate = {accurate!r:.80}: takes true and false")
    parts = parts and {name: float(value) for name, value in parts.items()}
    return Grade(float(reward), parts, accurate, turns=turn_rewards)


def _resolved(
    entry: Mapping[str, Any], known: Mapping[str, Mapping[str, list[int]]], place: str
) -> list[tuple[int, Any, Any, Any, Any]]:
    """The numbers of an entry's completions, each with its values of `_GIVEN`."""
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
    return list(zip(names, *columns, strict=True))
