"""The leaderboard's plan, its runs and its numbers."""

import itertools
import json

import numpy as np
import pandas as pd
import pytest

from experiments.claims import map as compiled
from experiments.leaderboard import __main__ as main
from experiments.leaderboard import page, plan, runs
from experiments.leaderboard.plan import Method
from recjax.algorithms.presets import PRESETS
from recjax.errors import UserError

PLAN = plan.PLAN


def table_of(ends, seeds=range(6), rate="0.0002"):
    """A table of evaluations.

    Args:
        ends: final accuracy by method, column and seed.
    """
    rows = []
    for (method, column), seed in itertools.product(ends, seeds):
        for step in (0, 40, 80, 120):
            accuracy = 0.1 if step == 0 else ends[method, column](seed)
            rows.append((method, column, rate, str(seed), step, accuracy))
    return pd.DataFrame(rows, columns=[*plan.AXES, "step", "evaluation/accuracy"])


def test_every_preset_has_a_row_or_a_reason():
    rows = {method.name for method in plan.methods_of("leaderboard")}
    left_out = PLAN["leaderboard"]["left_out"]
    assert rows | set(left_out) == set(PRESETS) and not rows & set(left_out)
    refused = {name for name in PRESETS if plan.refusal(plan.preset(name), plan.FRESH)}
    assert refused == set(left_out)


@pytest.mark.parametrize("study", plan.STUDIES)
def test_every_planned_cell_is_a_valid_config(study):
    columns = PLAN[study]["columns"]
    assert set(columns) <= set(plan.COLUMNS) and plan.FRESH in columns
    for method in plan.methods_of(study)[::8]:
        assert [plan.refusal(method, column) for column in columns] == [None] * len(columns)


def test_columns_differ_only_in_their_own_keys():
    fresh = plan.run_of(plan.preset("grpo"), plan.FRESH, 1e-4, 3, {}).config.model_dump()
    keys = {"age20": {"regime"}, "late": {"experience"}, "noise": {"rollout"}, "several_updates": {"training"}}
    for column, blocks in keys.items():
        config = plan.run_of(plan.preset("grpo"), column, 1e-4, 3, {}).config.model_dump()
        assert {name for name in config if config[name] != fresh[name]} == blocks | {"output"}


def test_another_policy_records_the_store():
    reader = plan.run_of(plan.preset("opmd"), "mixed_half", 1e-4, 3, {}).config
    writer = plan.store_run("another_model", 3, {}).config
    assert reader.experience.mix.store == str(writer.record_file) and reader.experience.mix.share == 0.5
    assert writer.seed != reader.seed and writer.model.decoder != reader.model.decoder
    assert plan.run_of(plan.preset("opmd"), "store", 1e-4, 3, {}).config.experience.store.endswith("3/experience.db")


def test_checks_name_planned_methods_that_differ():
    study = PLAN["regimes"]
    for check in study["checks"]:
        assert check["first"] in study["methods"] and check["second"] in [*study["methods"], plan.FRESH]
        assert check["first"] != check["second"]
    assert PLAN["pilot_seed"] >= max(PLAN[name]["seeds"] for name in plan.STUDIES)


def test_the_best_rate_is_the_pilots():
    rates = {"0.0001": 0.5, "0.0002": 0.7, "0.0004": 0.7}
    tables = [table_of({("opmd", "late"): lambda seed, end=end: end}, [100], rate) for rate, end in rates.items()]
    other = table_of({("opmd", "late"): lambda seed: 0.9}, [0], "0.0004")
    assert plan.best_rates(pd.concat([*tables, other])) == {("opmd", "late"): 2e-4}
    assert plan.best_rates(other) == plan.best_rates(pd.DataFrame(columns=[*plan.AXES, "step"])) == {}


