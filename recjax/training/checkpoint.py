"""Checkpoints that hold everything a run needs to go on exactly as if it had never stopped."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from recjax.experience.records import Batch
from recjax.training.update import TrainState


class Snapshot(NamedTuple):
    """A run after `step` updates. Data position and random keys follow from the seed and `step`.

    behaviour_params are the sampler's copy, `behaviour_version` the updates they had when copied, `queue` the batches
    drawn, scored and not yet trained on, `progress` the run's running totals.
    """

    step: int
    state: TrainState
    behaviour_params: dict
    behaviour_version: int
    queue: list[Batch]
    progress: dict[str, Any]


def open_checkpoints(folder: Path, keep: int) -> ocp.CheckpointManager:
    """The run's checkpoints, the newest `keep` of them; a checkpoint appears whole or not at all."""
    return ocp.CheckpointManager(
        folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
    )


def save(manager: ocp.CheckpointManager, snapshot: Snapshot) -> None:
    """Writes a checkpoint and waits until it is on disk."""
    items = {
        "state": ocp.args.StandardSave(snapshot.state),
        "behaviour_params": ocp.args.StandardSave(snapshot.behaviour_params),
        "progress": ocp.args.JsonSave(
            {**snapshot.progress, "behaviour_version": snapshot.behaviour_version, "queued": len(snapshot.queue)}
        ),
    }
    if snapshot.queue:
        stacked = jax.tree.map(lambda *rows: np.stack(rows), *snapshot.queue)
        items["queue"] = ocp.args.StandardSave(stacked._asdict())
    manager.save(snapshot.step, args=ocp.args.Composite(**items), force=True)
    manager.wait_until_finished()


def restore(manager: ocp.CheckpointManager, state: TrainState, behaviour_params: dict) -> Snapshot | None:
    """The newest checkpoint, or None.

    Args:
        state, behaviour_params: of the same shapes; their values are not used.
    """
    step = manager.latest_step()
    if step is None:
        return None
    like, behaviour_like = jax.tree.map(ocp.utils.to_shape_dtype_struct, (state, behaviour_params))
    progress = manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))["progress"]
    items = {
        "state": ocp.args.StandardRestore(like),
        "behaviour_params": ocp.args.StandardRestore(behaviour_like),
    }
    queued = progress.pop("queued")
    if queued:
        items["queue"] = ocp.args.StandardRestore()
    restored = manager.restore(step, args=ocp.args.Composite(**items))
    queue = []
    if queued:
        stacked = Batch(**{"reward_parts": {}} | jax.tree.map(np.asarray, dict(restored["queue"])))
        queue = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(queued)]
    return Snapshot(
        step=step,
        state=restored["state"],
        behaviour_params=restored["behaviour_params"],
        behaviour_version=progress.pop("behaviour_version"),
        queue=queue,
        progress=progress,
    )
