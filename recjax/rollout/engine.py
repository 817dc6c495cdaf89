"""Samples completions in slots: requests may arrive at any time, and each step returns the completions that ended."""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from recjax.models.decoder import Decoder
from recjax.models.experts import unrecorded
from recjax.models.placement import moved_params, on_host
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
        newer: Callable[[], Weights | None] | None = None,
        recording: TokenRecord = NOTHING_RECORDED,
        clock: DeviceClock | None = None,
    ):
        """Creates an engine without weights.

        Args:
            stop_ids: tokens that end a completion and belong to it.
            slots: completions that are sampled together; None: as many as memory holds, at most the number of requests.
            prefix_time: tokens to which prefixes are padded; longer prefixes are padded to a power of two.
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
        self._newer = newer
        self._recording = recording
        self._clock = DeviceClock() if clock is None else clock
        self._stacked: dict | None = None
        self._params: dict | None = None
        self._version = 0
        self._numbers = itertools.count()
        # A request waits in the queue, then, with its first token, as prefilled, then moves into a slot.
        self._queue: deque[Admitted] = deque()
        self._prefilled: Prefilled | None = None
        self._slots = Slots(self._decoder.cache_dtype)
        self._finished: dict[int, Sampled] = {}
        self._plan = EnginePlan(0, prefix_time, [0], 0, ())

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
        jobs = [EngineJob(request, next(self._numbers)) for request in requests]
        if group_size and len({request.sampling for request in requests}) == 1:
            self._queue.append(Admitted(jobs, group_size))
        else:
            # An entry each, so that requests move into slots one by one as these become free.
            self._queue += [Admitted([job], None) for job in jobs]
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
        # A batch keeps all its requests, as its programs fit their number exactly.
        self._queue = deque(
            admitted for admitted in self._queue if admitted.group_size or admitted.jobs[0].ticket not in gone
        )

    def so_far(self, tickets: Collection[int]) -> dict[int, Sampled]:
        """Tokens that unfinished requests in slots have sampled, by ticket."""
        return completions_of([job for job in self._slots.jobs if job.ticket in tickets], self._stop_ids)

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
            raise ValueError("the engine has no weights; call replace_weights before the first round")
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
            jobs, group_size = self._queue.popleft()
            while not group_size and len(jobs) < free and self._queue and not self._queue[0].group_size:
                jobs = jobs + self._queue.popleft().jobs
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
        if group_size:
            # A batch's programs fit it exactly, so its memory begins empty and not in the shapes of earlier requests.
            self._slots = Slots(self._decoder.cache_dtype)
            count = len(jobs)
        else:
            jobs = list(itertools.chain.from_iterable(admitted.jobs for admitted in self._queue))
            count = live + len(jobs)
            if not self._plan.is_batch and count <= self._plan.requests:
                return
        longest = max(job.request.limit for job in jobs)
        self._plan = plan_for(
            self._decoder, count, longest, group_size, prefix_time=self._prefix_time, slots=self._most_slots
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
            self._prefilled = Prefilled(started, cache, lengths, contents is not None, group_size)
            self._assign_slots()

    def _complete_prefixes(
        self, jobs: list[EngineJob], group_size: int | None
    ) -> tuple[Int[np.ndarray, "rows time"], Bool[np.ndarray, "rows time"]]:
        """The jobs' prefixes, each different one once, and their mask; sets each job's row and index."""
        prefixes: list[np.ndarray] = []
        rows: dict[int | bytes, int] = {}
        for index, job in enumerate(jobs):
            # Bytes of tokens compare all tokens at once; a group has one prefix, so its number is enough.
            name = index // group_size if group_size else job.request.prefix.tobytes()
            if name not in rows:
                rows[name] = len(prefixes)
                prefixes.append(job.request.prefix)
            job.prefilled_row = rows[name]
            job.batch_index = index
        time = self._plan.prompt_time(max(map(len, prefixes)))
        return _padded(prefixes, self._plan.rows(len(prefixes)), time)

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
        time = power_of_two(max(plan.ROUND, max(map(len, runs))))
        # The tokens are written to the slots after the run, with their padding, which needs space too.
        needed = int(self._slots.table.cached[slots].max()) + time
        if needed > self._slots.capacity:
            self._slots.change_capacity(self._plan.cache_time(needed, self._slots.count))
        tokens, mask = _padded(runs, count, time)
        return tokens, mask, self._slots.contents(slots[np.arange(count) % len(slots)])

    def _sample_first_tokens(self, scores: Array, jobs: list[EngineJob]) -> None:
        """Samples the first token of each completion; memory holds the scores of as many completions as slots."""
        keys = np.stack([job.request.key for job in jobs])
        rows = np.array([job.prefilled_row for job in jobs], np.int32)
        most = self._plan.slots[-1]
        for sampling, numbers in by_sampling(jobs).items():
            size = min(most, self._plan.rows(len(numbers)))
            recording = self._recording.under(sampling)
            for chunk in np.split(numbers, range(most, len(numbers), most)):
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
                for row, number in enumerate(chunk.tolist()):
                    first = slice(row, row + 1)
                    record = {name: values[first] for name, values in recorded.items()}
                    jobs[number].rounds = [Round(tokens[first], logprobs[first], versions[first], record)]

    def _assign_slots(self) -> None:
        """Moves prefilled completions into free slots; those without a slot stay prefilled."""
        prefilled = self._prefilled
        assert prefilled is not None
        count = first_enough(self._plan.slots, int(self._slots.live.sum()) + len(prefilled.jobs))
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
        keeps_contents = slots.live
        time = self._plan.round_time
        if not self._plan.is_batch:
            # Requests may continue free slots, so these keep their contents; while a batch samples, no request can.
            keeps_contents = keeps_contents | slots.table.is_current
            time *= 2  # the round of a different distribution also writes after slots that have had their own round
        needed = int(slots.table.cached[keeps_contents].max()) + time
        # Halves step by step, so that each number of slots is reached by one compiled program.
        while self._plan.is_batch and first_enough(self._plan.slots, slots.fewest + self._waiting()) < slots.count:
            fewer = next_lower(self._plan.slots, slots.count)
            slots.change_count(fewer, self._plan.cache_time(needed, fewer))
        slots.change_capacity(self._plan.cache_time(needed, slots.count, slots.capacity))
        slots.make_space(time)

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
        elif self._plan.is_batch and (slots.table.limits - slots.table.counts)[live].max() > time:
            free -= next_lower(self._plan.slots, slots.count)
        live_slots = np.flatnonzero(live)
        for sampling, chosen in by_sampling(slots.jobs).items():
            # Temperature and cuts are part of the compiled program, so a round has a single distribution.
            is_sampling = np.zeros(slots.count, bool)
            is_sampling[live_slots[chosen]] = True
            paused = len(live_slots) - len(chosen)
            # Below the number of slots that sample, or the round would end before its first token.
            enough = np.clip(slots.count - free - paused, 0, len(chosen) - 1).astype(np.int32)
            options = RoundOptions(sampling, self._stop_ids, time, self._recording.under(sampling))
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


def _padded(
    runs: Sequence[np.ndarray], count: int, time: int
) -> tuple[Int[np.ndarray, "rows time"], Bool[np.ndarray, "rows time"]]:
    """Runs of tokens as `count` rows, right-padded to `time`, and the rows' mask."""
    # Rows without a run repeat one: the scores of a row are those after its last token, so it needs a token.
    rows = [*itertools.islice(itertools.cycle(runs), count)]
    mask = np.arange(time) < np.array([len(row) for row in rows])[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask
