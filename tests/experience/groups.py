"""Groups for tests."""

from recjax.experience.group import Grade, Group
from recjax.experience.queue import Queue
from recjax.experience.records import groups_of
from tests.experience.rows import experts, make_row, same


def make_group(number: int, rewards=(0.0, 1.0), version: int | None = 0) -> Group:
    """A group of as many completions as there are rewards."""
    (group,) = groups_of(
        make_row(
            10 * number + i, group=number, reward=reward, policy_version=version, recorded=experts(3, i) if i else {}
        )
        for i, reward in enumerate(rewards)
    )
    return group


def ungraded(group: Group) -> Group:
    """The same without rewards."""
    return group._replace(completions=tuple(completion._replace(grade=None) for completion in group.completions))


def grades(group: Group) -> list[Grade]:
    """The rewards of its completions."""
    return [completion.grade for completion in group.completions]


def ids(group: Group) -> list[str]:
    """The ids of its completions."""
    return [completion.id for completion in group.completions]


def same_groups(ours: Group, theirs: Group) -> bool:
    """Whether two groups are equal to the bit."""
    return same(ours, theirs)


def next_round(queue: Queue) -> Queue:
    """The queue in the next round."""
    return queue._replace(round=queue.round + 1)
