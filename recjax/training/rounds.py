"""Everything before the update: sync the sampler, sample a batch, take groups from the queue."""

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, UInt32

from recjax import hosts
from recjax.config import Config
from recjax.experience import queue as queues
from recjax.experience.group import Grade, Group, token_staleness
from recjax.experience.queue import Queue
from recjax.experience.sources import groups_at, mixed, with_logprobs
from recjax.experience.store import Store, records_of
from recjax.experience.stored import stored_per_batch
from recjax.experience.tokenize import tokenizer_name
from recjax.hub.policy import Policy
from recjax.models.placement import params_on_host
from recjax.models.trainable import combine
from recjax.rollout.agents import AGENT_FAILURES, Agents
from recjax.rollout.collecting import Grades, row_keys, sample_groups, submit
from recjax.rollout.requests import Weights
from recjax.tasks.grading.pool import FAILURES, Grading
from recjax.tasks.grading.reward import Reward
from recjax.tasks.prompts import Prompts, batch_indices
from recjax.training import following, schedule
from recjax.training.metrics import PhaseSeconds
from recjax.training.run import Run, State

_TOGETHER = 32  # batches whose keys are made at once
IDLE_ROUNDS = 100  # limit of batches for one step, in addition to those due to the config's delays


def sync_sampler(run: Run, state: State, step: int) -> State:
    """Gives the sampler the trained parameters in a sync step; returns the state."""
    if not schedule.is_sync(step, run.config.regime) or state.version == step - 1:
        return state
    state = state._replace(behavior_params=None, version=step - 1)
    if run.generators:
        run.generators.publish(state.version, params_on_host(run.learner.sampler_params(run, state)))
    return state


def keep_behavior_params(run: Run, state: State, step: int) -> State:
    """Copies the weights before the step's update if the sampler keeps them; returns the state."""
    keeps = run.samples and not schedule.is_sync(step + 1, run.config.regime)
    return state._replace(behavior_params=run.learner.sampler_params(run, state, copy=True) if keeps else None)


def sample_batches(run: Run, state: State, step: int, wait: bool) -> State:
    """Samples the batches due in this round and returns the state with them in its queue.

    It samples the next round's batch early, during the grading of this one, if both use the same weights.

    Args:
        wait: wait for a batch of the generators.
    """
    queue, count = state.queue, stored_per_batch(run.config)
    if count and not queue.beside:  # groups that the step takes whole from a store
        with run.phases.phase("sample"):
            groups = _with_logprobs(run, state, groups_at(run.stored.groups, count, step, run.config.seed))
        queue = queues.add_beside(queue, groups)
    if run.generators:
        queue = _received(run, state._replace(queue=queue), step, wait)
        return state._replace(queue=queue, in_flight=tuple(run.generators.in_flight))
    while (early := _is_due(run, queue, step)) is not None:
        number = queue.added + 1
        groups, grades = run.sample(run, run.learner.sampler_params(run, state), state.version, number)
        groups = _joined(run, state, groups, number)
        queue = queues.add(queue, groups, grades, number, run.config.seed, run.settings, early)
    return state._replace(queue=queue)


def _is_due(run: Run, queue: Queue, step: int) -> bool | None:
    """True if the next batch is sampled early, for the next round; False if for this round; None if none is sampled."""
    config, settings = run.config, run.settings
    if run.own[0] == 0:
        return None
    if queue.added <= (queue.round - 1) // settings.sampling_interval:
        return False
    if queue.early or not queues.is_sampling_round(queue.round + 1, settings):
        return None
    # Log-probs of the policy as it is now are those of the round.
    of_now = config.experience is not None and config.experience.missing_logprobs == "current"
    return True if not of_now and schedule.samples_ahead(step, config.training.steps, config.regime) else None


def sample_batch(
    run: Run,
    weights: dict,
    version: int,
    number: int,
    prefix: str = "",
    source: str = "policy",
    newer: Callable[[], Weights | None] | None = None,
) -> tuple[list[Group], Grades]:
    """Samples the groups of a batch, which depend only on its number and the weights; returns them and pending grades.

    Args:
        weights: parameters with the structure of the trained parameters.
        version: the weights' policy version.
        prefix: prefix of the completions' ids, before the batch's number.
        source: the completions' source.
        newer: returns newer weights between rounds of tokens, if some have arrived; None: no new weights.
    """
    config = run.config
    count, group_size = run.own
    prompts = run.train.take(batch_indices(len(run.train.texts), count, number, config.seed))
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


