"""Starts from PEFT adapters: tensors land in their places, PEFT computes the same, runs continue or merge them."""

import dataclasses
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from recjax.config import LoraConfig, load_config
from recjax.export import export
from recjax.hub.export import write_adapters
from recjax.hub.families import CONTAINERS, TEXT_MODULES
from recjax.hub.tokenizers import character_tokenizer
from recjax.hub.weights import adapter_fields, load_adapter, load_pretrained, read_config
from recjax.models.decoder import abstract_params
from recjax.models.decoder_config import DELTA_PROJECTIONS, DecoderConfig, DeltaNet, ExpertOptions
from recjax.models.trainable import adapted, combine, flatten, is_adapter, merged, unflatten
from recjax.planning.programs import resolve_shapes
from recjax.runs.policies import open_policy
from recjax.runs.resolve import resolve_start
from tests.closeness import assert_close
from tests.hub.test_export import CONTAINERS as MULTIMODAL
from tests.hub.test_export import TOKENS, our_logits, random_multimodal
from tests.hub.test_families import compiled_forward, random_model, torch_scores
from tests.marks import campaign, campaign_except
from tests.training.tiny_run import TINY, one_device, train

CONFIG = DecoderConfig(11, 8, 12, 2, 4, 2, 6)
FUSED = dataclasses.replace(CONFIG, fused_projections=True)
EXPERTS_CONFIG = dataclasses.replace(CONFIG, experts=ExpertOptions(3, 2, True))
DELTA_CONFIG = dataclasses.replace(CONFIG, gated_attention=True, delta=DeltaNet((True, False), 2, 4, 6, 10, 3))
FUSED_DELTA = dataclasses.replace(DELTA_CONFIG, delta=DELTA_CONFIG.delta._replace(fused=True))
FIELDS = {"peft_type": "LORA", "r": 3, "lora_alpha": 5, "base_model_name_or_path": "base", "target_modules": ["q_proj"]}
# Hugging Face module → input and output sizes, and → decoder modules.
SIZES = {
    "self_attn.q_proj": (8, 24),
    "self_attn.v_proj": (8, 12),
    "mlp.down_proj": (12, 8),
    "self_attn.qkv_proj": (8, 48),
}
QUERY, QKV = {"self_attn.q_proj": ["query"]}, {"self_attn.qkv_proj": ["query", "key", "value"]}
VALUE, DOWN = {"self_attn.v_proj": ["value"]}, {"mlp.down_proj": ["down"]}
random = np.random.default_rng(0)


def written(folder, modules=tuple(QUERY), layers=(0, 1), ranks=(), fields=(), beginning="model."):
    """A PEFT adapter with random values, written without this package; the product B A of each module and layer."""
    tensors, products = {}, {}
    for module in modules:
        (inputs, units), rank = SIZES[module], dict(ranks).get(module, 3)
        for layer in layers:
            a, b = (random.normal(size=shape).astype(np.float32) for shape in ((rank, inputs), (units, rank)))
            name = f"base_model.model.{beginning}layers.{layer}.{module}.lora"
            tensors |= {f"{name}_A.weight": a, f"{name}_B.weight": b}
            products[module, layer] = b @ a
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(FIELDS | dict(fields)))
    return products


PATTERNS = {
    "rank_pattern": {"v_proj": 4, r"layers\.\d+\.self_attn.q_proj": 2},
    "alpha_pattern": {"self_attn.q_proj": 7},
}


