"""Draws the diagrams of docs/serving.md, docs/agents.md and docs/architecture.md.

python -m experiments.diagrams [FOLDER]
"""

import ast
import collections
import sys
import tomllib
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recjax.plots.style import COLORS, GREY, new_figure

BLUE, ORANGE, GREEN = COLORS[:3]
ROWS = {  # each turn of the trajectory: its tokens, and who wrote them
    "row 1": (("prompt: 12 guesses …", GREY), ("16 <end>", BLUE), ("higher", ORANGE), ("24 <end>", BLUE)),
    "row 2": (("prompt: a shorter context …", GREY), ("22 <end>", BLUE)),
}
WIDTHS = {GREY: 2.6, BLUE: 1.25, ORANGE: 1.1}


def box(axes: Axes, x: float, y: float, width: float, text: str, color: str, height: float = 0.8) -> None:
    """A filled box with white text; x and y are its lower left corner."""
    axes.bar(x, height, width, bottom=y, align="edge", color=color, edgecolor="white", linewidth=2)
    axes.text(x + width / 2, y + height / 2, text, color="white", ha="center", va="center", fontsize=11)


def arrow(axes: Axes, start: tuple, end: tuple, text: str, place: tuple, align: str = "center") -> None:
    """An arrow with its label."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "black", "lw": 1.5})
    axes.text(*place, text, ha=align, va="center", fontsize=11)


def canvas(width: float, height: float, right: float, top: float) -> tuple[Figure, Axes]:
    """A figure without axes, whose drawing is `right` wide and `top` high."""
    figure = new_figure(width, height, "")
    axes = figure.subplots()
    axes.set(xlim=(0, right), ylim=(0, top))
    axes.axis("off")
    return figure, axes


def server() -> Figure:
    """Clients, server, store and trainer, and what each sends to the next."""
    figure, axes = canvas(6.8, 3.3, 10, 5)
    for x, y, text, color in (
        (0.1, 3.6, "clients,\nagents", GREY),
        (6.9, 3.6, "recjax.serve", BLUE),
        (6.9, 0.3, "store", GREEN),
        (0.1, 0.3, "recjax.train", ORANGE),
    ):
        box(axes, x, y, 3, text, color, 1.1)
    arrow(axes, (3.1, 4.4), (6.9, 4.4), "requests, rewards", (5, 4.7))
    arrow(axes, (6.9, 3.9), (3.1, 3.9), "completions", (5, 3.62))
    arrow(axes, (8.4, 3.6), (8.4, 1.4), "tokens, log-probs,\nversions, rewards", (8.25, 2.5), "right")
    arrow(axes, (6.9, 0.85), (3.1, 0.85), "rewarded groups", (5, 0.55))
    arrow(axes, (2.2, 1.4), (6.95, 3.6), "checkpoints", (3.3, 2.65))
    return figure


def trajectory() -> Figure:
    """A trajectory of three turns in two rows: the tokens of each row, and the mask below them."""
    figure, axes = canvas(6.8, 3.1, 7.6, 5.2)
    for y, (name, parts) in zip((3.5, 1.4), ROWS.items(), strict=True):
        x = 0.9
        axes.text(0, y + 0.4, name, va="center", fontsize=11)
        axes.text(0, y - 0.35, "mask", va="center", fontsize=11)
        for text, color in parts:
            box(axes, x, y, WIDTHS[color], text, color)
            mask = "prompt, not in the loss" if color == GREY else "1  1" if color == BLUE else "0"
            axes.text(x + WIDTHS[color] / 2, y - 0.35, mask, ha="center", va="center", fontsize=11)
            x += WIDTHS[color]
    notes = ("sampled by the policy", BLUE), ("written by the environment", ORANGE)
    for x, (text, color) in zip((0.9, 3.9), notes, strict=True):
        axes.text(x, 4.85, f"■ {text}", color=color, va="center", fontsize=11)
    axes.text(0.9, 0.3, "The rows of a trajectory are one completion with one reward.", va="center", fontsize=11)
    return figure


def room_imports(package: Path) -> collections.Counter:
    """Numbers of imports from one room of the package to another; imports for type checkers alone do not count.

    The files of the top level and each `__main__` of a room are the room "commands".
    """
    counts = collections.Counter()
    for path in package.rglob("*.py"):
        room, *rest = path.relative_to(package).parts
        if not rest or path.name == "__main__.py":
            room = "commands"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_types = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                for_types.update(inner for statement in node.body for inner in ast.walk(statement))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node not in for_types and node.module.startswith("recjax"):
                names = (
                    [f"{node.module}.{alias.name}" for alias in node.names]
                    if node.module == "recjax"
                    else [node.module]
                )
                for name in names:
                    counts[room, name.split(".")[1]] += 1
    return counts


def rooms() -> Figure:
    """Which room imports which: rows import, columns are imported. A room imports only rooms below it."""
    root = Path(__file__).parents[1]
    contracts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    lines = [line.split(" | ") for line in contracts[0]["layers"]]
    names = [name for line in lines for name in line if (root / "recjax" / name / "__init__.py").exists()]
    counts = room_imports(root / "recjax")
    rows = ["commands", *names]
    figure = new_figure(7.2, 6.6, "")
    axes = figure.subplots()
    for y, importing in enumerate(rows):
        for x, imported in enumerate(names):
            if importing != imported and counts[importing, imported]:
                axes.text(x, y, counts[importing, imported], ha="center", va="center", fontsize=8)
                axes.bar(x, 0.9, 0.9, bottom=y - 0.45, color=BLUE, alpha=0.35)
        if y:
            axes.bar(y - 1, 0.9, 0.9, bottom=y - 0.45, color=GREY)
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(len(rows) - 0.4, -0.6))
    axes.set_xticks(range(len(names)), names, rotation=60, ha="left", fontsize=9)
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def main(folder: Path) -> None:
    """Writes the diagrams into the folder."""
    server().savefig(folder / "serving.png", dpi=130)
    trajectory().savefig(folder / "trajectory.png", dpi=130)
    rooms().savefig(folder / "rooms.png", dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parents[1] / "docs")
