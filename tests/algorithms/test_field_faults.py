"""Faults that other implementations have had, and what would notice each here; presets that algebra makes equal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.algorithms import losses, masks, ratios, token_weighting
from recjax.algorithms.axes import AXES
from recjax.algorithms.catalog import FIELD
from recjax.algorithms.options import readable_options
from recjax.algorithms.presets import PRESETS, build_algorithm, resolve
from tests.algorithms.examples import (
    Example,
    called,
    first_of_each_set_of_axes,
    loss_and_gradient,
    make_example,
    observed,
    rows_of,
)
from tests.closeness import assert_close
from tests.marks import campaign, campaign_except

EXAMPLE = make_example()
ON_POLICY = EXAMPLE._replace(logprobs=EXAMPLE.behavior_logprobs)
UP = jnp.ones(1)
FIRST = first_of_each_set_of_axes(tuple(FIELD))


def gradient_of(preset, overrides, example=EXAMPLE):
    (_, count), (gradient, _) = loss_and_gradient(build_algorithm(preset, overrides), example)
    return np.asarray(gradient / count)


def weights_of(preset, log_ratio, advantages, overrides=None, proximal=None):
    """The coefficient of each token of given log-ratios, over its advantage.

    proximal: log π_prox − log μ of each token, where the algorithm reads it.
    """
    algorithm = build_algorithm(preset, overrides or {})
    log_ratio = jnp.asarray(log_ratio, jnp.float32)
    mask, rows = jnp.ones(log_ratio.shape, bool), len(log_ratio)
    terms = losses.RowTerms(
        jnp.asarray(advantages, jnp.float32), jnp.ones(rows), mask[:, 0], jnp.zeros(rows), jnp.zeros(rows, int)
    )
    behavior = jnp.full(log_ratio.shape, -90.0)  # rounded to 8e-6, and so is the logarithm of a weight
    if proximal is not None:
        terms = terms._replace(proximal_logprobs=behavior + jnp.asarray(proximal, jnp.float32))

    return np.asarray(token_weights(algorithm, log_ratio, behavior, terms, mask))


@functools.partial(jax.jit, static_argnums=0)  # one program instead of one for each operation
def token_weights(algorithm, log_ratio, behavior, terms, mask):
    found = losses.token_terms(algorithm, behavior + log_ratio, behavior, terms, mask)
    return found.coefficients / found.advantages


def test_caps_are_ratios_and_no_distances():
    weights = weights_of("cispo", np.log([[0.5, 1.0, 3.0, 50.0]]), UP)
    np.testing.assert_allclose(weights, [[0.5, 1.0, 3.0, 5.0]], rtol=1e-4)
    for name in ("weight", "correction"):
        preset = "cispo" if name == "weight" else "tis"
        with pytest.raises(ValueError, match=f"{name}.cap = 0.2: is the largest ratio itself, not a distance from 1"):
            build_algorithm(preset, {name: {"cap": 0.2}})


@pytest.mark.parametrize(("preset", "cap"), [("dppo_tv", 20.0), ("dppo_kl", 20.0), ("cispo", 5.0)])
def test_a_cap_is_what_it_says(preset, cap):
    # A rare token, whose probability hardly moves.
    weights = weights_of(preset, np.log([[3.5, 0.9 * cap, 2 * cap]]), UP)
    np.testing.assert_allclose(weights, [[3.5, 0.9 * cap, cap]], rtol=1e-4)


def test_the_soft_gate_closes_on_both_sides():
    weights = weights_of("sapo", np.log([[0.01, 1.0, 5.0, 20.0]]), UP)[0]
    assert weights[1] == pytest.approx(1.0, rel=1e-5)
    assert weights[0] < 0.05 and weights[2] < 0.4 and weights[3] < 1e-3  # a detached gate's grows with the ratio


def test_a_sequence_is_tapered_as_a_whole():
    log_ratio = np.log([[4.0, 0.125], [4.0, 4.0]])  # products 0.5 and 16
    weights = weights_of("topr", log_ratio, [-1.0, -1.0])
    np.testing.assert_allclose(weights, [[0.5, 0.5], [1.0, 1.0]], rtol=1e-4)
    np.testing.assert_allclose(weights_of("topr", log_ratio, [1.0, 1.0]), np.ones((2, 2)))


def test_a_soft_dual_clip_keeps_the_gradient():
    """At A = −1 and ρ = 3.1 the authors' coefficient is −3, at A = +1 and ρ = 1/3.1 it is 3."""
    weights = weights_of("aspo", np.log([[3.1, 2.0, 0.5], [1 / 3.1, 0.5, 1.3]]), [-1.0, 1.0])
    np.testing.assert_allclose(weights, [[3, 2, 0], [3, 2, 0]], rtol=1e-4)
    hard = weights_of("aspo", np.log([[3.1, 2.0]]), [-1.0], {"clip": {"name": "dual"}})
    np.testing.assert_allclose(hard, [[0, 2]], rtol=1e-4)