@pytest.mark.parametrize(
    ("config", "modules", "layers", "ranks", "fields", "scales"),
    [
        (CONFIG, QUERY | DOWN, (0, 1), {}, {}, {}),
        (CONFIG, QUERY, (1,), {}, {"use_rslora": True, "layers_to_transform": [1]}, {"self_attn.q_proj": 5 / 3**0.5}),
        (
            CONFIG,
            QUERY | VALUE,
            (0, 1),
            {"self_attn.v_proj": 4, "self_attn.q_proj": 2},
            PATTERNS,
            {"self_attn.v_proj": 5 / 4, "self_attn.q_proj": 7 / 2},
        ),
        (FUSED, QKV, (0, 1), {}, {}, {}),
    ],
)
def test_merged_adapters_change_each_kernel_by_the_scaled_product(
    tmp_path, config, modules, layers, ranks, fields, scales
):
    products = written(tmp_path, modules, layers, ranks, fields)
    lora, adapters = load_adapter(tmp_path, config)
    assert lora.rank == max(ranks.values(), default=3)
    assert {*lora.targets} == {one for names in modules.values() for one in names}
    zeros = {path: np.zeros(leaf.shape, np.float32) for path, leaf in flatten(abstract_params(config)).items()}
    kernels = flatten(merged(adapted(config, lora), combine(unflatten(zeros), adapters)))
    for module, targets in modules.items():
        for layer in range(2):
            parts = np.concatenate([kernels[f"layers/{one}/kernel"][layer].T for one in targets])
            expected = products[module, layer] * scales.get(module, 5 / 3) if layer in layers else 0 * parts
            assert_close(parts, expected, 1e-5)
    changed = {path.split("/")[1] for path, leaf in kernels.items() if np.any(leaf)}
    assert changed == {*lora.targets}


@pytest.mark.parametrize(("beginning", "alpha"), [("model.", 9), (TEXT_MODULES, 5), ("language_model.model.", 9)])
def test_patterns_match_the_names_of_the_base(tmp_path, beginning, alpha):
    """As in PEFT. A multimodal base has other names than its text half."""
    patterns = {
        "rank_pattern": {rf".*{re.escape(beginning)}layers\.\d+\.mlp\.down_proj": 4},
        "alpha_pattern": {f"{beginning}layers.0.self_attn.q_proj": 7, "model.layers.1.self_attn.q_proj": 9},
    }
    products = written(tmp_path, QUERY | DOWN, ranks={"mlp.down_proj": 4}, fields=patterns, beginning=beginning)
    lora, adapters = load_adapter(tmp_path, CONFIG)
    leaves = flatten(adapters)
    for name, layer, scale in (("query", 0, 7 / 3), ("query", 1, alpha / 3), ("down", 0, 5 / 4), ("down", 1, 5 / 4)):
        module = "mlp.down_proj" if name == "down" else "self_attn.q_proj"
        a, b = (leaves[f"layers/{name}_lora_{side}/kernel"][layer] for side in "ab")
        change = lora.alpha / lora.rank * (a @ b).T
        assert_close(change, scale * products[module, layer], 1e-5, err_msg=f"{name} {layer}")


def noisy_adapters(config, lora):
    leaves = flatten(abstract_params(adapted(config, lora)))
    return {path: random.normal(0, 0.3, x.shape).astype(np.float32) for path, x in leaves.items() if is_adapter(path)}


