"""The loop: sync → sample → queue → pad → update → log → evaluate and checkpoint.

`experiments/own_loop.py` is the same loop in 200 lines, for one task on one device. This one adds what long runs need:
sources that sample late or elsewhere, a queue in front of the update, checkpoints, evaluations, signals, and meshes.
"""

import gc
import itertools
import json
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
import numpy as np

from recjax import hosts
from recjax.algorithms.diagnostics import staleness
from recjax.config import Config
from recjax.config.fields import value_of
from recjax.console import under_way
from recjax.experience.batch import Batch, minibatch_rows, pad, to_learn_from, with_part_weights
from recjax.experience.group import Group
from recjax.experience.layout import Layout, padding_waste
from recjax.experience.queue import LEFT, LOST, Queue, counts, deliver, put, take, wait_for_grades
from recjax.experience.store import Store
from recjax.files import json_text, write_whole, writing
from recjax.host_memory import SETTLING_STEPS, close_gaps
from recjax.plots.training import draw_experience, draw_training
from recjax.rollout.agents import AGENT_FAILURES
from recjax.tasks.grading.pool import FAILURES
from recjax.training import checkpoint, kept_samples, schedule
from recjax.training.evaluation import samples_as_markdown, write_samples
from recjax.training.learner import Learner
from recjax.training.metrics import batch_metrics, peak_memory_bytes, read_metrics, task_metrics
from recjax.training.profile import profiled_steps
from recjax.training.run import Run, State
from recjax.training.schedule import expected_staleness
from recjax.training.sources import kept_records, stored_groups, with_missing_logprobs
from recjax.training.start import start_run

_SAMPLED = "sampling the first batch, which compiles the sampler"
_FROM_STORE = "taking the first batch from the store"


class Preempted(BaseException):
    """A signal or `on_step` stopped the run, after the run wrote a checkpoint. `except Exception` does not catch it."""

    def __init__(self, step: int, number: int):
        """Takes the last step and the signal's number, or `start.STOPPED`."""
        super().__init__(f"stopped after step {step}; the same command or call resumes from its checkpoint")
        self.signal = number


