"""A trace has the steps that the config names, whole, and what they were at; other runs have none."""

import contextlib
import gzip
import json
from pathlib import Path

import jax
import pytest

from recjax.training import loop
from recjax.training.profile import profiled_steps
from tests.commands import said, two_of
from tests.training.counting import count, killed
from tests.training.tiny_run import without_times

# Processes that trace a step with a mark in it.
MARKED = """
import sys
from pathlib import Path
import jax
from recjax.runtime import hosts
from recjax.training.profile import profiled_steps
folder, coordinator, processes, number = sys.argv[1:]
with hosts.connected(coordinator, int(processes), int(number)):
    for step in profiled_steps(1, 3, [2, 2], Path(folder), lambda: None):
        with jax.profiler.TraceAnnotation(f"mark of process {number}"):
            hosts.wait_for_all(f"step {step}")
"""


def events(folder, name):
    """What one session's trace has of that name."""
    (trace,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    assert trace.with_name(trace.name.replace("trace.json.gz", "xplane.pb")).stat().st_size > 0
    found = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event for event in found if event.get("name") == name]


@pytest.mark.slow
def test_a_trace_has_the_named_steps_and_their_phases(tiny):
    config = tiny("run", "training.profile_steps=[2, 3]", "training.steps=4", "evaluation.every=0")
    rows = count(config)
    folder = Path(config.output) / "profile"
    assert [event["args"]["step_num"] for event in events(folder, "step")] == ["2", "3"]
    assert [path.name for path in folder.glob("plugins/profile/*")] == ["steps_2_to_3"]
    assert len(events(folder, "sample")) >= 2
    # The dispatch of two updates, and the reading of the first; the second is waited for by the trace itself.
    assert len(events(folder, "checkpoint")) == 1 and len(events(folder, "update")) >= 3
    assert without_times(rows) == without_times(count(tiny("plain", "training.steps=4", "evaluation.every=0")))


@pytest.mark.slow
def test_processes_of_one_host_write_traces_of_their_own(tmp_path, ended):
    ended += (processes := two_of(tmp_path, ["-c", MARKED, tmp_path / "profile"]))
    assert [process.wait(240) for process in processes] == [0, 0], said(tmp_path, 0) + said(tmp_path, 1)
    sessions = sorted((tmp_path / "profile" / "plugins" / "profile").iterdir())
    assert [path.name for path in sessions] == ["steps_2_to_2_process_0", "steps_2_to_2_process_1"]
    for number, session in enumerate(sessions):
        (trace,) = session.glob("*.trace.json.gz")
        assert list(session.glob("*.xplane.pb"))
        names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
        assert {name for name in names if str(name).startswith("mark")} == {f"mark of process {number}"}


def test_resumed_run_traces_only_its_own_steps(tiny, monkeypatch):
    for at, options in ((5, []), (2, ["training.profile_steps=[1, 3]"])):  # the last checkpoint is that of step 3
        with pytest.raises(KeyboardInterrupt):
            count(tiny("run", *options), killed(at))
    assert not (Path(tiny("run").output) / "profile").exists()
    count(tiny("run", "training.profile_steps=[2, 5]"))
    assert [step["args"]["step_num"] for step in events(Path(tiny("run").output) / "profile", "step")] == ["4", "5"]


@pytest.mark.parametrize(
    ("first", "traced", "order"),
    [
        (1, [2, 3], "1 wait start 2 3 wait stop 4"),
        (1, [1, 4], "wait start 1 2 3 4 wait stop"),
        (3, [1, 3], "wait start 3 wait stop 4"),
        (3, [1, 2], "3 4"),
        (1, None, "1 2 3 4"),
    ],
)
def test_traces_start_and_end_with_idle_devices(monkeypatch, tmp_path, first, traced, order):
    seen = []

    @contextlib.contextmanager
    def trace(*args, **options):
        seen.append("start")
        yield
        seen.append("stop")

    monkeypatch.setattr(jax.profiler, "trace", trace)
    for step in profiled_steps(first, 4, traced, tmp_path, lambda: seen.append("wait")):
        seen.append(str(step))
    assert " ".join(seen) == order


def test_started_trace_is_written_when_a_run_fails(tiny, monkeypatch):
    monkeypatch.setattr(loop, "next_groups", lambda *args: 1 / 0)
    config = tiny("run", "training.profile_steps=[1, 3]")
    with pytest.raises(ZeroDivisionError) as failure:  # kept, for it holds what the loop left open
        count(config)
    assert list((Path(config.output) / "profile").glob("plugins/profile/*/*.xplane.pb"))
    with jax.profiler.trace(str(Path(config.output) / "another")):  # refused while one is under way
        assert failure.traceback
