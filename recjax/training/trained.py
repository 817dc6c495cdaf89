"""Loads policies: of a run's checkpoint (adapters merged), of a model folder, or the initial policy of a config."""

import dataclasses
import hashlib
import logging
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from recjax import __version__
from recjax.config import Config, load_config, unknown_keys
from recjax.config.yaml_values import read_yaml_file
from recjax.hub.chat_rendering import CHAT_DATE, set_template_kwargs
from recjax.hub.policy import Policy, load_params, policy_alone
from recjax.hub.tokenizers import stop_token_ids
from recjax.models.decoder import abstract_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.placement import on_host, put_params
from recjax.models.trainable import adapted, combine, flatten, in_compute_dtype, merged, split
from recjax.tasks.loading import load_problems
from recjax.tasks.problems import Task
from recjax.training.checkpoint import check_whole, newest_whole, none_whole, progress, steps_of
from recjax.training.environment import starts
from recjax.training.mesh import check_fits
from recjax.training.run import characters, initial_policy, prepare, prompts_of, untrained
from recjax.training.run_folder import check_config_file

logger = logging.getLogger(__name__)


class Subject(NamedTuple):
    """A policy to evaluate: its name, its parameters in compute dtype, and the config of its run, if any."""

    name: str
    policy: Policy
    params: dict
    run: Config | None


def subject(checkpoint: str | None, config: Config) -> Subject:
    """Loads the policy of a checkpoint, with the stop strings and chat template variables of `config`.

    Args:
        checkpoint: run folder (its newest checkpoint), a checkpoints/STEP folder in it, or a Hugging Face folder or
            hub name; None or "base": the initial policy of `config`, after its warm start.
        config: settings of the evaluation; describes the model only in the last case.
    Raises:
        ValueError: the checkpoint or model does not exist.
    """
    bare, theirs = config.model.model_copy(update={"lora": None, "freeze": []}), None
    folder = Path(checkpoint or "base")
    of_step = folder.parent.name == "checkpoints" and folder.name.isdecimal()
    run, step = (folder.parents[1], int(folder.name)) if of_step else (folder, None)
    if checkpoint in (None, "base"):
        prepared, params = prepare(untrained(config.model_copy(update={"model": bare})))
        policy = prepared.policy
        name = Path(config.model.path).name if config.model.path else f"{Path(config.output).name}-base"
    elif of_step or (run / "config.yaml").is_file() or (run / "checkpoints").is_dir():
        theirs = run_config(run)
        step, policy, params = run_params(run, theirs, step)
        params = put_params(params)
        stop_ids = stop_token_ids(policy.tokenizer, config.rollout.stop, theirs.model.path)
        name, policy = f"{run.resolve().name}-{step}", policy._replace(stop_ids=stop_ids)
        if config.model.chat_date and CHAT_DATE in policy.tokenizer.init_kwargs:
            policy.tokenizer.init_kwargs[CHAT_DATE] = config.model.chat_date
        set_template_kwargs(policy.tokenizer, config.model.chat_template_kwargs)
    else:
        name, described = folder.name, bare.model_copy(update={"path": checkpoint, "decoder": None})
        try:
            alone = config.model_copy(update={"model": described})
            policy = policy_alone(alone, "")
            params = load_params(alone, policy.decoder.config)
        except ValueError as error:
            raise ValueError(f"checkpoint={checkpoint}: no run's folder and no model's: {error}") from error
    check_fits(jax.sharding.get_mesh(), policy.decoder.config)
    return Subject(name, policy, in_compute_dtype(policy.decoder, params, copy=False), theirs)


def fingerprint(params: dict) -> str:
    """A digest of every bit of the parameters; equal weights have equal digests, wherever they are stored."""
    sums = {path: (leaf.shape, str(leaf.dtype), int(_checksum(leaf))) for path, leaf in flatten(params).items()}
    return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()[:16]


@jax.jit
def _checksum(leaf: jax.Array) -> jax.Array:
    # Integer sums wrap around, so they do not depend on the order in which a device adds.
    bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32).reshape(-1)
    return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


