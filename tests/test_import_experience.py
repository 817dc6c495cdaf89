"""Imported experience: every format says the same, and a bad row is refused before anything is written."""

import csv
import gzip
import json
from datetime import UTC, datetime

import datasets
import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recjax.experience.group import Grade
from recjax.hub.chat_rendering import set_template_kwargs
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import character_tokenizer
from recjax.import_experience import import_exports, import_files
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.models.logprobs import Sampling
from recjax.store import exchange
from recjax.store.exchange import export_store, read_exported
from recjax.store.foreign import Columns, import_rows
from recjax.store.store import Store
from recjax.store.tokenize import tokenized, tokenizer_name
from tests import commands
from tests.experience.rows import append, columns_of, read, read_columns, same
from tests.marks import slow
from tests.store.test_store import ROWS

USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
PLAIN = [
    {"prompt": "1+1=", "completion": "2", "reward": 1.0, "answer": "2", "truncated": False},
    {"prompt": "1+1=", "completion": "", "reward": 0.0, "answer": "2", "truncated": False},
    {"prompt": 'say "a, b"\nplease', "completion": "a, b", "reward": None, "answer": "3", "truncated": True},
]
TIME = datetime(2026, 1, 1, tzinfo=UTC)


def write(path, rows):
    """Rows in the format that the path's ending names."""
    if path.suffix == ".jsonl":
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


def imported(files, columns=None, **options):
    """The rows of files by column."""
    return list(map(columns_of, import_rows(files, columns or Columns(), TIME, **options).records))


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_every_format_says_the_same(tmp_path, ending):
    import_files([write(tmp_path / f"gpt.{ending}", PLAIN)], tmp_path / "s", Columns())
    rows = read_columns(tmp_path / "s")
    for row, given in zip(rows, PLAIN, strict=True):
        said = {"prompt": row.prompt, "completion": row.completion, "reward": row.reward, "answer": row.answer}
        assert said | {"truncated": row.truncated} == given
        assert (row.source, row.policy_version, row.completion_tokens, row.behavior_logprobs) == (
            "gpt",
            None,
            None,
            None,
        )
    assert rows[0].group_id == rows[1].group_id != rows[2].group_id
    assert len({row.id for row in rows}) == 3


def test_a_line_ends_where_json_lines_end(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        json.dumps({**PLAIN[0], "completion": "a\u2028b"}, ensure_ascii=False) + "\r\n[]\n"
    )
    with pytest.raises(ValueError, match="line 2: a row must be an object"):
        import_rows([tmp_path / "a.jsonl"], Columns(), TIME)


def test_chats_end_in_their_completion(tmp_path):
    said = {"role": "assistant", "content": "4", "tool_calls": None}
    rows = [
        {"messages": [USER, said], "reward": 1},
        {"messages": [USER], "completion": "4", "reward": 1},
        {"prompt": [USER], "completion": [said], "reward": 1},
    ]
    found = imported([write(tmp_path / "a.jsonl", rows)])
    assert {(row.completion, row.reward, row.group_id) for row in found} == {("4", 1.0, found[0].group_id)}
    assert all(row.messages == [USER] and row.prompt is None for row in found)


def test_columns_have_any_name_and_files_share_groups(tmp_path):
    ours = [{"q": "a", "a": "b", "score": 2, "case": 7, "key": "x", "mood": 1, "why": {"kind": 1.5}}]
    theirs = [{"q": "a", "a": "c", "score": 3, "case": 7, "key": "y"}]
    columns = Columns(prompt="q", completion="a", reward="score", group="case", id="key", reward_parts="why")
    files = [write(tmp_path / f"{name}.jsonl", rows) for name, rows in (("ours", ours), ("theirs", theirs))]
    found = imported(files, columns)
    assert [(row.id, row.source, row.reward) for row in found] == [("x", "ours", 2), ("y", "theirs", 3)]
    assert found[0].group_id == found[1].group_id and found[0].group_id.endswith("/7")
    assert found[0].reward_parts == {"kind": 1.5} and import_rows(files, columns, TIME).unused == ["mood"]
    assert {row.source for row in imported(files, columns, source="both")} == {"both"}


