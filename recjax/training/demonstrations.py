"""The supervised stage of a run: trains on demonstrations before the first step, and resumes exactly after a kill."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from recjax.algorithms.presets import build_algorithm
from recjax.config import OptimizerConfig, TrainingConfig
from recjax.experience.batch import pad
from recjax.experience.layout import packed_layout, score
from recjax.experience.queue import Queue
from recjax.models.placement import put_rows
from recjax.models.sampling import Sampling
from recjax.models.trainable import combine, in_compute_dtype, split_params
from recjax.models.unrolling import unrolled_for_training
from recjax.tasks.prompts import batch_indices
from recjax.training import checkpoint
from recjax.training.metrics import MetricsWriter, step_bar
from recjax.training.prepare import Setup
from recjax.training.run import State
from recjax.training.update import Recipe, TrainState, UpdateContext, first_state, make_optimizer, update
from recjax.training.warm_start import FOLDER, supervised_rates

logger = logging.getLogger(__name__)


_LOSSES = ("loss", "held_out_loss")


def train_on_demonstrations(setup: Setup, params: dict) -> tuple[dict, dict[str, float]]:
    """Trains on the demonstrations with the update of the run: REINFORCE with a reward of 1 is maximum likelihood.

    A finished stage is read from the run folder, and an interrupted one resumes from its last state.

    Args:
        params: all of the policy's parameters in float32, which are donated.
    Returns:
        All parameters after the last step, and the last losses, in nats per token.
    Raises:
        ValueError: the demonstrations have changed since the stage began, or a state cannot be read or written.
        FloatingPointError: a loss or gradient that is not finite.
    """
    config = setup.config
    shown = setup.demonstrations
    settings = setup.config.warm_start
    decoder = setup.policy.decoder
    folder = Path(config.output) / FOLDER
    steps = settings.steps
    chunk = config.model.logprob_chunk
    optimizer = make_optimizer(OptimizerConfig())
    rates = supervised_rates(settings)
    algorithm = build_algorithm("reinforce", {"advantage": {"name": "raw_reward"}})
    recipe = Recipe(unrolled_for_training(decoder), algorithm, optimizer, Sampling(), chunk)
    params, constant = split_params(params, config.model)
    frozen = in_compute_dtype(decoder, constant, copy=False)
    checkpoint.set_damaged_aside(folder / "checkpoints")
    manager = checkpoint.open_checkpoints(folder / "checkpoints")
    with contextlib.closing(manager):
        first = manager.latest_step()
        totals = {"demonstrations": shown.digest, "metrics": None, "losses": {}}
        trained = TrainState(params, ()) if first == steps else first_state(optimizer, params)
        del params
        if first is not None:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, trained)
            jax.tree.map(lambda leaf: leaf.delete(), trained)  # the restored arrays need its memory
            state = checkpoint.restore(manager, like, {})
            trained = state.trained
            totals = state.totals
            if totals["demonstrations"] != shown.digest:
                raise ValueError(
                    f"warm_start.demonstrations = {config.demonstrations!r}: the chats or their tokens have changed"
                    f" since this run began; restore them, or give another output than {config.output!r}"
                )
            logger.info("the warm start continues after step %d of %d", first, steps)

        def with_held_out_loss(row: dict[str, Any]) -> dict[str, Any]:
            total = 0.0
            tokens = 0
            size = settings.batch_size
            params = combine(trained.params, frozen)
            for start in range(0, len(shown.held_out), size):
                batch = pad(shown.held_out[start : start + size], shown.shape, logprobs=False)
                logprobs = score(decoder, params, batch, Sampling(), chunk)
                total -= logprobs[batch.completion_mask].sum(dtype=np.float64).item()
                tokens += int(batch.completion_mask.sum())
            return row | ({"held_out_loss": total / tokens} if tokens else {})

        options = {"manager": manager, "remedy": "Lower warm_start.learning_rate"}
        log = MetricsWriter(folder, -1 if first is None else first, totals["metrics"], **options)
        with log, step_bar("warm start", steps, initial=first or 0) as bar:
            if first is None:
                log.write(with_held_out_loss({"step": 0}))
            for step in range((first or 0) + 1, steps + 1):
                chosen = batch_indices(len(shown.train), settings.batch_size, step, config.seed)
                batch = pad([shown.train[index] for index in chosen], shown.shape, logprobs=False)
                layout = packed_layout(decoder, batch, config.training.tokens_per_micro_batch)
                key = jax.random.key(config.seed)  # this algorithm does not read it
                arrays = put_rows(batch)
                numbers = {"learning_rate": rates[step - 1], "clip_norm": 1.0}
                trained, measured, _ = update(
                    trained,
                    arrays,
                    layout,
                    UpdateContext(frozen, key, hyperparameters={"optimizer": numbers}),
                    recipe=recipe,
                )
                log.settle()  # the previous step's
                row = {"step": step, "tokens": int(batch.completion_mask.sum())}
                row |= {name: measured[name] for name in ("loss", "gradient_norm", "update_norm")}
                saves = step % settings.every == 0 or step == steps
                if saves:
                    row = with_held_out_loss(log.read(row))
                    bar.set_postfix({name: f"{row[name]:.3f}" for name in _LOSSES if name in row}, refresh=False)
                log.hold(row)
                bar.update()
                if saves:
                    log.settle()
                    totals |= {"metrics": log.written}
                    totals |= {"losses": {f"{FOLDER}/{name}": row[name] for name in _LOSSES if name in row}}
                    # The last state needs no optimizer state.
                    trained = TrainState(trained.params, ()) if step == steps else trained
                    state = State(step, trained, None, step, Queue(), {}, totals)
                    checkpoint.save(manager, state, TrainingConfig(keep_checkpoints=1))
    return combine(trained.params, constant), totals["losses"]
