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
from recjax.config.model import POLICY
from recjax.errors import UserError
from recjax.experience.queue import from_plain, to_plain
from recjax.experience.records import groups_from_bytes, groups_to_bytes
from recjax.logs.metrics import MetricsWriter, read_metrics
from recjax.models.placement import on_host, put_rows
from recjax.runs.lock import RunLock
from recjax.runtime import files, hosts
from recjax.runtime.cache import cache_folder
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
    plain = {"format": CHECKPOINT_FORMAT, "step": state.step, "version": state.version, "source": state.source}
    plain["queue"] = queue
    items = {
        "state": ocp.args.StandardSave(state.trained),
        "progress": ocp.args.JsonSave({**plain, "totals": state.totals, "groups": len(groups)}),
    }
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
    best = training.keep_best and hosts.from_first(lambda: best_step(folder.parent, training.keep_best))
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
    known = sorted({key for row in rows for key, value in row.items() if isinstance(value, int | float)})
    # Only evaluations have metrics before the first step.
    if not values and (len(rows) > 1 or name.startswith("evaluation/")):
        raise UserError(
            f"metric {metric!r} (training.keep_best)",
            f"no checkpoint's step has it{did_you_mean(name, known)}; the run has {', '.join(known)}",
        )
    return max(values, key=lambda step: -values[step] if metric != name else values[step], default=0)


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
    copied, in_batch = ((Path(manager.directory) / str(step) / item).exists() for item in (COPY, BATCH))
    items = {
        "state": ocp.args.StandardRestore(trained),
        **({COPY: ocp.args.StandardRestore(behavior_params)} if copied else {}),
        **({BATCH: ocp.args.StandardRestore()} if in_batch else {}),
        **({"groups": ocp.args.StandardRestore()} if plain["groups"] else {}),
    }
    try:
        restored = manager.restore(step, args=ocp.args.Composite(**items))
    except Exception as error:
        # The manifest was checked, so the cause is the model or the code.
        raise UserError(
            name, f"cannot be read ({short_error(error)})", "if the model or the problems have changed, restore them"
        ) from error
    groups = np.asarray(restored["groups"]["parquet"]).tobytes() if plain["groups"] else b""
    batch = restored[BATCH] if in_batch else {}
    return State(
        step=step,
        trained=restored["state"],
        behavior_params=restored[COPY] if copied else None,
        version=plain["version"] if copied else step,
        queue=from_plain(groups_from_bytes(groups), plain["queue"]),
        source=plain["source"],
        totals=plain["totals"],
        groups=tuple(groups_from_bytes(np.asarray(batch["groups"]).tobytes())) if batch else (),
        proximal_logprobs=put_rows(batch.get("proximal_logprobs")),
    )


def optimizer_state_of(run: Path, step: int, fresh: TrainState, new_average: bool = False) -> optax.OptState:
    """The optimizer state of a checkpoint, whose learning rate schedule begins again.

    Args:
        fresh: state before a first step, on the devices. An average of its parameters that the checkpoint has not
            stays, and the checkpoint's average is left out if `fresh` has none.
        new_average: keep the average of `fresh`, which is the policy before the first step.
    Raises:
        UserError: the checkpoint has another optimizer, or cannot be read.
    """
    new_state: Any = fresh.optimizer_state  # an average is the last part of the chain
    average = [part for part in new_state if isinstance(part, Averaged)]
    parts = new_state[: len(new_state) - len(average)]
    stored_average = [Averaged(fresh.params)] if _has_average(run, step) else []
    like = {"optimizer_state": jax.tree.map(ocp.utils.to_shape_dtype_struct, (*parts, *stored_average))}
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
        restored = (*restored, *(state[len(parts) :] or average))
    begins = (optax.ScaleByScheduleState, Averaged) if new_average else optax.ScaleByScheduleState
    is_new = lambda node: isinstance(node, begins)  # noqa: E731
    return jax.tree.map(lambda new, old: new if is_new(new) else old, new_state, restored, is_leaf=is_new)


