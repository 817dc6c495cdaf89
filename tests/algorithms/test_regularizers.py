"""Added terms: by loops, their gradients, and junk where masked."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from recjax.algorithms import regularizers
from tests.algorithms.examples import called, make_example
from tests.marks import slow

EXAMPLE = make_example()
MASK = EXAMPLE.completion_mask
LOG_RATIO = np.where(MASK, EXAMPLE.logprobs - EXAMPLE.behavior_logprobs, 0).astype(np.float64)
LENGTHS = np.maximum(MASK.sum(-1, keepdims=True), 1)
ROW = LOG_RATIO.sum(-1, keepdims=True)
# name → value of each token, derivative of the batch's sum by the token's log-probability
CASES = {
    "log_likelihood_bonus": (-0.1 * EXAMPLE.logprobs, np.full(MASK.shape, -0.1)),
    "squared_log_ratio_per_token": (0.05 * LOG_RATIO**2, 0.1 * LOG_RATIO),
    "squared_log_ratio_per_completion": (0.05 * ROW**2 / LENGTHS, np.broadcast_to(0.1 * ROW, MASK.shape)),
}


def junk(array, value=np.nan):
    return jnp.asarray(np.where(MASK, array, np.float32(value)))


class RegularizerVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, with_pmap=True)
    @parameterized.named_parameters(*((name, name) for name in CASES))
    def test_value_and_gradient(self, name):
        function = getattr(regularizers, name)

        def value_and_gradient(logprobs, behavior, mask):
            def value(x):
                values = {"logprobs": x, "behavior_logprobs": behavior, "completion_mask": mask}
                return called(function, values)

            return value(logprobs), jax.grad(lambda x: value(x).sum())(logprobs)

        inputs = junk(EXAMPLE.logprobs), junk(EXAMPLE.behavior_logprobs, np.inf), jnp.asarray(MASK)
        got = self.variant(value_and_gradient)(*inputs)
        expected = tuple(np.where(MASK, x, 0).astype(np.float32) for x in CASES[name])
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", lambda d: -d, lambda d: np.ones_like(d)),
        ("k2", lambda d: d**2 / 2, lambda d: -d),
        ("k3", lambda d: np.exp(d) - d - 1, lambda d: 1 - np.exp(d)),
    ],
)
def test_reference_kl_and_the_gradients_that_its_docstring_states(estimator, value, gradient):
    difference = np.where(MASK, EXAMPLE.reference_logprobs - EXAMPLE.logprobs, 0).astype(np.float64)

    def penalty(logprobs):
        reference = junk(EXAMPLE.reference_logprobs, -np.inf)
        options = {"coefficient": 0.5, "estimator": estimator}
        return regularizers.reference_kl_penalty(logprobs, reference, jnp.asarray(MASK), **options)

    both = jax.jit(lambda x: (penalty(x), jax.grad(lambda y: penalty(y).sum())(x)))
    got, derivative = both(junk(EXAMPLE.logprobs))
    close = dict(rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got, np.where(MASK, 0.5 * value(difference), 0), **close)
    np.testing.assert_allclose(derivative, np.where(MASK, 0.5 * gradient(difference), 0), **close)


def test_k3_keeps_sign_and_precision_at_every_distance():
    distances = np.geomspace(1e-9, 15, 400, dtype=np.float32)
    distances = np.concatenate([-distances, [0], distances], dtype=np.float32)
    exact = distances.astype(np.float64)
    series = exact**2 / 2 * (1 + exact / 3 + exact**2 / 12)
    expected = np.where(np.abs(exact) < 1e-3, series, np.expm1(exact) - exact)
    value, gradient = jax.jit(jax.vmap(jax.value_and_grad(lambda x: regularizers.kl_estimate(x, "k3"))))(distances)
    assert (value >= 0).all()
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    np.testing.assert_allclose(gradient, np.expm1(exact), rtol=1e-5)
    slope = jax.jit(jax.grad(lambda x: regularizers.kl_estimate(x, "k3")))
    for far in (-np.inf, 1e4):  # the branch that is not chosen has no part in the gradient
        assert np.isfinite(slope(np.float32(far)))


def test_average_gradients_of_the_kl_estimators_on_policy():
    logits, reference = jnp.array([0.3, -1.0, 0.7]), jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.4]))
    policy = jax.nn.softmax(logits)

    def sampled(x, estimator):
        logprobs = jax.nn.log_softmax(x)
        return (policy * regularizers.reference_kl(logprobs[None], reference[None], estimator=estimator)[0]).sum()

    def reverse(x):
        logprobs = jax.nn.log_softmax(x)
        return (jnp.exp(logprobs) * (logprobs - reference)).sum()

    def forward(x):
        return (jnp.exp(reference) * (reference - jax.nn.log_softmax(x))).sum()

    @jax.jit
    def compared(x):
        estimates = {name: jax.value_and_grad(sampled)(x, name) for name in ("k1", "k2", "k3")}
        return estimates, jax.value_and_grad(reverse)(x), jax.grad(forward)(x)

    estimates, (kl, of_reverse), of_forward = compared(logits)
    chex.assert_trees_all_close(estimates["k1"][1], jnp.zeros(3), atol=1e-6)
    chex.assert_trees_all_close(estimates["k2"][1], of_reverse, atol=1e-6)
    chex.assert_trees_all_close(estimates["k3"][1], of_forward, atol=1e-6)
    for estimator in ("k1", "k3"):
        np.testing.assert_allclose(estimates[estimator][0], kl, rtol=1e-5)


# d = log of the anchor − log π, in nats; −1e4 and 1e4 stand for a token that one of both has given up.
DISTANCES = np.concatenate([np.arange(-40, 80.5, 0.5), [-1e4, 1e4]])
KL_BOUND, SHARE_BOUND = 40.0, 10.0


def k3_of(d, bound):
    """Value and factor of ∇log π of exp(d) − d − 1, which goes on as its tangent beyond the bound."""
    near = np.minimum(d, bound)
    return np.exp(near) * (1 + d - near) - d - 1, 1 - np.exp(near)


# term → the function of log π and the anchor's log-probs, and its value and factor of ∇log π at a distance
ANCHORED = {
    "k1": ("reference_kl_penalty", {"estimator": "k1"}, lambda d: (-d, np.ones_like(d))),
    "k2": ("reference_kl_penalty", {"estimator": "k2"}, lambda d: (d**2 / 2, -d)),
    "k3": ("reference_kl_penalty", {"estimator": "k3"}, lambda d: k3_of(d, KL_BOUND)),
    "share": ("effective_size_kl_penalty", {}, lambda d: k3_of(d, SHARE_BOUND)),
    "token": ("squared_log_ratio_per_token", {"tau": 1.0}, lambda d: (d**2 / 2, -d)),
    "completion": ("squared_log_ratio_per_completion", {"tau": 1.0}, lambda d: (d**2 / 2, -d)),
}


def value_and_factor(name, logprobs, **values):
    values |= {"completion_mask": jnp.ones(logprobs.shape, bool)}
    term = getattr(regularizers, name)

    def terms(x, options):
        return called(term, values | {"logprobs": x}, **options)

    def both(options):
        return jax.jit(lambda x: (terms(x, options), jax.grad(lambda y: terms(y, options).sum())(x)))(logprobs)

    return both


@pytest.mark.parametrize("name", ANCHORED)
def test_no_anchor_pushes_away_from_itself_at_any_distance(name):
    term, options, definition = ANCHORED[name]
    if term.startswith("reference"):
        options = options | {"coefficient": 1.0}
    logprobs = jnp.full((len(DISTANCES), 1), -50.0)
    anchor = logprobs + jnp.asarray(DISTANCES, jnp.float32)[:, None]
    share = jnp.zeros(len(DISTANCES))
    values = {"reference_logprobs": anchor, "behavior_logprobs": anchor, "effective_share": share}
    got, factor = (np.asarray(x)[:, 0] for x in value_and_factor(term, logprobs, **values)(options))
    expected, expected_factor = definition(DISTANCES)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(factor, expected_factor, rtol=1e-5, atol=1e-6)
    if name != "k1":  # its constant factor averages to zero; its docstring says that it does not regularize
        assert (np.sign(factor) == -np.sign(DISTANCES)).all()


@pytest.mark.parametrize("behind", [0.0, 30.0, -15.0, "reference"])
def test_unbiased_kl_has_its_closed_gradient(behind):
    """ρ (exp(d) − d − 1) and −ρ d, where log ρ = log π − log μ is `behind`, or −d where μ is the reference."""
    near = DISTANCES[np.abs(DISTANCES) <= 80]
    logprobs = jnp.full((len(near), 1), -50.0)
    log_ratio = -near if behind == "reference" else np.full(len(near), behind)
    anchor, behavior = (logprobs + jnp.asarray(x, jnp.float32)[:, None] for x in (near, -log_ratio))
    values = {"reference_logprobs": anchor, "behavior_logprobs": behavior}
    both = value_and_factor("unbiased_reference_kl_penalty", logprobs, **values)({"coefficient": 1.0})
    got, factor = (np.asarray(x)[:, 0] for x in both)
    ratio = np.exp(np.minimum(log_ratio, 20))
    np.testing.assert_allclose(factor, -ratio * near, rtol=1e-5)
    assert (np.sign(factor) == -np.sign(near)).all()
    held = np.minimum(log_ratio, 20) + near <= KL_BOUND
    size = ratio * (np.exp(near) + np.abs(near) + 1)
    assert (np.abs(got - ratio * (np.exp(near) - near - 1)) <= 1e-5 * size)[held].all() and np.isfinite(got).all()
    assert held.sum() > 100


@pytest.mark.parametrize("far", ["teacher", "policy"])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_teacher_never_pushes_away_from_itself(kind, far):
    """Two tokens; the scores of one policy differ by up to 80 nats, and those of the other are equal."""
    near = DISTANCES[np.abs(DISTANCES) <= 80]
    both = [np.stack([near, 0 * near], axis=1), np.zeros((len(near), 2))]
    scores, teacher = both if far == "policy" else both[::-1]
    own = functools.partial(teacher_divergence, coefficient=1.0, kind=kind)
    gradient = np.asarray(jax.jit(jax.grad(lambda x, y: own(x, y).sum()))(scores, teacher))[:, 0]
    log_q, log_p = (x - np.logaddexp(*x.T)[:, None] for x in (scores, teacher))
    q, p = np.exp(log_q), np.exp(log_p)
    other = log_p if kind == "reverse_kl" else np.logaddexp(log_p, log_q) - np.log(2)
    to_other = (q * (log_q - other)).sum(-1)
    expected = q[:, 0] * (log_q[:, 0] - other[:, 0] - to_other) / (2 if kind == "jsd" else 1)
    expected = q[:, 0] - p[:, 0] if kind == "forward_kl" else expected
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    assert (gradient * (teacher - scores)[:, 0] <= 1e-5).all()


def test_entropy_bonus():
    got = regularizers.entropy_bonus(junk(EXAMPLE.entropy), jnp.asarray(MASK), coefficient=0.3)
    np.testing.assert_allclose(got, np.where(MASK, 0.3 * EXAMPLE.entropy, 0), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("log_likelihood_bonus", "beta"),
        ("squared_log_ratio_per_token", "tau"),
        ("squared_log_ratio_per_completion", "tau"),
        ("reference_kl_penalty", "coefficient"),
        ("unbiased_reference_kl_penalty", "coefficient"),
    ],
)
def test_negative_strengths_are_refused(name, option):
    with pytest.raises(ValueError, match=f"{option} = -0.1: must be 0 or more"):
        names = ("logprobs", "behavior_logprobs", "reference_logprobs")
        values = dict.fromkeys(names, jnp.ones((1, 1))) | {"completion_mask": jnp.ones((1, 1), bool)}
        called(getattr(regularizers, name), values, **{option: -0.1})


def test_a_negative_entropy_coefficient_is_refused():
    with pytest.raises(ValueError, match="coefficient = -0.1: must be 0 or more"):
        regularizers.entropy_bonus(jnp.ones((1, 1)), jnp.ones((1, 1), bool), coefficient=-0.1)


# --- A teacher's distributions.

GENERATOR = np.random.default_rng(5)
SCORES, TEACHER = 2 * GENERATOR.normal(size=(2, 6, 7))


def teacher_divergence(scores, teacher_scores, **options):
    return regularizers.teacher_divergence(jnp.asarray(scores), jnp.asarray(teacher_scores), **options)


def divergence_loop(scores, teacher, kind, beta, top_k):
    """By loops over tokens and vocabulary, in float64."""
    values = []
    for ours, theirs in zip(scores.astype(np.float64), teacher.astype(np.float64), strict=True):
        q, p = np.exp(ours) / np.exp(ours).sum(), np.exp(theirs) / np.exp(theirs).sum()
        if top_k:
            order = np.argsort(-p)
            q, p = (np.array([*x[order[:top_k]], x[order[top_k:]].sum()]) for x in (q, p))
        m = beta * p + (1 - beta) * q
        kl = lambda a, b: sum(x * np.log(x / y) for x, y in zip(a, b, strict=True))  # noqa: E731
        values.append(
            {"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m)}[kind]
        )
    return np.array(values)


@pytest.mark.parametrize("top_k", [*slow(0), 3])
@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1)])
def test_divergences_and_their_gradients_by_loops(kind, beta, top_k):
    options = {"kind": kind, "beta": beta, "top_k": top_k}
    own = functools.partial(teacher_divergence, coefficient=2.0, **options)
    slopes = jax.grad(lambda *x: own(*x).sum(), argnums=(0, 1))
    value, (gradient, of_teacher) = jax.tree.map(np.asarray, jax.jit(lambda *x: (own(*x), slopes(*x)))(SCORES, TEACHER))
    np.testing.assert_allclose(value, 2 * divergence_loop(SCORES, TEACHER, **options), rtol=2e-4)
    for place in np.ndindex(SCORES.shape):
        moved = np.zeros(SCORES.shape)
        moved[place] = 1e-6
        difference = divergence_loop(SCORES + moved, TEACHER, **options)
        difference = (difference - divergence_loop(SCORES - moved, TEACHER, **options)).sum() / 2e-6
        np.testing.assert_allclose(gradient[place], 2 * difference, rtol=2e-3, atol=2e-5)
    assert not np.any(of_teacher)


@pytest.mark.parametrize("support", ["teacher", "student"])
def test_the_support_says_whose_likely_tokens_are_compared(support):
    read = SCORES if support == "student" else TEACHER
    chosen = np.argsort(-read)[:, :3]

    def joined(x):
        probabilities = jnp.take_along_axis(jax.nn.softmax(x), chosen, -1)
        return jnp.concatenate([probabilities, 1 - probabilities.sum(-1, keepdims=True)], -1)

    def by_hand(scores):
        q, p = joined(scores), joined(jnp.asarray(TEACHER))
        kl = lambda a: jnp.sum(a * jnp.log(2 * a / (p + q)))  # noqa: E731
        return (kl(p) + kl(q)) / 2

    options = {"coefficient": 1.0, "kind": "jsd", "top_k": 3, "support": support}
    own = lambda scores: teacher_divergence(scores, TEACHER, **options).sum()  # noqa: E731
    expected, found = (jax.value_and_grad(function)(jnp.asarray(SCORES)) for function in (by_hand, own))
    chex.assert_trees_all_close(found, expected, rtol=1e-3, atol=1e-5)
    assert (np.sort(np.argsort(-SCORES)[:, :3]) != np.sort(np.argsort(-TEACHER)[:, :3])).any()


def test_divergences_equal_torch():
    torch = pytest.importorskip("torch")
    q, p = (torch.log_softmax(torch.tensor(x), -1) for x in (SCORES, TEACHER))
    kl = lambda a, b: torch.nn.functional.kl_div(a, b, reduction="none", log_target=True).sum(-1)  # noqa: E731
    for kind, expected in (("forward_kl", kl(q, p)), ("reverse_kl", kl(p, q))):
        found = jax.jit(functools.partial(teacher_divergence, coefficient=1.0, kind=kind))(SCORES, TEACHER)
        np.testing.assert_allclose(found, expected.numpy(), rtol=2e-4)


def test_divergences_of_equal_or_impossible_tokens():
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        own = jax.jit(functools.partial(teacher_divergence, coefficient=1.0, kind=kind))
        np.testing.assert_allclose(own(SCORES, SCORES + 3.0), 0, atol=1e-5)
        cut, cut_teacher = SCORES.copy(), TEACHER.copy()
        cut[:, 2] = cut_teacher[:, 2] = -np.inf  # both policies lack a token
        total = jax.jit(jax.value_and_grad(lambda x, y, own=own: own(x, y).sum()))
        value, gradient = jax.tree.map(np.asarray, total(cut, cut_teacher))
        assert np.isfinite(value) and np.isfinite(gradient).all() and value > 0
    many = jax.jit(functools.partial(teacher_divergence, coefficient=1.0), static_argnames="top_k")
    whole, all_but_one, few = (np.asarray(many(SCORES, TEACHER, top_k=k)) for k in (0, 6, 2))
    np.testing.assert_allclose(all_but_one, whole, rtol=1e-4)  # the only other token is an event of its own
    assert (few <= whole + 1e-5).all() and (few < whole - 1e-3).any()


def test_reverse_kl_is_the_mean_sampled_gradient():
    """Σ_y q(y) (log q − log p)(y) ∇log q(y), the mean of on-policy distillation's gradient, is that of KL(q ‖ p)."""

    @jax.jit
    def gradients(scores, teacher):
        own = jax.grad(lambda x: teacher_divergence(x, teacher, coefficient=1.0).sum())(scores)
        q, p = jax.nn.log_softmax(scores), jax.nn.log_softmax(teacher)
        return own, jax.grad(lambda x: (jnp.exp(q) * (q - p) * jax.nn.log_softmax(x)).sum())(scores)

    own, mean = gradients(SCORES, TEACHER)
    np.testing.assert_allclose(own, mean, rtol=1e-3, atol=1e-5)
