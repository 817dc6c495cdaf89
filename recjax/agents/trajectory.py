"""Joins turns into rows. Completions keep the tokens that were sampled; recjax never tokenizes them again."""

import functools
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from recjax.experience.group import Completion, Row, runs_of
from recjax.experience.recorded import join_recorded
from recjax.grading.thinking import opening_tag, unclosed_tag
from recjax.hub.tokenizers import decode_after, encode_after, encode_prompts
from recjax.rollout.requests import Sampled


class Trajectory:
    """The turns of one agent, joined into rows as they arrive.

    If a turn's prompt starts with all tokens of a row, the turn extends that row, and the prompt's new tokens get mask
    False. Any other turn starts a new row.

        row: prompt a a a            turn 1 has sampled a a a
        turn 2: prompt a a a t t  →  b b
        row: prompt a a a t t b b,  mask after the prompt: 1 1 1 0 0 1 1

    Attributes:
        rows: the rows in order of their first turns.
        turns: the completion of each turn.
        ends: for each turn, its row, and where it ends among the row's tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        """Creates a trajectory without turns."""
        self._tokenizer = tokenizer
        # Complete texts of the rows; None if the prompt was given as tokens. A tuple, so that a copy keeps its texts.
        self._texts: tuple[str | None, ...] = ()
        self.rows: tuple[Row, ...] = ()
        self.turns: list[Sampled] = []
        self.ends: list[tuple[int, int]] = []

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the sampled tokens; None if there are no turns yet."""
        return min((int(turn.versions.min()) for turn in self.turns), default=None)

    @property
    def version_runs(self) -> tuple[tuple[int, int], ...]:
        """Policy versions of the sampled tokens, row by row; see `Completion.version_runs`."""
        versions = [np.zeros(0, np.int32)]
        for _, turn in sorted(zip(self.ends, range(len(self.ends)), strict=True)):
            versions.append(self.turns[turn].versions)
        return runs_of(np.concatenate(versions))

    @property
    def truncated(self) -> bool:
        """True if the last turn reached a limit."""
        return bool(self.turns) and self.turns[-1].truncated

    def tokens_of(self, text: str, rendered: bool = False) -> Int[np.ndarray, " time"]:
        """Tokenizes a prompt. If it begins with a row's text, the row's tokens stay and only new text is tokenized.

        Args:
            rendered: True if the text comes from a chat template; it then gets no begin-of-sequence token.
        Raises:
            UserError: the text gives no tokens, or the tokenizer does not know it.
        """
        longest = None  # the row with the longest text that the prompt continues
        longest_text = ""
        for number, row_text in enumerate(self._texts):
            if row_text and text.startswith(row_text) and len(row_text) > len(longest_text):
                longest = number
                longest_text = row_text
        if longest is None:
            return np.array(encode_prompts(self._tokenizer, [text], rendered=rendered)[0], np.int32)
        row_tokens = _tokens(self.rows[longest])
        new_text = text[len(longest_text) :]
        new_tokens = []
        if new_text:
            new_tokens = encode_after(self._tokenizer, row_tokens, new_text, "prompt")
        return np.concatenate([row_tokens, np.array(new_tokens, np.int32)])

    def add(self, prompt: Int[np.ndarray, " prompt_time"], sampled: Sampled, text: str | None = None) -> str:
        """Adds a turn; returns the text that it wrote, including special tokens.

        Args:
            prompt: all tokens before the turn's own.
            text: text of the prompt, if the prompt was given as text.
        """
        self.turns.append(sampled)
        number = self._extended_row(prompt)
        if number is None:
            number = len(self.rows)
            row = Row(prompt, *sampled.up_to(0).row_columns)
        else:
            row = self.rows[number]
        between = prompt[len(_tokens(row)) :]
        tokens, mask, logprobs, recorded = sampled.row_columns
        assert row.behavior_logprobs is not None
        row = Row(
            row.prompt_tokens,
            np.concatenate([row.tokens, between, tokens], dtype=np.int32),
            np.concatenate([row.mask, np.zeros(len(between), bool), mask]),
            np.concatenate([row.behavior_logprobs, np.zeros(len(between), np.float32), logprobs]),
            join_recorded([(row.recorded, len(row.tokens)), ({}, len(between)), (recorded, len(tokens))]),
        )
        self.ends.append((number, len(row.tokens)))
        written = decode_after(self._tokenizer, prompt, sampled.tokens)
        row_text = None
        if text is not None:
            row_text = text + written
        # The tuples are new, so that copies of this trajectory keep theirs.
        rows = list(self.rows)
        rows[number : number + 1] = [row]
        self.rows = tuple(rows)
        texts = list(self._texts)
        texts[number : number + 1] = [row_text]
        self._texts = tuple(texts)
        return written

    def _extended_row(self, prompt: Int[np.ndarray, " prompt_time"]) -> int | None:
        """Number of the longest row with whose tokens the prompt starts; None if it starts with no row's."""
        longest = None
        most_tokens = -1
        for number, row in enumerate(self.rows):
            tokens = _tokens(row)
            if len(tokens) > most_tokens and np.array_equal(tokens, prompt[: len(tokens)]):
                longest = number
                most_tokens = len(tokens)
        return longest


