"""An objective of one's own: a function in one's own file, named in the config, or the library in one's own loop."""

import re
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax import algorithms
from recjax.algorithms.axes import READABLE
from recjax.algorithms.axis import Axis
from recjax.algorithms.options import PACKAGE, described
from recjax.algorithms.presets import build_algorithm, resolve
from recjax.algorithms.values import Rows, Tokens
from recjax.config import AlgorithmConfig
from recjax.errors import UserError
from tests import commands
from tests.algorithms import mine
from tests.algorithms.examples import loss_and_gradient, make_example

EXAMPLE = make_example()
MINE = "tests.algorithms.mine"


def test_users_weight_is_read_with_its_options():
    gradients = []
    for cap in (2.0, 3):
        algorithm = build_algorithm("reinforce", {"weight": {"name": f"{MINE}:bounded", "cap": cap}})
        assert algorithm.needs_behavior_logprobs and not algorithm.needs_scoring
        gradients.append(np.asarray(loss_and_gradient(algorithm, EXAMPLE)[1][0]))
    assert np.abs(gradients[0] - gradients[1]).max() > 1e-3
    plain = np.asarray(loss_and_gradient(build_algorithm("reinforce", {}), EXAMPLE)[1][0])
    np.testing.assert_allclose(np.where(plain > 0, gradients[1], plain), np.where(plain > 0, plain, plain), atol=1e-6)
    resolved = resolve("reinforce", {"weight": {"name": f"{MINE}:bounded"}})["weight"]
    assert resolved == {"name": f"{MINE}:bounded", "cap": 3.0}


@pytest.mark.parametrize(
    ("axis", "block"),
    [
        ("advantage", {"name": f"{MINE}:above_median"}),
        ("mask", {"name": f"{MINE}:mostly_certain", "most": 0.8}),
        ("regularizer", {"name": f"{MINE}:pull", "strength": 0.3}),
        ("regularizer", {"name": f"{MINE}:pull_while_stale"}),
    ],
)
def test_other_axes_take_ones_own(axis, block):
    algorithm = build_algorithm("reinforce", {axis: block})
    own, plain = (loss_and_gradient(made, EXAMPLE)[1][0] for made in (algorithm, build_algorithm("reinforce", {})))
    assert np.isfinite(own).all() and np.abs(own - plain).max() > 1e-3
    assert algorithm.needs_scoring == algorithm.needs_rescoring == (axis == "mask" or "stale" in block["name"])


def test_an_error_names_lines_beside_the_package_as_the_users():
    place = f"{PACKAGE}other/module.py"
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile("1 / 0", place, "exec"))
    assert f"{place}:1 in <module>" in described(raised.value)


def test_users_selection_revives_no_padding_row():
    """Without the rows that are not kept, nothing changes, whatever the selection says of them."""

    def everything(rewards):
        return rewards > -jnp.inf

    rewards = jnp.array([1.0, 0.0, 0.0, 0.0])  # the last row is padding of the group
    mask = jnp.array([[1, 1], [1, 0], [1, 1], [0, 0]], bool)
    batch = algorithms.BatchValues(rewards, jnp.zeros(4, int), mask.any(-1), jax.random.key(0), completion_mask=mask)
    plain, own = (
        algorithms.row_terms(build_algorithm("reinforce", {"selection": name}), batch) for name in ("all", everything)
    )
    np.testing.assert_array_equal(own.kept, [True, True, True, False])
    np.testing.assert_allclose(own.advantages, plain.advantages, rtol=1e-6)
    np.testing.assert_allclose(own.advantages, [2 / 3, -1 / 3, -1 / 3, 0], rtol=1e-6)


