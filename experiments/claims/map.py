"""Makes the runs of map.yaml, and their table.

    python -m experiments.claims.map [--smoke] [--seeds 0] [--workers N]    # makes what is missing
    python -m experiments.claims.map --checks [--workers N]                 # makes the runs of checks.yaml instead
    python -m experiments.claims.map [--checks] --collect                   # writes map.parquet or checks.parquet

It resumes: a run that has a file or is in the table is finished. Runs of one algorithm share compiled programs (see
programs.py), an algorithm in one of `--workers` processes. All runs of a seed come before those of the next.
"""

import itertools
import json
import multiprocessing
import os
import time
from pathlib import Path

import pandas as pd
from absl import app, flags

from recjax.analysis.collect import collect as collect_metrics
from recjax.analysis.compare import final
from recjax.analysis.sweeps import SweepRun, read_sweep
from recjax.config import Config, RegimeConfig
from recjax.config.yaml_values import read_yaml_file
from recjax.errors import UserError
from recjax.runs.folder import is_finished
from recjax.runtime.console import command, progress_bar
from recjax.runtime.files import write_whole

FLAGS = flags.FLAGS
HERE = Path(__file__).parent
TABLE = HERE / "map.parquet"
CHECKS_TABLE = HERE / "checks.parquet"


def file_of(run: SweepRun) -> Path:
    """Where the rows of a finished run are."""
    return Path(f"{run.config.output}.json")


def in_order(runs: list[SweepRun]) -> list[SweepRun]:
    """Seed by seed, and runs of one program one after the other."""
    return sorted(runs, key=lambda run: (run.config.seed, run.settings["algorithm"], run.config.regime.sync_offset > 0))


def check_runs(table: pd.DataFrame) -> list[SweepRun]:
    """The runs of checks.yaml: seed by seed, each algorithm at its best rate in each regime.

    Args:
        table: the map's, whose seeds choose the rates.
    """
    planned = read_yaml_file(HERE / "checks.yaml")
    means = final(table).groupby(["algorithm", "regime", "rate"]).mean()
    best = means.groupby(["algorithm", "regime"]).idxmax().map(lambda place: place[2])
    examples = {}  # a run of each algorithm and regime
    for run in read_sweep(HERE / planned["rates_by"])[1]:
        examples.setdefault((run.settings["algorithm"], run.settings["regime"]), run)
    algorithms = {name: (name, 1) for name in table["algorithm"].unique()}
    algorithms |= {name: (chosen["algorithm"], chosen["factor"]) for name, chosen in planned["multiples"].items()}
    runs = []
    # Programs that keep older weights are other programs, whose runs come last.
    with_offset = [name for name in planned["regimes"] if name.startswith("offset")]
    for regimes in ([name for name in planned["regimes"] if name not in with_offset], with_offset):
        for seed, (name, (algorithm, factor)), regime in itertools.product(
            planned["seeds"], algorithms.items(), regimes
        ):
            rate = float(best[algorithm, regime]) * factor
            settings = {"algorithm": name, "rate": f"{rate:g}", "regime": regime, "seed": str(seed)}
            config = examples[algorithm, regime].config
            optimizer = config.optimizer.model_copy(update={"learning_rate": rate})
            output = f"runs/claims_checks/{'__'.join(settings.values())}"
            changes = {"seed": seed, "output": output, "optimizer": optimizer}
            runs.append(SweepRun(settings, [], config.model_copy(update=changes)))
    return runs


def without_arguments(config: Config) -> Config:
    """The config with nothing in it that a program takes as an argument: equal configs are one program."""
    plain = {"seed": 0, "output": "", "regime": RegimeConfig(sync_offset=config.regime.sync_offset)}
    optimizer = config.optimizer.model_copy(update={"learning_rate": 1.0})
    rollout = config.rollout.model_copy(update={"drift": None})
    model = config.model.model_copy(update={"path": None})
    return config.model_copy(update={**plain, "model": model, "optimizer": optimizer, "rollout": rollout})


def drift_of(config: Config) -> dict[str, float | bool]:
    """The arguments of a program's `Drift`, which the config's sampler has; without a drift, none.

    Raises:
        ValueError: groups of inputs with their own scales, which programs do not have.
    """
    drift = config.rollout.drift
    if drift is None:
        return {}
    if drift.group is not None:
        raise UserError("", f"rollout.drift.group = {drift.group}: programs have one scale for each output; remove it")
    return {drift.weights: drift.scale, "fixed": drift.fixed, "exact_logprobs": drift.logprobs == "exact"}


def make(runs: list[SweepRun], drifts: bool = False) -> None:
    """Makes runs, each with its file.

    Args:
        drifts: compile programs whose sampler can drift, which run a little slower.
    """
    import jax
    import jax.numpy as jnp

    from experiments.claims.programs import Drift, Programs, Regime, seed_of
    from recjax.runtime.cache import keep_compiled_programs

    keep_compiled_programs()
    programs, seeds = {}, {}
    for run in runs:
        config = run.config
        if config.seed not in seeds:
            seeds[config.seed] = seed_of(config)
        seed, policy = seeds[config.seed]
        shared = without_arguments(config).model_dump_json()
        if shared not in programs:
            programs[shared] = Programs(config, policy, config.regime.sync_offset)
        steps = config.training.steps
        interval = steps + 1 if config.regime.offline else config.regime.sync_interval
        drift = jax.tree.map(jnp.asarray, Drift(**drift_of(config))) if drifts else None
        regime = Regime(jnp.int32(interval), jnp.int32(config.regime.sync_offset), drift)
        table = programs[shared].run(seed, config.optimizer.learning_rate, regime)
        file_of(run).parent.mkdir(parents=True, exist_ok=True)
        write_whole(file_of(run), json.dumps(table.to_dict("list")))


