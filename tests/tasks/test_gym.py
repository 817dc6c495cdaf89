"""reasoning_gym's generators: every one, the same in every process, split without overlap, scored by the package."""

import json
from types import SimpleNamespace

import pytest

from recjax.config import ReasoningGymTask
from recjax.config.gym import check_gym
from recjax.grading.gym import grade, parse
from recjax.runtime.workers import Workers
from recjax.tasks.gym import SYSTEM_PROMPT, gym_problems
from tests.marks import campaign_except

gym = pytest.importorskip("reasoning_gym")

COMPOSITE = {"datasets": [{"name": name, "weight": 1.0, "config": {}} for name in ("chain_sum", "gcd")]}


def task(name="chain_sum", **changes):
    return ReasoningGymTask(name=name, **changes)


GENERATORS = sorted(set(gym.factory.DATASETS) - {"composite"})


@pytest.fixture
def in_this_process(monkeypatch):
    """Generators run here, which saves the start of a process."""
    monkeypatch.setattr(Workers, "call", lambda self, function, *args: SimpleNamespace(result=lambda: function(*args)))


@pytest.mark.slow
def test_problems_are_reproducible_and_distinct():
    config = task("ransom_note", options={"max_note_length": 3})  # walks through sets
    problems = gym_problems(config, 50, seed=0)
    assert gym_problems(config, 50, seed=0) == problems
    other = gym_problems(config, 50, seed=1)
    questions = [json.dumps(problem.prompt) for problem in problems]
    assert len(set(questions)) == len(questions) == 50
    assert not {json.dumps(problem.prompt) for problem in other} & set(questions)


def test_questions_that_come_again_are_left_out(in_this_process):
    small = task("gcd", options={"max_value": 4})
    questions = [problem.prompt[-1]["content"] for problem in gym_problems(small, 205, seed=0)]
    assert len(set(questions)) == len(questions) < 200
    made = gym.create_dataset("gcd", size=205, seed=0, max_value=4)
    assert questions == list(dict.fromkeys(made[index]["question"] for index in range(205)))
    with pytest.raises(ValueError, match=r"examples = 100: 'gcd' gives \d+ different"):
        gym_problems(task("gcd", options={"max_value": 4}, examples=100), 10, seed=0)


def test_chats_and_plain_prompts_show_solved_examples(in_this_process):
    chats = gym_problems(task("gcd", examples=2, template="Q: {question}"), 32, seed=0)
    assert [turn["role"] for turn in chats[0].prompt] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert chats[0].prompt[0]["content"] == SYSTEM_PROMPT and chats[0].prompt[1]["content"].startswith("Q: Find")
    plain = gym_problems(task("gcd", examples=2, template="{question} =", chat=False), 32, seed=0)
    shown = [turn["content"] for turn in chats[0].prompt[1:]]
    for place in (0, 2):
        question, answer = shown[place].removeprefix("Q: "), shown[place + 1]
        assert f"{question} = {parse(answer)}\n" in plain[0].prompt
    assert plain[0].prompt.endswith(shown[-1].removeprefix("Q: ") + " =")
    assert not {shown[0], shown[2]} & {problem.prompt[-1]["content"] for problem in chats}


def test_examples_need_answers(in_this_process):
    with pytest.raises(ValueError, match="examples = 1: boxnet has no answers"):
        gym_problems(task("boxnet", examples=1), 2, seed=0)


def test_difficulty_is_what_tells_problems_apart(in_this_process):
    train = gym_problems(task(options={"min_terms": 2, "max_terms": 3, "max_digits": 1}), 35, seed=0)
    for problem in train:
        assert problem.difficulty == f"num_terms {problem.columns['entry']['metadata']['num_terms']}"
    train = gym_problems(task(), 105, seed=0)
    assert {problem.difficulty for problem in train} == {f"num_terms {terms}" for terms in range(2, 7)}
    train = gym_problems(task("count_bits"), 35, seed=0)
    assert {problem.difficulty for problem in train} == {None}


def test_a_composite_is_scored_by_its_parts(in_this_process):
    train = gym_problems(task("composite", options=COMPOSITE), 35, seed=0)
    labels = {problem.difficulty.split(", ")[0] for problem in train}
    assert labels == {"source_dataset chain_sum", "source_dataset gcd"}
    assert all(grade(problem.answer, problem.answer, problem.columns)["accuracy"] == 1 for problem in train)


@pytest.mark.parametrize("name", campaign_except(GENERATORS, *GENERATORS[::15], slow=GENERATORS[::5]))
def test_every_generators_answers_score_fully_and_no_others(name):
    entry = gym.create_dataset(name, size=1, seed=5)[0]
    answer, columns = entry["answer"] or "", {"generator": name, "options": {}, "entry": entry}
    if answer:  # some leave the answer to the scorer
        assert grade(f"I think <answer>{answer}</answer>", answer, columns) == {"accuracy": 1.0, "score": 1.0}
    for wrong in {"?", "0", "nan", "[]", "inf", "a"} - {answer}:
        assert grade(wrong, answer, columns)["accuracy"] == 0
    assert grade(" ", answer, columns) == {"accuracy": 0.0, "score": 0.0}


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7", "7"),
        (" 7\n", "7"),
        ("<answer>7</answer>", "7"),
        ("It is <answer> 7 </answer>.", "7"),
        ("<answer>6</answer> no, <answer>7</answer>", "7"),
        ("<answer>7", "7"),
        ("<answer></answer>", None),
        ("<think>It is <answer>7</answer>.", None),
        ("<think>6?</think> 7", "7"),
        ("", None),
        ("  ", None),
    ],
)
def test_parse(completion, answer):
    assert parse(completion) == answer


def test_half_a_score_is_not_accurate(in_this_process):
    problem, *_ = gym_problems(task("gcd"), 2, seed=0)
    parts = grade(f"the answer is {problem.answer}", problem.answer, problem.columns)
    assert parts["accuracy"] == 0 and 0 < parts["score"] < 1


@pytest.mark.parametrize("name", ["spiral_matrix", "string_insertion", "countdown", "simple_integration", "puzzle24"])
def test_answers_are_not_run(name, tmp_path):
    touched = tmp_path / "touched"
    for answer in (f"open({str(touched)!r}, 'w')", f"__import__('pathlib').Path({str(touched)!r}).touch()"):
        columns = {"generator": name, "options": {}, "entry": gym.create_dataset(name, size=1, seed=0)[0]}
        assert grade(answer, "", columns)["accuracy"] == 0
    assert not touched.exists()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"name": "leter_counting"}, ["'leter_counting'", "'letter_counting'", "word_ladder"]),
        ({"options": {"max_term": 3}}, ["options.max_term = 3", "max_terms, min_digits"]),
        ({"options": {"seed": 3}}, ["options.seed = 3"]),
        ({"options": {"min_terms": 5, "max_terms": 2}}, ["'max_terms': 2", "chain_sum"]),
        ({"options": {"min_terms": "two"}}, ["'min_terms': 'two'", "chain_sum"]),
        ({"template": "Q:"}, ["'Q:'", "{question}"]),
    ],
)
def test_refusals_name_the_option_and_what_there_is(changes, parts):
    config = task(**changes)
    with pytest.raises(ValueError) as error:
        check_gym(config.name, config.options, config.template)
    for part in parts:
        assert part in str(error.value)
