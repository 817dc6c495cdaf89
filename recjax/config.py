"""The schema of a run's config file: every key, its type, its default, and what it must not say."""

import dataclasses
import math
import typing
from typing import Any, Literal

import omegaconf

from recjax.algorithms import presets
from recjax.algorithms.losses import Algorithm
from recjax.algorithms.options import require
from recjax.config_fields import at_least, check_numbers, number, require_defaults, require_one, schema_keys
from recjax.config_tasks import ArithmeticTask, FileTask, GradingConfig, ReasoningGymTask, TaskConfig  # noqa: F401
from recjax.models.sampling import Sampling

Projection = Literal["query", "key", "value", "output", "gate", "up", "down"]
Remat = Literal["none", "dots", "full"]
Attention = Literal["auto", "plain", "cudnn", "splash"]
# What stands for behaviour log-probs that a store lacks: nothing, so that they are refused; nothing, as the algorithm
# reads none; those of the initial policy; or those of the policy that is trained, as it is when the rows arrive.
MissingLogprobs = Literal["error", "unneeded", "initial", "current"]
Priority = Literal["none", "reward_spread", "absolute_advantage"]


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
    targets: list[Projection] = dataclasses.field(default_factory=lambda: ["query", "key", "value", "output"])


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The policy: either `path` or `decoder`."""

    path: str | None = None  # Hugging Face folder or hub name
    decoder: DecoderShape | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 where the device has it
    # What the backward pass computes again: nothing, all but projections, or whole layers.
    remat: Remat = dataclasses.field(default="none", metadata={"became": "what was true is now full, and false none"})
    attention: Attention = "auto"  # cudnn: NVIDIA GPUs; splash: TPUs; auto: the device's, where it fits the model
    lora: LoraConfig | None = None
    freeze: list[str] = dataclasses.field(default_factory=list)  # regular expressions of parameter paths left as is
    logprob_chunk: int = at_least(1, 1024)  # token positions whose vocabulary scores a device has at one time

    def check(self) -> None:
        """Refuses two models or none, heads that do not divide a decoder's sizes, and parts frozen beside adapters."""
        require_one("model", {"path": self.path, "decoder": self.decoder})
        if shape := self.decoder:
            hidden, heads = shape.hidden_size, shape.num_heads
            remedy = f"must be an even multiple of model.decoder.num_heads = {heads}"
            require(hidden % (2 * heads) == 0, "model.decoder.hidden_size", hidden, remedy)
            remedy = f"must divide model.decoder.num_heads = {heads}"
            require(heads % shape.num_kv_heads == 0, "model.decoder.num_kv_heads", shape.num_kv_heads, remedy)
        if self.lora:
            remedy = f"takes some of {', '.join(typing.get_args(Projection))}"
            require(bool(self.lora.targets), "model.lora.targets", self.lora.targets, remedy)
            remedy = "is not read beside model.lora, which trains its adapters and nothing else; remove one of them"
            require(not self.freeze, "model.freeze", self.freeze, remedy)


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Supervised training that makes the base policy, on answers of which some hold one mistake."""

    steps: int = at_least(1, 400)
    batch_size: int = at_least(1, 128)
    learning_rate: float = at_least(0, 2e-3)
    wrong_fraction: float = number(0.5, low=0, high=1)


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled."""

    prompts_per_step: int = at_least(1, 16)
    group_size: int = at_least(1, 8)
    max_prompt_tokens: int | None = at_least(1, None)  # null: the longest prompt of the data
    long_prompts: Literal["refuse", "drop"] = "refuse"  # those beyond max_prompt_tokens; drop logs their number
    max_completion_tokens: int = at_least(1, 16)
    slots: int | None = at_least(1, None)  # completions decoded at a time, the next as one ends; null: all at once
    temperature: float = number(1.0, above=0)  # training needs diverse samples
    top_k: int = at_least(0, 0)  # 0: all tokens
    top_p: float = number(1.0, above=0, high=1)  # 1: no cut
    stop: list[str] = dataclasses.field(default_factory=list)  # strings of one token that end a completion, beside EOS

    def sampling(self) -> Sampling:
        """The distribution that a run samples from, and trains under."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    def check(self) -> None:
        """Refuses prompts dropped beyond no limit."""
        remedy = "needs rollout.max_prompt_tokens, beyond which prompts are dropped; set that, or remove it"
        bounded = self.long_prompts == "refuse" or self.max_prompt_tokens is not None
        require(bounded, "rollout.long_prompts", self.long_prompts, remedy)


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Completions of others, from a store, beside those that the policy samples."""

    store: str = omegaconf.MISSING  # folder
    share: float = number(0.5, above=0, below=1)  # that comes from there: a whole number of rows or groups
    of: Literal["group", "batch"] = "group"  # rows with the same prompt in every group, or whole groups in every batch

    def check(self, rollout: RolloutConfig) -> None:
        """Refuses a share that is no whole number of rows or groups."""
        in_group = self.of == "group"
        count = rollout.group_size if in_group else rollout.prompts_per_step
        remedy = f"must be a whole number out of rollout.{'group_size' if in_group else 'prompts_per_step'} = {count}"
        require(abs(self.share * count - round(self.share * count)) < 1e-6, "experience.mix.share", self.share, remedy)


