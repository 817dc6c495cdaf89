"""Opens, evaluates and exports policies: of a checkpoint (adapters merged), a model folder, or a config."""

import contextlib
import dataclasses
import functools
import json
import logging
import operator
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import pandas as pd

from recjax import __version__
from recjax.agents.agents import Agents
from recjax.agents.trajectory import thoughts_opening
from recjax.config import PASSED, Config, ModelConfig, make_config, unknown_keys
from recjax.config.model import POLICY
from recjax.config.yaml_values import read_yaml_file
from recjax.errors import UserError
from recjax.hub.chat_rendering import CHAT_DATE, set_template_kwargs
from recjax.hub.export import COMPANION_FILES, check_output, export_model, write_adapters, write_base
from recjax.hub.model_card import model_card
from recjax.hub.policy import Policy, Teacher, compute_dtype, kernel_options, load_params, policy_alone
from recjax.hub.tokenizers import listed_eos, model_folder, stop_token_ids
from recjax.hub.weights import adapter_fields, load_adapter, read_config
from recjax.models.decoder import Decoder, abstract_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.placement import on_host, put_params
from recjax.models.trainable import adapted, combine, flatten, in_compute_dtype, merged, split_params, with_adapters
from recjax.rewards.pool import Grading
from recjax.runs.checkpoint import best_step, newest_whole, none_whole, progress, split_step, steps_of
from recjax.runs.folder import OTHER_RUNS, check_config_file, continues, differences, starts, stored_config
from recjax.runs.warm_start import FOLDER, warm_start
from recjax.runtime import hosts
from recjax.runtime.console import progress_bar, under_way
from recjax.runtime.files import check_manifest
from recjax.tasks.loading import load_problems
from recjax.tasks.problems import Task, characters
from recjax.tasks.prompts import Prompts, prompts_of
from recjax.training.evaluation import answered, sample_rows
from recjax.training.mesh import check_fits

logger = logging.getLogger(__name__)
_MOST_READS = 5  # tries to read the newest checkpoint of a run in training
_WITH_CARD = (*COMPANION_FILES, "README.md")  # the base model's card has its license


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
    step = name if step is None else step
    if config is None or (source not in (None, "base") and _is_run(run, step)):
        theirs = run_config(run)
        policy, read_params = checkpoint_reader(run, theirs)
        step, params = _read_whole(run, theirs, step, read_params)
        older_params = lambda step: for_sampling(policy, put_params(read_params(step)))  # noqa: E731
        opened = OpenedPolicy(f"{run.resolve().name}-{step}", policy, params, step, theirs, older_params)
        if config is None:
            return opened
        if config.model.chat_date and CHAT_DATE in policy.tokenizer.init_kwargs:
            policy.tokenizer.init_kwargs[CHAT_DATE] = config.model.chat_date
        set_template_kwargs(policy.tokenizer, config.model.chat_template_kwargs)
        stop_ids = stop_token_ids(policy.tokenizer, config.rollout.stop, theirs.model.path)
        opened = opened._replace(policy=policy._replace(stop_ids=stop_ids), params=put_params(opened.params))
    elif source in (None, "base"):
        opened = _untrained_policy(with_start(config))
    else:
        model = {"path": str(source), "decoder": None, "run": None, "adapter": None}
        try:
            opened = _untrained_policy(_with_model(config, model).model_copy(update={"warm_start": None}))
        except UserError as error:
            raise UserError(source, f"is neither a run's folder nor a model: {error}") from error
    return opened._replace(params=for_sampling(opened.policy, opened.params))


def _is_run(folder: Path, step: int | str | None) -> bool:
    return step is not None or (folder / "config.yaml").is_file() or (folder / "checkpoints").is_dir()


def _untrained_policy(config: Config) -> OpenedPolicy:
    """The policy of a config before its first step, without new adapters, which change nothing there."""
    name = Path(config.model.path).name if config.model.path else f"{Path(config.output).name}-base"
    if not config.demonstrations:
        changes = {"lora": None, "freeze": [], "merge_adapter": config.model.adapter is not None}
        policy, params = _initial(_with_model(config, changes))
        assert params is not None
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


