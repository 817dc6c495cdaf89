"""Processes that sample numbered batches in parallel with the trainer, as Ray actors; they may return any batch.

Only asynchronous runs import Ray, when they begin.
"""

import contextlib
import importlib.util
import logging
import os
import secrets
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recjax.agents.agents import Agents
from recjax.config import Config, RegimeConfig
from recjax.errors import UserError
from recjax.experience.group import Grade, Group
from recjax.hub.policy import Policy
from recjax.models.placement import params_on_host
from recjax.models.trainable import combine
from recjax.rewards.pool import Grading
from recjax.rewards.reward import MixedReward, Reward
from recjax.rollout.requests import Weights
from recjax.runtime import hosts
from recjax.runtime.clocks import PhaseSeconds
from recjax.sources.sampling import BatchSampler
from recjax.tasks.prompts import Prompts

AT_A_TIME = 2  # batches per generator: one is sampled while the second is graded or waits
logger = logging.getLogger(__name__)

RESTARTS = 5  # restarts of one generator in a row, without a batch in between, before the run ends
_PLACED_SECONDS = 3  # within which Ray finds room for a generator if there is any


# Opens a context that yields a function from (number, version, weights, newest) to a batch; newest() returns the latest
# version and weights that have arrived, or None.
Sample = Callable[[int, int, dict, Callable[[], tuple[int, dict] | None]], Any]
OpenGenerator = Callable[[], AbstractContextManager[Sample]]


class Assignment(NamedTuple):
    """A batch being sampled: its number, the weights' version, and the generator's index, from 0."""

    number: int
    version: int
    generator: int


class Generator:
    """The actor in a generator's process: it creates the sampling function once and calls it from two threads."""

    def __init__(self, open_generator: OpenGenerator):
        """Enters the context `open_generator()`, which lasts as long as the process."""
        self._context = contextlib.ExitStack()
        self._sample = self._context.enter_context(open_generator())
        self._newest: tuple[int, dict] | None = None

    def sample(self, number: int, version: int, weights: dict) -> Any:
        """Samples the batch with this number, using the given weights for the whole batch or for the beginning."""
        return self._sample(number, version, weights, lambda: self._newest)

    def replace_weights(self, version: int, weights: dict) -> None:
        """Stores weights for tokens sampled from here on; ignores older weights, as calls may come in any order."""
        if self._newest is None or self._newest[0] < version:
            self._newest = version, weights


_ONLY_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's variable; 0 for listening on loopback alone


