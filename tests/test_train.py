"""The command line: what a newcomer types, and what is said when it is wrong."""

import glob
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recjax
from recjax.config import load_config
from recjax.config.help import help_text
from recjax.runs.start import train
from tests import commands
from tests.training.tiny_run import TINY

ROOT = Path(__file__).parents[1]


def command(*arguments):
    line = [sys.executable, "-m", "recjax.train", *arguments]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=300)


def forked(*arguments):
    return commands.run(["-m", "recjax.train", *arguments])


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def test_help_of_keys_shows_those_that_are_named():
    def shown(*names):
        return set(re.findall(r"^  (\S+) = ", help_text(names), re.MULTILINE))

    assert shown("regime.sync_interval") == {"regime.sync_interval"}
    assert shown("lora") == {"model.lora.rank", "model.lora.alpha", "model.lora.targets"}
    assert {"seed", *shown("regime"), *shown("optimizer")} < shown("keys")
    with pytest.raises(SystemExit, match="optimizer.learning_rate"):
        help_text(["leerning_rate"])


def test_help_waits_for_nothing_heavy():
    program = "import sys, recjax.train; print(sorted({'jax', 'flax', 'transformers', 'orbax'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(("given", "expected"), [({}, "cpu"), ({"JAX_PLATFORMS": "tpu"}, "tpu")])
@pytest.mark.skipif(any(map(glob.glob, recjax._DEVICES)), reason="needs a machine without accelerators")
def test_libtpu_stays_out_of_processes_without_tpus(tmp_path, given, expected):
    (tmp_path / "libtpu.py").write_text("")
    program = "import os, sys, recjax; print(os.environ.get('JAX_PLATFORMS'), 'libtpu' in sys.modules)"
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    environment |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"} | given
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == f"{expected} False\n", done.stderr


@pytest.mark.slow
def test_a_run_on_own_problems_prints_its_result(config, tmp_path):
    rows = [{"question": f"{a}-{b}=", "result": a - b} for a in range(9) for b in range(9)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [
        "task.arithmetic=null",
        f"task.file={{train: {tmp_path / 'own.jsonl'}, prompt_column: question, answer_column: result}}",
        "task.reward=recjax.tasks.rewards:number_match",
        "warm_start={steps: 5, batch_size: 8}",
        "training.steps=2",
        f"output={tmp_path / 'run'}",
    ]
    done = forked("--config", str(config), *own)
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy" in done.stdout and "training.png" in done.stdout.replace("\n", "")
    again = forked("--config", str(config), *own)
    assert again.returncode != 0 and "finished run of 2 steps" in again.stderr and "Traceback" not in again.stderr
    assert forked("--config", str(config), *own, "--overwrite").returncode == 0


@pytest.mark.slow
def test_a_dry_run_prints_sizes_and_leaves_nothing_behind(config, tmp_path):
    done = forked("--config", str(config), "--dry_run", f"output={tmp_path / 'run'}", "regime.sync_interval=2")
    assert done.returncode == 0, done.stderr
    for part in ("parameters ", "keys and values", "staleness of steps 1 to 6: 0–1 ×3", "a checkpoint: "):
        assert part in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("start", "override", "message"),
    [
        (command, "traning.steps=3", "did you mean 'training'"),
        pytest.param(forked, "rollout.stop=[ab]", "stop string 'ab'", marks=pytest.mark.slow),
    ],
)
def test_user_errors_are_one_line_and_leave_nothing_behind(config, tmp_path, start, override, message):
    refused = start("--config", str(config), f"output={tmp_path / 'run'}", override)
    assert refused.returncode != 0 and message in refused.stderr and "Traceback" not in refused.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.reward=nowhere:f", "task.reward = 'nowhere:f'"),
        ("rollout.max_prompt_tokens=2", "rollout.max_prompt_tokens = 2"),
        ("evaluation.problems=81", "evaluation.problems = 81"),
        ("grading.workers=4", "grading = {.*does not apply to task.reward = .*tiny_run:digit_share.*remove the block"),
    ],
)
def test_task_errors_come_before_the_folder_exists(config, tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        train(load_config(config, [f"output={tmp_path / 'run'}", override]))
    assert not (tmp_path / "run").exists()
