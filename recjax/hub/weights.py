"""Reads Hugging Face model folders into a decoder config and a parameter tree."""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import re
from collections.abc import Iterable
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
_COMPARED_ROWS = 4096  # rows of embedding and head to compare at a time
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_PREFIX = "base_model.model."  # of the names in PEFT's files
_TARGETS = (*PROJECTIONS, *DELTA_PROJECTIONS)
# Fields of adapter_config.json that recjax reads, fields for which the tensors speak, and fields that change no output.
# Every other field must be off, because it changes the adapter's computation.
_ADAPTER_FIELDS = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "base_model_name_or_path", "revision"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("task_type", "auto_mapping", "inference_mode", "lora_dropout", "peft_version", "megatron_core"),
    *("qalora_group_size", "runtime_config", "ensure_weight_tying"),
}
_ADAPTER_FIXED: dict[str, tuple] = {"peft_type": ("LORA",), "bias": ("none",)}
_ADAPTER_FIXED["init_lora_weights"] = (True, False, "gaussian", "orthogonal", "eva")  # other values change the base

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
_EMBEDDING, _HEAD = (f"{MODULES[name]}.weight" for name in ("embedding", "head"))
# Projections of an expert in checkpoints, by the name of the layer's MLP there.
EXPERT_MODULES = {
    "mlp": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    "block_sparse_moe": {"gate": "w1", "up": "w3", "down": "w2"},
}
# PEFT's parameters of all experts of a layer, as it nests their adapters, outermost first; and their projections.
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
    if (tensors := _tensors_of(folder, _written_config(folder))) and "score.weight" not in tensors:
        raise UserError(folder, "holds no tensor score.weight, which a reward model has", "fetch the files again")
    return dataclasses.replace(config, tie_embeddings=True), fields.pad_token_id  # it has no head


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
        tensors = _tensors_of(folder, written)
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


class _Tensor(NamedTuple):
    """A tensor's safetensors file, and its name in that file."""

    file: Path
    name: str