def _tokens(row: Row) -> Int[np.ndarray, " time"]:
    return np.concatenate([row.prompt_tokens, row.tokens])


def said(sampled: Sampled, tokenizer: PreTrainedTokenizerBase, prompt: Int[np.ndarray, " time"]) -> str:
    """The text of a completion of a prompt, without the token that ended it."""
    written = sampled.tokens
    if not sampled.truncated:
        written = written[:-1]
    return decode_after(tokenizer, prompt, written)


def up_to_stop(
    sampled: Sampled, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase, prompt: Int[np.ndarray, " time"]
) -> tuple[Sampled, str, bool]:
    """Cuts a completion after its first stop string. Returns it, its text before the string, and True if one was found.

    The completion keeps its sampled tokens up to the token that completes the string.

    Args:
        prompt: tokens before the completion.
    """
    text = said(sampled, tokenizer, prompt)
    if not any(end in text for end in stop):
        return sampled, text, False
    for count in range(1, len(sampled.tokens) + 1):
        text = decode_after(tokenizer, prompt, sampled.tokens[:count])
        starts = [text.index(end) for end in stop if end in text]
        if starts:
            return sampled.up_to(count), text[: min(starts)], True
    return sampled, text, False


@functools.lru_cache(maxsize=64)  # the completions of a group have one prompt
def prompt_opening(tokenizer: PreTrainedTokenizerBase, prompt: tuple[int, ...]) -> str:
    """The thinking tag that ends a prompt of these token ids; empty if the prompt ends without a tag."""
    return opening_tag(decode_after(tokenizer, (), prompt))


def thoughts_opening(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> str:
    """The opening tag of the thoughts that a completion's text starts inside; empty if it starts outside thoughts.

    The text of a trajectory is its last reply. A reply that continues earlier replies as plain text starts inside any
    thoughts that they have not closed. A special token at the end of a reply, or after it, starts a new turn.
    """
    if not completion.rows:
        return ""
    number = len(completion.rows) - 1
    end = None
    if completion.turns:
        number, end = completion.turns[-1]
    row = completion.rows[number]
    tokens = row.tokens[:end]
    mask = row.mask[:end]
    opening = prompt_opening(tokenizer, tuple(row.prompt_tokens.tolist()))
    if not completion.turns and mask.all():
        return opening
    # Pieces of the row: each is a reply, or text between two replies.
    starts = {0}
    starts.update((np.flatnonzero(np.diff(mask)) + 1).tolist())
    starts.update(turn.end for turn in completion.turns if turn.row == number)
    starts.discard(len(tokens))
    if starts == {0}:
        return opening
    special_ids = set(tokenizer.all_special_ids)
    for start, stop in itertools.pairwise(sorted(starts)):
        piece = tokens[start:stop]
        is_reply = mask[start]
        turn_marks = piece
        if is_reply:
            turn_marks = piece[-1:]
        if special_ids.intersection(turn_marks.tolist()):
            opening = ""
        text = decode_after(tokenizer, (), piece)
        if is_reply or opening:
            opening = unclosed_tag(opening + text)
        if not opening:
            opening = opening_tag(text)
    return opening
