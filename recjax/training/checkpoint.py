"""Checkpoints that hold everything a run needs to go on exactly as if it had never stopped."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from recjax.experience import feed as feeds
from recjax.experience import store
from recjax.experience.records import Batch
from recjax.training.source import Held
from recjax.training.update import TrainState


class Snapshot(NamedTuple):
    """A run after `step` updates. Data position and random keys follow from the seed and `step`.

    `progress` is the run's running totals.
    """

    step: int
    state: TrainState
    held: Held
    progress: dict[str, Any]


def open_checkpoints(folder: Path, keep: int) -> ocp.CheckpointManager:
    """The run's checkpoints, the newest `keep` of them; a checkpoint appears whole or not at all."""
    return ocp.CheckpointManager(
        folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
    )


def save(manager: ocp.CheckpointManager, snapshot: Snapshot) -> None:
    """Writes a checkpoint and waits until it is on disk."""
    held = snapshot.held
    rows, feed = feeds.to_plain(held.feed)
    plain = {"behaviour_version": held.version, "queued": len(held.queue), "feed": feed, "rows": len(rows)}
    plain["in_flight"] = list(held.in_flight)
    items = {
        "state": ocp.args.StandardSave(snapshot.state),
        "behaviour_params": ocp.args.StandardSave(held.behaviour_params),
        "progress": ocp.args.JsonSave({**snapshot.progress, **plain}),
    }
    if held.queue:
        stacked = jax.tree.map(lambda *rows: np.stack(rows), *held.queue)
        items["queue"] = ocp.args.StandardSave(stacked._asdict())
    if rows:
        items["rows"] = ocp.args.StandardSave({"parquet": np.frombuffer(store.to_bytes(rows), np.uint8)})
    manager.save(snapshot.step, args=ocp.args.Composite(**items), force=True)
    manager.wait_until_finished()


def restore(manager: ocp.CheckpointManager, state: TrainState, behaviour_params: dict) -> Snapshot:
    """The newest checkpoint.

    Args:
        state, behaviour_params: shapes, dtypes and shardings, which may be others than those that were saved.
    """
    step = manager.latest_step()
    progress = manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))["progress"]
    queued, rows, feed = (progress.pop(name) for name in ("queued", "rows", "feed"))
    items = {
        "state": ocp.args.StandardRestore(state),
        "behaviour_params": ocp.args.StandardRestore(behaviour_params),
        **({"queue": ocp.args.StandardRestore()} if queued else {}),
        **({"rows": ocp.args.StandardRestore()} if rows else {}),
    }
    restored = manager.restore(step, args=ocp.args.Composite(**items))
    queue = []
    if queued:
        stacked = Batch(**{"reward_parts": {}} | jax.tree.map(np.asarray, dict(restored["queue"])))
        queue = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(queued)]
    fed = store.from_bytes(np.asarray(restored["rows"]["parquet"]).tobytes()) if rows else []
    version = progress.pop("behaviour_version")
    in_flight = tuple(progress.pop("in_flight"))
    held = Held(restored["behaviour_params"], version, queue, feeds.from_plain(fed, feed), in_flight)
    return Snapshot(step, restored["state"], held, progress)
