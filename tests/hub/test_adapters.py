"""Adapters of a run, exported alone for PEFT and merged for transformers, give the logits that they have here."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from recjax.config import load_config
from recjax.export import export
from recjax.hub.tokenizers import character_tokenizer
from recjax.hub.weights import load_pretrained, pretrained_config
from recjax.models.decoder import Decoder, abstract_params, logits
from recjax.models.trainable import adapted, combine, flatten, is_adapter, split_params
from recjax.runs.policies import read_trained
from tests.closeness import assert_close
from tests.hub.test_families import random_model
from tests.marks import campaign
from tests.training.tiny_run import TINY, train

TOKENS = np.random.default_rng(0).integers(2, 14, (2, 7))


@pytest.fixture(scope="module", params=[*campaign("qwen2", "phi3", "qwen3_5"), "qwen3_moe"])
def run(request, tmp_path_factory):
    """A run of two steps that trained adapters next to a random model whose folder has a tokenizer."""
    folder = tmp_path_factory.mktemp("adapters")
    base = folder / "base"
    base.mkdir()
    random_model(request.param, base)
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.save_pretrained(base)
    (folder / "tiny.yaml").write_text(TINY)
    targets = "[query, value, up, delta_inputs, delta_output]" if request.param == "qwen3_5" else "[query, value, up]"
    lora = f"model.lora={{rank: 3, alpha: 5, targets: {targets}}}"
    model = ["model.decoder=null", f"model.path={base}", lora]
    config = load_config(folder / "tiny.yaml", [f"output={folder / 'run'}", *model, "training.steps=2"])
    train(config)
    return folder, config


def our_logits(folder, config):
    decoder_config = adapted(pretrained_config(folder / "base"), config.model.lora)
    adapters = read_trained(folder / "run", 2, split_params(abstract_params(decoder_config), config.model)[0])
    assert all(is_adapter(path) for path in flatten(adapters))
    params = combine(load_pretrained(folder / "base")[1], adapters)
    positions, mask = jnp.broadcast_to(jnp.arange(7), (2, 7)), jnp.ones((2, 7), bool)
    hidden, _ = Decoder(decoder_config).apply({"params": params}, jnp.asarray(TOKENS), positions, mask)
    return np.asarray(logits(decoder_config, params, hidden))


@pytest.mark.slow
def test_peft_merges_adapters_to_the_merged_export(run, tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder, config = run
    export(str(folder / "run"), None, str(tmp_path / "adapters"), None, "float32", adapters=True)
    export(str(folder / "run"), None, str(tmp_path / "merged"), None, "float32")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    plain = base(input_ids=torch.tensor(TOKENS)).logits.detach().numpy()
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        alone, whole = (model(input_ids=torch.tensor(TOKENS)).logits.numpy() for model in (theirs, merged))
    ours = our_logits(folder, config)
    assert np.abs(ours - plain).max() > 1e-3
    assert_close(alone, ours)
    assert_close(whole, ours)


@pytest.mark.slow
def test_exported_adapters_find_their_base_from_any_folder(run, tmp_path, monkeypatch):
    folder, config = run
    relative = config.model_copy(update={"model": config.model.model_copy(update={"path": "base"})})
    monkeypatch.chdir(folder)
    monkeypatch.setattr("recjax.runs.export.run_config", lambda run: relative)
    monkeypatch.setattr("recjax.runs.policies.whole_step", lambda *_: 2)
    export(str(folder / "run"), None, str(tmp_path / "adapters"), None, "float32", adapters=True)
    said = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str((folder / "base").resolve())


def test_what_has_no_adapters_of_its_own_is_refused(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(TINY)
    with pytest.raises(ValueError, match="did not train adapters"):
        export(str(tmp_path / "run"), None, str(tmp_path / "out"), None, "float32", adapters=True)
    for source, dtype in (((None, str(tmp_path)), "float32"), ((str(tmp_path / "run"), None), "bfloat16")):
        with pytest.raises(ValueError, match="--adapters needs --run"):
            export(*source, str(tmp_path / "out"), None, dtype, adapters=True)
