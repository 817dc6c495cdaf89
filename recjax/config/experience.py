"""The config blocks `rollout`, `regime` and `experience`: the completions to train on, and how stale they may be."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from recjax.config.fields import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    Bool,
    ConfigBlock,
    Float,
    Int,
    Refusal,
    checked,
    key,
    spelled,
    value_of,
)
from recjax.models.sampling import Sampling, TokenRecord
from recjax.passwords import has_password

if TYPE_CHECKING:
    import recjax.config

_ASYNC = "regime.mode = async"
_STORE = "experience.store"
_FOLLOW = "experience.follow"
_ENGINE = "rollout.engine"
_LONG = "task.agent or experience.follow"

MissingLogprobs = Literal["error", "unneeded", "initial", "current"]
DialectName = Annotated[
    str, spelled("recjax|vllm|sglang|llamacpp|.*:.*", "takes recjax, vllm, sglang, llamacpp or module:name")
]
DriftKind = Literal["int8", "int4", "float8", "noise"]
Priority = Literal["none", "reward_spread", "absolute_advantage"]


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

    def refusals(self, config: "recjax.config.Config") -> Iterator[Refusal]:
        """Modes that need recjax's own engine."""
        problem = "samples single turns; remove task.agent, or sample with recjax's engine"
        yield config.task.agent, "rollout.engine.url", problem
        stored = config.experience and config.experience.store
        yield stored, "rollout.engine.url", "does nothing with experience.store, whose run samples nothing; remove it"


class DriftConfig(ConfigBlock):
    """A sampler that is wrong on purpose: it samples from weights that are changed after each sync."""

    weights: DriftKind = key(
        ..., "Change of the sampler's matrices: rounded to int8, int4 or float8, or noise relative to their size"
    )
    group: Int | None = key(
        None, "Inputs of an output that share a scale, for int8, int4 and float8; null: all inputs", ge=1
    )
    fixed: bool = key(
        False, "Noise is drawn once from the seed, so that it does not cancel over syncs; false: anew for each version"
    )
    scale: Float = key(1.0, "Factor of the change; 1: the whole rounding error, 0: no change", ge=0)
    logprobs: Literal["sampled", "exact"] = key(
        "sampled",
        "Recorded log-probs. sampled: of the changed weights, which sampled; exact: of the exact weights, as a server"
        " that reports wrong log-probs",
    )

    def refusals(self, config: "recjax.config.Config") -> Iterator[Refusal]:
        """Runs whose sampler has no weights to change, and records that exact log-probs do not fit."""
        problem = "changes the weights of recjax's own sampler, which this run does not use; remove it"
        yield config.rollout.engine or not config.samples_training_data, "rollout.drift", problem
        is_noise = self.weights == "noise"
        yield is_noise and self.group, "rollout.drift.group", "is for rounded weights, and noise has none; remove it"
        yield self.fixed and not is_noise, "rollout.drift.fixed", "is for noise; rounding always errs alike; remove it"
        is_exact = self.logprobs == "exact"
        problem = "scores whole completions of one version of the weights; remove {}"
        for name in ("task.agent", "regime.swap_within", "rollout.recorded_top_k"):
            yield is_exact and value_of(config, name), "rollout.drift.logprobs", problem.format(name)


