"""Figures, verdicts and docs/claims.md from the committed metrics of the grid, the map and SmolLM2's runs.

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

from experiments.claims import map_page, real_model
from experiments.claims.in_text import fill_in
from experiments.claims.map import collected
from experiments.claims.markdown import markdown_table
from experiments.claims.staleness import (
    INTERVALS,
    accuracy_by_interval,
    draw_staleness,
    foretelling,
    losing_share,
    rank_correlations,
    survived,
)
from experiments.claims.verdicts import REGIMES, Claim, as_json, claims, mean_over_steps
from recjax.analysis.collect import axes_of, collect, read_runs
from recjax.analysis.compare import final
from recjax.analysis.sweeps import read_sweep
from recjax.plots.curves import draw_curves
from recjax.plots.style import LABELS
from recjax.training.run_folder import is_finished

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
PEER = HERE / "peer.parquet"
VERDICTS = HERE / "verdicts.json"
DOCS = HERE.parent.parent / "docs"
NAMES = {
    "reinforce": "REINFORCE",
    "grpo": "GRPO",
    "grpo_5x_rate": "GRPO, 5× the rate",
    "rec_one_side_is": "REC-OneSide-IS",
    "rec_one_side_nois": "REC-OneSide-NoIS",
    "rec_one_side_nois_wide": "REC-OneSide-NoIS (0.6, 2.0)",
    "rec_two_side_is": "REC-TwoSide-IS",
    "rec_two_side_nois": "REC-TwoSide-NoIS",
    "rec_ring_is": "REC-Ring-IS",
    "rec_ring_nois": "REC-Ring-NoIS",
    "opmd": "OPMD",
    "asymre": "AsymRE",
    "red_drop": "RED-Drop",
    "red_weight": "RED-Weight",
    "on_policy": "on-policy",
    "interval_20": "sync_interval 20",
    "offset_10": "sync_offset 10",
    "offline": "offline",
}
PANELS = (
    "evaluation/accuracy",
    "reward",
    "evaluation/initial_kl",
    "entropy",
    "clip_fraction/all",
    "ratio/q01",
    "ratio/q99",
    "completion_length",
)


def claim_section(name: str, claim: Claim) -> str:
    """A claim's text, verdict, figure and checks."""
    rows = []
    for check in claim.checks:
        mean, low, high, count = check.found
        rows.append(
            [check.what, check.claimed, f"{mean:+.3f}", f"{low:+.3f} to {high:+.3f}", str(count), check.outcome]
        )
    header = ["number", "as claimed if", "mean", "95 % interval", "runs or pairs", "outcome"]
    figure = f"![Curves of the algorithms of {name}](claims/{name}.png)"
    return f"## {name}: {claim.verdict}\n\n{claim.text}\n\n{figure}\n\n{markdown_table(header, rows)}\n"


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
    """The table of what each algorithm survives, and what foretells it."""
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


def draw_all(tables: dict[str, pd.DataFrame], found: dict[str, Claim], folder: Path) -> None:
    """Every figure of the page, as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    table = tables["grid"]
    regimes = table[table["regime"].isin(REGIMES)]
    for name, claim in found.items():
        shown = regimes[regimes["algorithm"].isin(claim.algorithms)]
        draw_curves(shown, "algorithm", "regime", PANELS, names=NAMES).savefig(folder / f"{name}.png", dpi=80)
    everything = draw_curves(
        regimes, "algorithm", "regime", ("evaluation/accuracy", "evaluation/initial_kl"), names=NAMES
    )
    everything.savefig(folder / "all.png", dpi=100)
    draw_staleness(table, NAMES).savefig(folder / "staleness.png", dpi=100)
    map_page.draw_maps(tables["map"], NAMES, folder)
    for name in REAL_MODEL:
        of_rate = tables[name][tables[name]["rate"] == real_model.chosen_rate(tables[name])]
        draw_curves(of_rate, "algorithm", "regime", PANELS, names=NAMES).savefig(folder / f"{name}.png", dpi=100)


def write_page(tables: dict[str, pd.DataFrame], docs: Path, verdicts: Path) -> None:
    """docs/claims.md with its figures, and verdicts.json, from the runs of each of TABLES."""
    table = tables["grid"]
    found = claims(table)
    draw_all(tables, found, docs / "claims")
    verdicts.write_text(json.dumps(as_json(found), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    seeds, runs = table["seed"].nunique(), len(table.groupby(axes_of(table)))
    summary = markdown_table(
        ["", "claim", "verdict"],
        [
            [f"[{name}](#{name.lower()}-{claim.verdict.replace(' ', '-')})", claim.text, claim.verdict]
            for name, claim in found.items()
        ],
    )
    parts = {
        "summary": summary,
        "grid": grid_table(table),
        "claims": "".join(claim_section(name, claim) for name, claim in found.items()),
        "staleness": staleness_section(table),
        "peer": peer_table(pd.read_parquet(PEER)),
        "seeds": str(seeds),
        "runs": str(runs),
        **map_page.parts(tables["map"], NAMES),
        "smollm2_rates": real_model.rates_table(tables["smollm2"]),
    }
    for name in REAL_MODEL:
        parts |= real_model.parts(tables[name], NAMES, name)
    text = (HERE / "page.md").read_text(encoding="utf-8")
    for key, value in parts.items():
        text = text.replace(f"{{{{{key}}}}}", value)
    text = fill_in(text, tables["map"])
    for name in REAL_MODEL:
        text = fill_in(text, tables[name], name)
    (docs / "claims.md").write_text(text, encoding="utf-8")


def collect_finished(name: str) -> pd.DataFrame:
    """The table of a sweep's finished runs; runs that were made elsewhere keep the rows that they have in it.

    Raises:
        ValueError: no run is finished.
    """
    runs = read_sweep(HERE / f"{name}.yaml")[1]
    known = collected(runs, TABLES[name])
    tables = [collect([run]) if is_finished(run.config) else known.get(run.name) for run in runs]
    if all(table is None for table in tables):
        raise ValueError(f"none of the {len(runs)} runs is finished; python -m recjax.sweep makes them")
    return pd.concat([table for table in tables if table is not None], ignore_index=True)


def main(argv: list[str]) -> None:
    """Writes everything."""
    try:
        for name in FLAGS.collect:
            collect_finished(name).to_parquet(TABLES[name], index=False, compression="zstd")
        tables = {name: read_runs(path) for name, path in TABLES.items()}
    except ValueError as error:
        sys.exit(f"error: {error}")
    write_page(tables, DOCS, VERDICTS)
    for name, claim in claims(tables["grid"]).items():
        print(f"{name}: {claim.verdict}")


if __name__ == "__main__":
    sys.modules["__main__"].__doc__ = __doc__
    app.run(main)
