"""A row of the array with its files: runs it, also with other options and to a kill."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from recjax.config import Config, to_yaml
from tests.pairs.covering import Row, named, options_of
from tests.pairs.materials import Materials
from tests.pairs.running import Finished, finished

MOST_SECONDS = 900  # of a run in two processes


class Case:
    """A row of the array, whose runs have folders of their own."""

    def __init__(self, row: Row, materials: Materials, folder: Path):
        """Takes a folder for the runs."""
        self.row = row
        self.name = named(row)
        self._materials = materials
        self._folder = folder

    def config(self, name: str, options: Sequence[str] = ()) -> Config:
        """The config of a run with this name."""
        return self._materials.config(*options_of(self.row), f"output={self._folder / name}", *options)

    def run(self, name: str, options: Sequence[str] = (), fresh: bool = True) -> Finished:
        """Runs it to the end.

        Args:
            fresh: False to resume what the folder holds.
        """
        if fresh:
            shutil.rmtree(self._folder / name, ignore_errors=True)
        return finished(self.config(name, options))

    def in_two_processes(self, name: str, options: Sequence[str] = ()) -> None:
        """Runs it to the end in two processes of two devices each.

        Raises:
            RuntimeError: one of them fails.
        """
        shutil.rmtree(self._folder / name, ignore_errors=True)
        file = self._folder / f"{name}.yaml"
        file.write_text(to_yaml(self.config(name, options)))
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
        command = [sys.executable, "-m", "recjax.train", "--config", str(file), "--coordinator", address]
        command += ["--processes", "2", "--process_id"]
        options_of_both = {"env": os.environ | flags, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        both = [subprocess.Popen([*command, str(number)], text=True, **options_of_both) for number in range(2)]
        try:
            for process in both:
                _, said = process.communicate(timeout=MOST_SECONDS)
                if process.returncode:
                    raise RuntimeError(f"a process of two ends with {process.returncode}: {said[-500:]}")
        finally:
            for process in both:
                process.kill()

    def killed(self, name: str, at: int) -> bool:
        """Runs it until it is killed in place of update number `at`; False if it ends before."""
        shutil.rmtree(self._folder / name, ignore_errors=True)
        try:
            finished(self.config(name), kill_at=at)
        except KeyboardInterrupt:
            return True
        return False
