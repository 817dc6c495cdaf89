"""Stop strings: cuts a completion after the token that completes a stop string, keeping the sampled tokens."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from recjax.hub.tokenizers import decode_after
from recjax.rollout.requests import Sampled


def up_to_stop(
    sampled: Sampled, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase, prompt: Int[np.ndarray, " time"]
) -> tuple[Sampled, str, bool]:
    """Cuts a completion after its first stop string. Returns it, its text before the string, and True if one was found.

    Args:
        prompt: tokens before the completion.
    """
    text = said(sampled, tokenizer, prompt)
    if not any(end in text for end in stop):
        return sampled, text, False
    for count in range(1, len(sampled.tokens) + 1):
        text = decode_after(tokenizer, prompt, sampled.tokens[:count])
        if found := [text.index(end) for end in stop if end in text]:
            kept = Sampled(*(column[:count] for column in sampled[:3]), truncated=False)
            return kept, text[: min(found)], True
    return sampled, text, False


def said(sampled: Sampled, tokenizer: PreTrainedTokenizerBase, prompt: Int[np.ndarray, " time"]) -> str:
    """The text of a completion of a prompt, without the token that ended it."""
    return decode_after(tokenizer, prompt, sampled.tokens if sampled.truncated else sampled.tokens[:-1])
