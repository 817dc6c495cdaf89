"""Checks of the values that a store keeps; error messages name place, column, value and reason."""

import itertools
import json
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import numpy as np

from recjax.experience.group import Completion, Group, Row, Turn
from recjax.tasks.grading.reward import MOST_REWARD

_ROUNDING = 1e-5  # nats by which a recorded log-prob may exceed 0


def check_records(records: Sequence[Any], place: Callable[[int], str]) -> None:
    """Raises an error if a record breaks a rule.

    Args:
        records: completions as `store.Record`.
        place: function from a record's index to its name in error messages.
    Raises:
        ValueError: the first bad record, with column, value and reason; or the store has no records.
    """
    if not records:
        raise ValueError("there are no rows to append; give at least one")
    if _are_plainly_valid(records):
        return
    ids = set()
    for index, record in enumerate(records):
        for column, value, is_valid, rule in _rules(record, ids):
            if not is_valid:
                raise ValueError(f"{place(index)}: column {column}: {value!r:.80}: {rule}")
        ids.add(record.completion.id)


def _are_plainly_valid(records: Sequence[Any]) -> bool:
    """True only if all records keep all rules; False decides nothing. A fast check on arrays of the whole batch.

    It handles completions with one row and without turns, as a policy samples them. The slow rules check each value
    that many completions share, once.
    """
    completions = [record.completion for record in records]
    rows = [completion.rows[0] for completion in completions if len(completion.rows) == 1]
    are_simple = len(rows) == len(completions) and not any(
        completion.version_runs or completion.turns or completion.metadata or row.recorded
        for completion, row in zip(completions, rows, strict=True)
    )
    if not are_simple or not _are_valid_rows(rows) or not _are_valid_grades(completions):
        return False
    ids = [completion.id for completion in completions]
    texts = [completion.text for completion in completions]
    if {*map(type, ids), *map(type, texts)} != {str} or not all(ids) or len({*ids}) < len(ids):
        return False
    if not _is_text("".join(ids)) or not _is_text("".join(texts)):
        return False
    seen = set()
    for record, completion in zip(records, completions, strict=True):
        group = record.group
        row = completion.rows[0]
        tokens = group.prompt_tokens, row.prompt_tokens
        parts = group.id, group.prompt, group.answer, record.time, record.tokenizer, completion.source
        version = completion.policy_version
        key = (*map(id, (*tokens, *parts, completion.sampling)), type(version), version, type(completion.truncated))
        if key not in seen:
            seen.add(key)
            if not all(is_valid for _, _, is_valid, _ in _rules(record, ())):
                return False
    return True


def _are_valid_rows(rows: Sequence[Row]) -> bool:
    """True only if the tokens, masks and log-probs of the rows keep all rules."""
    columns: list[list[Any]] = [
        [row.tokens for row in rows],
        [row.mask for row in rows],
        [row.behavior_logprobs for row in rows],
    ]
    kinds = [
        {(type(array), getattr(array, "dtype", None), getattr(array, "ndim", 0)) for array in arrays}
        for arrays in columns
    ]
    known = [(np.ndarray, np.dtype(dtype), 1) for dtype in (np.int32, bool, np.float32)]
    if any(kind != {single} for kind, single in zip(kinds, known, strict=True)):
        return False
    sizes = [np.array([len(array) for array in arrays]) for arrays in columns]
    if not all((size == sizes[0]).all() for size in sizes) or not sizes[0].all():
        return False
    tokens, mask, logprobs = map(np.concatenate, columns)
    has_sampled = np.logical_or.reduceat(mask, sizes[0].cumsum() - sizes[0]).all()
    sampled = logprobs[mask]
    return bool(has_sampled and tokens.min() >= 0 and np.isfinite(sampled).all() and sampled.max() <= _ROUNDING)


