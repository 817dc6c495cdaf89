"""Samples completions for requests with the server's engine, some tokens at a time, within limits."""

import contextlib
import hashlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int, UInt32

from recjax.agents.trajectory import up_to_stop
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import longest_token
from recjax.models.sampling import Sampling
from recjax.rollout.live import LiveEngine
from recjax.rollout.requests import Request, Sampled
from recjax.serving.refusals import Refused

_ALWAYS = (Sampling(), Sampling(temperature=0.0))  # distributions that a server always takes


class Limits(NamedTuple):
    """Limits of a server.

    context: most tokens of a prompt with its completion.
    completion: most tokens of a completion.
    slots: completions that are sampled together.
    queue: completions that may wait for slots; more are refused.
    distributions: most combinations of temperature, top_k, top_p and min_p, since each needs its own programs.
    """

    context: int
    completion: int
    slots: int
    queue: int
    distributions: int


class Piece(NamedTuple):
    """A completion so far.

    sampled: all tokens so far.
    text: text that later tokens cannot change.
    finish: finish reason, "stop" or "length"; None: unfinished.
    """

    sampled: Sampled
    text: str
    finish: str | None


class Sampler:
    """Samples from the policy for requests."""

    def __init__(self, live: LiveEngine, policy: Policy, limits: Limits, seed: int):
        """Takes an engine with weights.

        Args:
            seed: seed for requests without one; equal seeds and request orders give equal completions.
        """
        self._live = live
        self.policy = policy
        self.limits = limits
        self._seed = seed
        self._words = int(jax.random.key_data(jax.random.key(0)).size)
        self._unseeded_requests = 0
        self._distributions = set()
        self.under_way = 0

    @property
    def error(self) -> str | None:
        """The error that ended the engine; None if it runs."""
        if self._live.error is None:
            return None
        return f"the engine has failed: {self._live.error!r}"

    @contextlib.contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Reserves places for `count` completions, from the reading of their prompts on.

        Raises:
            Refused: too few places are free or exist.
        """
        most = self.limits.slots + self.limits.queue
        if count > most:
            raise Refused(400, f"the request is for {count} completions; this server takes {most} at most")
        if self.under_way + count > most:
            raise Refused(
                429,
                f"{self.under_way} completions run or wait, of {most} at most; try again later",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )
        self.under_way += count
        try:
            yield
        finally:
            self.under_way -= count

    def add_distribution(self, sampling: Sampling) -> None:
        """Notes the distribution of a request, which compiles programs if it is new.

        Defaults and greedy sampling do not count, so that no client can shut others out from them.

        Raises:
            Refused: the server has its most distributions.
        """
        if sampling in _ALWAYS:
            return
        if sampling not in self._distributions and len(self._distributions) == self.limits.distributions:
            known = ", ".join(map(_values, sorted(self._distributions)))
            raise Refused(
                400,
                f"{'/'.join(Sampling._fields)}: a new distribution, and this server already has programs for"
                f" {len(self._distributions)}; use one of {known}, or start the server with more --distributions",
                param="temperature",
            )
        self._distributions.add(sampling)

    def keys(self, seed: int | None, count: int) -> list[UInt32[np.ndarray, " words"]]:
        """Keys of a request's completions: from its seed, or unique keys if it has no seed."""
        if seed is None:
            origin = f"server {self._seed} {self._unseeded_requests}"
            self._unseeded_requests = self._unseeded_requests + 1
        else:
            origin = f"request {seed}"
        digests = [hashlib.sha512(f"{origin} {index}".encode()).digest() for index in range(count)]
        return [np.frombuffer(digest, np.uint32)[: self._words].copy() for digest in digests]

    def check_length(self, prompt: str | Int[np.ndarray, " time"]) -> None:
        """Refuses a prompt that leaves no tokens for a completion. A text is not tokenized for this.

        Raises:
            Refused: the prompt is too long.
        """
        context = self.limits.context
        unit = "tokens"
        most = context - 1
        if isinstance(prompt, str):
            unit = "characters"
            most = context * longest_token(self.policy.tokenizer)
        if len(prompt) > most:
            raise Refused(
                400,
                f"the prompt has {len(prompt)} {unit}, and prompt and completion share {context} tokens; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )

    def limit(self, prompt: Int[np.ndarray, " time"], requested: int | None) -> int:
        """The most tokens that a completion may have.

        Raises:
            Refused: the prompt fills the context or has unknown tokens, or the request exceeds the token limit.
        """
        limits = self.limits
        vocabulary = self.policy.decoder.config.vocab_size
        if prompt.max() >= vocabulary:
            raise Refused(400, f"token {prompt.max()} is outside the vocabulary of {vocabulary}", param="prompt")
        if requested is not None and requested > limits.completion:
            raise Refused(
                400, f"max_tokens = {requested}: this server samples {limits.completion} at most", param="max_tokens"
            )
        self.check_length(prompt)
        limit = min(limits.context - len(prompt), limits.completion)
        if requested is not None:
            limit = min(limit, requested)
        return limit

    async def follow(
        self,
        prompt: Int[np.ndarray, " time"],
        key: UInt32[np.ndarray, " words"],
        limit: int,
        sampling: Sampling,
        stop: Sequence[str],
        hold_back: Sequence[str] = (),
    ) -> AsyncGenerator[Piece, None]:
        """Yields a completion after each engine step; only the last piece has a finish reason.

        A stop string ends the completion in its step and frees the slot; closing the iterator also frees the slot.

        Args:
            hold_back: strings whose possible beginnings the stream holds back until they are decided.
        """
        tokenizer = self.policy.tokenizer
        undecided = [*stop, *hold_back]
        async with contextlib.aclosing(self._live.follow(Request(prompt, key, limit, sampling))) as steps:
            async for sampled in steps:
                kept, text, stopped = up_to_stop(sampled, stop, tokenizer, prompt)
                if stopped or not sampled.truncated or len(sampled.tokens) == limit:
                    finish = "stop"
                    if kept.truncated:
                        finish = "length"
                    yield Piece(kept, text, finish)
                    return
                yield Piece(sampled, certain(text, undecided), None)


def certain(text: str, undecided: Sequence[str]) -> str:
    """The text that later tokens cannot change: no partial character, and no possible beginning of an `undecided`."""
    text = text.rstrip("\ufffd")
    longest = max(map(len, undecided), default=0)
    for size in range(min(len(text), longest), 0, -1):
        if any(string.startswith(text[-size:]) for string in undecided):
            return text[:-size]
    return text


def _values(distribution: Sampling) -> str:
    return "/".join(f"{value:g}" for value in distribution)