def test_users_term_adds_its_value_and_gradient():
    """By a double loop: −s · H · exp(−|log π − log π_ref|), reduced with the policy gradient."""
    plain, own = (
        build_algorithm("reinforce", {**block, "reduction": {"name": "token_mean"}})
        for block in ({}, {"term": {"name": f"{MINE}:anchored_entropy", "strength": 0.3}})
    )
    assert own.needs_reference and not own.needs_behavior_logprobs and not own.needs_teacher
    (before, count), gradients_before = loss_and_gradient(plain, EXAMPLE)
    (after, same_count), gradients = loss_and_gradient(own, EXAMPLE)
    added, by_logprob = 0.0, np.zeros(EXAMPLE.logprobs.shape)
    for row, time in np.argwhere(EXAMPLE.completion_mask):
        distance = float(EXAMPLE.logprobs[row, time]) - float(EXAMPLE.reference_logprobs[row, time])
        value = -0.3 * float(EXAMPLE.entropy[row, time]) * np.exp(-abs(distance))
        added += value
        by_logprob[row, time] = -value * np.sign(distance)
    assert count == same_count
    np.testing.assert_allclose(after - before, added, rtol=1e-5)
    np.testing.assert_allclose(gradients[0] - gradients_before[0], by_logprob, atol=1e-6)
    assert np.abs(gradients[1]).max() > 0 == np.abs(gradients_before[1]).max()


def test_a_term_decides_what_an_update_computes():
    to_teacher = build_algorithm("reinforce", {"term": {"name": f"{MINE}:to_teacher"}})
    assert to_teacher.needs_teacher and to_teacher.reads_ratio and to_teacher.needs_behavior_logprobs
    assert not to_teacher.needs_reference
    with pytest.raises(ValueError, match="term.name = .*its parameter 'rewards' is not a value of this axis"):
        build_algorithm("reinforce", {"term": {"name": f"{MINE}:above_median"}})
    with pytest.raises(ValueError, match="term = .*'pairwise_consistency' does not read this axis"):
        build_algorithm("pairwise_consistency", {"term": {"name": f"{MINE}:pull"}})


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": f"{MINE}:clipped_surrogate"},
        {"objective": f"{MINE}:clipped_gradient"},
        {"weight": f"{MINE}:nothing", "term": f"{MINE}:clipped_gradient", "clip": "none"},
    ],
)
def test_users_whole_loss_equals_grpo_to_the_bit(changes):
    own, plain = (build_algorithm("grpo", {**blocks, "entropy": {"coefficient": 0.1}}) for blocks in (changes, {}))
    assert own.needs_behavior_logprobs and not own.needs_scoring and not own.compares_completions
    (_, count), gradients = loss_and_gradient(own, EXAMPLE)
    (_, same_count), expected = loss_and_gradient(plain, EXAMPLE)
    assert count == same_count and np.abs(expected[0]).max() > 0 < np.abs(expected[1]).max()
    np.testing.assert_array_equal(gradients[0], expected[0])
    np.testing.assert_array_equal(gradients[1], expected[1])


def test_an_objective_replaces_the_presets_policy_gradient():
    objective = f"{MINE}:clipped_surrogate"
    resolved = resolve("p3o", {"objective": objective})
    assert resolved["objective"] == {"name": objective, "epsilon": 0.2}
    assert resolved["advantage"]["name"] == "group_normalized" and not {"weight", "regularizer"} & resolved.keys()
    off = {axis: {"name": "none"} for axis in ("clip", "mask", "weight", "correction", "regularizer", "term")}
    for axis, block in {**off, "score_centering": {"coefficient": 1.0}}.items():
        with pytest.raises(ValueError, match=f"{axis} = .*the objective '{objective}' does not read this axis"):
            build_algorithm("grpo", {"objective": objective, axis: block})
    to_teacher = build_algorithm("grpo", {"objective": f"{MINE}:to_teacher"})
    assert to_teacher.needs_teacher and not to_teacher.needs_reference
    with pytest.raises(ValueError, match="objective.name = .*its parameter 'rewards' is not a value of this axis"):
        build_algorithm("grpo", {"objective": f"{MINE}:above_median"})


def near_behavior(logprobs, behavior_logprobs):
    """`mine.near_anchor` under the other name of μ."""
    return jnp.abs(logprobs - behavior_logprobs) < 0.5


