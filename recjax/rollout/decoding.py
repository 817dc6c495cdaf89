"""The engine's programs on the device: they run prefixes, sample first tokens, and continue completions."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from recjax.models.decoder import Context, Decoder, logits
from recjax.models.experts import apply_routed, chosen_experts, routing_shapes
from recjax.models.layer import Cache
from recjax.models.logprobs import (
    Sampling,
    last_hidden,
    recorded_shapes,
    recorded_tokens,
    sampling_logits,
    score_tokens,
)
from recjax.models.placement import ROWS, constrain
from recjax.models.sampling import NOTHING_RECORDED, TokenRecord
from recjax.rollout.keys_values import Memory, cache_rows, cache_time, empty, over_mesh, put_round, read_slots

BLOCK = 16  # tokens of a block of the later tokens' memory on a CPU
MOST_COPIED = 2**25  # numbers of the memory that a CPU copies into blocks for a round: 128 MiB
MOST_NOISE = 2**22  # random numbers that a round holds together: 16 MiB


class SlotState(NamedTuple):
    """The state of the slots.

    Attributes:
        live: True for slots that sample a token in this call.
        lengths, cached: numbers of tokens with keys and values in `prompts` and in `later`.
        last: latest sampled token.
        counts: tokens sampled so far; the next one is sampled with fold_in(key, count).
        limits: most tokens to sample.
        keys: key data.
    """

    live: Bool[Any, " slots"]
    lengths: Int[Any, " slots"]
    cached: Int[Any, " slots"]
    last: Int[Any, " slots"]
    counts: Int[Any, " slots"]
    limits: Int[Any, " slots"]
    keys: UInt32[Any, "slots words"]


class RoundOptions(NamedTuple):
    """Static options of a round; each value has its own program.

    Attributes:
        sampling: the distribution.
        stop_ids: tokens that end a completion and belong to it.
        time: most tokens that a slot samples.
        recording: the recorded arrays of each token.
    """

    sampling: Sampling
    stop_ids: tuple[int, ...]
    time: int
    recording: TokenRecord = TokenRecord()


class Decoded(NamedTuple):
    """State of a round after `time` tokens; each slot keeps the first `counts` of these tokens.

    `recent` holds the keys and values of this round's tokens except the last, and the states after these tokens; None
    in the result of a round.
    `recorded` holds other arrays of each token, [slots, round, …] by name; see `recjax.experience.group.Row`.
    """

    time: Int[Array, ""]
    live: Bool[Array, " slots"]
    last: Int[Array, " slots"]
    recent: Cache | None
    tokens: Int[Array, "slots round"]
    logprobs: Float[Array, "slots round"]
    counts: Int[Array, " slots"]
    recorded: dict[str, Array]


class SlotContents(NamedTuple):
    """The contents of some slots, which tokens continue.

    Attributes:
        slots: indices of the slots.
        lengths, cached: values for these slots, see `SlotState`.
    """

    memory: Memory
    slots: Int[Any, " rows"]
    lengths: Int[Any, " rows"]
    cached: Int[Any, " rows"]


@functools.partial(jax.jit, static_argnames="decoder")
def prefill(
    params: dict,
    tokens: Int[Array, "rows time"],
    mask: Bool[Array, "rows time"],
    held: SlotContents | None = None,
    *,
    decoder: Decoder,
) -> tuple[Cache, Float[Array, "rows vocab"]]:
    """Keys and values of right-padded tokens, states after them, and the scores of the token after each row.

    Args:
        held: contents of the slots that the rows continue; None: the rows are complete prefixes.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    contexts = ()
    if held is not None:
        positions += (held.lengths + held.cached)[:, None]
        # Slots of a group read one copy of their prompt; each row of this program has its own.
        memory = read_slots(held.memory, held.slots)
        contexts = _contexts(memory, held.lengths, held.cached)
        # The decoder reads the states of the last context only, as they are those after all tokens of the slot.
        contexts = (*contexts[:-1], contexts[-1]._replace(states=memory.states))
    applied: Any = decoder.apply({"params": params}, tokens, positions, mask, contexts)
    hidden, cache = applied
    return over_mesh(cache), _scores(decoder, params, last_hidden(hidden, mask))


