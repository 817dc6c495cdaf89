"""A learner and a source without compiled programs, for tests of the loop: order, lateness, replay, resume, damage."""

import functools
import itertools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from recjax.algorithms.losses import TokenTerms
from recjax.experience.group import Completion, Grade, Group, Row, Turn
from recjax.experience.layout import Layout
from recjax.rollout.collecting import submit
from recjax.runs.sources import source_of
from recjax.tasks.prompts import batch_prompts
from recjax.training.evaluation import Evaluation
from recjax.training.learner import Learner
from recjax.training.update import TokenResults, TrainState
from tests.training.tiny_run import train


class CountingLearner(Learner):
    """Its only parameter is a checksum of all batches in order, so that other batches give other metrics."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def initial_policy(self, config, policy, train):
        return policy, {"checksum": np.zeros(1, np.float32)}

    def begin(self, config, policy, params, held_out, **others):
        self._held_out = held_out
        return TrainState(params, ())

    def behavior_params(self, state, copy=False):
        return state.trained.params if state.behavior_params is None else state.behavior_params

    def layout(self, batch, rows, doublings):
        return Layout(rows=rows)

    def proximal_logprobs(self, trained, batch, layouts):
        return np.full(batch.completions.shape, trained.params["checksum"][0], np.float32)

    def update(self, trained, batch, layout, step, proximal_logprobs=None):
        self.batches.append(batch)
        chosen = True if layout.rows is None else layout.rows[:, None]
        mask = np.asarray(batch.completion_mask) & chosen
        rows = mask.any(-1)
        columns = (batch.rewards, batch.group_ids, batch.policy_version, mask.sum(-1))
        tokens = (batch.completions, batch.behavior_logprobs, batch.token_turns, proximal_logprobs)
        columns = (*columns, None if batch.turn_rewards is None else np.nan_to_num(batch.turn_rewards))
        columns = (*columns, batch.teacher_prompts, batch.teacher_prompt_mask)
        pairs = [(column, rows) for column in columns] + [(column, mask) for column in tokens]
        seen = [np.asarray(column)[where] for column, where in pairs if column is not None]  # no padding
        state = np.asarray(trained.params["checksum"], np.float32).tobytes() + bytes([step % 256])
        checksum = zlib.crc32(b"".join([state, *(np.asarray(x).tobytes() for x in seen)])) % 65_536
        params = {"checksum": np.full(1, checksum, np.float32)}
        return TrainState(params, ()), *measured(batch, checksum)

    def evaluate(self, state):
        return evaluation(self._held_out.prompts, float(np.asarray(state.trained.params["checksum"])[0] % 100) / 100)


class MovingLearner(Learner):
    """Holds the policy's own parameters and moves all trained ones in each update, without a compiled update."""

    def behavior_params(self, state, copy=False):
        return {"checksum": np.full(1, state.step, np.float32)}

    def layout(self, batch, rows, doublings):
        return Layout(rows=rows)

    def update(self, trained, batch, layout, step, proximal_logprobs=None):
        def moved(x):
            return jax.device_put(np.asarray(x) + self.move(step, x.shape), x.sharding)

        return trained._replace(params=jax.tree.map(moved, trained.params)), *measured(batch, step)

    def move(self, step, shape):
        return np.float32(0.01)

    def evaluate(self, state):
        return evaluation(self._held_out.prompts, state.step / 100)


def measured(batch, loss: float) -> tuple[dict, TokenResults]:
    """Metrics of an update, and its results per token."""
    numbers = dict.fromkeys(("gradient_norm", "update_norm", "learning_rate"), 1.0)
    numbers["kept_fraction"] = float(batch.completion_mask.any())
    zeros = jnp.asarray(np.zeros(batch.completions.shape, np.float32))
    # Like the loss of a compiled update, the loop reads it from a device.
    return {"loss": jnp.asarray(np.float32(loss)), **numbers}, TokenResults(
        zeros, TokenTerms(zeros, zeros, zeros > 0, zeros)
    )


def evaluation(held_out, accuracy: float) -> Evaluation:
    """An evaluation of answers that nothing sampled."""
    graded = {"completion": "2", "reward": 1.0, "accurate": False, "truncated": False}
    problems = zip(held_out.texts, held_out.answers, strict=True)
    samples = [
        {"problem": place, "prompt": text, "question": text, "answer": answer} | graded
        for place, (text, answer) in enumerate(problems)
    ]
    return Evaluation(accuracy, accuracy, None, samples)


class Grades:
    """Grades that are there."""

    def __init__(self, grades):
        self._grades = grades

    def result(self):
        return self._grades


