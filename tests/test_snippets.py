"""Lines of configs and commands in pages, headers and launch files: each is one that recjax takes."""

import argparse
import ast
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import re
import runpy
import shlex
import warnings
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
import pytest
import yaml
from absl import flags

from recjax.__main__ import COMMANDS as SHORT
from recjax.config import load_config
from recjax.config.parts import PLAYED
from recjax.evaluate import split_arguments
from recjax.planning import dry_run as planning
from recjax.planning.targets import named_devices
from recjax.training.mesh import make_mesh
from tests import commands
from tests.hub.test_published import PUBLISHED
from tests.marks import slow_except
from tests.test_tutorials import PAGES as PROGRAMS
from tests.test_tutorials import ROOT, blocks, write_files

# tests/experiments/test_objectives.py has the configs of the paper index.
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "papers.md"]
PLACEHOLDERS = {"F", "FILE", "tiny.yaml"}  # for a config of the reader's
BASE = ROOT / "experiments" / "quickstart.yaml"
SNIPPETS = [
    (page, block.text) for page in PAGES for block in blocks(page) if block.language == "yaml" and not block.title
]
# Files that print commands; tests/test_tutorials.py also runs those of its pages.
PRINTING = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/faults/README.md")),
    *(page for folder in ("docs", "experiments", "benchmarks") for page in sorted((ROOT / folder).rglob("*.md"))),
    *sorted((ROOT / "experiments").rglob("*.yaml")),
    *(path for folder in ("recjax", "experiments", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))),
    *sorted((ROOT / "launch").iterdir()),
]
REFUSED = ("widht", "branching:halved")  # a page shows what recjax says of a wrong key or function
# Devices on which the header of a launch file starts a run.
DEVICES = {
    "gpu_host.sh": 8,
    "local_processes.sh": 4,
    "slurm_gpu.sh": 16,
    "tpu_pod.sh": 16,
    "kubernetes_jobset.yaml": 16,
}
_PROGRAM = re.compile(r"(?<![\w/.-])python3? -m ((?:recjax|experiments|benchmarks|tests)(?:\.\w+)*)([ ][^`\n]*)?")
# The short form, as code of its own: the same words may begin a sentence.
_SHORT = re.compile(rf"(?:^ *|`|&& )recjax ({'|'.join(SHORT)})((?: --[^`\n]*)?)(?=`|$)", re.MULTILINE)
_LAUNCHED = re.compile(r"(?:^|\s)launch/(\w+\.sh) ([^`\n]*)|docker run .* recjax-\w+ (.*)")


class Command(NamedTuple):
    """A program and its arguments, as a page prints them."""

    page: Path
    program: str
    arguments: tuple[str, ...]

    @property
    def options(self) -> dict[str, str]:
        """Values of flags, by name."""
        pairs = itertools.pairwise(self.arguments)
        return {name[2:]: value for name, value in pairs if name.startswith("--") and not value.startswith("--")}


def arguments(text: str) -> tuple[str, ...]:
    """The words of a command up to its end; placeholders have a value that could stand there, or are left out."""
    text = re.sub(r" \[(--[^\]]*)\]", r" \1", re.split(r"\s{2,}| #", text)[0])  # brackets around optional flags
    text = re.sub(r" \[[^\]]*(?:…|\.\.\.)\]", "", text)
    words = []
    for word in shlex.split(text):
        if word in {"&&", "|", "&", ";", ">", "-->"} or word.startswith("("):
            break
        if "…" not in word and "..." not in word:
            word = word.replace("HOST:PORT", "localhost:8476").split("|")[0]
            words.append({"N": "1", "S": "1", "M": "mine", "NAME": "llama"}.get(word, word).rstrip(".,;:)"))
            if word.endswith((",", ";", ".")):
                break
        elif words and words[-1].startswith("--"):
            words.pop()
    return tuple(words)


