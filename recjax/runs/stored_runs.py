"""Reads stored runs: the config, the record of starts, and the steps of whole checkpoints."""

import json
import logging
import re
from pathlib import Path
from typing import Any

from recjax import __version__
from recjax.config import PASSED, Config, make_config, stored_values, unknown_keys
from recjax.config.yaml_values import read_yaml_file
from recjax.errors import UserError
from recjax.runs.checkpoint import BASE, best_step, newest_whole, none_whole, progress, steps_of
from recjax.runs.spec import check_config_file
from recjax.runtime.files import check_manifest

logger = logging.getLogger(__name__)

ENVIRONMENT = "environment.json"  # versions, commit and devices, one entry for each start


def is_run_folder(folder: Path) -> bool:
    """True if recjax made a run there; a config without files that only recjax writes may be the user's."""
    if not (folder / "config.yaml").is_file():
        return False
    return (folder / ENVIRONMENT).exists() or (folder / "checkpoints").exists()


def has_run(folder: Path, step: int | str | None) -> bool:
    """True if a source names a run: the folder has a run's files, or the source has a step."""
    return step is not None or (folder / "config.yaml").is_file() or (folder / "checkpoints").is_dir()


def starts(output: Path) -> list[dict]:
    """The entries of environment.json in a run folder; an empty list if the file is missing or damaged."""
    try:
        entries = json.loads((output / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(entries, list):
        return []
    for entry in entries:
        if not isinstance(entry, dict):
            return []
        if not all(isinstance(entry.get(name, {}), dict) for name in ("code", "packages", "weights")):
            return []
    return entries


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


def earlier_values(output: Path) -> dict[str, list[str]]:
    """The values that a run's settings had before it resumed with new ones, each with its last step, in words."""
    values: dict[str, list[str]] = {}
    for entry in starts(output):
        changed = entry.get("changed")
        if isinstance(changed, dict) and changed.keys() >= {"settings", "after_step"}:
            # The record's text is "KEY: BEFORE there, AFTER now; KEY: …".
            for key, before in re.findall(r"(\S+): (.+?) there, .+? now(?:; |$)", str(changed["settings"])):
                values.setdefault(key, []).append(f"{before} until step {changed['after_step']}")
    return values


def stored_config(output: Path) -> dict[str, Any]:
    """The values in config.yaml of a run; if the file is damaged, the values in the newest whole checkpoint."""
    path = output / "config.yaml"
    try:
        values = stored_values(path)
    except UserError as error:
        reason = str(error).removeprefix(f"{path}: ")
    else:
        if isinstance(values, dict) and "output" in values:
            return values
        reason = "it lacks keys that recjax writes, such as output"
        if values is None:
            reason = "it is empty"
    step, _ = newest_whole(output / "checkpoints")
    if step is not None:
        config = progress(output / "checkpoints", step)["totals"].get("config")
        if config:
            message = "%s is damaged (%s); recjax uses the config in the checkpoint of step %d"
            logger.warning(message, path, reason, step)
            return config
    raise UserError(
        path,
        f"is damaged ({reason}), and no checkpoint contains the config",
        "restore the file from a copy, or give --overwrite to delete that run",
    )


def run_config(run: Path) -> Config:
    """The config of a run; keys that this version does not have are skipped, with a warning that names them.

    Raises:
        UserError: the folder is not a run, or its config.yaml is damaged or has values that this version refuses.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise UserError(f"run {str(run)!r}", "holds no config.yaml", "name the output folder of a training run")
    try:
        values = read_yaml_file(path)
        unknown = unknown_keys(values)
        for *blocks, name in unknown:
            block: Any = values
            for key in blocks:
                block = block[key]
            block.pop(name)
        config = make_config(values, source=str(path))
    except UserError as error:
        raise UserError(error.where, error.problem, f"{error.remedy}{_made_by(run)}", error.value) from error
    if unknown:
        names = ", ".join(".".join(map(str, key)) for key in unknown)
        logger.warning("%s: not read, as this version has no such keys: %s%s", path, names, _made_by(run))
    # Problems that a program passed are in the run folder, which may have been moved.
    if config.task.file is not None and config.task.file.train.startswith(f"{PASSED}:"):
        return config.model_copy(update={"output": str(run)})
    return config


def _made_by(run: Path) -> str:
    """A note on the recjax version that made a run; empty if it is this version."""
    entries = starts(run)
    if not entries:
        return ""
    made = entries[0].get("recjax")
    if made is None or made == __version__:
        return ""
    return f"; the run was made with recjax {made}, this is {__version__}"


def whole_step(run: Path, config: Config, step: int | str | None) -> int:
    """The step of the newest whole checkpoint, the best, or `step`; checks that it is whole and fits the config.

    Raises:
        UserError: the checkpoint does not exist, is damaged, or is of another config.
    """
    folder = run / "checkpoints"
    steps = steps_of(folder)
    if step == "best":
        try:
            step = best_step(run, config.training.keep_best or "evaluation/accuracy")
        except UserError as error:
            raise error.within(f"{folder}/best") from error
    if not steps:
        raise UserError(f"run {str(run)!r}", "holds no checkpoint yet", "its first is written before its first step")
    if step is None:
        whole, damaged = newest_whole(folder)
        if whole is None:
            raise none_whole(folder, damaged)
        for damaged_step, reason in damaged.items():
            logger.warning("checkpoint of step %d: %s; that of step %d is taken", damaged_step, reason, whole)
    else:
        whole = int(step)
        if whole not in steps:
            names = ", ".join(map(str, steps))
            raise UserError(f"step {whole}", f"{folder} holds the steps {names}", "name one of them")
        try:
            check_manifest(folder / str(whole))
        except UserError as error:
            raise UserError(f"step {whole}", str(error), "name another one, or bring it back from a copy") from error
    check_config_file(run, config, progress(folder, whole)["totals"].get("config"))
    return whole
