"""The loader: every parameter where it belongs, every format, and an error that names what is wrong."""

import dataclasses
import gc
import json
import math
import time
import weakref

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from recjax.hub import weights
from recjax.hub.export import export_model
from recjax.hub.weights import fused_rows, load_pretrained, read_config, tensor_names
from recjax.models.decoder import abstract_params
from recjax.models.decoder_config import DecoderConfig, DeltaNet
from recjax.models.rotary import RopeScaling
from tests.marks import campaign_except, slow
from tests.tiny import params_of

CONFIG = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "tie_word_embeddings": False,
}
LAYER_SHAPES = {
    "input_layernorm": (8,),
    "self_attn.q_proj": (24, 8),
    "self_attn.k_proj": (12, 8),
    "self_attn.v_proj": (12, 8),
    "self_attn.o_proj": (8, 24),
    "post_attention_layernorm": (8,),
    "mlp.gate_proj": (12, 8),
    "mlp.up_proj": (12, 8),
    "mlp.down_proj": (8, 12),
}
SHAPES = {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,), "lm_head.weight": (11, 8)}
SHAPES |= {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in LAYER_SHAPES.items()}
DELTA = {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}
MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
KEY = "model.layers.1.self_attn.k_proj.weight"


def random_tensors(dtype=np.float32):
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def write_folder(folder, tensors, **changes):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_params_equal(params, tensors, layers=2):
    """Spelt out by hand, so that the loader's table is not checked against itself."""
    embedding, norm, head = params["embedding"], params["norm"], params["head"]
    np.testing.assert_array_equal(embedding["embedding"], tensors["model.embed_tokens.weight"].astype(np.float32))
    np.testing.assert_array_equal(norm["scale"], tensors["model.norm.weight"].astype(np.float32))
    np.testing.assert_array_equal(head["kernel"].T, tensors["lm_head.weight"].astype(np.float32))
    places = {
        "attention_norm": "input_layernorm",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    assert params["layers"].keys() == places.keys()
    for ours, theirs in places.items():
        for layer in range(layers):
            (values,) = (array[layer] for array in params["layers"][ours].values())
            expected = tensors[f"model.layers.{layer}.{theirs}.weight"].astype(np.float32)
            np.testing.assert_array_equal(values.T, expected, err_msg=f"{ours} {layer}")


@pytest.mark.slow
def test_the_host_holds_a_layers_tensor_at_a_time(tmp_path, monkeypatch):
    read, tensors, held = weights._read, [], []

    def tracked(opened, shape, index=None):
        for _ in range(100):  # a copy to the device may still run
            gc.collect()
            count = sum(tensor() is not None for tensor in tensors)
            if not count:
                break
            time.sleep(0.01)
        held.append(count)
        tensor = np.array(read(opened, shape, index))  # its views keep this copy
        if "layers" in opened.name:  # other tensors may be parameters without a copy
            tensors.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(weights, "_read", tracked)
    params = load_pretrained(write_folder(tmp_path, random_tensors()))[1]
    assert_params_equal(params, random_tensors())
    assert held == [0] * len(SHAPES) and all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("dtype", [*slow(np.float32, np.float16), ml_dtypes.bfloat16])
def test_every_tensor_lands_in_its_place_as_float32(tmp_path, dtype):
    tensors = random_tensors(dtype)
    config, params = load_pretrained(str(write_folder(tmp_path, tensors)))
    assert_params_equal(params, tensors)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    shapes = jax.tree.map(lambda leaf: leaf.shape, params)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, abstract_params(config))


def write_shards(folder, tensors=None, **changes):
    tensors = tensors or random_tensors()
    write_folder(folder, tensors, **changes)
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def test_shards_are_read_as_one_file_would_be(tmp_path):
    tensors = write_shards(tmp_path)
    assert_params_equal(load_pretrained(tmp_path)[1], tensors)


