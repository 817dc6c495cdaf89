"""Export: in → out → in gives every bit back, transformers loads what was written, and nothing half is left behind."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from recjax.hub.export import export_model, write_base
from recjax.hub.tokenizers import character_tokenizer, listed_eos, load_tokenizer, model_folder
from recjax.hub.weights import load_pretrained
from recjax.models.decoder_config import DecoderConfig
from tests.closeness import assert_close
from tests.hub.test_families import MODELS, SIZES, forward, random_model, torch_scores
from tests.marks import campaign_except, slow, slow_except
from tests.tiny import params_of

TOKENS = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 9))
FAMILIES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "gemma3": ("gemma3_text", {}),
    "olmo3": ("olmo3", {}),
    "phi3": ("phi3", {}),
    "granite": ("granite", {}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5, untied": ("qwen3_5 with layers in no order", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "olmoe": ("olmoe", {}),
    "mixtral": ("mixtral", {}),
}


def written_tensors(folder):
    """Every tensor of a folder, by name, without this package's table; and their dtypes."""
    tensors, dtypes = {}, set()
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        with safe_open(file, framework="numpy") as opened:
            dtypes |= {opened.get_slice(name).get_dtype() for name in opened.keys()}
    return tensors, dtypes


def torch_model(folder):
    """The folder's model in torch, its weights in the dtype that they are stored in."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def torch_logits(folder, tokens=TOKENS):
    """The model and its logits in float32: torch's products in bfloat16 and float16 end the process on some CPUs."""
    torch, model = pytest.importorskip("torch"), torch_model(folder).float()
    with torch.no_grad():
        return model, model(input_ids=torch.tensor(tokens)).logits.numpy()


def our_logits(config, params, tokens=TOKENS):
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return forward(jax.tree.map(jnp.asarray, params), config, tokens, positions, np.ones(tokens.shape, bool))


@pytest.fixture(scope="module", params=campaign_except(FAMILIES, "llama, tied", slow=["gemma3", "qwen3_moe"]))
def base(request, tmp_path_factory):
    """A random checkpoint of a family, and what it holds."""
    folder = tmp_path_factory.mktemp("base")
    name, changes = FAMILIES[request.param]
    random_model(name, folder, **changes)
    return folder, *load_pretrained(folder)


def test_exports_are_bit_equal_and_transformers_agrees(base, tmp_path):
    folder, config, params = base
    export_model(tmp_path / "out", config, params, folder)
    again, params_again = load_pretrained(tmp_path / "out")
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, params_again, params)
    (theirs, _), (ours, dtypes) = written_tensors(folder), written_tensors(tmp_path / "out")
    assert ours.keys() == theirs.keys() and dtypes == {"F32"}
    assert ("lm_head.weight" in ours) != config.tie_embeddings
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    scores = our_logits(config, params)
    assert scores.std() > 0.5
    assert_close(torch_logits(tmp_path / "out")[1], scores)


def test_exports_keep_config_fields_and_companion_files(base, tmp_path):
    original, config, params = base
    folder = Path(shutil.copytree(original, tmp_path / "base"))
    files = {
        "generation_config.json": '{"eos_token_id": [3, 5], "temperature": 0.6}',
        "tokenizer.json": "as it was",
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/rag.jinja": "{{ documents }}",
        "LICENSE.txt": "terms",
        "pytorch_model.bin.index.json": "of weights that stay behind",
        "README.md": "stays behind",
        "adapter_config.json": '{"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}',
        "trainer_state.json": "{}",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    export_model(tmp_path / "out", config, params, folder, "bfloat16")
    kept = {str(f.relative_to(tmp_path / "out")) for f in (tmp_path / "out").rglob("*") if f.is_file()}
    assert kept == {*list(files)[:5], "config.json", "model.safetensors", "manifest.json"}
    for name in list(files)[:5]:
        assert (tmp_path / "out" / name).read_text() == files[name]
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out"))
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == {"dtype"}
    assert after["dtype"] == "bfloat16" and list(after) == list(before)


def test_exports_skip_adapter_files_beside_merged_weights(base, tmp_path):
    original, config, params = base
    folder = Path(shutil.copytree(original, tmp_path / "base"))
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}')
    export_model(tmp_path / "out", config, params, folder)
    assert_close(torch_logits(tmp_path / "out")[1], our_logits(config, params))


