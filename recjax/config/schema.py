"""The schema of a run: every key with its type, default, bounds and meaning, and the contradictions between keys."""

import inspect
import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import pydantic

from recjax.algorithms.options import checked_value, described, did_you_mean
from recjax.algorithms.reading import RESCORED
from recjax.config.experience import EngineConfig, ExperienceConfig, RegimeConfig, RolloutConfig
from recjax.config.fields import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    Bool,
    ConfigBlock,
    Float,
    Int,
    Number,
    checked,
    extra_of,
    key,
    refuse_with,
    refuse_without,
    schema_keys,
    value_of,
)
from recjax.config.model import POLICY, MeshConfig, ModelConfig, WarmStartConfig
from recjax.config.optimizers import (
    ADAMW,
    build_optimizer,
    check_optimizer,
    checked_options,
    optimizer_function,
    takes_weight_decay,
)
from recjax.config.parts import PLAYED
from recjax.config.tasks import GradingConfig, TaskConfig, named_block, named_task
from recjax.errors import UserError
from recjax.models.sampling import Sampling, TokenRecord

if TYPE_CHECKING:
    import optax

    from recjax.algorithms.algorithm import Algorithm

MICRO_BATCH_TOKENS = 4096  # default for each device: matmuls are large enough, and arrays small enough


# Axes that have functions by name.
_AXES = ("objective", "selection", "advantage", "anchor", "ratio", "clip", "mask", "weight", "correction")
_AXES += ("regularizer", "term", "reduction")


