"""The leaderboard of all presets, and the study of six regimes: makes the missing runs of plan.yaml, and the pages.

    python -m experiments.leaderboard                                    # all runs of the board, then its page
    python -m experiments.leaderboard --preset grpo --column late        # one row, one column
    python -m experiments.leaderboard --loss mine:loss                   # your own whole loss, in mine.py
    python -m experiments.leaderboard --method "mine={preset: reinforce, weight: 'mine:fading'}"   # your own row
    python -m experiments.leaderboard --study regimes                    # six methods in all regimes
    python -m experiments.leaderboard --page                             # no runs: tables and pages
    python -m experiments.leaderboard --smoke --preset grpo              # short runs in runs/leaderboard_smoke, no page

It resumes: a run that has a file in runs/leaderboard or rows in runs.parquet is finished. A row of your own stands on
the page that is printed, and in no committed file.
"""

import json
from pathlib import Path

import pandas as pd
import yaml
from absl import app, flags

from experiments.claims.map import write_table
from experiments.leaderboard import page, plan, runs
from experiments.leaderboard.plan import Method
from experiments.leaderboard.runs import Row
from recjax.algorithms.axes import is_users
from recjax.algorithms.presets import build_algorithm
from recjax.errors import UserError
from recjax.runtime.console import command

FLAGS = flags.FLAGS
HERE = Path(__file__).parent
TABLE = HERE / "runs.parquet"
SHORT = {
    "training.steps": 8,
    "evaluation.every": 4,
    "evaluation.problems": 16,
}  # changes of a smoke run
SMOKE_SEEDS = 2


def own_method(text: str) -> Method:
    """The row of `--method NAME={...}`.

    Raises:
        UserError: no name, or a block that is no mapping.
    """
    name, has_block, block = text.partition("=")
    algorithm = yaml.safe_load(block) if has_block else None
    if not name or not isinstance(algorithm, dict):
        raise UserError("--method", "takes NAME={…}, an `algorithm` block", "see --help", value=text)
    if "__" in name or "/" in name:
        raise UserError("--method", "a name has no / and no __", value=name)
    return Method(name, algorithm)


def own_loss(name: str) -> Method:
    """The row of `--loss module:function`: the function as objective, with the advantages of GRPO.

    Raises:
        UserError: no function can have this name, or the function is not an objective.
    """
    if not is_users(name) or "__" in name or "/" in name:
        raise UserError("--loss", "takes module:function without / and __", "see docs/tutorials/add_a_loss.md", name)
    method = Method(name.replace(":", "."), {"preset": "grpo", "objective": name})
    build_algorithm("grpo", {"objective": name})
    return method


def own_rows() -> list[Method]:
    """The rows of `--method` and `--loss`."""
    return [own_method(text) for text in FLAGS.method] + [own_loss(name) for name in FLAGS.loss]


def planned_rows(study: str) -> list[Row]:
    """The rows of a study, with the flags' choice of rows and columns."""
    methods = plan.methods_of(study)
    unknown = [name for name in FLAGS.preset if name not in {method.name for method in methods}]
    if unknown:
        raise UserError("--preset", f"the study {study} has no such row", value=unknown[0])
    own = own_rows()
    if FLAGS.preset or own:
        methods = [method for method in methods if method.name in FLAGS.preset]
    methods += own
    planned = plan.PLAN[study]
    columns = tuple(column for column in planned["columns"] if not FLAGS.column or column in FLAGS.column)
    return [Row(method, columns, SMOKE_SEEDS if FLAGS.smoke else planned["seeds"]) for method in methods]


def table_of_rows(rows: list[Row], path: Path, extra: dict) -> pd.DataFrame:
    """The table of the rows' finished runs."""
    tables = []
    for row in rows:
        pilots = runs.table_of(runs.pilots_of(row, extra), path)
        tables.append(runs.table_of(runs.runs_of(row, pilots, extra), path))
    return pd.concat(tables, ignore_index=True)


def write_errors(rows: list[Row], table: pd.DataFrame) -> None:
    """Adds the errors that ended the pilots of cells without a finished run to the committed ones."""
    errors = page.read_errors()
    for row in rows:
        found = runs.errors_of(runs.pilots_of(row, {}))
        errors |= {f"{method}__{column}": error for (method, column), error in found.items()}
    finished = {f"{method}__{column}" for method, column in zip(table["method"], table["column"], strict=True)}
    errors = {name: errors[name] for name in sorted(errors.keys() - finished)}
    if errors or page.ERRORS.exists():
        page.ERRORS.write_text(json.dumps(errors, indent=2) + "\n", encoding="utf-8")


def all_rows() -> list[Row]:
    """The rows of both studies."""
    rows = []
    for study in plan.STUDIES:
        planned = plan.PLAN[study]
        rows += [Row(method, tuple(planned["columns"]), planned["seeds"]) for method in plan.methods_of(study)]
    return rows


@command
def main(argv: list[str]) -> None:
    """Makes what is missing, then writes table, figures and pages."""
    if argv[1:]:
        raise UserError("", f"{argv[1]!r} is not understood; see --help")
    extra = {}
    path = TABLE
    if FLAGS.smoke:
        extra = SHORT
        plan.OUTPUT = Path("runs/leaderboard_smoke")
        path = plan.OUTPUT / TABLE.name  # does not exist: no committed run stands for a short one
    rows = planned_rows(FLAGS.study)
    if not FLAGS.page:
        for study in plan.STUDIES:
            for seed in plan.seeds_of(study):
                runs.write_base_policy(seed)
        runs.make_rows(rows, path, min(FLAGS.workers, len(rows)), extra)
    if FLAGS.smoke:
        print(page.board_text(table_of_rows(rows, path, extra)))
        return
    table = table_of_rows(all_rows(), TABLE, {}).drop_duplicates([*plan.AXES, "step"])
    if len(table):
        write_table(table, TABLE)
        write_errors(all_rows(), table)
    if FLAGS.method or FLAGS.loss:
        own = table_of_rows(rows, TABLE, {})
        print(page.board_text(pd.concat([table, own], ignore_index=True)))
        return
    if len(table):
        page.write_pages(table)


if __name__ == "__main__":
    flags.DEFINE_enum("study", "leaderboard", plan.STUDIES, "Which rows and columns.")
    flags.DEFINE_multi_string("preset", [], "Only this row; may be repeated.")
    flags.DEFINE_multi_enum("column", [], [*plan.COLUMNS], "Only this column; may be repeated.")
    flags.DEFINE_multi_string("method", [], "A row of your own, NAME={…}, an `algorithm` block; may be repeated.")
    flags.DEFINE_multi_string(
        "loss", [], "A row of your own loss, module:function as algorithm.objective takes it; may be repeated."
    )
    flags.DEFINE_integer("workers", 1, "Processes, each with its own rows.", lower_bound=1)
    flags.DEFINE_bool("page", False, "Make no runs, only table and pages.")
    flags.DEFINE_bool("smoke", False, "Short runs in runs/leaderboard_smoke; prints their rows, and writes no page.")
    app.run(main)
