"""What multiplies ∇log π of each token, for every preset of the field: from the formulas, by loops, in float64 NumPy.

Nothing of the package is used here but the shape of an example.
"""

import functools
import math

import numpy as np

from tests.algorithms.examples import OWN, THEIRS, Example, members


class Field:
    """An example in float64, and the sums that the formulas share."""

    def __init__(self, example: Example):
        self.mask, self.ids = example.completion_mask, example.group_ids
        self.real = self.mask.any(-1)
        self.lengths = self.mask.sum(-1)
        self.rewards = np.where(self.real, example.rewards, 0).astype(float)
        self.logprobs, self.behavior, self.teacher, self.entropy = (
            np.where(self.mask, array, 0).astype(float)
            for array in (example.logprobs, example.behavior_logprobs, example.reference_logprobs, example.entropy)
        )
        self.foreign = example.rewards > 0.5
        self.tokens = [tuple(place) for place in np.argwhere(self.mask)]
        self.rows = [int(row) for row in np.flatnonzero(self.real)]

    @functools.cache  # noqa: B019
    def group(self, i):
        return members(self.ids, self.real, i)

    def log_rho(self, i, t):
        return self.logprobs[i, t] - self.behavior[i, t]

    @functools.cache  # noqa: B019
    def rho(self, i, t):
        return math.exp(self.log_rho(i, t))

    @functools.cache  # noqa: B019
    def sum_log_rho(self, i):
        return sum(self.log_rho(i, t) for t in range(self.mask.shape[1]) if self.mask[i, t])

    @functools.cache  # noqa: B019
    def mean(self, i):
        return sum(self.rewards[j] for j in self.group(i)) / len(self.group(i))

    @functools.cache  # noqa: B019
    def centered(self, i):
        return self.rewards[i] - self.mean(i)

    @functools.cache  # noqa: B019
    def normalized(self, i):
        deviation = math.sqrt(sum((self.rewards[j] - self.mean(i)) ** 2 for j in self.group(i)) / len(self.group(i)))
        return self.centered(i) / (deviation + 1e-6)

    def whitened(self, values):
        """By row, over the rows that are real."""
        mean = sum(values[i] for i in self.rows) / len(self.rows)
        deviation = math.sqrt(sum((values[i] - mean) ** 2 for i in self.rows) / len(self.rows))
        return {i: (values[i] - mean) / (deviation + 1e-6) for i in self.rows}


def one_side(ratio, advantage, low=0.2, high=0.2):
    """PPO's: 0 where the ratio is beyond the range and the advantage pushes farther."""
    return 0.0 if (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low) else 1.0


def ppo(x, i, t, advantage, low=0.2, high=0.2):
    return x.rho(i, t) * advantage * one_side(x.rho(i, t), advantage, low, high)


def rloo(x, i, t):
    others = [x.rewards[j] for j in x.group(i) if j != i]
    return x.rewards[i] - sum(others) / len(others) if others else 0.0


def reinforce_pp(x, i, t):
    return ppo(x, i, t, x.whitened(x.rewards)[i])


def reinforce_pp_baseline(x, i, t):
    return ppo(x, i, t, x.whitened({j: x.centered(j) for j in x.rows})[i])


def lite_ppo(x, i, t):
    mean = sum(x.rewards[j] for j in x.rows) / len(x.rows)
    deviation = math.sqrt(sum((x.rewards[j] - mean) ** 2 for j in x.rows) / len(x.rows))
    return ppo(x, i, t, x.centered(i) / (deviation + 1e-6))


def opo(x, i, t):
    return x.rewards[i] - sum(x.lengths[j] * x.rewards[j] for j in x.group(i)) / sum(x.lengths[j] for j in x.group(i))


def gpg(x, i, t):
    groups = {int(x.ids[j]): [x.rewards[k] for k in x.group(j)] for j in x.rows}
    signal = sum(max(rewards) > min(rewards) for rewards in groups.values())
    return x.centered(i) * len(groups) / max(signal, 1)


def maxrl(x, i, t):
    return x.centered(i) / x.mean(i) if x.mean(i) > 0 else 0.0


def gdpo(x, i, t):
    # The parts of the examples: the reward, and, where that is not above 0.9, a quarter of the length at half weight.
    total = dict.fromkeys(x.rows, 0.0)
    parts = [(1.0, x.rewards, x.rows), (0.5, x.lengths / 4, [j for j in x.rows if not x.rewards[j] > 0.9])]
    for weight, values, there in parts:
        for j in there:
            group = [values[k] for k in x.group(j) if k in there]
            total[j] += weight * (values[j] - np.mean(group)) / (np.std(group) + 1e-6)
    return ppo(x, i, t, x.whitened(total)[i])


