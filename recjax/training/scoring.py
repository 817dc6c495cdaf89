"""Log-probabilities and entropies of a batch: of one part for the gradient, or of all parts without gradients."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from recjax.experience.batch import Batch
from recjax.models.decoder import Decoder
from recjax.models.logprobs import completion_logprobs, completions_of_packed, packed_logprobs
from recjax.models.placement import ROWS, constrain
from recjax.models.sampling import Sampling
from recjax.training.packing import Packed

LogprobsAndEntropy = tuple[Float[Array, "batch time"], Float[Array, "batch time"]]


def row_parts(x: Array, parts: int) -> Array:
    """Splits an array of rows into equal parts, each spread over all devices."""
    return constrain(x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), None, ROWS)


def prompts_logprobs(decoder: Decoder, params: dict, part: Batch, sampling: Sampling, chunk: int) -> LogprobsAndEntropy:
    """Scores one part of a padded batch; each prompt runs once for its group."""
    arrays = part.prompts, part.prompt_mask, part.completions, part.real_tokens
    return completion_logprobs(decoder, params, *arrays, sampling=sampling, chunk=chunk)


def in_micro_batch(batch: Batch, packed: Packed, index: Int[Array, ""]) -> Batch:
    """The batch with a completion mask that keeps only the tokens in one micro-batch of packed rows."""
    return batch._replace(completion_mask=batch.completion_mask & (packed.first[index] >= 0)[:, None])


def micro_batch_logprobs(
    decoder: Decoder, params: dict, part: Batch, packed: Packed, index: Int[Array, ""], sampling: Sampling, chunk: int
) -> LogprobsAndEntropy:
    """Scores the tokens in one micro-batch of packed rows, 0 elsewhere; `part` is the result of `in_micro_batch`."""
    *sequences, first = jax.tree.map(lambda x: x[index], packed[:-1])
    sequences = jax.tree.map(lambda x: constrain(x, ROWS), sequences)
    values = packed_logprobs(decoder, params, *sequences, sampling=sampling, chunk=chunk)
    return tuple(completions_of_packed(x, first, part.completion_mask) for x in values)


def batch_logprobs(
    decoder: Decoder,
    params: dict,
    batch: Batch,
    packed: Packed | None,
    micro_batches: int | None,
    sampling: Sampling,
    chunk: int,
) -> LogprobsAndEntropy:
    """Scores the whole batch without gradients, with the memory of one part.

    Args:
        params: all parameters, trained and frozen.
        packed: see `update.update`.
        micro_batches: see `update.update`.
    """
    if packed is None:
        parts = jax.tree.map(lambda x: row_parts(x, micro_batches), batch)
        found = jax.lax.map(lambda part: prompts_logprobs(decoder, params, part, sampling, chunk), parts)
        return tuple(x.reshape(batch.completions.shape) for x in found)

    def add(index: Int[Array, ""], sums: LogprobsAndEntropy) -> LogprobsAndEntropy:
        part = in_micro_batch(batch, packed, index)
        return jax.tree.map(jnp.add, sums, micro_batch_logprobs(decoder, params, part, packed, index, sampling, chunk))

    return jax.lax.fori_loop(0, packed.count, add, (jnp.zeros(batch.completions.shape),) * 2)