class RolloutConfig(ConfigBlock):
    """Sampling of completions."""

    prompts_per_step: Int = key(16, "Prompts in a batch; with task.seats, pairs of a prompt and a trained seat", ge=1)
    group_size: Int = key(8, "Completions of each prompt", ge=1)
    max_prompt_tokens: Int | None = key(None, "Limit of a prompt's tokens; null: the data's longest prompt", ge=1)
    long_prompts: Literal["refuse", "drop"] = key(
        "refuse",
        "Treatment of longer prompts: end with an error, or drop the problems",
        needs="rollout.max_prompt_tokens",
    )
    max_completion_tokens: Int = key(16, "Limit of a completion's tokens; with task.agent, of one reply", ge=1)
    max_context_tokens: Int | None = key(
        None,
        "Limit of an agent's whole conversation in tokens; a followed store's longer rows are skipped",
        needs=_LONG,
        required=_LONG,
        must="be above rollout.max_completion_tokens",
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
        " algorithm.score_centering; 0: none",
        ge=0,
        le=4096,
    )
    record_routing: bool = key(True, "Record the experts of each sampled token; the update runs them again")
    stop: list[str] = key(list, "Texts of one token that end a completion, as EOS does")

    engine: EngineConfig | None = key(None)
    drift: DriftConfig | None = key(None)

    def sampling(self) -> Sampling:
        """The distribution that a run samples from, and trains under."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def recording(self) -> TokenRecord:
        """The arrays that a sampler records of the distribution of each token."""
        return TokenRecord(self.kept_ids, self.recorded_top_k)


class MixConfig(ConfigBlock):
    """Completions from a store, mixed with completions that the policy samples."""

    store: Annotated[str, checked(has_password)] = key(..., "File or URL of the store")
    share: Float = key(0.5, "Share of the store's completions: a whole number of rows or groups", gt=0, lt=1)
    of: Literal["group", "batch"] = key("group", "Mix rows into every group, or whole groups into every batch")

    def refusals(self, config: "recjax.config.Config") -> Iterator[Refusal]:
        """A share that is no whole number of rows or groups."""
        size = "group_size" if self.of == "group" else "prompts_per_step"
        rows = self.share * (count := getattr(config.rollout, size))
        problem = f"must be a whole number out of rollout.{size} = {count}"
        yield abs(rows - round(rows)) >= 1e-6, "experience.mix.share", problem


# A round samples a batch if one is due, and trains on a batch if enough groups have all their rewards. After the first
# rounds of a run, each round trains on a batch.


class LateConfig(ConfigBlock):
    """Rewards that arrive after their completions; recjax samples a delay for every completion, uniformly."""

    shortest: Int = key(0, "Shortest delay, in rounds", ge=0)
    longest: Int = key(0, "Longest delay, in rounds", must="be at least experience.late.shortest", ge=0)
    deadline: Int | None = key(
        None,
        "Rounds that a group waits for missing rewards; null: no limit",
        must="be at least experience.late.shortest",
        ge=1,
    )


class ReplayConfig(ConfigBlock):
    """A buffer of groups that recjax trains on more than once, and how it samples from the buffer."""

    draw_every: Int = key(1, "The policy samples a batch every Nth round", excludes="experience.follow", ge=1)
    capacity: Int = key(512, "Groups that the buffer holds; a new group replaces the oldest", ge=1)
    max_staleness: Int | None = key(None, "Limit of a group's staleness, in optimizer steps; null: no limit", ge=0)
    max_reuse: Int = key(
        4,
        "Number of times that recjax trains on a group, at most",
        must="be at least experience.replay.draw_every",
        ge=1,
    )
    half_life: Float | None = key(None, "Optimizer steps after which a group's chance halves; null: never", gt=0)
    priority: Priority = key("none", "Quantity that a group's chance is proportional to")
    keep_no_signal: Bool = key(
        False, "Keep groups from which the algorithm learns nothing, such as those with equal rewards"
    )

    def refusals(self, config: "recjax.config.Config") -> Iterator[Refusal]:
        """A buffer that cannot give a batch its groups, and one of a store that does not grow."""
        sampled = config.sampled_groups
        problem = f"must hold the {sampled} groups of a batch that come from it"
        yield self.capacity < sampled, "experience.replay.capacity", problem
        updates = config.training.updates
        batches = max(-(-config.training.steps // updates), 1)
        regime = config.regime
        why = "the staleness of fresh groups in the last update of their batch"
        # Between two syncs every batch is sampled with the same weights, also the batches in the place of stale ones.
        if regime.offline:
            why += " with regime.offline, whose sampler never gets new weights"
        elif regime.sync_interval > 1:
            batches = min(batches, regime.sync_interval)
            why += f" with regime.sync_interval = {regime.sync_interval}"
        else:
            batches = 1
        minimum = batches * updates - 1
        limit = self.max_staleness
        problem = f"must be at least {minimum}, {why}"
        yield limit is not None and limit < minimum, "experience.replay.max_staleness", problem
        algorithm = config.algorithm.build()
        compares = algorithm.baseline == "group" and (config.rollout.group_size > 1 or config.follows)
        problem = "compares a group's rewards with each other, which this algorithm does not; use none"
        yield self.priority != "none" and not compares, "experience.replay.priority", problem
        experience = config.experience
        assert experience is not None
        problem = "does not work with experience.store, except with experience.follow; remove one of them"
        yield experience.store and not config.follows, "experience.replay", problem
        problem = "keeps the groups that experience.refill replaces; remove one of them"
        yield self.keep_no_signal and experience.refill, "experience.replay.keep_no_signal", problem


class RefillConfig(ConfigBlock):
    """Dynamic sampling: replaces groups whose rewards are all equal.

    Groups of further batches replace them or, with `experience.replay`, groups of its buffer if there are enough.
    """

    batches: Int = key(10, "Limit of batches for one step; a run that needs more ends with an error", ge=1)

    def refusals(self, config: "recjax.config.Config") -> Iterator[Refusal]:
        """An algorithm that needs no replacement of groups."""
        problem = "replaces no group, because this algorithm also learns from groups with equal rewards; remove it"
        yield config.algorithm.signal(config.task) == "any", "experience.refill", problem


class RegimeConfig(ConfigBlock):
    """Staleness of the sampler's weights."""

    sync_interval: Int = key(
        1, "Batches between two copies of the weights to the sampler", excludes=f"regime.offline or {_STORE}", ge=1
    )
    sync_offset: Int = key(
        0,
        "Batches sampled ahead of the batch being trained on",
        excludes=f"regime.offline or {_ASYNC} or {_STORE}",
        ge=0,
    )
    offline: Bool = key(
        False,
        "Every batch comes from the initial policy; the sampler never gets new weights",
        excludes=f"{_ASYNC} or {_STORE}",
    )
    mode: Literal["sync", "async"] = key(
        "sync", "async: processes on Ray, or rollout.engine, sample during the updates", excludes=_STORE
    )
    max_staleness: Int | None = key(
        None,
        "Limit of the experience's staleness in the last update of a batch, in optimizer steps",
        needs=f"{_ASYNC} or {_FOLLOW}",
        required=_ASYNC,
        ge=0,
    )
    generators: Int = key(1, "Processes that sample", needs=_ASYNC, excludes=_ENGINE, ge=1, may_change=True)
    swap_within: Bool = key(
        False,
        "Generators take new weights in the middle of completions; false: only between batches",
        needs=_ASYNC,
        excludes=_ENGINE,
    )
    address: str | None = key(
        None,
        "Address of a Ray cluster; null: recjax starts Ray on this machine",
        needs=_ASYNC,
        excludes=_ENGINE,
        may_change=True,
    )
    generator_seconds: Float = key(
        600.0,
        "Time limit for one batch; recjax restarts a slower generator",
        needs=_ASYNC,
        excludes=_ENGINE,
        ge=1,
        may_change=True,
    )

    def refusals(self, config: "recjax.config.Config") -> Iterator[Refusal]:
        """A limit of staleness that no batch could keep."""
        if self.mode == "sync":
            return
        batches = self.sync_interval
        why = f"regime.sync_interval = {self.sync_interval}"
        if replay := config.experience and config.experience.replay:
            batches += replay.draw_every - 1
            why += f" and experience.replay.draw_every = {replay.draw_every}"
        updates = config.training.updates
        minimum = batches * updates - 1
        why = why + f" and {updates} updates of each batch" * (updates > 1)
        problem = f"must be at least {minimum}, the staleness due to {why}"
        assert self.max_staleness is not None
        yield self.max_staleness < minimum, "regime.max_staleness", problem


