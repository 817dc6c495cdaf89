"""The table of features: axes with values, each as the config keys that switch it on.

A value must be valid alone, added to BASE, or with the value that NEEDS names. The first value of an axis is plain and
adds nothing. Values of two axes may not set the same key. `<name>` stands for the path of a material, see
`materials.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

BASE = {
    "output": "unset",
    "model": {"dtype": "float32"},
    "task": {
        "arithmetic": {"problems": ["1..9 + 1..9"], "template": "{a}{op}{b}="},
        "reward": "tests.pairs.programs:graded",
    },
    # Stops at two characters, so that a random policy ends half of its completions before the limit.
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_completion_tokens": 4, "stop": ["+", "="]},
    "optimizer": {"learning_rate": 1e-2},
    "training": {"steps": 4, "checkpoint_every": 2},
    # As many prompts and completions as in a batch, so that both are one program.
    "evaluation": {"every": 0, "problems": 4, "samples": 4},
    "samples": {"every": 0},
}
MODEL = "model.path=<dense>"
AGENT = "task.agent=tests.pairs.programs:"
CONTEXT = "rollout.max_context_tokens=32"
FOREIGN = ["experience.missing_logprobs=current"]
SUMS = 'arithmetic: {problems: ["1..9 + 1..9"], template: "{a}{op}{b}="}, reward: "tests.pairs.programs:graded"'
LESSON = ["task.teacher_template={better}={prompt}", "task.teacher_tokens=12"]
DIVERGES = "algorithm.teacher_divergence={coefficient: 0.5}"

AXES: Mapping[str, Mapping[str, list[str]]] = {
    "regime": {
        "on policy": [],
        "interval": ["regime.sync_interval=3"],
        "ahead": ["regime.sync_offset=2"],
        "offline": ["regime.offline=true"],
        "async": ["regime.mode=async", "regime.max_staleness=9"],
    },
    "updates": {
        "one update": [],
        "two passes": ["training.updates_per_batch=2"],
        "minibatches": ["training.minibatches=2"],
    },
    "experience": {
        "own": [],
        "mixed rows": ["experience.mix.store=<initial>"],
        "mixed groups": ["experience.mix.store=<store>", "experience.mix.of=batch"],
        "foreign rows": ["experience.mix.store=<foreign>", *FOREIGN],
        "stored": ["experience.store=<uneven>"],
        "stored trajectories": ["experience.store=<trajectories>"],
        "followed": ["experience.store=<store>", "experience.follow=true", CONTEXT],
    },
    "queue": {
        "in order": [],
        "late": ["experience.late={longest: 2}"],
        "deadline": ["experience.late={longest: 3, deadline: 1}"],
        "replay": ["experience.replay={draw_every: 2, max_reuse: 3, keep_no_signal: true}"],
        "bounded replay": ["experience.replay={max_reuse: 2, max_staleness: 1, keep_no_signal: true}"],
        "ranked replay": ["experience.replay={max_reuse: 2, half_life: 2.0, priority: reward_spread}"],
        "headroom replay": [
            "experience.replay={max_reuse: 3, priority: headroom, order: highest, max_drift: 4.0}",
        ],
        "mean bound": [
            "experience.replay={draw_every: 2, max_reuse: 3, keep_no_signal: true}",
            "regime.max_mean_staleness=2.0",
        ],
        "refill": ["experience.refill={}"],
    },
    "record": {"no record": [], "recorded": ["experience.record=true"]},
    "completions": {
        "one turn": [],
        "turns": [f"{AGENT}several_turns", CONTEXT],
        "turn returns": [
            f"{AGENT}several_turns",
            CONTEXT,
            "algorithm.advantage={name: turn_returns, discount: 0.5}",
        ],
        "observed turns": [f"{AGENT}several_turns", CONTEXT, "algorithm.observations={coefficient: 0.1}"],
        "cut contexts": [f"{AGENT}cut_contexts", CONTEXT],
        "failing agent": [f"{AGENT}failing", "task.agent_failure_reward=-1.0", CONTEXT],
        "seats": [f"{AGENT}duel", "task.seats={first: policy, second: policy}", CONTEXT],
        "frozen seat": [f"{AGENT}duel", "task.seats={first: policy, second: initial}", CONTEXT],
        "tools": ["task.agent=tools", "task.tools=[tests.pairs.programs:add]", CONTEXT],
        "environment": [
            "task.agent=environment",
            "task.environment=tests.pairs.programs:Countdown",
            CONTEXT,
        ],
    },
    "cut off": {
        "trained": [],
        "masked": ["task.truncated=mask"],
        "penalized": ["task.truncated=penalize", "task.truncated_reward=-1.0"],
        "overlong": ["task.overlong_tokens=3"],
    },
    "groups": {"four": [], "single": ["rollout.group_size=1"], "oversampled": ["rollout.oversample=2"]},
    "sampling": {
        "exact": [],
        "cool": ["rollout.temperature=0.7"],
        "likely": ["rollout.top_k=5"],
        "nucleus without sets": ["rollout.top_p=0.8", "rollout.kept_ids=0"],
    },
    "objective": {
        "grpo": [],
        "batch baseline": ["algorithm.preset=reinforce_pp"],
        "parts": ["algorithm.preset=gdpo"],
        "sequence ratio": ["algorithm.preset=gspo"],
        "pairwise": ["algorithm.preset=pairwise_consistency"],
        "proximal": ["algorithm.preset=decoupled_ppo"],
        "selection": ["algorithm.preset=red_drop"],
        "expert": ["algorithm.preset=luffy"],
        "own objective": ["algorithm.objective=tests.pairs.programs:clipped_surrogate"],
    },
    "teacher": {
        "no teacher": [],
        "distillation": ["model.teacher=<expert_teacher>", "algorithm.distillation={coefficient: 0.5}"],
        "hybrid teacher": ["model.teacher=<delta_teacher>", DIVERGES],
        "own lessons": ["model.teacher=policy", *LESSON, DIVERGES],
        "first teacher": ["model.teacher=policy", "model.teacher_rate=0.0", DIVERGES],
        "averaged teacher": ["model.teacher=policy", "model.teacher_rate=0.3", DIVERGES],
    },
    "terms": {
        "no term": [],
        "reference": ["algorithm.reference_kl={coefficient: 0.2, estimator: k3}"],
        "other reference": ["algorithm.reference_kl={coefficient: 0.2, estimator: k3}", "model.reference=<parent>"],
        "entropy": ["algorithm.entropy={coefficient: 0.1}"],
        "centering": ["rollout.recorded_top_k=4", "algorithm.score_centering={coefficient: 1.0}"],
        "ratio penalty": ["algorithm.log_ratio_penalty={coefficient: 0.1}"],
    },
    "model": {
        "dense": [MODEL],
        "adapters": [MODEL, "model.lora={rank: 2, alpha: 8, targets: [query, down]}"],
        "frozen": [MODEL, "model.freeze=[embedding]"],
        "tied": ["model.path=<tied>"],
        "experts": ["model.path=<experts>"],
        "hybrid": ["model.path=<delta>"],
        "continued": ["model.run=<parent>"],
    },
    "start": {
        "no warm start": [],
        "answers": ["warm_start.steps=2", "warm_start.batch_size=8"],
        "demonstrations": [
            "warm_start.steps=2",
            "warm_start.batch_size=8",
            "warm_start.learning_rate=0.001",
            "warm_start.demonstrations=<chats.jsonl>",
        ],
    },
    "problems": {
        "sums": [],
        "mixture": [
            "task.arithmetic=null",
            "task.reward=null",
            f"task.mixture.more={{{SUMS.replace('1..9 +', '2..8 +')}, weight: 3, reward_weights: {{length: 0.5}}}}",
            f"task.mixture.sums={{{SUMS}}}",
        ],
        "curriculum": ["task.curriculum={}"],
        "kept": ["task.keep={pass_rate: [0.0, 0.9], samples: 4}"],
    },
    "rewards": {
        "graded": [],
        "some missing": ["task.reward=tests.pairs.programs:sometimes_graded"],
        "no verdict": ["task.reward=tests.pairs.programs:without_verdict"],
    },
    "layout": {
        "automatic": [],
        "packed": ["training.tokens_per_micro_batch=160"],
        "micro-batches": ["training.micro_batch_prompts=1"],
    },
    "place": {"one device": [], "mesh": ["mesh.data=2", "mesh.fsdp=2"], "server": ["rollout.engine=http://<server>"]},
    "drift": {
        "no drift": [],
        "noise": ["rollout.drift={weights: noise, scale: 0.1}"],
        "exact log-probs": ["rollout.drift={weights: int8, logprobs: exact}"],
    },
}

# The values in which most faults were found; every accepted triple of them occurs in some row.
COSTLY = (
    "replay",
    "mixed rows",
    "refill",
    "turns",
    "mixture",
    "curriculum",
    "penalized",
    "parts",
    "two passes",
    "packed",
)
# Values whose documented form has no agent: each meets every objective also without one.
WITHOUT_AGENT = ("stored trajectories",)
# Pairs that other values hide, such as those by which the reference is the sampler: each also occurs without them.
ALONE = (("experts", "reference"), ("experts", "averaged teacher"))
# Values that other values need: their pairs are tried with these.
NEEDS: Mapping[str, tuple[str, str]] = {"single": ("objective", "batch baseline")}
# Values that only the start of a run can refuse, as its data decide: the reason by values. An entry may name a set.
_OTHER_SAMPLING = frozenset({"cool", "likely", "nucleus without sets"})
REFUSED_AT_START: Mapping[tuple[str | frozenset[str], ...], str] = {
    (_OTHER_SAMPLING, frozenset({"mixed rows", "mixed groups", "stored", "stored trajectories"})): (
        "the store's completions were sampled from another distribution"
    ),
    (
        frozenset({"mixed rows", "foreign rows"}),
        frozenset({"seats", "frozen seat"}),
    ): "completions join only groups of their own seat",
    (_OTHER_SAMPLING, "followed"): "the run would wait for completions of its own distribution",
    ("own lessons", "stored trajectories"): "a teacher's prompts need single turns",
    ("no verdict", frozenset({"kept", "curriculum"})): "the reward says not which answers are right",
    ("other reference", frozenset({"tied", "experts", "hybrid"})): "the reference is another model",
}


def always(ran: Any) -> bool:
    """A number that every run reads."""
    return True


def _grades(ran: Any) -> bool:
    """True if the run computes rewards; those of a store are its own."""
    return ran.config.experience is None or ran.config.experience.store is None


def _observes(ran: Any) -> bool:
    """True if an agent of some batch read tokens between its replies."""
    for step in ran.steps:
        sampled = np.asarray(step.batch.completion_mask)
        if (np.asarray(step.batch.real_tokens) & ~sampled & sampled.any(-1, keepdims=True)).any():
            return True
    return False


def _has_turns(ran: Any) -> bool:
    """True if some completion has rewards of several turns."""
    turns = [step.batch.turn_rewards for step in ran.steps if step.batch.turn_rewards is not None]
    return any(((~np.isnan(np.asarray(rewards))).sum(-1) > 1).any() for rewards in turns)


def _trains_on_new(ran: Any) -> bool:
    """True if some batch was sampled by weights of this run."""
    return any((np.asarray(step.batch.policy_version) > 0).any() for step in ran.steps)


def _cut_beside_whole(ran: Any) -> bool:
    """True if the first batch has a group with cut and with whole completions."""
    batch = ran.steps[0].batch
    real = np.asarray(batch.completion_mask).any(-1)
    ids = np.asarray(batch.group_ids)
    cut = np.asarray(batch.truncated)
    return any(len({*cut[real & (ids == group)].tolist()}) == 2 for group in np.unique(ids[real]))


def _cut_of_three(ran: Any) -> bool:
    """True if a group with a cut completion has two other rewards, so that normalizing keeps the penalty's size."""
    batch = ran.steps[0].batch
    real = np.asarray(batch.completion_mask).any(-1)
    ids, rewards, cut = (np.asarray(x) for x in (batch.group_ids, batch.rewards, batch.truncated))
    return any(
        cut[real & (ids == group)].any() and len({*rewards[real & (ids == group)].tolist()}) > 2
        for group in np.unique(ids[real])
    )


