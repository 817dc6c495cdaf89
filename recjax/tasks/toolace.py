"""ToolACE: conversations in which an assistant calls functions.

Data: `Team-ACE/ToolACE` on the hub, file data.json (only split train; recjax holds out whole conversations for
evaluation) with the columns `system`, which lists the functions as JSON, and `conversations`, a list of
{"from": user, assistant or tool, "value": text}. A call turn reads [Name(key=value, …), …]; names may contain spaces.
Problems: one per call turn. Its prompt is the previous turns, with earlier calls rewritten in the requested form.
Prompt: the row's own system message up to the end of the list of functions, then the system prompt below.
Answer: a JSON list of {"name", "arguments"}, keys of the arguments sorted. recjax skips and counts call turns that it
cannot parse.
Difficulty: the number of calls. Columns: toolace_conversation, the row's location.
Reward: `tool_calls`, 1 if exactly one think block precedes a JSON list with the calls of the answer in any order, 0
otherwise.
"""

import ast
import contextlib
import json
import logging
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

from recjax.tasks.problems import Problem
from recjax.tasks.reading import FileRow

logger = logging.getLogger(__name__)

SYSTEM_PROMPT = (
    "Answer in this form, whatever other form was named before: first think between <think> and </think>, once. Then"
    " write the function calls as one JSON list and nothing after it:\n"
    '<think>your thoughts</think>\n[{"name": "function name", "arguments": {"parameter": "value"}}]'
)

CONVERSATION = "toolace_conversation"  # column with the conversation that contains the problem

_SPEAKERS = ("user", "assistant", "tool")
_QUOTED = r"""(["'])(?:\\.|(?!\1)[^\\])*\1"""
_QUOTED_OR_CHARACTER = re.compile(rf"{_QUOTED}|.", re.DOTALL)
_ESCAPED_OR_CHARACTER = re.compile(r"\\.|.", re.DOTALL)
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\0": r"\x00"}  # characters that a Python literal cannot contain unescaped
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def toolace_problems(rows: Sequence[FileRow], system_prompt: str = SYSTEM_PROMPT) -> list[Problem]:
    """One problem for every assistant turn with function calls.

    Raises:
        UserError: a row has no system text or no turns, or a turn has no known speaker or no text.
    """
    problems = []
    unreadable = 0
    for row in rows:
        functions = row.text("system")
        for match in re.finditer(r"\[\s*\{", functions):  # the text up to the end of the JSON list of functions
            with contextlib.suppress(json.JSONDecodeError):
                listed, end = json.JSONDecoder(strict=False).raw_decode(functions, match.start())
                if all(isinstance(function, dict) and "name" in function for function in listed):
                    functions = functions[:end]
                    break
        messages = [{"role": "system", "content": f"{functions.strip()}\n\n{system_prompt}".strip()}]
        turns = row.values.get("conversations")
        if not isinstance(turns, list) or not turns:
            raise row.error("conversations", f"must hold a list of turns; got {turns!r:.80}")
        for turn in turns:
            is_known = isinstance(turn, dict) and turn.get("from") in _SPEAKERS
            if not is_known or not isinstance(turn.get("value"), str):
                reason = f"has a turn that is not {{'from': {' or '.join(_SPEAKERS)}, 'value': text}}"
                raise row.error("conversations", f"{reason}; got {turn!r:.80}")
            speaker = turn["from"]
            text = turn["value"]
            calls = parse_calls(text) if speaker == "assistant" else None
            if calls is not None:
                text = json.dumps(calls, ensure_ascii=False)
                difficulty = {1: "1 call", 2: "2 calls", 3: "3 calls"}.get(len(calls), "4 or more calls")
                problems.append(
                    Problem(list(messages), text, columns={CONVERSATION: row.location}, difficulty=difficulty)
                )
            elif speaker == "assistant" and _looks_like_calls(text):
                unreadable += 1
            messages.append({"role": speaker, "content": text})
    logger.info("ToolACE: %d turns of calls; %d more could not be parsed and are left out", len(problems), unreadable)
    return problems


def parse_calls(text: str) -> list[dict[str, Any]] | None:
    """The calls in a text such as `[Market Trends(country="us", days=[1, 2]), now()]`; None for other text.

    Values must be Python or JSON literals, because no code is executed.
    """
    if not _looks_like_calls(text):
        return None
    calls = []
    for piece in _split(text.strip()[1:-1], has_names=True):
        match = re.fullmatch(r"([^()=\"\[\]{}]+)\((.*)\)", piece, re.DOTALL)
        arguments = _arguments(match[2]) if match else None
        if match is None or arguments is None:
            return None
        calls.append({"name": match[1].strip(), "arguments": dict(sorted(arguments.items()))})
    return calls


def _looks_like_calls(text: str) -> bool:
    return bool(re.fullmatch(r"\s*\[[^\[\]{}()]+\(.*\)\s*\]\s*", text, re.DOTALL))


def _arguments(text: str) -> dict[str, Any] | None:

    def in_one_line(match: re.Match) -> str:
        """Replaces line breaks inside quotes by escapes."""
        characters = _ESCAPED_OR_CHARACTER.findall(match.group())
        return "".join(_ESCAPES.get(each, each) for each in characters) if match[1] else match.group()

    arguments = {}
    for piece in _split(text) if text.strip() else []:
        key, equals, value = piece.partition("=")
        key = key.strip()
        try:
            with warnings.catch_warnings(action="ignore"):  # Only JSON has escapes such as \/.
                code = _QUOTED_OR_CHARACTER.sub(in_one_line, value.strip())
                parsed = _literal(ast.parse(code, mode="eval").body)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return None
        if not equals or not re.fullmatch(r"[\w.-]+", key) or key in arguments:
            return None
        arguments[key] = parsed
    return arguments


def _literal(node: ast.expr) -> Any:
    """The JSON value of a literal; raises a ValueError for any other expression."""
    match node:
        case ast.Constant(value=str(text)):
            # JSON can write a character as two surrogates; decoding joins them and refuses a lone surrogate.
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        case ast.Constant(value=int() | float() | None) if node.value != math.inf:
            return node.value
        case ast.Name(id=word) if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())) if (
            abs(node.operand.value) < math.inf
        ):
            return -node.operand.value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            arguments = {
                str(getattr(key, "value", None)): _literal(value) for key, value in zip(keys, values, strict=True)
            }
            if len(arguments) == len(keys):
                return arguments
    raise ValueError(f"{ast.dump(node)} is no literal")


def _split(text: str, has_names: bool = False) -> list[str]:
    """Splits a text at commas outside quotes and brackets.

    Args:
        has_names: flag for text with function names outside brackets; an apostrophe in a name opens no quoted text.
    """
    parts = []
    start = 0
    depth = 0
    position = 0
    while position < len(text):
        if has_names and depth == 0:
            token = text[position]
        else:
            match = _QUOTED_OR_CHARACTER.match(text, position)
            assert match is not None
            token = match.group()
        if token == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
        depth += (token in "([{") - (token in ")]}")
        position += len(token)
    return [*parts, text[start:].strip()]
