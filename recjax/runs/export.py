"""Exports the policy of a checkpoint as a Hugging Face folder, with a model card."""

import json
import logging
import tempfile
from pathlib import Path

from recjax.config import Config
from recjax.errors import UserError
from recjax.hub.export import COMPANION_FILES, check_output, export_model, write_adapters, write_base
from recjax.hub.model_card import model_card
from recjax.hub.policy import Policy, policy_alone
from recjax.hub.tokenizers import listed_eos, model_folder
from recjax.models.decoder import abstract_params
from recjax.models.trainable import adapted, split_params
from recjax.runs.policies import open_policy, read_trained, read_whole
from recjax.runs.spec import split_step
from recjax.runs.stored_runs import run_config, starts

logger = logging.getLogger(__name__)

_WITH_CARD = (*COMPANION_FILES, "README.md")  # the base model's card has its license


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
    """Writes the adapters of a checkpoint in PEFT's format, with a model card; returns the checkpoint's step."""
    config = run_config(run)
    _check_adapters(run, config)
    assert config.model.path is not None and config.model.lora is not None
    policy = policy_alone(config, "")
    decoder_config = adapted(policy.decoder.config, config.model.lora)
    # Only the adapters are read: the base may be large.
    trained, _ = split_params(abstract_params(decoder_config), config.model)

    def read_adapters(step: int) -> dict:
        return read_trained(run, step, trained)

    version, adapters = read_whole(run, config, step, read_adapters)
    output.mkdir(parents=True, exist_ok=True)
    base = model_folder(config.model.path, _WITH_CARD)
    # PEFT would resolve a relative path against its own working directory, which may differ from this one.
    hub_name = None
    if not Path(config.model.path).is_dir():
        hub_name = config.model.path
    write_adapters(output, decoder_config, adapters, base.resolve(), hub_name)
    note = _stop_tokens_note(policy, base)
    if note:
        logger.warning("%s: %s", output, note)
    card_files = _card_files(run, config, version, base, output.name, adapter_note=note)
    for name, content in card_files.items():
        (output / name).write_bytes(content)
    return version


def _check_adapters(run: Path, config: Config) -> None:
    """Refuses runs without adapters, and runs with adapters of weights that are not those of `model.path`."""
    remedy = "remove --adapters to export the whole model"
    if not (config.model.lora and config.model.path):
        raise UserError(
            "--adapters",
            f"{str(run)!r} did not train adapters (model.lora) of a model in a folder or on the hub (model.path)",
            remedy,
        )
    # A run that continues another run with the same adapters trains them further.
    first = config
    while first.model.run and first.model.lora == config.model.lora:
        first = run_config(split_step(first.model.run)[0])
    key = None
    if first.model.merge_adapter:
        key = "model.merge_adapter"
    elif first.model.lora != config.model.lora:
        key = "model.run"
    if key is not None:
        problem = f"{str(run)!r} trained adapters of changed weights ({key}), not of {config.model.path!r}"
        raise UserError("--adapters", problem, remedy)


def _stop_tokens_note(policy: Policy, base: Path) -> str:
    """A note on the stop tokens that the base model's files do not have; empty if they have all."""
    listed = listed_eos(base)
    unlisted = [token for token in policy.stop_ids if token not in listed and token < policy.vocabulary]
    if not unlisted:
        return ""
    return (
        f"Completions also end at {policy.tokenizer.convert_ids_to_tokens(unlisted)}, which the base model's"
        f" eos_token_id does not have: pass eos_token_id={[*listed, *unlisted]} to `generate`, or"
        f" stop_token_ids={unlisted} to vLLM."
    )


def _card_files(
    run: Path, config: Config, step: int, base: Path, name: str, adapter_note: str | None = None
) -> dict[str, bytes]:
    """Contents of the model card and its figure, by file name."""
    summary = run / "summary.json"
    numbers = {}
    if summary.is_file() and step == config.training.steps:
        numbers = json.loads(summary.read_text(encoding="utf-8"))
    files = {}
    figure = run / "figures" / "training.png"
    figure_name = ""
    if figure.is_file():
        figure_name = figure.name
        files[figure_name] = figure.read_bytes()
    made_with = {}
    entries = starts(run)
    if entries:
        made_with = entries[-1]
    card = model_card(
        name,
        config,
        step,
        summary=numbers,
        made_with=made_with,
        base=base,
        figure=figure_name,
        adapter_note=adapter_note,
    )
    return {"README.md": card.encode()} | files
