"""Lists the runs in a folder and its sub-folders: what differs between them, and how far each came.

    python -m recjax.runs FOLDER [--html FILE.html]

A row has the run's name, the settings that differ between the runs or that a resume changed, steps done and planned,
reward of the last batch, held-out accuracy of the last evaluation, hours and state. A line names each folder that looks
like a run and cannot be read.

--html writes one page that needs no network, with the table, curves, verdicts, and each run's warnings and completions.
Runs that differ only in the seed are one line of the curves, and each line is compared with the first; a verdict needs
six seeds.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags
from rich.console import Group
from rich.padding import Padding
from rich.table import Table

from recjax.analysis.runs_page import held_out_text, runs_page, steps_text
from recjax.analysis.runs_table import differing_settings, name_below, read_runs_below, settings_in_words
from recjax.errors import UserError
from recjax.runs.overview import NONE, Overview, count_words
from recjax.runs.report import number_text
from recjax.runtime.console import command, plain_console, start
from recjax.runtime.files import write_whole

FLAGS = flags.FLAGS
MOST_SETTINGS = 8  # the terminal shows no more settings of a run


@command
def main(argv: list[str]) -> None:
    """Prints the table, and writes the page."""
    if len(argv) != 2:
        raise UserError(problem="give one folder: python -m recjax.runs FOLDER")
    folder = Path(argv[1])
    runs, problems = read_runs_below(folder)
    plain_console().print(printed_table(runs, folder))
    for problem in problems:
        print(problem)
    if FLAGS.html:
        write_whole(Path(FLAGS.html), runs_page(folder, runs, problems))
        print(f"page: {FLAGS.html}")


def printed_table(runs: Sequence[Overview], folder: Path) -> Table:
    """The table for the terminal; the initial policies have a column if they differ."""
    keys = differing_settings(runs)
    title = f"{count_words(runs)} in {folder}"
    bases = [(run.base or NONE)[:8] for run in runs]
    if len(set(bases)) == 1:
        title += f", initial policy {bases[0]}"
    table = Table(title=title)
    table.add_column("run, and settings that differ", overflow="fold")
    for column in ("steps", "reward", "held-out\naccuracy", "hours"):
        table.add_column(column, justify="right")
    table.add_column("state")
    if len(set(bases)) > 1:
        table.add_column("initial\npolicy")
    for run, base in zip(runs, bases, strict=True):
        settings = settings_in_words(run, keys)
        if len(settings) > MOST_SETTINGS:
            settings[MOST_SETTINGS - 1 :] = [f"and {len(settings) - MOST_SETTINGS + 1} more"]
        cells = [
            Group(name_below(run, folder), *(Padding(setting, (0, 0, 0, 2)) for setting in settings)),
            steps_text(run),
            number_text(run.last("reward")),
            held_out_text(run),
            number_text(run.hours, 2),
            run.state,
        ]
        if len(set(bases)) > 1:
            cells.append(base)
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    flags.DEFINE_string("html", None, "Also write a page with curves, verdicts and completions to this file.")
    start(main)
