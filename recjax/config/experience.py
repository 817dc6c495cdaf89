"""The config blocks `rollout`, `regime` and `experience`: the completions to train on, and how stale they may be."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from recjax.config.fields import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    Bool,
    ConfigBlock,
    Float,
    Int,
    checked,
    key,
    refuse_with,
    refuse_without,
    spelled,
    value_of,
)
from recjax.config.parts import PLAYED
from recjax.errors import UserError
from recjax.models.sampling import Sampling
from recjax.runtime.passwords import has_password

if TYPE_CHECKING:
    from recjax.config.schema import Config

MissingLogprobs = Literal["error", "unneeded", "initial", "current"]
DialectName = Annotated[
    str, spelled("recjax|vllm|sglang|llamacpp|.*:.*", "takes recjax, vllm, sglang, llamacpp or module:name")
]
DriftKind = Literal["int8", "int4", "float8", "noise"]
Priority = Literal["none", "reward_spread", "absolute_advantage", "headroom"]


class EngineConfig(ConfigBlock):
    """Another server that samples; a plain URL sets `url`."""

    url: Annotated[str, checked(has_password)] = key(..., "URL of the server", may_change=True)
    model: str | None = key(None, "Its model; null: the only one", may_change=True)
    dialect: DialectName | None = key(
        None,
        "Its API: recjax, vllm, sglang, llamacpp or your own module:name; null: by its software",
        may_change=True,
    )
    processed_logprobs: Bool = key(False, "true: the server's log-probs are after temperature, top_k, top_p and min_p")
    folder: str | None = key(
        None,
        "Shared folder for weights, in which each run has a folder of its own; null: OUTPUT/pushed",
        may_change=True,
    )
    api_key_file: str | None = key(None, "File with the API key; null: $RECJAX_API_KEY", may_change=True)
    concurrency: Int = key(8, "Parallel requests", ge=1, may_change=True)
    reply_seconds: Float = key(600.0, "Time limit for a reply", ge=0.1, may_change=True)
    retries: Int = key(6, "Retries after failures and unusable replies", ge=0, may_change=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def from_url(cls, values: Any) -> Any:
        """The keys for a plain URL."""
        return {"url": values} if isinstance(values, str) else values

    def check(self, config: "Config") -> None:
        """Refuses runs that only recjax's own engine can sample, and runs that sample nothing."""
        if config.task.agent:
            raise UserError(
                "rollout.engine.url",
                "samples single turns",
                "remove task.agent, or sample with recjax's engine",
                value=self.url,
            )
        if config.experience is not None and config.experience.store:
            raise UserError(
                "rollout.engine.url",
                "does nothing with experience.store, whose run samples nothing",
                "remove it",
                value=self.url,
            )


class DriftConfig(ConfigBlock):
    """A sampler that is wrong on purpose: it samples from weights that are changed after each sync."""

    weights: DriftKind = key(
        ..., "Change of the sampler's matrices: rounded to int8, int4 or float8, or noise relative to their size"
    )
    group: Int | None = key(
        None, "Inputs of an output that share a scale, for int8, int4 and float8; null: all inputs", ge=1
    )
    fixed: Bool = key(
        False, "Noise is drawn once from the seed, so that it does not cancel over syncs; false: anew for each version"
    )
    scale: Float = key(1.0, "Factor of the change; 1: the whole rounding error, 0: no change", ge=0)
    logprobs: Literal["sampled", "exact"] = key(
        "sampled",
        "Recorded log-probs. sampled: of the changed weights, which sampled; exact: of the exact weights, as a server"
        " that reports wrong log-probs",
    )

    def check(self, config: "Config") -> None:
        """Refuses runs whose sampler has no weights to change, and records that exact log-probs do not fit."""
        if config.rollout.engine is not None or not config.samples_training_data:
            raise UserError(
                "rollout.drift",
                "changes the weights of recjax's own sampler, which this run does not use",
                "remove it",
                value=self.model_dump(),
            )
        if self.weights == "noise" and self.group is not None:
            raise UserError(
                "rollout.drift.group", "is for rounded weights, and noise has none", "remove it", value=self.group
            )
        if self.weights != "noise" and self.fixed:
            raise UserError("rollout.drift.fixed", "is for noise; rounding always errs alike", "remove it", value=True)
        if self.logprobs == "exact":
            for name in ("task.agent", "regime.swap_within", "rollout.recorded_top_k"):
                if value_of(config, name):
                    raise UserError(
                        "rollout.drift.logprobs",
                        "scores whole completions of one version of the weights",
                        f"remove {name}",
                        value="exact",
                    )
            if config.recording().kept_logprobs:
                raise UserError(
                    "rollout.drift.logprobs",
                    "scores sampled tokens alone, and algorithm.score_centering reads others",
                    "use sampled",
                    value="exact",
                )


