"""Sweep files: a base config and the settings that its runs cross; `recjax.sweep` shows one."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from recjax.config import Config, load_config
from recjax.config.load import parse_yaml

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


def read_sweep(path: str | Path, smoke: bool = False, extra: Sequence[str] = ()) -> tuple[Path, list[SweepRun]]:
    """The base config's path and the runs of a sweep file, every one of them checked.

    Args:
        smoke: take the file's smoke block.
        extra: `key=value` overrides for all runs; they come last.
    Raises:
        ValueError: the file is unreadable, names what it does not define, or makes a config that is refused.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{str(path)!r}: there is no such sweep file")
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: not a valid YAML file ({error})") from error
    needed, known = {"config", "output", "settings", "grids"}, ["config", "output", "settings", "grids", *_OPTIONAL]
    if not isinstance(content, dict) or content.keys() - known or needed - content.keys():
        raise ValueError(f"{path}: takes the keys {', '.join(known)}, all needed but {' and '.join(_OPTIONAL)}")
    part = content.get("smoke") if smoke else content
    if not isinstance(part, dict) or "grids" not in part:
        raise ValueError(f"{path}: --smoke needs a block 'smoke' with 'grids' and, if wanted, 'overrides'")
    base, output = path.parent / content["config"], content["output"] + ("_smoke" if smoke else "")
    # YAML may hold a name as a number.
    settings = {
        axis: {str(name): block or {} for name, block in names.items()} for axis, names in content["settings"].items()
    }
    runs: dict[str, SweepRun] = {}
    for chosen in itertools.chain.from_iterable(_cross(path, settings, grid) for grid in part["grids"]):
        name = "__".join(chosen.values())
        if name not in runs:
            blocks = [content.get("overrides", {}), *(settings[axis][key] for axis, key in chosen.items())]
            blocks += [part.get("overrides", {})] if smoke else []
            overrides = [*itertools.chain(*map(_as_overrides, blocks)), *extra, f"output={output}/{name}"]
            try:
                runs[name] = SweepRun(chosen, overrides, load_config(base, overrides))
            except ValueError as error:
                raise ValueError(f"{path}: run {name}: {error}") from error
    return base, list(runs.values())


def _cross(path: Path, settings: dict[str, dict], grid: dict[str, Any]) -> list[dict[str, str]]:
    """Every combination of a grid's names, the last axis changing fastest."""
    if not isinstance(grid, dict) or list(grid) != list(settings):
        raise ValueError(f"{path}: a grid must name the axes {', '.join(settings)} in this order; got {grid!r}")
    choices = []
    for axis, defined in settings.items():
        choices.append([*defined] if grid[axis] == "all" else [str(name) for name in grid[axis]])
        if unknown := [name for name in choices[-1] if name not in defined]:
            raise ValueError(f"{path}: {axis}: {unknown[0]!r} is not among settings.{axis}: {', '.join(defined)}")
    return [dict(zip(settings, names, strict=True)) for names in itertools.product(*choices)]


def _as_overrides(block: dict[str, Any]) -> list[str]:
    texts = {key: yaml.safe_dump(value, default_flow_style=True, width=10_000) for key, value in block.items()}
    return [f"{key}={text.splitlines()[0]}" for key, text in texts.items()]
