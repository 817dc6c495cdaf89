"""The built-in rewards on answers that are right in odd notation, and on ones that only look right."""

import pytest

from recjax.tasks.grading.graders import GRADERS
from recjax.tasks.grading.reward import answer_parser, imported
from tests.tasks.reward_cases import CASES, TWO


@pytest.mark.parametrize(
    ("reward", "completion", "answer", "verdict"),
    [case[1:5] for case in CASES],
    ids=[f"{reward}-{name}" for name, reward, *_ in CASES],
)
def test_the_verdict_is_the_right_one(reward, completion, answer, verdict):
    part = "format" if reward == "gsm8k_format" else "accuracy"
    grader = GRADERS[reward.removesuffix("_format")]
    parts = imported(grader.grade)(completion, answer, {})
    assert parts[part] == verdict and parts.keys() == grader.weights.keys()


@pytest.mark.parametrize(
    ("reward", "completion", "vote"),
    [
        ("math", r"\boxed{\frac{1}{2}}", "1/2"),
        ("math", r"\boxed{0.50}", "1/2"),
        ("math", r"\boxed{x = 1,000}", "1000"),
        ("math", r"\boxed{ 2 \sqrt{3} }", r"2\sqrt{3}"),
        ("math", r"\boxed{1/0}", "1/0"),
        ("math", "The answer is 5.", None),
        ("guru_math", r"\boxed{\left(1, 2\right)}", "(1,2)"),
        ("gsm8k", "<think>a</think><answer>72.0</answer>", "72"),
        ("gsm8k", r"<answer>It is \boxed{72}</answer>", "72"),
        ("gsm8k", "#### 72", "72"),
        ("gsm8k", "72", None),
        ("tool_calls", f"<think>t</think>{TWO}", '[["f", {"a": 1}], ["g", {}]]'),
        ("tool_calls", TWO, None),
    ],
)
def test_votes_for_one_answer_are_one_text(reward, completion, vote):
    assert answer_parser(reward)(completion) == vote


def test_the_order_of_calls_does_not_split_the_vote():
    first, second = '{"name": "f", "arguments": {}}', '{"name": "g", "arguments": {"b": 1, "a": 2.0}}'
    parse = answer_parser("tool_calls")
    other = '{"arguments": {"a": 2, "b": 1}, "name": "g"}'
    assert parse(f"<think>t</think>[{first}, {second}]") == parse(f"<think>u</think>[{other}, {first}]")


@pytest.mark.parametrize("answer", ["f", *(f'[{{"name": "f", "arguments": {{"a": {x}}}}}]' for x in ("NaN", "1e999"))])
def test_an_answer_that_holds_no_calls_is_refused(answer):
    with pytest.raises(ValueError, match="answers that are JSON lists.*f"):
        imported(GRADERS["tool_calls"].grade)("<think>t</think>[]", answer, {})
    assert answer_parser("tool_calls")(f"<think>t</think>{answer}") is None
