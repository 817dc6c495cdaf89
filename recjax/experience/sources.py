"""Sources of groups other than the policy: a store in shuffled order, and stored rows mixed into sampled groups."""

import functools
import tempfile
from collections.abc import Sequence

import numpy as np

from recjax import hosts
from recjax.algorithms import presets
from recjax.algorithms.losses import Algorithm
from recjax.cache import cache_folder
from recjax.config import MissingLogprobs
from recjax.console import progress_bar
from recjax.experience.batch import Shape, pad, row_places
from recjax.experience.group import Completion, Group, has_sets
from recjax.experience.layout import score
from recjax.experience.stored_groups import ByPrompt, StoredGroups
from recjax.files import writing
from recjax.hub.policy import Policy
from recjax.models.sampling import Sampling
from recjax.tasks.prompts import batch_indices

_SMALL = 2**24  # bytes of log-probs that stay in memory
_TOGETHER = 256  # completions to check at a time
_LONG = 50  # batches of log-probs above which a progress bar is shown


def check_logprobs(groups: StoredGroups, algorithm: Algorithm, sampling: Sampling, missing: MissingLogprobs) -> None:
    """Checks that behavior log-probs exist and belong to the trainer's sampling distribution.

    Args:
        sampling: distribution under which the trainer computes log π; ratios to any other would be meaningless.
        missing: value of `experience.missing_logprobs`: the replacement for missing log-probs.
    Raises:
        ValueError: `missing` does not allow such rows; the message contains source, number of rows and remedy.
    """
    if missing == "unneeded":
        if algorithm.needs_behavior_logprobs:
            raise ValueError(
                "experience.missing_logprobs = 'unneeded': this algorithm reads behavior log-probs; set 'initial' or"
                f" 'current', or choose a preset that reads none: {', '.join(_presets_without())}"
            )
        return
    index, members = groups.index, groups.members
    kinds, origins = index.kinds[members], index.origins
    has_logprobs = np.array([known for *_, known in origins])[kinds]

    def first_of(flags: np.ndarray) -> tuple[str, str, Sampling | None]:
        place = members[np.argmax(flags)]
        (record,) = groups.store.read(index.numbers[[place]], None)
        return record.completion.id, *origins[index.kinds[place]][:2]

    if missing == "error" and not has_logprobs.all():
        name, source, _ = first_of(~has_logprobs)
        raise ValueError(
            f"{(~has_logprobs).sum()} of {len(members)} rows have no behavior log-probs, the first is {name!r} of"
            f" source {source!r}; set experience.missing_logprobs to 'initial', 'current' or, for the presets"
            f" {', '.join(_presets_without())}, 'unneeded'"
        )
    others = np.array([known and found != sampling for _, found, known in origins])[kinds]
    for part in np.split(members[others], range(_TOGETHER, others.sum(), _TOGETHER)):
        records = groups.store.read(index.numbers[part], None)
        for record in records:
            if problem := problem_with_sampling(record.completion, sampling):
                raise ValueError(f"{problem}, or experience.missing_logprobs to 'unneeded'")


