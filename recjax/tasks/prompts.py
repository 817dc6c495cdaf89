"""Encodes problems as token arrays, and chooses the problems of each batch."""

import functools
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax.config import Config, RolloutConfig
from recjax.errors import UserError
from recjax.hub.chat_rendering import reads_variable, render_chats
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import encode_prompts
from recjax.runtime import hosts
from recjax.tasks.loading import require_enough
from recjax.tasks.problems import REASONING_KEYS, Problem, Task, check_last_message
from recjax.tasks.toolace import CONVERSATION

logger = logging.getLogger(__name__)

Encoded = tuple[str, np.ndarray]


class Prompts(NamedTuple):
    """Encoded prompts: `tokens` and `mask` [problems, time], right-padded, with rendered texts and problems.

    `keys` has the `problem_key` of each problem if a curriculum draws from them.
    """

    tokens: np.ndarray
    mask: np.ndarray
    texts: list[str]
    problems: list[Problem]
    keys: Sequence[str] = ()

    @property
    def answers(self) -> list[str]:
        """Reference answers of the problems."""
        return [problem.answer for problem in self.problems]

    def take(self, indices: np.ndarray) -> "Prompts":
        """Selects the prompts at the given indices."""
        texts = [self.texts[index] for index in indices]
        problems = [self.problems[index] for index in indices]
        return Prompts(self.tokens[indices], self.mask[indices], texts, problems)


def prompts_digest(prompts: Prompts, task: str | None = None) -> str:
    """A digest of the prompts with their answers and columns, in order.

    Args:
        task: the only task of a mixture to digest; None digests all tasks.
    """
    digest = hashlib.sha256()
    for text, problem in zip(prompts.texts, prompts.problems, strict=True):
        if task in (None, problem.task):
            # The conversation's key contains a path.
            columns = sorted((name, value) for name, value in problem.columns.items() if name != CONVERSATION)
            digest.update(repr((text, problem.answer, columns)).encode())
    return digest.hexdigest()[:16]


def fitting(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Problem]:
    """Problems whose rendered prompts have at most `max_tokens` tokens; the processes of a run share the work."""

    def prompt_lengths(share: Sequence[Problem], first: int) -> list[int]:
        return [len(ids) for _, ids in rendered(share, first, tokenizer)]

    lengths = hosts.shared_out(prompt_lengths, problems)
    return [problem for problem, length in zip(problems, lengths, strict=True) if length <= max_tokens]


def rendered(
    problems: Sequence[Problem], first: int, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None = None
) -> list[Encoded]:
    """Text and token ids of each problem's prompt; error messages number the prompts from `first`."""
    chat_problems = [problem for problem in problems if not isinstance(problem.prompt, str)]
    for number, problem in enumerate(problems, first):
        check_last_message(problem.prompt, f"prompt {number}")
    if not reads_variable(tokenizer, "tools") and any("tools" in problem.template for problem in chat_problems):
        raise UserError(
            problem=(
                f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} reads no tools, which rows of the"
                " task have in the column 'tools'"
            ),
            remedy="take a model for tools, or remove the column",
        )
    for number, problem in enumerate(problems, first):
        if _has_key(problem, ("tool_calls",)) and not reads_variable(tokenizer, "tool_calls"):
            raise UserError(
                f"prompt {number}",
                f"a message has tool_calls, which the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
                " does not write",
                "take a model for tools, or move them into the content",
            )
    chats: list[Any] = [problem.prompt for problem in chat_problems]
    variables = [problem.template for problem in chat_problems]
    chat_texts = []
    if chats:
        chat_texts = render_chats(tokenizer, chats, variables=variables)
    are_chats = [not isinstance(problem.prompt, str) for problem in problems]
    next_chat_text = iter(chat_texts)
    texts = []
    for problem in problems:
        if isinstance(problem.prompt, str):
            texts.append(problem.prompt)
        else:
            texts.append(next(next_chat_text))
    encoded = encode_prompts(tokenizer, texts, first, rendered=are_chats, vocabulary=vocabulary)
    return [(text, np.array(ids, np.int32)) for text, ids in zip(texts, encoded, strict=True)]


