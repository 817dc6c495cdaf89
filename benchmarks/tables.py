"""Markdown tables of the measurements of benchmarks.run; no number is typed by hand.

    python -m benchmarks.tables benchmarks/RESULTS.md a.json b.json [...]

Replaces the page's lines between `<!-- tables -->` and `<!-- end of tables -->`, and draws docs/benchmarks.png of
all tables there; without files, it only draws.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from recjax.plots.style import COLORS, GREY, new_figure

PICTURE = Path(__file__).parents[1] / "docs" / "benchmarks.png"
PHASES = {
    "step": "whole step",
    "generate": "generation",
    "prefill": "prefill",
    "decode": "decode",
    "behavior_logprobs": "behavior log-probs",
    "rescore": "forward pass of log-probs",
    "grade": "grading",
    "update": "update",
    "weight_copy": "copy of weights",
    "checkpoint": "checkpoint",
}
SYSTEMS = {  # in the chart
    "trl": "TRL",
    "tunix": "Tunix",
    "transformers": "transformers",
    "torch_shared": "hand-written PyTorch",
    "torch_shared:bfloat16": "hand-written PyTorch, bfloat16",
}
SHAPES = {  # titles in the chart
    "a": "a, small decoder",
    "b": "b, SmolLM2-135M",
    "c": "c, long shared prompt",
    "d": "d, uneven completions",
}
TIMES_OF = ("step", "generate", "update")  # the phases whose ratio to recjax is shown


def tables(results: Sequence[dict[str, Any]]) -> str:
    """All tables of some runs."""
    return "\n".join(_section(result) for result in results)


def _section(result: dict[str, Any]) -> str:
    if not result["rows"]:
        return f"### Shape {result['shape']}\n\nNot measured: {_reasons(result['skipped'])}.\n"
    given, machine = result["given"], result["machine"]
    lengths = f"prompt {given['prompt_tokens']}, completion {given['completion_tokens']}"
    stop = f", of which each token ends with chance {given['stop_share']:.0%}" if given["stop_share"] else ""
    loads = result["other_load"]
    lines = [
        f"### Shape {result['shape']}{_precision(result['rows'])}",
        "",
        f"{_model(given['model'])}; {given['prompts']} prompts × {given['group_size']}, {lengths}{stop};"
        f" {result['repeats']} rounds on {_cpu(machine)}, {machine['cores']} cores, {machine['date'][:10]}."
        f" Other load before a round: median {np.median(loads):.0%}, at most {max(loads):.0%}.",
        "",
        f"`python -m benchmarks.run {' '.join(result['command'])}`",
        "",
        *_times(result["rows"]),
        "",
        *_phases(result["rows"]),
        "",
        *([*_checks(result["checks"]), ""] if result["checks"] else []),
        *_peaks(result),
    ]
    lines += ["", *_notes(result["notes"])]
    if result["skipped"]:
        lines += ["", f"Left out: {_reasons(result['skipped'])}."]
    lines += ["", f"Versions: {_versions(result['rows'])}.", ""]
    return "\n".join(lines)


def _cpu(machine: dict[str, Any]) -> str:
    """The processor's name, family and model, and vector units; earlier results have only the name."""
    details = []
    if machine.get("family"):
        details.append(f"family and model {machine['family']}")
    if machine.get("vector_units"):
        details.append(", ".join(machine["vector_units"]))
    if not details:
        return machine["cpu"]
    return f"{machine['cpu']} ({'; '.join(details)})"


def _precision(rows: list[dict]) -> str:
    """Distinguishes the headings of a shape's two runs."""
    return " in bfloat16" if any(row["system"].endswith(":bfloat16") for row in rows) else ""


def _model(model: str | dict) -> str:
    if isinstance(model, str):
        return f"`{model}`"
    names = {"hidden": "hidden", "layers": "layers", "heads": "heads", "kv_heads": "key-value heads"}
    names |= {"intermediate": "intermediate", "vocabulary": "vocabulary"}
    return "Random weights: " + ", ".join(f"{name} {model[field]}" for field, name in names.items())


