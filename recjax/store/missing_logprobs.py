"""Behavior log-probs that stored completions lack: which algorithms need them, and values that fill them in."""

import functools
import itertools
import tempfile
from collections.abc import Sequence

import numpy as np

from recjax.algorithms import presets
from recjax.algorithms.losses import Algorithm
from recjax.config import MissingLogprobs
from recjax.errors import UserError
from recjax.experience.batch import Shape, pad, row_places
from recjax.experience.group import Completion, Group
from recjax.experience.layout import score
from recjax.experience.recorded import has_sets
from recjax.hub.policy import Policy
from recjax.models.sampling import TOP_IDS, Sampling
from recjax.runtime import hosts
from recjax.runtime.cache import cache_folder
from recjax.runtime.console import progress_bar
from recjax.runtime.files import writing
from recjax.store.stored_groups import StoredGroups

_SMALL = 2**24  # bytes of log-probs that stay in memory
_TOGETHER = 256  # completions to check at a time
_LONG = 50  # batches of log-probs above which a progress bar is shown


def check_logprobs(groups: StoredGroups, algorithm: Algorithm, sampling: Sampling, missing: MissingLogprobs) -> None:
    """Checks that behavior log-probs exist and belong to the trainer's sampling distribution.

    Args:
        sampling: distribution under which the trainer computes log π; ratios to any other would be meaningless.
        missing: value of `experience.missing_logprobs`: the replacement for missing log-probs.
    Raises:
        UserError: `missing` does not allow such rows; the message contains source, number of rows and remedy.
    """
    if missing == "unneeded":
        if algorithm.needs_behavior_logprobs:
            raise UserError(
                "experience.missing_logprobs = 'unneeded'",
                "this algorithm reads behavior log-probs",
                f"set 'initial' or 'current', or choose a preset that reads none: {', '.join(_presets_without())}",
            )
        return
    lacking = groups.table["lack_logprobs"][groups.places]
    if missing == "error" and lacking.any():
        group = groups[np.argmax(lacking > 0)]
        first = next(completion for completion in group.completions if _lacks_logprobs(completion))
        raise UserError(
            problem=(
                f"{lacking.sum()} of {groups.sizes.sum()} rows have no behavior log-probs, the first is {first.id!r}"
                f" of source {first.source!r}"
            ),
            remedy=(
                "set experience.missing_logprobs to 'initial', 'current' or, for the presets"
                f" {', '.join(_presets_without())}, 'unneeded'"
            ),
        )
    # Another distribution is no error if each token has its recorded set, which only the completion itself shows.
    firsts = set(groups.table["first"][groups.places].tolist())
    contents = groups.store.contents
    numbers = (number for first, number in contents.sampled_otherwise(sampling, groups.last) if first in firsts)
    while chunk := list(itertools.islice(numbers, _TOGETHER)):
        for record in contents.read(chunk, None):
            if problem := problem_with_sampling(record.completion, sampling):
                raise UserError(problem=f"{problem}, or experience.missing_logprobs to 'unneeded'")


def check_top_tokens(groups: StoredGroups) -> None:
    """Checks that the first group has recorded most likely tokens, which an algorithm with score centering reads."""
    for completion in groups[0].completions:
        if not any(TOP_IDS in row.recorded for row in completion.rows):
            raise UserError(
                f"row {completion.id!r} of source {completion.source!r}",
                "has no recorded most likely tokens, which algorithm.score_centering reads",
                "record the store with rollout.recorded_top_k, or set algorithm.score_centering.coefficient=0",
            )


def problem_with_sampling(completion: Completion, sampling: Sampling) -> str | None:
    """The reason why an update under `sampling` cannot compute log π of the distribution that sampled a completion.

    Returns:
        None if the completion has this sampling; or if it has the same temperature, and the set of possible tokens is
        recorded for each token.
    """
    recorded = completion.sampling
    if recorded == sampling:
        return None
    # A recorded set makes up for other cuts, as log π is normalized over it, but not for another temperature.
    if recorded and recorded.temperature == sampling.temperature:
        if all((has_sets(row.recorded, row.mask) == row.mask).all() for row in completion.rows):
            return None
    pairs = zip(Sampling._fields, recorded or ("unknown",) * len(Sampling._fields), strict=True)
    return (
        f"row {completion.id!r} of source {completion.source!r} was sampled with"
        f" {', '.join(f'{field} {value}' for field, value in pairs)}, but rollout has"
        f" {', '.join(map(str, sampling))}: its log-probs belong to another distribution; set the same values in"
        " rollout"
    )


@functools.cache
def _presets_without() -> list[str]:
    """The presets that do not read behavior log-probs."""
    return [name for name in presets.PRESETS if not presets.build_algorithm(name, {}).needs_behavior_logprobs]