def _scores(decoder: Decoder, params: dict, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
    """Scores of the next token, split like the head; otherwise the compiler would transfer the head for every token."""
    return constrain(logits(decoder.config, params, hidden), ROWS, "tensor")


@functools.partial(jax.jit, static_argnames=("sampling", "recording"))
def first_tokens(
    scores: Float[Array, "prompts vocab"],
    prompt_rows: Int[Array, " batch"],
    keys: UInt32[Array, "batch words"],
    *,
    sampling: Sampling,
    recording: TokenRecord = NOTHING_RECORDED,
) -> tuple[Int[Array, " batch"], Float[Array, " batch"], dict[str, Array]]:
    """The first token of each completion, its log-probability, and its recorded arrays, [batch, …] by name.

    Args:
        prompt_rows: row of each completion's prompt in `scores`.
        recording: the arrays.
    """
    # Completions of a group share their prompt's scores, which were computed once.
    scores = scores[prompt_rows]
    noise = token_noise(_step_keys(keys, jnp.zeros_like(prompt_rows)), scores.shape[-1], sampling)
    tokens, logprobs = sample_tokens(scores, sampling, noise)
    return tokens, logprobs, recorded_tokens(scores, sampling, recording)


def _step_keys(keys: UInt32[Array, "rows words"], counts: Int[Array, " rows"]) -> Key[Array, " rows"]:
    # The key of a token depends on its request and its index alone: the same completion results in any slot and round.
    return jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys), counts)


def _contexts(memory: Memory, lengths: Int[Array, " rows"], cached: Int[Array, " rows"]) -> tuple[Context, ...]:
    """The context of each row's next token: its prompt and later tokens. Rows that share a prompt have one length."""
    prompts = cache_rows(memory.prompts)
    prompt_time = cache_time(memory.prompts)
    sharing = len(lengths) // prompts
    offsets = jnp.broadcast_to(jnp.arange(prompt_time), (prompts, prompt_time))
    keys, values = memory.prompts
    prompt = Context(keys, values, offsets < lengths[::sharing, None], offsets)
    # A batch that a single round samples has a memory without room: all later tokens are in the round's own buffer.
    if not cache_time(memory.later):
        return (prompt,)
    offsets = jnp.arange(cache_time(memory.later))
    keys, values = memory.later
    return prompt, Context(keys, values, offsets < cached[:, None], lengths[:, None] + offsets)


def _in_blocks(context: Context) -> list[Context]:
    """The context as contexts of up to BLOCK tokens.

    XLA on the CPU computes the attention of one token a slot as a matmul on one core, which takes as long as it takes
    to read all keys. Several blocks take several cores, and nobody reads a block that no slot has filled.
    """

    def blocks(x: Array, axis: int) -> list[Array]:
        return jnp.split(x, list(range(BLOCK, x.shape[axis], BLOCK)), axis=axis)

    keys, structure = jax.tree.flatten(context.keys)
    values = jax.tree.leaves(context.values)
    # By layer, or for all layers at once, and then by block.
    keys_by_block, values_by_block = (zip(*(blocks(x, -2) for x in layers), strict=True) for layers in (keys, values))
    return [
        Context(structure.unflatten(own_keys), structure.unflatten(own_values), mask, positions)
        for own_keys, own_values, mask, positions in zip(
            keys_by_block, values_by_block, blocks(context.mask, 1), blocks(context.positions, 1), strict=True
        )
    ]


def copies_into_blocks(platform: str, numbers: int) -> bool:
    """Whether a round copies the later tokens' memory into blocks, which takes their memory once more.

    Args:
        platform: JAX's name of the devices' platform.
        numbers: of all keys and values of later tokens.
    """
    return platform == "cpu" and numbers <= MOST_COPIED