def problem_with_sampling(completion: Completion, sampling: Sampling) -> str | None:
    """The reason why an update under `sampling` cannot compute log π of the distribution that sampled a completion.

    Returns:
        None if the completion has this sampling; or if it has the same temperature, and the set of possible tokens is
        recorded for each token.
    """
    found = completion.sampling
    if found == sampling:
        return None
    if found and found.temperature == sampling.temperature:
        if all((has_sets(row.recorded, row.mask) == row.mask).all() for row in completion.rows):
            return None
    pairs = zip(Sampling._fields, found or ("unknown",) * len(Sampling._fields), strict=True)
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
    lacking = [group for group in groups if any(_lacks_logprobs(one) for one in group.completions)]
    most = max([len(group.completions) for group in lacking], default=1) if shape.group is None else 1
    together, filled = max(shape.prompts // most, 1), {}
    for start in range(0, len(lacking), together):
        part = lacking[start : start + together]
        scored = iter(score(policy, params, pad(part, shape), sampling, chunk)[row_places(part, shape)])
        for group in part:
            completions = []
            for one in group.completions:
                # Rounding can put the log-prob of an almost certain token slightly above 0.
                now = [np.minimum(next(scored)[: len(row.tokens)], 0.0) for row in one.rows]
                completions.append(_with_logprobs(one, np.concatenate(now)) if _lacks_logprobs(one) else one)
            filled[group.id] = group._replace(completions=tuple(completions))
    return [filled.get(group.id, group) for group in groups]


def _lacks_logprobs(completion: Completion) -> bool:
    return any(row.behavior_logprobs is None for row in completion.rows)


def _with_logprobs(completion: Completion, logprobs: np.ndarray) -> Completion:
    """The completion with log-probs for the tokens of all its rows, end to end."""
    parts = np.split(logprobs, np.cumsum([len(row.tokens) for row in completion.rows])[:-1])
    rows = (
        row._replace(behavior_logprobs=np.where(row.mask, part, np.float32(0)))
        for row, part in zip(completion.rows, parts, strict=True)
    )
    return completion._replace(rows=tuple(rows))


def with_initial_logprobs(
    groups: StoredGroups, shape: Shape, policy: Policy, params: dict, sampling: Sampling, chunk: int
) -> StoredGroups:
    """Computes the missing log-probs of a store's groups once and keeps them in a temporary file; see `with_logprobs`.

    Raises:
        ValueError: the cache folder, which holds the temporary file, cannot be written.
    """
    index = groups.index
    lacks = ~np.array([known for *_, known in index.origins])[index.kinds]
    lacking = groups.chosen(groups.any_in(lacks[groups.members]))
    if not len(lacking):
        return groups
    # The place of a completion's log-probs in the file, by number; -1: the store has them.
    places, end, folder = np.full(int(index.numbers.max()) + 1, -1), 0, cache_folder("experience")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    file = tempfile.SpooledTemporaryFile(_SMALL, dir=folder)
    shown = hosts.is_first() and len(lacking) > _LONG * shape.prompts
    with progress_bar("log-probs", len(lacking), unit="group", shown=shown) as bar:
        for start in range(0, len(lacking), shape.prompts):
            part = lacking[start : start + shape.prompts]
            before = list(part)
            filled = with_logprobs(before, shape, policy, params, sampling, chunk)
            numbers = iter(index.numbers[part.members].tolist())
            for old, new in zip(before, filled, strict=True):
                for was, one, number in zip(old.completions, new.completions, numbers, strict=False):
                    if _lacks_logprobs(was):
                        with writing(folder):
                            for row in one.rows:
                                file.write(row.behavior_logprobs.astype(np.float32).tobytes())
                        places[number], end = end, end + 4 * sum(len(row.tokens) for row in one.rows)
            bar.update(len(part))
    with writing(folder):
        file.flush()

    def filled_in(group: Group, numbers: np.ndarray) -> Group:
        completions = []
        for one, place in zip(group.completions, places[numbers].tolist(), strict=True):
            if place >= 0:
                file.seek(place)
                size = 4 * sum(len(row.tokens) for row in one.rows)
                one = _with_logprobs(one, np.frombuffer(file.read(size), np.float32))
            completions.append(one)
        return group._replace(completions=tuple(completions))

    return groups.changed(filled_in)


def groups_at(groups: Sequence[Group], count: int, batch: int, seed: int) -> list[Group]:
    """The groups of batch number `batch` (from 1): every group once per epoch, in an order that depends on the seed.

    A pure function of its arguments, so that a resumed run gets the same batches.

    Raises:
        ValueError: fewer groups than `count`.
    """
    if len(groups) < count:
        raise ValueError(f"{len(groups)} groups are fewer than the {count} in a batch; add groups, or lower the batch")
    places = batch_indices(len(groups), count, batch, seed)
    return list(groups.chosen(places)) if isinstance(groups, StoredGroups) else [groups[place] for place in places]


def mixed(groups: Sequence[Group], others: ByPrompt, count: int, batch: int, seed: int) -> list[Group]:
    """Adds up to `count` stored completions of the same prompt to each group, for advantages over the whole group.

    If there are more than `count`, the choice is random and depends only on (seed, batch, index of the group). A group
    whose prompt has no stored completions stays unchanged.

    Args:
        others: stored completions by prompt tokens.
    """
    made = []
    for place, group in enumerate(groups):
        known = others.get(group)
        generator = np.random.default_rng([seed, 4, batch, place])
        chosen = [known[index] for index in sorted(generator.permutation(len(known))[:count].tolist())]
        # The run that recorded the store may have given its completions the same ids.
        chosen = [one._replace(id=f"store/{one.id}") for one in chosen]
        made.append(group._replace(completions=(*group.completions, *chosen)))
    return made