def test_centering_takes_masks_that_read_the_anchor():
    blocks = {"score_centering": {"coefficient": 1.0}}
    own, same, none = (
        build_algorithm("grpo", {**blocks, "mask": mask}) for mask in (mine.near_anchor, near_behavior, "none")
    )
    (_, gradients), (_, expected), (_, others) = (loss_and_gradient(made, EXAMPLE) for made in (own, same, none))
    np.testing.assert_array_equal(gradients[0], expected[0])
    assert np.abs(gradients[0] - others[0]).max() > 1e-3


def branching(ratio):
    """A weight that asks for values of arrays."""
    if ratio.max() > 2:
        return ratio / 2
    return ratio


def test_a_name_or_a_function_stands_for_its_block():
    named, block = f"{MINE}:bounded", {"name": f"{MINE}:bounded"}
    expected = build_algorithm("reinforce", {"weight": block})
    for weight in (named, mine.bounded, {"name": mine.bounded}):
        assert build_algorithm("reinforce", {"weight": weight}).token_weight == expected.token_weight
        assert AlgorithmConfig(preset="reinforce", weight=weight).overrides() == {"weight": block}
    assert build_algorithm("gspo", {"weight": "importance"}) == build_algorithm(
        "gspo", {"weight": {"name": "importance"}}
    )
    with pytest.raises(
        ValueError, match="weight = <function .*: a config takes functions by name; define it in a module"
    ):
        AlgorithmConfig(weight=lambda ratio: ratio)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            {"name": "no_such_module:f"},
            "weight.name = 'no_such_module:f': .*No module named .*must be importable",
        ),
        ({"name": f"{MINE}:absent"}, "weight.name = .*has no function 'absent'"),
        ({"name": f"{MINE}:not_a_function"}, "has no function 'not_a_function'"),
        ({"name": f"{MINE}:misspelt"}, "its parameter 'advantage' is not a value of .*did you mean 'advantages'"),
        ({"name": f"{MINE}:mixed_up"}, "reads ratio of a micro-batch and kept of the whole batch"),
        (
            {"name": f"{MINE}:of_another_shape"},
            r"must return \[batch, time\] or \[batch, 1\] of numbers, and returns an array of shape \[batch, 6\]",
        ),
        ({"name": f"{MINE}:broken"}, "broken fails with AttributeError: .*no_such_method"),
        (
            branching,
            r"(?s)branching fails with .*\n  .*test_own.py:\d+ in branching: if ratio.max.*write jnp.where in place",
        ),
        ({"name": f"{MINE}:bounded", "cup": 2.0}, "weight.cup = 2.0: .*does not read this option.*did you mean 'cap'"),
        ({"name": f"{MINE}:bounded", "cap": "high"}, "weight.cap = 'high': takes a float"),
    ],
)
def test_mistakes_in_ones_own_are_found_before_work_starts(block, words):
    with pytest.raises(ValueError, match=words):
        build_algorithm("reinforce", {"weight": block})


def asks_if(completion_mask):
    return completion_mask and completion_mask


def asks_numpy(completion_mask):
    return np.exp(completion_mask)


def asks_for_length(completion_mask):
    return range(completion_mask.sum())


def asks_for_elements(completion_mask):
    return completion_mask[completion_mask]


def asks_for_number(completion_mask):
    return completion_mask * float(completion_mask.sum())


@pytest.mark.parametrize("axis", READABLE)
def test_values_of_arrays_are_refused_with_line_and_remedy(axis):
    """In the check of a config, and in a program of other shapes."""
    remedies = {
        asks_if: "write jnp.where in place of if, and, or, not",
        asks_numpy: "functions of jnp",
        asks_for_length: "loop over a shape",
        asks_for_elements: r"jnp.where\(mask, x, 0\)",
        asks_for_number: r"leave out float\(\)",
    }
    for function, remedy in remedies.items():
        words = rf"{function.__name__} fails with \w+: .*\n  \S*test_own.py:\d+ in .*: return .*\n  .*: .*{remedy}"
        with pytest.raises(UserError, match=f"{axis}.name = .*{words}"):
            build_algorithm("reinforce", {axis: {"name": function}})
        with pytest.raises(UserError, match=f"algorithm.{axis}: {words}"):
            jax.eval_shape(Axis(function, users=axis), Tokens(completion_mask=jnp.ones((2, 5), bool)), Rows())


