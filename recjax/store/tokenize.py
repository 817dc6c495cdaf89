"""Tokenizes the texts of a store's completions for a policy."""

import contextlib
import hashlib
import json
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax.errors import UserError
from recjax.experience.group import Row
from recjax.experience.records import CHAT_TEMPLATE, PROMPT_LEFT_OUT, Record
from recjax.hub.chat_rendering import render_chats, turn_end
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import check_embedded, encode_after, encode_prompts
from recjax.tasks.problems import check_last_message

# A large vocabulary takes half a second, and a follower asks for each completion.
_names: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, str]] = weakref.WeakKeyDictionary()


def tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """A name that identifies a vocabulary: a digest of every token and its id."""
    size, name = _names.get(tokenizer, (None, ""))
    if size != len(tokenizer):  # added tokens make another vocabulary
        name = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
        _names[tokenizer] = len(tokenizer), name
    return name


def tokenized(records: Sequence[Record], policy: Policy) -> list[Record]:
    """Adds tokens of the policy's vocabulary to all completions; existing tokens stay unchanged.

    Prompts are tokenized exactly as for sampling: chats with the model's template, plain text with one
    begin-of-sequence token if the tokenizer uses one. A completion gets an end token unless it is truncated. The end
    token of a chat is the one that the template writes after an assistant turn; the end token of plain text is the
    policy's first stop token. The mask is True at all new completion tokens.

    Raises:
        UserError: tokens of another vocabulary, a prompt that was not recorded, text that the tokenizer does not know,
            a token without an embedding in the model, or a completion without tokens; the message names the row. Or a
            chat that the tokenizer's template rejects.
    """
    name = tokenizer_name(policy.tokenizer)
    prompts = {}
    done = []
    begin = ""
    if any(not record.completion.rows and _is_chat(record) for record in records):
        # The whitespace that the chat template writes between a rendered prompt and the reply, as in Llama 2.
        opening = [{"role": "user", "content": "hello"}]
        reply = {"role": "assistant", "content": "recjax-reply"}
        with contextlib.suppress(UserError):
            prompt, chat = render_chats(policy.tokenizer, [opening, [*opening, reply, *opening]])
            space, text_of_reply, _ = chat.removeprefix(prompt).partition(reply["content"])
            begin = space if text_of_reply and chat.startswith(prompt) and not space.strip() else ""
    # All completions of a group have the same prompt, so render each chat only once.
    to_render = {_chat_of(record): record for record in records if _lacks_prompt(record) and _is_chat(record)}
    chats: list[Any] = [record.group.prompt for record in to_render.values()]
    variables = [chat_template_of(record) for record in to_render.values()]
    texts = render_chats(policy.tokenizer, chats, variables=variables) if to_render else []
    rendered = dict(zip(to_render, texts, strict=True))
    for record in records:
        group = record.group
        completion = record.completion
        row_name = f"row {completion.id!r} of source {completion.source!r}"
        if record.tokenizer not in (None, name):
            raise UserError(
                row_name,
                f"has tokens of another vocabulary ({record.tokenizer}) than this policy's ({name})",
                "train the model with that vocabulary, or import the texts without tokens",
            )
        rows = completion.rows
        prompt_tokens = group.prompt_tokens
        if _lacks_prompt(record):
            if group.prompt == PROMPT_LEFT_OUT:
                raise UserError(
                    row_name,
                    "its prompt was not recorded, so it cannot be trained on",
                    "remove the row, and record prompts",
                )
            check_last_message(group.prompt, row_name)
            text = rendered[_chat_of(record)] if _is_chat(record) else str(group.prompt)
            if (text, _is_chat(record)) not in prompts:
                try:
                    (ids,) = encode_prompts(policy.tokenizer, [text], rendered=_is_chat(record))
                except UserError as error:
                    raise error.within(row_name) from error
                prompts[text, _is_chat(record)] = np.array(ids, np.int32)
            prompt_tokens = prompts[text, _is_chat(record)]
            rows = tuple(row._replace(prompt_tokens=prompt_tokens) for row in rows)
        if not rows:
            is_whole = not _is_chat(record) or completion.text.startswith(begin)
            tokens = _completion_tokens(
                record, prompt_tokens, policy, completion.text if is_whole else begin + completion.text
            )
            rows = (Row(prompt_tokens, tokens, np.ones(len(tokens), bool), None),)
        for row in rows:
            for column, tokens in (("prompt_tokens", row.prompt_tokens), ("completion_tokens", row.tokens)):
                check_embedded(policy.tokenizer, tokens, policy.vocabulary, f"{row_name}: {column}")
        completions = (completion._replace(rows=rows),)
        group = group._replace(prompt_tokens=prompt_tokens, completions=completions)
        done.append(record._replace(group=group, tokenizer=name))
    return done


def chat_template_of(record: Record) -> dict[str, Any]:
    """The chat template variables in a completion's metadata; empty if the metadata has another format."""
    variables = record.completion.metadata.get(CHAT_TEMPLATE)
    return variables if isinstance(variables, dict) else {}


def _is_chat(record: Record) -> bool:
    return not isinstance(record.group.prompt, str)


def _lacks_prompt(record: Record) -> bool:
    rows = record.completion.rows
    return not len(record.group.prompt_tokens) and not (rows and all(len(row.prompt_tokens) for row in rows))


def _chat_of(record: Record) -> str:
    return json.dumps([record.group.prompt, chat_template_of(record)])


def _completion_tokens(record: Record, prompt: np.ndarray, policy: Policy, text: str) -> np.ndarray:
    completion = record.completion
    row_name = f"row {completion.id!r} of source {completion.source!r}"
    try:
        tokens = encode_after(policy.tokenizer, prompt, text)
    except UserError as error:
        raise UserError(
            row_name,
            f"completion {completion.text!r:.80} has text outside the policy's vocabulary",
            "remove the row, or train a model with a larger vocabulary",
        ) from error
    end = turn_end(policy.tokenizer) if _is_chat(record) else None
    tokens = [*tokens, *([] if completion.truncated else policy.stop_ids[:1] if end is None else [end])]
    if not tokens:
        raise UserError(row_name, "the completion was cut off before its first token")
    return np.array(tokens, np.int32)
