"""The runs of plan.yaml: cells, configs, scales of the noise, and the best rate of each cell by its pilot runs."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from recjax.analysis.compare import final
from recjax.analysis.sweeps import SweepRun
from recjax.config import make_config
from recjax.config.yaml_values import read_yaml_file, write_override

HERE = Path(__file__).parent
PLAN = read_yaml_file(HERE / "plan.yaml")
METHODS, CAUSES, CHECKS = PLAN["methods"], PLAN["causes"], PLAN["checks"]
FIRST_PILOT_SEED = 100
NONE = "none"  # the cause without age and noise
AXES = ["setup", "algorithm", "cause", "rate", "seed"]
ENGINE_GAP = 0.02  # nats of mean |Δ log π|, as logs of engines that serve other kernels show
RUNS, SMOKE = "runs/drift_plan", "runs/drift_smoke"
RECORDED_TOP_K = 128  # for score centering: the whole vocabulary of the sums


class Cell(NamedTuple):
    """A method under a cause in a setup of a task, and whether its best rate is searched."""

    setup: str
    algorithm: str
    cause: str
    has_pilot: bool


def cells_of(task: str) -> list[Cell]:
    """The cells of a task, in the plan's order, each once."""
    cells: dict[tuple[str, str, str], Cell] = {}
    for block in PLAN["tasks"][task]["cells"]:
        setup = block["setup"]
        methods = block["methods"]
        if methods == "all":
            methods = [name for name, method in METHODS.items() if setup in method.get("setups", [setup])]
        causes = [*CAUSES] if block["causes"] == "all" else block["causes"]
        for cause, method in itertools.product(causes, methods):
            if not is_refused(method, cause):
                has_pilot = block.get("rates") != "common"
                cells.setdefault((setup, method, cause), Cell(setup, method, cause, has_pilot))
    return list(cells.values())


def is_refused(method: str, cause: str) -> bool:
    """True for score centering with wrong log-probs, for which recjax records no most likely tokens."""
    return centers(method) and CAUSES[cause].get("drift", {}).get("logprobs") == "exact"


def centers(method: str) -> bool:
    """True if a method centers scores."""
    return METHODS[method]["algorithm"]["preset"] == "score_centering"


def drift_of(cause: str, scales: dict[str, float]) -> dict | None:
    """The block `rollout.drift` of a cause; None without a drift.

    Args:
        scales: by cause, those that a pilot has measured.
    """
    drift = CAUSES[cause].get("drift")
    if drift is None or "scale" not in CAUSES[cause]:
        return drift
    return drift | {"scale": scales[cause]}


