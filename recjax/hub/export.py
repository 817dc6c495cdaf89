"""Writes models as Hugging Face folders with config and tokenizer, and adapters as files that PEFT reads."""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from recjax.errors import UserError
from recjax.hub.families import CONTAINERS, FIELDS, SILU, TEXT_MODULES, text_fields
from recjax.hub.tokenizers import checked_links, listed_eos
from recjax.hub.weights import fused_rows, read_config, tensor_names
from recjax.models.decoder import abstract_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.trainable import flatten
from recjax.runtime.console import progress_bar
from recjax.runtime.files import whole_folder

DTYPES = ("float32", "bfloat16", "float16")

# Files are listed by name because a folder may also hold files of an adapter or a trainer, which do not belong to the
# merged model. Licenses require that copies include them.
COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "LICENSE*",
    "NOTICE*",
)


def check_output(output: str | Path) -> None:
    """Refuses an output folder that is not empty.

    Raises:
        UserError: the folder is not empty, or is a file.
    """
    output = Path(output)
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise UserError("--output", "is not empty", "name a new folder, or empty it", value=str(output))


def export_model(
    output: str | Path,
    config: DecoderConfig,
    params: dict,
    base: Path,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 10**9,
    extra_files: Mapping[str, bytes] = MappingProxyType({}),
    stop_ids: Sequence[int] = (),
) -> None:
    """Writes a folder that `load_pretrained` and transformers read; it appears complete or not at all.

    Args:
        output: folder that does not exist or is empty.
        config: decoder config without adapters.
        params: all parameters in float32; the host copies at most one shard at a time.
        base: folder to copy the tokenizer, chat template, generation config and config.json from. Only the dtype and,
            if they differ, tie_word_embeddings and eos_token_id change.
        dtype: dtype of every tensor; float32 keeps the exact values, bfloat16 and float16 round.
        max_shard_bytes: largest single weight file; larger models become shards with an index.
        extra_files: contents of additional files by name.
        stop_ids: token ids that end the policy's completions. eos_token_id lists the ids that the base's files lack, in
            generation_config.json or, if the base has none, in config.json, as transformers reads them.
    Raises:
        UserError: the folder is not empty, the dtype is unknown, or it cannot hold the values; or a file of the base
            is a link out of its folder.
    """
    check_output(output)
    checked_links(base)
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}", "is not supported", f"use {', '.join(DTYPES)}")
    with whole_folder(Path(output)) as partial:
        _copy_companions(base, partial)
        written = json.loads((base / "config.json").read_text(encoding="utf-8-sig"))
        fields = text_fields(written)
        if fields is not written:
            # Not at module level: in a program that is no command, it imports torch if torch is installed.
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

            fields["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[fields["model_type"]]]
        listed = listed_eos(base)
        unlisted = [token for token in stop_ids if token not in listed and token < config.vocab_size]
        generation = partial / "generation_config.json"
        if unlisted and generation.is_file():
            options = json.loads(generation.read_text(encoding="utf-8-sig"))
            options["eos_token_id"] = listed + unlisted
            write_json(generation, options)
        elif unlisted:
            fields["eos_token_id"] = listed + unlisted
        # transformers 4 wrote torch_dtype; 5 writes dtype and reads both.
        if "torch_dtype" in fields:
            fields["torch_dtype"] = dtype
        if "dtype" in fields or "torch_dtype" not in fields:
            fields["dtype"] = dtype
        write_json(partial / "config.json", fields)
        if read_config(partial).tie_embeddings != config.tie_embeddings:  # the base's weights had a separate head
            fields["tie_word_embeddings"] = config.tie_embeddings
            write_json(partial / "config.json", fields)
        for name, content in extra_files.items():
            (partial / name).write_bytes(content)
        _write_weights(partial, config, params, dtype, max_shard_bytes)


def _copy_companions(base: Path, folder: Path) -> None:
    """Copies the base's files that belong to the model, except its config.json."""
    files = set()
    for pattern in COMPANION_FILES:
        files.update(base.glob(pattern))
    for file in files:
        if file.is_file() and file.name != "config.json":
            copy = folder / file.relative_to(base)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


def write_base(
    folder: Path,
    config: DecoderConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: int | tuple[int, ...],
    max_positions: int = 2048,
) -> None:
    """Writes config.json, tokenizer and generation config of a plain Llama decoder.

    Args:
        max_positions: value of `max_position_embeddings` in tokens; serving programs need it, recjax ignores it.
    Raises:
        UserError: the decoder has a feature that Llama's config.json cannot express.
    """
    options = dataclasses.asdict(config)
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": config.head_dim,
        "max_position_embeddings": max_positions,
        "rope_theta": config.rope_theta,  # read by transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # read by transformers 5
        "dtype": "float32",
        "eos_token_id": tokenizer.eos_token_id,
    }
    fields |= {field: options[name] for name, field in FIELDS.items()}
    fields |= SILU
    special = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    fields |= special
    write_json(folder / "config.json", fields)
    write_json(folder / "generation_config.json", {"eos_token_id": stop_ids} | special)
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    # transformers 4 does not know the class name that 5 writes; both know PreTrainedTokenizerFast.
    text = settings.read_text(encoding="utf-8").replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
    settings.write_text(text, encoding="utf-8")
    if read_config(folder) != config:
        raise UserError(problem=f"{config} is no plain Llama decoder: Llama's config.json cannot describe it")


