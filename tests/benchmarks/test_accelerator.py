"""The command for an accelerator, rehearsed on the CPU, and its page."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from benchmarks import accelerator, accelerator_page, first_step
from tests.commands import Command

REPOSITORY = Path(__file__).parents[2]


# In a rehearsal the other parts repeat one of these, as the next test says.
REHEARSED = ["device", "gpu_tests", "parity", "half_billion", "half_billion_packed", "decode_graphs", "torch_a"]
REHEARSED += ["slots", "decoding", "attention", "prediction", "quickstart", "first_step_quickstart", "update_wide"]
REHEARSED += ["update_kernels"]
REPEATED = {f"one_and_a_half_billion{way}": f"half_billion{way}" for way in ("", "_packed")}
REPEATED |= dict.fromkeys(("shape_b", "shape_c", "shape_d"), "shape_a") | dict.fromkeys(
    ("torch_c", "torch_d"), "torch_a"
)
REPEATED["update_long"] = "update_wide"
# Rehearsed in tests/benchmarks/test_run.py, or by the same function with another config, or for itself.
ELSEWHERE = {*(f"flags_{name}" for name in accelerator.XLA_FLAGS)}
ELSEWHERE |= {"update_scanned", "shape_a", "shape_g", "first_step_smollm2", "claims"}


def begun(command, **options):
    """A part's process: of the first part as the command starts it, of the others forked, which is sooner."""
    if "device" in command:
        return subprocess.Popen(command, **options)
    return Command(command[1:], **options)


@pytest.mark.campaign
def test_a_rehearsal_covers_every_part_and_names_skips(tmp_path, monkeypatch):
    out = tmp_path / "rehearsal.json"
    asked = {"rehearsal": True, "budget": 3000.0, "only": REHEARSED, "out": str(out), "table": None, "minutes": 5.0}
    asked = types.SimpleNamespace(**asked, model=["model.attention=plain", "model.joined_projections=false"])
    monkeypatch.setattr(accelerator, "FLAGS", asked)
    monkeypatch.setattr(accelerator, "subprocess", types.SimpleNamespace(**vars(subprocess) | {"Popen": begun}))
    accelerator.main([])
    result = json.loads(out.read_text())
    parts = result["parts"]
    assert not {name: found["why"] for name, found in parts.items() if "why" in found}
    failed = [place for place, _ in accelerator_page._leaves(parts) if place.endswith(".failed")]
    assert not failed
    assert parts["first_step_quickstart"]["full"]["first_step_seconds"] > 0
    assert parts["gpu_tests"]["skipped"] > 0 and parts["half_billion"]["update"]["flops_share"] > 0
    for ways in ("float32", "bfloat16"):
        assert all(apart["largest"] < 0.1 for apart in parts["parity"][ways].values())
    assert {"decode_graphs", "torch_a"} <= result["skipped"].keys()
    assert "half billion" in accelerator_page.page([result])


@pytest.mark.campaign
def test_a_rehearsal_of_the_other_parts_would_repeat_these(monkeypatch):
    from benchmarks.accelerator_parts import PARTS

    monkeypatch.setattr(accelerator, "FLAGS", types.SimpleNamespace(rehearsal=True, table=None, minutes=5.0, model=[]))
    everything = accelerator.parts()
    assert everything.keys() == {*REHEARSED, *REPEATED, *ELSEWHERE}
    for name, other in REPEATED.items():
        ours, theirs = (everything[one].command(Path("findings")) for one in (name, other))
        if ours[1] == "benchmarks.accelerator_parts":
            assert PARTS[ours[2]].func is PARTS[theirs[2]].func
        else:
            assert ours == theirs


@pytest.mark.campaign
def test_parts_beyond_the_budget_are_skipped_with_the_reason(tmp_path):
    out = tmp_path / "none.json"
    command = [sys.executable, "-m", "benchmarks.accelerator", "--rehearsal", "--budget", "5", "--out", str(out)]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    result = json.loads(out.read_text())
    assert not result["parts"] and "s of the budget are left" in result["skipped"]["device"]


def test_the_first_step_is_the_first_complete_row(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert not first_step.has_step(file)
    for text in ("", '{"step": 0}\n', '{"step": 0}\n{"step'):
        file.write_text(text)
        assert not first_step.has_step(file)
    file.write_text('{"step": 0}\n{"step": 1}\n')
    assert first_step.has_step(file)


def test_the_page_says_none_without_a_file():
    assert accelerator_page.page([]) == accelerator_page.NONE_YET
    found = {"seconds": 1.0, "decode": {"bytes_share": 0.71, "round_ms": [1.5, 2.0]}, "why": "stopped after 9 s"}
    uneven = {"sequences": 2048, "slots": 1024, "tokens_per_second": 4e4, "limit_tokens_per_second": 1e5}
    uneven |= {"uneven_bytes_share": 0.4, "cache_share_of_bytes": 0.75, "tokens": 1}
    decoding = {"seconds": 2.0, "half_billion_2048": uneven}
    result = {
        "parts": {"half_billion": found, "decoding": decoding},
        "skipped": {"slots": "3 s of the budget are left"},
    }
    text = accelerator_page.page([result | {"date": "2026-11-26", "command": [], "rehearsal": False}])
    for line in ("decode.bytes_share 0.71", "decode.round_ms 1.5, 2", "why stopped after 9 s"):
        assert line in text
    assert "Skipped: slots (3 s of the budget are left)." in text
    assert "| half billion | 2,048 | 1,024 | 40,000 | 100,000 | 40% | 75% |" in text
