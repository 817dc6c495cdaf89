"""Opens a run before its first step, or at its newest checkpoint, and trains."""

import contextlib
import functools
import json
import logging
import signal
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from recjax.config import Config, to_yaml
from recjax.experience.queue import Queue
from recjax.hub.policy import Policy
from recjax.logs.log import RunLog
from recjax.logs.metrics import BadStep, MetricsWriter, step_bar
from recjax.logs.tracking import Trackers
from recjax.logs.warnings import WarningState, new_warnings
from recjax.models.trainable import fingerprint, flatten, is_adapter
from recjax.rollout.compiling import BackgroundCompiler
from recjax.runs import checkpoint
from recjax.runs import lock as run_lock
from recjax.runs.checkpoint import Saver
from recjax.runs.compile_ahead import compile_sampling, compile_update
from recjax.runs.demonstrations import train_on_demonstrations
from recjax.runs.folder import check_processes, check_run_folder, open_run_folder, record_weights
from recjax.runs.other_models import load_teacher, reference_params
from recjax.runs.policies import initial_policy, older_params
from recjax.runs.prepare import data_digests, prepare
from recjax.runs.regrading import known_problems, regraded
from recjax.runs.report import try_report
from recjax.runs.resolve import resolve_config
from recjax.runs.sources import check_source, source_of
from recjax.runs.spec import RunSpec, check_data, check_weights, spec_of, split_step
from recjax.runs.stopping import STOPPED, asks_to_stop, stop_requests
from recjax.runtime import hosts
from recjax.runtime.console import under_way
from recjax.runtime.memory import settling_memory
from recjax.sources.setup import Setup
from recjax.tasks.prompts import Prompts
from recjax.training import loop
from recjax.training.evaluation import HeldOut
from recjax.training.learner import Learner
from recjax.training.mesh import make_mesh
from recjax.training.run import Run, Source, State
from recjax.training.update import TrainState

logger = logging.getLogger(__name__)


def train(
    config: Config,
    overwrite: bool = False,
    *,
    reward: Callable | Sequence[Callable] | None = None,
    on_step: Callable[[dict], Any] | None = None,
    sources: Callable[[Setup, Learner], Source] = source_of,
    learner: Learner | None = None,
    check: Callable[[Setup], None] = lambda setup: None,
) -> dict[str, Any]:
    """Trains to the last step and returns the summary; resumes from the newest checkpoint in the run folder, if any.

    It uses the mesh in context. If there is none, it activates a mesh of `config.mesh`.

    Args:
        overwrite: delete the run that the folder holds.
        reward: the function whose `passed_name` is `task.reward`; None if no program passed one.
        on_step: called with each row of metrics as it is written, one step late at most; the run stops if it returns
            True.
        sources: function that makes the source of groups.
        learner: a subclass of `Learner` that computes instead of `Learner`; None: JAX computes.
        check: called with the run's setup before the first evaluation or step.
    Raises:
        BadStep, Preempted: see `loop.train_steps`.
        UserError: a task, model, store or folder that cannot be used, or a reward function at fault.
    """
    check_processes(config)
    check_run_folder(config, overwrite)
    spec = spec_of(resolve_config(config, overwrite), reward)
    output = Path(spec.config.output)
    with contextlib.ExitStack() as stack:
        if jax.sharding.get_mesh().empty:
            stack.enter_context(jax.set_mesh(make_mesh(spec.config.mesh)))
        trackers = stack.enter_context(contextlib.closing(Trackers(spec.config)))
        lock = stack.enter_context(run_lock.held(output))
        ahead = BackgroundCompiler()
        stack.callback(ahead.stop)
        begun, state = begin(spec, overwrite, reward, sources=sources, learner=learner, ahead=ahead)
        stack.callback(begun.manager.close)
        run = stack.enter_context(opened_run(begun, state, trackers, lock, on_step))
        check(begun.setup)
        compile_update(begun.setup, run, state)
        with under_way("compiling evaluation and sampler", ahead.has_begun):
            ahead.wait()
        # The loop gets the only reference to the state: a second one would keep its weights in memory.
        only_reference = [state]
        del state
        log = cast(RunLog, run.log)
        try:
            loop.train_steps(run, only_reference.pop())
        except (loop.Preempted, BadStep) as stopped:
            if hosts.is_first():
                try_report(output, str(stopped), log.draw)
            raise
        if hosts.is_first():
            log.finish()
            try_report(output, "finished")
        hosts.wait_for_all("the summary")
    return json.loads((output / "summary.json").read_text(encoding="utf-8"))


