"""Sources of groups: the policy itself, generators in other processes, a store that grows, a store at rest.

A source gives groups to the queue, round by round. Groups of a store at rest join a step's batch directly.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, UInt32

from recjax import hosts
from recjax.config import Config
from recjax.experience.following import UNUSABLE, Follower
from recjax.experience.group import Grade, Group, token_staleness
from recjax.experience.queue import Arrival, Queue, queued_versions
from recjax.experience.sources import groups_at, mixed, with_logprobs
from recjax.experience.store import Record, Store, records_of
from recjax.experience.stored import stored_per_batch
from recjax.experience.tokenize import tokenizer_name
from recjax.files import whole_folder
from recjax.hub.export import export_model, write_adapters, write_base
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import model_folder
from recjax.models.placement import params_on_host
from recjax.models.trainable import combine, merged
from recjax.rollout.agents import Agents
from recjax.rollout.collecting import Grades, row_keys, sample_groups, submit
from recjax.rollout.generators import AT_A_TIME, Generators
from recjax.rollout.remote import LostWeightsError, RemoteEngine
from recjax.rollout.requests import Weights
from recjax.tasks.grading.pool import Grading
from recjax.tasks.grading.reward import Reward
from recjax.tasks.problems import question_of
from recjax.tasks.prompts import Prompts, batch_prompts
from recjax.training import schedule
from recjax.training.metrics import PhaseSeconds
from recjax.training.run import Run, State
from recjax.training.trained import older_params

_TOGETHER = 32  # batches whose keys are made at once
POLL_SECONDS = 0.5  # interval between reads of a followed store while a step waits
LINE_SECONDS = 10.0  # interval between log lines while a step waits

logger = logging.getLogger(__name__)


class Source:
    """Gives groups to the queue. This class gives none; it serves runs whose batches come from a store at rest.

    Attributes:
        endless: True if a step may wait for groups without a limit, until a signal stops the run.
    """

    endless = False

    def opened(self, run: Run, state: State) -> contextlib.AbstractContextManager:
        """A context for the time of the run. It begins with `state.source`, or anew if that is empty."""
        return contextlib.nullcontext()

    def begin_step(self, run: Run, state: State) -> None:
        """Called before the first round of each step, with the sampler's weights of the step."""

    def poll(self, run: Run, state: State, step: int, wait: bool) -> list[Arrival]:
        """The groups that arrive in a round.

        Args:
            step: number of the next training step.
            wait: False in the first poll of a round, True in the second, which comes if there are too few groups.
        """
        return []

    def must_wait(self, run: Run, queue: Queue, step: int) -> bool:
        """True if training on `queue` at `step` would be too late for groups that the source has not given yet."""
        return False

    def state(self) -> dict[str, Any]:
        """JSON data for the checkpoint, which says what the source has given to the queue."""
        return {}

    def metrics(self, queue: Queue, groups: list[Group], step: int) -> dict[str, float]:
        """Metrics of a step that trains on `groups`."""
        return {}


def source_of(run: Run, sample: Callable | None = None) -> Source:
    """The source of a run.

    Args:
        sample: see `PolicySource`.
    Raises:
        ValueError: several processes cannot follow a store.
    """
    if run.config.follows:
        if jax.process_count() > 1:
            raise ValueError(
                "experience.follow = true: only one process can follow a store, and this run has"
                f" {jax.process_count()}; start a single process"
            )
        return FollowedSource()
    if run.config.rollout.engine and jax.process_count() > 1:
        raise ValueError(
            f"rollout.engine.url = {run.config.rollout.engine.url!r}: only one process can train with another engine,"
            f" and this run has {jax.process_count()}; start a single process"
        )
    if run.config.regime.mode == "async":
        return GeneratorSource(EngineBatches(run) if run.config.rollout.engine else Generators(run.config.regime))
    if run.config.rollout.engine and run.own[0]:
        return EngineSource()
    return PolicySource(sample) if run.own[0] else Source()


# --- The policy samples.