# The memory is donated: a copy of the cache in each round would double its size.
@functools.partial(jax.jit, static_argnames=("decoder", "options"), donate_argnames="memory")
def decode(
    params: dict,
    memory: Memory,
    rows: SlotState,
    enough: Int[Array, ""],
    *,
    decoder: Decoder,
    options: RoundOptions,
) -> tuple[Memory, Decoded]:
    """Samples up to `options.time` tokens for each live slot; stops early once at most `enough` slots are live.

    The round only reads the memory. It keeps the keys and values of new tokens in a buffer where all slots share one
    position, and at the end copies them to each slot's own position. Memory after a slot's cached tokens has no
    meaning, so idle slots lose no tokens either, as long as they have room for a round. A memory without any room
    keeps none of the round's tokens. States change only with tokens of live slots.
    """
    contexts = _contexts(memory, rows.lengths, rows.cached)
    if copies_into_blocks(jax.default_backend(), jax.tree.reduce(lambda size, x: size + x.size, memory.later, 0)):
        contexts = (contexts[0], *(block for context in contexts[1:] for block in _in_blocks(context)))
    slots = len(rows.live)
    offsets = jnp.arange(options.time)
    starts = rows.lengths + rows.cached
    # Inside the loop, XLA would compute cosines and sines again in every layer for every token.
    angles = decoder.rotary_angles(starts[:, None] + offsets)
    noise_at = round_noise(rows.keys, rows.counts, decoder.config.vocab_size, options)

    def unfinished(state: Decoded) -> Bool[Array, ""]:
        return (state.time < options.time) & (state.live.sum() > enough)

    def step(state: Decoded) -> Decoded:
        time = state.time
        recent = state.recent
        assert recent is not None
        keys, values = recent.keys_values
        # The buffer's entry at `time` is the token that runs now, so it is already visible to itself.
        seen = jnp.broadcast_to(offsets <= time, (slots, options.time))
        angles_now = jax.tree.map(lambda angle: jax.lax.dynamic_slice_in_dim(angle, time, 1, axis=1), angles)
        (hidden, cache), sown = apply_routed(
            decoder,
            {"params": params},
            state.last[:, None],
            (starts + time)[:, None],
            # Idle slots may write any keys and values, which are overwritten, but a state would keep their tokens.
            state.live[:, None] if memory.states else jnp.ones((slots, 1), bool),
            contexts=(*contexts, Context(keys, values, seen, starts[:, None] + offsets, recent.states)),
            write_at=time,
            angles=angles_now,
        )
        scores = _scores(decoder, params, hidden[:, 0])
        tokens, logprobs = sample_tokens(scores, options.sampling, noise_at(time))
        recorded = recorded_tokens(scores, options.sampling, options.recording) | chosen_experts(decoder, sown)
        ended = jnp.isin(tokens, jnp.array(options.stop_ids, jnp.int32)) | (rows.counts + time + 1 >= rows.limits)
        return Decoded(
            time=time + 1,
            live=state.live & ~ended,
            last=tokens,
            recent=over_mesh(cache),
            # All slots write in one column; `counts` says how many of a slot's columns belong to its completion.
            tokens=state.tokens.at[:, time].set(tokens),
            logprobs=state.logprobs.at[:, time].set(logprobs),
            counts=state.counts + state.live,
            recorded=jax.tree.map(lambda column, now: column.at[:, time].set(now), state.recorded, recorded),
        )

    state = jax.lax.while_loop(unfinished, step, _round_start(memory, rows, decoder, options))

    recent = state.recent
    assert recent is not None
    later = memory.later
    if cache_time(later):
        later = put_round(later, recent.keys_values, rows.cached)
    # The host reads tokens, never the round's keys and values, which stay on the device.
    return Memory(memory.prompts, later, recent.states), state._replace(recent=None)


def _round_start(memory: Memory, rows: SlotState, decoder: Decoder, options: RoundOptions) -> Decoded:
    """The state before a round's first token, with empty buffers for its tokens."""
    slots = len(rows.live)
    vocabulary = decoder.config.vocab_size
    recorded = recorded_shapes(vocabulary, options.sampling, options.recording) | routing_shapes(decoder)
    return Decoded(
        time=jnp.zeros((), jnp.int32),
        live=rows.live,
        last=rows.last,
        recent=Cache(
            empty(memory.prompts, rows=slots, time=options.time, dtype=decoder.cache_dtype),
            memory.states,
        ),
        tokens=jnp.zeros((slots, options.time), jnp.int32),
        logprobs=jnp.zeros((slots, options.time)),
        counts=jnp.zeros(slots, jnp.int32),
        recorded=jax.tree.map(lambda like: jnp.zeros((slots, options.time, *like.shape[1:]), like.dtype), recorded),
    )


