"""Sources of groups: the policy, a store that grows, a store at rest.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from recjax import hosts
from recjax.config import Config
from recjax.experience.following import UNUSABLE, Follower
from recjax.experience.group import Grade, Group, token_staleness
from recjax.experience.queue import LEFT, LOST, Arrival, Queue, queued_versions
from recjax.experience.sources import groups_at, mixed, with_logprobs
from recjax.experience.store import Store
from recjax.files import digest, whole_folder
from recjax.hub.export import export_model, write_adapters, write_base
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import model_folder
from recjax.models.placement import params_on_host
from recjax.models.trainable import combine, merged
from recjax.rollout.agents import Agents
from recjax.rollout.collecting import submit
from recjax.rollout.generators import AT_A_TIME, Generators
from recjax.rollout.remote import LostWeightsError, RemoteEngine
from recjax.rollout.requests import Weights
from recjax.tasks.grading.pool import Grading
from recjax.tasks.grading.reward import MixedReward, Reward
from recjax.tasks.problems import question_of
from recjax.tasks.prompts import Prompts
from recjax.training import schedule
from recjax.training.learner import Learner
from recjax.training.metrics import PhaseSeconds
from recjax.training.policies import older_params
from recjax.training.prepare import Setup
from recjax.training.run import Source, State
from recjax.training.sampling import BatchSampler, LocalSampler, PolicySampler, SampledBatch

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
        """The groups from the queue, then those of the store, which depend only on the step.

        With `missing_logprobs: current`, the policy scores them here, before their first update, and not when they
        arrive: a group may wait for many updates.
        """
        config = self._config
        count = config.stored_groups
        if count:
            # They skip the queue: their rewards are known, and the checkpoint need not hold them.
            batch = schedule.batch_of(step, config.training.updates)
            with self._setup.phases.phase("sample"):
                assert self._setup.stored is not None
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
                # A batch that was in the queue at the checkpoint is in the record already.
                if records and not store.numbers("id", [records[0].completion.id]):
                    store.append(records)

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


def source_of(setup: Setup, learner: Learner, sample: Callable = BatchSampler.sample) -> Source:
    """The source of a run.

    Args:
        sample: see `LocalSampler`.
    """
    config = setup.config
    if config.follows:
        return FollowedSource(setup, learner)
    if not config.samples_training_data:
        return StoreSource(setup, learner)
    if config.rollout.engine:
        return PolicySource(setup, learner, EngineSampler(setup.sampler, learner.frozen))
    if config.regime.mode == "sync":
        return PolicySource(setup, learner, LocalSampler(setup.sampler, learner.frozen, sample))
    data = (config, setup.policy, setup.train, setup.grading.reward, params_on_host(learner.frozen))
    return PolicySource(setup, learner, Generators(config.regime, functools.partial(open_generator, *data)))


# --- The policy samples.


class PolicySource(StoreSource):
    """The policy samples numbered batches: in this process, in generators or on a server.

    A synchronous run waits for each batch in the round in which it issues it. An asynchronous run trains meanwhile.

    Attributes:
        sampler: samples the batches.
    """

    _warns = True  # of problems that a curriculum avoids, once

    def __init__(self, setup: Setup, learner: Learner, sampler: PolicySampler):
        """Opens no sampler yet."""
        super().__init__(setup, learner)
        self.sampler = sampler
        self._is_async = setup.config.regime.mode == "async"

    @contextlib.contextmanager
    def opened(self, state: State) -> Iterator[None]:
        """Opens the sampler, and issues the batches again that were in flight at the checkpoint.

        Batches that the run sampled after the checkpoint leave the record, as it samples them again, maybe otherwise.
        """
        in_flight = state.source.get("in_flight", [])
        with self.sampler:
            issued = state.queue.counts["batches"] + len(in_flight)
            record = self._config.record_file
            if record and issued and hosts.is_first() and not record.exists():
                logger.warning("%s is gone; the record has only batches after number %d", record, issued)
            elif record and hosts.is_first() and record.exists():
                with Store(record, create=True) as store:
                    batches = ((number, int(name.split("/")[0])) for name, (number,) in store.numbers("id").items())
                    store.delete([number for number, batch in batches if batch > issued or batch in in_flight])
            if self._is_async:
                self.sampler.replace_weights(state.version, functools.partial(self._learner.behavior_params, state))
            for number in in_flight:
                self.sampler.issue(number)
            del state  # a reference would keep its weights in memory during the whole run
            yield

    def begin_step(self, state: State) -> None:
        """Begins to count the seconds for which a step waits."""
        self._waited_seconds = 0.0

    def poll(self, state: State, step: int, wait: bool) -> list[Arrival]:
        """Issues the batches that are due; returns finished ones, in a synchronous run all that it issued."""
        queue = state.queue
        sampler = self.sampler
        if not wait:  # in the second poll of a round the step waits, and nothing has changed since the first one
            self._warn_of_avoided_problems(queue)
            sampler.replace_weights(state.version, functools.partial(self._learner.behavior_params, state))
            rates = queue.rates if self._config.task.curriculum else None
            number = queue.counts["batches"] + len(sampler.in_flight) + 1
            while self._is_due(state, number, step):
                sampler.issue(number, rates)
                number += 1
        began = time.monotonic()
        with self._setup.phases.phase("sample"):
            batches = sampler.receive(wait)
            while sampler.in_flight and not self._is_async:
                batches += sampler.receive(wait=True)
        self._waited_seconds += time.monotonic() - began if wait else 0.0
        arrivals = []
        others = self._setup.others
        for number, (groups, grades) in batches:
            if others:
                _, sampled_count = self._config.own_counts
                stored_count = self._config.rollout.group_size - sampled_count
                # By the batch's number, not the step, so that a batch that arrives late gets the same completions.
                with self._setup.phases.phase("sample"):
                    groups = mixed(groups, others, stored_count, number, self._config.seed)
            is_early = not self._is_async and (number - 1) * self._setup.settings.sampling_interval >= queue.round
            arrivals.append(Arrival(groups, grades, number, early=is_early))
        return arrivals

    def _is_due(self, state: State, number: int, step: int) -> bool:
        """True if a batch should be sampled now."""
        config = self._config
        regime = config.regime
        updates = config.training.updates
        interval = self._setup.settings.sampling_interval
        if not self._is_async:
            # The next round's batch is sampled during the grading of this one, if both use the same weights.
            batches = schedule.batch_of(config.training.steps, updates)
            is_ahead = schedule.samples_ahead(schedule.batch_of(step, updates), batches, regime)
            return (number - 1) * interval < state.queue.round + is_ahead
        if len(self.sampler.in_flight) >= AT_A_TIME * regime.generators:
            return False
        count, _ = config.own_counts
        ahead = self._versions_ahead(state.queue)
        # A batch whose turn comes after the last step, or too late for its version, is not sampled.
        has_turn = step + len(ahead) // count * interval * updates <= config.training.steps
        has_turn = has_turn and schedule.in_time([*ahead, state.version], step, count, regime, updates)
        due = number, state.queue.round, interval, state.version, step
        return has_turn and schedule.is_wanted(*due, regime, updates)

    def must_wait(self, queue: Queue, step: int) -> bool:
        """True if a batch in flight would exceed `regime.max_staleness` at its turn after `step`."""
        if not self.sampler.in_flight:
            return False
        updates = self._config.training.updates
        count, _ = self._config.own_counts
        ahead = self._versions_ahead(queue)
        return not schedule.in_time(ahead, step + updates, count, self._config.regime, updates)

    def _versions_ahead(self, queue: Queue) -> list[int]:
        """Policy versions of the groups in the queue and in flight."""
        count, _ = self._config.own_counts
        coming = [version for version in self.sampler.in_flight.values() for _ in range(count)]
        return [*queued_versions(queue, self._setup.settings), *coming]

    def state(self) -> dict[str, Any]:
        """The numbers of the batches in flight."""
        return {"in_flight": [*self.sampler.in_flight]}

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
        assert self._config.task.curriculum is not None
        logger.warning(
            "task.curriculum: no completion of %d problems got a reward: %.200s; the curriculum draws such problems"
            " only by its share task.curriculum.uniform = %g. metrics.jsonl counts the reasons: grading/… and"
            " agent/…",
            *(len(avoided), ", ".join(map(repr, avoided)), self._config.task.curriculum.uniform),
        )

    def metrics(self, queue: Queue, groups: Sequence[Group], step: int) -> dict[str, float]:
        """The sampler's metrics; the curriculum's pass rates; of asynchronous runs, waits and the tokens' staleness."""
        rates = [rate for rate in queue.rates.values() if rate is not None]
        measured = {"curriculum/problems": len(rates), "curriculum/pass_rate": sum(rates) / len(rates)} if rates else {}
        if not self._is_async:
            return {**measured, **self.sampler.counts}
        of_tokens = token_staleness(groups, step)
        return {
            "generators/waited_seconds": self._waited_seconds,
            "generators/in_flight": len(self.sampler.in_flight),
            **self.sampler.counts,
            **({} if of_tokens is None else {"generators/token_staleness": of_tokens}),
        }


