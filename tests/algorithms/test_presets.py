"""Names to algorithms: the paper's table, overrides, refusals, and that every option is read."""

import itertools

import chex
import jax
import numpy as np
import pytest

from recjax.algorithms import (
    advantages,
    clipping,
    reduce,
    regularizers,
    token_weighting,
    weighting,
)
from recjax.algorithms.algorithm import Algorithm
from recjax.algorithms.axes import ADDED_TERMS, AXES
from recjax.algorithms.catalog import PAPER
from recjax.algorithms.options import readable_options
from recjax.algorithms.presets import PRESETS, build_algorithm, free_options, resolve
from tests.algorithms.examples import loss_and_gradient, make_example
from tests.closeness import assert_close
from tests.marks import campaign_except

EXAMPLE = make_example(seed=3)
TERM = "log_ratio_penalty"


def base(axis):
    return axis and axis.function


@pytest.mark.parametrize(
    ("preset", "changed"),
    [
        ("reinforce", {}),
        (
            "grpo",
            {
                "advantage": advantages.group_normalized_advantages,
                "clip": clipping.one_side_mask,
                "token_weight": token_weighting.importance_weights,
            },
        ),
        ("rec_one_side_is", {"clip": clipping.one_side_mask, "token_weight": token_weighting.importance_weights}),
        ("rec_one_side_nois", {"clip": clipping.one_side_mask}),
        ("rec_two_side_is", {"clip": clipping.two_side_mask, "token_weight": token_weighting.importance_weights}),
        ("rec_two_side_nois", {"clip": clipping.two_side_mask}),
        ("rec_ring_is", {"clip": clipping.ring_mask, "token_weight": token_weighting.importance_weights}),
        ("rec_ring_nois", {"clip": clipping.ring_mask}),
        ("asymre", {"regularizer": regularizers.log_likelihood_bonus}),
        ("opmd", {"regularizer": regularizers.squared_log_ratio_per_completion}),
        ("opmd_token", {"regularizer": regularizers.squared_log_ratio_per_token}),
        ("red_drop", {"selection": weighting.drop_excess_negatives}),
        ("red_weight", {"row_weight": weighting.exp_advantage_weights}),
        ("pairwise_consistency", {"objective": reduce.pairwise_consistency_loss}),
    ],
)
def test_the_papers_table(preset, changed):
    algorithm = build_algorithm(preset, {})
    expected = {name: base(axis) for name, axis in vars(Algorithm()).items()} | changed
    assert {name: base(axis) for name, axis in vars(algorithm).items()} == expected
    assert algorithm.reference_kl is None and algorithm.entropy is None and algorithm.reduction is not None
    assert base(Algorithm().reduction) is reduce.token_mean


def test_the_papers_defaults():
    def options(preset, axis):
        return {option: value for option, value in resolve(preset, {})[axis].items() if option != "name"}

    assert options("rec_one_side_nois", "clip") == {"epsilon_low": 0.2, "epsilon_high": 0.2}
    ring = {"epsilon_low": 0.2, "epsilon_high": 0.2, "outer_low": 0.6, "outer_high": 2.0}
    assert options("rec_ring_is", "clip") == ring
    assert options("grpo", "advantage") == {"epsilon": 1e-6, "ddof": 0, "singleton": "zero"}
    assert options("red_weight", "weight") == {"temperature": 1.0}
    assert options("opmd", "regularizer") == {"tau": 0.1} and options("asymre", "regularizer") == {"beta": 0.1}
    for preset in set(PRESETS) - {"pairwise_consistency", "tba"}:
        assert options(preset, "unbiased_reference_kl")["coefficient"] == 0
        assert options(preset, "reference_kl")["coefficient"] == options(preset, "entropy")["coefficient"] == 0


