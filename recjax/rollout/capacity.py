"""Computes how many slots fit in memory, and the few sizes that slots, caches and prompts may have."""

import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from recjax import hosts
from recjax.models.decoder import Decoder
from recjax.models.placement import row_shards

ROUND = 16  # most tokens that a slot samples before the host checks for ended completions
SHORTEST_CACHE, FEWEST_SLOTS = 64, 8  # shortest cache in tokens; fewest slots that an engine shrinks to
# Tokens per tile in a TPU's layout of the cache. If tokens do not fill the tiles, programs copy the whole cache.
TILE = 16
FEWEST_CONTINUED = 4  # fewest rows of a program that continues the contents of slots
RESERVE = 0.2  # share of the free memory that stays available for activations
CHANGING = 1.5  # peak memory over that of the full cache, while copying doubles its length or halves the slots
ALWAYS_FREE = 2**24  # bytes that are assumed to be free without a check


def key_value_bytes(decoder: Decoder, *, prompts: int, prompt_tokens: int, rows: int, completion_tokens: int) -> int:
    """Bytes of keys and values on each device of the mesh in context while completions are sampled.

    2 × layers × kv_heads × head_dim × bytes × (prompts × prompt_tokens + rows × completion_tokens), divided by the
    number of devices that share the rows and, if the heads are a multiple, by the size of the "tensor" axis.

    Args:
        prompts: copies of prompts: one per group if all its completions have slots, otherwise one per slot plus one
            per prompt.
    """
    shape, tensor = decoder.config, jax.sharding.get_abstract_mesh().shape.get("tensor", 1)
    shards = row_shards() * (tensor if shape.num_kv_heads % tensor == 0 else 1)
    number = jnp.dtype(decoder.cache_dtype or decoder.dtype).itemsize
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * number
    return per_token * (prompts * prompt_tokens + rows * completion_tokens) // shards


def score_bytes(decoder: Decoder, rows: int) -> int:
    """Bytes of the next token's scores on each device: float32, once for the model and once for the distribution."""
    return 2 * rows * decoder.config.vocab_size * 4 // row_shards()


def free_bytes() -> int:
    """Free bytes of the device with the least, over all processes; devices that are CPUs share the host's memory."""
    free = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            free.append(stats["bytes_limit"] - stats["bytes_in_use"])
            continue
        try:
            with open("/proc/meminfo", encoding="ascii") as lines:
                on_host = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        except (OSError, StopIteration):
            on_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        free.append(on_host // jax.local_device_count())
    return hosts.least(min(free))


def slots_that_fit(
    decoder: Decoder,
    *,
    prompts: int,
    prompt_tokens: int,
    rows: int,
    completion_tokens: int,
    free: int | None = None,
) -> int:
    """The largest number of slots that fits in memory: `rows`, `rows`/2, `rows`/4, …

    Args:
        free: free bytes of each device; None: measured.
    """

    def needed(slots: int) -> int:
        copies = prompts if slots == rows else prompts + slots
        time = int(CHANGING * (completion_tokens + 2 * ROUND))
        tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": time}
        return key_value_bytes(decoder, prompts=copies, rows=slots, **tokens) + score_bytes(decoder, slots)

    if needed(rows) <= ALWAYS_FREE:
        return rows
    slots, most = rows, (1 - RESERVE) * (free_bytes() if free is None else free)
    while slots > row_shards() and needed(slots) > most:
        slots = filled_up(-(-slots // 2))
    return slots


def filled_up(count: int) -> int:
    """The next multiple of the number of parts that the mesh splits rows into."""
    return -(-count // row_shards()) * row_shards()


def power_of_two(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def slot_numbers(most: int) -> list[int]:
    """All numbers of slots that an engine may use, ascending: `most`, `most`/2, … down to FEWEST_SLOTS."""
    sizes = [filled_up(most)]
    while (half := filled_up(-(-sizes[0] // 2))) >= FEWEST_SLOTS and half < sizes[0]:
        sizes.insert(0, half)
    return sizes


def next_lower(numbers: Sequence[int], count: int) -> int:
    """The next lower number of slots; 0 if `count` is the lowest."""
    return max((fewer for fewer in numbers if fewer < count), default=0)


def cache_lengths(longest: int) -> list[int]:
    """All lengths in tokens that the cache may have, ascending: doubling, up to completions of `longest` tokens.

    The final length is 1.5 to 3 times the length before, so no two lengths are almost equal.
    """
    lengths, most = [SHORTEST_CACHE if longest > ROUND + 1 else round_time(longest)], longest - 1 + round_time(longest)
    if most > TILE:
        most += -most % TILE
    while 1.5 * lengths[-1] < most:
        lengths.append(2 * lengths[-1])
    return [*lengths[:-1], most]


def cache_length(longest: int, needed: int, slots: int, most: int) -> int:
    """The length of `cache_lengths` for `slots` of `most` slots with room for `needed` tokens each.

    Fewer slots get longer caches, about half the bytes of the first cache of all slots. Few slots read the unused part
    quickly, and a batch whose completions end one by one uses a single length for each number of slots.
    """
    lengths = cache_lengths(longest)
    return first_enough(lengths, max(needed, lengths[0] * most // (2 * slots)))


def round_time(longest: int) -> int:
    """Tokens of a round: ROUND, or fewer if the longest completion needs fewer after its first token."""
    return max(1, min(ROUND, longest - 1))


def first_enough(sizes: Sequence[int], needed: int) -> int:
    """The first size that is enough, or the last."""
    return next((size for size in sizes if size >= needed), sizes[-1])
