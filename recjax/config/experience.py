"""The config blocks `rollout`, `regime` and `experience`: the completions to train on, and how stale they may be."""

from typing import Literal

from recjax.algorithms.options import require
from recjax.config.fields import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, Block, Float, Int, key, require_defaults
from recjax.models.sampling import Sampling

MissingLogprobs = Literal["error", "unneeded", "initial", "current"]
Priority = Literal["none", "reward_spread", "absolute_advantage"]


class RolloutConfig(Block):
    """Sampling of completions."""

    prompts_per_step: Int = key(16, "Prompts in a batch", ge=1)
    group_size: Int = key(8, "Completions of each prompt", ge=1)
    max_prompt_tokens: Int | None = key(None, "Limit of a prompt's tokens; null: the data's longest prompt", ge=1)
    long_prompts: Literal["refuse", "drop"] = key(
        "refuse", "Treatment of longer prompts: end with an error, or drop the problems"
    )
    max_completion_tokens: Int = key(16, "Limit of a completion's tokens; with task.agent, of one reply", ge=1)
    max_context_tokens: Int | None = key(
        None, "Limit of an agent's whole conversation in tokens; a followed store's longer rows are skipped", ge=2
    )
    slots: Int | None = key(None, "Completions decoded at the same time; null: as many as memory holds", ge=1)
    temperature: Float = key(1.0, "Sampling temperature", ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)
    top_k: Int = key(0, "Sample only from this many of the most likely tokens; 0: all", ge=0)
    top_p: Float = key(1.0, "Sample only from the most likely tokens with this total probability; 1: all", gt=0, le=1)
    min_p: Float = key(
        0.0, "Sample only from tokens at least this share as likely as the likeliest; 0: all", ge=0, le=1
    )
    stop: list[str] = key(list, "Texts of one token that end a completion, as EOS does")

    def sampling(self) -> Sampling:
        """The distribution that a run samples from, and trains under."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def check(self) -> None:
        """Refuses to drop long prompts without a limit."""
        remedy = "needs a limit; set rollout.max_prompt_tokens, or remove this key"
        bounded = self.long_prompts == "refuse" or self.max_prompt_tokens is not None
        require(bounded, "rollout.long_prompts", self.long_prompts, remedy)


class MixConfig(Block):
    """Completions from a store, mixed with completions that the policy samples."""

    store: str = key(..., "Folder of the store")
    share: Float = key(0.5, "Share of the store's completions: a whole number of rows or groups", gt=0, lt=1)
    of: Literal["group", "batch"] = key("group", "Mix rows into every group, or whole groups into every batch")

    def check(self, rollout: RolloutConfig) -> None:
        """Refuses a share that is no whole number of rows or groups."""
        in_group = self.of == "group"
        count = rollout.group_size if in_group else rollout.prompts_per_step
        remedy = f"must be a whole number out of rollout.{'group_size' if in_group else 'prompts_per_step'} = {count}"
        require(abs(self.share * count - round(self.share * count)) < 1e-6, "experience.mix.share", self.share, remedy)


# A round samples a batch if one is due, and trains one step if enough groups have all their rewards. After the first
# rounds of a run, a round is an optimizer step.


class LateConfig(Block):
    """Rewards that arrive after their completions; recjax samples a delay for every completion, uniformly."""

    shortest: Int = key(0, "Shortest delay, in rounds", ge=0)
    longest: Int = key(0, "Longest delay, in rounds", ge=0)
    deadline: Int | None = key(
        None, "Rounds after which recjax trains on a group without its missing rewards; null: the group waits", ge=1
    )


class ReplayConfig(Block):
    """A buffer of groups that recjax trains on more than once, and how it samples from the buffer."""

    draw_every: Int = key(1, "The policy samples a batch every Nth round", ge=1)
    capacity: Int = key(512, "Groups that the buffer holds; a new group replaces the oldest", ge=1)
    max_staleness: Int | None = key(None, "Limit of a group's staleness, in optimizer steps; null: no limit", ge=0)
    max_reuse: Int = key(4, "Number of times that recjax trains on a group, at most", ge=1)
    half_life: Float | None = key(None, "Optimizer steps after which a group's chance halves; null: never", gt=0)
    priority: Priority = key("none", "Quantity that a group's chance is proportional to")
    keep_no_signal: bool = key(False, "Keep groups whose rewards are all equal")

    def check(self, sampled: int) -> None:
        """Refuses a buffer that cannot give a batch its `sampled` groups, or gives them too seldom."""
        remedy = f"must hold the {sampled} groups of a batch that come from it"
        require(self.capacity >= sampled, "experience.replay.capacity", self.capacity, remedy)
        remedy = f"must be at least experience.replay.draw_every = {self.draw_every}, or batches run out"
        require(self.max_reuse >= self.draw_every, "experience.replay.max_reuse", self.max_reuse, remedy)


class RefillConfig(Block):
    """Dynamic sampling: replaces groups whose rewards are all equal by groups of further batches."""

    batches: Int = key(10, "Limit of batches for one step; a run that needs more ends with an error", ge=1)


class RegimeConfig(Block):
    """Staleness of the sampler's weights."""

    sync_interval: Int = key(1, "Optimizer steps between two copies of the weights to the sampler", ge=1)
    sync_offset: Int = key(0, "Batches sampled ahead of the batch being trained on", ge=0)
    offline: bool = key(False, "Every batch comes from the initial policy")
    mode: Literal["sync", "async"] = key("sync", "async: other processes sample during the updates, on Ray")
    max_staleness: Int | None = key(
        None, "With async or experience.follow: limit of the experience's staleness, in optimizer steps", ge=0
    )
    generators: Int = key(1, "With async: processes that sample", ge=1)
    swap_within: bool = key(
        False, "With async: a generator takes new weights in the middle of completions; false: only between batches"
    )
    address: str | None = key(None, "With async: address of a Ray cluster; null: recjax starts Ray on this machine")
    generator_seconds: Float = key(600.0, "With async: time limit for one batch; a slower generator is restarted", ge=1)

    def check(self, replay: ReplayConfig | None, follows: bool) -> None:
        """Refuses settings that the mode does not read, and a limit of staleness that no batch could keep."""
        if self.offline:
            remedy = "does not apply with regime.offline, as the sampler never gets new weights; remove one of them"
            require_defaults("regime", self, ("sync_interval", "sync_offset"), remedy)
        if self.mode == "sync":
            remedy = "applies only with regime.mode = async; set that, or remove this key"
            require_defaults("regime", self, ("generators", "swap_within", "address", "generator_seconds"), remedy)
            remedy = "applies only with regime.mode = async or experience.follow; set one of them, or remove this key"
            require(follows or self.max_staleness is None, "regime.max_staleness", self.max_staleness, remedy)
            return
        remedy = "does not work with regime.mode = async, where generators take new weights; remove one of them"
        require(not self.offline, "regime.offline", self.offline, remedy)
        remedy = "does not apply with regime.mode = async; regime.max_staleness limits how far ahead generators sample"
        require_defaults("regime", self, ("sync_offset",), remedy)
        remedy = "is required with regime.mode = async: limit of the experience's staleness in optimizer steps, from 0"
        require(self.max_staleness is not None, "regime.max_staleness", None, remedy)
        least, why = self.sync_interval - 1, f"regime.sync_interval = {self.sync_interval}"
        if replay:
            least, why = least + replay.draw_every - 1, f"{why} and experience.replay.draw_every = {replay.draw_every}"
        remedy = f"must be at least {least}, the staleness due to {why}"
        require(self.max_staleness >= least, "regime.max_staleness", self.max_staleness, remedy)