class TokenNoise(NamedTuple):
    """Standard Gumbel variables of one token a row: for the choice of its block, and of its place in the block."""

    blocks: Float[Array, "*rows blocks"]
    places: Float[Array, "*rows length"]


def token_noise(keys: Key[Array, "*rows"], vocab: int, sampling: Sampling) -> TokenNoise | None:
    """The random numbers that `sample_tokens` reads, for each key; None at temperature 0."""
    if sampling.temperature == 0:
        return None
    length = _block_length(vocab)
    blocks = -(-vocab // length)

    # With equal random numbers in both steps, the choice of a token would depend on the choice of its block.
    def of_key(key: Array) -> TokenNoise:
        steps = (jax.random.fold_in(key, 0), blocks), (jax.random.fold_in(key, 1), length)
        return TokenNoise(*(jax.random.gumbel(step, (count,)) for step, count in steps))

    for _ in keys.shape:
        of_key = jax.vmap(of_key)
    return of_key(keys)


def round_noise(
    keys: UInt32[Array, "slots words"], counts: Int[Array, " slots"], vocab: int, options: RoundOptions
) -> Callable[[Int[Array, ""]], TokenNoise | None]:
    """A function of the number of earlier tokens of the round, which returns the noise of the slots' next tokens.

    If they are few, a round draws all numbers before its first token: XLA on the CPU draws them in loops of many small
    operations.
    """

    def at(time: Array) -> TokenNoise | None:
        return token_noise(_step_keys(keys, counts + time), vocab, options.sampling)

    if len(counts) * options.time * 2 * _block_length(vocab) > MOST_NOISE:
        return at
    together = jax.vmap(at)(jnp.arange(options.time))
    return lambda time: jax.tree.map(lambda x: x[time], together)


def sample_tokens(
    scores: Float[Array, "batch vocab"], sampling: Sampling, noise: TokenNoise | None
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """One token per row, sampled with the row's noise, and its log-probability under the distribution that sampled it.

    Args:
        noise: of each row; not read at temperature 0.
    """
    # Each device samples its own rows, so it needs their scores for the whole vocabulary.
    scores = constrain(scores, ROWS)
    if sampling.temperature == 0:
        tokens = _in_two_steps(scores, jnp.max, lambda among, _: jnp.argmax(among, axis=-1))
    else:
        assert noise is not None

        # The largest of scores plus Gumbel variables is a sample of their softmax.
        def sampled(among: Array, step: int) -> Array:
            return jnp.argmax(among + noise[step], axis=-1)

        tokens = _in_two_steps(sampling_logits(scores, sampling), jax.nn.logsumexp, sampled)
    return tokens, score_tokens(scores, tokens, sampling).logprobs


def _block_length(vocab: int) -> int:
    return math.isqrt(vocab - 1) + 1


def _in_two_steps(scores: Float[Array, "batch vocab"], score_block: Callable, choose: Callable) -> Int[Array, " batch"]:
    """Chooses an index per row in two steps: one of about √vocab blocks by `score_block` of its scores, then one in it.

    The result equals a choice among all scores at once, including ties. Sampling takes 2 √vocab random numbers, not
    vocab, and avoids an argmax over many scores, which XLA compiles to slow code on CPUs.
    """
    batch, vocab = scores.shape
    length = _block_length(vocab)
    padding = -vocab % length
    # At -inf the padding has probability 0, and it loses every tie as it comes last.
    blocks = jnp.pad(scores, ((0, 0), (0, padding)), constant_values=-jnp.inf).reshape(batch, -1, length)
    block = choose(score_block(blocks, axis=-1), 0)
    inside = choose(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], 1)
    return block * length + inside
