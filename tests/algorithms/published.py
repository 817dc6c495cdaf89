"""Every preset's objective as its source states it, in float64 NumPy; `catalog.SOURCES` names the sources.

An objective takes a batch and log-probs `p` [..., batch, time], and returns the loss [...] as the source's code or text
computes it: surrogates with PPO's minimum, weights that the source detaches from the gradient (computed from
`b.policy`, which stays where it is), and the source's mean. Nothing of the package is used here.

Where a source sums over a completion's tokens and recjax takes the mean over all tokens, the two differ by one factor
for the whole batch, which the learning rate takes; there the objective has the mean.
"""

import math
from typing import NamedTuple

import numpy as np

from tests.algorithms.examples import OWN, THEIRS

STEP = 1e-5


class Batch(NamedTuple):
    """Log-probs of four policies, and what else an objective reads; [batch, time] or [batch].

    reference: of a reference policy or a teacher.
    kept: rows that count.
    """

    policy: np.ndarray
    behavior: np.ndarray
    proximal: np.ndarray
    reference: np.ndarray
    entropy: np.ndarray
    mask: np.ndarray
    observed: np.ndarray
    rewards: np.ndarray
    groups: np.ndarray
    kept: np.ndarray


def gradient(objective, b: Batch) -> np.ndarray:
    """d loss / d log-prob of every token, by central differences."""
    places = np.argwhere(b.mask | b.observed)
    moved = np.repeat(b.policy[None], 2 * len(places), axis=0)
    for number, (i, t) in enumerate(places):
        moved[2 * number, i, t] += STEP
        moved[2 * number + 1, i, t] -= STEP
    losses = objective(b, moved)
    result = np.zeros(b.policy.shape)
    result[tuple(places.T)] = (losses[::2] - losses[1::2]) / (2 * STEP)
    return result


# Reductions of what is maximized to a loss.


def lengths(b):
    return np.maximum(b.mask.sum(-1), 1)


def summed(b, x):
    """The sum over each completion's tokens."""
    return np.where(b.mask, x, 0.0).sum(-1)


def token_mean(b, x):
    return -summed(b, x).sum(-1) / (b.mask & b.kept[:, None]).sum()


def mean_of_means(b, x):
    return -(summed(b, x) / lengths(b)).sum(-1) / b.kept.sum()


def mean_of_sums(b, x):
    return -summed(b, x).sum(-1) / b.kept.sum()


# Advantages [batch, 1], by loops.


def by_row(b, value):
    return np.array([value(i) if b.kept[i] else 0.0 for i in range(len(b.kept))])[:, None]


def group(b, i):
    return [j for j in range(len(b.kept)) if b.kept[j] and b.groups[j] == b.groups[i]]


def rewards(b, i):
    return [b.rewards[j] for j in group(b, i)]


def mean(values):
    return sum(values) / len(values)


def deviation(values, ddof=0):
    return math.sqrt(sum((value - mean(values)) ** 2 for value in values) / (len(values) - ddof))


def centered(b):
    return by_row(b, lambda i: b.rewards[i] - mean(rewards(b, i)))


def z_scores(b, ddof=0):
    """A group of one has no baseline and counts 0, the default of the option `singleton`."""

    def value(i):
        scores = rewards(b, i)
        return 0.0 if len(scores) == 1 else (b.rewards[i] - mean(scores)) / (deviation(scores, ddof) + 1e-6)

    return by_row(b, value)


def whitened(b, values, over="completions", ddof=0):
    weights = b.mask.sum(-1) if over == "tokens" else np.ones(len(b.kept), int)
    repeated = [values[i, 0] for i in range(len(b.kept)) if b.kept[i] for _ in range(weights[i])]
    return by_row(b, lambda i: (values[i, 0] - mean(repeated)) / (deviation(repeated, ddof) + 1e-6))


def over_batch_deviation(b):
    everything = [b.rewards[i] for i in range(len(b.kept)) if b.kept[i]]
    return centered(b) / (deviation(everything) + 1e-6)


def rloo_advantages(b):
    def value(i):
        others = [b.rewards[j] for j in group(b, i) if j != i]
        return b.rewards[i] - mean(others) if others else 0.0

    return by_row(b, value)


def opo_advantages(b):
    size = b.mask.sum(-1)
    baseline = lambda i: sum(size[j] * b.rewards[j] for j in group(b, i)) / sum(size[j] for j in group(b, i))  # noqa: E731
    return by_row(b, lambda i: b.rewards[i] - baseline(i))


def gpg_advantages(b):
    """Scaled by groups over groups of different rewards."""
    groups = {b.groups[i]: rewards(b, i) for i in range(len(b.kept)) if b.kept[i]}
    return centered(b) * len(groups) / sum(len(set(scores)) > 1 for scores in groups.values())


def maxrl_advantages(b):
    def value(i):
        return (b.rewards[i] - mean(rewards(b, i))) / mean(rewards(b, i)) if mean(rewards(b, i)) > 0 else 0.0

    return by_row(b, value)


