"""Whole runs of the toy task as two compiled programs, with learning rate, staleness, drift and seed as arguments.

One trains from an evaluation to the next, the other evaluates: inside the first one's loop an evaluation takes four
times as long on a CPU. Several runs at once by `vmap` are no faster there than one after the other: see
benchmarks/together.py. Sampling takes the engine's programs, the update is the trainer's, and so are
prompts, keys and rewards: a run made here equals the run of `recjax.train` up to rounding. It has no checkpoints, other
queues or files, because the toy task needs none.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jaxtyping import Array, Float, Int, UInt32

from recjax.analysis.collect import COLUMNS
from recjax.config import Config
from recjax.errors import UserError
from recjax.experience.batch import Batch
from recjax.experience.layout import Layout
from recjax.hub.policy import Policy
from recjax.models.drift import drifted
from recjax.models.logprobs import completion_logprobs
from recjax.models.sampling import NOTHING_RECORDED, TokenRecord
from recjax.models.unrolling import made_for_sampling, params_for
from recjax.rollout.collecting import row_keys
from recjax.rollout.decoding import RoundOptions, SlotState, decode, first_tokens, prefill
from recjax.rollout.keys_values import Memory, empty
from recjax.runs.prepare import prepare
from recjax.sources.sampling import batch_key
from recjax.tasks.prompts import Prompts, batch_indices
from recjax.training.evaluation import part_key
from recjax.training.learner import drop_key
from recjax.training.update import TrainState, UpdateContext, hyperparameters_of, make_optimizer, recipe_of, update

REWARD = "recjax.tasks.rewards:last_number_match"


class Seed(NamedTuple):
    """What a seed decides: the base policy, what every step and evaluation asks, and its random numbers.

    prompts, held_out: tokens of all prompts to train on, and of those evaluated; and the numbers that answer them.
    asked: places in `prompts` of each step's.
    keys, evaluation_keys: key data of each step's, and of each evaluation's completions.
    """

    number: int
    params: dict
    prompts: Int[np.ndarray, "problems prompt_time"]
    answers: Int[np.ndarray, " problems"]
    held_out: Int[np.ndarray, "held_out prompt_time"]
    held_out_answers: Int[np.ndarray, " held_out"]
    asked: Int[np.ndarray, "steps prompts"]
    keys: UInt32[np.ndarray, "steps batch words"]
    evaluation_keys: UInt32[np.ndarray, "evaluations rows words"]


DRIFT_KINDS = ("int8", "int4", "float8", "noise")


class Drift(NamedTuple):
    """The sampler's error, as `rollout.drift` describes it: scales of each kind, and whether log-probs are exact."""

    int8: float = 0.0
    int4: float = 0.0
    float8: float = 0.0
    noise: float = 0.0
    fixed: bool = False
    exact_logprobs: bool = False


class Regime(NamedTuple):
    """Which weights sample a step's batch: copied every `interval` steps, and `offset` steps old, with a drift.

    With neither offset nor a copy within the run, `interval` beyond its steps, training is offline.
    """

    interval: int
    offset: int = 0
    drift: Drift | None = None


def seed_of(config: Config) -> tuple[Seed, Policy]:
    """What the config's seed decides, and the policy.

    Raises:
        ValueError: prompts of different lengths, or another reward than that of these programs.
    """
    if (name := config.task.reward_name()) != REWARD:
        raise UserError("", f"task.reward = {name!r}: these programs compute only {REWARD!r}; set it")
    run, params = prepare(config)
    rollout, settings, steps = config.rollout, config.evaluation, config.training.steps
    numbers = np.arange(1, steps + 1)
    problems, count = len(run.train.texts), rollout.prompts_per_step
    if not (run.train.mask.all() and run.held_out.mask.all()):
        raise UserError("", "prompts of one program are of one length; take a task of which that is true")
    evaluated = range(0, steps + 1, settings.every)
    keys = row_keys(jax.vmap(functools.partial(batch_key, config.seed))(numbers), count * rollout.group_size)
    parts = [
        row_keys(part_key(config.seed, step, first), count * settings.samples)
        for step in evaluated
        for first in range(0, settings.problems, count)
    ]
    evaluation_keys = np.stack(parts).reshape(len(evaluated), -1, parts[0].shape[-1])
    asked = np.stack([batch_indices(problems, count, number, config.seed) for number in range(1, steps + 1)])
    own, held_out = ((prompts.tokens, _answers(prompts)) for prompts in (run.train, run.held_out))
    return Seed(config.seed, params, *own, *held_out, asked, keys, evaluation_keys), run.policy


