"""Sources of groups: the policy itself, generators in other processes, a store that grows, a store at rest.

A source gives groups to the queue, round by round. Groups of a store at rest join a step's batch directly.
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from recjax import hosts
from recjax.config import Config
from recjax.experience.following import UNUSABLE, Follower
from recjax.experience.group import Grade, Group, token_staleness
from recjax.experience.queue import Arrival, Queue, queued_versions
from recjax.experience.sources import groups_at, mixed, with_logprobs
from recjax.experience.store import Store
from recjax.files import whole_folder
from recjax.hub.export import export_model, write_adapters, write_base
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import model_folder
from recjax.models.placement import params_on_host
from recjax.models.trainable import combine, merged
from recjax.rollout.agents import Agents
from recjax.rollout.collecting import Grades, submit
from recjax.rollout.generators import AT_A_TIME, Generators
from recjax.rollout.remote import LostWeightsError, RemoteEngine
from recjax.rollout.requests import Weights
from recjax.tasks.grading.pool import Grading
from recjax.tasks.grading.reward import Reward
from recjax.tasks.problems import question_of
from recjax.tasks.prompts import Prompts
from recjax.training import schedule
from recjax.training.learner import Learner
from recjax.training.metrics import PhaseSeconds
from recjax.training.policies import older_params
from recjax.training.prepare import Setup
from recjax.training.run import Source, State
from recjax.training.sampling import BatchSampler

POLL_SECONDS = 0.5  # interval between reads of a followed store while a step waits
LINE_SECONDS = 10.0  # interval between log lines while a step waits

logger = logging.getLogger(__name__)


class StoreSource(Source):
    """The groups of a store at rest join each batch; nothing else arrives. The base of all other sources."""

    def __init__(self, setup: Setup, learner: Learner):
        """Takes the run's data, and the learner that computes log-probs which completions of a store lack."""
        self._setup = setup
        self._config = setup.config
        self._learner = learner
        self._unrecorded: list[list[Group]] = []

    def completed(self, state: State, groups: list[Group], step: int) -> list[Group]:
        """The groups from the queue, then those of the store, which depend only on the step."""
        config = self._config
        count = config.stored_groups
        if count:
            # They skip the queue: their rewards are known, and the checkpoint need not hold them.
            batch = schedule.batch_of(step, config.training.updates)
            with self._setup.phases.phase("sample"):
                groups = groups + groups_at(self._setup.stored.groups, count, batch, config.seed)
        return self._with_missing_logprobs(state, groups)

    def record(self, batches: Sequence[list[Group]]) -> None:
        """Takes graded batches for the store of a run that records."""
        if self._config.record_file and hosts.is_first():
            self._unrecorded += batches

    def write_record(self) -> None:
        """Adds the batches that `record` has taken to the store."""
        batches = self._unrecorded
        self._unrecorded = []
        if not batches:
            return
        with Store(self._config.record_file, create=True) as store:
            for groups in batches:
                records = self._setup.sampler.records(groups)
                # A run that resumed from before this batch has recorded it already.
                if records and not store.numbers("id", [records[0].completion.id]):
                    store.append(records)

    def _mixed(self, state: State, groups: list[Group], number: int) -> list[Group]:
        """The groups of a sampled batch, with completions of the store mixed in if the config says so."""
        others = self._setup.others
        if not others:
            return groups
        _, sampled_count = self._config.own_counts
        # By the batch's number and not by the step, so that a batch that arrives late gets the same completions.
        with self._setup.phases.phase("sample"):
            groups = mixed(groups, others, self._config.rollout.group_size - sampled_count, number, self._config.seed)
        return self._with_missing_logprobs(state, groups)

    def _with_missing_logprobs(self, state: State, groups: list[Group]) -> list[Group]:
        """Fills in log-probs of the current parameters if `experience.missing_logprobs` is `current`."""
        config = self._config
        if config.experience is None or config.experience.missing_logprobs != "current":
            return groups
        with self._setup.phases.phase("sample"):
            params = self._learner.current_params(state)
            sampling = config.rollout.sampling()
            shape = self._setup.shape
            self._setup.phases.device.call()
            groups = with_logprobs(groups, shape, self._setup.policy, params, sampling, config.model.logprob_chunk)
            self._setup.phases.device.end()
            return groups


