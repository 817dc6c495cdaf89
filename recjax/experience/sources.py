"""Where groups come from beside the policy itself: a store in shuffled order, and other rows mixed into groups."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from recjax.algorithms import presets
from recjax.algorithms.losses import Algorithm
from recjax.config_experience import MissingLogprobs
from recjax.experience.groups import Group, groups_of
from recjax.experience.rows import Shape, batch_of_groups
from recjax.experience.store import Experience, read
from recjax.experience.tokenise import tokenised
from recjax.hub.policy import Policy
from recjax.models.logprobs import Sampling, completion_logprobs
from recjax.models.placement import on_host, put_rows
from recjax.tasks.prompts import batch_indices

_logprobs = jax.jit(completion_logprobs, static_argnames=("decoder", "sampling", "chunk"))


def load_groups(folder: str | Path, policy: Policy) -> list[Group]:
    """The groups of a store, tokenised, in the order of their first rows; pending rows among them.

    Raises:
        ValueError: a store that cannot be read or tokenised, or a group with two prompts.
    """
    groups = groups_of(tokenised(read(folder), policy))
    for group in groups:
        for row in group.rows[1:]:
            if not np.array_equal(row.prompt_tokens, group.rows[0].prompt_tokens):
                raise ValueError(
                    f"{folder}: group {group.id!r} has two prompts, those of rows {group.rows[0].id!r} and {row.id!r};"
                    " rewards are compared between answers to one question, so import them as groups of their own"
                )
    return groups


def check_logprobs(groups: Sequence[Group], algorithm: Algorithm, sampling: Sampling, missing: MissingLogprobs) -> None:
    """Refuses rows whose behaviour log-probs are missing, or of another distribution, unless the choice covers them.

    Args:
        sampling: the trainer's, under which log π is taken; the ratio to anything else would mean nothing.
        missing: the choice for rows without log-probs.
    Raises:
        ValueError: with source, number of rows, and remedy.
    """
    if missing == "unneeded":
        if algorithm.needs_behaviour_logprobs:
            raise ValueError(
                "experience.missing_logprobs = 'unneeded', but this algorithm reads behaviour log-probs; those that"
                f" read none are {', '.join(_presets_without())}. Or take 'initial' or 'current'"
            )
        return
    rows = [row for group in groups for row in group.rows]
    without = [row for row in rows if row.behaviour_logprobs is None]
    if without and missing == "error":
        raise ValueError(
            f"{len(without)} of {len(rows)} rows have no behaviour log-probs, the first {without[0].id!r} of source"
            f" {without[0].source!r}; say in experience.missing_logprobs what stands for them: 'unneeded' (for"
            f" {', '.join(_presets_without())}), 'initial' or 'current'"
        )
    for row in rows:
        if row.behaviour_logprobs is not None and (row.temperature, row.top_k, row.top_p) != tuple(sampling):
            raise ValueError(
                f"row {row.id!r} of source {row.source!r} was drawn with temperature {row.temperature}, top_k"
                f" {row.top_k}, top_p {row.top_p}, but rollout has {', '.join(map(str, sampling))}: its log-probs are"
                " of another distribution. Set rollout to the same, or experience.missing_logprobs to 'unneeded'"
            )


def _presets_without() -> list[str]:
    """The presets that read no behaviour log-probs."""
    return [name for name in presets.PRESETS if not presets.build_algorithm(name, {}).needs_behaviour_logprobs]


def with_logprobs(
    groups: Sequence[Group], shape: Shape, policy: Policy, params: dict, sampling: Sampling, chunk: int
) -> list[Group]:
    """Groups whose rows all have behaviour log-probs: those that lack them get the log-probs of `params`.

    Args:
        shape: of the batches in which they are computed; every group fits.
        params: all parameters of the policy that stands for the unknown one.
    """
    lacking = [group for group in groups if any(row.behaviour_logprobs is None for row in group.rows)]
    filled = {}
    for start in range(0, len(lacking), shape.prompts):
        part = [_scored(group) for group in lacking[start : start + shape.prompts]]
        batch = batch_of_groups(part, shape)
        arrays = put_rows((batch.prompts, batch.prompt_mask, batch.completions, batch.completion_mask))
        logprobs = on_host(_logprobs(policy.decoder, params, *arrays, sampling=sampling, chunk=chunk)[0])
        for place, group in enumerate(lacking[start : start + shape.prompts]):
            rows = []
            for number, row in enumerate(group.rows, start=place * shape.group):
                given = row.behaviour_logprobs
                # Rounding may leave a certain token's a little above 0.
                taken = np.minimum(logprobs[number, : len(row.completion_tokens)], 0.0) if given is None else given
                rows.append(row._replace(behaviour_logprobs=taken))
            filled[group.id] = group._replace(rows=tuple(rows))
    return [filled.get(group.id, group) for group in groups]


def _scored(group: Group) -> Group:
    """Log-probabilities do not depend on rewards, which may be pending."""
    return group._replace(rows=tuple(row._replace(reward=0.0) for row in group.rows))


def groups_at(groups: Sequence[Group], count: int, batch: int, seed: int) -> list[Group]:
    """The groups of batch number `batch` (from 1): all of them once an epoch, in an order drawn from the seed.

    A pure function of its arguments: a run that goes on has the same batches.

    Raises:
        ValueError: fewer groups than `count`.
    """
    if len(groups) < count:
        raise ValueError(f"there are {len(groups)} groups, fewer than the {count} of a batch; add some, or lower it")
    return [groups[place] for place in batch_indices(len(groups), count, batch, seed)]


def by_prompt(groups: Sequence[Group]) -> dict[bytes, list[Experience]]:
    """Rows by the tokens of their prompt, whatever group they are of; pending rows left out."""
    found: dict[bytes, list[Experience]] = {}
    for group in groups:
        for row in group.rows:
            if row.reward is not None:
                found.setdefault(row.prompt_tokens.tobytes(), []).append(row)
    return found


def mixed(
    groups: Sequence[Group], others: Mapping[bytes, Sequence[Experience]], count: int, batch: int, seed: int
) -> list[Group]:
    """Groups with up to `count` other rows of the same prompt each, advantages then being over the whole group.

    Which ones, where there are more, follows from (seed, batch, place). A prompt that nobody else has answered stays as
    it is.

    Args:
        others: by prompt; see `by_prompt`.
    """
    made = []
    for place, group in enumerate(groups):
        known = others.get(group.rows[0].prompt_tokens.tobytes(), ())
        generator = np.random.default_rng([seed, 4, batch, place])
        chosen = sorted(generator.permutation(len(known))[:count].tolist())
        added = tuple(known[index]._replace(group_id=group.id) for index in chosen)
        made.append(group._replace(rows=(*group.rows, *added)))
    return made
