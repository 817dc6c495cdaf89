"""What batches are made with, and how the policy draws them."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from recjax.config import Config
from recjax.experience import feed as feeds
from recjax.experience import store
from recjax.experience.feed import Feed
from recjax.experience.records import Batch
from recjax.experience.rows import Shape, rows_of_batch
from recjax.experience.sources import by_prompt
from recjax.experience.stored import run_sampling, stored_per_batch
from recjax.experience.tokenise import tokenizer_name
from recjax.models.trainable import combine
from recjax.rollout.collecting import Completions, Pending, draw, scored
from recjax.rollout.generators import Generators
from recjax.tasks.grading.pool import Grading, failure_counts
from recjax.tasks.prompts import Prompts, batch_indices
from recjax.training.metrics import PhaseSeconds
from recjax.training.setup import Setup, batch_shape


class Held(NamedTuple):
    """What a run has beside its train state: the sampler's weights, and what was drawn and not yet trained on.

    behaviour_params are the sampler's copy, `version` the updates they had when copied. `queue` holds batches that go
    straight to the trainer, `feed` groups that go another way. `in_flight` are numbers of batches that generators draw.
    """

    behaviour_params: dict
    version: int
    queue: list[Pending | Batch]
    feed: Feed
    in_flight: tuple[int, ...] = ()


class Source(NamedTuple):
    """What batches are made with, none of which changes during a run.

    frozen: parameters beside the trained ones. others: rows of a store by prompt, which join the policy's groups.
    record: folder of the store that keeps what is drawn. generators: of an asynchronous run.
    """

    config: Config
    setup: Setup
    frozen: dict
    grading: Grading
    phases: PhaseSeconds
    tokenizer: str
    shape: Shape | None
    others: dict[bytes, list[store.Experience]]
    record: Path | None
    generators: Generators | None = None


def open_source(
    config: Config,
    setup: Setup,
    frozen: dict,
    grading: Grading,
    phases: PhaseSeconds,
    output: Path,
    generators: Generators | None,
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
        generators=generators,
    )


def drawing_source(config: Config, setup: Setup, frozen: dict, grading: Grading) -> Source:
    """A source for `drawn_rows` alone, with no run around it."""
    tokenizer = tokenizer_name(setup.policy.tokenizer)
    return Source(config, setup, frozen, grading, PhaseSeconds({}), tokenizer, None, {}, None)


def own(config: Config) -> tuple[int, int]:
    """Prompts of a batch, and completions of each, that the policy draws itself."""
    rollout, mix = config.rollout, config.experience and config.experience.mix
    in_group = round(mix.share * rollout.group_size) if mix and mix.of == "group" else 0
    return rollout.prompts_per_step - stored_per_batch(config), rollout.group_size - in_group


def drawn(source: Source, held: Held, number: int) -> tuple[Prompts, Completions]:
    """The prompts of a batch, and what the behaviour policy answers; both follow from number and weights."""
    config, setup = source.config, source.setup
    count, group_size = own(config)
    prompts = setup.train.take(batch_indices(len(setup.train.texts), count, number, config.seed))
    with source.phases.phase("sample"):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 1), number)
        params = combine(held.behaviour_params, source.frozen)
        limit = config.rollout.max_completion_tokens
        return prompts, draw(setup.policy, params, prompts, key, group_size, limit, run_sampling(config))


def drawn_rows(
    source: Source, held: Held, number: int, prefix: str = "", author: str = "policy"
) -> tuple[list[store.Experience], dict[str, int]]:
    """The scored rows of a batch, and how many of them could not be graded, by reason.

    Args:
        prefix: of the rows' ids, before the batch's number.
        author: the rows' source.
    """
    config, policy = source.config, source.setup.policy
    prompts, completions = drawn(source, held, number)
    with source.phases.phase("score"):
        batch, texts = scored(policy, prompts, completions, source.grading, held.version)
    rows = rows_of_batch(
        batch,
        texts,
        prompts,
        name=f"{prefix}{number:06d}",
        source=author,
        tokenizer=source.tokenizer,
        sampling=run_sampling(config),
        time=datetime.now(UTC),
    )
    return rows, failure_counts(batch.failures)


def drawer(config: Config, setup: Setup, frozen: dict) -> Callable[[int, int, dict], tuple]:
    """What a generator runs: from a batch's number, policy version and weights to `drawn_rows`."""
    grading = Grading(config, setup.reward).__enter__()  # until its process ends
    source = drawing_source(config, setup, jax.tree.map(jnp.asarray, frozen), grading)

    def draw(number: int, version: int, weights: dict) -> tuple:
        return drawn_rows(source, Held(jax.tree.map(jnp.asarray, weights), version, [], feeds.EMPTY), number)

    return draw