def oapl(x, i, t):
    group = x.group(i)
    baseline = math.log(sum(math.exp(x.rewards[j]) for j in group) / len(group))
    return x.rewards[i] - baseline - x.sum_log_rho(i)


def dual_clip_ppo(x, i, t):
    advantage = x.normalized(i)
    return 0.0 if advantage < 0 and x.rho(i, t) > 3 else ppo(x, i, t, advantage)


def icepop(x, i, t):
    return x.rho(i, t) * x.centered(i) if 0.5 <= x.rho(i, t) <= 5 else 0.0


def dppo_tv(x, i, t, cap=20.0):
    advantage, moved = x.centered(i), math.exp(x.logprobs[i, t]) - math.exp(x.behavior[i, t])
    gone = (advantage > 0 and moved > 0.2) or (advantage < 0 and moved < -0.2)
    return 0.0 if gone else min(x.rho(i, t), cap) * advantage


def dppo_kl(x, i, t):
    advantage, new, old = x.centered(i), math.exp(x.logprobs[i, t]), math.exp(x.behavior[i, t])
    new = min(new, 1 - 1e-12)
    kl = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
    away = (advantage > 0 and x.rho(i, t) > 1) or (advantage < 0 and x.rho(i, t) < 1)
    return 0.0 if away and kl > 0.05 else min(x.rho(i, t), 20) * advantage


def kimi_k25(x, i, t):
    inside = 0.8 <= x.rho(i, t) <= 1.2
    return x.rho(i, t) * x.centered(i) * inside - 0.2 * x.log_rho(i, t)


def opsm(x, i, t):
    gone = x.normalized(i) < 0 and -x.sum_log_rho(i) / x.lengths[i] > 0.5
    return 0.0 if gone else ppo(x, i, t, x.normalized(i))


def flash_reinforce(x, i, t):
    total = 0.0
    for u in np.flatnonzero(x.mask[i]):
        new, old = min(math.exp(x.logprobs[i, u]), 1 - 1e-12), math.exp(x.behavior[i, u])
        total += old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
    mean = sum(x.rewards[j] for j in x.rows) / len(x.rows)
    return 0.0 if total / x.lengths[i] > 5e-3 else x.rho(i, t) * (x.rewards[i] - mean)


def mis(x, i, t):
    inside = 0.99 <= math.exp(x.sum_log_rho(i) / x.lengths[i]) <= 1.01
    return x.normalized(i) if inside else 0.0


def m2po(x, i, t):
    def pushed(j, u):
        return x.normalized(j) * x.log_rho(j, u) > 0

    squares = sorted(x.log_rho(*place) ** 2 for place in x.tokens if pushed(*place))
    while squares and sum(squares) > 0.04 * len(squares):
        squares.pop()
    bound = squares[-1] if squares else -1.0
    kept = not pushed(i, t) or x.log_rho(i, t) ** 2 <= bound + 1e-9
    return x.rho(i, t) * x.normalized(i) * kept


@functools.cache
def bapo_bounds(x):
    low, high = 0.6, 1.2

    def share():
        inside = [(x.normalized(j), x.rho(j, u)) for j, u in x.tokens]
        positive = sum(ratio * size for size, ratio in inside if size > 0 and ratio <= high)
        negative = sum(-ratio * size for size, ratio in inside if size < 0 and ratio >= low)
        return positive / (positive + negative) if positive + negative else 1.0

    while share() < 0.5 and (low < 0.9 - 1e-9 or high < 3 - 1e-9):
        if high < 3 - 1e-9:
            high = min(high + 0.05, 3.0)
        else:
            low = min(low + 0.02, 0.9)
    return low, high


def bapo(x, i, t):
    low, high = bapo_bounds(x)
    return ppo(x, i, t, x.normalized(i), 1 - low, high - 1)


def clip_cov(x, i, t):
    mean_logprob = np.mean([x.logprobs[place] for place in x.tokens])
    mean_advantage = np.mean([x.normalized(j) for j, _ in x.tokens])

    def covariance(j, u):
        return (x.logprobs[j, u] - mean_logprob) * (x.normalized(j) - mean_advantage)

    count = math.ceil(0.0002 * len(x.tokens))
    last = sorted((covariance(*place) for place in x.tokens), reverse=True)[count - 1]
    return 0.0 if covariance(i, t) >= last - 1e-9 else ppo(x, i, t, x.normalized(i))


