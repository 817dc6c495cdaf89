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
        self.created = int(time.time())  # the model's time, in seconds since 1970
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
            key = "prompt"
            if kind == "chat":
                key = "messages"
            raise Refused(400, str(error), param=key) from error
        limits = [self.sampler.limit(prompt.tokens, body.sampled.limit) for prompt in prompts]
        self.sampler.add_distribution(body.sampled.sampling())
        return Job(
            kind=kind,
            id=f"{PREFIXES[kind]}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.name,
            version=self.versions.version,
            body=body,
            tokenizer=self.sampler.policy.tokenizer,
            prompts=prompts,
            limits=limits,
            session=session,
            began=began,
        )

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
        async with self._rendering:
            texts = await asyncio.to_thread(
                render_chats,
                self.sampler.policy.tokenizer,
                [messages],
                TURN_SECONDS,
                tools=body.functions,
                variables=[body.chat_template_kwargs],
            )
        (prompt,) = await self._read(texts, session, rendered=True)
        if body.functions or body.chat_template_kwargs:
            return [prompt]
        if all(message.keys() == {"role", "content"} for message in messages):
            return [prompt._replace(messages=messages)]
        return [prompt]

    async def _read(
        self, prompts: Sequence[str | np.ndarray], session: Session | None, rendered: bool = False
    ) -> list[Prompt]:
        """Tokenizes texts, and decodes tokens."""
        for prompt in prompts:
            self.sampler.check_length(prompt)
        tokenizer = self.sampler.policy.tokenizer
        if session is None:
            trajectory = Trajectory(tokenizer)
        else:
            # A copy, because turns that end in the meantime change the session's own trajectory.
            trajectory = copy.copy(session.trajectory)

        def read() -> list[Prompt]:
            read_prompts = []
            for prompt in prompts:
                if isinstance(prompt, str):
                    read_prompts.append(Prompt(trajectory.tokens_of(prompt, rendered), prompt, None))
                else:
                    read_prompts.append(Prompt(prompt, decode_after(tokenizer, (), prompt), None))
            return read_prompts

        threads = None  # the event loop's own threads
        if sum(map(len, prompts)) > LONG_TEXT:
            # Long prompts wait for each other, and short ones do not wait for them.
            threads = self._long_prompts
        return await asyncio.get_running_loop().run_in_executor(threads, read)

    # --- Completions.

    async def pieces(self, job: Job) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yields pieces of completions with their index as they arrive; closing the iterator frees all slots.

        The complete completions come last, in order, once all are on disk.
        """
        settings = job.body.sampled
        held_back = []
        if job.body.functions:
            held_back.append(CALL_BEGINS)
        keys = self.sampler.keys(settings.seed, job.body.count)
        queue: asyncio.Queue = asyncio.Queue()

        async def follow(index: int) -> None:
            prompt_index = index // settings.n
            pieces = self.sampler.follow(
                job.prompts[prompt_index].tokens,
                key=keys[index],
                limit=job.limits[prompt_index],
                sampling=settings.sampling(),
                stop=settings.stops,
                hold_back=held_back,
            )
            try:
                async with contextlib.aclosing(pieces):
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
            if job.session:
                metadata["session"] = job.session
            if self.versions.run:
                metadata["run"] = self.versions.run
            records = []
            texts = []
            for index, piece in enumerate(pieces):
                sampled = piece.sampled
                prompt_index = index // job.body.sampled.n
                prompt = job.prompts[prompt_index]
                group_id = job.id
                if len(job.prompts) > 1:
                    group_id = f"{job.id}/prompt{prompt_index}"
                completion = Completion(
                    id=f"{job.id}/{index}",
                    source=self.recorder.options.source,
                    text=piece.text,
                    rows=(Row(prompt.tokens, *sampled.row_columns),),
                    sampling=job.body.sampled.sampling(),
                    policy_version=int(sampled.versions.min()),
                    truncated=sampled.truncated,
                    version_runs=runs_of(sampled.versions),
                    metadata=metadata,
                )
                written_prompt = prompt.messages or prompt.text or PROMPT_LEFT_OUT
                group = Group(group_id, prompt.tokens, (completion,), written_prompt)
                records.append(Record(group, now, self.recorder.tokenizer_name))
                texts.append(prompt.text)
            await self.recorder.record(records, texts, job.session)
        self._numbers.whole.observe(time.monotonic() - job.began)
        self._numbers.prompt_tokens.inc(sum(len(prompt.tokens) for prompt in job.prompts))
        self._numbers.tokens.inc(sum(len(piece.sampled.tokens) for piece in pieces))
        for piece in pieces:
            self._numbers.completions.labels(piece.finish).inc()


def as_written(message: dict[str, Any], session: Session | None) -> dict[str, Any]:
    """Prepares a message for the template: a tool call from this session keeps the policy's exact text."""
    calls = message.get("tool_calls")
    if not calls or session is None:
        return message
    turn = session.turn_of(row_of_call(calls[0].get("id")))
    if turn is None:
        return message
    return {"role": message["role"], "content": session.turns[turn].completion.text}
