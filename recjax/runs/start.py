"""Opens a run before its first step, or at its newest checkpoint, and trains."""

import contextlib
import inspect
import json
import logging
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from recjax.config import Config, to_yaml
from recjax.errors import UserError, shown
from recjax.experience.batch import to_learn_from, with_part_weights
from recjax.experience.packing import is_packed
from recjax.experience.queue import Queue
from recjax.hub.policy import Policy
from recjax.logs.log import RunLog
from recjax.logs.metrics import MetricsWriter, step_bar
from recjax.logs.signs import Watched, look
from recjax.logs.tracking import Trackers
from recjax.models.experts import routing_shapes
from recjax.models.logprobs import recorded_shapes
from recjax.models.sampling import NOTHING_RECORDED
from recjax.models.trainable import adapted, fingerprint, flatten, is_adapter
from recjax.rollout.collecting import compile_first_round
from recjax.rollout.device import CompilingDevice
from recjax.runs import checkpoint
from recjax.runs import lock as run_lock
from recjax.runs.checkpoint import Saver
from recjax.runs.demonstrations import train_on_demonstrations
from recjax.runs.folder import check_processes, check_run_folder, open_run_folder, record_weights, with_chat_date
from recjax.runs.policies import (
    initial_policy,
    load_teacher,
    older_params,
    reference_params,
    with_pinned,
    with_start,
)
from recjax.runs.prepare import data_digests, prepare
from recjax.runs.regrading import known_problems, regraded
from recjax.runs.sources import check_source, source_of
from recjax.runtime import hosts
from recjax.runtime.console import under_way
from recjax.runtime.memory import settling_memory
from recjax.runtime.workers import cores
from recjax.sources.policy import PolicySource
from recjax.sources.setup import Setup
from recjax.tasks.prompts import Prompts
from recjax.training import loop
from recjax.training.evaluation import HeldOut
from recjax.training.learner import Learner
from recjax.training.mesh import make_mesh
from recjax.training.run import Run, Source, State
from recjax.training.update import TrainState

STOPPED = 0  # in `Run.stopping`, next to the numbers of signals: on_step asked the run to stop

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

    It uses the mesh in context. Without one, it activates a mesh of `config.mesh`.

    Args:
        overwrite: delete the run that the folder holds.
        reward: the function whose `passed_name` is `task.reward`; None without one.
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
    config = with_chat_date(with_start(with_pinned(config, overwrite), overwrite), overwrite)
    output = Path(config.output)
    with contextlib.ExitStack() as stack:
        if jax.sharding.get_mesh().empty:
            stack.enter_context(jax.set_mesh(make_mesh(config.mesh)))
        trackers = stack.enter_context(contextlib.closing(Trackers(config)))
        lock = stack.enter_context(run_lock.held(output))
        ahead = CompilingDevice()
        stack.callback(ahead.stop)
        begun, state = begin(config, overwrite, reward, sources, learner, ahead)
        stack.callback(begun.manager.close)
        run = stack.enter_context(opened_run(begun, state, trackers, lock, on_step))
        check(begun.setup)
        compile_ahead(begun.setup, run, state)
        with under_way("compiling evaluation and sampler", ahead.begun is not None):
            ahead.wait()
        first = [state]
        del state  # another reference would keep its weights in memory during the loop
        loop.train_steps(run, first.pop())
        if hosts.is_first():
            cast(RunLog, run.log).finish()
        hosts.wait_for_all("the summary")
    return json.loads((output / "summary.json").read_text(encoding="utf-8"))


def compile_sampling_ahead(config: Config, policy: Policy, train: Prompts, device: CompilingDevice) -> None:
    """Starts to compile the first rounds of evaluation and sampler in threads, at the time when weights are read.

    Two cores are busy without this: one reads or evaluates, and the other compiles the update.
    """
    is_split = jax.sharding.get_mesh().size > 1 or jax.process_count() > 1
    if config.task.agent or not train.texts or is_split or cores() <= 2:
        return
    if config.model.lora:
        decoder = policy.decoder.clone(config=adapted(policy.decoder.config, config.model.lora))
        policy = policy._replace(decoder=decoder)
    longest = config.rollout.max_completion_tokens

    def compile_for_shapes() -> None:
        settings = config.evaluation
        prompts = first_prompts(config.rollout.prompts_per_step)
        compile_first_round(
            policy._replace(recording=NOTHING_RECORDED), prompts, settings.samples, longest, settings.sampling(), device
        )
        if config.samples_training_data and config.regime.mode == "sync" and config.rollout.engine is None:
            count, group_size = config.own_counts
            sampling = config.rollout.sampling()
            compile_first_round(policy, first_prompts(count), group_size, longest, sampling, device)

    def first_prompts(count: int) -> Prompts:
        return train.take(np.arange(count) % len(train.texts))

    logger.info("compiling evaluation and sampler while weights are read")
    device.begin(compile_for_shapes)