def test_a_tied_head_and_rotary_buffers_are_not_read(tmp_path):
    tensors = random_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    config, params = load_pretrained(write_folder(tmp_path, tensors, tie_word_embeddings=True))
    assert config.tie_embeddings and "head" not in params


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shards", [False, True])
def test_a_head_with_values_of_its_own_is_kept(tmp_path, monkeypatch, caplog, dtype, shards):
    monkeypatch.setattr(weights, "_COMPARED_ROWS", 4)
    tensors = random_tensors(dtype)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][-1, -1] += 1  # a single value of the last rows that are compared
    if shards:
        write_shards(tmp_path, tensors, tie_word_embeddings=True)
    else:
        write_folder(tmp_path, tensors, tie_word_embeddings=True)
    config, params = load_pretrained(tmp_path)
    assert not config.tie_embeddings and read_config(tmp_path) == config == weights.pretrained_config(tmp_path)
    assert_params_equal(params, tensors)
    assert "config.json sets tie_word_embeddings, but lm_head.weight differs" in caplog.text


def without_prefix(tensors):
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def with_joint_experts(tensors):
    """Tensors of all experts of a layer, as transformers 5 holds them: gate and up below each other."""
    joint = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        place = f"model.layers.{layer}.mlp"
        if f"model.layers.{layer}.block_sparse_moe.gate.weight" in joint:
            joint[f"{place}.gate.weight"] = joint.pop(f"model.layers.{layer}.block_sparse_moe.gate.weight")
        of_expert = [name for name in tensors if name.startswith(f"model.layers.{layer}.") and ".experts." in name]

        def stack(*ends, names=of_expert):
            return np.stack([tensors[name] for name in sorted(names) if name.split(".")[-2] in ends])

        up = np.concatenate([stack("gate_proj", "w1"), stack("up_proj", "w3")], axis=1)
        joint |= {f"{place}.experts.gate_up_proj": up, f"{place}.experts.down_proj": stack("down_proj", "w2")}
    return joint


LAYOUTS = {  # changes of CONFIG → the other layout
    "tied, the head alone": (
        {"tie_word_embeddings": True},
        lambda tensors: {name.replace("model.embed_tokens", "lm_head"): tensors[name] for name in tensors},
    ),
    "tied, from AutoModel": ({"tie_word_embeddings": True}, without_prefix),
    "not tied, without model.": ({}, without_prefix),
    "joint experts": (MOE, with_joint_experts),
    "joint experts of mixtral": (MIXTRAL, with_joint_experts),
}


@pytest.mark.parametrize("name", campaign_except(LAYOUTS, "joint experts", slow=["not tied, without model."]))
def test_all_transformers_layouts_give_the_same_parameters(tmp_path, name):
    changes, changed = LAYOUTS[name]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    config = read_config(tmp_path)
    params = jax.device_get(params_of(config))
    export_model(tmp_path / "usual", config, params, tmp_path)
    tensors = load_file(tmp_path / "usual" / "model.safetensors")
    other = changed(tensors)
    assert other.keys() != tensors.keys()
    again, read = load_pretrained(write_folder(tmp_path, other, **changes))
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, read, params)
    if "experts" in name:
        with pytest.raises(ValueError, match="first 'model.layers.0.mlp.experts.down_proj'"):
            load_pretrained(write_folder(tmp_path, other | tensors, **changes))


@pytest.mark.parametrize("beginning", ["_orig_mod.", "base_model.model.", "module."])
def test_wrapped_models_are_refused_by_their_tensor_names(tmp_path, beginning):
    write_folder(tmp_path, {beginning + name: tensor for name, tensor in random_tensors().items()})
    message = (
        rf"the tensors' names begin with '{beginning}', as in '{beginning}lm_head.weight'.* Save the model inside it"
    )
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path)


def test_a_tensor_under_two_names_is_refused(tmp_path):
    write_folder(tmp_path, random_tensors() | without_prefix(random_tensors()))
    with pytest.raises(ValueError, match="20 tensors that config.json does not call for, first 'embed_tokens.weight'"):
        load_pretrained(tmp_path)


