"""Compiles a new run's first programs in threads, while the run reads weights and evaluates the initial policy."""

import logging
from collections.abc import Iterator
from typing import cast

import jax
import numpy as np

from recjax.config import Config
from recjax.experience.batch import to_learn_from, with_part_weights
from recjax.experience.packing import is_packed
from recjax.hub.policy import Policy
from recjax.models.experts import routing_shapes
from recjax.models.logprobs import recorded_shapes
from recjax.models.sampling import NOTHING_RECORDED
from recjax.models.trainable import adapted
from recjax.rollout.collecting import first_round_calls
from recjax.rollout.compiling import BackgroundCompiler
from recjax.rollout.programs import ProgramCall
from recjax.runtime.workers import cores
from recjax.sources.policy import PolicySource
from recjax.sources.setup import Setup
from recjax.tasks.prompts import Prompts
from recjax.training import loop
from recjax.training.learner import Learner
from recjax.training.run import Run, State

logger = logging.getLogger(__name__)


def compile_sampling(config: Config, policy: Policy, train: Prompts, ahead: BackgroundCompiler) -> None:
    """Starts to compile the first rounds of evaluation and sampler in threads, at the time when weights are read.

    Two cores are busy without this: one reads or evaluates, and the other compiles the update.
    """
    is_split = jax.sharding.get_mesh().size > 1 or jax.process_count() > 1
    if config.task.agent or not train.texts or is_split or cores() <= 2:
        return
    if config.model.lora:
        decoder = policy.decoder.clone(config=adapted(policy.decoder.config, config.model.lora))
        policy = policy._replace(decoder=decoder)
    longest = config.rollout.max_completion_tokens

    def first_prompts(count: int) -> Prompts:
        return train.take(np.arange(count) % len(train.texts))

    def first_calls() -> Iterator[ProgramCall]:
        settings = config.evaluation
        prompts = first_prompts(config.rollout.prompts_per_step)
        silent = policy._replace(recording=NOTHING_RECORDED)
        yield from first_round_calls(silent, prompts, settings.samples, longest, settings.sampling())
        if config.samples_training_data and config.regime.mode == "sync" and config.rollout.engine is None:
            prompts = first_prompts(config.own_counts[0])
            sampling = config.rollout.sampling()
            yield from first_round_calls(policy, prompts, config.drawn_completions, longest, sampling)

    logger.info("compiling evaluation and sampler while weights are read")
    ahead.begin(first_calls)


def compile_update(setup: Setup, run: Run, state: State) -> None:
    """Starts to compile the update, at the same time as the sampler, if the shapes of all batches are known."""
    config = run.config
    if state.step >= config.training.steps or not _has_known_batches(setup, run):
        return
    batch = with_part_weights(to_learn_from(loop.padded(run, ()), config.task), None)
    layout = run.learner.layout(batch, None, state.totals.get("row_doublings"))
    # A batch without tokens is the one that packing would gain most from.
    if layout.packed is None or is_packed(config, batch.shape):
        logger.info("compiling the update at the same time as the sampler")
        cast(Learner, run.learner).compile_update(state.trained, batch, layout)


def _has_known_batches(setup: Setup, run: Run) -> bool:
    """True if no batch can have other arrays or shapes than a batch without groups, and JAX computes the update.

    A program for other shapes would be compiled in vain.
    """
    config = run.config
    decoder = setup.policy.decoder
    if not isinstance(run.learner, Learner) or type(run.learner).update is not Learner.update:
        return False
    samples_here = (
        isinstance(run.source, PolicySource)
        and config.regime.mode == "sync"
        and config.rollout.engine is None
        and jax.process_count() == 1
    )
    if not samples_here:
        return False
    if config.experience is not None and (config.experience.store or config.experience.mix):
        return False  # stored completions may have other recorded arrays
    if recorded_shapes(decoder.config.vocab_size, config.rollout.sampling(), setup.policy.recording):
        return False
    if routing_shapes(decoder):
        return False
    return run.shape.group is not None and run.part_weights is None and config.training.updates == 1
