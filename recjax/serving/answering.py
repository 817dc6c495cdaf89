"""Handles a request from start to end: reads prompts, samples completions, records them, and then replies."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from recjax.hub.chat_rendering import TURN_SECONDS, render_chats
from recjax.hub.tokenizers import encode_prompts
from recjax.serving import bodies
from recjax.serving.bodies import Asked
from recjax.serving.numbers import Numbers
from recjax.serving.recorder import Recorder, check_sampling
from recjax.serving.refusals import Refused
from recjax.serving.replies import CALL_BEGINS, PREFIXES, Job, Prompt, place_of
from recjax.serving.sampler import Piece, Sampler
from recjax.serving.served import Served
from recjax.serving.units import Session
from recjax.serving.versions import Versions

READ = {"chat": bodies.read_chat, "text": bodies.read_text, "generate": bodies.read_generate}


class Answering:
    """Answers requests for completions of one policy."""

    def __init__(
        self,
        sampler: Sampler,
        recorder: Recorder | None,
        numbers: Numbers,
        name: str,
        versions: Versions,
    ):
        """Stores the parts that answer a request.

        Args:
            recorder: recorder of completions; None: the server records no completions and has no sessions.
            name: name of the model.
            versions: versions of the policy.
        """
        self.sampler, self.recorder, self.name, self.versions = sampler, recorder, name, versions
        self._rendering, self._numbers = asyncio.Lock(), numbers

    async def job(self, kind: str, body: Any, session: str | None) -> Job:
        """Checks a request and prepares its prompts.

        Raises:
            Refused: the request is invalid.
        """
        began, asked = time.monotonic(), READ[kind](body)
        if asked.model not in (None, self.name):
            raise Refused(404, f"model = {asked.model!r:.100}: unknown; this server has {self.name!r}", param="model")
        held = None
        if session is not None:
            held = self.require_recorder().session(session)
            check_sampling(held, session, asked.sampling)
        try:
            prompts = await self._prompts(asked, held)
        except ValueError as error:
            raise Refused(400, str(error), param="messages" if kind == "chat" else "prompt") from error
        limits = [self.sampler.limit(prompt.tokens, asked.max_tokens) for prompt in prompts]
        reply = f"{PREFIXES[kind]}-{uuid.uuid4().hex}"
        created, version, tokenizer = int(time.time()), self.versions.version, self.sampler.policy.tokenizer
        return Job(kind, reply, created, self.name, version, asked, tokenizer, prompts, limits, session, began)

    def require_recorder(self) -> Recorder:
        """The recorder.

        Raises:
            Refused: the server has no recorder.
        """
        if self.recorder is None:
            raise Refused(404, "this server does not record (--norecording), so it has no sessions and no rewards")
        return self.recorder

    async def _prompts(self, asked: Asked, session: Session | None) -> list[Prompt]:
        tokenizer = self.sampler.policy.tokenizer
        if asked.messages is None:
            return [
                Prompt(self._tokens(prompt, session), prompt, None)
                if isinstance(prompt, str)
                else Prompt(prompt, tokenizer.decode(prompt), None)
                for prompt in asked.prompts
            ]
        messages = [as_written(message, session) for message in asked.messages]
        given = {"tools": asked.tools, "variables": [asked.template]}
        async with self._rendering:
            (text,) = await asyncio.to_thread(render_chats, tokenizer, [messages], TURN_SECONDS, **given)
        says_it_all = not (asked.tools or asked.template) and all(
            message.keys() == {"role", "content"} for message in messages
        )
        return [Prompt(self._tokens(text, session, rendered=True), text, messages if says_it_all else None)]

    def _tokens(self, text: str, session: Session | None, rendered: bool = False) -> np.ndarray:
        if session is not None:
            return session.trajectory.tokens_of(text, rendered)
        return np.array(encode_prompts(self.sampler.policy.tokenizer, [text], rendered=rendered)[0], np.int32)

    # --- Completions.

    async def pieces(self, job: Job) -> AsyncIterator[tuple[int, Piece]]:
        """Yields the pieces of each completion with its index as they arrive; closing the iterator frees all slots."""
        asked = job.asked
        keys, held = self.sampler.keys(asked.seed, job.count), [CALL_BEGINS] if asked.tools else []
        queue: asyncio.Queue = asyncio.Queue()

        async def follow(index: int) -> None:
            place = index // asked.n
            prompt, limit = job.prompts[place].tokens, job.limits[place]
            options = prompt, keys[index], limit, asked.sampling, asked.stop, held
            try:
                async with contextlib.aclosing(self.sampler.follow(*options)) as pieces:
                    async for piece in pieces:
                        queue.put_nowait((index, piece))
            except Exception as error:
                queue.put_nowait((index, error))

        tasks = [asyncio.create_task(follow(index)) for index in range(job.count)]
        left, is_first = job.count, True
        try:
            while left:
                index, piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                if is_first:
                    self._numbers.first_token.observe(time.monotonic() - job.began)
                is_first = False
                left -= piece.finish is not None
                yield index, piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def record(self, job: Job, pieces: Sequence[Piece]) -> None:
        """Records a request's completions; returns when all are on disk.

        Args:
            pieces: whole completions, in order.
        """
        n, prompts = job.asked.n, job.prompts
        if self.recorder:
            now, metadata = datetime.now(UTC), {"endpoint": job.kind} | job.asked.metadata
            metadata |= {"session": job.session} if job.session else {}
            metadata |= {"run": self.versions.run} if self.versions.run else {}
            served = [
                Served(
                    id=job.id if len(prompts) == 1 else f"{job.id}/prompt{place}",
                    reply=job.id,
                    first=place * n,
                    session=job.session,
                    time=now,
                    tokenizer=self.recorder.tokenizer_name,
                    messages=prompt.messages,
                    text=prompt.text,
                    prompt_tokens=prompt.tokens,
                    sampling=job.asked.sampling,
                    sampled=[piece.sampled for piece in pieces[place * n : (place + 1) * n]],
                    texts=[piece.text for piece in pieces[place * n : (place + 1) * n]],
                    metadata=metadata,
                )
                for place, prompt in enumerate(prompts)
            ]
            await self.recorder.record(served)
        self._numbers.whole.observe(time.monotonic() - job.began)
        self._numbers.prompt_tokens.inc(sum(len(prompt.tokens) for prompt in prompts))
        self._numbers.tokens.inc(sum(len(piece.sampled.tokens) for piece in pieces))
        for piece in pieces:
            self._numbers.completions.labels(piece.finish).inc()


def as_written(message: dict[str, Any], session: Session | None) -> dict[str, Any]:
    """Prepares a message for the template: a tool call from this session keeps the policy's exact text."""
    calls = message.get("tool_calls")
    if calls and session and (place := place_of(calls[0].get("id"))) and (said := session.said(*place)) is not None:
        return {"role": message["role"], "content": said}
    return message
