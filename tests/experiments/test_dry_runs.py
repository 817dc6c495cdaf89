"""Every experiment's dry run, without network or weights: sizes, tokens and staleness are what its header says."""

import json
from pathlib import Path

import huggingface_hub
import jax
import pytest

from recjax.config import load_config
from recjax.hub import policy
from recjax.planning import dry_run as planning
from recjax.planning.dry_run import count, dry_run, show_dry_run
from tests.hub.test_published import PUBLISHED

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2] / "experiments"
# The stored shapes that stand for the models of the experiments; instruct models have those of their base.
SHAPES = {
    "Qwen/Qwen2.5-1.5B-Instruct": "Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen2.5-7B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "meta-llama/Llama-3.2-3B-Instruct": "Llama-3.2-3B",
    "models/SmolLM2-135M-Instruct": "SmolLM2-135M",
}
RUNS = sorted(
    path
    for path in ROOT.glob("**/*.yaml")
    if "\ngrids:" not in path.read_text() and path.name not in ("plan.yaml", "checks.yaml")
)
# Staleness of the last step, by the regime in the file's name: m = 20 ends on 19, n = 10 on 10.
LAST = {"on_policy": 0, "sync_interval": 19, "sync_interval_250": 249, "sync_offset": 10}


_activations, KNOWN = planning._activations, {}


def activations(config, model, inputs, remat, logprobs_of):
    """Experiments of equal shapes trace the forward pass once."""
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (model.trained, model.frozen, inputs))
    options = config.rollout.sampling(), config.model.logprob_chunk, config.training.tokens_per_micro_batch is None
    key = str((model.decoder, shapes, remat, options, logprobs_of.__name__))
    if key not in KNOWN:
        KNOWN[key] = _activations(config, model, inputs, remat, logprobs_of)
    return KNOWN[key]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_experiment_can_be_run_dry(path, tmp_path, monkeypatch, capsys):
    def unreachable(*args, **options):
        raise OSError("no network")

    def touched(*args):
        raise AssertionError("a dry run must not touch weights")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(policy, "load_pretrained", touched)
    monkeypatch.setattr(policy, "init_params", touched)
    monkeypatch.setattr(planning, "_activations", activations)
    config = load_config(path)
    shape = SHAPES[config.model.path] if config.model.path else None
    if shape:
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[shape][1]))
        tokens = config.rollout.max_prompt_tokens or 256
        config = load_config(path, [f"model.path={tmp_path}", f"rollout.max_prompt_tokens={tokens}"])
    result = dry_run(config)
    show_dry_run(config, result)
    printed = capsys.readouterr().out

    if shape and not config.model.lora:
        assert count(result.model.trained) == PUBLISHED[shape][0]
    assert {item.phase for item in result.memory} == {"always", "sample", "update"}
    rows = config.rollout.prompts_per_step * config.rollout.group_size
    assert f"{rows * config.rollout.max_completion_tokens:,} of {rows} completions" in printed
    # What a store holds, or when a buffer, a late reward or another process lets a group go, is not known before.
    experience = config.experience
    unknown = experience and (experience.store or experience.late or experience.replay)
    unknown = unknown or config.regime.mode == "async"
    assert len(result.staleness) == (0 if unknown else config.training.steps)
    if path.parent.name in ("gsm8k", "math", "toolace", "guru_math"):
        last = config.training.steps - 1 if path.stem == "offline" else LAST[path.stem]
        assert result.staleness[-1] == last == max(result.staleness)
        assert result.task is None and "hf download" in result.missing[0]
