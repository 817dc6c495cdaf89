"""Model families: turns a config.json into decoder options and refuses settings that the decoder does not support."""

import math
from typing import Any, NamedTuple

from recjax.errors import UserError
from recjax.models.decoder_config import DecoderConfig, DeltaNet, ExpertOptions
from recjax.models.rotary import RopeScaling


class Family(NamedTuple):
    """Fields and options of one `model_type`.

    read: fields of config.json that recjax reads in addition to COMMON_FIELDS.
    fixed: fields that change the computation, with the only supported value.
    options: decoder options that no field states.
    """

    read: tuple[str, ...] = ()
    fixed: dict[str, Any] = {}
    options: dict[str, Any] = {}


SILU = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
LAYER_WINDOWS = ("sliding_window", "layer_types")
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
NO_ROPE_LAYERS = ("no_rope_layers", "no_rope_layer_interval")
GEMMA = {"norm_offset": 1.0, "post_norms": True, "activation": "gelu_tanh"}
GEMMA_FIELDS = ("sliding_window", "layer_types", "query_pre_attn_scalar", "final_logit_softcapping")
ATTENTION_CAP = ("attn_logit_softcapping",)
GEMMA3_FIELDS = ("rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern")
GRANITE_FIELDS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
GEMMA_FIXED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh",
    "attention_bias": False,
    "use_bidirectional_attention": False,
}

OLMO = {"pre_norms": False, "post_norms": True, "qk_norm": True, "joint_qk_norm": True}
PHI_FIXED = {"hidden_act": "silu", "attention_bias": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
# Size of a delta net → field of config.json.
DELTA_SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}

# Fields of experts; transformers wrote num_experts or num_local_experts, depending on family and version.
EXPERTS = ("num_experts", "num_local_experts", "num_experts_per_tok")
# Fields for layers without experts.
DENSE_LAYERS = ("mlp_only_layers", "decoder_sparse_step")
# Width of the MLP next to the experts.
SHARED = "shared_expert_intermediate_size"
SHARED_EXPERT = (SHARED,)
EXPERT_WIDTH = ("moe_intermediate_size",)
EXPERT_WEIGHTS = ("norm_topk_prob",)

QWEN3_5 = ("layer_types", "full_attention_interval", "partial_rotary_factor", "mrope_section", *DELTA_SIZES.values())
QWEN3_5_FIXED = SILU | {"attn_output_gate": True, "mlp_only_layers": [], "mamba_ssm_dtype": "float32"}
QWEN3_5_OPTIONS = {"qk_norm": True, "norm_offset": 1.0, "gated_attention": True}

