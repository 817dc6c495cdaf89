"""The least work and memory traffic of a step, and the share of a device's peak that follows from a time.

The work is counted once for all systems: prompts run once a group, also if a system repeats them. A system that repeats
work shows a lower share, not a longer list of work.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

# Peaks of the accelerators of recjax.planning.targets, from the makers' data sheets: FLOP/s of dense bfloat16 matmuls
# (float16 for a device without bfloat16), and bytes/s of memory.
SPEEDS = {
    "t4-16": {"flops": 65e12, "bytes": 0.32e12},
    "v5e-16": {"flops": 197e12, "bytes": 0.819e12},
    "l4-24": {"flops": 121e12, "bytes": 0.3e12},
    "rtx4090-24": {"flops": 165e12, "bytes": 1.008e12},
    "v4-32": {"flops": 275e12, "bytes": 1.2e12},
    "v6e-32": {"flops": 918e12, "bytes": 1.64e12},
    "a100-40": {"flops": 312e12, "bytes": 1.555e12},
    "l40s-48": {"flops": 362e12, "bytes": 0.864e12},
    "a100-80": {"flops": 312e12, "bytes": 2.039e12},
    "h100-80": {"flops": 989e12, "bytes": 3.35e12},
    "v5p-95": {"flops": 459e12, "bytes": 2.765e12},
    "h200-141": {"flops": 989e12, "bytes": 4.8e12},
    "b200-180": {"flops": 2250e12, "bytes": 8e12},
}
# By JAX's names of the devices.
PEAKS = {
    "NVIDIA H100 80GB HBM3": SPEEDS["h100-80"],
    "NVIDIA H200": SPEEDS["h200-141"],
    "NVIDIA A100-SXM4-80GB": SPEEDS["a100-80"],
    "TPU v5 lite": SPEEDS["v5e-16"],
    "TPU v5p": SPEEDS["v5p-95"],
    "TPU v6 lite": SPEEDS["v6e-32"],
}
FORMULAS = {
    "update FLOPs": "3 · (2 · W · (N·P + B·T) + 2 · h · V · B·T + attention), attention = 4 · L · H · d · pairs,"
    " pairs = N·P·(P+1)/2 + B·(T·P + T·(T+1)/2)",
    "decode FLOPs": "2 · (W + h·V) · B·T + attention of the completions",
    "decode bytes": "s · Σ over t < T of (W + h·V + 2 · L · K · d · (N·P + B·t)): weights once a token, each prompt's"
    " keys and values once a group, each row's own once",
    "letters": "W weights of the layers, h hidden size, V vocabulary, L layers, H heads, K key-value heads, d head"
    " size, N prompts, P prompt tokens, B rows, T mean completion tokens, s bytes a number",
    "share of peak": "FLOPs or bytes / seconds / the device's peak",
}


class Work(NamedTuple):
    """The least work of one phase; bytes is None where memory does not limit it."""

    flops: float
    bytes: float | None


def work_of(shape: Mapping[str, Any], config: Mapping[str, Any], precision: str, tokens: float) -> dict[str, Work]:
    """The least work of `update` and of `decode`, for completions of `tokens` tokens in all.

    Args:
        config: the model's config.json.
    """
    weights, head, a_pair, a_token = _sizes(config)
    prompts, before, rows = shape["prompts"], shape["prompt_tokens"], shape["rows"]
    drawn = tokens / rows
    of_completions = a_pair * rows * (drawn * before + drawn * (drawn + 1) / 2)
    of_prompts = a_pair * prompts * before * (before + 1) / 2
    forward = 2 * weights * (prompts * before + tokens) + 2 * head * tokens + of_prompts + of_completions
    size = 2 if precision == "bfloat16" else 4
    read = drawn * (weights + head + a_token * prompts * before) + a_token * rows * drawn * (drawn - 1) / 2
    return {
        "update": Work(3 * forward, None),
        "decode": Work(2 * (weights + head) * tokens + of_completions, size * read),
    }


def decode_bytes(
    shape: Mapping[str, Any], config: Mapping[str, Any], precision: str, lengths: np.ndarray
) -> tuple[float, float]:
    """The least bytes that decoding completions of uneven lengths reads, if all begin together: of weights, of caches.

    Args:
        config: the model's config.json.
        lengths: tokens of each completion, [prompts, completions of a group].
    """
    weights, head, _, a_token = _sizes(config)
    size = 2 if precision == "bfloat16" else 4
    of_prompts = shape["prompt_tokens"] * lengths.max(axis=1).sum()  # a prompt is read until its last completion ends
    of_completions = (lengths * (lengths - 1) / 2).sum()
    return float(size * lengths.max() * (weights + head)), float(size * a_token * (of_prompts + of_completions))


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Weights of the layers and of the head; FLOPs of a pair of tokens in attention; numbers that a token caches."""
    layers, heads, kv_heads = (
        config[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads")
    )
    hidden, width = config["hidden_size"], config.get("head_dim") or config["hidden_size"] // heads
    matrices = hidden * width * 2 * (heads + kv_heads) + 3 * hidden * config["intermediate_size"]
    return layers * matrices, hidden * config["vocab_size"], 4 * layers * heads * width, 2 * layers * kv_heads * width


def shares(work: Work, seconds: float, peak: Mapping[str, float]) -> dict[str, float]:
    """Work and the share of the peak that it is done at."""
    found = {"flops": work.flops, "flops_share": work.flops / seconds / peak["flops"]}
    if work.bytes is not None:
        found |= {"bytes": work.bytes, "bytes_share": work.bytes / seconds / peak["bytes"]}
    return found
