"""The config blocks `model`, `warm_start` and `mesh`: the policy, its supervised start, and the devices it lies on."""

import contextlib
import datetime
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from recjax.config.fields import (
    Bool,
    ConfigBlock,
    Float,
    Int,
    checked,
    key,
    refuse_with,
    refuse_without,
    wrong_with_variables,
)
from recjax.errors import UserError

if TYPE_CHECKING:
    from recjax.config.schema import Config

POLICY = "policy"  # the policy as a teacher, and as the player of a seat
Projection = Literal[
    "query",
    "key",
    "value",
    "output",
    "gate",
    "up",
    "down",
    "delta_inputs",
    "delta_gate",
    "delta_rate",
    "delta_decay",
    "delta_output",
]
# PEFT's names of projections.
PEFT_NAMES = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "in_proj_qkv": "delta_inputs",
    "in_proj_z": "delta_gate",
    "in_proj_b": "delta_rate",
    "in_proj_a": "delta_decay",
    "out_proj": "delta_output",
}


def _without_peft_names(names: Any) -> Any:
    if not isinstance(names, list):
        return names
    return [PEFT_NAMES.get(str(name), name) for name in names]


Targets = Annotated[list[Projection], pydantic.BeforeValidator(_without_peft_names)]
Remat = Literal["none", "attention", "dots", "full"]
Attention = Literal["auto", "plain", "cudnn", "cudnn_lengths", "splash"]


class DecoderShape(ConfigBlock):
    """A decoder made from scratch, with a tokenizer of the task's own characters."""

    hidden_size: Int = key(
        64, "Width of the residual stream", note="Must be an even multiple of model.decoder.num_heads.", ge=2
    )
    num_layers: Int = key(3, "Transformer blocks", ge=1)
    num_heads: Int = key(4, "Attention heads", ge=1)
    num_kv_heads: Int = key(
        4,
        "Heads of keys and values; fewer than num_heads: grouped-query attention",
        note="Must divide model.decoder.num_heads.",
        ge=1,
    )
    intermediate_size: Int = key(256, "Width of the MLP", ge=1)
    characters: str | None = key(
        None, "Alphabet of the tokenizer, in the order of its ids; null: the task's characters"
    )

    def check(self, config: "Config") -> None:
        """Refuses sizes that the heads cannot share."""
        heads = f"model.decoder.num_heads = {self.num_heads}"
        if self.hidden_size % (2 * self.num_heads):
            raise UserError("model.decoder.hidden_size", f"must be an even multiple of {heads}", value=self.hidden_size)
        if self.num_heads % self.num_kv_heads:
            raise UserError("model.decoder.num_kv_heads", f"must divide {heads}", value=self.num_kv_heads)


class LoraConfig(ConfigBlock):
    """Low-rank adapters on frozen projections."""

    rank: Int = key(16, "Rank of the adapters", ge=1)
    alpha: Float = key(32.0, "The adapters' product is scaled by alpha / rank", gt=0, le=2**16)
    targets: Targets = key(
        lambda: ["query", "key", "value", "output"],
        "Adapted projections of every layer, also by PEFT's names, such as q_proj",
        min_length=1,
    )


