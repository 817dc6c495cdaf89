"""What the engine's slots hold, on the host."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from recjax.models.logprobs import Sampling
from recjax.rollout.decoding import Rows


class Request(NamedTuple):
    """A completion to sample.

    Attributes:
        prefix: the tokens that it follows, at least one.
        key: key data; token t, from 0, is sampled with fold_in(key, t).
        limit: most tokens of the completion, end-of-sequence token included.
        sampling: the distribution.
    """

    prefix: Int[np.ndarray, " prefix_time"]
    key: UInt32[np.ndarray, " words"]
    limit: int
    sampling: Sampling


class Sampled(NamedTuple):
    """A completion.

    Attributes:
        tokens: the end-of-sequence token among them.
        logprobs: of each token, under the distribution that sampled it.
        versions: the policy version whose weights sampled each token.
        truncated: whether it ran into its limit before it ended.
    """

    tokens: Int[np.ndarray, " time"]
    logprobs: Float[np.ndarray, " time"]
    versions: Int[np.ndarray, " time"]
    truncated: bool


class Slots(NamedTuple):
    """Columns over slots. A free slot (ticket -1) still holds the tokens that it was at last.

    Attributes:
        tickets: the completion that is sampled in each; -1: none.
        lengths, cached, last, counts, limits, keys: as in `recjax.rollout.decoding.Rows`.
        current: all keys and values of the slot are of the current weights.
        requests: the newest Request of each slot.
        tokens, logprobs, versions: what was sampled for it; the first `counts` places count.
    """

    tickets: Int[np.ndarray, " slots"]
    lengths: Int[np.ndarray, " slots"]
    cached: Int[np.ndarray, " slots"]
    last: Int[np.ndarray, " slots"]
    counts: Int[np.ndarray, " slots"]
    limits: Int[np.ndarray, " slots"]
    keys: UInt32[np.ndarray, "slots words"]
    current: Bool[np.ndarray, " slots"]
    requests: np.ndarray
    tokens: Int[np.ndarray, "slots room"]
    logprobs: Float[np.ndarray, "slots room"]
    versions: Int[np.ndarray, "slots room"]

    @property
    def live(self) -> Bool[np.ndarray, " slots"]:
        """Slots that a completion is sampled in."""
        return self.tickets >= 0

    def rows(self, live: Bool[np.ndarray, " slots"]) -> Rows:
        """What a round must know, with the slots that sample in it."""
        return Rows(live, self.lengths, self.cached, self.last, self.counts, self.limits, self.keys)

    def held(self, slot: int) -> Int[np.ndarray, " held"]:
        """The tokens whose keys and values a slot has."""
        tokens = [self.requests[slot].prefix, self.tokens[slot, : self.counts[slot]]]
        return np.concatenate(tokens)[: self.lengths[slot] + self.cached[slot]]

    def completion(self, slot: int, stop_ids: tuple[int, ...]) -> Sampled:
        """What was sampled for a slot's request."""
        columns = (column[slot, : self.counts[slot]].copy() for column in (self.tokens, self.logprobs, self.versions))
        tokens, logprobs, versions = columns
        return Sampled(tokens, logprobs, versions, bool(tokens[-1] not in stop_ids))


def free_slots(count: int) -> Slots:
    """So many slots that hold nothing."""
    words = _key_words()
    numbers, flags = np.zeros(count, np.int32), np.zeros(count, bool)
    room = np.zeros((count, 0), np.int32)
    return Slots(
        tickets=numbers - 1,
        lengths=numbers + 1,
        cached=numbers.copy(),
        last=numbers.copy(),
        counts=numbers.copy(),
        limits=numbers.copy(),
        keys=np.zeros((count, words), np.uint32),
        current=flags,
        requests=np.full(count, None),
        tokens=room,
        logprobs=room.astype(np.float32),
        versions=room.copy(),
    )


@functools.cache
def _key_words() -> int:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).size


def taken(slots: Slots, order: Int[np.ndarray, " slots"]) -> Slots:
    """The slots that `order` names."""
    return Slots(*(column[order] for column in slots))


def with_room(slots: Slots, tokens: int) -> Slots:
    """The slots with room for at least so many sampled tokens each."""
    if (missing := tokens - slots.tokens.shape[1]) <= 0:
        return slots
    missing = max(missing, slots.tokens.shape[1])
    columns = (slots.tokens, slots.logprobs, slots.versions)
    tokens, logprobs, versions = (np.pad(column, ((0, 0), (0, missing))) for column in columns)
    return slots._replace(tokens=tokens, logprobs=logprobs, versions=versions)


def continuations(slots: Slots, requests: Sequence[Request]) -> dict[int, int]:
    """Free slots that hold a beginning of a request's prefix, the longest there is: place of the request to slot."""
    held: dict[bytes, list[int]] = {}
    for slot in np.flatnonzero(~slots.live & slots.current):
        held.setdefault(slots.held(slot).tobytes(), []).append(int(slot))
    sizes, found = sorted({len(tokens) for tokens in held}, reverse=True), {}
    for place, request in enumerate(requests):
        prefix = request.prefix.tobytes()
        for size in sizes:
            if size < len(prefix) and held.get(prefix[:size]):
                found[place] = held[prefix[:size]].pop(0)
                break
    return found