def _has_key(problem: Problem, names: Sequence[str]) -> bool:
    """True if a message of the prompt has a value for one of the keys."""
    if isinstance(problem.prompt, str):
        return False
    return any(message.get(name) for message, name in itertools.product(problem.prompt, names))


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
        UserError: a prompt has no tokens, is outside the vocabulary, or is longer than `max_tokens`.
    """
    # transformers passes the value of each key under the names of all of them.
    reads_reasoning = any(reads_variable(tokenizer, name) for name in REASONING_KEYS)
    unwritten = sum(_has_key(problem, REASONING_KEYS) for problem in problems)
    if unwritten and not reads_reasoning:
        logger.warning(
            "%d of %d prompts have a message with %s, which the chat template does not write; move it into the content"
            " if the policy should read it",
            unwritten,
            len(problems),
            " or ".join(REASONING_KEYS),
        )
    pairs = hosts.shared_out(functools.partial(rendered, tokenizer=tokenizer, vocabulary=vocabulary), problems)
    texts, encoded = map(list, zip(*pairs, strict=True))
    longest = max(map(len, encoded))
    for text, ids in zip(texts, encoded, strict=True):
        if max_tokens is not None and len(ids) > max_tokens:
            raise UserError(
                f"prompt {text!r:.80}",
                f"has {len(ids)} tokens, more than rollout.max_prompt_tokens = {max_tokens}",
                f"the longest has {longest}: raise the limit, or leave such prompts out with rollout.long_prompts=drop",
            )
    lengths = np.array([len(ids) for ids in encoded])
    mask = np.arange(max_tokens or longest) < lengths[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(encoded)
    return Prompts(tokens, mask, texts, list(problems))


def batch_indices(problems: int, prompts_per_step: int, batch: int, seed: int) -> np.ndarray:
    """Indices of the problems in batch number `batch` (from 1).

    Each epoch uses every problem once, in an order that depends on (seed, epoch). A batch may span two epochs. The
    result depends only on the arguments, so a resumed run continues with the same data.
    """
    return _shuffled_indices(problems, (batch - 1) * prompts_per_step, prompts_per_step, seed)


def _shuffled_indices(problems: int, first: int, count: int, seed: int) -> np.ndarray:
    indices = np.empty(count, int)
    for offset in range(count):
        epoch, position = divmod(first + offset, problems)
        indices[offset] = _epoch_order(problems, seed, epoch)[position]
    return indices


@functools.lru_cache(maxsize=32)
def _epoch_order(problems: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, 1, epoch]).permutation(problems)


def batch_prompts(
    prompts: Prompts, config: Config, count: int, batch: int, rates: Mapping[str, float | None] | None = None
) -> Prompts:
    """The `count` train prompts of batch number `batch` (from 1); a pure function of its arguments.

    Each task of a mixture has its own epochs. A task's number of prompts in a batch is the expected number, rounded up
    or down at random (systematic sampling), so that its mean over the batches is exact.

    Args:
        rates: recent pass rates by `problem_key`, from which a curriculum draws. None: every epoch has every problem. A
            rate of None, of a problem whose newest group had no reward, gives the problem only uniform draws.
    """
    task = config.task
    seed = config.seed
    if not task.mixture and rates is None:
        return prompts.take(batch_indices(len(prompts.texts), count, batch, seed))
    sizes = Counter(problem.task for problem in prompts.problems)
    shares = task.shares()
    ends = np.cumsum([share * count for share in shares.values()]).round(9)  # A weight of 0 adds exactly 0.
    offsets = np.random.default_rng([seed, 8]).random((batch, 1))
    drawn = np.diff(np.floor(ends + offsets), axis=1, prepend=0).astype(int)  # [batch, task]
    labels = np.random.default_rng([seed, 9, batch]).permutation(np.repeat(np.arange(len(shares)), drawn[-1]))
    indices = np.empty(count, int)
    start = 0
    for task_index, name in enumerate(shares):
        before = int(drawn[:-1, task_index].sum())
        new = int(drawn[-1, task_index])
        size = sizes[name]
        if rates is None or not new:
            chosen = _shuffled_indices(size, before, new, seed)
        else:
            recent = np.array([rates.get(key, 0.5) or 0.0 for key in prompts.keys[start : start + size]])
            assert task.curriculum is not None
            chances = curriculum_chances(recent, task.curriculum.uniform)
            chosen = np.random.default_rng([seed, 10, batch, task_index]).choice(size, new, new > size, chances)
        indices[labels == task_index] = start + chosen
        start += size
    return prompts.take(indices)


def curriculum_chances(rates: np.ndarray, uniform: float) -> np.ndarray:
    """The chance of each problem: a share `uniform` for all alike, and the rest in proportion to p (1 − p).

    Args:
        rates: recent pass rate p of each problem.
    Reference: arXiv 2502.12272 (learnability p (1 − p), and batches with a share of uniform draws).
    """
    learnable = rates * (1 - rates)
    equal_chances = np.full(len(rates), 1 / len(rates))
    if not learnable.any():
        return equal_chances
    # A floor keeps enough problems drawable for a batch without repeats.
    chances = uniform * equal_chances + (1 - uniform) * learnable / learnable.sum() + 1e-12
    return chances / chances.sum()


def prompts_of(config: Config, policy: Policy, task: Task) -> tuple[Prompts, Prompts]:
    """The task's training and evaluation prompts, encoded to one width; does not load the reward.

    Raises:
        UserError: see `without_long_prompts`; also a prompt that cannot be encoded.
    """
    task = without_long_prompts(task, policy.tokenizer, config.rollout)
    if task.reward:
        require_enough(task.train, config, "raise rollout.max_prompt_tokens")
    problems = [*task.train, *task.evaluation]
    everything = encode_problems(problems, policy.tokenizer, config.rollout.max_prompt_tokens, policy.vocabulary)
    train = everything.take(np.arange(len(task.train)))
    return train, everything.take(np.arange(len(task.train), len(problems)))


def without_long_prompts(task: Task, tokenizer: PreTrainedTokenizerBase, rollout: RolloutConfig) -> Task:
    """Applies `rollout.long_prompts`: returns the task unchanged, or drops long prompts and logs their number.

    Raises:
        UserError: too few problems remain.
    """
    if rollout.long_prompts == "refuse":
        return task
    most = rollout.max_prompt_tokens
    assert most is not None
    train = fitting(task.train, tokenizer, most)
    evaluation = fitting(task.evaluation, tokenizer, most)
    limit = f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens}"
    if (task.train and len(train) < rollout.prompts_per_step) or not evaluation:
        raise UserError(
            limit,
            f"only {len(train)} of {len(task.train)} train problems and {len(evaluation)} of"
            f" {len(task.evaluation)} held-out problems fit, too few",
            "raise it",
        )
    logger.info(
        "%s: skipping %d longer train problems and %d longer held-out problems",
        limit,
        len(task.train) - len(train),
        len(task.evaluation) - len(evaluation),
    )
    return task._replace(train=train, evaluation=evaluation)