def trajectory(one: Completion, random: np.random.Generator) -> Completion:
    """The completion as the first turn of three: the second one in the same row, and the last one in another."""
    (first,) = one.rows
    more, between = random.integers(1, 5, random.integers(1, 4)).astype(np.int32), np.array([4], np.int32)
    tokens = np.concatenate([first.tokens, between, more])
    mask = np.arange(len(tokens)) != len(first.tokens)
    logprobs = np.where(mask, random.normal(-1, 0.1, len(tokens)), 0).astype(np.float32)
    other = Row(more, between, np.ones(1, bool), np.float32([random.normal(-1, 0.1)]))
    turns = (Turn(0, len(first.tokens)), Turn(0, len(tokens)), Turn(1, 1))
    runs = ((one.policy_version, len(first.tokens)), (one.policy_version + 1, len(more) + 1))
    rows = (first._replace(tokens=tokens, mask=mask, behavior_logprobs=logprobs), other)
    return one._replace(rows=rows, turns=turns, version_runs=runs)


def prepared_batch(sampler, params, version, number, prefix="", reward=None, rates=None):
    """The groups of a batch, whose tokens and rewards follow from its number and the weights; and their grades.

    Args:
        reward: the reward of every completion; None: some get 0 and the others 1.
        rates: see `batch_prompts`.
    """
    count, group_size = sampler.config.own_counts
    seed = (sampler.config.seed, number, int(np.asarray(params["checksum"])[0]))
    random = np.random.default_rng(seed)
    longest = sampler.config.rollout.max_completion_tokens
    prompts = batch_prompts(sampler.prompts, sampler.config, count, number, rates)
    groups, grades = [], []
    for place in range(count):
        completions, prompt = [], prompts.tokens[place][prompts.mask[place]]
        metadata = {"task": prompts.problems[place].task} if prompts.problems[place].task else {}
        for row in range(place * group_size, (place + 1) * group_size):
            tokens = random.integers(1, 5, random.integers(1, longest + 1)).astype(np.int32)
            mask, logprobs = np.ones(len(tokens), bool), random.normal(-1, 0.1, len(tokens)).astype(np.float32)
            name, text, sampling = (
                f"{prefix}{number:06d}/{row:05d}",
                "".join(map(str, tokens)),
                sampler.config.rollout.sampling(),
            )
            behavior, cut = (sampling, version), len(tokens) == longest
            one = Completion(
                name, "policy", text, (Row(prompt, tokens, mask, logprobs),), *behavior, cut, metadata=metadata
            )
            completions.append(trajectory(one, random) if sampler.config.task.agent else one)
            drawn = float(random.random() < 0.5)
            value, turns = drawn if reward is None else reward, random.normal(size=len(completions[-1].turns)).tolist()
            grades.append(Grade(value, {"score": 1.0}, value >= 1, turns=tuple(turns)))
        name, problem = f"{prefix}{number:06d}/{place:05d}", prompts.problems[place]
        groups.append(Group(name, prompt, tuple(completions), problem.prompt, problem.answer))
    return groups, Grades(grades)


def graded_batch(sampler, params, version, number):
    """The groups of `prepared_batch`, and the grades that the reward of the run gives them in its workers."""
    groups, _ = prepared_batch(sampler, params, version, number)
    prompts = sampler.batch_prompts(number)
    return groups, submit(groups, prompts, sampler.grading)


class Interrupted(CountingLearner):
    """Calls `act` before its update number `at`."""

    def __init__(self, at: int, act: Callable[[], object]):
        super().__init__()
        self._at, self._act, self._calls = at, act, itertools.count(1)

    def update(self, *arguments):
        if next(self._calls) == self._at:
            self._act()
        return super().update(*arguments)


def killed(at: int) -> Interrupted:
    """A learner that raises KeyboardInterrupt in place of its update number `at`."""

    def act():
        raise KeyboardInterrupt

    return Interrupted(at, act)


class Altered(CountingLearner):
    """Its update number `at` returns other metrics: its own and `metrics`."""

    def __init__(self, at: int, **metrics: float):
        super().__init__()
        self._at, self._metrics = at, {name: jnp.asarray(np.float32(value)) for name, value in metrics.items()}

    def update(self, *arguments):
        trained, metrics, learned = super().update(*arguments)
        return trained, metrics | (self._metrics if len(self.batches) == self._at else {}), learned


def sampled_by(sample):
    """The source of a run whose batches a function samples instead of the policy."""
    return functools.partial(source_of, sample=sample)


def count(config, learner=None, sample=prepared_batch) -> list[dict]:
    """The rows of metrics.jsonl after a whole run with a `CountingLearner`."""
    return train(config, learner=learner or CountingLearner(), sources=sampled_by(sample))
