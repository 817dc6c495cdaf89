"""Draws the coefficient on ∇log π of every preset over the ratio, for docs/objectives.md."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from recjax.algorithms import losses
from recjax.algorithms.algorithm import Algorithm
from recjax.algorithms.presets import PRESETS, build_algorithm
from recjax.plots.style import COLORS, GREY, add_legend, new_figure

BEHAVIOR = 0.15  # the token's probability under μ, so that the ratio goes beyond every cap but DPPO's
RATIOS = np.linspace(0.02, 5.98, 299)
COLUMNS = 4


def coefficients(algorithm: Algorithm, advantage: float) -> Float[np.ndarray, " points"] | None:
    """The factor on ∇log π of a completion's only token, at each of RATIOS.

    Returns:
        None if the factor depends on more than the token: on a teacher, on pairs of completions, on the whole batch, or
            on other tokens.
    """
    if algorithm.compares_completions or algorithm.needs_teacher or algorithm.needs_rescoring:
        return None
    if algorithm.score_centering is not None:
        return None
    behavior = jnp.full((len(RATIOS), 1), np.log(BEHAVIOR))
    logprobs = behavior + jnp.log(jnp.asarray(RATIOS))[:, None]
    mask = jnp.ones(behavior.shape, bool)
    advantages = jnp.full(len(RATIOS), advantage)
    kept = mask[:, 0]
    weights = kept.astype(float)
    if algorithm.row_weight is not None:
        weights = algorithm.row_weight.bound()(advantages, kept)
    ids = jnp.arange(len(RATIOS))
    rows = losses.RowTerms(advantages, weights, kept, advantages, ids, ~kept, proximal_logprobs=logprobs)
    gradient = jax.grad(lambda x: losses.token_loss(algorithm, x, behavior, rows, mask).sum())(logprobs)
    return -np.asarray(gradient)[:, 0]


def draw_coefficients() -> Figure:
    """One panel for all presets of the same curve: A = 1 and A = −1 over the ratio, in units of |A|."""
    panels: dict[bytes, tuple[list[str], np.ndarray, np.ndarray]] = {}
    for name in PRESETS:
        curves = [coefficients(build_algorithm(name, {}), advantage) for advantage in (1.0, -1.0)]
        if curves[0] is not None:
            key = np.round(curves, 4).tobytes()
            panels.setdefault(key, ([], *curves))[0].append(name)
    rows = -(-len(panels) // COLUMNS)
    title = f"Coefficient on ∇log π over the ratio π/μ, of one token with μ = {BEHAVIOR:g}"
    figure = new_figure(1.8 * COLUMNS, 1.7 * rows + 0.8, title)
    axes = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
    for panel, (names, positive, negative) in zip(axes, panels.values(), strict=False):
        lines = [
            panel.plot(RATIOS, curve, color=color, lw=1.8, label=label)[0]
            for curve, color, label in ((positive, COLORS[0], "A = 1"), (negative, COLORS[1], "A = −1"))
        ]
        panel.set_title(textwrap.fill(", ".join(names), 24), fontsize=8.5)
        panel.axvline(1, color=GREY, lw=0.5)
        panel.tick_params(labelsize=9, labelbottom=True)
        panel.set(xlim=(0, 4), ylim=(-3, 3), xticks=range(5))
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    for panel in axes[len(panels) - COLUMNS : len(panels)]:
        panel.set_xlabel("ratio π/μ")
    figure.supylabel("coefficient, in units of |A|")
    add_legend(figure, lines, [line.get_label() for line in lines], loc="outside lower center", ncols=2)
    return figure
