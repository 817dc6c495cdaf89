"""The engine's slots: a table on the host with the state of each slot, and the slots' memory on the device."""

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Bool, Int, UInt32

from recjax.models.layer import Cache, KeysValues
from recjax.models.placement import row_shards
from recjax.rollout import keys_values
from recjax.rollout.decoding import SlotContents, SlotState
from recjax.rollout.keys_values import Memory
from recjax.rollout.requests import EngineJob, Prefilled, Round, Sampled, completions_of


class SlotTable(NamedTuple):
    """The state of each slot. A free slot still contains the tokens of its last completion.

    Attributes:
        live: True while the slot samples a completion; the slot is free otherwise.
        jobs: latest EngineJob of the slot.
        lengths, cached, last, counts, limits, keys: see `recjax.rollout.decoding.SlotState`.
        is_current: True if all keys and values of the slot come from the current weights.
    """

    live: Bool[np.ndarray, " slots"]
    jobs: np.ndarray
    lengths: Int[np.ndarray, " slots"]
    cached: Int[np.ndarray, " slots"]
    last: Int[np.ndarray, " slots"]
    counts: Int[np.ndarray, " slots"]
    limits: Int[np.ndarray, " slots"]
    keys: UInt32[np.ndarray, "slots words"]
    is_current: Bool[np.ndarray, " slots"]


