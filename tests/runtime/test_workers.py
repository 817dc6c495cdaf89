"""What a worker starts ends with it, whichever way the worker ends; other workers go on."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from recjax.errors import UserError
from recjax.runtime.event_loop import run_to_end
from recjax.runtime.workers import CallFailed, DaemonThreads, Workers
from tests import leftovers
from tests.training.tiny_run import TINY


@pytest.fixture
def pids(tmp_path):
    """A file of process ids; whatever a test leaves is gone after it."""
    path = tmp_path / "pids"
    path.touch()
    yield str(path)
    for pid in [pid for file in tmp_path.iterdir() for pid in leftovers.alive(file)]:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        pytest.param("hang", "timeout", marks=pytest.mark.slow),
        ("crash", "crash"),
        ("end its group", "crash"),
        ("return", None),
    ],
)
def test_what_a_call_starts_ends_with_its_worker(pids, then, reason):
    others = f"{pids}_of_the_other"
    Path(others).touch()
    with Workers(2, 20.0, "tests.leftovers") as workers:
        # Each worker takes one of the two calls.
        call = workers.call(leftovers.leave, pids, then, seconds=3.0)
        other = workers.call(leftovers.leave, others, "return")
        assert other.result() == "left"
        if reason:
            with pytest.raises(CallFailed) as failure:
                call.result()
            assert failure.value.reason == reason
            assert leftovers.alive_after(pids, 20) == []
        else:
            assert call.result() == "left"
            assert len(leftovers.alive(pids)) == leftovers.WAYS
        # A worker that has not ended keeps what it started.
        assert len(leftovers.alive(others)) == leftovers.WAYS
        assert workers.call(len, "abc").result() == 3
    assert leftovers.alive(pids) == [] == leftovers.alive(others)


def test_a_killed_program_takes_its_calls_along(pids):
    with Workers(1, 20.0, "tests.leftovers") as workers:
        assert workers.call(leftovers.leave, pids, "return").result() == "left"
        os.kill(workers._program.pid, signal.SIGKILL)
        assert leftovers.alive_after(pids, 20) == []
        with pytest.raises(UserError, match="ended by themselves"):
            workers.call(len, "abc").result()


@pytest.mark.parametrize("then", ["return", "hang"])
def test_what_a_call_starts_ends_with_a_killed_parent(pids, then):
    program = (
        "import time\nfrom recjax.runtime.workers import Workers\nfrom tests import leftovers\n"
        "workers = Workers(1, None, 'tests.leftovers')\n"
        f"workers.call(leftovers.leave, {pids!r}, {then!r})\n"
        f"while len(leftovers.alive({pids!r})) < leftovers.WAYS: time.sleep(0.05)\n"
        "print('left', flush=True)\ntime.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "left\n"
        parent.kill()
    assert leftovers.alive_after(pids, 20) == []


def test_a_child_that_a_call_forks_answers_no_calls():
    with Workers(1, 20.0, "tests.leftovers") as workers:
        calls = [workers.call(leftovers.forked, number) for number in range(16)]
        assert [call.result() for call in calls] == list(range(16))


def test_an_unreadable_result_fails_only_its_call():
    with Workers(1, 20.0, "tests.leftovers") as workers:
        # The first call keeps the worker busy, so that it gets several later calls at once.
        calls = [workers.call(leftovers.forked, 0)]
        unpickled = workers.call(CallFailed, "error", "such an exception is pickled without its reason")
        calls += [workers.call(leftovers.forked, number) for number in range(6, 12)]
        with pytest.raises(CallFailed, match="TypeError") as failure:
            unpickled.result()
        assert failure.value.reason == "error"
        assert [call.result() for call in calls] == [0, *range(6, 12)]


@pytest.mark.slow
def test_an_importing_program_ends_with_its_parent(tmp_path):
    (tmp_path / "slow_module.py").write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    program = "from recjax.runtime.workers import Workers\nWorkers(1, None, 'slow_module').call(len, 'a').result()"
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path) as parent:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        parent.kill()
    assert leftovers.alive_after(tmp_path / "pid", 20) == []


@pytest.mark.slow
def test_a_module_that_starts_workers_is_refused_in_workers(tmp_path):
    (tmp_path / "chain.py").write_text(
        "from recjax.runtime.workers import Workers\nprint(Workers(1, None, 'chain').call(len, 'a').result())\n"
    )
    done = subprocess.run([sys.executable, "chain.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "worker processes: cannot start in a module that worker processes import" in done.stderr
    assert "the worker processes ended by themselves" in done.stderr


def test_daemon_threads_call_in_order_and_start_as_needed():
    names = set()

    def wait(event, number):
        names.add(threading.get_ident())
        event.wait(20)
        return number

    def fails():
        raise SystemExit("of a user's function")

    gates = [threading.Event() for _ in range(40)]
    threads = DaemonThreads(64, "many")
    futures = [threads.submit(wait, gate, number) for number, gate in enumerate(gates)]
    for gate in reversed(gates):
        gate.set()
    assert [future.result(20) for future in futures] == list(range(40)) and len(names) == 40
    with pytest.raises(SystemExit):
        threads.submit(fails).result(20)
    one = DaemonThreads(1, "one")
    order = []
    blocked = threading.Event()
    first = one.submit(blocked.wait, 20)
    done = [one.submit(order.append, number) for number in range(9)]
    blocked.set()
    assert first.result(20) and [future.result(20) for future in done] and order == list(range(9))
    blocked.clear()
    one.submit(blocked.wait, 20)
    waiting = one.submit(order.append, 9)
    one.shutdown()
    assert waiting.cancelled()
    blocked.set()


@pytest.mark.slow
def test_a_reward_that_hangs_does_not_keep_the_process():
    program = (
        "import time\nfrom recjax.runtime.workers import DaemonThreads\n"
        "DaemonThreads(1, 'grading').submit(time.sleep, 1000)\n"
        "import asyncio\nfrom recjax.runtime.event_loop import run_to_end\n"
        "import threading\n"
        "threading.Thread(target=run_to_end, args=[asyncio.to_thread(time.sleep, 1000)], daemon=True).start()\n"
        "time.sleep(0.5)\nprint('ended', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("ended\n", 0), done.stderr


def test_forty_blocking_calls_of_agents_run_at_once():
    together = threading.Barrier(40, timeout=20)

    async def agents():
        await asyncio.gather(*(asyncio.to_thread(together.wait) for _ in range(40)))

    run_to_end(agents())


@pytest.mark.slow
def test_a_second_interrupt_ends_a_run_whose_reward_hangs(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "hanging.py").write_text(
        "import time\ndef reward(*_):\n    print('it hangs', flush=True)\n    time.sleep(1000)\n"
    )
    command = [
        sys.executable,
        "-m",
        "recjax.train",
        "--config",
        "tiny.yaml",
        "output=run",
        "task.reward=hanging:reward",
    ]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **options) as process:
        try:
            # Two signals that arrive while XLA compiles would be one, so the second waits for the first one's message.
            for said in ("it hangs", "press Ctrl-C again"):
                while said not in process.stdout.readline():
                    assert process.poll() is None
                process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
