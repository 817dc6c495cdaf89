"""Numbers of runs, differences between them, and their intervals."""

import itertools

import numpy as np
import pandas as pd
import pytest

from experiments.claims.verdicts import fallen, mean_over_steps, paired_difference
from recjax.analysis.collect import COLUMNS
from recjax.analysis.compare import estimate, final

CURVES = {  # held-out accuracy at steps 0, 10, …, 40
    ("a", "on", "0"): [0.4, 0.5, 0.6, 0.9, 0.6],
    ("a", "on", "1"): [0.4, 0.6, 0.6, 0.6, 0.9],
    ("a", "off", "0"): [0.4, 0.1, 0.1, 0.1, 0.1],
    ("b", "on", "0"): [0.4, 0.4, 0.4, 0.4, 0.4],
    ("b", "on", "1"): [0.4, 0.5, 0.5, 0.5, 0.5],
    ("b", "off", "0"): [0.4, 0.3, 0.3, 0.3, 0.3],
}


@pytest.fixture
def table():
    rows = []
    for (algorithm, regime, seed), values in CURVES.items():
        for step in range(0, 41, 5):
            settings = {"algorithm": algorithm, "regime": regime, "seed": seed, "step": step}
            accuracy = values[step // 10] if step % 10 == 0 else np.nan
            rows.append(settings | dict.fromkeys(COLUMNS, 0.0) | {"evaluation/accuracy": accuracy})
    return pd.DataFrame(rows).sample(frac=1.0, random_state=0)  # their order is nothing to rely on


def test_the_end_the_whole_and_the_fall_of_each_run(table):
    for settings, values in CURVES.items():
        assert final(table)[settings] == pytest.approx(np.mean(values[-3:]))
        assert mean_over_steps(table)[settings] == pytest.approx(np.mean(values[1:]))
        assert fallen(table)[settings] == pytest.approx(max(values) - values[-1])


def test_differences_are_paired_by_all_other_settings(table):
    found = paired_difference(final(table), "algorithm", "a", "b")
    pairs = [
        np.mean(CURVES["a", *rest][-3:]) - np.mean(CURVES["b", *rest][-3:])
        for rest in [("on", "0"), ("on", "1"), ("off", "0")]
    ]
    assert found.mean == pytest.approx(np.mean(pairs)) and found.count == 3
    on = paired_difference(final(table), "algorithm", "a", "b", regime=["on"])
    assert on.mean == pytest.approx(np.mean(pairs[:2])) and on.count == 2
    back = paired_difference(final(table), "algorithm", "b", "a", regime=["on"])
    assert back.mean == pytest.approx(-on.mean) and back.low == pytest.approx(-on.high, abs=1e-6)
    with pytest.raises(ValueError, match="1 runs or pairs"):
        paired_difference(final(table), "algorithm", "a", "b", regime=["off"])


def test_the_interval_is_that_of_every_resample():
    values = np.array([0.1, 0.4, 0.2])
    means = sorted(np.mean(values[list(places)]) for places in itertools.product(range(3), repeat=3))
    found = estimate(values)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(np.quantile(means, 0.025, method="lower"), abs=1e-6)
    assert found.high == pytest.approx(np.quantile(means, 0.975, method="higher"), abs=1e-6)
    assert estimate(np.array([0.3, 0.3])) == (0.3, 0.3, 0.3, 2)


def test_the_interval_covers_the_mean_as_often_as_it_says():
    generator = np.random.default_rng(0)
    found = [estimate(generator.normal(size=40)) for _ in range(60)]
    assert 50 <= sum(low < 0 < high for _, low, high, _ in found) <= 60
