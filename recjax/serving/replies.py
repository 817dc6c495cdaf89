"""Replies in the form of OpenAI's API and vLLM's API: whole, and as the chunks of a stream."""

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax.agents.tools import openai_calls
from recjax.experience.recorded import sets_to_lists, top_to_lists
from recjax.grading.thinking import after_thoughts, opening_tag, whole_reply
from recjax.hub.tokenizers import token_bytes
from recjax.rollout.requests import Sampled
from recjax.serving.bodies import ReplyBody
from recjax.serving.sampler import Piece

CALL_BEGINS = "<tool_call>"
OBJECTS = {"chat": "chat.completion", "text": "text_completion", "generate": "generate"}
PREFIXES = {"chat": "chatcmpl", "text": "cmpl", "generate": "gen"}


class Prompt(NamedTuple):
    """A prompt as the model reads it: tokens, text, and its messages if they fully determine the text."""

    tokens: np.ndarray
    text: str
    messages: list[dict[str, str]] | None


class Job(NamedTuple):
    """A request that is being answered.

    kind: chat, text or generate.
    id: id of the reply.
    created: seconds since 1970.
    model: name of the model.
    version: policy version when the request arrived.
    limits: largest number of tokens of a completion, for each prompt.
    began: time of the request's arrival, by time.monotonic.
    """

    kind: str
    id: str
    created: int
    model: str
    version: int
    body: ReplyBody
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    limits: list[int]
    session: str | None
    began: float


def full_reply(job: Job, pieces: Sequence[Piece], tag: str | None = None) -> dict[str, Any]:
    """The complete reply to a request.

    Args:
        pieces: whole completions, `job.body.sampled.n` for each prompt.
        tag: the client's name of the newest weights; None: no client pushed them.
    """
    choices = [_choice(job, index, piece) for index, piece in enumerate(pieces)]
    if job.kind == "generate":
        reply: dict[str, Any] = {"request_id": job.id, "choices": choices, "prompt_logprobs": None}
    else:
        reply = _head(job, OBJECTS[job.kind]) | {"choices": choices, "usage": usage(job, pieces)}
    reply["policy_version"] = oldest_sampled_version(pieces)
    if tag:
        reply["weight_version"] = tag
    if job.body.wants_ids and len(job.prompts) == 1:
        reply["prompt_token_ids"] = job.prompts[0].tokens.tolist()
    return reply


def oldest_sampled_version(pieces: Sequence[Piece]) -> int:
    """The oldest version of the weights that sampled a token; weights may change within a completion."""
    return min(int(piece.sampled.versions.min()) for piece in pieces)


def _head(job: Job, object_: str) -> dict[str, Any]:
    return {"id": job.id, "object": object_, "created": job.created, "model": job.model}


