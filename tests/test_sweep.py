"""Sweeps: what a file expands to, what is refused, what a stopped or failed run leaves."""

import contextlib
import json
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest
import yaml

import recjax
from recjax.analysis import sweeps as sweep
from recjax.analysis.compare import final
from recjax.analysis.sweeps import read_sweep, run_all
from tests import commands
from tests.commands import Command
from tests.training.tiny_run import TINY

ROOT = Path(__file__).parents[1]
FILE = {
    "config": "tiny.yaml",
    "settings": {
        "algorithm": {"grpo": {"algorithm.preset": "grpo"}, "wide": {"algorithm.clip": {"epsilon_high": 2.0}}},
        "seed": {0: {"seed": 0}, 1: {"seed": 1}},
    },
    "grids": [{"algorithm": "all", "seed": [0]}, {"algorithm": ["wide"], "seed": "all"}],
    "smoke": {"grids": [{"algorithm": ["grpo"], "seed": [1]}], "overrides": {"training.steps": 1}},
}


@pytest.fixture
def write(tmp_path):
    """Writes the sweep file with changes and gives its path."""

    def written(**changes):
        (tmp_path / "tiny.yaml").write_text(TINY)
        path = tmp_path / "sweep.yaml"
        path.write_text(yaml.safe_dump({**FILE, "output": str(tmp_path / "runs"), **changes}))
        return path

    return written


def test_grids_are_crossed_without_repeated_runs(write, tmp_path):
    base, runs = read_sweep(write(), extra=["training.steps=3"])
    assert base == tmp_path / "tiny.yaml"
    assert [run.name for run in runs] == ["grpo__0", "wide__0", "wide__1"]
    assert [run.settings["seed"] for run in runs] == ["0", "0", "1"]
    wide = runs[2].config
    assert (wide.algorithm.preset, wide.algorithm.clip, wide.seed) == ("rec_one_side_nois", {"epsilon_high": 2.0}, 1)
    assert wide.output == str(tmp_path / "runs" / "wide__1") and wide.training.steps == 3


def test_two_settings_of_one_name_are_refused(write):
    changes = {"a": {"x__y": {}, "x": {}}, "b": {"z": {}, "y__z": {"seed": 1}}}
    with pytest.raises(ValueError, match="x and y__z, and x__y and z, would both be run x__y__z; rename"):
        read_sweep(write(settings=changes, grids=[{"a": "all", "b": "all"}]))
    # One that collides with nothing may have any name.
    apart = {"a": ["x__y"], "b": ["z"]}
    assert [run.name for run in read_sweep(write(settings=changes, grids=[apart, apart]))[1]] == ["x__y__z"]


def test_padded_seeds_are_seeds_of_their_own(write):
    path, seeds = write(settings={"seed": {}}, grids=[{"seed": "all"}]), (8, 9, 10)
    names = ", ".join(f"{seed:03d}: {{seed: {seed:03d}}}" for seed in seeds)
    path.write_text(path.read_text().replace("seed: {}", f"seed: {{{names}}}"))
    runs = read_sweep(path)[1]
    assert [(run.name, run.config.seed) for run in runs] == [("008", 8), ("009", 9), ("010", 10)]


@pytest.mark.parametrize("text", ["You are a solver.\nRules: # none", "run #3", "no", "010", "'quoted'", "[a]", "a: b"])
def test_texts_reach_the_runs_as_they_are(write, text):
    mapping = {"tracking.wandb": {"notes": text}, "rollout.stop": [text]}
    changes = {"task": {"arithmetic": {"problems": ["1..9 + 1..9"], "template": text + "{a}{b}"}}, **mapping}
    (run,) = read_sweep(write(settings={"only": {"one": changes}}, grids=[{"only": "all"}]))[1]
    assert run.config.task.arithmetic.template == text + "{a}{b}"
    assert run.config.tracking.wandb == {"notes": text} and run.config.rollout.stop == [text]
    assert not [override for override in run.overrides if "\n" in override]
    dotted = {"task.arithmetic.template": text + "{a}{b}", "tracking.wandb.notes": text}
    (run,) = read_sweep(write(settings={"only": {"one": dotted}}, grids=[{"only": "all"}]))[1]
    assert run.config.task.arithmetic.template == text + "{a}{b}" and run.config.tracking.wandb == {"notes": text}


def test_overrides_are_for_all_runs_and_settings_win(write):
    runs = read_sweep(write(overrides={"training.steps": 7, "seed": 9}))[1]
    assert [(run.config.training.steps, run.config.seed) for run in runs] == [(7, 0), (7, 0), (7, 1)]
    assert read_sweep(write(overrides={"training.steps": 7}), smoke=True)[1][0].config.training.steps == 1