@pytest.mark.parametrize(
    ("model_type", "config", "targets"),
    [
        ("llama", CONFIG, ["query", "value", "up"]),
        ("llama", EXPERTS_CONFIG, ["gate"]),
        *(
            pytest.param(*each, marks=pytest.mark.campaign)
            for each in (
                ("llama", CONFIG, ["gate"]),
                *itertools.product(["llama"], [FUSED], [["query", "value", "up"], ["gate"]]),
                ("llama", EXPERTS_CONFIG, ["query", "value", "up"]),
                ("qwen3_5_text", DELTA_CONFIG, ["query", "gate", *DELTA_PROJECTIONS]),
                ("qwen3_5", DELTA_CONFIG, ["query", "gate", *DELTA_PROJECTIONS]),
                ("qwen3_next", FUSED_DELTA, ["query", "gate", *DELTA_PROJECTIONS]),
                ("qwen3_next", FUSED_DELTA, ["delta_gate", "delta_decay"]),
                *((name, CONFIG, ["query", "down"]) for name in CONTAINERS),
            )
        ),
    ],
)
def test_exported_adapters_come_back_bit_equal(tmp_path, model_type, config, targets):
    lora = LoraConfig(rank=3, alpha=5.0, targets=targets)
    adapters = noisy_adapters(config, lora)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    write_adapters(tmp_path, adapted(config, lora), unflatten(adapters), tmp_path, "owner/base")
    fields = adapter_fields(tmp_path)
    assert fields["base_model_name_or_path"] == "owner/base"
    if model_type in CONTAINERS:  # each module of the text half by its whole name
        modules = {name.rpartition(".lora_")[0] for name in load_file(tmp_path / "adapter_model.safetensors")}
        assert modules == {f"base_model.model.{name}" for name in fields["target_modules"]}
        assert all(name.startswith(f"{TEXT_MODULES}layers.") for name in fields["target_modules"])
    again, params = load_adapter(tmp_path, config)
    assert again == lora and flatten(params).keys() == adapters.keys()
    for path, leaf in flatten(params).items():
        np.testing.assert_array_equal(leaf, adapters[path], err_msg=path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type = 'IA3': recjax does not compute such adapters; merge the adapter into its"),
        ({"use_dora": True}, "use_dora = True: recjax does not compute"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices = \[3\]"),
        ({"target_parameters": ["experts.gate"]}, "target_parameters = "),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication = "),
        ({"of_next_year": {"x": 1}}, "of_next_year = "),
        ({"r": 0}, "r = 0: takes a number above 0"),
        ({"lora_alpha": "5"}, "lora_alpha = '5': takes a number above 0"),
        ({"r": 4}, r"q_proj.lora_A.weight' has shape \(3, 8\), but adapter_config.json and the model ask for \(4, 8\)"),
    ],
)
def test_refused_adapter_configs(tmp_path, fields, message):
    written(tmp_path, fields=fields)
    with pytest.raises(ValueError, match=f"adapter_(config.json|model.safetensors): .*{message}"):
        load_adapter(tmp_path, CONFIG)