@pytest.mark.parametrize("family", ["llama", *slow("gemma3_text")])
@pytest.mark.parametrize("dtype", [*slow("float32"), "bfloat16"])
def test_exports_keep_a_head_wrongly_marked_as_tied(family, dtype, tmp_path):
    random_model(family, tmp_path / "base", tie_word_embeddings=False)
    said = json.loads((tmp_path / "base" / "config.json").read_text())
    for name, fields in {"said": said | {"tie_word_embeddings": True}, "unsaid": dict(said)}.items():
        if name == "unsaid":
            del fields["tie_word_embeddings"]
        folder, out = Path(shutil.copytree(tmp_path / "base", tmp_path / name)), tmp_path / f"{name}-out"
        (folder / "config.json").write_text(json.dumps(fields))
        config, params = load_pretrained(folder)
        assert not config.tie_embeddings
        theirs, ours = torch_logits(folder)[1], our_logits(config, params)
        assert_close(ours, theirs)
        export_model(out, config, params, folder, dtype)
        assert json.loads((out / "config.json").read_text()).get("tie_word_embeddings", False) is False
        model, scores = torch_logits(out)
        assert model.lm_head.weight is not model.model.embed_tokens.weight
        assert_close(scores, ours, 1e-4 if dtype == "float32" else 0.2)


@pytest.fixture
def small(tmp_path):
    """A decoder made from scratch, its parameters on the host, and the folder of what goes with them."""
    tokenizer = character_tokenizer("0123456789+= ")
    config = DecoderConfig(len(tokenizer), 16, 24, 2, 4, 2, 4, tie_embeddings=False)
    params = jax.device_get(params_of(config))
    (tmp_path / "base").mkdir()
    write_base(tmp_path / "base", config, tokenizer, (1, 12))
    return tmp_path / "base", config, params


def test_a_decoder_from_scratch_is_exported_as_llama(small, tmp_path):
    base, config, params = small
    export_model(tmp_path / "out", config, params, base)
    model, scores = torch_logits(tmp_path / "out", TOKENS % config.vocab_size)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert_close(scores, our_logits(config, params, TOKENS % config.vocab_size))
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == ([1, 12], 0)
    assert (model.config.eos_token_id, model.config.bos_token_id) == (0, None)
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast", "the name that transformers 4 and 5 know"
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer("1 + 1=")["input_ids"] == character_tokenizer("0123456789+= ")("1 + 1=")["input_ids"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0)


STOPS = {  # generation_config.json and config.json's eos_token_id in the base → eos_token_id in the export
    "listed": ({"eos_token_id": [1, 5]}, 0, [1, 5]),
    "one more": ({"eos_token_id": 0, "temperature": 0.6}, 3, [0, 1, 5]),
    "none": ({"temperature": 0.6}, 3, [1, 5]),
    "no file": (None, 3, [3, 1, 5]),
}


@pytest.mark.parametrize("name", STOPS)
def test_stop_ids_join_the_exported_end_of_sequence_ids(small, tmp_path, name):
    base, config, params = small
    generation, of_config, expected = STOPS[name]
    (base / "generation_config.json").unlink()
    if generation is not None:
        (base / "generation_config.json").write_text(json.dumps(generation))
    fields = json.loads((base / "config.json").read_text()) | {"eos_token_id": of_config}
    (base / "config.json").write_text(json.dumps(fields))
    export_model(tmp_path / "out", config, params, base, stop_ids=(1, 5, config.vocab_size))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    if generation is None:
        assert written == fields | {"eos_token_id": expected} and not list((tmp_path / "out").glob("generation*"))
    else:
        generation |= {"eos_token_id": expected}
        assert written == fields
        assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == generation
    assert listed_eos(tmp_path / "out") == expected


def test_what_llama_cannot_say_is_refused(tmp_path):
    tokenizer = character_tokenizer("01")
    with pytest.raises(ValueError, match="qk_norm=True.* is no plain Llama decoder"):
        write_base(tmp_path, DecoderConfig(len(tokenizer), 16, 24, 2, 4, 2, 4, qk_norm=True), tokenizer, (1,))


DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@pytest.mark.parametrize("dtype", slow_except(DTYPES, "bfloat16"))
def test_weights_get_the_dtype_asked_for_and_keep_it(small, tmp_path, dtype):
    code = DTYPES[dtype]
    base, config, params = small
    export_model(tmp_path / "once", config, params, base, dtype)
    rounded = load_pretrained(tmp_path / "once")[1]
    expected = jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf, dtype), np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, rounded, expected)
    export_model(tmp_path / "twice", config, rounded, tmp_path / "once", dtype)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()
    assert written_tensors(tmp_path / "once")[1] == {code}
    assert str(torch_model(tmp_path / "once").dtype) == f"torch.{dtype}"
    logits = torch_logits(tmp_path / "once", TOKENS % config.vocab_size)[1]
    assert_close(our_logits(config, rounded, TOKENS % config.vocab_size), logits)


