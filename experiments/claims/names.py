"""Names of algorithms and regimes on the pages of claims."""

NAMES = {
    "reinforce": "REINFORCE",
    "grpo": "GRPO",
    "grpo_5x_rate": "GRPO, 5× the rate",
    "rec_one_side_is": "REC-OneSide-IS",
    "rec_one_side_nois": "REC-OneSide-NoIS",
    "rec_one_side_nois_wide": "REC-OneSide-NoIS (0.6, 2.0)",
    "rec_two_side_is": "REC-TwoSide-IS",
    "rec_two_side_nois": "REC-TwoSide-NoIS",
    "rec_ring_is": "REC-Ring-IS",
    "rec_ring_nois": "REC-Ring-NoIS",
    "opmd": "OPMD",
    "asymre": "AsymRE",
    "red_drop": "RED-Drop",
    "red_weight": "RED-Weight",
    "on_policy": "on-policy",
    "interval_20": "sync_interval 20",
    "offset_10": "sync_offset 10",
    "offline": "offline",
}
