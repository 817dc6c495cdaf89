"""Only a mistake of the user becomes an error of one line; a library's error keeps its type, text and traceback."""

import functools
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pydantic
import pytest
import yaml

from recjax import compile_check, evaluate
from recjax.algorithms import presets
from recjax.analysis import sweeps
from recjax.config import load_config, make_config
from recjax.errors import UserError
from recjax.experience import teacher_prompts
from recjax.hub import weights
from recjax.planning import dry_run
from recjax.rewards import reward_model
from recjax.rewards.custom import Answered, custom_parts
from recjax.rewards.reward import load_reward
from recjax.runs import policies, sources, stored_runs, warm_start
from recjax.runtime import console
from recjax.store import following, store, stored, tokenize
from recjax.store.store import Store
from recjax.tasks import reading, rewards
from tests.config.test_refusals import CASES
from tests.experience.rows import make_row, text_row
from tests.package_files import PATHS, is_command
from tests.training.tiny_run import TINY, train

# Mistakes in a program, as a fault of recjax would make them.
FAULTS = {
    "NumPy": lambda: np.zeros(3) + np.zeros(4),
    "JAX": lambda: jnp.concatenate([]),
    "pandas": lambda: pd.concat([]),
    "Arrow": lambda: pa.array(["x"], pa.int64()),
    "pydantic": lambda: pydantic.TypeAdapter(int).validate_python("x"),
}


def error_of(fault):
    """The error that a mistake raises."""
    try:
        fault()
    except Exception as error:
        return error
    raise AssertionError("no error")


@pytest.fixture(params=FAULTS)
def error(request):
    return error_of(FAULTS[request.param])


@pytest.fixture
def config(tmp_path):
    """The tiny run with a store."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return load_config(path, [f"output={tmp_path / 'run'}"])


def with_store(config, *overrides):
    path = Path(config.output).parent / "tiny.yaml"
    return load_config(path, [f"experience.store={config.output}.db", *overrides])


def with_followed(config):
    sizes = ["rollout.max_prompt_tokens=9", "rollout.max_context_tokens=30"]
    return with_store(config, "experience.follow=true", "experience.missing_logprobs=current", *sizes)


def parquet(folder):
    pd.DataFrame({"prompt": ["a"], "answer": ["b"]}).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def model_folder(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def run_folder(folder):
    (folder / "config.yaml").write_text("seed: 1\n")
    return folder


def sweep_file(folder):
    content = {"config": "tiny.yaml", "output": "runs", "settings": {"seed": {"0": {"seed": 0}}}}
    content |= {"smoke": {"grids": [{"seed": "all"}]}, "grids": [{"seed": "all"}]}
    (folder / "sweep.yaml").write_text(json.dumps(content))
    return folder / "sweep.yaml"


def stored_row(folder):
    opened = Store(folder / "rows.db", create=True)
    opened.append([make_row(0)])
    return opened


def a_demonstration():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return reading.FileRow({"messages": messages}, "chats.jsonl: line 1")


@functools.cache
def a_policy():
    """A policy without weights."""
    return policies.policy_alone(make_config(yaml.safe_load(TINY)), "0123456789+=")


# The function that fails, and the call that reaches it.
SITES = {
    "a run's config": (stored_runs, "make_config", lambda folder, config: stored_runs.run_config(run_folder(folder))),
    "a policy": (policies, "_untrained_policy", lambda folder, config: policies.open_policy(str(folder), config)),
    "a store": (stored, "load_groups", lambda folder, config: stored.load_stored(with_store(config), a_policy())),
    "a store's row": (store, "record_of", lambda folder, config: stored_row(folder).read([1])),
    "a followed store": (
        following.Follower,
        "_refresh",
        lambda folder, config: following.Follower(with_store(config), a_policy(), "run").poll(1, 1),
    ),
    "a followed row": (
        following,
        "tokenized",
        lambda folder, config: following.Follower(with_followed(config), a_policy(), "run")._usable(text_row(1)),
    ),
    "a stored text": (
        tokenize,
        "encode_after",
        lambda folder, config: tokenize._completion_tokens(text_row(1), np.zeros(0, np.int32), a_policy(), "x"),
    ),
    "a Parquet file": (
        reading,
        "_cells",
        lambda folder, config: [*reading._parquet_rows(parquet(folder), "a.parquet", True)],
    ),
    "a model's config": (weights, "check_fields", lambda folder, config: weights.read_config(model_folder(folder))),
    "a reward model": (reward_model, "classifier_config", lambda folder, config: reward_model.RewardModel("x")),
    "a demonstration": (
        warm_start,
        "turn_end",
        lambda folder, config: warm_start.demonstration(a_demonstration(), a_policy()),
    ),
    "a teacher's prompt": (
        teacher_prompts,
        "rendered",
        lambda folder, config: teacher_prompts.TeacherPrompts._encoded(types.SimpleNamespace(_policy=a_policy()), []),
    ),
    "a sweep": (sweeps, "make_config", lambda folder, config: sweeps.read_sweep(sweep_file(folder))),
    "an algorithm": (
        presets,
        "_check_read",
        lambda folder, config: presets.build_algorithm("gspo", {"clip": {"epsilon_high": 1e-3}}),
    ),
    "a reward": (
        rewards,
        "_compared",
        lambda folder, config: custom_parts(
            load_reward("recjax.tasks.rewards:number_match"), [Answered("1+1=", "2", "2", {}, 1)]
        ),
    ),
    "a dry run": (dry_run, "dry_run", lambda folder, config: dry_run.print_dry_run(str(folder / "tiny.yaml"), [])),
    "a compile check": (
        compile_check,
        "load_target",
        lambda folder, config: compile_check.check(str(folder / "tiny.yaml"), "host", []),
    ),
    "an evaluation": (evaluate, "load_task", lambda folder, config: evaluate.seen_in_training(config, [])),
}


@pytest.mark.parametrize("site", SITES)
def test_fault_is_raised_unchanged(site, error, config, tmp_path, monkeypatch):
    owner, name, call = SITES[site]

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(type(error)) as raised:
        call(tmp_path, config)
    assert raised.value is error


def test_fault_in_the_loop_is_raised_unchanged(config, monkeypatch):
    error = error_of(FAULTS["NumPy"])

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(sources.PolicySource, "poll", fails)
    with pytest.raises(ValueError, match="could not be broadcast") as raised:
        train(config)
    assert raised.value is error


class Flags:
    """Flags whose reading raises an error."""

    def __init__(self, error):
        self.__dict__["error"] = error

    def fail(self, *_, **__):
        raise self.__dict__["error"]

    __getitem__ = __getattr__ = fail


@pytest.mark.parametrize("name", [name for name in PATHS if is_command(name)])
def test_commands_end_with_the_traceback_of_a_fault(name, error, monkeypatch):
    command = importlib.import_module(name)
    flags = Flags(error)
    monkeypatch.setattr(console, "configure_logging", lambda: None)
    monkeypatch.setattr("logging.disable", lambda: None)
    # The fault is in the first flag that the command reads, or in its refusal of arguments that no command takes.
    monkeypatch.setattr(command, "FLAGS", flags, raising=False)
    monkeypatch.setattr(command, "UserError", flags.fail, raising=False)
    with pytest.raises(type(error)) as raised:
        command.main(["command", "a", "b", "c"])
    assert raised.value is error and error.__notes__ == [console.FAULT]


PROGRAM = """
import sys
from absl import app
from recjax.runtime import console
from recjax.errors import UserError

