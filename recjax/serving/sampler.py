"""Completions for requests: from the one engine, with limits on how many there are, a round of tokens at a time."""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int, UInt32

from recjax.hub.policy import Policy
from recjax.models.sampling import Sampling
from recjax.rollout.live import LiveEngine
from recjax.rollout.requests import Request, Sampled
from recjax.rollout.stops import up_to_stop
from recjax.serving.refusals import Refused


class Limits(NamedTuple):
    """Of a server.

    context: tokens of a prompt and its completion.
    completion: tokens of a completion.
    slots: completions that are sampled at one time.
    queue: completions that wait beside these; more are refused.
    distributions: of temperature, top_k, top_p and min_p in a server's life, as each has programs of its own.
    """

    context: int
    completion: int
    slots: int
    queue: int
    distributions: int


class Piece(NamedTuple):
    """A completion, as far as it is.

    sampled: all its tokens by now.
    text: what is certain of its text.
    finish: why it has ended, "stop" or "length"; None: it goes on.
    """

    sampled: Sampled
    text: str
    finish: str | None


class Sampler:
    """The policy as requests have it."""

    def __init__(self, live: LiveEngine, policy: Policy, limits: Limits, seed: int):
        """Takes an engine with weights.

        Args:
            seed: of requests that have none; the same one gives the same completions in the same order of requests.
        """
        self._live, self.policy, self.limits, self._seed = live, policy, limits, seed
        self._words = int(jax.random.key_data(jax.random.key(0)).size)
        self._asked, self._distributions = 0, set()
        self.under_way = 0

    @property
    def error(self) -> str | None:
        """What ended the engine; None: it runs."""
        return None if self._live.error is None else f"the engine has failed: {self._live.error!r}"

    @contextlib.contextmanager
    def places(self, count: int, sampling: Sampling) -> Iterator[None]:
        """Takes so many of the places that there are.

        Raises:
            Refused: there are not as many now, or ever; or it is one distribution too many.
        """
        most = self.limits.slots + self.limits.queue
        if count > most:
            raise Refused(400, f"{count} completions are asked for at once; this server takes {most} at most")
        if self.under_way + count > most:
            raise Refused(
                429,
                f"{self.under_way} completions are under way or wait, of {most} at most; try again later",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )
        if sampling not in self._distributions and len(self._distributions) == self.limits.distributions:
            known = ", ".join("/".join(f"{value:g}" for value in one) for one in sorted(self._distributions))
            raise Refused(
                400,
                f"{'/'.join(Sampling._fields)} of this request are one distribution more than the"
                f" {len(self._distributions)} that this server compiles programs for; take one of {known}, or start it"
                " with more --distributions",
                param="temperature",
            )
        self._distributions.add(sampling)
        self.under_way += count
        try:
            yield
        finally:
            self.under_way -= count

    def keys(self, seed: int | None, count: int) -> list[UInt32[np.ndarray, " words"]]:
        """Keys of a request's completions: those of its seed, or keys that no other request has."""
        if seed is None:
            origin, self._asked = f"server {self._seed} {self._asked}", self._asked + 1
        else:
            origin = f"request {seed}"
        return [self._key(f"{origin} {place}") for place in range(count)]

    def _key(self, name: str) -> UInt32[np.ndarray, " words"]:
        digest = hashlib.sha512(name.encode()).digest()
        return np.frombuffer(digest, np.uint32)[: self._words].copy()

    def limit(self, prompt: Int[np.ndarray, " time"], asked: int | None) -> int:
        """Most tokens of a completion.

        Raises:
            Refused: the prompt fills the context, has tokens that there are not, or more is asked for than there is.
        """
        limits, vocabulary = self.limits, self.policy.decoder.config.vocab_size
        if prompt.max() >= vocabulary:
            raise Refused(400, f"token {prompt.max()} is outside the vocabulary of {vocabulary}", param="prompt")
        if asked is not None and asked > limits.completion:
            raise Refused(
                400, f"max_tokens = {asked}: this server gives {limits.completion} at most", param="max_tokens"
            )
        if (room := limits.context - len(prompt)) < 1:
            raise Refused(
                400,
                f"the prompt has {len(prompt)} tokens, and with a completion there is room for {limits.context}",
                param="prompt",
                code="context_length_exceeded",
            )
        return min(room, limits.completion, asked or limits.completion)

    async def follow(
        self,
        prompt: Int[np.ndarray, " time"],
        key: UInt32[np.ndarray, " words"],
        limit: int,
        sampling: Sampling,
        stop: Sequence[str],
        held: Sequence[str] = (),
    ) -> AsyncIterator[Piece]:
        """A completion after each of its rounds; the last piece, and no other, says why it has ended.

        A stop string ends it in the round that has it: its slot is free then. Who closes the iterator frees it too.

        Args:
            held: strings before whose beginnings the certain text ends.
        """
        tokenizer = self.policy.tokenizer
        async with contextlib.aclosing(self._live.follow(Request(prompt, key, limit, sampling))) as rounds:
            async for sampled in rounds:
                kept, text, stopped = up_to_stop(sampled, stop, tokenizer, prompt)
                ended = stopped or not sampled.truncated or len(sampled.tokens) == limit
                if ended:
                    yield Piece(kept, text, "length" if kept.truncated else "stop")
                    return
                yield Piece(sampled, certain(text, [*stop, *held]), None)


def certain(text: str, held: Sequence[str]) -> str:
    """The text as far as more tokens do not change it: without half a character, or what may be one of `held`."""
    text = text.rstrip("\ufffd")
    for size in range(min(len(text), max(map(len, held), default=0)), 0, -1):
        if any(end.startswith(text[-size:]) for end in held):
            return text[:-size]
    return text