def high_entropy(x, i, t):
    count = math.ceil(0.2 * len(x.tokens) - 1e-9)
    last = sorted((x.entropy[place] for place in x.tokens), reverse=True)[count - 1]
    return ppo(x, i, t, x.normalized(i), 0.2, 0.28) if x.entropy[i, t] >= last else 0.0


def gspo(x, i, t, low=3e-4, high=4e-4):
    ratio = math.exp(x.sum_log_rho(i) / x.lengths[i])
    return ratio * x.normalized(i) * one_side(ratio, x.normalized(i), low, high)


def gmpo(x, i, t):
    advantage, total = x.normalized(i), 0.0
    for u in range(x.mask.shape[1]):
        if x.mask[i, u]:
            value = x.log_rho(i, u)
            total += min(value, 0.4) if advantage >= 0 else max(value, -0.4)
    here = x.log_rho(i, t)
    clipped = (advantage > 0 and here > 0.4) or (advantage < 0 and here < -0.4)
    return 0.0 if clipped else math.exp(total / x.lengths[i]) * advantage


def topr(x, i, t):
    advantage = x.centered(i)
    return advantage if advantage >= 0 else min(math.exp(x.sum_log_rho(i)), 1) * advantage


def vespo(x, i, t):
    advantage, ratio = x.normalized(i), math.exp(x.sum_log_rho(i))
    power, decay = (2, 3) if advantage > 0 else (3, 2)
    return ratio**power * math.exp(decay * (1 - ratio)) * advantage


def aspo(x, i, t):
    advantage, ratio = x.normalized(i), x.rho(i, t)
    return min(1 / ratio if advantage > 0 else ratio, 3) * advantage * one_side(ratio, advantage)


def sapo(x, i, t):
    advantage, ratio = x.normalized(i), x.rho(i, t)
    tau = 1.0 if advantage > 0 else 1.05
    # The objective is (4/τ) σ(τ(ρ−1)) A, and this its derivative by ρ times that of ρ by log π, by differences.
    step = 1e-6

    def objective(value):
        return 4 / tau / (1 + math.exp(-tau * (value - 1))) * advantage

    return (objective(ratio + step) - objective(ratio - step)) / (2 * step) * ratio


def luffy(x, i, t):
    probability = math.exp(x.logprobs[i, t])
    expert = 0.1 * probability / (probability + 0.1) ** 2
    return (expert if x.foreign[i] else x.rho(i, t)) * x.normalized(i)


def p3o(x, i, t):
    ratios = [x.rho(*place) for place in x.tokens]
    share = sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))
    return min(x.rho(i, t), share) * x.normalized(i) - (1 - share) * (1 - 1 / x.rho(i, t))


def from_half_way(x, i, t):
    """PPO on π/π_prox times π_prox/μ, with log π_prox half way between log μ and log π."""
    half = math.exp(x.log_rho(i, t) / 2)
    return half * half * x.normalized(i) * one_side(half, x.normalized(i))


def logit_distillation(x, i, t, coefficient=1.0):
    """−d KL(q ‖ p) / d score of q's first of three tokens."""
    q, p = (np.exp([array[i, t], *fixed]) for array, fixed in ((x.logprobs, OWN), (x.teacher, THEIRS)))
    q, p = q / q.sum(), p / p.sum()
    kl = sum(a * math.log(a / b) for a, b in zip(q, p, strict=True))
    return -coefficient * q[0] * (math.log(q[0] / p[0]) - kl)


def sdpo(x, i, t):
    """−min(ρ, 2) d JSD(q, p) / d score of q's first of three tokens."""
    q, p = (np.exp([array[i, t], *fixed]) for array, fixed in ((x.logprobs, OWN), (x.teacher, THEIRS)))
    q, p = q / q.sum(), p / p.sum()
    slopes = [math.log(2 * a / (a + b)) / 2 for a, b in zip(q, p, strict=True)]
    return -min(x.rho(i, t), 2) * q[0] * (slopes[0] - sum(a * slope for a, slope in zip(q, slopes, strict=True)))


def ipo(x, i, t):
    distance = abs(math.exp(x.logprobs[i, t]) - math.exp(x.behavior[i, t]))
    return min(x.rho(i, t), 1e4) * x.centered(i) * (distance <= 0.3)