@pytest.mark.parametrize("preset", PAPER)
def test_equal_settings_make_equal_algorithms(preset):
    overrides = {"weight": {"name": "exp_advantage", "temperature": 2}}
    one, two = (build_algorithm(preset, dict(overrides)) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert one != build_algorithm(preset, {"weight": {"name": "exp_advantage", "temperature": 2.5}})


@pytest.mark.parametrize("preset", PRESETS)
def test_a_resolved_algorithm_resolves_to_itself(preset):
    resolved = resolve(preset, {})
    if preset != "pairwise_consistency":
        added = {axis: block for axis, block in resolved.items() if axis not in AXES and block["coefficient"]}
        again = {axis: block for axis, block in resolved.items() if axis in AXES} | added
        assert resolve("reinforce", again) == resolved


def test_some_options_of_an_axis_leave_its_others_alone():
    clip = resolve("rec_ring_is", {"clip": {"epsilon_low": 0.1, "outer_high": 3}})["clip"]
    assert clip == {"name": "ring", "epsilon_low": 0.1, "epsilon_high": 0.2, "outer_low": 0.6, "outer_high": 3.0}
    assert isinstance(clip["outer_high"], float)


def test_presets_options_hold_until_the_name_changes(monkeypatch):
    wide = {"clip": {"name": "one_side", "epsilon_low": 0.6, "epsilon_high": 2.0}}
    monkeypatch.setitem(PRESETS, "wide", wide)
    assert resolve("wide", {"clip": {"epsilon_low": 0.5}})["clip"] == {**wide["clip"], "epsilon_low": 0.5}
    assert resolve("wide", {"clip": {"name": "one_side", "epsilon_low": 0.5}})["clip"]["epsilon_high"] == 2.0
    assert resolve("wide", {"clip": {"name": "two_side", "epsilon_low": 0.5}})["clip"]["epsilon_high"] == 0.2
    assert resolve("wide", {"clip": {}})["clip"] == wide["clip"] and PRESETS["wide"] == wide


def test_coefficient_zero_turns_a_presets_term_off():
    for preset, term in (("sdpo", "teacher_divergence"), ("on_policy_distillation", "distillation"), ("klpo", TERM)):
        assert getattr(build_algorithm(preset, {term: {"coefficient": 0}}), term) is None
    assert len(PRESETS["sdpo"]["teacher_divergence"]) > 1
    with pytest.raises(ValueError, match="teacher_divergence.top_k = 3: has no effect"):
        resolve("sdpo", {"teacher_divergence": {"coefficient": 0, "top_k": 3}})


@pytest.mark.parametrize(
    ("preset", "overrides", "parts"),
    [
        ("grop", {}, ["preset = 'grop'", "reinforce, grpo", "did you mean 'grpo'?"]),
        ("grpo", {"clipp": {"name": "ring"}}, ["clipp", "unknown axis", "did you mean 'clip'?"]),
        (
            "grpo",
            {"clip": {"name": "one_sid"}},
            ["clip.name = 'one_sid'", "none, one_side", "did you mean 'one_side'?"],
        ),
        ("grpo", {"clip": {"name": ["ring"]}}, ["clip.name = ['ring']"]),
        (
            "grpo",
            {"clip": {"epsilon_lo": 0.3}},
            ["clip.epsilon_lo = 0.3", "'one_side'", "epsilon_low, epsilon_high", "did you mean 'epsilon_low'?"],
        ),
        ("grpo", {"clip": {"outer_low": 0.7}}, ["clip.outer_low = 0.7", "'one_side' does not read this option"]),
        ("reinforce", {"weight": {"temperature": 2.0}}, ["weight.temperature = 2.0", "'none'", "it has none"]),
        ("red_weight", {"weight": {"name": "none", "temperature": 2.0}}, ["weight.temperature = 2.0"]),
        ("grpo", {"clip": {"epsilon_low": "wide"}}, ["clip.epsilon_low = 'wide'", "takes a float"]),
        ("grpo", {"clip": {"epsilon_low": True}}, ["clip.epsilon_low = True", "takes a float"]),
        ("grpo", {"clip": {"epsilon_low": None}}, ["clip.epsilon_low = None", "takes a float"]),
        ("grpo", {"clip": {"epsilon_low": float("nan")}}, ["clip.epsilon_low = nan", "takes a float"]),
        ("grpo", {"clip": {"epsilon_low": -0.2}}, ["clip.epsilon_low = -0.2", "0 or more"]),
        ("rec_ring_is", {"clip": {"outer_low": 0.1}}, ["clip.outer_low = 0.1", "epsilon_low = 0.2"]),
        ("grpo", {"advantage": {"ddof": 2}}, ["advantage.ddof = 2", "(0, 1)"]),
        ("grpo", {"advantage": {"ddof": True}}, ["advantage.ddof = True", "(0, 1)"]),
        ("grpo", {"advantage": {"singleton": "rewards"}}, ["advantage.singleton = 'rewards'", "'zero', 'reward'"]),
        ("grpo", {"reduction": {"name": "fixed_length"}}, ["reduction.length", "'fixed_length' requires a value"]),
        ("grpo", {"reduction": {"name": "fixed_length", "length": 1.5}}, ["reduction.length = 1.5", "takes an int"]),
        ("grpo", {"reduction": {"name": "fixed_length", "length": 0}}, ["reduction.length = 0", "1 or more"]),
        ("grpo", {"reference_kl": {"estimator": "k2"}}, ["reference_kl.estimator = 'k2'", "reference_kl.coefficient"]),
        ("grpo", {"reference_kl": {"coefficient": 0.1, "estimator": "k4"}}, ["reference_kl.estimator = 'k4'"]),
        ("grpo", {"reference_kl": {"name": "k2"}}, ["reference_kl.name = 'k2'", "coefficient, estimator"]),
        ("grpo", {"observations": {"coefficient": -0.1}}, ["observations.coefficient = -0.1", "0 or more"]),
        ("grpo", {"teacher_divergence": {"coefficient": 1.0, "beta": 1.0}}, ["beta = 1.0", "between 0 and 1"]),
        ("grpo", {"teacher_divergence": {"coefficient": 1.0, "top_k": -1}}, ["top_k = -1", "0 (the whole"]),
        ("grpo", {"teacher_divergence": {"coefficient": 1.0, "cap": 0}}, ["cap = 0.0", "must be above 0"]),
        ("grpo", {"entropy": {"coefficient": -0.1}}, ["entropy.coefficient = -0.1", "0 or more"]),
        ("opmd", {"objective": {"tau": 1.0}}, ["objective.tau = 1.0", "'policy_gradient' does not read"]),
        ("grpo", {"objective": {"name": "pairwise_consistency"}}, ["advantage", "group_normalized", "does not read"]),
        *(
            ("pairwise_consistency", {axis: block}, [axis, "'pairwise_consistency' does not read"])
            for axis, block in {
                "advantage": {"name": "leave_one_out"},
                "clip": {"name": "ring"},
                "regularizer": {"name": "log_likelihood_bonus"},
                "reduction": {"name": "sequence_mean_token_sum"},
                "reference_kl": {"coefficient": 0.1},
                "entropy": {"coefficient": 0.1},
                "teacher_divergence": {"coefficient": 0.1},
                "observations": {"coefficient": 0.1},
            }.items()
        ),
        ("pairwise_consistency", {"weight": {"name": "importance"}}, ["weight.name = 'importance'", "exp_advantage"]),
        ("pairwise_consistency", {"objective": {"tau": 0}}, ["objective.tau = 0", "above 0"]),
    ],
)
def test_refusals_name_place_value_and_remedy(preset, overrides, parts):
    with pytest.raises(ValueError) as error:
        build_algorithm(preset, overrides)
    for part in parts:
        assert part in str(error.value)


# axis.function.option → two values, and what the rest of the algorithm must be for the option to matter. With the
# advantages of "lowered", Σ A < 0 < max A and the balancing temperature is 1.3.
LOWERED = {"advantage": {"name": "asymmetric", "beta": -0.1}}
READS_RATIO = {"weight": {"name": "importance"}}
BETWEEN = {"anchor": {"name": "interpolated"}}
RISING = {"clip": {"positive_share": 0.18}}  # some way between the first bounds and the highest
DIVERGENCE = {"teacher_divergence": {"coefficient": 1.0}}
JSD = {"teacher_divergence": {"coefficient": 1.0, "kind": "jsd"}}
OPTIONS = {
    "objective.pairwise_consistency.tau": (0.5, 2.0, {}),
    "objective.pairwise_consistency.anchor": ("behavior", "reference", {}),
    "advantage.group_mean.singleton": ("zero", "reward", {}),
    "advantage.solved_bonus.bonus": (0.1, 0.2, {}),
    "advantage.divergence_penalized.beta": (0.1, 0.2, {}),
    "advantage.group_normalized.epsilon": (1e-6, 0.1, {}),
    "advantage.group_normalized.ddof": (0, 1, {}),
    "advantage.group_normalized.singleton": ("zero", "reward", {}),
    "advantage.leave_one_out.singleton": ("zero", "reward", {}),
    "advantage.asymmetric.beta": (0.1, 0.2, {}),
    "advantage.asymmetric.singleton": ("zero", "reward", {}),
    "advantage.batch_whitened.baseline": ("none", "group", {}),
    "advantage.batch_whitened.over": ("completions", "tokens", {}),
    "advantage.batch_whitened.ddof": (0, 1, {}),
    "advantage.batch_whitened.epsilon": (1e-6, 0.1, {}),
    "advantage.batch_deviation.epsilon": (1e-6, 0.1, {}),
    "advantage.part_normalized.over": ("completions", "tokens", {}),
    "advantage.part_normalized.ddof": (0, 1, {}),
    "advantage.part_normalized.epsilon": (1e-6, 0.1, {}),
    "advantage.log_mean_exp.beta": (1.0, 0.5, {}),
    "advantage.discounted.discount": (0.99, 0.5, {}),
    "advantage.turn_returns.discount": (1.0, 0.5, {}),
    "advantage.turn_returns.baseline": ("none", "group", {}),
    "advantage.turn_returns.returns": ("sum", "mean", {}),
    "anchor.interpolated.share": (0.5, 0.2, READS_RATIO),
    "ratio.clipped_sequence_mean.epsilon_low": (0.4, 0.1, READS_RATIO),
    "ratio.clipped_sequence_mean.epsilon_high": (0.4, 0.1, READS_RATIO),
    "clip.dual.epsilon_low": (0.2, 0.6, {}),
    "clip.dual.epsilon_high": (0.2, 2.0, {}),
    "clip.dual.bound": (3.0, 1.2, {}),
    "clip.log_one_side.epsilon_low": (0.4, 0.1, {}),
    "clip.log_one_side.epsilon_high": (0.4, 0.1, {}),
    "clip.probability_difference.delta": (0.2, 0.02, {}),
    "clip.binary_kl.delta": (0.05, 0.001, {}),
    "clip.balanced.low": (0.6, 0.85, {"clip": {"positive_share": 0.0}}),
    "clip.balanced.high": (1.2, 2.0, {"clip": {"positive_share": 0.0}}),
    "clip.balanced.highest_low": (0.9, 0.7, {"clip": {"positive_share": 1.0}}),
    "clip.balanced.highest_high": (3.0, 1.5, {"clip": {"positive_share": 1.0}}),
    "clip.balanced.step_low": (0.02, 0.3, RISING),
    "clip.balanced.step_high": (0.05, 2.0, {"clip": {"positive_share": 0.15, "high": 1.0}}),
    "clip.balanced.positive_share": (0.0, 1.0, {}),
    "mask.off_policy_negatives.delta": (0.5, 0.05, {}),
    "mask.sequence_binary_kl.delta": (0.005, 0.2, {}),
    "mask.sequence_band.level": ("mean", "product", {"mask": {"low": 0.5, "high": 2.0}}),
    "mask.sequence_band.low": (0.99, 0.3, {}),
    "mask.sequence_band.high": (1.01, 3.0, {}),
    "mask.second_moment.tau": (0.04, 0.4, {}),
    "mask.one_side_second_moment.tau": (0.04, 0.4, {}),
    "mask.one_side_second_moment.dropped": ("ignored", "bounded", {}),
    "mask.entropy_scaled.tau": (0.1, 0.4, {}),
    "mask.entropy_scaled.epsilon": (1e-3, 1.0, {}),
    "mask.entropy_change.deviations": (2.5, 0.5, {}),
    "mask.high_entropy.share": (0.2, 0.6, {}),
    "mask.covariance.share": (0.0002, 0.3, {}),
    "weight.truncated.cap": (5.0, 1.2, {}),
    "weight.banded.low": (0.5, 0.9, {}),
    "weight.banded.high": (5.0, 1.2, {}),
    "weight.sequence_banded.low": (0.0, 0.9, {}),
    "weight.sequence_banded.high": (3.0, 1.2, {}),
    "weight.bounded.low": (0.5, 0.9, {}),
    "weight.bounded.high": (2.0, 1.2, {}),
    "weight.tapered.cap": (1.0, 0.5, {}),
    "weight.inverse.cap": (3.0, 1.1, {}),
    "weight.inverse.cap_negative": (3.0, 1.1, {}),
    "weight.soft.tau_positive": (1.0, 2.0, {}),
    "weight.soft.tau_negative": (1.05, 2.0, {}),
    "weight.peaked.power_positive": (2.0, 1.0, {}),
    "weight.peaked.decay_positive": (3.0, 1.0, {}),
    "weight.peaked.power_negative": (3.0, 1.0, {}),
    "weight.peaked.decay_negative": (2.0, 1.0, {}),
    "weight.blended.beta": (0.5, 0.9, {}),
    "weight.blended.decay": (2.0, 1.0, {}),
    "weight.complement.epsilon": (0.2, 0.0, {}),
    "weight.complement.cap": (5.0, 1.1, {}),
    "weight.expert_shaped.gamma": (0.1, 0.5, {}),
    "weight.own.share": (0.9, 0.5, {}),
    "regularizer.expert_cross_entropy.share": (0.1, 0.5, {}),
    "score_centering.score_centering.coefficient": (0.5, 1.0, {}),
    "clip.probability_distance.delta": (0.3, 0.02, {}),
    "mask.sequence_max_kl.delta": (0.5, 0.002, {}),
    "mask.sequence_max_kl.estimator": ("k2", "k3", {"mask": {"delta": 0.2}}),
    "correction.truncated.cap": (5.0, 1.2, BETWEEN),
    "correction.banded.low": (0.5, 0.95, BETWEEN),
    "correction.banded.high": (5.0, 1.1, BETWEEN),
    "correction.sequence_banded.low": (0.0, 0.95, BETWEEN),
    "correction.sequence_banded.high": (3.0, 1.1, BETWEEN),
    "correction.bounded.low": (0.5, 0.95, BETWEEN),
    "correction.bounded.high": (2.0, 1.1, BETWEEN),
    "unbiased_reference_kl.unbiased_reference_kl.coefficient": (0.1, 0.2, {}),
    "distillation.distillation.coefficient": (0.1, 0.2, {}),
    "distillation.distillation.prefix_weight": (0.0, 0.5, {"distillation": {"coefficient": 1.0}}),
    "log_ratio_penalty.log_ratio_penalty.coefficient": (0.1, 0.2, {}),
    "log_ratio_penalty.log_ratio_penalty.level": (
        "token",
        "completion",
        {"log_ratio_penalty": {"coefficient": 0.1}},
    ),
    "teacher_divergence.teacher_divergence.coefficient": (0.1, 0.2, {}),
    "teacher_divergence.teacher_divergence.kind": ("forward_kl", "reverse_kl", DIVERGENCE),
    "teacher_divergence.teacher_divergence.beta": (
        0.5,
        0.1,
        {"teacher_divergence": {"coefficient": 1.0, "kind": "jsd"}},
    ),
    "teacher_divergence.teacher_divergence.top_k": (0, 1, DIVERGENCE),
    "teacher_divergence.teacher_divergence.support": (
        "teacher",
        "student",
        {"teacher_divergence": {"coefficient": 1.0, "top_k": 1}},
    ),
    "teacher_divergence.teacher_divergence.weight": ("none", "truncated", DIVERGENCE),
    "teacher_divergence.teacher_divergence.cap": (
        2.0,
        0.5,
        {"teacher_divergence": {"coefficient": 1.0, "weight": "truncated"}},
    ),
    "observations.observations.coefficient": (0.1, 0.2, {}),
    "clip.one_side.epsilon_low": (0.2, 0.6, {}),
    "clip.one_side.epsilon_high": (0.2, 2.0, {}),
    "clip.two_side.epsilon_low": (0.2, 0.6, {}),
    "clip.two_side.epsilon_high": (0.2, 2.0, {}),
    "clip.ring.epsilon_low": (0.2, 0.4, {}),
    "clip.ring.epsilon_high": (0.2, 1.0, {}),
    "clip.ring.outer_low": (0.6, 0.3, {}),
    "clip.ring.outer_high": (2.0, 0.5, {}),
    "weight.exp_advantage.temperature": (1.0, 2.0, {}),
    "weight.bisected_exp_advantage.floor": (0.8, 20.0, LOWERED),
    "weight.bisected_exp_advantage.ceiling": (100.0, 2.0, {}),
    "regularizer.log_likelihood_bonus.beta": (0.1, 0.2, {}),
    "regularizer.squared_log_ratio_per_token.tau": (0.1, 0.2, {}),
    "regularizer.squared_log_ratio_per_completion.tau": (0.1, 0.2, {}),
    "reduction.fixed_length.length": (4, 8, {}),
    "reference_kl.reference_kl.coefficient": (0.1, 0.2, {}),
    "reference_kl.reference_kl.estimator": ("k2", "k3", {"reference_kl": {"coefficient": 0.1}}),
    "entropy.entropy.coefficient": (0.1, 0.2, {}),
}
TABLES = {**AXES, **{axis: {axis: function} for axis, function in ADDED_TERMS.items()}}


def test_the_list_of_options_is_whole():
    everything = [
        f"{axis}.{name}.{option}"
        for axis, table in TABLES.items()
        for name, function in table.items()
        for option in readable_options(function)
    ]
    assert sorted(everything) == sorted(OPTIONS)


@pytest.mark.parametrize("place", campaign_except(OPTIONS, *[*OPTIONS][::12], slow=[*OPTIONS][::4]))
def test_every_option_changes_the_loss(place):
    axis, name, option = place.split(".")
    *values, rest = OPTIONS[place]

    def result(value):
        block = {**rest.get(axis, {}), option: value} | ({"name": name} if axis in AXES else {})
        return loss_and_gradient(build_algorithm("reinforce", {**rest, axis: block}), EXAMPLE)

    one, two = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(result(value))]) for value in values)
    assert np.isfinite([one, two]).all() and np.abs(one - two).max() > 1e-4


