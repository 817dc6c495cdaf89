"""Makes the runs of map.yaml, and their table.

    python -m experiments.claims.map [--smoke] [--seeds 0] [--workers N]    # makes what is missing
    python -m experiments.claims.map --collect                              # writes experiments/claims/map.parquet

It resumes: a run that has a file or is in the table is finished. Runs of one algorithm share compiled programs (see
programs.py), an algorithm in one of `--workers` processes. All runs of a seed come before those of the next.
"""

import json
import multiprocessing
import os
import time
from pathlib import Path

import pandas as pd
from absl import app, flags

from recjax.analysis.sweeps import SweepRun, read_sweep
from recjax.config import Config, RegimeConfig
from recjax.console import command, progress_bar
from recjax.files import write_whole

FLAGS = flags.FLAGS
HERE = Path(__file__).parent
TABLE = HERE / "map.parquet"


def file_of(run: SweepRun) -> Path:
    """Where the rows of a finished run are."""
    return Path(f"{run.config.output}.json")


def in_order(runs: list[SweepRun]) -> list[SweepRun]:
    """Seed by seed, and runs of one program one after the other."""
    return sorted(runs, key=lambda run: (run.config.seed, run.settings["algorithm"], run.config.regime.sync_offset > 0))


def without_arguments(config: Config) -> Config:
    """The config with nothing in it that a program takes as an argument: equal configs are one program."""
    plain = {"seed": 0, "output": "", "regime": RegimeConfig(sync_offset=config.regime.sync_offset)}
    optimizer = config.optimizer.model_copy(update={"learning_rate": 1.0})
    return config.model_copy(update={**plain, "optimizer": optimizer})


def make(runs: list[SweepRun]) -> None:
    """Makes runs, each with its file."""
    import jax.numpy as jnp

    from experiments.claims.programs import Programs, Regime, seed_of
    from recjax.cache import keep_compiled_programs

    keep_compiled_programs()
    known, program, seeds = None, None, {}
    for run in runs:
        config = run.config
        if config.seed not in seeds:
            seeds = {config.seed: seed_of(config)}
        seed, policy = seeds[config.seed]
        if known != (known := without_arguments(config)):
            program = Programs(config, policy, config.regime.sync_offset)
        steps = config.training.steps
        interval = steps + 1 if config.regime.offline else config.regime.sync_interval
        regime = Regime(jnp.int32(interval), jnp.int32(config.regime.sync_offset))
        table = program.run(seed, config.optimizer.learning_rate, regime)
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
        raise ValueError(f"none of the {len(runs)} runs is finished; python -m experiments.claims.map makes them")
    return pd.concat(tables, ignore_index=True)


@command
def main(argv: list[str]) -> None:
    """Makes what is missing, or collects what is there."""
    if argv[1:]:
        raise ValueError(f"{argv[1]!r} is not understood; see --help")
    runs = in_order(read_sweep(HERE / "map.yaml", FLAGS.smoke)[1])
    # The smoke block's runs have the names of others, and fewer steps.
    path = file_of(runs[0]).parent / TABLE.name if FLAGS.smoke else TABLE
    if FLAGS.collect:
        table = collect(runs, path)
        floats = table.select_dtypes("float").columns
        table.astype(dict.fromkeys(floats, "float32")).to_parquet(path, index=False, compression="zstd")
        print(f"{path}: {len(table.drop_duplicates(list(runs[0].settings)))} of {len(runs)} runs")
        return
    runs = [run for run in runs if not FLAGS.seeds or str(run.config.seed) in FLAGS.seeds]
    known = collected(runs, path)
    waiting = [run for run in runs if not file_of(run).exists() and run.name not in known]
    algorithms = sorted({run.settings["algorithm"] for run in waiting})
    os.environ["PJRT_NPROC"] = str(max(1, os.cpu_count() // FLAGS.workers))  # for the workers, which import JAX
    spawn = multiprocessing.get_context("spawn")
    shares = [algorithms[place :: FLAGS.workers] for place in range(FLAGS.workers)]
    parts = [[run for run in waiting if run.settings["algorithm"] in share] for share in shares]
    workers = [spawn.Process(target=make, args=(part,)) for part in parts]
    for worker in workers:
        worker.start()
    try:
        with progress_bar("map", len(runs), len(runs) - len(waiting), unit="run") as bar:
            while any(worker.is_alive() for worker in workers):
                time.sleep(1)
                bar.update(len(runs) - sum(not file_of(run).exists() for run in waiting) - bar.n)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    if any(worker.exitcode for worker in workers):
        raise ValueError("a worker failed, see above; the same command resumes the sweep")


if __name__ == "__main__":
    flags.DEFINE_bool("smoke", False, "The few runs of the file's smoke block.")
    flags.DEFINE_bool("collect", False, "Write the table of what is finished.")
    flags.DEFINE_list("seeds", [], "Only runs of these seeds.")
    flags.DEFINE_integer("workers", 2, "Processes.", lower_bound=1)
    app.run(main)
