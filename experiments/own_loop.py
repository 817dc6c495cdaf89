"""A whole off-policy run in one file, top to bottom: python -m experiments.own_loop [--steps 400] [--seed 0]

It uses only recjax's pure functions and its engine. A decoder first learns two-digit addition from answers of which
some are wrong, one character a token. Reinforcement learning does the rest, with a sampler that gets new weights every
20 steps. `recjax/training/loop.py` is this loop with what long runs need: sources, a queue, checkpoints, meshes.

Result: held-out sampled accuracy 0.312 -> 0.812 in 92 s on two cores of an AMD EPYC, beside other work.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from recjax.algorithms.clipping import one_side_mask
from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.logprobs import completion_logprobs
from recjax.models.sampling import Sampling
from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request

flags.DEFINE_integer("steps", 400, "Steps of reinforcement learning.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of the problems, weights and completions.")


class Settings(NamedTuple):
    """The ten values of a run."""

    supervised_steps: int = 450  # on answers; in the last quarter, a share of them is wrong
    wrong_fraction: float = 0.6
    supervised_rate: float = 5e-3
    prompts: int = 16  # problems in a batch
    group_size: int = 8  # completions of each problem
    sync_interval: int = 20  # steps between two copies of the weights for the sampler: 1 is on-policy
    epsilon: float = 0.2  # bound of the clip around a ratio of 1
    learning_rate: float = 5e-4
    steps: int = 400
    seed: int = 0


# --- Task: prompts such as "12+34=" and answers such as "46", in tokens.

CHARACTERS = "0123456789+="
END = len(CHARACTERS)  # the token that ends a completion
PROMPT_TIME = 6  # tokens of a prompt
TIME = 4  # tokens of a completion, at most: three digits and the end
SAMPLING = Sampling(1.0)  # behavior and trained policy are compared under the same distribution


def tokens_of(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def problems(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    terms = rng.integers(10, 100, (count, 2)).tolist()
    return [(f"{first}+{second}=", f"{first + second}") for first, second in terms]


def with_slip(answer: str, rng: np.random.Generator) -> str:
    """The answer with another digit at one place."""
    index = rng.integers(len(answer))
    return f"{answer[:index]}{(int(answer[index]) + rng.integers(1, 10)) % 10}{answer[index + 1 :]}"


def padded(rows: list[list[int]], time: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded tokens and the mask of real tokens, [rows, time]."""
    mask = np.arange(time) < np.array([len(row) for row in rows])[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask


# --- Policy: a decoder, and the log-probabilities that it gives to completions.

# Sizes of the vocabulary, of the hidden states and of the MLP.
DECODER = Decoder(DecoderConfig(END + 1, 64, 256, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=16))


def logprobs_of(params: dict, prompts: jax.Array, completions: jax.Array, mask: jax.Array) -> jax.Array:
    """Log π of each token, [rows, time]; every prompt runs once for all of its completions."""
    arrays = prompts, jnp.ones(prompts.shape, bool), completions, mask
    return completion_logprobs(DECODER, params, *arrays, sampling=SAMPLING, chunk=1024).logprobs


# --- Losses, each a function of the log-probs.


def cross_entropy(logprobs, batch):
    return -jnp.where(batch["mask"], logprobs, 0.0).sum() / batch["mask"].sum()


def clipped_reinforce(logprobs, batch):
    """REC-OneSide-NoIS: −A log π(y_t), without the tokens whose ratio has left the range already (arXiv 2509.24203 §2).

    The advantage is the reward minus the mean reward of the group. Nothing here asks who sampled the completions: the
    behavior log-probs only decide which tokens are clipped.
    """
    groups = batch["rewards"].reshape(len(batch["prompts"]), -1)
    advantages = (groups - groups.mean(axis=1, keepdims=True)).reshape(-1)
    ratio = jnp.exp(jax.lax.stop_gradient(logprobs) - batch["behavior_logprobs"])
    epsilon = batch["epsilon"]
    counts = batch["mask"] & one_side_mask(ratio, advantages, epsilon_low=epsilon, epsilon_high=epsilon)
    losses = jnp.where(counts, -advantages[:, None] * logprobs, 0.0)
    return losses.sum() / batch["mask"].sum()


def make_step(loss, optimizer):
    """One optimizer step, compiled: forward pass, loss, gradient, new parameters."""

    @jax.jit
    def step(params, optimizer_state, batch):
        arrays = batch["prompts"], batch["completions"], batch["mask"]
        value, gradient = jax.value_and_grad(lambda params: loss(logprobs_of(params, *arrays), batch))(params)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, value

    return step


# --- Sampling: the engine returns tokens and the log-probs under the weights that sampled them.


def sample(params: dict, texts: list[str], group_size: int, key: jax.Array) -> dict[str, np.ndarray]:
    """`group_size` completions of each prompt, in the order of the prompts, with behavior log-probs."""
    engine = Engine(DECODER, (END,), slots=None, prefix_time=PROMPT_TIME)
    engine.replace_weights(params, version=0)
    prompts = np.array([tokens_of(text) for text in texts], np.int32)
    keys = np.asarray(jax.random.key_data(jax.random.split(key, len(texts) * group_size)))
    requests = [Request(prompts[row // group_size], keys[row], TIME, SAMPLING) for row in range(len(keys))]
    tickets = engine.admit(requests, group_size)
    finished = engine.drain()
    completions, mask = padded([finished[ticket].tokens.tolist() for ticket in tickets], TIME)
    logprobs = np.zeros(mask.shape, np.float32)
    logprobs[mask] = np.concatenate([finished[ticket].logprobs for ticket in tickets])
    return {"prompts": prompts, "completions": completions, "mask": mask, "behavior_logprobs": logprobs}


def rewards_of(batch: dict[str, np.ndarray], answers: list[str], group_size: int) -> np.ndarray:
    """1 for the right sum with its end, else 0, for each completion."""
    sampled = [row[mask].tolist() for row, mask in zip(batch["completions"], batch["mask"], strict=True)]
    right = [[*tokens_of(answer), END] for answer in answers for _ in range(group_size)]
    return np.array([a == b for a, b in zip(sampled, right, strict=True)], np.float32)


def supervised(settings: Settings, params: dict, rng: np.random.Generator) -> dict:
    """A base policy that is sometimes right: it learns sums, and then answers of which a share has a wrong digit."""
    optimizer = optax.adamw(optax.cosine_decay_schedule(settings.supervised_rate, settings.supervised_steps))
    step = make_step(cross_entropy, optimizer)
    state = optimizer.init(params)
    for number in range(settings.supervised_steps):
        shown = problems(rng, 128)
        wrong_fraction = settings.wrong_fraction if number >= 0.75 * settings.supervised_steps else 0.0
        answers = [with_slip(answer, rng) if rng.random() < wrong_fraction else answer for _, answer in shown]
        completions, mask = padded([[*tokens_of(answer), END] for answer in answers], TIME)
        prompts = np.array([tokens_of(text) for text, _ in shown], np.int32)
        params, state, _ = step(params, state, {"prompts": prompts, "completions": completions, "mask": mask})
    return params


def run(settings: Settings) -> list[float]:
    """Trains, and returns the held-out accuracy before the first step and after every hundredth and the last."""
    rng = np.random.default_rng(settings.seed)
    held_out = problems(np.random.default_rng([settings.seed, 1]), 256)
    params = supervised(settings, init_params(DECODER.config, jax.random.key(settings.seed)), rng)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(settings.learning_rate))
    step = make_step(clipped_reinforce, optimizer)
    state = optimizer.init(params)
    keys = iter(jax.random.split(jax.random.key(settings.seed), 2 * settings.steps + 2))

    def accuracy() -> float:
        texts, answers = zip(*held_out, strict=True)
        return float(rewards_of(sample(params, [*texts], 1, next(keys)), [*answers], 1).mean())

    accuracies = [accuracy()]
    print(f"step 0: held-out accuracy {accuracies[-1]:.3f}")
    for number in range(1, settings.steps + 1):
        if (number - 1) % settings.sync_interval == 0:
            sampler_params = params
        texts, answers = zip(*problems(rng, settings.prompts), strict=True)
        batch = sample(sampler_params, [*texts], settings.group_size, next(keys))
        rewards = rewards_of(batch, [*answers], settings.group_size)
        params, state, loss = step(params, state, {**batch, "rewards": rewards, "epsilon": settings.epsilon})
        if number % 100 == 0 or number == settings.steps:
            accuracies.append(accuracy())
            print(f"step {number}: loss {loss:+.3f}, reward {rewards.mean():.2f}, accuracy {accuracies[-1]:.3f}")
    return accuracies


def main(_) -> None:
    run(Settings(steps=flags.FLAGS.steps, seed=flags.FLAGS.seed))


if __name__ == "__main__":
    app.run(main)
