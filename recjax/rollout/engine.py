"""Samples completions in slots: requests may arrive at any time, and each round returns the completions that ended."""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from recjax.models.decoder import Decoder
from recjax.models.placement import moved_params, on_host
from recjax.models.unrolling import made_for_sampling, unrolled_arrays
from recjax.rollout import capacity, decoding
from recjax.rollout.capacity import FEWEST_CONTINUED, filled_up, first_enough, power_of_two
from recjax.rollout.requests import (
    Admitted,
    Prefilled,
    Request,
    Sampled,
    Started,
    Weights,
    by_sampling,
    check_requests,
    padded,
    selected,
)
from recjax.rollout.sampling_mesh import sampling_mesh
from recjax.rollout.slots import Slots


class Engine:
    """Slots with a growing cache, in which completions are sampled a round of tokens at a time.

    A completion depends only on the weights and its request, not on its slot, the time or other requests. A batch that
    has the engine for itself uses fewer slots as its completions end. Other requests keep the number of slots. If a
    free slot holds the beginning of a later request's prefix, the request takes this slot and runs only the new tokens.
    """

    def __init__(self, decoder: Decoder, stop_ids: tuple[int, ...], *, slots: int | None, prefix_time: int):
        """Creates an engine without weights.

        Args:
            stop_ids: tokens that end a completion and belong to it.
            slots: completions that are sampled together; None: as many as memory holds, at most the number of requests.
            prefix_time: tokens to which prefixes are padded; longer prefixes are padded to a power of two.
        """
        self._decoder, self._stop_ids = made_for_sampling(decoder), tuple(stop_ids)
        self._asked, self._prefix_time = slots, prefix_time
        self._mesh = sampling_mesh(self._decoder)
        self._stacked, self._params, self._version, self._weights = None, None, 0, 0
        self._numbers = itertools.count()
        self._queue: deque[Admitted] = deque()
        self._prefilled: Prefilled | None = None
        self._finished: dict[int, Sampled] = {}
        self._slots = Slots(self._decoder.cache_dtype)
        self._sizes, self._planned = [0], 0  # possible numbers of slots, and the requests that they were planned for
        self._longest: int | None = None  # token limit of a batch with one distribution and no other requests

    def replace_weights(self, params: dict, version: int) -> None:
        """Moves weights, stacked by layer, to the sampling devices and uses them for all tokens sampled from here on.

        Unfinished completions continue with the keys and values that they have.
        """
        self._stacked, self._params = moved_params(self._mesh, params), None
        self._version, self._weights = version, self._weights + 1
        self._slots.columns.current[:] = False

    def admit(self, requests: Sequence[Request], group_size: int | None = None) -> list[int]:
        """Adds requests and returns their tickets; requests without a free slot wait in line.

        Equal prefixes in one call are run once.

        Args:
            group_size: number of consecutive requests that share a prefix, in a batch whose shape recurs with other
                prompts. Programs fit the batch exactly; numbers of other requests are rounded up to powers of two.
        Raises:
            ValueError: a request cannot be sampled, or a group has no common prefix.
        """
        requests = list(requests)
        check_requests(requests, group_size, self._decoder.config.vocab_size)
        tickets = [next(self._numbers) for _ in requests]
        if requests:
            self._queue.append(Admitted(requests, tickets, group_size))
        return tickets

    def cancel(self, tickets: Collection[int]) -> None:
        """Frees the slots of requests and their places in line; the engine returns no completions for these tickets.

        Requests of a batch of groups that waits in line keep their places.
        """
        gone = {*tickets}
        self._slots.free(gone)
        self._finished = {ticket: done for ticket, done in self._finished.items() if ticket not in gone}
        if self._prefilled:
            self._prefilled = self._prefilled.without(gone)
        self._queue = deque(left for admitted in self._queue if (left := admitted.without(gone)).requests)

    def so_far(self, tickets: Collection[int]) -> dict[int, Sampled]:
        """Tokens that unfinished requests in slots have sampled, by ticket."""
        return self._slots.so_far({*tickets})

    def round(self) -> dict[int, Sampled]:
        """Fills free slots and decodes one round of tokens in all slots; returns the completions that ended, by ticket.

        Raises:
            ValueError: the engine has no weights yet.
        """
        if self._stacked is None:
            raise ValueError("the engine has no weights; call replace_weights before the first round")
        with jax.set_mesh(self._mesh):
            self._fill_slots()
            if self._slots.live.any():
                self._fit()
                self._decode()
        finished, self._finished = self._finished, {}
        return finished

    def drain(self, newer: Callable[[], Weights | None] | None = None) -> dict[int, Sampled]:
        """Runs rounds until all requests are finished; returns all completions, by ticket.

        Args:
            newer: function called before each round; returns weights that have arrived since the last call, or None.
        """
        finished = {}
        while self._queue or self._prefilled or self._slots.live.any():
            if newer is not None and (weights := newer()) is not None:
                self.replace_weights(weights.params, weights.version)
            finished |= self.round()
        return finished

    def _weights_in_use(self) -> dict:
        """The weights in the layout that the decoder takes."""
        if self._params is None:
            self._params = self._stacked
            if self._decoder.unrolled:
                self._params = unrolled_arrays(self._decoder.config, self._stacked)
        return self._params

    # --- From the line into slots.

    def _fill_slots(self) -> None:
        """Gives free slots to waiting requests until either runs out."""
        while True:
            if self._prefilled is None:
                live = int(self._slots.live.sum())
                if self._queue and self._queue[0].group_size is None and live + self._waiting() > self._planned:
                    self._plan(live + self._waiting(), None)
                if not self._queue or (live and live >= self._sizes[-1]):
                    return
                self._begin_next(self._sizes[-1] - live)
            if self._prefilled is not None and not self._seat(self._prefilled):
                return

    def _waiting(self) -> int:
        prefilled = len(self._prefilled.rows) if self._prefilled else 0
        return prefilled + sum(len(admitted.tickets) for admitted in self._queue)

    def _plan(self, count: int, group_size: int | None) -> None:
        """Decides how many slots to use for `count` requests, waiting or in slots."""
        self._planned = filled_up(count // group_size) * group_size if group_size else power_of_two(count)
        if self._asked is None:
            most = capacity.slots_that_fit(
                self._decoder,
                prompts=self._planned // (group_size or 1),
                prompt_tokens=self._prefix_time,
                rows=self._planned,
                completion_tokens=max(request.limit for admitted in self._queue for request in admitted.requests),
            )
        else:
            most = self._planned if group_size and self._asked >= count else self._asked
        self._sizes = capacity.slot_numbers(most)

    def _begin_next(self, room: int) -> None:
        """Samples the first tokens of the next requests in line, and of as many later ones as `room` allows."""
        idle, group_size = not self._slots.live.any(), self._queue[0].group_size
        if group_size is None:
            self._longest = None
            self._begin_singles(room)
            return
        if idle:
            if self._slots.count:
                self._slots = Slots(self._decoder.cache_dtype)
            self._plan(len(self._queue[0].requests), group_size)
        self._planned = 0  # so that other requests make their own plan
        requests, tickets, _ = self._queue.popleft()
        by_itself = idle and len({request.sampling for request in requests}) == 1
        self._longest = max(request.limit for request in requests) if by_itself else None
        if by_itself and self._longest <= 1 + self._round_time() and self._sizes[-1] >= len(requests):
            self._whole_batch(requests, tickets, group_size)
            return
        prefixes = [request.prefix for request in requests[::group_size]]
        self._prefill(
            requests, tickets, np.arange(len(requests)) // group_size, prefixes, group_size if by_itself else None
        )

    def _begin_singles(self, room: int) -> None:
        """Starts single requests: continues slots that hold a prefix's beginning, and runs other prefixes once each."""
        requests, tickets, _ = self._queue.popleft()
        while self._queue and self._queue[0].group_size is None:
            if len(requests) + len(self._queue[0].requests) > room:
                break
            more = self._queue.popleft()
            requests, tickets = requests + more.requests, tickets + more.tickets
        if found := self._slots.continuations(requests):
            places = list(found)
            self._go_on(np.array(list(found.values()), np.int32), *selected(places, requests, tickets))
            requests, tickets = selected([x for x in range(len(requests)) if x not in found], requests, tickets)
        if requests:
            prefixes = {request.prefix.tobytes(): request.prefix for request in requests}
            numbers = {prefix: number for number, prefix in enumerate(prefixes)}
            prompts = np.array([numbers[request.prefix.tobytes()] for request in requests])
            self._prefill(requests, tickets, prompts, list(prefixes.values()), None)

    def _prefill(
        self,
        requests: list[Request],
        tickets: list[int],
        prompts: Int[np.ndarray, " requests"],
        prefixes: list[np.ndarray],
        group_size: int | None,
    ) -> None:
        """Runs prefixes and samples the first token of each completion; unfinished completions then wait for slots."""
        asked, mask = self._padded_prompts(prefixes)
        cache, scores = decoding.prefill(self._weights_in_use(), asked, mask, decoder=self._decoder)
        started = self._first_tokens(scores, prompts, requests, tickets)
        ended = self._ended(started)
        for row in np.flatnonzero(ended):
            one, truncated = slice(row, row + 1), bool(started.tokens[row] not in self._stop_ids)
            done = Sampled(started.tokens[one], started.logprobs[one], np.full(1, self._version, np.int32), truncated)
            self._finished[tickets[row]] = done
        if not ended.all():
            rows, lengths = np.flatnonzero(~ended), mask.sum(-1, dtype=np.int32)
            waiting = started.part(rows), rows, prompts[rows]
            self._prefilled = Prefilled(*waiting, cache, lengths, group_size, self._weights)

    def _padded_prompts(self, prefixes: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Prompts as a right-padded batch, and its mask; prompts repeat to fill rows that devices or programs need."""
        longest, count = max(map(len, prefixes)), len(prefixes)
        filled = filled_up(count if self._longest else power_of_two(count))
        time = self._prefix_time if longest <= self._prefix_time else power_of_two(longest)
        return padded([prefixes[place % count] for place in range(filled)], time)

    def _first_tokens(
        self, scores: Array, prompts: Int[np.ndarray, " requests"], requests: list[Request], tickets: list[int]
    ) -> Started:
        tokens, logprobs = np.zeros(len(requests), np.int32), np.zeros(len(requests), np.float32)
        prompts, keys = prompts.astype(np.int32), np.stack([request.key for request in requests])
        for sampling, rows in by_sampling(requests).items():
            count = len(rows)
            asked = rows if self._longest else rows[np.arange(power_of_two(count)) % count]
            options = {"sampling": sampling, "chunk": self._sizes[-1]}
            found = on_host(decoding.first_tokens(scores, prompts[asked], keys[asked], **options))
            tokens[rows], logprobs[rows] = (column[:count] for column in found)
        return Started(requests, tickets, tokens, logprobs, self._version)

    def _ended(self, started: Started) -> Bool[np.ndarray, " requests"]:
        """True for completions that ended with their first token."""
        return np.isin(started.tokens, self._stop_ids) | np.array([request.limit == 1 for request in started.requests])

    def _seat(self, waiting: Prefilled) -> bool:
        """Moves waiting completions into free slots; returns True if all of them found a slot."""
        started, rows, prompts, cache, lengths, group_size, weights = waiting
        current, count = weights == self._weights, first_enough(self._sizes, int(self._slots.live.sum()) + len(rows))
        if self._slots.memory is None and group_size and count == len(lengths) * group_size:
            # With a slot for every row, each group reads a single copy of its prompt.
            self._slots.open_for(cache, lengths, group_size, self._cache_time(0, count))
            self._slots.begin(rows, started, current)
            seated = len(rows)
        else:
            self._slots.make(count, cache, self._cache_time(0, count))
            seated = self._slots.put(started, cache, prompts, lengths[prompts], current)
        left = np.arange(seated, len(rows))
        rest = waiting._replace(started=started.part(left), rows=rows[left], prompts=prompts[left])
        self._prefilled = rest if len(left) else None
        return not len(left)

    def _go_on(self, places: Int[np.ndarray, " requests"], requests: list[Request], tickets: list[int]) -> None:
        """Continues slots that hold beginnings of prefixes: runs the remaining tokens, then samples one token each."""
        slots, held = self._slots, self._slots.held[places]
        rest = [request.prefix[start:] for request, start in zip(requests, held, strict=True)]
        # Padded to few shapes, which take seconds to compile: agents continue one or two at once, with few tokens.
        filled = np.arange(filled_up(power_of_two(max(len(rest), FEWEST_CONTINUED)))) % len(rest)
        tokens, mask = padded([rest[place] for place in filled], power_of_two(max(capacity.ROUND, *map(len, rest))))
        lengths, cached = slots.columns.lengths[places], slots.columns.cached[places]
        if (needed := int(cached.max()) + tokens.shape[1]) > slots.time:
            slots.resize(self._cache_time(needed, slots.count))
        at = places[filled], tokens, mask, lengths[filled], cached[filled]
        slots.memory, scores = decoding.extend(self._weights_in_use(), slots.memory, *at, decoder=self._decoder)
        slots.columns.cached[places] += [len(tokens) for tokens in rest]
        started = self._first_tokens(scores, np.arange(len(places)), requests, tickets)
        slots.begin(places, started, current=True)
        self._finished |= slots.finish(places[self._ended(started)], self._stop_ids)

    # --- Rounds.

    def _whole_batch(self, requests: list[Request], tickets: list[int], group_size: int) -> None:
        """Samples a batch that ends within its first tokens and one round, without using slots."""
        count, time = len(requests), self._round_time()
        asked, mask = self._padded_prompts([request.prefix for request in requests[::group_size]])
        keys = np.zeros((len(asked) * group_size, len(requests[0].key)), np.uint32)
        limits = np.zeros(len(keys), np.int32)  # 0: padding rows
        keys[:count] = np.concatenate([request.key for request in requests]).reshape(count, -1)
        limits[:count] = [request.limit for request in requests]
        options = {"sampling": requests[0].sampling, "stop_ids": self._stop_ids, "round_time": time}
        options |= {"decoder": self._decoder, "group_size": group_size}
        sampled = decoding.whole_batch(self._weights_in_use(), asked, mask, keys, limits, **options)
        tokens, logprobs, counts = (column[:count] for column in on_host(sampled))
        versions = np.full(1 + time, self._version, np.int32)
        truncated = ~np.isin(tokens[np.arange(count), counts - 1], self._stop_ids)
        for row, (ticket, kept, cut) in enumerate(zip(tickets, counts.tolist(), truncated.tolist(), strict=True)):
            self._finished[ticket] = Sampled(tokens[row, :kept], logprobs[row, :kept], versions[:kept], cut)

    def _cache_time(self, needed: int, slots: int) -> int:
        """Tokens of room per slot for `slots` slots, at least `needed`; takes few values, to compile few programs."""
        if self._longest:
            return capacity.cache_length(self._longest, needed, slots, self._sizes[-1])
        return power_of_two(max(needed, capacity.SHORTEST_CACHE))

    def _round_time(self) -> int:
        return capacity.round_time(self._longest) if self._longest else capacity.ROUND

    def _fit(self) -> None:
        """Makes room for a round in every slot, and reduces the slots of a batch to the number that it still needs."""
        slots, live, time = self._slots, self._slots.live, self._round_time()
        if not self._longest:
            time *= 2  # the round of another distribution also writes behind slots that have had their own round
        kept = live if self._longest else live | slots.columns.current
        needed = int(slots.columns.cached[kept].max()) + time
        # Halves step by step, so that each number of slots is reached by one compiled program.
        while self._longest and first_enough(self._sizes, slots.fewest + self._waiting()) < slots.count:
            fewer = capacity.next_lower(self._sizes, slots.count)
            slots.change_number(fewer, self._cache_time(needed, fewer))
        length = self._cache_time(needed, slots.count)
        if not self._longest and slots.time // 4 < length < slots.time:
            length = slots.time
        slots.resize(length)
        slots.leave_room(time)

    def _decode(self) -> None:
        """Decodes one round for each distribution among live slots; slots of other distributions pause during it.

        A round ends early once enough slots are free for waiting requests, or for a batch to continue with fewer slots.
        """
        slots, live, time = self._slots, self._slots.live, self._round_time()
        free = slots.count
        if self._waiting():
            free = -(-slots.count // 8)
        elif self._longest and (slots.columns.limits - slots.columns.counts)[live].max() > time:
            free -= capacity.next_lower(self._sizes, slots.count)
        slots.make_room(int(slots.columns.counts[live].max()) + time)
        places = np.flatnonzero(live)
        for sampling, rows in by_sampling([slots.columns.requests[place] for place in places]).items():
            mine = np.zeros(slots.count, bool)
            mine[places[rows]] = True
            enough = np.clip(slots.count - free - (len(places) - len(rows)), 0, len(rows) - 1).astype(np.int32)
            options = {"sampling": sampling, "stop_ids": self._stop_ids, "round_time": time}
            arguments = self._weights_in_use(), slots.memory, slots.rows(mine), enough
            slots.memory, state = decoding.decode(*arguments, decoder=self._decoder, **options)
            state = on_host(state)
            slots.record(mine, state, self._version)
            self._finished |= slots.finish(np.flatnonzero(mine & ~state.live), self._stop_ids)
