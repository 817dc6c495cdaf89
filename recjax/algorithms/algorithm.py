"""An algorithm: one function for each axis of the equation in `losses`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from recjax.algorithms.advantages import group_mean_advantages, raw_reward_advantages
from recjax.algorithms.batch_advantages import no_advantages, turn_return_advantages
from recjax.algorithms.ratios import behavior_anchor, token_ratio
from recjax.algorithms.reading import RESCORED, SCORED, base, names_read
from recjax.algorithms.reduce import token_mean

RATIO = frozenset({"ratio", "log_ratio", "anchor_logprobs"})


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One function for each axis, with options bound by functools.partial; the defaults are plain REINFORCE.

    Instances are hashable, so jit takes them as static arguments. `presets.build_algorithm` makes one from names and
    options. A function's positional parameters name the values that it reads; `reading` lists these names. An axis that
    is None has no effect. Without an objective, the loss is the policy gradient: the reduction of `losses.token_loss`.
    """

    objective: Callable | None = None
    selection: Callable | None = None
    advantage: Callable = group_mean_advantages
    anchor: Callable = behavior_anchor
    ratio: Callable = token_ratio
    clip: Callable | None = None
    mask: Callable | None = None
    row_weight: Callable | None = None
    token_weight: Callable | None = None
    correction: Callable | None = None
    regularizer: Callable | None = None
    term: Callable | None = None
    reduction: Callable = token_mean
    reference_kl: Callable | None = None
    unbiased_reference_kl: Callable | None = None
    entropy: Callable | None = None
    distillation: Callable | None = None
    teacher_divergence: functools.partial | None = None
    score_centering: Callable | None = None
    observations: Callable | None = None

    def with_options(self, options: Mapping[str, Mapping[str, Any]]) -> "Algorithm":
        """The algorithm with other option values, by axis; a compiled program may take them as arguments."""
        bound = {axis: functools.partial(getattr(self, axis), **values) for axis, values in options.items()}
        return dataclasses.replace(self, **bound)

    def reads(self, *names: str) -> bool:
        """True if the loss reads any of `names`."""
        axes = [self.selection, self.advantage, self.clip, self.mask, self.row_weight, self.token_weight]
        axes += [self.correction, self.regularizer, self.term, self.unbiased_reference_kl]
        read = {name for axis in axes for name in names_read(axis)}
        if RATIO & read or self.correction is not None:
            read |= {*names_read(self.anchor)}
        if RATIO & {*names_read(self.mask)}:
            read.add("behavior_logprobs")
        if "ratio" in read:
            read |= {*names_read(self.ratio)}
        return any(name in read for name in names)

    @property
    def reads_ratio(self) -> bool:
        """True if the loss reads the ratio of policy to anchor, or of anchor to behavior policy."""
        return self.reads(*RATIO) or self.correction is not None

    @property
    def needs_behavior_logprobs(self) -> bool:
        """True if the loss depends on log-probs under the behavior policy."""
        needs = self.compares_completions or self.correction is not None or self.score_centering is not None
        divergence = self.teacher_divergence
        needs = needs or (divergence is not None and divergence.keywords["weight"] != "none")
        return needs or self.reads("behavior_logprobs", "scored_log_ratio", "effective_share")

    @property
    def needs_scoring(self) -> bool:
        """True if a batch's first update must score its rows (log-probs, entropies) before it splits them."""
        return self.reads(*SCORED)

    @property
    def needs_rescoring(self) -> bool:
        """True if every update of a batch must score its rows with the policy before that update."""
        return self.reads(*RESCORED)

    @property
    def needs_proximal(self) -> bool:
        """True if the loss depends on log-probs under the policy before the batch's first update."""
        return self.reads("proximal_logprobs")

    @property
    def compares_completions(self) -> bool:
        """True if the loss compares the completions of a group, which must then be in one micro-batch."""
        return self.objective is not None

    @property
    def baseline(self) -> Literal["group", "batch", "zero"] | None:
        """What the algorithm compares a reward with: its group's rewards, the batch's, or 0; None: it reads no rewards.

        A user's own advantage compares groups if it reads `group_ids`.

        Examples:
            >>> from recjax import algorithms
            >>> [algorithms.build(name, {}).baseline for name in ("grpo", "reinforce_pp", "logit_distillation")]
            ['group', 'batch', None]
        """
        if self.compares_completions:
            return "group"
        function = base(self.advantage)
        if function is no_advantages:
            return None
        is_plain = getattr(self.advantage, "keywords", {}).get("baseline") == "none"
        if function is raw_reward_advantages or (function is turn_return_advantages and is_plain):
            return "zero"
        return "group" if "group_ids" in names_read(function) and not is_plain else "batch"

    @property
    def values_singletons(self) -> bool:
        """True if a group's only completion has its reward as its advantage."""
        return getattr(self.advantage, "keywords", {}).get("singleton") == "reward"

    @property
    def imitates(self) -> bool:
        """True if a term has completions of other models as its targets, whatever their rewards are."""
        return "foreign" in names_read(self.regularizer)

    @property
    def relates_rows(self) -> bool:
        """True if the loss relates the rows of a completion, which must then be in one micro-batch."""
        axes = [self.ratio, self.clip, self.mask, self.token_weight, self.correction or self.ratio]
        axes += [self.regularizer, self.term, self.reduction]
        return self.compares_completions or any("trajectories" in names_read(axis) for axis in axes)

    @property
    def needs_reference(self) -> bool:
        """True if the loss reads the log-probs of a reference policy."""
        has_kl = self.reference_kl is not None or self.unbiased_reference_kl is not None
        return has_kl or "reference_logprobs" in names_read(self.term)

    @property
    def needs_teacher(self) -> bool:
        """True if the loss or the advantages read a teacher's log-probs, or the loss its distributions."""
        return self.reads_teacher_logprobs or self.teacher_divergence is not None

    @property
    def reads_teacher_logprobs(self) -> bool:
        """True if the advantages or the loss read a teacher's log-probs of the sampled tokens."""
        return self.distillation is not None or "teacher_logprobs" in names_read(self.term)
