"""How many slots memory has room for, and the few sizes that slots, caches and prompts come in."""

import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from recjax import hosts
from recjax.models.decoder import Decoder
from recjax.models.placement import row_shards

ROUND = 16  # tokens that a slot samples at most before the host looks again
SHORTEST_CACHE, FEWEST_SLOTS = 64, 8  # the smallest cache in tokens; fewer rows are not gathered into fewer slots
# A TPU lays rows of cached tokens out in tiles of so many. Where they do not fill these, programs copy the whole cache.
TILE = 16
FEWEST_CONTINUED = 4  # requests that go on from what slots hold are filled up to so many
RESERVE = 0.2  # share of the free memory that is left for activations
CHANGING = 1.5  # times the cache that there is while it is copied, to one twice as long or to half as many slots
ALWAYS_FREE = 2**24  # bytes that are not asked for


def cache_bytes(decoder: Decoder, *, prompts: int, prompt_tokens: int, rows: int, completion_tokens: int) -> int:
    """Bytes of keys and values that each device of the mesh in context holds while completions are sampled.

    2 × layers × kv_heads × head_dim × bytes × (prompts × prompt_tokens + rows × completion_tokens), over the devices
    that share the rows, and over those that share the heads where their number divides these.

    Args:
        prompts: copies of a prompt: one for each group where all its completions have slots, otherwise one for each
            slot, beside one for each prompt.
    """
    shape, tensor = decoder.config, jax.sharding.get_abstract_mesh().shape.get("tensor", 1)
    shards = row_shards() * (tensor if shape.num_kv_heads % tensor == 0 else 1)
    number = jnp.dtype(decoder.cache_dtype or decoder.dtype).itemsize
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * number
    return per_token * (prompts * prompt_tokens + rows * completion_tokens) // shards


def score_bytes(decoder: Decoder, rows: int) -> int:
    """Bytes of the next token's scores on each device: float32, those of the model and of the distribution."""
    return 2 * rows * decoder.config.vocab_size * 4 // row_shards()


def free_bytes() -> int:
    """Bytes that are free on the device that has the fewest, of all processes'; devices that are CPUs share theirs."""
    free = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            free.append(stats["bytes_limit"] - stats["bytes_in_use"])
        else:
            free.append(_free_on_host() // jax.local_device_count())
    return hosts.least(min(free))


def _free_on_host() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def slots_that_fit(
    decoder: Decoder,
    *,
    prompts: int,
    prompt_tokens: int,
    rows: int,
    completion_tokens: int,
    free: int | None = None,
) -> int:
    """As many slots as the free memory of the devices holds, at most `rows`: these, their half, and so on.

    Args:
        free: bytes of each device; None: what there is.
    """

    def needed(slots: int) -> int:
        copies = prompts if slots == rows else prompts + slots
        time = int(CHANGING * (completion_tokens + 2 * ROUND))
        tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": time}
        return cache_bytes(decoder, prompts=copies, rows=slots, **tokens) + score_bytes(decoder, slots)

    if needed(rows) <= ALWAYS_FREE:
        return rows
    slots, most = rows, (1 - RESERVE) * (free_bytes() if free is None else free)
    while slots > row_shards() and needed(slots) > most:
        slots = filled_up(-(-slots // 2))
    return slots


def filled_up(count: int) -> int:
    """The next multiple of what the mesh splits rows into."""
    return -(-count // row_shards()) * row_shards()


def power_of_two(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def slot_numbers(most: int) -> list[int]:
    """Numbers of slots that are ever used, rising: `most`, its half, and so on, down to FEWEST_SLOTS."""
    sizes = [filled_up(most)]
    while (half := filled_up(-(-sizes[0] // 2))) >= FEWEST_SLOTS and half < sizes[0]:
        sizes.insert(0, half)
    return sizes


def next_lower(numbers: Sequence[int], count: int) -> int:
    """The next lower number of slots; 0 where there is none."""
    return max((fewer for fewer in numbers if fewer < count), default=0)


def cache_lengths(longest: int) -> list[int]:
    """Lengths in tokens that the cache ever has, rising: doubling, up to what completions of `longest` tokens need.

    The last is one and a half to three times as long as the one before: there is none that hardly differs from it.
    """
    lengths, most = [SHORTEST_CACHE if longest > ROUND + 1 else round_time(longest)], longest - 1 + round_time(longest)
    if most > TILE:
        most += -most % TILE
    while 1.5 * lengths[-1] < most:
        lengths.append(2 * lengths[-1])
    return [*lengths[:-1], most]


def cache_length(longest: int, needed: int, slots: int, most: int) -> int:
    """The length of the cache in which `slots` of `most` slots have room for `needed` tokens; one of `cache_lengths`.

    Fewer slots have longer ones, about half the bytes of what all slots have at first: to read what they do not need
    costs few slots little, and a batch whose completions end one by one comes to one length for each number of slots.
    """
    lengths = cache_lengths(longest)
    return at_least(lengths, max(needed, lengths[0] * most // (2 * slots)))


def round_time(longest: int) -> int:
    """Tokens of a round: ROUND, or what the longest completion has beside its first token."""
    return max(1, min(ROUND, longest - 1))


def at_least(sizes: Sequence[int], needed: int) -> int:
    """The first size that is enough, or the last."""
    return next((size for size in sizes if size >= needed), sizes[-1])