def test_a_head_of_a_different_shape_is_refused(tmp_path):
    tensors = random_tensors() | {"lm_head.weight": np.ones((12, 8), np.float32)}
    with pytest.raises(ValueError, match=r"model.safetensors: tensor 'lm_head.weight' has shape \(12, 8\), but config"):
        load_pretrained(write_folder(tmp_path, tensors, tie_word_embeddings=True))


def test_hub_weights_are_read_to_detect_an_untied_head(tmp_path, monkeypatch):
    write_folder(tmp_path, random_tensors(), tie_word_embeddings=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "later")

    def served(name, allow_patterns):
        if "model*.safetensors" in allow_patterns:
            (tmp_path / "later").rename(tmp_path / "model.safetensors")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", served)
    assert not weights.pretrained_config("someone/model").tie_embeddings


@pytest.mark.parametrize("tied", [True, False])
def test_names_cover_the_parameter_tree_once_each(tied):
    config = DecoderConfig(11, 8, 12, 2, 4, 2, 6, tie_embeddings=tied)
    names = tensor_names(config)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(abstract_params(config))]
    assert sorted(names) == sorted(jax.tree_util.keystr(path, simple=True, separator="/") for path in paths)
    flat = [name for group in names.values() for name in group]
    assert sorted(flat) == sorted(SHAPES.keys() - ({"lm_head.weight"} if tied else set()))


def test_fused_delta_nets_keep_each_key_heads_rows_together():
    net = DeltaNet((True, False), key_heads=2, value_heads=4, key_dim=1, value_dim=1, kernel=3, fused=True)
    rows = fused_rows(DecoderConfig(11, 8, 12, 2, 4, 2, 6, delta=net))
    found = {path: (fused.rows.tolist(), fused.count) for path, fused in rows.items()}
    # The tensors hold q k v v z z and b b a a of the first key head, then of the second.
    assert found == {
        "layers/0/delta_inputs/kernel": ([0, 6, 1, 7, 2, 3, 8, 9], 12),
        "layers/0/delta_gate/kernel": ([4, 5, 10, 11], 12),
        "layers/0/delta_rate/kernel": ([0, 1, 4, 5], 8),
        "layers/0/delta_decay/kernel": ([2, 3, 6, 7], 8),
    }


def test_a_predictor_of_further_tokens_is_skipped_aloud(tmp_path, caplog):
    tensors = random_tensors() | {"mtp.layers.0.fc.weight": np.ones((2, 2), np.float32)}
    assert_params_equal(load_pretrained(write_folder(tmp_path, tensors))[1], tensors)
    assert "skips 1 other tensors, such as mtp.layers.0.fc.weight" in caplog.text


GEMMA = {"activation": "gelu_tanh", "norm_offset": 1.0, "post_norms": True, "embedding_scale": 8**0.5}
LINEAR = {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 7.0, "factor": 4.0, "original_max_position_embeddings": 16}
BY_LAYER = {"sliding_attention": {"rope_type": "default", "rope_theta": 7.0}, "full_attention": YARN}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 500.0, None),
        ({"rope_parameters": LINEAR}, 7.0, RopeScaling("linear", 2.0)),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0} | LLAMA3},
            7.0,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
        ),
        ({"rope_parameters": None, "rope_theta": 9.0}, 9.0, None),  # how transformers 4 wrote it, here and below
        (
            {"rope_parameters": None, "rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
            9.0,
            RopeScaling("linear", 4.0),
        ),
        ({"rope_parameters": None}, 10000.0, None),
        # transformers takes the factor from the lengths.
        (
            {"rope_parameters": YARN | {"factor": None}, "max_position_embeddings": 64},
            7.0,
            RopeScaling("yarn", 4.0, 1.0, 32.0, 16, attention_factor=0.1 * math.log(4) + 1),
        ),
        # DeepSeek-R1-0528-Qwen3-8B's, read as vLLM does
        (
            {"model_type": "qwen3", "rope_parameters": YARN | {"attn_factor": 0.8782488562869419}},
            7.0,
            RopeScaling("yarn", 4.0, 1.0, 32.0, 16, attention_factor=pytest.approx(1.0, abs=1e-12)),
        ),
    ],
)
def test_config_fields(tmp_path, changes, theta, scaling):
    fields = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_config(tmp_path)
    assert (config.rope_theta, config.rope_scaling, config.norm_epsilon) == (theta, scaling, 1e-6)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 6)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (11, 8, 12)
    assert not config.tie_embeddings
    hash(config)


