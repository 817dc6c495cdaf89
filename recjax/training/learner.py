"""The computations of a run on its devices: initial parameters, the sampler's parameters, updates and evaluation."""

from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Key

from recjax.experience.batch import Batch
from recjax.experience.layout import Layout, choose_layout, score_batch
from recjax.models.placement import put_rows
from recjax.models.trainable import combine, in_compute_dtype, split_params
from recjax.training.checkpoint import optimizer_state_of, split_step, steps_of
from recjax.training.evaluation import Evaluation, evaluate_policy
from recjax.training.run import Run, State
from recjax.training.trained import load_teacher, reference_params, starting_policy
from recjax.training.update import (
    Learned,
    TrainState,
    UpdateContext,
    first_state,
    hyperparameters_of,
    recipe_of,
    update,
)


class Learner:
    """Computes with JAX. Tests of the loop give `train` a subclass that only counts."""

    initial_policy = staticmethod(starting_policy)

    def begin(self, run: Run, params: dict) -> tuple[Run, TrainState]:
        """The run with its frozen, initial, reference and teacher parameters, and the state before the first step.

        Args:
            params: all of the policy's parameters in float32.
        """
        config = run.config
        decoder = run.policy.decoder
        params, frozen = split_params(params, config.model)
        teacher = load_teacher(config, run.policy)
        self._recipe = recipe_of(config, decoder, teacher and teacher.decoder)
        steps = config.training.steps
        self._rates = jax.device_get(jax.vmap(config.optimizer.build_schedule(steps))(np.arange(steps)))
        self._numbers = hyperparameters_of(config, 0.0)
        self._drop_key = drop_key(config.seed)
        needs_reference = self._recipe.algorithm.needs_reference
        reads_initial = (needs_reference and not config.model.reference) or config.evaluation.initial_kl
        frozen = in_compute_dtype(decoder, frozen, copy=False)
        initial = in_compute_dtype(decoder, params, copy=True) if reads_initial else None
        reference = initial if needs_reference else None
        if needs_reference and config.model.reference:
            reference = reference_params(config, run.policy)
        run = run._replace(frozen=frozen, initial=initial, reference=reference, teacher=teacher)
        trained = first_state(self._recipe.optimizer, params)
        is_new = not steps_of(Path(config.output) / "checkpoints")
        if config.model.run and config.optimizer.state == "run" and is_new:
            folder, step = split_step(config.model.run)
            trained = trained._replace(optimizer_state=optimizer_state_of(folder, int(step), trained.optimizer_state))
        return run, trained

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
        recipe = self._recipe
        params = combine(trained.params, run.frozen)
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
        _, rate = _rates_of(self._rates, trained.optimizer_state)
        numbers = self._numbers | {"optimizer": self._numbers["optimizer"] | {"learning_rate": rate}}
        trained, metrics, learned = update(
            trained,
            put_rows(batch),
            layout,
            UpdateContext(
                run.frozen,
                jax.random.fold_in(self._drop_key, run.batch_of(step)),
                reference_params=run.reference,
                teacher_params=run.teacher and run.teacher.params,
                proximal_logprobs=proximal_logprobs,
                hyperparameters=numbers,
            ),
            recipe=self._recipe,
        )
        return trained, metrics | {"learning_rate": _rates_of(self._rates, trained.optimizer_state)[0]}, learned

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


@jax.jit
def _rates_of(learning_rates: ArrayLike, optimizer_state: optax.OptState) -> tuple[jax.Array, jax.Array]:
    """Learning rates of the latest and the next update; steps without data made none, so their number says neither."""
    count = optax.tree.get_all_with_path(optimizer_state, "count")[-1][1]  # the schedule's, after Adam's
    rates = jnp.asarray(learning_rates)
    return rates[jnp.maximum(count - 1, 0)], rates[jnp.minimum(count, len(rates) - 1)]
