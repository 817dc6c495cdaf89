"""A generator's own process: the actor that Ray runs there, and the function that samples its batches."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from recjax.agents.agents import Agents
from recjax.config import Config
from recjax.experience.group import Grade, Group
from recjax.hub.policy import Policy
from recjax.models.trainable import combine
from recjax.rewards.pool import Grading
from recjax.rewards.reward import MixedReward, Reward
from recjax.rollout.requests import Weights
from recjax.runtime.clocks import PhaseSeconds
from recjax.sources.sampling import BatchSampler
from recjax.tasks.prompts import Prompts

# Returns the latest trained parameters that have arrived, with their version; None before the first ones.
Newest = Callable[[], Weights | None]
# Samples a batch: from trained parameters, their version, the batch's number and `Newest` to the batch.
Sample = Callable[[dict, int, int, Newest], Any]
# Opens the context in which a generator samples.
OpenGenerator = Callable[[], AbstractContextManager[Sample]]


class Generator:
    """The actor in a generator's process: it creates the sampling function once and calls it from two threads."""

    def __init__(self, open_generator: OpenGenerator):
        """Enters the context `open_generator()`, which lasts as long as the process."""
        self._context = contextlib.ExitStack()
        self._sample = self._context.enter_context(open_generator())
        self._newest: Weights | None = None

    def sample(self, params: dict, version: int, number: int) -> Any:
        """Samples the batch with this number; its first tokens, at least, come from the given weights.

        Args:
            params: trained parameters.
        """
        return self._sample(params, version, number, lambda: self._newest)

    def replace_weights(self, params: dict, version: int) -> None:
        """Stores weights for tokens sampled from here on; ignores older weights, as calls may come in any order."""
        if self._newest is None or self._newest.version < version:
            self._newest = Weights(params, version)


@contextlib.contextmanager
def open_generator(
    config: Config,
    policy: Policy,
    prompts: Prompts,
    reward: Reward | MixedReward,
    frozen: dict,
    older_params: Callable[[Config, Policy, dict, dict], Callable[[int], dict]] | None = None,
) -> Iterator[Callable[[dict, int, int, Newest], tuple[list[Group], list[Grade]]]]:
    """Opens a generator's function: from trained parameters, version and batch number to the groups and their grades.

    It samples one batch at a time, during the grading of the previous batch, and takes new weights between engine
    steps.

    Args:
        frozen: parameters that are not trained, in the compute dtype.
        older_params: see `recjax.runs.policies.older_params`, for agents with frozen seats.
    """
    agents = None
    if config.task.agent:
        agents = Agents(config, policy)
    with contextlib.ExitStack() as stack:
        grading = stack.enter_context(Grading(config, reward))
        if agents:
            stack.enter_context(agents)
        frozen = jax.tree.map(jnp.asarray, frozen)
        sampler = BatchSampler(
            config=config, policy=policy, prompts=prompts, grading=grading, phases=PhaseSeconds(), agents=agents
        )
        one_at_a_time = threading.Lock()

        def all_params(trained: dict) -> dict:
            return combine(jax.tree.map(jnp.asarray, trained), frozen)

        def sample(trained: dict, version: int, number: int, newest: Newest) -> tuple[list[Group], list[Grade]]:
            latest = version

            def newer() -> Weights | None:
                nonlocal latest
                weights = newest()
                if weights is None or weights.version <= latest:
                    return None
                latest = weights.version
                return Weights(all_params(weights.params), latest)

            # The next batch waits here; the grading below needs no device and overlaps with it.
            with one_at_a_time:
                if agents and older_params:
                    agents.older_params = older_params(config, policy, frozen, trained)
                groups, grades = sampler.sample(all_params(trained), version, number, newer=newer)
            return groups, grades.result()

        yield sample
