"""Compares two runs, or two sets of runs, in one metric: a sentence with an interval and a test, and a figure.

    python -m recjax.compare A B [--metric evaluation/accuracy] [--output figures/compare.png]
    python -m recjax.compare A B --plan 0.05      # how many seeds would show a difference of 0.05

A and B are folders of a run, of several runs (a sweep's output), or of an evaluation by recjax.evaluate; or quoted
patterns, such as 'runs/clipping/reinforce__*'. Runs are paired by seed. If a side has several runs with one seed, they
are also paired by the settings that vary on both sides, and a seed counts once, with the mean of its pairs. A verdict
needs six seeds. One pair of runs alone is compared by its held-out problems, paired by question and answer, at the
latest evaluation of each run; a line says if the evaluations' steps differ.
"""

from pathlib import Path

from absl import flags

from recjax.analysis.compare import compare_runs
from recjax.errors import UserError
from recjax.plots.style import save_figure
from recjax.runtime.console import command, start

FLAGS = flags.FLAGS


@command
def main(argv: list[str]) -> None:
    """Compares, prints the sentences and the settings that differ, and draws the figure."""
    if len(argv) != 3 or argv[1] == argv[2]:
        raise UserError(problem="give two runs, sweeps or evaluations: python -m recjax.compare A B")
    comparison = compare_runs(argv[1], argv[2], metric=FLAGS.metric)
    for line in comparison.skipped:
        print(line)
    for sentence in comparison.sentences:
        print(sentence)
    if FLAGS.plan is not None:
        print(comparison.plan(FLAGS.plan))
    for setting in comparison.differs:
        print(f"differs: {setting}")
    output = Path(FLAGS.output)
    save_figure(comparison.figure(), output)
    print(f"figure: {output}")


if __name__ == "__main__":
    flags.DEFINE_string(
        "metric",
        None,
        "Numeric metric of metrics.jsonl to compare; default: evaluation/accuracy, or evaluation/reward without any.",
    )
    flags.DEFINE_string("output", "figures/compare.png", "File of the figure.")
    flags.DEFINE_float("plan", None, "Difference to plan for: prints how many seeds show it, by these runs' spread.")
    start(main)
