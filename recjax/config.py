"""The schema of a run's config file: every key, its type, its default, and what it must not say.

The blocks of config_model.py, config_experience.py and config_tasks.py are imported from here as well.
"""

import dataclasses
import math
from typing import Any, Literal

import omegaconf

from recjax.algorithms.options import require
from recjax.algorithms.reading import names_read
from recjax.config_experience import ExperienceConfig, LateConfig, MixConfig, RegimeConfig, ReplayConfig, RolloutConfig  # noqa: F401
from recjax.config_fields import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    at_least,
    check_numbers,
    number,
    require_defaults,
    schema_keys,
)
from recjax.config_model import DecoderShape, LoraConfig, MeshConfig, ModelConfig, WarmStartConfig  # noqa: F401
from recjax.config_tasks import ArithmeticTask, FileTask, GradingConfig, ReasoningGymTask, TaskConfig  # noqa: F401
from recjax.models.sampling import Sampling

MICRO_BATCH_TOKENS = 4096  # on each device, where no size is asked for: products are large, and arrays are not


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """A preset, and changes to any of its axes: `name` and options of the axis function.

    A name is of the axis' table or the user's own, `module:function`; docs/objectives.md has both.
    """

    preset: str = "grpo"  # `python -m recjax.objectives` lists them
    # What the loss sums: tokens, or pairs of completions.
    objective: dict[str, Any] = dataclasses.field(default_factory=dict)
    selection: dict[str, Any] = dataclasses.field(default_factory=dict)  # which completions are trained on
    advantage: dict[str, Any] = dataclasses.field(default_factory=dict)  # how rewards become advantages
    anchor: dict[str, Any] = dataclasses.field(default_factory=dict)  # the policy that ratios are measured from
    # Level of the ratio: the token, or the whole completion.
    ratio: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Which tokens get no gradient, by ratio and advantage.
    clip: dict[str, Any] = dataclasses.field(default_factory=dict)
    mask: dict[str, Any] = dataclasses.field(default_factory=dict)  # which other tokens or completions get no gradient
    weight: dict[str, Any] = dataclasses.field(default_factory=dict)  # weight of each token's gradient
    # Weight for the difference between anchor and behavior policy.
    correction: dict[str, Any] = dataclasses.field(default_factory=dict)
    regularizer: dict[str, Any] = dataclasses.field(default_factory=dict)  # a term added to the loss
    reduction: dict[str, Any] = dataclasses.field(default_factory=dict)  # how token losses become one loss
    reference_kl: dict[str, Any] = dataclasses.field(default_factory=dict)  # KL to the initial policy
    # KL to the initial policy, with importance weights.
    unbiased_reference_kl: dict[str, Any] = dataclasses.field(default_factory=dict)
    entropy: dict[str, Any] = dataclasses.field(default_factory=dict)  # a bonus for entropy
    distillation: dict[str, Any] = dataclasses.field(default_factory=dict)  # a teacher's log-probs as advantages

    def overrides(self) -> dict[str, dict[str, Any]]:
        """The axes that the user changed."""
        return {axis: options for axis, options in vars(self).items() if axis != "preset" and options}

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Every axis that the algorithm reads, with every option; see `presets.resolve`."""
        from recjax.algorithms import presets  # not at the top: tasks import this file, and their graders no JAX

        return presets.resolve(self.preset, self.overrides())

    def ignores_singletons(self) -> bool:
        """Whether the advantage of a group's only completion is always 0."""
        return self.resolved().get("advantage", {"singleton": "zero"}).get("singleton") == "zero"

    def check_singletons(self) -> None:
        """Refuses an algorithm that learns nothing from groups of one completion."""
        if self.ignores_singletons():
            axes = self.resolved()
            name = axes["advantage"]["name"] if "advantage" in axes else axes["objective"]["name"]
            raise ValueError(
                f"rollout.group_size = 1: {name} is always 0 for a group's only completion; raise it, or set"
                " algorithm.advantage={name: raw_reward}, or for an advantage that has it singleton: reward"
            )

    def build(self) -> "recjax.algorithms.losses.Algorithm":
        """The algorithm; see `presets.build_algorithm`."""
        from recjax.algorithms import presets  # as above

        try:
            return presets.build_algorithm(self.preset, self.overrides())
        except ValueError as error:
            raise ValueError(f"algorithm.{error}") from error


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a schedule and clipping of the gradient's global norm."""

    learning_rate: float = number(1e-6, low=0, high=1)  # learning rate of AdamW after the warm-up
    # Schedule of the learning rate; linear and cosine decay to zero over training.steps.
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = at_least(0, 0)  # optimizer steps in which the learning rate rises from zero
    clip_norm: float = number(1.0, above=0, high=math.inf)  # global norm that gradients are cut to; .inf: no clipping
    weight_decay: float = number(0.0, low=0, high=1)  # decoupled weight decay, as in AdamW
    beta1: float = number(0.9, low=0, below=1)  # decay of the mean of gradients
    beta2: float = number(0.999, low=0, below=1)  # decay of the mean of squared gradients
    epsilon: float = number(1e-8, above=0, high=1)  # added to the square root of the mean of squared gradients

    def check(self, steps: int) -> None:
        """Refuses a warm-up of all `steps` of the training."""
        remedy = f"must be below training.steps = {steps}"
        require(self.warmup_steps < steps, "optimizer.warmup_steps", self.warmup_steps, remedy)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Length of the run and how it is stored."""

    steps: int = at_least(1, 100)  # optimizer steps
    # Prompts, with their groups, in a micro-batch; null: as few as have some 4,000 tokens on each device.
    micro_batch_prompts: int | None = at_least(1, None)
    # In place of micro_batch_prompts: completions are packed into micro-batches of so many tokens; null: they are
    # packed where that is much less work.
    tokens_per_micro_batch: int | None = at_least(1, None)
    checkpoint_every: int = at_least(1, 50)  # optimizer steps
    keep_checkpoints: int = at_least(1, 2)  # the newest ones; older ones are deleted
    # Tokens to which a policy gives probability 0, log-probability −inf: error: they end the run; drop: they leave the
    # loss and are counted.
    impossible_tokens: Literal["error", "drop"] = "error"
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

    every: int = at_least(0, 50)  # optimizer steps between evaluations; 0: before and after training only
    problems: int = at_least(1, 256)  # number of held-out problems that are asked
    samples: int = at_least(1, 1)  # completions of each problem
    initial_kl: bool = False  # also log the KL to the initial policy, which costs one more forward pass
    temperature: float = number(1.0, low=0, high=HIGHEST_TEMPERATURE)  # temperature of sampling; 0: greedy
    top_k: int = at_least(0, 0)  # sample from this many of the most likely tokens; 0: all
    # Sample from the most likely tokens with this total probability; 1: all.
    top_p: float = number(1.0, above=0, high=1)
    # Sample from tokens at least this share as likely as the most likely token; 0: all.
    min_p: float = number(0.0, low=0, high=1)

    def sampling(self) -> Sampling:
        """The distribution that evaluation samples from."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def check(self) -> None:
        """Refuses what greedy completions do not have or read."""
        remedy = f"must be 0, for greedy completions, or at least {LOWEST_TEMPERATURE}"
        in_range = self.temperature == 0 or self.temperature >= LOWEST_TEMPERATURE
        require(in_range, "evaluation.temperature", self.temperature, remedy)
        if self.temperature == 0:
            remedy = "needs sampled completions; raise evaluation.temperature from 0, or leave it out"
            require_defaults("evaluation", self, ("initial_kl",), remedy)
            remedy = "is not read at evaluation.temperature = 0; remove it"
            require_defaults("evaluation", self, ("top_k", "top_p", "min_p"), remedy)


