"""The paper's counter-example: three arms, and data from a behavior policy that prefers the second best.

    python experiments/bandit/bandit.py [--output FOLDER] [--picture PNG] [--derivation PNG] [--steps N]
        [--learning_rate 0.2] [--seeds 16]

A completion is one arm, the policy a softmax over three logits. Groups of GROUP_SIZE arms drawn from a behavior
policy go through the library's own `row_terms` and `loss`, and gradient descent follows. No loss looks at the order of
a group, so there are only 45 different groups of eight. The loss of a batch is then

    loss = Σ_g c_g · sum_g / Σ_g c_g · count_g

over those 45, with (sum_g, count_g) from `loss` and c_g how often the batch has group g:

- sampled: 16 groups are drawn each step, and c_g counts them;
- exact: c_g is the multinomial probability of g, which is the limit of infinitely many groups of eight. The groups stay
  finite: the gradient of REINFORCE is (1 − 1/8) μ (r − μ·r), as r̄ is a mean over eight.

Which negatives RED-Drop picks changes nothing here: up to K = 10, all negatives of a group that loses any are one arm.
"""

import csv
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from recjax.algorithms import losses
from recjax.algorithms.clipping import one_side_mask
from recjax.algorithms.losses import Algorithm
from recjax.algorithms.presets import build_algorithm

REWARDS = np.array([0.0, 0.8, 1.0])
GROUP_SIZE = 8
GROUPS_PER_STEP = 16
GROUPS = np.array(list(itertools.combinations_with_replacement(range(3), GROUP_SIZE)))
ARM_COUNTS = np.stack([np.sum(GROUPS == arm, axis=1) for arm in range(3)], axis=1)
LOG_ORDERINGS = np.array([math.lgamma(GROUP_SIZE + 1) - sum(math.lgamma(n + 1) for n in row) for row in ARM_COUNTS])
EXACT, SAMPLED = (tuple(f"{kind}_{x}" for x in ("p1", "p2", "p3", "reward")) for kind in ("exact", "sampled"))
POINTS = 200  # of a path that are kept for the figures, once evenly and once geometrically spaced
BLACK, GREY, LIGHT, BLUE, SKY = "#000000", "#808080", "#B8B8B8", "#0072B2", "#56B4E9"
ORANGE, RED, GREEN, PINK = "#E69F00", "#D55E00", "#009E73", "#CC79A7"  # told apart by color-blind readers


class Behavior(NamedTuple):
    """Who draws the arms: the initial policy, for ever or until it is refreshed."""

    label: str
    initial: tuple[float, float, float]
    refresh: int | None  # every so many steps, the behavior policy becomes the policy; None: never
    color: str


class Method(NamedTuple):
    """A preset with its changes, and its line in the figures."""

    label: str
    preset: str
    overrides: Mapping[str, Mapping[str, float]]
    color: str
    line: str = "-"
    width: float = 1.7
    rate: float = 1.0  # times the learning rate


BEHAVIORS = (
    Behavior("fixed: the paper's (0.3, 0.6, 0.1)", (0.3, 0.6, 0.1), None, BLUE),
    Behavior("fixed: uniform", (1 / 3, 1 / 3, 1 / 3), None, SKY),
    Behavior("fixed: near-optimal (0.1, 0.2, 0.7)", (0.1, 0.2, 0.7), None, GREEN),
    Behavior("refreshed every 500 steps: from (0.3, 0.6, 0.1)", (0.3, 0.6, 0.1), 500, ORANGE),
    Behavior("on-policy: from (0.3, 0.6, 0.1)", (0.3, 0.6, 0.1), 1, BLACK),
)
NARROW = {"clip": {"epsilon_low": 0.2, "epsilon_high": 0.2}}
WIDE = {"clip": {"epsilon_low": 0.6, "epsilon_high": 2.0}}
RING = {"clip": {"epsilon_low": 0.2, "epsilon_high": 0.2, "outer_low": 0.6, "outer_high": 2.0}}
# The pairwise loss has 2τ times the gradient of REINFORCE at its anchor; the rates take that out.
METHODS = (
    Method("REINFORCE", "reinforce", {}, LIGHT, width=5),  # others run on top of it
    Method("REC-OneSide-NoIS (0.2, 0.2)", "rec_one_side_nois", NARROW, BLUE),
    Method("REC-OneSide-NoIS (0.6, 2.0)", "rec_one_side_nois", WIDE, SKY),
    Method("REC-OneSide-IS (0.2, 0.2)", "rec_one_side_is", NARROW, BLUE, "--"),
    Method("REC-TwoSide-NoIS (0.2, 0.2)", "rec_two_side_nois", NARROW, BLUE, "-."),
    Method("REC-Ring-NoIS (0.2, 0.2; 0.6, 2.0)", "rec_ring_nois", RING, BLUE, ":"),
    Method("AsymRE, β = 0.1", "asymre", {"regularizer": {"beta": 0.1}}, ORANGE),
    Method("OPMD, τ = 0.1", "opmd", {"regularizer": {"tau": 0.1}}, RED),
    Method("RED-Drop", "red_drop", {}, GREEN, "--"),
    Method("RED-Weight, τ = 1", "red_weight", {"weight": {"temperature": 1.0}}, PINK),
    Method("RED-Weight, τ = 0.1", "red_weight", {"weight": {"temperature": 0.1}}, PINK, "--"),
    Method("Consistency, τ = 1", "pairwise_consistency", {"objective": {"tau": 1.0}}, GREY, rate=0.5),
    Method("Consistency, τ = 0.1", "pairwise_consistency", {"objective": {"tau": 0.1}}, GREY, "--", rate=5.0),
)
Points = Int[np.ndarray, " points"]  # steps
Paths = Float[np.ndarray, "behaviors runs points 3"]  # run 0 is exact
Results = Mapping[str, Paths]  # by the methods' labels


