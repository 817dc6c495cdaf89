"""Opens a policy: that of a checkpoint (merging its adapters), of a model folder, or of a config before training."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from recjax.config import Config
from recjax.errors import UserError
from recjax.hub.chat_rendering import CHAT_DATE, set_template_kwargs
from recjax.hub.policy import Policy, load_params, policy_alone
from recjax.hub.tokenizers import stop_token_ids
from recjax.hub.weights import load_adapter
from recjax.models.decoder import abstract_params
from recjax.models.placement import on_host, put_params
from recjax.models.trainable import combine, flatten, in_compute_dtype, merged, split_params, with_adapters
from recjax.runs.checkpoint import steps_of
from recjax.runs.resolve import resolve_start
from recjax.runs.spec import split_step
from recjax.runs.stored_runs import has_run, run_config, whole_step
from recjax.runs.warm_start import FOLDER, warm_start
from recjax.runtime.console import under_way
from recjax.tasks.loading import load_problems
from recjax.tasks.problems import Task, characters
from recjax.tasks.prompts import Prompts, prompts_of
from recjax.training.mesh import check_fits

_MAX_READS = 5  # tries to read the newest checkpoint of a run in training


class OpenedPolicy(NamedTuple):
    """A policy with its parameters.

    name: short name, for results.
    version: optimizer steps that made the parameters.
    run: config of the run that trained the policy; None for a model that no run trained.
    older_params: reads the parameters of another checkpoint of the run, as `for_sampling` returns them.
    """

    name: str
    policy: Policy
    params: dict
    version: int = 0
    run: Config | None = None
    older_params: Callable[[int], dict] | None = None


def open_policy(source: str | Path | None, config: Config | None = None, step: int | str | None = None) -> OpenedPolicy:
    """Opens a policy, wherever it comes from.

    | source | policy |
    |---|---|
    | None or "base" | the policy of `config` before its first step, after a warm start; see `initial_policy` |
    | folder of a run | the policy of the run's newest whole checkpoint, or of `step` |
    | checkpoints/STEP or checkpoints/best in a run's folder | the policy of this checkpoint |
    | Hugging Face folder or hub name | this model |

    Adapters of a run are merged. The parameters are on the devices of the current mesh, in the compute dtype.

    Args:
        config: stop strings and chat template variables of the policy. It describes the model only without a source.
            None: a run's policy as its checkpoint has it, with float32 parameters as NumPy arrays on the host.
        step: step of a run's checkpoint, or "best": the highest evaluation/accuracy.
    Raises:
        UserError: the checkpoint or model does not exist or does not fit the mesh, or the model or task of the run
            has changed.
    """
    run, name = split_step(source or "base")
    if step is None:
        step = name
    if config is None:
        return _trained_policy(run, step)
    if source in (None, "base"):
        opened = _untrained_policy(resolve_start(config))
    elif has_run(run, step):
        opened = _with_prompts_of(config, _trained_policy(run, step))
    else:
        model = {"path": str(source), "decoder": None, "run": None, "adapter": None}
        try:
            opened = _untrained_policy(_with_model(config, model).model_copy(update={"warm_start": None}))
        except UserError as error:
            raise UserError(source, f"is neither a run's folder nor a model: {error}") from error
    return opened._replace(params=for_sampling(opened.policy, opened.params))


def _trained_policy(run: Path, step: int | str | None) -> OpenedPolicy:
    """The policy of a run's checkpoint, with float32 parameters on the host."""
    config = run_config(run)
    policy, read_params = checkpoint_reader(run, config)
    version, params = read_whole(run, config, step, read_params)

    def older_params(step: int) -> dict:
        return for_sampling(policy, put_params(read_params(step)))

    name = f"{run.resolve().name}-{version}"
    return OpenedPolicy(name, policy, params, version, run=config, older_params=older_params)