def run_of(
    task: str, cell: Cell, rate: float, seed: int, scales: dict[str, float], extra: Iterable[str] = ()
) -> SweepRun:
    """The run of a cell with a rate and a seed.

    Args:
        scales: see `drift_of`.
        extra: `key=value` overrides of a smoke run, which come last.
    """
    planned = PLAN["tasks"][task]
    setup = planned["setups"][cell.setup]
    base = HERE / planned["config"]
    settings = dict(zip(AXES, (cell.setup, cell.algorithm, cell.cause, f"{rate:g}", str(seed)), strict=True))
    changes = dict(planned["overrides"]) | setup.get("overrides", {})
    updates = changes.get("training.updates_per_batch", 1)
    changes |= {
        "algorithm": METHODS[cell.algorithm]["algorithm"],
        "optimizer.learning_rate": rate,
        # An age is in optimizer steps, and an interval in batches.
        "regime.sync_interval": max(CAUSES[cell.cause]["age"] // updates, 1),
        "seed": seed,
        "output": f"{SMOKE if extra else RUNS}/{task}/{'__'.join(settings.values())}",
    }
    if centers(cell.algorithm):
        changes["rollout.recorded_top_k"] = RECORDED_TOP_K
    if drift := drift_of(cell.cause, scales):
        changes["rollout.drift"] = drift
    overrides = [*(write_override(*change) for change in changes.items()), *extra]
    return SweepRun(settings, overrides, make_config(read_yaml_file(base), overrides, str(base)))


def pilot_runs(task: str, scales: dict[str, float], extra: Iterable[str] = ()) -> list[SweepRun]:
    """Each cell that has a pilot, at each rate, with the pilot seeds; seed by seed."""
    planned = PLAN["tasks"][task]
    seeds = range(FIRST_PILOT_SEED, FIRST_PILOT_SEED + planned["pilot_seeds"])
    return [
        run_of(task, cell, rate, seed, scales, extra)
        for seed in seeds
        for cell in cells_of(task)
        if cell.has_pilot
        for rate in planned["setups"][cell.setup]["rates"]
    ]


def rates_of(task: str, cell: Cell, best: dict[tuple[str, str, str], float]) -> list[float]:
    """The rates at which the checks compare a cell: the common one, and its best one if the cell has a pilot."""
    common = PLAN["tasks"][task]["setups"][cell.setup]["common_rate"]
    return list(dict.fromkeys([best.get(cell[:3], common), common]))


def verdict_runs(
    task: str, scales: dict[str, float], best: dict[tuple[str, str, str], float], extra: Iterable[str] = ()
) -> list[SweepRun]:
    """Each cell at its rates, with the seeds of the checks; first all best rates, which decide, seed by seed."""
    places = [
        (number, seed, cell, rate)
        for seed in range(PLAN["tasks"][task]["seeds"])
        for cell in cells_of(task)
        for number, rate in enumerate(rates_of(task, cell, best))
    ]
    places.sort(key=lambda place: place[:2])
    return [run_of(task, cell, rate, seed, scales, extra) for _, seed, cell, rate in places]


def best_rates(ends: pd.Series) -> dict[tuple[str, str, str], float]:
    """The rate of each cell with the highest mean over pilot seeds; the lower one of equal rates.

    Args:
        ends: final accuracy or reward by AXES.
    """
    is_pilot = ends.index.get_level_values("seed").astype(int) >= FIRST_PILOT_SEED
    means = ends[is_pilot].groupby(["setup", "algorithm", "cause", "rate"]).mean().reset_index(name="end")
    means["rate"] = means["rate"].astype(float)
    means = means.sort_values(["end", "rate"], ascending=[False, True], kind="stable")
    chosen = means.groupby(["setup", "algorithm", "cause"], sort=False)["rate"].first()
    return {tuple(place): float(rate) for place, rate in chosen.items()}


def best_of_pilots(table: pd.DataFrame) -> dict[tuple[str, str, str], float]:
    """`best_rates` of a table of runs."""
    return best_rates(final(table))


def scale_of(cause: str, measured: dict[str, dict[float, float]]) -> float:
    """The scale of a cause's noise by a pilot's measurements.

    Args:
        measured: KL by age, as "age"; KL by scale of the noise, as "fixed" and "fresh"; mean |Δ log π|, as "gap".
    Raises:
        ValueError: see `scale_at`.
    """
    wanted = CAUSES[cause]["scale"]
    if wanted == "engine":
        kind, value = "gap", ENGINE_GAP
    else:
        kind = "fixed" if CAUSES[cause]["drift"].get("fixed") else "fresh"
        value = measured["age"][int(wanted.removeprefix("equal_kl "))]
    by_scale = measured[kind]
    return scale_at(np.array([*by_scale]), np.array([*by_scale.values()]), value)


def scale_at(sizes: np.ndarray, measured: np.ndarray, wanted: float) -> float:
    """The size at which a quantity that rises with it has a wanted value, linear between logarithms; two digits.

    Raises:
        ValueError: the wanted value is outside what was measured.

    Examples:
        >>> scale_at(np.array([0.1, 1.0]), np.array([0.01, 1.0]), 0.1)
        0.32
    """
    measured = np.maximum.accumulate(measured)  # of runs, which learn in part by chance
    if not measured.min() <= wanted <= measured.max():
        raise ValueError(f"{wanted:g} is outside the measured {measured.min():g} to {measured.max():g}; add sizes")
    return float(f"{np.exp(np.interp(np.log(wanted), np.log(measured), np.log(sizes))):.2g}")
