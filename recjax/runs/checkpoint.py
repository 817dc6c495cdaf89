"""Checkpoints that hold everything a run needs to resume exactly as if it had never stopped.

Each checkpoint has a manifest, which is written last. A checkpoint without a manifest, or with a file that differs from
it, is not whole; the run then resumes from the checkpoint before.
"""

import json
import logging
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from recjax.algorithms.options import did_you_mean
from recjax.config import Config, TrainingConfig
from recjax.config.model import ModelConfig
from recjax.errors import UserError
from recjax.experience.queue import from_plain, to_plain
from recjax.experience.records import groups_from_bytes, groups_to_bytes
from recjax.logs.metrics import MetricsWriter, read_metrics
from recjax.models.placement import on_host, put_rows
from recjax.runs.lock import RunLock
from recjax.runtime import files, hosts
from recjax.runtime.clocks import PhaseSeconds
from recjax.runtime.files import short_error
from recjax.runtime.literal_path import LiteralPath
from recjax.training.run import State
from recjax.training.update import Averaged, TrainState

CHECKPOINT_FORMAT = 1  # version of the checkpoint format
COPY = "behavior_params"  # checkpoint item with the sampler's copy of the weights, separate from `state`
BASE = "initial policy"  # name of the digest of the policy before its first step
BATCH = "batch"  # checkpoint item with the batch that further updates train on

logger = logging.getLogger(__name__)


def open_checkpoints(folder: Path) -> ocp.CheckpointManager:
    """A manager of the checkpoints in `folder`."""
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    return ocp.CheckpointManager(LiteralPath(folder.absolute()), options=options)


def save(manager: ocp.CheckpointManager, state: State, training: TrainingConfig, older: Collection[int] = ()) -> None:
    """Writes a checkpoint and its manifest to disk, then deletes all that the config does not keep.

    Args:
        state: run state between two steps, with all grades in its queue.
        older: steps of checkpoints to keep, because an agent's frozen seats read their weights.
    Raises:
        UserError: the checkpoint cannot be written, and earlier checkpoints stay; or no step has the metric of
            `training.keep_best`.
    """
    waiting, queue = to_plain(state.queue)
    groups = groups_to_bytes(waiting)
    plain = {
        "format": CHECKPOINT_FORMAT,
        "step": state.step,
        "version": state.version,
        "source": state.source,
        "queue": queue,
        "totals": state.totals,
        "groups": len(groups),
    }
    items = {"state": ocp.args.StandardSave(state.trained), "progress": ocp.args.JsonSave(plain)}
    if state.behavior_params is not None:
        items[COPY] = ocp.args.StandardSave(state.behavior_params)
    if state.groups:
        batch = {"groups": np.frombuffer(groups_to_bytes(state.groups), np.uint8)}
        if state.proximal_logprobs is not None:
            batch["proximal_logprobs"] = on_host(state.proximal_logprobs)
        items[BATCH] = ocp.args.StandardSave(batch)
    if groups:
        items["groups"] = ocp.args.StandardSave({"parquet": np.frombuffer(groups, np.uint8)})
    folder = Path(manager.directory)
    try:
        manager.save(state.step, args=ocp.args.Composite(**items), force=True)
        manager.wait_until_finished()
        if hosts.is_first():
            files.write_manifest(folder / str(state.step))
    except Exception as error:
        # Tensorstore raises its own exception types, for example for a full disk.
        raise UserError(
            folder,
            f"the checkpoint of step {state.step} cannot be written ({short_error(error)})",
            "free space, or allow writing there; the same command then resumes from the previous checkpoint",
        ) from error
    hosts.wait_for_all("the checkpoint's manifest")
    best = None
    if training.keep_best:
        best = hosts.from_first(lambda: best_step(folder.parent, training.keep_best))
    for step in sorted(manager.all_steps())[: -training.keep_checkpoints]:
        if step != best and step not in older:
            manager.delete(step)


class Saver:
    """The lock and the checkpoints of a run folder, for the loop."""

    def __init__(
        self,
        config: Config,
        manager: ocp.CheckpointManager,
        lock: RunLock,
        metrics: MetricsWriter,
        phases: PhaseSeconds,
    ):
        """Takes the open checkpoints, lock, metrics and clock of the run."""
        self._config = config
        self._manager = manager
        self._lock = lock
        self._metrics = metrics
        self._phases = phases

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint; None before the first."""
        return self._manager.latest_step()

    def check(self) -> None:
        """Checks that this process still holds the run folder; see `RunLock.check`."""
        self._lock.check()

    def save(self, state: State) -> State:
        """Writes a checkpoint of a state with all grades; returns the state that it holds, with the run's seconds."""
        with self._phases.phase("checkpoint"):
            seconds = {"seconds": dict(self._phases.totals), "wall_seconds": self._phases.wall_seconds}
            state = state._replace(totals=state.totals | seconds | {"metrics": self._metrics.written})
            oldest = max(state.version - (self._config.regime.max_staleness or 0), 0)
            older = self._config.task.older_versions(range(oldest, state.step + 1))
            save(self._manager, state, self._config.training, older)
        return state


