"""Replay: which of the groups that are ready a step trains on, where groups are trained on more than once."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from recjax.config import Config, ReplayConfig, TaskConfig
from recjax.experience.group import Group, mean_absolute_advantage, reward_spread, staleness
from recjax.experience.trajectories import turn_rewards

PRIORITIES: dict[str, Callable[[Group], float]] = {
    "none": lambda group: 1.0,
    "reward_spread": reward_spread,
    "absolute_advantage": mean_absolute_advantage,
}


class Entry(NamedTuple):
    """A group, the optimizer step at which it became ready, and how often it was trained on."""

    group: Group
    added: int
    used: int


class Judge(NamedTuple):
    """How an update reads a group's rewards.

    task: its `truncated` says what happens to completions that ran into the token limit.
    part_weights: the weights of reward parts other than 1; None: the algorithm reads no parts.
    discount: for a turn, where the algorithm reads the rewards of turns; None: it does not.
    """

    task: TaskConfig = TaskConfig()
    part_weights: Mapping[str, float] | None = None
    discount: float | None = None

    def seen(self, group: Group) -> Group:
        """The group as the update sees it; `recjax.experience.batch.to_learn_from` does the same to a batch."""
        if self.task.truncated == "mask":
            return group._replace(completions=tuple(one for one in group.completions if not one.truncated))
        if self.task.truncated == "penalize":
            completions = (
                one._replace(grade=one.grade._replace(reward=self.task.truncated_reward)) if one.truncated else one
                for one in group.completions
            )
            return group._replace(completions=tuple(completions))
        return group

    def has_signal(self, group: Group) -> bool:
        """Whether the completions of a graded group differ in a reward, or in a part or turn of it, that is read."""
        group = self.seen(group)
        if reward_spread(group) > 0:
            return True
        columns = []
        if self.part_weights is not None:
            parts = [one.grade.reward_parts or {} for one in group.completions]
            names = {name for one in parts for name in one if self.part_weights.get(name, 1.0) != 0}
            columns += [[one[name] for one in parts if name in one] for name in names]
        if self.discount is not None:
            returns = [_turn_returns(turn_rewards(one), self.discount) for one in group.completions]
            most = max(map(len, returns), default=0)
            columns += [[one[min(turn, len(one) - 1)] for one in returns] for turn in range(most)]
        return any(np.ptp(column) > 0 for column in columns)


def judge_of(config: Config, part_weights: Mapping[str, float]) -> Judge:
    """How the updates of a run read rewards."""
    algorithm = config.algorithm.build()
    options = getattr(algorithm.advantage, "keywords", {})
    discount = options.get("discount", 1.0) if algorithm.reads("turn_rewards") else None
    return Judge(config.task, part_weights if algorithm.reads("reward_parts") else None, discount)


def _turn_returns(rewards: np.ndarray, discount: float) -> list[float]:
    """The discounted sum of rewards from each turn on."""
    sums = itertools.accumulate(reversed(rewards.tolist()), lambda after, reward: reward + discount * after)
    return list(sums)[::-1]


def fresh(entries: Sequence[Entry], step: int, limits: ReplayConfig) -> list[Entry]:
    """The entries that are not too stale to be trained on at `step`."""
    if limits.max_staleness is None:
        return list(entries)
    return [entry for entry in entries if staleness(entry.group, step) <= limits.max_staleness]


def sampled(entries: Sequence[Entry], count: int, step: int, seed: int, limits: ReplayConfig) -> list[int]:
    """Places of up to `count` different entries to train on at `step`, rising; they follow from (entries, seed, step).

    The chance of a group is in proportion to priority · 2^(−age / half_life), its age being in optimizer steps since it
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
