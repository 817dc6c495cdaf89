"""docs/objectives.md and docs/papers.md, every axis and preset from the code; README.md here, presets on the toy task.

python -m experiments.objectives.page              # from the code and, if it is there, metrics.parquet
python -m experiments.objectives.page --collect    # first reads the runs of grid.yaml into metrics.parquet
"""

import inspect
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from absl import app, flags
from matplotlib.figure import Figure

from experiments.objectives.coefficients import draw_coefficients
from recjax import algorithms
from recjax.algorithms.axes import ADDED_TERMS, AXES, READABLE
from recjax.algorithms.catalog import FIELD, PAPER, SOURCES, Preset, changes_of
from recjax.algorithms.options import readable_options
from recjax.algorithms.reading import EVERYWHERE, MICRO_BATCH, TERMS, WHOLE_BATCH
from recjax.analysis.collect import read_runs, without_other_metrics
from recjax.analysis.compare import final
from recjax.analysis.statistics import estimate
from recjax.errors import UserError
from recjax.plots.style import COLORS, GREY, add_legend, new_figure, save_figure

FLAGS = flags.FLAGS
HERE = Path(__file__).parent
METRICS = HERE / "metrics.parquet"
DIFFERENCES = HERE / "differences.csv"
DOCS = HERE.parent.parent / "docs"
OFF = {"objective": "The reduction of the loss of each token, `token_loss`."}  # descriptions of axes without a function
REGIMES = {"interval_20": "sync_interval 20", "offline": "offline"}
# Keys of other blocks that belong to a paper's method; the notes of recjax/algorithms/catalog.py name them.
COMPANIONS: dict[str, dict[str, dict]] = {
    **{name: {"regime": {"sync_interval": 20}} for name, preset in PAPER.items() if preset.paper == "2509.24203"},
    **{name: {"regime": {"offline": True}} for name in ("opmd", "opmd_token", "red_weight", "pairwise_consistency")},
    "dr_grpo": {"algorithm": {"reduction": {"name": "fixed_length", "length": 1024}}},
    "opo": {"regime": {"sync_interval": 1}},
    "dapo": {"experience": {"refill": {"batches": 10}}, "task": {"overlong_tokens": 64}},
    "flash_reinforce": {"rollout": {"group_size": 1}},
    "score_centering": {"rollout": {"recorded_top_k": 128}},
    "klpo": {"rollout": {"group_size": 1, "recorded_top_k": 16}},
    "respo": {"training": {"updates_per_batch": 2, "minibatches": 4}},
    "cod": {"task": {"agent": "my_agents:play"}, "rollout": {"max_context_tokens": 1024}},
    "offline_grpo": {"experience": {"store": "expert.db"}},
    "chord": {"experience": {"mix": {"store": "expert.db", "share": 0.125, "of": "batch"}}},
    "luffy": {"experience": {"mix": {"store": "expert.db", "share": 0.125, "of": "group"}}},
    "mis": {"training": {"updates_per_batch": 2}},
    "tis": {"training": {"updates_per_batch": 2}},
    "decoupled_ppo": {"training": {"updates_per_batch": 2}},
    "a3po": {"training": {"updates_per_batch": 2}},
    "on_policy_distillation": {"model": {"teacher": "models/TEACHER"}},
    "logit_distillation": {"model": {"teacher": "models/TEACHER"}},
    "sdpo": {
        "model": {"teacher": "policy", "teacher_rate": 0.05},
        "task": {"teacher_template": "{prompt}\n\nA correct solution:\n{better}", "teacher_tokens": 2048},
    },
    "echo": {"task": {"agent": "my_agents:play"}, "rollout": {"max_context_tokens": 1024}},
}
PAPERS = """\
# Paper index

<!-- Written by python -m experiments.objectives.page; a test compares this page with its output. -->

Every preset with its source and a config to paste. Numbers are the paper's, unless a note says otherwise. Where two
forms of an algorithm are in use, the note has the override that gives the second form: put `algorithm.` before each
`AXIS={…}`. [Algorithms](objectives.md) explains the axes, and [off-policy regimes](regimes.md) the regimes.
`experiments/` has the settings of 2509.24203 on GSM8K, MATH, Guru-Math and ToolACE.
"""
FORMULAS = """\
## Sources of the formulas

Tests compare every preset, and every override in a note, with an objective in float64 written from these sources.
Sections and equations are those of the preset's paper. TRL means `trl/trainer/grpo_trainer.py`, verl
`verl/trainer/ppo/core_algos.py`, and Trinity `trinity/algorithm/` in Trinity-RFT. "A summary" means that neither the
paper nor its code was read.

The last two columns have the largest difference between the gradient of recjax in float32 and that of the objective in
float64, over ten batches, in units of a batch's largest gradient: of the preset, and of the overrides in its note.

| preset | source | preset | overrides |
|---|---|---|---|"""
INTRODUCTION = """\
The runs of [grid.yaml](grid.yaml) train every preset of [docs/objectives.md](../../docs/objectives.md) on the toy
task of [the claims](../claims/README.md#the-toy-task). Their base policy and seeds differ from those of the claims,
and most presets have one seed. So compare accuracies only within this page, and take the paper's algorithms from the
claims' map.

"""
NOT_RUN = """\
The runs of [grid.yaml](grid.yaml) have not been made yet: every
preset on the toy task with `sync_interval` 20 and offline, one seed, three of the ten most used:

```bash
python -m recjax.sweep experiments/objectives/grid.yaml && python -m experiments.objectives.page --collect
```
"""


