"""Tasks: the embedded arithmetic, users' files, rewards."""

import gzip
import json
import os
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from uuid import UUID

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recjax.config import ArithmeticTask, FileTask, load_config, to_yaml
from recjax.rewards.custom import with_columns
from recjax.rewards.reward import load_reward
from recjax.store.foreign import Columns, import_rows
from recjax.tasks import loading, reading
from recjax.tasks.arithmetic import arithmetic_problems, worked_sum
from recjax.tasks.files import file_problems, keep_rows, rows_file
from recjax.tasks.loading import load_task
from recjax.tasks.mathematics import guru_math_problems
from recjax.tasks.problems import Problem, chat
from recjax.tasks.reading import FileRow, as_text
from recjax.tasks.rewards import exact_match, last_number_match, number_match


def test_arithmetic_asks_every_question_once_and_answers_it():
    config = ArithmeticTask(problems=["1..9 + 0..3", "5..6 - 7..8", "2..3 * 4..4"], template="{a}{op}{b}=")
    problems = arithmetic_problems(config, seed=0)
    assert len({problem.prompt for problem in problems}) == len(problems) == 9 * 4 + 4 + 2
    for problem in problems:
        a, op, b = re.fullmatch(r"(\d+)([-+*])(\d+)=", problem.prompt).groups()
        assert int(problem.answer) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op]
        assert problem.difficulty in config.problems and f" {op} " in problem.difficulty
    assert problems == arithmetic_problems(config, seed=0) != arithmetic_problems(config, seed=1)


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (47, 85, "7+5+0=12;4+8+1=13;132"),
        (12, 34, "2+4+0=6;1+3+0=4;46"),
        (5, 98, "5+8+0=13;0+9+1=10;103"),
        (2, 3, "2+3+0=5;5"),
    ],
)
def test_worked_sums_show_columns_carries_and_the_result(a, b, text):
    assert worked_sum(a, b) == text


