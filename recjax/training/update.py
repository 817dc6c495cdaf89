"""The pure update: log-probabilities, loss, gradients and optimizer step in one jitted function."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PRNGKeyArray

from recjax.algorithms import diagnostics, losses
from recjax.algorithms.losses import Algorithm, RowTerms, TokenTerms
from recjax.algorithms.presets import free_options
from recjax.config import Config, OptimizerConfig
from recjax.experience.batch import FOREIGN, Batch
from recjax.experience.layout import (
    Layout,
    LogprobsAndEntropy,
    batch_logprobs,
    micro_batch_logprobs,
    over_micro_batches,
)
from recjax.models.decoder import Decoder
from recjax.models.experts import Load, balance_loss, load_metrics
from recjax.models.logprobs import Compared
from recjax.models.placement import constrain, constrain_params
from recjax.models.sampling import Sampling
from recjax.models.trainable import combine
from recjax.models.unrolling import params_for, stacked_params, unrolled_for_training


class Recipe(NamedTuple):
    """The parts that all updates of a run share, static under jit.

    algorithm, optimizer: with values for all options and rates, or without those that `update` gets as
        `hyperparameters`.
    sampling: distribution that sampled the batches; log π refers to the same distribution.
    chunk: number of token positions whose vocabulary scores a device holds at once.
    teacher: decoder of the teacher, if the algorithm has one.
    expert_balance: weight of `recjax.models.experts.balance_loss` of each micro-batch.
    """

    decoder: Decoder
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    sampling: Sampling
    chunk: int
    teacher: Decoder | None = None
    expert_balance: float = 0.0


def recipe_of(config: Config, decoder: Decoder, teacher: Decoder | None = None) -> Recipe:
    """The recipe of a run, without `hyperparameters_of` the run; layers are unrolled where that is faster."""
    return Recipe(
        decoder=unrolled_for_training(decoder),
        algorithm=free_options(config.algorithm.build())[0],
        optimizer=make_optimizer(config.optimizer),
        sampling=config.rollout.sampling(),
        chunk=config.model.logprob_chunk,
        teacher=teacher and unrolled_for_training(teacher),
        expert_balance=config.training.expert_balance,
    )


def hyperparameters_of(config: Config, learning_rate: ArrayLike | jax.ShapeDtypeStruct) -> dict[str, dict[str, Any]]:
    """The numbers that runs of one recipe may differ in: arguments of the compiled `update`.

    A weight decay of 0 is absent, so that the program has no decay, like an axis whose coefficient is 0.

    Args:
        learning_rate: learning rate of the update, or its shape.
    """
    optimizer = {"learning_rate": learning_rate, "clip_norm": config.optimizer.clip_norm}
    if config.optimizer.weight_decay:
        optimizer["weight_decay"] = config.optimizer.weight_decay
    return {"algorithm": free_options(config.algorithm.build())[1], "optimizer": optimizer}


class TrainState(NamedTuple):
    """The values that an update changes: the trained parameters and their optimizer state."""

    params: dict
    optimizer_state: optax.OptState


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """AdamW after clipping the gradient by its global norm; its update takes `hyperparameters_of` the optimizer.

    Adam's betas and ε are parts of the program: float32 lacks the precision for 1 − β.
    """
    return _clipped_adamw(config.beta1, config.beta2, config.epsilon)


@functools.cache  # equal arguments return the same object, so that runs share one compiled `update`
def _clipped_adamw(beta1: float, beta2: float, epsilon: float) -> optax.GradientTransformationExtraArgs:
    def chain(learning_rate: ArrayLike, clip_norm: ArrayLike, weight_decay: ArrayLike = 0.0):
        # A schedule, because its state counts the updates, which the learning rate follows.
        adamw = optax.adamw(lambda _: learning_rate, beta1, beta2, epsilon, weight_decay=weight_decay)
        return optax.chain(optax.clip_by_global_norm(clip_norm), adamw)

    def update(updates, state, params=None, **hyperparameters):
        return chain(**hyperparameters).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(chain(0.0, 0.0).init, update)


def first_state(optimizer: optax.GradientTransformation, params: dict) -> TrainState:
    """The state before the first step, which holds the parameters themselves and not a copy."""
    return TrainState(params, _initial(optimizer, params))


@functools.partial(jax.jit, static_argnums=0)
def _initial(optimizer: optax.GradientTransformation, params: dict) -> optax.OptState:
    return constrain_params(optimizer.init(params))


class Learned(NamedTuple):
    """Per-token results of an update for the whole batch; undefined where masked and outside the minibatch.

    logprobs: log-probs before the update.
    terms: terms of the policy gradient.
    """

    logprobs: Float[Array, "batch time"]
    terms: TokenTerms


class _Sums(NamedTuple):
    """Sums over micro-batches: the loss as (sum, count), the gradient of the loss sum, and the load of experts."""

    total: Float[Array, ""]
    count: Float[Array, ""]
    gradient: dict
    load: Load | tuple[()]


@functools.partial(jax.jit, static_argnames=("recipe", "axis_name"), donate_argnames=("state",))
def update(
    state: TrainState,
    frozen: dict,
    reference_params: dict | None,
    batch: Batch,
    key: PRNGKeyArray,
    layout: Layout,
    teacher_params: dict | None = None,
    proximal_logprobs: Float[Array, "batch time"] | None = None,
    hyperparameters: dict[str, dict[str, Any]] | None = None,
    *,
    recipe: Recipe,
    axis_name: str | None = None,
) -> tuple[TrainState, dict, Learned]:
    """Makes one optimizer step on a batch, or on a minibatch.

    Advantages, weights and drops are computed over the whole batch. Gradients are summed over micro-batches as
    (sum, count) and divided once, so the division into micro-batches changes only memory and time. The layout's rows
    are the minibatch: loss, gradient and metrics are of these rows.

    Args:
        state: train state, which is donated; use the returned state.
        frozen: constant parameters that the state lacks; they get no gradient.
        reference_params: the trained part, or all parameters, of the reference-KL anchor; None without one.
        batch: rows grouped by prompt, equally many per prompt.
        key: random key for drops, equal for all updates of a batch.
        layout: micro-batches of the minibatch; sequences that the algorithm relates are in one micro-batch.
        teacher_params: all parameters of the teacher; None if the algorithm has no teacher.
        proximal_logprobs: log-probs before the batch's first update; None if the algorithm reads none, or in the only
            update of a batch.
        hyperparameters: values that the recipe lacks; see `hyperparameters_of`.
        axis_name: axis of the surrounding jax.pmap. `batch` and `layout` then are one device's share, with equally many
            prompts on each device; all other arguments and the results are equal on all devices. None: no pmap.
    Returns:
        The new state, scalar metrics of the minibatch before the update, and per-token results.
    """
    decoder, algorithm, optimizer, *distribution, teacher, expert_balance = recipe
    hyperparameters, experts = hyperparameters or {}, decoder.config.experts
    algorithm = algorithm.with_options(hyperparameters.get("algorithm", {}))
    optimizer, rates = optax.with_extra_args_support(optimizer), hyperparameters.get("optimizer", {})

    def of_all(x):
        return constrain(x) if axis_name is None else jax.lax.all_gather(x, axis_name, tiled=True)

    def own(x):
        share = len(batch.rewards)
        first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * share
        return jax.lax.dynamic_slice_in_dim(x, first, share)

    def scored_by(decoder: Decoder, params: dict) -> list[Array]:
        return [of_all(x) for x in batch_logprobs(layout, decoder, params, batch, *distribution)]

    compared = map(of_all, (batch.rewards, batch.group_ids, batch.completion_mask.any(-1)))
    extras = {
        "completion_mask": batch.completion_mask,
        "foreign": batch.policy_version == FOREIGN,
        "reward_parts": batch.reward_parts,
        "part_weights": batch.part_weights,
        "trajectories": batch.trajectories,
        "turn_rewards": batch.turn_rewards,
        "token_turns": batch.token_turns,
        "proximal_logprobs": proximal_logprobs,
        "minibatch": layout.rows,
    }
    if algorithm.observations is not None:
        sampled = batch.completion_mask
        extras["observation_mask"] = batch.real_tokens & ~sampled & sampled.any(-1, keepdims=True)
    extras = jax.tree.map(of_all, extras)
    if algorithm.needs_scoring if proximal_logprobs is None else algorithm.needs_rescoring:
        behavior = jax.tree.map(of_all, batch.behavior_logprobs)
        extras["scored"] = losses.Scored(*scored_by(decoder, combine(state.params, frozen)), behavior)
    if algorithm.distillation is not None:
        extras["teacher_logprobs"] = scored_by(teacher, teacher_params)[0]
    all_rows = losses.row_terms(algorithm, *compared, key, **extras)
    rows = jax.tree.map(own, all_rows)
    compared, divergence = None, algorithm.teacher_divergence
    if divergence is not None:
        compared = Compared(teacher, teacher_params, divergence)

    def of_micro_batch(part: Batch, part_rows: RowTerms, index: Array) -> tuple[_Sums, LogprobsAndEntropy]:
        read = part
        if algorithm.observations is not None:
            observed = layout.within(part_rows.observation_weights > 0, index)
            part_rows = part_rows._replace(observation_weights=part_rows.observation_weights * observed)
            read = part._replace(completion_mask=part.completion_mask | observed)

        def scored(params, compared=None):
            params = combine(*(params_for(decoder, each) for each in (frozen, params)))
            arguments = layout, decoder, params, read, index, *distribution
            return micro_batch_logprobs(*arguments, experts is not None, compared)

        def micro_loss(params):
            values = scored(params, compared)
            values, load = (values[:-1], values[-1]) if experts else (values, ())
            logprobs, entropy, *added = values
            reference = None if reference_params is None else scored(reference_params)[0]
            total, count = losses.loss(
                algorithm,
                logprobs,
                part.behavior_logprobs,
                part_rows,
                part.completion_mask,
                reference_logprobs=reference,
                entropy=entropy,
                divergence=added[0] if added else None,
            )
            if expert_balance:
                total += expert_balance * count * balance_loss(load, experts.per_token)
            return total, (count, values, load)

        # Gradients of unrolled layers are summed in that form: each micro-batch would stack them otherwise.
        params = params_for(decoder, state.params)
        (total, (count, seen, load)), gradient = jax.value_and_grad(micro_loss, has_aux=True)(params)
        return _Sums(total, count, constrain_params(gradient), load), seen

    zeros = jax.tree.map(jnp.zeros_like, params_for(decoder, state.params))
    no_load = Load(*(jnp.zeros((decoder.config.num_layers, experts.count)),) * 2, jnp.zeros(())) if experts else ()
    sums = _Sums(jnp.zeros(()), jnp.zeros(()), constrain_params(zeros), no_load)
    count = 2 if compared is None else 3
    sums, (logprobs, entropy, *added) = over_micro_batches(layout, batch, rows, sums, of_micro_batch, count)
    if axis_name is not None:
        sums = jax.lax.psum(sums, axis_name)
    divisor = jnp.maximum(sums.count, 1)
    gradient = stacked_params(decoder.config, jax.tree.map(lambda g: g / divisor, sums.gradient))
    updates, optimizer_state = optimizer.update(gradient, state.optimizer_state, state.params, **rates)
    # Skip the step without data: momentum and weight decay would change the parameters despite a zero gradient.
    updates = jax.tree.map(lambda x: jnp.where(sums.count > 0, x, 0), updates)
    optimizer_state = jax.tree.map(
        lambda new, old: jnp.where(sums.count > 0, new, old), optimizer_state, state.optimizer_state
    )
    mask = batch.completion_mask if layout.rows is None else batch.completion_mask & layout.rows[:, None]
    seen = jax.tree.map(of_all, (logprobs, batch.behavior_logprobs, entropy, mask))
    metrics = {
        "loss": sums.total / divisor,
        "gradient_norm": optax.tree.norm(gradient),
        "update_norm": optax.tree.norm(updates),
        **diagnostics.diagnose(algorithm, all_rows, *seen),
    }
    if experts:
        metrics |= load_metrics(sums.load, experts.per_token)
    if algorithm.distillation is not None:
        possible = seen[3] & ~(jnp.isneginf(seen[0]) | jnp.isneginf(all_rows.teacher_logprobs))
        metrics["teacher_kl"] = diagnostics.token_average(seen[0] - all_rows.teacher_logprobs, possible)
    if compared is not None:  # in nats, without the term's coefficient
        metrics["teacher_divergence"] = diagnostics.token_average(of_all(added[0]), seen[3])
        metrics["teacher_divergence"] /= divergence.keywords["coefficient"]
    if algorithm.observations is not None:
        metrics["observation_cross_entropy"] = diagnostics.token_average(-seen[0], all_rows.observation_weights > 0)
    learned = Learned(seen[0], losses.token_terms(algorithm, seen[0], seen[1], all_rows, seen[3]))
    return constrain_params(TrainState(optax.apply_updates(state.params, updates), optimizer_state)), metrics, learned
