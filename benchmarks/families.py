"""Compares every model family with transformers and PEFT, and writes the largest differences as a table.

    python -m benchmarks.families [--only NAME …]

Each row is a random checkpoint of tests/hub/test_families.py, made by transformers, in float32 on the CPU. The command
writes benchmarks/FAMILIES.md, and the table of families in docs/models.md. With --only, it prints the rows.
"""

import argparse
import importlib.metadata
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from recjax.hub.families import CONTAINERS, FAMILIES
from tests.hub.test_families import (
    MODELS,
    Loaded,
    adapter_error,
    export_error,
    greedy_error,
    layout_errors,
    load_random,
    shared_error,
)

ROOT = Path(__file__).parent.parent
PAGE, DOCS = ROOT / "benchmarks" / "FAMILIES.md", ROOT / "docs" / "models.md"
START, END = "<!-- families -->\n", "<!-- end of families -->\n"
LIMIT, GRADIENT_LIMIT = 1e-4, 1e-3
# Family → its models, for docs/models.md, and its differences from Llama.
DESCRIPTIONS = {
    "llama": (
        "Llama 2, 3, 3.1, 3.2; SmolLM2",
        "rope scaling `linear`, `llama3` and `yarn` (every family takes them, but `phi3` not `yarn`)",
    ),
    "qwen2": ("Qwen2, Qwen2.5", "biases on q, k, v; windows where `use_sliding_window` is on"),
    "qwen3": ("Qwen3 (dense)", "RMSNorm on every head of q and k; `head_dim` of its own; windows as Qwen2"),
    "mistral": ("Mistral 7B", "sliding window on all layers, or none"),
    "smollm3": ("SmolLM3", "layers that do not rotate (`no_rope_layers`)"),
    "gemma2": (
        "Gemma 2",
        "norms scaled by 1 + w, norms after attention and MLP, scaled embeddings, tanh GELU, `query_pre_attn_scalar`,"
        " soft caps on scores and logits, a window on every other layer",
    ),
    "gemma3_text": (
        "Gemma 3, text only",
        "as Gemma 2 without the cap on scores; norms on q and k; windowed layers rotate with a base of their own",
    ),
    "olmo2": ("OLMo 2", "norms after attention and MLP instead of before; one RMSNorm over all heads of q, and of k"),
    "olmo3": ("OLMo 3", "as `olmo2`, with windows"),
    "internlm3": ("InternLM3", "as `llama`"),
    "iquestcoder": ("IQuest-Coder", "as `llama`"),
    "ministral": ("Ministral 8B", "as `mistral`, with windows on chosen layers"),
    "cwm": ("CWM", "as `llama`, with windows on chosen layers"),
    "seed_oss": ("Seed-OSS", "biases on q, k, v; `head_dim` of its own"),
    "phi3": ("Phi-3, Phi-4", "fused tensors for q, k, v and for the MLP; partial rotary embeddings; windows"),
    "qwen3_moe": ("Qwen3-30B-A3B, 235B-A22B", "as `qwen3`, with experts in all or some layers"),
    "qwen2_moe": (
        "Qwen1.5-MoE, Qwen2-57B-A14B",
        "as `qwen2`, with experts in all or some layers, and an MLP next to them for every token",
    ),
    "qwen3_5_moe_text": ("Qwen3.5-35B-A3B", "as `qwen3_5_text`, with experts and the MLP of `qwen2_moe`"),
    "qwen3_next": ("Qwen3-Next-80B-A3B, Qwen3-Coder-Next", "as `qwen3_5_moe_text`, with fused tensors for delta nets"),
    "olmoe": ("OLMoE", "experts in every layer; one RMSNorm over all heads of q, and of k"),
    "mixtral": ("Mixtral 8x7B, 8x22B", "as `mistral`, with experts in every layer"),
    "qwen3_5_text": (
        "Qwen3.5 (dense)",
        "gated delta nets in three of four layers, or in any order; gated attention; norms scaled by 1 + w;"
        " partial rotary embeddings",
    ),
    "granite": ("Granite 3", "multipliers of embeddings, attention scores, residuals and logits"),
}
CHECKS: dict[str, Callable[[Loaded, Path], float]] = {
    "logits": lambda loaded, _: layout_errors(loaded, "right")[0],
    "log-probs, padded": lambda loaded, _: max(layout_errors(loaded, layout)[1] for layout in ("left", "right")),
    "log-probs, shared prompt": lambda loaded, _: shared_error(loaded),
    "log-probs, packed": lambda loaded, _: layout_errors(loaded, "packed")[1],
    "gradient, relative": lambda loaded, _: layout_errors(loaded, "packed")[2],
    "engine, greedy": greedy_error,
    "export → transformers": export_error,
    "adapter → PEFT": adapter_error,
}