# A round samples a batch where one is due, and trains one step where enough groups have all their rewards: after the
# first rounds of a run, rounds are optimiser steps.


@dataclasses.dataclass(frozen=True)
class LateConfig:
    """Rewards that come after their completions; how many rounds is sampled evenly, for every completion."""

    shortest: int = at_least(0, 0)  # rounds
    longest: int = at_least(0, 0)  # rounds
    deadline: int | None = at_least(1, None)  # rounds after which a group goes without them; null: it waits


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """A buffer of groups that are trained on more than once, and how it is sampled from."""

    draw_every: int = at_least(1, 1)  # rounds from one batch that the policy samples to the next
    capacity: int = at_least(1, 512)  # groups; the one that came first gives way
    max_staleness: int | None = at_least(0, None)  # optimiser steps behind the trainer; null: no limit
    max_reuse: int = at_least(1, 4)  # times that a group is trained on
    half_life: float | None = number(None, above=0)  # optimiser steps in which a group's chance halves; null: never
    priority: Priority = "none"  # a group's chance is in proportion to it
    keep_no_signal: bool = False  # also groups whose rewards are all equal

    def check(self, sampled: int) -> None:
        """Refuses a buffer that cannot give a batch its `sampled` groups, or gives them too seldom."""
        remedy = f"must hold the {sampled} groups of a batch that come from it"
        require(self.capacity >= sampled, "experience.replay.capacity", self.capacity, remedy)
        remedy = f"must be at least experience.replay.draw_every = {self.draw_every}, or batches run out"
        require(self.max_reuse >= self.draw_every, "experience.replay.max_reuse", self.max_reuse, remedy)


@dataclasses.dataclass(frozen=True)
class RegimeConfig:
    """How far behind the trainer the sampler is."""

    sync_interval: int = at_least(1, 1)  # optimiser steps from one copy of the weights to the next
    sync_offset: int = at_least(0, 0)  # batches sampled ahead of the one being trained on
    offline: bool = False  # every batch comes from the initial policy
    mode: Literal["sync", "async"] = "sync"  # async: processes on Ray sample meanwhile; what follows is for that alone
    max_staleness: int | None = at_least(0, None)  # optimiser steps behind the trainer; nothing staler is trained on
    generators: int = at_least(1, 1)  # processes that sample
    address: str | None = None  # of a Ray cluster that is there; null: Ray is started on this machine
    generator_seconds: float = at_least(1, 600.0)  # for one batch, after which a generator is started again

    def check(self, replay: ReplayConfig | None) -> None:
        """Refuses settings that the mode does not read, and a bound of staleness that no batch could keep."""
        if self.offline:
            remedy = "is not read when regime.offline is true, where the sampler never gets new weights;"
            require_defaults("regime", self, ("sync_interval", "sync_offset"), f"{remedy} remove one of them")
        if self.mode == "sync":
            names = ("max_staleness", "generators", "address", "generator_seconds")
            remedy = "is read with regime.mode = async alone; set that, or remove it"
            require_defaults("regime", self, names, remedy)
            return
        remedy = "has no meaning with regime.mode = async, where generators take new weights; remove one of them"
        require(not self.offline, "regime.offline", self.offline, remedy)
        remedy = "is not read with regime.mode = async, where regime.max_staleness bounds what is sampled ahead;"
        require_defaults("regime", self, ("sync_offset",), f"{remedy} remove it")
        remedy = "is needed with regime.mode = async: optimiser steps that experience may be behind the trainer, from 0"
        require(self.max_staleness is not None, "regime.max_staleness", None, remedy)
        least, why = self.sync_interval - 1, f"regime.sync_interval = {self.sync_interval}"
        if replay:
            least, why = least + replay.draw_every - 1, f"{why} and experience.replay.draw_every = {replay.draw_every}"
        remedy = f"must be at least {least}, which {why} come to"
        require(self.max_staleness >= least, "regime.max_staleness", self.max_staleness, remedy)


