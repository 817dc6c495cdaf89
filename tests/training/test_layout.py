"""Batches are packed, unasked, where that is much less work, and only there."""

import dataclasses

import numpy as np
import pytest

from recjax.config import load_config
from recjax.experience.batch import with_teacher_prompts
from recjax.experience.layout import Layout, padding_waste
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig, DeltaNet
from recjax.training.learner import Learner
from recjax.training.update import recipe_of
from tests.marks import slow
from tests.training.test_packing import gsm8k_like, shares_tokens
from tests.training.test_update import make_batch
from tests.training.tiny_run import TINY

SMALL, TINY_DECODER = DecoderConfig(4096, 256, 1024, 4, 4, 4, 64), DecoderConfig(32, 16, 32, 1, 2, 2, 8)
HYBRID = dataclasses.replace(SMALL, delta=DeltaNet((True, True, True, False), 2, 4, 64, 64, 4))


@pytest.fixture
def config(tmp_path):
    """A function from overrides to the tiny config."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return lambda *overrides: load_config(path, [f"output={tmp_path}", *overrides])


def with_lengths(lengths, prompts=8, group=8, prompt_time=64, time=256):
    batch = make_batch(prompts=prompts, group=group, time=time)
    return batch._replace(
        prompts=np.zeros((prompts, prompt_time), np.int32),
        prompt_mask=np.ones((prompts, prompt_time), bool),
        completion_mask=np.arange(time) < np.array(lengths).reshape(-1, 1),
    )


def packed(config, batch, shape=SMALL, doublings=None, teacher=None, **options):
    learner = Learner()
    learner._config = config
    learner._recipe = recipe_of(config, Decoder(shape, **options), teacher)
    layout = learner.layout(batch, None, doublings)
    assert doublings in (None, layout.doublings)
    assert (layout.parts == 1) if layout.packed else layout.count == config.micro_batches(batch.shape.positions)
    return layout.packed


def test_uneven_completions_are_packed_and_even_ones_are_not(config):
    uneven = with_lengths(np.random.default_rng(0).geometric(0.05, 64).clip(1, 256))
    found = packed(config(), uneven)
    assert padding_waste(uneven, Layout(1, found)) < 0.5 < padding_waste(uneven, Layout())
    # Packed rows hold only the policy's prompts.
    assert packed(config(), with_teacher_prompts(uneven, (), (), 8)) is None
    assert packed(config(), with_lengths([256] * 64)) is None
    # Long prompts with short completions: one prompt for its group is the least work.
    assert packed(config(), with_lengths([24] * 64, 4, 16, 512, 32)) is None


def test_small_batches_stay_padded(config):
    small = with_lengths([2] * 64, prompt_time=8, time=32)
    assert padding_waste(small, Layout()) > 0.7 and packed(config(), small) is None
    uneven = with_lengths([2] * 64)
    assert packed(config(), uneven, shape=TINY_DECODER) is None is not packed(config(), uneven)


def test_an_empty_batch_has_no_packed_micro_batch(config):
    assert packed(config(), with_lengths([0] * 64)).count == 0


@pytest.mark.parametrize("micro_batches", [8, *slow(1, 24, 96)])
def test_packed_micro_batches_are_no_larger_than_padded_ones(config, micro_batches):
    batch = gsm8k_like(np.random.default_rng(1))
    parts = f"training.micro_batch_prompts={96 // micro_batches}"
    found = packed(config("rollout.prompts_per_step=96", parts), batch)
    assert found.tokens[0].size <= 96 * (256 + 8 * 1023) // micro_batches
    assert padding_waste(batch, Layout(1, found)) < 0.2


def test_large_groups_are_packed_into_small_micro_batches(config):
    """A padded micro-batch has a prompt's whole group: here 16 completions of 1,024 tokens."""
    full = with_lengths([1024] * 64, prompts=4, group=16, time=1024)
    of_four = "rollout.prompts_per_step=4"
    assert packed(config(of_four), full).tokens[0].size <= 4096
    assert packed(config(of_four, "training.micro_batch_prompts=1"), full) is None
    assert packed(config(of_four, "algorithm.preset=pairwise_consistency"), full) is None
    shorter = with_lengths([1016] * 64, prompts=4, group=16, time=1016)
    assert packed(config(of_four), shorter) is None


def test_what_an_algorithm_reads_together_stays_padded(config):
    uneven = with_lengths([2] * 64)
    assert packed(config(), uneven) is not None
    assert packed(config("algorithm.preset=pairwise_consistency"), uneven) is None


def test_agent_rows_share_a_prompt_if_shorter(config):
    def row_tokens(prompt, shape=SMALL, doublings=None):
        one = with_lengths([40] * 64, prompts=64, group=1, prompt_time=207, time=207)
        one.prompt_mask[:] = np.arange(207) < prompt
        agents = one._replace(trajectories=np.arange(64), token_mask=one.completion_mask)
        return packed(config("training.micro_batch_prompts=1"), agents, shape, doublings).tokens.shape[-1]

    assert row_tokens(139) > 2 * 207 > row_tokens(1)
    assert row_tokens(139, TINY_DECODER) < row_tokens(139)
    # Later batches have the row length that the first one chose.
    assert row_tokens(1, doublings=1) == row_tokens(139) and row_tokens(139, doublings=0) == row_tokens(1)


def test_a_kernel_of_segments_alone_gets_whole_sequences(config):
    uneven = with_lengths([2] * 64)
    assert shares_tokens(uneven, packed(config(), uneven))
    assert not shares_tokens(uneven, packed(config(), uneven, attention="splash"))


def test_delta_nets_get_whole_sequences(config):
    uneven = with_lengths([2] * 64)
    assert not shares_tokens(uneven, packed(config(), uneven, HYBRID))


@pytest.mark.parametrize(
    "teacher", [Decoder(SMALL), Decoder(HYBRID), Decoder(SMALL, attention="splash")], ids=["dense", "delta", "splash"]
)
def test_a_teacher_reads_shared_beginnings_or_gets_whole_sequences(config, teacher):
    uneven = with_lengths([2] * 64)
    reads = teacher == Decoder(SMALL)
    assert shares_tokens(uneven, packed(config(), uneven, teacher=teacher)) == reads
    # With rows whose prompts are their own, the row length is chosen first.
    alone = uneven._replace(prompts=uneven.prompts.repeat(8, 0), prompt_mask=uneven.prompt_mask.repeat(8, 0))
    alone = alone._replace(trajectories=np.arange(64), token_mask=alone.completion_mask)
    assert shares_tokens(alone, packed(config(), alone, teacher=teacher)) == reads
