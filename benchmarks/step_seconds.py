"""Seconds of a step of real runs by size, from which `recjax.train --dry_run` predicts the seconds of other runs.

    python -m benchmarks.step_seconds --out benchmarks/results/steps_NAME.json    # measures this CPU
    python -m benchmarks.step_seconds --write       # collects the committed files for the dry run
    python -m benchmarks.step_seconds --errors      # prints predicted and measured seconds of each step

Each size is a run of `recjax.run` in a process of its own, with random weights and completions that all reach their
limit. After a warm-up, which compiles, the run waits until other programs are quiet, then makes the timed steps. Their
seconds are those from one row of metrics to the next: all of the loop, but no evaluation and no checkpoint.
`--write` also collects the files of `python -m benchmarks.accelerator`, which have sampling and update alone.
"""

import dataclasses
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from benchmarks.costs import PEAKS, SPEEDS
from benchmarks.inputs import write_inputs
from benchmarks.run import machine, other_load
from benchmarks.shapes import SHAPES, Shape, Sizes
from recjax.errors import UserError
from recjax.planning import seconds as planned
from recjax.planning.seconds import COMMAND
from recjax.runtime.console import command, start
from recjax.runtime.memory import prepare_host_memory

FLAGS = flags.FLAGS
RESULTS = Path(__file__).parent / "results"
TINY = Sizes(13, 64, 256, 3, 4, 4, 16)  # the decoder of experiments/quickstart.yaml
# Around the quickstart, and shape (a) with one thing varied.
MEASURED = {
    "quickstart": Shape(TINY, 16, 8, 6, 6, ()),
    "quickstart, 32 completions each": Shape(TINY, 16, 32, 6, 6, ()),
    "quickstart, longer": Shape(TINY, 8, 8, 16, 48, ()),
    "a": SHAPES["a"],
    "a, completions of 16": dataclasses.replace(SHAPES["a"], completion_tokens=16),
    "a, prompts of 256": dataclasses.replace(SHAPES["a"], prompts=4, prompt_tokens=256, completion_tokens=32),
    "a, groups of 4": dataclasses.replace(SHAPES["a"], group_size=4, completion_tokens=32),
    "a, half the width": dataclasses.replace(SHAPES["a"], model=Sizes(4096, 128, 512, 4, 2, 2, 64)),
    "a, twice the width": Shape(Sizes(4096, 512, 2048, 4, 8, 8, 64), 4, 8, 64, 32, ()),
}
WARM_UP = 8  # steps; the first compiles, and the next ones touch new memory
STEPS = 3  # timed steps, after one that the wait has cut
ACCELERATORS = {"h100.json": "h100-80", "h200.json": "h200-141"}
REMARKS = {"h100.json": ", with an earlier version's slower sampler"}  # benchmarks/RESULTS.md, On a GPU
PARTS = ("half_billion", "one_and_a_half_billion")


def config_of(shape: Shape, folder: Path) -> dict[str, Any]:
    """The config's values of a run of a shape, whose inputs are in a folder."""
    return {
        "output": str(folder / "run"),
        "model": {"path": str(folder / "model")},
        "task": {
            "file": {"train": str(folder / "prompts.jsonl"), "evaluation": str(folder / "held_out.jsonl")},
            "reward": "benchmarks.reward:vowel_share",
        },
        "rollout": {
            "prompts_per_step": shape.prompts,
            "group_size": shape.group_size,
            "max_completion_tokens": shape.completion_tokens,
        },
        "algorithm": {"preset": "grpo"},
        "training": {"steps": 10_000, "checkpoint_every": 10_000},
        "evaluation": {"every": 0},
    }


def serve(pipe: Connection, shape: Shape) -> None:
    """Makes a run whose steps wait for numbers of steps from the pipe, and answers with the seconds of each."""
    prepare_host_memory()
    from recjax import run
    from recjax.config import make_config

    left = WARM_UP
    seconds: list[float] = []
    latest = time.perf_counter()

    def on_step(row: dict[str, Any]) -> None:
        nonlocal left, latest
        if "reward" not in row:
            return
        now = time.perf_counter()
        seconds.append(now - latest)
        left -= 1
        if left == 0:
            pipe.send(seconds[1:])
            left = pipe.recv()
            seconds.clear()
            now = time.perf_counter()
        latest = now

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_inputs(folder, shape, "")
        run(make_config(config_of(shape, folder), [], COMMAND), on_step=on_step)


class Measurement(NamedTuple):
    """Seconds of each timed step, and the share of all cores that other programs used just before."""

    seconds: list[float]
    other_load: float


def measure(shape: Shape, quiet: float, patience: float) -> Measurement:
    """Measures the steps of a shape's run.

    Args:
        quiet, patience: see `benchmarks.run.other_load`.
    Raises:
        UserError: the run ended with an error.
    """
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=serve, args=(there, shape))
    process.start()
    there.close()
    try:
        here.recv()
        load = other_load(quiet, patience)
        here.send(1 + STEPS)
        return Measurement(here.recv(), load)
    except EOFError:
        raise UserError("", "the run ended with an error, see above") from None
    finally:
        process.kill()
        process.join()


