"""A store that is trained from: what of it can be used, and the log-probs that it lacks."""

import hashlib
import logging
from collections.abc import Mapping
from typing import NamedTuple

from recjax.config import Config, MixConfig
from recjax.experience.batch import Shape, pad, shape_of
from recjax.experience.group import Completion, Grade, Group, is_whole
from recjax.experience.sources import by_prompt, check_logprobs, load_groups, with_logprobs
from recjax.hub.policy import Policy
from recjax.tasks.prompts import Prompts

logger = logging.getLogger(__name__)


class Stored(NamedTuple):
    """Groups to train on and the shape of their batches; how much was left out, by what; a digest of what is here."""

    groups: list[Group]
    shape: Shape
    left_out: dict[str, int]
    digest: str


def stored_per_batch(config: Config) -> int:
    """How many groups of a batch come whole from a store."""
    experience, count = config.experience, config.rollout.prompts_per_step
    if experience and experience.store and not experience.follow:
        return count
    mix = experience and experience.mix
    return round(mix.share * count) if mix and mix.of == "batch" else 0


def load_stored(config: Config, policy: Policy) -> Stored:
    """The whole groups of `experience.store` or of `experience.mix.store`, checked for what training reads.

    With `experience.regrade` all groups, each completion with reward 0 until `with_rewards` gives it its own.

    Raises:
        ValueError: no such store, rows that this policy or algorithm cannot be trained on, or too few whole groups.
    """
    mix, rollout = config.experience.mix, config.rollout
    key, store = ("experience.mix.store", mix.store) if mix else ("experience.store", config.experience.store)
    try:
        everything = load_groups(store, policy)
        if config.experience.regrade:
            everything = list(map(_with_no_reward, everything))
        whole = [_as_trained(group, config.task.success) for group in everything if is_whole(group)]
        if not whole:
            raise ValueError(
                f"all {len(everything)} groups wait for rewards; python -m recjax.feedback gives them theirs"
            )
        if len(whole) < stored_per_batch(config):
            raise ValueError(
                f"there are {len(whole)} groups with all their rewards ({len(everything) - len(whole)} wait for some),"
                f" fewer than the {stored_per_batch(config)} that each batch takes from here, with"
                f" rollout.prompts_per_step = {rollout.prompts_per_step}; add some, or lower that"
            )
        shape = shape_of(whole, rollout.prompts_per_step)
        for group in whole:
            # A row that no batch can hold is found here and not at a later step.
            pad([group], shape._replace(prompts=1))
    except ValueError as error:
        raise ValueError(f"{key} = {store!r}: {error}") from error
    missing = config.experience.missing_logprobs
    check_logprobs(whole, config.algorithm.build(), config.rollout.sampling(), missing)
    sizes = [len(group.completions) for group in whole]
    logger.info("%s: %d groups of %d to %d rows to train on", store, len(whole), min(sizes), max(sizes))
    stored = Stored(whole, shape, _left_out(everything), _digest(whole))
    if not config.experience.regrade:
        _warn_of_little_to_compare(store, whole, config)
    if any(stored.left_out.values()):
        counts = ", ".join(f"{count} {name}" for name, count in stored.left_out.items())
        logger.warning("%s: left out, as their groups wait for rewards: %s", store, counts)
    return stored


def with_rewards(stored: Stored, grades: Mapping[str, Grade], config: Config) -> Stored:
    """The same with other grades, by completion id; completions that got no reward are left out.

    Raises:
        ValueError: too few groups have a reward.
    """
    groups, without = [], 0
    for group in stored.groups:
        rows = [row._replace(grade=grades[row.id]) for row in group.completions]
        rewarded = tuple(row for row in rows if row.grade.reward is not None)
        without += len(rows) - len(rewarded)
        groups += [group._replace(completions=rewarded)] if rewarded else []
    store = config.experience.store or config.experience.mix.store
    if without:
        logger.warning("%s: the reward function gave none to %d completions, which are left out", store, without)
    if len(groups) < stored_per_batch(config):
        raise ValueError(
            f"experience.regrade: {len(groups)} groups of {store!r} got rewards, fewer than the"
            f" {stored_per_batch(config)} that each batch takes from there; see the reward function"
        )
    _warn_of_little_to_compare(store, groups, config)
    return stored._replace(groups=groups, digest=_digest(groups))