def _tensors_of(folder: Path, written: dict) -> dict[str, _Tensor]:
    """The tensors of a folder by their names in the family; for a multimodal model, only the text half's tensors.

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
        files = {name: folder / file for name, file in _weight_map(index).items()}
    names = _names_in_family(files, written)
    if skipped := sorted(files.keys() - names.values()):
        read = "the text half" if written["model_type"] in CONTAINERS else "the predictor of the next token"
        _warn_once(
            "%s: recjax reads %s of this %s model and skips %d other tensors, such as %s; exports have only that part",
            folder,
            read,
            written["model_type"],
            len(skipped),
            skipped[0],
        )
    return {name: _Tensor(files[stored], stored) for name, stored in names.items()}


def _names_in_family(stored: Iterable[str], written: dict) -> dict[str, str]:
    """The name of each tensor in its file by its name in the family.

    A multimodal model's other half is left out, and in every model a module that predicts further tokens.

    A model without its head, as transformers' AutoModel saves it, has names without `model.`.
    """
    if written.get("model_type") in CONTAINERS:
        text_names = {name: text_name(name) for name in stored}
        return {found: name for name, found in text_names.items() if found is not None}
    has_prefix = any(name.startswith("model.") for name in stored)
    parts = () if has_prefix else ("embed_tokens.", "layers.", "norm.")
    read = [name for name in stored if not name.startswith(FURTHER_TOKENS)]
    return {f"model.{name}" if name.startswith(parts) else name: name for name in read}


def _has_own_head(tensors: dict[str, _Tensor]) -> bool:
    """True if the weights hold both embedding and head, with different values; False if either is missing."""
    pair = [tensors[name] for name in (_EMBEDDING, _HEAD) if name in tensors and tensors[name].file.is_file()]
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_opened(tensor.file)) for tensor in pair]
        if len(pair) < 2 or not all(tensor.name in file.keys() for tensor, file in zip(pair, opened, strict=True)):
            return False
        embedding, head = (file.get_slice(tensor.name) for tensor, file in zip(pair, opened, strict=True))
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
        raise UserError("num_hidden_layers", f"takes 1 to {MOST_LAYERS}", "correct config.json", value=layers)
    layer_numbers = [int(match[1]) for name in tensors if (match := re.match(r"model\.layers\.(\d{1,9})\.", name))]
    if layer_numbers and max(layer_numbers) + 1 != layers:
        raise UserError(
            problem=f"num_hidden_layers = {layers}, but the weights in {folder} have {max(layer_numbers) + 1} layers",
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
    modules = MODULES | (POST_NORM_MODULES if config.post_norms else {})
    experts = range(1)
    if config.experts:
        mlp = f"model.layers.{{layer}}.{config.experts.module}"
        experts = range(config.experts.count)
        modules |= {"layers/experts/router": f"{mlp}.gate", "layers/shared_router": f"{mlp}.shared_expert_gate"}
        modules |= {f"layers/shared_{name}": f"{mlp}.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
        for projection, name in EXPERT_MODULES[config.experts.module].items():
            modules[f"layers/experts/{projection}"] = f"{mlp}.experts.{{expert}}.{name}"
    fused = (FUSED_MODULES if config.fused_projections else {}) | (FUSED_DELTA_MODULES if _fuses_delta(config) else {})
    for module, parts in fused.items():
        modules |= dict.fromkeys(parts, module)
    names = {}
    for path in flatten(abstract_params(config)):
        in_period = re.match(r"layers/(\d+)/", path)
        usual_path = _usual_path(path)
        module, _, kind = usual_path.rpartition("/")
        name = modules.get(usual_path) or f"{modules[module]}.{'bias' if kind == 'bias' else 'weight'}"
        layers = range(int(in_period[1]) if in_period else 0, config.num_layers, config.period)
        layers = layers if path.startswith("layers/") else [0]
        each = experts if "{expert}" in name else range(1)
        names[path] = [name.format(layer=layer, expert=expert) for layer in layers for expert in each]
    return names


def _usual_path(path: str) -> str:
    """A parameter's path without the layer's number in its period."""
    return re.sub(r"^layers/\d+/", "layers/", path)


def _fuses_delta(config: DecoderConfig) -> bool:
    return config.delta is not None and config.delta.fused


class FusedRows(NamedTuple):
    """Rows of a tensor that stores several kernels.

    rows: indices of one kernel's rows, in the kernel's order.
    count: number of rows of the tensor.
    """

    rows: np.ndarray
    count: int


def fused_rows(config: DecoderConfig) -> dict[str, FusedRows]:
    """The rows of each kernel that shares a tensor with others, by path.

    Projections of attention and of an MLP follow one another in their tensor. In the tensors of a delta net, each key
    head has its own query, key, values and gate, or rate and decay, next to one another.
    """
    parts = {}
    if config.fused_projections:
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        sizes = {"layers/query": queries, "layers/key": keys, "layers/value": keys}
        for modules in FUSED_MODULES.values():
            ends = np.cumsum([sizes.get(module, config.intermediate_size) for module in modules])
            parts |= dict(zip(modules, np.split(np.arange(ends[-1]), ends[:-1]), strict=True))
    if _fuses_delta(config):
        net = config.delta
        assert net is not None
        values = net.value_heads // net.key_heads * net.value_dim  # units of one key head
        by_head = np.arange(net.channels + net.value_heads * net.value_dim).reshape(net.key_heads, -1)
        *inputs, gate = np.split(by_head, np.cumsum([net.key_dim, net.key_dim, values]), axis=1)
        parts["layers/delta_inputs"] = np.concatenate([rows.ravel() for rows in inputs])
        parts["layers/delta_gate"] = gate.ravel()
        rate, decay = np.split(np.arange(2 * net.value_heads).reshape(net.key_heads, -1), 2, axis=1)
        parts |= {"layers/delta_rate": rate.ravel(), "layers/delta_decay": decay.ravel()}
    counts = {}
    for modules in (*FUSED_MODULES.values(), *FUSED_DELTA_MODULES.values()):
        count = sum(len(parts[module]) for module in modules if module in parts)
        counts |= dict.fromkeys(modules, count)
    kernels = {f"{module}/kernel": FusedRows(rows, counts[module]) for module, rows in parts.items()}
    if not kernels:
        return {}
    paths = flatten(abstract_params(config))
    return {path: kernels[_usual_path(path)] for path in paths if _usual_path(path) in kernels}


def read_params(folder: Path, config: DecoderConfig, scores: bool = False) -> dict:
    """Reads the parameter tree from a folder's safetensors files, in float32, sharded on the current mesh.

    Tensors move to the devices one at a time, so the host never holds the whole model.

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
        for file in _safetensors_files(folder, _tensors_of(folder, written)):
            opened = stack.enter_context(_opened(file))
            stored |= {name: (file, opened, name) for name in opened.keys()}
        sources = {name: stored[of_file] for name, of_file in _names_in_family(stored, written).items()}
        if config.tie_embeddings and _EMBEDDING not in sources and _HEAD in sources:
            sources[_EMBEDDING] = sources[_HEAD]
        cuts = _split_joint_experts(sources, config) if config.experts else {}
        _check_names(folder, {name for group in names.values() for name in group}, sources)

        def read(path, leaf):
            layered = path.startswith("layers/")
            transposed = path.endswith("/kernel")
            axes = param_axes(path, leaf.shape)
            of_experts = "/experts/" in path and "/router/" not in path
            shape = leaf.shape[layered + of_experts :]

            def tensor(name):
                file, opened, full = sources[name]
                stored_shape = shape[::-1] if transposed else shape
                if path in fused:
                    rows, count = fused[path]
                    start = rows.min()
                    # The rows lie in this range, with other kernels' rows between them in a delta net.
                    index = slice(start, rows.max() + 1)
                    values = _read(file, opened, full, (count, *stored_shape[1:]), index)[rows - start]
                else:
                    whole_shape, index = cuts.get(name, (stored_shape, None))
                    values = _read(file, opened, full, whole_shape, index).reshape(stored_shape)
                return values.T if transposed else values

            if not layered:
                return put_array(tensor(names[path][0]), *axes).astype(jnp.float32)
            stacked = _zeros(leaf.shape, axes)
            each = len(names[path]) // len(leaf)

            def layer_weights(layer):
                tensors = [tensor(name) for name in names[path][layer * each : (layer + 1) * each]]
                return np.stack(tensors) if of_experts else tensors[0]

            for layer in range(len(leaf)):
                stacked = _with_layer(stacked, layer, put_array(layer_weights(layer), *axes[1:]), axes)
            return stacked

        return unflatten({path: read(path, leaf) for path, leaf in leaves.items()})


