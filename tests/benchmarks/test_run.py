"""The benchmark's driver on the toy shape, and what is made of a run."""

import json
import signal
import subprocess
import time
import types

import numpy as np
import psutil
import pytest

from benchmarks import accelerator, run, tables
from benchmarks.costs import decode_bytes, shares, work_of
from benchmarks.rows import make_rows
from benchmarks.systems import named
from tests import commands

REHEARSAL = types.SimpleNamespace(rehearsal=True, table=None, minutes=5.0)


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    """Of the rehearsal of benchmarks.accelerator's part for shape a, with two rounds and a system that is not there."""
    out = tmp_path_factory.mktemp("run") / "toy.json"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(accelerator, "FLAGS", REHEARSAL)
        part = accelerator.parts()["shape_a"]
    more = ["--systems", "recjax:bfloat16,trl", "--python", "trl=/no/such/python", "--repeats", "2"]
    done = commands.run([*part.command(out), *more])
    assert done.returncode == 0, done.stderr
    whole = json.loads(out.read_text())
    assert part.read(out, "") == {name: whole[name] for name in ("rows", "skipped", "checks", "peaks", "notes")}
    return whole


@pytest.mark.campaign
def test_recjax_alone_fills_the_rows(result):
    rows = {row["phase"]: row for row in result["rows"]}
    expected = {"step", "generate", "grade", "update", "prefill", "decode", "rescore", "checkpoint", "weight_copy"}
    assert rows.keys() == expected | {"behavior_logprobs"}
    step = rows["step"]
    assert 0 < step["seconds"]["min"] <= step["seconds"]["median"] <= step["seconds"]["max"] and step["first_seconds"]
    assert step["tokens"] == [64, 64] and len(step["rounds"]) == step["repeats"] == 2
    np.testing.assert_allclose(step["tokens_per_second"], np.median(64 / np.array(step["rounds"])))
    parts = sum(np.array(rows[phase]["rounds"]) for phase in ("generate", "grade", "update"))
    assert (parts <= step["rounds"]).all()
    assert step["peak_memory_bytes"] > 2**20 and step["precision"] == "bfloat16" and "jax" in step["versions"]
    assert rows["update"]["flops_share"] > 0 and rows["decode"]["bytes_share"] is not None
    assert result["peaks"]["bfloat16"]["flops"] > 1e8 and len(result["other_load"]) == 3
    assert "config" not in result["notes"]["recjax:bfloat16"]


@pytest.mark.campaign
def test_a_system_without_start_is_skipped_with_reason(result):
    assert "/no/such/python" in result["skipped"]["trl"]
    assert "Left out: trl" in tables.tables([result])


@pytest.mark.campaign
def test_without_checks_each_system_draws_its_weights(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(accelerator, "FLAGS", REHEARSAL)
    part = accelerator.parts()["shape_g"]
    systems = ["--systems", "recjax:bfloat16,torch,transformers", "--repeats", "2"]
    done = commands.run([*part.command(tmp_path / "g.json"), *systems])
    assert done.returncode == 0, done.stderr
    found = part.read(tmp_path / "g.json", "")
    assert found["checks"] == {} and not found["skipped"]
    assert {row["system"] for row in found["rows"] if row["phase"] == "step"} == set(systems[1].split(","))
    result = json.loads((tmp_path / "g.json").read_text())
    assert result["given"]["is_drawn"] and "agreement" not in tables.tables([result])


def test_an_unknown_system_is_refused():
    with pytest.raises(ValueError, match="'torhc': name one of recjax, "):
        named("torhc")
    with pytest.raises(ValueError, match="'torch:float8'"):
        named("torch:float8")


def test_all_other_systems_stop_while_one_works(monkeypatch):
    """Each system is a shell that started another program."""
    shells = [subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) for _ in range(2)]
    workers = {}
    for name, shell in zip("ab", shells, strict=True):
        workers[name] = run.Worker.__new__(run.Worker)
        workers[name]._process = shell

    def states(name: str) -> list[bool]:
        process = psutil.Process(workers[name]._process.pid)
        return [each.status() == psutil.STATUS_STOPPED for each in (process, *process.children(recursive=True))]

    def stopped(name: str) -> list[bool]:
        """Whether each process is stopped, once two looks agree: a busy machine delivers signals late."""
        before = None
        now = states(name)
        while now != before:
            time.sleep(0.2)
            before, now = now, states(name)
        return now

    try:
        while not all(psutil.Process(shell.pid).children() for shell in shells):
            time.sleep(0.01)
        monkeypatch.setattr(run, "FLAGS", types.SimpleNamespace(others="stop"))
        with run.alone(workers, "a"):
            assert stopped("a") == [False, False] and stopped("b") == [True, True]
        assert stopped("b") == [False, False]
        monkeypatch.setattr(run, "FLAGS", types.SimpleNamespace(others="wait"))
        with run.alone(workers, "a"):
            assert stopped("b") == [False, False]
    finally:
        for worker in workers.values():
            worker.send(signal.SIGKILL)
            worker.close()
    run.Worker.send(workers["a"], signal.SIGSTOP)  # it has ended, which is no error


