"""One schema of a completion: equal mistakes have equal texts at every door, and the columns stand in one table."""

import csv
import json
import re
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recjax.errors import UserError
from recjax.experience.columns import COLUMNS, DERIVED, EXPORTED, STORED
from recjax.experience.completion_checks import check_value
from recjax.experience.records import row_of
from recjax.import_experience import import_exports, import_files
from recjax.models.sampling import Sampling
from recjax.serving.bodies import CompletionReward, read_body
from recjax.serving.refusals import Refused
from recjax.store.exchange import KINDS, SCHEMA, export_store, read_exported
from recjax.store.feedback import give_rewards
from recjax.store.foreign import Columns, import_rows
from recjax.store.store import COMPLETIONS, Store
from tests.experience.rows import append, make_row
from tests.store.test_store import unchecked

PENDING = dict(reward=None, reward_parts=None, accurate=None)
FOREIGN = {
    "key": "row 3",
    "model": "large",
    "prompt": "question 0",
    "completion": "xx",
    "reward": 1.0,
    "prompt_tokens": [1],
    "tokens": [3, 4],
    "logprobs": [-1.0, -2.0],
    "truncated": False,
}
NAMES = Columns(id="key", source="model")  # of the columns of these rows
FILE_NAMES = {"id": "key", "source": "model", "completion_tokens": "tokens", "behavior_logprobs": "logprobs"}


def good_row(number=3):
    return make_row(number, length=2, behavior_logprobs=np.array([-1.0, -2.0], np.float32))


# --- The doors. Each is a function of folder, column, value and the first row's id, and returns the error.


def into_store(folder, column, value, first):
    rows = [make_row(0, length=2)] if first is None else [renamed_row(first)]
    append(folder / "s.db", [*rows, unchecked({column: value}, good_row())])


def renamed_row(name):
    return make_row(0, length=2, id=name)


