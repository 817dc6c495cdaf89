"""Training on a followed store: a step waits until the store has enough groups, and takes each group once."""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Container

import numpy as np

from recjax.experience import queue as queues
from recjax.experience.batch import Batch
from recjax.experience.following import UNUSABLE
from recjax.experience.group import Group, token_staleness
from recjax.experience.layout import score
from recjax.experience.queue import Queue
from recjax.models.trainable import combine
from recjax.training.run import Run, State

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5  # interval between reads of the store while a step waits
LINE_SECONDS = 10.0  # interval between log lines while a step waits


def wait_for_groups(run: Run, state: State, step: int, stopping: Container) -> tuple[State, list[Group] | None]:
    """Waits until the store has enough groups for a step, and takes them.

    Args:
        stopping: container that is not empty once the run must stop.
    Returns:
        The new state, and the groups of the step; None instead of groups if the run must stop before they arrive.
    Raises:
        ValueError: the store is damaged.
    """
    queue, admitted, said = queues.begin_round(queues.begin_step(state.queue)), 0, time.monotonic() - LINE_SECONDS + 1
    settings, count, began = run.settings, run.own[0], time.monotonic()
    with run.phases.phase("sample"):
        while True:
            found = run.follower.found(queue.followed, step)
            candidates = iter(found.candidates)
            # A step adds at most one batch to a replay buffer; without one, groups stay in the store until their turn.
            while (room := count - (admitted if settings.replay else len(queue.ready))) > 0:
                part = list(itertools.islice(candidates, room))
                if not part:
                    break
                admitted += len(part)
                unrewarded = [number for one in part for number in one.unrewarded]
                numbers = [*(number for one in part for number in one.numbers), *unrewarded]
                left = queue.left | {"rows_without_reward": queue.left["rows_without_reward"] + len(unrewarded)}
                queue = queue._replace(followed=queue.followed.with_taken(numbers, unrewarded), left=left)
                groups = [run.follower.group(one, step) for one in part]
                queue = queues.add_rewarded(queue, groups, step, settings)
            # Unusable rows count as taken from the store.
            counts = Counter(found.unusable.values())
            counts["rows_without_reward"], counts["rewards_too_late"] = len(found.unrewarded), len(found.late)
            counts["groups_without_reward"] = found.without_reward
            left = {name: queue.left.get(name, 0) + counts[name] for name in dict.fromkeys((*queue.left, *UNUSABLE))}
            taken = queue.followed.with_taken([*found.unusable, *found.unrewarded], found.unrewarded)
            taken = taken._replace(unrewarded=taken.unrewarded - found.late, store=run.follower.store_id)
            queue = queue._replace(followed=taken, left=left)
            state = state._replace(queue=queue)
            later, groups = queues.take(queue, count, step, run.config.seed, settings)
            if groups is not None or stopping:
                run.follower.waited_seconds, run.follower.last = time.monotonic() - began, found
                return (state, None) if groups is None else (state._replace(queue=later), groups)
            if time.monotonic() - said >= LINE_SECONDS:
                said = time.monotonic()
                waiting, completions, pending = found.waiting
                rewards = f"{waiting} groups wait: {pending} of their {completions} completions have no reward yet"
                place, ready = run.follower.name, len(queue.ready)
                logger.info("step %d waits for %s: %d of %d groups are ready; %s", step, place, ready, count, rewards)
            time.sleep(POLL_SECONDS)


def metrics(run: Run, queue: Queue, groups: list[Group], step: int) -> dict[str, float]:
    """Metrics of the followed store at a step.

    Args:
        groups: groups that the step trains on.
    """
    last, of_tokens = run.follower.last, token_staleness(groups, step)
    groups, completions, pending = last.waiting
    return {
        **{f"experience/left_out/{reason}": queue.left.get(reason, 0) for reason in UNUSABLE},
        **({} if of_tokens is None else {"follow/token_staleness": of_tokens}),
        "follow/waited_seconds": run.follower.waited_seconds,
        "follow/rewarded_groups": len(last.candidates),
        "follow/waiting_groups": groups,
        "follow/waiting_completions": completions,
        "follow/pending_completions": pending,
    }


def with_missing_logprobs(run: Run, state: State, batch: Batch) -> Batch:
    """The batch with missing log-probs handled according to `experience.missing_logprobs`; no NaN is left."""
    if run.config.experience.missing_logprobs != "current":
        return batch
    lacking = np.isnan(batch.behavior_logprobs)
    if not lacking.any():
        return batch
    params = combine(state.trained.params, run.frozen)
    now = score(run.policy, params, batch, run.config.rollout.sampling(), run.config.model.logprob_chunk)
    # Rounding can make the log-prob of a token with probability 1 slightly positive.
    return batch._replace(behavior_logprobs=np.where(lacking, np.minimum(now, 0.0), batch.behavior_logprobs))
