"""Run folders: created for a new run, reopened to resume a run, never shared by two different runs."""

import contextlib
import fnmatch
import functools
import importlib.util
import inspect
import json
import logging
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence, Set
from datetime import UTC, date, datetime
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import jax
from flax.traverse_util import flatten_dict

import recjax
from recjax.config import KEYS, MAY_CHANGE, Config, resumable_keys, stored_values, to_yaml, unknown_keys
from recjax.errors import UserError
from recjax.hub.tokenizers import reads_clock
from recjax.runs import lock as run_lock
from recjax.runs.checkpoint import BASE, newest_whole, progress, split_step, steps_of
from recjax.runtime import hosts
from recjax.runtime.files import digest, partial_of, write_whole, writing
from recjax.tasks.files import passed_files
from recjax.training.mesh import make_mesh

logger = logging.getLogger(__name__)

ENVIRONMENT = "environment.json"  # versions, commit and devices, one entry for each start
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")
_OF_HOSTS = {"output", "grading.workers"}  # settings that the processes of a run need not share
PROGRAM = "__main__"  # module of the program that Python started
OTHER_RUNS = ("teacher", "reference")  # keys of model.* that may name runs, of which config.yaml has the steps
_PASSED_FILE = "problems-{}.jsonl"  # problems that a program passed, by the key that names them
_FILES = ("config.yaml", ENVIRONMENT, "metrics.jsonl", "summary.json", "tracking.json", "grader.json")
# Patterns of all names that recjax gives to files and folders in a run folder, apart from the lock.
_WRITTEN = (
    *_FILES,
    "checkpoints",
    "damaged",
    "samples",
    "figures",
    "profile",
    "tensorboard",
    "pushed",
    "warm_start",
    "experience.db*",
    _PASSED_FILE.format("*"),
    partial_of("*", "*"),
    "samples.html",
)


def check_processes(config: Config) -> None:
    """Compares config, versions and code of all processes of a command, and connects their devices.

    Raises:
        UserError: they differ, apart from `output` and `grading.workers`.
    """
    if jax.process_count() == 1:
        return
    values = {name: value for name, value in _dotted(config.model_dump()).items() if name not in _OF_HOSTS}
    hosts.agree("config, versions or code", values | _dotted(_versions()) | code_digests(config))
    hosts.connect_devices(make_mesh(config.mesh))


def check_run_folder(config: Config, overwrite: bool) -> None:
    """Raises unless `output` is a new folder, or has an unfinished run of the same config, which can be resumed.

    Args:
        overwrite: whether the folder may also have another run.
    Raises:
        UserError: the folder has a finished run, a run of another config, or files that are not a run.
    """
    output = Path(config.output)
    if "\\" in str(output.absolute()):
        raise UserError(
            "output", "a checkpoint cannot be read from a path with \\", "name another folder", value=config.output
        )
    if output.exists() and not output.is_dir():
        raise UserError("output", "is a file", "name a folder for the run", value=config.output)
    if not output.exists():
        return
    # A config without what only recjax writes may be the user's.
    is_run = (output / "config.yaml").is_file() and any(
        (output / name).exists() for name in (ENVIRONMENT, "checkpoints")
    )
    if not is_run:
        # A process that was killed before it wrote the config leaves the other files.
        leftovers = (run_lock.NAME, ENVIRONMENT, _PASSED_FILE.format("*"), partial_of("*", "*"))
        if foreign := _others(output, leftovers):
            raise UserError(
                "output",
                f"the folder contains files that are not a run ({', '.join(foreign[:3])})",
                "name another folder",
                value=config.output,
            )
        return
    if not overwrite:
        _check_same_config(config, output)
        if is_finished(config):
            longer = " a larger training.steps=… to continue it," if config.optimizer.schedule == "constant" else ""
            raise UserError(
                "output",
                f"contains a finished run of {config.training.steps} steps or more",
                f"give another output=…,{longer} or --overwrite to delete that run",
                value=config.output,
            )


def with_chat_date(config: Config, overwrite: bool) -> Config:
    """The config with a date for its chat template, if the template reads one: the day on which the run first started.

    Raises:
        UserError: the model folder, or the config.yaml of the run, cannot be read.
    """
    model = config.model
    if not model.path or model.chat_date:
        return config

    def first_day() -> str | None:
        if not reads_clock(model.path):
            return None
        output = Path(config.output)
        resumes = not overwrite and (output / "config.yaml").is_file()
        stored = (stored_config(output).get("model") or {}) if resumes else {}
        return stored.get("chat_date") or date.today().isoformat()

    if (day := hosts.from_first(first_day)) is None:
        return config
    return config.model_copy(update={"model": model.model_copy(update={"chat_date": day})})


