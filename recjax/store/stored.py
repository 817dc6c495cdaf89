"""Loads a store for training: selects the usable groups and fills in missing log-probs."""

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from recjax.config import Config, TaskConfig
from recjax.errors import UserError
from recjax.experience.batch import Shape
from recjax.experience.group import Completion, Group
from recjax.experience.records import signed_hash
from recjax.hub.policy import Policy
from recjax.rewards.reward import LENGTH, MixedReward, Reward, is_accurate, part_weights
from recjax.store.missing_logprobs import check_logprobs, check_top_tokens
from recjax.store.stored_groups import StoredGroups, content_of, load_groups
from recjax.tasks.prompts import Prompts

logger = logging.getLogger(__name__)


class Stored(NamedTuple):
    """Groups to train on, the shape of their batches, counts of skipped items by reason, and a digest of the data."""

    groups: StoredGroups
    shape: Shape
    left_out: dict[str, int]
    digest: str


def load_stored(config: Config, policy: Policy) -> Stored:
    """Loads the groups of `experience.store` or `experience.mix.store` with all their rewards, and checks them.

    With `experience.regrade`, loads all groups, with reward 0 for every completion until `with_rewards` sets rewards.

    Raises:
        UserError: no such store, rows that this policy or algorithm cannot be trained on, or too few complete groups.
    """
    experience = config.experience
    assert experience is not None
    mix = experience.mix
    rollout = config.rollout
    key = "experience.store"
    store = experience.store
    if mix is not None:
        key = "experience.mix.store"
        store = mix.store
    assert store is not None

    def with_own_versions(group: Group, _: np.ndarray) -> Group:
        # Staleness counts this run's updates, and versions other than 0 count another run's updates. Rows of a mix get
        # no version at all, so that old rows do not make the run's own rows in the same groups stale.
        completions = []
        for completion in group.completions:
            is_initial = mix is None and completion.policy_version == 0
            completions.append(as_trained(completion, config.task, 0 if is_initial else None))
        return group._replace(completions=tuple(completions))

    try:
        all_groups = load_groups(store, policy)
        if experience.regrade:
            all_groups = all_groups.graded(None)
        pending = all_groups.sizes - all_groups.rewarded
        waiting = all_groups.chosen(pending > 0)
        complete = all_groups.chosen(pending == 0)
        if not len(complete):
            raise UserError(
                problem=f"all {len(all_groups)} groups wait for rewards",
                remedy="add rewards with python -m recjax.feedback",
            )
        if len(complete) < config.stored_groups:
            raise UserError(
                problem=(
                    f"{len(complete)} groups have all their rewards ({len(waiting)} wait for some), fewer than the"
                    f" {config.stored_groups} that each batch takes from the store"
                ),
                remedy=f"add groups, or lower rollout.prompts_per_step = {rollout.prompts_per_step}",
            )
        complete = complete.changed(with_own_versions)
        columns = complete.table[complete.places]
        longest_prompt = int(columns["prompt_length"].max())
        longest_completion = int(columns["completion_length"].max())
        shape = Shape(rollout.prompts_per_step, int(complete.sizes.max()), longest_prompt, longest_completion)
        if columns["trajectories"].any():
            # A row may be nearly all prompt or nearly all completion.
            longest = int(columns["row_length"].max()) - 1
            shape = Shape(shape.rows, None, longest, longest)
            problem = config.algorithm.problem_with_trajectories()
            if problem:
                preset = config.algorithm.preset
                raise UserError(problem=f"has trajectories, and algorithm.preset = {preset!r} {problem}")
    except UserError as error:
        raise UserError(key, str(error), value=store) from error
    algorithm = config.algorithm.build()
    check_logprobs(complete, algorithm, rollout.sampling(), experience.missing_logprobs)
    if algorithm.score_centering and not mix:
        check_top_tokens(complete)
    sizes = complete.sizes
    logger.info("%s: %d groups of %d to %d rows to train on", store, len(complete), sizes.min(), sizes.max())
    pending_rows = int(pending.sum())
    skipped = {
        "pending_groups": len(waiting),
        "pending_rows": pending_rows,
        "rows_beside_pending": int(waiting.sizes.sum()) - pending_rows,
    }
    if not experience.regrade:
        _warn_of_little_to_compare(store, complete, config)
        lacking = 0
        if algorithm.reads("reward_parts"):
            lacking = complete.store.rewards_without_parts()
        if lacking:
            raise UserError(
                key,
                f"{lacking} completions have a reward without reward_parts, from which algorithm.preset ="
                f" {config.algorithm.preset!r}, which reads only parts, would learn nothing",
                "give them parts, set experience.regrade, or use another algorithm.advantage",
                value=store,
            )
    if any(skipped.values()):
        counts = ", ".join(f"{count} {name}" for name, count in skipped.items())
        logger.warning("%s: skipped, because their groups wait for rewards: %s", store, counts)
    return Stored(complete, shape, skipped, _digest(complete))


def with_rewards(stored: Stored, grader: str, config: Config) -> Stored:
    """Replaces the rewards by those of a grader, and removes completions without a reward.

    Raises:
        UserError: too few groups have a reward.
    """
    experience = config.experience
    assert experience is not None
    store = experience.store if experience.mix is None else experience.mix.store
    assert store is not None
    groups = stored.groups.graded(grader)
    without = int(stored.groups.sizes.sum() - groups.sizes.sum())
    if without:
        logger.warning("%s: skipped %d completions, to which the reward function gave no reward", store, without)
    if len(groups) < config.stored_groups:
        raise UserError(
            "experience.regrade",
            f"the reward function gave rewards to {len(groups)} groups of {store!r}, fewer than the"
            f" {config.stored_groups} that each batch takes from the store",
            "correct the reward function",
        )
    _warn_of_little_to_compare(store, groups, config)
    return stored._replace(groups=groups, digest=_digest(groups))


