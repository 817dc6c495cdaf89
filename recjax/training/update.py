"""The pure update: log-probabilities, loss, gradients and optimizer step in one jitted function."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from recjax.algorithms import diagnostics, losses
from recjax.algorithms.losses import Algorithm, RowTerms, TokenTerms
from recjax.algorithms.presets import free_options
from recjax.algorithms.reduce import SumAndCount
from recjax.algorithms.regularizers import reverse_kl
from recjax.algorithms.terms import term_metrics
from recjax.config import Config, OptimizerConfig
from recjax.config.model import POLICY
from recjax.config.optimizers import build_optimizer, optimizer_function
from recjax.experience.batch import FOREIGN, Batch
from recjax.experience.layout import (
    Layout,
    Scorer,
    batch_logprobs,
    freely_routed,
    over_micro_batches,
    score_micro_batch,
)
from recjax.models.decoder import Decoder
from recjax.models.experts import Load, balance_loss, load_metrics
from recjax.models.logprobs import Compared, TokenScores
from recjax.models.placement import constrain, constrain_params
from recjax.models.sampling import TOP_LOGPROBS, Sampling
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
    """The recipe of a run, without `hyperparameters_of` the run; layers are unrolled where that is faster.

    Args:
        teacher: decoder of a teacher that is another model; None without one.
    """
    if config.model.teacher == POLICY:
        teacher = decoder
    if teacher is not None:
        teacher = unrolled_for_training(teacher)
    return Recipe(
        decoder=unrolled_for_training(decoder),
        # Without its numbers, so that runs that differ only in them share the compiled program.
        algorithm=free_options(config.algorithm.build())[0],
        optimizer=make_optimizer(config.optimizer, config.model.average_rate),
        sampling=config.rollout.sampling(),
        chunk=config.model.logprob_chunk,
        teacher=teacher,
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


class Averaged(NamedTuple):
    """The moving average of the trained parameters, a part of the optimizer's state if a teacher has these weights."""

    average: dict


def make_optimizer(config: OptimizerConfig, average_rate: float | None = None) -> optax.GradientTransformationExtraArgs:
    """The optimizer, with the gradient clipped by its global norm; its update takes `hyperparameters_of` the optimizer.

    Options such as Adam's betas and ε are parts of the program: float32 lacks the precision for 1 − β.

    Args:
        average_rate: see `ModelConfig.average_rate`; the state then has an `Averaged`.
    """
    return _clipped(optimizer_function(config.name), tuple(config.build_options().items()), average_rate)


@functools.cache  # equal arguments return the same object, so that runs share one compiled `update`
def _clipped(
    function: Callable[..., Any], options: tuple[tuple[str, Any], ...], average_rate: float | None
) -> optax.GradientTransformationExtraArgs:
    averaged = []
    if average_rate is not None:
        averaged = [parameter_average(average_rate)]

    def chain(learning_rate: ArrayLike, clip_norm: ArrayLike, weight_decay: ArrayLike = 0.0):
        if function is optax.adamw:
            # A schedule, because its state counts the updates, which the learning rate follows.
            optimizer = [build_optimizer(function, dict(options), lambda _: learning_rate, weight_decay)]
        else:
            # A number, because some functions take no schedule; a factor of 1 counts the updates.
            optimizer = [build_optimizer(function, dict(options), learning_rate, weight_decay)]
            optimizer += [optax.scale_by_schedule(lambda _: 1.0)]
        return optax.chain(optax.clip_by_global_norm(clip_norm), *optimizer, *averaged)

    def update(updates, state, params=None, **hyperparameters):
        return chain(**hyperparameters).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(chain(0.0, 0.0).init, update)


def parameter_average(rate: float) -> optax.GradientTransformation:
    """Keeps the average of the parameters after each step, which begins with the initial ones; changes no update."""

    def init(params):
        return Averaged(jax.tree.map(jnp.copy, params))  # the state is donated, so the two need arrays of their own

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Averaged]:
        moved: Any = optax.incremental_update(optax.apply_updates(params, updates), state.average, rate)
        return updates, Averaged(moved)

    return optax.GradientTransformation(init, update)


