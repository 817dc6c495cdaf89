"""check_engine against a real vLLM at several settings."""

import json
import os
import shutil
from pathlib import Path

import pytest

from recjax import check_engine
from recjax.planning.engine_checks import FAIL
from tests.rollout import real_vllm

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
# vLLM's build for CPUs keeps the former output layer of tied embeddings at a push. SmolLM2 has such embeddings.
PUSH = {"push"}
SETTINGS = {
    "defaults": ([], None, [], PUSH),
    "route for tokens": (["--enable-scale-out"], None, [], PUSH),
    "defaults of the model": ([], PENALIZED, [], PUSH),
    "temperature, plain log-probs": (["--enable-scale-out"], None, [COLD], PUSH | {"log-probs", "sampling"}),
    "temperature, wrong word": (["--enable-scale-out"], None, [COLD, VOUCHED], PUSH | {"log-probs", "sampling"}),
    "temperature": (
        ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"],
        None,
        [COLD, VOUCHED],
        PUSH,
    ),
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