def _answers(prompts: Prompts) -> np.ndarray:
    """The last number of each answer."""
    return np.array([int(re.findall(r"\d+", answer)[-1]) for answer in prompts.answers], np.int32)


def last_numbers(tokens: Int[Array, "batch time"], counts: Int[Array, " batch"], digits: Int[Array, " vocab"]):
    """The last number that each completion writes, below 10⁸; -1 where it writes none.

    Args:
        counts: tokens of each completion.
        digits: what each token is as a digit, -1: none.
    """

    def read(carry, column):
        number, in_number = carry
        place, token = column
        digit = jnp.where(place < counts, digits[token], -1)
        longer = jnp.minimum(jnp.where(in_number, 10 * number, 0) + digit, 10**8)
        return (jnp.where(digit >= 0, longer, number), digit >= 0), None

    start = (jnp.full(len(counts), -1), jnp.zeros(len(counts), bool))
    return jax.lax.scan(read, start, (jnp.arange(tokens.shape[1]), tokens.T))[0][0]


class Programs:
    """Runs of one algorithm and one shape, of any rate, seed and regime; compiled once."""

    def __init__(self, config: Config, policy: Policy, most_offset: int):
        """Takes what is the same in all runs.

        Args:
            most_offset: of the regimes; 0 keeps no older weights than the sampler's.
        """
        recipe = recipe_of(config, policy.decoder)
        chosen, trainers = hyperparameters_of(config, 0.0), make_optimizer(config.optimizer)
        self._options = {"algorithm": chosen["algorithm"]}

        def with_rate(learning_rate):
            rates = chosen["optimizer"] | {"learning_rate": learning_rate}
            return optax.GradientTransformation(trainers.init, functools.partial(trainers.update, **rates))

        optimizer = optax.inject_hyperparams(with_rate)(learning_rate=0.0)
        self._config, self._policy = config, policy
        self._recipe = recipe._replace(optimizer=optimizer)
        self._sampler = made_for_sampling(policy.decoder)
        # Only score centering reads recorded tokens; the engine would record them for every algorithm.
        centers = recipe.algorithm.score_centering is not None
        self._recording = TokenRecord(top_k=config.rollout.recorded_top_k) if centers else NOTHING_RECORDED
        texts = policy.tokenizer.convert_ids_to_tokens(range(len(policy.tokenizer)))
        self._digits = jnp.array([int(text) if text.isdecimal() else -1 for text in texts])
        self._most_offset = most_offset
        self._trained = jax.jit(self.train, donate_argnames="carry")
        self.batch = jax.jit(self._batch)
        self.evaluated = jax.jit(self._evaluate)

    def _sample(self, params, prompts, keys, group_size):
        longest, count = self._config.rollout.max_completion_tokens, len(prompts) * group_size
        decoder, sampling, stop_ids = self._sampler, self._recipe.sampling, self._policy.stop_ids
        weights, zeros = params_for(decoder, params), jnp.zeros(count, jnp.int32)
        cache, scores = prefill(weights, prompts, jnp.ones(prompts.shape, bool), decoder=decoder)
        of, record = jnp.arange(count) // group_size, {"sampling": sampling, "recording": self._recording}
        first, first_logprobs, first_recorded = first_tokens(scores, of, keys, **record)
        live = ~jnp.isin(first, jnp.array(stop_ids, jnp.int32)) & (longest > 1)
        rows = SlotState(live, zeros + prompts.shape[1], zeros, first, zeros + 1, zeros + longest, keys)
        # One round samples all other tokens, so that the memory needs no room for them.
        memory = Memory(cache.keys_values, empty(cache.keys_values, rows=count, time=0))
        options = RoundOptions(sampling, stop_ids, longest - 1, self._recording)
        _, state = decode(weights, memory, rows, zeros[0], decoder=decoder, options=options)

        def joined(of_first, of_later):
            return jnp.concatenate([of_first[:, None], of_later], axis=1)

        recorded = jax.tree.map(joined, first_recorded, state.recorded)
        return joined(first, state.tokens), joined(first_logprobs, state.logprobs), 1 + state.counts, recorded

    def _score(self, params, prompts, prompt_mask, completions, mask) -> Float[Array, "batch time"]:
        recipe, tokens = self._recipe, (prompts, prompt_mask, completions, mask)
        return completion_logprobs(
            recipe.decoder, params, *tokens, sampling=recipe.sampling, chunk=recipe.chunk
        ).logprobs

    def _rewards(self, tokens, counts, answers) -> Float[Array, " batch"]:
        """As `recjax.tasks.rewards.last_number_match`."""
        return (last_numbers(tokens, counts, self._digits) == answers).astype(jnp.float32)

    def _evaluate(self, seed: Seed, params: dict, keys) -> dict[str, Float[Array, ""]]:
        """Accuracy, and KL to the initial policy in nats a token."""
        samples = self._config.evaluation.samples
        tokens, logprobs, counts, _ = self._sample(params, seed.held_out, keys, samples)
        mask = jnp.arange(tokens.shape[1]) < counts[:, None]
        asked = seed.held_out, jnp.ones(seed.held_out.shape, bool), jnp.where(mask, tokens, 0), mask
        initial = self._score(seed.params, *asked)
        return {
            "evaluation/accuracy": self._rewards(tokens, counts, jnp.repeat(seed.held_out_answers, samples)).mean(),
            "evaluation/initial_kl": jnp.where(mask, logprobs - initial, 0.0).sum() / mask.sum(),
        }

    def run(self, seed: Seed, rate: float, regime: Regime) -> pd.DataFrame:
        """A row for each evaluation, the first before training: what it finds, and means of the steps before it."""
        every, steps = self._config.evaluation.every, self._config.training.steps
        updates = self._config.training.updates_per_batch
        carry = jax.tree.map(jnp.copy, self.start(seed, rate))  # as the program writes over it
        rows = [{"step": 0} | self.evaluated(seed, seed.params, seed.evaluation_keys[0])]
        for first in range(0, steps, every):
            block = slice(first // updates, (first + every) // updates)
            numbers = jnp.arange(block.start + 1, block.stop + 1)
            carry, measured = self._trained(carry, seed, regime, (numbers, seed.asked[block], seed.keys[block]))
            evaluated = self.evaluated(seed, carry[0].params, seed.evaluation_keys[first // every + 1])
            rows.append({"step": first + every} | measured | evaluated)
        return pd.DataFrame(jax.device_get(rows)).astype(float)

    def start(self, seed: Seed, rate: float) -> tuple[TrainState, dict, dict]:
        """What is trained, the sampler's weights, and those of the last steps, the oldest first: all initial ones."""
        older = jax.tree.map(lambda x: jnp.repeat(x[None], self._most_offset + 1, 0), seed.params)
        optimizer_state = self._recipe.optimizer.init(seed.params)
        optimizer_state.hyperparams["learning_rate"] = jnp.float32(rate)
        return TrainState(seed.params, optimizer_state), seed.params, older

    def train(self, carry: tuple, seed: Seed, regime: Regime, batches: tuple[Array, Array, Array]) -> tuple:
        """The carry after some batches, and means over their updates.

        Args:
            carry: as `start` makes it.
            batches: of each its number, the places of its prompts, and the keys of its completions.
        """
        updates = self._config.training.updates_per_batch

        def step(carry, xs):
            state, sampler, older = carry
            number, asked, keys = xs
            older = jax.tree.map(lambda old, new: jnp.concatenate([old[1:], new[None]]), older, state.params)
            delayed = jax.tree.map(lambda x: x[-1 - regime.offset], older)
            syncs = (number - 1) % regime.interval == 0
            sampler = jax.tree.map(lambda new, old: jnp.where(syncs, new, old), delayed, sampler)
            version = (number - 1) // regime.interval * regime.interval - regime.offset
            batch = self._batch(seed, sampler, asked, keys, regime.drift, jnp.maximum(version, 0) * updates)
            key = jax.random.fold_in(drop_key(seed.number), number)
            context = UpdateContext(
                {}, key, proximal_logprobs=self._proximal(state.params, batch), hyperparameters=self._options
            )
            measured = []
            for _ in range(updates):
                state, metrics, _ = update(state, batch, Layout(), context, recipe=self._recipe)
                measured.append({name: metrics[name] for name in COLUMNS if name in metrics})
            means = jax.tree.map(lambda *values: jnp.stack(values).mean(), *measured)
            return (state, sampler, older), means | {"reward": batch.rewards.mean()}

        carry, measured = jax.lax.scan(step, carry, batches)
        return carry, {name: values.mean() for name, values in measured.items()}

    def _proximal(self, params: dict, batch: Batch) -> Float[Array, "batch time"] | None:
        """Log-probs before a batch's first update, for algorithms that read them in several updates of a batch."""
        if self._config.training.updates_per_batch == 1 or not self._recipe.algorithm.needs_proximal:
            return None
        return self._score(params, batch.prompts, batch.prompt_mask, batch.completions, batch.completion_mask)

    def _batch(self, seed: Seed, params: dict, asked, keys, drift: Drift | None = None, version=0) -> Batch:
        group = self._config.rollout.group_size
        prompts = seed.prompts[asked]
        weights = params if drift is None else self._drifted(seed, params, drift, version)
        tokens, logprobs, counts, recorded = self._sample(weights, prompts, keys, group)
        mask = jnp.arange(tokens.shape[1]) < counts[:, None]
        prompt_mask, completions = jnp.ones(prompts.shape, bool), jnp.where(mask, tokens, 0)
        if drift is not None:
            asked_tokens = prompts, prompt_mask, completions, mask
            logprobs = jax.lax.cond(drift.exact_logprobs, lambda: self._score(params, *asked_tokens), lambda: logprobs)
        ended = jnp.isin(jnp.take_along_axis(tokens, counts[:, None] - 1, 1)[:, 0], jnp.array(self._policy.stop_ids))
        rewards = self._rewards(tokens, counts, jnp.repeat(seed.answers[asked], group))
        return Batch(
            prompts=prompts,
            prompt_mask=prompt_mask,
            completions=completions,
            completion_mask=mask,
            behavior_logprobs=jnp.where(mask, logprobs, 0.0),
            rewards=rewards,
            group_ids=jnp.repeat(jnp.arange(len(prompts)), group),
            policy_version=jnp.zeros(len(counts), jnp.int32),
            truncated=~ended,
            accurate=rewards > 0,
            reward_parts={},
            recorded=recorded,
        )

    def _drifted(self, seed: Seed, params: dict, drift: Drift, version) -> dict:
        """As `BatchSampler` changes them; at most one of the scales is not 0."""
        key = jax.random.fold_in(jax.random.key(seed.number), 8)
        key = jnp.where(drift.fixed, key, jax.random.fold_in(key, version))
        for kind in DRIFT_KINDS:
            params = drifted(params, key, kind, getattr(drift, kind))
        return params
