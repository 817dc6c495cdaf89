"""Loads a store for training: selects the usable groups and fills in missing log-probs."""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from recjax.config import Config
from recjax.experience.batch import Shape, pad
from recjax.experience.group import Completion, Grade, Group
from recjax.experience.sources import check_logprobs, load_groups, with_initial_logprobs, with_logprobs
from recjax.experience.stored_groups import ByPrompt, StoredGroups, has_unsampled, is_missing, lengths
from recjax.hub.policy import Policy
from recjax.tasks.prompts import Prompts

logger = logging.getLogger(__name__)


class Stored(NamedTuple):
    """Groups to train on, the shape of their batches, counts of skipped items by reason, and a digest of the data."""

    groups: StoredGroups
    shape: Shape
    left_out: dict[str, int]
    digest: str


def stored_per_batch(config: Config) -> int:
    """The number of groups in a batch that come whole from a store."""
    experience, count = config.experience, config.rollout.prompts_per_step
    if experience and experience.store and not experience.follow:
        return count
    mix = experience and experience.mix
    return round(mix.share * count) if mix and mix.of == "batch" else 0


def load_stored(config: Config, policy: Policy) -> Stored:
    """Loads the groups of `experience.store` or `experience.mix.store` with all their rewards, and checks them.

    With `experience.regrade`, loads all groups, with reward 0 for every completion until `with_rewards` sets rewards.

    Raises:
        ValueError: no such store, rows that this policy or algorithm cannot be trained on, or too few whole groups.
    """
    mix, rollout = config.experience.mix, config.rollout
    key, store = ("experience.mix.store", mix.store) if mix else ("experience.store", config.experience.store)

    def without_reward(group: Group, _: int) -> Group:
        return group._replace(completions=tuple(row._replace(grade=Grade(0.0)) for row in group.completions))

    def of_this_run(group: Group, _: int) -> Group:
        # Versions other than 0 count the updates of another run, so they cannot measure staleness in this run.
        versions = [0 if row.policy_version == 0 else None for row in group.completions]
        rows = map(as_trained, group.completions, [config.task.success] * len(versions), versions)
        return group._replace(completions=tuple(rows))

    try:
        everything = load_groups(store, policy)
        pending = everything.rows.each(is_missing, "reward")[everything.heads]
        if config.experience.regrade:
            everything, pending = everything.changed(without_reward), np.zeros_like(pending)
        is_whole = ~everything.any_in(pending)
        waiting, whole = everything.chosen(~is_whole), everything.chosen(is_whole)
        if not len(whole):
            raise ValueError(
                f"all {len(everything)} groups wait for rewards; add rewards with python -m recjax.feedback"
            )
        if len(whole) < stored_per_batch(config):
            raise ValueError(
                f"{len(whole)} groups have all their rewards ({len(waiting)} wait for some), fewer than the"
                f" {stored_per_batch(config)} that each batch takes from the store; add groups, or lower"
                f" rollout.prompts_per_step = {rollout.prompts_per_step}"
            )
        whole = whole.changed(of_this_run)
        prompts, tokens = (whole.rows.each(lengths, name) for name in ("prompt_tokens", "completion_tokens"))
        longest = prompts[whole.firsts].max(), tokens[whole.heads].max()
        shape = Shape(rollout.prompts_per_step, int(whole.sizes.max()), *map(int, longest))
        # Pad once so that a row that does not fit a batch raises an error at the start and not at a later step.
        for group in whole.chosen(whole.any_in(whole.rows.each(has_unsampled, "completion_mask")[whole.heads])):
            pad([group], shape._replace(prompts=1))
    except ValueError as error:
        raise ValueError(f"{key} = {store!r}: {error}") from error
    check_logprobs(whole, config.algorithm.build(), rollout.sampling(), config.experience.missing_logprobs)
    logger.info("%s: %d groups of %d to %d rows to train on", store, len(whole), whole.sizes.min(), whole.sizes.max())
    digest, ranges = _summary(_worths(whole, 0.0 if config.experience.regrade else None))
    left = {"pending_groups": len(waiting), "pending_rows": int(pending.sum())}
    left |= {"rows_beside_pending": int(waiting.sizes.sum() - pending.sum())}
    if not config.experience.regrade:
        _warn_of_little_to_compare(store, whole.sizes, ranges, config)
    if any(left.values()):
        counts = ", ".join(f"{count} {name}" for name, count in left.items())
        logger.warning("%s: skipped, because their groups wait for rewards: %s", store, counts)
    return Stored(whole, shape, left, digest)


def with_rewards(stored: Stored, grades: Sequence[Grade], config: Config) -> Stored:
    """Replaces the grades of the stored completions and removes completions without a reward.

    Args:
        grades: grades of all completions in the store, in the order of the groups.
    Raises:
        ValueError: too few groups have a reward.
    """
    store = config.experience.store or config.experience.mix.store
    rewards = np.fromiter((np.nan if grade.reward is None else grade.reward for grade in grades), np.float64)
    rewarded = ~np.isnan(rewards)
    if without := len(rewards) - rewarded.sum():
        logger.warning("%s: skipped %d completions, to which the reward function gave no reward", store, without)
    sizes = np.add.reduceat(rewarded, stored.groups.index.starts[:-1], dtype=np.int64)
    groups = stored.groups.chosen(sizes > 0)
    if len(groups) < stored_per_batch(config):
        raise ValueError(
            f"experience.regrade: the reward function gave rewards to {len(groups)} groups of {store!r}, fewer than the"
            f" {stored_per_batch(config)} that each batch takes from the store; correct the reward function"
        )

    def graded(group: Group, first: int) -> Group:
        rows = [row._replace(grade=grades[first + place]) for place, row in enumerate(group.completions)]
        return group._replace(completions=tuple(row for row in rows if row.grade.reward is not None))

    given = zip(_worths(stored.groups), rewards.tolist(), rewarded.tolist(), strict=True)
    digest, ranges = _summary(worth._replace(reward=reward) for worth, reward, has_one in given if has_one)
    _warn_of_little_to_compare(store, sizes[sizes > 0], ranges, config)
    return stored._replace(groups=groups.changed(graded), digest=digest)


