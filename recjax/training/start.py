"""Starts a run before its first step, or resumes it at its newest checkpoint."""

import logging
import uuid
from collections.abc import Callable

import jax
import orbax.checkpoint as ocp

from recjax.config import Config
from recjax.experience.following import Follower
from recjax.experience.queue import Queue
from recjax.training import checkpoint, rounds
from recjax.training.learner import Learner
from recjax.training.regrading import known_problems, regraded
from recjax.training.run import Run, State, prepare
from recjax.training.run_folder import open_run_folder

logger = logging.getLogger(__name__)


def begin(
    config: Config, overwrite: bool, sources: Callable | None = None, learner: Learner | None = None
) -> tuple[Run, State, ocp.CheckpointManager]:
    """The run, its state and its checkpoints, on the mesh in context, also if the run was on another mesh before.

    Args:
        overwrite: delete the run that the folder holds.
        sources, learner: see `train`.
    Raises:
        ValueError: a task, model, store or folder that cannot be used, or a store that changed after the run began.
    """
    learner = learner or Learner()
    run, params = prepare(config, learner.initial_policy)
    run = run._replace(learner=learner, sample=sources or rounds.sample_batch)
    regrades = config.experience is not None and config.experience.regrade
    known = known_problems(run) if regrades else {}
    output = open_run_folder(config, overwrite)
    if regrades:
        run = regraded(run, known)
    checkpoint.set_damaged_aside(output / "checkpoints")
    manager = checkpoint.open_checkpoints(output / "checkpoints")
    run, trained = learner.begin(run, params)
    del params
    totals = {"seconds": {}, "wall_seconds": 0.0, "tokens": 0, "store": run.stored and run.stored.digest}
    totals |= {"config": config.model_dump(), "metrics": None}
    totals |= {"run": uuid.uuid4().hex} if config.follows else {}
    state = State(0, trained, None, 0, Queue(), (), totals)
    if manager.latest_step() is None:
        return _with_follower(run, state), state, manager
    like = (state.trained, learner.sampler_params(run, state))
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    del trained, state  # the restored arrays need their memory
    state = checkpoint.restore(manager, *like)
    if state.totals["store"] != totals["store"]:
        place = config.experience.store or config.experience.mix.store
        raise ValueError(
            f"the experience store {place!r} has changed since this run began, which would change its batches; restore"
            f" the store's rows, or give another output than {config.output!r}"
        )
    state = state._replace(totals=totals | state.totals | {"config": totals["config"]})
    logger.info("resuming from the checkpoint of step %d", state.step)
    run.phases.go_on_from(state.totals["seconds"], state.totals["wall_seconds"])
    return _with_follower(run, state), state, manager


def _with_follower(run: Run, state: State) -> Run:
    """The run with a reader of the store that it follows, if it follows one."""
    if not run.config.follows:
        return run
    if jax.process_count() > 1:
        raise ValueError(
            f"experience.follow = true: only one process can follow a store, and this run has {jax.process_count()};"
            " start a single process"
        )
    return run._replace(follower=Follower(run.config, run.policy, state.totals["run"]))