@console.command
def main(argv):
    {statement}

app.run(main)
"""


def ended(folder, statement):
    (folder / "program.py").write_text(PROGRAM.format(statement=statement))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    options = {"cwd": folder, "env": environment, "text": True, "capture_output": True, "timeout": 120}
    done = subprocess.run([sys.executable, "program.py"], **options)
    return done.returncode, done.stderr.splitlines()


def test_fault_prints_its_traceback_and_asks_for_a_report(tmp_path):
    status, lines = ended(tmp_path, "import numpy as np; np.zeros(3) + np.zeros(4)")
    assert status == 1 and lines[0].startswith("Traceback")
    assert any("program.py" in line for line in lines)
    assert lines[-2:] == ["ValueError: operands could not be broadcast together with shapes (3,) (4,) ", console.FAULT]


def test_user_error_prints_one_line(tmp_path):
    status, lines = ended(tmp_path, "raise UserError('a.b', 'is wrong', 'remove it', 3)")
    assert (status, lines) == (1, ["error: a.b = 3: is wrong; remove it"])


@pytest.mark.parametrize("error", [MemoryError(), BrokenPipeError(32, "gone"), SystemExit(3)])
def test_what_is_nobodys_fault_ends_as_python_ends_it(error, monkeypatch):
    def fails(_):
        raise error

    monkeypatch.setattr(console, "configure_logging", lambda: None)
    with pytest.raises(type(error)) as raised:
        console.command(fails)([])
    assert raised.value is error and not hasattr(error, "__notes__")


def test_refusals_of_a_config_are_user_errors(config, tmp_path):
    path = tmp_path / "tiny.yaml"
    faults = []
    for overrides, *_ in CASES:
        try:
            load_config(path, [overrides] if isinstance(overrides, str) else overrides)
        except UserError:
            continue
        except Exception as error:
            faults.append((overrides, error))
    assert faults == []
