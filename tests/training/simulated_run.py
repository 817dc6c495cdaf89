"""The rounds of a run without a model: what is sampled by which weights and trained on when."""

import random
from collections.abc import Iterator

import numpy as np

from recjax.config import Config
from recjax.experience.group import Completion, Grade, Group, Row
from recjax.experience.queue import Queue
from recjax.training import loop
from recjax.training.metrics import PhaseSeconds
from recjax.training.run import Run, State
from recjax.training.sources import GeneratorSource, PolicySource, Source
from recjax.training.update import TrainState
from tests.training.counting import CountingLearner


class Grading:
    """Stands for a reward that is not graded in worker processes."""

    class reward:
        per_row, remote = False, None


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


def started(config: Config, source: Source) -> tuple[Run, State]:
    """A run without a model, and its first state."""
    run = Run(config, None, None, None, Grading, PhaseSeconds())
    return run._replace(learner=CountingLearner(), source=source), State(
        0, TrainState({}, ()), None, 0, Queue(), {}, {}
    )


def simulated(config: Config, generators=None) -> Iterator[tuple[int, list[Group], dict, list[int]]]:
    """Each step, the groups that it trains on, what it logs, and the numbers of the batches sampled in it."""
    chance, numbers = random.Random(0), []

    def sample_batch(run, params, version, number):
        numbers.append(number)
        return batch_of(number, version, chance)

    run, state = started(config, GeneratorSource(generators) if generators else PolicySource(sample_batch))
    for step in range(1, config.training.steps + 1, config.training.updates):
        before = state.queue
        state, groups = loop.next_groups(run, state, step)
        yield step, groups, loop.queue_metrics(run, before, state.queue, groups, step), numbers[:]
        numbers.clear()
