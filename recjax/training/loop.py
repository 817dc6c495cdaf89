"""The loop: sync → sample → queue → pad → update → log → evaluate and checkpoint.

`experiments/own_loop.py` is the same loop in 200 lines, for one task on one device. This one adds what long runs need:
sources that sample late or elsewhere, a queue in front of the update, checkpoints, evaluations, signals, and meshes.
`recjax.runs.start.train` opens a run and gives it to `train_steps`.
"""

import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import jax

from recjax.experience.batch import (
    Batch,
    check_graded_parts,
    minibatch_rows,
    pad,
    to_learn_from,
    with_part_weights,
    with_top_tokens,
)
from recjax.experience.group import Group
from recjax.experience.layout import Layout
from recjax.experience.queue import Queue, deliver, put, replaced, take, wait_for_grades, with_measures
from recjax.models.placement import on_host
from recjax.runtime import hosts
from recjax.runtime.console import under_way
from recjax.training import schedule
from recjax.training.loop_checks import check_staleness, too_few_groups
from recjax.training.profile import profiled_steps
from recjax.training.run import Run, State, Update


class Preempted(SystemExit):
    """A signal or `on_step` stopped the run, after the run wrote a checkpoint. `except Exception` does not catch it.

    As a SystemExit it ends a script with status 1 and its message alone.
    """

    def __init__(self, step: int, number: int):
        """Takes the last step and the signal's number, or `start.STOPPED`."""
        super().__init__(f"stopped after step {step}; the same command or call resumes from its checkpoint")
        self.signal = number


def train_steps(run: Run, state: State) -> State:
    """Makes the steps after the state's, up to the last one; returns the last state.

    Raises:
        BadStep: a loss or gradient that is not finite, or impossible tokens; the checkpoints before it stay.
        UserError: the config drops all groups that are sampled, or a generator dies repeatedly.
        Preempted: on a signal or a request of `on_step`, after the current step and its checkpoint.
    """
    config = run.config
    first = state.step + 1
    last = config.training.steps
    stop_requests = hosts.LateAnswers()
    if run.saver.newest is None:
        run.log.begin(state, evaluated(run, state, "before"))
        state = saved(run, state)
    first_batch = "taking the first batch of stored completions or demonstrations"
    if config.samples_training_data:
        first_batch = "sampling the first batch, which compiles the sampler"
    batch: Any = None

    def wait_for_update() -> None:
        jax.block_until_ready(state.trained)  # `state` is the loop's latest state when this is called

    folder = Path(config.output) / "profile"
    numbers = profiled_steps(first, last, traced=config.training.profile_steps, folder=folder, wait=wait_for_update)
    with closing(numbers) as steps:
        for step in steps:
            run.saver.check()

            # --- Sync, sample, queue, pad. A batch of several updates stays in the state between them, also on disk.
            is_new_batch = schedule.starts_batch(step, config.training.updates)
            queue_before = state.queue
            if is_new_batch:
                with under_way(first_batch, step == first):
                    state = next_groups(run, state, step)
                if not state.groups:  # a signal arrived during the wait
                    break
            if is_new_batch or step == first:
                with run.phase("sample"):
                    batch = padded(run, state.groups)
            check_staleness(run, state.queue, batch, step)
            if is_new_batch:
                # Before the update: it donates the trained parameters, of which the sampler may keep a copy.
                state = keep_behavior_params(run, state, step)

            # --- Update. The device computes it while the host logs.
            with under_way("compiling the update", step == first), run.phase("update"):
                state, update = updated(run, state, batch, step)
                state = measured(run, state, update)

            # --- Log and evaluate.
            if is_new_batch:
                update = update._replace(queue_before=queue_before)
            log_step(run, state, update)

            # --- Checkpoint.
            saves = schedule.saves(step, config)
            if saves or schedule.evaluates(step, config):
                run.log.settle()
            if saves:
                state = saved(run, state)
            run.after_step(step - first)
            if stop_requests.any_says(bool(run.stopping)):  # with several processes: asked in the previous step
                break
    if state.step < last:
        raise stopped(run, state)
    return state


