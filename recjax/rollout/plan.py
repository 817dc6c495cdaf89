"""Plans sizes: the devices that sample, the slots that fit in memory, and the few shapes of programs."""

import functools
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from recjax.models.decoder import Decoder, abstract_params
from recjax.models.placement import AnyMesh, bytes_on_device, laid_out_by_rules, row_shards
from recjax.models.trainable import in_compute_dtype
from recjax.runtime import hosts

ROUND = 16  # most tokens that a slot samples before the host checks for ended completions
SHORTEST_CACHE = 64  # tokens
FEWEST_SLOTS = 8  # fewest slots that an engine shrinks to
# Tokens per tile in a TPU's layout of the cache. If tokens do not fill the tiles, programs copy the whole cache.
TILE = 16
FEWEST_CONTINUED = 4  # fewest rows of a program that continues the contents of slots
RESERVE = 0.2  # share of the free memory that stays available for activations
CHANGING = 1.5  # peak memory over that of the full cache, while copying doubles its length or halves the slots
ALWAYS_FREE = 2**24  # bytes that are assumed to be free without a check
WEIGHTS_SHARE = 0.45  # share of a device's free memory for weights; keys and values use the remainder


class EnginePlan(NamedTuple):
    """Sizes of an engine's programs.

    | requests | numbers and lengths | cache | slots |
    |---|---|---|---|
    | a batch that has the engine for itself | fit it exactly | grows step by step | fewer as completions end |
    | arrive at any time | powers of two | grows, rarely shrinks | do not shrink |

    Attributes:
        requests: number of requests, waiting or in slots, that the plan is for.
        prefix_time: tokens to which prefixes are padded.
        slots: numbers of slots that may be used, ascending.
        round_time: most tokens that a slot samples in a round.
        lengths: capacities in tokens after the prompts that a batch's cache may have, ascending; 0 if a single round
            samples the complete batch. Empty for requests that arrive at any time.
    """

    requests: int
    prefix_time: int
    slots: Sequence[int]
    round_time: int
    lengths: Sequence[int]

    @property
    def is_batch(self) -> bool:
        """True for a batch that has the engine for itself."""
        return bool(self.lengths)

    def rows(self, count: int) -> int:
        """Number of rows of the compiled program that runs `count` prefixes or completions."""
        if self.is_batch:
            return filled_up(count)
        return filled_up(power_of_two(count))

    def prompt_time(self, longest: int) -> int:
        """Tokens to which prefixes of at most `longest` tokens are padded."""
        if longest <= self.prefix_time:
            return self.prefix_time
        return power_of_two(longest)

    def cache_time(self, needed: int, slots: int, current: int = 0) -> int:
        """Tokens that each of `slots` slots can store after its prompt: at least `needed`.

        Fewer slots of a batch get longer caches, about half the bytes of the first cache of all slots. Few slots read
        the unused part quickly, and a batch whose completions end one by one uses a single length for each number of
        slots.

        Args:
            current: capacity of the slots; for requests at any time, it stays unless it is four times too long.
        """
        if self.is_batch:
            half_of_first = self.lengths[0] * self.slots[-1] // (2 * slots)
            return first_enough(self.lengths, max(needed, half_of_first))
        length = power_of_two(max(needed, SHORTEST_CACHE))
        if current // 4 < length < current:
            return current
        return length


