"""Which completions of a followed store were taken from it: what a checkpoint holds, so that none is taken twice."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Followed(NamedTuple):
    """A completion is known by its id, which no other of the store has; a trajectory by that of its first row.

    ids: of completions that were taken, in parts of which others have not been.
    parts: ids of the first rows of parts that are taken whole.
    unrewarded: ids that were taken at the deadline, without a reward.
    """

    ids: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    unrewarded: frozenset[str] = frozenset()

    def has(self, part: str, completion: str) -> bool:
        """Whether a completion of the part that begins with a row of the id `part` was taken."""
        return completion in self.ids or part in self.parts

    def with_taken(self, ids: Iterable[str], unrewarded: Iterable[str] = ()) -> "Followed":
        """The same, with further completions, and those among them that have no reward."""
        return self._replace(ids=self.ids | {*ids}, unrewarded=self.unrewarded | {*unrewarded})

    def compacted(self, parts: Mapping[str, Iterable[str]]) -> "Followed":
        """The same in fewer words: a part of which all is taken is named by its first row.

        Args:
            parts: ids of the completions of each part, by the id of its first row.
        """
        whole = {first: {*ids} for first, ids in parts.items() if ids and self.ids.issuperset(ids)}
        return self._replace(ids=self.ids.difference(*whole.values()), parts=self.parts | whole.keys())


def to_plain(followed: Followed) -> dict[str, Any]:
    """As JSON holds it; `from_plain` makes it again."""
    return {name: sorted(ids) for name, ids in followed._asdict().items()}


def from_plain(plain: Mapping[str, Any]) -> Followed:
    """What `to_plain` took apart."""
    return Followed(**{name: frozenset(ids) for name, ids in plain.items()})