def _times(rows: list[dict]) -> list[str]:
    """Seconds and tokens per second of the main phases, and recjax's advantage, pairwise by round."""
    systems = list(dict.fromkeys(row["system"] for row in rows))
    found = {(row["system"], row["phase"]): row for row in rows}
    phases = [phase for phase in TIMES_OF if any((system, phase) in found for system in systems)]
    cells = [["system", *(f"{PHASES[phase]}, s" for phase in phases)]]
    cells[0] += ["generation, tokens/s", *(f"recjax: × in {PHASES[phase]}" for phase in phases), "peak memory, GiB"]
    for system in systems:
        own = {phase: found.get((system, phase)) for phase in phases}
        rate = own.get("generate") and f"{own['generate']['tokens_per_second']:.0f}"
        _, _, precision = system.partition(":")
        against = f"recjax:{precision}" if precision else "recjax"
        ratios = [_ratio(found.get((against, phase)), own[phase]) for phase in phases]
        step = own.get("step") or {}
        memory = step.get("peak_device_bytes") or step.get("peak_memory_bytes")
        memory = f"{memory / 2**30:.2f}" if memory else ""
        cells.append([system, *(_seconds(own[phase]) for phase in phases), rate or "", *ratios, memory])
    return table(cells)


def _seconds(row: dict | None) -> str:
    if row is None:
        return ""
    seconds = row["seconds"]
    digits = 3 if seconds["median"] < 1 else 2
    return f"{seconds['median']:.{digits}f} ({seconds['min']:.{digits}f}–{seconds['max']:.{digits}f})"


def _ratio(ours: dict | None, theirs: dict | None) -> str:
    """How many times as many tokens a second we do, round by round: median (lowest–highest)."""
    if ours is None or theirs is None or ours is theirs:
        return ""
    count = min(len(ours["rounds"]), len(theirs["rounds"]))
    rates = [
        np.divide(row.get("tokens", np.ones(len(row["rounds"])))[:count], row["rounds"][:count])
        for row in (ours, theirs)
    ]
    ratios = rates[0] / rates[1]
    return f"{np.median(ratios):.2f} ({ratios.min():.2f}–{ratios.max():.2f})"


def _phases(rows: list[dict]) -> list[str]:
    """Median seconds of every phase, the first call's seconds, and the shares of the peak."""
    systems = list(dict.fromkeys(row["system"] for row in rows))
    found = {(row["system"], row["phase"]): row for row in rows}
    cells = [["median seconds", *systems]]
    for phase, name in PHASES.items():
        if any((system, phase) in found for system in systems):
            cells.append([name, *(_median(found.get((system, phase))) for system in systems)])
    first = [found.get((system, "step"), {}).get("first_seconds") for system in systems]
    cells.append(["first step, compiling among it", *(f"{seconds:.1f}" if seconds else "" for seconds in first)])
    cells.append(["third step, × of the median", *(_third(found.get((system, "step"), {})) for system in systems)])
    for phase, field, name in [
        ("update", "flops_share", "update: share of peak FLOP/s"),
        ("decode", "flops_share", "decode: share of peak FLOP/s"),
        ("decode", "bytes_share", "decode: share of peak bandwidth"),
    ]:
        shares = [found.get((system, phase), {}).get(field) for system in systems]
        if any(share is not None for share in shares):
            cells.append([name, *(f"{share:.0%}" if share is not None else "" for share in shares)])
    return table(cells)


def _third(row: dict) -> str:
    third = row.get("third_seconds")
    return f"{third / row['seconds']['median']:.2f}" if third else ""


def _median(row: dict | None) -> str:
    return "" if row is None else f"{row['seconds']['median']:.3g}"


def _checks(checks: dict[str, dict]) -> list[str]:
    cells = [["agreement", "greedy tokens equal", "largest difference of log π", "loss", "gradient norm"]]
    for system, found in checks.items():
        greedy, logprobs, loss = (found.get(name, {}) for name in ("greedy", "logprobs", "loss"))
        tokens = f"{greedy['equal_tokens']:.1%} of {greedy['tokens']}" if "tokens" in greedy else ""
        difference = logprobs.get("largest_difference")
        numbers = [loss.get("loss"), loss.get("gradient_norm")]
        cells.append(
            [system, tokens, "" if difference is None else f"{difference:.1e}"]
            + ["" if number is None else f"{number:.6g}" for number in numbers]
        )
    return table(cells)


def _peaks(result: dict[str, Any]) -> list[str]:
    return [
        f"Peaks in {precision}: {peak['flops'] / 1e9:.0f} GFLOP/s, {peak['bytes'] / 1e9:.1f} GB/s ({peak['from']})."
        for precision, peak in result["peaks"].items()
        if peak
    ]


