"""Pads trajectories to a batch: each row is a sequence of context and turns; a trajectory has one or more rows."""

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int
from transformers import PreTrainedTokenizerBase

from recjax.experience.batch import FOREIGN, Batch
from recjax.experience.group import Completion, Group, Row
from recjax.tasks.grading.thinking import opening_tag, unclosed_tag


def pad_trajectories(
    groups: Sequence[Group],
    time: int,
    row_counts: tuple[int, int],
    *,
    together: bool,
    whole_groups: bool = False,
    turns: int | None = None,
) -> tuple[Batch, int]:
    """Pads trajectories to a batch of equal micro-batches; returns the batch and the number of micro-batches.

    `prompts` has the first token of each row and `completions` all later tokens. The shape follows `row_counts`. If the
    rows do not fit, it doubles the number of micro-batches until they fit. If rows that must stay together do not fit
    into one micro-batch, it doubles the size of micro-batches.

    Args:
        time: number of tokens in the longest row, without its first.
        row_counts: number of micro-batches, and rows in each, that suffice for trajectories of one row.
        together: True to keep the rows of a trajectory in one micro-batch.
        whole_groups: True to keep all trajectories of a group in one micro-batch.
        turns: largest expected number of turns; adds turn rewards to the batch. None: no turn rewards.
    Raises:
        ValueError: a row with too many tokens, or a trajectory without recorded turns.
    """
    numbered = [
        (number, completion, place, row)
        for number, group in enumerate(groups)
        for completion in group.completions
        for place, row in enumerate(completion.rows)
    ]
    units: dict[object, list[int]] = {}
    for place, (number, completion, *_) in enumerate(numbered):
        units.setdefault(number if whole_groups else completion.id if together else place, []).append(place)
    count, size = row_counts
    while size < max(map(len, units.values()), default=0):
        size *= 2
    while (places := _places(list(units.values()), count, size)) is None:
        count *= 2
    batch = _empty(count * size, time, len(groups), [completion for _, completion, *_ in numbered])
    first_rows: dict[str, int] = {}
    for (number, completion, _, row), place in zip(numbered, places, strict=True):
        batch.group_ids[place] = number
        batch.trajectories[place] = first_rows.setdefault(completion.id, place)
        _fill(batch, place, completion, row)
    if turns is None:
        return batch, count
    most = max([turns, *(len(completion.turns) for _, completion, *_ in numbered)])
    rewards, of_tokens = np.full((count * size, most), np.nan, np.float32), np.full((count * size, time), -1, np.int32)
    for (_, completion, own, row), place in zip(numbered, places, strict=True):
        before = len(row.prompt_tokens) - 1
        rewards[place, : len(completion.turns)] = turn_rewards(completion)
        of_tokens[place, before : before + len(row.tokens)] = token_turns(completion, own, row.mask)
    return batch._replace(turn_rewards=rewards, token_turns=of_tokens), count


def turn_rewards(completion: Completion) -> Float[np.ndarray, " turns"]:
    """The reward of each turn; the last turn also gets the part of the trajectory's reward that no turn was given.

    Raises:
        ValueError: the trajectory has no turns.
    """
    if not completion.turns:
        raise ValueError(
            f"row {completion.id!r}: the metadata has no turns; choose an advantage that compares whole trajectories,"
            " or start a new run"
        )
    rewards = np.array([turn.reward for turn in completion.turns])
    rewards[-1] += completion.grade.reward - rewards.sum()
    return rewards.astype(np.float32)


def token_turns(completion: Completion, row: int, mask: Bool[np.ndarray, " time"]) -> Int[np.ndarray, " time"]:
    """The turn that sampled each token of a trajectory's row; -1 at tokens that no turn sampled.

    Args:
        row: index of the row in the trajectory.
        mask: mask of the row's tokens, True at sampled tokens.
    """
    own = [place for place, turn in enumerate(completion.turns) if turn.row == row]
    ended = np.searchsorted([completion.turns[place].end for place in own], np.arange(len(mask)), side="right")
    return np.where(mask, np.array([*own, -1])[ended], -1).astype(np.int32)


