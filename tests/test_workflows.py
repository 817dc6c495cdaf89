"""The hosted checks and the pre-commit hooks agree with setup.py and call programs that exist."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


def jobs(path):
    """The jobs of a workflow, by name."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def test_quick_set_runs_on_all_versions_of_setup():
    matrix = jobs(ROOT / ".github" / "workflows" / "checks.yml")["quick"]["strategy"]["matrix"]
    oldest, above_newest = re.search(r'"jax>=([\d.]+),<([\d.]+)"', SETUP).groups()
    assert matrix["jax"] == [f"jax=={oldest}", f"jax<{above_newest}"]
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)", SETUP)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_bounded_and_read_only(path):
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        assert job["timeout-minutes"] <= 120, name
        for step in job["steps"]:
            assert step.keys() & {"uses", "run"}, name
            for script in re.findall(r"^\.ci/\S+", step.get("run", "")):
                assert (ROOT / script).stat().st_mode & 0o100, script


def test_hooks_run_tools_of_the_environment():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert repository["repo"] == "local"
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert hooks.keys() == {"ruff-check", "ruff-format", "types", "imports"}
    assert {hook["language"] for hook in hooks.values()} == {"system"}


def test_lint_job_runs_all_hooks():
    commands = [step.get("run", "") for step in jobs(ROOT / ".github" / "workflows" / "checks.yml")["lint"]["steps"]]
    assert any(command.startswith("pre-commit run --all-files") for command in commands)