@pytest.mark.parametrize(
    ("axis", "function", "words"),
    [
        ("weight", "mean_of_all", r"must return \[batch, time\] or .* a scalar and dtype float32 \(.*mine.py:\d+\)"),
        ("weight", "below_one_and_a_half", r"of numbers, and .* of shape \[batch, time\] and dtype bool"),
        ("clip", "bounded", r"\[batch, 1\] of true and false, and .* \[batch, time\] and dtype float32"),
        ("mask", "mostly_certain_rows", r"must return \[batch, time\] of true .* shape \[batch\] and dtype bool"),
        ("regularizer", "row_sums", r"must return \[batch, time\] or \[batch, 1\] .* shape \[batch\]"),
        ("term", "row_sums", r"must return \[batch, time\] or \[batch, 1\] .* shape \[batch\]"),
        ("correction", "mean_of_all", "a scalar"),
        ("reduction", "token_sums", r"must return a sum and a count, two scalars, and returns shape \(4,\)"),
        ("reduction", "mean_and_yes", r"returns shapes \(\), \(\) and dtypes float32, bool \(.*mine.py:\d+\)"),
        ("term", "forgotten", r"must return an array, and returns None \(.*mine.py:\d+\)"),
        ("objective", "summed_rows", r"must return \[batch, time\] .* shape \[batch, 1\] .* \(.*mine.py:\d+\)"),
        ("advantage", "mean_reward", r"must return \[batch\] or \[batch, time\] of numbers, and returns a scalar"),
    ],
)
def test_results_of_another_shape_or_type_are_refused(axis, function, words):
    anchor = {"anchor": {"name": "proximal"}} if axis == "correction" else {}
    with pytest.raises(ValueError, match=f"{axis}.name = '{MINE}:{function}': .*{words}"):
        build_algorithm("reinforce", {axis: {"name": f"{MINE}:{function}"}} | anchor)


@pytest.mark.slow
def test_user_trains_with_a_function_in_the_folder(tmp_path):
    """No fork and no package: a file, and one line of config."""
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            import jax.numpy as jnp

            def bounded(ratio, advantages, completion_mask, *, cap=3.0):
                return jnp.where(advantages > 0, jnp.minimum(ratio, cap), ratio)
            """
        )
    )
    (tmp_path / "run.yaml").write_text("output: out\nmodel: {decoder: {}}\ntask: arithmetic\n")
    command = ["-m", "recjax.train", "--config", "run.yaml", "--dry_run"]
    for cap, status in (("2.0", 0), ("high", 2)):
        weight = f"algorithm.weight={{name: 'mine:bounded', cap: {cap}}}"
        done = commands.run([*command, weight], cwd=tmp_path)
        assert done.returncode == status, done.stderr
        assert ("weight: mine:bounded cap 2.0" in done.stdout) == (status == 0)
        assert status == 0 or "algorithm.weight.cap = 'high'" in done.stderr


@pytest.mark.slow
def test_the_library_in_ones_own_loop():
    """The README's example runs as pasted, on logits of a language model; docs/objectives.md has the same lines."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert algorithms.EXAMPLE.strip() in example and len(algorithms.EXAMPLE.strip().splitlines()) <= 12
    exec(example, namespace := {})
    gradient, mask = namespace["gradient"], namespace["mask"]
    assert gradient.ndim == 3 and jnp.isfinite(gradient).all()
    assert ((jnp.abs(gradient).max(-1) > 0) == mask).all()
    np.testing.assert_allclose(gradient.sum(-1), 0, atol=1e-7)  # of a softmax of its own at every position
    assert isinstance(namespace["algorithm"], algorithms.Algorithm) and jax.tree.leaves(namespace["rows"])


def test_the_package_names_what_it_has():
    assert all(getattr(algorithms, name) is not None for name in algorithms.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = algorithms.nothing
