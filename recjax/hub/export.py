"""Writes models as Hugging Face folders with config and tokenizer, and adapters as files that PEFT reads."""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.json", "*.jinja"),
    *("additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*"),
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
        for file in {file for pattern in COMPANION_FILES for file in base.glob(pattern)}:
            if file.is_file() and file.name != "config.json":
                copy = partial / file.relative_to(base)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
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
            write_json(generation, options | {"eos_token_id": [*listed, *unlisted]})
        elif unlisted:
            fields["eos_token_id"] = [*listed, *unlisted]
        # transformers 4 wrote torch_dtype; 5 writes dtype and reads both.
        for name in {"dtype", "torch_dtype"} & fields.keys() or {"dtype"}:
            fields[name] = dtype
        write_json(partial / "config.json", fields)
        if read_config(partial).tie_embeddings != config.tie_embeddings:  # the base's weights had a separate head
            write_json(partial / "config.json", fields | {"tie_word_embeddings": config.tie_embeddings})
        for name, content in extra_files.items():
            (partial / name).write_bytes(content)
        _write_weights(partial, config, params, dtype, max_shard_bytes)


def write_base(
    folder: Path,
    config: DecoderConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: int | tuple[int, ...],
    max_positions: int = 2048,
) -> None:
    """Writes config.json, tokenizer and generation config of a plain Llama decoder.

    Args:
        max_positions: number of tokens for `max_position_embeddings`; serving programs need it, recjax ignores it.
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
    special = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    fields |= {field: options[name] for name, field in FIELDS.items()} | SILU | special
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

    PEFT joins the adapters of an expert's projections, so that all three are written; absent ones are zero. Adapters
    of a multimodal model have the names that transformers' class for the whole model gives its text half.

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
    plain = dataclasses.replace(config, lora=None)
    leaves = flatten(jax.device_get(params))
    names = tensor_names(plain)
    rows = fused_rows(plain)
    experts = config.experts
    adapts_experts = experts is not None and not {"gate", "up", "down"}.isdisjoint(lora.targets)
    if experts is not None and adapts_experts and (experts.dense or experts.shared_size):
        raise UserError(
            f"model.lora.targets = {list(lora.targets)}",
            "PEFT reads no adapters of experts (gate, up, down) in models with layers without experts or with an"
            " MLP next to them",
            "export the merged model instead",
        )
    if adapts_experts:
        targets = dict.fromkeys([*lora.targets, "gate", "up", "down"])
        lora = lora._replace(targets=tuple(targets))
        config = dataclasses.replace(config, lora=lora)
        leaves = {path: np.zeros(x.shape, x.dtype) for path, x in flatten(abstract_params(config)).items()} | leaves
    parts: dict[tuple[str, int], list[str]] = {}  # kernels by their module in the base and their index in the stack
    for path in (path for target in lora.targets for path in names if path.endswith(f"/{target}/kernel")):
        for index, name in enumerate(names[path]):
            module = name.removesuffix(".weight")
            module = module.replace("model.", TEXT_MODULES, 1) if is_multimodal else module
            parts.setdefault((module, index), []).append(path.removesuffix("/kernel"))
    tensors = {}
    ranks = {}
    rank = lora.rank

    def factor(kernel: str, side: str, index: int) -> np.ndarray:
        stack = leaves[f"{kernel}_lora_{side}/kernel"]  # of layers, or of layers and experts
        return stack.reshape(-1, *stack.shape[-2:])[index].T

    for (module, index), kernels in parts.items():
        # The adapters of a fused tensor are one of their joint rank, whose second matrix is block-diagonal.
        ranks[module.split(".")[-1]] = rank * len(kernels)
        a, b = ([factor(kernel, side, index) for kernel in kernels] for side in ("a", "b"))
        if fused := rows.get(f"{kernels[0]}/kernel"):
            joint = np.zeros((fused.count, rank * len(kernels)), b[0].dtype)
            for number, kernel in enumerate(kernels):
                joint[rows[f"{kernel}/kernel"].rows, number * rank : (number + 1) * rank] = b[number]
            b = [joint]
        # safetensors writes an array's memory without regard to its order, so make the array contiguous.
        tensors[f"base_model.model.{module}.lora_A.weight"] = np.ascontiguousarray(np.concatenate(a))
        tensors[f"base_model.model.{module}.lora_B.weight"] = np.ascontiguousarray(b[0])
    other_ranks = {module: joint for module, joint in ranks.items() if joint != rank}
    write_tensors(folder / "adapter_model.safetensors", tensors)
    lora = config.lora
    assert lora is not None
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub_name or str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        # The last part of a name may also be that of a vision tower's module.
        "target_modules": [module for module, _ in parts] if is_multimodal else list(ranks),
        "rank_pattern": other_ranks,
        "alpha_pattern": {module: lora.alpha * joint / rank for module, joint in other_ranks.items()},
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / "adapter_config.json", settings)


def _write_weights(folder: Path, config: DecoderConfig, params: dict, dtype: str, max_shard_bytes: int) -> None:
    leaves = flatten(jax.device_get(params))
    table = tensor_names(config)
    fused = fused_rows(config)
    tensors = {}
    places = {}
    if leaves.keys() != table.keys():
        raise ValueError(f"the parameters {sorted(leaves.keys() ^ table.keys())} are not those of the config")
    # Views of the parameters in Hugging Face layout; a fused tensor has several, with their places among its rows.
    for path, names in table.items():
        views: Any = leaves[path] if path.startswith("layers/") else [leaves[path]]
        if len(names) > len(views):  # a tensor for each expert of each layer
            views = views.reshape(len(names), *views.shape[2:])
        for name, view in zip(names, views, strict=True):
            tensors.setdefault(name, []).append(view.T if path.endswith("/kernel") else view)
            if path in fused:
                places.setdefault(name, []).append(fused[path].rows)
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda views: sum(view.size for view in views) * jnp.dtype(dtype).itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    with progress_bar("export", len(tensors), unit="tensor") as bar:
        for file, names in split.filename_to_tensors.items():
            shard = {}
            for name in names:
                with np.errstate(over="ignore"):
                    arrays = [view.astype(jnp.dtype(dtype), order="C") for view in tensors[name]]
                shard[name] = arrays[0]
                if name in places:
                    shard[name] = np.empty((sum(map(len, arrays)), arrays[0].shape[1]), arrays[0].dtype)
                    for rows, array in zip(places[name], arrays, strict=True):
                        shard[name][rows] = array
                if not np.isfinite(shard[name]).all():
                    raise UserError(
                        f"tensor {name!r}", f"has values that {dtype} cannot hold", "export as bfloat16 or float32"
                    )
                bar.update()
            write_tensors(folder / file, shard)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)


def write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file with the permissions of the user's umask; the library would make it private."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)


def write_json(file: Path, content: dict) -> None:
    """Writes an indented JSON file."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
