"""Rewards of a sequence classifier: the scores of transformers with any padding; refusals before weights are read."""

import json
import pickle

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file

from experiments.day import demonstrations as day
from recjax.config import load_config
from recjax.evaluate import evaluate
from recjax.hub import weights
from recjax.rewards.custom import custom_parts
from recjax.rewards.pool import Answered, Grading
from recjax.rewards.reward import load_reward
from recjax.rewards.reward_model import RewardModel
from recjax.tasks.problems import Problem
from tests.closeness import assert_close
from tests.hub.test_chat_templates import CHATML
from tests.runs.test_demonstrations import byte_tokenizer, chat
from tests.training.tiny_run import TINY, one_device, train

SIZES = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_labels": 1}
PROMPTS = [chat("1+1", "2", "more", system="s"), chat("2+2"), "3+3=", "a question of more than 64 bytes in all: 4?"]
COMPLETIONS = ["3", "4<|im_end|>", "", "44"]


def classifier(folder, kind="llama", template=CHATML, pad=0, labels=1):
    """A random classifier of transformers and its tokenizer, saved to the folder."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SIZES | {"num_labels": labels, "pad_token_id": pad}))
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer(template)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


def expected(model, tokenizer, side):
    """transformers' scores, in a batch padded on one side, or one by one."""
    import torch

    texts = [
        tokenizer.apply_chat_template(
            [*(chat(prompt) if isinstance(prompt, str) else prompt), {"role": "assistant", "content": text}],
            tokenize=False,
        )
        if tokenizer.chat_template
        else prompt + text
        for prompt, text in zip(PROMPTS, COMPLETIONS, strict=True)
        if tokenizer.chat_template or isinstance(prompt, str)
    ]
    encode = {"add_special_tokens": False, "return_tensors": "pt"}
    with torch.no_grad():
        if side is None:
            return [model(**tokenizer(text, **encode)).logits[0, 0].item() for text in texts]
        tokenizer.pad_token, tokenizer.padding_side = tokenizer.convert_ids_to_tokens(model.config.pad_token_id), side
        return model(**tokenizer(texts, padding=True, **encode)).logits[:, 0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "template", "pad", "side"),
    [
        ("llama", CHATML, 0, "right"),
        ("llama", CHATML, 0, "left"),
        ("llama", CHATML, None, None),
        ("llama", CHATML.replace("<|im_end|>\n{% endfor", "<|im_end|>{% endfor"), 2, "right"),
        ("qwen2", CHATML, 0, "right"),
        ("qwen3", CHATML, 0, "right"),
        ("gemma2", CHATML, 0, "right"),
        ("mistral", None, 0, "right"),
    ],
)
def test_scores_are_those_of_transformers(tmp_path, kind, template, pad, side):
    model, tokenizer = classifier(tmp_path, kind, template, pad)
    reward = load_reward(f"model:{tmp_path}")
    pairs = [pair for pair in zip(PROMPTS, COMPLETIONS, strict=True) if template or isinstance(pair[0], str)]
    rows = [Answered.to(Problem(prompt, ""), str(prompt), text, 1, "") for prompt, text in pairs]
    theirs = expected(model, tokenizer, side)
    assert np.ptp(theirs) > 0.01
    assert_close(np.asarray(custom_parts(reward, rows)["score"]), np.asarray(theirs))
    copy = pickle.loads(pickle.dumps(reward.function))
    assert copy._loaded is None and reward.function._loaded is not None


def test_grading_gives_the_model_the_problems_messages(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    reward = load_reward("recjax.tasks.rewards:exact_match")
    seen = []

    def scored(prompts, completions, answers):
        seen.extend(zip(prompts, completions, strict=True))
        return [1.0] * len(prompts)

    reward = reward._replace(name="model:folder", function=scored)
    config = load_config(tmp_path / "tiny.yaml", ["task.reward=model:folder"])
    with Grading(config, reward) as grading:
        rows = [Answered.to(Problem(asked, "2"), "1+1=", "2", 1, "") for asked in (chat("1+1"), "1+1=")]
        assert grading.submit(rows).result().rewards.tolist() == [1.0, 1.0]
    assert seen == [(chat("1+1"), "2"), ("1+1=", "2")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures = .*LlamaForCausalLM.*a reward model has one label"),
        ({"architectures": None}, "architectures = .*none"),
        ({"id2label": {"0": "a", "1": "b"}}, "2 labels"),
        (
            {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
            "'bert': is not supported",
        ),
    ],
)
def test_other_models_are_refused_before_weights_load(tmp_path, monkeypatch, changes, reason):
    fields = {
        **{"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
        **{"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "head_dim": 4},
        **{name: value for name, value in SIZES.items() if name != "num_labels"},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    byte_tokenizer(CHATML).save_pretrained(tmp_path)
    monkeypatch.setattr(weights, "read_params", None)
    assert RewardModel(str(tmp_path))
    save_file({"model.norm.weight": np.ones(16, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds no tensor score.weight"):
        RewardModel(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(ValueError, match=f"task.reward = 'model:.*{reason}"):
        load_reward(f"model:{tmp_path}")


def test_a_folder_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="task.reward = 'model:no/where'"):
        load_reward("model:no/where")


@pytest.mark.slow
def test_training_evaluation_and_regrading_give_the_same_scores(tmp_path):
    day.write_model(tmp_path).save_pretrained(tmp_path / "classifier")
    day.write_classifier(tmp_path / "classifier", tmp_path / "model")
    prompts = [{"prompt": chat(f"{first}+{first}"), "answer": 2 * first} for first in range(36)]
    day.write_rows(tmp_path / "problems.jsonl", prompts)
    steps = {"steps": 1, "checkpoint_every": 1}

    def config(name, **blocks):
        blocks = {
            "training": steps,
            "rollout": {"prompts_per_step": 8, "group_size": 4, "max_completion_tokens": 4},
        } | blocks
        evaluated = {"every": 0, "problems": 8, "samples": 2}
        return day.config_of(tmp_path, name, tmp_path / "model", **blocks | {"evaluation": evaluated})

    recorded = train(config("recorded", experience={"record": True}))
    store = {"store": str(tmp_path / "recorded" / "experience.db"), "regrade": True}
    again = train(config("regraded", experience=store, regime={"sync_interval": 1}))
    assert again[1]["reward"] == pytest.approx(recorded[1]["reward"], abs=1e-4) and recorded[1]["reward"] != 0
    assert recorded[1]["reward/score"] == recorded[1]["reward"]
    with one_device():
        folder, _ = evaluate(config("recorded"), None, str(tmp_path / "evaluated"))
    scores = pd.read_parquet(folder / "samples.parquet")["reward"]
    assert scores.mean() == pytest.approx(recorded[0]["evaluation/reward"], abs=1e-4)
