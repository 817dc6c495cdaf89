"""The engine's slots: their state on the host, and their keys and values on the device."""

from collections.abc import Container, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Bool, Int, UInt32

from recjax.models.placement import row_shards
from recjax.rollout import keys_values
from recjax.rollout.decoding import Decoded, SlotContents, SlotState
from recjax.rollout.device import RUNNING, Device
from recjax.rollout.keys_values import Memory
from recjax.rollout.requests import Begun, EngineJob, Sampled, completions_of


class SlotColumns(NamedTuple):
    """The state of each slot. A free slot still holds the tokens of its last completion.

    Attributes:
        live: True if the slot samples a completion.
        jobs: latest EngineJob of the slot.
        lengths, cached, last, counts, limits, keys: see `recjax.rollout.decoding.SlotState`.
        current: True if all keys and values of the slot come from the current weights.
    """

    live: Bool[np.ndarray, " slots"]
    jobs: np.ndarray
    lengths: Int[np.ndarray, " slots"]
    cached: Int[np.ndarray, " slots"]
    last: Int[np.ndarray, " slots"]
    counts: Int[np.ndarray, " slots"]
    limits: Int[np.ndarray, " slots"]
    keys: UInt32[np.ndarray, "slots words"]
    current: Bool[np.ndarray, " slots"]


