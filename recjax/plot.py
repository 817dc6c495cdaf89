"""Draws runs: accuracy, reward, KL, entropy, clipping, ratio and length, or any other metric, over optimizer steps.

    python -m recjax.plot runs/one runs/other [--output DIR]
    python -m recjax.plot experiments/claims/rates.yaml --lines rate [--only algorithm=reinforce,grpo] [--output DIR]

The source is folders of runs (one line each), a sweep file, or a Parquet table that --table wrote. In a sweep, each
value of the --lines axis is a line, with Student's 95 % interval of the mean over seeds as a band; with fewer than six
seeds, the band is their range. Each combination of the remaining axes is a panel. Figure and table also show each
line's differences from the line --against, paired by seed and all other settings.
"""

from pathlib import Path

import pandas as pd
from absl import flags
from rich.table import Table

from recjax.analysis.collect import axes_of, check_metrics, collect, read_folders, read_runs, without_other_metrics
from recjax.analysis.compare import final, held_out_metric, in_words, minus_line, paired_seeds
from recjax.analysis.statistics import MIN_SEEDS, band, estimate
from recjax.analysis.sweeps import SweepRun, read_sweep
from recjax.config.yaml_values import read_scalar
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
    """The table with the axis in each setting that is no name: "learning rate 0.0001", but "grpo"."""
    titles = {}
    for axis in axes_of(table):
        if all(map(_is_name, table[axis].unique())):
            titles[axis] = table[axis]
        else:
            titles[axis] = axis.replace("_", " ") + " " + table[axis]
    return table.assign(**titles)


def _is_name(value: str) -> bool:
    """Whether a setting says what it is without its axis; numbers, true, false and null do not."""
    return isinstance(read_scalar(value), str)


def unfinished(runs: list[SweepRun]) -> list[str]:
    """The sweep's runs that have not made all their steps, each with its number of steps."""
    names = []
    for run in runs:
        done = run.steps_done()
        last = run.config.training.steps
        if done < last:
            names.append(f"{run.name} ({done} of {last} steps)")
    return names


@command
def main(argv: list[str]) -> None:
    """Reads and draws the runs, and prints their final accuracies."""
    sources = argv[1:]
    if not sources or (len(sources) > 1 and not all(Path(source).is_dir() for source in sources)):
        raise UserError(
            problem="give folders of runs, or one sweep file or Parquet table: python -m recjax.plot SOURCE …"
        )
    are_runs = Path(sources[0]).is_dir()
    sweep = []
    if are_runs:
        table = read_folders(sources)
    elif Path(sources[0]).suffix == ".parquet":
        table = read_runs(sources[0])
    else:
        sweep = read_sweep(sources[0], FLAGS.smoke)[1]
        table = collect(sweep)
    table = chosen_runs(table, FLAGS.only)
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
    metric_columns = list(metrics)
    if drawn[difference].notna().any():
        metric_columns.insert(1, difference)
    output = Path(FLAGS.output) / "curves.png"
    names = dict(zip(table[lines], titles[lines], strict=True))
    figure = draw_curves(drawn, lines, "panel", metric_columns, band=band, names=names)
    heading = []
    if figure.get_suptitle():
        heading.append(figure.get_suptitle())
    if "seed" in table:
        heading.append(f"line: mean over runs; band: its 95 % interval, or the range of fewer than {MIN_SEEDS} runs")
    partial = unfinished(sweep)
    if partial:
        heading.append(f"{len(partial)} of {len(sweep)} runs are not finished")
    figure.suptitle("\n".join(heading), fontsize="large", parse_math=False)
    save_figure(figure, output)
    if partial:
        print(f"not finished, compared at the steps that they have: {', '.join(partial)}")

    measure = held_out_metric(table)
    finals = final(table, measure)
    title = f"{len(finals)} runs: mean of the last three evaluations"
    rows = Table(*axes, "runs", LABELS[measure].replace("\n(share)", ""), f"minus {against}, paired", title=title)
    for settings, values in finals.groupby(axes, sort=False):
        setting = dict(zip(axes, settings, strict=True))
        mean = f"{values.mean():.3f}"
        if len(values) > 1:
            mean += f" ({estimate(values.to_numpy()).spread})"
        paired = ""
        if setting[lines] != against:
            other_settings = {axis: [value] for axis, value in setting.items() if axis != lines}
            differences = paired_seeds(finals, lines, setting[lines], against, **other_settings)
            if len(differences):
                paired = in_words(differences)
        rows.add_row(*settings, str(len(values)), mean, paired)
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
