"""The pure update: log-probabilities, loss, gradients, optimiser step; one jitted function."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PRNGKeyArray

from recjax.algorithms import diagnostics, losses
from recjax.algorithms.losses import Algorithm
from recjax.config import OptimizerConfig
from recjax.experience.records import Batch
from recjax.models.decoder import Decoder
from recjax.models.logprobs import Sampling, completion_logprobs
from recjax.models.placement import ROWS, constrain
from recjax.models.trainable import combine
from recjax.training.mesh import constrain_params


class TrainState(NamedTuple):
    """What an update changes: the trained parameters, and the optimiser's state, which is of them alone."""

    params: dict
    optimizer_state: optax.OptState


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by number of updates made: linear warm-up, then constant or decay to zero at `steps`."""
    peak, decay_steps = config.learning_rate, max(steps - config.warmup_steps, 1)
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, 0.0, decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps),
    }[config.schedule]()
    if config.warmup_steps == 0:
        return after
    # The first update already moves: warm-up runs peak/warmup_steps, 2·peak/warmup_steps, …, peak.
    warmup = optax.linear_schedule(peak / config.warmup_steps, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, after], [config.warmup_steps])


@functools.cache
def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW behind a clip of the gradient's global norm.

    The same object for the same arguments, so that equal runs share one compiled `update`.

    Args:
        steps: where a decaying schedule ends.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
        ),
    )


@functools.partial(
    jax.jit,
    static_argnames=("decoder", "algorithm", "optimizer", "sampling", "chunk", "micro_batches", "axis_name"),
    donate_argnames=("state",),
)
def update(
    state: TrainState,
    frozen: dict,
    reference_params: dict | None,
    batch: Batch,
    key: PRNGKeyArray,
    *,
    decoder: Decoder,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    sampling: Sampling,
    chunk: int,
    micro_batches: int,
    axis_name: str | None = None,
) -> tuple[TrainState, dict]:
    """One optimiser step on a batch.

    Advantages, weights and drops are of the whole batch; gradients add up over micro-batches as (sum, count), divided
    once, so their number changes nothing but memory.

    Args:
        state: donated; use the returned one.
        frozen: the parameters that the state lacks; constant, and no gradient of them is taken.
        reference_params: those of the anchor of the reference KL, beside `frozen`; None where the algorithm has none.
        batch: rows grouped by prompt, the same number for each.
        key: for random drops.
        sampling: the distribution that drew the batch; log π is of the same one.
        micro_batches: number of equal parts, each of whole prompts.
        axis_name: of the jax.pmap that this runs under, where `batch` is one device's part of the prompts, the parts
            are of one size, and all else is the same on every device; None: not under pmap.
    Returns:
        The new state and scalar metrics of the batch before the update.
    """

    def everywhere(x):
        return constrain(x) if axis_name is None else jax.lax.all_gather(x, axis_name, tiled=True)

    def of_this_device(x):
        if axis_name is None:
            return x
        count = len(batch.rewards)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis_name) * count, count)

    compared = map(everywhere, (batch.rewards, batch.group_ids, batch.completion_mask.any(-1)))
    all_rows = losses.row_terms(algorithm, *compared, key)
    rows = jax.tree.map(of_this_device, all_rows)

    def split(x):
        return constrain(x.reshape(micro_batches, x.shape[0] // micro_batches, *x.shape[1:]), None, ROWS)

    def logprobs_of(params, part: Batch):
        return completion_logprobs(
            decoder,
            combine(params, frozen),
            part.prompts,
            part.prompt_mask,
            part.completions,
            part.completion_mask,
            sampling=sampling,
            chunk=chunk,
        )

    def micro_loss(params, part: Batch, part_rows):
        logprobs, entropy = logprobs_of(params, part)
        reference = None if reference_params is None else logprobs_of(reference_params, part)[0]
        total, count = losses.loss(
            algorithm,
            logprobs,
            part.behaviour_logprobs,
            part_rows,
            part.completion_mask,
            reference_logprobs=reference,
            entropy=entropy,
        )
        return total, (count, logprobs, entropy)

    def accumulate(carry, part):
        (total, (count, logprobs, entropy)), gradient = jax.value_and_grad(micro_loss, has_aux=True)(
            state.params, *part
        )
        total, count, gradient = jax.tree.map(jnp.add, carry, (total, count, gradient))
        return (total, count, constrain_params(gradient)), (logprobs, entropy)

    start = (jnp.zeros(()), jnp.zeros(()), constrain_params(jax.tree.map(jnp.zeros_like, state.params)))
    sums, (logprobs, entropy) = jax.lax.scan(accumulate, start, jax.tree.map(split, (batch, rows)))
    total, count, gradient = sums if axis_name is None else jax.lax.psum(sums, axis_name)
    # With nothing kept the sum is zero too: no data, no step.
    gradient = jax.tree.map(lambda g: g / jnp.maximum(count, 1), gradient)
    updates, optimizer_state = optimizer.update(gradient, state.optimizer_state, state.params)
    told = (*(x.reshape(batch.completions.shape) for x in (logprobs, entropy)), batch.completion_mask)
    logprobs, entropy, mask, behaviour = jax.tree.map(everywhere, (*told, batch.behaviour_logprobs))
    metrics = {
        "loss": total / jnp.maximum(count, 1),
        "gradient_norm": optax.tree.norm(gradient),
        "update_norm": optax.tree.norm(updates),
        **diagnostics.diagnose(algorithm, all_rows, logprobs, behaviour, entropy, mask),
    }
    return constrain_params(TrainState(optax.apply_updates(state.params, updates), optimizer_state)), metrics
