"""Writes the pages about speed on CPUs from the files in benchmarks/results; no number is typed by hand.

    python -m benchmarks.pages

To add a measurement, put the file of benchmarks.run into that folder and give the command. It writes the lines between
the marks of `blocks()`, and docs/benchmarks.png. The summaries compare systems in files whose other systems were
stopped (`--others stop`, the default); of several files with one CPU, shape and system, they take the newest.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.shapes import SHAPES
from benchmarks.tables import (
    BFLOAT16_UNITS,
    PHASES,
    TIMES_OF,
    are_stopped,
    kind_of_cpu,
    put_into_page,
    round_ratios,
    section,
    table,
    with_range,
)
from recjax.plots.style import COLORS, GREY, new_figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "benchmarks.png"
# The systems of other authors and hand-written ones, as the pages call them; recjax's own variants are not compared.
PEERS = {
    "torch_shared": "hand-written PyTorch",
    "torch": "hand-written PyTorch without shared prompts",
    "transformers": "transformers",
    "trl": "TRL",
    "tunix": "Tunix",
}
TITLES = {
    "a": "a, small decoder",
    "b": "b, SmolLM2-135M",
    "c": "c, long shared prompt",
    "d": "d, uneven completions",
}
NAMED_VERSIONS = ("jax", "torch", "trl", "google-tunix", "transformers")  # the others are in the file
NONE_YET = "None yet: the repository has no files for this table.\n"


class Comparison(NamedTuple):
    """How much more than recjax one system takes, in one file.

    Attributes:
        file: the file's name.
        cpu: kind of CPU, see `kind_of_cpu`.
        has_bfloat16: whether the CPU multiplies bfloat16 numbers.
        system: the label of the system, such as "torch_shared:bfloat16".
        ratios: phase → seconds for a token as a multiple of recjax's, [rounds].
        memory: peak memory as a multiple of recjax's.
        date: time of the measurement, in ISO 8601.
        versions: package → version, of both systems.
    """

    file: str
    cpu: str
    has_bfloat16: bool
    shape: str
    system: str
    ratios: dict[str, np.ndarray]
    memory: float | None
    date: str
    versions: dict[str, str]

    @property
    def step(self) -> float:
        """The median ratio of a whole step."""
        return float(np.median(self.ratios["step"]))


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The files of benchmarks.run by name; the folder also has files of other benchmarks, which have other fields."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if {"shape", "machine", "rows"} <= content.keys():
            found[path.name] = content
    return found


def comparisons(results: Mapping[str, dict[str, Any]]) -> list[Comparison]:
    """Other systems next to recjax in the same precision; the lowest ratio of a step first."""
    found = []
    for file, result in results.items():
        for label in _labels(result):
            system, separator, precision = label.partition(":")
            if system in PEERS:
                found.append(_compare(file, result, label, f"recjax{separator}{precision}"))
    return _newest_of_each(found)


def float32_next_to_bfloat16(results: Mapping[str, dict[str, Any]]) -> list[Comparison]:
    """recjax in float32 next to recjax in bfloat16, where a file has both; the lowest ratio of a step first."""
    return _newest_of_each(_compare(file, result, "recjax", "recjax:bfloat16") for file, result in results.items())


def _labels(result: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["system"] for row in result["rows"]))


def _compare(file: str, result: Mapping[str, Any], system: str, recjax: str) -> Comparison | None:
    """None if the file does not have both on a CPU, each with all other systems stopped."""
    rows = {(row["system"], row["phase"]): row for row in result["rows"]}
    theirs = rows.get((system, "step"))
    ours = rows.get((recjax, "step"))
    if theirs is None or ours is None or SHAPES[result["shape"]].gpu or not are_stopped(result):
        return None
    ratios = {}
    for phase in TIMES_OF:
        if (system, phase) in rows and (recjax, phase) in rows:
            ratios[phase] = round_ratios(rows[recjax, phase], rows[system, phase])
    memory = None
    if "peak_memory_bytes" in theirs and "peak_memory_bytes" in ours:
        memory = theirs["peak_memory_bytes"] / ours["peak_memory_bytes"]
    machine = result["machine"]
    return Comparison(
        file=file,
        cpu=kind_of_cpu(machine),
        has_bfloat16=not BFLOAT16_UNITS.isdisjoint(machine.get("vector_units", [])),
        shape=result["shape"],
        system=system,
        ratios=ratios,
        memory=memory,
        date=machine["date"],
        versions=ours["versions"] | theirs["versions"],
    )


def _newest_of_each(found: Iterable[Comparison | None]) -> list[Comparison]:
    """The newest of each CPU, shape and system, sorted by the ratio of a step."""
    newest = {}
    for one in sorted((one for one in found if one is not None), key=lambda one: one.date):
        newest[one.cpu, one.shape, one.system] = one
    return sorted(newest.values(), key=lambda one: one.step)


def name_of(label: str) -> str:
    """The system's name on pages."""
    system, _, precision = label.partition(":")
    if precision:
        return f"{PEERS[system]}, {precision}"
    return PEERS[system]


