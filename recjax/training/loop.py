"""The loop: next batch → update → log, with evaluation and checkpoints. A batch is drawn, or comes from a store."""

import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging
from tqdm import tqdm

from recjax.algorithms import diagnostics, presets
from recjax.config import Config
from recjax.experience.collect import Pending, draw, finished, submitted, to_learn_from
from recjax.experience.records import Batch
from recjax.experience.stored import stored_batch
from recjax.models.logprobs import Sampling
from recjax.models.trainable import combine, in_compute_dtype, split
from recjax.rollout.prompts import batch_indices
from recjax.tasks.grading import Grading
from recjax.training import checkpoint, schedule
from recjax.training.checkpoint import Snapshot
from recjax.training.evaluation import evaluate, write_samples
from recjax.training.figures import draw_training
from recjax.training.metrics import (
    MetricsWriter,
    PhaseSeconds,
    batch_metrics,
    peak_memory_bytes,
    progress_bar,
    read_metrics,
)
from recjax.training.packing import packed_batch, padding_waste
from recjax.training.setup import Setup
from recjax.training.update import TrainState, learning_rate_schedule, make_optimizer, update


def run(config: Config, setup: Setup, output: Path) -> dict[str, Any]:
    """Trains to the last step and returns the summary; goes on from the newest checkpoint in `output`, if any.

    Raises:
        FloatingPointError: a loss or gradient that is not finite; the checkpoints before it stay.
        ValueError: the user's reward function is at fault.
    """
    with Grading(config, setup.reward) as grading:
        return _run(config, setup, output, grading)


def _run(config: Config, setup: Setup, output: Path, grading: Grading) -> dict[str, Any]:
    started = time.perf_counter()
    policy, rollout = setup.policy, config.rollout
    algorithm = presets.build_algorithm(config.algorithm.preset, config.algorithm.overrides())
    optimizer = make_optimizer(config.optimizer, config.training.steps)
    learning_rate = learning_rate_schedule(config.optimizer, config.training.steps)
    sampling = Sampling(rollout.temperature, rollout.top_k, rollout.top_p)
    sample_key, drop_key = (jax.random.fold_in(jax.random.key(config.seed), stream) for stream in (1, 3))
    micro_batches = rollout.prompts_per_step // (config.training.micro_batch_prompts or rollout.prompts_per_step)

    # --- Where the run stands: a checkpoint, or before the first step.
    initial_params, frozen = split(setup.initial_params, config.model)
    frozen = in_compute_dtype(policy.decoder, frozen, copy=False)
    reference_params = initial_params if algorithm.needs_reference else None
    state = TrainState(jax.tree.map(jnp.copy, initial_params), optimizer.init(initial_params))
    initial_behaviour = in_compute_dtype(policy.decoder, initial_params, copy=False)
    manager = checkpoint.open_checkpoints(output / "checkpoints", config.training.keep_checkpoints)
    restored = checkpoint.restore(manager, state, initial_behaviour)
    if jax.device_count() > 1:
        logging.warning("%d devices are there; this version trains on one of them", jax.device_count())
    if restored:
        logging.info("going on from the checkpoint of step %d", restored.step)
    stored = setup.stored
    nothing_done = {"seconds": {}, "tokens": 0, "wall_seconds": 0.0, "store": stored and stored.digest}
    snapshot = restored or Snapshot(0, state, initial_behaviour, 0, [], nothing_done)
    step, state, behaviour_params, version, queue, progress = snapshot
    if stored and progress["store"] != stored.digest:
        raise ValueError(
            f"experience.store = {config.experience.store!r} is not what it was when this run began, and its batches"
            f" would be others; put its rows back, or give another output than {str(output)!r}"
        )
    phases, wall_before = PhaseSeconds(progress["seconds"]), progress["wall_seconds"] + setup.seconds
    phases.totals["prepare"] += setup.seconds
    writer = MetricsWriter(output, keep_through=step if restored else -1)

    def evaluated(name: str) -> dict[str, float]:
        with phases.phase("evaluate"):
            initial = combine(initial_params, frozen) if config.evaluation.initial_kl else None
            params = combine(state.params, frozen)
            result = evaluate(config, policy, params, setup.evaluation, grading, step, initial)
            write_samples(output / "samples" / f"{name}.jsonl", result)
        measured = {"accuracy": result.accuracy, "reward": result.reward, "initial_kl": result.initial_kl}
        return {f"evaluation/{key}": value for key, value in measured.items() if value is not None}

    def drawn_batch(number: int) -> Pending:
        indices = batch_indices(len(setup.train.texts), rollout.prompts_per_step, number, config.seed)
        prompts = setup.train.take(indices)
        with phases.phase("sample"):
            key, params = jax.random.fold_in(sample_key, number), combine(behaviour_params, frozen)
            drawn = draw(policy, params, prompts, key, rollout.group_size, rollout.max_completion_tokens, sampling)
            return submitted(policy, prompts, drawn, grading, version)

    def batch_from_policy() -> Batch:
        nonlocal behaviour_params, version
        # What is drawn is scored in the background; the oldest batch is trained on.
        if schedule.is_sync(step, config.regime):
            behaviour_params, version = in_compute_dtype(policy.decoder, state.params, copy=True), step - 1
        numbers = schedule.batches_to_draw(step, len(queue), config.training.steps, config.regime)
        queue.extend(drawn_batch(number) for number in numbers)
        with phases.phase("score"):
            batch = finished(queue.pop(0))
        staleness = diagnostics.staleness(step, batch.policy_version)
        if (staleness != schedule.expected_staleness(step, config.regime)).any():
            raise AssertionError(f"step {step}: staleness {staleness} is not what the regime says")
        return batch

    def batch_from_store() -> Batch:
        with phases.phase("sample"):
            return stored_batch(stored, config, policy, combine(state.params, frozen), step)

    next_batch = batch_from_store if stored else batch_from_policy

    def save_checkpoint() -> None:
        with phases.phase("score"):
            queue[:] = map(finished, queue)
        with phases.phase("checkpoint"):
            progress.update(seconds=dict(phases.totals), wall_seconds=wall_before + time.perf_counter() - started)
            checkpoint.save(manager, Snapshot(step, state, behaviour_params, version, queue, progress))

    if not restored:
        left_out = stored.left_out if stored else {}
        counts = {f"experience/left_out/{reason}": count for reason, count in left_out.items()}
        writer.write({"step": 0, **evaluated("before"), **counts})
        save_checkpoint()

    bar = progress_bar(config.algorithm.preset, config.training.steps, initial=step)
    while step < config.training.steps:
        step += 1
        batch = next_batch()
        learned = to_learn_from(batch, config.task)

        # --- Update. It reads no parts of the reward, which differ from batch to batch where sources do.
        with phases.phase("update"):
            packed = packed_batch(config, learned)
            state, metrics = update(
                state,
                frozen,
                reference_params,
                learned._replace(reward_parts={}),
                jax.random.fold_in(drop_key, step),
                packed,
                decoder=policy.decoder,
                algorithm=algorithm,
                optimizer=optimizer,
                sampling=sampling,
                chunk=config.model.logprob_chunk,
                micro_batches=None if packed else micro_batches,
            )
            metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        _require_finite(metrics, step, manager)

        # --- Evaluate, log, checkpoint.
        progress["tokens"] += int(batch.completion_mask.sum())
        row = {
            "step": step,
            **batch_metrics(step, batch, learned),
            "learning_rate": float(learning_rate(step - 1)),
            "padding_waste": padding_waste(learned, packed),
            **metrics,
        }
        last = step == config.training.steps
        if last or (config.evaluation.every and step % config.evaluation.every == 0):
            row |= evaluated("after" if last else "latest")
        row["tokens_per_second"] = progress["tokens"] / _loop_seconds(phases)
        row["wall_seconds"] = wall_before + time.perf_counter() - started
        writer.write(row)
        if last or step % config.training.checkpoint_every == 0:
            save_checkpoint()
        _show(bar, row)
    bar.close()
    writer.close()
    manager.close()

    return _finish(config, output, wall_before + time.perf_counter() - started, phases)


