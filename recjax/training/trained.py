"""Loads policies: of a run's checkpoint (adapters merged), of a model folder, or the initial policy of a config."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from recjax import __version__
from recjax.config import Config, load_config, unknown_keys
from recjax.config.yaml_values import read_yaml_file
from recjax.files import check_manifest
from recjax.hub.chat_rendering import CHAT_DATE, set_template_kwargs
from recjax.hub.policy import Policy, load_params, policy_alone
from recjax.hub.tokenizers import stop_token_ids
from recjax.models.decoder import abstract_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.placement import on_host, put_params
from recjax.models.trainable import adapted, combine, flatten, in_compute_dtype, merged, split_params
from recjax.tasks.loading import load_problems
from recjax.tasks.problems import Task
from recjax.training.checkpoint import newest_whole, none_whole, progress, steps_of
from recjax.training.demonstrations import FOLDER
from recjax.training.mesh import check_fits
from recjax.training.run import characters, initial_policy, prompts_of
from recjax.training.run_folder import check_config_file, starts

logger = logging.getLogger(__name__)


class OpenedPolicy(NamedTuple):
    """A policy with its parameters.

    name: short name, for results.
    version: optimizer steps that made the parameters.
    run: config of the run that trained the policy; None for a model that no run trained.
    """

    name: str
    policy: Policy
    params: dict
    version: int = 0
    run: Config | None = None


def open_policy(source: str | Path | None, config: Config) -> OpenedPolicy:
    """Opens a policy on the devices of the current mesh, in the compute dtype.

    Args:
        source: run folder (its newest checkpoint), a checkpoints/STEP folder in it, or a Hugging Face folder or hub
            name; None or "base": the initial policy of `config`, after its warm start.
        config: stop strings and chat template variables of the policy. It describes the model only without a source.
    Raises:
        ValueError: the checkpoint or model does not exist, or does not fit the mesh.
    """
    folder = Path(source or "base")
    is_step = folder.parent.name == "checkpoints" and folder.name.isdecimal()
    run, step = (folder.parents[1], int(folder.name)) if is_step else (folder, None)
    bare = config.model.model_copy(update={"lora": None, "freeze": []})  # adapters change nothing before training
    if source in (None, "base"):
        if config.demonstrations:
            stage, step = Path(config.output) / FOLDER, config.warm_start.steps
            if step not in steps_of(stage / "checkpoints"):
                raise ValueError(f"{stage} holds no finished warm start; train this config first")
            policy, read_params = checkpoint_reader(stage, config)
            params = put_params(read_params(step))
        else:
            policy, params = _initial(config.model_copy(update={"model": bare}))
        name = Path(config.model.path).name if config.model.path else f"{Path(config.output).name}-base"
        opened = OpenedPolicy(name, policy, params)
    elif is_step or (run / "config.yaml").is_file() or (run / "checkpoints").is_dir():
        opened = open_checkpoint(run, step)
        policy = opened.policy
        if config.model.chat_date and CHAT_DATE in policy.tokenizer.init_kwargs:
            policy.tokenizer.init_kwargs[CHAT_DATE] = config.model.chat_date
        set_template_kwargs(policy.tokenizer, config.model.chat_template_kwargs)
        stop_ids = stop_token_ids(policy.tokenizer, config.rollout.stop, opened.run.model.path)
        opened = opened._replace(policy=policy._replace(stop_ids=stop_ids), params=put_params(opened.params))
    else:
        model = config.model_copy(update={"model": bare.model_copy(update={"path": str(source), "decoder": None})})
        try:
            policy = policy_alone(model, "")
            opened = OpenedPolicy(folder.name, policy, load_params(model, policy.decoder.config))
        except ValueError as error:
            raise ValueError(f"{source} is neither a run's folder nor a model: {error}") from error
    return opened._replace(params=for_sampling(opened.policy, opened.params))


def for_sampling(policy: Policy, params: dict) -> dict:
    """Converts parameters on the devices to the compute dtype.

    Raises:
        ValueError: the current mesh does not fit the model.
    """
    check_fits(jax.sharding.get_mesh(), policy.decoder.config)
    return in_compute_dtype(policy.decoder, params, copy=False)


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


def open_checkpoint(run: Path, step: int | None = None) -> OpenedPolicy:
    """Opens a checkpoint of a run: the policy without adapters, and float32 parameters as NumPy arrays on the host.

    Args:
        step: step of the checkpoint; None: the newest.
    Raises:
        ValueError: the checkpoint does not exist, or the model or task of the config has changed.
    """
    config = run_config(run)
    step = _whole_step(run, config, step)
    policy, read_params = checkpoint_reader(run, config)
    return OpenedPolicy(f"{run.resolve().name}-{step}", policy, read_params(step), step, config)


def checkpoint_reader(run: Path, config: Config) -> tuple[Policy, Callable[[int], dict]]:
    """The policy of a run without adapters, and a function that reads its parameters at a step.

    The function returns all parameters in float32, with adapters merged, as NumPy arrays on the host. Checkpoints lack
    the parameters that the run did not train; these are made again, once, in the same way. The problems are read only
    if the built-in tokenizer or a warm start depends on them, and the reward never.

    Args:
        config: config of the run.
    Raises:
        ValueError: the model of the config, or the problems that it depends on, cannot be read. The function raises it
            if the checkpoint has other shapes than the model, and types of Orbax for missing files.
    """
    lora = config.model.lora
    if lora is None and not config.model.freeze:
        policy, constant = _without_params(config, config.model.decoder is not None)[0], {}
        trained = abstract_params(policy.decoder.config)
    else:
        policy, params = _initial(config)
        trained, constant = split_params(on_host(params), config.model)
    decoder_config = policy.decoder.config
    plain = policy._replace(decoder=policy.decoder.clone(config=dataclasses.replace(decoder_config, lora=None)))

    def read_params(step: int) -> dict:
        params = combine(_restored(run, step, trained), constant)
        return merged(decoder_config, params) if lora else params

    return plain, read_params


def _initial(config: Config) -> tuple[Policy, dict]:
    """The policy of a config before its first step, with its adapters, and all of its parameters in float32."""
    on_answers = config.warm_start is not None and not config.demonstrations
    policy, task = _without_params(config, on_answers or config.model.decoder is not None)
    return initial_policy(config, policy, prompts_of(config, policy, task)[0] if on_answers else None)


def _without_params(config: Config, reads_problems: bool) -> tuple[Policy, Task]:
    train, evaluation = load_problems(config) if reads_problems else ([], [])
    return policy_alone(config, characters([*train, *evaluation])), Task(train, evaluation, None)


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
    return step, decoder_config, _restored(run, step, split_params(abstract_params(decoder_config), config.model)[0])


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
            check_manifest(folder / str(step))
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