def train(
    config: Config,
    overwrite: bool = False,
    *,
    reward: Callable | None = None,
    on_step: Callable[[dict], Any] | None = None,
    sources: Callable | None = None,
    learner: Learner | None = None,
    check: Callable[[Run], None] = lambda run: None,
) -> dict[str, Any]:
    """Trains to the last step and returns the summary; resumes from the newest checkpoint in the run folder, if any.

    It uses the mesh in context. Without one, it activates a mesh of `config.mesh`.

    Args:
        overwrite: delete the run that the folder holds.
        reward: the function whose `passed_name` is `task.reward`; None without one.
        on_step: called with each row of metrics as it is written, one step late at most; the run stops if it returns a
            true value.
        sources: function from the run to the `Source` of its groups; None: `source_of`, which reads the config.
        learner: a subclass of `Learner` that computes instead of `Learner`; None: JAX computes.
        check: function of the run that is called before the first evaluation or step.
    Raises:
        FloatingPointError: a loss or gradient that is not finite, or impossible tokens; the checkpoints before it stay.
        RuntimeError: the config drops all groups that are sampled, or a generator dies repeatedly.
        Preempted: on SIGTERM, SIGHUP, Ctrl-C or a request of `on_step`, after the current step and its checkpoint.
        ValueError: a task, model, store or folder that cannot be used, or a reward function at fault.
    """
    with start_run(config, overwrite, reward, on_step, sources, learner) as (run, state), ExitStack() as stack:
        check(run)
        config = run.config
        first = state.step + 1
        last = run.config.training.steps
        traced = config.training.profile_steps
        folder = Path(config.output) / "profile"
        steps = profiled_steps(first, last, traced, folder, lambda: jax.block_until_ready(state.trained))
        stack.enter_context(closing(steps))
        algorithm = config.algorithm.build()
        stop_requests = hosts.LateAnswers()
        unneeded = config.experience is not None and config.experience.missing_logprobs == "unneeded"
        turns = config.task.agent_turns if algorithm.reads("turn_rewards", "token_turns") else None
        padding = {"shape": run.padded_shape, "logprobs": not unneeded, "turns": turns}
        if run.manager.latest_step() is None:
            with under_way(f"evaluating the initial policy: {len(run.held_out.texts)} problems"):
                evaluated = _evaluated(run, state, "before")
            unusable = run.stored.left_out.items() if run.stored else ()
            left_out = {f"experience/left_out/{reason}": count for reason, count in unusable}
            run.metrics.write({"step": 0, **evaluated, **state.totals["warm_start"], **left_out})
            state = _saved(run, state)
        for step in steps:
            run.lock.check()

            # --- Sync, sample, queue: rounds, until there are enough groups to train on.
            before = state.queue
            groups = list(state.groups)
            begins = not state.groups
            if begins:
                with under_way(_SAMPLED if run.samples else _FROM_STORE, step == first):
                    state, groups = next_groups(run, state, step)
                if groups is None:  # a signal arrived during the wait
                    break

            # --- Pad.
            if begins or step == first:
                with run.phases.phase("sample"):
                    batch = pad(groups, **padding)
                learned = to_learn_from(batch, config.task)
            check_staleness(run, state.queue, batch, step)
            if begins:
                state = keep_behavior_params(run, state, step)

            # --- Update, asynchronously. Batches of different sources have different reward parts, so only an algorithm
            # that reads the parts gets them.
            with under_way("compiling the update", step == first), run.phases.phase("update"):
                weighted = with_part_weights(learned, run.part_weights if algorithm.reads("reward_parts") else None)
                layout = _layout(run, state, learned, groups, step)
                state = state._replace(totals=state.totals | {"row_doublings": layout.doublings})
                proximal = state.proximal_logprobs
                if begins and config.training.updates > 1:
                    steps_of_pass = range(step, step + config.training.minibatches)
                    layouts = (_layout(run, state, learned, groups, each) for each in steps_of_pass)
                    proximal = run.learner.proximal_logprobs(run, state.trained, weighted, layouts)
                    state = state._replace(groups=tuple(groups), proximal_logprobs=proximal)
                trained, measured, of_tokens = run.learner.update(run, state.trained, weighted, layout, step, proximal)
            tokens = state.totals["tokens"] + begins * int(batch.completion_mask.sum())
            state = state._replace(step=step, trained=trained, totals=state.totals | {"tokens": tokens})
            if step % config.training.updates == 0:
                state = state._replace(groups=(), proximal_logprobs=None)
            run.metrics.settle()  # the previous step's
            kept_samples.keep(run, step, groups, of_tokens, layout.rows)

            # --- Log and evaluate.
            row = {
                "step": step,
                **batch_metrics(step, batch, learned, config.rollout.sampling().has_cuts),
                **task_metrics(
                    (one.metadata, one.grade.accurate, one.grade.reward)
                    for group in (groups if config.task.truncated == "mask" else map(run.judge.seen, groups))
                    for one in group.completions
                    if one.rows
                ),
                **(queue_metrics(run, before, state.queue, groups, step) if begins else {}),
                "padding_waste": padding_waste(learned, layout, filled=len(batch.prompts) - run.shape.prompts),
                **measured,
            }
            evaluates = step == last or (config.evaluation.every and step % config.evaluation.every == 0)
            if evaluates:
                row = run.metrics.read(row) | _evaluated(run, state, "after" if step == last else "latest")
            # For a row that is not read yet, these include the dispatch of its own update and all earlier updates.
            row["tokens_per_second"] = tokens / run.phases.loop_seconds
            row["wall_seconds"] = run.phases.wall_seconds
            run.metrics.hold(row)

            # --- Checkpoint.
            saves = step == last or step % config.training.checkpoint_every == 0
            saves = saves or (evaluates and config.training.keep_best is not None)
            # Recorded completions stay in the record, so weights that are not finite must not sample them.
            if saves or evaluates or run.record:
                run.metrics.settle()
            if saves:
                state = _saved(run, state)
            if step < first + SETTLING_STEPS and close_gaps():  # only in a command
                gc.collect()
                gc.freeze()  # a later collection would look through all that JAX keeps of programs, for a second
                stack.callback(gc.unfreeze)
            if stop_requests.any_says(bool(run.stopping)):  # with several processes: asked in the previous step
                break
        if state.step < last:
            run.metrics.settle()
            if run.manager.latest_step() != state.step:
                _saved(run, state)
            raise Preempted(state.step, next(iter(run.stopping), signal.SIGTERM))
        if hosts.is_first():
            _finish(run)
        hosts.wait_for_all("the summary")
    return json.loads((Path(config.output) / "summary.json").read_text(encoding="utf-8"))


