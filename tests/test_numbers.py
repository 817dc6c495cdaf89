"""Numbers of pages that come from committed files are those of the files."""

import re
from pathlib import Path

import pandas as pd

from experiments.claims.page import TABLES, read_runs, two_runs

ROOT = Path(__file__).parents[1]


def page(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_run_that_holds_and_the_run_that_collapses():
    held, collapsed = two_runs(read_runs(TABLES["grid"])).values()
    rows = re.findall(r"^\| (\d+) \| (.+), (.+) \| (.+), (.+) \|$", page("docs/reading_a_run.md"), re.MULTILINE)
    assert len(rows) == 5
    for step, *cells in rows:
        values = [
            runs.loc[int(step), name]
            for runs in (held, collapsed)
            for name in ("evaluation/accuracy", "effective_sample_size")
        ]
        shown = [
            "–" if pd.isna(value) else f"{value:.{digits}f}" for value, digits in zip(values, (3, 2, 3, 2), strict=True)
        ]
        assert cells == shown, f"docs/reading_a_run.md, step {step}"


def test_speeds_are_those_of_the_tables():
    """The first column of docs/performance.md is the whole step's ratio in benchmarks/RESULTS.md."""
    found = {}
    for section in re.split(r"^### Shape ", page("benchmarks/RESULTS.md"), flags=re.MULTILINE)[1:]:
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 9 and (ratio := re.match(r"[\d.]+ \(", cells[5])):
                found[section[0], cells[0]] = ratio[0][:-2]
    systems = {"TRL": "trl", "Tunix": "tunix", "hand-written PyTorch": "torch_shared"}
    systems |= {"hand-written PyTorch, bfloat16": "torch_shared:bfloat16"}
    rows = re.findall(r"^\| ([a-d])[^:|]*: ([^|]+) \| ([\d.]+) \|", page("docs/performance.md"), re.MULTILINE)
    assert len(rows) == 7
    for shape, system, ratio in rows:
        assert found[shape, systems[system]] == ratio, f"docs/performance.md, {shape}: {system}"


def test_the_expected_result_of_the_quickstart():
    """README's range of accuracies contains the three seeds in the header of the config."""
    before, low, high = map(
        float, re.search(r"from (0\.\d+) to (0\.\d+)–(0\.\d+)", " ".join(page("README.md").split())).groups()
    )
    seeds = [
        tuple(map(float, pair)) for pair in re.findall(r"(0\.\d{3}) -> (0\.\d{3})", page("experiments/quickstart.yaml"))
    ]
    assert len(seeds) == 3 and abs(sum(start for start, _ in seeds) / 3 - before) < 0.005
    assert (round(min(end for _, end in seeds), 2), round(max(end for _, end in seeds), 2)) == (low, high)
