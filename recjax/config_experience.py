"""The blocks `rollout`, `regime` and `experience` of a config: which completions there are, and how old they get."""

import dataclasses
from typing import Literal

import omegaconf

from recjax.algorithms.options import require
from recjax.config_fields import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, at_least, number, require_defaults
from recjax.models.sampling import Sampling

# What stands for behavior log-probs that a store lacks: nothing, so that they are refused; nothing, as the algorithm
# reads none; those of the initial policy; or those of the policy that is trained, as it is when the rows arrive.
MissingLogprobs = Literal["error", "unneeded", "initial", "current"]
Priority = Literal["none", "reward_spread", "absolute_advantage"]


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled."""

    prompts_per_step: int = at_least(1, 16)  # prompts in a batch
    group_size: int = at_least(1, 8)  # completions of each prompt
    # Limit of a prompt's tokens; null: the longest prompt of the data.
    max_prompt_tokens: int | None = at_least(1, None)
    long_prompts: Literal["refuse", "drop"] = "refuse"  # what happens to longer prompts: an error, or they are left out
    max_completion_tokens: int = at_least(1, 16)  # limit of a completion's tokens; with task.agent, of one reply
    # Limit of an agent's whole conversation in tokens; longer rows of a followed store are left out.
    max_context_tokens: int | None = at_least(2, None)
    slots: int | None = at_least(1, None)  # completions decoded at a time; null: as many as memory holds
    # Temperature of sampling.
    temperature: float = number(1.0, low=LOWEST_TEMPERATURE, high=HIGHEST_TEMPERATURE)
    top_k: int = at_least(0, 0)  # sample from this many of the most likely tokens; 0: all
    # Sample from the most likely tokens with this total probability; 1: all.
    top_p: float = number(1.0, above=0, high=1)
    # Sample from tokens at least this share as likely as the most likely token; 0: all.
    min_p: float = number(0.0, low=0, high=1)
    stop: list[str] = dataclasses.field(default_factory=list)  # texts of one token that end a completion, as EOS does

    def sampling(self) -> Sampling:
        """The distribution that a run samples from, and trains under."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def check(self) -> None:
        """Refuses prompts dropped beyond no limit."""
        remedy = "needs rollout.max_prompt_tokens, beyond which prompts are dropped; set that, or remove it"
        bounded = self.long_prompts == "refuse" or self.max_prompt_tokens is not None
        require(bounded, "rollout.long_prompts", self.long_prompts, remedy)


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Completions of others, from a store, beside those that the policy samples."""

    store: str = omegaconf.MISSING  # folder of the store
    share: float = number(0.5, above=0, below=1)  # share that comes from the store: a whole number of rows or groups
    of: Literal["group", "batch"] = "group"  # mix rows into every group, or whole groups into every batch

    def check(self, rollout: RolloutConfig) -> None:
        """Refuses a share that is no whole number of rows or groups."""
        in_group = self.of == "group"
        count = rollout.group_size if in_group else rollout.prompts_per_step
        remedy = f"must be a whole number out of rollout.{'group_size' if in_group else 'prompts_per_step'} = {count}"
        require(abs(self.share * count - round(self.share * count)) < 1e-6, "experience.mix.share", self.share, remedy)


# A round samples a batch where one is due, and trains one step where enough groups have all their rewards: after the
# first rounds of a run, rounds are optimizer steps.


@dataclasses.dataclass(frozen=True)
class LateConfig:
    """Rewards that come after their completions; how many rounds is sampled evenly, for every completion."""

    shortest: int = at_least(0, 0)  # delay, in rounds
    longest: int = at_least(0, 0)  # delay, in rounds
    # Rounds after which a group is trained on without missing rewards; null: it waits.
    deadline: int | None = at_least(1, None)


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """A buffer of groups that are trained on more than once, and how it is sampled from."""

    draw_every: int = at_least(1, 1)  # the policy samples a batch every Nth round
    capacity: int = at_least(1, 512)  # groups that the buffer holds; the oldest is replaced
    # Optimizer steps that a group may be behind the trainer; null: no limit.
    max_staleness: int | None = at_least(0, None)
    max_reuse: int = at_least(1, 4)  # how often a group is trained on at most
    half_life: float | None = number(None, above=0)  # optimizer steps after which a group's chance halves; null: never
    priority: Priority = "none"  # a group's chance is proportional to this
    keep_no_signal: bool = False  # keep groups whose rewards are all equal

    def check(self, sampled: int) -> None:
        """Refuses a buffer that cannot give a batch its `sampled` groups, or gives them too seldom."""
        remedy = f"must hold the {sampled} groups of a batch that come from it"
        require(self.capacity >= sampled, "experience.replay.capacity", self.capacity, remedy)
        remedy = f"must be at least experience.replay.draw_every = {self.draw_every}, or batches run out"
        require(self.max_reuse >= self.draw_every, "experience.replay.max_reuse", self.max_reuse, remedy)


@dataclasses.dataclass(frozen=True)
class RefillConfig:
    """Groups whose rewards are all equal teach nothing: more batches are sampled until a step has enough others."""

    batches: int = at_least(1, 10)  # limit of batches for one step; a run that needs more ends with an error


@dataclasses.dataclass(frozen=True)
class RegimeConfig:
    """How far behind the trainer the sampler is."""

    sync_interval: int = at_least(1, 1)  # optimizer steps from one copy of the weights to the next
    sync_offset: int = at_least(0, 0)  # batches sampled ahead of the one being trained on
    offline: bool = False  # every batch comes from the initial policy
    mode: Literal["sync", "async"] = "sync"  # async: other processes sample while the trainer trains, on Ray
    # Async, or with experience.follow: optimizer steps that experience may be behind the trainer.
    max_staleness: int | None = at_least(0, None)
    generators: int = at_least(1, 1)  # async: processes that sample
    # Async: completions under way go on with new weights as these come; false: each batch has those that it began with.
    swap_within: bool = False
    address: str | None = None  # async: address of a Ray cluster; null: Ray is started on this machine
    # Async: time limit for one batch; a generator that takes longer is restarted.
    generator_seconds: float = at_least(1, 600.0)

    def check(self, replay: ReplayConfig | None, follows: bool) -> None:
        """Refuses settings that the mode does not read, and a bound of staleness that no batch could keep."""
        if self.offline:
            remedy = "is not read when regime.offline is true, where the sampler never gets new weights;"
            require_defaults("regime", self, ("sync_interval", "sync_offset"), f"{remedy} remove one of them")
        if self.mode == "sync":
            remedy = "is read with regime.mode = async alone; set that, or remove it"
            require_defaults("regime", self, ("generators", "swap_within", "address", "generator_seconds"), remedy)
            remedy = "is read with regime.mode = async and experience.follow; set one of these, or remove it"
            require(follows or self.max_staleness is None, "regime.max_staleness", self.max_staleness, remedy)
            return
        remedy = "has no meaning with regime.mode = async, where generators take new weights; remove one of them"
        require(not self.offline, "regime.offline", self.offline, remedy)
        remedy = "is not read with regime.mode = async, where regime.max_staleness bounds what is sampled ahead;"
        require_defaults("regime", self, ("sync_offset",), f"{remedy} remove it")
        remedy = "is needed with regime.mode = async: optimizer steps that experience may be behind the trainer, from 0"
        require(self.max_staleness is not None, "regime.max_staleness", None, remedy)
        least, why = self.sync_interval - 1, f"regime.sync_interval = {self.sync_interval}"
        if replay:
            least, why = least + replay.draw_every - 1, f"{why} and experience.replay.draw_every = {replay.draw_every}"
        remedy = f"must be at least {least}, which {why} come to"
        require(self.max_staleness >= least, "regime.max_staleness", self.max_staleness, remedy)


@dataclasses.dataclass(frozen=True)
class ExperienceConfig:
    """What is trained on beside, or in place of, each batch that the policy has just sampled."""

    store: str | None = None  # folder of a store that every batch comes from; groups may have any size
    mix: MixConfig | None = None
    late: LateConfig | None = None
    replay: ReplayConfig | None = None
    refill: RefillConfig | None = None
    missing_logprobs: MissingLogprobs = "error"  # what replaces behavior log-probs that a store lacks
    regrade: bool = False  # grade a store's completions by this run's reward, in place of their own rewards
    record: bool = False  # keep what the policy samples in the run's folder, as a store
    follow: bool = False  # wait for the store's groups, and train on each once, when it has its rewards
    # Follow: completions of a group; group: those of the store's group_id, prompt: rollout.group_size of equal prompts,
    # metadata.KEY: rollout.group_size of equal values in the metadata.
    group_by: str = "group"
    # Follow: after which a group goes without the rewards that have not come; null: it waits.
    deadline_seconds: float | None = number(None, above=0)

    def check(self, rollout: RolloutConfig, regime: RegimeConfig) -> None:
        """Refuses an empty block, ways that exclude each other, and what its own blocks refuse."""
        if not (self.store or self.mix or self.late or self.replay or self.refill or self.record):
            raise ValueError(
                "experience: give at least one of store, mix, late, replay, refill and record, or remove it"
            )
        if not (self.follow and self.store):
            remedy = "needs a store that grows: set experience.store to its folder, or remove it"
            require(not self.follow, "experience.follow", self.follow, remedy)
            remedy = "is read with experience.follow alone; set that to true, or remove it"
            require_defaults("experience", self, ("group_by", "deadline_seconds"), remedy)
        if self.follow:
            pass  # `check_follows`
        elif self.store:
            remedy = f"is not read beside experience.store = {self.store!r}, from which every batch comes; remove one"
            require_defaults("experience", self, ("mix", "late", "replay", "refill", "record"), remedy)
            require_defaults("regime", regime, tuple(vars(regime)), remedy)
        elif not self.mix:
            remedy = "is read with experience.store and experience.mix alone; remove it"
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
            remedy = "is not read beside experience.replay, which leaves such groups out by keep_no_signal; remove one"
            require(self.replay is None, "experience.refill", vars(self.refill), remedy)
            remedy = "is of batches that the loop samples itself; remove it, or regime.mode = async"
            require(regime.mode == "sync", "experience.refill", vars(self.refill), remedy)

    def check_follows(self, regime: RegimeConfig, checkpoint_every: int) -> None:
        """Refuses what a run that follows a store does not read, and a limit of staleness that no row could keep."""
        remedy = f"is not read where the run follows experience.store = {self.store!r}; remove one of them"
        require_defaults("experience", self, ("mix", "late", "refill", "record"), remedy)
        require_defaults("regime", regime, tuple(key for key in vars(regime) if key != "max_staleness"), remedy)
        remedy = "takes group, prompt, or metadata.KEY with a key of the rows' metadata"
        named = self.group_by.startswith("metadata.") and self.group_by != "metadata."
        require(named or self.group_by in ("group", "prompt"), "experience.group_by", self.group_by, remedy)
        remedy = "is of log-probs before the first step, when the rows are not there yet; take current or unneeded"
        require(self.missing_logprobs != "initial", "experience.missing_logprobs", self.missing_logprobs, remedy)
        if self.replay:
            remedy = "is of batches that the policy samples itself; remove it"
            require(self.replay.draw_every == 1, "experience.replay.draw_every", self.replay.draw_every, remedy)
        limits = {"regime.max_staleness": regime.max_staleness}
        limits |= {"experience.replay.max_staleness": self.replay.max_staleness} if self.replay else {}
        for key, limit in limits.items():
            remedy = f"must be at least training.checkpoint_every - 1 = {checkpoint_every - 1}, as a server that"
            remedy += " follows the run samples with its checkpoints; raise it, or write them more often"
            require(limit is None or limit >= checkpoint_every - 1, key, limit, remedy)
