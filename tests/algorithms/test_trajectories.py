"""A completion in one row or in two rows of one trajectory: the same numbers, whatever the algorithm reads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.algorithms import diagnostics, losses
from recjax.algorithms.groups import first_rows
from recjax.algorithms.presets import build_algorithm
from tests.algorithms import mine
from tests.algorithms.examples import ROWS, Example, make_example
from tests.marks import campaign_except

# Of each kind that relates the tokens or the rows of a completion, at least one; the quick ones are of other kinds.
QUICK = ("gspo", "opmd", "opo", "pairwise_consistency")
WEIGHS_TOKENS = "reinforce"
PRESETS = {
    WEIGHS_TOKENS: {"weight": {"name": "tests.algorithms.test_trajectories:of_tokens"}},
    "grpo": {"reduction": {"name": "fixed_length", "length": 5}, "entropy": {"coefficient": 0.05}},
    "rloo": {},
    "gspo": {},
    "gmpo": {},
    "topr": {},
    "luspo": {},
    "opmd": {"reduction": {"name": "sequence_mean_token_mean"}},
    "opsm": {"mask": {"delta": 0.1}},
    "flash_reinforce": {"mask": {"delta": 0.05}},
    "mis": {"mask": {"low": 0.7, "high": 1.4}},
    "m2po": {"mask": {"tau": 0.3}},
    "opo": {},
    "gpg": {},
    "reinforce_pp": {"advantage": {"over": "tokens"}},
    "red_weight": {},
    "pairwise_consistency": {},
    "tba": {},
    "respo": {},
    "klpo": {"score_centering": {"coefficient": 0}, "log_ratio_penalty": {"level": "completion"}},
}


def of_tokens(advantages, kept, completion_mask):
    """A weight of each token that follows from what its completion got."""
    return jnp.where(completion_mask & kept[:, None], 1 + jnp.abs(advantages)[:, None], 0.0)


def halves(example: Example) -> tuple[Example, np.ndarray]:
    """Each row as two rows, its first two tokens and its last ones, and their trajectories; the order is mixed."""
    order = np.random.default_rng(5).permutation(2 * ROWS)
    early = np.arange(example.completion_mask.shape[1]) < 2
    mask = np.concatenate([example.completion_mask & early, example.completion_mask & ~early])
    doubled = Example(*(np.concatenate([x, x])[order] for x in example))
    return doubled._replace(completion_mask=mask[order]), np.tile(np.arange(ROWS, dtype=np.int32), 2)[order]


@functools.partial(jax.jit, static_argnums=0)
def numbers(algorithm, example: Example, trajectories=None):
    """Loss as (sum, count), its gradient, advantages, and the diagnostics."""
    x = Example(*map(jnp.asarray, example))
    scored = losses.Scored(x.logprobs, x.entropy, x.behavior_logprobs) if algorithm.needs_scoring else None
    trajectories = None if trajectories is None else jnp.asarray(trajectories)
    given = {"completion_mask": x.completion_mask, "scored": scored, "trajectories": trajectories}
    compared = x.rewards, x.group_ids, x.completion_mask.any(-1), jax.random.key(0)
    rows = losses.row_terms(algorithm, losses.BatchValues(*compared, **given))

    def loss(logprobs):
        scores = losses.TermScores(x.reference_logprobs, x.entropy)
        return losses.loss(algorithm, logprobs, x.behavior_logprobs, rows, x.completion_mask, scores)

    (_, one), gradient = jax.value_and_grad(lambda y: (loss(y)[0], loss(y)), has_aux=True)(x.logprobs)
    seen = x.logprobs, x.behavior_logprobs, x.entropy, x.completion_mask
    return one, gradient, rows, diagnostics.diagnose(algorithm, rows, *seen)


@pytest.mark.parametrize("preset", campaign_except(PRESETS, WEIGHS_TOKENS, *QUICK[:1], slow=QUICK[1:]))
def test_two_rows_of_a_trajectory_are_one_completion(preset):
    algorithm, example = build_algorithm(preset, PRESETS[preset]), make_example()
    split, trajectories = halves(example)
    one, gradient, _rows, scalars = numbers(algorithm, example)
    two, parts, _, others = numbers(algorithm, split, trajectories)
    assert float(one[1]) > 0 and np.abs(gradient).max() > 0
    np.testing.assert_allclose(two, one, rtol=2e-4, atol=2e-5)
    found = np.zeros_like(gradient)
    np.add.at(found, trajectories, np.where(split.completion_mask, parts, 0))
    np.testing.assert_allclose(found, gradient, rtol=2e-4, atol=2e-5)
    for name, value in scalars.items():
        np.testing.assert_allclose(others[name], value, rtol=2e-4, atol=2e-5, err_msg=name)
    if preset not in ("opo", "reinforce_pp", "pairwise_consistency"):  # the first two take means over tokens alone
        # Rows that are not told to belong together are more completions, which is another loss.
        assert not np.allclose(numbers(algorithm, split)[0], one, rtol=1e-3)


def test_users_weights_of_tokens_cover_every_row():
    algorithm, example = build_algorithm("reinforce", {"weight": mine.pushed}), make_example()
    split, trajectories = halves(example)
    _, _, rows, _ = numbers(algorithm, example)
    _, _, parts, _ = numbers(algorithm, split, trajectories)
    mask = split.completion_mask
    expected = np.asarray(rows.weights)[trajectories][mask]
    assert len(np.unique(expected)) > 5
    np.testing.assert_allclose(np.asarray(parts.weights)[mask], expected, rtol=1e-6)


def test_first_rows_by_a_loop():
    generator, jitted = np.random.default_rng(0), jax.jit(first_rows)
    for _ in range(20):
        ids, mask = generator.integers(-3, 4, 12).astype(np.int32), generator.random(12) < 0.6
        firsts = {one: min(i for i in range(12) if mask[i] and ids[i] == one) for one in {*ids[mask].tolist()}}
        found = jitted(ids, mask)
        is_first, first_row = np.asarray(found.is_first), np.asarray(found.first_row)
        assert is_first.tolist() == [mask[i] and firsts[ids[i]] == i for i in range(12)]
        for i in np.flatnonzero(mask):
            assert first_row[i] == firsts[ids[i]]


def test_advantages_of_tokens_are_refused():
    algorithm = build_algorithm("reinforce", {"advantage": {"name": "discounted"}})
    split, trajectories = halves(make_example())
    with pytest.raises(ValueError, match="advantages = .*with trajectories"):
        numbers(algorithm, split, trajectories)
