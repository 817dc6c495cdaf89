"""Draws groups of a store: in shuffled order, or to join sampled groups of the same prompts."""

from collections.abc import Sequence

import numpy as np

from recjax.errors import UserError
from recjax.experience.group import Group
from recjax.store.stored_groups import ByPrompt, StoredGroups
from recjax.tasks.prompts import batch_indices


def groups_at(groups: Sequence[Group], count: int, batch: int, seed: int) -> list[Group]:
    """The groups of batch number `batch` (from 1): every group once per epoch, in an order that depends on the seed.

    A pure function of its arguments, so that a resumed run gets the same batches.

    Raises:
        UserError: fewer groups than `count`.
    """
    if len(groups) < count:
        raise UserError(
            problem=f"{len(groups)} groups are fewer than the {count} in a batch",
            remedy="add groups, or lower the batch",
        )
    indices = batch_indices(len(groups), count, batch, seed)
    if isinstance(groups, StoredGroups):
        return list(groups.chosen(indices))  # one query reads all groups of the batch
    return [groups[index] for index in indices]


def mixed(groups: Sequence[Group], others: ByPrompt, count: int, batch: int, seed: int) -> list[Group]:
    """Adds up to `count` stored completions of the same prompt to each group, for advantages over the whole group.

    If there are more than `count`, the choice is random and depends only on (seed, batch, index of the group). A group
    whose prompt has no stored completions stays unchanged.

    Args:
        others: stored completions by prompt tokens.
    """
    joined = []
    for number, group in enumerate(groups):
        stored = others.get(group)
        # Each use of randomness has its own key, so that no two choices of a run share random numbers.
        generator = np.random.default_rng([seed, 4, batch, number])
        indices = sorted(generator.permutation(len(stored))[:count].tolist())
        completions = list(group.completions)
        for index in indices:
            completion = stored[index]
            # The run that recorded the store may have given its completions the same ids.
            completions.append(completion._replace(id=f"store/{completion.id}"))
        joined.append(group._replace(completions=tuple(completions)))
    return joined
