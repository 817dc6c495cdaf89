"""Makes a base policy by supervised training on answers, some of them deliberately wrong."""

import functools
import hashlib
import itertools
import json
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from recjax import __version__
from recjax.cache import cache_folder
from recjax.config import Config, WarmStartConfig
from recjax.files import check_manifest, locked_file, write_manifest
from recjax.hub.chat_rendering import CHAT_DATE, turn_end
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import check_embedded, encode_after
from recjax.models.decoder import Decoder
from recjax.models.logprobs import Sampling, completion_logprobs
from recjax.models.placement import constrain_params, put_rows
from recjax.tasks.prompts import Prompts
from recjax.training.metrics import step_bar

logger = logging.getLogger(__name__)


def warm_start(config: Config, policy: Policy, params: dict, prompts: Prompts) -> dict:
    """The parameters after the warm start, from the cache if an equal warm start is there.

    The cache is $RECJAX_CACHE, or ~/.cache/recjax. Its key covers everything that the result depends on except the
    mesh, which affects rounding. Damaged entries are made again. Runs with several processes do not use the cache.

    Raises:
        ValueError: the cache cannot be written.
    """
    if jax.process_count() > 1:
        return supervise(config.warm_start, policy, params, prompts, config.seed_of_base)
    values = config.model_dump() | {"seed": config.seed_of_base}
    depends_on = {key: values[key] for key in ("seed", "model", "task", "warm_start")}
    unread = ["lora", "freeze", "chat_date", *([] if config.model.chat_template_kwargs else ["chat_template_kwargs"])]
    depends_on["model"] = {key: value for key, value in depends_on["model"].items() if key not in unread}
    # Only values that a chat template sets, so that the digests of all other policies do not change.
    of_chats = {CHAT_DATE: policy.tokenizer.init_kwargs.get(CHAT_DATE), "turn_end": turn_end(policy.tokenizer)}
    depends_on |= {key: value for key, value in of_chats.items() if value is not None}
    depends_on |= {"problems": len(prompts.texts), "version": __version__, "backend": jax.default_backend()}
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder("warm_start") / digest
    # If several runs need the same base policy at once, one run makes it while the other runs wait.
    with locked_file(Path(f"{folder}.lock")), ocp.StandardCheckpointer() as checkpointer:
        is_whole = folder.exists()
        try:
            if is_whole:
                check_manifest(folder)
        except ValueError as error:
            logger.warning("base policy in the cache: %s; recjax makes it again", error)
            is_whole = False
        if is_whole:
            logger.info("base policy from the cache: %s", folder)
            return checkpointer.restore(folder, jax.tree.map(ocp.utils.to_shape_dtype_struct, params))
        params = supervise(config.warm_start, policy, params, prompts, config.seed_of_base)
        for left in folder.parent.glob(f"{digest}*"):
            if left.is_dir():  # damaged, or left by a killed process
                shutil.rmtree(left)
        try:
            checkpointer.save(folder, params)
            checkpointer.wait_until_finished()
            write_manifest(folder)
        except Exception as error:
            # Tensorstore raises its own exception types, for example for a full disk.
            raise ValueError(
                f"{folder}: the base policy cannot be written to the cache ({str(error).strip()[:300]}); free space"
                " there, or set RECJAX_CACHE to another folder"
            ) from error
    logger.info("base policy written to the cache: %s", folder)
    return params


def supervise(config: WarmStartConfig, policy: Policy, params: dict, prompts: Prompts, seed: int) -> dict:
    """Trains on (prompt, answer) pairs; a share `wrong_fraction` of the answers is wrong.

    A wrong answer is one of the problem's mistakes, or the answer with one token replaced if a problem has no mistakes.
    """
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(config.learning_rate, config.steps))
    )
    optimizer_state = jax.jit(lambda params: constrain_params(optimizer.init(params)))(params)
    mistakes = [problem.mistakes for problem in prompts.problems]
    counts = np.array([len(texts) for texts in mistakes])
    texts = [*prompts.answers, *itertools.chain.from_iterable(mistakes)]
    are_chats = [not isinstance(problem.prompt, str) for problem in prompts.problems]
    are_chats += [is_chat for is_chat, texts_of_one in zip(are_chats, mistakes, strict=True) for _ in texts_of_one]
    tokens, mask = _demonstrations(policy, texts, are_chats)
    first_mistake = len(counts) + np.cumsum(counts) - counts
    generator = np.random.default_rng([seed, 2])
    with step_bar("warm start", config.steps) as bar:
        for _ in range(config.steps):
            chosen = generator.integers(len(counts), size=config.batch_size)
            if counts.all():
                wrong = generator.random(config.batch_size) < config.wrong_fraction
                rows = np.where(wrong, first_mistake[chosen] + generator.integers(counts[chosen]), chosen)
                shown = tokens[rows]
            else:
                rows = chosen
                shown = _with_slips(tokens[rows], mask[rows], config.wrong_fraction, generator)
            batch = put_rows((prompts.tokens[chosen], prompts.mask[chosen], shown, mask[rows]))
            params, optimizer_state, loss = _supervised_step(policy.decoder, optimizer, params, optimizer_state, batch)
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
    return params


def _demonstrations(policy: Policy, answers: list[str], are_chats: list[bool]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask of the answers, each with an end token: the chat template's in chats, else the stop token."""
    encoded = [encode_after(policy.tokenizer, (), answer, "answer") for answer in answers]
    end = policy.stop_ids[0]
    end_of_turn = end if (found := turn_end(policy.tokenizer)) is None else found
    for answer, ids in zip(answers, encoded, strict=True):
        check_embedded(policy.tokenizer, ids, policy.vocabulary, f"warm_start: answer {answer!r:.80}")
    lengths = np.array([len(ids) + 1 for ids in encoded])
    mask = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    ends = [end_of_turn if is_chat else end for is_chat in are_chats]
    tokens[mask] = np.concatenate([[*ids, last] for ids, last in zip(encoded, ends, strict=True)])
    return tokens, mask


def _with_slips(
    tokens: np.ndarray, mask: np.ndarray, wrong_fraction: float, generator: np.random.Generator
) -> np.ndarray:
    """The answers, a share of them with one token, never the last, replaced by another token of the answers.

    An answer without tokens stays; all answers stay if they have only one distinct token.
    """
    known = np.unique(tokens[:, :-1][mask[:, 1:]])
    if len(known) < 2:
        return tokens
    wrong = np.flatnonzero((generator.random(len(tokens)) < wrong_fraction) & (mask.sum(-1) > 1))
    place = generator.integers(mask[wrong].sum(-1) - 1)
    index = np.searchsorted(known, tokens[wrong, place])
    slipped = tokens.copy()
    slipped[wrong, place] = known[(index + generator.integers(1, len(known), len(wrong))) % len(known)]
    return slipped


@functools.partial(jax.jit, static_argnames=("decoder", "optimizer"), donate_argnames=("optimizer_state",))
def _supervised_step(decoder: Decoder, optimizer, params, optimizer_state, batch):
    def cross_entropy(params):
        logprobs, _ = completion_logprobs(decoder, params, *batch, sampling=Sampling(), chunk=1024)
        return -jnp.sum(jnp.where(batch[-1], logprobs, 0.0)) / batch[-1].sum()

    loss, gradient = jax.value_and_grad(cross_entropy)(params)
    updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
    return *constrain_params((optax.apply_updates(params, updates), optimizer_state)), loss