def test_ranks_means_and_ties():
    ends = {
        ("good", "fresh"): lambda seed: 0.9 + 0.01 * (seed % 2),
        ("alike", "fresh"): lambda seed: 0.9 + 0.01 * ((seed + 1) % 2),
        ("bad", "fresh"): lambda seed: 0.5 + 0.01 * seed,
        ("good", "age20"): lambda seed: 0.8,
        ("alike", "age20"): lambda seed: 0.8 - 0.01 * (seed % 2),
        ("bad", "age20"): lambda seed: 0.2 + 0.01 * seed,
        ("good", "late"): lambda seed: 0.1,  # "alike" was not run: no rank counts here
        ("bad", "late"): lambda seed: 0.2 + 0.01 * seed,
    }
    table = pd.concat([table_of(ends), table_of({("bad", "fresh"): lambda seed: 1.0}, [PLAN["pilot_seed"]])])
    board = page.board_of(page.ends_of(table))
    assert [*board.means.index] == ["good", "alike", "bad"]  # pilot seeds count for nothing
    assert board.ranked == ["fresh", "age20"]
    # In "fresh" the first two take turns; in "age20" they tie for every second seed.
    assert {name: rank.mean for name, rank in board.ranks.items()} == {"good": 1.375, "alike": 1.625, "bad": 3.0}
    assert board.means.loc["bad", "fresh"] == pytest.approx(0.525) and np.isnan(board.means.loc["alike", "late"])
    # Student's interval of 0.5 to 0.55 with six values: 2.5706 · 0.018708 / √6.
    assert board.half_widths.loc["bad", "fresh"] == pytest.approx(0.019633, abs=1e-5)
    assert board.ties["fresh"].to_dict() == {"good": True, "alike": True, "bad": False}
    assert board.groups == {"good": 1, "alike": 1, "bad": 2}
    text = page.board_table(board)
    assert "**0.905 ± 0.006**" in text and "| 0.525 ± 0.020 |" in text and "–" in text
    assert "| 3 | `bad` | 2 | 3.0 (3.0 to 3.0) |" in text


def test_refused_methods_leave_a_column_ranked(monkeypatch):
    means = pd.DataFrame({"fresh": [0.9, 0.8], "late": [0.7, np.nan]}, index=["opmd", "grpo"])
    assert page.ranked_columns(means) == ["fresh"]
    monkeypatch.setattr(plan, "refusal", lambda method, column: "it needs more groups")
    assert page.ranked_columns(means) == ["fresh", "late"]
    assert page.ranked_columns(means.rename(index={"grpo": "mine"})) == ["fresh"]
    assert page.ranked_columns(means[["late"]].rename(index={"grpo": "mine"})) == ["late"]


def test_groups_compare_ranks_in_common_columns():
    places = page.ends_of(
        table_of(
            {
                ("first", "fresh"): lambda seed: 1.0,
                ("first", "late"): lambda seed: 1.0,
                ("second", "fresh"): lambda seed: 2.0,
                ("second", "late"): lambda seed: 1.0 if seed % 2 else 0.5,
                ("partial", "fresh"): lambda seed: 1.0,
                ("third", "late"): lambda seed: 3.0,
            }
        )
    )
    order = ["first", "second", "partial", "third"]
    # The second is behind by 0.5 and 0.25 in turn, 0.375 ± 0.144.
    assert page.groups_of(places, order) == {"first": 1, "second": 2, "partial": 2, "third": 3}
    few = places[places.index.get_level_values("seed").isin(["0", "1"])]
    assert page.groups_of(few, order) == dict.fromkeys(order, 1)


def test_empty_cells_have_a_reason():
    cells = [("luffy", "fresh"), ("opmd", "fresh"), ("opmd", "late")]
    board = page.board_of(page.ends_of(table_of({cell: lambda seed: 0.5 for cell in cells})))
    text = page.gaps_text(board, {"luffy__late": "too few groups remain"})
    assert f"- `luffy`, {page.TITLES['late']}: too few groups remain\n" in text
    assert page.NOT_RUN in text and f"`opmd`, {page.TITLES['age20']}" in text


def test_errors_of_finished_cells_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "ERRORS", tmp_path / "errors.json")
    monkeypatch.setattr(plan, "OUTPUT", tmp_path)
    page.ERRORS.write_text('{"grpo__late": "kept", "opmd__fresh": "finished since"}')
    row = runs.Row(plan.preset("opmd"), ("late",), 2)
    for run in runs.pilots_of(row, {}):
        compiled.file_of(run).write_text(json.dumps({"error": "too few groups remain"}))
    main.write_errors([row], table_of({("opmd", "fresh"): lambda seed: 0.5}))
    assert page.read_errors() == {"grpo__late": "kept", "opmd__late": "too few groups remain"}