def fake_rows() -> list[dict]:
    """Two systems, of which the second takes twice and four times as long; a warm-up before."""
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 2}
    config |= {"intermediate_size": 3, "vocab_size": 5, "head_dim": 2}
    shape = {"prompts": 1, "prompt_tokens": 2, "rows": 2}

    def answers(factors: list[float]) -> dict:
        step = {
            number: {"seconds": 9.0 * factor, "tokens": 6, "inside": {"generate": 4.0 * factor}, "rest": "update"}
            for number, factor in zip((-1, 0, 1), factors, strict=True)
        }
        return {"step": step, "prefill": {number: {"seconds": 1.0} for number in step}}

    about = {label: {"versions": {}, "notes": {}} for label in ("recjax", "torch")}
    measured = {"recjax": {"flops": 100.0, "bytes": 50.0}, "torch": {"flops": 10.0, "bytes": 500.0}}
    given = {"recjax": answers([100, 1, 1]), "torch": answers([100, 2, 4])}
    rows, peaks = make_rows("a", shape, config, about, measured, given)
    assert peaks["float32"]["flops"] == 100 and peaks["float32"]["bytes"] == 500 and peaks["bfloat16"] == {}
    return rows


def test_rows_exclude_warm_up_and_separate_parts():
    rows = {(row["system"], row["phase"]): row for row in fake_rows()}
    assert rows["torch", "step"]["rounds"] == [18, 36] and rows["torch", "step"]["first_seconds"] == 900
    assert rows["torch", "step"]["third_seconds"] == 36
    assert rows["torch", "update"]["rounds"] == [10, 20]
    assert rows["torch", "decode"]["rounds"] == [7, 15]
    assert rows["recjax", "generate"]["tokens_per_second"] == 1.5


def test_ratios_are_of_one_round():
    rows = {(row["system"], row["phase"]): row for row in fake_rows()}
    assert tables._ratio(rows["recjax", "step"], rows["torch", "step"]) == "3.00 (2.00–4.00)"
    # Where completions differ in length, it is tokens a second that are compared.
    theirs = rows["torch", "step"] | {"tokens": [12, 12]}
    assert tables._ratio(rows["recjax", "step"], theirs) == "1.50 (1.00–2.00)"


def test_least_work_by_hand():
    """One layer of 2 × (2·2 + 2·2) + 3·2·3 = 34 weights, head of 10; 1 prompt of 2 tokens, 2 rows of 3."""
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 2}
    config |= {"intermediate_size": 3, "vocab_size": 5, "head_dim": 2}
    work = work_of({"prompts": 1, "prompt_tokens": 2, "rows": 2}, config, "bfloat16", 6)
    pairs_of_completions = 2 * sum(2 + own for own in (1, 2, 3))
    assert work["update"].flops == 3 * (2 * 34 * (2 + 6) + 2 * 10 * 6 + 4 * 2 * (3 + pairs_of_completions))
    assert work["decode"].flops == 2 * (34 + 10) * 6 + 4 * 2 * pairs_of_completions
    assert work["decode"].bytes == 2 * sum(34 + 10 + 2 * 2 * (2 + 2 * own) for own in (0, 1, 2))
    assert shares(work["decode"], 2.0, {"flops": 1.0, "bytes": 1.0})["bytes_share"] == work["decode"].bytes / 2
    even = decode_bytes({"prompt_tokens": 2}, config, "bfloat16", np.array([[3, 3]]))
    assert sum(even) == work["decode"].bytes
    # A row of 1 token reads none of its own, one of 4 tokens 1 + 2 + 3; the prompt of 2 is read 4 times.
    assert decode_bytes({"prompt_tokens": 2}, config, "bfloat16", np.array([[1, 4]])) == (2 * 4 * 44, 2 * 4 * (8 + 6))


def test_tables_go_between_the_marks_and_nowhere_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables -->\nold\n<!-- end of tables -->\nafter\n")
    for _ in range(2):
        tables.put_into_page(str(page), "tables", "new\n")
    assert page.read_text() == "before\n<!-- tables -->\n\nnew\n\n<!-- end of tables -->\nafter\n"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="has no lines"):
        tables.put_into_page(str(page), "tables", "new\n")


@pytest.mark.campaign
def test_tables_of_a_run_have_equal_rows(result):
    text = tables.tables([result])
    widths = [
        line.count("|") for line in text.splitlines() if line.startswith("| whole step") or "median seconds" in line
    ]
    assert len(set(widths)) == 1 and text.count("### Shape toy") == 1


def test_a_command_keeps_no_folders():
    given = ["--python", "torch=/x/bin/python3,trl=/y z/bin/python", "--out", "/x/a.json", "--recjax=a=1,b=x/y"]
    kept = ["--python", "torch=python3,trl=python", "--out", "a.json", "--recjax=a=1,b=x/y"]
    assert run.without_folders(given) == kept
