"""The user's error: its fields, its one line, and its way through pickle."""

import doctest
import pickle

import pytest

import recjax.errors
from recjax.errors import UserError


class Silent:
    """A value that cannot print itself."""

    def __repr__(self):
        raise TypeError("no text")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("a.b", "is wrong", "remove it", 3), "a.b = 3: is wrong; remove it"),
        (UserError("a.b", "is wrong", "remove it", None), "a.b = None: is wrong; remove it"),
        (UserError("a.b", "is wrong", "remove it"), "a.b: is wrong; remove it"),
        (UserError("a.b", "is wrong"), "a.b: is wrong"),
        (UserError("a.b", remedy="takes one of x, y", value="z"), "a.b = 'z': takes one of x, y"),
        (UserError(problem="is wrong", remedy="remove it"), "is wrong; remove it"),
        (UserError("a.b", "is wrong", value="x" * 1000), f"a.b = '{'x' * 299}: is wrong"),
        (UserError("a.b", "is wrong", value=Silent()), "a.b = a Silent that cannot be printed: is wrong"),
        (UserError("line 3", "is empty", "remove it").within("f.jsonl"), "f.jsonl: line 3: is empty; remove it"),
        (UserError("", "is empty", "remove it").within("f.jsonl"), "f.jsonl: is empty; remove it"),
    ],
)
def test_the_line_has_all_fields_given(error, line):
    assert str(error) == line


@pytest.mark.parametrize("value", [..., None, 0.5, ["a"]])
def test_pickled_error_keeps_its_fields(value):
    error = pickle.loads(pickle.dumps(UserError("a.b", "is wrong", "remove it", value)))
    assert isinstance(error, ValueError)
    assert (error.where, error.problem, error.remedy) == ("a.b", "is wrong", "remove it")
    assert error.value is value or error.value == value
    assert str(error) == str(UserError("a.b", "is wrong", "remove it", value))


def test_examples():
    assert doctest.testmod(recjax.errors).failed == 0