def trm(x, i, t):
    places = [time for time in range(x.mask.shape[1]) if x.mask[i, time]]
    is_near = all(x.rho(i, time) - 1 - x.log_rho(i, time) <= 0.05 for time in places)
    return x.rho(i, t) * x.centered(i) * is_near


def chord(x, i, t):
    probability = math.exp(x.logprobs[i, t])
    return 0.1 * probability * (1 - probability) if x.foreign[i] else 0.9 * ppo(x, i, t, x.normalized(i))


def score_centering(x, i, t):
    """Top tokens are the last two of three; only the first one's score is that of the token."""

    def distribution(first, others):
        shares = [math.exp(first), *(math.exp(score) for score in others)]
        return [share / sum(shares) for share in shares]

    policy = distribution(x.logprobs[i, t], OWN)
    behavior = distribution(x.behavior[i, t], THEIRS)
    center = sum(behavior[v] - behavior[0] / policy[0] * policy[v] for v in (1, 2))
    return x.centered(i) * (1 + policy[0] * center)


def klpo(x, i, t):
    """Top tokens are the last two of three, so that all others are the first, whose score is that of the token."""
    policy, behavior = (
        np.exp([first, *others]) / sum(np.exp([first, *others]))
        for first, others in ((x.logprobs[i, t], OWN), (x.behavior[i, t], THEIRS))
    )
    # d log π_v / d score of the first token is 1[v = 0] − π_0.
    mean = sum(behavior[v] * ((v == 0) - policy[0]) for v in range(3))
    return (x.rewards[i] - 0.1 * x.log_rho(i, t)) * (1 - mean)


@functools.cache
def reference_kl(x, i):
    total = 0.0
    for t in np.flatnonzero(x.mask[i]):
        q, p = (np.exp([array[i, t], *fixed]) for array, fixed in ((x.logprobs, OWN), (x.teacher, THEIRS)))
        q, p = q / q.sum(), p / p.sum()
        total += sum(a * math.log(a / b) for a, b in zip(q, p, strict=True))
    return total / x.lengths[i]


def zcpo(x, i, t):
    largest = max(abs(x.centered(j)) for j in x.group(i))
    if largest < 1e-12:
        return 0.0
    drift = reference_kl(x, i) - sum(reference_kl(x, j) for j in x.group(i)) / len(x.group(i))
    return x.centered(i) / largest - 0.1 * drift


