"""The record that the trainer learns from: a batch of scored completions with what is known of how they were drawn."""

from typing import NamedTuple

import jax
import numpy as np


class Batch(NamedTuple):
    """Completions of `prompts` rows of prompts, consecutive rows a prompt; host arrays, right-padded.

    Shapes: prompts and prompt_mask [prompts, prompt_time]; completions, completion_mask and behaviour_logprobs
    [batch, time]; all others [batch].

    completion_mask is True at tokens that the behaviour policy drew, its end-of-sequence token among them.
    behaviour_logprobs are under the distribution that drew each token. policy_version counts the optimiser updates of
    the weights that drew the row. truncated rows ran into the token limit. accurate rows are right, whatever else the
    reward is of; reward_parts are the named terms, not weighted, that the reward is the weighted sum of.
    failures are places in recjax.tasks.grading.pool.FAILURES, for rewards that are graded in worker processes.
    """

    prompts: np.ndarray
    prompt_mask: np.ndarray
    completions: np.ndarray
    completion_mask: np.ndarray
    behaviour_logprobs: np.ndarray
    rewards: np.ndarray
    group_ids: np.ndarray
    policy_version: np.ndarray
    truncated: np.ndarray
    accurate: np.ndarray
    reward_parts: dict[str, np.ndarray]
    failures: np.ndarray | None = None


def filled_up(batch: Batch, multiple: int) -> Batch:
    """The batch with prompts behind it, up to a multiple of their number, whose completions have no token.

    Such rows take no part in loss, advantages or diagnostics.
    """
    count = len(batch.prompts)
    missing = -count % multiple
    if not missing:
        return batch

    def more(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros((missing * len(x) // count, *x.shape[1:]), x.dtype)])

    filled = jax.tree.map(more, batch)
    filled.prompt_mask[count:, 0] = True  # a prompt has a token
    first = batch.group_ids.max() + 1
    filled.group_ids[len(batch.group_ids) :] = first + np.repeat(np.arange(missing), len(batch.group_ids) // count)
    return filled
