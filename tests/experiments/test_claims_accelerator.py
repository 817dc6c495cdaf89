"""The runs for one GPU: which claims they test, and which of them a later call makes."""

import json

import pandas as pd
import pytest

from experiments.claims import accelerator
from experiments.claims.names import NAMES
from recjax.analysis.sweeps import read_sweep

ALGORITHMS = ("reinforce", "grpo", "rec_one_side_nois", "opmd", "rec_one_side_nois_wide", "grpo_5x_rate")
LATER = {"rec_one_side_nois_wide": 0.1, "reinforce": -0.2}  # differences of accuracy after the start


def table_of(seeds=("0", "1", "2"), algorithms=ALGORITHMS):
    """Runs that gain 0.2, and of which some gain more or less than that."""
    rows = []
    for algorithm in algorithms:
        for regime in accelerator.REGIMES:
            for seed in seeds:
                for step in range(0, 121, 20):
                    gained = 0.2 + LATER.get(algorithm, 0.0) + 0.01 * int(seed) if step else 0.0
                    row = {"algorithm": algorithm, "regime": regime, "seed": seed, "step": step}
                    rows.append(row | {"evaluation/accuracy": 0.4 + gained, "evaluation/initial_kl": 0.1})
    return pd.DataFrame(rows)


def test_claims_compare_algorithms_in_each_regime():
    claims = accelerator.claims(table_of())
    verdicts = {name: claim.verdict for name, claim in claims.items()}
    assert verdicts == dict.fromkeys(("C1", "C2", "C3", "C4"), "seen in every seed")
    assert {name: len(claim.checks) for name, claim in claims.items()} == {"C1": 3, "C2": 4, "C3": 3, "C4": 3}
    (check,) = (check for check in claims["C2"].checks if "reinforce" in check.what and "offline" in check.what)
    assert check.found.mean == pytest.approx(-0.2) and check.found.count == 3


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (table_of(algorithms=ALGORITHMS[:4]), ["C1", "C2"]),
        (table_of(seeds=("0",)), []),
        (table_of().query("algorithm != 'grpo' or regime != 'on_policy' or seed == '0'"), ["C2", "C3", "C4"]),
        # Two seeds each, of which one is common: no pair of runs to compare but one.
        (table_of().query("(algorithm == 'grpo' and seed != '0') or (algorithm != 'grpo' and seed != '2')"), None),
    ],
    ids=["four algorithms", "one seed", "a cell with one seed", "other seeds"],
)
def test_a_claim_waits_for_pairs_in_all_its_regimes(table, expected):
    assert [*accelerator.claims(table)] == (["C2", "C3", "C4"] if expected is None else expected)


def test_the_section_names_the_devices_and_the_runs():
    text = accelerator.section(table_of(), "1 × NVIDIA H200", NAMES)
    assert "on 1 × NVIDIA H200: 54 runs of 120 steps" in text and "| C4 | " in text
    alone = accelerator.section(table_of(seeds=("0",)), "1 × NVIDIA H200", NAMES)
    assert "Ranges need a second seed" in alone and "| C1" not in alone


def test_runs_have_complete_seeds_in_order():
    runs = read_sweep(accelerator.HERE / "accelerator.yaml")[1]
    assert len(runs) == len({run.name for run in runs}) == len(ALGORITHMS) * 3 * 3
    first = [run.settings for run in runs[:12]]
    assert {run["seed"] for run in first} == {"0"} and {run["algorithm"] for run in first} == {*ALGORITHMS[:4]}
    with_clip = {run.settings["algorithm"] for run in runs if run.config.algorithm.clip}
    assert with_clip == {"rec_one_side_nois_wide"}


def test_new_runs_join_those_of_the_table(tmp_path, monkeypatch):
    runs = read_sweep(accelerator.HERE / "accelerator.yaml")[1]
    path = tmp_path / "table.parquet"
    with pytest.raises(ValueError, match="none of the 54 runs is finished"):
        accelerator.write_table(runs, path)
    table_of(seeds=("0",), algorithms=("grpo",)).to_parquet(path)
    path.with_suffix(".json").write_text(json.dumps({"devices": "1 × NVIDIA H100"}))
    named = {run.name: run for run in runs}
    new = named["opmd__offline__2"]
    done = {new.config.output, named["grpo__offline__0"].config.output}  # the second is in the table
    monkeypatch.setattr(accelerator, "is_finished", lambda config: config.output in done)
    monkeypatch.setattr(accelerator, "starts", lambda folder: [{"devices": "1 × NVIDIA H200"}])
    made = table_of(seeds=("2",), algorithms=("opmd",)).query("regime == 'offline'")
    monkeypatch.setattr(accelerator, "collect", lambda chosen: made if chosen == [new] else pytest.fail(str(chosen)))
    table = accelerator.write_table(runs, path)
    assert len(table.drop_duplicates(["algorithm", "regime", "seed"])) == 4
    pd.testing.assert_frame_equal(pd.read_parquet(path), table)
    assert accelerator.devices_of(path) == "1 × NVIDIA H100, 1 × NVIDIA H200"
    accelerator.draw(table, NAMES, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