def _warn_of_little_to_compare(store: str, groups: list[Group], config: Config) -> None:
    """Says where groups of one teach nothing, and where sources were rewarded on different scales."""
    joined = config.experience.mix and config.experience.mix.of == "group"
    alone = sum(len(group.completions) == 1 for group in groups)
    if alone and not joined and config.algorithm.ignores_singletons():
        logger.warning(
            "%s: %d of %d groups have one completion, and %s makes nothing of them; set"
            " algorithm.advantage={singleton: reward}, or another advantage such as raw_reward",
            store,
            alone,
            len(groups),
            config.algorithm.preset,
        )
    ranges = reward_ranges(groups)
    lowest, highest = ([bounds[place] for bounds in ranges.values()] for place in (0, 1))
    spread = max(highest) - min(lowest)
    if len(ranges) > 1 and max(max(highest) - min(highest), max(lowest) - min(lowest)) > spread / 3:
        listed = ", ".join(f"{source} {low:g} to {high:g}" for source, (low, high) in ranges.items())
        logger.warning(
            "%s: sources have rewards of different ranges, which are compared as they are: %s", store, listed
        )


def reward_ranges(groups: list[Group]) -> dict[str, tuple[float, float]]:
    """The lowest and the highest reward of each source."""
    found: dict[str, list[float]] = {}
    for row in (row for group in groups for row in group.completions):
        found.setdefault(row.source, []).append(row.grade.reward)
    return {source: (min(rewards), max(rewards)) for source, rewards in found.items()}


def check_prompts(stored: Stored, mix: MixConfig, prompts: Prompts) -> None:
    """Logs how many of the training prompts have others' completions to join their groups.

    Raises:
        ValueError: none has.
    """
    known = by_prompt(stored.groups)
    asked = [tokens[mask].tobytes() for tokens, mask in zip(prompts.tokens, prompts.mask, strict=True)]
    shared = sum(tokens in known for tokens in asked)
    if not shared:
        raise ValueError(
            f"experience.mix.store = {mix.store!r} answers none of the task's {len(asked)} training prompts, and only"
            " rows with the same prompt tokens join a group; bring answers to these, or set experience.mix.of to batch"
        )
    logger.info("%s: answers %d of %d training prompts", mix.store, shared, len(asked))


def with_chosen_logprobs(stored: Stored, config: Config, policy: Policy, params: dict) -> Stored:
    """The same with log-probs of `params`, all those of the initial policy, where `initial` asks for them."""
    if config.experience.missing_logprobs != "initial":
        return stored
    chunk = config.model.logprob_chunk
    filled = with_logprobs(stored.groups, stored.shape, policy, params, config.rollout.sampling(), chunk)
    return stored._replace(groups=filled)


def with_logprobs_of_now(
    groups: list[Group], shape: Shape, config: Config, policy: Policy, params: dict
) -> list[Group]:
    """The same with log-probs of `params`, all those of the policy as it is now, where `current` asks for them."""
    if config.experience.missing_logprobs != "current":
        return groups
    return with_logprobs(groups, shape, policy, params, config.rollout.sampling(), config.model.logprob_chunk)


def _with_no_reward(group: Group) -> Group:
    return group._replace(completions=tuple(row._replace(grade=Grade(0.0)) for row in group.completions))


def _as_trained(group: Group, success: float) -> Group:
    # Any other version counts the updates of another run, and no staleness comes of that.
    versions = [0 if row.policy_version == 0 else None for row in group.completions]
    rows = map(as_trained, group.completions, [success] * len(versions), versions)
    return group._replace(completions=tuple(rows))


def as_trained(row: Completion, success: float, version: int | None) -> Completion:
    """The completion with what the run's metrics read of it.

    Args:
        success: the least reward of a right answer, where nothing else says that it is.
        version: of the policy, in this run's updates.
    """
    accurate = row.grade.accurate
    if accurate is None:
        # As rewards are read that come from this run.
        parts = row.grade.reward_parts or {}
        accurate = parts["accuracy"] >= 1 if "accuracy" in parts else row.grade.reward >= success
    runs = row.version_runs if version == row.policy_version else ()
    return row._replace(grade=row.grade._replace(accurate=accurate), policy_version=version, version_runs=runs)


def _left_out(groups: list[Group]) -> dict[str, int]:
    pending = [group for group in groups if not is_whole(group)]
    rows = [row.grade is None for group in pending for row in group.completions]
    return {
        "pending_groups": len(pending),
        "pending_rows": sum(rows),
        "rows_beside_pending": len(rows) - sum(rows),
    }


def _digest(groups: list[Group]) -> str:
    """Of all that decides which rows are in which batch, and what they are worth."""
    rows = [(row.id, group.id, row.grade.reward) for group in groups for row in group.completions]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
