"""The export command: a run, whatever part of it was trained, answers in transformers as it does here."""

import json
import shutil
import sys

import jax
import numpy as np
import pytest
from huggingface_hub import ModelCard

from recjax import serve
from recjax.config import load_config, to_yaml
from recjax.export import export, push
from recjax.hub.export import export_model, write_base
from recjax.hub.model_card import model_card
from recjax.hub.policy import policy_alone
from recjax.hub.tokenizers import character_tokenizer, listed_eos
from recjax.models.decoder import abstract_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.logprobs import Sampling
from recjax.models.trainable import adapted, combine, flatten, is_adapter, split_params, unflatten
from recjax.rollout.collecting import row_keys, sample_groups
from recjax.runs import checkpoint, policies
from recjax.runs import export as run_export
from recjax.runs.policies import open_policy
from recjax.runs.prepare import prepare
from recjax.training.update import TrainState, make_optimizer
from tests import commands
from tests.hub.test_families import forward
from tests.marks import campaign_except
from tests.tiny import params_of
from tests.training.counting import MovingLearner, prepared_batch, sampled_by
from tests.training.tiny_run import TINY, train

SHORT = ["training.steps=2", "training.checkpoint_every=1", "evaluation.every=0", "rollout.max_completion_tokens=4"]
TRAINED = {"all": [], "adapters": ["model.lora={rank: 2, alpha: 8}"], "part": ["model.freeze=[embedding, mlp]"]}
MOVED = "adapters that no program updates"


@pytest.fixture(scope="module", params=campaign_except([*TRAINED, MOVED], MOVED, slow=["all"]))
def finished(request, tmp_path_factory):
    """A run of two steps, with its config, setup and last parameters as training itself reads them."""
    without = {"learner": MovingLearner(), "sources": sampled_by(prepared_batch)} if request.param == MOVED else {}
    trained = TRAINED["adapters" if request.param == MOVED else request.param]
    folder = tmp_path_factory.mktemp("run")
    (folder / "tiny.yaml").write_text(TINY)
    config = load_config(folder / "tiny.yaml", [*SHORT, *trained, f"output={folder / 'run'}"])
    train(config, **without)
    prepared, params = prepare(config)
    initial, frozen = split_params(params, config.model)
    state = TrainState(initial, make_optimizer(config.optimizer).init(initial))
    manager = checkpoint.open_checkpoints(folder / "run" / "checkpoints")
    restored = checkpoint.restore(manager, state, initial)
    manager.close()
    assert restored.step == 2
    return folder / "run", config, prepared, combine(restored.trained.params, frozen)


