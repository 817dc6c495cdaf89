"""Reads Hugging Face model folders into a decoder config and a parameter tree."""

import contextlib
import dataclasses
import functools
import json
import logging
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from jax.typing import ArrayLike
from jaxtyping import Array
from safetensors import SafetensorError, safe_open

from recjax.files import MANIFEST, check_manifest
from recjax.hub.families import CONTAINERS, check_fields, decoder_config, text_fields, text_name
from recjax.hub.tokenizers import TOKENIZER_FILES, check_no_code, model_folder
from recjax.models.decoder import abstract_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.placement import Axes, constrain, param_axes, put_array
from recjax.models.trainable import flatten, unflatten

logger = logging.getLogger(__name__)

_warn_once = functools.cache(logger.warning)
MOST_LAYERS = 1000
_COMPARED_ROWS = 4096  # rows of embedding and head to compare at a time

# Decoder module → Hugging Face module. Each decoder has only some. Hugging Face stores kernels transposed: [out, in].
MODULES = {
    "embedding": "model.embed_tokens",
    "layers/attention_norm": "model.layers.{layer}.input_layernorm",
    "layers/query": "model.layers.{layer}.self_attn.q_proj",
    "layers/query_norm": "model.layers.{layer}.self_attn.q_norm",
    "layers/key": "model.layers.{layer}.self_attn.k_proj",
    "layers/key_norm": "model.layers.{layer}.self_attn.k_norm",
    "layers/value": "model.layers.{layer}.self_attn.v_proj",
    "layers/output": "model.layers.{layer}.self_attn.o_proj",
    "layers/mlp_norm": "model.layers.{layer}.post_attention_layernorm",
    "layers/gate": "model.layers.{layer}.mlp.gate_proj",
    "layers/up": "model.layers.{layer}.mlp.up_proj",
    "layers/down": "model.layers.{layer}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
_EMBEDDING, _HEAD = (f"{MODULES[name]}.weight" for name in ("embedding", "head"))
# Projections of an expert in checkpoints, by the name of the layer's MLP there.
EXPERT_MODULES = {
    "mlp": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    "block_sparse_moe": {"gate": "w1", "up": "w3", "down": "w2"},
}
# Decoder modules that a checkpoint stores one below the other in a single tensor, if it fuses projections.
FUSED_MODULES = {
    "model.layers.{layer}.self_attn.qkv_proj": ("layers/query", "layers/key", "layers/value"),
    "model.layers.{layer}.mlp.gate_up_proj": ("layers/gate", "layers/up"),
}
# `post_attention_layernorm` is the norm after attention here; in models without post norms, the norm before the MLP.
POST_NORM_MODULES = {
    "layers/attention_post_norm": "model.layers.{layer}.post_attention_layernorm",
    "layers/mlp_norm": "model.layers.{layer}.pre_feedforward_layernorm",
    "layers/mlp_post_norm": "model.layers.{layer}.post_feedforward_layernorm",
}


def load_pretrained(path: str | Path) -> tuple[DecoderConfig, dict]:
    """Loads a pretrained decoder from a Hugging Face style folder or hub name.

    Args:
        path: folder with config.json and model.safetensors (or model.safetensors.index.json and its shards) in
            float32, float16 or bfloat16; or hub name.
    Returns:
        The config, and the parameter tree in float32, sharded on the current mesh.
    Raises:
        ValueError: the decoder cannot compute the model exactly, or a file is missing, damaged or inconsistent with
            the config.
    """
    folder = model_folder(path, (*TOKENIZER_FILES, "model*.safetensors"))
    if (folder / MANIFEST).is_file():  # recjax wrote the folder
        try:
            check_manifest(folder)
        except ValueError as error:
            raise ValueError(
                f"{error}; write the folder again, or, if you changed it on purpose, delete {folder / MANIFEST}"
            ) from error
    if adapters := sorted(file.name for file in folder.glob("adapter_model.*")):
        logger.warning("%s: recjax ignores %s; merge the adapter into the weights to use it", folder, adapters[0])
    config = read_config(folder)
    return config, read_params(folder, config)


def load_classifier(path: str | Path) -> tuple[DecoderConfig, dict]:
    """Loads a sequence classifier with one label, as `load_pretrained`; the tree has `score` instead of `head`.

    Raises:
        ValueError: see `classifier_config` and `load_pretrained`.
    """
    folder = model_folder(path, (*TOKENIZER_FILES, "model*.safetensors"))
    config, _ = classifier_config(folder)
    return config, read_params(folder, config, scores=True)


def classifier_config(path: str | Path) -> tuple[DecoderConfig, int | None]:
    """The decoder config of a sequence classifier with one label, and its padding token; reads no weights.

    Raises:
        ValueError: the model is no such classifier, or see `read_config`.
    """
    folder = model_folder(path)
    config, fields = read_config(folder), transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kinds = fields.architectures or ["none"]
    if not kinds[0].endswith("ForSequenceClassification") or fields.num_labels != 1:
        raise ValueError(
            f"{folder / 'config.json'}: architectures = {kinds} with {fields.num_labels} labels (id2label): a reward"
            " model has one label, and an architecture such as LlamaForSequenceClassification"
        )
    if (tensors := _tensors_of(folder, _written_config(folder))) and "score.weight" not in tensors:
        raise ValueError(f"{folder} holds no tensor score.weight, which a reward model has; fetch the files again")
    return dataclasses.replace(config, tie_embeddings=True), fields.pad_token_id  # it has no head


def pretrained_config(path: str | Path) -> DecoderConfig:
    """The decoder config of a folder or hub name; reads weights only to compare head and embedding (`read_config`).

    Raises:
        ValueError: see `model_folder` and `read_config`.
    """
    config = read_config(model_folder(path))
    if not config.tie_embeddings:
        return config
    # The hub's weights may not be downloaded yet, and they may contain a separate head.
    return read_config(model_folder(path, (*TOKENIZER_FILES, "model*.safetensors")))


def read_config(folder: Path) -> DecoderConfig:
    """The decoder config that a folder's config.json describes.

    If config.json ties the head to the embedding but the weights hold a different head, the config unties them, as in
    transformers.

    Raises:
        ValueError: config.json is missing or unreadable, or the decoder does not support its computation.
    """
    file, written = folder / "config.json", _written_config(folder)
    check_no_code(folder)
    try:
        text = text_fields(written)
        check_fields(text)
        tensors = _tensors_of(folder, written)
        _check_layers(folder, text, tensors)
        try:
            if text is written:
                fields = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
            else:
                fields = transformers.AutoConfig.for_model(**text).to_dict()
        except Exception as error:
            # transformers raises many exception types: missing fields, wrong types, failed validation.
            raise ValueError(f"this is no model config ({error}); correct it or fetch the file again") from error
        config = decoder_config(fields)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if config.tie_embeddings and _has_own_head(tensors):
        _warn_once(
            "%s: config.json sets tie_word_embeddings, but lm_head.weight differs from the embedding; recjax uses both."
            " Set tie_word_embeddings to false",
            folder,
        )
        return dataclasses.replace(config, tie_embeddings=False)
    return config


def _written_config(folder: Path) -> dict:
    """The content of a folder's config.json.

    Raises:
        ValueError: the file is missing or no JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} holds no config.json; give a Hugging Face style model folder")
    try:
        return dict(json.loads(file.read_text(encoding="utf-8-sig")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is no model config ({error}); correct it or fetch the file again") from error


class _Tensor(NamedTuple):
    """A tensor's safetensors file, and its name in that file."""

    file: Path
    name: str


def _tensors_of(folder: Path, written: dict) -> dict[str, _Tensor]:
    """The tensors of a folder by their names in the family; of a multimodal model, those of the text half.

    Args:
        written: content of config.json.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    files = {}
    if single.is_file():
        with _opened(single) as opened:
            files = dict.fromkeys(opened.keys(), single)
    elif index.is_file():
        files = {name: folder / file for name, file in _weight_map(index).items()}
    if written.get("model_type") not in CONTAINERS:
        return {name: _Tensor(file, name) for name, file in files.items()}
    tensors = {text_name(name): _Tensor(file, name) for name, file in files.items()}
    if skipped := sorted(name for name in files if text_name(name) is None):
        _warn_once(
            "%s: recjax reads the text half of this %s model and skips %d other tensors, such as %s; exports have only"
            " the text half",
            folder,
            written["model_type"],
            len(skipped),
            skipped[0],
        )
    return {name: tensor for name, tensor in tensors.items() if name is not None}


def _has_own_head(tensors: dict[str, _Tensor]) -> bool:
    """True if the weights hold both embedding and head, with different values; False if either is missing."""
    both = [tensors[name] for name in (_EMBEDDING, _HEAD) if name in tensors and tensors[name].file.is_file()]
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_opened(tensor.file)) for tensor in both]
        if len(both) < 2 or not all(one.name in file.keys() for one, file in zip(both, opened, strict=True)):
            return False
        embedding, head = (file.get_slice(one.name) for one, file in zip(both, opened, strict=True))
        if (shape := tuple(embedding.get_shape())) != tuple(head.get_shape()):
            return True
        for start in range(0, shape[0], _COMPARED_ROWS):
            rows = slice(start, min(start + _COMPARED_ROWS, shape[0]))
            if not np.array_equal(embedding[rows].astype(np.float32), head[rows].astype(np.float32)):
                return True
        return False


def _check_layers(folder: Path, written: dict, tensors: dict[str, _Tensor]) -> None:
    """Refuses a number of layers that differs from the weights, before recjax allocates anything by it."""
    layers = written.get("num_hidden_layers")
    if type(layers) is not int:
        return
    if not 0 < layers <= MOST_LAYERS:
        raise ValueError(f"num_hidden_layers = {layers}: takes 1 to {MOST_LAYERS}; correct config.json")
    found = [int(match[1]) for name in tensors if (match := re.match(r"model\.layers\.(\d{1,9})\.", name))]
    if found and max(found) + 1 != layers:
        raise ValueError(
            f"num_hidden_layers = {layers}, but the weights in {folder} have {max(found) + 1} layers; use the"
            " config.json that belongs to them"
        )


def _opened(file: Path):
    folder = file.parent.resolve()
    root = folder.parent.parent if folder.parent.name == "snapshots" else folder  # links within the hub's cache
    if not file.resolve().is_relative_to(root):
        raise ValueError(
            f"{file} is a link to {file.resolve()}, outside of its folder; put the file itself there, or name the"
            " folder that has it"
        )
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or damaged ({error}); fetch the file again") from error


def tensor_names(config: DecoderConfig) -> dict[str, list[str]]:
    """Maps parameter paths to Hugging Face names: one per layer, in order, for stacked parameters, otherwise one.

    Kernels of experts have a name for each expert of the first layer, then for each of the second, and so on.
    """
    modules, experts = MODULES | (POST_NORM_MODULES if config.post_norms else {}), range(1)
    if config.experts:
        mlp, experts = f"model.layers.{{layer}}.{config.experts.module}", range(config.experts.count)
        modules |= {"layers/experts/router": f"{mlp}.gate"}
        for part, name in EXPERT_MODULES[config.experts.module].items():
            modules[f"layers/experts/{part}"] = f"{mlp}.experts.{{expert}}.{name}"
    for module, parts in FUSED_MODULES.items() if config.fused_projections else ():
        modules |= dict.fromkeys(parts, module)
    names = {}
    for path in flatten(abstract_params(config)):
        module, _, kind = path.rpartition("/")
        name = f"{modules[module]}.{'bias' if kind == 'bias' else 'weight'}"
        layers = range(config.num_layers if path.startswith("layers/") else 1)
        each = experts if "{expert}" in name else range(1)
        names[path] = [name.format(layer=layer, expert=expert) for layer in layers for expert in each]
    return names


def fused_rows(config: DecoderConfig) -> dict[str, tuple[int, int, int]]:
    """For kernels that share a tensor with others: first row, end and number of rows of the tensor, by path."""
    rows, queries, keys = {}, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"layers/query": queries, "layers/key": keys, "layers/value": keys}
    for parts in FUSED_MODULES.values() if config.fused_projections else ():
        ends = np.cumsum([sizes.get(part, config.intermediate_size) for part in parts]).tolist()
        for part, start, end in zip(parts, [0, *ends], ends, strict=False):
            rows[f"{part}/kernel"] = start, end, ends[-1]
    return rows


def read_params(folder: Path, config: DecoderConfig, scores: bool = False) -> dict:
    """Reads the parameter tree from a folder's safetensors files, in float32, sharded on the current mesh.

    Tensors move to the devices one at a time, so the host never holds the whole model.

    Args:
        scores: True for a classifier: adds `score/kernel`, [hidden, 1].
    Raises:
        ValueError: tensors are missing, unexpected, or have a wrong shape or dtype; or a file is missing or damaged.
    """
    names, fused, leaves = tensor_names(config), fused_rows(config), flatten(abstract_params(config))
    if scores:
        names["score/kernel"] = ["score.weight"]
        leaves["score/kernel"] = jax.ShapeDtypeStruct((config.hidden_size, 1), jnp.float32)
    with contextlib.ExitStack() as stack:
        written, found = _written_config(folder), {}
        is_container = written.get("model_type") in CONTAINERS
        for file in _safetensors_files(folder, _tensors_of(folder, written)):
            opened = stack.enter_context(_opened(file))
            for name in opened.keys():
                found[text_name(name) if is_container else name] = (file, opened, name)
        found.pop(None, None)
        _check_names(folder, {name for group in names.values() for name in group}, found)

        def read(path, leaf):
            layered, transposed = path.startswith("layers/"), path.endswith("/kernel")
            axes = param_axes(path, leaf.shape)
            shape = leaf.shape[1:] if layered else leaf.shape
            shape, of_experts = shape[-2:], shape[:-2]

            def tensor(name):
                values = _read(*found[name], shape[::-1] if transposed else shape, fused.get(path))
                return values.T if transposed else values

            if not layered:
                return put_array(tensor(names[path][0]), *axes).astype(jnp.float32)
            stacked = _zeros(leaf.shape, axes)
            each = len(names[path]) // len(leaf)
            for layer in range(len(leaf)):
                tensors = [tensor(name) for name in names[path][layer * each : (layer + 1) * each]]
                whole = np.stack(tensors) if of_experts else tensors[0]
                stacked = _with_layer(stacked, layer, put_array(whole, *axes[1:]), axes)
            return stacked

        return unflatten({path: read(path, leaf) for path, leaf in leaves.items()})


@functools.partial(jax.jit, static_argnums=(0, 1))
def _zeros(shape: tuple[int, ...], axes: tuple[Axes, ...]) -> Array:
    return constrain(jnp.zeros(shape), *axes)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _with_layer(stacked: Array, layer: ArrayLike, tensor: ArrayLike, axes: tuple[Axes, ...]) -> Array:
    return constrain(jax.lax.dynamic_update_index_in_dim(stacked, tensor.astype(stacked.dtype), layer, 0), *axes)


def _safetensors_files(folder: Path, tensors: dict[str, _Tensor]) -> list[Path]:
    files = sorted({tensor.file for tensor in tensors.values()})
    if not files:
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        reason = f"only pickle files {pickles}, which can run code when opened" if pickles else "no weights"
        raise ValueError(
            f"{folder} holds {reason}; give a folder with model.safetensors, or with model.safetensors.index.json and "
            "its shards (transformers' save_pretrained writes them)"
        )
    for file in files:
        if not file.is_file():
            raise ValueError(
                f"{folder} has an index that names the shard {file.name}, which is missing; fetch the file"
            )
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """Maps tensor names to file names, which must not contain a path."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = set(names.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is no safetensors index ({error!r}); fetch the file again") from error
    for name in shards:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise ValueError(
                f"{index}: weight_map names {name!r:.200}; a shard is a .safetensors file of the same folder,"
                " without a path. Fetch the file again, from whom you trust"
            )
    return names


