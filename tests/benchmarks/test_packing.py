"""The benchmark of packing runs as its page says, and a benchmark's model is one that recjax reads."""

import pytest

from benchmarks.inputs import _copied_model, word_tokenizer, write_random_model
from benchmarks.shapes import Sizes
from recjax.hub.weights import read_config
from tests import commands

pytestmark = pytest.mark.campaign


def test_all_ways_are_timed():
    sizes = {"prompts": 2, "group_size": 2, "prompt_tokens": 8, "max_tokens": 8, "micro_batch_prompts": 1, "repeats": 1}
    flags = [f"--{name}={value}" for name, value in (sizes | {"tokens_per_micro_batch": 64}).items()]
    ended = commands.run(["-m", "benchmarks.packing", *flags])
    assert ended.returncode == 0, ended.stderr
    timed = [line.split(": median")[0] for line in ended.stdout.splitlines() if ": median" in line]
    assert [name.split(",")[0] for name in timed] == ["padded", "packed", "packed"] and timed[2].endswith("shared")


def test_updates_with_and_without_centering_are_timed():
    ended = commands.run(["-m", "benchmarks.centering", "64", "8"])
    assert ended.returncode == 0, ended.stderr
    assert [line.split(":")[0] for line in ended.stdout.splitlines()] == ["plain", "centered"]


def test_weights_are_copied_as_runs_refuse_links(tmp_path):
    sizes = Sizes(32, 8, 16, 1, 2, 1, 4)
    tokenizer = word_tokenizer(sizes.vocabulary)
    write_random_model(tmp_path / "model", sizes, tokenizer)
    tokenizer.save_pretrained(tmp_path / "model")
    _copied_model(tmp_path / "copy", tmp_path / "model")
    assert read_config(tmp_path / "copy").hidden_size == 8
    weights = (folder / "model.safetensors" for folder in (tmp_path / "copy", tmp_path / "model"))
    assert len({path.read_bytes() for path in weights}) == 1
