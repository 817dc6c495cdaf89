"""The loop: sync → sample → queue → pad → update → log → evaluate and checkpoint."""

import contextlib
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from recjax import hosts
from recjax.algorithms.algorithm import Algorithm
from recjax.algorithms.diagnostics import staleness
from recjax.config import Config
from recjax.console import under_way
from recjax.experience import queue as queues
from recjax.experience.batch import Batch, minibatch_rows, pad, to_learn_from, with_part_weights
from recjax.experience.group import Group
from recjax.experience.layout import Layout, padding_waste
from recjax.files import json_text, write_whole, writing
from recjax.host_memory import SETTLING_STEPS, close_gaps
from recjax.models.placement import row_shards
from recjax.plots.training import draw_experience, draw_training
from recjax.training import checkpoint, following, kept_samples, rounds
from recjax.training.evaluation import samples_as_markdown, write_samples
from recjax.training.learner import Learner
from recjax.training.metrics import batch_metrics, peak_memory_bytes, read_metrics
from recjax.training.profile import profiled_steps
from recjax.training.run import Run, State
from recjax.training.schedule import expected_staleness
from recjax.training.start import open_run

_SAMPLED = "sampling the first batch, which compiles the sampler"
_FROM_STORE = "taking the first batch from the store"


class Preempted(Exception):
    """A signal stopped the run, after the run wrote a checkpoint."""

    def __init__(self, step: int, number: int):
        """Takes the last step and the signal's number."""
        super().__init__(f"stopped after step {step}; the same command resumes from its checkpoint")
        self.signal = number