def test_smoke_has_its_own_grids_and_folder(write, tmp_path):
    (run,) = read_sweep(write(), smoke=True)[1]
    assert run.name == "grpo__1" and run.config.training.steps == 1
    assert Path(run.config.output).parent == tmp_path / "runs_smoke"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grids": [{"algorithm": ["grop"], "seed": "all"}]}, "'grop' is not among settings.algorithm: grpo, wide"),
        ({"grids": [{"algorithm": "all"}]}, "must name the axes algorithm, seed"),
        ({"grid": []}, "must have the keys"),
        ({"smoke": {}}, "needs a block 'smoke'"),
        ({"settings": {**FILE["settings"], "seed": {0: {"sed": 0}, 1: {}}}}, "grpo__0: override 'sed=0'.*'seed'"),
        ({"config": "none.yaml"}, "none.yaml.*no such file"),
        ({"config": 3}, "config = 3: must be text"),
        ({"settings": [1]}, r"settings = \[1\]: must be a block of keys and values"),
        (
            {"settings": {"algorithm": {"grpo": "grpo"}, "seed": {0: {}}}},
            "algorithm.grpo = 'grpo': must be a block of keys",
        ),
        ({"settings": {**FILE["settings"], "seed": {1: {}, "1": {}}}}, "settings.seed: the name '1' occurs twice"),
        ({"overrides": "seed=1"}, "overrides = 'seed=1': must be a block of keys and values"),
        ({"grids": []}, "grids = .*at least one grid"),
        ({"grids": [{"algorithm": "grpo", "seed": "all"}]}, "algorithm = 'grpo': must be a list of names, or all"),
        ({"grids": [3]}, "a grid must name the axes"),
        ({"settings": {"a": {"logs": {}}}, "grids": [{"a": "all"}]}, "setting logs has the name of the logs' folder"),
    ],
)
def test_invalid_sweep_files_are_refused_before_work(write, changes, message):
    with pytest.raises(ValueError, match=message):
        read_sweep(write(**changes), smoke="smoke" in changes)


@pytest.mark.slow
def test_a_failed_run_stops_no_other_run(write, monkeypatch):
    monkeypatch.setattr(
        sweep.subprocess, "Popen", lambda command, preexec_fn, **options: Command(command[1:], **options)
    )
    path = write(grids=[{"algorithm": "all", "seed": [0]}])
    base, runs = read_sweep(path, extra=["training.steps=1", "evaluation.every=0"])
    occupied = Path(runs[0].config.output)
    occupied.mkdir(parents=True)
    (occupied / "notes.txt").write_text("not a run")
    failed = run_all(base, runs, workers=1)
    assert list(failed) == ["grpo__0"] and "not a run" in failed["grpo__0"]
    summaries = {run.name: Path(run.config.output) / "summary.json" for run in runs}
    times = {name: path.stat().st_mtime for name, path in summaries.items() if path.exists()}
    assert set(times) == {"wide__0"}
    (occupied / "notes.txt").unlink()
    assert run_all(base, runs, workers=1) == {}
    assert summaries["grpo__0"].exists()
    assert {name: summaries[name].stat().st_mtime for name in times} == times
    # A folder with a run of another config is refused by name.
    _, changed = read_sweep(path, extra=["training.steps=1", "evaluation.every=0", "optimizer.learning_rate=1"])
    with pytest.raises(ValueError, match="optimizer.learning_rate: 0.01 there, 1.0 now"):
        run_all(base, changed, workers=1)


@pytest.mark.slow
def test_a_stopped_sweep_stops_and_resumes_its_runs(write, tmp_path):
    path = write()
    arguments = ["--smoke", "training.steps=2000", "training.checkpoint_every=20", "evaluation.every=0"]
    command = ["-m", "recjax.sweep", path]
    metrics = tmp_path / "runs_smoke" / "grpo__1" / "metrics.jsonl"
    process = Command([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 50):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    process.terminate()
    process.wait(timeout=60)
    time.sleep(0.3)
    lines = len(metrics.read_text().splitlines())
    time.sleep(0.7)  # longer than a step
    assert len(metrics.read_text().splitlines()) == lines < 2000  # no run goes on by itself
    arguments[1] = f"training.steps={lines + 5}"
    done = commands.run([*command, *arguments])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 runs finished" in done.stdout
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(lines + 6))
    log = (tmp_path / "runs_smoke" / "logs" / "grpo__1.log").read_text()
    assert re.search(r"resuming from the checkpoint of step \d+", log)


def test_workers_share_the_cores(write, monkeypatch):
    seen = []

    class Process:
        def __init__(self, command, stdout, stderr, env, preexec_fn):
            seen.append(env["PJRT_NPROC"])

        def wait(self):
            return 0

    monkeypatch.setattr(sweep.subprocess, "Popen", Process)
    monkeypatch.setattr(sweep, "cores", lambda: 8)
    base, runs = read_sweep(write())
    run_all(base, runs, workers=2)
    assert seen == ["4", "4", "4"]


def test_a_program_gets_a_sweeps_table_or_its_failures(write, monkeypatch, tmp_path):
    """The processes write metrics without training."""

    class Process:
        def __init__(self, command, **_):
            name = command[-1].removeprefix("output=")
            self._fails = name.endswith("wide__0") and fails
            if not self._fails:
                Path(name).mkdir(parents=True)
                rows = [{"step": step, "evaluation/accuracy": step / 4, "reward": 0.5} for step in (0, 4)]
                (Path(name) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        def wait(self):
            return int(self._fails)

    def is_finished(config):
        return (Path(config.output) / "metrics.jsonl").exists()

    monkeypatch.setattr(sweep.subprocess, "Popen", Process)
    monkeypatch.setattr(sweep, "is_finished", is_finished)
    fails = True
    content = yaml.safe_load(Path(write()).read_text()) | {"config": tmp_path / "tiny.yaml"}
    with pytest.raises(ValueError, match=r"1 of 3 runs failed; .*\nwide__0: exit status 1: no output"):
        recjax.run_sweep(content, workers=1, steps=4)
    fails = False
    table = recjax.run_sweep(content, workers=1, steps=4)
    assert set(table["algorithm"]) == {"grpo", "wide"} and set(table["seed"]) == {"0", "1"}
    assert final(table).tolist() == [1.0] * 3
    kept = Path(content["output"]) / "sweep.yaml"
    assert [run.name for run in read_sweep(kept)[1]] == ["grpo__0", "wide__0", "wide__1"]
    with pytest.raises(ValueError, match=r"sweep\['output'\] = None: takes a path"):
        recjax.run_sweep({"config": "quickstart"})


def test_the_bar_counts_steps_and_names_active_runs(write, monkeypatch, tmp_path):
    """One run was finished before, and the two others are at work together."""
    base, runs = read_sweep(write(), extra=["training.steps=40"])

    def advance(name, rows):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("{}\n" * rows)

    class Process:
        def __init__(self, command, stdout, stderr, env, preexec_fn):
            self.name = next(run.name for run in runs if f"output={run.config.output}" in command)

        def wait(self):
            advance(self.name, 11)
            looked.wait(30)
            advance(self.name, 30)
            finished.add(self.name)
            return 0

    looked, finished, bars = threading.Event(), {runs[0].name}, []
    monkeypatch.setattr(sweep.subprocess, "Popen", Process)
    monkeypatch.setattr(sweep, "is_finished", lambda config: Path(config.output).name in finished)
    monkeypatch.setattr(sweep, "LOOK_SECONDS", 0.05)

    class Bar(contextlib.nullcontext):
        """Notes each state."""

        def __init__(self, description, total, initial, unit):
            super().__init__()
            bars.append((total, initial, ""))
            self.n = initial

        def set_postfix_str(self, text, refresh):
            self.text = text

        def update(self, count):
            self.n += count
            bars.append((120, self.n, self.text))
            if self.n == 60 and "10/40" in self.text:
                looked.set()

    monkeypatch.setattr(sweep, "progress_bar", Bar)
    assert run_all(base, runs, workers=2) == {}
    assert bars[0] == (120, 40, "") and looked.is_set() and bars[-1][1:] == (120, "3 of 3 runs ended")
    names = ", ".join(sorted(f"{run.name}: 10/40" for run in runs[1:]))
    assert any(", ".join(sorted(text.split(", ")[1:])) == names for _, _, text in bars)


def test_an_incomplete_run_with_status_0_has_failed(write, monkeypatch):
    class Process:
        def __init__(self, command, stdout, stderr, env, preexec_fn):
            stdout.write("bye\n")

        def wait(self):
            return 0

    monkeypatch.setattr(sweep.subprocess, "Popen", Process)
    base, runs = read_sweep(write(grids=[{"algorithm": ["grpo"], "seed": [0]}]))
    assert "exit status 0: bye" in run_all(base, runs, workers=1)["grpo__0"]


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_runs(write):
    path = write()
    process = Command(["-m", "recjax.sweep", path, "--workers", "1", "training.steps=100000"])
    run = path.parent / "runs" / "grpo__0"
    deadline = time.monotonic() + 120
    while not (run / "running.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = json.loads((run / "running.json").read_text())["pid"]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}/stat").exists()
