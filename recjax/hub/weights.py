"""Reads Hugging Face model folders into a decoder config and a parameter tree."""

import contextlib
import dataclasses
import functools
import json
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from jax.typing import ArrayLike
from jaxtyping import Array
from safetensors import SafetensorError, safe_open

from recjax.config import LoraConfig
from recjax.errors import UserError
from recjax.hub.families import CONTAINERS, FURTHER_TOKENS, check_fields, decoder_config, text_fields, text_name
from recjax.hub.tokenizers import TOKENIZER_FILES, check_configs, checked_links, model_folder
from recjax.models.decoder import abstract_params
from recjax.models.decoder_config import DELTA_PROJECTIONS, PROJECTIONS, DecoderConfig
from recjax.models.placement import Axes, constrain, param_axes, put_array
from recjax.models.trainable import adapted, flatten, is_adapter, unflatten
from recjax.runtime.files import MANIFEST, check_manifest

logger = logging.getLogger(__name__)

_warn_once = functools.cache(logger.warning)
MOST_LAYERS = 1000
MODEL_FILES = (*TOKENIZER_FILES, "model*.safetensors")
_COMPARED_ROWS = 4096  # recjax compares so many rows of embedding and head at a time
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_PREFIX = "base_model.model."  # tensor names in PEFT's files start with it
_TARGETS = PROJECTIONS + DELTA_PROJECTIONS
# Fields of adapter_config.json that may have any value. Every other field must be off, because it changes the adapter's
# computation.
_ADAPTER_FIELDS = {
    # recjax reads these fields.
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "base_model_name_or_path",
    "revision",
    # The names of the tensors tell the same.
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    # These fields change no output.
    "task_type",
    "auto_mapping",
    "inference_mode",
    "lora_dropout",
    "peft_version",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
    "ensure_weight_tying",
}
# Field of adapter_config.json → supported values, with the value of a missing field first.
_ADAPTER_FIXED: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # other values change the base
}