FAMILIES = {
    "llama": Family(fixed=SILU | {"sliding_window": None, "is_llama_config": True, "rope_interleaved": False}),
    "mistral": Family(read=("sliding_window",), fixed=SILU),
    "qwen2": Family(read=WINDOWS, fixed=SILU | {"use_mrope": False}, options={"qkv_bias": True}),
    "qwen3": Family(read=WINDOWS, fixed=SILU, options={"qk_norm": True}),
    "smollm3": Family(read=WINDOWS + NO_ROPE_LAYERS, fixed=SILU),
    "gemma2": Family(read=GEMMA_FIELDS + ATTENTION_CAP, fixed=GEMMA_FIXED, options=GEMMA),
    "gemma3_text": Family(
        read=GEMMA_FIELDS + GEMMA3_FIELDS,
        fixed=GEMMA_FIXED | {"attn_logit_softcapping": None},
        options=GEMMA | {"qk_norm": True},
    ),
    "olmo2": Family(fixed=SILU, options=OLMO),
    "olmo3": Family(read=WINDOWS, fixed=SILU, options=OLMO),
    "phi3": Family(
        read=("sliding_window", "partial_rotary_factor", "original_max_position_embeddings"),
        fixed=PHI_FIXED,
        options={"fused_projections": True},
    ),
    "qwen3_5_text": Family(read=QWEN3_5, fixed=QWEN3_5_FIXED, options=QWEN3_5_OPTIONS),
    "qwen3_5_moe_text": Family(
        read=QWEN3_5 + EXPERTS + SHARED_EXPERT + EXPERT_WIDTH,
        fixed=QWEN3_5_FIXED,
        options=QWEN3_5_OPTIONS,
    ),
    "qwen3_next": Family(
        read=QWEN3_5 + EXPERTS + DENSE_LAYERS + SHARED_EXPERT + EXPERT_WIDTH + EXPERT_WEIGHTS,
        fixed=SILU | {"use_sliding_window": False},
        options=QWEN3_5_OPTIONS,
    ),
    "qwen3_moe": Family(
        read=WINDOWS + EXPERTS + DENSE_LAYERS + EXPERT_WIDTH + EXPERT_WEIGHTS,
        fixed=SILU,
        options={"qk_norm": True},
    ),
    "qwen2_moe": Family(
        read=WINDOWS + EXPERTS + DENSE_LAYERS + SHARED_EXPERT + EXPERT_WIDTH + EXPERT_WEIGHTS,
        fixed=SILU | {"qkv_bias": True},
        options={"qkv_bias": True},
    ),
    "olmoe": Family(
        read=EXPERTS + EXPERT_WEIGHTS,
        fixed=SILU | {"clip_qkv": None},
        options={"qk_norm": True, "joint_qk_norm": True},
    ),
    "mixtral": Family(read=("sliding_window", *EXPERTS), fixed=SILU | {"router_jitter_noise": 0.0}),
    "granite": Family(read=GRANITE_FIELDS, fixed=SILU),
    "internlm3": Family(fixed=SILU | {"qkv_bias": False, "bias": False}),
    "iquestcoder": Family(fixed=SILU),
    "ministral": Family(read=LAYER_WINDOWS, fixed=SILU),
    "cwm": Family(read=LAYER_WINDOWS, fixed=SILU),
    # transformers applies this dropout only in training; published files have 0.1.
    "seed_oss": Family(
        read=("attention_dropout", "residual_dropout"),
        fixed=SILU | {"attention_bias": True, "attention_out_bias": False},
        options={"qkv_bias": True},
    ),
}

# Families with rotary settings for each layer type.
BY_LAYER = ("gemma3_text", "olmo3")
LAYER_TYPES = ("full_attention", "sliding_attention")
# Family that users ask for → missing features of the decoder.
MISSING = {
    "gpt_oss": "attention sinks, biases, a clamped activation and MXFP4 weights",
    "mistral4": "latent attention (MLA)",
    "ministral3": "queries scaled by position",
    "exaone4": "norms after attention together with norms on heads of q and k",
    "hunyuan_v1_dense": "norms on q and k after their rotation",
    "phimoe": "its router and biases",
    "qwen3_vl_moe": "the layout of its experts' tensors",
}
for _kind in ("glm4", "glm4_moe", "ernie4_5", "helium", "cohere", "cohere2"):
    MISSING[_kind] = "interleaved rotary pairs"
for _kind in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "longcat_flash", "youtu"):
    MISSING[_kind] = "latent attention (MLA) and routers with groups of experts"
for _kind in ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "llama4", "llama4_text", "lfm2", "granitemoehybrid"):
    MISSING[_kind] = "layers of its own"
for _kind in ("nemotron_h", "falcon_h1", "minimax", "mamba", "mamba2", "jamba", "bamba"):
    MISSING[_kind] = "layers of its own"

# Multimodal model_type → family of the text half, the only part that recjax reads.
CONTAINERS = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# Fields of multimodal models about images, video and sound, which the text half does not use.
_OTHER_HALF = {
    "text_config",
    "vision_config",
    "audio_config",
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
    "boi_token_index",
    "eoi_token_index",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "vision_feature_layer",
    "deepstack_visual_indexes",
}
# Beginning of a text half's tensor name → its form in the family.
TEXT_HALF = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
}
# The tensors of a module that predicts further tokens begin so. Text models may have such a module too.
FURTHER_TOKENS = "mtp."
# The names of the other half's tensors begin so.
OTHER_HALF = ("vision_tower.", "multi_modal_projector.", "visual.", FURTHER_TOKENS)
# The text half's modules begin so in transformers' multimodal models; in the family, they begin with "model.".
TEXT_MODULES = "model.language_model."