def test_shards_hold_what_one_file_holds(small, tmp_path):
    base, config, params = small
    export_model(tmp_path / "one", config, params, base)
    export_model(tmp_path / "many", config, params, base, max_shard_bytes=4000)
    names = sorted(file.name for file in (tmp_path / "many").glob("model*"))
    count = len(names) - 1
    shards = [f"model-{shard:05d}-of-{count:05d}.safetensors" for shard in range(1, count + 1)]
    assert names == [*shards, "model.safetensors.index.json"] and count > 3
    (single, _), (sharded, _) = written_tensors(tmp_path / "one"), written_tensors(tmp_path / "many")
    assert single.keys() == sharded.keys()
    for name, tensor in single.items():
        np.testing.assert_array_equal(sharded[name], tensor)
    for shard in shards:
        tensors = load_file(tmp_path / "many" / shard)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 4000
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(tmp_path / "many")[1], params)
    np.testing.assert_array_equal(
        *(torch_logits(tmp_path / name, TOKENS % config.vocab_size)[1] for name in ("one", "many"))
    )
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in single.values())


def test_refusals_leave_nothing_behind(small, tmp_path):
    base, config, params = small
    out = tmp_path / "out"
    out.mkdir()
    export_model(out, config, params, base)  # an empty folder will do
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="out': is not empty; name a new folder"):
        export_model(out, config, params, base)
    with pytest.raises(ValueError, match="dtype 'int8': is not supported; use float32, bfloat16, float16"):
        export_model(tmp_path / "new", config, params, base, "int8")
    params["norm"] = {"scale": np.full(16, 1e6, np.float32)}
    with pytest.raises(ValueError, match="'model.norm.weight': has values that float16 cannot hold"):
        export_model(tmp_path / "new", config, params, base, "float16")
    with pytest.raises(ValueError, match="head/kernel.* not those of the config"):
        export_model(tmp_path / "new", config, {k: v for k, v in params.items() if k != "head"}, base)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["LICENSE", "chat_template.jinja", "config.json", "additional_chat_templates"])
def test_a_link_out_of_a_model_folder_is_refused(small, tmp_path, name):
    base, config, params = small
    outside = tmp_path / "outside"
    outside.mkdir()
    if name == "additional_chat_templates":
        (outside / "own.jinja").write_text("a template of the user")
        (base / name).symlink_to(outside)
    else:
        shutil.copy(base / "config.json", outside / "secret")
        (base / name).unlink(missing_ok=True)
        (base / name).symlink_to(outside / "secret")
    for reads in (
        lambda: export_model(tmp_path / "new", config, params, base),
        lambda: model_folder(base),
        lambda: load_tokenizer(base),
    ):
        with pytest.raises(ValueError, match=rf"{name} is a link to .*outside.*; put the file itself there"):
            reads()
    assert not (tmp_path / "new").exists()


def test_only_blobs_of_the_hub_cache_may_be_links(small, tmp_path):
    base, *_ = small
    revision = tmp_path / "models--a--b" / "snapshots" / "12"
    blobs = tmp_path / "models--a--b" / "blobs"
    shutil.copytree(base, revision)
    blobs.mkdir()
    (revision / "config.json").rename(blobs / "0a")
    (revision / "config.json").symlink_to(blobs / "0a")
    assert model_folder(revision) == revision
    (revision / "LICENSE").symlink_to(tmp_path / "models--a--b" / "secret")
    (tmp_path / "models--a--b" / "secret").write_text("beside the blobs")
    with pytest.raises(ValueError, match="LICENSE is a link"):
        model_folder(revision)


QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 2,
    "intermediate_size": 8,
}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
SIGLIP = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 2}
CONTAINERS = {  # configs of multimodal models, and the other beginnings of their tensors' names
    "gemma3": (
        {
            "text_config": SIZES | MODELS["gemma3_text"],
            "vision_config": SIGLIP | {"image_size": 4},
            "mm_tokens_per_image": 1,
        },
        {"language_model.model.": "model.language_model.", "vision": "model.vision", "multi": "model.multi"},
    ),
    "mistral3": (
        {
            "text_config": SIZES | MODELS["mistral"],
            "vision_config": SIGLIP | {"model_type": "pixtral", "image_size": 4, "head_dim": 8},
        },
        {"language_model.model.": "model.language_model.", "vision": "model.vision", "multi": "model.multi"},
    ),
    "qwen2_5_vl": (
        {
            "text_config": SIZES | {"rope_parameters": MROPE},
            "vision_config": QWEN_VISION | {"fullatt_block_indexes": [0]},
        },
        {"model.": "model.language_model.", "visual.": "model.visual."},
    ),
    "qwen3_vl": (
        {
            "text_config": SIZES | {"head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}},
            "vision_config": QWEN_VISION | {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
        },
        {"model.language_model.": "language_model.model."},
    ),
    "qwen3_5": (
        {
            "text_config": SIZES
            | MODELS["qwen3_5"]
            | {"rope_parameters": MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 0.25}},
            "vision_config": QWEN_VISION | {"num_position_embeddings": 4},
            "tie_word_embeddings": True,
        },
        {"model.language_model.": "language_model.model."},
    ),
}


def random_multimodal(name, folder):
    """A multimodal model of transformers with random weights, saved to the folder."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **CONTAINERS[name][0])
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


@pytest.fixture(params=campaign_except(CONTAINERS, slow=["qwen3_vl"]))
def multimodal(request, tmp_path):
    """A random multimodal model of transformers, and its logits of text."""
    model = random_multimodal(request.param, tmp_path / "base")
    return request.param, tmp_path / "base", torch_scores(model, TOKENS)


def test_a_multimodal_models_text_half_is_its_own_model(multimodal, tmp_path, caplog):
    name, base, scores = multimodal
    config, params = load_pretrained(base)
    assert scores.std() > 0.3
    assert "recjax reads the text half of this" in caplog.text
    assert_close(our_logits(config, params), scores)
    export_model(tmp_path / "out", config, params, base)
    again, _ = load_pretrained(tmp_path / "out")
    _model, exported = torch_logits(tmp_path / "out")
    assert again == config and "vision" not in (tmp_path / "out" / "config.json").read_text()
    assert_close(exported, scores)
    # Other versions of transformers have other names and, for Qwen, the fields of both halves next to each other.
    fields, tensors = json.loads((base / "config.json").read_text()), load_file(base / "model.safetensors")
    if name == "qwen2_5_vl":
        fields = fields.pop("text_config") | fields | {"rope_theta": 100.0}
        fields["rope_scaling"] = {"type": "mrope", "mrope_section": fields.pop("rope_parameters")["mrope_section"]}
    for old, new in CONTAINERS[name][1].items():
        tensors = {new + key.removeprefix(old) if key.startswith(old) else key: tensors[key] for key in tensors}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(fields))
    save_file(tensors, tmp_path / "other" / "model.safetensors")
    assert tensors.keys() != load_file(base / "model.safetensors").keys()
    other, other_params = load_pretrained(tmp_path / "other")
    assert other == config
    jax.tree.map(np.testing.assert_array_equal, other_params, params)


KEY = "model.layers.0.self_attn.k_proj.weight"
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
ODD = {  # tensors of a folder → contents of its safetensors files and the index
    "a tensor in two shards": lambda tensors: {
        FIRST: tensors,
        SECOND: {KEY: tensors[KEY] + 1},
        "weight_map": dict.fromkeys(tensors, FIRST) | {KEY: SECOND},
    },
    "a tensor in two shards, of which the index names the first": lambda tensors: {
        FIRST: tensors,
        SECOND: {KEY: tensors[KEY] + 1, "model.norm.weight": tensors["model.norm.weight"]},
        "weight_map": dict.fromkeys(tensors, FIRST) | {"model.norm.weight": SECOND},
    },
    "a tensor that the index does not name": lambda tensors: {
        FIRST: tensors,
        "weight_map": dict.fromkeys(tensors.keys() - {KEY}, FIRST),
    },
    "one file next to shards": lambda tensors: {
        "model.safetensors": tensors,
        FIRST: {name: tensor + 1 for name, tensor in tensors.items()},
        "weight_map": dict.fromkeys(tensors, FIRST),
    },
    "several dtypes": lambda tensors: {
        "model.safetensors": {
            name: tensor.astype(jnp.bfloat16 if "q_proj" in name else np.float16 if "up_proj" in name else np.float32)
            for name, tensor in tensors.items()
        }
    },
    "a head of its own, tied": lambda tensors: {
        "model.safetensors": tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"][::-1].copy()}
    },
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", ODD)
def test_odd_folders_are_read_as_transformers_reads_them(name, tmp_path):
    random_model("qwen2", tmp_path)
    files = ODD[name](load_file(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    if "weight_map" in files:
        index = {"metadata": {}, "weight_map": files.pop("weight_map")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, tensors in files.items():
        save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    assert_close(our_logits(*load_pretrained(tmp_path)), torch_logits(tmp_path)[1])