def test_few_seeds_have_no_interval():
    board = page.board_of(page.ends_of(table_of({("good", "fresh"): lambda seed: 0.9}, range(3))))
    assert np.isnan(board.half_widths.loc["good", "fresh"]) and "0.900 (3 seeds)" in page.board_table(board)


def test_checks_pair_seeds_with_fresh_samples_and_methods():
    ends = {
        ("reinforce", "fresh"): lambda seed: 0.9 + 0.01 * seed,
        ("reinforce", "late"): lambda seed: 0.6 + 0.01 * seed + 0.001 * (seed % 2),
        ("rec_one_side_nois", "late"): lambda seed: 0.8 + 0.01 * seed,
    }
    pilots = table_of({cell: lambda seed: 0.5 for cell in ends}, [PLAN["pilot_seed"]])  # count for nothing
    found = page.checks_of(page.ends_of(pd.concat([table_of(ends, range(8)), pilots])))
    cost = found["reinforce", plan.FRESH, "late"]
    assert cost.found.mean == pytest.approx(-0.2995) and cost.outcome == "as claimed"
    gain = found["rec_one_side_nois", "reinforce", "late"]
    assert gain.found.mean == pytest.approx(0.1995) and gain.found.high - gain.found.low < 0.01
    assert found["opmd", "reinforce", "late"] is None and ("reinforce", plan.FRESH, plan.FRESH) not in found
    text = page.verdicts_table(found)
    assert "−0.299" in text and "holds" in text and page.NOT_RUN in text
    said = page.paragraphs(found)
    assert said.startswith(
        "**Rewards 0 to 40 rounds late.** Holds: the cost of the data to REINFORCE (−0.300), the gain"
    )
    assert said.count("\n") == 1


def test_paragraphs_count_verdicts_that_age_has_too():
    ends = {("reinforce", column): lambda seed: 0.6 + 0.01 * (seed % 3) for column in ("age50", "late")}
    ends |= {("reinforce", "fresh"): lambda seed: 0.9, ("grpo", "age50"): lambda seed: 0.9}
    ends |= {("opmd", "age50"): lambda seed: 0.9, ("opmd", "late"): lambda seed: 0.5}
    said = page.paragraphs(page.checks_of(page.ends_of(table_of(ends, range(8)))))
    assert "Does not hold here: the gain of OPMD over REINFORCE (−0.109). 1 of 2 verdicts are those of age 50." in said
    assert {(check["first"], check["second"]) for check in PLAN["regimes"]["checks"]} == page.SUBJECTS.keys()


def test_blocks_average_the_steps_since_the_last_evaluation():
    rows = [{"step": 0, "evaluation/accuracy": 0.1}]
    rows += [{"step": step, "reward": step / 10, "entropy": None} for step in (1, 2, 3)]
    rows += [{"step": 4, "reward": 0.8, "evaluation/accuracy": 0.4}]
    rows += [{"step": 5, "reward": 9.0, "evaluation/accuracy": 0.5}, {"step": 6, "reward": 7.0}]
    found = runs.blocks(rows)
    assert found["step"].tolist() == [0, 4, 5] and found["evaluation/accuracy"].tolist() == [0.1, 0.4, 0.5]
    assert found["reward"].iloc[1] == pytest.approx((0.1 + 0.2 + 0.3 + 0.8) / 4) and "entropy" not in found
    assert found["reward"].iloc[2] == 9.0


def test_own_methods_are_read_and_refused():
    assert main.own_method("mine={preset: grpo, clip: none}") == Method("mine", {"preset": "grpo", "clip": "none"})
    for text in ("mine", "={preset: grpo}", "mine=grpo", "a__b={preset: grpo}", "a/b={preset: grpo}"):
        with pytest.raises(UserError, match="--method"):
            main.own_method(text)


