"""Reward functions get the lists that their signatures ask for, in this process and in workers, sync and async."""

import json
import pickle
import re
import sys
from types import SimpleNamespace

import pytest

from recjax.config import make_config
from recjax.rewards.custom import Answered, custom_parts, remote_parts, with_columns
from recjax.rewards.pool import Grading
from recjax.rewards.reward import Reward, passed_name
from recjax.runtime.workers import Workers
from recjax.tasks.loading import load_task
from recjax.tasks.problems import Problem
from tests.marks import campaign_except, slow

CHAT = [{"role": "user", "content": "second"}]
ROWS = [{"prompt": "first", "level": 2}, {"prompt": CHAT, "level": 3, "hint": "h"}]
BASE = {"output": "unused", "model": {"path": "unused"}, "rollout": {"prompts_per_step": 2, "max_completion_tokens": 4}}
SPLIT = {"evaluation": {"problems": 2}}


def loaded(tmp_path, rows, function=None, held_out=None, **values):
    """A task of the rows, and of others to evaluate on, whose reward a program passes unless `values` name one."""
    names = {"train": rows, "evaluation": rows if held_out is None else held_out}
    for name, own in names.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in own))
        names[name] = str(path)
    more = {"reward": passed_name(function)} if function else {}
    values = {"task": {"file": names | values.pop("file", {}), **more, **values.pop("task", {})}, **values}
    config = make_config({**BASE, **SPLIT, **values})
    return load_task(config, "all", function), config


def function_of(signature, expected, is_async=False):
    """A function with a signature, which gives reward 1 if it gets the expected arguments in its only row."""

    def verdict(got):
        assert {name: got[name] for name in expected} == expected and got.keys() == expected.keys(), got
        return [1.0]

    names = {"verdict": verdict}
    exec(f"{'async ' * is_async}def score({signature}):\n    return verdict(locals())", names)
    return names["score"]


def arguments(answer_column):
    """What a list may be, by a short name, for each of two problems: a text and a chat."""
    by_problem = []
    for row, text in zip(ROWS, ("abc", "x"), strict=True):
        columns = {"level": [row["level"]], "hint": [row.get("hint")]}
        plain = isinstance(row["prompt"], str)
        lists = {
            "prompt text": [row["prompt"] if plain else "rendered"],
            "text": [text],
            "prompt": [row["prompt"]],
            "reply": [text if plain else [{"role": "assistant", "content": text}]],
            "answer": [text.upper()],
            "columns": columns,
            "option": 0.5,
            **columns,
        }
        answers = {"answers": lists["answer"], answer_column: lists["answer"]}
        of_trl = {"prompts": lists["prompt"], "completions": lists["reply"], **answers, **columns}
        by_problem.append(lists | {"rest": answers | columns, "rest of TRL's": of_trl})
    return by_problem


# Signatures with the arguments that they get; {gold} stands for the column of answers.
TEXTS = {"prompts": "prompt text", "completions": "text", "answers": "answer"}
SIGNATURES = {
    "prompts, completions, answers": TEXTS,
    "p, c, a, /": {"p": "prompt text", "c": "text", "a": "answer"},
    "prompts, completions, {gold}": {"prompts": "prompt text", "completions": "text", "{gold}": "answer"},
    "p, completions, a": {"p": "prompt text", "completions": "text", "a": "answer"},
    "prompts, completions, answers, columns": TEXTS | {"columns": "columns"},
    "p, c, a, more=None": {"p": "prompt text", "c": "text", "a": "answer", "more": "columns"},
    "prompts, completions, answers, threshold=0.5": TEXTS | {"threshold": "option"},
    "prompts, completions, answers, level": TEXTS | {"level": "level"},
    "prompts, completions, answers, *, level, hint=None": TEXTS | {"level": "level", "hint": "hint"},
    "prompts, completions, answers, **rest": TEXTS | {"rest": "rest"},
    "p, c, a, level=0.5": {"p": "prompt text", "c": "text", "a": "answer", "level": "level"},
    "completions": {"completions": "reply"},
    "completions, answers": {"completions": "reply", "answers": "answer"},
    "completions, {gold}": {"completions": "reply", "{gold}": "answer"},
    "completions, level, hint='none'": {"completions": "reply", "level": "level", "hint": "hint"},
    "completions, *, level, threshold=0.5": {"completions": "reply", "level": "level", "threshold": "option"},
    "{gold}, completions, prompts": {"{gold}": "answer", "completions": "reply", "prompts": "prompt"},
    "prompts, completions, level": {"prompts": "prompt", "completions": "reply", "level": "level"},
    "completions, **rest": {"completions": "reply", "rest": "rest of TRL's"},
    "prompts, completions, **rest": {"prompts": "prompt", "completions": "reply", "rest": "rest of TRL's"},
    "prompts, completions, {gold}, **rest": {"prompts": "prompt", "completions": "reply", "{gold}": "answer"}
    | {"rest": "rest of TRL's"},
    "prompts, completions, level, **rest": {"prompts": "prompt", "completions": "reply", "level": "level"}
    | {"rest": "rest of TRL's"},
}


