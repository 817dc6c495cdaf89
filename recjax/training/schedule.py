"""The policy version that samples the batch of each step. Steps and batches count from 1.

A version counts optimizer steps. The run makes `training.updates` steps on each batch, here `updates`, and only between
two batches can the sampler get new weights.
"""

from collections.abc import Sequence

from recjax.config import Config, RegimeConfig


def batch_of(step: int, updates: int) -> int:
    """The number of the batch that a step trains on."""
    return (step - 1) // updates + 1


def starts_batch(step: int, updates: int) -> bool:
    """True if a step makes the first update of a batch."""
    return (step - 1) % updates == 0


def evaluates(step: int, config: Config) -> bool:
    """True if the policy is evaluated after a step."""
    every = config.evaluation.every
    return step == config.training.steps or bool(every and step % every == 0)


def saves(step: int, config: Config) -> bool:
    """True if the run writes a checkpoint after a step; `keep_best` needs one at every evaluation."""
    is_due = step == config.training.steps or step % config.training.checkpoint_every == 0
    return is_due or (config.training.keep_best is not None and evaluates(step, config))


def is_sync(batch: int, regime: RegimeConfig) -> bool:
    """True if the sampler takes the current weights before it samples in the round of `batch`."""
    return not regime.offline and (batch - 1) % regime.sync_interval == 0


def outlives_updates(regime: RegimeConfig) -> bool:
    """True if the sampler keeps its weights from one batch to another, so that it needs its own copy."""
    return regime.offline or regime.sync_interval > 1


def samples_ahead(batch: int, batches: int, regime: RegimeConfig) -> bool:
    """True if the next round's batch can be sampled in the round of `batch`, while this round's batch is graded.

    This requires that the next round would sample from the same weights, so no batch changes.

    Args:
        batches: number of batches in the run.
    """
    return batch < batches and not is_sync(batch + 1, regime)


def expected_staleness(step: int, regime: RegimeConfig, updates: int = 1) -> int:
    """Optimizer steps between the weights that sampled the batch of `step` and the weights that train on it.

    For batch b > n it is u·(n + ((b − 1 − n) mod m)) + k, with m = sync_interval, n = sync_offset, u updates of each
    batch and k previous updates of this batch. The initial policy samples the first n + 1 batches, and all batches of
    offline runs.

    Reference: arXiv 2509.24203 §4 (sync_interval, sync_offset).
    """
    before, update = divmod(step - 1, updates)
    if regime.offline or before < regime.sync_offset:
        return step - 1
    return (regime.sync_offset + (before - regime.sync_offset) % regime.sync_interval) * updates + update


def is_wanted(
    number: int, round_: int, every: int, version: int, step: int, regime: RegimeConfig, updates: int = 1
) -> bool:
    """True if asynchronous generators should sample batch `number` now.

    A synchronous run samples the batch in round (number − 1) · every + 1. Generators sample it earlier, by the number
    of rounds that the batch may wait for its turn.

    Args:
        round_: number of the sampling round, from 1.
        every: number of rounds from one batch to the next.
        version: version of the weights that would sample the batch.
        step: first step of a batch.
    """
    limit = regime.max_staleness
    assert limit is not None
    if regime.max_mean_staleness is not None:  # batches that are sampled too early would lose their oldest groups
        limit = min(limit, int(regime.max_mean_staleness))
    steps = limit - (step - 1 - version) - (updates - 1)
    return (number - 1) * every < round_ + steps // updates


def in_time(versions: Sequence[int], step: int, groups: int, regime: RegimeConfig, updates: int = 1) -> bool:
    """True if groups of the given policy versions are all trained on within `regime.max_staleness`.

    From `step` on, each batch has `groups` of the groups, oldest version first.

    Args:
        step: first step of a batch, whose last step decides.
    """
    last = step - 1 + updates - 1
    turns = enumerate(sorted(versions))
    most = regime.max_staleness
    assert most is not None
    return all(last + position // groups * updates - version <= most for position, version in turns)