def test_refused_adapter_folders(tmp_path):
    with pytest.raises(ValueError, match="holds no adapter_config.json; give a folder that PEFT's"):
        adapter_fields(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[")
    with pytest.raises(ValueError, match="adapter_config.json: is no adapter config"):
        adapter_fields(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(FIELDS))
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match="holds no adapter_model.safetensors; save the adapter with PEFT's"):
        load_adapter(tmp_path, CONFIG)
    for name in ("lm_head.lora_A.weight", "model.layers.2.self_attn.q_proj.lora_A.weight"):
        save_file({f"base_model.model.{name}": np.ones((3, 8), np.float32)}, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=f"tensor 'base_model.model.{name}' adapts no projection of the decoder"):
            load_adapter(tmp_path, CONFIG)
    half = {"base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": np.ones((3, 8), np.float32)}
    save_file(half, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="q_proj.lora_B.weight' has shape none, but"):
        load_adapter(tmp_path, CONFIG)


LLAMA = {"model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}


def configured(folder, *overrides):
    (folder / "tiny.yaml").write_text(TINY)
    return load_config(folder / "tiny.yaml", ["model.decoder=null", f"output={folder / 'run'}", *overrides])


def test_the_adapter_sets_the_adapters_settings_and_the_base(tmp_path, caplog):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(LLAMA))
    written(tmp_path / "adapter", fields={"base_model_name_or_path": str(tmp_path / "base")})
    adapter = f"model.adapter={tmp_path / 'adapter'}"
    model = resolve_start(configured(tmp_path, adapter)).model
    assert (model.path, model.lora) == (str(tmp_path / "base"), LoraConfig(rank=3, alpha=5.0, targets=["query"]))
    assert resolve_start(configured(tmp_path, adapter).model_copy(update={"model": model})).model == model
    assert resolve_start(configured(tmp_path, adapter, "model.merge_adapter=true")).model.lora is None
    assert not caplog.text
    (tmp_path / "base").rename(tmp_path / "other")
    assert resolve_start(configured(tmp_path, adapter, f"model.path={tmp_path / 'other'}")).model.lora == model.lora
    assert "was trained on the base" in caplog.text
    with pytest.raises(ValueError, match=r"model.lora = \{'rank': 2.* has \{'rank': 3.*remove model.lora"):
        resolve_start(configured(tmp_path, adapter, f"model.path={tmp_path / 'other'}", "model.lora={rank: 2}"))
    written(tmp_path / "adapter", fields={"base_model_name_or_path": None})
    with pytest.raises(ValueError, match="model.adapter = .*: its base is None, revision 'main'; set model.path"):
        resolve_start(configured(tmp_path, adapter))


PEFT = {  # options of peft.LoraConfig, by family
    "qwen2": {
        "few": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj"]},
        "all": {"r": 4, "lora_alpha": 5, "target_modules": "all-linear", "use_rslora": True},
        "patterns": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 5}}
        | {"alpha_pattern": {"layers.1.self_attn.q_proj": 7}},
        "layers": {"r": 2, "lora_alpha": 4, "target_modules": r".*layers\.1\.(self_attn\.o_proj|mlp\.up_proj)"},
    },
    "phi3": {"all": {"r": 4, "lora_alpha": 3, "target_modules": "all-linear"}},
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PEFT["qwen3_moe"] = {
    name: {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj"]} | options
    for name, options in {
        "experts": {"target_parameters": EXPERTS, "use_rslora": True},
        "gate and up": {"target_parameters": EXPERTS[:1]},
        "down": {"target_parameters": EXPERTS[1:]},
        "projections": {"target_modules": ["gate_proj", "up_proj", "down_proj", "v_proj"]},
    }.items()
}
PEFT["qwen3_5"] = {
    "all": {"r": 4, "lora_alpha": 3, "target_modules": "all-linear"},
    "patterns": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "in_proj_qkv", "out_proj"]}
    | {"alpha_pattern": {r"layers\.2\.linear_attn\.in_proj_qkv": 9}, "rank_pattern": {"out_proj": 5}},
}
PEFT["qwen3_next"] = {
    "fused": {"r": 4, "lora_alpha": 3, "target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"]},
}
PEFT["mixtral"] = {"projections": {"r": 2, "lora_alpha": 5, "target_modules": ["w1", "w2", "w3"]}}


