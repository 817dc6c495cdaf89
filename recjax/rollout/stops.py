"""Stop strings: a completion up to the token that completes one, with its tokens as they were sampled."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from recjax.rollout.requests import Sampled


def up_to_stop(sampled: Sampled, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[Sampled, str, bool]:
    """A completion up to the token that completes its first stop string; its text, without that; whether it has one."""
    text = said(sampled, tokenizer)
    if not any(end in text for end in stop):
        return sampled, text, False
    for count in range(1, len(sampled.tokens) + 1):
        text = tokenizer.decode(sampled.tokens[:count])
        if found := [text.index(end) for end in stop if end in text]:
            kept = Sampled(*(column[:count] for column in sampled[:3]), truncated=False)
            return kept, text[: min(found)], True
    return sampled, said(sampled, tokenizer), False


def said(sampled: Sampled, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a completion, without the token that ended it."""
    return tokenizer.decode(sampled.tokens if sampled.truncated else sampled.tokens[:-1])