# Decoder option → field of config.json.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "norm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
# Fields that recjax reads for every family.
COMMON_FIELDS = (*FIELDS.values(), "model_type", "head_dim", "rope_theta", "rope_scaling", "rope_parameters")

COMMON_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0, "quantization_config": None}

# Fields that do not change the forward pass. max_position_embeddings is no limit for the decoder. pretraining_tp only
# splits matrix products. Gemma 2 reads sliding_window, not sliding_window_size.
IGNORED_FIELDS = {
    "max_position_embeddings",
    "max_sequence_length",
    "pretraining_tp",
    "chunk_size_feed_forward",
    "sliding_window_size",
    "initializer_range",
    "use_cache",
    "_attn_implementation",
    "_attn_implementation_autoset",
    # Origin of the file.
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "transformers.js_config",
    "unsloth_fixed",
    "unsloth_version",
    # Special tokens and sampling.
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tokenizer_class",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    # Weight of the experts' balance loss in transformers; recjax has training.expert_balance.
    "router_aux_loss_coef",
    "output_router_logits",
    "repetition_penalty",
    "max_length",
    "cache_implementation",
    # A module that predicts further tokens; recjax does not read it.
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    # Fields for other tasks, and for the form of a call's result.
    "id2label",
    "label2id",
    "problem_type",
    "is_encoder_decoder",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
}

# rope_type → its number fields, in RopeScaling's order.
SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_slow", "beta_fast", "original_max_position_embeddings"),
}
# The factor on cos and sin is `attention_factor`, or `attn_factor` times YaRN's own, as in vLLM; transformers ignores
# `attn_factor`, with which DeepSeek-R1-0528-Qwen3-8B was trained.
_ROPE_FACTORS = ("attention_factor", "attn_factor", "mscale", "mscale_all_dim")
_ROPE_NUMBERS = ("rope_theta", *SCALINGS["llama3"], *SCALINGS["yarn"], *_ROPE_FACTORS)
ROPE_FIELDS = {"rope_type", "type", "partial_rotary_factor", "truncate", *_ROPE_NUMBERS}


def text_fields(written: dict) -> dict:
    """The config.json of a multimodal model's text half, in the family's form; other models' config.json unchanged.

    Text has equal positions on M-RoPE's three axes, which makes it the plain rotary embedding.
    """
    if written.get("model_type") not in CONTAINERS:
        return written
    all_fields = written | (written.get("text_config") or {})
    fields = {name: value for name, value in all_fields.items() if name not in _OTHER_HALF}
    fields["model_type"] = CONTAINERS[written["model_type"]]
    fields.pop("final_logit_softcapping", None)  # transformers bounds no logits of Gemma 3 with images
    if "tie_word_embeddings" in written:
        fields["tie_word_embeddings"] = written["tie_word_embeddings"]
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(fields.get(name), dict):
            continue
        rope = {}
        for key, value in fields[name].items():
            if not key.startswith("mrope"):
                rope[key] = "default" if value == "mrope" else value
        fields[name] = rope
    return fields


def text_name(name: str) -> str | None:
    """The family's name for a multimodal model's tensor; None if the tensor is not in the text half."""
    if name.removeprefix("model.").startswith(OTHER_HALF):
        return None
    for beginning, family_beginning in TEXT_HALF.items():
        if name.startswith(beginning):
            return family_beginning + name.removeprefix(beginning)
    return name


