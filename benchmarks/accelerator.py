"""Measures this package on the GPU or TPU of one host, the most telling parts first; writes a JSON file.

    python -m benchmarks.accelerator --out FILE.json [--budget 600] [--only device,half_billion] [--rehearsal]
    python -m benchmarks.accelerator_page FILE.json      # the page of docs/accelerator.md

Each part is a process of its own with a time limit, alone on the device; the file keeps its findings so far if it is
stopped or fails, and the file is written after each part. A part that does not fit the budget is skipped with the
reason. `--rehearsal` runs everything in small sizes on the CPU. The part `claims` trains in runs/ and writes its table
next to experiments/claims, so that a later call resumes it. `--model model.attention=cudnn_lengths` chooses a kernel.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags

from recjax.runtime.files import write_whole

FLAGS = flags.FLAGS
REPOSITORY = Path(__file__).parents[1]
# Names of XLA's groups of operations that become CUDA graphs, loops among them.
GROUPS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
GRAPHS = f"--xla_gpu_enable_command_buffer={GROUPS}"
# Flags of XLA for an NVIDIA GPU, of which each is tried alone.
XLA_FLAGS = {
    "double_buffering": "--xla_gpu_enable_while_loop_double_buffering=true",
    "command_buffers": "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL",
    "no_triton": "--xla_gpu_enable_triton_gemm=false",
    "cudnn_products": "--xla_gpu_cudnn_gemm_fusion=true",
    "no_rematerialization": "--xla_disable_hlo_passes=rematerialization",
    "least_autotuning": "--xla_gpu_autotune_level=0",
}
# Parts that run only if --only names them: they need more time, TRL, or a model.
NAMED = ("decoding", "first_step_quickstart", "first_step_smollm2", "shape_g", "update_wide", "update_long", "claims")
NAMED += (
    "update_scanned",
    "update_kernels",
    *(f"flags_{name}" for name in XLA_FLAGS),
)
LEAST = 20  # seconds: a part is not started with less


class Part(NamedTuple):
    """A part's time limit and command.

    Attributes:
        command: arguments after `python`, given the file for its findings.
        read: findings from that file and from the printed text; None: the file holds them as JSON.
        environment: more variables; the memory that JAX takes is for one process at a time.
    """

    seconds: float
    command: Callable[[Path], list[str]]
    read: Callable[[Path, str], dict[str, Any]] | None = None
    environment: dict[str, str] = {}


def computed(name: str, seconds: float, **environment: str) -> Part:
    """A part of benchmarks.accelerator_parts."""
    rehearsal = ["rehearsal"] if FLAGS.rehearsal else []
    return Part(
        seconds,
        lambda file: ["-m", "benchmarks.accelerator_parts", name, str(file), *rehearsal, *FLAGS.model],
        environment=environment,
    )


def compared(letter: str, systems: str, seconds: float, rounds: str = "3", *more: str) -> Part:
    """benchmarks.run on a shape; its processes share the device's memory."""
    platform = "tpu" if Path("/dev/accel0").exists() else "cuda"
    shape, rounds = ("toy", "1") if FLAGS.rehearsal else (letter, rounds)

    def command(file: Path) -> list[str]:
        pythons = f"torch={sys.executable},trl={sys.executable}"
        options = ["--systems", systems, "--python", pythons, "--repeats", rounds, "--patience", "0", *more]
        return ["-m", "benchmarks.run", "--shape", shape, "--out", str(file), "--warmups", "1", *options]

    def read(file: Path, _: str) -> dict[str, Any]:
        result = json.loads(file.read_text())
        return {name: result.get(name) for name in ("rows", "skipped", "checks", "peaks", "notes")}

    return Part(seconds, command, read, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": platform})


def read_tests(_: Path, printed: str) -> dict[str, Any]:
    """Numbers of tests that passed, failed or were skipped, and the lines about the failed tests."""
    words = re.findall(r"::\S+ (PASSED|FAILED|ERROR|SKIPPED)", printed)
    counts = {word.lower(): words.count(word) for word in words}
    failures = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    return counts | {"failures": [line[:300] for line in failures[:40]]}


def read_quickstart(file: Path, _: str) -> dict[str, Any]:
    """Accuracy before and after, and seconds."""
    rows = [json.loads(line) for line in (file.with_suffix("") / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row["evaluation/accuracy"] for row in rows if "evaluation/accuracy" in row]
    return {"accuracy": [accuracy[0], accuracy[-1]], "wall_seconds": rows[-1].get("wall_seconds"), "rows": len(rows)}


def first_steps(name: str, seconds: float, *lines: str) -> Part:
    """benchmarks.first_step on a config of experiments/: an empty cache of programs, then a full one."""
    config = str(REPOSITORY / "experiments" / f"{name}.yaml")

    def read(file: Path, _: str) -> dict[str, Any]:
        (found,) = json.loads(file.read_text())["runs"].values()
        return {kind: runs[0] for kind, runs in found.items() if runs}

    return Part(
        seconds,
        lambda file: ["-m", "benchmarks.first_step", "--config", config, "--out", str(file), *lines, *FLAGS.model],
        read,
    )


def claimed(minutes: float) -> Part:
    """experiments.claims.accelerator: as many runs as the minutes have room for, those of its table not among them."""
    more = ["training.steps=1", "evaluation.every=1", "evaluation.problems=4"] if FLAGS.rehearsal else []
    table = ["--table", str(FLAGS.table)] if FLAGS.table else []

    def read(_: Path, printed: str) -> dict[str, Any]:
        return {"printed": [line for line in printed.splitlines() if line.startswith("C") or "runs" in line][-8:]}

    return Part(
        60 * minutes + 60,
        lambda _: ["-m", "experiments.claims.accelerator", "--minutes", str(minutes), *table, *more],
        read,
    )


def parts() -> dict[str, Part]:
    """All parts, by worth."""
    small = ["training.steps=2", "warm_start.steps=2", "evaluation.problems=16"] if FLAGS.rehearsal else []
    config = ["--config", str(REPOSITORY / "experiments" / "quickstart.yaml")]
    tests = ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-vv", "--tb=short", "tests/gpu"]
    torch = "torch_shared:bfloat16"
    return {
        "device": computed("device", 60),
        "gpu_tests": Part(120, lambda _: tests, read_tests),
        "parity": computed("parity", 70),
        "half_billion": computed("half_billion", 95),
        "one_and_a_half_billion": computed("one_and_a_half_billion", 150),
        "shape_a": compared("a", "recjax:bfloat16", 60),
        "shape_c": compared("c", "recjax:bfloat16", 60),
        "shape_d": compared("d", "recjax:bfloat16", 90),
        "shape_b": compared("b", "recjax:bfloat16", 90),
        "torch_a": compared("a", torch, 90),
        "torch_c": compared("c", torch, 90),
        "torch_d": compared("d", torch, 120),
        "slots": computed("slots", 90),
        "decoding": computed("decoding", 240),
        "attention": computed("attention", 60),
        "half_billion_packed": computed("half_billion_packed", 120),
        "one_and_a_half_billion_packed": computed("one_and_a_half_billion_packed", 120),
        "decode_graphs": computed("decode_graphs", 60, XLA_FLAGS=GRAPHS),
        "prediction": computed("prediction", 120),
        "quickstart": Part(
            180, lambda file: ["-m", "recjax.train", *config, f"output={file.with_suffix('')}", *small], read_quickstart
        ),
        "first_step_quickstart": first_steps("quickstart", 150, "warm_start.steps=20", *small[2:]),
        "first_step_smollm2": first_steps("smollm2_arithmetic", 240, *small[2:]),
        "shape_g": compared("g", "recjax:bfloat16,trl:bfloat16", 240, "2", "--checks", "none", "--phases", "step"),
        "update_wide": computed("update_wide", 240),
        "update_long": computed("update_long", 240),
        "update_scanned": computed("update_scanned", 90),
        "update_kernels": computed("update_kernels", 240),
        **{f"flags_{name}": computed("update_alone", 90, XLA_FLAGS=flag) for name, flag in XLA_FLAGS.items()},
        "claims": claimed(0.5 if FLAGS.rehearsal else FLAGS.minutes),
    }


def unfit(name: str) -> str | None:
    """Why a part cannot run on this machine; None if it can."""
    needs_smollm2 = (name == "shape_b" and not FLAGS.rehearsal) or name in ("first_step_smollm2", "claims")
    if needs_smollm2 and not (REPOSITORY / "models/SmolLM2-135M-Instruct").is_dir():
        return "models/SmolLM2-135M-Instruct is not there"
    if FLAGS.rehearsal and ("graphs" in name or name.startswith("flags_")):
        return "CUDA graphs and flags of XLA are for a GPU"
    if name.startswith("torch"):
        code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
        if subprocess.run([sys.executable, "-c", code], capture_output=True).returncode:
            return "torch is not there, or sees no GPU"
    return None


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def measured(name: str, part: Part, limit: float, folder: Path) -> dict[str, Any]:
    """Runs a part; its findings, with `seconds` and, unless it is done, `why`."""
    file, log = folder / f"{name}.json", folder / f"{name}.log"
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ, "PYTHONPATH": _path(), **part.environment}
    environment |= {"RECJAX_CACHE": str(folder / "cache")}
    if not name.startswith("first_step"):  # which has caches of its own
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))
    if FLAGS.rehearsal:
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    started = time.monotonic()
    with log.open("w") as printed:
        process = subprocess.Popen(
            [sys.executable, *part.command(file)],
            cwd=REPOSITORY,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=limit)
            why = None if status == 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            why = f"stopped after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds, text = time.monotonic() - started, log.read_text(errors="replace")
    try:
        found = part.read(file, text) if part.read else json.loads(file.read_text())
    except (OSError, ValueError, LookupError) as error:
        found, why = {}, why or f"{type(error).__name__}: {error}"
    if why:
        say(text[-3000:])
        found |= {"why": why, "last_words": text[-1500:]}
    return {"seconds": round(seconds, 1)} | found