class AlgorithmConfig(ConfigBlock):
    """A preset, and changes to any of its axes: the axis function's `name` and options.

    The name is one of the axis' table or your own `module:function`; docs/objectives.md has both.
    """

    preset: str = key("grpo", "Name of a preset; `python -m recjax.objectives` lists them")
    objective: dict[str, Any] = key(
        dict, "Terms that the loss sums: tokens, pairs of completions, or your own loss of each token"
    )
    selection: dict[str, Any] = key(dict, "Completions to train on")
    advantage: dict[str, Any] = key(dict, "Advantages from rewards")
    anchor: dict[str, Any] = key(dict, "Policy in the ratio's denominator")
    ratio: dict[str, Any] = key(dict, "Level of the ratio: the token, or the whole completion")
    clip: dict[str, Any] = key(dict, "Tokens without gradient, by ratio and advantage")
    mask: dict[str, Any] = key(dict, "Other tokens or completions without gradient")
    weight: dict[str, Any] = key(dict, "Weight of each token's gradient")
    correction: dict[str, Any] = key(dict, "Weight for the difference between anchor and behavior policy")
    regularizer: dict[str, Any] = key(dict, "Term added to the loss")
    term: dict[str, Any] = key(dict, "Your own term, added to the loss as well")
    reduction: dict[str, Any] = key(dict, "Reduction of token losses to one loss")
    reference_kl: dict[str, Any] = key(dict, "KL to the initial policy, or to model.reference")
    unbiased_reference_kl: dict[str, Any] = key(dict, "The same KL, with importance weights")
    entropy: dict[str, Any] = key(dict, "Entropy bonus")
    distillation: dict[str, Any] = key(dict, "Advantages from a teacher's log-probs")
    log_ratio_penalty: dict[str, Any] = key(dict, "Penalty on the log-ratio to the behavior policy, in the advantages")
    teacher_divergence: dict[str, Any] = key(dict, "Divergence from a teacher's next-token distributions")
    score_centering: dict[str, Any] = key(
        dict, "Removal of the gradient's mean under the sampler; see rollout.kept_ids and rollout.recorded_top_k"
    )
    observations: dict[str, Any] = key(dict, "Cross-entropy on an agent's observations")

    @pydantic.field_validator(*_AXES, mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """The block of an axis' short forms: the name of a function, or a function of a module."""
        value = named_block(value)
        block = value
        if not isinstance(value, Mapping):
            block = {"name": value}
        function = block.get("name")
        if not callable(function):
            return value
        name = "<object>"
        if hasattr(function, "__qualname__"):
            name = f"{function.__module__}:{function.__qualname__}"
        if "<" in name or name.startswith("__main__:"):
            raise UserError(
                problem="a config takes functions by name", remedy="define it in a module and give module:function"
            )
        return {**block, "name": name}

    def overrides(self) -> dict[str, dict[str, Any]]:
        """The axes that the user changed."""
        return {axis: options for axis, options in vars(self).items() if axis != "preset" and options}

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Every axis that the algorithm reads, with every option; see `presets.resolve`."""
        from recjax.algorithms import presets  # imported here, so that grading workers start without JAX

        return presets.resolve(self.preset, self.overrides())

    def ignores_singletons(self) -> bool:
        """True if the algorithm learns nothing from a group's only completion; False for a user's own advantage."""
        algorithm = self.build()
        if algorithm.baseline != "group" or algorithm.values_singletons or algorithm.has_bonus:
            return False
        return ":" not in self.resolved().get("advantage", {"name": ""})["name"]

    def signal(self, task: TaskConfig) -> Literal["difference", "reward", "any"]:
        """The groups that the algorithm learns from.

        difference: groups whose completions differ in reward. reward: groups with a reward that is not 0. any: all
        groups, because their rewards are compared with those of other groups, or something else teaches as well.
        """
        algorithm = self.build()
        if algorithm.baseline == "batch" or algorithm.observations is not None:
            return "any"
        # With {better}, only completions with a better one have a prompt of the teacher.
        if algorithm.needs_teacher and not task.shows_better():
            return "any"
        if algorithm.baseline is None:
            if algorithm.needs_teacher:
                return "difference"
            return "any"
        if algorithm.baseline == "group" and not algorithm.has_bonus:
            return "difference"
        return "reward"

    def check(self, config: "Config") -> None:
        """Refuses an algorithm that cannot be built, and contradictions between the algorithm and other blocks."""
        algorithm = self.build()
        self._check_teacher(algorithm, config)
        if config.model.reference and not algorithm.needs_reference:
            raise UserError(
                "model.reference",
                "does not apply, as this algorithm reads no reference policy",
                "set algorithm.reference_kl.coefficient, use a preset that reads one, such as tba, or remove this key",
                value=config.model.reference,
            )
        if algorithm.score_centering is not None and not config.known_tokens:
            self._refuse(
                "score_centering",
                "reads the sampler's most likely tokens, which are not recorded",
                "set rollout.recorded_top_k=128",
            )
        self._check_rewards(algorithm, config)
        self._check_trajectories(algorithm, config)
        self._check_sizes(algorithm, config)

    def _check_teacher(self, algorithm: "Algorithm", config: "Config") -> None:
        """Refuses a teacher that nothing reads or that teaches nothing, and terms that lack their teacher."""
        teacher = config.model.teacher
        if teacher and not algorithm.needs_teacher:
            raise UserError(
                "model.teacher",
                "does not apply, as this algorithm reads no teacher",
                "set the coefficient of algorithm.distillation or algorithm.teacher_divergence, or remove this key",
                value=teacher,
            )
        if algorithm.needs_teacher and not teacher:
            axis = "distillation"
            if algorithm.distillation is None:
                axis = "teacher_divergence"
            raise UserError(
                f"algorithm.{axis}",
                "needs a teacher",
                "set model.teacher to the folder or hub name of a model with the policy's tokenizer",
                value=getattr(self, axis),
            )
        if teacher == POLICY and config.model.teacher_rate == 1 and not config.task.teacher_template:
            raise UserError(
                "model.teacher",
                "has the weights and prompts of the policy, which learns nothing from it",
                "set task.teacher_template, or model.teacher_rate below 1",
                value=teacher,
            )

    def _check_rewards(self, algorithm: "Algorithm", config: "Config") -> None:
        """Refuses rewards that the algorithm's advantage cannot read."""
        reads_parts = algorithm.reads("reward_parts")
        reads_turns = algorithm.reads("turn_rewards", "token_turns")
        if config.task.truncated == "penalize" and (reads_parts or reads_turns):
            which = "the rewards of turns"
            if reads_parts:
                which = "the rewards' parts"
            raise UserError(
                "task.truncated",
                f"replaces rewards, but this algorithm's advantage reads {which}",
                "use train or mask",
                value="penalize",
            )
        if reads_parts and config.task.agent_failure_reward is not None:
            raise UserError(
                "task.agent_failure_reward",
                "has no effect, because this algorithm's advantage reads the rewards' parts, which a failed agent"
                " has not",
                "remove it, or use another advantage",
                value=config.task.agent_failure_reward,
            )
        if reads_parts and config.task.mixture:
            self._refuse(
                "advantage",
                "reads the rewards' parts, whose weights differ between tasks of task.mixture",
                "use another advantage",
            )
        experience = config.experience
        if experience is not None and (experience.store or experience.mix):
            return
        if reads_turns and not config.task.agent:
            self._refuse(
                "advantage", "reads the turns of agents", "set task.agent or experience.store, or use another advantage"
            )

    def _check_trajectories(self, algorithm: "Algorithm", config: "Config") -> None:
        """Refuses terms and advantages that the kind of the run's completions does not allow."""
        if not config.has_trajectories:
            if algorithm.observations is not None:
                self._refuse(
                    "observations",
                    "needs an agent's observations, which completions of a single turn lack",
                    "set task.agent or experience.follow, or remove it",
                )
            return
        problem = self.problem_with_trajectories()
        if problem:
            self._refuse("advantage", problem)

    def _check_sizes(self, algorithm: "Algorithm", config: "Config") -> None:
        """Refuses groups and batches of one completion whose advantage is always 0."""
        rollout = config.rollout
        if config.experience is not None and config.experience.store and not config.follows:
            return  # its groups may have any size
        axes = self.resolved()
        name = axes.get("advantage", axes["objective"])["name"]
        if rollout.group_size == 1 and self.ignores_singletons():
            raise UserError(
                "rollout.group_size",
                f"{name} is always 0 for a group's only completion",
                "raise it, or set algorithm.advantage={name: raw_reward}, or singleton: reward if the advantage has it",
                value=1,
            )
        is_users = ":" in name
        if rollout.prompts_per_step * rollout.group_size == 1 and algorithm.baseline == "batch" and not is_users:
            raise UserError(
                "rollout.prompts_per_step", f"{name} is always 0 for a batch's only completion", "raise it", value=1
            )
        if rollout.group_size == 1 and config.task.shows_better():
            raise UserError(
                "task.teacher_template",
                "names {better}, which a prompt's only completion never has",
                "raise rollout.group_size",
                value=config.task.teacher_template,
            )

    def _refuse(self, axis: str, problem: str, remedy: str = "") -> NoReturn:
        """Refuses an axis, or the preset if the preset sets the axis."""
        name = "preset"
        if getattr(self, axis):
            name = axis
        raise UserError(f"algorithm.{name}", problem, remedy, value=getattr(self, name))

    def problem_with_trajectories(self) -> str:
        """The reason why the algorithm cannot train on agents' trajectories; empty if it can."""
        algorithm = self.build()
        names = set(algorithm.advantage.reads)
        token_names = {"completion_mask", "scored_logprobs", "scored_log_ratio", "scored_entropy"}
        if algorithm.objective is not None or names.isdisjoint(token_names) or "trajectories" in names:
            return ""
        return "computes advantages of tokens; trajectories need advantages of whole trajectories or of turns"

    def build(self) -> "Algorithm":
        """The algorithm; see `presets.build_algorithm`."""
        from recjax.algorithms import presets  # imported here, so that grading workers start without JAX

        try:
            return presets.build_algorithm(self.preset, self.overrides())
        except UserError as error:
            where = f"algorithm.{error.where}"
            raise UserError(where, error.problem, error.remedy, error.value) from error


_SCHEDULES = {
    "constant": {"name": "constant_schedule"},
    "linear": {"name": "linear_schedule", "end_value": 0.0},
    "cosine": {"name": "cosine_decay_schedule"},
}


class OptimizerConfig(ConfigBlock):
    """AdamW, or another optimizer, with a schedule and clipping of the gradient's global norm."""

    name: str = key(
        ADAMW,
        "Optimizer: a function of optax or optax.contrib such as adamw, sgd, muon, lion or adafactor; or your own"
        " module:function, which takes learning_rate and options and returns an optax.GradientTransformation",
    )
    options: dict[str, Any] = key(
        dict, "Further arguments of the optimizer's function, such as {momentum: 0.9} for sgd"
    )
    learning_rate: Float = key(1e-6, "Learning rate after the warm-up", ge=0, le=1)
    schedule: Literal["constant", "linear", "cosine"] | dict[str, Any] = key(
        "constant",
        "Learning rate schedule after the warm-up; linear and cosine decay to zero over training.steps. A mapping names"
        " an optax schedule with its arguments, such as {name: cosine_decay_schedule, alpha: 0.1}; by default its peak"
        " is optimizer.learning_rate and its length the steps after the warm-up",
    )
    warmup_steps: Int = key(
        0, "Optimizer steps in which the learning rate rises from zero", note="Must be below training.steps.", ge=0
    )
    clip_norm: Number = key(1.0, "Limit of the gradients' global norm; .inf: no clipping", gt=0, le=math.inf)
    weight_decay: Float = key(
        0.0, "Argument weight_decay of the optimizer's function; decoupled from the gradient in AdamW", ge=0, le=1
    )
    beta1: Float = key(0.9, "Decay of the gradients' mean", note="Only with optimizer.name = adamw.", ge=0, lt=1)
    beta2: Float = key(
        0.999, "Decay of the squared gradients' mean", note="Only with optimizer.name = adamw.", ge=0, lt=1
    )
    epsilon: Float = key(
        1e-8,
        "Added to the square root of the squared gradients' mean",
        note="Only with optimizer.name = adamw.",
        gt=0,
        le=1,
    )
    state: Literal["run", "new"] = key(
        "run",
        "Optimizer state before the first step with model.run: that run's state, or a new one",
        note="Only with model.run.",
    )

    def check(self, config: "Config") -> None:
        """Refuses keys of other optimizers or runs, and an optimizer or a schedule that cannot be built."""
        steps = config.training.steps
        if self.warmup_steps and self.warmup_steps >= steps:
            raise UserError(
                "optimizer.warmup_steps", f"must be below training.steps = {steps}", value=self.warmup_steps
            )
        if not config.model.run:
            refuse_without(config, ["optimizer.state"], "model.run")
        if self.name != ADAMW:
            names = ["optimizer.beta1", "optimizer.beta2", "optimizer.epsilon"]
            refuse_without(config, names, f"optimizer.name = {ADAMW}")
        options = self.build_options()
        if self.name != ADAMW or self.options:
            function = optimizer_function(self.name)
            # Both are traced numbers in a run's update, and so may be equal here.
            check_optimizer(
                self.name, lambda rate: build_optimizer(function, options, rate, self.weight_decay and rate)
            )
        if isinstance(self.schedule, str):
            return
        import jax  # imported here, so that grading workers start without JAX

        try:  # shapes only, because a real array would claim the local devices
            jax.eval_shape(lambda count: self.build_schedule(steps)(count), 0)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                "optimizer.schedule", f"optax refuses it: {described(error)}", value=self.schedule
            ) from error

    def build_options(self) -> dict[str, Any]:
        """Arguments of the optimizer's function apart from the learning rate and the weight decay, which may vary.

        Raises:
            UserError: no such optimizer, or an option or a weight decay that it does not take.
        """
        if self.name == ADAMW and not self.options:
            options = {}
        else:
            function = optimizer_function(self.name)
            options = checked_options(self.name, function, self.options)
            if self.weight_decay != 0 and not takes_weight_decay(function):
                raise UserError(
                    "optimizer.weight_decay", f"{self.name} takes none", "remove it", value=self.weight_decay
                )
        if self.name == ADAMW:
            options |= {"b1": self.beta1, "b2": self.beta2, "eps": self.epsilon}
        return options

    def build_schedule(self, steps: int) -> "optax.Schedule":
        """Learning rate by number of previous updates: a linear warm-up, then the schedule.

        Args:
            steps: number of updates, over which a schedule without its own length extends.
        Raises:
            UserError: a schedule that optax lacks, or arguments that it does not take.
        """
        import optax  # imported here, so that grading workers start without JAX

        chosen: Mapping[str, Any]
        if isinstance(self.schedule, str):
            chosen = _SCHEDULES[self.schedule]
        else:
            chosen = self.schedule
        options: dict[str, Any] = dict(chosen)
        schedule_key = "optimizer.schedule"
        name: Any = options.pop("name", None)
        known = [each for each in dir(optax.schedules) if re.fullmatch(r"[a-z]\w+_(schedule|decay)", each)]
        if name not in known:
            raise UserError(
                f"{schedule_key}.name",
                f"is no schedule of optax; takes one of {', '.join(known)}",
                did_you_mean(name, known).removeprefix("; "),
                value=name,
            )
        parameters = inspect.signature(getattr(optax.schedules, name)).parameters
        for option, value in options.items():
            if option not in parameters:
                raise UserError(
                    f"{schedule_key}.{option}",
                    f"is no argument of {name}, which takes {', '.join(parameters)}",
                    did_you_mean(option, parameters).removeprefix("; "),
                    value=value,
                )
            if not isinstance(value, dict | list):
                options[option] = checked_value(f"{schedule_key}.{option}", parameters[option].annotation, value)
        peak = next((each for each in ("value", "peak_value", "init_value") if each in parameters), None)
        has_own_peak = peak is None or options.get(peak, self.learning_rate) != self.learning_rate
        if has_own_peak and self.learning_rate != type(self).model_fields["learning_rate"].default:
            raise UserError(
                "optimizer.learning_rate",
                f"{name} has its own peak",
                "set only one of the two",
                value=self.learning_rate,
            )
        if self.warmup_steps and peak not in ("value", "init_value"):
            raise UserError(
                "optimizer.warmup_steps", f"{name} has its own warm-up", "remove one of them", value=self.warmup_steps
            )
        remaining_steps = max(steps - self.warmup_steps - options.get("transition_begin", 0), 1)
        defaults = {peak: self.learning_rate, "decay_steps": remaining_steps, "transition_steps": remaining_steps}
        options = {option: value for option, value in defaults.items() if option in parameters} | options
        missing = [each.name for each in parameters.values() if each.default is each.empty and each.name not in options]
        if missing:
            raise UserError(schedule_key, f"{name} needs {', '.join(missing)} too", value=self.schedule)
        after = getattr(optax.schedules, name)(**options)
        if self.warmup_steps == 0:
            return after
        # Warm-up starts above 0, so that the first update has an effect: peak/warmup_steps, 2·peak/warmup_steps, …
        assert peak is not None
        first = options[peak] / self.warmup_steps
        last = max(self.warmup_steps - 1, 1)
        return optax.join_schedules([optax.linear_schedule(first, options[peak], last), after], [self.warmup_steps])