@pytest.mark.parametrize("axis", campaign_except(AXES, "reduction", slow=["advantage", "clip", "weight"]))
def test_every_function_differs_from_the_others_of_its_axis(axis):
    # At the defaults, these leave nothing of the example out.
    options = {
        "off_policy_negatives": {"delta": 0.05},
        "sequence_binary_kl": {"delta": 0.02},
        "truncated": {"cap": 1.2},
        "banded": {"low": 0.9, "high": 1.3},
    }
    options |= {"fixed_length": {"length": 3}}
    results, rest = {}, {"anchor": READS_RATIO, "ratio": READS_RATIO, "correction": BETWEEN | READS_RATIO}
    for other in AXES[axis]:
        block = {"name": other} | options.get(other, {})
        algorithm = build_algorithm("reinforce", rest.get(axis, {}) | {axis: block})
        (total, count), gradient = loss_and_gradient(algorithm, EXAMPLE)
        results[other] = jax.tree.map(lambda x, count=count: np.asarray(x / count), (total, gradient))
    for name, other in itertools.combinations(results, 2):
        with pytest.raises(AssertionError):
            chex.assert_trees_all_close(results[name], results[other], rtol=1e-3, atol=1e-5)


# Read from the blocks: tracing every preset takes seconds of each worker's collection.
NUMBERS = [
    name
    for name in PRESETS
    if any(float in map(type, block.values()) for block in resolve(name, {}).values() if block.get("coefficient", 1))
]