def differences(name: str) -> dict[str, float]:
    """The largest difference of each check, for an entry of MODELS."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").mkdir()
        loaded = load_random(name, Path(folder) / "model")
        return {check: float(error(loaded, Path(folder))) for check, error in CHECKS.items()}


def too_large(errors: dict[str, float]) -> list[str]:
    """Checks whose difference is above its limit."""
    return [check for check, error in errors.items() if not error < (GRADIENT_LIMIT if "grad" in check else LIMIT)]


def row_of(name: str, errors: dict[str, float]) -> str:
    """A row of the table of differences."""
    return f"| {name} | " + " | ".join(f"{error:.1e}" if error else "0" for error in errors.values()) + " |\n"


def page_of(rows: list[str]) -> str:
    """The page of differences."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "peft", "jax"))
    return (
        "# Differences from transformers and PEFT\n\n"
        "Random checkpoints of each family, made by transformers, in float32 on the CPU."
        f" `python -m benchmarks.families` writes this page ({versions}). Each number is a largest absolute difference;"
        " for gradients, it is relative to a tensor's largest gradient. For the engine, it is by how much the logit of"
        " a greedy token misses transformers' largest logit, where 0 means equal tokens. Limits:"
        f" {LIMIT:.0e}, for gradients {GRADIENT_LIMIT:.0e}.\n\n"
        f"| checkpoint | {' | '.join(CHECKS)} |\n|{'---|' * (len(CHECKS) + 1)}\n" + "".join(rows) + from_llama()
    )


def from_llama() -> str:
    """The end of the page of differences: how each family differs from Llama."""
    rows = "".join(f"- `{name}`: {DESCRIPTIONS[name][1]}\n" for name in FAMILIES)
    base = "RMSNorm, rotary positions, grouped-query attention and SwiGLU"
    return f"\n## Families next to Llama\n\nLlama has {base}. Beyond these, the families have:\n\n{rows}"


def families_table() -> str:
    """The table of families for docs/models.md."""
    rows = "".join(f"| `{name}` | {DESCRIPTIONS[name][0]} |\n" for name in FAMILIES)
    halves = ", ".join(f"`{name}` as `{family}`" for name, family in CONTAINERS.items())
    return f"| `model_type` | models |\n|---|---|\n{rows}\nrecjax reads the text half of multimodal models: {halves}.\n"


def with_table(page: str) -> str:
    """docs/models.md with the current table of families."""
    before, _, rest = page.partition(START)
    return before + START + families_table() + END + rest.partition(END)[2]


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks; returns 1 if a difference is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, metavar="NAME", help="checkpoints to compare")
    names = parser.parse_args(arguments).only
    rows, failed = [], []
    for name in names or MODELS:
        errors = differences(name)
        rows.append(row_of(name, errors))
        failed += [f"{name}: {check} differs by {errors[check]:.1e}" for check in too_large(errors)]
        print(rows[-1], end="", flush=True)
    if not names:
        PAGE.write_text(page_of(rows), encoding="utf-8")
        DOCS.write_text(with_table(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
    print(*failed, sep="\n", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
