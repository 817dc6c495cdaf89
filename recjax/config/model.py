"""The config blocks `model`, `warm_start` and `mesh`: the policy, its supervised start, and the devices it lies on."""

import datetime
import re
import typing
from typing import Any, Literal

from recjax.algorithms.options import require
from recjax.config.fields import Block, Float, Int, key, require_one, wrong_with_variables

Projection = Literal["query", "key", "value", "output", "gate", "up", "down"]
Remat = Literal["none", "dots", "full"]
Attention = Literal["auto", "plain", "cudnn", "splash"]


class DecoderShape(Block):
    """A decoder made from scratch, with a tokenizer of the task's own characters."""

    hidden_size: Int = key(64, "Width of the residual stream", ge=2)
    num_layers: Int = key(3, "Transformer blocks", ge=1)
    num_heads: Int = key(4, "Attention heads", ge=1)
    num_kv_heads: Int = key(4, "Heads of keys and values; fewer than num_heads: grouped-query attention", ge=1)
    intermediate_size: Int = key(256, "Width of the MLP", ge=1)


class LoraConfig(Block):
    """Low-rank adapters on frozen projections."""

    rank: Int = key(16, "Rank of the adapters", ge=1)
    alpha: Float = key(32.0, "The adapters' product is scaled by alpha / rank", gt=0, le=2**16)
    targets: list[Projection] = key(
        lambda: ["query", "key", "value", "output"], "Projections of every layer that get an adapter"
    )


class ModelConfig(Block):
    """The policy: either `path` or `decoder`."""

    path: str | None = key(None, "Folder or hub name of a model in Hugging Face format")
    decoder: DecoderShape | None = key(None)
    chat_date: str | None = key(
        None,
        "Day (YYYY-MM-DD) for chat templates that read the clock (strftime_now); null: the day of the run's first"
        " start, which recjax keeps in the run's config.yaml",
    )
    chat_template_kwargs: dict[str, Any] = key(
        dict, "Variables of the chat template in all prompts, such as enable_thinking; a row's or request's own win"
    )
    teacher: str | None = key(None, "Folder or hub name of a model with the same tokenizer, for algorithm.distillation")
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "Dtype of the computation; auto: bfloat16 where the device has it"
    )
    remat: Remat = key(
        "none",
        "Activations that the backward pass recomputes to save memory: none, all but projections, or full layers",
    )
    attention: Attention = key(
        "auto", "Attention kernel: cudnn for NVIDIA GPUs, splash for TPUs; auto chooses the kernel that fits"
    )
    lora: LoraConfig | None = key(None)
    freeze: list[str] = key(list, "Regular expressions of the parameter paths that recjax does not train")
    logprob_chunk: Int = key(1024, "Token positions for which a device holds vocabulary logits at once", ge=1)

    def check(self) -> None:
        """Refuses two models or none, sizes that heads do not divide, invalid days, and freezing with adapters."""
        require_one("model", {"path": self.path, "decoder": self.decoder})
        if shape := self.decoder:
            hidden, heads = shape.hidden_size, shape.num_heads
            remedy = f"must be an even multiple of model.decoder.num_heads = {heads}"
            require(hidden % (2 * heads) == 0, "model.decoder.hidden_size", hidden, remedy)
            remedy = f"must divide model.decoder.num_heads = {heads}"
            require(heads % shape.num_kv_heads == 0, "model.decoder.num_kv_heads", shape.num_kv_heads, remedy)
        if self.chat_date is not None:
            try:
                is_day = datetime.date.fromisoformat(self.chat_date).isoformat() == self.chat_date
            except ValueError:
                is_day = False
            require(is_day, "model.chat_date", self.chat_date, "takes a day as YYYY-MM-DD, such as 2026-11-26")
        if self.chat_template_kwargs:
            reason = wrong_with_variables(self.chat_template_kwargs)
            require(not reason, "model.chat_template_kwargs", self.chat_template_kwargs, reason or "")
            remedy = "does not apply to model.decoder, whose tokenizer has no chat template; remove this key"
            require(self.decoder is None, "model.chat_template_kwargs", self.chat_template_kwargs, remedy)
        for pattern in self.freeze:
            try:
                re.compile(pattern)
            except re.error as error:
                require(False, "model.freeze", pattern, f"is not a regular expression ({error}); correct the pattern")
        if self.lora:
            remedy = f"takes some of {', '.join(typing.get_args(Projection))}"
            require(bool(self.lora.targets), "model.lora.targets", self.lora.targets, remedy)
            remedy = "does not apply with model.lora, which trains only its adapters; remove one of them"
            require(not self.freeze, "model.freeze", self.freeze, remedy)


class WarmStartConfig(Block):
    """Supervised training that makes the base policy, on answers of which some hold one mistake."""

    steps: Int = key(400, "Optimizer steps", ge=1)
    batch_size: Int = key(128, "Answers in each step", ge=1)
    learning_rate: Float = key(2e-3, "Peak learning rate of Adam", ge=0, le=1)
    wrong_fraction: Float = key(0.5, "Share of the answers that hold a mistake", ge=0, le=1)


class MeshConfig(Block):
    """Layout of the devices; the three sizes multiply to the number of devices, and at most one -1 takes the rest."""

    data: Int = key(-1, "Devices that split the rows of a batch; each has all parameters")
    fsdp: Int = key(1, "Devices that split rows, parameters and the optimizer's state")
    tensor: Int = key(1, "Devices that split heads, MLP units and vocabulary; keep them within one host")

    def check(self) -> None:
        """Refuses sizes that are no numbers of devices, and more than one -1."""
        remedy = "takes a number of devices, or -1 for the rest of them"
        for name, size in vars(self).items():
            require(size == -1 or size > 0, f"mesh.{name}", size, remedy)
        rest = [f"mesh.{name}" for name, size in vars(self).items() if size == -1]
        if len(rest) > 1:
            raise ValueError(f"{' and '.join(rest)} are both -1, but only one of them can take the rest; set the other")
