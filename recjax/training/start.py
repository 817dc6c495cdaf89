"""Starts a run before its first step, or resumes it at its newest checkpoint."""

import contextlib
import logging
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from recjax.cache import cache_folder
from recjax.config import Config, to_yaml
from recjax.experience.queue import Queue
from recjax.training import checkpoint, run_lock
from recjax.training.demonstrations import train_on_demonstrations
from recjax.training.learner import Learner
from recjax.training.mesh import make_mesh
from recjax.training.metrics import MetricsWriter, step_bar
from recjax.training.regrading import known_problems, regraded
from recjax.training.run import Run, State, data_digests, prepare
from recjax.training.run_folder import check_processes, check_run_folder, open_run_folder, with_chat_date
from recjax.training.signs import Watched, look
from recjax.training.sources import source_of
from recjax.training.tracking import Trackers
from recjax.training.trained import older_params, with_start

STOPPED = 0  # in `Run.stopping`, next to the numbers of signals: on_step asked the run to stop

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def start_run(
    config: Config,
    overwrite: bool,
    reward: Callable | None = None,
    on_step: Callable[[dict], Any] | None = None,
    sources: Callable | None = None,
    learner: Learner | None = None,
) -> Iterator[tuple[Run, State]]:
    """Opens everything that a run needs: mesh, folder, lock, trackers, workers, signals, checkpoints and metrics.

    Takes the arguments of `train`.

    Raises:
        ValueError: see `begin`; also a folder that cannot be used or that another process holds.
    """
    check_processes(config)
    check_run_folder(config, overwrite)
    config = with_chat_date(with_start(config, overwrite), overwrite)
    with contextlib.ExitStack() as stack:
        if jax.sharding.get_mesh().empty:
            stack.enter_context(jax.set_mesh(make_mesh(config.mesh)))
        trackers = stack.enter_context(contextlib.closing(Trackers(config)))
        lock = stack.enter_context(run_lock.held(Path(config.output)))
        run, state, manager = begin(config, overwrite, reward, sources, learner)
        stack.callback(manager.close)
        resumed = manager.latest_step() is not None
        # Ray installs its own handler of SIGTERM, so it starts before `stop_requests` installs recjax's handler.
        for workers in filter(None, (run.grading, run.source.opened(run, state), run.agents)):
            stack.enter_context(workers)
        stopping = stack.enter_context(stop_requests())
        if not resumed:
            trackers.log_text("config", f"```yaml\n{to_yaml(config)}```", 0)
        bar = stack.enter_context(step_bar(config.algorithm.preset, config.training.steps, initial=state.step))
        watched = Watched()

        def watch(row: dict) -> None:
            nonlocal watched
            watched, warnings = look(watched, row)
            for warning in warnings:
                logger.warning("%s", warning)
            if on_step and on_step(row):
                stopping.append(STOPPED)

        metrics = MetricsWriter(
            Path(config.output),
            state.step if resumed else -1,
            state.totals["metrics"],
            trackers,
            bar=bar,
            watch=watch,
            phases=run.phases,
            manager=manager,
            refuses_impossible=config.training.impossible_tokens == "error",
        )
        opened = {"manager": manager, "lock": lock, "stopping": stopping, "trackers": trackers}
        run = run._replace(metrics=stack.enter_context(metrics), **opened)
        first = [state]
        del state  # another reference would keep its weights in memory
        yield run, first.pop()


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Received signals: SIGTERM of a cloud, SIGHUP of a closed terminal, Ctrl-C; a second Ctrl-C ends at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # signals are the main thread's
        return

    def receive(number: int, _: object) -> None:
        if number == signal.SIGINT:
            if signal.SIGINT in received:
                raise KeyboardInterrupt
            logger.info("finishing this step and writing a checkpoint; press Ctrl-C again to stop without a checkpoint")
        received.append(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    for number in (signal.SIGINT, signal.SIGHUP):
        # A shell's background jobs ignore Ctrl-C, and programs under nohup ignore SIGHUP; the run then does too.
        if before[number] == signal.SIG_IGN:
            before.pop(number)
    for number in before:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def begin(
    config: Config,
    overwrite: bool,
    reward: Callable | None = None,
    sources: Callable | None = None,
    learner: Learner | None = None,
) -> tuple[Run, State, ocp.CheckpointManager]:
    """The run, its state and its checkpoints, on the mesh in context, also if the run was on another mesh before.

    Args:
        overwrite: delete the run that the folder holds.
        reward, sources, learner: see `train`.
    Raises:
        ValueError: a task, model, store or folder that cannot be used, or a store that changed after the run began.
    """
    learner = learner or Learner()
    run, params = prepare(config, learner.initial_policy, reward)
    run = run._replace(learner=learner, source=(sources or source_of)(run))
    regrades = config.experience is not None and config.experience.regrade
    known = known_problems(run) if regrades else {}
    output = open_run_folder(config, overwrite)
    if regrades:
        run = regraded(run, known)
    checkpoint.set_damaged_aside(output / "checkpoints")
    manager = checkpoint.open_checkpoints(output / "checkpoints")
    data = data_digests(config, run.train, run.held_out, run.stored)
    if manager.latest_step() is not None:
        check_data(config, manager.latest_step(), data)
    params, losses = train_on_demonstrations(run, params) if run.demonstrations else (params, {})
    run, trained = learner.begin(run, params)
    if run.agents:
        run.agents.older_params = older_params(run, trained.params)
    del params
    totals = {"seconds": {}, "wall_seconds": 0.0, "tokens": 0, "data": data}
    totals |= {"config": config.model_dump(), "metrics": None, "warm_start": losses}
    totals |= {"run": uuid.uuid4().hex} if config.follows else {}
    state = State(0, trained, None, 0, Queue(), {}, totals)
    if manager.latest_step() is None:
        return run, state, manager
    like = (state.trained, learner.sampler_params(run, state))
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    del trained, state  # the restored arrays need their memory
    state = checkpoint.restore(manager, *like)
    state = state._replace(totals=totals | state.totals | {"config": totals["config"], "data": data})
    logger.info("resuming from the checkpoint of step %d", state.step)
    run.phases.go_on_from(state.totals["seconds"], state.totals["wall_seconds"])
    return run, state, manager


def check_data(config: Config, step: int, data: dict[str, str]) -> None:
    """Refuses to resume with other data than the run began with.

    Args:
        step: step of the checkpoint; without digests, as older versions wrote it, nothing is refused.
        data: result of `data_digests`.
    Raises:
        ValueError: a store or problems have changed.
    """
    known = checkpoint.progress(Path(config.output) / "checkpoints", step).get("totals", {}).get("data", {})
    rates = f" and the pass rates in {cache_folder('pass_rates')}" if config.task.keep else ""
    changed = [
        f"{name} ({known[name]} then, {digest} now)"
        for name, digest in data.items()
        if known.get(name, digest) != digest
    ]
    if changed:
        raise ValueError(
            f"data changed since this run began, in prompts, answers or other content: {'; '.join(changed)}. Restore"
            f" the data{rates}, or continue with the new data in a new run: another output=… with"
            f" model.run={config.output!r}"
        )