def _notes(notes: dict[str, dict]) -> list[str]:
    """Choices and settings of the systems, without TRL's many settings, which are in the file."""
    shown = {system: {name: text for name, text in own.items() if name != "settings"} for system, own in notes.items()}
    return [
        f"- {system}: "
        + "; ".join(f"{name} {' '.join(text) if isinstance(text, list) else text}" for name, text in own.items())
        for system, own in shown.items()
        if own
    ]


def _reasons(skipped: dict[str, str]) -> str:
    return "; ".join(f"{system} ({reason})" for system, reason in skipped.items())


def _versions(rows: list[dict]) -> str:
    found = {f"{name} {version}" for row in rows for name, version in row["versions"].items()}
    return ", ".join(sorted(found))


def table(cells: list[list[str]]) -> list[str]:
    """Lines of a Markdown table, the first row its head."""
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + " --- |" * len(cells[0]), *lines[1:]]


def put_into_page(page: str, name: str, text: str) -> None:
    """Replaces the page's lines between `<!-- name -->` and `<!-- end of name -->`."""
    path, begin, end = Path(page), f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        sys.exit(f"error: {page} has no lines {begin} and {end} to put tables between; add them")
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")


def show(page: str | None, name: str, about: str, rows: list[list[str]]) -> None:
    """Puts a table and a line about it into a page, as `put_into_page` does; without a page they are printed."""
    text = "\n".join([about, "", *table(rows), ""])
    if page:
        put_into_page(page, name, text)
    else:
        print(text)


def step_ratios(text: str) -> dict[tuple[str, str], tuple[float, float, float]]:
    """Step time relative to recjax, with the lowest and the highest round, by shape and system, from the tables."""
    found = {}
    for section in re.split(r"^### Shape ", text, flags=re.MULTILINE)[1:]:
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 9 and (ratio := re.fullmatch(r"([\d.]+) \(([\d.]+)–([\d.]+)\)", cells[5])):
                found[section[0], cells[0]] = tuple(map(float, ratio.groups()))
    return found


def chart(ratios: dict[tuple[str, str], tuple[float, float, float]]) -> Figure:
    """Bars of step times relative to recjax for the systems that the documentation compares, a panel a shape."""
    by_shape: dict[str, list[str]] = {}
    for shape, system in sorted(ratios, key=lambda key: (key[0], -ratios[key][0])):
        if system in SYSTEMS:
            by_shape.setdefault(shape, []).append(system)
    counts = [len(systems) + 0.6 for systems in by_shape.values()]  # bars, and the space of a title
    figure = new_figure(6.8, 1 + 0.33 * sum(counts), "")
    panels = figure.subplots(len(by_shape), sharex=True, height_ratios=counts, squeeze=False)[:, 0]
    for axes, (shape, systems) in zip(panels, by_shape.items(), strict=True):
        for place, system in enumerate(systems):
            median, low, high = ratios[shape, system]
            color = COLORS[list(SYSTEMS).index(system)]
            axes.barh(place, median, color=color, xerr=[[median - low], [high - median]], ecolor=GREY)
            axes.annotate(f"{median:.2f}", (high, place), (5, 0), textcoords="offset points", va="center")
        axes.axvline(1, color="black", lw=1)
        axes.set_title(SHAPES.get(shape, f"shape {shape}"), loc="left", fontsize="medium")
        axes.set_yticks(range(len(systems)), [SYSTEMS[system] for system in systems])
        axes.set_ylim(len(systems) - 0.5, -0.5)
        axes.spines[["top", "right"]].set_visible(False)
    if by_shape:
        panels[-1].set_xlim(0, None)
        panels[-1].set_xlabel("step time relative to recjax (recjax = 1)")
    return figure


def main(page: str, files: Sequence[str], picture: Path = PICTURE) -> None:
    """Puts the tables of the files into the page, and draws the chart of all its tables for the documentation."""
    made = tables([json.loads(Path(file).read_text(encoding="utf-8")) for file in files])
    if files:
        put_into_page(page, "tables", made)
    ratios = step_ratios(Path(page).read_text(encoding="utf-8"))
    chart(ratios).savefig(picture, dpi=120)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {__doc__.splitlines()[2].strip()}")
    main(sys.argv[1], sys.argv[2:])