def gdpo_advantages(b, over="completions", ddof=0):
    """Two parts: the reward, and at half weight a quarter of the length, which rows with rewards above 0.9 lack."""
    total = np.zeros((len(b.kept), 1))
    for weight, values, there in (
        (1.0, b.rewards, b.kept),
        (0.5, b.mask.sum(-1) / 4, b.kept & ~(b.rewards > 0.9)),
    ):
        total += weight * z_scores(b._replace(rewards=values, kept=there), ddof)
    return whitened(b, total, over, ddof)


def soft_value_advantages(b, beta):
    return by_row(b, lambda i: b.rewards[i] - beta * math.log(mean([math.exp(r / beta) for r in rewards(b, i)])))


# Surrogates.


def ppo(ratio, a, low=0.2, high=0.2):
    return np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)


def rho(b):
    """π/μ, detached."""
    return np.exp(b.policy - b.behavior)


def whole_log_ratio(b, p=None):
    return summed(b, (b.policy if p is None else p) - b.behavior)[..., None]


def trinity(b, p, inside, weight):
    """Trinity's REC loss: weight and clip are detached factors of A log π."""
    return token_mean(b, centered(b) * weight * inside * p)


def trinity_one_side(b, p, weight):
    a, ratio = centered(b), rho(b)
    return trinity(b, p, (ratio <= 1.2) * (a >= 0) + (a <= 0) * (ratio >= 0.8) > 0, weight)


def trinity_two_side(b, p, weight):
    return trinity(b, p, (rho(b) >= 0.8) * (rho(b) <= 1.2), weight)


def trinity_ring(b, p, weight):
    a, ratio = centered(b), rho(b)
    inside = (ratio >= 0.8) * (ratio <= 1.2) + (a >= 0) * (ratio <= 0.4) + (a <= 0) * (ratio >= 3.0)
    return trinity(b, p, inside > 0, weight)


def grpo(b, p, a=None, reduce=token_mean, low=0.2, high=0.2, factor=1.0):
    """PPO's surrogate on π/μ, with GRPO's advantages unless others are given, times a detached factor."""
    return reduce(b, factor * ppo(np.exp(p - b.behavior), z_scores(b) if a is None else a, low, high))


def around_proximal(b, p, factor, reduce=token_mean):
    """PPO's surrogate on π/π_prox, times a detached factor."""
    return reduce(b, factor * ppo(np.exp(p - b.proximal), z_scores(b)))


def pairwise(b, p, anchor):
    """Σ over pairs of a group of (a_i − a_j)² / K², a = r − log π(y)/anchor(y), mean over groups."""
    agreement = b.rewards - summed(b, p - anchor)
    groups = {tuple(group(b, i)) for i in range(len(b.kept)) if b.kept[i]}
    total = 0.0
    for rows in groups:
        for i in rows:
            for j in rows:
                total += (i < j) * (agreement[..., i] - agreement[..., j]) ** 2 / len(rows) ** 2
    return total / len(groups)


def opmd(b, p, tau=0.1):
    """Kimi K1.5: (r − r̄) log π(y) − τ/2 (log π(y)/μ(y))², of completions."""
    whole = (centered(b) * summed(b, p)[..., None] - tau / 2 * whole_log_ratio(b, p) ** 2)[..., 0]
    return -whole.sum(-1) / b.mask.sum()


def trinity_k2(b, p, coefficient):
    return token_mean(b, centered(b) * p - coefficient * (p - b.behavior) ** 2)


def regression(b, p, beta_value, beta_ratio):
    """(β₂ log π(y)/μ(y) − (r − V))² over 2β₂, of completions."""
    residual = (beta_ratio * whole_log_ratio(b, p) - soft_value_advantages(b, beta_value))[..., 0]
    return np.where(b.kept, residual**2, 0.0).sum(-1) / (2 * beta_ratio) / b.mask.sum()


def red_drop(b, p, kept):
    """A over the rows that a random draw left: all with r ≥ r̄, and no more of the others; checks these numbers."""
    low = {i for i in np.flatnonzero(b.kept) if b.rewards[i] < mean(rewards(b, i))}
    for i in np.flatnonzero(b.kept):
        below = [j for j in group(b, i) if j in low]
        assert kept[i] or i in low
        assert sum(kept[below]) == min(len(below), len(group(b, i)) - len(below))
    chosen = b._replace(kept=kept, mask=b.mask & kept[:, None])
    return token_mean(chosen, centered(chosen) * p)


def dual_clip(b, p):
    """verl's: the loss where A < 0 is at most −3A."""
    a = z_scores(b)
    loss = -ppo(np.exp(p - b.behavior), a)
    return token_mean(b, -np.where(a < 0, np.minimum(loss, -3 * a), loss))


def intellect(b, p):
    ratio = np.exp(p - b.behavior)
    return token_mean(b, np.where((rho(b) >= 0.5) & (rho(b) <= 5), ratio, 0.0) * centered(b))