def _with_prompts_of(config: Config, opened: OpenedPolicy) -> OpenedPolicy:
    """A run's policy on the devices, with the stop strings and the chat template variables of another config."""
    policy = opened.policy
    if config.model.chat_date and CHAT_DATE in policy.tokenizer.init_kwargs:
        policy.tokenizer.init_kwargs[CHAT_DATE] = config.model.chat_date
    set_template_kwargs(policy.tokenizer, config.model.chat_template_kwargs)
    assert opened.run is not None
    stop_ids = stop_token_ids(policy.tokenizer, config.rollout.stop, opened.run.model.path)
    return opened._replace(policy=policy._replace(stop_ids=stop_ids), params=put_params(opened.params))


def _untrained_policy(config: Config) -> OpenedPolicy:
    """The policy of a config before its first step, without new adapters, which change nothing there."""
    name = f"{Path(config.output).name}-base"
    if config.model.path:
        name = Path(config.model.path).name
    if not config.demonstrations:
        changes = {"lora": None, "freeze": [], "merge_adapter": config.model.adapter is not None}
        policy, params = _initial(_with_model(config, changes))
        return OpenedPolicy(name, policy, params)
    stage = Path(config.output) / FOLDER
    assert config.warm_start is not None
    step = config.warm_start.steps
    if step not in steps_of(stage / "checkpoints"):
        raise UserError(stage, "holds no finished warm start", "train this config first")
    policy, read_params = checkpoint_reader(stage, config)
    return OpenedPolicy(name, policy, put_params(read_params(step)))


def _with_model(config: Config, changes: dict) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


def for_sampling(policy: Policy, params: dict) -> dict:
    """Converts parameters on the devices to the compute dtype.

    Raises:
        UserError: the current mesh does not fit the model.
    """
    check_fits(jax.sharding.get_mesh(), policy.decoder.config)
    return in_compute_dtype(policy.decoder, params, copy=False)


# --- Before the first step.


def initial_policy(config: Config, policy: Policy, train: Prompts | None) -> tuple[Policy, dict]:
    """The policy with its adapters, and all of its parameters before the first step, in float32.

    The parameters are random (`model.decoder`), those of a model folder (`model.path`), or those of a run's checkpoint
    (`model.run`). A warm start on answers then trains them. The adapters are new ones, those of `model.adapter`, or
    those of the other run if this run has the same `model.lora`. If not, adapters of the other run are merged.

    Args:
        policy: the result of `policy_alone`.
        train: prompts for a warm start on answers; None if the config has none. Demonstrations change nothing here, see
            `recjax.runs.demonstrations`.
    """
    adapters = {}
    if config.model.run:
        run, name = split_step(config.model.run)
        theirs = run_config(run)
        has_same_adapters = theirs.model.lora == config.model.lora
        _, read_params = checkpoint_reader(run, theirs, merge=not has_same_adapters)
        params = put_params(read_params(whole_step(run, theirs, name)))
        if has_same_adapters:
            adapters = params
    else:
        has_files = config.model.path is not None
        with under_way(f"reading the weights of {config.model.path}", shown=has_files):
            params = load_params(config, policy.decoder.config)
    if config.warm_start and not config.demonstrations:
        assert train is not None
        params = warm_start(config, policy, params, train)
    if config.model.lora:
        key = jax.random.fold_in(jax.random.key(config.seed), 4)
        decoder, params = with_adapters(policy.decoder, params, config.model.lora, key)
        policy = policy._replace(decoder=decoder)
    if config.model.adapter and not config.model.merge_adapter:
        _, host_adapters = load_adapter(config.model.adapter, policy.decoder.config)
        adapters = put_params(host_adapters)
    return policy, combine(params, adapters)


def _initial(config: Config) -> tuple[Policy, dict]:
    """The policy of a config before its first step, with its adapters and all parameters in float32.

    It reads the problems only if a warm start, or the tokenizer of a decoder from scratch, needs them.
    """
    if config.warm_start is None or config.demonstrations:
        return initial_policy(config, policy_without_params(config), None)
    train, evaluation = load_problems(config)
    policy = policy_alone(config, characters([*train, *evaluation]))
    reward: Any = None  # reading prompts needs no reward
    prompts, _ = prompts_of(config, policy, Task(train, evaluation, reward))
    return initial_policy(config, policy, prompts)