ALTERNATING = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"pretraining_tp": 2, "unsloth_version": "1"}, {}),
        ({"model_type": "mistral", "sliding_window": 5}, {"windows": (5, 5)}),
        ({"model_type": "mistral", "sliding_window": None}, {}),
        ({"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": False}, {"qkv_bias": True}),
        (
            {"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
            {"qkv_bias": True, "windows": (None, 5)},
        ),
        (
            {"model_type": "qwen3", "sliding_window": 5, "use_sliding_window": True, "layer_types": ALTERNATING},
            {"qk_norm": True, "windows": (5, None)},
        ),
        ({"model_type": "seed_oss", "attention_dropout": 0.1, "residual_dropout": 0.1}, {"qkv_bias": True}),
        ({"model_type": "internlm3", "qkv_bias": False, "bias": False}, {}),
        ({"model_type": "ministral", "sliding_window": 5, "layer_types": ALTERNATING}, {"windows": (5, None)}),
        ({"model_type": "smollm3"}, {}),
        ({"model_type": "smollm3", "no_rope_layer_interval": 2}, {"rope_layers": (True, False)}),
        ({"model_type": "smollm3", "no_rope_layers": [0, 1, 0]}, {"rope_layers": (False, True)}),
        (
            {"model_type": "gemma2", "query_pre_attn_scalar": 4, "sliding_window": 5, "final_logit_softcapping": None},
            GEMMA | {"windows": (5, None), "attention_scale": 0.5, "attention_cap": 50.0},
        ),
        (
            {"model_type": "gemma3_text", "query_pre_attn_scalar": 4, "sliding_window": 5, "sliding_window_pattern": 2}
            | {"rope_local_base_freq": 30.0},
            GEMMA | {"windows": (5, None), "attention_scale": 0.5, "local_rope_theta": 30.0, "qk_norm": True},
        ),
    ],
)
def test_config_fields_of_families(tmp_path, changes, options):
    rope = {"rope_theta": 500.0}  # as transformers 4 wrote it
    fields = {name: value for name, value in CONFIG.items() if name != "rope_parameters"} | rope | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    plain = DecoderConfig(11, 8, 12, 2, 4, 2, 6, rope_theta=500.0, norm_epsilon=1e-6, tie_embeddings=False)
    assert read_config(tmp_path) == dataclasses.replace(plain, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "dbrx"}, "model_type 'dbrx': is not supported; use a model of type llama, mistral, "),
        ({"model_type": None}, "model_type None: is not supported"),
        (
            {"residual_multiplier": 0.2, "top": 1},
            r"residual_multiplier = 0.2: is not a known .* \(all unknown: resid.*, top\)",
        ),
        (
            MOE | {"mlp_only_layers": [0, 1]},
            r"mlp_only_layers = \[0, 1\], decoder_sparse_step = 1: no layer has experts",
        ),
        (MOE | {"decoder_sparse_step": 3}, "decoder_sparse_step = 3: no layer has experts"),
        (MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step = 0: takes a finite number above 0"),
        (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 4 experts: takes at most all"),
        (MOE | {"num_experts": 0}, "num_.*experts = 0: takes a finite number above 0"),
        (MOE | {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size = 8: is not a known field"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv = 8.0: is not supported, only None"),
        (
            {"model_type": "mixtral", "router_jitter_noise": 0.1},
            "router_jitter_noise = 0.1: is not supported, only 0.0",
        ),
        ({"head_dim": "wide"}, "this is no model config"),
        ({"attention_bias": True}, "attention_bias = True: is not supported, only False"),
        ({"mlp_bias": True}, "mlp_bias = True: is not supported, only False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': is not supported, only 'silu'"),
        ({"rope_interleaved": True}, "rope_interleaved = True: is not supported, only False"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: is not supported, only 1.0"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1: is not supported, only 0.0"),
        ({"sliding_window": 64}, "sliding_window = 64: is not supported, only None"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config = .*: is not supported, only None"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 7.0, "factor": 2.0}},
            "rope_type 'dynamic': is not supported; use a model with default, linear, llama3, yarn",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5: is not supported, only 1.0",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0, "mrope_section": [1, 2]}},
            r"rope_parameters.mrope_section = \[1, 2\]: is not supported; use another model",
        ),
        ({"model_type": "qwen2", "use_mrope": True}, "use_mrope = True: is not supported, only False"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias = True: is not supported, only False"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]},
            r"layer_types\[1\] = 'linear_attention': is not supported; only full and sliding attention are",
        ),
        ({"model_type": "qwen3_5_text", "attn_output_gate": False}, "attn_output_gate = False: is not supported"),
        ({"model_type": "qwen3_5_text", "mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]: is not supported"),
        (
            {"model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 2},
            "2 of them linear_attention: it takes",
        ),
        (
            {"model_type": "qwen3_next", "use_sliding_window": True},
            "use_sliding_window = True: is not supported, only False",
        ),
        (DELTA | {"model_type": "qwen3_next", "mlp_only_layers": [0, 1]}, "no layer has experts"),
        (DELTA | {"linear_num_value_heads": 24}, "takes a multiple of linear_num_key_heads = 16"),
        ({"model_type": "qwen3_5_text", "linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim = 0: takes a finite"),
        (
            {"model_type": "qwen3_5_text", "layer_types": ["full_attention", "sliding_attention"]},
            "only full and linear",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]},
            r"layer_types\[1\] = 'chunked_attention': is not supported",
        ),
        (
            {"model_type": "qwen2", "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types\[1\] = 'sliding_attention', but sliding_window = None and use_sliding_window = False",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [1], "layer_types": ["full_attention"] * 2},
            "no_rope_layers has 1 entries for 2 layers",
        ),
        (
            {"model_type": "gemma2", "hidden_act": "gelu"},
            "hidden_act = 'gelu': is not supported, only 'gelu_pytorch_tanh'",
        ),
        (
            {"model_type": "gemma2", "use_bidirectional_attention": True},
            "use_bidirectional_attention = True: is not supported, only False",
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping = 50.0: is not supported, only None",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": LINEAR, "full_attention": LINEAR}},
            "sliding_attention = .* only rope_type 'default' is supported there",
        ),
        *(
            (
                {"model_type": kind, "rope_parameters": YARN},
                "rope_parameters.factor = 4.0: .* take settings by layer type",
            )
            for kind in ("olmo3", "gemma3_text")
        ),
        *(
            (
                {"model_type": kind, "rope_parameters": BY_LAYER},
                f"models of type '{kind}' have no settings by layer type",
            )
            for kind in ("qwen3", "smollm3", "phi3", "mistral")
        ),
        (
            {"model_type": "smollm3", "rope_parameters": {"full_attention": YARN}},
            "rope_parameters.full_attention: models of type 'smollm3' have no settings by layer type",
        ),
        (
            {"rope_parameters": YARN | {"attn_factor": 0.9, "attention_factor": 1.1}},
            "rope_parameters.attn_factor = 0.9: is not supported",
        ),
        ({"rope_parameters": LINEAR | {"attn_factor": 0.9}}, "rope_parameters.attn_factor = 0.9: is not supported"),
        ({"rope_parameters": YARN | {"attn_factor": "high"}}, "rope_parameters.attn_factor = 'high': takes a finite"),
        (
            {"model_type": "gpt_oss"},
            "model_type 'gpt_oss': is not supported: the decoder lacks attention sinks, .*llama,",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0}}, "is no model config .*'high_freq_factor'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0}}, "is no model config .* {'factor'}"),
    ],
)
def test_refused_configs(tmp_path, changes, message):
    with pytest.raises(ValueError, match=f"config.json.*{message}"):
        load_pretrained(write_folder(tmp_path, random_tensors(), **changes))


