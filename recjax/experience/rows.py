"""From a drawn batch to rows of a store, and from groups of rows to a batch to train on."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import numpy as np

from recjax.experience.groups import Group
from recjax.experience.records import Batch
from recjax.experience.store import Experience
from recjax.models.logprobs import Sampling
from recjax.tasks.prompts import Prompts

FOREIGN = -1  # policy version of rows in a batch that another model wrote


def rows_of_batch(
    batch: Batch,
    texts: Sequence[str],
    prompts: Prompts,
    *,
    name: str,
    source: str,
    tokenizer: str,
    sampling: Sampling,
    time: datetime,
) -> list[Experience]:
    """One row a completion, in the batch's order.

    Args:
        texts: of the completions, without the tokens that ended them.
        prompts: those of the batch.
        name: of this batch, given to no other; ids of its rows and groups begin with it.
        tokenizer: of the vocabulary; see `tokenise.tokenizer_name`.
        sampling: what drew the batch.
    """
    per_prompt = len(texts) // len(prompts.texts)
    rows = []
    for place, text in enumerate(texts):
        mask, asked = batch.completion_mask[place], prompts.problems[place // per_prompt]
        chat = not isinstance(asked.prompt, str)
        parts = {part: float(values[place]) for part, values in batch.reward_parts.items()}
        rows.append(
            Experience(
                id=f"{name}/{place:05d}",
                group_id=f"{name}/{batch.group_ids[place]:05d}",
                source=source,
                completion=text,
                time=time,
                prompt=None if chat else asked.prompt,
                messages=list(asked.prompt) if chat else None,
                answer=asked.answer,
                tokenizer=tokenizer,
                prompt_tokens=prompts.tokens[place // per_prompt][prompts.mask[place // per_prompt]],
                completion_tokens=batch.completions[place][mask],
                completion_mask=mask[mask],
                behaviour_logprobs=batch.behaviour_logprobs[place][mask],
                reward=float(batch.rewards[place]),
                reward_parts=parts or None,
                accurate=bool(batch.accurate[place]),
                truncated=bool(batch.truncated[place]),
                policy_version=int(batch.policy_version[place]),
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
        )
    return rows


class Shape(NamedTuple):
    """Of a batch's arrays: prompts, completions a prompt, tokens of a prompt, tokens of a completion."""

    prompts: int
    group: int
    prompt_time: int
    time: int


def shape_of(groups: Sequence[Group], prompts: int) -> Shape:
    """The shape of batches of `prompts` groups into which any of these fit, so that one compiled update serves all."""
    rows = [row for group in groups for row in group.rows]
    return Shape(
        prompts,
        max(len(group.rows) for group in groups),
        max(len(row.prompt_tokens) for row in rows),
        max(len(row.completion_tokens) for row in rows),
    )


def batch_of_groups(groups: Sequence[Group], shape: Shape, logprobs: bool = True) -> Batch:
    """Groups of any sizes as a batch; what is missing to the shape is filled with rows that have no token.

    Such rows take no part in loss, advantages or metrics: all of their completion_mask is False. A policy version that
    is null becomes FOREIGN; `accurate` that is null becomes False; a part of the reward that a row lacks becomes NaN.

    Args:
        groups: whole, their rows with tokens and with one prompt a group.
        logprobs: False leaves behaviour log-probs out of the batch, for algorithms that read none. Where True and a row
            has none, its own are NaN, so that no number comes of them unnoticed.
    Raises:
        ValueError: a group that does not fit the shape, or a row with tokens in it that nobody drew.
    """
    batch = shape.prompts * shape.group
    parts = sorted({name for group in groups for row in group.rows for name in row.reward_parts or ()})
    prompts, completions = (
        np.zeros((shape.prompts, shape.prompt_time), np.int32),
        np.zeros((batch, shape.time), np.int32),
    )
    made = Batch(
        prompts=prompts,
        prompt_mask=np.arange(shape.prompt_time) < np.ones((shape.prompts, 1), np.int32),
        completions=completions,
        completion_mask=np.zeros(completions.shape, bool),
        behaviour_logprobs=np.zeros(completions.shape, np.float32) if logprobs else None,
        rewards=np.zeros(batch, np.float32),
        group_ids=np.repeat(np.arange(shape.prompts, dtype=np.int32), shape.group),
        policy_version=np.full(batch, FOREIGN, np.int32),
        truncated=np.zeros(batch, bool),
        accurate=np.zeros(batch, bool),
        reward_parts={name: np.full(batch, np.nan, np.float32) for name in parts},
    )
    if len(groups) > shape.prompts:
        raise ValueError(f"{len(groups)} groups do not fit a batch of {shape.prompts} prompts")
    for place, group in enumerate(groups):
        if len(group.rows) > shape.group:
            raise ValueError(f"group {group.id!r} has {len(group.rows)} rows; the batch has {shape.group} a prompt")
        _fill(prompts[place], made.prompt_mask[place], group.rows[0].prompt_tokens, f"prompt of group {group.id!r}")
        for number, row in enumerate(group.rows, start=place * shape.group):
            _fill_row(made, number, row)
    return made


def _fill_row(batch: Batch, number: int, row: Experience) -> None:
    if not row.completion_mask.all():
        raise ValueError(
            f"row {row.id!r} of source {row.source!r} has tokens that its policy did not draw (completion_mask); this"
            " version trains on completions that were drawn from their first token to their last"
        )
    _fill(batch.completions[number], batch.completion_mask[number], row.completion_tokens, f"row {row.id!r}")
    if batch.behaviour_logprobs is not None:
        known = row.behaviour_logprobs is not None
        batch.behaviour_logprobs[number, : len(row.completion_tokens)] = row.behaviour_logprobs if known else np.nan
    batch.rewards[number] = row.reward
    batch.policy_version[number] = FOREIGN if row.policy_version is None else row.policy_version
    batch.truncated[number], batch.accurate[number] = row.truncated, bool(row.accurate)
    for name, value in (row.reward_parts or {}).items():
        batch.reward_parts[name][number] = value


def _fill(tokens: np.ndarray, mask: np.ndarray, found: np.ndarray, place: str) -> None:
    if len(found) > len(tokens):
        raise ValueError(f"{place} has {len(found)} tokens; the batch has room for {len(tokens)}")
    tokens[: len(found)], mask[:] = found, np.arange(len(mask)) < len(found)
