"""Draws how right the answers were that a server gave, over time, from the store that it recorded them in.

python experiments/live/picture.py served/live.db live.png
"""

import sys

import numpy as np

from recjax.plots.style import COLORS, GREY, add_legend, finish, new_figure
from recjax.store.store import Store

BIN_SECONDS = 5.0


def main(place: str, path: str) -> None:
    """Draws the answers that have a thumb."""
    with Store(place) as store:
        records = [record for record in store.records() if record.completion.grade]
    rows = sorted(records, key=lambda record: record.time)
    seconds = np.array([(row.time - rows[0].time).total_seconds() for row in rows])
    right = np.array([row.completion.grade.accurate for row in rows])
    versions = np.array([row.completion.policy_version for row in rows])
    bins = (seconds // BIN_SECONDS).astype(int)
    known = np.unique(bins)
    means = np.array([right[bins == one].mean() for one in known])
    # Eight answers to a sum are not independent: the error is that of the groups' means.
    groups = np.array([row.group.id for row in rows])
    errors = np.array([_error(right[bins == one], groups[bins == one]) for one in known])
    middles = (known + 0.5) * BIN_SECONDS
    figure = new_figure(7, 5, "")
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    above.plot(middles, means, color=COLORS[0], label=f"mean of {BIN_SECONDS:.0f} s, ± 2 standard errors")
    above.fill_between(middles, means - 2 * errors, means + 2 * errors, color=COLORS[0], alpha=0.2, linewidth=0)
    above.set(ylabel="right answers (share)", ylim=(0, 1))
    add_legend(above, loc="lower right")
    below.plot(middles, [versions[bins == one].mean() for one in known], color=GREY)
    below.set(xlabel="seconds since the first answer", ylabel="policy version\n(optimizer steps)", ylim=(0, None))
    finish(figure).savefig(path, dpi=100)


def _error(right: np.ndarray, groups: np.ndarray) -> float:
    means = [right[groups == one].mean() for one in np.unique(groups)]
    return float(np.std(means) / np.sqrt(len(means)))


if __name__ == "__main__":
    main(*sys.argv[1:])
