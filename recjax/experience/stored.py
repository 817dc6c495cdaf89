"""Training from a store alone: what of it can be trained on, and the batch of each step."""

import hashlib
from typing import NamedTuple

from absl import logging

from recjax.algorithms import presets
from recjax.config import Config
from recjax.experience.groups import Group, is_whole
from recjax.experience.records import Batch
from recjax.experience.rows import Shape, batch_of_groups, shape_of
from recjax.experience.sources import check_logprobs, groups_at, load_groups, with_logprobs
from recjax.experience.store import Experience
from recjax.models.logprobs import Sampling
from recjax.models.policy import Policy


class Stored(NamedTuple):
    """Groups to train on and the shape of their batches; how much was left out, by what; a digest of what is here."""

    groups: list[Group]
    shape: Shape
    left_out: dict[str, int]
    digest: str


def load_stored(config: Config, policy: Policy) -> Stored:
    """The whole groups of `experience.store`, every one of them checked for what training reads.

    Raises:
        ValueError: no such store, rows that this policy or algorithm cannot be trained on, or too few whole groups.
    """
    store, rollout = config.experience.store, config.rollout
    try:
        everything = load_groups(store, policy)
        whole = [_as_trained(group, config.task.success) for group in everything if is_whole(group)]
        if not whole:
            raise ValueError(
                f"all {len(everything)} groups wait for rewards; python -m recjax.feedback gives them theirs"
            )
        if len(whole) < rollout.prompts_per_step:
            raise ValueError(
                f"there are {len(whole)} groups with all their rewards ({len(everything) - len(whole)} wait for some),"
                f" fewer than rollout.prompts_per_step = {rollout.prompts_per_step}; add some, or lower that"
            )
        shape = shape_of(whole, rollout.prompts_per_step)
        for group in whole:
            # A row that no batch can hold is found here and not at a later step.
            batch_of_groups([group], shape._replace(prompts=1))
    except ValueError as error:
        raise ValueError(f"experience.store = {store!r}: {error}") from error
    algorithm = presets.build_algorithm(config.algorithm.preset, config.algorithm.overrides())
    check_logprobs(whole, algorithm, _sampling(config), config.experience.missing_logprobs)
    stored = Stored(whole, shape, _left_out(everything), _digest(whole))
    sizes = [len(group.rows) for group in whole]
    logging.info(
        "%s: %d groups of %d to %d rows to train on; rollout.group_size = %d is not read",
        *(store, len(whole), min(sizes), max(sizes), rollout.group_size),
    )
    if any(stored.left_out.values()):
        counts = ", ".join(f"{count} {name}" for name, count in stored.left_out.items())
        logging.warning("%s: left out, as their groups wait for rewards: %s", store, counts)
    return stored


def with_chosen_logprobs(stored: Stored, config: Config, policy: Policy, params: dict) -> Stored:
    """The same with log-probs of `params`, all those of the initial policy, where `initial` asks for them."""
    if config.experience.missing_logprobs != "initial":
        return stored
    chunk = config.model.logprob_chunk
    filled = with_logprobs(stored.groups, stored.shape, policy, params, _sampling(config), chunk)
    return stored._replace(groups=filled)


def stored_batch(stored: Stored, config: Config, policy: Policy, params: dict, step: int) -> Batch:
    """The batch of a step, the same whenever it is asked for.

    Args:
        params: all parameters of the policy as it is now, whose log-probs `current` takes.
    """
    missing = config.experience.missing_logprobs
    groups = groups_at(stored.groups, config.rollout.prompts_per_step, step, config.seed)
    if missing == "current":
        groups = with_logprobs(groups, stored.shape, policy, params, _sampling(config), config.model.logprob_chunk)
    return batch_of_groups(groups, stored.shape, logprobs=missing != "unneeded")


def _sampling(config: Config) -> Sampling:
    return Sampling(config.rollout.temperature, config.rollout.top_k, config.rollout.top_p)


def _as_trained(group: Group, success: float) -> Group:
    return group._replace(rows=tuple(_row_as_trained(row, success) for row in group.rows))


def _row_as_trained(row: Experience, success: float) -> Experience:
    """The row with what the run's metrics read of it."""
    accurate = row.accurate
    if accurate is None:
        # As rewards are read that come from this run.
        parts = row.reward_parts or {}
        accurate = parts["accuracy"] >= 1 if "accuracy" in parts else row.reward >= success
    # Any other version counts the updates of another run, and no staleness comes of that.
    return row._replace(accurate=accurate, policy_version=0 if row.policy_version == 0 else None)


def _left_out(groups: list[Group]) -> dict[str, int]:
    pending = [group for group in groups if not is_whole(group)]
    rows = [row.reward is None for group in pending for row in group.rows]
    return {
        "pending_groups": len(pending),
        "pending_rows": sum(rows),
        "rows_beside_pending": len(rows) - sum(rows),
    }


def _digest(groups: list[Group]) -> str:
    """Of all that decides which rows are in which batch, and what they are worth."""
    rows = [(row.id, row.group_id, row.reward) for group in groups for row in group.rows]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
