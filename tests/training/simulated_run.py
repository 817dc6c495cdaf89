"""The rounds of a run without a model: what is sampled by which weights and trained on when."""

import random
from collections.abc import Callable, Iterator

import numpy as np

from recjax.config import Config
from recjax.experience.group import Completion, Grade, Group, Row
from recjax.experience.queue import Queue
from recjax.logs.log import queue_metrics
from recjax.rewards.pool import Grading
from recjax.rewards.reward import Reward
from recjax.runtime.clocks import PhaseSeconds
from recjax.sources.local import LocalSampler
from recjax.sources.policy import PolicySource
from recjax.sources.setup import Setup
from recjax.training import loop
from recjax.training.run import Run, Source, State, Update
from recjax.training.update import TrainState
from tests.training.counting import CountingLearner


def batch_of(number: int, version: int, chance: random.Random) -> tuple[list[Group], list[Grade]]:
    """Four groups of two completions of one token, some of them right, and their grades."""
    empty = np.zeros(0, np.int32)
    row = Row(empty, np.zeros(1, np.int32), np.ones(1, bool), None)
    groups = [
        Group(
            f"{number:06d}/{group:05d}",
            empty,
            tuple(
                Completion(f"{number:06d}/{2 * group + i:05d}", "policy", "", (row,), None, version, False)
                for i in range(2)
            ),
            "",
        )
        for group in range(4)
    ]
    return groups, [Grade(float(chance.random() < 0.5)) for _ in range(8)]


def started(config: Config, source_of: Callable[[Setup, CountingLearner], Source]) -> tuple[Setup, Run, State]:
    """A run without a model: what it has read, what its loop works with, and its first state."""
    setup = Setup(config, None, None, None, Grading(config, Reward("none", len, False, {})), PhaseSeconds())
    learner = CountingLearner()
    source = source_of(setup, learner)
    phase = setup.phases.phase
    run = Run(
        config=config,
        algorithm=config.algorithm.build(),
        shape=None,
        settings=setup.settings,
        part_weights=None,
        failures=setup.failures,
        source=source,
        learner=learner,
        log=None,
        saver=None,
        device=setup.phases.device,
        phase=phase,
        after_step=lambda steps: None,
        stopping=(),
    )
    return setup, run, State(0, TrainState({}, ()), None, 0, Queue(), {}, {})


def simulated(config: Config, generators=None) -> Iterator[tuple[int, list[Group], dict, list[int]]]:
    """Each step, the groups that it trains on, what it logs, and the numbers of the batches sampled in it."""
    chance, numbers = random.Random(0), []

    def sample(sampler, params, version, number):
        numbers.append(number)
        return batch_of(number, version, chance)

    def source_of(setup, learner):
        return PolicySource(setup, learner, generators or LocalSampler(setup.sampler, learner.frozen, sample))

    setup, run, state = started(config, source_of)
    for step in range(1, config.training.steps + 1, config.training.updates):
        before = state.queue
        state = loop.next_groups(run, state, step)
        update = Update(step, state.groups, None, None, None, {}, None, before)
        yield step, state.groups, queue_metrics(setup, run.source, update, state), numbers[:]
        numbers.clear()
        state = state._replace(groups=())