def without(name):
    return {key: value for key, value in random_tensors().items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without(KEY), rf"1 tensors .* none of the safetensors files, first '{KEY}'; check num_hidden_layers"),
        (without("lm_head.weight"), "first 'lm_head.weight'; check num_hidden_layers and tie_word_embeddings"),
        (random_tensors() | {"score.weight": np.ones(3)}, r"model.safetensors: 1 tensors .* first 'score.weight'"),
        (
            random_tensors() | {KEY: np.ones((8, 12), np.float32)},
            rf"model.safetensors: tensor '{KEY}' has shape \(8, 12\), but config.json asks for \(12, 8\); use the",
        ),
        (random_tensors() | {KEY: np.ones((12, 8), np.int8)}, f"tensor '{KEY}' has dtype I8; save it as float32"),
    ],
)
def test_refused_tensors(tmp_path, tensors, message):
    with pytest.raises(ValueError, match=message):
        load_pretrained(write_folder(tmp_path, tensors))


def test_weights_of_another_family(tmp_path):
    with pytest.raises(ValueError, match="6 tensors .* none of .* first 'model.layers.0.self_attn.k_proj.bias'"):
        load_pretrained(write_folder(tmp_path, random_tensors(), model_type="qwen2"))
    biases = {f"model.layers.0.self_attn.{name}_proj.bias": np.ones(12, np.float32) for name in "kv"}
    with pytest.raises(ValueError, match="2 tensors .* not call for, first 'model.layers.0.self_attn.k_proj.bias'"):
        load_pretrained(write_folder(tmp_path, random_tensors() | biases))