# --- Servers and generators sample for the policy.


class EngineSampler(contextlib.AbstractContextManager):
    """A `PolicySampler` on a server, which samples one batch after another and gets new weights before a batch.

    All tokens of a completion are from one version, as the server gets weights only between two batches.

    Attributes:
        engine: the connection to the server.
        takes_weights: True if the server gets the weights of each batch.
        in_flight, counts: see `PolicySampler`.
    """

    def __init__(self, sampler: BatchSampler, frozen: dict):
        """Takes the parameters that are not trained; connects to no server yet."""
        self._sampler = sampler
        self._frozen = frozen
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._issued: dict[int, Future] = {}
        self._version: int | None = None
        self._pushes = 0
        self._push_seconds = 0.0
        self.in_flight: dict[int, int] = {}

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
            assert config.rollout.engine is not None
            remedy = "start vLLM with VLLM_SERVER_DEV_MODE=1, or train adapters (model.lora and model.path), or "
            raise ValueError(
                f"rollout.engine.url = {config.rollout.engine.url!r}: {engine.api or 'this server'} cannot take whole"
                f" weights over HTTP; {remedy * (engine.api == 'vllm')}set regime.offline=true to train on samples"
                " from its own weights"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits for replies to current requests, and samples no more batches."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.engine.__exit__(*exception)
        self._thread.shutdown()

    @property
    def counts(self) -> dict[str, float]:
        """The pushes, the seconds of the last one, and the server's unusable replies, as metrics."""
        return {
            "engine/pushes": self._pushes,
            "engine/push_seconds": self._push_seconds,
            "engine/unusable": self.engine.left_out.total(),
        }

    def replace_weights(self, version: int, weights: Callable[[], dict]) -> None:
        """Copies the weights to the host; see `PolicySampler`."""
        if version != self._version:
            self._version = version
            self._params = params_on_host(combine(weights(), self._frozen)) if self.takes_weights else {}

    def issue(self, number: int, rates: Mapping[str, float | None] | None = None) -> None:
        """See `PolicySampler`."""
        assert self._version is not None
        self._issued[number] = self._thread.submit(self._batch, number, self._version, self._params, rates)
        self.in_flight[number] = self._version

    def _batch(self, number: int, version: int, params: dict, rates: Mapping[str, float | None] | None) -> SampledBatch:
        prompts = self._sampler.batch_prompts(number, rates)
        groups = self.sample(prompts, params, version, number)
        return groups, submit(groups, prompts, self._sampler.grading)

    def receive(self, wait: bool) -> list[tuple[int, SampledBatch]]:
        """See `PolicySampler`."""
        if wait:
            concurrent.futures.wait(self._issued.values(), return_when=FIRST_COMPLETED)
        done = [number for number, batch in self._issued.items() if batch.done()]
        self.in_flight = {number: version for number, version in self.in_flight.items() if number not in done}
        return [(number, self._issued.pop(number).result()) for number in done]

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
        assert config.rollout.engine is not None
        retries = config.rollout.engine.retries
        for tries in range(retries, -1, -1):
            try:
                if self.takes_weights and engine.version != version:
                    self.push(params, version)
                return engine.sample_tokens(
                    prompts, group_size, seed, name=f"{number:06d}", source="policy", version=version
                )
            except LostWeightsError as error:
                if not tries:
                    raise ValueError(
                        f"{error}, after {retries + 1} tries; give this run a server of its own that stays up"
                    ) from error
                logger.warning("%s; recjax gives it the weights again and samples batch %d again", error, number)
                engine.version = None
        raise AssertionError("the last try returns or raises")

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
        output = Path(config.output).absolute()
        shared_folder = output / "pushed"
        assert config.rollout.engine is not None
        if config.rollout.engine.folder:  # other runs may push there as well
            shared_folder = Path(config.rollout.engine.folder).absolute() / f"{output.name}-{digest(bytes(output))[:8]}"
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
        for older in shared_folder.glob("*"):  # the server has acknowledged the newest
            if older != folder and older.name.isdecimal():
                shutil.rmtree(older, ignore_errors=True)


Newest = Callable[[], tuple[int, dict] | None]  # the latest trained parameters and their version


@contextlib.contextmanager
def open_generator(
    config: Config, policy: Policy, prompts: Prompts, reward: Reward | MixedReward, frozen: dict
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
        self._before = state.queue.counts
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
            removed = state.queue.counts - self._before
            names = [name for name in (*LOST, *LEFT, *UNUSABLE) if removed[name] and name != "used_up"]
            left_out = ", ".join(f"experience/left_out/{name} {removed[name]}" for name in names)
            line = f"step {step} waits for {follower.name}: {ready} of {count} groups are ready; {rewards}"
            if left_out:
                logger.warning("%s; the run has left out others since the last step: %s", line, left_out)
            else:
                logger.info("%s", line)
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