# Decoder module or parameter → Hugging Face's. Each decoder has only some. Hugging Face stores kernels as [out, in].
MODULES = {
    "embedding": "model.embed_tokens",
    "layers/attention_norm": "model.layers.{layer}.input_layernorm",
    "layers/query": "model.layers.{layer}.self_attn.q_proj",
    "layers/query_norm": "model.layers.{layer}.self_attn.q_norm",
    "layers/key": "model.layers.{layer}.self_attn.k_proj",
    "layers/key_norm": "model.layers.{layer}.self_attn.k_norm",
    "layers/value": "model.layers.{layer}.self_attn.v_proj",
    "layers/output": "model.layers.{layer}.self_attn.o_proj",
    "layers/delta_inputs": "model.layers.{layer}.linear_attn.in_proj_qkv",
    "layers/delta_gate": "model.layers.{layer}.linear_attn.in_proj_z",
    "layers/delta_rate": "model.layers.{layer}.linear_attn.in_proj_b",
    "layers/delta_decay": "model.layers.{layer}.linear_attn.in_proj_a",
    "layers/delta_kernel": "model.layers.{layer}.linear_attn.conv1d.weight",
    "layers/delta_log_speed": "model.layers.{layer}.linear_attn.A_log",
    "layers/delta_bias": "model.layers.{layer}.linear_attn.dt_bias",
    "layers/delta_norm": "model.layers.{layer}.linear_attn.norm",
    "layers/delta_output": "model.layers.{layer}.linear_attn.out_proj",
    "layers/mlp_norm": "model.layers.{layer}.post_attention_layernorm",
    "layers/gate": "model.layers.{layer}.mlp.gate_proj",
    "layers/up": "model.layers.{layer}.mlp.up_proj",
    "layers/down": "model.layers.{layer}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
_EMBEDDING = f"{MODULES['embedding']}.weight"
_HEAD = f"{MODULES['head']}.weight"
# An expert's projections in checkpoints, by the name of the layer's MLP there.
EXPERT_MODULES = {
    "mlp": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    "block_sparse_moe": {"gate": "w1", "up": "w3", "down": "w2"},
}
# transformers stacks the projections of all experts of a layer in these parameters. PEFT nests their adapters in this
# order, outermost first.
_JOINT_EXPERTS = {"down_proj": ("down",), "gate_up_proj": ("gate", "up")}
# Decoder modules that a checkpoint stacks in a single tensor, if it fuses projections.
FUSED_MODULES = {
    "model.layers.{layer}.self_attn.qkv_proj": ("layers/query", "layers/key", "layers/value"),
    "model.layers.{layer}.mlp.gate_up_proj": ("layers/gate", "layers/up"),
}
FUSED_DELTA_MODULES = {
    "model.layers.{layer}.linear_attn.in_proj_qkvz": ("layers/delta_inputs", "layers/delta_gate"),
    "model.layers.{layer}.linear_attn.in_proj_ba": ("layers/delta_rate", "layers/delta_decay"),
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
        UserError: the decoder cannot compute the model exactly, or a file is missing, damaged or inconsistent with
            the config.
    """
    folder = model_folder(path, MODEL_FILES)
    if (folder / MANIFEST).is_file():  # recjax wrote the folder
        try:
            check_manifest(folder)
        except UserError as error:
            raise UserError(
                error.where,
                error.problem,
                f"write the folder again, or, if you changed it on purpose, delete {folder / MANIFEST}",
            ) from error
    config = read_config(folder)
    return config, read_params(folder, config)


def classifier_config(path: str | Path) -> tuple[DecoderConfig, int | None]:
    """The decoder config of a sequence classifier with one label, and its padding token; reads no weights.

    Raises:
        UserError: the model is no such classifier, or see `read_config`.
    """
    folder = model_folder(path)
    config = read_config(folder)
    fields = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kinds = fields.architectures or ["none"]
    if not kinds[0].endswith("ForSequenceClassification") or fields.num_labels != 1:
        raise UserError(
            folder / "config.json",
            f"architectures = {kinds} with {fields.num_labels} labels (id2label): a reward model has one label,"
            " and an architecture such as LlamaForSequenceClassification",
        )
    tensors = _stored_tensors(folder, _written_config(folder))
    if tensors and "score.weight" not in tensors:
        raise UserError(folder, "holds no tensor score.weight, which a reward model has", "fetch the files again")
    # A classifier has no head; tied embeddings need none.
    return dataclasses.replace(config, tie_embeddings=True), fields.pad_token_id


def pretrained_config(path: str | Path) -> DecoderConfig:
    """The decoder config of a folder or hub name; reads weights only to compare head and embedding (`read_config`).

    Raises:
        UserError: see `model_folder` and `read_config`.
    """
    config = read_config(model_folder(path))
    if not config.tie_embeddings:
        return config
    # The hub's weights may not be downloaded yet, and they may contain a separate head.
    return read_config(model_folder(path, MODEL_FILES))


def warn_beyond_context(model: str, tokens: int, keys: str) -> None:
    """Warns if a prompt with its completion may be longer than the model was trained for.

    Args:
        model: folder or hub name; "" for a decoder made from scratch, which has no such length.
        tokens: largest number of tokens of a prompt with its completion.
        keys: keys that set this number.
    """
    if not model:
        return
    context = text_fields(_written_config(model_folder(model))).get("max_position_embeddings")
    if isinstance(context, int) and tokens > context:
        logger.warning(
            "%s was trained with max_position_embeddings = %d tokens, and a prompt with its completion may have %d; the"
            " model may fail beyond its length: lower %s, or use a model with a longer context",
            model,
            context,
            tokens,
            keys,
        )


def read_config(folder: Path) -> DecoderConfig:
    """The decoder config that a folder's config.json describes.

    If config.json ties the head to the embedding but the weights hold a different head, the config unties them, as in
    transformers.

    Raises:
        UserError: config.json is missing or unreadable, or the decoder does not support its computation.
    """
    written = _written_config(folder)
    if (folder / _ADAPTER_CONFIG).is_file():
        raise UserError(
            folder,
            f"holds {_ADAPTER_CONFIG} next to a model, and transformers would add that adapter to the model's weights",
            "move the adapter's files to another folder and name it in model.adapter, or delete them if the"
            " weights contain the adapter already",
        )
    check_configs(folder)
    try:
        text = text_fields(written)
        check_fields(text)
        tensors = _stored_tensors(folder, written)
        _check_layers(folder, text, tensors)
        try:
            if text is written:
                fields = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
            else:
                fields = transformers.AutoConfig.for_model(**text).to_dict()
        except Exception as error:
            # transformers raises many exception types: missing fields, wrong types, failed validation.
            raise UserError(
                problem=f"this is no model config ({error})", remedy="correct it or fetch the file again"
            ) from error
        config = decoder_config(fields)
    except UserError as error:
        raise error.within(folder / "config.json") from error
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
        UserError: the file is missing or no JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(folder, "holds no config.json", "give a Hugging Face style model folder")
    try:
        return dict(json.loads(file.read_text(encoding="utf-8-sig")))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(file, f"is no model config ({error})", "correct it or fetch the file again") from error


class _StoredTensor(NamedTuple):
    """A tensor's safetensors file, and its name in that file."""

    file: Path
    name: str


def _stored_tensors(folder: Path, written: dict) -> dict[str, _StoredTensor]:
    """The folder's tensors by their names in the family; for a multimodal model, only the text half's tensors.

    Args:
        written: content of config.json.
    """
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    files = {}
    if single.is_file():
        with _opened(single) as opened:
            files = dict.fromkeys(opened.keys(), single)
    elif index.is_file():
        for name, file in _weight_map(index).items():
            files[name] = folder / file
    names = _names_in_family(files, written)
    skipped = sorted(files.keys() - names.values())
    if skipped:
        part = "the predictor of the next token"
        if written["model_type"] in CONTAINERS:
            part = "the text half"
        _warn_once(
            "%s: recjax reads %s of this %s model and skips %d other tensors, such as %s; exports have only that part",
            folder,
            part,
            written["model_type"],
            len(skipped),
            skipped[0],
        )
    return {name: _StoredTensor(files[stored_name], stored_name) for name, stored_name in names.items()}


def _names_in_family(stored: Iterable[str], written: dict) -> dict[str, str]:
    """Maps tensor names in the family to their names in the files.

    The result has no tensors of a multimodal model's other half, nor of a module that predicts further tokens. A model
    without its head, as transformers' AutoModel saves it, has names without `model.`.
    """
    names = {}
    if written.get("model_type") in CONTAINERS:
        for stored_name in stored:
            name = text_name(stored_name)
            if name is not None:
                names[name] = stored_name
        return names
    has_prefix = any(name.startswith("model.") for name in stored)
    for stored_name in stored:
        if stored_name.startswith(FURTHER_TOKENS):
            continue
        if not has_prefix and stored_name.startswith(("embed_tokens.", "layers.", "norm.")):
            names[f"model.{stored_name}"] = stored_name
        else:
            names[stored_name] = stored_name
    return names


def _has_own_head(tensors: dict[str, _StoredTensor]) -> bool:
    """True if the weights hold both embedding and head, with different values; False if either is missing."""
    with contextlib.ExitStack() as stack:
        found = []
        for name in (_EMBEDDING, _HEAD):
            tensor = tensors.get(name)
            if tensor is None or not tensor.file.is_file():
                continue
            file = stack.enter_context(_opened(tensor.file))
            if tensor.name in file.keys():  # an index may name the wrong file
                found.append(file.get_slice(tensor.name))
        if len(found) < 2:
            return False
        embedding, head = found
        shape = tuple(embedding.get_shape())
        if shape != tuple(head.get_shape()):
            return True
        for start in range(0, shape[0], _COMPARED_ROWS):
            rows = slice(start, min(start + _COMPARED_ROWS, shape[0]))
            if not np.array_equal(embedding[rows].astype(np.float32), head[rows].astype(np.float32)):
                return True
        return False


def _check_layers(folder: Path, written: dict, tensors: dict[str, _StoredTensor]) -> None:
    """Refuses a number of layers that differs from the weights, before recjax allocates anything by it."""
    layers = written.get("num_hidden_layers")
    if type(layers) is not int:
        return
    if not 0 < layers <= MOST_LAYERS:
        raise UserError("num_hidden_layers", f"takes 1 to {MOST_LAYERS}", "correct config.json", value=layers)
    stored_layers = 0
    for name in tensors:
        match = re.match(r"model\.layers\.(\d{1,9})\.", name)
        if match:
            stored_layers = max(stored_layers, int(match[1]) + 1)
    if stored_layers and stored_layers != layers:
        raise UserError(
            problem=f"num_hidden_layers = {layers}, but the weights in {folder} have {stored_layers} layers",
            remedy="use the config.json that belongs to them",
        )


def _opened(file: Path):
    checked_links(file.parent)
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise UserError(file, f"is truncated or damaged ({error})", "fetch the file again") from error


def tensor_names(config: DecoderConfig) -> dict[str, list[str]]:
    """Maps parameter paths to Hugging Face names: one per layer, in order, for stacked parameters, otherwise one.

    With layers of several kinds, the path `layers/2/…` has the parameters of each period's layer 2. Kernels of experts
    have a name for each expert of the first layer, then for each of the second, and so on.
    """
    modules = _module_names(config)
    experts = range(config.experts.count) if config.experts else range(1)
    names = {}
    for path in flatten(abstract_params(config)):
        usual_path = _usual_path(path)
        if usual_path in modules:
            pattern = modules[usual_path]
        else:
            module, _, kind = usual_path.rpartition("/")
            suffix = "bias" if kind == "bias" else "weight"
            pattern = f"{modules[module]}.{suffix}"
        layers = range(1)
        if path.startswith("layers/"):
            in_period = re.match(r"layers/(\d+)/", path)
            first = int(in_period[1]) if in_period else 0
            layers = range(first, config.num_layers, config.period)
        names[path] = []
        for layer in layers:
            if "{expert}" in pattern:
                names[path] += [pattern.format(layer=layer, expert=expert) for expert in experts]
            else:
                names[path].append(pattern.format(layer=layer))
    return names


def _module_names(config: DecoderConfig) -> dict[str, str]:
    """Maps the decoder's modules to Hugging Face's, with {layer} and {expert} in place of their numbers."""
    modules = dict(MODULES)
    if config.post_norms:
        modules |= POST_NORM_MODULES
    if config.experts:
        mlp = f"model.layers.{{layer}}.{config.experts.module}"
        modules["layers/experts/router"] = f"{mlp}.gate"
        modules["layers/shared_router"] = f"{mlp}.shared_expert_gate"
        for projection in ("gate", "up", "down"):
            modules[f"layers/shared_{projection}"] = f"{mlp}.shared_expert.{projection}_proj"
        for projection, name in EXPERT_MODULES[config.experts.module].items():
            modules[f"layers/experts/{projection}"] = f"{mlp}.experts.{{expert}}.{name}"
    fused_modules = {}
    if config.fused_projections:
        fused_modules |= FUSED_MODULES
    if _fuses_delta(config):
        fused_modules |= FUSED_DELTA_MODULES
    for fused_module, parts in fused_modules.items():
        for part in parts:
            modules[part] = fused_module
    return modules


def _usual_path(path: str) -> str:
    """A parameter's path without the layer's number in its period."""
    return re.sub(r"^layers/\d+/", "layers/", path)


def _fuses_delta(config: DecoderConfig) -> bool:
    return config.delta is not None and config.delta.fused


class FusedRows(NamedTuple):
    """Position of one kernel in a tensor that stores several kernels.

    rows: indices of the kernel's rows, in the kernel's order.
    count: number of all rows of the tensor.
    """

    rows: np.ndarray
    count: int


def fused_rows(config: DecoderConfig) -> dict[str, FusedRows]:
    """Maps the path of each kernel that shares a tensor with other kernels to its rows in that tensor.

    Projections of attention and of an MLP follow one another in their tensor. In the tensors of a delta net, each key
    head has its own query, key, values and gate, or rate and decay, next to one another.
    """
    module_rows: dict[str, np.ndarray] = {}
    if config.fused_projections:
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        sizes = {"layers/query": queries, "layers/key": keys, "layers/value": keys}
        for modules in FUSED_MODULES.values():
            start = 0
            for module in modules:
                end = start + sizes.get(module, config.intermediate_size)
                module_rows[module] = np.arange(start, end)
                start = end
    if _fuses_delta(config):
        net = config.delta
        assert net is not None
        values_per_key_head = net.value_heads // net.key_heads * net.value_dim
        by_head = np.arange(net.channels + net.value_heads * net.value_dim).reshape(net.key_heads, -1)
        ends = np.cumsum([net.key_dim, net.key_dim, values_per_key_head])
        query, key, value, gate = np.split(by_head, ends, axis=1)
        module_rows["layers/delta_inputs"] = np.concatenate([query.ravel(), key.ravel(), value.ravel()])
        module_rows["layers/delta_gate"] = gate.ravel()
        by_head = np.arange(2 * net.value_heads).reshape(net.key_heads, -1)
        rate, decay = np.split(by_head, 2, axis=1)
        module_rows["layers/delta_rate"] = rate.ravel()
        module_rows["layers/delta_decay"] = decay.ravel()
    kernels = {}
    for modules in [*FUSED_MODULES.values(), *FUSED_DELTA_MODULES.values()]:
        stored_modules = [module for module in modules if module in module_rows]
        count = sum(len(module_rows[module]) for module in stored_modules)
        for module in stored_modules:
            kernels[f"{module}/kernel"] = FusedRows(module_rows[module], count)
    if not kernels:
        return {}
    paths = flatten(abstract_params(config))
    return {path: kernels[_usual_path(path)] for path in paths if _usual_path(path) in kernels}


class _Part(NamedTuple):
    """One part of a tensor that a file stores together with other tensors.

    shape: shape of the stored tensor.
    index: position of the part in the stored tensor.
    """

    shape: tuple[int, ...]
    index: tuple[slice, ...]


class _OpenTensor(NamedTuple):
    """A tensor in an open safetensors file, with its name in that file."""

    file: Path
    opened: Any
    name: str


class _Sources(NamedTuple):
    """The stored tensors of a model, by their names in the family.

    parts: positions of the tensors that are parts of a stored tensor, by name; all other tensors are stored alone.
    """

    tensors: dict[str, _OpenTensor]
    parts: dict[str, _Part]


def read_params(folder: Path, config: DecoderConfig, scores: bool = False) -> dict:
    """Reads the parameter tree from a folder's safetensors files, in float32, sharded on the current mesh.

    Tensors move to the devices one at a time, so the host never holds the complete model.

    Args:
        scores: True for a classifier: adds `score/kernel`, [hidden, 1].
    Raises:
        UserError: tensors are missing, unexpected, or have a wrong shape or dtype; or a file is missing or damaged.
    """
    names = tensor_names(config)
    fused = fused_rows(config)
    leaves = flatten(abstract_params(config))
    if scores:
        names["score/kernel"] = ["score.weight"]
        leaves["score/kernel"] = jax.ShapeDtypeStruct((config.hidden_size, 1), jnp.float32)
    with contextlib.ExitStack() as stack:
        written = _written_config(folder)
        stored = {}
        for file in _safetensors_files(folder, _stored_tensors(folder, written)):
            opened = stack.enter_context(_opened(file))
            for name in opened.keys():
                stored[name] = _OpenTensor(file, opened, name)
        names_in_family = _names_in_family(stored, written)
        tensors = {name: stored[stored_name] for name, stored_name in names_in_family.items()}
        if config.tie_embeddings and _EMBEDDING not in tensors and _HEAD in tensors:
            tensors[_EMBEDDING] = tensors[_HEAD]
        parts = {}
        if config.experts:
            parts = _split_joint_experts(tensors, config)
        expected = set()
        for names_of_path in names.values():
            expected.update(names_of_path)
        _check_names(folder, expected, tensors)
        sources = _Sources(tensors, parts)
        params = {}
        for path, leaf in leaves.items():
            params[path] = _read_param(path, leaf.shape, names[path], sources, fused.get(path))
    return unflatten(params)


def _read_param(
    path: str, shape: tuple[int, ...], names: Sequence[str], sources: _Sources, fused: FusedRows | None
) -> Array:
    """Reads one parameter of the decoder in float32, sharded on the current mesh.

    Args:
        shape: shape of the parameter, with its layers and experts.
        names: names of the parameter's tensors; one per layer, or one per expert of each layer.
        fused: rows of the kernel in its tensors; None if it has tensors of its own.
    """
    is_stacked = path.startswith("layers/")
    is_kernel = path.endswith("/kernel")
    is_expert = "/experts/" in path and "/router/" not in path
    axes = param_axes(path, shape)
    tensor_shape = shape
    if is_stacked:
        tensor_shape = tensor_shape[1:]
    if is_expert:
        tensor_shape = tensor_shape[1:]

    def read_tensor(name: str) -> np.ndarray:
        if is_kernel:  # Hugging Face stores kernels as [out, in]
            return _read_stored(name, tensor_shape[::-1], sources, fused).T
        return _read_stored(name, tensor_shape, sources, fused)

    if not is_stacked:
        return put_array(read_tensor(names[0]), *axes).astype(jnp.float32)
    layers = shape[0]
    tensors_per_layer = len(names) // layers

    def read_layer(layer: int) -> np.ndarray:
        start = layer * tensors_per_layer
        tensors = [read_tensor(name) for name in names[start : start + tensors_per_layer]]
        if is_expert:
            return np.stack(tensors)
        return tensors[0]

    stacked = _zeros(shape, axes)
    for layer in range(layers):
        # A local for the layer's values would hold them in memory while the next layer is read.
        stacked = _with_layer(stacked, layer, put_array(read_layer(layer), *axes[1:]), axes)
    return stacked


def _read_stored(name: str, shape: tuple[int, ...], sources: _Sources, fused: FusedRows | None) -> np.ndarray:
    """Reads a tensor of `shape` from its own stored tensor, or from the one that it shares with other tensors."""
    tensor = sources.tensors[name]
    if fused is not None:
        # The kernel's rows lie in this range. A delta net has other kernels' rows between them.
        start = fused.rows.min()
        index = slice(start, fused.rows.max() + 1)
        values = _read(tensor, (fused.count, *shape[1:]), index)
        return values[fused.rows - start]
    if name in sources.parts:
        part = sources.parts[name]
        return _read(tensor, part.shape, part.index).reshape(shape)
    return _read(tensor, shape)


def _split_joint_experts(tensors: dict[str, _OpenTensor], config: DecoderConfig) -> dict[str, _Part]:
    """Replaces each tensor with all experts of a layer, as transformers 5 writes them, by one for each expert.

    It changes `tensors`.

    Returns:
        The part of the stored tensor, by the name of the expert's tensor.
    """
    assert config.experts is not None
    count = config.experts.count
    module = config.experts.module
    width = config.intermediate_size
    parts = {}
    shapes = {"down_proj": (count, config.hidden_size, width), "gate_up_proj": (count, 2 * width, config.hidden_size)}
    for layer in range(config.num_layers):
        mlp = f"model.layers.{layer}.{module}"
        joint_mlp = f"model.layers.{layer}.mlp"
        joint_names = {f"{joint_mlp}.experts.{parameter}" for parameter in _JOINT_EXPERTS}
        first_expert = f"{mlp}.experts.0.{EXPERT_MODULES[module]['gate']}.weight"
        if not joint_names <= tensors.keys() or first_expert in tensors:
            continue
        if f"{joint_mlp}.gate.weight" in tensors:
            tensors[f"{mlp}.gate.weight"] = tensors.pop(f"{joint_mlp}.gate.weight")
        for parameter, projections in _JOINT_EXPERTS.items():
            tensor = tensors.pop(f"{joint_mlp}.experts.{parameter}")
            shape = shapes[parameter]
            rows_per_projection = shape[1] // len(projections)
            for expert in range(count):
                for number, projection in enumerate(projections):
                    name = f"{mlp}.experts.{expert}.{EXPERT_MODULES[module][projection]}.weight"
                    start = number * rows_per_projection
                    index = slice(expert, expert + 1), slice(start, start + rows_per_projection)
                    tensors[name] = tensor
                    parts[name] = _Part(shape, index)
    return parts


def adapter_fields(path: str | Path) -> dict[str, Any]:
    """The adapter_config.json of a PEFT adapter in a folder or under a hub name.

    Raises:
        UserError: the file is missing or unreadable, or recjax does not compute such an adapter; the message names the
            field.
    """
    file = model_folder(path, (_ADAPTER_CONFIG, "adapter_model.*")) / _ADAPTER_CONFIG
    if not file.is_file():
        raise UserError(file.parent, f"holds no {_ADAPTER_CONFIG}", "give a folder that PEFT's save_pretrained wrote")
    try:
        fields = dict(json.loads(file.read_text(encoding="utf-8-sig")))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(file, f"is no adapter config ({error})", "fetch the file again") from error
    supported_values = dict.fromkeys(fields.keys() - _ADAPTER_FIELDS, (None, False)) | _ADAPTER_FIXED
    for name, supported in supported_values.items():
        default = supported[0]
        value = fields.get(name, default)
        if name == "target_parameters":
            # recjax computes adapters of these parameters, so only other parameters are refused.
            value = [parameter for parameter in value or () if str(parameter).split(".")[-1] not in _JOINT_EXPERTS]
        if value not in supported and value not in ([], {}):
            raise UserError(
                f"{file}: {name}",
                "recjax does not compute such adapters",
                "merge the adapter into its base with PEFT's merge_and_unload and set model.path to the result",
                value=value,
            )
    for name in ("r", "lora_alpha"):
        value: Any = fields.get(name)
        if type(value) not in (int, float) or not 0 < value < 2**31:
            raise UserError(f"{file}: {name}", "takes a number above 0", "fetch the file again", value=value)
    return fields


class _Factors(NamedTuple):
    """One adapter of a kernel, whose change of the kernel is a @ b times the adapter's usual alpha / r.

    a: [inputs, rank].
    b: [rank, units].
    """

    a: np.ndarray
    b: np.ndarray


def load_adapter(path: str | Path, config: DecoderConfig) -> tuple[LoraConfig, dict]:
    """A PEFT adapter as the settings of `model.lora`, and as parameters in float32 on the host.

    A fused tensor's adapter becomes one adapter for each decoder module in the tensor, with the columns of B that the
    module's rows use. Adapters of a smaller rank than the largest, and layers without an adapter, get zeros, which
    training never changes. An adapter with another scale than the usual alpha / r has the ratio in its B.

    Args:
        path: folder or hub name with adapter_config.json and adapter_model.safetensors.
        config: decoder config of the base.
    Raises:
        UserError: see `adapter_fields`; also tensors that are missing, unexpected, or do not fit the base.
    """
    fields = adapter_fields(path)
    folder = model_folder(path, (_ADAPTER_CONFIG, "adapter_model.*"))
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise UserError(folder, f"holds no {file.name}", "save the adapter with PEFT's save_pretrained")
    plain = dataclasses.replace(config, lora=None)
    leaves = flatten(abstract_params(plain))
    fused = fused_rows(plain)
    usual_scale = fields["lora_alpha"] / _rank_divisor(fields, fields["r"])
    tensors: dict[str, np.ndarray] = {}  # by their names in the family
    stored_names: dict[Any, str] = {}  # from names in the family to names in the file
    with _opened(file) as opened:
        for stored_name in opened.keys():
            name: Any = text_name(stored_name.removeprefix(_ADAPTER_PREFIX))
            shape = tuple(opened.get_slice(stored_name).get_shape())
            stored_names[name] = stored_name
            tensors[name] = _read(_OpenTensor(file, opened, stored_name), shape).astype(np.float32)
    joint_parameters = {}
    if plain.experts:
        joint_parameters = _split_joint_adapters(tensors, fields, plain)
    unread = set(tensors)
    adapters: dict[tuple[str, int], _Factors] = {}  # a key is a kernel and an index in its stack
    for kernel, names in tensor_names(plain).items():
        if not kernel.endswith("/kernel") or _target(kernel) not in _TARGETS:
            continue
        inputs, units = leaves[kernel].shape[-2:]
        rows, count = fused.get(kernel, FusedRows(np.arange(units), units))
        for index, name in enumerate(names):
            module = name.removesuffix(".weight")
            a_name = f"{module}.lora_A.weight"
            b_name = f"{module}.lora_B.weight"
            if a_name not in tensors and b_name not in tensors:
                continue
            if module in joint_parameters:
                module_in_base = joint_parameters[module]
            else:
                stored_a_name = stored_names.get(a_name, a_name)
                module_in_base = stored_a_name.removeprefix(_ADAPTER_PREFIX).removesuffix(".lora_A.weight")
            rank = _module_value(fields, "rank_pattern", module_in_base, fields["r"])
            for tensor_name, shape in ((a_name, (rank, inputs)), (b_name, (count, rank))):
                stored_shape = "none"
                if tensor_name in tensors:
                    stored_shape = tensors[tensor_name].shape
                if stored_shape != shape:
                    raise UserError(
                        file,
                        f"tensor {tensor_name!r} has shape {stored_shape}, but {_ADAPTER_CONFIG} and the model ask for"
                        f" {shape}",
                        f"set model.path to the adapter's base, {fields.get('base_model_name_or_path')!r}",
                    )
            unread -= {a_name, b_name}
            a = tensors[a_name]
            b = tensors[b_name]
            kernel_b = b[rows]
            # Other kernels of a fused tensor use the other columns of B. Columns that no kernel uses yet, because B
            # starts at zero, are kept for each of them.
            is_used = kernel_b.any(0)
            is_untrained = ~b.any(0) & a.any(1)
            kept = is_used | is_untrained
            alpha = _module_value(fields, "alpha_pattern", module_in_base, fields["lora_alpha"])
            scale = alpha / _rank_divisor(fields, rank)
            adapters[kernel, index] = _Factors(
                a=a[kept].T,
                b=kernel_b[:, kept].T * np.float32(scale / usual_scale),
            )
    largest_rank = max((len(factors.b) for factors in adapters.values()), default=0)
    if unread or not largest_rank:
        first_unread = min((stored_names.get(name, name) for name in unread), default="none")
        raise UserError(
            file,
            f"tensor {first_unread!r} adapts no projection of the decoder ({', '.join(_TARGETS)})",
            "merge the adapter into its base with PEFT's merge_and_unload and set model.path to the result",
        )
    adapted_targets = {_target(kernel) for (kernel, _), factors in adapters.items() if len(factors.b)}
    lora = LoraConfig(
        rank=largest_rank,
        alpha=fields["lora_alpha"] * (largest_rank / _rank_divisor(fields, fields["r"])),
        targets=[target for target in _TARGETS if target in adapted_targets],
    )
    return lora, _adapter_params(adapted(plain, lora), adapters)


def _rank_divisor(fields: dict[str, Any], rank: float) -> float:
    """The number by which PEFT divides alpha."""
    return rank**0.5 if fields.get("use_rslora") else rank


def _module_value(fields: dict[str, Any], pattern: str, module: str, default: float) -> float:
    """A module's value in rank_pattern or alpha_pattern, whose keys are regular expressions for names in the base."""
    values = fields.get(pattern) or {}
    for expression, value in values.items():
        if re.match(rf"(.*\.)?({expression})$", module):
            return value
    return default


def _target(kernel: str) -> str:
    """The projection that a kernel's path belongs to."""
    return kernel.split("/")[-2]


def _adapter_params(config: DecoderConfig, adapters: dict[tuple[str, int], _Factors]) -> dict:
    """The parameters of adapters, zero where `adapters`, by kernel and index in its stack, has none."""
    assert config.lora is not None
    params = {}
    for name, leaf in flatten(abstract_params(config)).items():
        if is_adapter(name):
            params[name] = np.zeros(leaf.shape, np.float32)
    for (kernel, index), (a, b) in adapters.items():
        if _target(kernel) not in config.lora.targets:
            continue
        rank = len(b)
        a_param = params[kernel.replace("/kernel", "_lora_a/kernel")]
        b_param = params[kernel.replace("/kernel", "_lora_b/kernel")]
        # The reshaped arrays are views, so the assignments change the parameters.
        a_stack = a_param.reshape(-1, *a_param.shape[-2:])
        b_stack = b_param.reshape(-1, *b_param.shape[-2:])
        a_stack[index][:, :rank] = a
        b_stack[index][:rank] = b
    return unflatten(params)


def _split_joint_adapters(tensors: dict[str, np.ndarray], fields: dict, config: DecoderConfig) -> dict[str, str]:
    """Replaces each adapter of all experts of a layer by one for each projection of each expert.

    PEFT writes such an adapter for a parameter that stacks the experts. This function changes `tensors`.

    Returns:
        The name of the stacked parameter in the base, by the name of the projection's module.
    """
    assert config.experts is not None
    count = config.experts.count
    module = config.experts.module
    adapted_parameters = {str(parameter).split(".")[-1] for parameter in fields.get("target_parameters") or ()}
    outermost_first = [name for name in _JOINT_EXPERTS if name in adapted_parameters]
    parameters = {}
    for layer in range(config.num_layers):
        joint_experts = f"model.layers.{layer}.mlp.experts"
        for parameter, wrapper in zip(outermost_first, ("", ".base_layer"), strict=False):
            a = tensors.pop(f"{joint_experts}{wrapper}.lora_A.weight", None)
            b = tensors.pop(f"{joint_experts}{wrapper}.lora_B.weight", None)
            if a is None or b is None or len(a) % count:
                continue
            # PEFT stores A as [experts × rank, inputs], and B as [outputs, rank × experts].
            a = a.reshape(count, -1, a.shape[-1])
            b = np.moveaxis(b.reshape(len(b), -1, count), 2, 0)
            projections = _JOINT_EXPERTS[parameter]
            for projection, rows in zip(projections, np.split(b, len(projections), 1), strict=True):
                for expert in range(count):
                    name = f"model.layers.{layer}.{module}.experts.{expert}.{EXPERT_MODULES[module][projection]}"
                    tensors[f"{name}.lora_A.weight"] = a[expert]
                    tensors[f"{name}.lora_B.weight"] = rows[expert]
                    parameters[name] = f"{joint_experts}.{parameter}"
    return parameters


@functools.partial(jax.jit, static_argnums=(0, 1))
def _zeros(shape: tuple[int, ...], axes: tuple[Axes, ...]) -> Array:
    return constrain(jnp.zeros(shape), *axes)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _with_layer(stacked: Array, layer: ArrayLike, tensor: Any, axes: tuple[Axes, ...]) -> Array:
    return constrain(jax.lax.dynamic_update_index_in_dim(stacked, tensor.astype(stacked.dtype), layer, 0), *axes)


def _safetensors_files(folder: Path, tensors: dict[str, _StoredTensor]) -> list[Path]:
    files = sorted({tensor.file for tensor in tensors.values()})
    if not files:
        pickles = []
        for pattern in ("*.bin", "*.pt", "*.pth"):
            pickles += [file.name for file in folder.glob(pattern)]
        reason = "no weights"
        if pickles:
            reason = f"only pickle files {sorted(pickles)}, which can run code when opened"
        raise UserError(
            folder,
            f"holds {reason}",
            "give a folder with model.safetensors, or with model.safetensors.index.json and its shards"
            " (transformers' save_pretrained writes them)",
        )
    for file in files:
        if not file.is_file():
            raise UserError(
                folder, f"has an index that names the shard {file.name}, which is missing", "fetch the file"
            )
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """Maps tensor names to file names, which must not contain a path."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = set(names.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(index, f"is no safetensors index ({error!r})", "fetch the file again") from error
    for name in shards:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise UserError(
                index,
                f"weight_map names {name!r:.200}",
                "a shard is a .safetensors file of the same folder, without a path. Fetch the file again, from"
                " whom you trust",
            )
    return names


def _check_names(folder: Path, expected: set[str], tensors: dict[str, _OpenTensor]) -> None:
    missing = sorted(expected - tensors.keys())
    if missing:
        for name in tensors:
            if name.endswith(f".{missing[0]}"):
                raise UserError(
                    folder,
                    f"the tensors' names begin with {name.removesuffix(missing[0])!r}, as in {name!r}: they are"
                    " those of a wrapper. Save the model inside it: torch.compile has it as _orig_mod,"
                    " DistributedDataParallel as module, and PEFT's merge_and_unload returns it",
                )
        raise UserError(
            folder,
            f"{len(missing)} tensors that config.json calls for are in none of the safetensors files, first"
            f" {missing[0]!r}",
            "check num_hidden_layers and tie_word_embeddings, or fetch the files again",
        )
    unexpected = tensors.keys() - expected - {_HEAD}
    unexpected = {name for name in unexpected if not name.endswith("rotary_emb.inv_freq")}
    if unexpected:
        first = min(unexpected)
        raise UserError(
            tensors[first].file,
            f"{len(unexpected)} tensors that config.json does not call for, first {first!r}",
            "the weights belong to another config or architecture, or hold more than a language model",
        )


def _read(tensor: _OpenTensor, shape: tuple[int, ...], index: slice | tuple[slice, ...] | None = None) -> np.ndarray:
    """Reads a tensor, whose stored shape must be `shape`; with an index, only this part."""
    header = tensor.opened.get_slice(tensor.name)
    stored_shape = tuple(header.get_shape())
    if stored_shape != shape:
        raise UserError(
            tensor.file,
            f"tensor {tensor.name!r} has shape {stored_shape}, but config.json asks for {shape}",
            "use the config.json that belongs to these weights",
        )
    if header.get_dtype() not in ("F32", "F16", "BF16"):
        raise UserError(
            tensor.file,
            f"tensor {tensor.name!r} has dtype {header.get_dtype()}",
            "save it as float32, float16 or bfloat16",
        )
    if index is None:
        values = tensor.opened.get_tensor(tensor.name)
    else:
        values = header[index]
    # Only NaN and infinite numbers have all exponent bits set. Reading these bits avoids slow conversions of bfloat16.
    exponent_mask = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}[values.dtype.name]
    integers = values.view(np.uint32 if values.dtype.itemsize == 4 else np.uint16)
    exponents = integers & integers.dtype.type(exponent_mask)
    if values.size and int(exponents.max()) == exponent_mask:
        raise UserError(tensor.file, f"tensor {tensor.name!r} has NaN or infinite values", "fetch the file again")
    return values
