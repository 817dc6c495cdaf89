"""The batch of each step, from where the config says: drawn and queued, or fed on, or by others, or from a store."""

from collections import Counter

from recjax import hosts
from recjax.algorithms import diagnostics
from recjax.experience import feed as feeds
from recjax.experience import store
from recjax.experience.feed import Feed
from recjax.experience.groups import Group, groups_of
from recjax.experience.records import Batch
from recjax.experience.rows import batch_of_groups
from recjax.experience.sources import groups_at, mixed
from recjax.experience.stored import stored_per_batch, with_logprobs_of_now
from recjax.models.placement import on_host
from recjax.models.trainable import combine, in_compute_dtype
from recjax.rollout.collecting import Pending, finished, submitted
from recjax.training import schedule
from recjax.training.source import Held, Source, drawer, drawn, drawn_rows, own

IDLE_DRAWS = 100  # batches drawn for one step beyond those that the config's delays ask for


def next_batch(source: Source, held: Held, step: int, params: dict) -> tuple[Held, Batch, dict]:
    """The batch of a step, from 1, what is held after that, and what is logged of it.

    Args:
        params: trained ones, as they are now.
    """
    experience = source.config.experience
    if source.generators:
        return _from_generators(source, held, step, params)
    if experience is None:
        return _from_queue(source, held, step, params)
    if experience.store:
        with source.phases.phase("sample"):
            groups = _of_store(source, source.config.rollout.prompts_per_step, step, params)
            return held, _batch(source, groups), _by_source(groups)
    return _from_feed(source, held, step, params)


def _from_queue(source: Source, held: Held, step: int, params: dict) -> tuple[Held, Batch, dict]:
    """What is drawn is scored in the background; the oldest batch is trained on."""
    config = source.config
    held = _synced(source, held, step, params)
    numbers = schedule.batches_to_draw(step, len(held.queue), config.training.steps, config.regime)
    queue = [*held.queue, *(_drawn_batch(source, held, number) for number in numbers)]
    with source.phases.phase("score"):
        batch = finished(queue.pop(0))
    staleness = diagnostics.staleness(step, batch.policy_version)
    if (staleness != schedule.expected_staleness(step, config.regime)).any():
        raise AssertionError(f"step {step}: staleness {staleness} is not what the regime says")
    return held._replace(queue=queue), batch, {}


def _from_feed(source: Source, held: Held, step: int, params: dict) -> tuple[Held, Batch, dict]:
    """Rounds, until there are enough groups to train on."""
    config, limits = source.config, feeds.limits_of(source.config)
    failures, groups = Counter(), None
    while groups is None:
        held = _synced(source, held, step, params)
        feed = feeds.begin_round(held.feed)
        if feeds.is_draw(feed, limits):
            rows, failed = drawn_rows(source, held, feed.drawn + 1)
            failures.update(failed)
            feed = _arrived(source, feed, feed.drawn + 1, rows, params)
        feed = feeds.delivered(feed, step, limits)
        feed, groups = feeds.taken(feed, own(config)[0], step, config.seed, limits)
        held = held._replace(feed=feed)
        _require_some(feed, limits, step)
    return held, *_fed(source, feed, groups, failures, step, params)


def _fed(
    source: Source, feed: Feed, groups: list[Group], failures: Counter, step: int, params: dict
) -> tuple[Batch, dict]:
    """The batch of groups that came through the feed, with those of a store beside them, and what is logged of it."""
    with source.phases.phase("sample"):
        from_store = stored_per_batch(source.config)
        groups = groups + (_of_store(source, from_store, step, params) if from_store else [])
        counted = {f"grading/{reason}": count for reason, count in failures.items()}
        return _batch(source, groups), {**_by_source(groups), **feeds.counts(feed), **counted}


def _arrived(source: Source, feed: Feed, number: int, rows: list[store.Experience], params: dict) -> Feed:
    """The feed with a batch that has just been drawn, which is recorded where the config says so."""
    limits = feeds.limits_of(source.config)
    # A run that goes on from before this batch has written it already.
    if source.record and hosts.is_first() and rows[0].id not in store.ids(source.record):
        store.append(source.record, rows)
    groups, due = feeds.held_back(feed, groups_of(rows), limits, source.config.seed)
    return feeds.arrived(feed, _joined(source, groups, number, params), due, limits)


def start_generators(source: Source, held: Held) -> None:
    """Starts generators on what the checkpoint says was in flight.

    What came after the checkpoint was drawn by weights that will not be again. It leaves the record, and its numbers
    are drawn anew.
    """
    generators, setup = source.generators, source.setup
    # The weights travel beside it, and held-out problems and stores are the trainer's.
    light = setup._replace(initial_params={}, evaluation=setup.train, stored=None)
    generators.start(drawer, source.config, light, on_host(source.frozen))
    generators.publish(held.version, on_host(held.behaviour_params))
    issued = held.feed.drawn + len(held.in_flight)
    if source.record:
        store.keep_parts(source.record, lambda row: _number(row) <= issued and _number(row) not in held.in_flight)
    for number in held.in_flight:
        generators.issue(number)