@pytest.mark.parametrize("kept", [5, 100, -3])
def test_truncated_file(tmp_path, kept):
    file = write_folder(tmp_path, random_tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match="model.safetensors: is truncated or damaged .* fetch the file again"):
        load_pretrained(tmp_path)


def test_missing_files(tmp_path):
    with pytest.raises(ValueError, match="holds no config.json; give a Hugging Face style model folder"):
        load_pretrained(tmp_path)
    for text in ("{", "[1]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="config.json: is no model config .* fetch the file again"):
            load_pretrained(tmp_path)
    write_folder(tmp_path, random_tensors())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights; give a folder with model.safetensors"):
        load_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"only pickle files \['pytorch_model.bin'\].* give a folder with"):
        load_pretrained(tmp_path)


def test_shard_errors(tmp_path):
    write_shards(tmp_path)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    save_file({name: value for name, value in load_file(first).items() if name != KEY}, first)
    with pytest.raises(ValueError, match=f"first '{KEY}'"):
        load_pretrained(tmp_path)
    second.unlink()
    with pytest.raises(ValueError, match="names the shard model-00002-of-00002.safetensors, which is missing"):
        load_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="index.json: is no safetensors index"):
        load_pretrained(tmp_path)


def test_an_adapter_beside_a_model_is_refused_early(tmp_path):
    write_folder(tmp_path, random_tensors())
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    for read in (load_pretrained, weights.pretrained_config):
        with pytest.raises(
            ValueError, match="holds adapter_config.json next to a model, .* name it in model.adapter, or"
        ):
            read(tmp_path)


def test_hub(tmp_path, monkeypatch):
    def served(name, allow_patterns):
        assert name == "someone/model" and "model*.safetensors" in allow_patterns and "*.json" in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", served)
    tensors = random_tensors()
    write_folder(tmp_path, tensors)
    assert_params_equal(load_pretrained("someone/model")[1], tensors)

    def unreachable(name, allow_patterns):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"'someone/model': is no local folder.*\(no network\); give a local folder"):
        load_pretrained("someone/model")