class Slots:
    """A number of slots and their memory; a new object has neither."""

    def __init__(self, dtype: DTypeLike | None = None, device: Device = RUNNING):
        """Creates an object without slots.

        Args:
            dtype: dtype of the memory for new tokens; None: the dtype of the keys and values given.
            device: runs the programs.
        """
        self.columns = _columns(0)
        self.memory: Memory | None = None
        self._dtype = dtype
        self._device = device

    @property
    def count(self) -> int:
        """The number of slots."""
        return len(self.columns.live)

    @property
    def live(self) -> Bool[np.ndarray, " slots"]:
        """True for slots in which a completion is being sampled."""
        return self.columns.live

    @property
    def jobs(self) -> np.ndarray:
        """The jobs of live slots, in the order of the slots."""
        return self.columns.jobs[self.columns.live]

    @property
    def held(self) -> Int[np.ndarray, " slots"]:
        """Number of tokens in each slot with keys and values from the current weights."""
        return np.where(self.columns.current, self.columns.lengths + self.columns.cached, 0)

    @property
    def time(self) -> int:
        """Tokens behind its prompt that each slot has room for."""
        assert self.memory is not None
        return keys_values.cache_time(self.memory.later)

    # --- The number of slots, and their room.

    def _room(self, like: tuple, count: int, time: int) -> tuple:
        return self._device.run(keys_values.empty, like, rows=count, time=time, dtype=self._dtype)

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
        live = self.live.reshape(shards, -1)
        new = np.arange(count // shards)
        _, held = live.shape
        # With fewer slots, a device's live slots come first; with more slots, the order stays.
        places = np.argsort(~live & (count < self.count), axis=1, kind="stable")
        order = (places[:, new % held] + held * np.arange(shards)[:, None]).ravel()
        again = np.tile(new >= held, shards)
        self.columns = SlotColumns(*(column[order] for column in self.columns))
        self.columns.live[again] = False
        self.columns.current[again] = False
        self.memory = keys_values.gather_slots(self.memory, order.astype(np.int32), time=time)

    def resize(self, time: int) -> None:
        """Changes the room to `time` tokens behind each prompt."""
        assert self.memory is not None
        if time != self.time:
            self.memory = self.memory._replace(later=keys_values.resized(self.memory.later, time=time))

    def leave_room(self, tokens: int) -> None:
        """Drops the last tokens of free slots that leave less room than `tokens`, as a round overwrites this room."""
        self._drop(~self.live, max(self.time - tokens, 0))

    def _drop(self, slots: Bool[np.ndarray, " slots"], most: int) -> None:
        """Keeps at most so many tokens behind the prompts of slots. No state is known for a beginning of the tokens."""
        columns = self.columns
        longer = slots & (self.columns.cached > most)
        columns.cached[longer] = most
        assert self.memory is not None
        if self.memory.states:
            columns.current[longer] = False

    # --- Filling slots.

    def seat(self, begun: Begun, count: int, time: int) -> int:
        """Puts completions with their first token into free slots; returns how many found a slot.

        Args:
            count: number of slots to provide.
            time: room behind each prompt, if the engine has no slots yet.
        """
        jobs = begun.jobs
        cache = begun.cache[:2]
        lengths = begun.lengths
        group_size = begun.group_size
        states = begun.cache[2] if len(begun.cache) > 2 else ()
        places = np.array([job.slot for job in jobs], int)
        if begun.continues:
            self._copy("later", cache, places, jobs, self.columns.cached[places])
            self.columns.cached[places] += lengths[[job.row for job in jobs]]
        elif self.memory is None and group_size and count == len(lengths) * group_size:
            # With a slot for every completion, each group reads a single copy of its prompt.
            self.columns = _columns(count)
            self.columns.lengths[:] = np.repeat(lengths, group_size)
            self.memory = Memory(
                cache,
                self._room(cache, count, time),
                states and self._device.run(keys_values.empty, states, rows=count),
            )
        else:
            self._provide(count, cache, states, time)
            # Slots with the fewest useful tokens are reused first.
            free = np.flatnonzero(~self.live)
            places = free[np.argsort(self.held[free], kind="stable")][: len(jobs)]
            jobs = jobs[: len(places)]
            self._copy("prompts", cache, places, jobs, 0)
            self.columns.lengths[places] = lengths[[job.row for job in jobs]]
            self.columns.cached[places] = 0
        if states:
            self._copy("states", states, places, jobs, 0)
        columns = self.columns
        columns.live[places] = True
        columns.current[places] = begun.current
        columns.counts[places] = 1
        columns.jobs[places] = np.fromiter(jobs, object, len(jobs))
        columns.last[places] = [job.rounds[0][0][0] for job in jobs]
        columns.limits[places] = [job.request.limit for job in jobs]
        columns.keys[places] = np.array([job.request.key for job in jobs]).reshape(-1, columns.keys.shape[1])
        return len(jobs)

    def _provide(self, count: int, cache: tuple, states: tuple, time: int) -> None:
        """Provides at least `count` slots, each with room for its own prompt, as long as the prompts in `cache`."""
        prompt_time = keys_values.cache_time(cache)
        if self.memory is None:
            self.columns = _columns(count)
            prompts = self._room(cache, count, prompt_time)
            later = self._room(cache, count, time)
            self.memory = Memory(prompts, later, states and self._device.run(keys_values.empty, states, rows=count))
        count = max(count, self.count)
        if count != keys_values.cache_rows(self.memory.prompts):
            self.change_number(count, self.time)
        if prompt_time > keys_values.cache_time(self.memory.prompts):
            self.memory = self.memory._replace(prompts=keys_values.resized(self.memory.prompts, time=prompt_time))

    def _copy(
        self, part: str, cache: tuple, slots: np.ndarray, jobs: list[EngineJob], tokens: np.ndarray | int
    ) -> None:
        """Copies rows of `cache` into a part of the memory of slots, behind the `tokens` that it holds there."""
        if jobs:
            places = np.zeros((3, self.count), np.int32)
            places[:, : len(jobs)] = np.broadcast_arrays(slots, [job.row for job in jobs], tokens)
            copied = self._device.run(
                keys_values.put_started, getattr(self.memory, part), cache, places, np.int32(len(jobs))
            )
            assert self.memory is not None
            self.memory = self.memory._replace(**{part: copied})

    # --- Sampling in slots.

    def contents(self, slots: Int[np.ndarray, " rows"]) -> SlotContents:
        """The contents of some slots, for tokens that continue them."""
        assert self.memory is not None
        return SlotContents(self.memory, slots, self.columns.lengths[slots], self.columns.cached[slots])

    def rows(self, live: Bool[np.ndarray, " slots"]) -> SlotState:
        """Copies of the columns for a round in which the slots in `live` sample.

        On a CPU, a program reads the host's array in place. Without copies, a slow device could read values of a later
        round.
        """
        columns = self.columns
        return SlotState(
            live,
            lengths=columns.lengths.copy(),
            cached=columns.cached.copy(),
            last=columns.last.copy(),
            counts=columns.counts.copy(),
            limits=columns.limits.copy(),
            keys=columns.keys.copy(),
        )

    def record(self, mine: Bool[np.ndarray, " slots"], state: Decoded, version: int) -> None:
        """Adds a round's tokens to the columns of the slots that sampled them."""
        columns = self.columns
        counts = np.where(mine, state.counts, 0)
        versions = np.full(state.tokens.shape[1], version, np.int32)
        slots = np.flatnonzero(mine)
        for slot, count in zip(slots.tolist(), counts[slots].tolist(), strict=True):
            row = slot, slice(count)
            # Most models record nothing: an empty dictionary for each slot would be work for the garbage collector.
            recorded = state.recorded and {name: values[row] for name, values in state.recorded.items()}
            columns.jobs[slot].rounds.append((state.tokens[row], state.logprobs[row], versions[:count], recorded))
        columns.counts[:] += counts
        columns.cached[:] += counts
        self._drop(mine, self.time)
        columns.last[mine] = state.last[mine]

    def free(self, tickets: Container[int]) -> None:
        """Frees the slots of the given tickets."""
        self.columns.live[self.live] = [job.ticket not in tickets for job in self.jobs]

    def finish(self, ended: Int[np.ndarray, " some"], stop_ids: tuple[int, ...]) -> dict[int, Sampled]:
        """Frees slots and returns their completions by ticket."""
        jobs = self.columns.jobs[ended].tolist()
        finished = completions_of(jobs, stop_ids)
        for job in jobs:
            job.rounds = [(*finished[job.ticket][:3], {})]
        self.columns.live[ended] = False
        return finished

    def continue_slots(self, jobs: Sequence[EngineJob]) -> None:
        """Gives each job the free slot, if any, that holds the longest beginning of the job's prefix."""
        columns = self.columns
        lengths = self.held
        held: dict[bytes, list[int]] = {}
        for slot in np.flatnonzero(~self.live & columns.current):
            job = columns.jobs[slot]
            tokens = np.concatenate([job.request.prefix, *(tokens for tokens, *_ in job.rounds)])
            held.setdefault(tokens[: lengths[slot]].tobytes(), []).append(int(slot))
        sizes = sorted({len(tokens) for tokens in held}, reverse=True)
        for job in jobs if held else ():
            prefix = job.request.prefix.tobytes()
            for size in sizes:
                if size < len(prefix) and held.get(prefix[:size]):
                    job.slot = held[prefix[:size]].pop(0)
                    break


def _columns(count: int) -> SlotColumns:
    """Columns of empty slots."""
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return SlotColumns(
        live=np.zeros(count, bool),
        jobs=np.full(count, None),
        lengths=np.ones(count, np.int32),
        **{name: np.zeros(count, np.int32) for name in ("cached", "last", "counts", "limits")},
        keys=np.zeros((count, key.size), np.uint32),
        current=np.zeros(count, bool),
    )
