"""The specification of a run: all that decides its results, resolved once, and compared when the run resumes.

| field | stored in | a resume with another value |
|---|---|---|
| config | config.yaml, checkpoints | is refused, apart from the settings that `may_change` names |
| data | checkpoints | is refused |
| weights | environment.json, checkpoints | is refused, apart from an initial policy that rounding may have changed |
| code, versions | environment.json | logs a warning |
"""

import enum
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict

from recjax.config import KEYS, MAY_CHANGE, Config, resumable_keys, unknown_keys
from recjax.errors import UserError
from recjax.runs.checkpoint import BASE
from recjax.runs.provenance import code_digests, versions
from recjax.runtime.cache import cache_folder

logger = logging.getLogger(__name__)

OTHER_RUNS = ("teacher", "reference")  # keys of model.* that may name runs, of which config.yaml has the steps


class RunSpec(NamedTuple):
    """All that decides the results of a run.

    config: the config with the model, adapter, checkpoints of other runs and chat date that `resolve` found.
    code: digests of the user's code that the run calls, by module.
    versions: versions of recjax and of the packages that decide numbers.
    data: digests of the data that the run reads, by their names in messages; empty until the data are read.
    weights: digests of the weights that the run reads and that are in no checkpoint of it; empty until they are read.
    """

    config: Config
    code: dict[str, str]
    versions: dict[str, Any]
    data: dict[str, str] = {}
    weights: dict[str, str] = {}

    def stored(self) -> dict[str, Any]:
        """The fields that each checkpoint stores."""
        return {"data": self.data, "weights": self.weights, "config": self.config.model_dump()}


def spec_of(config: Config, reward: Any = None) -> RunSpec:
    """The specification of a resolved config, before data and weights are read.

    Args:
        reward: function, or functions, that a program passed as the reward.
    """
    return RunSpec(config, code_digests(config, reward), versions())


# --- Two values of one name.


class SettingChange(NamedTuple):
    """A value that differs from the stored one."""

    name: str
    there: Any
    now: Any

    def __str__(self) -> str:
        """The change in words, for messages."""
        return f"{self.name}: {self.there!r} there, {self.now!r} now"


def changes(stored: Mapping[str, Any], now: Mapping[str, Any], ignored: Collection[str] = ()) -> list[SettingChange]:
    """The values that differ between two mappings, by dotted key and in the order of the keys; None if one is missing.

    Args:
        ignored: dotted keys whose values are not compared.
    """
    there = dotted(stored)
    here = dotted(now)
    found = []
    for name in sorted(there.keys() | here.keys()):
        if name not in ignored and there.get(name) != here.get(name):
            found.append(SettingChange(name, there.get(name), here.get(name)))
    return found


def changes_in_words(changed: Sequence[SettingChange]) -> str:
    """The changes as one text, for messages; empty if there are none."""
    return "; ".join(str(change) for change in changed)


def dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of nested mappings by dotted key."""
    return {".".join(map(str, path)): value for path, value in flatten_dict(dict(values)).items()}


# --- Settings.


class Resume(enum.Enum):
    """Whether a run resumes if a setting differs from the stored run's."""

    REFUSED = "no"
    IF_NAMED = "if training.resume_with names its key"
    ALLOWED = "yes"


def may_change(name: str, config: Config) -> Resume:
    """Whether a run resumes with another value of a setting.

    Args:
        name: dotted key of the setting.
        config: config that the run resumes with.
    """
    if name == "training.steps" and config.optimizer.schedule != "constant":
        return Resume.REFUSED  # the learning rates of all steps follow from the number of steps
    if name in MAY_CHANGE:
        return Resume.ALLOWED
    if _key_above(name, resumable_keys(config)) is not None:
        return Resume.IF_NAMED
    return Resume.REFUSED


def _key_above(name: str, keys: Sequence[str]) -> str | None:
    """The first of the keys that is `name` or a block that contains it; None if no key does."""
    for key in keys:
        if name == key or name.startswith(f"{key}."):
            return key
    return None


