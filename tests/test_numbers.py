"""Numbers of pages that come from committed files are those of the files."""

import itertools
import re
import runpy
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest

from experiments.claims.page import TABLES, read_runs, two_runs
from recjax.algorithms.presets import PRESETS, build_algorithm
from recjax.analysis.compare import RESAMPLES
from recjax.config import OptimizerConfig, load_config
from recjax.hub import model_card
from recjax.planning.dry_run import dry_run
from recjax.planning.targets import ACCELERATORS, CHIPS, GPUS

ROOT = Path(__file__).parents[1]


def page(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_run_that_holds_and_the_run_that_collapses():
    held, collapsed = two_runs(read_runs(TABLES["grid"])).values()
    rows = re.findall(r"^\| (\d+) \| (.+), (.+) \| (.+), (.+) \|$", page("docs/debugging.md"), re.MULTILINE)
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
        assert cells == shown, f"docs/debugging.md, step {step}"


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head; of code and emphasis the text."""
    lines = re.split(rf"^#+ {re.escape(heading)}\n", text, flags=re.MULTILINE)[1].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[first + 2 :])
    return [[cell.strip(" `*") for cell in line.strip("|").split("|")] for line in table]


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def test_speeds_of_serving_are_those_of_the_load_test():
    costs = next(row for row in rows(page("benchmarks/RESULTS.md"), "Under load") if row[0].startswith("cost"))
    low, high = (numbers(cell)[0] for cell in costs[1:])
    section = page("benchmarks/RESULTS.md").split("## Under load\n")[1]
    wide = float(re.search(r"cost is (\d+) %, 16 to 28", section)[1])
    stated = re.search(r"costs (\d+) to (\d+) % .* and (\d+) %", " ".join(page("docs/serving.md").split()))
    assert tuple(map(float, stated.groups())) == (low, high, wide)


def test_costs_of_old_data_are_those_of_the_measurements():
    text = page("benchmarks/RESULTS.md")
    table = {row[0]: [numbers(cell)[-1] for cell in row[1:4]] for row in rows(text, "Old, late and foreign data")}
    fresh = next(values for name, values in table.items() if name.startswith("on-policy"))
    for name, low, high in (("rewards ten steps late", 1, 2), ("three times the data reuse", 3, 6)):
        late = next(values for key, values in table.items() if key.startswith(name))
        lost = [100 * (one - other) for one, other in zip(fresh, late, strict=True)]
        assert low - 0.5 <= min(lost) and max(lost) <= high + 0.6, name
    words = " ".join(page("docs/regimes.md").split())
    assert "late cost one or two points of accuracy, and a third of the samples costs three to six" in words


def test_the_papers_models_are_those_of_the_measurements():
    """docs/devices.md has the smallest slices of benchmarks/RESULTS.md, rounded to a digit."""
    measured = {(row[0], row[3]): row[-2:] for row in rows(page("benchmarks/RESULTS.md"), "The paper's models")}
    shown = rows(page("docs/devices.md"), "The paper's models")
    assert len(shown) == 4
    for model, place, mesh, peaks in shown:
        found = measured[model.partition(",")[0], f"{place}, {mesh}"]
        assert numbers(peaks) == [round(numbers(cell)[0], 1) for cell in found], model


def test_devices_are_those_of_the_planner():
    text = page("docs/devices.md")
    listed = {row[0]: row for row in rows(text, "Does it fit?")}
    assert listed.keys() == CHIPS.keys()
    for name, chip in CHIPS.items():
        _, memory, slices = listed[name]
        assert numbers(memory) == [ACCELERATORS[chip.accelerator].usable], name
        same = re.fullmatch(r"as (\w+)", slices)
        assert tuple((listed[same[1]][2] if same else slices).split()) == tuple(chip.slices), name
    kinds = text.split("Kinds are ")[1].split(";")[0]
    assert tuple(re.findall(r"`([\w-]+)`", kinds)) == GPUS


def test_activations_are_those_of_the_recomputation_table():
    shown = numbers(page("docs/memory.md").split("activations take")[1].split("\n\n")[0])
    measured = rows(page("benchmarks/RESULTS.md"), "Recomputation in the backward pass")[0][1:]
    assert shown == [round(float(cell), 1) for cell in measured]


@pytest.mark.campaign
def test_memory_of_updates_is_that_of_dry_runs(smollm2_folder):
    section = page("benchmarks/RESULTS.md").split("## Recomputation in the backward pass\n")[1].split("\n## ")[0]
    shown = re.findall(r"^\| (unchanged|`.*`) \| ([\d.]+) \| [\d.]+ \|$", section, re.MULTILINE)
    assert len(shown) == 4
    for changes, gibibytes in shown:
        overrides = [] if changes == "unchanged" else re.split(r" (?=\w+\.)", changes.strip("`"))
        path = ROOT / "experiments/smollm2_arithmetic.yaml"
        config = load_config(path, [f"model.path={smollm2_folder}", "model.dtype=float32", *overrides])
        of_update = sum(item.bytes for item in dry_run(config).memory if item.phase == "update")
        assert round(of_update / 2**30, 2) == float(gibibytes), changes


def test_resamples_of_intervals():
    shown = re.search(r"\(([\d,]+) resamples; (\d+) for quantiles\)", page("docs/evaluation.md"))
    assert shown[1] == f"{RESAMPLES:,}" and f"resamples={shown[2]})" in page("recjax/analysis/samples.py")


def test_counts_of_faults_add_up():
    text = page("docs/faults.md")
    (every,) = re.findall(r"^Outcomes of (\d+) faults:$", text, re.MULTILINE)
    counts = [int(count) for _, count in rows(text, "Fault-injection tests")]
    assert len(counts) == 3 and int(every) == sum(counts)


def test_limits_of_the_server_are_its_flags():
    source = page("recjax/serve.py")
    defaults = dict(re.findall(r'DEFINE_(?:integer|float)\(\s*"(\w+)", ([\d*_.]+),', source))
    for flags, default, _ in rows(page("docs/serving.md"), "Limits"):
        names, values = re.findall(r"--(\w+)", flags), default.replace(" MiB", " * 2**20").split(", ")
        for name, value in zip(names, values, strict=True):
            if name in defaults:
                left, right = (
                    np.prod([2**20 if one == "2**20" else float(one) for one in re.split(r" \* ", text)])
                    for text in (defaults[name], value)
                )
                assert left == right, name


def test_rates_stand_on_one_page_and_are_the_configs():
    text = " ".join(page("docs/fine_tuning.md").split())
    default = re.search(r"default `optimizer.learning_rate`, ([\de.-]+),", text)[1]
    assert float(default) == OptimizerConfig().learning_rate
    quoted = dict(re.findall(r"`(experiments/\w+\.yaml)`\]\([^)]*\) at ([\de.-]+\d)", text))
    assert len(quoted) == 3
    for name, rate in quoted.items():
        assert float(rate) == load_config(ROOT / name).optimizer.learning_rate, name
    for name in ("docs/debugging.md", "docs/tutorials/add_a_loss.md"):
        section = page(name).split("fine_tuning.md#which-learning-rate")
        assert len(section) == 2, f"{name} sends its readers to the table"
        assert not re.search(r"\b\d(?:\.\d)?e-\d", section[0].splitlines()[-1] + section[1].splitlines()[0]), name


def signed(text: str) -> list[float]:
    return [float(number.replace("−", "-")) for number in re.findall(r"[−+]\d\.\d+", text)]


def test_costs_of_regimes_are_those_of_the_study():
    """docs/regimes.md rounds docs/claims/regimes.md: what REINFORCE loses, and what a clip wins back."""
    study = {}
    for column, *cells in rows(page("docs/claims/regimes.md"), "Verdicts"):
        study[column] = [signed(cell)[0] for cell in cells[:2]]
    quoted = {
        "stale, up to 19 steps": ["age 20"],
        "stale, up to 49 steps": ["age 50"],
        "late rewards": ["rewards 0 to 10 rounds late", "rewards 0 to 40 rounds late"],
        "replayed twice": ["replayed twice"],
        "replayed up to 8 times": ["replayed up to 8 times"],
        "8 updates of each batch": ["8 updates of each batch"],
        "another run's store": ["store of another run"],
    }
    shown = {row[0]: row[2] for row in rows(page("docs/regimes.md"), "Choose an algorithm")}
    for name, columns in quoted.items():
        measured = [study[column][place] for place in (0, 1) for column in columns]
        assert signed(shown[name]) == pytest.approx(measured, abs=0.0051), name


def test_own_loop_has_the_lines_that_pages_promise():
    lines = len(page("experiments/own_loop.py").splitlines())
    for name in ("README.md", "docs/architecture.md"):
        (promised,) = re.findall(r"whole run in (\d+)\s+lines", page(name))
        assert 0.9 * int(promised) <= lines <= int(promised), name


def test_counts_of_algorithms_are_those_of_the_catalog():
    with mock.patch("setuptools.setup") as called:
        runpy.run_path(str(ROOT / "setup.py"))
    texts = {path: page(path) for path in ("README.md", "CITATION.cff", "mkdocs.yml", "CONTRIBUTING.md")}
    texts |= {str(path.relative_to(ROOT)): page(path) for path in (ROOT / "docs").rglob("*.md")}
    texts["setup.py"] = called.call_args.kwargs["description"]
    stated = {}
    for name, text in texts.items():
        for before, count, more in re.findall(r"([\w, ]*?)(?:and )?\b(\d+) (more )?(?:algorithms|presets)\b", text):
            stated[name] = int(count) + (len(before.split(",")) if more else 0)
    assert stated == dict.fromkeys(("README.md", "docs/comparison.md", "setup.py"), len(PRESETS))


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


def test_the_card_names_the_authors_of_the_citation():
    authors = re.findall(r"family-names: (.+), given-names: (.+)\}", page("CITATION.cff"))
    card = " ".join(model_card._PAPER.split())
    assert f"author={{{' and '.join(map(', '.join, authors))}}}" in card and len(authors) == 8


def test_the_page_lists_algorithms_without_logprobs():
    listed = re.search(r"read none\s\(([^)]+)\)\saccept `unneeded`", page("docs/experience.md"))[1]
    free = [name for name in PRESETS if not build_algorithm(name, {}).needs_behavior_logprobs]
    assert len(re.split(", | and ", " ".join(listed.split()))) == len(free)