class ModelConfig(ConfigBlock):
    """The policy: `path`, `decoder` or `run`."""

    path: str | None = key(None, "Folder or hub name of a model in Hugging Face format")
    decoder: DecoderShape | None = key(None)
    run: str | None = key(
        None,
        "Run to continue in a new folder, with its model, weights and optimizer state: its folder (newest checkpoint),"
        " or checkpoints/STEP or checkpoints/best in it (by training.keep_best or evaluation/accuracy)",
        note="Not with warm_start.",
    )
    reference: str | None = key(
        None,
        "KL anchor: a run's folder, checkpoints/STEP or checkpoints/best in it, or a model; null:"
        " the policy before the first step",
    )
    chat_date: str | None = key(
        None,
        "Day (YYYY-MM-DD) for chat templates that read the clock (strftime_now); null: the day of the run's first"
        " start, which recjax keeps in the run's config.yaml",
    )
    chat_template_kwargs: Annotated[dict[str, Any], checked(wrong_with_variables)] = key(
        dict,
        "Variables of the chat template in all prompts, such as enable_thinking; a row's or request's own win",
        note="Not with model.decoder.",
    )
    teacher: str | None = key(
        None,
        "Model with the same tokenizer, for algorithm.distillation and algorithm.teacher_divergence: a run's folder,"
        " checkpoints/STEP or checkpoints/best in it, or a model's folder or hub name; policy: the policy itself, which"
        " reads task.teacher_template",
    )
    teacher_rate: Float = key(
        1.0,
        "Share of the trained weights that enters the teacher's weights after each step; 1: the teacher has the current"
        " weights, 0: those before this run's first step, between: their moving average, which model.run continues",
        note="Only with model.teacher = policy.",
        ge=0,
        le=1,
    )
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto",
        "Dtype of the computation; auto: float32 on CPUs, bfloat16 on accelerators. bfloat16 is faster than float32 on"
        " some CPUs and slower on others: docs/memory.md lists them",
    )
    remat: Remat = key(
        "none",
        "Activations that the backward pass recomputes to save memory: none, all but projections and attention, all but"
        " projections, or full layers",
        may_change=True,
    )
    attention: Attention = key(
        "auto",
        "Attention kernel; auto: cudnn on an NVIDIA GPU if it fits, else plain. cudnn_lengths (NVIDIA GPUs) and splash"
        " (TPUs) also serve completions over shared prompts, but are not tested on devices",
        may_change=True,
    )
    joined_projections: Bool = key(
        False,
        "GPUs compute the projections of an input as one matmul, from 1,024 rows on; not tested on devices",
        may_change=True,
    )
    lora: LoraConfig | None = key(None)
    adapter: str | None = key(
        None,
        "PEFT adapter (folder or hub name) to start from; sets model.lora and a null model.path",
        note="Not with model.decoder or model.run.",
    )
    merge_adapter: Bool = key(
        False, "Add the adapter to the weights; model.lora then means new adapters", note="Only with model.adapter."
    )
    freeze: list[str] = key(
        list, "Regular expressions of the parameter paths that recjax does not train", note="Not with model.lora."
    )
    logprob_chunk: Int = key(
        1024,
        "Token positions whose vocabulary logits a device holds together; more if they have less than 4 million logits",
        ge=1,
        may_change=True,
    )

    @pydantic.field_validator("chat_date")
    @classmethod
    def _check_day(cls, text: str | None) -> str | None:
        with contextlib.suppress(ValueError):
            if text is None or datetime.date.fromisoformat(text).isoformat() == text:
                return text
        raise UserError(problem="takes a day as YYYY-MM-DD, such as 2026-11-26")

    @pydantic.field_validator("freeze")
    @classmethod
    def _check_patterns(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(
                    problem=f"{pattern!r} is not a regular expression ({error})", remedy="correct the pattern"
                ) from error
        return patterns

    @property
    def average_rate(self) -> float | None:
        """`teacher_rate` if the teacher has an average of the policy's weights; None for all other teachers."""
        return self.teacher_rate if self.teacher == POLICY and self.teacher_rate < 1 else None

    def check(self, config: "Config") -> None:
        """Refuses several models, or none, and settings of a model or training that this run does not have."""
        chosen = [f"model.{name}" for name in ("path", "decoder") if getattr(self, name) is not None]
        # The config.yaml of a run keeps the model of the run that it continues; an adapter names its base.
        if len(chosen) != 1 and (chosen or not (self.run or self.adapter)):
            found = " and ".join(chosen) or "none"
            raise UserError("model", "give exactly one of model.path, model.decoder", f"found {found}")
        if config.warm_start is not None:
            refuse_with(config, ["model.run"], "warm_start")
        if self.decoder is not None:
            refuse_with(config, ["model.chat_template_kwargs", "model.adapter"], "model.decoder")
        if self.run:
            refuse_with(config, ["model.adapter"], "model.run")
        if self.teacher != POLICY:
            refuse_without(config, ["model.teacher_rate"], "model.teacher = policy")
        if not self.adapter:
            refuse_without(config, ["model.merge_adapter"], "model.adapter")
        if self.lora is not None:
            refuse_with(config, ["model.freeze"], "model.lora")
        if self.adapter is not None and not self.merge_adapter:
            problem = "trains the adapter only"
            remedy = "set model.merge_adapter=true to train the base too, or remove "
            if self.freeze:
                raise UserError("model.adapter", problem, f"{remedy}model.freeze", value=self.adapter)
            if config.warm_start is not None and not config.demonstrations:
                raise UserError("model.adapter", problem, f"{remedy}warm_start", value=self.adapter)


class WarmStartConfig(ConfigBlock):
    """Supervised training before the first step: on answers, some with one deliberate mistake, or on demonstrations."""

    steps: Int = key(400, "Optimizer steps", ge=1)
    batch_size: Int = key(128, "Answers or demonstrations in each step", ge=1)
    learning_rate: Float = key(2e-3, "Peak learning rate of Adam; set it for demonstrations", ge=0, le=1)
    wrong_fraction: Float = key(
        0.5, "Share of the answers that hold a mistake", note="Not with warm_start.demonstrations.", ge=0, le=1
    )
    right_first: Float = key(
        0.0, "Share of the steps before the first mistakes", note="Not with warm_start.demonstrations.", ge=0, le=1
    )
    demonstrations: str | None = key(
        None,
        "Chats in a column `messages`, in files as for task.file.train; recjax trains on the assistant's turns",
        note="Only with model.path.",
    )
    held_out: str | None = key(
        None,
        "Chats for the held-out loss; null: recjax holds out a tenth of the demonstrations, at most 256",
        note="Only with warm_start.demonstrations.",
    )
    max_tokens: Int | None = key(
        None,
        "Limit of a demonstration's tokens; recjax skips longer ones; null: no limit",
        note="Only with warm_start.demonstrations.",
        ge=2,
    )
    every: Int = key(
        50,
        "Steps between held-out losses, and between states to resume from",
        note="Only with warm_start.demonstrations.",
        ge=1,
    )

    def check(self, config: "Config") -> None:
        """Refuses settings without effect, and demonstrations that lack a learning rate or a policy before them."""
        if self.demonstrations:
            names = ["warm_start.wrong_fraction", "warm_start.right_first"]
            refuse_with(config, names, "warm_start.demonstrations")
        else:
            names = ["warm_start.held_out", "warm_start.max_tokens", "warm_start.every"]
            refuse_without(config, names, "warm_start.demonstrations")
        if not config.model.path:
            refuse_without(config, ["warm_start.demonstrations"], "model.path")
        if self.demonstrations is None:
            return
        if "learning_rate" not in self.model_fields_set:
            raise UserError(
                "warm_start.learning_rate",
                "is for small decoders",
                "set it for demonstrations: about 1e-5 for all weights, 1e-4 for model.lora",
                value=self.learning_rate,
            )
        if config.experience is not None and config.experience.missing_logprobs == "initial":
            raise UserError(
                "experience.missing_logprobs",
                "does not work with warm_start.demonstrations",
                "use current, or export the warm-started model first",
                value="initial",
            )


Size = Annotated[
    Int, checked(lambda size: None if size == -1 or size > 0 else "takes a number of devices, or -1 for the rest")
]


class MeshConfig(ConfigBlock):
    """Layout of the devices; the sizes multiply to the number of devices, and at most one -1 takes the rest."""

    data: Size = key(-1, "Devices that split rows and have all parameters; 1 if another is -1")
    fsdp: Size = key(1, "Devices that split rows, parameters and the optimizer's state")
    expert: Size = key(1, "Devices that split rows and experts")
    tensor: Size = key(1, "Devices that split heads, MLP units and vocabulary; keep them within one host")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _rest_for_another_axis(cls, values: Any) -> Any:
        """A -1 that the user gives to another axis takes the place of the default -1 of `data`."""
        if isinstance(values, dict) and "data" not in values and "-1" in map(str, values.values()):
            return values | {"data": 1}
        return values

    def check(self, config: "Config") -> None:
        """Refuses more than one -1."""
        open_axes = [f"mesh.{name}" for name, size in vars(self).items() if size == -1]
        if len(open_axes) > 1:
            raise UserError(
                open_axes[0],
                f"only one of {' and '.join(open_axes)} can be -1 and take the remaining devices",
                "set the other",
                value=-1,
            )
