"""What the page says of SmolLM2's runs, on tables that a reader checks by hand."""

import pandas as pd
import pytest

from experiments.claims import real_model
from experiments.claims.names import NAMES

ALGORITHMS = ("reinforce", "grpo", "rec_one_side_nois", "rec_one_side_nois_wide", "opmd", "red_drop", "red_weight")


def table_of(accuracy, rates=("1e-6", "2e-6"), chosen="2e-6"):
    """REINFORCE at all rates with seed 0, every algorithm at the chosen one with three seeds."""
    rows = []
    for algorithm in ALGORITHMS:
        for rate in rates if algorithm == "reinforce" else (chosen,):
            for seed in ("0", "1", "2") if rate == chosen else ("0",):
                place = {"algorithm": algorithm, "rate": rate, "regime": "interval_20", "seed": seed}
                for step in range(0, 61, 4):
                    row = place | {"step": step, "effective_sample_size": 0.9 if step <= 20 else 0.1}
                    if step % 12 == 0:
                        row |= {
                            "evaluation/accuracy": accuracy(algorithm, rate, int(seed), step),
                            "evaluation/initial_kl": 0.1,
                        }
                    rows.append(row)
    return pd.DataFrame(rows)


def test_tables_average_seeds_and_list_every_rate():
    table = table_of(lambda name, rate, seed, step: 0.4 + 0.1 * seed + (0.005 * step if rate == "2e-6" else 0))
    parts = real_model.parts(table, NAMES, "smollm2")
    assert parts["smollm2_rate"] == "2e-6" and parts["smollm2_runs"] == "22"
    rates = real_model.rates_table(table).splitlines()
    assert rates[2] == "| 1e-6 | 0.400 | 0.400 | 0.400 | 0.400 | 0.400 | 0.400 | 0.000 | 0.10 |"
    assert rates[3] == "| 2e-6 | 0.400 | 0.460 | 0.520 | 0.580 | 0.640 | 0.700 | 0.000 | 0.10 |"
    grpo = parts["smollm2"].splitlines()[3]
    assert grpo == ("| GRPO | 0.500 | 0.560 | 0.620 | 0.680 | 0.740 | 0.800 | 0.740 (0.640–0.840) | 0.10 | 0.90 | 3 |")


def test_verdicts_follow_from_what_differs():
    better = {"rec_one_side_nois_wide": 0.3, "red_drop": -0.2, "reinforce": -0.2}

    def accuracy(name, rate, seed, step):
        return 0.4 + (0.2 + better.get(name, 0.0) + 0.01 * seed if step else 0.0)

    table = table_of(accuracy).drop(columns="rate")
    verdicts = {name: claim.verdict for name, claim in real_model.claims(table).items()}
    assert verdicts == {
        "C1": "seen in every seed",
        "C2": "seen in every seed",
        "C3": "seen in every seed",
        "C5": "contrary in every seed",
        "C6": "seen in every seed",
    }


def test_all_algorithms_are_at_one_rate():
    table = table_of(lambda *_: 0.5)
    with pytest.raises(ValueError, match="2 rates, not at one"):
        real_model.parts(pd.concat([table, table[table["algorithm"] == "grpo"].assign(rate="1e-6")]), NAMES, "smollm2")


def test_a_claim_waits_for_its_algorithms_second_seed():
    table = table_of(lambda *_: 0.5).drop(columns="rate")
    table = table[(table["algorithm"] != "red_weight") | (table["seed"] == "0")]
    assert list(real_model.claims(table)) == ["C1", "C2", "C3", "C6"]
    assert list(real_model.claims(table[~table["algorithm"].isin(["red_weight", "opmd"])])) == ["C1", "C2", "C3"]
    alone = real_model.parts(table[table["seed"] == "0"].assign(rate="2e-6"), NAMES, "chains")
    assert alone["chains_verdicts"].startswith("Ranges need a second seed") and alone["chains_numbers"] == ""