class TrainingConfig(ConfigBlock):
    """Length of the run, micro-batches and checkpoints."""

    steps: Int = key(100, "Optimizer steps; 0: only the warm start on demonstrations", ge=0, may_change=True)
    updates_per_batch: Int = key(
        1,
        "Passes over each batch, with one optimizer step on each minibatch; the proximal policy is the policy before"
        " the first of these steps",
        ge=1,
    )
    minibatches: Int = key(
        1, "Minibatches of a pass, of equally many whole groups", note="Must divide rollout.prompts_per_step.", ge=1
    )
    micro_batch_prompts: Int | None = key(
        None,
        "Prompts, with their groups, in a micro-batch; null: as few as have about 4,000 tokens a device",
        note="Not with training.tokens_per_micro_batch. Must divide rollout.prompts_per_step.",
        ge=1,
        may_change=True,
    )
    tokens_per_micro_batch: Int | None = key(
        None,
        "Tokens of a micro-batch that recjax packs completions into; null: recjax packs completions if that saves much"
        " work",
        ge=1,
        may_change=True,
    )
    expert_balance: Float = key(0.0, "Weight of the loss that balances the loads of experts; 0: none", ge=0)
    checkpoint_every: Int = key(50, "Optimizer steps between checkpoints", ge=1, may_change=True)
    resume_with: list[str] = key(
        list,
        "Keys of optimizer and algorithm, such as optimizer.learning_rate, whose values may differ from the stored run"
        " when it resumes; environment.json records each change",
        may_change=True,
    )
    impossible_tokens: Literal["error", "drop"] = key(
        "error",
        "Treatment of tokens with probability 0, log-prob −inf, under a policy. error: end the run; drop: exclude them"
        " from the loss and count them",
        may_change=True,
    )
    keep_checkpoints: Int = key(2, "Newest checkpoints that recjax keeps; it deletes older ones", ge=1, may_change=True)
    keep_best: str | None = key(
        None,
        "Metric, such as evaluation/accuracy, by which recjax also keeps the best checkpoint, and saves at every"
        " evaluation; with - in front, lower is better",
        may_change=True,
    )
    profile_steps: list[Int] | None = key(
        None,
        "[first, last] step of a profiler trace in the run's folder; null: no trace",
        may_change=True,
    )

    @property
    def updates(self) -> int:
        """Optimizer steps on each batch."""
        return self.updates_per_batch * self.minibatches

    def check(self, config: "Config") -> None:
        """Refuses runs without steps, batches that cannot be split, and steps or keys that the run does not have."""
        if self.steps == 0 and not config.demonstrations:
            raise UserError(
                "training.steps",
                "takes 1 or more, or 0 for a warm start alone",
                "set warm_start.demonstrations",
                value=0,
            )
        self._check_splits(config)
        traced = self.profile_steps
        if traced is not None and (len(traced) != 2 or not 1 <= traced[0] <= traced[1] <= self.steps):
            raise UserError(
                "training.profile_steps",
                f"takes [first, last] with 1 <= first <= last <= training.steps = {self.steps}",
                "or null for no trace",
                value=traced,
            )
        known = []
        if self.resume_with:
            known = resumable_keys(config)
        for name in self.resume_with:
            if name not in known:
                raise UserError(
                    "training.resume_with",
                    f"{name!r} cannot change; takes {', '.join(known)}",
                    did_you_mean(name, known).removeprefix("; "),
                    value=self.resume_with,
                )

    def _check_splits(self, config: "Config") -> None:
        """Refuses minibatches and micro-batches that prompts cannot share equally, or that an advantage cannot read."""
        if self.tokens_per_micro_batch:
            refuse_with(config, ["training.micro_batch_prompts"], "training.tokens_per_micro_batch")
        prompts = config.rollout.prompts_per_step
        problem = f"must divide rollout.prompts_per_step = {prompts}"
        if prompts % self.minibatches:
            raise UserError("training.minibatches", problem, value=self.minibatches)
        chosen = self.micro_batch_prompts
        if chosen and prompts % chosen:
            raise UserError("training.micro_batch_prompts", problem, value=chosen)
        if self.minibatches == 1:
            return
        if chosen and prompts // self.minibatches % chosen:
            raise UserError(
                "training.micro_batch_prompts",
                f"must divide the {prompts // self.minibatches} prompts of a minibatch"
                " (rollout.prompts_per_step / training.minibatches)",
                value=chosen,
            )
        if not RESCORED.isdisjoint(config.algorithm.build().advantage.reads):
            raise UserError(
                "training.minibatches",
                "does not work with an advantage that reads scored log-probs or entropies, which each update"
                " computes for its minibatch only",
                "set 1, or use another advantage",
                value=self.minibatches,
            )


