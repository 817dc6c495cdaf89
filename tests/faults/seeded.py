"""Seeded faults, and which tests see each: python -m tests.faults.seeded [--only NAME ...] [--every]

The command copies the tree into a temporary folder and seeds one fault at a time there. It runs the tests that the
table names for the fault, but only those of the set that the table names, and prints which test failed. At the end it
runs those tests without a fault. It exits with 1 if no test sees a fault, if one of the tests fails without it, or if
the text to change is not in its file exactly once.

A fault is a change of behavior. `breaks` describes it without the names of the code: whoever rewrites that code states
the same fault again in `file`, `old` and `new`, and the tests that take the place of today's in `tests`.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parents[2]
COPIED = ("recjax", "tests", "experiments", "benchmarks", "docs", "launch", "pyproject.toml", "README.md", "setup.py")


# The sets of tests, and the markers that select each.
SETS = {"quick": "not slow and not campaign", "slow": "slow and not campaign", "campaign": "campaign"}


class Fault(NamedTuple):
    """A small change of the source.

    breaks: what goes wrong, without the names of today's code.
    file: under the repository's root.
    old: text that is in the file exactly once.
    new: the text in its place.
    tests: files or node ids for pytest, those most likely to see the fault first.
    set: the first of SETS whose tests see the fault.
    """

    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    set: str = "quick"


_QUEUE, _REPLAY = "tests/experience/test_queue.py", "tests/experience/test_replay.py"
_LOOP, _FED = "tests/training/test_loop.py", "tests/sources/test_fed_training.py"
_RESUME = "tests/runs/test_resume.py::test_kill_and_resume_equals_straight_through"
_KEYS = f"{_LOOP}::test_seeds_differ_and_no_key_is_reused"
_ON_POLICY = f"{_LOOP}::test_reference_kl_starts_at_zero_with_ratios_of_one"
_SELF_TAUGHT = "tests/training/test_self_distillation.py"
_ENGINE, _SAMPLER = "tests/rollout/test_engine.py", "tests/rollout/test_sampler.py"

_OWN_LOOP = "tests/experiments/test_own_loop.py::test_ten_steps_train"

FAULTS = {
    # --- Equations.
    "loss-adds-the-entropy-bonus": Fault(
        "the entropy bonus is added to the loss, so that training makes the policy more certain",
        "recjax/algorithms/losses.py",
        "losses -= algorithm.entropy.apply(",
        "losses += algorithm.entropy.apply(",
        ("tests/algorithms/test_losses.py::test_reference_kl_is_added_and_entropy_taken_off",),
    ),
    "loss-mask-replaces-clip": Fault(
        "where an algorithm has a mask beside its clip, the clip has no effect",
        "recjax/algorithms/losses.py",
        "clip = clip & algorithm.mask(compared, row_values)",
        "clip = algorithm.mask(compared, row_values)",
        ("tests/algorithms/test_field.py",),
    ),
    "advantage-deviation-of-raw-rewards": Fault(
        "a group's standard deviation is that around 0, not around the group's mean",
        "recjax/algorithms/advantages.py",
        "group_sums(jnp.square(centered), index) / degrees",
        "group_sums(jnp.square(rewards), index) / degrees",
        ("tests/algorithms/test_advantages.py",),
    ),
    "advantage-mean-of-dropped-rows": Fault(
        "completions that are left out of training still count in their group's mean",
        "recjax/algorithms/advantages.py",
        "    above = jnp.where(kept, above, 0.0)\n    counts = kept\n",
        "    counts = jnp.ones_like(kept)\n",
        ("tests/algorithms/test_advantages.py",),
    ),
    "clip-one-range-for-both-sides": Fault(
        "ratios are clipped below 1 by the distance that is meant for ratios above 1",
        "recjax/algorithms/clipping.py",
        "return (up & (ratio <= 1 + epsilon_high)) | (down & (ratio >= 1 - epsilon_low))",
        "return (up & (ratio <= 1 + epsilon_high)) | (down & (ratio >= 1 - epsilon_high))",
        ("tests/algorithms/test_clipping.py",),
    ),
    "regularizer-not-spread": Fault(
        "each token of a completion gets the completion's whole pull to the behavior policy, not its share",
        "recjax/algorithms/regularizers.py",
        "tau / 2 * jnp.square(completion_log_ratio) / jnp.maximum(lengths, 1.0)",
        "tau / 2 * jnp.square(completion_log_ratio)",
        ("tests/algorithms/test_regularizers.py",),
    ),
    "centering-without-the-rest": Fault(
        "score centering removes the mean over the recorded tokens alone, and not that over all other tokens",
        "recjax/algorithms/regularizers.py",
        "mean = jnp.exp(behavior) * top_weights - alpha * top_weights[..., -1:] * jnp.exp(policy)",
        "mean = jnp.exp(behavior) * top_weights",
        ("tests/algorithms/test_centering.py",),
    ),
    "centering-of-clipped-tokens": Fault(
        "score centering removes the gradient that tokens outside the clip's range would have, had they any",
        "recjax/algorithms/losses.py",
        "weights = jnp.where(algorithm.clip(sampled, row_values), weights, 0.0)",
        "pass",
        ("tests/algorithms/test_centering.py",),
    ),
    "ipo-bound-on-one-side": Fault(
        "the bound on the distance of probabilities lets tokens pass that have become much less likely",
        "recjax/algorithms/clipping.py",
        "return jnp.abs(jnp.exp(logprobs) - jnp.exp(behavior_logprobs)) <= delta",
        "return jnp.exp(logprobs) - jnp.exp(behavior_logprobs) <= delta",
        ("tests/algorithms/test_field.py",),
    ),
    "trm-drops-only-the-token": Fault(
        "a token with a large KL is dropped alone, and not its completion",
        "recjax/algorithms/masks.py",
        "largest = sequence_max(kl_estimate(log_ratio, estimator), completion_mask, trajectories)",
        "largest = kl_estimate(log_ratio, estimator)",
        ("tests/algorithms/test_field.py",),
    ),
    "chord-reinforces-the-expert": Fault(
        "the tokens of another model are imitated, and reinforced by their rewards as well",
        "recjax/algorithms/token_weighting.py",
        "return jnp.where(foreign[:, None], 0.0, (1 - share) * ratio)",
        "return (1 - share) * ratio",
        ("tests/algorithms/test_field.py",),
    ),
    "chord-slope-of-its-weight": Fault(
        "the weight of an imitated token is differentiated with the policy's probability in it",
        "recjax/algorithms/regularizers.py",
        "probability = jnp.exp(jax.lax.stop_gradient(logprobs))",
        "probability = jnp.exp(logprobs)",
        ("tests/algorithms/test_field.py",),
    ),
    "teacher-of-untaught-completions": Fault(
        "a completion without a teacher's prompt is compared with a teacher that reads nothing",
        "recjax/algorithms/losses.py",
        "divergence = jnp.where(taught, divergence, 0.0)",
        "pass",
        (_SELF_TAUGHT,),
    ),
    # --- Schema.
    "config-override-empties-its-block": Fault(
        "an override of one key of a block resets the block's other keys to their defaults",
        "recjax/config/load.py",
        "merged[key] = old if isinstance(old, dict) else {}",
        "merged[key] = {}",
        ("tests/config/test_config.py",),
    ),
    "config-no-model-is-no-error": Fault(
        "a config without a model is accepted",
        "recjax/config/model.py",
        "if len(chosen) != 1 and (chosen",
        "if len(chosen) > 1 and (chosen",
        ("tests/config/test_refusals.py",),
    ),
    "config-padding-is-lost": Fault(
        "a text of digits with zeros in front, such as 010, is read as a number without them",
        "recjax/config/yaml_values.py",
        '_WHOLE = r"(?:0|[1-9][0-9]*)"',
        '_WHOLE = r"(?:[0-9]+)"',
        ("tests/config/test_yaml_values.py",),
    ),
    # --- Loop.
    "loop-stop-without-checkpoint": Fault(
        "a stop request ends the run without a checkpoint of its step",
        "recjax/training/loop.py",
        "if run.saver.newest != state.step:",
        "if False:",
        (f"{_LOOP}::test_stopped_run_finishes_its_step_and_resumes",),
    ),
    "loop-last-step-not-evaluated": Fault(
        "the last step is evaluated only where evaluation.every divides it",
        "recjax/training/schedule.py",
        "return step == config.training.steps or bool(every",
        "return bool(every",
        (f"{_LOOP}::test_the_run_folder_holds_what_the_readme_says",),
    ),
    "loop-same-drops-every-step": Fault(
        "an algorithm that drops completions at random makes the same choice in every step",
        "recjax/training/learner.py",
        "jax.random.fold_in(self._drop_key, batch_number)",
        "jax.random.fold_in(self._drop_key, 1)",
        (_KEYS,),
    ),
    # --- Rounds.
    "rounds-version-off-by-one": Fault(
        "the sampler's weights are labeled one optimizer step newer than they are",
        "recjax/training/loop.py",
        "_replace(behavior_params=None, version=step - 1)",
        "_replace(behavior_params=None, version=step)",
        (_ON_POLICY,),
    ),
    "rounds-sampler-not-frozen": Fault(
        "between two syncs the sampler uses the trained weights instead of its copy",
        "recjax/training/loop.py",
        "schedule.is_sync(batch + 1, run.config.regime)",
        "schedule.is_sync(batch, run.config.regime)",
        (f"{_LOOP}::test_the_sampler_uses_the_weights_of_its_version",),
    ),
    "rounds-batches-share-keys": Fault(
        "consecutive batches sample their completions with the same random keys",
        "recjax/sources/sampling.py",
        "block, index = divmod(number, _BLOCK)",
        "block, index = number // _BLOCK, 0",
        (_KEYS,),
    ),
    "rounds-recorded-twice": Fault(
        "a resumed run records a batch that the record already holds",
        "recjax/sources/recording.py",
        'if records and not store.numbers("id", [records[0].completion.id]):',
        "if records:",
        (f"{_FED}::test_sampled_batches_are_recorded_once",),
    ),
    # --- Queue.
    "queue-deadline-off-by-one": Fault(
        "a group waits one round longer than its deadline",
        "recjax/experience/queue.py",
        "waited < settings.late.deadline",
        "waited <= settings.late.deadline",
        (_QUEUE,),
    ),
    "queue-reward-to-wrong-completion": Fault(
        "the rewards of a batch are given to its completions in reverse order",
        "recjax/experience/group.py",
        "zip(lacking, grades, strict=True)",
        "zip(lacking, grades[::-1], strict=True)",
        (_QUEUE,),
    ),
    "queue-newest-first": Fault(
        "where the oldest weights go first, a step takes the newest",
        "recjax/experience/queue.py",
        "key=versions.__getitem__)",
        "key=versions.__getitem__)[::-1]",
        (_QUEUE,),
    ),
    "queue-late-rewards-not-counted": Fault(
        "rewards that arrive after their group has left are not counted",
        "recjax/experience/queue.py",
        'counts["rewards_too_late"] += 1',
        'counts["rows_without_reward"] += 1',
        (_QUEUE,),
    ),
    # --- Replay.
    "replay-counts-every-use": Fault(
        "each step counts as a use of every group in the buffer, also of groups it did not take",
        "recjax/experience/queue.py",
        "for index in taken:",
        "for index in range(len(used)):",
        (_REPLAY,),
    ),
    "replay-staleness-off-by-one": Fault(
        "a group is trained on one optimizer step after the limit of staleness",
        "recjax/experience/replay.py",
        "staleness(entry.group, step) <= limits.max_staleness",
        "staleness(entry.group, step) <= limits.max_staleness + 1",
        (_REPLAY,),
    ),
    "replay-half-life": Fault(
        "a group's chance falls to 1/e, not to a half, in one half-life",
        "recjax/experience/replay.py",
        "-np.log(2.0) * (step - entry.added)",
        "-1.0 * (step - entry.added)",
        (_REPLAY,),
    ),
    "replay-beside-new-groups": Fault(
        "with refill and replay, a trained group takes a place although there are enough new ones",
        "recjax/experience/queue.py",
        "if not entry.used][:count]",
        "if entry.used][:count]",
        (_REPLAY,),
    ),
    # --- Checkpoint and resume.
    "checkpoint-drops-sampler": Fault(
        "a checkpoint lacks the sampler's own copy of the weights",
        "recjax/runs/checkpoint.py",
        "if state.behavior_params is not None:",
        "if False:",
        (f"{_RESUME}[interval]",),
    ),
    "checkpoint-drops-uses": Fault(
        "a checkpoint forgets how often each group in the buffer was trained on",
        "recjax/experience/queue.py",
        "[list(entry[1:]) for entry in queue.ready]",
        "[[entry.added, 0] for entry in queue.ready]",
        (_REPLAY,),
    ),
    "checkpoint-repeats-batch": Fault(
        "a resumed run samples the last batch before the checkpoint again",
        "recjax/experience/queue.py",
        'counts=Counter(plain["counts"]),',
        'counts=Counter(plain["counts"]) - Counter(batches=1),',
        (f"{_RESUME}[on policy]",),
    ),
    "checkpoint-keeps-oldest": Fault(
        "training.keep_checkpoints keeps the oldest checkpoints and deletes the newest",
        "recjax/runs/checkpoint.py",
        "sorted(manager.all_steps())[: -training.keep_checkpoints]",
        "sorted(manager.all_steps())[training.keep_checkpoints :]",
        ("tests/runs/test_resume.py::test_the_newest_checkpoints_are_kept",),
    ),
    "checkpoint-drops-moments": Fault(
        "a resumed run's optimizer begins with moments of zero",
        "recjax/runs/checkpoint.py",
        'trained=restored["state"],',
        'trained=trained._replace(params=restored["state"].params, optimizer_state=jax.tree.map('
        'lambda x: x * 0 if x.ndim else x, restored["state"].optimizer_state)),',
        (f"{_RESUME}[real weights, interval and offset]",),
    ),
    "checkpoint-of-adapters-on-another-base": Fault(
        "a resumed run adds its adapters to other base weights than those that it began with",
        "recjax/hub/policy.py",
        "config.seed_of_base), 0)",
        "config.seed_of_base), __import__('os').path.exists(f'{config.output}/checkpoints'))",
        (f"{_RESUME}[real weights, adapters]",),
        "slow",
    ),
    "resume-forgets-the-run-it-continues": Fault(
        "a run that continues another one takes a fresh policy as its reference once it was stopped",
        "recjax/runs/policies.py",
        "    adapters = {}\n    if config.model.run:",
        '    adapters = {}\n    if config.model.run and not (Path(config.output) / "checkpoints").is_dir():',
        (f"{_RESUME}[real weights, a run that continues another]",),
        "slow",
    ),
    "resume-fills-in-log-probs-again": Fault(
        "a resumed run fills in the log-probs of others' completions again, with the weights of its checkpoint",
        "recjax/experience/records.py",
        "        record = record_of(row, grade)\n        group = groups.setdefault(",
        '        row["behavior_logprobs"] = None if row["source"] == "expert" else row["behavior_logprobs"]\n'
        "        record = record_of(row, grade)\n        group = groups.setdefault(",
        (f"{_RESUME}[real weights, late, replay, mix of texts, interval]",),
        "slow",
    ),
    # --- Store.
    "store-loses-mask": Fault(
        "the store marks every token of a completion as sampled, also those of tools and of users",
        "recjax/experience/records.py",
        "_joined([row.mask for row in rows]",
        "_joined([row.mask | True for row in rows]",
        ("tests/agents/test_trajectory.py", "tests/experience/test_queue.py"),
    ),
    "store-accepts-double-ids": Fault(
        "the store accepts a completion whose id it already holds",
        "recjax/store/store.py",
        'sql.Column("id", TEXT, nullable=False, unique=True)',
        'sql.Column("id", TEXT, nullable=False)',
        ("tests/store/test_store.py",),
    ),
    # --- Following.
    "following-takes-again": Fault(
        "a resumed run trains again on a completion of a followed store",
        "recjax/store/following.py",
        'ranges.append((self._resumed.get("read", 0), last.completion))',
        "ranges.append((0, last.completion))",
        ("tests/store/test_following.py",),
    ),
    # --- Engine.
    "engine-reuses-key": Fault(
        "all tokens of one decoding round of a completion are sampled with the same random key",
        "recjax/rollout/decoding.py",
        "_step_keys(keys, counts + time)",
        "_step_keys(keys, counts)",
        (_SAMPLER, _ENGINE),
    ),
    "engine-stale-cache": Fault(
        "after new weights a request continues from keys and values of the old weights",
        "recjax/rollout/engine.py",
        "self._slots.table.is_current[:] = False",
        "self._slots.table.is_current[:] = True",
        (f"{_ENGINE}::test_no_request_continues_a_slot_of_other_weights", _ENGINE),
    ),
    # --- Batch and layout.
    "batch-mask-off-by-one": Fault(
        "the mask of sampled tokens begins one token too late in each row",
        "recjax/experience/batch.py",
        "mask = _concatenated([placed.row.mask for placed in placed_rows], bool)",
        "mask = _concatenated([np.roll(placed.row.mask, 1) for placed in placed_rows], bool)",
        ("tests/agents/test_trajectory.py",),
    ),
    "layout-shares-another-prefix": Fault(
        "packed sequences share a prefix of which only the first half is common to them",
        "recjax/experience/packing.py",
        "equal = np.where(differs.any(-1), differs.argmax(-1), WINDOW)",
        "equal = np.where(differs.any(-1), np.minimum(2 * differs.argmax(-1), shorter[pairs] - common[pairs]), WINDOW)",
        ("tests/training/test_packing.py",),
    ),
    # --- Update.
    "update-last-micro-batch-only": Fault(
        "the gradient is that of the last micro-batch, not the sum over all",
        "recjax/experience/layout.py",
        "return jax.tree.map(jnp.add, sums, part_sums), jax.tree.map(with_part, scores, part_scores)",
        "return part_sums, jax.tree.map(with_part, scores, part_scores)",
        ("tests/training/test_update.py",),
    ),
    "update-reference-is-policy": Fault(
        "the KL to the initial policy is taken to the policy being trained, so it is always zero",
        "recjax/training/update.py",
        "scored(context.reference_params, freely_routed(scored_part)).logprobs",
        "scored(params, freely_routed(scored_part)).logprobs",
        (_ON_POLICY,),
    ),
    "update-teacher-gets-shared-beginnings": Fault(
        "a teacher whose decoder cannot read rows with a shared beginning gets them all the same",
        "recjax/training/learner.py",
        "doublings=doublings, teacher=recipe.teacher",
        "doublings=doublings",
        ("tests/training/test_layout.py",),
    ),
    "experience-mixed-rows-have-an-age": Fault(
        "stored rows that join a group count as samples of the run's initial policy",
        "recjax/store/stored.py",
        "mix is None and completion.policy_version == 0",
        "completion.policy_version == 0",
        (f"{_FED}::test_rows_of_an_initial_policy_never_are_stale",),
    ),
    "update-teacher-reads-the-policys-prompt": Fault(
        "the distributions of a policy that is its own teacher are those behind the policy's prompt",
        "recjax/training/update.py",
        "part_teacher = teacher._replace(prompts=part.teacher_prompts, prompt_mask=_teacher_prompt_mask(part))",
        "pass",
        (_SELF_TAUGHT,),
    ),
    "update-average-stands-still": Fault(
        "the averaged weights of a teacher stay the initial ones",
        "recjax/training/update.py",
        "return updates, Averaged(moved)",
        "return updates, state",
        (_SELF_TAUGHT,),
    ),
    # --- Rollout.
    "rollout-one-noise-for-all-weights": Fault(
        "a sampler with noisy weights has the same noise after each sync",
        "recjax/sources/sampling.py",
        "key = jax.random.fold_in(key, weights.version)",
        "key = jax.random.fold_in(key, 0)",
        ("tests/training/test_drift.py",),
    ),
    "rollout-tool-text-is-trained-on": Fault(
        "tokens between two turns, which the policy has not sampled, are marked as sampled",
        "recjax/agents/trajectory.py",
        "np.zeros(len(between), bool), mask",
        "np.ones(len(between), bool), mask",
        ("tests/agents/test_trajectory.py::test_a_growing_row_keeps_its_sampled_tokens",),
    ),
    "rollout-thoughts-stay-open": Fault(
        "a reply of a new turn is read as if it began inside the thoughts of the turn before",
        "recjax/agents/trajectory.py",
        "if special_ids.intersection(turn_marks.tolist()):",
        "if False:",
        ("tests/agents/test_trajectory.py::test_a_reply_starts_inside_thoughts_its_turn_opened",),
    ),
    "rollout-canceled-request-keeps-slot": Fault(
        "the engine goes on with a request that nobody awaits",
        "recjax/rollout/live.py",
        "self._engine.cancel(gone)",
        "self._engine.cancel([])",
        ("tests/rollout/test_live.py::test_a_canceled_request_frees_its_slot_and_queue_place",),
    ),
    "rollout-tool-parameters-lost": Fault(
        'a tool that a model calls with "parameters" instead of "arguments" gets none of them',
        "recjax/agents/tools.py",
        'call.get("arguments", call.get("parameters", {}))',
        'call.get("arguments", {})',
        ("tests/agents/test_agents.py::test_calls_are_read_as_models_write_them",),
    ),
    # --- Tasks.
    "tasks-epochs-alike": Fault(
        "every epoch has the problems in the same order",
        "recjax/tasks/prompts.py",
        "default_rng([seed, 1, epoch])",
        "default_rng([seed, 1])",
        ("tests/tasks/test_prompts.py::test_each_epoch_shuffles_all_problems",),
    ),
    "tasks-thoughts-hold-answers": Fault(
        "an answer inside thoughts counts as the answer",
        "recjax/grading/thinking.py",
        "begin = match.end()",
        "begin = 0",
        ("tests/rewards/test_grading.py::test_thoughts_that_the_prompt_opened_are_no_answer",),
    ),
    "tasks-parts-without-weights": Fault(
        "the parts of a reward are added without their weights",
        "recjax/rewards/pool.py",
        "sum(weights.get(name, 1.0) * np.nan_to_num(values)",
        "sum(np.nan_to_num(values)",
        ("tests/rewards/test_grading.py::test_the_reward_is_the_weighted_sum_of_its_parts",),
    ),
    "tasks-length-decides-accuracy": Fault(
        "parts that only shape a reward, such as the length, make an answer right or wrong",
        "recjax/rewards/reward.py",
        "returned = [name for name in parts if name not in SHAPING]",
        "returned = list(parts)",
        ("tests/rewards/test_grading.py::test_stored_rewards_follow_the_same_rule",),
    ),
    "tasks-counts-are-rewards": Fault(
        "counts of turns and rows are rewards of weight 1 where no agent runs, as in training on stored trajectories",
        "recjax/rewards/reward.py",
        "{LENGTH: 0.0, TURNS: 0.0, ROWS: 0.0, **own, **chosen}",
        "{LENGTH: 0.0, **own, **chosen}",
        ("tests/rewards/test_grading.py::test_counts_weigh_nothing_in_every_reward",),
    ),
    "tasks-agents-of-a-mixture-have-one-weight": Fault(
        "rewards of agents in a mixture are weighed without the weights of their task",
        "recjax/agents/agent_grades.py",
        "weights = part_weights(task.reward_weights)",
        "weights = part_weights(self._config.task.reward_weights)",
        ("tests/agents/test_agents.py::test_weights_of_agents_are_those_of_their_task",),
    ),
    "tasks-several-parts-have-a-verdict": Fault(
        "several parts without a verdict have an accuracy, that of their sum",
        "recjax/rewards/reward.py",
        "if (np.sum(~np.isnan(values), axis=0) > 1).any():",
        "if False:",
        ("tests/rewards/test_grading.py::test_several_parts_have_the_verdict_that_the_config_names",),
    ),
    # --- Experience: what enters and leaves stores.
    "feedback-changes-rewards": Fault(
        "a second, different reward for a completion is no error",
        "recjax/store/feedback.py",
        "if earlier is not None and earlier[0] != grade:",
        "if False:",
        ("tests/store/test_feedback.py::test_equal_rewards_are_accepted_and_different_ones_refused",),
    ),
    "sources-logprobs-computed-again": Fault(
        "log-probs that a store has are replaced by those of the current policy",
        "recjax/store/missing_logprobs.py",
        "                if _lacks_logprobs(completion):\n",
        "                if True:\n",
        ("tests/store/test_missing_logprobs.py::test_only_missing_log_probs_are_recomputed",),
    ),
    "exchange-loses-turn-rewards": Fault(
        "an exported store lacks the rewards of single turns",
        "recjax/store/exchange.py",
        'row["turn_rewards"] = grade.turns or None',
        'row["turn_rewards"] = None',
        ("tests/test_import_experience.py::test_an_export_is_the_same_store_again",),
    ),
    "import-ignores-source-column": Fault(
        "all rows of an imported file have the file's name as their source",
        "recjax/store/foreign.py",
        'source = _label(row, "source")',
        "pass",
        ("tests/test_import_experience.py::test_a_column_says_who_wrote_each_row",),
    ),
    # --- Hub.
    "hub-listed-ends-ignored": Fault(
        "only the tokenizer's own end of sequence ends a completion, and none that the model's files list",
        "recjax/hub/tokenizers.py",
        "ids += listed_eos(model_folder(folder))",
        "pass",
        ("tests/hub/test_tokenizers.py::test_stop_tokens",),
    ),
    "hub-chat-variables-swapped": Fault(
        "template variables of the whole model override those of a single chat",
        "recjax/hub/chat_rendering.py",
        "common | chat_variables | fixed",
        "chat_variables | common | fixed",
        ("tests/hub/test_chat_templates.py::test_a_chats_variables_override_the_tokenizers",),
    ),
    "hub-export-replaces-ends": Fault(
        "an export's end-of-sequence ids lack those that its base has",
        "recjax/hub/export.py",
        'options["eos_token_id"] = listed + unlisted',
        'options["eos_token_id"] = unlisted',
        ("tests/hub/test_export.py::test_stop_ids_join_the_exported_end_of_sequence_ids",),
    ),
    # --- Serving.
    "serving-part-of-a-key-is-enough": Fault(
        "the beginning of an API key, even an empty one, is accepted",
        "recjax/serving/guards.py",
        "hmac.compare_digest(sent_key, key.encode())",
        "key.encode().startswith(sent_key)",
        ("tests/serving/test_clients.py::test_who_has_no_key_gets_nothing_but_the_health",),
    ),
    "serving-turn-reward-changes": Fault(
        "a client that sends another reward for a turn gets no error",
        "recjax/serving/recorder.py",
        "if before not in (None, reward):",
        "if False:",
        ("tests/serving/test_recording.py::test_rewards_of_single_turns_survive_a_kill",),
    ),
    "serving-newest-version": Fault(
        "a completion that new weights have finished is labeled with their version, not with the oldest",
        "recjax/serving/answering.py",
        "policy_version=int(sampled.versions.min())",
        "policy_version=int(sampled.versions.max())",
        ("tests/serving/test_versions.py::test_a_completion_continues_with_newer_weights_and_names_them",),
    ),
    # --- Analysis.
    "analysis-pass-at-k-with-replacement": Fault(
        "pass@k draws a problem's samples with replacement",
        "recjax/analysis/samples.py",
        "return (ways - math.comb(samples - accurate, k)) / ways",
        "return 1 - (1 - accurate / samples) ** k",
        ("tests/analysis/test_samples.py::test_pass_at_k_equals_enumerated_subsets",),
    ),
    # --- Experiments.
    "own-loop-sampler-always-fresh": Fault(
        "in the loop to read, the sampler gets new weights in every step",
        "experiments/own_loop.py",
        "if (number - 1) % settings.sync_interval == 0:",
        "if True:",
        (_OWN_LOOP,),
        "slow",
    ),
    "own-loop-trains-nothing": Fault(
        "in the loop to read, the weights stay as they were",
        "experiments/own_loop.py",
        "updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)",
        "updates, optimizer_state = optimizer.update(jax.tree.map(jnp.zeros_like, gradient), optimizer_state, params)",
        (_OWN_LOOP,),
        "slow",
    ),
    "analysis-final-is-first": Fault(
        "the final accuracy of a run is that of its first evaluations",
        "recjax/analysis/compare.py",
        "values.tail(last)",
        "values.head(last)",
        ("tests/analysis/test_compare.py::test_final_mean_and_fall_of_each_run",),
    ),
}


def seeded(text: str, fault: Fault) -> str:
    """The text of the fault's file with the fault in it.

    Raises:
        ValueError: the text to change is not there exactly once, or the fault leaves no valid Python.
    """
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.file} holds {count} times, not once: {fault.old!r}; state the fault again")
    text = text.replace(fault.old, fault.new)
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{fault.file} is no valid Python with {fault.new!r}: {error}") from error
    return text


def failures(tree: Path, tests: Sequence[str], every: bool = False, markers: str = "") -> list[str]:
    """Ids of the tests that fail.

    Args:
        every: continue after the first failure.
        markers: expression that selects among the tests, such as a value of SETS; empty: all run.
    Raises:
        RuntimeError: pytest could not run the tests.
    """
    environment = os.environ | {"PYTHONPATH": str(tree), "RECJAX_TEST_PROGRAMS": str(tree.parent / "compiled")}
    # Python would take the bytecode of a fault of equal length that was put in within the same second.
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-p", "no:cacheprovider", "-rfE", "--no-header", "--tb=no", *([] if every else ["-x"])]
    command = [sys.executable, "-m", "pytest", "-m", markers, *options, *tests]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) and not failed:
        output = done.stdout[-2000:] + done.stderr
        raise RuntimeError(f"pytest {' '.join(tests)}: exit status {done.returncode}\n{output}")
    return failed


def copy_of(root: Path, tree: Path) -> None:
    """Copies the parts of the repository that tests read."""
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "site"))
        elif (root / name).exists():
            tree.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name)


def seen_by(tree: Path, faults: Iterable[str], every: bool) -> Iterable[tuple[str, list[str], float]]:
    """Seeds one fault after the other; yields its name, the tests that see it, and the seconds they took."""
    for name in faults:
        fault, began = FAULTS[name], time.monotonic()
        path = tree / fault.file
        clean = path.read_text()
        path.write_text(seeded(clean, fault))
        try:
            yield name, failures(tree, fault.tests, every, SETS[fault.set]), time.monotonic() - began
        finally:
            path.write_text(clean)


def main() -> None:
    """Reads the arguments, seeds the faults, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME")
    parser.add_argument("--every", action="store_true", help="list every test that sees a fault, not the first one")
    given = parser.parse_args()
    for name in given.only:
        seeded((HERE / FAULTS[name].file).read_text(), FAULTS[name])
    with tempfile.TemporaryDirectory(prefix="recjax-seeded-") as folder:
        tree = Path(folder) / "tree"
        copy_of(HERE, tree)
        print("| fault | breaks | set | seen by | seconds |\n|---|---|---|---|---|", flush=True)
        seen: dict[str, list[str]] = {}
        for name, found, seconds in seen_by(tree, given.only, given.every):
            seen[name] = found
            columns = name, FAULTS[name].breaks, FAULTS[name].set, ", ".join(found) or "NO TEST", f"{seconds:.0f}"
            print(f"| {' | '.join(columns)} |", flush=True)
        tests = list(dict.fromkeys(test for found in seen.values() for test in found))
        broken = failures(tree, tests, every=True) if tests else []
    for test in broken:
        print(f"fails without a fault: {test}")
    sys.exit(bool(broken) or not all(seen.values()))


if __name__ == "__main__":
    main()