def test_mistakes_have_one_wrong_column_and_follow_through():
    for problem in arithmetic_problems(
        ArithmeticTask(problems=["10..99 + 10..99"], template="{a}{op}{b}=", worked=True), seed=0
    )[:500]:
        assert last_number_match([""], [problem.answer], [str(eval(problem.prompt[:-1]))]) == [1]
        assert 6 <= len(problem.mistakes) <= 8
        for mistake in problem.mistakes:
            *columns, result = mistake.split(";")
            sums = [(eval(column.split("=")[0]), int(column.split("=")[1])) for column in columns]
            wrong = [abs(right - said) for right, said in sums if right != said]
            assert len(wrong) == 1 and wrong[0] in (1, 2)
            assert (
                int(result)
                == sum(said % 10 * 10**place for place, (_, said) in enumerate(sums)) + sums[-1][1] // 10 * 100
            )
            carries = [0, *(said // 10 for _, said in sums[:-1])]
            assert [int(column.split("=")[0].split("+")[2]) for column in columns] == carries
            assert last_number_match([""], [mistake], [problem.answer]) == [0]


def test_worked_answers_of_other_than_sums_are_refused():
    with pytest.raises(ValueError, match="'1..9 - 1..9': task.arithmetic.worked"):
        arithmetic_problems(ArithmeticTask(problems=["1..9 + 1..9", "1..9 - 1..9"], worked=True), seed=0)


def test_examples_are_solved_and_never_give_the_question_away():
    problems = arithmetic_problems(ArithmeticTask(problems=["1..3 + 1..2"], examples=4), seed=0)
    for problem in problems:
        *examples, question = problem.prompt.splitlines()
        assert len(set(examples)) == 4
        assert not any(line.startswith(question) for line in examples)
        assert all(int(line.split()[-1]) == int(line.split()[0]) + int(line.split()[2]) for line in examples)


@pytest.mark.parametrize("kind", ["1..9 / 1..9", "9..1 + 1..2", "0..9999 * 0..9999", "one"])
def test_arithmetic_refuses_kinds_by_name(kind):
    with pytest.raises(ValueError, match=re.escape(repr(kind))):
        arithmetic_problems(ArithmeticTask(problems=[kind]), seed=0)


def test_a_template_may_name_the_only_operation():
    config = ArithmeticTask(problems=["1..9 + 0..3", "1..2 + 7..8"], template="{a}+{b}=")
    assert {problem.prompt for problem in arithmetic_problems(config, seed=0)} >= {"1+0=", "9+3=", "2+8="}
    with pytest.raises(ValueError, match="may be missing if all problems have one operation"):
        arithmetic_problems(config.model_copy(update={"problems": ["1..9 + 0..3", "1..9 - 0..3"]}), seed=0)


@pytest.mark.parametrize("template", ["{a} {op} =", "{a} {op} {b} {c}", "{"])
def test_arithmetic_refuses_templates_without_the_question(template):
    with pytest.raises(ValueError, match=re.escape(repr(template))):
        arithmetic_problems(ArithmeticTask(template=template), seed=0)


ROWS = [
    {"prompt": "1+1=", "answer": 2, "note": "a"},
    {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"},
]


def write_jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_jsonl_rows_become_problems(tmp_path):
    problems = file_problems(write_jsonl(tmp_path / "a.jsonl", ROWS), FileTask(train=""))
    chat = [{"role": "user", "content": "2+2?"}]
    assert problems == [Problem("1+1=", "2", columns={"note": "a"}), Problem(chat, "4")]


USER = {"role": "user", "content": "2+2?"}
CALLS = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
PARTS = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant", "content": None, "tool_calls": CALLS}, ""),
        ({"role": "assistant", "tool_calls": CALLS}, ""),
        ({"role": "assistant", "content": "I add.", "tool_calls": CALLS}, "I add."),
        ({"role": "user", "content": PARTS, "name": None}, "2+2?"),
        ({"role": "user", "content": [{**PARTS[0], "image_url": None}]}, "2+"),
        ({"role": "assistant", "content": None}, "content = None: takes text, or null next to an assistant's tool_c"),
        ({"role": "user", "content": None, "tool_calls": CALLS}, "content = None: takes text"),
        ({"role": "user"}, "content = None: takes text"),
        ({"role": "user", "content": 3}, "content = 3: takes text"),
        ({"role": "user", "content": [*PARTS, IMAGE]}, "content has {'type': 'image_url', 'image_url': {'url': 'x'}}:"),
        ({"role": "user", "content": ["2+2?"]}, "content has '2+2?': takes text, or only parts of type text"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "content has {'type': 'text', 'text': None}:"),
        ({"content": "2+2?"}, "{'content': '2+2?'} is no message; it has a role, and content"),
        ("2+2?", "'2+2?' is no message; it has a role, and content"),
    ],
)
def test_messages_have_openais_format_in_every_kind_of_rows(tmp_path, message, content):
    before = [{"role": "system", "content": "Count."}, {**USER, "content": "two"}]
    chat, row = [*before, message, USER], {"answer": "4", "completion": "4", "reward_model": {"ground_truth": "4"}}
    path = write_jsonl(tmp_path / "a.jsonl", [{**row, "prompt": chat}, {**row, "prompt": json.dumps(chat)}])
    readers = {
        "a.jsonl: line 1: column 'prompt'": lambda: file_problems(path, FileTask(train="")),
        "a.jsonl: row: column 'prompt'": lambda: guru_math_problems([FileRow({**row, "prompt": chat}, f"{path}: row")]),
        "a.jsonl: line 1: prompt": lambda: import_rows([path], Columns(), datetime.now(UTC)).records,
    }
    for place, read in readers.items():
        if "takes" in content or "has" in content:
            with pytest.raises(ValueError, match=re.escape(f"{place}: message 2: {content}")):
                read()
        elif "tool_calls" in message and "prompt" == place[-6:]:
            with pytest.raises(ValueError, match="a message has 'tool_calls', which a store cannot hold"):
                read()
        else:
            calls = {"tool_calls": CALLS} if "tool_calls" in message else {}
            expected = [*before, {"role": message["role"], "content": content, **calls}, USER]
            prompts = [one.prompt if isinstance(one, Problem) else one.group.prompt for one in read()]
            assert prompts == [expected] * len(prompts) != []


@pytest.mark.parametrize("text", ['[{"role": 1}, 2]', "[]", '{"role": "user", "content": "x"}', "[" * 10**5, "3"])
def test_texts_without_json_messages_stay_texts(tmp_path, text):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": text, "answer": "4"}])
    assert file_problems(path, FileTask(train=""))[0].prompt == text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("1e-7", "0.0000001"),
        ("72.0", "72"),
        ("-2.50", "-2.5"),
        ("-0.0", "0"),
        ("0.1", "0.1"),
        ("1e22", "1" + "0" * 22),
        ("1.5e300", "15" + "0" * 299),
        ("5e-324", "0." + "0" * 323 + "5"),
        ("12345678901234567890123", "12345678901234567890123"),
        ("7" * 400, "7" * 400),
        ("12345678901234567890.5", "12345678901234567890.5"),
        ("-0.1234567890123456789012", "-0.1234567890123456789012"),
        ("-" + "7" * 400, "-" + "7" * 400),
        ('"1e-7"', "1e-7"),
        ('"72.0"', "72.0"),
    ],
)
def test_a_number_keeps_its_value_as_an_answer(tmp_path, answer, text):
    path = write_jsonl(tmp_path / "a.jsonl", [f'{{"prompt": "x", "answer": {answer}}}'])
    (problem,) = file_problems(path, FileTask(train=""))
    assert problem.answer == text
    if answer[0] != '"':
        assert Decimal(text) == Decimal(answer) and number_match([""], [text], [problem.answer]) == [1]


