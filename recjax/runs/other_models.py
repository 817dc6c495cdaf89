"""Loads the models of a run besides its policy: the teacher and the reference."""

import dataclasses
from pathlib import Path

import jax

from recjax.config import Config
from recjax.config.model import POLICY
from recjax.errors import UserError
from recjax.hub.policy import Policy, Teacher, compute_dtype, kernel_options
from recjax.hub.tokenizers import model_folder
from recjax.hub.weights import read_config
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.models.trainable import in_compute_dtype, with_adapters
from recjax.runs.policies import open_policy, policy_without_params
from recjax.runs.spec import split_step
from recjax.runs.stored_runs import has_run, run_config


def reference_params(config: Config, policy: Policy) -> dict:
    """All parameters of `model.reference`, as the decoder of the policy takes them, in the compute dtype.

    Raises:
        UserError: the reference cannot be read, or has another shape or tokenizer than the policy.
    """
    opened = open_policy(config.model.reference, config)
    plain = dataclasses.replace(policy.decoder.config, lora=None)
    theirs = dataclasses.replace(opened.policy.decoder.config, lora=None)
    if theirs != plain or opened.policy.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UserError(
            "model.reference",
            f"its shape or tokenizer differs from the policy's ({theirs} there, {plain} here)",
            "choose a reference with the policy's shape and tokenizer",
            value=config.model.reference,
        )
    if config.model.lora is None:
        return opened.params
    params = with_adapters(opened.policy.decoder, opened.params, config.model.lora, jax.random.key(0))[1]
    return in_compute_dtype(policy.decoder, params, copy=False)


def teacher_shape(config: Config) -> DecoderConfig:
    """The shape of `model.teacher`, a run or a model; reads no parameters."""
    assert config.model.teacher is not None
    run, step = split_step(Path(config.model.teacher))
    if has_run(run, step):
        return policy_without_params(run_config(run)).decoder.config
    return read_config(model_folder(config.model.teacher, ("config.json",)))


def teacher_decoder(config: Config, device: jax.Device | None = None) -> Decoder:
    """The decoder of `model.teacher`; `device` is that of `kernel_options`."""
    shape = teacher_shape(config)
    dtype = compute_dtype(config.model.dtype)
    return Decoder(shape, dtype, **kernel_options(config.model, shape, dtype, device))


def load_teacher(config: Config, policy: Policy) -> Teacher | None:
    """Loads the run or model that `model.teacher` names; None if the key is not set, or names the policy itself.

    Raises:
        UserError: the model cannot be read, or its vocabulary differs from the policy's.
    """
    name = config.model.teacher
    if name in (None, POLICY):
        return None
    opened = open_policy(name, config)
    key = f"model.teacher = {name!r}"
    theirs = opened.policy.tokenizer.get_vocab()
    ours = policy.tokenizer.get_vocab()
    if theirs != ours:
        raise UserError(
            key,
            f"its tokenizer differs from the policy's in {len(theirs.items() ^ ours.items())} entries",
            "a teacher scores the policy's tokens, so choose a teacher with the same tokenizer",
        )
    check_teacher(config, opened.policy.decoder.config, policy.decoder.config)
    return Teacher(teacher_decoder(config).clone(config=opened.policy.decoder.config), opened.params)


def check_teacher(config: Config, theirs: DecoderConfig, ours: DecoderConfig) -> None:
    """Refuses a teacher with more or fewer logits than the policy, if the algorithm compares their distributions."""
    if config.algorithm.build().teacher_divergence is not None and theirs.vocab_size != ours.vocab_size:
        raise UserError(
            "model.teacher",
            f"has {theirs.vocab_size} logits and the policy {ours.vocab_size}, so algorithm.teacher_divergence"
            " cannot compare them",
            "choose a teacher with as many, or set algorithm.distillation, which reads only the sampled tokens",
            value=config.model.teacher,
        )
