"""Starts a run before its first step, or resumes it at its newest checkpoint."""

import dataclasses
import functools
import logging
import uuid

import jax
import optax
import orbax.checkpoint as ocp

from recjax.config import Config
from recjax.experience.following import Follower
from recjax.experience.queue import Queue
from recjax.hub.policy import load_teacher
from recjax.models.placement import constrain_params
from recjax.models.trainable import in_compute_dtype, split
from recjax.training import checkpoint
from recjax.training.regrading import known_problems, regraded
from recjax.training.run import Run, State, prepare
from recjax.training.run_folder import open_run_folder
from recjax.training.update import TrainState, recipe_of

logger = logging.getLogger(__name__)


def begin(config: Config, overwrite: bool) -> tuple[Run, State, ocp.CheckpointManager]:
    """The run, where it stands, and its checkpoints, on the mesh in context, whatever mesh an earlier part was on.

    Args:
        overwrite: delete what another run left in the folder.
    Raises:
        ValueError: a task, model, store or folder that cannot be used, or a store that has changed since.
    """
    run, params = prepare(config)
    regrades = config.experience is not None and config.experience.regrade
    known = known_problems(run) if regrades else {}
    output = open_run_folder(config, overwrite)
    if regrades:
        run = regraded(run, known)
    checkpoint.set_damaged_aside(output / "checkpoints")
    manager = checkpoint.open_checkpoints(output / "checkpoints")
    decoder, recipe = run.policy.decoder, recipe_of(config, run.policy.decoder)
    params, frozen = split(params, config.model)
    reads_initial = recipe.algorithm.needs_reference or config.evaluation.initial_kl
    frozen = in_compute_dtype(decoder, frozen, copy=False)
    initial = in_compute_dtype(decoder, params, copy=True) if reads_initial else None
    teacher = load_teacher(config, run.policy.tokenizer)
    run = run._replace(frozen=frozen, initial=initial, teacher=teacher)
    totals = {"seconds": {}, "wall_seconds": 0.0, "tokens": 0, "store": run.stored and run.stored.digest}
    totals |= {"config": dataclasses.asdict(config), "metrics": None}
    totals |= {"run": uuid.uuid4().hex} if config.follows else {}
    state = State(0, first_state(recipe.optimizer, params), None, 0, Queue(), (), totals)
    if manager.latest_step() is None:
        return _with_follower(run, state), state, manager
    sampled = in_compute_dtype(decoder, params, copy=False)
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, (state.trained, sampled))
    # Free their memory for the restored arrays.
    del params, sampled, initial, state
    state = checkpoint.restore(manager, *like)
    if state.totals["store"] != totals["store"]:
        place = config.experience.store or config.experience.mix.store
        raise ValueError(
            f"the experience store {place!r} is not what it was when this run began, and its batches would be others;"
            f" put its rows back, or give another output than {config.output!r}"
        )
    state = state._replace(totals=totals | state.totals | {"config": totals["config"]})
    logger.info("going on from the checkpoint of step %d", state.step)
    run.phases.go_on_from(state.totals["seconds"], state.totals["wall_seconds"])
    return _with_follower(run, state), state, manager


def _with_follower(run: Run, state: State) -> Run:
    """The run with a reader of the store that it follows, if it follows one."""
    if not run.config.follows:
        return run
    if jax.process_count() > 1:
        raise ValueError(
            f"experience.follow = true: one process follows a store, and this run has {jax.process_count()}; start one"
        )
    return run._replace(follower=Follower(run.config, run.policy, state.totals["run"]))


def first_state(optimizer: optax.GradientTransformation, params: dict) -> TrainState:
    """The state before the first step, of which the parameters themselves are a part."""
    return TrainState(params, _initial(optimizer, params))


@functools.partial(jax.jit, static_argnums=0)
def _initial(optimizer: optax.GradientTransformation, params: dict) -> optax.OptState:
    return constrain_params(optimizer.init(params))