class Started(NamedTuple):
    """A run before its workers start: its data, learner, source of groups and checkpoints."""

    setup: Setup
    learner: Learner
    source: Source
    manager: ocp.CheckpointManager


@contextlib.contextmanager
def opened_run(
    begun: Started, state: State, trackers: Trackers, lock: run_lock.RunLock, on_step: Callable[[dict], Any] | None
) -> Iterator[Run]:
    """Opens workers, signals and metrics for the time of the run, and hands everything to the loop."""
    setup, learner, source, manager = begun
    config = setup.config
    algorithm = config.algorithm.build()
    resumed = manager.latest_step() is not None
    last_row = -1  # a new run keeps no rows of metrics
    if resumed:
        last_row = state.step
    with contextlib.ExitStack() as stack:
        # Ray installs its own handler of SIGTERM, so it starts before `stop_requests` installs recjax's handler.
        stack.enter_context(setup.grading)
        stack.enter_context(source)
        source.restore(state)
        if setup.agents:
            stack.enter_context(setup.agents)
        stopping = stack.enter_context(stop_requests())
        if not resumed:
            trackers.log_text("config", f"```yaml\n{to_yaml(config)}```", 0)
        bar = stack.enter_context(step_bar(config.algorithm.preset, config.training.steps, initial=state.step))
        metrics = stack.enter_context(
            MetricsWriter(
                Path(config.output),
                keep_through=last_row,
                written=state.totals["metrics"],
                trackers=trackers,
                bar=bar,
                watch=_row_watcher(on_step, stopping),
                phases=setup.phases,
                manager=manager,
                refuses_impossible=config.training.impossible_tokens == "error",
            )
        )
        del state  # another reference would keep its weights in memory
        after_step = stack.enter_context(settling_memory())
        part_weights = None
        if algorithm.reads("reward_parts"):
            part_weights = setup.grading.reward.weights
        yield Run(
            config=config,
            algorithm=algorithm,
            shape=setup.padded_shape,
            settings=setup.settings,
            part_weights=part_weights,
            failures=setup.failures,
            source=source,
            learner=learner,
            log=RunLog(setup, source, metrics, trackers),
            saver=Saver(config, manager, lock, metrics, setup.phases),
            device=setup.phases.device,
            phase=setup.phases.phase,
            after_step=after_step,
            stopping=stopping,
            teacher_prompts=setup.teacher_prompts,
        )


def _row_watcher(on_step: Callable[[dict], Any] | None, stopping: list[int]) -> Callable[[dict], None]:
    """A function that logs the warnings of a row of metrics, and stops the run if `on_step` asks for it.

    Args:
        stopping: gets `STOPPED` when the run has to stop.
    """
    state = WarningState()

    def watch(row: dict) -> None:
        nonlocal state
        state, warnings = new_warnings(state, row)
        for warning in warnings:
            logger.warning("%s", warning)
        if on_step and asks_to_stop(on_step(row)):
            logger.info("on_step asked to stop after step %d", row["step"])
            stopping.append(STOPPED)

    return watch


