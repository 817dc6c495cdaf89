"""docs/coming_from.md: what differs silently from other libraries is as its table says."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from recjax.algorithms import advantages
from recjax.config import make_config
from recjax.errors import UserError
from recjax.experience.batch import sampled_shape
from recjax.rewards.pool import FAILURES, overlong_penalty
from recjax.rewards.reward import OVERLONG, is_accurate, load_reward
from recjax.tasks.problems import check_last_message
from tests.rewards.test_grading import custom, scores_of, unjudged

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"
VALUES = {"output": "unset", "model": {"path": "none"}, "task": {"arithmetic": {"problems": ["1 + 1"]}}}
CONFIG = make_config(VALUES | {"algorithm": {"preset": "grpo"}}, {}, "config")


def check_batch_size():
    shape = sampled_shape(CONFIG.replace(prompts_per_step=1, group_size=8), 4)
    assert (shape.prompts, shape.rows) == (1, 8), "TRL's default of 8 completions"


def check_steps():
    assert CONFIG.replace(**{"training.minibatches": 2}).training.updates == 2, "optimizer steps on each batch"


def check_accuracy():
    assert is_accurate({"accuracy": 1.0, OVERLONG: -1.0, "style": -1.0}, -5.0, 1.0)
    assert is_accurate({"score": 1.0, OVERLONG: -1.0}, 0.0, 1.0)


def check_none():
    scores = scores_of(custom(unjudged, style=0.0), ["a", "b"])
    assert scores.rewards[0] == 1 and np.isnan(scores.rewards[1]), "TRL has 0 here"
    assert FAILURES[scores.failures[1]] == "no_reward"
    kept = jnp.array([True, False, True])
    grouped = jax.jit(advantages.group_mean_advantages)(jnp.array([1.0, 0.0, 0.0]), jnp.zeros(3, int), kept)
    np.testing.assert_array_equal(grouped, [0.5, 0, -0.5])


def check_prefilled():
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "It is"}]
    with pytest.raises(ValueError, match="the last message is an assistant's, which recjax does not continue"):
        check_last_message(chat, "row 0")


def check_length_penalty():
    assert load_reward("math", overlong=True).weights[OVERLONG] == 1.0
    np.testing.assert_array_equal(overlong_penalty(np.array([80, 90, 100]), 100, 20), [0, -0.5, -1])


def check_sigma():
    rewards, groups, kept = jnp.array([3.0, 0.0, 0.0]), jnp.zeros(3, int), jnp.ones(3, bool)
    assert CONFIG.algorithm.resolved()["advantage"]["ddof"] == 0
    normalized = jax.jit(advantages.group_normalized_advantages, static_argnames="ddof")
    ours, theirs = (np.asarray(normalized(rewards, groups, kept, ddof=ddof)) for ddof in (0, 1))
    np.testing.assert_allclose(ours / theirs, np.sqrt(3 / 2), rtol=1e-5)


def check_kl():
    assert CONFIG.algorithm.resolved()["reference_kl"]["coefficient"] == 0


def check_learning_rate():
    assert CONFIG.optimizer.schedule == "constant"


CHECKS = {
    "batch size": check_batch_size,
    "steps": check_steps,
    "accuracy": check_accuracy,
    "None from all reward functions": check_none,
    "prefilled chats": check_prefilled,
    "length penalty, `task.overlong_tokens`": check_length_penalty,
    "σ of a group of K": check_sigma,
    "KL coefficient": check_kl,
    "learning rate": check_learning_rate,
}


def test_every_difference_on_the_page_is_checked():
    table = PAGE.read_text(encoding="utf-8").split("## What differs silently")[1].split("\n## ")[0]
    assert re.findall(r"^\| (?!subject)(.+?) \|", table, re.MULTILINE) == list(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_recjax_does_what_the_page_says(name):
    CHECKS[name]()


def test_configs_of_trinitys_rec_are_taken():
    section = PAGE.read_text(encoding="utf-8").split("## Trinity-RFT's `rec`")[1].split("\n## ")[0]
    blocks = [yaml.safe_load(text) for text in re.findall(r"^\| .+ \| `(algorithm: .+)` \|$", section, re.MULTILINE)]
    resolved = [make_config(VALUES | block, {}, "config").algorithm.resolved() for block in blocks]
    assert len(resolved) == 11 and all(one != other for one, other in itertools.combinations(resolved, 2))
    by_preset = {block["algorithm"]["preset"]: found for block, found in zip(blocks, resolved, strict=True)}
    # `rec` adds 0.1 (log ρ)², and recjax τ/2 (log ρ)².
    assert by_preset["opmd_token"]["regularizer"]["tau"] / 2 == 0.1
    # gspo-one-side compares a completion's mean log-ratio with the bounds and weighs nothing.
    assert by_preset["gspo"]["ratio"]["name"] == "sequence_mean" and by_preset["gspo"]["weight"]["name"] == "none"
    assert by_preset["grpo"]["reference_kl"]["coefficient"] == 0 and by_preset["grpo"]["advantage"]["ddof"] == 0


def test_trinitys_keys_are_answered_with_ours():
    for theirs, ours in (("repeat_times", "rollout.group_size"), ("buffer.total_steps", "training.steps")):
        with pytest.raises(UserError, match=f"{theirs} is {ours} here"):
            make_config(VALUES, [f"{theirs}=8"], "config")
