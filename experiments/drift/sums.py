"""The study on sums: the noise's scales, then the plan's runs, which take programs that are compiled once a method."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from experiments.claims.map import collect, make_missing, missing, write_table
from experiments.claims.programs import Drift, Programs, Regime, Seed, seed_of
from experiments.drift import plan
from recjax.runtime.cache import keep_compiled_programs

TASK = "sums"
SCALE_SEEDS = 2  # pilot seeds that measure the scales
SCALE_RATE = 4e-4
SIZES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # scales of the noise at which a pilot measures it


def measure_scales(extra: tuple[str, ...] = ()) -> dict:
    """The scales of the causes that have none, and what they come from; with REINFORCE and AdamW at SCALE_RATE.

    A scale is the geometric mean over the pilot seeds.

    kl: KL(μ ‖ π) in nats, the median over a run's blocks between evaluations, by age; and by scale of noise that is
        fixed, or drawn anew. A few blocks of a run that breaks off would decide the mean.
    gap: mean |Δ log π| of the initial policy's samples, by scale.
    """
    keep_compiled_programs()
    seeds = range(plan.FIRST_PILOT_SEED, plan.FIRST_PILOT_SEED + SCALE_SEEDS)
    by_seed = [_measured(seed, extra) for seed in seeds]
    causes = {cell.cause for cell in plan.cells_of(TASK)}
    scales = {}
    for name in plan.CAUSES:
        if name in causes and "scale" in plan.CAUSES[name]:
            logarithms = [np.log(plan.scale_of(name, measured)) for measured in by_seed]
            scales[name] = float(f"{np.exp(np.mean(logarithms)):.2g}")
    return {"scales": scales, "measured": by_seed}


def _measured(seed_number: int, extra: tuple[str, ...]) -> dict[str, dict[float, float]]:
    cell = plan.Cell("adamw", "reinforce", plan.NONE, False)
    config = plan.run_of(TASK, cell, SCALE_RATE, seed_number, {}, extra).config
    seed, policy = seed_of(config)
    programs = Programs(config, policy, 0)

    def kl(age: int, **drift: float | bool) -> float:
        drifts = jax.tree.map(jnp.asarray, Drift(**drift))
        table = programs.run(seed, SCALE_RATE, Regime(jnp.int32(age), jnp.int32(0), drifts))
        return float(table["behavior_kl/k3"].median())

    return {
        "age": {age: kl(age) for age in sorted({cause["age"] for cause in plan.CAUSES.values()})},
        "fixed": {size: kl(1, noise=size, fixed=True) for size in SIZES},
        "fresh": {size: kl(1, noise=size) for size in SIZES},
        "gap": {size: gap(programs, seed, size) for size in SIZES},
    }


def gap(programs: Programs, seed: Seed, size: float) -> float:
    """Mean |Δ log π| between the recorded and the exact log-probs of the first batch, sampled with fixed noise."""
    drift = jax.tree.map(jnp.asarray, Drift(noise=size, fixed=True))
    asked, keys = seed.asked[0], seed.keys[0]
    recorded = programs.batch(seed, seed.params, asked, keys, drift)
    exact = programs.batch(seed, seed.params, asked, keys, drift._replace(exact_logprobs=jnp.asarray(True)))
    difference = np.abs(np.asarray(recorded.behavior_logprobs - exact.behavior_logprobs))
    return float(difference[np.asarray(recorded.completion_mask)].mean())


def make_runs(
    path: Path, scales: dict[str, float], most: int | None, workers: int, extra: tuple[str, ...] = ()
) -> None:
    """Makes the pilot runs that are missing, then those of the checks; at most `most` of each, in `workers` processes.

    Args:
        path: of the table.
    """
    pilots = plan.pilot_runs(TASK, scales, extra)
    make_missing(missing(pilots, path)[:most], path, workers, drifts=True)
    if missing(pilots, path):
        return
    best = plan.best_of_pilots(collect(pilots, path))
    make_missing(missing(plan.verdict_runs(TASK, scales, best, extra), path)[:most], path, workers, drifts=True)


def collected(path: Path, scales: dict[str, float]) -> pd.DataFrame | None:
    """Writes and returns the table of the finished runs; None if there are none."""
    runs = plan.pilot_runs(TASK, scales)
    if not missing(runs, path):
        runs += plan.verdict_runs(TASK, scales, plan.best_of_pilots(collect(runs, path)))
    if len(missing(runs, path)) == len(runs):
        return None
    table = collect(runs, path)
    write_table(table, path)
    return table
