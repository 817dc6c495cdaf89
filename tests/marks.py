"""The sets of tests, and parameters that only the slow set or only the campaign tests."""

from collections.abc import Iterable
from typing import Any

import pytest

SETS = pytest.StashKey[dict[str, str]]()  # in pytest's config: the set of each collected test, by its id


def set_of(item: pytest.Item) -> str:
    """The set of a test: campaign, slow or quick. A test that has both markers is of the campaign."""
    return next((name for name in ("campaign", "slow") if item.get_closest_marker(name)), "quick")


def slow(*values: Any) -> list:
    """Values of one parameter that only the slow set tests."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def campaign(*values: Any) -> list:
    """Values of one parameter that only the campaign tests."""
    return [pytest.param(value, marks=pytest.mark.campaign) for value in values]


def slow_except(values: Iterable, *quick: Any) -> list:
    """The values of one parameter in their order; only the slow set tests the values that are not in `quick`."""
    return _marked_except(pytest.mark.slow, list(values), quick)


def campaign_except(values: Iterable, *quick: Any, slow: Iterable = ()) -> list:
    """The values of one parameter in their order; only the campaign tests the values that are in neither set.

    Args:
        quick: the values that carry no marker of their own.
        slow: the values for the slow set.
    """
    values = list(values)
    slow = [value for value in slow if value not in quick]
    marked = _marked_except(pytest.mark.campaign, values, [*quick, *slow])
    return [
        pytest.param(value, marks=pytest.mark.slow) if value in slow else mark
        for value, mark in zip(values, marked, strict=True)
    ]


def _marked_except(marker, values: list, bare: Iterable) -> list:
    if unknown := [value for value in bare if value not in values]:
        raise ValueError(f"{unknown}: not among {values}; name values that there are")
    return [value if value in bare else pytest.param(value, marks=marker) for value in values]