def begin(
    spec: RunSpec,
    overwrite: bool,
    reward: Callable | Sequence[Callable] | None = None,
    sources: Callable[[Setup, Learner], Source] = source_of,
    learner: Learner | None = None,
    ahead: BackgroundCompiler | None = None,
) -> tuple[Started, State]:
    """The run and its state, on the mesh in context, also if the run was on another mesh before.

    Args:
        spec: the run's specification before data and weights are read.
        overwrite: delete the run that the folder holds.
        reward, sources, learner: see `train`.
        ahead: compiles the programs of a new run's evaluation and sampler; None: they are compiled when called.
    Raises:
        UserError: a task, model, store or folder that cannot be used, or a store that changed after the run began.
        Preempted: on a signal during the warm start on demonstrations, after the current step and its checkpoint.
    """
    if learner is None:
        learner = Learner()
    make_initial_policy = learner.initial_policy
    if make_initial_policy is None:
        make_initial_policy = initial_policy
    # Sources and learners of a program may run other programs than those that are compiled ahead.
    is_new = overwrite or not _has_checkpoints(spec.config)
    has_own_sampling = sources is not source_of or type(learner).evaluate is not Learner.evaluate
    compiles_ahead = is_new and not has_own_sampling

    def make_policy(config: Config, policy: Policy, train: Prompts) -> tuple[Policy, dict]:
        if ahead is not None and compiles_ahead:
            compile_sampling(config, policy, train, ahead)
        return make_initial_policy(config, policy, train)

    # `_first_state` calls `prepare`, so that no other function refers to the parameters.
    prepare_run = functools.partial(prepare, spec.config, make_policy, reward)
    started, state = _first_state(spec, overwrite, prepare_run, learner, sources)
    if started.manager.latest_step() is None:
        return started, state
    return started, _restored_state(started, state)


def _with_open_folder(spec: RunSpec, setup: Setup, overwrite: bool) -> Setup:
    """Opens the run folder; returns the setup, whose stored completions have the run's rewards if it regrades them."""
    experience = spec.config.experience
    if experience is None or not experience.regrade:
        open_run_folder(spec, overwrite)
        return setup
    known = known_problems(setup)  # raises its errors before the folder is opened
    open_run_folder(spec, overwrite)
    return regraded(setup, known)


def _first_state(
    spec: RunSpec,
    overwrite: bool,
    prepare_run: Callable[[], tuple[Setup, dict]],
    learner: Learner,
    sources: Callable[[Setup, Learner], Source],
) -> tuple[Started, State]:
    """The run and its state before the first step; compares data and weights with those of the newest checkpoint.

    Args:
        prepare_run: `prepare` with its arguments. As only this function refers to the parameters that it returns, the
            frozen ones leave the memory once the learner has them in its own dtype.
    """
    config = spec.config
    output = Path(config.output)
    setup, params = prepare_run()
    check_source(config)
    setup = _with_open_folder(spec, setup, overwrite)
    checkpoint.set_damaged_aside(output / "checkpoints")
    manager = checkpoint.open_checkpoints(output / "checkpoints")
    stored = checkpoint.newest_totals(manager)
    spec = spec._replace(data=data_digests(config, setup.train, setup.held_out, setup.stored, setup.demonstrations))
    check_data(config, stored.get("data", {}), spec.data)
    losses = {}
    if setup.demonstrations:
        params, losses = _trained_on_demonstrations(setup, params, spec.data)
    base = base_digest(config, params)
    trained = begin_learner(learner, setup, params)
    del params
    spec = spec._replace(weights={checkpoint.BASE: base, **other_digests(setup, learner)})
    reads_base = bool(learner.frozen) or learner.initial is not None
    check_weights(config, stored.get("weights", {}), spec.weights, reads_base)
    record_weights(output, spec.weights)
    if setup.agents:
        setup.agents.older_params = older_params(config, setup.policy, learner.frozen, trained.params)
    totals = {
        "seconds": {},
        "wall_seconds": 0.0,
        "tokens": 0,
        **spec.stored(),
        "metrics": None,
        "warm_start": losses,
    }
    if config.follows:
        totals["run"] = uuid.uuid4().hex
    state = State(step=0, trained=trained, behavior_params=None, version=0, queue=Queue(), source={}, totals=totals)
    return Started(setup, learner, sources(setup, learner), manager), state