def _places(units: list[list[int]], count: int, size: int) -> list[int] | None:
    """Assigns rows to places in the batch, first fit, with each unit in one micro-batch; None if they do not fit."""
    used, places = np.zeros(count, int), {}
    for unit in units:
        fitting = np.flatnonzero(used + len(unit) <= size)
        if not len(fitting):
            return None
        start = fitting[0] * size + used[fitting[0]]
        places.update(zip(unit, range(start, start + len(unit)), strict=True))
        used[fitting[0]] += len(unit)
    return [int(places[row]) for row in range(len(places))]


def _empty(rows: int, time: int, groups: int, completions: Sequence[Completion]) -> Batch:
    """An empty batch of padding rows, with an array for each reward part of the completions."""
    parts = {name for one in completions for name in (one.grade and one.grade.reward_parts) or ()}
    return Batch(
        prompts=np.zeros((rows, 1), np.int32),
        prompt_mask=np.ones((rows, 1), bool),
        completions=np.zeros((rows, time), np.int32),
        completion_mask=np.zeros((rows, time), bool),
        behavior_logprobs=np.zeros((rows, time), np.float32),
        rewards=np.zeros(rows, np.float32),
        group_ids=np.full(rows, groups, np.int32),
        policy_version=np.full(rows, FOREIGN, np.int32),
        truncated=np.zeros(rows, bool),
        accurate=np.zeros(rows, bool),
        reward_parts={name: np.full(rows, np.nan, np.float32) for name in sorted(parts)},
        token_mask=np.zeros((rows, time), bool),
        trajectories=np.arange(rows, dtype=np.int32),
    )


def _fill(batch: Batch, place: int, completion: Completion, row: Row) -> None:
    """Writes a row of a trajectory into the batch."""
    sequence, before = np.concatenate([row.prompt_tokens, row.tokens]), len(row.prompt_tokens) - 1
    end, room = len(sequence) - 1, batch.completions.shape[1]
    if end > room:
        raise ValueError(f"row {completion.id!r} has {end + 1} tokens; the batch has room for {room + 1}")
    batch.prompts[place, 0], batch.completions[place, :end] = sequence[0], sequence[1:]
    batch.token_mask[place, :end] = True
    batch.completion_mask[place, before:end] = row.mask
    logprobs = np.nan if row.behavior_logprobs is None else row.behavior_logprobs
    batch.behavior_logprobs[place, before:end] = np.where(row.mask, logprobs, 0.0)
    grade = completion.grade
    batch.rewards[place] = np.nan if grade is None else grade.reward
    batch.accurate[place], batch.truncated[place] = bool(grade and grade.accurate), completion.truncated
    batch.policy_version[place] = FOREIGN if completion.policy_version is None else completion.policy_version
    for part, values in batch.reward_parts.items():
        values[place] = ((grade and grade.reward_parts) or {}).get(part, np.nan)


def thoughts_opening(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> str:
    """The opening tag of the thoughts that a completion's text starts inside; empty if it starts outside thoughts.

    The text of a trajectory is its last reply. A reply that continues earlier replies as plain text starts inside any
    thoughts that they have not closed. A special token at the end of a reply, or after it, starts a new turn.
    """

    def text_of(ids: np.ndarray) -> str:
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    if not completion.rows:
        return ""
    place, end, _ = completion.turns[-1] if completion.turns else (-1, None, 0.0)
    row, special = completion.rows[place], set(tokenizer.all_special_ids)
    tokens, mask, opening = row.tokens[:end], row.mask[:end], opening_tag(text_of(row.prompt_tokens))
    ends = {turn.end for turn in completion.turns if turn.row == place}
    starts = sorted({0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), *ends} - {len(tokens)})
    for start, stop in itertools.pairwise(starts):
        piece = tokens[start:stop]
        if special.intersection(piece[-1:].tolist() if mask[start] else piece.tolist()):
            opening = ""
        text = text_of(piece)
        if mask[start] or opening:
            opening = unclosed_tag(opening + text)
        opening = opening or opening_tag(text)
    return opening
