"""The newest weights of a run that is trained by another process, as its checkpoints come.

The two meet in files alone: the run may not have begun, may be dead, and deletes its checkpoints or sets them aside at
any time.
"""

import logging
import time
from pathlib import Path

from recjax.hub.policy import Policy
from recjax.manifest import NAME
from recjax.rollout.requests import Weights
from recjax.training.checkpoint import check_whole, progress, steps_of
from recjax.training.run_folder import check_config_file
from recjax.training.trained import checkpoint_reader, run_config

logger = logging.getLogger(__name__)

FIRST_SECONDS = 0.5  # from one look for the first checkpoint to the next
LINE_SECONDS = 10.0  # between two lines that say what is waited for

Stamp = tuple[int, int, int]  # what tells a checkpoint from any other: its step, and its manifest's inode and time


class FollowedRun:
    """Reads the newest whole checkpoint of a run, whenever there is another one."""

    def __init__(self, run: Path):
        """Reads nothing yet; the folder need not be there."""
        self._run, self._folder = run, run / "checkpoints"
        self._config, self._reader = None, None
        self._taken: Stamp | None = None
        self._refused: set[Stamp] = set()

    @property
    def policy(self) -> Policy:
        """What the run trains, without adapters; there is one after `first`."""
        return self._reader.policy

    def first(self) -> Weights:
        """The newest weights, which are waited for, and a line says so.

        Raises:
            ValueError: the run's config cannot be used.
        """
        said = time.monotonic() - LINE_SECONDS
        while (weights := self._first()) is None:
            if time.monotonic() - said >= LINE_SECONDS:
                said = time.monotonic()
                logger.info("waits for the first checkpoint of %s", self._run)
            time.sleep(FIRST_SECONDS)
        return weights

    def _first(self) -> Weights | None:
        # With a checkpoint the run has written its config, and what a warm start makes.
        if self._reader is None and self._stamps():
            self._config = run_config(self._run)
            self._reader = checkpoint_reader(self._run, self._config)
        return self.newer() if self._reader else None

    def newer(self) -> Weights | None:
        """The newest whole weights, on the host, if they are others than those that were given last.

        A run that has gone back, because its newest checkpoint was damaged, is followed back.
        """
        for stamp in self._stamps():
            if stamp == self._taken:
                return None
            if stamp in self._refused:
                continue
            try:
                step = stamp[0]
                check_whole(self._folder, step)
                said = progress(self._folder, step)
                check_config_file(self._run, self._config, said)
                weights = Weights(self._reader.params(step), step, said.get("totals", {}).get("run"))
            except Exception as error:  # Orbax has errors of its own
                if stamp not in self._stamps():
                    continue  # it was being deleted
                self._refused.add(stamp)
                logger.warning("the checkpoint of step %d is not taken: %s", step, error)
                continue
            self._taken = stamp
            return weights
        return None

    def _stamps(self) -> list[Stamp]:
        """Of the checkpoints that have a manifest, which is written last; the newest first."""
        found = []
        for step in reversed(steps_of(self._folder)):
            try:
                status = (self._folder / str(step) / NAME).stat()
            except OSError:
                continue
            found.append((step, status.st_ino, status.st_mtime_ns))
        return found
