"""Rows that are compared with each other, and what their rewards teach."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from recjax.experience.store import Experience


class Group(NamedTuple):
    """Completions of one prompt, of any number and from any sources."""

    id: str
    rows: tuple[Experience, ...]


def groups_of(rows: Iterable[Experience]) -> list[Group]:
    """The groups among rows, in the order of their first rows."""
    members: dict[str, list[Experience]] = {}
    for row in rows:
        members.setdefault(row.group_id, []).append(row)
    return [Group(name, tuple(each)) for name, each in members.items()]


def is_whole(group: Group) -> bool:
    """Whether every row has its reward."""
    return all(row.reward is not None for row in group.rows)


def rewards(group: Group) -> np.ndarray:
    """The rewards that are there."""
    return np.array([row.reward for row in group.rows if row.reward is not None], np.float64)


def reward_spread(group: Group) -> float:
    """Highest less lowest reward; 0 where the group teaches a group-relative algorithm nothing."""
    return float(np.ptp(rewards(group))) if len(rewards(group)) else 0.0


def mean_absolute_advantage(group: Group) -> float:
    """The mean of |r − r̄|."""
    return float(np.abs(rewards(group) - rewards(group).mean()).mean()) if len(rewards(group)) else 0.0


def oldest_version(group: Group) -> int | None:
    """The least policy version of the rows that have one; None where all are of other models."""
    return min((row.policy_version for row in group.rows if row.policy_version is not None), default=None)


def flattened(groups: Sequence[Group]) -> tuple[list[Experience], list[list[Any]]]:
    """The rows of groups one after the other, for `store.to_table`, and name and size of each group, for JSON."""
    return [row for group in groups for row in group.rows], [[group.id, len(group.rows)] for group in groups]


def regrouped(rows: Sequence[Experience], sizes: Sequence[Sequence[Any]]) -> list[Group]:
    """The groups that `flattened` took apart."""
    groups, start = [], 0
    for name, size in sizes:
        groups.append(Group(name, tuple(rows[start : start + size])))
        start += size
    return groups
