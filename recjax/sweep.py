"""Runs many configs from one file: every combination of named settings.

    python -m recjax.sweep experiments/claims/grid.yaml [--smoke] [--workers N] [--dry_run] [key=value ...]

The file:

    config: laboratory.yaml             # base config of all runs; path relative to this file
    output: runs/claims                 # gets one folder per run, and logs/
    settings:                           # axis → name → overrides of the config
      algorithm: {grpo: {algorithm.preset: grpo}, opmd: {algorithm.preset: opmd}}
      regime: {on_policy: {}, interval_20: {regime.sync_interval: 20}}
      seed: {0: {seed: 0}, 1: {seed: 1}}
    grids:                              # each crosses its axes; "all" takes every name of an axis
      - {algorithm: all, regime: [on_policy, interval_20], seed: all}
    overrides: {evaluation.samples: 4}                      # optional: for all runs; settings override it
    smoke: {grids: [...], overrides: {training.steps: 20}}   # --smoke runs this instead

Runs are parallel processes. The same command resumes an interrupted sweep: it skips finished runs and resumes the
remaining runs. If a run fails, the sweep continues and reports the failure at the end. docs/sweeps.md has an example.
"""

import signal
import sys

from absl import flags

from recjax.analysis.sweeps import read_sweep, run_all
from recjax.errors import UserError
from recjax.runs.folder import is_finished
from recjax.runtime.console import command, start
from recjax.runtime.workers import cores

FLAGS = flags.FLAGS


@command
def main(argv: list[str]) -> None:
    """Reads the file, runs all unfinished runs and prints the failures."""
    if len(argv) < 2:
        raise UserError(problem="give the sweep file: python -m recjax.sweep FILE")
    base, runs = read_sweep(argv[1], FLAGS.smoke, argv[2:])
    finished = sum(is_finished(run.config) for run in runs)
    print(f"{len(runs)} runs, {finished} of them finished")
    if FLAGS.dry_run:
        for run in runs:
            print(f"{run.config.output}  {' '.join(run.overrides[:-1])}")
        return

    def stop(number: int, _: object) -> None:
        sys.exit(f"stopped by {signal.Signals(number).name}; the same command resumes the sweep")

    # Like Ctrl-C, these signals must also end the active runs.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    failed = run_all(base, runs, FLAGS.workers or cores())
    for name, reason in failed.items():
        print(f"FAILED {name}: {reason}")
    folder = runs[0].config.output.rsplit("/", 1)[0]
    print(f"{len(runs) - len(failed)} of {len(runs)} runs finished in {folder}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    flags.DEFINE_bool("smoke", False, "Run the file's smoke block instead of its grids.")
    flags.DEFINE_integer(
        "workers", None, "Number of parallel runs; default: the number of cores. On one GPU, give 1.", lower_bound=1
    )
    flags.DEFINE_bool("dry_run", False, "Check and list the runs without starting them.")
    start(main)
