"""The blocks `model`, `warm_start` and `mesh` of a config: the policy, its beginning, and the devices it lies on."""

import re
import typing
from typing import Literal

from recjax.algorithms.options import require
from recjax.config.fields import Block, Float, Int, key, require_one

Projection = Literal["query", "key", "value", "output", "gate", "up", "down"]
Remat = Literal["none", "dots", "full"]
Attention = Literal["auto", "plain", "cudnn", "splash"]


class DecoderShape(Block):
    """A decoder to make from scratch, with a tokenizer of the task's own characters."""

    hidden_size: Int = key(64, "width of the residual stream", ge=2)
    num_layers: Int = key(3, "transformer blocks", ge=1)
    num_heads: Int = key(4, "attention heads", ge=1)
    num_kv_heads: Int = key(4, "heads of keys and values; fewer than num_heads: grouped-query attention", ge=1)
    intermediate_size: Int = key(256, "width of the MLP", ge=1)


class LoraConfig(Block):
    """Low-rank adapters beside frozen projections."""

    rank: Int = key(16, "rank of the adapters", ge=1)
    alpha: Float = key(32.0, "the adapters' product is scaled by alpha / rank", gt=0, le=2**16)
    targets: list[Projection] = key(
        lambda: ["query", "key", "value", "output"], "Projections of every layer that get an adapter."
    )


class ModelConfig(Block):
    """The policy: either `path` or `decoder`."""

    path: str | None = key(None, "folder or hub name of a model in Hugging Face format")
    decoder: DecoderShape | None = key(None, "")
    teacher: str | None = key(
        None, "folder or hub name of a model with the same tokenizer; algorithm.distillation reads it"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "Dtype of the computation; auto: bfloat16 where the device has it."
    )
    remat: Remat = key(
        "none", "What the backward pass computes again to save memory: nothing, all but projections, or whole layers."
    )
    attention: Attention = key(
        "auto", "Attention kernel: cudnn for NVIDIA GPUs, splash for TPUs; auto takes the one that fits."
    )
    lora: LoraConfig | None = key(None, "")
    freeze: list[str] = key(list, "Regular expressions of the parameter paths that are not trained.")
    logprob_chunk: Int = key(1024, "token positions whose vocabulary scores a device has at one time", ge=1)

    def check(self) -> None:
        """Refuses two models or none, heads that do not divide a decoder's sizes, and parts frozen beside adapters."""
        require_one("model", {"path": self.path, "decoder": self.decoder})
        if shape := self.decoder:
            hidden, heads = shape.hidden_size, shape.num_heads
            remedy = f"must be an even multiple of model.decoder.num_heads = {heads}"
            require(hidden % (2 * heads) == 0, "model.decoder.hidden_size", hidden, remedy)
            remedy = f"must divide model.decoder.num_heads = {heads}"
            require(heads % shape.num_kv_heads == 0, "model.decoder.num_kv_heads", shape.num_kv_heads, remedy)
        for pattern in self.freeze:
            try:
                re.compile(pattern)
            except re.error as error:
                require(False, "model.freeze", pattern, f"is not a regular expression ({error}); correct the pattern")
        if self.lora:
            remedy = f"takes some of {', '.join(typing.get_args(Projection))}"
            require(bool(self.lora.targets), "model.lora.targets", self.lora.targets, remedy)
            remedy = "is not read beside model.lora, which trains its adapters and nothing else; remove one of them"
            require(not self.freeze, "model.freeze", self.freeze, remedy)


class WarmStartConfig(Block):
    """Supervised training that makes the base policy, on answers of which some hold one mistake."""

    steps: Int = key(400, "optimiser steps", ge=1)
    batch_size: Int = key(128, "answers in each step", ge=1)
    learning_rate: Float = key(0.002, "peak learning rate of Adam", ge=0, le=1)
    wrong_fraction: Float = key(0.5, "share of the answers that hold a mistake", ge=0, le=1)


class MeshConfig(Block):
    """How devices are arranged; the three sizes multiply to their number, and -1, once at most, takes the rest."""

    data: Int = key(-1, "devices that split the rows of a batch; each has all parameters")
    fsdp: Int = key(1, "devices that split rows, parameters and the optimiser's state")
    tensor: Int = key(1, "devices that split heads, MLP units and vocabulary; keep them within one host")

    def check(self) -> None:
        """Refuses sizes that are no numbers of devices, and more than one rest."""
        remedy = "takes a number of devices, or -1 for the rest of them"
        for name, size in vars(self).items():
            require(size == -1 or size > 0, f"mesh.{name}", size, remedy)
        rest = [f"mesh.{name}" for name, size in vars(self).items() if size == -1]
        if len(rest) > 1:
            raise ValueError(f"{' and '.join(rest)} are both -1, but only one of them can take the rest; set the other")