def test_a_column_says_who_wrote_each_row(tmp_path):
    rows = [{**PLAIN[0], "model": "large"}, {**PLAIN[1], "model": "small"}]
    files, columns = [write(tmp_path / "a.jsonl", rows)], Columns(source="model")
    assert [row.source for row in imported(files, columns)] == ["large", "small"]
    with pytest.raises(ValueError, match="--source 'gpt': has no effect with --source_column 'model'"):
        import_rows(files, columns, TIME, source="gpt")


def test_a_files_rows_keep_their_names(tmp_path):
    """By these a file that a store has already is refused."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b", "reward": 1}\n')
    assert imported([tmp_path / "a.jsonl"])[0].id == "e89768c485b3/000000"


def test_parquet_parts_that_a_row_lacks_are_no_parts(tmp_path):
    rows = [{**PLAIN[0], "reward_parts": {"a": 1.0}}, {**PLAIN[1], "reward_parts": {"b": 2.0}}, PLAIN[2]]
    found = imported([write(tmp_path / "a.parquet", rows)])
    assert [row.reward_parts for row in found] == [{"a": 1.0}, {"b": 2.0}, None]


def test_tokens_come_with_vocabulary_and_distribution(tmp_path):
    character_tokenizer("1+2=").save_pretrained(tmp_path / "model")
    row = {"prompt": "1+1=", "completion": "2", "reward": 1, "tokens": [3, 0], "logprobs": [-0.5, -0.25]}
    files, columns = [write(tmp_path / "a.jsonl", [row])], Columns()
    import_files(files, tmp_path / "s", columns, None, str(tmp_path / "model"), Sampling(0.7, min_p=0.2))
    (stored,) = read_columns(tmp_path / "s")
    assert stored.completion_tokens.tolist() == [3, 0] and stored.completion_mask.all()
    assert stored.behavior_logprobs.tolist() == [-0.5, -0.25] and stored.prompt_tokens is None
    assert stored.tokenizer == tokenizer_name(character_tokenizer("1+2="))
    assert stored.sampling == Sampling(0.7, 0, 1.0, 0.2)
    with pytest.raises(ValueError, match="line 1: tokens = .*: token ids need their vocabulary; give --tokenizer"):
        import_files(files, tmp_path / "t", columns)
    with pytest.raises(ValueError, match="line 1: logprobs = .*give --temperature"):
        import_files(files, tmp_path / "t", columns, None, str(tmp_path / "model"))
    beyond = write(tmp_path / "b.jsonl", [{**row, "tokens": [3, 5]}])
    with pytest.raises(ValueError, match="line 1: a token id is 5 or more"):
        import_files([beyond], tmp_path / "t", columns, None, str(tmp_path / "model"), Sampling(0.7))
    other = write(tmp_path / "d.jsonl", [row, {**row, "tokens": [1, 0]}])
    with pytest.raises(ValueError, match="line 2: tokens decode to '1.*', but the text is '2'; give the tokens"):
        import_files([other], tmp_path / "t", columns, None, str(tmp_path / "model"), Sampling(0.7))
    plain = write(tmp_path / "c.jsonl", PLAIN)
    with pytest.raises(ValueError, match="--tokenizer .* has no effect"):
        import_files([plain], tmp_path / "t", columns, None, str(tmp_path / "model"))
    assert not (tmp_path / "t").exists()


BAD = {
    "syntax": ('{"prompt": "x", ', "not valid JSON"),
    "no object": ("[1, 2]", "object with named columns"),
    "no prompt": ({"completion": "x"}, "found neither; the row has 'completion'"),
    "two prompts": ({"prompt": "x", "messages": [USER], "completion": "x"}, "found both"),
    "empty prompt": (
        {"prompt": "", "completion": "x"},
        "prompt = '': takes text that is not empty, or a list of messages; give one",
    ),
    "no completion": ({"prompt": "x"}, "completion = None: takes text; give the reply"),
    "user's last word": ({"messages": [USER, USER]}, "messages = .*the last one from the assistant"),
    "answer alone": ({"messages": [{"role": "assistant", "content": "4"}]}, "messages = .*at least two messages"),
    "assistant's prompt": ({"messages": [USER, ASSISTANT, ASSISTANT]}, "messages: the last message is an assistant's"),
    "assistant's message": ({"prompt": [USER, ASSISTANT], "completion": "x"}, "prompt: the last message is an assista"),
    "no content": ({"messages": [{"role": "user"}], "completion": "x"}, "messages: message 0: content = None"),
    "tool calls": ({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [1]}]}, "'tool_calls'"),
    "reward text": ({**PLAIN[0], "reward": "good"}, "reward = 'good': takes a finite number from -1e9 to 1e9"),
    "reward truth": ({**PLAIN[0], "reward": True}, "reward = True: takes a finite number from -1e9 to 1e9"),
    "reward NaN": ({**PLAIN[0], "reward": float("nan")}, "reward = nan: takes a finite number from -1e9 to 1e9"),
    "parts": ({**PLAIN[0], "reward_parts": {"a": "b"}}, r"reward_parts\.a = 'b': takes a finite number"),
    "parts of recjax": (
        {**PLAIN[0], "reward_parts": {"length": 1}},
        "reward_parts: has a part 'length'; recjax itself",
    ),
    "parts alone": (
        {**PLAIN[0], "reward": None, "reward_parts": {"a": 1}},
        "reward_parts = .*: has reward parts, but the reward is null",
    ),
    "answer": ({**PLAIN[0], "answer": ["2"]}, r"answer = \['2'\]: takes text, or null"),
    "truncated": ({**PLAIN[0], "truncated": "no"}, "truncated = 'no': takes true or false"),
    "filtered": ({**PLAIN[0], "finish_reason": "content_filter"}, "finish_reason = 'content_filter': takes stop"),
    "contradiction": (
        {**PLAIN[0], "finish_reason": "length"},
        "truncated = False: contradicts finish_reason = 'length'",
    ),
    "log-probs alone": ({**PLAIN[0], "logprobs": [-1.0]}, "'prompt_tokens' .--tokens_column and .* --tokenizer"),
    "log-probs short": (
        {**PLAIN[0], "tokens": [3, 0], "logprobs": [-1.0]},
        r"logprobs = \[-1.0\]: has 1 values for 2 tokens",
    ),
    "log-probs positive": (
        {**PLAIN[0], "tokens": [3], "logprobs": [1.0]},
        r"logprobs\[0\] = 1.0: takes a log-probability, a finite number of at most 0",
    ),
    "tokens": ({**PLAIN[0], "tokens": [1.5]}, r"tokens\[0\] = 1.5: takes a token id"),
    "no tokens": ({**PLAIN[0], "tokens": []}, r"tokens = \[\]: has no tokens; give at least one"),
    "token of 64 bits": ({**PLAIN[0], "tokens": [2**40]}, r"tokens\[0\] = 1099511627776: takes a token id"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_rows_are_refused_with_file_and_line(tmp_path, name):
    row, reason = BAD[name]
    character_tokenizer("1+2=").save_pretrained(tmp_path / "model")
    good = {**PLAIN[0], "tokens": [3, 0], "logprobs": [-1.0, -1.0]}
    path = write(tmp_path / "bad.jsonl", [good, "", row, good])
    with pytest.raises(ValueError, match=f"bad.jsonl: line 3: .*{reason}"):
        import_files([path], tmp_path / "s", Columns(), None, str(tmp_path / "model"), Sampling())
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "x", "give .jsonl, .csv or .parquet"),
        ("a.jsonl", "\n", "no rows"),
        ("a.parquet", "no parquet", "a.parquet: .*magic"),
        ("a.csv", "prompt,completion\na,b,c\n", "line 2: more or fewer cells than the 2 columns"),
        ("a.csv", "prompt,completion,reward\na,b\n", "line 2: more or fewer cells"),
        ("a.csv", "prompt,completion,reward\na,b,high\n", "line 2: reward = 'high': takes a finite number"),
        ("a.csv", "prompt,completion,prompt\na,b,c\n", "a.csv: line 1: the column 'prompt' is given twice"),
        (
            "a.jsonl",
            '{"prompt": "a", "completion": "b", "completion": "c"}',
            "line 1: the key 'completion' is given twice",
        ),
        ("a.jsonl", '{"prompt": "a", "completion": "b", "answer": NaN}', "line 1: answer = nan: takes text, or null"),
        ("a.csv", 'prompt,completion\na,"b\n', "a.csv: line 1: unexpected end"),
        ("a.jsonl", "[" * 100_000, "a.jsonl: line 1: is nested too deeply"),
        ("a.jsonl", "PAR1", "a.jsonl: holds Parquet data"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    assert not name.endswith(".jsonl") or exchange.read_exported(tmp_path / name) is None
    with pytest.raises(ValueError, match=message):
        import_rows([tmp_path / name], Columns(), TIME)
    with pytest.raises(ValueError, match="no such file"):
        import_rows([tmp_path / "none.jsonl"], Columns(), TIME)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_the_index_that_pandas_writes_is_an_unused_column(tmp_path):
    pd.DataFrame({"prompt": ["1+1="], "completion": ["2"], "reward": [1.0]}).to_csv(tmp_path / "a.csv")
    found = import_rows([tmp_path / "a.csv"], Columns(), datetime.now(UTC))
    assert [record.completion.text for record in found.records] == ["2"] and found.unused == [""]


@pytest.mark.parametrize("ending", ["jsonl", *slow("csv", "parquet")])
def test_the_chat_template_gets_a_rows_own_variables(tmp_path, ending):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows = [
        {"messages": messages, "tools": None, "chat_template_kwargs": None},
        {"messages": messages, "tools": json.dumps(TOOLS), "chat_template_kwargs": None},
        {"messages": messages, "tools": None, "chat_template_kwargs": json.dumps({"brief": True})},
        {"messages": messages, "tools": json.dumps(TOOLS), "chat_template_kwargs": None},
    ]
    if ending == "csv":
        rows = [row | {"messages": json.dumps(messages)} for row in rows]
    if ending == "jsonl":
        rows[1]["tools"], rows[2]["chat_template_kwargs"] = TOOLS, {"brief": True}
    found = import_rows([write(tmp_path / f"a.{ending}", rows)], Columns(), TIME)
    assert len({record.group.id for record in found.records}) == 3 and not found.unused
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))))
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% if brief %}brief {% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}:"
    )
    policy = Policy(Decoder(DecoderConfig(len(tokenizer), 16, 32, 1, 2, 1, 8)), tokenizer, (0,))
    append(tmp_path / "s", found.records)
    texts = [tokenizer.decode(one.group.prompt_tokens) for one in tokenized(read(tmp_path / "s"), policy)]
    assert texts == ["hi:", "add hi:", "brief hi:", "add hi:"]
    ends_with_reply = found.records[0].group._replace(prompt=messages)
    with pytest.raises(ValueError, match="row .* of source 'a': the last message is an assistant's"):
        tokenized([found.records[0]._replace(group=ends_with_reply)], policy)
    set_template_kwargs(tokenizer, {"brief": True})
    assert tokenizer.decode(tokenized(found.records, policy)[1].group.prompt_tokens) == "add brief hi:"


@pytest.mark.parametrize("size", [131_073, 3_000_000])
def test_a_cell_may_be_long(tmp_path, size):
    (tmp_path / "a.csv").write_text(f"prompt,completion\na,{'b' * size}\n")
    assert len(imported([tmp_path / "a.csv"])[0].completion) == size


@pytest.mark.parametrize("name", ["a.json", "a.ndjson", "a.jsonl.gz", "a.JSONL"])
def test_json_lines_may_have_other_names(tmp_path, name):
    content = "".join(json.dumps(row) + "\n" for row in PLAIN).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    rows = imported([tmp_path / name])
    assert [row.completion for row in rows] == [row["completion"] for row in PLAIN]
    assert {row.source for row in rows} == {"a"}


@pytest.mark.parametrize(("answer", "text"), [(1e-7, "0.0000001"), (72.0, "72"), (72, "72"), ("72.0", "72.0")])
def test_a_number_keeps_its_value_as_an_answer(tmp_path, answer, text):
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b", "answer": answer}])
    assert imported([path])[0].answer == text


@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_answers_and_log_probs_keep_their_digits(tmp_path, kind):
    table = {"prompt": ["x"], "completion": ["y"], "answer": np.array([0.1], kind), "reward": np.array([0.7], kind)}
    table |= {"tokens": [[1]], "logprobs": pa.array([[-0.1]], pa.list_(pa.float32()))}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    (record,) = import_rows([tmp_path / "a.parquet"], Columns(), TIME, tokenizer="t", sampling=Sampling()).records
    assert (record.group.answer, record.completion.grade.reward) == ("0.1", 0.7)
    assert record.completion.rows[0].behavior_logprobs.tolist() == [np.float32(-0.1)]


def test_a_column_that_is_named_must_be_there(tmp_path):
    path = write(tmp_path / "a.jsonl", PLAIN)
    for column in ("reward", "group", "id"):
        with pytest.raises(ValueError, match=f"--{column}_column 'score'|score = None"):
            import_rows([path], Columns()._replace(**{column: "score"}), TIME)


def test_the_same_file_is_imported_once(tmp_path):
    path = write(tmp_path / "a.jsonl", PLAIN)
    import_files([path], tmp_path / "s", Columns())
    with pytest.raises(ValueError, match="id = '.*': is the id of an earlier completion"):
        import_files([path], tmp_path / "s", Columns())
    assert len(read_columns(tmp_path / "s")) == 3


@pytest.mark.slow
def test_the_command(tmp_path):
    path = write(tmp_path / "a.csv", [{**row, "mood": 1} for row in PLAIN])
    command = ["-m", "recjax.import_experience", "--input", path, "--output", tmp_path / "s"]
    done = commands.run([*command, "--source", "claude"])
    assert "3 rows in 2 groups, 1 rows pending\nunused columns: mood" in done.stdout, done.stderr
    assert read_columns(tmp_path / "s")[0].source == "claude"
    more = write(tmp_path / "b.csv", [{**row, "mood": 1} for row in PLAIN])
    done = commands.run([*command[:3], more, *command[4:]])
    assert "1 rows pending; the store has 6 rows" in done.stdout, done.stderr
    unnamed = write(tmp_path / "c.csv", [{"prompt": "1+1=", "completion": "2", "score": 1.0}])
    done = commands.run([*command[:3], unnamed, "--output", tmp_path / "unnamed"])
    assert "unused columns: score; --reward_column names the column of rewards" in done.stdout, done.stderr
    done = commands.run([*command, "--reward_column", "score"])
    assert done.returncode == 1 and done.stderr.startswith("error: --reward_column 'score': no row has this column")


# --- Exports.


def exported(tmp_path, ending):
    """A store with all that a store can hold, and its export."""
    append(tmp_path / "store.db", ROWS)
    with Store(tmp_path / "store.db") as store:
        unsure = Grade(None, failure="timeout")
        store.add_rewards({1: (Grade(0.25, {"a": 0.25}, False), None), 2: (unsure, "x")}, "run")
        store.add_rewards({3: (Grade(1.0), "late")})
        assert export_store(store, tmp_path / f"file.{ending}") == len(ROWS)
    return tmp_path / f"file.{ending}"


def with_first(table, column, value):
    """The table with another value in the first row of a column."""
    place = table.schema.get_field_index(column)
    values = pa.array([value, *table[column].to_pylist()[1:]], table.schema.field(place).type)
    return table.set_column(place, column, values)


def everything(place):
    with Store(place) as store:
        return list(store.records(others=True))


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
@pytest.mark.parametrize("together", [2, 1024])
def test_an_export_is_the_same_store_again(tmp_path, ending, together, monkeypatch):
    monkeypatch.setattr(exchange, "TOGETHER", together)
    file = exported(tmp_path, ending)
    assert import_exports([read_exported(file)], tmp_path / "again.db") == len(ROWS)
    ours, theirs = everything(tmp_path / "again.db"), everything(tmp_path / "store.db")
    assert len(ours) == len(theirs) and all(map(same, ours, theirs))
    with pytest.raises(ValueError, match="id = 'row 0': is the id of an earlier completion"):
        import_exports([read_exported(file)], tmp_path / "again.db")
    grades = [one.completion.grade for one in theirs]
    rewards = [grade and grade.reward for grade in grades]
    if ending == "parquet":
        assert pd.read_parquet(file)["reward"].replace({np.nan: None}).tolist() == rewards
        assert datasets.load_dataset("parquet", data_files=str(file), split="train")["reward"][:] == rewards
        assert duckdb.sql(f"select reward from '{file}'").fetchall() == [(reward,) for reward in rewards]
    else:
        assert [json.loads(line)["reward"] for line in file.read_text().splitlines()] == rewards


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace_schema_metadata({b"recjax.experience.version": b"3"}), "store version '3', and this"),
        (lambda t: t.drop_columns(["answer"]), "answer: is missing; export the store again"),
        (
            lambda t: t.set_column(t.schema.get_field_index("reward"), "reward", t["reward"].cast(pa.string())),
            "reward: has type string; convert it to double",
        ),
        (
            lambda t: with_first(t, "completion_tokens", [1, None, 2]),
            r"row 0: completion_tokens\[1\] = None: takes a token id",
        ),
        (
            lambda t: with_first(t, "completion_mask", [True]),
            r"row 0: completion_mask = \[True\]: has 1 values for 3 tokens",
        ),
        (
            lambda t: with_first(t, "row_lengths", "[1, [null, 3]]"),
            "columns .*row_lengths: have different lengths",
        ),
        (
            lambda t: with_first(t, "turns", "[[0, 9]]"),
            r"row 0: turns = \[\[0, 9\]\]: has a pair that is not the index of a row",
        ),
        (lambda t: with_first(t, "turns", "[["), r"row 0: turns = '\[\[': takes the text of JSON, or null"),
        (
            lambda t: with_first(t, "token_versions", "[[1, 2], [2, 2]]"),
            r"row 0: token_versions = \[\[1, 2\], \[2, 2\]\]: counts 4 tokens, and the policy sampled 3",
        ),
        (lambda t: with_first(t, "recorded", b"x"), "row 0: recorded arrays cannot be read"),
        (lambda t: with_first(t, "time", None), "row 0: time = None: takes a date and time"),
        (
            lambda t: with_first(t, "messages", [{"role": "user", "content": "a"}]),
            "row 0: prompt = '.*': stands next to messages; give one of prompt and messages",
        ),
    ],
)
def test_files_of_another_version_or_shape_are_refused(tmp_path, change, message):
    file = exported(tmp_path, "parquet")
    pq.write_table(change(pq.read_table(file)), file)
    with pytest.raises(ValueError, match=message):
        import_exports([read_exported(file)], tmp_path / "again.db")
    assert not read(tmp_path / "again.db")


def test_a_vocabulary_is_digested_once(monkeypatch):
    tokenizer = character_tokenizer("123")
    read, calls = tokenizer.get_vocab, []
    monkeypatch.setattr(tokenizer, "get_vocab", lambda: calls.append(1) or read())
    first = tokenizer_name(tokenizer)
    assert [tokenizer_name(tokenizer) for _ in range(9)] == [first] * 9 and len(calls) == 1
    tokenizer.add_tokens(["<more>"])
    assert tokenizer_name(tokenizer) != first