def sampled_rows(config: Config, evaluated: OpenedPolicy, prompts: Prompts, task: Task) -> pd.DataFrame:
    """Samples completions of all problems; returns a row for each, with the answer that its grader read."""
    rows = []
    openings = []
    tokenizer = evaluated.policy.tokenizer
    unplayed = 0
    with contextlib.ExitStack() as stack:
        grading = stack.enter_context(Grading(config, task.reward))
        bar = progress_bar(evaluated.name, len(prompts.texts), unit="problem", shown=hosts.is_first())
        stack.enter_context(bar)
        agents = Agents(config, evaluated.policy, evaluated.older_params) if config.task.agent else None
        stack.enter_context(agents or contextlib.nullcontext())
        options = {"step": 0, "agents": agents, "version": evaluated.version}
        for done in answered(config, evaluated.policy, evaluated.params, prompts, grading, **options):
            rows += sample_rows(done)
            openings += [
                thoughts_opening(completion, tokenizer) for group in done.groups for completion in group.completions
            ]
            unplayed += sum(not group.completions for group in done.groups)
            bar.update(len(done.groups) // done.seats)
        if unplayed:
            logger.warning("pairs of a problem and a seat without completions, as the seat never played: %d", unplayed)
        frame = pd.DataFrame(rows).assign(parsed=None)
        tasks = np.array([row.get("task", "") for row in rows])
        for name in np.unique(tasks) if hosts.is_first() else ():
            of_task = np.flatnonzero(tasks == name)
            texts, opened = ([column[index] for index in of_task] for column in (frame["completion"], openings))
            located: Any = frame.loc
            parsed = grading.parsed(texts, opened, str(name))
            located[of_task, "parsed"] = pd.Series(parsed, of_task, dtype=object)
    return frame


def older_params(config: Config, policy: Policy, frozen: dict, like: dict) -> Callable[[int], dict]:
    """A function that reads all parameters after an earlier step of a run, in the compute dtype, from its checkpoint.

    Args:
        frozen: parameters that are not trained.
        like: trained parameters, or arrays of their shapes.
    """
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)

    def read(step: int) -> dict:
        trained = put_params(_restored(Path(config.output), step, like))
        return combine(in_compute_dtype(policy.decoder, trained, copy=False), frozen)

    return read


def for_sampling(policy: Policy, params: dict) -> dict:
    """Converts parameters on the devices to the compute dtype.

    Raises:
        UserError: the current mesh does not fit the model.
    """
    check_fits(jax.sharding.get_mesh(), policy.decoder.config)
    return in_compute_dtype(policy.decoder, params, copy=False)


def with_start(config: Config, overwrite: bool = True) -> Config:
    """The config with the model of the run that `model.run` names, and with the step of the checkpoint.

    With `model.adapter`, the config has the adapter's base and, unless it is merged, the adapter's `model.lora`. The
    config.yaml of a run keeps all of them, so a run that resumes has the same start.

    Args:
        overwrite: read no config.yaml in the folder `output`.
    Raises:
        UserError: the run or its checkpoint does not exist, has another model, or trained other parameters; or an
            adapter that recjax cannot read, or that differs from `model.lora`.
    """
    model = config.model
    stored = {}
    if model.adapter:
        return config.model_copy(update={"model": _with_adapter(model)})
    if model.run is None:
        return config
    if not overwrite and (Path(config.output) / "config.yaml").is_file():
        stored = stored_config(Path(config.output)).get("model") or {}
    run, name = split_step(stored["run"] if continues(model.run, stored.get("run")) else model.run)
    theirs = run_config(run)
    step = hosts.from_first(lambda: _whole_step(run, theirs, name))
    decoder = theirs.model.decoder
    if decoder and not decoder.characters:
        train, evaluation = load_problems(theirs)
        decoder = decoder.model_copy(update={"characters": characters([*train, *evaluation])})
    kept = {"decoder.characters"}
    shapes, trained = (
        differences(model.model_dump(include=keys), theirs.model.model_dump(include=keys), kept)
        for keys in ({"path", "decoder"}, {"lora", "freeze"})
    )
    if shapes and (model.path or model.decoder):
        raise UserError(
            "model.run", f"has another model ({shapes})", "remove model.path or model.decoder", value=model.run
        )
    if trained and config.optimizer.state == "run":
        raise UserError(
            problem=(
                f"model.run = {model.run!r} trained other parameters (model.{trained}), and its optimizer state does"
                " not fit"
            ),
            remedy="set optimizer.state=new to begin with a new state, or train the same parameters",
        )
    if config.optimizer.state == "run" and config.optimizer.name != theirs.optimizer.name:
        raise UserError(
            "optimizer.name",
            f"model.run = {model.run!r} was trained with {theirs.optimizer.name!r}, whose state does not fit",
            "set optimizer.state=new to begin with a new state",
            value=config.optimizer.name,
        )
    start = {"run": f"{run}/checkpoints/{step}", "path": theirs.model.path, "decoder": decoder}
    return config.model_copy(update={"model": model.model_copy(update=start)})