def best_step(run: Path, metric: str) -> int:
    """The step of the checkpoint with the best value of a metric, the earliest of equal ones.

    Args:
        metric: name in metrics.jsonl, with - in front if lower is better.
    Raises:
        UserError: no checkpoint has a step with this metric.
    """
    name = metric.removeprefix("-")
    rows = read_metrics(run / "metrics.jsonl")
    steps = steps_of(run / "checkpoints")
    values = {row["step"]: row[name] for row in rows if row["step"] in steps and name in row}
    # Only evaluations have metrics before the first step.
    if not values and (len(rows) > 1 or name.startswith("evaluation/")):
        numbers = set()
        for row in rows:
            numbers.update(key for key, value in row.items() if isinstance(value, int | float))
        known = sorted(numbers)
        raise UserError(
            f"metric {metric!r} (training.keep_best)",
            f"no checkpoint's step has it{did_you_mean(name, known)}; the run has {', '.join(known)}",
        )
    if not values:
        return 0
    choose = min if metric.startswith("-") else max
    return choose(values, key=values.__getitem__)


def restore(manager: ocp.CheckpointManager, trained: TrainState, behavior_params: dict) -> State:
    """Restores the newest checkpoint.

    Args:
        trained, behavior_params: shapes, dtypes and shardings to restore to, which may differ from the saved ones;
            `behavior_params` is used only if the checkpoint has the sampler's copy.
    Raises:
        UserError: the checkpoint has another format or cannot be read.
    """
    step = manager.latest_step()
    assert step is not None
    name = f"{manager.directory}: the checkpoint of step {step}"
    plain = progress(Path(manager.directory), step)
    if plain.get("format") != CHECKPOINT_FORMAT:
        raise UserError(
            name,
            "has the format of another version of recjax",
            "resume the run with the recjax that wrote it, or give another output=…",
        )
    folder = Path(manager.directory) / str(step)
    has_copy = (folder / COPY).exists()
    has_batch = (folder / BATCH).exists()
    has_groups = plain["groups"] > 0
    items = {"state": ocp.args.StandardRestore(trained)}
    if has_copy:
        items[COPY] = ocp.args.StandardRestore(behavior_params)
    if has_batch:
        items[BATCH] = ocp.args.StandardRestore()
    if has_groups:
        items["groups"] = ocp.args.StandardRestore()
    try:
        restored = manager.restore(step, args=ocp.args.Composite(**items))
    except Exception as error:
        # The manifest was checked, so the cause is the model or the code.
        raise UserError(
            name, f"cannot be read ({short_error(error)})", "if the model or the problems have changed, restore them"
        ) from error
    waiting = b""
    if has_groups:
        waiting = np.asarray(restored["groups"]["parquet"]).tobytes()
    state = State(
        step=step,
        trained=restored["state"],
        behavior_params=None,
        version=step,
        queue=from_plain(groups_from_bytes(waiting), plain["queue"]),
        source=plain["source"],
        totals=plain["totals"],
    )
    if has_copy:
        state = state._replace(behavior_params=restored[COPY], version=plain["version"])
    if has_batch:
        batch = restored[BATCH]
        state = state._replace(
            groups=tuple(groups_from_bytes(np.asarray(batch["groups"]).tobytes())),
            proximal_logprobs=put_rows(batch.get("proximal_logprobs")),
        )
    return state


def optimizer_state_of(run: Path, step: int, fresh: TrainState, new_average: bool = False) -> optax.OptState:
    """The optimizer state of a checkpoint, whose learning rate schedule starts again.

    Args:
        fresh: state before a first step, on the devices. If only `fresh` has an average of its parameters, that average
            stays. If only the checkpoint has one, recjax does not read it.
        new_average: keep the average of `fresh`, which is the policy before the first step.
    Raises:
        UserError: the checkpoint has another optimizer, or cannot be read.
    """
    new_state: Any = fresh.optimizer_state
    average = [part for part in new_state if isinstance(part, Averaged)]
    parts = new_state[: len(new_state) - len(average)]  # an average is the last part of the chain
    stored = tuple(parts)
    if _has_average(run, step):
        stored = (*parts, Averaged(fresh.params))
    like = {"optimizer_state": jax.tree.map(ocp.utils.to_shape_dtype_struct, stored)}
    arguments = ocp.args.PyTreeRestore(
        item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
    )
    folder = run / "checkpoints" / str(step) / "state"
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            state = checkpointer.restore(folder.absolute(), args=arguments)["optimizer_state"]
    except Exception as error:
        raise UserError(
            folder,
            f"its optimizer state does not fit ({short_error(error)})",
            "set optimizer.state=new to begin with a new state",
        ) from error
    restored = state[: len(parts)]
    if average:
        stored_average = state[len(parts) :]
        restored = (*restored, *(stored_average or average))
    fresh_parts: tuple[type, ...] = (optax.ScaleByScheduleState,)
    if new_average:
        fresh_parts = (optax.ScaleByScheduleState, Averaged)

    def is_fresh(node: Any) -> bool:
        return isinstance(node, fresh_parts)

    return jax.tree.map(lambda new, old: new if is_fresh(new) else old, new_state, restored, is_leaf=is_fresh)


