"""A short run of a tiny random model of every family learns a trivial task."""

import pytest

from recjax.config import load_config
from recjax.hub.tokenizers import character_tokenizer
from tests.hub.test_families import MODELS, random_model
from tests.training.tiny_run import TINY, train

pytestmark = pytest.mark.campaign

MARGIN = 0.3  # of the mean share of digits in a completion, which is about 0.25 for a random policy


@pytest.mark.parametrize("name", MODELS)
def test_a_run_learns_to_write_digits(name, tmp_path):
    random_model(name, tmp_path / "model")
    character_tokenizer("0123456789+=").save_pretrained(tmp_path / "model")
    (tmp_path / "tiny.yaml").write_text(TINY)
    model = ["model.decoder=null", f"model.path={tmp_path / 'model'}"]
    steps = ["training.steps=30", "training.checkpoint_every=30", "evaluation={every: 30, problems: 20}"]
    batch = ["rollout={prompts_per_step: 4, group_size: 8, max_completion_tokens: 3}", "algorithm.preset=grpo"]
    rows = train(load_config(tmp_path / "tiny.yaml", [f"output={tmp_path / 'run'}", *model, *steps, *batch]))
    before, after = (row["evaluation/reward"] for row in rows if "evaluation/reward" in row)
    print(f"\n{name}: {before:.2f} → {after:.2f}")
    assert after > before + MARGIN