def usage(job: Job, pieces: Sequence[Piece]) -> dict[str, int]:
    """Token counts; a prompt counts once for all its completions."""
    prompt_tokens = sum(len(prompt.tokens) for prompt in job.prompts)
    completion_tokens = sum(len(piece.sampled.tokens) for piece in pieces)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _choice(job: Job, index: int, piece: Piece) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": piece.finish, "logprobs": None}
    if job.body.sampled.wants_logprobs:
        choice["logprobs"] = logprobs(job, piece.sampled, 0)
    if job.body.wants_ids:
        choice |= _token_lists(piece.sampled)
    if job.kind == "text":
        return choice | {"text": piece.text} | _prompt_ids(job, index)
    if job.kind == "chat":
        content, calls = message_parts(job, index, piece.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            choice["finish_reason"] = _finish(piece, calls)
            message["tool_calls"] = calls
        choice["message"] = message
    return choice


def _prompt_ids(job: Job, index: int) -> dict[str, list[int]]:
    """The tokens of a choice's prompt, if the request asks for token ids."""
    if not job.body.wants_ids:
        return {}
    prompt = job.prompts[index // job.body.sampled.n]
    return {"prompt_token_ids": prompt.tokens.tolist()}


def _token_lists(sampled: Sampled, start: int = 0) -> dict[str, Any]:
    lists: dict[str, Any] = {
        "token_ids": sampled.tokens[start:].tolist(),
        "token_logprobs": sampled.logprobs[start:].tolist(),
        "token_policy_versions": sampled.versions[start:].tolist(),
    }
    kept_sets = sets_to_lists(sampled.recorded)
    if kept_sets:
        lists["sampling_mask"] = kept_sets[start:]
    top_logprobs = top_to_lists(sampled.recorded)
    if top_logprobs:
        lists["token_top_logprobs"] = top_logprobs[start:]
    return lists


def logprobs(job: Job, sampled: Sampled, start: int) -> dict[str, Any]:
    """Log-probs of a completion's tokens from token `start`, under the distribution that sampled them."""
    pieces = [token_bytes(job.tokenizer, token) for token in sampled.tokens.tolist()]
    texts = [piece.decode(errors="replace") for piece in pieces]
    values = [min(value, 0.0) for value in sampled.logprobs.tolist()]
    if job.kind == "text":
        offsets = _character_offsets(pieces)
        columns = {"tokens": texts[start:], "token_logprobs": values[start:], "text_offset": offsets[start:]}
        return columns | {"top_logprobs": None, "bytes": [list(piece) for piece in pieces[start:]]}
    content = [
        {"token": text, "logprob": value, "bytes": list(piece), "top_logprobs": []}
        for text, piece, value in zip(texts[start:], pieces[start:], values[start:], strict=True)
    ]
    return {"content": content, "refusal": None}


def _character_offsets(pieces: Sequence[bytes]) -> list[int]:
    """For each token, the index of the character in which the token begins."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    count = 0
    offsets = []
    for piece in pieces:
        starts = []
        for byte in piece:
            was_inside = bool(decoder.getstate()[0])
            new = len(decoder.decode(bytes([byte])))
            # The byte may reveal that the previous character is broken, and start the next character.
            breaks = was_inside and new > (not decoder.getstate()[0])
            starts.append(count + breaks)
            count += new
        if starts:
            offsets.append(starts[0])
        else:
            offsets.append(count)
    return offsets


# --- Tool calls.


def message_parts(job: Job, index: int, text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """A message's content and tool calls.

    There are calls only if the request has tools and all calls after the reply's thoughts are valid.
    """
    if not job.body.functions:
        return text, []
    opening = opening_tag(job.prompts[0].text)  # a chat has one prompt
    content, calls = openai_calls(text, after_thoughts(whole_reply(opening, text)))
    return content, [{"id": call_id(job.id, index, number)} | call for number, call in enumerate(calls)]


def _finish(piece: Piece, calls: list[dict[str, Any]]) -> str | None:
    """The finish reason of a message; a truncated message keeps its reason, as it may have lost another call."""
    if calls and piece.finish == "stop":
        return "tool_calls"
    return piece.finish


def call_id(reply: str, index: int, call_index: int) -> str:
    """The id of a call, which encodes the reply, the choice and the call's index."""
    return f"call_{reply}_{index}_{call_index}"


def row_of_call(call: Any) -> str:
    """The id of the completion that made a call; empty for an id that is not from `call_id`."""
    if not isinstance(call, str):
        return ""
    parts = call.split("_")
    if len(parts) != 4:
        return ""
    return f"{parts[1]}/{parts[2]}"


# --- Streams.


class Chunks:
    """The chunks of one choice in a stream; each contains only new text and tokens."""

    def __init__(self, job: Job, index: int):
        """Starts with no text and no tokens sent."""
        self._job = job
        self._index = index
        self._version = job.version
        self._text = ""
        self._tokens = 0

    def first(self) -> list[dict[str, Any]]:
        """The chunk before the first token: the role, and the prompt's tokens if requested."""
        prompt = _prompt_ids(self._job, self._index)
        if self._job.kind == "chat":
            return [self._chunk({"delta": {"role": "assistant", "content": ""}}, prompt)]
        if prompt:
            return [self._chunk({"text": ""}, prompt)]
        return []

    def next(self, piece: Piece) -> list[dict[str, Any]]:
        """The new content of a piece; the last piece also has the finish reason."""
        if len(piece.sampled.versions):
            self._version = oldest_sampled_version([piece])
        text = piece.text
        calls = []
        if self._job.body.functions and self._job.kind == "chat":
            # Until the completion ends, only text before a tool call is certain.
            if piece.finish is None:
                text = piece.text.partition(CALL_BEGINS)[0].rstrip()
            else:
                content, calls = message_parts(self._job, self._index, piece.text)
                text = content or ""
        new_text = ""
        if text.startswith(self._text):
            new_text = text[len(self._text) :]
        finish = _finish(piece, calls)
        has_new_ids = self._job.body.wants_ids and len(piece.sampled.tokens) > self._tokens
        if not new_text and not finish and not has_new_ids:
            return []
        self._text += new_text
        delta: dict[str, Any] = {"text": new_text}
        if self._job.kind == "chat":
            message: dict[str, Any] = {}
            if new_text:
                message["content"] = new_text
            if calls:
                message["tool_calls"] = [{"index": call_index} | call for call_index, call in enumerate(calls)]
            delta = {"delta": message}
        extra: dict[str, Any] = {"finish_reason": finish}
        if self._job.body.sampled.wants_logprobs:
            extra["logprobs"] = logprobs(self._job, piece.sampled, self._tokens)
        if self._job.body.wants_ids:
            extra |= _token_lists(piece.sampled, self._tokens)
        self._tokens = len(piece.sampled.tokens)
        return [self._chunk(delta, extra)]

    def _chunk(self, delta: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": self._index, **delta, "logprobs": None, "finish_reason": None} | extra
        return _chunk_head(self._job) | {"choices": [choice], "policy_version": self._version}


def last_chunk(job: Job, pieces: Sequence[Piece]) -> dict[str, Any]:
    """The token counts at the end of a stream."""
    return _chunk_head(job) | {"choices": [], "usage": usage(job, pieces)}


def _chunk_head(job: Job) -> dict[str, Any]:
    object_ = OBJECTS[job.kind]
    if job.kind == "chat":
        object_ += ".chunk"
    return _head(job, object_)
