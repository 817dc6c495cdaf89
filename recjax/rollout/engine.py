"""Samples completions in slots: requests may arrive at any time, and each step returns the completions that ended."""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from recjax.errors import UserError
from recjax.models.decoder import Decoder
from recjax.models.experts import unrecorded
from recjax.models.placement import bytes_on_device, moved_params, on_host
from recjax.models.sampling import NOTHING_RECORDED, TokenRecord
from recjax.models.unrolling import made_for_sampling, unrolled_arrays
from recjax.rollout import decoding, plan
from recjax.rollout.decoding import RoundOptions, SlotContents
from recjax.rollout.plan import EnginePlan, first_enough, next_lower, plan_for, power_of_two, sampling_mesh
from recjax.rollout.requests import (
    Admitted,
    EngineJob,
    Prefilled,
    Request,
    Round,
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
        context: int | None = None,
        newer: Callable[[], Weights | None] | None = None,
        recording: TokenRecord = NOTHING_RECORDED,
        clock: DeviceClock | None = None,
    ):
        """Creates an engine without weights.

        Args:
            stop_ids: tokens that end a completion and belong to it.
            slots: completions that are sampled together; None: as many as memory holds, at most the number of requests.
            prefix_time: tokens to which prefixes are padded; longer prefixes are padded to a power of two.
            context: most tokens that the prefix and all that follows it in a slot may have together, for requests that
                continue earlier ones; None: no request does.
            newer: called before each step; returns weights that have arrived since its last call, or None. None: no
                updates.
            recording: the arrays that the engine records of the distribution of each token.
            clock: clock to tell of programs; None: no clock.
        """
        self._decoder = made_for_sampling(decoder)
        self._mesh = sampling_mesh(self._decoder)
        self._stop_ids = tuple(stop_ids)
        self._most_slots = slots
        self._prefix_time = prefix_time
        self._context = context
        self._newer = newer
        self._recording = recording
        if clock is None:
            clock = DeviceClock()
        self._clock = clock
        self._stacked: dict | None = None
        self._params: dict | None = None
        self._version = 0
        self._tickets = itertools.count()
        # A request waits in the queue, then, with its first token, as prefilled, then moves into a slot.
        self._queue: deque[Admitted] = deque()
        self._prefilled: Prefilled | None = None
        self._slots = Slots(self._decoder.cache_dtype)
        self._finished: dict[int, Sampled] = {}
        # A plan for no requests: the first request makes another one.
        self._plan = EnginePlan(requests=0, prefix_time=prefix_time, slots=[0], round_time=0, lengths=())

    def replace_weights(self, params: dict, version: int) -> None:
        """Moves weights, stacked by layer, to the sampling devices and uses them for all tokens sampled from here on.

        Unfinished completions continue with the keys and values that they have.
        """
        self._stacked = moved_params(self._mesh, params)
        self._params = None
        self._version = version
        # Later requests must not start from keys and values of other weights: their tokens would depend on the slot.
        self._slots.table.is_current[:] = False
        if self._prefilled:
            self._prefilled = self._prefilled._replace(has_current_weights=False)

    def admit(self, requests: Sequence[Request], group_size: int | None = None) -> list[int]:
        """Adds requests and returns their tickets; requests without a free slot wait in the queue.

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
        jobs = [EngineJob(request, ticket=next(self._tickets)) for request in requests]
        distributions = {request.sampling for request in requests}
        if group_size and len(distributions) == 1:
            self._queue.append(Admitted(jobs, group_size))
        else:
            # An entry each, so that requests move into slots one by one as these become free.
            for job in jobs:
                self._queue.append(Admitted([job], group_size=None))
        return [job.ticket for job in jobs]

    def cancel(self, tickets: Collection[int]) -> None:
        """Frees the slots of requests and their places in the queue; these tickets get no completions.

        Requests of a batch of groups that waits in the queue keep their places.
        """
        gone = set(tickets)
        self._slots.free(gone)
        self._finished = {ticket: done for ticket, done in self._finished.items() if ticket not in gone}
        if self._prefilled:
            self._keep_prefilled([job for job in self._prefilled.jobs if job.ticket not in gone])
        queue: deque[Admitted] = deque()
        for admitted in self._queue:
            # A batch keeps all its requests, as its programs fit their number exactly; other entries have one request.
            is_batch = bool(admitted.group_size)
            if is_batch or admitted.jobs[0].ticket not in gone:
                queue.append(admitted)
        self._queue = queue

    def so_far(self, tickets: Collection[int]) -> dict[int, Sampled]:
        """Tokens that unfinished requests in slots have sampled, by ticket."""
        jobs = [job for job in self._slots.jobs if job.ticket in tickets]
        return completions_of(jobs, self._stop_ids)

    def step(self) -> dict[int, Sampled]:
        """Fills free slots and decodes one round of tokens in all slots; returns the completions that ended, by ticket.

        Raises:
            UserError: the engine has no weights yet.
        """
        # Weights change between rounds, never within one, so that a round's tokens all have one version.
        if self._newer is not None:
            weights = self._newer()
            if weights is not None:
                self.replace_weights(weights.params, weights.version)
        if self._stacked is None:
            raise UserError("the engine", "has no weights", "call replace_weights before the first step")
        with jax.set_mesh(self._mesh):
            if self._params is None:
                # Layers are unrolled once for all rounds until the next weights, as a GPU copies them for it.
                self._params = self._stacked
                if self._decoder.unrolled:
                    self._params = unrolled_arrays(self._decoder.config, self._stacked)
            self._fill_slots()
            if self._slots.live.any():
                self._fit()
                self._decode()
        finished = self._finished
        self._finished = {}
        return finished

    def drain(self) -> dict[int, Sampled]:
        """Takes steps until all requests are finished; returns all completions, by ticket."""
        finished = {}
        while self._queue or self._prefilled or self._slots.live.any():
            finished |= self.step()
        return finished

    # --- From the queue into slots.

    def _fill_slots(self) -> None:
        """Gives free slots to waiting requests until either runs out."""
        while True:
            if self._prefilled:
                self._assign_slots()
                if self._prefilled:
                    return
            live = int(self._slots.live.sum())
            if not self._queue:
                return
            # A batch needs all slots for itself, so it waits until they are free, and later requests wait for its end.
            if live and (self._plan.is_batch or self._queue[0].group_size):
                return
            self._make_plan(live)
            free = self._plan.slots[-1] - live
            if free <= 0:
                return
            jobs, group_size = self._next_jobs(free)
            self._slots.find_continued(jobs)
            # Two programs: only one of them reads the contents of slots.
            continuing = [job for job in jobs if job.continued_slot is not None]
            starting = [job for job in jobs if job.continued_slot is None]
            if continuing:
                tokens, mask, contents = self._continuations(continuing)
                self._prefill(continuing, group_size, tokens, mask, contents)
            if starting:
                tokens, mask = self._complete_prefixes(starting, group_size)
                self._prefill(starting, group_size, tokens, mask, None)

    def _next_jobs(self, free: int) -> tuple[list[EngineJob], int | None]:
        """Takes the next batch out of the queue, or up to `free` other requests; the second value is its group size."""
        jobs, group_size = self._queue.popleft()
        if group_size:
            return jobs, group_size
        jobs = list(jobs)
        while self._queue and len(jobs) < free:
            if self._queue[0].group_size:  # a batch waits until the slots are free
                break
            jobs += self._queue.popleft().jobs
        return jobs, None

    def _waiting(self) -> int:
        """The number of requests that wait for slots of the current plan."""
        waiting = 0
        if self._prefilled:
            waiting += len(self._prefilled.jobs)
        if not self._plan.is_batch:
            waiting += sum(len(admitted.jobs) for admitted in self._queue)
        return waiting

    def _make_plan(self, live: int) -> None:
        """Plans for the next batch in the queue, or for all requests if they are more than the plan is for."""
        jobs, group_size = self._queue[0]
        held = 0
        if group_size:
            # A batch's programs fit it exactly, so its memory begins empty and not in the shapes of earlier requests.
            self._slots = Slots(self._decoder.cache_dtype)
            count = len(jobs)
        else:
            jobs = list(itertools.chain.from_iterable(admitted.jobs for admitted in self._queue))
            count = live + len(jobs)
            if not self._plan.is_batch and count <= self._plan.requests:
                return
            held = bytes_on_device(self._slots.memory)
        longest = max(job.request.limit for job in jobs)
        if self._context is not None:
            longest = max(longest, self._context - self._prefix_time)
        self._plan = plan_for(
            self._decoder,
            count,
            longest,
            group_size,
            prefix_time=self._prefix_time,
            slots=self._most_slots,
            held=held,
        )

    def _prefill(
        self,
        jobs: list[EngineJob],
        group_size: int | None,
        tokens: Int[np.ndarray, "rows time"],
        mask: Bool[np.ndarray, "rows time"],
        contents: SlotContents | None,
    ) -> None:
        """Runs the tokens of prefixes that no slot contains, samples first tokens, and assigns slots to the jobs.

        Args:
            contents: contents of the slots that the tokens continue; None: the tokens are complete prefixes.
        """
        self._clock.call()
        cache, scores = decoding.prefill(self._params, tokens, mask, contents, decoder=self._decoder)
        self._sample_first_tokens(scores, jobs)
        started = []
        ended = []
        for job in jobs:
            # A completion that ends with its first token never takes a slot.
            if job.request.limit == 1 or job.first_token in self._stop_ids:
                ended.append(job)
            else:
                started.append(job)
        self._finished |= completions_of(ended, self._stop_ids)
        if started:
            lengths = mask.sum(-1, dtype=np.int32)
            self._prefilled = Prefilled(
                jobs=started, cache=cache, lengths=lengths, continues=contents is not None, group_size=group_size
            )
            self._assign_slots()

    def _complete_prefixes(
        self, jobs: list[EngineJob], group_size: int | None
    ) -> tuple[Int[np.ndarray, "rows time"], Bool[np.ndarray, "rows time"]]:
        """The jobs' prefixes, each different one once, and their mask; sets each job's row and index."""
        prefixes: list[np.ndarray] = []
        row_of: dict[int | bytes, int] = {}
        for index, job in enumerate(jobs):
            prefix = job.request.prefix
            if group_size:  # a group has one prefix, so the group's number identifies it
                identity = index // group_size
            else:  # bytes compare all tokens at once
                identity = prefix.tobytes()
            if identity not in row_of:
                row_of[identity] = len(prefixes)
                prefixes.append(prefix)
            job.prefilled_row = row_of[identity]
            job.batch_index = index
        longest = max(len(prefix) for prefix in prefixes)
        count = self._plan.rows(len(prefixes))
        return _padded(prefixes, count, self._plan.prompt_time(longest))

    def _continuations(
        self, jobs: list[EngineJob]
    ) -> tuple[Int[np.ndarray, "rows time"], Bool[np.ndarray, "rows time"], SlotContents]:
        """The jobs' tokens after the contents of their slots, their mask, and these contents; sets each job's row."""
        slots = np.array([job.continued_slot for job in jobs], np.int32)
        starts = self._slots.reusable[slots]
        runs = [job.request.prefix[start:] for job, start in zip(jobs, starts, strict=True)]
        for row, job in enumerate(jobs):
            job.prefilled_row = row
        # Padded to few shapes, which take seconds to compile: agents continue one or two at once, with few tokens.
        count = self._plan.rows(max(len(runs), plan.FEWEST_CONTINUED))
        longest = max(len(run) for run in runs)
        time = power_of_two(max(plan.ROUND, longest))
        # The tokens are written to the slots after the run, with their padding, which needs space too.
        needed = int(self._slots.table.cached[slots].max()) + time
        if needed > self._slots.capacity:
            self._slots.change_capacity(self._plan.cache_time(needed, self._slots.count))
        tokens, mask = _padded(runs, count, time)
        # Rows that only fill up the program repeat a slot, as `_padded` repeats its tokens.
        slot_of_row = slots[np.arange(count) % len(slots)]
        return tokens, mask, self._slots.contents(slot_of_row)

    def _sample_first_tokens(self, scores: Array, jobs: list[EngineJob]) -> None:
        """Samples the first token of each completion; memory holds the scores of as many completions as slots."""
        keys = np.stack([job.request.key for job in jobs])
        rows = np.array([job.prefilled_row for job in jobs], np.int32)
        most_slots = self._plan.slots[-1]
        for sampling, places in by_sampling(jobs).items():
            size = min(most_slots, self._plan.rows(len(places)))
            recording = self._recording.under(sampling)
            for start in range(0, len(places), most_slots):
                chunk = places[start : start + most_slots]
                # Completions repeat up to the size of the program, which has few sizes; repetitions are not read.
                repeated = chunk[np.arange(size) % len(chunk)]
                self._clock.call()
                first_tokens = decoding.first_tokens(
                    scores, rows[repeated], keys[repeated], sampling=sampling, recording=recording
                )
                tokens, logprobs, recorded = on_host(first_tokens)
                self._clock.end()
                versions = np.full(size, self._version, np.int32)
                # The pass over its prefix predicts a first token, and an update routes prompts again.
                recorded = recorded | unrecorded(self._decoder, size)
                for row, place in enumerate(chunk.tolist()):
                    only = slice(row, row + 1)
                    record = {name: values[only] for name, values in recorded.items()}
                    jobs[place].rounds = [Round(tokens[only], logprobs[only], versions[only], record)]

    def _assign_slots(self) -> None:
        """Moves prefilled completions into free slots; those without a slot stay prefilled."""
        prefilled = self._prefilled
        assert prefilled is not None
        needed = int(self._slots.live.sum()) + len(prefilled.jobs)
        count = first_enough(self._plan.slots, needed)
        assigned = self._slots.assign(prefilled, count, self._plan.cache_time(0, count))
        self._keep_prefilled(prefilled.jobs[assigned:])

    def _keep_prefilled(self, jobs: list[EngineJob]) -> None:
        """Keeps only these jobs of the prefilled ones."""
        assert self._prefilled is not None
        if jobs:
            self._prefilled = self._prefilled._replace(jobs=jobs)
        else:
            self._prefilled = None

    # --- Rounds.

    def _fit(self) -> None:
        """Makes space for a round in every slot, and reduces the slots of a batch to the number that it still needs."""
        slots = self._slots
        if self._plan.is_batch:
            keeps_contents = slots.live
            space = self._plan.round_time
        else:
            # Requests may continue free slots, so these keep their contents; while a batch samples, no request can.
            keeps_contents = slots.live | slots.table.is_current
            # The round of a different distribution also writes after slots that have had their own round.
            space = 2 * self._plan.round_time
        needed = int(slots.table.cached[keeps_contents].max()) + space
        if self._plan.is_batch:
            # Halves step by step, so that each number of slots is reached by one compiled program.
            while first_enough(self._plan.slots, slots.fewest + self._waiting()) < slots.count:
                fewer = next_lower(self._plan.slots, slots.count)
                slots.change_count(fewer, self._plan.cache_time(needed, fewer))
        slots.change_capacity(self._plan.cache_time(needed, slots.count, current=slots.capacity))
        slots.make_space(space)

    def _decode(self) -> None:
        """Decodes one round for each distribution among live slots; slots of other distributions pause during it.

        A round ends early once enough slots are free for waiting requests, or for a batch to continue with fewer slots.
        """
        slots = self._slots
        live_slots = np.flatnonzero(slots.live)
        most_live = self._most_live_at_end()
        for sampling, places in by_sampling(slots.jobs).items():
            # Temperature and cuts are part of the compiled program, so a round has a single distribution.
            is_sampling = np.zeros(slots.count, bool)
            is_sampling[live_slots[places]] = True
            paused = len(live_slots) - len(places)
            # Below the number of slots that sample, or the round would end before its first token.
            enough = np.clip(most_live - paused, 0, len(places) - 1).astype(np.int32)
            options = RoundOptions(
                sampling, self._stop_ids, time=self._plan.round_time, recording=self._recording.under(sampling)
            )
            start = slots.round_state(is_sampling)
            self._clock.call()
            slots.memory, state = decoding.decode(
                self._params, slots.memory, start, enough, decoder=self._decoder, options=options
            )
            # One transfer of all arrays; the round has ended when the host has them.
            state = on_host(state)
            self._clock.end()
            slots.record(is_sampling, state, self._version)
            ended = np.flatnonzero(is_sampling & ~state.live)
            self._finished |= slots.finish(ended, self._stop_ids)

    def _most_live_at_end(self) -> int:
        """The number of live slots at which a round ends early; 0: the round ends with its last completion or token."""
        slots = self._slots
        if self._waiting():
            # An eighth of the slots, rounded up, is enough for waiting requests.
            return slots.count - -(-slots.count // 8)
        if self._plan.is_batch:
            left = slots.table.limits - slots.table.counts
            if left[slots.live].max() > self._plan.round_time:
                return next_lower(self._plan.slots, slots.count)
        return 0


def _padded(
    runs: Sequence[np.ndarray], count: int, time: int
) -> tuple[Int[np.ndarray, "rows time"], Bool[np.ndarray, "rows time"]]:
    """Runs of tokens as `count` rows, right-padded to `time`, and the rows' mask."""
    # Rows without a run repeat one: the scores of a row are those after its last token, so it needs a token.
    rows = [runs[row % len(runs)] for row in range(count)]
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(time) < lengths[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask
