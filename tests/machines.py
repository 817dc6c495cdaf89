"""Runs numeric tests as other machines round: python -m tests.machines [--only NAME ...] [-- PYTEST ARGUMENTS]

Each of SETTINGS makes XLA add the same numbers in another order, or use other instructions; the last one moves the
inputs of tests by one unit in the last place. The command prints a row for each setting, the tests that fail in it, and
the comparisons that use more than NEAR of their tolerance: these pass here by luck. It exits with 1 if a test fails.
PYTEST ARGUMENTS take the place of FOLDERS and of the quick set, for example `-- -m slow tests/models`.

Compiled programs of two settings are in two folders: a program holds the instructions of its flags.

What one CPU does not show: the matrix products of Eigen and YNNPACK choose instructions by the CPU, not by a flag.
"""

import argparse
import inspect
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [
    f"tests/{name}"
    for name in (
        "algorithms",
        "models",
        "training",
        "rollout",
        "agents",
        "experience",
        "store",
        "sources",
        "logs",
        "runs",
        "hub",
    )
]
QUICK = "not slow and not campaign"
# What compares numbers with a tolerance, or arrays bit for bit.
COMPARISONS = re.compile(r"allclose|all_close|isclose|approx\(|array_equal|trees_all_equal|assert_close|assert_same_")
NEAR = 0.3
MOVED = "RECJAX_TEST_INPUTS_MOVED"


class Setting(NamedTuple):
    """How a machine differs from this one.

    flags: added to XLA_FLAGS; XLA ends the process at a flag that it does not know.
    environment: other variables.
    prefix: words before the command.
    needs: a flag of the CPU; the setting is skipped on a CPU without it.
    without: words in the names of tests that the setting cannot compile.
    """

    flags: str = ""
    environment: dict[str, str] = {}
    prefix: tuple[str, ...] = ()
    needs: str = ""
    without: str = ""


NO_YNNPACK = "--xla_cpu_experimental_ynn_fusion_type="
SETTINGS = {
    "plain": Setting(),
    # XLA has no conversion of float8 for these instructions: LLVM does not find __extendhfsf2.
    "SSE4.2": Setting("--xla_cpu_max_isa=SSE4_2", {"ATEN_CPU_CAPABILITY": "default"}, without="float8"),
    "AVX": Setting("--xla_cpu_max_isa=AVX", needs="avx"),
    "AVX2": Setting("--xla_cpu_max_isa=AVX2", {"ATEN_CPU_CAPABILITY": "avx2"}, needs="avx2"),
    "AVX-512": Setting("--xla_cpu_max_isa=AVX512 --xla_cpu_prefer_vector_width=512", needs="avx512f"),
    "no YNNPACK": Setting(NO_YNNPACK),
    # While YNNPACK has the matrix products, this flag has no effect.
    "no YNNPACK, no Eigen threads": Setting(f"{NO_YNNPACK} --xla_cpu_multi_thread_eigen=false"),
    # Tests compile without most optimizations. With them LLVM fuses products and sums, as users' programs do.
    "optimized": Setting(environment={"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}),
    "one core": Setting(prefix=("taskset", "-c", "0")),
    "moved inputs": Setting(environment={MOVED: "1"}),
}


# --- What pytest does in each setting: -p tests.machines


used_shares: dict[str, float] = {}  # by file and line of a comparison, the largest share of its tolerance


def pytest_configure():
    if os.environ.get(MOVED):
        move_inputs()
    measure_comparisons()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    numeric = [item for item in items if is_numeric(item.function)]
    config.hook.pytest_deselected(items=[item for item in items if item not in numeric])
    items[:] = numeric


def pytest_terminal_summary(terminalreporter):
    for place, share in sorted(used_shares.items(), key=lambda one: -one[1]):
        if share > NEAR:
            terminalreporter.write_line(f"NEAR {share:.2f} of the tolerance: {place}")


def is_numeric(function) -> bool:
    """Whether a test, or a function of the tests that it names, compares numbers."""
    waiting, read = [inspect.unwrap(function)], set()
    while waiting:
        function = waiting.pop()
        if function in read:
            continue
        read.add(function)
        source = inspect.getsource(function)
        if COMPARISONS.search(source):
            return True
        for name in set(re.findall(r"\w+", source)):
            named = inspect.unwrap(function.__globals__.get(name))
            if inspect.isfunction(named) and named.__module__.startswith("tests."):
                waiting.append(named)
    return False


def measure_comparisons() -> None:
    """Notes the share of its tolerance that each call of NumPy's assert_allclose uses, which those of chex call."""
    original = np.testing.assert_allclose

    def measured(actual, desired, rtol=1e-7, atol=0, *arguments, **options):
        __tracebackhide__ = True
        original(actual, desired, rtol, atol, *arguments, **options)
        actual, desired = np.asarray(actual, np.float64), np.asarray(desired, np.float64)
        with np.errstate(all="ignore"):
            shares = np.ravel(np.abs(actual - desired) / (atol + rtol * np.abs(desired)))
        frame = sys._getframe(1)
        while frame is not None and not is_test_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            place = f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_lineno}"
            used_shares[place] = max(used_shares.get(place, 0.0), shares[np.isfinite(shares)].max(initial=0.0))

    np.testing.assert_allclose = measured


def is_test_file(path: str) -> bool:
    """Whether a file is one of the tests, and not the one that compares for them."""
    return path.startswith(f"{ROOT}/tests/") and not path.endswith("closeness.py")


def moved(x: Any, numpy=np) -> Any:
    """An array of floats, one unit in the last place of float32 away: every other element up, and the others down.

    Zeros stay. So do arrays of other types.

    Args:
        numpy: the module to compute with, NumPy or jax.numpy.
    """
    if x.dtype not in (np.float32, np.float64):
        return x
    single = x.astype(np.float32)
    is_even = numpy.arange(x.size).reshape(x.shape) % 2 == 0
    target = numpy.where(is_even, np.float32(np.inf), np.float32(-np.inf))
    return numpy.where(single == 0, x, numpy.nextafter(single, target)).astype(x.dtype)


class MovedGenerator(np.random.Generator):
    """NumPy's generator, whose real numbers are moved."""

    def normal(self, *arguments, **options):
        return moved(np.asarray(super().normal(*arguments, **options)))[()]

    def uniform(self, *arguments, **options):
        return moved(np.asarray(super().uniform(*arguments, **options)))[()]

    def random(self, *arguments, **options):
        return moved(np.asarray(super().random(*arguments, **options)))[()]

    def standard_normal(self, *arguments, **options):
        return moved(np.asarray(super().standard_normal(*arguments, **options)))[()]


def move_inputs() -> None:
    """Moves what the process draws from NumPy's generators and from jax.random.normal, and initial parameters.

    Literals, files, draws of hypothesis and of torch, and other processes stay as they are.
    """
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    default_rng, normal, init = np.random.default_rng, jax.random.normal, nn.Module.init

    def moved_init(*arguments, **options):
        return jax.tree.map(lambda x: moved(x, jnp), init(*arguments, **options))

    np.random.default_rng = lambda *seed: MovedGenerator(default_rng(*seed).bit_generator)
    jax.random.normal = lambda *arguments, **options: moved(normal(*arguments, **options), jnp)
    nn.Module.init = moved_init


# --- The command.


class Result(NamedTuple):
    """What pytest said in a setting.

    passed, failed: numbers of tests.
    seconds: of the CPU.
    lines: the tests that failed, and the comparisons near their tolerance.
    """

    passed: int
    failed: int
    seconds: float
    lines: list[str]


def result_of(name: str, programs: Path, arguments: list[str]) -> Result:
    """Runs the numeric tests in a setting.

    Args:
        programs: the folder of compiled programs, with a folder for each setting.
        arguments: pytest's.
    Raises:
        RuntimeError: pytest did not run the tests.
    """
    setting = SETTINGS[name]
    environment = os.environ | setting.environment
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {setting.flags}".strip()
    environment["RECJAX_TEST_PROGRAMS"] = str(programs / re.sub(r"\W+", "_", name))
    command = [*setting.prefix, sys.executable, "-m", "pytest", "-p", "tests.machines", "-rfE", "--tb=short"]
    if setting.without:
        command += ["-k", f"not {setting.without}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        output = done.stdout[-3000:] + done.stderr[-3000:]
        raise RuntimeError(f"{name}: pytest ended with exit status {done.returncode}\n{output}")
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    return Result(
        counts.get("passed", 0),
        counts.get("failed", 0) + counts.get("error", 0),
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        re.findall(r"^(?:FAILED|ERROR|NEAR) .+$", done.stdout, re.MULTILINE),
    )


def is_possible(name: str) -> bool:
    """Whether this machine has what the setting needs."""
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and SETTINGS[name].needs in cpu.read_text()


def main() -> None:
    """Reads the arguments, runs the settings one after the other, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("arguments", nargs="*", metavar="PYTEST ARGUMENT", help="after --")
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="recjax-machines-") as folder:
        programs = Path(os.environ.get("RECJAX_TEST_PROGRAMS", folder))
        print("| setting | passed | failed | CPU seconds |\n|---|---|---|---|", flush=True)
        for name in given.only:
            if not is_possible(name):
                print(f"| {name} | not on this CPU | | |", flush=True)
                continue
            result = result_of(name, programs, given.arguments or ["-m", QUICK, *FOLDERS])
            print(f"| {name} | {result.passed} | {result.failed} | {result.seconds:.0f} |", *result.lines, sep="\n")
            failed += result.failed
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
