"""Tokenizes the texts of a store's completions for a policy."""

import hashlib
import json
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax.errors import UserError
from recjax.experience.group import Completion, Row
from recjax.experience.records import CHAT_TEMPLATE, PROMPT_LEFT_OUT, Record
from recjax.hub.chat_rendering import render_chats, turn_end
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import check_embedded, encode_after, encode_prompts
from recjax.tasks.problems import check_last_message

# The size and the name of each vocabulary. To name a large one takes half a second, and a follower asks for it for each
# completion.
_names: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, str]] = weakref.WeakKeyDictionary()


def tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """A name that identifies a vocabulary: a digest of every token and its id."""
    size, name = _names.get(tokenizer, (None, ""))
    if size != len(tokenizer):  # Added tokens make a different vocabulary.
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
        name = hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
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
    chat_space = ""
    if any(not record.completion.rows and _is_chat(record) for record in records):
        chat_space = _space_before_reply(policy.tokenizer)
    rendered = _rendered(records, policy.tokenizer)
    # The tokens of each prompt; all completions of a group have the same one.
    prompts: dict[tuple[str, bool], np.ndarray] = {}
    done = []
    for record in records:
        group = record.group
        completion = record.completion
        row_name = _row_name(completion)
        if record.tokenizer not in (None, name):
            raise UserError(
                row_name,
                f"has tokens of another vocabulary ({record.tokenizer}) than this policy's ({name})",
                "train the model with that vocabulary, or import the texts without tokens",
            )
        is_chat = _is_chat(record)
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
            text = rendered[_chat_of(record)] if is_chat else str(group.prompt)
            if (text, is_chat) not in prompts:
                try:
                    (ids,) = encode_prompts(policy.tokenizer, [text], rendered=is_chat)
                except UserError as error:
                    raise error.within(row_name) from error
                prompts[text, is_chat] = np.array(ids, np.int32)
            prompt_tokens = prompts[text, is_chat]
            rows = tuple(row._replace(prompt_tokens=prompt_tokens) for row in rows)
        if not rows:
            reply = completion.text
            if is_chat and not reply.startswith(chat_space):
                reply = chat_space + reply
            tokens = _completion_tokens(record, prompt_tokens, policy, reply)
            rows = (Row(prompt_tokens, tokens, np.ones(len(tokens), bool), None),)
        for row in rows:
            check_embedded(policy.tokenizer, row.prompt_tokens, policy.vocabulary, f"{row_name}: prompt_tokens")
            check_embedded(policy.tokenizer, row.tokens, policy.vocabulary, f"{row_name}: completion_tokens")
        completions = (completion._replace(rows=rows),)
        group = group._replace(prompt_tokens=prompt_tokens, completions=completions)
        done.append(record._replace(group=group, tokenizer=name))
    return done


def _space_before_reply(tokenizer: PreTrainedTokenizerBase) -> str:
    """The whitespace that a chat template writes between a rendered prompt and the reply, as in Llama 2."""
    prompt = [{"role": "user", "content": "hello"}]
    reply = {"role": "assistant", "content": "recjax-reply"}
    try:
        prompt_text, chat_text = render_chats(tokenizer, [prompt, [*prompt, reply, *prompt]])
    except UserError:
        return ""
    if not chat_text.startswith(prompt_text):
        return ""
    space, reply_text, _ = chat_text.removeprefix(prompt_text).partition(reply["content"])
    if not reply_text or space.strip():
        return ""
    return space


def _rendered(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The texts of chats whose prompts have no tokens, by `_chat_of`; each chat is rendered only once."""
    to_render = {_chat_of(record): record for record in records if _is_chat(record) and _lacks_prompt(record)}
    if not to_render:
        return {}
    chats: list[Any] = [record.group.prompt for record in to_render.values()]
    variables = [chat_template_of(record) for record in to_render.values()]
    texts = render_chats(tokenizer, chats, variables=variables)
    return dict(zip(to_render, texts, strict=True))


def chat_template_of(record: Record) -> dict[str, Any]:
    """The chat template variables in a completion's metadata; empty if the metadata has another format."""
    variables = record.completion.metadata.get(CHAT_TEMPLATE)
    return variables if isinstance(variables, dict) else {}


def _is_chat(record: Record) -> bool:
    return not isinstance(record.group.prompt, str)


def _lacks_prompt(record: Record) -> bool:
    """True unless the group or each row has tokens of the prompt."""
    if len(record.group.prompt_tokens):
        return False
    rows = record.completion.rows
    return not rows or any(not len(row.prompt_tokens) for row in rows)


def _row_name(completion: Completion) -> str:
    return f"row {completion.id!r} of source {completion.source!r}"


def _chat_of(record: Record) -> str:
    """A text that identifies a chat and its template variables."""
    return json.dumps([record.group.prompt, chat_template_of(record)])


def _completion_tokens(record: Record, prompt: np.ndarray, policy: Policy, text: str) -> np.ndarray:
    """The tokens of a completion's text after its prompt, with an end token unless it is truncated."""
    completion = record.completion
    try:
        tokens = list(encode_after(policy.tokenizer, prompt, text))
    except UserError as error:
        raise UserError(
            _row_name(completion),
            f"completion {completion.text!r:.80} has text outside the policy's vocabulary",
            "remove the row, or train a model with a larger vocabulary",
        ) from error
    if not completion.truncated:
        chat_end = turn_end(policy.tokenizer) if _is_chat(record) else None
        if chat_end is None:
            tokens += policy.stop_ids[:1]
        else:
            tokens.append(chat_end)
    if not tokens:
        raise UserError(_row_name(completion), "the completion was cut off before its first token")
    return np.array(tokens, np.int32)