def stopped(run: Run, state: State) -> Preempted:
    """Writes a checkpoint of the last step if it has none; returns the exception that ends the run."""
    run.log.settle()
    if run.saver.newest != state.step:
        saved(run, state)
    # With several processes, the signal may have reached only another one.
    number = next(iter(run.stopping), signal.SIGTERM)
    return Preempted(state.step, number)


# --- Sync, sample, queue.


def next_groups(run: Run, state: State, step: int) -> State:
    """Runs rounds until there are enough groups for a step, which the state then has.

    The state has no groups if a signal arrived while an endless source waited.

    Raises:
        UserError: too many rounds have gone by without enough groups to train on.
    """
    source = run.source
    settings = run.settings
    count, _ = run.config.own_counts
    seed = run.config.seed
    state = sync_sampler(run, state, step)
    counts_before = state.queue.counts
    source.begin_step(state)
    rounds = 0
    while True:
        rounds += 1
        queue = state.queue._replace(round=state.queue.round + 1)
        state = state._replace(queue=queue)
        for wait in (False, True):  # the source waits only if there are too few groups
            queue = state.queue
            for arrival in source.poll(state, step, wait):
                queue = put(queue, arrival, seed, settings)
            queue = deliver(wait_for_due_grades(run, queue), step, settings)
            later, groups = take(queue, count, step, seed, settings)
            if groups is not None and not source.must_wait(later, step):
                completed = source.completed(state, groups, step)
                # The first are those from the queue; the others joined without waiting there.
                later = replaced(later, groups, completed[: len(groups)])
                return state._replace(queue=later, groups=tuple(completed))
            state = state._replace(queue=queue)
        if source.endless and run.stopping:
            return state
        if rounds >= settings.idle_rounds and not source.endless:
            raise too_few_groups(run, step, removed=state.queue.counts - counts_before)


def sync_sampler(run: Run, state: State, step: int) -> State:
    """Gives the sampler the trained parameters before a batch if that is due; returns the state."""
    regime = run.config.regime
    batch = schedule.batch_of(step, run.config.training.updates)
    if schedule.is_sync(batch, regime) and state.version != step - 1:
        return state._replace(behavior_params=None, version=step - 1)
    return state


def keep_behavior_params(run: Run, state: State, step: int) -> State:
    """Copies the weights before a batch's first update if the sampler keeps them; returns the state."""
    batch = schedule.batch_of(step, run.config.training.updates)
    kept = None
    if run.config.samples_training_data and not schedule.is_sync(batch + 1, run.config.regime):
        kept = run.learner.behavior_params(state, copy=True)
    return state._replace(behavior_params=kept)


def wait_for_due_grades(run: Run, queue: Queue, all_of_them: bool = False) -> Queue:
    """Waits for the grades that are due, or for all, and gives their batches to the record; returns the queue."""
    with run.phase("score"):
        queue, batches = wait_for_grades(queue, all_of_them)
    run.source.record(batches)
    return queue


# --- Pad and update.


def padded(run: Run, groups: tuple[Group, ...]) -> Batch:
    """The batch of a step's groups, with the columns that the algorithm reads."""
    config = run.config
    # Without a ratio, foreign completions need no log-probs, and the batch has none even where some are known.
    has_logprobs = config.experience is None or config.experience.missing_logprobs != "unneeded"
    turns = None
    if run.algorithm.reads("turn_rewards", "token_turns"):
        turns = config.task.agent_turns
    if run.part_weights is not None:
        seen_groups = map(run.settings.judge.seen, groups)
        check_graded_parts(seen_groups, run.part_weights)
    batch = pad(groups, run.shape, logprobs=has_logprobs, turns=turns)
    top_tokens = 0
    if run.algorithm.score_centering:
        top_tokens = config.known_tokens
    batch = with_top_tokens(batch, top_tokens)
    if run.teacher_prompts is None:
        return batch
    return run.teacher_prompts(batch, groups)


