"""The table of learning rates in docs/fine_tuning.md, from the committed tables of runs.

python -m experiments.rates                # writes the table
python -m experiments.rates --collect      # first collects the finished runs of lora.yaml in lora.parquet
"""

import re
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from absl import flags

from experiments.claims.map import write_table
from experiments.claims.markdown import markdown_table
from experiments.claims.readings import WITHIN
from recjax.analysis.collect import collect
from recjax.analysis.compare import final
from recjax.analysis.sweeps import read_sweep
from recjax.config import load_config
from recjax.planning.dry_run import count
from recjax.planning.programs import resolve_shapes
from recjax.runtime.console import command, start

FLAGS = flags.FLAGS
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs" / "fine_tuning.md"
SECTION = re.compile(r"(<!-- Written by python -m experiments\.rates -->\n).*?(<!-- end of rates -->)", re.DOTALL)
LORA = HERE / "lora.parquet"
CLIP = "rec_one_side_nois"
FEW = 3  # fewer seeds than this at each rate are a hint, not a result


class Setting(NamedTuple):
    """Runs that differ in rate and seed alone.

    Attributes:
        model, trained, data, optimizer, algorithm: what the table says of them.
        table: file of the runs, from the repository's root.
        where: values of the file's columns that choose the runs.
    """

    model: str
    trained: str
    data: str
    optimizer: str
    algorithm: str
    table: str
    where: dict[str, str]


class Found(NamedTuple):
    """What the runs of a setting show.

    Attributes:
        best: rate with the highest mean final accuracy of the seeds that ran at all rates.
        accuracies: mean final accuracy at each rate, the lowest rate first.
        good: rates next to the best, and itself, whose accuracy is within WITHIN of the best.
        lost: rates whose accuracy is below that before training.
        seeds: seeds that ran at all rates.
        further: other seeds at the best rate.
    """

    best: str
    accuracies: dict[str, float]
    good: list[str]
    lost: list[str]
    seeds: int
    further: int


def found_in(runs: pd.DataFrame) -> Found:
    """What runs show that differ in rate and seed.

    Args:
        runs: columns rate, seed, step, evaluation/accuracy, and no other settings.
    """
    runs = runs[["rate", "seed", "step", "evaluation/accuracy"]].dropna()
    ends = final(runs).unstack("seed")
    ends = ends.loc[sorted(ends.index, key=float)]
    chosen = ends.dropna(axis="columns")
    means = chosen.mean(axis="columns")
    rates = [*means.index]
    place = int(means.to_numpy().argmax())
    first = place
    last = place
    while first > 0 and means.iloc[first - 1] >= means.iloc[place] - WITHIN:
        first -= 1
    while last + 1 < len(rates) and means.iloc[last + 1] >= means.iloc[place] - WITHIN:
        last += 1
    before = runs[(runs["step"] == 0) & runs["seed"].isin(chosen.columns)]["evaluation/accuracy"].mean()
    further = ends.loc[rates[place]].drop(chosen.columns).dropna()
    return Found(
        best=rates[place],
        accuracies={rate: float(mean) for rate, mean in means.items()},
        good=rates[first : last + 1],
        lost=[rate for rate in rates if means[rate] < before],
        seeds=chosen.shape[1],
        further=len(further),
    )


def _size(config: str, *overrides: str) -> str:
    """The number of parameters of a config's decoder, in words."""
    model = resolve_shapes(load_config(ROOT / config, list(overrides))).model
    assert model is not None
    return f"{(count(model.trained) + count(model.frozen)) / 1e6:.2g} million"