def _split_joint_experts(sources: dict[str, tuple], config: DecoderConfig) -> dict[str, tuple]:
    """Replaces tensors of all experts of a layer, as transformers 5 holds them, by one tensor for each expert, in
    `sources`.

    Returns:
        Shape of the whole tensor, and index of the expert's part, by the name of the expert's tensor.
    """
    assert config.experts is not None
    count = config.experts.count
    module = config.experts.module
    width = config.intermediate_size
    cuts = {}
    shapes = {"down_proj": (count, config.hidden_size, width), "gate_up_proj": (count, 2 * width, config.hidden_size)}
    for layer in range(config.num_layers):
        mlp = f"model.layers.{layer}.{module}"
        joint_mlp = f"model.layers.{layer}.mlp"
        joint_names = {f"{joint_mlp}.experts.{parameter}" for parameter in _JOINT_EXPERTS}
        if not joint_names <= sources.keys() or f"{mlp}.experts.0.{EXPERT_MODULES[module]['gate']}.weight" in sources:
            continue
        if f"{joint_mlp}.gate.weight" in sources:
            sources[f"{mlp}.gate.weight"] = sources.pop(f"{joint_mlp}.gate.weight")
        for parameter, projections in _JOINT_EXPERTS.items():
            tensor = sources.pop(f"{joint_mlp}.experts.{parameter}")
            rows = shapes[parameter][1] // len(projections)
            for expert, (number, projection) in itertools.product(range(count), enumerate(projections)):
                name = f"{mlp}.experts.{expert}.{EXPERT_MODULES[module][projection]}.weight"
                sources[name] = tensor
                index = slice(expert, expert + 1), slice(number * rows, (number + 1) * rows)
                cuts[name] = shapes[parameter], index
    return cuts