def group_probabilities(behavior_logprobs: Float[Array, "3"]) -> Float[Array, " groups"]:
    """The multinomial probability of each of GROUPS."""
    return jnp.exp(ARM_COUNTS @ behavior_logprobs + LOG_ORDERINGS)


def group_losses(algorithm: Algorithm) -> Callable[..., tuple[Float[Array, " groups"], Float[Array, " groups"]]]:
    """The sum and count of the loss of each of GROUPS, as a function of logits and behavior log-probabilities."""
    group_ids, mask = jnp.repeat(jnp.arange(len(GROUPS)), GROUP_SIZE), jnp.ones((GROUP_SIZE, 1), bool)
    rewards = jnp.asarray(REWARDS[GROUPS.ravel()], jnp.float32)
    terms = losses.row_terms(
        algorithm, losses.BatchValues(rewards, group_ids, jnp.ones(GROUPS.size, bool), jax.random.key(0))
    )
    terms = jax.tree.map(lambda x: x.reshape(GROUPS.shape), terms)

    def of(logits, behavior_logprobs):
        logprobs = jax.nn.log_softmax(logits)
        # All arms are recorded, so that score centering leaves nothing.
        top = (jnp.broadcast_to(x, (GROUP_SIZE, 1, len(REWARDS))) for x in (logprobs, behavior_logprobs))
        scores = losses.NO_SCORES
        if algorithm.score_centering is not None:
            scores = losses.TermScores(top_logprobs=next(top), behavior_top_logprobs=next(top))

        def sum_and_count(arms, group_terms):
            arms = arms[:, None]
            if algorithm.needs_proximal:  # one update a batch: π before it is π
                group_terms = group_terms._replace(proximal_logprobs=jax.lax.stop_gradient(logprobs[arms]))
            return losses.loss(algorithm, logprobs[arms], behavior_logprobs[arms], group_terms, mask, scores)

        return jax.vmap(sum_and_count)(jnp.asarray(GROUPS), terms)

    return of


def batch_loss(algorithm: Algorithm) -> Callable[..., Float[Array, ""]]:
    """The loss as a function of logits, behavior log-probabilities and how often the batch has each of GROUPS."""
    by_group = group_losses(algorithm)

    def of(logits, behavior_logprobs, group_weights):
        sums, counts = by_group(logits, behavior_logprobs)
        return group_weights @ sums / (group_weights @ counts)

    return of


def paths(method: Method, learning_rate: float, steps: int, seeds: int) -> tuple[Points, Paths]:
    """Gradient descent under every behavior policy: the steps that are kept, and the arms' probabilities then."""
    gradient = jax.grad(batch_loss(build_algorithm(method.preset, method.overrides)))

    def path(start, refresh, run):
        def step(state, number):
            logits, behavior = state
            behavior = jnp.where(number % refresh == 0, jax.nn.log_softmax(logits), behavior)
            probabilities = group_probabilities(behavior)
            weights = probabilities
            if seeds:
                key = jax.random.fold_in(jax.random.key(run), number)
                sampled = jax.random.choice(key, len(GROUPS), (GROUPS_PER_STEP,), p=probabilities)
                weights = jnp.where(run == 0, probabilities, jnp.bincount(sampled, length=len(GROUPS)))
            after = logits - learning_rate * method.rate * gradient(logits, behavior, weights)
            return (after, behavior), after

        return jnp.vstack([start, jax.lax.scan(step, (start, start), jnp.arange(steps))[1]])

    kept = np.unique(np.round([np.linspace(0, steps, POINTS), np.geomspace(1, steps, POINTS)]).astype(int))
    every = jax.vmap(jax.vmap(path, (None, None, 0)), (0, 0, None))
    starts = jnp.log(jnp.array([behavior.initial for behavior in BEHAVIORS]))
    refreshes = jnp.array([behavior.refresh or steps for behavior in BEHAVIORS])
    logits = jax.jit(lambda *x: every(*x)[:, :, kept])(starts, refreshes, jnp.arange(seeds + 1))
    return kept, np.asarray(jax.nn.softmax(logits))