def _warn_of_little_to_compare(
    store: str, sizes: np.ndarray, ranges: dict[str, tuple[float, float]], config: Config
) -> None:
    """Warns if groups with one completion cannot train the policy, or if sources have different scales of rewards.

    Args:
        sizes: number of completions in each group.
        ranges: lowest and highest reward of each source.
    """
    joined = config.experience.mix and config.experience.mix.of == "group"
    alone = int((sizes == 1).sum())
    if alone and not joined and config.algorithm.ignores_singletons():
        logger.warning(
            "%s: %d of %d groups have a single completion, from which %s learns nothing; set"
            " algorithm.advantage={singleton: reward}, or another advantage such as raw_reward",
            store,
            alone,
            len(sizes),
            config.algorithm.preset,
        )
    lowest, highest = ([bounds[place] for bounds in ranges.values()] for place in (0, 1))
    spread = max(highest) - min(lowest)
    if len(ranges) > 1 and max(max(highest) - min(highest), max(lowest) - min(lowest)) > spread / 3:
        listed = ", ".join(f"{source} {low:g} to {high:g}" for source, (low, high) in ranges.items())
        logger.warning("%s: sources have different ranges of rewards, which recjax does not rescale: %s", store, listed)


def check_prompts(others: ByPrompt, store: str, prompts: Prompts) -> None:
    """Logs the number of training prompts with stored completions, which join the groups of their prompts.

    Raises:
        ValueError: no training prompt has stored completions.
    """
    asked = [tokens[mask].tobytes() for tokens, mask in zip(prompts.tokens, prompts.mask, strict=True)]
    shared = sum(tokens in others for tokens in asked)
    if not shared:
        raise ValueError(
            f"experience.mix.store = {store!r}: has no completions of the task's {len(asked)} training prompts, and"
            " only rows with the same prompt tokens join a group; add completions, or set experience.mix.of to batch"
        )
    logger.info("%s: has completions of %d of %d training prompts", store, shared, len(asked))


def with_chosen_logprobs(stored: Stored, config: Config, policy: Policy, params: dict) -> Stored:
    """Fills in log-probs of `params`, the initial parameters, if `experience.missing_logprobs` is `initial`."""
    if config.experience.missing_logprobs != "initial":
        return stored
    chunk = config.model.logprob_chunk
    sampling = config.rollout.sampling()
    return stored._replace(groups=with_initial_logprobs(stored.groups, stored.shape, policy, params, sampling, chunk))


def with_logprobs_of_now(
    groups: list[Group], shape: Shape, config: Config, policy: Policy, params: dict
) -> list[Group]:
    """Fills in log-probs of `params`, the current parameters, if `experience.missing_logprobs` is `current`."""
    if config.experience.missing_logprobs != "current":
        return groups
    return with_logprobs(groups, shape, policy, params, config.rollout.sampling(), config.model.logprob_chunk)


def as_trained(row: Completion, success: float, version: int | None) -> Completion:
    """Sets `accurate` and the policy version of a stored completion for the metrics of this run.

    Args:
        success: lowest reward of a right answer, for completions with neither `accurate` nor a part `accuracy`.
        version: policy version, counted in updates of this run; None: not known.
    """
    accurate = row.grade.accurate
    if accurate is None:
        # This rule also applies to rewards from this run.
        parts = row.grade.reward_parts or {}
        accurate = parts["accuracy"] >= 1 if "accuracy" in parts else row.grade.reward >= success
    runs = row.version_runs if version == row.policy_version else ()
    return row._replace(grade=row.grade._replace(accurate=accurate), policy_version=version, version_runs=runs)


class _Worth(NamedTuple):
    """The fields of a completion that the digest covers, and the completion's source."""

    id: str
    group_id: str
    source: str
    reward: float


def _worths(groups: StoredGroups, reward: float | None = None) -> Iterator[_Worth]:
    """Yields the fields of every completion, with its stored reward or with one reward for all completions."""
    for values in groups.columns(_Worth._fields):
        worth = _Worth(*values)
        yield worth if reward is None else worth._replace(reward=reward)


def _summary(worths: Iterable[_Worth]) -> tuple[str, dict[str, tuple[float, float]]]:
    """A digest of the completions, and the lowest and highest reward of each source."""
    digest, ranges, separator = hashlib.sha256(b"["), {}, ""
    for name, group, source, reward in worths:
        digest.update(f"{separator}{(name, group, reward)!r}".encode())
        separator = ", "
        low, high = ranges.get(source, (reward, reward))
        ranges[source] = min(low, reward), max(high, reward)
    digest.update(b"]")
    return digest.hexdigest()[:16], ranges
