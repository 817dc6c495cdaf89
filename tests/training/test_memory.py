"""What compiled programs hold: no second copy of the state, and scores of the vocabulary for a chunk at a time."""

import functools
import math
import re

import jax
import numpy as np
import optax
import pytest

from recjax.algorithms.presets import build_algorithm
from recjax.experience.layout import Layout
from recjax.experience.packing import RowShape, pack
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.models.layer import KeysValues
from recjax.models.logprobs import Sampling
from recjax.rollout.decoding import RoundOptions, SlotState, decode
from recjax.rollout.keys_values import Memory
from recjax.training.update import Recipe, TrainState, UpdateContext, update
from tests.tiny import params_of
from tests.training.test_update import make_batch

pytestmark = pytest.mark.campaign

# No other size is 1009, nor a multiple of it.
CONFIG = DecoderConfig(1009, 16, 32, 2, 2, 1, 8)
DECODER = Decoder(CONFIG, remat="full")
OPTIMIZER = optax.adamw(1e-3)
CHUNK, TIME, PROMPTS, GROUP = 32, 40, 4, 3
BATCH = make_batch(prompts=PROMPTS, group=GROUP, time=TIME)


@functools.cache
def initial():
    """The state before the update."""
    params = params_of(CONFIG)
    return TrainState(params, OPTIMIZER.init(params))


@functools.cache
def compiled_update(packed: bool, chunk: int = CHUNK):
    """The program of an update with a KL to a reference and an entropy bonus."""
    overrides = {"reference_kl": {"coefficient": 0.1}, "entropy": {"coefficient": 0.1}}
    return update.lower(
        initial(),
        BATCH,
        Layout(1, pack(BATCH, RowShape(3, 64))) if packed else Layout(2),
        UpdateContext({}, jax.random.key(0), reference_params=initial().params),
        recipe=Recipe(DECODER, build_algorithm("grpo", overrides), OPTIMIZER, Sampling(0.9), chunk),
    ).compile()


def most_rows_of_scores(compiled) -> int:
    """Of all arrays in a program with a vocabulary's axis, whatever their type: how often the most hold it."""
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", compiled.as_text())}
    rows = [math.prod(shape) // CONFIG.vocab_size for shape in shapes if math.prod(shape) % CONFIG.vocab_size == 0]
    assert rows, "the program has no scores at all"
    return max(rows)


@pytest.mark.parametrize("packed", [True, pytest.param(False)])
def test_the_state_is_updated_in_its_own_memory(packed):
    memory = compiled_update(packed).memory_analysis()
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(initial()))
    assert memory.alias_size_in_bytes == state
    of_tokens = (3 * 4 + 1) * BATCH.completions.size + 4 * len(BATCH.rewards)  # TokenResults
    metrics = memory.output_size_in_bytes - memory.alias_size_in_bytes - of_tokens
    assert 0 < metrics < 2048, "beside the state and what was made of each token, only metrics come out"


@pytest.mark.parametrize("packed", [False, True])
def test_an_update_holds_the_scores_of_one_chunk(packed):
    assert most_rows_of_scores(compiled_update(packed)) == CHUNK
    # Weights, their gradients and those of a micro-batch are of the vocabulary too, and smaller.
    assert CHUNK > CONFIG.hidden_size


def test_update_needs_less_memory_than_all_scores():
    chunked = compiled_update(True).memory_analysis().temp_size_in_bytes
    everything = compiled_update(True, chunk=3 * 64)
    assert most_rows_of_scores(everything) == 3 * 64
    assert chunked < everything.memory_analysis().temp_size_in_bytes - (3 * 64 - CHUNK) * CONFIG.vocab_size * 4


def test_sampling_holds_the_scores_of_one_token_a_row():
    rows = PROMPTS * GROUP
    keys, counts = jax.random.key_data(jax.random.split(jax.random.key(0), rows)), np.ones(rows, np.int32)
    options = {"decoder": DECODER, "options": RoundOptions(Sampling(0.9), (1,), TIME - 1)}
    prompts, later = (
        KeysValues(*[jax.ShapeDtypeStruct((2, count, 1, time, 8), np.float32)] * 2)
        for count, time in ((PROMPTS, BATCH.prompts.shape[1]), (rows, TIME))
    )
    state = SlotState(counts > 0, *[counts] * 5, keys)
    compiled = decode.lower(initial().params, Memory(prompts, later), state, np.int32(0), **options).compile()
    # As many, or a weight's number of them.
    assert most_rows_of_scores(compiled) == max(rows, CONFIG.hidden_size)
    assert compiled.memory_analysis().temp_size_in_bytes < PROMPTS * GROUP * TIME * CONFIG.vocab_size * 4