def _lasts(ran: Any) -> bool:
    """True if the second step has other weights than the first, so that terms of their difference count."""
    return len(ran.steps) > 2


def _has_three_batches(ran: Any) -> bool:
    """True if there is a third batch, the first one for which other weights can sample."""
    return len(ran.steps) > 2 * ran.config.training.updates


def _has_ratios(ran: Any) -> bool:
    """True if some update has tokens with another probability than when they were sampled."""
    for step in ran.steps:
        known = step.batch.behavior_logprobs
        if known is None:
            continue
        far = np.abs(step.logprobs - np.asarray(known))[np.asarray(step.batch.completion_mask)]
        if np.nanmax(far, initial=0.0) > 0.01:
            return True
    return False


def _failed(ran: Any) -> bool:
    """True if some agent of the first batch failed beside others that did not."""
    groups = ran.taken[1]
    return any(
        len({one.grade.failure is None for one in group.completions}) == 2
        and len({one.grade.reward for one in group.completions}) > 2
        for group in groups
    )


# Another value of a number that belongs to a feature; whether it must change the weights or only some metric; and in
# which runs.
KNOBS: Mapping[str, tuple[str, str, Callable[[Any], bool]]] = {
    "interval": ("regime.sync_interval=2", "weights", _has_three_batches),
    "ahead": ("regime.sync_offset=1", "weights", _trains_on_new),
    "two passes": ("training.updates_per_batch=1", "weights", _lasts),
    "minibatches": ("training.minibatches=1", "weights", _lasts),
    "late": ("experience.late={longest: 1}", "metric", always),
    "ranked replay": ("experience.replay={max_reuse: 2, half_life: 0.1, priority: none}", "metric", _has_three_batches),
    "headroom replay": ("experience.replay={order: sampled, max_drift: 0.001}", "metric", _has_three_batches),
    "oversampled": ("rollout.oversample=4", "metric", always),
    "ratio penalty": ("algorithm.log_ratio_penalty={coefficient: 0.3}", "weights", _has_ratios),
    "own objective": ("algorithm.objective={epsilon: 0.01}", "weights", _has_ratios),
    "failing agent": ("task.agent_failure_reward=-3.0", "weights", _failed),
    "turn returns": ("algorithm.advantage={name: turn_returns, discount: 0.1}", "weights", _has_turns),
    "observed turns": ("algorithm.observations={coefficient: 0.3}", "weights", _observes),
    "masked": ("task.truncated=train", "weights", _cut_beside_whole),
    "penalized": ("task.truncated_reward=-4.0", "weights", _cut_of_three),
    "overlong": ("task.overlong_tokens=1", "metric", _cut_beside_whole),
    "cool": ("rollout.temperature=0.8", "weights", always),
    "distillation": ("algorithm.distillation={coefficient: 1.5}", "weights", always),
    "hybrid teacher": ("algorithm.teacher_divergence={coefficient: 1.5}", "weights", always),
    "averaged teacher": ("model.teacher_rate=0.6", "weights", _lasts),
    "reference": ("algorithm.reference_kl={coefficient: 0.6}", "weights", _lasts),
    "other reference": ("algorithm.reference_kl={coefficient: 0.6}", "weights", always),
    "entropy": ("algorithm.entropy={coefficient: 0.3}", "weights", always),
    "centering": ("algorithm.score_centering={coefficient: 0.5}", "weights", always),
    "adapters": ("model.lora={rank: 2, alpha: 16, targets: [query, down]}", "weights", always),
    "answers": ("warm_start.learning_rate=0.01", "weights", always),
    "demonstrations": ("warm_start.learning_rate=0.01", "weights", always),
    "mixture": ("task.mixture.more.reward_weights={length: -3.0}", "weights", _grades),
    "noise": ("rollout.drift={weights: noise, scale: 0.3}", "weights", always),
}