def _are_valid_grades(completions: Sequence[Completion]) -> bool:
    """True only if the grades of the completions keep all rules."""
    grades = [completion.grade for completion in completions if completion.grade is not None]
    parts = [grade.reward_parts for grade in grades if grade.reward_parts]
    rewards = [grade.reward for grade in grades if grade.reward is not None]
    if len(rewards) < len(grades) or any(grade.turns for grade in grades) or {*map(type, parts)} - {dict}:
        return False
    values = [*rewards, *itertools.chain.from_iterable(part.values() for part in parts)]
    names = {*itertools.chain.from_iterable(parts)}
    are_named = all(name and _is_text(name) for name in names)
    return are_named and not {*map(type, values)} - {float} and bool((np.abs(values or [0.0]) <= MOST_REWARD).all())


def is_finite_number(value: Any) -> bool:
    """True if a value of any type is a valid number for a reward; bools are not numbers."""
    return _is_number(value) and abs(value) <= MOST_REWARD


def are_parts(value: Any) -> bool:
    """True if a value of any type is valid for the parts of a reward: finite numbers by name."""
    is_named = isinstance(value, dict) and all(name and _is_text(name) for name in value)
    return is_named and all(map(is_finite_number, value.values()))


Rules = Iterator[tuple[str, Any, Any, str]]  # column, value, true if the value is valid, and the rule in words


def _rules(record: Any, ids: Container[str]) -> Rules:
    """The rules for a record in order; each may rely on earlier rules."""
    group = record.group
    completion = record.completion
    texts = {"id": completion.id, "group_id": group.id, "source": completion.source, "completion": completion.text}
    for column, value in (texts | {"time": record.time}).items():
        if value is None:
            yield column, value, False, "must be given in every row"
    is_chat = not isinstance(group.prompt, str)
    texts |= {"tokenizer": record.tokenizer, "answer": group.answer} | ({} if is_chat else {"prompt": group.prompt})
    for column, value in texts.items():
        if value is not None and not (value and _is_text(value)):  # a tuple for each valid text would take longer
            yield column, value, _is_text(value), "takes text in Unicode"
            yield column, value, column in ("completion", "answer"), "must not be empty"
    yield "id", completion.id, completion.id not in ids, "is the id of an earlier row; ids must be unique"
    yield "truncated", completion.truncated, isinstance(completion.truncated, bool | np.bool_), "takes true and false"
    yield "prompt", None, group.prompt is not None, "give one of prompt and messages"
    if is_chat:
        turns = group.prompt if isinstance(group.prompt, list | tuple) else ()
        whole = [isinstance(turn, dict) and turn.get("role") and isinstance(turn.get("content"), str) for turn in turns]
        yield "messages", group.prompt, whole and all(whole), "takes one message or more, each with role and content"
    yield from _rules_of_rows(group, completion.rows, completion.turns, record.tokenizer)
    are_pairs = all(len(run) == 2 and all(map(_is_whole, run)) for run in completion.version_runs)
    are_runs = (
        not completion.version_runs
        or are_pairs
        and sum(count for _, count in completion.version_runs) == completion.sampled_tokens
    )
    yield (
        "token_versions",
        completion.version_runs,
        are_runs,
        "takes pairs of a policy version and a number of sampled tokens",
    )
    yield from _rules_of_numbers(completion)


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and (value.isascii() or value.encode() is not None)
    except UnicodeEncodeError:
        return False


