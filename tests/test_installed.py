"""recjax without its repository: example configs by name, the command `recjax`, and what a wheel has of both."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import recjax
from recjax import __main__ as entry
from recjax import examples
from recjax.config import load_config
from recjax.errors import UserError

ROOT = Path(__file__).parents[1]
LINKS = Path(examples.__file__).parent
# Configs at the top of experiments/ that a wheel does not have, and the files of the repository that they need.
NOT_SHIPPED = {
    "gsm_symbolic": "experiments/gsm_symbolic.py, which writes its problems",
    "llama_cpp": "experiments/llama_cpp_server.py, the server that samples",
}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The current folder: an empty one outside the repository."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_examples_are_links_to_experiments():
    for name in examples.example_names():
        link = LINKS / f"{name}.yaml"
        assert link.is_symlink(), f"{link}: a second copy; make a link to the file in experiments/"
        assert link.resolve() == ROOT / "experiments" / f"{name}.yaml"


def test_every_config_is_shipped_or_has_a_reason():
    configs = {path.stem for path in (ROOT / "experiments").glob("*.yaml")}
    assert configs - set(examples.example_names()) == NOT_SHIPPED.keys()


@pytest.mark.parametrize("name", examples.example_names())
def test_examples_load_elsewhere(name, elsewhere):
    config = load_config(name)
    values = yaml.safe_load(examples.config_file(name).read_text(encoding="utf-8"))
    assert config.output == values["output"]
    assert "experiments" not in str(values), "an example needs no other file of the repository"


def test_users_file_comes_first(elsewhere):
    (elsewhere / "quickstart").write_text("output: mine\ntask: arithmetic\nmodel: {path: mine}\n")
    assert load_config("quickstart").output == "mine"


def test_users_folder_hides_no_example(elsewhere):
    (elsewhere / "quickstart").mkdir()
    assert load_config("quickstart").output == "runs/quickstart"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "quikstart",
            r"^quikstart: neither a file .* did you mean quickstart or .*one of these names: async_one_.*, toolace/",
        ),
        ("gsm8k/onpolicy", r"did you mean gsm8k/on_policy"),
        ("zzz", r"^zzz: neither a file nor the name of an example; give a YAML file or one of"),
        ("experiments/quickstart.yaml", r"no such file; for recjax's example of this name give quickstart$"),
        ("./quickstart.yaml", r"no such file; for recjax's example of this name give quickstart$"),
        ("mine.yaml", r"^mine.yaml: not a file that can be read \(no such file or directory\)$"),
    ],
)
def test_unknown_names_are_refused(given, words, elsewhere):
    with pytest.raises(ValueError, match=words):
        load_config(given)


def test_run_takes_an_example(elsewhere):
    with pytest.raises(ValueError, match="the config has the task arithmetic"):
        recjax.run("quickstart", problems=[{"prompt": "1+1=", "answer": "2"}])
    with pytest.raises(UserError, match="did you mean quickstart"):
        recjax.run("quikstart")


def test_help_lists_every_command_with_a_line():
    package = ROOT / "recjax"
    programs = {path.stem for path in package.glob("*.py") if '\nif __name__ == "__main__":' in path.read_text()}
    programs |= {path.parent.name for path in package.glob("*/__main__.py")}
    assert len(set(entry.COMMANDS)) == len(entry.COMMANDS)
    assert programs - {"__main__"} == set(entry.COMMANDS)
    lines = entry.overview().splitlines()
    for name in entry.COMMANDS:
        assert [line.split()[1:] for line in lines if line.split()[:1] == [name]] == [entry.first_line(name).split()]
    assert entry.first_line("train") == "Trains a language model with off-policy group-relative REINFORCE."


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_is_printed(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recjax", *arguments])
    entry.main()
    assert capsys.readouterr().out == entry.overview() + "\n"


def test_help_imports_no_heavy_package():
    heavy = ["jax", "numpy", "absl", "pydantic", "yaml"]
    program = f"import sys, recjax.__main__ as entry; entry.overview(); print(sys.modules.keys() & {heavy})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_command_becomes_python_m(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(sys, "argv", ["recjax", "train", "--config", "quickstart", "seed=1"])
    entry.main()
    command = [sys.executable, "-m", "recjax.train", "--config", "quickstart", "seed=1"]
    assert started == [(sys.executable, command)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trian", "error: 'trian' is not a command of recjax; did you mean train?; recjax --help lists the commands"),
        ("api", "error: 'api' is not a command of recjax; recjax --help lists the commands"),
        ("--config", "error: '--config' is not a command of recjax; recjax --help lists the commands"),
    ],
)
def test_unknown_commands_are_refused(name, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recjax", name])
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == words


# --- A wheel.


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with an installed wheel, which a copy of the sources made; the dependencies are this environment's."""
    sources = tmp_path_factory.mktemp("sources")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    for name in ("recjax", "experiments"):
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *options, "--wheel-dir", str(sources / "wheels"), str(sources)], check=True)
    (wheel,) = (sources / "wheels").glob("recjax-*.whl")
    place = tmp_path_factory.mktemp("installed")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(place), str(wheel)], check=True)
    shutil.rmtree(sources)
    return place


def ended(installed, folder, *command):
    """A command that ran in a folder outside the repository, with the package of the wheel."""
    environment = os.environ | {"PYTHONPATH": str(installed), "PATH": f"{installed / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_wheel_has_examples_and_data(installed):
    package = installed / "recjax"
    for name in examples.example_names():
        file = package / "examples" / f"{name}.yaml"
        assert not file.is_symlink()
        assert file.read_bytes() == (ROOT / "experiments" / f"{name}.yaml").read_bytes()
    for file in (ROOT / "recjax").rglob("*"):
        if file.is_file() and file.suffix not in (".py", ".pyc"):
            assert (package / file.relative_to(ROOT / "recjax")).is_file(), (
                f"{file.name}: not in package_data of setup.py"
            )
    assert not (installed / "experiments").exists()
    assert not (installed / "tests").exists()


@pytest.mark.slow
def test_wheel_trains_elsewhere(installed, tmp_path):
    shown = ended(installed, tmp_path, "recjax", "train", "--config", "quickstart", "--dry_run")
    assert shown.returncode == 0, shown.stderr
    assert "python -m recjax.train --config quickstart" in shown.stdout
    program = "import recjax; print(recjax.__file__)"
    imported = ended(installed, tmp_path, sys.executable, "-c", program)
    assert imported.stdout.strip() == str(installed / "recjax" / "__init__.py")
    options = ["training.steps=2", "warm_start.steps=2", "evaluation.problems=4", "output=run"]
    trained = ended(installed, tmp_path, "recjax", "train", "--config", "quickstart", *options)
    assert trained.returncode == 0, trained.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["train", "--config", "quikstart"], ["train"], ["train", "--unknown"], ["plot", "none"], ["objectives"]],
    ids=" ".join,
)
def test_both_forms_end_alike(arguments, installed, tmp_path):
    name, *rest = arguments
    short = ended(installed, tmp_path, "recjax", *arguments)
    long = ended(installed, tmp_path, sys.executable, "-m", f"recjax.{name}", *rest)
    assert (short.returncode, short.stdout, short.stderr) == (long.returncode, long.stdout, long.stderr)
    assert short.returncode == (0 if name == "objectives" else 1)


@pytest.mark.slow
def test_every_command_of_the_wheel_has_help(installed, tmp_path):
    for name in entry.COMMANDS:
        shown = ended(installed, tmp_path, "recjax", name, "--help")
        assert shown.returncode == 0, shown.stderr
        assert entry.first_line(name) in shown.stdout