def keep_ray_on_loopback() -> None:
    """Sets the variables that Ray reads when it is imported, so it must come before modules of the user that import it.

    With the first, Ray's processes listen only on loopback. Clients of Ray can run code, so a secret token keeps out
    other users of this machine.
    """
    if "ray" not in sys.modules:
        os.environ.setdefault(_ONLY_LOOPBACK, "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def require_ray(config: Config) -> None:
    """Refuses an asynchronous run without Ray; among several processes only the first needs Ray.

    Raises:
        UserError: with the command that installs Ray.
    """
    if config.regime.mode == "sync" or config.rollout.engine:
        return
    if config.regime.address is None:
        keep_ray_on_loopback()
    if hosts.any_says(hosts.is_first() and importlib.util.find_spec("ray") is None):
        raise UserError("regime.mode = 'async'", "needs Ray", 'pip install -e ".[async]"')


class Generators:
    """The generators of an asynchronous run: a `PolicySampler` that knows the batches of each generator.

    A generator that dies, or does not answer for `regime.generator_seconds`, is logged and restarted. It then samples
    its batches again with the newest weights. So every issued batch arrives exactly once. A generator for which the
    cluster has no room waits and gets no batches; all other generators sample them.

    All processes of a trainer make the same calls in the same order. Only the first process has Ray and the generators;
    all other processes receive its results, its errors and the state that decides which batches are issued next.

    Attributes:
        in_flight: see `PolicySampler`.
        restarts: number of restarts of generators.
    """

    def __init__(self, regime: RegimeConfig, open_generator: OpenGenerator):
        """Takes the function by which each generator gets its sampling function; that of the first process counts."""
        self._regime = regime
        self._open_generator = open_generator
        self._version: int | None = None
        self._actors: list[Any] = []
        self._places: list[Any] = []  # Ray's placement group of each generator, which reserves its CPU and GPU
        self._assigned: dict[Any, Assignment] = {}
        self._since = [0.0] * regime.generators
        self._failures = [0] * regime.generators
        self.in_flight: dict[int, int] = {}
        self.restarts = 0

    def __enter__(self) -> "Generators":
        """Connects to `regime.address`; if None, starts Ray on this machine unless this process already has Ray.

        Raises:
            UserError: no cluster answers at the address.
        """
        hosts.from_first(self._connect)
        return self

    def _connect(self) -> None:
        if self._regime.address is None:
            keep_ray_on_loopback()
        import ray

        self._ray = ray
        self._begun_here = not ray.is_initialized()
        if self._begun_here and self._regime.address is None and _ONLY_LOOPBACK not in os.environ:
            raise UserError(
                "regime.mode = 'async'",
                "ray was imported before recjax started it, and would listen on all interfaces without a token of"
                " this run",
                f"set the variables {_ONLY_LOOPBACK}=0, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before that import,"
                " import ray later, or call ray.init yourself",
            )
        if self._begun_here:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
            if (address := self._regime.address) is None:
                with warnings.catch_warnings():
                    # JAX warns about every fork, but this child only executes a program of Ray.
                    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
                    ray.init("local", num_cpus=self._regime.generators, include_dashboard=False, **quiet)
            else:
                try:
                    host, colon, port = address.rpartition(":")
                    if colon and "/" not in host:
                        # Checked first, because Ray itself would retry for minutes.
                        socket.create_connection((host, port), timeout=10).close()
                    ray.init(address, **quiet)
                except OSError as error:
                    message = f"regime.address = {address!r}: no Ray cluster answers there ({error})"
                    raise UserError(problem=message + "; start one with `ray start --head`, or remove it") from error

    def __exit__(self, *exception: object) -> None:
        """Ends the generators even while they sample, and shuts Ray down if this context started it."""
        if hosts.is_first() and self._begun_here:
            self._ray.shutdown()
        else:
            for actor in self._actors:
                self._ray.kill(actor)
            for group in self._places:
                self._ray.util.remove_placement_group(group)

    def _start(self) -> None:
        gpus = min(1.0, self._ray.cluster_resources().get("GPU", 0.0) / self._regime.generators)
        variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if gpus > 0 else {"JAX_PLATFORMS": "cpu", "NPROC": "1"}
        if self._regime.address is None:
            # Generators on this machine share the trainer's modules, such as a user's reward, and compiled programs.
            variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
            settings: Any = jax.config
            variables["JAX_COMPILATION_CACHE_DIR"] = settings.jax_compilation_cache_dir or ""
            shortest_compile = settings.jax_persistent_cache_min_compile_time_secs
            variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = str(shortest_compile)
        needs = {"CPU": 1.0} | ({"GPU": gpus} if gpus > 0 else {})
        self._options = {
            "num_cpus": 1,
            "num_gpus": gpus,
            "max_concurrency": AT_A_TIME + self._regime.swap_within,  # new weights arrive while batches are sampled
            "runtime_env": {"env_vars": variables},
        }
        self._opener = self._ray.put(self._open_generator)
        self._places = [self._ray.util.placement_group([needs]) for _ in range(self._regime.generators)]
        self._actors = [self._new_actor(group) for group in self._places]
        if not all(group.wait(_PLACED_SECONDS) for group in self._places):
            self._log_waiting()

    def _new_actor(self, place: Any) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(place)
        actor = self._ray.remote(Generator).options(scheduling_strategy=strategy, **self._options)
        return actor.remote(self._opener)

    def _placed(self) -> list[int]:
        """The generators for which the cluster has room."""
        states = [self._ray.util.placement_group_table(group)["state"] for group in self._places]
        return [generator for generator, state in enumerate(states) if state == "CREATED"]

    def _log_waiting(self) -> None:
        free = self._ray.available_resources()
        logger.warning(
            "the Ray cluster has room for %d of %d generators, which need a CPU and %g GPUs each; it has %g CPUs and %g"
            " GPUs free, and the other generators wait. `ray status` shows what it runs; add nodes, or lower"
            " regime.generators",
            len(self._placed()),
            self._regime.generators,
            self._options["num_gpus"],
            free.get("CPU", 0),
            free.get("GPU", 0),
        )

    def replace_weights(self, version: int, weights: Callable[[], dict]) -> None:
        """Copies the weights for the generators, and starts these with their first weights; see `PolicySampler`.

        With `regime.swap_within`, batches being sampled also continue with these weights.
        """
        if version == self._version:
            return
        if self._version is None:
            hosts.from_first(self._start)
        self._version = version
        copied = params_on_host(weights())
        if hosts.is_first():
            self._weights = self._ray.put(copied)
            for generator in self._placed() if self._regime.swap_within else ():
                self._actors[generator].replace_weights.remote(version, self._weights)

    def issue(self, number: int, rates: Any = None) -> None:
        """Assigns a batch to the generator with the fewest batches of those for which the cluster has room."""
        assert self._version is not None
        self.in_flight = {**self.in_flight, number: self._version}
        if not hosts.is_first():
            return
        placed = self._placed() or [0]  # Ray places them in order
        generator = min(placed, key=lambda generator: len(self._at(generator)))
        if not self._at(generator):
            self._since[generator] = time.monotonic()
        self._send(number, generator)

    @property
    def counts(self) -> dict[str, int]:
        """The restarts, as a metric."""
        return {"generators/restarts": self.restarts}

    def receive(self, wait: bool) -> list[tuple[int, Any]]:
        """Number and result of every batch that is done; see `PolicySampler`.

        Raises:
            UserError: a generator keeps dying, or never answers.
            Exception: any error that the sampling function raised.
        """

        def received() -> tuple[list[tuple[int, Any]], dict[int, int], int]:
            batches = self._collected(wait)
            in_flight = {assignment.number: assignment.version for assignment in self._assigned.values()}
            return batches, in_flight, self.restarts

        batches, self.in_flight, self.restarts = hosts.from_first(received)
        return batches

    def _collected(self, wait: bool) -> list[tuple[int, Any]]:
        batches = []
        seconds = self._regime.generator_seconds
        while self._assigned:
            answer_by = min(self._since[assignment.generator] for assignment in self._assigned.values()) + seconds
            timeout = max(answer_by - time.monotonic(), 0.0) if wait and not batches else 0.0
            done, _ = self._ray.wait(list(self._assigned), num_returns=1, timeout=timeout)
            if done:
                batches += self._received(done[0])
            elif time.monotonic() > answer_by:
                # Every answer has been read, so a generator past its deadline has really not answered.
                for generator in sorted({assignment.generator for assignment in self._assigned.values()}):
                    if time.monotonic() - self._since[generator] > seconds:
                        if generator in self._placed():
                            limit = f"regime.generator_seconds = {seconds:g}"
                            self._restart(generator, f"has not answered for {limit}")
                        else:
                            self._log_waiting()
                            self._since[generator] = time.monotonic()
            elif batches or not wait:
                break
        return batches

    def _at(self, generator: int) -> list[int]:
        return [assignment.number for assignment in self._assigned.values() if assignment.generator == generator]

    def _send(self, number: int, generator: int) -> None:
        assert self._version is not None
        reference = self._actors[generator].sample.remote(number, self._version, self._weights)
        self._assigned[reference] = Assignment(number, self._version, generator)

    def _received(self, reference: Any) -> list[tuple[int, Any]]:
        number, _, generator = self._assigned[reference]
        try:
            result = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            self._restart(generator, f"died ({str(error).strip().splitlines()[-1]})")
            return []
        del self._assigned[reference]
        self._since[generator] = time.monotonic()
        self._failures[generator] = 0
        return [(number, result)]

    def _restart(self, generator: int, why: str) -> None:
        numbers = self._at(generator)
        name = f"generator {generator + 1} of {self._regime.generators}"
        self._failures[generator] += 1
        self.restarts += 1
        if self._failures[generator] > RESTARTS:
            raise UserError(
                name,
                f"it {why}, for the {RESTARTS + 1}th time in a row, at batch {numbers[0]}",
                "raise regime.generator_seconds or its memory. Ray has its logs in /tmp/ray/session_latest/logs",
            )
        logger.warning("%s %s; recjax restarts it for batches %s", name, why, numbers)
        self._ray.kill(self._actors[generator])
        self._assigned = {
            key: assignment for key, assignment in self._assigned.items() if assignment.generator != generator
        }
        self._actors[generator] = self._new_actor(self._places[generator])
        self._since[generator] = time.monotonic()
        for number in numbers:
            self._send(number, generator)


Newest = Callable[[], tuple[int, dict] | None]  # the latest trained parameters and their version


@contextlib.contextmanager
def open_generator(
    config: Config,
    policy: Policy,
    prompts: Prompts,
    reward: Reward | MixedReward,
    frozen: dict,
    older_params: Callable[[Config, Policy, dict, dict], Callable[[int], dict]] | None = None,
) -> Iterator[Callable[[int, int, dict, Newest], tuple[list[Group], list[Grade]]]]:
    """The function of a generator: from a batch's number, policy version and weights to its groups and their grades.

    It samples one batch at a time, during the grading of the previous batch, and takes new weights between rounds of
    tokens.

    Args:
        frozen: parameters that are not trained, in the compute dtype.
        older_params: see `recjax.runs.policies.older_params`, for agents with frozen seats.
    """
    agents = Agents(config, policy) if config.task.agent else None
    with Grading(config, reward) as grading, agents or contextlib.nullcontext():
        frozen = jax.tree.map(jnp.asarray, frozen)
        batches = BatchSampler(config, policy, prompts, grading, PhaseSeconds(), agents)
        one_at_a_time = threading.Lock()

        def sample(number: int, version: int, weights: dict, newest: Newest) -> tuple[list[Group], list[Grade]]:
            latest = version

            def newer() -> Weights | None:
                nonlocal latest
                published = newest()
                if published is None or published[0] <= latest:
                    return None
                latest = published[0]
                return Weights(combine(jax.tree.map(jnp.asarray, published[1]), frozen), latest)

            # The next batch waits here; the grading below needs no device and overlaps with it.
            with one_at_a_time:
                if agents and older_params:
                    agents.older_params = older_params(config, policy, frozen, weights)
                params = combine(jax.tree.map(jnp.asarray, weights), frozen)
                groups, grades = batches.sample(params, version, number, newer=newer)
            return groups, grades.result()

        yield sample
