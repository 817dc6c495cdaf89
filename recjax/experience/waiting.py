"""Groups that wait for late rewards. Plain data and pure functions, as in `buffer`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from recjax.experience.feedback import Late
from recjax.experience.groups import Group, flattened, is_whole, regrouped
from recjax.experience.store import Experience

Lost = Literal["rows_without_reward", "groups_without_reward", "rewards_too_late"]
LOST: tuple[Lost, ...] = ("rows_without_reward", "groups_without_reward", "rewards_too_late")


class Waiting(NamedTuple):
    """Groups with the optimiser step at which each began to wait, and how much was lost, by what."""

    groups: tuple[tuple[Group, int], ...]
    lost: dict[Lost, int]


NOBODY = Waiting((), dict.fromkeys(LOST, 0))


def wait(waiting: Waiting, groups: Sequence[Group], step: int) -> Waiting:
    """The queue with groups behind it that begin to wait at `step`; whole ones will not wait long."""
    return waiting._replace(groups=(*waiting.groups, *((group, step) for group in groups)))


def rewarded(waiting: Waiting, late: Mapping[str, Late]) -> Waiting:
    """The queue after rewards have arrived, by row id; those for rows that wait no more are counted.

    Raises:
        ValueError: a row has another reward already.
    """
    pending = dict(late)

    def complete(row: Experience) -> Experience:
        given = pending.pop(row.id, None)
        if given is None:
            return row
        if row.reward is not None and row.reward != given.reward:
            raise ValueError(f"row {row.id!r} has another reward, {row.reward}; a reward is given once")
        return row._replace(**given._asdict())

    groups = tuple((group._replace(rows=tuple(map(complete, group.rows))), since) for group, since in waiting.groups)
    lost = waiting.lost["rewards_too_late"] + len(pending)
    return Waiting(groups, {**waiting.lost, "rewards_too_late": lost})


def release(waiting: Waiting, step: int, deadline: int | None) -> tuple[Waiting, list[Group]]:
    """The queue without the groups that can be trained on at `step`, and those groups, in the order they came.

    A group goes when it is whole, or `deadline` optimiser steps after it began to wait; then without the rows that have
    no reward, which are counted, and not at all if that is every row.

    Args:
        deadline: None: groups wait until they are whole.
    """
    kept, released, lost = [], [], dict(waiting.lost)
    for group, since in waiting.groups:
        if is_whole(group):
            released.append(group)
        elif deadline is None or step - since < deadline:
            kept.append((group, since))
        else:
            rows = tuple(row for row in group.rows if row.reward is not None)
            lost["rows_without_reward"] += len(group.rows) - len(rows)
            lost["groups_without_reward"] += not rows
            released += [group._replace(rows=rows)] if rows else []
    return Waiting(tuple(kept), lost), released


def reward_delays(rows: int, shortest: int, longest: int, batch: int, seed: int) -> np.ndarray:
    """Optimiser steps that the reward of each row of a batch comes late, drawn evenly from both ends and between.

    A pure function of its arguments.
    """
    return np.random.default_rng([seed, 6, batch]).integers(shortest, longest + 1, rows)


def to_plain(waiting: Waiting) -> tuple[list[Experience], dict[str, Any]]:
    """The queue as rows, for `store.to_table`, and as what JSON holds; `from_plain` makes it again."""
    rows, sizes = flattened([group for group, _ in waiting.groups])
    return rows, {"groups": sizes, "since": [since for _, since in waiting.groups], "lost": waiting.lost}


def from_plain(rows: Sequence[Experience], plain: dict[str, Any]) -> Waiting:
    """The queue that `to_plain` took apart."""
    groups = zip(regrouped(rows, plain["groups"]), plain["since"], strict=True)
    return Waiting(tuple(groups), dict(plain["lost"]))
