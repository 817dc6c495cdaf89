"""Encodes problems as token arrays, and chooses the problems of each batch."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax import hosts
from recjax.hub.chat_rendering import reads_variable, render_chats
from recjax.hub.tokenizers import encode_prompts
from recjax.tasks.problems import Problem

Encoded = tuple[str, np.ndarray]


class Prompts(NamedTuple):
    """Encoded prompts: `tokens` and `mask` [problems, time], right-padded, with rendered texts and problems."""

    tokens: np.ndarray
    mask: np.ndarray
    texts: list[str]
    problems: list[Problem]

    @property
    def answers(self) -> list[str]:
        """Reference answers of the problems."""
        return [problem.answer for problem in self.problems]

    def take(self, indices: np.ndarray) -> "Prompts":
        """Selects the prompts at the given indices."""
        texts, problems = ([column[i] for i in indices] for column in (self.texts, self.problems))
        return Prompts(self.tokens[indices], self.mask[indices], texts, problems)


def fitting(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Problem]:
    """Problems whose rendered prompts have at most `max_tokens` tokens; the processes of a run share the work."""
    lengths = hosts.shared_out(lambda own, first: [len(ids) for _, ids in _encoded(own, first, tokenizer)], problems)
    return [problem for problem, length in zip(problems, lengths, strict=True) if length <= max_tokens]


def _encoded(
    problems: Sequence[Problem], first: int, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None = None
) -> list[Encoded]:
    """Text and token ids of each problem's prompt; error messages number the prompts from `first`."""
    of_chats = [problem for problem in problems if not isinstance(problem.prompt, str)]
    if not reads_variable(tokenizer, "tools") and any("tools" in problem.template for problem in of_chats):
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} reads no tools, which rows of the task"
            " have in the column 'tools'; take a model for tools, or remove the column"
        )
    chats, variables = [problem.prompt for problem in of_chats], [problem.template for problem in of_chats]
    rendered = iter(render_chats(tokenizer, chats, variables=variables) if chats else [])
    texts = [problem.prompt if isinstance(problem.prompt, str) else next(rendered) for problem in problems]
    are_chats = [not isinstance(problem.prompt, str) for problem in problems]
    encoded = encode_prompts(tokenizer, texts, first, rendered=are_chats, vocabulary=vocabulary)
    return [(text, np.array(ids, np.int32)) for text, ids in zip(texts, encoded, strict=True)]


def encode_problems(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None,
    vocabulary: int | None = None,
) -> Prompts:
    """Renders, tokenizes and pads prompts. All processes of a run must call it, and share the work if it is large.

    Args:
        max_tokens: number of tokens to pad to; None: length of the longest prompt.
        vocabulary: number of rows of the model's embedding; None checks no ids.
    Raises:
        ValueError: a prompt has no tokens, is outside the vocabulary, or is longer than `max_tokens`.
    """
    found = hosts.shared_out(functools.partial(_encoded, tokenizer=tokenizer, vocabulary=vocabulary), problems)
    texts, encoded = map(list, zip(*found, strict=True))
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
    """Indices of the problems in batch number `batch` (from 1).

    Each epoch uses every problem once, in an order that depends on (seed, epoch). A batch may span two epochs. The
    result depends only on the arguments, so a resumed run continues with the same data.
    """
    places = np.arange((batch - 1) * prompts_per_step, batch * prompts_per_step)
    return np.array([_order(problems, seed, int(place) // problems)[place % problems] for place in places])


@functools.lru_cache(maxsize=2)
def _order(problems: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, 1, epoch]).permutation(problems)
