"""The shapes: models, prompts and lengths, by the letter that `--shape` takes. Uses only the standard library."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A Llama with random weights."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class Shape:
    """One step: `prompts` × `group_size` completions and the update on them.

    model: sizes, or a Hugging Face folder.
    stop_share: share of the vocabulary that ends a completion; 0: one token that no model has, so that every system
        looks for it and none finds it, and all completions have `completion_tokens` tokens.
    micro_batches: equal parts of the batch, whose gradients every system computes one by one.
    gpu: the shape needs a GPU, and is skipped without one.
    systems: names of benchmarks.systems.SYSTEMS, with `:bfloat16` where that is the precision; without, float32.
    """

    model: Sizes | str
    prompts: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int
    systems: tuple[str, ...]
    stop_share: float = 0.0
    micro_batches: int = 1
    gpu: bool = False

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group_size


ALL = ("recjax", "torch", "torch_shared", "transformers", "trl", "tunix")
SMALL = Sizes(4096, 256, 1024, 4, 4, 4, 64)
SHAPES = {
    "toy": Shape(Sizes(64, 32, 64, 2, 4, 2, 8), 2, 4, 8, 8, ALL),
    "a": Shape(
        SMALL, 8, 8, 64, 64, (*ALL, "recjax:bfloat16", "torch:bfloat16", "torch_shared:bfloat16"),
    ),
    "b": Shape(
        # 3 to 6 GB each, so Tunix and bfloat16 have separate commands, each together with recjax.
        "models/SmolLM2-135M-Instruct", 4, 4, 64, 32, ("recjax", "torch", "torch_shared", "transformers", "trl"),
    ),
    "c": Shape(SMALL, 4, 16, 512, 32, ALL),
    "d": Shape(
        SMALL, 8, 8, 64, 256, ("recjax", "recjax_padded", "torch", "torch_shared", "transformers", "trl"),
        stop_share=0.05,
    ),
    "e": Shape(
        Sizes(151936, 1536, 8960, 28, 12, 2, 128), 64, 8, 256, 1024,
        # Each holds weights, gradients and AdamW's moments, about 25 GB, in addition to its cache.
        ("recjax:bfloat16", "transformers:bfloat16"),
        micro_batches=64, gpu=True,
    ),
    "g": Shape(
        Sizes(151936, 1536, 8960, 28, 12, 2, 128), 64, 8, 256, 256, ("recjax:bfloat16", "trl:bfloat16"),
        micro_batches=32, gpu=True,
    ),
}  # fmt: skip