def _cells(one: Comparison) -> list[str]:
    """Ratios of the phases and of memory, and the file with date and versions."""
    cells = [with_range(one.ratios[phase]) if phase in one.ratios else "" for phase in TIMES_OF]
    cells.append("" if one.memory is None else f"{one.memory:.2f}")
    versions = [f"{name} {one.versions[name]}" for name in NAMED_VERSIONS if name in one.versions]
    cells.append(f"[{one.date[:10]}](../benchmarks/results/{one.file}), {', '.join(versions)}")
    return cells


def speed_table(found: list[Comparison]) -> str:
    """A line for each CPU, shape and system, with median and range over rounds; the worst for recjax first."""
    if not found:
        return NONE_YET
    cells = [["CPU", "shape", "system", *(PHASES[phase] for phase in TIMES_OF), "peak memory", "file, versions"]]
    for one in found:
        cells.append([one.cpu, TITLES.get(one.shape, one.shape), name_of(one.system), *_cells(one)])
    return "\n".join([*table(cells), ""])


def speed_by_cpu(found: list[Comparison]) -> str:
    """A line for each kind of CPU, with the step's median ratio in every shape; the worst for recjax first."""
    if not found:
        return NONE_YET
    systems = _in_order(one.system for one in found)
    cells = [["CPU", *map(name_of, systems), "measured"]]
    for cpu in dict.fromkeys(one.cpu for one in found):
        own = [one for one in found if one.cpu == cpu]
        ratios = [", ".join(f"{one.step:.2f} ({one.shape})" for one in own if one.system == label) for label in systems]
        cells.append([cpu, *ratios, ", ".join(sorted({one.date[:10] for one in own}))])
    return "\n".join([*table(cells), ""])


def _in_order(labels: Iterable[str]) -> list[str]:
    """Each label once: float32 first, then in the order of PEERS."""
    order = list(PEERS)
    return sorted(set(labels), key=lambda label: (":" in label, order.index(label.partition(":")[0])))


def bfloat16_table(found: list[Comparison]) -> str:
    """A line for each CPU and shape: recjax's float32 as a multiple of its bfloat16; the slowest bfloat16 first."""
    if not found:
        return NONE_YET
    cells = [["CPU", "shape", *(PHASES[phase] for phase in TIMES_OF), "peak memory", "file, versions"]]
    for one in found:
        cells.append([one.cpu, TITLES.get(one.shape, one.shape), *_cells(one)])
    return "\n".join([*table(cells), ""])


def bfloat16_verdicts(found: list[Comparison]) -> str:
    """On which CPUs every round was faster in bfloat16, on which every round was slower, and on which neither."""
    if not found:
        return NONE_YET
    verdicts = {"slower": [], "neither in every round": [], "faster": []}
    for one in found:
        ratios = one.ratios["step"]
        if ratios.max() < 1:
            kind = "slower"
        elif ratios.min() > 1:
            kind = "faster"
        else:
            kind = "neither in every round"
        verdicts[kind].append(one)
    cells = [["a step in bfloat16 is", "CPU", "shapes, with float32's seconds over bfloat16's"]]
    for kind, members in verdicts.items():
        for cpu in dict.fromkeys(one.cpu for one in members):
            shapes = [f"{one.shape} {with_range(one.ratios['step'])}" for one in members if one.cpu == cpu]
            cells.append([kind, cpu, ", ".join(shapes)])
    return "\n".join([*table(cells), ""])