def test_the_numbers_of_parquet_columns_keep_their_value(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {
        "prompt": ["a", "b"],
        "answer": [72.0, 1e-7],
        "exact": pa.array([Decimal("1.10"), Decimal("-3.00")]),
        "level": [3.0, 2.5],
    }
    pq.write_table(pa.table(columns), path)
    found = file_problems(str(path), FileTask(train="", difficulty_column="level"))
    assert [(one.answer, one.difficulty) for one in found] == [("72", "3"), ("0.0000001", "2.5")]
    assert [one.answer for one in file_problems(str(path), FileTask(train="", answer_column="exact"))] == ["1.1", "-3"]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_narrow_numbers_have_the_digits_of_their_own_type(tmp_path, monkeypatch, kind):
    """In Parquet columns, and in rows of a program as arrays, NumPy values, a DataFrame and a datasets.Dataset."""
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    texts = ["0.1", "2.4", "72", "0.0000001", "-0.7"] + ["16777216", "10000000000"] * (kind != "float16")
    numbers = np.array(texts, kind)
    inner = pa.from_numpy_dtype(kind)
    plain = {"prompt": [str(place) for place in range(len(numbers))], "answer": numbers, "level": numbers}
    nested = {
        "list": pa.array([[number] for number in numbers], pa.list_(inner)),
        "struct": pa.array([{"x": number} for number in numbers], pa.struct([("x", inner)])),
    }
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(plain | nested), path)
    by_hand = [
        {"prompt": str(place), "answer": number, "level": number, "list": numbers[place:], "struct": {"x": number}}
        for place, number in enumerate(numbers)
    ]
    table, frame = datasets.Dataset(pq.read_table(path)), pd.DataFrame(plain)
    for source in (str(path), *(rows_file(keep_rows(rows)) for rows in (by_hand, table, frame))):
        found = file_problems(source, FileTask(difficulty_column="level"))
        assert [one.answer for one in found] == [one.difficulty for one in found] == texts
        assert [as_text(one.columns["level"]) for one in found] == texts
        if "list" in found[0].columns:
            assert [as_text(one.columns["list"][0]) for one in found] == texts
            assert [as_text(one.columns["struct"]["x"]) for one in found] == texts


def test_unreadable_answers_are_refused_with_the_task(tmp_path):
    rows = [{"prompt": f"question {i}", "answer": i} for i in range(12)]
    bad = [*rows[:7], {"prompt": "odd", "answer": "odd"}, *rows[7:]]
    for reward in ("number_match", "last_number_match"):
        named = f"task.reward=recjax.tasks.rewards:{reward}"
        assert len(load_task(load_config(*file_config(tmp_path, rows, named))).train) == 8
        with pytest.raises(ValueError, match=f"task.reward = 'recjax.tasks.rewards:{reward}'.*got 'odd'; correct"):
            load_task(load_config(*file_config(tmp_path, bad, named)))
    load_task(load_config(*file_config(tmp_path, bad, "task.reward=recjax.tasks.rewards:exact_match")))


CONTENT = "".join(json.dumps(row) + "\n" for row in ROWS)
WINDOWS = "\ufeff" + CONTENT.replace("\n", "\r\n")


@pytest.mark.parametrize("content", [CONTENT, CONTENT.rstrip(), "\n" + CONTENT, WINDOWS, json.dumps(ROWS, indent=2)])
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.JSONL", "a.jsonl.gz", "a.ndjson.gz", "a.json.gz"])
def test_json_lines_may_have_other_names(tmp_path, name, content):
    is_list = content[0] == "["
    data, path = content.encode(), tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    if is_list and ".json" not in name.replace("jsonl", "").replace("ndjson", ""):
        with pytest.raises(ValueError, match="line 1: not valid JSON"):
            file_problems(str(path), FileTask(train=""))
    else:
        assert [problem.answer for problem in file_problems(str(path), FileTask(train=""))] == ["2", "4"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{"prompt": "x", "answer": 1}\n{"prompt": "y", "answer": \n', "a.json: line 2: not valid JSON"),
        ("a.json", '{\n  "data": [\n    {"prompt": "x"}\n  ]\n}', "a.json: must hold one list of rows"),
        ("a.json", " ", "the file holds no rows"),
        ("a.jsonl.gz", CONTENT, "a.jsonl.gz: cannot be read as gzip"),
        (
            "a.jsonl",
            gzip.compress(CONTENT.encode(), mtime=0),
            "a.jsonl: holds gzip data; give the file the",
        ),
        ("a.json", b"PAR1\xff", "a.json: holds Parquet data"),
        ("a.jsonl.gz", gzip.compress(CONTENT.encode(), mtime=0)[:-9], "a.jsonl.gz: cannot be read as gzip"),
        ("a.jsonl", '{"prompt": "x", "answer": 1, "answer": 2}\n', "line 1: the key 'answer' is given twice"),
        ("a.json", '[{"prompt": "x", "answer": 1, "prompt": "y"}]', "a.json: the key 'prompt' is given twice"),
        ("a.jsonl", '{"prompt": "x", "answer": 1, "more": {"k": 1, "k": 1}}\n', "line 1: the key 'k' is given twice"),
        (
            "a.jsonl.gz",
            gzip.compress(b"{}\n" + bytes(10**6), mtime=0),
            "a.jsonl.gz: line 2 has 1000000 bytes or more; remove it",
        ),
    ],
)
def test_damaged_files_are_named(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(reading, "_LONGEST_LINE", 10**6)
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=re.escape(message)):
        file_problems(str(tmp_path / name), FileTask(train=""))


