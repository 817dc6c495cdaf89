"""One style for every figure: colors, names of metrics, sizes, ticks, and how a figure is saved."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

# Okabe and Ito's palette, which color-blind readers can distinguish.
COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"
GREY = "#777777"
NOTHING = 1e-6  # Smaller differences of shares, ages and nats are rounding errors.
NEAR_1 = 1e-3  # A ratio or sample size nearer to 1 looks like 1.
LABELS = {
    "reward": "reward of\nthe train batch",
    "accuracy": "accuracy of\nthe train batch (share)",
    "completion_length": "completion length\n(tokens)",
    "staleness": "staleness\n(optimizer steps)",
    "entropy": "entropy of π\n(nats per token)",
    "gradient_norm": "gradient norm",
    "clip_fraction/all": "clipped tokens\n(share)",
    "ratio/q01": "ratio π/μ,\n1st percentile",
    "ratio/q99": "ratio π/μ,\n99th percentile",
    "behavior_kl/k3": "KL(μ ‖ π)\n(nats per token)",
    "effective_sample_size": "effective sample size\n(share)",
    "evaluation/accuracy": "held-out accuracy\n(share)",
    "evaluation/reward": "held-out reward",
    "evaluation/initial_kl": "KL(π ‖ π₀)\n(nats per token)",
}


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure; width and height in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize="large", parse_math=False)  # A dollar sign would start mathematics.
    return figure


def add_legend(owner: Axes | Figure, *entries: list, **options) -> Legend:
    """Adds a legend, readable on top of curves, to a panel or a figure; it takes matplotlib's arguments."""
    size = "small" if isinstance(owner, Axes) else "medium"
    legend = owner.legend(*entries, fontsize=size, edgecolor="none", framealpha=0.8, **options)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return legend


def few_ticks(axis: Axis, most: int = 8, whole: bool = True) -> None:
    """Sets ticks at round numbers with at most `most` intervals; with `whole`, only at whole numbers."""
    steps = None if whole else [1, 2, 2.5, 5, 10]
    axis.set_major_locator(MaxNLocator(most, integer=whole, steps=steps))


def plain_ticks(axis: Axis) -> None:
    """Sets few ticks, as plain decimals, for a logarithmic axis of any span."""
    low, high = axis.get_view_interval()
    if high < 5 * low:
        locator = MaxNLocator(4)
    elif high < 100 * low:
        locator = LogLocator(subs=(1, 2, 5), numticks=6)
    else:
        locator = LogLocator(subs=(1,), numticks=6)
    axis.set_major_locator(locator)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def with_headroom(high: float) -> float | None:
    """The upper end of an axis from 0 on, so that a nearly constant curve at `high` is below the frame; None for 0.

    The default margin is a share of the values' range, which is small then.
    """
    if high <= 0:
        return None
    return 1.05 * high


def words_near_1(axes: Axes, low: float, high: float, name: str) -> bool:
    """Writes the range of a ratio into its panel if all of it is near 1, where curves would show rounding errors.

    Returns:
        False if the range needs curves; the panel is unchanged then.
    """
    is_near = 1 - NEAR_1 < low and high < 1 + NEAR_1
    if is_near:
        words = f"{name}{low:.6f} to {high:.6f}"
        axes.text(0.5, 0.75, words, ha="center", va="center", transform=axes.transAxes)
        axes.set_ylim(0.9, 1.1)
    return is_near


def finish(figure: Figure) -> Figure:
    """Adds the package's grid and frame to every panel."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a finished figure as a PNG, and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    finish(figure).savefig(path, dpi=110)
