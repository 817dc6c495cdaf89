"""The engine's slots: their state on the host, and their keys and values on the device."""

from collections.abc import Container, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, UInt32

from recjax.models.placement import row_shards
from recjax.rollout import keys_values
from recjax.rollout.decoding import Decoded, SlotState
from recjax.rollout.keys_values import Memory
from recjax.rollout.requests import Request, Sampled, Started


class SlotColumns(NamedTuple):
    """The state of each slot. A free slot (ticket -1) still holds the tokens of its last completion.

    Attributes:
        tickets: ticket of the completion that the slot samples; -1 if it is free.
        lengths, cached, last, counts, limits, keys: see `recjax.rollout.decoding.SlotState`.
        current: True if all keys and values of the slot come from the current weights.
        requests: latest Request of the slot.
        tokens, logprobs, versions: samples of the latest request; only the first `counts` places are valid.
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


class Slots:
    """A number of slots and their memory; a new object has neither."""

    def __init__(self, dtype: DTypeLike | None = None):
        """Creates an object without slots.

        Args:
            dtype: dtype of the memory for new tokens; None: the dtype of the keys and values given.
        """
        self.columns, self.memory, self._dtype = _columns(0), None, dtype

    @property
    def count(self) -> int:
        """The number of slots."""
        return len(self.columns.tickets)

    @property
    def live(self) -> Bool[np.ndarray, " slots"]:
        """True for slots in which a completion is being sampled."""
        return self.columns.tickets >= 0

    @property
    def held(self) -> Int[np.ndarray, " slots"]:
        """Number of tokens in each slot with keys and values from the current weights."""
        return np.where(self.columns.current, self.columns.lengths + self.columns.cached, 0)

    @property
    def time(self) -> int:
        """Tokens behind its prompt that each slot has room for."""
        return keys_values.cache_time(self.memory.later)

    # --- The number of slots, and their room.

    def open_for(self, cache: tuple, lengths: Int[np.ndarray, " prompts"], group_size: int, time: int) -> None:
        """Creates an empty slot for each row of groups of `group_size`; each group reads its one prompt in `cache`."""
        count = len(lengths) * group_size
        self.columns = _columns(count)
        self.columns.lengths[:] = np.repeat(lengths, group_size)
        self.memory = Memory(cache, self._room(cache, count, time))

    def make(self, count: int, cache: tuple, time: int) -> None:
        """Provides at least `count` slots, each with room for its own prompt, as long as the prompts in `cache`."""
        prompt_time = keys_values.cache_time(cache)
        if self.memory is None:
            self.columns = _columns(count)
            prompts = self._room(cache, count, prompt_time)
            self.memory = Memory(prompts, self._room(cache, count, time))
            return
        count = max(count, self.count)
        if count != keys_values.cache_rows(self.memory.prompts):
            self.change_number(count, self.time)
        if prompt_time > keys_values.cache_time(self.memory.prompts):
            self.memory = self.memory._replace(prompts=keys_values.resized(self.memory.prompts, time=prompt_time))

    def _room(self, like: tuple, count: int, time: int) -> tuple:
        return keys_values.empty(like, rows=count, time=time, dtype=self._dtype)

    @property
    def fewest(self) -> int:
        """The number of slots that live slots need if each stays on its device."""
        return int(self.live.reshape(row_shards(), -1).sum(axis=1).max()) * row_shards()

    def change_number(self, count: int, time: int) -> None:
        """Changes the number of slots, keeping live ones; each has its own prompt and room for `time` later tokens.

        Args:
            count: new number, at least `fewest`, so that every live slot stays on its device.
        """
        shards = row_shards()
        own, new = self.live.reshape(shards, -1), np.arange(count // shards)
        _, held = own.shape
        # With fewer slots, a device's live slots come first; with more slots, the order stays.
        places = np.argsort(~own & (count < self.count), axis=1, kind="stable")
        order = (places[:, new % held] + held * np.arange(shards)[:, None]).ravel()
        again = np.tile(new >= held, shards)
        self.columns = SlotColumns(*(column[order] for column in self.columns))
        self.columns.tickets[again], self.columns.current[again] = -1, False
        self.memory = keys_values.gather_slots(self.memory, order.astype(np.int32), time=time)

    def resize(self, time: int) -> None:
        """Changes the room to `time` tokens behind each prompt."""
        if time != self.time:
            self.memory = self.memory._replace(later=keys_values.resized(self.memory.later, time=time))

    def leave_room(self, tokens: int) -> None:
        """Drops the last tokens of free slots that leave less room than `tokens`, as a round overwrites this room."""
        free = ~self.live
        self.columns.cached[free] = np.minimum(self.columns.cached[free], self.time - tokens)

    # --- Filling slots.

    def put(
        self,
        started: Started,
        cache: tuple,
        prompts: Int[np.ndarray, " requests"],
        lengths: Int[np.ndarray, " requests"],
        current: bool,
    ) -> int:
        """Puts completions with their prompts, rows of `cache`, into free slots; returns how many found a slot."""
        free = np.flatnonzero(~self.live)
        # Slots with the fewest useful tokens are reused first.
        free = free[np.argsort(self.held[free], kind="stable")][: len(prompts)]
        if not len(free):
            return 0
        places = np.zeros((2, self.count), np.int32)
        places[:, : len(free)] = free, prompts[: len(free)]
        self.memory = keys_values.put_prompts(self.memory, cache, places, np.int32(len(free)))
        self.columns.lengths[free], self.columns.cached[free] = lengths[: len(free)], 0
        self.begin(free, started.part(np.arange(len(free))), current)
        return len(free)

    def begin(self, places: Int[np.ndarray, " requests"], started: Started, current: bool) -> None:
        """Writes completions with their first tokens into the columns of slots.

        Args:
            current: True if their prefixes were run with the current weights.
        """
        self.make_room(1)
        columns, (requests, tickets, tokens, logprobs, version) = self.columns, started
        columns.tickets[places], columns.last[places], columns.counts[places] = tickets, tokens, 1
        columns.limits[places] = [request.limit for request in requests]
        columns.keys[places] = [request.key for request in requests]
        columns.tokens[places, 0], columns.logprobs[places, 0] = tokens, logprobs
        columns.versions[places, 0], columns.current[places] = version, current
        for place, request in zip(places, requests, strict=True):
            columns.requests[place] = request

    def make_room(self, tokens: int) -> None:
        """Extends the columns to at least `tokens` sampled tokens per slot."""
        columns = self.columns
        if (missing := tokens - columns.tokens.shape[1]) > 0:
            padding = ((0, 0), (0, max(missing, columns.tokens.shape[1])))
            sampled = (columns.tokens, columns.logprobs, columns.versions)
            tokens, logprobs, versions = (np.pad(column, padding) for column in sampled)
            self.columns = columns._replace(tokens=tokens, logprobs=logprobs, versions=versions)

    # --- Sampling in slots.

    def rows(self, live: Bool[np.ndarray, " slots"]) -> SlotState:
        """Copies of the columns for a round in which the slots in `live` sample.

        On a CPU, a program reads the host's array in place. Without copies, a slow device could read values of a later
        round.
        """
        columns = self.columns
        known = columns.lengths, columns.cached, columns.last, columns.counts, columns.limits, columns.keys
        return SlotState(live, *(column.copy() for column in known))

    def record(self, mine: Bool[np.ndarray, " slots"], state: Decoded, version: int) -> None:
        """Adds a round's tokens to the columns of the slots that sampled them."""
        columns, counts = self.columns, np.where(mine, state.counts, 0)
        slot, time = np.nonzero(np.arange(state.tokens.shape[1]) < counts[:, None])
        places = slot, columns.counts[slot] + time
        columns.tokens[places], columns.logprobs[places] = state.tokens[slot, time], state.logprobs[slot, time]
        columns.versions[places] = version
        columns.counts[:] += counts
        columns.cached[:] += counts
        columns.last[mine] = state.last[mine]

    def free(self, tickets: Container[int]) -> None:
        """Frees the slots of the given tickets."""
        self.columns.tickets[[ticket in tickets for ticket in self.columns.tickets.tolist()]] = -1

    def so_far(self, tickets: Container[int]) -> dict[int, Sampled]:
        """Tokens that live slots have sampled so far, by ticket."""
        slots = [slot for slot in np.flatnonzero(self.live) if self.columns.tickets[slot] in tickets]
        return {int(self.columns.tickets[slot]): Sampled(*self._sampled(slot), truncated=True) for slot in slots}

    def _sampled(self, slot: int | np.integer) -> list[np.ndarray]:
        """Copies of a slot's tokens, their log-probs and versions."""
        columns = self.columns
        return [column[slot, : columns.counts[slot]].copy() for column in columns[-3:]]

    def finish(self, ended: Int[np.ndarray, " some"], stop_ids: tuple[int, ...]) -> dict[int, Sampled]:
        """Frees slots and returns their completions by ticket."""
        finished, columns = {}, self.columns
        for slot in ended:
            tokens, logprobs, versions = self._sampled(slot)
            done = Sampled(tokens, logprobs, versions, bool(tokens[-1] not in stop_ids))
            finished[int(columns.tickets[slot])] = done
        columns.tickets[ended] = -1
        return finished

    def continuations(self, requests: Sequence[Request]) -> dict[int, int]:
        """Maps places of requests to free slots that hold the longest beginning of the request's prefix."""
        columns, lengths, held = self.columns, self.held, {}
        for slot in np.flatnonzero(~self.live & columns.current):
            tokens = np.concatenate([columns.requests[slot].prefix, columns.tokens[slot, : columns.counts[slot]]])
            held.setdefault(tokens[: lengths[slot]].tobytes(), []).append(int(slot))
        sizes, found = sorted({len(tokens) for tokens in held}, reverse=True), {}
        for place, request in enumerate(requests):
            prefix = request.prefix.tobytes()
            for size in sizes:
                if size < len(prefix) and held.get(prefix[:size]):
                    found[place] = held[prefix[:size]].pop(0)
                    break
        return found


def _columns(count: int) -> SlotColumns:
    """Columns of empty slots."""
    room = np.zeros((count, 0), np.int32)
    return SlotColumns(
        *(np.full(count, value, np.int32) for value in (-1, 1, 0, 0, 0, 0)),
        keys=np.zeros((count, jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).size), np.uint32),
        current=np.zeros(count, bool),
        requests=np.full(count, None),
        tokens=room,
        logprobs=room.astype(np.float32),
        versions=room.copy(),
    )