def drop_key(seed: int | Array) -> Key[Array, ""]:
    """The random key that, folded with a step, decides which completions the step's update drops."""
    return jax.random.fold_in(jax.random.key(seed), 3)


@functools.lru_cache(maxsize=2)
def _row_keys(seed: int, block: int, rows: int) -> UInt32[np.ndarray, "batches batch words"]:
    """Key data for the completions of several consecutive batches.

    They are computed together, as the host would otherwise wait for them behind the running update in each step.
    """
    numbers = np.arange(block * _TOGETHER, (block + 1) * _TOGETHER)
    return row_keys(jax.vmap(functools.partial(batch_key, seed))(numbers), rows)


def _joined(run: Run, state: State, groups: list[Group], number: int) -> list[Group]:
    """The groups of a batch, with completions of the store mixed in if the config says so."""
    if not run.others:
        return groups
    count = run.config.rollout.group_size - run.own[1]
    with run.phases.phase("sample"):
        return _with_logprobs(run, state, mixed(groups, run.others, count, number, run.config.seed))


def _with_logprobs(run: Run, state: State, groups: list[Group]) -> list[Group]:
    """Fills in log-probs of the current parameters if `experience.missing_logprobs` is `current`."""
    config, sampling = run.config, run.config.rollout.sampling()
    if config.experience.missing_logprobs != "current":
        return groups
    everything = combine(state.trained.params, run.frozen)
    return with_logprobs(groups, run.shape, run.policy, everything, sampling, config.model.logprob_chunk)


def take_groups(run: Run, state: State, step: int) -> tuple[State, list[Group] | None]:
    """Delivers this round's rewards and takes the groups to train on; returns the state and the groups.

    Returns:
        None instead of the groups if there are too few, or if a batch that generators sample would exceed
        `regime.max_staleness` unless this step waits for it.
    """
    config, settings = run.config, run.settings
    state = state._replace(queue=add_due_grades(run, state.queue))
    queue = queues.deliver(state.queue, step, settings)
    count = run.own[0]
    later, groups = queues.take(queue, count, step, config.seed, settings)
    if groups is not None and state.in_flight:
        ahead = _versions_ahead(run, later)
        if not schedule.in_time(ahead, step + 1, count, config.regime):
            later, groups = queue, None
    return state._replace(queue=later), groups


def add_due_grades(run: Run, queue: Queue, all_of_them: bool = False) -> Queue:
    """Waits for the grades that are due, or for all, records their batches, and returns the queue."""
    with run.phases.phase("score"):
        queue, batches = queues.wait_for_grades(queue, all_of_them)
    if run.record and batches and hosts.is_first():
        with Store(run.record, create=True) as store:
            for groups in batches:
                records = records_of(groups, tokenizer_name(run.policy.tokenizer), datetime.now(UTC))
                # An agent that failed before its first turn has no tokens.
                records = [record for record in records if record.completion.rows]
                # A run that resumed from before this batch has recorded it already.
                if records and not store.numbers("id", [records[0].completion.id]):
                    store.append(records)
    return queue


def queue_metrics(run: Run, queue: Queue, groups: list[Group], step: int) -> dict:
    """Metrics of the step's groups and the queue, and counts of ungraded completions by reason."""
    config = run.config
    logged = {}
    if run.follower:
        logged |= following.metrics(run, queue, groups, step)
    elif run.own[0]:
        reasons = FAILURES[1:-1] if run.grading.reward.per_row else FAILURES[-1:]
        logged |= {f"grading/{reason}": queue.ungraded.get(reason, 0) for reason in reasons}
    if run.agents:
        logged |= {f"agent/{reason}": queue.ungraded.get(reason, 0) for reason in AGENT_FAILURES}
    if config.experience or run.generators:
        rows = Counter(completion.source for group in groups for completion in group.completions)
        logged["source_rows"] = dict(rows)
    if run.generators or run.follower or (config.experience and not config.experience.store):
        logged |= queues.counts(queue)
    if run.generators:
        waited, restarts = run.generators.waited_seconds, run.generators.restarts
        in_flight = len(run.generators.in_flight)
        logged |= {"generators/waited_seconds": waited, "generators/in_flight": in_flight}
        logged["generators/restarts"] = restarts
        of_tokens = token_staleness(groups, step)
        logged |= {} if of_tokens is None else {"generators/token_staleness": of_tokens}
    return logged


