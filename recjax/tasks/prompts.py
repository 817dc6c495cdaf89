"""Problems as token arrays, and which of them each batch asks."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax.hub.chat_rendering import render_chats
from recjax.hub.tokenizers import encode_prompts
from recjax.tasks.problems import Problem


class Prompts(NamedTuple):
    """Prompts of a task: `tokens` and `mask` [problems, time], right-padded; as the model saw them; their problems."""

    tokens: np.ndarray
    mask: np.ndarray
    texts: list[str]
    problems: list[Problem]

    @property
    def answers(self) -> list[str]:
        """The problems' answers."""
        return [problem.answer for problem in self.problems]

    def take(self, indices: np.ndarray) -> "Prompts":
        """The prompts at the given places."""
        texts, problems = ([column[i] for i in indices] for column in (self.texts, self.problems))
        return Prompts(self.tokens[indices], self.mask[indices], texts, problems)


def fitting(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Problem]:
    """The problems whose rendered prompts have at most `max_tokens` tokens."""
    lengths = map(len, encode_prompts(tokenizer, _texts(problems, tokenizer)))
    return [problem for problem, length in zip(problems, lengths, strict=True) if length <= max_tokens]


def _texts(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    chats = [problem.prompt for problem in problems if not isinstance(problem.prompt, str)]
    rendered = iter(render_chats(tokenizer, chats) if chats else [])
    return [problem.prompt if isinstance(problem.prompt, str) else next(rendered) for problem in problems]


def encode_problems(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, max_tokens: int | None) -> Prompts:
    """Renders, tokenises and pads prompts.

    Args:
        max_tokens: padded length in tokens; None takes the longest prompt's.
    Raises:
        ValueError: a prompt without tokens, outside the vocabulary, or longer than `max_tokens`.
    """
    texts = _texts(problems, tokenizer)
    encoded = encode_prompts(tokenizer, texts)
    longest = max(map(len, encoded))
    for text, ids in zip(texts, encoded, strict=True):
        if max_tokens is not None and len(ids) > max_tokens:
            raise ValueError(
                f"prompt {text!r:.80} has {len(ids)} tokens, more than rollout.max_prompt_tokens = {max_tokens}; the"
                f" longest has {longest}: raise the limit, or leave such prompts out with rollout.long_prompts=drop"
            )
    mask = np.arange(max_tokens or longest) < np.array([[len(ids)] for ids in encoded])
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(encoded)
    return Prompts(tokens, mask, texts, list(problems))


def batch_indices(problems: int, prompts_per_step: int, batch: int, seed: int) -> np.ndarray:
    """Places of the problems that batch number `batch` (from 1) asks.

    Every problem comes once an epoch, in an order that (seed, epoch) decides; a batch may straddle two epochs. A pure
    function of its arguments, so a resumed run goes on with the same data.
    """
    places = np.arange((batch - 1) * prompts_per_step, batch * prompts_per_step)
    return np.array([_order(problems, seed, int(place) // problems)[place % problems] for place in places])


@functools.lru_cache(maxsize=2)
def _order(problems: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, 1, epoch]).permutation(problems)
