"""Parameters back as a Hugging Face folder, with the files that the model's own folder has beside its weights."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from recjax.console import progress_bar
from recjax.hub.tokenizers import TOKENIZER_FILES
from recjax.hub.weights import read_config, tensor_names
from recjax.models.decoder import DecoderConfig
from recjax.models.trainable import flatten

DTYPES = ("float32", "bfloat16", "float16")
MAX_SHARD_BYTES = 5 * 10**9

# What goes along with the weights; a licence asks to be passed on.
COMPANION_FILES = (*TOKENIZER_FILES, "additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*")


def check_output(output: str | Path) -> None:
    """Refuses an output folder that holds something.

    Raises:
        ValueError: it does, or it is a file.
    """
    output = Path(output)
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ValueError(f"--output {str(output)!r} is not empty; name a new folder, or remove what is there")


def export_model(
    output: str | Path,
    config: DecoderConfig,
    params: dict,
    base: Path,
    dtype: str = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes the folder that `load_pretrained` and transformers read; it appears whole or not at all.

    Args:
        output: a folder that does not exist or is empty.
        config: without adapters.
        params: all parameters, float32; on the host at most one shard of them is copied at a time.
        base: folder whose config.json is kept but for its dtype, and whose tokenizer, chat template and generation
            config are copied as they are.
        dtype: of every tensor; float32 keeps what was trained, the others round.
        max_shard_bytes: the weights are one file up to here, else shards with an index.
    Raises:
        ValueError: the folder is not empty, an unknown dtype, or values that the dtype cannot hold.
    """
    output = Path(output)
    check_output(output)
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; use {', '.join(DTYPES)}")
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    partial = output.absolute().with_name(f".{output.absolute().name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        _copy_companions(base, partial)
        fields = json.loads((base / "config.json").read_text(encoding="utf-8"))
        # transformers 4 wrote torch_dtype; 5 writes dtype and reads both.
        for name in {"dtype", "torch_dtype"} & fields.keys() or {"dtype"}:
            fields[name] = dtype
        _write_json(partial / "config.json", fields)
        _write_weights(partial, config, params, dtype, max_shard_bytes)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_base(
    folder: Path, config: DecoderConfig, tokenizer: PreTrainedTokenizerBase, stop_ids: tuple[int, ...]
) -> None:
    """What stands beside the weights, for a decoder that was made from scratch: Llama's config, tokenizer, generation.

    Raises:
        ValueError: the decoder does something that Llama's config.json cannot say.
    """
    special = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": 2048,  # bounds nothing here, but is asked for by programs that serve models
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,  # read by transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # read by transformers 5
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": config.activation,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "eos_token_id": tokenizer.eos_token_id,
    }
    _write_json(folder / "config.json", fields | special)
    _write_json(folder / "generation_config.json", {"eos_token_id": list(stop_ids)} | special)
    tokenizer.save_pretrained(folder)
    if read_config(folder) != config:
        raise ValueError(f"{config} is no plain Llama decoder, so Llama's config.json does not describe it")


def _copy_companions(base: Path, folder: Path) -> None:
    for pattern in COMPANION_FILES:
        for file in base.glob(pattern):
            if file.is_file() and file.name != "config.json" and not file.name.endswith(".index.json"):
                copy = folder / file.relative_to(base)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)


def _write_weights(folder: Path, config: DecoderConfig, params: dict, dtype: str, max_shard_bytes: int) -> None:
    tensors = _named_views(config, params)
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.size * jnp.dtype(dtype).itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    with progress_bar("export", len(tensors), unit="tensor") as bar:
        for file, names in split.filename_to_tensors.items():
            shard = {}
            for name in names:
                shard[name] = _converted(name, tensors[name], dtype)
                bar.update()
            save_file(shard, folder / file, metadata={"format": "pt"})
            # safetensors makes its files private; the folder's other files follow the user's umask.
            (folder / file).chmod((folder / "config.json").stat().st_mode)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(folder / "model.safetensors.index.json", index)


def _named_views(config: DecoderConfig, params: dict) -> dict[str, np.ndarray]:
    """Hugging Face name → the tensor as stored there, as a view of its parameter."""
    views = {}
    leaves, table = flatten(jax.device_get(params)), tensor_names(config)
    if leaves.keys() != table.keys():
        raise ValueError(f"the parameters {sorted(leaves.keys() ^ table.keys())} are not those of the config")
    for path, names in table.items():
        leaf = np.asarray(leaves[path])
        parts = leaf if path.startswith("layers/") else [leaf]
        for name, part in zip(names, parts, strict=True):
            views[name] = part.T if path.endswith("/kernel") else part
    return views


def _converted(name: str, tensor: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        converted = tensor.astype(jnp.dtype(dtype), order="C")
    if not np.isfinite(converted).all():
        raise ValueError(f"tensor {name!r} has values that {dtype} cannot hold; export as bfloat16 or float32")
    return converted


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
