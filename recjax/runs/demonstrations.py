"""The supervised stage of a run: the loop of every run, on demonstrations, with cross-entropy as its loss.

REINFORCE with a reward of 1 is maximum likelihood.
"""

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Bool

from recjax.config import (
    AlgorithmConfig,
    Config,
    EvaluationConfig,
    ExperienceConfig,
    OptimizerConfig,
    RegimeConfig,
    RolloutConfig,
    TrainingConfig,
)
from recjax.experience.batch import Batch, pad
from recjax.experience.group import Group
from recjax.experience.layout import Layout, packed_layout, score
from recjax.experience.queue import Queue
from recjax.logs.metrics import MetricsWriter, read_metrics, step_bar
from recjax.models.trainable import combine, split_params
from recjax.runs import checkpoint
from recjax.runs.checkpoint import Saver
from recjax.runs.lock import NAME, RunLock
from recjax.runs.spec import check_data
from recjax.runs.warm_start import FOLDER
from recjax.runtime.clocks import PhaseSeconds
from recjax.sources.setup import Demonstrations, Setup
from recjax.sources.stored import StoreSource
from recjax.tasks.prompts import batch_indices
from recjax.training import loop
from recjax.training.evaluation import HeldOut
from recjax.training.learner import Learner
from recjax.training.run import Run, State, Update
from recjax.training.update import TrainState

logger = logging.getLogger(__name__)


def train_on_demonstrations(
    setup: Setup, params: dict, data: dict[str, str], stopping: Sequence[int] = ()
) -> tuple[dict, dict[str, float]]:
    """Trains on the demonstrations of a run, in a folder of their own in the run folder.

    A finished stage is read from its folder, and an interrupted one resumes from its newest checkpoint.

    Args:
        params: all of the policy's parameters in float32, which are donated.
        data: digests of the run's data; see `data_digests`.
        stopping: numbers of the received signals that stop the run.
    Returns:
        All parameters after the last step, and the last losses, in nats per token.
    Raises:
        UserError: the data have changed since the stage began, or a state cannot be read or written.
        BadStep, Preempted: see `loop.train_steps`.
    """
    config = _stage_config(setup.config)
    folder = Path(config.output)
    assert setup.demonstrations is not None
    learner = _SupervisedLearner(setup.demonstrations)
    held_out = HeldOut(setup.held_out, setup.grading, setup.agents)
    _, constant = split_params(params, config.model)
    checkpoint.set_damaged_aside(folder / "checkpoints")
    with contextlib.closing(checkpoint.open_checkpoints(folder / "checkpoints")) as manager:
        first = manager.latest_step()
        stage = setup._replace(config=config)
        trained = learner.begin(config, setup.policy, params, held_out)
        state = State(
            step=0,
            trained=trained,
            behavior_params=None,
            version=0,
            queue=Queue(),
            source={},
            totals={"data": data, "tokens": 0},
        )
        del trained
        del params
        if first is not None:
            check_data(setup.config, checkpoint.newest_totals(manager).get("data", {}), data)
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, learner.kept(state.trained, first))
            jax.tree.map(lambda leaf: leaf.delete(), state.trained)  # the restored arrays need its memory
            state = checkpoint.restore(manager, like, {})
            logger.info("the warm start continues after step %d of %d", first, config.training.steps)
        phases = PhaseSeconds()
        last_row = -1  # a new stage keeps no rows of metrics
        if first is not None:
            last_row = first
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(step_bar("warm start", config.training.steps, initial=max(last_row, 0)))
            log = stack.enter_context(
                _Losses(
                    folder,
                    keep_through=last_row,
                    written=state.totals.get("metrics"),
                    bar=bar,
                    manager=manager,
                    remedy="Lower warm_start.learning_rate",
                )
            )
            run = Run(
                config=config,
                algorithm=config.algorithm.build(),
                shape=setup.demonstrations.shape,
                settings=stage.settings,
                part_weights=None,
                failures={},
                source=demonstration_source(stage),
                learner=learner,
                log=log,
                saver=Saver(config, manager, RunLock(folder / NAME, None), log, phases),
                phase=phases.phase,
                device=phases.device,
                after_step=lambda step: None,
                stopping=stopping,
            )
            state = loop.train_steps(run, state)
    rows = read_metrics(folder / "metrics.jsonl")
    last = {}
    if rows:
        last = rows[-1]
    losses = {f"{FOLDER}/{name}": last[name] for name in ("loss", "held_out_loss") if name in last}
    return combine(state.trained.params, constant), losses