def require_some(run: Run, queue: Queue, step: int) -> None:
    """Raises if sampling goes through too many rounds without enough groups to train on.

    Raises:
        RuntimeError: too many rounds have gone by without a step.
    """
    settings = run.settings
    refill = run.config.experience and run.config.experience.refill
    usual, most = settings.offset + settings.late.longest, refill.batches if refill else IDLE_ROUNDS
    if queue.idle >= usual + settings.sampling_interval * most + (refill is None):
        raise RuntimeError(
            f"step {step}: {most} batches were sampled, but too few groups remain to train on:"
            f" {queues.counts(queue)}. Relax the settings that drop groups (experience.replay, experience.refill,"
            " experience.late.deadline), or choose problems whose completions differ in reward"
        )


# --- Asynchronous sampling: generators sample numbered batches, which arrive in any order.

Newest = Callable[[], tuple[int, dict] | None]  # the latest trained parameters and their version


def start_generators(run: Run, state: State) -> None:
    """Starts generators on the batches that were in flight at the checkpoint.

    Batches sampled after the checkpoint leave the record and are sampled again, as their weights no longer exist.
    """
    generators = run.generators
    generators.start(sampler, run.config, run.policy, run.train, run.grading.reward, params_on_host(run.frozen))
    generators.publish(state.version, params_on_host(run.learner.sampler_params(run, state)))
    issued = state.queue.added + len(state.in_flight)
    if run.record and hosts.is_first():
        with Store(run.record, create=True) as store:
            batches = ((number, int(name.split("/")[0])) for name, (number,) in store.numbers("id").items())
            store.delete([number for number, batch in batches if batch > issued or batch in state.in_flight])
    for number in state.in_flight:
        generators.issue(number)


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
        run = Run(config, policy, prompts, prompts, grading, None, PhaseSeconds(), frozen=frozen, agents=agents)
        one_at_a_time = threading.Lock()

        def sample(number: int, version: int, weights: dict, newest: Newest) -> tuple[list[Group], list[Grade]]:
            with one_at_a_time:
                newer = _newer(version, newest, frozen)
                groups, grades = sample_batch(run, jax.tree.map(jnp.asarray, weights), version, number, newer=newer)
            return groups, grades.result()

        yield sample


def _newer(version: int, newest: Newest, frozen: dict) -> Callable[[], Weights | None]:
    """A function that returns weights newer than `version` and than its earlier results, or None."""
    taken = version

    def newer() -> Weights | None:
        nonlocal taken
        found = newest()
        if found is None or found[0] <= taken:
            return None
        taken = found[0]
        return Weights(combine(jax.tree.map(jnp.asarray, found[1]), frozen), taken)

    return newer


def _received(run: Run, state: State, step: int, wait: bool) -> Queue:
    """Issues batches to the generators, and returns the queue with the batches that they have sampled."""
    queue = state.queue
    if not wait:
        _issue(run, state, step)
    with run.phases.phase("sample"):
        done = run.generators.receive(wait)
    for number, (groups, grades) in done:
        groups = _joined(run, state, groups, number)
        queue = queues.add(queue, groups, grades, number, run.config.seed, run.settings)
    return queue


def _issue(run: Run, state: State, step: int) -> None:
    """Issues batches that are wanted now and that the run could train on in time, up to the last step."""
    config, generators, queue = run.config, run.generators, state.queue
    count, every = run.own[0], run.settings.sampling_interval
    while not generators.are_busy:
        number, ahead = queue.added + len(generators.in_flight) + 1, _versions_ahead(run, queue)
        has_turn = step + len(ahead) // count * every <= config.training.steps
        has_turn = has_turn and schedule.in_time([*ahead, state.version], step, count, config.regime)
        if not (has_turn and schedule.is_wanted(number, queue.round, every, state.version, step, config.regime)):
            return
        generators.issue(number)


def _versions_ahead(run: Run, queue: Queue) -> list[int]:
    """Policy versions of the groups in the queue and of the groups that generators sample."""
    coming = [version for version in run.generators.in_flight.values() for _ in range(run.own[0])]
    return [*queues.queued_versions(queue, run.settings), *coming]