def write_adapters(
    folder: Path, config: DecoderConfig, params: dict, base: str | Path, hub_name: str | None = None
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors for `peft.PeftModel.from_pretrained(base, folder)`.

    PEFT joins the adapters of an expert's projections, so recjax writes all three; absent ones are zero. Adapters of a
    multimodal model have the names that transformers' class for the complete model gives its text half.

    Args:
        folder: existing folder.
        config: decoder config with `lora`; with adapters of experts, every layer has experts and nothing else.
        params: adapters, with or without the model's other parameters.
        base: folder of the model that the adapters belong to, whose config.json decides the module names.
        hub_name: hub name of that model; None: PEFT looks for it in `base`.
    """
    written = json.loads((Path(base) / "config.json").read_text(encoding="utf-8-sig"))
    is_multimodal = written.get("model_type") in CONTAINERS
    lora = config.lora
    assert lora is not None
    rank = lora.rank
    leaves = flatten(jax.device_get(params))
    targets = list(lora.targets)
    if config.experts is not None and not {"gate", "up", "down"}.isdisjoint(targets):
        if config.experts.dense or config.experts.shared_size:
            raise UserError(
                f"model.lora.targets = {targets}",
                "PEFT reads no adapters of experts (gate, up, down) in models with layers without experts or with an"
                " MLP next to them",
                "export the merged model instead",
            )
        targets += [name for name in ("gate", "up", "down") if name not in targets]
        leaves = _zeros(dataclasses.replace(config, lora=lora._replace(targets=tuple(targets)))) | leaves
    plain = dataclasses.replace(config, lora=None)
    fused = fused_rows(plain)
    tensors = {}
    ranks = {}  # the keys are the last parts of module names
    modules = _adapted_modules(tensor_names(plain), targets, is_multimodal)
    for (module, index), kernels in modules.items():
        # The adapters of a fused tensor are one of their joint rank, whose second matrix is block-diagonal.
        ranks[module.split(".")[-1]] = rank * len(kernels)
        a = [_factor(leaves[f"{kernel}_lora_a/kernel"], index) for kernel in kernels]
        b = [_factor(leaves[f"{kernel}_lora_b/kernel"], index) for kernel in kernels]
        joint_b = b[0]
        if f"{kernels[0]}/kernel" in fused:
            count = fused[f"{kernels[0]}/kernel"].count
            joint_b = np.zeros((count, rank * len(kernels)), b[0].dtype)
            for number, kernel in enumerate(kernels):
                rows = fused[f"{kernel}/kernel"].rows
                joint_b[rows, number * rank : (number + 1) * rank] = b[number]
        # safetensors writes an array's memory without regard to its order, so make the array contiguous.
        tensors[f"base_model.model.{module}.lora_A.weight"] = np.ascontiguousarray(np.concatenate(a))
        tensors[f"base_model.model.{module}.lora_B.weight"] = np.ascontiguousarray(joint_b)
    write_tensors(folder / "adapter_model.safetensors", tensors)
    joint_ranks = {module: joint_rank for module, joint_rank in ranks.items() if joint_rank != rank}
    target_modules = list(ranks)
    if is_multimodal:
        # The last part of a name may also be that of a vision tower's module.
        target_modules = [module for module, _ in modules]
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub_name or str(base),
        "r": rank,
        "lora_alpha": lora.alpha,
        "target_modules": target_modules,
        "rank_pattern": joint_ranks,
        "alpha_pattern": {module: lora.alpha * joint_rank / rank for module, joint_rank in joint_ranks.items()},
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / "adapter_config.json", settings)


def _adapted_modules(
    names: dict[str, list[str]], targets: Sequence[str], is_multimodal: bool
) -> dict[tuple[str, int], list[str]]:
    """Paths of adapted kernels, without `/kernel`, by their module in the base and their index in the stack.

    Args:
        names: see `tensor_names`.
    """
    modules: dict[tuple[str, int], list[str]] = {}
    for target in targets:
        for path in names:
            if not path.endswith(f"/{target}/kernel"):
                continue
            for index, name in enumerate(names[path]):
                module = name.removesuffix(".weight")
                if is_multimodal:
                    module = module.replace("model.", TEXT_MODULES, 1)
                modules.setdefault((module, index), []).append(path.removesuffix("/kernel"))
    return modules


def _factor(stack: np.ndarray, index: int) -> np.ndarray:
    """A matrix from a stack for each layer, or for each expert of each layer, as PEFT stores it."""
    return stack.reshape(-1, *stack.shape[-2:])[index].T


def _zeros(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Zeros for all parameters of a decoder, by path."""
    return {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in flatten(abstract_params(config)).items()}


class _View(NamedTuple):
    """A parameter's part of a tensor, in Hugging Face's layout.

    rows: the tensor's rows that these values fill; None: all.
    """

    values: np.ndarray
    rows: np.ndarray | None


def _write_weights(folder: Path, config: DecoderConfig, params: dict, dtype: str, max_shard_bytes: int) -> None:
    tensors = _tensor_views(config, flatten(jax.device_get(params)))
    item_bytes = jnp.dtype(dtype).itemsize
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda views: sum(view.values.size for view in views) * item_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    with progress_bar("export", len(tensors), unit="tensor") as bar:
        for file, names in split.filename_to_tensors.items():
            shard = {}
            for name in names:
                shard[name] = _joined(tensors[name], dtype)
                if not np.isfinite(shard[name]).all():
                    raise UserError(
                        f"tensor {name!r}", f"has values that {dtype} cannot hold", "export as bfloat16 or float32"
                    )
                bar.update()
            write_tensors(folder / file, shard)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)