def next_groups(run: Run, state: State, step: int) -> tuple[State, list[Group] | None]:
    """Runs rounds until there are enough groups for a step.

    Returns:
        The state and the groups; None instead of the groups if a signal arrived while an endless source waited.
    Raises:
        RuntimeError: too many rounds have gone by without enough groups to train on.
    """
    source = run.source
    settings = run.settings
    count = run.own[0]
    seed = run.config.seed
    state, before = sync_sampler(run, state, step), state.queue
    source.begin_step(run, state)
    for idle in itertools.count(1):
        state = state._replace(queue=state.queue._replace(round=state.queue.round + 1))
        for wait in (False, True):  # the source waits only if there are too few groups
            queue = state.queue
            for arrival in source.poll(run, state, step, wait):
                queue = put(queue, arrival, seed, settings)
            queue = deliver(wait_for_due_grades(run, queue), step, settings)
            later, groups = take(queue, count, step, seed, settings)
            if groups is not None and not source.must_wait(run, later, step):
                groups = with_missing_logprobs(run, state, groups + stored_groups(run, step))
                return state._replace(queue=later), groups
            state = state._replace(queue=queue)
        if source.endless and run.stopping:
            return state, None
        if idle >= settings.idle_rounds and not source.endless:
            raise RuntimeError(f"step {step}: {_too_few(run.config, queue.counts - before.counts)}")


def _too_few(config: Config, removed: Counter[str]) -> str:
    """Reasons, by their metrics, for which too few groups remain, and the remedies that apply.

    Args:
        removed: the queue's counts since the last step.
    """
    failures = {"grading": FAILURES, "agent": AGENT_FAILURES if config.task.agent else ()}
    names = {reason: f"experience/left_out/{reason}" for reason in (*LOST, *LEFT)}
    names |= {f"ungraded/{kind}": f"{of}/{kind}" for of, kinds in failures.items() for kind in kinds}
    counted = ", ".join(f"{name} {removed[reason]}" for reason, name in names.items() if removed[reason])
    remedies = {
        "grading/": "let the reward function return numbers, or leave out problems that it cannot grade",
        "agent/": "correct the agent, or set task.agent_failure_reward",
        "no_signal": "choose problems whose completions differ in reward",
    }
    chosen = [remedy for name, remedy in remedies.items() if name in counted]
    limits = ("experience.replay", "experience.refill", "experience.late.deadline", "regime.max_staleness")
    chosen += [f"relax {name}" for name in limits if value_of(config, name) is not None]
    return f"{removed['batches']} batches were sampled, but too few groups remain ({counted}); {'; '.join(chosen)}"


def sync_sampler(run: Run, state: State, step: int) -> State:
    """Gives the sampler the trained parameters before a batch if that is due; returns the state."""
    is_due = schedule.is_sync(run.batch_of(step), run.config.regime) and state.version != step - 1
    return state._replace(behavior_params=None, version=step - 1) if is_due else state


def keep_behavior_params(run: Run, state: State, step: int) -> State:
    """Copies the weights before a batch's first update if the sampler keeps them; returns the state."""
    keeps = run.samples and not schedule.is_sync(run.batch_of(step) + 1, run.config.regime)
    return state._replace(behavior_params=run.learner.sampler_params(run, state, copy=True) if keeps else None)


def wait_for_due_grades(run: Run, queue: Queue, all_of_them: bool = False) -> Queue:
    """Waits for the grades that are due, or for all, and records their batches; returns the queue."""
    with run.phases.phase("score"):
        queue, batches = wait_for_grades(queue, all_of_them)
    if run.record and batches and hosts.is_first():
        with Store(run.record, create=True) as store:
            for groups in batches:
                records = kept_records(run, groups)
                # A run that resumed from before this batch has recorded it already.
                if records and not store.numbers("id", [records[0].completion.id]):
                    store.append(records)
    return queue


def queue_metrics(run: Run, before: Queue, queue: Queue, groups: list[Group], step: int) -> dict[str, Any]:
    """Metrics of the step's groups, the queue and the source.

    Args:
        before: the queue before the step, to count the completions that could not be graded.
    """
    config = run.config
    logged = {}
    failures = {}
    if run.samples:
        # a mixture may have functions of users
        reward = run.grading.reward
        last = None if config.task.mixture else -1
        failures["grading"] = FAILURES[1:last] if reward.per_row else FAILURES[1:] if reward.remote else FAILURES[-1:]
    if run.agents:
        failures["agent"] = AGENT_FAILURES
    for of, reasons in failures.items():
        names = {reason: f"ungraded/{reason}" for reason in reasons}
        logged |= {f"{of}/{reason}": queue.counts[name] - before.counts[name] for reason, name in names.items()}
    if config.experience or config.regime.mode == "async":
        logged["source_rows"] = dict(Counter(one.source for group in groups for one in group.completions))
        logged |= counts(queue) if config.follows or not (config.experience and config.experience.store) else {}
    return logged | run.source.metrics(queue, groups, step)


