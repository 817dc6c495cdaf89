"""The paper and its relatives: losses of off-policy reinforcement learning. Arrays in, arrays out.

`PRESETS` by name, `build` with changes of any axis of `AXES`, and `row_terms` and `loss` for a loop of one's own, of
which EXAMPLE is one.
"""

import importlib
from typing import Any

# Where each public name is from. Nothing is imported before it is asked for: a config's schema needs no JAX.
_PUBLIC = {
    "PRESETS": "presets",
    "AXES": "axes",
    "Algorithm": "algorithm",
    "Scored": "losses",
    "RowTerms": "losses",
    "row_terms": "losses",
    "token_terms": "losses",
    "token_loss": "losses",
    "loss": "losses",
    "build": "presets",
    "resolve": "presets",
}
_ALIASES = {"build": "build_algorithm"}
__all__ = list(_PUBLIC)

# Given tokens [batch, time], their mask, rewards and group_ids [batch], and logits [batch, vocab] to train.
EXAMPLE = """
import jax
from recjax import algorithms

algorithm = algorithms.build("gspo", {"clip": {"epsilon_high": 1e-3}})
rows = algorithms.row_terms(algorithm, rewards, group_ids, mask.any(-1), jax.random.key(0), completion_mask=mask)
logprobs_of = lambda logits: jax.numpy.take_along_axis(jax.nn.log_softmax(logits), tokens, axis=-1)
behavior_logprobs = logprobs_of(logits)
summed_loss = lambda logits: algorithms.loss(algorithm, logprobs_of(logits), behavior_logprobs, rows, mask)
gradient, count = jax.grad(summed_loss, has_aux=True)(logits)
logits -= 0.1 * gradient / count  # sums and counts of micro-batches and devices add up; divide once
"""


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), _ALIASES.get(name, name))
