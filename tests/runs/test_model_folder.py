"""A run and its model's folder: a template that reads the clock gets one day; tokens without an embedding are refused.

The day is that of the run's first start, whatever reads the run and whenever.
"""

import datetime
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pandas as pd
import pytest
import yaml

import recjax
from recjax.config import load_config
from recjax.evaluate import evaluate
from recjax.generate_experience import generate
from recjax.hub.export import export_model, write_base
from recjax.hub.policy import policy_alone
from recjax.hub.tokenizers import character_tokenizer, load_tokenizer
from recjax.import_experience import import_files
from recjax.models.decoder_config import DecoderConfig
from recjax.planning.dry_run import dry_run
from recjax.runs import sampled_rows
from recjax.runs.folder import check_run_folder
from recjax.runs.followed_run import FollowedRun
from recjax.runs.policies import open_policy
from recjax.runs.prepare import prepare
from recjax.runs.resolve import resolve_config
from recjax.store.foreign import Columns
from recjax.store.stored_groups import load_groups
from recjax.tasks.loading import load_task
from tests.experience.rows import read_columns
from tests.tiny import params_of
from tests.training.tiny_run import train, train_until_killed

CONFIG = """
output: unset
model: {{path: {model}}}
task: {{file: {{train: {problems}}}, reward: "tests.training.tiny_run:digit_share"}}
rollout: {{prompts_per_step: 2, group_size: 2, max_completion_tokens: 3}}
training: {{steps: 3, checkpoint_every: 1}}
experience: {{record: true}}
evaluation: {{every: 0, problems: 2, samples: 1}}
"""
TEMPLATE = "{{ strftime_now('%Y-%m-%d') }} {% for m in messages %}[{{ m.content }}]{% endfor %}"
FIRST, SECOND, THIRD = "2024-02-29", "2024-03-01", "2025-01-01"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose chat template reads the clock, problems that are chats, and a config."""
    folder = tmp_path_factory.mktemp("clock")
    tokenizer = character_tokenizer("0123456789+=-[] ")
    tokenizer.chat_template = TEMPLATE
    decoder = DecoderConfig(len(tokenizer), 16, 32, 1, 2, 1, 8)
    (folder / "base").mkdir()
    write_base(folder / "base", decoder, tokenizer, (0,))
    params = jax.device_get(params_of(decoder))
    export_model(folder / "model", decoder, params, folder / "base")
    asked = [{"prompt": [{"role": "user", "content": f"{number}+1"}], "answer": number + 1} for number in range(9)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    (folder / "tiny.yaml").write_text(CONFIG.format(model=folder / "model", problems=folder / "problems.jsonl"))
    return folder


@pytest.fixture
def on(monkeypatch):
    """A function that sets today's date."""

    def on(day):
        class Today(datetime.date):
            @classmethod
            def today(cls):
                return cls.fromisoformat(day)

        for module in ("recjax.hub.tokenizers", "recjax.runs.resolve", "recjax.generate_experience"):
            monkeypatch.setattr(f"{module}.date", Today)

    return on


def days(rows, tokenizer):
    """The dates that the prompts of rows begin with."""
    return {tokenizer.decode(row.prompt_tokens)[:10] for row in rows}


