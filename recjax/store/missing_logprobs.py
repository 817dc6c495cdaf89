"""Missing behavior log-probs of stored completions: checks which algorithms need them, and fills them in."""

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
from recjax.models.sampling import KEPT_LOGPROBS, TOP_IDS, Sampling
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
    while batch := list(itertools.islice(numbers, _TOGETHER)):
        for record in contents.read(batch, None):
            problem = problem_with_sampling(record.completion, sampling)
            if problem:
                raise UserError(problem=f"{problem}, or experience.missing_logprobs to 'unneeded'")


def check_top_tokens(groups: StoredGroups) -> None:
    """Checks that the first group has recorded most likely tokens, which an algorithm with score centering reads."""
    for completion in groups[0].completions:
        if not any(row.recorded.keys() & {TOP_IDS, KEPT_LOGPROBS} for row in completion.rows):
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
    if recorded is not None and recorded.temperature == sampling.temperature:
        if all((has_sets(row.recorded, row.mask) == row.mask).all() for row in completion.rows):
            return None
    described = []
    for field in Sampling._fields:
        value = "unknown" if recorded is None else getattr(recorded, field)
        described.append(f"{field} {value}")
    return (
        f"row {completion.id!r} of source {completion.source!r} was sampled with {', '.join(described)}, but rollout"
        f" has {', '.join(map(str, sampling))}: its log-probs belong to another distribution; set the same values in"
        " rollout"
    )


@functools.cache
def _presets_without() -> list[str]:
    """The presets that do not read behavior log-probs."""
    return [name for name in presets.PRESETS if not presets.build_algorithm(name, {}).needs_behavior_logprobs]


def with_logprobs(
    groups: Sequence[Group], shape: Shape, policy: Policy, params: dict, sampling: Sampling, chunk: int
) -> list[Group]:
    """Fills in missing behavior log-probs with those under `params`.

    Args:
        shape: shape of the batches that compute the log-probs; every group must fit.
        params: all parameters of the policy that replaces the unknown behavior policy.
    """
    # A store's groups may have the ids of groups that this run samples, so indices tell them apart.
    lacking = []
    for index, group in enumerate(groups):
        if any(_lacks_logprobs(completion) for completion in group.completions):
            lacking.append(index)
    # A shape without a group size counts rows, not prompts, so that fewer groups of several completions fit.
    rows_per_group = 1
    if shape.group is None:
        rows_per_group = max([len(groups[index].completions) for index in lacking], default=1)
    size = max(shape.prompts // rows_per_group, 1)
    filled = list(groups)
    for start in range(0, len(lacking), size):
        indices = lacking[start : start + size]
        batch = [groups[index] for index in indices]
        batch_logprobs = score(policy.decoder, params, pad(batch, shape), sampling, chunk)
        # The rows in the order of the groups' completions.
        scored = iter(batch_logprobs[row_places(batch, shape)])
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
    ends = np.cumsum([len(row.tokens) for row in completion.rows])
    rows = []
    for row, values in zip(completion.rows, np.split(logprobs, ends[:-1]), strict=True):
        # The policy did not sample the tokens between turns: their log-probs are 0, as in a sampler's rows.
        rows.append(row._replace(behavior_logprobs=np.where(row.mask, values, np.float32(0))))
    return completion._replace(rows=tuple(rows))


def with_initial_logprobs(
    groups: StoredGroups, shape: Shape, policy: Policy, params: dict, sampling: Sampling, chunk: int
) -> StoredGroups:
    """Computes the missing log-probs of a store's groups once and keeps them in a temporary file; see `with_logprobs`.

    Raises:
        UserError: the cache folder, which contains the temporary file, cannot be written.
    """
    lacking = groups.chosen(groups.table["lack_logprobs"][groups.places] > 0)
    if not len(lacking):
        return groups
    # Start of each completion's log-probs in the file, by the completion's number; -1 if the store has its log-probs.
    starts = np.full(groups.last.completion + 1, -1)
    folder = cache_folder("experience")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    # A store may be larger than memory, so only the log-probs of a small one stay in memory.
    file = tempfile.SpooledTemporaryFile(_SMALL, dir=str(folder))  # noqa: SIM115 – the caller closes it
    shown = hosts.is_first() and len(lacking) > _LONG * shape.prompts
    with progress_bar("log-probs", len(lacking), unit="group", shown=shown) as bar:
        for start in range(0, len(lacking), shape.prompts):
            numbered = list(lacking[start : start + shape.prompts].numbered())
            before = [group for group, _ in numbered]
            after = with_logprobs(before, shape, policy=policy, params=params, sampling=sampling, chunk=chunk)
            with writing(folder):
                for (group, numbers), filled in zip(numbered, after, strict=True):
                    for old, new, number in zip(group.completions, filled.completions, numbers, strict=True):
                        if _lacks_logprobs(old):
                            starts[number] = file.tell()
                            for row in new.rows:
                                assert row.behavior_logprobs is not None
                                file.write(row.behavior_logprobs.astype(np.float32).tobytes())
            bar.update(len(before))
    with writing(folder):
        file.flush()

    def filled_in(group: Group, numbers: np.ndarray) -> Group:
        completions = []
        for completion, start in zip(group.completions, starts[numbers].tolist(), strict=True):
            if start >= 0:
                file.seek(start)
                tokens = sum(len(row.tokens) for row in completion.rows)
                content = file.read(tokens * np.dtype(np.float32).itemsize)
                completion = _with_logprobs(completion, np.frombuffer(content, np.float32))
            completions.append(completion)
        return group._replace(completions=tuple(completions))

    return groups.changed(filled_in)