@pytest.mark.slow
@pytest.mark.parametrize("family", campaign_except(PEFT, next(iter(PEFT))))
def test_logits_are_those_of_peft(family, tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    tokens = random.integers(0, 40, (2, 9))
    random_model(family, tmp_path / "base")
    config, params = load_pretrained(tmp_path / "base")
    for name, options in PEFT[family].items():
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if "lora_B" in path:
                    parameter.normal_(0, 0.1)
            theirs = model(input_ids=torch.tensor(tokens)).logits.numpy()
        model.save_pretrained(tmp_path / name)
        lora, adapters = load_adapter(tmp_path / name, config)
        ours = our_logits(adapted(config, lora), combine(params, adapters), tokens)
        assert_close(ours, theirs, err_msg=name)
        assert np.abs(ours - our_logits(config, params, tokens)).max() > 0.1


@pytest.mark.campaign
@pytest.mark.parametrize("name", MULTIMODAL)
def test_multimodal_adapters_pass_to_and_from_peft(name, tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    random_multimodal(name, tmp_path / "base")
    config, params = load_pretrained(tmp_path / "base")
    plain = our_logits(config, params)

    def base(kind=AutoModelForImageTextToText):
        return kind.from_pretrained(tmp_path / "base", attn_implementation="eager")

    common = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": r".*language_model.*\.(q_proj|down_proj|in_proj_qkv|in_proj_a)",
    }
    down = "language_model.layers.1.mlp.down_proj"
    for number, patterns in enumerate(
        ({}, {"alpha_pattern": {f"model.{down}": 20}}, {"rank_pattern": {f".*{re.escape(down)}": 6}})
    ):
        model = peft.get_peft_model(base(), peft.LoraConfig(**common, **patterns))
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if "lora_B" in path:
                    parameter.normal_(0, 0.1)
        model.save_pretrained(tmp_path / f"{number}")
        lora, adapters = load_adapter(tmp_path / f"{number}", config)
        ours = our_logits(adapted(config, lora), combine(params, adapters))
        assert_close(ours, torch_scores(model, TOKENS), err_msg=str(patterns))
        assert np.abs(ours - plain).max() > 0.1
        (tmp_path / "out").mkdir(exist_ok=True)
        write_adapters(tmp_path / "out", adapted(config, lora), adapters, tmp_path / "base")
        theirs = peft.PeftModel.from_pretrained(base(), tmp_path / "out")
        assert_close(torch_scores(theirs, TOKENS), ours, err_msg=str(patterns))
        assert not [path for path, _ in theirs.named_parameters() if "lora" in path and "vis" in path]
    if name == "qwen3_5":  # transformers has a class for its text half, with other names
        with pytest.raises(ValueError, match="Target modules .* not found in the base model"):
            peft.PeftModel.from_pretrained(base(AutoModelForCausalLM), tmp_path / "out")
    model = peft.get_peft_model(base(), peft.LoraConfig(r=3, target_modules="all-linear"))
    model.save_pretrained(tmp_path / "all")
    with pytest.raises(ValueError, match=r"(vision_tower|visual)\..*' adapts no projection .*; merge the adapter into"):
        load_adapter(tmp_path / "all", config)


@pytest.mark.campaign
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_gradients_of_experts_adapters_are_those_of_peft(family, tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    tokens, rank, base = random.integers(0, 40, (2, 9)), 3, random_model(family, tmp_path / "base")
    config, params = load_pretrained(tmp_path / "base")
    lora = LoraConfig(rank=rank, alpha=5.0, targets=["query", "gate", "up", "down"])
    noise = noisy_adapters(config, lora)
    write_adapters(tmp_path, adapted(config, lora), unflatten(noise), tmp_path / "base")
    model = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    total = model(input_ids=torch.tensor(tokens)).logits[:, :-1].log_softmax(-1)
    total.gather(-1, torch.tensor(tokens)[:, 1:, None]).sum().backward()
    theirs = {name: one.grad.numpy() for name, one in model.named_parameters() if "lora" in name}

    def summed(adapters):
        inputs = map(jnp.asarray, (tokens, np.broadcast_to(np.arange(9), tokens.shape), np.ones(tokens.shape, bool)))
        policy = combine(params, unflatten(adapters)), adapted(config, lora)
        scores = jax.nn.log_softmax(compiled_forward.__wrapped__(*policy, *inputs))
        return jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], -1).sum()

    ours, count = jax.device_get(jax.jit(jax.grad(summed))(noise)), config.experts.count
    for layer in range(2):
        place = f"base_model.model.model.layers.{layer}"

        def factors(module, experts, place=place):
            a, b = (theirs[f"{place}.{module}.lora_{side}.default.weight"] for side in "AB")
            return a.reshape(experts, -1, a.shape[-1]), np.moveaxis(b.reshape(len(b), -1, experts), 2, 0)

        gate_up, down = factors("mlp.experts.base_layer", count), factors("mlp.experts", count)
        half = gate_up[1].shape[1] // 2
        expected = {"query": factors("self_attn.q_proj", 1), "experts/down": down}
        expected["experts/gate"] = gate_up[0][:, :rank], gate_up[1][:, :half, :rank]
        expected["experts/up"] = gate_up[0][:, rank:], gate_up[1][:, half:, rank:]
        for name, pair in expected.items():
            for side, gradient in zip("ab", pair, strict=True):
                found = ours[f"layers/{name}_lora_{side}/kernel"][layer].swapaxes(-1, -2)
                difference = np.abs(found - gradient).max() / np.abs(gradient).max()
                assert difference < 1e-3, (layer, name, side, difference)


