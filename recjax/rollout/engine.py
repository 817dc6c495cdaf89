"""Samples completions in slots: requests may arrive at any time, and each round returns the completions that ended."""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from recjax.models.decoder import Decoder
from recjax.models.experts import unrecorded
from recjax.models.placement import moved_params
from recjax.models.sampling import NOTHING_RECORDED, TokenRecord
from recjax.models.unrolling import made_for_sampling
from recjax.rollout import decoding, plan
from recjax.rollout.decoding import RoundOptions, SlotContents
from recjax.rollout.device import RUNNING, Device
from recjax.rollout.plan import EnginePlan, first_enough, next_lower, plan_for, power_of_two, sampling_mesh
from recjax.rollout.requests import (
    Admitted,
    Begun,
    EngineJob,
    Request,
    Sampled,
    Weights,
    by_sampling,
    check_requests,
    completions_of,
)
from recjax.rollout.slots import Slots
from recjax.runtime.clocks import DeviceClock


class Engine:
    """Slots with a growing cache, in which completions are sampled a round of tokens at a time.

    A completion depends only on the weights and its request, not on its slot, the time or other requests. A batch of
    groups has the engine for itself: it waits until the slots are free, and later requests wait for its end. If a free
    slot holds the beginning of a request's prefix, the request takes this slot and runs only the new tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        stop_ids: tuple[int, ...],
        *,
        slots: int | None,
        prefix_time: int,
        newer: Callable[[], Weights | None] | None = None,
        recording: TokenRecord = NOTHING_RECORDED,
        clock: DeviceClock | None = None,
        device: Device = RUNNING,
    ):
        """Creates an engine without weights.

        Args:
            stop_ids: tokens that end a completion and belong to it.
            slots: completions that are sampled together; None: as many as memory holds, at most the number of requests.
            prefix_time: tokens to which prefixes are padded; longer prefixes are padded to a power of two.
            newer: called before each round; returns weights that have arrived since its last call, or None. None: no
                updates.
            recording: the arrays that the engine records of the distribution of each token.
            clock: clock to tell of programs; None: no clock.
            device: runs the programs.
        """
        self._decoder = made_for_sampling(decoder)
        self._mesh = sampling_mesh(self._decoder)
        self._stop_ids = tuple(stop_ids)
        self._most_slots = slots
        self._prefix_time = prefix_time
        self._newer = newer
        self._recording = recording
        self._clock = clock or DeviceClock()
        self._device = device
        self._stacked: dict | None = None
        self._params: dict | None = None
        self._version = 0
        self._numbers = itertools.count()
        self._line: deque[Admitted] = deque()
        self._begun: Begun | None = None
        self._finished: dict[int, Sampled] = {}
        self._slots = Slots(self._decoder.cache_dtype, device)
        self._plan = EnginePlan(0, prefix_time, [0], 0, ())

    def replace_weights(self, params: dict, version: int) -> None:
        """Moves weights, stacked by layer, to the sampling devices and uses them for all tokens sampled from here on.

        Unfinished completions continue with the keys and values that they have.
        """
        self._stacked = moved_params(self._mesh, params)
        self._params = None
        self._version = version
        # Later requests must not start from keys and values of other weights: their tokens would depend on the slot.
        self._slots.columns.current[:] = False
        self._begun = self._begun and self._begun._replace(current=False)

    def admit(self, requests: Sequence[Request], group_size: int | None = None) -> list[int]:
        """Adds requests and returns their tickets; requests without a free slot wait in line.

        Equal prefixes in one call are run once.

        Args:
            group_size: number of consecutive requests that share a prefix, in a batch whose shape recurs with other
                prompts. Programs fit the batch exactly; numbers of other requests are rounded up to powers of two.
                Requests with several distributions are no batch.
        Raises:
            UserError: a request cannot be sampled, or a group has no common prefix.
        """
        requests = list(requests)
        check_requests(requests, group_size, self._decoder.config.vocab_size)
        jobs = [EngineJob(request, next(self._numbers)) for request in requests]
        if group_size and len({request.sampling for request in requests}) == 1:
            self._line.append(Admitted(jobs, group_size))
        else:
            # An entry each, so that requests move into slots one by one as these become free.
            self._line += [Admitted([job], None) for job in jobs]
        return [job.ticket for job in jobs]

    def cancel(self, tickets: Collection[int]) -> None:
        """Frees the slots of requests and their places in line; the engine returns no completions for these tickets.

        Requests of a batch of groups that waits in line keep their places.
        """
        gone = {*tickets}
        self._slots.free(gone)
        self._finished = {ticket: done for ticket, done in self._finished.items() if ticket not in gone}
        if self._begun:
            remaining = [job for job in self._begun.jobs if job.ticket not in gone]
            self._begun = self._begun._replace(jobs=remaining) if remaining else None
        # A batch stays whole, as its programs fit its number of requests exactly.
        self._line = deque(
            admitted for admitted in self._line if admitted.group_size or admitted.jobs[0].ticket not in gone
        )

    def so_far(self, tickets: Collection[int]) -> dict[int, Sampled]:
        """Tokens that unfinished requests in slots have sampled, by ticket."""
        return completions_of([job for job in self._slots.jobs if job.ticket in tickets], self._stop_ids)

    def round(self) -> dict[int, Sampled]:
        """Fills free slots and decodes one round of tokens in all slots; returns the completions that ended, by ticket.

        Raises:
            UserError: the engine has no weights yet.
        """
        # Weights change between rounds, never within one, so that a round's tokens all have one version.
        weights = None if self._newer is None else self._newer()
        if weights is not None:
            self.replace_weights(weights.params, weights.version)
        if self._stacked is None:
            raise ValueError("the engine has no weights; call replace_weights before the first round")
        with jax.set_mesh(self._mesh):
            if self._params is None:
                # Layers are unrolled once for all rounds until the next weights, as a GPU copies them for it.
                self._params = self._stacked
                if self._decoder.unrolled:
                    self._params = self._device.unrolled(self._decoder.config, self._stacked)
            self._fill_slots()
            if self._slots.live.any():
                self._fit()
                self._decode()
        finished = self._finished
        self._finished = {}
        return finished

    def drain(self) -> dict[int, Sampled]:
        """Runs rounds until all requests are finished; returns all completions, by ticket."""
        finished = {}
        while self._line or self._begun or self._slots.live.any():
            finished |= self.round()
        return finished

    # --- From the line into slots.

    def _fill_slots(self) -> None:
        """Gives free slots to waiting requests until either runs out."""
        while True:
            if self._begun and not self._seat():
                return
            live = int(self._slots.live.sum())
            # A batch needs all slots for itself, so it waits until they are free, and later requests wait behind it.
            if not self._line or (live and (self._plan.is_of_batch or self._line[0].group_size)):
                return
            self._make_plan(live)
            room = self._plan.slots[-1] - live
            if room <= 0:
                return
            jobs, group_size = self._line.popleft()
            while not group_size and len(jobs) < room and self._line and not self._line[0].group_size:
                jobs = jobs + self._line.popleft().jobs
            self._slots.continue_slots(jobs)
            # Two programs: only one of them reads the contents of slots.
            continuing = [job for job in jobs if job.slot >= 0]
            starting = [job for job in jobs if job.slot < 0]
            if continuing:
                self._begin(continuing, group_size)
            if starting:
                self._begin(starting, group_size)

    def _waiting(self) -> int:
        """The number of requests that wait for slots of the current plan."""
        begun = len(self._begun.jobs) if self._begun else 0
        return begun if self._plan.is_of_batch else begun + sum(len(admitted.jobs) for admitted in self._line)

    def _make_plan(self, live: int) -> None:
        """Plans for the next batch in line, or for all requests if they are more than the plan is for."""
        jobs, group_size = self._line[0]
        if group_size:
            # A batch's programs fit it exactly, so its memory begins empty and not in the shapes of earlier requests.
            self._slots = Slots(self._decoder.cache_dtype, self._device)
            count = len(jobs)
        else:
            jobs = [job for admitted in self._line for job in admitted.jobs]
            count = live + len(jobs)
            if not self._plan.is_of_batch and count <= self._plan.requests:
                return
        sizes = {"prefix_time": self._prefix_time, "slots": self._most_slots}
        longest = max(job.request.limit for job in jobs)
        self._plan = plan_for(self._decoder, count, longest, group_size, **sizes)

    def _begin(self, jobs: list[EngineJob], group_size: int | None) -> None:
        """Runs the tokens of prefixes that no slot holds, samples first tokens, and moves completions into slots.

        Args:
            jobs: either all jobs continue the contents of slots, or none.
        """
        if jobs[0].slot >= 0:
            tokens, mask, held = self._continuations(jobs)
        else:
            tokens, mask = self._whole_prefixes(jobs, group_size)
            held = None
        self._clock.call()
        cache, scores = self._device.run(decoding.prefill, self._params, tokens, mask, held, decoder=self._decoder)
        self._sample_first_tokens(scores, jobs)
        started = []
        ended = []
        for job in jobs:
            # A completion that ends with its first token never takes a slot.
            ends = job.request.limit == 1 or job.rounds[0][0].item() in self._stop_ids
            (ended if ends else started).append(job)
        self._finished |= completions_of(ended, self._stop_ids)
        if started:
            self._begun = Begun(started, cache, mask.sum(-1, dtype=np.int32), held is not None, group_size)
            self._seat()

    def _whole_prefixes(
        self, jobs: list[EngineJob], group_size: int | None
    ) -> tuple[Int[np.ndarray, "rows time"], Bool[np.ndarray, "rows time"]]:
        """The jobs' prefixes, each different one once, and their mask; sets each job's row."""
        prefixes = [job.request.prefix for job in jobs]
        # Bytes of tokens compare whole prefixes at once; a group has one prefix, so its number is enough.
        names = [number // group_size if group_size else prefix.tobytes() for number, prefix in enumerate(prefixes)]
        runs = dict(zip(names, prefixes, strict=True))
        rows = {name: row for row, name in enumerate(runs)}
        for number, (job, name) in enumerate(zip(jobs, names, strict=True)):
            job.row = rows[name]
            job.slot = number
        time = self._plan.prompt_time(max(map(len, runs.values())))
        return _padded([*runs.values()], self._plan.rows(len(runs)), time)

    def _continuations(
        self, jobs: list[EngineJob]
    ) -> tuple[Int[np.ndarray, "rows time"], Bool[np.ndarray, "rows time"], SlotContents]:
        """The jobs' tokens behind the contents of their slots, their mask, and these contents; sets each job's row."""
        slots = np.array([job.slot for job in jobs], np.int32)
        starts = self._slots.held[slots]
        runs = [job.request.prefix[start:] for job, start in zip(jobs, starts, strict=True)]
        for row, job in enumerate(jobs):
            job.row = row
        # Padded to few shapes, which take seconds to compile: agents continue one or two at once, with few tokens.
        count = self._plan.rows(max(len(runs), plan.FEWEST_CONTINUED))
        time = power_of_two(max(plan.ROUND, *map(len, runs)))
        # The tokens are written to the slots after the run, with their padding, which needs room too.
        needed = int(self._slots.columns.cached[slots].max()) + time
        if needed > self._slots.time:
            self._slots.resize(self._plan.cache_time(needed, self._slots.count))
        tokens, mask = _padded(runs, count, time)
        return tokens, mask, self._slots.contents(slots[np.arange(count) % len(slots)])

    def _sample_first_tokens(self, scores: Array | jax.ShapeDtypeStruct, jobs: list[EngineJob]) -> None:
        """Samples the first token of each completion; in memory are the scores of as many as there are slots."""
        keys = np.stack([job.request.key for job in jobs])
        rows = np.array([job.row for job in jobs], np.int32)
        most = self._plan.slots[-1]
        for sampling, numbers in by_sampling(jobs).items():
            size = min(most, self._plan.rows(len(numbers)))
            for chunk in np.split(numbers, range(most, len(numbers), most)):
                # Completions repeat up to the size of the program, which has few sizes; repetitions are not read.
                repeated = chunk[np.arange(size) % len(chunk)]
                options = {"sampling": sampling, "recording": self._recording.under(sampling)}
                self._clock.call()
                first_tokens = self._device.run(
                    decoding.first_tokens, scores, rows[repeated], keys[repeated], **options
                )
                tokens, logprobs, recorded = self._device.read(first_tokens)
                self._clock.end()
                versions = np.full(size, self._version, np.int32)
                # The pass over its prefix predicts a first token, and an update routes prompts again.
                recorded = recorded | unrecorded(self._decoder, size)
                for row, number in enumerate(chunk.tolist()):
                    first = slice(row, row + 1)
                    record = {name: values[first] for name, values in recorded.items()}
                    jobs[number].rounds = [(tokens[first], logprobs[first], versions[first], record)]

    def _seat(self) -> bool:
        """Moves completions that have begun into slots; returns True if each found a slot."""
        begun = self._begun
        assert begun is not None
        count = first_enough(self._plan.slots, int(self._slots.live.sum()) + len(begun.jobs))
        seated = self._slots.seat(begun, count, self._plan.cache_time(0, count))
        waiting = begun.jobs[seated:]
        self._begun = begun._replace(jobs=waiting) if waiting else None
        return not waiting

    # --- Rounds.

    def _fit(self) -> None:
        """Makes room for a round in every slot, and reduces the slots of a batch to the number that it still needs."""
        slots = self._slots
        kept = slots.live
        time = self._plan.round_time
        if not self._plan.is_of_batch:
            # Requests may continue free slots, so these keep their contents; while a batch samples, no request can.
            kept = kept | slots.columns.current
            time *= 2  # the round of another distribution also writes behind slots that have had their own round
        needed = int(slots.columns.cached[kept].max()) + time
        # Halves step by step, so that each number of slots is reached by one compiled program.
        while self._plan.is_of_batch and first_enough(self._plan.slots, slots.fewest + self._waiting()) < slots.count:
            fewer = next_lower(self._plan.slots, slots.count)
            slots.change_number(fewer, self._plan.cache_time(needed, fewer))
        slots.resize(self._plan.cache_time(needed, slots.count, slots.time))
        slots.leave_room(time)

    def _decode(self) -> None:
        """Decodes one round for each distribution among live slots; slots of other distributions pause during it.

        A round ends early once enough slots are free for waiting requests, or for a batch to continue with fewer slots.
        """
        slots = self._slots
        live = slots.live
        time = self._plan.round_time
        free = slots.count
        if self._waiting():
            free = -(-slots.count // 8)
        elif self._plan.is_of_batch and (slots.columns.limits - slots.columns.counts)[live].max() > time:
            free -= next_lower(self._plan.slots, slots.count)
        live_slots = np.flatnonzero(live)
        for sampling, chosen in by_sampling(slots.jobs).items():
            # Temperature and cuts are part of the compiled program, so a round has a single distribution.
            mine = np.zeros(slots.count, bool)
            mine[live_slots[chosen]] = True
            paused = len(live_slots) - len(chosen)
            # Below the number of slots that sample, or the round would end before its first token.
            enough = np.clip(slots.count - free - paused, 0, len(chosen) - 1).astype(np.int32)
            options = RoundOptions(sampling, self._stop_ids, time, self._recording.under(sampling))
            arguments = self._params, slots.memory, slots.rows(mine), enough
            self._clock.call()
            slots.memory, state = self._device.run(decoding.decode, *arguments, decoder=self._decoder, options=options)
            # One transfer of all arrays; the round has ended when the host has them.
            state = self._device.read(state)
            self._clock.end()
            slots.record(mine, state, self._version)
            self._finished |= slots.finish(np.flatnonzero(mine & ~state.live), self._stop_ids)


def _padded(
    runs: Sequence[np.ndarray], count: int, time: int
) -> tuple[Int[np.ndarray, "rows time"], Bool[np.ndarray, "rows time"]]:
    """Runs of tokens as `count` rows, right-padded to `time`, and the rows' mask."""
    # Rows without a run repeat one: the scores of a row are those behind its last token, so it needs a token.
    rows = [*itertools.islice(itertools.cycle(runs), count)]
    mask = np.arange(time) < np.array([len(row) for row in rows])[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask
