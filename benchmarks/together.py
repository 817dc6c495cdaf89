"""Runs of the toy task's map one by one, and as many in one program by `jax.vmap`: seconds of 25 steps each.

    python -m benchmarks.together [--runs 6] [--rounds 3]

The runs differ in their rate. Both ways take turns, after one call each that compiles. Prints one JSON object.
"""

import json
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks.run import machine
from experiments.claims.map import HERE
from experiments.claims.programs import Programs, Regime, seed_of
from recjax.analysis.sweeps import read_sweep

FLAGS = flags.FLAGS
SETTINGS = {"algorithm": "grpo", "regime": "interval_20", "seed": "0"}


def main(argv: list[str]) -> None:
    """Times both."""
    runs = [run for run in read_sweep(HERE / "map.yaml")[1] if SETTINGS.items() <= run.settings.items()]
    runs = [runs[place % len(runs)] for place in range(FLAGS.runs)]
    config = runs[0].config
    seed, policy = seed_of(config)
    programs, regime = Programs(config, policy, most_offset=0), Regime(jnp.int32(config.regime.sync_interval))
    every = config.evaluation.every
    steps = jnp.arange(1, every + 1), seed.asked[:every], seed.keys[:every]
    carries = [programs.start(seed, run.config.optimizer.learning_rate) for run in runs]
    together = jax.jit(jax.vmap(programs.train, in_axes=(0, None, None, None)))
    alone = jax.jit(programs.train)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *carries)
    ways = {
        "one_after_the_other": lambda: [alone(carry, seed, regime, steps) for carry in carries],
        "together": lambda: together(stacked, seed, regime, steps),
    }
    seconds = {name: [] for name in ways}
    for _ in range(1 + FLAGS.rounds):
        for name, way in ways.items():
            begun = time.perf_counter()
            jax.block_until_ready(way())
            seconds[name].append(time.perf_counter() - begun)
    found = {name: [round(value, 3) for value in values[1:]] for name, values in seconds.items()}
    print(json.dumps({"machine": machine(), "runs": FLAGS.runs, "seconds": found}, indent=2))


if __name__ == "__main__":
    flags.DEFINE_integer("runs", 6, "Runs in one program.", lower_bound=1)
    flags.DEFINE_integer("rounds", 3, "Repeats of each.", lower_bound=1)
    app.run(main)
