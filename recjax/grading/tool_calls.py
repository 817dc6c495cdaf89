"""Reward for tool calls: one think block and then JSON calls, compared as a multiset with the true calls."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from recjax.grading.thinking import one_thought

_FENCE = re.compile(r"```(?:json)?[^\S\n]*\n")


def tool_calls(completion: str, answer: str, columns: Mapping[str, Any]) -> dict[str, float]:
    """accuracy: 1 if the completion is one `<think>…</think>` block and then JSON of the true calls; else 0.

    The JSON is a list of objects with "name" and "arguments", or one such object; a code fence around it is optional.
    Calls are compared as a multiset: their order is free, but not their number. The order of an object's keys is free,
    but not the order of a list's elements. Values are compared as JSON values: 1 and 1.0 are equal, as JSON has only
    one number type; "1", 1, true and null all differ. Duplicate keys, NaN, Infinity and comments are invalid.

    Args:
        answer: the true calls, as JSON of the same form; an empty list if the reply should call no tool.
    Raises:
        ValueError: the answer has another form.
    """
    truth = _calls(answer)
    if truth is None:
        raise ValueError(f"tool_calls needs answers that are JSON lists of name and arguments; got {answer!r:.200}")
    calls = _calls_after_thoughts(completion)
    if calls is None:
        return {"accuracy": 0.0}
    return {"accuracy": float(Counter(calls) == Counter(truth))}


def canonical_calls(completion: str) -> str | None:
    """A completion's calls, sorted and in a canonical spelling; None if its form is wrong."""
    calls = _calls_after_thoughts(completion)
    if calls is None:
        return None
    return f"[{', '.join(sorted(calls))}]"


def _calls_after_thoughts(completion: str) -> list[str] | None:
    parts = one_thought(completion)
    if parts is None:
        return None
    text = parts[1].strip()
    fence = _FENCE.match(text)
    if fence and text.endswith("```") and fence.end() < len(text) - 3:
        text = text[fence.end() : -3]
    return _calls(text)


def _calls(text: str) -> list[str] | None:
    """Every call in a canonical spelling; None if the text is not JSON of calls."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("a key is given twice")
        return dict(pairs)

    try:
        parsed = json.loads(text, object_pairs_hook=unique, parse_constant=_number, parse_float=_number)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, list):
        parsed = [parsed]
    calls = []
    for call in parsed:
        match call:
            case {"name": str(name), "arguments": dict(arguments)} if len(call) == 2:
                try:
                    calls.append(json.dumps([name, arguments], sort_keys=True))
                except RecursionError:
                    return None
            case _:
                return None
    return calls


def _number(text: str) -> int | float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not JSON, or too large to be told from other numbers")
    if value.is_integer():
        return int(value)
    return value
