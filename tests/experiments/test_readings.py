"""The map's three readings, on tables that a reader checks by hand."""

import itertools

import pandas as pd
import pytest

from experiments.claims import readings
from experiments.claims.in_text import IN_TEXT, fill_in
from experiments.claims.map_page import best_rows, check_rows, draw_map, missed_text, parts
from experiments.claims.names import NAMES as PAGE_NAMES
from recjax.analysis.compare import final

RATES = ("1e-4", "2e-4", "4e-4")
NAMES = ("reinforce", "grpo", "rec_one_side_is", "rec_one_side_nois", "rec_one_side_nois_wide")
OTHERS = ("rec_ring_nois", "opmd", "asymre", "red_drop", "red_weight")
STEPS = (0, 25, 50, 75)


def table_of(accuracies, seeds=("0", "1"), algorithms=(*NAMES, *OTHERS), sample_size=lambda *_: 1.0):
    """A map whose accuracies are a function of algorithm, rate, regime, seed and step."""
    rows = []
    for place in itertools.product(algorithms, RATES, readings.REGIMES, seeds, STEPS):
        named = dict(zip(("algorithm", "rate", "regime", "seed", "step"), place, strict=True))
        measured = {"evaluation/accuracy": accuracies(*place), "evaluation/initial_kl": 0.1}
        rows.append(named | measured | {"effective_sample_size": sample_size(*place)})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("falling", "edge"), [((), "4e-4"), (("4e-4",), "2e-4"), (("2e-4",), "1e-4"), (("1e-4", "2e-4"), "1e-4")]
)
def test_the_edge_is_the_last_rate_before_a_fall(falling, edge):
    def accuracy(algorithm, rate, regime, seed, step):
        falls = rate in falling if (algorithm, regime) == ("reinforce", "on_policy") else regime != "on_policy"
        return (0.9 if step < 75 else 0.8) if falls else 0.5

    table = table_of(accuracy)
    assert readings.edge_rate(table) == edge
    assert "rate" not in readings.read(table)["edge"]


def test_the_best_rate_is_that_of_the_other_seeds():
    """Seed 0 is best at 2e-4, and gets 4e-4, at which the others are best."""
    of = {"0": (0.1, 0.9, 0.2), "1": (0.1, 0.5, 0.6), "2": (0.1, 0.4, 0.7)}
    table = table_of(lambda _a, rate, _r, seed, _s: of[seed][RATES.index(rate)], seeds=tuple(of))
    ends = final(readings.read(table)["best"]).xs(("grpo", "offline"), level=("algorithm", "regime"))
    assert ends.to_dict() == pytest.approx({"0": 0.2, "1": 0.5, "2": 0.4})
    alone = readings.read(table[table["seed"] == "0"])["best"]
    assert final(alone).eq(0.9).all()


def test_the_area_is_the_mean_over_rates():
    table = table_of(lambda _a, rate, _r, seed, step: (RATES.index(rate) + int(seed) + step / 75) / 10)
    area = readings.read(table)["area"]
    ends = area[area["step"] == 75].set_index(["algorithm", "regime", "seed"])["evaluation/accuracy"]
    assert ends.xs("0", level="seed").to_numpy() == pytest.approx((1 + 0 + 1) / 10)
    assert len(area) == len(table) / 3


def test_claims_follow_from_what_differs():
    better = {"rec_one_side_nois_wide": 0.21, "reinforce": -0.29, "red_weight": 0.11, "red_drop": 0.11}
    table = table_of(lambda name, _ra, _re, seed, step: 0.5 + (step > 0) * (better.get(name, 0.01) + int(seed) / 100))
    claims = {name: readings.claims(own) for name, own in readings.read(table).items()}
    for found in claims.values():
        verdicts = {name: claim.verdict for name, claim in found.items()}
        assert verdicts["C1"] == verdicts["C2"] == verdicts["C5"] == verdicts["C6"] == "seen in every seed"
        assert verdicts["C3"] == verdicts["C7"] == "differs by seed"  # falls are alike
    rows = check_rows(claims, PAGE_NAMES)
    assert {row[0] for row in rows} == {"C1", "C2", "C3", "C5", "C6", "C7"}
    assert rows[2][:3] == ["C2", "final accuracy: REINFORCE − REC-OneSide-NoIS, off-policy", "lower than 0"]
    assert (
        rows[4][1]
        == "mean accuracy over training: REC-OneSide-NoIS (0.6, 2.0) − REC-OneSide-NoIS, m = 5, 20, 50, n = 10"
    )
    assert rows[5][1].endswith("REC-OneSide-NoIS, offline") and rows[0][1].endswith("REC-OneSide-IS, all regimes")
    assert rows[2][3:] == ["-0.300 (-0.300 to -0.300): as claimed in each of 2 seeds"] * 3


