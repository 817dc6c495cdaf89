"""The runs of plan.yaml: columns, methods, base policies, the stores that columns read, the best rate of each cell."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from recjax.algorithms.presets import PRESETS
from recjax.analysis.compare import final
from recjax.analysis.sweeps import SweepRun
from recjax.config import Config, make_config
from recjax.config.yaml_values import read_yaml_file
from recjax.errors import UserError

HERE = Path(__file__).parent
PLAN = read_yaml_file(HERE / "plan.yaml")
COLUMNS = PLAN["columns"]
STUDIES = ("leaderboard", "regimes")
AXES = ["method", "column", "rate", "seed"]
FRESH = "fresh"
FOREIGN_SEED = 1000  # the seed of a store is the seed of its reader plus this
RECORDED_TOP_K = 128  # the whole vocabulary of the sums
READ_TOP_K = ("klpo", "score_centering")  # presets that read the sampler's most likely tokens
OUTPUT = Path("runs/leaderboard")
POLICIES = HERE / "policies"

Best = Mapping[tuple[str, str], float]


class Method(NamedTuple):
    """A row: its name, and the config's `algorithm` block."""

    name: str
    algorithm: Mapping[str, Any]


def preset(name: str) -> Method:
    """The row of a preset."""
    return Method(name, {"preset": name})


def methods_of(study: str) -> list[Method]:
    """The planned rows of a study."""
    planned = PLAN[study]["methods"]
    if planned == "all":
        planned = [name for name in PRESETS if name not in PLAN[study]["left_out"]]
    return [preset(name) for name in planned]


def changed(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config's values with some keys replaced; a dotted key names a value within a block.

    Examples:
        >>> changed({"task": {"keep": 1}, "seed": 0}, {"task.reward": "math", "seed": 3})
        {'task': {'keep': 1, 'reward': 'math'}, 'seed': 3}
    """
    result = dict(values)
    for key, value in changes.items():
        block, _, rest = key.partition(".")
        if rest:
            result[block] = changed(result.get(block) or {}, {rest: value})
        else:
            result[block] = value
    return result


def base_values() -> dict[str, Any]:
    """The values that all runs share."""
    return changed(read_yaml_file(HERE / PLAN["config"]), PLAN["overrides"])


def base_policy_run(seed: int) -> Config:
    """The config whose initial policy, after its warm start, is the base policy of a seed."""
    return make_config(changed(base_values(), {"seed": seed}), [], str(HERE / "plan.yaml"))


def base_policy_of(seed: int) -> Path:
    """The folder with the base policy of a seed."""
    return POLICIES / f"seed_{seed}"


def seeds_of(study: str) -> list[int]:
    """The pilot seed and the seeds of the verdicts."""
    return [PLAN["pilot_seed"], *range(PLAN[study]["seeds"])]


def store_run(name: str, seed: int, extra: Mapping[str, Any]) -> SweepRun:
    """The run that records a store, for runs with a seed.

    Its base policy is made on the spot, because it is another one than that of the readers.

    Args:
        extra: changes of a smoke run, which come last.
    """
    settings = {"store": name, "seed": str(seed)}
    changes = PLAN["stores"][name] | {
        "seed": FOREIGN_SEED + seed,
        "output": str(OUTPUT / "stores" / f"{name}__{seed}"),
        "experience": {"record": True},
    }
    values = changed(changed(base_values(), changes), extra)
    return SweepRun(settings, [], make_config(values, [], str(HERE / "plan.yaml")))


def store_names(column: str) -> list[str]:
    """Names of the stores that a column reads."""
    experience = changed({}, COLUMNS[column].get("overrides", {})).get("experience") or {}
    names = [experience.get("store"), (experience.get("mix") or {}).get("store")]
    return [name for name in names if name]


def run_of(method: Method, column: str, rate: float, seed: int, extra: Mapping[str, Any]) -> SweepRun:
    """The run of a method in a column.

    Args:
        extra: changes of a smoke run, which come last.
    Raises:
        UserError: recjax refuses the method in this column.
    """
    settings = dict(zip(AXES, (method.name, column, f"{rate:g}", str(seed)), strict=True))
    changes = dict(COLUMNS[column].get("overrides", {}))
    values = changed(base_values(), changes)
    for name in store_names(column):
        recorded = str(store_run(name, seed, extra).config.record_file)
        where = "experience.store" if values["experience"].get("store") else "experience.mix.store"
        values = changed(values, {where: recorded})
    values = changed(
        values,
        {
            "model": {"path": str(base_policy_of(seed))},
            "warm_start": None,
            "algorithm": dict(method.algorithm),
            "optimizer.learning_rate": rate,
            "seed": seed,
            "output": str(OUTPUT / "__".join(settings.values())),
        },
    )
    if method.algorithm.get("preset") in READ_TOP_K:
        values = changed(values, {"rollout.recorded_top_k": RECORDED_TOP_K})
    return SweepRun(settings, [], make_config(changed(values, extra), [], str(HERE / "plan.yaml")))


def refusal(method: Method, column: str) -> str | None:
    """Why recjax refuses a method in a column; None if it runs."""
    try:
        run_of(method, column, PLAN["rates"][0], 0, {})
    except UserError as error:
        return str(error)
    return None


def cells_of(methods: Iterable[Method], columns: Iterable[str]) -> list[tuple[Method, str]]:
    """The pairs of a method and a column that recjax does not refuse."""
    pairs = itertools.product(methods, columns)
    return [(method, column) for method, column in pairs if refusal(method, column) is None]


def pilot_runs(cells: Iterable[tuple[Method, str]], extra: Mapping[str, Any]) -> list[SweepRun]:
    """Each cell at each rate with the pilot seed."""
    seed = PLAN["pilot_seed"]
    return [run_of(method, column, rate, seed, extra) for method, column in cells for rate in PLAN["rates"]]


def verdict_runs(
    cells: Iterable[tuple[Method, str]], seeds: int, best: Best, extra: Mapping[str, Any]
) -> list[SweepRun]:
    """Each cell at its best rate with the seeds of the verdicts, seed by seed."""
    cells = list(cells)
    return [
        run_of(method, column, best[method.name, column], seed, extra)
        for seed in range(seeds)
        for method, column in cells
    ]


def best_rates(table: pd.DataFrame) -> dict[tuple[str, str], float]:
    """The rate of each cell with the highest final accuracy of the pilot seed; the lower one of equal rates."""
    pilots = table[table["seed"] == str(PLAN["pilot_seed"])]
    if pilots.empty:
        return {}
    ends = final(pilots).reorder_levels(AXES).reset_index(name="end")
    ends["rate"] = ends["rate"].astype(float)
    ends = ends.sort_values(["end", "rate"], ascending=[False, True], kind="stable")
    chosen = ends.groupby(["method", "column"], sort=False)["rate"].first()
    return {(str(method), str(column)): float(rate) for (method, column), rate in chosen.items()}