def policy_without_params(config: Config) -> Policy:
    """The policy of a config; reads the problems only for the tokenizer of a decoder from scratch."""
    problems = []
    decoder = config.model.decoder
    if decoder is not None and decoder.characters is None:
        train, evaluation = load_problems(config)
        problems = [*train, *evaluation]
    return policy_alone(config, characters(problems))


# --- Parameters of checkpoints.


def checkpoint_reader(run: Path, config: Config, merge: bool = True) -> tuple[Policy, Callable[[int], dict]]:
    """The policy of a run without adapters, and a function that reads its parameters at a step.

    The function returns all parameters in float32, with adapters merged, as NumPy arrays on the host. Checkpoints lack
    the parameters that the run did not train; these are made again, once, in the same way. The problems are read only
    if the built-in tokenizer or a warm start depends on them, and the reward never.

    Args:
        config: config of the run.
        merge: merge adapters.
    Raises:
        UserError: the model of the config, or the problems that it depends on, cannot be read. The function raises it
            if the checkpoint has other shapes than the model, and types of Orbax for missing files.
    """
    lora = config.model.lora
    if lora is None and not config.model.freeze:
        policy = policy_without_params(config)
        constant = {}
        trained = abstract_params(policy.decoder.config)
    else:
        policy, params = _initial(config)
        trained, constant = split_params(on_host(params), config.model)
    decoder_config = policy.decoder.config
    plain_config = dataclasses.replace(decoder_config, lora=None)
    plain = policy._replace(decoder=policy.decoder.clone(config=plain_config))

    def read_params(step: int) -> dict:
        params = combine(read_trained(run, step, trained), constant)
        if lora and merge:
            return merged(decoder_config, params)
        return params

    return plain, read_params


def older_params(config: Config, policy: Policy, frozen: dict, like: dict) -> Callable[[int], dict]:
    """A function that reads all parameters after an earlier step of a run, in the compute dtype, from its checkpoint.

    Args:
        frozen: parameters that are not trained.
        like: trained parameters, or arrays of their shapes.
    """
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)

    def read(step: int) -> dict:
        trained = put_params(read_trained(Path(config.output), step, like))
        return combine(in_compute_dtype(policy.decoder, trained, copy=False), frozen)

    return read


def read_whole(run: Path, config: Config, step: int | str | None, read: Callable[[int], dict]) -> tuple[int, dict]:
    """The step of a whole checkpoint, and the parameters that `read` reads of it.

    A run in training may delete the newest checkpoint during the read; the next one is then read.

    Args:
        step: step of the checkpoint, or "best"; None: the newest.
    """
    for number in range(1, _MAX_READS + 1):
        is_last_try = number == _MAX_READS
        version = whole_step(run, config, step)
        folder = run / "checkpoints" / str(version)
        try:
            return version, read(version)
        except Exception as error:
            # Orbax has its own types for missing files.
            if folder.exists():
                raise
            names_step = step not in (None, "best")
            if names_step or is_last_try:
                raise UserError(
                    folder,
                    "the run deleted this checkpoint during the read",
                    "raise training.keep_checkpoints, or read it again",
                ) from error
    raise AssertionError("the last try returns or raises")


def read_trained(run: Path, step: int, like: dict) -> dict:
    """The trained parameters of a checkpoint; the optimizer state is not read.

    Args:
        like: trained parameters, or arrays of their shapes.
    """
    item = {"params": jax.tree.map(ocp.utils.to_shape_dtype_struct, like)}
    to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    arguments = ocp.args.PyTreeRestore(item=item, restore_args=to_host, partial_restore=True)
    folder = (run / "checkpoints" / str(step) / "state").absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        params = checkpointer.restore(folder, args=arguments)["params"]
    restored = flatten(params)
    for path, leaf in flatten(like).items():
        shape = restored[path].shape
        if shape != leaf.shape:
            raise UserError(
                f"{run}, step {step}",
                f"{path} has shape {shape} in the checkpoint, but the model that config.yaml describes has"
                f" {leaf.shape} there",
                "put the model or the problems back as they were in training",
            )
    return params