def adapter_fields(path: str | Path) -> dict[str, Any]:
    """The adapter_config.json of a PEFT adapter: of a folder or hub name.

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
    fixed = dict.fromkeys(fields.keys() - _ADAPTER_FIELDS, (None, False)) | _ADAPTER_FIXED
    for name, values in fixed.items():
        value = fields.get(name, values[0])
        if name == "target_parameters":
            value = [parameter for parameter in value or () if str(parameter).split(".")[-1] not in _JOINT_EXPERTS]
        if value not in values and value not in ([], {}):
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
    if not (file := folder / "adapter_model.safetensors").is_file():
        raise UserError(folder, f"holds no {file.name}", "save the adapter with PEFT's save_pretrained")
    plain = dataclasses.replace(config, lora=None)
    leaves = flatten(abstract_params(plain))
    fused = fused_rows(plain)
    parts = {}

    def divisor(rank: float) -> float:
        return rank**0.5 if fields.get("use_rslora") else rank

    def module_value(pattern: str, name: str, default: float) -> float:
        """A value from rank_pattern or alpha_pattern: regular expressions for the module's name in the base."""
        values = fields.get(pattern) or {}
        return next((value for key, value in values.items() if re.match(rf"(.*\.)?({key})$", name)), default)

    usual_scale = fields["lora_alpha"] / divisor(fields["r"])
    with _opened(file) as opened:
        adapter_names: dict[Any, str] = {text_name(name.removeprefix(_ADAPTER_PREFIX)): name for name in opened.keys()}
        stored: dict[str, np.ndarray] = {
            name: _read(file, opened, full, tuple(opened.get_slice(full).get_shape())).astype(np.float32)
            for name, full in adapter_names.items()
        }
    joint = _split_experts(stored, fields, plain) if plain.experts else {}
    unread = {*stored}
    for kernel, names in tensor_names(plain).items():
        target = kernel.split("/")[-2] if kernel.endswith("/kernel") else None
        for index, name in enumerate(names) if target in _TARGETS else ():
            module = name.removesuffix(".weight")
            inputs, units = leaves[kernel].shape[-2:]
            factors = [f"{module}.lora_{side}.weight" for side in "AB"]
            if not stored.keys() & {*factors}:
                continue
            name_in_base = (
                adapter_names.get(factors[0], factors[0]).removeprefix(_ADAPTER_PREFIX).removesuffix(".lora_A.weight")
            )
            module = joint.get(module, name_in_base)
            rows, count = fused.get(kernel, FusedRows(np.arange(units), units))
            rank = module_value("rank_pattern", module, fields["r"])
            for tensor, shape in zip(factors, ((rank, inputs), (count, rank)), strict=True):
                if (stored_shape := stored[tensor].shape if tensor in stored else "none") != shape:
                    raise UserError(
                        file,
                        f"tensor {tensor!r} has shape {stored_shape}, but {_ADAPTER_CONFIG} and the model ask for"
                        f" {shape}",
                        f"set model.path to the adapter's base, {fields.get('base_model_name_or_path')!r}",
                    )
            unread -= {*factors}
            a, b = (stored[tensor] for tensor in factors)
            used = b[rows].any(0) | (~b.any(0) & a.any(1))
            scale = module_value("alpha_pattern", module, fields["lora_alpha"]) / divisor(rank)
            parts[kernel, index] = a[used].T, b[rows][:, used].T * np.float32(scale / usual_scale)
    if unread or not any(len(b) for _, b in parts.values()):
        name = min((str(adapter_names.get(name, name)) for name in unread), default="none")
        raise UserError(
            file,
            f"tensor {name!r} adapts no projection of the decoder ({', '.join(_TARGETS)})",
            "merge the adapter into its base with PEFT's merge_and_unload and set model.path to the result",
        )
    rank = max(len(b) for _, b in parts.values())
    targets = {kernel.split("/")[-2] for (kernel, _), (_, b) in parts.items() if len(b)}
    lora = LoraConfig(
        rank=rank,
        alpha=fields["lora_alpha"] * (rank / divisor(fields["r"])),
        targets=[target for target in _TARGETS if target in targets],
    )
    return lora, _adapter_params(adapted(plain, lora), parts)


def _adapter_params(config: DecoderConfig, parts: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]) -> dict:
    """The parameters of adapters, zero where `parts`, A and B by kernel and index in its stack, has none."""
    shapes = flatten(abstract_params(config))
    params = {name: np.zeros(leaf.shape, np.float32) for name, leaf in shapes.items() if is_adapter(name)}
    assert config.lora is not None
    for (kernel, index), (a, b) in parts.items():
        if kernel.split("/")[-2] in config.lora.targets:
            stacks = (params[kernel.replace("/kernel", f"_lora_{side}/kernel")] for side in "ab")
            of_a, of_b = (stack.reshape(-1, *stack.shape[-2:])[index] for stack in stacks)  # views
            of_a[:, : len(b)] = a
            of_b[: len(b)] = b
    return unflatten(params)


