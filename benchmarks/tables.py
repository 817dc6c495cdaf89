"""Markdown tables of the measurements of benchmarks.run; no number is typed by hand.

    python -m benchmarks.tables a.json b.json [...]

prints the tables of these files. `python -m benchmarks.pages` writes those of all committed files into the pages.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax.hub.policy import BFLOAT16_UNITS

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
TIMES_OF = ("step", "generate", "update")  # the phases whose ratio to recjax is shown
# Vector units as in /proc/cpuinfo → name, the widest first.
WIDEST = {"avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}


def tables(results: Sequence[dict[str, Any]]) -> str:
    """All tables of some runs."""
    return "\n".join(section(result) for result in results)


def section(result: dict[str, Any], file: str | None = None) -> str:
    """The tables of a run, below a heading with shape and CPU.

    Args:
        file: path of the run's file, for a link.
    """
    title = f"### Shape {result['shape']}: {kind_of_cpu(result['machine'])}"
    if not result["rows"]:
        return f"{title}\n\nNot measured: {_reasons(result['skipped'])}.\n"
    given, machine = result["given"], result["machine"]
    lengths = f"prompt {given['prompt_tokens']}, completion {given['completion_tokens']}"
    stop = f", of which each token ends with chance {given['stop_share']:.0%}" if given["stop_share"] else ""
    loads = result["other_load"]
    link = f" ([file]({file}))" if file else ""
    lines = [
        title,
        "",
        f"{_model(given['model'])}; {given['prompts']} prompts × {given['group_size']}, {lengths}{stop};"
        f" {result['repeats']} rounds on {_cpu(machine)}, {_cores(machine)}, {machine['date'][:10]}."
        f" {_others(result)} Other load before a round: median {np.median(loads):.0%}, at most {max(loads):.0%}.",
        "",
        f"`python -m benchmarks.run {' '.join(result['command'])}`{link}",
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
    """The processor's name, family and model, and vector units as Linux names them."""
    details = [text for text in (_family(machine), ", ".join(machine.get("vector_units", []))) if text]
    if not details:
        return machine["cpu"]
    return f"{machine['cpu']} ({'; '.join(details)})"


def _family(machine: dict[str, Any]) -> str:
    family, _, model = machine.get("family", "").partition(" ")
    if not family:
        return ""
    return f"family {family}, model {model}"


def kind_of_cpu(machine: dict[str, Any]) -> str:
    """A name that differs between two kinds of CPU: maker, family and model, widest vector units, cores."""
    name = machine["cpu"].replace("(R)", "").replace("(TM)", "").partition("@")[0]
    words = [word for word in name.split() if word not in ("CPU", "Processor")]
    parts = [" ".join(words), _family(machine), _widest_units(machine.get("vector_units", []))]
    parts.append(_cores(machine))
    return ", ".join(part for part in parts if part)


def _cores(machine: dict[str, Any]) -> str:
    """The number of cores, or of CPUs that share cores; earlier files do not say which."""
    cpus = machine["cores"]
    cores = machine.get("physical_cores") or cpus
    if cores == cpus:
        return f"{cpus} cores"
    return f"{cpus} CPUs of {cores} {'core' if cores == 1 else 'cores'}"


def _widest_units(units: Sequence[str]) -> str:
    """The widest vectors, and whether the CPU multiplies bfloat16 numbers."""
    widest = next((name for unit, name in WIDEST.items() if unit in units), "")
    if "amx_tile" in units:
        widest += " and AMX"
    if BFLOAT16_UNITS.isdisjoint(units):
        return widest
    return f"{widest} with BF16"


def _others(result: dict[str, Any]) -> str:
    """What the other systems did while one worked; earlier files do not say it, and the systems waited."""
    if are_stopped(result):
        return "While one system worked, all others were stopped."
    return "**The other systems waited in memory**, which slows the one that works."


def are_stopped(result: dict[str, Any]) -> bool:
    """True if all other systems were stopped while one worked."""
    return result.get("others") == "stop"


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
    return with_range(round_ratios(ours, theirs))


def with_range(ratios: np.ndarray) -> str:
    """Median (lowest–highest)."""
    return f"{np.median(ratios):.2f} ({ratios.min():.2f}–{ratios.max():.2f})"


def round_ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> np.ndarray:
    """Our tokens a second over theirs in each round, [rounds]; without tokens, their seconds over ours."""
    count = min(len(ours["rounds"]), len(theirs["rounds"]))
    rates = [
        np.divide(row.get("tokens", np.ones(len(row["rounds"])))[:count], row["rounds"][:count])
        for row in (ours, theirs)
    ]
    return rates[0] / rates[1]


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


if __name__ == "__main__":
    print(tables([json.loads(Path(file).read_text(encoding="utf-8")) for file in sys.argv[1:]]))
