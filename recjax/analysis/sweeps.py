"""Sweep files: a base config and the settings that its runs cross; `recjax.sweep` shows one."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recjax.config import Config, make_config
from recjax.config.yaml_values import read_yaml_file, write_override
from recjax.errors import UserError

LOGS = "logs"  # the folder next to the runs' folders
_OPTIONAL = ("overrides", "smoke")  # keys of a file


class SweepRun(NamedTuple):
    """One run: its place in the grid, the command line that makes it, and the config that gives."""

    settings: dict[str, str]
    overrides: list[str]
    config: Config

    @property
    def name(self) -> str:
        """The settings' names, in the order of the file's axes."""
        return "__".join(self.settings.values())

    def steps_done(self) -> int:
        """Number of optimizer steps in the run's metrics, which begin with a row before the first step."""
        path = Path(self.config.output) / "metrics.jsonl"
        rows = path.read_bytes().count(b"\n") if path.is_file() else 0
        return min(max(rows - 1, 0), self.config.training.steps)


def read_sweep(path: str | Path, smoke: bool = False, extra: Sequence[str] = ()) -> tuple[Path, list[SweepRun]]:
    """The base config's path and the runs of a sweep file; every run is checked.

    Args:
        smoke: take the file's smoke block.
        extra: `key=value` overrides for all runs; they come last.
    Raises:
        UserError: the file is unreadable, names a setting that it does not define, or makes a config that is refused.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{str(path)!r}", "no such sweep file", "name a YAML file")
    content = read_yaml_file(path)
    needed = {"config", "output", "settings", "grids"}
    known = ["config", "output", "settings", "grids", *_OPTIONAL]
    if not isinstance(content, dict) or content.keys() - known or needed - content.keys():
        raise UserError(path, f"must have the keys {', '.join(sorted(needed))}, and may have {' and '.join(_OPTIONAL)}")
    section = content.get("smoke") if smoke else content
    if not isinstance(section, dict) or "grids" not in section:
        raise UserError(path, "--smoke needs a block 'smoke' with 'grids' and, optionally, 'overrides'")
    for key in ("config", "output"):
        if not isinstance(content[key], str):
            raise UserError(f"{path}: {key}", "must be text", "put it in quotes", value=content[key])
    output = content["output"] + ("_smoke" if smoke else "")
    settings: dict[str, dict[str, list[tuple[str, Any]]]] = {}  # axis → name → changes of the config
    for axis, block in _mapping(path, "settings", content["settings"]):
        names = _mapping(path, f"settings.{axis}", block)
        settings[axis] = {name: _mapping(path, f"settings.{axis}.{name}", changes) for name, changes in names}
    shared = [_mapping(path, "overrides", content.get("overrides"))]
    last = [_mapping(path, "smoke.overrides", section.get("overrides"))] if smoke else []
    if not isinstance(section["grids"], list) or not section["grids"]:
        raise UserError(f"{path}: grids", "must be a list of at least one grid", value=section["grids"])
    base = path.parent / content["config"]
    values = read_yaml_file(base)
    runs: dict[str, SweepRun] = {}
    for chosen in itertools.chain.from_iterable(_cross(path, settings, grid) for grid in section["grids"]):
        name = "__".join(chosen.values())
        if name == LOGS:
            raise UserError(path, f"the setting {name} has the name of the logs' folder", "rename it")
        if name not in runs:
            blocks = [*shared, *(settings[axis][key] for axis, key in chosen.items()), *last]
            overrides = [write_override(*change) for change in itertools.chain.from_iterable(blocks)]
            overrides += [*extra, write_override("output", f"{output}/{name}")]
            try:
                runs[name] = SweepRun(chosen, overrides, make_config(values, overrides, str(base)))
            except UserError as error:
                raise error.within(f"{path}: run {name}") from error
        elif runs[name].settings != chosen:
            first_names, second_names = (" and ".join(names.values()) for names in (runs[name].settings, chosen))
            raise UserError(
                path, f"{first_names}, and {second_names}, would both be run {name}", "rename one of these settings"
            )
    return base, list(runs.values())


def _mapping(path: Path, block_name: str, block: Any) -> list[tuple[str, Any]]:
    """The keys, as text, and values of a block of the file; an empty list for an empty block."""
    if not isinstance(block, dict | None):
        raise UserError(f"{path}: {block_name}", "must be a block of keys and values", value=block)
    pairs = [(str(key), value) for key, value in (block or {}).items()]
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            path, f"{block_name}: the name {twice[0]!r} occurs twice (1 and '1' are one name)", "rename one"
        )
    return pairs


def _cross(path: Path, settings: dict[str, dict], grid: Any) -> list[dict[str, str]]:
    """All combinations of a grid's names; the last axis changes fastest."""
    if not isinstance(grid, dict) or list(grid) != list(settings):
        raise UserError(path, f"a grid must name the axes {', '.join(settings)} in this order", f"got {grid!r}")
    choices = []
    for axis, defined in settings.items():
        if grid[axis] != "all" and not isinstance(grid[axis], list):
            raise UserError(f"{path}: {axis}", "must be a list of names, or all", value=grid[axis])
        choices.append([*defined] if grid[axis] == "all" else [str(name) for name in grid[axis]])
        if unknown := [name for name in choices[-1] if name not in defined]:
            raise UserError(path, f"{axis}: {unknown[0]!r} is not among settings.{axis}: {', '.join(defined)}")
    return [dict(zip(settings, names, strict=True)) for names in itertools.product(*choices)]
