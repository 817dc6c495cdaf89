"""The algorithms of arXiv 2509.24203 as changes to REINFORCE, with sources; `field` has other papers' algorithms."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Preset(NamedTuple):
    """An algorithm of the literature as changes to REINFORCE.

    title: name in the literature.
    paper: arXiv id or URL; empty without a source.
    coefficient: factor of ∇log π(y_t) before the reduction.
    changes: axis → name and options.
    note: differences from paper or reference code, and doubts.
    """

    title: str
    paper: str
    coefficient: str
    changes: Mapping[str, Mapping[str, Any]]
    note: str = ""


def changes_of(preset: Preset) -> str:
    """Describes a preset's changes to REINFORCE in the terms of a config.

    Examples:
        >>> changes_of(PAPER["grpo"])
        'advantage: group_normalized; clip: one_side; weight: importance'
    """
    parts = []
    for axis, block in preset.changes.items():
        options = [f"{name} {value}" for name, value in block.items() if name != "name"]
        parts.append(f"{axis}: {' '.join([*([block['name']] if 'name' in block else []), *options])}")
    return "; ".join(parts) or "none"


REC = "2509.24203"
IMPORTANCE = {"name": "importance"}
ONE_SIDE = {"name": "one_side"}
NORMALIZED = {"name": "group_normalized"}
# PPO's clipping as most papers write it, with advantages divided by the group's standard deviation.
CLIPPED = {"advantage": NORMALIZED, "clip": ONE_SIDE, "weight": IMPORTANCE}

PAPER = {
    "reinforce": Preset("REINFORCE", REC, "A", {}),
    "grpo": Preset(
        "GRPO",
        "2402.03300",
        "ρA·one-side(ρ), A over σ",
        CLIPPED,
        "no KL to a reference, as in 2509.24203; σ has ddof 0, common code has 1",
    ),
    "rec_one_side_is": Preset("REC-OneSide-IS", REC, "ρA·one-side(ρ)", {"clip": ONE_SIDE, "weight": IMPORTANCE}),
    "rec_one_side_nois": Preset("REC-OneSide-NoIS", REC, "A·one-side(ρ)", {"clip": ONE_SIDE}),
    "rec_two_side_is": Preset(
        "REC-TwoSide-IS", REC, "ρA·two-side(ρ)", {"clip": {"name": "two_side"}, "weight": IMPORTANCE}
    ),
    "rec_two_side_nois": Preset("REC-TwoSide-NoIS", REC, "A·two-side(ρ)", {"clip": {"name": "two_side"}}),
    "rec_ring_is": Preset("REC-Ring-IS", REC, "ρA·ring(ρ)", {"clip": {"name": "ring"}, "weight": IMPORTANCE}),
    "rec_ring_nois": Preset("REC-Ring-NoIS", REC, "A·ring(ρ)", {"clip": {"name": "ring"}}),
    "asymre": Preset("AsymRE", "2506.20520", "A + β", {"regularizer": {"name": "log_likelihood_bonus"}}),
    "opmd": Preset("OPMD", REC, "A − τ Σ_t log ρ_t", {"regularizer": {"name": "squared_log_ratio_per_completion"}}),
    "opmd_token": Preset(
        "OPMD by token", REC, "A − τ log ρ_t", {"regularizer": {"name": "squared_log_ratio_per_token"}}
    ),
    "red_drop": Preset("RED-Drop", REC, "A over the kept set", {"selection": {"name": "drop_excess_negatives"}}),
    "red_weight": Preset("RED-Weight", REC, "A·exp(A/τ)", {"weight": {"name": "exp_advantage"}}),
    "pairwise_consistency": Preset(
        "Pairwise consistency",
        REC,
        "(2τ/K)(a − ā), a = r − τ log π/μ of the completion",
        {"objective": {"name": "pairwise_consistency"}},
    ),
}