def test_floats_are_written_with_their_shortest_digits(tmp_path):
    texts = {"0.10000000000000001": "0.1", "0.10000000000000000555": "0.1", "0.10000000000000000556": None}
    for printed, digits in texts.items():
        path = write_jsonl(tmp_path / "a.jsonl", [f'{{"prompt": "x", "answer": {printed}}}'])
        assert file_problems(path, FileTask(train=""))[0].answer == (digits or printed)


def test_a_parquet_file_is_read_without_cache_or_pattern(tmp_path):
    def write(name, *answers):
        pq.write_table(pa.table({"prompt": ["x"] * len(answers), "answer": answers}), tmp_path / name)
        os.utime(tmp_path / name, (0, 0))

    def answers(name):
        return [problem.answer for problem in file_problems(tmp_path / name, FileTask(train=""))]

    write("a.parquet", "1", "2")
    assert answers("a.parquet") == ["1", "2"]
    write("a.parquet", "7", "8", "9")
    assert answers("a.parquet") == ["7", "8", "9"]
    for name, other in (("b[1].parquet", "b1.parquet"), ("c*.parquet", "cd.parquet"), ("e?.parquet", "ef.parquet")):
        write(name, "own")
        write(other, "other")
        assert answers(name) == ["own"]
    write("x::y.parquet", "own")
    assert answers("x::y.parquet") == ["own"]


def test_the_metadata_of_a_parquet_file_opens_nothing(tmp_path):
    image = {"bytes": None, "path": str(tmp_path / "missing.png")}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"prompt": ["x"], "answer": ["1"], "picture": pa.array([image], kind)})
    texts = {name: {"dtype": "string", "_type": "Value"} for name in ("prompt", "answer")}
    features = texts | {"picture": {"_type": "Image"}}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, tmp_path / "a.parquet")
    assert file_problems(tmp_path / "a.parquet", FileTask(train=""))[0].columns == {"picture": image}


def test_unread_parquet_columns_may_hold_anything(tmp_path):
    columns = {
        "prompt": ["x", "y"],
        "answer": ["1", "2"],
        "times": pa.array([2**62, 5], pa.timestamp("us")),
        "map": pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64())),
        "raw": [b"\xff", None],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    first, second = file_problems(tmp_path / "a.parquet", FileTask(train=""))
    assert (first.columns["map"], first.columns["raw"], second.columns["times"].microsecond) == ({"a": 1}, b"\xff", 5)
    reason = r"a.parquet: row 0: column 'times': OverflowError: date value out of range; task.reward = .* reads this"
    for read in (lambda completions, answers, times: [0.0], lambda completions, times=None, **columns: [0.0]):
        reward = load_reward("python:it", {}, False, read)._replace(answer="answer")
        with pytest.raises(ValueError, match=reason):
            with_columns(reward, [first, second])
    with pytest.raises(ValueError, match="row 0: column 'times': must hold text or a number.*OverflowError"):
        file_problems(tmp_path / "a.parquet", FileTask(train="", answer_column="times"))


CALLS_OF_TWO_TOOLS = [
    {
        "prompt": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": arguments}]},
            USER,
        ],
        "answer": "4",
        "tools": [{"name": name, "parameters": {"properties": {each: {"type": "string"} for each in arguments}}}],
    }
    for name, arguments in (("add", {"a": 1, "b": 2}), ("weather", {"city": "Rome"}))
]


@pytest.mark.parametrize("source", ["parquet", "jsonl", "Dataset", "to_list", "DataFrame", "to_dict", "selected"])
def test_nulls_of_tables_reach_no_chat_or_tools(tmp_path, monkeypatch, source):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    table = datasets.Dataset.from_list(CALLS_OF_TWO_TOOLS)
    table.to_parquet(tmp_path / "a.parquet")
    if source in ("parquet", "jsonl"):
        path = tmp_path / f"a.{source}"
        table.to_json(tmp_path / "a.jsonl")
    else:
        frame = pd.read_parquet(tmp_path / "a.parquet")
        rows = {"Dataset": table, "to_list": table.to_list(), "DataFrame": frame, "to_dict": frame.to_dict("records")}
        path = rows_file(keep_rows(table.select([0]) if source == "selected" else rows[source]))
    found = file_problems(path, FileTask(train=""))
    assert len(found) == (1 if source == "selected" else 2)
    for problem, row in zip(found, CALLS_OF_TWO_TOOLS, strict=False):
        assert problem.prompt == row["prompt"] and problem.template == {"tools": row["tools"]}