def check_fields(written: dict) -> None:
    """Refuses a config.json if the decoder does not support its computation, or if a field is unknown.

    Args:
        written: fields of config.json, without defaults.
    Raises:
        UserError: the model_type, a value or a field is not supported; the message names it.
    """
    kind = written.get("model_type")
    if kind not in FAMILIES:
        problem = "is not supported"
        if kind in MISSING:
            problem += f": the decoder lacks {MISSING[kind]}"
        supported = ", ".join([*FAMILIES, *CONTAINERS])
        raise UserError(f"model_type {kind!r}", problem, f"use a model of type {supported}")
    family = FAMILIES[kind]
    fixed = {name: value for name, value in (COMMON_FIXED | family.fixed).items() if name not in family.read}
    for name, value in fixed.items():
        if written.get(name) not in (None, value):
            raise UserError(f"{name}", f"is not supported, only {value!r}", "use another model", value=written[name])
    unknown = written.keys() - IGNORED_FIELDS.union(COMMON_FIELDS, family.read, fixed)
    if unknown:
        first = min(unknown)
        raise UserError(
            f"{first}",
            f"is not a known field of {kind!r} models and may change what they compute",
            f"remove it from the file if it does not (all unknown: {', '.join(sorted(unknown))})",
            value=written[first],
        )


def decoder_config(fields: dict) -> DecoderConfig:
    """The decoder config for the fields of a config.json.

    Args:
        fields: config.json as transformers reads it, with defaults; the file must have passed `check_fields`.
    Raises:
        UserError: the decoder does not support a layer or rotary setting; the message names it.
    """
    if "moe_intermediate_size" in fields:  # this may be the only width
        fields = {"intermediate_size": fields["moe_intermediate_size"]} | fields
    _check_numbers(fields)
    options = {name: fields[field] for name, field in FIELDS.items()}
    options |= FAMILIES[fields["model_type"]].options
    options["head_dim"] = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    if "linear_num_key_heads" in fields:
        options["delta"] = _delta(fields)
    if "num_experts_per_tok" in fields:
        options |= _experts(fields)
    options |= _rope_options(fields, options["head_dim"])
    options["windows"] = _windows(fields)
    options["attention_cap"] = fields.get("attn_logit_softcapping")
    options["logit_cap"] = fields.get("final_logit_softcapping")
    if "query_pre_attn_scalar" in fields:  # only Gemma has it
        options["attention_scale"] = fields["query_pre_attn_scalar"] ** -0.5
        options["embedding_scale"] = fields["hidden_size"] ** 0.5
    if "embedding_multiplier" in fields:  # only Granite has it
        options["embedding_scale"] = float(fields["embedding_multiplier"])
        options["attention_scale"] = float(fields["attention_multiplier"])
        options["residual_scale"] = float(fields["residual_multiplier"])
        options["logit_scale"] = 1 / fields["logits_scaling"]
    return DecoderConfig(**options)


def _rope_options(fields: dict, head_dim: int) -> dict[str, Any]:
    """The decoder options of rotary embeddings."""
    rope = fields["rope_parameters"]
    family = FAMILIES[fields["model_type"]]
    options: dict[str, Any] = {}
    layer_types = [rope]
    global_rope = rope
    if "mrope_section" in family.read:
        # These settings have no effect on text.
        global_rope = {name: value for name, value in rope.items() if not name.startswith("mrope")}
    if "full_attention" in rope:
        layer_types = list(rope.values())
        global_rope = rope["full_attention"]
        local_rope = rope["sliding_attention"]
        if global_rope.get("truncate", True) is not True:  # transformers does not read it here
            raise UserError("rope_parameters.full_attention.truncate", "takes only true", value=global_rope["truncate"])
        if _rope_scaling(local_rope, fields) is not None:
            raise UserError(
                "rope_parameters.sliding_attention", "only rope_type 'default' is supported there", value=local_rope
            )
        options["local_rope_theta"] = float(local_rope["rope_theta"])
    if "no_rope_layers" in fields:
        # Despite the field's name, 1 marks a layer with rotary embeddings. The list may be longer than the layers.
        count = fields["num_hidden_layers"]
        if len(fields["no_rope_layers"]) < count:
            raise UserError(
                problem=f"no_rope_layers has {len(fields['no_rope_layers'])} entries for {count} layers",
                remedy="correct config.json",
            )
        has_rope = tuple(bool(mark) for mark in fields["no_rope_layers"][:count])
        options["rope_layers"] = () if all(has_rope) else has_rope
    for settings in layer_types:
        share = settings.get("partial_rotary_factor") or 1.0
        if share != 1.0 and "partial_rotary_factor" not in family.read:
            raise UserError("partial_rotary_factor", "is not supported, only 1.0", value=share)
        options["rotary_dim"] = None if share == 1.0 else int(head_dim * share)
    options["rope_theta"] = float(global_rope["rope_theta"])
    options["rope_scaling"] = _rope_scaling(global_rope, fields)
    return options


