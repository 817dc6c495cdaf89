"""The regimes: staleness against the paper's formula and against a simulation."""

import pytest

from recjax.config import RegimeConfig
from recjax.training.schedule import batches_to_draw, expected_staleness, is_sync

REGIMES = [RegimeConfig(m, n) for m in (1, 3, 20) for n in (0, 1, 10)] + [RegimeConfig(offline=True)]


@pytest.mark.parametrize("regime", REGIMES)
def test_every_batch_is_drawn_once_in_order_with_the_expected_staleness(regime):
    version, queue, numbers = 0, [], []
    for step in range(1, 70):
        if is_sync(step, regime):
            version = step - 1
        queue += [(number, version) for number in batches_to_draw(step, len(queue), 69, regime)]
        number, drew = queue.pop(0)
        numbers.append(number)
        early = step < 69 and not is_sync(step + 1, regime)
        assert len(queue) == regime.sync_offset + early
        assert step - 1 - drew == expected_staleness(step, regime)
    assert numbers == list(range(1, 70))


@pytest.mark.parametrize(
    ("interval", "offset", "low", "high"), [(1, 0, 0, 0), (20, 0, 0, 19), (1, 10, 10, 10), (20, 10, 10, 29)]
)
def test_ranges_of_the_paper(interval, offset, low, high):
    regime = RegimeConfig(interval, offset)
    staleness = [expected_staleness(step, regime) for step in range(offset + 1, 200)]
    assert (min(staleness), max(staleness)) == (low, high)
    assert staleness[:3] == [offset + (i % interval) for i in range(3)]


def test_offline_batches_age_with_every_step():
    assert [expected_staleness(step, RegimeConfig(offline=True)) for step in (1, 2, 50)] == [0, 1, 49]
