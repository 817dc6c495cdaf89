"""Handles a request from start to end: reads prompts, samples completions, records them, and then replies."""

import asyncio
import contextlib
import copy
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np

from recjax.agents.trajectory import Trajectory
from recjax.errors import UserError
from recjax.experience.group import Completion, Group, Row, runs_of
from recjax.experience.records import PROMPT_LEFT_OUT, Record
from recjax.hub.chat_rendering import TURN_SECONDS, render_chats
from recjax.hub.tokenizers import LONG_TEXT, decode_after
from recjax.serving.bodies import Chat, Generate, ReplyBody, Text, read_body
from recjax.serving.numbers import Numbers
from recjax.serving.recorder import Recorder, check_sampling
from recjax.serving.refusals import Refused
from recjax.serving.replies import CALL_BEGINS, PREFIXES, Job, Prompt, row_of_call
from recjax.serving.sampler import Piece, Sampler
from recjax.serving.units import Session
from recjax.serving.versions import Versions

BODIES = {"chat": Chat, "text": Text, "generate": Generate}


class Answering:
    """Answers requests for completions of one policy."""

    def __init__(self, sampler: Sampler, recorder: Recorder | None, numbers: Numbers, name: str, versions: Versions):
        """Stores the parts that answer a request.

        Args:
            recorder: recorder of completions; None: the server records no completions and has no sessions.
        """
        self.sampler = sampler
        self.recorder = recorder
        self.name = name
        self.versions = versions
        self.created = int(time.time())  # of the model, in seconds since 1970
        self._rendering = asyncio.Lock()
        self._numbers = numbers
        self._long_prompts = ThreadPoolExecutor(1, "long prompts")

    def checked_body(self, kind: str, body: Any) -> ReplyBody:
        """Checks the body of a request.

        Raises:
            Refused: the request is invalid.
        """
        checked = read_body(BODIES[kind], body)
        if checked.model not in (None, self.name):
            raise Refused(404, f"model = {checked.model!r:.100}: unknown; this server has {self.name!r}", param="model")
        if self.recorder is not None and isinstance(checked, Chat) and checked.store is False:
            remedy = "this server records all completions; remove it, or start the server with --norecording"
            raise Refused(400, f"store = False: {remedy}", param="store")
        return checked

    async def job(self, kind: str, body: ReplyBody, session: str | None) -> Job:
        """Prepares the prompts of a request.

        Raises:
            Refused: the request is invalid.
        """
        began = time.monotonic()
        open_session = None
        if session is not None:
            open_session = await self.require_recorder().session(session)
            check_sampling(open_session, session, body.sampled.sampling())
        try:
            prompts = await self._prompts(body, open_session)
        except UserError as error:
            raise Refused(400, str(error), param="messages" if kind == "chat" else "prompt") from error
        limits = [self.sampler.limit(prompt.tokens, body.sampled.limit) for prompt in prompts]
        self.sampler.add_distribution(body.sampled.sampling())
        reply = f"{PREFIXES[kind]}-{uuid.uuid4().hex}"
        created = int(time.time())
        version = self.versions.version
        tokenizer = self.sampler.policy.tokenizer
        return Job(kind, reply, created, self.name, version, body, tokenizer, prompts, limits, session, began)

    def require_recorder(self) -> Recorder:
        """The recorder.

        Raises:
            Refused: the server has no recorder.
        """
        if self.recorder is None:
            raise Refused(404, "this server does not record (--norecording), so it has no sessions and no rewards")
        return self.recorder

    async def _prompts(self, body: ReplyBody, session: Session | None) -> list[Prompt]:
        if not isinstance(body, Chat):
            return await self._read(cast(Text | Generate, body).prompts, session)
        messages = [as_written(message, session) for message in body.messages]
        options = {"tools": body.functions, "variables": [body.chat_template_kwargs]}
        async with self._rendering:
            texts = await asyncio.to_thread(
                render_chats, self.sampler.policy.tokenizer, [messages], TURN_SECONDS, **options
            )
        says_it_all = not (body.functions or body.chat_template_kwargs) and all(
            message.keys() == {"role", "content"} for message in messages
        )
        (prompt,) = await self._read(texts, session, rendered=True)
        return [prompt._replace(messages=messages if says_it_all else None)]

    async def _read(
        self, prompts: Sequence[str | np.ndarray], session: Session | None, rendered: bool = False
    ) -> list[Prompt]:
        """Tokenizes texts, and decodes tokens."""
        for prompt in prompts:
            self.sampler.check_length(prompt)
        tokenizer = self.sampler.policy.tokenizer
        # A copy, because turns that end in the meantime change the session's own trajectory.
        trajectory = Trajectory(tokenizer) if session is None else copy.copy(session.trajectory)

        def read() -> list[Prompt]:
            return [
                Prompt(trajectory.tokens_of(prompt, rendered), prompt, None)
                if isinstance(prompt, str)
                else Prompt(prompt, decode_after(tokenizer, (), prompt), None)
                for prompt in prompts
            ]

        # Long prompts wait for each other, and short ones do not wait for them.
        threads = self._long_prompts if sum(map(len, prompts)) > LONG_TEXT else None
        return await asyncio.get_running_loop().run_in_executor(threads, read)

    # --- Completions.

    async def pieces(self, job: Job) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yields pieces of completions with their index as they arrive; closing the iterator frees all slots.

        The whole completions come last, in order, once all are on disk.
        """
        settings = job.body.sampled
        withheld = [CALL_BEGINS] if job.body.functions else []
        keys = self.sampler.keys(settings.seed, job.body.count)
        queue: asyncio.Queue = asyncio.Queue()

        async def follow(index: int) -> None:
            prompt_index = index // settings.n
            prompt = job.prompts[prompt_index].tokens
            limit = job.limits[prompt_index]
            options = prompt, keys[index], limit, settings.sampling(), settings.stops, withheld
            try:
                async with contextlib.aclosing(self.sampler.follow(*options)) as pieces:
                    async for piece in pieces:
                        queue.put_nowait((index, piece))
            except Exception as error:
                queue.put_nowait((index, error))

        tasks = [asyncio.create_task(follow(index)) for index in range(job.body.count)]
        done = {}
        is_first = True
        try:
            while len(done) < job.body.count:
                index, piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                if is_first:
                    self._numbers.first_token.observe(time.monotonic() - job.began)
                is_first = False
                if piece.finish is None:
                    yield index, piece
                else:
                    done[index] = piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        completed = [done[index] for index in range(job.body.count)]
        await self._record(job, completed)
        for index, piece in enumerate(completed):
            yield index, piece

    async def _record(self, job: Job, pieces: Sequence[Piece]) -> None:
        if self.recorder:
            now = datetime.now(UTC)
            metadata = {"request": job.id, "endpoint": job.kind} | job.body.recorded
            metadata |= {"session": job.session} if job.session else {}
            metadata |= {"run": self.versions.run} if self.versions.run else {}
            records = []
            for index, (text, sampled) in enumerate((piece.text, piece.sampled) for piece in pieces):
                prompt_index = index // job.body.sampled.n
                prompt = job.prompts[prompt_index]
                group = job.id if len(job.prompts) == 1 else f"{job.id}/prompt{prompt_index}"
                completion = Completion(
                    id=f"{job.id}/{index}",
                    source=self.recorder.options.source,
                    text=text,
                    rows=(Row(prompt.tokens, *sampled.row_columns),),
                    sampling=job.body.sampled.sampling(),
                    policy_version=int(sampled.versions.min()),
                    truncated=sampled.truncated,
                    version_runs=runs_of(sampled.versions),
                    metadata=metadata,
                )
                written_prompt = prompt.messages or prompt.text or PROMPT_LEFT_OUT
                group = Group(group, prompt.tokens, (completion,), written_prompt)
                records.append(Record(group, now, self.recorder.tokenizer_name))
            texts = [prompt.text for prompt in job.prompts for _ in range(job.body.sampled.n)]
            await self.recorder.record(records, texts, job.session)
        self._numbers.whole.observe(time.monotonic() - job.began)
        self._numbers.prompt_tokens.inc(sum(len(prompt.tokens) for prompt in job.prompts))
        self._numbers.tokens.inc(sum(len(piece.sampled.tokens) for piece in pieces))
        for piece in pieces:
            self._numbers.completions.labels(piece.finish).inc()


def as_written(message: dict[str, Any], session: Session | None) -> dict[str, Any]:
    """Prepares a message for the template: a tool call from this session keeps the policy's exact text."""
    calls = message.get("tool_calls")
    turn = session.turn_of(row_of_call(calls[0].get("id"))) if calls and session else None
    if turn is None or session is None:
        return message
    return {"role": message["role"], "content": session.turns[turn].completion.text}