def from_lines(folder, column, value, first):
    rows = [FOREIGN | {"key": first or "row 0"}, FOREIGN | {FILE_NAMES.get(column, column): value}]
    (folder / "f.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    import_rows([folder / "f.jsonl"], NAMES, datetime.now(UTC), tokenizer="t", sampling=Sampling())


def from_cells(folder, column, value, first):
    rows = [FOREIGN | {"key": first or "row 0"}, FOREIGN | {FILE_NAMES.get(column, column): value}]
    with (folder / "f.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys([*rows[0], *rows[1]])))
        writer.writeheader()
        writer.writerows({name: cell(value) for name, value in row.items()} for row in rows)
    import_rows([folder / "f.csv"], NAMES, datetime.now(UTC), tokenizer="t", sampling=Sampling())


def cell(value):
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value)


def from_parquet(folder, column, value, first):
    table = pa.Table.from_pylist([FOREIGN | {FILE_NAMES.get(column, column): value}])
    pq.write_table(table, folder / "f.parquet")
    import_rows([folder / "f.parquet"], NAMES, datetime.now(UTC), tokenizer="t", sampling=Sampling())


def from_exported_lines(folder, column, value, first):
    rows = exported(folder, first)
    rows[1][column] = as_exported(column, value)
    if column == "messages":
        rows[1]["prompt"] = None
    (folder / "e.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    import_exports([read_exported(folder / "e.jsonl")], folder / "again.db")


def from_exported_parquet(folder, column, value, first):
    rows = exported(folder, first)
    for row in rows:
        row["time"] = datetime.fromisoformat(row["time"])
    rows[1][column] = as_exported(column, value)
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / "e.parquet")
    import_exports([read_exported(folder / "e.parquet")], folder / "again.db")


def exported(folder, first):
    """The rows of an export, as JSON."""
    append(folder / "source.db", [renamed_row(first or "row 0"), good_row()])
    with Store(folder / "source.db") as store:
        export_store(store, folder / "good.jsonl")
    return list(map(json.loads, (folder / "good.jsonl").read_text().splitlines()))


def as_exported(column, value):
    if COLUMNS[column].kind == "json":
        return json.dumps(value)
    if column == "reward_parts":
        return [{"name": name, "value": part} for name, part in value.items()]
    return value


def as_feedback(folder, column, value, first):
    append(folder / "s.db", [make_row(3, **PENDING)])
    with Store(folder / "s.db") as store:
        give_rewards(store, [{"id": "row 3", "reward": 1.0, column: value}])


def to_server(folder, column, value, first):
    body = json.loads(json.dumps({"id": "row 3", "reward": 1.0, column: value}))
    try:
        read_body(CompletionReward, body).grade(1, ())
    except Refused as refusal:
        assert refusal.status == 400 and refusal.param == column  # noqa: PT017 – the file may also be readable
        raise UserError(refusal.message) from refusal


DOORS = {
    "store": into_store,
    "jsonl": from_lines,
    "csv": from_cells,
    "parquet": from_parquet,
    "exported jsonl": from_exported_lines,
    "exported parquet": from_exported_parquet,
    "feedback": as_feedback,
    "server": to_server,
}
FILES = ["store", "jsonl", "csv", "parquet", "exported jsonl", "exported parquet"]
STORES = ["store", "exported jsonl", "exported parquet"]
JSON = ["store", "jsonl", "csv", "exported jsonl", "feedback", "server"]  # those that take any type
JSON_FILES = ["store", "jsonl", "csv", "exported jsonl"]
LATE = ["store", "exported jsonl", "feedback", "server"]

NAN = float("nan")
REWARD = "takes a finite number from -1e9 to 1e9; write a number without quotes, and scale or clip larger rewards"
PART = "takes a finite number from -1e9 to 1e9; name each part and give its number, or give no parts"
TURN = "takes a finite number from -1e9 to 1e9; give a number for each turn, or none"
TEXT = "takes text that is not empty; "
TOKEN = "takes a token id, a whole number from 0 to 2147483647; give ids of the tokenizer's vocabulary"
LOGPROB = (
    "takes a log-probability, a finite number of at most 0; give the log-probabilities of the sampled tokens in nats"
)
VERSION = "takes a whole number from 0 to 2147483647, or null; give the number of optimizer updates"
MASK = "takes true or false; give true for each token that the policy sampled"
ONE_EACH = "tokens of the completion; give one for each token"
# By name: column, value, the beginning of the text, and the doors that can receive the value.
MISTAKES = {
    "NaN reward": ("reward", NAN, f"reward = nan: {REWARD}", [*DOORS]),
    "infinite reward": ("reward", -np.inf, f"reward = -inf: {REWARD}", [*DOORS]),
    "reward as text": ("reward", "high", f"reward = 'high': {REWARD}", [*JSON, "parquet"]),
    "number as text": ("reward", "1.0", f"reward = '1.0': {REWARD}", ["store", "jsonl", "exported jsonl", "server"]),
    "bool as reward": ("reward", True, f"reward = True: {REWARD}", [*JSON, "parquet"]),
    "list as reward": ("reward", [1.0], f"reward = [1.0]: {REWARD}", JSON),
    "large reward": ("reward", 1e300, f"reward = 1e+300: {REWARD}", [*DOORS]),
    "huge integer as reward": ("reward", 10**400, f"reward = {str(10**400)[:300]}: {REWARD}", JSON),
    "part as text": ("reward_parts", {"a": "b"}, f"reward_parts.a = 'b': {PART}", [*JSON, "parquet"]),
    "NaN part": ("reward_parts", {"a": NAN}, f"reward_parts.a = nan: {PART}", [*DOORS]),
    "bool as part": ("reward_parts", {"a": False}, f"reward_parts.a = False: {PART}", [*JSON, "parquet"]),
    "part without a name": ("reward_parts", {"": 1.0}, "reward_parts = {'': 1.0}: takes numbers by name", [*DOORS]),
    "number as accurate": ("accurate", 1, "accurate = 1: takes true or false, or null; give null if", LATE),
    "text as accurate": ("accurate", "yes", "accurate = 'yes': takes true or false, or null; give null if", LATE),
    "turn reward as text": ("turn_rewards", ["1"], f"turn_rewards[0] = '1': {TURN}", LATE),
    "NaN turn reward": ("turn_rewards", [NAN], f"turn_rewards[0] = nan: {TURN}", [*LATE, "exported parquet"]),
    "more rewards than turns": (
        "turn_rewards",
        [1.0, 2.0],
        "turn_rewards = [1.0, 2.0]: has 2 values for 1 turns of the completion; give a number for each turn, or none",
        [*LATE, "exported parquet"],
    ),
    "no id": ("id", None, f"id = None: {TEXT}give every completion an id of its own", FILES),
    "empty id": ("id", "", f"id = '': {TEXT}give every completion an id of its own", [*STORES, "jsonl", "parquet"]),
    "bool as id": ("id", True, f"id = True: {TEXT}give every completion", ["store", "jsonl", "exported jsonl"]),
    "id of another row": (
        "id",
        "row 7",
        "id = 'row 7': is the id of an earlier completion; give every completion an id of its own",
        [*STORES, "jsonl", "csv"],
    ),
    "no source": ("source", None, f"source = None: {TEXT}name the model or program", FILES),
    "no time": ("time", None, "time = None: takes a date and time; give the time of sampling or import", STORES),
    "no completion": ("completion", None, "completion = None: takes text; give the reply", ["jsonl", *STORES]),
    "number as completion": ("completion", 5, "completion = 5: takes text; give the reply", ["jsonl", *STORES[:2]]),
    "no prompt": ("prompt", None, "prompt = None: takes text that is not empty, or a list of messages", STORES),
    "empty prompt": (
        "prompt",
        "",
        "prompt = '': takes text that is not empty, or a list",
        [*STORES, "jsonl", "parquet"],
    ),
    "no role": (
        "messages",
        [{"content": "a"}],
        "messages[0] = {'content': 'a'}: takes role and content; give both as text",
        ["store", "exported jsonl"],
    ),
    "text as truncated": ("truncated", "no", "truncated = 'no': takes true or false; give", [*JSON_FILES, "parquet"]),
    "number as truncated": ("truncated", 1, "truncated = 1: takes true or false; give", [*JSON_FILES, "parquet"]),
    "no tokens": (
        "completion_tokens",
        [],
        "completion_tokens = []: has no tokens; give at least one token for each prompt and completion",
        [*STORES, "jsonl", "csv"],
    ),
    "negative token": ("completion_tokens", [3, -4], f"completion_tokens[1] = -4: {TOKEN}", FILES),
    "null token": ("completion_tokens", [None, 4], f"completion_tokens[0] = None: {TOKEN}", FILES),
    "bool as token": ("completion_tokens", [3, True], f"completion_tokens[1] = True: {TOKEN}", JSON_FILES),
    "token with a fraction": ("completion_tokens", [3, 4.5], f"completion_tokens[1] = 4.5: {TOKEN}", JSON_FILES),
    "token as text": ("completion_tokens", [3, "4"], f"completion_tokens[1] = '4': {TOKEN}", JSON_FILES),
    "large token": (
        "completion_tokens",
        [3, 2**40],
        f"completion_tokens[1] = {2**40}: {TOKEN}",
        [*JSON_FILES, "parquet"],
    ),
    "huge token": ("completion_tokens", [3, 2**70], f"completion_tokens[1] = {2**70}: {TOKEN}", JSON_FILES),
    "negative token of a prompt": ("prompt_tokens", [-1], f"prompt_tokens[0] = -1: {TOKEN}", FILES),
    "text as tokens": (
        "prompt_tokens",
        "1",
        "prompt_tokens = '1': takes a list",
        ["jsonl", "parquet", "exported jsonl"],
    ),
    "log-prob above 0": ("behavior_logprobs", [-1.0, 0.5], f"behavior_logprobs[1] = 0.5: {LOGPROB}", FILES),
    "NaN log-prob": ("behavior_logprobs", [NAN, -1.0], f"behavior_logprobs[0] = nan: {LOGPROB}", FILES),
    "null log-prob": ("behavior_logprobs", [-1.0, None], f"behavior_logprobs[1] = None: {LOGPROB}", FILES),
    "log-prob as text": ("behavior_logprobs", [-1.0, "x"], f"behavior_logprobs[1] = 'x': {LOGPROB}", JSON_FILES),
    "bool as log-prob": ("behavior_logprobs", [False, -1.0], f"behavior_logprobs[0] = False: {LOGPROB}", JSON_FILES),
    "log-probs of another length": (
        "behavior_logprobs",
        [-1.0],
        f"behavior_logprobs = [-1.0]: has 1 values for 2 {ONE_EACH}",
        FILES,
    ),
    "mask of another length": (
        "completion_mask",
        [True],
        f"completion_mask = [True]: has 1 values for 2 {ONE_EACH}",
        STORES,
    ),
    "null in a mask": ("completion_mask", [True, None], f"completion_mask[1] = None: {MASK}", STORES),
    "mask of numbers": ("completion_mask", [1, 0], f"completion_mask[0] = 1: {MASK}", ["store", "exported jsonl"]),
    "mask without a sampled token": (
        "completion_mask",
        [False, False],
        "completion_mask = [False, False]: is false everywhere, and the policy must have sampled a token",
        STORES,
    ),
    "no tokenizer": ("tokenizer", None, "tokenizer = None: is null, and the completion has tokens; name", STORES),
    "negative version": ("policy_version", -1, f"policy_version = -1: {VERSION}", STORES),
    "bool as version": ("policy_version", True, f"policy_version = True: {VERSION}", STORES[:2]),
    "huge version": ("policy_version", 2**70, f"policy_version = {2**70}: {VERSION}", STORES[:2]),
    "version as text": ("policy_version", "3", f"policy_version = '3': {VERSION}", STORES[:2]),
    "negative temperature": ("temperature", -0.1, "temperature = -0.1: takes a finite number, 0 or more; give", STORES),
    "top_p of 0": ("top_p", 0.0, "top_p = 0.0: takes a number above 0 and at most 1; give", STORES),
    "list as metadata": ("metadata", [1], "metadata = [1]: takes a JSON object; convert its values", STORES),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_one_text_at_every_entry(tmp_path, mistake):
    column, value, expected, doors = MISTAKES[mistake]
    first = "row 7" if mistake == "id of another row" else None
    texts = {}
    for door in doors:
        folder = tmp_path / door
        folder.mkdir()
        with pytest.raises(UserError) as caught:
            DOORS[door](folder, column, value, first)
        key = FILE_NAMES.get(column, column) if door in ("jsonl", "csv", "parquet") else column
        place, text = re.fullmatch(rf"(.*?)(?<!\w){key}(?!\w)(.*)", str(caught.value)).groups()
        texts[door] = column + text
        assert "\n" not in place + text
        named = {"store": f"{folder}/s.db: record 1: ", "feedback": "entry 0: ", "server": ""}
        if door in named:
            assert place == named[door]
        else:
            row = "row 0" if door == "parquet" else "row 1" if "parquet" in door else r"line \d"
            assert re.fullmatch(rf"(--input: )?{folder}/\w\.\w+: {row}: ", place), place
    assert len({*texts.values()}) == 1, texts
    assert texts[door].startswith(expected)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_stored_and_repeated_ids_have_equal_errors(tmp_path, ending):
    rows = [FOREIGN | {"key": "row 3"}]
    (tmp_path / "f.jsonl").write_text(
        json.dumps({name: rows[0][name] for name in ("key", "model", "prompt", "completion")})
    )
    append(tmp_path / "s.db", [good_row()])
    with Store(tmp_path / "s.db") as store:
        export_store(store, tmp_path / f"e.{ending}")
    message = (
        f"{re.escape(str(tmp_path))}/s.db: id = 'row 3': is the id of an earlier completion; give every completion"
    )
    with pytest.raises(UserError, match=message):
        import_files([tmp_path / "f.jsonl"], tmp_path / "s.db", NAMES)
    with pytest.raises(UserError, match=message):
        import_exports([read_exported(tmp_path / f"e.{ending}")], tmp_path / "s.db")
    with pytest.raises(UserError, match=message):
        append(tmp_path / "s.db", [good_row()])


def test_the_row_of_a_long_export_is_named(tmp_path, monkeypatch):
    """Also beyond the rows that are read together."""
    monkeypatch.setattr("recjax.store.exchange.TOGETHER", 2)
    append(tmp_path / "s.db", [make_row(number) for number in range(7)])
    with Store(tmp_path / "s.db") as store:
        export_store(store, tmp_path / "e.jsonl")
    lines = (tmp_path / "e.jsonl").read_text().splitlines()
    lines[5] = json.dumps(json.loads(lines[5]) | {"reward": "high"})
    (tmp_path / "e.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match="e.jsonl: line 6: reward = 'high'"):
        import_exports([read_exported(tmp_path / "e.jsonl")], tmp_path / "again.db")
    with Store(tmp_path / "again.db") as store:
        assert store.last().completions == 0


STRANGE = [
    None,
    True,
    -1,
    2**70,
    1.5,
    NAN,
    "",
    "x",
    "[",
    "[1]",
    '[["a"]]',
    "{}",
    [],
    [None],
    [[1]],
    [1, "a"],
    {},
    {"a": 1},
]


@pytest.mark.parametrize("column", EXPORTED)
def test_strange_values_in_exports_raise_only_user_errors(tmp_path, column):
    """Whatever a line holds, its import succeeds or ends with a UserError; any other exception fails this test."""
    rows = exported(tmp_path, None)
    refused = 0
    for number, value in enumerate(STRANGE):
        changed = [rows[0], rows[1] | {column: value}]
        (tmp_path / f"{number}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in changed))
        try:
            import_exports([read_exported(tmp_path / f"{number}.jsonl")], tmp_path / f"{number}.db")
        except UserError as error:
            assert f"{number}.jsonl: line 2" in str(error)  # noqa: PT017 – the file may also be readable
            refused += 1
    assert refused >= 10


# --- The table of the columns.


def documented_columns() -> list[str]:
    """The table of docs/store_format.md, whose rows join neighbors of equal meaning."""
    names = {}
    for name in (*EXPORTED, "number"):
        if COLUMNS[name].meaning and name in STORED:
            names.setdefault(COLUMNS[name].meaning, []).append(name)
    names = {"place in order of arrival, from 1": ["number"]} | names
    lines = ["| column | meaning |", "|---|---|"]
    for meaning, joined in names.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in joined)} | {meaning} |")
    lines.append(
        "| others, such as `has_logprobs` | derived from these columns; `is_plain` is false for trajectories |"
    )
    return lines


def test_the_page_of_the_format_has_the_columns():
    page = (Path(__file__).parents[2] / "docs/store_format.md").read_text(encoding="utf-8")
    table = "\n".join(documented_columns())
    assert table in page, f"write this table to docs/store_format.md:\n{table}"


def test_stores_exports_and_rows_have_the_schemas_columns():
    assert COMPLETIONS.c.keys() == [*STORED, "checksum"]
    assert list(row_of(make_row(3), 1)) == list(STORED)
    assert SCHEMA.names == list(EXPORTED)
    assert [field.type for field in SCHEMA] == [KINDS[COLUMNS[name].kind] for name in EXPORTED]
    assert {*STORED} == {*COLUMNS} - {"reward", "reward_parts", "accurate", "turn_rewards", "other_rewards"}
    assert {*COLUMNS} == {*EXPORTED, "number", *DERIVED}
    for name, column in COLUMNS.items():
        assert bool(column.value_type) == bool(column.takes) == bool(column.remedy), name


def test_whole_numbers_become_rewards():
    assert check_value("reward", 1, "reward") == 1.0 and isinstance(check_value("reward", 1, "reward"), float)
    assert check_value("reward", np.float32(0.5), "reward") == 0.5
    assert check_value("policy_version", np.int64(3), "x") == 3 and check_value("truncated", np.True_, "x") is True
