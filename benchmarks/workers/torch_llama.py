"""Llama in plain torch functions, for a decode loop with a static cache and for updates.

Queries, keys and values are one matrix, gate and up another. Weights are float32; `cast` gives the weights of a compute
dtype, through which gradients go back.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

LAYER = ("qkv", "out", "gate_up", "down", "attention_norm", "mlp_norm")


class Sizes(NamedTuple):
    """Of config.json."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    epsilon: float


def language_model(folder: Path, device: torch.device) -> PreTrainedModel:
    """transformers' float32 model of a folder; random weights, drawn on the device, if the folder has none."""
    if any(folder.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    with device:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)


def load(folder: Path, device: torch.device) -> tuple[Sizes, dict[str, Tensor]]:
    """Sizes and float32 weights of a folder, leaves of gradients."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    sizes = Sizes(
        config["num_hidden_layers"],
        heads,
        config["num_key_value_heads"],
        config.get("head_dim") or config["hidden_size"] // heads,
        theta,
        config["rms_norm_eps"],
    )
    read = {}
    for file in sorted(folder.glob("*.safetensors")):
        read |= {name.removeprefix("model."): tensor.float() for name, tensor in load_file(file).items()}
    if not read:
        drawn = language_model(folder, device).state_dict()
        read = {name.removeprefix("model."): tensor for name, tensor in drawn.items()}
    weights = {"embedding": read["embed_tokens.weight"], "norm": read["norm.weight"]}
    if "lm_head.weight" in read and not config["tie_word_embeddings"]:
        weights["head"] = read["lm_head.weight"]
    for layer in range(sizes.layers):
        here, of = f"layers.{layer}.", f"{layer}."
        weights |= {
            f"{of}qkv": torch.cat([read[f"{here}self_attn.{name}_proj.weight"] for name in "qkv"]),
            f"{of}out": read[f"{here}self_attn.o_proj.weight"],
            f"{of}gate_up": torch.cat([read[f"{here}mlp.{name}_proj.weight"] for name in ("gate", "up")]),
            f"{of}down": read[f"{here}mlp.down_proj.weight"],
            f"{of}attention_norm": read[f"{here}input_layernorm.weight"],
            f"{of}mlp_norm": read[f"{here}post_attention_layernorm.weight"],
        }
    return sizes, {name: weight.to(device).requires_grad_() for name, weight in weights.items()}


def cast(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights in the compute dtype; the norms' stay float32."""
    return {name: weight if name.endswith("norm") else weight.to(dtype) for name, weight in weights.items()}


def scores(weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """Vocabulary scores."""
    return F.linear(hidden, weights.get("head", weights["embedding"]))


def rotary(sizes: Sizes, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [time, head_dim/2] of positions [time]."""
    exponent = torch.arange(0, sizes.head_dim, 2, device=positions.device, dtype=torch.float32) / sizes.head_dim
    angles = positions[:, None].float() * sizes.theta**-exponent
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _normed(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), scale, epsilon).to(x.dtype)


def block(sizes: Sizes, weights: dict[str, Tensor], hidden: Tensor, angles: tuple[Tensor, Tensor], attend, context):
    """One layer: the new hidden states, and the keys and values of these tokens."""
    rows, time, _ = hidden.shape
    widths = [count * sizes.head_dim for count in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
    projected = F.linear(_normed(hidden, weights["attention_norm"], sizes.epsilon), weights["qkv"])
    q, k, v = (part.view(rows, time, -1, sizes.head_dim).transpose(1, 2) for part in projected.split(widths, dim=-1))
    k = _rotated(k, *angles)
    mixed = attend(_rotated(q, *angles), k, v, *context)
    hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), weights["out"])
    gate, up = F.linear(_normed(hidden, weights["mlp_norm"], sizes.epsilon), weights["gate_up"]).chunk(2, -1)
    return hidden + F.linear(F.silu(gate) * up, weights["down"]), k, v


def run(
    sizes: Sizes, weights: dict[str, Tensor], tokens: Tensor, positions: Tensor, attend, contexts=None, block=block
) -> tuple[Tensor, list]:
    """Final hidden states of tokens [rows, time] at positions [time], and each layer's keys and values.

    Args:
        attend: (queries [rows, heads, time, head_dim], keys, values [rows, kv_heads, time, head_dim], *context) →
            the attention output, in the queries' shape.
        contexts: each layer's further arguments of `attend`.
        block: `block`, or its compiled form.
    """
    hidden = F.embedding(tokens, weights["embedding"])
    angles, kept = rotary(sizes, positions), []
    for layer in range(sizes.layers):
        own = {name: weights[f"{layer}.{name}"] for name in LAYER}
        hidden, *pair = block(sizes, own, hidden, angles, attend, contexts[layer] if contexts else ())
        kept.append(tuple(pair))
    return _normed(hidden, weights["norm"], sizes.epsilon), kept


def sdpa(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """torch's attention, causal where no mask is given; keys and values may have fewer heads."""
    grouped = queries.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


def after_prompts(q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, mask: Tensor) -> Tensor:
    """Attention of completions to their prompts and themselves; a group has one copy of its prompt's."""
    group = len(q) // len(prompt_k)
    k, v = (torch.cat([old.repeat_interleave(group, 0), new], 2) for old, new in ((prompt_k, k), (prompt_v, v)))
    return sdpa(q, k, v, mask)


def completion_hidden(
    sizes: Sizes, weights: dict[str, Tensor], prompts: Tensor, completions: Tensor, shared: bool, block=block
) -> Tensor:
    """Hidden states that score each token of the completions, [rows, time, hidden].

    Args:
        completions: rows of one prompt follow each other.
        shared: run each prompt once; otherwise with each of its completions, as most code does.
        block: `block`, or its compiled form.
    """
    group, before = len(completions) // len(prompts), prompts.shape[1]
    if not shared:
        tokens = torch.cat([prompts.repeat_interleave(group, 0), completions[:, :-1]], 1)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return run(sizes, weights, tokens, positions, sdpa, block=block)[0][:, before - 1 :]
    positions = torch.arange(before + completions.shape[1] - 1, device=prompts.device)
    hidden, kept = run(sizes, weights, prompts, positions[:before], sdpa, block=block)
    mask = positions <= positions[before:, None]
    contexts = [(*pair, mask) for pair in kept]
    rest, _ = run(sizes, weights, completions[:, :-1], positions[before:], after_prompts, contexts, block)
    return torch.cat([hidden[:, -1:].repeat_interleave(group, 0), rest], 1)
