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

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from absl import flags

from recjax.analysis.sweeps import LOGS, SweepRun, read_sweep
from recjax.errors import UserError
from recjax.runs.folder import is_finished
from recjax.runtime.console import command, progress_bar, start
from recjax.runtime.workers import cores, end_with_parent

FLAGS = flags.FLAGS
LOOK_SECONDS = 1.0  # the bar shows the metrics of the active runs at this interval


def run_all(base: Path, runs: list[SweepRun], workers: int) -> dict[str, str]:
    """Runs all unfinished runs, `workers` at a time; a bar shows the steps of all runs, and which run at the moment.

    Returns:
        Exit status and last log line of each failed run, by name.
    """
    waiting = [run for run in runs if not is_finished(run.config)]
    # Otherwise XLA would start one thread per core in every run.
    environment = os.environ | {"PJRT_NPROC": str(max(1, cores() // workers))}
    failed = {}
    alive = {}  # the run of each active process
    stopping = threading.Event()

    def start(run: SweepRun) -> None:
        log = Path(run.config.output).parent / LOGS / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "recjax.train", "--config", str(base), *run.overrides]
        with log.open("w") as file:
            if stopping.is_set():
                return
            options = {"stdout": file, "stderr": subprocess.STDOUT, "env": environment}
            # A killed sweep leaves no runs, whose folders the same command would find in use.
            process = subprocess.Popen(command, preexec_fn=end_with_parent, **options)
            alive[process] = run
            code = process.wait()
            del alive[process]
        # A reward function may end the process with status 0 before the run is finished.
        if code or not is_finished(run.config):
            lines = log.read_text(errors="replace").strip().splitlines()
            last_line = lines[-1] if lines else "no output"
            failed[run.name] = f"exit status {code}: {last_line} ({log})"

    done = {}
    for run in runs:
        done[run.name] = run.steps_done() if run in waiting else run.config.training.steps
    bar = progress_bar("sweep", sum(run.config.training.steps for run in runs), sum(done.values()), unit="step")
    with ThreadPoolExecutor(workers) as pool, bar:
        unfinished = {pool.submit(start, run) for run in waiting}
        try:
            while unfinished:
                finished, unfinished = wait(unfinished, LOOK_SECONDS, FIRST_COMPLETED)
                for future in finished:
                    future.result()
                active = list(alive.values())
                for run in active if unfinished else waiting:
                    done[run.name] = run.steps_done()
                shown = [f"{len(runs) - len(unfinished)} of {len(runs)} runs ended"]
                if failed:
                    shown.append(f"{len(failed)} failed")
                shown += [f"{run.name}: {done[run.name]}/{run.config.training.steps}" for run in active]
                bar.set_postfix_str(", ".join(shown), refresh=False)
                bar.update(sum(done.values()) - bar.n)
        except BaseException:
            stopping.set()
            for process in list(alive):
                process.terminate()
            raise
    return failed


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
