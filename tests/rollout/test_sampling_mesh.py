"""Where an engine samples: groups of devices no larger than the weights ask for, each slot on its own device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.config import MeshConfig
from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.layer import Cache, KeysValues
from recjax.models.placement import bytes_on_device, moved_params, param_shardings
from recjax.rollout import keys_values, slots
from recjax.rollout.plan import WEIGHTS_SHARE, abstract_weights, grouped
from recjax.rollout.requests import Prefilled
from recjax.training.mesh import make_mesh

DECODER = Decoder(DecoderConfig(16, 16, 32, 2, 4, 2, 4))
WHOLE = sum(leaf.size * 4 for leaf in jax.tree.leaves(abstract_weights(DECODER)))
NORMS = 5 * 16 * 4  # bytes of scales, which every device has


def axes(sizes, free, decoder=DECODER):
    devices = jax.devices()[: int(np.prod(sizes))]
    return tuple(
        grouped(
            decoder, make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))), devices), free
        ).shape.values()
    )


def test_the_smallest_group_that_holds_the_weights_is_chosen():
    enough = int(WHOLE / WEIGHTS_SHARE) + 1
    assert axes((1, 4, 1), enough) == (4, 1, 1)
    assert axes((1, 4, 1), enough - 2) == (2, 1, 2)
    assert axes((1, 4, 1), enough // 2 - 2) == (1, 1, 4)
    assert axes((1, 2, 2), enough) == axes((2, 1, 2), enough) == (4, 1, 1)
    assert axes((1, 4, 1), WHOLE // 2) == (1, 1, 4)  # more than their share even of four devices
    assert axes((2, 1, 2), WHOLE // 2 + NORMS) == (2, 1, 2)  # no more devices share weights than in training
    assert axes((1, 4, 1), 0) == (1, 4, 1)  # too large for any: as in training


def test_heads_are_not_cut():
    three_heads = Decoder(DecoderConfig(16, 12, 32, 2, 3, 1, 4))
    assert axes((1, 4, 1), 10**6, three_heads) == (4, 1, 1)
    assert axes((1, 4, 1), WHOLE // 3, three_heads) == (1, 4, 1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_weights_lie_by_the_rules_and_once(size):
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=1), jax.devices()[:4])
    params = init_params(DECODER.config, jax.random.key(0))
    placed = jax.device_put(params, param_shardings(mesh, params))
    groups = grouped(DECODER, mesh, int((WHOLE / size + NORMS) / WEIGHTS_SHARE) + 1)
    assert groups.shape["tensor"] == size
    there, wanted = moved_params(groups, placed), param_shardings(groups, params)
    for leaf, sharding, value in zip(*map(jax.tree.leaves, (there, wanted, params)), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        np.testing.assert_array_equal(leaf, value)
    assert bytes_on_device(there) <= WHOLE / size + NORMS
    assert pointers(moved_params(groups, there)) == pointers(there)


def pointers(tree):
    shards = [shard.data for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return [shard.unsafe_buffer_pointer() for shard in shards]


@pytest.mark.slow
def test_both_ways_to_write_after_cached_tokens_agree():
    generator = np.random.default_rng(0)
    later = KeysValues(*(jnp.asarray(generator.normal(size=(2, 5, 2, 12, 3))) for _ in range(2)))
    new = KeysValues(*(jnp.asarray(generator.normal(size=(2, 5, 2, 4, 3))) for _ in range(2)))
    cached = np.array([0, 8, 3, 5, 1])
    expected = [np.array(x) for x in later]
    for leaf, added in zip(expected, new, strict=True):
        for row, start in enumerate(cached):
            leaf[:, row, :, start : start + 4] = added[:, row]
    places = np.stack([np.arange(5), np.arange(5), cached])
    one_by_one = jax.jit(keys_values.put_behind)(later, new, places, 5)
    for ways in (one_by_one, jax.jit(keys_values._merged)(later, new, jnp.asarray(cached))):
        for found, leaf in zip(ways, expected, strict=True):
            np.testing.assert_array_equal(found, leaf.astype(np.float32))


def jobs_of(some):
    """The job of each slot; None where the slot is free."""
    return [job if live else None for job, live in zip(some.table.jobs, some.live, strict=True)]


@pytest.mark.slow
def test_slots_stay_on_their_devices(monkeypatch):
    keys = jnp.arange(8.0).reshape(1, 8, 1, 1, 1)
    cache = Cache(KeysValues(keys, keys))
    some = slots.Slots()
    some.assign(Prefilled([], cache, np.ones(8, np.int32), False, 1), 8, 4)
    some.table.live[[1, 4, 7]], some.table.jobs[:] = True, range(8)
    monkeypatch.setattr(slots, "row_shards", lambda: 2)
    assert some.fewest == 4  # one device has two live ones
    some.change_count(4, 4)
    assert jobs_of(some) == [1, None, 4, 7]
    assert some.memory.prompts[0].ravel().tolist() == [1, 0, 4, 7]
    some.change_count(8, 4)
    assert jobs_of(some) == [1, None, None, None, 4, 7, None, None]
    assert some.memory.prompts[0].ravel().tolist() == [1, 0, 1, 0, 4, 7, 4, 7]
