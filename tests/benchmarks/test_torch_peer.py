"""The peer in plain torch computes what transformers and recjax compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from benchmarks.inputs import write_inputs  # noqa: E402
from benchmarks.shapes import SHAPES  # noqa: E402
from benchmarks.workers import torch_decode, torch_grpo, torch_llama  # noqa: E402
from recjax.algorithms.advantages import group_normalized_advantages  # noqa: E402
from tests.closeness import assert_close, assert_same_logprobs  # noqa: E402

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("inputs")
    write_inputs(place, SHAPES["toy"], "")
    return place


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


@pytest.fixture(scope="module")
def batch(folder):
    with np.load(folder / "batch.npz") as read:
        return {name: torch.tensor(array) for name, array in read.items()}


def test_prompts_are_the_same_ids_as_text(folder, batch):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = [tokenizer.decode(row) for row in batch["prompts"]]
    assert tokenizer(texts)["input_ids"] == batch["prompts"].tolist()
    assert tokenizer.eos_token_id == SHAPES["toy"].model.vocabulary


@pytest.mark.parametrize("shared", [False, True])
def test_greedy_tokens_are_those_of_transformers(folder, model, batch, shared):
    sizes, weights = torch_llama.load(folder / "model", torch.device("cpu"))
    prompts = batch["prompts"].long()
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=8, do_sample=False)
    expected = expected[:, 8:].repeat_interleave(3, 0)
    # A token that is drawn stops its row, and those after it are masked.
    stop = int(expected[0, 2])
    ended = (expected == stop).cumsum(1) - (expected == stop).int() > 0
    tokens, logprobs, mask = torch_decode.generate(sizes, weights, prompts, 3, 8, [stop], shared, greedy=True)
    torch.testing.assert_close(mask, ~ended)
    torch.testing.assert_close(tokens, expected * ~ended)
    rows = torch.cat([prompts.repeat_interleave(3, 0), expected], 1)
    wanted = model(rows).logits[:, 7:-1].log_softmax(-1).gather(2, expected[..., None])[..., 0]
    assert_same_logprobs(logprobs.numpy(), (wanted * ~ended).detach().numpy())


def test_rows_end_at_their_first_stop_and_stay_ended(folder, batch):
    sizes, weights = torch_llama.load(folder / "model", torch.device("cpu"))
    torch.manual_seed(0)
    stops = list(range(0, 64, 4))
    tokens, logprobs, mask = torch_decode.generate(sizes, weights, batch["prompts"].long(), 8, 12, stops, True)
    lengths = mask.sum(1)
    torch.testing.assert_close(mask, torch.arange(12) < lengths[:, None])
    stopped = torch.isin(tokens, torch.tensor(stops)) & mask
    last = stopped.gather(1, lengths[:, None] - 1)[:, 0]
    assert (stopped.sum(1) == last).all() and (last | (lengths == 12)).all() and len(lengths.unique()) > 3
    assert (logprobs[mask] < 0).all() and (tokens[~mask] == 0).all() and (logprobs[~mask] == 0).all()


@pytest.mark.parametrize("shared", [False, True])
def test_logprobs_and_gradients_are_those_of_transformers(folder, model, batch, shared):
    sizes, weights = torch_llama.load(folder / "model", torch.device("cpu"))
    prompts, completions = batch["prompts"].long(), batch["completions"].long()
    hidden = torch_llama.completion_hidden(sizes, weights, prompts, completions, shared)
    found = torch_grpo.token_logprobs(lambda x: torch_llama.scores(weights, x), hidden, completions, 64)
    rows = torch.cat([prompts.repeat_interleave(4, 0), completions], 1)
    wanted = model(rows).logits[:, 7:-1].log_softmax(-1).gather(2, completions[..., None])[..., 0]
    assert_same_logprobs(found.detach().numpy(), wanted.detach().numpy())
    (gradient,) = torch.autograd.grad((found * batch["noise"]).sum(), [weights["1.down"]])
    (expected,) = torch.autograd.grad((wanted * batch["noise"]).sum(), [model.model.layers[1].mlp.down_proj.weight])
    assert_close(gradient.numpy(), expected.numpy())


def test_chunks_of_scores_change_nothing(batch, monkeypatch):
    hidden, head = torch.randn(8, 8, 4, requires_grad=True), torch.randn(64, 4)
    tokens = batch["completions"].long()
    results = []
    for scores in (1 << 28, 64 * 5):
        monkeypatch.setattr(torch_grpo, "CHUNK_SCORES", scores)
        found = torch_grpo.token_logprobs(lambda x: x @ head.T, hidden, tokens, 64)
        results.append((found, *torch.autograd.grad(found.square().sum(), hidden)))
    for one, other in zip(*results, strict=True):
        assert_close(one.detach().numpy(), other.detach().numpy(), 1e-5)


def test_both_forms_of_the_loss_have_one_gradient(batch):
    behavior = torch.full((8, 8), -4.0)
    advantage = torch_grpo.advantages(batch["rewards"], 4)
    expected = group_normalized_advantages(jnp.array(batch["rewards"]), jnp.repeat(jnp.arange(2), 4), jnp.ones(8, bool))
    assert_close(advantage.numpy(), jax.device_get(expected), 1e-5)
    logprobs = (behavior + 3 * batch["noise"]).requires_grad_()
    mask = batch["noise"] < 0.1
    gradients = [
        torch.autograd.grad(loss(logprobs, behavior, advantage, mask), logprobs)[0]
        for loss in (torch_grpo.grpo_loss, torch_grpo.weighted_log_likelihood)
    ]
    assert_close(*(gradient.numpy() for gradient in gradients), 1e-5)
    assert (gradients[0][mask] == 0).any() and (gradients[0][mask] != 0).any() and (gradients[0][~mask] == 0).all()


def test_drawing_follows_the_softmax():
    torch.manual_seed(0)
    scores = torch.tensor([0.0, 1.0, 2.0]).expand(20_000, 3)
    tokens, logprobs = torch_grpo.drawn_tokens(scores)
    shares = torch.bincount(tokens) / len(tokens)
    torch.testing.assert_close(shares, scores[0].softmax(0), atol=0.015, rtol=0)
    assert_same_logprobs(logprobs.numpy(), scores.log_softmax(-1).gather(1, tokens[:, None])[:, 0].numpy())
