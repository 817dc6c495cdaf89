"""Losses for off-policy reinforcement learning, from arXiv 2509.24203 and related papers: functions of arrays.

`PRESETS` has the algorithms by name, and `build` makes one with changes on any axis of `AXES`. Call `row_terms` and
`loss` in your own training loop, as EXAMPLE does.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # editors and type checkers do not call `__getattr__`
    from recjax.algorithms.algorithm import Algorithm
    from recjax.algorithms.axes import AXES
    from recjax.algorithms.losses import (
        BatchValues,
        RowTerms,
        Scored,
        TermScores,
        loss,
        row_terms,
        token_loss,
        token_terms,
    )
    from recjax.algorithms.presets import PRESETS, resolve
    from recjax.algorithms.presets import build_algorithm as build

# The module of each public name. Names are imported on first use, because a config's schema needs no JAX.
_PUBLIC = {
    "PRESETS": "presets",
    "AXES": "axes",
    "Algorithm": "algorithm",
    "BatchValues": "losses",
    "Scored": "losses",
    "RowTerms": "losses",
    "TermScores": "losses",
    "row_terms": "losses",
    "token_terms": "losses",
    "token_loss": "losses",
    "loss": "losses",
    "build": "presets",
    "resolve": "presets",
}
_ALIASES = {"build": "build_algorithm"}
__all__ = [
    "AXES",
    "PRESETS",
    "Algorithm",
    "BatchValues",
    "RowTerms",
    "Scored",
    "TermScores",
    "build",
    "loss",
    "resolve",
    "row_terms",
    "token_loss",
    "token_terms",
]

# Expects tokens, mask and behavior_logprobs [batch, time], rewards and group_ids [batch], logits [batch, time, vocab].
EXAMPLE = """
algorithm = algorithms.build("gspo", {"clip": {"epsilon_high": 1e-3}})
batch = algorithms.BatchValues(rewards, group_ids, mask.any(-1), jax.random.key(0), completion_mask=mask)
rows = algorithms.row_terms(algorithm, batch)


def summed_loss(logits):
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]
    return algorithms.loss(algorithm, logprobs, behavior_logprobs, rows, mask)


gradient, count = jax.grad(summed_loss, has_aux=True)(logits)
gradient /= count  # sums and counts of micro-batches and devices add up; divide once
"""


def _imported(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), _ALIASES.get(name, name))


if not TYPE_CHECKING:  # a type checker would take every name for a public one
    __getattr__ = _imported
