"""The policy version that samples the batch of each step. Steps count from 1; a version counts optimizer updates."""

from collections.abc import Sequence

from recjax.config import RegimeConfig


def is_sync(step: int, regime: RegimeConfig) -> bool:
    """True if the sampler takes the current weights before it samples at `step`."""
    return not regime.offline and (step - 1) % regime.sync_interval == 0


def outlives_updates(regime: RegimeConfig) -> bool:
    """True if the sampler keeps its weights across some update, so that it needs its own copy."""
    return regime.offline or regime.sync_interval > 1


def samples_ahead(step: int, steps: int, regime: RegimeConfig) -> bool:
    """True if the next round's batch can be sampled at `step`, while this round's batch is graded.

    This requires that the next step would sample from the same weights, so no batch changes.

    Args:
        steps: last step of the run.
    """
    return step < steps and not is_sync(step + 1, regime)


def expected_staleness(step: int, regime: RegimeConfig) -> int:
    """Optimizer steps between the weights that sampled the batch of `step` and the weights that train on it.

    For step > n it is n + ((step − 1 − n) mod m), with m = sync_interval and n = sync_offset. The initial policy
    samples the first n + 1 batches, and all batches of offline runs.

    Reference: arXiv 2509.24203 §4 (sync_interval, sync_offset).
    """
    if regime.offline or step <= regime.sync_offset:
        return step - 1
    return regime.sync_offset + (step - 1 - regime.sync_offset) % regime.sync_interval


def is_wanted(number: int, round_: int, every: int, version: int, step: int, regime: RegimeConfig) -> bool:
    """True if asynchronous generators should sample batch `number` now.

    A synchronous run samples the batch in round (number − 1) · every + 1. Generators sample it earlier, by the number
    of steps that the batch may wait for its turn.

    Args:
        round_: number of the sampling round, from 1.
        every: number of rounds from one batch to the next.
        version: version of the weights that would sample the batch.
    """
    return (number - 1) * every < round_ + regime.max_staleness - (step - 1 - version)


def in_time(versions: Sequence[int], step: int, groups: int, regime: RegimeConfig) -> bool:
    """True if groups of the given policy versions are all trained on within `regime.max_staleness`.

    From `step` on, each step trains on `groups` of the groups, oldest version first.
    """
    turns = enumerate(sorted(versions))
    return all(step - 1 + place // groups - version <= regime.max_staleness for place, version in turns)
