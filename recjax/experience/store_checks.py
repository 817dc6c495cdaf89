"""Checks of the values that a store keeps; error messages name place, column, value and reason."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recjax.experience.group import Group, Row
from recjax.tasks.grading.reward import MOST_REWARD

_ROUNDING = 1e-5  # nats by which a recorded log-prob may exceed 0


def check_records(records: Sequence[Any], place: Callable[[int], str]) -> None:
    """Raises an error if a record breaks a rule.

    Args:
        records: completions as `store.Record`.
        place: function from a record's index to its name in error messages.
    Raises:
        ValueError: the first bad record, with column, value and reason; or there are no records.
    """
    if not records:
        raise ValueError("there are no rows to append; give at least one")
    seen = set()
    for index, record in enumerate(records):
        found = _problem(record)
        if found is None and record.completion.id in seen:
            found = "id", record.completion.id, "is the id of an earlier row; ids must be unique"
        if found is not None:
            column, value, reason = found
            raise ValueError(f"{place(index)}: column {column}: {value!r:.80}: {reason}")
        seen.add(record.completion.id)


def is_finite_number(value: Any) -> bool:
    """True if a value of any type is a valid number for a reward; bools are not numbers."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and abs(value) <= MOST_REWARD


Problem = tuple[str, Any, str] | None  # column, value, and reason


def _problem(record: Any) -> Problem:
    group, one = record.group, record.completion
    texts = {"id": one.id, "group_id": group.id, "source": one.source, "completion": one.text, "time": record.time}
    for column, value in texts.items():
        if value is None:
            return column, value, "must be given in every row"
    texts |= {"tokenizer": record.tokenizer, "answer": group.answer}
    texts |= {"prompt": group.prompt} if isinstance(group.prompt, str) else {}
    del texts["time"]
    for column, value in texts.items():
        if value is not None and not _is_text(value):
            return column, value, "takes text in Unicode"
        if value == "" and column not in ("completion", "answer"):
            return column, value, "must not be empty"
    if not isinstance(one.truncated, bool | np.bool_):
        return "truncated", one.truncated, "takes true and false"
    if group.prompt is None:
        return "prompt", None, "give one of prompt and messages"
    if not isinstance(group.prompt, str):
        turns = group.prompt if isinstance(group.prompt, list | tuple) else ()
        whole = [isinstance(one, dict) and one.get("role") and isinstance(one.get("content"), str) for one in turns]
        if not whole or not all(whole):
            return "messages", group.prompt, "takes one message or more, each with role and content"
    return _problem_of_rows(group, one.rows, record.tokenizer) or _problem_of_numbers(record)


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _problem_of_rows(group: Group, rows: Sequence[Row], tokenizer: str | None) -> Problem:
    own = [row.prompt_tokens for row in rows if row.prompt_tokens is not group.prompt_tokens]
    prompts = [group.prompt_tokens, *own]
    columns = [("prompt_tokens", tokens) for tokens in prompts] + [("completion_tokens", row.tokens) for row in rows]
    for column, tokens in columns:
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or (len(tokens) and (tokens.dtype.kind not in "iu" or tokens.min() < 0)):
            return column, tokens, "token ids are whole numbers, 0 or more"
        if not len(tokens) and column == "completion_tokens":
            return column, tokens, "has no tokens; prompts and completions need at least one"
        if len(tokens) and tokens.max() >= 2**31:
            return column, tokens, "token ids are below 2^31"
        if len(tokens) and tokenizer is None:
            return column, tokens, "tokens need the name of their vocabulary in the column tokenizer, which is null"
    for row in rows:
        mask, size = row.mask, len(row.tokens)
        if mask is None or len(mask) != size:
            return "completion_mask", mask, "must be as long as completion_tokens"
        if np.asarray(mask).dtype != bool:
            return "completion_mask", mask, "takes true and false"
        if not np.any(mask):
            return "completion_mask", mask, "is false everywhere; the policy must have chosen a token"
        if row.behavior_logprobs is None:
            continue
        if len(row.behavior_logprobs) != size:
            return "behavior_logprobs", row.behavior_logprobs, "must be null or as long as completion_tokens"
        # Values at tokens that were not sampled are ignored.
        sampled = np.asarray(row.behavior_logprobs, np.float32)[np.asarray(mask)]
        if not (np.isfinite(sampled).all() and sampled.max() <= _ROUNDING):
            reason = "log-probabilities of sampled tokens are finite and at most 0; if they are not known, give null"
            return "behavior_logprobs", row.behavior_logprobs, reason
    return None


def _problem_of_numbers(record: Any) -> Problem:
    one = record.completion
    if one.policy_version is not None and not (_is_whole(one.policy_version) and one.policy_version >= 0):
        return "policy_version", one.policy_version, "takes the number of updates, 0 or more, or null"
    if one.sampling is not None:
        temperature, top_k, top_p, min_p = one.sampling
        if not (_is_number(temperature) and 0 <= temperature < float("inf")):
            return "temperature", temperature, "takes a finite number, 0 or more, or null"
        if not (_is_whole(top_k) and top_k >= 0):
            return "top_k", top_k, "takes 0 (all tokens) or more, or null"
        if not (_is_number(top_p) and 0 < top_p <= 1):
            return "top_p", top_p, "takes a number above 0 and at most 1, or null"
        if not (_is_number(min_p) and 0 <= min_p <= 1):
            return "min_p", min_p, "takes a number from 0 to 1, or null"
    try:
        is_object = isinstance(one.metadata, dict) and json.dumps(one.metadata).encode() is not None
    except (TypeError, ValueError, RecursionError):
        is_object = False
    if not is_object:
        return "metadata", one.metadata, "takes a JSON object"
    return None if one.grade is None else problem_of_grade(one.grade)


def problem_of_grade(grade: Any) -> Problem:
    """The column, value and reason if a grade has a bad value; else None."""
    if grade.reward is not None and not is_finite_number(grade.reward):
        return "reward", grade.reward, f"takes a finite number of at most {MOST_REWARD:g}, or null while it is pending"
    parts = grade.reward_parts
    if grade.reward is None and parts:
        return "reward_parts", parts, "has reward parts, but the reward is null"
    are_names = parts is None or (isinstance(parts, dict) and all(name and _is_text(name) for name in parts))
    if not are_names or not all(map(is_finite_number, (parts or {}).values())):
        return "reward_parts", parts, f"takes names, each with a finite value of at most {MOST_REWARD:g}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
