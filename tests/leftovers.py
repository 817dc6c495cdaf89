"""Calls that start processes and leave them behind, for worker processes; imports nothing heavy."""

import os
import signal
import subprocess
import time
from pathlib import Path

WAYS = 6  # in which `leave` starts a process


def leave(pids: str, then: str) -> str:
    """Starts processes in all ways that a tool may; each writes its process id to the file `pids`."""
    command = f"echo $$ >> {pids}; exec sleep 1000"
    subprocess.Popen(["sh", "-c", command])
    subprocess.Popen(["sh", "-c", f"(echo $(exec sh -c 'echo $PPID') >> {pids}; sleep 1000); true"])
    subprocess.Popen(["sh", "-c", command], start_new_session=True)
    subprocess.Popen(["sh", "-c", command], process_group=0)
    subprocess.run(["sh", "-c", f"setsid sh -c '{command}' & true"], check=True)  # its parent has ended
    if os.fork() == 0:  # no other program, a session of its own, and deaf to what asks it to end
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        with open(pids, "a") as file:
            file.write(f"{os.getpid()}\n")
        while True:
            time.sleep(0.01)
    while len(Path(pids).read_text().split()) < WAYS:
        time.sleep(0.01)
    if then == "hang":
        time.sleep(1000)
    if then == "crash":
        os._exit(1)
    if then == "end its group":
        os.killpg(0, signal.SIGKILL)
    return "left"


def alive(pids: str) -> list[int]:
    """Those of the processes that have not ended."""
    running = []
    for pid in Path(pids).read_text().split():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        # Z has ended, and X is being removed at this moment.
        if stat.rpartition(")")[2].split()[0] not in "ZX":
            running.append(int(pid))
    return running


def alive_after(pids: str, seconds: float) -> list[int]:
    """Those of the processes that have still not ended after some seconds, or none as soon as all have."""
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive(pids)


def forked(number: int) -> int:
    """The number; the child that call 2 forks returns another one, and that of call 5 raises."""
    if number in (2, 5) and os.fork() == 0:
        time.sleep(0.1)
        if number == 5:
            raise RuntimeError("a child")
        return -100
    time.sleep(0.02)
    return number