def _has_average(run: Path, step: int) -> bool:
    """True if the optimizer state of a checkpoint has a moving average of the parameters."""
    stored = progress(run / "checkpoints", step).get("totals", {}).get("config", {}).get("model", {})
    # A config of another version need not be valid here.
    return ModelConfig.model_construct(**stored).average_rate is not None


def steps_of(folder: Path) -> list[int]:
    """Steps of all checkpoints in a folder, whole or not, in ascending order."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal() and path.is_dir())


def progress(folder: Path, step: int) -> dict[str, Any]:
    """The JSON part of a checkpoint: format, version, the queue's numbers, totals.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / str(step) / "progress" / "metadata"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(path, f"is damaged: it cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(path, "is damaged: it is not a JSON object")
    if content.get("step", step) != step:
        raise UserError(
            folder / str(step), f"is a copy of the checkpoint of step {content['step']}", "delete it, or rename it"
        )
    return content


def newest_totals(manager: ocp.CheckpointManager) -> dict[str, Any]:
    """The totals in the newest checkpoint; empty if there is no checkpoint."""
    step = manager.latest_step()
    if step is None:
        return {}
    return progress(Path(manager.directory), step).get("totals", {})


def newest_whole(folder: Path) -> tuple[int | None, dict[int, str]]:
    """The step of the newest whole checkpoint (None without one), and the defect of each later checkpoint by step."""
    damaged: dict[int, str] = {}
    for step in reversed(steps_of(folder)):
        try:
            files.check_manifest(folder / str(step))
            return step, damaged
        except UserError as error:
            damaged[step] = str(error)
    return None, damaged


def set_damaged_aside(folder: Path) -> None:
    """Moves the checkpoints after the newest whole one to `damaged/`, next to their folder.

    Only the first process does this. If the only checkpoint is a damaged one of step 0, it is moved as well: the run
    starts again, and no work is lost.

    Raises:
        UserError: there are checkpoints, but none is whole; they stay in place.
    """
    refused = None
    if hosts.is_first() and folder.is_dir():
        for unfinished in folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished)  # Its process is dead, since this process holds the lock.
        whole, damaged = newest_whole(folder)
        consequence = f"the run resumes from the checkpoint of step {whole}"
        if whole is None:
            consequence = "the run starts again"
        if whole is None and damaged.keys() - {0}:
            refused = none_whole(folder, damaged)
        else:
            for step, reason in damaged.items():
                aside = _moved_aside(folder / str(step))
                logger.warning("checkpoint of step %d: %s; moved to %s, and %s", step, reason, aside, consequence)
    if hosts.any_says(refused is not None):
        raise refused or UserError(folder, "no checkpoint is whole", "see the log of process 0")


def _moved_aside(checkpoint: Path) -> Path:
    """Moves a checkpoint to `damaged/` in the run folder; returns the new path, numbered if the name exists there."""
    damaged_folder = checkpoint.parents[1] / "damaged"
    damaged_folder.mkdir(exist_ok=True)
    aside = damaged_folder / checkpoint.name
    number = 1
    while aside.exists():
        number += 1
        aside = damaged_folder / f"{checkpoint.name}-{number}"
    checkpoint.rename(aside)
    return aside


def none_whole(folder: Path, damaged: dict[int, str]) -> UserError:
    """The error for a folder without a whole checkpoint."""
    reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
    remedy = "restore one from a copy, or start again with --overwrite"
    return UserError(folder, f"no checkpoint is whole ({reasons})", remedy)


def _is_shown(record: logging.LogRecord) -> bool:
    """False for tracebacks that Orbax's threads log, some of them after the same error was raised."""
    absl = logging.getLogger("absl")
    return record.levelno < logging.ERROR or "orbax" not in record.pathname or absl.level <= logging.INFO  # --verbosity


logging.getLogger("absl").addFilter(_is_shown)
