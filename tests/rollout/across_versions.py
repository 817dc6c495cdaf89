"""What the log-probs of a completion must be whose weights were replaced on the way."""

import functools
import itertools

import jax
import numpy as np

from recjax.models.decoder import Context, Decoder, logits


@functools.partial(jax.jit, static_argnums=0)
def scores_and_context(decoder, params, tokens, positions, real, contexts):
    """Log-probs of every token of the vocabulary after each position, and the context of these positions."""
    hidden, cache = decoder.apply({"params": params}, tokens, positions, real, contexts)
    return jax.nn.log_softmax(logits(decoder.config, params, hidden[0])), Context(*cache.keys_values, real, positions)


def logprobs_across(
    decoder: Decoder, params: dict[int, dict], prefix: np.ndarray, tokens: np.ndarray, versions: np.ndarray
) -> np.ndarray:
    """The log-prob of each token under the weights of its version, over the keys and values of those before it.

    A token's weights run the token before it, which the first ones of a completion do with the whole prefix.

    Args:
        params: by version.
    """
    everything = np.concatenate([prefix, tokens])[None]
    positions, real = np.arange(everything.shape[1])[None], np.ones(everything.shape, bool)
    of_inputs = np.concatenate([np.full(len(prefix) - 1, versions[0]), versions])
    bounds = [0, *(np.flatnonzero(np.diff(of_inputs)) + 1), len(of_inputs)]
    contexts, scores = [], []
    for start, stop in itertools.pairwise(bounds):
        weights, part = params[int(of_inputs[start])], (slice(None), slice(start, stop))
        asked = everything[part], positions[part], real[part], tuple(contexts)
        of_part, context = scores_and_context(decoder, weights, *asked)
        contexts.append(context)
        scores.append(of_part)
    found = np.concatenate(scores)[len(prefix) - 1 :]
    return np.take_along_axis(found, np.asarray(tokens)[:, None], axis=1)[:, 0]
