"""A real vLLM: check_engine at several settings, and runs whose server is killed and returns."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from recjax import check_engine
from recjax.hub.export import export_model, write_base
from recjax.logs.metrics import read_metrics
from recjax.models.decoder import init_params
from recjax.planning.engine_checks import FAIL
from tests.commands import ROOT
from tests.remote import real_vllm
from tests.serving.some_server import SHAPE, TOKENIZER

pytestmark = pytest.mark.campaign

CONFIG = """
output: unset
model: {path: unset, dtype: float32}
task: {arithmetic: {problems: ["1..20 + 1..20", "1..9 * 1..9"], template: "{a} {op} {b} =", examples: 4}}
rollout: {prompts_per_step: 8, group_size: 8, max_completion_tokens: 8, stop: ["\\n"]}
algorithm: {preset: rec_one_side_is, clip: {epsilon_low: 0.6, epsilon_high: 2.0}}
optimizer: {learning_rate: 2e-4}
training: {steps: 10}
evaluation: {problems: 8}
"""
COLD = "rollout.temperature=0.7"
VOUCHED = "rollout.engine.processed_logprobs=true"
PENALIZED = {"eos_token_id": 2, "bos_token_id": 1, "repetition_penalty": 1.3, "top_k": 5, "top_p": 0.8}
SETTINGS = {  # options of the server, its generation_config.json, settings of the run, and checks that fail
    "defaults": ([], None, [], set()),
    "route for tokens": (["--enable-scale-out"], None, [], set()),
    "defaults of the model": ([], PENALIZED, [], set()),
    "temperature, plain log-probs": (["--enable-scale-out"], None, [COLD], {"log-probs", "sampling", "push"}),
    "temperature, wrong word": (["--enable-scale-out"], None, [COLD, VOUCHED], {"log-probs", "sampling", "push"}),
    "temperature": (["--enable-scale-out", "--logprobs-mode", "processed_logprobs"], None, [COLD, VOUCHED], set()),
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of vLLM: $RECJAX_TEST_VLLM, or a new one, which takes 3.5 GB and ten minutes."""
    folder = Path(os.environ.get("RECJAX_TEST_VLLM") or tmp_path_factory.mktemp("vllm"))
    if problem := real_vllm.install(folder):
        pytest.skip(problem)
    return folder


@pytest.mark.parametrize("name", SETTINGS)
def test_a_real_vllm_is_exact_or_fails_by_name(environment, smollm2_folder, tmp_path, name):
    options, generation, settings, failing = SETTINGS[name]
    model = tmp_path / "SmolLM2"
    shutil.copytree(smollm2_folder, model)
    if generation:
        (model / "generation_config.json").write_text(json.dumps(generation))
        (model / "manifest.json").unlink(missing_ok=True)
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    settings = [f"model.path={model}", f"output={tmp_path / 'run'}", *settings]
    with real_vllm.serving(environment, model, *options, log=tmp_path / "vllm.log") as (url, _):
        lines = check_engine.check_server(path, url, settings, draws=400)
    # Where every reply is refused, the checks of its details fail as well.
    failed = {line.what for line in lines if line.verdict == FAIL} - {"n", "seeds", "end tokens", "throughput"}
    assert failed == failing, lines


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """A random Llama that knows printable characters, of sizes that vLLM's kernels take."""
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "head_dim": 32, "num_kv_heads": 2}
    shape = dataclasses.replace(SHAPE, **sizes)
    (folder / "base").mkdir()
    write_base(folder / "base", shape, TOKENIZER, TOKENIZER.eos_token_id)
    export_model(folder / "tiny", shape, init_params(shape, jax.random.key(0)), folder / "base")
    return folder / "tiny"


@contextlib.contextmanager
def training(model, tmp_path, url, *settings):
    """A process that trains on the samples of a server; and a function that reads its metrics."""
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    sizes = ["rollout.prompts_per_step=4", "rollout.group_size=4", "training.micro_batch_prompts=4"]
    # A restarted server takes minutes, and the waits between tries grow to 30 s.
    sizes += [f"rollout.engine.url={url}", "rollout.engine.retries=40"]
    sizes += ["task.reward=tests.training.tiny_run:digit_share"]
    command = [sys.executable, "-m", "recjax.train", "--config", path, f"output={tmp_path / 'run'}"]
    command += [f"model.path={model}", *sizes, *settings]
    unset = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")  # set for tests, which compute little
    variables = {name: value for name, value in os.environ.items() if name not in unset} | {"PYTHONPATH": str(ROOT)}
    with open(tmp_path / "train.log", "w") as file:
        trainer = subprocess.Popen(command, env=variables, cwd=tmp_path, stdout=file, stderr=file)
    try:
        yield trainer, lambda: read_metrics(tmp_path / "run" / "metrics.jsonl")
    finally:
        trainer.kill()
        trainer.wait()


RUNS = {  # model, steps, options of the server, settings of the run
    "SmolLM2": ("smollm2_folder", 10, ["--enable-scale-out"], []),
    "versions of each token": ("tiny_folder", 30, ["--enable-scale-out"], []),
    "no versions in replies": ("tiny_folder", 30, [], []),
    "asynchronous": (
        "tiny_folder",
        30,
        ["--enable-scale-out"],
        ["regime.mode=async", "regime.max_staleness=2"],
    ),
    "adapters": (
        "tiny_folder",
        30,
        ["--enable-scale-out", "--enable-lora", "--max-lora-rank", "8"],
        ["model.lora={rank: 8, alpha: 16, targets: [query, key, value, output]}"],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_survives_the_kill_of_its_server(environment, tmp_path, request, name):
    """A push before each step; the server dies after the third and returns with the model's own weights."""
    fixture, count, options, settings = RUNS[name]
    model = request.getfixturevalue(fixture)
    logs = [tmp_path / "vllm.log", tmp_path / "returned.log"]
    with contextlib.ExitStack() as stack:
        url, kill = stack.enter_context(real_vllm.serving(environment, model, *options, log=logs[0]))
        steps = f"training.steps={count}"
        trainer, rows = stack.enter_context(training(model, tmp_path, url, steps, *settings))
        while trainer.poll() is None and len(rows()) < 4:
            time.sleep(0.1)
        kill()
        port = int(url.rpartition(":")[2])
        stack.enter_context(real_vllm.serving(environment, model, *options, log=logs[1], port=port))
        assert trainer.wait() == 0, (tmp_path / "train.log").read_text()[-3000:]
    steps = rows()[1:]
    assert len(steps) == count and all(row["staleness"] <= 2 for row in steps)
    fresh = [row for row in steps if row["staleness"] == 0]
    assert len(fresh) == count or (name == "asynchronous" and 0 < len(fresh) < count)
    # A batch of the newest weights has ratio 1, as the server's log-probs are recjax's.
    assert all(abs(row["ratio/max"] - 1) < 1e-3 and abs(row["ratio/q01"] - 1) < 1e-3 for row in fresh), fresh
    assert steps[-1]["engine/push_seconds"] > 0 and steps[-1]["engine/unusable"] == 0
    # The restarted server gets the weights of its batch again; a push that it interrupted is not counted.
    assert name == "asynchronous" or steps[-1]["engine/pushes"] in (count, count + 1)
    # The kill meets the update, a push or the sampling; the restarted server has a push in any case.
    assert any(route in logs[1].read_text() for route in ("POST /collective_rpc", "POST /v1/load_lora_adapter"))
