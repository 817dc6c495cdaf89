"""Runs of the toy task as compiled programs are the trainer's runs."""

import json
import random

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import yaml

from experiments.claims import map as claims_map
from experiments.claims.programs import last_numbers
from recjax.analysis.sweeps import SweepRun, read_sweep
from recjax.config import Config
from recjax.hub.tokenizers import character_tokenizer
from recjax.logs.metrics import read_metrics
from recjax.runs.start import train
from recjax.tasks.rewards import last_number_match

pytestmark = pytest.mark.campaign

SMALL = [
    "model.decoder={hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, intermediate_size: 32}",
    "warm_start={steps: 100, batch_size: 64, learning_rate: 5e-3}",
    "task.arithmetic.problems=['1..9 + 1..9']",
    "training.steps=8",
    "evaluation={every: 4, problems: 16, samples: 2}",
]


def test_rewards_are_those_of_the_tasks_function():
    letters = "0123456789+=;"
    tokenizer, choose = character_tokenizer(letters), random.Random(0)
    texts = ["", "7", "=", "0012", *("".join(choose.choices(letters, k=choose.randrange(9))) for _ in range(300))]
    answers = [str(choose.choice([7, 12, 3, 0, 45])) for _ in texts]
    tokens, counts = np.zeros((len(texts), 12), np.int32), np.array([len(text) + 1 for text in texts])
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = tokenizer.encode(text) if text else []
        tokens[row, len(text) + 1 :] = tokenizer.encode("7")[0]  # behind the end
    digits = jnp.array([-1, *range(10), -1, -1, -1])
    found = last_numbers(jnp.array(tokens), jnp.array(counts), digits) == jnp.array([int(answer) for answer in answers])
    assert np.array(found, float).tolist() == last_number_match([""] * len(texts), texts, answers)
    assert 0 < found.sum() < len(texts)


def test_a_run_in_the_table_is_finished(tmp_path):
    path = tmp_path / "map.parquet"
    runs = [
        SweepRun({"algorithm": name, "seed": "0"}, [], Config.model_construct(output=str(tmp_path / f"{name}__0")))
        for name in ("grpo", "opmd", "asymre")
    ]
    for place, run in enumerate(runs[:2]):
        claims_map.file_of(run).write_text(json.dumps({"step": [0, 25], "reward": [None, place]}))
    table = claims_map.collect(runs, path)
    assert len(table) == 4 and table["reward"].tolist()[1::2] == [0, 1]
    table.to_parquet(path)
    claims_map.file_of(runs[0]).unlink()
    assert claims_map.collected(runs, path).keys() == {"grpo__0", "opmd__0"}
    pd.testing.assert_frame_equal(claims_map.collect(runs, path), table, check_dtype=False)


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", "1.6e-3"), ("sgd", "0.5")])
def test_runs_are_the_trainers(optimizer, rate, tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    extra = [*SMALL, "training.checkpoint_every=8", f"optimizer.name={optimizer}"]
    sweep = yaml.safe_load((claims_map.HERE / "map.yaml").read_text())
    sweep |= {"config": str(claims_map.HERE / sweep["config"]), "output": str(tmp_path)}
    sweep["settings"]["rate"] = {rate: {"optimizer.learning_rate": float(rate)}}
    grid = {"algorithm": ["red_drop"], "rate": [rate], "regime": ["interval_5", "offset_10"], "seed": ["1"]}
    (tmp_path / "map.yaml").write_text(yaml.safe_dump(sweep | {"grids": [grid]}, sort_keys=False))
    chosen = read_sweep(tmp_path / "map.yaml", extra=extra)[1]
    assert len(chosen) == 2
    claims_map.make(claims_map.in_order(chosen))
    table = claims_map.collect(chosen, tmp_path / "map.parquet")
    assert table["evaluation/accuracy"].between(0, 1).all()
    for run in chosen:
        train(run.config)
        theirs = pd.DataFrame(read_metrics(tmp_path / run.name / "metrics.jsonl")).set_index("step")
        ours = table[table["regime"] == run.settings["regime"]].set_index("step")
        for name in ("evaluation/accuracy", "evaluation/initial_kl"):
            np.testing.assert_allclose(ours[name], theirs[name].loc[[0, 4, 8]], atol=1e-4)
        for name in ("reward", "entropy", "ratio/q99", "gradient_norm"):
            means = [theirs[name].loc[first : first + 3].mean() for first in (1, 5)]
            np.testing.assert_allclose(ours[name].loc[[4, 8]], means, rtol=2e-3)
    learns = table[table["step"] > 0]
    assert (learns["reward"] > 0).all() and (learns["gradient_norm"] > 0).all()
    assert learns[learns["step"] == 8]["ratio/q99"].nunique() == 2  # regimes differ
