"""Record of the completions already taken from a followed store; checkpoints save it so that none is taken twice."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Followed(NamedTuple):
    """The completions taken from a store, identified by their unique ids; a trajectory has the id of its first row.

    ids: ids of completions taken from part files that also contain completions not taken yet.
    parts: part files with all completions taken, each identified by the id of its first row.
    unrewarded: ids of completions that reached the deadline without a reward.
    """

    ids: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    unrewarded: frozenset[str] = frozenset()

    def has(self, part: str, completion: str) -> bool:
        """True if a completion was taken; `part` is the id of the first row in its part file."""
        return completion in self.ids or part in self.parts

    def with_taken(self, ids: Iterable[str], unrewarded: Iterable[str] = ()) -> "Followed":
        """Adds completions that were taken, and the ids among them that have no reward."""
        return self._replace(ids=self.ids | {*ids}, unrewarded=self.unrewarded | {*unrewarded})

    def compacted(self, parts: Mapping[str, Iterable[str]]) -> "Followed":
        """Makes the record smaller: replaces the ids in a completely taken part by the id of the part's first row.

        Args:
            parts: ids of each part's completions, by the id of the part's first row.
        """
        whole = {first: {*ids} for first, ids in parts.items() if ids and self.ids.issuperset(ids)}
        return self._replace(ids=self.ids.difference(*whole.values()), parts=self.parts | whole.keys())

    def to_json(self) -> dict[str, Any]:
        """Converts the record to JSON data; `from_json` is the inverse."""
        return {name: sorted(ids) for name, ids in self._asdict().items()}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Followed":
        """Converts the JSON data of `to_json` back."""
        return cls(**{name: frozenset(ids) for name, ids in plain.items()})
