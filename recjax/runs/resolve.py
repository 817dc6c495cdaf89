"""Resolves a config: the checkpoints of the runs that it names, the model of its start, and the date of its chats.

| a config gives | the resolved config has |
|---|---|
| `model.run`: a run, or its best checkpoint | the checkpoint's step, and `model.path` and `model.decoder` of that run |
| `model.adapter` | `model.path` of the adapter's base, and `model.lora` of the adapter unless it is merged |
| `model.teacher`, `model.reference`: a run | the checkpoint's step |
| a model whose chat template reads the clock | `model.chat_date`: the day of the run's first start |
"""

import logging
from datetime import date
from pathlib import Path

from recjax.config import Config, ModelConfig
from recjax.config.model import POLICY
from recjax.errors import UserError
from recjax.hub.tokenizers import model_folder, reads_clock
from recjax.hub.weights import adapter_fields, load_adapter, read_config
from recjax.runs.spec import OTHER_RUNS, changes, changes_in_words, split_step, with_stored_choices
from recjax.runs.stored_runs import has_run, run_config, stored_config, whole_step
from recjax.runtime import hosts
from recjax.tasks.loading import load_problems
from recjax.tasks.problems import characters

logger = logging.getLogger(__name__)


def resolve_config(config: Config, overwrite: bool) -> Config:
    """The config of a run as it trains and as config.yaml stores it.

    A run that resumes keeps the checkpoints and the date that it started with.

    Args:
        overwrite: read no config.yaml in the folder `output`.
    Raises:
        UserError: a run, checkpoint, model or adapter that recjax cannot read, or that does not fit the config.
    """
    output = Path(config.output)
    if not overwrite and (output / "config.yaml").is_file():
        config = with_stored_choices(config, stored_config(output))
    config = _with_steps_of_other_runs(config)
    config = resolve_start(config)
    return _with_chat_date(config)


def resolve_start(config: Config) -> Config:
    """The config with the model that training starts with: that of `model.run`, or that of `model.adapter`.

    Raises:
        UserError: the run or its checkpoint does not exist, has another model, or trained other parameters; or an
            adapter that recjax cannot read, or that differs from `model.lora`.
    """
    if config.model.adapter:
        return config.model_copy(update={"model": _model_of_adapter(config.model)})
    if config.model.run:
        return config.model_copy(update={"model": _model_of_run(config)})
    return config


def _model_of_run(config: Config) -> ModelConfig:
    """The model with shape and tokenizer of the run that `model.run` names, and with the step of its checkpoint."""
    model = config.model
    assert model.run is not None
    run, name = split_step(model.run)
    theirs = run_config(run)
    step = hosts.from_first(lambda: whole_step(run, theirs, name))
    if model.path or model.decoder:
        keys = {"path", "decoder"}
        their_shape = theirs.model.model_dump(include=keys)
        own_shape = model.model_dump(include=keys)
        other_shape = changes(their_shape, own_shape, ignored={"decoder.characters"})
        if other_shape:
            raise UserError(
                "model.run",
                f"has another model ({changes_in_words(other_shape)})",
                "remove model.path or model.decoder",
                value=model.run,
            )
    if config.optimizer.state == "run":
        _check_optimizer_state(config, theirs)
    decoder = theirs.model.decoder
    if decoder and not decoder.characters:
        train, evaluation = load_problems(theirs)
        decoder = decoder.model_copy(update={"characters": characters([*train, *evaluation])})
    start = {"run": f"{run}/checkpoints/{step}", "path": theirs.model.path, "decoder": decoder}
    return model.model_copy(update=start)


def _check_optimizer_state(config: Config, theirs: Config) -> None:
    """Refuses an optimizer state of another run that does not fit this run's parameters or optimizer."""
    remedy = "set optimizer.state=new to begin with a new state"
    keys = {"lora", "freeze"}
    their_parameters = theirs.model.model_dump(include=keys)
    own_parameters = config.model.model_dump(include=keys)
    other_parameters = changes({"model": their_parameters}, {"model": own_parameters})
    if other_parameters:
        raise UserError(
            problem=(
                f"model.run = {config.model.run!r} trained other parameters ({changes_in_words(other_parameters)}), and"
                " its optimizer state does not fit"
            ),
            remedy=f"{remedy}, or train the same parameters",
        )
    if config.optimizer.name != theirs.optimizer.name:
        raise UserError(
            "optimizer.name",
            f"model.run = {config.model.run!r} was trained with {theirs.optimizer.name!r}, whose state does not fit",
            remedy,
            value=config.optimizer.name,
        )


def _model_of_adapter(model: ModelConfig) -> ModelConfig:
    """The model with the base of its adapter and, unless the adapter is merged, with the adapter's rank and targets."""
    assert model.adapter is not None
    fields = adapter_fields(model.adapter)
    base = fields.get("base_model_name_or_path")
    revision = fields.get("revision") or "main"
    path = model.path
    if path is None:
        if not base or revision != "main":
            raise UserError(
                "model.adapter",
                f"its base is {base!r}, revision {revision!r}",
                "set model.path to a folder with that model",
                value=model.adapter,
            )
        path = base
    elif base and Path(base).absolute() != Path(path).absolute():
        logger.warning(
            "model.adapter = %r was trained on the base %r, not on model.path = %r", model.adapter, base, path
        )
    model = model.model_copy(update={"path": path})
    base_config = read_config(model_folder(path, ("config.json",)))
    lora, _ = load_adapter(str(model.adapter), base_config)
    if model.merge_adapter:
        return model
    if model.lora is not None and model.lora != lora:
        raise UserError(
            "model.lora",
            f"model.adapter = {model.adapter!r} has {lora.model_dump()}",
            "remove model.lora to train the adapter further, or set model.merge_adapter=true to train new adapters",
            value=model.lora.model_dump(),
        )
    return model.model_copy(update={"lora": lora})


def _with_steps_of_other_runs(config: Config) -> Config:
    """The config with the checkpoint's step where `model.teacher` or `model.reference` names a run."""
    steps = {}
    for name in OTHER_RUNS:
        source = getattr(config.model, name)
        if source is None or source == POLICY:
            continue
        run, step = split_step(source)
        if has_run(run, step):
            steps[name] = f"{run}/checkpoints/{_step_of_other_run(name, source)}"
    return config.model_copy(update={"model": config.model.model_copy(update=steps)})


def _step_of_other_run(name: str, source: str) -> int:
    """The step of the whole checkpoint that `model.teacher` or `model.reference` names.

    Args:
        name: "teacher" or "reference", for messages.
    """
    run, step = split_step(source)
    theirs = run_config(run)
    try:
        return hosts.from_first(lambda: whole_step(run, theirs, step))
    except UserError as error:
        raise UserError(f"model.{name}", str(error), value=source) from error


def _with_chat_date(config: Config) -> Config:
    """The config with today as the date of its chats, if it has no date and its chat template reads the clock."""
    model = config.model
    if not model.path or model.chat_date:
        return config

    def today() -> str | None:
        if not reads_clock(model.path):
            return None
        return date.today().isoformat()

    day = hosts.from_first(today)  # hosts in several time zones would have several days
    return config.model_copy(update={"model": model.model_copy(update={"chat_date": day})})
