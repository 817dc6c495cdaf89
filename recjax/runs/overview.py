"""What a run folder records, in a few values, for tables and reports of runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import PydanticUndefined

from recjax.config import KEYS
from recjax.config.yaml_values import write_yaml
from recjax.logs.metrics import read_metrics
from recjax.runs.lock import is_alive
from recjax.runs.spec import dotted
from recjax.runs.stored_runs import base_policy, earlier_values, starts, stored_config
from recjax.runtime.passwords import without_password

NONE = "–"  # stands for a value that does not exist


class Overview(NamedTuple):
    """A run, finished or not.

    settings: values of the config by dotted key.
    earlier: for each setting that a resume changed, its values before, in words.
    rows: rows of metrics.jsonl.
    summary: content of summary.json; empty before the end of the run, or if the file is damaged.
    starts: entries of environment.json.
    is_running: True if a process is writing the run.
    base: digest of the initial policy; None if the run has no record of it.
    """

    folder: Path
    settings: dict[str, Any]
    earlier: dict[str, list[str]]
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    starts: list[dict[str, Any]]
    is_running: bool
    base: str | None

    @property
    def steps(self) -> int:
        """The last optimizer step with a row of metrics."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def planned_steps(self) -> int | None:
        """`training.steps`; None if the config of an older version has no such number."""
        return _whole_number(self.settings.get("training.steps"))

    @property
    def state(self) -> str:
        """The run's state in one word."""
        if self.is_running:
            return "running"
        made = _whole_number(self.summary.get("steps"))
        if self.planned_steps is not None and made is not None and min(made, self.steps) >= self.planned_steps:
            return "finished"
        return "stopped"

    @property
    def hours(self) -> float | None:
        """Hours in which the run worked, over all its starts; None before the first step."""
        seconds = self.last("wall_seconds")
        if self.state == "finished":
            seconds = self.summary.get("wall_seconds", seconds)
        if not isinstance(seconds, int | float):
            return None
        return seconds / 3600

    def last(self, metric: str) -> Any:
        """The latest value of a metric; None if the run has none."""
        for row in reversed(self.rows):
            if metric in row:
                return row[metric]
        return None

    def setting_text(self, name: str) -> str:
        """A setting with the values that it had before a resume: "0.002 until step 40, then 0.0005"."""
        text = NONE
        if name in self.settings:
            text = setting_value_text(self.settings[name])
        if name not in self.earlier:
            return text
        earlier = ", ".join(self.earlier[name])
        return f"{earlier}, then {text}"


def _whole_number(value: Any) -> int | None:
    """The value, or None if it is no whole number, as in a file that was changed by hand."""
    return value if isinstance(value, int) else None


def count_words(runs: Sequence[Overview]) -> str:
    """The number of runs, with the noun."""
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def read_overview(folder: Path) -> Overview:
    """Reads a run folder.

    Raises:
        UserError: config.yaml or metrics.jsonl is damaged.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {}
    if not isinstance(summary, dict):
        summary = {}
    return Overview(
        folder=folder,
        settings=dotted(stored_config(folder)),
        earlier=earlier_values(folder),
        rows=read_metrics(folder / "metrics.jsonl"),
        summary=summary,
        starts=starts(folder),
        is_running=is_alive(folder),
        base=base_policy(folder),
    )


def setting_value_text(value: Any) -> str:
    """A value of the config as text, without passwords; texts with line breaks and such are quoted."""
    if isinstance(value, str) and value.isprintable():
        text = value
    elif isinstance(value, float):
        text = repr(value)
    else:
        text = write_yaml(value, flow=True)
    return without_password(text)


def default_text(name: str) -> str:
    """The default of a key as text; a dash if the key has none."""
    if name not in KEYS:
        return NONE
    default = KEYS[name].get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return NONE
    return setting_value_text(default)


def own_settings(overview: Overview) -> list[tuple[str, str, str]]:
    """Key, value and default of each setting that differs from its default; of an optional block, also its name."""
    rows = []
    blocks = set()
    for name in overview.settings:
        if name == "output":
            continue
        parts = name.split(".")
        for length in range(1, len(parts)):
            block = ".".join(parts[:length])
            if block not in blocks and block in KEYS and KEYS[block].default is None:
                blocks.add(block)
                rows.append((block, "given", "null"))
        text = overview.setting_text(name)
        default = default_text(name)
        if text != default:
            rows.append((name, text, default))
    return rows