def with_logprobs(
    groups: Sequence[Group], shape: Shape, policy: Policy, params: dict, sampling: Sampling, chunk: int
) -> list[Group]:
    """Fills in missing behavior log-probs with the log-probs of `params`.

    Args:
        shape: shape of the batches that compute the log-probs; every group must fit.
        params: all parameters of the policy that replaces the unknown behavior policy.
    """
    # By index and not by id: a store's groups may have the ids of groups that this run samples.
    lacking = [index for index, group in enumerate(groups) if any(map(_lacks_logprobs, group.completions))]
    # A shape without a group size counts rows, not prompts, so that fewer groups of several completions fit.
    rows_per_group = 1
    if shape.group is None:
        rows_per_group = max([len(groups[index].completions) for index in lacking], default=1)
    size = max(shape.prompts // rows_per_group, 1)
    filled = list(groups)
    for start in range(0, len(lacking), size):
        indices = lacking[start : start + size]
        batch = [groups[index] for index in indices]
        scored = iter(score(policy.decoder, params, pad(batch, shape), sampling, chunk)[row_places(batch, shape)])
        for index, group in zip(indices, batch, strict=True):
            completions = []
            for completion in group.completions:
                # Rounding can put the log-prob of an almost certain token slightly above 0.
                logprobs = [np.minimum(next(scored)[: len(row.tokens)], 0.0) for row in completion.rows]
                if _lacks_logprobs(completion):
                    completion = _with_logprobs(completion, np.concatenate(logprobs))
                completions.append(completion)
            filled[index] = group._replace(completions=tuple(completions))
    return filled


def _lacks_logprobs(completion: Completion) -> bool:
    return any(row.behavior_logprobs is None for row in completion.rows)


def _with_logprobs(completion: Completion, logprobs: np.ndarray) -> Completion:
    """The completion with log-probs for the tokens of all its rows, end to end."""
    of_rows = np.split(logprobs, np.cumsum([len(row.tokens) for row in completion.rows])[:-1])
    # The policy did not sample the tokens between turns: their log-probs are 0, as in a sampler's rows.
    rows = (
        row._replace(behavior_logprobs=np.where(row.mask, values, np.float32(0)))
        for row, values in zip(completion.rows, of_rows, strict=True)
    )
    return completion._replace(rows=tuple(rows))


def with_initial_logprobs(
    groups: StoredGroups, shape: Shape, policy: Policy, params: dict, sampling: Sampling, chunk: int
) -> StoredGroups:
    """Computes the missing log-probs of a store's groups once and keeps them in a temporary file; see `with_logprobs`.

    Raises:
        UserError: the cache folder, which holds the temporary file, cannot be written.
    """
    lacking = groups.chosen(groups.table["lack_logprobs"][groups.places] > 0)
    if not len(lacking):
        return groups
    # Where a completion's log-probs begin in the file, by its number; -1: the store has them.
    starts = np.full(groups.last.completion + 1, -1)
    folder = cache_folder("experience")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    # A store may be larger than memory, so only the log-probs of a small one stay in memory.
    file = tempfile.SpooledTemporaryFile(_SMALL, dir=str(folder))  # noqa: SIM115 – the caller closes it
    shown = hosts.is_first() and len(lacking) > _LONG * shape.prompts
    with progress_bar("log-probs", len(lacking), unit="group", shown=shown) as bar:
        for start in range(0, len(lacking), shape.prompts):
            groups_before, numbers = zip(*lacking[start : start + shape.prompts].numbered(), strict=True)
            groups_after = with_logprobs(groups_before, shape, policy, params, sampling, chunk)
            before = [completion for group in groups_before for completion in group.completions]
            after = [completion for group in groups_after for completion in group.completions]
            with writing(folder):
                for old, new, number in zip(before, after, np.concatenate(numbers), strict=True):
                    if _lacks_logprobs(old):
                        starts[number] = file.tell()
                        for row in new.rows:
                            assert row.behavior_logprobs is not None
                            file.write(row.behavior_logprobs.astype(np.float32).tobytes())
            bar.update(len(groups_before))
    with writing(folder):
        file.flush()

    def filled_in(group: Group, numbers: np.ndarray) -> Group:
        completions = []
        for completion, start in zip(group.completions, starts[numbers].tolist(), strict=True):
            if start >= 0:
                file.seek(start)
                size = np.dtype(np.float32).itemsize * sum(len(row.tokens) for row in completion.rows)
                completion = _with_logprobs(completion, np.frombuffer(file.read(size), np.float32))
            completions.append(completion)
        return group._replace(completions=tuple(completions))

    return groups.changed(filled_in)
