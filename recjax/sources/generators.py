"""Processes that sample numbered batches in parallel with the trainer, as Ray actors; they may return any batch.

Only asynchronous runs import Ray, when they start.
"""

import importlib.util
import logging
import os
import secrets
import socket
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from recjax.config import Config, RegimeConfig
from recjax.errors import UserError
from recjax.models.placement import params_on_host
from recjax.runtime import hosts
from recjax.sources.generator import Generator, OpenGenerator

BATCHES_PER_GENERATOR = 2  # a generator samples one while it grades the other, or while the other waits
RESTARTS = 5  # restarts of one generator in a row, without a batch in between, before the run ends
_PLACED_SECONDS = 3  # within this time Ray places a generator if the cluster has the capacity
_STARTS = 3  # tries to start Ray on this machine
_LATE_START = "timed out during startup"  # in the message of Ray's error
_ONLY_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's variable; 0 makes Ray listen on loopback alone

logger = logging.getLogger(__name__)


class Assignment(NamedTuple):
    """A batch being sampled: its number, the weights' version, and the generator's index, from 0."""

    number: int
    version: int
    generator: int


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
    cluster has no capacity waits and gets no batches; all other generators sample them.

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
        self._placements: list[Any] = []  # Ray's placement group of each generator reserves its CPU and GPU
        self._assigned: dict[Any, Assignment] = {}
        self._answered = [0.0] * regime.generators  # when each generator last answered, or got its first batch
        self._failures = [0] * regime.generators
        self.in_flight: dict[int, int] = {}
        self.restarts = 0

    # --- Ray: connection and processes. Only the first process runs these.

    def __enter__(self) -> "Generators":
        """Connects to `regime.address`; if None, starts Ray on this machine unless this process already has Ray.

        Raises:
            UserError: no cluster answers at the address.
        """
        hosts.from_first(self._connect)
        return self

    def _connect(self) -> None:
        address = self._regime.address
        if address is None:
            keep_ray_on_loopback()
        import ray

        self._ray = ray
        self._started_ray = not ray.is_initialized()
        if not self._started_ray:
            return
        if address is not None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            self._join_cluster(address)
            return
        if _ONLY_LOOPBACK not in os.environ:
            raise UserError(
                "regime.mode = 'async'",
                "ray was imported before recjax started it, and would listen on all interfaces without a token of"
                " this run",
                f"set the variables {_ONLY_LOOPBACK}=0, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before that import,"
                " import ray later, or call ray.init yourself",
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._start_ray()

    def _start_ray(self) -> None:
        """Starts Ray on this machine.

        Ray waits for half a minute for its own processes, which is too short while other programs take all cores.

        Raises:
            UserError: Ray did not start in time, several times.
        """
        for start in range(1, _STARTS + 1):
            try:
                with warnings.catch_warnings():
                    # JAX warns about every fork, but this child only executes a program of Ray.
                    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
                    self._ray.init(
                        "local",
                        num_cpus=self._regime.generators,
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level=logging.ERROR,
                    )
                return
            except Exception as error:  # Ray raises no narrower class
                if _LATE_START not in str(error):
                    raise
                self._ray.shutdown()
                if start == _STARTS:
                    raise UserError(
                        "regime.mode = 'async'",
                        f"Ray did not start on this machine in {_STARTS} tries ({error})",
                        "stop programs that take all cores, or join a cluster with regime.address",
                    ) from error
                logger.warning("Ray did not start within its time; another try")

    def _join_cluster(self, address: str) -> None:
        try:
            host, colon, port = address.rpartition(":")
            if colon and "/" not in host:
                # Checked first, because Ray itself would retry for minutes.
                socket.create_connection((host, port), timeout=10).close()
            self._ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except OSError as error:
            raise UserError(
                problem=f"regime.address = {address!r}: no Ray cluster answers there ({error});"
                " start one with `ray start --head`, or remove it"
            ) from error

    def __exit__(self, *exception: object) -> None:
        """Ends the generators even while they sample, and shuts Ray down if this context started it."""
        if hosts.is_first() and self._started_ray:
            self._ray.shutdown()
        else:
            for actor in self._actors:
                self._ray.kill(actor)
            for placement in self._placements:
                self._ray.util.remove_placement_group(placement)

    def _start(self) -> None:
        """Starts the processes of all generators for which the cluster has the capacity."""
        gpus = min(1.0, self._ray.cluster_resources().get("GPU", 0.0) / self._regime.generators)
        resources = {"CPU": 1.0}
        variables = {"JAX_PLATFORMS": "cpu", "NPROC": "1"}
        if gpus > 0:
            resources["GPU"] = gpus
            variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if self._regime.address is None:
            # Generators on this machine share the trainer's modules, such as a user's reward, and compiled programs.
            # An empty path stands for the current folder.
            variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
            settings: Any = jax.config
            cache_folder = settings.jax_compilation_cache_dir
            if cache_folder is None:
                cache_folder = ""
            variables["JAX_COMPILATION_CACHE_DIR"] = cache_folder
            shortest_compile = settings.jax_persistent_cache_min_compile_time_secs
            variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = str(shortest_compile)
        self._options = {
            "num_cpus": 1,
            "num_gpus": gpus,
            # New weights arrive while batches are sampled.
            "max_concurrency": BATCHES_PER_GENERATOR + self._regime.swap_within,
            "runtime_env": {"env_vars": variables},
        }
        self._opener = self._ray.put(self._open_generator)
        self._placements = [self._ray.util.placement_group([resources]) for _ in range(self._regime.generators)]
        self._actors = [self._new_actor(placement) for placement in self._placements]
        if not all(placement.wait(_PLACED_SECONDS) for placement in self._placements):
            self._log_waiting()

    def _new_actor(self, placement: Any) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(placement)
        actor = self._ray.remote(Generator).options(scheduling_strategy=strategy, **self._options)
        return actor.remote(self._opener)

    def _placed(self) -> list[int]:
        """The generators for which the cluster has the capacity."""
        placed = []
        for generator, placement in enumerate(self._placements):
            if self._ray.util.placement_group_table(placement)["state"] == "CREATED":
                placed.append(generator)
        return placed

    def _log_waiting(self) -> None:
        free = self._ray.available_resources()
        placed = len(self._placed())
        needed_gpus = self._options["num_gpus"]
        free_cpus = free.get("CPU", 0)
        free_gpus = free.get("GPU", 0)
        text = (
            f"the Ray cluster has room for {placed} of {self._regime.generators} generators, which need a CPU and"
            f" {needed_gpus:g} GPUs each; it has {free_cpus:g} CPUs and {free_gpus:g} GPUs free, and the other"
            " generators wait. `ray status` shows what it runs; add nodes, or lower regime.generators"
        )
        logger.warning("%s", text)

    # --- Batches.

    def offer_weights(self, weights: Callable[[], dict], version: int) -> None:
        """Copies the weights for the generators, and starts these with their first weights; see `PolicySampler`.

        With `regime.swap_within`, batches being sampled also continue with these weights.
        """
        if version == self._version:
            return
        if self._version is None:
            hosts.from_first(self._start)
        self._version = version
        params = params_on_host(weights())
        if not hosts.is_first():
            return
        self._params = self._ray.put(params)
        if self._regime.swap_within:
            for generator in self._placed():
                self._actors[generator].replace_weights.remote(self._params, version)

    def issue(self, number: int, rates: Any = None) -> None:
        """Assigns a batch to the generator with the fewest batches of those for which the cluster has the capacity."""
        assert self._version is not None
        self.in_flight = self.in_flight | {number: self._version}
        if not hosts.is_first():
            return
        placed = self._placed()
        if not placed:
            placed = [0]  # Ray places the generators in order
        generator = min(placed, key=lambda generator: len(self._numbers_at(generator)))
        if not self._numbers_at(generator):
            self._answered[generator] = time.monotonic()
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
            busy = {assignment.generator for assignment in self._assigned.values()}
            answer_by = min(self._answered[generator] for generator in busy) + seconds
            timeout = 0.0
            if wait and not batches:
                timeout = max(answer_by - time.monotonic(), 0.0)
            done, _ = self._ray.wait(list(self._assigned), num_returns=1, timeout=timeout)
            if done:
                batches += self._received(done[0])
            elif time.monotonic() > answer_by:
                # Every answer has been read, so a generator past its deadline has really not answered.
                for generator in sorted(busy):
                    if time.monotonic() - self._answered[generator] > seconds:
                        self._end_wait(generator)
            elif batches or not wait:
                break
        return batches

    def _end_wait(self, generator: int) -> None:
        """Restarts a generator that has not answered; keeps waiting for one without a place in the cluster."""
        if generator in self._placed():
            limit = f"regime.generator_seconds = {self._regime.generator_seconds:g}"
            self._restart(generator, f"has not answered for {limit}")
        else:
            self._log_waiting()
            self._answered[generator] = time.monotonic()

    def _numbers_at(self, generator: int) -> list[int]:
        """The batches that a generator samples."""
        return [assignment.number for assignment in self._assigned.values() if assignment.generator == generator]

    def _send(self, number: int, generator: int) -> None:
        assert self._version is not None
        reference = self._actors[generator].sample.remote(self._params, self._version, number)
        self._assigned[reference] = Assignment(number, self._version, generator)

    def _received(self, reference: Any) -> list[tuple[int, Any]]:
        """Number and result of a batch that has ended; empty if its generator died."""
        number, _, generator = self._assigned[reference]
        try:
            result = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._restart(generator, f"died ({lines[-1]})")
            return []
        del self._assigned[reference]
        self._answered[generator] = time.monotonic()
        self._failures[generator] = 0
        return [(number, result)]

    def _restart(self, generator: int, why: str) -> None:
        numbers = self._numbers_at(generator)
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
        for reference, assignment in list(self._assigned.items()):
            if assignment.generator == generator:
                del self._assigned[reference]
        self._actors[generator] = self._new_actor(self._placements[generator])
        self._answered[generator] = time.monotonic()
        for number in numbers:
            self._send(number, generator)