def _has_average(run: Path, step: int) -> bool:
    """True if the optimizer state of a checkpoint has a moving average of the parameters."""
    model = progress(run / "checkpoints", step).get("totals", {}).get("config", {}).get("model", {})
    return model.get("teacher") == POLICY and model.get("teacher_rate", 1.0) < 1


def split_step(source: str | Path) -> tuple[Path, str | None]:
    """The folder of a run and the name of its checkpoint, a step or "best", from RUN or RUN/checkpoints/NAME."""
    path = Path(source)
    is_checkpoint = path.parent.name == "checkpoints" and (path.name.isdecimal() or path.name == "best")
    return (path.parents[1], path.name) if is_checkpoint else (path, None)


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


def check_data(config: Config, step: int, data: dict[str, str], output: Path | None = None) -> None:
    """Refuses to resume with other data than the run began with.

    Args:
        step: step of the checkpoint; without digests, as older versions wrote it, nothing is refused.
        output: folder of a stage of the run; None: the run's own.
        data: result of `data_digests`.
    Raises:
        UserError: a store or problems have changed.
    """
    known = progress((output or Path(config.output)) / "checkpoints", step).get("totals", {}).get("data", {})
    rates = f" and the pass rates in {cache_folder('pass_rates')}" if config.task.keep else ""
    changed = [
        f"{name} ({known[name]} then, {digest} now)"
        for name, digest in data.items()
        if known.get(name, digest) != digest
    ]
    if changed:
        raise UserError(
            problem=(
                f"data changed since this run began, in prompts, answers or other content: {'; '.join(changed)}."
                f" Restore the data{rates}, or continue with the new data in a new run: another output=… with"
                f" model.run={config.output!r}"
            )
        )


def check_weight_digests(config: Config, step: int, weights: dict[str, str], read: bool) -> None:
    """Compares the weights that a run reads and does not keep in its checkpoints with those that it began with.

    Args:
        step: step of the checkpoint; a digest that it does not know is not compared.
        weights: result of `weight_digests`.
        read: True if the run still reads parameters of its initial policy.
    Raises:
        UserError: weights have changed. If only rounding may have changed them, as of a warm start on another mesh, or
            if the run reads them no more, a warning names them instead.
    """
    known = progress(Path(config.output) / "checkpoints", step).get("totals", {}).get("weights", {})
    changed = [name for name, digest in weights.items() if known.get(name, digest) != digest]
    for name in changed:
        words = f"{name}: the weights changed since this run began ({known[name]} then, {weights[name]} now)"
        is_stored = config.warm_start is None and (config.model.path is not None or config.model.run is not None)
        if name != BASE or (read and is_stored):
            raise UserError(problem=words, remedy="restore them, or begin again with --overwrite or another output=…")
        logger.warning("%s; the run keeps the weights of its checkpoint", words)


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
            shutil.rmtree(unfinished)  # its process is dead, since this process holds the lock
        whole, damaged = newest_whole(folder)
        if whole is None and damaged.keys() - {0}:
            refused = none_whole(folder, damaged)
        else:
            for step, reason in damaged.items():
                damaged_folder = folder.parent / "damaged"
                damaged_folder.mkdir(exist_ok=True)
                names = [str(step), *(f"{step}-{number}" for number in range(2, 10_000))]
                aside = next(damaged_folder / name for name in names if not (damaged_folder / name).exists())
                (folder / str(step)).rename(aside)
                back = (
                    "the run starts again" if whole is None else f"the run resumes from the checkpoint of step {whole}"
                )
                logger.warning("checkpoint of step %d: %s; moved to %s, and %s", step, reason, aside, back)
    if hosts.any_says(refused is not None):
        raise refused or UserError(folder, "no checkpoint is whole", "see the log of process 0")


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