def check_source(config: Config) -> None:
    """Refuses sources that several processes cannot share.

    Raises:
        ValueError: several processes would follow a store, or train with another engine.
    """
    if jax.process_count() == 1:
        return
    if config.follows:
        raise ValueError(
            "experience.follow = true: only one process can follow a store, and this run has"
            f" {jax.process_count()}; start a single process"
        )
    if config.rollout.engine:
        raise ValueError(
            f"rollout.engine.url = {config.rollout.engine.url!r}: only one process can train with another engine,"
            f" and this run has {jax.process_count()}; start a single process"
        )


def source_of(setup: Setup, learner: Learner, sample: Callable | None = None) -> Source:
    """The source of a run.

    Args:
        sample: see `PolicySource`.
    """
    config = setup.config
    if config.follows:
        return FollowedSource(setup, learner)
    if config.regime.mode == "async":
        generators = EngineBatches(setup.sampler) if config.rollout.engine else Generators(config.regime)
        return GeneratorSource(setup, learner, generators)
    if not config.samples_training_data:
        return StoreSource(setup, learner)
    if config.rollout.engine:
        return EngineSource(setup, learner)
    return PolicySource(setup, learner, sample)


# --- The policy samples.


class PolicySource(StoreSource):
    """The policy samples a batch when it is due, in this process."""

    _warns = True  # of problems that a curriculum avoids, once

    def __init__(self, setup: Setup, learner: Learner, sample: Callable | None = None):
        """Takes a function that samples instead of `BatchSampler.sample`, with its first four arguments and results."""
        super().__init__(setup, learner)
        self.sample = sample or BatchSampler.sample

    def poll(self, state: State, step: int, wait: bool) -> list[Arrival]:
        """Samples the batches due in this round.

        It samples the next round's batch early, during the grading of this one, if both use the same weights.
        """
        config = self._config
        updates = config.training.updates
        queue = state.queue
        interval = self._setup.settings.sampling_interval
        arrivals = []
        self._warn_of_avoided_problems(queue)
        # Log-probs of the current policy are those of the round; a batch sampled ahead would get them a round early.
        of_now = config.experience is not None and config.experience.missing_logprobs == "current"
        batches = schedule.batch_of(config.training.steps, updates)
        last = queue.round + (
            not of_now and schedule.samples_ahead(schedule.batch_of(step, updates), batches, config.regime)
        )
        for number in range(queue.counts["batches"] + 1, (last - 1) // interval + 2):
            params = self._learner.sampler_params(state)
            rates = {"rates": queue.rates} if config.task.curriculum else {}
            groups, grades = self.sample(self._setup.sampler, params, state.version, number, **rates)
            groups = self._mixed(state, groups, number)
            arrivals.append(Arrival(groups, grades, number, early=(number - 1) * interval >= queue.round))
        return arrivals

    def _warn_of_avoided_problems(self, queue: Queue) -> None:
        """Logs the problems whose completions got no reward, once; the curriculum rarely draws them again."""
        if not self._warns or None not in queue.rates.values():
            return
        self._warns = False
        avoided = [
            question_of(problem.prompt)
            for key, problem in zip(self._setup.train.keys, self._setup.train.problems, strict=True)
            if queue.rates.get(key, 0.0) is None
        ]
        logger.warning(
            "task.curriculum: no completion of %d problems got a reward: %.200s; the curriculum draws such problems"
            " only by its share task.curriculum.uniform = %g. metrics.jsonl counts the reasons: grading/… and"
            " agent/…",
            *(len(avoided), ", ".join(map(repr, avoided)), self._config.task.curriculum.uniform),
        )

    def metrics(self, queue: Queue, groups: Sequence[Group], step: int) -> dict[str, float]:
        """The curriculum's problems with a recent pass rate, and the mean of these rates."""
        rates = [rate for rate in queue.rates.values() if rate is not None]
        return {"curriculum/problems": len(rates), "curriculum/pass_rate": sum(rates) / len(rates)} if rates else {}


# --- Another engine samples for the policy.


class EngineSampler:
    """Samples batches on a server, which gets new weights before a batch; a context.

    Attributes:
        engine: the connection to the server.
        takes_weights: True if the server gets the weights of each batch.
        counts: the pushes, the seconds of the last one, and the server's unusable replies, as metrics.
    """

    def __init__(self, sampler: BatchSampler):
        """Connects to no server yet."""
        self._sampler = sampler
        self._pushes = 0
        self._push_seconds = 0.0

    def __enter__(self) -> "EngineSampler":
        """Connects to the server. Its first batch gets the weights again, also after a resume.

        Raises:
            ValueError: the server does not answer, or takes no weights although the sampler's weights change.
        """
        config = self._sampler.config
        self.engine = engine = RemoteEngine.of_config(config, self._sampler.policy)
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

    def sample(self, prompts: Prompts, params: dict, version: int, number: int) -> list[Group]:
        """The groups of a batch, without grades; see `BatchSampler.sample`.

        Raises:
            ValueError: the server keeps losing the weights, or sends no usable replies.
        """
        config = self._sampler.config
        count, group_size = config.own_counts
        engine = self.engine
        # Batches have ranges of seeds of their own, so that no two completions of a run are drawn alike.
        seed = (config.seed * 1_000_003 + number) * count * group_size % 2**31
        for tries in range(config.rollout.engine.retries, -1, -1):
            try:
                if self.takes_weights and engine.version != version:
                    self.push(params, version)
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

    def push(self, params: dict, version: int) -> None:
        """Writes the weights to a folder and gives them to the server.

        Raises:
            ValueError: the server does not take them.
        """
        began = time.monotonic()
        config = self._sampler.config
        decoder = self._sampler.policy.decoder.config
        # recjax.serve computes with norm scales in float32, as this process does; other servers round them.
        dtype = "float32" if self.engine.api == "recjax" else jnp.dtype(self._sampler.policy.decoder.dtype).name
        shared_folder = Path(config.rollout.engine.folder or Path(config.output) / "pushed").absolute()
        folder = shared_folder / str(version)
        path = config.model.path
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was interrupted
        # Before adapters are merged: a sum in the compute dtype would round twice.
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        is_adapter = config.model.lora is not None and self.engine.api != "recjax" and path is not None
        if is_adapter:
            with whole_folder(folder) as partial:
                write_adapters(partial, decoder, params, str(model_folder(path)))
        else:
            params = merged(decoder, params) if config.model.lora else params
            decoder = dataclasses.replace(decoder, lora=None)
            if self.engine.api == "vllm" and decoder.tie_embeddings and decoder.attention_cap is None:
                # vLLM's build for CPUs packs weights as it loads them, and keeps the former output layer of tied
                # embeddings unless the folder has one. Gemma 2, which alone bounds attention scores, takes none.
                params = params | {"head": {"kernel": params["embedding"]["embedding"].T}}
                decoder = dataclasses.replace(decoder, tie_embeddings=False)
            with tempfile.TemporaryDirectory() as base:
                if path is None:
                    write_base(Path(base), decoder, self._sampler.policy.tokenizer, self._sampler.policy.stop_ids)
                export_model(folder, decoder, params, model_folder(path) if path else Path(base), dtype)
        self.engine.push(folder, version, is_adapter)
        self._pushes += 1
        self._push_seconds = time.monotonic() - began
        for older in shared_folder.iterdir():  # the server has acknowledged the newest
            if older != folder and older.name.isdecimal():
                shutil.rmtree(older, ignore_errors=True)


class EngineSource(PolicySource):
    """A server samples a batch when it is due."""

    def __init__(self, setup: Setup, learner: Learner):
        """Connects to no server yet."""
        super().__init__(setup, learner, self._sampled)

    @contextlib.contextmanager
    def opened(self, state: State) -> Iterator[None]:
        """Connects to the server."""
        with EngineSampler(self._setup.sampler) as self._engine:
            yield

    def _sampled(
        self,
        sampler: BatchSampler,
        params: dict,
        version: int,
        number: int,
        rates: Mapping[str, float | None] | None = None,
    ) -> tuple[list[Group], Grades]:
        prompts = sampler.batch_prompts(number, rates)
        with sampler.phases.phase("sample"):
            groups = self._engine.sample(prompts, params, version, number)
            return groups, submit(groups, prompts, sampler.grading)

    def metrics(self, queue: Queue, groups: Sequence[Group], step: int) -> dict[str, float]:
        """The metrics of `PolicySource` and of the server."""
        return super().metrics(queue, groups, step) | self._engine.counts


class EngineBatches(EngineSampler):
    """Batches that a server samples one after another while the trainer trains, like `Generators`; a context.

    The server gets the weights of a batch after the previous batch, so all tokens of a completion are from one version.

    Attributes:
        in_flight, waited_seconds: see `Generators`.
    """

    def __init__(self, sampler: BatchSampler):
        """Connects to no server yet."""
        super().__init__(sampler)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._futures = {}
        self.in_flight = {}
        self.waited_seconds = 0.0

    def __exit__(self, *exception: object) -> None:
        """Waits for replies to current requests, and samples no more batches."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        super().__exit__(*exception)
        self._thread.shutdown()

    def publish(self, version: int, params: dict) -> None:
        """Sets the weights, held on the host, for batches issued from here on."""
        self._newest = version, params

    def issue(self, number: int) -> None:
        """Samples a batch after all batches that were issued before."""
        prompts = self._sampler.batch_prompts(number)
        version, params = self._newest
        self.in_flight = {**self.in_flight, number: version}
        self._futures[number] = prompts, self._thread.submit(self.sample, prompts, params, version, number)

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
            received.append((number, (groups, submit(groups, prompts, self._sampler.grading))))
        self.in_flight = {number: version for number, version in self.in_flight.items() if number not in done}
        return received


# --- Generators sample numbered batches, which arrive in any order.

Newest = Callable[[], tuple[int, dict] | None]  # the latest trained parameters and their version


class GeneratorSource(StoreSource):
    """Other processes or a server sample, at the same time as the updates.

    Attributes:
        generators: the processes, or the server.
    """

    def __init__(self, setup: Setup, learner: Learner, generators: Generators | EngineBatches):
        """Starts no process."""
        super().__init__(setup, learner)
        self.generators = generators
        self._published = None

    @contextlib.contextmanager
    def opened(self, state: State) -> Iterator[None]:
        """Starts the generators on the batches that were in flight at the checkpoint.

        Batches sampled after the checkpoint leave the record and are sampled again, as their weights no longer exist.
        """
        in_flight = state.source.get("in_flight", [])
        with self.generators as generators:
            if isinstance(generators, Generators):
                setup = self._setup
                frozen = params_on_host(self._learner.frozen)
                generators.start(open_generator, setup.config, setup.policy, setup.train, setup.grading.reward, frozen)
            self.begin_step(state)
            issued = state.queue.counts["batches"] + len(in_flight)
            record = self._config.record_file
            if record and hosts.is_first():
                with Store(record, create=True) as store:
                    batches = ((number, int(name.split("/")[0])) for name, (number,) in store.numbers("id").items())
                    store.delete([number for number, batch in batches if batch > issued or batch in in_flight])
            for number in in_flight:
                generators.issue(number)
            del state  # a reference would keep its weights in memory during the whole run
            yield

    def begin_step(self, state: State) -> None:
        """Gives new weights to the generators."""
        self.generators.waited_seconds = 0.0
        if state.version != self._published:
            self._published = state.version
            # Processes have the frozen parameters since their start; a server gets all of them with each push.
            has_frozen = isinstance(self.generators, Generators)
            params = self._learner.behavior_params(state) if has_frozen else self._learner.sampler_params(state)
            self.generators.publish(state.version, params_on_host(params))

    def poll(self, state: State, step: int, wait: bool) -> list[Arrival]:
        """Issues batches that the run could train on in time, up to the last step; returns finished batches."""
        config = self._config
        count, _ = config.own_counts
        queue = state.queue
        generators = self.generators
        every = self._setup.settings.sampling_interval
        updates = config.training.updates
        # In the first poll of a round only: in the second one the step waits, and nothing has changed since.
        while not wait and not generators.are_busy:
            number = queue.counts["batches"] + len(generators.in_flight) + 1
            ahead = self._versions_ahead(queue)
            # A batch whose turn comes after the last step, or too late for its version, is not sampled.
            has_turn = step + len(ahead) // count * every * updates <= config.training.steps
            has_turn = has_turn and schedule.in_time([*ahead, state.version], step, count, config.regime, updates)
            due = number, queue.round, every, state.version, step
            if not (has_turn and schedule.is_wanted(*due, config.regime, updates)):
                break
            generators.issue(number)
        with self._setup.phases.phase("sample"):
            done = generators.receive(wait)
        return [Arrival(self._mixed(state, groups, number), grades, number) for number, (groups, grades) in done]

    def must_wait(self, queue: Queue, step: int) -> bool:
        """True if a batch that generators sample would exceed `regime.max_staleness` at its turn after `step`."""
        ahead = self._versions_ahead(queue)
        updates = self._config.training.updates
        count, _ = self._config.own_counts
        in_flight = self.generators.in_flight
        return bool(in_flight) and not schedule.in_time(ahead, step + updates, count, self._config.regime, updates)

    def _versions_ahead(self, queue: Queue) -> list[int]:
        """Policy versions of the groups in the queue and of the groups that generators sample."""
        count, _ = self._config.own_counts
        coming = [version for version in self.generators.in_flight.values() for _ in range(count)]
        return [*queued_versions(queue, self._setup.settings), *coming]

    def state(self) -> dict[str, Any]:
        """The numbers of the batches that the generators sample."""
        return {"in_flight": [*self.generators.in_flight]}

    def metrics(self, queue: Queue, groups: Sequence[Group], step: int) -> dict[str, float]:
        """The generators' work, and the staleness of the step's tokens."""
        of_tokens = token_staleness(groups, step)
        return {
            "generators/waited_seconds": self.generators.waited_seconds,
            "generators/in_flight": len(self.generators.in_flight),
            **self.generators.counts,
            **({} if of_tokens is None else {"generators/token_staleness": of_tokens}),
        }


@contextlib.contextmanager
def open_generator(
    config: Config, policy: Policy, prompts: Prompts, reward: Reward, frozen: dict
) -> Iterator[Callable[[int, int, dict, Newest], tuple[list[Group], list[Grade]]]]:
    """The function of a generator: from a batch's number, policy version and weights to its groups and their grades.

    It samples one batch at a time, during the grading of the previous batch, and takes new weights between rounds of
    tokens.
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
                if agents:
                    agents.older_params = older_params(config, policy, frozen, weights)
                params = combine(jax.tree.map(jnp.asarray, weights), frozen)
                groups, grades = batches.sample(params, version, number, newer=newer)
            return groups, grades.result()

        yield sample


# --- A store that grows.


class FollowedSource(StoreSource):
    """A store that another process writes; a step waits until it has enough groups, and takes each group once."""

    endless = True

    def opened(self, state: State) -> contextlib.AbstractContextManager:
        """Continues after the completions that were taken before the checkpoint."""
        self._follower = Follower(self._config, self._setup.policy, state.totals["run"], state.source)
        return contextlib.nullcontext()

    def begin_step(self, state: State) -> None:
        """Begins to count the groups and seconds of a step."""
        self._admitted = 0
        self._began = time.monotonic()
        self._said = time.monotonic() - LINE_SECONDS + 1

    def poll(self, state: State, step: int, wait: bool) -> list[Arrival]:
        """Takes groups, at most as many as the step lacks, with the oldest weights first."""
        follower = self._follower
        count, _ = self._config.own_counts
        ready = len(state.queue.ready)
        # A step adds one batch to a replay buffer, and more only if it has too few groups. Without replay, groups stay
        # in the store until their turn.
        room = count - (min(ready, self._admitted) if self._setup.settings.replay else ready)
        if wait and time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            waiting, completions, pending = follower.waiting
            rewards = f"{waiting} groups wait: {pending} of their {completions} completions have no reward yet"
            logger.info(
                "step %d waits for %s: %d of %d groups are ready; %s", step, follower.name, ready, count, rewards
            )
        with self._setup.phases.phase("sample"):
            time.sleep(POLL_SECONDS if wait else 0)
            arrival = follower.poll(step, room)
        self._admitted = self._admitted + len(arrival.groups)
        self._waited_seconds = time.monotonic() - self._began
        return [arrival]

    def state(self) -> dict[str, Any]:
        """The completions that were taken."""
        return self._follower.state()

    def metrics(self, queue: Queue, groups: Sequence[Group], step: int) -> dict[str, float]:
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