def is_finished(config: Config) -> bool:
    """True if `output` has a finished run of this config. False if summary.json is damaged; resuming writes it again.

    Raises:
        UserError: `output` has a run of another config.
    """
    summary = Path(config.output) / "summary.json"
    if not summary.is_file():
        return False
    _check_same_config(config, Path(config.output))
    try:
        made = json.loads(summary.read_text(encoding="utf-8"))["steps"]
        # If the user deleted the checkpoints of a finished run, only the summary counts.
        return min([made, *steps_of(summary.parent / "checkpoints")[-1:]]) >= config.training.steps
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged (%s: %s); recjax writes it again", summary, type(error).__name__, error)
        return False


def open_run_folder(config: Config, overwrite: bool, reward: Any = None) -> Path:
    """Creates or reopens the folder `output` and writes config.yaml; `overwrite` deletes an earlier run there.

    The first process creates the folder; all processes must see it.

    Args:
        reward: function, or functions, that a program passed as the reward.
    Raises:
        UserError: see `check_run_folder`; also if a process does not see the folder.
    """
    check_run_folder(config, overwrite)
    output = Path(config.output)
    hosts.wait_for_all("checks of the run's folder")
    if hosts.is_first():
        problems = {name.partition(":")[2]: path.read_bytes() for name, path in passed_files(config).items()}
        with writing(f"output = {config.output!r}: it"):
            kept = _others(output, (*_WRITTEN, run_lock.NAME)) if output.exists() else []
            old = output.iterdir() if overwrite and output.exists() else ()
            # Deletes config.yaml last, since without it the folder is not a run.
            for path in sorted(old, key=lambda path: path.name == "config.yaml"):
                if path.name not in (*kept, run_lock.NAME):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            if overwrite and kept:
                logger.warning("%s: kept what recjax did not write: %s", output, ", ".join(kept))
            output.mkdir(parents=True, exist_ok=True)
            for name in _FILES:
                for leftover in output.glob(partial_of(name, "*")):  # of a killed process, since this one has the lock
                    leftover.unlink()
        changed = ""
        if config.training.resume_with and (output / "config.yaml").is_file():
            both = [_dotted(values) for values in (config.model_dump(), stored_config(output))]
            chosen = _chosen(config, both[1])
            ours, theirs = ({key: values[key] for key in values.keys() & chosen} for values in both)
            changed = differences(ours, theirs)
        for name, content in problems.items():
            write_whole(output / _PASSED_FILE.format(name), content)
        _record_start(output, changed, code_digests(config, reward))
        write_whole(output / "config.yaml", to_yaml(config))  # the last file, which makes the folder a run
    hosts.wait_for_all("the run's folder")
    if not output.is_dir():
        raise UserError(
            "output",
            f"this process does not see the folder that process 0 of {jax.process_count()} made",
            "name a folder on a file system that all hosts share, because all processes write checkpoints",
            value=config.output,
        )
    return output