def _split_experts(stored: dict[str, np.ndarray], fields: dict, config: DecoderConfig) -> dict[str, str]:
    """Replaces PEFT's adapters of all experts of a layer by adapters of each projection of each expert, in `stored`.

    Returns:
        The name of PEFT's parameter, by the name of the projection's module.
    """
    assert config.experts is not None
    count = config.experts.count
    module = config.experts.module
    ends = {str(parameter).split(".")[-1] for parameter in fields.get("target_parameters") or ()}
    parameters = {}
    for layer in range(config.num_layers):
        joint_experts = f"model.layers.{layer}.mlp.experts"
        nested = zip([name for name in _JOINT_EXPERTS if name in ends], ("", ".base_layer"), strict=False)
        for parameter, wrapper in nested:
            a, b = (stored.pop(f"{joint_experts}{wrapper}.lora_{side}.weight", None) for side in "AB")
            if a is None or b is None or len(a) % count:
                continue
            a = a.reshape(count, -1, a.shape[-1])
            b = np.moveaxis(b.reshape(len(b), -1, count), 2, 0)
            for projection, rows in zip(
                _JOINT_EXPERTS[parameter], np.split(b, len(_JOINT_EXPERTS[parameter]), 1), strict=True
            ):
                for expert in range(count):
                    name = f"model.layers.{layer}.{module}.experts.{expert}.{EXPERT_MODULES[module][projection]}"
                    stored |= {f"{name}.lora_A.weight": a[expert], f"{name}.lora_B.weight": rows[expert]}
                    parameters[name] = f"{joint_experts}.{parameter}"
    return parameters


@functools.partial(jax.jit, static_argnums=(0, 1))
def _zeros(shape: tuple[int, ...], axes: tuple[Axes, ...]) -> Array:
    return constrain(jnp.zeros(shape), *axes)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _with_layer(stacked: Array, layer: ArrayLike, tensor: Any, axes: tuple[Axes, ...]) -> Array:
    return constrain(jax.lax.dynamic_update_index_in_dim(stacked, tensor.astype(stacked.dtype), layer, 0), *axes)


def _safetensors_files(folder: Path, tensors: dict[str, _Tensor]) -> list[Path]:
    files = sorted({tensor.file for tensor in tensors.values()})
    if not files:
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        reason = f"only pickle files {pickles}, which can run code when opened" if pickles else "no weights"
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


def _check_names(folder: Path, expected: set[str], sources: dict) -> None:
    missing = sorted(expected - sources.keys())
    wrapped = next((name for name in sources if missing and name.endswith(f".{missing[0]}")), None)
    if wrapped:
        raise UserError(
            folder,
            f"the tensors' names begin with {wrapped.removesuffix(missing[0])!r}, as in {wrapped!r}: they are"
            " those of a wrapper. Save the model inside it: torch.compile has it as _orig_mod,"
            " DistributedDataParallel as module, and PEFT's merge_and_unload returns it",
        )
    if missing:
        raise UserError(
            folder,
            f"{len(missing)} tensors that config.json calls for are in none of the safetensors files, first"
            f" {missing[0]!r}",
            "check num_hidden_layers and tie_word_embeddings, or fetch the files again",
        )
    extra = {name for name in sources.keys() - expected if not name.endswith("rotary_emb.inv_freq")} - {_HEAD}
    if extra:
        first = min(extra)
        raise UserError(
            sources[first][0],
            f"{len(extra)} tensors that config.json does not call for, first {first!r}",
            "the weights belong to another config or architecture, or hold more than a language model",
        )


def _read(file: Path, opened, name: str, shape: tuple[int, ...], index: slice | tuple | None = None) -> np.ndarray:
    """A tensor of a file, whose shape must be `shape`, or its part at an index."""
    header = opened.get_slice(name)
    if tuple(header.get_shape()) != shape:
        raise UserError(
            file,
            f"tensor {name!r} has shape {tuple(header.get_shape())}, but config.json asks for {shape}",
            "use the config.json that belongs to these weights",
        )
    if header.get_dtype() not in ("F32", "F16", "BF16"):
        raise UserError(
            file, f"tensor {name!r} has dtype {header.get_dtype()}", "save it as float32, float16 or bfloat16"
        )
    values = opened.get_tensor(name) if index is None else header[index]
    # The exponent bits, because bfloat16 is slow to convert.
    exponent = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}[values.dtype.name]
    bits = values.view(np.uint32 if values.dtype.itemsize == 4 else np.uint16)
    if values.size and int((bits & bits.dtype.type(exponent)).max()) >= exponent:
        raise UserError(file, f"tensor {name!r} has NaN or infinite values", "fetch the file again")
    return values
