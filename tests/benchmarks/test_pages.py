"""Pages about speed on CPUs have the numbers of the committed files, and no others."""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from benchmarks import pages
from benchmarks.tables import kind_of_cpu

REMEDY = "run python -m benchmarks.pages"
OLD = {"cpu": "AMD EPYC", "cores": 2, "date": "2026-01-01T00:00:00+00:00"}
EPYC = OLD | {"family": "25 17", "vector_units": ["avx2", "avx512f", "avx512_bf16"]}
XEON = {"cpu": "Intel(R) Xeon(R) Processor @ 2.60GHz", "family": "6 106", "vector_units": ["avx2", "avx512f"]}
XEON |= {"cores": 2, "physical_cores": 1, "date": "2026-01-02T00:00:00+00:00"}


def result(machine: dict, steps: dict[str, list[float]], shape: str = "a", others: str = "stop") -> dict:
    """A file of benchmarks.run with whole steps of some systems, whose memory is as many bytes as their first step."""
    rows = []
    for system, seconds in steps.items():
        row = {"system": system, "phase": "step", "rounds": seconds, "versions": {"jax": "1"}}
        rows.append(row | {"peak_memory_bytes": seconds[0]})
    return {"shape": shape, "machine": machine, "others": others, "rows": rows}


def block(page: str, mark: str) -> str:
    """The text between a page's marks, without the empty lines around it."""
    text = (pages.ROOT / page).read_text(encoding="utf-8")
    assert text.count(f"<!-- {mark} -->") == text.count(f"<!-- end of {mark} -->") == 1
    return text.partition(f"<!-- {mark} -->")[2].partition(f"<!-- end of {mark} -->")[0]


BLOCKS = pages.blocks(pages.read_results())


@pytest.mark.parametrize(("page", "mark"), BLOCKS)
def test_pages_have_the_numbers_of_the_files(page, mark):
    assert block(page, mark) == f"\n\n{BLOCKS[page, mark]}\n", REMEDY


def test_the_picture_shows_the_files():
    found = pages.comparisons(pages.read_results())
    assert Image.open(pages.PICTURE).text["Description"] == pages.picture_text(found), REMEDY
    drawn = [text.get_text() for axes in pages.chart(found).axes for text in axes.texts]
    assert sorted(drawn) == sorted(f"{one.step:.2f}" for one in found) and drawn


@pytest.mark.parametrize(("page", "heading"), [("docs/performance.md", "Results"), ("docs/comparison.md", "Speed")])
def test_no_ratio_stands_outside_the_marks(page, heading):
    text = (pages.ROOT / page).read_text(encoding="utf-8")
    section = re.split(rf"^## {heading}\n", text, flags=re.MULTILINE)[1].partition("\n## ")[0]
    outside = re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->", "", section, flags=re.DOTALL)
    assert not re.findall(r"\d\.\d|\d ?%", outside)


def test_no_page_claims_a_lead_without_a_cpu():
    """Which system is ahead depends on the CPU; the tables name each."""
    claim = re.compile(r"(faster|quicker|less time|more tokens) than [^.|]{0,40}(torch|TRL|Tunix|transformers)", re.I)
    paths = [pages.ROOT / "README.md", pages.ROOT / "setup.py", *(pages.ROOT / "docs").rglob("*.md")]
    claims = [f"{path.name}: {found[0]}" for path in paths for found in claim.finditer(path.read_text("utf-8"))]
    assert claim.search("faster than a PyTorch loop") and not claims


def test_writing_pages_again_changes_nothing(tmp_path):
    written = {page for page, _ in BLOCKS}
    for page in written:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        text = (pages.ROOT / page).read_text(encoding="utf-8")
        (tmp_path / page).write_text(text.replace("AMD EPYC, family 25", "hand-written"), encoding="utf-8")
    shutil.copytree(pages.RESULTS, tmp_path / "results")
    pages.main(tmp_path / "results", tmp_path)
    for page in written - {"benchmarks/RESULTS.md"}:
        assert (tmp_path / page).read_bytes() == (pages.ROOT / page).read_bytes()
    assert (tmp_path / "docs/benchmarks.png").stat().st_size > 1000


