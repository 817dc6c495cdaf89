"""The bandit experiment against closed forms, sums over all ordered groups, and its own committed table."""

import csv
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bandit import bandit
from recjax.algorithms import losses
from recjax.algorithms.presets import build_algorithm

pytestmark = pytest.mark.campaign

FOLDER = Path(bandit.__file__).parent
REWARDS = np.array([0.0, 0.8, 1.0])
KEPT = 1 - 1 / 8  # the share of r − r̄ that is left when r̄ is a mean over eight, the arm itself among them
METHODS = {method.label: method for method in bandit.METHODS}
PAPER, UNIFORM, NEAR, REFRESHED, ON_POLICY = range(5)
FIXED = [np.array(bandit.BEHAVIORS[i].initial) for i in (PAPER, UNIFORM, NEAR)]
POOR = np.array([0.7, 0.2, 0.1])  # most groups have more negatives than positives
NARROW = [label for label in METHODS if "(0.2, 0.2" in label]
SAMPLED = "REC-OneSide-NoIS (0.6, 2.0)"
every_method = pytest.mark.parametrize("label", METHODS)
every_fixed_policy = pytest.mark.parametrize("number", [PAPER, UNIFORM, NEAR])


@pytest.fixture(scope="module")
def results():
    """Of the README's command, with sampled runs for one method alone."""
    seeds = {SAMPLED: 16}
    return {label: bandit.paths(method, 0.2, 5000, seeds.get(label, 0))[1] for label, method in METHODS.items()}


def end(results, label, number):
    """The last policy of an exact run."""
    return results[label][number, 0, -1].astype(float)


def expected_force(behavior, weight=np.ones_like, shift=0.0, drop=False):
    """E Σ_i (w_i A_i + shift) by arm, over E of the number of kept rows: sums over all 3^8 ordered groups."""
    arms = np.array(list(itertools.product(range(3), repeat=8)))
    probabilities = behavior[arms].prod(1, keepdims=True)
    counts = np.stack([(arms == arm).sum(1) for arm in range(3)], axis=1).astype(float)
    means = counts @ REWARDS[:, None] / 8
    negative, positive = REWARDS < means - 1e-9, REWARDS > means + 1e-9
    if drop:
        excess = np.maximum((counts * negative).sum(1) - (counts * positive).sum(1), 0)[:, None]
        losing = negative & (counts > 0) & (excess > 0)
        assert losing.sum(1).max() == 1  # whichever negatives go, the same arms are left
        counts -= excess * losing
        means = counts @ REWARDS[:, None] / counts.sum(1, keepdims=True)
    advantages = REWARDS - means
    forces = probabilities * counts * (weight(advantages) * advantages + shift)
    return forces.sum(0) / (probabilities * counts).sum()


def exact_update(label, behavior, logits):
    """Minus the gradient that an exact run takes."""
    loss = bandit.batch_loss(build_algorithm(METHODS[label].preset, METHODS[label].overrides))
    logprobs = jnp.log(jnp.asarray(behavior, jnp.float32))
    return -jax.grad(loss)(jnp.asarray(logits, jnp.float32), logprobs, bandit.group_probabilities(logprobs))


FORCES = {
    "REINFORCE": {},
    "AsymRE, β = 0.1": {"shift": 0.1},
    "RED-Drop": {"drop": True},
    "RED-Weight, τ = 1": {"weight": np.exp},
    "RED-Weight, τ = 0.1": {"weight": lambda advantages: np.exp(advantages / 0.1)},
}


@pytest.mark.parametrize("behavior", [*FIXED, POOR], ids=str)
@pytest.mark.parametrize("label", FORCES)
def test_exact_update_is_the_sum_over_all_ordered_groups(label, behavior):
    force = expected_force(behavior, **FORCES[label])
    if label == "REINFORCE":
        np.testing.assert_allclose(force, KEPT * behavior * (REWARDS - behavior @ REWARDS), atol=1e-12)
    for logits in (np.log(behavior), np.array([3.0, -1.0, 0.5])):
        policy = np.exp(logits) / np.exp(logits).sum()
        expected = force - policy * force.sum()
        np.testing.assert_allclose(exact_update(label, behavior, logits), expected, rtol=1e-4, atol=2e-6)


