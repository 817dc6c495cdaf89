"""Prints every preset: method, coefficient on ∇log π and changes to REINFORCE.

python -m recjax.objectives
"""

from rich.table import Table

from recjax.algorithms.catalog import FIELD, PAPER, changes_of
from recjax.errors import UserError
from recjax.runtime.console import command, plain_console, start


@command
def main(argv: list[str]) -> None:
    """Prints the table."""
    if argv[1:]:
        raise UserError(f"{argv[1]!r}", "unknown argument", "this command takes none")
    table = Table("preset", "method", "coefficient on ∇log π(y_t)", "changes in REINFORCE", title="objectives")
    for name, preset in {**PAPER, **FIELD}.items():
        paper = f"{preset.title} {preset.paper}".strip()
        table.add_row(name, paper, preset.coefficient, changes_of(preset))
    plain_console().print(table)


if __name__ == "__main__":
    start(main)