def test_nulls_that_a_user_wrote_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    calls = (
        [{"name": "find", "arguments": {"city": None}}],
        [{"name": "find", "arguments": {"city": "Rome", "n": None}}],
    )
    rows = [
        {"prompt": [USER, {"role": "assistant", "content": "", "tool_calls": call}, USER], "answer": "4", "tools": call}
        for call in calls
    ]
    messages = [
        {name: datasets.Json() if name == "tool_calls" else datasets.Value("string") for name in rows[0]["prompt"][1]}
    ]
    features = datasets.Features({"prompt": messages, "answer": datasets.Value("string"), "tools": datasets.Json()})
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(tmp_path / "a.parquet")
    write_jsonl(tmp_path / "a.jsonl", rows)
    for path in (tmp_path / "a.jsonl", tmp_path / "a.parquet", rows_file(keep_rows(rows)), rows_file(keep_rows(table))):
        found = file_problems(path, FileTask(train=""))
        assert [problem.prompt for problem in found] == [row["prompt"] for row in rows]
        assert [problem.template["tools"] for problem in found] == list(calls)


def test_json_cells_of_a_dataset_are_decoded_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    json_cell = datasets.Json()
    features = datasets.Features({"prompt": datasets.Value("string"), "answer": json_cell, "more": [{"a": json_cell}]})
    rows = [{"prompt": "p", "answer": text, "more": [{"a": text}]} for text in ("four", '"4"', "[1")]
    table = datasets.Dataset.from_list(rows, features=features)
    assert [row["answer"] for row in table] == ["four", "4", "[1"]
    written = rows_file(keep_rows(table)).read_text().splitlines()
    assert [json.loads(line) for line in written] == list(table)


