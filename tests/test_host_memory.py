"""Commands begin anew, once, with what glibc reads as a process starts."""

import os
import subprocess
import sys

from recjax import host_memory
from recjax.host_memory import with_tunables


def test_what_the_user_says_stays():
    all_of_them = with_tunables("")
    assert all_of_them.count(":") == len(host_memory.TUNABLES) - 1 and "glibc.malloc.hugetlb=1" in all_of_them
    assert with_tunables(all_of_them) == all_of_them
    own = with_tunables("glibc.malloc.check=3:glibc.malloc.hugetlb=0")
    assert own.startswith("glibc.malloc.check=3:glibc.malloc.hugetlb=0:glibc.malloc.arena_max=1:")
    assert own.count("hugetlb") == 1


def test_a_command_begins_anew_once(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    command = [sys.executable, "-X", "importtime", "-m", "recjax.train", f"--config={tmp_path / 'none.yaml'}"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.count("none.yaml") == 1
    starts = sum(line.endswith(" recjax.host_memory") for line in ended.stderr.splitlines())
    assert starts == 1 + host_memory._has_glibc()


def test_a_test_is_no_command():
    assert not host_memory._is_command()
