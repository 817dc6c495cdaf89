"""SIGKILLs: at random events, at random moments, at chosen rows, in every regime and during the warm start."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recjax.config import load_config
from recjax.runs.folder import is_finished
from tests.faults.outcomes import Outcome
from tests.faults.runs import OPTIONS, Place, differs, run, start
from tests.training.killed_run import trained

WARM_START = "warm_start={steps: 300, batch_size: 16}"
MODES = {
    "on-policy": [],
    "interval": ["regime.sync_interval=3"],
    "offset": ["regime.sync_interval=3", "regime.sync_offset=2"],
    "offline": ["regime.offline=true"],
    "store": ["experience.store={folder}/store"],
    "replay": ["experience.replay={draw_every: 2, half_life: 2.0}", "experience.record=true"],
    "late and mixed": [
        "experience.late={longest: 3, deadline: 2}",
        "experience.mix={store: {folder}/store, share: 0.25}",
        "experience.record=true",
    ],
    "warm start": [WARM_START],
}
# With a limit of 0 an asynchronous run has the numbers of a synchronous one; otherwise timing decides.
ASYNC = {"asynchronous": ["regime.mode=async", "regime.max_staleness=0", "experience.record=true"]}
WAYS = ("event", "moment", "row")


def kills(place: Place, count: int, seed: int, modes: dict[str, list[str]] = MODES) -> Iterator[Outcome]:
    """About `count` kills, shared out over the modes; every run that was killed has to end as one that was not."""
    share = -(-count // len(modes))
    for number, (name, settings) in enumerate(modes.items()):
        options = [*OPTIONS, *(setting.replace("{folder}", str(place.folder)) for setting in settings)]
        yield from _of_one_mode(place, name, options, share, np.random.default_rng([seed, 1, number]))


def _of_one_mode(
    place: Place, name: str, options: list[str], count: int, generator: np.random.Generator
) -> Iterator[Outcome]:
    folder = place.folder / "kills" / name.replace(" ", "_")
    folder.mkdir(parents=True)
    straight, cache, fault = folder / "straight", str(folder / "cache"), f"SIGKILL, {name}"
    begun = time.monotonic()
    status, said = run(place, options, straight, cache=str(folder / "straight_cache"))
    seconds = time.monotonic() - begun
    if status:
        yield Outcome(fault, "NOT", f"the run without a kill ended with {status}: {said[-300:]}")
        return
    tried, runs, wrong = [], [folder / "run0"], []
    while len(tried) < count and len(runs) < 5 * count:
        way = WAYS[(len(tried) + len(runs)) % len(WAYS)]
        status, said = _killed(place, options, runs[-1], cache, way, seconds, generator)
        if status == -signal.SIGKILL:
            tried.append(way)
        elif status:
            wrong.append(f"after {tried} it ended with {status}: {said[-300:]}")
            break
        if is_finished(load_config(place.config, [*options, f"output={runs[-1]}"])):  # the next one begins anew
            wrong.append(differs(runs[-1], straight))
            runs.append(folder / f"run{len(runs)}")
    status, said = run(place, options, runs[-1], cache=cache)
    wrong.append(differs(runs[-1], straight) if status == 0 else f"after {tried} it ended with {status}: {said[-300:]}")
    bad = "; ".join(filter(None, wrong))
    for _ in tried:
        yield Outcome(fault, "NOT" if bad else "as without", bad)


def _killed(
    place: Place, options: list[str], output: Path, cache: str, way: str, seconds: float, generator: np.random.Generator
) -> tuple[int, str]:
    """Status and words of a run that is killed on one of three ways, unless it ends before."""
    if way == "event":
        arguments = (place.config, [*options, f"output={output}"], str(place.folder / "jax"))
        kill_at = int(generator.integers(1, 90))
        process = place.forks.Process(target=trained, args=(*arguments, kill_at, cache))
        process.start()
        process.join(300)
        if process.is_alive():
            process.kill()
            return -1000, f"it hangs at event {kill_at}"
        return process.exitcode, f"event {kill_at}"
    started = start(place, options, output, cache=cache)
    if way == "moment":
        started.process.join(float(generator.uniform(0.05, 1.0)) * seconds)
    else:
        step, metrics = int(generator.integers(0, 12)), output / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while started.process.is_alive() and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_bytes().count(b"\n") > step:
                break
            time.sleep(0.005)
    started.process.kill()
    return started.ended()