def train(
    config: Config, overwrite: bool = False, *, sources: Callable | None = None, learner: Learner | None = None
) -> dict[str, Any]:
    """Trains to the last step and returns the summary; resumes from the newest checkpoint in the run's folder, if any.

    It uses the mesh in context. Without one, it activates a mesh of `config.mesh`.

    Args:
        overwrite: delete the run that the folder holds.
        sources: function that samples a batch, with the first four arguments and the results of
            `rounds.sample_batch`; None: the policy samples.
        learner: a subclass of `Learner` that computes instead of it; None: JAX computes.
    Raises:
        FloatingPointError: a loss or gradient that is not finite, or impossible tokens; the checkpoints before it stay.
        RuntimeError: the config drops all groups that are sampled, or a generator dies repeatedly.
        Preempted: on SIGTERM, SIGHUP or Ctrl-C, after the current step and its checkpoint.
        ValueError: a task, model, store or folder that cannot be used, or a reward function at fault.
    """
    with open_run(config, overwrite, sources, learner) as (run, state), contextlib.ExitStack() as stack:
        config, first, last = run.config, state.step + 1, run.config.training.steps
        traced, folder = config.training.profile_steps, Path(config.output) / "profile"
        steps = profiled_steps(first, last, traced, folder, lambda: jax.block_until_ready(state.trained))
        stack.enter_context(contextlib.closing(steps))
        algorithm, stop_requests = config.algorithm.build(), hosts.LateAnswers()
        if run.manager.latest_step() is None:
            with under_way(f"evaluating the initial policy: {len(run.held_out.texts)} problems"):
                evaluated = _evaluated(run, state, "before")
            unusable = run.stored.left_out.items() if run.stored else ()
            counts = {f"experience/left_out/{reason}": count for reason, count in unusable}
            run.metrics.write({"step": 0, **evaluated, **counts})
            state = _saved(run, state)
        for step in steps:
            run.lock.check()

            # --- Sync, sample, queue: rounds, until there are enough groups to train on.
            groups, begins = list(state.groups), not state.groups
            if begins:
                with under_way(_SAMPLED if run.own[0] and not run.follower else _FROM_STORE, step == first):
                    state, groups = next_groups(run, state, step, run.stopping)
                if groups is None:  # a signal arrived during the wait
                    break

            # --- Pad.
            if begins or step == first:
                batch = _padded(run, state, algorithm, groups, step)
                learned = to_learn_from(batch, config.task)
            if begins:
                state = rounds.keep_behavior_params(run, state, step)

            # --- Update, asynchronously. Batches of different sources have different reward parts, so only an algorithm
            # that reads the parts gets them.
            weights = run.part_weights if algorithm.reads("reward_parts") else None
            with under_way("compiling the update", step == first), run.phases.phase("update"):
                weighted = with_part_weights(learned, weights)
                layout = _layout(run, learned, groups, step)
                if begins and config.training.updates > 1:
                    steps_of_pass = range(step, step + config.training.minibatches)
                    layouts = (_layout(run, learned, groups, each) for each in steps_of_pass)
                    proximal = run.learner.proximal_logprobs(run, state.trained, weighted, layouts)
                    state = state._replace(groups=tuple(groups), proximal_logprobs=proximal)
                arguments = run, state.trained, weighted, layout, step, state.proximal_logprobs
                trained, measured, of_tokens = run.learner.update(*arguments)
            tokens = state.totals["tokens"] + begins * int(batch.completion_mask.sum())
            state = state._replace(step=step, trained=trained, totals=state.totals | {"tokens": tokens})
            if step % config.training.updates == 0:
                state = state._replace(groups=(), proximal_logprobs=None)
            run.metrics.settle()  # the previous step's
            kept_samples.keep(run, step, groups, of_tokens, layout.rows)

            # --- Log and evaluate.
            row = {
                "step": step,
                **batch_metrics(step, batch, learned),
                **(rounds.queue_metrics(run, state.queue, groups, step) if begins else {}),
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
            # Recorded completions stay in the record, so weights that are not finite must not sample them.
            if saves or evaluates or run.record:
                run.metrics.settle()
            if saves:
                state = _saved(run, state)
            if step < first + SETTLING_STEPS:
                close_gaps()
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


def next_groups(run: Run, state: State, step: int, stopping: Sequence[int] = ()) -> tuple[State, list[Group] | None]:
    """Runs rounds until there are enough groups for a step; returns the state and the groups.

    Args:
        stopping: received signals that stop the run.
    Returns:
        None instead of the groups if a signal arrived while the run waited for a store.
    """
    if run.follower:
        return following.wait_for_groups(run, rounds.sync_sampler(run, state, step), step, stopping)
    state, groups = state._replace(queue=queues.begin_step(state.queue)), None
    if run.generators:
        run.generators.begin_step()
    while groups is None:
        state = rounds.sync_sampler(run, state, step)
        state = state._replace(queue=queues.begin_round(state.queue))
        # It waits for the generators only if there are too few groups.
        for wait in (False, True) if run.generators else (True,):
            state = rounds.sample_batches(run, state, step, wait)
            state, groups = rounds.take_groups(run, state, step)
            if groups is not None:
                break
        rounds.require_some(run, state.queue, step)
    return state, groups


def _layout(run: Run, batch: Batch, groups: list[Group], step: int) -> Layout:
    """The micro-batches of a step, which trains on the whole batch or on one of its minibatches."""
    rows = minibatch_rows(batch, len(groups), step - 1, run.config.training, run.config.seed)
    return run.learner.layout(run, batch, rows)


def _padded(run: Run, state: State, algorithm: Algorithm, groups: list[Group], step: int) -> Batch:
    """The batch of a step, padded to equal shares for micro-batches and devices."""
    config, shape = run.config, run.shape
    minibatches, updates = config.training.minibatches, config.training.updates
    multiple = config.micro_batches(shape.positions // minibatches, row_shards()) * row_shards() * minibatches
    unneeded = config.experience is not None and config.experience.missing_logprobs == "unneeded"
    shape = shape._replace(prompts=-(-shape.prompts // multiple) * multiple)
    with run.phases.phase("sample"):
        turns = config.task.agent_turns if algorithm.reads("turn_rewards", "token_turns") else None
        batch = pad(groups, shape, logprobs=not unneeded, turns=turns)
        batch = following.with_missing_logprobs(run, state, batch) if run.follower else batch
    # A group of the next batch replaces a group without any reward, and the run trains on the rest of that batch later.
    all_there = state.queue.left["groups_without_reward"] == 0
    if config.experience is None and config.regime.mode == "sync" and all_there:
        measured = staleness(step, batch.policy_version[batch.completion_mask.any(-1)])
        expected = expected_staleness(step, config.regime, updates)
        if (measured != expected).any():
            raise AssertionError(f"step {step}: staleness is {np.unique(measured)}, but the regime gives {expected}")
    return batch


def _evaluated(run: Run, state: State, name: str) -> dict[str, float]:
    """Evaluates the trained policy and returns its metrics; saves its completions in samples/`name`.jsonl."""
    with run.phases.phase("evaluate"):
        result = run.learner.evaluate(run, state)
        if hosts.is_first():
            write_samples(Path(run.config.output) / "samples" / f"{name}.jsonl", result)
            run.trackers.log_text("samples", samples_as_markdown(result), state.step)
    measured = {"accuracy": result.accuracy, "reward": result.reward, "initial_kl": result.initial_kl}
    return {f"evaluation/{key}": value for key, value in measured.items() if value is not None}


def _saved(run: Run, state: State) -> State:
    """Waits for all grades, writes a checkpoint, and returns the state that it holds."""
    run.lock.check()
    state = state._replace(queue=rounds.add_due_grades(run, state.queue, all_of_them=True))
    with run.phases.phase("checkpoint"):
        seconds = {"seconds": dict(run.phases.totals), "wall_seconds": run.phases.wall_seconds}
        state = state._replace(totals=state.totals | seconds | {"metrics": run.metrics.written})
        checkpoint.save(run.manager, state, run.config.training.keep_checkpoints)
    return state


def _finish(run: Run) -> None:
    """Draws the figures, writes summary.json, and gives trackers the figures and samples."""
    config, output = run.config, Path(run.config.output)
    rows = read_metrics(output / "metrics.jsonl")
    title = f"{config.algorithm.preset}: {output.name}"
    with writing(output / "figures"):
        draw_training(rows, title, output / "figures" / "training.png")
        if config.experience or config.regime.mode == "async":
            draw_experience(rows, title, output / "figures" / "experience.png")
    # A row is missing if metrics.jsonl was damaged before the run resumed.
    by_step = {row["step"]: row for row in rows}
    before, after = by_step.get(0, {}), by_step.get(config.training.steps, {})
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