# Fields that take whole numbers of at least 1.
_COUNTS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "moe_intermediate_size",
    "decoder_sparse_step",
    SHARED,
]
_COUNTS += DELTA_SIZES.values()
_COUNTS += EXPERTS
# Fields that take finite numbers above 0.
_AMOUNTS = ["rms_norm_eps", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"]
_AMOUNTS += GRANITE_FIELDS
_LARGEST = 2**31


def _check_numbers(fields: dict) -> None:
    """Refuses sizes and settings of rotary embeddings and norms that are no usable numbers."""
    numbers = {name: fields.get(name) for name in _COUNTS + _AMOUNTS}
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict):
        raise UserError("rope_parameters", "takes settings by name", "correct config.json", value=rope)
    _check_layer_types(rope, fields["model_type"])
    blocks = rope if "full_attention" in rope else {"rope_parameters": rope}
    for block, settings in blocks.items():
        for key, value in settings.items():
            if key in _ROPE_NUMBERS or key == "partial_rotary_factor":
                numbers[f"{block}.{key}"] = value
    for name, value in numbers.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(name, "takes a finite number above 0", "correct config.json", value=value)
        if name in _COUNTS and not (isinstance(value, int) and value < _LARGEST):
            raise UserError(name, f"takes a whole number below {_LARGEST}", "correct config.json", value=value)
    heads = fields["num_attention_heads"]
    groups = fields["num_key_value_heads"] or heads
    if heads % groups:
        raise UserError(
            "num_key_value_heads", f"does not divide num_attention_heads = {heads}", "correct it", value=groups
        )


def _check_layer_types(rope: dict, kind: str) -> None:
    """Refuses rotary settings by layer type where the family has none, and other settings where it needs them."""
    if kind not in BY_LAYER:
        layer_types = [name for name in LAYER_TYPES if name in rope]
        if layer_types:
            raise UserError(
                f"rope_parameters.{layer_types[0]}", f"models of type {kind!r} have no settings by layer type"
            )
        return
    wrong = sorted(rope.keys() - set(LAYER_TYPES))
    wrong += [name for name in LAYER_TYPES if not isinstance(rope.get(name), dict)]
    if wrong:
        raise UserError(
            f"rope_parameters.{wrong[0]}",
            f"models of type {kind!r} take settings by layer type, {' and '.join(LAYER_TYPES)}",
            "correct config.json",
            value=rope.get(wrong[0]),
        )


def _delta(fields: dict) -> DeltaNet | None:
    """Layers and sizes of delta nets; None if every layer has attention."""
    layers = tuple(kind == "linear_attention" for kind in fields["layer_types"])
    sizes = {size: fields[name] for size, name in DELTA_SIZES.items()}
    if len(layers) != fields["num_hidden_layers"] or all(layers):
        raise UserError(
            problem=(
                f"layer_types has {len(layers)} entries, {sum(layers)} of them linear_attention: it takes one for each"
                f" of num_hidden_layers = {fields['num_hidden_layers']} layers, and at least one full_attention"
            )
        )
    if sizes["value_heads"] % sizes["key_heads"]:
        raise UserError(
            "linear_num_value_heads",
            f"takes a multiple of linear_num_key_heads = {sizes['key_heads']}",
            "correct config.json",
            value=sizes["value_heads"],
        )
    if not any(layers):
        return None
    return DeltaNet(layers, **sizes, fused=fields["model_type"] == "qwen3_next")


