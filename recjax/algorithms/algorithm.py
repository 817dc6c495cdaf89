"""An algorithm: one function for each axis of the equation in `losses`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from recjax.algorithms.advantages import group_mean_advantages, raw_reward_advantages
from recjax.algorithms.axis import Axis
from recjax.algorithms.batch_advantages import no_advantages, turn_return_advantages
from recjax.algorithms.ratios import behavior_anchor, token_ratio
from recjax.algorithms.reading import RESCORED, SCORED
from recjax.algorithms.reduce import token_mean

RATIO = frozenset({"ratio", "log_ratio", "anchor_logprobs"})
# The axes of REINFORCE that are never off.
GROUP_MEAN = Axis(group_mean_advantages)
BEHAVIOR_ANCHOR = Axis(behavior_anchor)
TOKEN_RATIO = Axis(token_ratio)
TOKEN_MEAN = Axis(token_mean)


def values_read(*axes: Axis | None) -> set[str]:
    """Names of the values that the functions of some axes read; an axis that is off reads none.

    Examples:
        >>> sorted(values_read(BEHAVIOR_ANCHOR, None, TOKEN_MEAN))
        ['behavior_logprobs', 'completion_mask', 'per_token']
    """
    names: set[str] = set()
    for axis in axes:
        if axis is not None:
            names.update(axis.reads)
    return names


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One function for each axis, with its options; the defaults are plain REINFORCE.

    Instances are hashable, so jit takes them as static arguments. `presets.build_algorithm` makes one from names and
    options. A function's positional parameters name the values that it reads; `reading` lists these names. An axis that
    is None has no effect. Without an objective, the loss is the policy gradient: the reduction of `losses.token_loss`.
    A user's `token_objective` takes the place of the policy gradient, regularizer and term in `losses.token_loss`.
    """

    objective: Axis | None = None
    token_objective: Axis | None = None
    selection: Axis | None = None
    advantage: Axis = GROUP_MEAN
    anchor: Axis = BEHAVIOR_ANCHOR
    ratio: Axis = TOKEN_RATIO
    clip: Axis | None = None
    mask: Axis | None = None
    row_weight: Axis | None = None
    token_weight: Axis | None = None
    correction: Axis | None = None
    regularizer: Axis | None = None
    term: Axis | None = None
    reduction: Axis = TOKEN_MEAN
    reference_kl: Axis | None = None
    unbiased_reference_kl: Axis | None = None
    entropy: Axis | None = None
    distillation: Axis | None = None
    log_ratio_penalty: Axis | None = None
    teacher_divergence: Axis | None = None
    score_centering: Axis | None = None
    observations: Axis | None = None

    def with_options(self, options: Mapping[str, Mapping[str, Any]]) -> "Algorithm":
        """The algorithm with other option values, by axis; a compiled program may take them as arguments."""
        changed = {axis: getattr(self, axis).with_options(values) for axis, values in options.items()}
        return dataclasses.replace(self, **changed)

    def reads(self, *names: str) -> bool:
        """True if the loss reads any of `names`."""
        read = values_read(self.selection, self.advantage, self.clip, self.mask)
        read |= values_read(self.row_weight, self.token_weight, self.correction)
        read |= values_read(self.token_objective, self.regularizer, self.term)
        read |= values_read(self.unbiased_reference_kl, self.log_ratio_penalty)
        if self.correction is not None or not RATIO.isdisjoint(read):
            read |= values_read(self.anchor)
        if not RATIO.isdisjoint(values_read(self.mask)):
            read.add("behavior_logprobs")
        if "ratio" in read:
            read |= values_read(self.ratio)
        return not read.isdisjoint(names)

    @property
    def reads_ratio(self) -> bool:
        """True if the loss reads the ratio of policy to anchor, or of anchor to behavior policy."""
        return self.correction is not None or self.reads(*RATIO)

    @property
    def is_anchored_at_behavior(self) -> bool:
        """True if the anchor is the behavior policy, so that the ratio also is the correction."""
        return self.anchor == BEHAVIOR_ANCHOR

    @property
    def is_anchored_at_reference(self) -> bool:
        """True if the loss compares completions by their ratio to the reference policy."""
        return self.objective is not None and self.objective.option("anchor") == "reference"

    @property
    def needs_behavior_logprobs(self) -> bool:
        """True if the loss depends on log-probs under the behavior policy."""
        if self.compares_completions:
            return not self.is_anchored_at_reference
        if self.correction is not None or self.score_centering is not None:
            return True
        if self.teacher_divergence is not None and self.teacher_divergence.option("weight") != "none":
            return True
        return self.reads("behavior_logprobs", "scored_log_ratio", "effective_share")

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
        function = self.advantage.function
        if function is no_advantages:
            return None
        subtracts_none = self.advantage.option("baseline") == "none"
        if function is raw_reward_advantages or (function is turn_return_advantages and subtracts_none):
            return "zero"
        if "group_ids" in self.advantage.reads and not subtracts_none:
            return "group"
        return "batch"

    @property
    def values_singletons(self) -> bool:
        """True if a group's only completion has its reward as its advantage."""
        return self.advantage.option("singleton") == "reward"

    @property
    def has_bonus(self) -> bool:
        """True if completions of a group can have an advantage although their rewards are equal."""
        return bool(self.advantage.option("bonus"))

    @property
    def imitates(self) -> bool:
        """True if a term has completions of other models as its targets, whatever their rewards are."""
        return "foreign" in values_read(self.regularizer)

    @property
    def relates_rows(self) -> bool:
        """True if the loss relates the rows of a completion, which must then be in one micro-batch."""
        read = values_read(self.ratio, self.clip, self.mask, self.token_weight)
        read |= values_read(self.correction, self.log_ratio_penalty, self.token_objective)
        read |= values_read(self.regularizer, self.term, self.reduction)
        return self.compares_completions or "trajectories" in read

    @property
    def needs_reference(self) -> bool:
        """True if the loss reads the log-probs of a reference policy."""
        has_kl = self.reference_kl is not None or self.unbiased_reference_kl is not None
        read = values_read(self.term, self.token_objective)
        reads_logprobs = self.is_anchored_at_reference or "reference_logprobs" in read
        return has_kl or reads_logprobs or self.reads("scored_reference_kl")

    @property
    def needs_teacher(self) -> bool:
        """True if the loss or the advantages read a teacher's log-probs, or the loss its distributions."""
        return self.reads_teacher_logprobs or self.teacher_divergence is not None

    @property
    def reads_teacher_logprobs(self) -> bool:
        """True if the advantages or the loss read a teacher's log-probs of the sampled tokens."""
        return self.distillation is not None or "teacher_logprobs" in values_read(self.term, self.token_objective)
