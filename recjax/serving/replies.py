"""Replies in the form of OpenAI's API and vLLM's API: whole, and as the chunks of a stream."""

import codecs
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax.hub.tokenizers import token_bytes
from recjax.rollout.requests import Sampled
from recjax.rollout.tools import CALL, parsed_calls
from recjax.serving.bodies import Asked
from recjax.serving.sampler import Piece

CALL_BEGINS = "<tool_call>"
OBJECTS = {"chat": "chat.completion", "text": "text_completion", "generate": "generate"}
PREFIXES = {"chat": "chatcmpl", "text": "cmpl", "generate": "gen"}


class Form(NamedTuple):
    """The form of a request's reply.

    kind: chat, text or generate.
    id: id of the reply.
    created: seconds since 1970.
    model: name of the model.
    version: policy version when the request arrived.
    """

    kind: str
    id: str
    created: int
    model: str
    version: int
    asked: Asked
    tokenizer: PreTrainedTokenizerBase


def full_reply(form: Form, prompts: Sequence[np.ndarray], pieces: Sequence[Piece]) -> dict[str, Any]:
    """The complete reply to a request.

    Args:
        prompts: tokens of each prompt.
        pieces: whole completions, `form.asked.n` for each prompt.
    """
    n = form.asked.n
    choices = [_choice(form, index, prompts[index // n], piece) for index, piece in enumerate(pieces)]
    if form.kind == "generate":
        reply = {"request_id": form.id, "choices": choices, "prompt_logprobs": None}
    else:
        reply = _head(form, OBJECTS[form.kind]) | {"choices": choices, "usage": usage(prompts, pieces)}
    reply["policy_version"] = oldest_sampled_version(pieces)
    if form.asked.token_ids and len(prompts) == 1:
        reply["prompt_token_ids"] = prompts[0].tolist()
    return reply


def oldest_sampled_version(pieces: Sequence[Piece]) -> int:
    """The oldest version of the weights that sampled a token; weights may change within a completion."""
    return min(int(piece.sampled.versions.min()) for piece in pieces)


def _head(form: Form, object_: str) -> dict[str, Any]:
    return {"id": form.id, "object": object_, "created": form.created, "model": form.model}


def usage(prompts: Sequence[np.ndarray], pieces: Sequence[Piece]) -> dict[str, int]:
    """Token counts; a prompt counts once for all its completions."""
    asked, given = sum(map(len, prompts)), sum(len(piece.sampled.tokens) for piece in pieces)
    return {"prompt_tokens": asked, "completion_tokens": given, "total_tokens": asked + given}


def _choice(form: Form, index: int, prompt: np.ndarray, piece: Piece) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": piece.finish, "logprobs": None}
    if form.asked.logprobs:
        choice["logprobs"] = logprobs(form, piece.sampled, 0)
    if form.asked.token_ids:
        choice |= _token_lists(piece.sampled)
    if form.kind == "text":
        extra = {"prompt_token_ids": prompt.tolist()} if form.asked.token_ids else {}
        return choice | {"text": piece.text} | extra
    if form.kind == "chat":
        content, calls = message_parts(form, index, piece.text)
        message = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            choice["finish_reason"] = _finish(piece, calls)
            message["tool_calls"] = calls
        choice["message"] = message
    return choice


def _token_lists(sampled: Sampled, start: int = 0) -> dict[str, Any]:
    return {
        "token_ids": sampled.tokens[start:].tolist(),
        "token_logprobs": sampled.logprobs[start:].tolist(),
        "token_policy_versions": sampled.versions[start:].tolist(),
    }


def logprobs(form: Form, sampled: Sampled, start: int) -> dict[str, Any]:
    """Log-probs of a completion's tokens from token `start`, under the distribution that sampled them."""
    pieces = [token_bytes(form.tokenizer, token) for token in sampled.tokens.tolist()]
    texts = [piece.decode(errors="replace") for piece in pieces]
    values = [min(value, 0.0) for value in sampled.logprobs.tolist()]
    if form.kind == "text":
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
    decoder, count, offsets = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
    for piece in pieces:
        starts = []
        for byte in piece:
            was_inside = bool(decoder.getstate()[0])
            new = len(decoder.decode(bytes([byte])))
            # The byte may reveal that the previous character is broken, and begin the next character.
            breaks = was_inside and new > (not decoder.getstate()[0])
            starts.append(count + breaks)
            count += new
        offsets.append(starts[0] if starts else count)
    return offsets


# --- Tool calls.


def message_parts(form: Form, index: int, text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """A message's content and tool calls; calls only if the request has tools and all calls in the text are valid."""
    calls = parsed_calls(text) if form.asked.tools else []
    if not calls or any(call.error for call in calls):
        return text, []
    written = [
        {
            "id": call_id(form.id, index, place),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for place, call in enumerate(calls)
    ]
    return CALL.sub("", text).rstrip() or None, written


def _finish(piece: Piece, calls: list[dict[str, Any]]) -> str | None:
    """The finish reason of a message; a truncated message keeps its reason, as it may have lost another call."""
    return "tool_calls" if calls and piece.finish == "stop" else piece.finish


def call_id(reply: str, index: int, place: int) -> str:
    """The id of a call, which encodes the reply, the choice and the call's place."""
    return f"call_{reply}_{index}_{place}"


def place_of(call: Any) -> tuple[str, int] | None:
    """The reply and the choice's index that an id made by `call_id` encodes; None for other ids."""
    _, _, rest = call.partition("_") if isinstance(call, str) else ("", "", "")
    reply, _, numbers = rest.partition("_")
    index = numbers.partition("_")[0]
    return (reply, int(index)) if index.isdecimal() and len(index) < 9 else None


# --- Streams.


class Chunks:
    """The chunks of one choice in a stream; each contains only new text and tokens."""

    def __init__(self, form: Form, index: int, prompt: np.ndarray):
        """Starts with no text and no tokens sent."""
        self._form, self._index, self._prompt, self._text, self._tokens = form, index, prompt, "", 0
        self._version = form.version

    def first(self) -> list[dict[str, Any]]:
        """The chunk before the first token: the role, and the prompt's tokens if requested."""
        form = self._form
        delta = {"delta": {"role": "assistant", "content": ""}} if form.kind == "chat" else {"text": ""}
        asked = {"prompt_token_ids": self._prompt.tolist()} if form.asked.token_ids else {}
        return [self._chunk(delta, asked)] if form.kind == "chat" or asked else []

    def next(self, piece: Piece) -> list[dict[str, Any]]:
        """The new content of a piece; the last piece also has the finish reason."""
        self._version = oldest_sampled_version([piece]) if len(piece.sampled.versions) else self._version
        text, calls = piece.text, []
        if self._form.asked.tools and self._form.kind == "chat":
            # Until the completion ends, only text before a tool call is certain.
            if piece.finish is None:
                text = piece.text.partition(CALL_BEGINS)[0].rstrip()
            else:
                content, calls = message_parts(self._form, self._index, piece.text)
                text = content or ""
        new = text[len(self._text) :] if text.startswith(self._text) else ""
        finish = _finish(piece, calls)
        if not (new or finish or (self._form.asked.token_ids and len(piece.sampled.tokens) > self._tokens)):
            return []
        self._text += new
        delta = {"delta": {"content": new} if new else {}} if self._form.kind == "chat" else {"text": new}
        if calls:
            delta["delta"]["tool_calls"] = [{"index": place} | call for place, call in enumerate(calls)]
        extra: dict[str, Any] = {"finish_reason": finish}
        if self._form.asked.logprobs:
            extra["logprobs"] = logprobs(self._form, piece.sampled, self._tokens)
        if self._form.asked.token_ids:
            extra |= _token_lists(piece.sampled, self._tokens)
        self._tokens = len(piece.sampled.tokens)
        return [self._chunk(delta, extra)]

    def _chunk(self, delta: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": self._index, **delta, "logprobs": None, "finish_reason": None} | extra
        object_ = OBJECTS[self._form.kind] + (".chunk" if self._form.kind == "chat" else "")
        return _head(self._form, object_) | {"choices": [choice], "policy_version": self._version}


def last_chunk(form: Form, prompts: Sequence[np.ndarray], pieces: Sequence[Piece]) -> dict[str, Any]:
    """The token counts at the end of a stream."""
    object_ = OBJECTS[form.kind] + (".chunk" if form.kind == "chat" else "")
    return _head(form, object_) | {"choices": [], "usage": usage(prompts, pieces)}