def test_shares_of_tokens_are_those_of_the_authors_scripts():
    assert resolve("clip_cov", {})["mask"]["share"] == 0.0002
    assert resolve("high_entropy", {})["mask"]["share"] == 0.2


def second_moment_bound(log_ratio, advantages, tau, dropped):
    """The bound on |log ρ| of tokens that went where their advantage pushes, by a loop: the authors' search, or theirs
    of 2025."""
    squares = sorted(d * d for d, a in zip(log_ratio, advantages, strict=True) if a * d > 0)
    if sum(squares) <= tau * len(squares):
        return np.inf
    if dropped == "ignored":
        while squares and sum(squares) > tau * len(squares):
            squares.pop()
        return squares[-1] ** 0.5 if squares else 0.0
    for place in range(len(squares)):
        if sum(squares[: place + 1]) + squares[place] * (len(squares) - place - 1) >= tau * len(squares):
            return squares[place - 1] ** 0.5 if place else 0.0


second_moment_mask = jax.jit(masks.one_side_second_moment_mask, static_argnames="dropped")


@pytest.mark.parametrize("dropped", ["ignored", "bounded"])
@pytest.mark.parametrize("spread", [0.05, 0.3, 1.0, 3.0])
def test_second_moment_counts_tokens_that_followed_their_advantage(spread, dropped):
    random = np.random.default_rng(0)
    log_ratio, advantages = spread * random.normal(size=(4, 50)), np.array([1.0, -1.0, 2.0, 0.0])
    of_tokens = np.repeat(advantages, 50)
    bound = second_moment_bound(log_ratio.ravel(), of_tokens, 0.04, dropped)
    expected = (of_tokens * log_ratio.ravel() <= 0) | (np.abs(log_ratio.ravel()) <= bound + 1e-6)
    arrays = jnp.asarray(log_ratio, jnp.float32), jnp.asarray(advantages), jnp.ones((4, 50), bool)
    np.testing.assert_array_equal(np.asarray(second_moment_mask(*arrays, dropped=dropped)).ravel(), expected)
    assert expected.all() == (spread == 0.05)
    # A = +1 at ρ = ½ keeps its ½; the form of AReaL leaves it out.
    single = np.log([[0.5, 1.0]]).astype(np.float32), UP, np.ones((1, 2), bool)
    of_both_sides = jax.jit(masks.second_moment_mask)(single[0], single[2])
    assert second_moment_mask(*single).all() and not of_both_sides.all()
    assert resolve("m2po", {})["mask"] == {"name": "one_side_second_moment", "tau": 0.04, "dropped": "ignored"}


def test_final_second_moment_drops_half_as_many():
    """Log-ratios of a half-normal distribution, σ = 0.26: Algorithm 1 drops 11 %, the code of 2025 dropped 26 %."""
    quantiles = (np.arange(10_000) + 0.5) / 10_000
    log_ratio = 0.26 * np.sqrt(2) * np.asarray(jax.scipy.special.erfinv(quantiles), np.float32)[None]
    shares = []
    for dropped in ("ignored", "bounded"):
        kept = second_moment_mask(log_ratio, UP, np.ones(log_ratio.shape, bool), dropped=dropped)
        shares.append(1 - np.asarray(kept).mean())
    np.testing.assert_allclose(shares, [0.114, 0.261], atol=1e-3)


WITH_PROXIMAL = {"tis": {}, "decoupled_ppo": {}, "grpo": {"anchor": {"name": "proximal"}}}