def _path() -> str:
    return os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))


def main(_) -> None:
    """Runs the parts within the budget."""
    started, everything = time.monotonic(), parts()
    chosen = FLAGS.only or [name for name in everything if name not in NAMED]
    if unknown := [name for name in chosen if name not in everything]:
        sys.exit(f"error: --only {','.join(unknown)}: there is no such part; take some of {', '.join(everything)}")
    content = {"command": sys.argv[1:], "date": time.strftime("%Y-%m-%d"), "rehearsal": FLAGS.rehearsal}
    content |= {"parts": {}, "skipped": {}}
    out = Path(FLAGS.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="recjax_accelerator_", ignore_cleanup_errors=True) as place:
        for name in chosen:
            left = FLAGS.budget - (time.monotonic() - started)
            why = f"{left:.0f} s of the budget are left" if left < LEAST else unfit(name)
            if why:
                content["skipped"][name] = why
                say(f"{name}: skipped: {why}")
            else:
                limit = everything[name].seconds * (10 if FLAGS.rehearsal else 1)
                say(f"{name}: begins, {left:.0f} s of the budget are left")
                found = measured(name, everything[name], min(limit, left), Path(place))
                content["parts"][name] = found
                say(f"{name}: {found['seconds']} s {found.get('why', 'done')}: {json.dumps(found)[:1500]}")
            write_whole(out, json.dumps(content, indent=1) + "\n")
    say(f"written: {FLAGS.out}")


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "JSON file to write.", required=True)
    flags.DEFINE_float("budget", 600.0, "Seconds for all parts.", lower_bound=0)
    flags.DEFINE_list("only", None, f"Parts to run, in this order; default: all but {NAMED}.")
    flags.DEFINE_float("minutes", 5.0, "Minutes of the part `claims`.", lower_bound=0.5)
    flags.DEFINE_string("table", None, "Table of the part `claims`; default: the one in the repository.")
    flags.DEFINE_multi_string(
        "model",
        [],
        "A line for the config of random weights and first steps, such as model.attention=cudnn_lengths; may repeat.",
    )
    flags.DEFINE_bool("rehearsal", False, "Small sizes on the CPU.")
    app.run(main)
