"""Checks of a store's schema and rows; error messages name file, row, column, value and reason."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recjax.tasks.grading.reward import MOST_REWARD

_NEEDED = ("id", "group_id", "source", "completion", "truncated", "time")
_REWARD = f"takes a finite number of at most {MOST_REWARD:g}, or null while the reward is pending"
_PARTS = f"takes pairs of a name, each once, and a finite value of at most {MOST_REWARD:g}"
_ROUNDING = 1e-5  # nats by which a recorded log-prob may exceed 0
# Conditions for numbers that are not null.
_NUMBERS = (
    (
        "reward",
        lambda x: np.abs(x) <= MOST_REWARD,
        _REWARD,
    ),
    ("policy_version", lambda x: x >= 0, "takes the number of updates, 0 or more, or null"),
    ("temperature", lambda x: (x >= 0) & np.isfinite(x), "takes a finite number, 0 or more, or null"),
    ("top_k", lambda x: x >= 0, "takes 0 (all tokens) or more, or null"),
    ("top_p", lambda x: (x > 0) & (x <= 1), "takes a number above 0 and at most 1, or null"),
    ("min_p", lambda x: (x >= 0) & (x <= 1), "takes a number from 0 to 1, or null"),
)


def check_schema(found: pa.Schema, expected: pa.Schema, place: str) -> None:
    """Raises an error for missing columns, unknown columns, and columns with the wrong type.

    Raises:
        ValueError: a wrong column; the message names it.
    """
    types, stored = (dict(zip(schema.names, schema.types, strict=True)) for schema in (found, expected))
    for name in {**stored, **types}:
        if name not in types:
            raise ValueError(f"{place}: column {name} is missing; write the file again with recjax.experience.store")
        if name not in stored:
            raise ValueError(f"{place}: column {name} is unknown; remove it, as stores have only {expected.names}")
        if types[name] != stored[name]:
            raise ValueError(f"{place}: column {name} has type {types[name]}; convert it to {stored[name]}")


def check_rows(table: pa.Table, place: Callable[[int], str]) -> None:
    """Raises an error if a row of a table breaks a rule.

    Args:
        table: Arrow table with the store's schema.
        place: function from a row's number to its name in error messages.
    Raises:
        ValueError: the first row that breaks the first violated rule, with column, value and reason.
    """
    for column, bad, reason in _rules(table):
        if bad.any():
            row = int(np.argmax(bad))
            value = table[column][row].as_py()
            raise ValueError(f"{place(row)}: column {column}: {value!r:.80}: {reason}")


def is_finite_number(value: Any) -> bool:
    """True if a value of any type is a valid number for a reward; bools are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST_REWARD


Rule = tuple[str, np.ndarray, str]


def _rules(table: pa.Table) -> Iterator[Rule]:
    """Yields column name, mask of bad rows, and reason; a rule may rely on all earlier rules."""

    def is_object(text: str) -> bool:
        try:
            return isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            return False

    def are_messages(turns: list[dict | None]) -> bool:
        return bool(turns) and all(turn and turn["role"] and turn["content"] is not None for turn in turns)

    def are_parts(parts: list[dict | None]) -> bool:
        names = [part["name"] for part in parts if part and part["name"]]
        values = [part["value"] for part in parts if part and part["value"] is not None]
        return len({*names}) == len(values) == len(parts) and all(abs(value) <= MOST_REWARD for value in values)

    for name in _NEEDED:
        yield name, _is_null(table[name]), "must be given in every row"
    for name in ("id", "group_id", "source", "tokenizer", "prompt"):
        yield name, _filled(pc.equal(table[name], ""), False), "must not be empty"
    yield "id", table["id"].to_pandas().duplicated().to_numpy(), "is the id of an earlier row; ids must be unique"
    yield "prompt", ~(_is_null(table["prompt"]) ^ _is_null(table["messages"])), "give one of prompt and messages"
    yield from _token_rules(table)
    yield from _logprob_rules(table)
    for name, fits, reason in _NUMBERS:
        yield name, ~(fits(_numbers(table[name])) | _is_null(table[name])), reason
    unrewarded = _is_null(table["reward"]) & ~_is_null(table["reward_parts"])
    yield "reward_parts", unrewarded, "has reward parts, but the reward is null"
    yield "reward_parts", _unless(table, "reward_parts", are_parts), _PARTS
    yield "metadata", _unless(table, "metadata", is_object), "takes the text of a JSON object, or null"
    reason = "takes one message or more, each with role and content"
    yield "messages", _unless(table, "messages", are_messages), reason


def _token_rules(table: pa.Table) -> Iterator[Rule]:
    lengths = {name: _lengths(table[name]) for name in ("completion_tokens", "completion_mask", "prompt_tokens")}
    tokens = lengths["completion_tokens"]
    for name in ("prompt_tokens", "completion_tokens"):
        yield name, lengths[name] == 0, "has no tokens; prompts and completions need at least one"
        yield name, _any_item(table[name], lambda x: ~(x >= 0)), "token ids are whole numbers, 0 or more"
        unnamed = (lengths[name] > 0) & _is_null(table["tokenizer"])
        yield name, unnamed, "tokens need the name of their vocabulary in the column tokenizer, which is null"
    yield "completion_mask", lengths["completion_mask"] != tokens, "must be as long as completion_tokens"
    yield "completion_mask", _any_item(table["completion_mask"], np.isnan), "has a null; it takes true and false"
    drawn = _any_item(table["completion_mask"], lambda x: x == 1)
    yield "completion_mask", (tokens > 0) & ~drawn, "is false everywhere; the policy must have chosen a token"


def _logprob_rules(table: pa.Table) -> Iterator[Rule]:
    column = table["behavior_logprobs"]
    lengths, tokens = _lengths(column), _lengths(table["completion_tokens"])
    yield "behavior_logprobs", (lengths >= 0) & (lengths != tokens), "must be null or as long as completion_tokens"
    # The rule above has checked that lengths agree. Values at tokens that were not sampled are ignored.
    rows, logprobs = _items(column)
    _, sampled = _items(table.filter(pc.is_valid(column))["completion_mask"])
    bad = (sampled == 1) & ~(np.isfinite(logprobs) & (logprobs <= _ROUNDING))
    reason = "log-probabilities of sampled tokens are finite and at most 0; if they are not known, give null"
    yield "behavior_logprobs", np.isin(np.arange(len(table)), rows[bad]), reason


def _is_null(column: pa.ChunkedArray) -> np.ndarray:
    return pc.is_null(column).to_numpy()


def _filled(column: pa.ChunkedArray, value: Any) -> np.ndarray:
    return pc.fill_null(column, value).to_numpy()


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """The values of a column as numbers; NaN for null."""
    return _filled(column.cast(pa.float64()), np.nan)


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    """The number of items in each row's list; -1 for null."""
    return _filled(pc.list_value_length(column), -1)


def _items(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """The row number and value of every item in a column of lists; NaN for a null item."""
    rows = np.repeat(np.arange(len(column)), np.maximum(_lengths(column), 0))
    return rows, _numbers(pc.list_flatten(column))


def _any_item(column: pa.ChunkedArray, fits: Any) -> np.ndarray:
    """Marks the rows with at least one item for which `fits` is True."""
    rows, values = _items(column)
    return np.isin(np.arange(len(column)), rows[fits(values)])


def _unless(table: pa.Table, name: str, fits: Callable[[Any], Any]) -> np.ndarray:
    """Marks the rows whose value is not null and for which `fits` is False."""
    return np.array([value is not None and not fits(value) for value in table[name].to_pylist()])
