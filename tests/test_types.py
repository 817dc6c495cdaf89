"""The type checker finds the faults that it is there for, users' tools find the types, and every test checks shapes."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import recjax
from recjax import algorithms, grading
from recjax.algorithms.advantages import group_mean_advantages
from tests.conftest import SHAPED

ROOT = Path(__file__).parents[1]
# By kind: the file, the right text and the wrong text.
FAULTS = {
    "argument type": ("algorithms/options.py", 'message.partition("\\n")', "message.partition(10)"),
    "config key": ("training/loop.py", "last = config.training.steps", "last = config.training.step"),
    "field": ("algorithms/losses.py", "mask = tokens.completion_mask\n", "mask = tokens.completion_masks\n"),
    "keyword": ("models/experts.py", "weights.sum(-1, keepdims=True)", "weights.sum(-1, keep=True)"),
    "missing value": ("experience/group.py", "        assert self.grade is not None\n", ""),
    "name": ("algorithms/terms.py", "taught_mask = completion_mask\n", "taught_mask = completion_masks\n"),
    "name in a text": ("algorithms/algorithm.py", '-> "Algorithm":', '-> "Algoritm":'),
    "number of arguments": ("algorithms/losses.py", "(anchor, behavior_logprobs, mask)", "(anchor)"),
    "replaced field": ("algorithms/losses.py", "_replace(advantages=advantages)", "_replace(advantage=advantages)"),
    "result": ("algorithms/options.py", "    names = list(names)\n", "    return list(names)\n"),
}


@pytest.mark.slow
def test_checker_finds_seeded_faults(tmp_path):
    shutil.copytree(ROOT / "recjax", tmp_path / "recjax", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, right, wrong in FAULTS.values():
        file = tmp_path / "recjax" / name
        text = file.read_text(encoding="utf-8")
        assert right in text, f"{name} has changed; choose another place for this fault"
        file.write_text(text.replace(right, wrong, 1), encoding="utf-8")
    command = [Path(sys.executable).with_name("pyrefly"), "check", "--output-format", "json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    errors = [error for error in json.loads(done.stdout)["errors"] if error["severity"] == "error"]
    found = {(error["path"], error["line"]) for error in errors}
    assert done.returncode == 1 and len(found) == len(FAULTS), found
    assert {path for path, _ in found} == {f"recjax/{name}" for name, _, _ in FAULTS.values()}


@pytest.mark.parametrize("package", [recjax, algorithms, grading])
def test_checker_sees_public_names(package):
    # The imports for type checkers name the same objects as those at run time.
    lines = Path(package.__file__).read_text(encoding="utf-8").partition("if TYPE_CHECKING:")[2].partition("\n\n")[0]
    block = "\n".join(line.removeprefix("    ") for line in lines.splitlines()[1:])
    names = {}
    exec(block, names)
    assert set(package.__all__) <= names.keys()
    for name in package.__all__:
        assert names[name] is getattr(package, name)


def test_package_is_marked_as_typed():
    assert (ROOT / "recjax" / "py.typed").is_file()
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert '"recjax": ["py.typed"' in setup and '"Typing :: Typed"' in setup


@pytest.mark.parametrize("name", SHAPED)
def test_shaped_rooms_exist(name):
    assert importlib.util.find_spec(name)


def test_wrong_shape_is_refused():
    with pytest.raises(Exception, match="Type-check"):
        group_mean_advantages(jnp.zeros(3), jnp.zeros(2, int), jnp.ones(3, bool))