def _stage_config(config: Config) -> Config:
    """The config of the supervised stage of a run: all batches come from a store at rest, the demonstrations."""
    warm_start = config.warm_start
    assert warm_start is not None
    training = TrainingConfig(
        steps=warm_start.steps,
        checkpoint_every=warm_start.every,
        keep_checkpoints=1,
        tokens_per_micro_batch=config.training.tokens_per_micro_batch,
    )
    stage = {
        "output": f"{config.output}/{FOLDER}",
        "model": config.model.model_copy(update={"run": None, "teacher": None, "reference": None}),
        "algorithm": AlgorithmConfig(preset="reinforce", advantage={"name": "raw_reward"}),
        "optimizer": OptimizerConfig(learning_rate=warm_start.learning_rate, schedule="cosine"),
        "rollout": RolloutConfig(prompts_per_step=warm_start.batch_size),
        "regime": RegimeConfig(),
        "experience": ExperienceConfig(store=warm_start.demonstrations, missing_logprobs="unneeded"),
        "evaluation": EvaluationConfig(every=warm_start.every),
        "training": training,
    }
    return config.model_copy(update=stage)


def demonstration_source(setup: Setup) -> StoreSource:
    """The demonstrations of a step make up its batch, as groups of a store at rest do."""
    demonstrations = setup.demonstrations
    warm_start = setup.config.warm_start
    assert demonstrations is not None and warm_start is not None
    shown = demonstrations.train
    size = warm_start.batch_size

    def shown_at(state: State, groups: list[Group], step: int) -> list[Group]:
        return [shown[index] for index in batch_indices(len(shown), size, step, setup.config.seed)]

    return StoreSource(shown_at)


class _SupervisedLearner(Learner):
    """Evaluates the loss on the held-out demonstrations instead of sampled answers."""

    def __init__(self, demonstrations: Demonstrations):
        super().__init__()
        self._demonstrations = demonstrations

    def kept(self, trained: TrainState, step: int) -> TrainState:
        """The last checkpoint is three times smaller, since no step follows that needs an optimizer state."""
        if step == self._config.training.steps:
            return trained._replace(optimizer_state=())
        return trained

    def update(
        self, trained: TrainState, batch: Batch, layout: Layout, step: int, proximal_logprobs: Any = None
    ) -> tuple:
        trained, *measured = super().update(trained, batch, layout, step, proximal_logprobs)
        return self.kept(trained, step), *measured

    def layout(self, batch: Batch, rows: Bool[np.ndarray, " batch"] | None, doublings: int | None) -> Layout:
        return packed_layout(self._recipe.decoder, batch, self._config.training.tokens_per_micro_batch)

    def evaluate(self, state: State) -> Any:
        held_out = self._demonstrations.held_out
        shape = self._demonstrations.shape
        recipe = self._recipe
        params = self.current_params(state)
        total = 0.0
        tokens = 0
        for start in range(0, len(held_out), shape.prompts):
            batch = pad(held_out[start : start + shape.prompts], shape, logprobs=False)
            logprobs = score(self._policy.decoder, params, batch, recipe.sampling, recipe.chunk)
            total -= logprobs[batch.completion_mask].sum(dtype=np.float64).item()
            tokens += int(batch.completion_mask.sum())
        if not tokens:
            return {}
        return {"held_out_loss": total / tokens}


class _Losses(MetricsWriter):
    """The log of the stage."""

    def begin(self, state: State, measured: dict[str, float]) -> None:
        self.write({"step": 0, **measured})

    def row(self, update: Update, state: State) -> dict[str, Any]:
        measured = {name: update.metrics[name] for name in ("loss", "gradient_norm", "update_norm")}
        return {"step": update.step, "tokens": int(update.batch.completion_mask.sum()), **measured}

    def evaluation(self, evaluation: dict[str, float], step: int, name: str) -> dict[str, float]:
        return evaluation

    def hold(self, row: dict[str, Any], state: State | None = None) -> None:
        super().hold(row)