def with_stored_choices(config: Config, stored: Mapping[str, Any]) -> Config:
    """The config with the stored run's checkpoints of other runs and its chat date, where the config leaves them open.

    A run that resumes keeps the checkpoints that it started with, also if the other runs have newer ones.

    Args:
        stored: values of the stored run's config.
    """
    theirs = stored.get("model") or {}
    chosen = {}
    for name in ("run", *OTHER_RUNS):
        if names_same_run(getattr(config.model, name), theirs.get(name)):
            chosen[name] = theirs[name]
    if config.model.chat_date is None:
        chosen["chat_date"] = theirs.get("chat_date")
    return config.model_copy(update={"model": config.model.model_copy(update=chosen)})


def split_step(source: str | Path) -> tuple[Path, str | None]:
    """The folder of a run and the name of its checkpoint, a step or "best", from RUN or RUN/checkpoints/NAME."""
    path = Path(source)
    if path.parent.name == "checkpoints" and (path.name.isdecimal() or path.name == "best"):
        return path.parents[1], path.name
    return path, None


def names_same_run(given: str | None, stored: str | None) -> bool:
    """True if a stored run is the one that a config gives; the stored one names a step, apart from older versions."""
    if given is None or stored is None:
        return False
    run, name = split_step(given)
    stored_run, step = split_step(stored)
    return run == stored_run and (step is None or name in (None, "best", step))


def setting_changes(config: Config, stored: Mapping[str, Any]) -> list[SettingChange]:
    """The settings in which a config, resolved or as a user gives it, differs from the config of a stored run.

    A setting that one of the two leaves open does not differ. Nor does a key that the version of the stored run did not
    have, if it has its default value here.
    """
    values = with_stored_choices(config, stored).model_dump()
    open_keys = _open_keys(values["model"], stored.get("model") or {})
    known = dotted(stored)
    changed = []
    for change in changes(stored, values):
        if change.name in KEYS and change.name not in known and change.now == KEYS[change.name].default:
            continue
        if _key_above(change.name, open_keys) is not None:
            continue
        changed.append(change)
    return changed


