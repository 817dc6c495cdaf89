"""The page of what benchmarks.accelerator measured: the table of docs/accelerator.md, no number typed by hand.

    python -m benchmarks.accelerator_page FILE.json [...]

Without files, the page says that nothing is measured yet.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import put_into_page, table

PAGE = Path(__file__).parents[1] / "docs" / "accelerator.md"
NONE_YET = "None yet: no file of measurements is in the repository.\n"


def page(results: Sequence[dict[str, Any]]) -> str:
    """The text between the page's marks."""
    return "\n".join(_section(result) for result in results) or NONE_YET


def _section(result: dict[str, Any]) -> str:
    parts = result["parts"]
    kind = parts.get("device", {}).get("kind", "device not recorded")
    lines = [
        f"### {kind}, {result['date']}",
        "",
        f"`python -m benchmarks.accelerator {' '.join(result['command'])}`",
        "",
    ]
    if result["rehearsal"]:
        lines += ["A rehearsal in small sizes: the numbers show that the command works, and nothing else.", ""]
    for name, found in parts.items():
        lines += [f"**{name.replace('_', ' ')}** ({found['seconds']:.0f} s)", ""]
        rows = [[place, _shown(value)] for place, value in _leaves(found) if place != "seconds"]
        lines += [*table([["measured", "value"], *rows]), ""]
    if result["skipped"]:
        lines += ["Skipped: " + "; ".join(f"{name} ({why})" for name, why in result["skipped"].items()) + ".", ""]
    return "\n".join(lines)


def _leaves(found: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Names and values of findings, those of nested ones with the names that they stand under."""
    pairs = []
    for name, value in found.items():
        place = f"{before}{name}"
        if isinstance(value, dict):
            pairs += _leaves(value, f"{place}.")
        elif name not in ("last_words", "rows", "name_ms_count"):
            pairs.append((place, value))
    return pairs


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return str(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    made = page([json.loads(Path(file).read_text(encoding="utf-8")) for file in sys.argv[1:]])
    put_into_page(str(PAGE), "accelerator", made)
