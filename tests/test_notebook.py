"""The notebook's cells run, one after the other, with fewer steps; its pictures are those of its own run."""

import importlib.metadata
import json
import os
import subprocess
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import commands

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "tutorials" / "quickstart.ipynb"
# Runs the notebook in the current folder as Jupyter and Colab do, and writes it with its outputs.
EXECUTE = """
import nbclient, nbformat

notebook = nbformat.read("short.ipynb", as_version=4)
nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
nbformat.write(notebook, "executed.ipynb")
"""


def cells(path: Path = NOTEBOOK) -> list[dict]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def shortened(program: str) -> str:
    """The notebook or its program with fewer steps."""
    program = program.replace("training.steps=240", "training.steps=8").replace("every=40", "every=4")
    quote = '\\"' if '\\"evaluation.problems=256' in program else '"'
    short = ["evaluation.problems=16", "warm_start.steps=5", "samples={every: 2}"]
    program = program.replace("evaluation.problems=256", f"{quote}, {quote}".join(short))
    for evaluated in ('evaluation.problems": 128', 'evaluation.problems\\": 128'):
        program = program.replace(evaluated, evaluated.replace("128", "16"))
    assert short[-1] in program and "training.steps=8" in program
    return program


def pictures(path: Path) -> list[str]:
    outputs = [output for cell in cells(path) for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    return [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]


def test_every_cell_was_run_in_order_and_none_failed():
    assert [cell["execution_count"] for cell in cells()] == list(range(1, len(cells()) + 1))
    assert pictures(NOTEBOOK)


@pytest.mark.campaign
def test_the_cells_are_a_program(tmp_path):
    lines = [line for cell in cells() for line in "".join(cell["source"]).splitlines() if not line.startswith("%")]
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    done = commands.run(["-c", shortened("\n".join(lines))], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def link_dependencies(site_packages: Path) -> None:
    """Links recjax's dependencies and theirs, and nothing else that is here, so pip need not fetch them again."""
    wanted = [("recjax", "")]  # names with an extra, or none
    for name, extra in wanted:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # pip will fetch it
            continue
        for needed in map(Requirement, found.requires or []):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                both = [(canonicalize_name(needed.name), each) for each in ("", *needed.extras)]
                wanted += [each for each in both if each not in wanted]
        if name != "recjax" and not extra:
            base = os.path.realpath(found.locate_file(""))
            for file in found.files or []:
                if ".." not in file.parts and not (site_packages / file).exists():
                    os.makedirs(site_packages / file.parent, exist_ok=True)
                    os.symlink(os.path.join(base, file), site_packages / file)


@pytest.mark.campaign
def test_a_fresh_environment_installs_recjax_and_shows_the_figure(tmp_path):
    """As in Colab: Python with Jupyter's kernel, without recjax; the first cell installs it from $RECJAX_CHECKOUT."""
    python = str(tmp_path / "environment" / "bin" / "python")
    venv.create(tmp_path / "environment", with_pip=True)
    link_dependencies(next((tmp_path / "environment" / "lib").glob("python*/site-packages")))
    pip = [python, "-m", "pip", "install", "--quiet", "ipykernel", "nbclient"]
    if subprocess.run(pip, capture_output=True, timeout=600).returncode:
        pytest.skip("pip cannot install ipykernel and nbclient here")
    work = tmp_path / "content"
    work.mkdir()
    (work / "short.ipynb").write_text(shortened(NOTEBOOK.read_text(encoding="utf-8")), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"RECJAX_CHECKOUT": str(ROOT), "RECJAX_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [python, "-c", EXECUTE], cwd=work, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert pictures(work / "executed.ipynb")