@every_method
def test_a_batch_is_its_counts_of_groups(label):
    """Arms drawn one by one, in any order, as a training batch would hold them."""
    method, size = METHODS[label], bandit.GROUPS_PER_STEP * 8
    algorithm = build_algorithm(method.preset, method.overrides)
    arms = np.random.default_rng(0).choice(3, (bandit.GROUPS_PER_STEP, 8), p=POOR)
    shuffled, logits, behavior = arms.ravel(), jnp.array([0.2, -0.4, 0.9]), jnp.log(jnp.asarray(POOR, jnp.float32))
    group_ids = jnp.repeat(jnp.arange(bandit.GROUPS_PER_STEP), 8)
    rewards = jnp.asarray(REWARDS[shuffled], jnp.float32)
    rows = losses.row_terms(algorithm, losses.BatchValues(rewards, group_ids, jnp.ones(size, bool), jax.random.key(3)))

    def plain(logits):
        logprobs = jax.nn.log_softmax(logits)[shuffled][:, None]
        total, count = losses.loss(algorithm, logprobs, behavior[shuffled][:, None], rows, jnp.ones((size, 1), bool))
        return total / count

    counts = jnp.array([np.sum(np.all(np.sort(arms) == group, axis=1)) for group in bandit.GROUPS], jnp.float32)
    counted = jax.grad(bandit.batch_loss(algorithm))(logits, behavior, counts)
    np.testing.assert_allclose(counted, jax.grad(plain)(logits), rtol=1e-4, atol=1e-6)


def test_sampled_updates_are_exact_on_average():
    seeds = 2000
    after = bandit.paths(METHODS["REINFORCE"], 0.2, 1, seeds)[1][:, :, -1]
    change = np.log(after / np.array([x.initial for x in bandit.BEHAVIORS])[:, None])
    error = change[:, 1:].std(1) / np.sqrt(seeds)
    assert np.all(error < 0.03 * np.abs(change[:, 0]).max())  # the average says something
    assert np.all(np.abs(change[:, 1:].mean(1) - change[:, 0]) < 4 * error)


@every_fixed_policy
@pytest.mark.parametrize("label", FORCES)
def test_ends_of_constant_forces(results, label, number):
    """Gradient flow on Σ f log π with f_1 < 0: arm 1 goes, and π_2 − π_3 = (f_2 − f_3) / Σ f as far as it can."""
    force = expected_force(FIXED[number], **FORCES[label])
    assert force[0] < 0
    difference = np.clip((force[1] - force[2]) / max(force.sum(), 1e-9), -1, 1)
    expected = np.array([0, 1 + difference, 1 - difference]) / 2
    np.testing.assert_allclose(end(results, label, number), expected, atol=3e-3)


@every_fixed_policy
@pytest.mark.parametrize("tau", [1, 0.1])
def test_consistency_ends_at_the_surrogates_optimum(results, tau, number):
    optimum = FIXED[number] * np.exp(REWARDS / tau)
    np.testing.assert_allclose(end(results, f"Consistency, τ = {tau}", number), optimum / optimum.sum(), atol=1e-3)


@every_fixed_policy
def test_opmd_ends_where_its_pull_balances_the_gradient(results, number):
    behavior, policy = FIXED[number], end(results, "OPMD, τ = 0.1", number)
    force = behavior * (KEPT * (REWARDS - behavior @ REWARDS) - 0.1 * np.log(policy / behavior))
    np.testing.assert_allclose(force, policy * force.sum(), atol=1e-5)
    assert not np.allclose(policy, behavior, atol=0.05)