def measured_file(quiet: float, patience: float, only: Sequence[str], before: Mapping[str, Any]) -> dict[str, Any]:
    """What `--out` writes: this machine, and shape and seconds of each step.

    Args:
        only: names of the sizes to measure; empty: all.
        before: the file's earlier steps, which stay where they are not measured again.
    """
    steps = dict(before)
    for name in only or MEASURED:
        shape = MEASURED[name]
        found = measure(shape, quiet, patience)
        steps[name] = {"shape": dataclasses.asdict(shape), **found._asdict()}
        print(f"{name}: {statistics.median(found.seconds):.4g} s a step, other load {found.other_load:.0%}", flush=True)
    return {"machine": machine(), "device": planned.this_device(), "precision": "float32", "steps": steps}


# --- Collecting.


def _step(shape: dict[str, Any], seconds: list[float]) -> dict[str, Any]:
    """A step of step_seconds.json, of a shape as a file of results has it."""
    sizes = shape["model"]
    model = {
        "vocab_size": sizes["vocabulary"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["intermediate"],
        "num_layers": sizes["layers"],
        "num_heads": sizes["heads"],
        "num_kv_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
    }
    batch = {name: shape[name] for name in ("prompts", "group_size", "prompt_tokens", "completion_tokens")}
    return {"model": model, "batch": batch, "seconds": [float(f"{value:.4g}") for value in seconds]}


def accelerator_steps(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds of sampling and of the update, of a file of `python -m benchmarks.accelerator`."""
    steps = []
    for name in PARTS:
        part = content["parts"][name]
        shape = part["shape"]
        tokens = shape["prompts"] * shape["group_size"] * shape["completion_tokens"]
        sampling = tokens / part["decode"]["generation_tokens_per_second"]
        steps.append(_step(shape, [sampling, statistics.median(part["update"]["seconds"])]))
    return steps


def collected() -> dict[str, Any]:
    """What step_seconds.json has, from the files of results."""
    devices = {}
    for name, accelerator in ACCELERATORS.items():
        content = json.loads((RESULTS / name).read_text(encoding="utf-8"))
        peak = SPEEDS[accelerator]
        (device,) = [kind for kind, speed in PEAKS.items() if speed is peak]
        devices[device] = {
            "source": f"benchmarks/results/{name}",
            "accelerator": accelerator,
            "precision": "bfloat16",
            "date": content["date"],
            "remark": REMARKS.get(name, ""),
            "peak_flops": peak["flops"],
            "peak_bytes": peak["bytes"],
            "steps": accelerator_steps(content),
        }
    for path in sorted(RESULTS.glob("steps_*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        steps = [_step(step["shape"], [statistics.median(step["seconds"])]) for step in content["steps"].values()]
        devices[content["device"]] = {
            "source": f"benchmarks/results/{path.name}",
            "accelerator": None,
            "precision": content["precision"],
            "date": content["machine"]["date"][:10],
            "remark": "",
            "peak_flops": None,
            "peak_bytes": None,
            "steps": steps,
        }
    return {"about": f"Written by {COMMAND} --write, from the files that `source` names.", "devices": devices}


def text() -> str:
    """The text of step_seconds.json."""
    return json.dumps(collected(), indent=1) + "\n"


def show_errors() -> None:
    """Prints each measured step with its prediction, and each device's errors."""
    for device in planned.measured_devices().values():
        low, high = planned.errors(device)
        print(f"{device.name}: measured / predicted from the others {low:.2f} to {high:.2f}")
        for step in device.measured:
            expected = planned.predicted_seconds(device, step.work)
            print(f"  {sum(step.seconds):.4g} s measured, {expected.expected:.4g} s expected")


@command
def main(argv: list[str]) -> None:
    """Measures, collects or prints."""
    if FLAGS.out:
        path = Path(FLAGS.out)
        before = {}
        if FLAGS.only:
            before = json.loads(path.read_text(encoding="utf-8"))["steps"]
        content = measured_file(FLAGS.quiet, FLAGS.patience, FLAGS.only, before)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if FLAGS.write:
        planned.FILE.write_text(text(), encoding="utf-8")
    if FLAGS.errors:
        show_errors()


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "JSON file to write; measures this machine's CPU.")
    flags.DEFINE_multi_enum("only", [], list(MEASURED), "Measure this size again, and keep the rest of the file.")
    flags.DEFINE_float("quiet", 0.15, "Other load, as a share of all cores, above which a run waits.", lower_bound=0)
    flags.DEFINE_float("patience", 60.0, "Seconds that a run waits at most.")
    flags.DEFINE_bool("write", False, "Collect the files of benchmarks/results in recjax/planning/step_seconds.json.")
    flags.DEFINE_bool("errors", False, "Print predicted and measured seconds of each step.")
    start(main)
