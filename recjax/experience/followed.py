"""Record of the completions already taken from a followed store; checkpoints save it so that none is taken twice."""

import bisect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Followed(NamedTuple):
    """The completions taken from a store, by their numbers.

    ranges: first number and end of each range of taken completions, in ascending order.
    unrewarded: numbers of completions that reached the deadline without a reward.
    store: identity of the store; empty before the first completion.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    unrewarded: frozenset[int] = frozenset()
    store: str = ""

    def has(self, number: int) -> bool:
        """True if a completion was taken."""
        place = bisect.bisect_right(self.ranges, number, key=lambda one: one[0])
        return place > 0 and number < self.ranges[place - 1][1]

    def with_taken(self, numbers: Iterable[int], unrewarded: Iterable[int] = ()) -> "Followed":
        """Adds completions that were taken, and the numbers among them that have no reward.

        Examples:
            >>> Followed().with_taken([1, 2, 5]).with_taken([3, 6]).ranges
            ((1, 4), (5, 7))
        """
        ranges: list[tuple[int, int]] = []
        for start, end in sorted([*self.ranges, *((number, number + 1) for number in numbers)]):
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
            else:
                ranges.append((start, end))
        return self._replace(ranges=tuple(ranges), unrewarded=self.unrewarded | {*unrewarded})

    def gaps(self, last: int) -> Iterator[tuple[int, int]]:
        """Yields the ranges up to the number `last` that were not taken: the number before each, and its last number.

        Examples:
            >>> list(Followed(((1, 4), (5, 7))).gaps(9))
            [(3, 4), (6, 9)]
        """
        before = 0
        for start, end in self.ranges:
            if start - 1 > before:
                yield before, start - 1
            before = end - 1
        if last > before:
            yield before, last

    def to_json(self) -> dict[str, Any]:
        """Converts the record to JSON data; `from_json` is the inverse."""
        return self._replace(unrewarded=sorted(self.unrewarded))._asdict()

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Followed":
        """Converts the JSON data of `to_json` back."""
        ranges, unrewarded = map(tuple, plain.get("ranges", ())), frozenset(plain.get("unrewarded", ()))
        return cls(tuple(ranges), unrewarded, plain.get("store", ""))