@functools.cache
def turn_advantages(x):
    """Mean rewards from either of two turns on, minus the group's."""
    returns = {j: ((x.rewards[j] + x.rewards[j] ** 2 + 0.3) / 2, x.rewards[j] ** 2 + 0.3) for j in x.rows}

    def value(i, k):
        return returns[i][k] - sum(returns[j][k] for j in x.group(i)) / len(x.group(i))

    return {(i, t): value(i, min(t // 2, 1)) for i, t in x.tokens}


@functools.cache
def balancing_temperature(x):
    values = turn_advantages(x).values()
    if sum(values) >= 0:
        return math.inf
    low, high = math.log(0.8), math.log(1e6)
    for _ in range(100):
        middle = (low + high) / 2
        is_low = sum(a * math.exp(a / math.exp(middle)) for a in values) >= 0
        low, high = (middle, high) if is_low else (low, middle)
    return math.exp(low)


def cod(x, i, t):
    advantage = turn_advantages(x)[i, t]
    return advantage * math.exp(advantage / balancing_temperature(x)) * one_side(x.rho(i, t), advantage)


def offline_grpo(x, i, t):
    is_solved = min(x.rewards[j] for j in x.group(i)) > 0.5
    return math.exp(x.logprobs[i, t]) * (0.1 if is_solved else x.centered(i))


def bpo(x, i, t):
    weight = min((1.2 - math.exp(x.behavior[i, t])) / max(1.2 - math.exp(x.logprobs[i, t]), 1e-30), 5)
    return weight * x.normalized(i) * one_side(x.rho(i, t), x.normalized(i))


def estr(x, i, t):
    return x.rho(i, t) * x.normalized(i) * (x.log_rho(i, t) ** 2 <= 0.1 * (x.entropy[i, t] + 1e-3))


def clip_b(x, i, t):
    def signal(place):
        return math.exp(x.logprobs[place]) * (x.entropy[place] + x.logprobs[place])

    everything = [signal(place) for place in x.tokens]
    is_low = signal((i, t)) - np.mean(everything) < -2.5 * np.std(everything)
    return 0.0 if is_low and x.normalized(i) < 0 else ppo(x, i, t, x.normalized(i))


def rec_gspo_nois(x, i, t):
    return x.centered(i) * one_side(math.exp(x.sum_log_rho(i) / x.lengths[i]), x.centered(i), 3e-4, 4e-4)


def respo(x, i, t):
    whole, advantage = math.exp(x.sum_log_rho(i)), x.normalized(i)
    if advantage >= 0:
        return (1 + whole) / 2 * math.exp(1 - whole) * advantage
    return math.sqrt(whole) * math.exp(2 * (1 - math.sqrt(whole))) * advantage


def tba(x, i, t):
    """2/K (a − ā), by completion, a = r − log π/π_ref."""

    def agreement(j):
        return x.rewards[j] - sum(x.logprobs[j, u] - x.teacher[j, u] for u in np.flatnonzero(x.mask[j]))

    group = x.group(i)
    return 2 / len(group) * (agreement(i) - sum(map(agreement, group)) / len(group))


# The proximal policy of these examples is the policy itself, as in a run: its ratio is one and nothing is clipped.
COEFFICIENTS = {
    "rloo": rloo,
    "dr_grpo": lambda x, i, t: ppo(x, i, t, x.centered(i)),
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "lite_ppo": lite_ppo,
    "opo": opo,
    "gpg": gpg,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "oapl": oapl,
    "dapo": lambda x, i, t: ppo(x, i, t, x.normalized(i), 0.2, 0.28),
    "dual_clip_ppo": dual_clip_ppo,
    "icepop": icepop,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dppo_tv_kl": lambda x, i, t: dppo_tv(x, i, t, math.inf) - 2e-3 * x.log_rho(i, t),
    "ipo": ipo,
    "trm": trm,
    "chord": chord,
    "score_centering": score_centering,
    "klpo": klpo,
    "zcpo": zcpo,
    "cod": cod,
    "offline_grpo": offline_grpo,
    "bpo": bpo,
    "estr": estr,
    "clip_b": clip_b,
    "rec_gspo_nois": rec_gspo_nois,
    "respo": respo,
    "tba": tba,
    "kimi_k15": lambda x, i, t: x.centered(i) - 0.1 * x.sum_log_rho(i),
    "kimi_k25": kimi_k25,
    "opsm": opsm,
    "flash_reinforce": flash_reinforce,
    "mis": mis,
    "m2po": m2po,
    "bapo": bapo,
    "clip_cov": clip_cov,
    "high_entropy": high_entropy,
    "gspo": gspo,
    "gspo_token": gspo,
    "luspo": lambda x, i, t: gspo(x, i, t, 2e-3, 2.5e-3),
    "gmpo": gmpo,
    "topr": topr,
    "vespo": vespo,
    "cispo": lambda x, i, t: min(x.rho(i, t), 5) * x.normalized(i),
    "aspo": aspo,
    "sapo": sapo,
    "luffy": luffy,
    "p3o": p3o,
    "tis": lambda x, i, t: min(x.rho(i, t), 2) * x.normalized(i),
    "decoupled_ppo": lambda x, i, t: x.rho(i, t) * x.normalized(i),
    "a3po": from_half_way,
    "on_policy_distillation": lambda x, i, t: x.teacher[i, t] - x.logprobs[i, t],
    "logit_distillation": logit_distillation,
    "sdpo": sdpo,
    "echo": lambda x, i, t: ppo(x, i, t, x.normalized(i)),
}
MEANS_OF_ROWS = {"flash_reinforce", "gspo", "gspo_token", "gmpo", "rec_gspo_nois", "sapo"}
SUMS_OF_ROWS = {"dr_grpo", "klpo", "luspo"}
MEANS_OF_GROUPS = {"tba"}


def gradient_by_hand(name, example: Example, observations):
    """d sum / d logprobs of a preset's loss, and the count; `observations` masks the environment's tokens."""
    x = Field(example)
    gradient = np.zeros(x.mask.shape)
    for i, t in x.tokens:
        gradient[i, t] = -COEFFICIENTS[name](x, i, t) / (x.lengths[i] if name in MEANS_OF_ROWS else 1)
    if name == "echo" and observations.any():
        gradient -= 0.05 * len(x.tokens) / observations.sum() * observations
    if name in MEANS_OF_GROUPS:
        return gradient, len({int(x.ids[i]) for i in x.rows})
    return gradient, len(x.rows) if name in MEANS_OF_ROWS | SUMS_OF_ROWS else len(x.tokens)