@pytest.mark.slow
def test_every_reader_dates_prompts_by_the_first_start(folder, on, tmp_path, caplog):
    config = load_config(folder / "tiny.yaml", [f"output={tmp_path / 'run'}"])
    on(FIRST)
    with caplog.at_level(logging.INFO):
        train_until_killed(config, at=2)
    assert f"reads the clock: all prompts get the date {FIRST} (model.chat_date)" in caplog.text
    on(SECOND)
    check_run_folder(config, overwrite=False)
    train(config)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["chat_date"] == FIRST
    recorded = read_columns(tmp_path / "run" / "experience.db")
    run = open_policy(str(tmp_path / "run"), config)
    assert len(recorded) == 12 and days(recorded, run.policy.tokenizer) == {FIRST}
    assert run.policy.tokenizer.init_kwargs["chat_date"] == FIRST
    followed = FollowedRun(tmp_path / "run")
    followed.first()
    assert followed.policy.tokenizer.init_kwargs["chat_date"] == FIRST

    evaluate(config, str(tmp_path / "run"), str(tmp_path / "evaluation"))
    samples = pd.read_parquet(tmp_path / "evaluation" / "samples.parquet")
    assert {text[:10] for text in samples["prompt"]} == {FIRST}
    set_day = config.model_copy(update={"model": config.model.model_copy(update={"chat_date": THIRD})})
    assert open_policy(str(tmp_path / "run"), set_day).policy.tokenizer.init_kwargs["chat_date"] == THIRD
    with pytest.raises(ValueError, match=f"another config .*chat_date: '{FIRST}' there, '{THIRD}' now"):
        check_run_folder(set_day, overwrite=False)
    assert resolve_config(config, overwrite=True).model.chat_date == SECOND, "a run that begins again has its own day"
    assert resolve_config(set_day, overwrite=False) == set_day

    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": chat, "reward": 1}))
    import_files([tmp_path / "rows.jsonl"], tmp_path / "store", Columns())
    (group,) = load_groups(tmp_path / "store", run.policy)
    assert run.policy.tokenizer.decode(group.prompt_tokens)[:10] == FIRST


@pytest.mark.slow
def test_an_evaluation_of_a_model_has_one_day(folder, on, tmp_path, monkeypatch):
    config = load_config(folder / "tiny.yaml", [f"output={tmp_path / 'run'}"])
    on(FIRST)

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(sampled_rows, "sample_rows", killed)
        evaluate(config, None, str(tmp_path / "evaluation"))
    on(SECOND)
    evaluate(config, None, str(tmp_path / "evaluation"))
    samples = pd.read_parquet(tmp_path / "evaluation" / "samples.parquet")
    assert {text[:10] for text in samples["prompt"]} == {SECOND}
    on(THIRD)
    with pytest.raises(ValueError, match=f"another evaluation .chat_date: '{SECOND}' there, '{THIRD}' now"):
        evaluate(config, None, str(tmp_path / "evaluation"))


@pytest.mark.slow
def test_a_store_that_is_added_to_keeps_its_day(folder, on, tmp_path):
    config = load_config(folder / "tiny.yaml", [f"output={tmp_path / 'run'}"])
    on(FIRST)
    assert generate(config, tmp_path / "store", 1, None, None, "initial") == 1
    on(SECOND)
    assert generate(config, tmp_path / "store", 2, None, None, "initial") == 1
    rows = read_columns(tmp_path / "store")
    assert len(rows) == 8 and days(rows, policy_alone(config, "").tokenizer) == {FIRST}