class PolicySource(Source):
    """The policy samples a batch when it is due, in this process."""

    _warns = True  # of problems that a curriculum avoids, once

    def __init__(self, sample: Callable | None = None):
        """Takes a function with the first four arguments and the results of `sample_batch`, to sample instead of it."""
        self.sample_batch = sample or sample_batch

    def poll(self, run: Run, state: State, step: int, wait: bool) -> list[Arrival]:
        """Samples the batches due in this round.

        It samples the next round's batch early, during the grading of this one, if both use the same weights.
        """
        config = run.config
        queue = state.queue
        interval = run.settings.sampling_interval
        arrivals = []
        if self._warns and None in queue.rates.values():
            self._warns = False
            avoided = [
                question_of(problem.prompt)
                for key, problem in zip(run.train.keys, run.train.problems, strict=True)
                if queue.rates.get(key, 0.0) is None
            ]
            logger.warning(
                "task.curriculum: no completion of %d problems got a reward: %.200s; the curriculum draws such problems"
                " only by its share task.curriculum.uniform = %g. metrics.jsonl counts the reasons: grading/… and"
                " agent/…",
                *(len(avoided), ", ".join(map(repr, avoided)), config.task.curriculum.uniform),
            )
        # Log-probs of the current policy equal those of the round.
        of_now = config.experience is not None and config.experience.missing_logprobs == "current"
        batches = run.batch_of(config.training.steps)
        last = queue.round + (not of_now and schedule.samples_ahead(run.batch_of(step), batches, config.regime))
        for number in range(queue.counts["batches"] + 1, (last - 1) // interval + 2):
            weights = run.learner.sampler_params(run, state)
            rates = {"rates": queue.rates} if config.task.curriculum else {}
            groups, grades = self.sample_batch(run, weights, state.version, number, **rates)
            groups = _joined(run, state, groups, number)
            arrivals.append(Arrival(groups, grades, number, early=(number - 1) * interval >= queue.round))
        return arrivals

    def metrics(self, queue: Queue, groups: list[Group], step: int) -> dict[str, float]:
        """The curriculum's problems with a recent pass rate, and the mean of these rates."""
        rates = [rate for rate in queue.rates.values() if rate is not None]
        return {"curriculum/problems": len(rates), "curriculum/pass_rate": sum(rates) / len(rates)} if rates else {}


def sample_batch(
    run: Run,
    weights: dict,
    version: int,
    number: int,
    prefix: str = "",
    source: str = "policy",
    newer: Callable[[], Weights | None] | None = None,
    rates: Mapping[str, float | None] | None = None,
) -> tuple[list[Group], Grades]:
    """Samples the groups of a batch, which depend only on its number and the weights; returns them and pending grades.

    Args:
        weights: parameters with the structure of the trained parameters.
        version: the weights' policy version.
        prefix: prefix of the completions' ids, before the batch's number.
        source: the completions' source.
        newer: returns newer weights between rounds of tokens, if some have arrived; None: no new weights.
        rates: see `batch_prompts`.
    """
    config = run.config
    count, group_size = run.own
    prompts = batch_prompts(run.train, config, count // len(config.task.trained_seats), number, rates)
    names = {"name": f"{prefix}{number:06d}", "source": source, "version": version}
    with run.phases.phase("sample"):
        params = combine(weights, run.frozen)
        if run.agents:
            key = batch_key(config.seed, number)
            return run.agents.sample_groups(
                run.policy,
                params,
                prompts,
                key,
                group_size,
                config.rollout.sampling(),
                run.grading,
                **names,
                newer=newer,
            )
        keys = _row_keys(config.seed, number // _TOGETHER, count * group_size)[number % _TOGETHER]
        longest = config.rollout.max_completion_tokens
        groups = sample_groups(
            run.policy, params, prompts, keys, group_size, longest, config.rollout.sampling(), **names, newer=newer
        )
        return groups, submit(groups, prompts, run.grading)


def batch_key(seed: int, number: int | Array) -> Key[Array, ""]:
    """The random key for the completions of a batch; batches count from 1."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), number)


@functools.lru_cache(maxsize=2)
def _row_keys(seed: int, block: int, rows: int) -> UInt32[np.ndarray, "batches batch words"]:
    """Key data for the completions of several consecutive batches.

    They are computed together, as the host would otherwise wait for them behind the running update in each step.
    """
    numbers = np.arange(block * _TOGETHER, (block + 1) * _TOGETHER)
    return row_keys(jax.vmap(functools.partial(batch_key, seed))(numbers), rows)


def kept_records(run: Run, groups: list[Group]) -> list[Record]:
    """The completions of graded groups for a store, without those of agents that failed and got no reward."""
    records = records_of(groups, tokenizer_name(run.policy.tokenizer), datetime.now(UTC))
    if run.agents:
        graded = [(record, record.completion) for record in records]
        records = [record for record, one in graded if one.rows and one.grade and one.grade.reward is not None]
    return records


# --- Another engine samples for the policy.


class EngineSampler:
    """Samples batches on a server, which gets new weights before a batch; a context.

    Attributes:
        engine: the connection to the server.
        takes_weights: True if the server gets the weights of each batch.
        counts: the pushes, the seconds of the last one, and the server's unusable replies, as metrics.
    """

    def __init__(self, run: Run):
        """Connects to no server yet."""
        self._run = run
        self._pushes = 0
        self._push_seconds = 0.0

    def __enter__(self) -> "EngineSampler":
        """Connects to the server. Its first batch gets the weights again, also after a resume.

        Raises:
            ValueError: the server does not answer, or takes no weights although the sampler's weights change.
        """
        config = self._run.config
        self.engine = engine = RemoteEngine.of_config(config, self._run.policy)
        takes_adapters = engine.api == "vllm" and config.model.lora is not None and config.model.path is not None
        self.takes_weights = engine.takes_folders or takes_adapters
        if not (self.takes_weights or config.regime.offline):
            engine.__exit__()
            remedy = "start vLLM with VLLM_SERVER_DEV_MODE=1, or train adapters (model.lora and model.path), or "
            raise ValueError(
                f"rollout.engine.url = {config.rollout.engine.url!r}: {engine.api or 'this server'} cannot take whole"
                f" weights over HTTP; {remedy * (engine.api == 'vllm')}set regime.offline=true to train on samples"
                " from its own weights"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits for replies to current requests."""
        self.engine.__exit__(*exception)

    @property
    def counts(self) -> dict[str, float]:
        """The pushes, the seconds of the last one, and the server's unusable replies, as metrics."""
        return {
            "engine/pushes": self._pushes,
            "engine/push_seconds": self._push_seconds,
            "engine/unusable": self.engine.left_out.total(),
        }

    def sample(self, prompts: Prompts, weights: dict, version: int, number: int) -> list[Group]:
        """The groups of a batch, without grades; see `sample_batch`.

        Raises:
            ValueError: the server keeps losing the weights, or sends no usable replies.
        """
        config = self._run.config
        count, group_size = self._run.own
        engine = self.engine
        seed = (config.seed * 1_000_003 + number) * count * group_size % 2**31
        for tries in range(config.rollout.engine.retries, -1, -1):
            try:
                if self.takes_weights and engine.version != version:
                    self.push(weights, version)
                names = {"name": f"{number:06d}", "source": "policy", "version": version}
                return engine.sample_tokens(prompts, group_size, seed, **names)
            except LostWeightsError as error:
                if not tries:
                    raise ValueError(
                        f"{error}, after {config.rollout.engine.retries + 1} tries; give this run a server of its"
                        " own that stays up"
                    ) from error
                logger.warning("%s; recjax gives it the weights again and samples batch %d again", error, number)
                engine.version = None

    def push(self, weights: dict, version: int) -> None:
        """Writes the weights to a folder and gives them to the server.

        Raises:
            ValueError: the server does not take them.
        """
        began = time.monotonic()
        config = self._run.config
        decoder = self._run.policy.decoder.config
        # recjax.serve computes with norm scales in float32, as this process does; other servers round them.
        dtype = "float32" if self.engine.api == "recjax" else jnp.dtype(self._run.policy.decoder.dtype).name
        place = Path(config.rollout.engine.folder or Path(config.output) / "pushed").absolute()
        folder = place / str(version)
        path = config.model.path
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was interrupted
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), combine(weights, self._run.frozen))
        is_adapter = config.model.lora is not None and self.engine.api != "recjax" and path is not None
        if is_adapter:
            with whole_folder(folder) as partial:
                write_adapters(partial, decoder, params, str(model_folder(path)))
        else:
            params = merged(decoder, params) if config.model.lora else params
            decoder = dataclasses.replace(decoder, lora=None)
            with tempfile.TemporaryDirectory() as base:
                if path is None:
                    write_base(Path(base), decoder, self._run.policy.tokenizer, self._run.policy.stop_ids)
                export_model(folder, decoder, params, model_folder(path) if path else Path(base), dtype)
        self.engine.push(folder, version, is_adapter)
        self._pushes += 1
        self._push_seconds = time.monotonic() - began
        for older in place.iterdir():  # the server has acknowledged the newest
            if older != folder and older.name.isdecimal():
                shutil.rmtree(older, ignore_errors=True)


class EngineSource(PolicySource):
    """A server samples a batch when it is due."""

    def __init__(self):
        """Connects to no server yet."""

    @contextlib.contextmanager
    def opened(self, run: Run, state: State) -> Iterator[None]:
        """Connects to the server."""
        with EngineSampler(run) as self._sampler:
            yield

    def sample_batch(
        self, run: Run, weights: dict, version: int, number: int, rates: Mapping[str, float | None] | None = None
    ) -> tuple[list[Group], Grades]:
        """The groups of a batch and their pending grades; see `sample_batch`."""
        prompts = batch_prompts(run.train, run.config, run.own[0], number, rates)
        with run.phases.phase("sample"):
            groups = self._sampler.sample(prompts, weights, version, number)
            return groups, submit(groups, prompts, run.grading)

    def metrics(self, queue: Queue, groups: list[Group], step: int) -> dict[str, float]:
        """The metrics of `PolicySource` and of the server."""
        return super().metrics(queue, groups, step) | self._sampler.counts


class EngineBatches(EngineSampler):
    """Batches that a server samples one after another while the trainer trains, like `Generators`; a context.

    The server gets the weights of a batch after the previous batch, so all tokens of a completion are from one version.

    Attributes:
        in_flight, waited_seconds: see `Generators`.
    """

    def __init__(self, run: Run):
        """Connects to no server yet."""
        super().__init__(run)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._futures = {}
        self.in_flight = {}
        self.waited_seconds = 0.0

    def __exit__(self, *exception: object) -> None:
        """Waits for replies to current requests, and samples no more batches."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        super().__exit__(*exception)
        self._thread.shutdown()

    def publish(self, version: int, weights: dict) -> None:
        """Sets the weights, held on the host, for batches issued from here on."""
        self._newest = version, weights

    def issue(self, number: int) -> None:
        """Samples a batch after all batches that were issued before."""
        prompts = batch_prompts(self._run.train, self._run.config, self._run.own[0], number)
        version, weights = self._newest
        self.in_flight = {**self.in_flight, number: version}
        self._futures[number] = prompts, self._thread.submit(self.sample, prompts, weights, version, number)

    @property
    def are_busy(self) -> bool:
        """True if a batch waits for another batch."""
        return len(self.in_flight) >= AT_A_TIME

    def receive(self, wait: bool) -> list[tuple[int, tuple[list[Group], Grades]]]:
        """Number, groups and pending grades of every batch that is done; see `Generators.receive`."""
        began = time.monotonic()
        futures = self._futures
        if wait:
            concurrent.futures.wait([future for _, future in futures.values()], return_when=FIRST_COMPLETED)
            self.waited_seconds += time.monotonic() - began
        done = [number for number, (_, future) in futures.items() if future.done()]
        received = []
        for number in done:
            prompts, future = futures.pop(number)
            groups = future.result()
            received.append((number, (groups, submit(groups, prompts, self._run.grading))))
        self.in_flight = {number: version for number, version in self.in_flight.items() if number not in done}
        return received


# --- Generators sample numbered batches, which arrive in any order.

Newest = Callable[[], tuple[int, dict] | None]  # the latest trained parameters and their version


class GeneratorSource(Source):
    """Other processes or a server sample, at the same time as the updates.

    Attributes:
        generators: the processes, or the server.
    """

    def __init__(self, generators: Generators | EngineBatches):
        """Starts no process."""
        self.generators = generators
        self._published = None

    @contextlib.contextmanager
    def opened(self, run: Run, state: State) -> Iterator[None]:
        """Starts the generators on the batches that were in flight at the checkpoint.

        Batches sampled after the checkpoint leave the record and are sampled again, as their weights no longer exist.
        """
        in_flight = state.source.get("in_flight", [])
        with self.generators as generators:
            if isinstance(generators, Generators):
                frozen = params_on_host(run.frozen)
                generators.start(sampler, run.config, run.policy, run.train, run.grading.reward, frozen)
            self.begin_step(run, state)
            issued = state.queue.counts["batches"] + len(in_flight)
            if run.record and hosts.is_first():
                with Store(run.record, create=True) as store:
                    batches = ((number, int(name.split("/")[0])) for name, (number,) in store.numbers("id").items())
                    store.delete([number for number, batch in batches if batch > issued or batch in in_flight])
            for number in in_flight:
                generators.issue(number)
            del state  # a reference would keep its weights in memory
            yield

    def begin_step(self, run: Run, state: State) -> None:
        """Gives new weights to the generators."""
        self.generators.waited_seconds = 0.0
        if state.version != self._published:
            self._published = state.version
            self.generators.publish(state.version, params_on_host(run.learner.sampler_params(run, state)))

    def poll(self, run: Run, state: State, step: int, wait: bool) -> list[Arrival]:
        """Issues batches that the run could train on in time, up to the last step; returns finished batches."""
        config = run.config
        queue = state.queue
        generators = self.generators
        every = run.settings.sampling_interval
        updates = config.training.updates
        while not wait and not generators.are_busy:
            number = queue.counts["batches"] + len(generators.in_flight) + 1
            ahead = self._versions_ahead(run, queue)
            has_turn = step + len(ahead) // run.own[0] * every * updates <= config.training.steps
            has_turn = has_turn and schedule.in_time([*ahead, state.version], step, run.own[0], config.regime, updates)
            due = number, queue.round, every, state.version, step
            if not (has_turn and schedule.is_wanted(*due, config.regime, updates)):
                break
            generators.issue(number)
        with run.phases.phase("sample"):
            done = generators.receive(wait)
        return [Arrival(_joined(run, state, groups, number), grades, number) for number, (groups, grades) in done]

    def must_wait(self, run: Run, queue: Queue, step: int) -> bool:
        """True if a batch that generators sample would exceed `regime.max_staleness` at its turn after `step`."""
        ahead = self._versions_ahead(run, queue)
        updates = run.config.training.updates
        in_flight = self.generators.in_flight
        return bool(in_flight) and not schedule.in_time(ahead, step + updates, run.own[0], run.config.regime, updates)

    def _versions_ahead(self, run: Run, queue: Queue) -> list[int]:
        """Policy versions of the groups in the queue and of the groups that generators sample."""
        coming = [version for version in self.generators.in_flight.values() for _ in range(run.own[0])]
        return [*queued_versions(queue, run.settings), *coming]

    def state(self) -> dict[str, Any]:
        """The numbers of the batches that the generators sample."""
        return {"in_flight": [*self.generators.in_flight]}

    def metrics(self, queue: Queue, groups: list[Group], step: int) -> dict[str, float]:
        """The generators' work, and the staleness of the step's tokens."""
        of_tokens = token_staleness(groups, step)
        return {
            "generators/waited_seconds": self.generators.waited_seconds,
            "generators/in_flight": len(self.generators.in_flight),
            **self.generators.counts,
            **({} if of_tokens is None else {"generators/token_staleness": of_tokens}),
        }


@contextlib.contextmanager
def sampler(
    config: Config, policy: Policy, prompts: Prompts, reward: Reward, frozen: dict
) -> Iterator[Callable[[int, int, dict, Newest], tuple[list[Group], list[Grade]]]]:
    """The function of a generator: from a batch's number, policy version and weights to its groups and their grades.

    It samples one batch at a time, during the grading of the previous batch, and takes new weights between rounds of
    tokens.
    """
    agents = Agents(config, policy) if config.task.agent else None
    with Grading(config, reward) as grading, agents or contextlib.nullcontext():
        frozen = jax.tree.map(jnp.asarray, frozen)
        run = Run(config, policy, prompts, prompts, grading, PhaseSeconds(), frozen=frozen, agents=agents)
        one_at_a_time = threading.Lock()

        def sample(number: int, version: int, weights: dict, newest: Newest) -> tuple[list[Group], list[Grade]]:
            latest = version

            def newer() -> Weights | None:
                nonlocal latest
                found = newest()
                if found is None or found[0] <= latest:
                    return None
                latest = found[0]
                return Weights(combine(jax.tree.map(jnp.asarray, found[1]), frozen), latest)

            with one_at_a_time:
                if agents:
                    agents.older_params = older_params(run, weights)
                groups, grades = sample_batch(run, jax.tree.map(jnp.asarray, weights), version, number, newer=newer)
            return groups, grades.result()

        yield sample


# --- A store that grows.


class FollowedSource(Source):
    """A store that another process writes; a step waits until it has enough groups, and takes each group once."""

    endless = True

    def opened(self, run: Run, state: State) -> contextlib.AbstractContextManager:
        """Continues after the completions that were taken before the checkpoint."""
        self._follower = Follower(run.config, run.policy, state.totals["run"], state.source)
        return contextlib.nullcontext()

    def begin_step(self, run: Run, state: State) -> None:
        """Begins to count the groups and seconds of a step."""
        self._admitted = 0
        self._began = time.monotonic()
        self._said = time.monotonic() - LINE_SECONDS + 1

    def poll(self, run: Run, state: State, step: int, wait: bool) -> list[Arrival]:
        """Takes groups, at most as many as the step lacks, with the oldest weights first."""
        follower = self._follower
        count = run.own[0]
        ready = len(state.queue.ready)
        # A step adds one batch to a replay buffer, and more only if it has too few groups. Without replay, groups stay
        # in the store until their turn.
        room = count - (min(ready, self._admitted) if run.settings.replay else ready)
        if wait and time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            waiting, completions, pending = follower.waiting
            rewards = f"{waiting} groups wait: {pending} of their {completions} completions have no reward yet"
            logger.info(
                "step %d waits for %s: %d of %d groups are ready; %s", step, follower.name, ready, count, rewards
            )
        with run.phases.phase("sample"):
            time.sleep(POLL_SECONDS if wait else 0)
            arrival = follower.poll(step, room)
        self._admitted = self._admitted + len(arrival.groups)
        self._waited_seconds = time.monotonic() - self._began
        return [arrival]

    def state(self) -> dict[str, Any]:
        """The completions that were taken."""
        return self._follower.state()

    def metrics(self, queue: Queue, groups: list[Group], step: int) -> dict[str, float]:
        """The store's completions that were not taken, and the staleness of the step's tokens."""
        of_tokens = token_staleness(groups, step)
        waiting, completions, pending = self._follower.waiting
        return {
            **{f"experience/left_out/{reason}": queue.counts[reason] for reason in UNUSABLE},
            **({} if of_tokens is None else {"follow/token_staleness": of_tokens}),
            "follow/waited_seconds": self._waited_seconds,
            "follow/rewarded_groups": self._follower.rewarded,
            "follow/waiting_groups": waiting,
            "follow/waiting_completions": completions,
            "follow/pending_completions": pending,
        }


# --- A store at rest.


def stored_groups(run: Run, step: int) -> list[Group]:
    """The groups of a store that join the batch of a step, after those from the queue; they depend only on the step."""
    if not (count := stored_per_batch(run.config)):
        return []
    with run.phases.phase("sample"):
        return groups_at(run.stored.groups, count, run.batch_of(step), run.config.seed)


def _joined(run: Run, state: State, groups: list[Group], number: int) -> list[Group]:
    """The groups of a batch, with completions of the store mixed in if the config says so."""
    if not run.others:
        return groups
    count = run.config.rollout.group_size - run.own[1]
    with run.phases.phase("sample"):
        groups = mixed(groups, run.others, count, number, run.config.seed)
    return with_missing_logprobs(run, state, groups)


def with_missing_logprobs(run: Run, state: State, groups: list[Group]) -> list[Group]:
    """Fills in log-probs of the current parameters if `experience.missing_logprobs` is `current`."""
    config = run.config
    sampling = run.config.rollout.sampling()
    if config.experience is None or config.experience.missing_logprobs != "current":
        return groups
    with run.phases.phase("sample"):
        everything = combine(state.trained.params, run.frozen)
        return with_logprobs(groups, run.shape, run.policy, everything, sampling, config.model.logprob_chunk)