@pytest.mark.parametrize("preset", WITH_PROXIMAL)
@pytest.mark.parametrize("same", [True, False], ids=["first update", "later update"])
def test_masks_read_the_ratio_of_proximal_to_behavior(preset, same):
    proximal = np.log([[1.5, 1.5], [1.001, 0.999], [0.4, 0.4]])
    log_ratio = proximal if same else proximal + np.log([[1.01, 1.0], [1.01, 1.0], [1.0, 1.0]])

    def kept(mask):
        overrides = WITH_PROXIMAL[preset] | {"mask": mask}
        return (weights_of(preset, log_ratio, [1.0, -1.0, -1.0], overrides, proximal) != 0).all(-1).tolist()

    assert kept({"name": "none"}) == [True, True, True]
    assert kept({"name": "sequence_band"}) == [False, True, False]
    assert kept({"name": "sequence_band", "level": "product", "low": 0.1, "high": 3.0}) == [True, True, True]
    assert kept({"name": "off_policy_negatives"}) == [True, True, False]
    assert kept({"name": "tests.algorithms.mine:below_one_and_a_half"}) == [False, True, True]
    algorithm = build_algorithm(preset, WITH_PROXIMAL[preset] | {"mask": {"name": "sequence_band"}})
    assert algorithm.needs_behavior_logprobs and algorithm.needs_scoring


def coefficients_of(preset, overrides, policies, rewards, advantages=None):
    """−gradient of the loss by log π of every token of one group; policies: log π, log π_prox, log μ."""
    algorithm, mask = build_algorithm(preset, overrides), jnp.isfinite(policies[0])
    compared = jnp.asarray(rewards, jnp.float32), jnp.zeros(len(rewards), int), mask.any(-1), jax.random.key(0)

    policies = [jnp.where(mask, x, 0.0) for x in policies]
    return -np.asarray(gradient_of_policies(algorithm, *policies, mask, compared, advantages))


@functools.partial(jax.jit, static_argnums=0)
def gradient_of_policies(algorithm, logprobs, proximal, behavior, mask, compared, advantages):
    scored = losses.Scored(logprobs, jnp.zeros_like(logprobs), behavior)
    given = {"completion_mask": mask, "scored": scored, "proximal_logprobs": proximal}
    rows = losses.row_terms(algorithm, losses.BatchValues(*compared, **given))
    rows = rows if advantages is None else rows._replace(advantages=jnp.asarray(advantages, jnp.float32))
    return jax.grad(lambda x: losses.loss(algorithm, x, behavior, rows, mask)[0])(logprobs)


TRL = {"correction": {"name": "sequence_banded", "high": 3.0}, "mask": {"name": "none"}}


@pytest.mark.parametrize(("form", "spread"), [("SkyRL", 0.01), ("TRL", 0.6)])
def test_masked_importance_sampling_has_both_published_forms(form, spread):
    """By loops in float64: SkyRL masks by the geometric mean, TRL also weighs by the product; PPO is around π_prox."""
    random = np.random.default_rng(3)
    lengths = random.integers(1, 7, 24)
    behavior = np.where(np.arange(6) < lengths[:, None], random.uniform(-3, -1, (24, 6)), np.nan)
    proximal = behavior + spread * random.normal(size=behavior.shape)
    policies = proximal + 0.15 * random.normal(size=behavior.shape), proximal, behavior
    advantages, kept = random.normal(size=24), set()
    overrides, policies32 = TRL if form == "TRL" else {}, jnp.asarray(policies, jnp.float32)
    got = coefficients_of("mis", overrides, policies32, advantages, advantages)
    for i, advantage in enumerate(advantages):
        drift = [proximal[i, t] - behavior[i, t] for t in range(lengths[i])]
        if form == "SkyRL":
            scale = float(0.99 <= np.exp(sum(drift) / len(drift)) <= 1.01)
        else:
            scale = np.exp(sum(drift)) if np.exp(sum(drift)) <= 3 else 0.0
        kept.add(scale > 0)
        for t in range(lengths[i]):
            ratio = np.exp(policies[0][i, t] - proximal[i, t])
            clipped = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
            expected = 0.0 if clipped else scale * ratio * advantage
            np.testing.assert_allclose(got[i, t], expected, rtol=1e-4, atol=1e-6)
    assert kept == {True, False}