def _open_keys(model: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Dotted keys of `model` that one of two configs leaves open: a run, an adapter or the clock determines them."""
    resolved = ["chat_date"]
    if model["run"]:
        resolved += ["path", "decoder"]
    if model["adapter"]:
        resolved += ["path"]
    if model["adapter"] and not model["merge_adapter"]:
        resolved += ["lora"]
    open_keys = []
    for name in resolved:
        if model[name] is None or stored.get(name) is None:
            open_keys.append(f"model.{name}")
    # The characters of another run's decoder are those of its problems.
    if model["run"] and model["decoder"] and model["decoder"]["characters"] is None:
        open_keys.append("model.decoder.characters")
    return open_keys


def check_settings(config: Config, stored: Mapping[str, Any]) -> list[SettingChange]:
    """Compares a config with that of the run in its folder; returns the changes that `training.resume_with` names.

    Args:
        config: config of the run, resolved or as a user gives it.
        stored: values of the stored run's config.
    Raises:
        UserError: a setting differs that may not change, or that `training.resume_with` does not name.
    """
    named = []
    refused = []
    for change in setting_changes(config, stored):
        if _key_above(change.name, config.training.resume_with) is not None:
            named.append(change)
        elif may_change(change.name, config) is not Resume.ALLOWED:
            refused.append(change)
    if not refused:
        return named
    naming = ""
    if all(may_change(change.name, config) is Resume.IF_NAMED for change in refused):
        known = resumable_keys(config)
        names = {str(_key_above(change.name, known)) for change in refused}
        names.update(config.training.resume_with)
        naming = f" training.resume_with=[{','.join(sorted(names))}] to resume that run,"
    raise UserError(
        "output",
        f"contains a run of another config ({changes_in_words(refused)})",
        f"give another output=…,{naming} or --overwrite (overwrite=True in a program) to delete that run",
        value=config.output,
    )


def check_config_file(run: Path, config: Config, stored: Mapping[str, Any] | None) -> None:
    """Compares the config from config.yaml of a run with the config in a checkpoint.

    Args:
        stored: values of the config in the checkpoint; None from older versions, which stored no config there.
    Raises:
        UserError: a setting that affects the weights differs.
    """
    if not stored:
        return
    values = config.model_dump()
    theirs = stored.get("model") or {}
    for name in OTHER_RUNS:
        if names_same_run(values["model"][name], theirs.get(name)):
            values["model"][name] = theirs[name]
    known = dotted(stored)
    removed_keys = [".".join(map(str, path)) for path in unknown_keys(stored)]
    changed = []
    for change in changes(stored, values):
        if change.name not in known or _key_above(change.name, removed_keys) is not None:
            continue  # one of the two versions does not have the key
        if _key_above(change.name, config.training.resume_with) is not None:
            continue
        if change.name in MAY_CHANGE:
            continue
        changed.append(change)
    if changed:
        raise UserError(
            run / "config.yaml",
            f"differs from the config in the run's checkpoints ({changes_in_words(changed)})",
            "restore the file",
        )


# --- Data, weights, code and versions.


def check_data(config: Config, stored: Mapping[str, str], data: Mapping[str, str]) -> None:
    """Refuses to resume with other data than the run began with.

    Args:
        stored: digests in the checkpoint; data without a digest there, as of older versions, are not compared.
        data: result of `data_digests`.
    Raises:
        UserError: a store or problems have changed.
    """
    changed = _other_digests(stored, data)
    if not changed:
        return
    rates = ""
    if config.task.keep:
        rates = f" and the pass rates in {cache_folder('pass_rates')}"
    words = "; ".join(f"{change.name} ({change.there} then, {change.now} now)" for change in changed)
    raise UserError(
        problem=(
            f"data changed since this run began, in prompts, answers or other content: {words}."
            f" Restore the data{rates}, or continue with the new data in a new run: another output=… with"
            f" model.run={config.output!r}"
        )
    )


def check_weights(config: Config, stored: Mapping[str, str], weights: Mapping[str, str], reads_base: bool) -> None:
    """Compares the weights that a run reads and does not keep in its checkpoints with those that it began with.

    Args:
        stored: digests in the checkpoint; weights without a digest there are not compared.
        weights: digest by name; the initial policy has the name BASE.
        reads_base: True if the run still reads parameters of its initial policy.
    Raises:
        UserError: weights have changed. If only rounding may have changed them, as of a warm start on another mesh, or
            if the run reads them no more, a warning names them instead.
    """
    has_files = config.model.path is not None or config.model.run is not None
    may_be_rounded = not has_files or config.warm_start is not None  # the run computes its initial policy
    for name, there, now in _other_digests(stored, weights):
        words = f"{name}: the weights changed since this run began ({there} then, {now} now)"
        if name == BASE and (may_be_rounded or not reads_base):
            logger.warning("%s; the run keeps the weights of its checkpoint", words)
        else:
            raise UserError(problem=words, remedy="restore them, or begin again with --overwrite or another output=…")


def _other_digests(stored: Mapping[str, str], now: Mapping[str, str]) -> list[SettingChange]:
    """The digests, of those that both sides have, that differ."""
    changed = []
    for name in now:
        if name in stored and stored[name] != now[name]:
            changed.append(SettingChange(name, stored[name], now[name]))
    return changed


def warn_of_code(output: Path, stored: Mapping[str, str], code: Mapping[str, str]) -> None:
    """Logs the modules of the user's code that changed since the run's last start."""
    changed = _other_digests(stored, code)
    if changed:
        modules = ", ".join(change.name for change in changed)
        logger.warning("%s resumes with changed code in %s; environment.json has digests", output, modules)


def warn_of_versions(output: Path, stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Logs the versions that differ from those of the run's last start.

    Args:
        stored, now: entries of environment.json.
    """
    names = [name for name in ("recjax", "recjax_source", "packages", "python") if name in stored]
    stored_versions = {name: stored[name] for name in names}
    own_versions = {name: now[name] for name in names}
    changed = changes(stored_versions, own_versions)
    if changed:
        logger.warning(
            "%s resumes with other versions, so its numbers may differ from those of an uninterrupted run: %s",
            output,
            changes_in_words(changed),
        )
