"""Tokenizes the texts of a store's rows for a policy."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax.experience.store import CHAT_TEMPLATE, PROMPT_LEFT_OUT, Experience
from recjax.hub.chat_rendering import render_chats, turn_end
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import check_embedded, encode_after, encode_prompts


def tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """A name that identifies a vocabulary: a digest of every token and its id."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def tokenized(rows: Sequence[Experience], policy: Policy) -> list[Experience]:
    """Adds tokens of the policy's vocabulary to all rows; existing tokens stay unchanged.

    Prompts are tokenized exactly as for sampling: chats with the model's template, plain text with one
    begin-of-sequence token if the tokenizer uses one. A completion gets an end token unless its row is truncated. The
    end token of a chat is the one that the template writes after an assistant turn; the end token of plain text is the
    policy's first stop token. The mask is True at all new completion tokens.

    Raises:
        ValueError: tokens of another vocabulary, a prompt that was not recorded, text that the tokenizer does not know,
            a token without an embedding in the model, or a completion without tokens; the message names the row. Or a
            chat that the tokenizer's template rejects.
    """
    name, prompts, done, begin = tokenizer_name(policy.tokenizer), {}, [], ""
    if any(row.completion_tokens is None and row.messages is not None for row in rows):
        # The whitespace that the chat template writes between a rendered prompt and the reply, as in Llama 2.
        opening, reply = [{"role": "user", "content": "hello"}], {"role": "assistant", "content": "recjax-reply"}
        with contextlib.suppress(ValueError):
            prompt, chat = render_chats(policy.tokenizer, [opening, [*opening, reply, *opening]])
            space, found, _ = chat.removeprefix(prompt).partition(reply["content"])
            begin = space if found and chat.startswith(prompt) and not space.strip() else ""
    # All rows of a group have the same prompt, so render each chat only once.
    asked = {_chat_of(row): row for row in rows if row.prompt_tokens is None and row.messages}
    chats, variables = [row.messages for row in asked.values()], [chat_template_of(row) for row in asked.values()]
    texts = render_chats(policy.tokenizer, chats, variables=variables) if asked else []
    rendered = dict(zip(asked, texts, strict=True))
    for row in rows:
        if row.tokenizer not in (None, name):
            raise ValueError(
                f"row {row.id!r} of source {row.source!r} has tokens of another vocabulary ({row.tokenizer}) than this"
                f" policy's ({name}); train the model with that vocabulary, or import the texts without tokens"
            )
        if row.prompt_tokens is None and row.prompt == PROMPT_LEFT_OUT:
            raise ValueError(
                f"row {row.id!r} of source {row.source!r}: its prompt was not recorded, so it cannot be trained on;"
                " remove the row, and record prompts"
            )
        if row.prompt_tokens is None:
            is_chat = row.messages is not None
            text = rendered[_chat_of(row)] if is_chat else row.prompt
            if (text, is_chat) not in prompts:
                try:
                    (ids,) = encode_prompts(policy.tokenizer, [text], rendered=is_chat)
                except ValueError as error:
                    raise ValueError(f"row {row.id!r} of source {row.source!r}: {error}") from error
                prompts[text, is_chat] = np.array(ids, np.int32)
            row = row._replace(prompt_tokens=prompts[text, is_chat])
        if row.completion_tokens is None:
            is_whole = row.messages is None or row.completion.startswith(begin)
            tokens = _completion_tokens(row, policy, row.completion if is_whole else begin + row.completion)
            row = row._replace(completion_tokens=tokens, completion_mask=np.ones(len(tokens), bool))
        for column in ("prompt_tokens", "completion_tokens"):
            place = f"row {row.id!r} of source {row.source!r}: {column}"
            check_embedded(policy.tokenizer, getattr(row, column), policy.vocabulary, place)
        done.append(row._replace(tokenizer=name))
    return done


def chat_template_of(row: Experience) -> dict[str, Any]:
    """The chat template variables in a row's metadata; empty if the metadata has another format."""
    found = json.loads(row.metadata).get(CHAT_TEMPLATE) if row.metadata else None
    return found if isinstance(found, dict) else {}


def _chat_of(row: Experience) -> str:
    return json.dumps([row.messages, chat_template_of(row)])


def _completion_tokens(row: Experience, policy: Policy, text: str) -> np.ndarray:
    try:
        tokens = encode_after(policy.tokenizer, row.prompt_tokens, text)
    except ValueError as error:
        raise ValueError(
            f"row {row.id!r} of source {row.source!r}: completion {row.completion!r:.80} has text outside the policy's"
            " vocabulary; remove the row, or train a model with a larger vocabulary"
        ) from error
    end = None if row.messages is None else turn_end(policy.tokenizer)
    tokens = [*tokens, *([] if row.truncated else policy.stop_ids[:1] if end is None else [end])]
    if not tokens:
        raise ValueError(f"row {row.id!r} of source {row.source!r}: the completion was cut off before its first token")
    return np.array(tokens, np.int32)