@dataclasses.dataclass(frozen=True)
class SamplesConfig:
    """Completions that were trained on, kept in the run's folder to be looked at: python -m recjax.samples."""

    every: int = at_least(0, 25)  # keep completions of every Nth batch; 0: keep none
    groups: int = at_least(1, 4)  # groups that are kept of such a batch
    megabytes: float = number(64.0, above=0)  # limit of all kept completions; after that no more are kept


@dataclasses.dataclass(frozen=True)
class TrackingConfig:
    """Trackers that get metrics, config, figures and samples beside the run's folder; one that is down stops nothing.

    A mapping holds what the module's `init` takes.
    """

    # Arguments of wandb.init, such as {project: sums}; WANDB_MODE=offline needs no account.
    wandb: dict[str, Any] | None = None
    # Arguments of trackio.init, such as {project: sums}; data stays on this machine.
    trackio: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int = number(0, low=0, high=2**32 - 1)  # seed of data order, sampling and initial parameters
    output: str = omegaconf.MISSING  # folder of the run; a run that was stopped goes on from it
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
    samples: SamplesConfig = dataclasses.field(default_factory=SamplesConfig)
    tracking: TrackingConfig = dataclasses.field(default_factory=TrackingConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    @property
    def follows(self) -> bool:
        """Whether it trains on a store as that grows."""
        return self.experience is not None and self.experience.follow

    @property
    def has_trajectories(self) -> bool:
        """Whether a row of a batch is a whole sequence, and a completion may have several."""
        return self.task.agent is not None or self.follows

    def micro_batches(self, positions: int, shards: int = 1) -> int:
        """Micro-batches of a step, where completions are not packed.

        Args:
            positions: of the batch, padding among them.
            shards: devices that share the rows.
        """
        prompts, asked = self.rollout.prompts_per_step, self.training.micro_batch_prompts
        if asked:
            return prompts // asked
        most = min(prompts // shards, positions // (MICRO_BATCH_TOKENS * shards))
        equal = (parts for parts in range(most, 1, -1) if prompts % (parts * shards) == 0)
        return next(equal, 1)


# Every dotted key and its field.
KEYS = schema_keys(Config)


def check(config: Config) -> None:
    """Refuses values out of range and settings that contradict each other or that nothing would read."""
    check_numbers(config)
    config.rollout.check()
    config.evaluation.check()
    config.optimizer.check(config.training.steps)
    config.model.check()
    config.task.check()
    config.grading.check(config.task)
    config.regime.check(config.experience.replay if config.experience else None, config.follows)
    if config.experience:
        config.experience.check(config.rollout, config.regime)
    if config.follows:
        config.experience.check_follows(config.regime, config.training.checkpoint_every)
    overlong, longest = config.task.overlong_tokens, config.rollout.max_completion_tokens
    remedy = f"must be at most rollout.max_completion_tokens = {longest}"
    require(overlong is None or overlong <= longest, "task.overlong_tokens", overlong, remedy)
    config.mesh.check()
    config.training.check(config.rollout)
    _check_algorithm(config)
    _check_trajectories(config)


def _check_trajectories(config: Config) -> None:
    """Refuses trajectories, of an agent or a followed store, beside what they do not work with or do not read."""
    context = config.rollout.max_context_tokens
    remedy = "is of agents and followed stores; set task.agent or experience.follow, or remove it"
    require(config.has_trajectories or context is None, "rollout.max_context_tokens", context, remedy)
    if not config.has_trajectories:
        return
    by = "task.agent" if config.task.agent else "experience.follow"
    remedy = f"is needed with {by}: most tokens of a trajectory's row, its prompts, replies and all between them"
    require(context is not None, "rollout.max_context_tokens", context, remedy)
    least = config.rollout.max_completion_tokens
    remedy = f"must be above rollout.max_completion_tokens = {least}, the tokens of one reply"
    require(context > least, "rollout.max_context_tokens", context, remedy)
    if config.task.agent:
        _check_agent(config)
    read = {"completion_mask", "scored_logprobs", "scored_log_ratio", "scored_entropy"}
    algorithm, name = config.algorithm.build(), config.algorithm.advantage.get("name")
    remedy = "has advantages of tokens, and those of trajectories are of the whole, or of turns; take another"
    names = {*names_read(algorithm.advantage)}
    of_tokens = algorithm.objective is None and read & names and "trajectories" not in names
    require(not of_tokens, "algorithm.advantage", name or config.algorithm.preset, remedy)
    remedy = f"compares whole groups, which packing does not keep together with {by}; remove it"
    packed = config.training.tokens_per_micro_batch if algorithm.compares_completions else None
    require(packed is None, "training.tokens_per_micro_batch", packed, remedy)


def _check_agent(config: Config) -> None:
    """Refuses an agent beside what it does not work with."""
    experience = config.experience
    remedy = "does not work with task.agent yet; agents run in the training process, so take sync"
    require(config.regime.mode == "sync", "regime.mode", config.regime.mode, remedy)
    remedy = "does not work with task.agent yet, whose batches are of its own trajectories; remove one of them"
    for name in ("store", "mix") if experience else ():
        require(getattr(experience, name) is None, f"experience.{name}", getattr(experience, name), remedy)
    remedy = "is of completions of one turn; remove it, or weigh the part turns in task.reward_weights"
    require(config.task.overlong_tokens is None, "task.overlong_tokens", config.task.overlong_tokens, remedy)


def _check_algorithm(config: Config) -> None:
    """Refuses an algorithm that cannot be built, and what it needs of other blocks or leaves unread there."""
    algorithm, teacher = config.algorithm.build(), config.model.teacher
    remedy = "is not read while algorithm.distillation.coefficient is 0; set that, or remove it"
    require(algorithm.needs_teacher or teacher is None, "model.teacher", teacher, remedy)
    remedy = "needs a teacher: set model.teacher to the folder or hub name of a model with the policy's tokenizer"
    require(teacher is not None or not algorithm.needs_teacher, "algorithm.distillation", "on", remedy)
    remedy = "replaces rewards, and this algorithm's advantage is of their parts; take train or mask"
    penalizes = config.task.truncated == "penalize"
    require(not (penalizes and algorithm.reads("reward_parts")), "task.truncated", config.task.truncated, remedy)
    of_turns, name = algorithm.reads("turn_rewards", "token_turns"), config.algorithm.advantage.get("name")
    remedy = "replaces rewards of whole trajectories, and this algorithm's advantage is of turns; take train or mask"
    require(not (penalizes and of_turns), "task.truncated", config.task.truncated, remedy)
    remedy = "is of the turns of agents, which nothing else records; set task.agent, or take another"
    require(config.task.agent is not None or not of_turns, "algorithm.advantage", name, remedy)
    from_store = config.experience is not None and config.experience.store is not None
    if config.rollout.group_size == 1 and (config.follows or not from_store):
        config.algorithm.check_singletons()
