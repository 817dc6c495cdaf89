"""Replay: groups that are trained on more than once, within limits.

A buffer is plain data and its functions are pure. What is drawn follows from (buffer, seed, step), so a run that goes
on from a stored buffer draws the same.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from recjax.config import ReplayConfig
from recjax.experience.groups import (
    Group,
    flattened,
    mean_absolute_advantage,
    oldest_version,
    regrouped,
    reward_spread,
)
from recjax.experience.store import Experience

PRIORITIES: dict[str, Callable[[Group], float]] = {
    "none": lambda group: 1.0,
    "reward_spread": reward_spread,
    "absolute_advantage": mean_absolute_advantage,
}
Reason = Literal["capacity", "stale", "used_up", "no_signal"]
REASONS: tuple[Reason, ...] = ("capacity", "stale", "used_up", "no_signal")


class Entry(NamedTuple):
    """A group, the optimiser step at which it came, and how often it was trained on."""

    group: Group
    added: int
    used: int


class Buffer(NamedTuple):
    """Groups in the order in which they came, and how many have left, by reason."""

    entries: tuple[Entry, ...]
    left: dict[Reason, int]


EMPTY = Buffer((), dict.fromkeys(REASONS, 0))


def staleness(group: Group, step: int) -> int:
    """Optimiser steps between the oldest weights that drew a row and those that train on it at `step`, from 1.

    Rows of other models have none; it is 0 for a group of these alone.
    """
    version = oldest_version(group)
    return 0 if version is None else step - 1 - version


def add(buffer: Buffer, groups: Sequence[Group], step: int, limits: ReplayConfig) -> Buffer:
    """The buffer with groups that came at `step`, after what has no place in it has left."""
    entries, left = list(buffer.entries), dict(buffer.left)
    for group in groups:
        if limits.keep_no_signal or reward_spread(group) > 0:
            entries.append(Entry(group, step, 0))
        else:
            left["no_signal"] += 1
    fresh = expire(Buffer(tuple(entries), left), step, limits)
    excess = max(len(fresh.entries) - limits.capacity, 0)
    return _without(fresh, fresh.entries[excess:], "capacity")


def expire(buffer: Buffer, step: int, limits: ReplayConfig) -> Buffer:
    """The buffer without groups that are too stale to be trained on at `step`."""
    if limits.max_staleness is None:
        return buffer
    return _without(buffer, [x for x in buffer.entries if staleness(x.group, step) <= limits.max_staleness], "stale")


def draw(buffer: Buffer, count: int, step: int, seed: int, limits: ReplayConfig) -> tuple[Buffer, list[Group]]:
    """Up to `count` different groups to train on at `step`, and the buffer after that.

    The chance of a group is in proportion to priority · 2^(−age / half_life), its age being in optimiser steps since it
    came; groups of priority 0 come when there is no other. Drawing is without replacement. Groups that have then been
    used `max_reuse` times leave.
    """
    buffer = expire(buffer, step, limits)
    keys = np.array([_log_chance(entry, step, limits) for entry in buffer.entries])
    # Adding Gumbel noise and taking the largest draws without replacement in proportion to the chances; of those
    # without any chance, that of the latest comes first.
    noise = np.random.default_rng([seed, 5, step]).gumbel(size=len(keys))
    order = np.lexsort((np.arange(len(keys)), keys + noise))[::-1][:count]
    chosen = {*order.tolist()}
    entries = [entry._replace(used=entry.used + (place in chosen)) for place, entry in enumerate(buffer.entries)]
    groups = [buffer.entries[place].group for place in sorted(chosen)]
    used = Buffer(tuple(entries), buffer.left)
    return _without(used, [entry for entry in entries if entry.used < limits.max_reuse], "used_up"), groups


def first(buffer: Buffer, count: int) -> tuple[Buffer, list[Group]]:
    """The `count` groups that came first, or all, and the buffer without them."""
    groups = [entry.group for entry in buffer.entries[:count]]
    return _without(buffer, buffer.entries[count:], "used_up"), groups


def oldest_first(buffer: Buffer) -> Buffer:
    """The buffer as if its groups had come in the order of the weights that drew them."""
    return buffer._replace(entries=tuple(sorted(buffer.entries, key=lambda entry: oldest_version(entry.group) or 0)))


def _log_chance(entry: Entry, step: int, limits: ReplayConfig) -> float:
    priority = PRIORITIES[limits.priority](entry.group)
    recency = 0.0 if limits.half_life is None else -np.log(2.0) * (step - entry.added) / limits.half_life
    return (np.log(priority) if priority > 0 else -np.inf) + recency


def _without(buffer: Buffer, kept: Sequence[Entry], reason: Reason) -> Buffer:
    """The buffer with `kept` alone, the others counted under `reason`."""
    gone = len(buffer.entries) - len(kept)
    return Buffer(tuple(kept), {**buffer.left, reason: buffer.left[reason] + gone})


def to_plain(buffer: Buffer) -> tuple[list[Experience], dict[str, Any]]:
    """A buffer as rows, for `store.to_table`, and as what JSON holds; `from_plain` makes it again."""
    rows, sizes = flattened([entry.group for entry in buffer.entries])
    steps, uses = [entry.added for entry in buffer.entries], [entry.used for entry in buffer.entries]
    return rows, {"groups": sizes, "added": steps, "used": uses, "left": buffer.left}


def from_plain(rows: Sequence[Experience], plain: dict[str, Any]) -> Buffer:
    """The buffer that `to_plain` took apart."""
    entries = map(Entry, regrouped(rows, plain["groups"]), plain["added"], plain["used"])
    return Buffer(tuple(entries), dict(plain["left"]))
