"""Kernels are compared with plain attention before the first update."""

import contextlib
import functools
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from recjax.experience.layout import Layout
from recjax.experience.packing import RowShape, pack
from recjax.hub import policy
from recjax.logs.metrics import read_metrics
from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig
from recjax.training import learner
from recjax.training.kernel_check import check_kernels
from tests.marks import slow_except
from tests.training.test_update import make_batch
from tests.training.tiny_run import train

CONFIG = DecoderConfig(11, 16, 32, 2, 2, 1, 8)
RIGHT = jax.nn.dot_product_attention


def run_here(monkeypatch, change=lambda options: options):
    """Runs the calls for cuDNN on the CPU, with options that a function changes."""

    def attention(*arrays, implementation, **options):
        return RIGHT(*arrays, implementation="xla", **change(options))

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)


# Each fault has kernels that no other test here compiles.
WRONG = {
    "scale": ({"attention": "cudnn"}, lambda given: given | {"scale": 2 * given["scale"]}),
    "window": ({"joined_projections": True}, lambda given: given | {"local_window_size": (2, 0)}),
    "no mask": (
        {"attention": "cudnn", "joined_projections": True},
        lambda given: given | {"is_causal": False, "mask": None},
    ),
}


@functools.cache
def params():
    """Parameters whose attention is far from uniform."""
    return jax.tree.map(lambda leaf: 3 * leaf, init_params(CONFIG, jax.random.key(0)))


@functools.cache
def layouts():
    return {"padded": Layout(), "packed": Layout(1, pack(make_batch(time=7), RowShape(4, 24)))}


def check(layout, dtype=jnp.float32, batch=None, **options):
    decoder = Decoder(CONFIG, dtype, "full", True, **({"attention": "cudnn_lengths"} | options))
    return check_kernels(decoder, params(), make_batch(time=7) if batch is None else batch, layouts()[layout], 64)


@pytest.mark.parametrize("dtype", slow_except([jnp.float32, jnp.bfloat16], jnp.float32))
@pytest.mark.parametrize("layout", slow_except(layouts(), "packed"))
def test_a_right_kernel_passes(monkeypatch, caplog, layout, dtype):
    run_here(monkeypatch)
    with caplog.at_level(logging.INFO, "recjax"):
        assert check(layout, dtype)
    assert "model.attention = 'cudnn_lengths': log-probs are" in caplog.text


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("layout", slow_except(layouts(), "packed"))
def test_a_wrong_kernel_is_refused(monkeypatch, layout, fault):
    options, change = WRONG[fault]
    run_here(monkeypatch, change)
    remedy = "set model.attention=plain" + " and model.joined_projections=false" * ("joined_projections" in options)
    with pytest.raises(ValueError, match=f"log-probs are .* nats from exact ones .* wrong on cpu; {remedy}$"):
        check(layout, **options)


def test_a_batch_without_tokens_checks_nothing():
    batch = make_batch(time=7)
    assert not check("padded", batch=batch._replace(completion_mask=batch.completion_mask & False))


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "scale"), [("cudnn_lengths", 1), ("cudnn", -100)])
def test_a_run_with_a_wrong_kernel_makes_no_update(monkeypatch, tiny, kernel, scale):
    run_here(monkeypatch, lambda given: given | {"scale": scale * given["scale"]})
    monkeypatch.setattr(policy, "attention_kernel", lambda *_: kernel)
    checked = []
    monkeypatch.setattr(learner, "check_kernels", lambda *given: checked.append(given) or check_kernels(*given))
    config = tiny("run", "training.steps=2", "evaluation.every=0")
    is_right = scale == 1
    with contextlib.nullcontext() if is_right else pytest.raises(ValueError, match="The kernel is wrong on cpu"):
        train(config)
    rows = read_metrics(Path(config.output) / "metrics.jsonl")
    assert max(row["step"] for row in rows) == 2 * is_right
    assert len(checked) == 1