def _rules_of_rows(group: Group, rows: Sequence[Row], turns: Sequence[Turn], tokenizer: str | None) -> Rules:
    own_prompts = [row.prompt_tokens for row in rows if row.prompt_tokens is not group.prompt_tokens]
    columns = [("prompt_tokens", tokens) for tokens in (group.prompt_tokens, *own_prompts)]
    for column, tokens in [*columns, *(("completion_tokens", row.tokens) for row in rows)]:
        tokens = np.asarray(tokens)
        are_ids = tokens.ndim == 1 and (not len(tokens) or tokens.dtype.kind in "iu" and tokens.min() >= 0)
        yield column, tokens, are_ids, "token ids are whole numbers, 0 or more"
        if not len(tokens):
            yield column, tokens, column == "prompt_tokens", "has no tokens; prompts and completions need at least one"
            continue
        yield column, tokens, tokens.max() < 2**31, "token ids are below 2^31"
        unnamed = "tokens need the name of their vocabulary in the column tokenizer, which is null"
        yield column, tokens, tokenizer is not None, unnamed
    for row in rows:
        mask = row.mask
        logprobs = row.behavior_logprobs
        size = len(row.tokens)
        has_size = mask is not None and len(mask) == size
        yield "completion_mask", mask, has_size, "must be as long as completion_tokens"
        yield "completion_mask", mask, np.asarray(mask).dtype == bool, "takes true and false"
        yield "completion_mask", mask, np.any(mask), "is false everywhere; the policy must have chosen a token"
        if logprobs is not None:
            has_size = len(logprobs) == size
            yield "behavior_logprobs", logprobs, has_size, "must be null or as long as completion_tokens"
            # Values at tokens that were not sampled are ignored.
            sampled = np.asarray(logprobs, np.float32)[np.asarray(mask)]
            are_logprobs = np.isfinite(sampled).all() and sampled.max() <= _ROUNDING
            rule = "log-probabilities of sampled tokens are finite and at most 0; if they are not known, give null"
            yield "behavior_logprobs", logprobs, are_logprobs, rule
        for name, values in row.recorded.items():
            fits = isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and len(values) == size
            yield f"recorded {name}", values, fits, "takes an array of numbers as long as completion_tokens"
    for row, end in turns:
        is_turn = 0 <= row < len(rows) and 0 < end <= len(rows[row].tokens) and rows[row].mask[end - 1]
        yield "turns", (row, end), is_turn, "takes the index of a row, and the end of sampled tokens in it"


def _rules_of_numbers(one: Completion) -> Rules:
    version = one.policy_version
    is_version = version is None or _is_whole(version) and 0 <= version < 2**31
    yield "policy_version", version, is_version, "takes the number of updates, from 0 to 2147483647, or null"
    if one.sampling is not None:
        temperature, top_k, top_p, min_p = one.sampling
        is_temperature = _is_number(temperature) and 0 <= temperature < float("inf")
        yield "temperature", temperature, is_temperature, "takes a finite number, 0 or more, or null"
        is_count = _is_whole(top_k) and 0 <= top_k < 2**31
        yield "top_k", top_k, is_count, "takes a number from 0 (all tokens) to 2147483647, or null"
        yield "top_p", top_p, _is_number(top_p) and 0 < top_p <= 1, "takes a number above 0 and at most 1, or null"
        yield "min_p", min_p, _is_number(min_p) and 0 <= min_p <= 1, "takes a number from 0 to 1, or null"
    try:
        is_object = one.metadata == {} or isinstance(one.metadata, dict) and json.dumps(one.metadata).encode()
    except (TypeError, ValueError, RecursionError):
        is_object = False
    yield "metadata", one.metadata, is_object, "takes a JSON object"
    if one.grade is not None:
        reward = one.grade.reward
        parts = one.grade.reward_parts
        yield "reward", reward, reward is None or is_finite_number(reward), f"{_FINITE}, or null while it is pending"
        yield "reward_parts", parts, reward is not None or not parts, "has reward parts, but the reward is null"
        yield "reward_parts", parts, parts is None or are_parts(parts), f"takes names; each {_FINITE}"
        rewards = one.grade.turns
        count = len(one.turns) or 1
        are_rewards = not rewards or len(rewards) == count and all(map(is_finite_number, rewards))
        yield "turn_rewards", rewards, are_rewards, f"takes {count} finite numbers, one for each turn, or none"


_FINITE = f"takes a finite number of at most {MOST_REWARD:g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
