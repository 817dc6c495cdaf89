"""Replay: selects the ready groups that a step trains on when groups are used more than once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from recjax.config import Config, ReplayConfig, TaskConfig
from recjax.experience.group import Group, group_staleness, rewards, turn_rewards

_EPSILON = 1e-6  # added to standard deviations, as in the advantages


class Entry(NamedTuple):
    """A group that is ready to train on.

    added: optimizer step at which it became ready.
    used: number of times it was trained on.
    headroom, drift: see the functions of these names, at its last use; None before, or if they are unknown.
    """

    group: Group
    added: int
    used: int
    headroom: float | None = None
    drift: float | None = None


def headroom(logprobs: Float[np.ndarray, " tokens"], advantages: Float[np.ndarray, " tokens"]) -> float:
    """How far the policy can still move with the advantages: the mean of 1 − π where A > 0 and of π where A < 0.

    A token whose log-prob is NaN counts as 1, the highest value; without advantages, the headroom is 0.

    Reference: arXiv 2609.03941, from a summary.

    Examples:
        >>> round(headroom(np.log([0.5, 0.75, 0.5]), np.array([1.0, -1.0, 0.0])), 3)
        0.625
    """
    counts = advantages != 0
    if not counts.any():
        return 0.0
    probabilities = np.exp(logprobs[counts].astype(np.float64))
    gains = np.where(advantages[counts] > 0, 1 - probabilities, probabilities)
    return float(np.mean(np.where(np.isnan(gains), 1.0, gains)))


def drift(
    logprobs: Float[np.ndarray, "batch time"],
    behavior_logprobs: Float[np.ndarray, "batch time"],
    mask: Bool[np.ndarray, "batch time"],
) -> float | None:
    """How far the policy has moved from the sampler: the mean of (log π − log μ)² over possible tokens of the mask.

    Returns:
        None if no token has both log-probs.
    Reference: arXiv 2609.03941, from a summary.

    Examples:
        >>> drift(np.array([[-1.0, -2.0]]), np.array([[-1.5, -2.0]]), np.array([[True, True]]))
        0.125
    """
    is_known = mask & np.isfinite(logprobs) & np.isfinite(behavior_logprobs)
    if not is_known.any():
        return None
    difference = logprobs[is_known].astype(np.float64) - behavior_logprobs[is_known]
    return float(np.mean(np.square(difference)))


class Judge(NamedTuple):
    """The settings by which an update reads a group's rewards.

    task: task settings; `task.truncated` decides how the update treats completions that reached the token limit.
    part_weights: weights of reward parts, by name, with default 1; None if the algorithm does not read parts.
    discount: discount factor for turn rewards; None if the algorithm does not read turn rewards.
    signal: the groups that the algorithm learns from; see `AlgorithmConfig.signal`.
    values_singletons: True if the advantage of a group's only completion is its reward.
    imitates: True if the algorithm imitates completions of other models, whatever their rewards are.
    """

    task: TaskConfig = TaskConfig()
    part_weights: Mapping[str, float] | None = None
    discount: float | None = None
    signal: Literal["difference", "reward", "any"] = "difference"
    values_singletons: bool = False
    imitates: bool = False

    def seen(self, group: Group) -> Group:
        """The group as an update sees it: without completions that have no tokens, and with `task.truncated` applied.

        An agent that failed before its first reply has no tokens. `recjax.experience.batch.pad` and `to_learn_from` do
        the same to a batch.
        """
        completions = []
        for completion in group.completions:
            if not completion.rows or (completion.truncated and self.task.truncated == "mask"):
                continue
            if completion.truncated and self.task.truncated == "penalize":
                grade = completion.known_grade._replace(reward=self.task.truncated_reward)
                completion = completion._replace(grade=grade)
            completions.append(completion)
        return group._replace(completions=tuple(completions))

    def has_signal(self, group: Group) -> bool:
        """True if the algorithm learns something from a graded group.

        With the signal `difference`, completions differ in a reward, reward part or return that the algorithm reads.
        """
        group = self.seen(group)
        if self.signal == "any":
            return bool(group.completions)
        if self.imitates and any(completion.policy_version is None for completion in group.completions):
            return True
        is_valued_alone = self.values_singletons and len(group.completions) == 1
        columns = self._compared(group)
        if self.signal == "reward" or is_valued_alone:
            # Without a baseline, a reward teaches by itself, unless it is 0.
            return any(np.any(column) for column in columns)
        return any(np.ptp(column) > 0 for column in columns)

    def reward_spread(self, group: Group) -> float:
        """The largest difference between completions in a reward, reward part or return that the algorithm reads."""
        spreads = [np.ptp(column) for column in self._compared(self.seen(group))]
        return float(max(spreads, default=0.0))

    def absolute_advantage(self, group: Group) -> float:
        """The mean absolute difference from the group's mean reward: mean of |r − r̄|.

        For returns, the mean over turns; for reward parts, the mean of |Σ_p w_p (r_p − r̄_p) / σ_p|.
        """
        group = self.seen(group)
        columns = [rewards(group)]
        if self.discount is not None:
            columns = self._returns(group)
        elif self.part_weights is not None:
            total = np.zeros(len(group.completions))
            for name, part_values in self._parts(group).items():
                normalized = (part_values - np.nanmean(part_values)) / (np.nanstd(part_values) + _EPSILON)
                total += self.part_weights.get(name, 1.0) * np.nan_to_num(normalized)
            columns = [total]
        means = [np.abs(column - column.mean()).mean() for column in columns if len(column)]
        if not means:
            return 0.0
        return float(np.mean(means))

    def first_headroom(self, group: Group) -> float:
        """Headroom under the behavior policy, with r − r̄ as advantage."""
        group = self.seen(group)
        values = rewards(group)
        differences = (values - values.sum() / max(len(values), 1)).tolist()
        logprobs = []
        advantages = []
        for completion, difference in zip(group.completions, differences, strict=True):
            for row in completion.rows:
                known = row.behavior_logprobs
                if known is None:
                    known = np.full(len(row.mask), np.nan)
                logprobs += known[row.mask].tolist()
                advantages += [difference] * int(row.mask.sum())
        return headroom(np.array(logprobs), np.array(advantages))

    def _compared(self, group: Group) -> list[np.ndarray]:
        """The values of completions that the algorithm compares: rewards, and the parts or returns that it reads."""
        columns = [rewards(group)]
        if self.part_weights is not None:
            columns += [part_values[np.isfinite(part_values)] for part_values in self._parts(group).values()]
        if self.discount is not None:
            columns += self._returns(group)
        return [column for column in columns if len(column)]

    def _parts(self, group: Group) -> dict[str, np.ndarray]:
        """The reward parts by name, without parts of weight 0; NaN for completions without the part."""
        weights = self.part_weights or {}
        graded_parts = [completion.known_grade.reward_parts or {} for completion in group.completions]
        columns = {}
        for parts in graded_parts:
            for name in parts:
                if name not in columns and weights.get(name, 1.0) != 0:
                    columns[name] = np.array([other.get(name, np.nan) for other in graded_parts])
        return columns

    def _returns(self, group: Group) -> list[np.ndarray]:
        """The return of each completion at each turn: the discounted sum of the turn's reward and all later rewards."""
        assert self.discount is not None
        trajectories = []
        for completion in group.completions:
            returns = turn_rewards(completion).tolist()
            for turn in reversed(range(len(returns) - 1)):
                returns[turn] += self.discount * returns[turn + 1]
            trajectories.append(returns)
        columns = []
        for turn in range(max(map(len, trajectories), default=0)):
            # As in the advantages, a shorter trajectory enters a later turn with the return of its last turn.
            columns.append(np.array([returns[min(turn, len(returns) - 1)] for returns in trajectories]))
        return columns


