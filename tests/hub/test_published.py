"""config.json of real models: parameter names, shapes and counts are the published ones; no weights are needed."""

import functools
import json

import jax
import pytest

from recjax.hub.weights import read_config, tensor_names
from recjax.models.decoder import abstract_params

SAVED = {"initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16", "transformers_version": "4.43.1"}
PLAIN = SAVED | {"hidden_act": "silu", "attention_dropout": 0.0}
LLAMA = PLAIN | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False}
LLAMA |= {"mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "bos_token_id": 128000, "eos_token_id": 128001}
LLAMA |= {"rope_theta": 500000.0, "max_position_embeddings": 131072, "vocab_size": 128256, "num_key_value_heads": 8}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"rope_type": "llama3"}
QWEN = PLAIN | {"bos_token_id": 151643, "eos_token_id": 151645, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0}
QWEN |= {"use_sliding_window": False, "max_position_embeddings": 32768, "vocab_size": 151936}
GEMMA = SAVED | {"attention_bias": False, "attention_dropout": 0.0, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA |= {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "cache_implementation": "hybrid", "head_dim": 256}
GEMMA |= {"num_hidden_layers": 26, "rms_norm_eps": 1e-06, "query_pre_attn_scalar": 256, "intermediate_size": 6912}

# How many parameters each model is published with, and what its config.json says (of token ids: not for each model).
PUBLISHED = {
    "Qwen2.5-1.5B-Instruct": (
        1_543_714_304,
        QWEN
        | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
        | {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
        | {"num_hidden_layers": 28, "max_window_layers": 21, "sliding_window": 32768},
    ),
    "Qwen2.5-7B-Instruct": (
        7_615_616_512,
        QWEN
        | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False}
        | {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
        | {"num_hidden_layers": 28, "max_window_layers": 28, "sliding_window": 131072, "vocab_size": 152064},
    ),
    "Llama-3.2-3B": (
        3_212_749_824,
        LLAMA
        | {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_hidden_layers": 28}
        | {"head_dim": 128, "tie_word_embeddings": True, "rope_scaling": LLAMA3 | {"factor": 32.0}},
    ),
    "Llama-3.1-8B": (
        8_030_261_248,
        LLAMA
        | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}
        | {"tie_word_embeddings": False, "rope_scaling": LLAMA3 | {"factor": 8.0}},
    ),
    "Qwen3-4B": (
        4_022_468_096,
        QWEN
        | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
        | {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"num_hidden_layers": 36, "max_window_layers": 36, "sliding_window": None, "head_dim": 128}
        | {"attention_bias": False, "rope_scaling": None, "max_position_embeddings": 40960},
    ),
    "SmolLM2-135M": (
        134_515_008,
        LLAMA
        | {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
        | {"num_hidden_layers": 30, "rope_theta": 100000, "rope_scaling": None, "vocab_size": 49152}
        | {"tie_word_embeddings": True, "is_llama_config": True, "rope_interleaved": False},
    ),
    "SmolLM3-3B": (
        3_075_098_624,
        LLAMA
        | {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "pretraining_tp": 2}
        | {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 4}
        | {"num_hidden_layers": 36, "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4}
        | {"layer_types": ["full_attention"] * 36, "max_window_layers": 28, "use_sliding_window": False}
        | {"sliding_window": None, "rope_scaling": None, "bos_token_id": None, "_name_or_path": "checkpoint"}
        | {"rms_norm_eps": 1e-06, "rope_theta": 5000000.0, "max_position_embeddings": 65536}
        | {"tie_word_embeddings": True},
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        PLAIN
        | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2}
        | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"num_hidden_layers": 32, "sliding_window": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-05}
        | {"max_position_embeddings": 32768, "tie_word_embeddings": False, "vocab_size": 32000},
    ),
    "gemma-2-2b": (
        2_614_341_888,
        GEMMA
        | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}
        | {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rope_theta": 10000.0}
        | {"sliding_window": 4096, "max_position_embeddings": 8192, "vocab_size": 256000},
    ),
    "gemma-3-1b-it": (
        999_885_952,
        GEMMA
        | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "eos_token_id": [1, 106]}
        | {"hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_theta": 1000000}
        | {"rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 512, "sliding_window_pattern": 6}
        | {"max_position_embeddings": 32768},
    ),
}
WINDOWS = {
    "Mistral-7B-v0.1": (4096,) * 32,
    "gemma-2-2b": (4096, None) * 13,
    "gemma-3-1b-it": ((512,) * 5 + (None,)) * 4 + (512,) * 2,
}


@pytest.fixture(scope="module", params=PUBLISHED)
def published(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(PUBLISHED[request.param][1]))
    return request.param, folder, read_config(folder)


@pytest.mark.campaign
def test_names_and_shapes_are_those_of_transformers(published):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    _, folder, config = published
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    params, actual = abstract_params(config), {}
    for path, names in tensor_names(config).items():
        shape = functools.reduce(lambda tree, key: tree[key], path.split("/"), params).shape
        shape = shape[1:] if path.startswith("layers/") else shape
        actual |= dict.fromkeys(names, shape[::-1] if path.endswith("/kernel") else shape)
    assert actual == expected


def test_counts_and_options_are_the_published_ones(published):
    name, _, config = published
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config))) == PUBLISHED[name][0]
    assert config.windows == WINDOWS.get(name, ())
    assert config.rope_layers == ((True, True, True, False) * 9 if name == "SmolLM3-3B" else ())
    assert (config.rope_theta, config.local_rope_theta) == (
        PUBLISHED[name][1]["rope_theta"],
        10000.0 if name == "gemma-3-1b-it" else None,
    )
    scaling = PUBLISHED[name][1].get("rope_scaling")
    assert (config.rope_scaling and config.rope_scaling.factor) == (scaling and scaling["factor"])
