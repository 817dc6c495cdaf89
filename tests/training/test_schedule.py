"""The regimes: staleness against the paper's formula and against the rounds of a run."""

import pytest

from recjax.config import RegimeConfig
from recjax.training.schedule import expected_staleness, is_sync
from tests.marks import slow_except
from tests.training.simulated_run import simulated

OFFLINE = RegimeConfig(offline=True)
REGIMES = {(m, n): RegimeConfig(sync_interval=m, sync_offset=n) for m in (1, 3, 20) for n in (0, 1, 10)}


@pytest.mark.parametrize("regime", slow_except([*REGIMES.values(), OFFLINE], REGIMES[1, 0], REGIMES[3, 10], OFFLINE))
def test_batches_are_sampled_once_with_expected_staleness(tiny, regime):
    interval, offset = regime.sync_interval, regime.sync_offset
    names = [f"regime.sync_interval={interval}", f"regime.sync_offset={offset}", f"regime.offline={regime.offline}"]
    trained, sampled = [], []
    for step, groups, _, numbers in simulated(tiny("run", "training.steps=69", *names)):
        sampled += numbers
        early = step < 69 and not is_sync(step + 1, regime)
        assert len(sampled) == step + offset + early
        assert [group.id for group in groups] == [f"{step:06d}/{place:05d}" for place in range(4)]
        for group in groups:
            assert step - 1 - group.completions[0].policy_version == expected_staleness(step, regime)
        trained.append(step)
    assert trained == list(range(1, 70)) and sampled == list(range(1, 70 + offset))


@pytest.mark.parametrize(
    ("interval", "offset", "low", "high"), [(1, 0, 0, 0), (20, 0, 0, 19), (1, 10, 10, 10), (20, 10, 10, 29)]
)
def test_ranges_of_the_paper(interval, offset, low, high):
    regime = RegimeConfig(sync_interval=interval, sync_offset=offset)
    staleness = [expected_staleness(step, regime) for step in range(offset + 1, 200)]
    assert (min(staleness), max(staleness)) == (low, high)
    assert staleness[:3] == [offset + (i % interval) for i in range(3)]


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("offset", [0, 2])
def test_several_updates_age_their_batch_one_by_one(tiny, interval, offset):
    """The sampler's version by a loop over steps: it takes the weights before a batch, every `interval` batches."""
    names = [f"regime.sync_interval={interval}", f"regime.sync_offset={offset}", "training.updates_per_batch=4"]
    config = tiny("run", "training.steps=47", *names)
    versions, version, batches = [0] * offset, 0, []
    for step in range(1, 48):
        if (step - 1) % 4 == 0:
            batches.append(step)
            version = step - 1 if (len(batches) - 1) % interval == 0 else version
            versions.append(version)
        expected = step - 1 - versions[len(batches) - 1]
        assert expected_staleness(step, config.regime, 4) == expected
    sampled = []
    for number, (_, groups, _, numbers) in enumerate(simulated(config)):
        sampled += numbers
        assert {one.policy_version for group in groups for one in group.completions} == {versions[number]}
        assert groups[0].id == f"{number + 1:06d}/00000"
    assert sampled == list(range(1, 13 + offset))


def test_offline_batches_age_with_every_step():
    assert [expected_staleness(step, RegimeConfig(offline=True)) for step in (1, 2, 50)] == [0, 1, 49]