def test_good_rates_are_neighbors_of_the_best_one():
    rates, means = [*RATES, "8e-4"], pd.Series([0.78, 0.5, 0.79, 0.8])
    seeds = [pd.DataFrame({"rate": rates, "seed": seed, "x": means + off}) for seed, off in (("0", -0.25), ("1", 0.25))]
    best = readings.best_of(pd.concat(seeds).set_index(["rate", "seed"])["x"], rates)
    assert best._replace(accuracy=round(best.accuracy, 9)) == readings.Best("8e-4", 0.8, 0.55, 1.05, "4e-4", "8e-4")


def test_what_an_early_effective_sample_size_foretells_is_counted():
    def accuracy(algorithm, rate, regime, seed, step):
        return 0.5 if step == 0 else 0.2 if algorithm in ("reinforce", "red_drop") else 0.8

    def sample_size(algorithm, rate, regime, seed, step):
        return 0.1 if algorithm in ("reinforce", "grpo") and step <= 50 else 1.0

    runs = 3 * 5 * 2  # of an algorithm off-policy: rates × regimes × seeds
    told = readings.foretold(table_of(accuracy, sample_size=sample_size))
    assert told == readings.Foretold(runs, runs, runs, 7 * runs)


def test_tables_and_heat_maps_show_every_cell():
    table = table_of(lambda name, rate, *_: 0.9 if rate == "2e-4" else 0.5)
    names = {name: name.upper() for name in (*NAMES, *OTHERS)}
    rows = best_rows(table, names)
    assert len(rows) == 10 and rows[0] == ["REINFORCE", *["0.900 (0.900–0.900) at 2e-4"] * 6]
    figure = draw_map(table, names)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert len(texts) == 10 * 3 * 6 and set(texts) == {".90", ".50"}


def test_what_is_not_made_yet_is_left_open():
    table = table_of(lambda _a, rate, *_: 0.9 if rate == "2e-4" else 0.5)
    grpo, opmd = table["algorithm"] == "grpo", table["algorithm"] == "opmd"
    table = table[~(opmd & (table["regime"] == "offline")) & ~(grpo & (table["rate"] == "2e-4"))]
    names = {name: name for name in (*NAMES, *OTHERS)}
    rows = {row[0]: row[1:] for row in best_rows(table, names)}
    assert rows["opmd"] == [*["0.900 (0.900–0.900) at 2e-4"] * 5, "–"]
    assert rows["grpo"] == ["0.500 (0.500–0.500) at 1e-4"] * 6
    texts = [text.get_text() for axes in draw_map(table, names).figure.axes for text in axes.texts]
    assert texts.count("–") == 3 + 6


def test_verdicts_need_a_second_seed():
    table = table_of(lambda *place: 0.5 + 0.01 * int(place[-2]))
    names = {name: name for name in (*NAMES, *OTHERS)}
    both, alone = (parts(each, names)["map_verdicts"] for each in (table, table[table["seed"] == "0"]))
    assert all(f"| {claim} |" in both for claim in ("C1", "C2", "C3", "C5", "C6", "C7"))
    assert alone.startswith("Ranges need a second seed") and "C1" not in alone


def test_what_was_not_foretold_is_told_apart():
    """RED-Drop is lost unalarmed: 10 runs at the fastest rate, 2 of them with m = 5, and 20 slower, 10 alarmed late."""

    def accuracy(algorithm, rate, regime, seed, step):
        return 0.5 if step == 0 or algorithm != "red_drop" else 0.2

    def sample_size(algorithm, rate, regime, seed, step):
        return 0.1 if rate == "1e-4" and step > 50 else 1.0

    text = missed_text(table_of(accuracy, sample_size=sample_size))
    assert text.startswith("The alarm has 30 misses. 2 are at 4e-4 with m = 5") and "20 are runs of REINFORCE" in text
    assert "the sample size of 10 runs" in text


def test_numbers_in_the_text_are_the_tables():
    table = table_of(lambda _a, rate, _r, seed, step: (RATES.index(rate) + int(seed)) / 10 if step else 0.0)
    for number, column in enumerate(IN_TEXT.values()):
        table[column] = (table["step"] / 75 + number) * (table["regime"] == "offline")
    text = fill_in(
        "{{accuracy grpo 2e-4 offline}} {{lowest grpo 2e-4 offline}} {{clipped opmd 1e-4 offline}} {{edge}}", table
    )
    assert text == "0.15 0.67 467 % {{edge}}"
    assert fill_in("{{a kl grpo 2e-4 offline}} {{kl grpo 2e-4 offline}}", table, "a") == "3.67 {{kl grpo 2e-4 offline}}"
    with pytest.raises(KeyError):
        fill_in("{{kl grpo 3e-4 offline}}", table)
