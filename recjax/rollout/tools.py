"""Functions that a model may call, run in worker processes: a crash or a hang fails only its own call."""

import asyncio
import contextlib
import inspect
import itertools
import pickle
import threading
from concurrent.futures import Future
from typing import Any

from transformers.utils import get_json_schema

from recjax.tasks.grading import processes


class Tools:
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
            ValueError: a function gives no schema or yields, or two functions have one name.
        """
        self.schemas = [_schema(name, function) for name, function in functions.items()]
        names = [schema["function"]["name"] for schema in self.schemas]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"task.tools: two tools are called {repeated[0]!r}; the model tells them by name")
        self._functions = dict(zip(names, functions.items(), strict=True))
        self._limits, self._server = (workers, seconds), None
        self._numbers, self._calls = itertools.count(), {}

    def __enter__(self) -> "Tools":
        """Returns itself; the first call starts the processes."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the worker processes, even during a call."""
        if self._server:
            processes.end(self._server)
            self._server = None

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Returns a call's result as text: strings unchanged, other values as JSON; or "error: " and the problem."""
        if name not in self._functions:
            return f"error: there is no tool {name!r}; there are {', '.join(self._functions)}"
        place, function = self._functions[name]
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return f"error: {error}"
        try:
            return await asyncio.wrap_future(self._asked(place, arguments))
        except RuntimeError as error:
            return f"error: {error}"

    def _asked(self, place: str, arguments: dict[str, Any]) -> "Future[Any]":
        if self._server is None:
            self._start()
        number, future = next(self._numbers), Future()
        self._calls[number] = future
        try:
            pickle.dump((number, place, arguments), self._server.stdin)
            self._server.stdin.flush()
        except OSError:
            self._calls.pop(number, None)
            raise RuntimeError("the process of the tools has ended by itself") from None
        return future

    def _start(self) -> None:
        self._server = processes.start("recjax.tasks.grading.tool_server", *self._limits)
        threading.Thread(target=self._read, args=(self._server.stdout,), name="tools", daemon=True).start()

    def _read(self, stream: Any) -> None:
        """Hands results to waiting calls, in a thread."""
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                number, outcome = pickle.load(stream)
                future = self._calls.pop(number)
                if future.set_running_or_notify_cancel():
                    future.set_result(outcome)
        for number in list(self._calls):
            future = self._calls.pop(number)
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError("the process of the tools has ended by itself"))


def _schema(name: str, function: Any) -> dict[str, Any]:
    if any(
        inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (function, function.__call__)
    ):
        raise ValueError(f"task.tools: {name} yields; write a function, or async def, that returns its result once")
    schema = getattr(function, "schema", None)
    if schema is None:
        try:
            schema = get_json_schema(function)
        except Exception as error:
            remedy = "give it type hints and a docstring with Args, or an attribute schema"
            raise ValueError(f"task.tools: {name}: no schema comes of it ({error}); {remedy}") from error
    if not isinstance(schema.get("function", {}).get("name"), str):
        form = '{"type": "function", "function": {"name": …, "description": …, "parameters": …}}'
        raise ValueError(f"task.tools: {name}: its schema is {schema!r:.200}; write it as {form}")
    return schema
