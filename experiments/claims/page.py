"""Figures, verdicts, docs/claims.md and README.md here, from the metrics of the grid, the map and SmolLM2's runs.

python -m experiments.claims.page                       # from experiments/claims/*.parquet
python -m experiments.claims.page --collect grid        # first reads the runs of grid.yaml into metrics.parquet
python -m experiments.claims.page --collect smollm2     # likewise those of smollm2.yaml
python -m experiments.claims.page --collect chains      # likewise those of chains.yaml
python -m experiments.claims.map --collect              # does so with the map's runs
"""

import json
import sys
from pathlib import Path

import pandas as pd
from absl import app, flags
from matplotlib.figure import Figure

from experiments.claims import accelerator, map_page, real_model
from experiments.claims.in_text import fill_in
from experiments.claims.map import collect_folders
from experiments.claims.markdown import markdown_table
from experiments.claims.names import NAMES
from experiments.claims.staleness import (
    INTERVALS,
    accuracy_by_interval,
    draw_staleness,
    foretelling,
    losing_share,
    rank_correlations,
    survived,
)
from experiments.claims.verdicts import (
    REGIMES,
    SIGNS,
    Claim,
    as_json,
    chance_text,
    check_starts,
    claims,
    legend,
    mean_over_steps,
    surviving,
)
from recjax.analysis.collect import axes_of, read_runs, without_other_metrics
from recjax.analysis.compare import final
from recjax.analysis.sweeps import read_sweep
from recjax.errors import UserError
from recjax.plots.style import COLORS, LABELS, add_legend, finish, new_figure

FLAGS = flags.FLAGS
flags.DEFINE_multi_enum("collect", [], ["grid", "smollm2", "chains"], "Read these runs and rewrite their table first.")

HERE = Path(__file__).parent
TABLES = {
    "grid": HERE / "metrics.parquet",
    "map": HERE / "map.parquet",
    "smollm2": HERE / "smollm2.parquet",
    "chains": HERE / "chains.parquet",
}
REAL_MODEL = ("smollm2", "chains")  # tables of SmolLM2's runs: its main task, and a harder one
CHECKS = HERE / "checks.parquet"  # the toy task's runs of checks.yaml
PEER = HERE / "peer.parquet"
DOCS = HERE.parent.parent / "docs"
FRESH_AND_STALE = {  # lines of the README's figure: algorithm and regime, both of the map at RATE
    "fresh samples": ("rec_one_side_nois", "on_policy"),
    "stale, clipped": ("rec_one_side_nois", "interval_20"),
    "stale, no clip": ("reinforce", "interval_20"),
}
RATE = "4e-4"
# Lines of the figure that docs/debugging.md explains: one seed of each, offline.
HELD_AND_COLLAPSED = {"GRPO": "grpo", "REINFORCE": "reinforce"}
READ = {  # its panels: metric and scale of the axis
    "evaluation/accuracy": "linear",
    "effective_sample_size": "linear",
    "ratio/q01": "log",
    "behavior_kl/k3": "log",
}
SHOWN = ("reinforce", "rec_one_side_nois", "rec_one_side_nois_wide")  # in the map of docs/claims.md


def claim_section(name: str, claim: Claim) -> str:
    """A claim's text, verdict and checks."""
    rows = []
    for check in claim.checks:
        mean, low, high, count = check.found
        rows.append([check.what, check.claimed, f"{mean:+.3f}", f"{low:+.3f} to {high:+.3f}", str(count), check.shown])
    header = ["number", "as claimed if", "mean", "range of the seeds", "seeds", "outcome"]
    return f"## {name}: {claim.verdict}\n\n{claim.text}\n\n{markdown_table(header, rows)}\n"


def grid_table(table: pd.DataFrame) -> str:
    """Where every algorithm ends in every regime."""
    ends, means = final(table), mean_over_steps(table)
    rows = []
    for algorithm in dict.fromkeys(table["algorithm"]):
        row = [NAMES[algorithm]]
        for regime in REGIMES:
            of_runs = ends.xs((algorithm, regime), level=("algorithm", "regime"))
            average = means.xs((algorithm, regime), level=("algorithm", "regime")).mean()
            row.append(f"{of_runs.mean():.3f} ({of_runs.min():.3f}–{of_runs.max():.3f}); {average:.3f}")
        rows.append(row)
    return markdown_table(["", *(NAMES[regime] for regime in REGIMES)], rows)


