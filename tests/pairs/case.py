"""A row of the array with its files: runs it, also with other options and to a kill."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from recjax.config import Config
from tests.pairs.covering import Row, named, options_of
from tests.pairs.materials import Materials
from tests.pairs.running import Finished, finished


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

    def killed(self, name: str, at: int) -> bool:
        """Runs it until it is killed in place of update number `at`; False if it ends before."""
        shutil.rmtree(self._folder / name, ignore_errors=True)
        try:
            finished(self.config(name), kill_at=at)
        except KeyboardInterrupt:
            return True
        return False