def first_state(optimizer: optax.GradientTransformation, params: dict) -> TrainState:
    """The state before the first step, which holds the parameters themselves and not a copy."""
    return TrainState(params, _initial(optimizer, params))


@functools.partial(jax.jit, static_argnums=0)
def _initial(optimizer: optax.GradientTransformation, params: dict) -> optax.OptState:
    return constrain_params(optimizer.init(params))


class UpdateContext(NamedTuple):
    """Values that an update reads and does not change.

    frozen: constant parameters that the state lacks; they get no gradient.
    key: random key for drops, equal for all updates of a batch.
    reference_params: the trained part, or all parameters, of the reference-KL anchor; None without one.
    teacher_params: all parameters of the teacher; None without a teacher, and if the teacher is the policy.
    proximal_logprobs: log-probs before the batch's first update; None if the algorithm reads none, or in the only
        update of a batch.
    hyperparameters: values that the recipe lacks; see `hyperparameters_of`.
    """

    frozen: dict
    key: PRNGKeyArray
    reference_params: dict | None = None
    teacher_params: dict | None = None
    proximal_logprobs: Float[Array, "batch time"] | None = None
    hyperparameters: dict[str, dict[str, Any]] = {}


class TokenResults(NamedTuple):
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
    load: Load | None


class _Devices(NamedTuple):
    """The division of a batch over the devices of a `jax.pmap`; one share without an axis name.

    rows: number of rows in each share.
    """

    axis_name: str | None
    rows: int

    def whole(self, share: Array) -> Array:
        """The values of all rows, from the values of this device's rows."""
        if self.axis_name is None:
            return constrain(share)
        return jax.lax.all_gather(share, self.axis_name, tiled=True)

    def share(self, whole: Array) -> Array:
        """The values of this device's rows, from the values of all rows."""
        first = 0
        if self.axis_name is not None:
            first = jax.lax.axis_index(self.axis_name) * self.rows
        return jax.lax.dynamic_slice_in_dim(whole, first, self.rows)

    def total(self, sums: Any) -> Any:
        """Sums over devices."""
        if self.axis_name is None:
            return sums
        return jax.lax.psum(sums, self.axis_name)


@functools.partial(jax.jit, static_argnames=("recipe", "axis_name"), donate_argnames=("state",))
def update(
    state: TrainState,
    batch: Batch,
    layout: Layout,
    context: UpdateContext,
    *,
    recipe: Recipe,
    axis_name: str | None = None,
) -> tuple[TrainState, dict, TokenResults]:
    """Makes one optimizer step on a batch, or on a minibatch.

    Advantages, weights and drops are computed over the whole batch. Gradients are summed over micro-batches as
    (sum, count) and divided once, so the division into micro-batches changes only memory and time. The layout's rows
    are the minibatch: loss, gradient and metrics are of these rows.

    Args:
        state: train state, which is donated; use the returned state.
        batch: rows grouped by prompt, equally many per prompt.
        layout: micro-batches of the minibatch; sequences that the algorithm relates are in one micro-batch.
        axis_name: axis of the surrounding jax.pmap. `batch` and `layout` then are one device's share, with equally many
            prompts on each device; all other arguments and the results are equal on all devices. None: no pmap.
    Returns:
        The new state, scalar metrics of the minibatch before the update, and per-token results.
    """
    if batch.teacher_prompts is not None and layout.packed is not None:
        raise ValueError("teacher_prompts: packed rows hold only the policy's prompts; choose a layout without packing")
    algorithm = recipe.algorithm.with_options(context.hyperparameters.get("algorithm", {}))
    recipe = recipe._replace(algorithm=algorithm)
    devices = _Devices(axis_name, len(batch.rewards))
    # The whole batch even for a minibatch: a group's mean must not depend on how the batch is cut.
    values = _batch_values(recipe, state, batch, layout=layout, context=context, devices=devices)
    all_rows = losses.row_terms(algorithm, values)
    rows = jax.tree.map(devices.share, all_rows)
    sums, scores = _summed(recipe, state, batch, rows, layout=layout, context=context)
    sums = devices.total(sums)
    new_state, metrics = _stepped(recipe, state, sums, context.hyperparameters.get("optimizer", {}))
    mask = batch.completion_mask
    if layout.rows is not None:
        mask = mask & layout.rows[:, None]
    # Metrics are of the tokens of all devices: quantiles and shares cannot be averaged afterwards.
    logprobs, behavior_logprobs, entropy, mask, divergence = jax.tree.map(
        devices.whole, (scores.logprobs, batch.behavior_logprobs, scores.entropy, mask, scores.divergence)
    )
    metrics |= diagnostics.diagnose(
        algorithm,
        all_rows,
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        entropy=entropy,
        completion_mask=mask,
    )
    metrics |= term_metrics(
        algorithm,
        logprobs=logprobs,
        completion_mask=mask,
        teacher_logprobs=all_rows.teacher_logprobs,
        taught=all_rows.taught,
        observation_weights=all_rows.observation_weights,
        divergence=divergence,
        behavior_top_logprobs=jax.tree.map(devices.whole, _behavior_top(recipe, batch)),
    )
    experts = recipe.decoder.config.experts
    if experts is not None:
        assert isinstance(sums.load, Load)
        metrics |= load_metrics(sums.load, experts.per_token)
    tokens = TokenResults(logprobs, losses.token_terms(algorithm, logprobs, behavior_logprobs, all_rows, mask))
    return new_state, metrics, tokens


def _batch_values(
    recipe: Recipe, state: TrainState, batch: Batch, layout: Layout, context: UpdateContext, devices: _Devices
) -> losses.BatchValues:
    """The values of the whole batch that `row_terms` reads; scores are computed if the algorithm reads them."""
    algorithm = recipe.algorithm
    sampled_mask = batch.completion_mask
    taught = None
    if batch.teacher_prompt_mask is not None:
        taught = batch.teacher_prompt_mask.any(-1)
    observation_mask = None
    if algorithm.observations is not None:
        observation_mask = batch.real_tokens & ~sampled_mask & sampled_mask.any(-1, keepdims=True)
    no_key: Any = None  # Added at the end: the key has no rows to gather, and is equal on all devices.
    values = losses.BatchValues(
        rewards=batch.rewards,
        group_ids=batch.group_ids,
        kept=sampled_mask.any(-1),
        key=no_key,
        completion_mask=sampled_mask,
        foreign=batch.policy_version == FOREIGN,
        reward_parts=batch.reward_parts,
        part_weights=batch.part_weights,
        trajectories=batch.trajectories,
        turn_rewards=batch.turn_rewards,
        token_turns=batch.token_turns,
        minibatch=layout.rows,
        proximal_logprobs=context.proximal_logprobs,
        taught=taught,
        observation_mask=observation_mask,
    )
    values = jax.tree.map(devices.whole, values)

    def scored_by(decoder: Decoder, params: dict, read: Batch, compared: Compared | None = None) -> TokenScores:
        scores = batch_logprobs(
            layout, decoder, params, read, sampling=recipe.sampling, chunk=recipe.chunk, compared=compared
        )
        return jax.tree.map(devices.whole, scores)

    # A forward pass over the whole batch costs a third of the update, so it runs only for what reads its results.
    needs_scores = algorithm.needs_scoring
    if context.proximal_logprobs is not None:
        needs_scores = algorithm.needs_rescoring
    scored = None
    if needs_scores:
        reference = None
        if algorithm.reads("scored_reference_kl"):
            assert context.reference_params is not None
            all_params = combine(context.reference_params, context.frozen)
            reference = Compared(recipe.decoder, all_params, reverse_kl)
        scores = scored_by(recipe.decoder, combine(state.params, context.frozen), batch, reference)
        behavior_logprobs = jax.tree.map(devices.whole, batch.behavior_logprobs)
        scored = losses.Scored(scores.logprobs, scores.entropy, behavior_logprobs, scores.divergence)
    teacher_logprobs = None
    if algorithm.reads_teacher_logprobs:
        read = freely_routed(batch)
        if batch.teacher_prompts is not None:
            read = read._replace(prompts=batch.teacher_prompts, prompt_mask=_teacher_prompt_mask(batch))
        assert recipe.teacher is not None
        teacher_logprobs = scored_by(recipe.teacher, _teacher_params(state, context), read).logprobs
    return values._replace(key=context.key, scored=scored, teacher_logprobs=teacher_logprobs)