def page() -> str:
    """docs/objectives.md."""
    parts = {
        "paper": preset_table(PAPER),
        "field": preset_table(FIELD),
        "names": names_table(),
        "example": algorithms.EXAMPLE.strip(),
        "axes": "\n".join([*map(axis_section, AXES), added_section()]),
    }
    text = (HERE / "page.md").read_text(encoding="utf-8")
    for key, value in parts.items():
        text = text.replace(f"{{{{{key}}}}}", value)
    return text


def config_of(name: str) -> dict[str, dict]:
    """The config that selects a preset, with other keys of the method.

    It does not repeat the preset's options, which an override that names another function would keep.
    """
    blocks = {"algorithm": {"preset": name}}
    for block, keys in COMPANIONS.get(name, {}).items():
        blocks[block] = {**blocks.get(block, {}), **keys}
    return blocks


def papers_page() -> str:
    """docs/papers.md."""
    parts = [PAPERS]
    for heading, presets in (("Algorithms of 2509.24203", PAPER), ("Other algorithms", FIELD)):
        parts.append(f"## {heading}\n")
        for name, preset in presets.items():
            block = yaml.safe_dump(config_of(name), sort_keys=False, default_flow_style=None, width=90)
            parts.append(f"### {preset.title}\n\n{paper_of(preset)}: {preset.coefficient}\n\n```yaml\n{block}```\n")
            if preset.note:
                parts.append(f"{as_sentence(preset.note)}\n")
    return "\n".join([*parts, FORMULAS, *formula_rows(read_differences())]) + "\n"


def read_differences() -> dict[tuple[str, str], float]:
    """The differences of presets from their sources, by preset and overrides; see tests/algorithms/differences.py."""
    table = pd.read_csv(DIFFERENCES, keep_default_na=False)
    return {(row.preset, row.overrides): float(row.difference) for row in table.itertuples()}


def formula_rows(differences: dict[tuple[str, str], float]) -> list[str]:
    """A row a preset: source, and largest difference of the preset and of the overrides in its note."""
    rows = []
    for name in PAPER | FIELD:
        others = [value for (preset, form), value in differences.items() if preset == name and form]
        shown = f"{max(others):.0e}" if others else ""
        rows.append(f"| `{name}` | {SOURCES[name]} | {differences.get((name, ''), float('nan')):.0e} | {shown} |")
    return rows


