"""The loop: next batch → update → log, with evaluation and checkpoints."""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import logging

from recjax import hosts
from recjax.config import Config
from recjax.experience.records import filled_up
from recjax.models.placement import put_rows, row_shards
from recjax.models.trainable import combine
from recjax.models.unrolling import unrolled_on_cpu
from recjax.plots.training import draw_experience, draw_training
from recjax.rollout.collecting import finished, to_learn_from
from recjax.rollout.generators import Generators
from recjax.tasks.grading.pool import Grading
from recjax.training import checkpoint
from recjax.training.batches import next_batch, start_generators
from recjax.training.checkpoint import Snapshot
from recjax.training.evaluation import evaluate, write_samples
from recjax.training.late_rows import LateRows
from recjax.training.metrics import (
    MetricsWriter,
    PhaseSeconds,
    batch_metrics,
    peak_memory_bytes,
    progress_bar,
    read_metrics,
)
from recjax.training.packing import packed_batch, padding_waste
from recjax.training.profile import profiled_steps
from recjax.training.setup import Setup
from recjax.training.source import open_source
from recjax.training.start import begin
from recjax.training.update import MOST_UNROLLED, learning_rate_schedule, make_optimizer, update


class Preempted(Exception):
    """The run was asked to stop, and its checkpoint is on disk."""


def run(config: Config, setup: Setup, output: Path) -> dict[str, Any]:
    """Trains to the last step and returns the summary; goes on from the newest checkpoint in `output`, if any.

    Raises:
        FloatingPointError: a loss or gradient that is not finite; the checkpoints before it stay.
        RuntimeError: what the config leaves out of what is drawn leaves nothing to train on, or a generator dies again
            and again.
        Preempted: SIGTERM came; the step that was under way is done and its checkpoint written.
        ValueError: the user's reward function is at fault.
    """
    # Ray takes SIGTERM for itself, so it comes before what the loop makes of it.
    apart = Generators(config.regime) if config.regime.mode == "async" else contextlib.nullcontext()
    with Grading(config, setup.reward) as grading, apart as generators, _stop_requests() as stopping:
        return _run(config, setup, output, grading, generators, stopping)


