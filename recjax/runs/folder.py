"""Run folders: created for a new run, reopened to resume a run, never shared by two different runs."""

import fnmatch
import json
import logging
import platform
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import jax

from recjax.config import Config, to_yaml
from recjax.errors import UserError
from recjax.runs import lock as run_lock
from recjax.runs.checkpoint import newest_whole, steps_of
from recjax.runs.provenance import code_digests, versions
from recjax.runs.spec import (
    RunSpec,
    SettingChange,
    changes_in_words,
    check_settings,
    dotted,
    warn_of_code,
    warn_of_versions,
)
from recjax.runs.stored_runs import ENVIRONMENT, is_run_folder, starts, stored_config
from recjax.runtime import hosts
from recjax.runtime.files import partial_of, write_whole, writing
from recjax.tasks.files import passed_files
from recjax.training.mesh import make_mesh

logger = logging.getLogger(__name__)

_HOST_SETTINGS = {"output", "grading.workers"}  # settings that the processes of a run need not share
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
    "report.html",
)
# A process that was killed before it wrote the config leaves these files.
_LEFTOVERS = (run_lock.NAME, ENVIRONMENT, _PASSED_FILE.format("*"), partial_of("*", "*"))


def check_processes(config: Config) -> None:
    """Compares config, versions and code of all processes of a command, and connects their devices.

    Raises:
        UserError: they differ, apart from `output` and `grading.workers`.
    """
    if jax.process_count() == 1:
        return
    settings = dotted(config.model_dump())
    shared = {name: value for name, value in settings.items() if name not in _HOST_SETTINGS}
    hosts.agree("config, versions or code", shared | dotted(versions()) | code_digests(config))
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
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError("output", "is a file", "name a folder for the run", value=config.output)
    if not is_run_folder(output):
        foreign = _other_names(output, _LEFTOVERS)
        if foreign:
            raise UserError(
                "output",
                f"the folder contains files that are not a run ({', '.join(foreign[:3])})",
                "name another folder",
                value=config.output,
            )
        return
    if overwrite:
        return
    check_settings(config, stored_config(output))
    if _has_all_steps(config):
        longer = ""
        if config.optimizer.schedule == "constant":
            longer = " a larger training.steps=… to continue it,"
        raise UserError(
            "output",
            f"contains a finished run of {config.training.steps} steps or more",
            f"give another output=…,{longer} or --overwrite to delete that run",
            value=config.output,
        )


def is_finished(config: Config) -> bool:
    """True if `output` has a finished run of this config. False if summary.json is damaged; resuming writes it again.

    Raises:
        UserError: `output` has a run of another config.
    """
    output = Path(config.output)
    if not (output / "summary.json").is_file():
        return False
    check_settings(config, stored_config(output))
    return _has_all_steps(config)


def _has_all_steps(config: Config) -> bool:
    """True if the summary and the newest checkpoint in `output` are of the config's last step, or a later one."""
    summary = Path(config.output) / "summary.json"
    if not summary.is_file():
        return False
    try:
        made = json.loads(summary.read_text(encoding="utf-8"))["steps"]
        # If the user deleted the checkpoints of a finished run, only the summary counts.
        newest = steps_of(summary.parent / "checkpoints")[-1:]
        return min([made, *newest]) >= config.training.steps
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged (%s: %s); recjax writes it again", summary, type(error).__name__, error)
        return False


def open_run_folder(spec: RunSpec, overwrite: bool) -> Path:
    """Creates or reopens the folder `output` and writes config.yaml; `overwrite` deletes an earlier run there.

    The first process creates the folder; all processes must see it.

    Raises:
        UserError: see `check_run_folder`; also if a process does not see the folder.
    """
    config = spec.config
    # Another process may have made a run there before this process got the lock.
    check_run_folder(config, overwrite)
    output = Path(config.output)
    hosts.wait_for_all("checks of the run's folder")
    if hosts.is_first():
        problems = {name.partition(":")[2]: path.read_bytes() for name, path in passed_files(config).items()}
        with writing(f"output = {config.output!r}: it"):
            _make_folder(output, overwrite)
        changed: list[SettingChange] = []
        if config.training.resume_with and (output / "config.yaml").is_file():
            changed = check_settings(config, stored_config(output))
        for name, content in problems.items():
            write_whole(output / _PASSED_FILE.format(name), content)
        _record_start(output, spec, changed)
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


def _make_folder(output: Path, overwrite: bool) -> None:
    """Makes a run folder, without the files that a killed process has left unfinished.

    Args:
        overwrite: delete all that recjax wrote there before.
    """
    if overwrite and output.exists():
        kept = _other_names(output, (*_WRITTEN, run_lock.NAME))
        deleted = [path for path in output.iterdir() if path.name not in (*kept, run_lock.NAME)]
        # Deletes config.yaml last, since without it the folder is not a run.
        for path in sorted(deleted, key=lambda path: path.name == "config.yaml"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if kept:
            logger.warning("%s: kept what recjax did not write: %s", output, ", ".join(kept))
    output.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        for leftover in output.glob(partial_of(name, "*")):  # its process is dead, since this process has the lock
            leftover.unlink()


def written_by_recjax(name: str) -> bool:
    """True if recjax gives this name to files or folders in a run folder."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _WRITTEN)


def _other_names(output: Path, patterns: Sequence[str]) -> list[str]:
    """The names in a folder that match none of the patterns, in order."""
    names = sorted(path.name for path in output.iterdir())
    return [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _record_start(output: Path, spec: RunSpec, changed: Sequence[SettingChange]) -> None:
    """Adds versions, commit and devices to environment.json; replaces the file if it cannot be read.

    Args:
        changed: settings that `training.resume_with` let change.
    """
    entry = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **spec.versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "code": spec.code,
        "weights": {},  # see `record_weights`
    }
    entries = starts(output)
    if entries:
        warn_of_code(output, entries[-1].get("code", {}), spec.code)
        warn_of_versions(output, entries[-1], entry)
    if changed:
        words = changes_in_words(changed)
        entry["changed"] = {"after_step": newest_whole(output / "checkpoints")[0], "settings": words}
        logger.info("%s resumes with other settings: %s", output, words)
    write_whole(output / ENVIRONMENT, json.dumps([*entries, entry], indent=2) + "\n")


def record_weights(output: Path, weights: dict[str, str]) -> None:
    """Adds digests of weights to the newest entry of environment.json.

    Args:
        weights: digest by name; the initial policy has the name BASE.
    """
    if not hosts.is_first():
        return
    entries = starts(output)
    if entries:
        entries[-1]["weights"] = weights
        write_whole(output / ENVIRONMENT, json.dumps(entries, indent=2) + "\n")
