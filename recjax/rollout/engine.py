"""Samples completions in slots: requests may arrive at any time, and each round returns the completions that ended."""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from recjax.models.decoder import Decoder
from recjax.models.experts import unrecorded
from recjax.models.placement import moved_params, on_host
from recjax.models.unrolling import made_for_sampling, unrolled_arrays
from recjax.rollout import decoding, plan
from recjax.rollout.decoding import SlotContents
from recjax.rollout.plan import EnginePlan, first_enough, next_lower, plan_for, power_of_two, sampling_mesh
from recjax.rollout.requests import Admitted, Begun, EngineJob, Request, Sampled, Weights, by_sampling, check_requests
from recjax.rollout.slots import Slots


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
        kept_ids: int = 0,
    ):
        """Creates an engine without weights.

        Args:
            stop_ids: tokens that end a completion and belong to it.
            slots: completions that are sampled together; None: as many as memory holds, at most the number of requests.
            prefix_time: tokens to which prefixes are padded; longer prefixes are padded to a power of two.
            newer: called before each round; returns weights that have arrived since its last call, or None. None: no
                updates.
            kept_ids: largest set of possible tokens to record as ids; see `recjax.models.logprobs.kept_tokens`.
        """
        self._decoder, self._stop_ids = made_for_sampling(decoder), tuple(stop_ids)
        self._most_slots, self._prefix_time = slots, prefix_time
        self._mesh, self._newer, self._kept_ids = sampling_mesh(self._decoder), newer, kept_ids
        self._stacked, self._params, self._version = None, None, 0
        self._numbers = itertools.count()
        self._line: deque[Admitted] = deque()
        self._begun: Begun | None = None
        self._finished: dict[int, Sampled] = {}
        self._slots = Slots(self._decoder.cache_dtype)
        self._plan = EnginePlan(0, prefix_time, [0], 0, ())

    def replace_weights(self, params: dict, version: int) -> None:
        """Moves weights, stacked by layer, to the sampling devices and uses them for all tokens sampled from here on.

        Unfinished completions continue with the keys and values that they have.
        """
        self._stacked, self._params, self._version = moved_params(self._mesh, params), None, version
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
            ValueError: a request cannot be sampled, or a group has no common prefix.
        """
        requests = list(requests)
        check_requests(requests, group_size, self._decoder.config.vocab_size)
        jobs = [EngineJob(request, next(self._numbers)) for request in requests]
        if group_size and len({request.sampling for request in requests}) == 1:
            self._line.append(Admitted(jobs, group_size))
        else:
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
            left = [job for job in self._begun.jobs if job.ticket not in gone]
            self._begun = self._begun._replace(jobs=left) if left else None
        self._line = deque(one for one in self._line if one.group_size or one.jobs[0].ticket not in gone)

    def so_far(self, tickets: Collection[int]) -> dict[int, Sampled]:
        """Tokens that unfinished requests in slots have sampled, by ticket."""
        return {job.ticket: job.sampled(self._stop_ids) for job in self._slots.jobs if job.ticket in tickets}

    def round(self) -> dict[int, Sampled]:
        """Fills free slots and decodes one round of tokens in all slots; returns the completions that ended, by ticket.

        Raises:
            ValueError: the engine has no weights yet.
        """
        if self._newer is not None and (weights := self._newer()) is not None:
            self.replace_weights(weights.params, weights.version)
        if self._stacked is None:
            raise ValueError("the engine has no weights; call replace_weights before the first round")
        with jax.set_mesh(self._mesh):
            if self._params is None:
                self._params = self._stacked
                if self._decoder.unrolled:
                    self._params = unrolled_arrays(self._decoder.config, self._stacked)
            self._fill_slots()
            if self._slots.live.any():
                self._fit()
                self._decode()
        finished, self._finished = self._finished, {}
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
            if not self._line or (live and (self._plan.is_of_batch or self._line[0].group_size)):
                return
            self._make_plan(live)
            if (room := self._plan.slots[-1] - live) <= 0:
                return
            jobs, group_size = self._line.popleft()
            while not group_size and len(jobs) < room and self._line and not self._line[0].group_size:
                jobs = jobs + self._line.popleft().jobs
            self._slots.continue_slots(jobs)
            for part in ([job for job in jobs if job.slot >= 0], [job for job in jobs if job.slot < 0]):
                if part:
                    self._begin(part, group_size)

    def _waiting(self) -> int:
        """The number of requests that wait for slots of the current plan."""
        begun = len(self._begun.jobs) if self._begun else 0
        return begun if self._plan.is_of_batch else begun + sum(len(admitted.jobs) for admitted in self._line)

    def _make_plan(self, live: int) -> None:
        """Plans for the next batch in line, or for all requests if they are more than the plan is for."""
        jobs, group_size = self._line[0]
        if group_size:
            self._slots, count = Slots(self._decoder.cache_dtype), len(jobs)
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
        tokens, mask, held = self._to_run(jobs, group_size)
        cache, scores = decoding.prefill(self._params, tokens, mask, held, decoder=self._decoder)
        self._sample_first_tokens(scores, jobs)
        started = []
        for job in jobs:
            done = job.sampled(self._stop_ids)
            if done.truncated and job.request.limit > 1:
                started.append(job)
            else:
                self._finished[job.ticket] = done
        if started:
            self._begun = Begun(started, cache, mask.sum(-1, dtype=np.int32), held is not None, group_size)
            self._seat()

    def _to_run(
        self, jobs: list[EngineJob], group_size: int | None
    ) -> tuple[Int[np.ndarray, "rows time"], Bool[np.ndarray, "rows time"], SlotContents | None]:
        """Right-padded tokens, their mask, and the contents of slots before the tokens; sets each job's row."""
        slots, held = np.array([job.slot for job in jobs], np.int32), None
        if slots[0] < 0:
            # Equal prefixes are run once.
            prefixes = [job.request.prefix for job in jobs]
            names = [place // group_size if group_size else one.tobytes() for place, one in enumerate(prefixes)]
            runs = dict(zip(names, prefixes, strict=True))
            count, time = self._plan.rows(len(runs)), self._plan.prompt_time(max(map(len, runs.values())))
        else:
            names, starts = range(len(jobs)), self._slots.held[slots]
            runs = {name: jobs[name].request.prefix[starts[name] :] for name in names}
            # Padded to few shapes, which take seconds to compile: agents continue one or two at once, with few tokens.
            count = self._plan.rows(max(len(runs), plan.FEWEST_CONTINUED))
            time = power_of_two(max(plan.ROUND, *map(len, runs.values())))
            if (needed := int(self._slots.columns.cached[slots].max()) + time) > self._slots.time:
                self._slots.resize(self._plan.cache_time(needed, self._slots.count))
            held = self._slots.contents(slots[np.arange(count) % len(slots)])
        numbers = {name: number for number, name in enumerate(runs)}
        for place, (job, name) in enumerate(zip(jobs, names, strict=True)):
            job.row, job.slot = numbers[name], place if held is None else job.slot
        rows = [*itertools.islice(itertools.cycle(runs.values()), count)]
        mask = np.arange(time) < np.array([len(row) for row in rows])[:, None]
        tokens = np.zeros(mask.shape, np.int32)
        tokens[mask] = np.concatenate(rows)
        return tokens, mask, held

    def _sample_first_tokens(self, scores: Array, jobs: list[EngineJob]) -> None:
        """Samples the first token of each completion; in memory are the scores of as many as there are slots."""
        keys, rows = np.stack([job.request.key for job in jobs]), np.array([job.row for job in jobs], np.int32)
        most = self._plan.slots[-1]
        for sampling, places in by_sampling(jobs).items():
            size = min(most, self._plan.rows(len(places)))
            for some in np.split(places, range(most, len(places), most)):
                at = some[np.arange(size) % len(some)]
                options = {"sampling": sampling, "kept_ids": self._kept_ids}
                sampled = on_host(decoding.first_tokens(scores, rows[at], keys[at], **options))
                recorded = sampled[2] | unrecorded(self._decoder, size)
                columns = *sampled[:2], np.full(size, self._version, np.int32), recorded
                for number, place in enumerate(some):
                    jobs[place].rounds = [jax.tree.map(lambda x, number=number: x[number : number + 1], columns)]

    def _seat(self) -> bool:
        """Moves completions that have begun into slots; returns True if each found a slot."""
        begun, slots = self._begun, self._slots
        count = first_enough(self._plan.slots, int(slots.live.sum()) + len(begun.jobs))
        left = begun.jobs[slots.seat(begun, count, self._plan.cache_time(0, count)) :]
        self._begun = begun._replace(jobs=left) if left else None
        return not left

    # --- Rounds.

    def _fit(self) -> None:
        """Makes room for a round in every slot, and reduces the slots of a batch to the number that it still needs."""
        slots, kept, time = self._slots, self._slots.live, self._plan.round_time
        if not self._plan.is_of_batch:
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
        slots, live, time = self._slots, self._slots.live, self._plan.round_time
        free = slots.count
        if self._waiting():
            free = -(-slots.count // 8)
        elif self._plan.is_of_batch and (slots.columns.limits - slots.columns.counts)[live].max() > time:
            free -= next_lower(self._plan.slots, slots.count)
        places = np.flatnonzero(live)
        for sampling, rows in by_sampling(slots.jobs).items():
            mine = np.zeros(slots.count, bool)
            mine[places[rows]] = True
            enough = np.clip(slots.count - free - (len(places) - len(rows)), 0, len(rows) - 1).astype(np.int32)
            options = {"sampling": sampling, "stop_ids": self._stop_ids, "round_time": time}
            options |= {"kept_ids": self._kept_ids}
            arguments = self._params, slots.memory, slots.rows(mine), enough
            slots.memory, state = decoding.decode(*arguments, decoder=self._decoder, **options)
            state = on_host(state)
            slots.record(mine, state, self._version)
            self._finished |= slots.finish(np.flatnonzero(mine & ~state.live), self._stop_ids)
