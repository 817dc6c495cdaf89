"""The computations of a run on its devices: initial parameters, the sampler's parameters, updates and evaluation."""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Key

from recjax.experience.batch import Batch
from recjax.experience.layout import Layout, choose_layout, score_batch
from recjax.hub.policy import load_teacher
from recjax.models.placement import constrain_params, put_rows
from recjax.models.trainable import combine, in_compute_dtype, split_params
from recjax.training.evaluation import Evaluation, evaluate_policy
from recjax.training.run import Run, State, initial_policy
from recjax.training.update import Learned, TrainState, learning_rate_schedule, recipe_of, update


class Learner:
    """Computes with JAX. Tests of the loop give `train` a subclass that only counts."""

    initial_policy = staticmethod(initial_policy)

    def begin(self, run: Run, params: dict) -> tuple[Run, TrainState]:
        """The run with its frozen, initial and teacher parameters, and the state before the first step.

        Args:
            params: all of the policy's parameters in float32.
        """
        config, decoder = run.config, run.policy.decoder
        params, frozen = split_params(params, config.model)
        teacher = load_teacher(config, run.policy.tokenizer)
        self._recipe = recipe_of(config, decoder, teacher and teacher.decoder)
        steps = config.training.steps
        rates = learning_rate_schedule(config.optimizer, steps)(np.arange(steps))
        self._rates = np.broadcast_to(jax.device_get(rates), steps)
        self._drop_key = drop_key(config.seed)
        reads_initial = self._recipe.algorithm.needs_reference or config.evaluation.initial_kl
        frozen = in_compute_dtype(decoder, frozen, copy=False)
        initial = in_compute_dtype(decoder, params, copy=True) if reads_initial else None
        run = run._replace(frozen=frozen, initial=initial, teacher=teacher)
        return run, first_state(self._recipe.optimizer, params)

    def sampler_params(self, run: Run, state: State, copy: bool = False) -> dict:
        """The sampler's parameters, in the dtype of the computation: the trained parameters, or the state's copy.

        Args:
            copy: return no array of the trained parameters.
        """
        if state.behavior_params is not None:
            return state.behavior_params
        if copy and state.version == 0 and run.initial is not None:
            return run.initial
        return in_compute_dtype(run.policy.decoder, state.trained.params, copy=copy)

    def layout(self, run: Run, batch: Batch, rows: Bool[np.ndarray, " batch"] | None, doublings: int | None) -> Layout:
        """The micro-batches of an update; see `choose_layout`."""
        return choose_layout(run.config, self._recipe.algorithm, self._recipe.decoder, batch, rows, doublings)

    def proximal_logprobs(
        self, run: Run, trained: TrainState, batch: Batch, layouts: Iterable[Layout]
    ) -> Float[Array, "batch time"] | None:
        """Log-probs of a batch before its first update; None if the algorithm reads none.

        Args:
            layouts: layouts of a pass over the batch, which score it one minibatch after the other.
        """
        recipe, params = self._recipe, combine(trained.params, run.frozen)
        if not recipe.algorithm.needs_proximal:
            return None
        options = recipe.decoder, params, put_rows(batch), recipe.sampling, recipe.chunk
        # Log-probs are 0 outside a layout's minibatch.
        return sum(score_batch(layout, *options)[0] for layout in layouts)

    def update(
        self,
        run: Run,
        trained: TrainState,
        batch: Batch,
        layout: Layout,
        step: int,
        proximal_logprobs: Float[Array, "batch time"] | None = None,
    ) -> tuple[TrainState, dict, Learned]:
        """One optimizer step; see `update.update`. The device may still compute it after the call returns."""
        trained, metrics, learned = update(
            trained,
            run.frozen,
            run.initial if self._recipe.algorithm.needs_reference else None,
            put_rows(batch),
            jax.random.fold_in(self._drop_key, run.batch_of(step)),
            layout,
            run.teacher and run.teacher.params,
            proximal_logprobs,
            recipe=self._recipe,
        )
        return trained, metrics | {"learning_rate": _rate_of(self._rates, trained.optimizer_state)}, learned

    def evaluate(self, run: Run, state: State) -> Evaluation:
        """Samples and grades answers of the trained policy to the held-out problems."""
        initial = combine(run.initial, run.frozen) if run.config.evaluation.initial_kl else None
        params = combine(state.trained.params, run.frozen)
        return evaluate_policy(
            run.config, run.policy, params, run.held_out, run.grading, state.step, initial, run.agents
        )


def drop_key(seed: int | Array) -> Key[Array, ""]:
    """The random key that, folded with the number of a batch, decides which completions its updates drop."""
    return jax.random.fold_in(jax.random.key(seed), 3)


def first_state(optimizer: optax.GradientTransformation, params: dict) -> TrainState:
    """The state before the first step, which holds the parameters themselves and not a copy."""
    return TrainState(params, _initial(optimizer, params))


@functools.partial(jax.jit, static_argnums=0)
def _initial(optimizer: optax.GradientTransformation, params: dict) -> optax.OptState:
    return constrain_params(optimizer.init(params))


@jax.jit
def _rate_of(learning_rates: ArrayLike, optimizer_state: optax.OptState) -> jax.Array:
    """The learning rate of the latest update; steps without data made none, so their number does not say which."""
    counts = optax.tree.get_all_with_path(optimizer_state, "count")
    return jnp.asarray(learning_rates)[jnp.maximum(counts[0][1] - 1, 0)]