def settings() -> list[Setting]:
    """The settings of the table, in its order."""
    small = _size("experiments/claims/laboratory.yaml")
    quick = _size("experiments/quickstart.yaml")
    smollm2 = "135 million (SmolLM2)"
    result = []
    ages = {
        "on_policy": "fresh",
        "interval_5": "up to 4 steps old",
        "interval_20": "up to 19 steps old",
        "interval_50": "up to 49 steps old",
        "offset_10": "10 steps old",
        "offline": "offline",
    }
    for regime, data in ages.items():
        where = {"algorithm": CLIP, "regime": regime}
        result.append(Setting(small, "all", data, "AdamW", "clip", "experiments/claims/map.parquet", where))
    where = {"algorithm": "reinforce", "regime": "interval_20"}
    data = ages["interval_20"]
    result.append(Setting(small, "all", data, "AdamW", "REINFORCE", "experiments/claims/map.parquet", where))
    columns = {
        "fresh": "fresh",
        "age20": "up to 19 steps old",
        "age50": "up to 49 steps old",
        "replayed": "replayed up to 8 times",
        "late": "rewards 0 to 40 rounds late",
        "asynchronous": "asynchronous, up to 4 steps old",
        "several_updates": "8 updates of each batch",
        "store": "another run's store",
    }
    for column, data in columns.items():
        where = {"method": CLIP, "column": column}
        result.append(Setting(quick, "all", data, "AdamW", "clip", "experiments/leaderboard/runs.parquet", where))
    for cause, data in {"none": "fresh", "age20": "up to 19 steps old"}.items():
        where = {"algorithm": "clip", "cause": cause, "setup": "sgd"}
        result.append(Setting(quick, "all", data, "SGD", "clip", "experiments/drift/sums.parquet", where))
    lora = f"{quick}, rank 8 on all projections"
    for regime in ("on_policy", "interval_20"):
        where = {"regime": regime}
        result.append(Setting(lora, "adapters", ages[regime], "AdamW", "clip", "experiments/rates/lora.parquet", where))
    where = {"algorithm": "reinforce", "regime": "interval_20"}
    data = ages["interval_20"]
    result.append(Setting(smollm2, "all", data, "AdamW", "REINFORCE", "experiments/claims/smollm2.parquet", where))
    where = {"algorithm": CLIP, "regime": "interval_20"}
    result.append(Setting(smollm2, "all", data, "AdamW", "clip", "experiments/claims/smollm2.parquet", where))
    return result


def runs_of(setting: Setting) -> pd.DataFrame:
    """The rows of a setting's table with the setting's values."""
    table = pd.read_parquet(ROOT / setting.table)
    for column, value in setting.where.items():
        table = table[table[column] == value]
    return table


def _rate(rate: str) -> str:
    """A rate as people write it: 2e-4, and 0.03 for large ones."""
    if float(rate) >= 0.01:
        return f"{float(rate):g}"
    mantissa, _, exponent = f"{float(rate):.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def cells(setting: Setting, found: Found) -> list[str]:
    """A row of the table."""
    tried = [_rate(rate) for rate in found.accuracies]
    best = _rate(found.best)
    if len(tried) == 1:
        best += ", the only one"
    elif best == tried[0]:
        best += ", the lowest"
    elif best == tried[-1]:
        best += ", the highest"
    good = " to ".join(dict.fromkeys((_rate(found.good[0]), _rate(found.good[-1]))))
    lost = ", ".join(_rate(rate) for rate in found.lost)
    seeds = f"{found.seeds}"
    if found.further:
        seeds += f", {found.further} more at the best"
    if found.seeds < FEW:
        seeds = f"**few**: {seeds}"
    return [
        setting.model,
        setting.trained,
        setting.data,
        f"{setting.optimizer}, {setting.algorithm}",
        f"{tried[0]} to {tried[-1]}" if len(tried) > 1 else tried[0],
        f"{best} ({found.accuracies[found.best]:.2f})",
        good,
        lost or "none",
        seeds,
        f"`{setting.table}`",
    ]


HEADER = [
    "weights in the model",
    "trained",
    "data",
    "optimizer, loss",
    "rates tried",
    "best (accuracy)",
    "as good",
    "ends below its start",
    "seeds at each rate",
    "runs",
]


def table_text() -> str:
    """The table, in Markdown."""
    rows = [cells(setting, found_in(runs_of(setting))) for setting in settings()]
    return markdown_table(HEADER, rows)


def with_table(page: str) -> str:
    """The page with the current table."""
    result, count = SECTION.subn(lambda match: f"{match[1]}\n{table_text()}\n{match[2]}", page)
    assert count == 1
    return result


@command
def main(argv: list[str]) -> None:
    """Collects the runs of lora.yaml if asked to, then writes the table."""
    if FLAGS.collect:
        write_table(collect(read_sweep(HERE / "lora.yaml")[1]), LORA)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    flags.DEFINE_bool("collect", False, "Collect the finished runs of lora.yaml.")
    start(main)
