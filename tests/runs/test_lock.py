"""The lock of a run's folder: one holder, named to all others; the dead hold nothing."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from recjax.runs import lock as run_lock
from recjax.runs.lock import NAME, held

HOLDER = """
import sys, time
from pathlib import Path
from recjax.runs.lock import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""

TWO_MOUNTS = """
mkdir lower upper work_a work_b host_a host_b
for host in a b; do
    mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work_$host host_$host || exit 77
done
mkdir host_a/run
"$0" -c "$1" host_a/run >holder.log &
until grep -q held holder.log; do sleep 0.1; done
"$0" -c "$2" host_b/run
rc=$?
kill $!
exit $rc
"""
CONTENDER = """
import socket, sys
from pathlib import Path
import filelock
from recjax.runs.lock import NAME, held
run = Path(sys.argv[1])
socket.gethostname = lambda: "elsewhere"
with filelock.FileLock(run / NAME, timeout=0):
    print("flock does not see the other mount")
with held(run):
    print("both hold the folder")
"""


def left_by(folder, host, pid, seconds_ago):
    """A lock's file as a process leaves it."""
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_text(json.dumps({"host": host, "pid": pid, "since": "2026-01-01T00:00:00+00:00"}))
    os.utime(folder / NAME, (time.time() - seconds_ago,) * 2)


@pytest.mark.slow
def test_second_holder_is_refused_by_name(tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"in use: process {process.pid} on host {socket.gethostname()}, since"):
        with held(run):
            pass
    assert json.loads((run / NAME).read_text())["pid"] == process.pid  # the refused one changed nothing
    process.kill()
    process.wait()
    with held(run):
        assert json.loads((run / NAME).read_text())["pid"] == os.getpid()
    assert not (run / NAME).exists()


def test_a_holder_that_has_just_begun_is_named(tmp_path, monkeypatch):
    names = iter([None, None, run_lock.Holder("here", 7, "now")])
    monkeypatch.setattr(run_lock, "_locked", lambda *_: False)
    monkeypatch.setattr(run_lock, "_holder_at", lambda _: next(names))
    with pytest.raises(ValueError, match="in use: process 7 on host here"), held(tmp_path):
        pass


def test_folder_made_for_the_lock_is_removed(tmp_path):
    with held(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with held(tmp_path / "old"):
        pass
    assert (tmp_path / "old").is_dir()


def test_other_hosts_holder_counts_while_it_shows_life(tmp_path):
    left_by(tmp_path, "elsewhere", 7, seconds_ago=20)
    with pytest.raises(ValueError, match=f"process 7 on host elsewhere.*delete {tmp_path / NAME}"):
        with held(tmp_path):
            pass
    left_by(tmp_path, "elsewhere", 7, seconds_ago=-3600)  # this host's clock was set back
    with pytest.raises(ValueError, match="process 7 on host elsewhere"):
        with held(tmp_path):
            pass
    left_by(tmp_path, "elsewhere", 7, seconds_ago=run_lock.STALE_SECONDS + 5)
    with held(tmp_path) as lock:
        lock.check()


@pytest.mark.slow
def test_shared_folder_with_local_locks_has_one_holder(tmp_path):
    """Two mounts of a folder, which keep their locks to themselves as gcsfuse and NFS with `nolock` do."""
    command = ["unshare", "--mount", "sh", "-c", TWO_MOUNTS, sys.executable, HOLDER, CONTENDER]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr}")
    assert done.stdout == "flock does not see the other mount\n"
    assert "host_b/run': is in use: process" in done.stderr


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_holder_without_file_locks_counts_while_alive(tmp_path, monkeypatch, number):
    def no_locks(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    left_by(tmp_path, socket.gethostname(), 7, seconds_ago=20)
    with pytest.raises(ValueError, match="process 7"):
        with held(tmp_path):
            pass
    left_by(tmp_path, socket.gethostname(), 7, seconds_ago=run_lock.STALE_SECONDS + 5)
    with held(tmp_path):
        with pytest.raises(ValueError, match=f"process {os.getpid()}"):
            with held(tmp_path):
                pass


@pytest.mark.parametrize("content", ["", "{", '{"host": 1}', "\0" * 50])
def test_a_damaged_record_that_nobody_holds_is_taken_over(tmp_path, content):
    (tmp_path / NAME).write_text(content)
    with held(tmp_path) as lock:
        lock.check()


def test_signs_of_life_are_given(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.05)
    with held(tmp_path):
        os.utime(tmp_path / NAME, (0, 0))
        deadline = time.monotonic() + 10
        while (tmp_path / NAME).stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (tmp_path / NAME).stat().st_mtime > 0


def test_a_holder_notices_what_becomes_of_its_folder(tmp_path):
    with held(tmp_path) as lock:
        lock.check()
        left_by(tmp_path, "elsewhere", 7, seconds_ago=0)
        with pytest.raises(ValueError, match="taken over the folder .process 7 on host elsewhere"):
            lock.check()
    assert (tmp_path / NAME).exists()  # of the other one
    (tmp_path / NAME).unlink()
    with held(tmp_path) as lock:
        (tmp_path / NAME).unlink()
        with pytest.raises(ValueError, match="was deleted during the run"):
            lock.check()


@pytest.mark.parametrize("place", ["file", "file/inner", "/proc/recjax"])
def test_impossible_folder_is_refused_by_name(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=f"{place}.*cannot be written"):
        with held(tmp_path / place):
            pass
