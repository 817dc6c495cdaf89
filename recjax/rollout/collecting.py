"""Prompts to groups: completions sampled by the engine, and their grades, which may still be computed."""

from collections.abc import Sequence
from concurrent.futures import Future

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from recjax import hosts
from recjax.experience.group import Completion, Grade, Group
from recjax.hub.policy import Policy
from recjax.models.placement import on_host, put_rows, row_shards
from recjax.models.sampling import Sampling
from recjax.rollout.sampler import Completions, sample
from recjax.rollout.slots import sample_in_slots
from recjax.tasks.grading.pool import FAILURES, Grading, Scores
from recjax.tasks.prompts import Prompts


def draw(
    policy: Policy,
    params: dict,
    prompts: Prompts,
    key: PRNGKeyArray,
    group_size: int,
    max_tokens: int,
    sampling: Sampling,
) -> Completions:
    """`group_size` completions of each prompt from `params`, as host arrays.

    Devices that share the prompts get as many each: the first ones are asked again to fill them up, and not counted.
    """
    options = {"group_size": group_size, "max_tokens": max_tokens, "sampling": sampling, "stop_ids": policy.stop_ids}
    if policy.slots is not None:
        return sample_in_slots(policy.decoder, params, prompts.tokens, prompts.mask, key, slots=policy.slots, **options)
    count = len(prompts.texts)
    filled = np.arange(-(-count // row_shards()) * row_shards()) % count
    asked = put_rows((prompts.tokens[filled], prompts.mask[filled]))
    drawn = on_host(sample(policy.decoder, params, *asked, key, **options))
    return jax.tree.map(lambda rows: rows[: count * group_size], drawn)


def sample_groups(
    policy: Policy,
    params: dict,
    prompts: Prompts,
    key: PRNGKeyArray,
    group_size: int,
    max_tokens: int,
    sampling: Sampling,
    *,
    name: str,
    source: str,
    version: int,
) -> list[Group]:
    """A group of `group_size` completions for each prompt, without grades.

    Args:
        params: all parameters, in the dtype that they compute in.
        name: of this batch, given to no other; ids of its groups and completions begin with it.
        source: who samples.
        version: of `params`, in optimiser updates.
    """
    drawn = draw(policy, params, prompts, key, group_size, max_tokens, sampling)
    said = drawn.mask & ~np.isin(drawn.tokens, policy.stop_ids)
    texts = policy.tokenizer.batch_decode([row[keep] for row, keep in zip(drawn.tokens, said, strict=True)])
    completions = [
        Completion(
            id=f"{name}/{row:05d}",
            source=source,
            text=text,
            tokens=drawn.tokens[row][drawn.mask[row]],
            mask=drawn.mask[row][drawn.mask[row]],
            behaviour_logprobs=drawn.logprobs[row][drawn.mask[row]],
            sampling=sampling,
            policy_version=version,
            truncated=bool(drawn.truncated[row]),
        )
        for row, text in enumerate(texts)
    ]
    groups = []
    for place, problem in enumerate(prompts.problems):
        own = tuple(completions[place * group_size : (place + 1) * group_size])
        tokens = prompts.tokens[place][prompts.mask[place]]
        groups.append(Group(f"{name}/{place:05d}", tokens, own, problem.prompt, problem.answer))
    return groups


class Grades:
    """The grades of a batch, which may still be computed; each of several processes grades its share of the prompts."""

    def __init__(self, scores: "Future[Scores]", count: int):
        """Takes the scores of this process's share of `count` completions."""
        self._scores, self._count = scores, count

    def result(self) -> list[Grade]:
        """One grade a completion, waited for; of several processes all have those of all, and all must ask.

        Raises:
            ValueError: the reward function is at fault; see `recjax.tasks.grading.custom.custom_parts`.
        """
        rewards, parts, accurate, failures = hosts.gathered(self._scores.result(), self._count)
        return [
            Grade(
                reward=float(rewards[row]),
                reward_parts={name: float(values[row]) for name, values in parts.items()} or None,
                accurate=bool(accurate[row]),
                failure=None if failures is None else FAILURES[failures[row]],
            )
            for row in range(self._count)
        ]


def submit(groups: Sequence[Group], prompts: Prompts, grading: Grading) -> Grades:
    """Sends completions to be graded in the background; the reward sees texts without the token that stopped them.

    Args:
        groups: of the prompts, one each, of one size.
        grading: open.
    """
    share = hosts.share(len(groups))
    own = [(place, completion) for place in share for completion in groups[place].completions]
    problems, completions = [prompts.problems[place] for place, _ in own], [completion for _, completion in own]
    scores = grading.submit(
        [prompts.texts[place] for place, _ in own],
        [completion.text for completion in completions],
        [problem.answer for problem in problems],
        [problem.columns for problem in problems],
        np.array([len(completion.tokens) for completion in completions]),
    )
    return Grades(scores, sum(len(group.completions) for group in groups))


def with_grades(groups: Sequence[Group], grades: Sequence[Grade]) -> list[Group]:
    """The groups with a grade for every completion, in order."""
    left = iter(grades)
    return [
        group._replace(completions=tuple(completion._replace(grade=next(left)) for completion in group.completions))
        for group in groups
    ]
