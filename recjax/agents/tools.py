"""Functions that a model may call: calls as models write them, and worker processes that run them.

A crash or a hang fails only its own call.
"""

import asyncio
import contextlib
import inspect
import json
import pkgutil
from collections.abc import Mapping
from typing import Any, NamedTuple

from recjax.errors import UserError
from recjax.runtime.event_loop import run_to_end
from recjax.runtime.workers import CallFailed, Workers

MOST_CHARACTERS = 20_000  # longer results are cut
_MOST_PROBLEM = 500  # characters that an error of a call's arguments may quote


# The format of Hermes, Qwen and SmolLM models: JSON between tags, one call or a list of calls.
_BEGIN = "<tool_call>"
_END = "</tool_call>"


class Call(NamedTuple):
    """A call that a model has written; `error` explains an invalid call."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


def split_calls(text: str) -> tuple[list[str], str]:
    """The texts between the tags of calls, and the text without them, in time linear in the text.

    Examples:
        >>> split_calls("a<tool_call>1</tool_call>b<tool_call>2")
        (['1'], 'ab<tool_call>2')
    """
    *ended, last = text.split(_END)
    calls = []
    kept = []
    for piece in ended:
        before, begin, call = piece.partition(_BEGIN)
        if begin:
            calls.append(call)
            kept.append(before)
        else:
            kept.append(piece + _END)
    kept.append(last)
    return calls, "".join(kept)


def parsed_calls(text: str) -> list[Call]:
    """The calls in a reply, in order; text between the tags that is not a valid call gives a call with an error."""
    calls = []
    for written in split_calls(text)[0]:
        try:
            parsed = json.loads(written)
        except (ValueError, RecursionError) as error:
            calls.append(Call("", {}, f"this is not JSON: {error}"))
            continue
        if not isinstance(parsed, list):
            parsed = [parsed]
        for call in parsed:
            if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
                calls.append(Call("", {}, 'a call is {"name": …, "arguments": {…}}'))
                continue
            arguments = call.get("arguments", call.get("parameters", {}))
            if isinstance(arguments, dict):
                calls.append(Call(call["name"], arguments))
            else:
                calls.append(Call(call["name"], {}, "arguments must be an object"))
    return calls


def openai_calls(text: str, answer: str) -> tuple[str | None, list[dict[str, Any]]]:
    """A reply's content and its tool calls in OpenAI's form, without ids.

    There are calls only if all calls after the reply's thoughts are valid.

    Args:
        text: text of the reply.
        answer: its part after the thoughts.
    """
    calls = parsed_calls(answer)
    if not calls or any(call.error for call in calls):
        return text, []
    written = []
    for call in calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        written.append({"type": "function", "function": {"name": call.name, "arguments": arguments}})
    before, _, after = text.rpartition(answer)
    content = (before + split_calls(answer)[1] + after).rstrip()
    return content or None, written


class Tools(contextlib.AbstractContextManager):
    """Tools by name; a context that holds the worker processes, which start with the first call.

    A call returns the text of an error if it takes longer than `seconds`, kills its worker, raises, or names no known
    tool. Calls run in parallel as long as workers are free.
    """

    def __init__(self, functions: dict[str, Any], workers: int, seconds: float):
        """Reads the schemas of the functions; the first call starts the processes.

        Args:
            functions: functions by import name, module:function. Each has type hints and a docstring that describes it
                and, under Args, its parameters; or an attribute `schema`, its JSON schema.
            workers: number of processes.
            seconds: time limit of one call.
        Raises:
            UserError: a function gives no schema or yields, or two functions have one name.
        """
        self.schemas = [_schema(name, function) for name, function in functions.items()]
        names = [schema["function"]["name"] for schema in self.schemas]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise UserError(
                "task.tools",
                f"two tools have the name {repeated[0]!r}, and the model tells tools apart by their names",
                "rename one",
            )
        self._functions = dict(zip(names, functions.items(), strict=True))
        self._validators = {}  # by the name that the model sees
        for import_name, schema in zip(functions, self.schemas, strict=True):
            self._validators[schema["function"]["name"]] = _validator(import_name, schema)
        self._workers = Workers(workers, seconds)

    def __exit__(self, *exception: object) -> None:
        """Ends the worker processes, even during a call."""
        self._workers.__exit__()

    async def answer(self, call: Call) -> str:
        """Returns a call's result as text: strings unchanged, other values as JSON; or "error: " and the problem."""
        if call.error is not None:
            return f"error: {call.error}"
        if call.name not in self._functions:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self._functions)}"
        import_name, function = self._functions[call.name]
        try:
            inspect.signature(function).bind(**call.arguments)
            problem = self._problem(call)
            if problem:
                return f"error: {problem}"
            return await asyncio.wrap_future(self._workers.call(_called, import_name, call.arguments))
        except (TypeError, CallFailed, UserError, RuntimeError) as error:
            return f"error: {error}"

    def _problem(self, call: Call) -> str | None:
        """How a call's arguments differ from the tool's schema; None if they fit it."""
        import jsonschema  # not at module level: workers import this file

        error = jsonschema.exceptions.best_match(self._validators[call.name].iter_errors(call.arguments))
        if error is None:
            return None
        return f"{error.json_path.removeprefix('$').removeprefix('.')}: {error.message}"[:_MOST_PROBLEM]