def test_ratios_are_of_rounds_and_worst_first():
    files = {
        "a_epyc.json": result(
            EPYC, {"recjax": [2.0, 4.0, 5.0], "torch_shared": [3.0, 4.0, 20.0], "recjax_gaps": [1.0] * 3}
        ),
        "c_xeon.json": result(XEON, {"recjax": [2.0], "torch_shared": [1.0], "trl": [5.0]}, "c"),
    }
    found = pages.comparisons(files)
    assert [(one.file, one.system) for one in found] == [
        ("c_xeon.json", "torch_shared"),
        ("a_epyc.json", "torch_shared"),
        ("c_xeon.json", "trl"),
    ]
    np.testing.assert_allclose(found[1].ratios["step"], [1.5, 1.0, 4.0])
    assert found[1].memory == 1.5
    lines = pages.speed_table(found).splitlines()[2:]
    assert "0.50 (0.50–0.50) |" in lines[0] and "1.50 (1.00–4.00) |" in lines[1] and "2.50" in lines[2]
    by_cpu = pages.speed_by_cpu(found).splitlines()
    assert by_cpu[0] == "| CPU | hand-written PyTorch | TRL | measured |"
    assert by_cpu[2:] == [
        "| Intel Xeon, family 6, model 106, AVX-512, 2 CPUs of 1 core | 0.50 (c) | 2.50 (c) | 2026-01-02 |",
        "| AMD EPYC, family 25, model 17, AVX-512 with BF16, 2 cores | 1.50 (a) |  | 2026-01-01 |",
    ]


def test_waiting_systems_and_older_files_are_not_compared():
    newer = EPYC | {"date": "2026-02-01T00:00:00+00:00"}
    files = {
        "a_1.json": result(newer, {"recjax": [1.0], "torch_shared": [2.0]}),
        "a_2.json": result(EPYC, {"recjax": [1.0], "torch_shared": [3.0]}),
        "a_3.json": result(newer, {"recjax": [1.0], "trl": [4.0]}, others="wait"),
        "e_4.json": result(newer, {"recjax": [1.0], "trl": [4.0]}, shape="e"),
    }
    assert [one.file for one in pages.comparisons(files)] == ["a_1.json"]
    del files["a_3.json"]["others"]  # files of before there was a choice
    assert [one.file for one in pages.comparisons(files)] == ["a_1.json"]


def test_waiting_is_compared_with_stopping():
    files = {
        "a_1.json": result(EPYC, {"recjax": [1.0, 2.0, 3.0], "trl": [1.0]}),
        "a_2.json": result(EPYC, {"recjax": [3.0, 5.0, 4.0], "torch": [1.0]}, others="wait"),
        "a_3.json": result(XEON, {"recjax": [9.0]}, others="wait"),
    }
    (line,) = pages.waiting_table(files).splitlines()[2:]
    assert line.endswith("| a | recjax | 2.00 (1.00–3.00) | 4.00 (3.00–5.00) | 2.00 |")
    assert pages.waiting_table({"a_1.json": files["a_1.json"]}) == pages.NONE_YET


def test_bfloat16_is_faster_slower_or_neither():
    files = {
        "a.json": result(EPYC, {"recjax": [3.0, 2.0], "recjax:bfloat16": [2.0, 1.0]}),
        "c.json": result(EPYC, {"recjax": [3.0, 2.0], "recjax:bfloat16": [2.0, 3.0]}, "c"),
        "x.json": result(XEON, {"recjax": [3.0, 2.0], "recjax:bfloat16": [4.0, 4.0]}),
    }
    found = pages.float32_next_to_bfloat16(files)
    assert [one.file for one in found] == ["x.json", "c.json", "a.json"]
    lines = pages.bfloat16_verdicts(found).splitlines()[2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == ["slower", "neither in every round", "faster"]
    assert "Xeon" in lines[0] and "c 1.08 (0.67–1.50)" in lines[1] and "a 1.75 (1.50–2.00)" in lines[2]


def test_kinds_of_cpus_have_family_and_vector_units():
    assert kind_of_cpu(OLD) == "AMD EPYC, 2 cores"
    assert kind_of_cpu(EPYC | {"vector_units": ["avx2"]}) == "AMD EPYC, family 25, model 17, AVX2, 2 cores"
    sapphire = XEON | {"vector_units": ["avx512f", "avx512_bf16", "amx_tile"], "physical_cores": 2}
    assert kind_of_cpu(sapphire) == "Intel Xeon, family 6, model 106, AVX-512 and AMX with BF16, 2 cores"


def test_without_files_pages_say_so(tmp_path):
    (tmp_path / "h100.json").write_text(json.dumps({"parts": {}}))
    assert pages.read_results(tmp_path) == {}
    assert set(pages.blocks({}).values()) == {pages.NONE_YET}