def _teacher_params(state: TrainState, context: UpdateContext) -> dict:
    """All parameters of the teacher: a model of its own, the policy's average, or the policy."""
    if context.teacher_params is not None:
        return context.teacher_params
    trained = optax.tree.get(state.optimizer_state, "average", default=state.params)
    return combine(trained, context.frozen)


def _teacher_prompt_mask(batch: Batch) -> Bool[Array, "batch teacher_time"]:
    """The mask of the teacher's prompts with a token in every row: attention over no token would be NaN."""
    assert batch.teacher_prompt_mask is not None
    is_first_token = jnp.arange(batch.teacher_prompt_mask.shape[1]) == 0
    return batch.teacher_prompt_mask | is_first_token


def _summed(
    recipe: Recipe, state: TrainState, batch: Batch, rows: RowTerms, layout: Layout, context: UpdateContext
) -> tuple[_Sums, TokenScores]:
    """The sums of all micro-batches, and the scores of the whole batch before the update."""
    teacher = _compared_teacher(recipe, state, context)
    # Gradients of unrolled layers are summed in that form: each micro-batch would stack them otherwise.
    params = params_for(recipe.decoder, state.params)

    def micro_batch(part: Batch, part_rows: RowTerms, index: Array) -> tuple[_Sums, TokenScores]:
        scored_part = part
        if part_rows.observation_weights is not None:
            # With packed rows a part is the whole batch: a token observed in another micro-batch would count twice.
            observed = layout.within(part_rows.observation_weights > 0, index)
            part_rows = part_rows._replace(observation_weights=part_rows.observation_weights * observed)
            scored_part = part._replace(completion_mask=part.completion_mask | observed)
        part_teacher = teacher
        if teacher is not None and part.teacher_prompts is not None:
            part_teacher = teacher._replace(prompts=part.teacher_prompts, prompt_mask=_teacher_prompt_mask(part))

        scored = functools.partial(_scored, recipe, context, layout, index=index)

        def micro_loss(params: dict) -> tuple[Array, tuple[Array, TokenScores]]:
            scores = scored(params, scored_part, compared=part_teacher)
            reference_logprobs = None
            if context.reference_params is not None:
                reference_logprobs = scored(context.reference_params, freely_routed(scored_part)).logprobs
            total, count = _micro_batch_loss(recipe, part, part_rows, scores, reference_logprobs)
            return total, (count, scores)

        (total, (count, scores)), gradient = jax.value_and_grad(micro_loss, has_aux=True)(params)
        sums = _Sums(total, count, constrain_params(gradient), scores.load)
        return sums, scores

    no_sums = _no_sums(recipe.decoder, params)
    return over_micro_batches(layout, batch, rows, no_sums, micro_batch, compares=teacher is not None)


def _compared_teacher(recipe: Recipe, state: TrainState, context: UpdateContext) -> Compared | None:
    """The teacher of the algorithm's divergence; None without one.

    Its parameters come from outside of the differentiated function: no gradient flows through a policy as teacher.
    """
    divergence = recipe.algorithm.teacher_divergence
    if divergence is None:
        return None
    assert recipe.teacher is not None
    return Compared(recipe.teacher, _teacher_params(state, context), divergence.bound())