MOST_PROBLEMS = 256


def _problem_with_temperature(value: float) -> str | None:
    """The reason why evaluation cannot sample at a temperature; None if it can."""
    if value == 0 or LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE:
        return None
    return f"must be 0, for greedy completions, or {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"


_Temperature = Annotated[Float, checked(_problem_with_temperature)]


class EvaluationConfig(ConfigBlock):
    """Sampled accuracy on held-out problems."""

    every: Int = key(50, "Optimizer steps between evaluations; 0: only before and after training", ge=0)
    problems: Int | None = key(
        None, f"Number of held-out problems; null: {MOST_PROBLEMS}, or as many as the task holds out", ge=1
    )
    samples: Int = key(
        1, "Completions of each problem", note="Only with evaluation.temperature above 0 or task.agent.", ge=1
    )
    initial_kl: Bool = key(
        False,
        "Log the KL to the initial policy, which costs another forward pass",
        note="Only with evaluation.temperature above 0.",
    )
    temperature: _Temperature = key(1.0, "Sampling temperature; 0: greedy")
    top_k: Int = key(
        0,
        "Sample only from this many of the most likely tokens; 0: all",
        note="Only with evaluation.temperature above 0.",
        ge=0,
    )
    top_p: Float = key(
        1.0,
        "Sample only from the most likely tokens with this total probability; 1: all",
        note="Only with evaluation.temperature above 0.",
        gt=0,
        le=1,
    )
    min_p: Float = key(
        0.0,
        "Sample only from tokens at least this share as likely as the likeliest; 0: all",
        note="Only with evaluation.temperature above 0.",
        ge=0,
        le=1,
    )

    @property
    def most_problems(self) -> int:
        """Limit on the held-out problems of a task."""
        return self.problems or MOST_PROBLEMS

    def sampling(self) -> Sampling:
        """The distribution that evaluation samples from."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def check(self, config: "Config") -> None:
        """Refuses settings of sampling for greedy completions."""
        if self.temperature == 0:
            names = ["initial_kl", "top_k", "top_p", "min_p"]
            refuse_without(config, [f"evaluation.{name}" for name in names], "evaluation.temperature above 0")
            if not config.task.agent:
                refuse_without(config, ["evaluation.samples"], "evaluation.temperature above 0", "task.agent")


class SamplesConfig(ConfigBlock):
    """Training completions that recjax keeps in the run's folder, for python -m recjax.samples."""

    every: Int = key(25, "Keep completions of every Nth optimizer step; 0: keep none", ge=0)
    groups: Int = key(4, "Groups to keep of such a step", ge=1)
    megabytes: Float = key(64.0, "Limit of all kept completions; recjax keeps no more after that", gt=0)