def waiting_table(results: Mapping[str, dict[str, Any]]) -> str:
    """Step times of systems that share one CPU with waiting systems, and with stopped ones, where files have both."""
    stopped = _seconds_of_steps(result for result in results.values() if are_stopped(result))
    waiting = _seconds_of_steps(result for result in results.values() if not are_stopped(result))
    cells = [["CPU", "shape", "system", "step, others stopped, s", "step, others waiting, s", "waiting, × of stopped"]]
    for key in sorted(stopped.keys() & waiting.keys()):
        seconds = [stopped[key], waiting[key]]
        ratio = np.median(seconds[1]) / np.median(seconds[0])
        cells.append([*key, *map(with_range, seconds), f"{ratio:.2f}"])
    if len(cells) == 1:
        return NONE_YET
    return "\n".join([*table(cells), ""])


def _seconds_of_steps(results: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], np.ndarray]:
    """(CPU, shape, system) → seconds of the newest file's steps, [rounds]."""
    found = {}
    for result in sorted(results, key=lambda result: result["machine"]["date"]):
        for row in result["rows"]:
            if row["phase"] == "step":
                found[kind_of_cpu(result["machine"]), result["shape"], row["system"]] = np.array(row["rounds"])
    return found


def all_tables(results: Mapping[str, dict[str, Any]]) -> str:
    """The tables of every file, by shape and then by file."""
    if not results:
        return NONE_YET
    files = sorted(results, key=lambda file: (results[file]["shape"], file))
    return "\n".join(section(results[file], f"results/{file}") for file in files)


def blocks(results: Mapping[str, dict[str, Any]]) -> dict[tuple[str, str], str]:
    """(page, mark) → the text that belongs between the page's marks."""
    found = comparisons(results)
    precisions = float32_next_to_bfloat16(results)
    return {
        ("benchmarks/RESULTS.md", "tables"): all_tables(results),
        ("benchmarks/RESULTS.md", "waiting"): waiting_table(results),
        ("docs/performance.md", "speed"): speed_table(found),
        ("docs/performance.md", "bfloat16"): bfloat16_table(precisions),
        ("docs/comparison.md", "speed"): speed_by_cpu(found),
        ("docs/memory.md", "bfloat16"): bfloat16_verdicts(precisions),
    }


def picture_text(found: list[Comparison]) -> str:
    """What the picture shows, which its file has as a comment: a test compares it with the files."""
    return "; ".join(f"{one.cpu}, {one.shape}, {one.system}: {with_range(one.ratios['step'])}" for one in found)


def chart(found: list[Comparison]) -> Figure:
    """Bars of step times relative to recjax, a panel for each kind of CPU; the worst for recjax first."""
    by_cpu: dict[str, list[Comparison]] = {}
    for one in found:
        by_cpu.setdefault(one.cpu, []).append(one)
    counts = [len(own) + 0.8 for own in by_cpu.values()]  # bars, and the space of a title
    figure = new_figure(6.8, 1 + 0.33 * sum(counts), "")
    if not found:
        return figure
    panels = figure.subplots(len(by_cpu), sharex=True, height_ratios=counts, squeeze=False)[:, 0]
    for axes, (cpu, own) in zip(panels, by_cpu.items(), strict=True):
        for place, one in enumerate(own):
            ratios = one.ratios["step"]
            errors = [[one.step - ratios.min()], [ratios.max() - one.step]]
            color = COLORS[list(PEERS).index(one.system.partition(":")[0])]
            axes.barh(place, one.step, color=color, xerr=errors, ecolor=GREY)
            axes.annotate(f"{one.step:.2f}", (ratios.max(), place), (5, 0), textcoords="offset points", va="center")
        axes.axvline(1, color="black", lw=1)
        axes.set_title(cpu, loc="left", fontsize="medium")
        axes.set_yticks(range(len(own)), [f"{one.shape}: {name_of(one.system)}" for one in own])
        axes.set_ylim(len(own) - 0.5, -0.5)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlim(0, None)
    panels[-1].set_xlabel("step time relative to recjax (recjax = 1)")
    return figure


def main(folder: Path = RESULTS, root: Path = ROOT) -> None:
    """Writes all blocks and the picture."""
    results = read_results(folder)
    for (page, mark), text in blocks(results).items():
        put_into_page(str(root / page), mark, text)
    found = comparisons(results)
    path = root / PICTURE.relative_to(ROOT)
    chart(found).savefig(path, dpi=120, metadata={"Description": picture_text(found)})


if __name__ == "__main__":
    main()
