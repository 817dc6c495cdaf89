"""Writes the measurements of benchmarks.accelerator into docs/accelerator.md, no number typed by hand.

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
    lines = [f"### {kind}, {result['date']}", ""]
    if result["rehearsal"]:
        lines += ["A rehearsal in small sizes: the numbers only show that the command works.", ""]
    lines += _generation(parts) + _decoding(parts.get("decoding", {})) + _updates(parts)
    for name, found in parts.items():
        others = {key: value for key, value in found.items() if not _has_table(key, value) and key not in _NOT_SHOWN}
        text = "; ".join(f"{place} {_shown(value)}" for place, value in _leaves(others) if "kernels" not in place)
        if text:
            lines += [f"**{name.replace('_', ' ')}**: {text}", ""]
    if result["skipped"]:
        lines += ["Skipped: " + "; ".join(f"{name} ({why})" for name, why in result["skipped"].items()) + ".", ""]
    return "\n".join(lines)


_NOT_SHOWN = (
    "seconds",
    "shape",
    "weights",
    "sampling_compile_seconds",
    "sampling_peak_bytes",
    "compile_seconds",
    "failures",
)


def _has_table(name: str, value: Any) -> bool:
    return isinstance(value, dict) and not value.keys().isdisjoint(
        ("ms_per_token", "flops_share", "uneven_bytes_share")
    )


def _generation(parts: dict[str, dict]) -> list[str]:
    """Decoding, in milliseconds for a token of all slots; the bound is the time to read weights and cache once."""
    rows = []
    for name, found in parts.items():
        if "ms_per_token" in (decode := found.get("decode", {})):
            times = [f"{decode[key]:.2f}" for key in ("ms_per_token", "bound_ms_per_token")]
            compiling = found.get("sampling_compile_seconds", found.get("compile_seconds", 0.0))
            speed = f"{decode['generation_tokens_per_second']:,.0f}"
            rows.append([name.replace("_", " "), *times, f"{decode['bytes_share']:.0%}", speed, f"{compiling:.0f}"])
    head = ["decode", "ms per token", "bound", "share of bandwidth", "tokens per second with prefill", "compile s"]
    return [*table([head, *rows]), ""] if rows else []


def _decoding(found: dict[str, dict]) -> list[str]:
    """Decoding of many sequences with uneven ends, next to the limit of the bandwidth of weights and caches."""
    rows = []
    for name, measured in found.items():
        if _has_table(name, measured):
            counts = [f"{measured[key]:,}" for key in ("sequences", "slots")]
            speeds = [f"{measured[key]:,.0f}" for key in ("tokens_per_second", "limit_tokens_per_second")]
            shown = [f"{measured[key]:.0%}" for key in ("uneven_bytes_share", "cache_share_of_bytes")]
            rows.append([name.rpartition("_")[0].replace("_", " "), *counts, *speeds, *shown])
    head = ["decoding, uneven ends", "sequences", "slots", "tokens per second", "limit", "share of bandwidth"]
    return [*table([[*head, "bytes of caches"], *rows]), ""] if rows else []


def _updates(parts: dict[str, dict]) -> list[str]:
    """Updates; the measured peak is the process's, so it belongs to the first update of a part."""
    rows = []
    for name, found in parts.items():
        for way, made in found.items():
            if isinstance(made, dict) and "flops_share" in made and "predicted_peak_bytes" in made:
                peaks = [made[key] for key in ("predicted_peak_bytes", "peak_bytes_so_far")]
                gib = ["–" if peak is None else f"{peak / 2**30:.1f}" for peak in peaks]
                label = f"{name} {way}".replace("_", " ")
                seconds = f"{min(made['seconds']):.3f}"
                rows.append([label, seconds, f"{made['flops_share']:.0%}", str(made["micro_batches"]), *gib])
    head = ["update", "seconds", "share of peak FLOPs", "micro-batches", "predicted GiB", "peak GiB so far"]
    return [*table([head, *rows]), ""] if rows else []


def _leaves(found: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Names and values of findings; a nested finding's name begins with the names of its parents."""
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
