"""Parameters of tests that run with the slow tests only."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> list:
    """Values of one parameter that only the slow set tests."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_except(values: Iterable, *quick: Any) -> list:
    """The values of one parameter in their order; only the slow set tests the values that are not in `quick`."""
    values = list(values)
    if unknown := [value for value in quick if value not in values]:
        raise ValueError(f"{unknown}: not among {values}; name values that there are")
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
