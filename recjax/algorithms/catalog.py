"""The algorithms of the literature as changes to REINFORCE, with sources.

PAPER is for arXiv 2509.24203, FIELD for other papers. Options are the papers'; notes list differences and doubts.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Preset(NamedTuple):
    """An algorithm of the literature as changes to REINFORCE.

    title: name in the literature.
    paper: arXiv id or URL; empty without a source.
    coefficient: factor of ∇log π(y_t) before the reduction.
    changes: axis → name, or name and options.
    note: differences from paper or reference code, and doubts.
    """

    title: str
    paper: str
    coefficient: str
    changes: Mapping[str, str | Mapping[str, Any]]
    note: str = ""


def changes_of(preset: Preset) -> str:
    """Describes a preset's changes to REINFORCE in the terms of a config.

    Examples:
        >>> changes_of(PAPER["grpo"])
        'advantage: group_normalized; clip: one_side; weight: importance'
    """
    parts = []
    for axis, change in preset.changes.items():
        if isinstance(change, str):
            parts.append(f"{axis}: {change}")
            continue
        words = []
        for option, value in change.items():
            words.append(value if option == "name" else f"{option} {value}")
        parts.append(f"{axis}: {' '.join(words)}")
    if not parts:
        return "none"
    return "; ".join(parts)


REC = "2509.24203"
# PPO's clipping as most papers write it, with advantages divided by the group's standard deviation.
CLIPPED = {"advantage": "group_normalized", "clip": "one_side", "weight": "importance"}

PAPER = {
    "reinforce": Preset("REINFORCE", REC, "A", {}),
    "grpo": Preset(
        "GRPO",
        "2402.03300",
        "ρA·one-side(ρ), A over σ",
        CLIPPED,
        "no KL to a reference and mean over tokens, as in 2509.24203; the paper's mean is over completions:"
        " reduction={name: sequence_mean_token_mean}; common code divides σ² by K − 1: advantage={ddof: 1}",
    ),
    "rec_one_side_is": Preset("REC-OneSide-IS", REC, "ρA·one-side(ρ)", {"clip": "one_side", "weight": "importance"}),
    "rec_one_side_nois": Preset("REC-OneSide-NoIS", REC, "A·one-side(ρ)", {"clip": "one_side"}),
    "rec_two_side_is": Preset("REC-TwoSide-IS", REC, "ρA·two-side(ρ)", {"clip": "two_side", "weight": "importance"}),
    "rec_two_side_nois": Preset("REC-TwoSide-NoIS", REC, "A·two-side(ρ)", {"clip": "two_side"}),
    "rec_ring_is": Preset("REC-Ring-IS", REC, "ρA·ring(ρ)", {"clip": "ring", "weight": "importance"}),
    "rec_ring_nois": Preset("REC-Ring-NoIS", REC, "A·ring(ρ)", {"clip": "ring"}),
    "asymre": Preset("AsymRE", "2506.20520", "A + β", {"regularizer": "log_likelihood_bonus"}),
    "opmd": Preset(
        "OPMD",
        REC,
        "A − τ Σ_t log ρ_t",
        {"regularizer": "squared_log_ratio_per_completion"},
        "the term is (τ/2)(Σ_t log ρ_t)²; the authors' script has 0.1 (log ρ_t)² by token, without the half:"
        " regularizer={name: squared_log_ratio_per_token, tau: 0.2}",
    ),
    "opmd_token": Preset(
        "OPMD by token",
        REC,
        "A − τ log ρ_t",
        {"regularizer": "squared_log_ratio_per_token"},
        "the term is (τ/2)(log ρ_t)²; the authors' script has 0.1 (log ρ_t)²: regularizer={tau: 0.2}",
    ),
    "red_drop": Preset(
        "RED-Drop",
        REC,
        "A over the kept set",
        {"selection": "drop_excess_negatives"},
        "a reward at the group's mean counts as positive, as in the authors' code",
    ),
    "red_weight": Preset("RED-Weight", REC, "A·exp(A/τ)", {"weight": "exp_advantage"}),
    "pairwise_consistency": Preset(
        "Pairwise consistency",
        REC,
        "(2τ/K)(a − ā), a = r − τ log π/μ of the completion",
        {"objective": "pairwise_consistency"},
        "up to a factor, this is GVPO (2504.19599) with μ as its old policy. With the reference policy instead of μ it"
        " is VarGrad as in TBA, the preset `tba`",
    ),
}


GSPO = {
    "advantage": "group_normalized",
    "ratio": "sequence_mean",
    "clip": {"name": "one_side", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "weight": "importance",
    "reduction": "sequence_mean_token_mean",
}
DAPO = {**CLIPPED, "clip": {"name": "one_side", "epsilon_low": 0.2, "epsilon_high": 0.28}}
DPPO = {"clip": "probability_difference", "weight": {"name": "truncated", "cap": 20.0}}

FIELD = {
    # --- Advantages.
    "rloo": Preset("RLOO", "2402.14740", "K/(K−1)·A", {"advantage": "leave_one_out"}),
    "dr_grpo": Preset(
        "Dr.GRPO",
        "2503.20783",
        "ρA·one-side(ρ)",
        {"clip": "one_side", "weight": "importance", "reduction": "sequence_mean_token_sum"},
        "the paper divides by a fixed length as well: reduction={name: fixed_length, length: N}",
    ),
    "reinforce_pp": Preset(
        "REINFORCE++",
        "2501.03262",
        "ρA·one-side(ρ), A = r whitened over the batch",
        {**CLIPPED, "advantage": {"name": "batch_whitened", "baseline": "none"}},
        "mean and standard deviation are over completions; OpenRLHF counts a completion once for each token:"
        " advantage={over: tokens}; verl also has ddof 1: advantage={over: tokens, ddof: 1}. No KL in the reward",
    ),
    "reinforce_pp_baseline": Preset(
        "REINFORCE++-baseline",
        "2501.03262",
        "ρA·one-side(ρ), A = r − r̄ whitened over the batch",
        {**CLIPPED, "advantage": {"name": "batch_whitened", "baseline": "group"}},
        "mean and deviation as for `reinforce_pp`; OpenRLHF's script adds a KL to the loss: reference_kl={coefficient:"
        " 1e-5, estimator: k2}",
    ),
    "lite_ppo": Preset(
        "LitePPO",
        "2508.08221",
        "ρA·one-side(ρ), A = (r − r̄)/σ of the batch",
        {**CLIPPED, "advantage": "batch_deviation"},
    ),
    "opo": Preset(
        "OPO", "2505.23585", "A = r − Σ L r / Σ L", {"advantage": "length_weighted"}, "on-policy in the paper"
    ),
    "gpg": Preset(
        "GPG",
        "2504.02546",
        "A·G/G₊",
        {"advantage": "signal_scaled"},
        "groups with different rewards are counted; verl counts rewards that are not zero",
    ),
    "zcpo": Preset(
        "ZCPO",
        "2610.12161",
        "A = (r − r̄)/max|r − r̄| − β(D − D̄), D the mean over tokens of KL(π ‖ π_ref)",
        {"advantage": "divergence_penalized"},
        "0 in groups of equal rewards. D is the exact KL over the vocabulary, to the initial policy or model.reference,"
        " and costs a pass of both policies over the batch. β = 0.1 is this package's; only the advantage was read, so"
        " clip and weight are those of REINFORCE",
    ),
    "cod": Preset(
        "CoD",
        "2606.20002",
        "A·exp(A/T)·one-side(ρ), A = mean reward from the token's turn on − the group's mean; T so that Σ_t A·exp(A/T)"
        " = 0, at least 0.8",
        {
            "advantage": {"name": "turn_returns", "returns": "mean"},
            "clip": "one_side",
            "weight": {"name": "bisected_exp_advantage", "ceiling": 1e6},
        },
        "for agents whose turns have rewards. As in the authors' code, Σ_t is over the batch's tokens, and weights are"
        " 1 where Σ_t A ≥ 0. Shorter trajectories enter the group's mean with their last turn; the code leaves them"
        " out of later turns. Its T stops within 0.05 of the root, and at 100",
    ),
    "offline_grpo": Preset(
        "Offline-GRPO",
        "https://github.com/krafton-ai/Offline-GRPO",
        "πA, A = r − r̄, and 0.1 in groups whose completions are all right",
        {"advantage": "solved_bonus", "weight": "probability"},
        "for another model's completions without log-probs, whose probability counts as 1. Right is a reward above 0.5."
        " NeMo-RL's example also has reference_kl={coefficient: 0.1}",
    ),
    "maxrl": Preset("MaxRL", "2602.02710", "A = (r − r̄)/r̄", {"advantage": "mean_relative"}),
    "gdpo": Preset(
        "GDPO",
        "2601.05242",
        "ρA·one-side(ρ), A = Σ_p w_p (r_p − r̄_p)/σ_p, whitened over the batch",
        {**CLIPPED, "advantage": "part_normalized"},
        "the standard deviation is over completions (ddof 0); the authors' verl code: advantage={over: tokens,"
        " ddof: 1}; their TRL code: advantage={ddof: 1}",
    ),
    "oapl": Preset(
        "OAPL",
        "2602.19362",
        "A − β Σ_t log ρ_t, A = r − β log mean exp(r/β)",
        {
            "advantage": {"name": "log_mean_exp", "beta": 1.0},
            "regularizer": {"name": "squared_log_ratio_per_completion", "tau": 1.0},
        },
        "β stands on two axes, as advantage.beta and regularizer.tau. No source was found for β = 1, at which a right"
        " completion may be pushed down. A*-PO (2505.20686) has 0.5 in A and 1e-3 on log ρ: advantage={beta: 0.5},"
        " regularizer={tau: 1e-3}; but its A uses samples of the reference policy, and its ρ is π/π_ref",
    ),
    # --- Clips and masks.
    "dapo": Preset(
        "DAPO",
        "2503.14476",
        "ρA·one-side(ρ; 0.2, 0.28), A over σ",
        DAPO,
        "dynamic sampling is experience.refill, the soft penalty of long completions task.overlong_tokens",
    ),
    "dual_clip_ppo": Preset(
        "Dual-clip PPO", "1912.09729", "ρA·one-side(ρ), 0 where A < 0 and ρ > 3", {**CLIPPED, "clip": "dual"}
    ),
    "icepop": Preset(
        "IcePop",
        "2512.16144",
        "ρA where 0.5 ≤ ρ ≤ 5",
        {"clip": {"name": "two_side", "epsilon_low": 0.5, "epsilon_high": 4.0}, "weight": "importance"},
        "the form of INTELLECT-3. Ring-1T's (2510.18855) has the band on π_prox/μ, PPO's clip around π_prox, A over σ"
        " and a mean over completions: advantage={name: group_normalized}, anchor={name: proximal}, clip={name:"
        " one_side}, correction={name: banded}, reduction={name: sequence_mean_token_mean}",
    ),
    "dppo_tv": Preset(
        "DPPO-TV",
        "2602.04879",
        "min(ρ, 20)A, 0 where π − μ has gone beyond ±0.2 with A",
        DPPO,
        "δ = 0.2 is SkyRL's, prime-rl's and open-instruct's; the authors' script in verl: clip={delta: 0.15},"
        " weight={cap: 1e4}. The cap of 20 is that of their code, which verl's config overrules: weight={cap: 3}",
    ),
    "dppo_kl": Preset(
        "DPPO-KL",
        "2602.04879",
        "min(ρ, 20)A, 0 where π has gone with A beyond 0.05 nats of KL(μ ‖ π) of this token or another",
        {**DPPO, "clip": "binary_kl"},
        "δ = 0.05 is that of the authors' script in verl, which has another cap: weight={cap: 1e4}",
    ),
    "dppo_tv_kl": Preset(
        "DPPO-TV with a KL, prime-rl's default from #2187 to #3418",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/2187",
        "ρA·DPPO-TV(π, μ) − 0.002 log ρ",
        {
            "clip": "probability_difference",
            "weight": "importance",
            "regularizer": {"name": "squared_log_ratio_per_token", "tau": 2e-3},
        },
        "the loss of #2187, with 1e-3 (log ρ)²; since #3418 (August 2026) the default is `ipo`",
    ),
    "ipo": Preset(
        "IPO, prime-rl's default since #3418",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/3418",
        "min(ρ, 1e4)A, 0 where |π − μ| > 0.3",
        {"clip": "probability_distance", "weight": {"name": "truncated", "cap": 1e4}},
        "as of #3586 (18 September 2026). prime-rl adds score centering by an option of the loss, here"
        " score_centering.coefficient",
    ),
    "bpo": Preset(
        "BPO",
        "2609.15987",
        "min((1 + ε − μ)/(1 + ε − π), c)·A·one-side(ρ), A over σ; ε = 0.2",
        {**CLIPPED, "weight": "complement"},
        "from a summary, without the paper: c = 5, ε and the clip of GRPO are this package's choices of what it leaves"
        " open",
    ),
    "estr": Preset(
        "ESTR",
        "2607.22186",
        "ρA where (log ρ)²/(H + ε) ≤ τ, A over σ",
        {"advantage": "group_normalized", "weight": "importance", "mask": "entropy_scaled"},
        "from a summary, without the paper: τ = 0.1 and ε = 0.001 are this package's. The scoring pass computes H, the"
        " entropy of π",
    ),
    "kimi_k15": Preset(
        "Kimi K1.5, K2",
        "2501.12599",
        "A − τ Σ_t log ρ_t",
        {"regularizer": "squared_log_ratio_per_completion"},
        "OPMD by another name; τ = 0.1 is this package's",
    ),
    "kimi_k25": Preset(
        "Kimi K2.5, GLM-5",
        "2602.02276",
        "ρA·two-side(ρ) − 0.2 log ρ",
        {
            "clip": "two_side",
            "weight": "importance",
            "regularizer": {"name": "squared_log_ratio_per_token", "tau": 0.2},
        },
        "the term is τ (log ρ)² without a half, so regularizer.tau is 2τ; τ = 0.1 and the bounds are this package's",
    ),
    "opsm": Preset(
        "Off-policy sequence masking",
        "2512.02556",
        "ρA·one-side(ρ), 0 in completions with A < 0 and mean log(μ/π) > 0.5",
        {**CLIPPED, "mask": "off_policy_negatives"},
        "the threshold is TRL's suggestion; slime's default: mask={delta: 1e-4}. The paper's KL is"
        " unbiased_reference_kl, and its mean is over completions: reduction={name: sequence_mean_token_mean}",
    ),
    "flash_reinforce": Preset(
        "FlashREINFORCE",
        "https://github.com/OpenRLHF/OpenRLHF/pull/1339",
        "ρA, A = r − mean r of the batch, 0 in completions with a mean KL(μ ‖ π) of a token or another above 0.005;"
        " mean over completions",
        {
            "advantage": "batch_mean",
            "mask": "sequence_binary_kl",
            "weight": "importance",
            "reduction": "sequence_mean_token_mean",
        },
        "made for rollout.group_size=1; OpenRLHF's scripts for mixtures of experts have mask={delta: 0.01}",
    ),
    "trm": Preset(
        "Trust-region masking",
        "2512.23075",
        "ρA, 0 in completions with a token of k3 = ρ − 1 − log ρ above 0.05",
        {"mask": "sequence_max_kl", "weight": "importance"},
        "verl's `seq_max_k3`; its `seq_max_k2`: mask={estimator: k2}. The threshold of 0.05 is this package's: no"
        " source for one was read. With another preset the mask stands next to its clip",
    ),
    "mis": Preset(
        "Masked importance sampling",
        "https://github.com/NovaSky-AI/SkyRL/blob/main/docs/content/docs/algorithms/off_policy_correction.mdx",
        "ρA·one-side(ρ), ρ = π/π_prox, 0 in completions whose geometric mean of π_prox/μ leaves 0.99 to 1.01",
        {**CLIPPED, "anchor": "proximal", "mask": "sequence_band"},
        "as in SkyRL's docs; ρ = 1 in the first update of a batch. TRL's default multiplies by the product of π_prox/μ"
        " over the completion, and drops products above 3, which long completions exceed because of their length:"
        " correction={name: sequence_banded, high: 3.0}, mask={name: none}",
    ),
    "m2po": Preset(
        "M2PO",
        "2510.01161",
        "ρA, 0 at those tokens with A·log ρ > 0 whose (log ρ)² is largest, until the others have a mean of at most"
        " 0.04",
        {"advantage": "group_normalized", "weight": "importance", "mask": "one_side_second_moment"},
        "Algorithm 1 of the final paper (ICLR 2026), over the whole batch; dropped tokens stay in the loss's mean. The"
        " authors' code of October 2025 counts dropped tokens at the bound, and so drops more: mask={dropped:"
        " bounded}; its moment is that of a micro-batch. AReaL's form masks the largest (log ρ)² for any A: mask={name:"
        " second_moment}",
    ),
    "clip_b": Preset(
        "Clip-B",
        "2602.03392",
        "ρA·one-side(ρ), 0 where A < 0 and p(H + log p) is 2.5 deviations or more below the batch's mean",
        {**CLIPPED, "mask": "entropy_change"},
        "H and p are those of the policy before the update. The mean is over all tokens, in the authors' code over"
        " those that are left, and their σ has K − 1: advantage={ddof: 1}. Clip-V of the same paper compares p(H + log"
        " p) with its mean over the vocabulary, which no scoring pass keeps",
    ),
    "bapo": Preset(
        "BAPO",
        "2510.18927",
        "ρA·one-side(ρ; bounds that rise until A > 0 has half)",
        {**CLIPPED, "clip": "balanced"},
        "as in the paper, with bounds of the whole batch; the authors' verl code has bounds of each micro-batch,"
        " raises the lower one first, counts tokens outside of the bounds at the bound, and clips A < 0 at ρ = 3 as"
        " well; its example starts from 0.8 to 0.95 and 1.2 to 2",
    ),
    "clip_cov": Preset(
        "Clip-Cov",
        "2505.22617",
        "ρA·one-side(ρ), 0 at the 0.02 % of tokens of highest covariance of log π and A",
        {**CLIPPED, "mask": "covariance"},
        "the authors pick as many at random among unclipped tokens with a covariance of 1 to 5; here the highest. A"
        " share of 0.002 is KL-Cov's",
    ),
    "high_entropy": Preset(
        "Beyond the 80/20 rule",
        "2506.01939",
        "ρA·one-side(ρ; 0.2, 0.28) at the 20 % of tokens of highest entropy",
        {**DAPO, "mask": "high_entropy"},
    ),
    # --- Ratios of completions.
    "gspo": Preset(
        "GSPO", "2507.18071", "sA·one-side(s; 3e-4, 4e-4), s = exp(mean log ρ), A over σ; mean over completions", GSPO
    ),
    "gspo_token": Preset(
        "GSPO-token",
        "2507.18071",
        "as `gspo`, with A_t",
        GSPO,
        "the same function, because any advantage may be per token",
    ),
    "rec_gspo_nois": Preset(
        "REC-GSPO-NoIS",
        REC,
        "A·one-side(s; 3e-4, 4e-4), s as in `gspo`; mean over completions",
        {axis: change for axis, change in GSPO.items() if axis not in ("advantage", "weight")},
        "Trinity's clip mode `gspo-one-side` without weights, which the paper does not name",
    ),
    "luspo": Preset(
        "LUSPO",
        "2602.05261",
        "sA·one-side(s; 2e-3, 2.5e-3), s and A as in `gspo`; sum over a completion's tokens",
        {
            **GSPO,
            "clip": {"name": "one_side", "epsilon_low": 2e-3, "epsilon_high": 2.5e-3},
            "reduction": "sequence_mean_token_sum",
        },
    ),
    "gmpo": Preset(
        "GMPO",
        "2507.20673",
        "sA where log ρ_t is inside ±0.4 on A's side, s = exp(mean log ρ clipped there); mean over completions",
        {
            "advantage": "group_normalized",
            "ratio": "clipped_sequence_mean",
            "clip": "log_one_side",
            "weight": "importance",
            "reduction": "sequence_mean_token_mean",
        },
        "±0.4 is the paper's; verl's code: ratio={epsilon_low: 0.2, epsilon_high: 0.2}, clip={epsilon_low: 0.2,"
        " epsilon_high: 0.2}",
    ),
    "topr": Preset(
        "TOPR",
        "2503.14286",
        "A where A ≥ 0, min(s, 1)A where A < 0, s = exp(Σ log ρ)",
        {"ratio": "sequence_product", "weight": "tapered"},
        "of whole completions; Trinity and ROLL have it token by token: ratio={name: token}",
    ),
    "vespo": Preset(
        "VESPO",
        "2602.10693",
        "s^k exp(λ(1−s))A, s = exp(Σ log ρ); k, λ = 2, 3 where A > 0, else 3, 2",
        {"advantage": "group_normalized", "ratio": "sequence_product", "weight": "peaked"},
        "mean over tokens, as in the authors' scripts; their code bounds each token's log ρ to ±20 before the sum as"
        " well, and multiplies a correction for the engine into s",
    ),
    "respo": Preset(
        "ReSPO",
        "2609.35433",
        "½(1+s)exp(1−s)A where A ≥ 0, √s·exp(2(1−√s))A where A < 0, s = exp(Σ log ρ)",
        {"advantage": "group_normalized", "ratio": "sequence_product", "weight": "blended"},
        "mean over tokens, as in the authors' scripts, which update 8 to 32 times on a batch:"
        " training.updates_per_batch, training.minibatches",
    ),
    "tba": Preset(
        "TBA, VarGrad",
        "2503.18929",
        "(2τ/K)(a − ā), a = r − τ log π/π_ref of the completion",
        {"objective": {"name": "pairwise_consistency", "anchor": "reference"}},
        "π_ref is the initial policy or model.reference; μ plays no role. τ = 1 is this package's",
    ),
    # --- Weights.
    "cispo": Preset(
        "CISPO",
        "2506.13585",
        "min(ρ, 5)A, A over σ",
        {"advantage": "group_normalized", "weight": {"name": "truncated", "cap": 5.0}},
        "the cap is ScaleRL's. TRL's default cap is 0.2, so that no weight is above 0.2; verl clips ρ to 0.8 to 1.2:"
        " weight={name: bounded, low: 0.8, high: 1.2}. ScaleRL (2510.13786) divides by the batch's deviation:"
        " advantage={name: batch_deviation}; its mean over prompts is missing",
    ),
    "aspo": Preset(
        "ASPO",
        "2510.06062",
        "min(1/ρ, 3)A·one-side(ρ) where A > 0, min(ρ, 3)A·one-side(ρ) where A < 0",
        {"advantage": "group_normalized", "clip": "one_side", "weight": "inverse"},
        "beyond 3 tokens keep their gradient, as in the authors' code, whose range is 0.4 at each completion's 20 % of"
        " tokens of highest entropy",
    ),
    "sapo": Preset(
        "SAPO",
        "2511.20347",
        "4σ(1−σ)ρA, σ = sigmoid(τ(ρ−1)), τ = 1 where A > 0, else 1.05; mean over completions",
        {"advantage": "group_normalized", "weight": "soft", "reduction": "sequence_mean_token_mean"},
        "Trinity detaches the gate, whose weight then grows with ρ",
    ),
    "luffy": Preset(
        "LUFFY",
        "2504.14945",
        "ρA on own tokens, γp/(p+γ)²·A on an expert's, γ = 0.1",
        {"advantage": "group_normalized", "weight": "expert_shaped"},
        "an expert's completions are those without a policy version: experience.mix. The authors' script has A = r − r̄"
        " without σ and the sum over tokens by a fixed length: advantage={name: group_mean}, reduction={name:"
        " fixed_length, length: N}",
    ),
    "chord": Preset(
        "CHORD-φ",
        "2508.11408",
        "(1 − m)ρA·one-side(ρ) on own tokens, A over σ; m·p(1 − p) on an expert's, whatever A is",
        {
            **CLIPPED,
            "weight": {"name": "own", "share": 0.1},
            "regularizer": {"name": "expert_cross_entropy", "share": 0.1},
        },
        "the share m stands on two axes; m = 0.1 is Trinity's mu_peak = mu_valley, and stays constant. An expert's"
        " completions are those without a policy version: experience.mix, with of: batch, so that they enter no mean of"
        " own rewards. The mean is over the tokens of both together. Trinity's `mix_chord` has a mean of each, and so a"
        " larger part of imitation: m(1 − s)/s instead of m if experience.mix has the share s and completions are"
        " equally long; for s = 1/8: regularizer={share: 0.7}",
    ),
    "p3o": Preset(
        "P3O",
        "2605.12380",
        "min(ρ, E)A + (1−E)(1/ρ − 1), A over σ, E = effective sample size / tokens of the batch",
        {"advantage": "group_normalized", "weight": "effective_size_capped", "regularizer": "effective_size_kl"},
        "as in the authors' code, but E covers the whole batch instead of a micro-batch on all devices. Below ρ = e^−10"
        " the KL's gradient keeps its value, where the code starts to push away from μ. Only the cap:"
        " advantage={name: group_mean}, regularizer={name: none}",
    ),
    "score_centering": Preset(
        "Score centering",
        "2609.20807",
        "A·(∇log π of the token − its mean under μ)",
        {"score_centering": {"coefficient": 1.0}},
        "added to any other preset whose weights and clips read single tokens, with score_centering.coefficient; with"
        " a capped ratio: weight={name: truncated, cap: 2.0}. It reads the sampler's most likely tokens:"
        " rollout.recorded_top_k=128, as in the paper, or the sets that rollout.kept_ids records of a cut distribution,"
        " which are then exact. The authors' code (MJ10/score-centering,"
        " martin-marek/score-centering) has the same terms: μ f(π/μ) for the recorded tokens, α f(1/α) π for all"
        " others, also at clipped tokens; its best setting for old samples is a capped ratio or a mask. Next to a"
        " one-sided clip it is a composition of this package",
    ),
    "klpo": Preset(
        "KLPO, token regression",
        "2610.08963",
        "(r − β log ρ)·(∇log π of the token − its mean under μ); sum over a completion's tokens",
        {
            "advantage": "raw_reward",
            "log_ratio_penalty": {"coefficient": 0.1},
            "score_centering": {"coefficient": 1.0},
            "reduction": "sequence_mean_token_sum",
        },
        "made for rollout.group_size=1. The mean is over the sampler's K most likely tokens and all others as one:"
        " rollout.recorded_top_k=16; with the whole vocabulary it is exact. The paper's default draws M tokens from μ"
        " instead, which the record does not have; their mean is this sum. Without a record, from the KL of this token"
        " or another: score_centering={coefficient: 0.0}, weight={name: complement, epsilon: 0.0, cap: 1e4}. Sequence"
        " regression with that KL: log_ratio_penalty={level: completion}, score_centering={coefficient: 0.0},"
        " weight={name: complement, epsilon: 0.0, cap: 1e4}. The library's β is 1e-3: log_ratio_penalty={coefficient:"
        " 1e-3}",
    ),
    # --- Anchors.
    "tis": Preset(
        "TIS",
        "https://fengyao.notion.site/off-policy-rl",
        "min(π_prox/μ, 2)·ρA·one-side(ρ), ρ = π/π_prox",
        {**CLIPPED, "anchor": "proximal", "correction": {"name": "truncated", "cap": 2.0}},
        "ρ = 1 in the first update of a batch; training.updates_per_batch sets the number of passes",
    ),
    "decoupled_ppo": Preset(
        "Decoupled PPO",
        "2505.24298",
        "π_prox/μ·ρA·one-side(ρ), ρ = π/π_prox",
        {**CLIPPED, "anchor": "proximal", "correction": "importance"},
        "ρ = 1 in the first update of a batch; training.updates_per_batch sets the number of passes",
    ),
    "a3po": Preset(
        "A-3PO",
        "2512.06547",
        "as `decoupled_ppo`, log π_prox = α log μ + (1−α) log π",
        {**CLIPPED, "anchor": "interpolated", "correction": "importance"},
        "α = 0.5; in the paper it follows from a token's staleness",
    ),
    # --- Without rewards.
    "on_policy_distillation": Preset(
        "On-policy distillation",
        "2306.13649",
        "log π_teacher − log π",
        {"advantage": "none", "distillation": {"coefficient": 1.0}},
        "added to the reward's advantage with any other preset and distillation.coefficient. Off-policy, prime-rl has a"
        " ratio and a trust region of 0.2: clip={name: probability_difference}, weight={name: importance}. IW-OPD"
        " (2606.22600) weighs a token by its row's drift before the token, 1.5 at the first and 1 at the last:"
        " distillation={prefix_weight: 0.5}; TRL measures that drift from μ, here from π",
    ),
    "logit_distillation": Preset(
        "GKD, distillation from logits",
        "2306.13649",
        "of the loss D_t: KL(π ‖ π_teacher) over the vocabulary",
        {"advantage": "none", "teacher_divergence": {"coefficient": 1.0}},
        "added to any other preset with teacher_divergence.coefficient. From the teacher's side:"
        " teacher_divergence={kind: forward_kl}; between both: teacher_divergence={kind: jsd, beta: 0.1}. On the"
        " policy's samples it is on-policy, on a store's (a teacher's, say) off-policy; the paper mixes both:"
        " experience.mix",
    ),
    "sdpo": Preset(
        "SDPO, self-distillation",
        "2601.20802",
        "of the loss min(ρ, 2)·D_t: JSD between π and the teacher, which is π with another prompt",
        {
            "advantage": "none",
            "teacher_divergence": {
                "coefficient": 1.0,
                "kind": "jsd",
                "top_k": 100,
                "support": "student",
                "weight": "truncated",
            },
        },
        "the 100 tokens are the policy's most likely, as in TRL and the authors' code; the teacher's:"
        " teacher_divergence={support: teacher}. Set task.teacher_template with {better} or {feedback}; with {answer}"
        " it is OPSD (2601.18734). The paper averages the teacher's weights: model.teacher_rate=0.05. Here the mean"
        " also counts tokens of completions without a teacher, and {better} is another completion only if its reward"
        " is higher",
    ),
    # --- Observations.
    "echo": Preset(
        "ECHO",
        "2605.24517",
        "ρA·one-side(ρ), A over σ; 0.05 / (number of observation tokens) on an agent's observations",
        {**CLIPPED, "observations": {"coefficient": 0.05}},
        "λ = 0.05 is rLLM's, which calls it the paper's, but its mean is over completions of the mean over each one's"
        " observations, which no option gives; the mean here is prime-rl's, which leaves out the template's tokens and"
        " has observations={coefficient: 0.1}. Added to any other preset with observations.coefficient",
    ),
}

# The source of each preset's formula; the tests compare presets with objectives written from these sources.
SOURCES = {
    **dict.fromkeys(PAPER, "§2; Trinity `rec_policy_loss.py`"),
    "grpo": "eq. 3; TRL, loss `grpo`; verl `compute_grpo_outcome_advantage`",
    "opmd": "§2; Kimi K1.5, 2501.12599 §2.3",
    "red_drop": "§2; Trinity `rec_advantage.py`",
    "pairwise_consistency": "§1",
    "rloo": "verl `compute_rloo_outcome_advantage`",
    "dr_grpo": "TRL, loss `dr_grpo`",
    "reinforce_pp": "verl `compute_reinforce_plus_plus_outcome_advantage`",
    "reinforce_pp_baseline": "verl `compute_reinforce_plus_plus_baseline_outcome_advantage`; OpenRLHF"
    " `experience_maker.py`",
    "lite_ppo": "AReaL `docs/en/algorithms/grpo_series.md`",
    "opo": "verl `compute_opo_outcome_advantage`",
    "gpg": "a summary; verl `compute_gpg_outcome_advantage` differs",
    "maxrl": "prime-rl `algo/max_rl.py`",
    "gdpo": "verl `compute_gdpo_outcome_advantage`",
    "oapl": "eq. 3, in a summary; A*-PO: ZhaolinGao/A-PO `core_algos.py`",
    "dapo": "TRL, loss `dapo`",
    "dual_clip_ppo": "verl `compute_policy_loss_vanilla`",
    "icepop": "eq. 1, as prime-rl #2401 quotes it; Ring-1T: TRL `paper_index.md`",
    "dppo_tv": "verl `compute_policy_loss_dppo_tv`, by the authors",
    "dppo_kl": "verl `compute_policy_loss_dppo_kl`, by the authors",
    "dppo_tv_kl": "prime-rl `trainer/rl/loss.py`, `default_loss_fn`, before #3418",
    "ipo": "a summary of prime-rl `trainer/rl/loss.py`",
    "kimi_k15": "§2.3",
    "kimi_k25": "eq. 1, as prime-rl #1697 quotes it",
    "opsm": "TRL `get_off_policy_mask`",
    "flash_reinforce": "the pull request",
    "trm": "a summary of verl `seq_max_k3`",
    "mis": "SkyRL `off_policy_correction.mdx`",
    "m2po": "Algorithm 1 (openreview IIgl5MWelz), as Trinity `m2po_policy_loss.py` has it; October 2025: a summary of"
    " the authors' code; AReaL `_get_m2po_loss_mask`",
    "clip_b": "Trinity `examples/entropy`, by the authors",
    "zcpo": "a summary",
    "cod": "Trinity `cod_advantage.py`, by the authors",
    "offline_grpo": "NeMo-RL `docs/guides/offline-grpo.md`",
    "bpo": "a summary",
    "estr": "a summary",
    "rec_gspo_nois": "Trinity `rec_policy_loss.py`, clip_mode `gspo-one-side`",
    "respo": "yhangchen/ReSPO-code `core_algos.py`, by the authors",
    "tba": "a summary",
    "klpo": "yifanzhang-pro/KLPO `docs/algorithms.md`, `klpo/loss.py`, by the authors",
    "bapo": "a summary; the authors' code, WooooDyy/BAPO `policy_loss.py`, differs",
    "clip_cov": "verl `compute_policy_loss_clip_cov`, with another choice of tokens",
    "high_entropy": "TRL `get_high_entropy_mask`",
    "gspo": "TRL, importance_sampling_level `sequence`",
    "gspo_token": "verl `compute_policy_loss_gspo`",
    "luspo": "TRL, loss `luspo`; bounds: TRL `paper_index.md`, from §5.1",
    "gmpo": "verl `compute_policy_loss_geo_mean`",
    "topr": "Trinity `topr_policy_loss.py`, with the ratio of completions of the paper",
    "vespo": "TRL, loss `vespo`",
    "cispo": "TRL, loss `cispo`; verl `compute_policy_loss_cispo`; ScaleRL: TRL `paper_index.md`",
    "aspo": "a summary of the authors' code",
    "sapo": "TRL, loss `sapo`; verl `compute_policy_loss_sapo`",
    "luffy": "a summary of the authors' code",
    "chord": "a summary of Trinity `mix_chord`",
    "p3o": "FeynRL-project/FeynRL `algs/P3O/p3o.py`, by the authors",
    "score_centering": "a summary of the paper, of the authors' MJ10/score-centering, and of prime-rl's"
    " `IPOLossConfig.score_centering`",
    "tis": "TRL, vllm_importance_sampling_mode `token_truncate`",
    "decoupled_ppo": "AReaL `ppo_actor_loss_fn`",
    "a3po": "AReaL `trainer/ppo/actor.py`",
    "on_policy_distillation": "prime-rl `trainer/rl/loss.py`, `ref_kl_loss_fn`, without its ratio; trust region: a"
    " summary of it; IW-OPD: TRL `experimental/iw_opd`",
    "logit_distillation": "§3; TRL `gkd_trainer.py`",
    "sdpo": "TRL `experimental/sdpo`, with the options of the authors' lasgroup/SDPO",
    "echo": "rLLM #668; prime-rl `algo/echo.py`",
}
