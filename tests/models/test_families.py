"""Every model family against transformers: logits, log-probabilities, gradients, padding, packing and the cache."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.models.decoder import Decoder, DecoderConfig, logits
from recjax.models.logprobs import Sampling, completion_logprobs
from recjax.models.weights import load_pretrained, tensor_names
from recjax.rollout.sampler import sample

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 5, "sliding_window": 4, "final_logit_softcapping": 3.0}
MODELS = {
    "llama": {
        "model_type": "llama",
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16},
        "tie_word_embeddings": False,
    },
    "qwen2": {"model_type": "qwen2", "rope_parameters": ROPE, "tie_word_embeddings": True},
    "qwen2, windows above layer 1": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "rope_parameters": ROPE, "head_dim": 12},
    "mistral": {"model_type": "mistral", "rope_parameters": ROPE, "sliding_window": 4},
    "smollm3": {"model_type": "smollm3", "rope_parameters": ROPE, "no_rope_layers": [1, 0]},
    "gemma2": GEMMA | {"model_type": "gemma2", "rope_parameters": ROPE, "attn_logit_softcapping": 1.5},
    "gemma3_text": GEMMA
    | {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
        },
    },
}
PROMPTS, GROUP = (3, 6), 2  # lengths; completions a prompt
COMPLETIONS = (5, 8, 1, 4)


class Loaded(NamedTuple):
    """One family's random checkpoint as loaded here, and what transformers computes with it.

    `sequences` are prompts with their completions, `scores` their logits; `gradients` are those of the completions'
    summed log-probability, by Hugging Face name.
    """

    config: DecoderConfig
    params: dict
    sequences: list[np.ndarray]
    scores: list[np.ndarray]
    gradients: dict[str, np.ndarray]


@pytest.fixture(scope="module", params=MODELS)
def loaded(request, tmp_path_factory):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    fields = SIZES | MODELS[request.param]
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-1.0, 1.0)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    random = np.random.default_rng(0)
    lengths = [prompt + GROUP * [] if False else prompt for prompt in np.repeat(PROMPTS, GROUP)]
    prompts = [random.integers(0, 40, length) for length in PROMPTS]
    sequences, scores, total = [], [], 0.0
    for row, length in enumerate(COMPLETIONS):
        prompt = prompts[row // GROUP]
        sequence = torch.tensor(np.concatenate([prompt, random.integers(0, 40, length)]))
        output = model(input_ids=sequence[None]).logits[0]
        chosen = output[:-1].log_softmax(-1).gather(-1, sequence[1:, None])
        total += chosen[lengths[row] - 1 :].sum()
        sequences.append(sequence.numpy())
        scores.append(output.detach().numpy())
    total.backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return Loaded(*load_pretrained(folder), sequences, scores, gradients)
