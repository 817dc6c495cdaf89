"""Values of files, overrides and sweeps: which texts are numbers, and that no text is lost on its way."""

import math
import unittest.mock

import hypothesis
import hypothesis.strategies as st
import pytest
import yaml

from recjax.config.yaml_values import (
    _FastLoader,
    _Loader,
    read_decimal,
    read_override,
    read_scalar,
    read_yaml,
    read_yaml_file,
    write_override,
    write_yaml,
)

PROMPT = "You are a solver.\nRules: think first. # then answer\n"
SCALARS = [
    *[("0", 0), ("-7", -7), ("+7", 7), ("1e-6", 1e-6), ("1E3", 1e3), (".5", 0.5), ("1.", 1.0), ("-.inf", -math.inf)],
    *[("null", None), ("~", None), ("", None), ("true", True), ("False", False)],
    *[(text, text) for text in ("008", "010", "00.5", "-012", "0x1f", "0o17", "0b1", "1_000", "1:30", "190:20:30.15")],
    *[(text, text) for text in ("yes", "No", "on", "OFF", "y", "2024-01-05", "=", "1.2.3", "1e", "nan", "inf")],
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_plain_scalars_are_the_same_everywhere(text, value):
    for read in (read_scalar(text), read_override(text), read_yaml(f"key: {text}")["key"]):
        assert read == value and type(read) is type(value)
    if text:
        assert read_override(f"[{text}]") == [value]


@pytest.mark.parametrize("text", ["8", "008", "-012", "1_000", "12_345_678.5", "1e-6", "00.50", "inf", ".nan", "-.inf"])
def test_decimal_digits_are_numbers_for_numeric_keys(text):
    number = read_decimal(text)
    assert str(number) == str(float(text.replace(".inf", "inf").replace(".nan", "nan"))) or number == int(text)


@pytest.mark.parametrize("text", ["0x1f", "0o17", "1:30", "1_0", "_1", "1__000", "", ".", "-", "e5", "８", "yes", " 8"])
def test_nothing_else_is_a_number(text):
    assert read_decimal(text) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (PROMPT, PROMPT),
        ("run #3", "run #3"),
        ("# all of it", "# all of it"),
        ("008", "008"),
        ("no", "no"),
        ("5", "5"),
        ("key: value", "key: value"),
        ("[a]", "[a]"),
        ("{a: 1}", "{a: 1}"),
        (" padded ", " padded "),
        ("a 'quoted' word", "a 'quoted' word"),
        ("'one' and 'two'", "'one' and 'two'"),
        ("'whole'", "whole"),
        ('"line\\nbreak # kept"', "line\nbreak # kept"),
        ("'null'", "null"),
        ("null", None),
        ("", None),
    ],
)
def test_a_key_that_takes_text_takes_it_literally(text, value):
    assert read_override(text, takes_text=True) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("run #3", "run #3"),
        (PROMPT, PROMPT),
        ("['run #3', \"a\nb\"]", ["run #3", "a\nb"]),
        ("{a: 1,\n b: [x,\n y]}", {"a": 1, "b": ["x", "y"]}),
        ("{a: no, b: 010}", {"a": "no", "b": "010"}),
    ],
)
def test_another_key_takes_yaml_without_losing_text(text, value):
    assert read_override(text) == value


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[a, b] # note", "comment"),
        ("[a #b]", "comment"),
        ("[a\nb]", "several lines"),
        ("{a: 1, a: 2}", "'a' stands twice"),
        ("&x [*x]", "recursive"),
        ("[" * 1000, "nested too deeply"),
        ("[1", "expected"),
        ("!!python/object:os.system x", "constructor"),
    ],
)
def test_lost_text_and_wrong_yaml_are_errors(text, part):
    with pytest.raises(ValueError, match=part) as error:
        read_override(text, takes_yaml=True)
    assert "\n" not in str(error.value)


WORDS = st.text() | st.text("'\"# \n:-[]{}a0_.\\,&*!|>%@~?=<", min_size=1)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner),
    max_leaves=8,
)


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(VALUES)
@hypothesis.example(PROMPT)
@hypothesis.example({"notes": PROMPT, "seeds": ["008", "1e-6", "no"]})
def test_what_is_written_is_read_back(value):
    assert read_yaml(write_yaml(value)) == value
    key, _, text = write_override("some.key", value).partition("=")
    assert key == "some.key" and "\n" not in text
    if isinstance(value, str):
        assert read_override(text, takes_text=True) == value
    assert read_override(text) == value


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    st.lists(
        st.sampled_from(
            [
                "a",
                "1",
                "b: ",
                "- ",
                "[",
                "]",
                "{",
                "}",
                ", ",
                ": ",
                "\n",
                "  ",
                '"',
                "'",
                "# ",
                "&x ",
                "*x",
                "<<: ",
                "é",
                "? ",
            ]
        )
    )
)
@hypothesis.example([*"a: &x {b: 1}\nc:\n  <<: *x\n  b: 2\n"])
@hypothesis.example(["[no, 1:30, 010, 0x1f]"])
@hypothesis.example(["a: 1\na: 2"])
@hypothesis.example(['"\\ud83d"'])  # which libyaml refuses
def test_the_fast_reader_changes_no_value_and_no_error(pieces):
    results = []
    for reader in (_FastLoader, _Loader):
        with unittest.mock.patch("recjax.config.yaml_values._FastLoader", reader):
            try:
                results.append(repr(read_yaml("".join(pieces))))
            except ValueError as error:
                results.append(str(error))
    assert results[0] == results[1]


def test_stored_files_are_equal_for_yaml_1_1():
    values = {"a": "no", "b": "010", "c": "1:30", "d": 1e-6, "e": "1e-6", "f": [True, None, "2024-01-05"]}
    assert yaml.safe_load(write_yaml(values)) == values


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("seed: 1".encode("utf-16"), "UTF-16"),
        (b"seed: \xe9", "not UTF-8"),
        (b"seed: [1", "not a valid YAML"),
        (b"a: 1\na: 2", "stands twice"),
        (b"a: \x00", "not a valid YAML"),
        (None, "not a file that can be read"),
    ],
)
def test_an_error_of_a_file_names_it(tmp_path, content, part):
    path = tmp_path / "own.yaml"
    path.write_bytes(content) if content else path.mkdir()
    with pytest.raises(ValueError, match=f"own.yaml: .*{part}"):
        read_yaml_file(path)


def test_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_bytes("seed: 1".encode("utf-8-sig"))
    assert read_yaml_file(path) == {"seed": 1}


def test_a_file_of_aliases_that_multiply_is_refused(tmp_path):
    lines = ["a0: &a0 [" + "x, " * 10 + "]"]
    lines += [f"a{level}: &a{level} [" + f"*a{level - 1}, " * 10 + "]" for level in range(1, 9)]
    (tmp_path / "aliases.yaml").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="aliases.yaml: not a valid YAML file .has more than 100,000 values"):
        read_yaml_file(tmp_path / "aliases.yaml")
