"""Compares a run's kernels with plain attention on one row, so that a wrong kernel does not train."""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from recjax.errors import UserError
from recjax.experience.batch import Batch
from recjax.experience.layout import Layout
from recjax.models.decoder import Decoder
from recjax.models.logprobs import completion_logprobs, packed_logprobs
from recjax.models.placement import on_host, put_rows
from recjax.models.sampling import Sampling

logger = logging.getLogger(__name__)

# A right kernel differs from exact log-probs about as much as plain attention does in the same dtype: in bfloat16, both
# are 0.044 nats off for SmolLM2-135M. Attention scores of 1.1 times their scale are 0.26 off.
MOST_APART = 1e-2  # nats, root mean square, beyond TIMES times the rounding of plain attention
TIMES = 2.0
LONGEST = 1024  # tokens of a prompt, of a completion, or of a packed row: plain attention holds all scores


def has_kernels(decoder: Decoder) -> bool:
    """True if the decoder's computation differs from plain attention with a matmul for each projection."""
    return decoder.attention != "plain" or decoder.joined_projections


def check_kernels(decoder: Decoder, params: dict, batch: Batch, layout: Layout, chunk: int) -> bool:
    """Compares log-probs by the decoder's kernels with those by plain attention on one row of a batch.

    The row is the longest packed row of the first micro-batch, or two completions of a prompt that is run once.

    Args:
        params: all parameters with stacked layers.
        batch: host arrays.
        layout: layout of the update, with host arrays.
        chunk: token positions whose logits exist at the same time.
    Returns:
        False if the batch has no tokens.
    Raises:
        UserError: the kernels' log-probs are further from exact ones than rounding explains.
    """
    row, real = _longest_row(batch, layout)
    if not real.any():
        return False
    # A scan over layers compiles sooner.
    tried = decoder.clone(unrolled=False, remat="none", replays_routing=False)
    plain = tried.clone(attention="plain", joined_projections=False)
    row = put_rows(row)
    by_kernels, rounded = (on_host(_row_logprobs(each, params, row, chunk)) for each in (tried, plain))
    exact = on_host(_row_logprobs(plain.clone(dtype=jnp.float32), params, row, chunk, "highest"))
    apart, rounding = (np.sqrt(np.square(logprobs - exact)[real].mean()) for logprobs in (by_kernels, rounded))
    if not np.isfinite(rounding):
        return True  # the weights' own numbers overflow, which is no fault of a kernel
    chosen = f"model.attention = {decoder.attention!r}"
    remedy = "model.attention=plain"
    if decoder.joined_projections:
        chosen += " with model.joined_projections = True"
        remedy += " and model.joined_projections=false"
    figures = f"root mean square over {int(real.sum())} tokens of the first batch"
    if not apart <= MOST_APART + TIMES * rounding:
        raise UserError(
            chosen,
            f"log-probs are {apart:.3g} nats from exact ones ({figures}), and those by plain attention"
            f" {rounding:.3g}. The kernel is wrong on {jax.devices()[0].device_kind}",
            f"set {remedy}",
        )
    message = "%s: log-probs are %.2g nats from exact ones, by plain attention %.2g (%s)"
    logger.info(message, chosen, apart, rounding, figures)
    return True


def _longest_row(batch: Batch, layout: Layout) -> tuple[tuple[Any, ...], Bool[Any, "rows time"]]:
    """Arguments of `_row_logprobs`, and the mask of the tokens whose log-probs are compared."""
    if layout.packed is not None:
        *arrays, ends = (x[0] for x in layout.packed[:4])
        longest = (ends > 0).sum(-1).argmax()
        chosen = slice(longest, longest + 1), slice(LONGEST)
        ends = np.minimum(ends[chosen], LONGEST)
        return (*(x[chosen] for x in arrays), ends), ends > 0
    prompts = len(batch.prompts)
    time = batch.completions.shape[1]
    real = batch.real_tokens.reshape(prompts, -1, time)[:, :2, :LONGEST]
    longest = real.sum((1, 2)).argmax()
    real = real[longest]
    completions = batch.completions.reshape(prompts, -1, time)[longest, :2, :LONGEST]
    chosen = slice(longest, longest + 1), slice(LONGEST)
    return (batch.prompts[chosen], batch.prompt_mask[chosen], completions, real), real


@functools.partial(jax.jit, static_argnames=("decoder", "chunk", "precision"))
def _row_logprobs(
    decoder: Decoder, params: dict, row: tuple[Any, ...], chunk: int, precision: str | None = None
) -> Float[Array, "rows time"]:
    """Log-probs under the policy without cuts: rounding could move a token out of a cut."""
    score: Any = completion_logprobs if row[1].dtype == bool else packed_logprobs
    with jax.default_matmul_precision(precision):
        return score(decoder, params, *row, sampling=Sampling(), chunk=chunk).logprobs
