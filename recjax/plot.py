"""Draws runs: accuracy, reward, KL, entropy, clipping, ratio and length, or any other metric, over optimizer steps.

    python -m recjax.plot runs/one runs/other [--output DIR]
    python -m recjax.plot experiments/claims/rates.yaml --lines rate [--only algorithm=reinforce,grpo] [--output DIR]

The source is folders of runs (one line each), a sweep file, or a Parquet table that --table wrote. In a sweep, each
value of the --lines axis is a line, with Student's 95 % interval of the mean over seeds as a band; with fewer than six
seeds, the band is their range. Each combination of the remaining axes is a panel. Figure and table also show each
line's differences from the line --against, paired by seed and all other settings.
"""

from pathlib import Path
from typing import Any

import pandas as pd
from absl import flags
from rich.table import Table

from recjax.analysis.collect import axes_of, check_metrics, collect, read_folders, read_runs, without_other_metrics
from recjax.analysis.compare import final, held_out_metric, in_words, minus_line, paired_seeds
from recjax.analysis.statistics import MIN_SEEDS, band, estimate
from recjax.analysis.sweeps import SweepRun, read_sweep
from recjax.errors import UserError
from recjax.plots.curves import draw_curves
from recjax.plots.style import LABELS, save_figure
from recjax.runtime.console import command, plain_console, start
from recjax.runtime.files import writing

FLAGS = flags.FLAGS


def chosen_runs(table: pd.DataFrame, only: list[str]) -> pd.DataFrame:
    """Selects the rows that satisfy every "axis=value,value" in `only`.

    Raises:
        UserError: the table lacks an axis or value.
    """
    for text in only:
        axis, _, values = text.partition("=")
        if axis not in axes_of(table):
            raise UserError(f"--only {text!r}", "unknown axis", f"name one of {', '.join(axes_of(table))}")
        if set(values.split(",")) - set(table[axis]):
            raise UserError(
                f"--only {text!r}", "unknown value", f"the values of {axis} are {', '.join(dict.fromkeys(table[axis]))}"
            )
        table = table[table[axis].isin(values.split(","))]
    return table


def titled(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the axis in each setting: "learning rate 0.0001" instead of "0.0001"."""
    return table.assign(**{axis: axis.replace("_", " ") + " " + table[axis] for axis in axes_of(table)})


def unfinished(runs: list[SweepRun]) -> list[str]:
    """The runs of a sweep that have not made all their steps, each with its number of steps."""
    steps = [(run.name, run.steps_done(), run.config.training.steps) for run in runs]
    return [f"{name} ({done} of {last} steps)" for name, done, last in steps if done < last]


@command
def main(argv: list[str]) -> None:
    """Reads and draws the runs, and prints their final accuracies."""
    sources = argv[1:]
    if not sources or (len(sources) > 1 and not all(Path(source).is_dir() for source in sources)):
        raise UserError(
            problem="give folders of runs, or one sweep file or Parquet table: python -m recjax.plot SOURCE …"
        )
    are_runs = Path(sources[0]).is_dir()
    is_sweep = not are_runs and Path(sources[0]).suffix != ".parquet"
    sweep = read_sweep(sources[0], FLAGS.smoke)[1] if is_sweep else []
    everything = collect(sweep) if is_sweep else read_folders(sources) if are_runs else read_runs(sources[0])
    table = chosen_runs(everything, FLAGS.only)
    axes = [axis for axis in axes_of(table) if axis != "seed"]
    lines = FLAGS.lines or axes[0]
    if lines not in axes:
        raise UserError(f"--lines {lines!r}", "unknown axis", f"name one of {', '.join(axes)}")
    check_metrics(table, FLAGS.metrics, "--metrics")
    metrics = [metric for metric in FLAGS.metrics if metric in table and table[metric].notna().any()]
    if not metrics:
        raise UserError(f"--metrics {','.join(FLAGS.metrics)}", "the runs have no values of these metrics yet")
    if FLAGS.table:
        with writing(FLAGS.table):
            without_other_metrics(table, FLAGS.metrics).to_parquet(FLAGS.table, index=False, compression="zstd")
    other_axes = [axis for axis in axes if axis != lines]
    compared = list(dict.fromkeys(table[lines]))
    against = FLAGS.against or compared[0]
    if against not in compared:
        raise UserError(f"--against {against!r}", f"no such value of {lines}", f"name one of {', '.join(compared)}")
    titles = table if are_runs else titled(table)
    panels = titles[other_axes].agg(", ".join, axis=1) if other_axes else ""
    difference = f"{metrics[0]} − {against}"
    drawn = table.assign(panel=panels)
    drawn[difference] = minus_line(table, lines, against, metrics[0])
    metric_columns = [metrics[0], *([difference] if drawn[difference].notna().any() else []), *metrics[1:]]
    output = Path(FLAGS.output) / "curves.png"
    names = dict(zip(table[lines], titles[lines], strict=True))
    figure = draw_curves(drawn, lines, "panel", metric_columns, band=band, names=names)
    partial = unfinished(sweep)
    heading = [figure.get_suptitle()]
    heading += [f"line: mean over runs; band: its 95 % interval, or the range of fewer than {MIN_SEEDS} runs"] * (
        "seed" in table
    )
    heading += [f"{len(partial)} of {len(sweep)} runs are not finished"] * bool(partial)
    figure.suptitle("\n".join(filter(None, heading)), fontsize="large", parse_math=False)
    save_figure(figure, output)
    if partial:
        print(f"not finished, compared at the steps that they have: {', '.join(partial)}")

    measure = held_out_metric(table)
    finals = final(table, measure)
    title = f"{len(finals)} runs: mean of the last three evaluations"
    rows = Table(*axes, "runs", LABELS[measure].replace("\n(share)", ""), f"minus {against}, paired", title=title)
    for settings, values in finals.groupby(axes, sort=False):
        chosen = dict(zip(axes, settings, strict=True))
        where = {axis: [value] for axis, value in chosen.items() if axis != lines}
        pairs: Any = paired_seeds(finals, lines, chosen[lines], against, **where) if chosen[lines] != against else ()
        spread = f" ({estimate(values.to_numpy()).spread})" if len(values) > 1 else ""
        cells = f"{values.mean():.3f}{spread}", in_words(pairs) if len(pairs) else ""
        rows.add_row(*settings, str(len(values)), *cells)
    plain_console().print(rows)
    print(f"figure: {output}")


if __name__ == "__main__":
    flags.DEFINE_string("lines", None, "Axis whose values are lines; default: the first axis of the sweep file.")
    flags.DEFINE_multi_string("only", [], "Keep only the runs with these values, as axis=value,value.")
    flags.DEFINE_list(
        "metrics",
        "evaluation/accuracy,reward,evaluation/initial_kl,entropy,clip_fraction/all,ratio/q01,ratio/q99,completion_length",
        "Numeric metrics of metrics.jsonl to draw, a panel each; recjax skips metrics without values.",
    )
    flags.DEFINE_string("against", None, "Line that the differences are from; default: the first.")
    flags.DEFINE_string("output", "figures", "Folder of curves.png.")
    flags.DEFINE_string("table", None, "Also write the collected table to this Parquet file.")
    flags.DEFINE_bool("smoke", False, "Draw the runs of the sweep file's smoke block.")
    start(main)