def with_pinned(config: Config, overwrite: bool) -> Config:
    """The config with the step of the checkpoint of a run that `model.teacher` or `model.reference` names.

    A run that resumes has the steps of its config.yaml, also if the other runs have newer checkpoints.

    Args:
        overwrite: read no config.yaml in the folder `output`.
    Raises:
        UserError: the checkpoint does not exist or is damaged.
    """
    resumes = not overwrite and (Path(config.output) / "config.yaml").is_file()
    stored = (stored_config(Path(config.output)).get("model") or {}) if resumes else {}
    pinned = {}
    for name in OTHER_RUNS:
        source = getattr(config.model, name)
        if source is None or source == POLICY:
            continue
        known = stored.get(name)
        run, step = split_step(known if known is not None and continues(source, known) else source)
        if _is_run(run, step):
            theirs = run_config(run)
            try:
                step = hosts.from_first(functools.partial(_whole_step, run, theirs, step))
            except UserError as error:
                raise UserError(f"model.{name}", str(error), value=source) from error
            pinned[name] = f"{run}/checkpoints/{step}"
    return _with_model(config, pinned)


def _with_adapter(model: ModelConfig) -> ModelConfig:
    """The model with the base of its adapter and, unless the adapter is merged, with the adapter's rank and targets."""
    assert model.adapter is not None
    fields = adapter_fields(model.adapter)
    base = fields.get("base_model_name_or_path")
    revision = fields.get("revision") or "main"
    if model.path is None and (not base or revision != "main"):
        raise UserError(
            "model.adapter",
            f"its base is {base!r}, revision {revision!r}",
            "set model.path to a folder with that model",
            value=model.adapter,
        )
    if base and model.path and base != model.path and Path(base).absolute() != Path(model.path).absolute():
        logger.warning(
            "model.adapter = %r was trained on the base %r, not on model.path = %r", model.adapter, base, model.path
        )
    model = model.model_copy(update={"path": model.path or base})
    assert model.adapter is not None and model.path is not None
    lora = load_adapter(model.adapter, read_config(model_folder(model.path, ("config.json",))))[0]
    if model.merge_adapter:
        return model
    if model.lora not in (None, lora):
        assert model.lora is not None
        raise UserError(
            "model.lora",
            f"model.adapter = {model.adapter!r} has {lora.model_dump()}",
            "remove model.lora to train the adapter further, or set model.merge_adapter=true to train new adapters",
            value=model.lora.model_dump(),
        )
    return model.model_copy(update={"lora": lora})


def initial_policy(config: Config, policy: Policy, train: Prompts | None) -> tuple[Policy, dict]:
    """The policy with its adapters, and all of its parameters before the first step, in float32.

    The parameters are random (`model.decoder`), those of a model folder (`model.path`), or those of a run's checkpoint
    (`model.run`). A warm start on answers then trains them. The adapters are new ones, those of `model.adapter`, or
    those of the other run if this run has the same `model.lora`. If not, adapters of the other run are merged.

    Args:
        policy: the result of `policy_alone`.
        train: prompts for a warm start on answers; None without one. Demonstrations change nothing here, see
            `recjax.runs.demonstrations`.
    """
    adapters = {}
    if config.model.run:
        run, name = split_step(config.model.run)
        theirs = run_config(run)
        same = theirs.model.lora == config.model.lora
        params = put_params(checkpoint_reader(run, theirs, merge=not same)[1](_whole_step(run, theirs, name)))
        adapters = params if same else {}
    else:
        with under_way(f"reading the weights of {config.model.path}", config.model.path is not None):
            params = load_params(config, policy.decoder.config)
    if config.warm_start and not config.demonstrations:
        assert train is not None
        params = warm_start(config, policy, params, train)
    if config.model.lora:
        key = jax.random.fold_in(jax.random.key(config.seed), 4)
        decoder, params = with_adapters(policy.decoder, params, config.model.lora, key)
        policy = policy._replace(decoder=decoder)
    if config.model.adapter and not config.model.merge_adapter:
        adapters = put_params(load_adapter(config.model.adapter, policy.decoder.config)[1])
    return policy, combine(params, adapters)


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
    if _is_run(run, step):
        return _initial(run_config(run), False)[0].decoder.config
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


