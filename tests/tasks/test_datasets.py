"""The paper's tasks: rows as the hub has them become problems; malformed rows and missing data are named."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from recjax.config import load_config
from recjax.tasks import mathematics, toolace
from recjax.tasks.loading import load_task
from recjax.tasks.reading import FileRow
from recjax.tasks.toolace import parse_calls


def gsm8k_rows(count, start=0):
    return [{"question": f"What is {i} + 1?", "answer": f"One more: {i}+1.\n#### {i + 1}"} for i in range(start, count)]


MATH_ROWS = [
    {"problem": "Half of 1?", "level": "Level 2", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."},
    {"problem": "Two?", "level": "Level ?", "type": "Geometry", "solution": r"\boxed{1}, no, \boxed{2}"},
]
MATH_500_ROWS = [
    {
        "problem": "Three?",
        "solution": r"\boxed{3.0}",
        "answer": "3",
        "subject": "Algebra",
        "level": 5,
        "unique_id": "test/algebra/1.json",
    }
]
GURU_ROWS = [
    {
        "data_source": "math__merged",
        "prompt": [{"role": "user", "content": f"{i}? Put it in \\boxed{{}}."}],
        "ability": "math",
        "apply_chat_template": True,
        "qwen2.5_7b_pass_rate": rate,
        "reward_model": {"ground_truth": str(i), "style": "rule"},
    }
    for i, rate in enumerate([0.0, 0.4, 1.0, None])
]
USER = [{"role": "user", "content": "q"}]
TOOLS = '[{"name": "Market Trends API", "parameters": {"type": "dict", "required": ["a[0]"]}}, {"name": "now"}]'
TOOLACE_ROWS = [
    {
        "system": f"You compose functions. It is 2024.\n{TOOLS}. \nPut calls as [f(a=b)]. No other text.",
        "conversations": [
            {"from": "user", "value": f"Trends of {place}?"},
            {"from": "assistant", "value": f'[Market Trends API(country="{place}", days=[1, -2]), now()]'},
            {"from": "tool", "value": "[{}]"},
            {"from": "assistant", "value": "Up. Anything else?"},
            {"from": "user", "value": "The time."},
            {"from": "assistant", "value": "[now()]"},
        ],
    }
    for place in ("it's, (here)", "us")
]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix.lower() == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def task_of(tmp_path, *overrides):
    config = tmp_path / "c.yaml"
    config.write_text(
        "output: unset\nmodel: {path: unset}\nrollout: {prompts_per_step: 1}\nevaluation: {problems: 2}\n"
    )
    return load_task(load_config(config, overrides))


def rows_of(*values):
    return [FileRow(value, f"data: row {place}") for place, value in enumerate(values)]


def test_gsm8k_is_read_from_a_hub_folder(tmp_path):
    write(tmp_path / "main/train-00000-of-00001.parquet", gsm8k_rows(9))
    write(tmp_path / "main/test-00000-of-00001.parquet", gsm8k_rows(12, start=8))
    write(tmp_path / "socratic/train-00000-of-00001.parquet", [{"question": "other", "answer": "#### 0"}])
    task = task_of(tmp_path, "task=gsm8k", f"task.gsm8k.train={tmp_path}", f"task.gsm8k.evaluation={tmp_path}")
    # The first of the test split is the last of the train split as well, and left out there.
    assert [problem.answer for problem in task.train] == [str(i + 1) for i in range(8)]
    assert [problem.answer for problem in task.evaluation] == ["9", "10"]
    assert task.train[0].prompt == [
        {"role": "system", "content": mathematics.TAGGED_PROMPT},
        {"role": "user", "content": "What is 0 + 1?"},
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("train.jsonl", "train-00000-of-00001.parquet", "somewhere/else.jsonl"),
        *("data/train-00000-of-00001.parquet", "data/train.jsonl"),
        *("train.ndjson", "train.json", "train.jsonl.gz", "somewhere/else.ndjson.gz", "somewhere/else.JSON"),
    ],
)
def test_files_may_lie_in_the_folder_or_be_named(tmp_path, name):
    path = write(tmp_path / name, gsm8k_rows(8))
    where = path if name.startswith("somewhere/") else tmp_path
    task = task_of(tmp_path, "task=gsm8k", f"task.gsm8k.train={where}", "task.gsm8k.evaluation=null")
    assert sorted(problem.answer for problem in [*task.train, *task.evaluation]) == list("12345678")
    assert len(task.evaluation) == 2


@pytest.mark.parametrize(
    ("answer", "number"),
    [("#### 72", "72"), ("#### 3 ####  -1,234.50 \n", "-1234.50"), ("x #### $5", "5"), ("####.5", ".5")],
)
def test_gsm8k_answers(answer, number):
    assert mathematics.gsm8k_problems(rows_of({"question": "q", "answer": answer}))[0].answer == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{ 2 }", "2"),
        (r"\fbox{3}", "3"),
        (r"$\boxed 4$.", "4"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{5", None),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),
        (r"\boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxedtext{1}", None),
        ("7", None),
    ],
)
def test_last_boxed(text, answer):
    assert mathematics.last_boxed(text) == answer


def test_math_trains_on_solutions_and_is_evaluated_on_answers(tmp_path):
    write(tmp_path / "math/data/train-00000-of-00001.parquet", MATH_ROWS)
    write(tmp_path / "math/algebra/train-00000-of-00001.parquet", MATH_ROWS[:1])
    write(tmp_path / "math_500/test.jsonl", MATH_500_ROWS)
    folders = [f"task.math.train={tmp_path}/math", f"task.math.evaluation={tmp_path}/math_500"]
    task = task_of(tmp_path, "task=math", *folders)
    train = [(problem.answer, problem.difficulty, dict(problem.columns)) for problem in task.train]
    assert train == [
        (r"\frac{1}{2}", "level 2", {"subject": "Algebra"}),
        ("2", "level ?", {"subject": "Geometry"}),
    ]
    assert [(problem.answer, problem.difficulty) for problem in task.evaluation] == [("3", "level 5")]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(None, "2"), ("", "2"), (float("nan"), "2"), (3, "3"), (0, "0"), (3.0, "3"), (1e-7, "0.0000001"), ("3", "3")],
)
def test_math_rows_may_have_numbers_or_no_answer(answer, expected):
    row = {"problem": "p", "solution": r"\boxed{2}", "answer": answer, "level": 5.0}
    (problem,) = mathematics.math_problems(rows_of(row))
    assert (problem.answer, problem.difficulty) == (expected, "level 5")


@pytest.mark.parametrize(("answer", "expected"), [("7", "7"), (7, "7"), (7.0, "7"), (1e-7, "0.0000001")])
def test_guru_answers_may_be_numbers(answer, expected):
    row = {"prompt": USER, "reward_model": {"ground_truth": answer}, "qwen2.5_7b_pass_rate": 1}
    (problem,) = mathematics.guru_math_problems(rows_of(row))
    assert (problem.answer, problem.difficulty) == (expected, "pass rate 0.8 to 1.0")


def test_guru_keeps_the_rows_messages(tmp_path):
    write(tmp_path / "train/math__combined_54.4k.parquet", GURU_ROWS)
    write(tmp_path / "train/logic__ordering.parquet", [{"prompt": "other"}])
    task = task_of(
        tmp_path,
        "task=guru_math",
        f"task.guru_math.train={tmp_path}",
        "task.guru_math.evaluation=null",
        "evaluation.problems=1",
    )
    problems = sorted([*task.train, *task.evaluation], key=lambda problem: problem.answer)
    assert [problem.answer for problem in problems] == ["0", "1", "2", "3"]
    assert [problem.difficulty for problem in problems] == [
        "pass rate 0.0 to 0.2",
        "pass rate 0.4 to 0.6",
        "pass rate 0.8 to 1.0",
        None,
    ]
    assert problems[1].prompt == [{"role": "system", "content": mathematics.BOXED_PROMPT}, *GURU_ROWS[1]["prompt"]]
    assert problems[1].columns == {"data_source": "math__merged"}


def test_toolace_asks_for_every_call_with_its_history():
    problems = toolace.toolace_problems(rows_of(*TOOLACE_ROWS))
    calls = [json.loads(problem.answer) for problem in problems]
    trends = {"name": "Market Trends API", "arguments": {"country": "it's, (here)", "days": [1, -2]}}
    now = {"name": "now", "arguments": {}}
    assert calls[:2] == [[trends, now], [now]] and len(calls) == 4
    assert [problem.difficulty for problem in problems[:2]] == ["2 calls", "1 call"]
    first, second = problems[0].prompt, problems[1].prompt
    assert first[0]["content"] == f"You compose functions. It is 2024.\n{TOOLS}\n\n{toolace.SYSTEM_PROMPT}"
    assert [message["role"] for message in second] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert first == second[:2] and second[2]["content"] == problems[0].answer  # in the form asked for


def test_toolace_holds_out_whole_conversations(tmp_path):
    path = write(tmp_path / "data.json", TOOLACE_ROWS * 3)
    rows = [dict(row, system=f"Number {i}. {row['system']}") for i, row in enumerate(TOOLACE_ROWS * 3)]
    write(path, rows)
    task = task_of(tmp_path, "task=toolace", f"task.toolace.train={tmp_path}", "evaluation.problems=4")
    train, held_out = (
        {problem.prompt[0]["content"] for problem in problems} for problems in (task.train, task.evaluation)
    )
    assert len(task.evaluation) == 4 and len(task.train) == 12 - 2 * len(held_out) and not train & held_out


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[f()]", {}),
        ("  [ f ( a = 1 , b = 'x' ) ]\n", {"a": 1, "b": "x"}),
        ("[f(b=true, a=None, c=False, d=null)]", {"a": None, "b": True, "c": False, "d": None}),
        (
            '[f(a={"x": [1.5, -2], "y": {"z": "}"}}, from="a, b=c")]',
            {"a": {"x": [1.5, -2], "y": {"z": "}"}}, "from": "a, b=c"},
        ),
        (r'[f(a="quote \" , comma", max-results=3)]', {"a": 'quote " , comma', "max-results": 3}),
        ("[f(a=(1, 2))]", {"a": [1, 2]}),
        ('[f(a="é\\/")]', {"a": "é\\/"}),
        ('[f(a="x\ny\r\nz", b=[\'\n\'], c={"\n": 1})]', {"a": "x\ny\r\nz", "b": ["\n"], "c": {"\n": 1}}),
        (r'[f(a="x\\\ny")]'.replace(r"\ny", "\ny"), {"a": "x\\\ny"}),
        ("[f(a=1,\n  b=[1,\n2])]", {"a": 1, "b": [1, 2]}),
        (r"[f(a='\ud83d\ude00')]", {"a": "😀"}),
        ("[f(a='x', b=\"it's (a), b\")]", {"a": "x", "b": "it's (a), b"}),
    ],
)
def test_calls_are_parsed(text, arguments):
    assert parse_calls(text) == [{"name": "f", "arguments": arguments}]


@pytest.mark.parametrize(
    "name",
    [
        "f",
        "Market Trends API",
        "a.b.c",
        "/v1/search",
        "get-weather",
        "天气",
        "Get McDonald's Menu",
        "Wendys' API",
        "x''y",
    ],
)
def test_function_names_are_free(name):
    assert parse_calls(f"[{name}(a=1), {name}(a=2)]") == [{"name": name, "arguments": {"a": i}} for i in (1, 2)]


@pytest.mark.parametrize(
    "text",
    [
        "Hello (there).",
        "[1, 2]",
        "[]",
        "f(a=1)",
        "[f(1)]",
        "[f(a=b)]",
        "[f(a=1, a=2)]",
        "[f(a=1) g(b=2)]",
        "[f(a=1), and more]",
        "[f(a=__import__('os').getpid())]",
        "[f(a=open('/tmp/x', 'w'))]",
        "[f(a=1e999)]",
        "[f(a=-1e999)]",
        "[f(a=[{'b': -1e999}])]",
        "[f(a={'b': 1, 'b': 2})]",
        r"[f(a='\ud83d')]",
        "[f(a=b'x')]",
        "[f(a=1]",
        "[f(a='x)]",
        "[f(a=1)] and text",
        "[f(a=" + "(" * 500 + ")" * 500 + ")]",
    ],
)
def test_texts_without_calls_are_never_run(text):
    assert parse_calls(text) is None


def test_toolace_keeps_unparsable_calls_only_in_the_history():
    turns = [
        {"from": "user", "value": "Go."},
        {"from": "assistant", "value": "[f(a=unquoted text)]"},
        {"from": "user", "value": "Again."},
        {"from": "assistant", "value": "[f(a='quoted')]"},
    ]
    (problem,) = toolace.toolace_problems(rows_of({"system": "no list here", "conversations": turns}))
    assert problem.prompt[2]["content"] == "[f(a=unquoted text)]"
    assert problem.prompt[0]["content"].startswith("no list here\n\n")


@pytest.mark.parametrize(
    ("function", "row", "parts"),
    [
        (mathematics.gsm8k_problems, {"answer": "#### 1"}, ["'question'", "the row has answer"]),
        (mathematics.gsm8k_problems, {"question": " ", "answer": "#### 1"}, ["'question'", "' '"]),
        (mathematics.gsm8k_problems, {"question": "q", "answer": "72"}, ["'answer'", "'####'", "'72'"]),
        (mathematics.gsm8k_problems, {"question": "q", "answer": "#### six"}, ["'answer'", "six"]),
        (mathematics.gsm8k_problems, {"question": "q", "answer": "#### ７２"}, ["'answer'", "７２"]),
        (mathematics.gsm8k_problems, {"question": "q", "answer": 72}, ["'answer'", "72"]),
        (mathematics.math_problems, {"problem": "p", "solution": "no box"}, ["'solution'", "boxed"]),
        (mathematics.math_problems, {"problem": "p"}, ["'solution'"]),
        (mathematics.math_problems, {"problem": "p", "answer": None}, ["'answer'"]),
        (
            mathematics.guru_math_problems,
            {"prompt": "q", "reward_model": {"ground_truth": "1"}},
            ["'prompt'", "messages"],
        ),
        (
            mathematics.guru_math_problems,
            {"prompt": [*USER, {"role": "assistant", "content": "so"}], "reward_model": {"ground_truth": "1"}},
            ["'prompt': the last message is an assistant's", "remove it"],
        ),
        (mathematics.guru_math_problems, {"prompt": USER, "reward_model": "eJx"}, ["'reward_model'", "'eJx'"]),
        (mathematics.guru_math_problems, {"prompt": USER, "reward_model": {"ground_truth": ""}}, ["'reward_model'"]),
        *(
            (
                mathematics.guru_math_problems,
                {"prompt": USER, "reward_model": {"ground_truth": "1"}, "qwen2.5_7b_pass_rate": rate},
                ["'qwen2.5_7b_pass_rate'", "a number from 0 to 1", repr(rate)],
            )
            for rate in ("0.5", "high", float("nan"), float("inf"), [0.5], {"mean": 0.5}, True, 1.5, -0.1)
        ),
        (
            mathematics.guru_math_problems,
            {"prompt": USER, "reward_model": {"ground_truth": float("nan")}},
            ["'reward_model'"],
        ),
        (mathematics.guru_math_problems, {"prompt": USER, "reward_model": {"ground_truth": [1]}}, ["'reward_model'"]),
        (
            mathematics.math_problems,
            {"problem": "p", "solution": "no box", "answer": None},
            ["'solution'", "boxed"],
        ),
        (
            mathematics.math_problems,
            {"problem": "p", "solution": r"\boxed{1}", "answer": [1]},
            ["'answer'", "[1]"],
        ),
        (
            mathematics.math_problems,
            {"problem": "p", "solution": r"\boxed{1}", "answer": True},
            ["'answer'", "True"],
        ),
        (
            mathematics.math_problems,
            {"problem": "p", "solution": r"\boxed{1}", "answer": " "},
            ["'answer'", "' '"],
        ),
        (toolace.toolace_problems, {"system": "s", "conversations": []}, ["'conversations'", "[]"]),
        (toolace.toolace_problems, {"system": "s", "conversations": [{"from": "bot", "value": ""}]}, ["bot"]),
        (toolace.toolace_problems, {"conversations": [{"from": "user", "value": "q"}]}, ["'system'"]),
    ],
)
def test_malformed_rows_are_named(function, row, parts):
    with pytest.raises(ValueError) as error:
        function(rows_of({"question": "q", "answer": "#### 1"}, row)[1:])
    for part in ["data: row 1", "column", *parts]:
        assert part in str(error.value)


def test_a_damaged_folder_is_named_with_what_was_sought(tmp_path):
    (tmp_path / "main").mkdir()
    with pytest.raises(ValueError, match=r"task.gsm8k.train.*main/train-\*.parquet.*train\*.jsonl.*to_parquet"):
        task_of(tmp_path, "task=gsm8k", f"task.gsm8k.train={tmp_path}")
    write(tmp_path / "data.json", {"system": "one row"})
    with pytest.raises(ValueError, match=r"task.toolace.train: .*data.json: must hold one list of rows"):
        task_of(tmp_path, "task=toolace", f"task.toolace.train={tmp_path}")
    with pytest.raises(ValueError, match=r"missing.jsonl: there is no such file"):
        task_of(tmp_path, "task=gsm8k", f"task.gsm8k.train={tmp_path}/missing.jsonl")


def test_one_kind_of_file_is_read_per_folder(tmp_path):
    write(tmp_path / "train.jsonl", gsm8k_rows(8))
    write(tmp_path / "train.jsonl.gz", gsm8k_rows(8))
    write(tmp_path / "train_info.json", {"rows": 8})
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train-00000-of-00001.parquet", gsm8k_rows(8))
    task = task_of(tmp_path, "task=gsm8k", f"task.gsm8k.train={tmp_path}", "task.gsm8k.evaluation=null")
    assert len(task.train) == 6 and len(task.evaluation) == 2


def test_an_unreachable_hub_leads_to_a_local_folder(tmp_path, monkeypatch):
    def unreachable(*arguments, **options):
        raise OSError("no network\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ValueError) as error:
        task_of(tmp_path, "task=gsm8k")
    for part in ["task.gsm8k.train = 'openai/gsm8k'", "no network)", "--include 'main/train-*.parquet'", "=FOLDER"]:
        assert part in str(error.value)


@pytest.mark.parametrize(("prompt", "system"), [("Be brief.", ["Be brief."]), ("", [])])
def test_a_system_prompt_replaces_the_tasks_own(tmp_path, prompt, system):
    write(tmp_path / "train.jsonl", gsm8k_rows(8))
    where = ["task=gsm8k", f"task.gsm8k.train={tmp_path}", "task.gsm8k.evaluation=null"]
    for problem in task_of(tmp_path, *where, f"task.system_prompt='{prompt}'").train:
        assert [turn["content"] for turn in problem.prompt if turn["role"] == "system"] == system


def test_guru_refuses_two_system_messages():
    row = {"prompt": [{"role": "system", "content": "s"}, *USER], "reward_model": {"ground_truth": "1"}}
    assert mathematics.guru_math_problems(rows_of(row))[0].prompt == row["prompt"]
    with pytest.raises(ValueError, match="system message of its own"):
        mathematics.guru_math_problems(rows_of(row), "Be brief.")


def test_no_task_imports_jax():
    code = "import sys, recjax.tasks.loading; sys.exit('jax' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(root)}).returncode == 0
