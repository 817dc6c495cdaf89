"""The warm start on demonstrations: their tokens and masks, the loss and gradient of transformers, kills, adapters."""

import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from recjax.config import load_config
from recjax.export import export
from recjax.hub.chat_rendering import render_chats
from recjax.hub.export import export_model, write_base
from recjax.hub.policy import Policy
from recjax.hub.weights import load_pretrained
from recjax.logs.metrics import read_metrics
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.models.trainable import flatten
from recjax.runs import demonstrations
from recjax.runs.demonstrations import train_on_demonstrations
from recjax.runs.policies import open_policy
from recjax.runs.prepare import prepare
from recjax.runs.warm_start import demonstration
from recjax.tasks.reading import read_file
from recjax.training import learner
from recjax.training.loop import Preempted
from tests.closeness import assert_same_change
from tests.hub.test_chat_templates import CHATML
from tests.marks import campaign
from tests.tiny import params_of
from tests.training.counting import Interrupted, count
from tests.training.tiny_run import one_device, train, without_times

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Drops the thoughts of all turns but the last, as Qwen3's template does.
FORGETFUL = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif
%}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NO_END = """{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{%
if add_generation_prompt %}a:{% endif %}"""
CONFIG = """
output: unset
model: {{path: {folder}/model}}
task: {{file: {{train: {folder}/problems.jsonl}}, reward: "tests.training.tiny_run:digit_share"}}
warm_start: {{demonstrations: {folder}/shown.jsonl, steps: 6, batch_size: 4, learning_rate: 1e-2, every: 2}}
rollout: {{prompts_per_step: 2, group_size: 2, max_completion_tokens: 3}}
training: {{steps: 0}}
evaluation: {{every: 0, problems: 2, samples: 1}}
"""


