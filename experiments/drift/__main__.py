"""Age and engine drift: makes the missing parts of the study, its tables, its figures and pages.

    python -m experiments.drift                       # the bandit and the quickstart's task, then the page
    python -m experiments.drift --part quickstart --most 20 --workers 2    # one part, at most 20 runs of it
    python -m experiments.drift --part smollm2        # a part on SmolLM2, which does not run without this flag
    python -m experiments.drift --page                # no runs: tables of the finished ones, and the page
    python -m experiments.drift --smoke               # a few short runs, with everything in runs/drift_smoke

It resumes: a run that has a file or is in a table is finished. A run of SmolLM2 resumes from its checkpoint.
"""

import subprocess
import sys
from pathlib import Path

import pandas as pd
from absl import app, flags

from experiments.claims.map import collect, collect_folders, make_missing, missing, write_table
from experiments.drift import page
from recjax.analysis.collect import without_other_metrics
from recjax.analysis.sweeps import read_sweep
from recjax.console import command
from recjax.errors import UserError

FLAGS = flags.FLAGS
HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs" / "claims"
PARTS = ("bandit", "quickstart", "smollm2")


def folder(smoke: bool) -> Path:
    """Where the tables are."""
    return Path("runs/drift_smoke") if smoke else HERE


def make_bandit(to: Path, smoke: bool) -> None:
    """Trains on the bandit and enumerates its gradients, for the algorithms that are not in the tables yet."""
    from experiments.drift import bandit

    size = {"steps": 20, "seeds": 2} if smoke else {}
    for name, make, options in (("bandit", bandit.trained, size), ("gradients", bandit.losses_of, {})):
        path = to / f"{name}.parquet"
        known = pd.read_parquet(path) if path.exists() else pd.DataFrame({"algorithm": []})
        for algorithm in page.NAMES:
            if algorithm not in set(known["algorithm"]):
                rows = pd.DataFrame(make(algorithm, **options))
                rows.insert(0, "algorithm", algorithm)
                known = pd.concat([known, rows], ignore_index=True)
                known.to_parquet(path, index=False, compression="zstd")


def make_quickstart(to: Path, smoke: bool, most: int | None, workers: int) -> None:
    """Makes the runs of quickstart.yaml that are missing, at most `most`, in `workers` processes."""
    runs, path = read_sweep(HERE / "quickstart.yaml", smoke)[1], to / "quickstart.parquet"
    make_missing(missing(runs, path)[:most], path, workers, drifts=True)


def collect_quickstart(to: Path, smoke: bool) -> None:
    """Writes the table of the finished runs of quickstart.yaml, if there are any."""
    runs, path = read_sweep(HERE / "quickstart.yaml", smoke)[1], to / "quickstart.parquet"
    if len(missing(runs, path)) < len(runs):
        write_table(collect(runs, path), path)


def collect_smollm2(to: Path) -> None:
    """Writes the table of the finished runs of smollm2.yaml, if there are any."""
    path = to / "smollm2.parquet"
    try:
        table = collect_folders(read_sweep(HERE / "smollm2.yaml")[1], path)
    except UserError:  # no run is finished, which the page says
        return
    without_other_metrics(table).to_parquet(path, index=False, compression="zstd")


@command
def main(argv: list[str]) -> None:
    """Makes what is missing, then writes tables, figures and page."""
    if argv[1:]:
        raise UserError("", f"{argv[1]!r} is not understood; see --help")
    to = folder(FLAGS.smoke)
    to.mkdir(parents=True, exist_ok=True)
    parts = FLAGS.part or ["bandit", "quickstart"]
    if "bandit" in parts and not FLAGS.page:
        make_bandit(to, FLAGS.smoke)
    if "quickstart" in parts:
        if not FLAGS.page:
            make_quickstart(to, FLAGS.smoke, FLAGS.most, FLAGS.workers)
        collect_quickstart(to, FLAGS.smoke)
    if "smollm2" in parts:
        sweep = [sys.executable, "-m", "recjax.sweep", str(HERE / "smollm2.yaml"), "--workers", "1"]
        if not FLAGS.page and subprocess.run(sweep, check=False).returncode:
            raise UserError("", "the sweep of SmolLM2 ended early, see above; the same command resumes it")
        collect_smollm2(to)
    page.write_page(page.read_tables(to), to if FLAGS.smoke else DOCS, to)


if __name__ == "__main__":
    flags.DEFINE_multi_enum("part", [], PARTS, "Only this part; may be repeated.")
    flags.DEFINE_integer("most", None, "At most this many runs of the quickstart's task.", lower_bound=1)
    flags.DEFINE_integer("workers", 1, "Processes, each with its own algorithms.", lower_bound=1)
    flags.DEFINE_bool("page", False, "Make no runs, only tables, figures and page.")
    flags.DEFINE_bool("smoke", False, "A few short runs, and everything in runs/drift_smoke.")
    app.run(main)
