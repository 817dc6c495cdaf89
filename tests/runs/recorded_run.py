"""Run folders that no training made: files as a run writes them."""

import functools
import json

from recjax.config import make_config, to_yaml
from recjax.config.yaml_values import read_yaml
from tests.training.tiny_run import TINY


@functools.cache
def config_text(*overrides):
    """The config.yaml of a run with these overrides."""
    return to_yaml(make_config(read_yaml(TINY), overrides))


def record_run(folder, overrides=(), *, seed=0, steps=4, planned=None, accuracy=0.5, changes=(), rows=None, samples=()):
    """Writes a run of some steps, finished unless more are planned.

    Args:
        overrides: `key=value` of its config.
        accuracy: of every evaluation; steps 0, 2, 4, … have one.
        changes: entries `changed` of later starts.
        rows: rows of metrics in place of those of `steps`.
        samples: completions of the evaluation after the last step.
    """
    folder.mkdir(parents=True)
    planned = planned or steps
    text = config_text(*overrides, f"training.steps={planned}")
    for line, other in (("seed: 0", f"seed: {seed}"), ("output: unset", f"output: {folder}")):
        assert f"{line}\n" in text
        text = text.replace(f"{line}\n", f"{other}\n", 1)
    (folder / "config.yaml").write_text(text)
    start = {"started": "now", "recjax": "0.1.0", "weights": {"initial policy": "0123456789abcdef"}}
    starts = [start, *({"started": "later", "weights": {}, "changed": change} for change in changes)]
    (folder / "environment.json").write_text(json.dumps(starts))
    if rows is None:
        rows = [{"step": step, "reward": step / 10, "wall_seconds": 36.0 * step} for step in range(steps + 1)]
        for row in rows[::2]:
            row["evaluation/accuracy"] = accuracy
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if planned == steps:
        (folder / "summary.json").write_text(json.dumps({"steps": steps, "wall_seconds": 7200.0}))
    if samples:
        (folder / "samples").mkdir()
        text = "".join(json.dumps({"step": steps, **sample}) + "\n" for sample in samples)
        (folder / "samples" / "after.jsonl").write_text(text)
    return folder
