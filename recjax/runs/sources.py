"""Chooses the source of a run's groups."""

import functools
from collections.abc import Callable

import jax

from recjax.config import Config
from recjax.errors import UserError
from recjax.models.placement import params_on_host
from recjax.remote.sampler import EngineSampler
from recjax.runs.policies import older_params
from recjax.sources.completing import complete_batch
from recjax.sources.followed import FollowedSource
from recjax.sources.generator import open_generator
from recjax.sources.generators import Generators
from recjax.sources.local import LocalSampler
from recjax.sources.policy import PolicySource
from recjax.sources.setup import Setup
from recjax.sources.stored import StoreSource
from recjax.training.learner import Learner
from recjax.training.run import Source


def check_source(config: Config) -> None:
    """Refuses sources that several processes cannot share.

    Raises:
        UserError: several processes would follow a store, or train with another engine.
    """
    if jax.process_count() == 1:
        return
    if config.follows:
        raise UserError(
            "experience.follow = true",
            f"only one process can follow a store, and this run has {jax.process_count()}",
            "start a single process",
        )
    if config.rollout.engine:
        raise UserError(
            "rollout.engine.url",
            f"only one process can train with another engine, and this run has {jax.process_count()}",
            "start a single process",
            value=config.rollout.engine.url,
        )


def source_of(setup: Setup, learner: Learner, sample: Callable | None = None) -> Source:
    """The source of a run.

    Args:
        sample: see `LocalSampler`.
    """
    config = setup.config
    if config.follows:
        return FollowedSource(setup, learner)
    if not config.samples_training_data:
        return StoreSource(functools.partial(complete_batch, setup, learner))
    if config.rollout.engine:
        return PolicySource(setup, learner, EngineSampler(setup.sampler, learner.frozen))
    if config.regime.mode == "sync":
        return PolicySource(setup, learner, LocalSampler(setup.sampler, learner.frozen, sample))
    open_in_process = functools.partial(
        open_generator,
        config=config,
        policy=setup.policy,
        prompts=setup.train,
        reward=setup.grading.reward,
        frozen=params_on_host(learner.frozen),
        older_params=older_params,
    )
    return PolicySource(setup, learner, Generators(config.regime, open_in_process))