def as_sentence(note: str) -> str:
    """A note with a capital letter and a period; symbols such as ρ and names such as verl stay as they are."""
    first = note[0].upper() if note[0].isascii() and not note.startswith("verl") else note[0]
    return f"{first}{note[1:]}."


def notes(table: pd.DataFrame | None) -> str:
    """README.md; `table` has the toy task's runs, None if they have not been made."""
    head = "# Every preset on the toy task\n\n<!-- Written by python -m experiments.objectives.page. -->\n\n"
    return head + INTRODUCTION + (NOT_RUN if table is None else toy_task_table(table))


def toy_task_table(table: pd.DataFrame) -> str:
    """Final accuracy of every preset: mean, interval over seeds, and number of runs that ended below their start."""
    ends, lines = final(table), ["| preset | " + " | ".join(REGIMES.values()) + " |", "|---|" + "---|" * len(REGIMES)]
    starts = table[table["step"] == 0].set_index(list(ends.index.names))["evaluation/accuracy"]
    for name in dict.fromkeys(table["algorithm"]):
        cells = []
        for regime in REGIMES:
            values = ends.xs((name, regime), level=("algorithm", "regime"))
            before = starts.xs((name, regime), level=("algorithm", "regime"))
            lost = int((values < before.reindex(values.index)).sum())
            shown = f"{values.mean():.3f}"
            if len(values) > 1:
                of = estimate(values.to_numpy())
                shown += f" ({of.low:.3f}–{of.high:.3f})"
            cells.append(shown + (f"; {lost} of {len(values)} below the start" if lost else ""))
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    explained = (
        "Final held-out accuracy, the mean of the last three evaluations, at the learning rate 3e-4, chosen for the"
        " paper's presets. Brackets have the range of three seeds. Values without brackets have one"
        " seed, which proves little. The runs of `aspo`, `clip_cov` and `m2po` had the hard dual clip, a share of 0.002"
        " and the mask `second_moment`, those of `luspo` the bounds of `gspo`, and those of `kimi_k25` a tau of 0.1."
        " `p3o_cap` is P3O without its KL and with A = r − r̄. The runs of `p3o` and `mis` start from another base"
        " policy, at 0.469 instead of 0.428. From that policy, `grpo` and `p3o_cap` end offline at 0.704 and 0.105.\n"
    )
    picture = "\n![Where every preset ends, with a dot for each seed](final_accuracy.png)\n"
    return "\n".join([explained, *_collapses(ends, starts), "", *lines]) + "\n" + picture


def _collapses(ends: pd.Series, starts: pd.Series) -> list[str]:
    """A sentence a regime: the presets of which a run ended below its start."""
    lost, sentences = ends[ends < starts.reindex(ends.index)], []
    for regime, shown in REGIMES.items():
        of_regime = lost.xs(regime, level="regime")
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(of_regime.index.get_level_values("algorithm")))
        count = len(ends.xs(regime, level="regime"))
        sentences.append(f"- {shown}: {len(of_regime)} of {count} runs ended below their start: {names or 'none'}.")
    return sentences


def write_page(table: pd.DataFrame | None, docs: Path) -> None:
    """Writes all pages and their pictures."""
    (docs / "objectives.md").write_text(page(), encoding="utf-8")
    (docs / "papers.md").write_text(papers_page(), encoding="utf-8")
    (HERE / "README.md").write_text(notes(table), encoding="utf-8")
    save_figure(draw_coefficients(), docs / "objectives.png")
    if table is not None:
        ends = final(table).rename("accuracy").reset_index()
        start = table[table["step"] == 0]["evaluation/accuracy"].mean()
        save_figure(draw_ends(ends.assign(regime=ends["regime"].map(REGIMES)), start), HERE / "final_accuracy.png")


