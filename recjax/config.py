"""The schema of a run's config file: every key, its type, its default and its lowest value."""

import dataclasses
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
    remat: str = "none"  # what the backward pass computes again: none | dots: all but projections | full: layers
    attention: str = "auto"  # plain | cudnn: NVIDIA GPUs | splash: TPUs | auto: the device's, where it fits the model
    lora: LoraConfig | None = None
    freeze: list[str] = dataclasses.field(default_factory=list)  # regular expressions of parameter paths left as is
    logprob_chunk: int = at_least(1, 1024)  # token positions whose vocabulary scores a device has at one time


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
    difficulty_column: str | None = None  # a label that evaluation breaks accuracy down by
    chat: bool = False  # put text prompts through the model's chat template; lists of messages always are


# In the four tasks below, `train` and `evaluation` are each a hub data set's name, a folder that holds its files, or
# a .parquet or .jsonl file with its columns; evaluation null: `evaluation.problems` of the train data are held out.


@dataclasses.dataclass(frozen=True)
class Gsm8kTask:
    """GSM8K: word problems with a number as the answer."""

    train: str = "openai/gsm8k"
    evaluation: str | None = "openai/gsm8k"


@dataclasses.dataclass(frozen=True)
class MathTask:
    """MATH: competition problems; evaluated on MATH-500."""

    train: str = "DigitalLearningGmbH/MATH-lighteval"
    evaluation: str | None = "HuggingFaceH4/MATH-500"


@dataclasses.dataclass(frozen=True)
class GuruMathTask:
    """Guru-Math: the mathematics part of Guru."""

    train: str = "LLM360/guru-RL-92k"
    evaluation: str | None = "LLM360/guru-RL-92k"


@dataclasses.dataclass(frozen=True)
class ToolAceTask:
    """ToolACE: every turn of a conversation in which the assistant calls functions."""

    train: str = "Team-ACE/ToolACE"
    evaluation: str | None = None


@dataclasses.dataclass(frozen=True)
class ReasoningGymTask:
    """Problems of one generator of the package reasoning_gym."""

    name: str = omegaconf.MISSING  # such as letter_counting
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the generator
    problems: int = at_least(1, 1000)  # to train on; beside these, evaluation.problems are held out
    template: str = "{question}"
    examples: int = at_least(0, 0)  # solved problems of the same generator ahead of each question
    chat: bool = True  # prompts as chats, examples as earlier turns; false: plain text, examples on the lines before


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """What to solve and how answers are rewarded. A text in place of the block names a task: task: gsm8k.

    That text, in a file or as an override, replaces the whole block by the task with its defaults;
    `reasoning_gym:letter_counting` names a generator as well.
    """

    arithmetic: ArithmeticTask | None = None
    file: FileTask | None = None
    gsm8k: Gsm8kTask | None = None
    math: MathTask | None = None
    guru_math: GuruMathTask | None = None
    toolace: ToolAceTask | None = None
    reasoning_gym: ReasoningGymTask | None = None
    system_prompt: str | None = None  # in place of the task's own; before the messages of every chat of task.file
    reward: str | None = None  # a built-in reward's name, or module:function; null: the task's own
    reward_weights: dict[str, float] = dataclasses.field(default_factory=dict)  # of the reward's parts, over its own
    success: float = 1.0  # a completion is accurate when its reward is at least this; not read with an accuracy part
    truncated: str = "train"  # completions cut at the token limit: train | mask | penalise
    truncated_reward: float = 0.0  # what they get with penalise


@dataclasses.dataclass(frozen=True)
class GradingConfig:
    """Worker processes, in which built-in rewards grade; a completion past a limit gets reward 0 and is counted."""

    workers: int = at_least(1, 2)
    seconds: float = at_least(0.1, 5.0)  # for one completion
    max_characters: int = at_least(1, 50_000)  # of a completion; a longer one is not graded


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
    long_prompts: str = "refuse"  # those beyond max_prompt_tokens: refuse | drop, with their number logged
    max_completion_tokens: int = at_least(1, 16)
    slots: int | None = at_least(
        1, None
    )  # completions decoded at a time, the next as one ends; null: all that memory holds
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
    mode: str = "sync"  # async: other processes draw meanwhile, on Ray; the settings below are for that alone
    max_staleness: int | None = at_least(0, None)  # optimiser steps behind the trainer; nothing staler is trained on
    generators: int = at_least(1, 1)  # processes that draw
    address: str | None = None  # of a Ray cluster that is there; null: Ray is started on this machine
    generator_seconds: float = at_least(1, 600.0)  # for one batch, after which a generator is started again


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Completions of others, from a store, beside those that the policy draws."""

    store: str = omegaconf.MISSING  # folder
    share: float = at_least(0, 0.5)  # that comes from there: a whole number of rows or groups
    of: str = "group"  # group: rows with the same prompt, in every group; batch: whole groups, in every batch


# A round draws a batch where one is due, and trains one step where enough groups have all their rewards: after the
# first rounds of a run, rounds are optimiser steps.


@dataclasses.dataclass(frozen=True)
class LateConfig:
    """Rewards that come after their completions; how many rounds is drawn evenly, for every completion."""

    shortest: int = at_least(0, 0)  # rounds
    longest: int = at_least(0, 0)  # rounds
    deadline: int | None = at_least(1, None)  # rounds after which a group goes without them; null: it waits


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """A buffer of groups that are trained on more than once, and how it is drawn from."""

    draw_every: int = at_least(1, 1)  # rounds from one batch that the policy draws to the next
    capacity: int = at_least(1, 512)  # groups; the one that came first gives way
    max_staleness: int | None = at_least(0, None)  # optimiser steps behind the trainer; null: no limit
    max_reuse: int = at_least(1, 4)  # times that a group is trained on
    half_life: float | None = at_least(0, None)  # optimiser steps in which a group's chance halves; null: it does not
    priority: str = "none"  # reward_spread | absolute_advantage: a group's chance is in proportion to it
    keep_no_signal: bool = False  # also groups whose rewards are all equal


@dataclasses.dataclass(frozen=True)
class ExperienceConfig:
    """What is trained on beside, or in place of, each batch that the policy has just drawn."""

    store: str | None = None  # folder; every batch comes from it, and groups are as large as they are there
    mix: MixConfig | None = None
    late: LateConfig | None = None
    replay: ReplayConfig | None = None
    missing_logprobs: str = "error"  # where a store has no behaviour log-probs: error | unneeded | initial | current
    record: bool = False  # keep what the policy draws in the run's folder, as a store


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
    tokens_per_micro_batch: int | None = at_least(
        1, None
    )  # in place of that: completions are packed, with a prompt each, into micro-batches of so many tokens
    checkpoint_every: int = at_least(1, 50)
    keep_checkpoints: int = at_least(1, 2)
    profile_steps: list[int] | None = None  # [first, last] step of a profiler's trace in the run's folder; null: none


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
class MeshConfig:
    """How devices are arranged; the three sizes multiply to their number, and -1, once at most, takes the rest."""

    data: int = -1  # rows of a batch are split, parameters are not
    fsdp: int = 1  # rows are split, and so are parameters and the optimiser's state
    tensor: int = 1  # heads, the MLP's units and the vocabulary are split; keep it within one host


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int = at_least(0, 0)
    output: str = omegaconf.MISSING  # folder of the run
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    grading: GradingConfig = dataclasses.field(default_factory=GradingConfig)
    warm_start: WarmStartConfig | None = None
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    regime: RegimeConfig = dataclasses.field(default_factory=RegimeConfig)
    experience: ExperienceConfig | None = None  # absent: the policy draws its own
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