def plan_for(
    decoder: Decoder,
    requests: int,
    longest: int,
    group_size: int | None,
    *,
    prefix_time: int,
    slots: int | None,
    free: int | None = None,
    held: int = 0,
) -> EnginePlan:
    """Decides the sizes for a number of requests.

    Args:
        longest: most tokens after a prompt: of a completion, or of all that may follow in the prompt's slot.
        group_size: number of completions of each prompt, for a batch that has the engine for itself; None: requests
            arrive at any time.
        prefix_time: tokens to which prefixes are padded.
        slots: completions that are sampled together; None: as many as fit in memory, of all, half of them, and so on.
        free: free bytes of each device; None: measured.
        held: bytes of each device that slots of an earlier plan take, whose place the new slots take.
    """
    if group_size:
        prompts = filled_up(requests // group_size)
        count = prompts * group_size
        capacity = longest + 2 * ROUND
    else:
        count = power_of_two(requests)
        prompts = count
        capacity = capacities(longest)[-1]

    def needed_bytes(candidate: int) -> int:
        prompt_copies = prompts
        if candidate < count:  # each slot has a copy of its prompt
            prompt_copies += candidate
        keys_values = key_value_bytes(
            decoder,
            prompts=prompt_copies,
            prompt_tokens=prefix_time,
            rows=candidate,
            completion_tokens=int(CHANGING * capacity),
        )
        return keys_values + state_bytes(decoder, prompts + candidate) + score_bytes(decoder, candidate)

    most = count
    if slots is None:
        if needed_bytes(most) > ALWAYS_FREE:
            if free is None:
                free = free_bytes()
            available = (1 - RESERVE) * (free + held)
            while most > row_shards() and needed_bytes(most) > available:
                most = _half(most)
    elif not group_size or slots < requests:  # a batch gets no more slots than it has completions
        most = slots
    numbers = slot_numbers(most)
    if group_size is None:
        return EnginePlan(count, prefix_time, slots=numbers, round_time=ROUND, lengths=())
    round_time = max(1, min(ROUND, longest - 1))
    if longest <= 1 + ROUND and numbers[-1] >= count:  # a single round samples the complete batch
        return EnginePlan(count, prefix_time, slots=numbers[-1:], round_time=round_time, lengths=(0,))
    lengths = cache_lengths(longest, round_time)
    return EnginePlan(count, prefix_time, slots=numbers, round_time=round_time, lengths=lengths)


def filled_up(count: int) -> int:
    """The next multiple of the number of parts that the mesh splits rows into."""
    return -(-count // row_shards()) * row_shards()


def power_of_two(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def first_enough(sizes: Sequence[int], needed: int) -> int:
    """The first size that is enough, or the last."""
    for size in sizes:
        if size >= needed:
            return size
    return sizes[-1]


def next_lower(numbers: Sequence[int], count: int) -> int:
    """The next lower number of slots; 0 if `count` is the lowest."""
    return max((fewer for fewer in numbers if fewer < count), default=0)


def slot_numbers(most: int) -> list[int]:
    """All numbers of slots that an engine may use, ascending: `most`, `most`/2, … down to FEWEST_SLOTS."""
    sizes = [filled_up(most)]
    half = _half(sizes[0])
    while FEWEST_SLOTS <= half < sizes[0]:
        sizes.insert(0, half)
        half = _half(half)
    return sizes


def _half(count: int) -> int:
    """Half a number of slots, rounded up and filled up."""
    return filled_up(-(-count // 2))


def cache_lengths(longest: int, round_time: int) -> list[int]:
    """All lengths in tokens that a batch's cache may have, ascending: doubling, up to completions of `longest` tokens.

    The final length is 1.5 to 3 times the length before, so no two lengths are almost equal.
    """
    first = round_time
    if longest > ROUND + 1:
        first = SHORTEST_CACHE
    most = longest - 1 + round_time
    if most > TILE:
        most += -most % TILE
    lengths = [first]
    while 1.5 * lengths[-1] < most:
        lengths.append(2 * lengths[-1])
    lengths[-1] = most
    return lengths


def capacities(longest: int) -> list[int]:
    """All capacities in tokens that slots for requests at any time may have, if `longest` tokens follow a prompt."""
    lengths = [SHORTEST_CACHE]
    while lengths[-1] < longest + 2 * ROUND:
        lengths.append(2 * lengths[-1])
    return lengths


# --- Memory.


def key_value_bytes(decoder: Decoder, *, prompts: int, prompt_tokens: int, rows: int, completion_tokens: int) -> int:
    """Bytes of keys and values on each device of the mesh in context while completions are sampled.

    2 × layers with attention × kv_heads × head_dim × bytes × (prompts × prompt_tokens + rows × completion_tokens),
    divided by the number of devices that share the rows and, if the heads are a multiple, by the "tensor" axis's size.

    Args:
        prompts: copies of prompts: one per group if all its completions have slots, otherwise one per slot plus one
            per prompt.
    """
    shape = decoder.config
    tensor = jax.sharding.get_abstract_mesh().shape.get("tensor", 1)
    shards = row_shards()
    if shape.num_kv_heads % tensor == 0:
        shards *= tensor
    dtype = decoder.cache_dtype
    if dtype is None:
        dtype = decoder.dtype
    per_token = 2 * shape.attention_layers * shape.num_kv_heads * shape.head_dim * jnp.dtype(dtype).itemsize
    return per_token * (prompts * prompt_tokens + rows * completion_tokens) // shards


def state_bytes(decoder: Decoder, rows: int) -> int:
    """Bytes of the states of delta nets on each device: float32 matrices, and the windows of their convolutions."""
    net = decoder.config.delta
    if net is None:
        return 0
    window = (net.kernel - 1) * net.channels * jnp.dtype(decoder.dtype).itemsize
    state = 4 * net.value_heads * net.key_dim * net.value_dim
    return sum(net.layers) * rows * (state + window) // row_shards()


def score_bytes(decoder: Decoder, rows: int) -> int:
    """Bytes of the next token's scores on each device: float32, once for the model and once for the distribution."""
    return 2 * rows * decoder.config.vocab_size * 4 // row_shards()


def free_bytes() -> int:
    """Free bytes of the device with the least, over all processes; devices that are CPUs share the host's memory."""
    free = []
    for device in jax.local_devices():
        stats = device.memory_stats()
        if stats and "bytes_limit" in stats:
            free.append(stats["bytes_limit"] - stats["bytes_in_use"])
        else:
            free.append(_free_host_bytes() // jax.local_device_count())
    return hosts.smallest_of_all(min(free))


def _free_host_bytes() -> int:
    """Free bytes of the host's memory; half of all bytes on a system that does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable"):
                    kibibytes = line.split()[1]
                    return int(kibibytes) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


# --- Devices. Decoding reads every weight for every token. Weights split over many devices, as for training, would have
# to be sent for every token. So an engine has its own mesh of the same devices in the same order, and receives the
# weights once.


def sampling_mesh(decoder: Decoder) -> Mesh:
    """The devices of the mesh in context, grouped by the memory that is free at the first call."""
    mesh = jax.sharding.get_mesh()
    if mesh.size <= 1:
        return mesh
    mesh = grouped(decoder, mesh)
    assert isinstance(mesh, Mesh)
    return mesh


# Cached, because a different result for a later batch would make JAX compile all programs again.
@functools.lru_cache(maxsize=16)
def grouped(decoder: Decoder, mesh: AnyMesh, free: int | None = None) -> AnyMesh:
    """The mesh's devices as groups ("data"), in each of which "tensor" splits the weights.

    Groups are the smallest in which weights take at most WEIGHTS_SHARE of a device's free memory. If none fit, they are
    the largest groups whose devices can share the heads and are no more than training splits weights over.

    Args:
        free: free bytes of each device; None: measured at the first call.
    Returns:
        The mesh itself if the groups have no space for the weights.
    """
    weights = abstract_weights(decoder)
    shape = decoder.config
    if free is None:
        free = free_bytes()
    largest_group = math.prod(mesh.shape.get(axis, 1) for axis in ("fsdp", "expert", "tensor"))
    chosen = mesh
    needed = 0
    for group_size in range(1, largest_group + 1):
        if any(number % group_size for number in (mesh.size, shape.num_heads, shape.intermediate_size)):
            continue
        sizes = {"data": mesh.size // group_size, "tensor": group_size}
        lengths = tuple(sizes.get(axis, 1) for axis in mesh.axis_names)
        if isinstance(mesh, AbstractMesh):
            chosen = AbstractMesh(lengths, mesh.axis_names, mesh.axis_types)
        else:
            chosen = Mesh(mesh.devices.reshape(lengths), mesh.axis_names, mesh.axis_types)
        needed = bytes_on_device(laid_out_by_rules(chosen, weights))
        if needed <= WEIGHTS_SHARE * free:
            break
    if needed > free:
        return mesh
    return chosen


def abstract_weights(decoder: Decoder) -> dict:
    """Shapes and dtypes of all parameters as a sampler holds them."""
    cast = functools.partial(in_compute_dtype, decoder, copy=False)
    return jax.eval_shape(cast, abstract_params(decoder.config))