def test_masked_importance_sampling_in_the_first_update():
    """π = π_prox: nothing is clipped; SkyRL's weight is 1 and TRL's the product."""
    drifts = jnp.log(jnp.array([[1.5, (2 / 3) ** 0.5, (2 / 3) ** 0.5], [1.5, 1.1, 1.0]]))
    behavior = jnp.full((2, 3), -2.0)
    policies = behavior + drifts, behavior + drifts, behavior
    skyrl, trl = (coefficients_of("mis", overrides, policies, [1, 1], [1, 1]) for overrides in ({}, TRL))
    np.testing.assert_allclose(skyrl, [[1, 1, 1], [0, 0, 0]], rtol=1e-5)
    np.testing.assert_allclose(trl, [[1, 1, 1], [1.65, 1.65, 1.65]], rtol=1e-5)


def test_p3o_pulls_back_by_one_minus_the_share():
    """ρ = (½, 1, 4) in the completion that is right, and 1 in the other: E = 0.5947, and the authors' coefficients."""
    behavior = jnp.full((2, 3), -3.0)
    logprobs = behavior + jnp.log(jnp.array([[0.5, 1.0, 4.0], [1.0, 1.0, 1.0]]))
    policies = logprobs, logprobs, behavior
    whole = coefficients_of("p3o", {}, policies, [1, 0])
    np.testing.assert_allclose(whole, [[0.905, 0.595, 0.291], [-0.595] * 3], atol=6e-4)
    alone = {"advantage": {"name": "group_mean"}, "regularizer": {"name": "none"}}
    cap = coefficients_of("p3o", alone, policies, [1, 0])
    np.testing.assert_allclose(cap[0], [0.25, 0.297, 0.297], atol=6e-4)


def test_masks_read_the_interpolated_anchors_ratio_to_behavior():
    log_ratio = np.log([[1.9, 1.9], [1.5, 1.5]])  # half way in logarithms, 1.38 and 1.22
    kept = weights_of("a3po", log_ratio, [-1.0, -1.0], {"mask": {"name": "sequence_band", "low": 0.5, "high": 1.3}})
    np.testing.assert_array_equal(kept != 0, [[False, False], [True, True]])


def test_behavior_ratios_do_not_count_twice():
    words = "correction = .*effective_size_capped_weights also is a ratio to the behavior policy"
    with pytest.raises(ValueError, match=words):
        build_algorithm("tis", {"weight": {"name": "effective_size_capped"}})


def test_log_ratios_are_bounded_after_a_completions_mean():
    """One token at +30 among ten: the geometric mean is e³."""
    log_ratio = np.zeros((2, 10))
    log_ratio[:, 3] = [30, -30]
    no_clip = {"clip": {"name": "none"}}
    for preset in ("gspo", "gspo_token", "luspo"):
        weights = weights_of(preset, log_ratio, [-1.0, 1.0], no_clip)
        np.testing.assert_allclose(weights, np.repeat(np.exp([[3.0], [-3.0]]), 10, axis=1), rtol=1e-5)
    # Tokens at ±30 that cancel, in sums and products.
    cancel = np.zeros((1, 10))
    cancel[0, 2:4] = [30, -29]
    for preset in ("topr", "vespo"):
        weights = {"topr": 1.0, "vespo": np.e**3 * np.exp(2 * (1 - np.e))}[preset]
        np.testing.assert_allclose(weights_of(preset, cancel, [-1.0])[0, 0], weights, rtol=1e-4)
    gmpo = weights_of("gmpo", log_ratio, [-1.0, 1.0])
    np.testing.assert_allclose(gmpo[:, 0], np.exp([3.0, -3.0]), rtol=1e-5)
    clipped = jax.jit(ratios.clipped_sequence_mean_ratio)(cancel.astype(np.float32), UP, np.ones((1, 10), bool))
    np.testing.assert_allclose(clipped[0, 0], -2.86, rtol=1e-5)  # (0.4 − 29) / 10
    band = {"mask": {"name": "sequence_band", "level": "product", "low": 0.5, "high": 3.0}}
    assert (weights_of("reinforce", cancel, [1.0], band) != 0).all()
    far = {"mask": {"name": "off_policy_negatives", "delta": 2.5}}
    assert (weights_of("reinforce", log_ratio, [-1.0, -1.0], far) != 0).all(-1).tolist() == [True, False]