def test_a_programs_rows_may_have_cells_that_json_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    texts = {
        "time": (datetime(2020, 1, 2, 3, tzinfo=UTC), "2020-01-02T03:00:00+00:00"),
        "stamp": (pd.Timestamp("2020-01-02"), "2020-01-02T00:00:00"),
        "date": (date(2020, 1, 2), "2020-01-02"),
        "id": (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        "exact": (Decimal("1.10"), "1.1"),
        "wide": (np.datetime64("2020-01-02", "ns"), "2020-01-02T00:00:00.000000000"),
        **{name: (value, None) for name, value in (("na", pd.NA), ("nat", pd.NaT), ("nan", np.float32("nan")))},
    }
    row = {"prompt": np.array([USER], object), "answer": Decimal("0.50"), **{name: texts[name][0] for name in texts}}
    (problem,) = file_problems(rows_file(keep_rows([row])), FileTask(train=""))
    assert (problem.prompt, problem.answer) == ([USER], "0.5")
    assert problem.columns == {name: texts[name][1] for name in texts}
    (problem,) = file_problems(rows_file(keep_rows(pd.DataFrame([row]))), FileTask(train="", answer_column="exact"))
    assert (problem.prompt, problem.answer) == ([USER], "1.1")
    (problem,) = file_problems(rows_file(keep_rows([{**row, "raw": b"x"}])), FileTask(train=""))
    assert problem.columns["date"] == "2020-01-02"
    with pytest.raises(
        ValueError, match="problems: row 0: column 'raw': must .*a value of type bytes, which JSON cannot"
    ):
        file_problems(rows_file(keep_rows([{**row, "raw": b"x"}])), FileTask(train="", answer_column="raw"))
    assert keep_rows(pd.Series([{"prompt": "x"}])) == keep_rows([{"prompt": "x"}])
    for wrong, reason in (
        ([{"prompt": "\ud800"}], "row 0: has half of a"),
        ({"train": []}, r"choose one: problems\['tr"),
    ):
        with pytest.raises(ValueError, match=f"problems: .*{reason}"):
            keep_rows(wrong)


def test_a_set_may_lie_in_several_files(tmp_path):
    (tmp_path / "data").mkdir()
    for place, name in enumerate(("train-00001-of-00002", "train-00000-of-00002", "test-00000-of-00001")):
        table = pa.table({"prompt": [f"{place}?"], "answer": [str(place)]})
        pq.write_table(table, tmp_path / "data" / f"{name}.parquet")

    def answers(where, split="train"):
        return [problem.answer for problem in file_problems(where, FileTask(train=""), split=split)]

    assert answers(tmp_path) == answers(tmp_path / "data") == answers(f"{tmp_path}/data/train-*.parquet") == ["1", "0"]
    assert answers(tmp_path, "test") == ["2"] and answers(f"{tmp_path}/**/*.parquet") == ["2", "1", "0"]
    with pytest.raises(ValueError, match=r"task.file: .*none-\*.parquet: no file has a name of this pattern; correct"):
        answers(f"{tmp_path}/none-*.parquet")


def test_words_for_no_answer_are_counted_in_a_warning(tmp_path, caplog):
    rows = [{"prompt": f"{i}?", "answer": answer} for i, answer in enumerate(["proof", " NaN", "proof", *"123456789"])]
    load_task(load_config(*file_config(tmp_path, rows, "task.reward=math")))
    said = [record.getMessage() for record in caplog.records if "have no answer" in record.getMessage()]
    assert len(said) == 1 and "of 3 of 12 problems are 'proof' (2), ' NaN' (1): a completion" in said[0]


def test_a_parquet_column_that_is_given_twice_is_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array([1]), pa.array([2])], ["prompt", "answer", "answer"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: .*(answer|[Dd]uplicate)"):
        file_problems(str(tmp_path / "a.parquet"), FileTask(train=""))


def test_a_column_of_a_file_can_name_the_difficulty(tmp_path):
    rows = [{"prompt": "1+1=", "answer": 2, "level": 3, "note": "a"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert file_problems(path, FileTask(train="", difficulty_column="level")) == [
        Problem("1+1=", "2", columns={"level": 3, "note": "a"}, difficulty="3")
    ]
    with pytest.raises(ValueError, match="line 1: no 'hard'.*task.file.difficulty_column"):
        file_problems(path, FileTask(train="", difficulty_column="hard"))


def test_a_line_of_json_may_hold_a_line_separator(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b\x85c", "answer": 1}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert file_problems(str(path), FileTask(train=""))[0].prompt == "a\u2028b\x85c"


def test_parquet_rows_become_problems_and_columns_can_be_named(tmp_path):
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list([{"q": "1+1=", "a": "2"}, {"q": "3+3=", "a": "6"}]).to_parquet(path)
    plain = file_problems(str(path), FileTask(train="", prompt_column="q", answer_column="a"))
    assert plain == [Problem("1+1=", "2"), Problem("3+3=", "6")]
    chat = file_problems(str(path), FileTask(train="", prompt_column="q", answer_column="a", chat=True))
    assert chat[1] == Problem([{"role": "user", "content": "3+3="}], "6")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"prompt": "x", ', "not valid JSON"),
        ("[1, 2]", "object"),
        ({"prompt": "x"}, "no 'answer'"),
        ({"question": "x", "answer": "1"}, "no 'prompt'; the row has 'question', 'answer'"),
        ({"prompt": "x", "answer": None}, "no 'answer'"),
        ({"prompt": " ", "answer": "1"}, "not blank"),
        ({"prompt": 3, "answer": "1"}, "'prompt': must hold text"),
        ({"prompt": [], "answer": "1"}, "must hold a list of messages with role and content; got []"),
        ({"prompt": chat("", "3+4?", "Let me think: "), "answer": "7"}, "'prompt': the last message is an assistant's"),
        ({"prompt": "x", "answer": ["1"]}, "'answer': must hold text or a number"),
        ({"prompt": "x", "answer": True}, "'answer': must hold text or a number"),
        ('{"prompt": "x", "answer": NaN}', "'answer': must hold text or a number"),
        ('{"prompt": "x", "answer": -Infinity}', "'answer': must hold text or a number"),
        ('{"prompt": "x", "answer": 1e999}', "'answer': must hold text or a number"),
    ],
)
def test_malformed_rows_are_refused_with_file_and_line(tmp_path, row, reason):
    path = write_jsonl(tmp_path / "bad.jsonl", [ROWS[0], row, ROWS[1]])
    with pytest.raises(ValueError) as error:
        file_problems(path, FileTask(train=""))
    assert path in str(error.value) and "line 2" in str(error.value) and reason in str(error.value)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\n")
    (tmp_path / "a.jsonl").write_text("\n")
    (tmp_path / "a.parquet").write_text("no parquet")
    (tmp_path / "folder").mkdir()
    reasons = {"b.jsonl": "no such", "a.csv": "pandas.read_csv", "a.jsonl": "no rows", "a.parquet": "magic"}
    reasons |= {"folder": r"holds, in it or in data/, no train\*.*a pattern such as .*load_from_disk.*to_parquet"}
    for name, reason in reasons.items():
        with pytest.raises(ValueError, match=f"{name}.*{reason}"):
            file_problems(str(tmp_path / name), FileTask(train=""))


def test_held_out_questions_are_not_trained_on(tmp_path):
    rows = [{"prompt": f"question {i % 5}", "answer": i % 5} for i in range(40)]
    task = load_task(load_config(*file_config(tmp_path, rows, "task.file.chat=true")))
    train, held_out = (
        {problem.prompt[0]["content"] for problem in problems} for problems in (task.train, task.evaluation)
    )
    assert len(train) == 4 and len(held_out) == 1 and not train & held_out


def file_config(tmp_path, rows, *overrides):
    """A config of a file task with two problems held out."""
    config = tmp_path / "file.yaml"
    config.write_text(
        "output: unset\nmodel: {path: unset}\nrollout: {prompts_per_step: 1}\nevaluation: {problems: 2}\n"
    )
    return config, [f"task.file={{train: {write_jsonl(tmp_path / 'file.jsonl', rows)}}}", *overrides]


def test_evaluation_problems_are_held_out(tmp_path, monkeypatch):
    rows = [{"prompt": f"question {i}", "answer": i} for i in range(40)]
    config = tmp_path / "c.yaml"
    config.write_text(
        f"output: x\nmodel: {{decoder: {{}}}}\ntask: {{file: {{train: {write_jsonl(tmp_path / 'a.jsonl', rows)}}}}}\n"
        "evaluation: {problems: 13}\n"
    )
    task = load_task(load_config(config))
    train, held_out = ({problem.prompt for problem in problems} for problems in (task.train, task.evaluation))
    assert (len(train), len(held_out), train & held_out) == (27, 13, set())
    assert held_out != {f"question {i}" for i in range(10)}  # not simply the first rows
    fewer = load_task(load_config(config, ["evaluation.problems=3"]))
    assert (fewer.train, fewer.evaluation) == (task.train, task.evaluation[:3])
    for asked in (14, 256):
        too_many = load_config(config, [f"evaluation.problems={asked}"])
        message = f"evaluation.problems = {asked}: of the task's 40 problems 13 are held out"
        with pytest.raises(ValueError, match=rf"{message}(?!.*--all)"):
            load_task(too_many)
        with pytest.raises(ValueError, match=f"{message}.*or evaluate on all of them with recjax.evaluate --all"):
            load_task(too_many, "held_out")
        assert len(load_task(too_many, "all").evaluation) == 40
    # A number that the user leaves out adapts, also in the config that a run keeps.
    default = load_config(config, ["evaluation.problems=null"])
    (tmp_path / "kept.yaml").write_text(to_yaml(default))
    said = []
    monkeypatch.setattr(loading.logger, "info", lambda words, *values: said.append(words % values))
    for pool in ("train", "held_out"):
        assert load_task(load_config(tmp_path / "kept.yaml"), pool).evaluation == task.evaluation
    words = "evaluating on 13 held-out problems, a third of the task's 40"
    assert said == [words, f"{words}, or evaluate on all of them with recjax.evaluate --all"]
    few = [f"task.file.train={write_jsonl(tmp_path / 'b.jsonl', rows[:2])}", "evaluation.problems=null"]
    with pytest.raises(ValueError, match="of the task's 2 problems 0 are held out.*or add problems"):
        load_task(load_config(config, few))
    with pytest.raises(ValueError, match=r"rollout.prompts_per_step = 28"):
        load_task(load_config(config, ["rollout.prompts_per_step=28"]))


@pytest.mark.parametrize("answer", ["$ $", r"\boxed{}", "1" * 2001, "(" * 17 + "x" + ")" * 17])
def test_an_answer_that_no_completion_can_equal_is_refused(tmp_path, answer):
    rows = [{"prompt": f"question {i}", "answer": i} for i in range(9)]
    config = file_config(tmp_path, [*rows, {"prompt": "question", "answer": answer}], "task.reward=math")
    with pytest.raises(ValueError, match=r"the answer '.* or no completion is right; correct or remove its row"):
        load_task(load_config(*config))


def test_weights_of_unknown_parts_are_refused_with_the_task():
    path = "experiments/quickstart.yaml"
    with pytest.raises(ValueError, match="task.reward_weights.scor: the reward recjax.*has the parts score, length"):
        load_task(load_config(path, ["task.reward_weights={scor: 2}"]))
    assert load_task(load_config(path, ["task.reward_weights={score: 2, length: -1}"])).reward.weights["score"] == 2
    for key in ("reward_seconds", "reward_retries"):
        with pytest.raises(ValueError, match=f"task.{key} = 3.*: is read where task.reward is an async function"):
            load_task(load_config(path, [f"task.{key}=3"]))


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("42", "42", 1),
        (" 42\n", "42", 1),
        ("042", "42", 1),
        ("42.0", "42", 1),
        ("1,234", "1234", 1),
        ("-3", "-3", 1),
        ("+3", "3", 1),
        ("43", "42", 0),
        ("42 or 43", "42", 0),
        ("12,34", "1234", 0),
        ("4 2", "42", 0),
        ("", "42", 0),
        ("forty-two", "42", 0),
        ("42=", "42", 0),
        ("--3", "3", 0),
        ("٤٢", "42", 0),
        ("1e-7", "0.0000001", 1),
        ("0.0000001", "1e-7", 1),
        ("2.5E3", "2500", 1),
        ("1e5", "5", 0),
        ("1e9999", "1", 0),
        ("1e", "1", 0),
    ],
)
def test_number_match(completion, answer, reward):
    assert number_match([""], [completion], [answer]) == [reward]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("7+5+0=12;132", 1),
        ("132", 1),
        ("so it is 1,32", 0),
        ("132.0 apples", 1),
        ("132;133", 0),
        ("1.32e2", 1),
        ("4e132", 0),
        ("7+5+0=12;", 0),
        ("no number", 0),
        ("-132", 0),
        ("", 0),
    ],
)
def test_last_number_match(completion, reward):
    assert last_number_match([""], [completion], ["7+5+0=12;132"]) == [reward]