def test_an_own_loss_is_a_row_in_every_column():
    name = "tests.algorithms.mine:clipped_surrogate"
    method = main.own_loss(name)
    assert method == Method("tests.algorithms.mine.clipped_surrogate", {"preset": "grpo", "objective": name})
    columns = PLAN["leaderboard"]["columns"]
    assert [plan.refusal(method, column) for column in columns] == [None] * len(columns)
    assert runs.is_compiled(plan.run_of(method, plan.FRESH, 1e-4, 0, {}).config)
    to_reference = {"preset": "grpo", "objective": "tests.algorithms.mine:anchored_entropy"}
    assert not runs.is_compiled(plan.run_of(Method("own", to_reference), plan.FRESH, 1e-4, 0, {}).config)
    for text in ("mine", "a/b:c", "a__b:c"):
        with pytest.raises(UserError, match="--loss"):
            main.own_loss(text)
    with pytest.raises(UserError, match="objective.name = .*must return"):
        main.own_loss("tests.algorithms.mine:summed_rows")


def test_an_error_of_a_program_ends_its_row_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "OUTPUT", tmp_path)

    def refuse(waiting, drifts):
        if waiting and not drifts:
            raise UserError("reward_parts", "the reward has no parts")

    monkeypatch.setattr(compiled, "make", refuse)
    row = runs.Row(plan.preset("gdpo"), ("fresh", "noise"), 2)
    runs.make_row(row, tmp_path / "none.parquet", {})
    errors = runs.errors_of(runs.pilots_of(row, {}))
    assert errors.keys() == {("gdpo", "fresh")} and "no parts" in errors["gdpo", "fresh"]


def test_errors_and_table_rows_count_as_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "OUTPUT", tmp_path)
    row = runs.Row(plan.preset("opmd"), ("late",), 2)
    pilots = runs.pilots_of(row, {})
    assert len(pilots) == len(PLAN["rates"])
    ends = {"0.0001": 0.3, "0.0002": 0.6}
    for run in pilots[:2]:
        rows = table_of({("opmd", "late"): lambda seed: ends[run.settings["rate"]]}, [100])  # noqa: B023
        compiled.file_of(run).write_text(json.dumps(rows[["step", "evaluation/accuracy"]].to_dict("list")))
    compiled.file_of(pilots[2]).write_text(json.dumps({"error": "too few groups remain"}))
    table = runs.table_of(pilots, tmp_path / "none.parquet")
    assert plan.best_rates(table) == {("opmd", "late"): 2e-4}
    assert runs.errors_of(pilots) == {("opmd", "late"): "too few groups remain"}
    planned = runs.runs_of(row, table, {})
    assert [run.settings["seed"] for run in planned[3:]] == ["0", "1"]
    assert {run.settings["rate"] for run in planned[3:]} == {"0.0002"}
    # Rows of a committed table count where the files are gone.
    path = tmp_path / "runs.parquet"
    table.to_parquet(path)
    for run in pilots[:2]:
        compiled.file_of(run).unlink()
    pd.testing.assert_frame_equal(runs.table_of(pilots, path), table)


@pytest.mark.slow
def test_the_trainer_and_the_programs_make_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "OUTPUT", tmp_path)
    run = plan.run_of(plan.preset("grpo"), "age20", 4e-4, 1, main.SHORT)
    assert runs.is_compiled(run.config)
    compiled.make([run])
    by_programs = runs.table_of([run], tmp_path / "none.parquet")
    compiled.file_of(run).unlink()
    runs.train(run, main.SHORT)
    by_trainer = runs.table_of([run], tmp_path / "none.parquet")
    for name in ("step", "evaluation/accuracy", "reward"):
        np.testing.assert_allclose(by_trainer[name].fillna(0), by_programs[name].fillna(0), atol=1e-6, err_msg=name)
    np.testing.assert_allclose(by_trainer["entropy"][1:], by_programs["entropy"][1:], rtol=1e-4)


@pytest.mark.skipif(not main.TABLE.exists(), reason="no run of the leaderboard is committed")
def test_the_pages_are_those_of_the_table(tmp_path, monkeypatch):
    pages = [page.DOCS / "leaderboard.md", page.DOCS / "claims" / "regimes.md"]
    committed = [path.read_text(encoding="utf-8") for path in pages]
    (tmp_path / "claims").mkdir()
    monkeypatch.setattr(page, "DOCS", tmp_path)
    page.write_pages(pd.read_parquet(main.TABLE))
    written = [tmp_path / "leaderboard.md", tmp_path / "claims" / "regimes.md"]
    assert [path.read_text(encoding="utf-8") for path in written] == committed
