"""The engine with delta nets: completions are those of a full forward pass, whatever a slot held before."""

import jax
import numpy as np
import pytest

from recjax.config import load_config
from recjax.hub.tokenizers import character_tokenizer
from recjax.models import unrolling
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig, DeltaNet
from recjax.models.logprobs import Sampling, completion_logprobs
from recjax.rollout import decoding, plan
from recjax.rollout.collecting import row_keys
from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request
from tests.closeness import assert_same_logprobs
from tests.hub.test_families import random_model
from tests.marks import campaign
from tests.tiny import params_of
from tests.training.tiny_run import TINY, train

CONFIG = DecoderConfig(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    norm_epsilon=1e-3,
    tie_embeddings=False,
    gated_attention=True,
    delta=DeltaNet((True, False, True, False), key_heads=1, value_heads=2, key_dim=4, value_dim=6, kernel=4),
)
PLAIN, KEYS = Sampling(), row_keys(jax.random.key(3), 64)
forward = jax.jit(completion_logprobs, static_argnames=("decoder", "sampling", "chunk"))
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Rounds of 5 tokens, caches from 16: a short completion goes through several of them."""
    for name, value in {"ROUND": 5, "SHORTEST_CACHE": 16, "FEWEST_SLOTS": 2}.items():
        monkeypatch.setattr(plan, name, value)


@pytest.fixture(params=["scanned", *campaign("unrolled")])
def engine(request, monkeypatch):
    monkeypatch.setattr(unrolling, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(unrolling, "MOST_WRITTEN_OUT", 4 if request.param == "unrolled" else 3)
    made = Engine(Decoder(CONFIG), (7,), slots=4, prefix_time=6)
    made.replace_weights(params_of(CONFIG), 0)
    return made


def asked(length, key, limit=14, sampling=PLAIN):
    return Request(np.random.default_rng(key).integers(0, 23, length).astype(np.int32), KEYS[key], limit, sampling)


def check(engine, requests, finished):
    """The completions' log-probs are those of a forward pass over their whole sequences."""
    for request, sampled in zip(requests, finished, strict=True):
        arrays = [np.pad(x, (0, 40 - len(x)))[None] for x in (request.prefix, sampled.tokens)]
        masks = [np.arange(40)[None] < len(x) for x in (request.prefix, sampled.tokens)]
        inputs, options = (arrays[0], masks[0], arrays[1], masks[1]), {"sampling": request.sampling, "chunk": 64}
        expected = forward(Decoder(CONFIG), engine._stacked, *inputs, **options).logprobs
        assert_same_logprobs(sampled.logprobs, expected[0, : len(sampled.tokens)], 5e-5)


def run(engine, requests, group_size=None):
    tickets, finished = engine.admit(requests, group_size), engine.drain()
    finished = [finished[ticket] for ticket in tickets]
    check(engine, requests, finished)
    return finished


def more(request, sampled, key, tokens=(1, 2, 3), **changes):
    """A request that continues a completion, as an agent's next turn does."""
    prefix = np.concatenate([request.prefix, sampled.tokens, np.array(tokens, np.int32)])
    return request._replace(prefix=prefix, key=KEYS[key], **changes)


def test_groups_and_requests_of_several_distributions(engine):
    run(engine, [asked(length, 9)._replace(key=KEYS[row]) for length in (3, 6, 1, 4) for row in range(3)], 3)
    run(engine, [asked(1 + row % 6, row, limit=3 + row, sampling=Sampling(0.5 + row % 2)) for row in range(11)])


@pytest.mark.campaign
def test_a_turn_continues_a_slot_only_at_its_end(engine, monkeypatch):
    prefilled = []
    real = decoding.prefill
    monkeypatch.setattr(decoding, "prefill", lambda *a, **k: prefilled.append(a[1:4]) or real(*a, **k))
    first = [asked(5, row) for row in range(3)]
    done = run(engine, first)
    others = run(engine, [asked(6, 40, sampling=Sampling(0.7))])  # the other slots are idle for some rounds
    assert len(others[0].tokens) > 1
    second = [more(request, sampled, 20 + row) for row, (request, sampled) in enumerate(zip(first, done, strict=True))]
    done_second = run(engine, second)
    assert prefilled[-1][2] is not None and prefilled[-1][0].shape[1] < len(second[0].prefix)
    # A turn that follows only a beginning of what the slot holds is run from its own beginning.
    held = len(prefilled)
    run(engine, [more(first[0], done[0], 30)])
    assert all(contents is None for *_, contents in prefilled[held:])
    third = more(second[1], done_second[1], 31)
    run(engine, [third, asked(2, 33)])


@pytest.mark.campaign
def test_cancelled_completions_and_weights_that_change(engine):
    requests = [asked(4, row, limit=30) for row in range(6)]
    tickets = engine.admit(requests)
    finished = engine.step()
    so_far = engine.so_far(tickets[:2])
    engine.cancel(tickets[:2])
    finished |= engine.drain()
    check(engine, requests[2:], [finished[ticket] for ticket in tickets[2:]])
    cut = [so_far[ticket]._replace(tokens=so_far[ticket].tokens) for ticket in tickets[:2] if ticket in so_far]
    run(engine, [more(request, sampled, 50) for request, sampled in zip(requests, cut, strict=False)])
    engine.replace_weights(jax.tree.map(lambda x: 1.1 * x, engine._stacked), 1)
    run(engine, [more(request, sampled, 55) for request, sampled in zip(requests, cut, strict=False)])


@pytest.mark.campaign
def test_requests_continue_no_state_of_a_one_round_batch(engine):
    """Such a batch keeps no keys and values of its completions, so the prompt is held, but its state has moved on."""
    request = asked(4, 1, limit=4)
    run(engine, [request, request._replace(key=KEYS[2])], 2)
    run(engine, [request._replace(prefix=np.append(request.prefix, np.int32(3)), key=KEYS[3])])


def test_a_short_run_learns_and_samples_its_policy(tmp_path):
    """Sampled log-probs, token after token, are those of the update's chunks: the ratio is 1 on-policy."""
    tokenizer = character_tokenizer("0123456789+=")
    (tmp_path / "base").mkdir()
    random_model("qwen3_5", tmp_path / "base", vocab_size=len(tokenizer), initializer_range=0.05)
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "tiny.yaml").write_text(TINY)
    options = ["model.decoder=null", f"model.path={tmp_path / 'base'}", "training.steps=14", "evaluation.every=14"]
    rows = train(load_config(tmp_path / "tiny.yaml", [f"output={tmp_path / 'run'}", *options]))
    accuracies = [row["evaluation/accuracy"] for row in rows if "evaluation/accuracy" in row]
    assert accuracies[0] < 0.6 < accuracies[-1]
    ratios = [row[name] for row in rows for name in ("ratio/q01", "ratio/max") if name in row]
    assert ratios and max(abs(ratio - 1) for ratio in ratios) < 1e-4
