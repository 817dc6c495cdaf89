"""Trajectories as a batch: a row is a whole sequence, context and turns, and a trajectory has one row or several."""

from collections.abc import Sequence

import numpy as np

from recjax.experience.batch import FOREIGN, Batch
from recjax.experience.group import Completion, Group, Row


def pad_trajectories(
    groups: Sequence[Group], time: int, row_counts: tuple[int, int], *, together: bool, whole_groups: bool = False
) -> tuple[Batch, int]:
    """Trajectories of any numbers of rows as a batch of equal micro-batches, and the number of these.

    Every row has a prompt of one token, its first; `completions` are all the others. The shape is that of
    `row_counts`, unless there are more rows: then micro-batches become twice as many, or twice as large where the rows
    that stay together need it, as often as it takes.

    Args:
        time: tokens of the longest row, less the first.
        row_counts: micro-batches, and rows of each, that trajectories of one row need.
        together: rows of a trajectory stay in one micro-batch.
        whole_groups: and so do all trajectories of a group.
    Raises:
        ValueError: a row that is longer.
    """
    numbered = [
        (number, completion, row)
        for number, group in enumerate(groups)
        for completion in group.completions
        for row in rows_of_trajectory(completion, group)
    ]
    units: dict[object, list[int]] = {}
    for place, (number, completion, _) in enumerate(numbered):
        units.setdefault(number if whole_groups else completion.id if together else place, []).append(place)
    count, size = row_counts
    size = _doubled(size, max(map(len, units.values()), default=0))
    while (places := _places(list(units.values()), count, size)) is None:
        count *= 2
    batch = _empty(count * size, time, len(groups), [completion for _, completion, _ in numbered])
    first_rows: dict[str, int] = {}
    for (number, completion, row), place in zip(numbered, places, strict=True):
        batch.group_ids[place] = number
        batch.trajectories[place] = first_rows.setdefault(completion.id, place)
        _fill(batch, place, completion, row)
    return batch, count


def rows_of_trajectory(completion: Completion, group: Group) -> list[Row]:
    """All rows of a completion that have a token."""
    prompt = group.prompt_tokens if completion.prompt_tokens is None else completion.prompt_tokens
    first = Row(prompt, completion.tokens, completion.mask, completion.behaviour_logprobs)
    return [row for row in (first, *completion.further) if len(row.tokens)]


def _doubled(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size


def _places(units: list[list[int]], count: int, size: int) -> list[int] | None:
    """A place for each row, units by first fit into micro-batches; None where there is too little room."""
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
    """Rows that only fill the shape, with the parts that the completions' rewards have."""
    parts = {name for one in completions for name in (one.grade and one.grade.reward_parts) or ()}
    return Batch(
        prompts=np.zeros((rows, 1), np.int32),
        prompt_mask=np.ones((rows, 1), bool),
        completions=np.zeros((rows, time), np.int32),
        completion_mask=np.zeros((rows, time), bool),
        behaviour_logprobs=np.zeros((rows, time), np.float32),
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
    logprobs = np.nan if row.behaviour_logprobs is None else row.behaviour_logprobs
    batch.behaviour_logprobs[place, before:end] = np.where(row.mask, logprobs, 0.0)
    grade = completion.grade
    batch.rewards[place] = np.nan if grade is None else grade.reward
    batch.accurate[place], batch.truncated[place] = bool(grade and grade.accurate), completion.truncated
    batch.policy_version[place] = FOREIGN if completion.policy_version is None else completion.policy_version
    for part, values in batch.reward_parts.items():
        values[place] = ((grade and grade.reward_parts) or {}).get(part, np.nan)
