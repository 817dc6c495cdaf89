"""The error that is a user's mistake; every other exception is a fault of recjax, or of a package that it uses."""

import os
from typing import Any


class UserError(ValueError):
    """A mistake in the user's input: a config, a flag, a file, a program or an argument.

    Commands print its text in one line, without a traceback. The text consists of the fields that are given:
    `WHERE = VALUE: PROBLEM; REMEDY`.

    Args:
        where: key, argument or flag, or file with the row; its container comes first, as in "data.jsonl: line 3".
        problem: the mistake.
        remedy: the user's next step.
        value: the wrong value; `...` if the text should show none.

    Examples:
        >>> raise UserError("rollout.group_size", "must be 1 or more", "set it to 8", value=0)
        Traceback (most recent call last):
            ...
        recjax.errors.UserError: rollout.group_size = 0: must be 1 or more; set it to 8
        >>> print(UserError("data.jsonl: line 3", "is empty", "remove it"))
        data.jsonl: line 3: is empty; remove it
    """

    def __init__(self, where: str | os.PathLike = "", problem: str = "", remedy: str = "", value: Any = ...):
        super().__init__(str(where), problem, remedy, value)  # pickle makes the error again from these arguments
        self.where = str(where)
        self.problem = problem
        self.remedy = remedy
        self.value = value

    def __str__(self) -> str:
        place = self.where
        if self.value is not ...:
            place = f"{place} = {shown(self.value)}"
        text = "; ".join(part for part in (self.problem, self.remedy) if part)
        return ": ".join(part for part in (place, text) if part)

    def within(self, place: str | os.PathLike) -> "UserError":
        """The same mistake in its container, which the text names first.

        Examples:
            >>> print(UserError("line 3", "is empty").within("data.jsonl"))
            data.jsonl: line 3: is empty
        """
        where = f"{place}: {self.where}" if self.where else place
        return UserError(where, self.problem, self.remedy, self.value)


def shown(value: Any, longest: int = 300) -> str:
    """A user's value in an error message: its `repr`, cut, or its type if `repr` raises.

    Examples:
        >>> shown([1, 2, 3], 5)
        '[1, 2'
    """
    try:
        return repr(value)[:longest]
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"