Grouping = Annotated[
    str,
    spelled(r"group|prompt|metadata\..+", "takes group, prompt, or metadata.KEY with a key of the rows' metadata"),
]


class ExperienceConfig(ConfigBlock):
    """Training data other than the batch that the policy has just sampled; at least one source or treatment."""

    store: Annotated[str, checked(has_password)] | None = key(
        None, "File or URL of a store that every batch comes from; groups may have any size"
    )
    mix: MixConfig | None = key(None, excludes="experience.store")
    late: LateConfig | None = key(None, excludes=_STORE)
    replay: ReplayConfig | None = key(None)
    refill: RefillConfig | None = key(None, excludes="regime.mode = async or experience.store")
    missing_logprobs: MissingLogprobs = key(
        "error",
        "Treatment of stored completions without behavior log-probs. error: refuse them; unneeded: the"
        " algorithm reads none; initial: score with the initial policy; current: score with the trained policy",
        needs=f"{_STORE} or experience.mix",
    )
    regrade: Bool = key(
        False,
        "Grade a store's completions with this run's reward, instead of their own rewards",
        needs=f"{_STORE} or experience.mix",
    )
    record: Bool = key(
        False, "Keep the completions that the policy samples in experience.db in the run's folder", excludes=_STORE
    )
    follow: Bool = key(
        False, "Train on a store as it grows, on each group once, when all its rewards have arrived", needs=_STORE
    )
    group_by: Grouping = key(
        "group",
        "The completions that form a group. group: equal group_id in the store; prompt: rollout.group_size completions"
        " of equal prompts; metadata.KEY: rollout.group_size with equal metadata",
        needs=_FOLLOW,
    )
    deadline_seconds: Float | None = key(
        None,
        "Time after which recjax trains on a group without its missing rewards; null: it waits",
        needs=_FOLLOW,
        gt=0,
    )
    outage_seconds: Float = key(
        300.0, "Time that a run waits for a followed store whose database cannot be reached", needs=_FOLLOW, ge=0
    )

    def refusals(self, config: "recjax.config.Config") -> Iterator[Refusal]:
        """An empty block, and settings that do not work with a followed store."""
        if not (self.store or self.mix or self.late or self.replay or self.refill or self.record):
            raise ValueError(
                "experience: give at least one of store, mix, late, replay, refill and record, or remove it"
            )
        problem = "does not work with task.agent = environment, which gives the rewards itself; remove one of them"
        yield self.regrade and config.task.agent == "environment", "experience.regrade", problem
        if not self.follow:
            return
        problem = "does not work with experience.follow: rows arrive after the first step; use current or unneeded"
        yield self.missing_logprobs == "initial", "experience.missing_logprobs", problem
        minimum = config.training.checkpoint_every - 1 + config.training.updates - 1
        more = " plus the other updates of its batch" * (config.training.updates > 1)
        problem = f"must be at least training.checkpoint_every - 1{more} = {minimum}, as a server that follows the run"
        problem += " samples with its checkpoints; raise it, or write checkpoints more often"
        for name in ("regime.max_staleness", "experience.replay.max_staleness"):
            limit = value_of(config, name)
            yield limit is not None and limit < minimum, name, problem
