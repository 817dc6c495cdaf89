"""What the engine samples, as the reference returns it."""

import numpy as np

from recjax.rollout.collecting import row_keys
from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request
from tests.rollout.reference_sampler import Completions


def sample_completions(engine, prompts, mask, keys, group_size, max_tokens, sampling):
    """Completions of right-padded prompts, as a batch of an engine that has no other requests."""
    prefixes = [tokens[real] for tokens, real in zip(prompts, mask, strict=True)]
    requests = [Request(prefixes[row // group_size], key, max_tokens, sampling) for row, key in enumerate(keys)]
    tickets, finished = engine.admit(requests, group_size), engine.drain()
    return [finished[ticket] for ticket in tickets]


def engine_completions(
    decoder, params, prompts, mask, key, *, group_size, max_tokens, sampling, stop_ids, slots=None
) -> Completions:
    """The arguments and results of `reference_sampler.sample`, on the host."""
    prompts, mask = np.asarray(prompts), np.asarray(mask)
    engine = Engine(decoder, stop_ids, slots=slots, prefix_time=prompts.shape[1])
    engine.replace_weights(params, version=0)
    sampled = sample_completions(
        engine, prompts, mask, row_keys(key, len(prompts) * group_size), group_size, max_tokens, sampling
    )
    kept = np.arange(max_tokens) < np.array([len(one.tokens) for one in sampled])[:, None]
    tokens, logprobs = np.zeros(kept.shape, np.int32), np.zeros(kept.shape, np.float32)
    tokens[kept] = np.concatenate([one.tokens for one in sampled])
    logprobs[kept] = np.concatenate([one.logprobs for one in sampled])
    return Completions(tokens, kept, logprobs, np.array([one.truncated for one in sampled]))