def _trained_on_demonstrations(setup: Setup, params: dict, data: dict[str, str]) -> tuple[dict, dict[str, float]]:
    """The parameters after the warm start on demonstrations, and its last losses.

    Raises:
        Preempted: on a signal, after the current step and its checkpoint.
    """
    with stop_requests() as stopping:
        params, losses = train_on_demonstrations(setup, params, data, stopping)
        if hosts.any_says(bool(stopping)):  # the loop returns if a signal arrives during the last step
            raise loop.Preempted(0, next(iter(stopping), signal.SIGTERM))
    return params, losses


def _restored_state(started: Started, state: State) -> State:
    """The state of the newest checkpoint, with the shapes and shardings of a state before the first step.

    Args:
        state: state before the first step, whose weights are deleted.
    """
    behavior_params = started.learner.behavior_params(state)
    behavior_shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, behavior_params)
    del behavior_params
    trained_shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state.trained)
    for leaf in jax.tree.leaves(state.trained):
        if isinstance(leaf, jax.Array):
            leaf.delete()  # the restored arrays need its memory
    restored = checkpoint.restore(started.manager, trained_shapes, behavior_shapes)
    totals = state.totals | restored.totals
    totals["data"] = state.totals["data"]
    totals["config"] = state.totals["config"]
    # A digest stays that of the first start.
    totals["weights"] = state.totals["weights"] | restored.totals.get("weights", {})
    logger.info("resuming from the checkpoint of step %d", restored.step)
    started.setup.phases.go_on_from(totals["seconds"], totals["wall_seconds"])
    return restored._replace(totals=totals)


def begin_learner(learner: Learner, setup: Setup, params: dict) -> TrainState:
    """The state before the first step, after the learner has the policy and the other models that the config names.

    Raises:
        UserError: a model or an optimizer state cannot be read, or does not fit the policy.
    """
    config = setup.config
    teacher = load_teacher(config, setup.policy)
    reference = None
    if config.model.reference and config.algorithm.build().needs_reference:
        reference = reference_params(config, setup.policy)
    held_out = HeldOut(setup.held_out, setup.grading, setup.agents)
    trained = learner.begin(config, setup.policy, params, held_out, teacher=teacher, reference=reference)
    # A run that resumes has its own moments in its checkpoint, and must not take those of the earlier run again.
    if config.model.run and config.optimizer.state == "run" and not _has_checkpoints(config):
        folder, step = split_step(config.model.run)
        assert step is not None
        # A teacher that stays the initial policy is this run's, and not that of the earlier run.
        is_constant = config.model.average_rate == 0
        state = checkpoint.optimizer_state_of(folder, int(step), trained, new_average=is_constant)
        trained = trained._replace(optimizer_state=state)
    return trained


def _has_checkpoints(config: Config) -> bool:
    return bool(checkpoint.steps_of(Path(config.output) / "checkpoints"))


def base_digest(config: Config, params: dict) -> str:
    """The digest of a run's initial policy, without new adapters, which change nothing yet."""
    leaves = flatten(params)
    if config.model.adapter is None and config.model.run is None:
        leaves = {path: leaf for path, leaf in leaves.items() if not is_adapter(path)}
    return fingerprint(leaves)


def other_digests(setup: Setup, learner: Learner) -> dict[str, str]:
    """Digests of other models' weights that the run reads, by key and dtype, since devices have their own dtypes."""
    config = setup.config
    dtype = jnp.dtype(setup.policy.decoder.dtype).name
    digests = {}
    if learner.teacher is not None:
        digests[f"model.teacher ({dtype})"] = fingerprint(learner.teacher.params)
    if config.model.reference and learner.reference is not None:
        digests[f"model.reference ({dtype})"] = fingerprint(learner.reference)
    return digests