@pytest.mark.parametrize("gold", [*slow("answer"), "solution"])
@pytest.mark.parametrize("signature", campaign_except(SIGNATURES, *[*SIGNATURES][::4], *[*SIGNATURES][-1:]))
def test_functions_get_the_lists_in_their_signature(tmp_path, monkeypatch, signature, gold):
    rows = [row | {gold: answer} for row, answer in zip(ROWS, ("ABC", "X"), strict=True)]
    texts = {"first": ("first", "abc"), str(CHAT): ("rendered", "x")}
    expected = {}
    for row, lists in zip(rows, arguments(gold), strict=True):
        wanted = {name.format(gold=gold): lists[kind] for name, kind in SIGNATURES[signature].items()}
        if "rest" in wanted:
            wanted["rest"] = {name: value for name, value in wanted["rest"].items() if name not in wanted}
        expected[str(row["prompt"])] = wanted
    for is_async in (False, True):
        for is_passed in (False, True):
            for prompt, wanted in expected.items():
                score = function_of(signature.format(gold=gold), wanted, is_async)
                monkeypatch.setitem(sys.modules, "own_rewards", SimpleNamespace(score=score))
                named = {} if is_passed else {"task": {"reward": "own_rewards:score"}}
                file = {"answer_column": gold}
                task, _ = loaded(tmp_path, rows, score if is_passed else None, file=file, **named)
                # Workers get one problem's completions a call, and thus perhaps no row with the column `hint`.
                (problem,) = (problem for problem in task.evaluation if str(problem.prompt) == prompt)
                row = Answered.to(problem, *texts[prompt], 1, "id")
                if task.reward.remote:
                    assert is_passed and not is_async
                    monkeypatch.setattr(Workers, "held", pickle.loads(task.reward.remote))
                    settings = pickle.loads(pickle.dumps(task.reward._replace(function=None, remote=None)))
                    row = row._replace(columns=dict(row.columns))
                    assert remote_parts(settings, pickle.loads(pickle.dumps([row]))) == {"score": [1.0]}
                else:
                    assert custom_parts(task.reward, [row])["score"].tolist() == [1.0]