def ring(b, p):
    mismatch = np.exp(b.proximal - b.behavior)
    return around_proximal(b, p, np.where((mismatch >= 0.5) & (mismatch <= 5), mismatch, 0.0), mean_of_means)


def dppo(b, p, valid, cap):
    return token_mean(b, centered(b) * np.minimum(rho(b), cap) * p * valid)


def total_variation(b, delta=0.2):
    moved = np.exp(b.policy) - np.exp(b.behavior)
    return np.where(centered(b) > 0, moved <= delta, moved >= -delta)


def token_kl(b):
    """KL(μ ‖ π) of this token or another."""
    new, old = np.exp(b.policy), np.exp(b.behavior)
    with np.errstate(divide="ignore", invalid="ignore"):  # outside of the mask
        kl = old * (b.behavior - b.policy) + (1 - old) * (np.log(1 - old) - np.log(1 - new))
    return np.where(b.mask, kl, 0.0)


def within_kl(b, delta=0.05):
    near = token_kl(b) <= delta
    return np.where(centered(b) > 0, near | (b.policy <= b.behavior), near | (b.policy >= b.behavior))


def dppo_tv_kl(b, p):
    surrogate = total_variation(b) * centered(b) * np.exp(p - b.behavior)
    return token_mean(b, surrogate - 1e-3 * (p - b.behavior) ** 2)


def kimi_k25(b, p):
    """Clip(π/μ, α, β)(r − r̄) − τ (log π/μ)² with τ = 0.1, bounds 0.8 and 1.2."""
    clipped = np.clip(np.exp(p - b.behavior), 0.8, 1.2) * centered(b)
    return token_mean(b, clipped - 0.1 * (p - b.behavior) ** 2)


def opsm_keeps(b, delta):
    return (z_scores(b) >= 0) | (summed(b, b.behavior - b.policy) / lengths(b) <= delta)[:, None]


def flash_reinforce(b, p, delta):
    everything = [b.rewards[i] for i in range(len(b.kept)) if b.kept[i]]
    a = by_row(b, lambda i: b.rewards[i] - mean(everything))
    keeps = (summed(b, token_kl(b)) / lengths(b) <= delta)[:, None]
    return mean_of_means(b, keeps * np.exp(p - b.behavior) * a)


def masked_sequences(b, p):
    """SkyRL: 0 where the geometric mean of π_prox/μ leaves the band."""
    level = np.exp(summed(b, b.proximal - b.behavior) / lengths(b))[:, None]
    return around_proximal(b, p, (level > 0.99) & (level < 1.01))


def truncated_sequences(b, p):
    """TRL's `sequence_mask`: R · 1[R ≤ 3], R the product of π_prox/μ over the completion."""
    product = np.exp(summed(b, b.proximal - b.behavior))[:, None]
    return around_proximal(b, p, np.where(product <= 3.0, product, 0.0))


def m2po(b, p):
    """The largest (log ρ)² of tokens that went with A are removed until the mean of the others is at most 0.04."""
    a, squares = z_scores(b), (b.policy - b.behavior) ** 2
    kept = b.mask.copy()
    pushed = sorted((squares[i, t], i, t) for i, t in np.argwhere(b.mask & (a * (b.policy - b.behavior) > 0)))
    while pushed and mean([square for square, _, _ in pushed]) > 0.04:
        _, i, t = pushed.pop()
        kept[i, t] = False
    return token_mean(b, kept * np.exp(p - b.behavior) * a)


def m2po_2025(b, p):
    """The largest bound on |log ρ| of tokens that went with A which keeps their mean min((log ρ)², b²) below 0.04."""
    a, shift = z_scores(b), b.policy - b.behavior
    pushed = b.mask & (a * shift > 0)
    squares = sorted(shift[pushed] ** 2)
    allowed = math.inf
    if squares and mean(squares) > 0.04:
        within = [bound for bound in squares if mean([min(bound, square) for square in squares]) < 0.04]
        allowed = max(within, default=-1.0)
    kept = ~pushed | (shift**2 <= allowed * (1 + 1e-9))
    return token_mean(b, kept * np.exp(p - b.behavior) * a)


def areal_second_moment(b, p):
    """The largest (log ρ)² are masked until the mean of the others is within 0.04."""
    squares = (b.policy - b.behavior) ** 2
    falling = sorted(squares[b.mask], reverse=True)
    while falling and mean(falling) > 0.04:
        falling.pop(0)
    kept = squares <= (falling[0] if falling else -1.0)
    return token_mean(b, kept * np.exp(p - b.behavior) * z_scores(b))


def clip_b(b, p, ddof=0):
    """GRPO's loss without tokens of A < 0 whose p(H + log p) is 2.5 standard deviations below its mean."""
    signal = np.exp(b.policy) * (b.entropy + b.policy)
    everything = signal[b.mask]
    low = signal - everything.mean() < -2.5 * everything.std()
    return grpo(b, p, z_scores(b, ddof), factor=~(low & (z_scores(b) < 0)))


