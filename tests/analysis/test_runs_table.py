"""The runs of a folder: a row each, what differs between them, and the verdicts of their page."""

import pytest

from recjax import open_run, runs_table
from recjax.analysis.compare import compare_runs
from recjax.analysis.runs_page import lines_of, runs_page, verdicts
from recjax.analysis.runs_table import differing_settings, read_runs_below
from recjax.errors import UserError
from recjax.runs.lock import held
from tests.runs.recorded_run import record_run
from tests.runs.test_report import check_page, hostile_run

RATE = "optimizer.learning_rate"


def test_a_row_has_settings_that_differ_and_state(tmp_path):
    change = {"after_step": 2, "settings": f"{RATE}: 0.002 there, 0.01 now"}
    for name, seed in (("sweep/seed 10", 1), ("sweep/seed 9", 2)):
        record_run(tmp_path / name, seed=seed)
    record_run(tmp_path / "deep" / "er" / "run", seed=1, steps=3, planned=8, changes=[change])
    table = runs_table(tmp_path)
    assert [*table.index] == ["deep/er/run", "sweep/seed 9", "sweep/seed 10"]
    assert [*table.columns[:3]] == ["seed", RATE, "training.steps"] and table.columns[3] == "steps"
    assert [*table[RATE]] == ["0.002 until step 2, then 0.01", "0.01", "0.01"] and [*table["seed"]] == ["1", "2", "1"]
    assert [*table["state"]] == ["stopped", "finished", "finished"] and [*table["planned_steps"]] == [8, 4, 4]
    assert [*table["steps"]] == [3, 4, 4] and table["hours"].tolist() == pytest.approx([0.03, 2.0, 2.0])
    assert table["reward"].tolist() == [0.3, 0.4, 0.4] and set(table["base"]) == {"0123456789abcdef"}
    assert [*runs_table(tmp_path / "deep" / "er" / "run").index] == ["run"]
    assert "3 of 8" in open_run(tmp_path / "deep" / "er" / "run").report().read_text()


def test_a_run_is_running_while_a_process_holds_it(tmp_path):
    run = record_run(tmp_path / "run", planned=8)
    with held(run):
        assert runs_table(tmp_path)["state"].item() == "running"
    assert runs_table(tmp_path)["state"].item() == "stopped"
    (run / "running.json").write_text('{"host": "another", "pid": 1, "since": "now"}')
    assert runs_table(tmp_path)["state"].item() == "running", "another host shows life by the file's time"


def test_keys_that_a_run_lacks_have_their_default(tmp_path):
    old = record_run(tmp_path / "old", seed=1)
    record_run(tmp_path / "new")
    text = (old / "config.yaml").read_text()
    assert "  sync_offset: 0\n" in text and "  warmup_steps: 0\n" in text
    (old / "config.yaml").write_text(text.replace("  sync_offset: 0\n", "").replace("  warmup_steps: 0\n", ""))
    record_run(tmp_path / "other", ["optimizer.warmup_steps=1"])
    assert differing_settings(read_runs_below(tmp_path)[0]) == ["seed", "optimizer.warmup_steps"]


def test_damaged_and_foreign_folders_have_a_line_each(tmp_path):
    record_run(tmp_path / "run")
    (record_run(tmp_path / "metrics") / "metrics.jsonl").write_text('{"step": "x"}\n')
    (record_run(tmp_path / "config") / "config.yaml").write_text("seed: [\n")
    (record_run(tmp_path / "lost") / "config.yaml").unlink()
    (record_run(tmp_path / "environment") / "environment.json").write_text('[{"changed": 1}]')
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("a: 1\n")
    record_run(tmp_path / "run" / "checkpoints" / "inner")
    (tmp_path / "run" / "again").symlink_to(tmp_path)
    runs, problems = read_runs_below(tmp_path)
    assert [run.folder.name for run in runs] == ["environment", "run"]
    assert [len(problem.splitlines()) for problem in problems] == [1] * 4
    for name, problem in zip(("config", "lost", "metrics", "mine"), sorted(problems), strict=False):
        assert name in "".join(problems) and problem.startswith("skipped: ")
    with pytest.raises(UserError, match="config.yaml and no run; name the output folder of a run"):
        runs_table(tmp_path / "mine")
    with pytest.raises(UserError, match="no such folder"):
        runs_table(tmp_path / "none")


def test_a_verdict_needs_six_seeds(tmp_path):
    for name, rate, accuracy in (("a", 0.1, 0.25), ("b", 0.2, 0.5), ("c", 0.3, 0.25)):
        for seed in range(6):
            folder = tmp_path / name / str(seed)
            record_run(folder, [f"{RATE}={rate}"], seed=seed, accuracy=accuracy + seed / 100)
    runs, _ = read_runs_below(tmp_path)
    lines = lines_of(runs, tmp_path)
    assert [line.label for line in lines] == [f"learning_rate = {rate}" for rate in (0.1, 0.2, 0.3)]
    sentences = verdicts(lines)
    (expected,) = compare_runs(tmp_path / "a", tmp_path / "b").sentences
    for name, line in zip("ab", lines, strict=False):
        expected = expected.replace(str(tmp_path / name), line.label)
    assert sentences[0] == expected and "has higher held-out accuracy" in expected
    assert "No difference" in sentences[1] and sentences[2].endswith(
        "(Holm), these differ from learning_rate = 0.1: none."
    )
    (fewer,) = verdicts([line._replace(runs=line.runs[:5]) for line in lines[:2]])
    assert fewer.startswith("No verdict: ") and fewer.endswith("A verdict needs 6 seeds.")


def test_a_line_with_an_own_function_names_its_axis(tmp_path):
    record_run(tmp_path / "plain")
    record_run(tmp_path / "own", ["algorithm.weight=tests.algorithms.mine:bounded"])
    runs, _ = read_runs_below(tmp_path)
    assert "weight = tests.algorithms.mine:bounded" in [line.label for line in lines_of(runs, tmp_path)]


def test_the_page_of_runs_reads_no_text_as_html(tmp_path):
    hostile_run(tmp_path)
    record_run(tmp_path / "other", seed=1, steps=1)
    runs, _ = read_runs_below(tmp_path)
    read = check_page(runs_page(tmp_path, runs, ["<script>"]))
    assert [tag for tag, _ in read.elements].count("details") == 2 and "<script>" in read.texts
