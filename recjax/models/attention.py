"""Attention over several key-value segments under one softmax, with an accelerator's own kernel where one fits."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from recjax.models.placement import ROWS, dividing_axes

KERNELS = ("plain", "cudnn", "cudnn_lengths", "splash")
MEASURED = ("cudnn", "plain")  # kernels that have run on a device, see docs/accelerator.md; "auto" takes no other
ATTENTION = "attention"  # checkpoint name of the outputs of attention, and of what splash's backward pass reads
CUDNN_FORWARD = "dot_product_attention_fwd"  # beginning of the names of the primitives of cuDNN's forward pass
# Longest prompt, in lengths of the completions, that the kernels repeat for each completion. cuDNN computes rows of
# both; by an estimate of FLOPs and memory traffic on an H200, rows of eight lengths take as long as "plain".
LONGEST_PROMPT = 4
LANES = 128  # smallest block of splash attention, in tokens
LEAST_ROWS = 16  # least rows of a matmul in `one_token_attention`
KEYS = 64  # keys of a block there


def self_attention_mask(
    mask: Bool[Array, "rows time"] | Int[Array, "rows time"],
) -> Bool[Array, "rows 1 1 1 time time"]:
    """True where a token may attend to a token of its own row, the last axis; see `Decoder.__call__` for the mask."""
    time = mask.shape[1]
    keys = mask[:, None, None, None, None, :]
    if mask.dtype != bool:
        keys = jnp.arange(time)[:, None] < keys
    return keys & jnp.tril(jnp.ones((time, time), bool))


def pairs(queries: Array, keys: Array) -> tuple[Array, Array]:
    """An array of queries and an array of keys, reshaped to broadcast to [rows, batch/rows, 1, 1, time, length]."""
    return queries.reshape(keys.shape[0], -1, 1, 1, queries.shape[1], 1), keys[:, None, None, None, None, :]


def attend(
    queries: Float[Array, "batch heads time head_dim"],
    segments: list,
    scale: float,
    cap: float | None = None,
    *,
    ids: tuple[Array, ...] | None = None,
    kernel: str = "plain",
    is_sampling: bool = False,
) -> Array:
    """Attention of every query over the keys of all segments under one softmax.

    Args:
        queries: rotated queries.
        segments: (keys, values, mask) triples, keys and values [rows, kv_heads, length, head_dim] with rows dividing
            the batch, mask broadcastable to [rows, batch/rows, 1, 1, time, length] and True where attention may look.
        scale: factor on the scores.
        cap: bound c of the scaled scores s, c · tanh(s / c); None: no bound.
        ids: the segments' own masks, each [rows, length], if the masks of all segments follow from them and causality:
            one for the tokens themselves, or two for a prompt and completions. Boolean masks are of right-padded rows.
            The splash kernel reads integers as the sequences' ids, so sequences must not share tokens. None, or fewer
            than segments: the masks do not follow from them.
        kernel: one of KERNELS, for self-attention of several tokens. "cudnn_lengths" is "cudnn" with the lengths of
            right-padded rows instead of a mask; it and "splash" also compute completions over a shared prompt.
            Attention over contexts and options that the kernel lacks use "plain". Results at padding are undefined.
        is_sampling: True in a sampling loop, which needs no gradient: by cuDNN, a single token on one device then
            uses `one_token_attention`.
    Returns:
        [batch * time, heads * head_dim].
    """
    batch, heads, time, head_dim = queries.shape
    keys, values, mask = segments[0]
    masks_follow_from_ids = ids is not None and len(ids) == len(segments)
    are_right_padded = masks_follow_from_ids and all(tokens.dtype == bool for tokens in ids)
    is_complete_sequence = len(segments) == 1 and time > 1
    has_prompt = len(segments) == 2 and time > 1 and are_right_padded and keys.shape[2] <= LONGEST_PROMPT * time
    fits_lengths = has_prompt or (is_complete_sequence and are_right_padded)
    fits_splash = has_prompt or (is_complete_sequence and masks_follow_from_ids)
    # Pallas cannot compile for a mesh, nor for a GPU that this machine lacks.
    one_gpu = jax.default_backend() == "gpu" and jax.sharding.get_abstract_mesh().size <= 1
    fits_one_token = is_sampling and time == 1 and one_gpu and head_dim.bit_count() == 1
    has_cudnn = kernel in ("cudnn", "cudnn_lengths") and cap is None
    if has_cudnn and kernel == "cudnn_lengths" and fits_lengths:
        mixed = _on_each_device(functools.partial(_cudnn_with_prompts, scale=scale), queries, segments, ids)
    elif has_cudnn and is_complete_sequence:
        mixed = cudnn_attention(queries, keys, values, scale, mask=mask.reshape(-1, 1, time, time))
    elif has_cudnn and fits_one_token:
        mixed = one_token_attention(queries, segments, scale)
    elif kernel == "splash" and fits_splash:
        mixed = _on_each_device(functools.partial(_splash_with_prompts, scale=scale, cap=cap), queries, segments, ids)
    else:
        skips = is_sampling and jax.default_backend() == "cpu"
        mixed = checkpoint_name(plain_attention(queries, segments, scale, cap, skips), ATTENTION)
    return mixed.swapaxes(1, 2).reshape(batch * time, heads * head_dim)


def plain_attention(
    queries: Float[Array, "batch heads time head_dim"],
    segments: list,
    scale: float,
    cap: float | None,
    skips: bool = False,
) -> Float[Array, "batch heads time head_dim"]:
    """Attention by its definition, with all scores in memory; the other arguments are documented in `attend`.

    Args:
        skips: do not read segments that no query attends to.
    """
    batch, heads, time, _ = queries.shape

    def by_row(x: Array, operand: Array, axis: int, mask: Array) -> Array:
        if not skips:
            return _by_row(x, operand, axis)
        units = operand.shape[5 - axis]
        return jax.lax.cond(
            mask.any(),
            lambda: _by_row(x, operand, axis),
            lambda: jnp.zeros((batch, heads, time, units)),
        )

    scores = []
    for keys, _, mask in segments:
        score = by_row(queries, keys, 3, mask).reshape(len(keys), -1, 1, heads, time, keys.shape[2])
        score = jnp.where(mask, capped(score * scale, cap), -1e30)
        scores.append(score.reshape(batch, heads, time, -1))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(queries.dtype)

    mixed: Any = 0.0
    start = 0
    for _, values, mask in segments:
        length = values.shape[2]
        mixed += by_row(weights[..., start : start + length], values, 2, mask)
        start += length
    return mixed.astype(queries.dtype)


def _by_row(x: Array, operand: Array, axis: int) -> Float[Array, "batch heads time units"]:
    """Matmuls with the keys or values of each row and head, in float32.

    They are written out because XLA on the CPU is several times faster if keys and values are the second operand, which
    einsum does not guarantee.

    Args:
        x: [batch, heads, time, length or head_dim].
        operand: keys or values, [rows, kv_heads, length, head_dim].
        axis: axis of `operand` to sum over.
    """
    batch, heads, time, size = x.shape
    rows, kv_heads, *_ = operand.shape
    dtype = jnp.promote_types(x.dtype, operand.dtype)
    repeats = batch // rows
    sharing = heads // kv_heads * time
    x = x.reshape(rows, repeats, kv_heads, sharing, size).swapaxes(1, 2)
    x = x.reshape(rows, kv_heads, repeats * sharing, size)
    summed_axes = ((3,), (axis,))
    row_and_head = ((0, 1), (0, 1))
    summed = jax.lax.dot_general(
        x.astype(dtype),
        operand.astype(dtype),
        (summed_axes, row_and_head),
        preferred_element_type=jnp.float32,
    )
    summed = summed.reshape(rows, kv_heads, repeats, sharing, -1).swapaxes(1, 2)
    return summed.reshape(batch, heads, time, -1)


def cudnn_attention(
    queries: Float[Array, "batch heads time head_dim"],
    keys: Float[Array, "batch kv_heads time head_dim"],
    values: Float[Array, "batch kv_heads time head_dim"],
    scale: float,
    *,
    mask: Bool[Array, "batch 1 time time"] | None = None,
    lengths: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch heads time head_dim"]:
    """Causal attention by cuDNN's flash attention, in bfloat16 on an NVIDIA GPU.

    Args:
        mask: True where a query may attend; must not allow later tokens. cuDNN reads it as a bias in memory.
        lengths: tokens of right-padded rows, at least one a row, in place of a mask.
    """
    time = queries.shape[2]
    # With a mask, cuDNN takes even numbers of tokens.
    padded = [_lengthened(x.swapaxes(1, 2), 1, 2) for x in (queries, keys, values)]
    if mask is not None:
        mask = _lengthened(_lengthened(mask, 2, 2), 3, 2)
    mixed = jax.nn.dot_product_attention(
        *padded,
        mask=mask,
        scale=scale,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return mixed[:, :time].swapaxes(1, 2)


def _cudnn_with_prompts(queries: Array, pairs: list, ids: tuple[Array, ...], scale: float) -> Array:
    """`cudnn_attention` of right-padded rows, or of completions over the prompts that they share.

    With lengths, cuDNN masks only the padding after a row's tokens. Each completion therefore gets a row of its own,
    with its tokens right after the prompt's; in the prompt's places, queries are zeros.

    Args:
        pairs: (keys, values) of each part.
        ids: boolean masks of the parts.
    """
    lengths = ids[-1].sum(-1, dtype=jnp.int32)
    if len(pairs) == 1:
        keys, values = pairs[0]
        return cudnn_attention(queries, keys, values, scale, lengths=jnp.maximum(lengths, 1))
    batch, time = ids[-1].shape
    starts = jnp.repeat(ids[0].sum(-1, dtype=jnp.int32), batch // len(ids[0]))
    put = jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1))
    _, heads, _, head_dim = queries.shape
    no_queries = jnp.zeros((batch, heads, ids[0].shape[1], head_dim), queries.dtype)

    def after_prompt(prompt: Array, completion: Array) -> Array:
        return put(jnp.concatenate([prompt, jnp.zeros_like(completion)], axis=2), completion, starts)

    padded = after_prompt(no_queries, queries)
    (prompt_keys, completion_keys), (prompt_values, completion_values) = _with_prompts(pairs)
    keys = after_prompt(prompt_keys, completion_keys)
    values = after_prompt(prompt_values, completion_values)
    mixed = cudnn_attention(padded, keys, values, scale, lengths=jnp.maximum(starts + lengths, 1))
    return jax.vmap(functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=time, axis=1))(mixed, starts)


def _with_prompts(pairs: list) -> list[tuple[Array, Array]]:
    """Keys, and values, of the prompt of each completion, and of the completion."""
    prompts, completions = pairs
    group = len(completions[0]) // len(prompts[0])
    # The gradient of a prompt sums over its completions in float32.
    repeated = [jnp.repeat(x.astype(jnp.float32), group, axis=0).astype(x.dtype) for x in prompts]
    return list(zip(repeated, completions, strict=True))


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))  # a scan over layers takes no kernel outside of jit
def one_token_attention(
    queries: Float[Array, "batch heads 1 head_dim"], segments: list, scale: float, interpret: bool = False
) -> Float[Array, "batch heads 1 head_dim"]:
    """Attention of one token per row, as one kernel on an NVIDIA GPU; `plain_attention` takes about fifteen.

    It has no gradient. An instance of the kernel computes the query heads of one row that share a key head. It reads
    their keys and values segment by segment, block by block, and keeps a running softmax:

        grid (batch, kv_heads)        one instance
                                      queries  [rows, head_dim]    the sharing heads, filled up to `rows`
        segment 0  keys [length_0]    |block 0|block 1| … |        KEYS keys each; the last one may be partly outside
        segment 1  keys [length_1]    |block 0| … |
                                      carry    mixed [rows, head_dim], largest score [rows], sum of weights [rows]

    Args:
        queries: in bfloat16, as keys and values are; head_dim is a power of two.
        segments, scale: see `attend`.
        interpret: run the kernel step by step, on any device.
    """
    from jax.experimental.pallas import triton  # 0.2 s

    batch, heads, _, width = queries.shape
    kv_heads = segments[0][0].shape[1]
    count = heads // kv_heads  # heads that share a key head
    rows = max(LEAST_ROWS, 1 << (count - 1).bit_length())
    instance_heads = pallas.BlockSpec((None, None, rows, width), lambda row, head: (row, head, 0, 0))
    arrays = []
    specs = []
    for keys, values, mask in segments:
        length = keys.shape[2]
        sharing = batch // len(keys)
        seen = jnp.broadcast_to(mask, (len(keys), sharing, 1, 1, 1, length)).reshape(batch, length)
        # Rows that share a prompt read the same keys and values.
        row_keys = pallas.BlockSpec(
            (None, None, length, width), lambda row, head, sharing=sharing: (row // sharing, head, 0, 0)
        )
        row_mask = pallas.BlockSpec((None, length), lambda row, head: (row, 0))
        arrays += [keys, values, seen.astype(jnp.int32)]
        specs += [row_keys, row_keys, row_mask]

    def kernel(queries_ref, *refs):
        *refs, out_ref = refs
        real = (jnp.arange(rows) < count)[:, None]
        queries = triton.load(queries_ref.at[:, :], mask=real, other=0.0)
        carry = jnp.zeros((rows, width)), jnp.full(rows, -1e30), jnp.zeros(rows)
        for keys_ref, values_ref, seen_ref in zip(refs[::3], refs[1::3], refs[2::3], strict=True):
            length = seen_ref.shape[0]
            size = min(KEYS, max(LEAST_ROWS, 1 << (length - 1).bit_length()))

            def add(block, carry, keys_ref=keys_ref, values_ref=values_ref, seen_ref=seen_ref, size=size):
                mixed, largest, total = carry
                places = pallas.ds(block * size, size)
                inside = block * size + jnp.arange(size) < seen_ref.shape[0]
                keys = triton.load(keys_ref.at[places, :], mask=inside[:, None], other=0.0)
                values = triton.load(values_ref.at[places, :], mask=inside[:, None], other=0.0)
                seen = triton.load(seen_ref.at[places], mask=inside, other=0)
                scores = jnp.where((seen != 0)[None], triton.dot(queries, keys.T) * scale, -1e30)
                new_largest = jnp.maximum(largest, scores.max(axis=-1))
                weights = jnp.where(inside[None], jnp.exp(scores - new_largest[:, None]), 0.0)
                # Earlier sums are relative to the earlier largest score.
                rescale = jnp.exp(largest - new_largest)
                mixed = rescale[:, None] * mixed + triton.dot(weights.astype(values.dtype), values)
                return mixed, new_largest, rescale * total + weights.sum(axis=-1)

            carry = jax.lax.fori_loop(0, pallas.cdiv(length, size), add, carry)
        mixed, _, total = carry
        triton.store(out_ref.at[:, :], (mixed / total[:, None]).astype(out_ref.dtype), mask=real)

    mixed = pallas.pallas_call(
        kernel,
        grid=(batch, kv_heads),
        in_specs=[instance_heads, *specs],
        out_specs=instance_heads,
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, count, width), queries.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="one_token_attention",
    )(queries.reshape(batch, kv_heads, count, width), *arrays)
    return mixed.reshape(queries.shape)


def splash_attention(
    queries: Float[Array, "batch heads time head_dim"],
    keys: Float[Array, "batch kv_heads length head_dim"],
    values: Float[Array, "batch kv_heads length head_dim"],
    ids: Int[Array, "batch length"],
    scale: float,
    cap: float | None,
    interpret: bool = False,
) -> Float[Array, "batch heads time head_dim"]:
    """Causal attention between tokens with equal ids, by splash attention on a TPU, which skips masked blocks.

    Args:
        queries: of the last tokens; the number of keys before them is a multiple of LANES.
        scale, cap: see `attend`.
        interpret: run the kernel step by step, on any device.
    """
    time = queries.shape[2]
    earlier = keys.shape[2] - time
    padded = [_lengthened(x, 2, LANES) for x in (queries * scale, keys, values)]
    padded_queries, padded_keys, _ = padded
    shape = (padded_queries.shape[2], padded_keys.shape[2])
    block = next(size for size in (512, 256, LANES) if math.gcd(*shape) % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: Any = {f"block_{name}": block for name in names}
    head_mask = splash_attention_mask.CausalMask(shape, offset=earlier)
    kernel: Any = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([head_mask] * queries.shape[1]),
        block_sizes=splash_attention_kernel.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=cap,
        residual_checkpoint_name=ATTENTION,
        interpret=interpret,
    )
    ids = _lengthened(ids, 1, LANES)
    mixed = jax.vmap(kernel)(*padded, splash_attention_kernel.SegmentIds(ids[:, earlier:], ids))
    return mixed[:, :, :time]


def _splash_with_prompts(queries: Array, pairs: list, ids: tuple[Array, ...], scale: float, cap: float | None) -> Array:
    """`splash_attention` of rows, or of completions over the prompts that they share; see `_cudnn_with_prompts`.

    Splash attention masks padding anywhere, so that no token moves and the prompt has no queries.
    """
    if len(pairs) == 1:
        keys, values = pairs[0]
        tokens = ids[0]
    else:
        keys, values = (
            jnp.concatenate([_lengthened(prompt, 2, LANES), completion], axis=2)
            for prompt, completion in _with_prompts(pairs)
        )
        prompt_ids = jnp.repeat(_lengthened(ids[0], 1, LANES), len(ids[1]) // len(ids[0]), axis=0)
        tokens = jnp.concatenate([prompt_ids, ids[1]], axis=1)
    return splash_attention(queries, keys, values, ids=tokens.astype(jnp.int32), scale=scale, cap=cap)


def _on_each_device(attention: Callable, queries: Array, segments: list, ids: tuple[Array, ...]) -> Array:
    """`attention(queries, pairs, ids)` on each device's own rows and heads: XLA cannot split the kernels over a mesh.

    Padding of right-padded rows is zero before and after, also in the gradients: kernels may leave anything there.
    """

    def zeroed(x: Array, real: Array) -> Array:
        if real.dtype != bool:
            return x
        return jnp.where(real[:, None, :, None], x, 0)

    queries = zeroed(queries, ids[-1])
    pairs = [(zeroed(keys, real), zeroed(values, real)) for (keys, values, _), real in zip(segments, ids, strict=True)]
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and all(kind == AxisType.Auto for kind in mesh.axis_types):
        rows = dividing_axes(ROWS, len(ids[0]), mesh.shape)
        heads = PartitionSpec(rows, dividing_axes(("tensor",), pairs[0][0].shape[1], mesh.shape))
        in_specs = (heads, heads, PartitionSpec(rows))
        attention = jax.shard_map(attention, in_specs=in_specs, out_specs=heads, check_vma=False)
    return zeroed(attention(queries, pairs, ids), ids[-1])


def _lengthened(x: Array, axis: int, multiple: int) -> Array:
    """The array, padded with zeros at the end of an axis to a multiple."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, padding)


def capped(x: Array, cap: float | None) -> Array:
    """cap · tanh(x / cap); x if cap is None."""
    if cap is None:
        return x
    return cap * jnp.tanh(x / cap)
