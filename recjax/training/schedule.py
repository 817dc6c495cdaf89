"""Which policy version draws the batch of each step. Steps count from 1; a version counts optimiser updates."""

from recjax.config import RegimeConfig


def is_sync(step: int, regime: RegimeConfig) -> bool:
    """Whether the sampler takes the current weights before anything is drawn at `step`."""
    return not regime.offline and (step - 1) % regime.sync_interval == 0


def batches_to_draw(step: int, queued: int, steps: int, regime: RegimeConfig) -> range:
    """Numbers of the batches drawn at `step`, before it trains on batch number `step`.

    The queue stays `sync_offset` batches ahead. Where the next step would draw from the same weights, its batch is
    drawn now as well, so that the grading of this step's goes on meanwhile; no batch changes by that.

    Args:
        queued: batches drawn and not yet trained on.
        steps: the run's last step.
    """
    early = step < steps and not is_sync(step + 1, regime)
    return range(step + queued, step + regime.sync_offset + early + 1)


def expected_staleness(step: int, regime: RegimeConfig) -> int:
    """Optimiser steps between the weights that drew step `step`'s batch and the weights that train on it.

    n + ((step − 1 − n) mod m) once step > n, with m = sync_interval and n = sync_offset; the first n + 1 batches and
    all offline ones come from the initial policy.

    Reference: arXiv 2509.24203 §4 (sync_interval, sync_offset).
    """
    if regime.offline or step <= regime.sync_offset:
        return step - 1
    return regime.sync_offset + (step - 1 - regime.sync_offset) % regime.sync_interval
