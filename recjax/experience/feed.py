"""From groups that arrive to groups that are trained on: late rewards, then a buffer. Plain data, pure functions.

Time is in rounds. A round draws a batch where one is due, hands out the rewards that are due, and trains one step where
enough groups are whole. Once a run is under way, each round is an optimiser step.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from recjax.config import Config, ExperienceConfig, LateConfig, ReplayConfig
from recjax.experience import buffer, waiting
from recjax.experience.buffer import Buffer
from recjax.experience.feedback import Late
from recjax.experience.groups import Group, oldest_version
from recjax.experience.store import Experience
from recjax.experience.waiting import Waiting

# Without replay a group is trained on once, in the order of arrival, whatever it teaches.
ONCE = ReplayConfig(capacity=sys.maxsize, max_reuse=1, keep_no_signal=True)


class Due(NamedTuple):
    """A reward on its way to a row, and the round at which it is there."""

    round: int
    row: str
    late: Late


class Feed(NamedTuple):
    """Where every group is that was drawn and may still be trained on.

    round: the one begun last. drawn: batches drawn so far. idle: rounds since a step was trained. due: rewards on
    their way. waiting: groups without all their rewards. ready: groups to train on.
    """

    round: int
    drawn: int
    idle: int
    due: tuple[Due, ...]
    waiting: Waiting
    ready: Buffer


EMPTY = Feed(0, 0, 0, (), waiting.NOBODY, buffer.EMPTY)


class Limits(NamedTuple):
    """What a config says of the way that groups take; `offset` is in rounds.

    asynchronous: groups come in any order, and those of the oldest weights go first. kept: the buffer's limits, which
    without replay are those of a queue.
    """

    offset: int
    late: LateConfig
    replay: ReplayConfig | None
    asynchronous: bool
    kept: ReplayConfig


def limits_of(config: Config) -> Limits:
    """The limits of a run whose groups take this way."""
    experience, regime = config.experience or ExperienceConfig(), config.regime
    kept = experience.replay or ONCE
    if bounds := [limit for limit in (kept.max_staleness, regime.max_staleness) if limit is not None]:
        kept = dataclasses.replace(kept, max_staleness=min(bounds))
    late = experience.late or LateConfig()
    return Limits(regime.sync_offset, late, experience.replay, regime.mode == "async", kept)


def is_draw(feed: Feed, limits: Limits) -> bool:
    """Whether a batch is drawn in the round that was begun last."""
    return limits.replay is None or (feed.round - 1) % limits.replay.draw_every == 0


def begin_round(feed: Feed) -> Feed:
    """The feed in its next round."""
    return feed._replace(round=feed.round + 1, idle=feed.idle + 1)


def held_back(feed: Feed, groups: Sequence[Group], limits: Limits, seed: int) -> tuple[list[Group], list[Due]]:
    """The groups of the next batch without the rewards that come late, and those rewards.

    How late each is follows from (seed, number of the batch).
    """
    rows, late = sum(len(group.rows) for group in groups), limits.late
    delays = iter(waiting.reward_delays(rows, late.shortest, late.longest, feed.drawn + 1, seed).tolist())
    held, due = [], []
    for group in groups:
        kept = []
        for row in group.rows:
            if delay := next(delays) + limits.offset:
                due.append(Due(feed.round + delay, row.id, Late(row.reward, row.reward_parts, row.accurate)))
                row = row._replace(reward=None, reward_parts=None, accurate=None)
            kept.append(row)
        held.append(group._replace(rows=tuple(kept)))
    return held, due


def arrived(feed: Feed, groups: Sequence[Group], due: Sequence[Due], limits: Limits) -> Feed:
    """The feed with the groups of the next batch, and the rewards that `held_back` took from them."""
    # Batches that are drawn ahead begin to wait only when their time has come.
    queue = waiting.wait(feed.waiting, groups, feed.round + limits.offset)
    return feed._replace(drawn=feed.drawn + 1, due=(*feed.due, *due), waiting=queue)


def delivered(feed: Feed, step: int, limits: Limits) -> Feed:
    """The feed after the rewards of this round have been handed out and whole groups have become ready.

    Args:
        step: that the trainer is at, from 1.
    """
    now = {due.row: due.late for due in feed.due if due.round <= feed.round}
    queue = waiting.rewarded(feed.waiting, now)
    queue, whole = waiting.release(queue, feed.round, limits.late.deadline)
    ready = buffer.add(feed.ready, whole, step, limits.kept)
    return feed._replace(due=tuple(due for due in feed.due if due.round > feed.round), waiting=queue, ready=ready)


def taken(feed: Feed, count: int, step: int, seed: int, limits: Limits) -> tuple[Feed, list[Group] | None]:
    """The groups to train on at `step`, or None where there are not enough yet, and the feed after that."""
    feed = feed._replace(ready=buffer.expire(feed.ready, step, limits.kept))
    if len(feed.ready.entries) < count:
        return feed, None
    if limits.replay:
        ready, groups = buffer.draw(feed.ready, count, step, seed, limits.kept)
    else:
        ready, groups = buffer.first(buffer.oldest_first(feed.ready) if limits.asynchronous else feed.ready, count)
    return feed._replace(ready=ready, idle=0), groups


def queued_versions(feed: Feed, limits: Limits) -> list[int]:
    """The policy versions of groups whose turn is still to come; in replay the ready ones have no turn."""
    groups = [group for group, _ in feed.waiting.groups]
    groups += [] if limits.replay else [entry.group for entry in feed.ready.entries]
    return [version for group in groups if (version := oldest_version(group)) is not None]


def counts(feed: Feed) -> dict[str, int]:
    """What a run logs of its feed; what was left out adds up over the run. Groups that were used up are not lost."""
    left = {**feed.waiting.lost, **{reason: count for reason, count in feed.ready.left.items() if reason != "used_up"}}
    return {
        "experience/drawn_batches": feed.drawn,
        "experience/waiting_groups": len(feed.waiting.groups),
        "experience/ready_groups": len(feed.ready.entries),
        **{f"experience/left_out/{reason}": count for reason, count in left.items()},
    }


def to_plain(feed: Feed) -> tuple[list[Experience], dict[str, Any]]:
    """A feed as rows, for `store.to_table`, and as what JSON holds; `from_plain` makes it again."""
    rows, queue = waiting.to_plain(feed.waiting)
    more, ready = buffer.to_plain(feed.ready)
    due = [[due.round, due.row, *due.late] for due in feed.due]
    plain = {"round": feed.round, "drawn": feed.drawn, "idle": feed.idle, "due": due}
    return [*rows, *more], {**plain, "rows_waiting": len(rows), "waiting": queue, "ready": ready}


def from_plain(rows: Sequence[Experience], plain: dict[str, Any]) -> Feed:
    """The feed that `to_plain` took apart."""
    split = plain["rows_waiting"]
    return Feed(
        round=plain["round"],
        drawn=plain["drawn"],
        idle=plain["idle"],
        due=tuple(Due(arrival, row, Late(*late)) for arrival, row, *late in plain["due"]),
        waiting=waiting.from_plain(rows[:split], plain["waiting"]),
        ready=buffer.from_plain(rows[split:], plain["ready"]),
    )