def _check_names(folder: Path, expected: set[str], found: dict) -> None:
    missing = sorted(expected - found.keys())
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} tensors that config.json calls for are in none of the safetensors files, first "
            f"{missing[0]!r}; check num_hidden_layers and tie_word_embeddings, or fetch the files again"
        )
    extra = {name for name in found.keys() - expected if not name.endswith("rotary_emb.inv_freq")} - {_HEAD}
    if extra:
        first = min(extra)
        raise ValueError(
            f"{found[first][0]}: {len(extra)} tensors that config.json does not call for, first {first!r}; the "
            "weights belong to another config or architecture, or hold more than a language model"
        )


def _read(file: Path, opened, name: str, shape: tuple[int, ...], rows: tuple[int, int, int] | None) -> np.ndarray:
    header = opened.get_slice(name)
    shape = shape if rows is None else (rows[2], *shape[1:])
    if tuple(header.get_shape()) != shape:
        raise ValueError(
            f"{file}: tensor {name!r} has shape {tuple(header.get_shape())}, but config.json asks for {shape}; "
            "use the config.json that belongs to these weights"
        )
    if header.get_dtype() not in ("F32", "F16", "BF16"):
        raise ValueError(
            f"{file}: tensor {name!r} has dtype {header.get_dtype()}; save it as float32, float16 or bfloat16"
        )
    values = opened.get_tensor(name) if rows is None else header[rows[0] : rows[1]]
    # The exponent bits, because bfloat16 is slow to convert.
    exponent = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}[values.dtype.name]
    bits = values.view(np.uint32 if values.dtype.itemsize == 4 else np.uint16)
    if values.size and int((bits & bits.dtype.type(exponent)).max()) >= exponent:
        raise ValueError(f"{file}: tensor {name!r} has NaN or infinite values; fetch the file again")
    return values