def _others(output: Path, patterns: Sequence[str]) -> list[str]:
    """The names in a folder that match none of the patterns, in order."""
    names = sorted(path.name for path in output.iterdir())
    return [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def check_config_file(run: Path, config: Config, said: dict[str, Any]) -> None:
    """Compares the config from config.yaml of a run with the config in its checkpoint.

    Args:
        said: progress of the checkpoint; older versions stored no config there, or other keys.
    Raises:
        UserError: a setting that affects the weights differs.
    """
    ours = config.model_dump()
    theirs = said["totals"].get("config")
    if not theirs:
        return
    came_later = _dotted(ours).keys() - _dotted(theirs).keys()
    gone = tuple(".".join(map(str, key)) for key in unknown_keys(theirs))
    gone = {key for key in _dotted(theirs) if gone and key.startswith(gone)}
    same = _chosen(config, theirs) | _same_runs(config, theirs)
    if changed := differences(ours, theirs, MAY_CHANGE | came_later | gone | same):
        raise UserError(
            run / "config.yaml", f"differs from the config in the run's checkpoints ({changed})", "restore the file"
        )


def _check_same_config(config: Config, output: Path) -> None:
    ours = config.model_dump()
    theirs = stored_config(output)
    fixed = MAY_CHANGE - ({"training.steps"} if config.optimizer.schedule != "constant" else set())
    fixed |= _chosen(config, theirs)
    fixed |= _same_runs(config, theirs)
    if continues(config.model.run, (theirs.get("model") or {}).get("run")):  # `with_start` sets and checks its model
        of_start = ("model.run", "model.path", "model.decoder")
        fixed |= {key for key in _dotted(ours).keys() | _dotted(theirs).keys() if key.startswith(of_start)}
    if config.model.adapter:  # null means the adapter's values
        of_adapter = ("path",) if config.model.merge_adapter else ("path", "lora")
        of_adapter = [name for name in of_adapter if getattr(config.model, name) is None]
        fixed |= {key for key in _dotted(theirs) if key.startswith(tuple(f"model.{name}" for name in of_adapter))}
        fixed |= {f"model.{name}" for name in of_adapter}
    # A config of an older version lacks keys that have default values here, which do not change the run.
    values = _dotted(ours)
    stored = _dotted(theirs)
    added = values.keys() - stored.keys()
    fixed = fixed | {key for key in added if key in KEYS and values[key] == KEYS[key].default}
    if None in (config.model.chat_date, (theirs.get("model") or {}).get("chat_date")):
        fixed = fixed | {"model.chat_date"}  # `with_chat_date` sets the date of the first start
    if changed := differences(ours, theirs, fixed):
        known = resumable_keys(config)
        keys = {key for key in values.keys() | stored.keys() if values.get(key) != stored.get(key)} - fixed
        names = {next((name for name in known if f"{key}.".startswith(f"{name}.")), "") for key in keys} | {
            *config.training.resume_with
        }
        remedy = "" if "" in names else f" training.resume_with=[{','.join(sorted(names))}] to resume that run,"
        raise UserError(
            "output",
            f"contains a run of another config ({changed})",
            f"give another output=…,{remedy} or --overwrite (overwrite=True in a program) to delete that run",
            value=config.output,
        )


def stored_config(output: Path) -> dict[str, Any]:
    """The values in config.yaml of a run; if the file is damaged, the values in the newest whole checkpoint."""
    path = output / "config.yaml"
    try:
        values = stored_values(path)
        if isinstance(values, dict) and "output" in values:
            return values
        reason = "it is empty" if values is None else "it lacks keys that recjax writes, such as output"
    except UserError as error:
        reason = str(error).removeprefix(f"{path}: ")
    step, _ = newest_whole(output / "checkpoints")
    if step is not None and (config := progress(output / "checkpoints", step)["totals"].get("config")):
        logger.warning("%s is damaged (%s); recjax uses the config in the checkpoint of step %d", path, reason, step)
        return config
    raise UserError(
        path,
        f"is damaged ({reason}), and no checkpoint contains the config",
        "restore the file from a copy, or give --overwrite to delete that run",
    )


def continues(given: str | None, stored: str | None) -> bool:
    """True if a stored run is the one that a config gives; the stored one names a step, apart from older versions."""
    if given is None or stored is None:
        return False
    run, name = split_step(given)
    stored_run, step = split_step(stored)
    return run == stored_run and (step is None or name in (None, "best", step))


def _same_runs(config: Config, theirs: dict) -> set[str]:
    """The keys of teacher and reference that name the same run in both configs; `with_pinned` adds its step."""
    model = theirs.get("model") or {}
    return {f"model.{name}" for name in OTHER_RUNS if continues(getattr(config.model, name), model.get(name))}


def _chosen(config: Config, theirs: dict) -> set[str]:
    """The dotted keys that `training.resume_with` names, with the keys inside of them."""
    chosen = tuple(config.training.resume_with)
    keys = _dotted(config.model_dump()).keys() | _dotted(theirs).keys()
    return {key for key in keys if key in chosen or key.startswith(tuple(f"{name}." for name in chosen))}


def differences(ours: dict, theirs: dict, ignored: Set[str] = frozenset()) -> str:
    """Describes the differing values by dotted key: `theirs` ("there") and `ours` ("now"); empty if all are equal."""
    ours = _dotted(ours)
    theirs = _dotted(theirs)
    changed = sorted(key for key in (ours.keys() | theirs.keys()) - ignored if ours.get(key) != theirs.get(key))
    return "; ".join(f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} now" for key in changed)


def _dotted(values: dict) -> dict[str, Any]:
    return {".".join(map(str, path)): value for path, value in flatten_dict(values).items()}


def _record_start(output: Path, changed: str, code: dict[str, str]) -> None:
    """Adds versions, commit and devices to environment.json; replaces the file if it cannot be read.

    Args:
        changed: settings that `training.resume_with` let change; empty: none.
        code: result of `code_digests`.
    """
    entry = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "code": code,
        "weights": {},  # see `record_weights`
    }
    before = next(reversed(starts(output)), {})
    known = before.get("code", {})
    if other := [module for module in code if known.get(module, code[module]) != code[module]]:
        logger.warning("%s resumes with changed code in %s; environment.json has digests", output, ", ".join(other))
    kept = {name: before[name] for name in ("recjax", "recjax_source", "packages", "python") if name in before}
    if versions := differences({name: entry[name] for name in kept}, kept):
        logger.warning(
            "%s resumes with other versions, so its numbers may differ from those of an uninterrupted run: %s",
            output,
            versions,
        )
    if changed:
        entry["changed"] = {"after_step": newest_whole(output / "checkpoints")[0], "settings": changed}
        logger.info("%s resumes with other settings: %s", output, changed)
    write_whole(output / ENVIRONMENT, json.dumps([*starts(output), entry], indent=2) + "\n")