def estr(b, p):
    kept = (b.policy - b.behavior) ** 2 / (b.entropy + 1e-3) <= 0.1
    return token_mean(b, kept * np.exp(p - b.behavior) * z_scores(b))


def bapo(b, p):
    """Bounds on ρ that rise, the upper one first, until tokens with A > 0 have half of the loss."""
    a, ratio, low, high = z_scores(b) * np.ones(b.mask.shape), rho(b), 0.6, 1.2

    def too_few():
        positive = (ratio * a)[b.mask & (a > 0) & (ratio <= high)].sum()
        negative = -(ratio * a)[b.mask & (a < 0) & (ratio >= low)].sum()
        return positive < 0.5 * (positive + negative)

    while too_few() and high < 3.0 - 1e-9:
        high += 0.05
    while too_few() and low < 0.9 - 1e-9:
        low += 0.02
    return grpo(b, p, low=1 - low, high=high - 1)


def clip_cov(b, p):
    """The token of the highest covariance of log π and A is left out; a share of 0.0002 is one token here."""
    a = z_scores(b) * np.ones(b.mask.shape)
    covariance = (a - a[b.mask].mean()) * (b.policy - b.policy[b.mask].mean())
    assert 0.0002 * b.mask.sum() < 1
    return grpo(b, p, factor=~(b.mask & (covariance >= covariance[b.mask].max())))


def high_entropy(b, p):
    """TRL: entropy at or above the batch's quantile of 0.8."""
    return grpo(b, p, high=0.28, factor=b.entropy >= np.quantile(b.entropy[b.mask], 0.8))


def gspo(b, p, reduce=mean_of_means, low=3e-4, high=4e-4):
    """s = (π(y)/μ(y))^(1/L) of the completion, clipped as PPO's."""
    ratio = np.exp(summed(b, p - b.behavior) / lengths(b))[..., None]
    return reduce(b, ppo(ratio, z_scores(b), low, high))


def gspo_token(b, p):
    """sg(s) π_t / sg(π_t) in the place of s."""
    whole = np.exp(summed(b, b.policy - b.behavior) / lengths(b))[:, None]
    return mean_of_means(b, ppo(whole * np.exp(p - b.policy), z_scores(b), 3e-4, 4e-4))


def rec_gspo(b, p):
    """Trinity's clip mode `gspo-one-side`, without weights."""
    a, whole = centered(b), np.exp(summed(b, b.policy - b.behavior) / lengths(b))[:, None]
    inside = (whole <= 1 + 4e-4) * (a >= 0) + (whole >= 1 - 3e-4) * (a <= 0) > 0
    return mean_of_means(b, a * p * inside)


def respo(b, p):
    """φ = φ₀ exp(2(1 − φ₀)), φ₀ half way between 1 and W where A ≥ 0, √W where A < 0."""
    a, whole = z_scores(b), np.exp(np.clip(whole_log_ratio(b), -20, 20))
    return token_mean(b, np.where(a >= 0, (1 + whole) / 2 * np.exp(1 - whole), half_power(whole)) * a * p)


def half_power(whole):
    return np.sqrt(whole) * np.exp(2 * (1 - np.sqrt(whole)))


def luspo(b, p):
    """TRL: GSPO's loss of a completion times its length."""
    ratio = np.exp(summed(b, p - b.behavior) / lengths(b))[..., None]
    of_rows = ppo(ratio, z_scores(b), 2e-3, 2.5e-3)[..., 0] * b.mask.sum(-1)
    return -of_rows.sum(-1) / b.kept.sum()


def gmpo(b, p, bound):
    """verl's geo_mean: a geometric mean of token ratios, each clipped as PPO's."""
    a = z_scores(b)
    sign, shift = np.sign(a), p - b.behavior
    clipped = sign * np.minimum(sign * shift, sign * np.clip(shift, -bound, bound))
    return -(a[:, 0] * np.exp(summed(b, clipped) / lengths(b))).sum(-1) / b.kept.sum()


def topr(b, p, log_ratio):
    """sg(α) A log π, α = π/μ within 0 and 1 where A is not above 0, else 1."""
    a = centered(b)
    return token_mean(b, np.where(a <= 0, np.exp(np.minimum(log_ratio, 0.0)), 1.0) * a * p)


def vespo(b, p):
    """TRL: sg(e^λ W^k e^(−λW)) A log π, W the completion's ratio."""
    a, log_whole = z_scores(b), np.clip(whole_log_ratio(b), math.log(1e-8), 20.0)
    power, decay = np.where(a >= 0, 2, 3), np.where(a >= 0, 3, 2)
    return token_mean(b, np.exp(decay + power * log_whole - decay * np.exp(log_whole)) * a * p)


def weighted(b, p, weight, a):
    """sg(weight) A log π."""
    return token_mean(b, weight * a * p)