def chat(*turns, system=None):
    """Messages of user and assistant in turn."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]


CHATS = [
    chat("1+1", "2"),
    chat("2+3", "5", "and 1", "6", system="short"),
    *(chat(f"{number}+1", str(number + 1)) for number in range(10)),
]


def byte_tokenizer(template):
    """One token a byte, and one for a line end with an h: it would span the end of a prompt and an answer."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet, "Ċh"])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("Ċ", "h")]))
    model.add_special_tokens(list(SPECIAL))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|endoftext|>", chat_template=template)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of random weights with a chat template, its task and demonstrations."""
    folder = tmp_path_factory.mktemp("shown")
    tokenizer = byte_tokenizer(CHATML)
    decoder = DecoderConfig(len(tokenizer), 16, 32, 1, 2, 1, 8, tie_embeddings=False)
    (folder / "base").mkdir()
    write_base(folder / "base", decoder, tokenizer, (0, 2))
    export_model(folder / "model", decoder, jax.device_get(params_of(decoder)), folder / "base")
    problems = [{"prompt": chat(f"{number}+1"), "answer": number + 1} for number in range(9)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    (folder / "shown.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in CHATS))
    (folder / "tiny.yaml").write_text(CONFIG.format(folder=folder))
    return folder


@pytest.fixture
def config(folder, tmp_path):
    """A function from (folder name, overrides) to a config."""
    return lambda name, *overrides: load_config(folder / "tiny.yaml", [f"output={tmp_path / name}", *overrides])


def shown(messages, policy, tmp_path, **columns):
    """The rows of a demonstration from a file with one more line before it."""
    lines = [{"messages": chat("0", "0")}, {"messages": messages, **columns}]
    (tmp_path / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return demonstration(read_file(tmp_path / "shown.jsonl", "key")[1], policy).completions[0].rows


@pytest.fixture
def policy():
    tokenizer = byte_tokenizer(CHATML)
    return Policy(Decoder(DecoderConfig(len(tokenizer), 16, 32, 1, 2, 1, 8)), tokenizer, (0, 2))


def test_mask_has_every_turn_with_its_end(policy, tmp_path):
    tokenizer, messages = policy.tokenizer, chat("a", "hi", "b", "hello\nho", system="s")
    (row,) = shown(messages, policy, tmp_path)
    (prompt,) = render_chats(tokenizer, [messages[:2]])
    assert tokenizer.decode(row.prompt_tokens) == prompt
    assert tokenizer.decode([*row.prompt_tokens, *row.tokens]) + "\n" == tokenizer.apply_chat_template(
        messages, tokenize=False
    )
    edges = np.flatnonzero(np.diff(row.mask)) + 1
    texts = [tokenizer.decode(part) for part in np.split(row.tokens, edges)]
    assert texts == ["hi<|im_end|>", "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n", "hello\nho<|im_end|>"]
    assert row.mask[0] and row.mask[-1] and len(edges) == 2
    joint = tokenizer.convert_tokens_to_ids("Ċh")
    # The whole text has the joint token three times, twice across a boundary.
    assert tokenizer.apply_chat_template(messages, return_dict=False).count(joint) == 3
    assert [*row.prompt_tokens, *row.tokens].count(joint) == 1


def test_chat_may_be_json_with_text_parts(policy, tmp_path):
    (plain,) = shown(chat("a", "hi"), policy, tmp_path)
    asked, reply = chat("a", "hi")
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    (row,) = shown(json.dumps([asked, {**reply, "content": parts, "tool_calls": None}]), policy, tmp_path)
    assert row.tokens.tolist() == plain.tokens.tolist() and row.mask.tolist() == plain.mask.tolist()
    assert row.prompt_tokens.tolist() == plain.prompt_tokens.tolist()


def test_a_template_that_drops_text_begins_another_row(policy, tmp_path):
    policy.tokenizer.chat_template = FORGETFUL
    rows = shown(chat("a", "so</think>1", "b", "then</think>2"), policy, tmp_path)
    said = [policy.tokenizer.decode(row.tokens[row.mask]) for row in rows]
    assert said == ["so</think>1<|im_end|>", "then</think>2<|im_end|>"] and all(row.mask.all() for row in rows)
    assert "so" not in policy.tokenizer.decode(rows[1].prompt_tokens)


@pytest.mark.parametrize("exclusion", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_an_excluded_turn_is_only_part_of_later_prompts(policy, tmp_path, exclusion):
    messages = chat("a", "hi", "b", "hello")
    (row,) = shown([messages[0], messages[1] | exclusion, messages[2], messages[3] | {"weight": 1}], policy, tmp_path)
    (prompt,) = render_chats(policy.tokenizer, [messages[:3]])
    assert policy.tokenizer.decode(row.prompt_tokens) == prompt and row.mask.all()
    assert policy.tokenizer.decode(row.tokens) == "hello<|im_end|>"
    (row,) = shown([*messages[:3], messages[3] | exclusion], policy, tmp_path)
    assert policy.tokenizer.decode(row.tokens) == "hi<|im_end|>"


def test_stop_token_ends_turns_without_template_end(policy, tmp_path):
    policy.tokenizer.chat_template = NO_END
    rows = shown(chat("x", "1", "y", "2"), policy, tmp_path)
    assert [policy.tokenizer.decode(row.prompt_tokens) for row in rows] == ["u:x;a:", "u:x;a:1;u:y;a:"]
    assert [policy.tokenizer.decode(row.tokens) for row in rows] == ["1;<|endoftext|>", "2;<|endoftext|>"]


def test_tool_calls_and_template_variables_are_the_templates(policy, tmp_path):
    policy.tokenizer.chat_template = CHATML.replace("{{ m.content }}", "{{ m.content or m.tool_calls[0].name }}")
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    messages = [*chat("a"), called, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "3"}]
    (row,) = shown(messages, policy, tmp_path)
    assert policy.tokenizer.decode(row.tokens[row.mask]) == "add<|im_end|>3<|im_end|>"
    policy.tokenizer.chat_template = CHATML
    with pytest.raises(ValueError, match="line 2: tools: the chat template reads no tools"):
        shown(chat("a", "b"), policy, tmp_path, tools=[{"name": "add"}])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "messages: must hold a list of messages with role and content; got None"),
        ([], "messages: must hold a list of messages with role and content; got []"),
        (["hi"], "messages: message 0: 'hi' is no message"),
        ([{"content": "hi"}], "messages: message 0: {'content': 'hi'} is no message; it has a role, and content"),
        ([{"role": "human", "content": "hi"}], "message 0: role = 'human': takes system, user, assistant, tool"),
        ([{"role": "user", "content": 3}], "message 0: content = 3: takes text"),
        ([{"role": "user", "content": None, "tool_calls": [{}]}], "content = None: takes text"),
        ([chat("a")[0], chat("a", "b")[1] | {"weight": 0}], "no assistant's message has a weight above 0"),
        ([chat("a")[0], chat("a", "b")[1] | {"weight": 0.5}], "message 1: weight = 0.5: takes 0 (excluded) and 1"),
        ([chat("a")[0], chat("a", "b")[1] | {"train": "no"}], "message 1: train = 'no': takes 0 (excluded) and 1"),
        (chat("a", "b")[1:], "message 0: role = 'assistant': it begins the chat"),
        (chat("a", "b", "c"), "message 2: role = 'user': the last message must be the assistant's"),
        ([*chat("a", "b"), chat("a", "b")[1]], "message 2: role = 'assistant': it follows a message of role assistant"),
        ([chat("a")[0], *chat("a", "b")], "message 1: role = 'user': it follows a message of role user"),
        ([*chat("a", "b"), *chat("c", "d", system="s")], "message 2: role = 'system': it follows"),
    ],
)
def test_odd_chats_are_refused_with_file_and_line(policy, tmp_path, messages, reason):
    with pytest.raises(ValueError, match="shown.jsonl: line 2: ") as error:
        shown(messages, policy, tmp_path)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no chats') }}", "refuses messages .*no chats"),
        (CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>model\n{% endif"), "message 1: .*no reply"),
    ],
)
def test_templates_without_reply_after_prompt_are_refused(policy, tmp_path, template, reason):
    policy.tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"shown.jsonl: line 2: .*{reason}"):
        shown(chat("a", "b"), policy, tmp_path)


