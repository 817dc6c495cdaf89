"""Where groups come from beside the policy itself: a store in shuffled order, and other rows mixed into groups."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from recjax.algorithms import presets
from recjax.algorithms.losses import Algorithm
from recjax.config_experience import MissingLogprobs
from recjax.experience.batch import Shape, pad
from recjax.experience.group import Completion, Group
from recjax.experience.rows import groups_of
from recjax.experience.store import read
from recjax.experience.tokenise import tokenised
from recjax.hub.policy import Policy
from recjax.models.logprobs import completion_logprobs
from recjax.models.placement import on_host, put_rows
from recjax.models.sampling import Sampling
from recjax.tasks.prompts import batch_indices

_logprobs = jax.jit(completion_logprobs, static_argnames=("decoder", "sampling", "chunk"))


def load_groups(folder: str | Path, policy: Policy) -> list[Group]:
    """The groups of a store, tokenised, in the order of their first rows; pending rows among them.

    Raises:
        ValueError: a store that cannot be read or tokenised, or a group with two prompts.
    """
    rows, firsts = tokenised(read(folder), policy), {}
    for row in rows:
        first = firsts.setdefault(row.group_id, row)
        own = row.trajectory is not None  # an agent's context, and not the question
        if not (own or np.array_equal(row.prompt_tokens, first.prompt_tokens)):
            raise ValueError(
                f"{folder}: group {row.group_id!r} has two prompts, those of rows {first.id!r} and {row.id!r};"
                " rewards are compared between answers to one question, so import them as groups of their own"
            )
    return groups_of(rows)


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
    rows = [completion for group in groups for completion in group.completions]
    without = [row for row in rows if row.behaviour_logprobs is None]
    if without and missing == "error":
        raise ValueError(
            f"{len(without)} of {len(rows)} rows have no behaviour log-probs, the first {without[0].id!r} of source"
            f" {without[0].source!r}; say in experience.missing_logprobs what stands for them: 'unneeded' (for"
            f" {', '.join(_presets_without())}), 'initial' or 'current'"
        )
    for row in rows:
        if row.behaviour_logprobs is not None and row.sampling != sampling:
            temperature, top_k, top_p = row.sampling or ("unknown",) * 3
            raise ValueError(
                f"row {row.id!r} of source {row.source!r} was sampled with temperature {temperature}, top_k {top_k},"
                f" top_p {top_p}, but rollout has {', '.join(map(str, sampling))}: its log-probs are of another"
                " distribution. Set rollout to the same, or experience.missing_logprobs to 'unneeded'"
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
    lacking = [group for group in groups if any(row.behaviour_logprobs is None for row in group.completions)]
    filled = {}
    for start in range(0, len(lacking), shape.prompts):
        part = lacking[start : start + shape.prompts]
        batch = pad(part, shape)
        arrays = put_rows((batch.prompts, batch.prompt_mask, batch.completions, batch.completion_mask))
        logprobs = on_host(_logprobs(policy.decoder, params, *arrays, sampling=sampling, chunk=chunk)[0])
        for place, group in enumerate(part):
            rows = []
            for number, row in enumerate(group.completions, start=place * shape.group):
                given = row.behaviour_logprobs
                # Rounding may leave a certain token's a little above 0.
                taken = np.minimum(logprobs[number, : len(row.tokens)], 0.0) if given is None else given
                rows.append(row._replace(behaviour_logprobs=taken))
            filled[group.id] = group._replace(completions=tuple(rows))
    return [filled.get(group.id, group) for group in groups]


def groups_at(groups: Sequence[Group], count: int, batch: int, seed: int) -> list[Group]:
    """The groups of batch number `batch` (from 1): all of them once an epoch, in an order that follows from the seed.

    A pure function of its arguments: a run that goes on has the same batches.

    Raises:
        ValueError: fewer groups than `count`.
    """
    if len(groups) < count:
        raise ValueError(f"there are {len(groups)} groups, fewer than the {count} of a batch; add some, or lower it")
    return [groups[place] for place in batch_indices(len(groups), count, batch, seed)]


def by_prompt(groups: Sequence[Group]) -> dict[bytes, list[Completion]]:
    """Completions by the tokens of their prompt, whatever group they are of; those without a reward left out."""
    found: dict[bytes, list[Completion]] = {}
    for group in groups:
        rewarded = [completion for completion in group.completions if completion.grade]
        if rewarded:
            found.setdefault(group.prompt_tokens.tobytes(), []).extend(rewarded)
    return found


def mixed(
    groups: Sequence[Group], others: Mapping[bytes, Sequence[Completion]], count: int, batch: int, seed: int
) -> list[Group]:
    """Groups with up to `count` other completions of the same prompt each; advantages are then over the whole group.

    Which ones, where there are more, follows from (seed, batch, place). A prompt that nobody else has answered stays as
    it is.

    Args:
        others: by prompt; see `by_prompt`.
    """
    made = []
    for place, group in enumerate(groups):
        known = others.get(group.prompt_tokens.tobytes(), ())
        generator = np.random.default_rng([seed, 4, batch, place])
        chosen = sorted(generator.permutation(len(known))[:count].tolist())
        made.append(group._replace(completions=(*group.completions, *(known[index] for index in chosen))))
    return made
