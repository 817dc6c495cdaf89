"""The schema of a run's config file: every key, its type, its default and its lowest value."""

import dataclasses
import types
import typing
from typing import Any

import omegaconf


def at_least(low: float, default: Any) -> Any:
    """A number's default, and the lowest value that `check` lets through."""
    return dataclasses.field(default=default, metadata={"low": low})


@dataclasses.dataclass(frozen=True)
class DecoderShape:
    """A decoder to make from scratch, with a tokenizer of the task's own characters."""

    hidden_size: int = at_least(2, 64)
    num_layers: int = at_least(1, 3)
    num_heads: int = at_least(1, 4)
    num_kv_heads: int = at_least(1, 4)
    intermediate_size: int = at_least(1, 256)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside frozen projections."""

    rank: int = at_least(1, 16)
    alpha: float = at_least(0, 32.0)  # the adapters' product is scaled by alpha / rank
    targets: list[str] = dataclasses.field(
        default_factory=lambda: ["query", "key", "value", "output"]
    )  # gate, up, down


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The policy: either `path` or `decoder`."""

    path: str | None = None  # Hugging Face folder or hub name
    decoder: DecoderShape | None = None
    dtype: str = "auto"  # float32 | bfloat16 | auto: bfloat16 where the device has it
    remat: bool = False  # recompute layers in the backward pass
    lora: LoraConfig | None = None
    freeze: list[str] = dataclasses.field(
        default_factory=list
    )  # regular expressions of parameter paths left as they are
    logprob_chunk: int = at_least(1, 1024)  # token positions whose vocabulary scores exist at one time


@dataclasses.dataclass(frozen=True)
class ArithmeticTask:
    """Questions with one whole number as the answer."""

    problems: list[str] = dataclasses.field(default_factory=lambda: ["10..99 + 10..99"])  # A..B op C..D, op + - or *
    template: str = "{a} {op} {b} ="
    examples: int = at_least(0, 0)  # solved examples of the same kinds on the lines before each question
    worked: bool = False  # answers of sums show the columns and carries before the result: 7+5+0=12;4+8+1=13;132


@dataclasses.dataclass(frozen=True)
class FileTask:
    """Problems of the user's own: JSON Lines or Parquet."""

    train: str = omegaconf.MISSING
    evaluation: str | None = None  # null: `evaluation.problems` of the train file are held out
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    chat: bool = False  # put text prompts through the model's chat template; lists of messages always are


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """What to solve, `arithmetic` or `file`, and how answers are rewarded."""

    arithmetic: ArithmeticTask | None = None
    file: FileTask | None = None
    system_prompt: str | None = None  # put before the messages of every chat prompt
    reward: str = "recjax.tasks.rewards:number_match"  # module:function
    success: float = 1.0  # a completion is accurate when its reward is at least this


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Supervised training that makes the base policy, on answers of which some hold one mistake."""

    steps: int = at_least(1, 400)
    batch_size: int = at_least(1, 128)
    learning_rate: float = at_least(0, 2e-3)
    wrong_fraction: float = at_least(0, 0.5)


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How experience is drawn."""

    prompts_per_step: int = at_least(1, 16)
    group_size: int = at_least(1, 8)
    max_prompt_tokens: int | None = at_least(1, None)  # null: the longest prompt of the data
    max_completion_tokens: int = at_least(1, 16)
    slots: int | None = at_least(1, None)  # completions decoded at a time, the next as one ends; null: all at once
    temperature: float = at_least(0, 1.0)
    top_k: int = at_least(0, 0)  # 0: all tokens
    top_p: float = 1.0
    stop: list[str] = dataclasses.field(default_factory=list)  # strings of one token that end a completion, beside EOS


@dataclasses.dataclass(frozen=True)
class RegimeConfig:
    """How far behind the trainer the sampler is."""

    sync_interval: int = at_least(1, 1)  # optimiser steps from one copy of the weights to the next
    sync_offset: int = at_least(0, 0)  # batches drawn ahead of the one being trained on
    offline: bool = False  # every batch comes from the initial policy


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """A preset, and changes to any of its axes: `name` and options of the axis function."""

    preset: str = "grpo"
    objective: dict[str, Any] = dataclasses.field(default_factory=dict)
    selection: dict[str, Any] = dataclasses.field(default_factory=dict)
    advantage: dict[str, Any] = dataclasses.field(default_factory=dict)
    clip: dict[str, Any] = dataclasses.field(default_factory=dict)
    weight: dict[str, Any] = dataclasses.field(default_factory=dict)
    regularizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    reduction: dict[str, Any] = dataclasses.field(default_factory=dict)
    reference_kl: dict[str, Any] = dataclasses.field(default_factory=dict)
    entropy: dict[str, Any] = dataclasses.field(default_factory=dict)

    def overrides(self) -> dict[str, dict[str, Any]]:
        """The axes that the user changed."""
        axes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "preset"}
        return {axis: options for axis, options in axes.items() if options}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a schedule and clipping of the gradient's global norm."""

    learning_rate: float = at_least(0, 1e-6)
    schedule: str = "constant"  # constant | linear | cosine: decay to zero over training.steps
    warmup_steps: int = at_least(0, 0)
    clip_norm: float = 1.0
    weight_decay: float = at_least(0, 0.0)
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Length of the run and how it is stored."""

    steps: int = at_least(1, 100)
    micro_batch_prompts: int | None = at_least(
        1, None
    )  # prompts whose groups a gradient is taken of at once; null: all
    checkpoint_every: int = at_least(1, 50)
    keep_checkpoints: int = at_least(1, 2)


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Sampled accuracy on held-out problems."""

    every: int = at_least(0, 50)  # optimiser steps; 0: before and after only
    problems: int = at_least(1, 256)
    samples: int = at_least(1, 1)  # completions a problem
    initial_kl: bool = False  # KL to the initial policy as well, at the cost of one more forward pass
    temperature: float = at_least(0, 1.0)
    top_k: int = at_least(0, 0)
    top_p: float = 1.0


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int = at_least(0, 0)
    output: str = omegaconf.MISSING  # folder of the run
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    warm_start: WarmStartConfig | None = None
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    regime: RegimeConfig = dataclasses.field(default_factory=RegimeConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)


def block_of(annotation: Any) -> type | None:
    """The dataclass in an annotation such as `Block` or `Block | None`; None for plain values."""
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((part for part in parts if dataclasses.is_dataclass(part)), None)


def schema_keys(block: type = Config, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Every dotted key of the schema and its field."""
    keys = {}
    for field in dataclasses.fields(block):
        keys[prefix + field.name] = field
        if nested := block_of(field.type):
            keys |= schema_keys(nested, f"{prefix}{field.name}.")
    return keys