CALLING = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
NAMED_CALLS = CHATML.replace("{{ m.content }}", "{% if m.tool_calls and m.content %}{{ m.tool_calls }}{% endif %}")
THOUGHTS = CHATML.replace(
    "{{ m.content }}", "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}"
)


@pytest.mark.parametrize(
    ("template", "reply", "reason"),
    [
        (CHATML, CALLING, "tool_calls: the chat template writes none"),
        (NAMED_CALLS, CALLING, "message 1: the chat template does not write the tool call 'add'"),
        (CHATML, {"content": "51", "reasoning_content": "17*3"}, "message 1: .* does not write reasoning_content"),
        (THOUGHTS, {"content": "51", "thinking": "17 * 3\n"}, None),
        (THOUGHTS, {"content": "51", "reasoning": "17 * 3"}, None),
        (CHATML.replace("m.content }}", "m.content[:2] }}"), {"content": "512"}, "message 1: .* write content, so"),
        (
            CHATML.replace("assistant\n{% endif", "assistant\n<a></a>{% endif").replace(
                "{{ m.content", "{% if m.role == 'assistant' %}<a></a>{% endif %}{{ m.content.split('</a>')[-1]"
            ),
            {"content": "<a>\n</a>\n51"},
            None,
        ),
    ],
)
def test_what_the_template_does_not_write_is_refused(policy, tmp_path, template, reply, reason):
    policy.tokenizer.chat_template = template
    chat_of_reply = [*chat("a"), {"role": "assistant", **reply}]
    if reason is None:
        assert policy.tokenizer.decode(shown(chat_of_reply, policy, tmp_path)[0].tokens).endswith("51<|im_end|>")
        return
    with pytest.raises(ValueError, match=f"shown.jsonl: line 2: {reason}"):
        shown(chat_of_reply, policy, tmp_path)


