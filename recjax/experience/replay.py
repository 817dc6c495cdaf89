"""Replay: which of the groups that are ready a step trains on, where groups are trained on more than once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from recjax.config import ReplayConfig
from recjax.experience.group import Group, mean_absolute_advantage, reward_spread, staleness

PRIORITIES: dict[str, Callable[[Group], float]] = {
    "none": lambda group: 1.0,
    "reward_spread": reward_spread,
    "absolute_advantage": mean_absolute_advantage,
}


class Entry(NamedTuple):
    """A group, the optimiser step at which it became ready, and how often it was trained on."""

    group: Group
    added: int
    used: int


def fresh(entries: Sequence[Entry], step: int, limits: ReplayConfig) -> list[Entry]:
    """The entries that are not too stale to be trained on at `step`."""
    if limits.max_staleness is None:
        return list(entries)
    return [entry for entry in entries if staleness(entry.group, step) <= limits.max_staleness]


def sampled(entries: Sequence[Entry], count: int, step: int, seed: int, limits: ReplayConfig) -> list[int]:
    """Places of up to `count` different entries to train on at `step`, rising; they follow from (entries, seed, step).

    The chance of a group is in proportion to priority · 2^(−age / half_life), its age being in optimiser steps since it
    became ready; groups of priority 0 come when there is no other. Sampling is without replacement.
    """
    keys = np.array([_log_chance(entry, step, limits) for entry in entries])
    # Adding Gumbel noise and taking the largest samples without replacement in proportion to the chances; of those
    # without any chance, that of the latest comes first.
    noise = np.random.default_rng([seed, 5, step]).gumbel(size=len(keys))
    order = np.lexsort((np.arange(len(keys)), keys + noise))[::-1][:count]
    return sorted(order.tolist())


def _log_chance(entry: Entry, step: int, limits: ReplayConfig) -> float:
    priority = PRIORITIES[limits.priority](entry.group)
    recency = 0.0 if limits.half_life is None else -np.log(2.0) * (step - entry.added) / limits.half_life
    return (np.log(priority) if priority > 0 else -np.inf) + recency
