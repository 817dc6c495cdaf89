"""The least work and memory traffic of a step, and the share of a device's peak that follows from a time.

The work is counted once for all systems: prompts run once a group, also if a system repeats them. A system that repeats
work shows a lower share, not a longer list of work.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

# FLOP/s in bfloat16 without sparsity and bytes/s of memory, from the makers' data sheets.
PEAKS = {
    "NVIDIA H100 80GB HBM3": {"flops": 989e12, "bytes": 3.35e12},
    "NVIDIA H200": {"flops": 989e12, "bytes": 4.8e12},
    "NVIDIA A100-SXM4-80GB": {"flops": 312e12, "bytes": 2.039e12},
    "TPU v5 lite": {"flops": 197e12, "bytes": 0.819e12},
    "TPU v5p": {"flops": 459e12, "bytes": 2.765e12},
    "TPU v6 lite": {"flops": 918e12, "bytes": 1.64e12},
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
    layers, heads, kv_heads = (
        config[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads")
    )
    hidden, width = config["hidden_size"], config.get("head_dim") or config["hidden_size"] // heads
    matrices = hidden * width * 2 * (heads + kv_heads) + 3 * hidden * config["intermediate_size"]
    weights, head = layers * matrices, hidden * config["vocab_size"]
    prompts, before, rows = shape["prompts"], shape["prompt_tokens"], shape["rows"]
    drawn = tokens / rows
    a_pair = 4 * layers * heads * width
    of_completions = a_pair * rows * (drawn * before + drawn * (drawn + 1) / 2)
    of_prompts = a_pair * prompts * before * (before + 1) / 2
    forward = 2 * weights * (prompts * before + tokens) + 2 * head * tokens + of_prompts + of_completions
    size = 2 if precision == "bfloat16" else 4
    a_token = 2 * layers * kv_heads * width
    read = drawn * (weights + head + a_token * prompts * before) + a_token * rows * drawn * (drawn - 1) / 2
    return {
        "update": Work(3 * forward, None),
        "decode": Work(2 * (weights + head) * tokens + of_completions, size * read),
    }


def shares(work: Work, seconds: float, peak: Mapping[str, float]) -> dict[str, float]:
    """Work and the share of the peak that it is done at."""
    found = {"flops": work.flops, "flops_share": work.flops / seconds / peak["flops"]}
    if work.bytes is not None:
        found |= {"bytes": work.bytes, "bytes_share": work.bytes / seconds / peak["bytes"]}
    return found