def _digest(groups: StoredGroups) -> str:
    """A digest of the groups: of their first completions and sizes, and of the range and the sum of their rewards."""
    digest = hashlib.sha256(groups.store.id.encode())
    for name in ("first", "size"):
        digest.update(groups.table[name][groups.places].tobytes())
    if groups.rewards is not None:
        digest.update(groups.rewards[groups.places].tobytes())
    return digest.hexdigest()[:16]


def _warn_of_little_to_compare(store: str, groups: StoredGroups, config: Config) -> None:
    """Warns if groups with one completion cannot train the policy, or if sources have different scales of rewards."""
    sizes = groups.sizes
    ranges = groups.store.reward_ranges(groups.grader)
    mix = config.experience.mix if config.experience else None
    joins_groups = mix is not None and mix.of == "group"
    singletons = int((sizes == 1).sum())
    if singletons and not joins_groups and config.algorithm.ignores_singletons():
        logger.warning(
            "%s: %d of %d groups have a single completion, from which %s learns nothing; set"
            " algorithm.advantage={singleton: reward}, or another advantage such as raw_reward",
            store,
            singletons,
            len(sizes),
            config.algorithm.preset,
        )
    if len(ranges) < 2:
        return
    lowest = [low for low, _ in ranges.values()]
    highest = [high for _, high in ranges.values()]
    spread = max(highest) - min(lowest)
    largest_difference = max(max(highest) - min(highest), max(lowest) - min(lowest))
    if largest_difference > spread / 3:
        listed = ", ".join(f"{source} {low:g} to {high:g}" for source, (low, high) in ranges.items())
        logger.warning("%s: sources have different ranges of rewards, which recjax does not rescale: %s", store, listed)


def warn_of_other_weights(groups: Sequence[Group], task: TaskConfig, reward: Reward | MixedReward) -> None:
    """Warns if a recorded reward is not the sum of its parts with the weights of this run, which do not change it."""
    for completion in groups[0].completions:
        grade = completion.known_grade
        parts = grade.reward_parts or {}
        name = completion.metadata.get("task")
        task_reward = reward.rewards.get(str(name)) if isinstance(reward, MixedReward) else reward
        # Other programs' parts need not be complete, and failed completions have a reward of their own.
        if task_reward is None or LENGTH not in parts or grade.failure not in (None, "none"):
            continue
        assert grade.reward is not None
        # The parts are from the task's reward function or from an agent.
        task_total = _weighted_sum(parts, task_reward.weights)
        agent_total = _weighted_sum(parts, part_weights(task.of(name).reward_weights))
        if _differ(grade.reward, task_total) and _differ(grade.reward, agent_total):
            logger.warning(
                "completion %r has the reward %g, and its parts have the sum %g with this run's task.reward_weights,"
                " which do not change stored rewards; set experience.regrade to compute them again",
                completion.id,
                grade.reward,
                task_total,
            )
            return


def _weighted_sum(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return sum(weights.get(name, 1.0) * value for name, value in parts.items())


def _differ(recorded: float, total: float) -> bool:
    """True if rounding does not explain the difference of a recorded reward and a sum of parts."""
    return abs(total - recorded) > 1e-4 * max(1.0, abs(total))


def check_prompts(groups: StoredGroups, by_problem: bool, store: str, prompts: Prompts, seats: Collection[str]) -> None:
    """Logs the number of training prompts with stored completions, which join the groups of their prompts and seats.

    Args:
        by_problem: see `stored_groups.content_of`.
        seats: `TaskConfig.trained_seats`.
    Raises:
        UserError: no training prompt has stored completions, or none of them is of these seats.
    """
    task_contents = []
    for tokens, mask, problem in zip(prompts.tokens, prompts.mask, prompts.problems, strict=True):
        group = Group("", tokens[mask], (), problem.prompt, problem.answer)
        task_contents.append(signed_hash(content_of(group, by_problem)))
    contents = groups.contents(by_problem)
    shared = int(np.isin(task_contents, contents).sum())
    if not shared:
        raise UserError(
            "experience.mix.store",
            f"has no completions of the task's {len(task_contents)} training prompts, and only rows with the same"
            " prompt tokens join a group",
            "add completions, or set experience.mix.of to batch",
            value=store,
        )
    same_prompts = groups.chosen(np.isin(contents, task_contents))
    if not any((group.seat or "") in seats for group in same_prompts):
        wanted = f"of the seats {', '.join(seats)}" if any(seats) else "without a seat"
        raise UserError(
            "experience.mix.store",
            f"has no completions {wanted}, and completions join only groups of their own seat",
            "add completions, or set experience.mix.of to batch",
            value=store,
        )
    logger.info("%s: has completions of %d of %d training prompts", store, shared, len(task_contents))


def as_trained(row: Completion, task: TaskConfig, version: int | None) -> Completion:
    """Sets `accurate` and the policy version of a stored completion for the metrics of this run.

    Args:
        task: config with `success` and `verdict`, for completions whose grade does not say whether they are accurate.
        version: policy version, counted in updates of this run; None: not known.
    """
    grade = row.known_grade
    accurate = grade.accurate
    if accurate is None:
        own_task = task.of(row.metadata.get("task"))
        accurate = is_accurate(grade.reward_parts or {}, grade.reward, own_task.success, own_task.verdict)
        assert not isinstance(accurate, np.ndarray)
    runs = ()
    if version == row.policy_version:
        runs = row.version_runs
    return row._replace(grade=grade._replace(accurate=accurate), policy_version=version, version_runs=runs)
