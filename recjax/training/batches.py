"""The batch of each step, from where the config says: drawn and queued, drawn and fed on, or taken from a store."""

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import jax

from recjax import hosts
from recjax.algorithms import diagnostics
from recjax.config import Config
from recjax.experience import feed as feeds
from recjax.experience import store
from recjax.experience.collect import Pending, draw, finished, scored, submitted
from recjax.experience.feed import Feed
from recjax.experience.groups import Group, groups_of
from recjax.experience.records import Batch
from recjax.experience.rows import Shape, batch_of_groups, rows_of_batch
from recjax.experience.sources import by_prompt, groups_at, mixed
from recjax.experience.stored import run_sampling, stored_per_batch, with_logprobs_of_now
from recjax.experience.tokenise import tokenizer_name
from recjax.models.trainable import combine, in_compute_dtype
from recjax.rollout.prompts import Prompts, batch_indices
from recjax.tasks.grading import Grading, failure_counts
from recjax.training import schedule
from recjax.training.metrics import PhaseSeconds
from recjax.training.setup import Setup, batch_shape

IDLE_DRAWS = 100  # batches drawn for one step beyond those that the config's delays ask for


class Held(NamedTuple):
    """What a run has beside its train state: the sampler's weights, and what was drawn and not yet trained on.

    behaviour_params are the sampler's copy, `version` the updates they had when copied. `queue` holds batches that go
    straight to the trainer, `feed` groups that go another way.
    """

    behaviour_params: dict
    version: int
    queue: list[Pending | Batch]
    feed: Feed


class Source(NamedTuple):
    """What batches are made with, none of which changes during a run.

    frozen: parameters beside the trained ones. others: rows of a store by prompt, which join the policy's groups.
    record: folder of the store that keeps what is drawn.
    """

    config: Config
    setup: Setup
    frozen: dict
    grading: Grading
    phases: PhaseSeconds
    tokenizer: str
    shape: Shape
    others: dict[bytes, list[store.Experience]]
    record: Path | None


def open_source(
    config: Config, setup: Setup, frozen: dict, grading: Grading, phases: PhaseSeconds, output: Path
) -> Source:
    """The source of a run's batches."""
    experience, stored = config.experience, setup.stored
    mix = experience and experience.mix
    return Source(
        config=config,
        setup=setup,
        frozen=frozen,
        grading=grading,
        phases=phases,
        tokenizer=tokenizer_name(setup.policy.tokenizer) if experience else "",
        shape=batch_shape(config, setup.train, stored),
        others=by_prompt(stored.groups) if mix and mix.of == "group" else {},
        record=output / "experience" if experience and experience.record else None,
    )


def next_batch(source: Source, held: Held, step: int, params: dict) -> tuple[Held, Batch, dict]:
    """The batch of a step, from 1, what is held after that, and what is logged of it.

    Args:
        params: trained ones, as they are now.
    """
    experience = source.config.experience
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
    from_store = stored_per_batch(config)
    failures, groups = Counter(), None
    while groups is None:
        held = _synced(source, held, step, params)
        feed = feeds.begin_round(held.feed)
        if feeds.is_draw(feed, limits):
            drawn, failed = _drawn_groups(source, held, feed.drawn + 1)
            failures.update(failed)
            drawn, due = feeds.held_back(feed, drawn, limits, config.seed)
            feed = feeds.arrived(feed, _joined(source, drawn, feed.drawn + 1, params), due, limits)
        feed = feeds.delivered(feed, step, limits)
        feed, groups = feeds.taken(feed, config.rollout.prompts_per_step - from_store, step, config.seed, limits)
        held = held._replace(feed=feed)
        _require_some(feed, limits, step)
    with source.phases.phase("sample"):
        groups += _of_store(source, from_store, step, params) if from_store else []
        counted = {f"grading/{reason}": count for reason, count in failures.items()}
        return held, _batch(source, groups), {**_by_source(groups), **feeds.counts(feed), **counted}


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
    return held._replace(behaviour_params=copy, version=step - 1)


def _drawn_batch(source: Source, held: Held, number: int) -> Pending:
    prompts, drawn = _drawn(source, held, number, *_own(source.config))
    with source.phases.phase("sample"):
        return submitted(source.setup.policy, prompts, drawn, source.grading, held.version)


def _drawn(source: Source, held: Held, number: int, count: int, group_size: int) -> tuple[Prompts, tuple]:
    config, setup = source.config, source.setup
    prompts = setup.train.take(batch_indices(len(setup.train.texts), count, number, config.seed))
    with source.phases.phase("sample"):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 1), number)
        params = combine(held.behaviour_params, source.frozen)
        limit = config.rollout.max_completion_tokens
        return prompts, draw(setup.policy, params, prompts, key, group_size, limit, run_sampling(config))


def _own(config: Config) -> tuple[int, int]:
    """Prompts of a batch, and completions of each, that the policy draws itself."""
    rollout, mix = config.rollout, config.experience and config.experience.mix
    in_group = round(mix.share * rollout.group_size) if mix and mix.of == "group" else 0
    return rollout.prompts_per_step - stored_per_batch(config), rollout.group_size - in_group


def _drawn_groups(source: Source, held: Held, number: int) -> tuple[list[Group], dict[str, int]]:
    """The scored groups of a batch, and how many of its rows could not be graded, by reason."""
    config, policy = source.config, source.setup.policy
    count, group_size = _own(config)
    prompts, drawn = _drawn(source, held, number, count, group_size)
    with source.phases.phase("score"):
        batch, texts = scored(policy, prompts, drawn, source.grading, held.version)
    rows = rows_of_batch(
        batch,
        texts,
        prompts,
        name=f"{number:06d}",
        source="policy",
        tokenizer=source.tokenizer,
        sampling=run_sampling(config),
        time=datetime.now(UTC),
    )
    # A run that goes on from before this batch has written it already.
    if source.record and hosts.is_first() and rows[0].id not in store.ids(source.record):
        store.append(source.record, rows)
    return groups_of(rows), failure_counts(batch.failures)


def _joined(source: Source, groups: list[Group], number: int, params: dict) -> list[Group]:
    """The groups of a batch with others' rows in them."""
    if not source.others:
        return groups
    config = source.config
    count = config.rollout.group_size - _own(config)[1]
    with source.phases.phase("sample"):
        return _with_logprobs(source, mixed(groups, source.others, count, number, config.seed), params)


def _of_store(source: Source, count: int, step: int, params: dict) -> list[Group]:
    return _with_logprobs(source, groups_at(source.setup.stored.groups, count, step, source.config.seed), params)


def _with_logprobs(source: Source, groups: list[Group], params: dict) -> list[Group]:
    everything = combine(params, source.frozen)
    return with_logprobs_of_now(groups, source.shape, source.config, source.setup.policy, everything)


def _batch(source: Source, groups: list[Group]) -> Batch:
    return batch_of_groups(groups, source.shape, logprobs=source.config.experience.missing_logprobs != "unneeded")


def _by_source(groups: list[Group]) -> dict[str, dict[str, int]]:
    """How many rows each source has in a batch."""
    return {"source_rows": dict(Counter(row.source for group in groups for row in group.rows))}