def updated(run: Run, state: State, batch: Batch, step: int) -> tuple[State, Update]:
    """Makes one optimizer step on a batch, or on its next minibatch; returns without waiting for the device."""
    training = run.config.training
    is_new_batch = schedule.starts_batch(step, training.updates)
    learned_from = to_learn_from(batch, run.config.task)
    # Batches of different sources have different reward parts, so only an algorithm that reads them gets them.
    weighted = with_part_weights(learned_from, run.part_weights)
    layout = _layout(run, state, learned_from, step)
    totals = state.totals | {"row_doublings": layout.doublings}
    if is_new_batch:
        totals["tokens"] += int(batch.completion_mask.sum())
    state = state._replace(totals=totals)
    proximal = state.proximal_logprobs
    if is_new_batch and training.updates > 1:
        # All updates of a batch clip around the policy before the first one, which has to be scored now.
        steps = range(step, step + training.minibatches)
        layouts = (_layout(run, state, learned_from, minibatch_step) for minibatch_step in steps)
        run.device.call()
        proximal = run.learner.proximal_logprobs(state.trained, weighted, layouts)
    run.device.call()
    trained, measured, tokens = run.learner.update(state.trained, weighted, layout, step, proximal)
    run.device.wait_for(measured)
    update = Update(
        step=step,
        groups=state.groups,
        batch=batch,
        learned_from=learned_from,
        layout=layout,
        metrics=measured,
        tokens=tokens,
    )
    state = state._replace(step=step, trained=trained, proximal_logprobs=proximal)
    if step % training.updates == 0:  # the batch ends
        state = state._replace(groups=(), proximal_logprobs=None)
    return state, update


def measured(run: Run, state: State, update: Update) -> State:
    """Notes what replay reads of the groups that an update trained on; waits for the device only if it reads that."""
    if not run.settings.limits.measures:
        return state
    tokens = on_host(update.tokens)
    rows = on_host(update.layout.rows)
    queue = with_measures(
        state.queue,
        update.groups,
        update.learned_from,
        logprobs=tokens.logprobs,
        advantages=tokens.terms.advantages,
        rows=rows,
    )
    return state._replace(queue=queue)


def _layout(run: Run, state: State, batch: Batch, step: int) -> Layout:
    """The micro-batches of a step, which trains on the whole batch or on one of its minibatches."""
    rows = minibatch_rows(batch, len(state.groups), step - 1, run.config.training, run.config.seed)
    return run.learner.layout(batch, rows, state.totals.get("row_doublings"))


# --- Log, evaluate and save.


def log_step(run: Run, state: State, update: Update) -> None:
    """Gives the log the row of a step, with the metrics of an evaluation if the step evaluates."""
    # The previous step's row is written first: its numbers are there by now.
    run.log.settle()
    # Recorded completions stay in the record, so weights that are not finite must not sample them. The row of the
    # weights that sampled this batch is read by now.
    run.source.write_record()
    row = run.log.row(update, state)
    if schedule.evaluates(state.step, run.config):
        row = run.log.read(row)  # raises before a broken policy is evaluated
        name = "latest"
        if state.step == run.config.training.steps:
            name = "after"
        row |= evaluated(run, state, name)
    run.log.hold(row, state)


def evaluated(run: Run, state: State, name: str) -> dict[str, float]:
    """Metrics of the trained policy on the held-out problems; its completions are kept under a name."""
    with run.phase("evaluate"):
        measured = run.log.evaluation(run.learner.evaluate(state), state.step, name)
    run.device.end()
    return measured


def saved(run: Run, state: State) -> State:
    """Waits for all grades, writes a checkpoint, and returns the state that it holds."""
    run.saver.check()
    queue = wait_for_due_grades(run, state.queue, all_of_them=True)
    run.source.write_record()
    state = run.saver.save(state._replace(queue=queue, source=run.source.state()))
    run.device.end()
    return state
