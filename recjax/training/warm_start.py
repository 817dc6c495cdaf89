"""Makes a base policy by supervised training on demonstrations of which some are wrong on purpose."""

import dataclasses
import functools
import hashlib
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import logging
from tqdm import tqdm

from recjax import __version__
from recjax.config import Config, WarmStartConfig
from recjax.models.decoder import Decoder
from recjax.models.logprobs import Sampling, completion_logprobs
from recjax.models.policy import Policy
from recjax.rollout.prompts import Prompts


def warm_start(config: Config, policy: Policy, params: dict, prompts: Prompts) -> dict:
    """Parameters after the warm start, from the cache where the same one was made before.

    The cache is $RECJAX_CACHE, or ~/.cache/recjax; its key is everything that the result depends on.
    """
    depends_on = {key: dataclasses.asdict(config)[key] for key in ("seed", "model", "task", "warm_start")}
    depends_on |= {"problems": len(prompts.texts), "version": __version__, "backend": jax.default_backend()}
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
    root = Path(os.environ.get("RECJAX_CACHE", Path.home() / ".cache" / "recjax"))
    folder = (root / "warm_start" / digest).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        if folder.exists():
            logging.info("base policy from the cache: %s", folder)
            return checkpointer.restore(folder, jax.tree.map(ocp.utils.to_shape_dtype_struct, params))
        params = supervise(config.warm_start, policy, params, prompts, config.seed)
        checkpointer.save(folder, params)
    logging.info("base policy written to the cache: %s", folder)
    return params


def supervise(config: WarmStartConfig, policy: Policy, params: dict, prompts: Prompts, seed: int) -> dict:
    """Trains on (prompt, answer) pairs; `wrong_fraction` of the answers are another problem's."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(config.learning_rate, config.steps))
    )
    optimizer_state = optimizer.init(params)
    encoded = policy.tokenizer(prompts.answers, add_special_tokens=False)["input_ids"]
    answers = [[*ids, policy.stop_ids[0]] for ids in encoded]
    length = max(map(len, answers))
    generator = np.random.default_rng([seed, 2])
    with tqdm(range(config.steps), desc="warm start", unit="step") as bar:
        for _ in bar:
            chosen = generator.integers(len(answers), size=config.batch_size)
            wrong = generator.random(config.batch_size) < config.wrong_fraction
            shown = np.where(wrong, generator.integers(len(answers), size=config.batch_size), chosen)
            tokens, mask = np.zeros((2, config.batch_size, length), np.int32)
            for row, index in enumerate(shown):
                tokens[row, : len(answers[index])], mask[row, : len(answers[index])] = answers[index], 1
            params, optimizer_state, loss = _supervised_step(
                policy.decoder,
                optimizer,
                params,
                optimizer_state,
                (prompts.tokens[chosen], prompts.mask[chosen], tokens, mask.astype(bool)),
            )
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    return params


@functools.partial(jax.jit, static_argnames=("decoder", "optimizer"), donate_argnames=("optimizer_state",))
def _supervised_step(decoder: Decoder, optimizer, params, optimizer_state, batch):
    def cross_entropy(params):
        logprobs, _ = completion_logprobs(decoder, params, *batch, sampling=Sampling(), chunk=1024)
        return -jnp.sum(jnp.where(batch[-1], logprobs, 0.0)) / batch[-1].sum()

    loss, gradient = jax.value_and_grad(cross_entropy)(params)
    updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
    return optax.apply_updates(params, updates), optimizer_state, loss