class RolloutConfig(ConfigBlock):
    """Sampling of completions."""

    prompts_per_step: Int = key(16, "Prompts in a batch; with task.seats, pairs of a prompt and a trained seat", ge=1)
    group_size: Int = key(8, "Completions of each prompt", ge=1)
    oversample: Int = key(
        0,
        "Completions of each prompt sampled in addition; those with the most tokens are dropped, as if sampling stopped"
        " when rollout.group_size have finished",
        note="Not with task.agent or rollout.engine or experience.store.",
        ge=0,
    )
    max_prompt_tokens: Int | None = key(None, "Limit of a prompt's tokens; null: the data's longest prompt", ge=1)
    long_prompts: Literal["refuse", "drop"] = key(
        "refuse",
        "Treatment of longer prompts: end with an error, or drop the problems",
        note="Only with rollout.max_prompt_tokens.",
    )
    max_completion_tokens: Int = key(16, "Limit of a completion's tokens; with task.agent, of one reply", ge=1)
    max_context_tokens: Int | None = key(
        None,
        "Limit of an agent's whole conversation in tokens; a followed store's longer rows are skipped",
        note="Only with task.agent or experience.follow. Must be above rollout.max_completion_tokens.",
        ge=2,
    )
    slots: Int | None = key(
        None, "Completions in one decoding batch; null: as many as memory holds", ge=1, may_change=True
    )
    temperature: Float = key(1.0, "Sampling temperature", ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)
    top_k: Int = key(0, "Sample only from this many of the most likely tokens; 0: all", ge=0)
    top_p: Float = key(1.0, "Sample only from the most likely tokens with this total probability; 1: all", gt=0, le=1)
    min_p: Float = key(
        0.0, "Sample only from tokens at least this share as likely as the likeliest; 0: all", ge=0, le=1
    )
    kept_ids: Int = key(
        128,
        "Largest set left by these cuts to record for each token, at 4 bytes an id or a bit for each token of the"
        " vocabulary; 0: none",
        ge=0,
    )
    recorded_top_k: Int = key(
        0,
        "Most likely tokens to record with their log-probs for each token, at 8 bytes each, for"
        " algorithm.score_centering; 0: none, as it reads the sets of kept_ids where cuts leave some",
        ge=0,
        le=4096,
    )
    record_routing: Bool = key(True, "Record the experts of each sampled token; the update runs them again")
    stop: list[str] = key(list, "Texts of one token that end a completion, as EOS does")

    engine: EngineConfig | None = key(None)
    drift: DriftConfig | None = key(None)

    def sampling(self) -> Sampling:
        """The distribution that a run samples from, and trains under."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def check(self, config: "Config") -> None:
        """Refuses token limits that do not fit each other or the kind of run."""
        if not self.max_prompt_tokens:
            refuse_without(config, ["rollout.long_prompts"], "rollout.max_prompt_tokens")
        if config.task.agent:
            # A trajectory's end also depends on the time that tools and environment take.
            refuse_with(config, ["rollout.oversample"], "task.agent")
        if self.engine is not None:
            refuse_with(config, ["rollout.oversample"], "rollout.engine")
        if not config.samples_training_data:
            refuse_with(config, ["rollout.oversample"], "experience.store")
        context_key = "rollout.max_context_tokens"
        limit = self.max_context_tokens
        if not config.has_trajectories:
            refuse_without(config, [context_key], "task.agent", "experience.follow")
        elif limit is None:
            condition = "task.agent" if config.task.agent else "experience.follow"
            raise UserError(
                context_key,
                f"is required with {condition}",
                "set it to the limit of a whole conversation in tokens",
                value=limit,
            )
        elif limit <= self.max_completion_tokens:
            raise UserError(
                context_key, f"must be above rollout.max_completion_tokens = {self.max_completion_tokens}", value=limit
            )


class MixConfig(ConfigBlock):
    """Completions from a store, mixed with completions that the policy samples."""

    store: Annotated[str, checked(has_password)] = key(..., "File or URL of the store")
    share: Float = key(0.5, "Share of the store's completions: a whole number of rows or groups", gt=0, lt=1)
    of: Literal["group", "batch"] = key("group", "Mix rows into every group, or whole groups into every batch")

    def check(self, config: "Config") -> None:
        """Refuses a share that is no whole number of rows or groups."""
        size_key = "rollout.group_size"
        count = config.rollout.group_size
        if self.of == "batch":
            size_key = "rollout.prompts_per_step"
            count = config.rollout.prompts_per_step
        rows = self.share * count
        if abs(rows - round(rows)) >= 1e-6:
            raise UserError(
                "experience.mix.share", f"must be a whole number out of {size_key} = {count}", value=self.share
            )


# A round samples a batch if one is due, and trains on a batch if enough groups have all their rewards. After the first
# rounds of a run, each round trains on a batch.


class LateConfig(ConfigBlock):
    """Rewards that arrive after their completions; recjax samples a delay for every completion, uniformly."""

    shortest: Int = key(0, "Shortest delay, in rounds", ge=0)
    longest: Int = key(0, "Longest delay, in rounds", note="Must be at least experience.late.shortest.", ge=0)
    deadline: Int | None = key(
        None,
        "Rounds that a group waits for missing rewards; null: no limit",
        note="Must be at least experience.late.shortest.",
        ge=1,
    )

    def check(self, config: "Config") -> None:
        """Refuses limits below the shortest delay."""
        problem = f"must be at least experience.late.shortest = {self.shortest}"
        if 0 < self.longest < self.shortest:  # 0 is no limit of its own
            raise UserError("experience.late.longest", problem, value=self.longest)
        if self.deadline is not None and self.deadline < self.shortest:
            raise UserError("experience.late.deadline", problem, value=self.deadline)


class ReplayConfig(ConfigBlock):
    """A buffer of groups that recjax trains on more than once, and how it samples from the buffer."""

    draw_every: Int = key(1, "The policy samples a batch every Nth round", note="Not with experience.follow.", ge=1)
    capacity: Int = key(512, "Groups that the buffer holds; a new group replaces the oldest", ge=1)
    max_staleness: Int | None = key(None, "Limit of a group's staleness, in optimizer steps; null: no limit", ge=0)
    max_reuse: Int = key(
        4,
        "Number of times that recjax trains on a group, at most",
        note="Must be at least experience.replay.draw_every.",
        ge=1,
    )
    half_life: Float | None = key(None, "Optimizer steps after which a group's chance halves; null: never", gt=0)
    max_drift: Float | None = key(
        None,
        "Limit of a group's drift at its last use, the mean of (log π − log μ)² over its tokens; null: no limit",
        ge=0,
    )
    priority: Priority = key("none", "Quantity that a group's chance is proportional to")
    order: Literal["sampled", "highest"] = key(
        "sampled", "Groups of a step: sampled by their chance, or those with the highest chance"
    )
    keep_no_signal: Bool = key(
        False, "Keep groups from which the algorithm learns nothing, such as those with equal rewards"
    )

    def check(self, config: "Config") -> None:
        """Refuses a buffer that this run does not fill, or that cannot give a batch its groups."""
        experience = config.experience
        assert experience is not None  # it holds this block
        if experience.store and not config.follows:
            raise UserError(
                "experience.replay",
                "does not work with experience.store, except with experience.follow",
                "remove one of them",
                value=self.model_dump(),
            )
        if config.follows:
            refuse_with(config, ["experience.replay.draw_every"], "experience.follow")
        if self.max_reuse < self.draw_every:
            raise UserError(
                "experience.replay.max_reuse",
                f"must be at least experience.replay.draw_every = {self.draw_every}",
                value=self.max_reuse,
            )
        if self.keep_no_signal and experience.refill is not None:
            raise UserError(
                "experience.replay.keep_no_signal",
                "keeps the groups that experience.refill replaces",
                "remove one of them",
                value=True,
            )
        if self.capacity < config.sampled_groups:
            raise UserError(
                "experience.replay.capacity",
                f"must hold the {config.sampled_groups} groups of a batch that come from it",
                value=self.capacity,
            )
        self._check_staleness(config)
        if self.order == "highest" and self.priority == "none" and self.half_life is None:
            raise UserError(
                "experience.replay.order",
                "has nothing to order by",
                "set experience.replay.priority or half_life",
                value=self.order,
            )
        if self.measures and experience.missing_logprobs == "unneeded":
            name = "max_drift"
            if self.max_drift is None:
                name = "priority"
            raise UserError(
                f"experience.replay.{name}",
                "reads log-probs, which experience.missing_logprobs = unneeded removes",
                "use initial or current",
                value=getattr(self, name),
            )
        compares = config.algorithm.build().baseline == "group" and (config.rollout.group_size > 1 or config.follows)
        if self.priority != "none" and not compares:
            raise UserError(
                "experience.replay.priority",
                "compares a group's rewards with each other, which this algorithm does not",
                "use none",
                value=self.priority,
            )

    @property
    def measures(self) -> bool:
        """True if the replay reads measurements of the updates that trained on a group."""
        return self.priority == "headroom" or self.max_drift is not None

    def _check_staleness(self, config: "Config") -> None:
        """Refuses limits of staleness that fresh groups exceed before the last update of their batch."""
        updates = config.training.updates
        batches = max(-(-config.training.steps // updates), 1)
        why = "the staleness of fresh groups in the last update of their batch"
        regime = config.regime
        # Between two syncs every batch is sampled with the same weights, also the batches in the place of stale ones.
        if regime.offline:
            why += " with regime.offline, whose sampler never gets new weights"
        elif regime.sync_interval > 1:
            batches = min(batches, regime.sync_interval)
            why += f" with regime.sync_interval = {regime.sync_interval}"
        else:
            batches = 1
        minimum = batches * updates - 1
        names = ["experience.replay.max_staleness"]
        if regime.mode == "sync" and not config.follows:  # these have a check of their own
            names.append("regime.max_mean_staleness")
        for name in names:
            limit = value_of(config, name)
            if limit is not None and limit < minimum:
                raise UserError(name, f"must be at least {minimum}, {why}", value=limit)


class RefillConfig(ConfigBlock):
    """Dynamic sampling: replaces groups whose rewards are all equal.

    Groups of further batches replace them or, with `experience.replay`, groups of its buffer if there are enough.
    """

    batches: Int = key(10, "Limit of batches for one step; a run that needs more ends with an error", ge=1)

    def check(self, config: "Config") -> None:
        """Refuses an algorithm that needs no replacement of groups."""
        if config.algorithm.signal(config.task) == "any":
            raise UserError(
                "experience.refill",
                "replaces no group, because this algorithm also learns from groups with equal rewards",
                "remove it",
                value=self.model_dump(),
            )


class RegimeConfig(ConfigBlock):
    """Staleness of the sampler's weights."""

    sync_interval: Int = key(
        1,
        "Batches between two copies of the weights to the sampler",
        note="Not with regime.offline or experience.store.",
        ge=1,
    )
    sync_offset: Int = key(
        0,
        "Batches sampled ahead of the batch being trained on",
        note="Not with regime.offline or regime.mode = async or experience.store.",
        ge=0,
    )
    offline: Bool = key(
        False,
        "Every batch comes from the initial policy; the sampler never gets new weights",
        note="Not with regime.mode = async or experience.store.",
    )
    mode: Literal["sync", "async"] = key(
        "sync",
        "async: processes on Ray, or rollout.engine, sample during the updates",
        note="Not with experience.store.",
    )
    max_staleness: Int | None = key(
        None,
        "Limit of the experience's staleness in the last update of a batch, in optimizer steps",
        note="Only with regime.mode = async or experience.follow. Required with regime.mode = async.",
        ge=0,
    )
    max_mean_staleness: Float | None = key(
        None,
        "Limit of the mean staleness of a batch's groups in its last update, in optimizer steps; newer groups take the"
        " places of older ones",
        note="Only with regime.mode = async or experience.follow or experience.replay.",
        ge=0,
    )
    generators: Int = key(
        1,
        "Processes that sample",
        note="Only with regime.mode = async. Not with rollout.engine.",
        ge=1,
        may_change=True,
    )
    swap_within: Bool = key(
        False,
        "Generators take new weights in the middle of completions; false: only between batches",
        note="Only with regime.mode = async. Not with rollout.engine.",
    )
    address: str | None = key(
        None,
        "Address of a Ray cluster; null: recjax starts Ray on this machine",
        note="Only with regime.mode = async. Not with rollout.engine.",
        may_change=True,
    )
    generator_seconds: Float = key(
        600.0,
        "Time limit for one batch; recjax restarts a slower generator",
        note="Only with regime.mode = async. Not with rollout.engine.",
        ge=1,
        may_change=True,
    )

    def check(self, config: "Config") -> None:
        """Refuses settings of processes that do not sample, and a limit of staleness that no batch could keep."""
        if config.experience is not None and config.experience.store:
            names = ["regime.sync_interval", "regime.sync_offset", "regime.offline", "regime.mode"]
            refuse_with(config, names, "experience.store")
        if self.offline:
            refuse_with(config, ["regime.sync_interval", "regime.sync_offset"], "regime.offline")
        if self.mode == "async":
            refuse_with(config, ["regime.sync_offset", "regime.offline"], "regime.mode = async")
        process_keys = ["regime.generators", "regime.swap_within", "regime.address", "regime.generator_seconds"]
        if self.mode == "sync":
            refuse_without(config, process_keys, "regime.mode = async")
            if not config.follows:
                refuse_without(config, ["regime.max_staleness"], "regime.mode = async", "experience.follow")
                if config.experience is None or config.experience.replay is None:
                    others = ["regime.mode = async", "experience.follow", "experience.replay"]
                    refuse_without(config, ["regime.max_mean_staleness"], *others)
            return
        if config.rollout.engine is not None:
            refuse_with(config, process_keys, "rollout.engine")
        self._check_staleness(config)

    def _check_staleness(self, config: "Config") -> None:
        """Refuses an asynchronous run without a limit of staleness, or with one that no batch could keep."""
        staleness_key = "regime.max_staleness"
        limit = self.max_staleness
        if limit is None:
            raise UserError(
                staleness_key,
                "is required with regime.mode = async",
                "set it to the largest staleness that the last update of a batch may have, in optimizer steps",
                value=limit,
            )
        batches = self.sync_interval
        why = f"regime.sync_interval = {self.sync_interval}"
        replay = config.experience and config.experience.replay
        if replay:
            batches += replay.draw_every - 1
            why += f" and experience.replay.draw_every = {replay.draw_every}"
        updates = config.training.updates
        if updates > 1:
            why += f" and {updates} updates of each batch"
        minimum = batches * updates - 1
        for name in (staleness_key, "regime.max_mean_staleness"):
            limit = value_of(config, name)
            if limit is not None and limit < minimum:
                raise UserError(name, f"must be at least {minimum}, the staleness due to {why}", value=limit)