@pytest.mark.parametrize("source", ["policy", "behavior", "both"])
@pytest.mark.parametrize("name", campaign_except(PRESETS, *[*PRESETS][::32], slow=first_of_each_set_of_axes()))
def test_impossible_tokens_count_as_masked(name, source):
    algorithm = build_algorithm(name, {})
    place = (int(np.flatnonzero(EXAMPLE.completion_mask.sum(-1) > 1)[0]), 0)
    changed = {"policy": ["logprobs"], "behavior": ["behavior_logprobs"]}.get(source, ["logprobs", "behavior_logprobs"])
    example, without = EXAMPLE, EXAMPLE.completion_mask.copy()
    for field in changed:
        array = getattr(example, field).copy()
        array[place] = -np.inf
        example = example._replace(**{field: array})
    # Where μ is not read, its −inf is nothing.
    without[place] = changed == ["behavior_logprobs"] and not algorithm.needs_behavior_logprobs
    (total, count), (gradient, _) = loss_and_gradient(algorithm, example)
    rows = rows_of(algorithm, example)
    clean = EXAMPLE._replace(completion_mask=without)
    (expected, expected_count), (expected_gradient, _) = loss_and_gradient(algorithm, clean, rows)
    assert np.isfinite([total, count]).all() and np.isfinite(gradient).all()
    np.testing.assert_allclose([total, count], [expected, expected_count], rtol=1e-5)
    assert_close(gradient, expected_gradient, 1e-5)


def test_observations_stay_a_mean_beside_impossible_tokens():
    logprobs = EXAMPLE.logprobs.copy()
    logprobs[np.flatnonzero(EXAMPLE.completion_mask.any(-1))[0], 0] = -np.inf
    example = EXAMPLE._replace(logprobs=logprobs)
    means = []
    for coefficient in (0.0, 0.3):
        algorithm = build_algorithm("estr", {"observations": {"coefficient": coefficient}})
        (total, count), _ = jax.jit(functools.partial(loss_and_gradient, algorithm))(example)
        means.append(total / count)
    np.testing.assert_allclose(means[1] - means[0], -0.3 * logprobs[np.asarray(observed(example))].mean(), rtol=1e-4)


def test_a_policy_that_is_not_a_number_stays_one():
    """Weights that are not finite must not be taken for tokens that cannot be."""
    logprobs = np.full_like(EXAMPLE.logprobs, np.nan)
    (total, _), _ = loss_and_gradient(build_algorithm("grpo", {}), EXAMPLE._replace(logprobs=logprobs))
    assert np.isnan(total)


def test_presets_reduction_holds_until_an_override():
    assert resolve("gspo", {})["reduction"]["name"] == "sequence_mean_token_mean"
    by_tokens = gradient_of("gspo", {"reduction": {"name": "token_mean"}}, ON_POLICY)
    by_rows, lengths = gradient_of("gspo", {}, ON_POLICY), EXAMPLE.completion_mask.sum(-1)
    scale = EXAMPLE.completion_mask.sum() / (lengths > 0).sum() / np.maximum(lengths, 1)
    np.testing.assert_allclose(by_rows, by_tokens * scale[:, None], rtol=1e-4, atol=1e-6)
    assert np.ptp(lengths[lengths > 0]) > 0


def test_a_long_completion_is_not_masked_for_its_length():
    drift = np.full((2, 600), np.log(1.005), np.float32)  # each token by half a per cent; the product is 20
    mask = np.arange(600) < np.array([[600], [2]])
    preset = readable_options(masks.sequence_band_mask)["level"].default
    assert preset == resolve("mis", {})["mask"]["level"] == "mean"
    by_mean = jax.jit(masks.sequence_band_mask)(drift, mask)
    product = functools.partial(masks.sequence_band_mask, level="product", low=0.0, high=3.0)
    by_product = np.asarray(jax.jit(product)(drift, mask))
    assert by_mean.all() and not by_product[0].any() and by_product[1].all()


