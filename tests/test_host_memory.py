"""Commands get huge pages where the system has them for those who ask, and begin anew for that once."""

import os
import subprocess
import sys

import pytest

from recjax import host_memory


@pytest.mark.parametrize(
    ("pages", "version", "given", "expected"),
    [
        ("madvise", "glibc 2.36", "", "glibc.malloc.hugetlb=1"),
        ("madvise", "glibc 2.36", "glibc.malloc.check=3", "glibc.malloc.check=3:glibc.malloc.hugetlb=1"),
        ("madvise", "glibc 2.36", "glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
        ("madvise", "glibc 2.35", "", "glibc.malloc.hugetlb=1"),
        ("madvise", "glibc 2.9", "", ""),
        ("madvise", "", "", ""),
        ("always", "glibc 2.36", "", ""),
        ("never", "glibc 2.36", "", ""),
        ("", "glibc 2.36", "", ""),
    ],
)
def test_the_variable_is_set_where_it_helps(pages, version, given, expected):
    assert host_memory.tunables_for(pages, version, given) == expected


def test_a_command_begins_anew_once(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    command = [sys.executable, "-X", "importtime", "-m", "recjax.train", f"--config={tmp_path / 'none.yaml'}"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.count("none.yaml") == 1
    anew = host_memory.tunables_for(host_memory._huge_pages(), os.confstr("CS_GNU_LIBC_VERSION") or "", "") != ""
    assert sum(line.endswith(" recjax.host_memory") for line in ended.stderr.splitlines()) == 1 + anew


def test_a_test_is_no_command():
    assert not host_memory._is_command()
