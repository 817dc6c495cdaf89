"""Converts groups to rows of a store, and rows back to groups.

Each row of a completion is one store row, with the completion's text and reward. The column `trajectory` has the
completion's id if the completion has several rows, or a prompt other than the group's.
"""

import json
import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from recjax.experience.group import Completion, Grade, Group, Row, Turn
from recjax.experience.store import Experience
from recjax.models.sampling import Sampling

_VERSIONS, _TURNS = "token_versions", "turns"  # metadata keys for `Completion.version_runs` and `Completion.turns`
_EMPTY = np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32)


def rows_of(groups: Sequence[Group], tokenizer: str | None, time: datetime) -> list[Experience]:
    """Converts groups to store rows, in order; a completion without rows becomes a store row without tokens.

    Args:
        tokenizer: name of the tokens' vocabulary; see `tokenize.tokenizer_name`.
        time: time to record in the rows.
    """
    return [
        row for group in groups for completion in group.completions for row in _rows(group, completion, tokenizer, time)
    ]


def _rows(group: Group, completion: Completion, tokenizer: str | None, time: datetime) -> list[Experience]:
    chat = not isinstance(group.prompt, str)
    is_rewarded = completion.grade is not None and completion.grade.reward is not None
    reward, parts, accurate, _ = completion.grade if is_rewarded else (None,) * 4
    metadata = {_VERSIONS: completion.version_runs, _TURNS: completion.turns}
    metadata = {**completion.metadata, **{key: value for key, value in metadata.items() if value}}
    rows = completion.rows or (Row(group.prompt_tokens, *_EMPTY),)
    own_prompt = len(rows) > 1 or not np.array_equal(rows[0].prompt_tokens, group.prompt_tokens)
    common = Experience(
        id=completion.id,
        group_id=group.id,
        source=completion.source,
        completion=completion.text,
        time=time,
        prompt=None if chat else group.prompt,
        messages=list(group.prompt) if chat else None,
        answer=group.answer,
        tokenizer=tokenizer,
        reward=reward,
        reward_parts=parts,
        accurate=accurate,
        truncated=completion.truncated,
        policy_version=completion.policy_version,
        trajectory=completion.id if own_prompt else None,
        metadata=json.dumps(metadata) if metadata else None,
        **dict(zip(Sampling._fields, completion.sampling or (None,) * len(Sampling._fields), strict=True)),
    )
    return [
        common._replace(
            id=f"{completion.id}+{place}" if place else completion.id,
            prompt_tokens=row.prompt_tokens,
            completion_tokens=row.tokens,
            completion_mask=row.mask,
            behavior_logprobs=row.behavior_logprobs,
        )
        for place, row in enumerate(rows)
    ]


def groups_of(rows: Iterable[Experience]) -> list[Group]:
    """Collects tokenized rows into groups, ordered by first row; a group takes the prompt of its first row."""
    members: dict[str, list[Experience]] = {}
    for row in rows:
        members.setdefault(row.group_id, []).append(row)
    return [group_of(name, each) for name, each in members.items()]


def group_of(name: str, rows: Sequence[Experience]) -> Group:
    """Makes a group with the id `name` from tokenized rows that have the same prompt."""
    first = rows[0]
    prompt = first.messages if first.prompt is None else first.prompt
    trajectories: dict[str, list[Experience]] = {}
    for row in rows:
        trajectories.setdefault(row.trajectory or row.id, []).append(row)
    return Group(name, first.prompt_tokens, tuple(map(_completion, trajectories.values())), prompt, first.answer)


def _completion(rows: Sequence[Experience]) -> Completion:
    row = rows[0]
    if row.trajectory is not None and row.id != row.trajectory:
        raise ValueError(
            f"row {row.id!r}: the first row of its trajectory {row.trajectory!r} is not before it; restore the first"
            " row, or remove all rows of the trajectory"
        )
    metadata = json.loads(row.metadata) if row.metadata else {}
    runs, masks = metadata.get(_VERSIONS), [each.completion_mask for each in rows]
    # Token versions in another format count as none.
    are_runs = (
        isinstance(runs, list)
        and all(isinstance(run, list) and len(run) == 2 and all(type(number) is int for number in run) for run in runs)
        and all(mask is not None for mask in masks)
        and sum(count for _, count in runs) == sum(int(mask.sum()) for mask in masks)
    )
    return Completion(
        id=row.id,
        source=row.source,
        text=row.completion,
        rows=tuple(
            Row(each.prompt_tokens, each.completion_tokens, each.completion_mask, each.behavior_logprobs)
            for each in rows
            if each.completion_tokens is None or len(each.completion_tokens)
        ),
        sampling=row.sampling,
        policy_version=row.policy_version,
        truncated=row.truncated,
        grade=None if row.reward is None else Grade(row.reward, row.reward_parts, row.accurate),
        version_runs=tuple(map(tuple, runs)) if are_runs else (),
        turns=_turns(metadata.get(_TURNS), rows),
        metadata={key: value for key, value in metadata.items() if key not in (_VERSIONS, _TURNS)},
    )


def _turns(found: Any, rows: Sequence[Experience]) -> tuple[Turn, ...]:
    """Checks the turns in a trajectory's metadata; empty if they have another format."""
    are_turns = isinstance(found, list) and all(
        isinstance(one, list)
        and len(one) == 3
        and all(type(number) is int for number in one[:2])
        and type(one[2]) in (int, float)
        and math.isfinite(one[2])
        and 0 <= one[0] < len(rows)
        and 0 < one[1] <= len(rows[one[0]].completion_tokens)
        for one in found
    )
    return tuple(Turn(*one[:2], float(one[2])) for one in found) if are_turns else ()
