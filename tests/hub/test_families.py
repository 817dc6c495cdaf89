"""Every model family against transformers: logits, log-probabilities, gradients, padding, packing and the cache."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from recjax.config import LoraConfig
from recjax.hub.export import export_model, write_adapters
from recjax.hub.weights import fused_rows, load_adapter, load_pretrained, tensor_names
from recjax.models.decoder import Decoder, logits
from recjax.models.decoder_config import DELTA_PROJECTIONS, PROJECTIONS, DecoderConfig
from recjax.models.logprobs import Sampling, completion_logprobs
from recjax.models.trainable import flatten, is_adapter, unflatten, with_adapters
from tests.closeness import assert_same_logprobs
from tests.marks import campaign_except
from tests.rollout.padded import engine_completions

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 5, "sliding_window": 4, "final_logit_softcapping": 3.0}
MODELS = {
    "llama": {
        "model_type": "llama",
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16},
        "tie_word_embeddings": False,
    },
    "qwen2": {"model_type": "qwen2", "rope_parameters": ROPE, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "rope_parameters": ROPE, "head_dim": 12},
    "mistral": {"model_type": "mistral", "rope_parameters": ROPE, "sliding_window": 4},
    "smollm3": {"model_type": "smollm3", "rope_parameters": ROPE, "no_rope_layers": [1, 0]},
    "gemma2": GEMMA | {"model_type": "gemma2", "rope_parameters": ROPE, "attn_logit_softcapping": 1.5},
    "gemma3_text": GEMMA
    | {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
        },
    },
}
OLMO = {"rope_parameters": ROPE, "tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 0.4, "attention_multiplier": 0.9}
MODELS |= {
    "llama with yarn": {
        "model_type": "llama",
        "rope_parameters": YARN | {"beta_fast": 2.0, "beta_slow": 0.5, "mscale": 0.8, "mscale_all_dim": 0.3},
    },
    "olmo2": OLMO | {"model_type": "olmo2"},
    "olmo3": OLMO
    | {
        "model_type": "olmo3",
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": YARN | {"attention_factor": 1.2},
        },
    },
    "phi3": {"model_type": "phi3", "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    "granite": GRANITE | {"model_type": "granite", "rope_parameters": ROPE, "tie_word_embeddings": True},
}
MODELS |= {
    "internlm3": {"model_type": "internlm3", "rope_parameters": ROPE, "head_dim": 12},
    "iquestcoder": {"model_type": "iquestcoder", "rope_parameters": ROPE, "head_dim": 12},
    "ministral": {
        "model_type": "ministral",
        "rope_parameters": ROPE,
        "head_dim": 12,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "cwm": {
        "model_type": "cwm",
        "bos_token_id": 1,
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16},
        "head_dim": 12,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "seed_oss": {"model_type": "seed_oss", "rope_parameters": ROPE, "head_dim": 12}
    | {"attention_dropout": 0.0, "residual_dropout": 0.0},  # their defaults of 0.1 would act on the model of torch
}
DELTA = {"linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 10, "head_dim": 16}
DELTA |= {"model_type": "qwen3_5_text", "rms_norm_eps": 1e-2, "rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}
MODELS |= {
    "qwen3_5": DELTA
    | {"num_hidden_layers": 4, "full_attention_interval": 2, "linear_num_value_heads": 4, "tie_word_embeddings": True},
    "qwen3_5 with layers in no order": DELTA
    | {
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2, "full_attention"],
        "num_key_value_heads": 1,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": False,
    },
}
QWEN3_MOE = {"model_type": "qwen3_moe", "rope_parameters": ROPE, "head_dim": 12, "moe_intermediate_size": 24}
MODELS |= {
    "qwen3_moe": QWEN3_MOE | {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "qwen3_moe, tied": QWEN3_MOE | {"num_experts": 4, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    "qwen3_moe with dense layers": QWEN3_MOE
    | {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "rope_parameters": ROPE,
        "num_hidden_layers": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
    },
    # Experts between delta nets amplify rounding: with weights of 0.2, transformers in float32 is off by 8e-5 from
    # float64, with weights of 0.1 by up to 1e-5.
    "qwen3_5_moe": DELTA
    | {
        "model_type": "qwen3_5_moe_text",
        "initializer_range": 0.1,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": DELTA
    | {
        "model_type": "qwen3_next",
        "initializer_range": 0.1,
        "num_hidden_layers": 3,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
        "norm_topk_prob": False,
    },
    "olmoe": OLMO | {"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "mixtral": {"model_type": "mixtral", "rope_parameters": ROPE, "num_local_experts": 4, "sliding_window": 4},
}
# Mixtral's names of tensors, and the others' names.
MIXTRAL_NAMES = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
PROMPTS, GROUP = (3, 6), 2  # lengths; completions a prompt
COMPLETIONS = (5, 8, 1, 4)
PLACES = {  # where each sequence starts: (row, column)
    "left": [(0, 14), (1, 11), (2, 15), (3, 12)],
    "right": [(0, 0), (1, 0), (2, 0), (3, 0)],
    "packed": [(0, 1), (0, 10), (1, 0), (1, 7)],
}
# Most of the time here goes into compiling, and little of that is needed.
jit = functools.partial(jax.jit, static_argnums=1, compiler_options={"xla_backend_optimization_level": 0})


# Options of the maths; sizes and tied embeddings change the parameter tree.
OPTIONS = {field.name for field in dataclasses.fields(DecoderConfig) if field.default is not dataclasses.MISSING}
OPTIONS -= {
    "norm_epsilon",
    "tie_embeddings",
    "gated_attention",
    "delta",
    "fused_projections",
    "pre_norms",
    "joint_qk_norm",
    "experts",
}


class Loaded(NamedTuple):
    """A random checkpoint as loaded here, and what transformers computes with it.

    `sequences` are prompts with their completions, `scores` their logits; `gradients` are those of the completions'
    summed log-probability, by Hugging Face name. `folder` holds the checkpoint, `model` is torch's.
    """

    name: str
    config: DecoderConfig
    params: dict
    prompts: list[np.ndarray]
    sequences: list[np.ndarray]
    scores: list[np.ndarray]
    gradients: dict[str, np.ndarray]
    folder: Path
    model: Any


def random_model(name, folder, dtype="float32", **changes):
    """A model of transformers with random weights, saved to the folder."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**(SIZES | MODELS[name] | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-1.0, 1.0)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=campaign_except(MODELS, "gemma3_text", slow=["llama", "qwen3_5", "qwen3_moe"]))