@contextlib.contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, which is how clouds and schedulers announce that a machine will go."""
    stopping = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping  # signals are the main thread's
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        yield stopping
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(
    config: Config,
    setup: Setup,
    output: Path,
    grading: Grading,
    generators: Generators | None,
    stopping: threading.Event,
) -> dict[str, Any]:
    started = time.perf_counter()
    policy = setup.policy
    algorithm = config.algorithm.build()
    optimizer = make_optimizer(config.optimizer, config.training.steps)
    learning_rate = learning_rate_schedule(config.optimizer, config.training.steps)
    drop_key = jax.random.fold_in(jax.random.key(config.seed), 3)
    micro_batches = config.micro_batches()

    # --- Where the run stands: a checkpoint, or before the first step.
    manager = checkpoint.open_checkpoints(output / "checkpoints", config.training.keep_checkpoints)
    (step, state, held, progress), resumed, frozen, initial = begin(config, setup, algorithm, optimizer, manager)
    if resumed:
        logging.info("going on from the checkpoint of step %d", step)
    stored = setup.stored
    if stored and progress["store"] != stored.digest:
        place = config.experience.store or config.experience.mix.store
        raise ValueError(
            f"the experience store {place!r} is not what it was when this run began, and its batches would be others;"
            f" put its rows back, or give another output than {str(output)!r}"
        )
    phases, wall_before = PhaseSeconds(progress["seconds"]), progress["wall_seconds"] + setup.seconds
    phases.totals["prepare"] += setup.seconds
    source = open_source(config, setup, frozen, grading, phases, output, generators)
    if generators:
        start_generators(source, held)
    writer = MetricsWriter(output, keep_through=step if resumed else -1)

    def evaluated(name: str) -> dict[str, float]:
        with phases.phase("evaluate"):
            before = combine(initial, frozen) if config.evaluation.initial_kl else None
            params = combine(state.params, frozen)
            result = evaluate(config, policy, params, setup.evaluation, grading, step, before)
            if hosts.is_first():
                write_samples(output / "samples" / f"{name}.jsonl", result)
        measured = {"accuracy": result.accuracy, "reward": result.reward, "initial_kl": result.initial_kl}
        return {f"evaluation/{key}": value for key, value in measured.items() if value is not None}

    def save_checkpoint() -> None:
        with phases.phase("score"):
            held.queue[:] = map(finished, held.queue)
        with phases.phase("checkpoint"):
            progress.update(seconds=dict(phases.totals), wall_seconds=wall_before + time.perf_counter() - started)
            checkpoint.save(manager, Snapshot(step, state, held, progress))

    if not resumed:
        left_out = stored.left_out if stored else {}
        counts = {f"experience/left_out/{reason}": count for reason, count in left_out.items()}
        writer.write({"step": 0, **evaluated("before"), **counts})
        save_checkpoint()

    bar = progress_bar(config.algorithm.preset, config.training.steps, initial=step)
    traced, last_step = config.training.profile_steps, config.training.steps
    steps = profiled_steps(step + 1, last_step, traced, output / "profile", lambda: jax.block_until_ready(state))
    with contextlib.closing(steps), LateRows(writer, bar, phases, manager) as rows:
        for step in steps:
            held, batch, counts = next_batch(source, held, step, state.params)
            learned = to_learn_from(batch, config.task)

            # --- Update, not waited for. It reads no parts of the reward, which differ from batch to batch where
            # sources do.
            with phases.phase("update"):
                shared = filled_up(learned, micro_batches * row_shards())
                packed = packed_batch(config, shared)
                state, metrics = update(
                    state,
                    frozen,
                    initial if algorithm.needs_reference else None,
                    put_rows(shared._replace(reward_parts={})),
                    jax.random.fold_in(drop_key, step),
                    packed,
                    decoder=unrolled_on_cpu(policy.decoder, MOST_UNROLLED),
                    algorithm=algorithm,
                    optimizer=optimizer,
                    sampling=config.rollout.sampling(),
                    chunk=config.model.logprob_chunk,
                    micro_batches=None if packed else micro_batches,
                )
            rows.settle()  # that of the step before

            # --- Evaluate, log, checkpoint.
            progress["tokens"] += int(batch.completion_mask.sum())
            row = {
                "step": step,
                **batch_metrics(step, batch, learned),
                **counts,
                "learning_rate": learning_rate(step - 1),
                "padding_waste": padding_waste(learned, packed),
                **metrics,
            }
            last = step == last_step
            evaluates = last or (config.evaluation.every and step % config.evaluation.every == 0)
            if evaluates:
                row = rows.read(row) | evaluated("after" if last else "latest")
            # A row that is still to be read has its own update's dispatch in these, and the updates before it whole.
            row["tokens_per_second"] = progress["tokens"] / _loop_seconds(phases)
            row["wall_seconds"] = wall_before + time.perf_counter() - started
            rows.hold(row)
            asked_to_stop = hosts.any_says(stopping.is_set())  # of several processes the devices tell, after the update
            saves = last or step % config.training.checkpoint_every == 0 or asked_to_stop
            # What is drawn into a record stays there, and must not be drawn by weights that are not finite.
            if saves or evaluates or source.record:
                rows.settle()
            if saves:
                save_checkpoint()
            if asked_to_stop and not last:
                raise Preempted(f"stopped after step {step}, as asked; the same command goes on from its checkpoint")
    bar.close()
    writer.close()
    manager.close()

    if hosts.is_first():
        _finish(config, output, wall_before + time.perf_counter() - started, phases)
    hosts.wait_for_all("the summary")
    return json.loads((output / "summary.json").read_text(encoding="utf-8"))


def _finish(config: Config, output: Path, wall_seconds: float, phases: PhaseSeconds) -> None:
    """Draws the figures and writes summary.json."""
    rows = read_metrics(output / "metrics.jsonl")
    title = f"{config.algorithm.preset}: {output.name}"
    draw_training(rows, title, output / "figures" / "training.png")
    if config.experience or config.regime.mode == "async":
        draw_experience(rows, title, output / "figures" / "experience.png")
    summary = {
        "accuracy_before": rows[0]["evaluation/accuracy"],
        "accuracy_after": rows[-1]["evaluation/accuracy"],
        "steps": rows[-1]["step"],
        "wall_seconds": wall_seconds,
        "tokens_per_second": rows[-1]["tokens_per_second"],
        "peak_memory_bytes": peak_memory_bytes(),
        "seconds": dict(phases.totals),
    }
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def _loop_seconds(phases: PhaseSeconds) -> float:
    return sum(phases.totals[name] for name in ("sample", "score", "update"))