def test_last_number_match_needs_a_number_in_the_answer():
    with pytest.raises(ValueError, match="'none'"):
        last_number_match([""], ["1"], ["none"])


def test_exact_match_is_to_the_letter():
    assert exact_match([""] * 3, ["yes ", "Yes", "no"], ["yes", "yes", "no"]) == [1, 0, 1]


def chats_of_a_file(tmp_path, rows, *overrides):
    """The task of a file of six rows or more, whose prompts are chats."""
    return load_task(load_config(*file_config(tmp_path, rows, "task.file.chat=true", *overrides)))


TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "find", "parameters": {"properties": {"text": {"type": "string"}}}}},
]


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_chat_templates_get_a_rows_tools_and_variables(tmp_path, name, as_text):
    chat = [{"role": "user", "content": "1+1?"}]
    own = [(TOOLS, {"enable_thinking": False}), (TOOLS[:1], {"effort": "low"}), (None, None)]
    rows = [
        {"prompt": chat, "answer": "2", "tools": tools, "chat_template_kwargs": variables} for tools, variables in own
    ]
    if as_text:
        rows = [
            row | {key: row[key] and json.dumps(row[key]) for key in ("tools", "chat_template_kwargs")} for row in rows
        ]
    if name.endswith("parquet"):
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / name)
    else:
        write_jsonl(tmp_path / name, rows)
    found = file_problems(str(tmp_path / name), FileTask(train=""))
    expected = [{"enable_thinking": False, "tools": TOOLS}, {"effort": "low", "tools": TOOLS[:1]}, {}]
    assert [problem.template for problem in found] == expected
    assert set(found[0].columns) == {"tools", "chat_template_kwargs"}, "the reward gets them as well"


