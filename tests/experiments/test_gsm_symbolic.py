"""Data in GSM8K's form from a generator: the folder that experiments/gsm_symbolic.yaml reads."""

from types import SimpleNamespace

import pytest

from experiments.gsm_symbolic import write_splits
from recjax.config import load_config
from recjax.runtime.workers import Workers
from recjax.tasks.loading import load_task


def test_the_folder_is_read_as_gsm8k_is(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")  # here, as every worker imports this file
    # The generator runs here, which saves the start of a process.
    monkeypatch.setattr(Workers, "call", lambda self, function, *args: SimpleNamespace(result=lambda: function(*args)))
    write_splits(tmp_path, train=12, test=8)
    folders = [f"task.gsm8k.{split}={tmp_path}" for split in ("train", "evaluation")]
    task = load_task(load_config("experiments/gsm_symbolic.yaml", folders))
    assert (len(task.train), len(task.evaluation)) == (12, 8)
    for problem in [*task.train, *task.evaluation]:
        assert float(problem.answer) >= 0 and problem.prompt[-1]["role"] == "user"