def draw_ends(ends: pd.DataFrame, start: float) -> Figure:
    """Final accuracies of many algorithms: one row an algorithm, best first, one dot a seed, and a bar at the mean.

    Args:
        ends: columns algorithm, regime, accuracy.
        start: mean accuracy before training.
    """
    means = ends.groupby(["algorithm", "regime"])["accuracy"].mean()
    regimes = list(dict.fromkeys(ends["regime"]))
    names = means.xs(regimes[0], level="regime").sort_values().index
    figure = new_figure(8, 0.22 * len(names) + 1.4, "final held-out accuracy on the toy task")
    axes = figure.subplots()
    axes.axvline(start, color=GREY, lw=1, ls="--", label="before training")
    for place, regime in enumerate(regimes):
        own = ends[ends["regime"] == regime]
        rows = names.get_indexer(own["algorithm"]) + (0.18 if place == 0 else -0.18)
        axes.scatter(own["accuracy"], rows, s=16, color=COLORS[place], alpha=0.6, lw=0, label=regime)
        at = means.xs(regime, level="regime").reindex(names)
        low = np.arange(len(names)) + (0 if place == 0 else -0.36)
        axes.vlines(at, low, low + 0.36, color=COLORS[place], lw=2)
    axes.set(yticks=range(len(names)), yticklabels=names, xlim=(-0.02, 1), xlabel="accuracy (share)")
    axes.set_ylim(-0.8, len(names) - 0.2)
    axes.tick_params(axis="y", labelsize="small")
    add_legend(figure, loc="outside lower center", ncols=3)
    return figure


def collected() -> pd.DataFrame | None:
    """The toy task's runs, if they have been read."""
    return read_runs(METRICS) if METRICS.is_file() else None


def paper_of(preset: Preset) -> str:
    """The preset's paper as a link."""
    if not preset.paper:
        return ""
    if preset.paper.startswith("http"):
        return f"[source]({preset.paper})"
    return f"[{preset.paper}](https://arxiv.org/abs/{preset.paper})"


def preset_table(presets: dict[str, Preset]) -> str:
    """A row a preset."""
    lines = ["| preset | method | coefficient on ∇log π(y_t) | changes in REINFORCE |", "|---|---|---|---|"]
    for name, preset in presets.items():
        method = f"{preset.title} {paper_of(preset)}".strip()
        cells = [f"`{name}`", method, preset.coefficient, changes_of(preset)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def names_table() -> str:
    """Values that functions may read; values of the whole batch come last."""
    lines = ["| parameter | description |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in (EVERYWHERE | MICRO_BATCH | TERMS | WHOLE_BATCH).items()]
    return "\n".join(lines) + "\n"


def axis_section(axis: str) -> str:
    """The functions of an axis, with their options and defaults."""
    lines = [f"### `{axis}`\n", "| name | description | options |", "|---|---|---|"]
    for name, function in AXES[axis].items():
        options = [
            f"`{option}`" + ("" if parameter.default is parameter.empty else f" {parameter.default}")
            for option, parameter in readable_options(function).items()
        ]
        said = inspect.getdoc(function).splitlines()[0].replace("|", "\\|") if function else OFF.get(axis, "Off.")
        lines.append(f"| `{name}` | {said} | {', '.join(options)} |")
    lines.append(f"\nYour own function may read {', '.join(f'`{name}`' for name in READABLE[axis])}.")
    return "\n".join(lines) + "\n"


def added_section() -> str:
    """Terms with a coefficient."""
    lines = ["### Added terms, off at coefficient 0\n", "| name | description | options |", "|---|---|---|"]
    for name, function in ADDED_TERMS.items():
        options = ", ".join(f"`{option}` {each.default}" for option, each in readable_options(function).items())
        lines.append(f"| `{name}` | {inspect.getdoc(function).splitlines()[0]} | {options} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Writes everything."""
    try:
        if FLAGS.collect:
            runs = read_runs(HERE / "grid.yaml", FLAGS.smoke)
            without_other_metrics(runs).to_parquet(METRICS, index=False, compression="zstd")
        write_page(collected(), DOCS)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    flags.DEFINE_bool("collect", False, "Read the runs of grid.yaml into metrics.parquet first.")
    flags.DEFINE_bool("smoke", False, "With --collect: the runs of the sweep's smoke block.")
    sys.modules["__main__"].__doc__ = __doc__
    app.run(main)