def _tensor_views(config: DecoderConfig, leaves: dict[str, Any]) -> dict[str, list[_View]]:
    """The views of parameters that each tensor consists of; a fused tensor has several."""
    names = tensor_names(config)
    fused = fused_rows(config)
    if leaves.keys() != names.keys():
        raise ValueError(f"the parameters {sorted(leaves.keys() ^ names.keys())} are not those of the config")
    tensors: dict[str, list[_View]] = {}
    for path, names_of_path in names.items():
        stack = leaves[path] if path.startswith("layers/") else leaves[path][np.newaxis]
        if len(names_of_path) > len(stack):  # each expert of each layer has a tensor
            stack = stack.reshape(len(names_of_path), *stack.shape[2:])
        rows = fused[path].rows if path in fused else None
        for name, values in zip(names_of_path, stack, strict=True):
            if path.endswith("/kernel"):
                values = values.T
            tensors.setdefault(name, []).append(_View(values, rows))
    return tensors


def _joined(views: Sequence[_View], dtype: str) -> np.ndarray:
    """Joins the views of a tensor, in the dtype; values beyond its range become infinite."""
    with np.errstate(over="ignore"):
        arrays = [view.values.astype(jnp.dtype(dtype), order="C") for view in views]
    if views[0].rows is None:
        return arrays[0]
    tensor = np.empty((sum(len(array) for array in arrays), arrays[0].shape[1]), arrays[0].dtype)
    for view, array in zip(views, arrays, strict=True):
        tensor[view.rows] = array
    return tensor


def write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file with the permissions of the user's umask; the library would make it private."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)


def write_json(file: Path, content: dict) -> None:
    """Writes an indented JSON file."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