def compile_ahead(setup: Setup, run: Run, state: State) -> None:
    """Starts to compile the update, at the same time as the sampler, if no sampled batch can have other shapes.

    A program for other shapes would be compiled in vain. So would one for sources whose completions differ in what is
    recorded, and for learners that do not compute with JAX.
    """
    config = run.config
    decoder = setup.policy.decoder
    is_known = (
        state.step < config.training.steps
        and isinstance(run.source, PolicySource)
        and config.regime.mode == "sync"
        and config.rollout.engine is None
        and isinstance(run.learner, Learner)
        and type(run.learner).update is Learner.update
        and (config.experience is None or not (config.experience.store or config.experience.mix))
        and config.training.updates == 1
        and run.part_weights is None
        and run.shape.group is not None
        and not recorded_shapes(decoder.config.vocab_size, config.rollout.sampling(), setup.policy.recording)
        and not routing_shapes(decoder)
        and jax.process_count() == 1
    )
    if not is_known:
        return
    batch = with_part_weights(to_learn_from(loop.padded(run, ()), config.task), None)
    layout = run.learner.layout(batch, None, state.totals.get("row_doublings"))
    # A batch without tokens is the one that packing would gain most from.
    if layout.packed is None or is_packed(config, batch.shape):
        logger.info("compiling the update at the same time as the sampler")
        cast(Learner, run.learner).compile_update(state.trained, batch, layout)


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
    with contextlib.ExitStack() as stack:
        # Ray installs its own handler of SIGTERM, so it starts before `stop_requests` installs recjax's handler.
        for workers in filter(None, (setup.grading, source.opened(state), setup.agents)):
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
            if on_step and asks_to_stop(on_step(row)):
                logger.info("on_step asked to stop after step %d", row["step"])
                stopping.append(STOPPED)

        writer = MetricsWriter(
            Path(config.output),
            state.step if resumed else -1,
            state.totals["metrics"],
            trackers,
            bar=bar,
            watch=watch,
            phases=setup.phases,
            manager=manager,
            refuses_impossible=config.training.impossible_tokens == "error",
        )
        metrics = stack.enter_context(writer)
        del state  # another reference would keep its weights in memory
        yield Run(
            config,
            algorithm,
            setup.padded_shape,
            setup.settings,
            setup.grading.reward.weights if algorithm.reads("reward_parts") else None,
            setup.failures,
            source,
            learner,
            RunLog(setup, source, metrics, trackers),
            Saver(config, manager, lock, metrics, setup.phases),
            setup.phases.device,
            setup.phases.phase,
            stack.enter_context(settling_memory()),
            stopping,
            setup.teacher_prompts,
        )


