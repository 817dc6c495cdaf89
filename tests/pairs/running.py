"""Runs a config of the array, and keeps what its steps read and gave for the relations."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from recjax.config import Config, MeshConfig
from recjax.experience.batch import Batch
from recjax.experience.group import Group
from recjax.experience.layout import Layout
from recjax.hub.policy import policy_alone
from recjax.logs.metrics import read_metrics
from recjax.models.trainable import combine
from recjax.runs import start
from recjax.runs.resolve import resolve_config
from recjax.runs.sources import source_of
from recjax.serve import pushed_reader
from recjax.sources import followed
from recjax.sources.generators import Generators
from recjax.sources.policy import PolicySource
from recjax.tasks.loading import load_task
from recjax.tasks.problems import characters
from recjax.training import loop
from recjax.training.learner import Learner
from recjax.training.mesh import make_mesh
from recjax.training.run import Run, State
from recjax.training.update import TrainState
from tests.serving.some_server import listening
from tests.tiny import params_of
from tests.training.tiny_run import without_figures

MOST_IDLE_POLLS = 40  # of a followed store that does not grow


class Stuck(Exception):
    """A step that waits for groups that will never come."""


class Step(NamedTuple):
    """An update: its number, what it read and what it gave, on the host.

    before: the state before the update.
    proximal: log-probs before the first update of the batch, if the algorithm reads them.
    logprobs: log-probs before the update.
    """

    number: int
    before: TrainState
    batch: Batch
    layout: Layout
    proximal: np.ndarray | None
    metrics: dict
    logprobs: np.ndarray


class Finished(NamedTuple):
    """A run that has ended.

    arrived: groups that arrived at the queue.
    taken: groups of each update's batch.
    recorded: groups that the run gave to its record.
    """

    config: Config
    rows: list[dict]
    steps: list[Step]
    arrived: list[Group]
    taken: dict[int, list[Group]]
    recorded: list[Group]
    run: Run
    state: State
    learner: "Watched"
    digests: dict[str, np.ndarray]


class Watched(Learner):
    """A learner that keeps what it reads and gives, and may stop in place of an update."""

    def __init__(self, kill_at: int | None = None):
        """Takes the number of the update of this call in whose place KeyboardInterrupt is raised."""
        super().__init__()
        self.steps: list[Step] = []
        self._kill_at = kill_at

    def begin(self, *arguments, **named):
        """The first state of `Learner`, whose sharding it keeps."""
        state = super().begin(*arguments, **named)
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)
        return state

    def update(self, trained, batch, layout, step, proximal_logprobs=None):
        """The update of `Learner`."""
        if len(self.steps) + 1 == self._kill_at:
            raise KeyboardInterrupt
        before = jax.device_get(trained)
        result = super().update(trained, batch, layout, step, proximal_logprobs)
        _, metrics, tokens = result
        proximal = None if proximal_logprobs is None else jax.device_get(proximal_logprobs)
        seen = (before, batch, layout, proximal, jax.device_get(metrics), jax.device_get(tokens.logprobs))
        self.steps.append(Step(step, *seen))
        return result


class Scripted(Generators):
    """Generators without processes: a batch is sampled when it is issued, and arrives in an order of the seed."""

    def __init__(self, setup: Any, learner: Learner):
        super().__init__(setup.config.regime, contextlib.nullcontext)
        self._sampler = setup.sampler
        self._frozen = learner.frozen
        self._random = random.Random(setup.config.seed)
        self._batches: dict[int, Any] = {}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    @property
    def counts(self):
        """No metrics."""
        return {}

    def offer_weights(self, weights, version):
        """Keeps a copy."""
        self._version = version
        self._weights = jax.tree.map(lambda leaf: leaf.copy(), weights())

    def issue(self, number, rates=None):
        """Samples the batch."""
        self.in_flight[number] = self._version
        groups, grades = self._sampler.sample(combine(self._weights, self._frozen), self._version, number)
        self._batches[number] = groups, grades.result()

    def receive(self, wait):
        """Some of the batches; at least one if the caller waits."""
        chosen = [number for number in self.in_flight if self._random.random() < 0.5]
        if wait and not chosen:
            chosen = self._random.sample(list(self.in_flight), min(1, len(self.in_flight)))
        self._random.shuffle(chosen)
        for number in chosen:
            del self.in_flight[number]
        return [(number, self._batches.pop(number)) for number in chosen]


class Seen:
    """What a source gives, in the order in which it gives it."""

    def __init__(self):
        self.arrived: list[Group] = []
        self.taken: dict[int, list[Group]] = {}
        self.recorded: list[Group] = []
        self.idle = 0
        self.source: Any = None

    def source_of(self, setup: Any, learner: Learner) -> Any:
        """The source of a run, whose methods also write to this object."""
        is_scripted = setup.config.regime.mode == "async" and not setup.config.rollout.engine
        if is_scripted:
            source = PolicySource(setup, learner, Scripted(setup, learner))
        else:
            source = source_of(setup, learner)
        poll, completed, record = source.poll, source.completed, source.record

        def polled(state, step, wait):
            arrivals = poll(state, step, wait)
            groups = [group for arrival in arrivals for group in arrival.groups]
            self.arrived += groups
            self.idle = 0 if groups else self.idle + wait
            if self.idle > MOST_IDLE_POLLS:
                raise Stuck(f"step {step} has waited for {self.idle} rounds without any group")
            return arrivals

        def joined(state, groups, step):
            groups = completed(state, groups, step)
            self.taken[step] = list(groups)
            return groups

        def recorded(batches):
            self.recorded += [group for batch in batches for group in batch]
            record(batches)

        source.poll, source.completed, source.record = polled, joined, recorded
        self.source = source
        return source


@contextlib.contextmanager
def mesh_of(config: Config) -> Iterator[None]:
    """The mesh that the config asks for, of one device unless it asks for several."""
    sizes = [config.mesh.data, config.mesh.fsdp, config.mesh.expert, config.mesh.tensor]
    count = int(np.prod([max(size, 1) for size in sizes]))
    with jax.set_mesh(make_mesh(config.mesh if count > 1 else MeshConfig(), jax.devices()[:count])):
        yield


@contextlib.contextmanager
def served(config: Config) -> Iterator[Config]:
    """The config with the address of a server of its own, if another server samples."""
    if config.rollout.engine is None:
        yield config
        return
    task = load_task(config)
    policy = policy_alone(resolve_config(config, False), characters([*task.train, *task.evaluation]))
    folder = Path(config.output).parent / "pushed"
    folder.mkdir(exist_ok=True)
    params = params_of(policy.decoder.config, 5)
    with listening(None, policy=policy, params=params, pushed=pushed_reader(folder, policy)) as (port, _):
        address = {"rollout.engine.url": f"http://127.0.0.1:{port}", "rollout.engine.folder": str(folder)}
        yield config.replace(**address)


def finished(config: Config, kill_at: int | None = None, learner: Watched | None = None) -> Finished:
    """Runs a config to its end, or to a kill in place of an update.

    Raises:
        KeyboardInterrupt: in place of update number `kill_at` of this call.
        UserError: the config cannot be run.
        Stuck: a step waits for ever.
    """
    seen = Seen()
    learner = learner or Watched(kill_at)
    last: list[Any] = []
    train_steps = loop.train_steps

    def kept(run: Run, state: State) -> State:
        state = train_steps(run, state)
        last[:] = run, state  # a warm start on demonstrations trains before the run itself
        return state

    with contextlib.ExitStack() as stack:
        stack.enter_context(mesh_of(config))
        stack.enter_context(without_figures())
        stack.enter_context(mock.patch.object(loop, "train_steps", kept))
        stack.enter_context(mock.patch.object(followed, "POLL_SECONDS", 0.001))
        config = stack.enter_context(served(config))
        start.train(config, sources=seen.source_of, learner=learner)
        run, state = last
        digests = jax.tree.map(np.asarray, jax.device_get(state.trained))
        state = state._replace(trained=digests)
    rows = read_metrics(Path(config.output) / "metrics.jsonl")
    return Finished(config, rows, learner.steps, seen.arrived, seen.taken, seen.recorded, run, state, learner, digests)