@pytest.mark.parametrize("presets", [FIRST, *campaign([name for name in FIELD if name not in FIRST])], ids=["", "rest"])
def test_nothing_but_the_policy_carries_gradient(presets):
    x = jax.tree.map(jnp.asarray, EXAMPLE)

    def coefficients(logprobs, behavior, name):
        algorithm = build_algorithm(name, {})
        rows = rows_of(algorithm, x._replace(logprobs=logprobs, behavior_logprobs=behavior))
        return losses.token_terms(algorithm, logprobs, behavior, rows, x.completion_mask).coefficients.sum()

    @jax.jit
    def gradients(*given):
        return {name: jax.grad(coefficients, argnums=(0, 1))(*given, name) for name in presets}

    for name, pair in gradients(x.logprobs, x.behavior_logprobs).items():
        assert all((gradient == 0).all() for gradient in pair), name


def test_a_sequence_is_a_completion_whatever_its_turns():
    """Tokens between the turns that nobody of the policy chose: they shift nothing."""
    log_ratio = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6)), jnp.float32)
    turns = jnp.array([[1, 1, 0, 0, 1, 1]], bool)
    together = log_ratio[:, jnp.array([0, 1, 4, 5])]
    options = {"completion_mask": turns, "advantages": UP}
    whole = {"completion_mask": turns[:, jnp.array([0, 1, 4, 5])], "advantages": UP}
    of_sequences = (ratios.sequence_mean_ratio, ratios.sequence_product_ratio, ratios.clipped_sequence_mean_ratio)
    found = jax.jit(lambda values: [called(ratio, values) for ratio in of_sequences])
    for apart, joined in zip(
        found(options | {"log_ratio": log_ratio}), found(whole | {"log_ratio": together}), strict=True
    ):
        np.testing.assert_allclose(apart[0, 0], joined[0, 0], rtol=1e-5)
        assert len(set(np.asarray(apart)[0].tolist())) == 1


SAME = {
    "IcePop is REC-TwoSide-IS": (
        ("icepop", {}),
        ("rec_two_side_is", {"clip": {"epsilon_low": 0.5, "epsilon_high": 4.0}}),
    ),
    "Kimi K1.5 is OPMD": (("kimi_k15", {}), ("opmd", {})),
    "GSPO-token is GSPO": (("gspo_token", {}), ("gspo", {})),
    "GRPO is REC-OneSide-IS in deviations": (
        ("grpo", {}),
        ("rec_one_side_is", {"advantage": {"name": "group_normalized"}}),
    ),
    "a dual clip without a bound is GRPO": (("dual_clip_ppo", {"clip": {"bound": 1e9}}), ("grpo", {})),
    "K2.5 without its pull is REC-TwoSide-IS": (
        ("kimi_k25", {"regularizer": {"tau": 0.0}}),
        ("rec_two_side_is", {}),
    ),
    "an anchor wholly μ is none": (("a3po", {"anchor": {"share": 1.0}}), ("grpo", {})),
    "a band as a weight is a two-sided clip": (
        ("reinforce", {"weight": {"name": "banded"}}),
        ("icepop", {}),
    ),
    "of completions as long as each other, OPO's baseline is the mean": (
        ("opo", {}),
        ("reinforce", {}),
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_equal_by_algebra(case):
    example = EXAMPLE
    if "as long as" in case:
        example = EXAMPLE._replace(completion_mask=EXAMPLE.completion_mask.any(-1)[:, None] & (np.arange(4) < 2))
    one, other = (gradient_of(*made, example) for made in SAME[case])
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert np.abs(one).max() > 0


def test_rloo_is_reinforce_scaled_by_the_groups_size():
    ids = np.repeat(np.arange(4, dtype=np.int32), 4)
    example = EXAMPLE._replace(group_ids=ids, completion_mask=np.ones_like(EXAMPLE.completion_mask))
    np.testing.assert_allclose(
        gradient_of("rloo", {}, example), 4 / 3 * gradient_of("reinforce", {}, example), rtol=1e-4
    )


def test_gspo_token_has_the_gradient_of_its_surrogate():
    """sg(s) π_t / sg(π_t) A_t, clipped as PPO's and averaged over each completion, by autodiff."""
    algorithm, x = build_algorithm("gspo_token", {}), jax.tree.map(jnp.asarray, make_example(spread=3e-4))
    rows = rows_of(algorithm, Example(*map(np.asarray, x)))

    def surrogate(logprobs):
        lengths = jnp.maximum(x.completion_mask.sum(-1, keepdims=True), 1)
        difference = jnp.where(x.completion_mask, logprobs - x.behavior_logprobs, 0)
        whole = jax.lax.stop_gradient(jnp.exp(difference.sum(-1, keepdims=True) / lengths))
        ratio, advantages = whole * jnp.exp(logprobs - jax.lax.stop_gradient(logprobs)), rows.advantages[:, None]
        clipped = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - 3e-4, 1 + 4e-4) * advantages)
        return -jnp.where(x.completion_mask, clipped / lengths, 0).sum()

    _, (gradient, _) = loss_and_gradient(algorithm, x, rows)
    np.testing.assert_allclose(gradient, jax.jit(jax.grad(surrogate))(x.logprobs), rtol=1e-4, atol=1e-6)
    assert 0 < (np.asarray(gradient)[EXAMPLE.completion_mask] == 0).sum() < EXAMPLE.completion_mask.sum() - 10