@pytest.mark.campaign
@pytest.mark.parametrize("targets", [["gate"], ["up", "down"], ["query", "down"]])
def test_peft_computes_exported_adapters_of_some_projections_of_experts(targets, tmp_path):
    """PEFT joins adapters of an expert's projections; it loads no others."""
    peft, tokens, base = pytest.importorskip("peft"), random.integers(0, 40, (2, 9)), random_model("olmoe", tmp_path)
    config, params = load_pretrained(tmp_path)
    lora = LoraConfig(rank=3, alpha=5.0, targets=targets)
    noise = noisy_adapters(config, lora)
    write_adapters(tmp_path, adapted(config, lora), unflatten(noise), tmp_path)
    again, read = load_adapter(tmp_path, config)
    assert again == lora
    jax.tree.map(np.testing.assert_array_equal, flatten(read), noise)
    ours = our_logits(adapted(config, lora), combine(params, read), tokens)
    assert np.abs(ours - our_logits(config, params, tokens)).max() > 0.1
    theirs = torch_scores(peft.PeftModel.from_pretrained(base, tmp_path), tokens)
    assert_close(theirs, ours)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", *campaign("qwen2", "phi3", "qwen3_5")])
def test_a_run_continues_an_exported_adapter_or_merges_it(family, tmp_path):
    """Export, start: equal. The sampler, a resumed run, a run in a new folder and an export all have the adapter."""
    base = tmp_path / "base"
    random_model(family, base)
    character_tokenizer("0123456789+=").save_pretrained(base)
    tokens = random.integers(0, 13, (2, 9))
    targets = "query, up, delta_inputs, delta_output" if family == "qwen3_5" else "query, value, up"
    lora = f"model.lora={{rank: 3, alpha: 5, targets: [{targets}]}}"

    def run(name, *overrides):
        config = configured(tmp_path, f"output={tmp_path / name}", "training.checkpoint_every=1", *overrides)
        train(config)
        return tmp_path / name

    def logits(name, step):
        _, policy, params, *_ = open_policy(tmp_path / name, step=step)
        return our_logits(policy.decoder.config, params, tokens)

    first = run("first", f"model.path={base}", lora, "training.steps=2")
    export(str(first), None, str(tmp_path / "adapter"), None, "float32", adapters=True)
    adapter = f"model.adapter={tmp_path / 'adapter'}"
    second = run("second", adapter, "training.steps=1", "algorithm.reference_kl.coefficient=0.1")
    assert open_policy(second).run.model.lora == open_policy(first).run.model.lora
    start = logits("first", 2)
    np.testing.assert_array_equal(logits("second", 0), start)
    assert np.abs(logits("second", 1) - start).max() > 1e-3
    export(str(second), None, str(tmp_path / "again"), 0, "float32", adapters=True)
    (was, _), (now, _) = (load_adapter(tmp_path / name, read_config(base)) for name in ("adapter", "again"))
    assert was == now
    # The run resumes without model.lora and model.path, which its config.yaml has.
    run("second", adapter, "training.steps=2", "algorithm.reference_kl.coefficient=0.1")
    third = run("third", f"model.run={second}", lora, "training.steps=1", "optimizer.learning_rate=0")
    np.testing.assert_array_equal(logits("third", 1), logits("second", 2))
    export(str(third), None, str(tmp_path / "of third"), None, "float32", adapters=True)
    merging = run("merging", adapter, "model.merge_adapter=true", lora, "training.steps=1")
    assert_close(logits("merging", 0), start, 2e-5)
    with pytest.raises(ValueError, match=r"trained adapters of changed weights \(model.merge_adapter\)"):
        export(str(merging), None, str(tmp_path / "none"), None, "float32", adapters=True)
    for overrides in ([adapter], [adapter, "model.merge_adapter=true"]):
        config = configured(tmp_path, *overrides)
        model, *_ = resolve_shapes(config)
        assert is_adapter(next(iter(flatten(model.trained)))) == (len(overrides) == 1)
        with one_device():
            opened = open_policy(None, config)
        assert_close(our_logits(opened.policy.decoder.config, opened.params, tokens), start, 2e-5)