class Slots:
    """A number of slots and their memory; a new object has neither.

    Attributes:
        table: the state of each slot.
        memory: the slots' keys, values and states on the device; None without slots.
    """

    def __init__(self, dtype: DTypeLike | None = None):
        """Creates an object without slots.

        Args:
            dtype: dtype of the memory for new tokens; None: the dtype of the keys and values given.
        """
        self.table = _free_slots(0)
        self.memory: Memory | None = None
        self._dtype = dtype

    @property
    def count(self) -> int:
        """The number of slots."""
        return len(self.table.live)

    @property
    def live(self) -> Bool[np.ndarray, " slots"]:
        """True for slots in which a completion is being sampled."""
        return self.table.live

    @property
    def jobs(self) -> np.ndarray:
        """The jobs of live slots, in the order of the slots."""
        return self.table.jobs[self.table.live]

    @property
    def reusable(self) -> Int[np.ndarray, " slots"]:
        """Number of tokens in each slot that a request may continue: those run by the current weights."""
        table = self.table
        return np.where(table.is_current, table.lengths + table.cached, 0)

    @property
    def capacity(self) -> int:
        """Tokens that each slot can store after its prompt."""
        assert self.memory is not None
        return keys_values.cache_time(self.memory.later)

    # --- The number of slots, and their capacity.

    @property
    def fewest(self) -> int:
        """The number of slots that live slots need if each stays on its device."""
        shards = row_shards()
        live_on_device = self.live.reshape(shards, -1).sum(axis=1)
        return int(live_on_device.max()) * shards

    def change_count(self, count: int, capacity: int) -> None:
        """Changes the number of slots, keeping live ones; each then has its own copy of its prompt.

        Args:
            count: new number, at least `fewest`, so that every live slot stays on its device.
            capacity: tokens that each slot can store after its prompt.
        """
        # [devices, slots of a device]: slots are numbered device after device.
        shards = row_shards()
        old_numbers = np.arange(self.count).reshape(shards, -1)
        if count < self.count:  # a device's live slots come first, so that only free ones are dropped
            is_free = ~self.live.reshape(shards, -1)
            live_first = np.argsort(is_free, axis=1, kind="stable")
            old_numbers = np.take_along_axis(old_numbers, live_first, axis=1)
        old_share = old_numbers.shape[1]
        new_slots = np.arange(count // shards)
        # A new slot begins as a copy of an old one, but free.
        order = old_numbers[:, new_slots % old_share].ravel()
        is_added = np.tile(new_slots >= old_share, shards)
        self.table = SlotTable._make(column[order] for column in self.table)
        self.table.live[is_added] = False
        self.table.is_current[is_added] = False
        self.memory = keys_values.gather_slots(self.memory, order.astype(np.int32), time=capacity)

    def change_capacity(self, capacity: int) -> None:
        """Changes the number of tokens that each slot can store after its prompt."""
        assert self.memory is not None
        if capacity != self.capacity:
            later = keys_values.resized(self.memory.later, time=capacity)
            self.memory = self.memory._replace(later=later)

    def make_space(self, tokens: int) -> None:
        """Drops the last tokens of free slots without space for `tokens` more; a round overwrites this space."""
        self._shorten(~self.live, max(self.capacity - tokens, 0))

    def _shorten(self, slots: Bool[np.ndarray, " slots"], longest: int) -> None:
        """Keeps at most `longest` tokens after the prompts of slots."""
        table = self.table
        is_longer = slots & (table.cached > longest)
        table.cached[is_longer] = longest
        assert self.memory is not None
        if self.memory.states:  # the state after the kept tokens is not known
            table.is_current[is_longer] = False

    # --- Filling slots.

    def assign(self, prefilled: Prefilled, count: int, capacity: int) -> int:
        """Assigns free slots to completions with their first token; returns how many completions got a slot.

        Args:
            count: number of slots to provide.
            capacity: tokens that each slot can store after its prompt, if the engine has no slots yet.
        """
        jobs = prefilled.jobs
        cache = prefilled.cache
        group_size = prefilled.group_size
        if prefilled.continues:
            # The new tokens follow the tokens that the completions' slots already contain.
            slots = np.array([job.continued_slot for job in jobs], int)
            rows = [job.prefilled_row for job in jobs]
            self._copy("later", cache.keys_values, slots, rows, self.table.cached[slots])
            self.table.cached[slots] += prefilled.lengths[rows]
        elif self.memory is None and group_size and count == len(prefilled.lengths) * group_size:
            # With a slot for every completion, each group reads a single copy of its prompt.
            slots = np.array([job.batch_index for job in jobs], int)
            self.table = _free_slots(count)
            self.table.lengths[:] = np.repeat(prefilled.lengths, group_size)
            later = self._empty(cache.keys_values, count, capacity)
            self.memory = Memory(cache.keys_values, later, _empty_states(cache, count))
        else:
            self._provide(cache, count, capacity)
            free = np.flatnonzero(~self.live)
            # Slots with the fewest useful tokens are reused first.
            free = free[np.argsort(self.reusable[free], kind="stable")]
            slots = free[: len(jobs)]
            jobs = jobs[: len(slots)]
            rows = [job.prefilled_row for job in jobs]
            self._copy("prompts", cache.keys_values, slots, rows, tokens=0)
            self.table.lengths[slots] = prefilled.lengths[rows]
            self.table.cached[slots] = 0
        if cache.states:
            rows = [job.prefilled_row for job in jobs]
            self._copy("states", cache.states, slots, rows, tokens=0)
        table = self.table
        table.live[slots] = True
        table.is_current[slots] = prefilled.has_current_weights
        table.counts[slots] = 1
        table.jobs[slots] = np.fromiter(jobs, object, len(jobs))  # without a look into the jobs, unlike np.array
        table.last[slots] = [job.first_token for job in jobs]
        table.limits[slots] = [job.request.limit for job in jobs]
        key_words = table.keys.shape[1]
        table.keys[slots] = np.array([job.request.key for job in jobs]).reshape(-1, key_words)  # also without jobs
        return len(jobs)

    def _provide(self, cache: Cache, count: int, capacity: int) -> None:
        """Provides at least `count` slots, each with space for its own prompt, as long as the prompts in `cache`."""
        prompt_time = keys_values.cache_time(cache.keys_values)
        if self.memory is None:
            self.table = _free_slots(count)
            prompts = self._empty(cache.keys_values, count, prompt_time)
            later = self._empty(cache.keys_values, count, capacity)
            self.memory = Memory(prompts, later, _empty_states(cache, count))
        count = max(count, self.count)
        if count != keys_values.cache_rows(self.memory.prompts):
            self.change_count(count, self.capacity)
        if prompt_time > keys_values.cache_time(self.memory.prompts):
            prompts = keys_values.resized(self.memory.prompts, time=prompt_time)
            self.memory = self.memory._replace(prompts=prompts)

    def _empty(self, like: KeysValues, count: int, time: int) -> KeysValues:
        return keys_values.empty(like, rows=count, time=time, dtype=self._dtype)

    def _copy(
        self, part: str, new: Any, slots: np.ndarray, rows: list[int], tokens: Int[np.ndarray, " some"] | int
    ) -> None:
        """Copies rows of new keys, values or states into a part of the memory of slots.

        Args:
            part: name of a field of `Memory`.
            rows: for each of `slots`, the row of `new` that it gets.
            tokens: number of tokens that the part already holds in each slot; the new ones follow.
        """
        if not rows:
            return
        assert self.memory is not None
        # In as many columns as there are slots, so that any number of rows uses one compiled program.
        copies = len(rows)
        places = np.zeros((3, self.count), np.int32)
        places[0, :copies] = slots
        places[1, :copies] = rows
        places[2, :copies] = tokens
        old = getattr(self.memory, part)
        copied = keys_values.put_started(old, new, places, np.int32(copies))
        self.memory = self.memory._replace(**{part: copied})

    # --- Sampling in slots.

    def contents(self, slots: Int[np.ndarray, " rows"]) -> SlotContents:
        """The contents of some slots, for tokens that continue them."""
        assert self.memory is not None
        return SlotContents(self.memory, slots, self.table.lengths[slots], self.table.cached[slots])

    def round_state(self, live: Bool[np.ndarray, " slots"]) -> SlotState:
        """The state from which a round starts in which the slots in `live` sample.

        On a CPU, a program reads the host's array in place. Without copies, a slow device could read values of a later
        round.
        """
        table = self.table
        return SlotState(
            live,
            lengths=table.lengths.copy(),
            cached=table.cached.copy(),
            last=table.last.copy(),
            counts=table.counts.copy(),
            limits=table.limits.copy(),
            keys=table.keys.copy(),
        )

    def record(self, sampling: Bool[np.ndarray, " slots"], state: Any, version: int) -> None:
        """Adds a round's tokens to the slots that sampled in it.

        Args:
            state: the `Decoded` of the round, as host arrays.
        """
        table = self.table
        counts = np.where(sampling, state.counts, 0)
        versions = np.full(state.tokens.shape[1], version, np.int32)
        slots = np.flatnonzero(sampling)
        for slot, count in zip(slots.tolist(), counts[slots].tolist(), strict=True):
            row = (slot, slice(count))
            # Most models record nothing: an empty dictionary for each slot would be work for the garbage collector.
            recorded = state.recorded
            if recorded:
                recorded = {name: values[row] for name, values in recorded.items()}
            sampled = Round(state.tokens[row], state.logprobs[row], versions[:count], recorded)
            table.jobs[slot].rounds.append(sampled)
        table.counts[:] += counts
        table.cached[:] += counts
        self._shorten(sampling, self.capacity)
        table.last[sampling] = state.last[sampling]

    def free(self, tickets: Container[int]) -> None:
        """Frees the slots of the given tickets."""
        stays_live = [job.ticket not in tickets for job in self.jobs]
        self.table.live[self.live] = stays_live

    def finish(self, ended: Int[np.ndarray, " some"], stop_ids: tuple[int, ...]) -> dict[int, Sampled]:
        """Frees slots and returns their completions by ticket."""
        jobs = self.table.jobs[ended].tolist()
        finished = completions_of(jobs, stop_ids)
        for job in jobs:
            # Free slots still need the tokens, and their recorded arrays would take memory.
            done = finished[job.ticket]
            job.rounds = [Round(done.tokens, done.logprobs, done.versions, {})]
        self.table.live[ended] = False
        return finished

    def find_continued(self, jobs: Sequence[EngineJob]) -> None:
        """Gives each job the free slot, if any, that contains the longest beginning of the job's prefix."""
        table = self.table
        reusable = self.reusable
        # Tokens as bytes, which are hashed and compared at once.
        slots_by_tokens: dict[bytes, list[int]] = {}
        for slot in np.flatnonzero(~self.live & table.is_current).tolist():
            job = table.jobs[slot]
            tokens = [job.request.prefix]
            tokens += [sampled.tokens for sampled in job.rounds]
            contents = np.concatenate(tokens)[: reusable[slot]].tobytes()
            slots_by_tokens.setdefault(contents, []).append(slot)
        if not slots_by_tokens:
            return
        longest_first = sorted({len(contents) for contents in slots_by_tokens}, reverse=True)
        for job in jobs:
            prefix = job.request.prefix.tobytes()
            for size in longest_first:
                # At least one token of the prefix remains to be run: its scores give the first token.
                if size >= len(prefix):
                    continue
                slots = slots_by_tokens.get(prefix[:size])
                if slots:
                    job.continued_slot = slots.pop(0)
                    break


def _empty_states(cache: Cache, count: int) -> tuple:
    """States of `count` slots; empty for a model without delta nets."""
    if not cache.states:
        return ()
    return keys_values.empty(cache.states, rows=count)


def _free_slots(count: int) -> SlotTable:
    """The table of slots without tokens."""
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return SlotTable(
        live=np.zeros(count, bool),
        jobs=np.full(count, None),
        lengths=np.ones(count, np.int32),
        cached=np.zeros(count, np.int32),
        last=np.zeros(count, np.int32),
        counts=np.zeros(count, np.int32),
        limits=np.zeros(count, np.int32),
        keys=np.zeros((count, key.size), np.uint32),
        is_current=np.zeros(count, bool),
    )
