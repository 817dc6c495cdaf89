"""Samples completions in slots: requests come in at any time, finished completions come out."""

import functools
import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from recjax.models.decoder import Decoder
from recjax.models.logprobs import Sampling
from recjax.models.placement import on_host, put_rows
from recjax.models.unrolling import unrolled_on_cpu, unrolled_params
from recjax.rollout import capacity, decoding
from recjax.rollout.capacity import at_least, filled_up, power_of_two
from recjax.rollout.decoding import Memory
from recjax.rollout.slots import Request, Sampled, continuations, free_slots, taken, with_room

MOST_WRITTEN_OUT = 32  # layers that are unrolled on the CPU

_unrolled = jax.jit(unrolled_params, static_argnums=0)


class _Admitted(NamedTuple):
    """Requests of one `admit` and their tickets. `group_size` is None where they are no batch of groups."""

    requests: list[Request]
    tickets: list[int]
    group_size: int | None


class _Prefilled(NamedTuple):
    """Requests whose prompts have been run and whose first tokens are sampled.

    Attributes:
        rows: places of those that still wait for a slot.
        requests, tickets, prompts, tokens, logprobs: all of them, their rows of `cache`, and their first tokens.
        cache, lengths: keys and values of the prompts, and the prompts' lengths.
        group_size: consecutive requests of a prompt, where they are a batch that has the engine for itself.
        version, weights: what ran the prompts.
    """

    rows: Int[np.ndarray, " waiting"]
    requests: list[Request]
    tickets: list[int]
    prompts: Int[np.ndarray, " requests"]
    tokens: Int[np.ndarray, " requests"]
    logprobs: Float[np.ndarray, " requests"]
    cache: tuple
    lengths: Int[np.ndarray, " prompts"]
    group_size: int | None
    version: int
    weights: int