def _layout(run: Run, state: State, batch: Batch, groups: list[Group], step: int) -> Layout:
    """The micro-batches of a step, which trains on the whole batch or on one of its minibatches."""
    rows = minibatch_rows(batch, len(groups), step - 1, run.config.training, run.config.seed)
    return run.learner.layout(run, batch, rows, state.totals.get("row_doublings"))


def check_staleness(run: Run, queue: Queue, batch: Batch, step: int) -> None:
    """Checks that a synchronous run trains on a batch of the staleness that its regime promises.

    Raises:
        AssertionError: the staleness differs.
    """
    # A group of the next batch replaces a group without any reward, and the run trains on the rest of that batch later.
    all_there = queue.counts["groups_without_reward"] == 0
    if run.config.experience is None and run.config.regime.mode == "sync" and all_there:
        measured = staleness(step, batch.policy_version[batch.completion_mask.any(-1)])
        sampler = step - 1 - expected_staleness(step, run.config.regime, run.config.training.updates)
        task = run.config.task
        expected = sorted({step - 1 - task.seat_version(seat, sampler) for seat in task.trained_seats})
        if not np.isin(measured, expected).all():
            raise AssertionError(f"step {step}: staleness is {np.unique(measured)}, but the regime gives {expected}")


def _evaluated(run: Run, state: State, name: str) -> dict[str, float]:
    """Evaluates the trained policy and returns its metrics; saves its completions in samples/`name`.jsonl."""
    with run.phases.phase("evaluate"):
        result = run.learner.evaluate(run, state)
        if hosts.is_first():
            write_samples(Path(run.config.output) / "samples" / f"{name}.jsonl", result, state.step)
            run.trackers.log_text("samples", samples_as_markdown(result), state.step)
    measured = {name: getattr(result, name) for name in ("accuracy", "right_and_ended", "reward", "initial_kl")}
    measured |= task_metrics((one, one["accurate"], one["reward"]) for one in result.samples)
    return {f"evaluation/{key}": value for key, value in measured.items() if value is not None}


def _saved(run: Run, state: State) -> State:
    """Waits for all grades, writes a checkpoint, and returns the state that it holds."""
    run.lock.check()
    queue = wait_for_due_grades(run, state.queue, all_of_them=True)
    state = state._replace(queue=queue, source=run.source.state())
    with run.phases.phase("checkpoint"):
        seconds = {"seconds": dict(run.phases.totals), "wall_seconds": run.phases.wall_seconds}
        state = state._replace(totals=state.totals | seconds | {"metrics": run.metrics.written})
        oldest = max(state.version - (run.config.regime.max_staleness or 0), 0)
        older = run.config.task.older_versions(range(oldest, state.step + 1))
        checkpoint.save(run.manager, state, run.config.training, older)
    return state


def _finish(run: Run) -> None:
    """Draws the figures, writes summary.json, and gives trackers the figures and samples."""
    config = run.config
    output = Path(run.config.output)
    rows = read_metrics(output / "metrics.jsonl")
    title = f"{config.algorithm.preset}: {output.name}"
    with writing(output / "figures"):
        draw_training(rows, title, output / "figures" / "training.png")
        if config.experience or config.regime.mode == "async":
            draw_experience(rows, title, output / "figures" / "experience.png")
    # A row is missing if metrics.jsonl was damaged before the run resumed.
    by_step = {row["step"]: row for row in rows}
    before = by_step.get(0, {})
    after = by_step.get(config.training.steps, {})
    summary = {
        "accuracy_before": before.get("evaluation/accuracy"),
        "accuracy_after": after.get("evaluation/accuracy"),
        "steps": config.training.steps,
        "wall_seconds": run.phases.wall_seconds,
        "tokens_per_second": after.get("tokens_per_second"),
        "peak_memory_bytes": peak_memory_bytes(),
        "seconds": dict(run.phases.totals),
    }
    write_whole(output / "summary.json", json_text(summary, indent=2) + "\n")
    figures = {f"figures/{path.stem}": path for path in sorted((output / "figures").glob("*.png"))}
    run.trackers.log_results(figures, output / "samples" / "after.jsonl", config.training.steps)