def staleness_section(table: pd.DataFrame) -> str:
    """Tables of the staleness that each algorithm survives, and of the metrics that predict it."""
    ends, correlations = accuracy_by_interval(table), rank_correlations(foretelling(table))
    limits = survived(ends)
    rows = [
        [
            NAMES[algorithm],
            *(f"{values[m]:.3f}" for m in INTERVALS.values()),
            str(limits[algorithm]),
            str(max(limits[algorithm] - 1, 0)),
        ]
        for algorithm, values in ends.iterrows()
    ]
    header = ["final accuracy", *(f"m = {m}" for m in INTERVALS.values()), "largest m survived", "its staleness"]
    foretold = [[LABELS[name].replace("\n", " "), f"{value:+.2f}"] for name, value in correlations.items()]
    losing = []
    for low, high in ((0.0, 0.4), (0.4, 0.6), (0.6, 1.01)):
        lost, count = losing_share(foretelling(table), low, high)
        losing.append([f"{low:g} to {min(high, 1):g}", f"{lost} of {count}"])
    return (
        markdown_table(header, rows)
        + "\n"
        + markdown_table(["effective sample size, mean over steps 1–50", "runs that ended below their start"], losing)
        + "\n"
        + markdown_table(["mean over steps 1–50", "rank correlation with the accuracy gained in the end"], foretold)
    )


def peer_table(table: pd.DataFrame) -> str:
    """Held-out accuracy of the same runs through recjax's loss and through TRL's."""
    steps, rows = sorted(table["step"].unique())[::2], []
    for (algorithm, rate), both in table.groupby(["algorithm", "rate"], sort=False):
        curves = both.pivot(index="step", columns="loss", values="evaluation/accuracy")
        apart = (curves["recjax"] - curves["trl"]).abs()
        equal = int(apart.index[(apart == 0).cumprod() == 1].max())
        for loss, name in (("recjax", "recjax"), ("trl", "TRL")):
            cells = [f"{accuracy:.3f}" for accuracy in curves[loss][steps]]
            last = [str(equal), f"{apart.max():.3f}"] if loss == "trl" else ["", ""]
            rows.append([f"{NAMES[algorithm]}, {rate}, {name}", *cells, *last])
    header = ["", *(f"{step:.0f}" for step in steps), "equal up to step", "largest difference"]
    return markdown_table(header, rows)


def verdicts_table(tables: dict[str, pd.DataFrame]) -> str:
    """The verdicts of the toy task's checks, of the map's readings, of SmolLM2's two tasks, and of the grid for C4."""
    found = {"checks": claims(tables["checks"].drop(columns="rate"))} if "checks" in tables else {}
    readings = map_page.read(tables["map"])
    # The checks have each algorithm at its best rate, with more seeds.
    shown = [name for name in map_page.READINGS if name != "best" or not found]
    survivors = surviving_claims(found["checks"]) if found else set()
    found |= {name: map_page.claims(readings[name]) for name in shown}
    found |= {name: real_model.claims(real_model.main_runs(tables[name])) for name in REAL_MODEL}
    rows = []
    shown_words = []
    for name, claim in claims(tables["grid"]).items():
        verdicts = []
        for source, of_source in found.items():
            words = of_source[name].verdict if name in of_source else "–"
            if source == "checks" and words == "holds" and name not in survivors:
                words = "holds alone"
            verdicts.append(words)
        shown_words += verdicts
        text = found[shown[0]][name].text if name in found[shown[0]] else f"{claim.text} At 3e-4: {claim.verdict}."
        rows.append([name, text, *(SIGNS.get(words, words) for words in verdicts)])
    header = []
    if "checks" in found:
        header.append(f"each at its best rate, {tables['checks']['seed'].nunique()} seeds")
    header += [map_page.READINGS[name].format(edge=map_page.edge_rate(tables["map"])) for name in shown]
    table = markdown_table(["", "claim", *header, "SmolLM2", "SmolLM2, harder task"], rows)
    return f"{table}\n{legend(shown_words)}\n"


