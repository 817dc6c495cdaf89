"""What a config must not say: values out of range, contradictions, and settings that nothing would read."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from recjax.algorithms import presets
from recjax.config import Config, GradingConfig, RegimeConfig
from recjax.config_keys import TASKS, schema_keys
from recjax.experience.replay import PRIORITIES
from recjax.models.attention import KERNELS
from recjax.models.decoder import PROJECTIONS, REMAT
from recjax.tasks.grading.graders import GRADERS, reward_name
from recjax.tasks.grading.gym_package import check_gym


def _value_at(config: Config, key: str) -> Any:
    """The value at a dotted key; None inside a block that is not there."""
    value: Any = config
    for part in key.split("."):
        value = None if value is None else getattr(value, part)
    return value


def check(config: Config) -> None:
    """Refuses values out of range and settings that contradict each other or that nothing would read."""

    def require(condition: bool, key: str, remedy: str) -> None:
        if not condition:
            raise ValueError(f"{key} = {_value_at(config, key)!r}: {remedy}")

    def require_one(key: str, names: Sequence[str]) -> None:
        block = getattr(config, key)
        given = [name for name in names if getattr(block, name) is not None]
        if len(given) != 1:
            found = f"found {' and '.join(given)}" if given else "found none"
            raise ValueError(f"{key}: give exactly one of {', '.join(f'{key}.{name}' for name in names)}; {found}")

    for key, field in schema_keys().items():
        value, low = _value_at(config, key), field.metadata.get("low")
        if low is not None and value is not None:
            require(value >= low and math.isfinite(value), key, f"must be a finite number, {low} or more")
    for block in ("rollout", "evaluation"):
        require(0 < getattr(config, block).top_p <= 1, f"{block}.top_p", "must be above 0 and at most 1 (1: no cut)")
    require(config.rollout.temperature > 0, "rollout.temperature", "must be above 0: training needs diverse samples")
    if config.evaluation.temperature == 0:
        remedy = "needs sampled completions; raise evaluation.temperature from 0, or leave it out"
        require(not config.evaluation.initial_kl, "evaluation.initial_kl", remedy)
        for name, unset in (("top_k", 0), ("top_p", 1)):
            remedy = "is not read at evaluation.temperature = 0; remove it"
            require(getattr(config.evaluation, name) == unset, f"evaluation.{name}", remedy)
    treatments = ("refuse", "drop")
    require(config.rollout.long_prompts in treatments, "rollout.long_prompts", f"takes {', '.join(treatments)}")
    remedy = "needs rollout.max_prompt_tokens, beyond which prompts are dropped; set that, or remove it"
    bounded = config.rollout.long_prompts == "refuse" or config.rollout.max_prompt_tokens is not None
    require(bounded, "rollout.long_prompts", remedy)
    for name in ("clip_norm", "epsilon"):
        require(getattr(config.optimizer, name) > 0, f"optimizer.{name}", "must be above 0")
    for name in ("beta1", "beta2"):
        require(0 <= getattr(config.optimizer, name) < 1, f"optimizer.{name}", "must be at least 0 and below 1")
    require(
        config.optimizer.warmup_steps < config.training.steps,
        "optimizer.warmup_steps",
        f"must be below training.steps = {config.training.steps}",
    )
    require_one("model", ["path", "decoder"])
    require_one("task", TASKS)
    gym = config.task.reasoning_gym
    if gym:
        check_gym(gym.name, gym.options, gym.template)
    remedy = "is not read where prompts are plain text, as those of task.arithmetic are; remove it"
    plain = config.task.arithmetic or (gym and not gym.chat)
    require(config.task.system_prompt is None or not plain, "task.system_prompt", remedy)
    require(config.model.dtype in ("auto", "float32", "bfloat16"), "model.dtype", "takes auto, float32 or bfloat16")
    require(config.model.attention in ("auto", *KERNELS), "model.attention", f"takes auto, {', '.join(KERNELS)}")
    remedy = f"takes {', '.join(REMAT)}; what was true is now full, and false none"
    require(config.model.remat in REMAT, "model.remat", remedy)
    if lora := config.model.lora:
        unknown = [name for name in lora.targets if name not in PROJECTIONS]
        require(bool(lora.targets) and not unknown, "model.lora.targets", f"takes some of {', '.join(PROJECTIONS)}")
        remedy = "is not read beside model.lora, which trains its adapters and nothing else; remove one of them"
        require(not config.model.freeze, "model.freeze", remedy)
    schedules = ("constant", "linear", "cosine")
    require(config.optimizer.schedule in schedules, "optimizer.schedule", f"takes {', '.join(schedules)}")
    reward = reward_name(config.task)
    remedy = f"takes module:function, or one of {', '.join(GRADERS)}"
    require(reward in GRADERS or ":" in reward, "task.reward", remedy)
    for part, weight in config.task.reward_weights.items():
        require(math.isfinite(weight), "task.reward_weights", f"the weight of {part} must be a finite number")
    remedy = f"is not read by task.reward = {reward}, which runs in the training process; remove the block"
    require(reward in GRADERS or config.grading == GradingConfig(), "grading", remedy)
    treatments = ("train", "mask", "penalise")
    require(config.task.truncated in treatments, "task.truncated", f"takes {', '.join(treatments)}")
    require(math.isfinite(config.task.truncated_reward), "task.truncated_reward", "must be a finite number")
    remedy = "is read with task.truncated = penalise alone; set that, or remove it"
    require(config.task.truncated == "penalise" or config.task.truncated_reward == 0, "task.truncated_reward", remedy)
    if shape := config.model.decoder:
        require(
            shape.hidden_size % shape.num_heads == 0 and shape.hidden_size // shape.num_heads % 2 == 0,
            "model.decoder.hidden_size",
            f"must be an even multiple of model.decoder.num_heads = {shape.num_heads}",
        )
        require(
            shape.num_heads % shape.num_kv_heads == 0,
            "model.decoder.num_kv_heads",
            f"must divide model.decoder.num_heads = {shape.num_heads}",
        )
    if config.warm_start:
        require(config.warm_start.wrong_fraction <= 1, "warm_start.wrong_fraction", "is a share, 0 to 1")
    if config.regime.offline:
        for name, unset in (("sync_interval", 1), ("sync_offset", 0)):
            require(
                getattr(config.regime, name) == unset,
                f"regime.{name}",
                "is not read when regime.offline is true, where the sampler never gets new weights; remove one of them",
            )
    _check_mode(config, require)
    if config.experience:
        _check_experience(config, require)
    sizes = dataclasses.asdict(config.mesh)
    for name, size in sizes.items():
        require(size == -1 or size > 0, f"mesh.{name}", "takes a number of devices, or -1 for the rest of them")
    rest = [f"mesh.{name}" for name, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(f"{' and '.join(rest)} are both -1, but only one of them can take the rest; set the other")
    micro = config.training.micro_batch_prompts
    require(
        micro is None or config.rollout.prompts_per_step % micro == 0,
        "training.micro_batch_prompts",
        f"must divide rollout.prompts_per_step = {config.rollout.prompts_per_step}",
    )
    remedy = f"is not read beside training.tokens_per_micro_batch = {config.training.tokens_per_micro_batch}"
    alone = micro is None or config.training.tokens_per_micro_batch is None
    require(alone, "training.micro_batch_prompts", f"{remedy}; remove one of them")
    traced, steps = config.training.profile_steps, config.training.steps
    remedy = f"takes [first, last], steps with 1 <= first <= last <= training.steps = {steps}, such as [3, 4]; or null"
    in_order = traced is None or (len(traced) == 2 and 1 <= traced[0] <= traced[1] <= steps)
    require(in_order, "training.profile_steps", remedy)
    try:
        presets.build_algorithm(config.algorithm.preset, config.algorithm.overrides())
    except ValueError as error:
        raise ValueError(f"algorithm.{error}") from error


def _check_mode(config: Config, require: Callable[[bool, str, str], None]) -> None:
    regime, replay = config.regime, config.experience and config.experience.replay
    require(regime.mode in ("sync", "async"), "regime.mode", "takes sync, async")
    if regime.mode == "sync":
        for name in ("max_staleness", "generators", "address", "generator_seconds"):
            unset = getattr(RegimeConfig(), name)
            remedy = "is read with regime.mode = async alone; set that, or remove it"
            require(getattr(regime, name) == unset, f"regime.{name}", remedy)
        return
    remedy = "has no meaning with regime.mode = async, where generators take new weights; remove one of them"
    require(not regime.offline, "regime.offline", remedy)
    remedy = "is not read with regime.mode = async, where regime.max_staleness bounds what is drawn ahead; remove it"
    require(regime.sync_offset == 0, "regime.sync_offset", remedy)
    remedy = "is needed with regime.mode = async: optimiser steps that experience may be behind the trainer, from 0"
    require(regime.max_staleness is not None, "regime.max_staleness", remedy)
    least, why = regime.sync_interval - 1, f"regime.sync_interval = {regime.sync_interval}"
    if replay:
        least, why = least + replay.draw_every - 1, f"{why} and experience.replay.draw_every = {replay.draw_every}"
    require(regime.max_staleness >= least, "regime.max_staleness", f"must be at least {least}, which {why} come to")


def _check_experience(config: Config, require: Callable[[bool, str, str], None]) -> None:
    experience, rollout = config.experience, config.rollout
    ways = [name for name in ("mix", "late", "replay", "record") if getattr(experience, name)]
    if not (experience.store or ways):
        raise ValueError("experience: give at least one of store, mix, late, replay and record, or remove the block")
    choices = ("error", "unneeded", "initial", "current")
    require(experience.missing_logprobs in choices, "experience.missing_logprobs", f"takes {', '.join(choices)}")
    if experience.store:
        remedy = f"is not read beside experience.store = {experience.store!r}, from which every batch comes;"
        remedy += " remove one of them"
        for name in ways:
            require(False, f"experience.{name}", remedy)
        for name, unset in dataclasses.asdict(RegimeConfig()).items():
            require(getattr(config.regime, name) == unset, f"regime.{name}", remedy)
    elif not experience.mix:
        remedy = "is read with experience.store and experience.mix alone; remove it"
        require(experience.missing_logprobs == "error", "experience.missing_logprobs", remedy)
    if mix := experience.mix:
        require(mix.of in ("group", "batch"), "experience.mix.of", "takes group, batch")
        of = "rollout.group_size" if mix.of == "group" else "rollout.prompts_per_step"
        whole = mix.share * _value_at(config, of)
        remedy = f"must be above 0, below 1, and a whole number out of {of} = {_value_at(config, of)}"
        require(0 < mix.share < 1 and abs(whole - round(whole)) < 1e-6, "experience.mix.share", remedy)
    if late := experience.late:
        remedy = f"must be at least experience.late.shortest = {late.shortest}"
        require(late.longest >= late.shortest, "experience.late.longest", remedy)
    if replay := experience.replay:
        remedy = f"takes {', '.join(PRIORITIES)}"
        require(replay.priority in PRIORITIES, "experience.replay.priority", remedy)
        remedy = "must be above 0 optimiser steps, or null"
        require(replay.half_life is None or replay.half_life > 0, "experience.replay.half_life", remedy)
        own = rollout.prompts_per_step
        if experience.mix and experience.mix.of == "batch":
            own -= round(experience.mix.share * own)
        remedy = f"must hold the {own} groups of a batch that come from it"
        require(replay.capacity >= own, "experience.replay.capacity", remedy)
        remedy = f"must be at least experience.replay.draw_every = {replay.draw_every}, or batches run out"
        require(replay.max_reuse >= replay.draw_every, "experience.replay.max_reuse", remedy)