@every_fixed_policy
@pytest.mark.parametrize("label", NARROW)
def test_clipping_stops_at_its_range(results, label, number):
    """Arms that are better than the average stop at 1.2 times their share."""
    behavior = FIXED[number]
    better = REWARDS > behavior @ REWARDS
    assert better[2] and better[1] == (number != NEAR)
    np.testing.assert_allclose(end(results, label, number)[better], 1.2 * behavior[better], atol=5e-3)


@every_fixed_policy
def test_the_wide_range_goes_farther_and_stays_inside(results, number):
    narrow, wide = (end(results, f"REC-OneSide-NoIS ({x})", number) for x in ("0.2, 0.2", "0.6, 2.0"))
    assert wide @ REWARDS > narrow @ REWARDS + 0.03
    assert np.all(wide < 3.0 * FIXED[number] + 5e-3)


def test_on_policy_every_method_without_shaped_data_is_reinforce(results):
    """The ratio is 1, and both added terms have gradients of zero on average."""
    plain = results["REINFORCE"][ON_POLICY, 0]
    for label in METHODS:
        gap = np.abs(results[label][ON_POLICY, 0] - plain).max()
        assert (gap < 1e-3) == (not label.startswith("RED-")), (label, gap)


def test_stale_data_ruins_reinforce_but_not_clipping(results):
    assert end(results, "REINFORCE", REFRESHED)[1] > 0.999
    assert all(end(results, label, REFRESHED)[2] > 0.9 for label in NARROW)


def read_table():
    with (FOLDER / "table.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def numbers(rows, columns):
    return np.array([[float(row[column]) for column in columns] for row in rows])


@pytest.mark.filterwarnings("ignore:(Mean of empty slice|invalid value|Degrees of freedom):RuntimeWarning")
def test_committed_table_is_what_a_run_gives(results):
    table, again = read_table(), list(bandit.table_rows(results))
    assert [(row["behavior"], row["method"]) for row in table] == [(row["behavior"], row["method"]) for row in again]
    np.testing.assert_allclose(numbers(table, bandit.EXACT), numbers(again, bandit.EXACT), atol=5e-3)
    committed, made = ([row for row in rows if row["method"] == SAMPLED] for rows in (table, again))
    columns = [*bandit.SAMPLED, "sampled_reward_std"]
    np.testing.assert_allclose(numbers(committed, columns), numbers(made, columns), atol=5e-3)
    assert not np.isnan(numbers(made, columns)).any()
    pairs = (table, bandit.EXACT), (table, bandit.SAMPLED), (again, bandit.EXACT), (made, bandit.SAMPLED)
    for rows, columns in pairs:
        rewards = numbers(rows, columns[:3]) @ REWARDS
        np.testing.assert_allclose(rewards, numbers(rows, columns[3:])[:, 0], atol=2e-3)


def test_markdown_is_the_same_table(tmp_path):
    committed = (FOLDER / "table.md").read_text(encoding="utf-8")
    bandit.write_tables(read_table(), tmp_path, committed.splitlines()[0])
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == committed
    assert (tmp_path / "table.csv").read_bytes() == (FOLDER / "table.csv").read_bytes()


def test_figures_are_drawn(results, tmp_path):
    thinned = {label: paths[:, :, ::100] for label, paths in results.items()}
    short = {label: paths if label == SAMPLED else paths.repeat(2, axis=1) for label, paths in thinned.items()}
    bandit.draw_simplex(short, tmp_path / "simplex.png", range(len(bandit.BEHAVIORS)), "AB;CD;EE", (8, 12))
    bandit.draw_simplex(short, tmp_path / "one.png", [0], "A", (7, 6.6))
    bandit.draw_best_arm(np.arange(1, 1 + short["REINFORCE"].shape[2]), short, tmp_path / "best_arm.png")
    bandit.draw_derivation(np.arange(1, 1 + short["REINFORCE"].shape[2]), short, tmp_path / "derivation.png")
    names = ("simplex.png", "one.png", "best_arm.png", "derivation.png")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in names)