def record_weights(output: Path, weights: dict[str, str]) -> None:
    """Adds digests of weights to the newest entry of environment.json.

    Args:
        weights: digest by name; the initial policy has the name BASE.
    """
    if hosts.is_first() and (entries := starts(output)):
        entries[-1]["weights"] = weights
        write_whole(output / ENVIRONMENT, json.dumps(entries, indent=2) + "\n")


def base_policy(output: Path) -> str | None:
    """The digest of the initial policy that a run trained; None if its record has none, as of older versions.

    Later starts compute the policy again, which a warm start on another machine may round otherwise.
    """
    for entry in starts(output):
        if "weights" not in entry:  # an older version began the run
            return None
        if BASE in entry["weights"]:  # a start that was killed early has none
            return entry["weights"][BASE]
    return None


@functools.cache
def _versions() -> dict[str, Any]:
    """Versions of recjax and of the packages that decide numbers, as environment.json has them."""
    files = sorted(Path(recjax.__file__).parent.rglob("*.py"))
    return {
        "recjax": recjax.__version__,
        "commit": _commit(),
        "recjax_source": digest(b"".join(path.read_bytes() for path in files)),
        "packages": {name: version(name) for name in _PACKAGES},
    }


def code_digests(config: Config, function: Any = None) -> dict[str, str]:
    """Digests of the user's code that a run calls, by module.

    They cover the modules that a config names as module:function, and the user's modules that these import.

    Args:
        function: reward function, or functions, that a program passed; functions of the program itself that they call
            have one digest.
    """
    digests = {}
    for name in sorted({*re.findall(r"\b([a-zA-Z_][\w.]*):[a-zA-Z_]", str(config.model_dump()))}):
        with contextlib.suppress(Exception):  # no module, or its package cannot be imported, which raises anything
            file = getattr(sys.modules.get(name), "__file__", None)
            path = Path(file or str(cast(ModuleSpec, importlib.util.find_spec(name)).origin))
            if not name.startswith("recjax."):
                digests[name] = digest(path.read_bytes())
    functions = function if isinstance(function, Sequence) else [function]
    called = [each for each in functions if inspect.isfunction(each)]
    passed = len(called)
    for each in called:
        others = (each.__globals__.get(name) for name in each.__code__.co_names)
        called += [other for other in others if inspect.isfunction(other) and other not in called]
    in_program = [each for each in called[passed:] if each.__module__ == PROGRAM]
    with contextlib.suppress(OSError):  # a function of an interactive program has no source
        if in_program:
            digests[PROGRAM] = digest("".join(map(inspect.getsource, in_program)).encode())
    pending = [*digests, *(each.__module__ for each in called)]
    for name in pending:
        if name not in digests and _is_users_module(name):
            digests[name] = digest(Path(str(sys.modules[name].__file__)).read_bytes())
        values = [*vars(sys.modules[name]).values()] if name in sys.modules else []
        modules = {value.__name__ for value in values if inspect.ismodule(value)}
        owners = (value if inspect.isclass(value) or inspect.isfunction(value) else type(value) for value in values)
        names = modules | {owner.__module__ for owner in owners}
        pending += sorted(filter(_is_users_module, names - {*pending}))
    return digests


def _is_users_module(name: Any) -> bool:
    """True for an imported module that belongs to neither the program, recjax, Python nor an installed package."""
    path = getattr(sys.modules.get(name), "__file__", None) if isinstance(name, str) else None
    if path is None or name in (PROGRAM, "recjax") or name.startswith("recjax."):
        return False
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return not path.startswith(installed) and "site-packages" not in path and path.endswith(".py")


def starts(output: Path) -> list[dict]:
    """The entries of environment.json in a run folder; an empty list if the file is missing or damaged."""
    try:
        entries = json.loads((output / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    is_whole = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    nested = [entry.get(name, {}) for entry in entries for name in ("code", "packages", "weights")] if is_whole else []
    return entries if is_whole and all(isinstance(each, dict) for each in nested) else []


@functools.cache  # a process runs the code of one commit
def _commit() -> str | None:
    """The commit of the package's own checkout, with "+" appended if files differ; None outside a checkout."""

    def git(*arguments: str) -> str:
        folder = Path(recjax.__file__).parent
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # A package installed inside another repository does not belong to that repository's commit.
        if git("ls-files", "--error-unmatch", "__init__.py") != "__init__.py":
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None