def _from_generators(source: Source, held: Held, step: int, params: dict) -> tuple[Held, Batch, dict]:
    """Rounds, as in `_from_feed`, of batches that generators draw while the trainer trains.

    The trainer waits where too few groups have come, or where a batch is on its way that would come too late for
    `regime.max_staleness` if this step did not wait for it.
    """
    generators, limits = source.generators, feeds.limits_of(source.config)
    failures, groups, waited_before = Counter(), None, generators.waited_seconds
    while groups is None:
        held = _synced(source, held, step, params)
        feed = feeds.begin_round(held.feed)
        _issue(source, feed, held.version, step)
        for wait in (False, True):
            with source.phases.phase("sample"):
                done = generators.arrived(wait)
            for number, (rows, failed) in done:
                failures.update(failed)
                feed = _arrived(source, feed, number, rows, params)
            feed, groups = _taken(source, feeds.delivered(feed, step, limits), step)
            if groups is not None:
                break
        held = held._replace(feed=feed, in_flight=tuple(generators.in_flight))
        _require_some(feed, limits, step)
    batch, counts = _fed(source, feed, groups, failures, step, params)
    counts["generators/waited_seconds"] = generators.waited_seconds - waited_before
    counts["generators/in_flight"], counts["generators/restarts"] = len(held.in_flight), generators.restarts
    return held, batch, counts


def _issue(source: Source, feed: Feed, version: int, step: int) -> None:
    """Has the generators draw what it is time for and what would get its turn in time, before the last step is done."""
    config, generators, limits = source.config, source.generators, feeds.limits_of(source.config)
    count, every = own(config)[0], limits.replay.draw_every if limits.replay else 1
    while not generators.are_busy:
        number, ahead = feed.drawn + len(generators.in_flight) + 1, _ahead(source, feed)
        has_turn = step + len(ahead) // count * every <= config.training.steps
        has_turn = has_turn and schedule.in_time([*ahead, version], step, count, config.regime)
        if not (has_turn and schedule.is_wanted(number, feed.round, every, version, step, config.regime)):
            return
        generators.issue(number)


def _taken(source: Source, feed: Feed, step: int) -> tuple[Feed, list[Group] | None]:
    """`feeds.taken`, unless what is on its way would then come too late."""
    config, limits = source.config, feeds.limits_of(source.config)
    count = own(config)[0]
    later, groups = feeds.taken(feed, count, step, config.seed, limits)
    waits = groups is not None and source.generators.in_flight
    if waits and not schedule.in_time(_ahead(source, later), step + 1, count, config.regime):
        return feed, None
    return later, groups


def _ahead(source: Source, feed: Feed) -> list[int]:
    """The policy versions of groups whose turn is still to come, and of those that generators draw."""
    coming = [version for version in source.generators.in_flight.values() for _ in range(own(source.config)[0])]
    return [*feeds.queued_versions(feed, feeds.limits_of(source.config)), *coming]


def _number(row: str) -> int:
    """The number of the batch that a row's id names."""
    return int(row.split("/")[0])


def _require_some(feed: Feed, limits: feeds.Limits, step: int) -> None:
    """Refuses to draw for ever where nothing is left to train on."""
    usual = limits.offset + limits.late.longest
    every = limits.replay.draw_every if limits.replay else 1
    if feed.idle > usual + every * IDLE_DRAWS:
        raise RuntimeError(
            f"step {step}: {IDLE_DRAWS} batches were drawn and there are still too few groups to train on:"
            f" {feeds.counts(feed)}. Loosen what leaves them out (experience.replay, experience.late.deadline), or"
            " make the task such that completions of one prompt differ in reward"
        )


def _synced(source: Source, held: Held, step: int, params: dict) -> Held:
    if not schedule.is_sync(step, source.config.regime) or held.version == step - 1:
        return held
    copy = in_compute_dtype(source.setup.policy.decoder, params, copy=True)
    if source.generators:
        source.generators.publish(step - 1, on_host(copy))
    return held._replace(behaviour_params=copy, version=step - 1)


def _drawn_batch(source: Source, held: Held, number: int) -> Pending:
    prompts, completions = drawn(source, held, number)
    with source.phases.phase("sample"):
        return submitted(source.setup.policy, prompts, completions, source.grading, held.version)


def _joined(source: Source, groups: list[Group], number: int, params: dict) -> list[Group]:
    """The groups of a batch with others' rows in them."""
    if not source.others:
        return groups
    config = source.config
    count = config.rollout.group_size - own(config)[1]
    with source.phases.phase("sample"):
        return _with_logprobs(source, mixed(groups, source.others, count, number, config.seed), params)


def _of_store(source: Source, count: int, step: int, params: dict) -> list[Group]:
    return _with_logprobs(source, groups_at(source.setup.stored.groups, count, step, source.config.seed), params)


def _with_logprobs(source: Source, groups: list[Group], params: dict) -> list[Group]:
    everything = combine(params, source.frozen)
    return with_logprobs_of_now(groups, source.shape, source.config, source.setup.policy, everything)


def _batch(source: Source, groups: list[Group]) -> Batch:
    experience = source.config.experience
    unneeded = experience is not None and experience.missing_logprobs == "unneeded"
    return batch_of_groups(groups, source.shape, logprobs=not unneeded)


def _by_source(groups: list[Group]) -> dict[str, dict[str, int]]:
    """How many rows each source has in a batch."""
    return {"source_rows": dict(Counter(row.source for group in groups for row in group.rows))}