@pytest.mark.parametrize("preset", campaign_except(NUMBERS, "bapo", "clip_cov", slow=["dapo", "p3o", "tis"]))
def test_numeric_options_are_arguments_of_a_program(preset):
    algorithm = build_algorithm(preset, {})
    free, options = free_options(algorithm)
    for name, axis in vars(algorithm).items():
        floats = {option: value for option, value in (axis.options if axis else ()) if type(value) is float}
        assert options.get(name, {}) == floats
    found = jax.jit(lambda options: loss_and_gradient(free.with_options(options), EXAMPLE))(options)
    assert_close(found, loss_and_gradient(algorithm, EXAMPLE), 1e-5, least=1.0)


def test_values_given_as_arguments_keep_the_algorithm():
    mine = "tests.algorithms.mine"
    for changes, others in (
        ({"clip": {"epsilon_high": 0.3}}, {"clip": {"epsilon_high": 0.4}}),
        ({"reference_kl": {"coefficient": 0.1}}, {"reference_kl": {"coefficient": 0.2}}),
        ({"weight": {"name": f"{mine}:bounded", "cap": 2.0}}, {"weight": {"name": f"{mine}:bounded", "cap": 4.0}}),
    ):
        (one, options), (other, others) = (free_options(build_algorithm("grpo", each)) for each in (changes, others))
        assert one == other and options != others and jax.tree.structure(options) == jax.tree.structure(others)
    # A value of 0 that removes a term, and values that decide a shape or a branch, stay in the program.
    none, other = (free_options(build_algorithm("grpo", {"reference_kl": {"coefficient": x}}))[0] for x in (0.0, 0.1))
    assert none != other and not none.needs_reference
    branches = [{"weight": {"name": f"{mine}:branching", "cap": cap}} for cap in (1.0, 2.0)]
    made = [free_options(build_algorithm("reinforce", each)) for each in branches]
    assert made[0] != made[1] and made[0][1] == {}
    lengths = [{"reduction": {"name": "fixed_length", "length": length}} for length in (3, 4)]
    assert len({free_options(build_algorithm("reinforce", each))[0] for each in lengths}) == 2
