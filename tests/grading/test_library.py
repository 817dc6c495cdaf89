"""The grader as a library: its three functions, in the reward slots of TRL and verl, as docs/grading.md shows them."""

import ast
import contextlib
import doctest
import io
import sys
from types import SimpleNamespace

import pytest

from recjax.grading import explain, is_right, math_answers, math_reward
from tests.grading.reward_cases import lines_of
from tests.package_files import trees
from tests.test_tutorials import ROOT, blocks

# The arguments of TRL's GRPOTrainer beyond the columns of the data.
TRL = {"completion_ids": [[1], [2]], "trainer_state": None, "log_extra": print, "log_metric": print}


def snippets():
    """The page's program with its output, its lines of TRL, and its file for verl."""
    first, output, trl, verl = [block.text for block in blocks(ROOT / "docs" / "grading.md")]
    return first, output, trl, verl


def test_the_page_prints_what_it_says():
    program, output, _, _ = snippets()
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, names)
    assert printed.getvalue() == output
    commented = [line.rsplit("  # ", 1) for line in program.splitlines() if "  # " in line]
    assert len(commented) == 2
    for call, value in commented:
        assert repr(eval(call, names)) == value


def test_the_examples_of_the_docstrings_run():
    found = doctest.DocTestFinder().find(math_answers)
    assert {test.name.rpartition(".")[2] for test in found if test.examples} == {"is_right", "explain"}
    assert sum(doctest.DocTestRunner().run(test).failed for test in found) == 0


def chat(text):
    """A completion of a chat."""
    return [{"role": "assistant", "content": text}]


def test_trl_calls_the_reward_with_texts_and_with_chats():
    made, dataset = {}, SimpleNamespace(rename_column=lambda old, new: (old, new))
    exec(snippets()[2], {"GRPOTrainer": made.update, "math_reward": math_reward, "dataset": dataset})
    assert made["train_dataset"] == ("solution", "answers")
    reward, texts = made["reward_funcs"], [r"\boxed{\frac{1}{2}}", r"\boxed{0.6}"]
    columns = {"answers": ["0.5", "0.5"], "level": [1, 2], **TRL}
    assert reward.__name__ == "math_reward"  # the name of TRL's metric
    assert reward(prompts=["a", "b"], completions=texts, **columns) == [1.0, 0.0]
    prompts = [[{"role": "user", "content": text}] for text in "ab"]
    assert reward(prompts=prompts, completions=[chat(text) for text in texts], **columns) == [1.0, 0.0]
    tools = [*chat("Look it up."), {"role": "tool", "content": r"\boxed{0.5}"}, *chat(None)]
    assert reward(prompts=prompts, completions=[tools, tools[:2]], **columns) == [0.0, 1.0]


def test_verl_calls_the_reward_with_one_completion():
    names = {}
    exec(snippets()[3], names)
    row = {"data_source": "math", "ground_truth": "1/2", "extra_info": {"split": "train"}}
    assert names["compute_score"](solution_str=r"So \boxed{0.5}.", **row) == 1.0
    assert names["compute_score"](solution_str="So 0.5.", **row, reward_router_address=None) == 0.0


def test_a_box_in_a_prompts_open_thoughts_counts_nothing():
    replies = [r"\boxed{5}", r"\boxed{4}</think>\boxed{5}", r"\boxed{5}"]
    assert math_reward(replies, ["5"] * 3, prompts=["a<think>\n", "a<think>\n", "a"]) == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("other", [None, 5, ["5"]])
def test_true_answers_are_texts(other):
    with pytest.raises(ValueError, match="every true answer must be a text: convert or remove it"):
        math_reward([r"\boxed{5}"] * 2, ["5", other])
    with pytest.raises(ValueError):
        math_reward([r"\boxed{5}"], ["5"] * 2)


def test_explanations_agree_with_the_tables():
    rows = [line.split("\t") for line in lines_of("math_cases.tsv")[::7] if not line.startswith("# ")]
    rules = set()
    for truth, answer, verdict, _ in rows:
        explanation = explain(answer, truth)
        assert explanation.right == is_right(answer, truth) == int(verdict), str(explanation)
        rules.add(explanation.rule)
    assert len(rows) > 150 and len(rules) == 7


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        (r"\boxed{72\text{ inches}}", "6 feet", ("the number 72 with a unit", "the number 6 with a unit", "numbers")),
        ("5 left", "5", ("an expression of f, l, t", "the number 5", "numbers")),
        (r"\{1,2\}", "(1,2)", ("the items 1; 2 in {}", "the items 1; 2 in ()", "item by item")),
        ("y=2x", "2x", ("a relation of x, y", "an expression of x", "expressions")),
        ("Paris", r"\text{paris}", ("text", "text", "as written")),
        ("[1,2)", r"1\le x<2", ("the items 1; 2 in [)", "a relation of x", "regions")),
    ],
)
def test_an_explanation_says_what_was_read(answer, truth, expected):
    explanation = explain(answer, truth)
    assert explanation.answer.endswith(f" ({expected[0]})") and explanation.truth.endswith(f" ({expected[1]})")
    assert expected[2] in explanation.rule
    assert str(explanation).startswith("right: " if explanation.right else "wrong: ")


@pytest.mark.parametrize("text", ["", " ", r"\boxed{}", r"\boxed{5", "9" * 3000, "(" * 900, "$$", r"\\", "\x00", "="])
def test_no_text_raises(text):
    for other in ("5", "x=1", text):
        for answer, truth in ((text, other), (other, text)):
            assert explain(answer, truth).right == is_right(answer, truth)
    assert not is_right(text, "5") and not is_right("5", text)
    assert "there is no answer" in explain("", text).rule


def test_the_library_needs_two_packages():
    nodes = [node for name, tree in trees().items() if name.startswith("recjax.grading") for node in ast.walk(tree)]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    others = {module.split(".")[0] for module in modules} - sys.stdlib_module_names
    # The tasks of reasoning_gym alone import the third one.
    assert others == {"recjax", "sympy", "mpmath", "reasoning_gym"}, "docs/grading.md names the packages"
