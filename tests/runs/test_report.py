"""A run's report: what differs from the defaults, what was left out, and no text of a model is read as HTML."""

import html.parser
import re
import shlex

import pytest

from recjax.config import load_config
from recjax.logs.warnings import given_warnings, warning_steps
from recjax.runs import report
from recjax.runs.folder import check_run_folder
from recjax.runs.overview import read_overview, setting_value_text
from recjax.runs.report import commands, left_out, try_report, write_report
from tests.runs.recorded_run import record_run

HOSTILE = "</div></style><script>alert(1)</script><img src=x onerror='alert(1)'>\"' & {{ 7 * 7 }} \u202e\ud800"
SHOWN = HOSTILE.replace("\ud800", "?")
TAGS = set(
    "html head meta title style body main h1 h2 h3 p section div dl dt dd ul li figure img table thead tbody tr th td"
    " code article pre details summary a".split()
)


class Reader(html.parser.HTMLParser):
    """Reads a page: its elements with their attributes, and its texts."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def check_page(page):
    """Checks that a page has only elements of its templates, no scripts and no addresses; returns its reader."""
    read = Reader(page)
    assert {tag for tag, _ in read.elements} <= TAGS
    for tag, attributes in read.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
        assert attributes.get("href", "#").startswith("#") and (tag != "img" or "alt" in attributes)
    assert not re.search(r"@import|url\(", page) and "default-src 'none'" in page
    return read


def hostile_run(folder):
    sample = {"question": HOSTILE, "prompt": HOSTILE, "completion": HOSTILE, "answer": HOSTILE, "reward": 1.0}
    rows = [{"step": 0}, {"step": 1, f"grading/{SHOWN}": 2, "source_rows": {HOSTILE: 1}}]
    change = {"after_step": 1, "settings": f"task.system_prompt: '{HOSTILE}' there, None now"}
    return record_run(folder / "<b>run", steps=1, rows=rows, samples=[sample] * 12, changes=[change])


def test_no_text_is_read_as_html(tmp_path):
    run = hostile_run(tmp_path)
    page = write_report(run, [b"\x89PNG"], ending=HOSTILE).read_text()
    texts = "\n".join(check_page(page).texts)
    assert texts.count(SHOWN) == 20 + 3, "question and text of ten; state, left out, changed setting"
    assert "<b>run" in texts and "49" not in texts.replace("{{ 7 * 7 }}", "")


def test_the_report_has_the_settings_that_differ(tmp_path):
    change = {"after_step": 2, "settings": "optimizer.learning_rate: 0.002 there, 0.01 now"}
    run = record_run(tmp_path / "run", ["algorithm.preset=gspo"], seed=3, changes=[change])
    rows = {key: (value, default) for key, value, default in report.own_settings(read_overview(run))}
    assert rows["seed"] == ("3", "0") and rows["algorithm.preset"] == ("gspo", "grpo")
    assert rows["optimizer.learning_rate"] == ("0.002 until step 2, then 0.01", "1e-06")
    assert rows["model.decoder"] == ("given", "null") and "warm_start" not in rows and "output" not in rows
    assert not {key for key in rows if key.startswith(("regime.", "grading.", "mesh."))}


def test_a_setting_with_line_breaks_is_quoted():
    assert setting_value_text("\n ab") == '"\\n ab"' and setting_value_text("a b") == "a b"


def test_what_was_left_out_is_counted_by_reason():
    rows = [
        {"step": 0, "experience/left_out/rows_without_reward": 3},
        {"step": 1, "grading/timeout": 2, "experience/left_out/stale": 1, "kept_fraction": 1.0, "agent/error": 0},
        {"step": 2, "grading/timeout": 1, "experience/left_out/stale": 5, "kept_fraction": 0.5},
    ]
    counts = {words.rpartition(": ")[2]: count for words, count in left_out(rows)}
    totals = {"rows without reward": "3", "timeout": "3", "stale": "5"}
    assert totals.items() <= counts.items() and len(counts) == 4 and "25.0%" in counts.values()
    assert left_out([{"step": 1, "kept_fraction": 1.0}]) == []


@pytest.mark.parametrize("options", [["training.steps=8"], [], ["optimizer.schedule=linear"]])
def test_the_command_continues_the_run(tmp_path, options):
    planned = 8 if "training.steps=8" in options else 4
    run = record_run(tmp_path / "a run", [option for option in options if "steps" not in option], planned=planned)
    purpose, command = commands(read_overview(run))[0]
    words = shlex.split(command)
    assert purpose == "continue" and words[:3] == ["python", "-m", "recjax.train"]
    config = load_config(words[4], words[5:])
    check_run_folder(config, overwrite=False)
    assert config.training.steps == (4 if config.model.run else 8)
    assert (config.model.run == str(run)) == (config.output != str(run)) == bool(options and planned == 4)


def test_a_report_that_fails_is_a_warning(tmp_path, caplog):
    run = record_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("{\n")
    try_report(run, "finished")
    assert "report.html: not written (UserError" in caplog.text and not (run / "report.html").exists()
    try_report(run, "finished", draw=lambda: 1 / 0)
    assert "ZeroDivisionError" in caplog.text


def test_given_warnings_are_those_of_the_figure():
    row = {"loss": 0.0, "reward": 0.0, "accuracy": 0.0, "effective_sample_size": 0.1, "advantage/mean_square": 0.0}
    rows = [{"step": step, "frac_reward_zero_std": 1, **row} for step in range(1, 9)]
    assert len(given_warnings(rows)) == len(warning_steps(rows)) == 2
