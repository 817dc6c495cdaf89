"""The config: what it takes, what it refuses, and what the refusals say."""

from pathlib import Path

import pytest
import yaml

from recjax.config_loading import load_config, to_yaml
from recjax.sweep import read_sweep

QUICKSTART = "experiments/quickstart.yaml"
ROOT = Path(__file__).parents[1]


def load(*overrides):
    return load_config(ROOT / QUICKSTART, overrides)


EXPERIMENTS = sorted(ROOT.glob("experiments/**/*.yaml"))
SWEEPS = [path for path in EXPERIMENTS if "\ngrids:" in path.read_text()]


@pytest.mark.parametrize("path", [path for path in EXPERIMENTS if path not in SWEEPS], ids=lambda path: path.stem)
def test_every_experiment_is_a_valid_config(path):
    load_config(path)


# The claims' grid is read whole where its metrics are checked.
@pytest.mark.parametrize("path", [path for path in SWEEPS if path.stem != "grid"], ids=lambda path: path.stem)
def test_every_sweep_is_of_valid_configs(path):
    assert read_sweep(path)[1]


def test_overrides_reach_their_keys_with_their_types():
    config = load("optimizer.learning_rate=1e-6", "seed=3", "regime.sync_interval=7", 'rollout.stop=["\\n"]')
    assert config.optimizer.learning_rate == 1e-6 and isinstance(config.optimizer.learning_rate, float)
    assert (config.seed, config.regime.sync_interval, config.rollout.stop) == (3, 7, ["\n"])


def test_later_overrides_win_and_one_option_leaves_its_block_alone():
    config = load("seed=1", "seed=2", "warm_start.steps=5")
    assert config.seed == 2 and config.warm_start.steps == 5
    assert config.warm_start.wrong_fraction == load().warm_start.wrong_fraction


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optimizer.learning_rat=1e-6", ["'optimizer.learning_rat'", "1e-06", "'optimizer.learning_rate'"]),
        ("sync_interval=3", ["'sync_interval'", "3", "'regime.sync_interval'"]),
        ("training.steps=many", ["training.steps", "many", "int"]),
        ("optimizer.learning_rate=fast", ["optimizer.learning_rate", "fast", "float"]),
        ("training.steps=0", ["training.steps = 0", "1 or more"]),
        ("optimizer.learning_rate=.nan", ["optimizer.learning_rate = nan", "finite"]),
        ("optimizer=3", ["optimizer", "3"]),
        ("seed", ["'seed'", "key=value"]),
        ("seed=[1", ["seed=[1", "YAML"]),
        ("rollout.temperature=0", ["rollout.temperature", "above 0"]),
        ("rollout.slots=0", ["rollout.slots = 0", "1 or more"]),
        ("rollout.top_p=1.5", ["rollout.top_p = 1.5", "at most 1"]),
        ("model.path=some/folder", ["model.path", "model.decoder", "exactly one"]),
        ("model.decoder=null", ["model.path", "found none"]),
        ("task.file.train=a.jsonl", ["task.arithmetic", "task.file", "exactly one"]),
        ("regime.offline=true", ["regime.sync_interval = 20", "regime.offline"]),
        ("training.micro_batch_prompts=5", ["training.micro_batch_prompts = 5", "rollout.prompts_per_step = 16"]),
        ("model.decoder.num_heads=3", ["model.decoder.hidden_size = 64", "num_heads = 3"]),
        ("optimizer.schedule=cosin", ["'cosin'", "cosine"]),
        ("optimizer.beta2=1.0", ["optimizer.beta2 = 1.0", "below 1"]),
        ("optimizer.epsilon=0", ["optimizer.epsilon", "above 0"]),
        ("optimizer.warmup_steps=1200", ["optimizer.warmup_steps = 1200", "training.steps"]),
        ("training.steps=2.5", ["training.steps", "2.5", "int"]),
        ("rollout.stop=5", ["rollout.stop", "5", "list"]),
        ("model.dtype=float16", ["'float16'", "bfloat16"]),
        ("task.reward=number_match", ["'number_match'", "module:function"]),
        ("task.system_prompt=Be brief.", ["task.system_prompt = 'Be brief.'", "plain text", "remove it"]),
        ("algorithm.preset=rec_one_sided_nois", ["algorithm.preset", "rec_one_sided_nois", "rec_one_side_nois"]),
        ("algorithm.clip.epsilon_lo=0.3", ["algorithm.clip.epsilon_lo", "0.3", "epsilon_low"]),
        ("algorithm.clip.outer_low=0.3", ["outer_low", "0.3", "one_side"]),
        ("algorithm.weight.temperature=2.0", ["temperature", "2.0"]),
        ("algorithm.clip.name=oneside", ["oneside", "one_side"]),
        ("algorithm.clip.epsilon_low=wide", ["epsilon_low", "wide"]),
    ],
)
def test_refusals_name_key_value_and_remedy(override, parts):
    with pytest.raises(ValueError) as error:
        load(override)
    for part in parts:
        assert part in str(error.value)


def test_greedy_evaluation_refuses_cuts_that_nothing_would_read():
    with pytest.raises(ValueError, match=r"evaluation.top_p = 0.9: is not read"):
        load("evaluation.temperature=0", "evaluation.top_p=0.9")


def test_file_errors_name_the_file(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        load_config(tmp_path / "missing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("seed: [1")
    with pytest.raises(ValueError, match=r"broken.yaml: not a valid YAML"):
        load_config(broken)
    broken.write_text("seed: 0\n")
    with pytest.raises(ValueError, match="output has no value"):
        load_config(broken)


def test_stored_config_loads_back_to_the_same(tmp_path):
    config = load("optimizer.learning_rate=1e-6", "algorithm.clip.epsilon_high=2.0")
    stored = tmp_path / "config.yaml"
    stored.write_text(to_yaml(config))
    assert load_config(stored) == config
    assert "epsilon_low" in stored.read_text()  # the preset's own options are spelled out
    assert yaml.safe_load(stored.read_text())["optimizer"]["learning_rate"] == 1e-6