PRIORITIES: dict[str, Callable[[Judge, Group], float]] = {
    "none": lambda judge, group: 1.0,
    "reward_spread": Judge.reward_spread,
    "absolute_advantage": Judge.absolute_advantage,
    "headroom": Judge.first_headroom,
}


def judge_of(config: Config, part_weights: Mapping[str, float]) -> Judge:
    """Builds the `Judge` that matches the algorithm and task of a config."""
    algorithm = config.algorithm.build()
    discount = None
    if algorithm.reads("turn_rewards"):
        discount = algorithm.advantage.option("discount")
        if discount is None:
            discount = 1.0
    return Judge(
        task=config.task,
        part_weights=part_weights if algorithm.reads("reward_parts") else None,
        discount=discount,
        signal=config.algorithm.signal(config.task),
        values_singletons=algorithm.values_singletons,
        imitates=algorithm.imitates,
    )


def fresh(entries: Sequence[Entry], step: int, limits: ReplayConfig) -> list[Entry]:
    """The entries that are within `max_staleness` at `step`."""
    if limits.max_staleness is None:
        return list(entries)
    return [entry for entry in entries if group_staleness(entry.group, step) <= limits.max_staleness]


def near(entries: Sequence[Entry], limits: ReplayConfig) -> list[Entry]:
    """The entries that were within `max_drift` at their last use, and those that were not used."""
    limit = limits.max_drift
    return [entry for entry in entries if limit is None or entry.drift is None or entry.drift <= limit]


def order_entries(entries: Sequence[Entry], step: int, seed: int, limits: ReplayConfig, judge: Judge) -> list[int]:
    """The indices of the entries in the order in which `step` takes them.

    The chance of a group is proportional to priority · 2^(−age / half_life), with the age in optimizer steps since the
    group became ready; priority 0 is chosen last. With `order` = sampled, the order is a sample without replacement;
    with highest, it is that of the chances. A pure function of its arguments.
    """
    keys = np.full(len(entries), -np.inf)
    for index, entry in enumerate(entries):
        if limits.priority == "headroom" and entry.headroom is not None:
            priority = entry.headroom
        else:
            priority = PRIORITIES[limits.priority](judge, entry.group)
        if priority > 0:
            keys[index] = np.log(priority)
    if limits.half_life is not None:
        keys += np.array([-np.log(2.0) * (step - entry.added) / limits.half_life for entry in entries])
    if limits.order == "sampled":
        # The Gumbel-top-k trick: to add noise and take the largest keys is to sample without replacement, in proportion
        # to probability.
        keys += np.random.default_rng([seed, 5, step]).gumbel(size=len(keys))
    # Among entries with equal keys, such as those with probability 0, the latest comes first.
    return np.lexsort((np.arange(len(keys)), keys))[::-1].tolist()