class TrackingConfig(ConfigBlock):
    """Trackers that get metrics, config, figures and samples; a tracker that is down does not stop the run.

    A mapping holds the arguments of the module's `init`.
    """

    wandb: dict[str, Any] | None = key(
        None, "Arguments of wandb.init, such as {project: sums}; WANDB_MODE=offline needs no account"
    )
    trackio: dict[str, Any] | None = key(
        None, "Arguments of trackio.init, such as {project: sums}; the data stays on this machine"
    )


class Config(ConfigBlock):
    """A whole run."""

    seed: Int = key(0, "Seed of data order, sampling and, by default, of the base policy", ge=0, le=2**32 - 1)
    base_seed: Int | None = key(
        None,
        "Seed of the base policy: generated and held-out problems, initial parameters and warm start; null: seed",
        ge=0,
        le=2**32 - 1,
    )
    output: str = key(..., "Folder of the run; a stopped run resumes from it", may_change=True)
    model: ModelConfig = key(ModelConfig)
    task: Annotated[TaskConfig, pydantic.BeforeValidator(named_task)] = key(TaskConfig)
    grading: GradingConfig = key(GradingConfig)
    warm_start: WarmStartConfig | None = key(None)
    rollout: RolloutConfig = key(RolloutConfig)
    regime: RegimeConfig = key(RegimeConfig)
    experience: ExperienceConfig | None = key(None)
    algorithm: AlgorithmConfig = key(AlgorithmConfig)
    optimizer: OptimizerConfig = key(OptimizerConfig)
    training: TrainingConfig = key(TrainingConfig)
    evaluation: EvaluationConfig = key(EvaluationConfig, may_change=True)
    samples: SamplesConfig = key(SamplesConfig, may_change=True)
    tracking: TrackingConfig = key(TrackingConfig, may_change=True)
    mesh: MeshConfig = key(MeshConfig, may_change=True)

    @pydantic.model_validator(mode="after")
    def _check_blocks(self) -> "Config":
        """Refuses settings that contradict each other or have no effect; see `check` of each block."""
        for name in KEYS:
            block = value_of(self, name)
            if isinstance(block, ConfigBlock):
                block.check(self)
        return self

    def replace(self, /, **changes: Any) -> "Config":
        """Another config, with other values for some keys.

        Args:
            changes: values by dotted key, as in `replace(**{"mesh.data": 2})`, or by a short name, as in
                `replace(steps=80, learning_rate=1e-6)`; SHORT_NAMES of recjax.config has these names.
        Raises:
            UserError: a wrong key or value, as for the first config.
        """
        values = self.model_dump(exclude_unset=True)
        names = [full_name(name, value) for name, value in changes.items()]
        for number, (name, value) in enumerate(zip(names, changes.values(), strict=True)):
            *blocks, key_name = name.split(".")
            inner = values
            for depth, block in enumerate(blocks, 1):
                before = inner.get(block)
                place = ".".join(blocks[:depth])
                # Another name replaces a short form, also if it is given after other keys of the block.
                if isinstance(before, str) and place in SHORT_FORMS and f"{place}.name" not in names[number:]:
                    inner[block] = SHORT_FORMS[place](before)
                elif not isinstance(before, dict):
                    inner[block] = {}
                inner = inner[block]
            inner[key_name] = value
        return type(self)(**values)

    @property
    def demonstrations(self) -> str | None:
        """The file of demonstrations that the warm start trains on; None if it has none."""
        if self.warm_start is None:
            return None
        return self.warm_start.demonstrations

    @property
    def seed_of_base(self) -> int:
        """The seed of the base policy and of the split into train and held-out problems."""
        if self.base_seed is None:
            return self.seed
        return self.base_seed

    @property
    def follows(self) -> bool:
        """True if the run trains on a store as the store grows."""
        return self.experience is not None and self.experience.follow

    @property
    def has_trajectories(self) -> bool:
        """True if a batch row is a whole sequence, and a completion may have several rows."""
        return self.task.agent is not None or self.follows

    @property
    def sampled_groups(self) -> int:
        """Number of groups in a batch that a sampling run takes from no store."""
        count = self.rollout.prompts_per_step
        return count - round(self._mixed_share("batch") * count)

    @property
    def stored_groups(self) -> int:
        """Number of groups in a batch that come whole from a store at rest."""
        count = self.rollout.prompts_per_step
        if self.experience and self.experience.store and not self.follows:
            return count
        return count - self.sampled_groups

    @property
    def own_counts(self) -> tuple[int, int]:
        """Number of groups in a batch, and of completions in each group, that come from no store at rest."""
        groups = self.rollout.prompts_per_step - self.stored_groups
        stored_completions = round(self._mixed_share("group") * self.rollout.group_size)
        return groups, self.rollout.group_size - stored_completions

    def recording(self) -> TokenRecord:
        """The arrays that a sampler records of the distribution of each token."""
        rollout = self.rollout
        # Servers report the sets without log-probs.
        centers_sets = not rollout.recorded_top_k and rollout.engine is None
        if centers_sets:
            centers_sets = self.algorithm.build().score_centering is not None
        return TokenRecord(rollout.kept_ids, rollout.recorded_top_k, kept_logprobs=centers_sets)

    @property
    def known_tokens(self) -> int:
        """Number of tokens that `algorithm.score_centering` reads of each token's distribution, at most."""
        return self.recording().known_tokens(self.rollout.sampling())

    @property
    def drawn_completions(self) -> int:
        """Number of completions that the policy samples for a group, with those that `rollout.oversample` drops."""
        return self.own_counts[1] + self.rollout.oversample

    def _mixed_share(self, unit: str) -> float:
        """The share of a store in every batch or group; 0 if the run mixes none, or by the other unit."""
        if self.experience is None or self.experience.mix is None or self.experience.mix.of != unit:
            return 0.0
        return self.experience.mix.share

    def verdict_reader(self, task: str) -> str | None:
        """The key that reads which completions of a task are accurate; None if no key does."""
        if self.task.keep:
            return "task.keep"
        if self.task.curriculum:
            return "task.curriculum"
        metric = re.fullmatch(r"-?(evaluation/)?(accuracy|right_and_ended)(/(.*))?", self.training.keep_best or "")
        if metric and metric[4] in (None, task):
            return "training.keep_best"
        return None

    @property
    def samples_training_data(self) -> bool:
        """True if the policy samples any of the data that it trains on."""
        return self.own_counts[0] > 0 and not self.follows

    @property
    def record_file(self) -> Path | None:
        """The store in which the run records the completions that the policy samples; None if it records none."""
        if self.experience is None or not self.experience.record:
            return None
        return Path(self.output) / "experience.db"

    def micro_batches(self, positions: int, shards: int = 1) -> int:
        """Number of micro-batches of a step whose completions are not packed.

        Args:
            positions: token positions of the minibatch, with padding.
            shards: devices that share the rows.
        """
        prompts = self.rollout.prompts_per_step // self.training.minibatches
        chosen = self.training.micro_batch_prompts
        if chosen:
            return prompts // chosen
        most = min(prompts // shards, positions // (MICRO_BATCH_TOKENS * shards))
        equal = (parts for parts in range(most, 1, -1) if prompts % (parts * shards) == 0)
        return next(equal, 1)


def resumable_keys(config: Config) -> list[str]:
    """The keys that `training.resume_with` may name."""
    fixed = ("optimizer.state", "optimizer.name", "optimizer.options")  # an optimizer's state fits no other optimizer
    keys = [name for name in KEYS if name.startswith("optimizer.") and name not in fixed]
    for axis, block in config.algorithm.resolved().items():
        keys += [f"algorithm.{axis}.{option}" for option in block if option != "name"]
    return keys


def _may_change(name: str) -> bool:
    """True if a run may resume although a key differs, by itself or as a key of a block that may differ."""
    key_and_blocks = itertools.accumulate(name.split("."), "{}.{}".format)  # "a", "a.b", "a.b.c"
    return any(extra_of(KEYS[each])["may_change"] for each in key_and_blocks)


def full_name(name: str, value: Any) -> str:
    """The dotted key that a program means with a name of SHORT_NAMES; `model` and `algorithm` are also blocks."""
    if isinstance(value, Mapping):
        return name
    return SHORT_NAMES.get(name, name)


# Names in programs for the keys that most runs set: `Config.replace(steps=80)`, `recjax.run(model="…", steps=80)`.
SHORT_NAMES = {
    "model": "model.path",
    "algorithm": "algorithm.preset",
    "steps": "training.steps",
    "learning_rate": "optimizer.learning_rate",
    "prompts_per_step": "rollout.prompts_per_step",
    "group_size": "rollout.group_size",
    "max_completion_tokens": "rollout.max_completion_tokens",
    "temperature": "rollout.temperature",
}
# Every dotted key and its field.
KEYS = schema_keys(Config)
# The keys with which a run may resume although they differ, by themselves or as keys of such a block; see `key`.
MAY_CHANGE = frozenset(name for name in KEYS if _may_change(name))
# Blocks that a text stands for, and the function from the text to the block's keys.
SHORT_FORMS: dict[str, Any] = {
    "task": named_task,
    "rollout.engine": EngineConfig.from_url,
    "optimizer.schedule": lambda name: dict(_SCHEDULES.get(name, {"name": name})),
    **dict.fromkeys([*(f"task.{task}" for task in PLAYED), *(f"algorithm.{axis}" for axis in _AXES)], named_block),
}