def commands_of(path: Path) -> list[Command]:
    """All commands of `python -m` that a page, a header or a launch file prints."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    elif path.name == "kubernetes_jobset.yaml":
        (job,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        text = f"python -m recjax.train {shlex.join(container['args'])}".replace("'$(JOB_COMPLETION_INDEX)'", "0")
    elif path.suffix in {".sh", ".Dockerfile"}:
        header = "\n".join(line for line in text.splitlines() if line.startswith("#"))
        return [launched(path, *groups) for groups in _LAUNCHED.findall(header)]
    text = re.sub(r" *\\\n[ #]*", " ", text).replace("&&", "\n")
    for variable, value in re.findall(r'^(\w+)="([^"\n]*)"$', text, re.MULTILINE):
        text = text.replace(f'{variable}="{value}"', "").replace(f"${variable}", value)
    found = _PROGRAM.findall(text) + [(f"recjax.{name}", more) for name, more in _SHORT.findall(text)]
    return [Command(path, program, arguments(more)) for program, more in found]


def launched(path: Path, script: str, typed: str, image_arguments: str) -> Command:
    """The command that a launch script runs in the end for these arguments."""
    if image_arguments:
        return Command(path, "recjax.train", arguments(image_arguments))
    (line,) = re.findall(r"python -m recjax.train(.*)", (ROOT / "launch" / script).read_text(encoding="utf-8"))
    config, *rest = arguments(typed)
    stand_ins = {
        "$arguments": f" --config {config} {shlex.join(rest)}",
        '"$config"': config,
        '"$@"': shlex.join(rest),
        "$port": "8476",
        '"$number"': "1",
    }
    for variable, value in stand_ins.items():
        line = line.replace(variable, value)
    assert "$" not in line, f"launch/{script}: no stand-in for a variable in {line!r}"
    return Command(path, "recjax.train", arguments(line.strip(' "')))


COMMANDS = [
    command
    for command in dict.fromkeys(command for path in PRINTING for command in commands_of(path))
    if not any(word in " ".join(command.arguments) for word in REFUSED)
]


_PAGES = sorted({command.page for command in COMMANDS})
# Training with overrides, of which tests/experiments/test_dry_runs.py does not know.
TRAININGS = [
    command
    for command in COMMANDS
    if command.program == "recjax.train" and command.page not in PROGRAMS and len(command.arguments) > 2
    if command.arguments[0] == "--config" and command.arguments[1] not in PLACEHOLDERS
]


@functools.cache
def flags_of(program: str) -> flags.FlagValues | argparse.ArgumentParser | None:
    """The flags that a program defines; None if it reads its arguments itself."""
    spec = importlib.util.find_spec(program)
    assert spec, f"there is no program {program}"
    package = importlib.util.find_spec(f"{program}.__main__") if spec.submodule_search_locations else spec
    source = Path(package.origin).read_text(encoding="utf-8")
    if "argparse" not in source and "absl" not in source:
        return None
    defined, parsers = flags.FlagValues(), []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the module has been imported
        for define in [name for name in dir(flags) if name.startswith(("DEFINE_", "mark_flag"))]:
            patch.setattr(flags, define, functools.partial(getattr(flags, define), flag_values=defined))
        for run in ("absl.app.run", "recjax.runtime.console.start"):
            patch.setattr(run, lambda main, **options: None)

        def parse(parser, *args, **options):
            parsers.append(parser)
            raise SystemExit

        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        with contextlib.suppress(SystemExit, ModuleNotFoundError):  # some peers are not installed
            runpy.run_module(program, run_name="__main__")
    return parsers[0] if parsers else defined


def accept_flags(command: Command) -> list[str]:
    """Parses a command's flags as its program does; returns the other arguments."""
    defined = flags_of(command.program)
    # A page that only names a program gives it no arguments.
    if not defined or not command.arguments or "--help" in command.arguments:
        return []
    if isinstance(defined, argparse.ArgumentParser):
        try:
            argparse.ArgumentParser.parse_args(defined, command.arguments)
        except SystemExit as end:
            raise ValueError(f"{command.program} does not take {shlex.join(command.arguments)}") from end
        return []
    for flag in defined:
        defined[flag].unparse()
    return defined([command.program, *command.arguments])[1:]


def accept_config(command: Command, folder: Path) -> None:
    """Loads the config of a command, or that of a sweep, with its overrides as its program does."""
    others, config = accept_flags(command), command.options.get("config", "F")
    if command.program == "recjax.sweep" and others and others[0] not in PLACEHOLDERS:
        sweep, *others = others
        config = Path(sweep).parent / yaml.safe_load((folder / sweep).read_text(encoding="utf-8"))["config"]
    if command.program.startswith("recjax.") and config not in PLACEHOLDERS:
        overrides = (
            split_arguments(others)[1] if command.program in ("recjax.evaluate", "recjax.check_engine") else others
        )
        loaded = load_config(config, overrides)  # a file in the current folder, or the name of an example
        devices = command.options.get("topology", command.options.get("device"))
        if count := named_devices(devices).count if devices else DEVICES.get(command.page.name):
            make_mesh(loaded.mesh, count)


def name(part: Path | str) -> str:
    return part.stem if isinstance(part, Path) else re.sub(r"\W+", " ", part)[:40].strip()