@pytest.mark.slow
def test_prompt_tokens_without_embedding_are_refused(folder, tmp_path):
    model = shutil.copytree(folder / "model", tmp_path / "model")
    tokenizer = load_tokenizer(model)
    size = len(tokenizer)
    tokenizer.add_tokens(["<extra_a>", "<extra_b>"])
    tokenizer.save_pretrained(model)
    (model / "manifest.json").unlink()
    asked = [
        {"prompt": f"{number}+1= <extra_b>" if number == 7 else f"{number}+1=", "answer": "1"} for number in range(9)
    ]
    (tmp_path / "wrong.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    config = load_config(folder / "tiny.yaml", [f"output={tmp_path / 'run'}", f"model.path={model}", "experience=null"])
    assert prepare(config)[0].policy.vocabulary == size, "tokens that no text has are no harm"
    wrong = load_config(
        folder / "tiny.yaml",
        [f"output={tmp_path / 'run'}", f"model.path={model}", f"task.file.train={tmp_path / 'wrong.jsonl'}"],
    )
    message = (
        rf"prompt \d, '7\+1= <extra_b>': token '<extra_b>' has id {size + 1}, but the model in {model} has an"
        rf" embedding of {size} tokens and a tokenizer of {size + 2}; take the tokenizer"
    )
    starts = [
        lambda: train(wrong),
        lambda: generate(wrong, tmp_path / "store", 1, None, None, "initial"),
        lambda: dry_run(wrong),
    ]
    for start in starts:
        with pytest.raises(ValueError, match=message):
            start()
    # An evaluation asks the problems that are held out, and the wrong one may be none of them.
    everything = wrong.evaluation.model_copy(update={"problems": 3})
    for seed in range(20):
        held_out = wrong.model_copy(update={"seed": seed, "evaluation": everything})
        if any("extra" in problem.prompt for problem in load_task(held_out).evaluation):
            break
    for checkpoint in (None, str(model)):
        with pytest.raises(ValueError, match=message):
            evaluate(held_out, checkpoint, str(tmp_path / "evaluation"))


# A package that transformers takes for torch, and that ends a process which imports it.
TORCH = {"torch/__init__.py": "import os\nprint('torch', flush=True)\nos._exit(9)\n"}
TORCH["torch-2.13.0.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n"
COMMANDS = {
    "check_engine": "--url http://127.0.0.1:9 --config {folder}/tiny.yaml",
    "compare": "{run} {output}/other --output {output}/compare.png",
    "compile_check": "--config {folder}/tiny.yaml --topology host",
    "evaluate": "--config {folder}/tiny.yaml --output {output}/evaluation",
    "export": "--model {folder}/model --output {output}/exported",
    "export_experience": "--store {run}/experience.db --output {output}/rows.jsonl",
    "feedback": "{run}/experience.db --file {output}/none.jsonl",
    "generate_experience": "--config {folder}/tiny.yaml --steps 1 --output {output}/store",
    "import_experience": "--input {output}/rows.jsonl --output {output}/imported.db --tokenizer {folder}/model",
    "inspect_experience": "{run}/experience.db --figure {output}/store.png",
    "objectives": "",
    "plot": "{run} --output {output}",
    "runs": "{run} --html {output}/runs.html",
    "samples": "{run} --output {output}/samples.html",
    "schema": "",
    "serve": "--run {run} --host 192.0.2.1",  # no address of this machine, so the server ends when it starts to listen
    "sweep": "{output}/sweep.yaml --workers 1",
    "train": "--config {folder}/tiny.yaml output={output}/run training.steps=1",
}
# Commands that end with an error after they have done their work: no server answers, no file, no address.
ENDS_WITH_ERROR = {"check_engine", "feedback", "serve"}
SWEEP = (
    "{{config: {folder}/tiny.yaml, output: {output}/sweep, settings: {{seed: {{0: {{}}}}}}, grids: [{{seed: all}}]}}"
)


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """A run with a store."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(load_config(folder / "tiny.yaml", [f"output={run}"]))
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_imports_torch(folder, finished, tmp_path, name):
    for file, content in TORCH.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    row = {"prompt": "1+1=", "completion": "2", "prompt_tokens": [2, 11, 2, 12], "tokens": [3], "reward": 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "sweep.yaml").write_text(SWEEP.format(folder=folder, output=tmp_path))
    shutil.copytree(finished, tmp_path / "other")
    paths = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "JAX_PLATFORMS": "cpu"}
    arguments = COMMANDS[name].format(folder=folder, output=tmp_path, run=finished).split()
    line = [sys.executable, "-m", f"recjax.{name}", *arguments]
    ended = subprocess.run(line, capture_output=True, text=True, env={**os.environ, **paths}, timeout=600)
    printed = ended.stdout + ended.stderr
    assert ended.returncode != 9 and (ended.returncode == 0) == (name not in ENDS_WITH_ERROR), printed
    assert "Traceback" not in printed


def test_the_commands_that_start_without_torch_are_all_commands():
    package = Path(recjax.__file__).parent
    commands = {file.stem for file in package.glob("*.py") if f"python -m recjax.{file.stem}" in file.read_text()}
    commands |= {file.parent.name for file in package.glob("*/__main__.py")}
    assert commands == COMMANDS.keys()
