"""The settings and objects that the loop uses (`Run`), and the content of a checkpoint (`State`).

The classes here name the methods that the loop calls, and no others. `recjax.runs.start` fills a `Run` with the
objects of the package. A test, or a program with its own loop, may pass other objects.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Array, Bool, Float

from recjax.algorithms.algorithm import Algorithm
from recjax.config import Config
from recjax.experience.batch import Batch, Shape
from recjax.experience.group import Group
from recjax.experience.layout import Layout
from recjax.experience.queue import Arrival, Queue, Settings
from recjax.runtime.clocks import DeviceClock
from recjax.training.update import TokenResults, TrainState


class State(NamedTuple):
    """The content of a checkpoint. Data position and random keys follow from the seed and `step`.

    step: optimizer steps made.
    trained: the trained parameters and the optimizer's state.
    behavior_params: the sampler's copy of earlier parameters, in the compute dtype; None: the sampler uses the trained
        parameters, or never samples.
    version: optimizer steps of the sampler's weights.
    queue: sampled groups that the run may still train on.
    source: JSON data of the run's source.
    groups: groups of the batch that the run trains on; between steps, of a batch that it makes further updates of.
    proximal_logprobs: log-probs of that batch before its first update; None if the algorithm reads none.
    totals: the run's seconds by phase, wall seconds and tokens; `Layout.doublings` of its updates; a digest of the
        store; size and checksum of metrics.jsonl; the config; if the run follows a store, the run's unique id.
    """

    step: int
    trained: TrainState
    behavior_params: dict | None
    version: int
    queue: Queue
    source: dict[str, Any]
    totals: dict[str, Any]
    groups: tuple[Group, ...] = ()
    proximal_logprobs: Float[Array, "batch time"] | None = None


class Source(Protocol):
    """Gives groups to the queue; a context for the time of the run. `recjax.sources` has the sources of the package.

    Attributes:
        endless: True if a step may wait for groups without a limit, until a signal stops the run.
    """

    endless: bool

    def __enter__(self) -> Any:
        """Opens what the source needs, such as its sampler."""

    def __exit__(self, *exception: object) -> Any:
        """Closes what the source has opened."""

    def restore(self, state: State) -> None:
        """Continues after the groups that the state's queue has. Called once, when the source is open.

        Args:
            state: its `source` is the result of `Source.state` at the checkpoint, or empty in a new run.
        """

    def begin_step(self, state: State) -> None:
        """Called before the first round of each step, with the sampler's weights of the step."""

    def poll(self, state: State, step: int, wait: bool) -> list[Arrival]:
        """Returns the groups that arrive in a round.

        Args:
            step: number of the next training step.
            wait: False in the first poll of a round, True in the second, which comes if there are too few groups.
        """
        ...

    def must_wait(self, queue: Queue, step: int) -> bool:
        """Returns True if groups that are still to come would be too stale after a step on `queue` at this time."""
        ...

    def completed(self, state: State, groups: list[Group], step: int) -> list[Group]:
        """Returns a step's batch: the groups from the queue in order, then groups that join without waiting there.

        The queue keeps a group in the form that this method returns, if later steps train on the group again.
        """
        ...

    def record(self, batches: Sequence[list[Group]]) -> None:
        """Takes graded batches for the store of a run that records."""

    def write_record(self) -> None:
        """Writes the batches that `record` has taken; called while the device computes, and before each checkpoint."""

    def state(self) -> dict[str, Any]:
        """Returns JSON data for the checkpoint, from which `restore` continues."""
        ...

    def metrics(self, queue: Queue, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Returns metrics of a step that trains on `groups`."""
        ...


class Computes(Protocol):
    """The methods of a learner that the loop calls; see `recjax.training.learner.Learner`."""

    def behavior_params(self, state: State, copy: bool = False) -> dict:
        """Returns the sampler's parameters; with `copy`, none of the arrays that an update will donate."""
        ...

    def layout(self, batch: Batch, rows: Bool[np.ndarray, " batch"] | None, doublings: int | None) -> Layout:
        """Returns the micro-batches of an update.

        Args:
            rows: the minibatch's rows; None for the complete batch.
            doublings: `Layout.doublings` of the run's earlier updates; None before the first.
        """
        ...

    def proximal_logprobs(
        self, trained: TrainState, batch: Batch, layouts: Iterable[Layout]
    ) -> Float[Array, "batch time"] | None:
        """Returns the log-probs of a batch before its first update; None if the algorithm does not read them."""
        ...

    def update(
        self,
        trained: TrainState,
        batch: Batch,
        layout: Layout,
        step: int,
        proximal_logprobs: Float[Array, "batch time"] | None = None,
    ) -> tuple[TrainState, dict, TokenResults]:
        """Makes one optimizer step; returns the new state, metrics and per-token results.

        The device may still compute them after the call returns. The given state is donated.
        """
        ...

    def evaluate(self, state: State) -> Any:
        """Evaluates the trained policy; `Logs.evaluation` takes the result."""
        ...


class Update(NamedTuple):
    """A step of the optimizer, for the log.

    step: its number.
    groups: groups of the batch.
    batch: the groups, padded.
    learned_from: the batch as the update reads it.
    layout: the micro-batches.
    metrics: the update's metrics; the device may still compute them.
    tokens: the update's per-token results.
    queue_before: the queue before the groups left it, in the first update of the batch; None in later ones.
    """

    step: int
    groups: tuple[Group, ...]
    batch: Batch
    learned_from: Batch
    layout: Layout
    metrics: dict
    tokens: TokenResults
    queue_before: Queue | None = None


class Logs(Protocol):
    """The methods of a run's log that the loop calls; see `recjax.logs.log.RunLog`."""

    def begin(self, state: State, measured: dict[str, float]) -> None:
        """Writes the row of step 0.

        Args:
            measured: metrics of the evaluation before the first step.
        """

    def row(self, update: Update, state: State) -> dict[str, Any]:
        """Returns the metrics of a step, some of which the device may still compute."""
        ...

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Waits for the metrics of a row; returns the row with numbers, or raises if they are not finite."""
        ...

    def evaluation(self, evaluation: Any, step: int, name: str) -> dict[str, float]:
        """Returns the metrics of an evaluation, and saves its completions under a name."""
        ...

    def hold(self, row: dict[str, Any], state: State) -> None:
        """Takes the complete row of a step, to write it when the device has computed its numbers."""

    def settle(self) -> None:
        """Writes the row that `hold` has taken, if there is one."""


class Saves(Protocol):
    """The members of a run folder that the loop uses; see `recjax.runs.checkpoint.Saver`."""

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint; None before the first."""
        ...

    def check(self) -> None:
        """Raises if this process does not hold the run folder any more."""

    def save(self, state: State) -> State:
        """Writes a checkpoint of a state; returns the state that the checkpoint contains."""
        ...


class Run(NamedTuple):
    """The settings and objects that the loop uses; none of them changes during a run.

    config: the config.
    algorithm: its algorithm.
    shape: the shape of its batches.
    settings: the settings of the queue.
    part_weights: weights of the reward's parts, if the algorithm reads the parts.
    failures: see `Setup.failures`.
    source: gives groups to the queue.
    learner: computes on the devices.
    log: metrics, saved completions and samples.
    saver: the lock and the checkpoints of the run folder.
    device: clock of the seconds without work for the devices.
    phase: context manager that adds the seconds of a `with` block to a phase's name.
    after_step: called when a step has ended, with its number in this process, from 0.
    stopping: numbers of the received signals that stop the run.
    teacher_prompts: function that adds a teacher's prompts to a batch of groups; None if `task.teacher_template` is not
        set.
    """

    config: Config
    algorithm: Algorithm
    shape: Shape
    settings: Settings
    # Fields for which the config says too little: they depend on the task and its reward.
    part_weights: Mapping[str, float] | None
    failures: Mapping[str, Sequence[str]]
    source: Source
    learner: Computes
    log: Logs
    saver: Saves
    device: DeviceClock
    phase: Callable[[str], AbstractContextManager]
    after_step: Callable[[int], None]
    stopping: Sequence[int]
    teacher_prompts: Callable[[Batch, Sequence[Group]], Batch] | None = None