# The example's most likely tokens are of another policy even where the sampled ones are not.
OTHER_AXES = {"advantage", "mask", "distillation", "objective", "observations", "score_centering"}


def test_on_policy_every_method_of_the_ratio_is_reinforce():
    plain = gradient_of("reinforce", {}, ON_POLICY)
    names = [name for name, preset in FIELD.items() if not OTHER_AXES & preset.changes.keys()]
    assert len(names) >= 8
    # The soft gate is 4 · ½ · ½ = 1 there, and weights of experts' completions are of no ratio.
    for name in names:
        own = gradient_of(name, {"reduction": {"name": "token_mean"}}, ON_POLICY)
        np.testing.assert_allclose(own, plain, rtol=1e-4, atol=1e-6, err_msg=name)
    other_weights = {"expert_shaped", "own", "probability", "exp_advantage", "bisected_exp_advantage"}
    for weight in AXES["weight"].keys() - other_weights:
        own = gradient_of("reinforce", {"weight": {"name": weight}}, ON_POLICY)
        np.testing.assert_allclose(own, plain, rtol=1e-4, atol=1e-6, err_msg=weight)


def test_unread_ratios_and_corrections_are_refused():
    for axis, block, words in (
        ("ratio", {"name": "sequence_mean"}, "ratio = .*neither clip, mask nor weight reads a ratio"),
        ("anchor", {"name": "proximal"}, "anchor = .*neither clip, mask nor weight reads a ratio"),
        ("correction", {"name": "truncated"}, "correction = .*which are the same; set anchor.name"),
    ):
        with pytest.raises(ValueError, match=words):
            build_algorithm("reinforce", {axis: block})
    assert set(AXES["correction"]) - {"none"} <= set(AXES["weight"])


def test_unbiased_kl_has_the_kls_gradient():
    from recjax.algorithms.regularizers import unbiased_reference_kl_penalty

    behavior, reference = jnp.array([0.3, 0.6, 0.1]), jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.4]))
    logits, mask = jnp.array([0.3, -1.0, 0.7]), jnp.ones((1, 3), bool)

    def sampled(x):
        arrays = jax.nn.log_softmax(x)[None], jnp.log(behavior)[None], reference[None], mask
        return (behavior * unbiased_reference_kl_penalty(*arrays, coefficient=1.0)[0]).sum()

    def kl(x):
        logprobs = jax.nn.log_softmax(x)
        return (jnp.exp(logprobs) * (logprobs - reference)).sum()

    pairs = jax.jit(lambda x: (jax.value_and_grad(sampled)(x), jax.value_and_grad(kl)(x)))(logits)
    for one, other in zip(*pairs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_expert_shaping_is_the_shaped_probabilitys_derivative():
    logprobs = jnp.log(jnp.array([[0.001, 0.1, 0.9]]))
    foreign = jnp.array([True])
    got = token_weighting.expert_shaped_weights(jnp.ones((1, 3)), logprobs, foreign)
    expected = jax.jit(jax.grad(lambda x: (jnp.exp(x) / (jnp.exp(x) + 0.1)).sum()))(logprobs)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
