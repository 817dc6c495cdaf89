"""Prints every preset: method, coefficient on ∇log π and changes to REINFORCE; with --figure draws the coefficients.

python -m recjax.objectives [--figure] [--output figures]
"""

from pathlib import Path

from absl import flags
from rich.table import Table

from recjax.algorithms.catalog import FIELD, PAPER, changes_of
from recjax.console import command, plain_console, start
from recjax.plots.objectives import draw_coefficients
from recjax.plots.style import save_figure

FLAGS = flags.FLAGS


@command
def main(argv: list[str]) -> None:
    """Prints the table and, if requested, draws the figure."""
    if argv[1:]:
        raise ValueError(f"{argv[1]!r}: unknown argument; this command takes only --figure and --output")
    table = Table("preset", "method", "coefficient on ∇log π(y_t)", "changes in REINFORCE", title="objectives")
    for name, preset in {**PAPER, **FIELD}.items():
        paper = f"{preset.title} {preset.paper}".strip()
        table.add_row(name, paper, preset.coefficient, changes_of(preset))
    plain_console().print(table)
    if FLAGS.figure or FLAGS["output"].present:
        figure = Path(FLAGS.output) / "objectives.png"
        save_figure(draw_coefficients(), figure)
        print(f"figure: {figure}")


if __name__ == "__main__":
    flags.DEFINE_bool("figure", False, "Also draw the coefficients, as objectives.png.")
    flags.DEFINE_string("output", "figures", "Folder of objectives.png; also draws the figure.")
    start(main)