def run_config(run: Path) -> Config:
    """The config of a run; keys that this version does not have are skipped, with a warning that names them.

    Raises:
        ValueError: the folder is not a run, or its config.yaml is damaged or has values that this version refuses.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise ValueError(f"run {str(run)!r} holds no config.yaml; name the output folder of a training run")
    try:
        unknown = unknown_keys(read_yaml_file(path))
    except ValueError:  # load_config raises the error
        unknown = []
    try:
        config = load_config(path, without=unknown)
    except ValueError as error:
        raise ValueError(f"{error}{_made_by(run)}") from error
    if unknown:
        logger.warning("%s: not read, as this version has no such keys: %s%s", path, ", ".join(unknown), _made_by(run))
    return config


def _made_by(run: Path) -> str:
    """A note on the recjax version that made a run; empty if it is this version."""
    made = next(iter(starts(run)), {}).get("recjax")
    return f"; the run was made with recjax {made}, this is {__version__}" if made not in (None, __version__) else ""


def run_params(run: Path, config: Config, step: int | None = None) -> tuple[int, Policy, dict]:
    """Loads a checkpoint of a run: its step, its policy and all parameters.

    Args:
        config: config of the run.
        step: step of the checkpoint; None: the newest.
    Returns:
        The step, the policy without adapters, and float32 parameters as NumPy arrays on the host.
    Raises:
        ValueError: the checkpoint does not exist, or the model or task of the config has changed.
    """
    step = _whole_step(run, config, step)
    reader = checkpoint_reader(run, config)
    return step, reader.policy, reader.params(step)


class CheckpointReader(NamedTuple):
    """Reads the parameters of a run's checkpoints; the parts that all checkpoints share are prepared once.

    run: folder of the run.
    policy: policy without adapters.
    like: shapes of the trained parameters, which the checkpoints hold.
    constant: parameters that the run did not train.
    adapted: decoder config with adapters; None without adapters.
    """

    run: Path
    policy: Policy
    like: dict
    constant: dict
    adapted: DecoderConfig | None

    def params(self, step: int) -> dict:
        """All parameters at a step in float32, with adapters merged, as NumPy arrays on the host.

        Raises:
            ValueError: the checkpoint has other shapes than the model.
            Exception: Orbax raises its own types for missing files.
        """
        params = combine(_restored(self.run, step, self.like), self.constant)
        return merged(self.adapted, params) if self.adapted else params


def checkpoint_reader(run: Path, config: Config) -> CheckpointReader:
    """A reader for the checkpoints of a run.

    Checkpoints lack the parameters that the run did not train; the reader makes them again in the same way. It reads
    the problems only if the built-in tokenizer or a warm start depends on them, and never the reward.

    Args:
        config: config of the run.
    Raises:
        ValueError: the model of the config, or the problems that it depends on, cannot be read.
    """
    lora, adapted_config = config.model.lora, None
    partial = lora is not None or bool(config.model.freeze)
    warm = partial and config.warm_start is not None
    train, evaluation = load_problems(config) if config.model.decoder or warm else ([], [])
    policy = policy_alone(config, characters([*train, *evaluation]))
    like, constant = abstract_params(policy.decoder.config), {}
    if partial:
        prompts = prompts_of(config, policy, Task(train, evaluation, None))[0] if warm else None
        policy, params = initial_policy(config, policy, prompts)
        like, constant = split(on_host(params), config.model)
    if lora:
        adapted_config = policy.decoder.config
        plain = dataclasses.replace(adapted_config, lora=None)
        policy = policy._replace(decoder=policy.decoder.clone(config=plain))
    return CheckpointReader(run, policy, like, constant, adapted_config)


def run_adapters(run: Path, config: Config, step: int | None = None) -> tuple[int, DecoderConfig, dict]:
    """Loads the adapters of a checkpoint: its step, the config of the decoder, and only the adapter parameters.

    Args:
        config: config of the run, with `model.path` and `model.lora`.
        step: step of the checkpoint; None: the newest.
    Raises:
        ValueError: the checkpoint does not exist.
    """
    decoder_config = adapted(policy_alone(config, "").decoder.config, config.model.lora)
    step = _whole_step(run, config, step)
    return step, decoder_config, _restored(run, step, split(abstract_params(decoder_config), config.model)[0])


def _whole_step(run: Path, config: Config, step: int | None) -> int:
    """The step of the newest whole checkpoint, or `step`; checks that the checkpoint is whole and fits the config."""
    folder = run / "checkpoints"
    steps = steps_of(folder)
    if not steps:
        raise ValueError(f"run {str(run)!r} holds no checkpoint yet; its first is written before its first step")
    if step is None:
        step, damaged = newest_whole(folder)
        if step is None:
            raise none_whole(folder, damaged)
        for left_out, reason in damaged.items():
            logger.warning("checkpoint of step %d: %s; that of step %d is taken", left_out, reason, step)
    elif step not in steps:
        raise ValueError(f"step {step}: {folder} holds the steps {', '.join(map(str, steps))}; name one of them")
    else:
        try:
            check_whole(folder, step)
        except ValueError as error:
            raise ValueError(f"step {step}: {error}; name another one, or bring it back from a copy") from error
    check_config_file(run, config, progress(folder, step))
    return step


def _restored(run: Path, step: int, like: dict) -> dict:
    """The trained parameters of a checkpoint; the optimizer state is not read."""
    item = {"params": jax.tree.map(ocp.utils.to_shape_dtype_struct, like)}
    to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    arguments = ocp.args.PyTreeRestore(item=item, restore_args=to_host, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        params = checkpointer.restore((run / "checkpoints" / str(step) / "state").absolute(), args=arguments)["params"]
    for path, leaf in flatten(like).items():
        found = flatten(params)[path].shape
        if found != leaf.shape:
            raise ValueError(
                f"{run}, step {step}: {path} has shape {found} in the checkpoint, but the model that config.yaml"
                f" describes has {leaf.shape} there; put the model or the problems back as they were in training"
            )
    return params
