"""Checkpoints that hold everything a run needs to go on exactly as if it had never stopped."""

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from recjax.experience import store
from recjax.experience.queue import from_plain, to_plain
from recjax.training.run import State
from recjax.training.update import TrainState

LAYOUT = 2  # of checkpoints; 1 held several queues


def open_checkpoints(folder: Path, keep: int) -> ocp.CheckpointManager:
    """The run's checkpoints, the newest `keep` of them; a checkpoint appears whole or not at all."""
    return ocp.CheckpointManager(
        folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
    )


def save(manager: ocp.CheckpointManager, state: State) -> None:
    """Writes a checkpoint and waits until it is on disk.

    Args:
        state: between two steps, all grades of its queue waited for.
    """
    rows, queue = to_plain(state.queue)
    plain = {"layout": LAYOUT, "version": state.version, "in_flight": state.in_flight, "queue": queue}
    items = {
        "state": ocp.args.StandardSave(state.trained),
        "behaviour_params": ocp.args.StandardSave(state.behaviour_params),
        "progress": ocp.args.JsonSave({**plain, "totals": state.totals, "rows": len(rows)}),
    }
    if rows:
        items["groups"] = ocp.args.StandardSave({"parquet": np.frombuffer(store.to_bytes(rows), np.uint8)})
    manager.save(state.step, args=ocp.args.Composite(**items), force=True)
    manager.wait_until_finished()


def restore(manager: ocp.CheckpointManager, trained: TrainState, behaviour_params: dict) -> State:
    """The newest checkpoint.

    Args:
        trained, behaviour_params: shapes, dtypes and shardings, which may be others than those that were saved.
    Raises:
        ValueError: a checkpoint of an earlier layout.
    """
    step = manager.latest_step()
    plain = manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))["progress"]
    if plain.get("layout") != LAYOUT:
        raise ValueError(
            f"{manager.directory}: the checkpoint of step {step} has the layout of an earlier recjax, which this one"
            " cannot go on from; go on with the recjax that wrote it, or give another output=…. evaluate and export"
            " read it as it is"
        )
    items = {
        "state": ocp.args.StandardRestore(trained),
        "behaviour_params": ocp.args.StandardRestore(behaviour_params),
        **({"groups": ocp.args.StandardRestore()} if plain["rows"] else {}),
    }
    restored = manager.restore(step, args=ocp.args.Composite(**items))
    rows = store.from_bytes(np.asarray(restored["groups"]["parquet"]).tobytes()) if plain["rows"] else []
    return State(
        step=step,
        trained=restored["state"],
        behaviour_params=restored["behaviour_params"],
        version=plain["version"],
        queue=from_plain(rows, plain["queue"]),
        in_flight=tuple(plain["in_flight"]),
        totals=plain["totals"],
    )
