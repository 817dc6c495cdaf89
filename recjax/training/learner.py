"""The computations of a run on its devices: the sampler's parameters, updates and evaluation."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Key

from recjax.config import Config
from recjax.experience.batch import Batch
from recjax.experience.layout import Layout, choose_layout, score_batch
from recjax.hub.policy import Policy, Teacher
from recjax.models.placement import put_rows
from recjax.models.trainable import combine, in_compute_dtype, split_params
from recjax.runtime.console import under_way
from recjax.tasks.prompts import Prompts
from recjax.training import schedule
from recjax.training.evaluation import Evaluation, HeldOut, evaluate_policy
from recjax.training.kernel_check import check_kernels, has_kernels
from recjax.training.run import State
from recjax.training.update import (
    TokenResults,
    TrainState,
    UpdateContext,
    first_state,
    hyperparameters_of,
    recipe_of,
    update,
)


class Learner:
    """Computes with JAX. Tests of the loop give `train` a subclass that only counts.

    Attributes:
        frozen: parameters that are not trained, in the compute dtype.
        initial: trained parameters before the first step, in the compute dtype; None if no function reads them.
        reference: `initial`, or all parameters of `model.reference`, in the compute dtype; None if the loss has no KL
            to a reference.
        teacher: the model that `model.teacher` names; None if the config names none, or the policy itself.
    """

    # A subclass may have a function here that is called instead of `recjax.runs.policies.initial_policy`.
    initial_policy: Callable[[Config, Policy, Prompts], tuple[Policy, dict]] | None = None

    def __init__(self):
        """Has no parameters before `begin`."""
        self.frozen: dict = {}
        self.initial: dict | None = None
        self.reference: dict | None = None
        self.teacher: Teacher | None = None
        self._compiling: Future | None = None
        self._is_unchecked = False

    def begin(
        self,
        config: Config,
        policy: Policy,
        params: dict,
        held_out: HeldOut,
        *,
        teacher: Teacher | None = None,
        reference: dict | None = None,
    ) -> TrainState:
        """Takes the policy's parameters and those of other models; returns the state before the first step.

        Args:
            params: all of the policy's parameters in float32.
            held_out: the problems that `evaluate` samples answers to.
            teacher: the model that `model.teacher` names.
            reference: all parameters of `model.reference` in the compute dtype.
        """
        decoder = policy.decoder
        steps = config.training.steps
        params, frozen = split_params(params, config.model)
        self._config = config
        self._policy = policy
        self._held_out = held_out
        self.teacher = teacher
        teacher_decoder = None
        if teacher is not None:
            teacher_decoder = teacher.decoder
        self._recipe = recipe_of(config, decoder, teacher_decoder)
        learning_rates = jax.vmap(config.optimizer.build_schedule(steps))
        self._rates = jax.device_get(learning_rates(np.arange(steps)))
        self._numbers = hyperparameters_of(config, 0.0)
        self._drop_key = drop_key(config.seed)
        self._is_unchecked = has_kernels(self._recipe.decoder)
        self.frozen = in_compute_dtype(decoder, frozen, copy=False)
        needs_reference = self._recipe.algorithm.needs_reference
        if (needs_reference and not config.model.reference) or config.evaluation.initial_kl:
            self.initial = in_compute_dtype(decoder, params, copy=True)
        # The trained parameters are donated to each update, so a reference to them needs arrays of its own.
        if needs_reference:
            self.reference = self.initial
            if config.model.reference:
                self.reference = reference
        return first_state(self._recipe.optimizer, params)

    def behavior_params(self, state: State, copy: bool = False) -> dict:
        """The sampler's values of the trained parameters, in the compute dtype: the state's copy, or the current ones.

        Args:
            copy: return no array of the trained parameters.
        """
        if state.behavior_params is not None:
            return state.behavior_params
        # The first copy exists already: the KL to the initial policy reads it.
        if copy and state.version == 0 and self.initial is not None:
            return self.initial
        return in_compute_dtype(self._policy.decoder, state.trained.params, copy=copy)

    def current_params(self, state: State) -> dict:
        """All parameters after the latest update: the trained ones in float32, the frozen ones in the compute dtype."""
        return combine(state.trained.params, self.frozen)

    def layout(self, batch: Batch, rows: Bool[np.ndarray, " batch"] | None, doublings: int | None) -> Layout:
        """The micro-batches of an update; see `choose_layout`."""
        recipe = self._recipe
        config = self._config
        return choose_layout(
            config, recipe.algorithm, recipe.decoder, batch, rows, doublings=doublings, teacher=recipe.teacher
        )

    def proximal_logprobs(
        self, trained: TrainState, batch: Batch, layouts: Iterable[Layout]
    ) -> Float[Array, "batch time"] | None:
        """Log-probs of a batch before its first update; None if the algorithm reads none.

        Args:
            layouts: layouts of a pass over the batch, which score it one minibatch after the other.
        """
        recipe = self._recipe
        if not recipe.algorithm.needs_proximal:
            return None
        params = combine(trained.params, self.frozen)
        batch = put_rows(batch)
        total: Any = 0
        for layout in layouts:
            # Log-probs are 0 outside a layout's minibatch.
            scores = score_batch(layout, recipe.decoder, params, batch, sampling=recipe.sampling, chunk=recipe.chunk)
            total += scores.logprobs
        return total

    def update(
        self,
        trained: TrainState,
        batch: Batch,
        layout: Layout,
        step: int,
        proximal_logprobs: Float[Array, "batch time"] | None = None,
    ) -> tuple[TrainState, dict, TokenResults]:
        """One optimizer step; see `update.update`. The device may still compute it after the call returns.

        Raises:
            UserError: before the first step, see `check_kernels`.
        """
        if self._is_unchecked:
            params = combine(trained.params, self.frozen)
            self._is_unchecked = not check_kernels(self._recipe.decoder, params, batch, layout, self._recipe.chunk)
        if self._compiling is not None:
            wait([self._compiling])  # or this thread would compile the same program; it meets the same errors
            self._compiling = None
        context = self._context(trained, step, proximal_logprobs)
        trained, metrics, tokens = update(trained, put_rows(batch), layout, context, recipe=self._recipe)
        latest_rate, _ = _learning_rates(self._rates, trained.optimizer_state)
        return trained, metrics | {"learning_rate": latest_rate}, tokens

    def compile_update(self, trained: TrainState, batch: Batch, layout: Layout) -> None:
        """Starts to compile the update for the shapes of these arguments in a thread; `update` waits for it."""
        mesh = jax.sharding.get_mesh()
        rows = put_rows(batch)
        context = self._context(trained, step=1, proximal_logprobs=None)
        recipe = self._recipe

        def compile_for_shapes() -> None:
            with jax.set_mesh(mesh):
                update.lower(trained, rows, layout, context, recipe=recipe).compile()

        pool = ThreadPoolExecutor(1, "compile the update")
        self._compiling = pool.submit(compile_for_shapes)
        pool.shutdown(wait=False)

    def _context(self, trained: TrainState, step: int, proximal_logprobs: Array | None) -> UpdateContext:
        """The values of a step that `update.update` reads besides the state and the batch."""
        # An argument of the program and not a constant in it: runs with other rates share the compiled update.
        _, rate = _learning_rates(self._rates, trained.optimizer_state)
        optimizer_numbers = self._numbers["optimizer"] | {"learning_rate": rate}
        numbers = self._numbers | {"optimizer": optimizer_numbers}
        # By batch, so that all updates of a batch drop the same completions.
        batch_number = schedule.batch_of(step, self._config.training.updates)
        teacher_params = None
        if self.teacher is not None:
            teacher_params = self.teacher.params
        return UpdateContext(
            frozen=self.frozen,
            key=jax.random.fold_in(self._drop_key, batch_number),
            reference_params=self.reference,
            teacher_params=teacher_params,
            proximal_logprobs=proximal_logprobs,
            hyperparameters=numbers,
        )

    def evaluate(self, state: State) -> Evaluation:
        """Samples and grades answers of the trained policy to the held-out problems."""
        config = self._config
        held_out = self._held_out
        initial = None
        if config.evaluation.initial_kl:
            assert self.initial is not None
            initial = combine(self.initial, self.frozen)
        # In the dtype of the sampler, which shares its programs with the evaluation.
        trained = in_compute_dtype(self._policy.decoder, state.trained.params, copy=False)
        problems = len(held_out.prompts.texts)
        with under_way(f"evaluating the initial policy: {problems} problems", state.step == 0):
            return evaluate_policy(
                config,
                self._policy,
                combine(trained, self.frozen),
                held_out.prompts,
                held_out.grading,
                step=state.step,
                initial_params=initial,
                agents=held_out.agents,
            )


def drop_key(seed: int | Array) -> Key[Array, ""]:
    """The random key that, folded with the number of a batch, decides which completions its updates drop."""
    return jax.random.fold_in(jax.random.key(seed), 3)


@jax.jit
def _learning_rates(schedule_rates: ArrayLike, optimizer_state: optax.OptState) -> tuple[jax.Array, jax.Array]:
    """Learning rates of the latest and the next update, which are not the step's: a step without data makes no update.

    Args:
        schedule_rates: the learning rate of each update.
    """
    counts = optax.tree.get_all_with_path(optimizer_state, "count")
    count = counts[-1][1]  # The schedule's count comes after Adam's.
    rates = jnp.asarray(schedule_rates)
    latest = rates[jnp.maximum(count - 1, 0)]
    following = rates[jnp.minimum(count, len(rates) - 1)]
    return latest, following
