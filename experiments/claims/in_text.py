"""Numbers in the page's text, filled in from the tables."""

import re

import pandas as pd

from recjax.analysis.compare import final

# What the text calls a mean over a run: the lowest and the highest 1 % of ratios, KL(π ‖ π₀), and so on.
IN_TEXT = {
    "lowest": "ratio/q01",
    "highest": "ratio/q99",
    "sample_size": "effective_sample_size",
    "kl": "evaluation/initial_kl",
    "clipped": "clip_fraction/all",
}


def fill_in(text: str, table: pd.DataFrame, of: str = "") -> str:
    """The text with a table's numbers instead of `{{OF WHAT ALGORITHM RATE REGIME}}`, means over seeds.

    WHAT is `accuracy`, the final one, or one of IN_TEXT, a mean over the run.

    Args:
        of: the table's name in the text; the map's numbers stand without one.
    """
    cell = ["algorithm", "rate", "regime"]
    means = table[table["step"] > 0].groupby(cell)[list(IN_TEXT.values())].mean()
    ends = final(table).groupby(cell).mean()

    def number(place: re.Match) -> str:
        what, *where = place.groups()
        if what == "accuracy":
            return f"{ends[tuple(where)]:.2f}"
        value = means.loc[tuple(where), IN_TEXT[what]]
        return f"{100 * value:.0f} %" if what == "clipped" else f"{value:.2f}"

    name = f"{of} " if of else ""
    return re.sub(rf"\{{\{{{name}(accuracy|{'|'.join(IN_TEXT)}) (\S+) (\S+) (\S+)\}}\}}", number, text)
