"""The command for an accelerator, rehearsed on the CPU, and its page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import accelerator_page

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_rehearsal_finds_something_in_every_part_and_says_what_it_skipped(tmp_path):
    out = tmp_path / "rehearsal.json"
    command = [sys.executable, "-m", "benchmarks.accelerator", "--rehearsal", "--budget", "3000", "--out", str(out)]
    subprocess.run(command, check=True, cwd=REPOSITORY, env=dict(os.environ))
    result = json.loads(out.read_text())
    parts = result["parts"]
    assert not {name: found["why"] for name, found in parts.items() if "why" in found}
    failed = [place for place, _ in accelerator_page._leaves(parts) if place.endswith(".failed")]
    assert not failed
    assert parts["gpu_tests"]["skipped"] > 0 and parts["half_billion"]["update"]["flops_share"] > 0
    for ways in ("float32", "bfloat16"):
        assert all(apart["largest"] < 0.1 for apart in parts["parity"][ways].values())
    assert {"decode_graphs", "torch_a"} <= result["skipped"].keys()
    assert "half billion" in accelerator_page.page([result])


@pytest.mark.slow
def test_parts_beyond_the_budget_are_skipped_with_the_reason(tmp_path):
    out = tmp_path / "none.json"
    command = [sys.executable, "-m", "benchmarks.accelerator", "--rehearsal", "--budget", "5", "--out", str(out)]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    result = json.loads(out.read_text())
    assert not result["parts"] and "s of the budget are left" in result["skipped"]["device"]


def test_the_page_says_none_yet_until_there_is_a_file():
    assert accelerator_page.page([]) == accelerator_page.NONE_YET
    found = {"seconds": 1.0, "decode": {"bytes_share": 0.71, "round_ms": [1.5, 2.0]}, "why": "stopped after 9 s"}
    result = {"parts": {"half_billion": found}, "skipped": {"slots": "3 s of the budget are left"}}
    text = accelerator_page.page([result | {"date": "2026-11-26", "command": [], "rehearsal": False}])
    for line in ("decode.bytes_share 0.71", "decode.round_ms 1.5, 2", "why stopped after 9 s"):
        assert line in text
    assert "Skipped: slots (3 s of the budget are left)." in text
