"""The built-in rewards on answers that are right in odd notation, and on ones that only look right."""

import time
from pkgutil import resolve_name

import pytest

from recjax.grading.graders import GRADERS
from recjax.grading.thinking import after_thoughts, opening_tag, whole_reply
from recjax.tasks.rewards import exact_match, last_number_match, number_match
from tests.grading.reward_cases import CASES, THOUGHTS, TWO


def answer_parser(reward):
    """What takes a completion to the text by which votes are counted."""
    return resolve_name(GRADERS[reward].parse)


@pytest.mark.parametrize(
    ("reward", "completion", "answer", "verdict"),
    [
        *(case[1:5] for case in CASES),
        *((case[1], whole_reply(opening_tag(case[2]), case[3]), *case[4:6]) for case in THOUGHTS),
    ],
    ids=[f"{reward}-{name}" for name, reward, *_ in [*CASES, *THOUGHTS]],
)
def test_the_verdict_is_the_right_one(reward, completion, answer, verdict):
    part = "format" if reward == "gsm8k_format" else "accuracy"
    grader = GRADERS[reward.removesuffix("_format")]
    parts = resolve_name(grader.grade)(completion, answer, {})
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
        ("math_dapo", "Answer: 72.0", "72"),
        ("math_dapo", "72", None),
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
        resolve_name(GRADERS["tool_calls"].grade)("<think>t</think>[]", answer, {})
    assert answer_parser("tool_calls")(f"<think>t</think>{answer}") is None


@pytest.mark.parametrize(
    "completion",
    [
        *(
            r"\boxed{" + text + "}"
            for text in ("9" * 5_000, " " * 49_000, "5" + "." * 1_990, "*" * 49_000, "1/" + "9" * 1_900)
        ),
        *(r"\boxed{" + opening * 900 + "5" + closing * 900 + "}" for opening, closing in ("()", "[]", "{}")),
        *(
            "<think></think><answer>" + "a" * 49_000,
            "<answer>" * 6_000,
            "Answer: \\[" * 5_000,
            "#### " + " " * 49_000,
            r"\boxed" * 8_000,
        ),
        *("<think>t</think>```json\n" + "\n" * 49_000, "<think>t</think>" + "[" * 49_000, "9" * 49_000, "1," * 24_000),
    ],
    ids=lambda text: f"{text[:20]!r}-{len(text)}",
)
def test_hostile_completions_are_read_at_once_and_raise_nothing(completion):
    started = time.monotonic()
    for reward in ("math", "gsm8k", "math_dapo", "tool_calls"):
        answer_parser(reward)(completion)
        assert resolve_name(GRADERS[reward].grade)(completion, "[]", {})["accuracy"] == 0
    assert number_match([""], [completion], ["5"]) == last_number_match([""], [completion], ["7"]) == [0]
    assert time.monotonic() - started < 2


def test_the_last_number_has_its_thousands():
    assert last_number_match([""] * 3, ["It is 1,234."] * 2 + ["1,234 and 5,67"], ["1234", "234", "67"]) == [1, 0, 1]


OPENED = "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize("reward", [exact_match, number_match, last_number_match])
@pytest.mark.parametrize(
    ("prompt", "completion", "verdict"),
    [
        (OPENED, "70 + 2</think>72", 1),
        (OPENED, "72", 0),
        (OPENED, "72</think>73", 0),
        ("2 + 70 =", "<think>72</think>72", 1),
        ("2 + 70 =", "<think>72", 0),
        ("2 + 70 =", "72", 1),
        ("Say <think>.", "72", 1),
    ],
)
def test_rewards_without_a_library_read_the_text_after_thoughts(reward, prompt, completion, verdict):
    assert reward([prompt], [completion], ["72"]) == [verdict]


def test_an_exact_answer_may_have_the_tags_of_thoughts():
    assert exact_match([""] * 2, ["<think>a</think>b", "b"], ["<think>a</think>b"] * 2) == [1, 0]


def test_many_tags_take_no_time():
    started = time.monotonic()
    for text in ("<think>" * 7_000, "</think>" * 7_000, "<think>[THINK]" * 3_500, "<" * 50_000):
        after_thoughts(text)
    assert time.monotonic() - started < 1