def aspo(b, p):
    """ρ turned over where A > 0; PPO's hard mask; a soft cap of 3 on both sides."""
    a, ratio = z_scores(b), rho(b)
    up = np.where(ratio <= 1.2, np.minimum(1 / ratio, 3), 0.0)
    down = np.where(ratio >= 0.8, np.minimum(ratio, 3), 0.0)
    return weighted(b, p, np.where(a > 0, up, down), a)


def bpo(b, p):
    """min((1 + ε − μ)/(1 + ε − π), c) in the place of ρ, which PPO's mask still reads."""
    a, ratio = z_scores(b), rho(b)
    inside = np.where(a > 0, ratio <= 1.2, ratio >= 0.8)
    return weighted(b, p, np.minimum((1.2 - np.exp(b.behavior)) / (1.2 - np.exp(b.policy)), 5) * inside, a)


def sapo(b, p):
    """(4/τ) sigmoid(τ(ρ − 1)) A, with gradient through the gate."""
    a = z_scores(b)
    tau = np.where(a > 0, 1.0, 1.05)
    return mean_of_means(b, 4 / tau / (1 + np.exp(-tau * (np.exp(p - b.behavior) - 1))) * a)


def luffy(b, p, a, reduce=token_mean):
    """π/(π + 0.1) in the place of ρ on the completions of others, rewards above 0.5 here; no clip."""
    expert = np.exp(p) / (np.exp(p) + 0.1)
    return reduce(b, np.where((b.rewards > 0.5)[:, None], expert, np.exp(p - b.behavior)) * a)


def trust_region(b, p, kl):
    """A completion counts only if no token's KL estimate is above 0.05."""
    largest = np.where(b.mask, kl(b.policy - b.behavior), 0.0).max(-1)[:, None]
    return token_mean(b, (largest <= 0.05) * centered(b) * np.exp(p - b.behavior))


def chord(b, p, share=0.1, imitated_share=0.1):
    """(1 − m) of PPO's surrogate on own tokens, m of weighted cross-entropy on those with rewards above 0.5."""
    ratio = np.exp(p - b.behavior)
    surrogate = np.minimum(ratio * z_scores(b), np.clip(ratio, 0.8, 1.2) * z_scores(b))
    imitated = np.exp(b.policy) * (1 - np.exp(b.policy)) * p
    is_expert = (b.rewards > 0.5)[:, None]
    return token_mean(b, np.where(is_expert, imitated_share * imitated, (1 - share) * surrogate))


def effective_size(b):
    ratios = rho(b)[b.mask]
    return ratios.sum() ** 2 / (ratios**2).sum() / len(ratios)


def p3o(b, p):
    """sg(min(ρ, ESS)) A log π − (1 − ESS)(1/ρ + log ρ − 1)."""
    share, shift = effective_size(b), p - b.behavior
    pull = (1 - share) * (np.exp(-shift) + shift - 1)
    return token_mean(b, np.minimum(rho(b), share) * z_scores(b) * p - pull)


def a3po(b, p):
    between = b._replace(proximal=(b.policy + b.behavior) / 2)
    return around_proximal(between, p, np.exp(between.proximal - b.behavior))


def distributions(b, p):
    """Over three tokens, of which the sampled one is the first: the policy's and the teacher's."""

    def softmax(first, others):
        scores = np.exp(np.stack([first, *(np.full(first.shape, score) for score in others)], axis=-1))
        return scores / scores.sum(-1, keepdims=True)

    return softmax(p, OWN), softmax(b.reference, THEIRS)


def kl(p, q):
    return (p * np.log(p / q)).sum(-1)


def jensen_shannon(b, p, beta, weight=1.0, support=None):
    """support: whose most likely token, and all others as one, are compared; None: all tokens."""
    student, teacher = distributions(b, p)
    if support is not None:
        top = distributions(b, b.policy)[support].argmax(-1)
        is_top = np.arange(3) == top[..., None]
        student, teacher = (np.stack([(q * is_top).sum(-1), (q * ~is_top).sum(-1)], -1) for q in (student, teacher))
    mixture = beta * teacher + (1 - beta) * student
    return token_mean(b, weight * (-beta * kl(teacher, mixture) - (1 - beta) * kl(student, mixture)))


def echo(b, p, coefficient):
    observed = np.where(b.observed, -p, 0.0).sum((-2, -1)) / b.observed.sum()
    return grpo(b, p) + coefficient * observed


def score_centering(b, p, weight=lambda ratio: 1.0):
    """A [w log π(y) − Σ_{v∈H} (μ_v f(π_v/μ_v) − α f(1/α) π_v) log π(v)]; H: the last two of the three tokens."""
    policy, _ = distributions(b, b.policy)
    moved, behavior = distributions(b._replace(reference=b.behavior), p)
    alpha = (1 - behavior[..., 1:].sum(-1)) / (1 - policy[..., 1:].sum(-1))
    center = 0.0
    for v in (1, 2):
        own = behavior[..., v] * weight(policy[..., v] / behavior[..., v])
        center = center + (own - alpha * weight(1 / alpha) * policy[..., v]) * np.log(moved[..., v])
    return token_mean(b, centered(b) * (weight(rho(b)) * p - center))