def _validator(name: str, schema: Mapping[str, Any]) -> Any:
    """The jsonschema validator of a tool's arguments.

    Raises:
        UserError: the schema of the parameters is no JSON schema.
    """
    import jsonschema  # not at module level: workers import this file

    parameters = _with_null(schema["function"].get("parameters", {}))
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        raise UserError(
            "task.tools", f"{name}: its parameters are no JSON schema ({error.message})", "correct its attribute schema"
        ) from error
    return jsonschema.Draft202012Validator(parameters)


def _with_null(schema: Any) -> Any:
    """A schema in which `nullable: true`, which JSON Schema does not know and transformers writes, allows null."""
    if isinstance(schema, list):
        return [_with_null(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    # A parameter may also have the name nullable; its value is then a schema.
    kept = {key: value for key, value in schema.items() if key != "nullable" or not isinstance(value, bool)}
    converted = {key: _with_null(value) for key, value in kept.items()}
    if schema.get("nullable") is not True:
        return converted
    if isinstance(converted.get("type"), str) and "enum" not in converted:
        return converted | {"type": [converted["type"], "null"]}  # its errors name the type
    return {"anyOf": [converted, {"type": "null"}]}


def _called(import_name: str, arguments: dict[str, Any]) -> str:
    """Runs in a worker: calls a tool and returns its result as text."""
    result = run_to_end(pkgutil.resolve_name(import_name)(**arguments))
    if not isinstance(result, str):
        try:
            result = json.dumps(result, default=str)
        except (TypeError, ValueError, RecursionError):  # unsupported keys, or circular references
            result = str(result)
    return str.encode(result, "utf-8", "replace").decode()[:MOST_CHARACTERS]  # a plain string without lone surrogates


def _schema(name: str, function: Any) -> dict[str, Any]:
    for call in (function, function.__call__):
        if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
            remedy = "write a function, or async def, that returns its result once"
            raise UserError("task.tools", f"{name} yields", remedy)
    schema = getattr(function, "schema", None)
    if schema is None:
        from transformers.utils import get_json_schema  # not at module level: workers import this file

        try:
            schema = get_json_schema(function)
        except Exception as error:
            raise UserError(
                "task.tools",
                f"recjax cannot derive a schema from {name} ({error})",
                "give it type hints and a docstring with Args, or an attribute schema",
            ) from error
    if not isinstance(schema.get("function", {}).get("name"), str):
        form = '{"type": "function", "function": {"name": …, "description": …, "parameters": …}}'
        raise UserError("task.tools", f"{name}: its schema is {schema!r:.200}", f"write it as {form}")
    return schema