def _experts(fields: dict) -> dict[str, object]:
    """The decoder options of a mixture of experts."""
    count = fields.get("num_local_experts") or fields["num_experts"]
    per_token = fields["num_experts_per_tok"]
    if not per_token <= count <= 2**15:
        raise UserError(
            f"num_experts_per_tok = {per_token} of {count} experts",
            f"takes at most all, and {2**15} experts",
            "correct config.json",
        )
    dense_layers = fields.get("mlp_only_layers") or []
    step = fields.get("decoder_sparse_step") or 1
    dense = tuple(layer in dense_layers or (layer + 1) % step > 0 for layer in range(fields["num_hidden_layers"]))
    if all(dense):
        raise UserError(f"mlp_only_layers = {dense_layers!r:.80}, decoder_sparse_step = {step}", "no layer has experts")
    experts = ExpertOptions(
        count,
        per_token,
        renormalize=fields.get("norm_topk_prob", True),  # families without the field always do
        module="block_sparse_moe" if fields["model_type"] == "mixtral" else "mlp",
        shared_size=fields.get(SHARED) or 0,
    )
    if any(dense):
        experts = experts._replace(dense=dense, dense_size=fields["intermediate_size"])
    width = fields.get("moe_intermediate_size", fields["intermediate_size"])
    return {"experts": experts, "intermediate_size": width}


def _windows(fields: dict) -> tuple[int | None, ...]:
    """The attention window of each layer; empty if no layer has a window."""
    size = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    default_kind = "sliding_attention" if size else "full_attention"
    kinds = fields.get("layer_types") or [default_kind] * fields["num_hidden_layers"]
    supported = "linear" if "linear_num_key_heads" in fields else "sliding"
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", f"{supported}_attention"):
            raise UserError(
                f"layer_types[{layer}]", "is not supported", f"only full and {supported} attention are", value=kind
            )
        if kind == "sliding_attention" and not size:
            raise UserError(
                problem=(
                    f"layer_types[{layer}] = {kind!r}, but sliding_window = {fields.get('sliding_window')!r} and"
                    f" use_sliding_window = {fields.get('use_sliding_window', True)!r}"
                ),
                remedy="correct config.json",
            )
    windows = tuple(size if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _rope_scaling(rope: dict, fields: dict) -> RopeScaling | None:
    kind = rope.get("rope_type")
    if kind not in SCALINGS:
        raise UserError(f"rope_type {kind!r}", "is not supported", f"use a model with {', '.join(SCALINGS)}")
    unknown = sorted(rope.keys() - ROPE_FIELDS)
    if "attn_factor" in rope and (kind != "yarn" or rope.get("attention_factor") is not None):
        unknown.append("attn_factor")
    if unknown:
        raise UserError(
            f"rope_parameters.{unknown[0]}", "is not supported", "use another model", value=rope[unknown[0]]
        )
    if kind == "default":
        return None
    written = {name: value for name, value in rope.items() if value is not None}
    values: dict[str, Any] = {"beta_slow": 1.0, "beta_fast": 32.0, "truncate": True} | written
    if kind == "yarn" and "factor" not in values and "original_max_position_embeddings" in values:
        longest = fields.get("max_position_embeddings")
        if isinstance(longest, int) and longest > 0:
            values["factor"] = longest / values["original_max_position_embeddings"]
    missing = [name for name in SCALINGS[kind] if name not in values]
    if missing:
        raise UserError(
            f"rope_parameters.{missing[0]}", f"has no value, which rope_type {kind!r} needs", "correct config.json"
        )
    numbers: Any = [float(values[name]) for name in SCALINGS[kind]]
    scaling = RopeScaling(kind, *numbers)
    if kind != "yarn":
        return scaling
    factor = _yarn_factor(scaling.factor)
    if "mscale" in written and "mscale_all_dim" in written:
        factor = _yarn_factor(scaling.factor, written["mscale"])
        factor /= _yarn_factor(scaling.factor, written["mscale_all_dim"])
    factor *= written.get("attn_factor", 1.0)
    return scaling._replace(
        attention_factor=float(written.get("attention_factor", factor)), truncate=values["truncate"]
    )


def _yarn_factor(length_factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor on cos and sin for a context that is `length_factor` times as long as the original."""
    if length_factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(length_factor) + 1.0