def merged(base: dict, change: dict) -> dict:
    blocks = [
        key for key in base.keys() & change.keys() if isinstance(base[key], dict) and isinstance(change[key], dict)
    ]
    both = {key: merged(base[key], change[key]) for key in blocks}
    return {**base, **change, **both}


@pytest.mark.parametrize(("page", "text"), SNIPPETS, ids=name)
def test_lines_of_a_config_are_taken(page, text, tmp_path, monkeypatch):
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    base, change = yaml.safe_load(BASE.read_text(encoding="utf-8")), yaml.safe_load(text)
    task = change.get("task") or {}
    if isinstance(task, str) or task.keys() & {"file", "gsm8k", "reasoning_gym", "mixture", *PLAYED}:
        base |= {"task": {}, "warm_start": None}
    if change.get("model", {}).keys() & {"path", "run"}:
        base |= {"model": {}, "warm_start": None}
    if not {"agent", *PLAYED}.isdisjoint(task):
        base["rollout"]["max_context_tokens"] = 512
    if "experience" in change or "regime" in change:
        base["regime"] = {"sync_interval": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(merged(base, change)))
    load_config(tmp_path / "run.yaml")


# Other programs take seconds to import.
LIGHT = {page for page in _PAGES if all(each.program.startswith("recjax.") for each in COMMANDS if each.page == page)}


@pytest.mark.parametrize("path", slow_except(_PAGES, *LIGHT), ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_accepted(path, tmp_path, monkeypatch):
    """Flags, configs and overrides of every command that a page, a header or a launch file prints."""
    folder = tmp_path if path in PROGRAMS else ROOT
    if path in PROGRAMS:
        write_files(path, tmp_path)
        (tmp_path / "experiments").symlink_to(ROOT / "experiments")
        monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(folder)
    for command in COMMANDS:
        if command.page == path:
            try:
                accept_config(command, folder)
            except (ValueError, flags.Error) as error:
                printed = shlex.join(["python", "-m", command.program, *command.arguments])
                pytest.fail(f"{path.relative_to(ROOT)} prints {printed}: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAININGS, ids=lambda each: name(" ".join(each.arguments)))
def test_trainings_can_be_run_dry(command, tmp_path, monkeypatch, capsys):
    """Whatever is in the config, apart from a model, data or a store that is not here."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: open(tmp_path / "no network"))
    monkeypatch.setattr(planning, "_activations", lambda *_: 1)
    overrides = accept_flags(command)
    config = load_config(command.options["config"], overrides)
    if config.task.gymnasium:
        pytest.importorskip("gymnasium")
    if config.model.path:
        shape = "SmolLM2-135M" if "SmolLM2" in config.model.path else Path(config.model.path).name
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[shape][1]))
        overrides = [*overrides, f"model.path={tmp_path}", "rollout.max_prompt_tokens=256"]
    count = DEVICES.get(command.page.name)
    status = planning.print_dry_run(command.options["config"], overrides, f"h100-80:{count}" if count else None)
    printed, errors = capsys.readouterr()
    assert "in all, update" in printed and (status, "to run it" in printed) in {(0, True), (1, False)}, errors
    assert all(re.search("hf download|no such file|did not serve", line) for line in errors.splitlines() if status)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (
            ["output=runs/dry", "--device", "h100-80"],
            0,
            "to run it there: python -m recjax.train --config ",
        ),
        (["warm_start=null", "model.decoder=null", "model.path=models/none"], 1, "error: model 'models/none'"),
        (["model.decoder.hidden_size=65536", "--device", "h100-80"], 1, "needs less memory: "),
        (["model.decoder.hidden_size=0"], 2, "error: override 'model.decoder.hidden_size=0'"),
    ],
)
def test_a_dry_runs_status_tells_if_it_starts(options, status, said):
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    arguments = ["-m", "recjax.train", "--config", "experiments/quickstart.yaml", "--dry_run", *options]
    done = commands.run(arguments, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stdout + done.stderr and ("to run it" in done.stdout) == (status == 0)


def test_the_readmes_regimes_are_taken():
    """Each row of the table is overrides of the README's training command."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## One key, one regime\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| .+ \| `(.+)` \|$", section, re.MULTILINE)
    assert len(rows) == 10
    for row in rows:
        load_config(BASE, ["output=runs/other", *shlex.split(row)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page):
    for path in re.findall(r"`((?:launch|experiments|recjax)/[\w./]+)`", page.read_text(encoding="utf-8")):
        assert (Path(ROOT) / path).exists(), path
