"""The report on numerics: its numbers by hand, gates that notice a shift, and what a cut without recorded sets does."""

import contextlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import numerics
from recjax.config import load_config
from tests.commands import ROOT
from tests.training.tiny_run import TINY, one_device

CASE = {"case": "<b>", "layout": "shared", "dtype": "float32", "sampling": [1.0, 0, 1.0, 0.0], "tokens": 3}
CASE |= {"kl": 1e-9, "largest": 2e-5, "mean": 1e-5, "mean_ratio": 1.00001, "passes": True}
CASE |= {"by_depth": [{"below": 32, "tokens": 2, "kl": 0.0, "largest": 1e-5}, {"below": 64, "tokens": 1} | CASE]}


@pytest.fixture
def file(tmp_path):
    """The config file of a run in the folder `out`."""
    path = tmp_path / "c.yaml"
    path.write_text(TINY.replace("unset", str(tmp_path / "out")))
    return path


def report_of(*cases):
    passes = all(case["passes"] is not False for case in cases)
    return {"model": "m", "device": "d", "mesh": {}, "passes": passes, "cases": cases}


def test_the_difference_by_hand():
    found = numerics.logprob_difference(np.log([0.5, 0.2]), np.log([0.5, 0.1]))
    half = np.log(2) / 2
    assert found == pytest.approx({"kl": 0.5 - half, "largest": 2 * half, "mean": half, "mean_ratio": 1.5})


def test_the_page_has_every_case_and_figure():
    page = numerics.page_of(report_of(CASE, CASE | {"passes": False}, CASE | {"passes": None}))
    assert "A gate fails." in page and "&lt;b&gt;" in page and "<b>" not in page and "data:image/png;base64," in page
    assert all(page.count(f"<td>{words}</td>") == 1 for words in ("passes", "FAILS", "not gated"))


@pytest.mark.parametrize("passes", [True, False])
def test_the_exit_status_is_that_of_the_gates(file, tmp_path, monkeypatch, capsys, passes):
    options = {"config": str(file), "engine_only": False} | dict.fromkeys(("coordinator", "processes", "process_id"))
    monkeypatch.setattr(numerics, "FLAGS", SimpleNamespace(**options))
    monkeypatch.setattr(numerics, "keep_compiled_programs", lambda: None)
    monkeypatch.setattr(numerics.hosts, "connected", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(numerics, "measure", lambda config, engine_only: report_of(CASE | {"passes": passes}))
    with contextlib.nullcontext() if passes else pytest.raises(SystemExit, match="1"):
        numerics.main(["numerics"])
    assert json.loads((tmp_path / "out" / "numerics.json").read_text())["passes"] == passes
    assert f"page: {tmp_path}/out/numerics.html" in capsys.readouterr().out


@pytest.mark.slow
def test_gates_notice_shifts_and_missing_sets(file, monkeypatch):
    config = load_config(file, ["rollout.max_completion_tokens=24"])
    with one_device():
        report = numerics.measure(config)
        score = numerics.score
        monkeypatch.setattr(numerics, "score", lambda *arguments: score(*arguments) + 0.01)
        shifted = numerics.measure(config)
    cases = {(case["case"], case["layout"]): case for case in report["cases"]}
    assert report["passes"] and len(cases) == len(report["cases"]) == 11
    assert {case["dtype"] for case in report["cases"]} == {"float32", "bfloat16"}
    for layout in ("shared", "packed"):
        assert abs(cases["cuts, recorded sets", layout]["mean_ratio"] - 1) < 1e-5
    # Without sets, the mean ratio is the probability that the cut kept, which is at least top_p.
    assert 0.8 < cases["cuts, all tokens", "shared"]["mean_ratio"] < 0.97
    assert all(case["tokens"] == sum(depth["tokens"] for depth in case["by_depth"]) for case in report["cases"])
    assert {case["passes"] for case in shifted["cases"] if case["dtype"] == "float32"} == {False, None}


@pytest.mark.slow
def test_the_command_on_a_mesh(file, tmp_path):
    letters = "model.decoder.characters=0123456789+=" + "".join(map(chr, range(0x100, 0x180)))  # enough to record ids
    settings = "mesh={data: 2, tensor: 2}", "rollout={top_k: 4, top_p: 0.9, kept_ids: 4}", letters
    command = ["-m", "benchmarks.numerics", "--config", file, *settings]
    variables = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out/numerics.json").read_text())
    assert report["passes"] and report["mesh"] == {"data": 2, "fsdp": 1, "tensor": 2}
    assert report["cases"][-1]["case"] == "scored on one device" and "page: " in done.stdout