class ExperienceConfig(Block):
    """Training data other than the batch that the policy has just sampled."""

    store: str | None = key(None, "Folder of a store that every batch comes from; groups may have any size")
    mix: MixConfig | None = key(None)
    late: LateConfig | None = key(None)
    replay: ReplayConfig | None = key(None)
    refill: RefillConfig | None = key(None)
    missing_logprobs: MissingLogprobs = key(
        "error",
        "Treatment of completions in a store that have no behavior log-probs. error: refuse them; unneeded: the"
        " algorithm reads none; initial: score with the initial policy; current: score with the trained policy",
    )
    regrade: bool = key(False, "Grade a store's completions with this run's reward, instead of their own rewards")
    record: bool = key(False, "Keep the completions that the policy samples in a store in the run's folder")
    follow: bool = key(False, "Train on a store as it grows, on each group once, when all its rewards have arrived")
    group_by: str = key(
        "group",
        "With follow: the completions that form a group. group: equal group_id in the store; prompt:"
        " rollout.group_size completions of equal prompts; metadata.KEY: rollout.group_size with equal metadata",
    )
    deadline_seconds: Float | None = key(
        None, "With follow: time after which recjax trains on a group without its missing rewards; null: it waits", gt=0
    )

    def check(self, rollout: RolloutConfig, regime: RegimeConfig) -> None:
        """Refuses an empty block, sources that exclude each other, and contradictions within its own blocks."""
        if not (self.store or self.mix or self.late or self.replay or self.refill or self.record):
            raise ValueError(
                "experience: give at least one of store, mix, late, replay, refill and record, or remove it"
            )
        if not (self.follow and self.store):
            remedy = "needs a store that grows; set experience.store to its folder, or remove this key"
            require(not self.follow, "experience.follow", self.follow, remedy)
            remedy = "applies only with experience.follow; set that to true, or remove this key"
            require_defaults("experience", self, ("group_by", "deadline_seconds"), remedy)
        if self.follow:
            pass  # `check_follows`
        elif self.store:
            remedy = f"does not work with experience.store = {self.store!r}, the source of every batch; remove one"
            require_defaults("experience", self, ("mix", "late", "replay", "refill", "record"), remedy)
            require_defaults("regime", regime, tuple(vars(regime)), remedy)
        elif not self.mix:
            remedy = "applies only with experience.store or experience.mix; remove this key"
            require_defaults("experience", self, ("missing_logprobs", "regrade"), remedy)
        sampled = rollout.prompts_per_step
        if self.mix:
            self.mix.check(rollout)
            sampled -= round(self.mix.share * sampled) if self.mix.of == "batch" else 0
        if late := self.late:
            remedy = f"must be at least experience.late.shortest = {late.shortest}"
            require(late.longest >= late.shortest, "experience.late.longest", late.longest, remedy)
        if self.replay:
            self.replay.check(sampled)
        if self.refill:
            remedy = "does not work with experience.replay, which skips such groups by keep_no_signal; remove one"
            require(self.replay is None, "experience.refill", vars(self.refill), remedy)
            remedy = "does not work with regime.mode = async; remove one of them"
            require(regime.mode == "sync", "experience.refill", vars(self.refill), remedy)

    def check_follows(self, regime: RegimeConfig, checkpoint_every: int) -> None:
        """Refuses keys that do not apply to a followed store, and a limit of staleness that no row could keep."""
        remedy = f"does not work with the followed store experience.store = {self.store!r}; remove one of them"
        require_defaults("experience", self, ("mix", "late", "refill", "record"), remedy)
        require_defaults("regime", regime, tuple(name for name in vars(regime) if name != "max_staleness"), remedy)
        remedy = "takes group, prompt, or metadata.KEY with a key of the rows' metadata"
        named = self.group_by.startswith("metadata.") and self.group_by != "metadata."
        require(named or self.group_by in ("group", "prompt"), "experience.group_by", self.group_by, remedy)
        remedy = "does not work with experience.follow: rows arrive after the first step; use current or unneeded"
        require(self.missing_logprobs != "initial", "experience.missing_logprobs", self.missing_logprobs, remedy)
        if self.replay:
            remedy = "applies only to batches that the policy samples; remove this key"
            require(self.replay.draw_every == 1, "experience.replay.draw_every", self.replay.draw_every, remedy)
        limits = {"regime.max_staleness": regime.max_staleness}
        limits |= {"experience.replay.max_staleness": self.replay.max_staleness} if self.replay else {}
        for name, limit in limits.items():
            remedy = f"must be at least training.checkpoint_every - 1 = {checkpoint_every - 1}, as a server that"
            remedy += " follows the run samples with its checkpoints; raise it, or write checkpoints more often"
            require(limit is None or limit >= checkpoint_every - 1, name, limit, remedy)