def klpo(b, p, beta=0.1):
    """(R − β log ρ)(log π(y) − Σ_v μ(v) log π(v)), over the three tokens of the vocabulary."""
    moved, behavior = distributions(b._replace(reference=b.behavior), p)
    h = b.rewards[:, None] - beta * (b.policy - b.behavior)
    return mean_of_sums(b, h * (p - (behavior * np.log(moved)).sum(-1)))


def others_ratio(b):
    return (1 - np.exp(b.behavior)) / (1 - np.exp(b.policy))


def klpo_binary(b, p):
    return mean_of_sums(b, (b.rewards[:, None] - 0.1 * (b.policy - b.behavior)) * others_ratio(b) * p)


def klpo_sequence(b, p):
    """The gradient of D² / 2β, D = R − β Σ_t (log ρ_t + k_t), k_t the KL(μ ‖ π) of this token or another."""
    new, old = np.exp(p), np.exp(b.behavior)
    with np.errstate(divide="ignore", invalid="ignore"):  # outside of the mask
        others = (1 - old) * (np.log(1 - old) - np.log(1 - new))
    drift = p - b.behavior + old * (b.behavior - p) + others
    residual = np.where(b.kept, b.rewards - 0.1 * summed(b, drift), 0.0)
    return (residual**2).sum(-1) / (2 * 0.1) / b.kept.sum()


def zcpo(b, p, beta=0.1):
    divergence = summed(b, kl(*distributions(b, b.policy))) / lengths(b)

    def value(i):
        largest = max(abs(r - mean(rewards(b, i))) for r in rewards(b, i))
        if largest == 0:
            return 0.0
        drift = divergence[i] - mean([divergence[j] for j in group(b, i)])
        return (b.rewards[i] - mean(rewards(b, i))) / largest - beta * drift

    return token_mean(b, by_row(b, value) * p)


def cod(b, p):
    """Two turns of two and of all other tokens, with the reward and its square and 0.3 as rewards."""
    each = [b.rewards, b.rewards**2 + 0.3]
    first, last = centered(b._replace(rewards=(each[0] + each[1]) / 2)), centered(b._replace(rewards=each[1]))
    a = np.where(np.arange(b.mask.shape[1]) < 2, first, last)

    def imbalance(temperature):
        return (a * np.exp(a / temperature))[b.mask].sum()

    weight = 1.0
    if a[b.mask].sum() < 0:
        low, high = 0.8, 1e6
        for _ in range(200):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if imbalance(middle) < 0 else (middle, high)
        weight = np.exp(a / low)
    inside = (rho(b) <= 1.2) * (a >= 0) + (rho(b) >= 0.8) * (a <= 0) > 0
    return token_mean(b, a * weight * inside * p)


def offline_grpo(b, p):
    a = by_row(b, lambda i: 0.1 if min(rewards(b, i)) > 0.5 else b.rewards[i] - mean(rewards(b, i)))
    return token_mean(b, a * np.exp(p))


def distilled(b, p, weight=1.0):
    return token_mean(b, (b.reference - b.policy) * weight * p)


def prefix_weight(b):
    sizes = np.where(b.mask, np.abs(b.reference - b.policy), 0.0)
    share = np.zeros(b.mask.shape)
    for i in range(len(sizes)):
        for t in range(1, b.mask.shape[1]):
            share[i, t] = sizes[i, :t].sum() / max(sizes[i].sum(), 1e-300)
    return 1 + 0.5 * (1 - share)


def trusted(b):
    """Within 0.2 of μ, or on the way back to it."""
    moved = np.exp(b.policy) - np.exp(b.behavior)
    return np.where(b.reference > b.policy, moved <= 0.2, moved >= -0.2)


