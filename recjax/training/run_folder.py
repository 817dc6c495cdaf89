"""A run's folder: made for a new run, found again for one to go on with, never mixed up with another."""

import dataclasses
import json
import shutil
from collections.abc import Set
from pathlib import Path

import jax
import yaml
from flax.traverse_util import flatten_dict

from recjax import hosts
from recjax.config import Config
from recjax.config_loading import to_yaml

# Settings that do not change what the steps made so far would have been.
_MAY_CHANGE = {
    "output",
    "grading.workers",
    "regime.generators",
    "regime.address",
    "regime.generator_seconds",
    "training.steps",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.profile_steps",
    "mesh.data",
    "mesh.fsdp",
    "mesh.tensor",
}


def check_run_folder(config: Config, overwrite: bool) -> None:
    """Whether this run may write to `output`: a new folder, or an unfinished run of the same config to go on with.

    Args:
        overwrite: another run's folder will do as well.
    Raises:
        ValueError: the folder holds a finished run, one of another config, or something that is not a run.
    """
    output = Path(config.output)
    if not output.exists() or not any(output.iterdir()):
        return
    if not (output / "config.yaml").is_file():
        raise ValueError(f"output = {config.output!r}: the folder holds something that is not a run; name another")
    if not overwrite:
        _check_same_config(config, output / "config.yaml")
        if is_finished(config):
            raise ValueError(
                f"output = {config.output!r} holds a finished run of {config.training.steps} steps or more; give"
                " another output=…, a larger training.steps=… to go on, or --overwrite to delete that run"
            )


def is_finished(config: Config) -> bool:
    """Whether `output` holds a whole run of this config.

    Raises:
        ValueError: it holds a run of another config.
    """
    output = Path(config.output)
    if not (output / "summary.json").is_file():
        return False
    _check_same_config(config, output / "config.yaml")
    return json.loads((output / "summary.json").read_text(encoding="utf-8"))["steps"] >= config.training.steps


def open_run_folder(config: Config, overwrite: bool) -> Path:
    """The folder `output` with config.yaml in it; `overwrite` deletes what an earlier run left there.

    Of several processes the first one makes it, and all see it.

    Raises:
        ValueError: as `check_run_folder`.
    """
    check_run_folder(config, overwrite)
    output = Path(config.output)
    hosts.wait_for_all("checks of the run's folder")
    if hosts.is_first():
        if overwrite and output.exists():
            shutil.rmtree(output)
        output.mkdir(parents=True, exist_ok=True)
        (output / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    hosts.wait_for_all("the run's folder")
    if not output.is_dir():
        raise ValueError(
            f"output = {config.output!r} is not what process 0 of {jax.process_count()} made; name a folder on a file"
            " system that all hosts share, for checkpoints are written by all of them"
        )
    return output


def _check_same_config(config: Config, stored: Path) -> None:
    ours, theirs = dataclasses.asdict(config), yaml.safe_load(stored.read_text(encoding="utf-8"))
    fixed = _MAY_CHANGE - ({"training.steps"} if config.optimizer.schedule != "constant" else set())
    if changed := differences(ours, theirs, fixed):
        raise ValueError(
            f"output = {config.output!r} holds a run of another config ({changed});"
            " give another output=…, or --overwrite to delete that run"
        )


def differences(ours: dict, theirs: dict, ignored: Set[str] = frozenset()) -> str:
    """What is set otherwise `there` than `now`, by dotted key; empty where nothing is."""
    ours, theirs = (
        {".".join(map(str, path)): value for path, value in flatten_dict(values).items()} for values in (ours, theirs)
    )
    changed = sorted(key for key in (ours.keys() | theirs.keys()) - ignored if ours.get(key) != theirs.get(key))
    return "; ".join(f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} now" for key in changed)
