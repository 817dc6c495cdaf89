"""The table of learning rates: what it reads from runs, and that the page has it."""

import pandas as pd
import pytest

from experiments.rates import __main__ as rates


def runs(accuracies: dict[str, dict[str, float]], before: float = 0.5) -> pd.DataFrame:
    """A start and one evaluation of each rate and seed."""
    rows = []
    for rate, by_seed in accuracies.items():
        for seed, accuracy in by_seed.items():
            rows.append({"rate": rate, "seed": seed, "step": 0, "evaluation/accuracy": before})
            rows.append({"rate": rate, "seed": seed, "step": 40, "evaluation/accuracy": accuracy})
    return pd.DataFrame(rows)


def test_page_has_the_table_of_the_committed_runs():
    page = rates.PAGE.read_text(encoding="utf-8")
    assert rates.with_table(page) == page


def test_best_rate_its_neighbors_and_lost_rates():
    table = runs(
        {
            "8e-4": {"0": 0.3, "1": 0.5},
            "5e-5": {"0": 0.69, "1": 0.71},
            "1e-4": {"0": 0.8, "1": 0.8},
            "2e-4": {"0": 0.78, "1": 0.8},
            "4e-4": {"0": 0.6, "1": 0.6},
        }
    )
    found = rates.found_in(table)
    assert found.best == "1e-4"
    assert found.good == ["1e-4", "2e-4"]
    assert found.lost == ["8e-4"]
    assert found.accuracies == pytest.approx({"5e-5": 0.7, "1e-4": 0.8, "2e-4": 0.79, "4e-4": 0.6, "8e-4": 0.4})
    assert (found.seeds, found.further) == (2, 0)


def test_seeds_of_one_rate_alone_choose_no_rate():
    table = runs({"1e-4": {"pilot": 0.7}, "2e-4": {"pilot": 0.8, "0": 0.1, "1": 0.1}})
    found = rates.found_in(table)
    assert (found.best, found.seeds, found.further) == ("2e-4", 1, 2)
    assert found.accuracies["2e-4"] == pytest.approx(0.8)


def test_few_seeds_and_edges_are_said():
    setting = rates.settings()[0]
    shown = rates.cells(setting, rates.found_in(runs({"1e-4": {"0": 0.6}, "2e-4": {"0": 0.8}})))
    assert "2e-4, the highest (0.80)" in shown
    assert "**few**: 1" in shown
    many = rates.cells(setting, rates.found_in(runs({"1e-4": dict.fromkeys("012", 0.8)})))
    assert "1e-4, the only one (0.80)" in many
    assert "3" in many


def test_tables_of_all_settings_have_runs():
    for setting in rates.settings():
        assert len(rates.runs_of(setting)), setting