OBJECTIVES = {
    "reinforce": lambda b, p: trinity(b, p, True, 1.0),
    "grpo": grpo,
    "rec_one_side_is": lambda b, p: trinity_one_side(b, p, rho(b)),
    "rec_one_side_nois": lambda b, p: trinity_one_side(b, p, 1.0),
    "rec_two_side_is": lambda b, p: trinity_two_side(b, p, rho(b)),
    "rec_two_side_nois": lambda b, p: trinity_two_side(b, p, 1.0),
    "rec_ring_is": lambda b, p: trinity_ring(b, p, rho(b)),
    "rec_ring_nois": lambda b, p: trinity_ring(b, p, 1.0),
    "asymre": lambda b, p: token_mean(b, centered(b) * p + 0.1 * p),
    "opmd": opmd,
    "opmd_token": lambda b, p: trinity_k2(b, p, 0.05),
    "red_drop": red_drop,
    "red_weight": lambda b, p: token_mean(b, centered(b) * np.exp(centered(b)) * p),
    "pairwise_consistency": lambda b, p: pairwise(b, p, b.behavior),
    "rloo": lambda b, p: token_mean(b, rloo_advantages(b) * p),
    "dr_grpo": lambda b, p: grpo(b, p, centered(b), mean_of_sums),
    "reinforce_pp": lambda b, p: grpo(b, p, whitened(b, b.rewards[:, None])),
    "reinforce_pp_baseline": lambda b, p: grpo(b, p, whitened(b, centered(b))),
    "lite_ppo": lambda b, p: grpo(b, p, over_batch_deviation(b)),
    "opo": lambda b, p: token_mean(b, opo_advantages(b) * p),
    "gpg": lambda b, p: token_mean(b, gpg_advantages(b) * p),
    "maxrl": lambda b, p: token_mean(b, maxrl_advantages(b) * p),
    "gdpo": lambda b, p: grpo(b, p, gdpo_advantages(b)),
    "oapl": lambda b, p: regression(b, p, 1.0, 1.0),
    "dapo": lambda b, p: grpo(b, p, high=0.28),
    "dual_clip_ppo": dual_clip,
    "icepop": intellect,
    "dppo_tv": lambda b, p: dppo(b, p, total_variation(b), 20.0),
    "dppo_kl": lambda b, p: dppo(b, p, within_kl(b), 20.0),
    "dppo_tv_kl": dppo_tv_kl,
    "ipo": lambda b, p: dppo(b, p, np.abs(np.exp(b.policy) - np.exp(b.behavior)) <= 0.3, 1e4),
    "trm": lambda b, p: trust_region(b, p, lambda x: np.exp(x) - 1 - x),
    "chord": chord,
    "score_centering": score_centering,
    "klpo": klpo,
    "zcpo": zcpo,
    "cod": cod,
    "offline_grpo": offline_grpo,
    "bpo": bpo,
    "estr": estr,
    "clip_b": clip_b,
    "rec_gspo_nois": rec_gspo,
    "respo": respo,
    "tba": lambda b, p: pairwise(b, p, b.reference),
    "kimi_k15": opmd,
    "kimi_k25": kimi_k25,
    "opsm": lambda b, p: grpo(b, p, factor=opsm_keeps(b, 0.5)),
    "flash_reinforce": lambda b, p: flash_reinforce(b, p, 5e-3),
    "mis": masked_sequences,
    "m2po": m2po,
    "bapo": bapo,
    "clip_cov": clip_cov,
    "high_entropy": high_entropy,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "luspo": luspo,
    "gmpo": lambda b, p: gmpo(b, p, 0.4),
    "topr": lambda b, p: topr(b, p, whole_log_ratio(b)),
    "vespo": vespo,
    "cispo": lambda b, p: weighted(b, p, np.minimum(rho(b), 5.0), z_scores(b)),
    "aspo": aspo,
    "sapo": sapo,
    "luffy": lambda b, p: luffy(b, p, z_scores(b)),
    "p3o": p3o,
    "tis": lambda b, p: around_proximal(b, p, np.minimum(np.exp(b.proximal - b.behavior), 2.0)),
    "decoupled_ppo": lambda b, p: around_proximal(b, p, np.exp(b.proximal - b.behavior)),
    "a3po": a3po,
    "on_policy_distillation": distilled,
    "logit_distillation": lambda b, p: token_mean(b, -kl(*distributions(b, p))),
    "sdpo": lambda b, p: jensen_shannon(b, p, 0.5, np.minimum(rho(b), 2.0), support=0),
    "echo": lambda b, p: echo(b, p, 0.05),
}
LENGTH = 7  # N in a note
# (preset, overrides in its note) → the other form that the note promises.
OTHER_FORMS = {
    ("grpo", "reduction={name: sequence_mean_token_mean}"): lambda b, p: grpo(b, p, reduce=mean_of_means),
    ("grpo", "advantage={ddof: 1}"): lambda b, p: grpo(b, p, z_scores(b, ddof=1)),
    ("opmd", "regularizer={name: squared_log_ratio_per_token, tau: 0.2}"): lambda b, p: trinity_k2(b, p, 0.1),
    ("opmd_token", "regularizer={tau: 0.2}"): lambda b, p: trinity_k2(b, p, 0.1),
    ("dr_grpo", "reduction={name: fixed_length, length: N}"): lambda b, p: (
        grpo(b, p, centered(b), mean_of_sums) / LENGTH
    ),
    ("reinforce_pp", "advantage={over: tokens}"): lambda b, p: grpo(b, p, whitened(b, b.rewards[:, None], "tokens")),
    ("reinforce_pp", "advantage={over: tokens, ddof: 1}"): lambda b, p: grpo(
        b, p, whitened(b, b.rewards[:, None], "tokens", 1)
    ),
    ("reinforce_pp_baseline", "reference_kl={coefficient: 1e-5, estimator: k2}"): lambda b, p: (
        grpo(b, p, whitened(b, centered(b))) + token_mean(b, -1e-5 * (p - b.reference) ** 2 / 2)
    ),
    ("gdpo", "advantage={over: tokens, ddof: 1}"): lambda b, p: grpo(b, p, gdpo_advantages(b, "tokens", 1)),
    ("gdpo", "advantage={ddof: 1}"): lambda b, p: grpo(b, p, gdpo_advantages(b, ddof=1)),
    ("oapl", "advantage={beta: 0.5}, regularizer={tau: 1e-3}"): lambda b, p: regression(b, p, 0.5, 1e-3),
    (
        "icepop",
        "advantage={name: group_normalized}, anchor={name: proximal}, clip={name: one_side}, correction={name: banded},"
        " reduction={name: sequence_mean_token_mean}",
    ): ring,
    ("dppo_tv", "clip={delta: 0.15}, weight={cap: 1e4}"): lambda b, p: dppo(b, p, total_variation(b, 0.15), 1e4),
    ("dppo_tv", "weight={cap: 3}"): lambda b, p: dppo(b, p, total_variation(b), 3.0),
    ("dppo_kl", "weight={cap: 1e4}"): lambda b, p: dppo(b, p, within_kl(b), 1e4),
    ("opsm", "mask={delta: 1e-4}"): lambda b, p: grpo(b, p, factor=opsm_keeps(b, 1e-4)),
    ("opsm", "reduction={name: sequence_mean_token_mean}"): lambda b, p: grpo(
        b, p, reduce=mean_of_means, factor=opsm_keeps(b, 0.5)
    ),
    ("flash_reinforce", "mask={delta: 0.01}"): lambda b, p: flash_reinforce(b, p, 0.01),
    ("mis", "correction={name: sequence_banded, high: 3.0}, mask={name: none}"): truncated_sequences,
    ("m2po", "mask={name: second_moment}"): areal_second_moment,
    ("m2po", "mask={dropped: bounded}"): m2po_2025,
    ("clip_b", "advantage={ddof: 1}"): lambda b, p: clip_b(b, p, 1),
    ("offline_grpo", "reference_kl={coefficient: 0.1}"): lambda b, p: (
        offline_grpo(b, p) - token_mean(b, 0.1 * (np.exp(b.reference - p) - (b.reference - p) - 1))
    ),
    ("klpo", "score_centering={coefficient: 0.0}, weight={name: complement, epsilon: 0.0, cap: 1e4}"): klpo_binary,
    (
        "klpo",
        "log_ratio_penalty={level: completion}, score_centering={coefficient: 0.0}, weight={name: complement, epsilon:"
        " 0.0, cap: 1e4}",
    ): klpo_sequence,
    ("klpo", "log_ratio_penalty={coefficient: 1e-3}"): lambda b, p: klpo(b, p, 1e-3),
    ("on_policy_distillation", "clip={name: probability_difference}, weight={name: importance}"): lambda b, p: (
        distilled(b, p, rho(b) * trusted(b))
    ),
    ("on_policy_distillation", "distillation={prefix_weight: 0.5}"): lambda b, p: distilled(b, p, prefix_weight(b)),
    ("sdpo", "teacher_divergence={support: teacher}"): lambda b, p: jensen_shannon(
        b, p, 0.5, np.minimum(rho(b), 2.0), support=1
    ),
    (
        "gmpo",
        "ratio={epsilon_low: 0.2, epsilon_high: 0.2}, clip={epsilon_low: 0.2, epsilon_high: 0.2}",
    ): lambda b, p: gmpo(b, p, 0.2),
    ("topr", "ratio={name: token}"): lambda b, p: topr(b, p, b.policy - b.behavior),
    ("cispo", "weight={name: bounded, low: 0.8, high: 1.2}"): lambda b, p: weighted(
        b, p, np.clip(rho(b), 0.8, 1.2), z_scores(b)
    ),
    ("cispo", "advantage={name: batch_deviation}"): lambda b, p: weighted(
        b, p, np.minimum(rho(b), 5.0), over_batch_deviation(b)
    ),
    ("luffy", "advantage={name: group_mean}, reduction={name: fixed_length, length: N}"): lambda b, p: (
        luffy(b, p, centered(b), mean_of_sums) / LENGTH
    ),
    ("p3o", "advantage={name: group_mean}, regularizer={name: none}"): lambda b, p: weighted(
        b, p, np.minimum(rho(b), effective_size(b)), centered(b)
    ),
    ("logit_distillation", "teacher_divergence={kind: forward_kl}"): lambda b, p: token_mean(
        b, -kl(*distributions(b, p)[::-1])
    ),
    ("chord", "regularizer={share: 0.7}"): lambda b, p: chord(b, p, imitated_share=0.7),
    ("logit_distillation", "teacher_divergence={kind: jsd, beta: 0.1}"): lambda b, p: jensen_shannon(b, p, 0.1),
    ("score_centering", "weight={name: truncated, cap: 2.0}"): lambda b, p: score_centering(
        b, p, lambda ratio: np.minimum(ratio, 2.0)
    ),
    ("trm", "mask={estimator: k2}"): lambda b, p: trust_region(b, p, lambda x: x**2 / 2),
    ("echo", "observations={coefficient: 0.1}"): lambda b, p: echo(b, p, 0.1),
}