@pytest.mark.slow
def test_a_run_answers_in_transformers_as_it_does_here(finished, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    run, _config, prepared, params = finished
    source = export(str(run), None, str(tmp_path / "out"), None, "float32")
    assert source == f"{run} after step 2"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")

    asked = prepared.held_out.take(np.arange(6))
    encoded = tokenizer(asked.texts, return_tensors="pt")
    np.testing.assert_array_equal(encoded["input_ids"], asked.tokens)
    positions = np.broadcast_to(np.arange(asked.tokens.shape[1]), asked.tokens.shape)
    scores = forward(params, prepared.policy.decoder.config, asked.tokens, positions, asked.mask)
    with torch.no_grad():
        theirs = model(input_ids=encoded["input_ids"]).logits.numpy()
    assert np.abs(scores - theirs).max() < 1e-4 and theirs.std() > 0.1

    names = {"name": "batch", "source": "policy", "version": 0}
    keys = row_keys(jax.random.key(0), len(asked.texts))
    greedy = sample_groups(prepared.policy, params, asked, keys, 1, 4, Sampling(temperature=0.0), **names)
    answered = model.generate(
        input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"], do_sample=False, max_new_tokens=4
    )[:, asked.tokens.shape[1] :].numpy()
    assert len({tuple(row) for row in answered}) > 1, "answers too alike to tell models apart"
    for row in range(6):
        tokens = greedy[row].completions[0].rows[0].tokens
        np.testing.assert_array_equal(answered[row][: len(tokens)], tokens)


@pytest.mark.slow
def test_checkpoints_differ_only_in_trained_parameters(finished):
    run, config, _prepared, _ = finished
    older, (_, policy, newer, version, *_) = open_policy(run, step=1).params, open_policy(run)
    assert version == 2 and policy.decoder.config.lora is None
    moved = {path for path, leaf in flatten(newer).items() if not np.array_equal(leaf, flatten(older)[path])}
    attention = {f"layers/{name}/kernel" for name in ("query", "key", "value", "output")}
    if config.model.lora:
        assert moved == attention
    elif config.model.freeze:
        assert moved >= attention and not any("embedding" in path or "mlp" in path for path in moved)
    else:
        assert moved == flatten(newer).keys()


@pytest.fixture
def unstarted(tmp_path):
    """A run's folder before its first checkpoint."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(TINY)
    return str(tmp_path / "run")


def test_contradicting_or_unreadable_sources_are_refused(unstarted, tmp_path):
    out = str(tmp_path / "out")
    for run, model, step, reason in [
        (None, None, None, "exactly one of --run .* and --model .*; found neither"),
        (unstarted, "model", None, "exactly one of .*; found both"),
        (None, "model", 3, "--step = 3: applies only to --run"),
        (str(tmp_path / "nowhere"), None, None, "nowhere': holds no config.yaml; name the output folder"),
        (unstarted, None, None, "run': holds no checkpoint yet"),
        (None, str(tmp_path / "nowhere"), None, "is no local folder"),
    ]:
        with pytest.raises(ValueError, match=reason):
            export(run, model, out, step, "float32")
    with pytest.raises(ValueError, match="run': is not empty; name a new folder"):
        export(unstarted, None, unstarted, None, "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("finished", [MOVED], indirect=True)
def test_a_missing_checkpoint_and_a_changed_task_are_refused(finished, tmp_path):
    run, _config, *_ = finished
    with pytest.raises(ValueError, match="step 7: .* holds the steps 1, 2; name one of them"):
        export(str(run), None, str(tmp_path / "out"), 7, "float32")
    shutil.copytree(run, tmp_path / "changed")
    changed = load_config(run / "config.yaml", ['task.arithmetic.template="{a} {op} {b} ="'])
    (tmp_path / "changed" / "config.yaml").write_text(to_yaml(changed))
    with pytest.raises(
        ValueError,
        match="config.yaml: differs from the config in the run's checkpoints .*arithmetic.template.*restore",
    ):
        open_policy(tmp_path / "changed")


@pytest.mark.parametrize("finished", ["all"], indirect=True)
@pytest.mark.slow
@pytest.mark.parametrize("trained", ["model.lora={rank: 2, alpha: 8}", "model.freeze=[embedding]"])
def test_exports_need_neither_data_nor_reward(finished, trained, tmp_path, monkeypatch):
    export(str(finished[0]), None, str(tmp_path / "base"), None, "float32")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 6) for b in range(1, 6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "passing_reward.py").write_text(
        "def score(prompts, completions, answers): return [float(i % 2) for i in range(len(prompts))]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    model = ["model.decoder=null", f"model.path={tmp_path / 'base'}", trained, f"output={tmp_path / 'run'}"]
    task = ["task.arithmetic=null", f"task.file.train={tmp_path / 'rows.jsonl'}", "task.reward=passing_reward:score"]
    train(load_config(tmp_path / "tiny.yaml", [*SHORT, *model, *task, "training.steps=1", "evaluation.problems=4"]))
    export(str(tmp_path / "run"), None, str(tmp_path / "before"), None, "float32")

    for name in ("rows.jsonl", "passing_reward.py"):
        (tmp_path / name).unlink()
    monkeypatch.delitem(sys.modules, "passing_reward", raising=False)
    export(str(tmp_path / "run"), None, str(tmp_path / "after"), None, "float32")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "after")]
    assert weights[0] == weights[1]
    for run, followed in ((str(tmp_path / "run"), None), (None, str(tmp_path / "run"))):
        _, _, weights, _ = serve.load(run, None, None, followed)
        assert weights.version == 1


@pytest.mark.parametrize("finished", campaign_except([*TRAINED, MOVED], MOVED, slow=["all"]), indirect=True)
def test_no_reward_is_read_to_export(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("recjax.tasks.loading.load_reward", None)
    open_policy(finished[0])


@pytest.mark.parametrize("finished", [MOVED], indirect=True)
def test_a_card_says_what_was_trained(finished, tmp_path):
    run, config, *_ = finished
    export(str(run), None, str(tmp_path / "out"), None, "float32")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "transformers" and config.algorithm.preset in card.data.tags
    summary = json.loads((run / "summary.json").read_text())
    assert f"{summary['accuracy_before']:.3f} → {summary['accuracy_after']:.3f}" in card.text
    assert "2 optimizer steps of 4 prompts × 4 completions" in card.text and "![Training](training.png)" in card.text
    assert (tmp_path / "out" / "training.png").read_bytes() == (run / "figures" / "training.png").read_bytes()
    export(str(run), None, str(tmp_path / "first"), 1, "float32")
    assert "→" not in ModelCard.load(tmp_path / "first" / "README.md").text.partition("| setting")[0]


def test_an_export_ends_its_turns_as_the_run_did(tmp_path, monkeypatch, caplog):
    """The stop strings of a run, and the token after a turn, are no end-of-sequence tokens of its base."""
    tokenizer = character_tokenizer("0123456789+=")
    shape = DecoderConfig(len(tokenizer), 16, 24, 1, 2, 2, 8)
    params = jax.device_get(params_of(shape))
    (tmp_path / "files").mkdir()
    write_base(tmp_path / "files", shape, tokenizer, 0)
    export_model(tmp_path / "base", shape, params, tmp_path / "files")
    (tmp_path / "tiny.yaml").write_text(TINY)
    options = ["model.decoder=null", f"model.path={tmp_path / 'base'}", 'rollout.stop=["="]', "model.lora={rank: 2}"]
    config = load_config(tmp_path / "tiny.yaml", options)
    policy, equals = policy_alone(config, ""), tokenizer.convert_tokens_to_ids("=")
    assert policy.stop_ids == (0, equals)
    opened = policies.OpenedPolicy("run", policy, params, 2, config)
    monkeypatch.setattr(run_export, "open_policy", lambda run, step: opened)
    run_export.export_checkpoint(tmp_path / "run", tmp_path / "out", None, "float32")
    assert listed_eos(tmp_path / "out") == [0, equals] and listed_eos(tmp_path / "base") == [0]

    leaves = flatten(abstract_params(adapted(shape, config.model.lora)))
    adapters = unflatten({path: np.zeros(leaf.shape, np.float32) for path, leaf in leaves.items() if is_adapter(path)})
    monkeypatch.setattr(run_export, "run_config", lambda run: config)
    monkeypatch.setattr(policies, "whole_step", lambda *_: 2)
    monkeypatch.setattr(run_export, "read_trained", lambda *_: adapters)
    run_export.export_checkpoint(tmp_path / "run", tmp_path / "adapters", None, "float32", adapters=True)
    note = "Completions also end at ['='], which the base model's eos_token_id does not have: pass eos_token_id=[0, "
    assert note in caplog.text and note in (tmp_path / "adapters" / "README.md").read_text()


def test_a_license_of_the_base_is_passed_on(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    (tmp_path / "tiny.yaml").write_text(TINY)
    config = load_config(tmp_path / "tiny.yaml")
    assert ModelCard(model_card("x", config, 1, {}, {}, tmp_path, "")).data.license == "apache-2.0"
    assert ModelCard(model_card("x", config, 1, {}, {}, tmp_path / "none", "")).data.license is None
    lora = load_config(tmp_path / "tiny.yaml", ["model.lora={rank: 2}"])  # merged where adapters are not asked for
    libraries = [
        ModelCard(model_card("x", lora, 1, {}, {}, tmp_path, "", each)).data.library_name for each in (None, "")
    ]
    assert libraries == ["transformers", "peft"]


def test_a_push_makes_a_private_repository(tmp_path, monkeypatch):
    done = []

    class Hub:
        """Stands for huggingface_hub.HfApi."""

        def create_repo(self, repository, private, exist_ok):
            done.append((repository, private, exist_ok))
            return f"https://hub/{repository}"

        def upload_folder(self, repo_id, folder_path):
            if repo_id == "me/full":
                raise OSError("no room")
            done.append((repo_id, folder_path))

    monkeypatch.setattr("recjax.export.HfApi", Hub)
    assert push("out", "me/model") == "https://hub/me/model"
    assert push("out", "me/open", public=True) and done[2][1] is False
    assert done[:2] == [("me/model", True, True), ("me/model", "out")]
    with pytest.raises(ValueError, match="--push 'me/full': no room; out is complete"):
        push("out", "me/full")


@pytest.mark.slow
@pytest.mark.parametrize("finished", ["all"], indirect=True)
def test_the_command_exports_a_run_and_that_folder_again(finished, tmp_path):
    def command(*arguments):
        return commands.run(["-m", "recjax.export", *arguments])

    run, *_ = finished
    once = command("--run", str(run), "--output", str(tmp_path / "once"), "--step", "1")
    assert once.returncode == 0 and f"{run} after step 1 in float32" in once.stdout, once.stderr
    twice = command("--model", str(tmp_path / "once"), "--output", str(tmp_path / "twice"), "--dtype", "bfloat16")
    assert twice.returncode == 0, twice.stderr
    files = {file.name: file.read_bytes() for file in (tmp_path / "once").iterdir()}
    again = {file.name: file.read_bytes() for file in (tmp_path / "twice").iterdir()}
    assert {name for name in files.keys() | again.keys() if files.get(name) != again.get(name)} == {
        "config.json",
        "model.safetensors",
        "manifest.json",
        "README.md",  # says what a run made, and so does its picture
        "training.png",
    }
    refused = command("--run", str(run), "--output", str(tmp_path / "once"))
    assert refused.returncode != 0 and refused.stderr.splitlines()[-1].startswith("error: --output")
    assert "Traceback" not in refused.stderr