def test_a_plain_prompt_has_no_template(tmp_path):
    row = {"prompt": "1+1=", "answer": "2", "tools": "a saw"}
    (problem,) = file_problems(write_jsonl(tmp_path / "a.jsonl", [row]), FileTask(train=""))
    assert problem.template == {} and problem.columns == {"tools": "a saw"}


def test_equal_messages_with_other_tools_are_other_problems(tmp_path):
    tools = [[{"name": f"tool {i}"}] for i in range(12)]
    rows = [{"prompt": "Which tools?", "answer": i, "tools": own} for i, own in enumerate(tools)]
    task = chats_of_a_file(tmp_path, rows)
    assert len(task.train) == 8 and len(task.evaluation) == 2


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("tools", "a saw", "must hold JSON"),
        ("tools", ["add"], "must hold a list of JSON schemas"),
        ("tools", {"name": "add"}, "must hold a list of JSON schemas"),
        ("tools", [{}], "must hold a list of JSON schemas"),
        ("chat_template_kwargs", [1], "takes variables"),
        ("chat_template_kwargs", "brief", "must hold JSON"),
        ("chat_template_kwargs", {"tokenize": True}, "set by recjax"),
        ("chat_template_kwargs", {"tools": []}, "by themselves"),
    ],
)
def test_rows_with_invalid_template_variables_are_named(tmp_path, column, value, reason):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "answer": "2", column: value}]
    with pytest.raises(ValueError, match=f"line 2: column '{column}': .*{reason}"):
        file_problems(write_jsonl(tmp_path / "a.jsonl", rows), FileTask(train="", chat=True))


def test_the_system_prompt_goes_before_every_chat(tmp_path):
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(6)]
    plain = chats_of_a_file(tmp_path, rows)
    task = chats_of_a_file(tmp_path, rows, "task.system_prompt=Be brief.")
    system = {"role": "system", "content": "Be brief."}
    for ours, theirs in zip([*task.train, *task.evaluation], [*plain.train, *plain.evaluation], strict=True):
        assert ours == theirs._replace(prompt=[system, *theirs.prompt])


@pytest.mark.parametrize(
    ("prompt", "chat", "reason"),
    [
        ("1+1=", "false", r"not read by plain text such as '1\+1=';.*task.file.chat=true"),
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "true", "system message of their own"),
    ],
)
def test_a_system_prompt_that_has_no_place_is_refused(tmp_path, prompt, chat, reason):
    rows = [{"prompt": prompt, "answer": "2"}] * 6
    with pytest.raises(ValueError, match=reason):
        chats_of_a_file(tmp_path, rows, "task.system_prompt=Be brief.", f"task.file.chat={chat}")