def loaded(request, tmp_path_factory):
    return load_random(request.param, tmp_path_factory.mktemp("model"))


def load_random(name, folder) -> Loaded:
    """A random checkpoint of MODELS, written to the folder."""
    torch, model = pytest.importorskip("torch"), random_model(name, folder)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, SIZES["vocab_size"], length) for length in PROMPTS]
    sequences, scores, total = [], [], 0.0
    for row, length in enumerate(COMPLETIONS):
        prompt = prompts[row // GROUP]
        sequence = np.concatenate([prompt, random.integers(0, SIZES["vocab_size"], length)])
        output = model(input_ids=torch.tensor(sequence)[None]).logits[0]
        chosen = output[:-1].log_softmax(-1).gather(-1, torch.tensor(sequence)[1:, None])
        total += chosen[len(prompt) - 1 :].sum()
        sequences.append(sequence)
        scores.append(output.detach().numpy())
    total.backward()
    gradients = dict(by_tensor({name: parameter.grad.numpy() for name, parameter in model.named_parameters()}))
    config, params = load_pretrained(folder)
    params = jax.tree.map(jnp.asarray, params)
    return Loaded(name, config, params, prompts, sequences, scores, gradients, folder, model)


def by_tensor(gradients):
    """The gradients by the names of tensors in the folder; transformers joins experts' tensors when it loads them."""
    for name, gradient in gradients.items():
        place, _, kind = name.rpartition(".experts.")
        if not place:
            yield name, gradient
            continue
        halves = np.split(gradient, 2, axis=1) if kind == "gate_up_proj" else [gradient]
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for part, half in zip(names, halves, strict=True):
            yield from ((f"{place}.experts.{number}.{part}.weight", one) for number, one in enumerate(half))


def laid_out(sequences, layout, ends=True):
    """The sequences in one batch [4, 22] with junk around them; its mask holds sequence ends, or says what is real."""
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (4, 22))
    positions, mask, counted = (np.zeros(tokens.shape, int) for _ in range(3))
    for index, (sequence, (row, start)) in enumerate(zip(sequences, PLACES[layout], strict=True)):
        here = slice(start, start + len(sequence))
        tokens[row, here], positions[row, here], mask[row, here] = sequence, np.arange(len(sequence)), here.stop
        counted[row, start + PROMPTS[index // GROUP] : here.stop] = 1
    return tokens, positions, mask if ends else mask > 0, counted[:, 1:] > 0


@jit
@functools.partial(jax.value_and_grad, has_aux=True)
def summed_logprob(params, config, tokens, positions, mask, counted):
    hidden, _ = Decoder(config).apply({"params": params}, tokens, positions, mask)
    scores = logits(config, params, hidden)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(scores[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.where(counted, logprobs, 0.0).sum(), (scores, logprobs)


@jit
def compiled_forward(params, config, tokens, positions, mask):
    return logits(config, params, Decoder(config).apply({"params": params}, tokens, positions, mask)[0])


def forward(*arguments):
    """Logits as a NumPy array, of which an index is no program."""
    return np.asarray(compiled_forward(*arguments))


@jit
def shared(params, config, *arrays):
    return completion_logprobs(Decoder(config), params, *arrays, sampling=Sampling(), chunk=8)[0]


def drawn(params, config, prompts, mask, key, sampling=Sampling()):  # noqa: B008
    options = {"group_size": GROUP, "max_tokens": max(COMPLETIONS), "sampling": sampling, "stop_ids": (39,)}
    return engine_completions(Decoder(config), params, prompts, mask, key, **options)


def logprobs_of(scores, sequence):
    return np.take_along_axis(log_softmax(scores[:-1], axis=-1), sequence[1:, None], axis=-1)[:, 0]


def gradient_error(loaded, gradients):
    """The largest difference to torch's, each tensor in units of its own largest gradient."""
    worst, rows = 0.0, fused_rows(loaded.config)
    for path, names in tensor_names(loaded.config).items():
        gradient = functools.reduce(lambda tree, key: tree[key], path.split("/"), gradients)
        if len(names) > loaded.config.num_layers:
            gradient = gradient.reshape(len(names), *gradient.shape[2:])
        for layer, name in enumerate(names):
            part = gradient[layer] if path.startswith("layers/") else gradient
            name = re.sub("|".join(MIXTRAL_NAMES), lambda match: MIXTRAL_NAMES[match[0]], name)
            expected = loaded.gradients[name][rows[path].rows if path in rows else ...]
            part = part.T if path.endswith("/kernel") else part
            worst = max(worst, np.abs(part - expected).max() / np.abs(expected).max())
    return worst


def layout_errors(loaded, layout):
    """Largest differences from transformers in a layout: of logits, log-probs and, relatively, gradients."""
    batch = laid_out(loaded.sequences, layout)
    (_, (scores, logprobs)), gradients = jax.device_get(summed_logprob(loaded.params, loaded.config, *batch))
    logit_error = logprob_error = 0.0
    for index, (row, start) in enumerate(PLACES[layout]):
        sequence, expected = loaded.sequences[index], loaded.scores[index]
        stop = start + len(sequence)
        assert expected.std() > 0.5, "logits too flat to tell models apart"
        logit_error = max(logit_error, np.abs(scores[row, start:stop] - expected).max())
        difference = logprobs[row, start : stop - 1] - logprobs_of(expected, sequence)
        logprob_error = max(logprob_error, np.abs(difference).max())
    return logit_error, logprob_error, gradient_error(loaded, gradients)


@pytest.mark.parametrize("layout", PLACES)
def test_logits_logprobs_and_gradients_are_those_of_transformers(loaded, layout):
    assert max(layout_errors(loaded, layout)) < 1e-4


def padded(rows):
    """Rows of several lengths as one right-padded array, with its mask."""
    mask = np.arange(max(map(len, rows))) < np.array([len(row) for row in rows])[:, None]
    tokens = np.full(mask.shape, 7)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask


def shared_error(loaded):
    """Largest difference of log-probs from transformers where completions share a prompt that runs once."""
    completions = [sequence[PROMPTS[row // GROUP] :] for row, sequence in enumerate(loaded.sequences)]
    logprobs = np.asarray(shared(loaded.params, loaded.config, *padded(loaded.prompts), *padded(completions)))
    worst = 0.0
    for row, sequence in enumerate(loaded.sequences):
        expected = logprobs_of(loaded.scores[row], sequence)[PROMPTS[row // GROUP] - 1 :]
        worst = max(worst, np.abs(logprobs[row, : len(expected)] - expected).max())
    return worst


def test_completions_that_share_a_prompt(loaded):
    assert shared_error(loaded) < 1e-4


def torch_scores(model, tokens):
    """Logits of a torch model for one sequence or several."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model(input_ids=torch.tensor(np.atleast_2d(tokens))).logits.numpy()


def our_scores(config, params, tokens):
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return forward(params, config, tokens, positions, np.ones(tokens.shape, bool))


def greedy_error(loaded, _):
    """By how much the engine's greedy tokens miss transformers' largest logits; 0 for equal tokens."""
    draws = drawn(loaded.params, loaded.config, *padded(loaded.prompts), jax.random.key(0), Sampling(temperature=0.0))
    worst = 0.0
    for row, (tokens, mask) in enumerate(zip(draws.tokens, draws.mask, strict=True)):
        prompt = loaded.prompts[row // GROUP]
        scores = torch_scores(loaded.model, np.concatenate([prompt, tokens[mask]]))[0, len(prompt) - 1 : -1]
        worst = max(worst, (scores.max(-1) - scores[np.arange(mask.sum()), tokens[mask]]).max())
    return worst


def export_error(loaded, folder):
    """Largest difference of logits after recjax wrote the model and transformers loaded it, from both originals."""
    transformers, tokens = pytest.importorskip("transformers"), np.stack([loaded.sequences[0], loaded.sequences[3][:8]])
    export_model(folder / "exported", loaded.config, loaded.params, loaded.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported", attn_implementation="eager")
    originals = our_scores(loaded.config, loaded.params, tokens), torch_scores(loaded.model, tokens)
    return np.abs(torch_scores(model, tokens) - np.stack(originals)).max()


def adapter_error(loaded, folder):
    """Largest difference of logits after recjax wrote adapters and PEFT loaded them, and after recjax read them."""
    peft, tokens = pytest.importorskip("peft"), np.stack([loaded.sequences[0], loaded.sequences[3][:8]])
    kernels = [path.split("/")[-2] for path in flatten(loaded.params) if path.endswith("/kernel")]
    targets = [target for target in (*PROJECTIONS, *DELTA_PROJECTIONS) if target in kernels]
    if (experts := loaded.config.experts) and (experts.dense or experts.shared_size):
        refused = LoraConfig(rank=3, alpha=5.0, targets=["query", "up"])
        decoder, params = with_adapters(Decoder(loaded.config), loaded.params, refused, jax.random.key(0))
        with pytest.raises(ValueError, match="PEFT reads no adapters of experts .* export the merged model instead"):
            write_adapters(folder, decoder.config, params, str(loaded.folder))
        targets = [target for target in targets if target not in ("gate", "up", "down")]
    lora = LoraConfig(rank=3, alpha=5.0, targets=targets)
    decoder, params = with_adapters(Decoder(loaded.config), loaded.params, lora, jax.random.key(0))
    random, leaves = np.random.default_rng(0), flatten(params)
    noise = {path: random.normal(0, 0.1, x.shape).astype(np.float32) for path, x in leaves.items() if is_adapter(path)}
    params = unflatten(leaves | noise)
    ours = our_scores(decoder.config, params, tokens)
    assert np.abs(ours - our_scores(loaded.config, loaded.params, tokens)).max() > 0.1
    (folder / "adapters").mkdir()
    write_adapters(folder / "adapters", decoder.config, params, str(loaded.folder))
    again, read = load_adapter(folder / "adapters", loaded.config)
    assert again == lora
    jax.tree.map(np.testing.assert_array_equal, flatten(read), noise)
    # A model of its own, as PEFT changes the modules of its base.
    base = type(loaded.model).from_pretrained(loaded.folder, attn_implementation="eager")
    return np.abs(torch_scores(peft.PeftModel.from_pretrained(base, folder / "adapters"), tokens) - ours).max()


@pytest.mark.slow
@pytest.mark.parametrize("error", [greedy_error, export_error, adapter_error])
def test_engine_and_files_give_what_transformers_and_peft_compute(loaded, error, tmp_path):
    assert error(loaded, tmp_path) < 1e-4


@pytest.mark.slow
def test_decoding_with_the_cache_equals_a_full_forward_pass(loaded):
    draws = drawn(loaded.params, loaded.config, *padded(loaded.prompts), jax.random.key(0))
    assert draws.mask.sum() > 16, "too few tokens to test the cache with"
    completions = [tokens[mask] for tokens, mask in zip(draws.tokens, draws.mask, strict=True)]
    sequences = [np.concatenate([loaded.prompts[row // GROUP], tokens]) for row, tokens in enumerate(completions)]
    scores = forward(loaded.params, loaded.config, *laid_out(sequences, "right", ends=False)[:3])
    for row, sequence in enumerate(sequences):
        expected = logprobs_of(scores[row, : len(sequence)], sequence)[PROMPTS[row // GROUP] - 1 :]
        assert_same_logprobs(draws.logprobs[row, : len(expected)], expected, 5e-5)


@pytest.mark.slow
def test_greedy_completions_are_those_of_transformers(loaded, tmp_path):
    torch = pytest.importorskip("torch")
    model = random_model(loaded.name, tmp_path).eval()
    options = {"group_size": 1, "max_tokens": 12, "sampling": Sampling(0.0), "stop_ids": (39,)}
    draws = engine_completions(
        Decoder(loaded.config), loaded.params, *padded(loaded.prompts), jax.random.key(0), **options
    )
    for prompt, tokens, mask in zip(loaded.prompts, draws.tokens, draws.mask, strict=True):
        expected = model.generate(torch.tensor(prompt)[None], max_new_tokens=12, do_sample=False, eos_token_id=39)
        np.testing.assert_array_equal(tokens[mask], expected[0, len(prompt) :].numpy())


@pytest.mark.slow
def test_every_option_matters(loaded):
    """Each option that the family sets changes the logits when it is put back to its default."""
    tokens, positions, mask, _ = laid_out(loaded.sequences, "right", ends=False)
    scores = forward(loaded.params, loaded.config, tokens, positions, mask)
    options = [field for field in dataclasses.fields(DecoderConfig) if field.name in OPTIONS]
    for option in options:
        if getattr(loaded.config, option.name) != option.default:
            config = dataclasses.replace(loaded.config, **{option.name: option.default})
            change = np.abs(forward(loaded.params, config, tokens, positions, mask) - scores)[mask].max()
            assert change > 0.03, f"{option.name}: {change}"