def _finish(config: Config, output: Path, wall_seconds: float, phases: PhaseSeconds) -> dict[str, Any]:
    """Draws the figure, writes summary.json and returns what it holds."""
    rows = read_metrics(output / "metrics.jsonl")
    draw_training(rows, f"{config.algorithm.preset}: {output.name}", output / "figures" / "training.png")
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
    return summary


def _loop_seconds(phases: PhaseSeconds) -> float:
    return sum(phases.totals[name] for name in ("sample", "score", "update"))


def _require_finite(metrics: dict[str, float], step: int, manager: ocp.CheckpointManager) -> None:
    bad = {name: metrics[name] for name in ("loss", "gradient_norm", "update_norm") if not math.isfinite(metrics[name])}
    if bad:
        raise FloatingPointError(
            f"step {step}: {', '.join(f'{name} = {value}' for name, value in bad.items())}. Nothing of this step was"
            f" kept; the last good checkpoint is of step {manager.latest_step()} in {manager.directory}. A lower"
            " optimizer.learning_rate, or an algorithm that clips, is the usual remedy"
        )


def _show(bar: tqdm, row: dict[str, float]) -> None:
    shown = {
        "reward": f"{row['reward']:.2f}",
        "accuracy": f"{row['accuracy']:.2f}",
        "tok/s": f"{row['tokens_per_second']:.0f}",
    }
    if "staleness" in row:
        shown["stale"] = f"{row['staleness']:.0f}"
    if "ratio/q01" in row:
        shown["ratio"] = f"{row['ratio/q01']:.2f}–{row['ratio/q99']:.2f}"
        shown["clip"] = f"{row['clip_fraction/all']:.2f}"
    if "evaluation/accuracy" in row:
        bar.write(f"step {row['step']}: held-out accuracy {row['evaluation/accuracy']:.3f}")
    bar.set_postfix(shown, refresh=False)
    bar.update()
