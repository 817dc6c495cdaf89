"""Where a run begins: before its first step, or at its newest checkpoint; and what it holds from then on."""

import functools
from typing import NamedTuple

import jax
import optax
import orbax.checkpoint as ocp

from recjax.algorithms.losses import Algorithm
from recjax.config import Config
from recjax.experience.feed import EMPTY
from recjax.models.placement import constrain_params
from recjax.models.trainable import in_compute_dtype, split
from recjax.training import checkpoint
from recjax.training.checkpoint import Snapshot
from recjax.training.setup import Setup
from recjax.training.source import Held
from recjax.training.update import TrainState


class Start(NamedTuple):
    """The run so far, whether it had begun before, and what it never changes, in the dtype that it computes in.

    frozen: parameters beside the trained ones. initial: the trained ones before the first step; None where neither a
    reference KL nor an evaluation reads them.
    """

    snapshot: Snapshot
    resumed: bool
    frozen: dict
    initial: dict | None


def begin(
    config: Config,
    setup: Setup,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    manager: ocp.CheckpointManager,
) -> Start:
    """Where the run stands, on the mesh in context, whatever mesh an earlier part of it was on.

    Args:
        setup: loses its parameters, so that none of them is held twice.
    """
    decoder, stored = setup.policy.decoder, setup.stored
    trained, frozen = split(setup.initial_params, config.model)
    setup.initial_params.clear()
    frozen = in_compute_dtype(decoder, frozen, copy=False)
    initial = in_compute_dtype(decoder, trained, copy=True)
    state = first_state(optimizer, trained)
    kept = initial if algorithm.needs_reference or config.evaluation.initial_kl else None
    if manager.latest_step() is None:
        nothing_done = {"seconds": {}, "tokens": 0, "wall_seconds": 0.0, "store": stored and stored.digest}
        return Start(Snapshot(0, state, Held(initial, 0, [], EMPTY), nothing_done), False, frozen, kept)
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, (state, initial))
    # What is restored needs their place.
    del trained, state, initial
    return Start(checkpoint.restore(manager, *like), True, frozen, kept)


def first_state(optimizer: optax.GradientTransformation, params: dict) -> TrainState:
    """The state before the first step, of which the parameters themselves are a part."""
    return TrainState(params, _initial(optimizer, params))


@functools.partial(jax.jit, static_argnums=0)
def _initial(optimizer: optax.GradientTransformation, params: dict) -> optax.OptState:
    return constrain_params(optimizer.init(params))