@dataclasses.dataclass(frozen=True)
class ExperienceConfig:
    """What is trained on beside, or in place of, each batch that the policy has just sampled."""

    store: str | None = None  # folder; every batch comes from it, and groups are as large as they are there
    mix: MixConfig | None = None
    late: LateConfig | None = None
    replay: ReplayConfig | None = None
    missing_logprobs: MissingLogprobs = "error"  # where a store has no behaviour log-probs
    record: bool = False  # keep what the policy samples in the run's folder, as a store

    def check(self, rollout: RolloutConfig, regime: RegimeConfig) -> None:
        """Refuses an empty block, ways that exclude each other, and what its own blocks refuse."""
        if not (self.store or self.mix or self.late or self.replay or self.record):
            raise ValueError("experience: give at least one of store, mix, late, replay and record, or remove it")
        if self.store:
            remedy = f"is not read beside experience.store = {self.store!r}, from which every batch comes; remove one"
            require_defaults("experience", self, ("mix", "late", "replay", "record"), remedy)
            require_defaults("regime", regime, tuple(vars(regime)), remedy)
        elif not self.mix:
            remedy = "is read with experience.store and experience.mix alone; remove it"
            require_defaults("experience", self, ("missing_logprobs",), remedy)
        sampled = rollout.prompts_per_step
        if self.mix:
            self.mix.check(rollout)
            sampled -= round(self.mix.share * sampled) if self.mix.of == "batch" else 0
        if late := self.late:
            remedy = f"must be at least experience.late.shortest = {late.shortest}"
            require(late.longest >= late.shortest, "experience.late.longest", late.longest, remedy)
        if self.replay:
            self.replay.check(sampled)


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

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Every axis that the algorithm reads, with every option; see `presets.resolve`."""
        return presets.resolve(self.preset, self.overrides())

    def build(self) -> Algorithm:
        """The algorithm; see `presets.build_algorithm`."""
        try:
            return presets.build_algorithm(self.preset, self.overrides())
        except ValueError as error:
            raise ValueError(f"algorithm.{error}") from error


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a schedule and clipping of the gradient's global norm."""

    learning_rate: float = at_least(0, 1e-6)
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # the last two decay to zero over training.steps
    warmup_steps: int = at_least(0, 0)
    clip_norm: float = number(1.0, above=0, high=math.inf)  # .inf: no clipping
    weight_decay: float = at_least(0, 0.0)
    beta1: float = number(0.9, low=0, below=1)
    beta2: float = number(0.999, low=0, below=1)
    epsilon: float = number(1e-8, above=0)

    def check(self, steps: int) -> None:
        """Refuses a warm-up of all `steps` of the training."""
        remedy = f"must be below training.steps = {steps}"
        require(self.warmup_steps < steps, "optimizer.warmup_steps", self.warmup_steps, remedy)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Length of the run and how it is stored."""

    steps: int = at_least(1, 100)
    micro_batch_prompts: int | None = at_least(1, None)  # prompts that a gradient is taken of at once; null: all
    # In place of that: completions are packed, with a prompt each, into micro-batches of so many tokens.
    tokens_per_micro_batch: int | None = at_least(1, None)
    checkpoint_every: int = at_least(1, 50)
    keep_checkpoints: int = at_least(1, 2)
    profile_steps: list[int] | None = None  # [first, last] step of a profiler's trace in the run's folder; null: none

    def check(self, rollout: RolloutConfig) -> None:
        """Refuses micro-batches of two kinds or of unequal size, and steps to trace that the run does not have."""
        key, micro, budget = "training.micro_batch_prompts", self.micro_batch_prompts, self.tokens_per_micro_batch
        remedy = f"must divide rollout.prompts_per_step = {rollout.prompts_per_step}"
        require(micro is None or rollout.prompts_per_step % micro == 0, key, micro, remedy)
        remedy = f"is not read beside training.tokens_per_micro_batch = {budget}; remove one of them"
        require(micro is None or budget is None, key, micro, remedy)
        traced, steps = self.profile_steps, f"1 <= first <= last <= training.steps = {self.steps}"
        in_order = traced is None or (len(traced) == 2 and 1 <= traced[0] <= traced[1] <= self.steps)
        remedy = f"takes [first, last], steps with {steps}, such as [3, 4]; or null"
        require(in_order, "training.profile_steps", traced, remedy)


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Sampled accuracy on held-out problems."""

    every: int = at_least(0, 50)  # optimiser steps; 0: before and after only
    problems: int = at_least(1, 256)
    samples: int = at_least(1, 1)  # completions a problem
    initial_kl: bool = False  # KL to the initial policy as well, at the cost of one more forward pass
    temperature: float = at_least(0, 1.0)
    top_k: int = at_least(0, 0)
    top_p: float = number(1.0, above=0, high=1)

    def sampling(self) -> Sampling:
        """The distribution that evaluation samples from."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    def check(self) -> None:
        """Refuses what greedy completions do not have or read."""
        if self.temperature == 0:
            remedy = "needs sampled completions; raise evaluation.temperature from 0, or leave it out"
            require_defaults("evaluation", self, ("initial_kl",), remedy)
            remedy = "is not read at evaluation.temperature = 0; remove it"
            require_defaults("evaluation", self, ("top_k", "top_p"), remedy)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How devices are arranged; the three sizes multiply to their number, and -1, once at most, takes the rest."""

    data: int = -1  # rows of a batch are split, parameters are not
    fsdp: int = 1  # rows are split, and so are parameters and the optimiser's state
    tensor: int = 1  # heads, the MLP's units and the vocabulary are split; keep it within one host

    def check(self) -> None:
        """Refuses sizes that are no numbers of devices, and more than one rest."""
        for name, size in vars(self).items():
            remedy = "takes a number of devices, or -1 for the rest of them"
            require(size == -1 or size > 0, f"mesh.{name}", size, remedy)
        rest = [f"mesh.{name}" for name, size in vars(self).items() if size == -1]
        if len(rest) > 1:
            raise ValueError(f"{' and '.join(rest)} are both -1, but only one of them can take the rest; set the other")


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
    experience: ExperienceConfig | None = None  # absent: the policy samples its own
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    def prompts_per_micro_batch(self) -> int:
        """Prompts whose groups a gradient is taken of at once, where completions are not packed."""
        return self.training.micro_batch_prompts or self.rollout.prompts_per_step

    def micro_batches(self) -> int:
        """Micro-batches of a step, where completions are not packed."""
        return self.rollout.prompts_per_step // self.prompts_per_micro_batch()


# Every dotted key and its field.
KEYS = schema_keys(Config)


def check(config: Config) -> None:
    """Refuses values out of range and settings that contradict each other or that nothing would read.

    Raises:
        ValueError: with key, value and remedy.
    """
    check_numbers(config)
    config.rollout.check()
    config.evaluation.check()
    config.optimizer.check(config.training.steps)
    config.model.check()
    config.task.check()
    config.grading.check(config.task)
    config.regime.check(config.experience.replay if config.experience else None)
    if config.experience:
        config.experience.check(config.rollout, config.regime)
    config.mesh.check()
    config.training.check(config.rollout)
    config.algorithm.build()