class Engine:
    """Slots with a growing cache, in which completions are sampled a round at a time.

    A completion's tokens depend on nothing but the weights, its prefix, key, limit and distribution: not on where or
    when it is sampled, nor beside what. Batches of groups leave their slots as they end, and the rest is gathered
    into fewer; other requests keep theirs, and what a slot holds stays until another request takes it, so that one
    whose prefix goes on from there runs only the rest of it.
    """

    def __init__(self, decoder: Decoder, stop_ids: tuple[int, ...], *, slots: int | None, prefix_time: int):
        """Makes an engine without weights.

        Args:
            stop_ids: tokens that end a completion; the one sampled is part of it.
            slots: completions that are sampled at one time; None: as many as memory holds, at most what is asked.
            prefix_time: tokens that prefixes are padded to; longer ones to a power of two.
        """
        self._decoder, self._stop_ids = unrolled_on_cpu(decoder, MOST_WRITTEN_OUT), tuple(stop_ids)
        self._asked, self._prefix_time = slots, prefix_time
        self._stacked, self._params, self._version, self._weights = None, None, 0, 0
        self._numbers = itertools.count()
        self._queue: deque[_Admitted] = deque()
        self._prefilled: _Prefilled | None = None
        self._finished: dict[int, Sampled] = {}
        self._slots, self._memory = free_slots(0), None
        self._sizes, self._planned = [0], 0  # numbers of slots, and the requests that they are for
        self._longest: int | None = None  # the limit of a batch that has the engine for itself

    def replace_weights(self, params: dict, version: int) -> None:
        """Takes weights, stacked by layer, for all tokens that are sampled from now on.

        Completions under way go on from the keys and values that they have.
        """
        self._stacked, self._params = params, None
        self._version, self._weights = version, self._weights + 1
        self._slots.current[:] = False

    def admit(self, requests: Sequence[Request], group_size: int | None = None) -> list[int]:
        """Takes requests and returns their tickets; those for which there is no slot wait in line.

        Equal prefixes are run once.

        Args:
            group_size: the requests are a batch that comes again with other prompts: so many consecutive ones share a
                prefix. Programs then fit its numbers exactly; otherwise these are rounded up to powers of two.
        Raises:
            ValueError: a request that cannot be sampled, or groups that are none.
        """
        requests = list(requests)
        self._check(requests, group_size)
        tickets = [next(self._numbers) for _ in requests]
        if requests:
            self._queue.append(_Admitted(requests, tickets, group_size))
        return tickets

    def round(self) -> dict[int, Sampled]:
        """Decodes a round of tokens in all slots, after filling free ones; returns what has ended, by ticket.

        Raises:
            ValueError: there are no weights yet.
        """
        if self._stacked is None:
            raise ValueError("the engine has no weights; call replace_weights before the first round")
        self._fill_slots()
        if self._slots.live.any():
            self._fit_memory()
            self._decode()
        finished, self._finished = self._finished, {}
        return finished

    def drain(self) -> dict[int, Sampled]:
        """Rounds until nothing is left; returns all that has ended, by ticket."""
        finished = {}
        while self._queue or self._prefilled or self._slots.live.any():
            finished |= self.round()
        return finished

    def _unrolled(self) -> dict:
        """The weights as the decoder takes them, made when they are first asked for."""
        if self._params is None:
            self._params = _unrolled(self._decoder.config, self._stacked) if self._decoder.unrolled else self._stacked
        return self._params

    def _check(self, requests: list[Request], group_size: int | None) -> None:
        if group_size is not None:
            leaders = [requests[place - place % group_size] for place in range(len(requests))]
            same = (a.prefix is b.prefix or np.array_equal(a.prefix, b.prefix) for a, b in zip(requests, leaders))
            if len(requests) % group_size or not all(same):
                raise ValueError(
                    f"{len(requests)} requests are not groups of {group_size} with one prefix each; leave group_size"
                    " out, or give whole groups one after the other"
                )
        vocabulary = self._decoder.config.vocab_size
        for place, request in enumerate(requests):
            if request.limit < 1:
                raise ValueError(f"request {place}: limit = {request.limit}: takes 1 or more")
            if group_size is not None and place % group_size:
                continue
            if not len(request.prefix):
                raise ValueError(f"request {place}: its prefix is empty; give at least one token, such as the BOS")
            if request.prefix.min() < 0 or request.prefix.max() >= vocabulary:
                wrong = next(int(token) for token in request.prefix if not 0 <= token < vocabulary)
                raise ValueError(
                    f"request {place}: token {wrong} is outside the vocabulary of {vocabulary} tokens; tokenize with"
                    " the policy's own tokenizer"
                )

    # --- From the line into slots.

    def _fill_slots(self) -> None:
        """Gives free slots to what waits, as long as there are both."""
        while True:
            if self._prefilled is None:
                live = int(self._slots.live.sum())
                if self._queue and self._queue[0].group_size is None and live + self._waiting() > self._planned:
                    self._plan(live + self._waiting(), None)
                room = self._sizes[-1] - live
                if not self._queue or (live and room <= 0):
                    return
                self._begin_next(room)
            if self._prefilled is not None and not self._seat(self._prefilled):
                return

    def _waiting(self) -> int:
        prefilled = len(self._prefilled.tickets) if self._prefilled else 0
        return prefilled + sum(len(admitted.tickets) for admitted in self._queue)

    def _plan(self, rows: int, group_size: int | None) -> None:
        """Decides on numbers of slots for so many requests, which are in line or under way."""
        admitted = [request for admitted in self._queue for request in admitted.requests]
        limit = max(request.limit for request in admitted)
        self._planned = power_of_two(rows) if group_size is None else filled_up(rows // group_size) * group_size
        if self._asked is None:
            most = capacity.slots_that_fit(
                self._decoder,
                capacity.free_bytes(),
                prompts=self._planned // (group_size or 1),
                prompt_tokens=self._prefix_time,
                rows=self._planned,
                completion_tokens=limit,
            )
        else:
            most = self._planned if group_size and self._asked >= rows else self._asked
        self._sizes = capacity.slot_numbers(most)

    def _begin_next(self, room: int) -> None:
        """The first tokens of what is next in line; of several single requests, of those that there is room for."""
        idle, group_size = not self._slots.live.any(), self._queue[0].group_size
        if group_size is not None and idle:
            self._slots, self._memory = free_slots(0), None
            self._plan(len(self._queue[0].requests), group_size)
        requests, tickets, _ = self._queue.popleft()
        if group_size is not None:
            self._longest = max(request.limit for request in requests) if idle else None
            if idle and self._longest <= capacity.ROUND + 1 and self._sizes[-1] >= len(requests):
                if len({request.sampling for request in requests}) == 1:
                    return self._whole_batch(requests, tickets, group_size)
            places = np.arange(len(requests)) // group_size
            prefixes = [request.prefix for request in requests[::group_size]]
            self._prefill(requests, tickets, places, prefixes, group_size if idle else None)
            return
        self._longest = None
        while self._queue and self._queue[0].group_size is None:
            if len(requests) + len(self._queue[0].requests) > room:
                break
            more = self._queue.popleft()
            requests, tickets = requests + more.requests, tickets + more.tickets
        if found := continuations(self._slots, requests):
            self._go_on({slot: (requests[place], tickets[place]) for place, slot in found.items()})
            kept = [place for place in range(len(requests)) if place not in found]
            requests, tickets = [requests[place] for place in kept], [tickets[place] for place in kept]
        if requests:
            prefixes = {request.prefix.tobytes(): request.prefix for request in requests}
            numbers = {prefix: number for number, prefix in enumerate(prefixes)}
            places = np.array([numbers[request.prefix.tobytes()] for request in requests])
            self._prefill(requests, tickets, places, list(prefixes.values()))

    def _prefill(
        self,
        requests: list[Request],
        tickets: list[int],
        prompts: np.ndarray,
        prefixes: list[np.ndarray],
        group_size: int | None = None,
    ) -> None:
        """Runs prefixes and samples every completion's first token; those that go on wait for slots."""
        asked, mask = self._padded_prompts(prefixes)
        cache, scores = decoding.prefill(self._unrolled(), *put_rows((asked, mask)), decoder=self._decoder)
        tokens, logprobs = self._first_tokens(scores, prompts, requests)
        ended = np.isin(tokens, self._stop_ids) | np.array([request.limit == 1 for request in requests])
        for row in np.flatnonzero(ended):
            one, truncated = slice(row, row + 1), tokens[row] not in self._stop_ids
            version = np.full(1, self._version, np.int32)
            self._finished[tickets[row]] = Sampled(tokens[one], logprobs[one], version, truncated)
        if not ended.all():
            self._prefilled = _Prefilled(
                rows=np.flatnonzero(~ended),
                requests=requests,
                tickets=tickets,
                prompts=prompts,
                tokens=tokens,
                logprobs=logprobs,
                cache=cache,
                lengths=mask.sum(-1, dtype=np.int32),
                group_size=group_size,
                version=self._version,
                weights=self._weights,
            )

    def _padded_prompts(self, prefixes: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Prompts as a right-padded batch with its mask; the first ones fill up what devices or programs need more."""
        longest, count = max(map(len, prefixes)), len(prefixes)
        filled = filled_up(count if self._longest else power_of_two(count))
        time = self._prefix_time if longest <= self._prefix_time else power_of_two(longest)
        return _padded([prefixes[place % count] for place in range(filled)], time)

    def _whole_batch(self, requests: list[Request], tickets: list[int], group_size: int) -> None:
        """Samples a batch that a single round is enough for: nothing of it stays in slots."""
        count, time = len(requests), self._round_time()
        asked, mask = self._padded_prompts([request.prefix for request in requests[::group_size]])
        keys = np.zeros((len(asked) * group_size, len(requests[0].key)), np.uint32)
        limits = np.zeros(len(keys), np.int32)  # 0: those that only fill up
        keys[:count] = np.concatenate([request.key for request in requests]).reshape(count, -1)
        limits[:count] = [request.limit for request in requests]
        options = {"sampling": requests[0].sampling, "stop_ids": self._stop_ids, "round_time": time}
        firsts = decoding.whole_batch(
            self._stacked, *put_rows((asked, mask)), keys, limits, decoder=self._decoder, group_size=group_size, **options
        )
        *first, state = on_host(firsts)
        tokens = np.concatenate([first[0][:, None], state.tokens], axis=1)
        logprobs = np.concatenate([first[1][:, None], state.logprobs], axis=1)
        versions, counts = np.full(1 + time, self._version, np.int32), 1 + state.counts
        ended = np.isin(tokens[np.arange(len(counts)), counts - 1], self._stop_ids).tolist()
        for row, (ticket, kept) in enumerate(zip(tickets, counts.tolist(), strict=False)):
            self._finished[ticket] = Sampled(tokens[row, :kept], logprobs[row, :kept], versions[:kept], not ended[row])

    def _first_tokens(
        self, scores: Array, prompts: np.ndarray, requests: list[Request]
    ) -> tuple[Int[np.ndarray, " requests"], Float[np.ndarray, " requests"]]:
        tokens, logprobs = np.zeros(len(requests), np.int32), np.zeros(len(requests), np.float32)
        prompts, keys = prompts.astype(np.int32), np.stack([request.key for request in requests])
        for sampling, rows in _by_sampling(requests, np.arange(len(requests))).items():
            count = len(rows)
            asked = rows if self._longest else rows[np.arange(power_of_two(count)) % count]
            options = {"sampling": sampling, "chunk": self._sizes[-1]}
            found = on_host(decoding.first_tokens(scores, prompts[asked], keys[asked], **options))
            tokens[rows], logprobs[rows] = (column[:count] for column in found)
        return tokens, logprobs

    def _seat(self, waiting: _Prefilled) -> bool:
        """Gives free slots to completions that have none; returns whether there were enough."""
        cache, rows = waiting.cache, waiting.rows
        size = at_least(self._sizes, int(self._slots.live.sum()) + len(rows))
        if self._memory is None and waiting.group_size and size == len(waiting.lengths) * waiting.group_size:
            # A slot for every row: groups read the one copy of their prompt that there is.
            self._slots = free_slots(size)
            self._slots.lengths[:] = np.repeat(waiting.lengths, waiting.group_size)
            self._memory = Memory(cache, decoding.empty(cache, rows=size, time=self._cache_time(0)))
            free = rows
        else:
            self._own_prompts(cache, max(size, len(self._slots.tickets)))
            free = np.flatnonzero(~self._slots.live)
            # Slots that hold the least are given away first.
            free = free[np.argsort(self._held_tokens()[free], kind="stable")][: len(rows)]
            rows = rows[: len(free)]
            if not len(free):
                return False
            places = np.zeros((2, len(self._slots.tickets)), np.int32)
            places[:, : len(free)] = free, waiting.prompts[rows]
            self._memory = decoding.put_prompts(self._memory, cache, places, np.int32(len(free)))
        self._slots.lengths[free], self._slots.cached[free] = waiting.lengths[waiting.prompts[rows]], 0
        self._slots.current[free] = waiting.weights == self._weights
        requests, tickets = ([column[row] for row in rows] for column in (waiting.requests, waiting.tickets))
        self._start(free, requests, tickets, waiting.tokens[rows], waiting.logprobs[rows], waiting.version)
        left = waiting.rows[len(rows) :]
        self._prefilled = waiting._replace(rows=left) if len(left) else None
        return not len(left)

    def _own_prompts(self, cache: tuple, size: int) -> None:
        """Makes memory for so many slots, each with a prompt of its own, as long as those in `cache`."""
        time = decoding.cache_time(cache)
        if self._memory is None:
            self._slots = free_slots(size)
            prompts = decoding.empty(cache, rows=size, time=time)
            self._memory = Memory(prompts, decoding.empty(cache, rows=size, time=self._cache_time(0)))
            return
        if size != decoding.cache_rows(self._memory.prompts):
            self._gather(np.arange(size) % len(self._slots.tickets), decoding.cache_time(self._memory.later))
        if time > decoding.cache_time(self._memory.prompts):
            self._memory = self._memory._replace(prompts=decoding.resized(self._memory.prompts, time=time))

    def _gather(self, order: Int[np.ndarray, " slots"], time: int) -> None:
        """Keeps the slots that `order` names; one that it names again becomes a free one."""
        self._slots, again = taken(self._slots, order), np.ones(len(order), bool)
        again[np.unique(order, return_index=True)[1]] = False
        self._slots.tickets[again], self._slots.current[again] = -1, False
        self._memory = decoding.gathered(self._memory, order.astype(np.int32), time=time)

    def _held_tokens(self) -> Int[np.ndarray, " slots"]:
        return np.where(self._slots.current, self._slots.lengths + self._slots.cached, 0)

    def _go_on(self, found: dict[int, tuple[Request, int]]) -> None:
        """Runs what slots do not hold of prefixes whose beginnings they do, and samples the first tokens."""
        slots, (requests, tickets) = np.array(list(found), np.int32), map(list, zip(*found.values(), strict=True))
        held, cached = self._held_tokens()[slots], self._slots.cached[slots]
        rest = [request.prefix[start:] for request, start in zip(requests, held, strict=True)]
        time = power_of_two(max(map(len, rest)))
        if (needed := int(cached.max()) + time) > decoding.cache_time(self._memory.later):
            later = decoding.resized(self._memory.later, time=self._cache_time(needed))
            self._memory = self._memory._replace(later=later)
        filled = np.arange(filled_up(power_of_two(len(slots)))) % len(slots)
        tokens, mask = _padded([rest[place] for place in filled], time)
        at = slots[filled], tokens, mask, self._slots.lengths[slots[filled]], cached[filled]
        self._memory, scores = decoding.extend(self._unrolled(), self._memory, *at, decoder=self._decoder)
        self._slots.cached[slots] += [len(tokens) for tokens in rest]
        firsts = self._first_tokens(scores, np.arange(len(slots)), requests)
        self._start(slots, requests, tickets, *firsts, self._version)
        limits = self._slots.limits[slots]
        self._finish(slots[np.isin(firsts[0], self._stop_ids) | (limits == 1)])

    def _start(
        self,
        free: Int[np.ndarray, " rows"],
        requests: list[Request],
        tickets: list[int],
        tokens: Int[np.ndarray, " rows"],
        logprobs: Float[np.ndarray, " rows"],
        version: int,
    ) -> None:
        """Writes completions with their first tokens into the columns of slots."""
        self._slots = slots = with_room(self._slots, 1)
        slots.tickets[free], slots.last[free], slots.counts[free] = tickets, tokens, 1
        slots.limits[free] = [request.limit for request in requests]
        slots.keys[free] = np.stack([request.key for request in requests])
        slots.tokens[free, 0], slots.logprobs[free, 0], slots.versions[free, 0] = tokens, logprobs, version
        for slot, request in zip(free, requests, strict=True):
            slots.requests[slot] = request

    def _finish(self, ended: Int[np.ndarray, " rows"]) -> None:
        for slot in ended:
            self._finished[int(self._slots.tickets[slot])] = self._slots.completion(slot, self._stop_ids)
        self._slots.tickets[ended] = -1

    # --- A round.

    def _cache_time(self, needed: int) -> int:
        """Room for at least so many tokens: one of few lengths."""
        if self._longest:
            return at_least(capacity.cache_lengths(self._longest), needed)
        return power_of_two(max(needed, capacity.SHORTEST_CACHE))

    def _round_time(self) -> int:
        return capacity.round_time(self._longest) if self._longest else capacity.ROUND

    def _fit_memory(self) -> None:
        """Room for a round in every slot, and for a batch no more slots than it still needs."""
        slots, live, size = self._slots, np.flatnonzero(self._slots.live), len(self._slots.tickets)
        now = decoding.cache_time(self._memory.later)
        if self._longest:
            size = at_least(self._sizes, len(live) + self._waiting())
            time = self._cache_time(int(slots.cached[live].max()) + self._round_time())
        else:
            time = self._cache_time(int(slots.cached[slots.live | slots.current].max()) + self._round_time())
            time = now if now // 4 < time < now else time
        if size < len(slots.tickets):
            self._gather(np.concatenate([live, np.flatnonzero(~slots.live)])[:size], time)
        elif time != now:
            self._memory = self._memory._replace(later=decoding.resized(self._memory.later, time=time))
        # What rounds write behind it must not fall onto what a free slot holds.
        free = ~self._slots.live
        self._slots.cached[free] = np.minimum(self._slots.cached[free], time - self._round_time())

    def _decode(self) -> None:
        """A round of every distribution: until a good part of the slots is free, or where none waits, until fewer do."""
        slots, live, time, size = self._slots, self._slots.live, self._round_time(), len(self._slots.tickets)
        left = (slots.limits - slots.counts)[live].max()
        if self._waiting():
            free = -(-size // 8)
        elif self._longest and left > time:
            free = size - max((fewer for fewer in self._sizes if fewer < size), default=0)
        else:
            free = size
        self._slots = slots = with_room(slots, int(slots.counts[live].max()) + time)
        for sampling, places in _by_sampling(slots.requests, np.flatnonzero(live)).items():
            mine = np.zeros(size, bool)
            mine[places] = True
            # Those of other distributions are held still meanwhile.
            enough = np.clip(size - free - (live.sum() - len(places)), 0, len(places) - 1)
            options = {"sampling": sampling, "stop_ids": self._stop_ids, "round_time": time}
            self._memory, state = decoding.decode(
                self._unrolled(), self._memory, slots.rows(mine), np.int32(enough), decoder=self._decoder, **options
            )
            self._record(mine, on_host(state))

    def _record(self, mine: Bool[np.ndarray, " slots"], state: decoding.Decoded) -> None:
        """Puts a round's tokens into the columns of the slots that sampled them."""
        slots, counts = self._slots, np.where(mine, state.counts, 0)
        slot, time = np.nonzero(np.arange(state.tokens.shape[1]) < counts[:, None])
        places = slot, slots.counts[slot] + time
        slots.tokens[places], slots.logprobs[places] = state.tokens[slot, time], state.logprobs[slot, time]
        slots.versions[places] = self._version
        slots.counts[:] += counts
        slots.cached[:] += counts
        slots.last[mine] = state.last[mine]
        self._finish(np.flatnonzero(mine & ~state.live))


def sample_groups(
    engine: Engine,
    prompts: Int[np.ndarray, "prompts prompt_time"],
    prompt_mask: Bool[np.ndarray, "prompts prompt_time"],
    key: PRNGKeyArray,
    *,
    group_size: int,
    max_tokens: int,
    sampling: Sampling,
) -> list[Sampled]:
    """`group_size` completions of each prompt from an engine that has nothing else to do.

    Args:
        prompts: right-padded, each row with at least one token.
        key: a key not used before; the same key repeats the same completions. Token t of completion i, in the order
            of the prompts, is sampled with fold_in(fold_in(key, i), t).
        max_tokens: limit on a completion's length, end-of-sequence token included.
        sampling: the distribution.
    Reference: arXiv 2509.24203 §2 (behaviour policy μ).
    """
    prefixes = [tokens[real] for tokens, real in zip(prompts, prompt_mask, strict=True)]
    keys = on_host(_row_keys(key, len(prompts) * group_size))
    requests = [Request(prefixes[row // group_size], key, max_tokens, sampling) for row, key in enumerate(keys)]
    tickets = engine.admit(requests, group_size)
    finished = engine.drain()
    return [finished[ticket] for ticket in tickets]


@functools.partial(jax.jit, static_argnums=1)
def _row_keys(key: PRNGKeyArray, rows: int) -> Array:
    return jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows)))


def _by_sampling(requests: Sequence[Request], places: Int[np.ndarray, " rows"]) -> dict[Sampling, np.ndarray]:
    """Places of requests by their distributions."""
    found: dict[Sampling, list[int]] = {}
    for place in places:
        found.setdefault(requests[place].sampling, []).append(place)
    return {sampling: np.array(some) for sampling, some in found.items()}


def _padded(rows: list[np.ndarray], time: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens, right-padded to a length, and the mask of those that are real."""
    mask = np.arange(time) < np.array([len(row) for row in rows])[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask
