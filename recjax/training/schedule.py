"""Which policy version samples the batch of each step. Steps count from 1; a version counts optimizer updates."""

from collections.abc import Sequence

from recjax.config import RegimeConfig


def is_sync(step: int, regime: RegimeConfig) -> bool:
    """Whether the sampler takes the current weights before anything is sampled at `step`."""
    return not regime.offline and (step - 1) % regime.sync_interval == 0


def outlives_updates(regime: RegimeConfig) -> bool:
    """Whether the sampler keeps its weights over some update, so that it needs a copy of its own."""
    return regime.offline or regime.sync_interval > 1


def samples_ahead(step: int, steps: int, regime: RegimeConfig) -> bool:
    """Whether the next round's batch can be sampled at `step`, so that this one's is graded meanwhile.

    It can where the next step would sample it from the same weights; no batch changes by that.

    Args:
        steps: the run's last step.
    """
    return step < steps and not is_sync(step + 1, regime)


def expected_staleness(step: int, regime: RegimeConfig) -> int:
    """Optimizer steps between the weights that sampled step `step`'s batch and the weights that train on it.

    n + ((step − 1 − n) mod m) once step > n, with m = sync_interval and n = sync_offset; the first n + 1 batches and
    all offline ones come from the initial policy.

    Reference: arXiv 2509.24203 §4 (sync_interval, sync_offset).
    """
    if regime.offline or step <= regime.sync_offset:
        return step - 1
    return regime.sync_offset + (step - 1 - regime.sync_offset) % regime.sync_interval


def is_wanted(number: int, round_: int, every: int, version: int, step: int, regime: RegimeConfig) -> bool:
    """Whether it is time for batch `number`, of those that asynchronous generators sample.

    A synchronous run samples it in round (number − 1) · every + 1. Here it comes earlier by the steps that it may wait
    for its turn.

    Args:
        round_: of the feed, from 1.
        every: rounds from one batch to the next.
        version: of the weights that would sample it.
    """
    return (number - 1) * every < round_ + regime.max_staleness - (step - 1 - version)


def in_time(versions: Sequence[int], step: int, groups: int, regime: RegimeConfig) -> bool:
    """Whether groups of these versions all get their turn within `regime.max_staleness`.

    From `step` on each step trains on `groups` of them, those of the oldest version first.
    """
    turns = enumerate(sorted(versions))
    return all(step - 1 + place // groups - version <= regime.max_staleness for place, version in turns)
