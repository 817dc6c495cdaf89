"""Input and output of the engine: requests and completions."""

from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt32

from recjax.models.logprobs import Sampling


class Request(NamedTuple):
    """A completion to sample.

    Attributes:
        prefix: tokens before the completion, at least one.
        key: key data; token t, from 0, is sampled with fold_in(key, t).
        limit: most tokens of the completion, end-of-sequence token included.
        sampling: the distribution.
    """

    prefix: Int[np.ndarray, " prefix_time"]
    key: UInt32[np.ndarray, " words"]
    limit: int
    sampling: Sampling


def check_requests(requests: Sequence[Request], group_size: int | None, vocabulary: int) -> None:
    """Refuses requests that cannot be sampled.

    Args:
        group_size: number of consecutive requests that must share a prefix; None: prefixes may all differ.
    Raises:
        ValueError: with the request's place, the problem and the remedy.
    """
    for place, request in enumerate(requests):
        if request.limit < 1:
            raise ValueError(f"request {place}: limit = {request.limit}: takes 1 or more")
        if not len(request.prefix):
            raise ValueError(f"request {place}: its prefix is empty; give at least one token, such as the BOS")
        leader = requests[place - place % (group_size or 1)]
        if leader.prefix is not request.prefix and not np.array_equal(leader.prefix, request.prefix):
            raise ValueError(f"request {place}: its prefix differs from its group's; change group_size, or give None")
    if group_size and len(requests) % group_size:
        raise ValueError(f"{len(requests)} requests: not a multiple of group_size = {group_size}; change group_size")
    tokens = np.concatenate([request.prefix for request in requests[:: group_size or 1]] or [[0]])
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        wrong = tokens[(tokens < 0) | (tokens >= vocabulary)][0]
        place = next(place for place, request in enumerate(requests) if wrong in request.prefix)
        raise ValueError(
            f"request {place}: token {wrong} is outside the vocabulary of {vocabulary}; use the policy's tokenizer"
        )


class Weights(NamedTuple):
    """The weights that sample completions.

    Attributes:
        params: all parameters, stacked by layer, in the dtype that they compute in.
        version: number of optimizer updates that produced them.
        run: id of the run that produced them; None: unknown.
    """

    params: dict
    version: int
    run: str | None = None


class Sampled(NamedTuple):
    """A completion.

    Attributes:
        tokens: sampled tokens, including the end-of-sequence token.
        logprobs: log-prob of each token, under the distribution that sampled it.
        versions: policy version whose weights sampled each token.
        truncated: True if the completion reached its limit before it ended.
    """

    tokens: Int[np.ndarray, " time"]
    logprobs: Float[np.ndarray, " time"]
    versions: Int[np.ndarray, " time"]
    truncated: bool


class Started(NamedTuple):
    """Requests with their first token, sampled by the weights of `version`."""

    requests: list[Request]
    tickets: list[int]
    tokens: Int[np.ndarray, " requests"]
    logprobs: Float[np.ndarray, " requests"]
    version: int

    def part(self, places: Int[np.ndarray, " some"]) -> "Started":
        """The started requests at some places."""
        requests, tickets = ([column[place] for place in places] for column in (self.requests, self.tickets))
        return Started(requests, tickets, self.tokens[places], self.logprobs[places], self.version)


class Admitted(NamedTuple):
    """Requests in line and their tickets; `group_size` is None for requests that are not a batch of groups."""

    requests: list[Request]
    tickets: list[int]
    group_size: int | None

    def without(self, gone: Container[int]) -> "Admitted":
        """Drops the tickets in `gone`; a batch of groups stays whole."""
        if self.group_size is not None:
            return self
        left = [place for place, ticket in enumerate(self.tickets) if ticket not in gone]
        return Admitted(*selected(left, self.requests, self.tickets), None)


class Prefilled(NamedTuple):
    """Completions with their first token that wait for slots.

    Attributes:
        rows: places of the completions in their batch.
        prompts: rows of `cache`, the keys and values of prompts of `lengths` tokens.
        group_size: consecutive rows per prompt in a batch that has the engine for itself; None for other requests.
        weights: number of the weights that ran the prompts.
    """

    started: Started
    rows: Int[np.ndarray, " waiting"]
    prompts: Int[np.ndarray, " waiting"]
    cache: tuple
    lengths: Int[np.ndarray, " prompts"]
    group_size: int | None
    weights: int

    def without(self, gone: Container[int]) -> "Prefilled | None":
        """Drops the tickets in `gone`; None if this drops all of them."""
        left = np.array([place for place, ticket in enumerate(self.started.tickets) if ticket not in gone], int)
        started, rows, prompts = self.started.part(left), self.rows[left], self.prompts[left]
        return self._replace(started=started, rows=rows, prompts=prompts) if len(left) else None


def by_sampling(requests: list[Request]) -> dict[Sampling, Int[np.ndarray, " some"]]:
    """Groups places of requests by their distributions."""
    found: dict[Sampling, list[int]] = {}
    for place, request in enumerate(requests):
        found.setdefault(request.sampling, []).append(place)
    return {sampling: np.array(places) for sampling, places in found.items()}


def selected(places: list[int], *columns: list) -> list[list]:
    """Selects some places of each column."""
    return [[column[place] for place in places] for column in columns]


def padded(rows: list[np.ndarray], time: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-pads rows of tokens to a length; returns the tokens and the mask of real tokens."""
    mask = np.arange(time) < np.array([len(row) for row in rows])[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask
