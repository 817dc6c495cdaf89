"""Reads a JSON object key by key: checks each value, and refuses keys that no code has read."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from recjax.serving.refusals import Refused


class Fields:
    """The keys of a request. A null value counts as a missing key."""

    def __init__(self, values: Any):
        """Takes the parsed body.

        Raises:
            Refused: the body is not an object.
        """
        if not isinstance(values, Mapping):
            kind = "null" if values is None else f"a {type(values).__name__}"
            raise Refused(400, f"the body is {kind}; send a JSON object")
        self._values, self._read = values, set()

    def take(self, name: str, default: Any, fits: Callable[[Any], bool], takes: str) -> Any:
        """A key's value, or the default.

        Args:
            takes: description of valid values.
        Raises:
            Refused: the value is invalid.
        """
        self._read.add(name)
        value = self._values.get(name)
        if value is None:
            return default
        if not fits(value):
            raise Refused(400, f"{name} = {value!r:.100}: takes {takes}", param=name)
        return value

    def whole(self, name: str, default: int | None, low: int, high: int) -> int | None:
        """A whole number."""

        def fits(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

        return self.take(name, default, fits, f"a whole number from {low} to {high}")

    def number(self, name: str, default: float | None, fits: Callable[[float], bool], takes: str) -> float | None:
        """A finite number."""

        def is_one(value: Any) -> bool:
            real = isinstance(value, int | float) and not isinstance(value, bool)
            return real and abs(value) < 1e300 and math.isfinite(value) and fits(value)

        value = self.take(name, default, is_one, takes)
        return value if value is None else float(value)

    def flag(self, name: str) -> bool:
        """A boolean; False if the key is missing."""
        return self.take(name, False, lambda value: isinstance(value, bool), "true or false")

    def text(self, name: str, most: int) -> str | None:
        """Text of at most `most` characters."""
        fits = lambda value: isinstance(value, str) and len(value) <= most  # noqa: E731
        return self.take(name, None, fits, f"text of at most {most} characters")

    def neutral(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Accepts keys that recjax does not support, but only at values with no effect."""
        for name, values in neutral.items():
            shown = " or ".join(map(repr, values)) or "null"
            self.take(name, None, lambda value, values=values: value in values, f"only {shown}")

    def finish(self) -> None:
        """Refuses keys that were not read."""
        if unknown := sorted(map(str, self._values.keys() - self._read)):
            raise Refused(400, f"{unknown[0]!r:.100}: unknown key; remove it", param=unknown[0])