def run_config(run: Path) -> Config:
    """The config of a run; keys that this version does not have are skipped, with a warning that names them.

    Raises:
        UserError: the folder is not a run, or its config.yaml is damaged or has values that this version refuses.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise UserError(f"run {str(run)!r}", "holds no config.yaml", "name the output folder of a training run")
    try:
        values = read_yaml_file(path)
        unknown = unknown_keys(values)
        for *blocks, name in unknown:
            block: Any = functools.reduce(operator.getitem, blocks, values)
            block.pop(name)
        config = make_config(values, source=str(path))
    except UserError as error:
        raise UserError(error.where, error.problem, f"{error.remedy}{_made_by(run)}", error.value) from error
    if unknown:
        names = ", ".join(".".join(map(str, key)) for key in unknown)
        logger.warning("%s: not read, as this version has no such keys: %s%s", path, names, _made_by(run))
    # Problems that a program passed are in the run folder, which may have been moved.
    is_passed = config.task.file is not None and config.task.file.train.startswith(f"{PASSED}:")
    return config.model_copy(update={"output": str(run)}) if is_passed else config


def _made_by(run: Path) -> str:
    """A note on the recjax version that made a run; empty if it is this version."""
    made = next(iter(starts(run)), {}).get("recjax")
    return f"; the run was made with recjax {made}, this is {__version__}" if made not in (None, __version__) else ""


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
        policy = _initial(config, False)[0]
        constant = {}
        trained = abstract_params(policy.decoder.config)
    else:
        policy, params = _initial(config)
        trained, constant = split_params(on_host(params), config.model)
    decoder_config = policy.decoder.config
    plain = policy._replace(decoder=policy.decoder.clone(config=dataclasses.replace(decoder_config, lora=None)))

    def read_params(step: int) -> dict:
        params = combine(_restored(run, step, trained), constant)
        return merged(decoder_config, params) if lora and merge else params

    return plain, read_params


def _initial(config: Config, reads_params: bool = True) -> tuple[Policy, dict | None]:
    """The policy of a config before its first step; with its adapters and all parameters in float32 if they are read.

    It reads the problems only if a warm start, or the tokenizer of a decoder from scratch, needs them.
    """
    on_answers = reads_params and config.warm_start is not None and not config.demonstrations
    decoder = config.model.decoder
    needs_problems = on_answers or (decoder is not None and decoder.characters is None)
    train, evaluation = load_problems(config) if needs_problems else ([], [])
    policy = policy_alone(config, characters([*train, *evaluation]))
    if not reads_params:
        return policy, None
    nothing: Any = None  # reading prompts needs no reward
    prompts = prompts_of(config, policy, Task(train, evaluation, nothing))[0] if on_answers else None
    return initial_policy(config, policy, prompts)


def _whole_step(run: Path, config: Config, step: int | str | None) -> int:
    """The step of the newest whole checkpoint, the best, or `step`; checks that it is whole and fits the config."""
    folder = run / "checkpoints"
    steps = steps_of(folder)
    if step == "best":
        try:
            step = best_step(run, config.training.keep_best or "evaluation/accuracy")
        except UserError as error:
            raise error.within(f"{folder}/best") from error
    step = step if step is None else int(step)
    if not steps:
        raise UserError(f"run {str(run)!r}", "holds no checkpoint yet", "its first is written before its first step")
    if step is None:
        step, damaged = newest_whole(folder)
        if step is None:
            raise none_whole(folder, damaged)
        for left_out, reason in damaged.items():
            logger.warning("checkpoint of step %d: %s; that of step %d is taken", left_out, reason, step)
    elif step not in steps:
        raise UserError(f"step {step}", f"{folder} holds the steps {', '.join(map(str, steps))}", "name one of them")
    else:
        try:
            check_manifest(folder / str(step))
        except UserError as error:
            raise UserError(f"step {step}", str(error), "name another one, or bring it back from a copy") from error
    check_config_file(run, config, progress(folder, step))
    return step


def _read_whole(run: Path, config: Config, step: int | str | None, read: Callable[[int], dict]) -> tuple[int, dict]:
    """The step of a checkpoint as of `_whole_step`, and what `read` reads of it.

    A run in training may delete the newest checkpoint during the read; the next one is then read.
    """
    for tries in range(_MOST_READS, 0, -1):
        whole_step = _whole_step(run, config, step)
        folder = run / "checkpoints" / str(whole_step)
        try:
            return whole_step, read(whole_step)
        except Exception as error:
            # Orbax has its own types for missing files.
            if folder.exists():
                raise
            if step not in (None, "best") or tries == 1:
                raise UserError(
                    folder,
                    "the run deleted this checkpoint during the read",
                    "raise training.keep_checkpoints, or read it again",
                ) from error
    raise AssertionError("the last try returns or raises")


def _restored(run: Path, step: int, like: dict) -> dict:
    """The trained parameters of a checkpoint; the optimizer state is not read."""
    item = {"params": jax.tree.map(ocp.utils.to_shape_dtype_struct, like)}
    to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    arguments = ocp.args.PyTreeRestore(item=item, restore_args=to_host, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        params = checkpointer.restore((run / "checkpoints" / str(step) / "state").absolute(), args=arguments)["params"]
    for path, leaf in flatten(like).items():
        shape = flatten(params)[path].shape
        if shape != leaf.shape:
            raise UserError(
                f"{run}, step {step}",
                f"{path} has shape {shape} in the checkpoint, but the model that config.yaml describes has"
                f" {leaf.shape} there",
                "put the model or the problems back as they were in training",
            )
    return params


def export_checkpoint(run: Path, output: Path, step: int | None, dtype: str, adapters: bool = False) -> str:
    """Writes the policy of a checkpoint as a Hugging Face folder, with a model card; describes the export.

    Args:
        output: new or empty folder.
        step: step of the checkpoint; None: the newest.
        dtype: dtype of the weights.
        adapters: write only the adapters, in PEFT's format and in float32, instead of merging them into the model.
    Raises:
        UserError: the folder has files, the checkpoint does not exist, or the run has no adapters.
    """
    check_output(output)
    if adapters:
        return f"adapters of {run} after step {_export_adapters(run, output, step)}"
    opened = open_policy(run, step=step)
    policy = opened.policy
    params = opened.params
    step = opened.version
    config = opened.run
    assert config is not None
    with tempfile.TemporaryDirectory() as made:
        base = Path(made)
        if config.model.path:
            base = model_folder(config.model.path, _WITH_CARD)
        else:
            write_base(base, policy.decoder.config, policy.tokenizer, policy.stop_ids)
        card_files = _card_files(run, config, step, base, output.name)
        export_model(
            output, policy.decoder.config, params, base, dtype, extra_files=card_files, stop_ids=policy.stop_ids
        )
    return f"{run} after step {step}"


def _export_adapters(run: Path, output: Path, step: int | None) -> int:
    config = run_config(run)
    if not (config.model.lora and config.model.path):
        raise UserError(
            "--adapters",
            f"{str(run)!r} did not train adapters (model.lora) of a model in a folder or on the hub (model.path)",
            "remove --adapters to export the whole model",
        )
    earlier = config
    while earlier.model.run and earlier.model.lora == config.model.lora:
        earlier = run_config(split_step(earlier.model.run)[0])
    if earlier.model.lora != config.model.lora or earlier.model.merge_adapter:
        key = "model.merge_adapter" if earlier.model.merge_adapter else "model.run"
        raise UserError(
            "--adapters",
            f"{str(run)!r} trained adapters of changed weights ({key}), not of {config.model.path!r}",
            "remove --adapters to export the whole model",
        )
    policy = policy_alone(config, "")
    decoder_config = adapted(policy.decoder.config, config.model.lora)
    # Only the adapters are read: the base may be large.
    trained = split_params(abstract_params(decoder_config), config.model)[0]
    step, adapters = _read_whole(run, config, step, lambda step: _restored(run, step, trained))
    output.mkdir(parents=True, exist_ok=True)
    base = model_folder(config.model.path, _WITH_CARD)
    # PEFT would resolve a relative path against its own working directory, which may differ from this one.
    is_local = Path(config.model.path).is_dir()
    write_adapters(output, decoder_config, adapters, base.resolve(), None if is_local else config.model.path)
    listed = listed_eos(base)
    note = ""
    if unlisted := [token for token in policy.stop_ids if token not in listed and token < policy.vocabulary]:
        note = (
            f"Completions also end at {policy.tokenizer.convert_ids_to_tokens(unlisted)}, which the base model's"
            f" eos_token_id does not have: pass eos_token_id={[*listed, *unlisted]} to `generate`, or"
            f" stop_token_ids={unlisted} to vLLM."
        )
        logger.warning("%s: %s", output, note)
    for name, content in _card_files(run, config, step, base, output.name, note).items():
        (output / name).write_bytes(content)
    return step


def _card_files(
    run: Path, config: Config, step: int, base: Path, name: str, adapter_note: str | None = None
) -> dict[str, bytes]:
    """Contents of the model card and its figure, by file name."""
    summary = run / "summary.json"
    figure = run / "figures" / "training.png"
    finished = summary.is_file() and step == config.training.steps
    numbers = json.loads(summary.read_text(encoding="utf-8")) if finished else {}
    shown = {"training.png": figure.read_bytes()} if figure.is_file() else {}
    made_with = next(reversed(starts(run)), {})
    card = model_card(name, config, step, numbers, made_with, base, next(iter(shown), ""), adapter_note)
    return {"README.md": card.encode(), **shown}