def whole_seeds(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The table of the toy task's checks under its name, with the seeds of which every cell was run; {} below two."""
    cells = table.drop_duplicates(["algorithm", "regime", "seed"]).groupby("seed").size()
    seeds = cells.index[cells == cells.max()]
    return {"checks": table[table["seed"].isin(seeds)]} if len(seeds) > 1 else {}


def surviving_claims(found: dict[str, Claim]) -> set[str]:
    """The claims whose checks all hold after Holm's correction for the checks of all claims."""
    places = [(name, check) for name, claim in found.items() for check in claim.checks]
    holds = surviving([check for _, check in places])
    lost = {name for (name, _), survives in zip(places, holds, strict=True) if not survives}
    return set(found) - lost


def checks_parts(table: pd.DataFrame | None) -> dict[str, str]:
    """What the pages say of the toy task's checks: their table, their number, and the rates."""
    if table is None:
        return {
            "checks_table": "Fewer than two seeds are whole.\n",
            "checks_chance": "",
            "checks_runs": "0",
            "checks_rates": "",
        }
    found = claims(table.drop(columns="rate"))
    made = [check for claim in found.values() for check in claim.checks]
    holds = iter(surviving(made))
    rows = []
    for name, claim in found.items():
        for check in claim.checks:
            low, high = check.found.low, check.found.high
            spread = f"{check.found.mean:+.3f} ({low:+.3f} to {high:+.3f})".replace("-", "−")
            survives = "yes" if next(holds) else "no"
            row = [name, map_page.in_words(check.what, NAMES), check.claimed, spread, str(check.found.count)]
            rows.append([*row, check.shown, survives])
    rates = table.groupby(["algorithm", "regime"])["rate"].first().unstack()
    regimes = [regime for regime in REGIMES if regime in rates]
    rates = rates[regimes].fillna("–")
    rate_rows = [[NAMES[name], *rates.loc[name]] for name in NAMES if name in rates.index]
    header = ["", "number", "as claimed if", "mean and interval", "seeds", "outcome", "after Holm's correction"]
    return {
        "checks_table": markdown_table(header, rows),
        "checks_chance": chance_text(made, len(made)),
        "checks_runs": str(len(final(table))),
        "checks_rates": markdown_table(["", *(NAMES[regime] for regime in regimes)], rate_rows),
    }


def two_runs(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of the two runs by step."""
    chosen = table[(table["regime"] == "offline") & (table["seed"] == table["seed"].min())]
    return {name: chosen[chosen["algorithm"] == one].set_index("step") for name, one in HELD_AND_COLLAPSED.items()}


def draw_two_runs(table: pd.DataFrame) -> Figure:
    """A run that holds and a run that collapses, on the same axes."""
    figure = new_figure(7, 5.5, "")
    for axes, (metric, scale) in zip(figure.subplots(2, 2, sharex=True).flat, READ.items(), strict=True):
        for color, (name, rows) in zip(COLORS, two_runs(table).items(), strict=False):
            values = rows[metric].dropna()
            marker = {"marker": "o", "ms": 3.5} if metric.startswith("evaluation/") else {"alpha": 0.8, "lw": 1}
            axes.plot(values.index, values, color=color, label=name, **marker)
        axes.set(ylabel=LABELS[metric], yscale=scale)
        if metric in ("evaluation/accuracy", "effective_sample_size"):
            axes.set_ylim(0, 1)
    for axes in figure.axes[-2:]:
        axes.set_xlabel("optimizer step")
    add_legend(figure, *figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return finish(figure)


def draw_all(tables: dict[str, pd.DataFrame], docs: Path, notes: Path) -> None:
    """The figures of the page and of the notes, as PNG files."""
    docs.mkdir(parents=True, exist_ok=True)
    of_rate = tables["map"][tables["map"]["rate"] == RATE].set_index(["algorithm", "regime"]).sort_index()
    figure = new_figure(6.8, 3.2, "")
    axes = figure.subplots()
    axes.set(ylim=(0, 1), ylabel="held-out accuracy")
    real_model.draw_bands(axes, {name: of_rate.loc[cell] for name, cell in FRESH_AND_STALE.items()})
    finish(figure).savefig(docs / "fresh_and_stale.png", dpi=120)
    map_page.draw_map(tables["map"][tables["map"]["algorithm"].isin(SHOWN)], NAMES).savefig(docs / "map.png", dpi=110)
    figure = new_figure(6.8, 5.6, "")
    titles = "Sums, differences and products", "chain_sum of reasoning_gym (harder)"
    for axes, title, name in zip(figure.subplots(2, sharex=True), titles, REAL_MODEL, strict=True):
        runs = real_model.main_runs(tables[name])
        axes.set(ylim=(0.15, 0.85), title=title, ylabel="held-out accuracy")
        real_model.draw_bands(axes, {NAMES[one]: runs[runs["algorithm"] == one] for one in (*SHOWN, "grpo")})
    finish(figure).savefig(docs / "smollm2.png", dpi=110)
    if accelerator.TABLE.exists():
        accelerator.draw(read_runs(accelerator.TABLE), NAMES, docs / "accelerator.png")
    draw_two_runs(tables["grid"]).savefig(docs / "held_and_collapsed.png", dpi=110)
    draw_staleness(tables["grid"], NAMES).savefig(notes / "staleness.png", dpi=100)
    map_page.draw_map(tables["map"], NAMES).savefig(notes / "map.png", dpi=100)


def write_pages(tables: dict[str, pd.DataFrame], docs: Path, notes: Path) -> None:
    """docs/claims.md, the notes with all tables, their figures, and verdicts.json, from the runs of each of TABLES."""
    for name, table in tables.items():
        check_starts(name, table)
    table = tables["grid"]
    found = claims(table)
    draw_all(tables, docs / "claims", notes)
    verdicts = json.dumps(as_json(found), indent=2, ensure_ascii=False)
    (notes / "verdicts.json").write_text(verdicts + "\n", encoding="utf-8")
    summary = markdown_table(
        ["", "claim", "verdict"],
        [
            [f"[{name}](#{name.lower()}-{claim.verdict.replace(' ', '-')})", claim.text, claim.verdict]
            for name, claim in found.items()
        ],
    )
    parts = {
        "verdicts": verdicts_table(tables),
        **checks_parts(tables.get("checks")),
        "summary": summary,
        "grid": grid_table(table),
        "claims": "".join(claim_section(name, claim) for name, claim in found.items()),
        "staleness": staleness_section(table),
        "peer": peer_table(pd.read_parquet(PEER)),
        "seeds": str(table["seed"].nunique()),
        "runs": str(len(table.groupby(axes_of(table)))),
        **map_page.parts(tables["map"], NAMES),
        "smollm2_rates": real_model.rates_table(tables["smollm2"]),
    }
    parts["accelerator"] = ""  # nothing is claimed without runs
    if accelerator.TABLE.exists():
        devices = accelerator.devices_of(accelerator.TABLE)
        parts["accelerator"] = accelerator.section(read_runs(accelerator.TABLE), devices, NAMES)
    for name in REAL_MODEL:
        parts |= real_model.parts(tables[name], NAMES, name)
    for template, page in (("page.md", docs / "claims.md"), ("notes.md", notes / "README.md")):
        text = (HERE / template).read_text(encoding="utf-8")
        for key, value in parts.items():
            text = text.replace(f"{{{{{key}}}}}", value)
        text = fill_in(text, tables["map"])
        for name in REAL_MODEL:
            text = fill_in(text, tables[name], name)
        page.write_text(text, encoding="utf-8")


def collect_finished(name: str) -> pd.DataFrame:
    """The table of a sweep's finished runs; runs that were made elsewhere keep the rows that they have in it.

    Raises:
        ValueError: no run is finished.
    """
    return collect_folders(read_sweep(HERE / f"{name}.yaml")[1], TABLES[name])


def main(argv: list[str]) -> None:
    """Writes everything."""
    try:
        for name in FLAGS.collect:
            without_other_metrics(collect_finished(name)).to_parquet(TABLES[name], index=False, compression="zstd")
        tables = {name: read_runs(path) for name, path in TABLES.items()}
        if CHECKS.exists():
            tables |= whole_seeds(pd.read_parquet(CHECKS))
    except UserError as error:
        sys.exit(f"error: {error}")
    write_pages(tables, DOCS, HERE)
    for name, claim in claims(tables["grid"]).items():
        print(f"{name}: {claim.verdict}")


if __name__ == "__main__":
    sys.modules["__main__"].__doc__ = __doc__
    app.run(main)
