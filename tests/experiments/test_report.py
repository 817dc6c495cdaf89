"""Report and README section are those of the committed tables; sections of studies without runs are absent."""

import shutil

import pandas as pd
import pytest

from experiments.leaderboard import page as board_page
from experiments.leaderboard import plan as board_plan
from experiments.report import __main__ as report
from tests.experiments.test_leaderboard import table_of


@pytest.mark.slow
def test_committed_report_is_that_of_the_tables(tmp_path):
    shutil.copy(report.ROOT / "README.md", tmp_path)
    board = report.leaderboard.TABLE
    report.write_report(pd.read_parquet(board) if board.exists() else None, tmp_path)
    for name in ("README.md", "docs/report.md"):
        written = (tmp_path / name).read_text(encoding="utf-8")
        assert written == (report.ROOT / name).read_text(encoding="utf-8"), "run python -m experiments.report"
        assert "{{" not in written
    assert (tmp_path / "docs" / "report.png").stat().st_size > 10_000


def test_studies_without_runs_have_no_section():
    parts = report.board_parts(None)
    assert parts.pop("unmeasured") == report.UNMEASURED and set(parts.values()) == {""}


def test_leaderboard_and_regimes_fill_their_sections(monkeypatch):
    ends = {("reinforce", column): lambda seed: 0.6 + 0.01 * seed for column in ("age50", "late")}
    ends |= {(method, "fresh"): lambda seed: 0.9 + 0.001 * seed for method in ("reinforce", "opmd")}
    ends |= {("grpo", column): lambda seed: 0.9 + 0.01 * seed for column in ("age50", "late", "fresh")}
    monkeypatch.setattr(board_page, "planned_runs", lambda study: 100)
    parts = report.board_parts(table_of(ends, range(8)))
    assert parts["unmeasured"] == "" and "**Late rewards and replay are like age.**" in parts["regimes"]
    rows = len(board_plan.methods_of("leaderboard"))
    assert f"3 of {rows} rows, 42 of 100 runs" in parts["leaderboard"]
    assert "The first of 2 groups has `grpo`, the last `reinforce`, `opmd`;" in parts["leaderboard"]
    assert "in the columns that all ran: `grpo` (fresh)." in parts["readme_leaderboard"]
    assert "](docs/leaderboard.png)" in parts["readme_leaderboard"]
    assert "](leaderboard.png)" in parts["leaderboard"]


def test_counts_of_claims_are_those_of_their_verdicts():
    verdicts = ["holds", "holds alone", "holds alone", "does not hold here"]
    assert report.count_text(verdicts).startswith("one holds, two hold without the correction")
    assert report.count_text(verdicts).endswith(" and one does not hold")
    assert report.count_text(["holds"] * 7) == "seven hold"
