"""Prints every preset: method, coefficient on ∇log π, what it changes in REINFORCE; draws the coefficients.

python -m recjax.objectives [--output figures]
"""

from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.table import Table

from recjax.algorithms.catalogue import PAPER, changes_of
from recjax.algorithms.field import FIELD
from recjax.console import command
from recjax.plots.objectives import draw_coefficients
from recjax.plots.style import save

FLAGS = flags.FLAGS


@command
def main(argv: list[str]) -> None:
    """Prints and draws."""
    if argv[1:]:
        raise ValueError(f"{argv[1]!r} is not understood; this command takes --output")
    table = Table("preset", "method", "coefficient on ∇log π(y_t)", "changes in REINFORCE", title="objectives")
    for name, preset in {**PAPER, **FIELD}.items():
        paper = f"{preset.title} {preset.paper}".strip()
        table.add_row(name, paper, preset.coefficient, changes_of(preset))
    Console().print(table)
    figure = Path(FLAGS.output) / "objectives.png"
    save(draw_coefficients(), figure)
    print(f"figure: {figure}")


if __name__ == "__main__":
    # Not at the top: flags are global, and whoever imports this module has their own.
    flags.DEFINE_string("output", "figures", "Folder of objectives.png.")
    app.run(main)
