"""The blocks `model`, `warm_start` and `mesh` of a config: the policy, its beginning, and the devices it lies on."""

import dataclasses
import datetime
import re
import typing
from typing import Any, Literal

from recjax.algorithms.options import require
from recjax.config_fields import at_least, number, require_one, wrong_with_variables

Projection = Literal["query", "key", "value", "output", "gate", "up", "down"]
Remat = Literal["none", "dots", "full"]
Attention = Literal["auto", "plain", "cudnn", "splash"]


@dataclasses.dataclass(frozen=True)
class DecoderShape:
    """A decoder to make from scratch, with a tokenizer of the task's own characters."""

    hidden_size: int = at_least(2, 64)  # width of the residual stream
    num_layers: int = at_least(1, 3)  # transformer blocks
    num_heads: int = at_least(1, 4)  # attention heads
    num_kv_heads: int = at_least(1, 4)  # heads of keys and values; fewer than num_heads: grouped-query attention
    intermediate_size: int = at_least(1, 256)  # width of the MLP


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside frozen projections."""

    rank: int = at_least(1, 16)  # rank of the adapters
    alpha: float = number(32.0, above=0, high=2**16)  # the adapters' product is scaled by alpha / rank
    # Projections of every layer that get an adapter.
    targets: list[Projection] = dataclasses.field(default_factory=lambda: ["query", "key", "value", "output"])


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The policy: either `path` or `decoder`."""

    path: str | None = None  # folder or hub name of a model in Hugging Face format
    decoder: DecoderShape | None = None
    # Day (YYYY-MM-DD) that a chat template which reads the clock (strftime_now) writes into prompts; null: that of the
    # run's first start, which the run's config.yaml keeps.
    chat_date: str | None = None
    # Variables of the chat template in all prompts, such as enable_thinking; a row's or request's own come first.
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    teacher: str | None = None  # folder or hub name of a model with the same tokenizer; algorithm.distillation reads it
    # Dtype of the computation; auto: bfloat16 where the device has it.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # What the backward pass computes again to save memory: nothing, all but projections, or whole layers.
    remat: Remat = dataclasses.field(default="none", metadata={"became": "what was true is now full, and false none"})
    # Attention kernel: cudnn for NVIDIA GPUs, splash for TPUs; auto takes the one that fits.
    attention: Attention = "auto"
    lora: LoraConfig | None = None
    # Regular expressions of the parameter paths that are not trained.
    freeze: list[str] = dataclasses.field(default_factory=list)
    logprob_chunk: int = at_least(1, 1024)  # token positions whose vocabulary scores a device has at one time

    def check(self) -> None:
        """Refuses two models or none, sizes that heads do not divide, no day, and parts frozen with adapters."""
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
            remedy = "is not read by model.decoder, whose tokenizer has no chat template; remove it"
            require(self.decoder is None, "model.chat_template_kwargs", self.chat_template_kwargs, remedy)
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


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Supervised training that makes the base policy, on answers of which some hold one mistake."""

    steps: int = at_least(1, 400)  # optimizer steps
    batch_size: int = at_least(1, 128)  # answers in each step
    learning_rate: float = number(2e-3, low=0, high=1)  # peak learning rate of Adam
    wrong_fraction: float = number(0.5, low=0, high=1)  # share of the answers that hold a mistake


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How devices are arranged; the three sizes multiply to their number, and -1, once at most, takes the rest."""

    data: int = -1  # devices that split the rows of a batch; each has all parameters
    fsdp: int = 1  # devices that split rows, parameters and the optimizer's state
    tensor: int = 1  # devices that split heads, MLP units and vocabulary; keep them within one host

    def check(self) -> None:
        """Refuses sizes that are no numbers of devices, and more than one rest."""
        remedy = "takes a number of devices, or -1 for the rest of them"
        for name, size in vars(self).items():
            require(size == -1 or size > 0, f"mesh.{name}", size, remedy)
        rest = [f"mesh.{name}" for name, size in vars(self).items() if size == -1]
        if len(rest) > 1:
            raise ValueError(f"{' and '.join(rest)} are both -1, but only one of them can take the rest; set the other")
