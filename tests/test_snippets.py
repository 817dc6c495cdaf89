"""Lines of configs and commands in every page: each is one that recjax takes."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from recjax.config import load_config
from tests.test_tutorials import PAGES as PROGRAMS
from tests.test_tutorials import ROOT, blocks, write_files

# tests/experiments/test_objectives.py has the configs of the paper index.
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "papers.md"]
PLACEHOLDERS = {"F", "FILE", "tiny.yaml"}  # for a config of the reader's
BASE = ROOT / "experiments" / "quickstart.yaml"
SNIPPETS = [
    (page, block.text) for page in PAGES for block in blocks(page) if block.language == "yaml" and not block.title
]
COMMANDS = [
    (page, line)
    for page in PAGES
    if page not in PROGRAMS  # tests/test_tutorials.py runs their commands
    for block in blocks(page)
    for line in block.text.replace("\\\n", " ").splitlines()
    if line.startswith("python -m recjax.train") and shlex.split(line)[4] not in PLACEHOLDERS
]


def name(part: Path | str) -> str:
    return part.stem if isinstance(part, Path) else re.sub(r"\W+", " ", part)[:40].strip()


def merged(base: dict, change: dict) -> dict:
    blocks = [
        key for key in base.keys() & change.keys() if isinstance(base[key], dict) and isinstance(change[key], dict)
    ]
    both = {key: merged(base[key], change[key]) for key in blocks}
    return {**base, **change, **both}


@pytest.mark.parametrize(("page", "text"), SNIPPETS, ids=name)
def test_lines_of_a_config_are_taken(page, text, tmp_path, monkeypatch):
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    base, change = yaml.safe_load(BASE.read_text(encoding="utf-8")), yaml.safe_load(text)
    task = change.get("task") or {}
    if isinstance(task, str) or task.keys() & {"file", "gsm8k", "reasoning_gym", "mixture"}:
        base |= {"task": {}, "warm_start": None}
    if change.get("model", {}).keys() & {"path", "run"}:
        base |= {"model": {}, "warm_start": None}
    if "agent" in task:
        base["rollout"]["max_context_tokens"] = 512
    if "experience" in change or "regime" in change:
        base["regime"] = {"sync_interval": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(merged(base, change)))
    load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=name)
def test_commands_are_taken(page, line):
    _, _, _, _, file, *rest = shlex.split(line, comments=True)
    load_config(ROOT / file, [part for part in rest if "=" in part and not part.startswith("--")])


def test_the_readmes_regimes_are_taken():
    """Each row of the table is overrides of the README's training command."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## One key, one regime\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| .+ \| `(.+)` \|$", section, re.MULTILINE)
    assert len(rows) == 10
    for row in rows:
        load_config(BASE, ["output=runs/other", *shlex.split(row)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page):
    for path in re.findall(r"`((?:launch|experiments|recjax)/[\w./]+)`", page.read_text(encoding="utf-8")):
        assert (Path(ROOT) / path).exists(), path