Grouping = Annotated[
    str,
    spelled(r"group|prompt|metadata\..+", "takes group, prompt, or metadata.KEY with a key of the rows' metadata"),
]


class ExperienceConfig(ConfigBlock):
    """Training data other than the batch that the policy has just sampled; at least one source or treatment."""

    store: Annotated[str, checked(has_password)] | None = key(
        None, "File or URL of a store that every batch comes from; groups may have any size"
    )
    mix: MixConfig | None = key(None, note="Not with experience.store.")
    late: LateConfig | None = key(None, note="Not with experience.store.")
    replay: ReplayConfig | None = key(None)
    refill: RefillConfig | None = key(None, note="Not with regime.mode = async or experience.store.")
    missing_logprobs: MissingLogprobs = key(
        "error",
        "Treatment of stored completions without behavior log-probs. error: refuse them; unneeded: the"
        " algorithm reads none; initial: score with the initial policy; current: score with the trained policy",
        note="Only with experience.store or experience.mix.",
    )
    regrade: Bool = key(
        False,
        "Grade a store's completions with this run's reward, instead of their own rewards",
        note="Only with experience.store or experience.mix.",
    )
    record: Bool = key(
        False,
        "Keep the completions that the policy samples in experience.db in the run's folder",
        note="Not with experience.store.",
    )
    follow: Bool = key(
        False,
        "Train on a store as it grows, on each group once, when all its rewards have arrived",
        note="Only with experience.store.",
    )
    group_by: Grouping = key(
        "group",
        "The completions that form a group. group: equal group_id in the store; prompt: rollout.group_size completions"
        " of equal prompts; metadata.KEY: rollout.group_size with equal metadata",
        note="Only with experience.follow.",
    )
    deadline_seconds: Float | None = key(
        None,
        "Time after which recjax trains on a group without its missing rewards; null: it waits",
        note="Only with experience.follow.",
        gt=0,
    )
    outage_seconds: Float = key(
        300.0,
        "Time that a run waits for a followed store whose database cannot be reached",
        note="Only with experience.follow.",
        ge=0,
    )

    def check(self, config: "Config") -> None:
        """Refuses an empty block, and settings that do not work with the source of the data."""
        stored_keys = ["experience.missing_logprobs", "experience.regrade"]
        followed_keys = ["experience.group_by", "experience.deadline_seconds", "experience.outage_seconds"]
        if self.store:
            names = ["experience.mix", "experience.late", "experience.refill", "experience.record"]
            refuse_with(config, names, "experience.store")
        else:
            refuse_without(config, ["experience.follow"], "experience.store")
            if self.mix is None:
                refuse_without(config, stored_keys, "experience.store", "experience.mix")
        if config.regime.mode == "async":
            refuse_with(config, ["experience.refill"], "regime.mode = async")
        if self.regrade and config.task.agent in ("environment", *PLAYED):
            raise UserError(
                "experience.regrade",
                f"does not work with task.agent = {config.task.agent}, which gives the rewards itself",
                "remove one of them",
                value=True,
            )
        if self.follow:
            self._check_followed(config)
        else:
            refuse_without(config, followed_keys, "experience.follow")
        if not (self.store or self.mix or self.late or self.replay or self.refill or self.record):
            raise UserError(
                "experience", "give at least one of store, mix, late, replay, refill and record, or remove it"
            )

    def _check_followed(self, config: "Config") -> None:
        """Refuses what a followed store cannot give, such as completions of newer weights than its checkpoints."""
        if self.missing_logprobs == "initial":
            raise UserError(
                "experience.missing_logprobs",
                "does not work with experience.follow: rows arrive after the first step",
                "use current or unneeded",
                value="initial",
            )
        updates = config.training.updates
        minimum = config.training.checkpoint_every - 1 + updates - 1
        more = " plus the other updates of its batch" if updates > 1 else ""
        for name in ("regime.max_staleness", "regime.max_mean_staleness", "experience.replay.max_staleness"):
            limit = value_of(config, name)
            if limit is not None and limit < minimum:
                raise UserError(
                    name,
                    f"must be at least training.checkpoint_every - 1{more} = {minimum}, as a server that follows"
                    " the run samples with its checkpoints",
                    "raise it, or write checkpoints more often",
                    value=limit,
                )