def asks_to_stop(returned: Any) -> bool:
    """True if `on_step` returned True, False for False and None.

    Raises:
        UserError: it returned something else, which may be true by chance.
    """
    if returned is None or isinstance(returned, bool | np.bool_):
        return bool(returned)
    remedy = "return True to stop the run after this step, and False or None to go on"
    if inspect.isawaitable(returned):
        remedy = f"write it as def, not async def, and {remedy}"
    raise UserError(problem=f"on_step returned {shown(returned, 80)}", remedy=remedy)


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
    reward: Callable | Sequence[Callable] | None = None,
    sources: Callable[[Setup, Learner], Source] = source_of,
    learner: Learner | None = None,
    ahead: CompilingDevice | None = None,
) -> tuple[Started, State]:
    """The run and its state, on the mesh in context, also if the run was on another mesh before.

    Args:
        overwrite: delete the run that the folder holds.
        reward, sources, learner: see `train`.
        ahead: compiles the programs of a new run's evaluation and sampler; None: they are compiled when called.
    Raises:
        UserError: a task, model, store or folder that cannot be used, or a store that changed after the run began.
        Preempted: on a signal during the warm start on demonstrations, after the current step and its checkpoint.
    """
    learner = learner or Learner()
    is_new = overwrite or not checkpoint.steps_of(Path(config.output) / "checkpoints")
    compiles = ahead is not None and is_new and sources is source_of and type(learner).evaluate is Learner.evaluate

    def make_policy(config: Config, policy: Policy, train: Prompts) -> tuple[Policy, dict]:
        if compiles:
            compile_sampling_ahead(config, policy, train, ahead)
        return (learner.initial_policy or initial_policy)(config, policy, train)

    setup, params = prepare(config, make_policy, reward)
    check_source(config)
    regrades = config.experience is not None and config.experience.regrade
    known = known_problems(setup) if regrades else {}
    output = open_run_folder(config, overwrite, reward)
    if regrades:
        setup = regraded(setup, known)
    checkpoint.set_damaged_aside(output / "checkpoints")
    manager = checkpoint.open_checkpoints(output / "checkpoints")
    data = data_digests(config, setup.train, setup.held_out, setup.stored, setup.demonstrations)
    latest = manager.latest_step()
    if latest is not None:
        checkpoint.check_data(config, latest, data)
    losses = {}
    if setup.demonstrations:
        with stop_requests() as stopping:
            params, losses = train_on_demonstrations(setup, params, data, stopping)
            if hosts.any_says(bool(stopping)):  # the loop returns if a signal arrives during the last step
                raise loop.Preempted(0, next(iter(stopping), signal.SIGTERM))
    base = base_digest(config, params)
    trained = begin_learner(learner, setup, params)
    del params
    weights = {checkpoint.BASE: base, **other_digests(setup, learner)}
    if latest is not None:
        reads_base = bool(learner.frozen) or learner.initial is not None
        checkpoint.check_weight_digests(config, latest, weights, reads_base)
    record_weights(output, weights)
    if setup.agents:
        setup.agents.older_params = older_params(config, setup.policy, learner.frozen, trained.params)
    begun = Started(setup, learner, sources(setup, learner), manager)
    totals = {
        "seconds": {},
        "wall_seconds": 0.0,
        "tokens": 0,
        "data": data,
        "weights": weights,
        "config": config.model_dump(),
        "metrics": None,
        "warm_start": losses,
        **({"run": uuid.uuid4().hex} if config.follows else {}),
    }
    state = State(0, trained, None, 0, Queue(), {}, totals)
    if manager.latest_step() is None:
        return begun, state
    like = (state.trained, learner.behavior_params(state))
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    del trained, state  # the restored arrays need their memory
    state = checkpoint.restore(manager, *like)
    known = {"weights": weights | state.totals.get("weights", {}), "data": data, "config": totals["config"]}
    state = state._replace(totals=totals | state.totals | known)
    logger.info("resuming from the checkpoint of step %d", state.step)
    setup.phases.go_on_from(state.totals["seconds"], state.totals["wall_seconds"])
    return begun, state


def begin_learner(learner: Learner, setup: Setup, params: dict) -> TrainState:
    """The state before the first step, after the learner has the policy and the other models that the config names.

    Raises:
        ValueError: a model or an optimizer state cannot be read, or does not fit the policy.
    """
    config = setup.config
    teacher = load_teacher(config, setup.policy)
    reads_reference = config.model.reference and config.algorithm.build().needs_reference
    reference = reference_params(config, setup.policy) if reads_reference else None
    held_out = HeldOut(setup.held_out, setup.grading, setup.agents)
    trained = learner.begin(config, setup.policy, params, held_out, teacher=teacher, reference=reference)
    # A run that resumes has its own moments in its checkpoint, and must not take those of the earlier run again.
    is_new = not checkpoint.steps_of(Path(config.output) / "checkpoints")
    if config.model.run and config.optimizer.state == "run" and is_new:
        folder, step = checkpoint.split_step(config.model.run)
        # A teacher that stays the initial policy is this run's, and not that of the earlier run.
        is_constant = config.model.average_rate == 0
        assert step is not None
        state = checkpoint.optimizer_state_of(folder, int(step), trained, new_average=is_constant)
        trained = trained._replace(optimizer_state=state)
    return trained


def base_digest(config: Config, params: dict) -> str:
    """The digest of a run's initial policy, without new adapters, which change nothing yet."""
    has_trained_adapters = config.model.adapter is not None or config.model.run is not None
    leaves = flatten(params)
    return fingerprint({path: leaf for path, leaf in leaves.items() if has_trained_adapters or not is_adapter(path)})


def other_digests(setup: Setup, learner: Learner) -> dict[str, str]:
    """Digests of other models' weights that the run reads, by key and dtype, since devices have their own dtypes."""
    config = setup.config
    dtype = jnp.dtype(setup.policy.decoder.dtype).name
    models = {}
    if learner.teacher is not None:
        models["model.teacher"] = learner.teacher.params
    if config.model.reference and learner.reference is not None:
        models["model.reference"] = learner.reference
    return {f"{key} ({dtype})": fingerprint(params) for key, params in models.items()}