def test_workers_know_the_column_of_answers(tmp_path):
    rows = [row | {"solution": answer} for row, answer in zip(ROWS, ("abc", "X"), strict=True)]

    def score(completions, solution, **rest):
        texts = [reply if isinstance(reply, str) else reply[0]["content"] for reply in completions]
        return [float(text == answer) for text, answer in zip(texts, solution, strict=True)]

    task, config = loaded(tmp_path, rows, score, file={"answer_column": "solution"})
    with Grading(config, task.reward) as grading:
        answered = [Answered.to(problem, str(problem.prompt), "abc", 1, "id") for problem in task.evaluation]
        scores = grading.submit(answered).result(timeout=60)
    assert {row.answer: reward for row, reward in zip(answered, scores.rewards.tolist(), strict=True)} == {
        "abc": 1.0,
        "X": 0.0,
    }


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("texts", "the function takes (texts); write score(prompts, completions, answers)"),
        ("texts, answers", "the function takes (texts, answers); write score("),
        (
            "completions, absent",
            "no problem has a column 'absent'; it can take prompts, completions, answers, solution,",
        ),
        (
            "completions, answer",
            "no problem has a column 'answer'; it can take prompts, completions, answers, solution,",
        ),
        ("prompts, completions, answers, *, absent", "(prompts, completions, answers, *, absent), but no problem has"),
        ("prompts, completions, answers, columns, absent", "no problem has a column 'absent'; it can take "),
        ("prompts, completions, columns", "no problem has a column 'columns'; "),
        ("level, p, c, a", "the function takes (level, p, c, a); write score("),
        ("completions, hint, absent", "level, hint: rename the parameter, give it a default, or add the column"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_parameter_without_a_column_is_refused_before_work(tmp_path, signature, message, is_async):
    rows = [row | {"solution": "1"} for row in ROWS]
    score = function_of(signature, {}, is_async)
    with pytest.raises(ValueError, match=re.escape(message)):
        loaded(tmp_path, rows, score, file={"answer_column": "solution"})


def test_train_and_held_out_problems_need_the_columns_alike(tmp_path):
    rows = [{"prompt": f"{number}?", "answer": "1", "level": number} for number in range(4)]
    without = [{"prompt": f"{number}!", "answer": "1"} for number in range(4)]
    score = function_of("completions, level", {})
    for train, held_out in ((rows, without), (without, rows)):
        paths = {"held_out": held_out}
        with pytest.raises(ValueError, match="no problem has a column 'level'"):
            load_task(loaded(tmp_path, train, function_of("completions", {}), **paths)[1], function=score)


def test_problems_have_no_answers_where_the_reward_needs_none(tmp_path):
    by_name = function_of("completions, **rest", {})
    rows = [{"prompt": f"say {number}", "level": number} for number in range(9)]
    for file in ({}, {"answer_column": None}):
        task, _ = loaded(tmp_path, rows, by_name, file=file)
        assert {problem.answer for problem in task.evaluation} == {""}
        assert task.reward.answer is None and task.reward.columns == ("level",)
        for signature in ("completions, answers", "completions, answer"):
            with pytest.raises(ValueError, match=r"row 0|line 1: no 'answer'; .*|no problem has a column 'answers?'"):
                loaded(tmp_path, rows, function_of(signature, {}), file=file)
        for signature in ("texts", "texts, **rest"):
            with pytest.raises(ValueError, match=r"the function takes \(texts.*\); write score\(prompts, completions"):
                loaded(tmp_path, rows, function_of(signature, {}), file=file)
        with pytest.raises(ValueError, match="warm_start: trains on answers, and no problem has one"):
            others = [{"prompt": "other"}, {"prompt": "more"}]
            shown = loaded(tmp_path, rows, by_name, held_out=others, file=file, warm_start={})[1]
            load_task(shown, function=by_name)
    empty = {"prompts": ["p"], "completions": ["c"], "answers": [""]}
    score = function_of("prompts, completions, answers", empty)
    task, _ = loaded(tmp_path, rows, score, file={"answer_column": None}, task={"reward": passed_name(score)})
    assert custom_parts(task.reward, [Answered("p", "c", "", {}, 1)])["score"].tolist() == [1.0]
    # A row without its answer among others, a misspelled column, and a reward that compares are errors.
    for wrong, function in (([*rows, {"prompt": "a", "answer": "1"}], by_name), (rows, score)):
        with pytest.raises(ValueError, match=r"line 1: no 'answer'; .*answer_column; null: problems have no answers"):
            loaded(tmp_path, wrong, function)
    with pytest.raises(ValueError, match="task.file.answer_column = None: the reward .*number_match compares"):
        loaded(tmp_path, rows, file={"answer_column": None})


def test_functions_of_c_take_three_lists():
    assert with_columns(Reward("max", max, False, {}), [Problem("a", "1")]).answer == "answers"