@pytest.mark.slow
def test_loss_and_gradient_are_those_of_transformers(config, folder, monkeypatch):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    descent = optax.sgd(optax.constant_schedule(1.0))
    monkeypatch.setattr("recjax.training.update.make_optimizer", lambda *_: descent)
    options = ["warm_start.steps=1", f"warm_start.batch_size={len(CHATS)}", "training.tokens_per_micro_batch=256"]
    with one_device():
        run, params = prepare(config("torch", *options, f"warm_start.held_out={folder}/shown.jsonl"))
        before = {path: np.array(leaf) for path, leaf in flatten(params).items()}
        after, losses = train_on_demonstrations(run, params, {})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    total, count = 0.0, 0
    for group in run.demonstrations.train:
        (row,) = group.completions[0].rows
        tokens = torch.tensor([*row.prompt_tokens, *row.tokens])
        logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        total -= logprobs[len(row.prompt_tokens) - 1 :][torch.tensor(row.mask)].sum()
        count += row.mask.sum()
    (total / count).backward()
    assert losses["warm_start/loss"] == pytest.approx(total.item() / count, rel=1e-5)
    held_out = [row["held_out_loss"] for row in read_metrics(Path(run.config.output) / "warm_start/metrics.jsonl")]
    assert held_out[0] == pytest.approx(total.item() / count, rel=1e-5) and held_out[1] < held_out[0]
    made = folder / "after"
    export_model(made, run.policy.decoder.config, jax.device_get(after), folder / "model")
    changed = transformers.AutoModelForCausalLM.from_pretrained(made)
    old = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    new = {name: tensor.detach().numpy() for name, tensor in changed.named_parameters()}
    gradients = {name: tensor.grad.numpy() for name, tensor in model.named_parameters()}
    assert_same_change(old, new, jax.tree.map(np.subtract, old, gradients))
    assert before.keys() == flatten(after).keys()


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["{rank: 2, alpha: 8, targets: [query, down]}", *campaign(None)])
def test_killed_warm_start_equals_straight_one(config, folder, monkeypatch, lora, tmp_path):
    options = [] if lora is None else [f"model.lora={lora}"]
    straight = train(config("straight", *options))
    assert straight[0]["warm_start/loss"] > 0 and [row["step"] for row in straight] == [0]
    rows = read_metrics(tmp_path / "straight/warm_start/metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(7)]
    assert [row["step"] for row in rows if "held_out_loss" in row] == [0, 2, 4, 6]
    assert rows[6]["held_out_loss"] < rows[0]["held_out_loss"]

    update, calls = learner.update, []

    def dies(*arguments, **named):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return update(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(learner, "update", dies)
        with pytest.raises(KeyboardInterrupt):
            train(config("killed", *options))
    calls.clear()
    with monkeypatch.context() as patched:
        patched.setattr(learner, "update", lambda *a, **b: (calls.append(1), update(*a, **b))[1])
        train(config("killed", *options))
    assert len(calls) == 4, "steps 3 to 6"
    assert without_times(read_metrics(tmp_path / "killed/metrics.jsonl")) == without_times(straight)
    assert read_metrics(tmp_path / "killed/warm_start/metrics.jsonl") == rows

    exported = []
    for name in ("straight", "killed"):
        export(str(tmp_path / name), None, str(tmp_path / f"{name}-model"), None, "float32")
        exported.append(flatten(load_pretrained(tmp_path / f"{name}-model")[1]))
    with one_device():
        opened = flatten(open_policy("base", config("straight", *options)).params)
    first = flatten(load_pretrained(folder / "model")[1])
    for path, leaf in exported[0].items():
        np.testing.assert_array_equal(leaf, exported[1][path])
        np.testing.assert_array_equal(leaf, opened[path])
    moved = {path for path, leaf in exported[0].items() if np.abs(leaf - first[path]).max() > 0}
    assert moved == ({"layers/query/kernel", "layers/down/kernel"} if lora else first.keys())


class CountingStage(Interrupted):
    """The learner of the stage, without compiled programs."""

    def begin(self, *arguments, **others):
        return jax.tree.map(jnp.asarray, super().begin(*arguments, **others))

    def kept(self, trained, step):
        return trained

    def evaluate(self, state):
        return {"held_out_loss": float(state.trained.params["checksum"][0])}


def test_warm_start_resumes_after_kills_and_stops(config, folder, monkeypatch, tmp_path):
    def trained(name, at=0, act=None):
        stage = CountingStage(at, act)
        monkeypatch.setattr(demonstrations, "_SupervisedLearner", lambda shown: stage)
        rows = count(config(name, "training.steps=2"))
        return len(stage.batches), without_times(rows), read_metrics(tmp_path / name / "warm_start/metrics.jsonl")

    def kill():
        raise KeyboardInterrupt

    def stop():
        os.kill(os.getpid(), signal.SIGTERM)

    straight = trained("straight")
    assert straight[0] == 6 and [row["step"] for row in straight[1]] == [0, 1, 2]
    assert straight[1][0]["warm_start/held_out_loss"] == straight[2][6]["held_out_loss"] == straight[2][6]["loss"]
    for name, at, act, later in (("killed", 4, kill, 4), ("stopped", 3, stop, 3), ("stopped at the end", 6, stop, 0)):
        with pytest.raises(KeyboardInterrupt if act is kill else Preempted):
            trained(name, at, act)
        assert not (tmp_path / name / "metrics.jsonl").exists(), "the run itself has not begun"
        assert trained(name) == (later, *straight[1:])
    with pytest.raises(KeyboardInterrupt):
        trained("changed", 4, kill)
    shown = (folder / "shown.jsonl").read_text()
    (folder / "shown.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in CHATS[1:]))
    try:
        with pytest.raises(ValueError, match="data changed since this run began.*: the demonstrations .*shown.jsonl"):
            trained("changed")
    finally:
        (folder / "shown.jsonl").write_text(shown)


@pytest.mark.slow
def test_training_starts_with_the_warm_started_policy(config, folder, monkeypatch):
    lora = "model.lora={rank: 2, alpha: 8, targets: [query, down]}"
    options = [lora, "training.steps=3", "training.checkpoint_every=1", "algorithm.reference_kl={coefficient: 0.1}"]
    straight = without_times(train(config("straight", *options)))
    assert all(row["ratio/q99"] == pytest.approx(1, abs=1e-4) for row in straight[1:])
    train(config("resumed", *options, "training.steps=2"))
    update = learner.update

    def of_run(state, batch, layout, context, *, recipe):
        assert recipe.algorithm.reference_kl, "the warm start is over"
        return update(state, batch, layout, context, recipe=recipe)

    monkeypatch.setattr(learner, "update", of_run)
    assert without_times(train(config("resumed", *options)))[-1] == straight[-1]
    changed = config("resumed", *options, "training.steps=4", f"warm_start.demonstrations={folder}/other.jsonl")
    (folder / "other.jsonl").write_text(json.dumps({"messages": chat("1", "2")}) + "\n")
    with pytest.raises(ValueError, match="warm_start.demonstrations: .* there, .* now"):
        train(changed)
    (folder / "other.jsonl").write_text((folder / "shown.jsonl").read_text())
    (folder / "shown.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in CHATS[1:]))
    try:
        with pytest.raises(ValueError, match="data changed since this run began.*: the demonstrations .*shown.jsonl"):
            train(config("resumed", *options, "training.steps=4"))
    finally:
        (folder / "shown.jsonl").write_text((folder / "other.jsonl").read_text())


@pytest.mark.slow
def test_longer_chats_are_skipped_and_none_left_is_refused(config):
    run, _ = prepare(config("some", "warm_start.max_tokens=60"))
    assert len(run.demonstrations.train) + len(run.demonstrations.held_out) == len(CHATS) - 1
    assert run.demonstrations.shape.time < 60
    with pytest.raises(ValueError, match="warm_start.max_tokens = 5: the shortest chat of"):
        prepare(config("none", "warm_start.max_tokens=5"))
