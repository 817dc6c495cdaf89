"""Age and engine drift: makes the missing runs of plan.yaml, their tables, figures and pages.

    python -m experiments.drift                                        # the bandit and the sums, then the page
    python -m experiments.drift --part sums --most 20 --workers 2      # one part, at most 20 runs of it
    python -m experiments.drift --part smollm2     # a part on SmolLM2, which does not run without this flag
    python -m experiments.drift --scales           # measures the scales of the noise again, into scales.json
    python -m experiments.drift --page             # no runs: tables of the finished ones, and the page
    python -m experiments.drift --smoke            # a few short runs, with everything in runs/drift_smoke

It resumes: a run that has a file or is in a table is finished. A run of SmolLM2 resumes from its checkpoint.
"""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
from absl import app, flags

from experiments.claims.map import collect_folders
from experiments.drift import page, plan
from recjax.analysis.collect import without_other_metrics
from recjax.analysis.sweeps import read_sweep
from recjax.errors import UserError
from recjax.runtime.console import command
from recjax.runtime.files import write_whole

FLAGS = flags.FLAGS
HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs" / "claims"
PARTS = ("bandit", "sums", "smollm2")
SCALES = HERE / "scales.json"
SHORT = ("training.steps=8", "evaluation.every=4", "evaluation.problems=16")  # changes of a smoke run


def folder(smoke: bool) -> Path:
    """Where the tables are."""
    return Path(plan.SMOKE) if smoke else HERE


def scales_of(task: str) -> dict[str, float]:
    """The measured scales of a task's causes."""
    return json.loads(SCALES.read_text(encoding="utf-8"))[task]["scales"]


def measure_scales() -> None:
    """Measures the scales of both tasks, and writes them with what they come from."""
    from experiments.drift import bandit, sums

    found = {"bandit": bandit.measure_scales(), "sums": sums.measure_scales()}
    write_whole(SCALES, json.dumps(found, indent=1) + "\n")


def make_bandit(to: Path, smoke: bool) -> None:
    """Trains on the bandit and enumerates its gradients, for the methods that are not in the tables yet."""
    from experiments.drift import bandit

    methods = list(dict.fromkeys(cell.algorithm for cell in plan.cells_of("bandit")))
    options = {"scales": scales_of("bandit")} | ({"steps": 20} if smoke else {})
    makers = (("bandit", bandit.trained, methods, options), ("gradients", bandit.losses_of, bandit.ENUMERATED, {}))
    for name, make, names, given in makers:
        path = to / f"{name}.parquet"
        known = pd.read_parquet(path) if path.exists() else pd.DataFrame({"algorithm": []})
        for method in names[:2] if smoke else names:
            if method not in set(known["algorithm"]):
                rows = pd.DataFrame(make(method, **given))
                if "algorithm" not in rows:
                    rows.insert(0, "algorithm", method)
                known = pd.concat([known, rows], ignore_index=True)
                known.to_parquet(path, index=False, compression="zstd")


def make_sums(to: Path, smoke: bool, most: int | None, workers: int) -> None:
    """Makes the runs of sums that are missing, at most `most`, in `workers` processes."""
    from experiments.drift import sums

    extra = SHORT if smoke else ()
    sums.make_runs(to / "sums.parquet", scales_of("sums"), 2 if smoke else most, workers, extra)


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
    if FLAGS.scales:
        measure_scales()
        return
    to = folder(FLAGS.smoke)
    to.mkdir(parents=True, exist_ok=True)
    parts = FLAGS.part or ["bandit", "sums"]
    if "bandit" in parts and not FLAGS.page:
        make_bandit(to, FLAGS.smoke)
    if "sums" in parts:
        from experiments.drift import sums

        if not FLAGS.page:
            make_sums(to, FLAGS.smoke, FLAGS.most, FLAGS.workers)
        if not FLAGS.smoke:
            sums.collected(to / "sums.parquet", scales_of("sums"))
    if "smollm2" in parts:
        sweep = [sys.executable, "-m", "recjax.sweep", str(HERE / "smollm2.yaml"), "--workers", "1"]
        if not FLAGS.page and subprocess.run(sweep, check=False).returncode:
            raise UserError("", "the sweep of SmolLM2 ended early, see above; the same command resumes it")
        collect_smollm2(to)
    page.write_page(page.read_tables(to), to if FLAGS.smoke else DOCS, to)


if __name__ == "__main__":
    flags.DEFINE_multi_enum("part", [], PARTS, "Only this part; may be repeated.")
    flags.DEFINE_integer("most", None, "At most this many runs of sums.", lower_bound=1)
    flags.DEFINE_integer("workers", 1, "Processes, each with its own methods.", lower_bound=1)
    flags.DEFINE_bool("scales", False, "Measure the scales of the noise, and nothing else.")
    flags.DEFINE_bool("page", False, "Make no runs, only tables, figures and page.")
    flags.DEFINE_bool("smoke", False, "A few short runs, and everything in runs/drift_smoke.")
    app.run(main)
