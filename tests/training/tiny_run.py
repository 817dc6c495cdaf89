"""A run small enough to repeat: a tiny decoder on one-digit sums, rewarded for every digit."""

import contextlib
import itertools
from pathlib import Path

import jax
import pytest

from recjax.config import MeshConfig
from recjax.logs import log
from recjax.logs.metrics import read_metrics
from recjax.runs import start
from recjax.training import learner
from recjax.training.mesh import make_mesh

TINY = """
output: unset
model: {decoder: {hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, intermediate_size: 32}}
task: {arithmetic: {problems: ["1..9 + 1..9"], template: "{a}{op}{b}="}, reward: "tests.training.tiny_run:digit_share"}
rollout: {prompts_per_step: 4, group_size: 4, max_completion_tokens: 3}
algorithm: {preset: rec_one_side_nois}
optimizer: {learning_rate: 1e-2}
training: {steps: 7, checkpoint_every: 3}
evaluation: {every: 3, problems: 10}
"""


def digit_share(prompts, completions, answers) -> list[float]:
    """Share of a completion's three places that hold a digit."""
    return [sum(character.isdigit() for character in text) / 3 for text in completions]


def one_device():
    """One of the virtual devices as the mesh in context, unless there is a mesh."""
    alone = jax.sharding.get_mesh().empty
    return jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])) if alone else contextlib.nullcontext()


@contextlib.contextmanager
def without_figures():
    """Text in place of a run's figures, which take most of a tiny run's time; also while fixtures are made."""

    def draw(rows, title, path, signs=None):
        path.parent.mkdir(exist_ok=True)
        path.write_text("a figure")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(log, "draw_training", draw)
        patched.setattr(log, "draw_experience", draw)
        yield


def train(config, **replaced) -> list[dict]:
    """The rows of metrics.jsonl after the whole run, on one device, without figures.

    Args:
        replaced: `sources` and `learner` of `start.train`.
    """
    with one_device(), without_figures():
        start.train(config, **replaced)
    return read_metrics(Path(config.output) / "metrics.jsonl")


def train_until_killed(config, at: int = 5) -> None:
    """Trains until update `at` of this call, in whose place a KeyboardInterrupt is raised."""
    update, calls = learner.update, itertools.count(1)

    def dies(*args, **named):
        if next(calls) == at:
            raise KeyboardInterrupt
        return update(*args, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learner, "update", dies)
        with pytest.raises(KeyboardInterrupt):
            train(config)


def without_times(rows: list[dict]) -> list[dict]:
    """Rows without what the clock wrote."""
    times = ("wall_seconds", "tokens_per_second", "device_idle_seconds", "generators/waited_seconds")
    times += ("follow/waited_seconds",)
    return [{name: row[name] for name in row if name not in times} for row in rows]