def collected(runs: list[SweepRun], path: Path) -> dict[str, pd.DataFrame]:
    """The rows of a table by their run's name; no table is no rows."""
    if not path.exists():
        return {}
    axes = list(runs[0].settings)
    return {"__".join(place): rows for place, rows in pd.read_parquet(path).groupby(axes, sort=False)}


def collect(runs: list[SweepRun], path: Path) -> pd.DataFrame:
    """A row for each evaluation of each finished run: its settings, the step, what was measured since the last one.

    Args:
        path: of the table that runs without a file of their own may be in.
    """
    tables, known = [], collected(runs, path)
    for run in runs:
        if file_of(run).exists():
            table = pd.DataFrame(json.loads(file_of(run).read_text()))
            tables.append(pd.concat([pd.DataFrame(run.settings, index=table.index), table], axis=1))
        elif run.name in known:
            tables.append(known[run.name])
    if not tables:
        raise UserError("", f"none of the {len(runs)} runs is finished; make some first")
    return pd.concat(tables, ignore_index=True)


def collect_folders(runs: list[SweepRun], path: Path) -> pd.DataFrame:
    """The table of a sweep's finished runs; runs that were made elsewhere keep the rows that they have in it.

    Args:
        path: of the table.
    Raises:
        ValueError: no run is finished.
    """
    known = collected(runs, path)
    tables = [collect_metrics([run]) if is_finished(run.config) else known.get(run.name) for run in runs]
    if all(table is None for table in tables):
        raise UserError("", f"none of the {len(runs)} runs is finished; python -m recjax.sweep makes them")
    return pd.concat([table for table in tables if table is not None], ignore_index=True)


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Writes the table of `collect`."""
    floats = table.select_dtypes("float").columns
    table.astype(dict.fromkeys(floats, "float32")).to_parquet(path, index=False, compression="zstd")


def missing(runs: list[SweepRun], path: Path) -> list[SweepRun]:
    """The runs that have neither a file nor rows in the table."""
    known = collected(runs, path)
    return [run for run in runs if not file_of(run).exists() and run.name not in known]


def make_missing(runs: list[SweepRun], path: Path, workers: int, drifts: bool = False) -> None:
    """Makes the runs that are missing, in `workers` processes that each have their own algorithms.

    Args:
        path: of the table that finished runs without a file of their own may be in.
        drifts: see `make`.
    Raises:
        ValueError: a process failed.
    """
    waiting = missing(runs, path)
    algorithms = sorted({run.settings["algorithm"] for run in waiting})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ["PJRT_NPROC"] = str(max(1, cores // workers))  # for the workers, which import JAX
    spawn = multiprocessing.get_context("spawn")
    shares = [algorithms[place::workers] for place in range(workers)]
    parts = [[run for run in waiting if run.settings["algorithm"] in share] for share in shares]
    processes = [spawn.Process(target=make, args=(part, drifts)) for part in parts]
    for process in processes:
        process.start()
    try:
        with progress_bar(path.stem, len(runs), len(runs) - len(waiting), unit="run") as bar:
            while any(process.is_alive() for process in processes):
                time.sleep(1)
                bar.update(len(runs) - sum(not file_of(run).exists() for run in waiting) - bar.n)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    if any(process.exitcode for process in processes):
        raise UserError("", "a worker failed, see above; the same command resumes the sweep")


@command
def main(argv: list[str]) -> None:
    """Makes what is missing, or collects what is there."""
    if argv[1:]:
        raise UserError("", f"{argv[1]!r} is not understood; see --help")
    if FLAGS.checks:
        runs = check_runs(pd.read_parquet(TABLE))
        path = CHECKS_TABLE
    else:
        runs = in_order(read_sweep(HERE / "map.yaml", FLAGS.smoke)[1])
        # The smoke block's runs have the names of others, and fewer steps.
        path = file_of(runs[0]).parent / TABLE.name if FLAGS.smoke else TABLE
    if FLAGS.collect:
        table = collect(runs, path)
        write_table(table, path)
        print(f"{path}: {len(table.drop_duplicates(list(runs[0].settings)))} of {len(runs)} runs")
        return
    runs = [run for run in runs if not FLAGS.seeds or str(run.config.seed) in FLAGS.seeds]
    make_missing(runs, path, FLAGS.workers)


if __name__ == "__main__":
    flags.DEFINE_bool("smoke", False, "The few runs of the file's smoke block.")
    flags.DEFINE_bool("checks", False, "The runs of checks.yaml instead of the map's.")
    flags.DEFINE_bool("collect", False, "Write the table of what is finished.")
    flags.DEFINE_list("seeds", [], "Only runs of these seeds.")
    flags.DEFINE_integer("workers", 2, "Processes.", lower_bound=1)
    app.run(main)