def table_rows(results: Results) -> Iterator[dict[str, str]]:
    """Where each method ends under each behavior policy; rewards are expected under the last policy."""
    for number, behavior in enumerate(BEHAVIORS):
        for label, probabilities in results.items():
            exact, sampled = probabilities[number, 0, -1], probabilities[number, 1:, -1]
            numbers = [*exact, exact @ REWARDS, *sampled.mean(0), sampled.mean(0) @ REWARDS, (sampled @ REWARDS).std()]
            columns = zip([*EXACT, *SAMPLED, "sampled_reward_std"], numbers, strict=True)
            yield {"behavior": behavior.label, "method": label, **{name: f"{x:.3f}" for name, x in columns}}


def write_tables(rows: list[dict[str, str]], output: Path, caption: str) -> None:
    """The rows as table.csv, and as table.md with a section for each behavior policy."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    lines = [caption]
    header = ["method", "exact p₁, p₂, p₃", "exact reward", "sampled p₁, p₂, p₃", "sampled reward"]
    for label, section in itertools.groupby(rows, lambda row: row["behavior"]):
        lines += ["", f"**Behavior policy {label}**", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        for row in section:
            exact, sampled = (f"{', '.join(row[x] for x in kind[:3])} | {row[kind[3]]}" for kind in (EXACT, SAMPLED))
            lines.append(f"| {row['method']} | {exact} | {sampled} ± {row['sampled_reward_std']} |")
    (output / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw_simplex(results: Results, path: Path, behaviors: Sequence[int], places: str, size: tuple) -> None:
    """Each method's path through the probability simplex, a panel for each behavior policy, and a legend.

    Args:
        behaviors: indices into BEHAVIORS.
        places: mosaic of the panels.
        size: width and height in inches.
    """
    corners = np.array([[0, 0], [1, 0], [0.5, math.sqrt(3) / 2]])
    names = [(-0.03, "right", "top"), (-0.03, "left", "top"), (0.03, "center", "bottom")]
    end = {"ls": "", "marker": "o", "ms": 7, "mec": "white", "mew": 0.7, "zorder": 3}
    draw = {"ls": "", "marker": "o", "ms": 4, "mew": 0, "alpha": 0.4}
    begin = {"ls": "", "marker": "*", "ms": 15, "mfc": "white", "mec": "black", "zorder": 4}
    figure = Figure(figsize=size, layout="constrained")
    for number, axes in zip(behaviors, figure.subplot_mosaic(places).values(), strict=True):
        behavior = BEHAVIORS[number]
        if len(behaviors) > 1:
            axes.set_title(behavior.label.replace(": ", ":\n"), fontsize=11, pad=22)
        axes.set(aspect="equal", xlim=(-0.1, 1.1), ylim=(-0.16, 1.04))
        axes.axis("off")
        axes.fill(*corners.T, facecolor="none", edgecolor="0.6", lw=1)
        for arm, (up, horizontal, vertical) in enumerate(names):
            text = f"arm {arm + 1}\nr = {REWARDS[arm]:g}"
            axes.text(corners[arm, 0], corners[arm, 1] + up, text, ha=horizontal, va=vertical)
        for method in METHODS:
            exact, ends = results[method.label][number, 0] @ corners, results[method.label][number, 1:, -1] @ corners
            axes.plot(*exact.T, method.line, color=method.color, lw=method.width)
            axes.plot(*ends.T, color=method.color, **draw)
            axes.plot(*exact[-1], color=method.color, **end)
        axes.plot(*(np.array(behavior.initial) @ corners), **begin)
    handles = [Line2D([], [], color=x.color, ls=x.line, lw=x.width, label=x.label) for x in METHODS]
    handles += [Line2D([], [], color="0.3", label="end, exact", **end), Line2D([], [], label="start", **begin)]
    handles += [Line2D([], [], color="0.3", label="ends, sampled", **draw)]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=11)
    figure.savefig(path, dpi=100, bbox_inches="tight")


def draw_best_arm(kept: Points, results: Results, path: Path) -> None:
    """Probability of the best arm over steps, one panel a method."""
    figure = Figure(figsize=(8, 11), layout="constrained")
    panels = figure.subplots(5, 3, sharex=True, sharey=True).flat
    for axes, (label, probabilities) in zip(panels, results.items(), strict=False):
        axes.set_title(label.replace(" (", "\n("), fontsize=11)
        for (name, _, refresh, color), runs in zip(BEHAVIORS, probabilities[..., 2], strict=True):
            line = {"lw": 1.8, "ls": "-" if refresh is None else "--", "label": name.replace(": ", ":\n")}
            axes.plot(kept, runs[0], color=color, **line)
            axes.fill_between(kept, *np.quantile(runs[1:], (0.1, 0.9), axis=0), color=color, alpha=0.25, lw=0)
        axes.set(xscale="log", xlim=(1, kept[-1]), ylim=(-0.02, 1.02))
        axes.grid(alpha=0.3)
    for axes in figure.axes[len(results) :]:
        axes.axis("off")
    handles = figure.axes[0].get_legend_handles_labels()[0]
    handles += [Line2D([], [], color="0.5", alpha=0.4, lw=8, label="sampled, 10th to\n90th percentile of seeds")]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False, fontsize=11)
    figure.supxlabel("gradient step")
    figure.supylabel("probability of arm 3, the best")
    figure.savefig(path, dpi=100)


# Lines of docs/derivation.md's picture: label in METHODS, and label there.
SHOWN = {
    "REINFORCE": "REINFORCE",
    "REC-OneSide-NoIS (0.2, 0.2)": "clip, range 0.2",
    "OPMD, τ = 0.1": "OPMD, τ = 0.1",
}


def draw_derivation(kept: Points, results: Results, path: Path) -> None:
    """The clip's coefficient over the ratio, and the probability of arm 3 with old and with refreshed data."""
    colors = {method.label: method.color for method in METHODS}
    colors["REINFORCE"] = BLACK
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    clip, *panels = figure.subplots(1, 3)
    ratios = np.linspace(0, 2, 401)
    for advantage, color, text, place in (
        (1.0, GREEN, "advantage above 0", 0.1),
        (-1.0, RED, "advantage below 0", 0.95),
    ):
        signs = jnp.full(len(ratios), advantage)
        is_kept = np.asarray(one_side_mask(jnp.asarray(ratios, jnp.float32)[:, None], signs))[:, 0]
        clip.plot(ratios, advantage * is_kept, color=color, lw=2)
        clip.text(place, 0.86 * advantage, text, color=color, fontsize=9, va="center")
    clip.axvline(1, color="0.6", lw=0.8)
    clip.set_xlabel("ratio π/μ of a token")
    clip.set_title("factor on ∇log π, with a clip", fontsize=10)
    for axes, number, title in zip(panels, (0, 3), ("old data", "data refreshed every 500 steps"), strict=True):
        for label, text in SHOWN.items():
            axes.plot(kept, results[label][number, 0, :, 2], color=colors[label], lw=2, label=text)
        axes.set(xlim=(0, kept[-1]), ylim=(-0.02, 1.02), xlabel="gradient step")
        axes.set_title(f"probability of the best answer,\n{title}", fontsize=10)
    panels[0].legend(fontsize=8, frameon=False, loc="upper left")
    for axes in (clip, *panels):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def main(_: list[str]) -> None:
    """Runs every method, writes tables and figures."""
    options, results = flags.FLAGS, {}
    for method in METHODS:
        kept, results[method.label] = paths(method, options.learning_rate, options.steps, options.seeds)
    caption = f"Policy after {options.steps} steps at learning rate {options.learning_rate:g}, and its expected reward."
    caption += f" Sampled: {GROUPS_PER_STEP} groups of {GROUP_SIZE} a step, mean (± std) of {options.seeds} seeds."
    write_tables(list(table_rows(results)), Path(options.output), caption)
    draw_simplex(results, Path(options.output, "simplex.png"), range(len(BEHAVIORS)), "AB;CD;EE", (8, 12))
    draw_simplex(results, Path(options.picture), [0], "A", (7, 6.6))
    draw_best_arm(kept, results, Path(options.output, "best_arm.png"))
    draw_derivation(kept, results, Path(options.derivation))


if __name__ == "__main__":
    flags.DEFINE_string("output", "experiments/bandit", "Folder to write tables and figures to.")
    flags.DEFINE_string("picture", "docs/bandit.png", "Picture of docs/concepts.md to write.")
    flags.DEFINE_string("derivation", "docs/derivation.png", "Picture of docs/derivation.md to write.")
    flags.DEFINE_integer("steps", 5000, "Gradient steps.", lower_bound=1)
    flags.DEFINE_float("learning_rate", 0.2, "Of gradient descent on the logits.", lower_bound=0.0)
    flags.DEFINE_integer("seeds", 16, "Sampled runs of each method under each behavior policy.", lower_bound=1)
    app.run(main)