def _scored(
    recipe: Recipe,
    context: UpdateContext,
    layout: Layout,
    params: dict,
    part: Batch,
    *,
    index: Array,
    compared: Compared | None = None,
) -> TokenScores:
    """The scores of a micro-batch by the policy's decoder.

    Args:
        params: parameters, with which the frozen ones are combined.
        part: rows of the micro-batch with number `index`.
        compared: add the divergence from this teacher.
    """
    decoder = recipe.decoder
    params = combine(params_for(decoder, context.frozen), params_for(decoder, params))
    scorer = Scorer(decoder, recipe.sampling, recipe.chunk)
    return score_micro_batch(layout, scorer, params, part, index, compared=compared)


def _micro_batch_loss(
    recipe: Recipe,
    part: Batch,
    rows: RowTerms,
    scores: TokenScores,
    reference_logprobs: Float[Array, "batch time"] | None,
) -> SumAndCount:
    """The loss of a micro-batch as (sum, count), with the loss that balances experts."""
    term_scores = losses.TermScores(
        reference_logprobs=reference_logprobs,
        entropy=scores.entropy,
        divergence=scores.divergence,
        top_logprobs=scores.top_logprobs,
        behavior_top_logprobs=_behavior_top(recipe, part),
    )
    total, count = losses.loss(
        recipe.algorithm,
        logprobs=scores.logprobs,
        behavior_logprobs=part.behavior_logprobs,
        rows=rows,
        completion_mask=part.completion_mask,
        scores=term_scores,
    )
    experts = recipe.decoder.config.experts
    if experts is not None and recipe.expert_balance:
        assert isinstance(scores.load, Load)
        # Times the count, because the loss is divided by the count of all micro-batches.
        total += recipe.expert_balance * count * balance_loss(scores.load, experts.per_token)
    return total, count


def _no_sums(decoder: Decoder, params: dict) -> _Sums:
    """The sums of no micro-batch: zeros, with a gradient in the form of `params`."""
    # Sharded like the parameters, because a loop keeps the sharding of the values that it begins with.
    no_gradient = constrain_params(jax.tree.map(jnp.zeros_like, params))
    no_load = None
    experts = decoder.config.experts
    if experts is not None:
        routed_layers = decoder.config.num_layers - sum(experts.dense)
        no_tokens = jnp.zeros((routed_layers, experts.count))
        no_load = Load(no_tokens, no_tokens, jnp.zeros(()))
    return _Sums(jnp.zeros(()), jnp.zeros(()), no_gradient, no_load)


def _behavior_top(recipe: Recipe, batch: Batch) -> Float[Array, "batch time count"] | None:
    """The recorded log-probs of the sampler's top tokens, if the algorithm reads them."""
    if recipe.algorithm.score_centering is None:
        return None
    return batch.recorded.get(TOP_LOGPROBS)


def _stepped(
    recipe: Recipe, state: TrainState, sums: _Sums, rates: dict[str, Any]
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """The state after one optimizer step with the mean gradient, and the metrics of the step.

    The loss is divided here and nowhere else: a mean of each micro-batch would weight tokens by the division.
    """
    optimizer = optax.with_extra_args_support(recipe.optimizer)
    divisor = jnp.maximum(sums.count, 1)
    mean_gradient = jax.tree.map(lambda g: g / divisor, sums.gradient)
    gradient = stacked_params(recipe.decoder.config, mean_gradient)
    updates, optimizer_state = optimizer.update(gradient, state.optimizer_state, state.params, **rates)
    # Skip the step without data: momentum and weight decay would change the parameters despite a zero gradient.
    updates = jax.tree.map(lambda x: jnp.where(sums.count > 0, x, 0), updates)
    optimizer_state = jax.tree.map(
        lambda new, old: jnp.where(sums.count > 0, new, old), optimizer_state, state.optimizer_state
    )
    metrics = {
        "loss": sums.total / divisor,
        "gradient_norm": optax.tree.norm(gradient),
        "update_norm": optax.tree.norm(updates),
    }
    params: Any = optax.apply_updates(state.params, updates)
    return constrain_params(TrainState(params, optimizer_state)), metrics
