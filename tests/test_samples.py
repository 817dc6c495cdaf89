"""The page of a run's samples: everything that was kept is in it, and nothing of it is read as HTML."""

import json
import re
import shutil
import subprocess

import pytest

from recjax import samples
from recjax.samples import sample_page, write_page
from tests.training.tiny_run import TINY

HOSTILE = "</script><script>document.title='stolen'</script><img src=x onerror=\"document.title='stolen'\">"
ROW = {
    "step": 1,
    "group": "g<b>",
    "id": "g/0",
    "source": "policy",
    "question": HOSTILE,
    "prompt": f"{HOSTILE} {{{{data}}}} \u2028",
    "answer": HOSTILE,
    "text": HOSTILE,
    "reward": 0.5,
    "parts": {HOSTILE: 1.0},
    "accurate": True,
    "truncated": False,
    "version": 0,
    "tokens": [HOSTILE, "b"],
    "chosen": [1, 1],
    "probability": [0.5, 0.25],
    "probability_now": [0.25, 0.25],
    "advantage": [0.5, 0.5],
    "kept": [1, 0],
    "coefficient": [0.5, 0.0],
}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def test_the_data_comes_back_and_no_text_ends_it():
    runs = [{"name": HOSTILE, "about": "about", "rows": [ROW]}]
    page = sample_page(runs)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data) == runs
    assert page.count("<script") == 2 and "<img" not in page


def test_a_page_asks_no_network():
    page = sample_page([{"name": "run", "about": "about", "rows": [ROW]}])
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page.replace(HOSTILE, "")) and "default-src 'none'" in page


def displayed(folder, page, script=""):
    """The page's elements after a browser has run its scripts, and then `script`."""
    page = (page if isinstance(page, str) else sample_page(page)).replace(
        "</body>", f"<script>{script}</script></body>"
    )
    (folder / "page.html").write_text(page)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    command = [CHROMIUM, *options, (folder / "page.html").as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.slow
def test_a_page_compares_runs_and_unfolds_trajectories(tmp_path):
    dull = {"probability": [0.5, 0.5], "probability_now": [0.5, 0.5], "kept": [1, 1], "question": "2+2="}
    rows = [ROW | dull | {"step": 1}, ROW | {"question": "2+2=", "step": 2}, ROW | dull | {"step": 3}]
    shown = displayed(tmp_path, [{"name": "run", "about": "about", "rows": rows}])
    assert "step 2 · group" in shown and "step 3 · group" not in shown
    runs = [{"name": name, "about": "about", "rows": rows} for name in ("first", "second")]
    shown = displayed(tmp_path, runs)
    assert "first, step 2 · group" in shown and "second, step 2 · group" in shown and "pair" in shown
    apart = [ROW | {"question": "3+3=", "step": 2}, ROW | {"question": "2+2=", "step": 5}]
    shown = displayed(tmp_path, [runs[0], {"name": "third", "about": "about", "rows": apart}])
    assert "third, step 5 · group" in shown and "third, step 2 · group" not in shown
    turns = {"turns": [1, 2], "turn_rewards": [0.25, 0.5], "contexts": {"1": "cut"}, "chosen": [1, 1]}
    script = "document.querySelector('article button').click()"
    shown = displayed(tmp_path, [{"name": "run", "about": "about", "rows": [ROW | turns]}], script)
    dialog = shown.partition("<dialog")[2]
    assert "turn 1 · 1 tokens · reward 0.25 · mean advantage 0.5 · 0 clipped or masked" in dialog
    assert "turn 2 · 1 tokens · reward 0.5 · mean advantage 0.5 · 1 clipped or masked" in dialog and "cut" in dialog


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.slow
def test_a_followed_page_shows_the_newest_step(tmp_path):
    dull = {"probability": [0.5, 0.5], "probability_now": [0.5, 0.5], "kept": [1, 1]}
    rows = [ROW | {"step": 1}, ROW | dull | {"step": 2}, ROW | dull | {"step": 3}]
    run = {"name": "run", "about": "about", "rows": rows, "follows": True}
    shown = displayed(tmp_path, [run])
    assert "step 3 · group" in shown and "in training, this page stays fresh" in shown
    assert "stays fresh" not in displayed(tmp_path, [run | {"follows": False}]).partition("<script")[0]
    for was_newest, step in ((False, 2), (True, 3)):
        before = json.dumps(["0 2", "", "", "", "none", "", was_newest])
        page = sample_page([run]).replace('"use strict";', f"sessionStorage.setItem('recjax run', '{before}');")
        assert f"step {step} · group" in displayed(tmp_path, page)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.slow
def test_a_browser_shows_texts_as_texts(tmp_path):
    rows = [ROW, ROW | {"id": "g/1", "accurate": None}]
    shown = displayed(tmp_path, [{"name": "run", "about": "about", "rows": rows}])
    assert "<title>run</title>" in shown and "<img" not in shown.partition("</script>")[0].partition("<main")[2]
    assert shown.count("<article") == 2 and 'class="left"' in shown and "2 completions in 1 groups" in shown


def test_a_page_follows_a_run_until_it_ends(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(TINY)
    folder = tmp_path / "samples" / "training"
    folder.mkdir(parents=True)
    page = tmp_path / "page.html"
    looks, seen = [], []

    def keep_another(seconds):
        """The first look finds no completions, and the third finds nothing new."""
        seen.append(page.stat().st_mtime_ns if page.exists() else 0)
        looks.append(len(looks))
        if len(looks) != 2:
            (folder / f"{len(looks):08d}.jsonl").write_text(json.dumps(ROW) + "\n")

    monkeypatch.setattr(samples.time, "sleep", keep_another)
    monkeypatch.setattr(samples, "is_finished", lambda config: len(looks) == 4)
    written = []
    original = samples.write_page
    monkeypatch.setattr(samples, "write_page", lambda *a, **k: written.append(k["follows"]) or original(*a, **k))
    assert samples.follow([tmp_path], page) == 3
    assert written == [True, True, False] and seen[0] == 0 < seen[1] == seen[2] < seen[3]
    assert '"follows"' not in page.read_text()


def test_folders_without_kept_completions_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no config.yaml"):
        write_page([tmp_path], tmp_path / "page.html")
    (tmp_path / "config.yaml").write_text(TINY)
    with pytest.raises(ValueError, match="holds no completions; .* samples.every"):
        write_page([tmp_path], tmp_path / "page.html")
    folder = tmp_path / "samples" / "training"
    folder.mkdir(parents=True)
    (folder / "00000001.jsonl").write_text(json.dumps(ROW) + "\n{\n")
    with pytest.raises(ValueError, match="00000001.jsonl: line 2: "):
        write_page([tmp_path], tmp_path / "page.html")
    (folder / "00000001.jsonl").write_text(json.dumps(ROW) + "\n")
    assert write_page([tmp_path], tmp_path / "page.html") == 1 and (tmp_path / "page.html").is_file()
